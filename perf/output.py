"""Options and formats that all commands share: tables, JSON and CSV on standard output, results files."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from pathlib import Path

from tabulate import tabulate

from perf.results import ROOT, write_results


class ResultsNotWrittenError(Exception):
    """The results file could not be written; the text names it and says why."""


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """--json, --csv and --output."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the results file instead of tables")
    form.add_argument("--csv", action="store_true", help="print the records as CSV instead of tables")
    parser.add_argument("--output", type=Path, metavar="PATH", help="write the results file here")


def wants_tables(args: argparse.Namespace) -> bool:
    """Whether standard output is for people."""
    return not (args.json or args.csv)


def emit(args: argparse.Namespace, document: dict, default_path: Path) -> None:
    """Writes the results file, and its records to standard output where an option asks for it.

    Raises:
        ResultsNotWrittenError: the system refused to write the file; the records have been printed all the same.
    """
    path = args.output or default_path
    refusal = None
    try:
        write_results(path, document)
    except OSError as error:
        refusal = ResultsNotWrittenError(f"can't write the results to {path}: {error.strerror or error}")
    if args.json:
        print(json.dumps(document, indent=1))
    elif args.csv:
        print(as_csv(document["records"]), end="")
    if refusal:
        raise refusal
    resolved = path.resolve()
    shown = resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else path
    progress(f"results written to {shown}")


def as_csv(records: list[dict]) -> str:
    """Records as CSV; the columns are every key that occurs, nested ones joined by a dot."""
    flat = [_flatten(record) for record in records]
    columns = list(dict.fromkeys(key for record in flat for key in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flatten(record: dict) -> dict:
    flat = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return flat


def progress(text: str) -> None:
    """A line on standard error, so that standard output holds results alone."""
    print(text, file=sys.stderr, flush=True)


class ProgressBar:
    """A line on standard error that fills up as steps are done; where that is no terminal, a line each tenth."""

    WIDTH = 30

    def __init__(self, total: int):
        self.total, self.done = total, 0
        self.line_length = 0

    def step(self, text: str) -> None:
        """One more step is done; ``text`` says which."""
        self.done += 1
        share = self.done / self.total
        filled = int(self.WIDTH * share)
        line = f"[{'#' * filled}{'.' * (self.WIDTH - filled)}] {self.done}/{self.total} {text}"
        if sys.stderr.isatty():
            print(f"\r{line:<{self.line_length}}", end="\n" if share == 1 else "", file=sys.stderr, flush=True)
            self.line_length = len(line)
        elif int(10 * share) > int(10 * (self.done - 1) / self.total):
            progress(line)


def markdown_table(
    headers: list[str], rows: list[list[str]], text_columns: int = 1, align: list[str] | None = None
) -> str:
    """A GitHub table: the first columns, which are text, to the left, all others to the right; or as ``align`` says."""
    align = align or ["left"] * text_columns + ["right"] * (len(headers) - text_columns)
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=align)


def plain_table(headers: list[str], rows: list[list[str]], text_columns: int = 1) -> str:
    """The same table for a terminal."""
    align = ["left"] * text_columns + ["right"] * (len(headers) - text_columns)
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def cell(value: float | int | None, form: str = "") -> str:
    """A number in a table; a dash where there is none."""
    return "-" if value is None else format(value, form)
