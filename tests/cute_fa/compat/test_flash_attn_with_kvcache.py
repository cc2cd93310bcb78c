"""flash_attn_with_kvcache: the cache is appended to in place, and each member attends to its own tokens."""

from __future__ import annotations

import inspect

import pytest
import torch

import cute_fa
from tests.cute_fa.compat.reference import assert_matches

BATCH, HEADS, HEADS_KV, HEAD_DIM, CAPACITY = 3, 4, 2, 64, 96
LENGTHS = [40, 0, 93]


def draw(generator, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.fixture
def call(generator):
    """Arguments of a call that appends 3 tokens to each member."""
    return {
        "q": draw(generator, BATCH, 3, HEADS, HEAD_DIM),
        "k_cache": draw(generator, BATCH + 1, CAPACITY, HEADS_KV, HEAD_DIM),
        "v_cache": draw(generator, BATCH + 1, CAPACITY, HEADS_KV, HEAD_DIM),
        "k": draw(generator, BATCH, 3, HEADS_KV, HEAD_DIM),
        "v": draw(generator, BATCH, 3, HEADS_KV, HEAD_DIM),
        "cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32),
        "causal": True,
    }


def appended(call, slots=None):
    """What the caches should hold after the call."""
    caches = []
    for cache, new in ((call["k_cache"], call["k"]), (call["v_cache"], call["v"])):
        cache = cache.clone()
        for i, slot in enumerate(slots or range(BATCH)):
            cache[slot, LENGTHS[i] : LENGTHS[i] + 3] = new[i]
        caches.append(cache)
    return caches


def assert_right(call, o, lse, caches, slots=None, starts=(0, 0, 0), q=None):
    q = call["q"] if q is None else q
    for i, slot in enumerate(slots or range(BATCH)):
        k, v = (cache[slot, starts[i] : LENGTHS[i] + 3] for cache in caches)
        assert_matches(q[i], k, v, o[i], lse[i], causal=call["causal"])


def test_signature_is_that_of_flash_attn():
    parameters = inspect.signature(cute_fa.flash_attn_with_kvcache).parameters.values()
    empty = inspect.Parameter.empty
    assert [(one.name, one.default) for one in parameters] == [
        *((name, empty) for name in ("q", "k_cache", "v_cache")),
        *((name, None) for name in ("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx")),
        *((name, None) for name in ("cache_leftpad", "block_table", "softmax_scale")),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("rotary_interleaved", True),
        ("alibi_slopes", None),
        ("num_splits", 0),
        ("return_softmax_lse", False),
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_appends_and_attends(call, causal):
    call["causal"] = causal
    expected = appended(call)
    o, lse = cute_fa.flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert torch.equal(call["k_cache"], expected[0]) and torch.equal(call["v_cache"], expected[1])
    assert_right(call, o, lse, expected)
    assert lse.shape == (BATCH, HEADS, 3) and lse.is_contiguous()


def test_members_of_the_cache_in_another_order(call):
    slots = [3, 0, 1]
    expected = appended(call, slots)
    call["cache_batch_idx"] = torch.tensor(slots, dtype=torch.int32)
    o, lse = cute_fa.flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert torch.equal(call["k_cache"], expected[0]) and torch.equal(call["v_cache"], expected[1])
    assert_right(call, o, lse, expected, slots)


def test_tokens_before_the_left_padding_do_not_count(call):
    expected = appended(call)
    starts = [7, 0, 90]
    call["k_cache"][0, :7], call["v_cache"][0, :7] = torch.nan, torch.nan
    call["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32)
    o, lse = cute_fa.flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert_right(call, o, lse, expected, starts=starts)


def test_pages_give_the_same_and_are_written(call, generator):
    page_size, per_row = 32, 3
    table = torch.randperm(BATCH * per_row + 2, generator=generator)[: BATCH * per_row].view(BATCH, per_row).int()
    paged = {**call, "block_table": table}
    for name in ("k_cache", "v_cache"):
        pages = torch.full((BATCH * per_row + 2, page_size, HEADS_KV, HEAD_DIM), 7.0, dtype=torch.bfloat16)
        pages[table.long()] = call[name][:BATCH].view(BATCH, per_row, page_size, HEADS_KV, HEAD_DIM)
        paged[name] = pages
    o, lse = cute_fa.flash_attn_with_kvcache(**paged, return_softmax_lse=True)
    expected, expected_lse = cute_fa.flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(paged[name][table.long()].flatten(1, 2), call[name][:BATCH])
        unused = set(range(BATCH * per_row + 2)) - set(table.flatten().tolist())
        assert (paged[name][sorted(unused)] == 7.0).all()


@pytest.mark.parametrize("seqlens", [None, CAPACITY, 50])
def test_without_new_tokens_and_with_one_length(call, seqlens):
    q, caches = call["q"], (call["k_cache"], call["v_cache"])
    before = [cache.clone() for cache in caches]
    o, lse = cute_fa.flash_attn_with_kvcache(q, *caches, cache_seqlens=seqlens, causal=True, return_softmax_lse=True)
    for i in range(BATCH):
        k, v = (cache[i, : seqlens or CAPACITY] for cache in caches)
        assert_matches(q[i], k, v, o[i], lse[i], causal=True)
    assert all(torch.equal(one, other) for one, other in zip(caches, before, strict=True))


def turned(tokens, cos, sin, positions, interleaved):
    """Each pair as a complex number, times exp(i angle), in float64."""
    half = cos.shape[1]
    angle = torch.complex(cos.double(), sin.double())[positions][:, None]
    rotating, rest = tokens[..., : 2 * half].double(), tokens[..., 2 * half :]
    pairs = rotating.unflatten(-1, (half, 2)) if interleaved else rotating.unflatten(-1, (2, half)).transpose(-1, -2)
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    return torch.cat((pairs.flatten(-2).to(tokens.dtype), rest), -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [64, 32])
def test_rotary(call, interleaved, causal, width):
    angles = torch.arange(CAPACITY)[:, None] / 10000 ** (torch.arange(width // 2) / (width // 2))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    call.update(causal=causal, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    q = call["q"].clone()
    new_k = call["k"].clone()
    for i, length in enumerate(LENGTHS):
        new_k[i] = turned(call["k"][i], cos, sin, torch.arange(length, length + 3), interleaved)
        at = torch.arange(length, length + 3) if causal else torch.full((3,), length)
        q[i] = turned(call["q"][i], cos, sin, at, interleaved)
    expected = appended({**call, "k": new_k})
    o, lse = cute_fa.flash_attn_with_kvcache(**call, return_softmax_lse=True)
    assert (call["k_cache"].float() - expected[0].float()).abs().max() <= 2**-6
    assert torch.equal(call["v_cache"], expected[1])
    torch.testing.assert_close(lse, torch.stack([
        cute_fa.forward(q[i : i + 1], *(cache[i : i + 1, : LENGTHS[i] + 3] for cache in expected), causal=causal,
                        return_lse=True)[1][0] for i in range(BATCH)]), atol=0.02, rtol=0)  # fmt: skip
    assert_right(call, o, lse, (call["k_cache"], expected[1]), q=q)


@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 100])
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (80, 128)])
def test_pages_of_any_size_in_any_order(page_size, head_dim, head_dim_v, generator):
    lengths, seqlen_q = [130, 1, 0, 77], 2
    per_row = -(-max(lengths) // page_size)
    num_blocks = 4 * per_row + 3
    table = torch.randperm(num_blocks, generator=generator)[: 4 * per_row].view(4, per_row).int()
    caches, tokens = [], []
    for width in (head_dim, head_dim_v):
        cache = torch.full((num_blocks, page_size, HEADS_KV, width), torch.nan, dtype=torch.bfloat16)
        rows = [draw(generator, length, HEADS_KV, width) for length in lengths]
        for i, of_member in enumerate(rows):
            at = torch.arange(len(of_member))
            cache[table[i].long()[at // page_size], at % page_size] = of_member
        caches.append(cache)
        tokens.append(rows)
    q = draw(generator, 4, seqlen_q, HEADS, head_dim)
    used = torch.tensor(lengths, dtype=torch.int32)
    options = {"cache_seqlens": used, "block_table": table, "causal": True}
    o, lse = cute_fa.flash_attn_with_kvcache(q, *caches, **options, return_softmax_lse=True)
    for i in range(4):
        assert_matches(q[i], tokens[0][i], tokens[1][i], o[i], lse[i], causal=True)


@pytest.mark.parametrize("paged", [False, True])
def test_splits_that_some_members_do_not_reach(paged, generator):
    """Decoding from a long cache: the number of splits is the longest member's."""
    lengths, capacity = [1500, 0, 3, 700], 1536
    caches = [draw(generator, 4, capacity, HEADS_KV, HEAD_DIM) for _ in range(2)]
    for cache in caches:
        for i, length in enumerate(lengths):
            cache[i, length:] = torch.nan
    q, used = draw(generator, 4, 1, HEADS, HEAD_DIM), torch.tensor(lengths, dtype=torch.int32)
    table, given = None, caches
    if paged:
        table = torch.randperm(4 * 16, generator=generator).view(4, 16).int()
        given = [torch.empty(64, 96, HEADS_KV, HEAD_DIM, dtype=torch.bfloat16) for _ in caches]
        for pages, cache in zip(given, caches, strict=True):
            pages[table.long()] = cache.view(4, 16, 96, HEADS_KV, HEAD_DIM)
    options = {"cache_seqlens": used, "block_table": table}
    o, lse = cute_fa.flash_attn_with_kvcache(q, *given, **options, return_softmax_lse=True)
    for i, length in enumerate(lengths):
        assert_matches(q[i], caches[0][i, :length], caches[1][i, :length], o[i], lse[i])


def test_one_launch_whatever_the_lengths(call, monkeypatch):
    from cute_fa.emulator import emulated_launch

    launches = []

    def counting(*args):
        launch = emulated_launch(*args)
        return lambda *arguments: launches.append(arguments) or launch(*arguments)

    monkeypatch.setattr("cute_fa.dispatch.emulated_launch", counting)
    monkeypatch.setattr("cute_fa.varlen._plans", {})
    monkeypatch.setattr("cute_fa.plan._plans", {})
    cute_fa.flash_attn_with_kvcache(**call)
    assert len(launches) == 1
    cute_fa.flash_attn_with_kvcache(call["q"], call["k_cache"], call["v_cache"], cache_seqlens=50)
    assert len(launches) == 2


def test_compiles_without_breaks(call):
    torch._dynamo.reset()

    def decode(q, k_cache, v_cache, k, v, seqlens):
        o = cute_fa.flash_attn_with_kvcache(q * 2, k_cache, v_cache, k, v, cache_seqlens=seqlens, causal=True)
        return o + 1

    names = ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens")
    copies = [call[name].clone() for name in names]
    expected = decode(*copies)
    assert torch.equal(
        torch.compile(decode, backend="eager", fullgraph=True)(*(call[name] for name in names)), expected
    )
    assert torch.equal(call["k_cache"], copies[1])


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "change, exception, match",
    [
        ({"q": lambda a: a[0]}, ValueError, r"q must have 4 dimensions .*got 3"),
        ({"q": lambda a: a.to(torch.float8_e4m3fn)}, TypeError, r"q must be torch\.float16 or .* beside a cache, got"),
        ({"q": lambda a: a.float()}, TypeError, r"k_cache must be torch\.float32, got torch\.bfloat16|q must be torch"),
        ({"v_cache": lambda a: a[:, :-1]}, ValueError, r"v_cache must have the shape \(4, 96, 2, any\), got \(4, 95"),
        ({"k": lambda a: None}, ValueError, r"k must be given with v, got None"),
        ({"v": lambda a: a[:, :1]}, ValueError, r"v must have the shape \(3, 3, 2, 64\)"),
        ({"k": lambda a: a[:2]}, ValueError, r"k must have the shape \(3, any, 2, 64\), got \(2, 3"),
        ({"cache_seqlens": lambda a: None}, ValueError, r"cache_seqlens must be given with k and v"),
        ({"cache_seqlens": lambda a: a + 1}, ValueError, r"cache_seqlens must be from 0 to 93 .*got 94"),
        ({"cache_seqlens": lambda a: a - 1}, ValueError, r"cache_seqlens must be from 0 to 93 .*got -1"),
        ({"cache_seqlens": lambda a: a.long()}, TypeError, r"cache_seqlens must be torch\.int32, got torch\.int64"),
        ({"cache_seqlens": lambda a: a[:2]}, ValueError, r"cache_seqlens must have the shape \(3\), got \(2,\)"),
        ({"cache_seqlens": lambda a: 2.0}, TypeError, r"cache_seqlens must be an integer, got float"),
        ({"cache_batch_idx": lambda a: ints(0, 1, 4)}, ValueError, r"cache_batch_idx must be from 0 to 3"),
        ({"cache_batch_idx": lambda a: [0, 1, 2]}, TypeError, r"cache_batch_idx must be a torch\.Tensor, got list"),
        ({"cache_leftpad": lambda a: ints(0, 4, 0)}, ValueError, r"cache_leftpad must be at most .*\(3\)"),
        ({"block_table": lambda a: torch.zeros(3, 0).int()}, ValueError, r"k must have at most 0 tokens"),
        ({"block_table": lambda a: ints(4, 4, 4)[:, None]}, ValueError,
         r"block_table must hold blocks from 0 to 3, got 4"),
        ({"rotary_cos": lambda a: torch.ones(96, 32).bfloat16()}, TypeError,
         r"rotary_sin must be a torch\.Tensor, got NoneType"),
        ({"num_splits": lambda a: 2}, NotImplementedError, r"num_splits must be 0 or 1.*got 2"),
        ({"softcap": lambda a: -5.0}, ValueError, r"softcap must be 0 \(off\), or from"),
        ({"window_size": lambda a: (5,)}, TypeError, r"window_size must be a pair"),
        ({"alibi_slopes": lambda a: torch.ones(5)}, ValueError, r"alibi_slopes must have the shape .*got \(5,\)"),
        ({"causal": lambda a: 1}, TypeError, r"causal must be True or False, got 1"),
        ({"rotary_interleaved": lambda a: None}, TypeError, r"rotary_interleaved must be True or False"),
        ({"softmax_scale": lambda a: 0.0}, ValueError, r"softmax_scale must be greater than 0"),
    ],
)  # fmt: skip
def test_misuse_is_refused_by_name_before_anything_is_written(call, change, exception, match):
    for name, wrong in change.items():
        call[name] = wrong(call.get(name))
    before = [call[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(exception, match=match):
        cute_fa.flash_attn_with_kvcache(**call)
    after = [call[name] for name in ("k_cache", "v_cache")]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ["window", "softcap", "alibi"])
def test_options(call, name, generator):
    options = {"window": {"window_size": (20, 0)}, "softcap": {"softcap": 5.0}, "alibi": {}}[name]
    slopes = torch.rand(BATCH, HEADS, generator=generator) if name == "alibi" else None
    caches = appended(call)
    o, lse = cute_fa.flash_attn_with_kvcache(**call, **options, alibi_slopes=slopes, return_softmax_lse=True)
    for i in range(BATCH):
        k, v = (cache[i, : LENGTHS[i] + 3] for cache in caches)
        own = {} if slopes is None else {"slopes": slopes[i]}
        assert_matches(call["q"][i], k, v, o[i], lse[i], causal=True, **options, **own)


def test_rotary_misuse(call):
    good = torch.ones(CAPACITY, 32).bfloat16()
    for wrong, match in [
        (good[:95], r"must have a row for each of 96 positions, got 95"),
        (good.float(), r"rotary_cos must be torch\.bfloat16, got torch\.float32"),
        (good[:, :12], r"rotary_cos must have a multiple of 8 columns, at most half"),
    ]:
        with pytest.raises((TypeError, ValueError), match=match):
            cute_fa.flash_attn_with_kvcache(**call, rotary_cos=wrong, rotary_sin=wrong)
    call.update(k=None, v=None)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin must be None without k and v"):
        cute_fa.flash_attn_with_kvcache(**call, rotary_cos=good, rotary_sin=good)
