"""The kernels for Hopper, as far as they can be shown without one: what they refuse and what is compiled."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from cute_fa.compiled import get_artifacts
from cute_fa.device.tile_schedule import TileSchedule
from cute_fa.ladder import KERNELS, LADDER, resolve_kernel, select
from cute_fa.problem import AttentionProblem, ScoreFeatures, StaticProblem
from layouts import CATALOG, PADDED_8, PLAIN, SWIZZLE_333, SmemLayout, Swizzle
from layouts.checks import HARDWARE_LAYOUTS, require_hardware_layout
from perf import resources

HOPPER = [rung.name for rung in LADDER if rung.max_arch == (9, 9)]
BEST = KERNELS[HOPPER[-1]]


def artifacts(rung, head_dim=128, causal=True, config=None):
    static = StaticProblem(torch.bfloat16, head_dim, causal, return_lse=True)
    return get_artifacts(static, rung, config or rung.config_for(head_dim), "sm_90a")


def problem(head_dim=128, seqlen=4096, causal=False):
    q = torch.zeros(1, 1, 2, head_dim, dtype=torch.bfloat16).expand(1, seqlen, 2, head_dim)
    return AttentionProblem.from_tensors(q, q, q, causal=causal)


# --- choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOPPER)
def test_only_compute_capability_9_runs_them(name):
    assert resolve_kernel(name, "sm_90a") is KERNELS[name]
    for arch in ("sm_80", "sm_89", "sm_100a", "sm_120a"):
        with pytest.raises(ValueError, match=rf"kernel '{name}' needs compute capability 9\.x, this is {arch}"):
            resolve_kernel(name, arch)


def test_auto_takes_the_best_kernel_that_takes_the_layout():
    assert select(problem(), "sm_90a")[0] is BEST
    assert select(problem(), "sm_90a", layout=HARDWARE_LAYOUTS[1])[0] is BEST
    for arch, layout in (("sm_90a", PADDED_8), ("sm_90a", PLAIN), ("sm_100a", None), ("sm_86", SWIZZLE_333)):
        rung, config = select(problem(), arch, layout=layout)
        assert rung.name not in HOPPER and rung.runs_on("sm_80")
        assert layout is None or config.layout == layout


def test_problems_have_their_own_tiles():
    assert select(problem(64), "sm_90a")[1].tile_m == 192
    assert select(problem(64, 2048, causal=True), "sm_90a")[1].tile_m == 192
    assert select(problem(64, 1024, causal=True), "sm_90a")[1].tile_m == 128
    assert select(problem(64, 1024), "sm_90a")[1].tile_m == 192
    assert [select(problem(64, s), "sm_90a")[1].overlap_tiles for s in (512, 1024, 2048)] == [True, True, False]
    assert select(problem(128), "sm_90a")[1].tile_m == 128
    assert select(problem(64), "sm_90a", layout=HARDWARE_LAYOUTS[2])[1].layout == HARDWARE_LAYOUTS[2]


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOPPER)
@pytest.mark.parametrize(
    "changes, match",
    [
        ({"layout": PADDED_8}, r"layout 'PADDED_8' .* TMA and wgmma take only .*128-byte swizzle.*out of their reach"),
        ({"layout": PLAIN}, r"layout 'PLAIN' .* on a \d+x128 tile: TMA and wgmma take only"),
        ({"layout": SmemLayout("two bits", (8, 64), (64, 1), Swizzle(2, 3, 3))}, r"layout 'two bits' .* take only"),
        ({"tile_m": 96}, r"tile_m must be 64, 128 or 192 .*, got 96"),
        ({"tile_m": 256}, r"tile_m must be 64, 128 or 192 .*, got 256"),
        ({"tile_n": 72}, r"tile_n must be a multiple of 16 from 16 to 256, got 72"),
        ({"num_stages": 0}, r"num_stages must be at least 1, got 0"),
        (
            {"overlap_tiles": True, "max_ctas": None},
            r"overlap_tiles must be False where O takes the place of Q, got True",
        ),
        ({"num_stages": 5}, r"in 5 stages take \d+ bytes of shared memory at head dimension 128; sm_90a allows 232448"),
    ],
)
def test_refusals(name, changes, match):
    rung = KERNELS[name]
    with pytest.raises(ValueError, match=match):
        rung.kernel.check(StaticProblem(torch.bfloat16, 128, False, False), replace(rung.config, **changes), "sm_90a")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hardware_layouts_are_recognised_by_their_offsets(head_dim):
    """Whatever it is called: DIRECT_333 on rows of 64 elements is the 128-byte swizzle, on longer ones it is none."""
    taken = {}
    for name, layout in CATALOG.items():
        try:
            taken[name] = require_hardware_layout(layout.on(64, head_dim)).layout
        except ValueError:
            continue
    names = ("SWIZZLE_333", "ATOM_64B", "ATOM_32B", "ATOM_16B")
    expected = dict(zip(names, HARDWARE_LAYOUTS, strict=True))
    if head_dim == 64:
        expected["DIRECT_333"] = HARDWARE_LAYOUTS[0]
    assert taken == expected


# --- what is compiled --------------------------------------------------------------------------------------


def count(pattern: str, ptx: str) -> int:
    return len(re.findall(pattern, ptx))


@pytest.mark.parametrize("name", HOPPER)
def test_the_instructions_of_hopper_are_there(name):
    ptx = artifacts(KERNELS[name]).ptx
    assert count(r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16\.bf16", ptx) > 0
    assert count(r"cp\.async\.bulk\.tensor\.4d\.shared", ptx) > 0
    assert count(r"cp\.async\.bulk\.tensor\.4d\.global", ptx) > 0
    assert count(r"setmaxnreg\.(inc|dec)\.sync", ptx) == 2
    assert count(r"mma\.sync|ldmatrix|cp\.async\.c[ag]", ptx) == 0


@pytest.mark.skipif(resources.find_cuobjdump() is None, reason=resources.NO_CUOBJDUMP)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", HOPPER)
def test_nothing_is_spilled(name, head_dim):
    rung = KERNELS[name]
    static = StaticProblem(torch.bfloat16, head_dim, causal=True, return_lse=True)
    config = rung.config_for(head_dim)
    found = resources.resources_of(static, rung, config, "sm_90a")
    assert found.stack_bytes == 0 and found.local_bytes == 0
    assert found.registers <= 65536 // config.num_threads // 8 * 8
    assert found.ctas_per_sm == 1


@pytest.mark.skipif(resources.find_cuobjdump() is None, reason=resources.NO_CUOBJDUMP)
@pytest.mark.parametrize(
    "head_dim, features, sequences",
    [
        (64, ScoreFeatures(window_left=True, softcap=True), ("cu_seqlens_q", "cu_seqlens_k")),
        (256, ScoreFeatures(bias=torch.bfloat16), ()),
    ],
    ids=("window and softcap of packed sequences", "bias"),
)
def test_options_and_lengths_spill_nothing(head_dim, features, sequences):
    static = StaticProblem(torch.bfloat16, head_dim, True, True, features, sequences=sequences)
    config = BEST.config_for(head_dim, causal=True, plain=static.is_plain)
    found = resources.resources_of(static, BEST, config, "sm_90a")
    assert found.stack_bytes == 0 and found.local_bytes == 0 and found.ctas_per_sm == 1


def test_scores_leave_out_the_columns_that_only_the_tiles_have():
    """At head dimension 136 nine steps of 16 of Q K^T, where tiles of 192 columns have twelve; P V takes all of V's."""
    rung = KERNELS["kernel8"]
    ptx, tile_n = artifacts(rung, 136).ptx, rung.config_for(136).tile_n
    scores = count(rf"wgmma\.mma_async\.sync\.aligned\.m64n{tile_n}k16", ptx)
    output = count(r"wgmma\.mma_async\.sync\.aligned\.m64n192k16", ptx)
    blocks = 2  # the loops with and without a mask
    assert scores == blocks * 9 and output == blocks * tile_n // 16 and tile_n != 192


