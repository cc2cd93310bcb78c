"""Host overhead: microseconds until a call returns, and seconds until a new process has its first result."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import cute_fa
from cute_fa.arch import arch_of_capability
from cute_fa.ladder import select
from cute_fa.launch import get_launch
from perf import results
from perf.cases import Case
from perf.contestants import Unavailable
from perf.output import add_output_arguments, cell, emit, plain_table, progress, wants_tables
from perf.peers import import_flash_attn_4

# Small enough that the device keeps up with the host, so that no call waits for room in its queue, and with more
# queries than those for which the keys are split.
SMALL = Case("bf16", 1, 128, 128, 8, 8, 64, False)
ONE_QUERY = Case("bf16", 1, 1, 128, 8, 8, 64, False)
CALLS, ROUNDS, WARM_UP_CALLS = 200, 31, 20
PROCESSES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf host``."""
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and records; without a CUDA device it says that it can't."""
    if not torch.cuda.is_available():
        progress("Nothing was measured: no CUDA device is visible to PyTorch.")
        return 0
    progress(f"host overhead of a call ({SMALL})")
    records = _call_records()
    progress("start of a second process")
    records += _process_records()
    if wants_tables(args):
        rows = [[record["name"], cell(record.get("us"), ".1f"), cell(record.get("s"), ".2f")] for record in records]
        print(plain_table(["", "µs a call", "s"], rows))
    emit(
        args, results.make_document(records, results.device_name()), results.results_path(results.device_name(), "host")
    )
    return 0


def host_us(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of the host a call, round robin over the calls, each timed in batches."""
    samples = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARM_UP_CALLS):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter_ns() - start) / CALLS / 1e3)
    return {name: statistics.median(times) for name, times in samples.items()}


def _call_records() -> list[dict]:
    q, k, v = SMALL.tensors("cuda")
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    problem = SMALL.problem(q.device)
    arch = arch_of_capability(torch.cuda.get_device_capability())
    rung, config = select(problem, arch)
    launch = get_launch(problem, rung, config, arch)
    one_query = "forward, one query"
    calls = {
        "forward": functools.partial(cute_fa.forward, q, k, v),
        "forward, return_lse": functools.partial(cute_fa.forward, q, k, v, return_lse=True),
        "forward, out=": functools.partial(cute_fa.forward, q, k, v, out=torch.empty_like(q)),
        "flash_attn_func": functools.partial(cute_fa.flash_attn_func, q, k, v),
        "torch.ops.cute_fa.forward": functools.partial(
            torch.ops.cute_fa.forward.default, q, k, v, False, None, False, "auto", None
        ),
        one_query: functools.partial(cute_fa.forward, q[:, :1], k, v),
        "launch alone": functools.partial(launch, q, k, v, torch.empty_like(q), None, problem.softmax_scale(None)),
        "sdpa": functools.partial(scaled_dot_product_attention, *heads_first),
    }
    own = set(calls) - {"sdpa"}
    records = []
    try:
        calls["flash_attn_4"] = functools.partial(import_flash_attn_4(), q, k, v)
        calls["flash_attn_4"]()
    except Exception as error:  # a peer that fails is left out with its reason
        calls.pop("flash_attn_4", None)
        reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
        records = [{"name": "flash_attn_4", "kind": "peer", "reason": reason}]
    with torch.no_grad():
        times = host_us(calls)
    cases = {one_query: ONE_QUERY}
    measured = [
        {"name": name, "kind": "rung" if name in own else "peer", **cases.get(name, SMALL).as_record(), "us": us}
        for name, us in times.items()
    ]
    return measured + records


def _process_records() -> list[dict]:
    """Processes that find the kernel in the disk cache, since this one has put it there."""
    q, k, v = Case("bf16", 1, 128, 128, 16, 16, 128, False).tensors("cuda")
    cute_fa.forward(q, k, v)
    runs = []
    for _ in range(PROCESSES):
        command = [sys.executable, "-m", "perf.first_call"]
        done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    names = {
        "dsl_s": "import of the CuTe DSL (it imports JAX where that is installed)",
        "import_s": "import cute_fa after it",
        "first_call_s": "first call, compiled kernel on disk",
    }
    return [
        {"name": name, "kind": "process", "s": statistics.median(run[key] for run in runs)}
        for key, name in names.items()
    ]
