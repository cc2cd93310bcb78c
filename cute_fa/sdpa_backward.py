"""Gradients of attention by way of PyTorch: its scaled_dot_product_attention, computed again and differentiated."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_o: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q (B, S_q, H, D), k and v (B, S_k, H_kv, D) for the gradient of o (B, S_q, H, D).

    A query that sees no key has an output of 0 whatever its inputs are, so it gives and gets none.

    Raises:
        NotImplementedError: a second derivative was asked for (create_graph=True).
    """
    if torch.is_grad_enabled():
        raise NotImplementedError('backward="sdpa" has first derivatives only: create_graph must be False')
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    blind = seqlen_q - seqlen_k if causal and seqlen_q > seqlen_k else 0
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        query, key, value = (tensor.transpose(1, 2) for tensor in (inputs[0][:, blind:], *inputs[1:]))
        # What remains has at least as many keys as queries; as many, and both corners of the mask are the same.
        square = bool(seqlen_q - blind == seqlen_k)
        mask = None if square or not causal else _lower_right(seqlen_q - blind, seqlen_k, k)
        o = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal and square,
            scale=softmax_scale,
            enable_gqa=bool(q.shape[2] != k.shape[2]),
        )
    return torch.autograd.grad(o, inputs, grad_o[:, blind:].transpose(1, 2))


def _lower_right(seqlen_q: int, seqlen_k: int, like: torch.Tensor) -> torch.Tensor:
    """The causal mask whose last query sees the last key: PyTorch's own, which its fused kernels know, or for a tracer,
    which can't make that one, all S_q S_k values of it."""
    if type(like) is torch.Tensor:
        return causal_lower_right(seqlen_q, seqlen_k)
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=like.device).tril(seqlen_k - seqlen_q)
