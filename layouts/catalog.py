"""The catalog of shared-memory layouts: edit or add one here, then run it by its name."""

from __future__ import annotations

from layouts.smem_layout import COLS, SmemLayout, Swizzle

# Row-major rows, as a C array has them. Rows of 64 or 128 16-bit elements are 128 or 256 bytes, so a
# column of 16-byte vectors falls into one bank.
PLAIN = SmemLayout("PLAIN", (1, COLS), (COLS, 1))

# Eight rows of eight 16-byte vectors; row r holds its vectors at positions (vector xor r).
SWIZZLE_333 = SmemLayout("SWIZZLE_333", (8, 64), (64, 1), Swizzle(3, 3, 3))

# Eight elements (16 bytes) of padding a row: the next row starts one bank further.
PADDED_8 = SmemLayout("PADDED_8", (1, COLS), (COLS + 8, 1))

CATALOG: dict[str, SmemLayout] = {layout.name: layout for layout in (PLAIN, SWIZZLE_333, PADDED_8)}
