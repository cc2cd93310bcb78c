"""Compiles the rungs for several architectures and shows what the compiled kernels tell; needs no GPU."""

from __future__ import annotations

import argparse

import torch

from cute_fa.arch import ARCHS
from cute_fa.ladder import KERNELS
from perf import results
from perf.cases import Case, add_static_arguments, causal_values
from perf.contestants import Contestant, add_rung_arguments, rungs_from
from perf.output import add_output_arguments, cell, emit, plain_table, progress, wants_tables
from perf.resources import FAMILIES, NO_CUOBJDUMP, find_cuobjdump, resources_of

SEQLEN = 4096  # for rungs whose configuration depends on it
DEFAULT_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a")
NOT_TIMED = "Nothing was timed: no CUDA device is visible to PyTorch."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf inspect``."""
    add_static_arguments(parser)
    add_rung_arguments(parser)
    parser.add_argument(
        "--arch",
        nargs="+",
        choices=ARCHS,
        default=list(DEFAULT_ARCHS),
        metavar="ARCH",
        help=f"of {', '.join(ARCHS)}; default: {' '.join(DEFAULT_ARCHS)}",
    )
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Compiles, prints and records; the options are those of ``inspect`` or of the timing table."""
    if not torch.cuda.is_available():
        progress(f"{NOT_TIMED} What the compiled kernels tell:")
    records = []
    for arch in getattr(args, "arch", DEFAULT_ARCHS):
        for head_dim in args.head_dim:
            progress(f"compiling for {arch}, D={head_dim}")
            for causal in causal_values(args):
                case = Case(args.dtype, 1, SEQLEN, SEQLEN, 1, 1, head_dim, causal)
                for contestant in rungs_from(args):
                    records.append(inspect_record(contestant, case, arch))
    if wants_tables(args):
        print(_table(records))
        if find_cuobjdump() is None:
            print(f"Registers, spills and occupancy are missing: {NO_CUOBJDUMP}.")
        if not torch.cuda.is_available():
            print(f"\n{NOT_TIMED} The kernels above were compiled, not run.")
    emit(args, results.make_document(records, results.COMPILED), _default_path(args))
    return 0


def inspect_record(contestant: Contestant, case: Case, arch: str) -> dict:
    """One rung compiled for one architecture; a ``reason`` where it can't be built.

    A configuration that depends on the length is that for the case's, as the package chooses it: what was measured
    on this machine's card alone has no place in a table of architectures.
    """
    record = {"name": contestant.name, "kind": "rung", "arch": arch, "dtype": case.dtype, "D": case.D}
    config = contestant.choose(case.problem(torch.device("cpu")), arch).config
    record |= {"causal": case.causal, "layout": config.layout.name, "config": str(config)}
    try:
        return record | resources_of(case.static, contestant.rung, config, arch).as_record()
    except ValueError as error:
        return record | {"reason": str(error)}


def _default_path(args):
    """The evidence's file for both head dimensions, all rungs and architectures; else another."""
    complete = args.layout is None and args.causal is None and args.dtype == "bf16"
    complete &= set(args.kernels) == set(KERNELS) and sorted(set(args.head_dim)) == [64, 128]
    complete &= getattr(args, "arch", None) == list(DEFAULT_ARCHS)
    return results.results_path(results.COMPILED, "resources" if complete else "custom")


def _table(records: list[dict]) -> str:
    headers = ["kernel", "arch", "D", "mask", "registers", "spill B", "smem B", "CTAs/SM", "occupancy"]
    headers += [family.replace("_", " ") for family in FAMILIES]
    rows, notes = [], []
    for record in records:
        label = [f"{record['name']} {record['layout']}", record["arch"], record["D"]]
        label.append("causal" if record["causal"] else "full")
        if "reason" in record:
            notes.append(f"{label[0]} not built at D={record['D']}: {record['reason']}")
            continue
        keys = ("registers", "stack_bytes", "smem_bytes", "ctas_per_sm")
        counts = [record["instructions"][family] for family in FAMILIES]
        rows.append([*label, *(cell(record[key]) for key in keys), cell(record["occupancy"], ".0%"), *counts])
    return "\n".join([plain_table(headers, rows), *dict.fromkeys(notes)])
