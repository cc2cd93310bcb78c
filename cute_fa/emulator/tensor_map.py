"""Tensor maps: what a copy by TMA finds behind the address of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_fa.emulator.report import EmulationError

BYTES = 128  # of a map among the parameters
SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}  # by the bytes of the swizzle


@dataclass(frozen=True)
class TensorMapArg:
    """A tensor map as a parameter of a kernel; the emulator keeps what the encoded map would say.

    Args:
        name: what reports call the tensor.
        array: the elements; the last axis is contiguous and the first coordinate of a copy.
        box: extents of what one copy moves, by axis of ``array``.
        swizzle: bytes of the swizzle in shared memory: 0, 32, 64 or 128.

    Raises:
        EmulationError: a map that cannot be encoded (CUDA driver API, ``cuTensorMapEncodeTiled``).
    """

    name: str
    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int

    def __post_init__(self):
        row = self.box[-1] * self.array.itemsize
        faults = []
        if len(self.box) != self.array.ndim or not all(1 <= extent <= 256 for extent in self.box):
            faults.append(f"a box of {self.box} for {self.array.ndim} dimensions")
        if self.swizzle not in SWIZZLE_BITS or row % 16 or row > (self.swizzle or row):
            faults.append(f"rows of {row} bytes in a swizzle of {self.swizzle}")
        if self.array.shape[-1] > 1 and self.array.strides[-1] != self.array.itemsize:
            faults.append("a last axis that is not contiguous")
        if any(stride % 16 for stride, n in zip(self.array.strides[:-1], self.array.shape, strict=False) if n > 1):
            faults.append(f"strides of {self.array.strides} bytes, which must be multiples of 16")
        if faults:
            raise EmulationError(f"a tensor map of {self.name!r} can't have {', '.join(faults)}")

    @property
    def num_bytes(self) -> int:
        """Bytes that a copy moves in shared memory."""
        return int(np.prod(self.box)) * self.array.itemsize

    def load(self, coordinates: tuple[int, ...]) -> np.ndarray:
        """The box at coordinates (innermost first) as 16-byte units (n, 2) uint64, zeros outside the tensor."""
        box = np.zeros(self.box, self.array.dtype)
        inside = self._inside(coordinates)
        if inside is not None:
            box[inside[0]] = self.array[inside[1]]
        return box.reshape(-1).view(np.uint64).reshape(-1, 2)

    def store(self, coordinates: tuple[int, ...], units: np.ndarray):
        """Writes units as ``load`` gives them; those outside the tensor are dropped."""
        inside = self._inside(coordinates)
        if inside is not None:
            self.array[inside[1]] = units.reshape(-1).view(self.array.dtype).reshape(self.box)[inside[0]]

    def kept(self, coordinates: tuple[int, ...]) -> np.ndarray:
        """Which units of a box at coordinates, as ``store`` takes them, hold something of the tensor."""
        kept = np.zeros(self.box, bool)
        inside = self._inside(coordinates)
        if inside is not None:
            kept[inside[0]] = True
        return kept.reshape(-1, 16 // self.array.itemsize).any(axis=1)

    def _inside(self, coordinates):
        """Slices of the box and of the array where they meet; None when they don't."""
        in_box, in_array = [], []
        for first, extent, size in zip(reversed(coordinates), self.box, self.array.shape, strict=True):
            low, high = max(0, first), min(size, first + extent)
            if low >= high:
                return None
            in_box.append(slice(low - first, high - first))
            in_array.append(slice(low, high))
        return tuple(in_box), tuple(in_array)

    def units(self, address: int) -> np.ndarray:
        """Where the 16-byte units of a box lie that starts at a byte of shared memory."""
        return swizzled(address // 16 + np.arange(self.num_bytes // 16), SWIZZLE_BITS[self.swizzle])


def swizzled(units, bits: int):
    """16-byte units of shared memory as TMA and wgmma permute them (PTX ISA, "Swizzling modes").

    Bits 0 and up of the index are xored with as many from bit 3: the swizzle takes them from the address itself.
    """
    return units ^ (units >> 3 & (1 << bits) - 1)
