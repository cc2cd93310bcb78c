"""Basic blocks, and in each an order of execution that brings equal instructions together.

One NumPy call costs microseconds however little it does, so the emulator executes many instructions of
one kind in one call. Inside a basic block the instructions form a graph of dependences (through registers
and memory); the schedule walks it, taking each time all that are ready of one kind. A chain of mma.sync or
of wgmma that accumulates into the same registers becomes one matrix product.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from cute_fa.emulator.parse import Imm, Instruction, Kernel, MapMem, Mem, Not, Reg, Special, Symbol, Vec
from cute_fa.emulator.report import UnknownInstructionError

WITHOUT_RESULT = {"st", "red", "cp", "bar", "barrier", "bra", "ret", "exit", "stmatrix", "prefetch", "fence"}
WITHOUT_RESULT |= {"membar", "griddepcontrol", "trap", "brkpt", "nanosleep", "setmaxnreg", "pmevent"}
WITHOUT_RESULT |= {"mbarrier.init", "mbarrier.inval", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group"}
TERMINATORS = {"bra", "ret", "exit", "trap"}


@dataclass
class Node:
    """One instruction, or a chain of mma.sync or wgmma, within a block."""

    instructions: list[Instruction]
    key: tuple
    defs: list[Reg]
    uses: list[Reg]
    sync_index: int  # .sync instructions of the block up to and with this one
    memory: str = ""
    hard: set[int] = field(default_factory=set)  # nodes to run before
    soft: set[int] = field(default_factory=set)  # nodes to run before or together, in order


@dataclass
class Block:
    """A basic block: groups of nodes in order of execution, and the instruction that ends it (or None)."""

    start: int
    groups: list[list[Node]]
    terminator: Instruction | None
    num_syncs: int
    num_instructions: int


def is_barrier(instruction: Instruction) -> bool:
    parts = instruction.parts
    return parts[0] in ("bar", "barrier") and parts[1] != "warp"


def is_warp_sync(instruction: Instruction) -> bool:
    """Whether the whole warp executes it together (the barriers of a CTA are apart)."""
    parts = instruction.parts
    return "sync" in parts and not is_barrier(instruction)


def is_wait(instruction: Instruction) -> bool:
    """Whether its threads may stand still until others have done something."""
    return instruction.parts[:2] == ("mbarrier", "try_wait")


def _ends_block(instruction: Instruction) -> bool:
    return instruction.parts[0] in TERMINATORS or is_barrier(instruction) or is_wait(instruction)


def split_blocks(kernel: Kernel) -> list[Block]:
    """The basic blocks of a kernel in program order, scheduled.

    Raises:
        UnknownInstructionError: a branch to a label that doesn't exist.
    """
    instructions = kernel.instructions
    starts = {0}
    for instruction in instructions:
        if instruction.parts[0] == "bra":
            label = instruction.operands[0].name
            if label not in kernel.labels:
                raise UnknownInstructionError(f"{instruction}: no label {label!r}")
            starts.add(kernel.labels[label])
        if _ends_block(instruction):
            starts.add(instruction.index + 1)
    bounds = sorted(start for start in starts if start < len(instructions))
    uses = _count_registers(instructions)
    blocks = []
    for start, end in zip(bounds, [*bounds[1:], len(instructions)], strict=True):
        body = instructions[start:end]
        last = body[-1]
        ends = _ends_block(last)
        blocks.append(_schedule_block(start, body[:-1] if ends else body, last if ends else None, uses))
    return blocks


def sync_indices(group: list[Node]) -> np.ndarray:
    """How many .sync instructions of the block each node of a group comes after, (nodes, 1)."""
    return np.array([[node.sync_index] for node in group])


def registers(operand) -> list[Reg]:
    """The registers that an operand names, in order."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Not):
        return [operand.reg]
    if isinstance(operand, Mem):
        return registers(operand.base)
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in registers(item)]
    if isinstance(operand, MapMem):
        return [r for item in (operand.base, *operand.coordinates) for r in registers(item)]
    return []


def roles(instruction: Instruction) -> tuple[list[Reg], list[Reg]]:
    """(registers written, registers read); a guarded instruction also reads what it may leave alone."""
    operands = list(instruction.operands)
    defs = registers(operands.pop(0)) if operands and _has_result(instruction) else []
    uses = [r for operand in operands for r in registers(operand)]
    if instruction.parts[0] == "wgmma":
        uses += defs
    if instruction.guard:
        uses += [instruction.guard, *defs]
    return defs, uses


