"""CuTe layouts as numbers, with no GPU and no kernel: evaluated under an MLIR context of their own."""

from __future__ import annotations

import contextlib

import numpy as np
from cutlass._mlir import ir


@contextlib.contextmanager
def mlir_context():
    """Inside it, CuTe's layout algebra folds static layouts to Python integers."""
    with ir.Context() as context, ir.Location.unknown():
        context.load_all_available_dialects()
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            yield


def cute_offsets(layout, rows: int, cols: int) -> np.ndarray:
    """CuTe's own answer at every (row, col): int64 array (rows, cols)."""
    return np.array([[int(layout((row, col))) for col in range(cols)] for row in range(rows)])
