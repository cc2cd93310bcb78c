"""The comparison of emulator and GPU: its parts, and the committed results against the emulator of today."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from perf import emulation
from perf.emulation import COUNTERS, KERNELS, SHAPES, Shape
from perf.records import RESULTS, device_slug

FILES = sorted(RESULTS.glob("*/emulation.json"))


def test_ncu_output_is_read():
    columns = ",".join(f'"{counter}"' for counter in COUNTERS)
    text = (
        "==PROF== Connected to process 7\n"
        f'"ID","Kernel Name",{columns}\n"","","","","",""\n'
        '"0","cute_fa_kernel1","1,024","32","8","4096"\n"1","cute_fa_kernel2","128","4","8","4,096"\n'
    )
    ldsm, st, ld, ldgsts = COUNTERS
    first, second = emulation.parse_ncu(text)
    assert first == {ldsm: 1024, st: 32, ld: 8, ldgsts: 4096}
    assert second[ldgsts] == 4096
    with pytest.raises(RuntimeError, match="no table"):
        emulation.parse_ncu("==ERROR== ERR_NVGPUCTRPERM")
    with pytest.raises(RuntimeError, match="no column for"):
        emulation.parse_ncu('"ID","Kernel Name"\n"0","k"\n')


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_units_of_the_last_place(dtype):
    a = torch.tensor([[1.0, 100.0, -3.0, 0.0]], dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert emulation.output_difference(a, a) == {"equal": 1.0, "max_ulp": 0.0, "max_row_ulp": 0.0}
    b = a.clone()
    b[0, 0] += 2 * eps
    difference = emulation.output_difference(a, b)
    assert difference == {"equal": 0.75, "max_ulp": 2.0, "max_row_ulp": round(2 / 64, 3)}


def test_inputs_are_the_same_every_time():
    shape = Shape(5, 7, 64, dtype="fp16", H=4, H_kv=2)
    (q, k, v), again = shape.tensors("cpu"), shape.tensors("cpu")
    assert q.shape == (1, 5, 4, 64) and k.shape == v.shape == (1, 7, 2, 64) and q.dtype == torch.float16
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there and would be compared with")
def test_without_a_gpu_the_emulated_wavefronts_are_shown(capsys):
    parser = argparse.ArgumentParser()
    emulation.add_arguments(parser)
    assert emulation.main(parser.parse_args([])) == 0
    printed = capsys.readouterr()
    for path in ("cp.async", "ldmatrix", "ldmatrix.trans", "ld.shared", "st.shared"):
        assert path in printed.out
    assert "8.00-way" in printed.out and "Not measured" in printed.err


@pytest.mark.skipif(not FILES, reason="no perf/results/*/emulation.json yet: python -m perf emulate writes it")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_committed_results_agree_with_the_emulator(path):
    content = json.loads(path.read_text())
    assert device_slug(content["device"]) == path.parent.name
    fields = list(Shape.__dataclass_fields__)
    runs = {}
    for record in content["records"]:
        shape = Shape(**{field: record[field] for field in fields})
        runs.setdefault((shape, record["name"], record["arch"]), []).append(record)
    assert {(shape, name) for shape, name, _ in runs} == {(shape, name) for shape in SHAPES for name in KERNELS}
    for (shape, name, arch), records in runs.items():
        result = emulation.emulate_shape(shape, name, arch)
        for record in records:
            if record["path"] == "o":
                assert record["max_row_ulp"] <= 2 and record["lse_error"] < 1e-3
                continue
            paths, exact = COUNTERS[record["counter"]]
            ideal, predicted = emulation.predicted_wavefronts(result, paths)
            assert (record["ideal"], record["predicted"]) == (ideal, predicted)
            if exact:
                assert record["wavefronts"] == predicted
            else:
                assert record["wavefronts"] == pytest.approx(predicted, rel=1e-2)
