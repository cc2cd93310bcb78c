"""Pictures of layouts, phases and bank conflicts. Needs matplotlib (extra ``plots``).

``gallery`` makes the pictures of docs/banks.md; ``layout_and_path`` the one of ``python -m layouts draw``.
In every picture of memory a line is 128 bytes, so a column is a bank.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path as FilePath

import numpy as np

try:
    import matplotlib
except ImportError as error:
    raise ValueError("drawing needs matplotlib: pip install 'cute_fa[plots]'") from error
matplotlib.use("Agg")
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from layouts.access import MATRIX, AccessKind, Path, accumulator_store, by_column, by_row, kernel_paths, ldmatrix_lanes
from layouts.banks import BANK_BYTES, NUM_BANKS, PHASE_BYTES, BankReport, bank_map, report
from layouts.catalog import PADDED_8, PLAIN, SWIZZLE_333
from layouts.checks import tile_offsets
from layouts.toys import TOYS

# Eight colours that stay apart in print and for most colour-blind readers, one a 16-byte bank.
BANK_COLOURS = ("#f4b6b0", "#f8d6a3", "#f3efa6", "#c7e5a8", "#a9dfd2", "#a9cdf0", "#c7bdec", "#edbde0")
FREE, CLASH, QUIET, INK = "#2f8f4e", "#c62f2f", "#eef0f2", "#22262b"


def save(figure: Figure, file) -> None:
    """Writes a figure as .svg or .png.

    Raises:
        ValueError: another suffix.
    """
    suffix = FilePath(file).suffix
    if suffix not in (".svg", ".png"):
        raise ValueError(f"a picture must be a .svg or .png file, got {str(file)!r}")
    options = {"bbox_inches": "tight", "facecolor": "white"}
    if suffix == ".svg":
        figure.savefig(file, metadata={"Date": None}, **options)
        return
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, **options)
    # A palette of 128 colours is a quarter of the size and looks the same.
    Image.open(drawn).convert("RGB").quantize(128).save(file, optimize=True)


def _figure(width: float, height: float, columns: int = 1, rows: int = 1, **grid) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, gridspec_kw=grid)


def _grid_axes(axes: Axes, rows: int, cols: float, title: str = "", colour: str = INK) -> None:
    """A blank board of unit cells, row 0 at the top."""
    axes.set_xlim(0, cols)
    axes.set_ylim(rows, 0)
    axes.set_aspect("equal")
    axes.tick_params(length=0, labelsize=8, pad=2)
    axes.xaxis.tick_top()
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title, fontsize=11, color=colour, pad=10, fontweight="bold")


def _cell(axes: Axes, x, y, colour, text="", width=1.0, height=1.0, ink=INK, size=8.0, edge="white", bold=False):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=1.0))
    if text != "":
        weight = "bold" if bold else "normal"
        axes.text(
            x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=ink, fontweight=weight
        )


def _bank_colour(bank: int, num_banks: int) -> str:
    return BANK_COLOURS[bank * len(BANK_COLOURS) // num_banks]


def memory_of_phase(axes: Axes, found: BankReport, phase: tuple[int, int, int], what: str) -> None:
    """Draws the 128-byte lines that one phase touches, each lane in its bank, titled ``what: n wavefronts``.

    Lanes alone in their bank are green, those that wait for each other red. The row under the memory
    counts the words that each bank has to give, one a wavefront. A phase of cp.async is green if it stays
    in one line, red if it doesn't, and has no such row.

    Args:
        phase: (warp, instruction, phase) as in ``BankReport.phase_wavefronts``.
    """
    warp, instruction, _ = phase
    width = max(found.path.width, 4)
    num_banks = PHASE_BYTES // width
    span = found.lanes(phase)
    addresses = found.addresses[warp, instruction, span]
    present = np.ones(len(addresses), bool) if found.path.active is None else found.path.active[warp, instruction, span]
    addresses, lane_numbers = addresses[present], np.arange(span.start, span.stop)[present]
    units = addresses // width
    lines = np.unique(units // num_banks)
    ways = int(found.phase_wavefronts[phase])
    title = f"{what}: {ways} wavefront{'s' if ways > 1 else ''}"
    _grid_axes(axes, len(lines) + 1.6, num_banks, title, CLASH if ways > 1 else FREE)
    axes.set_xticks(np.arange(num_banks) + 0.5, range(num_banks))
    axes.set_yticks(np.arange(len(lines)) + 0.5, [f"byte {line * PHASE_BYTES}" for line in lines])
    for y in range(len(lines)):
        for bank in range(num_banks):
            _cell(axes, bank, y, QUIET)
    size = 8.5 if num_banks <= 16 else 6.5
    by_line = found.path.kind is AccessKind.ASYNC_COPY
    demand = {bank: len(np.unique(units[units % num_banks == bank])) for bank in range(num_banks)}
    for unit in np.unique(units):
        bank, y = int(unit % num_banks), int(np.searchsorted(lines, unit // num_banks))
        who = lane_numbers[units == unit]
        text = ",".join(map(str, who)) if len(who) <= 2 else f"{who[0]}.."
        waits = ways > 1 if by_line else demand[bank] > 1
        _cell(axes, bank, y, CLASH if waits else FREE, text, ink="white", size=size, bold=True)
    axes.text(-0.15, -0.2, f"{width}-byte bank", ha="right", va="center", fontsize=8, color=INK)
    if by_line:
        return
    for bank, words in demand.items():
        colour = "white" if not words else FREE if words == 1 else CLASH
        ink = "#b0b4ba" if not words else "white"
        _cell(axes, bank, len(lines) + 0.4, colour, words, ink=ink, size=size, bold=words > 1, edge="#b0b4ba")
    axes.text(-0.15, len(lines) + 0.9, "to serve", ha="right", va="center", fontsize=8, color=INK)


def bank_grid(axes: Axes, banks: np.ndarray, num_banks: int, title: str, col_step: int = 1) -> None:
    """Draws the bank of each vector of a tile at its logical place; ``banks`` (rows, vectors)."""
    rows, cols = banks.shape
    _grid_axes(axes, rows, cols, title)
    axes.set_xticks(np.arange(cols) + 0.5, [col * col_step for col in range(cols)])
    axes.set_yticks(np.arange(rows) + 0.5, [f"row {row}" for row in range(rows)])
    size = 9 if cols <= 8 else 8 if cols <= 16 else 5.5
    for row in range(rows):
        for col in range(cols):
            bank = int(banks[row, col])
            _cell(axes, col, row, _bank_colour(bank, num_banks), bank, size=size)


def layout_and_path(
    layout, tile: tuple[int, int], element_bytes: int, found: BankReport, num_banks: int = NUM_BANKS
) -> Figure:
    """The banks of a layout, and the worst phase of a path in memory.

    Args:
        layout: anything with ``on(rows, cols)``.
        tile: (rows, cols) to show; at most 16 rows and 128 columns of it are drawn.
        found: the path's report under the layout.
        num_banks: 4-byte banks of the machine that the layout is meant for.
    """
    width = 16 if element_bytes == 2 else max(4, element_bytes)
    vector = width // element_bytes
    num_banks = num_banks * BANK_BYTES // width
    banks = bank_map(layout.on(*tile), element_bytes, width)[:16, : 128 // vector] % num_banks
    worst = tuple(np.argwhere(found.phase_wavefronts == found.phase_wavefronts.max())[0].tolist())
    figure, axes = _figure(14, 6, 2)
    unit = f"{width}-byte bank of each {f'{width}-byte vector' if vector > 1 else 'element'}"
    bank_grid(axes[0, 0], banks, num_banks, f"{unit}, by row and column", vector)
    lanes = found.lanes(worst)
    memory_of_phase(axes[0, 1], found, worst, f"{found.path.name}, lanes {lanes.start} to {lanes.stop - 1}")
    name = layout.name if layout.name == str(layout) else f"{layout.name}   {layout}"
    figure.suptitle(name, fontsize=13, fontweight="bold")
    return figure


# The instruction of K's ldmatrix and of O's store that starts at row 0, column 16 of a 64x64 tile.
_COLUMN_16 = 4


def _path(name: str) -> Path:
    return next(path for path in kernel_paths(64, 64, 64) if path.name == name)


def phases_of_16_bytes() -> Figure:
    """The four phases of a warp's 16-byte access, each with the eight banks to itself."""
    figure, axes = _figure(11, 5.2)
    board = axes[0, 0]
    _grid_axes(board, 8.2, 8, "A warp's 16-byte access: four phases, one after the other, eight lanes each")
    board.set_xticks([])
    board.set_yticks([])
    for bank in range(8):
        _cell(board, bank, 0.9, BANK_COLOURS[bank], f"bank {bank}", height=0.8, bold=True, size=9)
        board.text(
            bank + 0.5, 0.62, f"{4 * bank} to {4 * bank + 3}", ha="center", va="center", fontsize=7.5, color="#666c75"
        )
    board.text(-0.15, 0.62, "4-byte banks", ha="right", va="center", fontsize=8, color="#666c75")
    board.text(-0.15, 1.3, "16-byte banks", ha="right", va="center", fontsize=9)
    for phase in range(4):
        y = 2.1 + 1.5 * phase
        board.text(-0.15, y + 0.5, f"phase {phase}", ha="right", va="center", fontsize=10, fontweight="bold")
        for bank in range(8):
            _cell(board, bank, y, FREE, f"lane {8 * phase + bank}", ink="white", size=9)
        board.text(8.15, y + 0.5, "1 wavefront", ha="left", va="center", fontsize=9, color=FREE)
    board.set_xlim(-1.5, 9.6)
    return figure


