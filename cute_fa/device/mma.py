"""Matrix products of a warp: ldmatrix from shared memory, mma.sync m16n8k16 in registers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp


def make_tiled_mma(dtype, num_warps: int) -> cute.TiledMma:
    """m16n8k16 atoms; the warps stand below each other, so that a row of scores stays in one warp."""
    return cute.make_tiled_mma(
        warp.MmaF16BF16Op(dtype, cutlass.Float32, (16, 8, 16)),
        (num_warps, 1, 1),
        permutation_mnk=(num_warps * 16, 16, 16),
    )


def make_ldmatrix_atom(dtype, transpose: bool) -> cute.CopyAtom:
    """ldmatrix.x4: four 8x8 matrices of 16-bit elements, eight row addresses of 16 bytes a phase."""
    return cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=transpose, num_matrices=4), dtype)


def acc_as_rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2), MMA_M, MMA_N) seen as (row, col): the thread's own rows and columns.

    In m16n8k16 a thread holds two neighbouring columns of row lane / 4 and of the row eight below.
    """
    layout = acc.layout
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((layout.shape[0][1], layout.shape[1]), (layout.shape[0][0], layout.shape[2])),
            stride=((layout.stride[0][1], layout.stride[1]), (layout.stride[0][0], layout.stride[2])),
        ),
    )


def acc_as_operand_a(acc: cute.Tensor, dtype) -> cute.Tensor:
    """The accumulator of one product, rounded to ``dtype``, as operand A of the next: no data moves.

    Two neighbouring 16x8 accumulators hold, thread by thread, what a 16x16 operand A needs.
    """
    fragment = cute.make_rmem_tensor(acc.layout, dtype)
    fragment.store(acc.load().to(dtype))
    pairs = cute.logical_divide(acc.layout, (None, None, 2))
    return cute.make_tensor(
        fragment.iterator,
        cute.make_layout(
            ((*pairs.shape[0], pairs.shape[2][0]), pairs.shape[1], pairs.shape[2][1]),
            stride=((*pairs.stride[0], pairs.stride[2][0]), pairs.stride[1], pairs.stride[2][1]),
        ),
    )


class SmemOperand:
    """An operand of a product that lies in shared memory: its ldmatrix view and its fragment."""

    def __init__(
        self,
        copy_atom: cute.CopyAtom,
        tiled_mma: cute.TiledMma,
        which: str,
        tile: cute.Tensor,
        tidx,
        used: tuple[int, int] | None = None,
    ):
        """``which`` is "A" (rows x k) or "B" (cols x k); ``tile`` is the shared-memory tensor, with a last
        mode of stages if there are several. ``used``: how much of both modes counts, multiples of 16, if not all."""
        make_tiled_copy = {"A": cute.make_tiled_copy_A, "B": cute.make_tiled_copy_B}[which]
        thr_mma = tiled_mma.get_slice(tidx)
        partition = {"A": thr_mma.partition_A, "B": thr_mma.partition_B}[which]
        make_fragment = {"A": thr_mma.make_fragment_A, "B": thr_mma.make_fragment_B}[which]
        self.tiled_copy = make_tiled_copy(copy_atom, tiled_mma)
        thr_copy = self.tiled_copy.get_slice(tidx)
        self.smem = thr_copy.partition_S(tile)
        self.is_staged = cute.rank(tile) == 3
        one = tile[None, None, 0] if self.is_staged else tile
        if used is not None:
            one = cute.make_tensor(one.iterator, cute.make_layout(used))  # of which only the extents matter
        self.fragment = make_fragment(partition(one))
        self.fragment_view = thr_copy.retile(self.fragment)
        self.num_k = cute.size(self.fragment, mode=[2])
        self.is_cut = used is not None

    def load(self, k: int, stage=None) -> cute.Tensor:
        """Loads k-slice ``k`` (of a stage) by ldmatrix; returns its fragment."""
        source = self.smem[None, None, k, stage] if self.is_staged else self.smem[None, None, k]
        target = self.fragment_view[None, None, k]
        if self.is_cut:
            for i in range(cute.size(target, mode=[1])):
                cute.copy(self.tiled_copy, source[None, i], target[None, i])
        else:
            cute.copy(self.tiled_copy, source, target)
        return self.fragment[None, None, k]

    def load_all(self):
        """Loads the whole operand into its fragment."""
        for k in range(self.num_k):
            self.load(k)


def gemm_rs(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: SmemOperand, stage=None):
    """acc += A B^T, A from registers, B (of a stage) from shared memory."""
    for k in range(b.num_k):
        cute.gemm(tiled_mma, acc, a[None, None, k], b.load(k, stage), acc)


def gemm_ss(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: SmemOperand, b: SmemOperand, stage=None):
    """acc += A B^T, both from shared memory, B of a stage."""
    for k in range(b.num_k):
        cute.gemm(tiled_mma, acc, a.load(k), b.load(k, stage), acc)


def k_slice(acc: cute.Tensor, k: int) -> cute.Tensor:
    """The 16 columns of an accumulator that become k-slice ``k`` of the next product's operand A."""
    return cute.logical_divide(acc, (None, None, 2))[None, None, (None, k)]
