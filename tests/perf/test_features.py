"""The feature table: every entry of ours has tests that are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from perf.features import FEATURES, PEERS, Feature
from perf.table_texts import TABLES

TESTS = Path(__file__).parent.parent / "cute_fa"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_an_entry_has_tests(feature: Feature):
    assert feature.tests and len(feature.peers) == len(PEERS) and feature.ours
    for test in feature.tests:
        file, _, function = test.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_an_entry_has_a_test_that_needs_no_gpu_or_is_about_one(feature: Feature):
    on_gpu = [test for test in feature.tests if "_gpu.py" in test]
    assert len(on_gpu) < len(feature.tests) or feature.name == "CUDA graphs"


def test_table_has_a_row_for_each():
    rows = [line.split("|")[1].strip() for line in TABLES["features"]().splitlines() if line.startswith("|")]
    assert rows[2:] == [feature.name for feature in FEATURES]
