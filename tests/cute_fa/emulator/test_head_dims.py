"""Head dimensions that don't fill their tiles, and those of v that are others than q's and k's."""

from __future__ import annotations

import pytest
import torch

import cute_fa
from cute_fa.emulator import emulate_forward
from cute_fa.ladder import KERNELS, select
from cute_fa.problem import HEAD_DIMS, AttentionProblem
from tests.cases import Case, assert_close

HALF, BF16 = torch.float16, torch.bfloat16
DIMS = (8, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256)
PAIRS = ((64, 128), (128, 64), (192, 128), (96, 40), (8, 256), (256, 72))

CASES = [
    *(Case(70, 150, head_dim, causal, dtype, num_heads=4, num_heads_kv=2)
      for head_dim, causal, dtype in zip(DIMS, (True, False) * 6, (BF16, BF16, HALF) * 4, strict=False)),
    *(Case(131, 67, head_dim, True, batch=2, num_heads=3, num_heads_kv=1, head_dim_v=head_dim_v)
      for head_dim, head_dim_v in PAIRS),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_head_dim(case, generator):
    q, k, v = case.tensors("cpu", generator)
    result = emulate_forward(q, k, v, causal=case.causal)
    result.report.raise_for_faults()
    assert_close(case, q, k, v, result.o, result.lse)


@pytest.mark.parametrize(
    ("kernel", "arch", "head_dim", "head_dim_v"),
    [
        ("kernel3", "sm_80", 256, 256),
        ("kernel3", "sm_80", 80, 80),
        ("kernel4", "sm_80", 192, 192),
        ("kernel8", "sm_90a", 40, 8),
        ("kernel11", "sm_90a", 72, 200),
        ("kernel11", "sm_90a", 192, 96),
    ],
)
def test_other_rungs(kernel, arch, head_dim, head_dim_v, generator):
    case = Case(70, 200, head_dim, head_dim_v=head_dim_v)
    q, k, v = case.tensors("cpu", generator)
    result = emulate_forward(q, k, v, kernel=kernel, arch=arch)
    result.report.raise_for_faults()
    assert_close(case, q, k, v, result.o, result.lse)


def test_nothing_behind_the_last_column_is_read_or_written(generator):
    case = Case(65, 70, 72)
    q, k, v = case.tensors("cpu", generator)
    views = []
    for tensor in (q, k, v):
        wide = torch.full((*tensor.shape[:3], 128), torch.nan, dtype=case.dtype)
        views.append(wide[..., :72].copy_(tensor))
    wide_o = torch.full((1, 65, 2, 128), 7.0, dtype=case.dtype)
    expected = cute_fa.forward(q, k, v)
    o = cute_fa.forward(*views, out=wide_o[..., :72])
    assert torch.equal(o, expected) and (wide_o[..., 72:] == 7.0).all()


def test_shared_memory_of_every_head_dim_fits_every_architecture():
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"):
        for head_dim in HEAD_DIMS:
            for head_dim_v in {head_dim, 8, 128, 256}:
                q, v = (torch.empty(1, 128, 1, d, dtype=BF16, device="meta") for d in (head_dim, head_dim_v))
                problem = AttentionProblem.from_tensors(q, q, v)
                rung, config = select(problem, arch)
                rung.check(problem.static, config, arch)


def test_auto_passes_over_rungs_that_lack_a_head_dim():
    def chosen(head_dim, head_dim_v, arch):
        q, v = (torch.empty(1, 128, 1, d, dtype=BF16, device="meta") for d in (head_dim, head_dim_v))
        return select(AttentionProblem.from_tensors(q, q, v), arch)[0].name

    assert chosen(64, 64, "sm_90a") == chosen(80, 80, "sm_90a") == chosen(192, 128, "sm_90a") == "kernel11"
    assert chosen(80, 80, "sm_120a") == chosen(64, 72, "sm_120a") == chosen(192, 128, "sm_120a") == "kernel6"
    # Few queries: the rung for them takes 64 and 128 alone.
    q = torch.empty(1, 1, 1, 72, dtype=BF16, device="meta")
    assert select(AttentionProblem.from_tensors(q, q, q), "sm_80")[0] is KERNELS["kernel6"]


def test_o_has_the_head_dim_of_v_everywhere(generator):
    q, k, v = Case(9, 9, 64, head_dim_v=32).tensors("cpu", generator)
    o, _ = cute_fa.forward(q, k, v, return_lse=True)
    assert o.shape == (1, 9, 2, 32)
    fake, _ = torch.ops.cute_fa.forward(*(t.to("meta") for t in (q, k, v)), False, None, True, "auto", None)
    assert fake.shape == o.shape
    empty = cute_fa.forward(q, k[:, :0], v[:, :0])
    assert empty.shape == o.shape and not empty.any()
    assert torch.equal(cute_fa.flash_attn_func(q, k, v), o)
    swapped = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    assert torch.equal(cute_fa.scaled_dot_product_attention(*swapped).transpose(1, 2), o)
    with pytest.raises(ValueError, match=r"out must have the shape of q and the head dimension of v, \(1, 9, 2, 32\)"):
        cute_fa.forward(q, k, v, out=torch.empty_like(q))
    grads = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    cute_fa.forward(*grads, backward="sdpa").sum().backward()
    assert all(tensor.grad.shape == tensor.shape for tensor in grads)
