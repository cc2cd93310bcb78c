"""cute_fa as an attention of Hugging Face transformers: ``register()``, then ``attn_implementation="cute_fa"``.

transformers asks twice. For a forward pass of the model it asks a mask function for the mask of all layers, with a
function of positions that says which keys a query sees. For each layer it then asks an attention function, which gets
that mask. The two speak so here:

    None             no padding; the layer says whether it is causal, the last query at the last key
    (B, n)           causal: keys 0 to n, False where padding is; the last query at key n - 1
    (B, W, n)        the same with a window of W >= 2 keys, the query's own the last: a view, each row the same
    (B, 1, S_k)      not causal: all keys, False where padding is
    (B, 1, S_q, S_k) any other pattern, all of it: chunks, packed sequences, a model's own
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from cute_fa.api import forward
from cute_fa.compat.arguments import refuse_dropout
from cute_fa.problem import NO_OPTIONS, ScoreOptions, check_bias
from cute_fa.varlen import forward_varlen

NAME = "cute_fa"
_PATTERN_ROWS = 1024  # queries whose pattern is looked at together: bounds the memory, S_k bytes each


def register(*, backward: str | None = None) -> None:
    """Adds "cute_fa" to transformers' attention functions and mask functions (written for transformers 5.24).

    Args:
        backward: as in ``cute_fa.forward``, of batches without padding; with None a model that trains is refused.

    Raises:
        ImportError: transformers isn't installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("cute_fa.register needs transformers: pip install 'cute_fa[transformers]'") from error
    AttentionInterface.register(NAME, functools.partial(attention, backward=backward))
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: torch.Tensor | None = None,
    *,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_for_other_implementations,
) -> torch.Tensor | None:
    """transformers' mask function: what ``attention`` needs to know of padding and length, see above.

    Args:
        q_offset, kv_offset: positions of the first query and key.
        mask_function: (batch, head, position of the query, of the key) -> whether the key is seen.
        attention_mask: (B, tokens), False or 0 where padding is.
        local_size: the window or chunk, where there is one.

    Raises:
        NotImplementedError: a causal mask with more queries than keys.
    """
    q_offset = int(q_offset)
    seen = q_offset + q_length - kv_offset  # the keys up to the last query's own
    place = (batch_size, q_length, kv_length, q_offset, kv_offset)
    pattern, window = _pattern(mask_function, *place, local_size, use_vmap, device)
    if pattern is None:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(
            *place, mask_function, attention_mask, allow_is_causal_skip=False, use_vmap=use_vmap, device=device
        )
    causal = pattern == "causal"
    length = min(seen, kv_length) if causal else kv_length
    if causal and seen > kv_length:
        raise NotImplementedError(f"kv_length must reach the last query ({seen} keys), got {kv_length}")
    if attention_mask is None:
        valid = torch.ones(batch_size, length, dtype=torch.bool, device=device)
    else:
        # Generation with a static cache asks twice, the second time with the first answer, which begins at kv_offset
        # already: it has fewer columns than there are tokens.
        padding = attention_mask[:, 0] if attention_mask.dim() == 3 else attention_mask
        first = kv_offset if padding.shape[1] >= q_offset + q_length else 0
        valid = torch.zeros(batch_size, length, dtype=torch.bool, device=device)
        known = padding[:, first : first + length].to(valid)
        valid[:, : known.shape[1]] = known
    if window is not None:
        return valid[:, None].expand(-1, window, -1)
    if causal:
        return None if allow_is_causal_skip and length == kv_length and valid.all() else valid
    return None if allow_is_bidirectional_skip and valid.all() else valid[:, None]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    backward: str | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query (B, H, S_q, D), key and value (B, H_kv, S_k, D) -> (B, S_q, H, D).

    Raises:
        NotImplementedError: for an argument that changes the result and isn't served, by its name.
        TypeError, ValueError: as ``cute_fa.forward``.
    """
    refuse_dropout(dropout)
    for name in ("cache", "block_table", "cu_seq_lens_q", "cu_seq_lens_k", "head_mask", "output_attentions"):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise NotImplementedError(f"{name} must be None for {NAME}: it is not supported, got {type(kwargs[name])}")
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    valid, bias, window = None, None, sliding_window
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    elif attention_mask.dtype == torch.bool and attention_mask.dim() in (2, 3):
        causal = attention_mask.dim() == 2 or attention_mask.shape[1] > 1
        valid = attention_mask if attention_mask.dim() == 2 else attention_mask[:, 0]
        if attention_mask.dim() == 3 and causal:
            window = min(attention_mask.shape[1], sliding_window or attention_mask.shape[1])
        k, v = k[:, : valid.shape[1]], v[:, : valid.shape[1]]
    else:
        causal, window, bias = False, None, attention_mask  # the pattern has all of it
        k, v = k[:, : bias.shape[-1]], v[:, : bias.shape[-1]]
        check_bias("attention_mask", bias, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), q)
    causal = causal and q.shape[1] > 1
    options = ScoreOptions.of(
        (-1, -1) if window is None else (window - 1, -1 if causal or q.shape[1] == 1 else window - 1),
        0.0 if softcap is None else float(softcap),
        None,
        s_aux,
        position_bias if position_bias is None else position_bias[..., : k.shape[1]],
    )
    if valid is not None and not valid.all():
        if options is NO_OPTIONS:
            return _padded(q, k, v, valid, attention_mask.dim() == 2, scaling), None
        bias = valid[:, None, None]
    if bias is not None:
        options = replace(options, attn_bias=_both(options.attn_bias, bias))
    o = forward(q, k, v, causal=causal, softmax_scale=scaling, backward=backward, **vars(options))
    return o, None


def _both(bias: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """A bias, if there is one, and a mask, additive or boolean."""
    if bias is None:
        return mask
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _padded(q, k, v, valid: torch.Tensor, causal: bool, scale) -> torch.Tensor:
    """Each member by itself, without its padding; queries that are padding get 0.

    The keys that count come in their order, and of a causal layer the queries are the last of them, so that leaving
    out the padding keeps the mask at the bottom right.
    """
    batch, seqlen_q = q.shape[:2]
    if causal:
        real = valid[:, valid.shape[1] - seqlen_q :]
    else:
        real = torch.ones(batch, seqlen_q, dtype=torch.bool, device=q.device)
    o = q.new_zeros(*q.shape[:3], v.shape[3])
    o[real], _ = forward_varlen(
        q[real],
        k[valid],
        v[valid],
        max_seqlen_q=seqlen_q,
        max_seqlen_k=k.shape[1],
        cu_seqlens_q=_bounds(real),
        cu_seqlens_k=_bounds(valid),
        causal=causal,
        softmax_scale=scale,
    )
    return o


def _bounds(real: torch.Tensor) -> torch.Tensor:
    """Where each member's tokens begin once those that are False are left out."""
    return torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()


def _pattern(
    mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, local_size, use_vmap, device
) -> tuple[str | None, int | None]:
    """("causal", a window or None), ("full", None), or (None, None) for any other: known by the function, else looked
    at for every query and key."""
    from transformers.masking_utils import (
        and_masks,
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
        sliding_window_overlay,
    )

    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return "causal" if mask_function is causal_mask_function else "full", None

    def is_everywhere(other) -> bool:
        for start in range(0, q_length, _PATTERN_ROWS):
            rows = min(_PATTERN_ROWS, q_length - start)
            place = (batch_size, rows, kv_length, q_offset + start, kv_offset)
            options = {"allow_is_causal_skip": False, "device": device}
            if not torch.equal(sdpa_mask(*place, mask_function, use_vmap=use_vmap, **options),
                               sdpa_mask(*place, other, **options)):  # fmt: skip
                return False
        return True

    if is_everywhere(causal_mask_function):
        return "causal", None
    if is_everywhere(bidirectional_mask_function):
        return "full", None
    if local_size is not None and local_size > 1:
        window = and_masks(sliding_window_overlay(local_size), causal_mask_function)
        if is_everywhere(window):
            return "causal", local_size
    return None, None
