"""Faults found while a kernel runs, and the race check.

The rule of races. Two accesses to the same byte of shared memory race when different threads made them, at
least one is a write, and nothing orders them. Ordered are

* accesses with a ``bar.sync`` (or ``barrier.sync``) of the whole CTA between them;
* accesses of two threads of one warp with an instruction between them that the whole warp executes together
  (``*.sync``: bar.warp.sync, shfl.sync, vote.sync, ldmatrix.sync, stmatrix.sync, mma.sync). The PTX manual
  promises memory ordering of bar.warp.sync alone; a warp issues its shared-memory instructions in order and
  the others keep it converged, so they order it too.

The accesses of one ldmatrix count as made after its own synchronisation. A cp.async writes at any moment
between its issue and the wait that completes it: it counts as a write by the issuing thread in every barrier
interval from the one to the other. Global memory is not checked for races.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_fa.emulator.parse import Instruction
from cute_fa.emulator.report import Fault

WARP = 32


class FaultLog:
    """Collects faults: one entry for each kind and instruction, with the first occurrence and a count."""

    def __init__(self, threads_per_cta: int):
        self.threads_per_cta = threads_per_cta
        self.first_cta = 0
        self._faults: dict[tuple, Fault] = {}

    def record(self, kind: str, key, instruction: str, detail: str, count: int = 1):
        found = self._faults.get((kind, key))
        if found:
            found.count += count
        else:
            self._faults[kind, key] = Fault(kind, instruction, detail, count)

    def record_lanes(self, kind, what, where, bad, values, instructions, frame):
        """Records the accesses ``bad`` (instructions, threads); ``where`` formats {value} of the first."""
        bad = np.broadcast_to(bad, (len(instructions), frame.n))
        values = np.broadcast_to(values, bad.shape)
        for row in np.flatnonzero(bad.any(axis=1)):
            lanes = np.flatnonzero(bad[row])
            thread = int(frame.threads[lanes[0]])
            detail = f"{what}, {where.format(value=int(values[row, lanes[0]]))}, by {self.name(thread)}"
            instruction = instructions[row]
            self.record(kind, instruction.index, str(instruction), detail, len(lanes))

    def name(self, thread: int) -> str:
        """A thread of the batch in words."""
        cta, tid = divmod(thread, self.threads_per_cta)
        return f"thread {tid} of CTA {self.first_cta + cta}"

    def faults(self) -> list[Fault]:
        return list(self._faults.values())


@dataclass
class Access:
    """One entry of the log: the same access by several instructions and threads."""

    instructions: list[Instruction]
    units: np.ndarray  # (instructions, threads), index into the batch's shared memory in units of width
    width: int
    threads: np.ndarray  # (threads,) or (instructions, threads)
    moments: np.ndarray  # like units: the warp's count of .sync instructions at the access
    is_write: bool
    active: np.ndarray | None = None

    def flat(self, granule: int):
        """(granules, threads, moments, row of the instruction), each access split into its granules."""
        shape = self.units.shape
        rows = np.broadcast_to(np.arange(shape[0])[:, None], shape)
        columns = [self.units, np.broadcast_to(self.threads, shape), np.broadcast_to(self.moments, shape), rows]
        columns = [c.ravel() if self.active is None else c[self.active] for c in columns]
        split = self.width // granule
        granules = (columns[0][:, None] * split + np.arange(split)).ravel()
        return granules, *(np.repeat(c, split) for c in columns[1:])


class RaceCheck:
    """The accesses of the open barrier interval of every CTA, compared when the interval closes."""

    def __init__(self, num_ctas: int, threads_per_cta: int, shared_size: int, faults: FaultLog):
        self.threads_per_cta = threads_per_cta
        self.num_ctas = num_ctas
        self.shared_size = shared_size
        self.faults = faults
        self.open: list[Access] = []

    def add(self, access: Access):
        self.open.append(access)

    def close(self, released: np.ndarray):
        """Ends the interval of the CTAs ``released`` (booleans): checks and forgets their accesses."""
        if released.all():
            entries, self.open = self.open, []
        else:
            entries, kept = [], []
            for entry in self.open:
                inside = np.broadcast_to(released[entry.threads // self.threads_per_cta], entry.units.shape)
                inside = inside if entry.active is None else inside & entry.active
                outside = ~inside if entry.active is None else entry.active & ~inside
                for selected, into in ((inside, entries), (outside, kept)):
                    if selected.all():
                        into.append(entry)
                    elif selected.any():
                        into.append(Access(*list(vars(entry).values())[:-1], active=selected))
            self.open = kept
        if any(entry.is_write for entry in entries):
            self._compare(entries)

    def _compare(self, entries: list[Access]):
        granule = min(entry.width for entry in entries)
        flat = [entry.flat(granule) for entry in entries]
        owner = np.full(self.num_ctas * self.shared_size // granule, -1, np.int64)
        for entry, (granules, threads, _, _) in zip(entries, flat, strict=True):
            if entry.is_write:
                owner[granules] = threads
        shared_by_two = np.zeros(len(owner), bool)
        for granules, threads, _, _ in flat:
            last = owner[granules]
            shared_by_two[granules[(last >= 0) & (last != threads)]] = True
        if shared_by_two.any():
            self._compare_pairs(entries, flat, shared_by_two, granule)

    def _compare_pairs(self, entries, flat, suspects, granule):
        """Every pair of accesses of the suspected granules, exactly."""
        columns = []
        for number, (granules, threads, moments, rows) in enumerate(flat):
            chosen = suspects[granules]
            columns.append(
                np.stack([c[chosen] for c in (granules, threads, moments, rows)] + [np.full(chosen.sum(), number)])
            )
        table = np.concatenate(columns, axis=1)
        table = table[:, np.argsort(table[0], kind="stable")]
        granules, threads, moments, rows, numbers = table
        writes = np.array([entry.is_write for entry in entries])[numbers]
        distance = 1
        while distance < len(granules):
            same = granules[distance:] == granules[:-distance]
            if not same.any():
                break
            a, b = slice(None, -distance), slice(distance, None)
            ordered = (threads[a] // WARP == threads[b] // WARP) & (moments[a] != moments[b])
            races = same & (threads[a] != threads[b]) & (writes[a] | writes[b]) & ~ordered
            self._record(np.flatnonzero(races), distance, table, entries, granule)
            distance += 1

    def _record(self, firsts, distance, table, entries, granule):
        if not len(firsts):
            return
        pairs = np.stack([table[4, firsts], table[3, firsts], table[4, firsts + distance], table[3, firsts + distance]])
        unique, where, counts = np.unique(pairs, axis=1, return_index=True, return_counts=True)
        for pair, first, count in zip(unique.T, firsts[where], counts, strict=True):
            one, other = entries[pair[0]], entries[pair[2]]
            one_instruction, other_instruction = one.instructions[pair[1]], other.instructions[pair[3]]
            byte = int(table[0, first]) * granule % self.shared_size
            detail = (
                f"{self.faults.name(int(table[1, first]))} {_verb(one)} and "
                f"{self.faults.name(int(table[1, first + distance]))} {_verb(other)} shared byte {byte} "
                "with no barrier between"
            )
            both = f"{one_instruction}\n    {other_instruction}"
            key = (one_instruction.index, other_instruction.index)
            self.faults.record("race", key, both, detail, int(count))


def _verb(access: Access) -> str:
    return "writes" if access.is_write else "reads"
