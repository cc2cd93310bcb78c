"""The forward that people call: arguments -> problem -> rung -> launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_fa.arch import arch_of_capability
from cute_fa.emulator import DEFAULT_ARCH, emulated_launch
from cute_fa.ladder import select
from cute_fa.launch import get_launch
from cute_fa.problem import MAX_ROW_STRIDE, VECTOR, AttentionProblem, check_no_grad, check_pointer
from layouts import SmemLayout


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    layout: str | SmemLayout | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(softmax_scale * q k^T) v, for each batch and head.

    Tensors on a GPU run on it, on the current stream. Tensors on the CPU run through the emulator: the
    compiled kernel, instruction by instruction, with its races and stray accesses found; slow, for small
    problems.

    Args:
        q: (B, S_q, H, D), fp16 or bf16, last dimension contiguous, any other strides; D is 64 or 128.
        k, v: (B, S_k, H_kv, D), of the same dtype; H is a multiple of H_kv (each head of k and v serves
            H / H_kv heads of q).
        causal: query i sees keys up to i + S_k - S_q: the last query sees the last key.
        softmax_scale: greater than 0 (2**-126 to 2**64); 1 / sqrt(D) when None.
        return_lse: also return the log-sum-exp of the scaled scores.
        kernel: a rung of the ladder ("kernel1", ...), or "auto" for the best.
        layout: another shared-memory layout for that kernel, by its name in the catalog or as a value.

    Returns:
        o (B, S_q, H, D), contiguous, dtype and device of q; with ``return_lse`` also lse (B, H, S_q), fp32,
        natural logarithm. A query that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: before anything is launched, naming the argument and what is allowed.
        EmulationError: on the CPU, a fault of the kernel, or more work than the emulator should be given.
    """
    plan = _plan_for(q, k, v, causal, return_lse, kernel, layout)
    problem = plan.problem
    scale = problem.softmax_scale(softmax_scale)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = None
    if return_lse:
        shape = (problem.batch, problem.num_heads, problem.seqlen_q)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if plan.launch is None:
        o.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
    else:
        if plan.awkward:
            q, k, v = (_with_plain_strides(tensor) for tensor in (q, k, v))
        if problem.device.type == "cpu" or problem.device.index == torch.cuda.current_device():
            plan.launch(q, k, v, o, lse, scale)
        else:
            with torch.cuda.device(problem.device):
                plan.launch(q, k, v, o, lse, scale)
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class _Plan:
    """What a call with certain shapes, strides and options does; checked and chosen once."""

    problem: AttentionProblem
    launch: Callable | None  # None: no query or no key, nothing to launch
    awkward: bool  # whether q, k or v has strides that the kernels can't take


_MAX_PLANS = 4096
_plans: dict[tuple, _Plan] = {}


def _plan_for(q, k, v, causal, return_lse, kernel, layout) -> _Plan:
    """The plan of a call: looked up by everything it depends on but the pointers, else made."""
    try:
        key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype)
        # By identity, since 1 == True: what is no bool must reach the checks.
        flags = (causal is True, causal is False, return_lse is True, return_lse is False)
        key += (q.device, k.device, v.device, flags, kernel, layout)
        plan = _plans.get(key)
    except (AttributeError, TypeError, RuntimeError):
        plan = None  # something that is no dense tensor or can't be hashed; the checks name it
    if plan is None:
        plan = _make_plan(q, k, v, causal, return_lse, kernel, layout)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
        return plan
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_pointer(name, tensor)
        check_no_grad(name, tensor)
    return plan


def _make_plan(q, k, v, causal, return_lse, kernel, layout) -> _Plan:
    problem = AttentionProblem.from_tensors(q, k, v, causal=causal, return_lse=return_lse)
    if problem.device.type == "cuda":
        arch = arch_of_capability(torch.cuda.get_device_capability(problem.device))
    elif problem.device.type == "cpu":
        arch = DEFAULT_ARCH
    else:
        raise ValueError(f"q, k and v must be on a CUDA device or the CPU, got {problem.device}")
    rung, config = select(problem, arch, kernel, layout)
    awkward = any(_is_awkward(tensor.stride()) for tensor in (q, k, v))
    launch = None
    if q.numel() and problem.seqlen_k:
        if problem.device.type == "cpu":
            launch = emulated_launch(problem.static, rung, config, arch)
        else:
            with torch.cuda.device(problem.device):
                launch = get_launch(problem, rung, config, arch)
    return _Plan(problem, launch, awkward)


def _is_awkward(strides: tuple[int, ...]) -> bool:
    """Whether some row starts off a 16-byte boundary, or rows lie too far apart."""
    return any(stride % VECTOR for stride in strides[:3]) or strides[1] > MAX_ROW_STRIDE


def _with_plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with strides that the kernels take: a view if only extents of 1 are in the way."""
    strides = [stride if extent > 1 else VECTOR for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if _is_awkward(strides):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.as_strided(tensor.shape, (*strides[:3], 1))
