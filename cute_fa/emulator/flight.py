"""Registers of products that have been issued and not waited for: who touches them too soon.

Between the issue of a wgmma and the wait for its group its accumulator may be touched by nothing but another wgmma
into the same registers, and registers that hold its A may not be written (PTX ISA, "wgmma.fence"). Blocks are
walked in the order of the program, not of the schedule: a block, and what is in flight before it, give what is in
flight behind it, which is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_fa.emulator.parse import Instruction, Kernel, Reg
from cute_fa.emulator.schedule import is_product, registers, roles


@dataclass(frozen=True)
class Group:
    """Registers of the products of one group."""

    accumulators: frozenset[frozenset[Reg]] = frozenset()
    sources: frozenset[Reg] = frozenset()


@dataclass(frozen=True)
class Flight:
    """What a warp has in flight: groups that are committed, the oldest first, and the open one."""

    committed: tuple[Group, ...] = ()
    open: Group = Group()

    def groups(self) -> tuple[Group, ...]:
        return (*self.committed, self.open)


NOTHING = Flight()


@dataclass(frozen=True)
class Touch:
    """What an instruction does to registers of products: issues one (``accumulator``), or reads and writes them."""

    instruction: Instruction
    reads: frozenset[Reg]
    writes: frozenset[Reg]
    accumulator: frozenset[Reg] | None = None


class ProductRegisters:
    """The registers of a kernel's products, and what each block does to them."""

    def __init__(self, kernel: Kernel):
        products = [i for i in kernel.instructions if is_product(i)]
        self._watched = {r for i in products for operand in i.operands[:2] for r in registers(operand) if r.bits == 32}
        self._behind: dict[tuple[int, Flight], tuple[Flight, list[tuple[Instruction, Reg]]]] = {}
        self._blocks: list[list[Touch | int | None]] = []

    def add_block(self, instructions: list[Instruction]) -> bool:
        """Takes the next block of the kernel; whether it touches registers of products."""
        events = [event for i in instructions if (event := self._event(i)) is not None]
        self._blocks.append(events)
        return bool(events)

    def _event(self, instruction: Instruction):
        """A ``Touch``, the groups that a wait keeps, "commit", or None."""
        parts = instruction.parts
        if parts[:2] == ("wgmma", "wait_group"):
            return instruction.operands[0].value
        if parts[:2] == ("wgmma", "commit_group"):
            return "commit"
        defs, uses = roles(instruction)
        if is_product(instruction):
            source = frozenset(r for r in registers(instruction.operands[1]) if r.bits == 32)
            return Touch(instruction, source, frozenset(), frozenset(defs))
        reads, writes = self._watched.intersection(uses), self._watched.intersection(defs)
        return Touch(instruction, frozenset(reads), frozenset(writes)) if reads or writes else None

    def behind(self, block: int, flight: Flight) -> tuple[Flight, list[tuple[Instruction, Reg]]]:
        """What is in flight behind a block, and the registers that it touches too soon, each with who does."""
        key = block, flight
        if key not in self._behind:
            self._behind[key] = self._walk(self._blocks[block], flight)
        return self._behind[key]

    @staticmethod
    def _walk(events, flight: Flight):
        early = []
        for event in events:
            if event == "commit":
                flight = Flight((*flight.committed, flight.open))
            elif isinstance(event, int):
                flight = Flight(flight.committed[len(flight.committed) - event :] if event else (), flight.open)
            else:
                early += [(event.instruction, register) for register in _too_soon(event, flight)]
                if event.accumulator is not None:
                    group = flight.open
                    group = Group(group.accumulators | {event.accumulator}, group.sources | event.reads)
                    flight = Flight(flight.committed, group)
        return flight, early


def _too_soon(touch: Touch, flight: Flight) -> list[Reg]:
    """One register of each product in flight that an instruction may not touch."""
    own = touch.accumulator or frozenset()
    found = []
    for group in flight.groups():
        for accumulator in group.accumulators:
            touched = touch.reads | touch.writes | (own if accumulator != own else frozenset())
            found += sorted(accumulator & touched, key=lambda r: r.name)[:1]
        found += sorted(group.sources & (touch.writes | own), key=lambda r: r.name)[:1]
    return found
