"""cute_fa.warmup compiles what it was asked for, once, and says so."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import cute_fa
from cute_fa import compiled
from cute_fa.ladder import resolve_kernel
from cute_fa.problem import FP8


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """An empty cache; what the compiler was called with."""
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_in_memory", {})
    calls = []
    real = compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda *args: calls.append(args) or real(*args))
    return calls


def test_every_combination_is_compiled_and_named(compiles, monkeypatch):
    options = {"head_dim": 64, "dtype": torch.bfloat16, "arch": "sm_90a"}
    warmed = cute_fa.warmup(**options, return_lse=[False, True])
    combinations = set(itertools.product((False, True), (False, True)))
    assert {(one.causal, one.return_lse) for one in warmed} == combinations
    assert all(one.head_dim == 64 for one in warmed)
    # Decoding and long queries have kernels of their own.
    for causal, with_lse in combinations:
        kernels = {one.kernel for one in warmed if (one.causal, one.return_lse) == (causal, with_lse)}
        assert resolve_kernel("auto", "sm_90a").name in kernels and len(kernels) == 2
    assert len(compiles) == len(warmed)
    cute_fa.warmup(**options)
    monkeypatch.setattr(compiled, "_in_memory", {})  # as in the next process
    again = cute_fa.warmup(**options)
    assert len(compiles) == len(warmed) and sum(one.seconds for one in again) < sum(one.seconds for one in warmed)


def test_everything_by_default(monkeypatch):
    asked = []
    monkeypatch.setattr("cute_fa.warming.get_compiled", lambda static, *_: asked.append(static))
    assert len(cute_fa.warmup(arch="sm_80")) == len(asked)
    assert len(set(asked)) == 2 * 2 * 2 * 2


def _tensors(*shapes, dtype=torch.bfloat16):
    return (torch.zeros(shape, dtype=dtype) for shape in shapes)


def _plain(head_dim, dtype=torch.bfloat16, seqlen_q=600, causal=True, **options):
    q, k, v = _tensors((2, seqlen_q, 4, head_dim), *2 * [(2, 600, 2, head_dim)], dtype=dtype)
    cute_fa.forward(q, k, v, causal=causal, **options)


def _packed(head_dim, **options):
    q, k, v = _tensors((700, 4, head_dim), *2 * [(700, 2, head_dim)])
    ends = torch.tensor([0, 100, 700], dtype=torch.int32)
    cute_fa.flash_attn_varlen_func(q, k, v, ends, ends, 600, 600, causal=True, **options)


def _cached(head_dim, seqlen_q, paged, **options):
    q, k, v = _tensors((2, seqlen_q, 4, head_dim), *2 * [(3, 600, 2, head_dim)])
    table = torch.tensor([[2], [0]], dtype=torch.int32) if paged else None
    lengths = torch.tensor([500, 600], dtype=torch.int32)
    cute_fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True, **options)


_PACKED, _PAGED = ("cu_seqlens_q", "cu_seqlens_k"), ("seqused_k", "block_table")
_BOTH_SIDES = ["window_left", "window_right"]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "ready, call",
    [
        ({}, _plain),
        ({}, lambda d: _plain(d, seqlen_q=1)),
        ({"options": ["softcap"]}, lambda d: _plain(d, softcap=20.0)),
        ({"options": ["window_left"]}, lambda d: _plain(d, window_size=(9, -1))),
        ({"options": ["window_left", "softcap"]}, lambda d: _plain(d, window_size=(9, -1), softcap=20.0)),
        ({"options": ["window_left", "sinks"]}, lambda d: _plain(d, window_size=(9, -1), sinks=torch.zeros(4))),
        ({"options": _BOTH_SIDES, "causal": False}, lambda d: _plain(d, causal=False, window_size=(9, 3))),
        ({"options": _BOTH_SIDES, "causal": False}, lambda d: _plain(d, causal=False, window_size=(9, 3), seqlen_q=1)),
        (
            {"options": ["sinks", "alibi_slopes"]},
            lambda d: _plain(d, sinks=torch.zeros(4), alibi_slopes=torch.zeros(2, 4)),
        ),
        ({"options": ["mask"]}, lambda d: _plain(d, attn_bias=torch.ones(600, 600, dtype=torch.bool))),
        ({"options": ["bias"]}, lambda d: _plain(d, attn_bias=torch.zeros(4, 600, 600, dtype=torch.bfloat16))),
        ({"options": ["bias_fp32"]}, lambda d: _plain(d, attn_bias=torch.zeros(600))),
        ({"dtype": FP8, "options": ["descales"]}, lambda d: _plain(d, FP8, v_descale=torch.ones(2))),
        ({"sequences": _PACKED}, _packed),
        ({"sequences": _PACKED, "options": ["window_left"]}, lambda d: _packed(d, window_size=(99, 0))),
        ({"sequences": _PACKED, "options": ["softcap"]}, lambda d: _packed(d, softcap=30.0)),
        ({"sequences": ["seqused_k"]}, lambda d: _cached(d, 1, False)),
        ({"sequences": _PAGED}, lambda d: _cached(d, 1, True)),
        (
            {"sequences": _PAGED, "options": ["window_left", "softcap"]},
            lambda d: _cached(d, 300, True, window_size=(99, 0), softcap=30.0),
        ),
    ],
)
def test_calls_find_what_was_made_ready(ready, call, head_dim, arch, monkeypatch):
    made, asked = set(), set()

    def compile_it(static, rung, *rest):
        made.add((static, rung.name, *rest))

    def launch(static, rung, *rest):
        asked.add((static, rung.name, *rest))
        return lambda *_: None

    monkeypatch.setattr("cute_fa.warming.get_compiled", compile_it)
    monkeypatch.setattr("cute_fa.dispatch.emulated_launch", launch)
    monkeypatch.setattr("cute_fa.dispatch.DEFAULT_ARCH", arch)
    for module in ("plan", "varlen"):
        monkeypatch.setattr(f"cute_fa.{module}._plans", {})
    warmed = cute_fa.warmup(**{"head_dim": head_dim, "dtype": torch.bfloat16, "causal": True, "arch": arch} | ready)
    call(head_dim)
    assert asked and asked <= made and len(warmed) == len(made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_pytorch_changes_nothing(dtype, monkeypatch):
    def made():
        found = set()
        monkeypatch.setattr("cute_fa.warming.get_compiled", lambda static, *_: found.add(static))
        for names in (["alibi_slopes", "sinks", "bias_fp32"], ["bias"]):
            cute_fa.warmup(head_dim=64, dtype=torch.bfloat16, arch="sm_90a", options=names)
        cute_fa.warmup(head_dim=64, dtype=FP8, arch="sm_90a", options=["descales"])
        return found

    expected, before = made(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert made() == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"arch": "sm_90a", "head_dim": 63}, r"head_dim must be a multiple of 8 from 8 to 256, got 63"),
        ({"arch": "sm_90a", "dtype": torch.float32}, r"must be torch\.float16, .*, got torch\.float32"),
        ({"arch": "sm_90a", "causal": "yes"}, r"causal must be True or False, got 'yes'"),
        ({"arch": "sm_70"}, r"arch must be one of .*got 'sm_70'"),
        ({"arch": "sm_90a", "device": "cuda"}, r"arch must be None with a device"),
        ({"arch": "sm_90a", "options": "softcap"}, r"options must be a collection of names, got 'softcap'"),
        ({"arch": "sm_90a", "options": iter(["softcap"])}, r"options must be a collection of names, got <"),
        ({"arch": "sm_90a", "options": None}, r"options must be a collection of names, got None"),
        ({"arch": "sm_90a", "options": [["softcap"]]}, r"options must be some of window_left, .*got \['softcap'\]"),
        ({"arch": "sm_90a", "head_dim_v": "64"}, r"head_dim_v must be an integer, got str"),
        ({"arch": "sm_90a", "head_dim_v": -8}, r"head_dim_v must be a multiple of 8 from 8 to 256, got -8"),
        ({"arch": "sm_90a", "head_dim": (n for n in (64,))}, r"head_dim must be an integer, got generator"),
        ({"arch": "sm_90a", "sequences": ["seqused_k"], "return_lse": "yes"}, r"return_lse must be True or False"),
        ({"arch": "sm_90a", "options": ["mask", "bias"]}, r"options must name one kind of attn_bias, got mask, bias"),
        ({"arch": "sm_90a", "sequences": ["cu_seqlens"]}, r"sequences must be some of .*got 'cu_seqlens'"),
        ({"arch": "sm_90a", "kernel": "kernel0"}, r"kernel must be auto or one of"),
        ({"device": "cpu"}, r"device must be a CUDA device, got '?cpu'?"),
    ],
)
def test_misuse_is_named(options, match, compiles):
    with pytest.raises((TypeError, ValueError), match=match):
        cute_fa.warmup(**options)
    assert not compiles


@pytest.mark.gpu
def test_a_cuda_graph_captures_decoding_after_warmup():
    """Of many keys, which are split: the kernel that merges them is ready too."""
    cute_fa.warmup(head_dim=128, dtype=torch.bfloat16, causal=False, return_lse=False)
    q, k = (torch.randn(1, length, 8, 128, dtype=torch.bfloat16, device="cuda") for length in (1, 8192))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = cute_fa.forward(q, k, k)
    graph.replay()
    assert torch.equal(o, cute_fa.forward(q, k, k))


@pytest.mark.gpu
def test_a_cuda_graph_captures_packed_sequences_after_warmup():
    names = ("cu_seqlens_q", "cu_seqlens_k")
    cute_fa.warmup(head_dim=64, dtype=torch.bfloat16, causal=True, options=["softcap"], sequences=names)
    q = torch.randn(300, 2, 64, dtype=torch.bfloat16, device="cuda")
    ends = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    call = functools.partial(cute_fa.flash_attn_varlen_func, q, q, q, ends, ends, 200, 200, causal=True, softcap=30.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    graph.replay()
    assert torch.equal(o, call())


@pytest.mark.gpu
def test_a_cuda_graph_captures_a_first_call_after_warmup():
    torch.cuda.synchronize()
    cute_fa.warmup(head_dim=128, dtype=torch.float16, causal=True, return_lse=False)
    q = torch.randn(1, 100, 2, 128, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = cute_fa.forward(q, q, q, causal=True)
    graph.replay()
    assert torch.equal(o, cute_fa.forward(q, q, q, causal=True))
