"""Which configuration is chosen, and that no chosen one spills: none of it needs a GPU."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from cute_fa.arch import ARCHS, get_arch, smem_fits
from cute_fa.choices import Preference, choose
from cute_fa.choices.files import (
    MeasuredChoice,
    Measurement,
    dumps,
    loads,
    nearest,
    read_choices,
    shipped_file,
    user_file,
)
from cute_fa.choices.lookup import CARD, OWN, RULE, SHIPPED
from cute_fa.choices.rule import preferred
from cute_fa.ladder import KERNELS, LADDER, select
from cute_fa.problem import DTYPES, NO_FEATURES, AttentionProblem, StaticProblem
from layouts import PADDED_8, PLAIN, SWIZZLE_333, SmemLayout
from perf.resources import NO_CUOBJDUMP, find_cuobjdump, resources_of

HEAD_DIMS = (64, 128)  # those that preferences are for
CHOSEN = [rung for rung in LADDER if rung.preferences]
RUNG = CHOSEN[0]
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a")
needs_cuobjdump = pytest.mark.skipif(find_cuobjdump() is None, reason=NO_CUOBJDUMP)


def problem(
    head_dim: int = 128,
    causal: bool = False,
    seqlen: int = 1024,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionProblem:
    shape = (1, seqlen, seqlen, 2, 2, head_dim, head_dim)
    return AttentionProblem(*shape, dtype, torch.device(device), causal, False, (-1, -1), NO_FEATURES)


def measured(seqlen: int, causal: bool = False, arch: str = "sm_90a", **fields) -> MeasuredChoice:
    config = replace(RUNG.config, **fields)
    found = Measurement("NVIDIA Test", "abc", "2026-01-01", {"torch": "2"}, {"B": 1}, 300.0, "other", 290.0)
    return MeasuredChoice(RUNG.name, arch, "bfloat16", 128, causal, seqlen, config, found)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Empty places for shipped choices and for those of the card, on which problems of device "cuda" are."""
    (tmp_path / "shipped").mkdir()
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path / "cache"))
    module = "cute_fa.choices.lookup"
    monkeypatch.setattr(f"{module}.shipped_file", lambda arch: tmp_path / "shipped" / f"{arch}.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Test 4090")
    return tmp_path


def put(path, *choices: MeasuredChoice):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(choices))
    return path


def shipped(files, *choices):
    return put(files / "shipped" / "sm_90a.json", *choices)


def users(*choices):
    return put(user_file("NVIDIA Test 4090"), *choices)


# --- lookup ------------------------------------------------------------------------------------------------


def test_user_s_file_lies_beside_the_compile_cache(files):
    assert user_file("NVIDIA Test 4090") == files / "cache" / "choices" / "nvidia-test-4090.json"


def test_file_round_trip():
    choices = (measured(512, tile_n=32), measured(512, causal=True, layout=PADDED_8), measured(8192, num_stages=1))
    assert {c.key for c in loads(dumps(choices))} == {c.key for c in choices}
    assert {asdict(c)["config"]["tile_n"]: c for c in loads(dumps(choices))}[32] == choices[0]
    assert loads(dumps(reversed(loads(dumps(choices))))) == loads(dumps(choices))
    assert len(dumps(choices).splitlines()) == len(choices) + 2


@pytest.mark.parametrize(
    ("seqlen", "expected"), [(1, 512), (512, 512), (1000, 512), (1100, 2048), (2048, 2048), (4000, 2048), (10**6, 8192)]
)
def test_nearest_length_counts_in_ratios(seqlen, expected):
    choices = [measured(s) for s in (8192, 512, 2048)]
    assert nearest(choices, RUNG.name, "sm_90a", "bfloat16", 128, False, seqlen).seqlen == expected


@pytest.mark.parametrize(
    "change", [{"rung": "other"}, {"arch": "sm_80"}, {"dtype": "float16"}, {"head_dim": 64}, {"causal": True}]
)
def test_a_choice_serves_what_it_was_measured_for(change):
    key = {"rung": RUNG.name, "arch": "sm_90a", "dtype": "bfloat16", "head_dim": 128, "causal": False, "seqlen": 512}
    assert nearest([measured(512)], **key) == measured(512)
    assert nearest([measured(512)], **key | change) is None


