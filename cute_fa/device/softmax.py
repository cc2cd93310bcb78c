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
# The reference of a row without a key: finite, since exp2(-inf - (-inf)) would be NaN where exp2(-inf - NO_KEY) is
# 0, and below every scaled score that fp32 can tell apart.
NO_KEY = -(2.0**126)
# Of a row whose reference lags. What has outgrown it can no more be rescaled or divided: factors below 2**-126 are 0.
LARGEST_SUM = 2.0**64
RESCALE_THRESHOLD = 8.0  # P stays below 2**8: far from fp16's largest, and as precise as below 1


@cute.jit
def quad_reduce(value, op: cutlass.Constexpr):
    """Reduces over the four lanes that hold one row of an m16n8 accumulator."""
    for offset in cutlass.range_constexpr(1, 3):
        value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@cute.jit
def thread_row_max(acc_S: cute.Tensor) -> cute.Tensor:
    """The maximum of each row's raw scores, as far as this thread has them."""
    scores = acc_as_rows(acc_S)
    row_max = cute.make_rmem_tensor(cute.size(scores, mode=[0]), cutlass.Float32)
    for r in cutlass.range_constexpr(cute.size(row_max)):
        row_max[r] = scores[r, None].load().reduce(cute.ReductionOp.MAX, -cutlass.Float32.inf, 0)
    return row_max


@cute.jit
def finish_row(row_ref, row_sum, sink, output_factor):
    """(what a row of O is to be multiplied by, its natural log-sum-exp) of the sum of exp2(c * s - row_ref).

    A ``sink`` that isn't None, a logit in powers of two, is one more term of the sum. O is multiplied by
    ``output_factor`` besides, if that isn't None.
    """
    factor, scaled_by = None, row_ref
    if cutlass.const_expr(sink is not None):
        row_ref = cute.arch.fmax(row_ref, sink)
        factor = cute.math.exp2(scaled_by - row_ref, fastmath=True)
        row_sum = row_sum * factor + cute.math.exp2(sink - row_ref, fastmath=True)
    inverse = 0.0 if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)
    if cutlass.const_expr(sink is not None):
        inverse = inverse * factor
    if cutlass.const_expr(output_factor is not None):
        inverse = inverse * output_factor
    return inverse, (row_ref + cute.math.log2(row_sum, fastmath=True)) * LN_2


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running reference and sum of each row, in fp32.

    ``row_ref`` is what the scaled scores c * s are held against: c times the running maximum, or a value that
    lags behind it; whichever, it cancels when O is divided by the sum. ``row_sum`` is this thread's own part of
    the sum of exp2(c * s - row_ref), reduced over the quad once, at the end.
    """

    scale_log2: cutlass.Float32
    row_ref: cute.Tensor
    row_sum: cute.Tensor

    @staticmethod
    def start(num_rows: int, scale_log2: cutlass.Float32) -> OnlineSoftmax:
        """Before the first key: reference ``NO_KEY``, sum 0."""
        row_ref, row_sum = (cute.make_rmem_tensor(num_rows, cutlass.Float32) for _ in range(2))
        softmax = OnlineSoftmax(scale_log2, row_ref, row_sum)
        softmax.reset()
        return softmax

    def reset(self):
        """As before the first key."""
        self.row_ref.fill(NO_KEY)
        self.row_sum.fill(0.0)

    @cute.jit
    def rescale(self, row_max: cute.Tensor, acc_O: cute.Tensor):
        """Takes the rows' maxima as the reference, O and the sums with it; ``row_max`` as of ``thread_row_max``."""
        output = acc_as_rows(acc_O)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            scaled_max = quad_reduce(row_max[r], cute.arch.fmax) * self.scale_log2
            row_ref = cute.arch.fmax(self.row_ref[r], scaled_max)
            factor = cute.math.exp2(self.row_ref[r] - row_ref, fastmath=True)
            self.row_ref[r] = row_ref
            self.row_sum[r] = self.row_sum[r] * factor
            output[r, None] = output[r, None].load() * factor

    @cute.jit
    def rescale_if_needed(self, row_max: cute.Tensor, acc_O: cute.Tensor):
        """The same, but only if a row of this warp has risen by more than a factor of 2**RESCALE_THRESHOLD.

        Random scores rise that far in the first tiles alone; all others cost one vote, and neither a shuffle
        nor a multiplication of O. The idea is FlashAttention-4's (Dao-AILab/flash-attention, flash_attn/cute).
        """
        rises = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            rises = rises | (row_max[r] * self.scale_log2 - self.row_ref[r] > RESCALE_THRESHOLD)
        if cute.arch.vote_any_sync(rises):
            self.rescale(row_max, acc_O)

    @cute.jit
    def has_outgrown(self, acc_O: cute.Tensor) -> cutlass.Boolean:
        """Whether a sum of this thread is above ``LARGEST_SUM``, or one of its outputs infinite or NaN."""
        outgrown = (acc_O.load() * 0.0).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), 0) != 0.0
        for r in cutlass.range_constexpr(cute.size(self.row_sum)):
            outgrown = outgrown | (self.row_sum[r] > LARGEST_SUM)
        return outgrown

    @cute.jit
    def exponentiate(self, acc_S: cute.Tensor):
        """Turns scores, a tile or some of its columns, into unnormalised probabilities in place."""
        scores = acc_as_rows(acc_S)
        for r in cutlass.range_constexpr(cute.size(self.row_ref)):
            probs = cute.math.exp2(scores[r, None].load() * self.scale_log2 - self.row_ref[r], fastmath=True)
            self.row_sum[r] = probs.reduce(cute.ReductionOp.ADD, self.row_sum[r], 0)
            scores[r, None] = probs

    @cute.jit
    def finish(self, acc_O: cute.Tensor, sink=None, output_factor=None) -> cute.Tensor:
        """Divides O by the row sums; returns the natural log-sum-exp of each row.

        A row that saw no key gets output 0 and log-sum-exp -inf. A ``sink``, a logit in powers of two, is one more
        term of every row's sum. O is multiplied by ``output_factor`` if there is one.
        """
        output = acc_as_rows(acc_O)
        lse = cute.make_rmem_tensor(cute.size(self.row_ref), cutlass.Float32)
        for r in cutlass.range_constexpr(cute.size(self.row_ref)):
            row_sum = quad_reduce(self.row_sum[r], lambda x, y: x + y)
            inverse, lse[r] = finish_row(self.row_ref[r], row_sum, sink, output_factor)
            output[r, None] = output[r, None].load() * inverse
        return lse
