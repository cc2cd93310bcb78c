"""What the card can do at best: a large matrix product, and mma.sync from registers alone."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_fa.arch import arch_of_capability
from cute_fa.device.mma import make_tiled_mma
from perf.cases import DTYPES

MATMUL_SIZE = 8192
MMA_WARPS, MMA_CTAS_PER_SM, MMA_STEPS = 4, 4, 2048
MMA_TILE = (32, 64, 16)  # of a warp: 16 products m16n8k16 that don't wait for each other
_CUTE_DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


def matmul_call(dtype: str, device: torch.device) -> tuple[Callable[[], torch.Tensor], int]:
    """A square matrix product of random normal data, as a call, and its floating-point operations."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    return lambda: a @ b, 2 * MATMUL_SIZE**3


class MmaFromRegisters:
    """Every warp multiplies the same fragments again and again; nothing but mma.sync is in the loop."""

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor, num_ctas: cutlass.Int32, stream):
        """source: (32 * 1024,) of the products' type; out: (num_ctas * threads,) fp32, so that nothing is dropped."""
        self.kernel(source, out).launch(grid=(num_ctas, 1, 1), block=(32 * MMA_WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, out: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = tidx % 32
        tiled_mma = make_tiled_mma(source.element_type, 1)
        thr_mma = tiled_mma.get_slice(lane)
        rows, cols, k = MMA_TILE
        a = thr_mma.make_fragment_A(thr_mma.partition_shape_A((rows, k)))
        b = thr_mma.make_fragment_B(thr_mma.partition_shape_B((cols, k)))
        for i in cutlass.range_constexpr(cute.size(a)):
            a[i] = source[lane * 1024 + i]
        for i in cutlass.range_constexpr(cute.size(b)):
            b[i] = source[lane * 1024 + 512 + i]
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((rows, cols)), cutlass.Float32)
        acc.fill(0.0)
        for _ in cutlass.range(MMA_STEPS, unroll=4):
            cute.gemm(tiled_mma, acc, a[None, None, 0], b[None, None, 0], acc)
        out[cta * 32 * MMA_WARPS + tidx] = acc.load().reduce(cute.ReductionOp.ADD, 0.0, 0)


def compile_mma(dtype: torch.dtype, options: str):
    """The kernel for a type; ``options`` as for cute.compile."""
    source = make_fake_tensor(_CUTE_DTYPES[dtype], (32 * 1024,), (1,), assumed_align=16)
    out = make_fake_tensor(cutlass.Float32, (cute.sym_int32(),), (1,), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream="tvm-ffi" in options)
    return cute.compile(MmaFromRegisters(), source, out, cutlass.Int32(1), stream, options=options)


def mma_call(dtype: str, device: torch.device) -> tuple[Callable[[], object], int]:
    """mma.sync from registers on every SM, as a call, and its floating-point operations."""
    properties = torch.cuda.get_device_properties(device)
    arch = arch_of_capability((properties.major, properties.minor))
    kernel = compile_mma(DTYPES[dtype], f"--gpu-arch {arch} --enable-tvm-ffi")
    num_ctas = properties.multi_processor_count * MMA_CTAS_PER_SM
    source = torch.randn(32 * 1024, device=device, dtype=DTYPES[dtype])
    out = torch.empty(num_ctas * 32 * MMA_WARPS, device=device)
    rows, cols, k = MMA_TILE
    return lambda: kernel(source, out, num_ctas), 2 * rows * cols * k * MMA_STEPS * MMA_WARPS * num_ctas
