"""Score options beside packed sequences, caches and pages: the same as each member by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cute_fa.ladder import KERNELS, select
from cute_fa.problem import AttentionProblem, ScoreOptions
from cute_fa.reference import attention_reference
from cute_fa.varlen import forward_varlen

HEADS, HEADS_KV = 4, 2
CU_Q, CU_K = (torch.tensor(bounds, dtype=torch.int32) for bounds in ((0, 70, 70, 200, 203), (0, 90, 130, 300, 300)))


def draw(generator, *shape):
    return torch.randn(shape, generator=generator).bfloat16()


def assert_right(o, lse, q, k, v, **options):
    o_ref, lse_ref = attention_reference(q, k, v, **options)
    torch.testing.assert_close(o.float(), o_ref, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, lse_ref, atol=1e-4, rtol=1e-4)


def packed(generator, head_dim=64, head_dim_v=64):
    q, k = draw(generator, 210, HEADS, head_dim), draw(generator, 310, HEADS_KV, head_dim)
    lengths = {"max_seqlen_q": 130, "max_seqlen_k": 170, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
    return (q, k, draw(generator, 310, HEADS_KV, head_dim_v)), lengths


@pytest.fixture
def on_hopper(monkeypatch):
    """What runs on the CPU is the emulated H200, and is forgotten then."""
    monkeypatch.setattr("cute_fa.dispatch.DEFAULT_ARCH", "sm_90a")
    monkeypatch.setattr("cute_fa.varlen._plans", {})


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (40, 72)])
@pytest.mark.parametrize("causal, window", [(True, (30, -1)), (False, (20, 9)), (False, (-1, 0))])
def test_packed_sequences(causal, window, head_dim, head_dim_v, generator):
    check_packed(generator, causal, window, head_dim, head_dim_v)


@pytest.mark.parametrize(
    "kernel, causal, window, head_dim, head_dim_v",
    [("kernel8", False, (20, 9), 40, 72), ("kernel11", True, (30, -1), 64, 64)],
)
def test_packed_sequences_on_hopper(kernel, causal, window, head_dim, head_dim_v, on_hopper, generator):
    check_packed(generator, causal, window, head_dim, head_dim_v, kernel)


def check_packed(generator, causal, window, head_dim, head_dim_v, kernel="auto"):
    """One has no queries, one has no keys, and rows lie behind the last, where nothing is a number."""
    (q, k, v), lengths = packed(generator, head_dim, head_dim_v)
    q[203:], k[300:], v[300:] = torch.nan, torch.nan, torch.inf
    slopes, sinks = torch.rand(4, HEADS, generator=generator), torch.randn(HEADS, generator=generator)
    options = {"window_size": window, "softcap": 2.5, "sinks": sinks}
    given = ScoreOptions(**options, alibi_slopes=slopes)
    o, lse = forward_varlen(q, k, v, **lengths, causal=causal, options=given, kernel=kernel)
    for i, ((a, b), (c, d)) in enumerate(zip(pairwise(CU_Q), pairwise(CU_K), strict=True)):
        member = q[None, a:b], k[None, c:d], v[None, c:d]
        assert_right(o[None, a:b], lse[None, :, a:b], *member, causal=causal, alibi_slopes=slopes[i], **options)
    assert not o[203:].any() and (lse[:, 203:] == -torch.inf).all()


def test_packed_sequences_tile_after_tile(on_hopper, monkeypatch, generator):
    """Two CTAs for all tiles: the step from one member's tile to another's, and the zeroing of V behind a member."""

    def select_two_ctas(*args):
        rung, config = select(*args)
        return rung, replace(config, max_ctas=2)

    monkeypatch.setattr("cute_fa.dispatch.select", select_two_ctas)
    check_packed(generator, True, (-1, -1), 64, 64, "kernel11")


def test_caches_on_hopper(on_hopper, generator):
    """Members in slots of their own, that begin and end where they do; what lies around is no number."""
    q = draw(generator, 3, 70, HEADS, 64)
    k, v = (torch.full((5, 200, HEADS_KV, 64), torch.nan).bfloat16() for _ in range(2))
    slots, starts, ends = [4, 0, 2], [3, 64, 7], [131, 64, 200]
    for slot, start, end in zip(slots, starts, ends, strict=True):
        for cache in (k, v):
            cache[slot, start:end] = draw(generator, end - start, HEADS_KV, 64)
    names = ("cache_batch_idx", "leftpad_k", "seqused_k")
    given = {name: torch.tensor(t, dtype=torch.int32) for name, t in zip(names, (slots, starts, ends), strict=True)}
    o, lse = forward_varlen(q, k, v, max_seqlen_q=70, max_seqlen_k=200, **given, causal=True, kernel="kernel11")
    for i, (slot, start, end) in enumerate(zip(slots, starts, ends, strict=True)):
        if start == end:
            assert not o[i].any() and (lse[i] == -torch.inf).all()
            continue
        keys = (cache[slot : slot + 1, start:end] for cache in (k, v))
        assert_right(o[i : i + 1], lse[i : i + 1], q[i : i + 1], *keys, causal=True)


def test_many_members_on_hopper(on_hopper, generator):
    """More members than a warp has lanes, most of them without a query: every tile is found, none twice."""
    lengths = torch.tensor([0] * 31 + [1, 130, 0, 5] + [0] * 30 + [66], dtype=torch.int32)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    q, k, v = (draw(generator, int(bounds[-1]), heads, 64) for heads in (2, 1, 1))
    both = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 130, "max_seqlen_k": 130}
    o, lse = forward_varlen(q, k, v, **both, causal=True, kernel="kernel8")
    for a, b in pairwise(bounds.tolist()):
        if a < b:
            member = q[None, a:b], k[None, a:b], v[None, a:b]
            assert_right(o[None, a:b], lse[None, :, a:b], *member, causal=True)


def test_pages_are_left_to_the_kernel_that_has_them():
    for sequences, name in ((("cu_seqlens_q", "cu_seqlens_k"), "kernel11"), (("block_table", "seqused_k"), "kernel6")):
        q = torch.empty(1, 300, 1, 64, dtype=torch.bfloat16, device="meta")
        problem = replace(AttentionProblem.from_tensors(q, q, q), sequences=sequences)
        assert select(problem, "sm_90a")[0].name == name
        with pytest.raises(ValueError, match=r"kernel 'kernel11' does not take keys in pages"):
            KERNELS["kernel11"].check(replace(problem.static, sequences=("block_table",)), None, "sm_90a")


def test_pages(generator):
    q = draw(generator, 3, 5, HEADS, 64)
    k, v = (draw(generator, 12, 16, HEADS_KV, 64) for _ in range(2))
    table = torch.randperm(12, generator=generator).int().view(3, 4)
    used = torch.tensor([64, 3, 40], dtype=torch.int32)
    options = {"window_size": (10, -1), "sinks": torch.randn(HEADS, generator=generator)}
    lengths = {"max_seqlen_q": 5, "max_seqlen_k": 64, "seqused_k": used, "block_table": table}
    o, lse = forward_varlen(q, k, v, **lengths, causal=True, options=ScoreOptions(**options))
    for i in range(3):
        keys = (cache[table[i].long()].reshape(1, 64, HEADS_KV, 64)[:, : used[i]] for cache in (k, v))
        assert_right(o[i : i + 1], lse[i : i + 1], q[i : i + 1], *keys, causal=True, **options)


def test_no_key_at_all_leaves_the_sinks(generator):
    (q, k, v), lengths = packed(generator)
    sinks = torch.randn(HEADS, generator=generator)
    lengths |= {"max_seqlen_k": 0, "cu_seqlens_k": CU_K * 0}
    o, lse = forward_varlen(q, k[:0], v[:0], **lengths, options=ScoreOptions(sinks=sinks))
    assert not o.any() and torch.equal(lse[:, :203], sinks[:, None].expand(-1, 203))
    assert (lse[:, 203:] == -torch.inf).all()


def test_compiles_without_breaks(generator):
    (q, k, v), lengths = packed(generator)

    def call(q, sinks):
        return forward_varlen(q, k, v, **lengths, options=ScoreOptions(window_size=(20, 9), sinks=sinks))[0]

    sinks = torch.randn(HEADS, generator=generator)
    assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(q, sinks), call(q, sinks))


@pytest.mark.parametrize(
    "options, kernel, exception, match",
    [
        ({"attn_bias": torch.zeros(1)}, "auto", NotImplementedError, r"attn_bias must be None for members"),
        ({"softcap": 2.0}, "kernel7", ValueError, r"kernel .kernel7. does not take packed sequences"),
        ({"alibi_slopes": torch.zeros(2, HEADS)}, "auto", ValueError, r"alibi_slopes must have .*got \(2, 4\)"),
    ],
)
def test_what_is_not_served_is_refused_by_name(options, kernel, exception, match, generator):
    tensors, lengths = packed(generator)
    with pytest.raises(exception, match=match):
        forward_varlen(*tensors, **lengths, options=ScoreOptions(**options), kernel=kernel)


INT = {"dtype": torch.int32}


@pytest.mark.parametrize(
    "change, match",
    [
        ({"seqused_k": torch.zeros(4, **INT)}, "seqused_k must be None beside cu_seqlens_k"),
        ({"leftpad_k": torch.zeros(4, **INT)}, "leftpad_k must be None beside cu_seqlens_k"),
        ({"cache_batch_idx": torch.zeros(4, **INT)}, "cache_batch_idx must be None beside cu_seqlens_k"),
        (
            {"cu_seqlens_q": torch.stack([CU_Q, CU_Q], 1)[:, 0]},
            r"cu_seqlens_q must have a contiguous .* \(2,\)",
        ),
        ({"max_seqlen_q": -1}, r"max_seqlen_q must be from 0 to 2\*\*30, got -1"),
        ({"max_seqlen_k": 2**31}, r"max_seqlen_k must be from 0 to 2\*\*30, got 2147483648"),
        ({"max_seqlen_k": 169}, r"max_seqlen_k must be at least the longest sequence of cu_seqlens_k \(170\), got 169"),
    ],
    ids=str,
)
def test_misuse_of_packed_sequences_is_refused_by_name(change, match, generator):
    (q, k, v), lengths = packed(generator)
    with pytest.raises(ValueError, match=match):
        forward_varlen(q, k, v, **lengths | change)


@pytest.mark.parametrize(
    "change, match",
    [
        ({}, r"k must have a slice for each of 3 members, got 2"),
        ({"cache_batch_idx": torch.tensor([0, 1, 1], **INT), "max_seqlen_k": 5}, r"max_seqlen_k must .*\(40\), got 5"),
        ({"cache_batch_idx": torch.tensor([0, 1, 1], **INT), "seqused_k": None, "max_seqlen_k": 39},
         r"max_seqlen_k must be at least the keys of a slice \(40\), got 39"),
        ({"block_table": torch.zeros(3, 1, **INT), "cache_batch_idx": torch.tensor([0, 1, 1], **INT)},
         "cache_batch_idx must be None beside block_table"),
        ({"block_table": torch.zeros(2, 3, **INT).T}, r"block_table must have a contiguous last dimension"),
        ({"cache_batch_idx": torch.zeros(6, **INT)[::2]}, r"cache_batch_idx must have a contiguous .* strides \(2,\)"),
        ({"seqused_k": torch.ones(1, **INT).expand(3)}, r"seqused_k must have a contiguous .* strides \(0,\)"),
    ],
    ids=str,
)  # fmt: skip
def test_misuse_of_caches_is_refused_by_name(change, match, generator):
    q, k = draw(generator, 3, 20, HEADS, 64), draw(generator, 2, 40, HEADS_KV, 64)
    given = {"seqused_k": torch.full((3,), 40, dtype=torch.int32), "max_seqlen_q": 20, "max_seqlen_k": 40} | change
    with pytest.raises(ValueError, match=match):
        forward_varlen(q, k, k.clone(), **given)
