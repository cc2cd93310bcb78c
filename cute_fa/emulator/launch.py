"""``emulate``: a module of PTX, a grid and arguments → a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cute_fa.emulator.checks import FaultLog
from cute_fa.emulator.machine import Batch, Launch
from cute_fa.emulator.memory import GlobalBuffer, GlobalMemory
from cute_fa.emulator.report import EmulationError, EmulationReport
from cute_fa.emulator.tensor_map import BYTES, TensorMapArg
from cute_fa.emulator.translate import translate
from cute_fa.emulator.wavefronts import WavefrontCounter

BATCH_THREADS = 2048


@dataclass(frozen=True)
class TensorArg:
    """A tensor parameter of a CuTe DSL kernel.

    The DSL passes a tensor as a structure, its fields aligned as in C: the pointer, then the dynamic extents
    as 32-bit integers, then the dynamic strides (in elements); static ones are part of the code.

    Args:
        name: what reports call the tensor.
        array: the elements, any strides; a 16-bit float as its bits. Read and written in place.
        dynamic_shape: modes whose extent is in the structure.
        dynamic_strides: (mode, NumPy integer type) of each stride that is in the structure.
    """

    name: str
    array: np.ndarray
    dynamic_shape: tuple[int, ...] = ()
    dynamic_strides: tuple[tuple[int, type], ...] = ()

    def pack(self, address: int) -> bytes:
        """The structure, with the tensor's first element at ``address``."""
        fields = [("pointer", np.uint64), *((f"extent{mode}", np.int32) for mode in self.dynamic_shape)]
        fields += [(f"stride{mode}", dtype) for mode, dtype in self.dynamic_strides]
        packed = np.zeros((), np.dtype(fields, align=True))
        packed["pointer"] = address
        for mode in self.dynamic_shape:
            packed[f"extent{mode}"] = self.array.shape[mode]
        for mode, _ in self.dynamic_strides:
            packed[f"stride{mode}"] = self.array.strides[mode] // self.array.itemsize
        return packed.tobytes()


_DIVISOR = np.dtype(
    [("divisor", np.uint32), ("multiplier", np.uint32), ("shift1", np.uint8), ("shift2", np.uint8)], align=True
)


def divisor_args(*divisors: int) -> list[np.ndarray | np.generic]:
    """The parameters of a kernel that takes each of these as a ``cute.FastDivmodDivisorV2``: two for each divisor d.

    The first is a structure of d, m and two shifts, by which a quotient is ((n - t >> s1) + t) >> s2 with t the upper
    half of n * m: with l = ceil(log2 d), m = floor(2^32 (2^l - d) / d) + 1, s1 = min(l, 1), s2 = max(l - 1, 0)
    (Granlund and Montgomery, 1994, figure 4.1). The second is d.
    """
    args = []
    for divisor in divisors:
        bits = (divisor - 1).bit_length()
        multiplier = (2**32 * (2**bits - divisor)) // divisor + 1
        fields = (divisor, multiplier, min(bits, 1), max(bits - 1, 0))
        args += [np.array(fields, _DIVISOR), np.int32(divisor)]
    return args


def emulate(
    ptx: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[TensorArg | TensorMapArg | np.ndarray | np.generic],
    shared_bytes: int,
    *,
    check: bool = True,
    progress: Callable[[int, int, float], None] | None = None,
) -> EmulationReport:
    """Executes the kernel of a PTX module on the CPU.

    Args:
        ptx: a module with one entry.
        grid: CTAs in x, y, z.
        block: threads of a CTA in x, y, z; a multiple of 32 in all.
        args: one for each parameter: tensors, tensor maps, and NumPy scalars or arrays of the parameter's own bytes.
        shared_bytes: dynamic shared memory of a CTA.
        check: count wavefronts and look for uninitialised reads and races. Bounds, alignment and barriers are
            checked always.
        progress: called now and then with (CTAs done, CTAs in all, seconds since the start).

    Returns:
        The report; the tensors are changed in place.

    Raises:
        PtxSyntaxError, UnknownInstructionError: the module is not one the emulator can run; names the line.
        EmulationError: arguments that don't fit the parameters, a block that is no multiple of 32 threads, or a
            part of a warp at an instruction that a warp executes together.
    """
    program = translate(ptx)
    start = time.perf_counter()
    launch = _make_launch(program.kernel, grid, block, shared_bytes)
    faults = FaultLog(launch.threads)
    memory = GlobalMemory(faults)
    params = _pack(program.kernel, args, memory)
    maps = zip(program.kernel.params, args, strict=True)
    launch.tensor_maps.update({param.offset: arg for param, arg in maps if isinstance(arg, TensorMapArg)})
    counter = WavefrontCounter(launch.threads)
    report = EmulationReport(num_ctas=launch.num_ctas)
    per_batch = max(1, BATCH_THREADS // launch.threads)
    with np.errstate(all="ignore"):
        for first in range(0, launch.num_ctas, per_batch):
            count = min(per_batch, launch.num_ctas - first)
            batch = Batch(program, launch, first, count, params, memory, faults, counter, check)
            batch.execute()
            report.instructions += batch.instructions
            if progress:
                progress(first + count, launch.num_ctas, time.perf_counter() - start)
    report.faults = faults.faults()
    report.wavefronts = counter.result()
    report.seconds = time.perf_counter() - start
    return report


def _make_launch(kernel, grid, block, shared_bytes: int) -> Launch:
    for what, extents in (("grid", grid), ("block", block)):
        if len(extents) != 3 or any(int(e) != e or e < 0 for e in extents):
            raise EmulationError(f"{what} must be three extents of 0 or more, got {extents!r}")
    launch = Launch(tuple(grid), tuple(block), kernel.static_shared_bytes + shared_bytes)
    if launch.threads % 32 or launch.threads == 0:
        raise EmulationError(f"the block must be a multiple of 32 threads, got {block!r}")
    if kernel.block is not None and kernel.block != launch.block:
        raise EmulationError(f"the kernel requires blocks of {kernel.block}, got {block!r}")
    return launch


def _pack(kernel, args, memory: GlobalMemory) -> bytes:
    """The block of parameters."""
    if len(args) != len(kernel.params):
        raise EmulationError(f"the kernel has {len(kernel.params)} parameters, got {len(args)} arguments")
    packed = bytearray(kernel.param_bytes)
    for number, (param, arg) in enumerate(zip(kernel.params, args, strict=True)):
        if isinstance(arg, TensorArg):
            buffer = GlobalBuffer(arg.name, arg.array)
            data = arg.pack(memory.add(buffer) + buffer.first_element)
            name = arg.name
        elif isinstance(arg, TensorMapArg):
            data, name = bytes(BYTES), arg.name
        else:
            data, name = arg.tobytes(), repr(arg)
        if len(data) != param.size:
            raise EmulationError(
                f"argument {number} ({name}) takes {len(data)} bytes, but the kernel's parameter has {param.size}: "
                "its dynamic extents and strides are not the ones that the kernel was compiled with"
            )
        packed[param.offset : param.offset + param.size] = data
    return bytes(packed)
