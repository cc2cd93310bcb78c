"""Reads of shared memory down the columns, four bytes or sixteen at a time, and nothing else in the loop.

The loads are volatile inline PTX, so that neither compiler nor assembler joins four of them to one or takes
them out of the loop.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_fake_tensor

from layouts import PLAIN
from layouts.access import WARP_LANES, by_column, by_row
from layouts.cute_adapter import to_cute
from perf.bank_kernels import probe_asm
from perf.experiments.base import (
    PADDED_1,
    PADDED_4,
    SMEM_ALIGNMENT,
    XOR_VECTORS,
    Access,
    Experiment,
    require_multiple,
    tile_bytes,
)

TILE = (32, 32)  # of a warp, 4-byte elements
VECTOR = 4  # elements of a 16-byte vector
PASSES = 64  # over the tile, a launch


class ColumnReads(Experiment):
    """Every warp reads its tile down the columns, a row a lane; a size is the number of CTAs."""

    experiment = "reads"
    block = 256
    sizes = (1056,)
    emulated_size = 2
    dynamic = ({}, {"dynamic_shape": (0,)})

    def __init__(self, variant, layout, width):
        super().__init__(variant, "fp32", layout)
        self.width = width

    def check(self, size):
        require_multiple("reads", size, 1)

    def tensors(self, size, device):
        generator = torch.Generator(device).manual_seed(0)
        source = torch.randint(0, 2**20, TILE, dtype=torch.int32, device=device, generator=generator)
        return source, torch.zeros(size * self.block, dtype=torch.int32, device=device)

    def expected(self, source):
        """A lane's result: over its row's vectors, the exclusive or of the elements, added up over the passes."""
        a, b, c, d = source.view(TILE[0], -1, VECTOR).unbind(-1)
        return PASSES * (a ^ b ^ c ^ d).sum(1, dtype=torch.int32)

    def matches(self, found, expected):
        """All warps compute the same."""
        return bool((found.view(-1, WARP_LANES) == expected).all())

    def moved_bytes(self, size):
        return size * (self.block // WARP_LANES) * PASSES * TILE[0] * TILE[1] * 4

    def grid(self, size):
        return size, 1, 1

    @property
    def smem_bytes(self):
        return self.block // WARP_LANES * tile_bytes(self.layout, TILE, 4)

    def accesses(self, size):
        warps = size * self.block // WARP_LANES
        return [
            Access(self.layout, by_row("st", 4, TILE, 4), warps),
            Access(self.layout, by_column("ld", self.width, TILE, 4), warps * PASSES),
        ]

    def _compile(self, stream, options):
        source = make_fake_tensor(cutlass.Int32, TILE, (TILE[1], 1), assumed_align=16)
        result = make_fake_tensor(cutlass.Int32, (cute.sym_int32(),), (1,), assumed_align=4)
        return cute.compile(self, source, result, stream, options=options)

    @cute.jit
    def __call__(self, source: cute.Tensor, result: cute.Tensor, stream):
        """source (32, 32) int32, the same for all warps; result (threads of all CTAs) int32."""
        grid = (result.shape[0] // self.block, 1, 1)
        self.kernel(source, result).launch(grid=grid, block=(self.block, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, result: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane = tidx // WARP_LANES, tidx % WARP_LANES
        smem = cutlass.memory.SmemAllocator()
        layout = to_cute(self.layout.on(*TILE))
        step = tile_bytes(self.layout, TILE, 4) // 4
        memory = smem.allocate_tensor(
            cutlass.Int32, cute.make_layout(self.block // WARP_LANES * step), byte_alignment=SMEM_ALIGNMENT
        )
        start = memory.iterator + warp * step
        tile = cute.make_tensor(start, layout)
        for row in cutlass.range_constexpr(TILE[0]):
            tile[row, lane] = source[row, lane]
        cute.arch.sync_threads()
        elements = self.width // 4
        loads = range(0, TILE[1], elements)
        addresses = [start.toint() + 4 * cute.crd2idx((lane, col), layout) for col in loads]
        total = cutlass.Int32(0)
        for _ in cutlass.range(PASSES, unroll=1):
            for first in cutlass.range_constexpr(0, len(addresses), VECTOR // elements):
                vector = cutlass.Int32(0)
                for address in addresses[first : first + VECTOR // elements]:
                    vector = vector ^ self._load(address)
                total += vector
        result[cta * self.block + tidx] = total

    def _load(self, address):
        """Traces one load; the exclusive or of the elements it brings."""
        instruction = by_column("ld", self.width, TILE, 4).instruction
        asm = probe_asm(instruction)[0].replace("ld.shared", "ld.volatile.shared")
        operands = [cutlass.Int32(address).ir_value()]
        return cutlass.Int32(llvm.inline_asm(cutlass.Int32.mlir_type, operands, asm, "=r,r", has_side_effects=True))


# A vector of 16 bytes can't start at a row of 33 elements.
_VARIANTS = {
    "plain": (PLAIN, (4, 16)),
    "padded_1": (PADDED_1, (4,)),
    "padded_4": (PADDED_4, (4, 16)),
    "xor_vectors": (XOR_VECTORS, (4, 16)),
}
READS: tuple[Experiment, ...] = tuple(
    ColumnReads(f"{variant}_{width}B", layout, width)
    for variant, (layout, widths) in _VARIANTS.items()
    for width in widths
)
