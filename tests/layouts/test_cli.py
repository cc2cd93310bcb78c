"""python -m layouts: what it prints, how it fails, how long it takes."""

import json
import subprocess
import sys
import time

import pytest

import layouts
from layouts.__main__ import main
from layouts.parse import LayoutSyntaxError, find_layout, parse_expression
from layouts.smem_layout import COLS, SmemLayout, Swizzle


def run(capsys, *argv) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_check_lists_every_path_as_json(capsys):
    code, out, _ = run(capsys, "check", "PLAIN", "--json")
    records = json.loads(out)
    assert code == 0
    assert {"path": "ldmatrix K", "ways": 8, "wavefronts": 4096, "ideal": 512} in records
    assert len(records) == 8


def test_check_prints_verdicts_and_the_first_collision(capsys):
    _, out, _ = run(capsys, "check", "PLAIN")
    assert "8-way conflict" in out
    assert "lanes 0 to 7 of phase 0 all need 16-byte bank 0: rows 0 to 7, column 0, 256 bytes apart" in out
    assert "peak / 6.60" in out


def test_check_tells_split_lines_from_bank_conflicts(capsys):
    code, out, _ = run(capsys, "check", "PADDED_8", "--fail")
    assert code == 0
    assert out.count("no conflict, 2.62x: phases straddle 128-byte lines") == 3
    assert "straddle" not in run(capsys, "check", "SWIZZLE_333")[1]
    _, out, _ = run(capsys, "check", "PADDED_8", "--json")
    assert {"path": "cp.async K", "ways": 1, "wavefronts": 336, "ideal": 128} in json.loads(out)


