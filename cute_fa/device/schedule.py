"""Which tile a CTA computes."""

from __future__ import annotations

import cutlass

# Heads whose tiles are computed together: few enough that several CTAs that run at one time share K and V (264 run
# on an H100, so that each tile of K and V serves four from L2), many enough that little is left at the end.
HEADS_TOGETHER = 64


def longest_first(cta, num_m_blocks, num_heads, batch):
    """(m_block, head, batch index) of a CTA: ``HEADS_TOGETHER`` heads at a time, the last queries of each first.

    Under a causal mask the last queries have the most keys; started first, they don't hang over at the end.
    """
    all_heads = num_heads * batch
    group = cutlass.min(all_heads, HEADS_TOGETHER)
    first = cta // (group * num_m_blocks) * group
    index = cta - first * num_m_blocks
    group = cutlass.min(group, all_heads - first)  # the last one may be smaller
    m_block = num_m_blocks - 1 - index // group
    head = first + index % group
    return m_block, head % num_heads, head // num_heads
