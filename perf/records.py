"""Results files: perf/results/<device>/<what>.json, with what is needed to judge them."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def device_slug(name: str) -> str:
    """A device's name as a folder: "NVIDIA H200" → "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def write_results(what: str, command: str, records: list[dict]) -> Path:
    """Writes the records of one command run on the current GPU; returns the file's path."""
    device = torch.cuda.get_device_name()
    content = {
        "command": command,
        "commit": _output("git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40", "--dirty"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device,
        "versions": {
            "torch": torch.__version__,
            "cutlass_dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        },
        "records": records,
    }
    path = RESULTS / device_slug(device) / f"{what}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
