"""Many threads at once, each with inputs of its own: the compile cache, the plans and the emulator are shared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

import cute_fa
from cute_fa import compiled, plan
from tests.cases import Case

THREADS = 32


def test_32_threads_get_their_own_results(generator, monkeypatch):
    """The plans are empty at the start and thrown away on the way, so that threads make the same ones at once."""
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_MAX_PLANS", 5)
    cases = [Case(20 + i % 7, 40 + i % 5, 64, causal=bool(i % 2), num_heads=1, num_heads_kv=1) for i in range(THREADS)]
    inputs = [case.tensors("cpu", generator) for case in cases]
    expected = [cute_fa.forward(*tensors, causal=case.causal) for case, tensors in zip(cases, inputs, strict=True)]
    barrier = Barrier(THREADS)

    def work(i: int) -> bool:
        barrier.wait()
        o, _ = cute_fa.forward(*inputs[i], causal=cases[i].causal, return_lse=True)
        again = cute_fa.forward(*inputs[i], causal=cases[i].causal, out=torch.empty_like(o))
        return torch.equal(o, expected[i]) and torch.equal(again, expected[i])

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS)))


def test_threads_compile_each_kernel_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path))
    calls = []
    real = compiled._compile
    monkeypatch.setattr(compiled, "_in_memory", {})

    def counted(static, rung, config, *rest):
        calls.append((rung.name, str(config)))
        return real(static, rung, config, *rest)

    monkeypatch.setattr(compiled, "_compile", counted)
    options = {"head_dim": 64, "dtype": torch.float16, "causal": True, "return_lse": False, "arch": "sm_90a"}
    with ThreadPoolExecutor(8) as pool:
        warmed = list(pool.map(lambda _: cute_fa.warmup(**options), range(8)))
    ready = {(entry.kernel, entry.config) for entry in warmed[0]}
    assert len(warmed) == 8 and ready
    assert sorted(calls) == sorted(ready)


def test_inference_mode(generator):
    q, k, v = Case(20, 30, 64).tensors("cpu", generator)
    expected = cute_fa.forward(q, k, v)
    with torch.inference_mode():
        o = cute_fa.forward(q.clone(), k, v)
        out = cute_fa.forward(q, k, v, out=torch.empty_like(q))
    assert o.is_inference() and torch.equal(o, expected) and torch.equal(out, expected)
    assert torch.equal(cute_fa.forward(o, k, v), cute_fa.forward(expected, k, v))
