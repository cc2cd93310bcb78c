"""The catalog of shared-memory layouts: edit or add one here, then run it by its name.

Whatever ``SmemLayout`` this file defines is in ``CATALOG``; nothing else has to be registered. Try a
new one with ``python -m layouts check NAME``.
"""

from __future__ import annotations

from layouts.smem_layout import COLS, SmemLayout, Swizzle

# Row-major rows, as a C array has them. Rows of 64 or 128 16-bit elements are 128 or 256 bytes, so a
# column of 16-byte vectors falls into one bank.
PLAIN = SmemLayout("PLAIN", (1, COLS), (COLS, 1))

# Eight rows of eight 16-byte vectors; row r holds its vectors at positions (vector xor r).
SWIZZLE_333 = SmemLayout("SWIZZLE_333", (8, 64), (64, 1), Swizzle(3, 3, 3))

# Eight elements (16 bytes) of padding a row: the next row starts one bank further.
PADDED_8 = SmemLayout("PADDED_8", (1, COLS), (COLS + 8, 1))

# The same eight rows with fewer bits: rows that agree in the bits used still collide.
SWIZZLE_233 = SmemLayout("SWIZZLE_233", (8, 64), (64, 1), Swizzle(2, 3, 3))
SWIZZLE_133 = SmemLayout("SWIZZLE_133", (8, 64), (64, 1), Swizzle(1, 3, 3))

# The atoms that TMA and WGMMA know as 64-byte and 32-byte swizzle (SWIZZLE_333 is the 128-byte one).
ATOM_64B = SmemLayout("ATOM_64B", (8, 32), (32, 1), Swizzle(2, 3, 3))
ATOM_32B = SmemLayout("ATOM_32B", (8, 16), (16, 1), Swizzle(1, 3, 3))

# What they know as no swizzle: blocks of eight rows of one vector. A column of vectors is one run of memory, so
# that ldmatrix has no conflicts, but a row is scattered: 16 bytes here, 16 bytes there.
ATOM_16B = SmemLayout("ATOM_16B", (8, 8), (8, 1))

# Swizzles put on row-major rows without an atom. The shift has to follow the length of the row: 3 is
# right for 64 elements, 4 for 128; the other one leaves rows in pairs, and kernels refuse it there.
DIRECT_333 = SmemLayout("DIRECT_333", (1, COLS), (COLS, 1), Swizzle(3, 3, 3))
DIRECT_334 = SmemLayout("DIRECT_334", (1, COLS), (COLS, 1), Swizzle(3, 3, 4))


def _collect(definitions: dict[str, object]) -> dict[str, SmemLayout]:
    """The layouts among ``definitions`` by name; ValueError when two of them share one."""
    layouts = [value for value in definitions.values() if isinstance(value, SmemLayout)]
    by_name = {layout.name: layout for layout in layouts}
    for layout in layouts:
        if by_name[layout.name] != layout:
            raise ValueError(f"layouts/catalog.py defines two layouts named {layout.name!r}")
    return by_name


CATALOG: dict[str, SmemLayout] = _collect(dict(globals()))
