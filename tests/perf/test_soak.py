"""The soak draws what it should, and finds what is wrong."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch

from cute_fa.problem import FP8, HEAD_DIMS, AttentionProblem
from cute_fa.reference import attention_reference
from perf import soak
from perf.soak import Kind, Problem

CPU = torch.device("cpu")
PLAIN = Kind(torch.bfloat16, 64, 64, True, frozenset(), "slices")


def problem_of(kind: Kind = PLAIN, **changes) -> Problem:
    given = {"lengths": ((20, 30),) * 2, "num_heads": 4, "num_heads_kv": 2, "magnitude": 1.0, "softmax_scale": None}
    return Problem(kind, **given | {"strides": "plain", "descaled": False, "seed": 0} | changes)


def test_everything_is_drawn_sooner_or_later():
    rng = random.Random(0)
    kinds = [Kind.draw(rng) for _ in range(400)]
    problems = [Problem.draw(kind, rng, 100) for kind in kinds]
    assert {kind.dtype for kind in kinds} == {torch.float16, torch.bfloat16, FP8}
    assert set().union(*(kind.options for kind in kinds)) == {
        "left", "right", "softcap", "alibi_slopes", "sinks", "attn_bias", "mask",
    }  # fmt: skip
    assert {kind.place for kind in kinds} == set(soak.PLACES) and len({kind.head_dim for kind in kinds}) > 20
    assert any(kind.head_dim != kind.head_dim_v for kind in kinds)
    assert all(kind.head_dim in HEAD_DIMS and kind.head_dim_v in HEAD_DIMS for kind in kinds)
    assert any(problem.descaled for problem in problems) and {p.strides for p in problems} == {
        "plain", "heads first", "sliced",
    }  # fmt: skip
    assert any(0 in pair for problem in problems for pair in problem.lengths)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_drawn_is_valid(seed):
    rng = random.Random(seed)
    problem = Problem.draw(Kind.draw(rng), rng, 50)
    generator, kind = torch.Generator().manual_seed(seed), problem.kind
    placement = soak.Placement.of(problem, CPU)
    q = problem.tensor(generator, *placement.shape_q, problem.num_heads, kind.head_dim)
    k = problem.tensor(generator, *placement.shape_k, problem.num_heads_kv, kind.head_dim)
    v = problem.tensor(generator, *placement.shape_k, problem.num_heads_kv, kind.head_dim_v)
    options = soak._draw_options(problem, generator)
    if placement.arguments is None:
        AttentionProblem.from_tensors(q, k, v, causal=kind.causal, options=options)
    for i, (_, seqlen_k) in enumerate(problem.lengths if placement.keys else ()):
        start = placement.arguments["leftpad_k"][i] if kind.place == "cache" else 0
        assert placement.keys(k, i).shape == (1, seqlen_k - start, problem.num_heads_kv, kind.head_dim)


@pytest.mark.parametrize(
    "problem",
    [
        problem_of(strides="sliced"),
        problem_of(Kind(FP8, 64, 64, False, frozenset({"left", "alibi_slopes"}), "packed"), descaled=True),
        problem_of(Kind(torch.float16, 64, 64, False, frozenset({"mask", "sinks"}), "slices"), strides="heads first"),
        problem_of(replace(PLAIN, place="cache"), lengths=((3, 40), (3, 0), (3, 25)), seed=2),
        problem_of(replace(PLAIN, place="pages"), lengths=((3, 40), (3, 25)), seed=2),
    ],
    ids=["plain", "packed fp8", "masked", "cache", "pages"],
)
def test_right_results_pass(problem):
    assert soak.attempt(problem, CPU)[1] == ""


def reference_with(change):
    def forward(q, k, v, *, causal, softmax_scale, return_lse, **options):
        o, lse = attention_reference(q, k, v, causal=causal, softmax_scale=softmax_scale, **options)
        return change(o.to(q.dtype), lse)

    return forward


def test_wrong_results_are_found(monkeypatch):
    def attempt_with(change):
        monkeypatch.setattr(soak.cute_fa, "forward", reference_with(change))
        return soak.attempt(problem_of(), CPU)[1]

    def one_row_off(o, lse):
        o[1, 7, 2] *= 1.1
        return o, lse

    def lost(o, lse):
        o[0, 3, 1, 5] = torch.nan
        return o, lse

    assert attempt_with(lambda o, lse: (o, lse)) == ""
    assert attempt_with(one_row_off).startswith("o is off by") and attempt_with(lost).startswith("o is off by inf")
    assert attempt_with(lambda o, lse: (o, lse + 0.01)).startswith("lse is off by")
    assert attempt_with(lambda o, lse: (o + torch.randn_like(o) * 1e-3, lse)) == "a second call gave other bits"


def test_a_fault_ends_the_process_and_is_named(monkeypatch):
    def fault(*_args, **_options):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(soak, "attempt", fault)
    found = soak.soak(0, 5, 50)
    assert found["problems"] == 0 and len(found["failures"]) == 1
    assert "illegal memory access" in found["failures"][0] and "lengths=" in found["failures"][0]


def die(pipe, *_job):
    os.kill(os.getpid(), signal.SIGKILL)


def hang(pipe, *_job):
    time.sleep(60)


@pytest.mark.parametrize(
    ("work", "seconds", "said"),
    [(die, 120, "the process of seed 3 died"), (hang, 8, "took longer than 8 s: a hang?")],
)
def test_a_process_that_dies_or_hangs_is_a_failure(work, seconds, said, monkeypatch):
    monkeypatch.setattr(soak, "_work", work)
    (record,) = soak.run_all([(3, 5, 50)], seconds)
    assert record["problems"] == 0 and said in record["failures"][0]


def test_fp8_of_any_alignment(generator):
    """Rows that start off a 16-byte boundary, as slices of fp8 do: they are copied anyhow."""
    problem = problem_of(Kind(FP8, 72, 72, False, frozenset(), "slices"), strides="sliced")
    tensor = problem.tensor(generator, 1, 20, 4, 72)
    assert tensor.data_ptr() % 16 and soak.attempt(problem, CPU)[1] == ""
