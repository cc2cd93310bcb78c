"""backward="sdpa" against autograd of the reference in float64; without it, an honest error."""

from __future__ import annotations

import pytest
import torch

import cute_fa
from cute_fa.reference import attention_reference
from tests.cases import Case

CASES = [
    Case(70, 70, 64),
    Case(70, 70, 64, causal=True),
    Case(33, 90, 64, causal=True, num_heads=4, num_heads_kv=2),
    Case(90, 33, 64, causal=True, num_heads=4, num_heads_kv=1),
    Case(90, 33, 64, num_heads=2, num_heads_kv=1),
    Case(1, 40, 128, causal=True, dtype=torch.float16, batch=2),
    Case(40, 40, 64, causal=True, dtype=torch.float16, softmax_scale=0.3),
]


def gradients(case: Case, tensors, grad_o, call) -> list[torch.Tensor]:
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    o = call(*inputs, causal=case.causal, softmax_scale=case.softmax_scale)
    o.backward(grad_o.to(o.dtype))
    return [tensor.grad for tensor in inputs]


def ours(q, k, v, **options):
    return cute_fa.forward(q, k, v, backward="sdpa", **options)


def reference(q, k, v, **options):
    return attention_reference(q, k, v, **options, dtype=torch.float64)[0]


def assert_gradients_close(case: Case, tensors, grad_o, call):
    expected = gradients(case, [tensor.double() for tensor in tensors], grad_o, reference)
    eps = torch.finfo(case.dtype).eps
    for name, got, exact in zip("qkv", gradients(case, tensors, grad_o, call), expected, strict=True):
        assert got.dtype == case.dtype and got.shape == exact.shape
        # P, dP and dS are rounded to the inputs' type on the way: a few units of it at the gradient's largest.
        error, allowed = (got.double() - exact).abs().max().item(), 4 * eps * max(1.0, exact.abs().max().item())
        assert error <= allowed, f"gradient of {name}: error {error:.2g}, allowed {allowed:.2g}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_float64(case, generator):
    tensors = case.tensors("cpu", generator)
    grad_o = torch.randn(tensors[0].shape, generator=generator).to(case.dtype)
    assert_gradients_close(case, tensors, grad_o, ours)


@pytest.mark.parametrize("case", [CASES[2], CASES[3]], ids=str)
def test_compiled_gradients_are_those_of_float64(case, generator):
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors = case.tensors("cpu", generator)
    grad_o = torch.randn(tensors[0].shape, generator=generator).to(case.dtype)
    assert_gradients_close(case, tensors, grad_o, compiled)


