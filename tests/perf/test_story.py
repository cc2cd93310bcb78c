"""Claims are judged by figures, and pictures drawn from them, the same every time."""

from __future__ import annotations

import pytest

from perf import claims, plots, results
from perf.__main__ import main
from perf.claims import CLAIMS, FAILS, HOLDS, IN_PART, MORE, UNKNOWN, Evidence
from perf.table_texts import NOT_MEASURED, TABLES

CASE = {"dtype": "bf16", "B": 4, "S_q": 4096, "S_k": 4096, "H": 16, "H_kv": 16, "D": 128, "causal": False}


def timed(name: str, tflops: float, **more) -> dict:
    return {"name": name, "kind": "rung" if name.startswith("kernel") else "peer", **CASE, "tflops": tflops, **more}


def variant(name: str, experiment: str, ms: float, ways: int, dtype: str = "fp32", size: int = 1024) -> dict:
    counts = {"ideal": 10 if ways else 0, "predicted": 10 * ways, "measured": 10 * ways}
    return {
        "name": f"{experiment}_{dtype}_{name}", "kind": "experiment", "experiment": experiment, "variant": name,
        "dtype": dtype, "size": size, "ms": ms, "gbps": 100 / ms, "ways": ways, "ld": counts, "st": counts,
        "share_of_copy": 0.5,
    }  # fmt: skip


def reads(plain: float = 32.0) -> list[dict]:
    times = {"plain_4B": (plain, 32), "plain_16B": (8.0, 8), "padded_4_4B": (4.0, 4), "xor_vectors_4B": (4.0, 4)}
    times |= dict.fromkeys(("padded_1_4B", "padded_4_16B", "xor_vectors_16B"), (1.0, 1))
    return [variant(name, "reads", ms, ways) for name, (ms, ways) in times.items()]


def experiments(conflicting: float = 1.8, swizzled: float = 1.0, shuffle: float = 1.5) -> list[dict]:
    rows = reads()
    for experiment, dtype in (("transpose", "fp32"), ("transpose", "bf16"), ("softmax", "fp32")):
        times = {
            "conflicting": (conflicting, 32),
            "padded": (1.0, 1),
            "swizzled": (swizzled, 1),
            "shuffle": (shuffle, 0),
        }
        rows += [variant(name, experiment, ms, ways, dtype) for name, (ms, ways) in times.items()]
    return rows


def profile(before: float, after: float) -> list[dict]:
    rest = {"kernels": ["k"], "us": 1.0}
    rows = [
        timed(name, 1.0)
        | rest
        | {"smem_share": 0.93 if name == "kernel1" else 0.4, "stalls": {"short_scoreboard": share, "wait": 1 - share}}
        for name, share in (("kernel1", before), ("kernel2", after))
    ]
    for name, ways in (("kernel1", 8), ("kernel2", 1)):
        for path in ("ldmatrix + ldmatrix.trans", "st.shared", "cp.async", "ld.shared"):
            count = 100 * (ways if path in ("ldmatrix + ldmatrix.trans", "st.shared") else 1)
            rows.append(timed(name, 1.0) | {"path": path, "counter": "c", "exact": True, "ideal": 100})
            rows[-1] |= {"predicted": count, "wavefronts": count}
    return rows


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Results of a device that does what the texts say."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def write(what: str, records: list[dict]) -> None:
        document = results.make_document(records, "NVIDIA Test")
        results.write_results(results.results_path("NVIDIA Test", what), document)

    timings = [timed("kernel1", 33.28), timed("kernel2", 66.12), timed("sdpa_flash", 67.3)]
    write("timing_bf16", [*timings, timed("kernel1", 30.0, causal=True)])
    write("timing_bf16_d64", [timed("kernel1", 1.0, D=64), timed("kernel2", 1.25, D=64)])
    write("profile", profile(0.5637, 0.0149))
    write("experiments", experiments())
    row = {"name": "x", "path": "broadcast", "instruction": "ld", "ways": 1, "ideal": 1, "predicted": 1, "measured": 1}
    write("bank_table", [row])
    return write


def verdicts() -> dict[str, str]:
    (evidence,) = Evidence.all()
    return {claim.judge.__name__ if claim.judge.__name__ != "judge" else claim.claim: claim.judged(evidence)[1]
            for claim in CLAIMS}  # fmt: skip


def test_figures_like_the_texts_give_their_verdicts(measured):
    found = verdicts()
    for name in (
        "_twice_as_fast", "_near_the_reference", "_eight_ways", "_copies_are_free", "_conflicts_are_gone",
        "_smem_is_busy", "short_scoreboard falls", "_words_and_banks", "_broadcast", "_peak_over_degree",
        "_thirty_two_times", "_padding_equals_swizzling", "_shuffles_need_no_smem", "_faster_transpose",
        "_no_conflicts_left", "_vectors_do_not_cure", "_softmax_conflicts",
    ):  # fmt: skip
        assert found[name] == HOLDS, name
    assert found["mio_throttle falls"] == found["_math_pipe"] == FAILS  # they are 0 in both
    assert found["_shuffles_are_fastest"] == FAILS


