"""What compiled kernels tell, held to formulas from their tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cute_fa.arch import REGISTERS_PER_SM, get_arch
from cute_fa.ladder import KERNELS, LADDER, Rung
from cute_fa.problem import StaticProblem
from layouts import PLAIN, SWIZZLE_333
from perf import resources
from perf.resources import cubin_usage, instruction_counts, parse_usage, resources_of

needs_cuobjdump = pytest.mark.skipif(resources.find_cuobjdump() is None, reason=resources.NO_CUOBJDUMP)


def static(head_dim: int, causal: bool = False) -> StaticProblem:
    return StaticProblem(torch.bfloat16, head_dim, causal, False)


def expected_counts(rung: Rung, head_dim: int) -> dict[str, int]:
    """Instructions of one thread of the serial kernel, its loop body once.

    m16n8k16 takes 16x8 outputs and 16 of k; ldmatrix.x4 loads 16x16 elements for a warp; cp.async and
    the loads of O move 16 bytes a thread, the stores of O 4. Barriers: two in the loop, two around O.
    """
    config = rung.config
    m, n, d, threads = config.tile_m, config.tile_n, head_dim, config.num_threads
    rows = m // (threads // 32)
    mma_qk = (rows // 16) * (n // 8) * (d // 16)
    mma_pv = (rows // 16) * (d // 8) * (n // 16)
    return {
        "ldmatrix": (rows // 16) * (d // 16) + (n // 16) * (d // 16),
        "ldmatrix_trans": (d // 16) * (n // 16),
        "mma": mma_qk + mma_pv,
        "cp_async": (m + 2 * n) * d * 2 // 16 // threads,
        "st_shared": m * d * 2 // 4 // threads,
        "ld_shared": m * d * 2 // 16 // threads,
        "barrier": 4,
    }


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["kernel1", "kernel2"])
def test_instruction_counts_follow_from_the_tiles(name, head_dim):
    rung = KERNELS[name]
    assert resources_of(static(head_dim), rung, rung.config, "sm_90a").instructions == expected_counts(rung, head_dim)


@pytest.mark.parametrize(("head_dim", "causal", "arch"), [(64, True, "sm_80"), (128, True, "sm_90a")])
def test_the_layout_changes_no_count(head_dim, causal, arch):
    rung = KERNELS["kernel1"]
    counts = [
        resources_of(static(head_dim, causal), rung, replace(rung.config, layout=layout), arch).instructions
        for layout in (PLAIN, SWIZZLE_333)
    ]
    assert counts[0] == counts[1]


@needs_cuobjdump
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["kernel1", "kernel2"])
def test_resources_at_head_dim_128(name, arch):
    rung = KERNELS[name]
    found = resources_of(static(128), rung, rung.config, arch)
    # Row-major tiles need more address registers than swizzled ones: four of them are reloaded once a CTA.
    assert found.stack_bytes <= (16 if name == "kernel1" else 0) and found.local_bytes == 0
    most = REGISTERS_PER_SM // (rung.config.num_threads * rung.config.ctas_per_sm) // 8 * 8
    assert 64 < found.registers <= most
    assert found.smem_bytes == (64 + 64 + 64) * 128 * 2
    assert found.ctas_per_sm == rung.config.ctas_per_sm
    assert found.occupancy == 3 * 128 / get_arch(arch).threads_per_sm


def test_without_cuobjdump_the_rest_is_still_told(monkeypatch):
    monkeypatch.setattr(resources, "find_cuobjdump", lambda: None)
    rung = KERNELS["kernel2"]
    found = resources_of.__wrapped__(static(64), rung, rung.config, "sm_90a")
    assert (found.registers, found.stack_bytes, found.occupancy) == (None, None, None)
    assert found.smem_bytes == 3 * 64 * 64 * 2 and found.instructions["mma"] == 64


@needs_cuobjdump
def test_cuobjdump_failure_is_an_error():
    with pytest.raises(RuntimeError, match=r"cuobjdump.* failed with status"):
        cubin_usage(b"no cubin", "k")


def test_parse_usage():
    line = "  REG:40 STACK:8 SHARED:1024 LOCAL:16 CONSTANT[0]:724 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    text = "Resource usage:\n Function k_0:\n" + line
    other = " Function k_combine_1:\n" + line.replace("40", "99")
    usage = parse_usage(other + text + other, "k")
    assert (usage["REG"], usage["STACK"], usage["SHARED"], usage["LOCAL"]) == (40, 8, 1024, 16)
    for wrong in ("", other, text + text):
        with pytest.raises(RuntimeError, match="resource usage of k once"):
            parse_usage(wrong, "k")


@needs_cuobjdump
@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.name)
def test_every_rung_has_resources(rung):
    """Also one of two kernels: what is told is that of the first."""
    arch = "sm_90a"
    found = resources_of(static(64), rung, rung.config_for(64), arch)
    assert found.registers > 32 and found.smem_bytes > 8192 and found.occupancy > 0


def test_instruction_families():
    ptx = """
    @%p1 cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;
    cp.async.commit_group;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
    @!%p2 st.shared.v4.b32 [%r1], {%r2, %r3, %r4, %r5};
    ld.shared.b32 %r1, [%r2];
    bar.sync 0;
    // mma.sync.aligned.m16n8k16 in a comment
    """
    counts = instruction_counts(ptx)
    assert counts.pop("mma") == 0
    assert set(counts.values()) == {1}


def test_an_architecture_too_small_is_refused():
    rung = KERNELS["kernel2"]
    with pytest.raises(ValueError, match="arch must be one of"):
        resources_of(static(64), rung, rung.config, "sm_75")
