"""Every instruction that computes for itself, against NumPy and PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_fa.emulator import PtxSyntaxError, UnknownInstructionError, emulate
from tests.cute_fa.emulator.harness import elementwise, module, run

N = 128
_EDGES = np.array([0, 1, 2, 31, 32, 33, 63, 64, 255, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32 - 2], np.uint64)


def bits(dtype, seed: int) -> np.ndarray:
    """Random integers of all sizes, edge values first."""
    rng = np.random.default_rng(seed)
    width = np.dtype(dtype).itemsize * 8
    values = rng.integers(0, 2**63, N, dtype=np.uint64) * np.uint64(2) >> rng.integers(0, 64, N).astype(np.uint64)
    values[: len(_EDGES)] = rng.permutation(_EDGES)
    values[len(_EDGES)] = 2**64 - 1
    return (values & np.uint64(2**width - 1)).astype(f"u{width // 8}").view(dtype)


def floats(seed: int, scale: float = 4.0) -> np.ndarray:
    values = (np.random.default_rng(seed).standard_normal(N) * scale).astype(np.float32)
    values[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 2.0**-126, 65504.0]
    return values


def halves(seed: int, dtype) -> torch.Tensor:
    return torch.from_numpy(floats(seed)).to(dtype)


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize(
    ("opcode", "dtype", "function"),
    [
        ("add.s32", np.int32, lambda a, b: a + b),
        ("sub.s32", np.int32, lambda a, b: a - b),
        ("mul.lo.s32", np.int32, lambda a, b: a * b),
        ("mul.hi.s32", np.int32, lambda a, b: (a.astype(np.int64) * b >> 32).astype(np.int32)),
        ("mul.hi.u32", np.uint32, lambda a, b: (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32)),
        ("add.s64", np.int64, lambda a, b: a + b),
        ("mul.lo.s64", np.int64, lambda a, b: a * b),
        ("min.s32", np.int32, np.minimum),
        ("max.u32", np.uint32, np.maximum),
        ("and.b32", np.uint32, lambda a, b: a & b),
        ("or.b64", np.uint64, lambda a, b: a | b),
        ("xor.b32", np.uint32, lambda a, b: a ^ b),
        ("add.s16", np.int16, lambda a, b: a + b),
    ],
)
def test_integers(opcode, dtype, function):
    a, b = bits(dtype, 1), bits(dtype, 2)
    np.testing.assert_array_equal(elementwise(f"{opcode} {{d}}, {{0}}, {{1}};", a, b, out=dtype), function(a, b))


def test_division_truncates_towards_zero():
    a, b = bits(np.int32, 1), bits(np.int32, 2)
    b[b == 0] = 7
    exact = np.array(
        [int(x) // int(y) if (x < 0) == (y < 0) else -(abs(int(x)) // abs(int(y))) for x, y in zip(a, b, strict=True)]
    )
    np.testing.assert_array_equal(elementwise("div.s32 {d}, {0}, {1};", a, b, out=np.int32), exact.astype(np.int32))
    remainder = (a - exact * b).astype(np.int32)
    np.testing.assert_array_equal(elementwise("rem.s32 {d}, {0}, {1};", a, b, out=np.int32), remainder)
    u, w = a.view(np.uint32), b.view(np.uint32)
    np.testing.assert_array_equal(elementwise("div.u32 {d}, {0}, {1};", u, w), u // w)


def test_multiply_add_and_wide():
    a, b, c = bits(np.int32, 1), bits(np.int32, 2), bits(np.int64, 3)
    product = a.astype(np.int64) * b
    np.testing.assert_array_equal(elementwise("mul.wide.s32 {d}, {0}, {1};", a, b, out=np.int64), product)
    np.testing.assert_array_equal(elementwise("mad.wide.s32 {d}, {0}, {1}, {2};", a, b, c, out=np.int64), product + c)
    low = elementwise("mad.lo.s32 {d}, {0}, {1}, {0};", a, b, out=np.int32)
    np.testing.assert_array_equal(low, a * b + a)


@pytest.mark.parametrize(
    ("opcode", "dtype"), [("shl.b32", np.uint32), ("shr.u32", np.uint32), ("shr.s32", np.int32), ("shr.s64", np.int64)]
)
def test_shifts_past_the_width(opcode, dtype):
    a = bits(dtype, 1)
    count = np.resize(np.array([0, 1, 5, 31, 32, 33, 63, 64, 200], np.uint32), N)
    width = a.dtype.itemsize * 8
    python = [int(x) << int(n) if "shl" in opcode else int(x) >> int(n) for x, n in zip(a, count, strict=True)]
    expected = np.array([x & (2**width - 1) for x in python], np.uint64).astype(f"u{width // 8}").view(dtype)
    np.testing.assert_array_equal(elementwise(f"{opcode} {{d}}, {{0}}, {{1}};", a, count, out=dtype), expected)


def test_bit_manipulation():
    a, b, c = bits(np.uint32, 1), bits(np.uint32, 2), bits(np.uint32, 3)
    np.testing.assert_array_equal(elementwise("lop3.b32 {d}, {0}, {1}, {2}, 0x96;", a, b, c), a ^ b ^ c)
    np.testing.assert_array_equal(elementwise("lop3.b32 {d}, {0}, {1}, {2}, 0xEA;", a, b, c), a & b | c)
    both = np.stack([a, b], 1).view(np.uint8)
    picked = both[:, [0, 5, 2, 7]].copy().view(np.uint32)[:, 0]
    np.testing.assert_array_equal(elementwise("prmt.b32 {d}, {0}, {1}, 0x7250;", a, b), picked)
    np.testing.assert_array_equal(elementwise("bfe.u32 {d}, {0}, 5, 9;", a), a >> 5 & 0x1FF)
    signed = (a.view(np.int32) << 18 >> 23).view(np.uint32)
    np.testing.assert_array_equal(elementwise("bfe.s32 {d}, {0}, 5, 9;", a), signed)
    np.testing.assert_array_equal(
        elementwise("bfi.b32 {d}, {0}, {1}, 4, 8;", a, b), b & ~np.uint32(0xFF0) | (a & 0xFF) << 4
    )
    np.testing.assert_array_equal(elementwise("popc.b32 {d}, {0};", a), [int(x).bit_count() for x in a])
    np.testing.assert_array_equal(elementwise("clz.b32 {d}, {0};", a), [32 - int(x).bit_length() for x in a])
    np.testing.assert_array_equal(elementwise("brev.b32 {d}, {0};", a), [int(f"{x:032b}"[::-1], 2) for x in a])
    np.testing.assert_array_equal(elementwise("not.b32 {d}, {0};", a), ~a)
    wrapped = (a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)) >> np.uint64(7)
    np.testing.assert_array_equal(elementwise("shf.r.wrap.b32 {d}, {0}, {1}, 39;", a, b), wrapped.astype(np.uint32))


@pytest.mark.parametrize("mode", ["lo", "hi"])
@pytest.mark.parametrize("a_type", ["u32", "s32"])
@pytest.mark.parametrize("b_type", ["u32", "s32"])
def test_dot_product_of_halves_and_bytes(mode, a_type, b_type):
    a, b, c = bits(np.uint32, 1), bits(np.uint32, 2), bits(np.uint32, 3)
    halves_of_a = a.view(np.uint16 if a_type == "u32" else np.int16).reshape(N, 2).astype(np.int64)
    bytes_of_b = b.view(np.uint8 if b_type == "u32" else np.int8).reshape(N, 4).astype(np.int64)
    pair = bytes_of_b[:, :2] if mode == "lo" else bytes_of_b[:, 2:]
    expected = (c + (halves_of_a * pair).sum(1) & 0xFFFFFFFF).astype(np.uint32)
    got = elementwise(f"dp2a.{mode}.{a_type}.{b_type} {{d}}, {{0}}, {{1}}, {{2}};", a, b, c)
    np.testing.assert_array_equal(got, expected)


def test_pack_and_unpack():
    low, high = bits(np.uint32, 1), bits(np.uint32, 2)
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    np.testing.assert_array_equal(elementwise("mov.b64 {d}, {{{0}, {1}}};", low, high, out=np.uint64), both)
    np.testing.assert_array_equal(elementwise("mov.b64 {{_, {d}}}, {0};", both), high)
    h = bits(np.uint16, 3)
    np.testing.assert_array_equal(elementwise("mov.b32 {d}, {{{0}, {0}}};", h), h * np.uint32(0x10001))


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add.f32", np.add),
        ("sub.f32", np.subtract),
        ("mul.f32", np.multiply),
        ("div.rn.f32", np.divide),
        ("max.f32", np.fmax),
        ("min.f32", np.fmin),
        ("max.NaN.f32", np.maximum),
    ],
)
def test_floats(opcode, function):
    a, b = floats(1), floats(2)[::-1].copy()
    with np.errstate(all="ignore"):
        expected = function(a, b)
    np.testing.assert_array_equal(elementwise(f"{opcode} {{d}}, {{0}}, {{1}};", a, b, out=np.float32), expected)


def test_fma_rounds_once():
    a, b, c = floats(1), floats(2)[::-1].copy(), floats(3, 1e-6)
    a, b, c = (np.nan_to_num(x) for x in (a, b, c))
    with np.errstate(over="ignore"):
        expected, twice = (a.astype(np.float64) * b + c).astype(np.float32), a * b + c
    np.testing.assert_array_equal(elementwise("fma.rn.f32 {d}, {0}, {1}, {2};", a, b, c, out=np.float32), expected)
    assert not np.array_equal(expected[8:], twice[8:])


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("ex2.approx.ftz.f32", np.exp2),
        ("lg2.approx.ftz.f32", np.log2),
        ("rcp.approx.ftz.f32", np.reciprocal),
        ("sqrt.rn.f32", np.sqrt),
        ("rsqrt.approx.f32", lambda a: 1 / np.sqrt(a)),
        ("neg.f32", np.negative),
        ("abs.f32", np.abs),
    ],
)
def test_functions(opcode, function):
    a = floats(1)
    with np.errstate(all="ignore"):
        expected = function(a.astype(np.float64)).astype(np.float32)
    result = elementwise(f"{opcode} {{d}}, {{0}};", a, out=np.float32)
    np.testing.assert_allclose(result, expected, rtol=2e-7)


def test_denormals_are_flushed():
    a = np.full(N, -140.0, np.float32)
    assert (elementwise("ex2.approx.ftz.f32 {d}, {0};", a, out=np.float32) == 0).all()
    assert (elementwise("ex2.approx.f32 {d}, {0};", a, out=np.float32) > 0).all()
    tiny = np.full(N, -1e-40, np.float32)
    assert (elementwise("rcp.approx.ftz.f32 {d}, {0};", tiny, out=np.float32) == -np.inf).all()


@pytest.mark.parametrize(("name", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_conversions_of_halves(name, dtype):
    a, b = floats(1), floats(2)
    low, high = (torch.from_numpy(x).to(dtype) for x in (b, a))
    for half in (low, high):
        half[half.isnan()] = torch.tensor(0x7FFF, dtype=torch.int16).view(dtype)  # the NaN that cvt.rn gives
    packed = elementwise(f"cvt.rn.{name}x2.f32 {{d}}, {{0}}, {{1}};", a, b)
    ok = ~(np.isnan(a) | np.isnan(b))
    np.testing.assert_array_equal(packed[ok], (as_bits(high).astype(np.uint32) << 16 | as_bits(low))[ok])
    single = elementwise(f"cvt.rn.{name}.f32 {{d}}, {{0}};", a, out=np.uint16)
    np.testing.assert_array_equal(single[ok], as_bits(high)[ok])
    back = elementwise(f"cvt.f32.{name} {{d}}, {{0}};", as_bits(high).copy(), out=np.float32)
    np.testing.assert_array_equal(back, high.float().numpy())


def test_bf16_ties_go_to_even():
    a = np.resize(np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800001], np.uint32), N).view(np.float32)
    rounded = elementwise("cvt.rn.bf16.f32 {d}, {0};", a, out=np.uint16)
    assert [hex(x) for x in rounded[:5]] == ["0x3f80", "0x3f82", "0x3f81", "0x7f80", "0x7fff"]


@pytest.mark.parametrize(("name", "dtype"), [("f16x2", torch.float16), ("bf16x2", torch.bfloat16)])
def test_packed_halves(name, dtype):
    a, b = halves(1, dtype), halves(2, dtype)[torch.randperm(N, generator=torch.Generator().manual_seed(0))]
    pairs = [np.ascontiguousarray(as_bits(x)).view(np.uint32).repeat(2) for x in (a, b)]
    for opcode, function in (("add.rn", torch.add), ("mul.rn", torch.mul), ("fma.rn", None)):
        if function is None:
            packed = elementwise(f"{opcode}.{name} {{d}}, {{0}}, {{1}}, {{1}};", *pairs)
            expected = (a.double() * b.double() + b.double()).to(dtype)
        else:
            packed = elementwise(f"{opcode}.{name} {{d}}, {{0}}, {{1}};", *pairs)
            expected = function(a.float(), b.float()).to(dtype)
        result = torch.from_numpy(packed[::2].copy().view(np.int16)).view(dtype)
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_packed_floats():
    a, b = (np.stack([floats(i), floats(i + 1)], 1) for i in (1, 5))
    pairs = [np.ascontiguousarray(x).view(np.uint64)[:, 0] for x in (a, b)]
    packed = elementwise("mul.rn.f32x2 {d}, {0}, {1};", *pairs, out=np.uint64)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(packed.view(np.float32).reshape(N, 2), a * b)
        fused = elementwise("fma.rn.f32x2 {d}, {0}, {1}, {1};", *pairs, out=np.uint64)
        expected = (a.astype(np.float64) * b + b).astype(np.float32)
    np.testing.assert_array_equal(fused.view(np.float32).reshape(N, 2), expected)


def test_conversions_of_integers():
    a = floats(1, 1e3)
    finite = np.where(np.isfinite(a), a, 0)
    result = elementwise("cvt.rzi.s32.f32 {d}, {0};", a, out=np.int32)
    ok = np.isfinite(a)
    np.testing.assert_array_equal(result[ok], np.trunc(finite).astype(np.int32)[ok])
    assert result[2] == 2**31 - 1 and result[3] == -(2**31) and result[4] == 0
    np.testing.assert_array_equal(elementwise("cvt.rni.s32.f32 {d}, {0};", finite, out=np.int32), np.rint(finite))
    i = bits(np.int32, 1)
    np.testing.assert_array_equal(elementwise("cvt.rn.f32.s32 {d}, {0};", i, out=np.float32), i.astype(np.float32))
    np.testing.assert_array_equal(elementwise("cvt.s64.s32 {d}, {0};", i, out=np.int64), i)
    np.testing.assert_array_equal(elementwise("cvt.u64.u32 {d}, {0};", i, out=np.uint64), i.view(np.uint32))
    np.testing.assert_array_equal(
        elementwise("cvt.u32.u64 {d}, {0};", bits(np.uint64, 2)), bits(np.uint64, 2).astype(np.uint32)
    )
    np.testing.assert_array_equal(
        elementwise("cvt.u16.u32 {d}, {0};", bits(np.uint32, 2), out=np.uint16), bits(np.uint32, 2).astype(np.uint16)
    )


@pytest.mark.parametrize(
    ("opcode", "dtype", "function"),
    [
        ("setp.lt.s32", np.int32, np.less),
        ("setp.hi.u32", np.uint32, np.greater),
        ("setp.eq.b32", np.uint32, np.equal),
        ("setp.ge.s64", np.int64, np.greater_equal),
        ("setp.lt.f32", np.float32, np.less),
        ("setp.ne.f32", np.float32, lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)),
        ("setp.neu.f32", np.float32, np.not_equal),
        ("setp.gtu.f32", np.float32, lambda a, b: ~(a <= b)),
        ("setp.nan.f32", np.float32, lambda a, b: np.isnan(a) | np.isnan(b)),
    ],
)
def test_comparisons(opcode, dtype, function):
    a, b = (floats(1), floats(2)[::-1].copy()) if dtype == np.float32 else (bits(dtype, 1), bits(dtype, 2))
    b[40:60] = a[40:60]
    np.testing.assert_array_equal(elementwise(f"{opcode} {{d}}, {{0}}, {{1}};", a, b, out=np.bool_), function(a, b))


def test_predicates_select_and_guard():
    a, b = bits(np.int32, 1), bits(np.int32, 2)
    p = np.arange(N) % 3 == 0
    np.testing.assert_array_equal(elementwise("selp.b32 {d}, {0}, {1}, {2};", a, b, p, out=np.int32), np.where(p, a, b))
    guarded = elementwise("mov.b32 {d}, {1};\n@!{2} add.s32 {d}, {0}, {1};", a, b, p, out=np.int32)
    np.testing.assert_array_equal(guarded, np.where(p, b, a + b))
    combined = elementwise("setp.lt.and.s32 {d}, {0}, {1}, {2};", a, b, p, out=np.bool_)
    np.testing.assert_array_equal(combined, (a < b) & p)
    both = elementwise("setp.lt.s32 %p5|%p6, {0}, {1};\nxor.pred {d}, %p5, %p6;", a, b, out=np.bool_)
    assert both.all()
    np.testing.assert_array_equal(elementwise("and.pred {d}, {0}, {1};", p, ~p, out=np.bool_), np.zeros(N, bool))


def test_special_registers():
    out = np.zeros((6, 96, 4), np.uint32)
    body = """
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %laneid;
    mov.u32 %r4, %nctaid.x;
    mad.lo.s32 %r5, %r1, %r2, %r0;
    mul.wide.u32 %rd10, %r5, 16;
    add.s64 %rd10, %rd10, %rd0;
    st.global.v4.b32 [%rd10], {%r1, %r2, %r3, %r4};
    """
    run(body, out, threads=96, ctas=6).raise_for_faults()
    expected = np.stack(np.broadcast_arrays(np.arange(6)[:, None], 96, np.arange(96) % 32, 6), 2)
    np.testing.assert_array_equal(out, expected)


def test_unknown_instruction_is_named_with_its_line():
    text = module("    add.s32 %r1, %r0, 1;\n    frobnicate.b32 %r2, %r1;", 1)
    line = text[: text.index("frobnicate")].count("\n") + 1
    with pytest.raises(UnknownInstructionError, match=rf"PTX line {line}: frobnicate\.b32 %r2, %r1"):
        emulate(text, (1, 1, 1), (32, 1, 1), [np.uint64(0)], 0)


@pytest.mark.parametrize(
    "line",
    [
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r1, %r2, %r3, %r4}, %rd1, %rd2, %p1, 1, 1;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1], 16, [%r2];",
        "mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;",
        "cvt.rz.f32.f64 %r1, %rd1;",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd1, %rd2}, {%rd3}, {%rd4}, {%rd1, %rd2};",
        "ld.local.b32 %r1, [%rd1];",
        "bar.arrive 0;",
        "bar.red.and.pred %p1, 0, 64, %p2;",
    ],
)
def test_what_is_not_supported_is_refused(line):
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run(line, np.zeros(4, np.uint32))


def test_undeclared_register_and_missing_entry():
    with pytest.raises(PtxSyntaxError, match=r"cannot read the operand|no declared"):
        run("@%q1 add.s32 %r1, %r0, 1;", np.zeros(4, np.uint32))
    with pytest.raises(PtxSyntaxError, match=r"one \.entry"):
        emulate(".version 8.0", (1, 1, 1), (32, 1, 1), [], 0)


def test_registers_of_inline_assembly_stay_apart():
    out = np.zeros(64, np.uint32)
    body = """
    mov.b32 %r1, 5;
    // begin inline asm
    { .reg .b32 %r1; .reg .pred p; setp.lt.u32 p, %r0, 32; mov.b32 %r1, 7; @p mov.b32 %r2, %r1; @!p mov.b32 %r2, 1; }
    // end inline asm
    add.s32 %r2, %r2, %r1;
    mul.wide.u32 %rd10, %r0, 4;
    add.s64 %rd10, %rd10, %rd0;
    st.global.b32 [%rd10], %r2;
    """
    run(body, out)
    np.testing.assert_array_equal(out, np.where(np.arange(64) < 32, 12, 6))
