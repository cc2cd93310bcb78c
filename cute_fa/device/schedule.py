"""Which tile a CTA computes."""

from __future__ import annotations


def longest_first(cta, num_m_blocks, num_heads, batch):
    """(m_block, head, batch index) of a CTA: the last queries of all heads first.

    Under a causal mask the last queries have the most keys; started first, they don't hang over at the end.
    The CTAs that run at one time are of neighbouring queries of many heads, and the heads that share K and V
    are neighbours, so that their tiles are found in L2.
    """
    head = cta % num_heads
    batch_index = cta // num_heads % batch
    m_block = num_m_blocks - 1 - cta // num_heads // batch
    return m_block, head, batch_index
