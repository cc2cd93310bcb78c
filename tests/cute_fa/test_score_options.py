"""Sliding windows, softcap, ALiBi, sinks, biases and masks: the compiled kernel, emulated, against float64."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cute_fa
from cute_fa.compiled import get_artifacts
from cute_fa.emulator import emulate_forward
from cute_fa.ladder import KERNELS, LADDER, select
from cute_fa.problem import NO_FEATURES, AttentionProblem, ScoreFeatures, ScoreOptions, StaticProblem
from cute_fa.reference import attention_reference
from tests.cases import Case

HALF, BF16 = torch.float16, torch.bfloat16
RUNGS = [rung.name for rung in LADDER if rung.kernel.score_options]  # those that have all options
# One of each family: keys in tiles of 64 by cp.async; in tiles of 128 by TMA, exponentials before the maximum.
FAMILIES = ("kernel5", "kernel11")


def option_values(name: str, case: Case, generator) -> dict:
    """Arguments of forward for one of the names below, drawn for the case."""
    shape = (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)

    def normal(*extents, dtype=torch.float32):
        return torch.randn(extents, generator=generator).to(dtype)

    def mask(*extents):
        return torch.rand(extents, generator=generator) < 0.6

    values = {
        "left": lambda: {"window_size": (30, -1)},
        "right": lambda: {"window_size": (-1, 9)},
        "window": lambda: {"window_size": (70, 20)},
        "narrow": lambda: {"window_size": (0, 0)},
        "softcap": lambda: {"softcap": 2.5},
        "alibi": lambda: {"alibi_slopes": normal(case.num_heads).abs()},
        "alibi of members": lambda: {"alibi_slopes": normal(*shape[:2]).abs()},
        "sinks": lambda: {"sinks": normal(case.num_heads) * 3},
        "bias": lambda: {"attn_bias": normal(*shape)},
        "bias in q's dtype": lambda: {"attn_bias": normal(*shape[1:], dtype=case.dtype)},
        "mask": lambda: {"attn_bias": mask(*shape)},
        "padding": lambda: {"attn_bias": mask(case.batch, 1, 1, case.seqlen_k)},
    }
    return {key: value for one in name.split(" + ") for key, value in values[one]().items()}


SINGLE = ("left", "right", "window", "narrow", "softcap", "alibi", "sinks", "bias", "mask", "padding")
MATRIX = [
    # One head dimension and dtype with every option, with and without a causal mask, heads grouped or not.
    *((name, Case(100, 150, 64, causal, num_heads=4, num_heads_kv=1)) for name in SINGLE for causal in (False, True)),
    *((name, Case(150, 100, 64, True, num_heads=2)) for name in SINGLE),
    *((name, Case(140, 140, 128, True, HALF, num_heads=2)) for name in ("window", "softcap", "alibi", "sinks", "mask")),
    *((name, Case(70, 90, 128, False, HALF, batch=2)) for name in ("bias in q's dtype", "alibi of members")),
    # Together.
    *((name, Case(131, 200, 64, causal, num_heads=4, num_heads_kv=2)) for causal in (False, True)
      for name in ("window + softcap", "left + alibi", "window + sinks", "left + mask + sinks")),
    ("bias + left", Case(131, 200, 64, True)),
    ("window + softcap + alibi + sinks + bias", Case(131, 140, 128, False, batch=2, num_heads=2, num_heads_kv=1)),
    # Short, and ragged.
    *(("window", Case(s_q, s_k, 64, False)) for s_q, s_k in ((1, 200), (129, 1), (64, 64), (65, 63))),
    *((name, Case(7, 130, 64, True)) for name in ("padding", "bias")),
]  # fmt: skip


def assert_right(case: Case, q, k, v, o, lse, **options):
    """o within twice what rounding P to the inputs' type costs, all else exact, plus one rounding; lse within 1e-4."""
    exact = {"causal": case.causal, "softmax_scale": case.softmax_scale, "dtype": torch.float64, **options}
    o_ref, lse_ref = attention_reference(q, k, v, **exact)
    rounded = attention_reference(q, k, v, **exact, round_probs_to=case.dtype)[0].to(case.dtype)
    allowed = 2 * (rounded - o_ref).abs().max().item() + torch.finfo(case.dtype).eps * o_ref.abs().max().item() / 2
    assert (o - o_ref).abs().max().item() <= allowed
    torch.testing.assert_close(lse, lse_ref.float(), atol=1e-4, rtol=1e-5)
    unseen = lse_ref.isneginf()
    if "sinks" not in options:
        assert torch.equal(lse.isneginf(), unseen) and not o.transpose(1, 2)[unseen].any()


