"""Compile ahead what a service will call, so that no request waits for a compiler."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from cute_fa.arch import arch_of_capability, get_arch
from cute_fa.compiled import get_compiled
from cute_fa.ladder import select
from cute_fa.plan import run
from cute_fa.problem import (
    DTYPES,
    HEAD_DIMS,
    SEQUENCE_TENSORS,
    AttentionProblem,
    ScoreOptions,
    compute_dtype,
    require_bool,
    require_int,
)
from cute_fa.varlen import describe, run_varlen

# Numbers of queries and keys whose kernels are made ready: those of keys that choices are measured at, since a rung
# and its tiles depend on them, with one query, which decodes, and with as many.
LENGTHS = tuple((seqlen_q, seqlen_k) for seqlen_k in (512, 2048, 8192) for seqlen_q in (1, seqlen_k))

# What ``options`` may name.
BIASES = ("mask", "bias", "bias_fp32")
OPTIONS = ("window_left", "window_right", "softcap", "alibi_slopes", "sinks", *BIASES, "descales")


@dataclass(frozen=True)
class Warmed:
    """A kernel that is ready: what it serves, and the seconds until it was (little if the disk cache had it)."""

    kernel: str
    config: str
    arch: str
    dtype: torch.dtype
    head_dim: int
    causal: bool
    return_lse: bool
    head_dim_v: int
    options: tuple[str, ...]
    sequences: tuple[str, ...]
    seconds: float


def warmup(
    *,
    head_dim: int | Collection[int] = (64, 128),
    dtype: torch.dtype | Collection[torch.dtype] = DTYPES,
    causal: bool | Collection[bool] = (False, True),
    return_lse: bool | Collection[bool] = (False, True),
    head_dim_v: int | None = None,
    options: Collection[str] = (),
    sequences: Collection[str] = (),
    kernel: str = "auto",
    device: torch.device | str | int | None = None,
    arch: str | None = None,
) -> list[Warmed]:
    """Makes every combination ready: compiled, in the disk cache, and with a device also loaded there and run once, so
    that a CUDA graph can capture it. Kernels are compiled for no batch, heads or strides; which kernel and which tiles
    serve a call depends on its lengths, so those of one query and of many over 512 to 8192 keys are all made ready.

    Args:
        head_dim, dtype, causal, return_lse: one value or several; all that there are by default, of head
            dimensions the two most common, of types those that kernels compute in.
        head_dim_v: that of v, if it isn't head_dim.
        options: what changes the scores of the calls, all of it together: of "window_left", "window_right" (the sides
            of a window that have a bound), "softcap", "alibi_slopes", "sinks", "mask" (a bool attn_bias), "bias" (one
            of q's dtype), "bias_fp32" and "descales" (any of fp8's).
        sequences: the arguments of ``forward_varlen`` that say where members lie, if calls have them:
            "cu_seqlens_q" and "cu_seqlens_k" for ``flash_attn_varlen_func``, "seqused_k" for
            ``flash_attn_with_kvcache`` with cache_seqlens, besides "block_table", "cache_batch_idx", "leftpad_k".
            Such calls always have a log-sum-exp.
        kernel: as in ``cute_fa.forward``.
        device: a CUDA device; the current one when neither this nor ``arch`` is given.
        arch: in place of a device, an architecture ("sm_90a") to compile for, where there may be no GPU.

    Returns:
        What is ready now, one entry a combination and kernel or tile that some length gets.

    Raises:
        TypeError, ValueError: an argument that ``cute_fa.forward`` or ``forward_varlen`` refuses, or no device to
            warm up.
    """
    if arch is not None and device is not None:
        raise ValueError(f"arch must be None with a device, got arch {arch!r} and device {device!r}")
    options, sequences = _names("options", options, OPTIONS), _names("sequences", sequences, SEQUENCE_TENSORS)
    for name, value in (("head_dim", head_dim), ("head_dim_v", () if head_dim_v is None else (head_dim_v,))):
        for one in _as_tuple(value):
            require_int(name, one)
            if one not in HEAD_DIMS:
                raise ValueError(f"{name} must be a multiple of 8 from 8 to 256, got {one}")
    if arch is None:
        device = _cuda_device(device)
        arch = arch_of_capability(torch.cuda.get_device_capability(device))
    get_arch(arch)
    place = torch.device("meta") if device is None else device
    warmed, seen = [], set()
    for choice in itertools.product(*map(_as_tuple, (dtype, head_dim, causal, return_lse))):
        for lengths in LENGTHS:
            start = time.perf_counter()
            call = _Call.of(lengths, *choice, head_dim_v, options, sequences, place)
            problem = call.problem()
            rung, config = select(problem, arch, kernel)
            if (problem.static, rung.name, config) in seen:
                continue
            seen.add((problem.static, rung.name, config))
            if device is None:
                get_compiled(problem.static, rung, config, arch)
            else:
                call.run(kernel)
            kind = (*choice[:3], problem.return_lse, problem.head_dim_v, options, sequences)
            warmed.append(Warmed(rung.name, str(config), arch, *kind, time.perf_counter() - start))
    return warmed


@dataclass(frozen=True)
class _Call:
    """A call of one member and one head, of ``forward``, or with sequences of ``forward_varlen``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    return_lse: bool
    options: ScoreOptions
    sequences: dict[str, torch.Tensor]

    @staticmethod
    def of(lengths, dtype, head_dim, causal, return_lse, head_dim_v, options, sequences, device) -> _Call:
        """Of ``lengths`` (S_q, S_k)."""
        seqlen_q, seqlen_k = lengths
        v_dim = head_dim if head_dim_v is None else head_dim_v
        shapes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, v_dim))
        q, k, v = (torch.zeros(1, length, 1, dim, dtype=dtype, device=device) for length, dim in shapes)
        ends = {"cu_seqlens_q": (0, seqlen_q), "cu_seqlens_k": (0, seqlen_k), "seqused_k": (seqlen_k,)}
        ends |= {"block_table": ((0,),), "cache_batch_idx": (0,), "leftpad_k": (0,)}
        tensors = {name: torch.tensor(ends[name], dtype=torch.int32, device=device) for name in sequences}
        if "cu_seqlens_q" in tensors:
            q = q[0]
        if "cu_seqlens_k" in tensors and "block_table" not in tensors:
            k, v = k[0], v[0]
        return _Call(q, k, v, causal, return_lse, _score_options(options, dtype, device), tensors)

    def problem(self) -> AttentionProblem:
        """As ``select`` takes it, with every check."""
        tensors = (self.q, self.k, self.v)
        require_bool("return_lse", self.return_lse)
        if not self.sequences:
            return AttentionProblem.from_tensors(
                *tensors, causal=self.causal, return_lse=self.return_lse, options=self.options
            )
        return describe(*tensors, self._where(), *self._longest(), self.causal, self.options)

    def run(self, kernel: str) -> None:
        """Makes the call."""
        if self.sequences:
            where = (*self._longest(), self.causal, None, self.options, kernel)
            run_varlen(self.q, self.k, self.v, self._where(), *where)
        else:
            run(self.q, self.k, self.v, self.causal, None, self.return_lse, None, self.options, kernel, None)

    def _where(self) -> tuple:
        return tuple(self.sequences.get(name) for name in SEQUENCE_TENSORS)

    def _longest(self) -> tuple[int, int]:
        return self.q.shape[-3], self.k.shape[-3]


