"""Steps of what a warp does together: matrix products, matrix loads and stores, shuffles, votes.

Thread 4 g + t of a warp (g in 0..7, t in 0..3) holds of an m16n8k16 product

    A  register i, half h:  row g + 8 (i & 1),  column 2 t + h + 8 (i >> 1)
    B  register i, half h:  row 2 t + h + 8 i,  column g
    C  register 2 i + h:    row g + 8 i,        column 2 t + h
"""

from __future__ import annotations

import numpy as np

from cute_fa.emulator.parse import Imm, Kernel, Reg, Vec
from cute_fa.emulator.registers import RegisterMap, address_reader, reader, writer
from cute_fa.emulator.report import EmulationError, UnknownInstructionError
from cute_fa.emulator.schedule import Node, registers, sync_indices

WARP = 32


def build(group: list[Node], rows: RegisterMap, kernel: Kernel):
    """The step of a group of warp instructions other than mma.

    Raises:
        UnknownInstructionError: a form that the emulator does not know.
    """
    first = group[0].instructions[0]
    if first.guard is not None:
        raise UnknownInstructionError(f"{first}: a guard on this instruction is not known to the emulator")
    name = first.parts[0]
    if name in ("ldmatrix", "stmatrix"):
        return _matrix(group, rows, kernel)
    if name == "shfl":
        return _shuffle(group, rows, kernel)
    if name in ("vote", "activemask"):
        return _vote(group, rows, kernel)
    if name in ("bar", "barrier") and first.parts[1] == "warp":
        return lambda frame: require_whole_warps(frame, first)
    raise UnknownInstructionError(f"{first}: {first.opcode!r} is not known to the emulator")


def require_whole_warps(frame, instruction):
    """Raises EmulationError when some warp of the frame is not all here."""
    if not frame.whole_warps:
        raise EmulationError(f"{instruction}: executed by a part of a warp, which must execute it together")


# --- mma ---------------------------------------------------------------------------------------------------


def mma(group: list[Node], rows: RegisterMap):
    """One matrix product for all chains of mma.sync that share their A operands.

    Products of 16-bit elements are exact in fp32. They are summed in fp32 by a matrix product over the
    whole chain, in an order that is neither the chain's nor the hardware's.

    Raises:
        UnknownInstructionError: another shape or type than m16n8k16 or m16n8k8 of f16 or bf16 with fp32.
    """
    chain = group[0].instructions
    first = chain[0]
    parts = first.parts
    shape, types = parts[3] if len(parts) > 3 else "", parts[-4:]
    known = parts[:3] == ("mma", "sync", "aligned") and shape in ("m16n8k16", "m16n8k8") and first.guard is None
    known = known and "row" in parts and "col" in parts and types[0] == types[3] == "f32"
    if not known or types[1] != types[2] or types[1] not in MMA_ELEMENTS:
        raise UnknownInstructionError(f"{first}: {first.opcode!r} is not known to the emulator")
    to_float32 = MMA_ELEMENTS[types[1]]
    k_registers = 2 if shape == "m16n8k16" else 1  # of B; A has twice as many
    a_rows = np.array([[rows.row(r) for r in i.operands[1].items] for i in chain])
    b_rows = np.array([[[rows.row(r) for r in i.operands[2].items] for i in n.instructions] for n in group])
    d_rows = rows.rows([r for n in group for r in n.instructions[-1].operands[0].items])
    read_c = _accumulators([n.instructions[0].operands[3].items for n in group], rows)
    num_n, num_k = len(group), len(chain)

    def step(frame):
        require_whole_warps(frame, first)
        file = frame.registers[32]
        warps = frame.n // WARP
        # A: (K, k half, row half, W, g, t, h) → (W, row half, g, K, k half, t, h)
        a = file[a_rows].view(np.uint16).reshape(num_k, k_registers, 2, warps, 8, 4, 2)
        a = to_float32(a.transpose(3, 2, 4, 0, 1, 5, 6)).reshape(warps, 16, -1)
        # B: (N, K, k half, W, g, t, h) → (W, N, g, K, k half, t, h)
        b = file[b_rows].view(np.uint16).reshape(num_n, num_k, k_registers, warps, 8, 4, 2)
        b = to_float32(b.transpose(3, 0, 4, 1, 2, 5, 6)).reshape(warps, num_n * 8, -1)
        product = np.matmul(a, b.transpose(0, 2, 1)).reshape(warps, 2, 8, num_n, 4, 2)
        # (W, row half, g, N, t, h) → (N, row half, h, W, g, t)
        product = product.transpose(3, 1, 5, 0, 2, 4).reshape(num_n * 4, frame.n)
        accumulator = read_c(file)
        file[d_rows] = (product if accumulator is None else product + accumulator).view(np.uint32)

    return step