def emulated(case: Case, q, k, v, kernel="kernel5", config=None, **options):
    arch = "sm_80" if KERNELS[kernel].runs_on("sm_80") else "sm_90a"
    result = emulate_forward(
        q, k, v, causal=case.causal, softmax_scale=case.softmax_scale, kernel=kernel, options=ScoreOptions(**options),
        arch=arch, config=config,
    )  # fmt: skip
    result.report.raise_for_faults()
    return result


@pytest.mark.parametrize("name, case", MATRIX, ids=str)
def test_matches_float64(name, case, generator):
    q, k, v = case.tensors("cpu", generator)
    options = option_values(name, case, generator)
    result = emulated(case, q, k, v, **options)
    assert_right(case, q, k, v, result.o, result.lse, **options)


@pytest.mark.parametrize(
    "name, case",
    [
        ("window + softcap + alibi", Case(200, 330, 64, False, num_heads=2, num_heads_kv=1)),
        ("left + bias", Case(131, 400, 40, True, HALF, num_heads=2)),
    ],
    ids=str,
)
def test_matches_float64_tile_after_tile(name, case, generator):
    """On Hopper, where one CTA takes several tiles of queries and walks many short tiles of keys for each."""
    q, k, v = case.tensors("cpu", generator)
    options = option_values(name, case, generator)
    config = replace(KERNELS["kernel11"].config_for(case.head_dim, plain=False), tile_n=32, max_ctas=2)
    result = emulated(case, q, k, v, "kernel11", config, **options)
    assert_right(case, q, k, v, result.o, result.lse, **options)


@pytest.mark.parametrize("kernel", RUNGS)
def test_every_rung_that_takes_them(kernel, generator):
    case = Case(131, 200, 64, True, num_heads=2)
    q, k, v = case.tensors("cpu", generator)
    options = option_values("left + softcap + sinks + mask", case, generator)
    result = emulated(case, q, k, v, kernel, **options)
    assert_right(case, q, k, v, result.o, result.lse, **options)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_windows(data):
    seqlen_q, seqlen_k = (data.draw(st.integers(1, 300), label=name) for name in ("S_q", "S_k"))
    window = tuple(data.draw(st.integers(-1, 310), label=side) for side in ("left", "right"))
    case = Case(seqlen_q, seqlen_k, 64, data.draw(st.booleans(), label="causal"), num_heads=1, num_heads_kv=1)
    q, k, v = case.tensors("cpu", torch.Generator().manual_seed(0))
    result = emulated(case, q, k, v, window_size=window)
    assert_right(case, q, k, v, result.o, result.lse, window_size=window)


def test_window_walks_its_own_tiles_alone(generator):
    """Ten times the keys, the same window: hardly an instruction more."""
    counts = []
    for seqlen_k in (512, 5120):
        q, k, v = Case(128, seqlen_k, 64, num_heads=1, num_heads_kv=1).tensors("cpu", generator)
        counts.append(emulated(Case(128, seqlen_k), q, k, v, window_size=(100, 0)).report.instructions)
    assert counts[0] == counts[1]


