"""Mappings that are written as a formula, not as a swizzle over shape and stride.

They are for study: the model, the pictures and ``python -m layouts`` take them; a kernel does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class FormulaLayout:
    """A row-major array in which a formula moves the columns of each row.

    Args:
        name: what tables call it.
        formula: the mapping in words or symbols.
        column: ``column(row, col)``: the column in which element (row, col) is stored; takes integer arrays.
    """

    name: str
    formula: str
    column: Callable

    def __str__(self):
        return self.formula

    def on(self, rows: int, cols: int) -> FormulaTile:
        """This mapping over an array of rows x cols elements."""
        return FormulaTile(self, (rows, cols))


@dataclass(frozen=True)
class FormulaTile:
    """A ``FormulaLayout`` over one array."""

    layout: FormulaLayout
    tile: tuple[int, int]

    def offset(self, row, col):
        """Offset of (row, col) from the array's start, in elements; ints or integer arrays."""
        return row * self.tile[1] + self.layout.column(row, col)

    @property
    def cosize(self) -> int:
        """Elements of shared memory that the array takes."""
        return self.tile[0] * self.tile[1]
