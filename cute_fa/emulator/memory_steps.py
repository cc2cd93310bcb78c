"""Steps of loads, stores, reductions and cp.async."""

from __future__ import annotations

import numpy as np

from cute_fa.emulator.alu import DTYPES
from cute_fa.emulator.parse import Imm, Kernel, Reg, Symbol, Vec
from cute_fa.emulator.registers import RegisterMap, address_reader, guard_reader, immediate, reader, writer
from cute_fa.emulator.report import EmulationError, UnknownInstructionError
from cute_fa.emulator.schedule import Node, sync_indices

_CACHE_HINTS = {
    "volatile", "relaxed", "acquire", "release", "weak", "cta", "gpu", "sys", "cluster", "nc", "ca", "cg", "cs", "lu",
    "cv", "wb", "wt", "L1::evict_last", "L1::evict_first", "L1::no_allocate", "L1::evict_normal",
    "L1::evict_unchanged", "L2::64B", "L2::128B", "L2::256B", "L1", "L2", "evict_last", "evict_first",
    "no_allocate", "evict_normal", "evict_unchanged", "64B", "128B", "256B", "",
}  # fmt: skip


def build(group: list[Node], rows: RegisterMap, kernel: Kernel):
    """The step of a group of ld, st, red or cp instructions.

    Raises:
        UnknownInstructionError: a form that the emulator does not know.
    """
    first = group[0].instructions[0]
    parts = first.parts
    if parts[0] == "cp":
        if parts[:2] != ("cp", "async") or len(parts) < 3 or parts[2] in ("bulk", "mbarrier"):
            raise UnknownInstructionError(f"{first}: {first.opcode!r} is not known to the emulator")
        if parts[2] in ("commit_group", "wait_group", "wait_all"):
            return _cp_async_control(group)
        return _cp_async(group, rows, kernel)
    modifiers = [m for p in parts[1:] for m in p.split("::")]
    spaces = [m for m in modifiers if m in ("param", "global", "shared", "const", "local")]
    known = {"param", "global", "shared", "v2", "v4", *_CACHE_HINTS, *DTYPES}
    if parts[0] == "red":
        known |= {"add", "min", "max", "and", "or", "xor"}
    if len(spaces) != 1 or not set(modifiers) <= known or (first.guard is not None and spaces == ["param"]):
        raise UnknownInstructionError(f"{first}: {first.opcode!r} is not known to the emulator")
    if parts[0] == "red":
        return _red(group, rows, spaces[0])
    if spaces == ["param"]:
        return _ld_param(group, rows, kernel)
    return (_load if parts[0] == "ld" else _store)(group, rows, kernel, spaces[0])


def _vector(instruction, operand) -> tuple[str, int]:
    """(element type, elements) of a load or store."""
    return instruction.parts[-1], len(operand.items) if isinstance(operand, Vec) else 1


def _items(operand) -> list:
    return list(operand.items) if isinstance(operand, Vec) else [operand]


def _unit_dtype(width: int):
    return np.uint64 if width == 16 else np.dtype(f"u{width}")


def _ld_param(group, rows, kernel):
    offsets = {param.name: param.offset for param in kernel.params}
    loads = []
    for node in group:
        instruction = node.instructions[0]
        destination, source = instruction.operands
        if not isinstance(source.base, Symbol) or source.base.name not in offsets:
            raise UnknownInstructionError(f"{instruction}: only a parameter by its name can be loaded")
        kind, _ = _vector(instruction, destination)
        dtype = np.dtype(DTYPES[kind])
        start = offsets[source.base.name] + source.offset
        for i, register in enumerate(_items(destination)):
            if register is not None:
                loads.append((writer([register], rows), start + i * dtype.itemsize, dtype))

    def step(frame):
        for write, start, dtype in loads:
            write(frame, np.frombuffer(frame.params, dtype, 1, start)[:, None])

    return step


def _load(group, rows, kernel, space):
    instructions = [node.instructions[0] for node in group]
    first = instructions[0]
    kind, count = _vector(first, first.operands[0])
    dtype = np.dtype(DTYPES[kind])
    width = dtype.itemsize * count
    addresses = address_reader([i.operands[1] for i in instructions], rows, kernel)
    guard = guard_reader(instructions, rows)
    columns = list(zip(*(_items(i.operands[0]) for i in instructions), strict=True))
    writers = [writer(list(c), rows) if c[0] is not None else None for c in columns]
    moments = sync_indices(group)

    def step(frame):
        at = addresses(frame)
        active = None if guard is None else np.broadcast_to(guard(frame), (len(instructions), frame.n))
        at = np.broadcast_to(at, (len(instructions), frame.n))
        if space == "global":
            units = frame.run.global_memory.load(at, width, active, instructions, frame)
        else:
            units = frame.run.load_shared("ld.shared", at, width, active, instructions, moments, frame)
        parts = np.ascontiguousarray(units).view(dtype).reshape(len(instructions), frame.n, count)
        for i, write in enumerate(writers):
            if write is not None:
                write(frame, parts[..., i], active)

    return step


def _values(instructions, operands, dtype, rows, kernel):
    """A function of a frame: the values of a store as units (instructions, threads[, 2])."""
    kind = instructions[0].parts[-1]
    columns = list(zip(*(_items(o) for o in operands), strict=True))
    readers = [reader(list(c), kind, rows, kernel, instructions[0]) for c in columns]
    width = dtype.itemsize * len(columns)
    unit = _unit_dtype(width)

    def values(frame):
        data = np.empty((len(instructions), frame.n, len(columns)), dtype)
        for i, read in enumerate(readers):
            data[..., i] = read(frame)
        packed = data.view(unit)
        return packed if width == 16 else packed[..., 0]

    return values


