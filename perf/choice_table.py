"""Shows which configuration each rung runs a problem with, and where that was chosen: measured, or by a rule."""

from __future__ import annotations

import argparse
import json

import torch

from cute_fa.arch import ARCHS, arch_of_capability
from cute_fa.choices.files import MeasuredChoice
from cute_fa.ladder import LADDER
from perf.cases import Case, add_case_arguments, cases_from
from perf.contestants import own_device, rung_contestant
from perf.inspect_table import DEFAULT_ARCHS
from perf.output import as_csv, plain_table, progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf choices``."""
    add_case_arguments(parser)
    parser.set_defaults(head_dim=[64, 128])
    parser.add_argument(
        "--arch", nargs="+", choices=ARCHS, metavar="ARCH",
        help=f"of {', '.join(ARCHS)}; default: this machine's, without a GPU {' '.join(DEFAULT_ARCHS)}",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print records instead of a table")
    form.add_argument("--csv", action="store_true", help="print records as CSV instead of a table")


def main(args: argparse.Namespace) -> int:
    """Prints; nothing is compiled and nothing is written."""
    try:
        cases = cases_from(args)
    except ValueError as error:
        progress(f"python -m perf choices: error: {error}")
        return 2
    own = arch_of_capability(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    archs = args.arch or ([own] if own else DEFAULT_ARCHS)
    records = [record for arch in archs for record in choice_records(cases, arch, arch == own)]
    if args.json:
        print(json.dumps(records, indent=1))
    elif args.csv:
        print(as_csv(records), end="")
    else:
        print(table(records))
    return 0


def choice_records(cases: list[Case], arch: str, on_own_device: bool) -> list[dict]:
    """A record for each rung whose configuration is chosen, and each case."""
    device = own_device() if on_own_device else torch.device("cpu")
    records = []
    for rung in LADDER:
        if not rung.preferences or not rung.runs_on(arch):
            continue
        for case in cases:
            choice = rung_contestant(rung).choose(case.problem(device), arch)
            record = {"name": rung.name, "arch": arch, **case.as_record(), "layout": choice.config.layout.name}
            record |= {"config": str(choice.config), "chosen_by": choice.source}
            record["measured"] = None if choice.measured is None else describe(choice.measured)
            records.append(record)
    return records


def describe(measured: MeasuredChoice) -> str:
    """Who measured a choice, for what and with what result."""
    found = measured.measurement
    who = f"{found.device}, {found.date[:10]}, commit {found.commit[:12]}"
    text = f"{who}, S={measured.seqlen}: {found.tflops:.1f} TFLOP/s"
    if found.runner_up_tflops is not None:
        text += f", next {found.runner_up_tflops:.1f} ({found.runner_up})"
    return text


def table(records: list[dict]) -> str:
    """One row for all lengths that share a choice."""
    lengths: dict[tuple, list[str]] = {}
    for r in records:
        key = (
            r["name"],
            r["arch"],
            str(r["D"]),
            "causal" if r["causal"] else "full",
            r["config"],
            r["chosen_by"],
            r["measured"],
        )
        lengths.setdefault(key, []).append(str(r["S_k"]))
    rows = [
        [*key[:4], ", ".join(dict.fromkeys(found)), config, source + (f": {measured}" if measured else "")]
        for (*key, config, source, measured), found in lengths.items()
    ]
    return plain_table(["rung", "arch", "D", "mask", "S_k", "configuration", "chosen by"], rows, text_columns=7)
