"""``python -m perf profile``: the counters of Nsight Compute for rungs and peers, beside what was predicted.

The command starts ncu itself. It shows duration, wavefronts and bank conflicts of shared memory, how busy
shared memory and tensor cores were, and why warps stalled, with the change from rung to rung; then the
emulator's wavefronts beside ncu's, and the source lines that cost most. Without a GPU the last two are all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter as Multiset
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

import cute_fa
from cute_fa.arch import arch_of_capability
from cute_fa.config import KernelConfig
from cute_fa.emulator import EmulatedForward, EmulationError, estimate_seconds
from cute_fa.kernels.sm80_serial import Sm80Serial
from cute_fa.ladder import KERNELS, LADDER
from layouts.access import kernel_paths
from layouts.banks import report
from layouts.catalog import ATOM_16B, ATOM_32B, ATOM_64B, SWIZZLE_333
from layouts.parse import find_layout
from perf import emulation, results
from perf.cases import LIMITS, Case, add_case_arguments, cases_from
from perf.contestants import Contestant, Unavailable, add_rung_arguments, rung_contestant, rungs_from
from perf.counters import COUNTERS, REST, STALL_MEANINGS, counters_of, metrics_of, named_stalls
from perf.ncu import (
    MISSING,
    NcuError,
    SourceLine,
    available_metrics,
    find_ncu,
    mark,
    read_report,
    split_at_marks,
    write_report,
)
from perf.output import add_output_arguments, as_csv, cell, emit, plain_table, progress, wants_tables
from perf.peers import PEERS

CASE = {"seqlen": [(4096, 4096)], "batch": 1, "causal": False}
LINES = 5
HARDWARE_CATALOG = (SWIZZLE_333, ATOM_64B, ATOM_32B, ATOM_16B)  # the catalog's names of layouts.checks.HARDWARE_LAYOUTS
SAMPLED_TITLE = "The lines at which most samples found a warp stalled, by ncu"
MAX_EMULATED_SECONDS = 5.0
_PROFILED = "PROFILED "  # before what the launching process says of those that can't run
# Tiles of keys of the emulations that a long sequence is extrapolated from, and of the one that checks them.
_TILES_N, _CHECKED_TILES_N, _TILES_M = (4, 8), 12, 2
_LINES_TILES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf profile``."""
    add_case_arguments(parser)
    parser.set_defaults(**CASE)
    add_rung_arguments(parser)
    named = ", ".join(f"{name} ({rung}, {case})" for name, (rung, case) in LIMITS.items())
    parser.add_argument(
        "--limit", choices=LIMITS, help=f"a rung where something holds it up, in place of case and kernels: {named}"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument(
        "--clock-control",
        choices=("none", "base"),
        default="none",
        help="base: ncu locks the clocks, so that runs compare; default: none, the clocks of real work",
    )
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Profiles, prints and records; 1 if ncu fails or an exact counter differs from its prediction."""
    try:
        if args.limit:
            name, case = LIMITS[args.limit]
            _refuse_choices(args)
            args.kernels = [name]
        else:
            (case,) = cases_from(args)
    except ValueError as error:
        several = "choose one head dimension, one length and one mask" if "unpack" in str(error) else error
        progress(f"python -m perf profile: error: {several}")
        return 2
    rungs = rungs_from(args)
    has_gpu = torch.cuda.is_available()
    arch = arch_of_capability(torch.cuda.get_device_capability()) if has_gpu else None
    profiled: list[dict] = []
    with ThreadPoolExecutor(1) as pool:  # the emulator's work and ncu's take about as long
        # A limit is told by what ncu alone counts, and its problem is a large one.
        emulated = pool.submit(_emulate_all, case, [] if has_gpu and args.limit else rungs, arch)
        if has_gpu:
            peers = [PEERS[name] for name in PEERS if name in args.peers]
            try:
                profiled = profile(case, [*rungs, *peers], arch, args.clock_control)
            except NcuError as error:
                progress(f"python -m perf profile: error: {error}")
                return 1
        compared, lines, notes = emulated.result()
    add_counts(compared, profiled)
    records = profiled + compared + lines
    if wants_tables(args):
        print("\n\n".join(filter(None, [str(case), *_profile_tables(profiled)])))
        if compared or notes:
            print("\n".join(["", _compared_table(compared), "", _line_table(lines), *notes]))
    wrong = emulation.differing(compared)
    if not has_gpu:
        if not wants_tables(args):
            print(as_csv(records) if args.csv else json.dumps(records, indent=1))
        progress("Emulated only; nothing was profiled: no CUDA device is visible to PyTorch.")
        return 0
    document = results.make_document(records, results.device_name(), not wrong)
    emit(args, document, results.results_path(results.device_name(), _file_name(args)))
    if wrong:
        progress(f"{len(wrong)} exact counters differ from their prediction")
    return int(bool(wrong))


def _refuse_choices(args) -> None:
    """Raises ValueError if something is chosen that a limit says."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if (
            name in (*CASE, "dtype", "head_dim", "set", "heads", "heads_kv", "kernels")
            and getattr(args, name) != default
        ):
            raise ValueError(f"--limit says what --{name.replace('_', '-')} would")


