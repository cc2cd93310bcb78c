"""compute-sanitizer's summaries are read for what they say, and its absence is said."""

from __future__ import annotations

import stat

import pytest
import torch

from perf import sanitize
from perf.__main__ import main


@pytest.mark.parametrize(
    "text, errors",
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= Invalid __shared__ write\n========= ERROR SUMMARY: 1 error\n", 1),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)\n", 3),
        ("Error: no device\n", -1),
        ("", -1),
    ],
)
def test_summaries(text, errors):
    assert sanitize.read_summary(text)[0] == errors


@pytest.mark.parametrize(
    "status, text, errors", [(0, "ERROR SUMMARY: 0 errors", 0), (9, "ERROR SUMMARY: 0 errors", -1)]
)
def test_a_process_that_fails_is_no_clean_run(tmp_path, status, text, errors):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '========= {text}'\nexit {status}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    assert sanitize.sanitize(str(tool), "memcheck", "kernel1")["errors"] == errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["sanitize"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
