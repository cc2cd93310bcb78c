"""What an emulation found: wavefronts of shared memory, faults, time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

PATHS = ("cp.async", "ldmatrix", "ldmatrix.trans", "ld.shared", "st.shared", "stmatrix")
_FAULTS_SHOWN = 8


class EmulationError(Exception):
    """The kernel cannot be emulated, or did what no GPU would survive."""


class UnknownInstructionError(EmulationError):
    """An instruction that the emulator does not know; the message names it and its line."""


class EmulationFault(EmulationError):
    """A kernel that was to be free of faults had some; the message lists them."""


@dataclass(frozen=True)
class Wavefronts:
    """Wavefronts of one PTX instruction, added over every warp that executed it.

    ``executions`` counts warps that executed it with at least one active lane; ``ideal`` is what they
    would take at best, ``actual`` what the bank model gives for their addresses (see ``layouts.banks``).
    """

    path: str
    line: int
    text: str
    source: str
    executions: int
    ideal: int
    actual: int

    @property
    def ways(self) -> float:
        """actual / ideal: 1.0 without bank conflicts, and without cp.async that splits 128-byte lines."""
        return self.actual / self.ideal if self.ideal else 1.0


@dataclass
class Fault:
    """Something that a correct kernel never does.

    Attributes:
        kind: "uninitialised read", "read before wait", "store before wait", "out of bounds", "misaligned",
            "race", "barrier divergence", "deadlock", "invalid mbarrier", "missing proxy fence", "exit before wait" or
            "register before wait".
        instruction: the PTX instruction, with its line, that did it.
        detail: what happened the first time, CTA and thread named.
        count: how many accesses (or pairs of them) did the same.
    """

    kind: str
    instruction: str
    detail: str
    count: int = 1

    def __str__(self):
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.detail}{times}\n    {self.instruction}"


@dataclass
class EmulationReport:
    """The result of ``emulate``.

    Attributes:
        wavefronts: per shared-memory instruction, in PTX order; empty when run without checks.
        faults: what was found, one entry a kind and instruction; empty for a correct kernel.
        num_ctas: CTAs executed.
        seconds: wall time of the execution, parse and translation left out.
        instructions: warp instructions executed.
    """

    wavefronts: list[Wavefronts] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    num_ctas: int = 0
    seconds: float = 0.0
    instructions: int = 0

    @property
    def seconds_per_cta(self) -> float:
        return self.seconds / max(1, self.num_ctas)

    def __iadd__(self, other: EmulationReport) -> EmulationReport:
        """Adds the report of a kernel that ran after this one."""
        self.wavefronts += other.wavefronts
        self.faults += other.faults
        self.num_ctas += other.num_ctas
        self.seconds += other.seconds
        self.instructions += other.instructions
        return self

    def by_path(self) -> dict[str, tuple[int, int]]:
        """(ideal, actual) wavefronts by path: cp.async, ldmatrix, ldmatrix.trans, ld.shared, st.shared."""
        ideal, actual = Counter(), Counter()
        for entry in self.wavefronts:
            ideal[entry.path] += entry.ideal
            actual[entry.path] += entry.actual
        return {path: (ideal[path], actual[path]) for path in PATHS if path in actual}

    def raise_for_faults(self):
        """Raises EmulationFault that lists the faults, if there are any."""
        if self.faults:
            count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
            raise EmulationFault(f"the emulated kernel has {count}:\n{self._listed_faults()}")

    def _listed_faults(self) -> str:
        lines = [f"  {fault}" for fault in self.faults[:_FAULTS_SHOWN]]
        if len(self.faults) > _FAULTS_SHOWN:
            lines.append(f"  … and {len(self.faults) - _FAULTS_SHOWN} more")
        return "\n".join(lines)

    def __str__(self):
        lines = [f"{self.num_ctas} CTAs in {self.seconds:.2f} s ({self.seconds_per_cta * 1e3:.1f} ms a CTA)"]
        for path, (ideal, actual) in self.by_path().items():
            ways = actual / ideal if ideal else 1
            lines.append(f"  {path:<15} {actual:>12,} wavefronts, ideal {ideal:>12,} ({ways:.2f}-way)")
        lines.append(self._listed_faults() or "  no faults")
        return "\n".join(lines)
