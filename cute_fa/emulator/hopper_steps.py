"""Steps of Hopper's instructions: copies by tensor maps, mbarriers, named barriers, products of a warpgroup.

Loads, stores and products are executed when they are issued; what makes them asynchronous is in the clocks of
``ordering.py`` alone. Thread 4 g + t of warp w of a warpgroup (g in 0..7, t in 0..3) holds of a product m64nNk16

    D  register 4 j + 2 i + h:  row 16 w + 8 i + g,  column 8 j + 2 t + h
    A  register 2 k + i, half h:  row 16 w + 8 i + g,  column 8 k + 2 t + h
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from cute_fa.emulator.ordering import granules_of
from cute_fa.emulator.parse import Imm, Kernel, MapMem, Mem, Reg, Vec
from cute_fa.emulator.registers import RegisterMap, address_reader, guard_reader, immediate, reader, writer
from cute_fa.emulator.report import EmulationError, UnknownInstructionError
from cute_fa.emulator.schedule import Node, registers
from cute_fa.emulator.tensor_map import swizzled
from cute_fa.emulator.warp_steps import MMA_ELEMENTS, WARP, require_whole_warps

WARPGROUP = 128
LOADS, STORES, PRODUCTS = "a TMA load for the mbarrier at byte {}", "a TMA store of warp {}", "wgmma of warp {}"


def _unknown(instruction, why: str = "is not known to the emulator"):
    return UnknownInstructionError(f"{instruction}: {instruction.opcode!r} {why}")


def build(group: list[Node], rows: RegisterMap, kernel: Kernel):
    """The step of an instruction that keeps its place (``schedule.memory_class``).

    Raises:
        UnknownInstructionError: a form that the emulator does not know.
    """
    instruction = group[0].instructions[0]
    parts = instruction.parts
    if instruction.guard is not None and parts[0] != "mbarrier":
        raise _unknown(instruction, "with a guard is not known to the emulator")
    if parts[0] == "cp":
        return _bulk(instruction, rows, kernel)
    if parts[0] == "mbarrier":
        return _mbarrier(instruction, rows, kernel)
    if parts[0] == "fence":
        return lambda frame: [frame.run.races.fence(*place) for place in _warps(frame)]
    if parts[1] == "mma_async":
        return _product(group[0], rows, kernel)
    if parts[1] == "fence":
        return None
    keep = int(immediate(instruction.operands[0], "u32")) if parts[1] == "wait_group" else None
    if parts[1] == "commit_group":
        return lambda frame: frame.run.products.commit(_warps(frame))
    return lambda frame: frame.run.products.wait(_warps(frame), keep)


def _warps(frame) -> list[tuple[int, int]]:
    """(CTA of the batch, warp of the CTA) of every warp that has threads in the frame."""
    return [divmod(int(w), frame.run.warps_per_cta) for w in np.unique(frame.threads // WARP)]


class Groups:
    """Groups of asynchronous work that warps commit and wait for; ``kind`` names the agent that does the work."""

    def __init__(self, order, num_ctas: int, warps: int, kind: str):
        self.order = order
        self.kind = kind
        self.committed = np.zeros((num_ctas, warps), np.int64)
        self.issued = np.zeros((num_ctas, warps), np.int64)  # the latest group that has work in it
        self.finished = np.zeros((num_ctas, warps), np.int64)

    def agent(self, warp: int) -> int:
        return self.order.agent(self.kind, warp)

    def issue(self, cta: int, warp: int) -> tuple[int, int]:
        """(agent, its step) of work that a warp issues into its open group."""
        self.issued[cta, warp] = step = int(self.committed[cta, warp]) + 1
        return self.agent(warp), step

    def commit(self, warps):
        for place in warps:
            self.committed[place] += 1

    def wait(self, warps, keep: int):
        """All but the latest ``keep`` groups of each warp are finished."""
        for cta, warp in warps:
            step = int(self.committed[cta, warp]) - keep
            if step > self.finished[cta, warp]:
                self.finished[cta, warp] = step
                self.order.finish(cta, warp, self.agent(warp), step)

    def unfinished(self) -> list[tuple[int, int]]:
        """(CTA, warp) with work that was issued and not waited for."""
        return [(int(cta), int(warp)) for cta, warp in np.argwhere(self.issued > self.finished)]


# --- copies by tensor maps ---------------------------------------------------------------------------------


def _bulk(instruction, rows, kernel):
    parts = instruction.parts
    if parts[3] == "commit_group":
        return lambda frame: frame.run.stores.commit(_warps(frame))
    if parts[3] == "wait_group":
        keep = int(immediate(instruction.operands[0], "u32"))
        return lambda frame: frame.run.stores.wait(_warps(frame), keep)
    if parts[3] != "tensor" or "im2col" in parts or "multicast::cluster" in parts or "gather4" in parts:
        raise _unknown(instruction)
    loads = "mbarrier::complete_tx::bytes" in parts
    if not loads and "bulk_group" not in parts:
        raise _unknown(instruction)
    boxes = [o for o in instruction.operands if isinstance(o, MapMem)]
    memories = [o for o in instruction.operands if isinstance(o, Mem)]
    if len(boxes) != 1 or len(memories) != 1 + loads:
        raise _unknown(instruction, "with these operands is not known to the emulator")
    map_address = reader([boxes[0].base], "u64", rows, kernel, instruction)
    coordinates = [reader([c], "s32", rows, kernel, instruction) for c in boxes[0].coordinates]
    addresses = [address_reader([m], rows, kernel) for m in memories]

    def step(frame):
        columns = [map_address, *addresses, *coordinates]
        values = np.stack([np.broadcast_to(read(frame), (1, frame.n))[0].astype(np.int64) for read in columns])
        if loads:
            for thread, column in zip(frame.threads, values.T, strict=True):
                which, at, barrier, *where = (int(v) for v in column)
                frame.run.load_box(int(thread), which, tuple(where), at, barrier, instruction)
            return
        # Every lane of a warp stores the same: once is enough.
        _, first = np.unique(np.concatenate([(frame.threads // WARP)[None], values]), axis=1, return_index=True)
        for lane in np.sort(first):
            which, at, *where = (int(v) for v in values[:, lane])
            frame.run.store_box(int(frame.threads[lane]), which, tuple(where), at, instruction)

    return step


# --- mbarriers ---------------------------------------------------------------------------------------------


def _mbarrier(instruction, rows, kernel):
    parts, operands = instruction.parts, instruction.operands
    memory = next((o for o in operands if isinstance(o, Mem)), None)
    known = {"mbarrier", "init", "arrive", "expect_tx", "release", "cta", "shared", "shared::cta", "b64"}
    if memory is None or not set(parts) <= known or parts[1] not in ("init", "arrive"):
        raise _unknown(instruction)
    address = address_reader([memory], rows, kernel)
    guard = guard_reader([instruction], rows)
    amount = operands[operands.index(memory) + 1 :]
    read_amount = reader([amount[0]], "u32", rows, kernel, instruction) if amount else None

    def step(frame):
        shape = (1, frame.n)
        chosen = np.broadcast_to(guard(frame), shape)[0] if guard else np.ones(frame.n, bool)
        at = np.broadcast_to(address(frame), shape)[0][chosen]
        amounts = np.broadcast_to(read_amount(frame), shape)[0][chosen] if amount else np.ones(len(at), np.uint32)
        barriers = frame.run.synchronisation
        for thread, place, number in zip(frame.threads[chosen], at, amounts, strict=True):
            if parts[1] == "init":
                barriers.init(thread, int(place), int(number), instruction)
            elif "expect_tx" in parts:
                barriers.arrive(thread, int(place), 1, int(number), instruction)
            else:
                barriers.arrive(thread, int(place), int(number), 0, instruction)

    return step


def waiting(instruction, rows: RegisterMap, kernel: Kernel):
    """What a block does that ends with mbarrier.try_wait.parity: threads stand still until it is true.

    Raises:
        UnknownInstructionError: another form.
    """
    predicate, memory, parity, *_ = instruction.operands
    if "parity" not in instruction.parts or instruction.guard is not None or not isinstance(predicate, Reg):
        raise _unknown(instruction)
    address = address_reader([memory], rows, kernel)
    read_parity = reader([parity], "u32", rows, kernel, instruction)
    row = rows.row(predicate)

    def action(frame):
        at = np.broadcast_to(address(frame), (1, frame.n))[0]
        parities = np.broadcast_to(read_parity(frame), (1, frame.n))[0] & 1
        frame.run.registers[1][row, frame.threads] = True
        for chosen in _by_warp(frame, at, parities):
            first = chosen[0]
            frame.run.synchronisation.wait(frame.threads[chosen], int(at[first]), int(parities[first]), instruction)

    return action


def _by_warp(frame, *values) -> list[np.ndarray]:
    """Indices of the frame's threads, warp by warp and within one by equal values."""
    keys = np.stack([frame.threads // WARP, *values])
    changes = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
    return np.split(np.arange(frame.n), changes)


def meeting(instruction, rows: RegisterMap, kernel: Kernel):
    """What a block does that ends with a barrier of some threads of the CTA: bar.sync, bar.arrive, bar.red.popc.

    Raises:
        UnknownInstructionError: another form.
    """
    parts = [p for p in instruction.parts[1:] if p not in ("cta", "aligned")]
    operands = list(instruction.operands)
    result = predicate = None
    if parts == ["red", "popc", "u32"] and len(operands) == 4:
        result = rows.row(operands.pop(0))
        predicate = reader([operands.pop()], "pred", rows, kernel, instruction)
    if parts[0] not in ("sync", "arrive", "red") or len(operands) != 2 or instruction.guard is not None:
        raise _unknown(instruction, "with these operands is not known to the emulator")
    number, count = (reader([o], "u32", rows, kernel, instruction) for o in operands)

    def action(frame):
        require_whole_warps(frame, instruction)
        numbers, counts = (np.broadcast_to(read(frame), (1, frame.n))[0][::WARP] for read in (number, count))
        votes = np.zeros(len(numbers), int)
        if predicate is not None:
            votes = np.broadcast_to(predicate(frame), (1, frame.n)).reshape(-1, WARP).sum(axis=1)
        warps = frame.threads.reshape(-1, WARP)
        for threads, which, expected, true in zip(warps, numbers, counts, votes, strict=True):
            frame.run.synchronisation.meet(
                threads, int(which), int(expected), instruction, parts[0] != "arrive", int(true), result
            )

    return action


# --- wgmma -------------------------------------------------------------------------------------------------

_LAYOUT_BITS = {0: 0, 1: 3, 2: 2, 3: 1}  # bits of the swizzle by the descriptor's mode
_LAYOUT_SPAN = {0: 1, 1: 8, 2: 4, 3: 2}  # 16-byte units of a row of the swizzle


@lru_cache(maxsize=64)
def _offsets(mode: int, leading: int, stride: int, extent: int, transposed: bool) -> np.ndarray:
    """16-byte units of an operand of ``extent`` x 16 from its start, unswizzled.

    (extent, 2) with K contiguous; (16, extent / 8) when ``transposed``, the other dimension contiguous. ``leading``
    and ``stride`` are the descriptor's offsets in units (PTX ISA, "Strides" of wgmma's matrix descriptors).
    """
    span = _LAYOUT_SPAN[mode]
    if not transposed:
        row, k = np.arange(extent)[:, None], np.arange(2)[None]
        return row % 8 * span + row // 8 * stride + k * (1 if mode else leading)
    k, column = np.arange(16)[:, None], np.arange(extent // 8)[None]
    if mode == 0:
        return k % 8 + k // 8 * leading + column * stride
    return k % 8 * span + k // 8 * stride + column % span + column // span * leading


def _units(descriptor: int, extent: int, transposed: bool) -> np.ndarray:
    """The 16-byte units of shared memory that a descriptor's operand takes, shaped as in ``_offsets``."""
    start, leading, stride = (descriptor >> shift & 0x3FFF for shift in (0, 16, 32))
    mode, base = descriptor >> 62 & 3, descriptor >> 49 & 7
    if base:
        raise EmulationError(f"a matrix descriptor with a base offset of {base} is not known to the emulator")
    return swizzled(start + _offsets(mode, leading, stride, extent, transposed), _LAYOUT_BITS[mode])


def _product(node: Node, rows: RegisterMap, kernel: Kernel):
    """One matrix product for a chain of wgmma.mma_async into one accumulator.

    Products of 16-bit elements are exact in fp32. They are summed in fp32 by a matrix product over the whole chain,
    in an order that is neither the chain's nor the hardware's.
    """
    chain = node.instructions
    first = chain[0]
    shape, *types = first.parts[4:]
    match = re.fullmatch(r"m64n(\d+)k16", shape)
    kinds = set(types[1:])
    if not match or first.parts[2:4] != ("sync", "aligned") or types[0] != "f32" or not kinds <= set(MMA_ELEMENTS):
        raise _unknown(first)
    to_float32, num_cols = MMA_ELEMENTS[types[1]], int(match[1])
    accumulator, a, _, scale_d, *flags = first.operands
    in_registers = isinstance(a, Vec)
    flags = [int(immediate(flag, "u32")) for flag in flags]
    if flags[:2] != [1, 1] or len(flags) != (3 if in_registers else 4) or isinstance(scale_d, Imm):
        raise _unknown(first, "with these scales is not known to the emulator")
    a_transposed, b_transposed = (False if in_registers else bool(flags[2])), bool(flags[-1])
    if a_transposed or len(accumulator.items) != num_cols // 2:
        raise _unknown(first, "with these operands is not known to the emulator")
    d_rows = rows.rows(registers(accumulator))
    if in_registers:
        a_rows = np.array([[rows.row(r) for r in i.operands[1].items] for i in chain])
    else:
        a_descriptors = [reader([i.operands[1]], "u64", rows, kernel, first) for i in chain]
    b_descriptors = [reader([i.operands[2]], "u64", rows, kernel, first) for i in chain]
    keeps = [reader([i.operands[3]], "pred", rows, kernel, first) for i in chain]
    num_k = len(chain)

    def uniform(readers, frame):
        """(warpgroups, chain): what all threads of a warpgroup have alike."""
        values = np.stack([np.broadcast_to(read(frame), (1, frame.n))[0] for read in readers])
        values = values.reshape(len(readers), -1, WARPGROUP)
        if (values != values[:, :, :1]).any():
            raise EmulationError(f"{first}: an operand differs within a warpgroup")
        return values[:, :, 0].T

    def step(frame):
        if not frame.whole_warpgroups:
            raise EmulationError(f"{first}: executed by a part of a warpgroup, which must execute it together")
        groups = frame.n // WARPGROUP
        file = frame.registers[32]
        b_all = uniform(b_descriptors, frame)
        if in_registers:  # (K, k half, row half, WG, w, g, t, h) → (WG, w, row half, g, K, k half, t, h)
            halves = file[a_rows].view(np.uint16).reshape(num_k, 2, 2, groups, 4, 8, 4, 2)
            a_all = to_float32(halves.transpose(3, 4, 2, 5, 0, 1, 6, 7)).reshape(groups, 64, num_k * 16)
        else:
            a_starts = uniform(a_descriptors, frame)
            a_all = np.stack(
                [
                    to_float32(_operand(frame, group, a_starts[group], 64, False, first)).reshape(64, num_k * 16)
                    for group in range(groups)
                ]
            )
        # The chain begins anew where it does not keep the accumulator.
        keep = uniform(keeps, frame)
        begin = np.where(keep.all(axis=1), 0, num_k - 1 - (~keep)[:, ::-1].argmax(axis=1))
        accumulate = keep.all(axis=1)
        products = np.empty((groups, 64, num_cols), np.float32)
        ctas = frame.threads[::WARPGROUP] // frame.run.threads_per_cta
        shared = {}  # operands B that warpgroups share
        for group in range(groups):
            key = int(ctas[group]), b_all[group].tobytes()
            if key not in shared:
                halves = _operand(frame, group, b_all[group], num_cols, b_transposed, first)
                values = to_float32(halves)
                # Transposed, (K, 16, N); else (N, K, 16).
                shared[key] = values.reshape(num_k * 16, num_cols) if b_transposed else values.reshape(num_cols, -1).T
            elif frame.run.check:
                _log_reads(frame, group, _chain_units(b_all[group], num_cols, b_transposed), first)
            start = int(begin[group]) * 16
            _multiply(a_all[group, :, start:], shared[key][start:], products[group])
        # (WG, w, i, g, j, t, h) → (j, i, h, WG, w, g, t)
        result = products.reshape(groups, 4, 2, 8, num_cols // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        result = result.reshape(num_cols // 2, frame.n)
        if accumulate.all():
            result = result + file[d_rows].view(np.float32)
        elif accumulate.any():
            kept = np.repeat(accumulate, WARPGROUP)
            result = result + np.where(kept, file[d_rows].view(np.float32), np.float32(0))
        file[d_rows] = result.view(np.uint32)

    return step


def _multiply(a, b, out):
    """out = a b, in slices of rows so small that BLAS doesn't hand them to threads.

    Its threads wait for each other: where others use the cores, a product of 64 x 128 x 128 took 24 ms instead of
    40 µs. OpenBLAS takes one thread up to 2**18 multiplications (interface/gemm.c).
    """
    rows = 16
    while rows > 1 and rows * b.size > 1 << 18:
        rows //= 2
    np.matmul(a.reshape(-1, rows, a.shape[1]), b, out=out.reshape(-1, rows, out.shape[1]))


def _chain_units(descriptors, extent: int, transposed: bool) -> np.ndarray:
    """Units of a chain's operand: (K, 16, extent / 8) when transposed, else (extent, K, 2)."""
    return np.stack([_units(int(d), extent, transposed) for d in descriptors], axis=0 if transposed else 1)


def _operand(frame, group: int, descriptors, extent: int, transposed: bool, instruction) -> np.ndarray:
    """The elements of a chain's operand in shared memory, its last axis 8 times as long as that of its units."""
    run = frame.run
    units = _chain_units(descriptors, extent, transposed)
    cta, warp = divmod(int(frame.threads[group * WARPGROUP]) // WARP, run.warps_per_cta)
    if units.min() < 0 or units.max() >= run.shared.size // 16:
        detail = f"wgmma reads shared byte {int(units.max()) * 16} of {run.shared.size}, by warp {warp} of CTA "
        detail += str(run.first_cta + cta)
        run.faults.record("out of bounds", instruction.index, str(instruction), detail)
        units = units % (run.shared.size // 16)
    if run.check:
        _log_reads(frame, group, units, instruction)
        run.shared.require_valid(cta, units, instruction, "wgmma")
    data = run.shared.units(16)[units + cta * (run.shared.size // 16)]
    return data.view(np.uint16).reshape(*units.shape[:-1], -1)


def _log_reads(frame, group: int, units, instruction):
    run = frame.run
    cta, warp = divmod(int(frame.threads[group * WARPGROUP]) // WARP, run.warps_per_cta)
    order, warps = run.races, slice(warp, warp + WARPGROUP // WARP)
    steps = [run.products.issue(cta, w) for w in range(warps.start, warps.stop)]
    clock = order.clocks[cta, warps].min(axis=0)  # what is behind every warp of the group
    where = granules_of(units, 16, order.granule)
    order.read(cta, *steps[0], clock, where, instruction)
    for agent, step in steps[1:]:
        order.note_read(cta, agent, step, where, instruction)


def elect(group: list[Node], rows: RegisterMap):
    """elect.sync: the first lane of each warp."""
    instructions = [node.instructions[0] for node in group]
    first = instructions[0]
    members = first.operands[-1]
    if not isinstance(members, Imm) or members.value & 0xFFFFFFFF != 0xFFFFFFFF:
        raise _unknown(first, "with this mask is not known to the emulator")
    results = [i.operands[0].items for i in instructions]
    leader = writer([r[0] for r in results], rows) if results[0][0] is not None else None
    elected = writer([r[1] for r in results], rows)

    def step(frame):
        require_whole_warps(frame, first)
        if leader is not None:
            leader(frame, np.zeros((1, 1), np.uint32))
        elected(frame, np.broadcast_to(frame.threads % WARP == 0, (len(instructions), frame.n)))

    return step
