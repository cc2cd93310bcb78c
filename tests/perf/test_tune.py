"""Tuning, as far as it goes without a GPU: the candidates, halving, files, refusals, and what is printed."""

from __future__ import annotations

import argparse
import json
import math
import time

import pytest
import torch

from cute_fa.arch import get_arch, smem_fits
from cute_fa.choices.files import loads, read_choices
from cute_fa.choices.lookup import RULE, SHIPPED
from cute_fa.ladder import LADDER
from cute_fa.problem import StaticProblem
from perf import choice_table, output, results, tune
from perf.__main__ import main
from perf.candidates import MIN_WARPS, SPACE, candidates, least_registers, reads_per_score, register_limit
from perf.cases import Case
from perf.correctness import ErrorCheck
from perf.output import ProgressBar, ResultsNotWrittenError
from perf.resources import resources_of
from perf.timing import Timing
from tests.cute_fa.test_choices import measured

RUNG = next(rung for rung in LADDER if rung.preferences)
CASE = Case("bf16", 1, 128, 128, 2, 2, 64, False)


# --- candidates --------------------------------------------------------------------------------------------


def static(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> StaticProblem:
    return StaticProblem(dtype, head_dim, causal=False, return_lse=False)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_candidates_fit_and_differ(arch, head_dim):
    found = candidates(RUNG, static(head_dim), arch)
    assert 10 < len(found) < math.prod(len(values) for values in SPACE.values())
    assert len({str(config) for config in found}) == len(found)  # records tell them apart by their text
    for config in found:
        RUNG.check(static(head_dim), config, arch)
        assert smem_fits(get_arch(arch), RUNG.kernel.smem_bytes(static(head_dim), config)) >= config.ctas_per_sm
        assert config.num_threads // 32 * config.ctas_per_sm >= MIN_WARPS
        assert least_registers(config, head_dim) <= register_limit(config) <= 255
        assert config.layout == RUNG.config.layout and config.lazy_rescale == RUNG.config.lazy_rescale
    assert [reads_per_score(config) for config in found] == sorted(reads_per_score(config) for config in found)


def test_candidates_that_need_no_compiling_to_be_refused():
    found = {(c.tile_m, c.tile_n, c.num_threads, c.num_stages, c.q_in_registers, c.ctas_per_sm)
             for c in candidates(RUNG, static(128), "sm_90a")}  # fmt: skip
    assert (128, 64, 128, 1, False, 2) in found
    assert (128, 64, 128, 1, False, 1) not in found  # compiled alike
    assert (128, 64, 128, 2, True, 2) not in found  # O, S and Q alone are 256 registers
    assert not any(c[0] == 64 and c[2] == 256 for c in found)  # 8 rows a warp
    assert (64, 128, 128, 2, False, 1) not in found  # four warps
    small = {
        (c.tile_n, c.num_stages)
        for c in candidates(RUNG, static(128), "sm_86")
        if (c.tile_m, c.num_threads) == (128, 128)
    }
    assert small == {(32, 1)}  # two CTAs of 64 KB don't fit 100


def test_fp16_keeps_no_first_reference():
    assert {config.first_reference for config in candidates(RUNG, static(64), "sm_90a")} == {False, True}
    assert not any(config.first_reference for config in candidates(RUNG, static(64, torch.float16), "sm_90a"))


def test_what_is_chosen_today_is_tried_too():
    case = Case("bf16", 1, 1024, 1024, 2, 2, 128, True)
    jobs = tune.jobs_of([(RUNG, case), (RUNG, case)], "sm_80", 1)
    assert [job[0] for job in jobs] == [case.static] * 2
    assert [job[2] for job in jobs][1] == candidates(RUNG, case.static, "sm_80")[0]
    assert [job[2].tile_n for job in jobs] == [32, 64]


def test_compiled_in_other_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path))
    job = (CASE.static, RUNG, candidates(RUNG, CASE.static, "sm_90a")[-1])
    built = tune.compile_all([job], "sm_90a", time.monotonic() + 300, ProgressBar(1))
    assert len(list(tmp_path.glob("*.o"))) == len(list(tmp_path.glob("*.npz"))) == 1
    assert built == {job: resources_of(*job, "sm_90a")}
    assert "1/1 compiled D=64" in capsys.readouterr().err
    assert tune.compile_all([job], "sm_90a", time.monotonic(), ProgressBar(1)) == {}


# --- timing ------------------------------------------------------------------------------------------------


def timing(ms: float) -> Timing:
    return Timing(ms, ms, ms, 3)