@pytest.mark.parametrize(
    ("what", "records", "name", "verdict"),
    [
        ("timing_bf16", [timed("kernel1", 50.0), timed("kernel2", 300.0)], "_twice_as_fast", MORE),
        ("timing_bf16", [timed("kernel1", 50.0), timed("kernel2", 60.0)], "_twice_as_fast", FAILS),
        ("timing_bf16", [timed("kernel2", 60.0), timed("sdpa_flash", 90.0)], "_near_the_reference", FAILS),
        ("timing_bf16", [timed("kernel1", 50.0)], "_near_the_reference", UNKNOWN),
        ("profile", profile(0.5637, 0.2), "short_scoreboard falls", f"{IN_PART}: less far"),
        ("profile", profile(0.8, 0.1), "short_scoreboard falls", f"{HOLDS}, but more is left"),
        ("profile", profile(0.1, 0.2), "short_scoreboard falls", FAILS),
        ("experiments", experiments(conflicting=4.0), "_faster_transpose", MORE),
        ("experiments", experiments(conflicting=1.2), "_faster_transpose", FAILS),
        ("experiments", experiments(swizzled=1.2), "_padding_equals_swizzling", FAILS),
        ("experiments", experiments(shuffle=0.9), "_shuffles_are_fastest", HOLDS),
        (
            "experiments",
            [
                *experiments(shuffle=0.9),
                variant("shuffle", "transpose", 3.0, 0, size=2048),
                *(variant(name, "transpose", 2.0, 1, size=2048) for name in ("padded", "swizzled")),
            ],
            "_shuffles_are_fastest",
            IN_PART,
        ),
        ("experiments", reads(plain=20.0), "_thirty_two_times", FAILS),
        ("experiments", reads(plain=20.0), "_peak_over_degree", IN_PART),
        ("experiments", reads(), "_faster_transpose", UNKNOWN),
    ],
)
def test_other_figures_give_others(what, records, name, verdict, measured):
    measured(what, records)
    assert verdicts()[name] == verdict


def test_nothing_is_judged_without_figures(measured, monkeypatch, tmp_path):
    assert "| course" in TABLES["claims"]() and "NVIDIA Test" in TABLES["claims"]()
    monkeypatch.setattr(results, "RESULTS", tmp_path / "empty")
    assert TABLES["claims"]() == TABLES["stalls"]() == TABLES["transposes"]() == NOT_MEASURED
    evidence = Evidence("nothing", {})
    assert {claim.judged(evidence)[1] for claim in CLAIMS} == {UNKNOWN}


def test_tables_of_the_story(measured):
    (row,) = [line for line in TABLES["swizzle_stalls"]().splitlines() if line.startswith("| short_scoreboard")]
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["56.37%", "1.49%", "-54.88", "-"]
    assert "| kernel1 → kernel2 |" in TABLES["stalls"]() and TABLES["predicted"]() == TABLES["swizzle_predicted"]()
    assert "93.0%" in TABLES["counters"]()
    assert TABLES["predicted"]().count("| kernel1 ") == 4
    assert TABLES["transposes"]().count("| fp32 ") == 4 and TABLES["reads"]().count("| fp32 ") == 7


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_the_same_every_time(suffix, measured, tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        assert main(["plots", "--format", suffix, "--output", str(folder)]) == 0
    drawn = [sorted((folder / "nvidia-test").glob("*")) for folder in folders]
    names = {"tflops_by_rung", "tflops_by_length", "stalls", "predicted_and_measured", "remedies"}
    assert {path.stem for path in drawn[0]} == names
    assert [path.read_bytes() for path in drawn[0]] == [path.read_bytes() for path in drawn[1]]


def test_what_there_are_no_results_for_is_not_drawn(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert main(["plots", "--output", str(tmp_path)]) == 0
    assert "Nothing to draw" in capsys.readouterr().err
    results.write_results(
        results.results_path("NVIDIA Test", "timing_bf16"),
        results.make_document([timed("kernel1", 1.0), timed("kernel1", 1.0, causal=True)], "NVIDIA Test"),
    )
    assert main(["plots", "--output", str(tmp_path / "out")]) == 0
    captured = capsys.readouterr()
    assert "stalls not drawn for NVIDIA Test: no profile.json" in captured.err
    assert len(list((tmp_path / "out").rglob("*.png"))) == 2


def test_a_folder_that_cannot_be_written_is_a_line(measured, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["plots", "--output", str(tmp_path / "file")]) == 1
    assert "python -m perf plots: error: can't write" in capsys.readouterr().err


def test_pictures_of_the_documents_exist():
    for page in (results.ROOT / "README.md", *results.ROOT.glob("docs/*.md")):
        for line in page.read_text().splitlines():
            if line.startswith("![") and "](" in line:
                target = line.rpartition("](")[2].rstrip(")")
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_two_devices_are_judged_apart(measured, tmp_path):
    document = results.make_document([timed("kernel1", 1.0), timed("kernel2", 1.0)], "NVIDIA Other")
    results.write_results(results.results_path("NVIDIA Other", "timing_bf16"), document)
    other, test = Evidence.all()
    assert (other.device, test.device) == ("NVIDIA Other", "NVIDIA Test")
    assert claims._twice_as_fast(other)[1] == FAILS and claims._twice_as_fast(test)[1] == HOLDS
    assert plots.IMAGES == results.ROOT / "docs" / "images"
