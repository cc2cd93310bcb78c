"""docs/banks.md: its pictures are those of the gallery, and its example does what it says."""

import re
from pathlib import Path

import pytest

from layouts.__main__ import main

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_picture_is_shown_and_small():
    draw = pytest.importorskip("layouts.draw", exc_type=ValueError)
    shown = re.findall(r"\]\(images/(\w+)\.png\)", (DOCS / "banks.md").read_text())
    assert sorted(shown) == sorted(draw.GALLERY)
    for name in shown:
        assert (DOCS / "images" / f"{name}.png").stat().st_size < 150_000


def test_the_example_layout_can_be_checked(capsys, tmp_path):
    (line,) = re.findall(r"^ +(MINE = SmemLayout.*)$", (DOCS / "banks.md").read_text(), re.MULTILINE)
    file = tmp_path / "mine.py"
    file.write_text(f"from layouts import COLS, SmemLayout, Swizzle\n{line}\n")
    assert main(["check", str(file)]) == 0
    assert "MINE = S<2,3,4> o (8,64):(64,1)" in capsys.readouterr().out