def test_nothing_outside_the_window_is_read(generator):
    """NaN there changes nothing: tiles outside aren't loaded, and columns outside are masked before the maximum."""
    case = Case(64, 640, 64, num_heads=1, num_heads_kv=1)
    q, k, v = case.tensors("cpu", generator)
    expected = emulated(case, q, k, v, window_size=(63, 0)).o
    k[:, :448], v[:, :448] = torch.nan, torch.nan
    assert torch.equal(emulated(case, q, k, v, window_size=(63, 0)).o, expected)


@pytest.mark.parametrize("kernel", FAMILIES)
def test_rows_that_see_no_key(kernel, generator):
    case = Case(70, 90, 64, num_heads=2)
    q, k, v = case.tensors("cpu", generator)
    mask = torch.ones(70, 90, dtype=torch.bool)
    mask[10:30] = False
    for bias in (mask, torch.where(mask, 0.0, -torch.inf), torch.where(mask, 0.0, torch.finfo(torch.float32).min)):
        result = emulated(case, q, k, v, kernel, attn_bias=bias)
        assert not result.o[:, 10:30].any() and (result.lse[..., 10:30] == -torch.inf).all()
        assert result.lse[..., 30:].isfinite().all() and result.lse[..., :10].isfinite().all()
    sinks = torch.tensor([1.5, -2.0])
    result = emulated(case, q, k, v, kernel, attn_bias=mask, sinks=sinks)
    assert not result.o[:, 10:30].any()
    torch.testing.assert_close(result.lse[0, :, 10:30], sinks[:, None].expand(2, 20))
    none = q[:, :0]
    o, lse = cute_fa.forward(q, none, none, sinks=sinks, return_lse=True)
    assert not o.any() and torch.equal(lse[0], sinks[:, None].expand(2, 70))


@pytest.mark.parametrize("kernel", FAMILIES)
def test_a_sink_far_above_or_below_every_score(kernel, generator):
    case = Case(70, 90, 64, num_heads=4, num_heads_kv=4)
    q, k, v = case.tensors("cpu", generator)
    sinks = torch.tensor([-torch.inf, -300.0, 40.0, 300.0])
    result = emulated(case, q, k, v, kernel, sinks=sinks)
    without = emulated(case, q, k, v, kernel)
    assert torch.equal(result.o[:, :, :2], without.o[:, :, :2])
    assert result.o[:, :, 2].abs().max() < 1e-8 and not result.o[:, :, 3].any()
    torch.testing.assert_close(result.lse[0, 2:], sinks[2:, None].expand(2, 70))


@pytest.mark.parametrize("softcap", [2.0**-10, 0.5, 50.0, 1024.0])
def test_softcap_is_exact_from_small_to_large(softcap, generator):
    case = Case(64, 64, 64, softmax_scale=1.0)
    q, k, v = case.tensors("cpu", generator)
    result = emulated(case, q, k, v, softcap=softcap)
    assert_right(case, q, k, v, result.o, result.lse, softcap=softcap)


def test_bias_of_any_strides(generator):
    case = Case(40, 70, 64, batch=2, num_heads=4, num_heads_kv=4)
    q, k, v = case.tensors("cpu", generator)
    full = torch.randn(2, 4, 40, 70, generator=generator)
    views = [
        full.transpose(2, 3).contiguous().transpose(2, 3),  # columns contiguous
        full.flip(0)[..., ::1][:, ::2].repeat_interleave(2, 1),
        torch.randn(2, 8, 40, 141, generator=generator)[:, ::2, :, 1:141:2],
        torch.randn(2, 8, 40, 141, generator=generator)[:, 1::2, :, 1:71],
        full[:1, :, :1].expand(2, 4, 40, 70),
        full[..., :1],
        full[..., :1].expand(2, 4, 40, 70),
        full[0, 0],
        full[0, 0, 0],
        torch.tensor(0.5),
    ]
    for view in views:
        o, lse = cute_fa.forward(q, k, v, return_lse=True, attn_bias=view)
        assert_right(case, q, k, v, o, lse, attn_bias=view)


