"""What flash-attn's functions share: their switches in this package's terms, and checks of their other tensors."""

from __future__ import annotations

import torch


def refuse_dropout(dropout_p) -> None:
    """Raises unless the probability is a 0."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, float | int):
        raise TypeError(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p must be 0.0: there is no dropout here, got {dropout_p}")


def require_bool(name: str, value) -> None:
    """Raises TypeError unless it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def contiguous_rows(tensor):
    """A copy where the last dimension isn't contiguous, as flash-attn makes one; anything else as it is."""
    if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.stride(-1) != 1:
        return tensor.contiguous()
    return tensor
