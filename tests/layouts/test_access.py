"""The modelled accesses are those of the kernel: CuTe's own partitions, and the PTX, say the same."""

import re
from collections import Counter

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch

from cute_fa.compiled import get_artifacts
from cute_fa.device.copies import make_gmem_tiled_copies
from cute_fa.device.mma import make_ldmatrix_atom, make_tiled_mma
from cute_fa.ladder import KERNELS
from cute_fa.problem import StaticProblem
from layouts import CATALOG
from layouts.access import by_column, by_row, kernel_paths, ldmatrix, ldmatrix_lanes
from tests.layouts.cute_context import mlir_context

DTYPE = cutlass.BFloat16


def _coordinates(slices, num_threads: int, values) -> np.ndarray:
    """(threads, instructions, 2): first elements of a partitioned identity tensor, in the order of a copy.

    ``slices(tidx)`` is the partition of a thread, ``values`` the coordinates in its first mode at which an
    instruction starts. Identity tensors are affine, so threads and instructions are evaluated apart.
    """
    first = slices(0)
    _, num_m, num_k = (cute.size(first, mode=[mode]) for mode in range(3))
    starts = np.array([first[v, m, k] for k in range(num_k) for m in range(num_m) for v in values])
    threads = np.array([slices(tidx)[values[0], 0, 0] for tidx in range(num_threads)])
    return threads[:, None] + starts - starts[0]


