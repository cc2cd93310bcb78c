"""What the bank model says: the known conflicts, to the last wavefront, and its general properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from layouts import CATALOG, COLS, PADDED_8, PLAIN, SWIZZLE_333, SmemLayout
from layouts.access import AccessKind, Path, array_paths, by_column, by_row, kernel_paths, ldmatrix
from layouts.banks import bank_map, kernel_report, lanes_per_phase, phase_wavefronts, report, wavefronts
from layouts.toys import TOYS

TILES = [(64, 64), (64, 128), (128, 64), (128, 128)]


def ways(layout, head_dim: int, tile_m: int = 64, tile_n: int = 64) -> dict[str, int]:
    reports = kernel_report(layout, kernel_paths(head_dim, tile_m, tile_n)).reports
    return {one.path.name: one.ways for one in reports}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tile", TILES, ids=str)
class TestKernelPaths:
    def test_plain(self, head_dim, tile):
        assert ways(PLAIN, head_dim, *tile) == {
            "cp.async Q": 1,
            "cp.async K": 1,
            "cp.async V": 1,
            "ldmatrix Q": 8,
            "ldmatrix K": 8,
            "ldmatrix.trans V": 8,
            "st.shared O": 8,
            "ld.shared O": 1,
        }

    @pytest.mark.parametrize("layout", [SWIZZLE_333, PADDED_8, TOYS["TEXT"].layout, TOYS["ROTATE"].layout], ids=str)
    def test_free(self, head_dim, tile, layout):
        assert set(ways(layout, head_dim, *tile).values()) == {1}

    def test_every_ldmatrix_phase_of_plain_is_8_way(self, head_dim, tile):
        for path in kernel_paths(head_dim, *tile):
            if path.name.startswith("ldmatrix"):
                assert (report(PLAIN, path).phase_wavefronts == 8).all()


def test_a_swizzle_put_directly_on_rows_of_128_is_2_way():
    found = ways(CATALOG["DIRECT_333"], 128)
    assert [found[name] for name in ("ldmatrix Q", "ldmatrix K", "ldmatrix.trans V")] == [2, 2, 2]
    assert set(ways(CATALOG["DIRECT_333"], 64).values()) == {1}
    assert set(ways(CATALOG["DIRECT_334"], 128).values()) == {1}


@pytest.mark.parametrize(("name", "expected"), [("SWIZZLE_233", 2), ("SWIZZLE_133", 4)])
def test_each_bit_of_the_swizzle_halves_the_conflict(name, expected):
    found = ways(CATALOG[name], 128)
    assert {found[path] for path in ("ldmatrix Q", "ldmatrix K", "ldmatrix.trans V", "st.shared O")} == {expected}


@pytest.mark.parametrize(("name", "expected"), [("ATOM_64B", 2), ("ATOM_32B", 4)])
def test_narrow_atoms_free_ldmatrix_and_burden_the_128_byte_rows(name, expected):
    found = ways(CATALOG[name], 128)
    assert {found[path] for path in ("ldmatrix Q", "ldmatrix K", "ldmatrix.trans V", "st.shared O")} == {1}
    assert found["ld.shared O"] == expected
    copies = [one for one in kernel_report(CATALOG[name], kernel_paths(128, 64, 64)).reports if "cp" in one.path.name]
    assert {(one.ways, one.conflicts, one.degree) for one in copies} == {(1, 0, expected)}


@pytest.mark.parametrize(("layout", "degree"), [(PLAIN, 1), (SWIZZLE_333, 1), (PADDED_8, (1 + 2 + 6 * 3) / 8)], ids=str)
def test_line_splits_of_cp_async(layout, degree):
    """A row of PADDED_8 begins 16 bytes further into a line than the row before: 0, 64 or neither, of eight."""
    for one in kernel_report(layout, kernel_paths(128, 64, 64)).reports:
        if one.path.name.startswith("cp.async"):
            assert (one.ways, one.conflicts, one.degree) == (1, 0, degree)
            assert one.line_splits == one.wavefronts - one.ideal
            assert one.first_collision() is None
        else:
            assert one.line_splits == 0


@pytest.mark.parametrize(("rows", "cols", "padding_bytes"), [(64, 64, 1024), (64, 128, 1024), (128, 128, 2048)])
def test_padding_costs_16_bytes_a_row(rows, cols, padding_bytes):
    assert (PADDED_8.on(rows, cols).cosize - rows * cols) * 2 == padding_bytes


@pytest.mark.parametrize(("name", "expected"), [("FLOAT_32X32", [1, 32, 1]), ("FLOAT_32X33", [1, 1, 1])])
def test_float_array_by_row_by_column_and_broadcast(name, expected):
    toy = TOYS[name]
    found = kernel_report(toy.layout, array_paths(toy.tile, toy.element_bytes)).reports
    assert [one.ways for one in found] == expected


@pytest.mark.parametrize("width", [4, 8, 16])
def test_a_row_of_vectors_is_free_at_every_width(width):
    """A warp's 16-byte loads are four accesses of 128 bytes, not one of 512 that would be 4-way."""
    found = report(PLAIN, by_row("ld", width, (64, 64), 2))
    assert found.ways == 1
    assert found.wavefronts == 64 * 64 * 2 // 128


