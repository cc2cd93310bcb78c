"""Faults planted into the compiled rungs, one at a time: each is found. On the rungs as they are nothing is."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from cute_fa.compiled import get_artifacts
from cute_fa.config import KernelConfig
from cute_fa.emulator import EmulationReport, run_forward
from cute_fa.ladder import KERNELS
from cute_fa.problem import StaticProblem
from layouts import PADDED_8
from tests.cases import Case, assert_close

RUNG = KERNELS["kernel2"]
CASE = Case(100, 150, 64, causal=True)
NO_KEYS = Case(200, 60, 64, causal=True)  # its first CTAs see no key
WAIT, BARRIER, COMMIT = r"cp\.async\.wait_group\s+\d+;", r"bar\.sync\s+0;", r"cp\.async\.commit_group;"


def static_of(case: Case) -> StaticProblem:
    return StaticProblem(case.dtype, case.head_dim, case.causal, return_lse=True)


def compiled(case: Case, config: KernelConfig = RUNG.config) -> str:
    return get_artifacts(static_of(case), RUNG, config, "sm_80").ptx


def execute(ptx: str, case: Case, generator, config: KernelConfig = RUNG.config) -> tuple[EmulationReport, bool]:
    """(report, whether o and lse are right)."""
    q, k, v = case.tensors("cpu", generator)
    o, lse = torch.empty_like(q), torch.empty(case.batch, case.num_heads, case.seqlen_q)
    scale = case.head_dim**-0.5
    report = run_forward(ptx, static_of(case), RUNG, config, q, k, v, o, lse, scale)
    try:
        assert_close(case, q, k, v, o, lse)
    except AssertionError:
        return report, False
    return report, True


def without(pattern: str, number: int, ptx: str) -> str:
    """The module without the ``number``-th match of ``pattern``."""
    match = list(re.finditer(pattern, ptx))[number]
    return ptx[: match.start()] + ptx[match.end() :]


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


def kinds(report: EmulationReport) -> set[str]:
    return {fault.kind for fault in report.faults}


@pytest.mark.parametrize("case", [CASE, NO_KEYS], ids=str)
def test_nothing_is_found_on_the_rung_itself(case, generator):
    report, right = execute(compiled(case), case, generator)
    assert not report.faults and right


@pytest.mark.parametrize("number", range(4))
def test_missing_barrier(number, generator):
    """Each barrier of the kernel is needed, the one before the store of O where a CTA sees no key."""
    ptx = compiled(CASE)
    assert count(BARRIER, ptx) == 4
    found = set()
    for case in (CASE, NO_KEYS):
        found |= kinds(execute(without(BARRIER, number, ptx), case, generator)[0])
    assert found == {"race"}


@pytest.mark.parametrize(("number", "case"), [(0, CASE), (1, NO_KEYS)], ids=str)
def test_missing_wait(number, case, generator):
    ptx = compiled(case)
    assert count(WAIT, ptx) == 2
    report, _ = execute(without(WAIT, number, ptx), case, generator)
    assert {"read before wait", "store before wait"} & kinds(report)


def test_missing_commit(generator):
    """A wait leaves copies alone that were never committed: Q in CTAs without a key, K and V elsewhere."""
    ptx = compiled(NO_KEYS)
    assert count(COMMIT, ptx) == 2
    assert "store before wait" in kinds(execute(without(COMMIT, 0, ptx), NO_KEYS, generator)[0])
    assert "read before wait" in kinds(execute(without(COMMIT, 1, ptx), CASE, generator)[0])


def test_read_through_another_layout_than_the_write(generator):
    """The copies to shared memory lose their swizzle; ldmatrix keeps it."""
    ptx = compiled(CASE)
    first_copy = ptx.index("cp.async")
    swizzle = list(re.finditer(r"xor\.b32\s+(%r\d+), (%r\d+), (%r\d+);", ptx[:first_copy]))[-1]
    unswizzled = f"mov.b32 {swizzle[1]}, {swizzle[3]};"
    report, right = execute(ptx[: swizzle.start()] + unswizzled + ptx[swizzle.end() :], CASE, generator)
    assert not right
    ideal, actual = report.by_path()["cp.async"]
    assert actual == ideal and not report.faults  # nothing but the numbers shows it


def test_read_of_a_place_that_nothing_wrote(generator):
    """In rows of 64 elements and 8 of padding, the first ldmatrix of Q starts in the padding."""
    config = replace(RUNG.config, layout=PADDED_8)
    ptx = compiled(CASE, config)
    match = re.search(r"(ldmatrix\S+\s+\{[^}]*\}, \[%r\d+)(\+\d+)?\];", ptx)
    edited = f"{match[1]}+{int(match[2] or 0) + 128}];"
    report, right = execute(ptx[: match.start()] + edited + ptx[match.end() :], CASE, generator, config)
    # The rows that a warp reads in place of its own are those that another stores O to.
    assert kinds(report) == {"uninitialised read", "race"} and not right
    assert "ldmatrix" in report.faults[0].instruction and "mma.py" in report.faults[0].instruction


def test_tail_that_is_not_masked(generator):
    """The branch around the mask is always taken: scores behind the last key enter the softmax."""
    ptx = compiled(CASE)
    loop = ptx.index("bar.sync")
    mask = re.compile(r"@(!?%p\d+) bra\s+(\$\w+);").search(ptx, loop)
    edited = ptx[: mask.start()] + f"bra {mask[2]};" + ptx[mask.end() :]
    report, right = execute(edited, CASE, generator)
    assert not right and not report.faults


def test_copies_of_the_tail_that_are_not_predicated(generator):
    """cp.async takes 16 bytes where it should take none: rows behind the last one of q, k and v are read."""
    edited, replaced = re.subn(r"selp\.b32(\s+%r\d+), 16, 0, %p\d+;", r"mov.b32\1, 16;", compiled(CASE))
    report, _ = execute(edited, CASE, generator)
    assert replaced and kinds(report) == {"out of bounds"}
    named = " ".join(fault.detail for fault in report.faults)
    assert all(f"tensor {name!r}" in named for name in "qkv") and "'o'" not in named


def test_offset_out_of_bounds(generator):
    ptx = compiled(CASE)
    match = re.search(r"(st\.global\.v4\.b32\s+\[%rd\d+)\]", ptx)
    edited = ptx[: match.start()] + match[1] + "+1048576]" + ptx[match.end() :]
    report, _ = execute(edited, CASE, generator)
    assert kinds(report) == {"out of bounds"} and "tensor 'o'" in report.faults[0].detail
    assert "st.global.v4.b32" in report.faults[0].instruction
