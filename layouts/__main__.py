"""``python -m layouts``: show, check, compare, search and draw shared-memory layouts, without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from layouts.access import Path, array_paths, kernel_paths
from layouts.arguments import positive_int
from layouts.banks import BankReport, KernelReport, bank_map, kernel_report
from layouts.checks import bijection_fault, latin_fault, require_foldable_swizzle, require_vectors, tile_offsets
from layouts.formula import FormulaLayout
from layouts.parse import find_layout
from layouts.search import rules_out, search
from layouts.smem_layout import SmemLayout
from layouts.toys import Toy

LAYOUT_HELP = (
    'a name from layouts/catalog.py or layouts/toys.py, an expression such as "S<3,3,3> o (8,64):(64,1)" '
    "(D is the tile's width), or a Python file that defines one (FILE.py or FILE.py:NAME)"
)
# Kilobytes of shared memory that a CTA can have, most first, and the architectures that allow no more.
_SMEM_KB = ((227, ("sm_90",)), (163, ("sm_80",)), (99, ("sm_86", "sm_89", "sm_120")))
_SMEM_ALIGNMENT = 1024  # bytes; the kernels start each buffer at a multiple
# Eight background colours of the 256-colour palette, one a bank, light enough for black digits.
_BANK_COLOURS = (217, 223, 229, 193, 159, 153, 183, 252)


@dataclass(frozen=True)
class Subject:
    """What a command works on: a layout, the array it is shown on, and the paths that cross it."""

    layout: SmemLayout | FormulaLayout
    tile: tuple[int, int]
    element_bytes: int
    paths: list[Path]
    where: str
    num_banks: int = 32

    @property
    def title(self) -> str:
        name = self.layout.name
        return name if name == str(self.layout) else f"{name} = {self.layout}"


def _subject(text: str, args) -> Subject:
    """The subject of a layout argument; toys of other than 16-bit elements bring their own array."""
    found = find_layout(text)
    layout = found.layout if isinstance(found, Toy) else found
    if isinstance(found, Toy) and found.element_bytes != 2:
        rows, cols = found.tile
        where = f"array {rows}x{cols} of {found.element_bytes}-byte elements, one warp"
        paths = array_paths(found.tile, found.element_bytes)
        return Subject(layout, found.tile, found.element_bytes, paths, where, found.num_banks)
    tile_m, tile_n = args.tile
    where = f"head_dim {args.head_dim}, tile {tile_m}x{tile_n}, {args.threads} threads, 16-bit elements"
    paths = kernel_paths(args.head_dim, tile_m, tile_n, args.threads)
    return Subject(layout, (tile_n, args.head_dim), 2, paths, where)


def _tile(text: str) -> tuple[int, int]:
    try:
        rows, cols = (int(extent) for extent in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ROWSxCOLS such as 64x64, got {text!r}") from None
    if rows <= 0 or cols <= 0:
        raise argparse.ArgumentTypeError(f"extents must be positive, got {text!r}")
    return rows, cols


def _table(rows: Sequence[Sequence[object]], headings: Sequence[str]) -> str:
    """Columns padded to their widest entry; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(headings))]

    def line(entries):
        padded = (
            entry.rjust(width) if right else entry.ljust(width)
            for entry, width, right in zip(entries, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), line(["-" * width for width in widths]), *map(line, cells)])


def _verdict(report: BankReport) -> str:
    if report.ways > 1:
        return f"{report.ways}-way conflict"
    if report.line_splits:
        return f"no conflict, {report.degree:.3g}x: phases straddle 128-byte lines"
    return "free"


def _records(report: KernelReport) -> list[dict]:
    return [
        {"path": one.path.name, "ways": one.ways, "wavefronts": one.wavefronts, "ideal": one.ideal}
        for one in report.reports
    ]