def what_conflicts() -> Figure:
    """Three 16-byte accesses that differ in one lane: a conflict, none across phases, a broadcast."""
    figure, axes = _figure(10.5, 4.8, 2, 2)
    whole = by_row("ld", 16, (4, 64), 2)
    rows, cols = whole.rows[:, :1].copy(), whole.cols[:, :1].copy()

    def with_lane_5(row: int, vector: int) -> BankReport:
        changed_rows, changed_cols = rows.copy(), cols.copy()
        changed_rows[0, 0, 5], changed_cols[0, 0, 5] = row, 8 * vector
        return report(PLAIN, Path("", whole.instruction, 16, changed_rows, changed_cols, whole.tile))

    row_by_row = with_lane_5(0, 5)
    memory_of_phase(axes[0, 0], row_by_row, (0, 0, 0), "a row, phase 0")
    memory_of_phase(axes[0, 1], row_by_row, (0, 0, 1), "the next row, phase 1")
    memory_of_phase(axes[1, 0], with_lane_5(1, 2), (0, 0, 0), "lane 5 in lane 2's bank, another line")
    memory_of_phase(axes[1, 1], with_lane_5(0, 2), (0, 0, 0), "lane 5 on lane 2's own vector")
    figure.suptitle("Banks are shared only within a phase, and only different words make each other wait", fontsize=12)
    return figure