def test_an_older_kernel_on_hopper(generator):
    case = Case(129, 150, 64, causal=True)
    q, k, v = case.tensors("cpu", generator)
    options = option_values("left + softcap", case, generator)
    result = emulate_forward(q, k, v, causal=True, options=ScoreOptions(**options), arch="sm_90a", kernel="kernel5")
    result.report.raise_for_faults()
    assert_right(case, q, k, v, result.o, result.lse, **options)


# Which rung serves.


def problem(seqlen=500, device="cpu", causal=False, **options):
    q = torch.zeros(1, seqlen, 2, 64, dtype=BF16, device=device)
    return AttentionProblem.from_tensors(q, q, q, causal=causal, options=ScoreOptions(**options))


@pytest.mark.parametrize("seqlen", [3, 500])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_auto_is_the_highest_rung_that_has_them(arch, seqlen):
    best = "kernel11" if arch == "sm_90a" else "kernel6"
    assert select(problem(seqlen, softcap=2.0), arch)[0].name == best
    assert select(problem(seqlen, window_size=(seqlen, seqlen)), arch)[0] is select(problem(seqlen), arch)[0]


@pytest.mark.parametrize("name", [rung.name for rung in LADDER if rung.name not in RUNGS])
def test_a_rung_without_them_is_refused_by_name(name):
    match = rf"kernel must be auto or one that has sinks, softcap \({', '.join(RUNGS)}\), got '{name}'"
    with pytest.raises(ValueError, match=match):
        select(problem(softcap=2.0, sinks=torch.zeros(2)), "sm_90a", name)


def test_a_window_that_hides_nothing_is_none():
    assert problem(window_size=(499, 499)).static.features == NO_FEATURES
    assert problem(window_size=(498, 499)).static.features == ScoreFeatures(window_left=True)
    assert problem(window_size=(-1, 498)).static.features == ScoreFeatures(window_right=True)
    static = problem(window_size=(7, 0)).static
    assert static.causal and static.features == ScoreFeatures(window_left=True)
    assert problem(causal=True, window_size=(-1, 5)).static == problem(causal=True).static


# What a kernel without options costs.


def code(static: StaticProblem, rung) -> str:
    """PTX without what tells of source lines."""
    ptx = get_artifacts(static, rung, rung.config_for(static.head_dim), "sm_80").ptx
    lines = (line for line in ptx.split(".section")[0].splitlines() if not line.strip().startswith((".loc", ".file")))
    return re.sub(r"\$L__(info_string|tmp|func_\w+)\w*:?", "", "\n".join(lines))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["kernel3", "kernel5"])
def test_no_option_costs_the_plain_kernel_anything(name, causal, monkeypatch, tmp_path):
    """Its code is that of a kernel whose steps for options are cut out."""
    static, rung = StaticProblem(BF16, 64, causal, True), KERNELS[name]
    plain = code(static, rung)
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path))  # compiled anew
    where = "cute_fa.kernels.sm80_pipelined."
    monkeypatch.setattr(where + "ScoreModifier.apply", lambda *_: None)
    monkeypatch.setattr(where + "ScoreModifier.softmax_scale_log2", property(lambda self: self.scale_log2))
    monkeypatch.setattr(where + "ScoreModifier.of", staticmethod(_without_reading))
    assert code(static, rung) == plain
    for absent in ("mask_scores_before", "key_starts"):
        monkeypatch.setattr(where + absent, None)  # tracing one would raise
    assert code(static, rung) == plain


def _without_reading(features, arguments, scale_log2, *_):
    from cute_fa.device.scores import ScoreModifier

    assert features == NO_FEATURES and arguments is None
    return ScoreModifier(features, scale_log2, *(None,) * 7)


def test_an_option_changes_the_code():
    """The comparison above can see a difference."""
    plain = StaticProblem(BF16, 64, False, True)
    softcap = replace(plain, features=ScoreFeatures(softcap=True))
    counts = [code(static, KERNELS["kernel5"]).count("ex2.approx") for static in (plain, softcap)]
    scores = 128 * 64 // 128  # of a thread in a tile; the loop is there twice
    assert counts[1] - counts[0] == 2 * scores