def test_the_card_s_own_choice_comes_before_the_shipped_one_before_the_rule(files):
    on_card, elsewhere = problem(device="cuda"), problem()
    assert choose(RUNG, on_card, "sm_90a").source == RULE
    shipped(files, measured(2048, tile_n=32))
    assert choose(RUNG, on_card, "sm_90a") == choose(RUNG, elsewhere, "sm_90a")
    assert choose(RUNG, on_card, "sm_90a").config.tile_n == 32 and choose(RUNG, on_card, "sm_90a").source == SHIPPED
    users(measured(512, tile_n=64, num_stages=1), measured(512, arch="sm_80", tile_n=96))
    choice = choose(RUNG, on_card, "sm_90a")
    assert (choice.source, choice.config.tile_n, choice.measured.seqlen) == (CARD, 64, 512)
    assert choose(RUNG, elsewhere, "sm_90a").config.tile_n == 32
    assert choose(RUNG, problem(causal=True, device="cuda"), "sm_90a").source == RULE
    rung, config = select(on_card, "sm_90a", RUNG.name)
    assert (rung, config) == (RUNG, choice.config)


def test_a_file_that_changed_is_read_again(files):
    users(measured(512, tile_n=32))
    assert choose(RUNG, problem(device="cuda"), "sm_90a").config.tile_n == 32
    users(measured(512, tile_n=64, num_stages=1))
    assert choose(RUNG, problem(device="cuda"), "sm_90a").config.tile_n == 64


def test_a_rung_with_one_configuration_keeps_it(files):
    users(replace(measured(512), rung="kernel2"))
    choice = choose(KERNELS["kernel2"], problem(device="cuda"), "sm_90a", PADDED_8)
    assert choice.config == replace(KERNELS["kernel2"].config, layout=PADDED_8) and choice.source == OWN


def test_the_caller_s_layout_replaces_the_chosen_one(files):
    users(measured(512, tile_n=32))
    assert choose(RUNG, problem(device="cuda"), "sm_90a", PLAIN).config == measured(512, tile_n=32, layout=PLAIN).config


@pytest.mark.filterwarnings("error")
def test_a_layout_that_the_measured_choice_has_no_room_for_goes_by_the_rule(files):
    """Two stages of 128 keys and 128 queries at D=128 take 160 KB, padded 170 KB; sm_80 has 163."""
    put(files / "shipped" / "sm_80.json", measured(512, arch="sm_80", tile_n=128))
    assert choose(RUNG, problem(), "sm_80").source == SHIPPED
    choice = choose(RUNG, problem(), "sm_80", PADDED_8)
    assert choice.source == RULE and choice.config.layout == PADDED_8
    RUNG.check(problem().static, choice.config, "sm_80")


def test_a_layout_is_used_where_its_rows_fit(files):
    """An atom of 64 rows rules out tiles of 32."""
    rows64 = SmemLayout("64 rows", (64, 64), (64, 1), SWIZZLE_333.swizzle)
    assert select(problem(), "sm_90a", RUNG.name, rows64)[1].tile_n == 64
    with pytest.raises(ValueError, match="does not divide"):
        select(problem(), "sm_90a", RUNG.name, SmemLayout("7 rows", (7, 64), (64, 1)))


def record(**change) -> dict:
    (one,) = json.loads(dumps([measured(512)]))["choices"]
    config = one["config"] | change.pop("config", {})
    return {key: value for key, value in (one | {"config": config} | change).items() if value is not None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Expecting value"),
        ("[]", 'an object with a list "choices"'),
        (json.dumps({"choices": [record(), record(causal="yes")]}), "choice 1: causal must be bool, got 'yes'"),
        (json.dumps({"choices": [record(seqlen=True)]}), "choice 0: seqlen must be int, got True"),
        (json.dumps({"choices": [record(seqlen=0)]}), "choice 0: seqlen must be at least 1, got 0"),
        (json.dumps({"choices": [record(measurement=None)]}), "choice 0 must have exactly the fields rung, arch"),
        (json.dumps({"choices": [record(config={"tile": 1})]}), "choice 0, config must have exactly the fields tile_m"),
        (json.dumps({"choices": [record(config={"tile_m": "a"})]}), "config: tile_m must be int, got 'a'"),
        (json.dumps({"choices": [record(config={"layout": "NONE"})]}), "layout must be one of PLAIN.* got 'NONE'"),
        (json.dumps({"choices": [record(config={"layout": []})]}), r"layout must be one of PLAIN.* got \[\]"),
    ],
)
def test_a_broken_file_is_named_in_a_warning_and_the_shipped_choice_serves(text, said, files):
    with pytest.raises(ValueError, match=said):
        loads(text)
    shipped(files, measured(512, tile_n=32))
    path = users()
    path.write_text(text)
    with pytest.warns(UserWarning, match=f"ignores the measured choices in {path}: .*{said}"):
        choice = choose(RUNG, problem(device="cuda"), "sm_90a")
    assert choice.config.tile_n == 32


