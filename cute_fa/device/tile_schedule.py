"""Which tiles of queries a CTA computes, one after the other, when there are fewer CTAs than tiles.

With a causal mask tile m of a head takes m + 1 times as long as its first. So the tiles of two heads are put
together, the longest of one with the shortest of the other: pairs take equally long, and CTA i computes pairs
i, i + G, i + 2G, ... of G CTAs. Pairs are numbered head after head, so that the CTAs work on few heads at a time
and their keys and values stay in L2.

The pairs rarely come out even. The tiles of the last few heads are therefore handed out one by one, the long
ones first, to the CTAs that have a pair less and then back and forth over all:

    CTA          0      1      2      3
    pairs        0      1      2      3
                 4      5
    last heads                 0      1
                 5      4      3      2
                 6      7

Every CTA computes its part of this from its index alone. Without a mask all tiles take equally long, and the
same order does.

The arithmetic takes Python's integers as well as the device's, and has no branches.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELLING_ROWS = 3  # rows of tiles that the last heads fill; the last of them are short enough to level the CTAs


def _less(a, b):
    """1 if a < b, else 0; for differences below 2**31."""
    return (a - b) >> 31 & 1


def _mirrored(row, cta, num_ctas):
    """Place of a CTA in a row that is dealt forth (even) or back (odd)."""
    return cta + row % 2 * (num_ctas - 1 - 2 * cta)


@dataclass(frozen=True)
class TileSchedule:
    """The tiles of CTA ``cta`` of ``num_ctas``, which are at most as many as tiles.

    ``num_heads`` counts the heads of all batches; each has ``num_m_blocks`` tiles.
    """

    num_m_blocks: int
    num_heads: int
    cta: int
    num_ctas: int

    def _split(self):
        """(heads in pairs, tiles in this CTA's pairs, CTAs with a pair more than the others)."""
        num_last = (LEVELLING_ROWS * self.num_ctas + self.num_m_blocks - 1) // self.num_m_blocks
        num_paired = (self.num_heads - num_last) * _less(num_last, self.num_heads) // 2 * 2
        num_pairs = num_paired // 2 * self.num_m_blocks
        ahead = num_pairs % self.num_ctas
        return num_paired, 2 * (num_pairs // self.num_ctas + _less(self.cta, ahead)), ahead

    def count(self):
        """Tiles of this CTA, at least 1."""
        num_paired, in_pairs, ahead = self._split()
        end = ahead + (self.num_heads - num_paired) * self.num_m_blocks
        full_rows = end // self.num_ctas
        in_last_row = _less(_mirrored(full_rows, self.cta, self.num_ctas), end - full_rows * self.num_ctas)
        return in_pairs + full_rows + in_last_row - _less(self.cta, ahead)

    def tile(self, number):
        """(m_block, head) of this CTA's tile ``number``, which is less than ``count()``."""
        num_paired, in_pairs, ahead = self._split()
        pair, second = number // 2 * self.num_ctas + self.cta, number % 2
        m_block = pair % self.num_m_blocks
        m_block += second * (self.num_m_blocks - 1 - 2 * m_block)
        head = pair // self.num_m_blocks * 2 + second

        row = number - in_pairs + _less(self.cta, ahead)
        place = row * self.num_ctas + _mirrored(row, self.cta, self.num_ctas) - ahead
        num_last = self.num_heads - num_paired
        single_m_block, single_head = self.num_m_blocks - 1 - place // num_last, num_paired + place % num_last

        is_single = 1 - _less(number, in_pairs)
        return m_block + is_single * (single_m_block - m_block), head + is_single * (single_head - head)
