"""Compiled kernels: the only place that calls ``cute.compile``, and the cache before it.

A kernel is compiled once for a (rung, static part of the problem, configuration, architecture); lengths,
batch, heads and strides are run-time values. Compiled kernels are kept in memory, and as object files in
a directory that later processes load from (``cache.cache_dir``). A file's name is the digest of all that its
kernel depends on: the sources, the versions of the compiler, the architecture. A directory that can't be
written or is full costs compile time, nothing else; a file that is damaged is compiled anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_fa.cache import cache_dir
from cute_fa.config import KernelConfig
from cute_fa.device.scores import ScoreArguments
from cute_fa.ladder import Rung
from cute_fa.problem import SEQUENCE_TENSORS, VECTOR, VECTOR_BYTES, StaticProblem

_CUTE_DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
    torch.bool: cutlass.Uint8,
}
_EXPORTED_NAME = "cute_fa_forward"
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_compile_lock = threading.RLock()  # the DSL traces into process-wide state
_in_memory: dict[tuple, Callable] = {}


@dataclass(frozen=True)
class Artifacts:
    """What a compilation left behind: PTX text and the assembled cubin."""

    ptx: str
    cubin: bytes


def get_compiled(static: StaticProblem, rung: Rung, config: KernelConfig, arch: str) -> Callable:
    """The compiled kernel as a function of (q, k, v, o, lse or None, softmax_scale), on torch tensors.

    With score options or sequences it takes two more, either None where there are none: a ``ScoreArguments`` of torch
    tensors and numbers, and a tuple of max_seqlen_q and the tensors of ``SEQUENCE_TENSORS``, with None for those not
    given. A rung that splits the keys takes (workspace, num_splits, that tuple) in any case; ``launch.get_launch``
    supplies the first two.

    It launches on the current stream of the tensors' device.
    """
    key = (static, rung.name, config, arch)
    with _compile_lock:
        if key not in _in_memory:
            path = _object_path(*key)
            compiled = _load_object(path)
            if compiled is None:
                compiled = _compile(static, rung, config, arch, _FOR_CALLS)
                _store_object(path, compiled)
                compiled = _load_object(path) or compiled  # what is loaded is called with less overhead
            _in_memory[key] = compiled
        return _in_memory[key]


def get_artifacts(static: StaticProblem, rung: Rung, config: KernelConfig, arch: str) -> Artifacts:
    """PTX (with source lines) and cubin of a kernel for any architecture; needs no GPU."""
    key = (static, rung.name, config, arch)
    with _compile_lock:
        path = _artifacts_path(*key)
        artifacts = _load_artifacts(path)
        if artifacts is None:
            _, artifacts = _compile_keeping_artifacts(static, rung, config, arch, "--generate-line-info")
            _store_artifacts(path, artifacts)
        return artifacts


def compile_ahead(static: StaticProblem, rung: Rung, config: KernelConfig, arch: str) -> Artifacts:
    """Leaves on disk what ``get_compiled`` and ``get_artifacts`` will load, by one compilation; needs no GPU.

    For processes that compile on behalf of another one.
    """
    key = (static, rung.name, config, arch)
    with _compile_lock:
        artifacts = _load_artifacts(_artifacts_path(*key))
        if artifacts is None or not _object_path(*key).exists():
            compiled, artifacts = _compile_keeping_artifacts(static, rung, config, arch, _FOR_CALLS)
            _store_object(_object_path(*key), compiled)
            _store_artifacts(_artifacts_path(*key), artifacts)
        return artifacts


_FOR_CALLS = "--enable-tvm-ffi --generate-line-info"


def _object_path(*key) -> Path:
    return cache_dir() / f"{_digest(*key, 'tvm-ffi object')}.o"


def _artifacts_path(*key) -> Path:
    return cache_dir() / f"{_digest(*key, 'artifacts')}.npz"


def _compile_keeping_artifacts(static: StaticProblem, rung: Rung, config: KernelConfig, arch: str, options: str):
    with tempfile.TemporaryDirectory() as dump_dir:
        keep = f"--keep-ptx --keep-cubin --dump-dir={dump_dir}"
        compiled = _compile(static, rung, config, arch, f"{options} {keep}")
        return compiled, Artifacts(compiled.__ptx__, compiled.__cubin__)


def _store_object(path: Path, compiled) -> None:
    _store(path, functools.partial(_export_object, compiled))


def _store_artifacts(path: Path, artifacts: Artifacts) -> None:
    contents = {"ptx": artifacts.ptx.encode(), "cubin": artifacts.cubin}
    arrays = {name: np.frombuffer(content, np.uint8) for name, content in contents.items()}
    _store(path, lambda name: np.savez(name, **arrays))


def _compile(static: StaticProblem, rung: Rung, config: KernelConfig, arch: str, options: str):
    """Traces and compiles one kernel with every extent and stride dynamic but the last of Q, K, V, O."""
    batch, seqlen_q, seqlen_k, num_heads, num_heads_kv = (cute.sym_int32() for _ in range(5))
    dtype = _CUTE_DTYPES[static.dtype]

    batch_kv = cute.sym_int32() if static.sequences else batch

    def fake_bshd(batch, seqlen, heads, head_dim):
        strides = tuple(sym(divisibility=VECTOR) for sym in (cute.sym_int64, cute.sym_int32, cute.sym_int64))
        shape = (batch, seqlen, heads, head_dim)
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=VECTOR_BYTES)

    head_dims = (static.head_dim, static.head_dim_v)
    mQ, mO = (fake_bshd(batch, seqlen_q, num_heads, head_dim) for head_dim in head_dims)
    mK, mV = (fake_bshd(batch_kv, seqlen_k, num_heads_kv, head_dim) for head_dim in head_dims)
    mLSE = None
    if static.return_lse:
        shape, strides = (batch, num_heads, seqlen_q), (cute.sym_int64(), cute.sym_int64(), 1)
        mLSE = make_fake_tensor(cutlass.Float32, shape, strides, assumed_align=4)
    entry = kernel = rung.kernel(static, config)
    extra, arguments = (), None
    sequences = _fake_sequences(static) if static.sequences else None
    if static.features.options:
        # Members of packed sequences are more than Q's batch.
        members = cute.sym_int32() if static.sequences else batch
        arguments = _fake_arguments(static, batch, members, num_heads, seqlen_q, seqlen_k)
    _name(rung.kernel.kernel, kernel_name(rung))
    if rung.splits_keys:
        _name(rung.kernel.combine, combine_name(rung))
        workspace = make_fake_tensor(cutlass.Float32, (cute.sym_int32(),), (1,), assumed_align=VECTOR_BYTES)
        extra = (workspace, cutlass.Int32(1), sequences)
    elif not static.is_plain:
        entry, extra = kernel.with_extras, (arguments, sequences)
    stream = make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
    scale = cutlass.Float32(1.0)
    options = f"--gpu-arch {arch} {options}"
    return cute.compile(entry, mQ, mK, mV, mO, mLSE, scale, *extra, stream, options=options)


def _fake_sequences(static: StaticProblem) -> tuple:
    """What ``SequenceTensors`` holds, with None for what isn't given."""

    def fake(name):
        if name not in static.sequences:
            return None
        shape, strides = ((cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1))
        if name != "block_table":
            shape, strides = shape[:1], (1,)
        return make_fake_tensor(cutlass.Int32, shape, strides, assumed_align=4)

    return (cutlass.Int32(1), *map(fake, SEQUENCE_TENSORS))


