"""Shared and global memory: cp.async, bounds, races, barriers, wavefronts; each fault in the smallest kernel."""

from __future__ import annotations

import numpy as np
import pytest

from cute_fa.emulator import EmulationError, EmulationFault, TensorArg, emulate
from tests.cute_fa.emulator.harness import module, run

OUT = """
    mul.wide.u32 %rd40, %r0, 4;
    add.s64 %rd40, %rd40, %rd0;
    st.global.b32 [%rd40], %r9;
"""
ADDRESS = """
    mov.b32 %r1, smem;
    mad.lo.s32 %r1, %r0, 4, %r1;
"""


def kinds(report) -> set[str]:
    return {fault.kind for fault in report.faults}


def test_store_barrier_load():
    out = np.zeros(64, np.uint32)
    body = ADDRESS + "xor.b32 %r2, %r1, 128;\nst.shared.b32 [%r1], %r0;\nbar.sync 0;\nld.shared.b32 %r9, [%r2];\n"
    run(body + OUT, out, shared_bytes=256).raise_for_faults()
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)


def test_missing_barrier_is_a_race():
    body = ADDRESS + "xor.b32 %r2, %r1, 128;\nst.shared.b32 [%r1], %r0;\nld.shared.b32 %r9, [%r2];\n"
    report = run(body + OUT, np.zeros(64, np.uint32), shared_bytes=256)
    assert kinds(report) == {"race"}
    assert sum(fault.count for fault in report.faults) == 64
    assert "st.shared.b32" in report.faults[0].instruction and "ld.shared.b32" in report.faults[0].instruction


def test_missing_barrier_after_the_read_is_a_race():
    body = ADDRESS + "xor.b32 %r2, %r1, 128;\nst.shared.b32 [%r1], %r0;\nbar.sync 0;\nld.shared.b32 %r9, [%r2];\n"
    report = run(body + "st.shared.b32 [%r1], %r9;\n" + OUT, np.zeros(64, np.uint32), shared_bytes=256)
    assert kinds(report) == {"race"}


def test_two_lanes_that_store_to_one_word_race():
    body = ADDRESS + "and.b32 %r2, %r1, -8;\nst.shared.b32 [%r2], %r0;\n"
    report = run(body, np.zeros(64, np.uint32), shared_bytes=256)
    assert kinds(report) == {"race"} and report.faults[0].count == 32


def test_halves_of_a_word_do_not_race():
    body = """
    mov.b32 %r1, smem;
    mad.lo.s32 %r1, %r0, 2, %r1;
    cvt.u16.u32 %rs1, %r0;
    st.shared.b16 [%r1], %rs1;
    """
    run(body, np.zeros(64, np.uint32), shared_bytes=128).raise_for_faults()


@pytest.mark.parametrize("between", ["bar.warp.sync -1;", "shfl.sync.idx.b32 %r5, %r0, 0, 31, -1;"])
def test_a_sync_instruction_orders_its_warp_and_no_other(between):
    within = ADDRESS + f"xor.b32 %r2, %r1, 4;\nst.shared.b32 [%r1], %r0;\n{between}\nld.shared.b32 %r9, [%r2];\n"
    out = np.zeros(64, np.uint32)
    run(within + OUT, out, shared_bytes=256).raise_for_faults()
    np.testing.assert_array_equal(out, np.arange(64) ^ 1)
    across = within.replace("%r1, 4", "%r1, 128")
    assert kinds(run(across + OUT, out, shared_bytes=256)) == {"race"}
    without = within.replace(between, "")
    assert kinds(run(without + OUT, out, shared_bytes=256)) == {"race"}


def test_uninitialised_read_names_instruction_and_byte():
    body = (
        ADDRESS + "setp.ne.u32 %p1, %r0, 5;\n@%p1 st.shared.b32 [%r1], %r0;\nbar.sync 0;\nld.shared.b32 %r9, [%r1];\n"
    )
    report = run(body + OUT, np.zeros(64, np.uint32), shared_bytes=256, ctas=3)
    assert kinds(report) == {"uninitialised read"}
    (fault,) = report.faults
    assert fault.count == 3 and "byte 20" in fault.detail and "thread 5 of CTA 0" in fault.detail
    assert "PTX line" in fault.instruction and "ld.shared.b32" in fault.instruction