def _store(group, rows, kernel, space):
    instructions = [node.instructions[0] for node in group]
    first = instructions[0]
    kind, count = _vector(first, first.operands[1])
    dtype = np.dtype(DTYPES[kind])
    width = dtype.itemsize * count
    addresses = address_reader([i.operands[0] for i in instructions], rows, kernel)
    guard = guard_reader(instructions, rows)
    values = _values(instructions, [i.operands[1] for i in instructions], dtype, rows, kernel)
    moments = sync_indices(group)

    def step(frame):
        at = np.broadcast_to(addresses(frame), (len(instructions), frame.n))
        active = None if guard is None else np.broadcast_to(guard(frame), at.shape)
        if space == "global":
            frame.run.global_memory.store(at, values(frame), width, active, instructions, frame)
        else:
            data = values(frame)
            frame.run.store_shared("st.shared", at, data, width, active, instructions, moments, frame)

    return step


def _red(group, rows, space):
    first = group[0].instructions[0]
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    functions["xor"] = np.bitwise_xor
    function = next((functions[p] for p in first.parts if p in functions), None)
    kind = first.parts[-1]
    if space != "global" or function is None or kind not in DTYPES or kind in ("f16", "bf16", "f16x2", "bf16x2"):
        raise UnknownInstructionError(f"{first}: {first.opcode!r} is not known to the emulator")
    instructions = [node.instructions[0] for node in group]
    dtype = np.dtype(DTYPES[kind])
    addresses = address_reader([i.operands[0] for i in instructions], rows, None)
    guard = guard_reader(instructions, rows)
    values = reader([i.operands[1] for i in instructions], kind, rows, None, first)

    def step(frame):
        at = np.broadcast_to(addresses(frame), (len(instructions), frame.n))
        active = None if guard is None else np.broadcast_to(guard(frame), at.shape)
        operands = np.broadcast_to(values(frame), at.shape)
        width, memory = dtype.itemsize, frame.run.global_memory
        for buffer, offsets, chosen in memory.resolve(at, width, active, "reduction", instructions, frame):
            units = buffer.units(width)
            if units is None:
                raise EmulationError(f"{first}: reductions into {buffer.name!r}, whose elements lie unaligned")
            selected = slice(None) if chosen is None else chosen
            function.at(units.view(dtype), offsets[selected] // width, operands[selected])

    return step


def _cp_async(group, rows, kernel):
    instructions = [node.instructions[0] for node in group]
    first = instructions[0]
    modifiers = {m for p in first.parts[2:] for m in p.split("::")}
    ignore_source = len(first.operands) > 3 and isinstance(first.operands[3], Reg) and first.operands[3].bits == 1
    known = {"ca", "cg", "shared", "global", "cta"} | _CACHE_HINTS
    if not modifiers <= known or not isinstance(first.operands[2], Imm) or len(first.operands) > 4:
        raise UnknownInstructionError(f"{first}: this form of cp.async is not known to the emulator")
    width = first.operands[2].value
    if width not in (4, 8, 16) or any(i.operands[2].value != width for i in instructions):
        raise UnknownInstructionError(f"{first}: a cp.async of {width} bytes does not exist, or sizes are mixed")
    to = address_reader([i.operands[0] for i in instructions], rows, kernel)
    source = address_reader([i.operands[1] for i in instructions], rows, kernel)
    extra = [i.operands[3] for i in instructions] if len(first.operands) > 3 else None
    if extra is None:
        size = None
    elif ignore_source:
        ignored = reader(extra, "pred", rows, kernel, first)
        size = lambda frame: np.where(ignored(frame), np.int64(0), np.int64(width))  # noqa: E731
    else:
        size = reader(extra, "u32", rows, kernel, first)
    guard = guard_reader(instructions, rows)
    moments = sync_indices(group)

    def step(frame):
        shape = (len(instructions), frame.n)
        active = None if guard is None else np.broadcast_to(guard(frame), shape)
        count = None if size is None else np.broadcast_to(size(frame), shape)
        at, address = np.broadcast_to(to(frame), shape), np.broadcast_to(source(frame), shape)
        data = _read_source(frame, address, count, width, active, instructions)
        frame.run.copy_async(at, data, width, active, instructions, moments, frame)

    return step


def _read_source(frame, address, count, width, active, instructions):
    """What a cp.async brings: ``count`` bytes of each source (all when None), zeros behind them."""
    memory = frame.run.global_memory
    if count is None or (count == width).all():
        return memory.load(address, width, active, instructions, frame)
    whole = count == width
    wanted = whole if active is None else whole & active
    data = memory.load(address, width, wanted, instructions, frame)
    data[count == 0] = 0
    raw = data.view(np.uint8).reshape(*address.shape, width)
    for byte in range(width - 1):
        partial = (count > byte) & ~whole
        if active is not None:
            partial &= active
        if partial.any():
            raw[..., byte][partial] = memory.load(address + byte, 1, partial, instructions, frame)[partial]
    raw[np.arange(width) >= count[..., None]] = 0
    return data


def _cp_async_control(group):
    first = group[0].instructions[0]
    name = first.parts[2]
    if first.guard is not None or len(group) != 1:
        raise UnknownInstructionError(f"{first}: this form of cp.async is not known to the emulator")
    if name == "commit_group":
        return lambda frame: frame.run.commit(frame)
    keep = int(immediate(first.operands[0], "u32")) if name == "wait_group" else 0
    index = group[0].sync_index
    if name == "wait_all":
        return lambda frame: (frame.run.commit(frame), frame.run.wait(0, index, first, frame))
    return lambda frame: frame.run.wait(keep, index, first, frame)
