"""Checks that a layout, or a mapping that isn't written as one, is fit for use; each says where it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from layouts.smem_layout import IDENTITY, SmemLayout, Swizzle, TileLayout


def listed(noun: str, values: Sequence[int]) -> str:
    """ "row 3", "rows 0 to 7", "rows 0, 4, ..., 28" or "rows 0, 2, 5"."""
    if len(values) == 1:
        return f"{noun} {values[0]}"
    steps = {after - before for before, after in pairwise(values)}
    if len(values) > 2 and steps == {1}:
        return f"{noun}s {values[0]} to {values[-1]}"
    if len(values) > 4 and len(steps) == 1:
        return f"{noun}s {values[0]}, {values[1]}, ..., {values[-1]}"
    return f"{noun}s {', '.join(map(str, values))}"


def tile_offsets(tile: TileLayout) -> np.ndarray:
    """Offsets of every element of a tile, in elements: int64 array (rows, cols)."""
    rows, cols = tile.tile
    return tile.offset(np.arange(rows)[:, None], np.arange(cols)[None, :])


def first_clash(offsets: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Two (row, col) that share an offset, in an array (rows, cols) of offsets; None if there are none."""
    flat = offsets.reshape(-1)
    order = np.argsort(flat, kind="stable")
    same = np.flatnonzero(flat[order][1:] == flat[order][:-1])
    if not len(same):
        return None
    first, second = sorted((order[same[0]], order[same[0] + 1]))
    cols = offsets.shape[1]
    return (int(first // cols), int(first % cols)), (int(second // cols), int(second % cols))


def bijection_fault(tile) -> str | None:
    """Where a layout fails to give each element of its tile a place of its own; None if it doesn't fail.

    Args:
        tile: a layout over a tile (``layout.on(rows, cols)``).
    """
    offsets = tile_offsets(tile)
    outside = np.argwhere((offsets < 0) | (offsets >= tile.cosize))
    if len(outside):
        row, col = map(int, outside[0])
        return (
            f"element ({row}, {col}) is at offset {offsets[row, col]}, outside the {tile.cosize} elements set aside "
            f"for the tile"
        )
    clash = first_clash(offsets)
    if clash:
        return f"elements {clash[0]} and {clash[1]} share offset {offsets[clash[0]]}; the map is not one-to-one"
    return None


def latin_fault(places) -> str | None:
    """Where an array of places breaks the rule "each place once a row, once a column"; None if it holds.

    With places = banks this is what makes both a row and a column of a square block free of conflicts
    (the Sudoku-like condition of the FlashAttention-2 course, chapter 4). XOR is one way to satisfy it.

    Args:
        places: integers, shape (rows, cols), for example the bank of each vector of a block.
    """
    places = np.asarray(places)
    for lines, line_noun, index_noun in ((places, "row", "column"), (places.T, "column", "row")):
        for number, line in enumerate(lines):
            values, counts = np.unique(line, return_counts=True)
            if counts.max(initial=0) > 1:
                place = values[counts.argmax()]
                where = listed(index_noun, np.flatnonzero(line == place).tolist())
                return f"in {line_noun} {number}, place {place} occurs {counts.max()} times, at {where}"
    return None


@lru_cache(maxsize=256)
def require_vectors(tile: TileLayout, vector: int = 8) -> None:
    """Refuses a layout that the kernels' vector accesses can't use.

    A kernel moves whole vectors of ``vector`` elements along a row (cp.async, ldmatrix, 16-byte loads),
    so the layout must keep each vector contiguous and aligned to its own size, must give every element
    of the tile a place of its own, and must stay inside the memory set aside for it (``cosize``).

    Args:
        tile: the layout over a tile of rows x cols elements.
        vector: elements in a vector; 8 of 16 bits are 16 bytes.

    Raises:
        ValueError: naming the layout, the first coordinate that fails and why.
    """
    name = f"layout {tile.layout.name!r} ({tile.layout}) on a {tile.tile[0]}x{tile.tile[1]} tile"
    if tile.tile[1] % vector:
        raise ValueError(f"{name}: its {tile.tile[1]} columns are not a multiple of the {vector}-element vector")
    offsets = tile_offsets(tile)
    vectors = offsets.reshape(tile.tile[0], -1, vector)
    torn = np.argwhere(vectors != vectors[:, :, :1] + np.arange(vector))
    if len(torn):
        row, index, lane = map(int, torn[0])
        col = index * vector
        raise ValueError(
            f"{name}: the {vector}-element vector at ({row}, {col}) is not contiguous: element ({row}, {col}) is at "
            f"offset {offsets[row, col]} and ({row}, {col + lane}) at {offsets[row, col + lane]}, not at "
            f"{offsets[row, col] + lane}; the column stride must be 1 and the swizzle's base at least "
            f"{(vector - 1).bit_length()}"
        )
    crooked = np.argwhere(vectors[:, :, 0] % vector)
    if len(crooked):
        row, col = int(crooked[0][0]), int(crooked[0][1]) * vector
        raise ValueError(
            f"{name}: the {vector}-element vector at ({row}, {col}) starts at offset {offsets[row, col]}, which is "
            f"not a multiple of {vector}; row strides (padding included) must be"
        )
    fault = bijection_fault(tile)
    if fault:
        raise ValueError(f"{name}: {fault}")


@lru_cache(maxsize=256)
def require_foldable_swizzle(tile: TileLayout, rows: int = 8) -> None:
    """Refuses a swizzle that CuTe can't fold into the base address of each thread.

    A thread's accesses lie whole multiples of ``rows`` rows and of a vector apart. CuTe's copies fold the
    swizzle into the thread's first address and step on from it. That is right only if the bits that the
    swizzle takes its XOR from are the same at every step, so they may depend on row mod ``rows`` alone; and
    the CuTe DSL (4.8.1) compiles it only with a shift above 0, a base that keeps a vector whole, and
    strides that are powers of two. Some layouts outside of this happen to work; others end in an error of
    the compiler, and some in wrong addresses.

    Args:
        tile: the layout over a tile of rows x cols elements.
        rows: rows after which a thread's accesses repeat; 8 for ldmatrix and mma.m16n8k16.

    Raises:
        ValueError: naming the layout, and the stride or two coordinates for which the swizzle can't be folded.
    """
    name = f"layout {tile.layout.name!r} ({tile.layout}) on a {tile.tile[0]}x{tile.tile[1]} tile"
    swizzle = tile.layout.swizzle
    if not swizzle.bits:
        return
    if swizzle.shift < 0 or swizzle.base < 3:
        raise ValueError(
            f"{name}: a kernel takes a swizzle with a base of 3 or more and a shift above 0, got {swizzle}"
        )
    for extents, strides in zip(tile.shape, tile.stride, strict=True):
        for extent, stride in zip(extents, strides, strict=True):
            if extent > 1 and stride & (stride - 1):
                raise ValueError(
                    f"{name}: a kernel takes a swizzle only over strides that are powers of two, got {stride} "
                    f"(a layout is padded or swizzled, not both)"
                )
    unswizzled = replace(tile, layout=replace(tile.layout, swizzle=IDENTITY))
    moved = tile_offsets(tile) ^ tile_offsets(unswizzled)
    expected = moved[np.arange(tile.tile[0]) % rows, 0]
    different = np.argwhere(moved != expected[:, None])
    if len(different):
        row, col = map(int, different[0])
        raise ValueError(
            f"{name}: element ({row}, {col}) is xored with {moved[row, col]} but ({row % rows}, 0) with "
            f"{expected[row]}; a kernel's swizzle may depend on the row modulo {rows} alone (put it on an atom of "
            f"{rows} rows, or let the shift follow the length of a row)"
        )


HARDWARE_LAYOUTS = (
    SmemLayout("128-byte swizzle", (8, 64), (64, 1), Swizzle(3, 3, 3)),
    SmemLayout("64-byte swizzle", (8, 32), (32, 1), Swizzle(2, 3, 3)),
    SmemLayout("32-byte swizzle", (8, 16), (16, 1), Swizzle(1, 3, 3)),
    SmemLayout("no swizzle", (8, 8), (8, 1)),
)
"""What TMA writes and wgmma reads, over 16-bit elements (PTX ISA, "Strides" and "Swizzling modes" of wgmma's
matrix descriptors): blocks of eight rows of 128, 64, 32 or 16 bytes."""


@lru_cache(maxsize=256)
def require_hardware_layout(tile: TileLayout) -> TileLayout:
    """The one of ``HARDWARE_LAYOUTS`` that places every element of the tile where the given layout does.

    Args:
        tile: the layout over a tile of rows x cols elements of 16 bits.

    Raises:
        ValueError: there is none. The copy engine and the tensor cores swizzle by themselves, in these four ways;
            padding and other swizzles are out of their reach.
    """
    offsets = tile_offsets(tile)
    for layout in HARDWARE_LAYOUTS:
        if tile.tile[0] % layout.shape[0] == 0 and tile.tile[1] % layout.shape[1] == 0:
            candidate = layout.on(*tile.tile)
            if np.array_equal(tile_offsets(candidate), offsets):
                return candidate
    known = ", ".join(f"{layout} ({layout.name})" for layout in HARDWARE_LAYOUTS)
    raise ValueError(
        f"layout {tile.layout.name!r} ({tile.layout}) on a {tile.tile[0]}x{tile.tile[1]} tile: TMA and wgmma take only "
        f"{known}; padding and other swizzles are out of their reach"
    )
