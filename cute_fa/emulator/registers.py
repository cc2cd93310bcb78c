"""Where registers live, and how a step reads and writes them.

Registers are rows of one array for each width: (rows, threads). Rows are handed out in the order in which
the schedule writes them, so that a group of instructions mostly writes (and reads) neighbouring rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cute_fa.emulator.alu import DTYPES
from cute_fa.emulator.parse import Imm, Instruction, Kernel, Mem, Not, Reg, Special, Symbol
from cute_fa.emulator.report import UnknownInstructionError

ROW_DTYPES = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
PARAM_SPACE = 1 << 61  # generic address of the parameters, where no tensor lies
SPECIAL = {
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
    "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "WARP_SZ",
}  # fmt: skip


class RegisterMap:
    """Register → row."""

    def __init__(self):
        self._rows: dict[Reg, int] = {}
        self.counts = dict.fromkeys(ROW_DTYPES, 0)

    def row(self, register: Reg) -> int:
        """The row of a register; the next free one when it has none yet."""
        if register not in self._rows:
            self._rows[register] = self.counts[register.bits]
            self.counts[register.bits] += 1
        return self._rows[register]

    def rows(self, registers):
        """Rows of several registers: a slice when they follow each other, else an index array."""
        rows = [self.row(r) for r in registers]
        first = rows[0]
        if all(row == first for row in rows):
            return slice(first, first + 1)
        if rows == list(range(first, first + len(rows))):
            return slice(first, first + len(rows))
        return np.array(rows)

    def allocate(self, threads: int) -> dict[int, np.ndarray]:
        """Register files for that many threads; registers start at 0."""
        return {bits: np.zeros((count, threads), ROW_DTYPES[bits]) for bits, count in self.counts.items()}


def unsigned(dtype) -> np.dtype:
    return np.dtype(f"u{np.dtype(dtype).itemsize}") if np.dtype(dtype) != np.bool_ else np.dtype(bool)


def reader(operands: list, kind: str, registers: RegisterMap, kernel: Kernel, what: Instruction) -> Callable:
    """A function of a frame that gives like operands of a group as (instructions or 1, threads or 1).

    Raises:
        UnknownInstructionError: an operand that cannot be read as ``kind``.
    """
    first, dtype = operands[0], np.dtype(DTYPES[kind])
    if isinstance(first, Reg):
        return _register_reader(operands, dtype, registers)
    if isinstance(first, Not):
        positive = _register_reader([o.reg for o in operands], dtype, registers)
        return lambda frame: ~positive(frame)
    if isinstance(first, Imm):
        constant = np.array([[immediate(o, kind)] for o in operands], dtype)
        return lambda frame: constant
    if isinstance(first, Special) and first.name in SPECIAL:
        name = first.name
        return lambda frame: frame.special(name)[None].astype(dtype)
    if isinstance(first, Symbol):
        addresses = kernel.shared | {p.name: PARAM_SPACE + p.offset for p in kernel.params}
        if all(o.name in addresses for o in operands):
            constant = np.array([[addresses[o.name]] for o in operands], dtype)
            return lambda frame: constant
    raise UnknownInstructionError(f"{what}: the operand {first} is not supported")


def _register_reader(operands, dtype, registers):
    bits = operands[0].bits
    rows = registers.rows(operands)
    if bits == 1:
        return lambda frame: frame.registers[1][rows]
    if bits == dtype.itemsize * 8:
        if dtype == ROW_DTYPES[bits]:
            return lambda frame: frame.registers[bits][rows]
        return lambda frame: frame.registers[bits][rows].view(dtype)
    narrow = unsigned(dtype)
    return lambda frame: frame.registers[bits][rows].astype(narrow).view(dtype)


def immediate(operand: Imm, kind: str):
    """The value of an immediate read as ``kind``."""
    dtype = np.dtype(DTYPES[kind])
    if operand.float_bits:
        value = np.array(operand.value, f"u{operand.float_bits // 8}").view(f"f{operand.float_bits // 8}")
        if dtype.kind == "f":
            return value.astype(dtype)
        return value.view(unsigned(value.dtype)).astype(unsigned(dtype)).view(dtype)
    if dtype.kind in "fb":
        return dtype.type(operand.value)
    bits = dtype.itemsize * 8
    return np.array(operand.value & (1 << bits) - 1, unsigned(dtype)).view(dtype)


def writer(destinations: list[Reg], registers: RegisterMap) -> Callable:
    """A function (frame, values, mask) that writes (instructions, threads); a mask leaves the others alone."""
    bits = destinations[0].bits
    rows = registers.rows(destinations)

    def write(frame, values, mask=None):
        target = frame.registers[bits]
        if values.dtype != target.dtype:
            same_width = values.dtype.itemsize == target.dtype.itemsize
            values = values.view(target.dtype) if same_width else values.astype(target.dtype)
        if mask is None:
            target[rows] = values
        else:
            target[rows] = np.where(mask, values, target[rows])

    return write


def guard_reader(instructions: list[Instruction], registers: RegisterMap) -> Callable | None:
    """A function of a frame that gives the guards of a group as booleans, or None without guards."""
    if instructions[0].guard is None:
        return None
    positive = _register_reader([i.guard for i in instructions], np.dtype(bool), registers)
    return (lambda frame: ~positive(frame)) if instructions[0].guard_negated else positive


def address_reader(operands: list[Mem], rows: RegisterMap, kernel: Kernel):
    """A function of a frame: int64 addresses (instructions, threads)."""
    offsets = np.array([[o.offset] for o in operands], np.int64)
    first = operands[0].base
    if isinstance(first, Reg):
        if first.bits == 32:  # the sum wraps: compilers hold a base below 0 and add a larger offset
            base = reader([o.base for o in operands], "u32", rows, kernel, None)
            return lambda frame: (base(frame).astype(np.int64) + offsets) & 0xFFFFFFFF
        base = reader([o.base for o in operands], "u64", rows, kernel, None)
        return lambda frame: base(frame).astype(np.int64) + offsets
    if isinstance(first, Symbol):
        missing = [o.base.name for o in operands if o.base.name not in kernel.shared]
        if missing:
            raise UnknownInstructionError(f"the address of {missing[0]!r} is no shared-memory variable's")
        offsets = offsets + np.array([[kernel.shared[o.base.name]] for o in operands])
    elif isinstance(first, Imm):
        offsets = offsets + np.array([[o.base.value] for o in operands])
    return lambda frame: np.broadcast_to(offsets, (len(offsets), frame.n))
