"""The rungs for Hopper, executed on the CPU: TMA, mbarriers, warpgroups with roles. Right numbers and no faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cute_fa.config import Sm90Config
from cute_fa.emulator import (
    EmulationError,
    EmulationTooLongError,
    TensorMapArg,
    emulate_forward,
    emulated_launch,
    estimate_seconds,
)
from cute_fa.ladder import KERNELS
from cute_fa.problem import StaticProblem
from layouts.checks import HARDWARE_LAYOUTS
from tests.cases import Case, assert_close

ARCH = "sm_90a"
SMALL = {"tile_m": 128, "tile_n": 32, "num_stages": 2}  # compiles in a third of the time


def config(kernel: str, head_dim: int, **changes) -> Sm90Config:
    return replace(KERNELS[kernel].config_for(head_dim), **(SMALL | changes))


def run(case: Case, generator, kernel: str, chosen: Sm90Config):
    q, k, v = case.tensors("cpu", generator)
    result = emulate_forward(
        q, k, v, causal=case.causal, softmax_scale=case.softmax_scale, kernel=kernel, arch=ARCH, config=chosen
    )
    result.report.raise_for_faults()
    assert_close(case, q, k, v, result.o, result.lse)
    return result


TAILS = {"seqlen_q": 200, "seqlen_k": 333, "num_heads": 1, "num_heads_kv": 1}
ROWS_WITHOUT_KEYS = {"seqlen_q": 333, "seqlen_k": 150, "num_heads": 1, "num_heads_kv": 1}  # under a causal mask
GROUPS = {"seqlen_q": 1, "seqlen_k": 33, "batch": 2, "num_heads": 6, "num_heads_kv": 3}
MANY_TILES = {"seqlen_q": 150, "seqlen_k": 128, "batch": 2, "num_heads": 4, "num_heads_kv": 1}


@pytest.mark.parametrize(
    ("kernel", "head_dim", "causal", "changes", "shapes"),
    [
        ("kernel8", 64, True, {"tile_n": 64, "tile_m": 192}, (TAILS, ROWS_WITHOUT_KEYS, GROUPS, MANY_TILES)),
        ("kernel8", 128, False, {}, (TAILS, GROUPS)),
        ("kernel9", 64, False, {}, (TAILS, GROUPS)),
        ("kernel9", 128, True, {}, (TAILS, ROWS_WITHOUT_KEYS)),
        ("kernel10", 64, True, {"num_stages": 3}, (TAILS, ROWS_WITHOUT_KEYS)),
        ("kernel10", 128, False, {}, (TAILS,)),
        ("kernel11", 64, False, {"max_ctas": 2}, (TAILS, GROUPS, MANY_TILES)),
        ("kernel11", 64, True, {"max_ctas": 2, "overlap_tiles": True}, (TAILS, ROWS_WITHOUT_KEYS, MANY_TILES)),
        ("kernel11", 64, False, {"max_ctas": 2, "overlap_tiles": True, "tile_m": 192}, (TAILS, MANY_TILES)),
        ("kernel11", 128, True, {"max_ctas": 3}, (TAILS, MANY_TILES)),
        ("kernel11", 256, True, {"max_ctas": 2}, (MANY_TILES,)),  # has room for a part of O alone
    ],
)
def test_matches_reference(kernel, head_dim, causal, changes, shapes, generator):
    chosen = config(kernel, head_dim, **changes)
    for shape in shapes:
        case = Case(**shape, head_dim=head_dim, causal=causal)
        report = run(case, generator, kernel, chosen).report
        tiles = -(-case.seqlen_q // chosen.tile_m) * case.num_heads * case.batch
        assert report.num_ctas == min(tiles, chosen.max_ctas or tiles)


@pytest.mark.parametrize("layout", HARDWARE_LAYOUTS[1:], ids=lambda layout: layout.name)
def test_layouts_of_the_hardware(layout, generator):
    """Narrower swizzles: more boxes a tile, and other offsets in wgmma's descriptors."""
    case = Case(100, 75, 64, causal=True)
    result = run(case, generator, "kernel8", config("kernel8", 64, layout=layout, tile_m=64))
    assert result.report.by_path().keys() == {"stmatrix"}


def test_scores_that_rise_are_computed_again(generator):
    """Of kernel10, which tries exponentials before it knows the maximum; in fp16."""
    run(Case(100, 300, 64, dtype=torch.float16, magnitude=30.0), generator, "kernel10", config("kernel10", 64))


def test_strided_views(generator):
    case = Case(100, 90, 64, causal=True)
    chosen = config("kernel8", 64, tile_m=64)
    qkv = torch.randn(1, 100, 3, 4, 64, generator=generator).to(case.dtype)
    q, k, v = qkv[:, :, 0, 1:3], qkv[:, :90, 1, :2], qkv[:, 10:, 2, 2:]
    result = emulate_forward(q, k, v, causal=True, kernel="kernel8", arch=ARCH, config=chosen)
    result.report.raise_for_faults()
    assert_close(case, q, k, v, result.o, result.lse)


def test_without_lse_and_checks(generator):
    case = Case(65, 70, 64, causal=True)
    q, k, v = case.tensors("cpu", generator)
    o, chosen = torch.full_like(q, torch.nan), config("kernel8", 64, tile_m=64)
    static = StaticProblem(case.dtype, case.head_dim, case.causal, return_lse=False)
    emulated_launch(static, KERNELS["kernel8"], chosen, ARCH)(q, k, v, o, None, 64**-0.5)
    options = {"kernel": "kernel8", "arch": ARCH, "config": chosen, "causal": True}
    assert torch.equal(o, emulate_forward(q, k, v, **options, check=False).o)


def test_work_of_hours_is_refused():
    q = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16).expand(64, 100_000, 64, 128)
    with pytest.raises(EmulationTooLongError, match=r"emulating kernel11 .* would take about [\d.]+ h on the CPU"):
        emulate_forward(q, q, q, kernel="kernel11", arch=ARCH)
    chosen = KERNELS["kernel11"].config_for(128)
    assert 0.01 < estimate_seconds(chosen, (1, 256, 1, 128), 256, causal=False) < 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"swizzle": 48}, "rows of 128 bytes in a swizzle of 48"),
        ({"swizzle": 64}, "rows of 128 bytes in a swizzle of 64"),
        ({"box": (1, 300, 64)}, r"a box of \(1, 300, 64\) for 3 dimensions"),
        ({"box": (8, 64)}, r"a box of \(8, 64\) for 3 dimensions"),
        ({"box": (1, 8, 4), "swizzle": 0}, "rows of 8 bytes"),
        ({"array": np.zeros((2, 16, 68), np.int16)[:, :, :64]}, r"strides of \(2176, 136, 2\) bytes"),
        ({"array": np.zeros((2, 64, 16), np.int16).transpose(0, 2, 1)}, "a last axis that is not contiguous"),
    ],
)
def test_maps_that_cannot_be_encoded(changes, match):
    good = {"name": "q", "array": np.zeros((2, 16, 64), np.int16), "box": (1, 8, 64), "swizzle": 128}
    assert TensorMapArg(**good).num_bytes == 1024
    with pytest.raises(EmulationError, match=rf"a tensor map of 'q' can't have .*{match}"):
        TensorMapArg(**(good | changes))
