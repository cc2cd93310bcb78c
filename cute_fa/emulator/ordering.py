"""The race check of kernels whose warps go separate ways: what has happened before what, by vector clocks.

The agents of a CTA are its warps and what works beside them: the loads that report to one mbarrier, the stores of
one warp, its part in the products of its warpgroup. Each counts its own steps, and each warp keeps a clock: how
many steps of every agent are behind it. A warp that arrives at a barrier leaves its clock there and begins a new
step; one that passes takes over what all those left that it waited for. Waiting for a phase of an mbarrier, for
stores or for products puts those steps of the agent behind the warp.

Two accesses to the same granule of shared memory race when different agents made them, at least one is a write, and
the first is not behind the second. What TMA or wgmma reads must also lie behind a proxy fence of the warp that
wrote it. Threads of one warp are not told apart.
"""

from __future__ import annotations

import numpy as np

from cute_fa.emulator.checks import WARP, Access, FaultLog

_MORE_AGENTS = 16


class OrderCheck:
    """Clocks of the warps of some CTAs, and the last accesses to every granule of their shared memory.

    Args:
        granule: bytes that accesses are told apart by; no access is smaller.
        check: keep track of accesses; clocks alone otherwise.
    """

    def __init__(self, num_ctas, threads_per_cta, shared_size, granule, faults: FaultLog, instructions, check):
        self.num_ctas = num_ctas
        self.warps = threads_per_cta // WARP
        self.granule = granule
        self.faults = faults
        self.instructions = instructions
        self.check = check
        self.names = [f"warp {warp}" for warp in range(self.warps)]
        self._agents: dict[tuple, int] = {}
        columns, granules = self.warps, shared_size // granule
        self.granules = granules
        self.clocks = np.zeros((num_ctas, self.warps, columns), np.int32)
        self.clocks[:, np.arange(self.warps), np.arange(self.warps)] = 1
        self.fenced = np.zeros((num_ctas, self.warps), np.int32)
        self._writer, self._written, self._write_line = (
            np.zeros((num_ctas, granules), dtype) for dtype in (np.int16, np.int32, np.int32)
        )
        self._read, self._read_line = (np.zeros((num_ctas, columns, granules), np.int32) for _ in range(2))

    # --- agents and clocks -----------------------------------------------------------------------------------

    def agent(self, kind: str, number: int) -> int:
        """The column of an agent other than a warp; ``kind`` formats its name."""
        key = kind, number
        if key not in self._agents:
            self._agents[key] = len(self.names)
            self.names.append(kind.format(number))
            if len(self.names) > self.clocks.shape[2]:
                self.clocks = _wider(self.clocks, 2)
                if self.check:
                    self._read, self._read_line = (_wider(array, 1) for array in (self._read, self._read_line))
        return self._agents[key]

    def publish(self, cta: int, warp: int) -> np.ndarray:
        """The clock that a warp leaves at a barrier; it begins a new step."""
        clock = self.clocks[cta, warp].copy()
        self.clocks[cta, warp, warp] += 1
        return clock

    def join(self, cta: int, warp: int, clock: np.ndarray):
        """Puts behind a warp what a clock that was left has behind it."""
        mine = self.clocks[cta, warp, : len(clock)]
        np.maximum(mine, clock, out=mine)

    def finish(self, cta: int, warp: int, agent: int, step: int):
        """Puts the steps of an agent up to ``step`` behind a warp."""
        self.clocks[cta, warp, agent] = max(self.clocks[cta, warp, agent], step)

    def fence(self, cta: int, warp: int):
        """A proxy fence: what the warp has written so far may be read by TMA and wgmma."""
        self.fenced[cta, warp] = self.clocks[cta, warp, warp]
        self.clocks[cta, warp, warp] += 1

    def close(self, released: np.ndarray):
        """A barrier of all threads of the CTAs ``released`` (booleans)."""
        for cta in np.flatnonzero(released):
            self.clocks[cta] = self.clocks[cta].max(axis=0)
            self.clocks[cta, np.arange(self.warps), np.arange(self.warps)] += 1

    # --- accesses --------------------------------------------------------------------------------------------

    def add(self, access: Access):
        """Accesses of threads."""
        threads = np.broadcast_to(access.threads, access.units.shape)
        split = access.width // self.granule
        for row, instruction in enumerate(access.instructions):
            warps = threads[row] // WARP
            for warp in np.unique(warps):
                chosen = warps == warp
                if access.active is not None:
                    chosen &= access.active[row]
                cta, own = divmod(int(warp), self.warps)
                where = access.units[row][chosen][:, None] * split + np.arange(split) - cta * self.granules
                clock, step = self.clocks[cta, own], self.clocks[cta, own, own]
                made = self.write if access.is_write else self.read
                made(cta, own, step, clock, where.ravel(), instruction)

    def read(self, cta, agent, step, clock, where, instruction):
        """Granules ``where`` (indices or a slice) are read by an agent at its ``step``, after ``clock``."""
        if not self.check:
            return
        writers, written = self._writer[cta, where], self._written[cta, where]
        self._compare_writes(cta, agent, clock, where, writers, written, instruction, "reads")
        if agent >= self.warps:
            self._require_fence(cta, agent, where, writers, written, instruction)
        self.note_read(cta, agent, step, where, instruction)

    def note_read(self, cta, agent, step, where, instruction):
        """The same of an agent that need not be compared with who wrote."""
        if self.check:
            self._read[cta, agent, where] = step
            self._read_line[cta, agent, where] = instruction.index

    def write(self, cta, agent, step, clock, where, instruction):
        """The same of writes."""
        if not self.check:
            return
        self._compare_writes(
            cta, agent, clock, where, self._writer[cta, where], self._written[cta, where], instruction, "writes"
        )
        count = len(self.names)
        reads = self._read[cta, :count, where] if isinstance(where, slice) else self._read[cta, :count][:, where]
        late = reads > clock[:count, None]
        if late.any():
            other, place = (int(i[0]) for i in np.nonzero(late))
            line = self._read_line[cta, other][where][place]
            self._record(cta, agent, "writes", other, "reads", line, where, place, instruction, int(late.sum()))
        self._writer[cta, where] = agent
        self._written[cta, where] = step
        self._write_line[cta, where] = instruction.index

    def _compare_writes(self, cta, agent, clock, where, writers, written, instruction, verb):
        late = written > clock[writers]
        if late.any():
            place = int(late.argmax())
            other, line = int(writers[place]), self._write_line[cta, where][place]
            self._record(cta, agent, verb, other, "writes", line, where, place, instruction, int(late.sum()))

    def _require_fence(self, cta, agent, where, writers, written, instruction):
        by_warp = (writers < self.warps) & (written > 0)
        if not by_warp.any():
            return
        unfenced = by_warp & (written > self.fenced[cta][np.where(by_warp, writers, 0)])
        if unfenced.any():
            place = int(unfenced.argmax())
            line = self._write_line[cta, where][place]
            detail = (
                f"{self._name(cta, agent)} reads shared byte {self._byte(where, place)}, which "
                f"{self.names[int(writers[place])]} writes without a proxy fence behind it"
            )
            self._log("missing proxy fence", instruction, line, detail, int(unfenced.sum()))

    def _record(self, cta, agent, verb, other, other_verb, line, where, place, instruction, count):
        detail = (
            f"{self._name(cta, agent)} {verb} and {self._name(cta, other)} {other_verb} shared byte "
            f"{self._byte(where, place)} with nothing that orders them"
        )
        self._log("race", instruction, line, detail, count)

    def _log(self, kind, instruction, line, detail, count):
        other = self.instructions[int(line)]
        self.faults.record(kind, (instruction.index, other.index), f"{instruction}\n    {other}", detail, count)

    def _name(self, cta: int, agent: int) -> str:
        return f"{self.names[agent]} of CTA {self.faults.first_cta + cta}"

    def _byte(self, where, place: int) -> int:
        return (where.start + place if isinstance(where, slice) else int(where[place])) * self.granule


def granules_of(units: np.ndarray, width: int, granule: int):
    """Units of ``width`` bytes as granules: a slice when they are neighbours, else indices."""
    split = width // granule
    low, high = int(units.min()), int(units.max())
    if (high - low + 1) == units.size:
        return slice(low * split, (high + 1) * split)
    units = np.unique(units)
    return units if split == 1 else (units[:, None] * split + np.arange(split)).ravel()


def _wider(array: np.ndarray, axis: int) -> np.ndarray:
    shape = list(array.shape)
    shape[axis] = _MORE_AGENTS
    return np.concatenate([array, np.zeros(shape, array.dtype)], axis=axis)
