"""Shared-memory layouts as values: a swizzle, and an atom that tiles a shared-memory tile.

Everything is counted in elements. A layout maps the coordinate (row, col) of a tile to an offset:

    offset(row, col) = swizzle(inner(row, col))

where ``inner`` repeats the atom over the tile, down the rows first, then across the columns (the order
of ``cute.tile_to_shape(atom, tile, (0, 1))``). With an atom (8,64):(64,1) a 64x128 tile looks like

              col 0..63   col 64..127
    row 0..7    atom 0      atom 8
    row 8..15   atom 1      atom 9
       ...        ...         ...
    row 56..63  atom 7      atom 15        each atom is 8 * 64 = 512 consecutive elements

This module needs nothing but Python: ``offset`` takes integers and NumPy arrays alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Swizzle:
    """CuTe's ``Swizzle<bits, base, shift>``: XOR ``bits`` bits of an index with those ``shift`` above.

    For a positive shift::

        0bxxxxYYYxxxxZZZxxx      base  = how many low bits keep their place (one vector)
             ^^^    ^^^          bits  = how wide YYY and ZZZ are
             +-shift-+           result: ZZZ becomes ZZZ xor YYY, all else stays

    A negative shift exchanges the roles of YYY and ZZZ. ``bits=0`` is the identity. The index is in
    elements: (3, 3, 3) over 16-bit elements is what descriptors call (3, 4, 3) over bytes.

    Raises:
        ValueError: a negative ``bits`` or ``base``, ``abs(shift) < bits`` (the two fields overlap), or fields
            that reach past the 31 bits of an offset.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self):
        for name in ("bits", "base", "shift"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"Swizzle {name} must be an int, got {value!r}")
        if self.bits < 0 or self.base < 0:
            raise ValueError(f"Swizzle bits and base must be 0 or more, got bits={self.bits}, base={self.base}")
        if abs(self.shift) < self.bits:
            raise ValueError(
                f"Swizzle shift must be at least bits in size (the two bit fields may not overlap), "
                f"got bits={self.bits}, shift={self.shift}"
            )
        if self.bits + self.base + abs(self.shift) > 31:
            raise ValueError(
                f"Swizzle bits + base + |shift| must be at most 31, got bits={self.bits}, base={self.base}, "
                f"shift={self.shift}"
            )

    def __call__(self, index):
        """The swizzled index; ``index`` is an int or an integer array."""
        field = (1 << self.bits) - 1
        if self.shift >= 0:
            return index ^ ((index >> self.shift) & (field << self.base))
        return index ^ ((index & (field << self.base)) << -self.shift)

    @property
    def period(self) -> int:
        """Indices that differ by a multiple of this are swizzled alike (in elements)."""
        return 1 << (self.bits + self.base + abs(self.shift)) if self.bits else 1

    def __str__(self):
        return f"S<{self.bits},{self.base},{self.shift}>"


IDENTITY = Swizzle(0, 3, 3)


@dataclass(frozen=True)
class TileCols:
    """The number of columns of the tile that a layout is put on, plus a constant: ``COLS``, ``COLS + 8``."""

    plus: int = 0

    def __add__(self, plus: int) -> TileCols:
        return TileCols(self.plus + plus)

    def __sub__(self, minus: int) -> TileCols:
        return TileCols(self.plus - minus)

    def __str__(self):
        return "D" + (f"{self.plus:+d}" if self.plus else "")


COLS = TileCols()
_LARGEST = 2**31  # of an extent, a stride or what is added to COLS


