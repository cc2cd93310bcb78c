"""out=: o in the caller's tensor, and nothing written where it must not be."""

from __future__ import annotations

import pytest
import torch

import cute_fa
from tests.cases import Case

CASE = Case(70, 66, 64, causal=True, batch=2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def tensors(request, generator):
    return CASE.tensors(request.param, generator)


def test_writes_into_the_callers_tensor(tensors):
    expected, expected_lse = cute_fa.forward(*tensors, causal=True, return_lse=True)
    out = torch.full_like(tensors[0], 7.0)
    o, lse = cute_fa.forward(*tensors, causal=True, return_lse=True, out=out)
    assert o is out and torch.equal(out, expected) and torch.equal(lse, expected_lse)
    assert cute_fa.forward(*tensors, causal=True, out=out) is out


def test_a_view_of_a_larger_tensor_and_nothing_around_it(tensors):
    whole = torch.full((4, 100, 5, 80), 7.0, dtype=CASE.dtype, device=tensors[0].device)
    inside = (slice(1, 3), slice(20, 90), slice(2, 4), slice(8, 72))
    cute_fa.forward(*tensors, causal=True, out=whole[inside])
    assert torch.equal(whole[inside], cute_fa.forward(*tensors, causal=True))
    whole[inside] = 7.0
    assert (whole == 7.0).all()


def test_extents_of_one_may_have_any_stride(generator):
    q, k, v = Case(1, 30, 64, batch=1).tensors("cpu", generator)
    out = torch.empty(4 * 64).as_strided((1, 1, 2, 64), (3, 5, 64, 1)).to(CASE.dtype)
    out = out.as_strided((1, 1, 2, 64), (3, 5, 64, 1))
    assert torch.equal(cute_fa.forward(q, k, v, out=out), cute_fa.forward(q, k, v))


def test_no_keys_zero_the_callers_tensor():
    q, k = (torch.ones(2, s, 4, 64, dtype=torch.float16) for s in (5, 0))
    out = torch.ones_like(q)
    assert not cute_fa.forward(q, k, k, out=out).any()


@pytest.mark.parametrize(
    "out, exception, match",
    [
        (lambda q, k: [q], TypeError, r"out must be a torch\.Tensor or None, got list"),
        (lambda q, k: q.float(), TypeError, r"out must have the dtype of o \(torch\.bfloat16\), got torch\.float32"),
        (
            lambda q, k: q[:, :5].clone(),
            ValueError,
            r"out must have the shape of q .*, \(2, 70, 2, 64\), got \(2, 5, 2",
        ),
        (lambda q, k: q.to("meta"), ValueError, r"out must be on the device of q \(.*\), got a tensor on meta"),
        (lambda q, k: q, ValueError, r"out must not share memory with q"),
        (lambda q, k: k.as_strided(q.shape, q.stride()), ValueError, r"out must not share memory with k"),
        (lambda q, k: q.clone().requires_grad_(), ValueError, r"out must not require gradients"),
        (lambda q, k: q.new_empty(2, 70, 64, 2).transpose(2, 3), ValueError, r"out must have a contiguous last dim"),
        (lambda q, k: q.new_empty(2, 70, 2, 67)[..., :64], ValueError, r"out must have strides that are multiples"),
        (lambda q, k: q.new_empty(2, 70, 2, 72)[..., 4:68], ValueError, r"out must start at an address"),
        (lambda q, k: q.new_empty(2, 1, 2, 64).expand(q.shape), ValueError, r"out must have a place for each element"),
        (lambda q, k: q.to_sparse(), TypeError, r"out must be a dense"),
    ],
)
def test_misuse_is_refused_by_name(tensors, out, exception, match):
    q, k, v = tensors
    k_large = torch.zeros(2, 70, 2, 64, dtype=CASE.dtype, device=q.device)[:, :66].copy_(k)
    before = [tensor.clone() for tensor in (q, k_large, v)]
    with pytest.raises(exception, match=match):
        cute_fa.forward(q, k_large, v, out=out(q, k_large))
    assert all(torch.equal(one, other) for one, other in zip((q, k_large, v), before, strict=True))


def test_a_known_kind_of_tensor_is_checked_again(tensors):
    """The second call with known shapes still looks at addresses and gradients."""
    q, k, v = tensors
    whole = torch.zeros(3, *q.shape, dtype=q.dtype, device=q.device)
    whole[0] = q
    expected = cute_fa.forward(whole[0], k, v, out=whole[2]).clone()
    assert torch.equal(cute_fa.forward(whole[0], k, v, out=whole[1]), expected)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        cute_fa.forward(whole[0], k, v, out=whole[0])
    with pytest.raises(ValueError, match="out must not share memory with q"):
        cute_fa.forward(whole[0], k, v, out=whole.flatten()[64:][: q.numel()].view(q.shape))
    with pytest.raises(ValueError, match="out must start at an address"):
        cute_fa.forward(whole[0], k, v, out=whole[1:].flatten()[4:][: q.numel()].view(q.shape))
    with pytest.raises(ValueError, match="out must not require gradients"):
        cute_fa.forward(whole[0], k, v, out=torch.empty_like(q).requires_grad_())
    assert torch.equal(cute_fa.forward(whole[0], k, v, out=whole[1]), expected)


def test_neighbours_in_one_tensor_that_do_not_interleave(tensors):
    q, k, v = tensors
    whole = torch.empty(4, 70, 2, 64, dtype=CASE.dtype, device=q.device)
    whole[:2] = q
    cute_fa.forward(whole[:2], k, v, out=whole[2:])
    assert torch.equal(whole[2:], cute_fa.forward(q, k, v))
