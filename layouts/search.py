"""Search: which swizzles and paddings are free of bank conflicts on all given paths at once, and their price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layouts.access import Path
from layouts.banks import PHASE_BYTES, kernel_report
from layouts.checks import HARDWARE_LAYOUTS, bijection_fault, tile_offsets
from layouts.smem_layout import COLS, IDENTITY, SmemLayout, Swizzle

# The rows of an atom are as long as the mode's name says; "16B" is the mode without swizzle.
_CANONICAL = {f"{2 * layout.shape[1]}B": layout for layout in HARDWARE_LAYOUTS}


def _atoms(offsets: np.ndarray, atom_cols: int) -> np.ndarray:
    """Offsets (rows, cols) as blocks of 8 x atom_cols: (down, across, 8, atom_cols)."""
    rows, cols = offsets.shape
    return offsets.reshape(rows // 8, 8, cols // atom_cols, atom_cols).transpose(0, 2, 1, 3)


def canonical_mode(tile) -> str | None:
    """The swizzle mode ("128B", "64B", "32B" or "16B") whose atoms a tile of 16-bit elements is made of, or None.

    The mode is decided by the offsets themselves, so a layout written in another way counts too. Atoms
    must follow each other down the rows without a gap, as one TMA box writes them.
    """
    offsets = tile_offsets(tile)
    for mode, canonical in _CANONICAL.items():
        atom_cols = canonical.shape[1]
        if offsets.shape[0] % 8 or offsets.shape[1] % atom_cols:
            continue
        atom = tile_offsets(canonical.on(8, atom_cols))
        atoms = _atoms(offsets, atom_cols)
        starts = atoms[:, :, :1, :1]
        dense = (np.diff(starts[:, :, 0, 0], axis=0) == atom.size).all()
        if dense and not (starts % atom.size).any() and (atoms - starts == atom).all():
            return mode
    return None


def rules_out(tile) -> tuple[str, ...]:
    """Which ways of the hardware a layout over a tile of 16-bit elements closes.

    "TMA" and "WGMMA" when the tile is not made of the canonical atoms of a swizzle mode (TMA also takes
    rows without swizzle and without gaps), "16-byte vectors" when a vector is torn or not aligned, which
    cp.async of 16 bytes and ldmatrix need.
    """
    offsets = tile_offsets(tile)
    mode = canonical_mode(tile)
    dense_rows = (offsets == np.arange(offsets.size).reshape(offsets.shape)).all()
    closed = []
    if mode is None and not dense_rows:
        closed.append("TMA")
    if mode is None:
        closed.append("WGMMA")
    vectors = offsets.reshape(offsets.shape[0], -1, 8)
    if (vectors[:, :, 0] % 8).any() or (vectors != vectors[:, :, :1] + np.arange(8)).any():
        closed.append("16-byte vectors")
    return tuple(closed)


@dataclass(frozen=True)
class Candidate:
    """A layout that is free of bank conflicts on all paths of a search.

    Args:
        layout: the layout, named by its expression.
        bytes: shared memory of the tiles of the search together.
        padding: how many of ``bytes`` hold no element.
        wavefronts: of all paths, those of a KV iteration once; more than ``ideal`` if cp.async splits lines.
        ideal: the same at best.
        mode: canonical swizzle mode, or None.
        rules_out: see ``rules_out``.
    """

    layout: SmemLayout
    bytes: int
    padding: int
    wavefronts: int
    ideal: int
    mode: str | None
    rules_out: tuple[str, ...]


def candidates(cols: int, width: int, element_bytes: int, max_padding_bytes: int = PHASE_BYTES) -> Iterator[SmemLayout]:
    """The layouts that a search tries on tiles of ``cols`` columns.

    Every Swizzle(bits, base, shift) that can move a vector to another bank, on plain rows and on atoms
    of 8 rows of 128, 64 and 32 bytes; then paddings of plain rows in steps of one access.

    Args:
        width: bytes of the widest access; a swizzle that moves less would tear it.
        element_bytes: bytes of an element.
        max_padding_bytes: the largest padding of a row.
    """
    vector = width // element_bytes
    lowest = vector.bit_length() - 1
    bank_bits = (PHASE_BYTES // element_bytes).bit_length() - 1
    swizzles = [IDENTITY] + [
        Swizzle(bits, base, shift)
        for base in range(lowest, bank_bits)
        for bits in range(1, bank_bits - base + 1)
        for shift in range(bits, 2 * bank_bits)
    ]
    atom_cols = [row_bytes // element_bytes for row_bytes in (128, 64, 32)]
    shapes = [((8, extent), (extent, 1)) for extent in atom_cols if cols % extent == 0]
    shapes.append(((1, COLS), (COLS, 1)))
    for swizzle in swizzles:
        for shape, stride in shapes:
            yield _named(shape, stride, swizzle)
    for padding in range(vector, max_padding_bytes // element_bytes + 1, vector):
        yield _named((1, COLS), (COLS + padding, 1), IDENTITY)


def _named(shape, stride, swizzle) -> SmemLayout:
    anonymous = SmemLayout("", shape, stride, swizzle)
    return SmemLayout(str(anonymous), shape, stride, swizzle)


def search(paths: Sequence[Path]) -> list[Candidate]:
    """All candidates that are free of bank conflicts on every path at once, cheapest first.

    Cheapest: least shared memory, then fewest wavefronts, fewest restrictions, fewest swizzle bits and
    smallest shift.
    Layouts that give every tile the same offsets are listed once.

    Args:
        paths: accesses to one or several tiles; one layout has to serve them all. Elements of one size.

    Raises:
        ValueError: no paths, or elements of several sizes.
    """
    sizes = {path.element_bytes for path in paths}
    if len(sizes) != 1:
        raise ValueError(f"paths must hold accesses to elements of one size, got sizes {sorted(sizes)}")
    (element_bytes,) = sizes
    width = max(path.width for path in paths)
    tiles = list(dict.fromkeys((path.buffer, path.tile) for path in paths))
    found, seen = [], set()
    cols = min(tile[1] for _, tile in tiles)
    for layout in candidates(cols, width, element_bytes):
        try:
            placed = [layout.on(*tile) for _, tile in tiles]
        except ValueError:  # an atom that doesn't divide one of the tiles
            continue
        if any(bijection_fault(tile) for tile in placed):
            continue
        report = kernel_report(layout, paths)
        if not report.free:
            continue
        key = b"".join(tile_offsets(tile).tobytes() for tile in placed)
        if key in seen:
            continue
        seen.add(key)
        used = sum(tile.cosize for tile in placed) * element_bytes
        elements = sum(rows * cols for _, (rows, cols) in tiles) * element_bytes
        closed = rules_out(placed[0]) if element_bytes == 2 else ()
        mode = canonical_mode(placed[0]) if element_bytes == 2 else None
        cost = report.wavefronts(), report.ideal()
        found.append(Candidate(layout, used, used - elements, *cost, mode, closed))

    def price(candidate: Candidate):
        swizzle = candidate.layout.swizzle
        cost = candidate.bytes, candidate.wavefronts, len(candidate.rules_out)
        return *cost, swizzle.bits, swizzle.base, swizzle.shift

    return sorted(found, key=price)
