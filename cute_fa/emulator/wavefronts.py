"""Counts the wavefronts of shared-memory instructions while they run, by the bank model of ``layouts``."""

from __future__ import annotations

import numpy as np

from cute_fa.emulator.report import Wavefronts
from layouts.access import AccessKind
from layouts.banks import phase_wavefronts

WARP = 32


class WavefrontCounter:
    """Ideal and actual wavefronts of every instruction of a kernel.

    CTAs and iterations repeat each other's addresses, so a count is made once and used again when the
    addresses are those of the first CTA, or of the execution before.
    """

    def __init__(self, threads_per_cta: int):
        self.threads_per_cta = threads_per_cta
        self.totals: dict[int, list] = {}  # instruction index → [path, instruction, executions, ideal, actual]
        self._last: dict[int, tuple] = {}

    def count(self, path, instructions, addresses, width, active, frame):
        """Adds one execution: ``addresses`` (instructions, threads), bytes in the CTA's shared memory."""
        kind = AccessKind.of(path)
        whole_ctas = frame.whole_ctas and active is None
        if whole_ctas:
            per_cta = addresses.reshape(len(instructions), -1, self.threads_per_cta)
            repeats = per_cta.shape[1]
            if (per_cta[:, 1:] == per_cta[:, :1]).all():
                counts = [c * repeats for c in self._cached(instructions, per_cta[:, 0], width, kind)]
            else:
                counts = _count(addresses.reshape(len(instructions), -1, WARP), width, None, kind)
        else:
            spread, present = _by_warp(addresses, active, frame)
            counts = _count(spread, width, present, kind)
        for instruction, executions, ideal, actual in zip(instructions, *counts, strict=True):
            total = self.totals.setdefault(instruction.index, [path, instruction, 0, 0, 0])
            total[2] += int(executions)
            total[3] += int(ideal)
            total[4] += int(actual)

    def _cached(self, instructions, addresses, width, kind):
        key = instructions[0].index
        last = self._last.get(key)
        if last is not None and last[0].shape == addresses.shape and (last[0] == addresses).all():
            return last[1]
        counts = _count(addresses.reshape(len(instructions), -1, WARP), width, None, kind)
        self._last[key] = addresses.copy(), counts
        return counts

    def result(self) -> list[Wavefronts]:
        return [
            Wavefronts(path, instruction.line, instruction.text, instruction.source, executions, ideal, actual)
            for _, (path, instruction, executions, ideal, actual) in sorted(self.totals.items())
        ]


def _count(addresses, width, active, kind):
    """Per instruction: warps that executed it, ideal and actual wavefronts; addresses (G, warps, 32)."""
    phases = phase_wavefronts(addresses, width, active, kind=kind)
    used = phases > 0
    return used.any(axis=2).sum(axis=1), used.sum(axis=(1, 2)), phases.sum(axis=(1, 2))


def _by_warp(addresses, active, frame):
    """Addresses and activity spread over whole warps: (G, warps, 32) twice."""
    warps, position = np.unique(frame.threads // WARP, return_inverse=True)
    lanes = position * WARP + frame.threads % WARP
    spread = np.zeros((len(addresses), len(warps) * WARP), np.int64)
    present = np.zeros(spread.shape, bool)
    spread[:, lanes] = addresses
    present[:, lanes] = True if active is None else active
    shape = (len(addresses), len(warps), WARP)
    return spread.reshape(shape), present.reshape(shape)
