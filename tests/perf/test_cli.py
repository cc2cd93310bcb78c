"""The command line: what it prints without a GPU, and how it refuses."""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import json
import os
import subprocess
import sys

import pytest
import torch

from cute_fa.emulator import EmulationFault, UnknownInstructionError
from cute_fa.ladder import KERNELS
from perf import inspect_table, peers, registry, results, time_table
from perf.__main__ import main
from perf.contestants import Contestant
from perf.inspect_table import NOT_TIMED
from perf.timing import Timing

SMALL = ("--head-dim", "64", "--kernels", "kernel2", "--no-causal")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_machine_without_a_gpu(tmp_path):
    command = [sys.executable, "-m", "perf", *SMALL, "--output", str(tmp_path / "out.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=results.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert NOT_TIMED in done.stdout and "compiled, not run" in done.stdout
    document = results.read_results(tmp_path / "out.json")
    assert {record["arch"] for record in document["records"]} >= {"sm_80", "sm_90a"}
    assert document["device"] == results.COMPILED


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_machine_readable_output_is_nothing_else(form, no_gpu, tmp_path, capsys):
    argv = ["inspect", *SMALL, "--arch", "sm_90a", form, "--output", str(tmp_path / "out.json")]
    assert main(argv) == 0
    text = capsys.readouterr().out
    if form == "--json":
        (record,) = json.loads(text)["records"]
    else:
        (record,) = csv.DictReader(io.StringIO(text))
    assert record["name"] == "kernel2" and record["layout"] == "SWIZZLE_333" and record["arch"] == "sm_90a"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--dtype", "fp8"], "--dtype"),
        (["--kernels", "kernel99"], "--kernels"),
        (["--layout", "NONE"], "--layout"),
        (["--peers", "nobody"], "--peers"),
        (["--repeats", "0"], "--repeats"),
        (["--heads", "16", "--heads-kv", "3"], "--heads-kv"),
        (["--json", "--csv"], "--csv"),
        (["inspect", "--arch", "sm_75"], "--arch"),
        (["all", "--minutes", "0"], "--minutes"),
        (["all", "--steps", "nothing"], "--steps"),
        (["nothing"], "command must be one of"),
    ],
)
def test_bad_options(argv, named, capsys):
    try:
        status = main(argv)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("name", registry.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert f"python -m perf {name}" in capsys.readouterr().out


def test_every_step_of_the_evidence_is_a_command():
    for step in registry.EVIDENCE:
        assert step.argv[0] in registry.COMMANDS


def reference_contestant(name: str, kind: str, off: float = 0.0, **more) -> Contestant:
    def prepare(case, q, k, v):
        o = time_table.ErrorCheck.of(case, q, k, v).expected
        shaped = o.reshape(case.B, case.H, case.S_q, case.D).transpose(1, 2)
        return lambda: (shaped + off).to(q.dtype)

    return Contestant(name, kind, prepare, **more)


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_timing_table_with_stand_ins(off, monkeypatch, tmp_path, capsys):
    """All of the command but the device: a rung whose error is too large is named and makes it exit 1."""
    rung = time_table.LADDER[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(results, "device_name", lambda: "NVIDIA Test")
    monkeypatch.setattr(results, "versions", dict)
    monkeypatch.setattr(time_table, "own_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(time_table, "_ceiling_records", lambda args: [{"name": "c", "kind": "ceiling", "tflops": 1.0}])
    monkeypatch.setattr(
        time_table, "rungs_from", lambda args: [reference_contestant(rung.name, "rung", off, rung=rung)]
    )
    flash = reference_contestant("sdpa_flash", "peer")
    monkeypatch.setattr(time_table, "PEERS", {"sdpa_flash": flash, "flash_attn_4": peers.PEERS["flash_attn_4"]})

    def times(calls, **_):
        return {name: Timing(0.5, 0.4, 0.6, 10) for name in calls}

    monkeypatch.setattr(time_table, "time_interleaved", times)
    output = tmp_path / "out.json"
    argv = ["--seqlen", "32", "--batch", "1", "--heads", "2", "--head-dim", "64", "--causal", "--output", str(output)]
    assert main(argv) == (1 if off else 0)
    captured = capsys.readouterr()
    assert ("WRONG: kernel1 (PLAIN), S_q=32" in captured.err) == bool(off)
    document = results.read_results(output)
    assert document["ok"] == (not off)
    _, kernel1, peer, absent = document["records"]
    assert kernel1["tflops"] == pytest.approx(4 * 2 * 32 * 32 * 64 / 2 / 0.5e-3 / 1e12)
    assert (kernel1["S_q"], kernel1["causal"], kernel1["layout"], kernel1["auto"]) == (32, True, "PLAIN", False)
    assert kernel1["correct"] == (not off) and kernel1["error_allowed"] == peer["error_allowed"]
    assert "ms" not in absent and absent["reason"]
    assert "flash_attn_4 not run" in captured.out and "kernel1 PLAIN" in captured.out


def test_a_layout_by_expression(no_gpu, tmp_path, capsys):
    expression = "S<2,3,3> o (8,64):(64,1)"
    output = tmp_path / "out.json"
    argv = ["inspect", *SMALL, "--arch", "sm_90a", "--layout", "PLAIN", expression, "--output", str(output)]
    assert main(argv) == 0
    assert [record["layout"] for record in results.read_results(output)["records"]] == ["PLAIN", expression]
    with pytest.raises(SystemExit) as exit_:
        main(["--layout", "ROTATE"])
    assert exit_.value.code == 2
    assert "--layout: must be a layout that a kernel can take" in capsys.readouterr().err


def options(name: str, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module = importlib.import_module(registry.COMMANDS[name])
    module.add_arguments(parser)
    return parser.parse_args(argv)


EMULATED = ("--kernels", "kernel1", "--head-dim", "64", "--no-causal")


def test_a_layout_of_24_columns_is_emulated():
    """LLVM makes dp2a of its offsets."""
    text, faulty = time_table._emulated(options("time", *EMULATED, "--layout", "(2,16):(24,1)"))
    assert "ldmatrix.trans" in text and "not emulated" not in text and not faulty


def test_the_emulated_table_says_that_no_fault_was_found():
    text, faulty = time_table._emulated(options("time", *EMULATED))
    assert text.splitlines()[-1] == ("The emulator found no race, stray access or uninitialised read in the run above.")
    assert not faulty


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            EmulationFault("the emulated kernel has 1 fault:\n  race: here"),
            "FAULTY: kernel1, D=64: the emulated kernel",
        ),
        (UnknownInstructionError("line 7: what.b32"), "kernel1 not emulated: line 7: what.b32"),
    ],
)
def test_what_went_wrong_in_the_emulator_is_shown(error, shown, monkeypatch):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(time_table, "emulated_records", fail)
    text, faulty = time_table._emulated(options("time", *EMULATED))
    assert shown in text and "found no race" not in text
    assert faulty == isinstance(error, EmulationFault)


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]])
def test_host_without_a_gpu_prints_no_results(form, no_gpu, capsys):
    assert main(["host", *form]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "Nothing was measured" in captured.err


@pytest.mark.parametrize("where", ["/proc/x", "folder", "folder/file/x.json"])
def test_results_that_cannot_be_written_are_a_line(where, no_gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(inspect_table, "inspect_record", lambda *args: {"name": "stand-in"})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    output = str(tmp_path / where)
    assert main(["inspect", *SMALL, "--arch", "sm_90a", "--json", "--output", output]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["records"] == [{"name": "stand-in"}]
    last = captured.err.splitlines()[-1]
    assert last.startswith(f"python -m perf inspect: error: can't write the results to {output}: ")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--head-dim", "64", "128"], "resources"),
        (["--head-dim", "128", "64", "64"], "resources"),
        (["--head-dim", "64", "128", "--kernels", *reversed(KERNELS)], "resources"),
        (["--head-dim", "64", "64"], "custom"),
        (["--head-dim", "64", "128", "--kernels", "kernel1"], "custom"),
        ([], "custom"),
    ],
)
def test_only_the_whole_set_replaces_the_committed_resources(argv, what):
    assert inspect_table._default_path(options("inspect", *argv)).stem == what
