"""Faults planted into the rungs for Hopper and into small kernels with mbarriers and named barriers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from cute_fa.compiled import get_artifacts
from cute_fa.emulator import EmulationError, EmulationReport, UnknownInstructionError, run_forward
from cute_fa.ladder import KERNELS
from cute_fa.problem import StaticProblem
from tests.cases import Case, assert_close
from tests.cute_fa.emulator.harness import run

CASE = Case(130, 200, 64, causal=True)  # one CTA with four tiles of up to seven blocks
STATIC = StaticProblem(CASE.dtype, CASE.head_dim, CASE.causal, return_lse=True)
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[[^;]*;"
ARRIVE = r"mbarrier\.arrive\.shared\.b64[^;]*;"


def config(kernel: str):
    return replace(KERNELS[kernel].config_for(64), tile_m=128, tile_n=32, num_stages=2, max_ctas=1)


def compiled(kernel: str = "kernel8") -> str:
    return get_artifacts(STATIC, KERNELS[kernel], config(kernel), "sm_90a").ptx


def execute(ptx: str, generator, kernel: str = "kernel8") -> tuple[EmulationReport, bool]:
    """(report, whether o and lse are right)."""
    q, k, v = CASE.tensors("cpu", generator)
    o, lse = torch.zeros_like(q), torch.empty(CASE.batch, CASE.num_heads, CASE.seqlen_q)
    report = run_forward(ptx, STATIC, KERNELS[kernel], config(kernel), q, k, v, o, lse, CASE.head_dim**-0.5)
    try:
        assert_close(CASE, q, k, v, o, lse)
    except AssertionError:
        return report, False
    return report, True


def replaced(pattern: str, number: int, ptx: str, by: str = "") -> str:
    """The module with its ``number``-th match of ``pattern`` replaced."""
    match = list(re.finditer(pattern, ptx))[number]
    return ptx[: match.start()] + by + ptx[match.end() :]


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


def kinds(report: EmulationReport) -> set[str]:
    return {fault.kind for fault in report.faults}


def test_nothing_is_found_on_the_rung_itself(generator):
    report, right = execute(compiled(), generator)
    assert not report.faults and right


# --- mbarriers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(11))
def test_nobody_waits(number, generator):
    """The producer for Q, K, Q, K, V, V to be free; the consumers for Q, and K and V of masked and whole blocks.

    That V is free follows in its loop from K, which the consumers let go after the V before.
    """
    ptx = compiled()
    assert count(WAIT, ptx) == 11
    producer = ptx.index("setmaxnreg.inc")
    assert count(WAIT, ptx[:producer]) == 6
    report, right = execute(replaced(WAIT, number, ptx, "setp.eq.b32 P1, 0, 0;"), generator)
    if number == 4:
        assert not report.faults and right
        return
    races = [fault for fault in report.faults if fault.kind == "race"]
    assert races and kinds(report) <= {"race", "deadlock"}
    assert all("a TMA load for the mbarrier" in fault.detail for fault in races)


def test_bytes_that_never_come(generator):
    """An expect_tx of 16 bytes more than a box of Q has."""
    edited, changed = re.subn(r"(mov\.b32\s+%r\d+), 8192;", r"\1, 8208;", compiled(), count=1)
    report, right = execute(edited, generator)
    assert changed and not right and kinds(report) == {"deadlock"}
    assert "0 of 1 arrivals and 16 bytes are missing" in report.faults[0].detail
    assert "try_wait" in report.faults[0].instruction and "tma_ring.py" in report.faults[0].instruction


@pytest.mark.parametrize("number", range(5))
def test_readers_that_do_not_let_go(number, generator):
    ptx = compiled()
    assert count(ARRIVE, ptx) == 5
    report, right = execute(replaced(ARRIVE, number, ptx), generator)
    assert not right and kinds(report) == {"deadlock"}
    assert any("warp 0 of CTA 0 waits for ever for the mbarrier" in fault.detail for fault in report.faults)


def test_mbarriers_that_not_everybody_knows_of(generator):
    report, _ = execute(replaced(r"bar\.sync\s+0;", 0, compiled()), generator)
    assert kinds(report) == {"invalid mbarrier"} and "which warp 0 makes unordered" in report.faults[0].detail


# --- wgmma, stores -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [r"wgmma\.wait_group\.sync\.aligned\s+\d;", r"wgmma\.commit_group\.sync\.aligned;"])
@pytest.mark.parametrize("number", range(4))
def test_products_that_nobody_waits_for(what, number, generator):
    ptx = compiled()
    assert count(what, ptx) == 4
    report, _ = execute(replaced(what, number, ptx), generator)
    assert "race" in kinds(report) and any("wgmma of warp" in fault.detail for fault in report.faults)
    # But for one: the output of a masked block is touched behind the next wait, that for the next block's scores.
    assert ("register before wait" in kinds(report)) == (number != 1)


def test_probabilities_that_are_overwritten_too_soon(generator):
    """A register of P gets its own value again while a product may still read it."""
    pattern = r"(wgmma\.mma_async[^;]*\}, \{(%r\d+), [^;]*;\s*\})"
    edited = re.sub(pattern, r"\1\nadd.s32 \2, \2, 0;", compiled(), count=1)
    report, right = execute(edited, generator)
    assert right and kinds(report) == {"register before wait"} and "add.s32" in report.faults[0].instruction


@pytest.mark.parametrize(
    ("what", "number", "kind", "match"),
    [
        (r"bar\.sync\s+%r\d+, 128;", 0, "race", r"warp 4 of CTA 0 writes and wgmma of warp 5 of CTA 0 reads"),
        (r"bar\.sync\s+%r\d+, 128;", 1, "race", r"a TMA store of warp 4 of CTA 0 reads and warp 5 of CTA 0 writes"),
        (r"fence\.proxy\.async\.shared::cta;", 0, "missing proxy fence", r"TMA store of warp 4 .*which warp 4 writes"),
        (r"cp\.async\.bulk\.wait_group\.read\s+0;", 1, "race", r"a TMA load .* and a TMA store of warp 4 .* reads"),
        (r"cp\.async\.bulk\.commit_group;", 0, "exit before wait", r"warp 4 of CTA 0 exits without waiting"),
    ],
)  # fmt: skip
def test_stores_of_o(what, number, kind, match, generator):
    report, right = execute(replaced(what, number, compiled()), generator)
    assert right  # nothing but the order shows it
    found = [fault for fault in report.faults if fault.kind == kind]
    assert found and any(re.search(match, fault.detail) for fault in found)


def test_turns_that_are_not_passed_on(generator):
    pattern = r"bar\.arrive\s+%r\d+, 256;"
    report, _ = execute(replaced(pattern, 0, compiled("kernel11")), generator, "kernel11")
    assert "deadlock" in kinds(report)
    assert any(re.search(r"barrier \d, where 128 of 256 threads are", fault.detail) for fault in report.faults)


def test_boxes_out_of_place(generator):
    pattern = r"(cp\.async\.bulk\.tensor\.4d\.shared::cta\S+ \[%r\d+)\]"
    match = re.search(pattern, compiled())
    for offset, kind in ((64, "misaligned"), (1 << 20, "out of bounds")):
        edited = compiled().replace(match[0], f"{match[1]}+{offset}]", 1)
        report, _ = execute(edited, generator)
        assert kind in kinds(report) and "a box of 'q', 8192 bytes" in report.faults[0].detail


def test_forms_that_are_not_known(generator):
    edited = compiled().replace("complete_tx::bytes.L2", "complete_tx::bytes.multicast::cluster.L2", 1)
    with pytest.raises(UnknownInstructionError, match=r"multicast::cluster.* is not known to the emulator"):
        execute(edited, generator)
    edited = re.sub(r"(bulk\.tensor\.4d\.shared\S+ \[%r\d+\], )\[%rd\d+", r"\1[0", compiled(), count=1)
    with pytest.raises(EmulationError, match="its address is that of no tensor map"):
        execute(edited, generator)


# --- small kernels -----------------------------------------------------------------------------------------

# Warp 0 writes a word a lane, warp 1 reads it; the mbarrier lies behind the words.
HAND_OVER = """
    mov.b32 %r1, smem;
    add.u32 %r2, %r1, 128;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra MADE;
    mbarrier.init.shared.b64 [%r2], 32;
