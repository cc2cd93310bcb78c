"""cp.async: copies that arrive when their group is waited for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cute_fa.emulator.checks import Access
from cute_fa.emulator.parse import Instruction


@dataclass
class PendingCopy:
    """Copies of several instructions and threads that have been issued and not yet waited for.

    Arrays are flat, one element a copy; ``group`` is the number of the thread's commit group.
    """

    instructions: list[Instruction]
    rows: np.ndarray  # which instruction
    units: np.ndarray
    data: np.ndarray
    width: int
    threads: np.ndarray
    group: np.ndarray

    def select(self, chosen: np.ndarray) -> PendingCopy:
        arrays = {name: getattr(self, name)[chosen] for name in ("rows", "units", "data", "threads", "group")}
        return replace(self, **arrays)


class AsyncCopies:
    """The copies in flight of a batch, and how many groups each thread has committed."""

    def __init__(self, batch, num_threads: int):
        self.batch = batch
        self.committed = np.zeros(num_threads, np.int64)
        self.pending: list[PendingCopy] = []

    def issue(self, units, data, width, active, instructions, moments, frame):
        """Starts copies; until they are waited for their destination is poisoned."""
        shape = units.shape
        columns = [
            np.broadcast_to(np.arange(shape[0])[:, None], shape),
            units,
            np.broadcast_to(frame.threads, shape),
            np.broadcast_to(self.committed[frame.threads], shape),
        ]
        flat = [c.ravel() if active is None else c[active] for c in columns]
        rows, places, threads, group = flat
        arriving = data.reshape(-1, *data.shape[2:]) if active is None else data[active]
        self.batch.shared.poison(places, width)
        self.pending.append(PendingCopy(instructions, rows, places, arriving, width, threads, group))
        if self.batch.check:
            self.batch.races.add(Access(instructions, units, width, frame.threads, moments, True, active))

    def commit(self, frame):
        """Closes the open group of every thread of the frame."""
        self.committed[frame.threads] += 1

    def wait(self, keep: int, frame, sync_index: int):
        """Completes all but the latest ``keep`` committed groups of every thread of the frame."""
        bound = np.full(len(self.committed), -1, np.int64)
        bound[frame.threads] = self.committed[frame.threads] - keep
        left = []
        for copy in self.pending:
            arrived = copy.group < bound[copy.threads]
            if arrived.all():
                self._complete(copy, sync_index)
            elif arrived.any():
                self._complete(copy.select(arrived), sync_index)
                left.append(copy.select(~arrived))
            else:
                left.append(copy)
        self.pending = left

    def _complete(self, copy: PendingCopy, sync_index: int):
        self.batch.shared.write(copy.units, copy.data, copy.width)
        if self.batch.check:
            self._log(copy, sync_index)

    def reopen(self, released: np.ndarray):
        """After a barrier: what is still in flight may be written in the new interval too."""
        if not self.batch.check:
            return
        for copy in self.pending:
            chosen = released[copy.threads // self.batch.threads_per_cta]
            if chosen.any():
                self._log(copy.select(chosen), 0)

    def _log(self, copy: PendingCopy, sync_index: int):
        moments = self.batch.syncs[copy.threads // 32] + sync_index
        for row in np.unique(copy.rows):
            at = copy.rows == row
            access = Access(
                [copy.instructions[row]], copy.units[at][None], copy.width, copy.threads[at][None],
                moments[at][None], True,
            )  # fmt: skip
            self.batch.races.add(access)
