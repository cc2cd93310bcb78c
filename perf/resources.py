"""What a compiled kernel says of itself, GPU or not: registers, stack, shared memory, instructions."""

from __future__ import annotations

import functools
import glob
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from cute_fa.arch import ctas_per_sm, get_arch
from cute_fa.compiled import get_artifacts, kernel_name
from cute_fa.config import KernelConfig
from cute_fa.emulator.parse import only_entry
from cute_fa.ladder import Rung, resolve_kernel
from cute_fa.problem import StaticProblem

NO_CUOBJDUMP = (
    "cuobjdump was not found (on PATH, in CUDA_HOME, in /usr/local/cuda*, in the nvidia-cuda-cuobjdump wheel)"
)

# Families of PTX instructions; the first pattern that matches an opcode counts it.
FAMILIES: dict[str, str] = {
    "ldmatrix_trans": r"ldmatrix\..*\.trans\.",
    "ldmatrix": r"ldmatrix\.",
    "mma": r"mma\.sync\.",
    "cp_async": r"cp\.async\.c[ag]\.",
    "st_shared": r"st\.shared\.",
    "ld_shared": r"ld\.shared\.",
    "barrier": r"(bar|barrier)\.sync",
}
_OPCODE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """Per thread: registers; stack and local in bytes. Per CTA: shared memory in bytes.

    The kernels declare no arrays in local memory, so a stack that isn't 0 holds spilled registers.
    ``registers``, ``stack_bytes``, ``local_bytes``, ``ctas_per_sm`` and ``occupancy`` (resident warps over
    the SM's) are None where cuobjdump is missing. ``instructions`` counts PTX instructions by family:
    static ones, loop bodies once.
    """

    arch: str
    registers: int | None
    stack_bytes: int | None
    local_bytes: int | None
    smem_bytes: int
    ctas_per_sm: int | None
    occupancy: float | None
    instructions: dict[str, int]

    def as_record(self) -> dict:
        """The fields under the names that results files use."""
        return asdict(self)


@functools.cache
def resources_of(static: StaticProblem, rung: Rung, config: KernelConfig, arch: str) -> Resources:
    """Compiles a rung for an architecture, present or not, and reads the cubin and the PTX of its kernel.

    A second kernel that merges what the first left is no part of it.

    Raises:
        ValueError: the rung can't be built for that architecture, or with that configuration.
    """
    limits = get_arch(arch)
    resolve_kernel(rung.name, arch)
    rung.check(static, config, arch)
    artifacts = get_artifacts(static, rung, config, arch)
    smem_bytes = rung.kernel.smem_bytes(static, config)
    usage = cubin_usage(artifacts.cubin, kernel_name(rung))
    ptx = only_entry(artifacts.ptx, kernel_name(rung))
    ctas = occupancy = None
    if usage is not None:
        ctas = ctas_per_sm(limits, config.num_threads, usage["REG"], smem_bytes)
        occupancy = ctas * config.num_threads / limits.threads_per_sm
    registers, stack, local = (usage[key] if usage else None for key in ("REG", "STACK", "LOCAL"))
    return Resources(arch, registers, stack, local, smem_bytes, ctas, occupancy, instruction_counts(ptx))


def instruction_counts(ptx: str) -> dict[str, int]:
    """Static PTX instructions of each family in ``FAMILIES``."""
    counts = dict.fromkeys(FAMILIES, 0)
    for opcode in _OPCODE.findall(ptx):
        family = next((name for name, pattern in FAMILIES.items() if re.match(pattern, opcode)), None)
        if family is not None:
            counts[family] += 1
    return counts


def cubin_usage(cubin: bytes, name: str) -> dict[str, int] | None:
    """REG, STACK, SHARED and LOCAL of a kernel, by its name but for a number; None where there is no cuobjdump.

    Raises:
        RuntimeError: cuobjdump can't read it.
    """
    tool = find_cuobjdump()
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "--dump-resource-usage", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} --dump-resource-usage failed with status {done.returncode}: {done.stderr.strip()}")
    return parse_usage(done.stdout, name)


def parse_usage(text: str, name: str) -> dict[str, int]:
    """The numbers of the line "REG:168 STACK:0 SHARED:1024 LOCAL:0 ..." of ``cuobjdump --dump-resource-usage``.

    Raises:
        RuntimeError: the text has no such line for this kernel, or several.
    """
    lines = re.findall(rf"Function {re.escape(name)}(?:_\d+)?:\n(.*\bREG:\d+.*)", text)
    if len(lines) != 1:
        raise RuntimeError(f"expected the resource usage of {name} once from cuobjdump, got {len(lines)}: {text!r}")
    return {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", lines[0])}


@functools.cache
def find_cuobjdump() -> str | None:
    """Path of cuobjdump, or None."""
    if found := shutil.which("cuobjdump"):
        return found
    places = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places += [Path(directory) / "bin" for directory in sorted(glob.glob("/usr/local/cuda*"), reverse=True)]
    places += sorted(Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin"), reverse=True)
    return next((found for place in places if (found := shutil.which("cuobjdump", path=str(place)))), None)
