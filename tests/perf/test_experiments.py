"""The experiments without a GPU: predictions, both architectures through the emulator, what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from layouts.access import by_column, by_row
from layouts.banks import report
from perf import results
from perf.__main__ import main
from perf.experiments import command
from perf.experiments.base import PADDED_1, PADDED_4, XOR_ELEMENTS, XOR_VECTORS, emulate_experiment
from perf.experiments.command import EXPERIMENTS, agrees
from perf.ncu import WAVEFRONTS, NcuError

BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
FILES = sorted(results.RESULTS.glob("*/experiments.json"))


def test_names_are_unique_and_every_remedy_is_tried():
    assert len(BY_NAME) == len(EXPERIMENTS)
    for start in ("transpose_fp32", "transpose_bf16", "softmax_fp32"):
        variants = {e.variant for e in EXPERIMENTS if e.name.startswith(start)}
        assert variants == {"conflicting", "padded", "swizzled", "shuffle"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", BY_NAME)
def test_the_compiled_kernel_computes_and_accesses_what_is_said(name, arch):
    """Its result is PyTorch's; the emulator finds no fault, and the wavefronts that the bank model predicts."""
    experiment = BY_NAME[name]
    found, correct = emulate_experiment(experiment, arch)
    assert correct
    counted = {op: found.by_path().get(f"{op}.shared", (0, 0)) for op in ("ld", "st")}
    assert counted == experiment.wavefronts(experiment.emulated_size)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("transpose_fp32_conflicting", 32),
        ("transpose_fp32_padded", 1),
        ("transpose_fp32_swizzled", 1),
        ("transpose_bf16_conflicting", 16),
        ("transpose_bf16_padded", 2),  # one element is half a bank: odd columns wrap round into a bank in use
        ("transpose_bf16_swizzled", 1),
        ("transpose_fp32_shuffle", 0),
        ("softmax_fp32_conflicting", 32),
        ("softmax_fp32_swizzled", 1),
        ("reads_fp32_plain_4B", 32),
        ("reads_fp32_plain_16B", 8),
        ("reads_fp32_padded_4_4B", 4),
        ("reads_fp32_padded_4_16B", 1),
        ("reads_fp32_padded_1_4B", 1),
    ],
)
def test_ways(name, ways):
    experiment = BY_NAME[name]
    assert experiment.ways(experiment.sizes[0]) == ways


def test_wavefronts_grow_with_the_size():
    for experiment in EXPERIMENTS:
        size = experiment.emulated_size
        factor = 4 if experiment.experiment == "transpose" else 2
        once, twice = experiment.wavefronts(size), experiment.wavefronts(2 * size)
        assert twice == {op: (factor * ideal, factor * actual) for op, (ideal, actual) in once.items()}


@pytest.mark.parametrize("layout", [PADDED_1, PADDED_4, XOR_ELEMENTS, XOR_VECTORS], ids=lambda layout: layout.name)
def test_layouts_keep_elements_apart_and_vectors_whole(layout):
    rows, cols = np.meshgrid(np.arange(32), np.arange(32), indexing="ij")
    offsets = layout.on(32, 32).offset(rows, cols)
    assert len(np.unique(offsets)) == 32 * 32
    assert report(layout, by_row("st", 4, (32, 32), 4)).ways == 1
    in_vectors = (offsets.reshape(32, 8, 4)[:, :, :1] + np.arange(4) == offsets.reshape(32, 8, 4)).all()
    assert in_vectors == (layout is not XOR_ELEMENTS)
    if layout is PADDED_1:
        with pytest.raises(ValueError, match="must be aligned to 16 bytes"):
            report(layout, by_column("ld", 16, (32, 32), 4))


@pytest.mark.parametrize("size", [0, 100, 1056])
def test_a_size_that_is_not_whole_tiles_is_refused(size, capsys):
    with pytest.raises(ValueError, match=f"size of transpose must be a positive multiple of 128, got {size}"):
        BY_NAME["transpose_fp32_padded"].check(size)
    if size:
        assert main(["experiments", "--sizes", str(size)]) == 2
        assert f"--sizes: size of transpose must be a positive multiple of 128, got {size}" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--sizes", "0"], ["--sizes", "x"], ["--experiments", "none"], ["--repeats", "0"]])
def test_bad_options(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["experiments", *argv])
    assert exit_.value.code == 2 and argv[0] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command would measure")
def test_without_a_gpu_it_predicts_emulates_and_says_so(capsys):
    assert main(["experiments", "--experiments", "reads", "--json"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert [row["emulated"] for row in rows] == ["as predicted"] * 7
    assert "Not measured: neither times nor ncu's counters" in captured.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command would measure")
def test_an_emulation_that_differs_is_an_error(monkeypatch, capsys):
    experiment = BY_NAME["reads_fp32_plain_16B"]
    monkeypatch.setattr(command, "EXPERIMENTS", (experiment,))
    monkeypatch.setattr(type(experiment), "matches", lambda self, found, expected: False)
    assert main(["experiments", "--experiments", "reads"]) == 1
    assert "the result isn't PyTorch's" in capsys.readouterr().out


def fake_ncu(tmp_path, names):
    metrics = [WAVEFRONTS.format("ld"), WAVEFRONTS.format("st"), command._DURATION, command._SMEM_SHARE]
    rows = [f'"{i}","cute_fa_exp_{name}_0","1,{i:03}","32","2500","50"' for i, name in enumerate(names)]
    header = ",".join(f'"{column}"' for column in ("ID", "Kernel Name", *metrics))
    text = "\n".join([header, *rows])
    path = tmp_path / "ncu"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)
    return str(path)


def test_counters_belong_to_the_launches_in_order(tmp_path):
    runs = [(BY_NAME[name], 128) for name in ("transpose_fp32_padded", "transpose_fp32_shuffle")]
    first, second = command.count_wavefronts(fake_ncu(tmp_path, [run[0].name for run in runs]), runs)
    assert first == {"ld": 1000, "st": 32, "us": 2.5, "smem_share": 0.5} and second["ld"] == 1001
    with pytest.raises(NcuError, match="saw 1 kernels, not the 2"):
        command.count_wavefronts(fake_ncu(tmp_path, ["transpose_fp32_padded"]), runs)


def test_a_counter_that_differs_is_seen():
    record = command.prediction(BY_NAME["transpose_fp32_padded"], 128)
    counters = {op: record[op]["predicted"] for op in ("ld", "st")} | {"us": 1.0, "smem_share": 0.5}
    command._add_counters(record, counters)
    assert agrees(record) and "DIFFERS" not in command.table([record])
    command._add_counters(record, counters | {"ld": counters["ld"] + 1})
    assert not agrees(record) and "DIFFERS" in command.table([record])


@pytest.mark.skipif(not FILES, reason="no measurements are committed yet: run python -m perf experiments on a GPU")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_committed_measurements_equal_the_model(file):
    records = [r for r in results.read_results(file)["records"] if r["kind"] == "experiment"]
    assert {record["name"] for record in records} == set(BY_NAME)
    for record in records:
        assert record["correct"] and "measured" in record["ld"] and agrees(record), record["name"]
        today = command.prediction(BY_NAME[record["name"]], record["size"])
        assert record["ways"] == today["ways"]
        assert all(record[op]["predicted"] == today[op]["predicted"] for op in ("ld", "st"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", BY_NAME)
def test_the_gpu_computes_the_same(name):
    experiment = BY_NAME[name]
    source, result = experiment.tensors(experiment.emulated_size, "cuda")
    command._compiled(experiment)(source, result)
    assert experiment.matches(result, experiment.expected(source))
