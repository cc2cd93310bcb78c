"""Tables are made from results files, and the documents hold those tables and no others."""

from __future__ import annotations

import argparse
import subprocess

import pytest

from perf import results, tables
from perf.table_texts import NOT_COMPILED, NOT_MEASURED, TABLES


def record(name: str, tflops: float, **more) -> dict:
    kind = "rung" if name.startswith("kernel") else "peer"
    case = {"dtype": "bf16", "B": 4, "S_q": 4096, "S_k": 4096, "H": 16, "H_kv": 16, "D": 128, "causal": False}
    return {"name": name, "kind": kind, **case, "tflops": tflops, "error": 1e-3, **more}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A tree with a timing file and documents of its own."""
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", tmp_path / "perf" / "results")
    records = [
        {"name": "matmul_8192", "kind": "ceiling", "dtype": "bf16", "tflops": 700.0},
        record("kernel1", 50.0, registers=162, smem_bytes=49152),
        record("kernel2", 300.0, registers=167, smem_bytes=49152, auto=True),
        record("sdpa_flash", 400.0),
        record("sdpa_cudnn", 0.0) | {"reason": "not here"},
    ]
    records[-1].pop("tflops")
    document = results.make_document(records, "NVIDIA Test")
    results.write_results(results.results_path("NVIDIA Test", "timing_bf16"), document)
    return tmp_path


def run(check: bool) -> int:
    return tables.main(argparse.Namespace(check=check))


def row_of(text: str, first_cell: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(row for row in rows if row[0] == first_cell)


def test_ratios_are_those_of_the_records(root):
    ladder = TABLES["ladder"]()
    assert "NVIDIA Test" in ladder and "B=4, S_q=4096, H=16, D=128" in ladder
    assert row_of(ladder, "kernel2")[2:] == ["300.0", "6.00", "0.75", "167", "49152"]
    timing = TABLES["timing_bf16"]()
    assert "700 TFLOP/s" in timing
    # The best rung that any card runs has no record here; the best of all is the one that "auto" took.
    ratios = ["6.00", "-", "-", "0.75", "-"]  # nor has flash_attn_4, for the errors
    assert row_of(timing, "4096") == [
        "4096", "full", "50.0", "300.0", "-", "400.0", "-", *ratios, *["1.0e-03"] * 2
    ]  # fmt: skip
    assert row_of(timing, "mean")[-7:-2] == ratios


def test_without_results_the_table_says_so(root):
    assert TABLES["host"]() == NOT_MEASURED
    assert TABLES["resources"]() == NOT_COMPILED


def test_write_then_check(root):
    (root / "docs").mkdir()
    pages = [root / "README.md", root / "docs" / "more.md"]
    for page in pages:
        page.write_text("before\n<!-- table:ladder -->\nold\n<!-- /table -->\nafter\n")
    assert run(check=True) == 1
    assert "old" in pages[0].read_text()
    assert run(check=False) == 0
    for page in pages:
        text = page.read_text()
        assert text.startswith("before\n<!-- table:ladder -->\nNVIDIA Test")
        assert text.endswith("|\n<!-- /table -->\nafter\n") and "old" not in text
    assert run(check=True) == 0
    pages[0].write_text(pages[0].read_text().replace("300.0", "301.0"))
    assert run(check=True) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:nothing -->\n<!-- /table -->\n", "table must be one of ladder, .*got 'nothing'"),
        ("<!-- table:ladder -->\n", "lacks its <!-- /table -->"),
    ],
)
def test_bad_marks(root, text, message, capsys):
    with pytest.raises(ValueError, match=message):
        tables.with_tables(text)
    (root / "README.md").write_text(text)
    assert run(check=True) == 1
    assert "README.md" in capsys.readouterr().err


def test_documents_of_this_repository():
    """Skipped where results were measured since the last commit: they may belong to another machine."""
    command = ["git", "-C", str(results.ROOT), "status", "--porcelain", "--", "perf/results"]
    if subprocess.run(command, capture_output=True, text=True).stdout:
        pytest.skip("perf/results differs from the commit; `python -m perf tables` brings the documents up to it")
    assert run(check=True) == 0