def test_row_pitch_of_another_layout_reads_what_nothing_wrote():
    """Rows of 16 bytes stored at a pitch of 16, read at a pitch of 32."""
    body = """
    mov.b32 %r1, smem;
    mad.lo.s32 %r2, %r0, 16, %r1;
    mad.lo.s32 %r3, %r0, 32, %r1;
    st.shared.v4.b32 [%r2], {%r0, %r0, %r0, %r0};
    bar.sync 0;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];
    """
    report = run(body, np.zeros(1, np.uint32), shared_bytes=2048)
    assert kinds(report) == {"uninitialised read"} and report.faults[0].count == 32


def test_shared_bounds_and_alignment():
    outside = run(ADDRESS + "st.shared.b32 [%r1+4], %r0;", np.zeros(1, np.uint32), shared_bytes=256)
    assert kinds(outside) == {"out of bounds"} and "byte 256 of 256" in outside.faults[0].detail
    crooked = run(ADDRESS + "st.shared.v2.b32 [%r1], {%r0, %r0};", np.zeros(1, np.uint32), shared_bytes=264)
    assert "misaligned" in kinds(crooked)
    below = run(ADDRESS + "st.shared.b32 [%r1+-8], %r0;", np.zeros(1, np.uint32), shared_bytes=256)
    assert kinds(below) == {"out of bounds"}


def test_global_bounds_name_the_tensor():
    array = np.arange(100, dtype=np.uint32)
    body = """
    mul.wide.u32 %rd40, %r0, 4;
    add.s64 %rd40, %rd40, %rd0;
    ld.global.b32 %r9, [%rd40+160];
    st.global.b32 [%rd40+-4], %r9;
    """
    report = run(body, array)
    reads, writes = report.faults
    assert reads.kind == writes.kind == "out of bounds"
    assert "'p0'" in reads.detail and reads.count == 4 and "byte 400 of 400" in reads.detail
    assert writes.count == 1 and "write" in writes.detail
    with pytest.raises(EmulationFault, match="out of bounds"):
        report.raise_for_faults()
    assert (
        run("mov.b64 %rd5, 64;\nld.global.b32 %r9, [%rd5];", array)
        .faults[0]
        .detail.startswith("global read of 4 bytes at an address of no tensor")
    )


def test_what_lies_between_the_elements_of_a_view_is_out_of_bounds():
    storage = np.arange(256, dtype=np.uint32).reshape(64, 4)
    body = """
    mul.wide.u32 %rd40, %r0, 16;
    add.s64 %rd40, %rd40, %rd0;
    ld.global.b32 %r9, [%rd40+{}];
    st.global.b32 [%rd40], %r9;
    """
    inside = storage.copy()
    run(body.format(4), inside[:, :2]).raise_for_faults()
    np.testing.assert_array_equal(inside[:, 0], storage[:, 1])
    np.testing.assert_array_equal(inside[:, 1:], storage[:, 1:])
    report = run(body.format(8), storage[:, :2])
    assert kinds(report) == {"out of bounds"} and report.faults[0].count == 64


def test_an_access_over_a_gap_is_out_of_bounds():
    """Eight bytes whose first and last lie in elements of one byte, and the rest between them."""
    storage = np.zeros(1024, np.uint8)
    body = "mul.wide.u32 %rd40, %r0, 16;\nadd.s64 %rd40, %rd40, %rd0;\nld.global.v2.b32 {%r1, %r2}, [%rd40];"
    assert kinds(run(body, storage[::7][:128])) == {"out of bounds"}


def test_misaligned_global_access():
    body = "mul.wide.u32 %rd40, %r0, 4;\nadd.s64 %rd40, %rd40, %rd0;\nld.global.v2.b32 {%r1, %r2}, [%rd40];\n"
    report = run(body, np.zeros(66, np.uint32))
    assert kinds(report) == {"misaligned"} and report.faults[0].count == 32


COPY = """
    mov.b32 %r1, smem;
    mad.lo.s32 %r1, %r0, 16, %r1;
    mul.wide.u32 %rd41, %r0, 16;
    add.s64 %rd41, %rd41, %rd1;
    {copy}
    {wait}
    bar.sync 0;
    mov.b32 %r2, smem;
    mad.lo.s32 %r2, %r0, 4, %r2;
    ld.shared.b32 %r9, [%r2];
"""


