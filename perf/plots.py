"""``python -m perf plots``: the pictures of the story, drawn from results files into docs/images.

TFLOP/s by rung, TFLOP/s by length beside the peers, why warps stall, wavefronts predicted beside measured, and
the experiments; one set for each device that has results. Needs matplotlib (extra ``plots``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from perf import results
from perf.claims import Evidence, Missing
from perf.output import progress

IMAGES = results.ROOT / "docs" / "images"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf plots``."""
    parser.add_argument("--format", choices=("png", "svg"), default="png", help="default: png")
    parser.add_argument("--output", type=Path, default=IMAGES, metavar="DIR", help="default: docs/images")


def main(args: argparse.Namespace) -> int:
    """Draws what there are results for; 1 without matplotlib, or if a picture can't be written."""
    try:
        from perf import figures
    except ValueError as error:  # no matplotlib; the text says how to install it
        progress(f"python -m perf plots: error: {error}")
        return 1
    drawn = 0
    for evidence in Evidence.all():
        folder = args.output / results.slug(evidence.device)
        for name, draw in figures.FIGURES.items():
            try:
                figure = draw(evidence)
            except Missing as reason:
                progress(f"{name} not drawn for {evidence.device}: {reason}")
                continue
            path = folder / f"{name}.{args.format}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figures.write(figure, path)
            except OSError as error:
                progress(f"python -m perf plots: error: can't write {path}: {error.strerror or error}")
                return 1
            print(path.relative_to(results.ROOT) if path.is_relative_to(results.ROOT) else path)
            drawn += 1
    if not drawn:
        progress("Nothing to draw: there are no results of a GPU; python -m perf all makes them.")
    return 0