def _has_result(instruction: Instruction) -> bool:
    parts = instruction.parts
    if is_barrier(instruction):
        return "red" in parts
    return parts[0] not in WITHOUT_RESULT and ".".join(parts[:2]) not in WITHOUT_RESULT


def _count_registers(instructions):
    defined, used = defaultdict(int), defaultdict(int)
    for instruction in instructions:
        defs, uses = roles(instruction)
        for register in defs:
            defined[register] += 1
        for register in uses:
            used[register] += 1
    return defined, used


def _schedule_block(start, body, terminator, counts) -> Block:
    nodes, syncs = _make_nodes(body, counts)
    _add_dependences(nodes)
    return Block(start, _form_groups(nodes), terminator, syncs, len(body) + (terminator is not None))


def _make_nodes(body, counts) -> tuple[list[Node], int]:
    defined, used = counts
    nodes: list[Node] = []
    versions: dict[Reg, int] = defaultdict(int)
    open_chains: dict[tuple, tuple[Node, dict]] = {}
    products = _OpenProducts()
    syncs = 0
    for instruction in body:
        syncs += is_warp_sync(instruction)
        defs, uses = roles(instruction)
        if instruction.parts[0] == "mma" and instruction.guard is None:
            accumulator = tuple(registers(instruction.operands[3]))
            before = open_chains.pop(accumulator, None)
            single = all(defined[r] == 1 and used[r] == 1 for r in accumulator)
            unchanged = before and all(versions[r] == v for r, v in before[1].items())
            if before and single and unchanged and before[0].instructions[0].opcode == instruction.opcode:
                node = before[0]
                nodes.remove(node)
                node.instructions.append(instruction)
                node.uses = [r for r in node.uses if r not in accumulator]
                node.uses += [r for r in uses if r not in accumulator]
                node.defs = defs
            else:
                node = Node([instruction], (), defs, uses, syncs)
            seen = before[1] if before and node is before[0] else {}
            seen = seen | {r: versions[r] for r in uses if r not in accumulator or node.instructions[0] is instruction}
            open_chains[tuple(defs)] = node, seen
            node.key = ("mma", instruction.opcode, tuple(i.operands[1] for i in node.instructions))
        elif is_product(instruction):
            node = products.extend(instruction, defs, uses)
            if node is None:
                node = Node([instruction], ("wgmma", instruction.index), defs, uses, syncs, "ordered")
                products.start(node)
            else:
                nodes.remove(node)
        else:
            node = Node([instruction], group_key(instruction), defs, uses, syncs, memory_class(instruction))
        for register in defs:
            versions[register] += 1
        products.see(node)
        nodes.append(node)
    return nodes, syncs


class _OpenProducts:
    """The latest chain of wgmma.mma_async into one accumulator that another one can still join."""

    def __init__(self):
        self.chain: Node | None = None

    def start(self, node: Node):
        self.chain = node

    def extend(self, instruction: Instruction, defs: list[Reg], uses: list[Reg]) -> Node | None:
        """The chain with the instruction behind it, or None when it can't join."""
        chain = self.chain
        joins = chain is not None and chain.defs == defs and chain.instructions[0].opcode == instruction.opcode
        if not joins or instruction.guard is not None or not _alike(chain.instructions[0], instruction):
            return None
        chain.instructions.append(instruction)
        chain.uses = list(dict.fromkeys([*chain.uses, *uses]))
        return chain

    def see(self, node: Node):
        """Closes the chain when ``node`` stands in the way of moving it behind itself."""
        chain = self.chain
        if chain is None or node is chain:
            return
        touched = set(chain.defs) & {*node.defs, *node.uses} or set(chain.uses) & set(node.defs)
        if node.memory or touched:
            self.chain = None


def is_product(instruction: Instruction) -> bool:
    return instruction.parts[:2] == ("wgmma", "mma_async")


def _alike(one: Instruction, other: Instruction) -> bool:
    """Whether two products differ in the registers of their operands alone."""
    pairs = zip(one.operands[1:], other.operands[1:], strict=False)
    return all(a == b if isinstance(a, Imm) else type(a) is type(b) for a, b in pairs)


def group_key(instruction: Instruction) -> tuple:
    """Instructions with equal keys can be executed by one step."""
    shapes = tuple(_shape(operand) for operand in instruction.operands)
    return instruction.opcode, shapes, instruction.guard is not None, instruction.guard_negated


