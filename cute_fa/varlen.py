"""Attention whose members have lengths of their own, on the device: packed, in a cache, or in pages; one launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch.compiler import is_compiling

from cute_fa.dispatch import launch_for
from cute_fa.launch import score_arguments
from cute_fa.plan import with_plain_strides
from cute_fa.problem import (
    MAX_CTAS,
    MAX_SEQLEN,
    NO_OPTIONS,
    SEQUENCE_TENSORS,
    VECTOR_BYTES,
    AttentionProblem,
    ScoreOptions,
    compute_dtype,
    require_int,
    require_tensor,
    widened,
)

LEAST_TILE_M = 64  # queries of a tile of the kernels that take packed ones
# Tensors that say the same in two ways, or of a place that isn't there.
_APART = {
    ("seqused_k", "cache_batch_idx", "leftpad_k"): "cu_seqlens_k",
    ("cache_batch_idx",): "block_table",
}
_MAX_PLANS = 4096
_plans: dict[tuple, _Plan] = {}


@dataclass(frozen=True)
class _Plan:
    """What a call with certain shapes, strides and options does."""

    problem: AttentionProblem
    o_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    launch: Callable | None  # None: nothing to launch


def forward_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    options: ScoreOptions = NO_OPTIONS,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``cute_fa.forward`` of B members whose lengths are on the device, in one launch, with no copy and no padding.

    The lengths are int32 on the device of q, their last dimension contiguous. On a GPU no host reads them, so that the
    call can be captured in a CUDA graph; those that reach past the tensors are cut there. On the CPU they are checked.

    Args:
        q: (total_q, H, D) with cu_seqlens_q, else (B, S_q, H, D); fp16, bf16, or fp8 (e4m3), of which all that q, k and
            v hold is widened to bf16 at each call.
        k: (total_k, H_kv, D) with cu_seqlens_k and no pages; (pages, page_size, H_kv, D) with a block_table; else
            (B_cache, S_k, H_kv, D). v likewise, with D_v.
        max_seqlen_q, max_seqlen_k: at least the longest member's queries and keys; up to 2**30.
        cu_seqlens_q, cu_seqlens_k: (B + 1,): where each member's rows begin, from 0 up, and where the last one's end.
            With pages cu_seqlens_k only says how many keys each has.
        seqused_k: (B,): where each member's keys end in its slice of the cache or its pages; not beside cu_seqlens_k.
        block_table: (B, max_blocks): the pages of each member, in order.
        cache_batch_idx: (B,): the slice of the cache for each member; its own number when None. Not beside cu_seqlens_k
            or a block_table.
        leftpad_k: (B,): the first key that counts; not beside cu_seqlens_k.
        causal, softmax_scale, kernel: as in ``cute_fa.forward``.
        options: those that change scores, but no ``attn_bias``; positions are those within the member.

    Returns:
        o (total_q, H, D_v) and lse (H, total_q), or (B, S_q, H, D_v) and (B, H, S_q); fp32 lse. Rows behind the last
        member have o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``cute_fa.forward``, before the launch.
    """
    tensors = (cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, leftpad_k)
    if is_compiling() or type(q) is not torch.Tensor:
        describe(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options)
        return torch.ops.cute_fa.forward_varlen(
            q, k, v, *tensors, max_seqlen_q, max_seqlen_k, causal, softmax_scale, kernel, *options.window_size,
            options.softcap, options.alibi_slopes, options.sinks, *options.descales.values(),
        )  # fmt: skip
    return run_varlen(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, softmax_scale, options, kernel)


def run_varlen(
    q, k, v, tensors: tuple, max_seqlen_q, max_seqlen_k, causal, softmax_scale, options, kernel
) -> tuple[torch.Tensor, torch.Tensor]:
    """``forward_varlen`` with every check and no dispatcher; ``tensors`` are in the order of ``SEQUENCE_TENSORS``."""
    plan = _plan_for(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options, kernel)
    scale = plan.problem.softmax_scale(softmax_scale)
    cu_seqlens_q = tensors[0]
    if is_on_host(q):
        _check_values(q, k, tensors, max_seqlen_q, max_seqlen_k)
    q, k, v = widened(q), widened(k), widened(v)
    if plan.launch is None or cu_seqlens_q is not None:
        # Rows that belong to no member are nobody's to write.
        o, lse = q.new_zeros(plan.o_shape), q.new_full(plan.lse_shape, -torch.inf, dtype=torch.float32)
    else:
        o, lse = q.new_empty(plan.o_shape), q.new_empty(plan.lse_shape, dtype=torch.float32)
    if plan.launch is None:
        if options.sinks is not None:  # rows of members that have no keys
            end = lse.shape[-1] if cu_seqlens_q is None else cu_seqlens_q[-1]
            inside = torch.arange(lse.shape[-1], device=q.device) < end
            torch.where(inside, options.sinks.detach()[:, None].float(), lse, out=lse)
        return o, lse
    q, k, v = (with_plain_strides(tensor) for tensor in _four_dimensional(q, k, v, tensors))
    packed = cu_seqlens_q is not None
    values = score_arguments(options, plan.problem.static.features, plan.problem)
    o_packed, lse_packed = (o[None], lse[None]) if packed else (o, lse)
    plan.launch(q, k, v, o_packed, lse_packed, scale, values, (max_seqlen_q, *tensors))
    return o, lse


