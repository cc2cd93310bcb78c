"""A KV cache, in one piece a sequence or in pages: what reading and appending mean for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_fa.compat.arguments import require_tensor, values_on_host


@dataclass(frozen=True)
class DenseCache:
    """k and v (B_cache, S_cache, H_kv, D); member i of a batch is ``slots[i]`` of the cache."""

    k: torch.Tensor
    v: torch.Tensor
    slots: list[int]

    def append(self, i: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes tokens (n, H_kv, D) at positions ``first`` on of member i."""
        self.k[self.slots[i], first : first + k.shape[0]] = k
        self.v[self.slots[i], first : first + v.shape[0]] = v

    def tokens(self, i: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of k and v (end - start, H_kv, D) of member i."""
        return self.k[self.slots[i], start:end], self.v[self.slots[i], start:end]


@dataclass(frozen=True)
class PagedCache:
    """k and v (num_blocks, page_size, H_kv, D); member i lies in ``blocks[i]``, page behind page."""

    k: torch.Tensor
    v: torch.Tensor
    blocks: list[torch.Tensor]

    def append(self, i: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes tokens (n, H_kv, D) at positions ``first`` on of member i."""
        positions = torch.arange(first, first + k.shape[0], device=self.k.device)
        page_size = self.k.shape[1]
        at = self.blocks[i][positions // page_size], positions % page_size
        self.k[at] = k
        self.v[at] = v

    def tokens(self, i: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of k and v (end - start, H_kv, D) of member i."""
        k, v = (cache[self.blocks[i]].flatten(0, 1)[start:end] for cache in (self.k, self.v))
        return k, v


def paged_cache(k: torch.Tensor, v: torch.Tensor, block_table, q: torch.Tensor, lengths: list[int]) -> PagedCache:
    """A cache whose block_table (B, max_blocks) was checked as far as each member's length reaches.

    Raises:
        TypeError, ValueError: another dtype, device or shape of the table, too few blocks for a member, or a block that
            isn't there.
    """
    require_tensor("block_table", block_table, like=q, dtype=torch.int32, shape=(len(lengths), None))
    num_blocks, page_size = k.shape[:2]
    if not page_size:
        raise ValueError("block_table must be None for pages of no tokens, got a tensor")
    counts = [-(-length // page_size) for length in lengths]
    if max(counts, default=0) > block_table.shape[1]:
        raise ValueError(
            f"block_table must have a column for each of {max(counts)} blocks of {page_size} tokens, got "
            f"{block_table.shape[1]} columns"
        )
    for row, count in zip(values_on_host("block_table", block_table), counts, strict=True):
        strays = [block for block in row[:count] if not 0 <= block < num_blocks]
        if strays:
            raise ValueError(f"block_table must hold blocks from 0 to {num_blocks - 1}, got {strays[0]}")
    return PagedCache(k, v, [block_table[i, :count].long() for i, count in enumerate(counts)])
