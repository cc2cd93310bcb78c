"""The accesses that kernels make to shared memory: which lane touches which (row, col), in issue order.

A ``Path`` holds the coordinates of a whole group of instructions, for example every ldmatrix by which a
CTA reads K in one iteration. Coordinates come from the definition of the instruction (PTX ISA, sections
on cp.async, ldmatrix and the fragments of mma.m16n8k16) and from the order in which the kernels' tiled
copies walk a tile; a layout turns them into addresses, and ``layouts.banks`` into wavefronts.

The four 8x8 matrices of an ldmatrix.x4 are addressed by lanes 0-7, 8-15, 16-23 and 24-31, a lane a row::

    operand A (Q), transposed B (V)      operand B (K)
          col 0    col 8                       col 0    col 8
    row 0 0-7      16-23                 row 0 0-7      8-15
    row 8 8-15     24-31                 row 8 16-23    24-31
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

WARP_LANES = 32
MATRIX = 8  # rows, and 16-bit columns, of an ldmatrix matrix
MATRIX_ROW_BYTES = 16

# Where the matrices of one instruction lie, in the order of the lanes that address them.
_ROWS_FIRST = ((0, 0), (8, 0), (0, 8), (8, 8))
_COLS_FIRST = ((0, 0), (0, 8), (8, 0), (8, 8))


class AccessKind(Enum):
    """How the hardware serves an access; the phases of the kinds take different numbers of wavefronts."""

    LOAD = "ld"
    STORE = "st"
    LDMATRIX = "ldmatrix"
    ASYNC_COPY = "cp.async"

    @classmethod
    def of(cls, instruction: str) -> AccessKind:
        """The kind of a PTX instruction, or of the start of one such as "ld.shared".

        stmatrix counts as a store, which nothing here measured.

        Raises:
            ValueError: it is no access to shared memory that the model knows.
        """
        kinds = {"ldmatrix": cls.LDMATRIX, "stmatrix": cls.STORE, "cp.async": cls.ASYNC_COPY}
        kinds |= {"ld.shared": cls.LOAD, "st.shared": cls.STORE}
        for prefix, kind in kinds.items():
            if instruction.startswith(prefix):
                return kind
        raise ValueError(f"instruction must start with {', '.join(kinds)}; got {instruction!r}")


@dataclass(frozen=True, eq=False)
class Path:
    """A group of like instructions that some warps issue on one tile of shared memory.

    Args:
        name: what reports call it: "ldmatrix K".
        instruction: the PTX instruction.
        width: bytes that one address stands for (1, 2, 4, 8 or 16).
        rows, cols: int64 arrays (warps, instructions, lanes): the first element that a lane touches;
            instructions in the order in which a warp issues them.
        tile: (rows, cols) of the tile, in elements.
        buffer: the shared memory that holds the tile; paths that name the same one share it.
        element_bytes: bytes of an element.
        per_iteration: True if it happens once for each KV tile, False if once for each CTA.
        active: booleans like ``rows``; lanes that access nothing are False. None: all are active.
    """

    name: str
    instruction: str
    width: int
    rows: np.ndarray
    cols: np.ndarray
    tile: tuple[int, int]
    buffer: str = "array"
    element_bytes: int = 2
    per_iteration: bool = False
    active: np.ndarray | None = None

    @property
    def kind(self) -> AccessKind:
        """How the hardware serves the instruction."""
        return AccessKind.of(self.instruction)

    @property
    def num_instructions(self) -> int:
        """Warp instructions, those of all warps together."""
        return self.rows.shape[0] * self.rows.shape[1]

    def addresses(self, layout) -> np.ndarray:
        """Byte addresses from the start of the tile, shaped like ``rows``.

        Args:
            layout: a layout such as ``SmemLayout``; ``layout.on(*tile)`` must have ``offset(row, col)``.
        """
        return layout.on(*self.tile).offset(self.rows, self.cols) * self.element_bytes


def _walk(tile: tuple[int, int], step: tuple[int, int], rows_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Origins (rows, cols) of the blocks of ``step`` that cover ``tile``; rows vary fastest or slowest."""
    for extent, block, axis in zip(tile, step, ("rows", "columns"), strict=True):
        if extent % block:
            raise ValueError(f"the {axis} of a {tile[0]}x{tile[1]} tile must be a multiple of {block}, got {extent}")
    rows, cols = np.arange(0, tile[0], step[0]), np.arange(0, tile[1], step[1])
    if rows_first:
        cols, rows = np.meshgrid(cols, rows, indexing="ij")
    else:
        rows, cols = np.meshgrid(rows, cols, indexing="ij")
    return rows.reshape(-1), cols.reshape(-1)


