"""Where a batch's members lie: each in a slice of one tensor, packed behind one another, or in pages.

What a kernel was compiled for without lengths takes the plain way, whose code has none of this. Lengths come from the
device and no host has checked them: they are cut to the memory that there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute

from cute_fa.device.copies import gmem_vector, row_tile


class SequenceTensors(NamedTuple):
    """The tensors that say where members lie, int32, each None if not given; see ``cute_fa.varlen``."""

    max_seqlen_q: cutlass.Int32
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_k: cute.Tensor | None
    block_table: cute.Tensor | None
    cache_batch_idx: cute.Tensor | None
    leftpad_k: cute.Tensor | None


def batch_and_longest(shape_q: tuple, sequences):
    """(members, the most queries that one has), which a grid is made for, of a tensor Q (B or 1, S_q, ...)."""
    if cutlass.const_expr(sequences is None):
        return shape_q[0], shape_q[1]
    tensors = SequenceTensors(*sequences)
    if cutlass.const_expr(tensors.cu_seqlens_q is None):
        return shape_q[0], shape_q[1]
    return tensors.cu_seqlens_q.shape[0] - 1, tensors.max_seqlen_q


def _between(value, least, most):
    return cutlass.min(cutlass.max(value, least), most)


def packed_rows(cu_seqlens: cute.Tensor, index, num_rows):
    """(first row, number of rows) of member ``index`` among ``num_rows`` packed ones."""
    first = _between(cu_seqlens[index], 0, num_rows)
    return first, _between(cu_seqlens[index + 1], first, num_rows) - first


@dataclass(frozen=True)
class Member:
    """One member of a batch. ``first_q`` and ``first_k`` are None where its rows begin with the slice's."""

    batch_q: cutlass.Int32
    first_q: cutlass.Int32 | None
    seqlen_q: cutlass.Int32
    batch_k: cutlass.Int32
    first_k: cutlass.Int32 | None
    seqlen_k: cutlass.Int32
    pages: cute.Tensor | None

    @staticmethod
    def find(index, shape_q: tuple, shape_k: tuple, sequences) -> Member:
        """Member ``index`` of tensors Q (B or 1, S_q, ...) and K (B, 1 or pages, S_k, ...), of these shapes."""
        if cutlass.const_expr(sequences is None):
            return Member(index, None, shape_q[1], index, None, shape_k[1], None)
        tensors = SequenceTensors(*sequences)
        batch_q, first_q, seqlen_q = index, None, shape_q[1]
        if cutlass.const_expr(tensors.cu_seqlens_q is not None):
            batch_q = 0
            first_q, seqlen_q = packed_rows(tensors.cu_seqlens_q, index, shape_q[1])

        batch_k, pages, capacity = index, None, shape_k[1]
        if cutlass.const_expr(tensors.block_table is not None):
            pages = tensors.block_table[index, None]
            batch_k, capacity = 0, capacity * tensors.block_table.shape[1]
        if cutlass.const_expr(tensors.cache_batch_idx is not None):
            batch_k = _between(tensors.cache_batch_idx[index], 0, shape_k[0] - 1)
        start, end = 0, capacity
        if cutlass.const_expr(tensors.cu_seqlens_k is not None):
            start, end = tensors.cu_seqlens_k[index], tensors.cu_seqlens_k[index + 1]
            if cutlass.const_expr(pages is None):
                batch_k = 0
            else:
                start, end = 0, end - start
        if cutlass.const_expr(tensors.seqused_k is not None):
            end = tensors.seqused_k[index]
        if cutlass.const_expr(tensors.leftpad_k is not None):
            start = tensors.leftpad_k[index]
        first_k = _between(start, 0, capacity)
        return Member(batch_q, first_q, seqlen_q, batch_k, first_k, _between(end, first_k, capacity) - first_k, pages)

    def queries(self, tensor: cute.Tensor, head) -> cute.Tensor:
        """The rows (S_q, D) of Q or O."""
        rows = tensor[self.batch_q, None, head, None]
        return rows if self.first_q is None else row_tile(rows, self.first_q, rows.shape[0])

    def statistics(self, tensor: cute.Tensor, head) -> cute.Tensor:
        """The values (S_q) of the log-sum-exp (B or 1, H, S_q)."""
        values = tensor[self.batch_q, head, None]
        return values if self.first_q is None else cute.domain_offset((self.first_q,), values)

    def keys(self, tensor: cute.Tensor, head) -> cute.Tensor:
        """The rows (S_k, D) of K or V, or with pages all of them (pages, page_size, D)."""
        if self.pages is not None:
            return tensor[None, None, head, None]
        rows = tensor[self.batch_k, None, head, None]
        return rows if self.first_k is None else row_tile(rows, self.first_k, rows.shape[0])


@cute.jit
def copy_paged_rows(
    tiled_copy: cute.TiledCopy,
    rows: cute.Tensor,
    pages: cute.Tensor,
    dst: cute.Tensor,
    coords: cute.Tensor,
    first_row,
    num_rows,
    num_cols: cutlass.Constexpr,
):
    """``copy_rows`` of a tile whose rows are found through a table of pages, each thread for its own rows.

    ``rows`` (pages, page_size, D) is all of memory; ``pages`` are those of this sequence, whose row ``first_row`` is
    the tile's first. ``num_rows`` of the tile are there; the table has at least one page.
    """
    num_pages, page_size = rows.shape[0], rows.shape[1]
    for m in cutlass.range_constexpr(cute.size(dst, mode=[1])):
        row = coords[0, m, 0][0]
        position = cutlass.max(0, first_row + cutlass.min(row, num_rows - 1))
        page = _between(pages[position // page_size], 0, num_pages - 1)
        vectors = rows[page, position % page_size, None]
        for k in cutlass.range_constexpr(cute.size(dst, mode=[2])):
            col = coords[0, m, k][1]
            pred = cute.make_rmem_tensor(1, cutlass.Boolean)
            pred[0] = row < num_rows
            if cutlass.const_expr(num_cols is not None):
                pred[0] = pred[0] & (col < num_cols)
            vector = gmem_vector(vectors, col, cute.size(coords, mode=[0]))
            source = cute.make_tensor(vector.iterator, cute.make_layout(dst[None, m, k].shape))
            cute.copy(tiled_copy, source, dst[None, m, k], pred=pred)
