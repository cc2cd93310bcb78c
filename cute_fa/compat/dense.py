"""``flash_attn_func`` of flash-attn 2.8, its forward."""

from __future__ import annotations

import torch

from cute_fa.api import forward
from cute_fa.compat.arguments import contiguous_rows, refuse_dropout, require_bool


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backward: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """flash-attn's function of this name, argument by argument (2.8).

    Args:
        q: (B, S_q, H, D); k, v: (B, S_k, H_kv, D), as ``cute_fa.forward`` takes them; a last dimension that isn't
            contiguous is copied.
        dropout_p: 0.0.
        softmax_scale: 1 / sqrt(D) when None.
        causal: aligned at the bottom right.
        window_size, softcap, alibi_slopes: as in ``cute_fa.forward``.
        deterministic: no matter; the forward always is.
        return_attn_probs: also return the log-sum-exp and, as flash-attn does without dropout, an empty tensor.
        backward: not an argument of flash-attn: as in ``cute_fa.forward``. Without it gradients are refused.

    Returns:
        o (B, S_q, H, D), or (o, lse (B, H, S_q) fp32, an empty tensor). A row that sees no key has an lse of -inf;
        flash-attn writes +inf there.

    Raises:
        TypeError, ValueError, NotImplementedError: before a launch, naming the argument and what is allowed.
    """
    refuse_dropout(dropout_p)
    require_bool("return_attn_probs", return_attn_probs)
    result = forward(
        contiguous_rows(q),
        contiguous_rows(k),
        contiguous_rows(v),
        causal=causal,
        softmax_scale=softmax_scale,
        return_lse=return_attn_probs,
        backward=backward,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return (*result, q.new_empty(0)) if return_attn_probs else result