def test_check_takes_the_tile_of_the_kernel(capsys):
    _, out, _ = run(capsys, "check", "PLAIN", "--json", "--head-dim", "64", "--tile", "128x128", "--threads", "256")
    ldmatrix_k = next(record for record in json.loads(out) if record["path"] == "ldmatrix K")
    assert ldmatrix_k["ideal"] == 8 * (128 // 16) * (64 // 16) * 4


@pytest.mark.parametrize(("layout", "code"), [("PLAIN", 1), ("SWIZZLE_333", 0), ("FLOAT_32X32", 1)])
def test_fail_makes_a_conflict_an_exit_code(capsys, layout, code):
    assert run(capsys, "check", layout, "--fail")[0] == code


def test_check_says_why_a_layout_is_not_usable(capsys):
    _, out, _ = run(capsys, "check", "(8,64):(32,1)")
    assert "NOT USABLE: elements (0, 32) and (1, 0) share offset 32" in out
    code, _, err = run(capsys, "check", "(1,D):(D+1,1)")
    assert code == 2
    assert "must be aligned to 16 bytes" in err


def test_compare_shows_both_and_the_sum_of_an_iteration(capsys):
    _, out, _ = run(capsys, "compare", "PLAIN", "SWIZZLE_333")
    assert [line.split() for line in out.splitlines() if line.startswith("KV iteration")] == [
        ["KV", "iteration", "8", "1", "8448", "1280", "1280", "6.60"]
    ]
    assert run(capsys, "compare", "PLAIN", "FLOAT_32X32")[0] == 2


def test_search_lists_price_and_restrictions(capsys):
    _, out, _ = run(capsys, "search", "--json")
    first, *others = json.loads(out)
    assert first == {
        "layout": "S<3,3,3> o (8,64):(64,1)",
        "bytes": 49152,
        "padding": 0,
        "wavefronts": 1792,
        "ideal": 1792,
        "mode": "128B",
        "rules_out": [],
    }
    padded = next(one for one in others if one["layout"] == "S<0,3,3> o (1,D):(D+8,1)")
    assert padded["wavefronts"] - padded["ideal"] == 3 * (336 - 128)  # cp.async of Q, K and V splits lines
    code, _, err = run(capsys, "search", "--path", "ldmatrix W")
    assert code == 2
    assert "no path named 'ldmatrix W'" in err


def test_show_prints_banks_and_offsets(capsys):
    _, out, _ = run(capsys, "show", "SWIZZLE_333", "--window", "3x64")
    assert [line.split()[1:] for line in out.splitlines()[2:]] == [list("01234567"), list("10325476"), list("23016745")]
    _, out, _ = run(capsys, "show", "XOR_4X4", "--what", "offsets")
    assert out.splitlines()[3].split() == ["1", "5", "4", "7", "6"]
    assert "\x1b[" not in out
    _, out, _ = run(capsys, "show", "PLAIN", "--color", "always")
    assert "\x1b[30;48;5;" in out


def test_draw_writes_the_file_it_was_asked_for(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    for suffix, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        file = tmp_path / f"picture.{suffix}"
        assert run(capsys, "draw", "PLAIN", "--out", str(file))[0] == 0
        assert file.read_bytes().startswith(start)
    file = tmp_path / "copy.svg"
    assert run(capsys, "draw", "PADDED_8", "--path", "cp.async K", "--out", str(file))[0] == 0
    code, _, err = run(capsys, "draw", "PLAIN", "--out", str(tmp_path / "picture.xyz"))
    assert code == 2
    assert ".svg or .png" in err


def test_drawing_without_matplotlib_says_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "layouts.draw", raising=False)
    monkeypatch.delattr(layouts, "draw", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "draw", "PLAIN", "--out", str(tmp_path / "picture.svg"))
    assert code == 2
    assert "drawing needs matplotlib: pip install 'cute_fa[plots]'" in err


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("S<3,3,3> o (8,64):(64,1)", SmemLayout("x", (8, 64), (64, 1), Swizzle(3, 3, 3))),
        ("Swizzle<2,3,4>o(1,D):(D+8,1)", SmemLayout("x", (1, COLS), (COLS + 8, 1), Swizzle(2, 3, 4))),
        (" ( 1 , D ) : ( D - 0 , 1 ) ", SmemLayout("x", (1, COLS), (COLS, 1))),
        ("S<3,3,-3> o (1,D):(D,1)", SmemLayout("x", (1, COLS), (COLS, 1), Swizzle(3, 3, -3))),
    ],
)
def test_expressions(text, layout):
    found = parse_expression(text)
    assert (found.shape, found.stride, found.swizzle) == (layout.shape, layout.stride, layout.swizzle)


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("S<3,3,3 o (8,64):(64,1)", 8, "expected '>', found 'o'"),
        ("S<3,3> o (8,64):(64,1)", 5, "expected ',', found '>'"),
        ("S<3,3,2> o (8,64):(64,1)", 0, "shift must be at least bits"),
        ("S<3,3,99> o (8,64):(64,1)", 0, "at most 31"),
        ("S<3,3,3> (8,64):(64,1)", 9, "expected 'o', found '('"),
        ("S<3,3,3> o", 10, "expected '(', found the end"),
        ("(8,64)", 6, "expected ':', found the end"),
        ("(8;64):(64,1)", 2, "expected ',', found ';'"),
        ("(8,E):(64,1)", 3, "expected an integer or 'D', found 'E'"),
        ("(8,64):(64,0)", 11, "must be positive, found 0"),
        ("(1,D):(D+,1)", 9, "expected an integer, found ','"),
        ("(8,64):(64,1))", 13, "expected the end, found ')'"),
    ],
)
def test_a_malformed_expression_is_pointed_at(text, position, reason):
    with pytest.raises(LayoutSyntaxError) as caught:
        find_layout(text)
    assert caught.value.position == position
    assert reason in str(caught.value)
    _, shown, caret = str(caught.value).splitlines()
    assert shown[2:] == text
    assert caret == "  " + " " * position + "^"


def test_an_error_is_printed_and_exits_with_2(capsys):
    code, out, err = run(capsys, "check", "S<3,3,3 o (8,64):(64,1)")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].index("^") == err.splitlines()[-2].index(" o ") + 1
    code, _, err = run(capsys, "check", "SWIZZLE_33")
    assert code == 2
    assert "did you mean SWIZZLE_333?" in err
    with pytest.raises(SystemExit) as caught:
        main(["check", "PLAIN", "--tile", "64"])
    assert caught.value.code == 2


def test_a_file_defines_a_layout(capsys, tmp_path):
    file = tmp_path / "mine.py"
    one = 'from layouts import SmemLayout, Swizzle\nmine = SmemLayout("mine", (8, 64), (64, 1), Swizzle(3, 3, 3))\n'
    file.write_text(one)
    code, out, _ = run(capsys, "check", str(file))
    assert code == 0
    assert "mine = S<3,3,3> o (8,64):(64,1)" in out
    file.write_text(one + 'other = SmemLayout("other", (8, 64), (64, 1))\n')
    assert "name one as" in run(capsys, "check", str(file))[2]
    assert find_layout(f"{file}:other").name == "other"
    assert "defines no layout 'third'" in run(capsys, "check", f"{file}:third")[2]
    file.write_text("1 / 0\n")
    assert "ZeroDivisionError" in run(capsys, "check", str(file))[2]
    assert "no such file" in run(capsys, "check", str(tmp_path / "none.py"))[2]