@pytest.mark.parametrize(
    ("head_dim", "tile_m", "tile_n", "num_threads"),
    [(64, 64, 64, 128), (128, 64, 64, 128), (64, 128, 128, 256)],
)
def test_paths_are_the_partitions_of_the_kernel(head_dim, tile_m, tile_n, num_threads):
    paths = {path.name: path for path in kernel_paths(head_dim, tile_m, tile_n, num_threads)}
    expected = {}
    with mlir_context():
        load, store = make_gmem_tiled_copies(DTYPE, head_dim, num_threads)
        mma = make_tiled_mma(DTYPE, num_threads // 32)
        plain, trans = make_ldmatrix_atom(DTYPE, False), make_ldmatrix_atom(DTYPE, True)
        acc_atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), DTYPE, num_bits_per_copy=32)
        cQ, cK = (cute.make_identity_tensor((rows, head_dim)) for rows in (tile_m, tile_n))
        cVt = cute.composition(cK, cute.make_layout((head_dim, tile_n), stride=(tile_n, 1)))
        copy_Q, copy_K = cute.make_tiled_copy_A(plain, mma), cute.make_tiled_copy_B(plain, mma)
        copy_V, copy_O = cute.make_tiled_copy_B(trans, mma), cute.make_tiled_copy_C(acc_atom, mma)
        vectors = [(0, 0)]
        pairs = [(0, (half, side)) for side in range(2) for half in range(2)]
        for name, partition, values in (
            ("cp.async Q", lambda tidx: load.get_slice(tidx).partition_D(cQ), vectors),
            ("cp.async K", lambda tidx: load.get_slice(tidx).partition_D(cK), vectors),
            ("cp.async V", lambda tidx: load.get_slice(tidx).partition_D(cK), vectors),
            ("ldmatrix Q", lambda tidx: copy_Q.get_slice(tidx).partition_S(cQ), vectors),
            ("ldmatrix K", lambda tidx: copy_K.get_slice(tidx).partition_S(cK), vectors),
            ("ldmatrix.trans V", lambda tidx: copy_V.get_slice(tidx).partition_S(cVt), vectors),
            ("st.shared O", lambda tidx: copy_O.get_slice(tidx).partition_D(cQ), pairs),
            ("ld.shared O", lambda tidx: store.get_slice(tidx).partition_S(cQ), vectors),
        ):
            expected[name] = _coordinates(partition, num_threads, values)
    assert expected.keys() == paths.keys()
    for name, coordinates in expected.items():
        by_warp = coordinates.reshape(num_threads // 32, 32, -1, 2).transpose(0, 2, 1, 3)
        np.testing.assert_array_equal(paths[name].rows, by_warp[..., 0], err_msg=name)
        np.testing.assert_array_equal(paths[name].cols, by_warp[..., 1], err_msg=name)


def test_the_compiled_kernel_makes_as_many_accesses_as_the_paths():
    """PTX of kernel1: instructions by kind, and the immediate offsets of the stores of O in their order."""
    rung = KERNELS["kernel1"]
    config, head_dim = rung.config, 128
    assert config.layout == CATALOG["PLAIN"]
    static = StaticProblem(dtype=torch.bfloat16, head_dim=head_dim, causal=False, return_lse=False)
    ptx = get_artifacts(static, rung, config, "sm_90a").ptx
    paths = kernel_paths(head_dim, config.tile_m, config.tile_n, config.num_threads)
    warps = config.num_threads // 32
    modelled = Counter()
    for path in paths:
        modelled[path.instruction] += path.num_instructions // warps
    for instruction, number in modelled.items():
        in_ptx = re.findall(rf"^\s*(?:@%p\d+ )?{re.escape(instruction)}\s", ptx, re.MULTILINE)
        assert len(in_ptx) == number, instruction
    stores = [int(offset or 0) for offset in re.findall(r"st\.shared\.b32\s+\[%r\d+(?:\+(\d+))?\]", ptx)]
    store = next(path for path in paths if path.name == "st.shared O")
    addresses = store.addresses(config.layout)[0, :, 0]
    assert stores == (addresses - addresses[0]).tolist()


def test_every_element_is_touched_once_or_by_every_warp():
    """A CTA's cp.async, store and load cover a tile exactly; its warps share Q and each read all of K and V."""
    times = {"ldmatrix K": 4, "ldmatrix.trans V": 4}
    for path in kernel_paths(128, 64, 64, 128):
        touched = np.zeros(path.tile, int)
        for step in range(path.width // path.element_bytes):
            np.add.at(touched, (path.rows, path.cols + step), 1)
        assert (touched == times.get(path.name, 1)).all(), path.name


@pytest.mark.parametrize("operand", ["A", "B", "Bt"])
@pytest.mark.parametrize("num_matrices", [1, 2, 4])
def test_ldmatrix_of_any_size_covers_the_tile_in_rows_of_eight(operand, num_matrices):
    path = ldmatrix("", operand, (32, 64), num_matrices=num_matrices)
    assert path.rows.shape == (1, 32 * 64 // (64 * num_matrices), 8 * num_matrices)
    touched = np.zeros(path.tile, int)
    for step in range(8):
        np.add.at(touched, (path.rows, path.cols + step), 1)
    assert (touched == 1).all()
    assert (path.rows.reshape(-1, 8) % 8 == np.arange(8)).all()


def test_lanes_beyond_a_small_array_sit_out():
    for path in (by_row("ld", 4, (4, 4), 4), by_column("ld", 4, (4, 4), 4)):
        touched = np.zeros((4, 4), int)
        np.add.at(touched, (path.rows[path.active], path.cols[path.active]), 1)
        assert (touched == 1).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ldmatrix_lanes("C"), "operand must be 'A', 'B' or 'Bt', got 'C'"),
        (lambda: ldmatrix_lanes("A", 3), "num_matrices must be 1, 2 or 4, got 3"),
        (lambda: kernel_paths(128, 64, 64, 100), "num_threads must be a positive multiple of 32, got 100"),
        (lambda: kernel_paths(128, 48, 64, 128), "rows of a 48x128 tile must be a multiple of 64, got 48"),
        (lambda: kernel_paths(100, 64, 64, 128), "must be a multiple of"),
        (lambda: by_row("ld", 3, (32, 32), 2), "width must be a multiple of the 2-byte element, got 3"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
