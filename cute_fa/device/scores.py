"""What changes scores between the product with K and the softmax: softcap, ALiBi, an additive bias, a boolean mask.

The definitions are flash-attn's and PyTorch's, in this order:

    s = softmax_scale * q k                 and the head's factor of fp8 inputs
    s = softcap * tanh(s / softcap)
    s = s - slope * |p - j|                 query i at position p = i + S_k - S_q, key j
    s = s + bias[i, j], or -inf where a mask is False

Here they are kept in powers of two: log2(e) times those above, so that exp(s) is one exp2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from cute_fa.device.registers import recompute_from
from cute_fa.device.softmax import LOG2_E
from cute_fa.problem import ScoreFeatures


class ScoreArguments(NamedTuple):
    """The values of score options at a launch, None where the kernel was compiled without one.

    Args:
        softcap: fp32, above 0.
        window_left, window_right: int32; keys that a query sees to each side of its position.
        alibi_slopes: (B, H), fp32.
        sinks: (H,), fp32.
        attn_bias: (B, H, S_q, S_k), fp32 or Q's type, or uint8 with 0 where a key is hidden.
        score_factors, output_factors: (B, H), fp32: what scores and the output are multiplied by besides.
    """

    softcap: cutlass.Float32 | None = None
    window_left: cutlass.Int32 | None = None
    window_right: cutlass.Int32 | None = None
    alibi_slopes: cute.Tensor | None = None
    sinks: cute.Tensor | None = None
    attn_bias: cute.Tensor | None = None
    score_factors: cute.Tensor | None = None
    output_factors: cute.Tensor | None = None


@dataclass(frozen=True)
class ScoreModifier:
    """What one CTA, of one head and some queries, does to its tiles of scores.

    Args:
        features: what is on; the other values are None for what is not.
        scale_log2: softmax_scale * log2(e), times the head's factor if it has one.
        softcap: in powers of two.
        slope: ALiBi's, in powers of two a key.
        bias: (S_q, S_k) of the head.
        first_query: the query of the tile's row 0.
        first_position: and its position among the keys.
        seqlen_q, seqlen_k: extents of ``bias``.
    """

    features: ScoreFeatures
    scale_log2: cutlass.Float32
    softcap: cutlass.Float32 | None
    slope: cutlass.Float32 | None
    bias: cute.Tensor | None
    first_query: cutlass.Int32
    first_position: cutlass.Int32
    seqlen_q: cutlass.Int32
    seqlen_k: cutlass.Int32

    @staticmethod
    def slope_of(features: ScoreFeatures, arguments, batch, head) -> cutlass.Float32 | None:
        """Reads the slope of a head, as ``slope`` has it."""
        return arguments.alibi_slopes[batch, head] * LOG2_E if features.alibi else None

    @staticmethod
    def scale_of(features: ScoreFeatures, arguments, scale_log2, batch, head) -> cutlass.Float32:
        """``scale_log2``, with the head's own factor if it has one."""
        return scale_log2 * arguments.score_factors[batch, head] if features.descales else scale_log2

    @staticmethod
    def of(
        features: ScoreFeatures, arguments, scale_log2, slope, batch, head, first_query, seqlen_q, seqlen_k
    ) -> ScoreModifier:
        """That of a head and some of its queries; ``arguments`` may be None if nothing is on."""
        softcap = arguments.softcap * LOG2_E if features.softcap else None
        bias = arguments.attn_bias[batch, head, None, None] if features.bias is not None else None
        position = first_query + seqlen_k - seqlen_q
        return ScoreModifier(features, scale_log2, softcap, slope, bias, first_query, position, seqlen_q, seqlen_k)

    @property
    def softmax_scale_log2(self) -> cutlass.Float32:
        """What the softmax has still to multiply scores by."""
        return cutlass.Float32(1.0) if self.features.scales else self.scale_log2

    def apply(self, scores: cute.Tensor, coords: cute.Tensor, first_key, ragged: bool):
        """Takes raw scores to what ``softmax_scale_log2`` is for, in place.

        Args:
            scores: (row, col) view of a thread's accumulator.
            coords: the same view of positions in the tile.
            first_key: of the tile's column 0.
            ragged: whether columns may lie behind the last key; nothing is read there.
        """
        if self.features.softcap:
            self._cap(scores)
        elif self.features.scales:
            self._scale(scores)
        if self.features.alibi:
            self._add_alibi(scores, coords, first_key)
        if self.features.bias is not None:
            self._add_bias(scores, coords, first_key, ragged)

    @cute.jit
    def _scale(self, scores: cute.Tensor):
        scores.store(scores.load() * self.scale_log2)

    @cute.jit
    def _cap(self, scores: cute.Tensor):
        """softcap * tanh(x), tanh(x) = 1 - 2 / (1 + exp(2 x)).

        The error is some 2**-22 of softcap, where tanh.approx, one instruction, has 2**-11 of tanh's value.
        """
        twice_x = 2.0 * LOG2_E * self.scale_log2 / self.softcap  # scale_log2 and softcap both have log2(e)
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                inverse = cute.arch.rcp_approx(1.0 + cute.math.exp2(scores[r, c] * twice_x, fastmath=True))
                scores[r, c] = self.softcap - 2.0 * self.softcap * inverse

    @cute.jit
    def _add_alibi(self, scores: cute.Tensor, coords: cute.Tensor, first_key):
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            # Small integers, exact in fp32 for 2**24 keys around the diagonal.
            row, col = coords[r, 0]
            distance = cutlass.Float32(self.first_position + row - first_key - col)
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                scores[r, c] = scores[r, c] - self.slope * cute.math.absf(distance - float(_column(c)))

    @cute.jit
    def _add_bias(self, scores: cute.Tensor, coords: cute.Tensor, first_key, ragged: cutlass.Constexpr):
        num_cols = cute.size(scores, mode=[1])
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            row, col = coords[r, 0]
            # Rows behind the last query are thrown away later; here they must not be read.
            query = cutlass.min(recompute_from(self.first_query) + row, self.seqlen_q - 1)
            start = cutlass.Int64(query) * self.bias.stride[0] + (first_key + col)
            last = self.seqlen_k - 1 - first_key - col
            bias = cute.make_tensor(self.bias.iterator + start, cute.make_layout(_column(num_cols)))
            for c in cutlass.range_constexpr(num_cols):
                at = cutlass.min(_column(c), last) if cutlass.const_expr(ragged) else _column(c)
                if cutlass.const_expr(self.features.is_mask):
                    scores[r, c] = scores[r, c] if bias[at] != 0 else -cutlass.Float32.inf
                else:
                    scores[r, c] = scores[r, c] + bias[at].to(cutlass.Float32) * LOG2_E


def _column(c: int) -> int:
    """Where a thread's column ``c`` is in the tile, from its first: two neighbours of every 8."""
    return c // 2 * 8 + c % 2
