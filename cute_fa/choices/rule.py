"""The choice for architectures that nobody measured: preference lists, and what a SM's shared memory takes.

What is listed was compiled, not run: an order of preference is a guess until ``python -m perf tune`` ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cute_fa.arch import Arch, smem_fits
from cute_fa.config import KernelConfig, PipelinedConfig
from layouts import SWIZZLE_333


@dataclass(frozen=True)
class Preference:
    """A configuration, and the (architecture, causal) for which it is passed over, since its registers spill.

    As compiled without log-sum-exp; the tests hold this to what the compiler says.
    """

    config: KernelConfig
    spills: tuple[tuple[str, bool], ...] = ()


def preferred(preferences: Sequence[Preference], smem_bytes: Sequence[int], arch: Arch, causal: bool) -> Preference:
    """The first preference whose ``ctas_per_sm`` CTAs have room on an SM and that doesn't spill; else the last one.

    Args:
        preferences: in order; the last one is the smallest.
        smem_bytes: of a CTA of each.
    """
    for preference, needed in zip(preferences, smem_bytes, strict=True):
        if smem_fits(arch, needed) >= preference.config.ctas_per_sm and (arch.name, causal) not in preference.spills:
            return preference
    return preferences[-1]


def _config(
    tile_m: int,
    tile_n: int,
    num_stages: int,
    q_in_registers: bool = False,
    ctas_per_sm: int = 2,
    first_reference: bool = False,
) -> PipelinedConfig:
    return PipelinedConfig(
        tile_m, tile_n, num_threads=128, ctas_per_sm=ctas_per_sm, layout=SWIZZLE_333, num_stages=num_stages,
        q_in_registers=q_in_registers, lazy_rescale=True, first_reference=first_reference,
    )  # fmt: skip


# Of the families of architectures whose code needs more registers, none was run.
_SM8X_CAUSAL = tuple((arch, True) for arch in ("sm_80", "sm_86", "sm_87", "sm_89"))
_SM100 = tuple((arch, causal) for arch in ("sm_100a", "sm_103a") for causal in (False, True))
_SM120 = tuple((arch, causal) for arch in ("sm_120a", "sm_121a") for causal in (False, True))

# Head dimension -> preferences for the pipelined kernel, those for bf16 first. Two CTAs of four warps leave 255
# registers to a thread, three leave 168.
PIPELINED: tuple[tuple[int, tuple[Preference, ...]], ...] = (
    (
        64,
        (
            Preference(  # 48 KB
                _config(128, 64, num_stages=2, q_in_registers=True, first_reference=True),
                spills=(
                    ("sm_100a", False),
                    ("sm_103a", False),
                    ("sm_103a", True),
                    ("sm_120a", True),
                    ("sm_121a", True),
                ),
            ),
            Preference(_config(128, 64, num_stages=2, first_reference=True)),  # 48 KB
            Preference(  # 48 KB
                _config(128, 64, num_stages=2, ctas_per_sm=3), spills=(("sm_80", True), ("sm_87", True), *_SM100)
            ),
            Preference(_config(128, 64, num_stages=2)),
        ),
    ),
    (
        128,
        (
            Preference(  # 64 KB
                _config(128, 64, num_stages=1, first_reference=True), spills=(*_SM8X_CAUSAL, *_SM100, *_SM120)
            ),
            Preference(  # 64 KB
                _config(128, 32, num_stages=2, first_reference=True), spills=(*_SM100, *_SM120)
            ),
            Preference(  # 48 KB
                _config(128, 32, num_stages=1, first_reference=True), spills=(*_SM100, *_SM120)
            ),
            Preference(_config(64, 64, num_stages=1, q_in_registers=True, first_reference=True)),  # 48 KB
            Preference(  # 64 KB
                _config(128, 64, num_stages=1),
                spills=(("sm_80", True), ("sm_87", True), *_SM100),
            ),
            Preference(_config(128, 32, num_stages=2), spills=_SM100),  # 64 KB
            Preference(_config(128, 32, num_stages=1), spills=(*_SM100, *_SM120)),  # 48 KB
            Preference(_config(64, 64, num_stages=1, q_in_registers=True)),  # 48 KB
        ),
    ),
)
