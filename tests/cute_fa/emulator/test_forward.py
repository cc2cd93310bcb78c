"""The compiled rungs, executed on the CPU: right numbers, no faults, and the bank conflicts they should have."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
import torch

from cute_fa.compiled import get_artifacts
from cute_fa.emulator import (
    EmulationError,
    EmulationTooLongError,
    TensorArg,
    emulate,
    emulate_forward,
    emulated_launch,
    estimate_seconds,
)
from cute_fa.emulator.launch import divisor_args
from cute_fa.ladder import KERNELS
from cute_fa.problem import StaticProblem
from layouts import CATALOG
from tests.cases import EMULATED_KERNELS, Case, assert_close

HALF, BF16 = torch.float16, torch.bfloat16

CASES = [
    *(Case(s, s, head_dim, causal, BF16) for head_dim, causal in ((64, True), (128, False))
      for s in (1, 7, 63, 64, 65, 127, 129)),
    *(Case(129, 129, head_dim, causal, dtype) for head_dim in (64, 128) for causal in (False, True)
      for dtype in (HALF, BF16)),
    *(Case(s_q, s_k, 64, causal) for causal in (False, True)
      for s_q, s_k in ((1, 200), (7, 130), (63, 65), (65, 63), (127, 7), (129, 1), (200, 65))),
    *(Case(65, 100, head_dim, True, batch=2, num_heads=heads, num_heads_kv=heads_kv)
      for head_dim, heads, heads_kv in ((64, 4, 1), (128, 6, 3))),
    *(Case(70, 70, 64, True, softmax_scale=scale) for scale in (1.0, 0.01)),
    *(Case(100, 100, 64, True, dtype, magnitude=30.0) for dtype in (HALF, BF16)),
]  # fmt: skip


def emulated(case: Case, q, k, v, **options):
    result = emulate_forward(q, k, v, causal=case.causal, softmax_scale=case.softmax_scale, **options)
    result.report.raise_for_faults()
    return result


@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=str)
def test_matches_reference(case, generator):
    q, k, v = case.tensors("cpu", generator)
    results = {kernel: emulated(case, q, k, v, kernel=kernel) for kernel in EMULATED_KERNELS}
    for result in results.values():
        assert_close(case, q, k, v, result.o, result.lse)
    one, two = results["kernel1"], results["kernel2"]  # which differ in where data lies, not in what is computed
    assert torch.equal(one.o, two.o) and torch.equal(one.lse, two.lse)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_other_architectures(arch, generator):
    case = Case(129, 150, 64, causal=True)
    q, k, v = case.tensors("cpu", generator)
    for kernel in ("kernel2", "kernel6", "kernel7"):
        result = emulated(case, q, k, v, arch=arch, kernel=kernel)
        assert_close(case, q, k, v, result.o, result.lse)


def test_splits_of_heads_and_rows_that_are_no_powers_of_two(generator):
    """Of the packed rows, 35 of each head of K and V, the last tile has 3; the keys are in 4 parts."""
    case = Case(5, 1000, 64, causal=True, batch=3, num_heads=21, num_heads_kv=3)
    q, k, v = case.tensors("cpu", generator)
    result = emulated(case, q, k, v, kernel="kernel7")
    assert result.report.num_ctas == 3 * 3 * 3 * 4 + 3 * 21 * 5  # those that split, and one a row that merge
    assert_close(case, q, k, v, result.o, result.lse)


def test_divisors_divide():
    divisors = [1, 2, 3, 5, 7, 16, 21, 132, 1000, 2**16 - 1, 2**16 + 1, 2**30 + 1, 2**31 - 1]
    near = (d * times - less for d in divisors for times in (1, 5) for less in (1, 0))
    numbers = [2**31 - 1, *(number for number in near if number < 2**31)]
    args = divisor_args(*divisors)
    assert args[1::2] == divisors
    for fields, divisor in zip(args[::2], divisors, strict=True):
        assert fields.nbytes == 12 and fields["divisor"] == divisor
        multiplier, first, second = (int(fields[name]) for name in ("multiplier", "shift1", "shift2"))
        for n in numbers:
            high = n * multiplier >> 32
            assert (high + (n - high >> first)) >> second == n // divisor


def test_strided_views(generator):
    case = Case(100, 100, 64, causal=True, batch=2, num_heads=4, num_heads_kv=4)
    qkv = torch.randn(2, 100, 3, 8, 64, generator=generator).to(case.dtype)
    q, k, v = (qkv[:, :, i, 2:6] for i in range(3))
    result = emulated(case, q, k, v)
    assert_close(case, q, k, v, result.o, result.lse)
    permuted = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(emulated(case, *permuted).o, result.o)
    shared_kv = k[:1, :, :1].expand(2, 100, 4, 64)
    result = emulated(case, q, shared_kv, shared_kv)
    assert_close(case, q, shared_kv, shared_kv, result.o, result.lse)


def test_rows_that_see_no_key_give_zero(generator):
    case = Case(200, 60, 128, causal=True)
    q, k, v = case.tensors("cpu", generator)
    result = emulated(case, q, k, v)
    assert not result.o[:, :140].any() and (result.lse[:, :, :140] == -torch.inf).all()
    assert result.o[:, 140:].any() and result.lse[:, :, 140:].isfinite().all()


def test_nan_behind_the_last_key_does_not_enter(generator):
    case = Case(65, 70, 64)
    storage = [torch.full((1, 128, 2, 64), torch.nan, dtype=case.dtype) for _ in range(3)]
    tensors = [
        whole[:, :s].copy_(values)
        for whole, values, s in zip(storage, case.tensors("cpu", generator), (65, 70, 70), strict=True)
    ]
    result = emulated(case, *tensors)
    assert_close(case, *tensors, result.o, result.lse)


def test_without_lse(generator):
    case = Case(65, 70, 64)
    q, k, v = case.tensors("cpu", generator)
    rung = KERNELS["kernel2"]
    o = torch.empty_like(q)
    static = StaticProblem(case.dtype, case.head_dim, case.causal, return_lse=False)
    report = emulated_launch(static, rung, rung.config)(q, k, v, o, None, 64**-0.5)
    assert torch.equal(o, emulated(case, q, k, v, kernel="kernel2").o)
    assert report.num_ctas == 4


# --- wavefronts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "head_dim", "ldmatrix", "store"),
    [
        (CATALOG["PLAIN"], 64, 8, 8),
        (CATALOG["PLAIN"], 128, 8, 8),
        (CATALOG["SWIZZLE_333"], 64, 1, 1),
        (CATALOG["SWIZZLE_333"], 128, 1, 1),
        (CATALOG["PADDED_8"], 64, 1, 1),
        (CATALOG["PADDED_8"], 128, 1, 1),
        (CATALOG["SWIZZLE_233"], 128, 2, 2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_conflicts_of_layouts(layout, head_dim, ldmatrix, store, generator):
    case = Case(100, 130, head_dim, causal=True)
    report = emulated(case, *case.tensors("cpu", generator), layout=layout, kernel="kernel1").report
    ways = {path: actual / ideal for path, (ideal, actual) in report.by_path().items()}
    assert ways["ldmatrix"] == ways["ldmatrix.trans"] == ldmatrix
    assert ways["st.shared"] == store
    # Eight padded rows begin at eight places of a 128-byte line, and copies that leave it split (docs/banks.md).
    assert ways["cp.async"] == ((1 + 2 + 6 * 3) / 8 if layout == CATALOG["PADDED_8"] else 1)
    assert ways["ld.shared"] == 1


def test_ideal_wavefronts_follow_from_the_tiles(generator):
    """Two tiles of queries, three of keys, two heads; 64x64 tiles, 4 warps, 16 bytes a lane."""
    case = Case(128, 192, 128)
    report = emulated(case, *case.tensors("cpu", generator), kernel="kernel2").report
    ctas, tiles = 2 * 2, 3
    vectors = 64 * 128 * 2 // 128  # wavefronts of 128 bytes in a tile
    q_ldmatrix, k_ldmatrix, v_ldmatrix = vectors, 4 * vectors, 4 * vectors  # every warp reads all of K and V
    assert report.by_path() == {
        "cp.async": (ctas * (1 + 2 * tiles) * vectors,) * 2,
        "ldmatrix": (ctas * (q_ldmatrix + tiles * k_ldmatrix),) * 2,
        "ldmatrix.trans": (ctas * tiles * v_ldmatrix,) * 2,
        "ld.shared": (ctas * vectors,) * 2,
        "st.shared": (ctas * vectors,) * 2,
    }
    sources = {entry.source.split(":")[0] for entry in report.wavefronts}
    assert sources <= {"copies.py", "mma.py", "sm80_serial.py", "softmax.py"} and sources


# --- limits ------------------------------------------------------------------------------------------------


def test_work_of_hours_is_refused_with_an_estimate():
    q = torch.zeros(1, 1, 1, 64, dtype=BF16).expand(64, 100_000, 64, 64)
    with pytest.raises(EmulationTooLongError, match=r"would take about [\d.]+ h on the CPU; the limit is 60 min"):
        emulate_forward(q, q, q)


def test_estimate_grows_with_the_work():
    config = KERNELS["kernel1"].config
    short = estimate_seconds(config, (1, 256, 2, 64), 256, causal=False)
    assert 0.005 < short < 3
    assert estimate_seconds(config, (1, 256, 2, 64), 2560, causal=False) > 5 * short
    assert estimate_seconds(config, (1, 256, 2, 64), 256, causal=True) < short


def test_seconds():
    """The limit is that of the specification; the machine of the test may be busy."""
    case = Case(256, 256, 64)
    q, k, v = case.tensors("cpu", torch.Generator().manual_seed(0))
    start = time.perf_counter()
    report = emulated(case, q, k, v, kernel="kernel2").report
    assert time.perf_counter() - start < 20
    assert report.num_ctas == 8 and 0 < report.seconds_per_cta < 1


def test_progress_is_written_after_some_seconds(monkeypatch, capsys, generator):
    case = Case(64 * 20, 64, 64)
    q, k, v = case.tensors("cpu", generator)
    emulated(case, q, k, v, kernel="kernel1")
    assert not capsys.readouterr().err
    monkeypatch.setattr("cute_fa.emulator.forward._PROGRESS_AFTER", 0.0)
    emulated(case, q, k, v, kernel="kernel1")
    first, *_ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"cute_fa: emulating kernel1: \d+ of 40 CTAs, about \d+ s left", first)


def test_a_grid_of_nothing():
    rung = KERNELS["kernel2"]
    static = StaticProblem(BF16, 64, False, True)
    ptx = get_artifacts(static, rung, rung.config, "sm_80").ptx
    empty = [
        TensorArg("t", np.zeros((0, 0, 0, 64), np.int16), (0, 1, 2), ((0, np.int64), (1, np.int32), (2, np.int64)))
    ] * 4
    lse = TensorArg("lse", np.zeros((0, 0, 0), np.float32), (0, 1, 2), ((0, np.int64), (1, np.int64)))
    report = emulate(
        ptx, (0, 1, 1), (128, 1, 1), [*empty, lse, np.float32(1)], rung.kernel.smem_bytes(static, rung.config)
    )
    assert report.num_ctas == 0 and not report.faults and not report.wavefronts


def test_tensors_whose_dynamic_modes_do_not_match_the_kernel():
    rung = KERNELS["kernel2"]
    ptx = get_artifacts(StaticProblem(BF16, 64, False, False), rung, rung.config, "sm_80").ptx
    tensor = TensorArg(
        "q", np.zeros((1, 1, 1, 64), np.int16), (0, 1, 2, 3), tuple((mode, np.int64) for mode in range(4))
    )
    with pytest.raises(EmulationError, match=r"argument 0 \(q\) takes 56 bytes, but the kernel's parameter has 48"):
        emulate(ptx, (1, 1, 1), (128, 1, 1), [tensor] * 4 + [np.float32(1)], 49152)