OPTIONS = {
    "window": {"window_size": (9, 3)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([[0.1, 0.5], [0.0, 1.0]])},
    "sinks": {"sinks": torch.tensor([0.5, -1.0])},
    "bias": {"attn_bias": torch.linspace(-2, 2, 40).expand(2, 1, 1, 40)},
    "mask": {"attn_bias": torch.arange(40) % 3 > 0},
    "all": {"window_size": (20, -1), "softcap": 3.0, "alibi_slopes": torch.tensor([0.1, 0.2]),
            "sinks": torch.tensor([0.5, -1.0]), "attn_bias": torch.linspace(-2, 2, 30)[:, None]},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_with_options_are_those_of_float64(name, causal, generator):
    """Of q, k and v, and of the options' own tensors."""
    case = Case(30, 40, 64, causal, batch=2, num_heads=2, num_heads_kv=1)
    tensors = case.tensors("cpu", generator)
    grad_o = torch.randn(tensors[0].shape, generator=generator).to(case.dtype)
    grads = []
    for call, dtype in ((ours, case.dtype), (reference, torch.float64)):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        options = {}
        for key, value in OPTIONS[name].items():
            differs = isinstance(value, torch.Tensor) and value.dtype != torch.bool
            options[key] = value.detach().clone().requires_grad_() if differs else value
        call(*inputs, causal=causal, **options).backward(grad_o.to(dtype))
        grads.append([one.grad for one in (*inputs, *options.values()) if getattr(one, "requires_grad", False)])
    eps = torch.finfo(case.dtype).eps
    for got, exact in zip(*grads, strict=True):
        assert got.shape == exact.shape
        assert (got.double() - exact).abs().max() <= 4 * eps * max(1.0, exact.abs().max().item())


def test_rows_that_options_hide_give_and_get_nothing(generator):
    case = Case(30, 40, 64)
    q, k, v = (tensor.requires_grad_() for tensor in case.tensors("cpu", generator))
    mask = torch.ones(30, 40, dtype=torch.bool)
    mask[:7] = False
    for bias in (mask, torch.where(mask, 0.0, -torch.inf)):
        o = cute_fa.forward(q, k, v, attn_bias=bias, backward="sdpa")
        grads = torch.autograd.grad(o[:, :7].sum(), (q, k, v), retain_graph=True)
        assert not any(grad.any() for grad in grads)
        grad_q, *others = torch.autograd.grad(o.sum(), (q, k, v))
        assert not grad_q[:, :7].any() and grad_q[:, 7:].any() and all(grad.isfinite().all() for grad in others)


def test_rows_that_see_no_key_give_and_get_nothing(generator):
    case = Case(90, 33, 64, causal=True)
    tensors = case.tensors("cpu", generator)
    grad_o = torch.zeros_like(tensors[0])
    grad_o[:, :57] = torch.randn(1, 57, 2, 64, generator=generator)
    assert not any(grad.any() for grad in gradients(case, tensors, grad_o, ours))
    grad_o[:, 57:] = 1
    grad_q, grad_k, grad_v = gradients(case, tensors, grad_o, ours)
    assert not grad_q[:, :57].any() and grad_q[:, 57:].any() and grad_k.any() and grad_v.any()
    assert all(grad.isfinite().all() for grad in (grad_q, grad_k, grad_v))


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(5, 0), (0, 5)])
def test_nothing_to_attend_to_gives_zero_gradients(seqlen_q, seqlen_k, generator):
    case = Case(seqlen_q, seqlen_k, 64, causal=True)
    tensors = case.tensors("cpu", generator)
    for grad, tensor in zip(gradients(case, tensors, torch.ones_like(tensors[0]), ours), tensors, strict=True):
        assert torch.equal(grad, torch.zeros_like(tensor))


def test_output_is_that_without_gradients(generator):
    case = Case(40, 40, 64)
    q, k, v = case.tensors("cpu", generator)
    expected = cute_fa.forward(q, k, v, return_lse=True)
    o, lse = cute_fa.forward(q, k.requires_grad_(), v, return_lse=True, backward="sdpa")
    assert torch.equal(o, expected[0]) and o.requires_grad
    assert torch.equal(lse, expected[1]) and not lse.requires_grad
    with torch.no_grad():
        assert not cute_fa.forward(q, k, v, backward="sdpa").requires_grad


def test_gradients_are_refused_unless_asked_for(generator):
    q, k, v = Case(40, 40, 64).tensors("cpu", generator)
    with pytest.raises(ValueError, match=r'k must not require gradients.*backward="sdpa"'):
        cute_fa.forward(q, k.requires_grad_(), v)
    with pytest.raises(ValueError, match="backward must be None or 'sdpa', got True"):
        cute_fa.forward(q, k, v, backward=True)
    with pytest.raises(ValueError, match="k must not require gradients"):
        cute_fa.forward(q, k, v, backward="sdpa", out=torch.empty_like(q))


def test_second_derivatives_are_refused(generator):
    q, k, v = Case(8, 8, 64).tensors("cpu", generator)
    o = cute_fa.forward(q.requires_grad_(), k, v, backward="sdpa")
    with pytest.raises(NotImplementedError, match="first derivatives only: create_graph must be False"):
        torch.autograd.grad(o.sum(), q, create_graph=True)
