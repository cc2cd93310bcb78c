"""``torch.nn.functional.scaled_dot_product_attention``, as PyTorch 2.11 has it."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from cute_fa.api import forward
from cute_fa.compat.arguments import refuse_dropout, require_bool
from cute_fa.problem import check_bias, require_tensor


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    backward: str | None = None,
) -> torch.Tensor:
    """PyTorch's function of this name, argument by argument.

    Args:
        query: (B, H, S_q, D); key, value: (B, H_kv, S_k, D), fp16 or bf16, last dimension contiguous. In messages they
            are q, k and v, (B, S, H, D).
        attn_mask: what broadcasts to (B, H, S_q, S_k): bool with True where a key takes part, or added to the scores
            (fp32 or query's dtype); or ``causal_upper_left`` or ``causal_lower_right`` of torch.nn.attention.bias.
        dropout_p: 0.0.
        is_causal: query i sees keys up to i, aligned at the top left, as in PyTorch and unlike ``cute_fa.forward``.
        scale: 1 / sqrt(D) when None.
        enable_gqa: H may be a multiple of H_kv.
        backward: not an argument of PyTorch's: as in ``cute_fa.forward``. Without it gradients are refused.

    Returns:
        (B, H, S_q, D), a transposed view of (B, S_q, H, D). A query that sees no key gets 0.

    Raises:
        TypeError, ValueError, NotImplementedError: before a launch, naming the argument and what is allowed.
    """
    refuse_dropout(dropout_p)
    require_bool("is_causal", is_causal)
    require_bool("enable_gqa", enable_gqa)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, tensor, dims=("batch", "heads", "sequence", "head_dim"))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"enable_gqa must be True for key to have other heads than query ({query.shape[1]}), got {key.shape[1]}"
        )
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    upper_left = is_causal
    lower_right = False
    bias = None
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal must be False with an attn_mask, got True")
    if attn_mask is not None and not isinstance(attn_mask, CausalBias):
        check_bias("attn_mask", attn_mask, (query.shape[0], query.shape[1], seqlen_q, seqlen_k), query)
        bias = attn_mask
    elif attn_mask is not None:
        variant = _causal_variant(attn_mask, seqlen_q, seqlen_k)
        upper_left, lower_right = variant is CausalVariant.UPPER_LEFT, variant is CausalVariant.LOWER_RIGHT

    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if upper_left and seqlen_q < seqlen_k:
        k, v = k[:, :seqlen_q], v[:, :seqlen_q]  # no query sees the keys behind: what is left is square
    options = {"softmax_scale": scale, "backward": backward}
    if upper_left and seqlen_q > seqlen_k:
        # The first S_k queries are square with the keys, and the others see all of them.
        square = forward(q[:, :seqlen_k], k, v, causal=True, **options)
        o = torch.cat((square, forward(q[:, seqlen_k:], k, v, **options)), 1)
    else:
        o = forward(q, k, v, causal=upper_left or lower_right, attn_bias=bias, **options)
    return o.transpose(1, 2)


def _causal_variant(attn_mask: CausalBias, seqlen_q: int, seqlen_k: int) -> CausalVariant:
    """Which causal mask a PyTorch bias stands for."""
    lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if lengths != (seqlen_q, seqlen_k):
        raise ValueError(f"attn_mask must be for ({seqlen_q}, {seqlen_k}) queries and keys, got {lengths}")
    return attn_mask.variant
