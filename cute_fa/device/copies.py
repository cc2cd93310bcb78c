"""Tiles between global and shared memory, 16 bytes a thread."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

COPY_BITS = 128


def make_gmem_tiled_copies(dtype, tile_cols: int, num_threads: int):
    """The tiled copies gmem -> smem (cp.async) and smem -> gmem (through registers).

    Consecutive threads take consecutive 16-byte vectors, at most 128 bytes along a row, so that a warp
    reads whole 128-byte lines and a quarter-warp fills the eight 16-byte banks of one row.
    """
    vector = COPY_BITS // dtype.width
    threads_per_row = min(tile_cols, 1024 // dtype.width) // vector
    thread_layout = cute.make_layout((num_threads // threads_per_row, threads_per_row), stride=(threads_per_row, 1))
    value_layout = cute.make_layout((1, vector))
    load_atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=COPY_BITS
    )
    store_atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=COPY_BITS)
    return (
        cute.make_tiled_copy_tv(load_atom, thread_layout, value_layout),
        cute.make_tiled_copy_tv(store_atom, thread_layout, value_layout),
    )


def row_tile(tensor: cute.Tensor, first_row, num_rows: int) -> cute.Tensor:
    """Rows ``first_row`` and on of a matrix (rows, cols) in global memory, as a tile (num_rows, cols).

    The way to the tile is counted in 64 bits, the way within it in the 32 bits of the row stride.
    """
    row_stride = tensor.stride[0]
    start = tensor.iterator + cutlass.Int64(first_row) * row_stride
    layout = cute.make_layout((num_rows, tensor.shape[1]), stride=(row_stride, 1))
    # Told, not made: align() would round the address up at run time.
    aligned = cute.make_ptr(tensor.element_type, start.toint(), start.memspace, assumed_align=COPY_BITS // 8)
    return cute.make_tensor(aligned, layout)


@cute.jit
def copy_rows(tiled_copy: cute.TiledCopy, src: cute.Tensor, dst: cute.Tensor, rows: cute.Tensor, num_rows):
    """Copies a thread's share of a tile, rows at or past ``num_rows`` left out.

    ``src`` and ``dst`` are partitioned (CPY, CPY_M, CPY_K); ``rows`` is the identity tensor of the tile,
    partitioned alike. cp.async writes zeros where a row is left out; a plain load or store does
    nothing there.
    """
    pred = cute.make_rmem_tensor(cute.make_layout((1, src.shape[1], src.shape[2]), stride=(0, 1, 0)), cutlass.Boolean)
    for m in cutlass.range_constexpr(src.shape[1]):
        pred[0, m, 0] = rows[0, m, 0][0] < num_rows
    cute.copy(tiled_copy, src, dst, pred=pred)


@cute.jit
def store_accumulator(tiled_mma: cute.TiledMma, fragment: cute.Tensor, tile: cute.Tensor, tidx):
    """Stores a thread's accumulator to a tile in shared memory, two neighbouring columns (4 bytes) at a time."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), fragment.element_type, num_bits_per_copy=32)
    thr_copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(tidx)
    cute.copy(atom, thr_copy.retile(fragment), thr_copy.partition_D(tile))
