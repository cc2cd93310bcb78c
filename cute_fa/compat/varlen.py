"""``flash_attn_varlen_func`` of flash-attn 2.8, its forward."""

from __future__ import annotations

import torch

from cute_fa.compat.arguments import contiguous_rows, refuse_dropout, require_bool
from cute_fa.problem import ScoreOptions, require_tensor
from cute_fa.varlen import forward_varlen


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

    One launch without padding, that can be captured in a CUDA graph and compiled without breaks. Lengths on a GPU are
    not read by the host, and cut to the tensors where they reach past them; on the CPU they are checked.

    Args:
        q: (total_q, H, D); k: (total_k, H_kv, D), or with a block_table (num_blocks, page_size, H_kv, D); v likewise,
            with D_v.
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32, on the device of q: where each sequence begins, from 0 up, and
            where the last ends. A sequence may have no queries or no keys.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        block_table: (B, max_blocks), int32: the pages that hold each sequence's keys.
        the others: as in ``cute_fa.compat.dense.flash_attn_func``.

    Returns:
        o (total_q, H, D_v), or (o, lse (H, total_q) fp32, an empty tensor). Rows behind the last sequence are 0.

    Raises:
        TypeError, ValueError, NotImplementedError: before a launch, naming the argument and what is allowed.
    """
    refuse_dropout(dropout_p)
    require_bool("return_attn_probs", return_attn_probs)
    require_tensor("cu_seqlens_q", cu_seqlens_q)
    require_tensor("cu_seqlens_k", cu_seqlens_k)
    o, lse = forward_varlen(
        contiguous_rows(q),
        contiguous_rows(k),
        contiguous_rows(v),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        block_table=block_table,
        causal=causal,
        softmax_scale=softmax_scale,
        options=ScoreOptions.of(window_size, softcap, alibi_slopes),
    )
    return (o, lse, q.new_empty(0)) if return_attn_probs else o