def _file_name(args) -> str:
    """The results file: "profile" of everyone, "hopper_layouts" of the last rung in the layouts of the hardware, and
    those of limits."""
    if args.limit:
        is_default = set(args.peers) == set(PEERS) and args.layout is None and args.clock_control == "none"
        return f"limit_{args.limit}" if is_default else "custom"
    chosen = {key: getattr(args, key) for key in CASE}
    others = (args.dtype, args.head_dim, args.heads_kv, args.clock_control)
    if chosen == CASE and others == ("bf16", [128], None, "none"):
        if set(args.kernels) == set(KERNELS) and set(args.peers) == set(PEERS) and args.layout is None:
            return "profile"
        if args.kernels == [LADDER[-1].name] and not args.peers and args.layout == list(HARDWARE_CATALOG):
            return "hopper_layouts"
    return "custom"


# --- by ncu ------------------------------------------------------------------------------------------------


def profile(case: Case, contestants: list[Contestant], arch: str, clock_control: str = "none") -> list[dict]:
    """A record for each rung and peer: its counters, or the reason why it can't run the case; and a rung's lines.

    Raises:
        NcuError: there is no ncu, or it failed; the text says what to do.
    """
    ncu = find_ncu()
    if ncu is None:
        raise NcuError(MISSING)
    available = available_metrics(ncu)
    # Only what is launched between the start and the stop of the profiler is looked at.
    options = ["--profile-from-start", "off", "--import-source", "yes", "--section", "SourceCounters"]
    options += ["--metrics", ",".join(metrics_of(available))]
    labels = [contestant.label for contestant in contestants]
    argument = json.dumps({"case": case.as_record(), "labels": labels})
    progress(f"ncu over {', '.join(labels)}")
    with tempfile.TemporaryDirectory() as directory:
        report_file = Path(directory) / "profile.ncu-rep"
        text = write_report(ncu, report_file, options, ["-m", "perf.profile_table", argument], clock_control)
        launches, lines = read_report(ncu, report_file)
    said = next((line for line in text.splitlines() if line.startswith(_PROFILED)), None)
    if said is None:
        raise NcuError(f"the profiled process did not end as it should:\n{text[-2000:]}")
    reasons = json.loads(said.removeprefix(_PROFILED))
    ran = [label for label in labels if label not in reasons]
    calls = dict(zip(ran, split_at_marks(launches, len(ran)), strict=True))
    records = []
    for contestant in contestants:
        record = {"name": contestant.name, "kind": contestant.kind, **case.as_record()}
        if contestant.rung is not None:
            config = emulation.config_for(case, contestant.name, arch, contestant.layout)
            record |= {"layout": config.layout.name, "config": str(config)}
        if contestant.label not in calls:
            records.append(record | {"reason": reasons[contestant.label]})
            continue
        found = counters_of(calls[contestant.label], available)
        records.append(record | found)
        if contestant.rung is not None:
            records += [record | line for line in sampled_lines(lines, found["kernels"])]
    return records


def sampled_lines(lines: list[SourceLine], kernels: list[str]) -> list[dict]:
    """The lines at which most samples found a warp of these kernels stalled, with their wavefronts."""
    own = [line for line in lines if line.kernel in kernels]
    total = sum(line.samples for line in own)
    top = sorted((line for line in own if line.samples), key=lambda line: -line.samples)[:LINES]
    return [
        {
            "source": f"{line.file}:{line.line}", "code": line.code, "samples": line.samples,
            "share": line.samples / total, "wavefronts": line.wavefronts, "ideal": line.ideal,
        }
        for line in top
    ]  # fmt: skip


