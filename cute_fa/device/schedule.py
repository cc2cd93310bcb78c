"""Which tile a CTA computes."""

from __future__ import annotations

import cutlass

# Bytes of K and V that CTAs running at one time should share: within L2 of an A100, an H100 and a 4090.
L2_SHARE = 16 * 2**20


def longest_first(cta, num_m_blocks, num_heads, batch, heads_in_l2):
    """(m_block, head, batch index) of a CTA: as many heads as fit L2 at a time, the last queries of each first.

    Under a causal mask the last queries have the most keys; started first, they don't hang over at the end.

    Args:
        cta: index in a grid of num_m_blocks * num_heads * batch.
        heads_in_l2: heads whose K and V L2 can hold at a time; at least one is taken.
    """
    all_heads = num_heads * batch
    group = cutlass.min(all_heads, cutlass.max(1, heads_in_l2))
    first = cta // (group * num_m_blocks) * group
    index = cta - first * num_m_blocks
    group = cutlass.min(group, all_heads - first)  # the last one may be smaller
    m_block = num_m_blocks - 1 - index // group
    head = first + index % group
    return m_block, head % num_heads, head // num_heads
