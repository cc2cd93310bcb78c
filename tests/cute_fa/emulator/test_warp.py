"""What a warp does together: matrix loads, matrix products, shuffles, votes; and warps that part and meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_fa.emulator import EmulationError, UnknownInstructionError
from tests.cute_fa.emulator.harness import run

WARP = 32


def store(registers: str, count: int, pointer: int) -> str:
    """Each thread stores ``count`` registers at its own place of array ``pointer``."""
    return f"""
    mul.wide.u32 %rd40, %r0, {4 * count};
    add.s64 %rd40, %rd40, %rd{pointer};
    st.global{f".v{count}" if count > 1 else ""}.b32 [%rd40], {registers};
    """


def fill_shared(pointer: int, bytes_per_thread: int = 16) -> str:
    """Copies 16 bytes a thread from array ``pointer`` to shared memory."""
    return f"""
    mul.wide.u32 %rd41, %r0, {bytes_per_thread};
    add.s64 %rd41, %rd41, %rd{pointer};
    ld.global.v4.b32 {{%r40, %r41, %r42, %r43}}, [%rd41];
    mov.b32 %r44, smem;
    mad.lo.s32 %r44, %r0, 16, %r44;
    st.shared.v4.b32 [%r44], {{%r40, %r41, %r42, %r43}};
    bar.sync 0;
    """


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans):
    threads = 64
    rows = np.random.default_rng(0).integers(0, 2**16, (threads, 8)).astype(np.uint16)
    addressed = np.random.default_rng(1).permutation(threads).astype(np.uint32)  # row that each lane points to
    out = np.zeros((threads, count), np.uint32)
    registers = "{" + ", ".join(f"%r{10 + i}" for i in range(count)) + "}"
    body = (
        fill_shared(0)
        + f"""
    mul.wide.u32 %rd42, %r0, 4;
    add.s64 %rd42, %rd42, %rd1;
    ld.global.b32 %r45, [%rd42];
    mov.b32 %r46, smem;
    mad.lo.s32 %r46, %r45, 16, %r46;
    ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 {registers}, [%r46];
    """
    )
    body += store(registers if count > 1 else "%r10", count, 2)
    report = run(body, rows, addressed, out, threads=threads, shared_bytes=threads * 16)
    report.raise_for_faults()
    for warp in range(threads // WARP):
        for matrix in range(count):
            lanes = addressed[warp * WARP + matrix * 8 :][:8]
            tile = rows[lanes].T if trans else rows[lanes]
            expected = np.ascontiguousarray(tile).view(np.uint32).reshape(32)
            np.testing.assert_array_equal(out[warp * WARP : (warp + 1) * WARP, matrix], expected)


def test_stmatrix_undoes_ldmatrix():
    rows = np.random.default_rng(0).integers(0, 2**16, (32, 8)).astype(np.uint16)
    for trans in ("", ".trans"):
        out = np.zeros_like(rows)
        body = (
            fill_shared(0)
            + f"""
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r1, %r2, %r3, %r4}}, [%r44];
        bar.sync 0;
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r44], {{%r1, %r2, %r3, %r4}};
        bar.sync 0;
        ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r44];
        """
        )
        body += store("{%r1, %r2, %r3, %r4}", 4, 1)
        run(body, rows, out, threads=32, shared_bytes=512).raise_for_faults()
        np.testing.assert_array_equal(out, rows)


def fragments(a, b, c):
    """Per thread registers of m16n8k16: A (32, 4) and B (32, 2) as uint32, C (32, 4) as fp32."""
    lane = np.arange(WARP)
    g, t = lane // 4, lane % 4
    halves_a = np.stack([a[g + 8 * (i & 1), 2 * t + h + 8 * (i >> 1)] for i in range(4) for h in range(2)], 1)
    halves_b = np.stack([b[2 * t + h + 8 * i, g] for i in range(2) for h in range(2)], 1)
    return halves_a.copy().view(np.uint32), halves_b.copy().view(np.uint32), c_fragment(c)


def c_fragment(c):
    lane = np.arange(WARP)
    g, t = lane // 4, lane % 4
    return np.stack([c[g + 8 * i, 2 * t + h] for i in range(2) for h in range(2)], 1)


@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_mma(name, dtype):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 16), (16, 8)))
    c = torch.randn(16, 8, generator=generator)
    bits = [x.view(torch.int16).numpy().view(np.uint16) for x in (a, b)]
    fa, fb, fc = fragments(*bits, c.numpy())
    inputs = np.zeros((WARP, 12), np.uint32)
    inputs[:, :4], inputs[:, 4:6], inputs[:, 8:] = fa, fb, fc.view(np.uint32)
    out = np.zeros((WARP, 4), np.float32)
    twice = np.zeros((WARP, 4), np.float32)
    opcode, zero = f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32", "0f00000000"
    body = f"""
    mul.wide.u32 %rd30, %r0, 48;
    add.s64 %rd30, %rd30, %rd0;
    ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd30];
    ld.global.v2.b32 {{%r5, %r6}}, [%rd30+16];
    ld.global.v4.b32 {{%r9, %r10, %r11, %r12}}, [%rd30+32];
    {opcode} {{%r13, %r14, %r15, %r16}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r9, %r10, %r11, %r12}};
    {opcode} {{%r17, %r18, %r19, %r20}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{{zero}, {zero}, {zero}, {zero}}};
    {opcode} {{%r21, %r22, %r23, %r24}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r17, %r18, %r19, %r20}};
    """
    body += store("{%r13, %r14, %r15, %r16}", 4, 1) + store("{%r21, %r22, %r23, %r24}", 4, 2)
    run(body, inputs, out, twice, threads=WARP).raise_for_faults()
    product = a.double() @ b.double()
    np.testing.assert_allclose(out, c_fragment((product + c).numpy()), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(twice, c_fragment((2 * product).numpy()), rtol=1e-6, atol=1e-6)


def test_mma_of_eight_columns():
    """m16n8k8 is the left half of A and the upper half of B."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).half() for shape in ((16, 16), (16, 8)))
    fa, fb, _ = fragments(*(x.numpy().view(np.uint16) for x in (a, b)), np.zeros((16, 8), np.float32))
    inputs, out = np.stack([fa[:, 0], fa[:, 1], fb[:, 0], fb[:, 0]], 1), np.zeros((WARP, 4), np.float32)
    body = """
    mul.wide.u32 %rd30, %r0, 16;
    add.s64 %rd30, %rd30, %rd0;
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd30];
    mov.b32 %r9, 0;
    mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r5, %r6, %r7, %r8}, {%r1, %r2}, {%r3}, {%r9, %r9, %r9, %r9};
    """
    run(body + store("{%r5, %r6, %r7, %r8}", 4, 1), inputs, out, threads=WARP).raise_for_faults()
    expected = (a[:, :8].double() @ b[:8].double()).numpy()
    np.testing.assert_allclose(out, c_fragment(expected), rtol=1e-6, atol=1e-6)


