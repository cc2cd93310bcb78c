"""SmemLayout and CuTe agree at every coordinate."""

import cutlass.cute as cute
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layouts import CATALOG, SmemLayout, Swizzle
from layouts.checks import bijection_fault, tile_offsets
from layouts.cute_adapter import to_cute
from layouts.smem_layout import IDENTITY
from tests.layouts.cute_context import cute_offsets, mlir_context


@st.composite
def swizzles(draw):
    bits = draw(st.integers(0, 4))
    shift = draw(st.integers(bits, 6)) * draw(st.sampled_from((1, -1)))
    return Swizzle(bits, draw(st.integers(0, 4)), shift)


@st.composite
def tiles(draw):
    """A layout of random atom, strides and swizzle over a tile of at most 512 elements."""
    atom = draw(st.integers(1, 8)), draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    atoms = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    padding = draw(st.integers(0, 9))
    stride = draw(st.sampled_from(((atom[1] + padding, 1), (1, atom[0] + padding))))
    layout = SmemLayout("random", atom, stride, draw(swizzles()))
    return layout.on(atom[0] * atoms[0], atom[1] * atoms[1])


@pytest.mark.parametrize("tile", [(32, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("layout", CATALOG.values(), ids=lambda layout: layout.name)
def test_catalog_equals_cute_at_every_coordinate(layout, tile):
    with mlir_context():
        expected = cute_offsets(to_cute(layout.on(*tile)), *tile)
    np.testing.assert_array_equal(tile_offsets(layout.on(*tile)), expected)


@pytest.mark.parametrize("tile", [(64, 64), (128, 64), (64, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("name", ["SWIZZLE_333", "SWIZZLE_233", "SWIZZLE_133", "ATOM_64B", "ATOM_32B"])
def test_atoms_are_repeated_as_tile_to_shape_repeats_them(name, tile):
    layout = CATALOG[name]
    swizzle = layout.swizzle
    with mlir_context():
        atom = cute.make_composed_layout(
            cute.make_swizzle(swizzle.bits, swizzle.base, swizzle.shift),
            0,
            cute.make_layout(layout.shape, stride=layout.stride),
        )
        tiled = cute.tile_to_shape(atom, tile, (0, 1))
        corners = [(row, col) for row in range(0, tile[0], 7) for col in range(0, tile[1], 5)]
        expected = [int(tiled(corner)) for corner in corners]
    assert [layout.on(*tile).offset(*corner) for corner in corners] == expected


@settings(max_examples=60, deadline=None)
@given(tiles())
def test_random_layouts_equal_cute(tile):
    with mlir_context():
        expected = cute_offsets(to_cute(tile), *tile.tile)
    np.testing.assert_array_equal(tile_offsets(tile), expected)


@settings(max_examples=100, deadline=None)
@given(tiles())
def test_random_layouts_are_one_to_one_inside_their_cosize(tile):
    assert bijection_fault(tile) is None


@settings(max_examples=100, deadline=None)
@given(swizzles(), st.integers(0, 2**20))
def test_a_swizzle_permutes_each_period(swizzle, block):
    start = block * swizzle.period
    indices = start + np.arange(swizzle.period)
    np.testing.assert_array_equal(np.sort(swizzle(indices)), indices)


def test_a_swizzle_of_no_bits_changes_nothing():
    indices = np.arange(4096)
    np.testing.assert_array_equal(IDENTITY(indices), indices)
