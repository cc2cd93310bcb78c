import pytest

from layouts import CATALOG, COLS, SmemLayout, Swizzle
from layouts.checks import require_foldable_swizzle, require_vectors
from layouts.parse import parse_expression


@pytest.mark.parametrize("layout", CATALOG.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("rows", (64, 128))
@pytest.mark.parametrize("cols", (64, 128))
def test_catalog_layouts_keep_vectors(layout, rows, cols):
    require_vectors(layout.on(rows, cols))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (SmemLayout("odd pad", (1, COLS), (COLS + 1, 1)), r"\(1, 0\) starts at offset 65"),
        (SmemLayout("small base", (1, COLS), (COLS, 1), Swizzle(3, 2, 3)), r"base at least 3"),
        (SmemLayout("rows overlap", (8, 64), (32, 1)), r"\(0, 32\) and \(1, 0\) share offset 32"),
        (SmemLayout("column major", (8, 64), (1, 8)), r"\(0, 0\) is not contiguous"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_unusable_layouts_are_refused_with_the_place(layout, message):
    with pytest.raises(ValueError, match=message):
        require_vectors(layout.on(64, 64))


def test_columns_must_hold_whole_vectors():
    with pytest.raises(ValueError, match="60 columns are not a multiple of the 8-element vector"):
        require_vectors(SmemLayout("plain", (1, COLS), (COLS, 1)).on(64, 60))


@pytest.mark.parametrize("cols", (64, 128))
@pytest.mark.parametrize("layout", CATALOG.values(), ids=lambda layout: layout.name)
def test_catalog_layouts_fold_where_their_shift_follows_the_row(layout, cols):
    misplaced = (layout.name, cols) in {("DIRECT_333", 128), ("DIRECT_334", 64)}
    if misplaced:
        with pytest.raises(ValueError, match="may depend on the row modulo 8 alone"):
            require_foldable_swizzle(layout.on(64, cols))
    else:
        require_foldable_swizzle(layout.on(64, cols))


@pytest.mark.parametrize(
    ("expression", "first"),
    [
        ("S<3,3,3> o (1,D):(D,1)", r"\(0, 64\) is xored with 8 but \(0, 0\) with 0"),
        ("S<3,3,6> o (8,64):(64,1)", r"\(8, 0\) is xored with 8 but \(0, 0\) with 0"),
        ("S<3,3,3> o (8,64):(72,1)", r"powers of two, got 72"),
        ("S<3,3,4> o (1,D):(D+8,1)", "powers of two, got 136"),
    ],
)
def test_swizzles_that_change_from_access_to_access_are_refused(expression, first):
    with pytest.raises(ValueError, match=first):
        require_foldable_swizzle(parse_expression(expression).on(64, 128))
