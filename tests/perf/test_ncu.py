"""Running ncu and reading what it says, with scripts in its place."""

from __future__ import annotations

import pytest

from perf import ncu


@pytest.fixture
def fake(tmp_path):
    """Makes a script that prints a text and ends with a status; ncu's stand-in."""

    def make(text: str, status: int = 0) -> str:
        path = tmp_path / "ncu"
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_ncu_csv_is_read_past_units_and_other_lines():
    text = (
        "==PROF== Connected to process 1\n"
        '"ID","Kernel Name","counter.sum"\n'
        '"","",""\n'
        '"1","bank_b_0","1,024"\n'
        '"0","bank_a_0","8"\n'
        "==PROF== Disconnected\n"
    )
    assert [(row["Kernel Name"], row["counter.sum"]) for row in ncu.parse_ncu(text)] == [
        ("bank_a_0", "8"),
        ("bank_b_0", "1,024"),
    ]
    assert ncu.parse_ncu("==ERROR== ERR_NVGPUCTRPERM") == []


@pytest.mark.parametrize(
    ("text", "status", "remedy"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, "run the command as root"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 0, "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==ERROR== Failed to find metric sm__nothing", 1, "take the ncu of a newer toolkit"),
        ("==ERROR== LibraryNotLoaded", 1, "LibraryNotLoaded"),
    ],
)
def test_errors_say_what_to_do(fake, text, status, remedy):
    with pytest.raises(ncu.NcuError, match=f"ncu ended with status {status}\n(?s:.*){remedy}"):
        ncu.run_ncu(fake(text, status), [], ["-c", "pass"])


def test_an_ncu_that_cannot_be_started(tmp_path):
    with pytest.raises(ncu.NcuError, match="can't be started: No such file"):
        ncu.run_ncu(str(tmp_path / "ncu"), [], [])


def test_it_is_found_on_the_path_and_in_cuda_home(fake, tmp_path, monkeypatch):
    program = fake("")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ncu.find_ncu() == program
    monkeypatch.setenv("PATH", "")
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "ncu").symlink_to(program)
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert ncu.find_ncu() == str(home / "bin" / "ncu")


def test_calls_are_split_at_marks():
    rows = [{"Kernel Name": name} for name in ("a(int)", "spin_kernel(long)", "b", "c", "spin_kernel")]
    first, second = ncu.split_at_marks(rows, 2)
    assert first == rows[:1] and second == rows[2:4]
    for wrong, expected in ((rows, 3), (rows[:4], 2), (rows[1:], 2)):
        with pytest.raises(ncu.NcuError, match=f"not {expected} calls"):
            ncu.split_at_marks(wrong, expected)


def test_the_counters_of_the_card(fake):
    listing = "Device NVIDIA Test (GH100)\n----\nsm__warps_active     Counter   warp\nsmsp__issue_active   Counter\n"
    assert ncu.available_metrics(fake(listing)) == {"sm__warps_active", "smsp__issue_active"}
    ncu.available_metrics.cache_clear()
    with pytest.raises(ncu.NcuError, match="named no counters"):
        ncu.available_metrics(fake("nothing", 1))
    ncu.available_metrics.cache_clear()
