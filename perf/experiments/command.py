"""``python -m perf experiments``: transposes, row softmax and column reads, predicted, counted and timed.

Every variant is held to PyTorch's result, its wavefronts of shared memory to the bank model's, and its time to
that of a copy of the same data in the same run. Without a GPU the kernels are compiled, predicted and emulated.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict

import torch

from cute_fa.arch import arch_of_capability
from cute_fa.emulator import EmulationError
from layouts.arguments import positive_int
from perf import results
from perf.experiments.base import Experiment, emulate_experiment
from perf.experiments.reads import READS
from perf.experiments.softmax import SOFTMAXES
from perf.experiments.transpose import TRANSPOSES
from perf.ncu import MISSING, WAVEFRONTS, NcuError, count, find_ncu, launched, number, parse_ncu, run_ncu
from perf.output import add_output_arguments, as_csv, cell, emit, plain_table, progress, wants_tables
from perf.timing import time_interleaved

EXPERIMENTS: tuple[Experiment, ...] = (*TRANSPOSES, *SOFTMAXES, *READS)
NAMES = tuple(dict.fromkeys(experiment.experiment for experiment in EXPERIMENTS))
COPY = "copy"
LAUNCHES = 10  # of a CUDA graph that is timed as one: a launch alone is shorter than events can tell
SET_BUDGET_S = 0.3
COMPILED_FOR = ("sm_80", "sm_90a")
_OPS = ("ld", "st")
_DURATION = "gpu__time_duration.sum"
_SMEM_SHARE = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf experiments``."""
    parser.add_argument(
        "--experiments", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"of {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=positive_int,
        metavar="N",
        help="rows and columns of the transposed matrices, multiples of 128 "
        f"(default: {' '.join(map(str, TRANSPOSES[0].sizes))})",
    )
    parser.add_argument("--repeats", type=positive_int, metavar="N", help="timed rounds; default: by a time budget")
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs the experiments; 1 if a result is wrong, a counter differs from its prediction, or ncu fails."""
    chosen = [experiment for experiment in EXPERIMENTS if experiment.experiment in args.experiments]
    try:
        runs = [(experiment, size) for experiment in chosen for size in _sizes(experiment, args.sizes)]
    except ValueError as error:
        progress(f"python -m perf experiments: error: --sizes: {error}")
        return 2
    if not torch.cuda.is_available():
        return _without_gpu(args, runs)
    records = _timed(runs, args.repeats)
    ncu, reason = find_ncu(), MISSING
    if ncu is not None:
        try:
            counted = count_wavefronts(ncu, runs)
        except NcuError as error:
            ncu, reason = None, str(error)
        else:
            for run, counters in zip(runs, counted, strict=True):
                _add_counters(records[run], counters)
    rows = list(records.values())
    wrong = [record["name"] for record in rows if not agrees(record)]
    if wants_tables(args):
        print(table(rows))
    device = results.device_name()
    document = results.make_document(rows, device, ncu is not None and not wrong)
    default = args.sizes is None and len(chosen) == len(EXPERIMENTS) and args.repeats is None
    emit(args, document, results.results_path(device, "experiments" if default else "custom"))
    if ncu is None:
        progress(f"python -m perf experiments: error: no counters: {reason}")
    if wrong:
        progress(f"WRONG or not as predicted: {', '.join(wrong)}")
    return int(ncu is None or bool(wrong))


def _sizes(experiment: Experiment, sizes: list[int] | None) -> Iterable[int]:
    chosen = sizes if sizes and experiment.experiment == TRANSPOSES[0].experiment else experiment.sizes
    for size in chosen:
        experiment.check(size)
    return chosen


def agrees(record: dict) -> bool:
    """Whether a result was right and all that ncu counted of it was as predicted."""
    counted = all(record[op]["predicted"] == record[op].get("measured", record[op]["predicted"]) for op in _OPS)
    return counted and record.get("correct", True)


def prediction(experiment: Experiment, size: int) -> dict:
    """The part of a record that needs no GPU: what the variant is, and the bank model's wavefronts by path."""
    record = {"name": experiment.name, "kind": "experiment", "experiment": experiment.experiment}
    record |= {"variant": experiment.variant, "dtype": experiment.dtype, "size": size}
    record |= {"layout": experiment.layout.name if experiment.layout else None, "ways": experiment.ways(size)}
    for op, (ideal, predicted) in experiment.wavefronts(size).items():
        record[op] = {"ideal": ideal, "predicted": predicted}
    return record


# --- on a GPU ----------------------------------------------------------------------------------------------


@functools.cache
def _compiled(experiment: Experiment) -> Callable:
    return experiment.compile(arch_of_capability(torch.cuda.get_device_capability()))


def _timed(runs: list[tuple[Experiment, int]], repeats: int | None) -> dict[tuple, dict]:
    """One record a run, checked and timed beside the others that do the same, in sets by size; and copies."""
    records = {run: prediction(*run) for run in runs}
    sets: dict[tuple, list[tuple[Experiment, int]]] = {}
    for experiment, size in runs:
        sets.setdefault((experiment.experiment, experiment.dtype, size), []).append((experiment, size))
    for (name, dtype, size), members in sets.items():
        progress(f"{name} {dtype} {size}")
        source, result = members[0][0].tensors(size, "cuda")
        expected = members[0][0].expected(source)
        calls = {}
        for experiment, _ in members:
            kernel = functools.partial(_compiled(experiment), source, result)
            result.zero_()
            kernel()
            records[experiment, size]["correct"] = experiment.matches(result, expected)
            calls[experiment.name] = _graph(kernel)
        if source.shape == result.shape:
            calls[COPY] = _graph(functools.partial(result.copy_, source))
        timings = time_interleaved(calls, budget_s=SET_BUDGET_S, repeats=repeats)
        moved = members[0][0].moved_bytes(size)
        for experiment, _ in members:
            records[experiment, size] |= _times(timings[experiment.name], moved)
        if COPY in timings:
            copied = _times(timings[COPY], moved)
            records[COPY, name, dtype, size] = {
                "name": COPY, "kind": "ceiling", "experiment": name, "variant": COPY, "dtype": dtype, "size": size,
                **{op: {"ideal": 0, "predicted": 0} for op in _OPS}, **copied,
            }  # fmt: skip
            for experiment, _ in members:
                records[experiment, size]["share_of_copy"] = copied["ms"] / records[experiment, size]["ms"]
    return records


