"""Compile ahead what a service will call, so that no request waits for a compiler."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from cute_fa.api import forward
from cute_fa.arch import arch_of_capability, get_arch
from cute_fa.compiled import get_compiled
from cute_fa.ladder import select
from cute_fa.problem import DTYPES, AttentionProblem

# Lengths whose kernels are made ready: one query, which decodes, and those that choices are measured at, since a rung
# and its tiles depend on the length.
LENGTHS = (1, 512, 2048, 8192)


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
    seconds: float


def warmup(
    *,
    head_dim: int | Collection[int] = (64, 128),
    dtype: torch.dtype | Collection[torch.dtype] = DTYPES,
    causal: bool | Collection[bool] = (False, True),
    return_lse: bool | Collection[bool] = (False, True),
    kernel: str = "auto",
    device: torch.device | str | int | None = None,
    arch: str | None = None,
) -> list[Warmed]:
    """Makes every combination ready: compiled, in the disk cache, and with a device also loaded there and run once, so
    that a CUDA graph can capture it. Kernels are compiled for no batch, heads or strides; which kernel and which tiles
    serve a call depends on its lengths, so those of one query and of 512 to 8192 are all made ready. Calls with score
    options, another head dimension of v, packed sequences or caches are not among them: they compile at their first.

    Args:
        head_dim, dtype, causal, return_lse: one value or several; all that there are by default, of head
            dimensions the two most common.
        kernel: as in ``cute_fa.forward``.
        device: a CUDA device; the current one when neither this nor ``arch`` is given.
        arch: in place of a device, an architecture ("sm_90a") to compile for, where there may be no GPU.

    Returns:
        What is ready now, one entry a combination and kernel or tile that some length gets.

    Raises:
        TypeError, ValueError: an argument that ``cute_fa.forward`` refuses, or no device to warm up.
    """
    if arch is not None and device is not None:
        raise ValueError(f"arch must be None with a device, got arch {arch!r} and device {device!r}")
    if arch is None:
        device = _cuda_device(device)
        arch = arch_of_capability(torch.cuda.get_device_capability(device))
    get_arch(arch)
    warmed = []
    for choice in itertools.product(*map(_as_tuple, (dtype, head_dim, causal, return_lse))):
        a_dtype, a_head_dim, is_causal, with_lse = choice
        seen = set()
        for length in LENGTHS:
            start = time.perf_counter()
            shape = (1, length, 1, a_head_dim)
            q = torch.zeros(shape, dtype=a_dtype, device="meta" if device is None else device)
            problem = AttentionProblem.from_tensors(q, q, q, causal=is_causal, return_lse=with_lse)
            rung, config = select(problem, arch, kernel)
            if (rung.name, config) in seen:
                continue
            seen.add((rung.name, config))
            if device is None:
                get_compiled(problem.static, rung, config, arch)
            else:
                forward(q, q, q, causal=is_causal, return_lse=with_lse, kernel=kernel)
            warmed.append(Warmed(rung.name, str(config), arch, *choice, time.perf_counter() - start))
    return warmed


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


def _as_tuple(value) -> tuple:
    return (value,) if isinstance(value, str) or not isinstance(value, Collection) else tuple(value)
