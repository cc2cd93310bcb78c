"""Executes a translated kernel: a batch of CTAs at a time, all their threads as vectors.

Every thread has a block that it will execute next. Of the threads that wait for nothing, those at the
lowest block run it together; so those that took the shorter way wait for the others where the ways meet.
A part of a warp does not enter a block with an instruction for the whole warp while others can still join it.
A thread at a barrier waits until all threads of its CTA that have not exited are at one. Those that wait for
an mbarrier or for a barrier of some threads stand still until it lets them go (``synchronisation.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cute_fa.emulator.asynchronous import AsyncCopies
from cute_fa.emulator.checks import Access, FaultLog, RaceCheck
from cute_fa.emulator.flight import NOTHING
from cute_fa.emulator.hopper_steps import LOADS, PRODUCTS, STORES, Groups
from cute_fa.emulator.memory import GlobalMemory, SharedMemory
from cute_fa.emulator.ordering import OrderCheck, granules_of
from cute_fa.emulator.registers import PARAM_SPACE
from cute_fa.emulator.report import EmulationError
from cute_fa.emulator.synchronisation import Synchronisation
from cute_fa.emulator.tensor_map import TensorMapArg
from cute_fa.emulator.translate import Program
from cute_fa.emulator.wavefronts import WavefrontCounter

WARP = 32


@dataclass(frozen=True)
class Launch:
    """What a launch gives a kernel besides its parameters: extents of grid and block, shared memory (bytes)."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    tensor_maps: dict[int, TensorMapArg] = field(default_factory=dict)  # by place in the block of parameters

    @property
    def num_ctas(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]


