"""``torch.ops.cute_fa.forward``: the forward as an operator that torch.compile, export and autograd know.

Its arguments are those of ``cute_fa.forward``; it always returns (o, lse), with an lse of no elements where none
was asked for. It serves whatever watches operators rather than runs them; a call in eager mode goes past it, since the
dispatcher costs several microseconds.
"""

from __future__ import annotations

import torch

from cute_fa.plan import run
from cute_fa.problem import AttentionProblem, ScoreOptions
from cute_fa.sdpa_backward import attention_gradients

_SCHEMA = (
    "forward(Tensor q, Tensor k, Tensor v, bool causal, float? softmax_scale, bool return_lse, str kernel, "
    "str? layout, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? attn_bias=None) -> (Tensor, Tensor)"
)
_library = torch.library.Library("cute_fa", "DEF")
# Inductor hands over the strides that were traced, so that nothing it chose for itself needs a copy.
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


# The dispatcher leaves out trailing arguments that are the schema's defaults.
def _forward(q, k, v, causal, softmax_scale, return_lse, kernel, layout, *options):
    options = _score_options(*options)
    o, lse = run(q, k, v, causal, softmax_scale, return_lse, None, options, kernel, layout)
    return o, _no_lse(q) if lse is None else lse


def _fake_forward(q, k, v, causal, _softmax_scale, return_lse, _kernel, _layout, *options):
    options = _score_options(*options)
    problem = AttentionProblem.from_shapes(q, k, v, causal=causal, return_lse=return_lse, options=options)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not return_lse:
        return o, _no_lse(q)
    return o, q.new_empty(problem.lse_shape, dtype=torch.float32)


def _score_options(left=-1, right=-1, softcap=0.0, slopes=None, sinks=None, bias=None) -> ScoreOptions:
    return ScoreOptions.of((left, right), softcap, slopes, sinks, bias)


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty((0,), dtype=torch.float32)


def _setup_context(ctx, inputs, output):
    q, k, v, ctx.causal, ctx.softmax_scale, _, _, _, left, right, ctx.softcap, slopes, sinks, bias = inputs
    ctx.window_size = (left, right)
    ctx.save_for_backward(q, k, v, slopes, sinks, bias)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_o, _grad_lse):
    q, k, v, *tensors = ctx.saved_tensors
    options = ScoreOptions.of(ctx.window_size, ctx.softcap, *tensors)
    grads = attention_gradients(q, k, v, grad_o, causal=ctx.causal, softmax_scale=ctx.softmax_scale, options=options)
    return (*grads[:3], *(None,) * 8, *grads[3:])


def _refuse_vmap(_info, _in_dims, *_args):
    raise NotImplementedError(
        "q, k and v must not be inside torch.vmap: fold the mapped dimension into the batch of cute_fa.forward"
    )


forward = torch.ops.cute_fa.forward.default
for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _device)
torch.library.register_fake("cute_fa::forward", _fake_forward, lib=_library)
torch.library.register_autograd("cute_fa::forward", _backward, setup_context=_setup_context, lib=_library)
torch.library.register_vmap("cute_fa::forward", _refuse_vmap, lib=_library)
