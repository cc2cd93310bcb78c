"""Masks on a tile of scores."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


@cute.jit
def key_limits(positions: cute.Tensor, keys_left, diagonal, causal: cutlass.Constexpr) -> cute.Tensor:
    """For each of a thread's rows, the first column of a tile of keys that it doesn't see.

    ``positions`` are the rows' queries, counted as ``diagonal`` is: query i sees columns up to
    i + ``diagonal`` when ``causal``. Columns at or past ``keys_left`` lie behind the last key.
    """
    limits = cute.make_rmem_tensor(positions.layout, cutlass.Int32)
    for r in cutlass.range_constexpr(cute.size(positions)):
        limits[r] = keys_left
        if cutlass.const_expr(causal):
            limits[r] = cutlass.min(keys_left, positions[r] + diagonal + 1)
    return limits


@cute.jit
def mask_scores(scores: cute.Tensor, coords: cute.Tensor, limits: cute.Tensor):
    """Sets the scores at or past each row's limit to -inf, which no softmax sees.

    ``scores`` and ``coords`` are (row, col) views of a thread's accumulator; ``coords`` holds positions
    within the tile.
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        limit = limits[r] - coords[r, 0][1]
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            # A thread holds two neighbouring columns of every 8: what is compared is a constant.
            scores[r, c] = -cutlass.Float32.inf if c // 2 * 8 + c % 2 >= limit else scores[r, c]


@cute.jit
def mask_scores_before(scores: cute.Tensor, coords: cute.Tensor, starts: cute.Tensor):
    """Sets the scores before each row's first column to -inf; the other side of ``mask_scores``."""
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        start = starts[r] - coords[r, 0][1]
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            scores[r, c] = -cutlass.Float32.inf if c // 2 * 8 + c % 2 < start else scores[r, c]


@cute.jit
def key_starts(positions: cute.Tensor, left_edge) -> cute.Tensor:
    """For each of a thread's rows, the first column of a tile of keys that it sees: the row and ``left_edge``."""
    starts = cute.make_rmem_tensor(positions.layout, cutlass.Int32)
    for r in cutlass.range_constexpr(cute.size(positions)):
        starts[r] = positions[r] + left_edge
    return starts


def rows_of(coords: cute.Tensor) -> cute.Tensor:
    """The row of the tile that each of a thread's rows is; ``coords`` as of ``mask_scores``."""
    rows = cute.make_rmem_tensor(cute.size(coords, mode=[0]), cutlass.Int32)
    for r in range(cute.size(rows)):
        rows[r] = coords[r, 0][0]
    return rows
