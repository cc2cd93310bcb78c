"""Rotary embedding of tokens, as flash-attn's KV-cache function applies it."""

from __future__ import annotations

import torch


def rotate(tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Turns pairs of the first R elements of each head by their angles; in float32, rounded once.

    Args:
        tokens: (..., S, H, D); cos, sin: (..., S, R / 2), of each token's position.
        interleaved: pairs are elements (0, 1), (2, 3), ...; else (0, R / 2), (1, R / 2 + 1), ...
    """
    width = 2 * cos.shape[-1]
    turned, rest = tokens[..., :width].float(), tokens[..., width:]
    pairs = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    first, second = pairs.unbind(axis)
    cos, sin = cos.float().unsqueeze(-2), sin.float().unsqueeze(-2)
    pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), axis)
    return torch.cat((pairs.flatten(-2).to(tokens.dtype), rest), -1)
