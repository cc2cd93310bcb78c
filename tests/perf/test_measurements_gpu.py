"""Measurements on a device: they run, and what they say hangs together."""

from __future__ import annotations

import pytest
import torch

from cute_fa.arch import arch_of_capability
from cute_fa.ladder import LADDER
from perf import host, results
from perf.__main__ import main
from perf.cases import Case
from perf.contestants import Unavailable
from perf.correctness import ErrorCheck
from perf.peers import PEERS
from perf.timing import time_interleaved

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("cold_l2", [False, True])
def test_twice_the_work_takes_twice_the_time(cold_l2):
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    calls = {"one": lambda: a @ a, "two": lambda: (a @ a, a @ a)}
    times = time_interleaved(calls, budget_s=0.1, cold_l2=cold_l2)
    assert times["one"].ms_q1 <= times["one"].ms <= times["one"].ms_q3 and times["one"].samples >= 10
    assert 1.6 < times["two"].ms / times["one"].ms < 2.4


@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", 2, 256, 256, 4, 4, 128, True),
        Case("fp16", 1, 128, 512, 4, 4, 64, True),
        Case("bf16", 2, 128, 512, 8, 2, 128, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", PEERS)
def test_peers_compute_the_same_attention(name, case):
    q, k, v = case.tensors("cuda")
    try:
        call = PEERS[name].prepare(case, q, k, v)
    except Unavailable as reason:
        assert str(reason)
        pytest.skip(str(reason))
    check = ErrorCheck.of(case, q, k, v)
    assert check.error(call()) <= 2 * check.allowed(None)


def test_the_table(tmp_path, capsys):
    output = tmp_path / "out.json"
    argv = ["--seqlen", "512", "1024x512", "--batch", "2", "--heads", "4", "--repeats", "3", "--output", str(output)]
    assert main(argv) == 0
    document = results.read_results(output)
    assert document["device"] == torch.cuda.get_device_name() and document["records"][0]["kind"] == "ceiling"
    rungs = [record for record in document["records"] if record["kind"] == "rung"]
    arch = arch_of_capability(torch.cuda.get_device_capability())
    assert sorted(record["name"] for record in rungs) == sorted(4 * [r.name for r in LADDER if r.runs_on(arch)])
    assert all(record["correct"] and record["samples"] == 3 for record in rungs)
    assert "kernel2 SWIZZLE_333" in capsys.readouterr().out


def test_host_overhead_is_microseconds():
    records = {record["name"]: record for record in host._call_records()}
    assert 0 < records["launch alone"]["us"] <= records["forward"]["us"] < 200
