"""Runs every rung on small problems under compute-sanitizer: stray accesses and races on the hardware itself."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from perf import results
from perf.cases import Case
from perf.contestants import Unavailable, add_rung_arguments, rungs_from
from perf.output import add_output_arguments, emit, plain_table, progress, wants_tables

TOOLS = ("memcheck", "racecheck")
CASES = (
    Case("bf16", 1, 200, 333, 4, 2, 128, True),
    Case("fp16", 2, 65, 190, 2, 2, 64, False),
    Case("bf16", 1, 2, 1100, 8, 2, 128, True),
    Case("bf16", 1, 200, 150, 2, 1, 256, True),
)
SECONDS = 120
MISSING = "compute-sanitizer was not found on the PATH or in $CUDA_HOME/bin: it comes with the CUDA toolkit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf sanitize``."""
    add_rung_arguments(parser)
    parser.add_argument("--launch", action="store_true", help="only launch the kernels (what compute-sanitizer runs)")
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """1 if a tool found something, 2 without a GPU or the tool."""
    if not torch.cuda.is_available():
        progress(
            "python -m perf sanitize: no CUDA device is visible to PyTorch; on the CPU the emulator checks for races"
        )
        return 2
    if args.launch:
        return _launch(args)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        progress(f"python -m perf sanitize: {MISSING}")
        return 2
    names = [rung.name for rung in rungs_from(args)]
    _launch(args)  # compiles, so that no tool has to watch that
    jobs = [(tool, name) for tool in TOOLS for name in names]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        outcomes = list(pool.map(lambda job: sanitize(sanitizer, *job), jobs))
    records = [
        {"name": name, "kind": "sanitizer", "tool": tool, **outcome}
        for (tool, name), outcome in zip(jobs, outcomes, strict=True)
    ]
    clean = all(record["errors"] == 0 for record in records)
    if wants_tables(args):
        rows = [[r["name"], r["tool"], "clean" if r["errors"] == 0 else r["summary"]] for r in records]
        print(plain_table(["kernel", "tool", "outcome"], rows))
    emit(args, results.make_document(records, results.device_name(), clean), _path())
    return 0 if clean else 1


def _path() -> Path:
    return results.results_path(results.device_name(), "sanitizer")


def find_sanitizer() -> str | None:
    """compute-sanitizer's path; None without one."""
    if found := shutil.which("compute-sanitizer"):
        return found
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    return next((found for home in homes if (found := shutil.which("compute-sanitizer", path=f"{home}/bin"))), None)


def sanitize(sanitizer: str, tool: str, kernel: str) -> dict:
    """Errors that a tool reports of one rung, and its summary; -1 where it gave none."""
    command = [sanitizer, "--tool", tool]
    command += [sys.executable, "-m", "perf", "sanitize", "--launch", "--kernels", kernel]
    try:
        done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"errors": -1, "summary": f"took longer than {SECONDS} s"}
    errors, summary = read_summary(done.stdout + done.stderr)
    if done.returncode and errors == 0:
        return {"errors": -1, "summary": f"ended with status {done.returncode}"}
    return {"errors": errors, "summary": summary}


def read_summary(text: str) -> tuple[int, str]:
    """(errors, the line that says so) of compute-sanitizer's output; (-1, ...) if it has no summary."""
    found = re.search(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed.*", text)
    if found is None:
        tail = text.strip().splitlines()
        return -1, f"no summary; it ended with: {tail[-1] if tail else 'nothing'}"
    return int(found.group(1) or found.group(2)), found.group(0)


def _launch(args: argparse.Namespace) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    for case in CASES:
        q, k, v = case.tensors(device)
        for contestant in rungs_from(args):
            try:
                contestant.prepare(case, q, k, v)
            except Unavailable as reason:
                progress(f"{contestant.label}, {case}: {reason}")
    torch.cuda.synchronize()
    return 0