@pytest.mark.parametrize("layout", HARDWARE_LAYOUTS, ids=lambda layout: layout.name)
def test_every_hardware_layout_compiles(layout):
    """TMA boxes are as wide as the swizzle: the narrower, the more loads a tile takes."""
    config = replace(BEST.config, layout=layout)
    ptx = artifacts(BEST, config=config).ptx
    widest = artifacts(BEST).ptx
    loads = r"cp\.async\.bulk\.tensor\.4d\.shared"
    assert count(loads, ptx) == count(loads, widest) * 64 // layout.shape[1]
    assert count("wgmma.mma_async", ptx) == count("wgmma.mma_async", widest)


def test_a_tile_is_tried_without_its_maximum():
    """The loop over whole blocks gains a vote of the warpgroup, and computes its scores in two places."""
    with_maximum, trying = (KERNELS[name] for name in HOPPER[1:3])
    assert replace(trying.config, try_first=False) == with_maximum.config
    before, after = (artifacts(rung, causal=False).ptx for rung in (with_maximum, trying))
    assert count(r"bar\w*\.\S*red\.popc", before) == 0 and count(r"bar\w*\.\S*red\.popc", after) == 1
    scores = 128 // 16
    assert count("wgmma.mma_async", after) == count("wgmma.mma_async", before) + scores


# --- the schedule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_m_blocks", [1, 2, 3, 7, 16, 33])
@pytest.mark.parametrize("num_heads", [1, 2, 5, 32, 61])
@pytest.mark.parametrize("max_ctas", [1, 3, 8, 132])
def test_every_tile_is_computed_once(num_m_blocks, num_heads, max_ctas):
    num_ctas = min(max_ctas, num_m_blocks * num_heads)
    schedules = [TileSchedule(num_m_blocks, num_heads, cta, num_ctas) for cta in range(num_ctas)]
    assert all(schedule.count() >= 1 for schedule in schedules)  # a CTA without a tile would wait for ever
    tiles = Counter(schedule.tile(i) for schedule in schedules for i in range(schedule.count()))
    assert set(tiles) == {(m, head) for m in range(num_m_blocks) for head in range(num_heads)}
    assert set(tiles.values()) == {1}


@pytest.mark.parametrize("num_m_blocks, num_heads, at_least", [(128, 16, 0.99), (32, 64, 0.97), (86, 32, 0.99)])
def test_causal_work_is_level(num_m_blocks, num_heads, at_least):
    """At 16384 tokens of 2048 elements on 132 SMs; a tile takes its blocks and about two more."""
    loads = []
    for cta in range(132):
        schedule = TileSchedule(num_m_blocks, num_heads, cta, 132)
        loads.append(sum(schedule.tile(i)[0] + 3 for i in range(schedule.count())))
    assert sum(loads) / len(loads) / max(loads) >= at_least


def test_few_heads_at_a_time():
    """At any time the CTAs are within a few heads of each other, so that keys and values are found in L2."""
    schedules = [TileSchedule(16, 128, cta, 132) for cta in range(132)]
    for i in range(min(schedule.count() for schedule in schedules)):
        heads = {schedule.tile(i)[1] for schedule in schedules}
        assert len(heads) <= 28  # 26 whose tiles fill three rows, two of a pair
