"""The ladder: every kernel by its name, in order, with what each changed. The names live only here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cute_fa.arch import get_arch
from cute_fa.choices import PIPELINED, Preference, choose
from cute_fa.config import KernelConfig, PipelinedConfig, Sm90Config, SplitConfig
from cute_fa.kernels.sm80_pipelined import Sm80Pipelined
from cute_fa.kernels.sm80_serial import Sm80Serial
from cute_fa.kernels.sm80_split_kv import Sm80SplitKV
from cute_fa.kernels.sm90_overlapped import Sm90Overlapped
from cute_fa.kernels.sm90_warp_specialized import Sm90WarpSpecialized
from cute_fa.problem import GEOMETRY, AttentionProblem, StaticProblem, padded_head_dim
from layouts import CATALOG, PLAIN, SWIZZLE_333, SmemLayout


@dataclass(frozen=True)
class Tuned:
    """A configuration for some problems: a head dimension (the larger one, rounded up to a multiple of 64), a mask or
    None for both, a most of queries or None, and whether the problem is ``plain`` (no score option, no lengths of
    members' own) or None for both."""

    config: KernelConfig | Sm90Config
    head_dim: int
    causal: bool | None = None
    max_seqlen_q: int | None = None
    plain: bool | None = None

    def serves(self, head_dim: int, causal: bool, seqlen_q: int | None, plain: bool) -> bool:
        """Whether it is meant for a problem; ``seqlen_q`` None is one of many queries."""
        many = self.max_seqlen_q is not None and (seqlen_q is None or seqlen_q > self.max_seqlen_q)
        fits = self.causal in (None, causal) and self.plain in (None, plain)
        return padded_head_dim(head_dim) == self.head_dim and fits and not many


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Args:
        name: what users call it.
        kernel: the kernel's class.
        config: what it is compiled with, unless the caller brings a layout.
        min_arch: lowest compute capability that runs it, as (major, minor).
        changed: what this rung changes against the one before, and what should follow.
        max_arch: highest compute capability that runs it; None if every later one does.
        tuned: configurations that take the place of ``config`` for some problems; the first that serves one does.
        splits_keys: whether the kernel takes (workspace, num_splits) and merges its splits by a second kernel.
        max_rows: "auto" takes this rung before all others for at most so many queries times heads that share one
            head of K and V, and never for more; None: for any number.
        preferences: by head dimension, of a rung whose configuration is chosen: see ``choices.choose``.
    """

    name: str
    kernel: type
    config: KernelConfig | Sm90Config
    min_arch: tuple[int, int]
    changed: str
    max_arch: tuple[int, int] | None = None
    tuned: tuple[Tuned, ...] = ()
    splits_keys: bool = False
    max_rows: int | None = None
    preferences: tuple[tuple[int, tuple[Preference, ...]], ...] = ()

    def runs_on(self, arch: str) -> bool:
        """Whether an architecture ("sm_80", "sm_90a") has what the kernel uses."""
        capability = get_arch(arch).capability
        return self.min_arch <= capability and (self.max_arch is None or capability <= self.max_arch)

    def config_for(
        self,
        head_dim: int,
        causal: bool = False,
        seqlen_q: int | None = None,
        layout: SmemLayout | None = None,
        plain: bool = True,
    ) -> KernelConfig | Sm90Config:
        """The configuration for a problem (of many queries if ``seqlen_q`` is None), with the caller's layout."""
        served = (tuned.config for tuned in self.tuned if tuned.serves(head_dim, causal, seqlen_q, plain))
        config = next(served, self.config)
        return config if layout is None else replace(config, layout=layout)

    def lack(self, static: StaticProblem) -> str | None:
        """What of a problem the kernel has no code for, as an error's text; None if it has all."""
        if static.head_dim not in self.kernel.head_dims:
            taken = ", ".join(map(str, self.kernel.head_dims))
            return f"kernel {self.name!r} takes a head dimension of {taken}, got {static.head_dim}; kernel 'auto' more"
        for name in static.geometry:
            if name not in self.kernel.geometry:
                return f"kernel {self.name!r} does not take {GEOMETRY[name]}; kernel 'auto' does"
        wanted = static.features.options
        if wanted - self.kernel.score_options:
            missing = ", ".join(sorted(wanted - self.kernel.score_options))
            others = ", ".join(rung.name for rung in LADDER if wanted <= rung.kernel.score_options)
            return f"kernel must be auto or one that has {missing} ({others}), got {self.name!r}"
        return None

    def check(self, static: StaticProblem, config: KernelConfig | Sm90Config, arch: str) -> None:
        """Raises ValueError if the kernel can't compute this, or not with this configuration."""
        if (lack := self.lack(static)) is not None:
            raise ValueError(lack)
        self.kernel.check(static, config, arch)


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
# O of 16 rows a warp is as much as registers hold here. Everything fits the 99 KiB of compute capability 8.6.
_WIDE = replace(_TALL, num_threads=256, ctas_per_sm=1, num_stages=1)
_WIDE_TUNED = (Tuned(_WIDE, head_dim=192), Tuned(replace(_WIDE, tile_n=32), head_dim=256))
_LAZY_TUNED = tuple(replace(tuned, config=replace(tuned.config, lazy_rescale=True)) for tuned in _WIDE_TUNED)

# wgmma exists on compute capability 9.x alone.
_HOPPER = {"min_arch": (9, 0), "max_arch": (9, 9)}
_SM90 = Sm90Config(tile_m=128, tile_n=128, num_stages=2, layout=SWIZZLE_333)
_SM90_TRYING = replace(_SM90, try_first=True)
_SM90_PERSISTENT = replace(_SM90_TRYING, max_ctas=132)  # the SMs of an H100 SXM and of an H200
# Short walks gain by it, long ones lose, as do all at head dimension 128 from 1024 keys on (measured on an H200).
_SM90_SHORT = replace(_SM90_PERSISTENT, num_stages=3, overlap_tiles=True)


def _wide_tuned(config: Sm90Config) -> tuple[Tuned, ...]:
    """As many keys as shared memory has room for, in two stages."""
    return tuple(Tuned(replace(config, tile_n=tile_n), head_dim) for head_dim, tile_n in ((192, 112), (256, 80)))


_SPLIT = SplitConfig(tile_m=16, tile_n=16, num_threads=128, ctas_per_sm=2, layout=SWIZZLE_333, num_stages=2)
_SPLIT_DEEP = replace(_SPLIT, num_stages=3, ctas_per_sm=1)  # the faster one on an H200, where shared memory has room
_SPLITS = tuple(
    Preference(replace(config, early_combine=early)) for config in (_SPLIT_DEEP, _SPLIT) for early in (True, False)
)

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
        tuned=_WIDE_TUNED,
        min_arch=(8, 0),
        changed="Loads run ahead: cp.async brings the next tiles of K and V into a second stage while this one is "
        "computed, masks are applied to the tiles that need them alone, exponentials run between the products. "
        "long_scoreboard and barrier stalls fall.",
    ),
    Rung(
        name="kernel4",
        kernel=Sm80Pipelined,
        config=_TALL,
        tuned=_WIDE_TUNED,
        min_arch=(8, 0),
        changed="128 query rows a CTA, 32 a warp: every ldmatrix of K and V serves twice as many rows. Half the "
        "wavefronts of K and V, and half of their loads from L2, for each FLOP.",
    ),
    Rung(
        name="kernel5",
        kernel=Sm80Pipelined,
        config=_LAZY,
        tuned=_LAZY_TUNED,
        min_arch=(8, 0),
        changed="O is rescaled only when a row's maximum has risen enough to multiply its exponentials by 2**8: in "
        "most tiles no shuffle and no multiplication of O. Fewer instructions for each FLOP.",
    ),
    Rung(
        name="kernel6",
        kernel=Sm80Pipelined,
        config=_LAZY,
        tuned=_LAZY_TUNED,
        preferences=PIPELINED,
        min_arch=(8, 0),
        changed="Tile, stages, CTAs an SM and where Q stays are chosen for type, head dimension, mask, length and "
        "architecture, by measurement where there is one (python -m perf choices); so is, of bf16, whether tiles "
        "without a mask look for a maximum. No spills.",
    ),
    Rung(
        name="kernel7",
        kernel=Sm80SplitKV,
        config=_SPLIT,
        preferences=tuple((head_dim, _SPLITS) for head_dim in (64, 128)),
        min_arch=(8, 0),
        splits_keys=True,
        max_rows=64,
        changed="For few queries over many keys: the heads that share K and V are packed into one tile, and the keys "
        "are split over warps, CTAs and the card. K and V are read once, at the rate of the memory.",
    ),
    Rung(
        name="kernel8",
        kernel=Sm90WarpSpecialized,
        config=_SM90,
        tuned=_wide_tuned(_SM90),
        changed="Hopper: TMA loads by a warp of its own, wgmma with P in registers, O stored by TMA. The layout is "
        "the hardware's 128-byte swizzle.",
        **_HOPPER,
    ),
    Rung(
        name="kernel9",
        kernel=Sm90Overlapped,
        config=_SM90,
        tuned=_wide_tuned(_SM90),
        changed="The next block's scores are issued with this block's output, and two warpgroups take turns at the "
        "tensor cores: softmax runs beside them.",
        **_HOPPER,
    ),
    Rung(
        name="kernel10",
        kernel=Sm90Overlapped,
        config=_SM90_TRYING,
        tuned=_wide_tuned(_SM90_TRYING),
        changed="Exponentials before the maximum: the sum of a block shows whether one was needed. A fifth fewer "
        "instructions a score, none of them between the scores and their exponentials.",
        **_HOPPER,
    ),
    Rung(
        name="kernel11",
        kernel=Sm90Overlapped,
        config=_SM90_PERSISTENT,
        tuned=(
            # Three consumers have too few registers for more than that.
            Tuned(replace(_SM90_PERSISTENT, num_stages=3), head_dim=64, plain=False),
            # Under a mask a tile of 192 rows wastes more, which few keys don't make up for (crossover measured on an
            # H200 between 1024 and 2048).
            Tuned(_SM90_SHORT, head_dim=64, causal=True, max_seqlen_q=1024),
            Tuned(replace(_SM90_SHORT, tile_m=192), head_dim=64, max_seqlen_q=1024),
            Tuned(replace(_SM90_PERSISTENT, tile_m=192, num_stages=3), head_dim=64),
            # Fewer keys leave shared memory to O, and so the next Q need not wait for it (measured on an H200).
            Tuned(replace(_SM90_PERSISTENT, tile_n=64), head_dim=256),
            *_wide_tuned(_SM90_PERSISTENT),
        ),
        changed="One CTA an SM takes tile after tile, long and short ones balanced, and loads the next before it has "
        "stored the last. Tiles by head dimension.",
        **_HOPPER,
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
    """A rung by its name; "auto" is the highest one that the architecture runs (see ``select`` for which serves).

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
        needed = "{}.{} or newer".format(*rung.min_arch) if rung.max_arch is None else f"{rung.min_arch[0]}.x"
        raise ValueError(f"kernel {kernel!r} needs compute capability {needed}, this is {arch}")
    return rung


def select(
    problem: AttentionProblem, arch: str, kernel: str = "auto", layout: str | SmemLayout | None = None
) -> tuple[Rung, KernelConfig]:
    """The rung that serves a problem on an architecture ("sm_80", "sm_90a"), and its configuration.

    "auto" is the highest rung that the architecture runs and that takes the problem (head dimensions, lengths, score
    options) and the layout; one made for few queries comes before all others if these are few.

    Raises:
        ValueError, TypeError: an unknown kernel or layout, a kernel that can't take the problem, or a layout that the
            kernel can't take (of "auto", the lowest one that takes the problem).
    """
    layout = None if layout is None else resolve_layout(layout)
    rungs, static = [resolve_kernel(kernel, arch)], problem.static
    if kernel == "auto":
        rows = problem.seqlen_q * (problem.num_heads // problem.num_heads_kv)
        rungs = [rung for rung in reversed(LADDER) if rung.runs_on(arch) and rung.lack(static) is None]
        rungs = [rung for rung in rungs if rows <= (rung.max_rows or rows)]
        rungs.sort(key=lambda rung: rung.max_rows is None)
    for rung in rungs:
        config = choose(rung, problem, arch, layout).config
        try:
            rung.check(static, config, arch)
            return rung, config
        except ValueError as error:
            refusal = error
    raise refusal
