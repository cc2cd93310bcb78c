"""torch.ops.cute_fa.forward: what watches operators (compile, export, fake tensors, transforms) meets it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.utils._python_dispatch import TorchDispatchMode

import cute_fa
from tests.cases import Case

CASE = Case(70, 90, 64, causal=True, batch=2, num_heads=4, num_heads_kv=2)


class Attention(torch.nn.Module):
    """A module around forward, as torch.export wants one."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return cute_fa.forward(q, k, v, **self.options)


def test_operator_is_what_pytorch_expects(generator):
    arguments = (*CASE.tensors("cpu", generator), True, None, True, "auto", None)
    torch.library.opcheck(torch.ops.cute_fa.forward.default, arguments)


def test_operator_with_options_is_what_pytorch_expects(generator):
    options = (30, 0, 5.0, torch.rand(4), torch.randn(4), torch.rand(2, 1, 1, 90) < 0.8)
    arguments = (*CASE.tensors("cpu", generator), True, None, True, "auto", None, *options)
    torch.library.opcheck(torch.ops.cute_fa.forward.default, arguments)


def test_options_compile_without_breaks(generator):
    torch._dynamo.reset()
    options = {"window_size": (30, 5), "softcap": 5.0, "sinks": torch.randn(4), "return_lse": True}
    compiled = torch.compile(cute_fa.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen_q, seqlen_k in ((70, 90), (33, 90), (5, 7)):
        tensors = Case(seqlen_q, seqlen_k, 64, batch=2, num_heads=4, num_heads_kv=2).tensors("cpu", generator)
        bias = torch.rand(seqlen_q, seqlen_k, generator=generator) < 0.8
        for one, other in zip(
            compiled(*tensors, attn_bias=bias, **options),
            cute_fa.forward(*tensors, attn_bias=bias, **options),
            strict=True,
        ):
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_compiles_without_breaks_for_any_lengths(backend, return_lse, generator):
    torch._dynamo.reset()
    options = {"causal": True, "return_lse": return_lse, "softmax_scale": 0.2}
    compiled = torch.compile(Attention(**options), fullgraph=True, dynamic=True, backend=backend)
    for seqlen_q, seqlen_k in ((70, 90), (33, 90), (5, 7)):
        tensors = Case(seqlen_q, seqlen_k, 64, batch=2, num_heads=4, num_heads_kv=2).tensors("cpu", generator)
        got, expected = compiled(*tensors), cute_fa.forward(*tensors, **options)
        for one, other in zip(*((x if return_lse else (x,)) for x in (got, expected)), strict=True):
            assert torch.equal(one, other)


def test_lengths_that_change_are_compiled_once(generator):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(Attention(causal=True), fullgraph=True, dynamic=True, backend=backend)
    for seqlen in (70, 33, 5):
        compiled(*Case(seqlen, seqlen + 3, 64, batch=2).tensors("cpu", generator))
    assert len(graphs) == 1
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert calls.count(torch.ops.cute_fa.forward.default) == 1


def test_compiled_call_writes_into_out(generator):
    torch._dynamo.reset()
    q, k, v = CASE.tensors("cpu", generator)
    out = torch.zeros_like(q)
    call = torch.compile(lambda: cute_fa.forward(q, k, v, causal=True, out=out), fullgraph=True, backend="aot_eager")
    assert torch.equal(call(), cute_fa.forward(q, k, v, causal=True)) and torch.equal(call(), out)


def test_exports_with_dynamic_lengths(generator):
    tensors = CASE.tensors("cpu", generator)
    batch, seqlen_q, seqlen_k = Dim("batch"), Dim("seqlen_q"), Dim("seqlen_k")
    shapes = {"q": {0: batch, 1: seqlen_q}, "k": {0: batch, 1: seqlen_k}, "v": {0: batch, 1: seqlen_k}}
    program = export(Attention(causal=True), tensors, dynamic_shapes=shapes)
    assert "cute_fa.forward" in str(program.graph)
    for case in (CASE, Case(1, 40, 64, batch=3, num_heads=4, num_heads_kv=2)):
        q, k, v = case.tensors("cpu", generator)
        assert torch.equal(program.module()(q, k, v), cute_fa.forward(q, k, v, causal=True))


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors_have_the_shapes_of_real_ones(inside):
    """Also of a GPU that isn't there, and after the mode has been left."""
    with FakeTensorMode() as mode:
        q = torch.empty(2, 4, 7, 64, dtype=torch.float16, device="cuda").transpose(1, 2)
        k = torch.empty(2, 9, 2, 64, dtype=torch.float16, device="cuda")
        o, lse = cute_fa.forward(q, k, k, return_lse=True)
    if not inside:
        o, lse = cute_fa.forward(q, k, k, return_lse=True)
    assert mode is o.fake_mode and o.shape == (2, 7, 4, 64) and o.is_contiguous() and o.dtype == torch.float16
    assert lse.shape == (2, 4, 7) and lse.dtype == torch.float32 and o.device.type == lse.device.type == "cuda"


def test_meta_tensors_have_the_shapes_of_real_ones():
    q, k = (torch.empty(2, s, h, 64, dtype=torch.bfloat16, device="meta") for s, h in ((7, 4), (9, 2)))
    o, lse = cute_fa.forward(q, k, k, return_lse=True)
    assert o.is_meta and o.shape == q.shape and o.dtype == q.dtype
    assert lse.is_meta and lse.shape == (2, 4, 7) and lse.dtype == torch.float32


def test_fake_tensors_are_checked():
    with FakeTensorMode():
        q = torch.empty(2, 7, 4, 64, device="cuda")
        with pytest.raises(TypeError, match=r"q must be torch\.float16, .*float8_e4m3fn, got torch\.float32"):
            cute_fa.forward(q, q, q)
    q = torch.empty(2, 7, 4, 64, dtype=torch.float16)
    with FakeTensorMode():
        fake = torch.empty(2, 7, 4, 64, dtype=torch.float16)
    with pytest.raises(Exception, match=r"(?i)fake"):
        cute_fa.forward(q, q, fake)


def test_modes_see_the_operator(generator):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    q, k, v = CASE.tensors("cpu", generator)
    with Recorder():
        o = cute_fa.forward(q, k, v, causal=True)
    assert torch.ops.cute_fa.forward.default in seen
    assert torch.equal(o, cute_fa.forward(q, k, v, causal=True))


def test_a_parameter_is_a_tensor(generator):
    q, k, v = CASE.tensors("cpu", generator)
    with torch.no_grad():
        assert torch.equal(cute_fa.forward(torch.nn.Parameter(q), k, v), cute_fa.forward(q, k, v))


@pytest.mark.parametrize("known", [False, True])
def test_vmap_is_refused_by_name(known):
    q = torch.zeros(3, 1, 5, 1, 64, dtype=torch.float16)
    if known:
        cute_fa.forward(q[0], q[0], q[0])
    with pytest.raises(NotImplementedError, match=r"q must not be inside torch\.vmap .*fold the mapped dimension"):
        torch.vmap(lambda one: cute_fa.forward(one, one, one))(q)
    with pytest.raises(NotImplementedError, match=r"must not be inside torch\.vmap"):
        torch.vmap(lambda one: torch.ops.cute_fa.forward(one, one, one, False, None, False, "auto", None))(q)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"kernel": "kernel99"}, "kernel must be auto or one of kernel1"),
        ({"backward": "flash"}, "backward must be None or 'sdpa', got 'flash'"),
    ],
)
def test_misuse_is_named_under_compile(options, message, generator):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=message):
        torch.compile(Attention(**options), fullgraph=True, backend="aot_eager")(*CASE.tensors("cpu", generator))


def test_a_layout_value_is_refused_by_name_where_an_operator_is_needed():
    from layouts import PLAIN

    q = torch.empty(1, 7, 1, 64, dtype=torch.float16)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TypeError, match=r"layout must be a name .*SmemLay"):
        cute_fa.forward(q, q, q, layout=PLAIN)
