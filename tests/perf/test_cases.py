"""The options that choose cases, and what they expand to."""

from __future__ import annotations

import argparse

import pytest

from cute_fa.problem import AttentionProblem
from perf.cases import SEQLENS, Case, add_case_arguments, cases_from, is_default_set


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_case_arguments(parser)
    return parser.parse_args(argv)


def test_default_set():
    cases = cases_from(parse())
    assert len(cases) == len(set(cases)) == 2 * len(SEQLENS)
    assert {case.S_q for case in cases} == {512, 1024, 2048, 4096, 8192, 16384}
    for case in cases:
        assert case.B * case.S_q == 16384 and case.S_q == case.S_k
        assert (case.dtype, case.H, case.H_kv, case.D) == ("bf16", 16, 16, 128)
    assert is_default_set(parse("--dtype", "fp16"))
    assert not is_default_set(parse("--causal"))
    assert not is_default_set(parse("--head-dim", "64", "128"))


def test_options_expand():
    cases = cases_from(
        parse("--head-dim", "64", "--seqlen", "1x8192", "512", "--no-causal", "--heads", "8", "--heads-kv", "2")
    )
    assert cases == [
        Case("bf16", 2, 1, 8192, 8, 2, 64, False),
        Case("bf16", 32, 512, 512, 8, 2, 64, False),
    ]
    assert {case.H for case in cases_from(parse("--head-dim", "64"))} == {32}
    assert {case.B for case in cases_from(parse("--batch", "3"))} == {3}


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match=r"--heads must be a multiple of --heads-kv \(3\), got 16"):
        cases_from(parse("--heads-kv", "3"))


@pytest.mark.parametrize(
    "argv", [("--seqlen", "0"), ("--seqlen", "12x"), ("--batch", "-1"), ("--heads", "two"), ("--head-dim", "65")]
)
def test_bad_values_exit_2_and_name_the_option(argv, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 2
    assert f"argument {argv[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5x", "x5", "5x0", "long", "1x2x3"])
def test_a_bad_seqlen_is_shown_whole_with_its_form(text, capsys):
    with pytest.raises(SystemExit):
        parse("--seqlen", text)
    err = capsys.readouterr().err
    assert "must be S or S_qxS_k" in err and f"got {text!r}" in err


def test_tensors_are_those_of_the_problem():
    case = Case("fp16", 2, 5, 7, 4, 2, 64, True)
    q, k, v = case.tensors("cpu")
    assert AttentionProblem.from_tensors(q, k, v, causal=True) == case.problem(q.device)
    assert abs(q.float().std().item() - 1.0) < 0.1
