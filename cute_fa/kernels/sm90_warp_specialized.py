"""FlashAttention forward for Hopper: TMA loads, wgmma, and warpgroups with roles.

A CTA has one producer warp and two or three consumer warpgroups of 64 query rows each:

    producer                                consumer warpgroup
    for each tile of queries:               for each tile of queries:
        load Q                                  for each tile of keys:
        for each tile of keys:                      acc_S  = Q K^T            wgmma, both from shared memory
            load K and V  (TMA, into rings)         P      = softmax(acc_S)   in registers
                                                    acc_O += P V              wgmma, P from registers
                                                store O  (stmatrix, TMA)

Nobody waits for all: every buffer has a pair of mbarriers, "full" for those who read and "empty" for the one who
loads (``device/tma_ring.py``). The producer gives up most of its registers to the consumers. TMA fills rows past
the end of a sequence with zeros and doesn't store them, so there are no tails.

The layout of the configuration is the one that TMA writes and wgmma reads; both know only four of them, see
``HARDWARE_LAYOUTS`` in ``layouts/checks.py``.

``Sm90WarpSpecialized`` computes one step after the other. ``Sm90Overlapped`` keeps the tensor cores busy
meanwhile:

- Q K^T of the next tile of keys is issued together with P V of this one, so that the softmax of the one runs
  beside the product of the other;
- warpgroups take turns in issuing, so that one computes its softmax while another has the tensor cores;
- where shared memory has room for a second Q and for O, the step from one tile of queries to the next is such
  a step too, and O is stored beside the next tile's products;
- ``try_first``: scores are exponentiated before anyone knows their maximum (``device/lazy_softmax.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from cute_fa.arch import get_arch
from cute_fa.config import Sm90Config
from cute_fa.device import wgmma
from cute_fa.device.epilogue import store_lse
from cute_fa.device.lazy_softmax import LazySoftmax
from cute_fa.device.mask import key_limits, mask_scores, rows_of
from cute_fa.device.softmax import LOG2_E
from cute_fa.device.tile_schedule import TileSchedule
from cute_fa.device.tma_ring import TmaRing
from cute_fa.problem import StaticProblem
from layouts.checks import require_hardware_layout
from layouts.cute_adapter import to_hardware_swizzle
from layouts.smem_layout import TileLayout

SMEM_ALIGNMENT = 1024  # bytes; the period of the 128-byte swizzle
WARPGROUP = wgmma.THREADS
WARPS = WARPGROUP // 32
# Registers a thread of the producer and of the consumers, by the number of consumer warpgroups: their sum over
# the warpgroups is at most 512 (65536 registers), in multiples of 8. The values are flash-attention-3's.
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# Named barriers, one for each consumer warpgroup; 0 is that of sync_threads.
TURN_BARRIER = 1
GROUP_BARRIER = TURN_BARRIER + max(REGISTERS)
MAX_TMA_ROWS = 256


@dataclass(frozen=True)
class Tile:
    """A tile of queries as one consumer sees it. Row r of its 64 sees keys up to r + ``diagonal`` when causal."""

    m_block: cutlass.Int32
    head: cutlass.Int32
    batch: cutlass.Int32
    num_n_blocks: cutlass.Int32
    diagonal: cutlass.Int32


@dataclass(frozen=True)
class Consumer:
    """What a consumer warpgroup works with: its place, its views of shared memory, its registers."""

    index: cutlass.Int32
    tidx: cutlass.Int32
    signals: cutlass.Boolean  # whether this thread arrives at barriers for its warp
    ring_Q: TmaRing
    ring_K: TmaRing
    ring_V: TmaRing
    mma_S: cute.TiledMma
    mma_O: cute.TiledMma
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrVt: cute.Tensor
    acc_S_shape: tuple
    acc_O: cute.Tensor
    tOrP: cute.Tensor  # P as an operand of wgmma
    rP: cute.Tensor  # the same registers in the order of acc_S
    cS: cute.Tensor  # coordinates of this thread's scores
    softmax: LazySoftmax

    def issue_scores(self, q_number, number) -> cute.Tensor:
        """Issues S = Q K^T with load ``number`` of K, into fresh registers."""
        acc_S = cute.make_rmem_tensor(self.acc_S_shape, cutlass.Float32)
        self.reissue_scores(acc_S, q_number, number)
        return acc_S

    def reissue_scores(self, acc_S: cute.Tensor, q_number, number):
        """The same into given registers."""
        Q = self.tSrQ[None, None, None, self.ring_Q.buffer(q_number)]
        wgmma.issue(self.mma_S, acc_S, Q, self.tSrK[None, None, None, self.ring_K.buffer(number)], False)

    def issue_output(self, number):
        """Issues O += P V with load ``number`` of V."""
        V = self.tOrVt[None, None, None, self.ring_V.buffer(number)]
        wgmma.issue(self.mma_O, self.acc_O, self.tOrP, V, True)

    def round_probs(self, acc_S: cute.Tensor):
        """Rounds probabilities to the operand of the next P V."""
        self.rP.store(acc_S.load().to(self.rP.element_type))

    def rescale_output(self, factors: cute.Tensor):
        """Multiplies the rows of O."""
        output = wgmma.acc_as_rows(self.acc_O)
        for r in range(2):
            output[r, None] = output[r, None].load() * factors[r]

    @cute.jit
    def release(self, ring: TmaRing, number):
        """This warp has read load ``number``."""
        if self.signals:
            ring.release(number)


class Sm90WarpSpecialized:
    """The kernel for one static problem and one configuration."""

    head_dims = (64, 128, 256)
    geometry: frozenset[str] = frozenset()
    score_options: frozenset[str] = frozenset()

    @classmethod
    def smem_bytes(cls, static: StaticProblem, config: Sm90Config) -> int:
        """Shared memory of a CTA in bytes: Q, K, V, O and mbarriers."""
        head_dim = static.head_dim
        num_consumers = config.tile_m // wgmma.ROWS
        buffers_Q = num_consumers * cls._buffers_Q(head_dim, config)
        tiles = num_consumers * cls._tiles_Q_and_O(head_dim, config) * wgmma.ROWS
        tiles += 2 * config.num_stages * config.tile_n
        return tiles * head_dim * 2 + 2 * 8 * (buffers_Q + 2 * config.num_stages)

    @classmethod
    def _buffers_Q(cls, head_dim: int, config: Sm90Config) -> int:
        """Tiles of Q that a consumer has in shared memory."""
        return 1

    @classmethod
    def _tiles_Q_and_O(cls, head_dim: int, config: Sm90Config) -> int:
        """Tiles of Q and O that a consumer has in shared memory; with 1, O takes the place of Q."""
        return 1

    @classmethod
    def check(cls, static: StaticProblem, config: Sm90Config, arch: str) -> None:
        """Raises ValueError if the kernel can't be built with this configuration."""
        head_dim = static.head_dim
        num_consumers = config.tile_m // wgmma.ROWS
        if config.tile_m % wgmma.ROWS or num_consumers not in REGISTERS:
            raise ValueError(f"tile_m must be 64, 128 or 192 (64 rows a consumer warpgroup), got {config.tile_m}")
        if config.tile_n % 16 or not 16 <= config.tile_n <= MAX_TMA_ROWS:
            raise ValueError(f"tile_n must be a multiple of 16 from 16 to {MAX_TMA_ROWS}, got {config.tile_n}")
        if config.num_stages < 1:
            raise ValueError(f"num_stages must be at least 1, got {config.num_stages}")
        for rows in {wgmma.ROWS, config.tile_n}:
            require_hardware_layout(config.layout.on(rows, head_dim))
        needed, limit = cls.smem_bytes(static, config), get_arch(arch).smem_per_cta
        if needed > limit:
            raise ValueError(
                f"tiles of {config.tile_m} and {config.tile_n} rows in {config.num_stages} stages take {needed} bytes "
                f"of shared memory at head dimension {head_dim}; {arch} allows {limit}"
            )

    @classmethod
    def tma_tiles(cls, static: StaticProblem, config: Sm90Config) -> tuple[TileLayout, ...]:
        """Where the tiles of Q, K, V and O lie in shared memory, each a box of its tensor map for every atom across."""
        rows = (wgmma.ROWS, config.tile_n, config.tile_n, wgmma.ROWS)
        return tuple(require_hardware_layout(config.layout.on(n, static.head_dim)) for n in rows)

    def __init__(self, static: StaticProblem, config: Sm90Config):
        head_dim = self.head_dim = static.head_dim
        self.causal = static.causal
        self.config = config
        self.num_consumers = config.tile_m // wgmma.ROWS
        self.buffers_Q = self._buffers_Q(head_dim, config)
        self.o_replaces_q = self._tiles_Q_and_O(head_dim, config) == self.buffers_Q
        self.layout_Q, self.layout_KV, _, _ = self.tma_tiles(static, config)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        softmax_scale: cutlass.Float32,
        stream,
    ):
        """Launches the kernel: Q, O (B, S_q, H, D); K, V (B, S_k, H_kv, D); LSE (B, H, S_q) or None."""
        config = self.config
        dtype = mQ.element_type
        batch, seqlen_q, num_heads, _ = mQ.shape
        mQ, mK, mV, mO = [
            cute.make_tensor(mX.iterator, cute.select(mX.layout, mode=[1, 3, 2, 0])) for mX in (mQ, mK, mV, mO)
        ]  # (S, D, H, B)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        smem_Q, smem_KV = to_hardware_swizzle(self.layout_Q), to_hardware_swizzle(self.layout_KV)
        tma_Q, mQ = cpasync.make_tiled_tma_atom(load, mQ, smem_Q, self.layout_Q.tile)
        tma_K, mK = cpasync.make_tiled_tma_atom(load, mK, smem_KV, self.layout_KV.tile)
        tma_V, mV = cpasync.make_tiled_tma_atom(load, mV, smem_KV, self.layout_KV.tile)
        tma_O, mO = cpasync.make_tiled_tma_atom(store, mO, smem_Q, self.layout_Q.tile)

        num_m_blocks = cute.ceil_div(seqlen_q, config.tile_m)
        num_ctas = num_m_blocks * num_heads * batch
        if cutlass.const_expr(config.max_ctas is not None):
            num_ctas = cutlass.min(num_ctas, config.max_ctas)
        self.kernel(dtype, (tma_Q, tma_K, tma_V, tma_O), (mQ, mK, mV, mO), mLSE, softmax_scale * LOG2_E).launch(
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
        mLSE: cute.Tensor | None,
        scale_log2: cutlass.Float32,
    ):
        config = self.config
        seqlen_q, _, num_heads, batch = tensors[0].shape
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        schedule = TileSchedule(cute.ceil_div(seqlen_q, config.tile_m), num_heads * batch, cta, num_ctas)
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_idx == 0:
            for atom in tma_atoms:
                cpasync.prefetch_descriptor(atom)

        smem = cutlass.memory.SmemAllocator()
        num_tiles_Q = self.num_consumers * self.buffers_Q
        sQ = allocate_tiles(smem, dtype, self.layout_Q, num_tiles_Q)
        sK = allocate_tiles(smem, dtype, self.layout_KV, config.num_stages)
        sV = allocate_tiles(smem, dtype, self.layout_KV, config.num_stages)
        sO = sQ
        if cutlass.const_expr(not self.o_replaces_q):
            sO = allocate_tiles(smem, dtype, self.layout_Q, self.num_consumers)
        # Q is let go by its four warps, or by the one that has stored O from its place.
        ring_Q = TmaRing.allocate(smem, num_tiles_Q, self.tile_bytes(self.layout_Q), 1 if self.o_replaces_q else WARPS)
        ring_K, ring_V = (
            TmaRing.allocate(smem, config.num_stages, self.tile_bytes(self.layout_KV), WARPS * self.num_consumers)
            for _ in range(2)
        )
        if warp_idx == 0:
            with cute.arch.elect_one():
                for ring in (ring_Q, ring_K, ring_V):
                    ring.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        buffers, rings = (sQ, sK, sV, sO), (ring_Q, ring_K, ring_V)
        registers_producer, registers_consumer = REGISTERS[self.num_consumers]
        if warp_idx < WARPS:
            cute.arch.setmaxregister_decrease(registers_producer)
            if warp_idx == 0:
                self.produce(tma_atoms, tensors, buffers, rings, schedule)
        else:
            cute.arch.setmaxregister_increase(registers_consumer)
            mQ, mK, _, mO = tensors
            consumer = self.make_consumer(dtype, buffers, rings, scale_log2)
            output = (tma_atoms[3], mO, mLSE, sO)
            self.consume(consumer, output, schedule, mQ.shape, mK.shape[0])

    def tile_bytes(self, tile_layout) -> int:
        """Bytes of a tile of 16-bit elements."""
        return tile_layout.cosize * 2

    @cute.jit
    def tile_at(self, number, schedule: TileSchedule, shape_Q, seqlen_k, consumer_index):
        """This CTA's tile ``number``, for a consumer."""
        seqlen_q, _, num_heads, _ = shape_Q
        m_block, head_and_batch = schedule.tile(number)
        diagonal = m_block * self.config.tile_m + seqlen_k - seqlen_q
        num_keys = seqlen_k
        if cutlass.const_expr(self.causal):
            num_keys = cutlass.min(seqlen_k, diagonal + self.config.tile_m)
        # At least one block, all masked if it must be, so that no loop has to do with tiles that see no key.
        num_n_blocks = cutlass.max(1, cute.ceil_div(num_keys, self.config.tile_n))
        return Tile(
            m_block,
            head_and_batch % num_heads,
            head_and_batch // num_heads,
            num_n_blocks,
            diagonal + consumer_index * wgmma.ROWS,
        )

    @cute.jit
    def produce(self, tma_atoms, tensors, buffers, rings, schedule: TileSchedule):
        """The producer warp: loads Q, K and V of every tile, keys from the last to the first."""
        tma_Q, tma_K, tma_V, _ = tma_atoms
        mQ, mK, mV, _ = tensors
        sQ, sK, sV, _ = buffers
        ring_Q, ring_K, ring_V = rings
        group = mQ.shape[2] // mK.shape[2]
        first = cutlass.Int32(0)  # number of the first load of K and V for this tile
        for number in cutlass.range(schedule.count(), unroll=1):
            tile = self.tile_at(number, schedule, mQ.shape, mK.shape[0], 0)
            gQ = cute.local_tile(mQ[None, None, tile.head, tile.batch], self.layout_Q.tile, (None, 0))
            gK = cute.local_tile(mK[None, None, tile.head // group, tile.batch], self.layout_KV.tile, (None, 0))
            gV = cute.local_tile(mV[None, None, tile.head // group, tile.batch], self.layout_KV.tile, (None, 0))
            last = tile.num_n_blocks - 1
            for i in cutlass.range_constexpr(self.num_consumers):
                load_tile(tma_Q, gQ, tile.m_block * self.num_consumers + i, sQ, ring_Q, number * self.num_consumers + i)
                if cutlass.const_expr(i == 0):
                    load_tile(tma_K, gK, last, sK, ring_K, first)
            for i in cutlass.range(1, tile.num_n_blocks, unroll=1):
                load_tile(tma_K, gK, last - i, sK, ring_K, first + i)
                load_tile(tma_V, gV, last - i + 1, sV, ring_V, first + i - 1)
            first += tile.num_n_blocks
            load_tile(tma_V, gV, 0, sV, ring_V, first - 1)

    def make_consumer(self, dtype, buffers, rings, scale_log2) -> Consumer:
        """Partitions shared memory and allocates registers for the warpgroup of this thread."""
        sQ, sK, sV, _ = buffers
        ring_Q, ring_K, ring_V = rings
        thread, _, _ = cute.arch.thread_idx()
        index = cute.arch.make_warp_uniform(thread // WARPGROUP) - 1
        tidx = thread % WARPGROUP
        tile_n = self.config.tile_n
        mma_S = wgmma.make_scores_mma(dtype, tile_n)
        mma_O = wgmma.make_output_mma(dtype, self.head_dim)
        group_S, group_O = mma_S.get_slice(0), mma_O.get_slice(0)
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        acc_S_shape = group_S.partition_shape_C((wgmma.ROWS, tile_n))
        tOrP, rP = wgmma.probs_as_operand_a(acc_S_shape, dtype)
        cS = mma_S.get_slice(tidx).partition_C(cute.make_identity_tensor((wgmma.ROWS, tile_n)))
        return Consumer(
            index=index,
            tidx=tidx,
            signals=tidx % 32 == 0,
            ring_Q=ring_Q,
            ring_K=ring_K,
            ring_V=ring_V,
            mma_S=mma_S,
            mma_O=mma_O,
            tSrQ=group_S.make_fragment_A(group_S.partition_A(sQ)),
            tSrK=group_S.make_fragment_B(group_S.partition_B(sK)),
            tOrVt=group_O.make_fragment_B(group_O.partition_B(sVt)),
            acc_S_shape=acc_S_shape,
            acc_O=cute.make_rmem_tensor(group_O.partition_shape_C((wgmma.ROWS, self.head_dim)), cutlass.Float32),
            tOrP=tOrP,
            rP=rP,
            cS=wgmma.acc_as_rows(cS),
            softmax=LazySoftmax.create(scale_log2),
        )

    @cute.jit
    def count_masked(self, tile: Tile, consumer: Consumer):
        """Blocks of the tile, counted from its last, in which not every row sees every key; at least 1."""
        num_masked = cutlass.Int32(1)
        if cutlass.const_expr(self.causal):
            first_row = tile.diagonal - consumer.index * wgmma.ROWS  # alike for all consumers, who take turns
            num_masked = cutlass.max(1, tile.num_n_blocks - cutlass.max(0, (first_row + 1) // self.config.tile_n))
        return num_masked

    @cute.jit
    def mask(self, consumer: Consumer, acc_S: cute.Tensor, tile: Tile, seqlen_k, i):
        """Masks block ``i`` of the tile, counted from its last."""
        first_key = (tile.num_n_blocks - 1 - i) * self.config.tile_n
        keys_left, diagonal = seqlen_k - first_key, tile.diagonal - first_key
        limits = key_limits(rows_of(consumer.cS), keys_left, diagonal, self.causal)
        mask_scores(wgmma.acc_as_rows(acc_S), consumer.cS, limits)

    @cute.jit
    def consume(self, consumer: Consumer, output, schedule: TileSchedule, shape_Q, seqlen_k):
        """A consumer warpgroup: its 64 rows of every tile."""
        first = cutlass.Int32(0)
        for tile_number in cutlass.range(schedule.count(), unroll=1):
            tile = self.tile_at(tile_number, schedule, shape_Q, seqlen_k, consumer.index)
            q_number = tile_number * self.num_consumers + consumer.index
            consumer.ring_Q.wait(q_number)
            consumer.acc_O.fill(0.0)
            consumer.softmax.reset()
            num_masked = self.count_masked(tile, consumer)
            for i in cutlass.range(num_masked, unroll=1):
                self.attend_block(consumer, q_number, first + i, tile, seqlen_k, i, True)
            for i in cutlass.range(num_masked, tile.num_n_blocks, unroll=1):
                self.attend_block(consumer, q_number, first + i, tile, seqlen_k, i, False)
            first += tile.num_n_blocks
            self.store_tile(consumer, consumer.softmax, output, tile, shape_Q[0], q_number)
        cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def attend_block(self, consumer, q_number, number, tile, seqlen_k, i, masked: cutlass.Constexpr):
        """One block of keys, from its scores to O."""
        consumer.ring_K.wait(number)
        acc_S = consumer.issue_scores(q_number, number)
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_K, number)
        if cutlass.const_expr(masked):
            self.mask(consumer, acc_S, tile, seqlen_k, i)
        rescale = cute.make_rmem_tensor(2, cutlass.Float32)
        moved = consumer.softmax.fold(acc_S, rescale)
        if moved:
            consumer.rescale_output(rescale)
        consumer.round_probs(acc_S)
        consumer.ring_V.wait(number)
        consumer.issue_output(number)
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_V, number)

    @cute.jit
    def store_tile(self, consumer: Consumer, softmax: LazySoftmax, output, tile: Tile, seqlen_q, q_number):
        """Normalises O and stores it and the log-sum-exp."""
        tma_O, mO, mLSE, sO = output
        rows = tile.m_block * self.num_consumers + consumer.index
        barrier = GROUP_BARRIER + consumer.index
        lse = softmax.finish(consumer.acc_O)
        if cutlass.const_expr(mLSE is not None):
            first_row = rows * wgmma.ROWS
            gLSE = cute.domain_offset((first_row,), mLSE[tile.batch, tile.head, None])
            store_lse(lse, gLSE, consumer.cS, seqlen_q - first_row)
        # All four warps have read Q, where O is to go, or the previous O has left.
        is_storing_warp = cute.arch.make_warp_uniform(consumer.tidx // 32) == 0
        if is_storing_warp:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        rO = cute.make_rmem_tensor(consumer.acc_O.layout, sO.element_type)
        rO.store(consumer.acc_O.load().to(sO.element_type))
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), sO.element_type)
        thr_store = cute.make_tiled_copy_C(stmatrix, consumer.mma_O).get_slice(consumer.tidx)
        cute.copy(stmatrix, thr_store.retile(rO), thr_store.partition_D(sO)[None, None, None, consumer.index])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)
        if is_storing_warp:
            gO = cute.local_tile(mO[None, None, tile.head, tile.batch], self.layout_Q.tile, (None, 0))
            tOsO, tOgO = partition_tma(tma_O, sO, gO)
            cute.copy(tma_O, tOsO[None, consumer.index], tOgO[None, rows])
            cute.arch.cp_async_bulk_commit_group()
            if cutlass.const_expr(self.o_replaces_q):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                consumer.release(consumer.ring_Q, q_number)


class Sm90Overlapped(Sm90WarpSpecialized):
    """The same with products and softmax side by side; see the top of this file."""

    @classmethod
    def _carries_on(cls, head_dim: int, config: Sm90Config) -> bool:
        """Whether there is room for a second Q and for O, to begin the next tile before this one ends."""
        rows = 3 * config.tile_m + 2 * config.num_stages * config.tile_n
        return config.max_ctas is not None and rows * head_dim * 2 <= get_arch("sm_90a").smem_per_cta - 1024

    @classmethod
    def _buffers_Q(cls, head_dim: int, config: Sm90Config) -> int:
        return 2 if cls._carries_on(head_dim, config) else 1

    @classmethod
    def _tiles_Q_and_O(cls, head_dim: int, config: Sm90Config) -> int:
        return 3 if cls._carries_on(head_dim, config) else 1

    @cute.jit
    def consume(self, consumer: Consumer, output, schedule: TileSchedule, shape_Q, seqlen_k):
        carries_on = self._carries_on(self.head_dim, self.config)
        num_tiles = schedule.count()
        if consumer.index == 0:  # has the first turn
            self.pass_turn(cutlass.Int32(self.num_consumers - 1))
        number = cutlass.Int32(0)  # of the loads of K and V
        tile = self.tile_at(0, schedule, shape_Q, seqlen_k, consumer.index)
        if cutlass.const_expr(carries_on):
            self.start_tile(consumer, consumer.index, number, tile, seqlen_k)
        for tile_number in cutlass.range(num_tiles, unroll=1):
            q_number = tile_number * self.num_consumers + consumer.index
            if cutlass.const_expr(not carries_on):
                self.start_tile(consumer, q_number, number, tile, seqlen_k)
            next_tile = tile
            if tile_number + 1 < num_tiles:
                next_tile = self.tile_at(tile_number + 1, schedule, shape_Q, seqlen_k, consumer.index)
            num_masked = self.count_masked(tile, consumer)
            for i in cutlass.range(1, num_masked, unroll=1):
                number += 1
                self.attend_block(consumer, q_number, number, tile, seqlen_k, i, True)
            for i in cutlass.range(num_masked, tile.num_n_blocks, unroll=1):
                number += 1
                if cutlass.const_expr(self.config.try_first):
                    self.try_block(consumer, q_number, number)
                else:
                    self.attend_block(consumer, q_number, number, tile, seqlen_k, i, False)
            number += 1
            if cutlass.const_expr(carries_on):
                consumer.release(consumer.ring_Q, q_number)
            if cutlass.const_expr(carries_on) and tile_number + 1 < num_tiles:
                self.change_tile(consumer, output, q_number, number, tile, next_tile, shape_Q[0], seqlen_k)
            else:
                consumer.ring_V.wait(number - 1)
                consumer.issue_output(number - 1)
                warpgroup.wait_group(0)
                consumer.release(consumer.ring_V, number - 1)
                self.store_tile(consumer, consumer.softmax, output, tile, shape_Q[0], q_number)
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
    def start_tile(self, consumer, q_number, number, tile, seqlen_k):
        """The first block of a tile, up to its probabilities."""
        consumer.ring_Q.wait(q_number)
        consumer.ring_K.wait(number)
        acc_S = consumer.issue_scores(q_number, number)
        consumer.acc_O.fill(0.0)
        consumer.softmax.reset()
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_K, number)
        self.mask(consumer, acc_S, tile, seqlen_k, 0)
        consumer.softmax.fold(acc_S, cute.make_rmem_tensor(2, cutlass.Float32))
        consumer.round_probs(acc_S)

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
    def attend_block(self, consumer, q_number, number, tile, seqlen_k, i, masked: cutlass.Constexpr):
        """The scores and probabilities of block ``number``, beside the output of the one before."""
        acc_S = self.issue_both(consumer, q_number, number)
        consumer.release(consumer.ring_K, number)
        if cutlass.const_expr(masked):
            self.mask(consumer, acc_S, tile, seqlen_k, i)
        rescale = cute.make_rmem_tensor(2, cutlass.Float32)
        moved = consumer.softmax.fold(acc_S, rescale)
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_V, number - 1)
        if moved:
            consumer.rescale_output(rescale)
        consumer.round_probs(acc_S)

    @cute.jit
    def try_block(self, consumer, q_number, number):
        """The same for a block without a mask, whose maximum is looked for only if it must be.

        K is let go last, since the scores may have to be computed again.
        """
        acc_S = self.issue_both(consumer, q_number, number)
        sums = cute.make_rmem_tensor(2, cutlass.Float32)
        # The warpgroup decides as one, since wgmma is an instruction of all of it.
        again = wgmma.any_thread(consumer.softmax.try_fold(acc_S, sums), GROUP_BARRIER + consumer.index)
        if again:
            consumer.reissue_scores(acc_S, q_number, number)
            warpgroup.wait_group(0)
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
    def change_tile(self, consumer, output, q_number, number, tile, next_tile, seqlen_q, seqlen_k):
        """The first block of the next tile beside the output of this tile's last, and the store of this tile."""
        next_q_number = q_number + self.num_consumers
        consumer.ring_Q.wait(next_q_number)
        acc_S = self.issue_both(consumer, next_q_number, number)
        consumer.release(consumer.ring_K, number)
        self.mask(consumer, acc_S, next_tile, seqlen_k, 0)
        finished = consumer.softmax.copy()
        consumer.softmax.reset()
        consumer.softmax.fold(acc_S, cute.make_rmem_tensor(2, cutlass.Float32))
        warpgroup.wait_group(0)
        consumer.release(consumer.ring_V, number - 1)
        self.store_tile(consumer, finished, output, tile, seqlen_q, q_number)
        consumer.acc_O.fill(0.0)
        consumer.round_probs(acc_S)


def allocate_tiles(smem, dtype, tile_layout: TileLayout, count: int) -> cute.Tensor:
    """``count`` tiles in shared memory: (rows, cols, tile)."""
    layout = to_hardware_swizzle(tile_layout, count)
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=SMEM_ALIGNMENT, swizzle=layout.inner)


def partition_tma(atom, smem_tiles: cute.Tensor, gmem_tiles: cute.Tensor):
    """Tiles (rows, cols, count) of shared and global memory as a TMA copy takes them: (whole tile, count)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem_tiles, 0, 2), cute.group_modes(gmem_tiles, 0, 2)
    )


def load_tile(atom, gmem_tiles: cute.Tensor, block, smem_tiles: cute.Tensor, ring: TmaRing, number):
    """Loads tile ``block`` into the buffer of load ``number``, when that is free."""
    to, source = partition_tma(atom, smem_tiles, gmem_tiles)
    full = ring.acquire(number)
    cute.copy(atom, source[None, block], to[None, ring.buffer(number)], tma_bar_ptr=full)
