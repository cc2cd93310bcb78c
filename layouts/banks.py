"""The bank model: how many wavefronts a warp's access to shared memory takes.

Shared memory has 32 banks of 4 bytes. A warp's access is split into phases of at most 128 bytes: lanes
0-7, 8-15, 16-23, 24-31 for 16 bytes a lane, half-warps for 8, the whole warp for 4 and less. In a phase
each bank serves one 4-byte word a wavefront, to every lane that asks for it (equal words broadcast), so
a phase takes as many wavefronts as the busiest bank has different words. For 16-byte accesses this is
the same as eight banks of 16 bytes.
"""

from __future__ import annotations

import numpy as np

NUM_BANKS = 32
BANK_BYTES = 4
PHASE_BYTES = NUM_BANKS * BANK_BYTES
WARP_LANES = 32


def lanes_per_phase(width: int) -> int:
    """Lanes that are served together when each accesses ``width`` bytes (1, 2, 4, 8 or 16).

    Raises:
        ValueError: another width; no shared-memory instruction has it.
    """
    if width not in (1, 2, 4, 8, 16):
        raise ValueError(f"width must be 1, 2, 4, 8 or 16 bytes, got {width!r}")
    return min(WARP_LANES, PHASE_BYTES // width)


def phase_wavefronts(addresses, width: int, active=None) -> np.ndarray:
    """Wavefronts of each phase of each access.

    Args:
        addresses: byte addresses in shared memory, shape (..., lanes); lanes is a multiple of the phase's.
        width: bytes a lane accesses.
        active: booleans of the same shape; inactive lanes access nothing. All are active when None.

    Returns:
        int64 array (..., phases); 0 for a phase without an active lane.
    """
    addresses = np.asarray(addresses, dtype=np.int64)
    lanes = lanes_per_phase(width)
    phases = addresses.reshape(-1, lanes)
    words = (phases[:, :, None] + np.arange(0, max(width, BANK_BYTES), BANK_BYTES)) // BANK_BYTES
    present = np.ones(phases.shape, bool) if active is None else np.asarray(active, bool).reshape(phases.shape)
    words = np.where(present[:, :, None], words, -1).reshape(len(phases), -1)
    words.sort(axis=1)
    first = np.ones(words.shape, bool)
    first[:, 1:] = words[:, 1:] != words[:, :-1]
    first &= words >= 0
    phase_bank = np.arange(len(phases))[:, None] * NUM_BANKS + words % NUM_BANKS
    per_bank = np.bincount(phase_bank[first], minlength=len(phases) * NUM_BANKS)
    return per_bank.reshape(*addresses.shape[:-1], -1, NUM_BANKS).max(axis=-1)


def wavefronts(addresses, width: int, active=None) -> np.ndarray:
    """Wavefronts of each access, all its phases added; arguments as in ``phase_wavefronts``."""
    return phase_wavefronts(addresses, width, active).sum(axis=-1)