def fake_varlen(
    q, k, v, tensors: tuple, max_seqlen_q, max_seqlen_k, causal, options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the right shapes, for tensors without data."""
    describe(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options)
    o_shape, lse_shape = _result_shapes(q, v, tensors)
    return q.new_empty(o_shape, dtype=compute_dtype(q.dtype)), q.new_empty(lse_shape, dtype=torch.float32)


def _plan_for(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options, kernel) -> _Plan:
    """Looked up by everything that it depends on but pointers, gradients and lengths, else made."""
    given = [tensor for tensor in (q, k, v, *tensors) if tensor is not None]
    try:
        key = (
            *((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in given),
            tuple(tensor is None for tensor in tensors), max_seqlen_q, type(max_seqlen_q), max_seqlen_k,
            type(max_seqlen_k), causal is True, causal is False, options.key, kernel,
        )  # fmt: skip
        plan = _plans.get(key)
        needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        needs_grad = needs_grad or options.needs_grad
        if plan is not None and not needs_grad and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES:
            return plan
    except (AttributeError, TypeError, RuntimeError):
        key = None  # something that is no dense tensor or can't be hashed; the checks name it
    plan = _make_plan(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options, kernel)
    if key is not None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _make_plan(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options, kernel) -> _Plan:
    problem = describe(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options, in_memory=True)
    needed = problem.batch and problem.seqlen_q and all(t is None or t.numel() for t in (q, k, tensors[3]))
    return _Plan(problem, *_result_shapes(q, v, tensors), launch_for(problem, kernel, needed=bool(needed)))


def describe(
    q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options, *, in_memory: bool = False
) -> AttentionProblem:
    """The problem, checked but for lengths: B members of the longest one's extents."""
    cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, *_ = tensors
    tokens, slices = ("tokens", "heads", "head_dim"), ("batch", "sequence", "heads", "head_dim")
    pages = ("blocks", "page_size", "heads", "head_dim")
    require_tensor("q", q, dims=slices if cu_seqlens_q is None else tokens)
    kinds = pages if block_table is not None else slices if cu_seqlens_k is None else tokens
    for name, tensor in (("k", k), ("v", v)):
        require_tensor(name, tensor, dims=kinds)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        require_int(name, longest)
        if not 0 <= longest <= MAX_SEQLEN:
            raise ValueError(f"{name} must be from 0 to 2**30, got {longest}")
    if cu_seqlens_q is not None:
        require_tensor("cu_seqlens_q", cu_seqlens_q, like=q, dtype=torch.int32, shape=(None,))
        if not cu_seqlens_q.shape[0]:
            raise ValueError("cu_seqlens_q must begin with 0 and never fall, got no entry")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        require_tensor("cu_seqlens_k", cu_seqlens_k, like=q, dtype=torch.int32, shape=(None,))
        if cu_seqlens_k.shape[0] != batch + 1:
            raise ValueError(
                f"cu_seqlens_k must have as many entries as cu_seqlens_q ({batch + 1}), got {cu_seqlens_k.shape[0]}"
            )
    for name, tensor in zip(SEQUENCE_TENSORS, tensors, strict=True):
        if tensor is not None and not name.startswith("cu_"):
            shape = (batch, None) if name == "block_table" else (batch,)
            require_tensor(name, tensor, like=q, dtype=torch.int32, shape=shape)
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name} must have a contiguous last dimension (stride 1), got strides {tuple(tensor.stride())}"
            )
    given = dict(zip(SEQUENCE_TENSORS, tensors, strict=True))
    for names, beside in _APART.items():
        for name in names:
            if given[name] is not None and given[beside] is not None:
                raise ValueError(f"{name} must be None beside {beside}, got a tensor")
    if cu_seqlens_k is None and block_table is None:
        if given["cache_batch_idx"] is None and k.shape[0] < batch:
            raise ValueError(f"k must have a slice for each of {batch} members, got {k.shape[0]}")
        if seqused_k is None and max_seqlen_k < k.shape[1]:
            raise ValueError(f"max_seqlen_k must be at least the keys of a slice ({k.shape[1]}), got {max_seqlen_k}")
    if block_table is not None:
        if not k.shape[1] or not k.shape[0]:
            raise ValueError("block_table must be None for pages of no tokens, got a tensor")
        if seqused_k is None and cu_seqlens_k is None:
            raise ValueError("seqused_k must be given with a block_table, got None")
    # One slice says everything about a tensor but the lengths.
    q4, k4, v4 = _four_dimensional(q, k, v, tensors)
    some = min(1, q4.shape[0], k4.shape[0])
    make = AttentionProblem.from_tensors if in_memory else AttentionProblem.from_shapes
    if v4.shape[0] != k4.shape[0]:
        raise ValueError(
            f"v must have the shape of k {tuple(k.shape)}, but for its last dimension, got {tuple(v.shape)}"
        )
    if not isinstance(options, ScoreOptions):
        raise TypeError(f"options must be a cute_fa.ScoreOptions, got {type(options).__name__}")
    if options.attn_bias is not None:
        raise NotImplementedError("attn_bias must be None for members of lengths of their own, got a tensor")
    problem = make(q4[:some], k4[:some], v4[:some], causal=causal, return_lse=True)
    rows_of_tile = 1 if cu_seqlens_q is None else LEAST_TILE_M
    tiles = batch * problem.num_heads * -(-max_seqlen_q // rows_of_tile)
    if in_memory and tiles > MAX_CTAS:
        raise ValueError(
            f"max_seqlen_q must leave at most 2**31 - 1 tiles of {rows_of_tile} rows over batch and heads, got {tiles}"
        )
    options.check(batch, max_seqlen_q, max_seqlen_k, problem.num_heads, problem.num_heads_kv, q)
    if in_memory:
        options.check_memory()
    return replace(
        problem,
        batch=batch,
        seqlen_q=max_seqlen_q if cu_seqlens_q is not None else q.shape[1],
        seqlen_k=max_seqlen_k,
        causal=problem.causal or options.window_size[1] == 0,
        window_size=tuple(options.window_size),
        features=options.features,
        sequences=tuple(name for name, tensor in zip(SEQUENCE_TENSORS, tensors, strict=True) if tensor is not None),
    )


def _four_dimensional(q, k, v, tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed rows as a batch of one."""
    q = q if tensors[0] is None else q[None]
    return (q, k, v) if k.dim() == 4 else (q, k[None], v[None])


def _result_shapes(q, v, tensors) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of o and lse."""
    if tensors[0] is None:
        return (*q.shape[:3], v.shape[-1]), (q.shape[0], q.shape[2], q.shape[1])
    return (q.shape[0], q.shape[1], v.shape[-1]), (q.shape[1], q.shape[0])


def _check_values(q, k, tensors, max_seqlen_q: int, max_seqlen_k: int) -> None:
    """What can be checked where lengths can be read without waiting."""
    cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, leftpad_k = tensors
    lengths = None if seqused_k is None else seqused_k.tolist()
    for side, cu_seqlens, longest, rows in (
        ("q", cu_seqlens_q, max_seqlen_q, q.shape[0]),
        ("k", cu_seqlens_k, max_seqlen_k, None if block_table is not None else k.shape[0]),
    ):
        if cu_seqlens is None:
            continue
        name, bounds = f"cu_seqlens_{side}", cu_seqlens.tolist()
        sizes = [end - start for start, end in pairwise(bounds)]
        if bounds[0] != 0 or min(sizes, default=0) < 0:
            raise ValueError(f"{name} must begin with 0 and never fall, got {str(bounds)[:200]}")
        if longest < max(sizes, default=0):
            raise ValueError(
                f"max_seqlen_{side} must be at least the longest sequence of {name} ({max(sizes)}), got {longest}"
            )
        if rows is not None and bounds[-1] > rows:
            raise ValueError(f"{name} must end at the number of tokens ({rows}) or before, got {bounds[-1]}")
        if side == "k" and lengths is None:
            lengths = sizes
    if lengths is not None and max(lengths, default=0) > max_seqlen_k:
        raise ValueError(f"max_seqlen_k must be at least the longest member ({max(lengths)}), got {max_seqlen_k}")
    if cache_batch_idx is not None:
        _require_between("cache_batch_idx", cache_batch_idx.tolist(), 0, k.shape[0] - 1)
    if lengths is None or k.dim() != 4:
        return
    if block_table is None:
        _require_between("seqused_k", lengths, 0, k.shape[1])
    else:
        check_pages(block_table, lengths, k)
    for start, end in zip([] if leftpad_k is None else leftpad_k.tolist(), lengths, strict=False):
        if not 0 <= start <= end:
            raise ValueError(f"leftpad_k must be from 0 to the keys that there are ({end}), got {start}")


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether values can be read at once."""
    return not is_compiling() and type(tensor) is torch.Tensor and tensor.device.type == "cpu"


def check_pages(block_table: torch.Tensor, lengths: list[int], cache: torch.Tensor) -> None:
    """Checks a table on the host as far as each member's length reaches.

    Raises:
        ValueError: too few blocks for a member, or a block that isn't there.
    """
    num_blocks, page_size = cache.shape[:2]
    counts = [-(-length // page_size) for length in lengths]
    if max(counts, default=0) > block_table.shape[1]:
        raise ValueError(
            f"block_table must have a column for each of {max(counts)} blocks of {page_size} tokens, got "
            f"{block_table.shape[1]} columns"
        )
    for row, count in zip(block_table.tolist(), counts, strict=True):
        strays = [block for block in row[:count] if not 0 <= block < num_blocks]
        if strays:
            raise ValueError(f"block_table must hold blocks from 0 to {num_blocks - 1}, got {strays[0]}")


def _require_between(name: str, values: list[int], least: int, most: int) -> None:
    for value in values:
        if not least <= value <= most:
            raise ValueError(f"{name} must be from {least} to {most}, got {value}")
