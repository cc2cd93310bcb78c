"""The profile: counters of a card that is stood in for, predictions at full size, source lines, refusals."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
import torch

from cute_fa.ladder import KERNELS, LADDER
from layouts.checks import HARDWARE_LAYOUTS
from perf import counters, emulation, ncu, profile_table, results
from perf.__main__ import main
from perf.cases import LIMITS, Case
from perf.contestants import rung_contestant
from perf.counters import COUNTERS, REST, STALL_MEANINGS, choose, counters_of, metrics_of, named_stalls, stall_reasons
from perf.ncu import NcuError
from perf.registry import EVIDENCE

CASE = Case("bf16", 1, 4096, 4096, 16, 16, 128, False)
SMALL = replace(CASE, S_q=128, S_k=256, H=2, H_kv=2)
REASONS = ("short_scoreboard", "mio_throttle", "gmma", "tex_throttle", "selected", "branch_resolving_not_issued")
AVAILABLE = frozenset(
    [counter.metrics[0].partition(".")[0] for counter in COUNTERS]
    + [counters._STALL.format(reason) for reason in REASONS]
)
FILES = sorted(results.RESULTS.glob("*/profile.json"))


def row(name: str, duration: float, **values: float) -> dict[str, str]:
    """A launch as ncu lists it: every counter 1 but those that are given."""
    found = dict.fromkeys(metrics_of(AVAILABLE), "1")
    by_key = choose(AVAILABLE) | {reason: f"{counters._STALL.format(reason)}.ratio" for reason in REASONS}
    by_key["issued"] = counters._ISSUED
    found |= {by_key[key]: f"{value:,}" for key, value in values.items()}
    return found | {"Kernel Name": name, counters._DURATION: f"{duration:,}"}


def test_the_first_name_that_the_card_has_is_taken():
    chosen = choose(AVAILABLE)
    assert chosen["wavefronts_ldsm"] == ncu.WAVEFRONTS.format("ldsm")
    assert chosen["registers"] == "launch__registers_per_thread"
    older = {name.replace("sm__sass", "smsp__sass", 1) for name in AVAILABLE if "tensor" not in name}
    chosen = choose({*older, "sm__inst_executed_pipe_tensor"})
    assert chosen["wavefronts_ldsm"] == "sm" + "sp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum"
    assert chosen["tensor_share"].startswith("sm__inst_executed_pipe_tensor.")
    assert set(choose(())) == {"registers"}


def test_stalls_are_those_of_the_card_and_the_warp_that_issues_has_none():
    assert stall_reasons(AVAILABLE) == ["gmma", "mio_throttle", "short_scoreboard", "tex_throttle"]
    with pytest.raises(NcuError, match="its stalls can't be told apart"):
        stall_reasons({"sm__warps_active"})


def test_one_kernel():
    found = counters_of([row("k", 2000, short_scoreboard=6, mio_throttle=2, gmma=1, registers=168)], AVAILABLE)
    assert found["us"] == 2.0 and found["registers"] == 168 and found["kernels"] == ["k"]
    assert found["smem_share"] == 0.01
    assert found["stalls"] == {"short_scoreboard": 0.6, "mio_throttle": 0.2, "gmma": 0.1, "tex_throttle": 0.1}
    named = named_stalls(found["stalls"])
    assert list(named) == [*STALL_MEANINGS, REST]
    assert named["gmma"] == 0.1 and named[REST] == pytest.approx(0.1) and sum(named.values()) == pytest.approx(1)


def test_a_call_of_two_kernels_is_put_together():
    main_kernel = row("a", 3000, wavefronts_ld=100, registers=168, smem_share=80, short_scoreboard=9, issued=300)
    combine = row("b", 1000, wavefronts_ld=10, registers=32, smem_share=40, short_scoreboard=1, issued=100)
    found = counters_of([main_kernel, combine], AVAILABLE)
    assert found["us"] == 4.0 and found["wavefronts_ld"] == 110 and found["registers"] == 168
    assert found["smem_share"] == pytest.approx(0.7)
    # 9 * 300 + 1 * 100 warps of it, and 1 * 300 + 1 * 100 of each of the three others
    assert found["stalls"]["short_scoreboard"] == pytest.approx(2800 / (2800 + 3 * 400))


# Two lines of source, one with an instruction below it; quotes within the source are not escaped.
SOURCE = """"File Path","/somewhere/mma.py"
"Function Name","cute_fa_kernel1_0"
"Line No","Source","Address","Source","Warp Stall Sampling (All Samples)","L1 Wavefronts Shared","{}"
"86","gemm("a", b)","-","-","30","0","0"
"","","0x10","  HMMA","30","0","0"
"74","copy(a, b)","-","-","10","8,000","1000"
"File Path","/somewhere/other.py"
"Function Name","flash_main"
"1","x","-","-","60","0","0"
""".format("L1 Wavefronts Shared Ideal")


def test_lines_of_ncu():
    first, second, other = ncu.parse_source(SOURCE)
    assert first == ncu.SourceLine("cute_fa_kernel1_0", "mma.py", 86, 'gemm("a", b)', 30, 0, 0)
    assert (second.wavefronts, second.ideal, other.kernel, other.file) == (8000, 1000, "flash_main", "other.py")
    top, next_ = profile_table.sampled_lines([second, other, first], ["cute_fa_kernel1_0"])
    assert (top["source"], top["share"], next_["source"], next_["share"]) == ("mma.py:86", 0.75, "mma.py:74", 0.25)


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """ncu's stand-in: lists the card's counters, and for a profile prints what it is given."""

    def make(rows: list[dict[str, str]], said: str, status: int = 0) -> None:
        columns = ["ID", *rows[0]] if rows else ["ID", "Kernel Name"]
        lines = [",".join(f'"{column}"' for column in columns)]
        lines += [",".join(f'"{v}"' for v in (i, *one.values())) for i, one in enumerate(rows)]
        (tmp_path / "listed").write_text("\n".join(f"{name}  Counter" for name in AVAILABLE))
        (tmp_path / "said").write_text("\n".join(["==PROF== Connected", said]))
        (tmp_path / "raw").write_text("\n".join(lines))
        (tmp_path / "source").write_text(SOURCE)
        program = tmp_path / "ncu"
        program.write_text(
            f'#!/bin/sh\ncd {tmp_path}\ncase "$*" in\n--query-metrics*) cat listed;;\n'
            f"--import*source*) cat source;;\n--import*) cat raw;;\n"
            f'*) echo "$@" > arguments; cat said; exit {status};;\nesac\n'
        )
        program.chmod(0o755)
        monkeypatch.setattr(profile_table, "find_ncu", lambda: str(program))

    ncu.available_metrics.cache_clear()
    yield make
    ncu.available_metrics.cache_clear()


def test_calls_of_rungs_and_peers(fake_ncu, tmp_path):
    mark = row("at::cuda::spin_kernel", 1)
    rows = [row("cute_fa_kernel1_0", 5000), mark, row("flash_main", 1000), row("flash_combine", 500), mark]
    fake_ncu(rows, 'PROFILED {"sdpa_cudnn": "RuntimeError: not here"}')
    contestants = [profile_table.labelled(label) for label in ("kernel1", "sdpa_flash", "sdpa_cudnn")]
    kernel1, *lines, flash, cudnn = profile_table.profile(CASE, contestants, "sm_90a")
    assert [line["source"] for line in lines] == ["mma.py:86", "mma.py:74"] and lines[0]["name"] == "kernel1"
    assert (kernel1["kind"], kernel1["layout"], kernel1["us"]) == ("rung", "PLAIN", 5.0)
    assert (flash["kind"], flash["kernels"], flash["us"]) == ("peer", ["flash_main", "flash_combine"], 1.5)
    assert cudnn["reason"] == "RuntimeError: not here" and "us" not in cudnn
    arguments = (tmp_path / "arguments").read_text()
    assert "--clock-control none" in arguments and "--profile-from-start off" in arguments
    profile_table.profile(CASE, contestants, "sm_90a", "base")
    assert "--clock-control base" in (tmp_path / "arguments").read_text()
    headers, rows = profile_table.stall_rows([kernel1, *lines, flash, cudnn])
    assert len(headers) == len(STALL_MEANINGS) + 2 and [row[0] for row in rows] == ["kernel1", "sdpa_flash"]
    assert profile_table.sampled_rows([kernel1, *lines, flash])[1][1][-2:] == ["8,000", "8.00"]


def test_one_rung_in_several_layouts(fake_ncu):
    layouts = [layout.name for layout in profile_table.HARDWARE_CATALOG]
    mark = row("at::cuda::spin_kernel", 1)
    rows = [one for us in (1000, 2000, 3000) for one in (row("cute_fa_kernel11_0", us), mark)]
    fake_ncu(rows, 'PROFILED {"kernel11, ATOM_32B": "ValueError: no"}')
    contestants = [profile_table.labelled(f"kernel11, {layout}") for layout in layouts]
    assert [contestant.layout for contestant in contestants] == list(profile_table.HARDWARE_CATALOG)
    records = [r for r in profile_table.profile(CASE, contestants, "sm_90a") if "samples" not in r]
    assert [record["layout"] for record in records] == layouts
    assert [record.get("us") for record in records] == [1.0, 2.0, None, 3.0]
    headers, _ = profile_table.counter_rows(records)
    assert headers[1:] == ["kernel11, SWIZZLE_333", "kernel11, ATOM_64B", "kernel11, ATOM_16B"]
    _, stalls = profile_table.stall_rows(records)
    assert stalls[2][0] == "kernel11, SWIZZLE_333 → kernel11, ATOM_64B"


def test_the_hardware_s_layouts_are_those_of_the_catalog():
    for named, known in zip(profile_table.HARDWARE_CATALOG, HARDWARE_LAYOUTS, strict=True):
        assert (named.shape, named.stride, named.swizzle) == (known.shape, known.stride, known.swizzle)


def test_changes_are_from_rung_to_rung():
    records = [
        {"name": name, "kind": kind, "stalls": {"short_scoreboard": share, "wait": 1 - share}}
        for name, kind, share in (("a", "rung", 0.5637), ("b", "rung", 0.0149), ("p", "peer", 0.1))
    ]
    headers, rows = profile_table.stall_rows(records)
    assert headers[:2] == ["", "short_scoreboard"]
    assert [row[:2] for row in rows] == [["a", "56.37%"], ["b", "1.49%"], ["a → b", "-54.88"], ["p", "10.00%"]]


@pytest.mark.parametrize(
    ("said", "status", "shown"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", 1, "run the command as root"),
        ("Traceback: it broke", 0, "did not end as it should"),
        ("PROFILED {}", 0, "saw 0 calls"),
    ],
)
def test_what_goes_wrong_is_a_line(said, status, shown, fake_ncu, monkeypatch, capsys):
    fake_ncu([], said, status)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert main(["profile", "--kernels", "kernel1", "--peers"]) == 1
    error = capsys.readouterr().err
    assert "python -m perf profile: error: " in error and shown in error


def test_no_ncu_is_an_error_that_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(profile_table, "find_ncu", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert main(["profile"]) == 1
    assert "install Nsight Compute" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--head-dim", "64", "128"], "choose one head dimension"),
        (["--heads", "16", "--heads-kv", "3"], "--heads-kv"),
        (["--clock-control", "boost"], "--clock-control"),
        (["--peers", "nobody"], "--peers"),
        (["--limit", "d64", "--head-dim", "128", "64"], "--limit says what --head-dim would"),
        (["--limit", "d64", "--seqlen", "512"], "--limit says what --seqlen would"),
        (["--limit", "decode", "--kernels", "kernel6"], "--limit says what --kernels would"),
    ],
)
def test_bad_options(argv, named, capsys):
    try:
        status = main(["profile", *argv])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2 and named in capsys.readouterr().err


RUNGS = [rung_contestant(rung) for rung in LADDER]
SERIAL = [rung for rung in RUNGS if profile_table.lab_wavefronts(CASE, rung) is not None]


@pytest.mark.parametrize("rung", SERIAL, ids=lambda rung: rung.name)
def test_the_extrapolated_emulation_is_the_lab_s_prediction(rung):
    predicted = profile_table.predict(CASE, rung)
    assert {path: actual for path, (_, actual) in predicted.items()} == profile_table.lab_wavefronts(CASE, rung)


def test_extrapolation_is_the_emulation_of_the_whole(monkeypatch):
    case, rung = replace(CASE, S_q=256, S_k=640, H=2, H_kv=2), RUNGS[0]
    whole = profile_table.predict(case, rung)
    monkeypatch.setattr(profile_table, "MAX_EMULATED_SECONDS", 0)
    assert profile_table.predict(case, rung) == whole
    for other in (replace(case, causal=True), replace(case, S_k=600), replace(case, H_kv=1)):
        with pytest.raises(ValueError, match="only if full and of whole tiles"):
            profile_table.predict(other, rung)


def test_wavefronts_that_are_not_linear_are_not_extrapolated(monkeypatch):
    monkeypatch.setattr(profile_table, "MAX_EMULATED_SECONDS", 0)
    monkeypatch.setattr(profile_table, "_emulated", lambda case, *_: {"ld.shared": (case.S_k**2,) * 2})
    with pytest.raises(ValueError, match="not linear in the number of keys"):
        profile_table.predict(CASE, RUNGS[0])


def test_compared_records_hold_the_counter_to_the_prediction():
    profiled = {counter.key: 0.0 for counter in COUNTERS}
    paths = emulation.COUNTERS
    rung = RUNGS[1]
    predicted = profile_table.predict(SMALL, rung)
    profiled |= {
        f"wavefronts_{op}": float(sum(predicted[path][1] for path in paths[ncu.WAVEFRONTS.format(op)][0]))
        for op in ("ldsm", "ld", "st", "ldgsts")
    }
    profiled |= {"name": rung.name, "layout": "SWIZZLE_333", "kernels": []}
    records = profile_table.compared_records(SMALL, rung, None)
    profile_table.add_counts(records, [profiled, {"name": "kernel1", "samples": 1}])
    assert len(records) == len(paths) and not emulation.differing(records)
    assert all(record["lab"] == record["predicted"] == record["wavefronts"] > 0 for record in records)
    profiled["wavefronts_st"] += 1
    profile_table.add_counts(records, [profiled])
    (wrong,) = emulation.differing(records)
    assert wrong["path"] == "st.shared"


@pytest.mark.parametrize("name", ["kernel1", "kernel2"])
def test_lines_are_those_of_the_kernel_s_source(name):
    records = profile_table.line_records(CASE, rung_contestant(KERNELS[name]), None)
    assert 0 < len(records) <= profile_table.LINES
    shares = [record["share"] for record in records]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 1 + 1e-9
    top = records[0]
    assert top["instruction"] == "ldmatrix" and "cute.copy(self.tiled_copy" in top["code"]
    assert top["predicted"] / top["ideal"] == (8 if name == "kernel1" else 1)


def test_code_of_a_line_that_is_not_there():
    assert (
        profile_table.code_at("mma.py:99999")
        == profile_table.code_at("nothing.py:1")
        == profile_table.code_at("")
        == ""
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command would profile")
def test_without_a_gpu_it_predicts_and_says_so(capsys):
    assert main(["profile", "--kernels", "kernel2", "--seqlen", "256", "--heads", "2", "--json"]) == 0
    captured = capsys.readouterr()
    records = json.loads(captured.out)
    assert {record["name"] for record in records} == {"kernel2"} and not any("wavefronts" in r for r in records)
    assert "nothing was profiled: no CUDA device" in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command would profile")
def test_a_rung_that_cannot_be_emulated_is_named(monkeypatch, capsys):
    def fail(*args):
        raise profile_table.EmulationError("line 7: wgmma")

    monkeypatch.setattr(profile_table, "predict", fail)
    assert main(["profile", "--kernels", "kernel2"]) == 0
    assert "kernel2 not emulated: line 7: wgmma" in capsys.readouterr().out


@pytest.mark.skipif(not FILES, reason="no profile is committed yet: run python -m perf profile on a GPU")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_the_committed_profile_is_as_predicted(file):
    records = results.read_results(file)["records"]
    compared = [record for record in records if "counter" in record]
    assert {"kernel1", "kernel2"} <= {record["name"] for record in compared}
    assert not emulation.differing(compared)
    for record in compared:
        assert record["wavefronts"] == pytest.approx(record["predicted"], rel=1e-3)
        assert record["lab"] == record["predicted"] if "lab" in record else True
    for record in records:
        if "stalls" in record:
            assert sum(record["stalls"].values()) == pytest.approx(1)


def test_a_rung_of_hopper_is_emulated_and_held_to_the_accesses_that_it_has():
    """Its operands are read by wgmma, not by the accesses whose counters are predicted."""
    rung = rung_contestant(LADDER[-1])
    assert emulation.arch_of(rung.rung) == "sm_90a" and emulation.arch_of(LADDER[0]) == "sm_80"
    assert set(profile_table.predict(SMALL, rung)) == {"stmatrix"}
    assert profile_table.compared_records(SMALL, rung, None) == []
    assert {record["instruction"] for record in profile_table.line_records(CASE, rung, None)} == {"stmatrix"}


def test_evidence_of_layouts_and_limits_has_files_of_its_own():
    steps = [step for step in EVIDENCE if step.argv[0] == "profile"]
    assert len(steps) == 2 + len(LIMITS)
    for step in steps:
        parser = argparse.ArgumentParser()
        profile_table.add_arguments(parser)
        assert profile_table._file_name(parser.parse_args(step.argv[1:])) == step.what
    assert profile_table._file_name(parser.parse_args([*steps[-1].argv[1:], "--peers"])) == "custom"
    assert profile_table._file_name(parser.parse_args([])) == "profile"
