"""Kernels that keep the reference of their first tiles: right where other scores outgrow it, and only there slower."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_fa.choices import choose
from cute_fa.emulator import DEFAULT_ARCH, emulate_forward
from cute_fa.ladder import KERNELS
from cute_fa.problem import NO_FEATURES, NO_OPTIONS, ScoreFeatures, ScoreOptions, StaticProblem
from cute_fa.reference import attention_reference
from tests.cases import Case, assert_close
from tests.cute_fa.test_choices import problem

RUNG = KERNELS["kernel6"]
LN_2 = math.log(2.0)


def config(head_dim: int, causal: bool):
    chosen = choose(RUNG, problem(head_dim, causal), DEFAULT_ARCH).config
    assert chosen.first_reference
    return chosen


def run(q, k, v, causal: bool, chosen, scale=None, options: ScoreOptions = NO_OPTIONS):
    """(result, wavefronts of ldmatrix)"""
    result = emulate_forward(
        q, k, v, causal=causal, softmax_scale=scale, kernel=RUNG.name, config=chosen, options=options
    )
    result.report.raise_for_faults()
    return result, sum(result.report.by_path()[path][0] for path in ("ldmatrix", "ldmatrix.trans"))


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, False), (128, True)])
def test_only_the_ctas_that_must_begin_again(head_dim, causal, generator):
    case, chosen = Case(256, 333, head_dim, causal), config(head_dim, causal)
    q, k, v = case.tensors("cpu", generator)
    result, reads = run(q, k, v, causal, chosen)
    assert_close(case, q, k, v, result.o, result.lse)
    assert run(q, k, v, causal, replace(chosen, first_reference=False))[1] == reads
    q[:, :, 1] = 8.0 * q[:, :, 1].sign()
    k[:, :64, 1] = 8.0 * q[:, :64, 1].sign()  # their scores are hundreds above those of the last keys
    k[:, 64:, 1] /= 64
    result, more = run(q, k, v, causal, chosen)
    assert_close(case, q, k, v, result.o, result.lse)
    assert 1.2 < more / reads < 2


WINDOW = ScoreOptions(window_size=(320, -1))


@pytest.mark.parametrize(
    ("scores", "rest", "magnitude", "options"),
    [
        ({0: 60.0, 1: 62.0}, 0.0, 1.0, NO_OPTIONS),  # which are kept
        ({0: 126.0, 1: 126.0}, 0.0, 1.0, NO_OPTIONS),
        ({0: 127.0}, 0.0, 2.0**-8, NO_OPTIONS),
        (dict.fromkeys(range(8), 126.5), 0.0, 2.0**-8, NO_OPTIONS),  # each thread's sum fits, that of four doesn't
        ({0: 64.0}, 0.0, 2.0**64, NO_OPTIONS),  # O doesn't fit, the sum does
        ({0: 1.0}, -120.0, 1.0, ScoreOptions(sinks=torch.full((1,), 8.0 * LN_2))),
        ({0: 125.0}, 0.0, 1.0, ScoreOptions(sinks=torch.full((1,), 132.0 * LN_2))),
        ({230: 126.0, 100: 127.0}, 0.0, 1.0, WINDOW),  # key 100 in a tile that the window's edge cuts
        ({230: 126.0, 100: 130.0}, 0.0, 1.0, WINDOW),
    ],
)
@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True)])
def test_scores_near_the_end_of_the_exponents(head_dim, causal, scores, rest, magnitude, options, generator):
    """``scores``: of some keys for every query, in powers of two; all others have ``rest``."""
    q, k = torch.zeros(1, 128, 1, head_dim), torch.zeros(1, 512, 1, head_dim)
    q[..., 0], k[..., 0] = 1.0, rest
    for key, score in scores.items():
        k[0, key, 0, 0] = score
    v = magnitude * torch.randn(1, 512, 1, head_dim, generator=generator)
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (q, k, v))
    assert all(k[0, key, 0, 0] == score for key, score in scores.items())
    result, _ = run(q, k, v, causal, config(head_dim, causal), LN_2, options)
    o, lse = attention_reference(
        q, k, v, causal=causal, softmax_scale=LN_2, dtype=torch.float64,
        window_size=options.window_size, sinks=options.sinks,
    )  # fmt: skip
    torch.testing.assert_close(result.o.double(), o, rtol=0.0, atol=0.01 * magnitude)
    torch.testing.assert_close(result.lse.double(), lse, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "features", "said"),
    [
        (torch.float16, NO_FEATURES, "must be False for torch.float16, whose exponents end at 15"),
        (torch.bfloat16, ScoreFeatures(alibi=True), "must be False with attn_bias or alibi_slopes"),
        (torch.bfloat16, ScoreFeatures(bias=torch.bool), "must be False with attn_bias or alibi_slopes"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_who_keeps_no_reference(dtype, features, said):
    static = StaticProblem(dtype, 128, False, False, features)
    with pytest.raises(ValueError, match=f"first_reference {said}"):
        RUNG.check(static, config(128, False), DEFAULT_ARCH)
    for arch in (DEFAULT_ARCH, "sm_90a"):  # by the rule, and where measured choices have it
        chosen = choose(RUNG, replace(problem(dtype=dtype), features=features), arch).config
        assert not chosen.first_reference
        RUNG.check(static, chosen, arch)
