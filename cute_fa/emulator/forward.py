"""Attention on CPU tensors through the emulator: the code of a compiled rung, not a reference."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from cute_fa.compiled import combine_name, get_artifacts, kernel_name
from cute_fa.config import KernelConfig, Sm90Config
from cute_fa.device.scores import ScoreArguments
from cute_fa.device.softmax import LOG2_E
from cute_fa.emulator.launch import TensorArg, divisor_args, emulate
from cute_fa.emulator.parse import only_entry
from cute_fa.emulator.report import EmulationError, EmulationReport
from cute_fa.emulator.tensor_map import TensorMapArg
from cute_fa.ladder import Rung, select
from cute_fa.launch import score_arguments
from cute_fa.problem import NO_OPTIONS, SEQUENCE_TENSORS, AttentionProblem, ScoreOptions, StaticProblem, widened
from layouts import SmemLayout

DEFAULT_ARCH = "sm_80"  # cp.async, ldmatrix, mma.sync: the family that takes every problem, and the fastest here
MAX_SECONDS = 3600.0
EMULATED_SMS = 132  # of the card that the emulator stands for, where a choice depends on it: an H100 or H200
_PROGRESS_AFTER = 3.0  # seconds
# Measured on two x86 cores with checks on: what a tile of queries takes besides, what 64 x 64 scores take, and
# each column of the head dimension of these. The second with both cores busy.
_SECONDS, _SECONDS_SM90 = (1.5e-3, 0.3e-3, 10e-6), (15e-3, 1.8e-3, 16e-6)


class EmulationTooLongError(EmulationError):
    """The work would take the emulator hours; the message has the estimate."""


@dataclass(frozen=True)
class EmulatedForward:
    """o (B, S_q, H, D_v), lse (B, H, S_q) and what the emulator saw."""

    o: torch.Tensor
    lse: torch.Tensor
    report: EmulationReport


def emulated_launch(
    static: StaticProblem, rung: Rung, config: KernelConfig, arch: str = DEFAULT_ARCH
) -> Callable[..., EmulationReport]:
    """A compiled kernel as a function of (q, k, v, o, lse or None, softmax_scale), on CPU tensors.

    The function takes what that of ``launch.get_launch`` takes, fills o and lse, and returns the report. It writes
    a line of progress to stderr when it takes more than a few seconds.

    Raises (the function):
        EmulationFault: the kernel raced, strayed out of bounds, or read what nothing wrote.
        EmulationTooLongError: the estimate is over ``MAX_SECONDS``; nothing has been computed.
        UnknownInstructionError: the emulator does not know an instruction of the kernel.
    """

    def launch(q, k, v, o, lse, softmax_scale, arguments=None, sequences=None) -> EmulationReport:
        ptx = get_artifacts(static, rung, config, arch).ptx
        report = run_forward(ptx, static, rung, config, q, k, v, o, lse, softmax_scale, sequences, arguments)
        report.raise_for_faults()
        return report

    return launch


def emulate_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    kernel: str = "auto",
    layout: str | SmemLayout | None = None,
    options: ScoreOptions = NO_OPTIONS,
    arch: str = DEFAULT_ARCH,
    config: KernelConfig | None = None,
    check: bool = True,
) -> EmulatedForward:
    """``cute_fa.forward`` on CPU tensors, with the report; faults are in the report and raise nothing.

    Args:
        q, k, v, causal, softmax_scale, kernel, layout: as in ``cute_fa.forward``; at least one query and key, and
            rows at multiples of 16 bytes.
        options: the arguments of ``cute_fa.forward`` that change scores.
        arch: the architecture that the kernel is compiled for.
        config: what the kernel is compiled with, in place of what would be chosen for these lengths.
        check: count wavefronts, look for races and uninitialised reads.

    Raises:
        TypeError, ValueError: arguments that ``cute_fa.forward`` refuses.
        EmulationTooLongError, UnknownInstructionError: see ``emulated_launch``.
    """
    problem = AttentionProblem.from_tensors(q, k, v, causal=causal, return_lse=True, options=options)
    rung, chosen = select(problem, arch, kernel, layout)
    config = config or chosen
    static = problem.static
    arguments = score_arguments(options, static.features, problem)
    _refuse_hours(rung, config, q.shape, problem.seqlen_k, static.causal, arguments)
    q, k, v = widened(q), widened(k), widened(v)
    o = torch.empty(problem.o_shape, dtype=q.dtype)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32)
    ptx = get_artifacts(static, rung, config, arch).ptx
    scale = problem.softmax_scale(softmax_scale)
    report = run_forward(ptx, static, rung, config, q, k, v, o, lse, scale, arguments=arguments, check=check)
    return EmulatedForward(o, lse, report)


def run_forward(
    ptx: str,
    static: StaticProblem,
    rung: Rung,
    config: KernelConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
    sequences: tuple | None = None,
    arguments: ScoreArguments | None = None,
    *,
    check: bool = True,
) -> EmulationReport:
    """Executes the PTX of a rung on CPU tensors of the shapes that ``cute_fa.forward`` documents.

    Args:
        ptx: the rung compiled for ``static`` with ``config``.
        o, lse: written in place.
        sequences: as for the function that ``get_compiled`` returns.
        arguments: the values of the score options that it was compiled with, if any.
        check: as in ``emulate``.

    Raises:
        EmulationTooLongError: the estimate is over ``MAX_SECONDS``.
        EmulationError: see ``emulate``.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, located = k.shape[1], []
    if sequences is not None:
        seqlen_q_given, cu_seqlens_q, cu_seqlens_k, _, block_table, *_ = sequences
        if cu_seqlens_q is not None:
            batch, seqlen_q = len(cu_seqlens_q) - 1, seqlen_q_given
        if block_table is not None:
            seqlen_k *= block_table.shape[1]
        elif cu_seqlens_k is not None:
            seqlen_k = -(-seqlen_k // max(batch, 1))  # on average, for the estimate of the time
        located = [np.int32(seqlen_q_given), *_sequence_arguments(sequences[1:])]
    num_m_blocks = -(-seqlen_q // config.tile_m)
    _refuse_hours(rung, config, (batch, seqlen_q, num_heads, head_dim), seqlen_k, static.causal, arguments)
    named = {name: _as_numpy(tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("o", o))}
    strides = ((0, np.int64), (1, np.int32), (2, np.int64))
    args = [TensorArg(name, array, (0, 1, 2), strides) for name, array in named.items()]
    if hasattr(rung.kernel, "tma_tiles"):
        # Where a member of packed queries ends, O is stored without TMA.
        without_maps = args[3:] if "cu_seqlens_q" in static.sequences else []
        args = _tensor_maps(named, rung.kernel.tma_tiles(static, config)) + without_maps
    if lse is not None:
        args.append(
            TensorArg("lse", _as_numpy(lse), dynamic_shape=(0, 1, 2), dynamic_strides=((0, np.int64), (1, np.int64)))
        )
    scale = np.float32(softmax_scale) * np.float32(LOG2_E)
    num_ctas, splitting = num_m_blocks * num_heads * batch, []
    if isinstance(config, Sm90Config) and config.max_ctas is not None:
        num_ctas = min(num_ctas, config.max_ctas)
    if rung.splits_keys:
        num_heads_kv = k.shape[2]
        num_ctas = rung.kernel.num_ctas(batch, seqlen_q, num_heads, num_heads_kv)
        num_splits = rung.kernel.num_splits(config, num_ctas, seqlen_k, EMULATED_SMS)
        num_ctas *= num_splits
        floats = rung.kernel.workspace_floats(batch, seqlen_q, num_heads, head_dim, num_splits)
        workspace = TensorArg("workspace", np.full(floats, np.nan, np.float32), dynamic_shape=(0,))
        group = num_heads // num_heads_kv
        tiles_of_group = rung.kernel.num_ctas(1, seqlen_q, group, 1)
        splitting = [workspace, *divisor_args(tiles_of_group, num_splits, num_heads_kv, group)]
    report = emulate(
        only_entry(ptx, kernel_name(rung)),
        (num_ctas, 1, 1),
        (config.num_threads, 1, 1),
        [*args, scale, *_score_args(arguments), *splitting, *located],
        rung.kernel.smem_bytes(static, config),
        check=check,
        progress=_Progress(rung.name),
    )
    if rung.splits_keys and num_splits > 1:
        report += emulate(
            only_entry(ptx, combine_name(rung)),
            (batch * num_heads * seqlen_q, 1, 1),
            (rung.kernel.COMBINE_THREADS, 1, 1),
            [*args[3:], workspace, np.int32(num_splits), *divisor_args(seqlen_q, num_heads)],
            rung.kernel.combine_smem_bytes(head_dim),
            check=check,
        )
    return report


def _tensor_maps(arrays: dict[str, np.ndarray], tiles) -> list[TensorMapArg | np.ndarray]:
    """The parameters of a kernel that loads by TMA: a map for each tensor, then each one's extents (S, H, B).

    A box is as wide as the atom of the tile's layout (``make_tiled_tma_atom`` of the DSL).
    """
    maps, extents = [], []
    for (name, array), tile in zip(arrays.items(), tiles, strict=True):
        batch, seqlen, heads, _ = array.shape
        box, bits = (1, 1, tile.tile[0], tile.atom_shape[1]), tile.layout.swizzle.bits
        maps.append(TensorMapArg(name, array.transpose(0, 2, 1, 3), box, 16 << bits if bits else 0))
        extents.append(np.array([seqlen, heads, batch], np.int32))
    return [*maps, *extents]


_STRIDED = {"alibi_slopes": 2, "attn_bias": 3, "score_factors": 2, "output_factors": 2}  # modes with run-time strides


def _score_args(arguments: ScoreArguments | None) -> list[TensorArg | np.generic]:
    """The parameters that a kernel takes for its score options."""
    if arguments is None:
        return []
    given = {name: value for name, value in arguments._asdict().items() if value is not None}
    packed = []
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            strides = tuple((mode, np.int64) for mode in range(_STRIDED.get(name, 0)))
            packed.append(TensorArg(name, _as_numpy(value), tuple(range(value.dim())), strides))
        else:
            packed.append(np.float32(value) if name == "softcap" else np.int32(value))
    return packed


def estimate_seconds(
    config: KernelConfig, q_shape, seqlen_k: int, causal: bool, arguments: ScoreArguments | None = None
) -> float:
    """About how long the emulator takes on two cores with checks on."""
    batch, seqlen_q, num_heads, head_dim = q_shape
    first_rows = np.arange(0, seqlen_q, config.tile_m, dtype=np.int64)
    left, right = (None, None) if arguments is None else (arguments.window_left, arguments.window_right)
    right = 0 if causal else right
    keys = np.full(len(first_rows), seqlen_k)
    if right is not None:
        keys = np.clip(first_rows + config.tile_m + seqlen_k - seqlen_q + right, 0, seqlen_k)
    if left is not None:
        keys -= np.clip(first_rows + seqlen_k - seqlen_q - left, 0, keys) // config.tile_n * config.tile_n
    tiles = float((-(-keys // config.tile_n)).sum())
    besides, per_scores, per_column = _SECONDS_SM90 if isinstance(config, Sm90Config) else _SECONDS
    tile_seconds = (per_scores + per_column * head_dim) * config.tile_m * config.tile_n / 4096
    return batch * num_heads * (len(first_rows) * besides + tiles * tile_seconds)


def _refuse_hours(
    rung: Rung, config: KernelConfig, q_shape, seqlen_k: int, causal: bool, arguments: ScoreArguments | None
) -> None:
    estimate = estimate_seconds(config, q_shape, seqlen_k, causal, arguments)
    if estimate > MAX_SECONDS:
        raise EmulationTooLongError(
            f"emulating {rung.name} for q of shape {tuple(q_shape)} and {seqlen_k} keys would take about "
            f"{_duration(estimate)} on the CPU; the limit is {_duration(MAX_SECONDS)}. Take shorter sequences, fewer "
            "heads or a smaller batch, or tensors on a GPU"
        )


def _sequence_arguments(tensors) -> list[TensorArg]:
    """The tensors of ``SEQUENCE_TENSORS`` that are given."""
    return [
        TensorArg(name, tensor.numpy(), tuple(range(tensor.dim())), ((0, np.int64),) if tensor.dim() > 1 else ())
        for name, tensor in zip(SEQUENCE_TENSORS, tensors, strict=True)
        if tensor is not None
    ]


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return (tensor.detach().view(torch.int16) if is_half else tensor.detach()).numpy()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Progress:
    """Writes a line to stderr once the work has taken some seconds, and again as often."""

    def __init__(self, name: str):
        self.name = name
        self.last = time.monotonic()

    def __call__(self, done: int, total: int, seconds: float):
        now = time.monotonic()
        if now - self.last < _PROGRESS_AFTER or done == total:
            return
        self.last = now
        left = _duration(seconds / done * (total - done))
        print(f"cute_fa: emulating {self.name}: {done} of {total} CTAs, about {left} left", file=sys.stderr, flush=True)