def test_halving_times_the_fast_ones_longest():
    calls = {str(i): (lambda: None) for i in range(16)}
    asked = []

    def timer(some, *, budget_s, repeats):
        asked.append((sorted(some, key=int), repeats))
        return {label: timing(1.0 + abs(int(label) - 5)) for label in some}

    found = tune.halve(calls, timer)
    assert [(len(labels), rounds) for labels, rounds in asked] == [(16, 3), (6, 6), (3, 20)]
    assert asked[-1][0] == ["4", "5", "6"] and set(found) == set(calls)
    assert {label: stage for label, (_, stage) in found.items() if stage} == dict.fromkeys("237", 1) | dict.fromkeys(
        "456", 2
    )
    assert tune.halve({}, timer) == {}


@pytest.fixture
def stand_ins(monkeypatch, tmp_path):
    """All of the command but the device: kernels that copy the right output, compiled resources, a clock."""
    tried = candidates(RUNG, CASE.static, "sm_90a")[:4]
    wrong, spilling, fast, _ = tried
    expected = {}
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(tune, "own_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(results, "device_name", lambda: "NVIDIA Test 4090")
    monkeypatch.setattr(results, "versions", lambda: {"torch": "2"})
    usage = {config: resources_of(CASE.static, RUNG, config, "sm_90a") for config in (fast,)}

    def compile_all(jobs, arch, deadline, bar):
        found = usage[fast]
        return {job: type(found)(**vars(found) | {"stack_bytes": 8 * (job[2] == spilling)}) for job in jobs}

    def launch_of(problem, rung, config, arch):
        def launch(q, k, v, o, lse, scale):
            case = CASE
            key = (q.shape, problem.static)
            if key not in expected:
                expected[key] = ErrorCheck.of(case, q, k, v).expected.reshape(1, 2, -1, 64).transpose(1, 2)
            o.copy_(expected[key] + (config == wrong))

        return launch

    def time_all(calls, *, budget_s, repeats):
        assert str(spilling) not in calls and str(wrong) not in calls
        return {label: timing(0.5 if label == str(fast) else 0.6) for label in calls}

    monkeypatch.setattr(tune, "compile_all", compile_all)
    monkeypatch.setattr(tune, "get_launch", launch_of)
    monkeypatch.setattr(tune, "time_interleaved", time_all)
    monkeypatch.setattr(tune, "jobs_of", lambda pairs, arch, count: [(CASE.static, RUNG, c) for c in tried[:count]])
    return tried


ARGV = ["tune", "--head-dim", "64", "--seqlen", "128", "--batch", "1", "--heads", "2", "--no-causal"]


def test_the_fastest_right_candidate_without_spills_is_chosen(stand_ins, tmp_path, capsys):
    wrong, spilling, fast, slow = stand_ins
    path = tmp_path / "cache" / "choices" / "nvidia-test-4090.json"
    tune.write_choices(path, [measured(512, tile_n=32), measured(128)])
    out = tmp_path / "out.json"
    assert main([*ARGV, "--json", "--output", str(out)]) == 1
    captured = capsys.readouterr()
    assert f"WRONG: {RUNG.name} ({wrong})" in captured.err and f"choices written to {path}" in captured.err
    document = json.loads(captured.out)
    assert document == results.read_results(out) and not document["ok"]
    by_config = {record["config"]: record for record in document["records"]}
    assert not by_config[str(wrong)]["correct"] and "ms" not in by_config[str(wrong)]
    assert by_config[str(spilling)]["reason"] == "spills 8 bytes" and "ms" not in by_config[str(spilling)]
    assert by_config[str(fast)]["tflops"] == pytest.approx(4 * 2 * 128 * 128 * 64 / 0.5e-3 / 1e12)
    choices = {choice.key: choice for choice in read_choices(path)}
    assert len(choices) == 3  # what was measured for other problems stays
    choice = choices[RUNG.name, "sm_90a", "bfloat16", 64, False, 128]
    assert choice.config == fast and choice.measurement.runner_up == str(slow)
    assert choice.measurement.tflops > choice.measurement.runner_up_tflops > 0
    assert (choice.measurement.device, choice.measurement.versions) == ("NVIDIA Test 4090", {"torch": "2"})
    assert Case(**choice.measurement.case) == CASE


def test_ship_writes_what_comes_with_the_package(stand_ins, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune, "shipped_file", lambda arch: tmp_path / f"{arch}.json")
    main([*ARGV, "--ship", "--output", str(tmp_path / "out.json")])
    (choice,) = loads((tmp_path / "sm_90a.json").read_text())
    assert choice.config == stand_ins[2] and not (tmp_path / "cache" / "choices").exists()
    assert str(choice.config) in capsys.readouterr().out


def test_nothing_left_to_choose_from(stand_ins, tmp_path, capsys):
    argv = [*ARGV, "--candidates", "2", "--output", str(tmp_path / "out.json")]
    assert main(argv) == 1
    assert "1 of 1 problems have no choice" in capsys.readouterr().err
    assert not (tmp_path / "cache" / "choices").exists()


def test_choices_that_cannot_be_written_are_a_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ResultsNotWrittenError, match=r"can't write the choices to .*x\.json"):
        tune.write_choices(tmp_path / "file" / "x.json", [measured(512)])


