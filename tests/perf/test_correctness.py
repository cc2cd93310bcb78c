"""The error that stands before every timing."""

from __future__ import annotations

import math

import pytest
import torch

from cute_fa.reference import attention_reference
from perf.cases import Case
from perf.correctness import MAX_HEADS, ErrorCheck


@pytest.mark.parametrize(
    "case",
    [
        Case("bf16", 2, 40, 56, 4, 2, 64, True),
        Case("fp16", 1, 33, 33, 2, 2, 128, False),
        Case("bf16", 3, 24, 24, 32, 4, 64, True),
    ],
    ids=str,
)
def test_right_output_passes_and_any_other_does_not(case):
    q, k, v = case.tensors("cpu")
    check = ErrorCheck.of(case, q, k, v)
    assert len(check.heads) == min(case.B * case.H, MAX_HEADS)
    right = attention_reference(q, k, v, causal=case.causal)[0].to(q.dtype)
    assert check.error(right) <= check.rounding * 1.01
    assert check.error(right) <= check.allowed(None)
    batch, head = check.heads[-1]
    wrong = right.clone()
    wrong[batch, -1, head, 0] += 0.5
    assert check.error(wrong) > check.allowed(None)
    mean_square = check.rms_error(right) ** 2 + 0.5**2 / check.expected.numel()
    assert check.rms_error(wrong) == pytest.approx(mean_square**0.5, rel=0.02)
    wrong[batch, -1, head, 0] = math.nan
    assert check.error(wrong) == torch.inf


def test_allowed_is_twice_the_peers_error_plus_one_rounding():
    case = Case("bf16", 1, 8, 8, 1, 1, 64, False)
    check = ErrorCheck.of(case, *case.tensors("cpu"))
    assert check.allowed(0.25) == 0.5 + check.rounding
    assert check.allowed(None) == 2 * check.attainable + check.rounding
    assert check.rounding == check.expected.abs().max().item() * 2**-8