def _place(origins, lanes, warp_rows=(0,)) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates (warps, instructions, lanes) of a lane pattern put at each origin, for each warp."""
    warps = np.asarray(warp_rows)[:, None, None]
    (origin_rows, origin_cols), (lane_rows, lane_cols) = origins, lanes
    rows = warps + origin_rows[None, :, None] + lane_rows[None, None, :]
    cols = 0 * warps + origin_cols[None, :, None] + lane_cols[None, None, :]
    return rows, cols


def _num_warps(num_threads: int) -> int:
    if num_threads <= 0 or num_threads % WARP_LANES:
        raise ValueError(f"num_threads must be a positive multiple of {WARP_LANES}, got {num_threads}")
    return num_threads // WARP_LANES


def ldmatrix_lanes(operand: str, num_matrices: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) that the lanes of one ldmatrix address, from the corner of the block it loads.

    Only the first ``8 * num_matrices`` lanes give addresses (PTX ISA, ldmatrix), so only they are here.

    Args:
        operand: "A" (Q: plain), "B" (K: plain) or "Bt" (V: transposed, in V's own (key, column) order).
        num_matrices: 1, 2 or 4.

    Raises:
        ValueError: another operand or number of matrices.
    """
    corners = {"A": _ROWS_FIRST, "B": _COLS_FIRST, "Bt": _ROWS_FIRST}.get(operand)
    if corners is None:
        raise ValueError(f"operand must be 'A', 'B' or 'Bt', got {operand!r}")
    if num_matrices not in (1, 2, 4):
        raise ValueError(f"num_matrices must be 1, 2 or 4, got {num_matrices!r}")
    corner = np.array(corners[:num_matrices])
    rows = (corner[:, :1] + np.arange(MATRIX)).reshape(-1)
    return rows, np.repeat(corner[:, 1], MATRIX)


