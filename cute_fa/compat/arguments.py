"""What flash-attn's functions share: their switches in this package's terms, and checks of their other tensors."""

from __future__ import annotations

import torch

reads_lengths = torch.compiler.disable(
    reason="cute_fa: the host reads the lengths of sequences, until there is a kernel that reads them"
)


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


def require_tensor(name: str, value, *, like: torch.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> None:
    """Checks one tensor beside q.

    Args:
        like: a tensor on the device that is wanted.
        shape: the extent of every dimension; None is any.

    Raises:
        TypeError, ValueError: naming ``name``, what it was and what is allowed.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
    if value.device != like.device:
        raise ValueError(f"{name} must be on the device of q ({like.device}), got a tensor on {value.device}")
    if value.dim() != len(shape) or any(
        wanted not in (None, extent) for extent, wanted in zip(value.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name} must have the shape ({wanted}), got {tuple(value.shape)}")


def require_dims(name: str, value, dims: tuple[str, ...]) -> None:
    """Raises unless it is a tensor with a dimension for each name."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dim() != len(dims):
        raise ValueError(
            f"{name} must have {len(dims)} dimensions ({', '.join(dims)}), got {value.dim()}: "
            f"shape {tuple(value.shape)}"
        )


def require_int(name: str, value) -> None:
    """Raises TypeError unless it is an integer and no bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")


def values_on_host(name: str, tensor: torch.Tensor) -> list:
    """The tensor as a list, which waits for its device.

    Raises:
        RuntimeError: inside the capture of a CUDA graph, where nothing can be waited for.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} must not be a tensor on the GPU while a CUDA graph is captured: its values are read by the host, "
            f"until there is a kernel that reads them"
        )
    return tensor.tolist()
