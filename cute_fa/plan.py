"""What a call does: looked up by the shapes and options of its arguments, or checked and chosen once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cute_fa.dispatch import launch_for
from cute_fa.launch import score_arguments
from cute_fa.problem import (
    FP8,
    MAX_ROW_STRIDE,
    NO_OPTIONS,
    VECTOR,
    VECTOR_BYTES,
    AttentionProblem,
    ScoreFeatures,
    ScoreOptions,
    check_out,
    check_out_memory,
    memory_bytes,
    widened,
)
from layouts import SmemLayout


@dataclass(frozen=True)
class Plan:
    """What a call with certain shapes, strides and options does."""

    problem: AttentionProblem
    o_shape: tuple[int, ...] | None  # None: that of q, like which it is made in less time
    launch: Callable | None  # None: no query, no key or no memory behind the tensors: nothing to launch
    awkward: bool  # whether q, k or v has strides that the kernels can't take
    default_scale: float
    features: ScoreFeatures | None  # of the kernel; None: it takes no score options
    outs: dict[tuple, _Out]  # what was checked of the tensors that callers wanted o in, by shape and strides


@dataclass(frozen=True)
class _Out:
    """A kind of tensor for o, checked but for its address; bytes are from the first element to the end of the last."""

    out_bytes: int
    input_bytes: tuple[int, int, int]
    awkward: bool


_CONTIGUOUS = torch.contiguous_format
_MAX_PLANS = 4096
_OFF = object()  # stands for NO_OPTIONS in keys: its hash is found sooner
_plans: dict[tuple, Plan] = {}


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    return_lse: bool,
    out: torch.Tensor | None,
    options: ScoreOptions,
    kernel: str,
    layout: str | SmemLayout | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o and lse (None unless asked for), as ``cute_fa.forward`` documents, with every check and no autograd."""
    plan = _plan_for(q, k, v, causal, return_lse, options, kernel, layout)
    scale = plan.default_scale if softmax_scale is None else plan.problem.softmax_scale(softmax_scale)
    if q.dtype is FP8:
        q, k, v = widened(q), widened(k), widened(v)
    if out is None:
        like_q = plan.o_shape is None
        o = out = torch.empty_like(q, memory_format=_CONTIGUOUS) if like_q else q.new_empty(plan.o_shape)
    else:
        o = _writable(plan, out, q, k, v)
    lse = None
    if return_lse:
        lse = torch.empty(plan.problem.lse_shape, dtype=torch.float32, device=q.device)
    if plan.launch is None:
        o.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
            if options.sinks is not None:
                lse.copy_(options.sinks.detach()[:, None])
        return out, lse
    if plan.awkward:
        q, k, v = (with_plain_strides(tensor) for tensor in (q, k, v))
    extra = () if plan.features is None else (score_arguments(options, plan.features, plan.problem), None)
    plan.launch(q, k, v, o, lse, scale, *extra)
    return out, lse


def _writable(plan: Plan, out, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The caller's tensor, checked, with strides that the kernels take."""
    try:
        key = (out.shape, out.stride(), out.dtype, out.device)
        known = plan.outs.get(key)
        if known is not None and not out.requires_grad:
            first, end = out.data_ptr(), out.data_ptr() + known.out_bytes
            inputs = zip((q.data_ptr(), k.data_ptr(), v.data_ptr()), known.input_bytes, strict=True)
            if not first % VECTOR_BYTES and not any(first < start + size and start < end for start, size in inputs):
                return with_plain_strides(out) if known.awkward else out
    except (AttributeError, TypeError, RuntimeError):
        key = None  # no dense tensor; the checks name it
    check_out(out, q, v)
    check_out_memory(out, q, k, v)
    if key is not None:
        sizes = tuple(memory_bytes(tensor) for tensor in (q, k, v))
        plan.outs[key] = _Out(memory_bytes(out), sizes, _is_awkward(out.stride()))
    return with_plain_strides(out)


def _plan_for(q, k, v, causal, return_lse, options, kernel, layout) -> Plan:
    """The plan of a call: looked up by everything it depends on but pointers and gradients, else made."""
    try:
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            q.device, k.device, v.device,
            # By identity, since 1 == True: what is no bool must reach the checks.
            causal is True, causal is False, return_lse is True, return_lse is False,
            _OFF if options is NO_OPTIONS else options.key, kernel, layout,
        )  # fmt: skip
        plan = _plans.get(key)
        if (
            plan is not None
            and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % VECTOR_BYTES
            and not ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
            and (options is NO_OPTIONS or not options.needs_grad)
        ):
            return plan
    except (AttributeError, TypeError, RuntimeError):
        key = None  # something that is no dense tensor or can't be hashed; the checks name it
    plan = _make_plan(q, k, v, causal, return_lse, options, kernel, layout)
    if key is not None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _make_plan(q, k, v, causal, return_lse, options, kernel, layout) -> Plan:
    problem = AttentionProblem.from_tensors(q, k, v, causal=causal, return_lse=return_lse, options=options)
    launch = launch_for(problem, kernel, layout, needed=bool(q.numel() and problem.seqlen_k))
    awkward = any(_is_awkward(tensor.stride()) for tensor in (q, k, v))
    features = problem.static.features
    features = features if features.options else None
    scale = problem.softmax_scale(None)
    o_shape = None if problem.o_shape == q.shape else problem.o_shape
    return Plan(problem, o_shape, launch, awkward, scale, features, {})


def _is_awkward(strides: tuple[int, ...]) -> bool:
    """Whether some row starts off a 16-byte boundary, or rows lie too far apart."""
    return any(stride % VECTOR for stride in strides[:3]) or strides[1] > MAX_ROW_STRIDE


def with_plain_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with strides that the kernels take: a view if only extents of 1 are in the way."""
    strides = [stride if extent > 1 else VECTOR for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if _is_awkward(strides):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.as_strided(tensor.shape, (*strides[:3], 1))