def copied(copy="cp.async.cg.shared.global [%r1], [%rd41], 16;", wait="cp.async.commit_group;\ncp.async.wait_group 0;"):
    source, out = np.arange(1, 257, dtype=np.uint32), np.zeros(64, np.uint32)
    return run(COPY.format(copy=copy, wait=wait) + OUT, out, source, shared_bytes=1024), out


@pytest.mark.parametrize("wait", ["cp.async.commit_group;\ncp.async.wait_group 0;", "cp.async.wait_all;"])
def test_cp_async(wait):
    report, out = copied(wait=wait)
    report.raise_for_faults()
    np.testing.assert_array_equal(out, np.arange(1, 65))


@pytest.mark.parametrize(
    "wait", ["", "cp.async.commit_group;", "cp.async.wait_group 0;", "cp.async.commit_group;\ncp.async.wait_group 1;"]
)
def test_cp_async_without_its_wait_or_commit(wait):
    report, out = copied(wait=wait)
    assert "read before wait" in kinds(report)
    assert (out == 0xFFFFFFFF).all()


def test_cp_async_fills_with_zeros():
    report, out = copied("and.b32 %r3, %r0, 15;\ncp.async.cg.shared.global [%r1], [%rd41], 16, %r3;")
    report.raise_for_faults()
    source = np.arange(1, 257, dtype=np.uint32).view(np.uint8).reshape(64, 16).copy()
    source[np.arange(16) >= (np.arange(64) & 15)[:, None]] = 0
    np.testing.assert_array_equal(out, source.view(np.uint32).reshape(-1)[:64])


def test_cp_async_ignores_its_source():
    copy = "setp.lt.u32 %p1, %r0, 8;\ncp.async.ca.shared.global [%r1], [%rd41], 16, %p1;"
    report, out = copied(copy)
    report.raise_for_faults()
    np.testing.assert_array_equal(out, np.where(np.arange(64) < 32, 0, np.arange(1, 65)))


def test_cp_async_with_no_bytes_may_point_anywhere():
    report, out = copied("mov.b32 %r3, 0;\nmov.b64 %rd41, 8;\ncp.async.cg.shared.global [%r1], [%rd41], 16, %r3;")
    report.raise_for_faults()
    assert not out.any()


def test_groups_complete_in_order():
    source, out = np.arange(1, 257, dtype=np.uint32), np.zeros(64, np.uint32)
    body = """
    mov.b32 %r1, smem;
    mad.lo.s32 %r1, %r0, 8, %r1;
    mul.wide.u32 %rd41, %r0, 8;
    add.s64 %rd41, %rd41, %rd1;
    cp.async.ca.shared.global [%r1], [%rd41], 8;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1+512], [%rd41+512], 8;
    cp.async.commit_group;
    cp.async.wait_group {keep};
    ld.shared.b32 %r2, [%r1];
    ld.shared.b32 %r3, [%r1+512];
    add.s32 %r9, %r2, %r3;
    """
    report = run(body.format(keep=1) + OUT, out, source, shared_bytes=1024)
    (fault,) = report.faults
    assert fault.kind == "read before wait" and "[%r1+512]" in fault.instruction
    run(body.format(keep=0) + OUT, out, source, shared_bytes=1024).raise_for_faults()
    np.testing.assert_array_equal(out, source[:128:2] + source[128::2])


def test_cp_async_over_what_others_still_read_is_a_race_until_its_wait():
    """Reads in one interval, the copy issued in the same, its wait two barriers later."""
    body = """
    mov.b32 %r1, smem;
    mad.lo.s32 %r2, %r0, 16, %r1;
    mul.wide.u32 %rd41, %r0, 16;
    add.s64 %rd41, %rd41, %rd1;
    st.shared.v4.b32 [%r2], {%r0, %r0, %r0, %r0};
    bar.sync 0;
    xor.b32 %r3, %r2, 512;
    ld.shared.b32 %r9, [%r3];
    BEFORE
    cp.async.cg.shared.global [%r2], [%rd41], 16;
    cp.async.commit_group;
    bar.sync 0;
    cp.async.wait_group 0;
    AFTER
    ld.shared.b32 %r9, [%r3];
    """
    arrays = np.zeros(64, np.uint32), np.zeros(256, np.uint32)

    def found(before, after):
        text = body.replace("BEFORE", before).replace("AFTER", after)
        return kinds(run(text + OUT, *arrays, shared_bytes=1024))

    assert found("bar.sync 0;", "bar.sync 0;") == set()
    assert found("", "bar.sync 0;") == {"race"}
    assert found("bar.sync 0;", "") == {"race"}


