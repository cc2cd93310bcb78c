"""Attention in float32 or float64, written for clarity; and how many operations a problem counts for."""

from __future__ import annotations

import math

import torch

from cute_fa.problem import AttentionProblem


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    round_probs_to: torch.dtype | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    attn_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention computed in ``dtype`` from upcast inputs, one head at a time.

    Args:
        q: (B, S_q, H, D); k: (B, S_k, H_kv, D); v: (B, S_k, H_kv, D_v).
        causal: aligned at the bottom right, as in ``cute_fa.forward``.
        round_probs_to: round the unnormalised probabilities to this type before the product with V, as a
            kernel on tensor cores must; the error of that is what such a kernel can at best attain.
        window_size, softcap, alibi_slopes, sinks, attn_bias: as in ``cute_fa.forward``.

    Returns:
        o (B, S_q, H, D_v) and lse (B, H, S_q), both in ``dtype``; a row that sees no key has 0 and -inf, or the sink.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, group = k.shape[1], num_heads // k.shape[2]
    scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    o = torch.empty(*q.shape[:3], v.shape[3], dtype=dtype, device=q.device)
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=dtype, device=q.device)
    left, right = window_size[0], 0 if causal else window_size[1]
    positions = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k, device=q.device)[None, :]
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if left >= 0:
        hidden |= keys < positions - left
    if right >= 0:
        hidden |= keys > positions + right
    if attn_bias is not None:
        attn_bias = attn_bias.expand(batch, num_heads, seqlen_q, seqlen_k)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(batch, num_heads).to(dtype)
    for b in range(batch):
        for h in range(num_heads):
            scores = (q[b, :, h].to(dtype) @ k[b, :, h // group].to(dtype).T) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores - alibi_slopes[b, h] * (positions - keys).abs()
            if attn_bias is not None and attn_bias.dtype == torch.bool:
                scores = scores.masked_fill(~attn_bias[b, h], -math.inf)
            elif attn_bias is not None:
                scores = scores + attn_bias[b, h].to(dtype)
            scores = scores.masked_fill(hidden, -math.inf)
            row_max = scores.amax(1, keepdim=True) if seqlen_k else scores.new_full((seqlen_q, 1), -math.inf)
            if sinks is not None:
                row_max = torch.maximum(row_max, sinks[h].to(dtype))
            reference = torch.where(row_max == -math.inf, 0.0, row_max)
            probs = torch.exp(scores - reference)
            row_sum = probs.sum(1, keepdim=True)
            if sinks is not None:
                row_sum = row_sum + torch.exp(sinks[h].to(dtype) - reference)
            if round_probs_to is not None:
                probs = probs.to(round_probs_to).to(dtype)
            o[b, :, h] = probs @ v[b, :, h // group].to(dtype) / torch.where(row_sum == 0.0, 1.0, row_sum)
            lse[b, h] = (reference + torch.log(row_sum)).squeeze(1)
    return o, lse


def flops(problem: AttentionProblem) -> int:
    """Floating-point operations by the convention of flash-attn's benchmark: 4 S_q S_k D a head, or with
    another head dimension of v 2 S_q S_k (D + D_v).

    A causal problem counts half of that, also when S_q != S_k, where the share of scores that the mask leaves is
    another: the number serves to compare times, and is not a count of what a kernel executes.
    """
    head_dims = problem.head_dim + problem.head_dim_v
    total = 2 * problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k * head_dims
    return total // 2 if problem.causal else total
