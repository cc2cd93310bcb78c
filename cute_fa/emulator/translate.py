"""Groups of instructions → steps: closures over register rows that a frame is passed through."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cute_fa.emulator import hopper_steps, memory_steps, warp_steps
from cute_fa.emulator.alu import DTYPES, Alu, alu, pack, unpack
from cute_fa.emulator.flight import ProductRegisters
from cute_fa.emulator.parse import Imm, Instruction, Kernel, Mem, Reg, Vec, parse
from cute_fa.emulator.registers import RegisterMap, guard_reader, reader, writer
from cute_fa.emulator.report import UnknownInstructionError
from cute_fa.emulator.schedule import Node, is_barrier, is_product, is_wait, memory_class, roles, split_blocks

_NOTHING = {"prefetch", "fence", "membar", "griddepcontrol", "nanosleep", "setmaxnreg", "pmevent"}
_WHOLE_BARRIERS = {"bar.sync", "bar.cta.sync", "barrier.sync", "barrier.sync.aligned", "barrier.cta.sync"}
_WHOLE_BARRIERS.add("barrier.cta.sync.aligned")
_MEMORY = {"ld", "st", "red", "cp"}
_WARP = {"ldmatrix", "stmatrix", "mma", "shfl", "vote", "activemask", "bar", "barrier"}


@dataclass
class TranslatedBlock:
    """A basic block ready to run.

    Attributes:
        steps: called with a frame, in order.
        kind: how it ends: "next", "branch", "exit" or "barrier" (of the whole CTA).
        action: called with the frame at the end; may make threads stand still at the block behind.
        products: whether it touches registers of wgmma (``flight.py``).
        together: threads that have to enter it together where they can: 32 of a warp, 128 of a warpgroup, or 1.
        condition: gives the booleans of the threads that take the branch (or exit); None when all do.
        target: block of the branch.
        touched: rows read or written, by width: what a frame of some threads copies in.
        written: rows written, by width: what it copies back.
    """

    steps: list[Callable]
    kind: str
    terminator: Instruction | None
    condition: Callable | None
    target: int
    num_syncs: int
    num_instructions: int
    action: Callable | None = None
    together: int = 1
    products: bool = False
    touched: dict[int, np.ndarray] = field(default_factory=dict)
    written: dict[int, np.ndarray] = field(default_factory=dict)


@dataclass
class Program:
    """A kernel ready to run.

    ``shared_granule`` is the fewest bytes of shared memory that an instruction accesses where warps go separate ways
    (``ordering.py``), and None where they meet at barriers of the whole CTA alone.
    """

    kernel: Kernel
    blocks: list[TranslatedBlock]
    registers: RegisterMap
    products: ProductRegisters
    shared_granule: int | None = None


@lru_cache(maxsize=32)
def translate(ptx: str) -> Program:
    """Parses and translates a module; cached by its text.

    Raises:
        PtxSyntaxError: a statement that cannot be read.
        UnknownInstructionError: an instruction that the emulator does not know, with its line.
    """
    kernel = parse(ptx)
    rows = RegisterMap()
    blocks = split_blocks(kernel)
    for block in blocks:
        for group in block.groups:
            for node in group:
                for register in node.defs:
                    rows.row(register)
    block_of = {block.start: number for number, block in enumerate(blocks)}
    translated = []
    products = ProductRegisters(kernel)
    for block in blocks:
        steps = [step for group in block.groups if (step := _step(group, rows, kernel)) is not None]
        kind, condition, target, action = _ending(block.terminator, rows, kernel, block_of, len(blocks))
        result = TranslatedBlock(
            steps, kind, block.terminator, condition, target, block.num_syncs, block.num_instructions, action
        )
        if block.num_syncs > 0 or (block.terminator is not None and is_barrier(block.terminator)):
            has_product = any(is_product(node.instructions[0]) for group in block.groups for node in group)
            result.together = hopper_steps.WARPGROUP if has_product else warp_steps.WARP
        instructions = kernel.instructions[block.start : block.start + block.num_instructions]
        result.products = products.add_block(instructions)
        _set_rows(result, block, rows)
        translated.append(result)
    return Program(kernel, translated, rows, products, _shared_granule(kernel))


def _shared_granule(kernel: Kernel) -> int | None:
    if not any(memory_class(i) == "ordered" or _is_part_barrier(i, kernel) for i in kernel.instructions):
        return None
    sizes = [16]
    for instruction in kernel.instructions:
        if memory_class(instruction).endswith(" shared") and "matrix" not in instruction.parts[0]:
            value = instruction.operands[1 if instruction.parts[0] == "st" else 0]
            items = len(value.items) if isinstance(value, Vec) else 1
            sizes.append(np.dtype(DTYPES[instruction.parts[-1]]).itemsize * items)
    return min(sizes)


def _is_part_barrier(instruction: Instruction, kernel: Kernel) -> bool:
    """Whether it is a barrier of the threads that it counts, not of the CTA."""
    if not is_barrier(instruction):
        return False
    number, count = instruction.operands[0], instruction.operands[1] if len(instruction.operands) > 1 else None
    threads = math.prod(kernel.block) if kernel.block else None
    # Named barriers with a count are of those who take part, also where these are as many as the CTA has.
    is_first = isinstance(number, Imm) and number.value == 0
    whole = count is None or (is_first and isinstance(count, Imm) and count.value == threads)
    return not (whole and instruction.opcode in _WHOLE_BARRIERS)


def _set_rows(result: TranslatedBlock, block, rows: RegisterMap):
    nodes = [node for group in block.groups for node in group]
    written = {r for node in nodes for r in node.defs}
    touched = written | {r for node in nodes for r in node.uses}
    if block.terminator is not None:  # what its action writes goes past the frame
        touched.update(roles(block.terminator)[1])
    for into, chosen in ((result.touched, touched), (result.written, written)):
        for bits in {r.bits for r in chosen}:
            into[bits] = np.array(sorted(rows.row(r) for r in chosen if r.bits == bits))


def _ending(terminator, rows, kernel, block_of, end):
    if terminator is None:
        return "next", None, 0, None
    if is_wait(terminator):
        return "next", None, 0, hopper_steps.waiting(terminator, rows, kernel)
    condition = guard_reader([terminator], rows)
    name = terminator.parts[0]
    if name == "bra":
        label = kernel.labels[terminator.operands[0].name]
        return "branch", condition, block_of.get(label, end), None
    if name in ("ret", "exit"):
        return "exit", condition, end, None
    if is_barrier(terminator):
        if _is_part_barrier(terminator, kernel):
            return "next", None, 0, hopper_steps.meeting(terminator, rows, kernel)
        if condition is None:
            return "barrier", None, 0, None
    raise UnknownInstructionError(f"{terminator}: not known to the emulator")


def _step(group: list[Node], rows: RegisterMap, kernel: Kernel):
    first = group[0].instructions[0]
    name = first.parts[0]
    instructions = [node.instructions[0] for node in group]
    if memory_class(first) == "ordered":
        return hopper_steps.build(group, rows, kernel)
    if name in _NOTHING or (name == "cp" and "prefetch" in first.parts):
        return None
    if name == "elect":
        return hopper_steps.elect(group, rows)
    if name == "mma":
        return warp_steps.mma(group, rows)
    if name in _WARP:
        return warp_steps.build(group, rows, kernel)
    if name in _MEMORY:
        return memory_steps.build(group, rows, kernel)
    return _alu_step(instructions, rows, kernel)


def _find_alu(instruction: Instruction) -> tuple[Alu | None, list]:
    """The function of an instruction and its source operands in the function's order."""
    destination, *sources = instruction.operands
    if instruction.parts[0] == "mov" and len(sources) == 1:
        if isinstance(sources[0], Vec):
            return pack(instruction.parts[-1], len(sources[0].items)), list(sources[0].items)
        if isinstance(destination, Vec):
            return unpack(instruction.parts[-1], len(destination.items)), sources
    return alu(instruction.opcode, len(sources)), sources