def _accumulators(operands, rows):
    """A function of the register file: fp32 (4 N, threads), or None for zeros."""
    items = [item for operand in operands for item in operand]
    if all(isinstance(item, Imm) and item.value == 0 for item in items):
        return lambda file: None
    if all(isinstance(item, Reg) for item in items):
        where = rows.rows(items)
        return lambda file: file[where].view(np.float32)
    mixed = np.array([item.value if isinstance(item, Imm) else 0 for item in items], np.uint32)[:, None]
    at = [(i, rows.row(item)) for i, item in enumerate(items) if isinstance(item, Reg)]

    def read(file):
        values = np.repeat(mixed, file.shape[1], axis=1)
        for i, row in at:
            values[i] = file[row]
        return values.view(np.float32)

    return read


def _bf16_to_float(halves):
    bits = np.zeros((*halves.shape, 2), np.uint16)
    bits[..., 1] = halves
    return bits.view(np.float32)[..., 0]


def _half_to_float(halves):
    return np.ascontiguousarray(halves).view(np.float16).astype(np.float32)


MMA_ELEMENTS = {"f16": _half_to_float, "bf16": _bf16_to_float}  # operands of products → fp32


# --- ldmatrix, stmatrix ------------------------------------------------------------------------------------


def _matrix(group, rows, kernel):
    instructions = [node.instructions[0] for node in group]
    first = instructions[0]
    loads = first.parts[0] == "ldmatrix"
    count = {"x1": 1, "x2": 2, "x4": 4}.get(next((p for p in first.parts if p in ("x1", "x2", "x4")), ""))
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    if count is None or not set(first.parts[1:]) <= known:
        raise UnknownInstructionError(f"{first}: {first.opcode!r} is not known to the emulator")
    trans = "trans" in first.parts
    vector, memory = (0, 1) if loads else (1, 0)
    vectors = [registers(i.operands[vector]) for i in instructions]
    if any(len(v) != count for v in vectors):
        raise UnknownInstructionError(f"{first}: {count} matrices need {count} registers")
    addresses = address_reader([i.operands[memory] for i in instructions], rows, kernel)
    moments = sync_indices(group)
    where = rows.rows([r for v in vectors for r in v])
    path = first.parts[0] + (".trans" if trans and loads else "")
    shape = (len(instructions), -1, count, 8, 8)

    def lanes(frame):
        """Only the first 8 * count lanes of each warp give addresses."""
        require_whole_warps(frame, first)
        at = np.broadcast_to(addresses(frame), (len(instructions), frame.n))
        if count == 4:
            return at, None
        return at, np.broadcast_to(np.arange(frame.n) % WARP < 8 * count, at.shape)

    def load(frame):
        at, active = lanes(frame)
        units = frame.run.load_shared(path, at, 16, active, instructions, moments, frame)
        units = units.reshape(len(instructions), -1, WARP, 2)[:, :, : 8 * count]
        halves = np.ascontiguousarray(units).view(np.uint16).reshape(shape)  # (G, W, matrix, row, column)
        if trans:
            pairs = halves.reshape(*shape[:3], 4, 2, 8).transpose(0, 2, 1, 5, 3, 4)  # (G, matrix, W, g, t, h)
            words = np.ascontiguousarray(pairs).view(np.uint32)
        else:
            words = halves.view(np.uint32).transpose(0, 2, 1, 3, 4)
        frame.registers[32][where] = words.reshape(-1, frame.n)

    def store(frame):
        at, active = lanes(frame)
        words = frame.registers[32][where].reshape(len(instructions), count, -1, 8, 4)
        if trans:
            pairs = np.ascontiguousarray(words).view(np.uint16).reshape(len(instructions), count, -1, 8, 4, 2)
            halves = pairs.transpose(0, 2, 1, 4, 5, 3)  # (G, W, matrix, t, h, column)
        else:
            halves = np.ascontiguousarray(words.transpose(0, 2, 1, 3, 4)).view(np.uint16)
        chunks = np.ascontiguousarray(halves).reshape(len(instructions), -1, count * 8, 8).view(np.uint64)
        units = np.zeros((len(instructions), frame.n // WARP, WARP, 2), np.uint64)
        units[:, :, : count * 8] = chunks
        units = units.reshape(len(instructions), frame.n, 2)
        frame.run.store_shared(path, at, units, 16, active, instructions, moments, frame)

    return load if loads else store


# --- shuffles and votes ------------------------------------------------------------------------------------


def _require_full_mask(instruction, operand):
    if not isinstance(operand, Imm) or operand.value & 0xFFFFFFFF != 0xFFFFFFFF:
        raise UnknownInstructionError(f"{instruction}: only a constant mask of all 32 lanes is known to the emulator")


def _shuffle(group, rows, kernel):
    instructions = [node.instructions[0] for node in group]
    first = instructions[0]
    mode = first.parts[2]
    if first.parts[:2] != ("shfl", "sync") or mode not in ("idx", "bfly", "up", "down") or len(first.operands) != 5:
        raise UnknownInstructionError(f"{first}: {first.opcode!r} is not known to the emulator")
    for instruction in instructions:
        _require_full_mask(instruction, instruction.operands[4])
    destinations = [i.operands[0].items if isinstance(i.operands[0], Vec) else (i.operands[0],) for i in instructions]
    write = writer([d[0] for d in destinations], rows)
    write_valid = writer([d[1] for d in destinations], rows) if len(destinations[0]) > 1 else None
    value, b, c = (reader([i.operands[k] for i in instructions], "b32", rows, kernel, first) for k in (1, 2, 3))

    def step(frame):
        require_whole_warps(frame, first)
        source, valid = shuffle_source(mode, _as_warps(b(frame), frame), _as_warps(c(frame), frame))
        data = np.broadcast_to(value(frame), (len(instructions), frame.n)).reshape(len(instructions), -1, WARP)
        taken = np.take_along_axis(data, np.broadcast_to(source, data.shape), axis=2)
        write(frame, taken.reshape(len(instructions), frame.n))
        if write_valid is not None:
            write_valid(frame, np.broadcast_to(valid, data.shape).reshape(len(instructions), frame.n))

    return step


def _as_warps(values, frame):
    if values.shape[1] == 1:
        return values[:, :, None].astype(np.int64)
    return values.reshape(values.shape[0], -1, WARP).astype(np.int64)


def shuffle_source(mode: str, b, c):
    """(lane read, whether it was in range) of every lane; b and c broadcast to (…, 32) int64."""
    lane = np.arange(WARP)
    clamp, segment = c & 31, c >> 8 & 31
    highest = lane & segment | clamp & ~segment
    if mode == "up":
        source = lane - (b & 31)
        valid = source >= highest
    elif mode == "down":
        source = lane + (b & 31)
        valid = source <= highest
    elif mode == "bfly":
        source = lane ^ (b & 31)
        valid = source <= highest
    else:
        source = lane & segment | b & 31 & ~segment
        valid = source <= highest
    return np.where(valid, source, lane), valid


def _vote(group, rows, kernel):
    first = group[0].instructions[0]
    if first.parts[0] == "activemask":
        write = writer([n.instructions[0].operands[0] for n in group], rows)

        def active_mask(frame):
            require_whole_warps(frame, first)
            write(frame, np.full((1, 1), 0xFFFFFFFF, np.uint32))

        return active_mask
    modes = {"any": np.any, "all": np.all, "uni": None, "ballot": None}
    mode = first.parts[2] if len(first.parts) > 3 else ""
    if first.parts[:2] != ("vote", "sync") or mode not in modes:
        raise UnknownInstructionError(f"{first}: {first.opcode!r} is not known to the emulator")
    instructions = [n.instructions[0] for n in group]
    for instruction in instructions:
        _require_full_mask(instruction, instruction.operands[2])
    write = writer([i.operands[0] for i in instructions], rows)
    predicate = reader([i.operands[1] for i in instructions], "pred", rows, kernel, first)

    def step(frame):
        require_whole_warps(frame, first)
        lanes = np.broadcast_to(predicate(frame), (len(instructions), frame.n))
        lanes = lanes.reshape(len(instructions), -1, WARP)
        if mode == "ballot":
            result = (lanes.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(axis=2, dtype=np.uint32)
        elif mode == "uni":
            result = lanes.all(axis=2) | ~lanes.any(axis=2)
        else:
            result = modes[mode](lanes, axis=2)
        write(frame, np.repeat(result, WARP, axis=1))

    return step
