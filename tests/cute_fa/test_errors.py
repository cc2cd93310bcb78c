"""Bad input: every misuse raises an exception that names the argument, before anything is launched.

No ``assert`` here, so that the file tests the same under ``python -O``.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import cute_fa
from layouts import COLS, PLAIN, SmemLayout, Swizzle

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensor(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def bad(name, exception, match, **changes):
    return pytest.param(changes, exception, match, id=name)


BAD_INPUTS = [
    bad("q is None", TypeError, r"q must be a torch\.Tensor, got NoneType", q=None),
    bad("k is an array", TypeError, r"k must be a torch\.Tensor, got ndarray", k=np.zeros((2, 5, 4, 64))),
    bad("v is a list", TypeError, r"v must be a torch\.Tensor, got list", v=[[1.0]]),
    bad("q sparse", TypeError, r"q must be a dense", q=tensor(2, 7, 4, 64).to_sparse()),
    bad("q rank 3", ValueError, r"q must have 4 dimensions .*got 3", q=tensor(7, 4, 64)),
    bad("k rank 5", ValueError, r"k must have 4 dimensions .*got 5", k=tensor(1, 2, 5, 4, 64)),
    bad("float32", TypeError, r"q must be torch\.float16, .*float8_e4m3fn, got torch\.float32",
        q=tensor(2, 7, 4, 64, dtype=torch.float32)),
    bad("another fp8", TypeError, r"k must be torch\.float16, .*float8_e4m3fn, got torch\.float8_e5m2",
        k=tensor(2, 5, 4, 64, dtype=torch.float8_e5m2)),
    bad("int", TypeError, r"v must be torch\.float16, .*float8_e4m3fn, got torch\.int32",
        v=tensor(2, 5, 4, 64, dtype=torch.int32)),
    bad("k of another dtype", TypeError, r"k must have the dtype of q \(torch\.bfloat16\), got torch\.float16",
        k=tensor(2, 5, 4, 64, dtype=torch.float16)),
    bad("k of another batch", ValueError, r"k must have the batch size of q \(2\), got 3", k=tensor(3, 5, 4, 64)),
    bad("k of another head_dim", ValueError, r"k must have the head dimension of q \(64\), got 128",
        k=tensor(2, 5, 4, 128)),
    bad("v of another length", ValueError, r"v must have the shape of k \(2, 5, 4, 64\), but", v=tensor(2, 6, 4, 64)),
    bad("v of other heads", ValueError, r"v must have the shape of k", v=tensor(2, 5, 2, 64)),
    bad("head_dim 84", ValueError, r"q must have a head dimension \(its last\) that is a multiple of 8 .*256, got 84",
        q=tensor(2, 7, 4, 84)),
    bad("head_dim 264", ValueError, r"q must have a head dimension .*from 8 to 256, got 264", q=tensor(2, 7, 4, 264)),
    bad("head_dim_v 12", ValueError, r"v must have a head dimension .*from 8 to 256, got 12", v=tensor(2, 5, 4, 12)),
    bad("head_dim 80 for a kernel of two", ValueError, r"kernel 'kernel2' takes a head dimension of 64, 128, got 80",
        kernel="kernel2", **{name: tensor(2, 5, 4, 80) for name in "qkv"}),
    bad("head_dim_v for a kernel of one", ValueError, r"kernel 'kernel1' does not take a head dimension of v other",
        kernel="kernel1", v=tensor(2, 5, 4, 128)),
    bad("head_dim 0", ValueError, r"head dimension .* got 0", q=tensor(2, 7, 4, 0)),
    bad("heads not a multiple", ValueError, r"q must have a number of heads that is a multiple .*\(3\), got 4",
        k=tensor(2, 5, 3, 64), v=tensor(2, 5, 3, 64)),
    bad("no heads", ValueError, r"at least one head", q=tensor(2, 7, 0, 64)),
    bad("last dimension not contiguous", ValueError, r"q must have a contiguous last dimension .*strides",
        q=tensor(2, 7, 64, 4).transpose(2, 3)),
    bad("pointer off by 2", ValueError, r"k must start at an address .* 16 bytes.*off by 2",
        k=tensor(2 * 5 * 4 * 64 + 1)[1:].view(2, 5, 4, 64)),
    bad("pointer off by 8", ValueError, r"v must start at an address .* 16 bytes.*off by 8",
        v=tensor(2, 5, 4, 72)[..., 4:68]),
    bad("sequence too long", ValueError, r"k must have a sequence length of at most 2\*\*30",
        k=tensor(2, 1, 4, 64).expand(2, 2**30 + 1, 4, 64), v=tensor(2, 1, 4, 64).expand(2, 2**30 + 1, 4, 64)),
    bad("too many rows", ValueError, r"q must have at most 2\*\*31 - 1 rows",
        q=tensor(2, 1, 4, 64).expand(2, 2**30, 4, 64)),
    bad("too many heads", ValueError, r"q must have at most 2\*\*24 elements a position",
        q=tensor(2, 1, 1, 64).expand(2, 7, 2**20, 64)),
    bad("another device", ValueError, r"k must be on the device of q \(cpu|cuda:0\), got a tensor on meta",
        k=tensor(2, 5, 4, 64, device="meta")),
    bad("requires grad", ValueError, r"v must not require gradients.*no backward",
        v=tensor(2, 5, 4, 64).requires_grad_()),
    bad("causal is 1", TypeError, r"causal must be True or False, got 1", causal=1),
    bad("return_lse is None", TypeError, r"return_lse must be True or False, got None", return_lse=None),
    bad("scale 0", ValueError, r"softmax_scale must be greater than 0, .* got 0", softmax_scale=0.0),
    bad("scale negative", ValueError, r"softmax_scale must be .* got -1", softmax_scale=-1.0),
    bad("scale nan", ValueError, r"softmax_scale must be .* got nan", softmax_scale=float("nan")),
    bad("scale inf", ValueError, r"softmax_scale must be .* got inf", softmax_scale=float("inf")),
    bad("scale 0 in float32", ValueError, r"softmax_scale must be .* got 1e-50", softmax_scale=1e-50),
    bad("scale infinite in float32", ValueError, r"softmax_scale must be .* got 1e\+39", softmax_scale=1e39),
    bad("scale a string", TypeError, r"softmax_scale must be a float or None, got str", softmax_scale="1"),
    bad("scale a tensor", TypeError, r"softmax_scale must be a float or None, got Tensor",
        softmax_scale=torch.tensor(1.0)),
    bad("sinks a list", TypeError, r"sinks must be a torch\.Tensor or None, got list", sinks=[1.0] * 4),
    bad("sinks of other heads", ValueError, r"sinks must have the shape \(H,\), here \(4,\), got \(2,\)",
        sinks=torch.zeros(2)),
    bad("sinks in fp64", TypeError, r"sinks must be torch\.float32 or torch\.bfloat16, got torch\.float64",
        sinks=torch.zeros(4, dtype=torch.float64)),
    bad("sinks that require grad", ValueError, r"sinks must not require gradients",
        sinks=torch.zeros(4).requires_grad_()),
    bad("slopes of another shape", ValueError, r"alibi_slopes must have .* \(4,\) or \(2, 4\), got \(4, 2\)",
        alibi_slopes=torch.zeros(4, 2)),
    bad("slopes in bf16", TypeError, r"alibi_slopes must be torch\.float32, got torch\.bfloat16",
        alibi_slopes=tensor(4)),
    bad("slopes on another device", ValueError, r"alibi_slopes must be on the device of q",
        alibi_slopes=torch.zeros(4, device="meta")),
    bad("bias of another length", ValueError,
        r"attn_bias must broadcast to \(B, H, S_q, S_k\), here \(2, 4, 7, 5\), got \(7, 6\)", attn_bias=tensor(7, 6)),
    bad("bias of five dimensions", ValueError, r"attn_bias must broadcast .* got \(1, 2, 4, 7, 5\)",
        attn_bias=tensor(1, 2, 4, 7, 5)),
    bad("bias of integers", TypeError,
        r"attn_bias must be torch\.bool, torch\.float32 or torch\.bfloat16, got torch\.int64",
        attn_bias=torch.zeros(7, 5, dtype=torch.int64)),
    bad("bias sparse", TypeError, r"attn_bias must be a dense", attn_bias=tensor(7, 5).to_sparse()),
    bad("window of one", TypeError, r"window_size must be a pair \(left, right\), got 5", window_size=5),
    bad("window of floats", TypeError, r"window_size must hold integers, got \(3, 2\.0\)", window_size=(3, 2.0)),
    bad("window negative", ValueError, r"window_size must hold lengths of 0 or more, or -1", window_size=(3, -2)),
    bad("softcap a string", TypeError, r"softcap must be a number, got 'x'", softcap="x"),
    bad("softcap negative", ValueError, r"softcap must be 0 \(off\), or from 2\*\*-10 to 2\*\*10, got -1",
        softcap=-1.0),
    bad("softcap too large", ValueError, r"softcap must be .* got 2000", softcap=2000),
    bad("softcap nan", ValueError, r"softcap must be .* got nan", softcap=float("nan")),
    bad("a kernel that has no softcap", ValueError,
        r"kernel must be auto or one that has softcap \(kernel3, .*kernel6, kernel8, .*\), got 'kernel1'",
        softcap=2.0, kernel="kernel1"),
    bad("backward", ValueError, r"backward must be None or 'sdpa', got 'fa'", backward="fa"),
    bad("unknown kernel", ValueError, r"kernel must be auto or one of kernel1, kernel2.*got 'kernel99'",
        kernel="kernel99"),
    bad("kernel is 2", TypeError, r"kernel must be the name of a kernel, got int", kernel=2),
    bad("unknown layout", ValueError, r"layout must be one of PLAIN, SWIZZLE_333.* got 'SWIZZLE'",
        layout="SWIZZLE"),
    bad("layout is a list", TypeError, r"layout must be a name of the catalog or a SmemLayout, got list", layout=[8]),
    bad("layout that tears vectors", ValueError, r"layout 'mine' .* is not contiguous",
        layout=SmemLayout("mine", (8, 64), (64, 1), Swizzle(3, 1, 3))),
    bad("layout padded and swizzled", ValueError, r"layout 'mine' .* powers of two, got 72",
        layout=SmemLayout("mine", (8, 64), (72, 1), Swizzle(3, 3, 3))),
    bad("layout whose atoms are padded", ValueError, r"layout 'mine' .* powers of two, got 160",
        layout=SmemLayout("mine", (4, 32), (160, 1), Swizzle(1, 3, 4))),
    bad("layout with a negative shift", ValueError, r"layout 'mine' .* shift above 0, got S<3,4,-4>",
        layout=SmemLayout("mine", (8, 16), (16, 1), Swizzle(3, 4, -4))),
    bad("layout whose swizzle follows the column", ValueError, r"layout 'mine' .* row modulo 8",
        layout=SmemLayout("mine", (8, 32), (32, 1), Swizzle(3, 3, 5))),
    bad("layout padded by 1", ValueError, r"layout 'mine' .* not a multiple of 8",
        layout=SmemLayout("mine", (1, COLS), (COLS + 1, 1))),
    bad("layout not one-to-one", ValueError, r"layout 'mine' .* share offset",
        layout=SmemLayout("mine", (8, 64), (8, 1))),
    bad("layout that doesn't divide the tile", ValueError, r"layout 'mine' .* does not divide",
        layout=SmemLayout("mine", (8, 48), (48, 1))),
    bad("layout that takes too much", ValueError, r"layout 'mine' takes \d+ bytes of shared memory",
        layout=SmemLayout("mine", (1, COLS), (COLS + 2048, 1))),
]  # fmt: skip


def can_move(value: torch.Tensor) -> bool:
    """Whether a copy on another device is bad in the same way."""
    if value.is_sparse or value.is_meta:
        return False
    return value.data_ptr() % 16 == 0 and value.untyped_storage().nbytes() == value.numel() * value.element_size()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes, exception, match", BAD_INPUTS)
def test_bad_input_is_refused_by_name(changes, exception, match, device):
    arguments = {"q": tensor(2, 7, 4, 64), "k": tensor(2, 5, 4, 64), "v": tensor(2, 5, 4, 64), **changes}
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    if device != "cpu" and all(can_move(value) for value in tensors.values()):
        for name, value in tensors.items():
            arguments[name] = value.detach().to(device).requires_grad_(value.requires_grad)
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    with pytest.raises(exception, match=match):
        cute_fa.forward(q, k, v, **arguments)


def test_options_are_given_by_name():
    q = tensor(2, 7, 4, 64)
    with pytest.raises(TypeError, match="positional"):
        cute_fa.forward(q, q, q, True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_known_shape_is_checked_again(device):
    """The second call with known shapes still looks at pointers, gradients and flags."""
    q = tensor(2, 7, 4, 64, device=device)
    cute_fa.forward(q, q, q, causal=True)
    off = tensor(2 * 7 * 4 * 64 + 1, device=device)[1:].view(2, 7, 4, 64)
    with pytest.raises(ValueError, match="k must start at an address"):
        cute_fa.forward(q, off, q, causal=True)
    with pytest.raises(ValueError, match="v must not require gradients"):
        cute_fa.forward(q, q, q.clone().requires_grad_(), causal=True)
    with pytest.raises(TypeError, match="causal must be True or False, got 1"):
        cute_fa.forward(q, q, q, causal=1)


def test_any_real_number_is_a_scale():
    q = torch.randn(1, 7, 1, 64).to(torch.bfloat16)
    half, other = (cute_fa.forward(q, q, q, softmax_scale=scale) for scale in (0.5, np.float32(0.5)))
    if not torch.equal(half, other):
        pytest.fail("the same scale as another type gave another result")


@pytest.mark.gpu
def test_cpu_and_cuda_mixed():
    q, k = tensor(2, 7, 4, 64, device="cuda"), tensor(2, 5, 4, 64)
    with pytest.raises(ValueError, match=r"k must be on the device of q \(cuda:0\), got a tensor on cpu"):
        cute_fa.forward(q, k, k)
    with pytest.raises(ValueError, match=r"k must be on the device of q \(cpu\), got a tensor on cuda:0"):
        cute_fa.forward(k, q, q)


@pytest.mark.parametrize("swizzle", ((-1, 3, 3), (3, -1, 3), (3, 3, 2), (3, 3, 3.0), (True, 3, 3)))
def test_bad_swizzle(swizzle):
    with pytest.raises(ValueError, match="Swizzle"):
        Swizzle(*swizzle)


@pytest.mark.parametrize("shape, stride", (((8,), (64, 1)), ((8, 0), (64, 1)), ((8, 64), (64, -1)), ((8, 64), "ab")))
def test_bad_layout(shape, stride):
    with pytest.raises(ValueError, match="layout 'mine'"):
        SmemLayout("mine", shape, stride)
    with pytest.raises(ValueError, match="swizzle must be a Swizzle"):
        SmemLayout("mine", PLAIN.shape, PLAIN.stride, (3, 3, 3))


def test_the_same_without_asserts():
    """Python -O removes assert statements; every check must still be there."""
    if not __debug__:
        pytest.skip("this is the run without asserts")
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        pytest.fail(result.stdout[-3000:])
