"""The comparison of emulator and GPU: its parts, and the committed results against the emulator of today."""

from __future__ import annotations

import json

import pytest
import torch

from perf import emulation
from perf.__main__ import main as perf_main
from perf.cases import Case
from perf.emulation import CASES, COUNTERS
from perf.ncu import NcuError
from perf.results import RESULTS, slug

KERNELS = emulation.emulated_rungs()
FILES = sorted(RESULTS.glob("*/emulation.json"))


def test_launches_that_ncu_did_not_see_are_an_error(tmp_path):
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(NcuError, match=r"status 1\n(?s:.*)run the command as root(?s:.*)ERR_NVGPUCTRPERM"):
        emulation.count_all(str(fake))


def test_counters_are_taken_in_the_order_of_the_launches(tmp_path):
    columns = ",".join(f'"{counter}"' for counter in COUNTERS)
    names = [name for _ in CASES for name in KERNELS]
    # Each call launches two kernels and a mark.
    launches = [(f"cute_fa_{name}_0", f"cute_fa_{name}_1", "spin_kernel") for name in names]
    kernels = [(i, kernel) for i, call in enumerate(launches) for kernel in call]
    rows = [f'"{n}","{kernel}","1,{i:03}","32","8.0","4096"' for n, (i, kernel) in enumerate(kernels)]
    text = "\n".join(["==PROF==", f'"ID","Kernel Name",{columns}', '"","","","","",""', *rows])
    fake = tmp_path / "ncu"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    fake.chmod(0o755)
    ldsm, st, ld, ldgsts = COUNTERS
    counted = emulation.count_all(str(fake))
    assert [c[ldsm] for c in counted] == [2 * (1000 + i) for i in range(len(names))]
    assert counted[3] == {ldsm: 2006, st: 64, ld: 16, ldgsts: 8192}


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
    case = Case("fp16", 1, 5, 7, 4, 2, 64, False)
    (q, k, v), again = case.tensors("cpu"), case.tensors("cpu")
    assert q.shape == (1, 5, 4, 64) and k.shape == v.shape == (1, 7, 2, 64) and q.dtype == torch.float16
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there and would be compared with")
def test_without_a_gpu_the_emulated_wavefronts_are_shown(capsys):
    assert perf_main(["emulate"]) == 0
    printed = capsys.readouterr()
    for path in ("cp.async", "ldmatrix", "ldmatrix.trans", "ld.shared", "st.shared"):
        assert path in printed.out
    assert "8.00" in printed.out and "no CUDA device" in printed.err


@pytest.mark.parametrize("off_by", [0, 1])
def test_comparison_with_a_gpu_that_is_stood_in_for(off_by, monkeypatch, capsys):
    """The emulator plays the GPU's part: its outputs, and its wavefronts as the counters."""
    monkeypatch.setattr(emulation, "CASES", (Case("bf16", 1, 65, 65, 2, 2, 64, True),))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    results = {name: emulation.emulate_case(emulation.CASES[0], name) for name in KERNELS}
    monkeypatch.setattr(emulation, "_gpu_forward", lambda case, name: (results[name].o, results[name].lse))

    def counted(ncu):
        found = [
            {c: emulation.predicted_wavefronts(r, p)[1] for c, (p, _) in COUNTERS.items()} for r in results.values()
        ]
        found[1][next(iter(COUNTERS))] += off_by
        return found

    monkeypatch.setattr(emulation, "count_all", counted)
    records = emulation.compare_with_gpu("ncu")
    assert len(records) == len(KERNELS) * (1 + len(COUNTERS))
    outputs = [r for r in records if r["path"] == "o"]
    assert all(r["equal"] == 1 and r["max_ulp"] == 0 and r["lse_error"] == 0 for r in outputs)
    second = len(KERNELS) + len(COUNTERS)  # the first counter of the second kernel
    assert emulation.differing(records) == records[second : second + off_by]
    emulation.print_tables(records)
    assert ("+1" in capsys.readouterr().out) == bool(off_by)


@pytest.mark.skipif(not FILES, reason="no perf/results/*/emulation.json yet: python -m perf emulate writes it")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_committed_results_agree_with_the_emulator(path):
    content = json.loads(path.read_text())
    assert slug(content["device"]) == path.parent.name
    fields = list(Case.__dataclass_fields__)
    runs = {}
    for record in content["records"]:
        case = Case(**{field: record[field] for field in fields})
        runs.setdefault((case, record["name"], record["arch"]), []).append(record)
    measured = {name for _, name, _ in runs}  # a rung that is newer than the file is not in it
    assert {"kernel1", "kernel2"} <= measured <= set(KERNELS)
    assert {(case, name) for case, name, _ in runs} == {(case, name) for case in CASES for name in measured}
    for (case, name, arch), records in runs.items():
        result = emulation.emulate_case(case, name, arch)
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
