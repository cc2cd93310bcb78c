"""The tiles of queries that a CTA computes: which queries, of whom, and which blocks of keys they see.

The producer and the consumers each work this out for themselves, and must come to the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from cute_fa.device.mask import key_limits, key_starts, mask_scores, mask_scores_before, rows_of
from cute_fa.device.scores import ScoreModifier
from cute_fa.device.sequences import Member
from cute_fa.device.softmax import LOG2_E
from cute_fa.device.wgmma import ROWS, acc_as_rows
from cute_fa.problem import ScoreFeatures


@dataclass(frozen=True)
class QueryTile:
    """A tile of queries as one consumer sees it, and the blocks of keys it walks, the last one first.

    Row r of the consumer's 64 sees keys from r + ``left_edge`` up to r + ``right_edge``, as far as it has these edges.
    ``slope`` is ALiBi's, ``scale_log2`` that of a head with a factor of its own. What a kernel is compiled without is
    None.
    """

    m_block: cutlass.Int32
    head: cutlass.Int32
    batch: cutlass.Int32
    num_n_blocks: cutlass.Int32
    first_n_block: cutlass.Int32 | None
    right_edge: cutlass.Int32
    left_edge: cutlass.Int32 | None
    slope: cutlass.Float32 | None
    scale_log2: cutlass.Float32 | None
    member: Member

    def n_block(self, i):
        """Block ``i`` of the walk."""
        last = self.num_n_blocks - 1
        if self.first_n_block is not None:
            last = last + self.first_n_block
        return last - i


@dataclass(frozen=True)
class QueryTiles:
    """All tiles of one CTA.

    Args:
        schedule: ``TileSchedule`` or ``PackedSchedule``.
        tile_m, tile_n: rows of a tile of queries, of all consumers, and of a block of keys.
        features, bounded_right: what the kernel is compiled for; whether rows have a right edge.
        mQ, mK: the tensors as the TMA copies take them, (S, D, H, B).
        scale_log2: softmax_scale * log2(e).
        arguments, sequences: as kernels take them.
    """

    schedule: object
    tile_m: int
    tile_n: int
    features: ScoreFeatures
    bounded_right: bool
    mQ: cute.Tensor
    mK: cute.Tensor
    scale_log2: cutlass.Float32
    arguments: object
    sequences: tuple | None

    def count(self):
        """Tiles of this CTA."""
        return self.schedule.count()

    @cute.jit
    def tile(self, number, consumer_index) -> QueryTile:
        """This CTA's tile ``number``, for a consumer."""
        features = self.features
        m_block, head_and_batch = self.schedule.tile(number)
        num_heads = self.mQ.shape[2]
        seqlen_q, seqlen_k = self.mQ.shape[0], self.mK.shape[0]
        # Found here for its lengths, or below, so that the code of plain kernels stays the one that was measured.
        if cutlass.const_expr(self.sequences is not None):
            member = self._member(head_and_batch // num_heads)
            seqlen_q, seqlen_k = member.seqlen_q, member.seqlen_k
        # The last query stands at the last key.
        position = m_block * self.tile_m + seqlen_k - seqlen_q
        right_edge, left_edge, first_n_block = position, None, None
        if cutlass.const_expr(features.window_right):
            right_edge = position + self.arguments.window_right
        num_keys = seqlen_k
        if cutlass.const_expr(self.bounded_right):
            num_keys = cutlass.min(seqlen_k, right_edge + self.tile_m)
        num_n_blocks = cute.ceil_div(num_keys, self.tile_n)
        if cutlass.const_expr(features.window_left):
            left_edge = position - self.arguments.window_left
            first_n_block = cutlass.max(0, left_edge) // self.tile_n
            num_n_blocks = num_n_blocks - first_n_block
            left_edge = left_edge + consumer_index * ROWS
        # At least one block, all masked if it must be, so that no loop has to do with tiles that see no key.
        num_n_blocks = cutlass.max(1, num_n_blocks)
        head, batch = head_and_batch % num_heads, head_and_batch // num_heads
        if cutlass.const_expr(self.sequences is None):
            member = self._member(batch)
        return QueryTile(
            m_block,
            head,
            batch,
            num_n_blocks,
            first_n_block,
            right_edge + consumer_index * ROWS,
            left_edge,
            ScoreModifier.slope_of(features, self.arguments, batch, head),
            ScoreModifier.scale_of(features, self.arguments, self.scale_log2, batch, head)
            if features.descales
            else None,
            member,
        )

    def _member(self, batch) -> Member:
        shape_q, shape_k = ((mX.shape[3], mX.shape[0]) for mX in (self.mQ, self.mK))
        return Member.find(batch, shape_q, shape_k, self.sequences)

    @cute.jit
    def split_walk(self, tile: QueryTile, consumer_index):
        """(i, j): of the blocks of a tile's walk those from i on, and before j, need no mask. i is at least 1.

        They are alike for all consumers, who take turns.
        """
        num_masked, end = cutlass.Int32(1), tile.num_n_blocks
        if cutlass.const_expr(self.bounded_right):
            first_row = tile.right_edge - consumer_index * ROWS
            num_masked = tile.n_block(-1) - cutlass.max(0, (first_row + 1) // self.tile_n)
            num_masked = cutlass.max(1, num_masked)
        if cutlass.const_expr(self.features.window_left):
            last_row = tile.left_edge - consumer_index * ROWS + self.tile_m - 1
            num_masked = cutlass.min(num_masked, tile.num_n_blocks)
            end = tile.n_block(-1) - cute.ceil_div(cutlass.max(0, last_row), self.tile_n)
            end = cutlass.max(num_masked, end)
        return num_masked, end

    @cute.jit
    def change_scores(
        self, acc_S: cute.Tensor, coords: cute.Tensor, tile: QueryTile, consumer_index, i, masked: cutlass.Constexpr
    ):
        """What the score options do to the raw scores of block ``i`` of the walk, and the mask.

        ``coords``: the (row, col) view of positions in the block. A block that isn't ``masked`` is seen whole.
        """
        scores, first_key, seqlen_k = acc_as_rows(acc_S), tile.n_block(i) * self.tile_n, tile.member.seqlen_k
        if cutlass.const_expr(self.features.options):
            first_query = tile.m_block * self.tile_m + consumer_index * ROWS
            of_tile = (tile.slope, tile.batch, tile.head, first_query, tile.member.seqlen_q, seqlen_k)
            scale_log2 = tile.scale_log2 if self.features.descales else self.scale_log2
            modifier = ScoreModifier.of(self.features, self.arguments, scale_log2, *of_tile)
            modifier.apply(scores, coords, first_key, masked)
        if cutlass.const_expr(masked):
            rows, keys_left, right_edge = rows_of(coords), seqlen_k - first_key, tile.right_edge - first_key
            mask_scores(scores, coords, key_limits(rows, keys_left, right_edge, self.bounded_right))
            if cutlass.const_expr(self.features.window_left):
                mask_scores_before(scores, coords, key_starts(rows, tile.left_edge - first_key))

    def sink(self, tile: QueryTile):
        """The logit, in powers of two, that joins the sum of every row of the tile; None if there is none."""
        return self.arguments.sinks[tile.head] * LOG2_E if self.features.sinks else None

    def output_factor(self, tile: QueryTile):
        """What O of the tile is to be multiplied by; None for 1."""
        return self.arguments.output_factors[tile.batch, tile.head] if self.features.descales else None
