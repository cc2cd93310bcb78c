"""cute_fa as an attention of Hugging Face transformers: ``register()``, then ``attn_implementation="cute_fa"``.

transformers asks twice. For a forward pass of the model it asks a mask function for the mask of all layers, with a
function of positions that says which keys a query sees. For each layer it then asks an attention function, which gets
that mask. The two speak so here:

    None           no padding; the layer says whether it is causal, the last query at the last key
    (B, n)         causal: keys 0 to n, False where padding is; the last query at key n - 1
    (B, 1, S_k)    not causal: all keys, False where padding is

What a model wants beyond that (a pattern of its own, packed sequences, a window that hides keys) is refused when the
mask is asked for; softcap, sinks and biases when attention is.
"""

from __future__ import annotations

import functools

import torch

from cute_fa.api import forward
from cute_fa.compat.arguments import refuse_dropout
from cute_fa.problem import ScoreOptions
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
        local_size: the window or chunk, where there is one; serves the error's text.

    Raises:
        NotImplementedError: ``mask_function`` is neither causal nor full at these positions.
    """
    q_offset = int(q_offset)
    seen = q_offset + q_length - kv_offset  # the keys up to the last query's own
    causal = _is_causal(
        mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, local_size, use_vmap, device
    )
    length = min(seen, kv_length) if causal else kv_length
    if causal and seen > kv_length:
        raise NotImplementedError(f"kv_length must reach the last query ({seen} keys), got {kv_length}")
    if attention_mask is None:
        valid = torch.ones(batch_size, length, dtype=torch.bool, device=device)
    else:
        valid = torch.zeros(batch_size, length, dtype=torch.bool, device=device)
        known = attention_mask[:, kv_offset : kv_offset + length].to(valid)
        valid[:, : known.shape[1]] = known
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
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    elif attention_mask.dtype == torch.bool and attention_mask.dim() in (2, 3):
        causal = attention_mask.dim() == 2
    else:
        raise NotImplementedError(
            f"attention_mask must be padding, (batch, tokens), for {NAME}, not a mask of one's own, got "
            f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        )
    causal = causal and q.shape[1] > 1
    options = ScoreOptions(
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, -1 if causal else sliding_window - 1),
        softcap=0.0 if softcap is None else softcap,
        sinks=s_aux,
        attn_bias=position_bias,
    )
    if attention_mask is not None:
        valid = attention_mask if attention_mask.dim() == 2 else attention_mask[:, 0]
        k, v = k[:, : valid.shape[1]], v[:, : valid.shape[1]]
        if not valid.all():
            return _padded(q, k, v, valid, attention_mask.dim() == 2, scaling, options), None
    o = forward(q, k, v, causal=causal, softmax_scale=scaling, backward=backward, options=options)
    return o, None


def _padded(q, k, v, valid: torch.Tensor, causal: bool, scale, options: ScoreOptions) -> torch.Tensor:
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
        options=options,
    )
    return o


def _bounds(real: torch.Tensor) -> torch.Tensor:
    """Where each member's tokens begin once those that are False are left out."""
    return torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()


def _is_causal(
    mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, local_size, use_vmap, device
) -> bool:
    """Whether the pattern is causal, or full: known by the function, else looked at for every query and key."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return mask_function is causal_mask_function

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
        return True
    if is_everywhere(bidirectional_mask_function):
        return False
    window = "" if local_size is None else f", here with a window or chunks of {local_size}"
    raise NotImplementedError(
        f"mask_function must be causal or full for {NAME}: windows and chunks that hide keys, packed sequences and "
        f"other patterns are not supported yet{window}; attn_implementation='sdpa' or 'eager' serves them"
    )
