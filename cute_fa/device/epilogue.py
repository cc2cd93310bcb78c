"""The way out: log-sum-exp from registers, O through shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from cute_fa.device.copies import copy_rows, store_accumulator


@cute.jit
def store_lse(lse: cute.Tensor, gLSE: cute.Tensor, coords: cute.Tensor, queries_left):
    """Stores the rows' log-sum-exp, one lane of each quad.

    ``gLSE`` starts at the tile's first query; ``coords`` are the (row, col) coordinates of a thread's accumulator.
    """
    if coords[0, 0][1] == 0:
        for r in cutlass.range_constexpr(cute.size(coords, mode=[0])):
            if coords[r, 0][0] < queries_left:
                gLSE[coords[r, 0][0]] = lse[r]


def store_output(
    acc_O: cute.Tensor,
    sO: cute.Tensor,
    gO: cute.Tensor,
    tiled_mma,
    store_copy,
    tidx,
    queries_left,
    num_cols: int | None = None,
):
    """Rounds O to its type and stores it: registers -> shared memory, two elements a thread and store; then
    out in 16-byte vectors. The rows of ``sO`` that a warp stores are its own; nobody else may still read them.
    ``num_cols``: the columns that O has, if the tile has more."""
    rO = cute.make_rmem_tensor(acc_O.layout, gO.element_type)
    rO.store(acc_O.load().to(gO.element_type))
    store_accumulator(tiled_mma, rO, sO, tidx)
    cute.arch.sync_threads()
    thr_store = store_copy.get_slice(tidx)
    tOsO, tOgO = thr_store.partition_S(sO), thr_store.partition_D(gO)
    tOcO = thr_store.partition_S(cute.make_identity_tensor(gO.shape))
    tOrO = cute.make_fragment_like(tOgO, gO.element_type)
    copy_rows(store_copy, tOsO, tOrO, tOcO, queries_left, num_cols)
    copy_rows(store_copy, tOrO, tOgO, tOcO, queries_left, num_cols)