def launch_all(case: Case, labels: list[str]) -> dict[str, str]:
    """Calls every rung and peer once under the profiler, a mark after each; why those that can't run don't."""
    tensors = case.tensors("cuda")
    reasons = {}
    for label in labels:
        try:
            call = labelled(label).prepare(case, *tensors)
        except Unavailable as reason:
            reasons[label] = str(reason)
            continue
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        mark()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return reasons


def labelled(label: str) -> Contestant:
    """The contestant of a label; its layout, if it has one of its own, must be one that its name says all of."""
    name, _, layout = label.partition(", ")
    if name in PEERS:
        return PEERS[name]
    return rung_contestant(KERNELS[name], find_layout(layout) if layout else None)


# --- predicted ---------------------------------------------------------------------------------------------


def _emulate_all(case: Case, rungs: list[Contestant], arch: str | None) -> tuple[list[dict], list[dict], list[str]]:
    """Predictions, source lines, and which rungs can't be emulated, with the reason."""
    compared, lines, notes = [], [], []
    for rung in rungs:
        progress(f"emulating {rung.label}")
        try:
            compared += compared_records(case, rung, arch)
            lines += line_records(case, rung, arch)
        except (EmulationError, ValueError) as error:
            notes.append(f"{rung.label} not emulated: {str(error).splitlines()[0]}")
    return compared, lines, notes


def compared_records(case: Case, rung: Contestant, arch: str | None) -> list[dict]:
    """One record a counter of shared memory: the wavefronts of the emulator, and of the lab.

    Raises:
        EmulationError, ValueError: the rung can't be emulated, or its wavefronts can't be extrapolated.
    """
    predicted = predict(case, rung, arch)
    lab = lab_wavefronts(case, rung)
    records = []
    for counter, (paths, exact) in emulation.COUNTERS.items():
        ideal, actual = (sum(predicted.get(path, (0, 0))[i] for path in paths) for i in (0, 1))
        if not set(paths) & set(predicted):
            continue  # the rung has no such access
        config = emulation.config_for(case, rung.name, arch or emulation.arch_of(rung.rung), rung.layout)
        record = {"name": rung.name, "kind": "rung", **case.as_record(), "layout": config.layout.name}
        record |= {"path": " + ".join(paths), "counter": counter, "exact": exact, "ideal": ideal, "predicted": actual}
        if lab is not None:
            record["lab"] = sum(lab[path] for path in paths)
        records.append(record)
    return records


def add_counts(compared: list[dict], profiled: list[dict]) -> None:
    """Puts ncu's wavefronts beside the predicted ones, of the rungs that were profiled."""
    counted = {(record["name"], record.get("layout")): record for record in profiled if "kernels" in record}
    for record in compared:
        key = next((counter.key for counter in COUNTERS if record["counter"] in counter.metrics), None)
        found = counted.get((record["name"], record["layout"]), {})
        if key in found:
            record["wavefronts"] = round(found[key])


