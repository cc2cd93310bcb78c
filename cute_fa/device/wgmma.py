"""Matrix products of a warpgroup: wgmma m64nNk16, B (and A of scores) from shared memory, accumulators in registers.

A product is issued and runs by itself; its accumulator, and A where that is in registers, may not be touched
before ``warpgroup.wait_group`` says that it has finished.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup

ROWS = 64  # rows that a warpgroup computes
THREADS = 128  # threads of a warpgroup


def make_scores_mma(dtype, tile_n: int) -> cute.TiledMma:
    """S (64, tile_n) = Q K^T: both operands from shared memory, head dimension contiguous."""
    source, major = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    return cute.make_tiled_mma(warpgroup.MmaF16BF16Op(dtype, cutlass.Float32, (ROWS, tile_n, 16), source, major, major))


def make_output_mma(dtype, head_dim: int) -> cute.TiledMma:
    """O (64, head_dim) += P V: P from registers, V from shared memory as it lies there, head dimension contiguous."""
    source = warpgroup.OperandSource.RMEM
    return cute.make_tiled_mma(
        warpgroup.MmaF16BF16Op(
            dtype, cutlass.Float32, (ROWS, head_dim, 16), source, OperandMajorMode.K, OperandMajorMode.MN
        )
    )


def acc_as_rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2, N / 8), 1, 1) seen as (row, col): the thread's own rows and columns.

    A thread holds two neighbouring columns of every eight, of one row and of the row eight below.
    """
    (col_pair, row_pair, col_step), stride = acc.layout.shape[0], acc.layout.stride[0]
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout((row_pair, (col_pair, col_step)), stride=(stride[1], (stride[0], stride[2]))),
    )


def probs_as_operand_a(acc_shape, dtype) -> tuple[cute.Tensor, cute.Tensor]:
    """Registers for P: as operand A of m64nNk16, and the same ones in the order of an accumulator of that shape.

    Two neighbouring groups of eight columns of an accumulator hold, thread by thread, what a k-step of 16 needs.
    """
    in_acc_order = cute.make_rmem_tensor(acc_shape, dtype)
    num_k = in_acc_order.shape[0][2] // 2
    operand_a = cute.make_tensor(
        in_acc_order.iterator, cute.make_layout(((2, 2, 2), 1, num_k), stride=((1, 2, 4), 0, 8))
    )
    return operand_a, in_acc_order


def issue(tiled_mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, num_k: int, accumulate: bool):
    """Issues acc = A B^T, or acc += A B^T, over ``num_k`` steps of 16, as one group; does not wait."""
    warpgroup.fence()
    # The atom carries the accumulate bit; a fresh one, since a value set in one branch can't be used in another.
    atom = cute.make_mma_atom(tiled_mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for k in range(num_k):
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def acc_columns(acc: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Columns of an accumulator ((2, 2, N / 8), 1, 1), as one; ``first`` and ``count`` in multiples of 8."""
    return cute.make_tensor(acc.iterator + first // 2, cute.make_layout(((2, 2, count // 8), 1, 1)))


def store_accumulator(acc: cute.Tensor, tile: cute.Tensor, tidx):
    """Rounds an accumulator of O to the type of a tile in shared memory and stores it there, by stmatrix."""
    rounded = cute.make_rmem_tensor(acc.layout, tile.element_type)
    rounded.store(acc.load().to(tile.element_type))
    stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), tile.element_type)
    tiled_mma = make_output_mma(tile.element_type, cute.size(tile, mode=[1]))
    thr_store = cute.make_tiled_copy_C(stmatrix, tiled_mma).get_slice(tidx)
    cute.copy(stmatrix, thr_store.retile(rounded), thr_store.partition_D(tile))