def _cuda_device(device) -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError(
            f"device must be a CUDA device, got {device!r}, and none is visible to PyTorch; name an arch to compile "
            f"without one"
        )
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    return device


def _score_options(names: Collection[str], dtype: torch.dtype, device: torch.device) -> ScoreOptions:
    """Those of ``OPTIONS`` that are named, as a call with one head has them."""
    biases = [name for name in BIASES if name in names]
    if len(biases) > 1:
        raise ValueError(f"options must name one kind of attn_bias, got {', '.join(biases)}")
    bias_dtype = {"mask": torch.bool, "bias": compute_dtype(dtype), "bias_fp32": torch.float32}

    def if_named(name: str, shape=(1,), dtype=torch.float32) -> torch.Tensor | None:
        return torch.ones(shape, dtype=dtype, device=device) if name in names else None

    return ScoreOptions(
        window_size=tuple(1 if side in names else -1 for side in ("window_left", "window_right")),
        softcap=1.0 if "softcap" in names else 0.0,
        alibi_slopes=if_named("alibi_slopes"),
        sinks=if_named("sinks"),
        attn_bias=if_named(biases[0], (1, 1), bias_dtype[biases[0]]) if biases else None,
        q_descale=if_named("descales"),
    )


def _names(argument: str, names, known: Collection[str]) -> tuple[str, ...]:
    """Those of ``known`` that are named, in its order."""
    if isinstance(names, str | bytes) or not isinstance(names, Collection):
        raise TypeError(f"{argument} must be a collection of names, got {names!r}")
    for name in names:
        if name not in list(known):
            raise ValueError(f"{argument} must be some of {', '.join(known)}, got {name!r}")
    return tuple(name for name in known if name in names)


def _as_tuple(value) -> tuple:
    return (value,) if isinstance(value, str) or not isinstance(value, Collection) else tuple(value)
