"""The search finds the known cures, prices them, and says what they rule out."""

import pytest

from layouts import CATALOG, PADDED_8, PLAIN, SWIZZLE_333
from layouts.access import array_paths, by_row, kernel_paths
from layouts.banks import kernel_report
from layouts.checks import bijection_fault, latin_fault, tile_offsets
from layouts.parse import parse_expression
from layouts.search import canonical_mode, rules_out, search
from layouts.toys import TOYS, text_column


@pytest.mark.parametrize("head_dim", [64, 128])
def test_everything_found_is_free_and_cheapest_comes_first(head_dim):
    paths = kernel_paths(head_dim, 64, 64)
    found = search(paths)
    assert [one.bytes for one in found] == sorted(one.bytes for one in found)
    for one in found:
        assert kernel_report(one.layout, paths).free
        assert bijection_fault(one.layout.on(64, head_dim)) is None
        assert parse_expression(str(one.layout)) == one.layout


def test_at_head_dim_128_the_search_finds_the_two_swizzles_and_the_odd_paddings():
    found = {str(one.layout): one for one in search(kernel_paths(128, 64, 64))}
    assert list(found)[:3] == [str(SWIZZLE_333), str(CATALOG["DIRECT_334"]), str(PADDED_8)]
    assert [layout for layout in found if "D+" in layout] == [
        f"S<0,3,3> o (1,D):(D+{padding},1)" for padding in (8, 24, 40, 56)
    ]
    # Q, K and V; O takes the place of Q.
    assert found[str(SWIZZLE_333)].bytes == 3 * 64 * 128 * 2
    assert found[str(PADDED_8)].padding == 3 * 64 * 16
    assert str(CATALOG["DIRECT_333"]) not in found


def test_fewer_paths_leave_more_choices():
    ldmatrix_only = [path for path in kernel_paths(128, 64, 64) if path.name == "ldmatrix K"]
    found = {str(one.layout) for one in search(ldmatrix_only)}
    assert {str(CATALOG["ATOM_64B"]), str(CATALOG["ATOM_32B"])} < found


def test_a_float_array_needs_padding_by_an_odd_number_of_words():
    paddings = [one for one in search(array_paths((32, 32), 4)) if one.padding]
    assert paddings[0].padding == 32 * 4
    assert all((one.padding // (32 * 4)) % 2 == 1 for one in paddings)


def test_paths_of_one_element_size_only():
    with pytest.raises(ValueError, match=r"elements of one size, got sizes \[2, 4\]"):
        search([by_row("ld", 4, (32, 32), 4), by_row("ld", 4, (32, 32), 2)])


@pytest.mark.parametrize(
    ("layout", "mode", "closed"),
    [
        (SWIZZLE_333, "128B", ()),
        (CATALOG["ATOM_64B"], "64B", ()),
        (CATALOG["ATOM_32B"], "32B", ()),
        (CATALOG["ATOM_16B"], "16B", ()),
        (PLAIN, None, ("WGMMA",)),
        (PADDED_8, None, ("TMA", "WGMMA")),
        (CATALOG["DIRECT_334"], None, ("TMA", "WGMMA")),
        (parse_expression("(1,D):(D+1,1)"), None, ("TMA", "WGMMA", "16-byte vectors")),
    ],
    ids=str,
)
def test_what_a_layout_rules_out_at_head_dim_128(layout, mode, closed):
    assert canonical_mode(layout.on(64, 128)) == mode
    assert rules_out(layout.on(64, 128)) == closed


def test_the_mode_is_seen_however_the_layout_is_written():
    assert canonical_mode(CATALOG["DIRECT_333"].on(64, 64)) == "128B"
    assert canonical_mode(CATALOG["DIRECT_333"].on(64, 128)) is None


@pytest.mark.parametrize(("head_dim", "name"), [(64, "DIRECT_333"), (128, "DIRECT_334")])
def test_the_formula_of_the_text_is_a_swizzle_whose_shift_follows_the_row(head_dim, name):
    formula = TOYS["TEXT"].layout.on(64, head_dim)
    assert (tile_offsets(formula) == tile_offsets(CATALOG[name].on(64, head_dim))).all()
    for other in {"DIRECT_333", "DIRECT_334"} - {name}:
        assert (tile_offsets(formula) != tile_offsets(CATALOG[other].on(64, head_dim))).any()


def test_the_formula_by_hand():
    assert [text_column(3, col) for col in (0, 7, 8, 24, 64, 127)] == [24, 31, 16, 0, 88, 103]


@pytest.mark.parametrize("toy", TOYS.values(), ids=lambda toy: toy.name)
def test_toys_are_one_to_one(toy):
    assert bijection_fault(toy.layout.on(*toy.tile)) is None


def test_latin_squares_and_where_others_fail():
    for name in ("XOR_4X4", "ROTATE"):
        toy = TOYS[name]
        places = tile_offsets(toy.layout.on(*toy.tile)) % toy.tile[1]
        assert latin_fault(places[:4, :4] if name == "XOR_4X4" else places[:8, ::8] // 8) is None
    assert latin_fault([[0, 1], [0, 1]]) == "in column 0, place 0 occurs 2 times, at rows 0, 1"
    assert latin_fault([[0, 1, 2], [1, 1, 0], [2, 0, 1]]) == "in row 1, place 1 occurs 2 times, at columns 0, 1"


def test_a_collapsing_map_is_found_out():
    overlapping = parse_expression("(8,64):(32,1)").on(8, 64)
    assert bijection_fault(overlapping) == "elements (0, 32) and (1, 0) share offset 32; the map is not one-to-one"
