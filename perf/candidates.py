"""The configurations that ``python -m perf tune`` tries, as data, and those that need no compiling to be left out."""

from __future__ import annotations

import itertools
from dataclasses import replace

from cute_fa.arch import REGISTERS_PER_SM, get_arch, smem_fits
from cute_fa.config import PipelinedConfig
from cute_fa.ladder import Rung
from cute_fa.problem import StaticProblem

# Field of PipelinedConfig -> values, in the order in which they are tried.
SPACE: dict[str, tuple] = {
    "tile_m": (128, 64),
    "tile_n": (64, 32, 96, 128),
    "num_threads": (128, 256),
    "num_stages": (1, 2),
    "q_in_registers": (False, True),
    "first_reference": (False, True),
    "ctas_per_sm": (4, 3, 2, 1),
}
MIN_WARPS = 8  # an SM: two for each of its four schedulers
MAX_REGISTERS = 255  # of a thread
OTHER_REGISTERS = 32  # addresses, fragments of K and V, maxima and sums: fewer than any kernel here takes


def candidates(rung: Rung, static: StaticProblem, arch: str) -> list[PipelinedConfig]:
    """The configurations of ``SPACE`` that the rung's kernel can be built with and that may run well, best first.

    Left out are those with more CTAs an SM than its shared memory holds, with fewer than ``MIN_WARPS`` warps an SM,
    with accumulators that don't fit the registers that a thread may have, and all but one of those that the compiler
    would treat alike. "Best" is what reads least shared memory for a score.
    """
    found: dict[tuple, PipelinedConfig] = {}
    for values in itertools.product(*SPACE.values()):
        config = replace(rung.config, **dict(zip(SPACE, values, strict=True)))
        try:
            rung.check(static, config, arch)
        except ValueError:
            continue
        allowed = register_limit(config)
        fits = smem_fits(get_arch(arch), rung.kernel.smem_bytes(static, config)) >= config.ctas_per_sm
        enough = config.num_threads // 32 * config.ctas_per_sm >= MIN_WARPS
        if fits and enough and least_registers(config, static.head_dim) <= allowed:
            # The compiler sees the CTAs of an SM only as a limit of registers.
            found.setdefault((replace(config, ctas_per_sm=0), allowed), config)
    return sorted(found.values(), key=reads_per_score)


def reads_per_score(config: PipelinedConfig) -> float:
    """16-bit elements that a warp reads from shared memory for a score, divided by the head dimension.

    A row of K and one of V serve the warp's rows of queries, and a row of Q, if it is read each time, the tile's keys.
    """
    warp_rows = config.tile_m // (config.num_threads // 32)
    return 2 / warp_rows + (0 if config.q_in_registers else 1 / config.tile_n)


def register_limit(config: PipelinedConfig) -> int:
    """Registers that a thread may have for ``ctas_per_sm`` CTAs to live on an SM; handed out in units of 8."""
    return min(MAX_REGISTERS, REGISTERS_PER_SM // (config.num_threads * config.ctas_per_sm) // 8 * 8)


def least_registers(config: PipelinedConfig, head_dim: int) -> int:
    """Registers of a thread for O and the scores (float32), Q where it stays in registers, and a few others."""
    columns = head_dim + config.tile_n + (head_dim // 2 if config.q_in_registers else 0)
    return config.tile_m * columns // config.num_threads + OTHER_REGISTERS
