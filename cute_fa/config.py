"""KernelConfig: everything about a kernel that is chosen and not given by the problem."""

from __future__ import annotations

from dataclasses import dataclass

from layouts import SmemLayout


@dataclass(frozen=True)
class KernelConfig:
    """The choices that a kernel is compiled with.

    Args:
        tile_m: query rows of a CTA.
        tile_n: key and value rows of one iteration.
        num_threads: threads of a CTA; each warp owns ``tile_m / (num_threads / 32)`` query rows.
        ctas_per_sm: CTAs that the compiler leaves registers for on each SM, so that one computes while
            another waits for its loads.
        layout: where the elements of the Q, K, V and O tiles lie in shared memory.
    """

    tile_m: int
    tile_n: int
    num_threads: int
    ctas_per_sm: int
    layout: SmemLayout

    def __str__(self):
        return f"{self.tile_m}x{self.tile_n}, {self.num_threads} threads, {self.layout.name}"


@dataclass(frozen=True)
class PipelinedConfig(KernelConfig):
    """What the pipelined kernels choose besides.

    Args:
        num_stages: 1: K and V have one buffer each; K loads while the softmax and P V run, V while Q K^T does.
            2: both have two, and load during the whole iteration before theirs.
        q_in_registers: each warp keeps its rows of Q in registers; else it reads them from shared memory for
            every tile of keys.
        lazy_rescale: the softmax's reference follows a row's maximum only when that has risen by more than a
            threshold; else at every rise.
        first_reference: tiles without a mask keep the reference of those before and look for no maximum; a CTA whose
            sums outgrow it begins again, and looks. For bf16 without a bias or ALiBi.
    """

    num_stages: int
    q_in_registers: bool
    lazy_rescale: bool
    first_reference: bool = False

    def __str__(self):
        stages = "1 stage" if self.num_stages == 1 else f"{self.num_stages} stages"
        parts = [super().__str__(), f"{self.ctas_per_sm} CTAs an SM", stages]
        parts += ["Q in registers"] if self.q_in_registers else []
        parts += ["lazy rescale"] if self.lazy_rescale else []
        parts += ["first reference"] if self.first_reference else []
        return ", ".join(parts)


@dataclass(frozen=True)
class SplitConfig(KernelConfig):
    """What the kernels for short queries choose besides; ``tile_n`` is one warp's, not the CTA's.

    Args:
        num_stages: tiles of K, and of V, in each warp's ring.
        early_combine: the kernel that merges the splits is on the card before the first one ends, and waits there
            (programmatic dependent launch, sm_90 and up).
    """

    num_stages: int
    early_combine: bool = False

    def __str__(self):
        parts = [super().__str__(), f"{self.ctas_per_sm} CTAs an SM", f"{self.num_stages} stages a warp"]
        parts += ["early combine"] if self.early_combine else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Sm90Config:
    """The choices that a kernel for Hopper is compiled with.

    Args:
        tile_m: query rows of a CTA, 64 for each consumer warpgroup: 64, 128 or 192.
        tile_n: key and value rows of one iteration.
        num_stages: tiles of K, and of V, that shared memory holds.
        layout: where the elements of the Q, K, V and O tiles lie in shared memory.
        max_ctas: the most CTAs that are launched; each takes several tiles then. One CTA a tile when None.
        try_first: exponentiate scores before their maximum is known; see ``device/lazy_softmax.py``.
        overlap_tiles: begin the next tile of queries beside the end of the one before, with a second Q in shared
            memory.
    """

    tile_m: int
    tile_n: int
    num_stages: int
    layout: SmemLayout
    max_ctas: int | None = None
    try_first: bool = False
    overlap_tiles: bool = False

    @property
    def num_threads(self) -> int:
        """Threads of a CTA: a warpgroup for each 64 query rows, and the producer's."""
        return 2 * self.tile_m + 128

    @property
    def tiles_of_Q(self) -> int:
        """Tiles of Q that shared memory holds for each consumer."""
        return 2 if self.overlap_tiles else 1

    def __str__(self):
        ctas = f", {self.max_ctas} CTAs" if self.max_ctas else ""
        overlap = ", tiles overlap" if self.overlap_tiles else ""
        return f"{self.tile_m}x{self.tile_n}, {self.num_stages} stages{ctas}{overlap}, {self.layout.name}"
