"""fp8 (e4m3) inputs with a factor for each head, against float64 of what they stand for."""

from __future__ import annotations

import pytest
import torch

import cute_fa
from cute_fa.problem import FP8, ScoreOptions
from cute_fa.varlen import forward_varlen
from tests.cases import Case
from tests.cute_fa.test_score_options import assert_right

BATCH, HEADS, HEADS_KV = 2, 4, 2
SHAPES = {"heads": (HEADS_KV,), "members": (BATCH, HEADS_KV), "none": None}


def quantized(case: Case, generator, shapes=("members", "heads", "members")):
    """q, k, v in fp8, their factors, and the values in float64."""
    tensors = [(tensor * 20).to(FP8) for tensor in case.tensors("cpu", generator)]
    draws = [SHAPES[shape] and torch.rand(SHAPES[shape], generator=generator) * 0.08 + 0.01 for shape in shapes]
    names = ("q_descale", "k_descale", "v_descale")
    descales = {name: value for name, value in zip(names, draws, strict=True) if value is not None}
    exact = []
    for tensor, descale in zip(tensors, draws, strict=True):
        factors = torch.ones(()) if descale is None else descale.repeat_interleave(tensor.shape[2] // HEADS_KV, -1)
        exact.append(tensor.double() * factors.expand(BATCH, tensor.shape[2])[:, None, :, None].double())
    return tensors, descales, exact


def case_of(seqlen_q=70, seqlen_k=90, head_dim=64, causal=False, scale=None):
    return Case(seqlen_q, seqlen_k, head_dim, causal, torch.bfloat16, BATCH, HEADS, HEADS_KV, scale)


@pytest.mark.parametrize(
    "shapes", [("members", "heads", "members"), ("none", "none", "heads"), ("heads", "none", "none")], ids=str
)
@pytest.mark.parametrize("head_dim, causal", [(64, True), (128, False), (96, True)])
def test_matches_float64(shapes, head_dim, causal, generator):
    case = case_of(head_dim=head_dim, causal=causal, scale=0.01)
    tensors, descales, exact = quantized(case, generator, shapes)
    o, lse = cute_fa.forward(*tensors, causal=causal, softmax_scale=0.01, return_lse=True, **descales)
    assert o.dtype == torch.bfloat16
    assert_right(case, *exact, o, lse)


def test_beside_other_options(generator):
    case = case_of(causal=True)
    tensors, descales, exact = quantized(case, generator)
    options = {"window_size": (30, 0), "softcap": 2.5, "sinks": torch.randn(HEADS, generator=generator)}
    o, lse = cute_fa.forward(*tensors, causal=True, return_lse=True, **options, **descales)
    assert_right(case, *exact, o, lse, **options)


def test_every_value_arrives():
    """With one key the output is its value: all finite values of e4m3, and powers of two as factors, are exact."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = torch.where(values.float().isnan(), torch.zeros(()), values.float()).to(FP8)
    v = finite.view(1, 1, 1, 256)
    q = k = torch.zeros_like(v)
    o = cute_fa.forward(q, k, v, v_descale=torch.tensor([0.25]))
    assert torch.equal(o.float(), v.float() * 0.25)


def test_packed_sequences(generator):
    lengths = (40, 0, 50)
    bounds = torch.tensor([0, 40, 40, 90], dtype=torch.int32)
    q, k, v = ((torch.randn(90, n, 64, generator=generator) * 20).to(FP8) for n in (HEADS, HEADS_KV, HEADS_KV))
    descales = {name: torch.rand(3, HEADS_KV, generator=generator) * 0.08 for name in ("q_descale", "v_descale")}
    o, lse = forward_varlen(
        q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=50, max_seqlen_k=50,
        options=ScoreOptions(**descales),
    )  # fmt: skip
    assert o.dtype == torch.bfloat16
    for i, length in enumerate(lengths):
        rows = slice(bounds[i], bounds[i] + length)
        one = [tensor[None, rows] for tensor in (q, k, v)]
        expected = cute_fa.forward(*one, return_lse=True, **{name: value[i] for name, value in descales.items()})
        assert torch.equal(o[None, rows], expected[0]) and torch.equal(lse[None, :, rows], expected[1])


def test_compiles_without_breaks(generator):
    torch._dynamo.reset()
    tensors, descales, _ = quantized(case_of(), generator)
    compiled = torch.compile(cute_fa.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, **descales), cute_fa.forward(*tensors, **descales))
    fake = torch.ops.cute_fa.forward(*(t.to("meta") for t in tensors), False, None, False, "auto", None)[0]
    assert fake.dtype == torch.bfloat16 and fake.shape == tensors[0].shape


def test_into_the_callers_tensor(generator):
    tensors, descales, _ = quantized(case_of(), generator)
    out = torch.empty(tensors[0].shape, dtype=torch.bfloat16)
    assert cute_fa.forward(*tensors, out=out, **descales) is out
    assert torch.equal(out, cute_fa.forward(*tensors, **descales))
    with pytest.raises(TypeError, match=r"out must have the dtype of o \(torch\.bfloat16\), got torch\.float8"):
        cute_fa.forward(*tensors, out=torch.empty_like(tensors[0]))


def wide(tensors):
    return [tensor.bfloat16() for tensor in tensors]


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"q_descale": torch.ones(3)}, ValueError, r"q_descale must have the shape \(H_kv,\) or \(B, H_kv\), .*\(3,\)"),
        ({"v_descale": torch.ones(HEADS)}, ValueError, r"v_descale must have the shape .*got \(4,\)"),
        ({"k_descale": torch.ones(2, dtype=torch.float64)}, TypeError, r"k_descale must be torch\.float32, got"),
        ({"k_descale": 0.5}, TypeError, r"k_descale must be a torch\.Tensor or None, got float"),
        ({"k_descale": torch.ones(2, requires_grad=True)}, ValueError, "k_descale must not require gradients"),
        ({"backward": "sdpa"}, ValueError, r"backward must be None for torch\.float8_e4m3fn"),
        ({"kernel": "kernel2", "v_descale": torch.ones(2)}, ValueError, "kernel must be auto or one that has descales"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_misuse_is_refused_by_name(change, error, match, generator):
    tensors, _, _ = quantized(case_of(), generator)
    with pytest.raises(error, match=match):
        cute_fa.forward(*tensors, **change)


def test_factors_are_for_fp8_alone(generator):
    tensors, descales, _ = quantized(case_of(), generator)
    with pytest.raises(ValueError, match=r"q_descale must be None for q of torch\.bfloat16, got"):
        cute_fa.forward(*wide(tensors), **descales)
    with pytest.raises(TypeError, match=r"k must have the dtype of q \(torch\.bfloat16\), got torch\.float8_e4m3fn"):
        cute_fa.forward(wide(tensors)[0], *tensors[1:])


def test_the_default_dtype_of_pytorch_changes_nothing(generator):
    tensors, descales, _ = quantized(case_of(), generator)
    expected = cute_fa.forward(*tensors, **descales)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(cute_fa.forward(*tensors, **descales), expected)
    finally:
        torch.set_default_dtype(torch.float32)