def _alu_step(instructions: list[Instruction], rows: RegisterMap, kernel: Kernel):
    first = instructions[0]
    function, sources = _find_alu(first) if first.operands else (None, [])
    if function is None or len(sources) != len(function.src):
        raise UnknownInstructionError(f"{first}: {first.opcode!r} with these operands is not known to the emulator")
    columns = list(zip(*(_find_alu(i)[1] for i in instructions), strict=True))
    if any(isinstance(column[0], (Mem, Vec)) or column[0] is None for column in columns):
        raise UnknownInstructionError(f"{first}: {first.opcode!r} does not take these operands here")
    readers = [reader(list(c), kind, rows, kernel, first) for c, kind in zip(columns, function.src, strict=True)]
    guard = guard_reader(instructions, rows)
    fn = function.fn
    destinations = _destination_columns(instructions, function)
    if len(destinations) == 1 and not isinstance(first.operands[0], Vec):
        write = writer(destinations[0], rows)
        if guard is None:
            return lambda frame: write(frame, fn(*[read(frame) for read in readers]))
        return lambda frame: write(frame, fn(*[read(frame) for read in readers]), guard(frame))
    writers = [writer(column, rows) if column else None for column in destinations]

    def step(frame):
        values = fn(*[read(frame) for read in readers])
        mask = guard(frame) if guard else None
        values = values if isinstance(values, tuple) else (values, ~values)  # setp p|q: q is the complement
        for write, value in zip(writers, values, strict=True):
            if write is not None:
                write(frame, value, mask)

    return step


def _destination_columns(instructions, function) -> list[list[Reg] | None]:
    if not isinstance(instructions[0].operands[0], Vec):
        return [[i.operands[0] for i in instructions]]
    items = list(zip(*(i.operands[0].items for i in instructions), strict=True))
    return [list(column) if column[0] is not None else None for column in items]
