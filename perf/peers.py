"""What the rungs are held against: attention that others ship."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from perf.cases import Case
from perf.contestants import Contestant, Unavailable


def _prepare_sdpa(backend: SDPBackend):
    def prepare(case: Case, q, k, v) -> Callable[[], torch.Tensor]:
        options = {"enable_gqa": case.H_kv != case.H, "is_causal": case.causal}
        if case.causal and case.S_q != case.S_k:
            # is_causal aligns the mask top left; only the bias object reaches a kernel that aligns it
            # bottom right, and that object dispatches to the flash kernel alone.
            if backend != SDPBackend.FLASH_ATTENTION:
                raise Unavailable("PyTorch offers no causal mask aligned bottom right for it (S_q != S_k)")
            if case.S_q > case.S_k:
                raise Unavailable("undefined for rows that see no key (causal, S_q > S_k)")
            options = {"enable_gqa": options["enable_gqa"], "attn_mask": causal_lower_right(case.S_q, case.S_k)}
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

        return _tried(call)

    return prepare


def _prepare_flash_attn_4(case: Case, q, k, v) -> Callable[[], torch.Tensor]:
    flash_attn_func = import_flash_attn_4()

    def call() -> torch.Tensor:
        result = flash_attn_func(q, k, v, causal=case.causal)
        return result[0] if isinstance(result, tuple) else result

    return _tried(call)


def import_flash_attn_4() -> Callable:
    """flash-attn-4's function of (q, k, v), each (B, S, H, D); Unavailable where it can't be imported."""
    try:
        return importlib.import_module("flash_attn.cute").flash_attn_func
    except Exception as error:  # a broken installation may raise anything
        raise Unavailable(f"flash_attn.cute can't be imported: {_first_line(error)}") from error


def _tried(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The call, after one run; whatever a peer raises becomes the reason that it is left out."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        raise Unavailable(_first_line(error)) from error
    return call


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


SDPA_FLASH = Contestant("sdpa_flash", "peer", _prepare_sdpa(SDPBackend.FLASH_ATTENTION))
PEERS: dict[str, Contestant] = {
    peer.name: peer
    for peer in (
        SDPA_FLASH,
        Contestant("sdpa_cudnn", "peer", _prepare_sdpa(SDPBackend.CUDNN_ATTENTION)),
        Contestant("flash_attn_4", "peer", _prepare_flash_attn_4),
    )
}
