"""Short queries over many keys (decoding): the keys are split over warps, CTAs and the whole card.

Such a problem is bound by reading K and V once. One CTA computes one tile of 16 packed rows, a row being a
(query position, head) pair of the heads that share one head of K and V, over its part of the keys. Each warp
walks its own tiles of those keys through its own ring in shared memory and waits for no other warp:

    load Q                               and keep all 16 rows in registers
    for each tile of keys of this warp:
        start the loads of a later tile  cp.async, num_stages - 1 ahead
        acc_S  = Q K^T
        P      = softmax(acc_S)          its own running maximum
        acc_O += P V
    merge the warps                      through shared memory
    store O, or with several splits this split's O and log-sum-exp in fp32

A second kernel merges the splits: o = sum_i 2^(lse_i - lse) o_i (Flash-Decoding; Dao et al., 2023).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from cute_fa.arch import get_arch
from cute_fa.config import SplitConfig
from cute_fa.device.copies import copy_rows, gmem_vector, make_gmem_tiled_copies, row_tile
from cute_fa.device.mask import key_limits, mask_scores, rows_of
from cute_fa.device.mma import (
    SmemOperand,
    acc_as_operand_a,
    acc_as_rows,
    gemm_rs,
    make_ldmatrix_atom,
    make_tiled_mma,
)
from cute_fa.device.sequences import Member, copy_paged_rows
from cute_fa.device.softmax import LN_2, LOG2_E, NO_KEY, OnlineSoftmax, quad_reduce, thread_row_max
from cute_fa.kernels.tiles import SMEM_ALIGNMENT, require_smem, require_tiles, tile_bytes
from cute_fa.problem import StaticProblem
from layouts.cute_adapter import to_cute

WARP = 32
ROWS = 16  # of a tile of queries: one m16n8k16 high
MERGE_PAD = 8  # floats behind each row of the warps' O: 8-byte stores of a quarter-warp then meet all banks
COMBINE_AHEAD = 2  # splits whose O a thread of the second kernel loads at once
MIN_TILES = 2  # of keys for each warp of a split


class Divisors(NamedTuple):
    """By what a CTA divides its index, and a packed row (``group``), to find its work.

    The host prepares them: a division by any other run-time value takes more than 100 cycles, in which nothing loads.
    """

    num_m_blocks: cute.FastDivmodDivisorV2
    num_splits: cute.FastDivmodDivisorV2
    num_heads_kv: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2


class RowDivisors(NamedTuple):
    """By what a CTA of the second kernel divides its index."""

    seqlen_q: cute.FastDivmodDivisorV2
    num_heads: cute.FastDivmodDivisorV2


def vector_copy(src: cute.Tensor, dst: cute.Tensor):
    """Copies a few contiguous elements at once."""
    bits = cute.size(src) * src.element_type.width
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), src.element_type, num_bits_per_copy=bits)
    cute.copy(atom, src, dst)


class Sm80SplitKV:
    """The kernels for one static problem and one configuration."""

    COMBINE_THREADS = 256
    head_dims = (64, 128)
    geometry = frozenset({"caches", "pages"})
    score_options: frozenset[str] = frozenset()

    @staticmethod
    def smem_bytes(static: StaticProblem, config: SplitConfig) -> int:
        """Shared memory of a CTA in bytes: the warps' rings, where their O are merged later; Q; maxima and sums."""
        head_dim, num_warps = static.head_dim, config.num_threads // WARP
        rings = 2 * tile_bytes(config, config.tile_n, head_dim, config.num_stages * num_warps)
        merged = num_warps * ROWS * (head_dim + MERGE_PAD) * 4
        statistics = 2 * num_warps * ROWS * 4
        return max(rings, merged) + tile_bytes(config, ROWS, head_dim) + statistics

    @staticmethod
    def check(static: StaticProblem, config: SplitConfig, arch: str) -> None:
        """Raises ValueError if the kernel can't be built with this configuration."""
        if not isinstance(config, SplitConfig):
            raise ValueError(f"config must be a SplitConfig, got {type(config).__name__}")
        if config.tile_m != ROWS:
            raise ValueError(f"tile_m must be {ROWS}, got {config.tile_m}")
        if config.tile_n % 16:
            raise ValueError(f"tile_n must be a multiple of 16, got {config.tile_n}")
        if config.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {config.num_stages}")
        if config.early_combine and get_arch(arch).capability < (9, 0):
            raise ValueError(f"early_combine must be False before sm_90, which brings dependent launches, got {arch}")
        require_tiles(config, static.head_dim)
        require_smem(Sm80SplitKV.smem_bytes(static, config), config, static.head_dim, arch)

    @staticmethod
    def num_ctas(batch: int, seqlen_q: int, num_heads: int, num_heads_kv: int) -> int:
        """CTAs of a split."""
        return -(-seqlen_q * (num_heads // num_heads_kv) // ROWS) * num_heads_kv * batch

    @staticmethod
    def num_splits(config: SplitConfig, num_ctas: int, seqlen_k: int, num_sms: int) -> int:
        """Into how many parts the keys are split.

        The fewest that fill the card nearly as evenly as possible (85 %, as in flash-attention's
        num_splits_heuristic), each with at least ``MIN_TILES`` tiles a warp.

        Args:
            num_ctas: CTAs without a split.
            num_sms: streaming multiprocessors of the card.
        """
        slots = num_sms * config.ctas_per_sm
        keys = config.tile_n * config.num_threads // WARP * MIN_TILES
        most = max(1, min(slots // num_ctas if num_ctas <= slots else 4, -(-seqlen_k // keys)))

        def evenness(splits: int) -> float:
            waves = num_ctas * splits / slots
            return waves / -(-num_ctas * splits // slots)

        best = max(evenness(splits) for splits in range(1, most + 1))
        return next(splits for splits in range(1, most + 1) if evenness(splits) >= 0.85 * best)

    @staticmethod
    def workspace_floats(batch: int, seqlen_q: int, num_heads: int, head_dim: int, num_splits: int) -> int:
        """Floats that the splits leave to be merged: O and log-sum-exp of each."""
        return num_splits * batch * seqlen_q * num_heads * (head_dim + 1) if num_splits > 1 else 0

    @staticmethod
    def combine_smem_bytes(head_dim: int) -> int:
        """Shared memory of a CTA of the second kernel."""
        return Sm80SplitKV.COMBINE_THREADS // (head_dim // 4) * (head_dim + 2) * 4

    def __init__(self, static: StaticProblem, config: SplitConfig):
        head_dim = self.head_dim = static.head_dim
        self.causal = static.causal
        self.config = config
        self.num_warps = config.num_threads // WARP
        self.layout_Q = config.layout.on(ROWS, head_dim)
        self.layout_KV = config.layout.on(config.tile_n, head_dim)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        softmax_scale: cutlass.Float32,
        workspace: cute.Tensor,
        num_splits: cutlass.Int32,
        sequences: tuple | None,
        stream,
    ):
        """Launches the kernels: Q, O (B, S_q, H, D); K, V (B, S_k, H_kv, D); LSE (B, H, S_q) or None.

        workspace: with several splits, num_splits * B * H * S_q * (D + 1) floats.
        sequences: the fields of ``SequenceTensors``, if any; queries are not packed.
        """
        batch, seqlen_q, num_heads, _ = mQ.shape
        num_heads_kv = mK.shape[2]
        group = num_heads // num_heads_kv
        num_m_blocks = cute.ceil_div(seqlen_q * group, ROWS)
        divisors = Divisors(*map(cute.fast_divmod_create_divisor_v2, (num_m_blocks, num_splits, num_heads_kv, group)))
        self.kernel(mQ, mK, mV, mO, mLSE, softmax_scale * LOG2_E, workspace, divisors, sequences).launch(
            grid=(num_m_blocks * num_splits * num_heads_kv * batch, 1, 1),
            block=(self.config.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,  # per cent: all of L1 that can be shared memory
        )
        if num_splits > 1:
            row_divisors = RowDivisors(*map(cute.fast_divmod_create_divisor_v2, (seqlen_q, num_heads)))
            self.combine(mO, mLSE, workspace, num_splits, row_divisors).launch(
                grid=(batch * num_heads * seqlen_q, 1, 1),
                block=(self.COMBINE_THREADS, 1, 1),
                stream=stream,
                use_pdl=self.config.early_combine,
            )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        scale_log2: cutlass.Float32,
        workspace: cute.Tensor,
        divisors: Divisors,
        sequences: tuple | None,
    ):
        tile_n, head_dim, stages, num_warps = self.config.tile_n, self.head_dim, self.config.num_stages, self.num_warps
        dtype = mQ.element_type
        seqlen_q, num_heads = mQ.shape[1], mQ.shape[2]
        num_splits, group = divisors.num_splits.divisor, divisors.group
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.make_warp_uniform(tidx // WARP), tidx % WARP
        cta, _, _ = cute.arch.block_idx()
        rest, m_block = divmod(cta, divisors.num_m_blocks)
        rest, split = divmod(rest, divisors.num_splits)
        batch, head_kv = divmod(rest, divisors.num_heads_kv)
        first_row = m_block * ROWS
        rows_left = seqlen_q * group.divisor - first_row
        member = Member.find(batch, mQ.shape, mK.shape, sequences)
        seqlen_k = member.seqlen_k
        if cutlass.const_expr(self.config.early_combine):
            cute.arch.griddepcontrol_launch_dependents()

        # Shared memory: Q (16, D), and for each warp num_stages tiles of K and of V (tile_n, D).
        smem = cutlass.memory.SmemAllocator()
        rings = to_cute(self.layout_KV, stages * num_warps)
        sK = smem.allocate_tensor(dtype, rings, byte_alignment=SMEM_ALIGNMENT)
        sV = smem.allocate_tensor(dtype, rings, byte_alignment=SMEM_ALIGNMENT)
        sQ = smem.allocate_tensor(dtype, to_cute(self.layout_Q), byte_alignment=SMEM_ALIGNMENT)
        statistics = cute.make_layout((ROWS, num_warps))
        sRef = smem.allocate_tensor(cutlass.Float32, statistics, byte_alignment=16)
        sSum = smem.allocate_tensor(cutlass.Float32, statistics, byte_alignment=16)
        transposed = cute.make_layout((head_dim, tile_n, stages * num_warps), stride=(tile_n, 1, tile_n * head_dim))
        sVt = cute.composition(sV, transposed)

        # Products and loads of one warp.
        tiled_mma = make_tiled_mma(dtype, 1)
        thr_mma = tiled_mma.get_slice(lane)
        ldmatrix, ldmatrix_trans = make_ldmatrix_atom(dtype, False), make_ldmatrix_atom(dtype, True)
        tSrQ = SmemOperand(ldmatrix, tiled_mma, "A", sQ, lane)
        tSrK = SmemOperand(ldmatrix, tiled_mma, "B", sK, lane)
        tOrVt = SmemOperand(ldmatrix_trans, tiled_mma, "B", sVt, lane)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((ROWS, head_dim)), cutlass.Float32)
        acc_O.fill(0.0)
        cS = acc_as_rows(thr_mma.partition_C(cute.make_identity_tensor((ROWS, tile_n))))
        softmax = OnlineSoftmax.start(cute.size(cS, mode=[0]), scale_log2)
        warp_copy, _ = make_gmem_tiled_copies(dtype, head_dim, WARP)
        thr_load = warp_copy.get_slice(lane)
        ring = SimpleNamespace(  # what brings this warp's tiles to shared memory
            copy=warp_copy,
            thr_load=thr_load,
            tensors=(member.keys(mK, head_kv), member.keys(mV, head_kv)),
            tiles=(thr_load.partition_D(sK), thr_load.partition_D(sV)),
            rows=thr_load.partition_S(cute.make_identity_tensor((tile_n, head_dim))),
            pages=member.pages,
        )

        # This split's tiles are [first_tile, end_tile); this warp takes every num_warps-th of them.
        num_tiles = cute.ceil_div(seqlen_k, tile_n)
        tiles_of_split = (num_tiles + num_splits - 1) // divisors.num_splits
        first_tile = split * tiles_of_split + warp
        end_tile = cutlass.min(num_tiles, (split + 1) * tiles_of_split)
        end_key = cutlass.min(seqlen_k, end_tile * tile_n)

        self.load_queries(mQ, sQ, batch, head_kv, group, first_row, rows_left, tidx)
        cute.arch.cp_async_commit_group()
        for ahead in cutlass.range_constexpr(stages - 1):
            slot = ahead * num_warps + warp
            self.load_tile(ring, first_tile + ahead * num_warps, slot, end_key)
        cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.sync_threads()
        tSrQ.load_all()

        # Row r is query (first_row + r) // group; it sees keys up to its position + seqlen_k - seqlen_q.
        positions = rows_of(cS)
        for r in cutlass.range_constexpr(cute.size(positions)):
            positions[r] = (first_row + positions[r]) // group
        num_steps = cutlass.max(0, cute.ceil_div(end_tile - first_tile, num_warps))
        for step in cutlass.range(num_steps, unroll=1):
            tile = first_tile + step * num_warps
            cute.arch.cp_async_wait_group(stages - 2)
            cute.arch.sync_warp()  # this tile is here, and no lane reads the one before any more
            slot = (step + stages - 1) % stages * num_warps + warp
            self.load_tile(ring, tile + (stages - 1) * num_warps, slot, end_key)

            slot = step % stages * num_warps + warp
            acc_S = cute.make_rmem_tensor(thr_mma.partition_shape_C((ROWS, tile_n)), cutlass.Float32)
            acc_S.fill(0.0)
            gemm_rs(tiled_mma, acc_S, tSrQ.fragment, tSrK, slot)
            keys_left = seqlen_k - tile * tile_n
            diagonal = seqlen_k - seqlen_q - tile * tile_n
            needs_mask = keys_left < tile_n
            if cutlass.const_expr(self.causal):
                needs_mask = needs_mask or diagonal < tile_n - 1
            if needs_mask:
                mask_scores(acc_as_rows(acc_S), cS, key_limits(positions, keys_left, diagonal, self.causal))
            softmax.rescale(thread_row_max(acc_S), acc_O)
            softmax.exponentiate(acc_S)
            gemm_rs(tiled_mma, acc_O, acc_as_operand_a(acc_S, dtype), tOrVt, slot)
        cute.arch.cp_async_wait_group(0)

        # The warps merge: each scales its O to the largest reference of all and to the sum of all.
        rows = rows_of(cS)
        for r in cutlass.range_constexpr(cute.size(rows)):
            softmax.row_sum[r] = quad_reduce(softmax.row_sum[r], lambda x, y: x + y)
            if lane % 4 == 0:
                sRef[rows[r], warp] = softmax.row_ref[r]
                sSum[rows[r], warp] = softmax.row_sum[r]
        cute.arch.sync_threads()  # which also ends the use of the rings
        output = acc_as_rows(acc_O)
        for r in cutlass.range_constexpr(cute.size(rows)):
            row_ref, row_sum = sRef[rows[r], 0], cutlass.Float32(0.0)
            for w in cutlass.range_constexpr(1, num_warps):
                row_ref = cute.arch.fmax(row_ref, sRef[rows[r], w])
            for w in cutlass.range_constexpr(num_warps):
                row_sum = row_sum + sSum[rows[r], w] * cute.math.exp2(sRef[rows[r], w] - row_ref, fastmath=True)
            inverse = 0.0 if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)
            factor = cute.math.exp2(softmax.row_ref[r] - row_ref, fastmath=True) * inverse
            output[r, None] = output[r, None].load() * factor
            if warp == 0 and lane % 4 == 0 and rows[r] < rows_left:
                lse = row_ref + cute.math.log2(row_sum, fastmath=True)
                position, head = positions[r], head_kv * group.divisor + (first_row + rows[r]) % group
                if num_splits > 1:
                    _, lse_parts = self.parts(workspace, mQ.shape, num_splits)
                    lse_parts[split, (batch * num_heads + head) * seqlen_q + position] = lse
                if cutlass.const_expr(mLSE is not None):
                    lse = lse * LN_2
                    if num_splits == 1:
                        mLSE[batch, head, position] = lse
        sO = cute.make_tensor(
            cute.recast_ptr(sK.iterator, dtype=cutlass.Float32),
            cute.make_layout(
                (ROWS, head_dim, num_warps), stride=(head_dim + MERGE_PAD, 1, ROWS * (head_dim + MERGE_PAD))
            ),
        )
        cO = acc_as_rows(thr_mma.partition_C(cute.make_identity_tensor((ROWS, head_dim))))
        for r in cutlass.range_constexpr(cute.size(rows)):
            for c in cutlass.range_constexpr(cute.size(cO, mode=[1])):
                sO[rows[r], cO[r, c][1], warp] = output[r, c]
        cute.arch.sync_threads()
        self.store_rows(mO, sO, workspace, num_splits, split, batch, head_kv, group, first_row, rows_left, tidx)

    def load_tile(self, ring, tile, slot, end_key):
        """Starts the loads of a tile of K and of V into a slot of the ring, zeros from ``end_key`` on."""
        tile_n = self.config.tile_n
        keys_left = end_key - tile * tile_n
        for tensor, slots in zip(ring.tensors, ring.tiles, strict=True):
            target = slots[None, None, None, slot]
            if ring.pages is None:
                source = ring.thr_load.partition_S(row_tile(tensor, tile * tile_n, tile_n))
                copy_rows(ring.copy, source, target, ring.rows, keys_left)
            else:
                copy_paged_rows(ring.copy, tensor, ring.pages, target, ring.rows, tile * tile_n, keys_left, None)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_queries(self, mQ, sQ, batch, head_kv, group, first_row, rows_left, tidx):
        """Starts the loads of the packed rows of Q, zeros behind the last; all threads of the CTA take part."""
        load_copy, _ = make_gmem_tiled_copies(mQ.element_type, self.head_dim, self.config.num_threads)
        thr_load = load_copy.get_slice(tidx)
        tQsQ = thr_load.partition_D(sQ)
        tQcQ = thr_load.partition_S(cute.make_identity_tensor((ROWS, self.head_dim)))
        for m in cutlass.range_constexpr(cute.size(tQcQ, mode=[1])):
            row = tQcQ[0, m, 0][0]
            if row < ROWS:  # with many threads some have no row
                packed = cutlass.min(row, rows_left - 1) + first_row
                position, head_of_group = divmod(packed, group)
                query = mQ[batch, position, head_kv * group.divisor + head_of_group, None]
                for k in cutlass.range_constexpr(cute.size(tQcQ, mode=[2])):
                    vector = gmem_vector(query, tQcQ[0, m, k][1], cute.size(tQcQ, mode=[0]))
                    pred = cute.make_rmem_tensor(1, cutlass.Boolean)
                    pred[0] = row < rows_left
                    source = cute.make_tensor(vector.iterator, cute.make_layout(tQsQ[None, m, k].shape))
                    cute.copy(load_copy, source, tQsQ[None, m, k], pred=pred)

    @cute.jit
    def store_rows(self, mO, sO, workspace, num_splits, split, batch, head_kv, group, first_row, rows_left, tidx):
        """Adds the warps' O up and stores it, 4 columns a thread: rounded, or as this split's part in fp32."""
        threads_per_row = self.head_dim // 4
        col = tidx % threads_per_row * 4
        num_heads, seqlen_q = mO.shape[2], mO.shape[1]
        rows_at_once = self.config.num_threads // threads_per_row
        for i in cutlass.range_constexpr(ROWS // rows_at_once):
            row = tidx // threads_per_row + i * rows_at_once
            if row < rows_left:
                total = cute.make_rmem_tensor(4, cutlass.Float32)
                total.fill(0.0)
                for w in cutlass.range_constexpr(self.num_warps):
                    part = cute.make_rmem_tensor(4, cutlass.Float32)
                    offset = row * (self.head_dim + MERGE_PAD) + col + w * ROWS * (self.head_dim + MERGE_PAD)
                    vector_copy(cute.make_tensor((sO.iterator + offset).align(16), cute.make_layout(4)), part)
                    total.store(total.load() + part.load())
                position, head_of_group = divmod(first_row + row, group)
                head = head_kv * group.divisor + head_of_group
                if num_splits > 1:
                    o_parts, _ = self.parts(workspace, mO.shape, num_splits)
                    part_row = o_parts[None, split, (batch * num_heads + head) * seqlen_q + position]
                    vector_copy(total, gmem_vector(part_row, col, 4))
                else:
                    rounded = cute.make_rmem_tensor(4, mO.element_type)
                    rounded.store(total.load().to(mO.element_type))
                    vector_copy(rounded, gmem_vector(mO[batch, position, head, None], col, 4))

    def parts(self, workspace, shape, num_splits):
        """The splits' O (D, splits, rows) and log-sum-exp (splits, rows), in log2, of all B * H * S_q rows."""
        num_rows = shape[0] * shape[1] * shape[2]
        row_stride = cutlass.Int64(num_splits) * self.head_dim
        o_layout = cute.make_layout((self.head_dim, num_splits, num_rows), stride=(1, self.head_dim, row_stride))
        lse_layout = cute.make_layout((num_splits, num_rows), stride=(1, num_splits))
        lse_iterator = workspace.iterator + row_stride * num_rows
        return cute.make_tensor(workspace.iterator, o_layout), cute.make_tensor(lse_iterator, lse_layout)

    @cute.kernel
    def combine(
        self,
        mO: cute.Tensor,
        mLSE: cute.Tensor | None,
        workspace: cute.Tensor,
        num_splits: cutlass.Int32,
        divisors: RowDivisors,
    ):
        """Merges the splits of one row: o = sum_i 2^(lse_i - lse) o_i, lse = log2 sum_i 2^lse_i."""
        tidx, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        head_dim = self.head_dim
        o_parts, lse_parts = self.parts(workspace, mO.shape, num_splits)

        # Groups of threads merge the splits that are theirs, each thread 4 columns; then the groups are merged.
        threads_per_row = head_dim // 4
        num_groups = self.COMBINE_THREADS // threads_per_row
        smem = cutlass.memory.SmemAllocator()
        sPart = smem.allocate_tensor(cutlass.Float32, cute.make_layout((head_dim, num_groups)), byte_alignment=16)
        sRef = smem.allocate_tensor(cutlass.Float32, cute.make_layout(num_groups), byte_alignment=4)
        sSum = smem.allocate_tensor(cutlass.Float32, cute.make_layout(num_groups), byte_alignment=4)
        col, group = tidx % threads_per_row * 4, tidx // threads_per_row
        row_ref, row_sum = cutlass.Float32(NO_KEY), cutlass.Float32(0.0)
        total = cute.make_rmem_tensor(4, cutlass.Float32)
        total.fill(0.0)
        if cutlass.const_expr(self.config.early_combine):
            cute.arch.griddepcontrol_wait()
        for first in cutlass.range(group, num_splits, COMBINE_AHEAD * num_groups, unroll=1):
            lses = cute.make_rmem_tensor(COMBINE_AHEAD, cutlass.Float32)
            parts = cute.make_rmem_tensor((4, COMBINE_AHEAD), cutlass.Float32)
            lses.fill(-cutlass.Float32.inf)
            parts.fill(0.0)
            for ahead in cutlass.range_constexpr(COMBINE_AHEAD):
                split = first + ahead * num_groups
                if split < num_splits:
                    lses[ahead] = lse_parts[split, row]
                    vector_copy(gmem_vector(o_parts[None, split, row], col, 4), parts[None, ahead])
            before = row_ref
            for ahead in cutlass.range_constexpr(COMBINE_AHEAD):
                row_ref = cute.arch.fmax(row_ref, lses[ahead])
            factor = cute.math.exp2(before - row_ref, fastmath=True)
            row_sum = row_sum * factor
            total.store(total.load() * factor)
            for ahead in cutlass.range_constexpr(COMBINE_AHEAD):
                weight = cute.math.exp2(lses[ahead] - row_ref, fastmath=True)
                row_sum = row_sum + weight
                total.store(total.load() + parts[None, ahead].load() * weight)
        vector_copy(total, cute.make_tensor((sPart.iterator + group * head_dim + col).align(16), cute.make_layout(4)))
        if col == 0:
            sRef[group], sSum[group] = row_ref, row_sum
        cute.arch.sync_threads()
        if group == 0:
            for g in cutlass.range_constexpr(1, num_groups):
                row_ref = cute.arch.fmax(row_ref, sRef[g])
            row_sum = cutlass.Float32(0.0)
            total.fill(0.0)
            for g in cutlass.range_constexpr(num_groups):
                weight = cute.math.exp2(sRef[g] - row_ref, fastmath=True)
                part = cute.make_rmem_tensor(4, cutlass.Float32)
                vector_copy(
                    cute.make_tensor((sPart.iterator + g * head_dim + col).align(16), cute.make_layout(4)), part
                )
                row_sum = row_sum + sSum[g] * weight
                total.store(total.load() + part.load() * weight)
            inverse = 0.0 if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)
            rounded = cute.make_rmem_tensor(4, mO.element_type)
            rounded.store((total.load() * inverse).to(mO.element_type))
            rest, position = divmod(row, divisors.seqlen_q)
            batch, head = divmod(rest, divisors.num_heads)
            vector_copy(rounded, gmem_vector(mO[batch, position, head, None], col, 4))
            if cutlass.const_expr(mLSE is not None):
                lse = (row_ref + cute.math.log2(row_sum, fastmath=True)) * LN_2
                if tidx == 0:
                    mLSE[batch, head, position] = lse
