"""Global and shared memory of an emulated launch, with bounds."""

from __future__ import annotations

import ctypes

import numpy as np

REGION_SHIFT = 40  # every buffer gets a region of virtual addresses of 1 TiB, so a stray access meets no other
_POISON = 0xFF  # a NaN in every floating-point format
UNINITIALISED, VALID, IN_FLIGHT = 0, 1, 2
_UNIT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class GlobalBuffer:
    """The bytes of one array, and which of them belong to it.

    Args:
        name: what reports call it.
        array: any strides; read and written in place. The bytes between its elements are out of bounds.
    """

    def __init__(self, name: str, array: np.ndarray):
        self.name = name
        self.array = array
        low, high = _byte_bounds(array)
        self.size = high - low
        self.first_element = array.__array_interface__["data"][0] - low  # bytes; 0 but for negative strides
        self.alignment_offset = low & 255
        view = (ctypes.c_uint8 * self.size).from_address(low) if self.size else b""
        self.bytes = np.frombuffer(view, np.uint8)
        dense = array.size * array.itemsize == self.size
        self._before = None if dense else self._count_elements()

    def _count_elements(self) -> np.ndarray:
        """How many bytes of elements lie before each byte, (size + 1,)."""
        mask = np.zeros(self.size, bool)
        for byte in range(self.array.itemsize):
            mine = mask[self.first_element + byte :]
            np.lib.stride_tricks.as_strided(mine, self.array.shape, self.array.strides)[...] = True
        return np.concatenate([[0], np.cumsum(mask)])

    def holds(self, offsets, width: int) -> np.ndarray:
        """Whether each access of ``width`` bytes touches nothing but elements."""
        inside = (offsets >= 0) & (offsets <= self.size - width)
        if self._before is None or not inside.any():
            return inside
        at = np.clip(offsets, 0, self.size - width)
        return inside & (self._before[at + width] - self._before[at] == width)

    def units(self, width: int) -> np.ndarray | None:
        """The bytes as aligned units of ``width`` bytes, or None when the array itself lies unaligned."""
        if self.alignment_offset % width:
            return None
        whole = self.bytes[: self.size // width * width]
        return whole.view(np.uint64).reshape(-1, 2) if width == 16 else whole.view(_UNIT[width])


def _byte_bounds(array: np.ndarray) -> tuple[int, int]:
    low = high = array.__array_interface__["data"][0]
    if array.size == 0:
        return low, low
    for extent, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
    return low, high + array.itemsize


class GlobalMemory:
    """All buffers of a launch. Addresses are virtual: the buffer's number in the high bits."""

    def __init__(self, faults):
        self.buffers: list[GlobalBuffer] = []
        self.faults = faults

    def add(self, buffer: GlobalBuffer) -> int:
        """Maps a buffer; returns the virtual address of its lowest byte."""
        self.buffers.append(buffer)
        return (len(self.buffers) << REGION_SHIFT) + buffer.alignment_offset

    def resolve(self, addresses, width, active, verb, instructions, frame):
        """(buffer, offsets, chosen) for each buffer that is accessed; faults are recorded and left out."""
        region = addresses >> REGION_SHIFT
        numbers, left = [], region.ravel()
        while left.size:
            numbers.append(int(left[0]))
            left = left[left != left[0]]
        for number in numbers:
            chosen = None if len(numbers) == 1 else region == number
            if active is not None:
                chosen = active if chosen is None else chosen & active
            if chosen is not None and not chosen.any():
                continue
            known = 1 <= number <= len(self.buffers)
            buffer = self.buffers[number - 1] if known else None
            start = (number << REGION_SHIFT) + (buffer.alignment_offset if known else 0)
            offsets = addresses - start
            bad = self._bad(buffer, offsets, width, chosen)
            if bad is not None:
                what = f"global {verb} of {width} bytes "
                what += f"outside tensor {buffer.name!r}" if known else "at an address of no tensor"
                where = "byte {value} of " + (f"{buffer.size}" if known else "none")
                self.faults.record_lanes("out of bounds", what, where, bad, offsets, instructions, frame)
                chosen = ~bad if chosen is None else chosen & ~bad
            misaligned = (addresses & (width - 1)) != 0
            if chosen is not None:
                misaligned &= chosen
            if misaligned.any():
                what = f"global {verb} of {width} bytes at an unaligned address of {buffer.name!r}"
                self.faults.record_lanes("misaligned", what, "byte {value}", misaligned, offsets, instructions, frame)
                chosen = ~misaligned if chosen is None else chosen & ~misaligned
            if buffer is not None:
                yield buffer, offsets, chosen

    @staticmethod
    def _bad(buffer, offsets, width, chosen):
        """Booleans of the accesses that leave the tensor, or None when all stay inside."""
        if buffer is None:
            return np.ones(offsets.shape, bool) if chosen is None else chosen
        bad = ~buffer.holds(offsets, width)
        if chosen is not None:
            bad = bad & chosen
        return bad if bad.any() else None

    def load(self, addresses, width, active, instructions, frame) -> np.ndarray:
        """Loads ``width`` bytes at each address; uint units, (…, 2) uint64 for 16 bytes; poison where faulty."""
        pair = (2,) if width == 16 else ()
        dtype = np.uint64 if width == 16 else _UNIT[width]
        result = np.full((*addresses.shape, *pair), np.iinfo(dtype).max, dtype)
        for buffer, offsets, chosen in self.resolve(addresses, width, active, "read", instructions, frame):
            at = offsets if chosen is None else offsets[chosen]
            values = self._gather(buffer, at, width)
            if chosen is None:
                result = values
            else:
                result[chosen] = values
        return result

    @staticmethod
    def _gather(buffer, offsets, width):
        units = buffer.units(width)
        if units is not None:
            return units.take(offsets // width, axis=0)
        raw = buffer.bytes[offsets[..., None] + np.arange(width)]
        return raw.view(np.uint64) if width == 16 else raw.view(_UNIT[width])[..., 0]

    def store(self, addresses, values, width, active, instructions, frame):
        """Stores units of ``width`` bytes; faulty ones are dropped."""
        for buffer, offsets, chosen in self.resolve(addresses, width, active, "write", instructions, frame):
            at = offsets if chosen is None else offsets[chosen]
            data = values if chosen is None else values[chosen]
            units = buffer.units(width)
            if units is not None:
                units[at // width] = data
            else:
                raw = np.ascontiguousarray(data).view(np.uint8).reshape(*at.shape, width)
                buffer.bytes[at[..., None] + np.arange(width)] = raw


class SharedMemory:
    """The shared memory of the CTAs of one batch, one after the other, and the state of every byte."""

    def __init__(self, num_ctas: int, size: int, faults, check: bool):
        self.size = size
        self.check = check
        self.faults = faults
        self.data = np.full(num_ctas * size, _POISON, np.uint8)
        self.state = np.zeros(num_ctas * size, np.uint8)

    def units(self, width: int) -> np.ndarray:
        return self.data.view(np.uint64).reshape(-1, 2) if width == 16 else self.data.view(_UNIT[width])

    def _states(self, width: int) -> np.ndarray:
        return self.state.view(np.uint64).reshape(-1, 2) if width == 16 else self.state.view(_UNIT[width])

    def place(self, addresses, width, active, verb, instructions, frame):
        """Checks addresses (CTA's own, in bytes); returns (unit indices into the batch, active or None)."""
        low, high = (int(addresses.min()), int(addresses.max())) if addresses.size else (0, 0)
        if low < 0 or high > self.size - width or (addresses & (width - 1)).any():
            wanted = np.ones(addresses.shape, bool) if active is None else active
            outside = wanted & ((addresses < 0) | (addresses > self.size - width))
            misaligned = wanted & ~outside & ((addresses & (width - 1)) != 0)
            what = f"shared {verb} of {width} bytes"
            where = f"byte {{value}} of {self.size}"
            self.faults.record_lanes("out of bounds", what, where, outside, addresses, instructions, frame)
            self.faults.record_lanes("misaligned", what, where, misaligned, addresses, instructions, frame)
            bad = outside | misaligned
            active = wanted & ~bad if bad.any() else active
            addresses = np.where(wanted & ~bad, addresses, 0)
        return (addresses + frame.shared_base) // width, active

    def load(self, units, width, active, instructions, frame) -> np.ndarray:
        """Loads units placed by ``place``; reports bytes that nothing wrote or that are still in flight."""
        if self.check:
            self._check_read(units, width, active, instructions, frame)
        values = self.units(width).take(units, axis=0)
        if active is not None:
            values[~active] = np.iinfo(values.dtype).max
        return values

    def _check_read(self, units, width, active, instructions, frame):
        states = self._states(width).take(units, axis=0)
        all_valid = int.from_bytes(bytes([VALID]) * min(width, 8), "little")
        if (states == states.dtype.type(all_valid)).all():
            return
        states = np.ascontiguousarray(states).view(np.uint8).reshape(*units.shape, width)
        wanted = np.ones(units.shape, bool) if active is None else active
        in_flight = wanted & (states == IN_FLIGHT).any(axis=-1)
        never = wanted & ~in_flight & (states == UNINITIALISED).any(axis=-1)
        at = units * width - frame.shared_base
        self.faults.record_lanes(
            "read before wait", "shared read of what cp.async is still bringing", "byte {value}", in_flight, at,
            instructions, frame,
        )  # fmt: skip
        self.faults.record_lanes(
            "uninitialised read", "shared read of what nothing wrote", "byte {value}", never, at, instructions,
            frame,
        )  # fmt: skip

    def require_valid(self, cta: int, units, instruction, who: str):
        """Records a read by TMA or wgmma of 16-byte units (of a CTA's own) that nothing wrote."""
        states = self._states(16)[units + cta * (self.size // 16)]
        if (states == states.dtype.type(int.from_bytes(bytes([VALID]) * 8, "little"))).all():
            return
        never = (np.ascontiguousarray(states).view(np.uint8).reshape(-1, 16) != VALID).any(axis=1)
        detail = f"shared read by {who} of what nothing wrote, byte {int(units.ravel()[never.argmax()]) * 16}"
        self.faults.record(
            "uninitialised read", instruction.index, str(instruction), f"{detail} of CTA {self.faults.first_cta + cta}",
            int(never.sum()),
        )  # fmt: skip

    def store(self, units, values, width, active, instructions, frame):
        """Stores into units placed by ``place``."""
        if self.check:
            states = self._states(width).take(units, axis=0)
            states = np.ascontiguousarray(states).view(np.uint8).reshape(*units.shape, width)
            in_flight = (states == IN_FLIGHT).any(axis=-1)
            if active is not None:
                in_flight &= active
            self.faults.record_lanes(
                "store before wait", "shared store to what cp.async is still bringing", "byte {value}", in_flight,
                units * width - frame.shared_base, instructions, frame,
            )  # fmt: skip
        if active is not None:
            units, values = units[active], values[active]
        self.write(units, values, width)

    def write(self, units, values, width):
        """Writes units unconditionally and marks them valid."""
        self.units(width)[units] = values
        self._set_state(units, width, VALID)

    def poison(self, units, width):
        """Marks units as in flight and fills them with NaN: a cp.async has been issued to them."""
        unit = self.units(width)
        unit[units] = np.iinfo(unit.dtype).max
        self._set_state(units, width, IN_FLIGHT)

    def _set_state(self, units, width, state: int):
        states = self._states(width)
        states[units] = states.dtype.type(int.from_bytes(bytes([state]) * min(width, 8), "little"))
