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
