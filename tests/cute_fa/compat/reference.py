"""Attention with every option of flash-attn, in float32 and with all scores at once: what served calls must equal."""

from __future__ import annotations

import torch


def options_reference(q, k, v, *, causal=False, softmax_scale=None, window_size=(-1, -1), softcap=0.0, slopes=None):
    """o (S_q, H, D) and lse (H, S_q) of one sequence: q (S_q, H, D), k and v (S_k, H_kv, D)."""
    seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, group = k.shape[0], num_heads // k.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    k, v = (tensor.float().repeat_interleave(group, 1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k, device=q.device)[None]
    if slopes is not None:
        scores = scores - slopes[:, None, None] * (position - key).abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if right >= 0:
        hidden |= key > position + right
    if left >= 0:
        hidden |= key < position - left
    scores = scores.masked_fill(hidden, -torch.inf)
    probs = torch.softmax(scores, -1).nan_to_num(0.0)  # a row of -inf alone is NaN
    return torch.einsum("hqk,khd->qhd", probs, v), torch.logsumexp(scores, -1)


def assert_matches(q, k, v, o, lse, **options) -> None:
    """o (S_q, H, D) and lse of one sequence within what rounding to the inputs' type can do."""
    expected, expected_lse = options_reference(q, k, v, **options)
    eps = torch.finfo(q.dtype).eps
    # P is rounded once to the inputs' type, and o once: each half a unit, of sums of |P v| <= max |v|.
    allowed = 2 * eps * max(1.0, v.float().abs().max().item() if v.numel() else 0.0)
    assert o.shape == (*q.shape[:2], v.shape[2]) and o.dtype == q.dtype
    assert (o.float() - expected).abs().max().item() <= allowed if o.numel() else True
    if lse is not None:
        torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-5)
