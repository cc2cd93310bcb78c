"""Chooses tiles, stages, CTAs an SM, the place of Q and the softmax's reference by measurement on this card.

For the rungs whose configuration is chosen: candidates are compiled in parallel, those that spill are left out,
each is checked against float32, and all are timed in one interleaved run a problem, the slower ones fewer times.
The fastest goes where ``cute_fa.forward`` finds it, for this card and from the next process on;
``python -m perf choices`` shows it. Without options: head dimensions 64 and 128, both masks, lengths 512, 2048
and 8192.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FuturesTimeout
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch

from cute_fa.arch import arch_of_capability
from cute_fa.choices import choose
from cute_fa.choices.files import MeasuredChoice, Measurement, dtype_name, dumps, loads, shipped_file, user_file
from cute_fa.compiled import compile_ahead
from cute_fa.config import PipelinedConfig
from cute_fa.ladder import LADDER, Rung
from cute_fa.launch import get_launch
from cute_fa.problem import StaticProblem
from cute_fa.reference import flops
from layouts.arguments import positive_int
from perf import results
from perf.candidates import candidates
from perf.cases import Case, add_case_arguments, cases_from
from perf.contestants import own_device
from perf.correctness import ErrorCheck
from perf.evidence import minutes
from perf.output import (
    ProgressBar,
    ResultsNotWrittenError,
    add_output_arguments,
    cell,
    emit,
    plain_table,
    progress,
    wants_tables,
)
from perf.resources import Resources, resources_of
from perf.timing import Timing, time_interleaved

DEFAULTS = {"head_dim": [64, 128], "seqlen": [(s, s) for s in (512, 2048, 8192)], "candidates": 32, "minutes": 10.0}
# (How many of the fastest of the stage before, rounds of timing); None: all.
HALVING: tuple[tuple[int | None, int], ...] = ((None, 3), (6, 6), (3, 20))
Job = tuple[StaticProblem, Rung, PipelinedConfig]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf tune``."""
    add_case_arguments(parser)
    parser.add_argument(
        "--candidates", type=positive_int, metavar="N", help="compile the N most promising (default: 32)"
    )
    parser.add_argument("--minutes", type=minutes, metavar="N", help="begin nothing new after N minutes (default: 10)")
    parser.add_argument(
        "--ship", action="store_true", help="write the choices that come with the package, not those of this card"
    )
    parser.set_defaults(**DEFAULTS)
    add_output_arguments(parser)


def tuned_rungs(arch: str) -> list[Rung]:
    """The rungs whose tiles are searched: those on mma.sync for many queries."""
    return [rung for rung in LADDER if rung.preferences and rung.max_rows is None and rung.runs_on(arch)]


def main(args: argparse.Namespace) -> int:
    """Tunes, prints and records; 1 if a candidate is wrong or time ran out, 2 where nothing can be measured."""
    if not torch.cuda.is_available():
        progress(
            "Nothing was tuned: no CUDA device is visible to PyTorch. "
            "`python -m perf choices` shows what is chosen without measuring."
        )
        return 2
    try:
        cases = cases_from(args)
        if unequal := [case for case in cases if case.S_q != case.S_k]:
            raise ValueError(f"--seqlen must be S, as many queries as keys: choices are kept by S; got {unequal[0]}")
    except ValueError as error:
        progress(f"python -m perf tune: error: {error}")
        return 2
    deadline = time.monotonic() + 60 * args.minutes
    arch = arch_of_capability(torch.cuda.get_device_capability())
    pairs = [(rung, case) for rung in tuned_rungs(arch) for case in cases]
    jobs = jobs_of(pairs, arch, args.candidates)
    bar = ProgressBar(len(jobs) + len(pairs))
    built = compile_all(jobs, arch, deadline, bar)

    records, choices = [], []
    for rung, case in pairs:
        if time.monotonic() > deadline:
            break
        tried = {job[2]: found for job, found in built.items() if job[:2] == (case.static, rung)}
        case_records = time_case(case, rung, tried, arch)
        records += case_records
        choices += chosen(case, rung, case_records, tried, arch)
        bar.step(f"{case}")
    path = shipped_file(arch) if args.ship else user_file(results.device_name())
    write_choices(path, choices)
    if wants_tables(args):
        print(_table(choices))
    wrong = [record for record in records if not record.get("correct", True)]
    document = results.make_document(records, results.device_name(), not wrong)
    emit(args, document, results.results_path(results.device_name(), "tune" if _is_default(args) else "custom"))
    progress(f"{len(choices)} choices written to {path}")
    for record in wrong:
        progress(f"WRONG: {record['name']} ({record['config']}): error {record['error']:.3g} for {_case_of(record)}")
    if missing := len(pairs) - len(choices):
        progress(f"{missing} of {len(pairs)} problems have no choice: no time was left, or no candidate")
    return int(bool(wrong or missing))


def jobs_of(pairs: list[tuple[Rung, Case]], arch: str, count: int) -> list[Job]:
    """What is to be compiled: the first candidates for every static problem, and what is chosen today."""
    jobs: dict[Job, None] = {}
    for rung, case in pairs:
        today = choose(rung, case.problem(own_device()), arch).config
        jobs |= dict.fromkeys(
            (case.static, rung, config) for config in (today, *candidates(rung, case.static, arch)[:count])
        )
    return list(jobs)


