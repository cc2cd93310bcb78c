"""Runs compiled kernels on the CPU: the PTX that ships, instruction by instruction.

``emulate`` executes any PTX module of the kind that the rungs compile to; ``emulate_forward`` and
``emulated_launch`` run a rung on CPU tensors. The report counts the wavefronts of shared memory by
instruction and names races, stray accesses, reads of what nothing wrote, barriers that part of a CTA misses,
and waits that never end.
"""

from cute_fa.emulator.forward import (
    DEFAULT_ARCH,
    EmulatedForward,
    EmulationTooLongError,
    emulate_forward,
    emulated_launch,
    estimate_seconds,
    run_forward,
)
from cute_fa.emulator.launch import TensorArg, emulate
from cute_fa.emulator.parse import PtxSyntaxError
from cute_fa.emulator.report import (
    EmulationError,
    EmulationFault,
    EmulationReport,
    Fault,
    UnknownInstructionError,
    Wavefronts,
)
from cute_fa.emulator.tensor_map import TensorMapArg

__all__ = [
    "DEFAULT_ARCH",
    "EmulatedForward",
    "EmulationError",
    "EmulationFault",
    "EmulationReport",
    "EmulationTooLongError",
    "Fault",
    "PtxSyntaxError",
    "TensorArg",
    "TensorMapArg",
    "UnknownInstructionError",
    "Wavefronts",
    "emulate",
    "emulate_forward",
    "emulated_launch",
    "estimate_seconds",
    "run_forward",
]
