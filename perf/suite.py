"""Runs the test suite and records how many tests passed, failed and were skipped on this machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from perf import results
from perf.output import add_output_arguments, emit, progress, wants_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf tests``."""
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """pytest's exit status; its output goes to standard error."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-n", "auto", "tests", f"--junitxml={report}"]
        progress("running the tests")
        status = subprocess.run(command, cwd=results.ROOT, stdout=sys.stderr).returncode
        if not report.exists():
            progress(f"pytest ended with status {status} and no report")
            return status or 1
        records = read_junit(report.read_text())
    if wants_tables(args):
        print(
            "\n".join(
                f"{r['name']}: {r['passed']} passed, {r['failed']} failed, {r['skipped']} skipped" for r in records
            )
        )
    path = results.results_path(results.device_name(), "tests")
    emit(args, results.make_document(records, results.device_name(), status == 0), path)
    return status


def read_junit(text: str) -> list[dict]:
    """One record a test file from pytest's JUnit report: passed, failed (errors too), skipped, seconds."""
    records: dict[str, dict] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        name = case.get("classname", "")
        record = records.setdefault(
            name, {"name": name, "kind": "tests", "passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
        )
        outcomes = {child.tag for child in case}
        outcome = "failed" if outcomes & {"failure", "error"} else "skipped" if "skipped" in outcomes else "passed"
        record[outcome] += 1
        record["seconds"] = round(record["seconds"] + float(case.get("time", 0.0)), 3)
    return list(records.values())
