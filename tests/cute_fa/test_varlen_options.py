"""Score options beside packed sequences, caches and pages: the same as each member by itself."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from cute_fa.problem import ScoreOptions
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


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (40, 72)])
@pytest.mark.parametrize("causal, window", [(True, (30, -1)), (False, (20, 9)), (False, (-1, 0))])
def test_packed_sequences(causal, window, head_dim, head_dim_v, generator):
    """One has no queries, one has no keys, and rows lie behind the last."""
    (q, k, v), lengths = packed(generator, head_dim, head_dim_v)
    slopes, sinks = torch.rand(4, HEADS, generator=generator), torch.randn(HEADS, generator=generator)
    options = {"window_size": window, "softcap": 2.5, "sinks": sinks}
    given = ScoreOptions(**options, alibi_slopes=slopes)
    o, lse = forward_varlen(q, k, v, **lengths, causal=causal, options=given)
    for i, ((a, b), (c, d)) in enumerate(zip(pairwise(CU_Q), pairwise(CU_K), strict=True)):
        member = q[None, a:b], k[None, c:d], v[None, c:d]
        assert_right(o[None, a:b], lse[None, :, a:b], *member, causal=causal, alibi_slopes=slopes[i], **options)
    assert not o[203:].any() and (lse[:, 203:] == -torch.inf).all()


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