def test_barrier_that_a_warp_misses():
    body = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra SKIP;\nbar.sync 0;\nSKIP:\n"
    report = run(body, np.zeros(1, np.uint32))
    assert kinds(report) == {"barrier divergence"} and "has exited" in report.faults[0].detail


def test_barrier_that_a_part_of_a_warp_misses():
    body = "setp.lt.u32 %p1, %r0, 40;\n@%p1 bra SKIP;\nbar.sync 0;\nSKIP:\nbar.sync 0;\n"
    report = run(body, np.zeros(1, np.uint32))
    assert kinds(report) == {"barrier divergence"}
    assert any("only 24 lanes" in fault.detail for fault in report.faults)


def test_wavefronts_of_strides():
    body = """
    mov.b32 %r1, smem;
    mad.lo.s32 %r2, %r0, 4, %r1;
    mad.lo.s32 %r3, %r0, 8, %r1;
    mad.lo.s32 %r4, %r0, 128, %r1;
    st.shared.b32 [%r2], %r0;
    bar.sync 0;
    st.shared.b32 [%r3], %r0;
    bar.sync 0;
    st.shared.b32 [%r4], %r0;
    bar.sync 0;
    ld.shared.b32 %r5, [smem];
    setp.eq.s32 %p1, %r0, 3;
    @%p1 ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [smem+16];
    """
    for ctas in (1, 3):
        report = run(body, np.zeros(1, np.uint32), shared_bytes=8192, ctas=ctas)
        counts = [(w.executions, w.ideal, w.actual) for w in report.wavefronts]
        expected = [(2, 2, 2), (2, 2, 4), (2, 2, 64), (2, 2, 2), (1, 1, 1)]
        assert counts == [tuple(n * ctas for n in entry) for entry in expected]
        assert report.by_path()["st.shared"] == (6 * ctas, 70 * ctas)


def test_without_checks_bounds_remain():
    ptx = module(ADDRESS + "ld.shared.b32 %r9, [%r1];\nld.shared.b32 %r9, [%r1+128];", 1, 256)
    report = emulate(ptx, (1, 1, 1), (64, 1, 1), [TensorArg("t", np.zeros(1))], 0, check=False)
    assert kinds(report) == {"out of bounds"} and not report.wavefronts


def test_dynamic_shared_memory_follows_the_static():
    ptx = module("mov.b32 %r1, dynamic;\nst.shared.b32 [%r1+60], %r0;\nst.shared.b32 [%r1+64], %r0;", 1, 48)
    ptx = ptx.replace(".visible .entry", ".extern .shared .align 16 .b8 dynamic[];\n.visible .entry")
    report = emulate(ptx, (1, 1, 1), (32, 1, 1), [TensorArg("t", np.zeros(1))], 64)
    outside = [fault for fault in report.faults if fault.kind == "out of bounds"]
    assert len(outside) == 1 and "byte 112 of 112" in outside[0].detail


def test_arguments_that_do_not_fit():
    ptx = module("", 1)
    with pytest.raises(EmulationError, match="1 parameters, got 0"):
        emulate(ptx, (1, 1, 1), (32, 1, 1), [], 0)
    with pytest.raises(EmulationError, match="takes 12 bytes"):
        emulate(ptx, (1, 1, 1), (32, 1, 1), [np.zeros(3, np.float32)], 0)
    with pytest.raises(EmulationError, match="multiple of 32"):
        emulate(ptx, (1, 1, 1), (33, 1, 1), [np.uint64(0)], 0)


def test_reduction():
    out = np.zeros(4, np.float32)
    body = """
    and.b32 %r1, %r0, 3;
    mul.wide.u32 %rd10, %r1, 4;
    add.s64 %rd10, %rd10, %rd0;
    cvt.rn.f32.u32 %r2, %r0;
    red.global.add.f32 [%rd10], %r2;
    """
    run(body, out).raise_for_faults()
    np.testing.assert_array_equal(out, [sum(range(i, 64, 4)) for i in range(4)])