def test_mma_overwriting_an_operand_of_the_chain():
    """A register that changes between two products of one accumulator: the first must see its old value."""
    one = np.float16(1).view(np.uint16) * np.uint32(0x10001)
    out = np.zeros((WARP, 4), np.float32)
    opcode = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    body = f"""
    mov.b32 %r1, {one};
    mov.b32 %r2, {one};
    {opcode} {{%r10, %r11, %r12, %r13}}, {{%r1, %r1, %r1, %r1}}, {{%r2, %r2}}, {{0, 0, 0, 0}};
    mov.b32 %r2, 0;
    {opcode} {{%r14, %r15, %r16, %r17}}, {{%r1, %r1, %r1, %r1}}, {{%r2, %r2}}, {{%r10, %r11, %r12, %r13}};
    """
    run(body + store("{%r14, %r15, %r16, %r17}", 4, 0), out, threads=WARP).raise_for_faults()
    assert (out == 16).all()


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("bfly", 1, 31, lambda lane: lane ^ 1),
        ("bfly", 16, 31, lambda lane: lane ^ 16),
        ("idx", 5, 31, lambda lane: np.full(32, 5)),
        ("idx", 2, 0x1C1F, lambda lane: lane // 4 * 4 + 2),
        ("up", 3, 0, lambda lane: np.where(lane >= 3, lane - 3, lane)),
        ("down", 3, 31, lambda lane: np.where(lane < 29, lane + 3, lane)),
    ],
)
def test_shuffle(mode, b, c, source):
    out, valid = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    body = f"""
    add.s32 %r1, %r0, 100;
    shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, -1;
    selp.b32 %r3, 1, 0, %p1;
    """
    run(body + store("%r2", 1, 0) + store("%r3", 1, 1), out, valid).raise_for_faults()
    lane = np.arange(32)
    expected = source(lane)
    np.testing.assert_array_equal(out, np.concatenate([expected + 100, expected + 132]))
    if mode in ("up", "down"):
        np.testing.assert_array_equal(valid[:32], expected != lane)


