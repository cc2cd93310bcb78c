"""Fixtures that the whole suite shares."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Tests marked ``gpu`` need a CUDA device; without one they skip and say so."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; none is visible to PyTorch")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def generator():
    """A seeded source of random numbers on the CPU."""
    return torch.Generator().manual_seed(0)
