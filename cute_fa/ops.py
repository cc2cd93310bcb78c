"""``torch.ops.cute_fa``: the forward as an operator that torch.compile, export and autograd know.

``forward`` has the arguments of ``cute_fa.forward``, ``forward_varlen`` those of ``cute_fa.varlen.forward_varlen`` and
no gradient. ``forward`` always returns (o, lse), with an lse of no elements where none
was asked for. It serves whatever watches operators rather than runs them; a call in eager mode goes past it, since the
dispatcher costs several microseconds.
"""

from __future__ import annotations

import torch

from cute_fa.plan import run
from cute_fa.problem import NO_OPTIONS, SEQUENCE_TENSORS, AttentionProblem
from cute_fa.sdpa_backward import attention_gradients
from cute_fa.varlen import fake_varlen, run_varlen

_SCHEMA = (
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, bool return_lse, str kernel, "
    "str? layout) -> (Tensor, Tensor)"
)
_library = torch.library.Library("cute_fa", "DEF")
# Inductor hands over the strides that were traced, so that nothing it chose for itself needs a copy.
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


def _forward(q, k, v, causal, softmax_scale, return_lse, kernel, layout):
    o, lse = run(q, k, v, causal, softmax_scale, return_lse, None, NO_OPTIONS, kernel, layout)
    return o, _no_lse(q) if lse is None else lse


def _fake_forward(q, k, v, causal, softmax_scale, return_lse, kernel, layout):
    problem = AttentionProblem.from_shapes(q, k, v, causal=causal, return_lse=return_lse)
    o = q.new_empty(problem.o_shape)
    if not return_lse:
        return o, _no_lse(q)
    return o, q.new_empty(problem.lse_shape, dtype=torch.float32)


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((0,), dtype=torch.float32)


_SEQUENCES = ", ".join(f"Tensor? {name}" for name in SEQUENCE_TENSORS)
_library.define(
    f"forward_varlen(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    f"bool causal, float? softmax_scale, str kernel) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _forward_varlen(q, k, v, *arguments):
    *tensors, max_seqlen_q, max_seqlen_k, causal, softmax_scale, kernel = arguments
    lengths = (tuple(tensors), max_seqlen_q, max_seqlen_k)
    return run_varlen(q, k, v, *lengths, causal, softmax_scale, NO_OPTIONS, kernel)


def _fake_forward_varlen(q, k, v, *arguments):
    *tensors, max_seqlen_q, max_seqlen_k, causal, _softmax_scale, _kernel = arguments
    return fake_varlen(q, k, v, tuple(tensors), max_seqlen_q, max_seqlen_k, causal)


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.softmax_scale, *_ = inputs
    ctx.save_for_backward(q, k, v)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_o, _grad_lse):
    grads = attention_gradients(*ctx.saved_tensors, grad_o, causal=ctx.causal, softmax_scale=ctx.softmax_scale)
    return (*grads, None, None, None, None, None)


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
