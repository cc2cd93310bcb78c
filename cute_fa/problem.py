"""AttentionProblem: what is to be computed. The only place that checks tensors, and every error's text."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import torch

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
VECTOR_BYTES = 16
VECTOR = VECTOR_BYTES // 2  # elements of 16 bits
MAX_SEQLEN = 2**30  # positions and their sums stay within int32 in the kernels
MAX_ROW_STRIDE = 2**24  # elements from one position to the next: 128 rows of a tile stay within int32
MAX_CTAS = 2**31 - 1  # x extent of a grid


@dataclass(frozen=True)
class StaticProblem:
    """The part of a problem that a kernel is compiled for; all else is a run-time value."""

    dtype: torch.dtype
    head_dim: int
    causal: bool
    return_lse: bool


@dataclass(frozen=True)
class AttentionProblem:
    """Attention of q (B, S_q, H, D) over k and v (B, S_k, H_kv, D)."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    return_lse: bool

    @property
    def static(self) -> StaticProblem:
        return StaticProblem(self.dtype, self.head_dim, self.causal, self.return_lse)

    @staticmethod
    def from_tensors(q, k, v, *, causal: bool = False, return_lse: bool = False) -> AttentionProblem:
        """Checks the tensors and describes the problem.

        Raises:
            TypeError: an argument is not a tensor or a bool, or has an unsupported or different dtype.
            ValueError: shapes, strides, devices, alignment or gradients that attention can't take.
        """
        tensors = {"q": q, "k": k, "v": v}
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        for name, flag in {"causal": causal, "return_lse": return_lse}.items():
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False, got {flag!r}")
        for name in ("k", "v"):
            if tensors[name].dtype != q.dtype:
                raise TypeError(f"{name} must have the dtype of q ({q.dtype}), got {tensors[name].dtype}")
            if tensors[name].device != q.device:
                raise ValueError(
                    f"{name} must be on the device of q ({q.device}), got a tensor on {tensors[name].device}"
                )

        batch, seqlen_q, num_heads, head_dim = q.shape
        _, seqlen_k, num_heads_kv, _ = k.shape
        if head_dim not in HEAD_DIMS:
            raise ValueError(
                f"q must have a head dimension (its last) of {_either(HEAD_DIMS)}, got {head_dim}; other multiples "
                f"of 8 up to 256 are planned, not supported yet"
            )
        if k.shape[0] != batch:
            raise ValueError(f"k must have the batch size of q ({batch}), got {k.shape[0]} (shape {_shape(k)})")
        if k.shape[3] != head_dim:
            raise ValueError(f"k must have the head dimension of q ({head_dim}), got {k.shape[3]}")
        if v.shape != k.shape:
            raise ValueError(f"v must have the shape of k {_shape(k)}, got {_shape(v)}")
        if num_heads == 0 or num_heads_kv == 0:
            raise ValueError(f"q, k and v must have at least one head, got {num_heads} (q) and {num_heads_kv} (k, v)")
        if num_heads % num_heads_kv:
            raise ValueError(
                f"q must have a number of heads that is a multiple of k's and v's ({num_heads_kv}), got {num_heads}"
            )
        if num_heads * head_dim > MAX_ROW_STRIDE:
            raise ValueError(
                f"q must have at most 2**24 elements a position (heads times head dimension), got "
                f"{num_heads * head_dim}"
            )
        for name, seqlen in (("q", seqlen_q), ("k", seqlen_k)):
            if seqlen > MAX_SEQLEN:
                raise ValueError(f"{name} must have a sequence length of at most 2**30, got {seqlen}")
        if batch * num_heads * seqlen_q > MAX_CTAS:
            raise ValueError(
                f"q must have at most 2**31 - 1 rows over batch, sequence and heads, got {batch * num_heads * seqlen_q}"
            )
        return AttentionProblem(
            batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, q.dtype, q.device, causal, return_lse
        )

    def softmax_scale(self, scale) -> float:
        """The scale of the scores: the caller's, or 1 / sqrt(D) for None.

        Raises:
            TypeError: not a number.
            ValueError: outside of 2**-126 to 2**64. The running maximum is taken over unscaled scores, whose
                order a scale of 0 or less would not keep, and the kernels scale in float32.
        """
        if scale is None:
            return 1.0 / math.sqrt(self.head_dim)
        if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
            raise TypeError(f"softmax_scale must be a float or None, got {type(scale).__name__}")
        if not 2.0**-126 <= scale <= 2.0**64:
            raise ValueError(f"softmax_scale must be greater than 0, from 2**-126 to 2**64, got {scale}")
        return float(scale)


def _check_tensor(name: str, tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")
    if tensor.is_neg():
        raise TypeError(f"{name} must not be a lazily negated view; call .resolve_neg() on it")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be {_either(DTYPES)}, got {tensor.dtype}")
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} must have 4 dimensions (batch, sequence, heads, head_dim), got {tensor.dim()}: "
            f"shape {_shape(tensor)}"
        )
    if tensor.stride(3) != 1:
        raise ValueError(
            f"{name} must have a contiguous last dimension (stride 1), got strides {tuple(tensor.stride())}; "
            f"call .contiguous() on it"
        )
    check_pointer(name, tensor)
    check_no_grad(name, tensor)


def check_pointer(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the first element lies on a 16-byte boundary."""
    if tensor.data_ptr() % VECTOR_BYTES:
        raise ValueError(
            f"{name} must start at an address that is a multiple of {VECTOR_BYTES} bytes, got one that is off by "
            f"{tensor.data_ptr() % VECTOR_BYTES}: a view into another tensor? Call .clone() on it"
        )


def check_no_grad(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError if autograd would record this tensor: there is no backward."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require gradients: cute_fa has a forward only, no backward. Call it under "
            f"torch.no_grad(), or pass {name}.detach()"
        )


def _either(options) -> str:
    *rest, last = (str(option) for option in options)
    return ", ".join(rest) + f" or {last}"


def _shape(tensor: torch.Tensor) -> str:
    return str(tuple(tensor.shape))