class Frame:
    """The threads that execute a block together, and their registers.

    ``threads`` are numbers in the batch (CTA after CTA), ascending. ``registers`` maps a width to
    (rows, threads): the batch's own arrays, views of them, or copies of the rows that the block touches.
    """

    def __init__(self, run: Batch, threads: np.ndarray, registers: dict[int, np.ndarray], whole_batch: bool):
        self.run = run
        self.threads = threads
        self.registers = registers
        self.n = len(threads)
        self.params = run.params
        self.shared_base = run.shared_base if whole_batch else run.shared_base[threads]
        self.whole_ctas = whole_batch or self._whole(run.threads_per_cta)
        self.whole_warps = self.whole_ctas or self._whole(WARP)

    def _whole(self, size: int) -> bool:
        if self.n % size:
            return False
        groups = self.threads.reshape(-1, size)
        return bool((groups[:, 0] % size == 0).all() and (groups[:, -1] - groups[:, 0] == size - 1).all())

    @property
    def whole_warpgroups(self) -> bool:
        return self._whole(4 * WARP)

    def special(self, name: str) -> np.ndarray:
        """A special register of every thread, (threads,) uint32."""
        return self.run.special(name)[self.threads]

    def moments(self, indices: np.ndarray) -> np.ndarray:
        """The count of .sync instructions of every thread's warp at (instructions, 1) places of the block."""
        return self.run.syncs[self.threads // WARP] + indices


class Batch:
    """The state of some consecutive CTAs of a launch while they run."""

    def __init__(
        self, program: Program, launch: Launch, first_cta: int, num_ctas: int, params: bytes,
        memory: GlobalMemory, faults: FaultLog, counter: WavefrontCounter, check: bool,
    ):  # fmt: skip
        self.program = program
        self.launch = launch
        self.first_cta = first_cta
        self.num_ctas = num_ctas
        self.params = params
        self.global_memory = memory
        self.faults = faults
        self.counter = counter
        self.check = check
        self.threads_per_cta = launch.threads
        count = num_ctas * launch.threads
        faults.first_cta = first_cta
        size = max(16, -(-launch.shared_bytes // 16) * 16)
        self.shared = SharedMemory(num_ctas, size, faults, check)
        self.shared_base = np.repeat(np.arange(num_ctas) * size, launch.threads)
        self.warps_per_cta = launch.threads // WARP
        granule = program.shared_granule
        if granule is None:
            self.races = RaceCheck(num_ctas, launch.threads, size, faults)
        else:
            instructions = program.kernel.instructions
            self.races = OrderCheck(num_ctas, launch.threads, size, granule, faults, instructions, check)
            self.synchronisation = Synchronisation(self)
            self.stores = Groups(self.races, num_ctas, self.warps_per_cta, STORES)
            self.products = Groups(self.races, num_ctas, self.warps_per_cta, PRODUCTS)
        self.copies = AsyncCopies(self, count)
        self.registers = program.registers.allocate(count)
        self.position = np.zeros(count, np.int64)
        self.waiting = np.full(count, -1)  # block of the barrier that a thread waits at
        self.blocked = np.zeros(count, bool)  # stands still at an mbarrier or a barrier of some threads
        self.syncs = np.zeros(-(-count // WARP), np.int64)
        self.instructions = 0
        self.in_flight = [NOTHING] * len(self.syncs)  # products of each warp
        self._special: dict[str, np.ndarray] = {}

    # --- execution ---------------------------------------------------------------------------------------

    def execute(self):
        """Runs every thread to its end."""
        end = len(self.program.blocks)
        everyone = np.arange(len(self.position))
        whole = Frame(self, everyone, self.registers, whole_batch=True)
        while True:
            runnable = (self.waiting < 0) & ~self.blocked & (self.position < end)
            if not runnable.any():
                if not self._release(end):
                    break
                continue
            number, chosen = self._choose(runnable)
            block = self.program.blocks[number]
            if chosen.all():
                self._run(block, number, whole)
            else:
                self._run_some(block, number, np.flatnonzero(chosen))
        if self.blocked.any():
            self.synchronisation.report_deadlock()
        elif self.program.shared_granule is not None:
            self._check_stores()
        self.races.close(np.ones(self.num_ctas, bool))

    def _check_stores(self):
        for cta, warp in self.stores.unfinished():
            detail = f"warp {warp} of CTA {self.first_cta + cta} exits without waiting for its stores by TMA"
            self.faults.record("exit before wait", (cta, warp), "cp.async.bulk.wait_group", detail)

    def _choose(self, runnable) -> tuple[int, np.ndarray]:
        """The block to run next, and the threads that run it: the lowest that no part of a warp has to wait at."""
        number = lowest = int(self.position[runnable].min())
        first = chosen = runnable & (self.position == lowest)
        while (together := self.program.blocks[number].together) > 1:
            by_group = chosen.reshape(-1, together) if len(chosen) % together == 0 else chosen.reshape(-1, WARP)
            if (by_group.all(axis=1) == by_group.any(axis=1)).all():
                return number, chosen
            later = runnable & (self.position > number)
            if not later.any():
                return lowest, first  # nobody can complete the warp: the step or the barrier will say so
            number = int(self.position[later].min())
            chosen = later & (self.position == number)
        return number, chosen

    def _run_some(self, block, number, threads):
        first, last = int(threads[0]), int(threads[-1])
        if last - first + 1 == len(threads):  # neighbours: views of the registers will do
            registers = {bits: file[:, first : last + 1] for bits, file in self.registers.items()}
            self._run(block, number, Frame(self, threads, registers, whole_batch=False))
            return
        registers = {}
        for bits, file in self.registers.items():
            registers[bits] = np.empty((len(file), len(threads)), file.dtype)
            rows = block.touched.get(bits)
            if rows is not None:
                registers[bits][rows] = file[rows[:, None], threads]
        self._run(block, number, Frame(self, threads, registers, whole_batch=False))
        for bits, rows in block.written.items():
            self.registers[bits][rows[:, None], threads] = registers[bits][rows]

    def _run(self, block, number, frame):
        for step in block.steps:
            step(frame)
        warps = np.unique(frame.threads // WARP) if not frame.whole_ctas else frame.threads[::WARP] // WARP
        self.syncs[warps] += block.num_syncs
        self.instructions += len(warps) * block.num_instructions
        if block.products and self.check:
            self._follow_products(number, warps)
        if block.kind == "barrier":
            self._arrive(block, number, frame)
            return
        following = number + 1
        if block.condition is not None:
            taken = np.broadcast_to(block.condition(frame), (1, frame.n))[0]
            target = block.target if block.kind == "branch" else len(self.program.blocks)
            self.position[frame.threads] = np.where(taken, target, following)
        else:
            self.position[frame.threads] = following if block.kind == "next" else block.target
        if block.action is not None:
            block.action(frame)

    def _follow_products(self, number, warps):
        for warp in warps.tolist():
            self.in_flight[warp], early = self.program.products.behind(number, self.in_flight[warp])
            for instruction, register in early:
                cta, own = divmod(warp, self.warps_per_cta)
                detail = f"warp {own} of CTA {self.first_cta + cta} touches {register.name} of a wgmma in flight"
                self.faults.record("register before wait", instruction.index, str(instruction), detail)

    # --- barriers ----------------------------------------------------------------------------------------

    def _arrive(self, block, number, frame):
        if not frame.whole_warps:
            present = np.zeros(len(self.position), bool)
            present[frame.threads] = True
            by_warp = present.reshape(-1, WARP)
            warp = int(np.flatnonzero(by_warp.any(axis=1) & ~by_warp.all(axis=1))[0])
            detail = f"only {int(by_warp[warp].sum())} lanes of a warp reach it together, the first of them "
            detail += self.faults.name(warp * WARP + int(by_warp[warp].argmax()))
            self.faults.record("barrier divergence", block.terminator.index, str(block.terminator), detail)
        self.waiting[frame.threads] = number
        self.position[frame.threads] = number + 1
        self._release(len(self.program.blocks))

    def _release(self, end: int) -> bool:
        """Lets the CTAs go whose threads are all at a barrier or have exited; False when there is none."""
        waiting = self.waiting.reshape(self.num_ctas, -1)
        exited = ~(waiting >= 0) & (self.position.reshape(waiting.shape) >= end)
        released = ((waiting >= 0) | exited).all(axis=1) & (waiting >= 0).any(axis=1)
        if not released.any():
            return False
        latest = waiting.max(axis=1)
        strange = released & ((waiting != latest[:, None]).any(axis=1))
        for cta in np.flatnonzero(strange):
            instruction = self.program.blocks[latest[cta]].terminator
            absent = int((waiting[cta] != latest[cta]).argmax())
            thread = self.faults.name(int(cta) * self.threads_per_cta + absent)
            other = int(waiting[cta, absent])
            doing = "has exited" if other < 0 else f"is at PTX line {self.program.blocks[other].terminator.line}"
            self.faults.record("barrier divergence", instruction.index, str(instruction), f"{thread} {doing}")
        self.races.close(released)
        waiting[released] = -1
        self.copies.reopen(released)
        return True

    # --- shared memory, as the steps use it ----------------------------------------------------------------

    def load_shared(self, path, addresses, width, active, instructions, moments, frame) -> np.ndarray:
        """Loads from shared memory; counts, checks and logs the access."""
        units, active = self._place(path, addresses, width, active, "read", instructions, frame)
        if self.check:
            self._log(units, width, active, instructions, frame.moments(moments), frame, is_write=False)
        return self.shared.load(units, width, active, instructions, frame)

    def store_shared(self, path, addresses, values, width, active, instructions, moments, frame):
        """Stores to shared memory; counts, checks and logs the access."""
        units, active = self._place(path, addresses, width, active, "write", instructions, frame)
        if self.check:
            self._log(units, width, active, instructions, frame.moments(moments), frame, is_write=True)
        self.shared.store(units, values, width, active, instructions, frame)

    def copy_async(self, addresses, data, width, active, instructions, moments, frame):
        """Issues cp.async: ``data`` arrives in shared memory when the thread waits for its group."""
        units, active = self._place("cp.async", addresses, width, active, "write", instructions, frame)
        self.copies.issue(units, data, width, active, instructions, frame.moments(moments), frame)

    def commit(self, frame):
        self.copies.commit(frame)

    def wait(self, keep, index, instruction, frame):
        self.copies.wait(keep, frame, index)

    # --- tensor maps -----------------------------------------------------------------------------------------

    def load_box(self, thread: int, address: int, coordinates, to: int, barrier_at: int, instruction):
        """A load by a tensor map into shared memory, whose bytes an mbarrier counts."""
        tensor_map, cta, warp, units = self._box(thread, address, to, coordinates, instruction)
        barrier = self.synchronisation.find(thread, barrier_at, instruction)
        if units is None or barrier is None:
            return
        agent = self.races.agent(LOADS, barrier_at)
        self.races.write(
            cta, agent, barrier.phase + 1, self.races.clocks[cta, warp], granules_of(units, 16, self.races.granule),
            instruction,
        )  # fmt: skip
        self.shared.write(units + cta * (self.shared.size // 16), tensor_map.load(coordinates), 16)
        self.synchronisation.complete_bytes(cta, barrier, agent, tensor_map.num_bytes)

    def store_box(self, thread: int, address: int, coordinates, source: int, instruction):
        """A store by a tensor map out of shared memory, in the open group of the thread's warp."""
        tensor_map, cta, warp, units = self._box(thread, address, source, coordinates, instruction)
        if units is None:
            return
        if self.check:
            self.shared.require_valid(cta, units[tensor_map.kept(coordinates)], instruction, "TMA")
        agent, step = self.stores.issue(cta, warp)
        clock = self.races.clocks[cta, warp]
        self.races.read(cta, agent, step, clock, granules_of(units, 16, self.races.granule), instruction)
        tensor_map.store(coordinates, self.shared.units(16)[units + cta * (self.shared.size // 16)])

    def _box(self, thread, address, shared_address, coordinates, instruction):
        """(tensor map, CTA, warp, 16-byte units of the CTA's shared memory or None where they are out of place)."""
        tensor_map = self.launch.tensor_maps.get(address - PARAM_SPACE)
        if tensor_map is None or len(coordinates) != tensor_map.array.ndim:
            what = "no tensor map" if tensor_map is None else f"a tensor map of {tensor_map.array.ndim} dimensions"
            raise EmulationError(f"{instruction}: its address is that of {what}")
        cta, warp = divmod(thread // WARP, self.warps_per_cta)
        kind = "misaligned" if shared_address % 128 else None
        if not 0 <= shared_address <= self.shared.size - tensor_map.num_bytes:
            kind = "out of bounds"
        if kind is None:
            return tensor_map, cta, warp, tensor_map.units(shared_address)
        detail = f"a box of {tensor_map.name!r}, {tensor_map.num_bytes} bytes, at shared byte {shared_address} of "
        detail += f"{self.shared.size}, by {self.faults.name(thread)}"
        self.faults.record(kind, instruction.index, str(instruction), detail)
        return tensor_map, cta, warp, None

    def _place(self, path, addresses, width, active, verb, instructions, frame):
        units, active = self.shared.place(addresses, width, active, verb, instructions, frame)
        if self.check:
            self.counter.count(path, instructions, addresses, width, active, frame)
        return units, active

    def _log(self, units, width, active, instructions, moments, frame, is_write):
        self.races.add(Access(instructions, units, width, frame.threads, moments, is_write, active))

    # --- special registers -----------------------------------------------------------------------------------

    def special(self, name: str) -> np.ndarray:
        """A special register of every thread of the batch."""
        if name not in self._special:
            self._special[name] = self._make_special(name).astype(np.uint32)
        return self._special[name]

    def _make_special(self, name: str) -> np.ndarray:
        threads = np.arange(len(self.position))
        tid, cta = threads % self.threads_per_cta, self.first_cta + threads // self.threads_per_cta
        if name in ("%laneid", "%warpid", "WARP_SZ"):
            return {"%laneid": tid % WARP, "%warpid": tid // WARP, "WARP_SZ": np.full_like(tid, WARP)}[name]
        what, axis = name[1:].split(".")
        axis = "xyz".index(axis)
        extents = self.launch.block if what in ("tid", "ntid") else self.launch.grid
        if what in ("ntid", "nctaid"):
            return np.full_like(tid, extents[axis])
        index = tid if what == "tid" else cta
        return index // int(np.prod(extents[:axis], dtype=np.int64)) % extents[axis]
