"""What the host passes to compiled kernels, checked by their own entry code, which compares count, dtypes and shapes.

Tensors that claim to lie on a CUDA device pass that code, and the launch behind it then fails for want of a driver.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
import tvm_ffi

import cute_fa
from cute_fa import compiled
from cute_fa.ladder import select
from cute_fa.launch import get_launch
from cute_fa.problem import ScoreOptions
from cute_fa.varlen import forward_varlen

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver: the kernels themselves are run")

ARCH = "sm_90a"
_REACHED = "cudaErrorInsufficientDriver"
_DLPACK_CUDA = 2  # kDLCUDA of DLDeviceType in dlpack.h
_DEVICE_TYPE_OFFSET = 8  # of DLTensor.device.device_type, behind the pointer to the data


def _claimed(argument):
    """The argument with its tensors claiming a CUDA device."""
    if isinstance(argument, tuple):
        return tuple(map(_claimed, argument))
    if not isinstance(argument, torch.Tensor):
        return argument
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = torch.utils.dlpack.to_dlpack(argument)
    address = pointer_of(capsule, b"dltensor") + _DEVICE_TYPE_OFFSET
    ctypes.c_int32.from_address(address).value = _DLPACK_CUDA
    return tvm_ffi.from_dlpack(capsule)


@pytest.fixture
def reached(monkeypatch):
    """Compiled kernels in place of emulated ones; a list of the launches that their entry code let through."""
    launches = []

    def get_compiled(*key):
        function = compiled.get_compiled(*key)

        def call(*arguments):
            with pytest.raises(RuntimeError, match=_REACHED):
                function(*map(_claimed, arguments))
            launches.append(key)

        return call

    monkeypatch.setattr("cute_fa.launch.get_compiled", get_compiled)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def launch_for(problem, kernel, layout=None, *, needed):
        return get_launch(problem, *select(problem, ARCH, kernel, layout), ARCH) if needed else None

    for module in ("plan", "varlen"):
        monkeypatch.setattr(f"cute_fa.{module}._plans", {})
        monkeypatch.setattr(f"cute_fa.{module}.launch_for", launch_for)
    return launches


def _tensors(*shapes, dtype=torch.bfloat16):
    return (torch.zeros(shape, dtype=dtype) for shape in shapes)


def _ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("kernel", ["kernel1", "kernel5", "kernel7", "kernel11"])
def test_plain(kernel, reached):
    q, k, v = _tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 64))
    cute_fa.forward(q, k, v, causal=True, kernel=kernel)
    cute_fa.forward(q, k, v, return_lse=True, kernel=kernel)
    assert len(reached) == 2


@pytest.mark.parametrize("kernel", ["kernel5", "kernel11"])
def test_score_options(kernel, reached):
    q, k, v = _tensors((2, 70, 4, 64), (2, 90, 2, 64), (2, 90, 2, 32))
    every = {"window_size": (9, 4), "softcap": 20.0, "alibi_slopes": torch.ones(4), "sinks": torch.ones(4)}
    cute_fa.forward(q, k, v, **every, attn_bias=torch.zeros(4, 70, 90), kernel=kernel)
    cute_fa.forward(q, k, v, attn_bias=torch.ones(2, 1, 1, 90, dtype=torch.bool), kernel=kernel)
    q, k, v = _tensors(q.shape, k.shape, v.shape, dtype=torch.float8_e4m3fn)
    cute_fa.forward(q, k, v, v_descale=torch.ones(2, 2), kernel=kernel)
    assert len(reached) == 3


@pytest.mark.parametrize("kernel", ["kernel5", "kernel11"])
def test_packed_sequences(kernel, reached):
    q, k, v = _tensors((70, 4, 64), (90, 2, 64), (90, 2, 64))
    where = {"cu_seqlens_q": _ints(0, 30, 70), "cu_seqlens_k": _ints(0, 80, 90), "max_seqlen_q": 40, "max_seqlen_k": 80}
    forward_varlen(q, k, v, **where, kernel=kernel)
    forward_varlen(q, k, v, **where, options=ScoreOptions(softcap=30.0), kernel=kernel)
    assert len(reached) == 2


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_caches_and_pages(seqlen_q, reached):
    q, k, v = _tensors((2, seqlen_q, 4, 64), (3, 90, 2, 64), (3, 90, 2, 64))
    where = {"seqused_k": _ints(5, 90), "max_seqlen_q": seqlen_q, "max_seqlen_k": 90}
    forward_varlen(q, k, v, **where, cache_batch_idx=_ints(2, 0), leftpad_k=_ints(0, 3))
    forward_varlen(q, k, v, **where, block_table=_ints(2, 0, 1).view(1, 3).expand(2, 3).contiguous())
    assert len(reached) == 2