@dataclass(frozen=True)
class SmemLayout:
    """A shared-memory layout: ``swizzle o shape:stride``, the atom repeated over a tile, rows first.

    Args:
        name: what tables and errors call it.
        shape: (rows, cols) of the atom; an extent may be ``COLS``, the tile's own width.
        stride: (row, col) strides of the atom in elements; may be ``COLS`` plus a constant.
        swizzle: applied to the offset within the tile.

    Examples::

        SmemLayout("plain", (1, COLS), (COLS, 1))                       # row-major rows
        SmemLayout("padded", (1, COLS), (COLS + 8, 1))                  # eight elements of padding a row
        SmemLayout("swizzled", (8, 64), (64, 1), Swizzle(3, 3, 3))      # Swizzle<3,3,3> o (8,64):(64,1)

    Raises:
        ValueError: a name that is no str, or an extent or stride that is not a positive int or ``COLS`` plus a
            constant, or that is above 2**31.
    """

    name: str
    shape: tuple[int | TileCols, int | TileCols]
    stride: tuple[int | TileCols, int | TileCols]
    swizzle: Swizzle = IDENTITY

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise ValueError(f"a layout's name must be a str, got {self.name!r}")
        for what in ("shape", "stride"):
            modes = getattr(self, what)
            if not isinstance(modes, tuple) or len(modes) != 2:
                raise ValueError(f"layout {self.name!r}: {what} must be a pair (rows, cols), got {modes!r}")
            for mode in modes:
                is_int = isinstance(mode, int) and not isinstance(mode, bool)
                if not (isinstance(mode, TileCols) or (is_int and mode > 0)):
                    raise ValueError(
                        f"layout {self.name!r}: {what} must hold positive ints or COLS plus a constant, got {mode!r}"
                    )
                if abs(mode.plus if isinstance(mode, TileCols) else mode) > _LARGEST:
                    raise ValueError(
                        f"layout {self.name!r}: {what} must hold at most 2**31 ({_LARGEST}) in size, got {mode}"
                    )
        if not isinstance(self.swizzle, Swizzle):
            raise ValueError(f"layout {self.name!r}: swizzle must be a Swizzle, got {self.swizzle!r}")

    def __str__(self):
        (rows, cols), (row_stride, col_stride) = self.shape, self.stride
        return f"{self.swizzle} o ({rows},{cols}):({row_stride},{col_stride})"

    def on(self, rows: int, cols: int) -> TileLayout:
        """This layout over a tile of ``rows`` x ``cols`` elements.

        Raises:
            ValueError: the atom doesn't divide the tile, or an extent or stride isn't positive at its width.
        """

        def resolve(mode):
            return cols + mode.plus if isinstance(mode, TileCols) else mode

        atom_shape = tuple(resolve(mode) for mode in self.shape)
        atom_stride = tuple(resolve(mode) for mode in self.stride)
        for what, modes, values in (("shape", self.shape, atom_shape), ("stride", self.stride, atom_stride)):
            for mode, value in zip(modes, values, strict=True):
                if value <= 0:
                    raise ValueError(
                        f"layout {self.name!r} ({self}): {what} must be positive, but {mode} is {value} on a tile of "
                        f"{cols} columns"
                    )
        for extent, atom_extent, axis in zip((rows, cols), atom_shape, ("rows", "columns"), strict=True):
            if extent % atom_extent:
                raise ValueError(
                    f"layout {self.name!r} ({self}): its atom of {atom_shape[0]}x{atom_shape[1]} does not divide "
                    f"the {rows}x{cols} tile ({axis}: {extent} is not a multiple of {atom_extent})"
                )
        return TileLayout(self, (rows, cols), atom_shape, atom_stride)


@dataclass(frozen=True)
class TileLayout:
    """A ``SmemLayout`` over one tile, all extents known. Made by ``SmemLayout.on``."""

    layout: SmemLayout
    tile: tuple[int, int]
    atom_shape: tuple[int, int]
    atom_stride: tuple[int, int]

    @property
    def atom_footprint(self) -> int:
        """Distance between the starts of two atoms, padding included (elements)."""
        modes = list(zip(self.atom_shape, self.atom_stride, strict=True))
        last = sum((extent - 1) * stride for extent, stride in modes)
        return max(last + 1, *(extent * stride for extent, stride in modes))

    @property
    def atoms(self) -> tuple[int, int]:
        """How many atoms stand down the rows and across the columns."""
        return self.tile[0] // self.atom_shape[0], self.tile[1] // self.atom_shape[1]

    @property
    def shape(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """((rows in an atom, atoms down), (cols in an atom, atoms across)), as CuTe nests it."""
        return (self.atom_shape[0], self.atoms[0]), (self.atom_shape[1], self.atoms[1])

    @property
    def stride(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Strides that go with ``shape``: atoms follow each other down the rows, then across."""
        down = self.atom_footprint
        return (self.atom_stride[0], down), (self.atom_stride[1], down * self.atoms[0])

    def offset(self, row, col):
        """Offset of (row, col) from the tile's start, in elements; ints or integer arrays."""
        (row_extent, _), (col_extent, _) = self.shape
        (row_stride, row_step), (col_stride, col_step) = self.stride
        inner = (
            row % row_extent * row_stride
            + row // row_extent * row_step
            + col % col_extent * col_stride
            + col // col_extent * col_step
        )
        return self.layout.swizzle(inner)

    @property
    def cosize(self) -> int:
        """Elements of shared memory that the tile takes, padding included.

        The swizzle permutes whole blocks of ``swizzle.period``, so the size is rounded up to one.
        """
        elements = self.atom_footprint * self.atoms[0] * self.atoms[1]
        period = self.layout.swizzle.period
        return -(-elements // period) * period
