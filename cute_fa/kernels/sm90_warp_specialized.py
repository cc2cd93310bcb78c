"""FlashAttention forward for Hopper: TMA loads, wgmma, and warpgroups with roles.

A CTA has one producer warp and two or three consumer warpgroups of 64 query rows each:

    producer                                consumer warpgroup
    for each tile of queries:               for each tile of queries:
        load Q                                  for each tile of keys:
        for each tile of keys:                      acc_S  = Q K^T            wgmma, both from shared memory
            load K and V  (TMA, into rings)         change and mask scores    only where it must
                                                    P      = softmax(acc_S)   in registers
                                                    acc_O += P V              wgmma, P from registers
                                                store O  (stmatrix, TMA)

Nobody waits for all: every buffer has a pair of mbarriers, "full" for those who read and "empty" for the one who
loads (``device/tma_ring.py``). The producer gives up most of its registers to the consumers. TMA fills rows past
the end of a sequence and columns past the head dimension with zeros and doesn't store them, so there are no tails;
but where members of a batch end within memory, what lies behind is somebody else's (``clear_tail``, ``store_output``).

The layout of the configuration is the one that TMA writes and wgmma reads; both know only four of them, see
``HARDWARE_LAYOUTS`` in ``layouts/checks.py``.

This kernel computes one step after the other; ``sm90_overlapped.py`` is the same with steps side by side.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from cute_fa.arch import get_arch
from cute_fa.config import Sm90Config
from cute_fa.device import wgmma
from cute_fa.device.consumer import Consumer
from cute_fa.device.copies import row_tile
from cute_fa.device.epilogue import store_lse
from cute_fa.device.lazy_softmax import LazySoftmax
from cute_fa.device.packed_schedule import PackedSchedule
from cute_fa.device.query_tiles import QueryTile, QueryTiles
from cute_fa.device.scores import ScoreArguments
from cute_fa.device.sequences import SequenceTensors, batch_and_longest
from cute_fa.device.softmax import LOG2_E, NO_KEY
from cute_fa.device.tile_schedule import TileSchedule
from cute_fa.device.tma_ring import TmaRing
from cute_fa.device.tma_tiles import (
    MAX_TMA_ROWS,
    allocate_shared_tiles,
    allocate_tiles,
    clear_rows,
    load_tile,
    make_tma,
    partition_tma,
    store_rows,
    tile_bytes,
    tiles_of,
)
from cute_fa.kernels.entries import Entries
from cute_fa.kernels.tiles import HeadDim
from cute_fa.problem import HEAD_DIMS, SCORE_OPTIONS, StaticProblem, padded_head_dim
from layouts.checks import require_hardware_layout
from layouts.smem_layout import TileLayout

WARPGROUP = wgmma.THREADS
WARPS = WARPGROUP // 32
# Registers a thread of the producer and of the consumers, by the number of consumer warpgroups: their sum over
# the warpgroups is at most 512 (65536 registers), in multiples of 8. The values are flash-attention-3's.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# Named barriers, one for each consumer warpgroup and one for them all; 0 is that of sync_threads.
TURN_BARRIER = 1
GROUP_BARRIER = TURN_BARRIER + max(REGISTERS)
CONSUMERS_BARRIER = GROUP_BARRIER + max(REGISTERS)


class Sm90WarpSpecialized(Entries):
    """The kernel for one static problem and one configuration."""

    head_dims = HEAD_DIMS
    geometry = frozenset({"head_dim_v", "packed", "caches"})
    score_options = SCORE_OPTIONS

    @classmethod
    def smem_bytes(cls, static: StaticProblem, config: Sm90Config) -> int:
        """Shared memory of a CTA in bytes: Q, K, V, O and mbarriers."""
        qk, vo = padded_head_dim(static.head_dim), padded_head_dim(static.head_dim_v)
        num_consumers = config.tile_m // wgmma.ROWS
        columns_O = cls.own_columns_of_O(static, config)
        elements = config.tile_m * (max(qk, vo) if columns_O is None else config.tiles_of_Q * qk + columns_O)
        elements += config.num_stages * config.tile_n * (qk + vo)
        return elements * 2 + 2 * 8 * (num_consumers * config.tiles_of_Q + 2 * config.num_stages)

    @classmethod
    def own_columns_of_O(cls, static: StaticProblem, config: Sm90Config) -> int | None:
        """How many columns of O a consumer stores at once from a place of their own; None: O takes the place of Q."""
        return None

    @classmethod
    def check(cls, static: StaticProblem, config: Sm90Config, arch: str) -> None:
        """Raises ValueError if the kernel can't be built with this configuration."""
        num_consumers = config.tile_m // wgmma.ROWS
        if config.tile_m % wgmma.ROWS or num_consumers not in REGISTERS:
            raise ValueError(f"tile_m must be 64, 128 or 192 (64 rows a consumer warpgroup), got {config.tile_m}")
        if config.tile_n % 16 or not 16 <= config.tile_n <= MAX_TMA_ROWS:
            raise ValueError(f"tile_n must be a multiple of 16 from 16 to {MAX_TMA_ROWS}, got {config.tile_n}")
        if config.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {config.num_stages}")
        if config.overlap_tiles and cls.own_columns_of_O(static, config) is None:
            raise ValueError("overlap_tiles must be False where O takes the place of Q, got True")
        cls.tma_tiles(static, config)  # refuses layouts
        needed, limit = cls.smem_bytes(static, config), get_arch(arch).smem_per_cta
        if needed > limit:
            raise ValueError(
                f"tiles of {config.tile_m} and {config.tile_n} rows in {config.num_stages} stages take {needed} bytes "
                f"of shared memory at head dimension {static.widest_head_dim}; {arch} allows {limit}"
            )

    @classmethod
    def tma_tiles(cls, static: StaticProblem, config: Sm90Config) -> tuple[TileLayout, ...]:
        """Where the tiles of Q, K, V and O lie in shared memory, each a box of its tensor map for every atom across."""
        qk, vo = padded_head_dim(static.head_dim), padded_head_dim(static.head_dim_v)
        columns_O = cls.own_columns_of_O(static, config)
        tiles = ((wgmma.ROWS, qk), (config.tile_n, qk), (config.tile_n, vo), (wgmma.ROWS, columns_O or vo))
        return tuple(require_hardware_layout(config.layout.on(*tile)) for tile in tiles)

    def __init__(self, static: StaticProblem, config: Sm90Config):
        self.features = static.features
        self.bounded_right = static.causal or static.features.window_right
        self.config = config
        self.num_consumers = config.tile_m // wgmma.ROWS
        self.columns_O = self.own_columns_of_O(static, config)
        self.qk, self.vo = HeadDim(static.head_dim), HeadDim(static.head_dim_v)
        self.layout_Q, self.layout_K, self.layout_V, self.layout_O = self.tma_tiles(static, config)
        # Whether members' queries, and keys, end before others' in the same rows of memory.
        self.packs_queries = "cu_seqlens_q" in static.sequences
        self.packs_keys = bool({"cu_seqlens_k", "seqused_k"} & set(static.sequences))

    def launch(self, mQ, mK, mV, mO, mLSE, softmax_scale, arguments, sequences, stream):
        """Makes the TMA copies and sizes the grid."""
        config = self.config
        dtype = mQ.element_type
        batch, seqlen_q = batch_and_longest(mQ.shape, sequences)
        num_heads = mQ.shape[2]
        rows_O = mO if self.packs_queries else None
        mQ, mK, mV, mO = [
            cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 3, 2, 0])) for mX in (mQ, mK, mV, mO)
        ]  # (S, D, H, B)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_Q, mQ = make_tma(load, mQ, self.layout_Q)
        tma_K, mK = make_tma(load, mK, self.layout_K)
        tma_V, mV = make_tma(load, mV, self.layout_V)
        tma_O, mO = make_tma(store, mO, self.layout_O)

        num_m_blocks = cute.ceil_div(seqlen_q, config.tile_m)
        num_ctas = num_m_blocks * num_heads * batch
        if cutlass.const_expr(config.max_ctas is not None):
            num_ctas = cutlass.min(num_ctas, config.max_ctas)
        tma_atoms, tensors = (tma_Q, tma_K, tma_V, tma_O), (mQ, mK, mV, mO)
        self.kernel(dtype, tma_atoms, tensors, rows_O, mLSE, softmax_scale * LOG2_E, arguments, sequences).launch(
            grid=(num_ctas, 1, 1),
            block=(config.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        dtype: cutlass.Constexpr,
        tma_atoms: tuple,
        tensors: tuple,
        rows_O: cute.Tensor | None,
        mLSE: cute.Tensor | None,
        scale_log2: cutlass.Float32,
        arguments: ScoreArguments | None,
        sequences: tuple | None,
    ):
        config = self.config
        mQ, mK, _, mO = tensors
        tiles = self.tiles_of_cta(mQ, mK, scale_log2, arguments, sequences)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in tma_atoms:
                cpasync.prefetch_descriptor(atom)

        smem = cutlass.memory.SmemAllocator()
        num_tiles_Q = self.num_consumers * config.tiles_of_Q
        if cutlass.const_expr(self.columns_O is None):
            sQ, sO = allocate_shared_tiles(smem, dtype, (self.layout_Q, self.layout_O), num_tiles_Q)
        else:
            sQ = allocate_tiles(smem, dtype, self.layout_Q, num_tiles_Q)
        sK = allocate_tiles(smem, dtype, self.layout_K, config.num_stages)
        sV = allocate_tiles(smem, dtype, self.layout_V, config.num_stages)
        if cutlass.const_expr(self.columns_O is not None):
            sO = allocate_tiles(smem, dtype, self.layout_O, self.num_consumers)
        # Q is let go by its four warps, or by the one that has stored O from its place.
        readers_Q = 1 if self.columns_O is None else WARPS
        ring_Q = TmaRing.allocate(smem, num_tiles_Q, tile_bytes(self.layout_Q), readers_Q)
        ring_K, ring_V = (
            TmaRing.allocate(smem, config.num_stages, tile_bytes(layout), WARPS * self.num_consumers)
            for layout in (self.layout_K, self.layout_V)
        )
        if warp_idx == 0:
            with cute.arch.elect_one():
                for ring in (ring_Q, ring_K, ring_V):
                    ring.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        buffers, rings = (sQ, sK, sV), (ring_Q, ring_K, ring_V)
        registers_producer, registers_consumer = REGISTERS[self.num_consumers]
        if warp_idx < WARPS:
            cute.arch.setmaxregister_decrease(registers_producer)
            if warp_idx == 0:
                self.produce(tma_atoms, tensors, buffers, rings, tiles)
        else:
            cute.arch.setmaxregister_increase(registers_consumer)
            scale = cutlass.Float32(1.0) if self.features.scales else scale_log2
            no_key = NO_KEY if self.features.options else -cutlass.Float32.inf
            consumer = Consumer.create(buffers, rings, config.tile_n, self.qk, self.vo, scale, no_key)
            output = (tma_atoms[3], mO, rows_O, mLSE, sO)
            if cutlass.const_expr(self.packs_queries):
                # CTAs are launched as if all were as long as the longest member: some may have nothing to do.
                if tiles.count() > 0:
                    self.consume(consumer, output, tiles)
            else:
                self.consume(consumer, output, tiles)

    def tiles_of_cta(self, mQ, mK, scale_log2, arguments, sequences) -> QueryTiles:
        """What this CTA computes; tensors as the TMA copies take them: (S, D, H, B)."""
        tile_m, tile_n = self.config.tile_m, self.config.tile_n
        rows, _, num_heads, batch = mQ.shape
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        if self.packs_queries:
            cu_seqlens = SequenceTensors(*sequences).cu_seqlens_q
            schedule = PackedSchedule.create(cu_seqlens, rows, num_heads, tile_m, cta, num_ctas)
        else:
            schedule = TileSchedule(cute.ceil_div(rows, tile_m), num_heads * batch, cta, num_ctas)
        static = (tile_m, tile_n, self.features, self.bounded_right)
        return QueryTiles(schedule, *static, mQ, mK, scale_log2, arguments, sequences)

    @cute.jit
    def produce(self, tma_atoms, tensors, buffers, rings, tiles: QueryTiles):
        """The producer warp: loads Q, K and V of every tile, keys from the last to the first."""
        tma_Q, tma_K, tma_V, _ = tma_atoms
        mQ, mK, mV, _ = tensors
        sQ, sK, sV = buffers
        ring_Q, ring_K, ring_V = rings
        group = mQ.shape[2] // mK.shape[2]
        first = cutlass.Int32(0)  # number of the first load of K and V for this tile
        for number in cutlass.range(tiles.count(), unroll=1):
            tile = tiles.tile(number, 0)
            member, head_kv = tile.member, tile.head // group
            gQ = tiles_of(mQ[None, None, tile.head, member.batch_q], member.first_q, self.layout_Q)
            gK = tiles_of(mK[None, None, head_kv, member.batch_k], member.first_k, self.layout_K)
            gV = tiles_of(mV[None, None, head_kv, member.batch_k], member.first_k, self.layout_V)
            for i in cutlass.range_constexpr(self.num_consumers):
                load_tile(tma_Q, gQ, tile.m_block * self.num_consumers + i, sQ, ring_Q, number * self.num_consumers + i)
                if cutlass.const_expr(i == 0):
                    load_tile(tma_K, gK, tile.n_block(0), sK, ring_K, first)
            for i in cutlass.range(1, tile.num_n_blocks, unroll=1):
                load_tile(tma_K, gK, tile.n_block(i), sK, ring_K, first + i)
                load_tile(tma_V, gV, tile.n_block(i) + 1, sV, ring_V, first + i - 1)
            first += tile.num_n_blocks
            load_tile(tma_V, gV, tile.n_block(tile.num_n_blocks - 1), sV, ring_V, first - 1)

    @cute.jit
    def consume(self, consumer: Consumer, output, tiles: QueryTiles):
        """A consumer warpgroup: its 64 rows of every tile."""
        first = cutlass.Int32(0)
        for tile_number in cutlass.range(tiles.count(), unroll=1):
            tile = tiles.tile(tile_number, consumer.index)
            q_number = tile_number * self.num_consumers + consumer.index
            consumer.ring_Q.wait(q_number)
            consumer.acc_O.fill(0.0)
            consumer.softmax.reset()
            num_masked, end_whole = tiles.split_walk(tile, consumer.index)
            for i in cutlass.range(num_masked, unroll=1):
                self.attend_block(consumer, q_number, first + i, tiles, tile, i, True)
            for i in cutlass.range(num_masked, end_whole, unroll=1):
                self.attend_block(consumer, q_number, first + i, tiles, tile, i, False)
            if cutlass.const_expr(self.features.window_left):
                for i in cutlass.range(end_whole, tile.num_n_blocks, unroll=1):
                    self.attend_block(consumer, q_number, first + i, tiles, tile, i, True)
            first += tile.num_n_blocks
            self.store_tile(consumer, consumer.softmax, output, tiles, tile, q_number)
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def attend_block(self, consumer, q_number, number, tiles, tile, i, masked: cutlass.Constexpr):
        """One block of keys, from its scores to O."""
        consumer.ring_K.wait(number)
        acc_S = consumer.issue_scores(q_number, number)
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_K, number)
        tiles.change_scores(acc_S, consumer.cS, tile, consumer.index, i, masked)
        rescale = cute.make_rmem_tensor(2, cutlass.Float32)
        moved = consumer.softmax.fold(acc_S, rescale)
        if moved:
            consumer.rescale_output(rescale)
        consumer.round_probs(acc_S)
        consumer.ring_V.wait(number)
        if cutlass.const_expr(masked):
            self.clear_tail(consumer, tile, number, i)
        consumer.issue_output(number)
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_V, number)

    @cute.jit
    def clear_tail(self, consumer: Consumer, tile: QueryTile, number, i):
        """Zeroes what load ``number`` of V, block ``i`` of a walk, brings from behind a member's last key.

        Probabilities are 0 there, but what lies there may be inf or NaN. All consumers do it together.
        """
        if cutlass.const_expr(self.packs_keys):
            keys_left = tile.member.seqlen_k - tile.n_block(i) * self.config.tile_n
            if keys_left < self.config.tile_n:
                consumer.ring_V.wait(number)
                num_threads = self.num_consumers * WARPGROUP
                thread = consumer.index * WARPGROUP + consumer.tidx
                clear_rows(consumer.sV[None, None, consumer.ring_V.buffer(number)], keys_left, thread, num_threads)
                cute.arch.barrier(barrier_id=CONSUMERS_BARRIER, number_of_threads=num_threads)

    @cute.jit
    def store_tile(
        self, consumer: Consumer, softmax: LazySoftmax, output, tiles: QueryTiles, tile: QueryTile, q_number
    ):
        """Normalises O and stores it and the log-sum-exp."""
        mLSE = output[3]
        first_query = (tile.m_block * self.num_consumers + consumer.index) * wgmma.ROWS
        lse = softmax.finish(consumer.acc_O, tiles.sink(tile), tiles.output_factor(tile))
        if cutlass.const_expr(mLSE is not None):
            gLSE = cute.domain_offset((first_query,), tile.member.statistics(mLSE, tile.head))
            store_lse(lse, gLSE, consumer.cS, tile.member.seqlen_q - first_query)
        for part in cutlass.range_constexpr(self.vo.padded // self.layout_O.tile[1]):
            self.store_columns(consumer, output, tile, part)
        if cutlass.const_expr(self.columns_O is None):  # noqa: SIM102 (joined, it would be decided at run time)
            if cute.arch.make_warp_uniform(consumer.tidx // 32) == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                consumer.release(consumer.ring_Q, q_number)

    @cute.jit
    def store_columns(self, consumer: Consumer, output, tile: QueryTile, part: cutlass.Constexpr):
        """Stores as many columns of O as the tile in shared memory has."""
        tma_O, mO, rows_O, _, sO = output
        rows = tile.m_block * self.num_consumers + consumer.index
        barrier = GROUP_BARRIER + consumer.index
        queries_left = tile.member.seqlen_q - rows * wgmma.ROWS
        columns = self.layout_O.tile[1]
        # All four warps have read Q, where O is to go, or what of O lay there has left.
        is_storing_warp = cute.arch.make_warp_uniform(consumer.tidx // 32) == 0
        if is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        acc_columns = wgmma.acc_columns(consumer.acc_O, part * columns, columns)
        wgmma.store_accumulator(acc_columns, sO[None, None, consumer.index], consumer.tidx)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        whole = True
        if cutlass.const_expr(self.packs_queries):
            whole = queries_left >= wgmma.ROWS
            if not whole:  # TMA would write rows of the next member
                gO = row_tile(tile.member.queries(rows_O, tile.head), rows * wgmma.ROWS, wgmma.ROWS)
                width = min(columns, self.vo.size - part * columns)
                gO = cute.local_tile(cute.domain_offset((0, part * columns), gO), (wgmma.ROWS, width), (0, 0))
                store_rows(sO[None, None, consumer.index], gO, queries_left, consumer.tidx, WARPGROUP)
                cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if is_storing_warp:
            gO = tiles_of(mO[None, None, tile.head, tile.member.batch_q], tile.member.first_q, self.layout_O, part)
            tOsO, tOgO = partition_tma(tma_O, sO, gO)
            if cutlass.const_expr(self.packs_queries):
                if whole:
                    cute.copy(tma_O, tOsO[None, consumer.index], tOgO[None, rows])
            else:
                cute.copy(tma_O, tOsO[None, consumer.index], tOgO[None, rows])
            cute.arch.cp_async_bulk_commit_group()
