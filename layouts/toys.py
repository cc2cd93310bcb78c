"""Layouts and mappings for study: those of the literature, and arrays that no kernel here uses.

``TOYS`` holds an array for each name: a layout, its extents and the size of its elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from layouts.formula import FormulaLayout
from layouts.smem_layout import COLS, SmemLayout


@dataclass(frozen=True)
class Toy:
    """A layout together with the array that it is shown on: (rows, cols) of ``element_bytes`` each.

    ``num_banks`` is the number of 4-byte banks of the machine that it is meant for.
    """

    layout: SmemLayout | FormulaLayout
    tile: tuple[int, int]
    element_bytes: int
    num_banks: int = 32

    @property
    def name(self) -> str:
        """The layout's name."""
        return self.layout.name


def text_column(row, col):
    """get_swizzled_col of the FlashAttention-2 course, chapter 4: vector index xor (row mod 8).

    Vectors are 8 elements of 16 bits. Over rows of 64 it equals Swizzle<3,3,3>, over rows of 128
    Swizzle<3,3,4>: the shift follows the row's length.
    """
    return ((row % 8) ^ (col // 8)) * 8 + col % 8


def rotated_column(row, col):
    """Vector v of row r goes to (v + r) mod 8, within the 64 elements (8 vectors of 8) it lies in."""
    return col // 64 * 64 + (col // 8 + row) % 8 * 8 + col % 8


_TOYS = (
    # The course's formula on a tile of K at head_dim 128.
    Toy(FormulaLayout("TEXT", "col -> ((row % 8) xor (col / 8)) * 8 + col % 8", text_column), (64, 128), 2),
    # Four rows of four 4-byte elements on a machine of four banks: enough to see the principle.
    Toy(FormulaLayout("XOR_4X4", "col -> row xor col", lambda row, col: row ^ col), (4, 4), 4, num_banks=4),
    # A Latin square that isn't XOR: each row's vectors are those above, rotated by one.
    Toy(FormulaLayout("ROTATE", "vector -> (vector + row) mod 8, in rows of 8 vectors", rotated_column), (64, 64), 2),
    # A float array whose columns each lie in one bank, and the same with one float of padding a row.
    Toy(SmemLayout("FLOAT_32X32", (1, COLS), (COLS, 1)), (32, 32), 4),
    Toy(SmemLayout("FLOAT_32X33", (1, COLS), (COLS + 1, 1)), (32, 32), 4),
)

TOYS: dict[str, Toy] = {toy.name: toy for toy in _TOYS}
