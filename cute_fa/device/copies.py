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


def row_tile(tensor: cute.Tensor, first_row, num_rows: int, num_cols: int | None = None) -> cute.Tensor:
    """Rows ``first_row`` and on of a matrix (rows, cols) in global memory, as a tile (num_rows, cols).

    With ``num_cols`` the tile is that wide; whoever reads it leaves out what lies behind the last column. The way to
    the tile is counted in 64 bits, the way within it in the 32 bits of the row stride.
    """
    row_stride = tensor.stride[0]
    start = tensor.iterator + cutlass.Int64(first_row) * row_stride
    layout = cute.make_layout((num_rows, num_cols or tensor.shape[1]), stride=(row_stride, 1))
    # Told, not made: align() would round the address up at run time.
    aligned = cute.make_ptr(tensor.element_type, start.toint(), start.memspace, assumed_align=COPY_BITS // 8)
    return cute.make_tensor(aligned, layout)


def gmem_vector(tensor: cute.Tensor, offset, size: int) -> cute.Tensor:
    """``size`` contiguous elements at an offset (in elements, 64 bits), told to be aligned as vectors are."""
    address = (tensor.iterator + offset).toint()
    align = min(COPY_BITS // 8, size * tensor.element_type.width // 8)
    pointer = cute.make_ptr(tensor.element_type, address, tensor.iterator.memspace, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(size))


@cute.jit
def copy_rows(
    tiled_copy: cute.TiledCopy,
    src: cute.Tensor,
    dst: cute.Tensor,
    coords: cute.Tensor,
    num_rows,
    num_cols: cutlass.Constexpr = None,
):
    """Copies a thread's share of a tile, rows at or past ``num_rows`` left out, and columns at or past ``num_cols``.

    ``src`` and ``dst`` are partitioned (CPY, CPY_M, CPY_K); ``coords`` is the identity tensor of the tile,
    partitioned alike. cp.async writes zeros where an element is left out; a plain load or store does
    nothing there. None: the tile has no such rows, or columns.
    """
    by_row, by_col = num_rows is not None, num_cols is not None
    shape, stride = (1, src.shape[1], src.shape[2]), (0, int(by_row), src.shape[1] if by_col else 0)
    pred = cute.make_rmem_tensor(cute.make_layout(shape, stride=stride), cutlass.Boolean)
    for m in cutlass.range_constexpr(src.shape[1] if by_row else 1):
        for k in cutlass.range_constexpr(src.shape[2] if by_col else 1):
            if cutlass.const_expr(not by_col):
                pred[0, m, k] = coords[0, m, k][0] < num_rows
            elif cutlass.const_expr(not by_row):
                pred[0, m, k] = coords[0, m, k][1] < num_cols
            else:
                pred[0, m, k] = coords[0, m, k][0] < num_rows and coords[0, m, k][1] < num_cols
    cute.copy(tiled_copy, src, dst, pred=pred)


@cute.jit
def store_accumulator(tiled_mma: cute.TiledMma, fragment: cute.Tensor, tile: cute.Tensor, tidx):
    """Stores a thread's accumulator to a tile in shared memory, two neighbouring columns (4 bytes) at a time.

    The tile may be wider than the accumulator.
    """
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), fragment.element_type, num_bits_per_copy=32)
    thr_copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(tidx)
    source, target = thr_copy.retile(fragment), thr_copy.partition_D(tile)
    if cutlass.const_expr(cute.size(source, mode=[2]) == cute.size(target, mode=[2])):
        cute.copy(atom, source, target)
    else:
        for n in cutlass.range_constexpr(cute.size(source, mode=[2])):
            cute.copy(atom, source[None, None, n], target[None, None, n])
