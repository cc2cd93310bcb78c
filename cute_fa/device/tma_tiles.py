"""Tiles that TMA copies between global and shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from cute_fa.device.copies import gmem_vector
from cute_fa.device.tma_ring import TmaRing
from layouts.cute_adapter import to_hardware_swizzle
from layouts.smem_layout import TileLayout

SMEM_ALIGNMENT = 1024  # bytes; the period of the 128-byte swizzle
MAX_TMA_ROWS = 256
_VECTOR = 8  # elements of 16 bits that a thread stores at once


def tile_bytes(tile_layout: TileLayout) -> int:
    """Bytes of a tile of 16-bit elements."""
    return tile_layout.cosize * 2


def make_tma(op, tensor: cute.Tensor, tile_layout: TileLayout):
    """A TMA copy of tiles of ``tensor`` (rows, cols, ...), and the tensor as it takes it.

    Where a tile is wider than the tensor, zeros are loaded behind the last column, and nothing is stored there.
    """
    return cpasync.make_tiled_tma_atom(op, tensor, to_hardware_swizzle(tile_layout), tile_layout.tile)


def allocate_tiles(smem, dtype, tile_layout: TileLayout, count: int) -> cute.Tensor:
    """``count`` tiles in shared memory: (rows, cols, tile)."""
    layout = to_hardware_swizzle(tile_layout, count)
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=SMEM_ALIGNMENT, swizzle=layout.inner)


def allocate_shared_tiles(smem, dtype, tile_layouts: tuple[TileLayout, ...], count: int) -> list[cute.Tensor]:
    """As many tiles of each layout, in the same place: tile i of one takes that of tile i of the others."""
    widest = max(tile_layouts, key=lambda layout: layout.cosize)
    place = allocate_tiles(smem, dtype, widest, count)
    views = (to_hardware_swizzle(layout, count, widest.cosize).outer for layout in tile_layouts)
    return [cute.make_tensor(place.iterator, view) for view in views]


def tiles_of(tensor: cute.Tensor, first_row, tile_layout: TileLayout, col: int = 0) -> cute.Tensor:
    """The tiles (rows, cols, count) of a matrix in global memory, the ``col``-th of a row, from ``first_row`` on; None:
    from its first."""
    if first_row is not None:
        tensor = cute.domain_offset((first_row, 0), tensor)
    return cute.local_tile(tensor, tile_layout.tile, (None, col))


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


def _vectors(tile: cute.Tensor) -> cute.Tensor:
    """A tile (rows, cols) as ((1, 8 elements), (rows, cols / 8))."""
    return cute.zipped_divide(tile, (1, _VECTOR))


@cute.jit
def clear_rows(tile: cute.Tensor, first_row, thread, num_threads: cutlass.Constexpr):
    """Zeroes the rows of a tile in shared memory from ``first_row`` on, and makes that known to wgmma and TMA.

    ``thread`` of ``num_threads``, which must meet before any of them lets the zeros be read.
    """
    vectors, zeros = _vectors(tile), cute.make_rmem_tensor(_VECTOR, tile.element_type)
    zeros.fill(0.0)
    store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), tile.element_type, num_bits_per_copy=128)
    num_rows, per_row = cute.size(tile, mode=[0]), cute.size(tile, mode=[1]) // _VECTOR
    for i in cutlass.range(first_row * per_row + thread, num_rows * per_row, num_threads, unroll=1):
        target = vectors[None, (i // per_row, i % per_row)]
        cute.copy(store, cute.make_tensor(zeros.iterator, cute.make_layout(target.shape)), target)
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def store_rows(tile: cute.Tensor, rows: cute.Tensor, num_rows, thread, num_threads: cutlass.Constexpr):
    """Copies the first rows of a tile in shared memory to global memory, and no more than those.

    ``rows``: (at least num_rows, D), of which 16 bytes at a time are stored.
    """
    vectors = _vectors(tile)
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), tile.element_type, num_bits_per_copy=128)
    per_row = rows.shape[1] // _VECTOR
    for i in cutlass.range(thread, num_rows * per_row, num_threads, unroll=1):
        row, col = i // per_row, i % per_row
        fragment = cute.make_rmem_tensor(_VECTOR, tile.element_type)
        source = vectors[None, (row, col)]
        cute.copy(copy, source, cute.make_tensor(fragment.iterator, cute.make_layout(source.shape)))
        target = gmem_vector(rows, cutlass.Int64(row) * rows.stride[0] + col * _VECTOR, _VECTOR)
        cute.copy(copy, fragment, target)
