"""Attention problems that the tests run, and how close a result must be."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from cute_fa.emulator import DEFAULT_ARCH
from cute_fa.ladder import KERNELS, LADDER
from cute_fa.problem import StaticProblem
from cute_fa.reference import attention_reference
from layouts import CATALOG


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call of forward."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    num_heads: int = 2
    num_heads_kv: int = 2
    softmax_scale: float | None = None
    magnitude: float = 1.0
    head_dim_v: int | None = None

    def tensors(self, device: str, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random normal q, k, v, times ``magnitude``."""

        def draw(seqlen, heads, head_dim):
            values = torch.randn(self.batch, seqlen, heads, head_dim, generator=generator)
            return (values * self.magnitude).to(self.dtype).to(device)

        return (
            draw(self.seqlen_q, self.num_heads, self.head_dim),
            draw(self.seqlen_k, self.num_heads_kv, self.head_dim),
            draw(self.seqlen_k, self.num_heads_kv, self.head_dim_v or self.head_dim),
        )

    def __str__(self):
        parts = [f"{self.seqlen_q}x{self.seqlen_k}", f"d{self.head_dim}", str(self.dtype).removeprefix("torch.")]
        parts += [f"b{self.batch}", f"h{self.num_heads}/{self.num_heads_kv}"]
        parts += [f"dv{self.head_dim_v}"] if self.head_dim_v is not None else []
        parts += ["causal"] if self.causal else []
        parts += [f"scale{self.softmax_scale}"] if self.softmax_scale is not None else []
        parts += [f"x{self.magnitude:g}"] if self.magnitude != 1.0 else []
        return "-".join(parts)


# The kernels that CPU tensors run: those built for the family of instructions that the emulator takes unless told.
EMULATED_KERNELS = [name for name, rung in KERNELS.items() if rung.runs_on(DEFAULT_ARCH)]


def usable_layouts() -> list[tuple[int, str]]:
    """(head_dim, name) of the catalog's layouts that the kernels take."""
    found = []
    for head_dim in (64, 128):
        for name, layout in CATALOG.items():
            with contextlib.suppress(ValueError):
                static = StaticProblem(torch.bfloat16, head_dim, False, False)
                LADDER[0].check(static, replace(LADDER[0].config, layout=layout), "sm_80")
                found.append((head_dim, name))
    return found


def assert_close(case: Case, q, k, v, o, lse) -> None:
    """o within twice the error that PyTorch's flash kernel makes, plus one rounding; lse within 1e-3.

    Where that kernel can't run, the error of rounding P to the inputs' type, all else exact, stands in.
    """
    options = {"causal": case.causal, "softmax_scale": case.softmax_scale}
    o_ref, lse_ref = attention_reference(q, k, v, **options)
    peer = _sdpa_flash(case, q, k, v)
    if peer is None:
        peer = attention_reference(q, k, v, **options, round_probs_to=case.dtype)[0].to(case.dtype)
    rounding = torch.finfo(case.dtype).eps * o_ref.abs().max().item() / 2
    allowed = 2 * (peer - o_ref).abs().max().item() + rounding
    error = (o - o_ref).abs().max().item()
    worst = torch.unravel_index((o - o_ref).abs().nan_to_num(torch.inf).argmax(), o.shape)
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, largest at {[int(i) for i in worst]}"
    assert o.dtype == case.dtype and o.shape == o_ref.shape
    assert lse.dtype == torch.float32 and lse.shape == lse_ref.shape
    # At magnitude m the scores grow with m * m, and float32 keeps 24 bits of them.
    torch.testing.assert_close(lse, lse_ref, atol=1e-3 * max(1.0, case.magnitude**2 / 100), rtol=1e-5)


def _sdpa_flash(case: Case, q, k, v) -> torch.Tensor | None:
    hides_rows = case.causal and case.seqlen_q > case.seqlen_k
    if not q.is_cuda or hides_rows or q.shape[3] != v.shape[3]:
        return None
    bias = causal_lower_right(case.seqlen_q, case.seqlen_k) if case.causal else None
    heads_first = (tensor.contiguous().transpose(1, 2) for tensor in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(
            *heads_first, attn_mask=bias, scale=case.softmax_scale, enable_gqa=case.num_heads != case.num_heads_kv
        )
    return o.transpose(1, 2)


LENGTHS = (1, 7, 63, 64, 65, 127, 129, 1000, 4097)
HALF, BF16 = torch.float16, torch.bfloat16

GPU_CASES = [
    *(Case(s, s, head_dim, causal, dtype) for s in LENGTHS for head_dim in (64, 128)
      for causal in (False, True) for dtype in (HALF, BF16)),
    *(Case(s_q, s_k, 128, causal) for causal in (False, True)
      for s_q, s_k in ((1, 4097), (7, 1000), (63, 65), (65, 63), (127, 7), (129, 1), (1000, 129), (4097, 1000),
                       (64, 8192))),
    *(Case(257, 333, head_dim, causal, batch=2, num_heads=heads, num_heads_kv=heads_kv)
      for head_dim in (64, 128) for causal in (False, True) for heads, heads_kv in ((8, 1), (16, 2), (6, 3))),
    *(Case(200, 200, 64, True, softmax_scale=scale) for scale in (1.0, 0.01, math.log(2))),
    *(Case(300, 300, head_dim, causal, dtype, magnitude=30.0) for head_dim in (64, 128)
      for causal in (False, True) for dtype in (HALF, BF16)),
]  # fmt: skip