def test_one_line_in_the_catalog_is_enough():
    from layouts.catalog import _collect

    mine = SmemLayout("MINE", (8, 32), (32, 1))
    assert _collect({"MINE": mine, "other": 3}) == {"MINE": mine}
    with pytest.raises(ValueError, match="two layouts named 'MINE'"):
        _collect({"MINE": mine, "AGAIN": SmemLayout("MINE", (8, 16), (16, 1))})


def test_check_answers_in_under_a_second_and_imports_only_numpy():
    heavy = "import sys; from layouts.__main__ import main; main(['check', 'PLAIN']); "
    heavy += "print([name for name in ('torch', 'cutlass', 'matplotlib') if name in sys.modules])"
    best = float("inf")
    for _ in range(3):  # the machine may be busy with something else
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
        best = min(best, time.perf_counter() - start)
    assert done.stdout.splitlines()[-1] == "[]"
    assert best < 1.0


def test_check_says_which_gpus_have_room(capsys):
    assert "NOT USABLE" not in run(capsys, "check", "SWIZZLE_333")[1] and "fits" not in run(capsys, "check", "PLAIN")[1]
    _, out, _ = run(capsys, "check", "SWIZZLE_333", "--tile", "128x256")
    assert "Q, K and V take 163840 bytes" in out and "NOT USABLE" not in out
    assert "fits sm_90 (227 KB), sm_80 (163 KB), not sm_86 / sm_89 / sm_120 (99 KB)." in out
    _, out, _ = run(capsys, "check", "SWIZZLE_333", "--tile", "256x256")
    assert "fits sm_90 (227 KB), not sm_80 (163 KB), sm_86 / sm_89 / sm_120 (99 KB)." in out
    _, out, _ = run(capsys, "check", "SWIZZLE_333", "--tile", "256x512")
    assert "NOT USABLE by the kernels: Q, K and V take 327680 bytes" in out
    assert "no GPU allows a CTA more than 227 KB" in out


def test_the_room_is_that_of_the_kernel_and_its_architectures():
    from cute_fa.arch import ARCHS
    from cute_fa.kernels.sm80_serial import SMEM_ALIGNMENT
    from layouts.__main__ import _SMEM_ALIGNMENT, _SMEM_KB

    assert _SMEM_ALIGNMENT == SMEM_ALIGNMENT
    limits = {name.rstrip("a"): arch.smem_per_cta for name, arch in ARCHS.items()}
    named = {name: kb * 1024 for kb, archs in _SMEM_KB for name in archs}
    assert named.items() <= limits.items() and max(limits.values()) == _SMEM_KB[0][0] * 1024


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--head-dim", "0"), "'0'"),
        (("--head-dim", "-64"), "'-64'"),
        (("--head-dim", "wide"), "'wide'"),
        (("--threads", "0"), "'0'"),
    ],
)
def test_sizes_are_positive(argv, named, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", "PLAIN", *argv])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert f"argument {argv[0]}: must be an integer of at least 1, got {named}" in err


@pytest.mark.parametrize("big", ["(1,D):(999999999999999999999,1)", "(1,D):(D+999999999999999999999,1)"])
def test_a_huge_stride_is_an_error(capsys, big):
    code, _, err = run(capsys, "check", big)
    assert code == 2
    assert "stride must hold at most 2**31 (2147483648) in size" in err and "999999999999999999999" in err


@pytest.mark.parametrize("expression", ["(1,D):(D-200,1)", "(1,D-200):(64,1)", "(1,D):(D-128,1)"])
def test_a_size_that_is_not_positive_at_its_width_is_an_error(capsys, expression):
    code, _, err = run(capsys, "check", expression)
    assert code == 2
    assert "must be positive, but D-" in err and "on a tile of 128 columns" in err


def test_the_parts_of_a_layout_are_checked():
    with pytest.raises(ValueError, match="name must be a str, got 7"):
        SmemLayout(7, (8, 64), (64, 1))
    with pytest.raises(
        ValueError, match=r"'x': shape must hold at most 2\*\*31 \(2147483648\) in size, got 2147483649"
    ):
        SmemLayout("x", (2**31 + 1, 64), (64, 1))
    SmemLayout("x", (1, COLS), (2**31, 1))


def test_an_unknown_name_gets_a_hint(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "did you mean PLAIN?" in run(capsys, "check", "PLAN")[2]
    assert "names are case-sensitive: did you mean PLAIN?" in run(capsys, "check", "plain")[2]
    (tmp_path / "mine.py").touch()
    code, _, err = run(capsys, "check", "mine")
    assert code == 2 and "no layout named 'mine'; a file? say mine.py" in err
    assert run(capsys, "check", "x" * 5000)[0] == 2
