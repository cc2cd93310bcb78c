"""Floating-point formats of 16 bits and packed pairs, on NumPy arrays of their bits."""

from __future__ import annotations

import numpy as np

_SMALLEST_NORMAL = np.float32(2.0**-126)


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 → the bits of bf16 (uint16), round to nearest even; any NaN gives 0x7FFF as cvt.rn does."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Bits of bf16 (uint16) → fp32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def pack_halves(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two uint16 arrays → one uint32, ``low`` in the low half."""
    return high.astype(np.uint32) << np.uint32(16) | low


def flush(values: np.ndarray) -> np.ndarray:
    """fp32 with denormals replaced by zeros of the same sign."""
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def to_float(registers: np.ndarray, kind: str) -> np.ndarray:
    """Registers of PTX type ``kind`` as floats; packed pairs get a last axis of two."""
    if kind in ("f32", "f64"):
        return registers
    if kind == "f16":
        return registers.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return bf16_to_f32(registers)
    if kind == "f32x2":
        return np.ascontiguousarray(registers).view(np.float32).reshape(*registers.shape, 2)
    halves = np.ascontiguousarray(registers).view(np.uint16).reshape(*registers.shape, 2)
    return to_float(halves, kind.removesuffix("x2"))


def from_float(values: np.ndarray, kind: str) -> np.ndarray:
    """The inverse of ``to_float``, rounding to nearest even."""
    if kind == "f64":
        return values.astype(np.float64)
    if kind == "f32":
        return values.astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return round_to_bf16(values.astype(np.float32))
    if kind == "f32x2":
        return np.ascontiguousarray(values, np.float32).view(np.uint64)[..., 0]
    halves = np.ascontiguousarray(from_float(values, kind.removesuffix("x2")))
    return halves.view(np.uint32)[..., 0]
