"""The counters of a profile: what each is called on a card, and what it means in the terms of the bank model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from perf.ncu import CONFLICTS, NcuError, launched, number

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active"
_STALL_NAME = re.compile(_STALL.format(r"(\w+?)") + "$")
_ISSUED = "smsp__issue_active.sum"
_DURATION = "gpu__time_duration.sum"


@dataclass(frozen=True)
class Counter:
    """One line of a profile.

    Args:
        key: what records call it.
        label: what tables call it.
        metrics: its names, the best first; a card has one of them, or none.
        form: format of a value in a table.
        meaning: one line.
        scale: a record's value is ncu's, in base units, times this.
        of: how the kernels of one call are put together: their "sum", the "mean" by duration, or the "longest"'s.
    """

    key: str
    label: str
    metrics: tuple[str, ...]
    form: str
    meaning: str
    scale: float = 1.0
    of: str = "sum"


def _of_instruction(op: str, what: str, *others: str) -> Counter:
    sass = f"sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum"
    return Counter(f"wavefronts_{op}", f"wavefronts {op}", (f"sm__{sass}", f"smsp__{sass}", *others), ",.0f", what)


_L1TEX = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
_L1TEX_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"

COUNTERS: tuple[Counter, ...] = (
    Counter("us", "duration, µs", (_DURATION,), ",.1f", "Time from the kernel's start to its end.", 1e-3),
    Counter(
        "wavefronts",
        "wavefronts, all",
        (f"{_L1TEX}.sum",),
        ",.0f",
        "Passes over shared memory; in one of them each bank serves one word. Arbitration and all clients counted.",
    ),
    _of_instruction("ldsm", "Those of ldmatrix: four a ldmatrix.x4 without conflicts, n times as many if n-way."),
    _of_instruction("ld", "Those of plain loads, such as the 16-byte loads of O.", f"{_L1TEX}_op_ld.sum"),
    _of_instruction("st", "Those of plain stores, such as the 4-byte stores of O.", f"{_L1TEX}_op_st.sum"),
    _of_instruction("ldgsts", "Those of cp.async: one a phase that stays in a 128-byte line."),
    _of_instruction("stsm", "Those of stmatrix."),
    _of_instruction("gmma", "Those of WGMMA, which reads its operands from shared memory itself."),
    Counter(
        "conflicts_ldsm",
        "conflicts ldsm",
        (CONFLICTS.format("ldsm"), CONFLICTS.format("ldsm").replace("sm__", "smsp__", 1)),
        ",.0f",
        "Wavefronts of ldmatrix beyond the ideal: (ways - 1) x ideal.",
    ),
    Counter(
        "conflicts_ld",
        "conflicts ld, l1tex",
        (f"{_L1TEX_CONFLICTS}_op_ld.sum",),
        ",.0f",
        "The counter that the texts name: loads and ldmatrix together, arbitration included.",
    ),
    Counter(
        "conflicts_st",
        "conflicts st, l1tex",
        (f"{_L1TEX_CONFLICTS}_op_st.sum",),
        ",.0f",
        "The same of stores.",
    ),
    Counter(
        "conflicts_gmma",
        "conflicts gmma, l1tex",
        (f"{_L1TEX_CONFLICTS}_op_gmma.sum", CONFLICTS.format("gmma")),
        ",.0f",
        "Wavefronts beyond the ideal when WGMMA reads its operands.",
    ),
    Counter(
        "smem_share",
        "shared memory busy",
        (f"{_L1TEX}.sum.pct_of_peak_sustained_elapsed",),
        ".1%",
        "Wavefronts over cycles: 100 % is one wavefront a cycle and SM, all that the banks can do.",
        0.01,
        "mean",
    ),
    Counter(
        "tensor_share",
        "tensor pipes busy",
        (
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
            "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
        ),
        ".1%",
        "Share of the cycles in which the tensor cores work; what conflicts take away.",
        0.01,
        "mean",
    ),
    Counter(
        "issue_share",
        "issue slots busy",
        ("smsp__issue_active.avg.pct_of_peak_sustained_elapsed",),
        ".1%",
        "Share of the cycles in which a scheduler issues an instruction.",
        0.01,
        "mean",
    ),
    Counter(
        "exp_share",
        "exponentials busy",
        ("smsp__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",),
        ".1%",
        "Of the unit that takes exponentials, and converts some types: what it does of what it can.",
        0.01,
        "mean",
    ),
    Counter(
        "memory_share",
        "device memory busy",
        ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
        ".1%",
        "Bytes to and from device memory over what it can move.",
        0.01,
        "mean",
    ),
    Counter(
        "registers", "registers", ("launch__registers_per_thread",), ".0f", "Registers of a thread.", 1.0, "longest"
    ),
    Counter(
        "occupancy",
        "occupancy",
        ("sm__warps_active.avg.pct_of_peak_sustained_active",),
        ".1%",
        "Warps on an SM over the most it can hold: who computes while others wait for a bank.",
        0.01,
        "mean",
    ),
)

STALL_MEANINGS: dict[str, str] = {
    "short_scoreboard": "Waits for the result of a shared-memory load or a shuffle: the first to grow with conflicts.",
    "mio_throttle": "The queue to shared memory is full, since each conflicting access leaves it ways times as late.",
    "math_pipe_throttle": "Waits for a busy tensor or arithmetic pipe: the good stall, nothing is short but compute.",
    "long_scoreboard": "Waits for global memory.",
    "barrier": "Waits at a barrier for the other warps.",
    "wait": "A fixed number of cycles between dependent instructions.",
    "gmma": "Waits for WGMMA.",
}
REST = "rest"
# The warp that issues does not stall.
_NOT_STALLED = ("selected",)


def choose(available: Collection[str]) -> dict[str, str]:
    """Key → metric, for all counters that a card has.

    Args:
        available: base names of the card's metrics; those of the launch itself exist on every card.
    """
    chosen = {}
    for counter in COUNTERS:
        for metric in counter.metrics:
            base = metric.partition(".")[0]
            if base.startswith("launch__") or base in available:
                chosen[counter.key] = metric
                break
    return chosen


def stall_reasons(available: Collection[str]) -> list[str]:
    """The reasons for which a card counts stalled warps.

    Raises:
        NcuError: there are none among its metrics.
    """
    found = sorted(match[1] for name in available if (match := _STALL_NAME.match(name)))
    reasons = [reason for reason in found if reason not in _NOT_STALLED and not reason.endswith("not_issued")]
    if not reasons:
        raise NcuError(f"this card has no metric like {_STALL.format('*')}: its stalls can't be told apart")
    return reasons


def metrics_of(available: Collection[str]) -> list[str]:
    """Everything that a profile asks ncu for."""
    stalls = [f"{_STALL.format(reason)}.ratio" for reason in stall_reasons(available)]
    return [*choose(available).values(), _ISSUED, *stalls]


def counters_of(call: Sequence[Mapping[str, str]], available: Collection[str]) -> dict:
    """The counters of one call, which may have launched several kernels; ``stalls`` has the share of each reason.

    A kernel's stalled warps weigh by the instructions it issued, so that shares of several kernels add up.
    """
    durations = [number(row, _DURATION) for row in call]
    longest = durations.index(max(durations))
    chosen = choose(available)
    found: dict = {"kernels": [launched(row) for row in call]}
    for counter in COUNTERS:
        if counter.key not in chosen:
            continue
        values = [number(row, chosen[counter.key]) * counter.scale for row in call]
        if counter.of == "sum":
            found[counter.key] = sum(values)
        elif counter.of == "mean":
            weighted = sum(value * duration for value, duration in zip(values, durations, strict=True))
            found[counter.key] = weighted / sum(durations)
        else:
            found[counter.key] = values[longest]
    stalled = {
        reason: sum(number(row, f"{_STALL.format(reason)}.ratio") * number(row, _ISSUED) for row in call)
        for reason in stall_reasons(available)
    }
    total = sum(stalled.values())
    found["stalls"] = {reason: warps / total if total else 0.0 for reason, warps in stalled.items()}
    return found


def named_stalls(stalls: Mapping[str, float]) -> dict[str, float]:
    """The reasons with a meaning here, in order, and the rest together."""
    named = {reason: stalls.get(reason, 0.0) for reason in STALL_MEANINGS}
    return named | {REST: sum(share for reason, share in stalls.items() if reason not in named)}
