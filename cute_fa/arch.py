"""What differs between GPU architectures and matters here.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """Limits of one architecture; shared memory in bytes."""

    name: str
    capability: tuple[int, int]
    smem_per_cta: int
    smem_per_sm: int
    threads_per_sm: int
    ctas_per_sm: int


REGISTERS_PER_SM = 65536
SMEM_RESERVED_PER_CTA = 1024  # by the system, since compute capability 8.0

ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", (8, 0), 163 * 1024, 164 * 1024, 2048, 32),
        Arch("sm_86", (8, 6), 99 * 1024, 100 * 1024, 1536, 16),
        Arch("sm_87", (8, 7), 163 * 1024, 164 * 1024, 1536, 16),
        Arch("sm_89", (8, 9), 99 * 1024, 100 * 1024, 1536, 24),
        Arch("sm_90a", (9, 0), 227 * 1024, 228 * 1024, 2048, 32),
        Arch("sm_100a", (10, 0), 227 * 1024, 228 * 1024, 2048, 32),
        Arch("sm_103a", (10, 3), 227 * 1024, 228 * 1024, 2048, 32),
        Arch("sm_120a", (12, 0), 99 * 1024, 100 * 1024, 1536, 24),
        Arch("sm_121a", (12, 1), 99 * 1024, 100 * 1024, 1536, 24),
    )
}


def arch_of_capability(capability: tuple[int, int]) -> str:
    """The architecture's name, as compilers take it: (9, 0) -> "sm_90a".

    Raises:
        ValueError: a capability below 8.0 or one that is not known here.
    """
    for arch in ARCHS.values():
        if arch.capability == tuple(capability):
            return arch.name
    major, minor = capability
    known = ", ".join(f"{arch.capability[0]}.{arch.capability[1]}" for arch in ARCHS.values())
    raise ValueError(f"the device must have a compute capability among {known}, got {major}.{minor}")


def get_arch(name: str) -> Arch:
    """The limits of an architecture by its name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in ARCHS:
        hint = " (with the a)" if re.fullmatch(r"sm_\d+", name) and name + "a" in ARCHS else ""
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}{hint}, got {name!r}")
    return ARCHS[name]


def smem_fits(arch: Arch, smem_bytes: int) -> int:
    """CTAs whose shared memory fits an SM at once; it is handed out in units of 128 bytes."""
    return arch.smem_per_sm // (-(-smem_bytes // 128) * 128 + SMEM_RESERVED_PER_CTA)


def ctas_per_sm(arch: Arch, num_threads: int, registers: int, smem_bytes: int) -> int:
    """CTAs that fit an SM at once: the least of what registers, shared memory, threads and slots allow.

    Registers are handed to warps in units of 256 (8 a lane).
    """
    warps = -(-num_threads // 32)
    by_registers = REGISTERS_PER_SM // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, smem_fits(arch, smem_bytes), arch.threads_per_sm // (warps * 32), arch.ctas_per_sm)
