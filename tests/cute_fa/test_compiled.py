"""The compile cache, and what the compiled kernels hold: none of it needs a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cute_fa import compiled, ladder
from cute_fa.compiled import combine_name, kernel_name
from cute_fa.emulator.parse import only_entry
from cute_fa.ladder import KERNELS, LADDER
from cute_fa.problem import StaticProblem
from layouts import CATALOG, PADDED_8, PLAIN, SWIZZLE_333
from tests.cases import usable_layouts

STATIC = StaticProblem(torch.bfloat16, 64, causal=False, return_lse=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache on disk and in memory."""
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_in_memory", {})
    return tmp_path / "cache"


@pytest.fixture
def count_compiles(monkeypatch):
    """Counts calls of the compiler."""
    calls = []
    real = compiled._compile
    monkeypatch.setattr(compiled, "_compile", lambda *args: calls.append(args) or real(*args))
    return calls


def get(rung=LADDER[0], static=STATIC, config=None, arch="sm_90a"):
    return compiled.get_compiled(static, rung, config or rung.config, arch)


def test_compiles_once_for_memory_and_disk(cache, count_compiles, monkeypatch):
    first = get()
    assert get() is first and len(count_compiles) == 1
    assert len(list(cache.glob("*.o"))) == 1
    monkeypatch.setattr(compiled, "_in_memory", {})  # as in the next process
    assert callable(get()) and len(count_compiles) == 1


def test_everything_a_kernel_depends_on_is_in_the_key(cache, count_compiles):
    get()
    get(static=replace(STATIC, causal=True))
    get(static=replace(STATIC, return_lse=False))
    get(static=replace(STATIC, dtype=torch.float16))
    get(config=replace(LADDER[0].config, layout=PADDED_8))
    get(arch="sm_80")
    assert len(count_compiles) == 6 and len(list(cache.glob("*.o"))) == 6


def test_digest_follows_source_and_versions(monkeypatch):
    before = compiled._digest("x")
    monkeypatch.setattr(compiled, "_source_digest", lambda: "edited")
    edited = compiled._digest("x")
    monkeypatch.setattr(compiled, "_versions", lambda: ("another version",))
    assert len({before, edited, compiled._digest("x")}) == 3


def flip_a_bit(contents: bytes) -> bytes:
    """One bit of the machine code, where no header would tell."""
    middle = len(contents) // 2
    return contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda _: b"not an object file", lambda contents: contents[:-100], flip_a_bit],
    ids=["empty", "another file", "cut off", "one bit"],
)
def test_a_damaged_file_is_replaced(damage, cache, count_compiles, monkeypatch):
    get()
    (path,) = cache.glob("*.o")
    whole = path.stat().st_size
    path.write_bytes(damage(path.read_bytes()))
    monkeypatch.setattr(compiled, "_in_memory", {})
    assert callable(get())
    assert len(count_compiles) == 2 and path.stat().st_size == whole
    monkeypatch.setattr(compiled, "_in_memory", {})
    assert callable(get()) and len(count_compiles) == 2


@pytest.mark.parametrize("content", (b"", b"not an archive", b"PK\x03\x04 cut off"))
def test_damaged_artifacts_are_replaced(cache, count_compiles, content):
    arguments = (STATIC, LADDER[0], LADDER[0].config, "sm_80")
    whole = compiled.get_artifacts(*arguments)
    (path,) = cache.glob("*.npz")
    path.write_bytes(content)
    assert compiled.get_artifacts(*arguments) == whole and len(count_compiles) == 2
    assert compiled.get_artifacts(*arguments) == whole and len(count_compiles) == 2


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch, count_compiles):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CUTE_FA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compiled, "_in_memory", {})
    assert callable(get()) and len(count_compiles) == 1
    assert compiled.get_artifacts(STATIC, LADDER[0], LADDER[0].config, "sm_80").ptx


