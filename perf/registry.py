"""What ``python -m perf`` can do: one line a subcommand, one line a step of the evidence."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_COMMAND = "time"

# name -> module with add_arguments(parser) and main(args) -> int; its docstring's first line is the help.
COMMANDS: dict[str, str] = {
    "time": "perf.time_table",
    "tune": "perf.tune",
    "choices": "perf.choice_table",
    "inspect": "perf.inspect_table",
    "host": "perf.host",
    "banks": "perf.bank_table",
    "emulate": "perf.emulation",
    "profile": "perf.profile_table",
    "experiments": "perf.experiments.command",
    "plots": "perf.plots",
    "tests": "perf.suite",
    "sanitize": "perf.sanitize",
    "soak": "perf.soak",
    "all": "perf.evidence",
    "tables": "perf.tables",
}


@dataclass(frozen=True)
class Step:
    """One part of the evidence that ``python -m perf all`` gathers.

    Args:
        what: the results file that it writes, without ``.json``.
        argv: arguments of ``python -m perf``.
        minutes: what it may take on a GPU machine; it is skipped when less is left.
        needs_gpu: without a GPU it is skipped, and its results file is that of the GPU.
    """

    what: str
    argv: tuple[str, ...]
    minutes: float
    needs_gpu: bool = True


_HOPPER_LAYOUTS = ("--kernels", "kernel11", "--peers", "--layout", "SWIZZLE_333", "ATOM_64B", "ATOM_32B", "ATOM_16B")

EVIDENCE: tuple[Step, ...] = (
    Step("resources", ("inspect", "--head-dim", "64", "128"), 2, needs_gpu=False),
    Step("timing_bf16", ("time", "--dtype", "bf16"), 2),
    Step("timing_fp16", ("time", "--dtype", "fp16"), 2),
    Step("timing_bf16_d64", ("time", "--dtype", "bf16", "--head-dim", "64"), 2),
    Step("timing_fp16_d64", ("time", "--dtype", "fp16", "--head-dim", "64"), 2),
    Step("timing_bf16_d256", ("time", "--dtype", "bf16", "--head-dim", "256"), 2),
    Step("timing_fp16_d256", ("time", "--dtype", "fp16", "--head-dim", "256"), 2),
    Step("timing_gqa", ("time", "--set", "gqa"), 2),
    Step("timing_decode", ("time", "--set", "decode"), 2),
    Step("host", ("host",), 1.5),
    Step("bank_table", ("banks",), 2),
    Step("emulation", ("emulate",), 2),
    Step("profile", ("profile",), 2),
    Step("hopper_layouts", ("profile", *_HOPPER_LAYOUTS), 1),
    Step("limit_decode", ("profile", "--limit", "decode"), 0.5),
    Step("limit_decode_batch", ("profile", "--limit", "decode_batch"), 0.5),
    Step("limit_d64", ("profile", "--limit", "d64"), 0.5),
    Step("experiments", ("experiments",), 1.5),
    Step("soak", ("soak",), 3),
    Step("sanitizer", ("sanitize",), 2),
    Step("tests", ("tests",), 6),
)
