"""The bank table: the probes do what they say, and the committed measurements equal the model."""

import argparse
import json
from collections import Counter

import numpy as np
import pytest
import torch

from cute_fa.emulator import TensorArg, emulate
from perf import bank_table, results
from perf.bank_kernels import SMEM_BYTES, address_table, compile_probe, probe_asm
from perf.bank_table import PROBES, agrees, kernel_name, prediction, records

RESULT_FILES = sorted(results.RESULTS.glob("*/bank_table.json"))


def test_the_table_covers_every_path_width_and_layout():
    assert len({probe.name for probe in PROBES}) == len(PROBES) >= 30
    assert {probe.op for probe in PROBES} == {"ldsm", "ldgsts", "ld", "st"}
    widths = Counter((probe.op, probe.path.width) for probe in PROBES)
    assert {(op, width) for op in ("ld", "st") for width in (2, 4, 8, 16)} < widths.keys()
    assert {1, 2, 4, 8, 16, 32} <= {probe.predict().ways for probe in PROBES}


@pytest.fixture(scope="module")
def compiled_ptx(tmp_path_factory):
    """PTX of the probe kernel of an instruction, compiled once."""
    kept, folder = {}, tmp_path_factory.mktemp("ptx")

    def get(instruction: str, masked: bool, threads: int) -> str:
        key = (instruction, masked, threads)
        if key not in kept:
            kept[key] = compile_probe(*key, f"--gpu-arch sm_90a --keep-ptx --dump-dir={folder}").__ptx__
        return kept[key]

    return get


@pytest.mark.parametrize("instruction", sorted({probe.path.instruction for probe in PROBES}))
def test_a_probe_kernel_has_its_instruction_once_and_no_other(instruction, compiled_ptx):
    ptx = compiled_ptx(instruction, False, 32)
    shared = [line.split()[0] for line in ptx.splitlines() if ".shared" in line.split("//")[0].split("[")[0]]
    shared = [operation for operation in shared if not operation.startswith(".extern")]
    in_braces = [line for line in ptx.splitlines() if f"{instruction} " in line]
    assert len(in_braces) == 1
    assert len(shared) == 1
    assert f".entry {kernel_name(instruction)}" in ptx


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_the_compiled_probe_makes_the_accesses_of_its_path(probe, compiled_ptx):
    """The emulator runs the probe's PTX and finds the wavefronts that the path predicts."""
    table = address_table(probe)
    threads = table.shape[1]
    args = [
        TensorArg("addresses", table, (0,)),
        TensorArg("source", np.zeros(4 * threads, np.int32)),
        TensorArg("out", np.zeros(threads, np.int32)),
    ]
    ptx = compiled_ptx(probe.path.instruction, probe.path.active is not None, threads)
    found = emulate(ptx, (1, 1, 1), (threads, 1, 1), args, SMEM_BYTES)
    ((ideal, actual),) = found.by_path().values()
    predicted = probe.predict()
    assert (ideal, actual) == (predicted.ideal, predicted.wavefronts)
    # Probes read what nothing wrote, and warps write what others do; addresses must be right all the same.
    assert not {fault.kind for fault in found.faults} & {"out of bounds", "misaligned", "barrier divergence"}


@pytest.mark.parametrize("instruction", ["red.shared.add.u32", "ldmatrix", "cp.reduce.async"])
def test_no_probe_for_other_instructions(instruction):
    with pytest.raises(ValueError, match="instruction must be"):
        probe_asm(instruction)


def test_records_hold_both_numbers_and_tell_a_difference():
    rows = [prediction(probe) for probe in PROBES]
    counters = [
        {row["counter"]: row["predicted"], row.get("conflict_counter", "none"): row.get("predicted_conflicts", 0)}
        for row in rows
    ]
    measured = records(counters)
    assert all(agrees(row) for row in measured)
    assert not agrees(measured[0] | {"measured": measured[0]["measured"] + 1})
    assert not agrees(measured[0] | {"measured_conflicts": measured[0]["measured_conflicts"] + 1})
    with pytest.raises(ValueError):
        records(counters[:-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command would measure")
def test_without_a_gpu_it_predicts_and_says_so(capsys):
    parser = argparse.ArgumentParser()
    bank_table.add_arguments(parser)
    assert bank_table.main(parser.parse_args(["--json"])) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert len(rows) == len(PROBES)
    assert not any("measured" in row for row in rows)
    assert f"none of these {len(PROBES)} accesses was measured: there is no CUDA device" in captured.err


@pytest.mark.skipif(not RESULT_FILES, reason="no measurements are committed yet: run python -m perf banks on a GPU")
@pytest.mark.parametrize("file", RESULT_FILES, ids=lambda file: file.parent.name)
def test_committed_measurements_equal_the_model(file):
    committed = {record["name"]: record for record in json.loads(file.read_text())["records"]}
    assert committed.keys() == {probe.name for probe in PROBES}
    for probe in PROBES:
        record = committed[probe.name]
        assert {key: record[key] for key in prediction(probe)} == prediction(probe), probe.name
        assert agrees(record), probe.name
