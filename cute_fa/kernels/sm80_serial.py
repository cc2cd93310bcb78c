"""FlashAttention-2 forward, one step after the other: kernel1 and kernel2 of the ladder.

One CTA computes one tile of queries of one head; its warps own 16 query rows each:

    load Q                       and keep this warp's 16 rows in registers
    for each tile of keys:
        load K and V             cp.async, 16 bytes a thread; wait for both
        acc_S  = Q K^T           ldmatrix, mma.sync
        P      = softmax(acc_S)  in registers, online
        acc_O += P V             ldmatrix transposed, mma.sync
    store O                      through shared memory, to leave in 16-byte vectors

Every access to shared memory (cp.async, ldmatrix plain and transposed, the 4-byte stores and 16-byte
loads of O) goes through tensors built from the one layout of the configuration. Nothing else here knows
which layout it is.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_fa.config import KernelConfig
from cute_fa.device.copies import copy_rows, make_gmem_tiled_copies, row_tile
from cute_fa.device.epilogue import store_lse, store_output
from cute_fa.device.mask import key_limits, mask_scores, rows_of
from cute_fa.device.mma import (
    SmemOperand,
    acc_as_operand_a,
    acc_as_rows,
    gemm_rs,
    make_ldmatrix_atom,
    make_tiled_mma,
)
from cute_fa.device.softmax import LOG2_E, OnlineSoftmax, thread_row_max
from cute_fa.kernels.tiles import SMEM_ALIGNMENT, require_smem, require_tiles, require_warps, tile_bytes
from cute_fa.problem import StaticProblem
from layouts.cute_adapter import to_cute


class Sm80Serial:
    """The kernel for one static problem and one configuration."""

    head_dims = (64, 128)
    geometry: frozenset[str] = frozenset()
    score_options: frozenset[str] = frozenset()

    @staticmethod
    def smem_bytes(static: StaticProblem, config: KernelConfig) -> int:
        """Shared memory of a CTA in bytes: Q (later O), K and V."""
        head_dim = static.head_dim
        return tile_bytes(config, config.tile_m, head_dim) + 2 * tile_bytes(config, config.tile_n, head_dim)

    @staticmethod
    def check(static: StaticProblem, config: KernelConfig, arch: str) -> None:
        """Raises ValueError if the kernel can't be built with this configuration."""
        require_warps(config)
        require_tiles(config, static.head_dim)
        require_smem(Sm80Serial.smem_bytes(static, config), config, static.head_dim, arch)

    def __init__(self, static: StaticProblem, config: KernelConfig):
        head_dim = self.head_dim = static.head_dim
        self.causal = static.causal
        self.config = config
        self.layout_Q = config.layout.on(config.tile_m, head_dim)
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
        stream,
    ):
        """Launches the kernel: Q, O (B, S_q, H, D); K, V (B, S_k, H_kv, D); LSE (B, H, S_q) or None."""
        batch, seqlen_q, num_heads, _ = mQ.shape
        # One dimension, since the y and z extents of a grid end at 65535.
        num_ctas = cute.ceil_div(seqlen_q, self.config.tile_m) * num_heads * batch
        self.kernel(mQ, mK, mV, mO, mLSE, softmax_scale * LOG2_E).launch(
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
    ):
        tile_m, tile_n, head_dim = self.config.tile_m, self.config.tile_n, self.head_dim
        dtype = mQ.element_type
        seqlen_q, num_heads = mQ.shape[1], mQ.shape[2]
        seqlen_k, num_heads_kv = mK.shape[1], mK.shape[2]
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_m_blocks = cute.ceil_div(seqlen_q, tile_m)
        m_block = cta % num_m_blocks
        head = cta // num_m_blocks % num_heads
        batch = cta // num_m_blocks // num_heads
        head_kv = head // (num_heads // num_heads_kv)

        # Tiles in global memory: (tile, D).
        gQ = row_tile(mQ[batch, None, head, None], m_block * tile_m, tile_m)
        gO = row_tile(mO[batch, None, head, None], m_block * tile_m, tile_m)

        # Tiles in shared memory. O takes the place of Q, which is no longer needed by then.
        smem = cutlass.memory.SmemAllocator()
        sQ = smem.allocate_tensor(dtype, to_cute(self.layout_Q), byte_alignment=SMEM_ALIGNMENT)
        sK = smem.allocate_tensor(dtype, to_cute(self.layout_KV), byte_alignment=SMEM_ALIGNMENT)
        sV = smem.allocate_tensor(dtype, to_cute(self.layout_KV), byte_alignment=SMEM_ALIGNMENT)
        sO = sQ
        sVt = cute.composition(sV, cute.make_layout((head_dim, tile_n), stride=(tile_n, 1)))

        load_copy, store_copy = make_gmem_tiled_copies(dtype, head_dim, self.config.num_threads)
        thr_load = load_copy.get_slice(tidx)
        tQcQ = thr_load.partition_S(cute.make_identity_tensor((tile_m, head_dim)))
        tKcK = thr_load.partition_S(cute.make_identity_tensor((tile_n, head_dim)))
        tQgQ, tQsQ = thr_load.partition_S(gQ), thr_load.partition_D(sQ)
        tKsK, tVsV = thr_load.partition_D(sK), thr_load.partition_D(sV)

        tiled_mma = make_tiled_mma(dtype, self.config.num_threads // 32)
        thr_mma = tiled_mma.get_slice(tidx)
        ldmatrix, ldmatrix_trans = make_ldmatrix_atom(dtype, False), make_ldmatrix_atom(dtype, True)
        tSrQ = SmemOperand(ldmatrix, tiled_mma, "A", sQ, tidx)
        tSrK = SmemOperand(ldmatrix, tiled_mma, "B", sK, tidx)
        tOrVt = SmemOperand(ldmatrix_trans, tiled_mma, "B", sVt, tidx)
        acc_S = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile_m, tile_n)), cutlass.Float32)
        acc_O = cute.make_rmem_tensor(thr_mma.partition_shape_C((tile_m, head_dim)), cutlass.Float32)
        acc_O.fill(0.0)
        cS = acc_as_rows(thr_mma.partition_C(cute.make_identity_tensor((tile_m, tile_n))))
        softmax = OnlineSoftmax.start(cute.size(cS, mode=[0]), scale_log2)

        # Row m of this tile sees keys up to m + first_diagonal (the last query sees the last key).
        first_diagonal = m_block * tile_m + seqlen_k - seqlen_q
        num_keys = seqlen_k
        if cutlass.const_expr(self.causal):
            num_keys = cutlass.max(0, cutlass.min(seqlen_k, first_diagonal + tile_m))

        queries_left = seqlen_q - m_block * tile_m
        copy_rows(load_copy, tQgQ, tQsQ, tQcQ, queries_left)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        tSrQ.load_all()
        for n_block in cutlass.range(cute.ceil_div(num_keys, tile_n), unroll=1):
            keys_left = seqlen_k - n_block * tile_n
            gK = row_tile(mK[batch, None, head_kv, None], n_block * tile_n, tile_n)
            gV = row_tile(mV[batch, None, head_kv, None], n_block * tile_n, tile_n)
            copy_rows(load_copy, thr_load.partition_S(gK), tKsK, tKcK, keys_left)
            copy_rows(load_copy, thr_load.partition_S(gV), tVsV, tKcK, keys_left)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()

            acc_S.fill(0.0)
            gemm_rs(tiled_mma, acc_S, tSrQ.fragment, tSrK)

            diagonal = first_diagonal - n_block * tile_n
            needs_mask = keys_left < tile_n
            if cutlass.const_expr(self.causal):
                needs_mask = needs_mask or diagonal < tile_n - 1
            if needs_mask:
                limits = key_limits(rows_of(cS), keys_left, diagonal, self.causal)
                mask_scores(acc_as_rows(acc_S), cS, limits)

            softmax.rescale(thread_row_max(acc_S), acc_O)
            softmax.exponentiate(acc_S)
            gemm_rs(tiled_mma, acc_O, acc_as_operand_a(acc_S, dtype), tOrVt)
            cute.arch.sync_threads()  # K and V are read; the next tiles may overwrite them

        lse = softmax.finish(acc_O)
        if cutlass.const_expr(mLSE is not None):
            gLSE = cute.domain_offset((m_block * tile_m,), mLSE[batch, head, None])
            store_lse(lse, gLSE, cS, queries_left)
        # A warp stores to the rows of Q that it alone has read.
        store_output(acc_O, sO, gO, tiled_mma, store_copy, tidx, queries_left)