def _times(timing, moved: int) -> dict:
    """Of one launch: milliseconds and GB/s."""
    times = {key: value if key == "samples" else value / LAUNCHES for key, value in asdict(timing).items()}
    return times | {"gbps": moved / times["ms"] / 1e6}


def _graph(call: Callable[[], object]) -> Callable[[], None]:
    """A CUDA graph of ``LAUNCHES`` calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            call()
    return graph.replay


def count_wavefronts(ncu: str, runs: list[tuple[Experiment, int]]) -> list[dict[str, float]]:
    """Counters of every run, launched once each.

    Raises:
        NcuError: ncu failed, or did not see exactly the kernels that were launched.
    """
    metrics = [WAVEFRONTS.format(op) for op in _OPS] + [_DURATION, _SMEM_SHARE]
    options = ["--kernel-name", "regex:^cute_fa_exp_", "--metrics", ",".join(metrics)]
    listed = json.dumps([(experiment.name, size) for experiment, size in runs])
    rows = parse_ncu(run_ncu(ncu, options, ["-m", "perf.experiments.command", listed]))
    seen = [launched(row) for row in rows]
    expected = [f"cute_fa_exp_{experiment.name}_" for experiment, _ in runs]
    if len(seen) != len(expected) or not all(map(str.startswith, seen, expected)):
        raise NcuError(f"ncu saw {len(seen)} kernels, not the {len(expected)} that were launched: {seen}")
    exact = {op: WAVEFRONTS.format(op) for op in _OPS}
    return [
        {op: count(row, metric) for op, metric in exact.items()}
        | {"us": number(row, _DURATION) / 1e3, "smem_share": number(row, _SMEM_SHARE) / 100}
        for row in rows
    ]


def _add_counters(record: dict, counters: dict[str, float]) -> None:
    for op in _OPS:
        record[op]["measured"] = counters[op]
    record |= {"ncu_us": counters["us"], "smem_share": counters["smem_share"]}


def launch_all(listed: list[tuple[str, int]]) -> None:
    """Launches each (name, size) once, in order: what ncu runs."""
    by_name = {experiment.name: experiment for experiment in EXPERIMENTS}
    for name, size in listed:
        _compiled(by_name[name])(*by_name[name].tensors(size, "cuda"))
    torch.cuda.synchronize()


# --- without one -------------------------------------------------------------------------------------------


def _without_gpu(args: argparse.Namespace, runs: list[tuple[Experiment, int]]) -> int:
    rows, notes, wrong = [], [], False
    emulated: dict[Experiment, str] = {}
    for experiment, size in runs:
        if experiment not in emulated:
            emulated[experiment] = _emulated(experiment)
            if emulated[experiment] != "as predicted":
                notes.append(f"{experiment.name}: {emulated[experiment]}")
                wrong = True
        rows.append(prediction(experiment, size) | {"emulated": emulated[experiment]})
    if wants_tables(args):
        print("\n".join([table(rows), *notes]))
    else:
        print(as_csv(rows) if args.csv else json.dumps(rows, indent=1))
    progress(
        f"Predicted; compiled for {', '.join(COMPILED_FOR)}; emulated on small data. Not measured: neither times nor "
        "ncu's counters, since no CUDA device is visible to PyTorch."
    )
    return int(wrong)


def _emulated(experiment: Experiment) -> str:
    """How the emulator's run, of the kernel as compiled for each architecture, compares with the prediction."""
    for arch in COMPILED_FOR:
        progress(f"emulating {experiment.name} for {arch}")
        try:
            report, correct = emulate_experiment(experiment, arch)
        except EmulationError as error:
            return f"{arch}: {error}"
        counted = {op: report.by_path().get(f"{op}.shared", (0, 0)) for op in _OPS}
        if not correct:
            return f"{arch}: the result isn't PyTorch's"
        if counted != experiment.wavefronts(experiment.emulated_size):
            return f"{arch}: the emulator counted {counted}"
    return "as predicted"


def table(records: list[dict]) -> str:
    """All variants for people: ways, wavefronts, times."""
    rows = []
    for record in records:
        counts = [cell(record[op].get(key), ",") for op in _OPS for key in ("predicted", "measured")]
        rows.append([
            f"{record['experiment']} {record['dtype']} {record['size']}: {record['variant']}",
            cell(record.get("ways")),
            *counts,
            cell(1e3 * record["ms"] if "ms" in record else None, ".2f"),
            cell(record.get("gbps"), ",.0f"),
            cell(record.get("share_of_copy"), ".2f"),
            cell(record.get("smem_share"), ".0%"),
            "" if agrees(record) else "DIFFERS",
        ])  # fmt: skip
    headers = [
        "",
        "ways",
        "ld predicted",
        "measured",
        "st predicted",
        "measured",
        "µs",
        "GB/s",
        "/ copy",
        "smem busy",
        "",
    ]
    return plain_table(headers, rows)


if __name__ == "__main__":
    launch_all(json.loads(sys.argv[1]))