def test_a_full_disk_costs_only_time(cache):
    """No file may grow beyond 1000 bytes, as at the end of a quota; what could not be written whole is gone."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); import torch; "
        "from cute_fa.compiled import get_artifacts, get_compiled; from cute_fa.ladder import LADDER; "
        "from cute_fa.problem import StaticProblem; rung = LADDER[0]; "
        "arguments = (StaticProblem(torch.bfloat16, 64, True, False), rung, rung.config, 'sm_80'); "
        "assert callable(get_compiled(*arguments)) and get_artifacts(*arguments).ptx; print('compiled')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("compiled"), done.stderr
    assert not list(cache.iterdir())


def test_a_directory_that_may_only_be_read_costs_only_time(cache, count_compiles, monkeypatch):
    cache.mkdir()

    def refuse(*_arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(compiled, "_export_object", refuse)  # for root, no mode of a directory forbids anything
    cache.chmod(0o500)
    assert callable(get()) and callable(get(arch="sm_80")) and len(count_compiles) == 2
    assert not list(cache.iterdir())


def test_no_half_written_file_is_left(cache):
    get()
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_processes_that_start_together_agree(cache):
    program = (
        "import torch; from cute_fa.compiled import get_compiled; from cute_fa.ladder import LADDER; "
        "from cute_fa.problem import StaticProblem; rung = LADDER[1]; "
        "get_compiled(StaticProblem(torch.bfloat16, 64, True, False), rung, rung.config, 'sm_90a'); print('ok')"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert all(out.strip().endswith("ok") for out, _ in results), results
    assert len(list(cache.iterdir())) == 1


def test_auto_is_the_highest_rung_that_runs(monkeypatch):
    older = LADDER[1]
    newer = replace(older, name="newer", min_arch=(9, 0))
    monkeypatch.setattr(ladder, "LADDER", (LADDER[0], older, newer))
    monkeypatch.setitem(KERNELS, "newer", newer)
    assert ladder.resolve_kernel("auto", "sm_90a") is newer
    assert ladder.resolve_kernel("auto", "sm_86") is older
    with pytest.raises(ValueError, match=r"kernel 'newer' needs compute capability 9\.0 or newer, this is sm_86"):
        ladder.resolve_kernel("newer", "sm_86")


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_named_after_their_rung(name):
    rung = KERNELS[name]
    ptx = compiled.get_artifacts(STATIC, rung, rung.config, "sm_90a").ptx
    entries = {re.sub(r"_\d+$", "", entry) for entry in re.findall(r"\.entry (\w+)", ptx)}
    assert entries == {kernel_name(rung), *([combine_name(rung)] if rung.splits_keys else [])}
    assert kernel_name(rung) == f"cute_fa_{name}"


@pytest.mark.parametrize("name", KERNELS)
def test_every_rung_compiles_without_the_log_sum_exp(name):
    rung = KERNELS[name]
    ptx = {lse: compiled.get_artifacts(replace(STATIC, return_lse=lse), rung, rung.config, "sm_90a").ptx
           for lse in (False, True)}  # fmt: skip
    assert len(ptx[False]) < len(ptx[True])


def test_kernel1_and_kernel2_differ_in_the_layout_alone():
    one, two = KERNELS["kernel1"], KERNELS["kernel2"]
    assert one.kernel is two.kernel
    assert one.config.layout == PLAIN and two.config.layout == SWIZZLE_333
    assert replace(one.config, layout=SWIZZLE_333) == two.config


def instructions(ptx: str, family: str) -> int:
    return len(re.findall(rf"^\s*(?:@!?%p\d+\s+)?{re.escape(family)}", ptx, re.MULTILINE))


@pytest.mark.parametrize("head_dim, layout", usable_layouts())
@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_shared_memory_is_touched_by_these_instructions_alone(head_dim, layout, arch):
    """The same count of each under every layout, and the count that the tile sizes give."""
    rung = LADDER[0]
    static = StaticProblem(torch.bfloat16, head_dim, causal=True, return_lse=True)
    ptx = compiled.get_artifacts(static, rung, replace(rung.config, layout=CATALOG[layout]), arch).ptx
    tile = rung.config.tile_n
    warps, threads = rung.config.num_threads // 32, rung.config.num_threads
    tile_bytes = tile * head_dim * 2
    plain = "ldmatrix.sync.aligned.m8n8.x4.shared"
    trans = "ldmatrix.sync.aligned.m8n8.x4.trans.shared"
    # One ldmatrix.x4 brings 512 bytes to a warp. Each warp reads its rows of Q and all of K and V.
    assert instructions(ptx, plain) == (tile_bytes // warps + tile_bytes) // 512
    assert instructions(ptx, trans) == tile_bytes // 512
    assert instructions(ptx, "ldmatrix") == instructions(ptx, plain) + instructions(ptx, trans)
    assert instructions(ptx, "cp.async.cg.shared.global") == 3 * tile_bytes // (16 * threads)
    assert instructions(ptx, "st.shared.b32") == tile_bytes // (4 * threads)
    assert instructions(ptx, "st.shared") == instructions(ptx, "st.shared.b32")
    assert instructions(ptx, "ld.shared.v4.b32") == tile_bytes // (16 * threads)
    assert instructions(ptx, "ld.shared") == instructions(ptx, "ld.shared.v4.b32")
    assert instructions(ptx, "mma.sync") == 2 * 64 * tile * head_dim // (16 * 8 * 16) // warps


@pytest.mark.parametrize("early", [True, False])
def test_an_early_combine_reads_nothing_before_the_splits_have_ended(early):
    """No numbers tell on the CPU, where one kernel runs after the other."""
    rung = KERNELS["kernel7"]
    config = replace(rung.config, early_combine=early)
    ptx = compiled.get_artifacts(STATIC, rung, config, "sm_90a").ptx
    main, combine = (only_entry(ptx, name(rung)) for name in (kernel_name, combine_name))
    assert main.count("griddepcontrol.launch_dependents") == early
    assert combine.count("griddepcontrol.wait") == early
    if early:
        assert "ld.global" in combine and "ld.global" not in combine.split("griddepcontrol.wait")[0]


def test_an_early_combine_needs_dependent_launches():
    rung = KERNELS["kernel7"]
    config = replace(rung.config, early_combine=True)
    with pytest.raises(ValueError, match=r"early_combine must be False before sm_90, .*got sm_89"):
        rung.check(STATIC, config, "sm_89")
