"""cute_fa.warmup compiles what it was asked for, once, and says so."""

from __future__ import annotations

import itertools

import pytest
import torch

import cute_fa
from cute_fa import compiled
from cute_fa.ladder import resolve_kernel


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


@pytest.mark.parametrize(
    "options, match",
    [
        ({"arch": "sm_90a", "head_dim": 63}, r"head dimension .* that is a multiple of 8 from 8 to 256, got 63"),
        ({"arch": "sm_90a", "dtype": torch.float32}, r"must be torch\.float16, .*, got torch\.float32"),
        ({"arch": "sm_90a", "causal": "yes"}, r"causal must be True or False, got 'yes'"),
        ({"arch": "sm_70"}, r"arch must be one of .*got 'sm_70'"),
        ({"arch": "sm_90a", "device": "cuda"}, r"arch must be None with a device"),
        ({"arch": "sm_90a", "kernel": "kernel0"}, r"kernel must be auto or one of"),
        ({"device": "cpu"}, r"device must be a CUDA device, got '?cpu'?"),
    ],
)
def test_misuse_is_named(options, match, compiles):
    with pytest.raises((TypeError, ValueError), match=match):
        cute_fa.warmup(**options)
    assert not compiles


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
