"""Masks on a tile of scores."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


@cute.jit
def mask_scores(scores: cute.Tensor, coords: cute.Tensor, col_limit, diagonal, causal: cutlass.Constexpr):
    """Sets scores that no softmax may see to -inf.

    ``scores`` and ``coords`` are (row, col) views of a thread's accumulator; ``coords`` holds positions
    within the tile. Columns at or past ``col_limit`` lie behind the last key. When ``causal``, row r
    sees columns up to r + ``diagonal``.
    """
    for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
        limit = col_limit
        if cutlass.const_expr(causal):
            limit = cutlass.min(col_limit, coords[r, 0][0] + diagonal + 1)
        limit = limit - coords[r, 0][1]
        for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
            # A thread holds two neighbouring columns of every 8: what is compared is a constant.
            scores[r, c] = -cutlass.Float32.inf if c // 2 * 8 + c % 2 >= limit else scores[r, c]