MADE:
    bar.sync 0;
    and.b32 %r3, %r0, 31;
    shl.b32 %r3, %r3, 2;
    add.u32 %r4, %r1, %r3;
    setp.gt.u32 %p2, %r0, 31;
    @%p2 bra READER;
    st.shared.b32 [%r4], %r0;
    {arrive}
    ret;
READER:
    {wait}
    ld.shared.b32 %r5, [%r4];
    add.u32 %r5, %r5, {extra};
    cvt.u64.u32 %rd1, %r3;
    add.u64 %rd1, %rd1, %rd0;
    st.global.b32 [%rd1], %r5;
"""
BY_MBARRIER = {
    "arrive": "mbarrier.arrive.shared.b64 %rd9, [%r2];",
    "wait": "{ .reg .pred q; AGAIN: mbarrier.try_wait.parity.shared.b64 q, [%r2], 0, 1000; @q bra ON; bra AGAIN; ON: }",
    "extra": 0,
}
BY_NAME = {"arrive": "bar.arrive 3, 64;", "wait": "bar.sync 3, 64;", "extra": 0}


@pytest.mark.parametrize("parts", [BY_MBARRIER, BY_NAME], ids=["mbarrier", "named barrier"])
def test_hand_over(parts):
    out = np.zeros(32, np.uint32)
    report = run(HAND_OVER.format(**parts), out, threads=64, ctas=3, shared_bytes=144)
    assert not report.faults and (out == np.arange(32)).all()
    report = run(HAND_OVER.format(**(parts | {"wait": ""})), out, threads=64, shared_bytes=144)
    assert kinds(report) == {"race"} and "warp 1 of CTA 0 reads" in report.faults[0].detail
    report = run(HAND_OVER.format(**(parts | {"arrive": ""})), out, threads=64, ctas=2, shared_bytes=144)
    assert kinds(report) == {"deadlock"} and report.faults[0].count == 2


def test_phases_that_come_too_late_or_too_soon():
    out = np.zeros(32, np.uint32)
    late = BY_MBARRIER | {"wait": BY_MBARRIER["wait"].replace(", 0, 1000", ", 1, 1000")}
    report = run(HAND_OVER.format(**late), out, threads=64, shared_bytes=144)
    assert kinds(report) == {"deadlock"} and "in whose phase 1 32 of 32 arrivals" in report.faults[0].detail
    many = BY_MBARRIER | {"arrive": BY_MBARRIER["arrive"].replace("[%r2]", "[%r2], 5")}
    report = run(HAND_OVER.format(**many), out, threads=64, shared_bytes=144)
    assert "invalid mbarrier" in kinds(report) and "one arrival too many" in report.faults[0].detail


def test_votes_of_some_threads():
    body = """
    setp.lt.u32 %p1, %r0, 40;
    shr.u32 %r1, %r0, 6;
    bar.red.popc.u32 %r2, %r1, 64, %p1;
    mul.wide.u32 %rd1, %r0, 4;
    add.u64 %rd1, %rd1, %rd0;
    st.global.b32 [%rd1], %r2;
    """
    out = np.zeros(128, np.uint32)
    assert not run(body, out, threads=128).faults
    assert (out == np.repeat([40, 0], 64)).all()
    report = run(body.replace("64, %p1", "96, %p1"), out, threads=128)
    assert "deadlock" in kinds(report) and "barrier 0, where 64 of 96 threads are" in report.faults[0].detail


def test_elected_lane():
    body = """
    elect.sync %r1|%p1, -1;
    selp.u32 %r2, 1, 0, %p1;
    mul.wide.u32 %rd1, %r0, 4;
    add.u64 %rd1, %rd1, %rd0;
    st.global.b32 [%rd1], %r2;
    """
    out = np.zeros(64, np.uint32)
    assert not run(body, out, threads=64).faults
    assert out.sum() == 2 and out[0] == out[32] == 1