def test_phases_of_wide_columns():
    """Rows r and r + 8 of SWIZZLE_333 share a 16-byte bank; an 8-byte phase holds 16 rows, a 4-byte one 32."""
    found = [report(SWIZZLE_333, by_column("ld", width, (64, 64), 2)).ways for width in (2, 4, 8, 16)]
    assert found == [4, 4, 2, 1]


def test_totals_of_a_whole_kernel():
    """Batch 1, sequence 4096, 16 heads of 128, tiles 64x64, 128 threads.

    ncu counted these on an H200 for a kernel of the same tiles and partitions that reads Q by ldmatrix in
    every iteration, where this one reads it once: for the comparison all of its ldmatrix count as repeated.
    """
    ctas, iterations = 16 * 64, 64
    counted = {PLAIN: (603_979_776, 1_048_576), SWIZZLE_333: (75_497_472, 131_072)}
    for layout, (ldsm, st_shared) in counted.items():
        found = {one.path.name: one for one in kernel_report(layout, kernel_paths(128, 64, 64)).reports}
        ldmatrix_wavefronts = sum(one.wavefronts for name, one in found.items() if name.startswith("ldmatrix"))
        assert ldmatrix_wavefronts * ctas * iterations == ldsm
        assert found["st.shared O"].wavefronts * ctas == st_shared
        assert found["ld.shared O"].wavefronts * ctas == 131_072
        cp_async = found["cp.async Q"].wavefronts + iterations * (
            found["cp.async K"].wavefronts + found["cp.async V"].wavefronts
        )
        assert cp_async * ctas == 16_908_288


def test_sum_of_an_iteration_and_effective_bandwidth():
    whole = kernel_report(PLAIN, kernel_paths(128, 64, 64))
    assert whole.iteration.wavefronts() == 128 + 128 + 4096 + 4096
    assert whole.iteration.ideal() == 128 + 128 + 512 + 512
    assert whole.wavefronts(64) == 64 * 8448 + 128 + 1024 + 1024 + 128
    assert whole.degree == pytest.approx(8448 / 1280)
    column = report(TOYS["FLOAT_32X32"].layout, by_column("ld", 4, (32, 32), 4))
    assert column.effective_bandwidth(128.0) == 4.0


def test_the_first_collision_names_lanes_bank_and_addresses():
    stores = next(path for path in kernel_paths(128, 64, 64) if path.name == "st.shared O")
    collision = report(PLAIN, stores).first_collision()
    assert collision.lanes == (0, 4, 8, 12, 16, 20, 24, 28)
    assert collision.addresses == tuple(range(0, 2048, 256))
    assert collision.coords == tuple((row, 0) for row in range(8))
    assert str(collision) == (
        "lanes 0, 4, ..., 28 of phase 0 all need 4-byte bank 0: rows 0 to 7, column 0, 256 bytes apart"
    )
    second = report(PLAIN, ldmatrix("", "A", (16, 128))).collisions(0, 0, 1)
    assert [one.lanes for one in second] == [tuple(range(8, 16))]
    assert report(SWIZZLE_333, stores).first_collision() is None


def test_bank_map_of_the_swizzle_is_row_xor_vector():
    rows, vectors = np.arange(64)[:, None], np.arange(16)
    np.testing.assert_array_equal(bank_map(SWIZZLE_333.on(64, 128), 2), (rows ^ vectors) % 8)


def test_misaligned_vectors_are_refused_with_their_place():
    odd = SmemLayout("odd", (1, COLS), (COLS + 1, 1))
    with pytest.raises(ValueError, match=r"ldmatrix K: layout 'odd' puts \(1, 0\) at byte 130"):
        report(odd, ldmatrix("ldmatrix K", "B", (64, 64)))


