"""Gradients of attention by way of PyTorch: computed again and differentiated.

By its scaled_dot_product_attention where that can do it; where an option changes the scores, by operators that hold all
scores in fp32.
"""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from cute_fa.problem import HIDING_BIAS, ScoreOptions


def attention_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_o: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    options: ScoreOptions,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of q (B, S_q, H, D), k and v (B, S_k, H_kv, D) for the gradient of o (B, S_q, H, D); then those of
    ``alibi_slopes``, ``sinks`` and ``attn_bias``, None where there is none to have.

    A query that sees no key has an output of 0 whatever its inputs are, so it gives and gets none.

    Raises:
        NotImplementedError: a second derivative was asked for (create_graph=True).
    """
    if torch.is_grad_enabled():
        raise NotImplementedError('backward="sdpa" has first derivatives only: create_graph must be False')
    if options.features.options:
        return _gradients_of_scores(q, k, v, grad_o, causal, softmax_scale, options)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    blind = seqlen_q - seqlen_k if causal and seqlen_q > seqlen_k else 0
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        query, key, value = (tensor.transpose(1, 2) for tensor in (inputs[0][:, blind:], *inputs[1:]))
        # What remains has at least as many keys as queries; as many, and both corners of the mask are the same.
        square = bool(seqlen_q - blind == seqlen_k)
        mask = None if square or not causal else _lower_right(seqlen_q - blind, seqlen_k, k)
        o = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=causal and square,
            scale=softmax_scale,
            enable_gqa=bool(q.shape[2] != k.shape[2]),
        )
    return (*torch.autograd.grad(o, inputs, grad_o[:, blind:].transpose(1, 2)), None, None, None)


def _gradients_of_scores(q, k, v, grad_o, causal, softmax_scale, options: ScoreOptions):
    """The same with every option."""
    tensors = [options.alibi_slopes, options.sinks, options.attn_bias]
    with torch.enable_grad():
        inputs = [
            tensor if tensor is None or tensor.dtype == torch.bool else tensor.detach().requires_grad_()
            for tensor in (q, k, v, *tensors)
        ]
        o = _attention(*inputs, causal, softmax_scale, options.window_size, options.softcap)
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    grads = iter(torch.autograd.grad(o, wanted, grad_o.to(o.dtype)))
    return tuple(next(grads) if tensor is not None and tensor.requires_grad else None for tensor in inputs)


def _attention(q, k, v, slopes, sinks, bias, causal, softmax_scale, window_size, softcap) -> torch.Tensor:
    """o (B, S_q, H, D) in fp32, by the definitions of ``cute_fa.forward``."""
    seqlen_q, seqlen_k, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size
    query = q.transpose(1, 2).float()
    key, value = (tensor.transpose(1, 2).float().repeat_interleave(group, 1) for tensor in (k, v))
    scores = query @ key.transpose(2, 3) * scale
    distance = torch.arange(seqlen_k - seqlen_q, seqlen_k, device=q.device)[:, None]
    distance = distance - torch.arange(seqlen_k, device=q.device)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if causal or right != -1:
        hidden = hidden | (-distance > (0 if causal else right))
    if left != -1:
        hidden = hidden | (distance > left)
    if softcap != 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes[..., None, None] * distance.abs()
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        hidden = hidden | (bias < HIDING_BIAS)
        scores = scores + bias.float()
    if sinks is not None:
        # A key whose value is 0, which every query sees.
        sink = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores, hidden = torch.cat((scores, sink), 3), torch.nn.functional.pad(hidden, (0, 1))
        value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    blind = hidden.all(3, keepdim=True)
    scores = torch.where(hidden, torch.where(blind, 0.0, -torch.inf), scores)
    probs = torch.softmax(scores, 3)
    return (torch.where(blind, 0.0, probs) @ value).transpose(1, 2)


def _lower_right(seqlen_q: int, seqlen_k: int, like: torch.Tensor) -> torch.Tensor:
    """The causal mask whose last query sees the last key: PyTorch's own, which its fused kernels know, or for a tracer,
    which can't make that one, all S_q S_k values of it."""
    if type(like) is torch.Tensor:
        return causal_lower_right(seqlen_q, seqlen_k)
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=like.device).tril(seqlen_k - seqlen_q)
