"""Transposes of a square matrix in tiles of 32x32: with conflicts, with each remedy, and without shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.runtime import make_fake_tensor

from layouts.access import WARP_LANES, by_column, by_row
from layouts.cute_adapter import to_cute
from perf.experiments.base import REMEDIES, SMEM_ALIGNMENT, Access, Experiment, require_multiple, tile_bytes

TILE = (32, 32)
UNIT = 128  # sizes are multiples of it: what a CTA of the shuffled variant transposes side by side
# The kernels move bits: integers of the width of the dtype.
BITS = {"fp32": (cutlass.Int32, torch.int32), "bf16": (cutlass.Int16, torch.int16)}


class _Transpose(Experiment):
    """A size is the number of rows, and of columns."""

    experiment = "transpose"
    sizes = (1024, 8192)
    emulated_size = 128
    dynamic = ({"dynamic_shape": (0, 1), "dynamic_strides": ((0, np.int64),)},) * 2

    def check(self, size):
        require_multiple("transpose", size, UNIT)

    def tensors(self, size, device):
        integer = BITS[self.dtype][1]
        generator = torch.Generator(device).manual_seed(0)
        limits = torch.iinfo(integer)
        shape = (size, size)
        source = torch.randint(limits.min, limits.max, shape, dtype=integer, device=device, generator=generator)
        return source, torch.zeros_like(source)

    def expected(self, source):
        return source.T.contiguous()

    def moved_bytes(self, size):
        return 2 * size * size * self.element_bytes

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return BITS[self.dtype][0].width // 8

    def _compile(self, stream, options):
        rows, cols = cute.sym_int32(), cute.sym_int32()
        element = BITS[self.dtype][0]
        source = make_fake_tensor(element, (rows, cols), (cute.sym_int64(), 1), assumed_align=4)
        result = make_fake_tensor(element, (cols, rows), (cute.sym_int64(), 1), assumed_align=4)
        return cute.compile(self, source, result, stream, options=options)


class TransposeThroughSmem(_Transpose):
    """Eight warps: each writes rows of the tile, then reads columns, so that both sides of global memory coalesce."""

    block = 256

    def grid(self, size):
        return size // TILE[1], size // TILE[0], 1

    @property
    def smem_bytes(self):
        return tile_bytes(self.layout, TILE, self.element_bytes)

    def accesses(self, size):
        tiles, width = (size // TILE[0]) ** 2, self.element_bytes
        return [
            Access(self.layout, by_row("st", width, TILE, width), tiles),
            Access(self.layout, by_column("ld", width, TILE, width), tiles),
        ]

    @cute.jit
    def __call__(self, source: cute.Tensor, result: cute.Tensor, stream):
        """source (rows, cols), result (cols, rows)."""
        grid = (source.shape[1] // TILE[1], source.shape[0] // TILE[0], 1)
        self.kernel(source, result).launch(grid=grid, block=(self.block, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, result: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        tile_col, tile_row, _ = cute.arch.block_idx()
        warp, lane = tidx // WARP_LANES, tidx % WARP_LANES
        num_warps = self.block // WARP_LANES
        smem = cutlass.memory.SmemAllocator()
        layout = to_cute(self.layout.on(*TILE))
        tile = smem.allocate_tensor(source.element_type, layout, byte_alignment=SMEM_ALIGNMENT)
        gS = cute.local_tile(source, TILE, (tile_row, tile_col))
        gR = cute.local_tile(result, TILE, (tile_col, tile_row))
        for i in cutlass.range_constexpr(TILE[0] // num_warps):
            row = warp + i * num_warps
            tile[row, lane] = gS[row, lane]
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(TILE[1] // num_warps):
            col = warp + i * num_warps
            gR[col, lane] = tile[lane, col]


class TransposeByShuffle(_Transpose):
    """A warp holds a tile in registers, a column a lane, and exchanges halves of ever smaller blocks.

    Step k swaps, in each block of 2k x 2k, the upper right with the lower left quarter: 16 shuffles a step.
    """

    block = UNIT // TILE[1] * WARP_LANES

    def grid(self, size):
        return size // UNIT, size // TILE[0], 1

    @property
    def smem_bytes(self):
        return 0

    def accesses(self, size):
        return []

    @cute.jit
    def __call__(self, source: cute.Tensor, result: cute.Tensor, stream):
        """source (rows, cols), result (cols, rows)."""
        grid = (source.shape[1] // UNIT, source.shape[0] // TILE[0], 1)
        self.kernel(source, result).launch(grid=grid, block=(self.block, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, result: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        block_col, tile_row, _ = cute.arch.block_idx()
        lane = tidx % WARP_LANES
        tile_col = block_col * (self.block // WARP_LANES) + tidx // WARP_LANES
        gS = cute.local_tile(source, TILE, (tile_row, tile_col))
        gR = cute.local_tile(result, TILE, (tile_col, tile_row))
        held = cute.make_rmem_tensor(TILE[0], cutlass.Int32)
        for i in cutlass.range_constexpr(TILE[0]):
            held[i] = gS[i, lane].to(cutlass.Int32)
        for step in cutlass.range_constexpr(5):
            k = TILE[0] >> (step + 1)
            is_upper = lane & k != 0
            for i in cutlass.range_constexpr(TILE[0]):
                if cutlass.const_expr(i & k == 0):
                    lower, upper = held[i], held[i | k]
                    given = lower if is_upper else upper
                    taken = cute.arch.shuffle_sync_bfly(given, offset=k)
                    held[i] = taken if is_upper else lower
                    held[i | k] = upper if is_upper else taken
        for i in cutlass.range_constexpr(TILE[1]):
            gR[i, lane] = held[i].to(result.element_type)


TRANSPOSES: tuple[Experiment, ...] = tuple(
    (TransposeByShuffle if layout is None else TransposeThroughSmem)(variant, dtype, layout)
    for dtype in BITS
    for variant, layout in REMEDIES.items()
)