def compile_all(jobs: list[Job], arch: str, deadline: float, bar: ProgressBar) -> dict[Job, Resources | str]:
    """Compiles into the cache on disk, one process a core; resources of each, or why there are none."""
    built: dict[Job, Resources | str] = {}
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_compile, job, arch): job for job in jobs}
        try:
            for future in as_completed(futures, timeout=max(0.0, deadline - time.monotonic())):
                job = futures[future]
                try:
                    built[job] = future.result()
                except Exception as error:  # whatever stops the compiler, the others are tried
                    built[job] = f"not compiled: {type(error).__name__}: {error}"
                bar.step(f"compiled D={job[0].head_dim} {job[2]}")
        except FuturesTimeout:
            pool.shutdown(wait=False, cancel_futures=True)
    return {job: built[job] for job in jobs if job in built}


def _compile(job: Job, arch: str) -> Resources:
    compile_ahead(*job, arch)
    return resources_of(*job, arch)


def time_case(case: Case, rung: Rung, tried: dict[PipelinedConfig, Resources | str], arch: str) -> list[dict]:
    """A record for each candidate; those that spill, can't be built or are wrong are not timed."""
    q, k, v = case.tensors(own_device())
    problem = case.problem(q.device)
    check = ErrorCheck.of(case, q, k, v)
    allowed = check.allowed(None)
    o = torch.empty_like(q)
    records, calls = {}, {}
    for config, found in tried.items():
        label = str(config)
        records[label] = record = {"name": rung.name, "kind": "candidate", **case.as_record()}
        record |= {"layout": config.layout.name, "config": label}
        if isinstance(found, str):
            record["reason"] = found
            continue
        record |= found.as_record()
        if found.stack_bytes:
            record["reason"] = f"spills {found.stack_bytes} bytes"
            continue
        launch = get_launch(problem, rung, config, arch)
        call = functools.partial(launch, q, k, v, o, None, problem.softmax_scale(None))
        o.fill_(torch.nan)
        call()
        error = check.error(o)
        record |= {"error": error, "error_allowed": allowed, "correct": error <= allowed}
        if record["correct"]:
            calls[label] = call
    operations = flops(problem)
    for label, (timing, stage) in halve(calls, time_interleaved).items():
        records[label] |= {**asdict(timing), "tflops": operations / timing.ms / 1e9, "stage": stage}
    return list(records.values())


def halve(calls: dict[str, Callable], timer: Callable[..., dict[str, Timing]]) -> dict[str, tuple[Timing, int]]:
    """Successive halving: each call's last timing, and the stage of ``HALVING`` that it came to, from 0."""
    found: dict[str, tuple[Timing, int]] = {}
    left = list(calls)
    for stage, (count, rounds) in enumerate(HALVING if calls else ()):
        left = left[:count]
        timings = timer({label: calls[label] for label in left}, budget_s=0.0, repeats=rounds)
        found |= {label: (timing, stage) for label, timing in timings.items()}
        left.sort(key=lambda label: timings[label].ms)
    return found


def chosen(
    case: Case, rung: Rung, records: list[dict], tried: dict[PipelinedConfig, Resources | str], arch: str
) -> list[MeasuredChoice]:
    """The choice for a case, the fastest of those that came to the last stage; none if nothing was timed."""
    last = [record for record in records if record.get("stage") == len(HALVING) - 1]
    first, *others = sorted(last, key=lambda record: record["ms"]) or [None]
    if first is None:
        return []
    by_label = {str(config): config for config in tried}
    measurement = Measurement(
        device=results.device_name(),
        commit=results.commit(),
        date=results.now(),
        versions=results.versions(),
        case=case.as_record(),
        tflops=first["tflops"],
        runner_up=others[0]["config"] if others else None,
        runner_up_tflops=others[0]["tflops"] if others else None,
    )
    dtype = dtype_name(case.static.dtype)
    return [
        MeasuredChoice(rung.name, arch, dtype, case.D, case.causal, case.S_k, by_label[first["config"]], measurement)
    ]


def write_choices(path: Path, choices: list[MeasuredChoice]) -> None:
    """Puts choices into a file in place of earlier ones for the same; the others in it stay.

    A file that can't be read (damaged, or of another version) is kept beside it under another name.

    Raises:
        ResultsNotWrittenError: the system refused.
    """
    if not choices:
        return
    try:
        merged = {choice.key: choice for choice in (*_choices_in(path), *choices)}
        results.write_whole(path, dumps(merged.values()))
    except OSError as error:
        raise ResultsNotWrittenError(f"can't write the choices to {path}: {error.strerror or error}") from error


def _choices_in(path: Path) -> tuple[MeasuredChoice, ...]:
    try:
        return loads(path.read_text())
    except FileNotFoundError:
        return ()
    except (ValueError, RecursionError) as error:
        names = (path.with_name(f"{path.name}.unread{number or ''}") for number in itertools.count())
        kept = path.replace(next(name for name in names if not name.exists()))
        progress(f"{path} can't be read ({error}); it is kept as {kept}")
        return ()


def _is_default(args: argparse.Namespace) -> bool:
    others = (args.set, args.batch, args.heads, args.heads_kv, args.causal)
    no_others = args.dtype == "bf16" and all(option is None for option in others)
    return no_others and all(getattr(args, key) == DEFAULTS[key] for key in DEFAULTS)


def _case_of(record: dict) -> Case:
    return Case(**{key: record[key] for key in Case.__dataclass_fields__})


def _table(choices: list[MeasuredChoice]) -> str:
    rows = []
    for choice in choices:
        found = choice.measurement
        rows.append([
            choice.rung,
            str(Case(**found.case)),
            str(choice.config),
            cell(found.tflops, ".1f"),
            cell(found.runner_up_tflops, ".1f"),
            found.runner_up or "-",
        ])  # fmt: skip
    return plain_table(["rung", "case", "chosen", "TFLOP/s", "runner-up's", "runner-up"], rows, text_columns=3)
