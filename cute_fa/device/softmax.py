"""Online softmax over the rows that a thread shares with the three others of its quad.

The algorithm is that of FlashAttention-2 (Dao, 2023, algorithm 1), in base 2: with
c = softmax_scale * log2(e), exp(softmax_scale * s) = exp2(c * s), one multiply-add and one ex2 a score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from cute_fa.device.mma import acc_as_rows

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@cute.jit
def quad_reduce(value, op: cutlass.Constexpr):
    """Reduces over the four lanes that hold one row of an m16n8 accumulator."""
    for offset in cutlass.range_constexpr(1, 3):
        value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running maximum and sum of each row, in fp32.

    ``row_max`` is the maximum of the raw scores; ``row_sum`` is this thread's own part of the sum of
    exp2(c * (s - row_max)), reduced over the quad once, at the end.
    """

    scale_log2: cutlass.Float32
    row_max: cute.Tensor
    row_sum: cute.Tensor

    @staticmethod
    def start(num_rows: int, scale_log2: cutlass.Float32) -> OnlineSoftmax:
        """Before the first key: maximum -inf, sum 0."""
        row_max = cute.make_rmem_tensor(num_rows, cutlass.Float32)
        row_sum = cute.make_rmem_tensor(num_rows, cutlass.Float32)
        row_max.fill(-cutlass.Float32.inf)
        row_sum.fill(0.0)
        return OnlineSoftmax(scale_log2, row_max, row_sum)

    @cute.jit
    def update(self, acc_S: cute.Tensor, acc_O: cute.Tensor):
        """Turns a tile of scores into probabilities in place, and rescales O to the new maximum."""
        scores = acc_as_rows(acc_S)
        output = acc_as_rows(acc_O)
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            score_row = scores[r, None].load()
            row_max = score_row.reduce(cute.ReductionOp.MAX, self.row_max[r], 0)
            row_max = quad_reduce(row_max, cute.arch.fmax)
            # A row that has seen no key yet has maximum -inf, and -inf - (-inf) would be NaN.
            scaled_max = 0.0 if row_max == -cutlass.Float32.inf else row_max * self.scale_log2
            probs = cute.math.exp2(score_row * self.scale_log2 - scaled_max, fastmath=True)
            rescale = cute.math.exp2(self.row_max[r] * self.scale_log2 - scaled_max, fastmath=True)
            self.row_sum[r] = probs.reduce(cute.ReductionOp.ADD, self.row_sum[r] * rescale, 0)
            self.row_max[r] = row_max
            scores[r, None] = probs
            output[r, None] = output[r, None].load() * rescale

    @cute.jit
    def finish(self, acc_O: cute.Tensor) -> cute.Tensor:
        """Divides O by the row sums; returns the natural log-sum-exp of each row.

        A row that saw no key gets output 0 and log-sum-exp -inf.
        """
        output = acc_as_rows(acc_O)
        lse = cute.make_rmem_tensor(cute.size(self.row_max), cutlass.Float32)
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            row_sum = quad_reduce(self.row_sum[r], lambda x, y: x + y)
            inverse = 0.0 if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)
            output[r, None] = output[r, None].load() * inverse
            lse[r] = (self.row_max[r] * self.scale_log2 + cute.math.log2(row_sum, fastmath=True)) * LN_2
        return lse
