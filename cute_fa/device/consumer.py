"""A consumer warpgroup of the kernels for Hopper: its views of shared memory, its registers, its products."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from cute_fa.device import wgmma
from cute_fa.device.lazy_softmax import LazySoftmax
from cute_fa.device.tma_ring import TmaRing


@dataclass(frozen=True)
class Consumer:
    """What a consumer warpgroup works with. Its products read ``num_k`` steps of 16 of the head dimension of Q and K,
    whose tiles may be wider, and all columns that a tile of V has: wgmma is told where 64 of them lie at once."""

    index: cutlass.Int32
    tidx: cutlass.Int32
    signals: cutlass.Boolean  # whether this thread arrives at barriers for its warp
    ring_Q: TmaRing
    ring_K: TmaRing
    ring_V: TmaRing
    mma_S: cute.TiledMma
    mma_O: cute.TiledMma
    num_k: int
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrVt: cute.Tensor
    sV: cute.Tensor
    acc_S_shape: tuple
    acc_O: cute.Tensor
    tOrP: cute.Tensor  # P as an operand of wgmma
    rP: cute.Tensor  # the same registers in the order of acc_S
    cS: cute.Tensor  # coordinates of this thread's scores
    softmax: LazySoftmax

    @staticmethod
    def create(buffers, rings, tile_n: int, qk, vo, scale_log2, no_key: float) -> Consumer:
        """Partitions shared memory, (sQ, sK, sV) of tiles (rows, cols, tile), for the warpgroup of this thread.

        ``qk`` and ``vo`` are the two head dimensions (``HeadDim``); ``scale_log2`` and ``no_key`` are the softmax's.
        """
        sQ, sK, sV = buffers
        ring_Q, ring_K, ring_V = rings
        dtype = sQ.element_type
        thread, _, _ = cute.arch.thread_idx()
        index = cute.arch.make_warp_uniform(thread // wgmma.THREADS) - 1
        tidx = thread % wgmma.THREADS
        mma_S, mma_O = wgmma.make_scores_mma(dtype, tile_n), wgmma.make_output_mma(dtype, vo.padded)
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
            num_k=qk.used // 16,
            tSrQ=group_S.make_fragment_A(group_S.partition_A(sQ)),
            tSrK=group_S.make_fragment_B(group_S.partition_B(sK)),
            tOrVt=group_O.make_fragment_B(group_O.partition_B(sVt)),
            sV=sV,
            acc_S_shape=acc_S_shape,
            acc_O=cute.make_rmem_tensor(group_O.partition_shape_C((wgmma.ROWS, vo.padded)), cutlass.Float32),
            tOrP=tOrP,
            rP=rP,
            cS=wgmma.acc_as_rows(cS),
            softmax=LazySoftmax.create(scale_log2, no_key),
        )

    def issue_scores(self, q_number, number) -> cute.Tensor:
        """Issues S = Q K^T with load ``number`` of K, into fresh registers."""
        acc_S = cute.make_rmem_tensor(self.acc_S_shape, cutlass.Float32)
        self.reissue_scores(acc_S, q_number, number)
        return acc_S

    def reissue_scores(self, acc_S: cute.Tensor, q_number, number):
        """The same into given registers."""
        Q = self.tSrQ[None, None, None, self.ring_Q.buffer(q_number)]
        K = self.tSrK[None, None, None, self.ring_K.buffer(number)]
        wgmma.issue(self.mma_S, acc_S, Q, K, self.num_k, False)

    def issue_output(self, number):
        """Issues O += P V with load ``number`` of V."""
        V = self.tOrVt[None, None, None, self.ring_V.buffer(number)]
        wgmma.issue(self.mma_O, self.acc_O, self.tOrP, V, cute.size(self.tOrP, mode=[2]), True)

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