def conflict_and_cures() -> Figure:
    """One phase of ldmatrix down a column of vectors: row-major, padded and swizzled."""
    figure, axes = _figure(14, 5.2, 3)
    cures = ((PLAIN, "row-major"), (PADDED_8, "16 bytes of padding a row"), (SWIZZLE_333, "swizzled"))
    for board, (layout, what) in zip(axes[0], cures, strict=True):
        memory_of_phase(board, report(layout, _path("ldmatrix K")), (0, _COLUMN_16, 0), what)
        board.set_xlabel(layout.name, fontsize=10)
    figure.suptitle(
        "Eight lanes read eight rows at column 16: where their 16-byte vectors lie (numbers are lanes)", fontsize=12
    )
    return figure


def swizzle_4x4() -> Figure:
    """The 4x4 toy: where each element of an array is stored, and what reading a column meets."""
    toy = TOYS["XOR_4X4"]
    figure, axes = _figure(9, 5.4, 2)
    boards = (
        (PLAIN, "arr[row][col]", "column 2 sits in one bank", CLASH),
        (toy.layout, "arr[row][row ^ col]", "column 2 meets every bank", FREE),
    )
    for board, (layout, title, meaning, strong) in zip(axes[0], boards, strict=True):
        _grid_axes(board, 4, 4, title, strong)
        board.set_xticks(np.arange(4) + 0.5, [f"bank {bank}" for bank in range(4)])
        board.set_yticks(np.arange(4) + 0.5, [f"row {row}" for row in range(4)])
        board.set_xlabel(meaning, fontsize=10, color=strong)
        offsets = tile_offsets(layout.on(*toy.tile))
        for (row, col), offset in np.ndenumerate(offsets):
            y, x = divmod(int(offset), 4)
            if col == 2:
                _cell(board, x, y, strong, f"{row},{col}", ink="white", size=11, bold=True)
            else:
                _cell(board, x, y, BANK_COLOURS[2 * col], f"{row},{col}", size=11)
    figure.suptitle("Each cell shows the element row,col that is stored there", fontsize=10)
    return figure


def swizzle_8x8() -> Figure:
    """The banks of an 8x8 block of vectors: plain, XOR, and a rotation, which does as well."""
    figure, axes = _figure(13, 5, 3)
    for board, layout, title in zip(
        axes[0],
        (PLAIN, SWIZZLE_333, TOYS["ROTATE"].layout),
        ("bank = vector", "bank = vector xor row", "bank = (vector + row) mod 8"),
        strict=True,
    ):
        banks = bank_map(layout.on(8, 64), 2)
        free = len(np.unique(banks[:, 0])) == 8
        bank_grid(board, banks, 8, title)
        board.title.set_color(FREE if free else CLASH)
        board.set_xlabel(
            "every column holds every bank once" if free else "every column holds one bank, eight times",
            fontsize=10,
            color=FREE if free else CLASH,
        )
        board.add_patch(Rectangle((2, 0), 1, 8, fill=False, edgecolor=FREE if free else CLASH, linewidth=3))
    figure.suptitle("The 16-byte bank of each vector (rows of eight vectors; a column is what ldmatrix reads)")
    return figure


