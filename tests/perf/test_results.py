"""Results files: what is written is what is read, whole, and says where it comes from."""

from __future__ import annotations

import csv
import io
import json

import pytest

from perf import results
from perf.output import as_csv

RECORDS = [
    {"name": "kernel1", "kind": "rung", "ms": 1.5, "instructions": {"mma": 64}},
    {"name": "sdpa_flash", "kind": "peer", "reason": "not here"},
]


@pytest.fixture
def fresh_commit():
    results.commit.cache_clear()
    yield
    results.commit.cache_clear()


def test_round_trip(tmp_path):
    path = tmp_path / "device" / "what.json"
    document = results.make_document(RECORDS, "NVIDIA H200")
    results.write_results(path, document)
    assert results.read_results(path) == document
    assert document["records"] == RECORDS and document["device"] == "NVIDIA H200" and document["ok"]
    assert document["command"].startswith("python -m perf")
    assert {"python", "torch", "cuda", "cutlass_dsl"} <= set(document["versions"])
    assert [entry.name for entry in path.parent.iterdir()] == ["what.json"]
    assert results.read_results(tmp_path / "none.json") is None


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "what.json"
    results.write_results(path, results.make_document(RECORDS, "x"))
    before = path.read_text()
    with pytest.raises(TypeError):
        results.write_results(path, results.make_document([{"name": object()}], "x"))
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), (json.dumps({"records": []}), "lacks command, commit, date, device, versions")],
)
def test_foreign_files_are_refused(tmp_path, text, message):
    path = tmp_path / "what.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        results.read_results(path)


def test_slug():
    assert results.slug("NVIDIA H200") == "nvidia-h200"
    assert results.slug("NVIDIA GeForce RTX 4090 (x)") == "nvidia-geforce-rtx-4090-x"


def test_commit_of_a_copy_without_history(monkeypatch, tmp_path, fresh_commit):
    monkeypatch.delenv(results.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.commit() == "unknown"
    results.commit.cache_clear()
    monkeypatch.setenv(results.COMMIT_VARIABLE, "0123abc")
    assert results.commit() == "0123abc"


def test_csv_has_every_key():
    rows = list(csv.DictReader(io.StringIO(as_csv(RECORDS))))
    assert [row["name"] for row in rows] == ["kernel1", "sdpa_flash"]
    assert rows[0]["instructions.mma"] == "64" and rows[1]["reason"] == "not here" and rows[1]["ms"] == ""
