"""The bank model: how many wavefronts a warp's access to shared memory takes.

Shared memory has 32 banks of 4 bytes. A warp's access is split into phases of at most 128 bytes: lanes
0-7, 8-15, 16-23, 24-31 for 16 bytes a lane, half-warps for 8, the whole warp for 4 and less. In a phase
each bank serves one 4-byte word a wavefront, to every lane that asks for it (equal words broadcast), so
a phase takes as many wavefronts as the busiest bank has different words. For 16-byte accesses this is
the same as eight banks of 16 bytes. Two kinds of access differ, as measured on an H200 by
``python -m perf banks``:

* Loads (ld.shared, not ldmatrix) of 8 or 16 bytes a lane: the two phases of a warp, or of a half-warp for
  16 bytes, are served as one if in them every lane l has the address of lane l ^ 1, or every lane l that
  of lane l ^ 2. The merged phase takes as many wavefronts as its busiest bank has different words.
* cp.async: a phase takes one wavefront if all its lanes fall into one 128-byte-aligned line, else one for
  each 64-byte-aligned segment that they touch. Banks play no part, and the hardware's counter of bank
  conflicts stays 0: the wavefronts beyond one are line splits. Measured for 16 bytes a lane.

The ideal is one wavefront a phase, merged phases counted as one, so it depends only on which lanes share
an address, never on where a layout puts them.

``report`` gives the wavefronts of one path under one layout, ``kernel_report`` those of all paths of a
kernel, added up for one KV iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from layouts.access import WARP_LANES, AccessKind, Path
from layouts.checks import listed

NUM_BANKS = 32
BANK_BYTES = 4
PHASE_BYTES = NUM_BANKS * BANK_BYTES
# Of cp.async, see above.
LINE_BYTES = 128
SEGMENT_BYTES = 64


def lanes_per_phase(width: int) -> int:
    """Lanes that are served together when each accesses ``width`` bytes (1, 2, 4, 8 or 16).

    Raises:
        ValueError: another width; no shared-memory instruction has it.
    """
    if width not in (1, 2, 4, 8, 16):
        raise ValueError(f"width must be 1, 2, 4, 8 or 16 bytes, got {width!r}")
    return min(WARP_LANES, PHASE_BYTES // width)


def _busiest_bank(addresses: np.ndarray, width: int, present: np.ndarray) -> np.ndarray:
    """Different words of the busiest bank, for each row of ``addresses``; ``present`` masks its lanes."""
    words = (addresses[:, :, None] + np.arange(0, max(width, BANK_BYTES), BANK_BYTES)) // BANK_BYTES
    words = np.where(present[:, :, None], words, -1).reshape(len(addresses), -1)
    words.sort(axis=1)
    first = _first_of_equals(words)
    row_bank = np.arange(len(words))[:, None] * NUM_BANKS + words % NUM_BANKS
    per_bank = np.bincount(row_bank[first], minlength=len(words) * NUM_BANKS)
    return per_bank.reshape(-1, NUM_BANKS).max(axis=1)


def _first_of_equals(ordered: np.ndarray) -> np.ndarray:
    """Marks the first of each run of equal numbers in sorted rows; negative ones are left out."""
    first = np.ones(ordered.shape, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return first & (ordered >= 0)


def _line_splits(addresses: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Wavefronts of phases of cp.async, a phase a row: one, or one a segment if the lanes leave a line."""

    def different(unit: int) -> np.ndarray:
        units = np.where(present, addresses // unit, -1)
        units.sort(axis=1)
        return _first_of_equals(units).sum(axis=1)

    return np.where(different(LINE_BYTES) > 1, different(SEGMENT_BYTES), present.any(axis=1).astype(np.int64))


def _merge(addresses: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Which pairs of phases of a load are served as one, a pair a row.

    A pair with an inactive lane never is: that case is not measured, and this is the careful side.
    """
    lane = np.arange(addresses.shape[1])
    alike = [(addresses == addresses[:, lane ^ distance]).all(axis=1) for distance in (1, 2)]
    return (alike[0] | alike[1]) & present.all(axis=1)


def phase_wavefronts(addresses, width: int, active=None, *, kind: AccessKind = AccessKind.STORE) -> np.ndarray:
    """Wavefronts of each phase of each access.

    Args:
        addresses: byte addresses in shared memory, shape (..., lanes); lanes is a multiple of the phase's,
            and of two phases' for loads of 8 or 16 bytes.
        width: bytes a lane accesses.
        active: booleans of the same shape; inactive lanes access nothing. All are active when None.
        kind: how the access is served; stores and ldmatrix follow the same rule.

    Returns:
        int64 array (..., phases); 0 for a phase without an active lane, and for the second of two merged
        phases, whose wavefronts stand at the first.

    Raises:
        ValueError: a width that no instruction has, or lanes that are not whole phases.
    """
    addresses = np.asarray(addresses, dtype=np.int64)
    lanes = lanes_per_phase(width)
    may_merge = kind is AccessKind.LOAD and lanes < WARP_LANES
    whole = 2 * lanes if may_merge else lanes
    if addresses.ndim == 0 or addresses.shape[-1] % whole:
        raise ValueError(
            f"addresses must have a multiple of {whole} lanes for accesses of {width} bytes, "
            f"got shape {addresses.shape}"
        )
    present = np.ones(addresses.shape, bool) if active is None else np.asarray(active, bool)
    shape = (*addresses.shape[:-1], -1)
    addresses, present = addresses.reshape(-1, lanes), present.reshape(-1, lanes)
    if kind is AccessKind.ASYNC_COPY:
        return _line_splits(addresses, present).reshape(shape)
    found = _busiest_bank(addresses, width, present)
    if may_merge:
        pairs, both = addresses.reshape(-1, whole), present.reshape(-1, whole)
        merged = _merge(pairs, both)
        if merged.any():
            by_pair = found.reshape(-1, 2)
            by_pair[merged, 0] = _busiest_bank(pairs[merged], width, both[merged])
            by_pair[merged, 1] = 0
    return found.reshape(shape)


def wavefronts(addresses, width: int, active=None, *, kind: AccessKind = AccessKind.STORE) -> np.ndarray:
    """Wavefronts of each access, all its phases added; arguments as in ``phase_wavefronts``."""
    return phase_wavefronts(addresses, width, active, kind=kind).sum(axis=-1)


def bank_map(tile, element_bytes: int, width: int = 16) -> np.ndarray:
    """The bank in which each ``width``-byte vector of a tile starts, int64 array (rows, vectors a row).

    Counts banks of ``width`` bytes (eight of 16, thirty-two of 4).

    Args:
        tile: a layout over a tile (``layout.on(rows, cols)``).
        element_bytes: bytes of an element; ``width`` must be a multiple of it and of 4.

    Raises:
        ValueError: another width.
    """
    if width not in (4, 8, 16) or width % element_bytes:
        raise ValueError(f"width must be 4, 8 or 16 and a multiple of {element_bytes} bytes, got {width}")
    rows, cols = tile.tile
    vectors = np.arange(0, cols, width // element_bytes)
    return tile.offset(np.arange(rows)[:, None], vectors[None, :]) * element_bytes // width % (PHASE_BYTES // width)


@dataclass(frozen=True)
class Collision:
    """Lanes of one phase that want different words of one bank.

    ``lanes`` and their ``coords`` (row, col) and byte ``addresses`` go together, one entry for each lane
    that is in the way; ``bank`` counts 4-byte banks, or 16-byte banks when a lane accesses 16 bytes.
    """

    phase: int
    bank: int
    bank_bytes: int
    lanes: tuple[int, ...]
    coords: tuple[tuple[int, int], ...]
    addresses: tuple[int, ...]

    def __str__(self):
        rows, cols = sorted({row for row, _ in self.coords}), sorted({col for _, col in self.coords})
        steps = sorted(set(np.diff(sorted(set(self.addresses))).tolist()))
        apart = f"{steps[0]} bytes apart" if len(steps) == 1 else f"{steps[0]} to {steps[-1]} bytes apart"
        return (
            f"{listed('lane', self.lanes)} of phase {self.phase} all need {self.bank_bytes}-byte bank {self.bank}: "
            f"{listed('row', rows)}, {listed('column', cols)}, {apart}"
        )


@dataclass(frozen=True, eq=False)
class BankReport:
    """What one path costs under one layout.

    Args:
        path: the accesses.
        addresses: byte addresses (warps, instructions, lanes).
        phase_wavefronts: see the function of that name, (warps, instructions, phases).
    """

    path: Path
    addresses: np.ndarray
    phase_wavefronts: np.ndarray

    @cached_property
    def wavefronts(self) -> int:
        """Wavefronts of all instructions of the path."""
        return int(self.phase_wavefronts.sum())

    @cached_property
    def ideal(self) -> int:
        """Wavefronts at best: one for each phase with an active lane, merged phases counted as one."""
        return int((self.phase_wavefronts > 0).sum())

    @cached_property
    def ways(self) -> int:
        """The worst phase: n for an n-way bank conflict, 1 for none; cp.async has none."""
        worst = int(self.phase_wavefronts.max(initial=0))
        return min(worst, 1) if self.path.kind is AccessKind.ASYNC_COPY else worst

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond the ideal that bank conflicts cost."""
        return self.wavefronts - self.ideal - self.line_splits

    @property
    def line_splits(self) -> int:
        """Wavefronts beyond the ideal that cp.async takes because phases leave their 128-byte line."""
        return self.wavefronts - self.ideal if self.path.kind is AccessKind.ASYNC_COPY else 0

    @property
    def degree(self) -> float:
        """Wavefronts over ideal: the mean number of ways, or of wavefronts a phase of cp.async."""
        return self.wavefronts / self.ideal if self.ideal else 1.0

    def effective_bandwidth(self, peak: float) -> float:
        """Bandwidth left of ``peak`` (in its unit): peak / degree."""
        return peak / self.degree

    def lanes(self, instruction_phase: tuple[int, int, int]) -> slice:
        """The lanes that are served together in a (warp, instruction, phase): two phases' if merged."""
        warp, instruction, phase = instruction_phase
        lanes = lanes_per_phase(self.path.width)
        phases = self.phase_wavefronts[warp, instruction]
        # Merged, or without an active lane, which adds nothing.
        last = phase + 1 if phase % 2 == 0 and phase + 1 < len(phases) and not phases[phase + 1] else phase
        return slice(phase * lanes, (last + 1) * lanes)

    def collisions(self, warp: int, instruction: int, phase: int) -> list[Collision]:
        """Every bank of a phase that holds more than one word asked for, the fullest first; none for cp.async."""
        if self.path.kind is AccessKind.ASYNC_COPY:
            return []
        span = self.lanes((warp, instruction, phase))
        bank_bytes = max(self.path.width, BANK_BYTES)
        addresses = self.addresses[warp, instruction, span]
        units = addresses // bank_bytes
        banks = units % (PHASE_BYTES // bank_bytes)
        present = np.ones(len(units), bool)
        if self.path.active is not None:
            present = self.path.active[warp, instruction, span]
        found = []
        for bank in np.unique(banks[present]).tolist():
            index = np.flatnonzero(present & (banks == bank))
            if len(np.unique(units[index])) > 1:
                rows, cols = (axis[warp, instruction, span][index] for axis in (self.path.rows, self.path.cols))
                found.append(
                    Collision(
                        phase,
                        bank,
                        bank_bytes,
                        tuple((index + span.start).tolist()),
                        tuple(zip(rows.tolist(), cols.tolist(), strict=True)),
                        tuple(addresses[index].tolist()),
                    )
                )
        return sorted(found, key=lambda one: -len({address // bank_bytes for address in one.addresses}))

    def first_collision(self) -> Collision | None:
        """The fullest bank of the first phase that is as bad as the worst; None without conflicts."""
        if self.ways <= 1:
            return None
        warp, instruction, phase = np.argwhere(self.phase_wavefronts == self.ways)[0].tolist()
        return self.collisions(warp, instruction, phase)[0]


def report(layout, path: Path) -> BankReport:
    """The bank report of one path under one layout (anything with ``on(rows, cols)``, see ``Path``).

    Raises:
        ValueError: the layout doesn't fit the path's tile, or an access is not aligned to its width.
    """
    addresses = path.addresses(layout)
    crooked = np.argwhere(addresses % path.width)
    if len(crooked):
        place = tuple(crooked[0])
        raise ValueError(
            f"{path.name}: layout {layout.name!r} puts ({path.rows[place]}, {path.cols[place]}) at byte "
            f"{addresses[place]}, but a {path.width}-byte access must be aligned to {path.width} bytes"
        )
    return BankReport(path, addresses, phase_wavefronts(addresses, path.width, path.active, kind=path.kind))


@dataclass(frozen=True, eq=False)
class KernelReport:
    """All paths of a kernel under one layout, for one CTA."""

    reports: tuple[BankReport, ...]

    @property
    def free(self) -> bool:
        """True when no path has a bank conflict; cp.async may still split lines."""
        return all(report.ways <= 1 for report in self.reports)

    def wavefronts(self, iterations: int = 1) -> int:
        """Wavefronts of a CTA that runs ``iterations`` KV iterations."""
        return sum(report.wavefronts * (iterations if report.path.per_iteration else 1) for report in self.reports)

    def ideal(self, iterations: int = 1) -> int:
        """The same at best, see ``BankReport.ideal``."""
        return sum(report.ideal * (iterations if report.path.per_iteration else 1) for report in self.reports)

    @property
    def iteration(self) -> KernelReport:
        """Only the paths of a KV iteration."""
        return KernelReport(tuple(report for report in self.reports if report.path.per_iteration))

    @property
    def degree(self) -> float:
        """Wavefronts over ideal of one KV iteration; 1.0 if no path belongs to one."""
        ideal = self.iteration.ideal()
        return self.iteration.wavefronts() / ideal if ideal else 1.0


def kernel_report(layout, paths: Sequence[Path]) -> KernelReport:
    """The reports of ``paths`` (see ``access.kernel_paths``) under one layout. Raises as ``report``."""
    return KernelReport(tuple(report(layout, path) for path in paths))
