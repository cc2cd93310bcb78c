"""Softmax of rows: a lane a row through shared memory, or a warp a row by shuffles."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_tensor

from cute_fa.device.softmax import LOG2_E
from layouts.access import WARP_LANES, by_column, by_row
from layouts.cute_adapter import to_cute
from perf.experiments.base import REMEDIES, SMEM_ALIGNMENT, Access, Experiment, butterfly, require_multiple, tile_bytes

ROW = 128  # elements of a row
TILE = (WARP_LANES, ROW)  # of a warp


class _RowSoftmax(Experiment):
    """A size is the number of rows, of 128 fp32 elements each."""

    experiment = "softmax"
    block = 128
    sizes = (131072,)
    emulated_size = 256
    dynamic = ({"dynamic_shape": (0,)},) * 2
    unit = block // WARP_LANES * TILE[0]

    def check(self, size):
        require_multiple("softmax", size, self.unit)

    def tensors(self, size, device):
        source = torch.randn(size, ROW, device=device, generator=torch.Generator(device).manual_seed(0))
        return source, torch.zeros_like(source)

    def expected(self, source):
        return torch.softmax(source, dim=-1)

    def matches(self, found, expected):
        """Within a few units of the last place: sums in other orders, and an approximate exponential."""
        return torch.allclose(found, expected, rtol=1e-5, atol=1e-7)

    def moved_bytes(self, size):
        return 2 * size * ROW * 4

    def grid(self, size):
        return size // self.unit, 1, 1

    def _compile(self, stream, options):
        rows = cute.sym_int32()
        source, result = (make_fake_tensor(cutlass.Float32, (rows, ROW), (ROW, 1), assumed_align=16) for _ in range(2))
        return cute.compile(self, source, result, stream, options=options)

    @cute.jit
    def __call__(self, source: cute.Tensor, result: cute.Tensor, stream):
        """source, result (rows, 128) fp32."""
        grid = (source.shape[0] // self.unit, 1, 1)
        self.kernel(source, result).launch(grid=grid, block=(self.block, 1, 1), stream=stream)


class SoftmaxThroughSmem(_RowSoftmax):
    """A warp brings 32 rows to shared memory; each lane walks one of them for its maximum and its sum."""

    @property
    def smem_bytes(self):
        return self.block // WARP_LANES * tile_bytes(self.layout, TILE, 4)

    def accesses(self, size):
        tiles = size // TILE[0]
        # Down the columns: a pass for the maximum, one for the sum, one that writes the results back.
        return [
            Access(self.layout, by_row("st", 4, TILE, 4), tiles),
            Access(self.layout, by_column("ld", 4, TILE, 4), 3 * tiles),
            Access(self.layout, by_column("st", 4, TILE, 4), tiles),
            Access(self.layout, by_row("ld", 4, TILE, 4), tiles),
        ]

    @cute.kernel
    def kernel(self, source: cute.Tensor, result: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane = tidx // WARP_LANES, tidx % WARP_LANES
        num_warps = self.block // WARP_LANES
        smem = cutlass.memory.SmemAllocator()
        tile_layout = self.layout.on(*TILE)
        step = tile_bytes(self.layout, TILE, 4) // 4
        memory = smem.allocate_tensor(cutlass.Float32, cute.make_layout(num_warps * step), SMEM_ALIGNMENT)
        tile = cute.make_tensor(memory.iterator + warp * step, to_cute(tile_layout))
        gS = cute.local_tile(source, TILE, (cta * num_warps + warp, 0))
        gR = cute.local_tile(result, TILE, (cta * num_warps + warp, 0))
        for row in cutlass.range(TILE[0], unroll=4):
            for part in cutlass.range_constexpr(ROW // WARP_LANES):
                tile[row, part * WARP_LANES + lane] = gS[row, part * WARP_LANES + lane]
        cute.arch.sync_threads()
        row_max = -cutlass.Float32.inf
        for col in cutlass.range(ROW, unroll=1):
            row_max = cute.arch.fmax(row_max, tile[lane, col])
        row_sum = cutlass.Float32(0.0)
        for col in cutlass.range(ROW, unroll=1):
            row_sum += cute.math.exp2((tile[lane, col] - row_max) * LOG2_E, fastmath=True)
        scale = 1.0 / row_sum
        for col in cutlass.range(ROW, unroll=1):
            tile[lane, col] = cute.math.exp2((tile[lane, col] - row_max) * LOG2_E, fastmath=True) * scale
        cute.arch.sync_threads()
        for row in cutlass.range(TILE[0], unroll=4):
            for part in cutlass.range_constexpr(ROW // WARP_LANES):
                gR[row, part * WARP_LANES + lane] = tile[row, part * WARP_LANES + lane]


class SoftmaxByShuffle(_RowSoftmax):
    """A warp takes one row after the other, four elements a lane, and reduces between registers."""

    @property
    def smem_bytes(self):
        return 0

    def accesses(self, size):
        return []

    @cute.kernel
    def kernel(self, source: cute.Tensor, result: cute.Tensor):
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane = tidx // WARP_LANES, tidx % WARP_LANES
        tile = cta * (self.block // WARP_LANES) + warp
        gS, gR = (cute.local_tile(tensor, TILE, (tile, 0)) for tensor in (source, result))
        for row in cutlass.range(TILE[0], unroll=4):
            parts = [gS[row, part * WARP_LANES + lane] for part in range(ROW // WARP_LANES)]
            row_max = parts[0]
            for value in parts[1:]:
                row_max = cute.arch.fmax(row_max, value)
            row_max = butterfly(row_max, cute.arch.fmax, cute.arch.shuffle_sync_bfly)
            exponentials = [cute.math.exp2((value - row_max) * LOG2_E, fastmath=True) for value in parts]
            row_sum = butterfly(sum(exponentials[1:], exponentials[0]), lambda x, y: x + y, cute.arch.shuffle_sync_bfly)
            scale = 1.0 / row_sum
            for part in cutlass.range_constexpr(ROW // WARP_LANES):
                gR[row, part * WARP_LANES + lane] = exponentials[part] * scale


SOFTMAXES: tuple[Experiment, ...] = tuple(
    (SoftmaxByShuffle if layout is None else SoftmaxThroughSmem)(variant, "fp32", layout)
    for variant, layout in REMEDIES.items()
)