def _fake_arguments(static: StaticProblem, batch, members, num_heads, seqlen_q, seqlen_k) -> ScoreArguments:
    """Stand-ins for the values of the score options, of the problem's own extents."""
    features = static.features

    def fake(dtype, shape, strides):
        return make_fake_tensor(dtype, shape, strides, assumed_align=dtype.width // 8)

    def fake_factors():
        return fake(cutlass.Float32, (members, num_heads), (cute.sym_int64(), cute.sym_int64()))

    bias = features.bias
    return ScoreArguments(
        softcap=cutlass.Float32(1.0) if features.softcap else None,
        window_left=cutlass.Int32(1) if features.window_left else None,
        window_right=cutlass.Int32(1) if features.window_right else None,
        alibi_slopes=fake_factors() if features.alibi else None,
        sinks=fake(cutlass.Float32, (num_heads,), (1,)) if features.sinks else None,
        attn_bias=None
        if bias is None
        else fake(
            _CUTE_DTYPES[bias],
            (batch, num_heads, seqlen_q, seqlen_k),
            (*(cute.sym_int64() for _ in range(3)), 1),
        ),
        score_factors=fake_factors() if features.descales else None,
        output_factors=fake_factors() if features.descales else None,
    )


def kernel_name(rung: Rung) -> str:
    """What the kernel of a rung is called in PTX and in profiles, but for a number that the DSL appends."""
    return f"cute_fa_{rung.name}"


def combine_name(rung: Rung) -> str:
    """The same of the kernel that merges the splits of the keys."""
    return f"cute_fa_{rung.name}_combine"


def _name(kernel, name: str) -> None:
    kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)


def _export_object(compiled, name: str) -> None:
    """Writes the object file and behind it a checksum, which linkers don't look at."""
    compiled.export_to_c(name, function_name=_EXPORTED_NAME)
    with open(name, "r+b") as file:
        file.write(hashlib.sha256(file.read()).digest())


def _load_object(path: Path) -> Callable | None:
    try:
        contents = path.read_bytes()
    except OSError:
        return None
    body, checksum = contents[:-_CHECKSUM_BYTES], contents[-_CHECKSUM_BYTES:]
    if hashlib.sha256(body).digest() != checksum:
        return None
    try:
        return getattr(cute.runtime.load_module(str(path), enable_tvm_ffi=True), _EXPORTED_NAME)
    except Exception:  # whatever is wrong with the file, compiling anew is right
        return None


def _load_artifacts(path: Path) -> Artifacts | None:
    if not path.exists():
        return None
    try:
        with np.load(path) as contents:  # a zip archive, whose checksums are checked
            return Artifacts(contents["ptx"].tobytes().decode(), contents["cubin"].tobytes())
    except Exception:  # whatever is wrong with the file, compiling anew is right
        return None


def _store(path: Path, write: Callable[[str], object]) -> None:
    """Writes a file whole or not at all; processes that race leave one of their equal results."""
    temporary = path.with_name(f".{path.stem}-{os.getpid()}-{threading.get_ident()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(temporary))
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _digest(*parts) -> str:
    return hashlib.sha256(repr((*parts, _source_digest(), *_versions())).encode()).hexdigest()[:32]


@functools.cache
def _source_digest() -> str:
    """Changes with any source that a kernel is traced from."""
    import layouts

    package, layout_package = Path(__file__).parent, Path(layouts.__file__).parent
    sources = [path for folder in (".", "kernels", "device") for path in sorted((package / folder).glob("*.py"))]
    sources += [layout_package / "smem_layout.py", layout_package / "cute_adapter.py"]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    """What compiles: the DSL, the libraries that bring its compiler for one CUDA or another, and the calling layer."""
    found = [platform.machine()]
    libraries = (f"nvidia-cutlass-dsl-libs-{variant}" for variant in ("base", "core", "cu12", "cu13"))
    for package in ("nvidia-cutlass-dsl", *libraries, "apache-tvm-ffi"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return tuple(found)