def test_a_measured_choice_that_cannot_be_built_is_named_in_a_warning(files):
    path = users(measured(512, num_threads=96))
    with pytest.warns(UserWarning, match=f"ignores a choice for {RUNG.name} in {path}: tile_m must be a multiple"):
        assert choose(RUNG, problem(device="cuda"), "sm_90a").source == RULE


@pytest.mark.filterwarnings("error")
def test_a_missing_file_is_no_choices(tmp_path):
    assert read_choices(tmp_path / "nothing.json") == ()


# --- the rule ----------------------------------------------------------------------------------------------


def test_the_first_preference_that_has_room_and_does_not_spill():
    a, b, c = (Preference(replace(RUNG.config, tile_n=n, ctas_per_sm=2)) for n in (128, 64, 32))
    arch = get_arch("sm_86")  # 100 KB an SM
    assert preferred([a, b, c], [60000, 50000, 40000], arch, False) is b
    assert (
        preferred([a, replace(b, spills=(("sm_86", False),)), c], [60000, 50000, 40000], arch, False).config == c.config
    )
    assert (
        preferred([a, replace(b, spills=(("sm_86", True),)), c], [60000, 50000, 40000], arch, False).config == b.config
    )
    assert preferred([a, b, c], [60000, 60000, 60000], arch, False) is c


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_s_choice_fits_as_often_as_it_says(arch, head_dim, causal, dtype, files):
    choice = choose(RUNG, problem(head_dim, causal, dtype=dtype), arch)
    assert choice.source == RULE
    static = problem(head_dim, causal, dtype=dtype).static
    RUNG.check(static, choice.config, arch)
    smem_bytes = RUNG.kernel.smem_bytes(static, choice.config)
    assert smem_fits(get_arch(arch), smem_bytes) >= choice.config.ctas_per_sm >= 2
    assert choice.config.layout == SWIZZLE_333 and choice.config.lazy_rescale
    assert choice.config.first_reference == (dtype == torch.bfloat16)


def stack_bytes(choice_config, arch: str, head_dim: int, causal: bool, dtype: torch.dtype = torch.bfloat16) -> int:
    return resources_of(StaticProblem(dtype, head_dim, causal, False), RUNG, choice_config, arch).stack_bytes


@needs_cuobjdump
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rule_s_choice_compiles_without_spills(arch, head_dim, causal, dtype, monkeypatch, tmp_path):
    monkeypatch.setattr("cute_fa.choices.lookup.shipped_file", lambda arch: tmp_path / "none.json")
    config = choose(RUNG, problem(head_dim, causal, dtype=dtype), arch).config
    assert stack_bytes(config, arch, head_dim, causal, dtype) == 0


@needs_cuobjdump
def test_what_is_passed_over_for_spilling_spills():
    preferences = dict(RUNG.preferences)[128]
    found = {
        (str(one.config), arch, causal): stack_bytes(one.config, arch, 128, causal)
        for one in preferences
        for arch, causal in one.spills
        if arch in ARCHITECTURES
    }
    assert found and all(found.values()), found


@needs_cuobjdump
def test_shipped_choices_are_of_this_ladder_and_compile_without_spills():
    for arch in ARCHS:
        for choice in read_choices(shipped_file(arch)):
            assert choice.arch == arch and KERNELS[choice.rung].preferences
            case = problem(choice.head_dim, choice.causal, dtype=getattr(torch, choice.dtype))
            KERNELS[choice.rung].check(case.static, choice.config, arch)
            assert stack_bytes(choice.config, arch, choice.head_dim, choice.causal, case.dtype) == 0, choice
            assert math.isfinite(choice.measurement.tflops) and choice.measurement.device


def test_the_package_brings_its_choices():
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((shipped_file("x").parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "cute_fa.choices" in settings["packages"]
    assert settings["package-data"]["cute_fa.choices"] == ["*.json"]