def test_lanes_must_be_whole_phases():
    with pytest.raises(ValueError, match="multiple of 32 lanes for accesses of 4 bytes"):
        phase_wavefronts(np.zeros((4, 8)), 4)
    with pytest.raises(ValueError, match="multiple of 16 lanes for accesses of 16 bytes"):
        phase_wavefronts(np.zeros((4, 8)), 16, kind=AccessKind.LOAD)
    with pytest.raises(ValueError, match="width must be 1, 2, 4, 8 or 16 bytes, got 12"):
        wavefronts(np.zeros((1, 32)), 12)


LANE = np.arange(32)
PHASE, IN_PHASE = LANE // 8, LANE % 8
# Wavefronts of one instruction, measured on an H200; a lane takes the given vector.
# (vectors, ld of 8 bytes, ld of 16, st of 8, st of 16)
VECTORS = {
    "same": (0 * LANE, 1, 2, 2, 4),
    "l // 2": (LANE // 2, 1, 2, 2, 4),
    "l // 4": (LANE // 4, 1, 2, 2, 4),
    "l // 8": (LANE // 8, 1, 2, 2, 4),
    "l // 16": (LANE // 16, 1, 2, 2, 4),
    "l % 16": (LANE % 16, 2, 4, 2, 4),
    "l % 8": (LANE % 8, 2, 4, 2, 4),
    "l ^ 2 alike": (LANE & 1 | LANE >> 2 << 1, 1, 2, 2, 4),
    "l ^ 4 alike": (LANE & 3 | LANE >> 3 << 2, 2, 4, 2, 4),
    "l ^ 8 alike": (LANE & 7 | LANE >> 4 << 3, 2, 4, 2, 4),
    "l ^ 3 alike": (np.minimum(LANE, LANE ^ 3), 2, 4, 2, 4),
    "l": (LANE, 2, 4, 2, 4),
    "half same, half l": (np.where(LANE < 16, 0, LANE), 2, 3, 2, 4),
    "half l // 2, half l": (np.where(LANE < 16, LANE // 2, LANE), 2, 3, 2, 4),
    "l // 16 * 16": (LANE // 16 * 16, 2, 2, 2, 4),
    "l // 8 * 8": (LANE // 8 * 8, 2, 4, 2, 4),
    "half l // 2, half l ^ 2 alike": (np.where(LANE < 16, LANE // 2, 16 + (LANE & 1 | LANE >> 2 << 1)), 2, 2, 2, 4),
    "l // 8 * 32": (LANE // 8 * 32, 4, 4, 4, 4),
    "l // 2 * 32": (LANE // 2 * 32, 16, 16, 16, 16),
    "l // 2, one broken": (np.where(LANE == 31, 40, LANE // 2), 3, 3, 3, 4),
    "31 - l": (31 - LANE, 2, 4, 2, 4),
    "2 l": (2 * LANE, 4, 8, 4, 8),
}
# The same of cp.async of 16 bytes: (byte addresses, wavefronts).
COPIES = {
    "aligned": (16 * LANE, 4),
    "rows of 144, 16 past": (144 * PHASE + 16 * IN_PHASE + 16, 11),
    "16 past": (16 * LANE + 16, 12),
    "64 past, rows of 256": (256 * PHASE + 16 * IN_PHASE + 64, 8),
    "column of 128": (128 * LANE, 32),
    "column of 128, another vector a lane": (128 * LANE + 16 * IN_PHASE, 32),
    "two lines a phase": (256 * PHASE + IN_PHASE // 4 * 128 + IN_PHASE % 4 * 16, 8),
    "two lines a phase, other banks": (256 * PHASE + IN_PHASE // 4 * 128 + IN_PHASE * 16, 8),
    "permuted": (128 * PHASE + 16 * (IN_PHASE ^ 5), 4),
    "rows of 272": (272 * PHASE + 16 * IN_PHASE, 10),
    "rows of 144": (144 * PHASE + 16 * IN_PHASE, 10),
    "pairs": (128 * (LANE // 2) + 16 * (LANE % 2) + 32 * (LANE // 2 % 4), 16),
}
MEASURED = [
    (f"{instruction} {name}", instruction, width, np.asarray(vectors) * width, expected)
    for name, (vectors, *counts) in VECTORS.items()
    for (instruction, width), expected in zip(
        (("ld.shared.v2.b32", 8), ("ld.shared.v4.b32", 16), ("st.shared.v2.b32", 8), ("st.shared.v4.b32", 16)),
        counts,
        strict=True,
    )
] + [(f"cp.async {name}", "cp.async.cg.shared.global", 16, *one) for name, one in COPIES.items()]


@pytest.mark.parametrize(
    ("instruction", "width", "addresses", "measured"), [row[1:] for row in MEASURED], ids=[row[0] for row in MEASURED]
)
def test_wavefronts_measured_on_an_h200(instruction, width, addresses, measured):
    cols = addresses.reshape(1, 1, 32) // 2
    found = report(PLAIN, Path("", instruction, width, 0 * cols, cols, (1, 8192)))
    assert found.wavefronts == measured
    assert 1 <= found.ideal <= measured
    if found.path.kind is AccessKind.ASYNC_COPY:
        assert found.conflicts == 0  # as its counter says
    else:
        assert (found.conflicts > 0) == (found.ways > 1) == (found.first_collision() is not None)


def test_inactive_lanes_keep_phases_apart():
    active = np.arange(32) != 31
    addresses = np.zeros((1, 32), np.int64)
    assert wavefronts(addresses, 16, active, kind=AccessKind.LOAD).tolist() == [3]
    assert wavefronts(addresses, 16, kind=AccessKind.LOAD).tolist() == [2]
    assert phase_wavefronts(addresses, 16, 0 * active, kind=AccessKind.ASYNC_COPY).tolist() == [[0, 0, 0, 0]]


def test_a_collision_of_merged_phases_names_lanes_of_both():
    cols = (LANE // 8 * 8 * 8).reshape(1, 1, 32)
    found = report(PLAIN, Path("", "ld.shared.v4.b32", 16, 0 * cols, cols, (1, 2048)))
    assert (found.wavefronts, found.ideal, found.ways) == (4, 2, 2)
    assert found.first_collision().lanes == tuple(range(16))


def test_every_instruction_of_the_kernel_has_a_kind_and_others_none():
    kinds = {path.name.split()[0]: path.kind for path in kernel_paths(64, 64, 64)}
    assert kinds == {
        "cp.async": AccessKind.ASYNC_COPY,
        "ldmatrix": AccessKind.LDMATRIX,
        "ldmatrix.trans": AccessKind.LDMATRIX,
        "st.shared": AccessKind.STORE,
        "ld.shared": AccessKind.LOAD,
    }
    with pytest.raises(ValueError, match="instruction must start with"):
        AccessKind.of("red.shared.add.u32")


# Properties, on random accesses of one warp.

widths = st.sampled_from((1, 2, 4, 8, 16))
slots = hnp.arrays(np.int64, (3, 32), elements=st.integers(0, 255))
masks = hnp.arrays(bool, (3, 32))


def _by_definition(addresses, width, active) -> list[int]:
    """Wavefronts of the phases of one access, counted word by word."""
    found = []
    lanes = lanes_per_phase(width)
    for start in range(0, 32, lanes):
        words = {
            (address + byte) // 4
            for address, present in zip(addresses[start : start + lanes], active[start : start + lanes], strict=True)
            if present
            for byte in range(width)
        }
        found.append(max((sum(word % 32 == bank for word in words) for bank in range(32)), default=0))
    return found


@settings(max_examples=60, deadline=None)
@given(slots, widths, masks)
def test_wavefronts_equal_the_definition(slots, width, active):
    addresses = slots * width
    expected = [_by_definition(a.tolist(), width, m.tolist()) for a, m in zip(addresses, active, strict=True)]
    np.testing.assert_array_equal(phase_wavefronts(addresses, width, active), expected)


@settings(max_examples=60, deadline=None)
@given(slots, widths)
def test_wavefronts_lie_between_one_and_the_lanes_of_a_phase(slots, width):
    found = phase_wavefronts(slots * width, width)
    assert found.min() >= 1
    assert found.max() <= lanes_per_phase(width)


@settings(max_examples=60, deadline=None)
@given(slots, widths, st.integers(0, 1000), st.randoms(use_true_random=False))
def test_neither_the_base_nor_the_order_of_lanes_in_a_phase_matters(slots, width, rows, random):
    lanes = lanes_per_phase(width)
    order = list(range(lanes))
    random.shuffle(order)
    shuffled = slots.reshape(3, -1, lanes)[:, :, order].reshape(3, 32) * width + 128 * rows
    np.testing.assert_array_equal(phase_wavefronts(shuffled, width), phase_wavefronts(slots * width, width))


@settings(max_examples=30, deadline=None)
@given(widths, st.integers(0, 255))
def test_broadcast_is_free(width, slot):
    assert (phase_wavefronts(np.full((1, 32), slot * width), width) == 1).all()
