"""The whole evidence: what is run again, what is left out, and why."""

from __future__ import annotations

import argparse

import pytest
import torch

from perf import evidence, results
from perf.registry import EVIDENCE, Step
from perf.suite import read_junit

STEP = Step("something", ("inspect",), 2, needs_gpu=False)


@pytest.fixture
def known_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "commit", lambda: "abc")
    ran = []
    monkeypatch.setattr(evidence, "_perf", lambda argv, seconds: ran.append(argv) or 0)
    return ran


def test_a_step_is_run_once_a_commit(known_commit, monkeypatch):
    assert evidence._run(STEP, 600, force=False) == ("done", True)
    assert known_commit == [("inspect",), ("tables",)]
    path = results.results_path(results.COMPILED, STEP.what)
    results.write_results(path, results.make_document([{"name": "x"}], results.COMPILED))
    outcome, good = evidence._run(STEP, 600, force=False)
    assert good and "are of this commit" in outcome and len(known_commit) == 2
    assert evidence._run(STEP, 600, force=True) == ("done", True)
    for other in ("def", "abc-dirty", "unknown"):
        monkeypatch.setattr(results, "commit", lambda other=other: other)
        assert not evidence.is_current(path)


def test_results_that_are_not_good_are_made_again(known_commit):
    path = results.results_path(results.COMPILED, STEP.what)
    results.write_results(path, results.make_document([{"name": "x"}], results.COMPILED, ok=False))
    assert not evidence.is_current(path)


def test_the_budget_leaves_a_step_out_and_says_so(known_commit):
    outcome, good = evidence._run(STEP, 90, force=False)
    assert not good and outcome == "skipped: needs 2 min, 1.5 left" and not known_commit


def test_without_a_gpu_the_rest_is_named(known_commit, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    steps = [step.what for step in EVIDENCE]
    assert evidence.main(argparse.Namespace(minutes=30.0, force=False, steps=steps)) == 0
    lines = capsys.readouterr().out.splitlines()
    for step in EVIDENCE:
        line = next(line for line in lines if line.split()[0] == step.what)
        assert ("no CUDA device" in line) == step.needs_gpu


def test_a_step_that_takes_too_long_is_ended():
    assert evidence._perf(("inspect", "--arch", "sm_80"), 0.2) is None


def test_read_junit():
    text = """<testsuites><testsuite>
    <testcase classname="tests.a" name="x" time="0.5"/>
    <testcase classname="tests.a" name="y" time="0.25"><skipped/></testcase>
    <testcase classname="tests.b" name="z" time="1"><failure/></testcase>
    <testcase classname="tests.b" name="w" time="1"><error/></testcase>
    </testsuite></testsuites>"""
    first, second = read_junit(text)
    assert first == {"name": "tests.a", "kind": "tests", "passed": 1, "failed": 0, "skipped": 1, "seconds": 0.75}
    assert (second["passed"], second["failed"]) == (0, 2)
