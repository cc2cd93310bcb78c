"""Results files: ``perf/results/<device>/<what>.json``, written by commands and never by hand."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from cute_fa.cache import slug

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "perf" / "results"
COMPILED = "compiled"  # in place of a device, for what was compiled and not run
COMMIT_VARIABLE = "CUTE_FA_COMMIT"

_PACKAGES = {
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "flash_attn_4": "flash-attn-4",
}


def device_name() -> str:
    """The current CUDA device's name, or "compiled" where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else COMPILED


def results_path(device: str, what: str) -> Path:
    """Where the results ``what`` of a device lie."""
    return RESULTS / slug(device) / f"{what}.json"


def make_document(records: list[dict], device: str, ok: bool = True) -> dict:
    """Records with what a reader needs to judge them: command, commit, date, device and versions.

    ``ok`` is false where the command found something wrong, such as a rung whose error is too large.
    """
    return {
        "command": shlex.join(["python", "-m", "perf", *sys.argv[1:]]),
        "commit": commit(),
        "date": now(),
        "device": device,
        "ok": ok,
        "versions": versions(),
        "records": records,
    }


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_results(path: Path, document: dict) -> None:
    """Writes a results file whole or not at all, one record a line."""
    head = {key: value for key, value in document.items() if key != "records"}
    records = ",\n  ".join(json.dumps(record) for record in document["records"])
    write_whole(path, json.dumps(head, indent=1)[:-2] + f',\n "records": [\n  {records}\n ]\n}}\n')


def write_whole(path: Path, text: str) -> None:
    """Writes a file, and its folder, whole or not at all.

    Raises:
        OSError: the system refused.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_results(path: Path) -> dict | None:
    """The document of a results file, or None if there is no such file.

    Raises:
        ValueError: the file is not one that a command wrote.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    missing = {"command", "commit", "date", "device", "versions", "records"} - set(document)
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    return document


@functools.cache
def commit() -> str:
    """The commit of the source: with "-dirty" if more than results and tables differ from it.

    ``CUTE_FA_COMMIT`` names it for a copy of the tree without its history; else that is "unknown".
    """
    if told := os.environ.get(COMMIT_VARIABLE):
        return told
    head = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    generated = (":!perf/results", ":!README.md", ":!docs")
    changes = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", *generated)
    return f"{head}-dirty" if changes else head


def versions() -> dict[str, str]:
    """Versions of everything that a measurement depends on; what isn't installed is left out."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for key, package in _PACKAGES.items():
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = driver.splitlines()[0] if driver else "unknown"
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
