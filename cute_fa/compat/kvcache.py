"""``flash_attn_with_kvcache`` of flash-attn 2.8."""

from __future__ import annotations

import torch

from cute_fa.compat.arguments import (
    contiguous_rows,
    reads_lengths,
    require_bool,
    require_dims,
    require_int,
    require_tensor,
    values_on_host,
)
from cute_fa.compat.caches import DenseCache, paged_cache
from cute_fa.compat.rotary import rotate
from cute_fa.problem import VECTOR, AttentionProblem, ScoreOptions
from cute_fa.varlen import forward_varlen


@reads_lengths
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

    Every member of the batch is a launch of its own, pages are copied together, and the host reads the lengths: the
    call waits for the device and can't be captured in a CUDA graph, unless cache_seqlens is an int or None and nothing
    else is a tensor on the GPU. It breaks a graph of torch.compile.

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
        num_splits: 0 or 1; there is no split of the keys yet.

    Returns:
        o (B, S_q, H, D), or (o, lse (B, H, S_q) fp32). A row that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: before anything is launched or written, naming the argument.
        RuntimeError: inside the capture of a CUDA graph, where the host would have to read a tensor.
    """
    for name, flag in (("return_softmax_lse", return_softmax_lse), ("rotary_interleaved", rotary_interleaved)):
        require_bool(name, flag)
    if isinstance(num_splits, bool) or num_splits not in (0, 1):
        raise NotImplementedError(f"num_splits must be 0 or 1: keys are not split yet, got {num_splits!r}")
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    _check_tensors(q, k_cache, v_cache, k, v, causal, softmax_scale, block_table is not None)
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_new = 0 if k is None else k.shape[1]
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v, got None")
    if block_table is None:
        capacity = k_cache.shape[1]
    else:
        _refuse(cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, beside="block_table")
        require_tensor("block_table", block_table, like=q, dtype=torch.int32, shape=(batch, None))
        capacity = k_cache.shape[1] * block_table.shape[1]
    if seqlen_new > capacity:
        raise ValueError(f"k must have at most {capacity} tokens, what the cache can hold, got {seqlen_new}")
    before = _per_member(
        "cache_seqlens", capacity if cache_seqlens is None else cache_seqlens, q, capacity - seqlen_new
    )
    after = [length + seqlen_new for length in before]
    starts = _per_member("cache_leftpad", 0 if cache_leftpad is None else cache_leftpad, q, capacity)
    for start, end in zip(starts, after, strict=True):
        if start > end:
            raise ValueError(f"cache_leftpad must be at most the tokens in the cache ({end}), got {start}")
    options = ScoreOptions.of(window_size, softcap, alibi_slopes)
    options.check(batch, seqlen_q, capacity, num_heads, q)
    options.check_memory()
    if block_table is None:
        cache = DenseCache(k_cache, v_cache, _slots(cache_batch_idx, q, k_cache))
    else:
        cache = paged_cache(k_cache, v_cache, block_table, q, after)
    if rotary_cos is not None or rotary_sin is not None:
        _refuse(cache_leftpad=cache_leftpad, beside="rotary_cos")
        _check_rotary(rotary_cos, rotary_sin, q, k, max(before, default=0) + max(seqlen_new, seqlen_q))
        local = causal or tuple(window_size) != (-1, -1)
        k = _rotated(k, before, seqlen_new, rotary_cos, rotary_sin, rotary_interleaved)
        q = _rotated(q, before, seqlen_q if local else 1, rotary_cos, rotary_sin, rotary_interleaved)

    if k is not None:
        for i in range(batch):
            cache.append(i, before[i], k[i], v[i])
    o, lse = forward_varlen(
        q.reshape(batch * seqlen_q, num_heads, head_dim),
        [cache.tokens(i, starts[i], after[i]) for i in range(batch)],
        [i * seqlen_q for i in range(batch + 1)],
        causal=causal,
        softmax_scale=softmax_scale,
        options=options,
    )
    o = o.view(q.shape)
    return (o, lse.view(num_heads, batch, seqlen_q).transpose(0, 1).contiguous()) if return_softmax_lse else o


def _check_tensors(q, k_cache, v_cache, k, v, causal, softmax_scale, paged: bool) -> None:
    dims = ("batch", "sequence", "heads", "head_dim")
    require_dims("q", q, dims)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_dims(name, cache, ("blocks", "page_size", "heads", "head_dim") if paged else dims)
        require_tensor(name, cache, like=q, dtype=q.dtype, shape=(*k_cache.shape[:2], k_cache.shape[2], q.shape[3]))
        if any(stride % VECTOR for stride in cache.stride()[:3]) or cache.stride(3) != 1:
            raise ValueError(
                f"{name} must have a contiguous last dimension and other strides that are multiples of {VECTOR} "
                f"elements, got {cache.stride()}"
            )
    # One member of each says everything about them but the lengths.
    some = min(1, q.shape[0], k_cache.shape[0])
    problem = AttentionProblem.from_tensors(q[:some], k_cache[:some], v_cache[:some], causal=causal)
    problem.softmax_scale(softmax_scale)
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} must be given with {given}, got None")
    if k is not None:
        shape = (q.shape[0], None, k_cache.shape[2], q.shape[3])
        require_tensor("k", k, like=q, dtype=q.dtype, shape=shape)
        require_tensor("v", v, like=q, dtype=q.dtype, shape=k.shape)


def _refuse(*, beside: str, **arguments) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None with {beside}, got {type(value).__name__}")


def _per_member(name: str, value, q: torch.Tensor, largest: int) -> list[int]:
    """An integer for each member of the batch, from 0 to ``largest``."""
    if isinstance(value, torch.Tensor):
        require_tensor(name, value, like=q, dtype=torch.int32, shape=(q.shape[0],))
        values = values_on_host(name, value)
    else:
        require_int(name, value)
        values = [value] * q.shape[0]
    for one in values:
        if not 0 <= one <= largest:
            raise ValueError(f"{name} must be from 0 to {largest} for what the cache can hold, got {one}")
    return values


def _slots(cache_batch_idx, q: torch.Tensor, k_cache: torch.Tensor) -> list[int]:
    if cache_batch_idx is None:
        if k_cache.shape[0] < q.shape[0]:
            raise ValueError(f"k_cache must have at least the batch size of q ({q.shape[0]}), got {k_cache.shape[0]}")
        return list(range(q.shape[0]))
    require_tensor("cache_batch_idx", cache_batch_idx, like=q, dtype=torch.int32, shape=(q.shape[0],))
    return _per_member("cache_batch_idx", cache_batch_idx, q, k_cache.shape[0] - 1)


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


def _rotated(tokens: torch.Tensor, first: list[int], count: int, cos, sin, interleaved: bool) -> torch.Tensor:
    """Tokens (B, S, H, D) turned by the angles of positions ``first[i]`` on; of that one alone if ``count`` is 1."""
    turned = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    for i, start in enumerate(first):
        at = slice(start, start + count)
        turned[i] = rotate(tokens[i], cos[at], sin[at], interleaved=interleaved)
    return turned
