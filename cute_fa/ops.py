"""``torch.ops.cute_fa``: the forward as an operator that torch.compile, export and autograd know.

``forward`` has the arguments of ``cute_fa.forward``, ``forward_varlen`` those of ``cute_fa.varlen.forward_varlen`` and
no gradient. ``forward`` always returns (o, lse), with an lse of no elements where none
was asked for. It serves whatever watches operators rather than runs them; a call in eager mode goes past it, since the
dispatcher costs several microseconds.
"""

from __future__ import annotations

import torch

from cute_fa.plan import run
from cute_fa.problem import SEQUENCE_TENSORS, AttentionProblem, ScoreOptions
from cute_fa.sdpa_backward import attention_gradients
from cute_fa.varlen import fake_varlen, run_varlen

_SCHEMA = (
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, bool return_lse, str kernel, "
    "str? layout, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? attn_bias=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None) -> (Tensor, Tensor)"
)
_library = torch.library.Library("cute_fa", "DEF")
# Inductor hands over the strides that were traced, so that nothing it chose for itself needs a copy.
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


def _options(window_left=-1, window_right=-1, softcap=0.0, *tensors) -> ScoreOptions:
    """Of an operator's last arguments; PyTorch leaves out those at the end that have their defaults."""
    return ScoreOptions.of((window_left, window_right), softcap, *tensors)


def _forward(q, k, v, causal, softmax_scale, return_lse, kernel, layout, *options):
    options = _options(*options)
    o, lse = run(q, k, v, causal, softmax_scale, return_lse, None, options, kernel, layout)
    return o, _no_lse(q) if lse is None else lse


def _fake_forward(q, k, v, causal, _scale, return_lse, _kernel, _layout, *options):
    options = _options(*options)
    problem = AttentionProblem.from_shapes(q, k, v, causal=causal, return_lse=return_lse, options=options)
    o = q.new_empty(problem.o_shape, dtype=problem.dtype)
    if not return_lse:
        return o, _no_lse(q)
    return o, q.new_empty(problem.lse_shape, dtype=torch.float32)


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((0,), dtype=torch.float32)


_SEQUENCES = ", ".join(f"Tensor? {name}" for name in SEQUENCE_TENSORS)
_library.define(
    f"forward_varlen(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "bool causal, float? softmax_scale, str kernel, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _forward_varlen(q, k, v, *arguments):
    tensors, others, options = _of_varlen(arguments)
    *lengths_and_scale, kernel = others
    return run_varlen(q, k, v, tensors, *lengths_and_scale, options, kernel)


def _fake_forward_varlen(q, k, v, *arguments):
    tensors, (max_seqlen_q, max_seqlen_k, causal, *_), options = _of_varlen(arguments)
    return fake_varlen(q, k, v, tensors, max_seqlen_q, max_seqlen_k, causal, options)


def _of_varlen(arguments: tuple) -> tuple[tuple, tuple, ScoreOptions]:
    """(tensors, from max_seqlen_q to kernel, options)."""
    first, behind = len(SEQUENCE_TENSORS), len(SEQUENCE_TENSORS) + 5
    scores, descales = arguments[behind : behind + 5], arguments[behind + 5 :]
    no_bias = (None,) if descales else ()
    return arguments[:first], arguments[first:behind], _options(*scores, *no_bias, *descales)


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.softmax_scale, _, _, _, left, right, ctx.softcap, slopes, sinks, bias, *_ = inputs
    ctx.window_size = (left, right)
    ctx.save_for_backward(q, k, v, slopes, sinks, bias)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_o, _grad_lse):
    q, k, v, *tensors = ctx.saved_tensors
    options = ScoreOptions.of(ctx.window_size, ctx.softcap, *tensors)
    grads = attention_gradients(q, k, v, grad_o, causal=ctx.causal, softmax_scale=ctx.softmax_scale, options=options)
    return (*grads[:3], *(None,) * 8, *grads[3:], None, None, None)


def _refuse_vmap(_info, _in_dims, *_args):
    raise NotImplementedError(
        "q, k and v must not be inside torch.vmap: fold the mapped dimension into the batch of cute_fa.forward"
    )


forward = torch.ops.cute_fa.forward.default
for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _device)
    _library.impl("forward_varlen", _forward_varlen, _device)
torch.library.register_fake("cute_fa::forward", _fake_forward, lib=_library)
torch.library.register_fake("cute_fa::forward_varlen", _fake_forward_varlen, lib=_library)
torch.library.register_autograd("cute_fa::forward", _backward, setup_context=_setup_context, lib=_library)
torch.library.register_vmap("cute_fa::forward", _refuse_vmap, lib=_library)
