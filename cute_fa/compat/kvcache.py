"""``flash_attn_with_kvcache`` of flash-attn 2.8."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from cute_fa.api import forward
from cute_fa.compat.arguments import contiguous_rows, require_bool
from cute_fa.compat.rotary import rotate
from cute_fa.problem import FP8, VECTOR, AttentionProblem, ScoreOptions, require_int, require_tensor
from cute_fa.varlen import check_pages, forward_varlen, is_on_host


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """flash-attn's function of this name, argument by argument (2.8): q attends to a cache, which k and v first join.

    One launch of attention, which finds the keys by the lengths and tables on the device. On a GPU no host reads them:
    the call can be captured in a CUDA graph, and lengths or pages that reach past the cache are cut to it where they
    are read (where tokens are written they are an error of PyTorch's indexing). On the CPU they are checked.

    Args:
        q: (B, S_q, H, D).
        k_cache, v_cache: (B_cache, S_cache, H_kv, D), or with a block_table (num_blocks, page_size, H_kv, D).
        k, v: (B, S_new, H_kv, D), written into the cache in place behind its first cache_seqlens tokens.
        rotary_cos, rotary_sin: (at least every position, R / 2), of q's dtype, R at most D: k, at its positions in the
            cache, and q are turned first. q's tokens are at cache_seqlens, cache_seqlens + 1, ... if causal or with a
            window, else all at cache_seqlens.
        cache_seqlens: tokens in the cache before the call: an int, or (B,) int32; None: all of it.
        cache_batch_idx: (B,), int32: the member of the cache for each of q; not with a block_table.
        cache_leftpad: (B,), int32: the first token of the cache that counts; not with a block_table or rotary_cos.
        block_table: (B, max_blocks), int32: the pages of each member, in order.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in ``cute_fa.compat.dense.flash_attn_func``.
        num_splits: 0 or 1.

    Returns:
        o (B, S_q, H, D), or (o, lse (B, H, S_q) fp32). A row that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: before anything is launched or written, naming the argument.
    """
    for name, flag in (("return_softmax_lse", return_softmax_lse), ("rotary_interleaved", rotary_interleaved)):
        require_bool(name, flag)
    if isinstance(num_splits, bool) or num_splits not in (0, 1):
        raise NotImplementedError(f"num_splits must be 0 or 1: the kernel chooses its splits, got {num_splits!r}")
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    _check_tensors(q, k_cache, v_cache, k, v, causal, softmax_scale, block_table is not None)
    batch, seqlen_q = q.shape[:2]
    seqlen_new = 0 if k is None else k.shape[1]
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v, got None")
    capacity = k_cache.shape[1]
    if block_table is not None:
        _refuse(cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, beside="block_table")
        require_tensor("block_table", block_table, like=q, dtype=torch.int32, shape=(batch, None))
        capacity *= block_table.shape[1]
    elif cache_batch_idx is None and k_cache.shape[0] < batch:
        raise ValueError(f"k_cache must have at least the batch size of q ({batch}), got {k_cache.shape[0]}")
    if seqlen_new > capacity:
        raise ValueError(f"k must have at most {capacity} tokens, what the cache can hold, got {seqlen_new}")
    before = capacity if cache_seqlens is None else cache_seqlens
    known = _check_members("cache_seqlens", before, q, capacity - seqlen_new)
    longest = capacity if known is None else max(known, default=0) + seqlen_new
    if cache_batch_idx is not None:
        _check_members("cache_batch_idx", cache_batch_idx, q, k_cache.shape[0] - 1)
    if cache_leftpad is not None:
        starts = _check_members("cache_leftpad", cache_leftpad, q, capacity)
        for start, length in zip(starts or [], known or [], strict=False):
            if start > length + seqlen_new:
                raise ValueError(
                    f"cache_leftpad must be at most the tokens in the cache ({length + seqlen_new}), got {start}"
                )
    if block_table is not None and known is not None and is_on_host(block_table):
        check_pages(block_table, [length + seqlen_new for length in known], k_cache)
    options = ScoreOptions.of(window_size, softcap, alibi_slopes)
    options.check(batch, seqlen_q, longest, q.shape[2], k_cache.shape[2], q)
    if not is_compiling():
        options.check_memory()
    if rotary_cos is not None or rotary_sin is not None:
        _refuse(cache_leftpad=cache_leftpad, beside="rotary_cos")
        first = 0 if known is None else max(known, default=0)
        _check_rotary(rotary_cos, rotary_sin, q, k, first + max(seqlen_new, seqlen_q))

    positions = None
    if k is not None:
        positions = _as_tensor(before, q).long()[:, None] + torch.arange(seqlen_new, device=q.device)
    if rotary_cos is not None:
        k = rotate(k, rotary_cos[positions], rotary_sin[positions], interleaved=rotary_interleaved)
        at = positions[:, :1]
        if causal or tuple(window_size) != (-1, -1):
            at = at + torch.arange(seqlen_q, device=q.device)
        q = rotate(q, rotary_cos[at], rotary_sin[at], interleaved=rotary_interleaved)
    if k is not None:
        place = _places(positions, k_cache, cache_batch_idx, block_table)
        k_cache[place], v_cache[place] = k, v
    common = {"causal": causal, "softmax_scale": softmax_scale}
    if isinstance(before, int) and cache_batch_idx is None and cache_leftpad is None and block_table is None:
        keys = (cache[:batch, : before + seqlen_new] for cache in (k_cache, v_cache))
        o, lse = forward(q, *keys, return_lse=True, **common, **vars(options))
    else:
        o, lse = forward_varlen(
            q,
            k_cache,
            v_cache,
            max_seqlen_q=seqlen_q,
            max_seqlen_k=longest,
            seqused_k=_as_tensor(before, q) + seqlen_new,
            block_table=block_table,
            cache_batch_idx=cache_batch_idx,
            leftpad_k=cache_leftpad,
            options=options,
            **common,
        )
    return (o, lse) if return_softmax_lse else o


def _as_tensor(lengths: int | torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A length for each member of the batch, on the device of q."""
    if isinstance(lengths, torch.Tensor):
        return lengths
    return torch.full((q.shape[0],), lengths, dtype=torch.int32, device=q.device)


def _places(positions: torch.Tensor, k_cache: torch.Tensor, cache_batch_idx, block_table) -> tuple:
    """Where tokens at positions (B, S) of each member lie in a cache."""
    if block_table is None:
        members = torch.arange(len(positions), device=positions.device)
        return (members if cache_batch_idx is None else cache_batch_idx.long())[:, None], positions
    page_size = k_cache.shape[1]
    return block_table.long().gather(1, positions // page_size), positions % page_size


def _check_tensors(q, k_cache, v_cache, k, v, causal, softmax_scale, paged: bool) -> None:
    dims = ("batch", "sequence", "heads", "head_dim")
    require_tensor("q", q, dims=dims)
    if q.dtype == FP8:
        raise TypeError(f"q must be torch.float16 or torch.bfloat16 beside a cache, got {q.dtype}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_tensor(name, cache, dims=("blocks", "page_size", "heads", "head_dim") if paged else dims)
        head_dim = q.shape[3] if name == "k_cache" else None
        require_tensor(name, cache, like=q, dtype=q.dtype, shape=(*k_cache.shape[:3], head_dim))
        if any(stride % VECTOR for stride in cache.stride()[:3]) or cache.stride(3) != 1:
            raise ValueError(
                f"{name} must have a contiguous last dimension and other strides that are multiples of {VECTOR} "
                f"elements, got {cache.stride()}"
            )
    # One member of each says everything about them but the lengths.
    some = min(1, q.shape[0], k_cache.shape[0])
    describe = AttentionProblem.from_shapes if is_compiling() else AttentionProblem.from_tensors
    problem = describe(q[:some], k_cache[:some], v_cache[:some], causal=causal)
    problem.softmax_scale(softmax_scale)
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} must be given with {given}, got None")
    if k is not None:
        shape = (q.shape[0], None, k_cache.shape[2], q.shape[3])
        require_tensor("k", k, like=q, dtype=q.dtype, shape=shape)
        require_tensor("v", v, like=q, dtype=q.dtype, shape=(*k.shape[:3], v_cache.shape[3]))


def _refuse(*, beside: str, **arguments) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None with {beside}, got {type(value).__name__}")


def _check_members(name: str, value, q: torch.Tensor, largest: int) -> list[int] | None:
    """Checks an integer for each member of the batch; returns them, or None if only the device knows them."""
    if isinstance(value, torch.Tensor):
        require_tensor(name, value, like=q, dtype=torch.int32, shape=(q.shape[0],))
        if not is_on_host(value):
            return None
        values = value.tolist()
    else:
        if name != "cache_seqlens":
            require_tensor(name, value)
        require_int(name, value)
        values = [value] * q.shape[0]
    for one in values:
        if not 0 <= one <= largest:
            raise ValueError(f"{name} must be from 0 to {largest} for what the cache can hold, got {one}")
    return values


def _check_rotary(cos, sin, q: torch.Tensor, k, positions: int) -> None:
    if k is None:
        raise ValueError("rotary_cos and rotary_sin must be None without k and v")
    for name, value in (("rotary_cos", cos), ("rotary_sin", sin)):
        require_tensor(name, value, like=q, dtype=q.dtype, shape=(None, None))
        if value.shape != cos.shape:
            raise ValueError(f"{name} must have the shape of rotary_cos {tuple(cos.shape)}, got {tuple(value.shape)}")
        if value.shape[0] < positions:
            raise ValueError(f"{name} must have a row for each of {positions} positions, got {value.shape[0]}")
        if not 0 < value.shape[1] <= q.shape[3] // 2 or value.shape[1] % 8:
            raise ValueError(
                f"{name} must have a multiple of 8 columns, at most half the head dimension ({q.shape[3] // 2}), got "
                f"{value.shape[1]}"
            )
