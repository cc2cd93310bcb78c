"""The ladder: every kernel by its name, in order, with what each changed. The names live only here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_fa.arch import get_arch
from cute_fa.choices import PIPELINED, Preference, choose
from cute_fa.config import KernelConfig, PipelinedConfig
from cute_fa.kernels.sm80_pipelined import Sm80Pipelined
from cute_fa.kernels.sm80_serial import Sm80Serial
from cute_fa.problem import AttentionProblem
from layouts import CATALOG, PLAIN, SWIZZLE_333, SmemLayout


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Args:
        name: what users call it.
        kernel: the kernel's class.
        config: what it is compiled with, unless the caller brings a layout.
        min_arch: lowest compute capability that runs it, as (major, minor).
        changed: what this rung changes against the one before, and what should follow.
        preferences: by head dimension, of a rung whose configuration is chosen: see ``choices.choose``.
    """

    name: str
    kernel: type
    config: KernelConfig
    min_arch: tuple[int, int]
    changed: str
    preferences: tuple[tuple[int, tuple[Preference, ...]], ...] = ()

    def runs_on(self, arch: str) -> bool:
        """Whether an architecture ("sm_80", "sm_90a") has what the kernel uses."""
        return get_arch(arch).capability >= self.min_arch


_SERIAL = KernelConfig(tile_m=64, tile_n=64, num_threads=128, ctas_per_sm=3, layout=PLAIN)

_PIPELINED = PipelinedConfig(
    tile_m=64,
    tile_n=64,
    num_threads=128,
    ctas_per_sm=2,
    layout=SWIZZLE_333,
    num_stages=2,
    q_in_registers=True,
    lazy_rescale=False,
)
_TALL = replace(_PIPELINED, tile_m=128, q_in_registers=False)
_LAZY = replace(_TALL, lazy_rescale=True)

LADDER: tuple[Rung, ...] = (
    Rung(
        name="kernel1",
        kernel=Sm80Serial,
        config=_SERIAL,
        min_arch=(8, 0),
        changed="FlashAttention-2 forward with row-major tiles in shared memory. Every ldmatrix and every store of "
        "O is an 8-way bank conflict.",
    ),
    Rung(
        name="kernel2",
        kernel=Sm80Serial,
        config=replace(_SERIAL, layout=SWIZZLE_333),
        min_arch=(8, 0),
        changed="The layout: Swizzle<3,3,3> o (8,64):(64,1). No access conflicts: an eighth of the wavefronts of "
        "ldmatrix and of the stores of O.",
    ),
    Rung(
        name="kernel3",
        kernel=Sm80Pipelined,
        config=_PIPELINED,
        min_arch=(8, 0),
        changed="Loads run ahead: cp.async brings the next tiles of K and V into a second stage while this one is "
        "computed, masks are applied to the tiles that need them alone, exponentials run between the products. "
        "long_scoreboard and barrier stalls fall.",
    ),
    Rung(
        name="kernel4",
        kernel=Sm80Pipelined,
        config=_TALL,
        min_arch=(8, 0),
        changed="128 query rows a CTA, 32 a warp: every ldmatrix of K and V serves twice as many rows. Half the "
        "wavefronts of K and V, and half of their loads from L2, for each FLOP.",
    ),
    Rung(
        name="kernel5",
        kernel=Sm80Pipelined,
        config=_LAZY,
        min_arch=(8, 0),
        changed="O is rescaled only when a row's maximum has risen enough to multiply its exponentials by 2**8: in "
        "most tiles no shuffle and no multiplication of O. Fewer instructions for each FLOP.",
    ),
    Rung(
        name="kernel6",
        kernel=Sm80Pipelined,
        config=_LAZY,
        preferences=PIPELINED,
        min_arch=(8, 0),
        changed="Tile, stages, CTAs an SM and where Q stays are chosen for head dimension, mask, length and "
        "architecture, by measurement where there is one (python -m perf choices). No spills.",
    ),
)

KERNELS: dict[str, Rung] = {rung.name: rung for rung in LADDER}


def resolve_layout(layout: str | SmemLayout) -> SmemLayout:
    """A layout by its name in the catalog, or a layout value as it is.

    Raises:
        ValueError: no layout has that name.
        TypeError: neither a name nor a layout.
    """
    if isinstance(layout, SmemLayout):
        return layout
    if not isinstance(layout, str):
        raise TypeError(f"layout must be a name of the catalog or a SmemLayout, got {type(layout).__name__}")
    if layout not in CATALOG:
        raise ValueError(
            f"layout must be one of {', '.join(CATALOG)}, or a SmemLayout (layouts.parse.parse_expression makes one of "
            f"an expression), got {layout!r}"
        )
    return CATALOG[layout]


def resolve_kernel(kernel: str, arch: str) -> Rung:
    """A rung by its name; "auto" is the highest one that the architecture runs.

    Raises:
        ValueError: no rung has that name, or the architecture doesn't run it.
        TypeError: not a name.
    """
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be the name of a kernel, got {type(kernel).__name__}")
    if kernel == "auto":
        return next(rung for rung in reversed(LADDER) if rung.runs_on(arch))
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be auto or one of {', '.join(KERNELS)}, got {kernel!r}")
    rung = KERNELS[kernel]
    if not rung.runs_on(arch):
        major, minor = rung.min_arch
        raise ValueError(f"kernel {kernel!r} needs compute capability {major}.{minor} or newer, this is {arch}")
    return rung


def select(
    problem: AttentionProblem, arch: str, kernel: str = "auto", layout: str | SmemLayout | None = None
) -> tuple[Rung, KernelConfig]:
    """The rung that serves a problem on an architecture ("sm_80", "sm_90a"), and its configuration.

    Raises:
        ValueError, TypeError: an unknown kernel or layout, or one that the kernel can't take.
    """
    rung = resolve_kernel(kernel, arch)
    config = choose(rung, problem, arch, None if layout is None else resolve_layout(layout)).config
    rung.kernel.check(problem.head_dim, config, arch)
    return rung, config