def predict(case: Case, rung: Contestant, arch: str | None = None) -> dict[str, tuple[int, int]]:
    """Path → (ideal, actual) wavefronts of a rung on a case, by the emulator.

    A case of some seconds is emulated whole. Of a longer one, if its lengths are whole tiles and nothing is
    masked, all CTAs do the same and so do all iterations: two short emulations give what a CTA and what an
    iteration takes, and a third one checks that the sum is linear.

    Raises:
        EmulationError: the rung can't be emulated.
        ValueError: the case is too long, and can't be extrapolated.
    """
    arch = arch or emulation.arch_of(rung.rung)
    config = emulation.config_for(case, rung.name, arch, rung.layout)
    if estimate_seconds(config, (case.B, case.S_q, case.H, case.D), case.S_k, case.causal) < MAX_EMULATED_SECONDS:
        return _emulated(case, rung, arch, config)
    if case.causal or case.S_q % config.tile_m or case.S_k % config.tile_n or case.H_kv != case.H:
        raise ValueError(f"{case} takes too long to emulate, and can be extrapolated only if full and of whole tiles")
    how = rung, arch, config
    first, second, checked = (
        _emulated(replace(case, B=1, H=1, H_kv=1, S_q=_TILES_M * config.tile_m, S_k=tiles * config.tile_n), *how)
        for tiles in (*_TILES_N, _CHECKED_TILES_N)
    )

    def extrapolated(tiles: int, path: str, i: int) -> int:
        step = second[path][i] - first[path][i]
        each, remainder = divmod(step * (tiles - _TILES_N[0]), _TILES_N[1] - _TILES_N[0])
        if remainder:
            raise ValueError(
                f"{path}: {step} wavefronts for {_TILES_N[1] - _TILES_N[0]} iterations are no whole number"
            )
        return first[path][i] + each

    if checked != {path: tuple(extrapolated(_CHECKED_TILES_N, path, i) for i in (0, 1)) for path in first}:
        raise ValueError("its wavefronts are not linear in the number of keys, so a long case can't be extrapolated")
    ctas = case.B * case.H * case.S_q // config.tile_m
    return {
        path: tuple(extrapolated(case.S_k // config.tile_n, path, i) * ctas // _TILES_M for i in (0, 1))
        for path in first
    }


def _emulated(case: Case, rung: Contestant, arch: str, config: KernelConfig) -> dict[str, tuple[int, int]]:
    return emulation.emulate_case(case, rung.name, arch, config=config).report.by_path()


def lab_wavefronts(case: Case, rung: Contestant) -> dict[str, int] | None:
    """Emulator's path → wavefronts by ``layouts.banks`` alone; None for kernels whose accesses the lab doesn't list.

    Also None for what is not whole tiles, or masked: then some accesses are left out.
    """
    if rung.rung.kernel is not Sm80Serial:
        return None
    config = emulation.config_for(case, rung.name, layout=rung.layout)
    if case.causal or case.S_q % config.tile_m or case.S_k % config.tile_n:
        return None
    ctas, iterations = case.B * case.H * case.S_q // config.tile_m, case.S_k // config.tile_n
    found: Multiset[str] = Multiset()
    for path in kernel_paths(case.D, config.tile_m, config.tile_n, config.num_threads):
        times = ctas * (iterations if path.per_iteration else 1)
        found[path.name.rpartition(" ")[0]] += report(config.layout, path).wavefronts * times
    return dict(found)


def line_records(case: Case, rung: Contestant, arch: str | None) -> list[dict]:
    """The source lines whose accesses take most wavefronts in one emulated CTA, the costliest first.

    Raises:
        EmulationError, ValueError: as ``predict``.
    """
    arch = arch or emulation.arch_of(rung.rung)
    config = emulation.config_for(case, rung.name, arch, rung.layout)
    small = replace(case, B=1, H=1, H_kv=1, S_q=config.tile_m, S_k=_LINES_TILES * config.tile_n)
    result: EmulatedForward = emulation.emulate_case(small, rung.name, arch, config=config)
    ideal, actual = Multiset(), Multiset()
    for entry in result.report.wavefronts:
        ideal[entry.source, entry.path] += entry.ideal
        actual[entry.source, entry.path] += entry.actual
    total = sum(actual.values())
    return [
        {
            "name": rung.name, "kind": "rung", **small.as_record(), "layout": config.layout.name,
            "source": source, "code": code_at(source), "instruction": path,
            "ideal": ideal[source, path], "predicted": wavefronts, "share": wavefronts / total,
        }
        for (source, path), wavefronts in actual.most_common(LINES)
    ]  # fmt: skip


def code_at(source: str) -> str:
    """The text of "file.py:12" of this package; empty where there is no such line."""
    name, _, line = source.partition(":")
    files = sorted(Path(cute_fa.__file__).parent.rglob(name)) if name.endswith(".py") else []
    lines = files[0].read_text().splitlines() if files else []
    return lines[int(line) - 1].strip() if 0 < int(line or 0) <= len(lines) else ""


# --- printed -----------------------------------------------------------------------------------------------


def counter_rows(profiled: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: a counter a row, a contestant a column."""
    ran = [record for record in profiled if "kernels" in record]
    keys = {key for record in ran for key in record}
    rows = [
        [counter.label, *(cell(record.get(counter.key), counter.form) for record in ran)]
        for counter in COUNTERS
        if counter.key in keys
    ]
    return ["", *_labels(ran)], rows


def _labels(records: list[dict]) -> list[str]:
    """Names, with the layout where a name occurs twice."""
    names = Multiset(record["name"] for record in records)
    return [r["name"] if names[r["name"]] == 1 else f"{r['name']}, {r['layout']}" for r in records]


def stall_rows(profiled: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: a contestant a row, a reason a column; below a rung the change since the one before."""
    ran = [record for record in profiled if "stalls" in record]
    rows, previous, before_label = [], None, None
    for label, record in zip(_labels(ran), ran, strict=True):
        stalls = named_stalls(record["stalls"])
        rows.append([label, *(f"{share:.2%}" for share in stalls.values())])
        if record["kind"] == "rung":
            if previous is not None:
                before = named_stalls(previous["stalls"])
                change = (f"{100 * (share - before[reason]):+.2f}" for reason, share in stalls.items())
                rows.append([f"{before_label} → {label}", *change])
            previous, before_label = record, label
    return ["", *STALL_MEANINGS, REST], rows


def _profile_tables(profiled: list[dict]) -> list[str]:
    if not profiled:
        return []
    meanings = [f"{counter.label}: {counter.meaning}" for counter in COUNTERS]
    stalls = [f"{reason}: {meaning}" for reason, meaning in STALL_MEANINGS.items()]
    reasons = [f"{record['name']} not run: {record['reason']}" for record in profiled if "reason" in record]
    return [
        plain_table(*counter_rows(profiled)),
        "\n".join(meanings),
        "Stalls, share of all; changes in percentage points\n\n" + plain_table(*stall_rows(profiled)),
        "\n".join(stalls),
        "\n".join(reasons),
        f"{SAMPLED_TITLE}\n\n{plain_table(*sampled_rows(profiled))}\n\n{_code(profiled)}",
    ]


def compared_rows(compared: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: wavefronts at best, of the lab, of the emulator, of ncu."""
    rows = []
    for record in compared:
        difference = record["wavefronts"] - record["predicted"] if "wavefronts" in record else None
        numbers = (record.get(key) for key in ("ideal", "lab", "predicted", "wavefronts"))
        rows.append([record["name"], record["path"], *(cell(n, ",") for n in numbers), cell(difference, "+,")])
    return ["kernel", "path", "ideal", "lab", "emulator", "ncu", "difference"], rows


def _compared_table(compared: list[dict]) -> str:
    return "Wavefronts of shared memory, predicted and counted\n\n" + plain_table(*compared_rows(compared))


def line_rows(lines: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: a source line a row, the costliest of each kernel first."""
    rows = [
        [
            record["name"], record["source"], record["instruction"],
            f"{record['predicted']:,}", f"{record['share']:.1%}",
            cell(record["predicted"] / record["ideal"] if record["ideal"] else None, ".2f"),
        ]
        for record in lines
    ]  # fmt: skip
    return ["kernel", "line", "instruction", "wavefronts", "share", "ways"], rows


def sampled_rows(profiled: list[dict]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: a source line a row, that with most samples of each kernel first."""
    rows = [
        [
            record["name"], record["source"], f"{record['samples']:,}", f"{record['share']:.1%}",
            f"{record['wavefronts']:,}",
            cell(record["wavefronts"] / record["ideal"] if record["ideal"] else None, ".2f"),
        ]
        for record in profiled
        if "samples" in record
    ]  # fmt: skip
    return ["kernel", "line", "samples", "share", "wavefronts", "ways"], rows


def _code(records: list[dict]) -> str:
    seen = {record["source"]: record["code"] for record in records if "source" in record}
    return "\n".join(f"{source}: {text}" for source, text in seen.items())


def _line_table(lines: list[dict]) -> str:
    title = f"The lines that cost most wavefronts in one CTA of {_LINES_TILES} iterations, by the emulator"
    return f"{title}\n\n{plain_table(*line_rows(lines))}\n\n{_code(lines)}"


if __name__ == "__main__":
    _request = json.loads(sys.argv[1])
    _reasons = launch_all(Case(**_request["case"]), _request["labels"])
    print(_PROFILED + json.dumps(_reasons), flush=True)