@pytest.mark.parametrize("text", ["{", '{"choices": [{"rung": "kernel6"}]}', "\udcff"])
def test_a_file_that_cannot_be_read_is_kept(text, tmp_path, capsys):
    path = tmp_path / "card.json"
    path.write_text(text, errors="surrogateescape")
    tune.write_choices(path, [measured(512)])
    assert read_choices(path) == (measured(512),)
    (kept,) = set(tmp_path.iterdir()) - {path}
    assert kept.read_text(errors="surrogateescape") == text
    assert f"{path} can't be read" in (said := capsys.readouterr().err) and str(kept) in said
    path.write_text("[")
    tune.write_choices(path, [measured(512)])
    assert kept.read_text(errors="surrogateescape") == text and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("argv", "named"),
    [(["--candidates", "0"], "--candidates"), (["--minutes", "0"], "--minutes"), (["--head-dim", "65"], "--head-dim")],
)
def test_bad_options(argv, named, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["tune", *argv])
    assert exit_.value.code == 2 and named in capsys.readouterr().err


def test_a_problem_that_choices_are_not_kept_by_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["tune", "--seqlen", "512", "1x8192"]) == 2
    assert "--seqlen must be S, as many queries as keys" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_tuned(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Nothing was tuned: no CUDA device" in captured.err


def test_only_the_default_set_is_the_evidence_s():
    def default(*argv):
        parser = argparse.ArgumentParser()
        tune.add_arguments(parser)
        return tune._is_default(parser.parse_args(argv))

    assert default() and default("--ship") and default("--head-dim", "64", "128")
    for other in (
        ["--head-dim", "64"],
        ["--dtype", "fp16"],
        ["--causal"],
        ["--no-causal"],
        ["--candidates", "3"],
        ["--batch", "2"],
    ):
        assert not default(*other), other


# --- shown -------------------------------------------------------------------------------------------------


def test_the_progress_bar(monkeypatch, capsys):
    bar = ProgressBar(20)
    for i in range(20):
        bar.step(f"step {i}")
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 10 and lines[4] == f"[{'#' * 15}{'.' * 15}] 10/20 step 9" and lines[-1].endswith("20/20 step 19")
    )
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True, raising=False)
    bar = ProgressBar(2)
    bar.step("long text")
    bar.step("b")
    first, second = capsys.readouterr().err.split("\r")[1:]
    assert first.endswith("1/2 long text") and second.rstrip("\n").endswith("2/2 b        ") and second.endswith("\n")


def test_choices_are_shown_with_where_they_come_from(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "sm_90a.json"
    monkeypatch.setattr("cute_fa.choices.lookup.shipped_file", lambda arch: tmp_path / f"{arch}.json")
    tune.write_choices(path, [measured(512, tile_n=32)])
    argv = ["choices", "--head-dim", "128", "--no-causal", "--seqlen", "512", "1x4096", "--arch", "sm_80", "sm_90a"]
    assert main(argv) == 0
    rule, found = (line for line in capsys.readouterr().out.splitlines() if line.startswith("kernel6"))
    assert "sm_80" in rule and "512, 4096" in rule and rule.endswith(RULE)
    said = "NVIDIA Test, 2026-01-01, commit abc, S=512: 300.0 TFLOP/s, next 290.0 (other)"
    assert "128x32, 128 threads" in found and found.endswith(f"{SHIPPED}: {said}")
    assert main([*argv, "--json"]) == 0
    records = [record for record in json.loads(capsys.readouterr().out) if record["name"] == "kernel6"]
    assert [record["chosen_by"] for record in records] == [RULE] * 2 + [SHIPPED] * 2
    assert main([*argv, "--csv"]) == 0
    assert capsys.readouterr().out.startswith("name,arch,dtype")
    assert main(["choices", "--heads", "3", "--heads-kv", "2"]) == 2


def test_a_choice_without_a_runner_up_is_described():
    one = measured(512)
    alone = type(one.measurement)(**vars(one.measurement) | {"runner_up": None, "runner_up_tflops": None})
    text = choice_table.describe(type(one)(**vars(one) | {"measurement": alone}))
    assert text == "NVIDIA Test, 2026-01-01, commit abc, S=512: 300.0 TFLOP/s"
