"""Online softmax whose reference lags behind the maximum, for the accumulators of wgmma.

The maximum in exp2(c * s - c * max) only keeps the numbers small: any reference near it gives the same
output, since it cancels between O and the row sums. So the reference, and with it O and the sums, moves
only when a score has risen by more than ``THRESHOLD`` (in powers of two) above it. flash-attention's kernel for
Blackwell saves the rescaling of O that way.

Here the maximum itself is saved as well. Probabilities are never negative, so the sum of a tile, which is
needed anyhow, bounds each of them: where it is small, no score has risen far. ``try_fold`` takes exponentials
by the present reference and looks at the sums alone; only where they are too large is the tile done again by
``fold``, which looks for the maximum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from cute_fa.device.softmax import finish_row, quad_reduce
from cute_fa.device.wgmma import acc_as_rows

THRESHOLD = 10.0  # probabilities stay below 2**10; fp16 holds 2**15
_CHAINS = 4  # independent partial results of a reduction, so that one waits less for the other


def _reduce_row(scores: cute.Tensor, r: int, op):
    """Reduces a thread's own columns of row r."""
    num_cols = cute.size(scores, mode=[1])
    partial = [scores[r, c] for c in range(_CHAINS)]
    for c in range(_CHAINS, num_cols):
        partial[c % _CHAINS] = op(partial[c % _CHAINS], scores[r, c])
    while len(partial) > 1:
        partial = [op(one, other) for one, other in zip(partial[::2], partial[1::2], strict=True)]
    return partial[0]


def _add(one, other):
    return one + other


@dataclass(frozen=True)
class LazySoftmax:
    """State of the two rows that a thread shares with the three others of its quad, in fp32.

    ``offset`` is c times the reference, a former maximum of the raw scores, and ``no_key`` before the first visible
    key; ``row_sum`` is this thread's own part of the sum of exp2(c * s - offset). ``no_key`` is -inf or ``NO_KEY``,
    with which a tile that hides all keys from a row need not be done again.
    """

    scale_log2: cutlass.Float32
    no_key: float
    offset: cute.Tensor
    row_sum: cute.Tensor

    @staticmethod
    def create(scale_log2: cutlass.Float32, no_key: float) -> LazySoftmax:
        """Registers for the state."""
        offset, row_sum = (cute.make_rmem_tensor(2, cutlass.Float32) for _ in range(2))
        return LazySoftmax(scale_log2, no_key, offset, row_sum)

    def reset(self):
        """Before the first key."""
        self.offset.fill(self.no_key)
        self.row_sum.fill(0.0)

    def copy(self) -> LazySoftmax:
        """The present state in other registers."""
        copy = LazySoftmax.create(self.scale_log2, self.no_key)
        copy.offset.store(self.offset.load())
        copy.row_sum.store(self.row_sum.load())
        return copy

    def _exponentiate(self, scores: cute.Tensor, r: int, offset):
        for c in range(cute.size(scores, mode=[1])):
            scores[r, c] = cute.math.exp2(scores[r, c] * self.scale_log2 - offset, fastmath=True)

    @cute.jit
    def fold(self, acc_S: cute.Tensor, rescale: cute.Tensor):
        """Turns a tile of scores into probabilities, in place; O is then to be multiplied by ``rescale``, row by row.

        Returns whether some factor of the warp isn't 1.
        """
        scores = acc_as_rows(acc_S)
        for r in cutlass.range_constexpr(2):
            row_max = quad_reduce(_reduce_row(scores, r, cute.arch.fmax), cute.arch.fmax) * self.scale_log2
            before = self.offset[r]
            # Before the first key this is inf > THRESHOLD, and NaN, which isn't, if there is still none.
            offset = row_max if row_max - before > THRESHOLD else before
            self.offset[r] = offset
            finite = offset
            if cutlass.const_expr(math.isinf(self.no_key)):
                finite = 0.0 if offset == -cutlass.Float32.inf else offset  # -inf - (-inf) would be NaN
            rescale[r] = cute.math.exp2(before - finite, fastmath=True)
            self._exponentiate(scores, r, finite)
            self.row_sum[r] = self.row_sum[r] * rescale[r] + _reduce_row(scores, r, _add)
        return cute.arch.vote_any_sync(rescale[0] != 1.0 or rescale[1] != 1.0)

    @cute.jit
    def try_fold(self, acc_S: cute.Tensor, sums: cute.Tensor):
        """Turns scores into probabilities, in place, by the present reference; ``sums`` are to be added to ``row_sum``.

        Returns whether some probability may be above 2**THRESHOLD, or a row has no reference yet (then its
        probabilities are inf or NaN): the tile has to be done again.
        """
        scores = acc_as_rows(acc_S)
        for r in cutlass.range_constexpr(2):
            self._exponentiate(scores, r, self.offset[r])
            sums[r] = _reduce_row(scores, r, _add)
        bound = 2.0**THRESHOLD
        return not (sums[0] <= bound and sums[1] <= bound)

    @cute.jit
    def finish(self, acc_O: cute.Tensor, sink, output_factor) -> cute.Tensor:
        """Divides O by the row sums; returns the natural log-sum-exp of each row.

        A row that saw no key gets output 0 and log-sum-exp -inf. A ``sink``, a logit in powers of two, is one more
        term of every row's sum; it needs a finite ``no_key``. O is multiplied by ``output_factor``. Both may be None.
        """
        output = acc_as_rows(acc_O)
        lse = cute.make_rmem_tensor(2, cutlass.Float32)
        for r in cutlass.range_constexpr(2):
            inverse, lse[r] = finish_row(self.offset[r], quad_reduce(self.row_sum[r], _add), sink, output_factor)
            output[r, None] = output[r, None].load() * inverse
        return lse
