"""Random misuse: whatever is wrong with a call, an error says so by a name of the call, and nothing is launched."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cute_fa

JUNK = st.sampled_from(
    [None, 1, 0, -1, 2.5, "x", b"x", [], {}, (1, 2), object(), True, float("nan"), 1 + 2j, torch.bfloat16]
)


@st.composite
def wrong_tensors(draw):
    """A tensor that no argument of attention could be, beside (2, 7, 4, 64) or (2, 9, 2, 64) in bf16."""
    shape = list(draw(st.sampled_from([(2, 7, 4, 64), (2, 9, 2, 64)])))
    kind = draw(st.sampled_from(["rank", "extent", "dtype", "device", "last stride", "pointer", "layout", "grad"]))
    dtype = torch.bfloat16
    if kind == "rank":
        shape = shape[: draw(st.integers(0, 3))] if draw(st.booleans()) else [1, *shape]
    if kind == "extent":
        shape[draw(st.sampled_from([0, 3]))] += draw(st.integers(1, 5))
    if kind == "dtype":
        dtype = draw(
            st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int8, torch.bool, torch.complex64])
        )
    tensor = torch.zeros(shape, dtype=dtype, device="meta" if kind == "device" else "cpu")
    if kind == "last stride":
        tensor = torch.zeros(*shape[:2], shape[3], shape[2], dtype=dtype).transpose(2, 3)
    if kind == "pointer":
        offset = draw(st.integers(1, 7))
        tensor = torch.zeros(tensor.numel() + offset, dtype=dtype)[offset:].view(shape)
    if kind == "layout":
        tensor = tensor.to_sparse()
    if kind == "grad":
        tensor.requires_grad_()
    return tensor


TENSORS = st.one_of(JUNK, wrong_tensors())
NUMBERS = st.one_of(
    JUNK.filter(lambda one: one is not None and one is not True and one not in (1, 2.5)),
    st.floats(max_value=0.0),
    st.just(float("inf")),
    st.floats(min_value=2.0**65),
)
GIVEN = st.one_of(JUNK.filter(lambda one: one is not None), wrong_tensors())
FLAGS = JUNK.filter(lambda one: not isinstance(one, bool))
WRONG = {
    "q": TENSORS,
    "k": TENSORS,
    "v": TENSORS,
    "causal": FLAGS,
    "return_lse": FLAGS,
    "softmax_scale": NUMBERS,
    "out": GIVEN,
    "backward": JUNK.filter(lambda one: one is not None),
    "window_size": JUNK.filter(lambda one: one != (1, 2)),
    "softcap": JUNK.filter(lambda one: isinstance(one, bool) or one not in (0, 1, 2.5)),
    "alibi_slopes": GIVEN,
    "sinks": GIVEN,
    "attn_bias": GIVEN.filter(lambda one: not isinstance(one, torch.Tensor) or one.dim()),
    "q_descale": GIVEN,
    "k_descale": GIVEN,
    "v_descale": GIVEN,
    "kernel": JUNK,
    "layout": JUNK.filter(lambda one: one is not None),
}


def good_call():
    q, k = (torch.zeros(2, s, h, 64, dtype=torch.bfloat16) for s, h in ((7, 4), (9, 2)))
    return {"q": q, "k": k, "v": k.clone()}


@pytest.fixture(scope="module")
def launches():
    """Launches of the emulator; none of them happens."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cute_fa.dispatch.emulated_launch", lambda *_: lambda *_: made.append("a launch"))
        patch.setattr("cute_fa.plan._plans", {})
        yield made


def test_a_good_call_is_launched(launches):
    cute_fa.forward(**good_call())
    assert launches
    launches.clear()


def test_every_argument_is_misused_here():
    assert set(WRONG) == set(inspect.signature(cute_fa.forward).parameters)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_misuse_never_reaches_a_launch(launches, data):
    call = good_call()
    wrong = data.draw(st.sets(st.sampled_from(sorted(WRONG)), min_size=1, max_size=3), label="wrong arguments")
    for name in sorted(wrong):
        call[name] = data.draw(WRONG[name], label=name)
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        cute_fa.forward(**call)
    assert not launches
    # q says what k and v must have, and which of two that disagree is wrong is a matter of view.
    named = {*wrong, *({"q", "k", "v"} if wrong & {"q", "k", "v"} else set())}
    assert any(f"{name} must" in str(caught.value) for name in named) or "q, k and v" in str(caught.value)
    assert "got" in str(caught.value)


FLASH_WRONG = {
    "dropout_p": JUNK.filter(lambda one: one != 0),
    "softmax_scale": NUMBERS,
    "causal": FLAGS,
    "window_size": JUNK.filter(lambda one: one != (1, 2)),
    "softcap": WRONG["softcap"],
    "alibi_slopes": JUNK.filter(lambda one: one is not None),
    "return_attn_probs": FLAGS,
    "backward": JUNK.filter(lambda one: one is not None),
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_misuse_of_a_companion_never_reaches_a_launch(launches, data):
    name = data.draw(st.sampled_from(sorted(FLASH_WRONG)))
    value = data.draw(FLASH_WRONG[name])
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"{name} must"):
        cute_fa.flash_attn_func(**good_call(), **{name: value})
    assert not launches
