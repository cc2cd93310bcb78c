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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
_UNITS = ("--print-units", "base", "--print-kernel-base", "function")
_RAW = ("--csv", "--page", "raw", *_UNITS)
_SOURCE = ("--csv", "--page", "source", "--print-source", "cuda,sass")
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


def run_ncu(ncu: str, options: Sequence[str], python: Sequence[str]) -> str:
    """Runs a Python process under ncu, with the clocks of real work.

    Args:
        ncu: path of ncu.
        options: which kernels and which counters.
        python: arguments of the interpreter: what launches the kernels.

    Returns:
        A CSV row a launch, and what the process printed.

    Raises:
        NcuError: a non-zero exit status or an error of ncu's; with the remedy, if the output names a known reason.
    """
    return _output([ncu, *_RAW, "--clock-control", "none", *options, sys.executable, *python])


def write_report(ncu: str, report: Path, options: Sequence[str], python: Sequence[str], clock_control: str) -> str:
    """As ``run_ncu``, with the counters in a report file that ``read_report`` shows.

    Args:
        report: the file, .ncu-rep.
        clock_control: "none", or "base" to lock the clocks to their base frequency while ncu measures.

    Returns:
        What the process printed, and ncu.
    """
    command = [ncu, "--force-overwrite", "--export", str(report), "--clock-control", clock_control]
    return _output([*command, *options, sys.executable, *python])


def read_report(ncu: str, report: Path) -> tuple[list[dict[str, str]], list[SourceLine]]:
    """The launches of a report, and the source lines of those kernels that were compiled with line info."""
    with ThreadPoolExecutor(2) as pool:  # to read a report takes ncu seconds
        launches, lines = pool.map(_output, ([ncu, "--import", str(report), *page] for page in (_RAW, _SOURCE)))
    return parse_ncu(launches), parse_source(lines)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=results.ROOT)
    except OSError as error:
        raise NcuError(f"{command[0]} can't be started: {error.strerror or error}") from error
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


@dataclass(frozen=True)
class SourceLine:
    """What ncu counted at one line of the source: samples of stalled warps, wavefronts of shared memory."""

    kernel: str
    file: str
    line: int
    code: str
    samples: int
    wavefronts: int
    ideal: int


# A line of source, whose text may hold quotes that ncu doesn't escape; "-" stand where an instruction has its own.
_SOURCE_ROW = re.compile(r'"(\d+)","(.*?)","-","-",(.*)')


def parse_source(text: str) -> list[SourceLine]:
    """The lines of ``ncu --csv --page source --print-source cuda,sass``; rows of single instructions are left out."""
    found = []
    kernel = file = ""
    columns: list[str] = []
    for row in text.splitlines():
        if row.startswith('"File Path"'):
            file = Path(next(csv.reader([row]))[1]).name
        elif row.startswith('"Function Name"'):
            kernel = next(csv.reader([row]))[1]
        elif row.startswith('"Line No"'):
            columns = next(csv.reader([row]))[4:]
        elif match := _SOURCE_ROW.fullmatch(row):
            values = dict(zip(columns, next(csv.reader([match[3]])), strict=False))
            keys = ("Warp Stall Sampling (All Samples)", "L1 Wavefronts Shared", "L1 Wavefronts Shared Ideal")
            counts = (int(values.get(key, "0").replace(",", "")) for key in keys)
            found.append(SourceLine(kernel, file, int(match[1]), match[2].strip(), *counts))
    return found


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
