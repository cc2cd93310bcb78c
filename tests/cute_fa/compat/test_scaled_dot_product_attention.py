"""scaled_dot_product_attention beside PyTorch's own, mask alignment included."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import cute_fa
from tests.cases import Case


def heads_first(seqlen_q, seqlen_k, generator, heads=2, heads_kv=2, dtype=torch.bfloat16):
    case = Case(seqlen_q, seqlen_k, 64, dtype=dtype, batch=2, num_heads=heads, num_heads_kv=heads_kv)
    return [tensor.transpose(1, 2).contiguous() for tensor in case.tensors("cpu", generator)]


def assert_like_pytorch(tensors, **options):
    exact = torch.nn.functional.scaled_dot_product_attention(*(tensor.float() for tensor in tensors), **options)
    got = cute_fa.scaled_dot_product_attention(*tensors, **options)
    eps = torch.finfo(tensors[0].dtype).eps
    assert got.shape == exact.shape and got.dtype == tensors[0].dtype
    assert (got.float() - exact).abs().max() <= 2 * eps * tensors[2].abs().max()


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(70, 70), (33, 90), (90, 33), (1, 40), (40, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 1])
def test_like_pytorch(seqlen_q, seqlen_k, is_causal, heads_kv, generator):
    tensors = heads_first(seqlen_q, seqlen_k, generator, heads=4, heads_kv=heads_kv)
    assert_like_pytorch(tensors, is_causal=is_causal, scale=0.2, enable_gqa=heads_kv != 4)


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(33, 90), (70, 70), (90, 33)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_biases(bias, seqlen_q, seqlen_k, generator):
    """PyTorch leaves rows that see no key NaN or refuses them; here they are 0."""
    tensors = heads_first(seqlen_q, seqlen_k, generator, dtype=torch.float16)
    mask = bias(seqlen_q, seqlen_k)
    if bias is causal_lower_right and seqlen_q > seqlen_k:
        got = cute_fa.scaled_dot_product_attention(*tensors, attn_mask=mask)
        assert not got[:, :, : seqlen_q - seqlen_k].any()
        tensors[0] = tensors[0][:, :, seqlen_q - seqlen_k :]
        square = cute_fa.scaled_dot_product_attention(*tensors, is_causal=True)
        # Another rung serves so few queries, and rounds P to the inputs' type against another reference.
        torch.testing.assert_close(got[:, :, seqlen_q - seqlen_k :], square, atol=2e-3, rtol=0)
        return
    assert_like_pytorch(tensors, attn_mask=mask)


@pytest.mark.parametrize("shape", [(70, 90), (1, 90), (1, 70, 1), (2, 1, 1, 90), (2, 4, 70, 90), (1, 4, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_masks(shape, dtype, generator):
    tensors = heads_first(70, 90, generator, heads=4, heads_kv=2)
    mask = torch.randn(shape, generator=generator)
    mask = mask < 0.8 if dtype == torch.bool else mask.to(dtype)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.float() for tensor in tensors), mask if dtype == torch.bool else mask.float(), enable_gqa=True
    )
    got = cute_fa.scaled_dot_product_attention(*tensors, mask, enable_gqa=True)
    # PyTorch gives 0 or NaN where a query sees no key; here it is 0.
    assert (got.float() - exact.nan_to_num(0.0)).abs().max() <= 2 * torch.finfo(got.dtype).eps * tensors[2].abs().max()


def test_gradient_of_a_mask(generator):
    tensors = [tensor.requires_grad_() for tensor in heads_first(40, 50, generator)]
    mask = torch.randn(40, 50, generator=generator).requires_grad_()
    inputs = (*tensors, mask)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    torch.nn.functional.scaled_dot_product_attention(*exact).sin().sum().backward()
    cute_fa.scaled_dot_product_attention(*inputs, backward="sdpa").sin().sum().backward()
    for one, other in zip(inputs, exact, strict=True):
        assert (one.grad.double() - other.grad).abs().max() <= 0.03 * other.grad.abs().max()


@pytest.mark.parametrize("seqlen_q, seqlen_k", [(33, 50), (50, 33)])
def test_gradients_on_request(seqlen_q, seqlen_k, generator):
    tensors = heads_first(seqlen_q, seqlen_k, generator)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True).sum().backward()
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    cute_fa.scaled_dot_product_attention(*ours, is_causal=True, backward="sdpa").sum().backward()
    for one, other in zip(ours, exact, strict=True):
        assert (one.grad.double() - other.grad).abs().max() <= 0.03 * other.grad.abs().max()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_breaks(dynamic, generator):
    torch._dynamo.reset()

    def call(q, k, v):
        return cute_fa.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen_q, seqlen_k in ((40, 40), (20, 30), (30, 20)):
        tensors = heads_first(seqlen_q, seqlen_k, generator)
        assert torch.equal(compiled(*tensors), call(*tensors))


@pytest.mark.parametrize(
    "change, exception, match",
    [
        ({"query": lambda a: a[0]}, ValueError, r"query must have 4 dimensions \(batch, heads, sequence, head_dim\)"),
        ({"key": lambda a: None}, TypeError, r"key must be a torch\.Tensor, got NoneType"),
        ({"key": lambda a: a[:, :1], "value": lambda a: a[:, :1]}, ValueError, r"enable_gqa must be True .*got 1"),
        ({"attn_mask": lambda a: torch.ones(8, 9).bool()}, ValueError, r"attn_mask must broadcast .*got \(8, 9\)"),
        ({"attn_mask": lambda a: torch.ones(9, 9).half()}, TypeError, r"attn_mask must be torch\.bool, torch\.float32"),
        ({"attn_mask": lambda a: 1}, TypeError, r"attn_mask must be a torch\.Tensor or None, got int"),
        ({"attn_mask": lambda a: torch.ones(9, 9).bool(), "is_causal": lambda a: True}, ValueError,
         r"is_causal must be False with an attn_mask"),
        ({"attn_mask": lambda a: causal_lower_right(5, 9)}, ValueError, r"attn_mask must be for \(9, 9\)"),
        ({"attn_mask": lambda a: causal_lower_right(9, 9), "is_causal": lambda a: True}, ValueError,
         r"is_causal must be False with an attn_mask"),
        ({"dropout_p": lambda a: 0.1}, NotImplementedError, r"dropout_p must be 0\.0"),
        ({"is_causal": lambda a: 1}, TypeError, r"is_causal must be True or False, got 1"),
        ({"query": lambda a: a.float()}, TypeError, r"q must be torch\.float16, .*got torch\.float32"),
        ({"scale": lambda a: -1.0}, ValueError, r"softmax_scale must be greater than 0"),
    ],
)  # fmt: skip
def test_misuse_is_refused_by_name(change, exception, match, generator):
    arguments = dict(zip(("query", "key", "value"), heads_first(9, 9, generator), strict=True))
    for name, wrong in change.items():
        arguments[name] = wrong(arguments.get(name))
    with pytest.raises(exception, match=match):
        cute_fa.scaled_dot_product_attention(**arguments)
