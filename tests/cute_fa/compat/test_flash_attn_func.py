"""flash_attn_func: flash-attn's arguments, each right or refused by name."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

import cute_fa
from tests.cases import Case
from tests.cute_fa.compat.reference import assert_matches

WINDOWS = {"full": (-1, -1), "no future": (-1, 0), "all": (69, 60), "left": (16, -1), "both": (16, 16)}
MATRIX = list(
    itertools.product(
        (torch.float16, torch.bfloat16),
        (32, 64, 96, 128, 256),
        (False, True),
        WINDOWS,
        (0.0, 30.0),
        (1, 4),
        (False, True),
    )
)
EMULATED = MATRIX[::53]  # every value of every argument among them; a GPU runs them all


def test_signature_is_that_of_flash_attn():
    """Names, order and defaults of flash-attn 2.8.3; what is ours behind them is by keyword only."""
    parameters = inspect.signature(cute_fa.flash_attn_func).parameters.values()
    positional = [(one.name, one.default) for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == [
        *((name, inspect.Parameter.empty) for name in "qkv"),
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
    ]
    assert [one.name for one in parameters if one.kind is one.KEYWORD_ONLY] == ["backward"]


def test_the_emulated_combinations_have_every_value():
    for every, some in zip(zip(*MATRIX, strict=True), zip(*EMULATED, strict=True), strict=True):
        assert set(every) == set(some)


@pytest.mark.gpu
@pytest.mark.parametrize("combination", MATRIX, ids=str)
def test_every_combination_on_a_gpu(combination, generator):
    check_combination("cuda", generator, *combination)


@pytest.mark.parametrize("combination", EMULATED, ids=str)
def test_combinations_are_right(combination, generator):
    check_combination("cpu", generator, *combination)


def check_combination(device, generator, dtype, head_dim, causal, window, softcap, heads_kv, with_lse):
    case = Case(61, 70, head_dim, dtype=dtype, num_heads=4, num_heads_kv=heads_kv)
    q, k, v = case.tensors(device, generator)
    options = {"causal": causal, "window_size": WINDOWS[window], "softcap": softcap}
    result = cute_fa.flash_attn_func(q, k, v, **options, return_attn_probs=with_lse)
    o, lse = (result[0], result[1][0]) if with_lse else (result, None)
    assert_matches(q[0], k[0], v[0], o[0], lse, **options)
    if with_lse:
        assert len(result) == 3 and result[2].numel() == 0


@pytest.mark.parametrize("window", [(29, -1), (28, -1), (-1, 19), (-1, 18)])
def test_windows_at_the_key_that_they_hide(window, generator):
    q, k, v = Case(20, 30, 64).tensors("cpu", generator)
    o = cute_fa.flash_attn_func(q, k, v, window_size=window)
    assert torch.equal(o, cute_fa.forward(q, k, v)) == (window in ((29, -1), (-1, 19)))
    assert_matches(q[0], k[0], v[0], o[0], None, window_size=window)


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (16, 5), "softcap": 30.0}])
def test_alibi(shape, options, generator):
    q, k, v = Case(61, 70, 64, batch=2, num_heads=4, num_heads_kv=2).tensors("cpu", generator)
    slopes = torch.rand(shape, generator=generator)
    o, lse, _ = cute_fa.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **options)
    for i in range(2):
        assert_matches(q[i], k[i], v[i], o[i], lse[i], slopes=slopes.expand(2, 4)[i], **options)


def test_arguments_by_position_and_without_meaning(generator):
    q, k, v = Case(20, 30, 64).tensors("cpu", generator)
    expected = cute_fa.forward(q, k, v, causal=True, softmax_scale=0.1)
    assert torch.equal(cute_fa.flash_attn_func(q, k, v, 0.0, 0.1, True, (-1, -1), 0.0, None, True), expected)


def test_a_last_dimension_that_is_not_contiguous_is_copied(generator):
    q, k, v = Case(20, 30, 64).tensors("cpu", generator)
    turned = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (q, k, v)]
    assert torch.equal(cute_fa.flash_attn_func(*turned), cute_fa.forward(q, k, v))


def test_gradients_on_request(generator):
    q, k, v = Case(20, 30, 64).tensors("cpu", generator)
    q.requires_grad_()
    with pytest.raises(ValueError, match="q must not require gradients"):
        cute_fa.flash_attn_func(q, k, v)
    cute_fa.flash_attn_func(q, k, v, causal=True, backward="sdpa").sum().backward()
    assert q.grad.any()


def test_compiles_without_breaks(generator):
    torch._dynamo.reset()
    q, k, v = Case(20, 30, 64).tensors("cpu", generator)
    call = torch.compile(lambda q, k, v: cute_fa.flash_attn_func(q, k, v, causal=True), fullgraph=True, backend="eager")
    assert torch.equal(call(q, k, v), cute_fa.forward(q, k, v, causal=True))


@pytest.mark.parametrize(
    "options, exception, match",
    [
        ({"dropout_p": 0.1}, NotImplementedError, r"dropout_p must be 0\.0: .*got 0\.1"),
        ({"dropout_p": None}, TypeError, r"dropout_p must be a number, got NoneType"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes must have the shape .*got \(3,\)"),
        ({"softcap": -1.0}, ValueError, r"softcap must be 0 \(off\), or from .*got -1\.0"),
        ({"softcap": "x"}, TypeError, r"softcap must be a number, got 'x'"),
        ({"softcap": float("nan")}, ValueError, r"softcap must be .*got nan"),
        ({"window_size": 5}, TypeError, r"window_size must be a pair \(left, right\), got 5"),
        ({"window_size": (3, 2.0)}, TypeError, r"window_size must hold integers, got \(3, 2\.0\)"),
        ({"window_size": (3, -2)}, ValueError, r"window_size must hold lengths of 0 or more, or -1"),
        ({"return_attn_probs": 1}, TypeError, r"return_attn_probs must be True or False, got 1"),
        ({"causal": 0}, TypeError, r"causal must be True or False, got 0"),
    ],
)
def test_misuse_is_refused_by_name(options, exception, match, generator):
    with pytest.raises(exception, match=match):
        cute_fa.flash_attn_func(*Case(20, 30, 64).tensors("cpu", generator), **options)
