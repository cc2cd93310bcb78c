"""mbarriers and named barriers of a batch of CTAs: who has arrived, who waits, and what waiting orders."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_fa.emulator.checks import WARP

_MAX_NAMED = 16


@dataclass
class Waiter:
    """Threads of one warp that stand still at an instruction."""

    threads: np.ndarray
    instruction: object
    parity: int = 0
    result: int | None = None  # row of the 32-bit register that gets what the barrier computes


@dataclass
class Mbarrier:
    """One mbarrier. ``left`` is what arrivals of the current phase left, ``passed`` what is behind who passes."""

    count: int
    pending: int
    maker: int
    made: int  # the step of the warp ``maker`` in which it was made
    phase: int = 0
    bytes_due: int = 0
    left: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    passed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    waiters: list[Waiter] = field(default_factory=list)


@dataclass
class NamedBarrier:
    """The threads that have arrived at a named barrier in its present round."""

    count: int = 0
    arrived: int = 0
    votes: int = 0
    left: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    waiters: list[Waiter] = field(default_factory=list)


class Synchronisation:
    """The barriers of a batch other than those of whole CTAs. Threads are numbers in the batch."""

    def __init__(self, batch):
        self.batch = batch
        self.order = batch.races
        self.warps = batch.threads_per_cta // WARP
        self.mbarriers: dict[tuple[int, int], Mbarrier] = {}
        self.named: dict[tuple[int, int], NamedBarrier] = {}

    def _place(self, thread: int) -> tuple[int, int]:
        return divmod(int(thread) // WARP, self.warps)

    # --- mbarriers -------------------------------------------------------------------------------------------

    def init(self, thread: int, address: int, count: int, instruction):
        """mbarrier.init by a thread."""
        cta, warp = self._place(thread)
        if address % 8 or not 0 <= address <= self.batch.shared.size - 8 or count < 1:
            detail = f"{self.batch.faults.name(int(thread))} makes one of {count} arrivals at shared byte {address}"
            self.batch.faults.record("invalid mbarrier", instruction.index, str(instruction), detail)
            return
        step = int(self.order.clocks[cta, warp, warp])
        self.mbarriers[cta, address] = Mbarrier(count, count, warp, step)

    def find(self, thread: int, address: int, instruction) -> Mbarrier | None:
        """The mbarrier at an address; None, and a fault, when there is none that the thread can know of."""
        cta, warp = self._place(thread)
        barrier = self.mbarriers.get((cta, address))
        if barrier is not None and self.order.clocks[cta, warp, barrier.maker] >= barrier.made:
            return barrier
        missing = "which nothing has made" if barrier is None else f"which warp {barrier.maker} makes unordered with it"
        detail = f"{self.batch.faults.name(int(thread))} uses an mbarrier at shared byte {address}, {missing}"
        self.batch.faults.record("invalid mbarrier", instruction.index, str(instruction), detail)
        return barrier

    def arrive(self, thread: int, address: int, arrivals: int, num_bytes: int, instruction):
        """mbarrier.arrive, with ``num_bytes`` more to come in this phase."""
        barrier = self.find(thread, address, instruction)
        if barrier is None:
            return
        cta, warp = self._place(thread)
        barrier.left = _joined(barrier.left, self.order.publish(cta, warp))
        barrier.bytes_due += num_bytes
        barrier.pending -= arrivals
        if barrier.pending < 0:
            detail = f"{self.batch.faults.name(int(thread))} is one arrival too many in phase {barrier.phase}"
            detail += f" of the mbarrier at shared byte {address}"
            self.batch.faults.record("invalid mbarrier", instruction.index, str(instruction), detail)
        self._complete(cta, barrier)

    def complete_bytes(self, cta: int, barrier: Mbarrier, agent: int, num_bytes: int):
        """Bytes of a load by ``agent`` have arrived."""
        clock = np.zeros(agent + 1, np.int32)
        clock[agent] = barrier.phase + 1
        barrier.left = _joined(barrier.left, clock)
        barrier.bytes_due -= num_bytes
        self._complete(cta, barrier)

    def _complete(self, cta: int, barrier: Mbarrier):
        if barrier.pending > 0 or barrier.bytes_due != 0:
            return
        barrier.phase += 1
        barrier.pending = barrier.count
        barrier.passed = barrier.left.copy()
        ready = [w for w in barrier.waiters if w.parity != barrier.phase & 1]
        barrier.waiters = [w for w in barrier.waiters if w.parity == barrier.phase & 1]
        for waiter in ready:
            self._let_go(waiter, barrier.passed)

    def wait(self, threads: np.ndarray, address: int, parity: int, instruction):
        """mbarrier.try_wait by threads of one warp; they stand still until the phase of that parity is complete."""
        barrier = self.find(threads[0], address, instruction)
        if barrier is not None and barrier.phase & 1 != parity:
            self.order.join(*self._place(threads[0]), barrier.passed)
            return
        if barrier is None:
            barrier = self.mbarriers[self._place(threads[0])[0], address] = Mbarrier(1, 1, 0, 0)
        self._hold(Waiter(threads, instruction, parity), barrier)

    # --- named barriers --------------------------------------------------------------------------------------

    def meet(self, threads: np.ndarray, number: int, count: int, instruction, waits=True, votes=0, result=None):
        """bar.sync, bar.arrive (``waits`` False) or bar.red by the threads of a warp, of ``count`` in all."""
        cta, warp = self._place(threads[0])
        barrier = self.named.setdefault((cta, number), NamedBarrier())
        others_differ = barrier.arrived > 0 and barrier.count != count
        if not 0 <= number < _MAX_NAMED or count % WARP or count == 0 or others_differ:
            detail = f"{self.batch.faults.name(int(threads[0]))} at barrier {number} of {count} threads"
            detail += f", where others expect {barrier.count}" if others_differ else ""
            self.batch.faults.record("barrier divergence", instruction.index, str(instruction), detail)
        barrier.count = count
        barrier.arrived += WARP
        barrier.votes += votes
        barrier.left = _joined(barrier.left, self.order.publish(cta, warp))
        if waits:
            self._hold(Waiter(threads, instruction, result=result), barrier)
        if barrier.arrived >= count:
            del self.named[cta, number]
            for waiter in barrier.waiters:
                if waiter.result is not None:
                    self.batch.registers[32][waiter.result, waiter.threads] = barrier.votes
                self._let_go(waiter, barrier.left)

    # --- standing still --------------------------------------------------------------------------------------

    def _hold(self, waiter: Waiter, barrier):
        barrier.waiters.append(waiter)
        self.batch.blocked[waiter.threads] = True

    def _let_go(self, waiter: Waiter, clock: np.ndarray):
        self.batch.blocked[waiter.threads] = False
        self.order.join(*self._place(waiter.threads[0]), clock)

    def report_deadlock(self):
        """Records who stands still at what, one fault for each instruction."""
        for (cta, address), barrier in self.mbarriers.items():
            for waiter in barrier.waiters:
                awaited = (
                    f"the mbarrier at shared byte {address}, in whose phase {barrier.phase} {barrier.pending} of "
                    f"{barrier.count} arrivals and {barrier.bytes_due} bytes are missing"
                )
                self._report(cta, waiter, awaited)
        for (cta, number), barrier in self.named.items():
            for waiter in barrier.waiters:
                self._report(cta, waiter, f"barrier {number}, where {barrier.arrived} of {barrier.count} threads are")

    def _report(self, cta: int, waiter: Waiter, awaited: str):
        warp = self._place(waiter.threads[0])[1]
        detail = f"warp {warp} of CTA {self.batch.faults.first_cta + cta} waits for ever for {awaited}"
        self.batch.faults.record("deadlock", waiter.instruction.index, str(waiter.instruction), detail)


def _joined(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The larger of two clocks, agent by agent; the shorter one knows nothing of the others."""
    short, long = sorted((one, other), key=len)
    result = long.copy()
    np.maximum(result[: len(short)], short, out=result[: len(short)])
    return result
