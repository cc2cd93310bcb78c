"""A ring of buffers in shared memory that one warp fills by TMA and others read.

Each buffer has two mbarriers: ``full`` completes when the bytes of a load have arrived, ``empty`` when all
readers have let go. Loads are numbered 0, 1, 2, ... through the life of the CTA; number c uses buffer
c mod depth, and its barriers complete for the (c div depth)-th time.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute


@dataclass(frozen=True)
class TmaRing:
    """``full`` and ``empty``: pointers to ``depth`` mbarriers each; ``num_bytes`` arrive with each load."""

    full: cute.Pointer
    empty: cute.Pointer
    depth: int
    num_bytes: int
    num_readers: int

    @staticmethod
    def allocate(smem, depth: int, num_bytes: int, num_readers: int) -> TmaRing:
        """``num_readers``: arrivals that free a buffer."""
        barriers = smem.allocate_array(cutlass.Int64, 2 * depth, byte_alignment=8)
        return TmaRing(barriers, barriers + depth, depth, num_bytes, num_readers)

    def init(self):
        """By one thread, before a fence and a barrier of the CTA."""
        for i in range(self.depth):
            cute.arch.mbarrier_init(self.full + i, 1)
            cute.arch.mbarrier_init(self.empty + i, self.num_readers)

    def buffer(self, number):
        """Which buffer a load uses."""
        return cutlass.Uint32(number) % self.depth  # unsigned: a remainder by 2 is one AND

    def _parity(self, number):
        return (cutlass.Uint32(number) // self.depth) & 1

    def acquire(self, number):
        """The loading warp: waits until the buffer is free, and announces the bytes. Returns the full barrier."""
        buffer = self.buffer(number)
        cute.arch.mbarrier_wait(self.empty + buffer, self._parity(number) ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + buffer, self.num_bytes)
        return self.full + buffer

    def wait(self, number):
        """A reader: waits until the load has arrived."""
        cute.arch.mbarrier_wait(self.full + self.buffer(number), self._parity(number))

    def release(self, number):
        """A reader, once per arrival that ``num_readers`` counts: has finished reading."""
        cute.arch.mbarrier_arrive(self.empty + self.buffer(number))
