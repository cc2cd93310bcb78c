"""FlashAttention-2 forward whose loads, softmax and products overlap.

One CTA computes one tile of queries of one head, its warps side by side along the queries. It walks the
keys from the last tile to the first, so that the tiles that need a mask (behind the last key, or across
the diagonal) come first and the loop over the others has no mask, no predicate and no branch. With a sliding
window only its tiles are walked, and a third loop masks those that its left edge cuts:

    load Q and the last tile's K              with two stages its V too
    for each tile of keys, last to first:
        start the loads of what comes next    cp.async
        acc_S  = Q K^T
        change the scores                     only if compiled for score options, see device/scores.py
        if a row's maximum has risen:         rarely, see OnlineSoftmax.rescale_if_needed
            rescale acc_O
        for each 16 keys of the tile:         the exponentials of one slice run while the
            P      = exp2(acc_S)              tensor cores work on the one before
            acc_O += P V

With ``first_reference`` the tiles without a mask look for no maximum: any reference gives the same output while
exponentials and sums fit their types, and bf16 has the exponents of fp32. A CTA in which some outgrew them
(``OnlineSoftmax.has_outgrown``) walks all tiles again, and looks.

Every access to shared memory goes through tensors built from the one layout of the configuration.
"""

from __future__ import annotations

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import torch

from cute_fa.config import PipelinedConfig
from cute_fa.device.copies import copy_rows, make_gmem_tiled_copies, row_tile
from cute_fa.device.epilogue import store_lse, store_output
from cute_fa.device.mask import key_limits, key_starts, mask_scores, mask_scores_before, rows_of
from cute_fa.device.mma import (
    SmemOperand,
    acc_as_operand_a,
    acc_as_rows,
    gemm_rs,
    gemm_ss,
    k_slice,
    make_ldmatrix_atom,
    make_tiled_mma,
)
from cute_fa.device.registers import recompute_from, reread_thread
from cute_fa.device.schedule import longest_first
from cute_fa.device.scores import ScoreArguments, ScoreModifier
from cute_fa.device.sequences import Member, batch_and_longest, copy_paged_rows
from cute_fa.device.softmax import LOG2_E, OnlineSoftmax, thread_row_max
from cute_fa.device.votes import any_thread
from cute_fa.kernels.entries import Entries
from cute_fa.kernels.tiles import SMEM_ALIGNMENT, HeadDim, require_smem, require_tiles, require_warps, tile_bytes
from cute_fa.problem import HEAD_DIMS, SCORE_OPTIONS, VECTOR, StaticProblem, padded_head_dim
from layouts.cute_adapter import to_cute


