"""flash_attn_varlen_func: each sequence as if it were alone."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

import cute_fa
from tests.cute_fa.compat.reference import assert_matches

LENGTHS = [(5, 9), (0, 7), (70, 70), (3, 0), (66, 1), (1, 80)]


def packed(lengths, generator, *, head_dim=64, heads=4, heads_kv=2, dtype=torch.bfloat16, extra=0):
    def draw(total, num_heads):
        return torch.randn(total + extra, num_heads, head_dim, generator=generator).to(dtype)

    def bounds(which):
        return torch.tensor([0, *(pair[which] for pair in lengths)]).cumsum(0).int()

    cu_q, cu_k = bounds(0), bounds(1)
    q, k, v = draw(int(cu_q[-1]), heads), draw(int(cu_k[-1]), heads_kv), draw(int(cu_k[-1]), heads_kv)
    return q, k, v, cu_q, cu_k, max(pair[0] for pair in lengths), max(pair[1] for pair in lengths)


def test_signature_is_that_of_flash_attn():
    parameters = inspect.signature(cute_fa.flash_attn_varlen_func).parameters
    off = {"window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "deterministic": False}
    tail = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, **off, "return_attn_probs": False}
    tail["block_table"] = None
    head = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert list(parameters) == [*head, *tail]
    assert {name: parameters[name].default for name in tail} == tail


@pytest.mark.parametrize("dtype, head_dim", [(torch.bfloat16, 64), (torch.float16, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_each_sequence_is_right(dtype, head_dim, causal, generator):
    q, k, v, cu_q, cu_k, *longest = packed(LENGTHS, generator, dtype=dtype, head_dim=head_dim)
    o, lse, probs = cute_fa.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, *longest, causal=causal, softmax_scale=0.2, return_attn_probs=True
    )
    assert lse.shape == (4, q.shape[0]) and probs.numel() == 0
    for i in range(len(LENGTHS)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        assert_matches(q[rows], k[keys], v[keys], o[rows], lse[:, rows], causal=causal, softmax_scale=0.2)
    assert torch.equal(cute_fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, 0.0, 0.2, causal), o)


@pytest.mark.parametrize(
    "options", [{"window_size": (20, 5)}, {"softcap": 5.0, "causal": True}, {"slopes": True}], ids=str
)
def test_options(options, generator):
    q, k, v, cu_q, cu_k, *longest = packed(LENGTHS, generator)
    slopes = torch.rand(len(LENGTHS), 4, generator=generator) if options.pop("slopes", False) else None
    o, lse, _ = cute_fa.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, *longest, alibi_slopes=slopes, return_attn_probs=True, **options
    )
    for i in range(len(LENGTHS)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        own = {} if slopes is None else {"slopes": slopes[i]}
        assert_matches(q[rows], k[keys], v[keys], o[rows], lse[:, rows], **options, **own)


def test_sequences_do_not_see_one_another(generator):
    q, k, v, cu_q, cu_k, *longest = packed([(9, 9), (9, 9)], generator)
    before = cute_fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest)
    k[9:], v[9:] = torch.nan, torch.nan
    assert torch.equal(cute_fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest)[:9], before[:9])


def test_tokens_behind_the_last_sequence_are_zero(generator):
    q, k, v, cu_q, cu_k, *longest = packed([(9, 9)], generator, extra=3)
    o, lse, _ = cute_fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, return_attn_probs=True)
    assert o[:9].any() and not o[9:].any() and (lse[:, 9:] == -torch.inf).all()


def test_no_sequence_at_all(generator):
    q, k, v, *_ = packed([(0, 0)], generator)
    none = torch.zeros(1, dtype=torch.int32)
    assert cute_fa.flash_attn_varlen_func(q, k, v, none, none, 0, 0).shape == (0, 4, 64)


def test_pages_give_the_same(generator):
    q, k, v, cu_q, cu_k, *longest = packed(LENGTHS, generator)
    page_size, per_row = 16, 5
    order = torch.randperm(len(LENGTHS) * per_row, generator=generator).int()
    table = order.view(len(LENGTHS), per_row)
    pages = [torch.full((len(order), page_size, 2, 64), torch.nan, dtype=q.dtype) for _ in range(2)]
    for i, (_, length) in enumerate(LENGTHS):
        for j in range(length):
            for cache, packed_tokens in zip(pages, (k, v), strict=True):
                cache[table[i, j // page_size], j % page_size] = packed_tokens[cu_k[i] + j]
    paged = cute_fa.flash_attn_varlen_func(q, *pages, cu_q, cu_k, *longest, causal=True, block_table=table)
    assert torch.equal(paged, cute_fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, causal=True))
    table[2, 4] = len(order)
    with pytest.raises(ValueError, match=r"block_table must hold blocks from 0 to 29, got 30"):
        cute_fa.flash_attn_varlen_func(q, *pages, cu_q, cu_k, *longest, block_table=table)


@pytest.mark.parametrize(
    "change, exception, match",
    [
        ({"q": lambda a: a[None]}, ValueError, r"q must have 3 dimensions \(tokens, heads, head_dim\), got 4"),
        ({"v": lambda a: [a]}, TypeError, r"v must be a torch\.Tensor, got list"),
        ({"v": lambda a: a[1:]}, ValueError, r"v must have the shape of k"),
        ({"k": lambda a: a.half()}, TypeError, r"k must have the dtype of q"),
        ({"cu_seqlens_q": lambda a: a.long()}, TypeError, r"cu_seqlens_q must be torch\.int32, got torch\.int64"),
        ({"cu_seqlens_q": lambda a: a + 1}, ValueError, r"cu_seqlens_q must begin with 0 and never fall, got \[1"),
        ({"cu_seqlens_k": lambda a: a.flip(0)}, ValueError, r"cu_seqlens_k must begin with 0 and never fall"),
        (
            {"cu_seqlens_k": lambda a: a[:-1]},
            ValueError,
            r"cu_seqlens_k must have as many entries as cu_seqlens_q \(3\)",
        ),
        ({"cu_seqlens_k": lambda a: a * 2}, ValueError, r"max_seqlen_k must be at least the longest"),
        ({"cu_seqlens_q": lambda a: a[None]}, ValueError, r"cu_seqlens_q must have the shape \(any\)"),
        ({"cu_seqlens_q": lambda a: a.to("meta")}, ValueError, r"cu_seqlens_q must be on the device of q"),
        ({"max_seqlen_q": lambda a: a - 1}, ValueError, r"max_seqlen_q must be at least the longest .*\(9\), got 8"),
        ({"max_seqlen_k": lambda a: 9.0}, TypeError, r"max_seqlen_k must be an integer, got float"),
        ({"max_seqlen_k": lambda a: 99, "cu_seqlens_k": lambda a: a * 2}, ValueError, r"cu_seqlens_k must end at the"),
        ({"dropout_p": lambda a: 0.5}, NotImplementedError, r"dropout_p must be 0\.0"),
        ({"window_size": lambda a: (2, -2)}, ValueError, r"window_size must hold lengths of 0 or more"),
        ({"softcap": lambda a: 1e9}, ValueError, r"softcap must be 0 \(off\), or from"),
        ({"alibi_slopes": lambda a: torch.ones(3, 4)}, ValueError, r"alibi_slopes must have .*\(2, 4\), got \(3, 4\)"),
        ({"softmax_scale": lambda a: -1.0}, ValueError, r"softmax_scale must be greater than 0"),
        ({"block_table": lambda a: [1]}, ValueError, r"k must have 4 dimensions \(blocks, page_size"),
        ({"q": lambda a: a.requires_grad_()}, ValueError, r"q must not require gradients"),
    ],
)
def test_misuse_is_refused_by_name_before_a_launch(change, exception, match, generator, monkeypatch):
    launches = []
    monkeypatch.setattr("cute_fa.dispatch.emulated_launch", lambda *args: lambda *call: launches.append(call))
    names = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    arguments = dict(zip(names, packed([(9, 9), (5, 3)], generator), strict=True))
    for name, wrong in change.items():
        arguments[name] = wrong(arguments.get(name))
    with pytest.raises(exception, match=match):
        cute_fa.flash_attn_varlen_func(**arguments)
    assert not launches


def test_compiles_without_breaks_for_any_lengths(generator):
    torch._dynamo.reset()

    def call(q, *others):
        return cute_fa.flash_attn_varlen_func(q * 2, *others, causal=True) + 1

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, [(30, 40), (1, 90), (0, 5)]):
        arguments = packed(lengths, generator)
        assert torch.equal(compiled(*arguments), call(*arguments))


def test_the_operator_is_one_of_pytorchs(generator):
    q, k, v, cu_q, cu_k, max_q, max_k = packed([(9, 20), (3, 3)], generator)
    arguments = (q, k, v, cu_q, cu_k, None, None, None, None, max_q, max_k, True, None, "auto")
    torch.library.opcheck(torch.ops.cute_fa.forward_varlen.default, arguments)


def test_one_launch_for_all_sequences(generator, monkeypatch):
    from cute_fa.emulator import emulated_launch

    launches = []

    def counting(*args):
        launch = emulated_launch(*args)
        return lambda *call: launches.append(call) or launch(*call)

    monkeypatch.setattr("cute_fa.dispatch.emulated_launch", counting)
    arguments = packed([(17, 33), (0, 4), (66, 0), (5, 80)], generator)
    cute_fa.flash_attn_varlen_func(*arguments, causal=True)
    assert len(launches) == 1


def test_grouped_heads_and_head_dims(generator):
    lengths, (heads, heads_kv, head_dim, head_dim_v) = [(70, 90), (0, 7), (3, 0), (20, 130)], (6, 2, 72, 40)
    totals = [sum(column) for column in zip(*lengths, strict=True)]
    q = torch.randn(totals[0], heads, head_dim, generator=generator).half()
    k, v = (torch.randn(totals[1], heads_kv, d, generator=generator).half() for d in (head_dim, head_dim_v))
    bounds = [
        torch.tensor([0, *itertools.accumulate(column)], dtype=torch.int32) for column in zip(*lengths, strict=True)
    ]
    o, lse, _ = cute_fa.flash_attn_varlen_func(q, k, v, *bounds, 70, 130, causal=True, return_attn_probs=True)
    assert o.shape == (totals[0], heads, head_dim_v)
    for (start, end), (first, last) in zip(itertools.pairwise(bounds[0]), itertools.pairwise(bounds[1]), strict=True):
        if end > start:
            at = slice(start, end), slice(first, last)
            assert_matches(q[at[0]], k[at[1]], v[at[1]], o[at[0]], lse[:, at[0]], causal=True)
