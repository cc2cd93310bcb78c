"""cute_fa.warmup compiles what it was asked for, once, and says so."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import cute_fa
from cute_fa import compiled
from cute_fa.emulator import DEFAULT_ARCH
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


def _plain(dtype=torch.bfloat16, **options):
    q, k, v = _tensors((2, 600, 4, 64), (2, 600, 2, 64), (2, 600, 2, 64), dtype=dtype)
    cute_fa.forward(q, k, v, causal=True, **options)


def _packed(**options):
    q, k, v = _tensors((700, 4, 64), (700, 2, 64), (700, 2, 64))
    ends = torch.tensor([0, 100, 700], dtype=torch.int32)
    cute_fa.flash_attn_varlen_func(q, k, v, ends, ends, 600, 600, causal=True, **options)


def _cached(seqlen_q, paged, **options):
    q, k, v = _tensors((2, seqlen_q, 4, 64), *2 * [(3, 600, 2, 64)])
    table = torch.tensor([[2], [0]], dtype=torch.int32) if paged else None
    lengths = torch.tensor([500, 600], dtype=torch.int32)
    cute_fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, causal=True, **options)


_PACKED, _PAGED = ("cu_seqlens_q", "cu_seqlens_k"), ("seqused_k", "block_table")


@pytest.mark.parametrize(
    "ready, call",
    [
        ({}, _plain),
        ({"options": ["softcap"]}, lambda: _plain(softcap=20.0)),
        ({"options": ["window_left", "window_right"]}, lambda: _plain(window_size=(9, 3))),
        ({"options": ["sinks", "alibi_slopes"]}, lambda: _plain(sinks=torch.zeros(4), alibi_slopes=torch.zeros(2, 4))),
        ({"options": ["mask"]}, lambda: _plain(attn_bias=torch.ones(600, 600, dtype=torch.bool))),
        ({"options": ["bias"]}, lambda: _plain(attn_bias=torch.zeros(4, 600, 600, dtype=torch.bfloat16))),
        ({"options": ["bias_fp32"]}, lambda: _plain(attn_bias=torch.zeros(600))),
        ({"dtype": FP8, "options": ["descales"]}, lambda: _plain(FP8, v_descale=torch.ones(2))),
        ({"sequences": _PACKED}, _packed),
        ({"sequences": _PACKED, "options": ["softcap"]}, lambda: _packed(softcap=30.0)),
        ({"sequences": ["seqused_k"]}, lambda: _cached(1, False)),
        ({"sequences": _PAGED}, lambda: _cached(1, True)),
        ({"sequences": _PAGED, "options": ["window_left"]}, lambda: _cached(300, True, window_size=(99, 0))),
    ],
)
def test_calls_find_what_was_made_ready(ready, call, monkeypatch):
    made, asked = set(), set()
    monkeypatch.setattr(
        "cute_fa.warming.get_compiled", lambda static, rung, *rest: made.add((static, rung.name, *rest))
    )
    cute_fa.warmup(**{"head_dim": 64, "dtype": torch.bfloat16, "causal": True, "arch": DEFAULT_ARCH} | ready)

    def launch(static, rung, *rest):
        asked.add((static, rung.name, *rest))
        return lambda *_: None

    monkeypatch.setattr("cute_fa.dispatch.emulated_launch", launch)
    for module in ("plan", "varlen"):
        monkeypatch.setattr(f"cute_fa.{module}._plans", {})
    call()
    assert asked and asked <= made


@pytest.mark.parametrize(
    "options, match",
    [
        ({"arch": "sm_90a", "head_dim": 63}, r"head dimension .* that is a multiple of 8 from 8 to 256, got 63"),
        ({"arch": "sm_90a", "dtype": torch.float32}, r"must be torch\.float16, .*, got torch\.float32"),
        ({"arch": "sm_90a", "causal": "yes"}, r"causal must be True or False, got 'yes'"),
        ({"arch": "sm_70"}, r"arch must be one of .*got 'sm_70'"),
        ({"arch": "sm_90a", "device": "cuda"}, r"arch must be None with a device"),
        ({"arch": "sm_90a", "options": "softcap"}, r"options must be some of window_left, .*got 'softcap'"),
        ({"arch": "sm_90a", "options": ["mask", "bias"]}, r"options must name one kind of attn_bias, got mask, bias"),
        ({"arch": "sm_90a", "sequences": ["cu_seqlens"]}, r"sequences must be some of .*got \['cu_seqlens'\]"),
        ({"arch": "sm_90a", "head_dim_v": 7}, r"v must have a head dimension .*got 7"),
        ({"arch": "sm_90a", "kernel": "kernel0"}, r"kernel must be auto or one of"),
        ({"device": "cpu"}, r"device must be a CUDA device, got '?cpu'?"),
    ],
)
def test_misuse_is_named(options, match, compiles):
    with pytest.raises((TypeError, ValueError), match=match):
        cute_fa.warmup(**options)
    assert not compiles


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