class Sm80Pipelined(Entries):
    """The kernel for one static problem and one configuration."""

    head_dims = HEAD_DIMS
    geometry = frozenset({"head_dim_v", "packed", "caches", "pages"})
    score_options = SCORE_OPTIONS  # the arguments of ``ScoreOptions`` that the kernel has

    @staticmethod
    def smem_bytes(static: StaticProblem, config: PipelinedConfig) -> int:
        """Shared memory of a CTA in bytes: Q (later O), and the stages of K and V."""
        widths = [padded_head_dim(static.head_dim), padded_head_dim(static.head_dim_v)]
        stages = sum(tile_bytes(config, config.tile_n, width, config.num_stages) for width in widths)
        return tile_bytes(config, config.tile_m, max(widths)) + stages

    @staticmethod
    def check(static: StaticProblem, config: PipelinedConfig, arch: str) -> None:
        """Raises ValueError if the kernel can't be built with this configuration."""
        require_warps(config)
        if config.num_stages not in (1, 2):
            raise ValueError(f"num_stages must be 1 or 2, got {config.num_stages}")
        if config.first_reference and static.dtype != torch.bfloat16:
            raise ValueError(f"first_reference must be False for {static.dtype}, whose exponents end at 15, got True")
        # A bias may hide all keys of the tiles that give the reference, and under ALiBi without a causal mask they are
        # far below others as a rule.
        if config.first_reference and (static.features.bias is not None or static.features.alibi):
            raise ValueError("first_reference must be False with attn_bias or alibi_slopes, got True")
        for head_dim in {static.head_dim, static.head_dim_v}:
            require_tiles(config, padded_head_dim(head_dim))
        require_smem(Sm80Pipelined.smem_bytes(static, config), config, static.widest_head_dim, arch)

    def __init__(self, static: StaticProblem, config: PipelinedConfig):
        self.features = static.features
        self.bounded_right = static.causal or static.features.window_right
        self.config = config
        self.qk = HeadDim(static.head_dim)
        self.vo = HeadDim(static.head_dim_v)
        self.layout_Q = config.layout.on(config.tile_m, self.qk.padded)
        self.layout_K = config.layout.on(config.tile_n, self.qk.padded)
        self.layout_V = config.layout.on(config.tile_n, self.vo.padded)
        self.layout_O = config.layout.on(config.tile_m, self.vo.padded)

    def launch(self, mQ, mK, mV, mO, mLSE, softmax_scale, arguments, sequences, stream):
        """Sizes the grid."""
        batch, seqlen_q = batch_and_longest(mQ.shape, sequences)
        num_heads = mQ.shape[2]
        # One dimension, since the y and z extents of a grid end at 65535.
        num_ctas = cute.ceil_div(seqlen_q, self.config.tile_m) * num_heads * batch
        self.kernel(mQ, mK, mV, mO, mLSE, softmax_scale * LOG2_E, arguments, sequences).launch(
            grid=(num_ctas, 1, 1),
            block=(self.config.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,  # per cent: all of L1 that can be shared memory
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
        arguments: ScoreArguments | None,
        sequences: tuple | None,
    ):
        tile_m, tile_n, stages = self.config.tile_m, self.config.tile_n, self.config.num_stages
        qk, vo, first_reference = self.qk, self.vo, self.config.first_reference
        dtype = mQ.element_type
        num_heads, num_heads_kv = mQ.shape[2], mK.shape[2]
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        batch, max_seqlen_q = batch_and_longest(mQ.shape, sequences)
        m_block, head, batch = longest_first(cta, cute.ceil_div(max_seqlen_q, tile_m), num_heads, batch)
        head_kv = head // (num_heads // num_heads_kv)
        member = Member.find(batch, mQ.shape, mK.shape, sequences)
        seqlen_q, seqlen_k = member.seqlen_q, member.seqlen_k

        # Tiles in global memory: (tile, padded D).
        gQ = row_tile(member.queries(mQ, head), m_block * tile_m, tile_m, qk.padded)

        # Tiles in shared memory: Q (tile_m, D), K and V (tile_n, D, stages), D padded. O takes the place of Q.
        smem = cutlass.memory.SmemAllocator()
        place = smem.allocate_tensor(
            dtype, to_cute(max(self.layout_Q, self.layout_O, key=lambda it: it.cosize)), byte_alignment=SMEM_ALIGNMENT
        )
        sQ, sO = (cute.make_tensor(place.iterator, to_cute(layout)) for layout in (self.layout_Q, self.layout_O))
        sK = smem.allocate_tensor(dtype, to_cute(self.layout_K, stages), byte_alignment=SMEM_ALIGNMENT)
        sV = smem.allocate_tensor(dtype, to_cute(self.layout_V, stages), byte_alignment=SMEM_ALIGNMENT)
        transposed = cute.make_layout((vo.padded, tile_n, stages), stride=(tile_n, 1, tile_n * vo.padded))
        sVt = cute.composition(sV, transposed)

        load_copy, store_copy = make_gmem_tiled_copies(dtype, qk.padded, self.config.num_threads)
        thr_load = load_copy.get_slice(tidx)
        tiled_mma = make_tiled_mma(dtype, self.config.num_threads // 32)
        thr_mma = tiled_mma.get_slice(tidx)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile_m, vo.used)), cutlass.Float32)
        acc_O.fill(0.0)
        cS = acc_as_rows(thr_mma.partition_C(cute.make_identity_tensor((tile_m, tile_n))))
        slope = ScoreModifier.slope_of(self.features, arguments, batch, head)
        scale_log2 = ScoreModifier.scale_of(self.features, arguments, scale_log2, batch, head)
        modifier = ScoreModifier.of(
            self.features, arguments, scale_log2, slope, batch, head, m_block * tile_m, seqlen_q, seqlen_k
        )
        softmax = OnlineSoftmax.start(cute.size(cS, mode=[0]), modifier.softmax_scale_log2)

        # Row m of this tile sees keys from m + left_edge up to m + right_edge (the last query stands at the last key).
        right_edge = left_edge = m_block * tile_m + seqlen_k - seqlen_q
        num_keys, num_keys_unmasked = seqlen_k, seqlen_k
        if cutlass.const_expr(self.features.window_right):
            right_edge = right_edge + arguments.window_right
        if cutlass.const_expr(self.bounded_right):
            num_keys = cutlass.max(0, cutlass.min(seqlen_k, right_edge + tile_m))
            num_keys_unmasked = cutlass.max(0, cutlass.min(seqlen_k, right_edge + 1))
        if cutlass.const_expr(sequences is not None):
            # The grid is made for the longest member: of another, tiles may lie behind the last query.
            num_keys = num_keys if m_block * tile_m < seqlen_q else 0
            num_keys_unmasked = num_keys_unmasked if m_block * tile_m < seqlen_q else 0
        num_blocks = cute.ceil_div(num_keys, tile_n)
        num_unmasked = num_keys_unmasked // tile_n
        # The walk ends at first_block; the tiles before first_whole are cut by the left edge.
        first_block = first_whole = 0
        if cutlass.const_expr(self.features.window_left):
            left_edge = left_edge - arguments.window_left
            first_block = cutlass.max(0, left_edge) // tile_n
            num_unmasked = cutlass.max(num_unmasked, first_block)
            first_whole = cute.ceil_div(cutlass.max(0, left_edge + tile_m - 1), tile_n)
            first_whole = cutlass.min(num_unmasked, first_whole)
        queries_left = seqlen_q - m_block * tile_m

        gK, gV = member.keys(mK, head_kv), member.keys(mV, head_kv)
        this = SimpleNamespace(  # what the steps of this CTA share
            dtype=dtype,
            pages=member.pages,
            load_copy=load_copy,
            gmem=(gK, gV),
            smem=(sQ, sK, sV, sVt),
            tiled_mma=tiled_mma,
            thr_mma=thr_mma,
            acc_O=acc_O,
            softmax=softmax,
            modifier=modifier,
            seqlen_k=seqlen_k,
            left_edge=left_edge,
            right_edge=right_edge,
            first_block=first_block,
        )
        self.partition_tiles(this, tidx)

        tQcQ = thr_load.partition_S(cute.make_identity_tensor((tile_m, qk.padded)))
        copy_rows(load_copy, thr_load.partition_S(gQ), thr_load.partition_D(sQ), tQcQ, queries_left, qk.ragged)
        last = num_blocks - 1
        self.start(this, last)
        num_masked, end_whole, end = num_blocks - num_unmasked, num_blocks - first_whole, num_blocks - first_block
        if cutlass.const_expr(first_reference):
            # One tile more, which all rows see, so that all have a reference.
            num_masked = cutlass.min(num_masked + 1, end_whole)
        for i in cutlass.range(num_masked, unroll=1):
            self.step(this, last - i, True)
        for i in cutlass.range(num_masked, end_whole, unroll=1):
            self.step(this, last - i, False)
        outgrown = cutlass.Boolean(False)
        if cutlass.const_expr(first_reference):
            outgrown = softmax.has_outgrown(acc_O)  # before the tiles that follow move the reference
        if cutlass.const_expr(self.features.window_left):
            for i in cutlass.range(end_whole, end, unroll=1):
                self.step(this, last - i, True)
        # A CTA whose queries see no key has waited for nothing yet, and O takes the place of Q.
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(first_reference) and any_thread(outgrown, 0, self.config.num_threads):
            self.begin_again(this, last, end)
        cute.arch.sync_threads()

        lse = softmax.finish(
            acc_O,
            arguments.sinks[head] * LOG2_E if self.features.sinks else None,
            arguments.output_factors[batch, head] if self.features.descales else None,
        )
        if cutlass.const_expr(not self.bounded_right or first_reference):
            # Here ptxas would spill the thread's place through the loops, elsewhere others if it weren't kept.
            tidx = reread_thread()
        gO = row_tile(member.queries(mO, head), m_block * tile_m, tile_m, vo.padded)
        if cutlass.const_expr(mLSE is not None):
            gLSE = cute.domain_offset((m_block * tile_m,), member.statistics(mLSE, head))
            store_lse(lse, gLSE, cS, queries_left)
        store_output(acc_O, sO, gO, tiled_mma, store_copy, tidx, queries_left, vo.ragged)

    def partition_tiles(self, this, tidx):
        """What of the tiles is this thread's to load, and to multiply."""
        tile_m, tile_n, qk, vo = self.config.tile_m, self.config.tile_n, self.qk, self.vo
        (gK, gV), (sQ, sK, sV, sVt) = this.gmem, this.smem
        ldmatrix, ldmatrix_trans = make_ldmatrix_atom(this.dtype, False), make_ldmatrix_atom(this.dtype, True)
        this.thr_load = thr_load = this.load_copy.get_slice(tidx)
        this.K = SimpleNamespace(
            gmem=gK,
            smem=thr_load.partition_D(sK),
            coords=thr_load.partition_S(cute.make_identity_tensor((tile_n, qk.padded))),
            width=qk,
        )
        this.V = SimpleNamespace(
            gmem=gV,
            smem=thr_load.partition_D(sV),
            coords=thr_load.partition_S(cute.make_identity_tensor((tile_n, vo.padded))),
            width=vo,
        )
        this.tSrQ = SmemOperand(ldmatrix, this.tiled_mma, "A", sQ, tidx, qk.used_of(tile_m))
        this.tSrK = SmemOperand(ldmatrix, this.tiled_mma, "B", sK, tidx, qk.used_of(tile_n))
        this.tOrVt = SmemOperand(ldmatrix_trans, this.tiled_mma, "B", sVt, tidx, vo.used_of(tile_n, transposed=True))
        this.cS = acc_as_rows(this.tiled_mma.get_slice(tidx).partition_C(cute.make_identity_tensor((tile_m, tile_n))))

    @cute.jit
    def start(self, this, last):
        """Starts the loads of the first tile of the walk; from here on Q is in registers if it is to be there."""
        if last >= 0:
            self.load(this, this.K, last, False)
            if cutlass.const_expr(self.config.num_stages == 2):
                self.load(this, this.V, last, False)
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.config.q_in_registers):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            this.tSrQ.load_all()

    @cute.jit
    def begin_again(self, this, last, num_blocks):
        """Walks all tiles once more, and looks for the maxima of each."""
        this.acc_O.fill(0.0)
        this.softmax.reset()
        # Nothing is kept through the first walk for the sake of this one.
        self.partition_tiles(this, reread_thread())
        last = recompute_from(last)
        self.start(this, last)
        for i in cutlass.range(num_blocks, unroll=1):
            self.step(this, last - i, True)

    @cute.jit
    def step(self, this, n_block, masked: cutlass.Constexpr):
        """One tile of keys, whose loads have been started: K, with two stages V too. Starts the next loads.

        With ``first_reference`` a tile without a mask is held against the reference of those before.
        """
        stages = self.config.num_stages
        stage = n_block % stages
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # this tile is here, and nobody reads the one before any more
        if cutlass.const_expr(stages == 1):
            self.load(this, this.V, n_block, not masked)
        elif n_block > this.first_block:
            self.load(this, this.K, n_block - 1, True)
            self.load(this, this.V, n_block - 1, True)
        cute.arch.cp_async_commit_group()

        acc_S = cute.make_rmem_tensor(
            this.thr_mma.partition_shape_C((self.config.tile_m, self.config.tile_n)), cutlass.Float32
        )
        acc_S.fill(0.0)
        if cutlass.const_expr(self.config.q_in_registers):
            gemm_rs(this.tiled_mma, acc_S, this.tSrQ.fragment, this.tSrK, stage)
        else:
            gemm_ss(this.tiled_mma, acc_S, this.tSrQ, this.tSrK, stage)

        if cutlass.const_expr(stages == 1):
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()  # V is here, and nobody reads K any more
            if n_block > this.first_block:
                self.load(this, this.K, n_block - 1, True)
            cute.arch.cp_async_commit_group()

        scores, first_key = acc_as_rows(acc_S), n_block * self.config.tile_n
        this.modifier.apply(scores, this.cS, first_key, masked)
        if cutlass.const_expr(masked):
            rows, keys_left, right_edge = rows_of(this.cS), this.seqlen_k - first_key, this.right_edge - first_key
            mask_scores(scores, this.cS, key_limits(rows, keys_left, right_edge, self.bounded_right))
            if cutlass.const_expr(self.features.window_left):
                mask_scores_before(scores, this.cS, key_starts(rows, this.left_edge - first_key))
        if cutlass.const_expr(masked or not self.config.first_reference):
            row_max = thread_row_max(acc_S)
            if cutlass.const_expr(self.config.lazy_rescale):
                this.softmax.rescale_if_needed(row_max, this.acc_O)
            else:
                this.softmax.rescale(row_max, this.acc_O)
        self.softmax_and_gemm(this, acc_S, stage)

    def softmax_and_gemm(self, this, acc_S, stage):
        """P = exp2(acc_S), acc_O += P V, 16 keys at a time."""
        for k in range(this.tOrVt.num_k):
            scores = k_slice(acc_S, k)
            this.softmax.exponentiate(scores)
            tOrP = acc_as_operand_a(scores, this.dtype)[None, None, 0]
            cute.gemm(this.tiled_mma, this.acc_O, tOrP, this.tOrVt.load(k, stage), this.acc_O)

    def load(self, this, operand, n_block, whole: bool):
        """Starts the loads of a tile of K or V; one that isn't whole has zeros behind the last key."""
        if this.pages is not None:
            first, ragged = n_block * self.config.tile_n, operand.width.ragged
            target = operand.smem[None, None, None, n_block % self.config.num_stages]
            place = (operand.gmem, this.pages, target, operand.coords, first, this.seqlen_k - first, ragged)
            copy_paged_rows(this.load_copy, *place)
            return
        keys_left = None if whole else this.seqlen_k - n_block * self.config.tile_n
        row_stride = cute.assume(recompute_from(operand.gmem.stride[0]), divby=VECTOR)
        tensor = cute.make_tensor(operand.gmem.iterator, cute.make_layout(operand.gmem.shape, stride=(row_stride, 1)))
        tile = row_tile(tensor, n_block * self.config.tile_n, self.config.tile_n, operand.width.padded)
        source = this.thr_load.partition_S(tile)
        target = operand.smem[None, None, None, n_block % self.config.num_stages]
        if whole and operand.width.ragged is None:
            cute.copy(this.load_copy, source, target)
        else:
            copy_rows(this.load_copy, source, target, operand.coords, keys_left, operand.width.ragged)