def ldmatrix_lane_map() -> Figure:
    """Which lane gives the address of which row in an ldmatrix.x4, for Q, K and V."""
    figure, axes = _figure(13, 5.6, 3)
    operands = (("A", "Q: operand A"), ("B", "K: operand B"), ("Bt", "V: operand B, transposed"))
    for board, (operand, title) in zip(axes[0], operands, strict=True):
        rows, cols = ldmatrix_lanes(operand)
        for phase in range(4):
            first = phase * MATRIX
            lanes = [(f"lane {first + lane}", 0, lane, MATRIX) for lane in range(MATRIX)]
            _quadrant(board, int(rows[first]), int(cols[first]), f"phase {phase}", lanes, BANK_COLOURS[2 * phase])
        _quadrant_axes(board, title, [4, 13], ["columns 0 to 7", "columns 8 to 15"])
    figure.suptitle("ldmatrix.x4: each lane points at one row of 16 bytes; eight lanes, one matrix, are a phase")
    return figure


def accumulator_lane_map() -> Figure:
    """Which lane holds which pair of an accumulator, and the four stores of a 16x16 block of O."""
    figure, axes = _figure(8.5, 6.6)
    path = accumulator_store("", (16, 16), 32)
    for store, (rows, cols) in enumerate(zip(path.rows[0], path.cols[0], strict=True)):
        lanes = [
            (f"lane {lane}", int(col - cols[0]), int(row - rows[0]), 2)
            for lane, (row, col) in enumerate(zip(rows, cols, strict=True))
        ]
        _quadrant(axes[0, 0], int(rows[0]), int(cols[0]), f"store {store}", lanes, BANK_COLOURS[2 * store])
    pairs = [(col + col // 8 + 1, f"{col}, {col + 1}") for col in range(0, 16, 2)]
    title = "A 16x16 block of O in registers: four stores of 4 bytes a lane"
    _quadrant_axes(axes[0, 0], title, *map(list, zip(*pairs, strict=True)))
    return figure


def _quadrant(board: Axes, row: int, col: int, title: str, cells, colour: str) -> None:
    """Draws 8x8 elements that one phase or store touches, with a heading; ``cells``: (text, x, y, width)."""
    left, top = col + col // 8, row + 1.3 * (row // 8) + 1
    board.text(left + 4, top - 0.5, title, ha="center", va="center", fontsize=9.5, fontweight="bold")
    for text, x, y, width in cells:
        _cell(board, left + x, top + y, colour, text, width=width, size=8)


def _quadrant_axes(board: Axes, title: str, ticks, labels) -> None:
    _grid_axes(board, 18.3, 17, title)
    board.set_xticks(ticks, labels)
    board.set_yticks([row + 1.3 * (row // 8) + 1.5 for row in range(16)], [f"row {row}" for row in range(16)])


def store_of_output() -> Figure:
    """The first 4-byte store of O in memory: row-major and swizzled."""
    figure, axes = _figure(12, 7.2, 1, 2)
    for board, layout, what in ((axes[0, 0], PLAIN, "row-major O"), (axes[1, 0], SWIZZLE_333, "swizzled O")):
        found = report(layout, _path("st.shared O"))
        memory_of_phase(board, found, (0, _COLUMN_16, 0), f"{what}, one store of rows 0 to 7 at column 16")
    figure.suptitle("Numbers are lanes, columns the 32 banks of 4 bytes", fontsize=10)
    return figure


def float_columns() -> Figure:
    """A column of float[32][32] and of float[32][33] in memory."""
    figure, axes = _figure(13, 7.4, 2)
    for board, name in zip(axes[0], ("FLOAT_32X32", "FLOAT_32X33"), strict=True):
        toy = TOYS[name]
        found = report(toy.layout, by_column("ld", 4, toy.tile, toy.element_bytes))
        memory_of_phase(board, found, (0, 0, 0), f"float[32][{name[-2:]}] read down column 0")
    return figure


GALLERY: dict[str, Callable[[], Figure]] = {
    "phases_of_16_bytes": phases_of_16_bytes,
    "what_conflicts": what_conflicts,
    "conflict_and_cures": conflict_and_cures,
    "swizzle_4x4": swizzle_4x4,
    "swizzle_8x8": swizzle_8x8,
    "ldmatrix_lane_map": ldmatrix_lane_map,
    "accumulator_lane_map": accumulator_lane_map,
    "store_of_output": store_of_output,
    "float_columns": float_columns,
}


def gallery(folder) -> list[FilePath]:
    """Writes every picture of docs/banks.md into ``folder`` as PNG; returns the files."""
    FilePath(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for name, make in GALLERY.items():
        file = FilePath(folder) / f"{name}.png"
        save(make(), file)
        files.append(file)
    return files
