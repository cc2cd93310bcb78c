"""Instructions that compute each lane for itself, as functions of NumPy arrays.

``alu(opcode)`` gives the function of an opcode with the types of its operands. Arrays are (instructions,
threads): many instructions of one opcode are computed at a time. Floating point follows IEEE with
round-to-nearest; the approximations (ex2, lg2, rcp, rsqrt, sqrt, tanh) are correctly rounded here, which
hardware's are not. ``.ftz`` is honoured by them and by nothing else: fp32 denormals never reach a result
of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cute_fa.emulator.floats import flush, from_float, pack_halves, round_to_bf16, to_float


@dataclass(frozen=True)
class Alu:
    """``fn(*sources)`` → the destination, or a tuple of two when ``dst`` has two types.

    Types are PTX's: b32, u16, s64, f32, pred, …; the caller views registers in them.
    """

    fn: Callable
    dst: tuple[str, ...]
    src: tuple[str, ...]


DTYPES = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.uint16, "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "f32": np.float32,
    "f64": np.float64, "f32x2": np.uint64, "pred": np.bool_,
}  # fmt: skip
WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64", "f32x2")
_COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_IGNORED = {
    "rn", "rz", "rm", "rp", "approx", "full", "ftz", "sat", "lo", "hi", "wide", "NaN", "relu", "num", "uni",
}  # fmt: skip


@lru_cache(maxsize=1024)
def alu(opcode: str, num_sources: int) -> Alu | None:
    """The function of an opcode with that many sources, or None when there is none."""
    base, *mods = opcode.split(".")
    builder = _BUILDERS.get(base)
    return builder(tuple(mods), num_sources) if builder else None


def _type(mods: tuple[str, ...]) -> str | None:
    return mods[-1] if mods and mods[-1] in DTYPES else None


def _only(mods: tuple[str, ...], allowed: set[str]) -> bool:
    return all(m in allowed or m in DTYPES for m in mods)


def _on_floats(fn, kind: str, mods: tuple[str, ...]):
    """``fn`` on float arrays as a function of registers of type ``kind``, packed halves lane by lane."""
    if kind in ("f32", "f64"):
        plain = fn
    else:

        def plain(*values):
            return from_float(fn(*(to_float(v, kind) for v in values)), kind)

    if "sat" in mods:
        inner = plain
        plain = lambda *values: np.clip(inner(*values), 0, 1)  # noqa: E731
    if "relu" in mods:
        rectified = plain
        plain = lambda *values: np.maximum(rectified(*values), 0)  # noqa: E731
    return plain


def _binary(integer, floating):
    def build(mods, num_sources):
        kind = _type(mods)
        if kind is None or not _only(mods, _IGNORED - {"hi", "wide"}):
            return None
        fn = _on_floats(floating, kind, mods) if kind in _FLOATS else integer
        return None if fn is None else Alu(fn, (kind,), (kind,) * num_sources)

    return build


def _high_product(a, b):
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)
    product = a.astype(object) * b.astype(object) >> 64
    return (product & (2**64 - 1)).astype(np.uint64).view(a.dtype)


def _mul(mods, num_sources):
    kind = _type(mods)
    if kind is None or not _only(mods, _IGNORED):
        return None
    if kind in _FLOATS:
        return Alu(_on_floats(np.multiply, kind, mods), (kind,), (kind,) * 2)
    if "wide" in mods:
        wide = DTYPES[WIDE[kind]]
        return Alu(lambda a, b: a.astype(wide) * b.astype(wide), (WIDE[kind],), (kind,) * 2)
    return Alu(_high_product if "hi" in mods else np.multiply, (kind,), (kind,) * 2)


def fma(a, b, c):
    """a * b + c, rounded once (fp32: the product is exact in fp64)."""
    if a.dtype == np.float32:
        return (a.astype(np.float64) * b + c).astype(np.float32)
    return a * b + c


def _mad(mods, num_sources):
    kind = _type(mods)
    if kind is None or not _only(mods, _IGNORED):
        return None
    if kind in _FLOATS:
        return Alu(_on_floats(fma, kind, mods), (kind,), (kind,) * 3)
    product = _mul(mods, 2)
    out = product.dst[0]
    return Alu(lambda a, b, c: product.fn(a, b) + c, (out,), (kind, kind, out))


def _truncated_quotient(a, b):
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def _divide_integers(a, b):
    b = np.where(b == 0, b.dtype.type(1), b)
    return a // b if a.dtype.kind == "u" else _truncated_quotient(a, b)


def _remainder(a, b):
    return a - _divide_integers(a, b) * np.where(b == 0, b.dtype.type(1), b)


def _min_max(integer, ignoring_nan):
    def build(mods, num_sources):
        kind = _type(mods)
        if kind is None or not _only(mods, _IGNORED - {"hi", "lo", "wide"}):
            return None
        if kind not in _FLOATS:
            return Alu(integer, (kind,), (kind,) * 2)
        pairwise = integer if "NaN" in mods else ignoring_nan  # np.maximum propagates NaN, np.fmax does not

        def fn(first, *others):
            for other in others:
                first = pairwise(first, other)
            return first

        return Alu(_on_floats(fn, kind, mods), (kind,), (kind,) * num_sources)

    return build


def _logic(fn, num):
    def build(mods, num_sources):
        kind = _type(mods)
        return Alu(fn, (kind,), (kind,) * num) if kind and len(mods) == 1 else None

    return build


def _invert(a):
    return np.logical_not(a) if a.dtype == np.bool_ else np.invert(a)


def shift_left(a, count):
    """a << count; a count at or past the width gives 0."""
    bits = a.dtype.itemsize * 8
    shifted = a << (count & np.uint32(bits - 1)).astype(a.dtype)
    return np.where(count < bits, shifted, a.dtype.type(0))


def shift_right(a, count):
    """a >> count, arithmetic for signed types; counts past the width shift everything out."""
    bits = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        return a >> np.minimum(count, np.uint32(bits - 1)).astype(a.dtype)
    shifted = a >> (count & np.uint32(bits - 1)).astype(a.dtype)
    return np.where(count < bits, shifted, a.dtype.type(0))


def _shift(fn):
    def build(mods, num_sources):
        kind = _type(mods)
        return Alu(fn, (kind,), (kind, "u32")) if kind and len(mods) == 1 else None

    return build


def _funnel(mods, num_sources):
    if len(mods) != 3 or mods[0] not in ("l", "r") or mods[1] not in ("wrap", "clamp"):
        return None
    left, wrap = mods[0] == "l", mods[1] == "wrap"

    def fn(low, high, count):
        count = count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        by = count.astype(np.uint64)
        return (both << by >> np.uint64(32) if left else both >> by).astype(np.uint32)

    return Alu(fn, ("b32",), ("b32",) * 3)


def lop3(a, b, c, table):
    """Any bitwise function of three: bit (a, b, c) of ``table`` is the result."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for index in range(8):
        chosen = np.where((table >> np.uint32(index)) & np.uint32(1), np.uint32(0xFFFFFFFF), np.uint32(0))
        term = (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        result |= term & chosen
    return result


def prmt(a, b, selector):
    """Picks four bytes out of the eight of (a, b); selector bit 3 of a nibble replicates the sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.uint32(0)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32)
        byte = byte & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result = result | np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result


def bit_field_extract(a, position, length):
    """The field of ``length`` bits from ``position`` up, sign-extended for signed types."""
    bits = a.dtype.itemsize * 8
    position, length = position & np.uint32(255), length & np.uint32(255)
    length = np.minimum(length, np.where(position < bits, bits - position, 0).astype(np.uint32))
    top = shift_left(a, np.uint32(bits) - np.minimum(position + length, np.uint32(bits)))
    field = shift_right(top, np.uint32(bits) - length)
    return np.where(length == 0, a.dtype.type(0), field)


def bit_field_insert(a, b, position, length):
    """``b`` with its field (position, length) replaced by the low bits of ``a``."""
    position, length = position & np.uint32(255), length & np.uint32(255)
    ones = np.full_like(b, np.iinfo(b.dtype).max)
    mask = shift_left(~shift_left(ones, length), position)
    return b & ~mask | shift_left(a, position) & mask


def _dot_product(mods, num_sources):
    """dp2a: the two halves of a times two bytes of b, the low (``lo``) or the high pair, added to c."""
    if len(mods) != 3 or mods[0] not in ("lo", "hi") or not set(mods[1:]) <= {"u32", "s32"}:
        return None
    first_byte = 0 if mods[0] == "lo" else 2
    out = "s32" if "s32" in mods else "u32"

    def fn(a, b, c):
        total = c.astype(np.uint32)
        for i in range(2):
            half = bit_field_extract(a, np.uint32(16 * i), np.uint32(16))
            byte = bit_field_extract(b, np.uint32(8 * (first_byte + i)), np.uint32(8))
            total = total + half.astype(np.uint32) * byte.astype(np.uint32)
        return total.astype(DTYPES[out])

    return Alu(fn, (out,), (*mods[1:], out))


def _bfe(mods, num_sources):
    return Alu(bit_field_extract, mods, (mods[0], "u32", "u32")) if len(mods) == 1 else None


def _bfi(mods, num_sources):
    return Alu(bit_field_insert, mods, (mods[0], mods[0], "u32", "u32")) if len(mods) == 1 else None


def _count_leading_zeros(a):
    bits = a.dtype.itemsize * 8
    smeared = a
    for shift in (1, 2, 4, 8, 16, 32)[: bits.bit_length() - 1]:
        smeared = smeared | smeared >> a.dtype.type(shift)
    return (bits - np.bitwise_count(smeared)).astype(np.uint32)


def _reverse_bits(a):
    count = a.dtype.itemsize * 8
    result = np.zeros_like(a)
    for i in range(count):
        result |= (a >> a.dtype.type(i) & a.dtype.type(1)) << a.dtype.type(count - 1 - i)
    return result


def _bit_count(fn):
    def build(mods, num_sources):
        return Alu(fn, ("u32",), mods) if mods in (("b32",), ("b64",)) else None

    return build


def _setp(mods, num_sources):
    kind, compare = _type(mods), mods[0]
    boolean = next((m for m in mods[1:] if m in _BOOLEAN), None)
    if kind is None or num_sources != (3 if boolean else 2):
        return None
    fn = _comparison(compare, kind)
    if fn is None:
        return None
    if boolean is None:
        return Alu(fn, ("pred",), (kind, kind))
    combine = _BOOLEAN[boolean]
    return Alu(lambda a, b, p: combine(fn(a, b), p), ("pred",), (kind, kind, "pred"))


def _comparison(compare: str, kind: str):
    if compare in ("num", "nan"):
        invert = compare == "num"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) ^ invert
    unordered = kind in _FLOATS and compare.endswith("u") and compare[:-1] in _COMPARE
    name = compare[:-1] if unordered else compare
    if name not in _COMPARE:
        return None
    ordered = _COMPARE[name]

    def fn(a, b):
        if kind in ("f16", "bf16"):
            a, b = to_float(a, kind), to_float(b, kind)
        result = ordered(a, b)
        if kind in _FLOATS and name == "ne":
            result = result & ~(np.isnan(a) | np.isnan(b))
        return result | np.isnan(a) | np.isnan(b) if unordered else result

    return fn


def _selp(mods, num_sources):
    return Alu(lambda a, b, p: np.where(p, a, b), mods, (*mods, *mods, "pred")) if len(mods) == 1 else None


def _unary(fn):
    def build(mods, num_sources):
        kind = _type(mods)
        if kind is None or not _only(mods, {"approx", "ftz", "rn"}):
            return None
        if "ftz" in mods:
            return Alu(lambda a: flush(fn(flush(a))), (kind,), (kind,))
        return Alu(_on_floats(fn, kind, mods), (kind,), (kind,))

    return build


def _negate(mods, num_sources):
    kind = _type(mods)
    return Alu(_on_floats(np.negative, kind, mods) if kind in _FLOATS else np.negative, (kind,), (kind,))


def _absolute(mods, num_sources):
    kind = _type(mods)
    return Alu(_on_floats(np.abs, kind, mods) if kind in _FLOATS else np.abs, (kind,), (kind,))


def _cvt(mods, num_sources):
    kinds = [m for m in mods if m in DTYPES]
    if len(kinds) != 2 or not _only(mods, _IGNORED | {"rni", "rzi", "rmi", "rpi", "satfinite"}):
        return None
    if set(mods) & {"rz", "rm", "rp", "satfinite", "relu", "sat"}:
        return None
    dst, src = kinds
    if num_sources == 2:
        if src != "f32" or dst not in ("f16x2", "bf16x2"):
            return None
        to_half = round_to_bf16 if dst == "bf16x2" else (lambda x: x.astype(np.float16).view(np.uint16))
        return Alu(lambda high, low: pack_halves(to_half(low), to_half(high)), (dst,), (src, src))
    return Alu(_conversion(dst, src, mods), (dst,), (src,))


def _conversion(dst: str, src: str, mods):
    if dst in _FLOATS:
        if src in _FLOATS:
            return lambda a: from_float(to_float(a, src), dst)
        return lambda a: from_float(a.astype(np.float64), dst)
    dtype = DTYPES[dst]
    if src not in _FLOATS:
        return lambda a: a.astype(dtype)
    rounding = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    to_integer = next((rounding[m] for m in mods if m in rounding), np.trunc)
    limits = np.iinfo(dtype)

    def fn(a):
        rounded = to_integer(to_float(a, src).astype(np.float64))
        inside = np.clip(np.nan_to_num(rounded, nan=0.0), float(limits.min), float(limits.max))
        return np.where(rounded >= float(limits.max), dtype(limits.max), inside.astype(dtype))

    return fn


def _mov(mods, num_sources):
    kind = _type(mods)
    return Alu(lambda a: a, (kind,), (kind,)) if kind and len(mods) == 1 and num_sources == 1 else None


def pack(kind: str, num_parts: int) -> Alu | None:
    """mov.b64 d, {a, b} and mov.b32 d, {a, b}: the first part is the low one."""
    parts = {("b32", 2): "b16", ("b64", 2): "b32", ("b64", 4): "b16"}.get((kind, num_parts))
    if parts is None:
        return None
    shift = {"b16": 16, "b32": 32}[parts]
    out = DTYPES[kind]

    def fn(*values):
        total = values[0].astype(out)
        for i, value in enumerate(values[1:], 1):
            total = total | value.astype(out) << out(shift * i)
        return total

    return Alu(fn, (kind,), (parts,) * num_parts)


def unpack(kind: str, num_parts: int) -> Alu | None:
    """mov.b64 {a, b}, s and mov.b32 {a, b}, s."""
    parts = {("b32", 2): "b16", ("b64", 2): "b32", ("b64", 4): "b16"}.get((kind, num_parts))
    if parts is None:
        return None
    dtype, shift, source = DTYPES[parts], {"b16": 16, "b32": 32}[parts], DTYPES[kind]
    return Alu(
        lambda a: tuple((a >> source(shift * i)).astype(dtype) for i in range(num_parts)),
        (parts,) * num_parts,
        (kind,),
    )


def _divide(mods, num_sources):
    return _binary(_divide_integers, np.divide)(mods, num_sources)


_BUILDERS = {
    "add": _binary(np.add, np.add), "sub": _binary(np.subtract, np.subtract), "mul": _mul, "mad": _mad,
    "fma": _mad, "div": _divide, "rem": _binary(_remainder, None), "min": _min_max(np.minimum, np.fmin),
    "max": _min_max(np.maximum, np.fmax), "and": _logic(np.bitwise_and, 2), "or": _logic(np.bitwise_or, 2),
    "xor": _logic(np.bitwise_xor, 2), "not": _logic(_invert, 1), "shl": _shift(shift_left),
    "shr": _shift(shift_right), "shf": _funnel, "lop3": lambda mods, n: Alu(lop3, ("b32",), ("b32",) * 4),
    "prmt": lambda mods, n: Alu(prmt, ("b32",), ("b32",) * 3) if mods == ("b32",) else None, "bfe": _bfe,
    "bfi": _bfi, "dp2a": _dot_product, "popc": _bit_count(lambda a: np.bitwise_count(a).astype(np.uint32)),
    "clz": _bit_count(_count_leading_zeros), "brev": _logic(_reverse_bits, 1), "setp": _setp, "selp": _selp,
    "ex2": _unary(np.exp2), "lg2": _unary(np.log2), "rcp": _unary(np.reciprocal), "sqrt": _unary(np.sqrt),
    "rsqrt": _unary(lambda a: np.reciprocal(np.sqrt(a))), "tanh": _unary(np.tanh), "neg": _negate,
    "abs": _absolute, "cvt": _cvt, "mov": _mov, "cvta": lambda mods, n: Alu(lambda a: a, mods[-1:], mods[-1:]),
}  # fmt: skip
