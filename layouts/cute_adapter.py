"""The one adapter from a layout value to CuTe. Importing it imports the CuTe DSL."""

from __future__ import annotations

import cutlass.cute as cute

from layouts.smem_layout import TileLayout


def to_cute(layout: TileLayout, stages: int | None = None, stage_stride: int | None = None) -> cute.ComposedLayout:
    """The CuTe layout of a tile: (rows, cols) -> element offset. Call it while a kernel is traced.

    Every layout, the unswizzled ones too, becomes ``Swizzle o 0 o shape:stride``, so a kernel's source
    does not depend on which layout it was given. With ``stages``, (rows, cols, stage): as many tiles, one
    behind the other, or ``stage_stride`` elements apart.
    """
    swizzle = layout.layout.swizzle
    shape, stride = layout.shape, layout.stride
    if stages is not None:
        shape, stride = (*shape, stages), (*stride, stage_stride or layout.cosize)
    return cute.make_composed_layout(
        cute.make_swizzle(swizzle.bits, swizzle.base, swizzle.shift), 0, cute.make_layout(shape, stride=stride)
    )


def to_hardware_swizzle(
    layout: TileLayout, tiles: int | None = None, tile_stride: int | None = None
) -> cute.ComposedLayout:
    """The same for TMA and wgmma, whose swizzle counts in bytes: it goes into a pointer to 16-bit elements.

    ``outer`` is the layout in elements, ``inner`` the swizzle in bytes. With ``tiles``, (rows, cols, tile), the tiles
    ``tile_stride`` elements apart if that isn't None.
    """
    in_elements = to_cute(layout, tiles, tile_stride)
    swizzle = layout.layout.swizzle
    return cute.make_composed_layout(
        cute.make_swizzle(swizzle.bits, swizzle.base + 1, swizzle.shift), 0, in_elements.outer
    )