def ldmatrix(
    name: str,
    operand: str,
    tile: tuple[int, int],
    num_threads: int = WARP_LANES,
    num_matrices: int = 4,
    buffer: str = "array",
    per_iteration: bool = True,
) -> Path:
    """All ldmatrix by which a CTA reads one operand from a tile of 16-bit elements.

    The warps share operand A (each reads its own 16 rows of every ``16 * warps``); each reads the whole
    of operand B. The product's k dimension (columns of Q and K, rows of V) is the outer loop.

    Raises:
        ValueError: the tile is not whole blocks, or an argument that ``ldmatrix_lanes`` refuses.
    """
    warps = _num_warps(num_threads)
    lanes = ldmatrix_lanes(operand, num_matrices)
    block = tuple(int(axis.max()) // MATRIX * MATRIX + MATRIX for axis in lanes)
    if operand == "A":
        origins, warp_rows = _walk(tile, (block[0] * warps, block[1]), True), block[0] * np.arange(warps)
    else:
        origins, warp_rows = _walk(tile, block, operand == "B"), np.zeros(warps, np.int64)
    rows, cols = _place(origins, lanes, warp_rows)
    trans = ".trans" if operand == "Bt" else ""
    instruction = f"ldmatrix.sync.aligned.m8n8.x{num_matrices}{trans}.shared.b16"
    return Path(name, instruction, MATRIX_ROW_BYTES, rows, cols, tile, buffer, per_iteration=per_iteration)


def tile_copy(
    name: str,
    instruction: str,
    tile: tuple[int, int],
    num_threads: int,
    element_bytes: int = 2,
    buffer: str = "array",
    per_iteration: bool = False,
) -> Path:
    """A tile moved in 16-byte vectors by all threads of a CTA, as the kernels' tiled copies do.

    Consecutive threads take consecutive vectors, at most 128 bytes along a row, then the next row.

    Raises:
        ValueError: the threads don't divide the tile.
    """
    warps = _num_warps(num_threads)
    vector = 16 // element_bytes
    threads_per_row = min(tile[1], 128 // element_bytes) // vector
    if not threads_per_row or num_threads % threads_per_row:
        raise ValueError(
            f"{num_threads} threads can't share rows of {tile[1]} {element_bytes}-byte elements: "
            f"{threads_per_row} 16-byte vectors a row"
        )
    thread = np.arange(num_threads)
    thread_rows, thread_cols = thread // threads_per_row, thread % threads_per_row * vector
    origin_rows, origin_cols = _walk(tile, (num_threads // threads_per_row, threads_per_row * vector), True)
    by_warp = (warps, 1, WARP_LANES)
    rows = thread_rows.reshape(by_warp) + origin_rows[None, :, None]
    cols = thread_cols.reshape(by_warp) + origin_cols[None, :, None]
    return Path(name, instruction, 16, rows, cols, tile, buffer, element_bytes, per_iteration)


def accumulator_lanes() -> tuple[np.ndarray, np.ndarray]:
    """(rows, cols) of the first of the two neighbouring elements that each lane holds in an accumulator.

    In the C fragment of mma.m16n8k16 lane l holds columns 2 * (l % 4) and the next one of row l // 4, and
    of the row eight below (PTX ISA, matrix fragments for mma.m16n8k16).
    """
    lane = np.arange(WARP_LANES)
    return lane // 4, lane % 4 * 2


def accumulator_store(
    name: str, tile: tuple[int, int], num_threads: int, element_bytes: int = 2, buffer: str = "array"
) -> Path:
    """The accumulator of a CTA, rounded to ``element_bytes``, stored two elements at a time.

    Warps own 16 rows each. A warp stores both row halves, then the next eight columns, 16x16 block by
    16x16 block, blocks down before blocks across.

    Raises:
        ValueError: the tile is not whole 16x16 blocks for each warp.
    """
    warps = _num_warps(num_threads)
    block_rows, block_cols = _walk(tile, (16 * warps, 16), True)
    part_rows, part_cols = _walk((16, 16), (8, 8), True)
    origins = (
        (block_rows[:, None] + part_rows).reshape(-1),
        (block_cols[:, None] + part_cols).reshape(-1),
    )
    rows, cols = _place(origins, accumulator_lanes(), 16 * np.arange(warps))
    width = 2 * element_bytes
    return Path(name, _shared("st", width), width, rows, cols, tile, buffer, element_bytes)


def _shared(direction: str, width: int) -> str:
    """PTX of a shared-memory access of ``width`` bytes by a lane; ``direction`` is "ld" or "st"."""
    vector = {8: ".v2", 16: ".v4"}.get(width, "")
    return f"{direction}.shared{vector}.b{min(width, 4) * 8}"


def _vector(tile: tuple[int, int], width: int, element_bytes: int) -> int:
    if width % element_bytes:
        raise ValueError(f"width must be a multiple of the {element_bytes}-byte element, got {width}")
    vector = width // element_bytes
    if tile[1] % vector:
        raise ValueError(f"a row of {tile[1]} elements is not whole vectors of {vector}")
    return vector


def by_row(direction: str, width: int, tile: tuple[int, int], element_bytes: int) -> Path:
    """One warp walks a tile along its rows: consecutive lanes touch consecutive vectors.

    Args:
        direction: "ld" or "st".
        width: bytes a lane.

    Raises:
        ValueError: the width is not whole elements, or a row not whole vectors.
    """
    vector = _vector(tile, width, element_bytes)
    num_vectors = tile[0] * tile[1] // vector
    index = np.arange(-(-num_vectors // WARP_LANES) * WARP_LANES).reshape(1, -1, WARP_LANES)
    active = index < num_vectors
    index = np.where(active, index, 0) * vector
    instruction = _shared(direction, width)
    return Path(
        f"{instruction} by row",
        instruction,
        width,
        index // tile[1],
        index % tile[1],
        tile,
        element_bytes=element_bytes,
        active=None if active.all() else active,
    )


def by_column(direction: str, width: int, tile: tuple[int, int], element_bytes: int) -> Path:
    """One warp walks a tile down its columns: lane l touches row l, 32 rows an instruction.

    Arguments and errors as ``by_row``.
    """
    vector = _vector(tile, width, element_bytes)
    lanes = (np.arange(WARP_LANES), np.zeros(WARP_LANES, np.int64))
    whole = (-(-tile[0] // WARP_LANES) * WARP_LANES, tile[1])
    rows, cols = _place(_walk(whole, (WARP_LANES, vector), True), lanes)
    active = rows < tile[0]
    instruction = _shared(direction, width)
    return Path(
        f"{instruction} by column",
        instruction,
        width,
        np.where(active, rows, 0),
        cols,
        tile,
        element_bytes=element_bytes,
        active=None if active.all() else active,
    )


def broadcast(width: int, tile: tuple[int, int], element_bytes: int) -> Path:
    """One warp reads the first vector of each row: all lanes the same one. Args as ``by_row``."""
    _vector(tile, width, element_bytes)
    rows = np.repeat(np.arange(tile[0])[None, :, None], WARP_LANES, axis=2)
    instruction = _shared("ld", width)
    return Path(f"{instruction} broadcast", instruction, width, rows, 0 * rows, tile, element_bytes=element_bytes)


def array_paths(tile: tuple[int, int], element_bytes: int) -> list[Path]:
    """A warp's accesses, an element a lane, to an array: by row, by column, and one element for all."""
    return [
        by_row("ld", element_bytes, tile, element_bytes),
        by_column("ld", element_bytes, tile, element_bytes),
        broadcast(element_bytes, tile, element_bytes),
    ]


def kernel_paths(head_dim: int, tile_m: int, tile_n: int, num_threads: int = 128) -> list[Path]:
    """Every path by which a CTA of ``cute_fa.kernels.sm80_serial`` touches shared memory.

    Q and O are tile_m x head_dim, K and V tile_n x head_dim, of 16-bit elements; O takes the place of Q.
    Q is copied and read by ldmatrix once for each CTA, since its fragments stay in registers, and so is
    all that happens to O; K and V once for each KV tile.

    Raises:
        ValueError: the threads don't divide a tile.
    """
    tile_q, tile_kv = (tile_m, head_dim), (tile_n, head_dim)
    cp_async = "cp.async.cg.shared.global"
    return [
        tile_copy("cp.async Q", cp_async, tile_q, num_threads, buffer="Q"),
        tile_copy("cp.async K", cp_async, tile_kv, num_threads, buffer="K", per_iteration=True),
        tile_copy("cp.async V", cp_async, tile_kv, num_threads, buffer="V", per_iteration=True),
        ldmatrix("ldmatrix Q", "A", tile_q, num_threads, buffer="Q", per_iteration=False),
        ldmatrix("ldmatrix K", "B", tile_kv, num_threads, buffer="K"),
        ldmatrix("ldmatrix.trans V", "Bt", tile_kv, num_threads, buffer="V"),
        accumulator_store("st.shared O", tile_q, num_threads, buffer="Q"),
        tile_copy("ld.shared O", _shared("ld", 16), tile_q, num_threads, buffer="Q"),
    ]