def show(args) -> int:
    """Prints a table of offsets or banks, a colour a bank."""
    subject = _subject(args.layout, args)
    rows, cols = args.window or (min(subject.tile[0], 16), min(subject.tile[1], 128))
    rows, cols = min(rows, subject.tile[0]), min(cols, subject.tile[1])
    width = max(4, subject.element_bytes) if args.elements or subject.element_bytes > 2 else 16
    step = 1 if args.elements else max(1, width // subject.element_bytes)
    tile = subject.layout.on(*subject.tile)
    offsets = tile_offsets(tile)[:rows, :cols:step]
    num_banks = subject.num_banks * 4 // width
    banks = offsets * subject.element_bytes // width % num_banks
    values = banks if args.what == "banks" else offsets
    colour = args.color == "always"
    if args.color == "auto":
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    unit = f"{width}-byte vector" if step > 1 else "element"
    meaning = f"{width}-byte bank" if args.what == "banks" else "offset in elements"
    print(f"{subject.title} on {subject.tile[0]}x{subject.tile[1]}: {meaning} of each {unit}")
    digits = max(len(str(values.max())), len(str(cols - 1))) + 1
    print(" row \\ col " + "".join(f"{col:>{digits}}" for col in range(0, cols, step)))
    for row in range(rows):
        cells = []
        for value, bank in zip(values[row], banks[row], strict=True):
            text = f"{value:>{digits}}"
            shade = _BANK_COLOURS[int(bank) * len(_BANK_COLOURS) // num_banks]
            cells.append(f"\x1b[30;48;5;{shade}m{text}\x1b[0m" if colour else text)
        print(f"{row:>10} " + "".join(cells))
    return 0


def check(args) -> int:
    """Prints what every path costs under a layout; 1 with --fail if one has a bank conflict."""
    subject = _subject(args.layout, args)
    report = kernel_report(subject.layout, subject.paths)
    if args.json:
        print(json.dumps(_records(report), indent=2))
    else:
        print(f"{subject.title}\n{subject.where}\n")
        rows = [(one.path.name, one.ways, one.wavefronts, one.ideal, _verdict(one)) for one in report.reports]
        print(_table(rows, ("path", "ways", "wavefronts", "ideal", "verdict")))
        print()
        for line in _remarks(subject, report):
            print(line)
    return int(args.fail and not report.free)


def _remarks(subject: Subject, report: KernelReport):
    """What the table doesn't say: the first collision, the sum of an iteration, faults and restrictions."""
    first = next((one for one in report.reports if one.ways > 1), None)
    if first:
        yield f"first collision, {first.path.name}: {first.first_collision()}."
    if any(one.path.per_iteration for one in report.reports):
        iteration = report.iteration
        yield (
            f"a KV iteration of a CTA: {iteration.wavefronts()} wavefronts, {iteration.ideal()} at best; "
            f"effective bandwidth = peak / {report.degree:.2f}."
        )
    tiles = {path.buffer: subject.layout.on(*path.tile) for path in subject.paths}
    used = sum(tile.cosize for tile in tiles.values()) * subject.element_bytes
    elements = sum(tile.tile[0] * tile.tile[1] for tile in tiles.values()) * subject.element_bytes
    yield f"shared memory: {used} bytes" + (f", {used - elements} of them padding." if used > elements else ".")
    for tile in tiles.values():
        fault = bijection_fault(tile)
        if fault:
            yield f"NOT USABLE: {fault}."
            return
    if isinstance(subject.layout, FormulaLayout):
        yield "a formula: for study, a kernel takes swizzle o shape:stride."
    elif subject.element_bytes == 2:
        for tile in tiles.values():
            try:
                require_vectors(tile)
                require_foldable_swizzle(tile)
            except ValueError as error:
                yield f"NOT USABLE by the kernels: {error}."
                return
        needed = sum(-(-tile.cosize * 2 // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT for tile in tiles.values())
        limit = _smem_limit(needed)
        if limit:
            yield limit
        if needed > _SMEM_KB[0][0] * 1024:
            return
    if subject.element_bytes == 2:
        closed = rules_out(next(iter(tiles.values())))
        yield "rules out: " + (", ".join(closed) if closed else "nothing (TMA and WGMMA take it)") + "."
        block = bank_map(subject.layout.on(*subject.tile), 2)[:8, :8]
    else:
        tile = subject.layout.on(*subject.tile)
        block = bank_map(tile, subject.element_bytes, 4) % subject.num_banks
    fault = latin_fault(block)
    yield f"each bank once a row and once a column of the first {block.shape[0]}x{block.shape[1]}: " + (
        f"no, {fault}." if fault else "yes."
    )


def _smem_limit(needed: int) -> str | None:
    """Which architectures have room for a CTA's buffers of ``needed`` bytes; None if all have."""
    taken = f"Q, K and V take {needed} bytes in buffers of whole KB"
    fits = [f"{' / '.join(archs)} ({kb} KB)" for kb, archs in _SMEM_KB if needed <= kb * 1024]
    small = [f"{' / '.join(archs)} ({kb} KB)" for kb, archs in _SMEM_KB if needed > kb * 1024]
    if not small:
        return None
    if not fits:
        return f"NOT USABLE by the kernels: {taken}, and no GPU allows a CTA more than {_SMEM_KB[0][0]} KB."
    return f"{taken}: fits {', '.join(fits)}, not {', '.join(small)}."


def compare(args) -> int:
    """Prints the paths of two layouts side by side."""
    left, right = _subject(args.layout, args), _subject(args.other, args)
    if left.where != right.where:
        raise ValueError(f"{args.layout} and {args.other} live on different arrays: {left.where}; {right.where}")
    reports = [kernel_report(subject.layout, subject.paths) for subject in (left, right)]
    if args.json:
        records = zip(*map(_records, reports), strict=True)
        pairs = [{"path": a["path"], left.layout.name: a, right.layout.name: b} for a, b in records]
        print(json.dumps(pairs, indent=2))
        return 0
    print(f"A: {left.title}\nB: {right.title}\n{left.where}\n")
    rows = [
        (a.path.name, a.ways, b.ways, a.wavefronts, b.wavefronts, a.ideal, f"{a.wavefronts / b.wavefronts:.2f}")
        for a, b in zip(*(report.reports for report in reports), strict=True)
    ]
    totals = [report.iteration if left.element_bytes == 2 else report for report in reports]
    worst = [max(one.ways for one in total.reports) for total in totals]
    sums = [total.wavefronts() for total in totals]
    label = "KV iteration" if left.element_bytes == 2 else "all"
    rows.append((label, *worst, *sums, totals[0].ideal(), f"{sums[0] / sums[1]:.2f}"))
    print(_table(rows, ("path", "ways A", "ways B", "wavefronts A", "wavefronts B", "ideal", "A / B")))
    return 0


def run_search(args) -> int:
    """Prints every swizzle and padding that is free of bank conflicts on all paths, cheapest first."""
    paths = kernel_paths(args.head_dim, *args.tile, args.threads)
    if args.path:
        known = [path.name for path in paths]
        unknown = [name for name in args.path if name not in known]
        if unknown:
            raise ValueError(f"no path named {unknown[0]!r}; there are {', '.join(known)}")
        paths = [path for path in paths if path.name in args.path]
    found = search(paths)
    if args.json:
        records = [
            {
                "layout": str(one.layout),
                "bytes": one.bytes,
                "padding": one.padding,
                "wavefronts": one.wavefronts,
                "ideal": one.ideal,
                "mode": one.mode,
                "rules_out": list(one.rules_out),
            }
            for one in found
        ]
        print(json.dumps(records, indent=2))
        return 0
    print(f"free of bank conflicts on {', '.join(path.name for path in paths)}")
    print(f"head_dim {args.head_dim}, tile {args.tile[0]}x{args.tile[1]}, {args.threads} threads, 16-bit elements\n")
    rows = [
        (
            str(one.layout),
            one.bytes,
            one.padding,
            one.wavefronts,
            f"{one.wavefronts / one.ideal:.2f}",
            one.mode or "-",
            ", ".join(one.rules_out) or "nothing",
        )
        for one in found
    ]
    headings = ("layout", "bytes", "padding", "wavefronts", "over ideal", "swizzle mode", "rules out")
    print(_table(rows, headings) if rows else "none found")
    return 0


def draw(args) -> int:
    """Writes a picture of where a layout puts its vectors and what a path makes of it."""
    from layouts import draw as pictures  # matplotlib: only for pictures

    subject = _subject(args.layout, args)
    chosen = [path for path in subject.paths if path.name == args.path] if args.path else subject.paths
    if not chosen:
        raise ValueError(f"no path named {args.path!r}; there are {', '.join(path.name for path in subject.paths)}")
    worst = max(kernel_report(subject.layout, chosen).reports, key=lambda one: (one.ways, one.degree))
    picture = pictures.layout_and_path(subject.layout, subject.tile, subject.element_bytes, worst, subject.num_banks)
    pictures.save(picture, args.out)
    print(args.out)
    return 0


def gallery(args) -> int:
    """Writes every picture of docs/banks.md."""
    from layouts import draw as pictures  # matplotlib: only for pictures

    for file in pictures.gallery(args.out):
        print(file)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m layouts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    kernel = argparse.ArgumentParser(add_help=False)
    kernel.add_argument("--head-dim", type=positive_int, default=128, help="columns of the tiles (default 128)")
    kernel.add_argument("--tile", type=_tile, default=(64, 64), help="query rows x key rows (default 64x64)")
    kernel.add_argument("--threads", type=positive_int, default=128, help="threads of a CTA (default 128)")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="print records instead of a table")

    def add(name, function, parents=(), takes_layout=True):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__, parents=parents)
        if takes_layout:
            command.add_argument("layout", help=LAYOUT_HELP)
        command.set_defaults(function=function)
        return command

    command = add("show", show, [kernel])
    command.add_argument("--what", choices=("banks", "offsets"), default="banks")
    command.add_argument("--elements", action="store_true", help="every element, not every 16-byte vector")
    command.add_argument("--window", type=_tile, help="rows x columns to print (default: at most 16x128)")
    command.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    command = add("check", check, [kernel, as_json])
    command.add_argument("--fail", action="store_true", help="exit with 1 if a path has a bank conflict")
    command = add("compare", compare, [kernel, as_json])
    command.add_argument("other", help="the second layout")
    command = add("search", run_search, [kernel, as_json], takes_layout=False)
    command.add_argument("--path", action="append", help="only this path (may be repeated; default: all)")
    command = add("draw", draw, [kernel])
    command.add_argument("--out", required=True, help="file to write: .svg or .png")
    command.add_argument("--path", help="the path to show (default: the worst)")
    command = add("gallery", gallery, takes_layout=False)
    command.add_argument("--out", default="docs/images", help="folder to write to (default docs/images)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; 0 if all is well, 2 for a wrong argument."""
    args = _parser().parse_args(argv)
    try:
        return args.function(args)
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"python -m layouts {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
