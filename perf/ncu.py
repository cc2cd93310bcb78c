"""Nsight Compute: where it is, how it is run, what its CSV says, and what its refusals ask for."""

from __future__ import annotations

import csv
import functools
import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from perf import results

MISSING = (
    "ncu was not found on the PATH, in $CUDA_HOME/bin, under /usr/local/cuda* or under /opt/nvidia/nsight-compute: "
    "install Nsight Compute (it comes with the CUDA toolkit), or set CUDA_HOME to a toolkit that has it"
)
# What ncu prints → what to do about it.
_REMEDIES = {
    "ERR_NVGPUCTRPERM": "the driver lets only administrators read the GPU's counters: run the command as root, or load "
    "the kernel module with NVreg_RestrictProfilingToAdminUsers=0 and reboot (in a container: add "
    "--cap-add=SYS_ADMIN), see https://developer.nvidia.com/ERR_NVGPUCTRPERM",
    "Failed to find metric": "this ncu doesn't know a counter that it was asked for: take the ncu of a newer toolkit",
    "driver resource": "another profiler holds the GPU's counters: end it (DCGM: dcgmi profile --pause) and try again",
}
_TAIL = 2000  # characters of ncu's output that an error shows

# Wavefronts of the instructions of one kind themselves; exact, where the l1tex counters hold arbitration too.
WAVEFRONTS = "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
CONFLICTS = "sm__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"

MARK = "spin_kernel"  # what PyTorch calls the kernel of torch.cuda._sleep


class NcuError(RuntimeError):
    """ncu failed, or saw other kernels than those that were launched; the text says what to do."""


def find_ncu() -> str | None:
    """Nsight Compute's command line: on the PATH, in CUDA_HOME, or where its installers put it; None without one."""
    if found := shutil.which("ncu"):
        return found
    homes = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for home in homes:
        if found := shutil.which("ncu", path=str(home)):
            return found
    patterns = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
    found = sorted(file for pattern in patterns for file in glob.glob(pattern))
    return found[-1] if found else None


def run_ncu(
    ncu: str,
    options: Sequence[str],
    python: Sequence[str],
    *,
    clock_control: str = "none",
    page: str = "raw",
) -> str:
    """Standard output of ncu over a Python process: CSV and what the process printed.

    Args:
        ncu: path of ncu.
        options: which kernels and which counters.
        python: arguments of the interpreter: what launches the kernels.
        clock_control: "none", or "base" to lock the clocks to their base frequency while ncu measures.
        page: "raw" (a row a launch) or "source" (a row an instruction).

    Raises:
        NcuError: a non-zero exit status or an error of ncu's; with the remedy, if the output names a known reason.
    """
    command = [ncu, "--csv", "--page", page, "--print-units", "base", "--print-kernel-base", "function"]
    command += ["--clock-control", clock_control, *options, sys.executable, *python]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=results.ROOT)
    except OSError as error:
        raise NcuError(f"{ncu} can't be started: {error.strerror or error}") from error
    output = done.stdout + done.stderr
    if done.returncode or "==ERROR==" in output:
        raise failure(f"ncu ended with status {done.returncode}", output)
    return done.stdout


def failure(what: str, output: str) -> NcuError:
    """An error that says what happened, what to do where that is known, and the end of ncu's output."""
    remedies = [text for reason, text in _REMEDIES.items() if re.search(rf"{reason}\b", output)]
    return NcuError("\n".join([what, *remedies, output[-_TAIL:].strip()]))


def parse_ncu(text: str) -> list[dict[str, str]]:
    """The rows of ``ncu --csv --page raw``, a launch each, in the order of launches.

    Lines that are not CSV (ncu's own, the program's) and the row of units are left out.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if (row.get("ID") or "").isdecimal()]
    return sorted(rows, key=lambda row: int(row["ID"]))


def launched(row: dict[str, str]) -> str:
    """The kernel's name without its arguments."""
    return row["Kernel Name"].partition("(")[0]


def mark() -> None:
    """Launches the kernel that ends a group of launches; see ``split_at_marks``."""
    torch.cuda._sleep(1)


def split_at_marks(rows: Sequence[dict[str, str]], expected: int) -> list[list[dict[str, str]]]:
    """The launches before each mark, the marks left out: what one call launched, however many kernels that are.

    Raises:
        NcuError: not as many marks as expected, a group without a launch, or launches after the last mark.
    """
    groups: list[list[dict[str, str]]] = [[]]
    for row in rows:
        if MARK in launched(row):
            groups.append([])
        else:
            groups[-1].append(row)
    *whole, rest = groups
    if len(whole) != expected or not all(whole) or rest:
        sizes = [len(group) for group in whole]
        raise NcuError(f"ncu saw {len(whole)} calls of {sizes} kernels and {len(rest)} more, not {expected} calls")
    return whole


def number(row: dict[str, str], metric: str) -> float:
    """A counter of one launch, in base units: nanoseconds, bytes, per cent."""
    return float(row[metric].replace(",", ""))


def count(row: dict[str, str], metric: str) -> int:
    """A counter of one launch that counts things."""
    return int(number(row, metric))


@functools.cache
def available_metrics(ncu: str) -> frozenset[str]:
    """Base names of the counters of this machine's card, as ``ncu --query-metrics`` lists them.

    Raises:
        NcuError: ncu can't tell.
    """
    done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True)
    found = re.findall(r"^\s*([a-z]\w*__\w+)", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        raise failure("ncu --query-metrics named no counters", done.stdout + done.stderr)
    return frozenset(found)
