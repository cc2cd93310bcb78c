"""Gathers the whole evidence: tests, timings, host overhead and all that is registered; then the tables and pictures.

Each step writes its results file when it ends. A step whose file is of the present commit is not run
again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from perf import results
from perf.output import plain_table, progress
from perf.registry import EVIDENCE, Step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf all``."""
    names = [step.what for step in EVIDENCE]
    parser.add_argument("--minutes", type=minutes, default=30.0, metavar="N", help="time budget (default: 30)")
    parser.add_argument("--force", action="store_true", help="run steps whose results are of this commit, too")
    parser.add_argument(
        "--steps", nargs="+", choices=names, default=names, metavar="STEP", help=f"of {', '.join(names)} (default: all)"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the steps; 1 if one failed or was left out for lack of time."""
    deadline = time.monotonic() + 60 * args.minutes
    outcomes = []
    for step in EVIDENCE:
        if step.what not in args.steps:
            continue
        started = time.monotonic()
        outcome, good = _run(step, deadline - started, args.force)
        outcomes.append((step.what, outcome, f"{time.monotonic() - started:.0f} s", good))
        progress(f"== {step.what}: {outcome}")
    tables = _perf(("tables",), None)
    _perf(("plots",), None)  # says so where there is no matplotlib; the figures are in the tables all the same
    print(plain_table(["step", "outcome", "took"], [list(outcome[:3]) for outcome in outcomes]))
    return 0 if tables == 0 and all(good for *_, good in outcomes) else 1


def is_current(path: Path) -> bool:
    """Whether a results file is good and of the present commit; never so for changed or unknown source."""
    commit = results.commit()
    document = results.read_results(path)
    if document is None or not document.get("ok", True) or commit.endswith(("-dirty", "unknown")):
        return False
    return document["commit"] == commit


def _run(step: Step, seconds_left: float, force: bool) -> tuple[str, bool]:
    """What became of a step, and whether that is as it should be."""
    if step.needs_gpu and not torch.cuda.is_available():
        return "skipped: no CUDA device is visible to PyTorch", True
    path = results.results_path(results.device_name() if step.needs_gpu else results.COMPILED, step.what)
    if not force and is_current(path):
        return "skipped: its results are of this commit", True
    if seconds_left < 60 * step.minutes:
        return f"skipped: needs {step.minutes:g} min, {max(0.0, seconds_left) / 60:.1f} left", False
    progress(f"== {step.what}: python -m perf {' '.join(step.argv)}")
    status = _perf(step.argv, seconds_left)
    if status is None:
        return "stopped: the time budget was spent", False
    # At once, since a later step tests that the tables are those of the results.
    _perf(("tables",), None)
    return ("done" if status == 0 else f"failed with status {status}"), status == 0


def _perf(argv: tuple[str, ...], seconds: float | None) -> int | None:
    """Exit status of ``python -m perf`` in a process of its own; None if it was ended for taking longer."""
    process = subprocess.Popen([sys.executable, "-m", "perf", *argv], cwd=results.ROOT, start_new_session=True)
    try:
        return process.wait(seconds)
    except BaseException as interruption:
        os.killpg(process.pid, signal.SIGKILL)  # its children too
        process.wait()
        if isinstance(interruption, subprocess.TimeoutExpired):
            return None
        raise


def minutes(text: str) -> float:
    """A time budget from the command line."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number of minutes greater than 0, got {text!r}")
    return value
