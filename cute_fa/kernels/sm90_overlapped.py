"""The kernel of ``sm90_warp_specialized.py`` with its steps side by side, so that the tensor cores are kept busy:

- Q K^T of the next tile of keys is issued together with P V of this one, so that the softmax of the one runs
  beside the product of the other;
- warpgroups take turns in issuing, so that one computes its softmax while another has the tensor cores;
- where shared memory has room for O beside Q, or for a part of it, the next tile's Q is loaded while this one ends,
  and O is stored beside the next tile's products;
- ``overlap_tiles``: the step from one tile of queries to the next is such a step too, which takes a second Q;
- ``try_first``: scores are exponentiated before anyone knows their maximum (``device/lazy_softmax.py``).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from cute_fa.arch import get_arch
from cute_fa.config import Sm90Config
from cute_fa.device.consumer import Consumer
from cute_fa.device.query_tiles import QueryTiles
from cute_fa.device.votes import any_thread
from cute_fa.device.wgmma import ROWS
from cute_fa.kernels.sm90_warp_specialized import GROUP_BARRIER, TURN_BARRIER, WARPGROUP, Sm90WarpSpecialized
from cute_fa.problem import StaticProblem, padded_head_dim


class Sm90Overlapped(Sm90WarpSpecialized):
    """The kernel for one static problem and one configuration."""

    @classmethod
    def own_columns_of_O(cls, static: StaticProblem, config: Sm90Config) -> int | None:
        """Of a CTA that takes several tiles, as many as there is room for."""
        if config.max_ctas is None:
            return None
        qk, vo = padded_head_dim(static.head_dim), padded_head_dim(static.head_dim_v)
        elements = (get_arch("sm_90a").smem_per_cta - 1024) // 2 - config.num_stages * config.tile_n * (qk + vo)
        room = elements // config.tile_m - config.tiles_of_Q * qk
        return next((width for width in range(vo, 0, -64) if vo % width == 0 and width <= room), None)

    @classmethod
    def check(cls, static: StaticProblem, config: Sm90Config, arch: str) -> None:
        """Raises ValueError if the kernel can't be built with this configuration."""
        super().check(static, config, arch)
        if config.tile_m < 2 * ROWS:
            raise ValueError(f"tile_m must be 128 or 192 (warpgroups of 64 rows take turns), got {config.tile_m}")

    def __init__(self, static: StaticProblem, config: Sm90Config):
        super().__init__(static, config)
        # A bias may hide all keys that a row has met so far, block after block; then no reference would be right.
        self.tries = config.try_first and static.features.bias is None

    @cute.jit
    def consume(self, consumer: Consumer, output, tiles: QueryTiles):
        num_tiles = tiles.count()
        if consumer.index == 0:  # has the first turn
            self.pass_turn(cutlass.Int32(self.num_consumers - 1))
        number = cutlass.Int32(0)  # of the loads of K and V
        tile = tiles.tile(0, consumer.index)
        if cutlass.const_expr(self.config.overlap_tiles):
            self.start_tile(consumer, consumer.index, number, tiles, tile)
        for tile_number in cutlass.range(num_tiles, unroll=1):
            q_number = tile_number * self.num_consumers + consumer.index
            if cutlass.const_expr(not self.config.overlap_tiles):
                self.start_tile(consumer, q_number, number, tiles, tile)
            next_tile = tile
            if tile_number + 1 < num_tiles:
                next_tile = tiles.tile(tile_number + 1, consumer.index)
            num_masked, end_whole = tiles.split_walk(tile, consumer.index)
            for i in cutlass.range(1, num_masked, unroll=1):
                number += 1
                self.attend_block(consumer, q_number, number, tiles, tile, i, True)
            for i in cutlass.range(num_masked, end_whole, unroll=1):
                number += 1
                if cutlass.const_expr(self.tries):
                    self.try_block(consumer, q_number, number, tiles, tile, i)
                else:
                    self.attend_block(consumer, q_number, number, tiles, tile, i, False)
            if cutlass.const_expr(tiles.features.window_left):
                for i in cutlass.range(end_whole, tile.num_n_blocks, unroll=1):
                    number += 1
                    self.attend_block(consumer, q_number, number, tiles, tile, i, True)
            number += 1
            if cutlass.const_expr(self.columns_O is not None):
                consumer.release(consumer.ring_Q, q_number)
            if cutlass.const_expr(self.config.overlap_tiles) and tile_number + 1 < num_tiles:
                self.change_tile(consumer, output, q_number, number, tiles, tile, next_tile)
            else:
                consumer.ring_V.wait(number - 1)
                consumer.issue_output(number - 1)
                warpgroup.wait_group(0)
                consumer.release(consumer.ring_V, number - 1)
                self.store_tile(consumer, consumer.softmax, output, tiles, tile, q_number)
            tile = next_tile
        cute.arch.cp_async_bulk_wait_group(0)
        if consumer.index == 0:  # nobody exits with a turn in the air
            self.take_turn(consumer.index)

    def take_turn(self, index):
        """Waits until the warpgroup before has issued its products."""
        cute.arch.barrier(barrier_id=TURN_BARRIER + index, number_of_threads=2 * WARPGROUP)

    def pass_turn(self, index):
        """Lets the next warpgroup issue."""
        following = (index + 1) % self.num_consumers
        cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + following, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def start_tile(self, consumer, q_number, number, tiles, tile):
        """The first block of a tile, up to its probabilities."""
        consumer.ring_Q.wait(q_number)
        consumer.ring_K.wait(number)
        acc_S = consumer.issue_scores(q_number, number)
        consumer.acc_O.fill(0.0)
        consumer.softmax.reset()
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_K, number)
        tiles.change_scores(acc_S, consumer.cS, tile, consumer.index, 0, True)
        consumer.softmax.fold(acc_S, cute.make_rmem_tensor(2, cutlass.Float32))
        consumer.round_probs(acc_S)
        self.clear_tail(consumer, tile, number, 0)

    def issue_both(self, consumer: Consumer, q_number, number) -> cute.Tensor:
        """Issues the scores of block ``number`` and the output of the one before; returns when the scores are there."""
        consumer.ring_K.wait(number)
        self.take_turn(consumer.index)
        acc_S = consumer.issue_scores(q_number, number)
        consumer.ring_V.wait(number - 1)
        consumer.issue_output(number - 1)
        self.pass_turn(consumer.index)
        warpgroup.wait_group(1)
        return acc_S

    @cute.jit
    def attend_block(self, consumer, q_number, number, tiles, tile, i, masked: cutlass.Constexpr):
        """The scores and probabilities of block ``number``, beside the output of the one before."""
        acc_S = self.issue_both(consumer, q_number, number)
        consumer.release(consumer.ring_K, number)
        tiles.change_scores(acc_S, consumer.cS, tile, consumer.index, i, masked)
        rescale = cute.make_rmem_tensor(2, cutlass.Float32)
        moved = consumer.softmax.fold(acc_S, rescale)
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_V, number - 1)
        if moved:
            consumer.rescale_output(rescale)
        consumer.round_probs(acc_S)

    @cute.jit
    def try_block(self, consumer, q_number, number, tiles, tile, i):
        """The same for a block without a mask, whose maximum is looked for only if it must be.

        K is let go last, since the scores may have to be computed again.
        """
        acc_S = self.issue_both(consumer, q_number, number)
        tiles.change_scores(acc_S, consumer.cS, tile, consumer.index, i, False)
        sums = cute.make_rmem_tensor(2, cutlass.Float32)
        # The warpgroup decides as one, since wgmma is an instruction of all of it.
        again = any_thread(consumer.softmax.try_fold(acc_S, sums), GROUP_BARRIER + consumer.index, WARPGROUP)
        if again:
            consumer.reissue_scores(acc_S, q_number, number)
            warpgroup.wait_group(0)
            tiles.change_scores(acc_S, consumer.cS, tile, consumer.index, i, False)
            rescale = cute.make_rmem_tensor(2, cutlass.Float32)
            consumer.softmax.fold(acc_S, rescale)
            consumer.rescale_output(rescale)
        else:
            consumer.softmax.row_sum.store(consumer.softmax.row_sum.load() + sums.load())
        consumer.release(consumer.ring_K, number)
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_V, number - 1)
        consumer.round_probs(acc_S)

    @cute.jit
    def change_tile(self, consumer, output, q_number, number, tiles, tile, next_tile):
        """The first block of the next tile beside the output of this tile's last, and the store of this tile."""
        next_q_number = q_number + self.num_consumers
        consumer.ring_Q.wait(next_q_number)
        acc_S = self.issue_both(consumer, next_q_number, number)
        consumer.release(consumer.ring_K, number)
        tiles.change_scores(acc_S, consumer.cS, next_tile, consumer.index, 0, True)
        finished = consumer.softmax.copy()
        consumer.softmax.reset()
        consumer.softmax.fold(acc_S, cute.make_rmem_tensor(2, cutlass.Float32))
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_V, number - 1)
        self.store_tile(consumer, finished, output, tiles, tile, q_number)
        consumer.acc_O.fill(0.0)
        consumer.round_probs(acc_S)
        self.clear_tail(consumer, next_tile, number, 0)
