"""Writes the tables of README.md and docs/ from results files, between ``<!-- table:NAME -->`` marks."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from perf import results
from perf.output import progress
from perf.table_texts import TABLES

_BLOCK = re.compile(r"(<!-- table:(\w+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf tables``."""
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a table differs from the results")


def main(args: argparse.Namespace) -> int:
    """Updates every document, or with ``--check`` compares them."""
    changed = []
    for path in documents(results.ROOT):
        text = path.read_text()
        try:
            updated = with_tables(text)
        except ValueError as error:
            progress(f"error: {path.name}: {error}")
            return 1
        if updated != text:
            changed.append(path)
            if not args.check:
                path.write_text(updated)
    for path in changed:
        name = path.relative_to(results.ROOT)
        print(f"{name}: tables differ from perf/results" if args.check else f"{name}: tables updated")
    if not changed:
        print("tables are those of perf/results")
    return 1 if args.check and changed else 0


def documents(root: Path) -> list[Path]:
    """README.md and docs/*.md, as far as there are any."""
    return [path for path in [root / "README.md", *sorted(root.glob("docs/*.md"))] if path.exists()]


def with_tables(text: str) -> str:
    """The text with every marked table made anew.

    Raises:
        ValueError: a mark names an unknown table, or has no end.
    """

    def render(match: re.Match) -> str:
        name = match[2]
        if name not in TABLES:
            raise ValueError(f"table must be one of {', '.join(TABLES)}, got {name!r}")
        return f"{match[1]}{TABLES[name]()}\n{match[4]}"

    if len(re.findall(r"<!-- table:", text)) != len(_BLOCK.findall(text)):
        raise ValueError("a <!-- table:NAME --> mark lacks its <!-- /table -->")
    return _BLOCK.sub(render, text)
