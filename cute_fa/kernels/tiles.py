"""Tiles in shared memory: their sizes, and what every kernel asks of them before it is built."""

from __future__ import annotations

from dataclasses import dataclass

from cute_fa.arch import get_arch
from cute_fa.config import KernelConfig
from cute_fa.problem import padded_head_dim
from layouts.checks import require_foldable_swizzle, require_vectors

SMEM_ALIGNMENT = 1024  # bytes; each buffer starts at bank 0


@dataclass(frozen=True)
class HeadDim:
    """A head dimension, and how the tiles have it that may be wider.

    Tiles in shared memory have ``padded`` columns, as layouts' atoms need them; products compute ``used`` ones, in
    steps of 16 (P V of wgmma all). Zeros are loaded behind the last element, and nothing of what lies there is stored.
    """

    size: int

    @property
    def padded(self) -> int:
        return padded_head_dim(self.size)

    @property
    def used(self) -> int:
        return -(-self.size // 16) * 16

    def used_of(self, rows: int, transposed: bool = False) -> tuple[int, int] | None:
        """What products read of a tile of so many rows, if that isn't all: (rows, columns), or the other way."""
        if self.used == self.padded:
            return None
        return (self.used, rows) if transposed else (rows, self.used)

    @property
    def ragged(self) -> int | None:
        """``size`` if a tile has columns behind it."""
        return None if self.size == self.padded else self.size


def tile_bytes(config: KernelConfig, rows: int, head_dim: int, stages: int = 1) -> int:
    """Shared memory of a buffer of ``stages`` tiles of 16-bit elements, up to the start of the next buffer."""
    size = config.layout.on(rows, head_dim).cosize * 2 * stages
    return -(-size // SMEM_ALIGNMENT) * SMEM_ALIGNMENT


def require_tiles(config: KernelConfig, head_dim: int) -> None:
    """Refuses a layout that a kernel's vector accesses to its Q, K, V and O tiles can't use.

    Raises:
        ValueError: the layout does not fit the tiles, tears vectors apart, or has a swizzle that can't be folded.
    """
    for rows in {config.tile_m, config.tile_n}:
        tile = config.layout.on(rows, head_dim)
        require_vectors(tile)
        require_foldable_swizzle(tile)


def require_smem(needed: int, config: KernelConfig, head_dim: int, arch: str) -> None:
    """Refuses more shared memory than a CTA of the architecture can have.

    Raises:
        ValueError: with both sizes.
    """
    limit = get_arch(arch).smem_per_cta
    if needed > limit:
        raise ValueError(
            f"layout {config.layout.name!r} takes {needed} bytes of shared memory for tiles of {config.tile_m} and "
            f"{config.tile_n} rows at head dimension {head_dim}; {arch} allows {limit}"
        )


def require_warps(config: KernelConfig) -> None:
    """Refuses a number of threads that doesn't give each warp whole 16-row pieces of the tile of queries.

    Raises:
        ValueError: naming ``num_threads`` or ``tile_m``.
    """
    if config.num_threads <= 0 or config.num_threads % 32:
        raise ValueError(f"num_threads must be a positive multiple of 32, got {config.num_threads}")
    num_warps = config.num_threads // 32
    if config.tile_m % (16 * num_warps):
        raise ValueError(f"tile_m must be a multiple of 16 rows for each of {num_warps} warps, got {config.tile_m}")