def _shape(operand):
    if isinstance(operand, Reg):
        return operand.bits
    if isinstance(operand, Imm):
        return "imm", operand.float_bits
    if isinstance(operand, Vec):
        return tuple(_shape(item) for item in operand.items)
    if isinstance(operand, Mem):
        return "mem", _shape(operand.base)
    if isinstance(operand, MapMem):
        return "map", _shape(operand.base), tuple(_shape(item) for item in operand.coordinates)
    if isinstance(operand, Special):
        return operand.name
    if isinstance(operand, Symbol):
        return "symbol"
    return ("not",) if isinstance(operand, Not) else None


def memory_class(instruction: Instruction) -> str:
    """What an instruction does to memory: read or write, shared or global; or a step of cp.async; or "".

    "ordered" is what keeps its place among all of these: copies by tensor maps, mbarriers, wgmma, proxy fences.
    """
    parts = instruction.parts
    bulk = parts[0] == "cp" and "bulk" in parts and "prefetch" not in parts
    if bulk or parts[0] in ("mbarrier", "wgmma") or parts[:2] == ("fence", "proxy"):
        return "ordered"
    if parts[0] == "cp":
        return {"commit_group": "commit", "wait_group": "wait", "wait_all": "wait"}.get(parts[2], "copy")
    if parts[0] in ("ldmatrix", "stmatrix"):
        return "read shared" if parts[0] == "ldmatrix" else "write shared"
    if parts[0] in ("ld", "st", "red", "atom") and "param" not in parts and "const" not in parts:
        space = "shared" if any(p.startswith("shared") for p in parts) else "global"
        return ("read " if parts[0] == "ld" else "write ") + space
    return ""


def _may_swap(one: str, other: str) -> bool:
    if not one or not other:
        return True
    if "ordered" in (one, other):
        return False
    if "commit" in (one, other):
        return not {one, other} <= {"commit", "copy", "wait"}
    asynchronous = {"copy", "wait"}
    if one in asynchronous or other in asynchronous:
        if one == other:
            return one == "copy"
        if one in asynchronous and other in asynchronous:
            return False
        plain = other if one in asynchronous else one
        return plain == "read global"
    if one.split()[1] != other.split()[1]:
        return True
    return one.startswith("read") and other.startswith("read")


def _add_dependences(nodes: list[Node]):
    last_def: dict[Reg, int] = {}
    readers: dict[Reg, list[int]] = defaultdict(list)
    memory: list[int] = []
    for index, node in enumerate(nodes):
        for register in node.uses:
            if register in last_def:
                node.hard.add(last_def[register])
            readers[register].append(index)
        for register in node.defs:
            node.hard.update(readers.pop(register, ()))
            if register in last_def:
                node.hard.add(last_def[register])
            last_def[register] = index
        node.hard.discard(index)
        if node.memory:
            for before in memory:
                if not _may_swap(nodes[before].memory, node.memory):
                    same = nodes[before].key == node.key and node.memory.startswith("write")
                    (node.soft if same else node.hard).add(before)
            memory.append(index)


def _form_groups(nodes: list[Node]) -> list[list[Node]]:
    remaining: dict[tuple, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        remaining[node.key].append(index)
    done: set[int] = set()
    ready: dict[tuple, list[int]] = {}
    dirty = set(remaining)
    waiting_for: dict[int, set[tuple]] = defaultdict(set)
    for node in nodes:
        for before in node.hard | node.soft:
            waiting_for[before].add(node.key)
    groups = []
    while remaining:
        for key in dirty & set(remaining):
            ready[key] = _ready(remaining[key], nodes, done)
        key = max((k for k in remaining if ready[k]), key=lambda k: (len(ready[k]) / len(remaining[k]), -ready[k][0]))
        chosen = ready.pop(key)
        groups.append([nodes[i] for i in chosen])
        done.update(chosen)
        remaining[key] = [i for i in remaining[key] if i not in done]
        if not remaining[key]:
            del remaining[key]
        dirty = {key}.union(*(waiting_for[i] for i in chosen))
    return groups


def _ready(indices: list[int], nodes: list[Node], done: set[int]) -> list[int]:
    chosen: list[int] = []
    inside: set[int] = set()
    for index in indices:
        node = nodes[index]
        if node.hard <= done and all(before in done or before in inside for before in node.soft):
            chosen.append(index)
            inside.add(index)
    return chosen
