"""What an experiment's variant is: a kernel, its data, and the accesses that the bank model predicts it by."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from cutlass.cute.runtime import make_fake_stream

from cute_fa.emulator import EmulationReport, TensorArg, emulate
from layouts import COLS, PLAIN, SmemLayout, Swizzle
from layouts.access import WARP_LANES, Path
from layouts.banks import BankReport, report

SMEM_ALIGNMENT = 1024  # bytes; a tile starts at bank 0

# One unused element at the end of each row: the next row starts one element further.
PADDED_1 = SmemLayout("PADDED_1", (1, COLS), (COLS + 1, 1))
# Four of 4 bytes: the rows keep the alignment of 16-byte vectors.
PADDED_4 = SmemLayout("PADDED_4", (1, COLS), (COLS + 4, 1))
# Element c of row r stands at c xor r in blocks of 32x32; 4-byte vectors of four at v xor (r mod 8).
XOR_ELEMENTS = SmemLayout("XOR_ELEMENTS", (32, 32), (32, 1), Swizzle(5, 0, 5))
XOR_VECTORS = SmemLayout("XOR_VECTORS", (8, 32), (32, 1), Swizzle(3, 2, 3))
# How the three ways to lay out a tile are called in the texts; no layout: registers and shuffles alone.
REMEDIES: dict[str, SmemLayout | None] = {
    "conflicting": PLAIN,
    "padded": PADDED_1,
    "swizzled": XOR_ELEMENTS,
    "shuffle": None,
}


@dataclass(frozen=True, eq=False)
class Access:
    """A path under a layout, made ``times`` times over by a launch."""

    layout: SmemLayout
    path: Path
    times: int

    @property
    def op(self) -> str:
        """How ncu's counters and the emulator's paths ("ld.shared") call it: "ld" or "st"."""
        return self.path.instruction.partition(".")[0]

    @property
    def report(self) -> BankReport:
        """What the bank model says of one time."""
        return report(self.layout, self.path)


class Experiment(ABC):
    """One variant of one experiment.

    Attributes:
        experiment: what the variants of one experiment share, "transpose".
        variant: what sets it apart, "padded".
        dtype: of the data, "fp32" or "bf16".
        layout: of the tile in shared memory; None where there is none.
        block: threads of a CTA.
        sizes: the default sizes, the first of them the one that ncu counts; what a size is, the class says.
        emulated_size: a size that the emulator runs in moments.
        dynamic: of the input and of the output, the modes and strides that the kernel takes at run time
            (``TensorArg``'s ``dynamic_shape`` and ``dynamic_strides``).
    """

    experiment: ClassVar[str]
    block: ClassVar[int]
    sizes: ClassVar[tuple[int, ...]]
    emulated_size: ClassVar[int]
    dynamic: ClassVar[tuple[dict, dict]]

    def __init__(self, variant: str, dtype: str, layout: SmemLayout | None):
        self.variant, self.dtype, self.layout = variant, dtype, layout

    @property
    def name(self) -> str:
        """What results call it."""
        return f"{self.experiment}_{self.dtype}_{self.variant}"

    def compile(self, arch: str, options: str = "--enable-tvm-ffi"):
        """The compiled kernel, a function of ``tensors``; ``options`` as for ``cute.compile``."""
        name = f"cute_fa_exp_{self.name}"
        type(self).kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        stream = make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
        return self._compile(stream, f"--gpu-arch {arch} {options}")

    @abstractmethod
    def _compile(self, stream, options: str):
        """``cute.compile`` with fake tensors."""

    @abstractmethod
    def check(self, size: int) -> None:
        """Raises ValueError if the kernel can't take the size."""

    @abstractmethod
    def tensors(self, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Input of random data and an output to fill."""

    @abstractmethod
    def expected(self, source: torch.Tensor) -> torch.Tensor:
        """The output as PyTorch computes it."""

    def matches(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether an output is what PyTorch computes: bit for bit, unless a variant rounds."""
        return torch.equal(found, expected)

    @abstractmethod
    def grid(self, size: int) -> tuple[int, int, int]:
        """CTAs of a launch."""

    @abstractmethod
    def accesses(self, size: int) -> list[Access]:
        """All accesses to shared memory of a launch."""

    @abstractmethod
    def moved_bytes(self, size: int) -> int:
        """Bytes that the figure GB/s counts."""

    @property
    @abstractmethod
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""

    def ways(self, size: int) -> int:
        """The worst phase of any access; 0 without one."""
        return max((access.report.ways for access in self.accesses(size)), default=0)

    def wavefronts(self, size: int) -> dict[str, tuple[int, int]]:
        """op → (ideal, predicted) wavefronts of a launch."""
        found = {"ld": (0, 0), "st": (0, 0)}
        for access in self.accesses(size):
            ideal, actual = found[access.op]
            one = access.report
            found[access.op] = ideal + one.ideal * access.times, actual + one.wavefronts * access.times
        return found


def emulate_experiment(experiment: Experiment, arch: str) -> tuple[EmulationReport, bool]:
    """A launch of ``emulated_size`` on the CPU: the report, and whether the output is PyTorch's.

    Raises:
        EmulationFault: the kernel has a race, a stray access or an uninitialised read.
        EmulationError: the emulator can't run it.
    """
    size = experiment.emulated_size
    with tempfile.TemporaryDirectory() as directory:
        ptx = experiment.compile(arch, f"--keep-ptx --dump-dir={directory}").__ptx__
    source, result = experiment.tensors(size, "cpu")
    args = [
        TensorArg(name, tensor.numpy(), **dynamic)
        for name, tensor, dynamic in zip(("source", "result"), (source, result), experiment.dynamic, strict=True)
    ]
    report = emulate(ptx, experiment.grid(size), (experiment.block, 1, 1), args, experiment.smem_bytes)
    report.raise_for_faults()
    return report, experiment.matches(result, experiment.expected(source))


def tile_bytes(layout: SmemLayout | None, tile: tuple[int, int], element_bytes: int) -> int:
    """Shared memory of one tile, rounded up so that the next one starts at bank 0; 0 without a layout."""
    if layout is None:
        return 0
    size = layout.on(*tile).cosize * element_bytes
    return -(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT


def require_multiple(what: str, size: int, unit: int) -> None:
    """Raises ValueError unless a size is a positive multiple of ``unit``."""
    if size <= 0 or size % unit:
        raise ValueError(f"size of {what} must be a positive multiple of {unit}, got {size}")


def butterfly(value, op: Callable, shuffle: Callable):
    """Reduces over a warp by five exchanges between registers; all lanes get the result."""
    offset = WARP_LANES // 2
    while offset:
        value = op(value, shuffle(value, offset=offset))
        offset //= 2
    return value