def test_votes():
    out = np.zeros((64, 4), np.uint32)
    body = """
    setp.lt.u32 %p1, %r0, 40;
    vote.sync.ballot.b32 %r1, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, 0xffffffff;
    selp.b32 %r2, 1, 0, %p2;
    selp.b32 %r3, 1, 0, %p3;
    activemask.b32 %r4;
    """
    run(body + store("{%r1, %r2, %r3, %r4}", 4, 0), out).raise_for_faults()
    np.testing.assert_array_equal(out[0], [0xFFFFFFFF, 1, 1, 0xFFFFFFFF])
    np.testing.assert_array_equal(out[32], [0xFF, 1, 0, 0xFFFFFFFF])


def test_a_mask_of_some_lanes_is_refused():
    with pytest.raises(UnknownInstructionError, match="mask of all 32 lanes"):
        run("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 255;", np.zeros(1, np.uint32))


def test_divergence_and_loops():
    """Collatz steps of every thread: each takes its own number of trips through two branches."""
    out = np.zeros(96 * 5, np.uint32)
    body = """
    mov.u32 %r1, %ctaid.x;
    mad.lo.s32 %r1, %r1, 96, %r0;
    add.s32 %r2, %r1, 1;
    mov.b32 %r3, 0;
LOOP:
    setp.eq.s32 %p1, %r2, 1;
    @%p1 bra DONE;
    and.b32 %r4, %r2, 1;
    setp.ne.s32 %p2, %r4, 0;
    @%p2 bra ODD;
    shr.u32 %r2, %r2, 1;
    bra NEXT;
ODD:
    mad.lo.s32 %r2, %r2, 3, 1;
NEXT:
    add.s32 %r3, %r3, 1;
    bra LOOP;
DONE:
    shfl.sync.bfly.b32 %r5, %r3, 1, 31, -1;
    mul.wide.u32 %rd10, %r1, 4;
    add.s64 %rd10, %rd10, %rd0;
    st.global.b32 [%rd10], %r5;
    """
    run(body, out, threads=96, ctas=5).raise_for_faults()

    def steps(n):
        count = 0
        while n != 1:
            n = 3 * n + 1 if n % 2 else n // 2
            count += 1
        return count

    np.testing.assert_array_equal(out, [steps((i ^ 1) + 1) for i in range(len(out))])


def test_part_of_a_warp_at_a_shuffle_is_an_error():
    body = """
    setp.lt.u32 %p1, %r0, 7;
    @%p1 bra SKIP;
    shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;
SKIP:
    """
    with pytest.raises(EmulationError, match=r"part of a warp") as caught:
        run(body, np.zeros(1, np.uint32))
    assert "shfl.sync.bfly.b32" in str(caught.value)
