"""Sequences of many lengths, packed one behind the other with nothing between them."""

from __future__ import annotations

from itertools import pairwise

import torch

from cute_fa.api import forward
from cute_fa.problem import NO_OPTIONS, AttentionProblem, ScoreOptions


def forward_varlen(
    q: torch.Tensor,
    keys: list[tuple[torch.Tensor, torch.Tensor]],
    bounds_q: list[int],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    options: ScoreOptions = NO_OPTIONS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``cute_fa.forward`` of each sequence by itself: one launch each, on slices, with no copy and no padding.

    Args:
        q: (total_q, H, D), whose rows bounds_q[i] to bounds_q[i + 1] are sequence i.
        keys: k and v (S_k, H_kv, D) of each sequence, of any lengths.
        options: ALiBi slopes may be (number of sequences, H).
        bounds_q: one more than there are sequences, from 0 up; rows past the last have o = 0 and lse = -inf.

    Returns:
        o (total_q, H, D) and lse (H, total_q), fp32.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``cute_fa.forward``, before the first launch.
    """
    spans = list(pairwise(bounds_q))
    for i, ((start, end), (k, v)) in enumerate(zip(spans, keys, strict=True)):
        problem = AttentionProblem.from_tensors(
            q[None, start:end], k[None], v[None], causal=causal, options=options.of_member(i)
        )
        problem.softmax_scale(softmax_scale)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    o[bounds_q[-1] :] = 0.0
    lse[:, bounds_q[-1] :] = -torch.inf
    for i, ((start, end), (k, v)) in enumerate(zip(spans, keys, strict=True)):
        _, lse_of_one = forward(
            q[None, start:end],
            k[None],
            v[None],
            causal=causal,
            softmax_scale=softmax_scale,
            return_lse=True,
            out=o[None, start:end],
            **vars(options.of_member(i)),
        )
        lse[:, start:end] = lse_of_one[0]
    return o, lse
