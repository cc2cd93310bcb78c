"""Which tiles of packed queries a CTA computes; beside ``tile_schedule.py``, which knows one length for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute

from cute_fa.device.sequences import packed_rows

WARP = 32


@dataclass(frozen=True)
class PackedSchedule:
    """The tiles of CTA ``cta`` of ``num_ctas`` where each member of a batch has a length of its own: no tile is empty.

    Tiles are numbered member after member and head after head, the last queries of each head first; CTA i computes
    tiles i, i + G, i + 2G, ... of G CTAs, and may have none. A warp finds a tile together, each lane the tiles of one
    member of 32, by a prefix sum over the lanes (flash-attention's schedulers for packed sequences do so).
    ``num_tiles`` is how many this CTA has.
    """

    cu_seqlens: cute.Tensor
    num_rows: cutlass.Int32
    num_heads: cutlass.Int32
    tile_m: int
    cta: cutlass.Int32
    num_ctas: cutlass.Int32
    num_tiles: cutlass.Int32 | None = None

    @staticmethod
    def create(cu_seqlens: cute.Tensor, num_rows, num_heads, tile_m: int, cta, num_ctas) -> PackedSchedule:
        """Members are rows cu_seqlens[i] to cu_seqlens[i + 1] of ``num_rows``; tiles have ``tile_m`` rows."""
        schedule = PackedSchedule(cu_seqlens, num_rows, num_heads, tile_m, cta, num_ctas)
        return replace(schedule, num_tiles=schedule._count())

    def count(self):
        """Tiles of this CTA."""
        return self.num_tiles

    @property
    def _num_members(self):
        return self.cu_seqlens.shape[0] - 1

    @cute.jit
    def _tiles_of_lane(self, first_member):
        """The tiles of one head of member ``first_member`` + lane; 0 behind the last."""
        member = first_member + cute.arch.lane_idx()
        num_tiles = cutlass.Int32(0)
        if member < self._num_members:
            _, seqlen = packed_rows(self.cu_seqlens, member, self.num_rows)
            num_tiles = cute.ceil_div(seqlen, self.tile_m)
        return num_tiles

    @cute.jit
    def _count(self):
        total = cutlass.Int32(0)
        for first in cutlass.range(0, self._num_members, WARP, unroll=1):
            total += self._tiles_of_lane(first)
        for offset in (16, 8, 4, 2, 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=offset)
        return (total * self.num_heads + self.num_ctas - 1 - self.cta) // self.num_ctas

    @cute.jit
    def tile(self, number):
        """(m_block, head) of this CTA's tile ``number``, which is less than ``count()``."""
        place = number * self.num_ctas + self.cta  # among the tiles of the members from ``first`` on
        first = cutlass.Int32(0)
        per_head = self._tiles_of_lane(first)
        end = self._prefix_sum(per_head) * self.num_heads
        total = cute.arch.shuffle_sync(end, WARP - 1)
        while total <= place:
            place -= total
            first += WARP
            per_head = self._tiles_of_lane(first)
            end = self._prefix_sum(per_head) * self.num_heads
            total = cute.arch.shuffle_sync(end, WARP - 1)
        lane = cute.arch.popc(cute.arch.vote_ballot_sync(end <= place))
        per_head = cute.arch.shuffle_sync(per_head, lane)
        place -= cute.arch.shuffle_sync(end, lane) - per_head * self.num_heads
        place, per_head = cute.arch.make_warp_uniform(place), cute.arch.make_warp_uniform(per_head)
        member = cute.arch.make_warp_uniform(first + lane)
        return per_head - 1 - place % per_head, member * self.num_heads + place // per_head

    @cute.jit
    def _prefix_sum(self, value):
        """The sum of a value over this lane and those before."""
        lane = cute.arch.lane_idx()
        for offset in (1, 2, 4, 8, 16):
            before = cute.arch.shuffle_sync_up(value, offset, mask_and_clamp=0)
            value += before if lane >= offset else 0
        return value
