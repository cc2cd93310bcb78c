"""``flash_attn_varlen_func`` of flash-attn 2.8, its forward."""

from __future__ import annotations

from itertools import pairwise

import torch

from cute_fa.compat.arguments import (
    contiguous_rows,
    reads_lengths,
    refuse_dropout,
    require_bool,
    require_dims,
    require_int,
    require_tensor,
    values_on_host,
)
from cute_fa.compat.caches import paged_cache
from cute_fa.problem import AttentionProblem, ScoreOptions
from cute_fa.varlen import forward_varlen


@reads_lengths
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """flash-attn's function of this name, argument by argument (2.8). Without gradients.

    Every sequence is a launch of its own on slices, without padding; the host reads the lengths for it, so the call
    waits for the device, can't be captured in a CUDA graph, and breaks a graph of torch.compile.

    Args:
        q: (total_q, H, D); k, v: (total_k, H_kv, D), or with a block_table (num_blocks, page_size, H_kv, D).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32, on the device of q: where each sequence begins, from 0 up, and
            where the last ends. A sequence may have no queries or no keys.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        block_table: (B, max_blocks), int32: the pages that hold each sequence's keys, copied together.
        the others: as in ``cute_fa.compat.dense.flash_attn_func``.

    Returns:
        o (total_q, H, D), or (o, lse (H, total_q) fp32, an empty tensor). Rows behind the last sequence are 0.

    Raises:
        TypeError, ValueError, NotImplementedError: before a launch, naming the argument and what is allowed.
        RuntimeError: inside the capture of a CUDA graph.
    """
    refuse_dropout(dropout_p)
    require_bool("return_attn_probs", return_attn_probs)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    paged = block_table is not None
    require_dims("q", q, ("tokens", "heads", "head_dim"))
    for name, tensor in (("k", k), ("v", v)):
        require_dims(
            name, tensor, ("blocks", "page_size", "heads", "head_dim") if paged else ("tokens", "heads", "head_dim")
        )
    bounds_q = _bounds("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q, q)
    bounds_k = _bounds("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k, q)
    if len(bounds_k) != len(bounds_q):
        raise ValueError(
            f"cu_seqlens_k must have as many entries as cu_seqlens_q ({len(bounds_q)}), got {len(bounds_k)}"
        )
    for name, bounds, tensor in (("cu_seqlens_q", bounds_q, q), ("cu_seqlens_k", bounds_k, k)):
        if bounds[-1] > tensor.shape[0] and not (paged and tensor is k):
            raise ValueError(f"{name} must end at the number of tokens ({tensor.shape[0]}) or before, got {bounds[-1]}")
    if paged:
        some = min(1, k.shape[0])
        AttentionProblem.from_tensors(q[None][:some], k[:some], v[:some])
        lengths = [end - start for start, end in pairwise(bounds_k)]
        cache = paged_cache(k, v, block_table, q, lengths)
        keys = [cache.tokens(i, 0, length) for i, length in enumerate(lengths)]
    else:
        AttentionProblem.from_tensors(q[None], k[None], v[None])
        keys = [(k[start:end], v[start:end]) for start, end in pairwise(bounds_k)]
    options = ScoreOptions.of(window_size, softcap, alibi_slopes)
    options.check(len(bounds_q) - 1, max_seqlen_q, max_seqlen_k, q.shape[1], q)
    o, lse = forward_varlen(q, keys, bounds_q, causal=causal, softmax_scale=softmax_scale, options=options)
    return (o, lse, q.new_empty(0)) if return_attn_probs else o


def _bounds(name: str, cu_seqlens, max_name: str, max_seqlen, q: torch.Tensor) -> list[int]:
    """The cumulative lengths as integers, none of them longer than was said."""
    require_tensor(name, cu_seqlens, like=q, dtype=torch.int32, shape=(None,))
    require_int(max_name, max_seqlen)
    bounds = values_on_host(name, cu_seqlens)
    lengths = [end - start for start, end in pairwise(bounds)]
    if not bounds or bounds[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"{name} must begin with 0 and never fall, got {str(bounds)[:200]}")
    if max_seqlen < max(lengths, default=0):
        raise ValueError(
            f"{max_name} must be at least the longest sequence of {name} ({max(lengths)}), got {max_seqlen}"
        )
    return bounds
