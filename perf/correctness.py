"""Errors against float32, measured before anything is timed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cute_fa.reference import attention_reference
from perf.cases import Case

MAX_HEADS = 16  # of all batches and heads, spread evenly
MAX_SCORES = 2**29  # scores of all heads that are checked


@dataclass(frozen=True)
class ErrorCheck:
    """Compares outputs of one case with the float32 reference on some of its heads."""

    heads: tuple[tuple[int, int], ...]  # (batch, head)
    expected: torch.Tensor  # (heads, S_q, D), float32
    rounding: float  # half a unit in the last place at the largest output
    attainable: float  # error of exact attention but for P, rounded as tensor cores need it

    @classmethod
    def of(cls, case: Case, q, k, v) -> ErrorCheck:
        """Computes the reference on evenly spread heads, as many as are cheap at this length."""
        total = case.B * case.H
        count = max(1, min(total, MAX_HEADS, MAX_SCORES // (case.S_q * case.S_k)))
        heads = tuple(divmod(index * total // count, case.H) for index in range(count))
        reference = functools.partial(_on_heads, case, heads, q, k, v)
        expected = reference()
        attainable = reference(round_probs_to=q.dtype).to(q.dtype)
        rounding = torch.finfo(q.dtype).eps / 2 * expected.abs().max().item()
        return cls(heads, expected, rounding, _max_error(attainable, expected))

    def error(self, o: torch.Tensor) -> float:
        """Largest absolute error of an output (B, S_q, H, D) on the heads checked; NaN counts as infinite."""
        return _max_error(self._checked(o), self.expected)

    def rms_error(self, o: torch.Tensor) -> float:
        """Root of the mean squared error of the same: one rounding more in one element hardly moves it."""
        return (self._checked(o).float() - self.expected).square().mean().sqrt().item()

    def _checked(self, o: torch.Tensor) -> torch.Tensor:
        return torch.stack([o[batch, :, head] for batch, head in self.heads])

    def allowed(self, peer_error: float | None) -> float:
        """Twice the error of SDPA's flash kernel (where it can't run: the attainable one) plus one rounding."""
        return 2 * (self.attainable if peer_error is None else peer_error) + self.rounding


def _on_heads(case: Case, heads, q, k, v, **options) -> torch.Tensor:
    outputs = []
    for batch, head in heads:
        head_kv = head // (case.H // case.H_kv)
        one_q = q[batch : batch + 1, :, head : head + 1]
        one_k, one_v = (tensor[batch : batch + 1, :, head_kv : head_kv + 1] for tensor in (k, v))
        outputs.append(attention_reference(one_q, one_k, one_v, causal=case.causal, **options)[0][0, :, 0])
    return torch.stack(outputs)


def _max_error(o: torch.Tensor, expected: torch.Tensor) -> float:
    return (o.float() - expected).abs().nan_to_num(torch.inf).max().item()
