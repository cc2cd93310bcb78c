"""``python -m perf emulate``: the emulator beside the GPU, on the same inputs.

On a machine with a GPU and Nsight Compute it compares, for the ladder's rungs over ``CASES``, the outputs
bit by bit and the emulated wavefronts of shared memory with the hardware's counters, and writes
``perf/results/<device>/emulation.json``. Without them it prints what the emulator alone can tell.
"""

from __future__ import annotations

import argparse
import json

import torch

import cute_fa
from cute_fa.arch import ARCHS, arch_of_capability
from cute_fa.config import KernelConfig
from cute_fa.emulator import DEFAULT_ARCH, EmulatedForward, emulate_forward
from cute_fa.ladder import KERNELS, LADDER, Rung
from layouts import SmemLayout
from perf.cases import Case
from perf.contestants import own_device, rung_contestant
from perf.ncu import MARK, MISSING, WAVEFRONTS, NcuError, count, find_ncu, mark, parse_ncu, run_ncu, split_at_marks
from perf.output import add_output_arguments, as_csv, cell, emit, plain_table, progress, wants_tables
from perf.results import device_name, make_document, results_path

# Counter → the emulator's paths that it counts, and whether it is exact.
COUNTERS = {
    WAVEFRONTS.format("ldsm"): (("ldmatrix", "ldmatrix.trans"), True),
    WAVEFRONTS.format("st"): (("st.shared",), True),
    WAVEFRONTS.format("ld"): (("ld.shared",), True),
    WAVEFRONTS.format("ldgsts"): (("cp.async",), False),
}
_LAUNCHES = "import perf.emulation; perf.emulation.launch_all()"


CASES = (
    Case("bf16", 1, 256, 256, 2, 2, 64, False),
    Case("bf16", 1, 256, 256, 2, 2, 128, True),
    Case("fp16", 1, 129, 129, 2, 2, 64, True),
    Case("bf16", 2, 200, 333, 4, 2, 128, False),
    Case("bf16", 1, 65, 65, 2, 2, 128, False),
    Case("fp16", 1, 200, 60, 2, 1, 64, True),
    Case("bf16", 1, 1, 500, 4, 1, 128, True),
    Case("bf16", 1, 512, 512, 2, 2, 128, False),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf emulate``."""
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Emulates and, where a GPU and ncu are, compares; 1 if an exact counter differs from the emulator."""
    ncu, missing = find_ncu(), ""
    if not torch.cuda.is_available():
        missing = "no CUDA device is visible to PyTorch"
    elif ncu is None:
        missing = MISSING
    if missing:
        pairs = [(case, name) for case in CASES[:2] for name in emulated_rungs()]
        records = [record for case, name in pairs for record in emulated_records(case, name)]
    else:
        try:
            records = compare_with_gpu(ncu)
        except NcuError as error:
            progress(f"python -m perf emulate: error: {error}")
            return 1
    if wants_tables(args):
        print_tables(records)
    wrong = differing(records)
    document = make_document(records, device_name(), ok=not wrong)
    if missing:
        if args.json:
            print(json.dumps(document, indent=1))
        elif args.csv:
            print(as_csv(records), end="")
        progress(f"Emulated only; neither outputs nor counters of a GPU were compared: {missing}.")
        return 0
    emit(args, document, results_path(device_name(), "emulation"))
    if wrong:
        progress(f"{len(wrong)} exact counters differ from the emulator")
    return int(bool(wrong))


# --- emulated ----------------------------------------------------------------------------------------------


def emulate_case(
    case: Case,
    name: str,
    arch: str = DEFAULT_ARCH,
    layout: SmemLayout | None = None,
    config: KernelConfig | None = None,
) -> EmulatedForward:
    """A rung, under its own layout or another, on a case through the emulator.

    Its configuration is the one that this machine would run, unless ``config`` is another.

    Raises:
        EmulationFault: the emulator found a fault of the kernel.
        ValueError: the rung can't take the layout.
    """
    config = config or config_for(case, name, arch, layout)
    options = {"causal": case.causal, "kernel": name, "layout": layout, "arch": arch, "config": config}
    result = emulate_forward(*case.tensors("cpu"), **options)
    result.report.raise_for_faults()
    return result


def config_for(case: Case, name: str, arch: str = DEFAULT_ARCH, layout: SmemLayout | None = None) -> KernelConfig:
    """What this machine would run a rung with."""
    return rung_contestant(KERNELS[name], layout).choose(case.problem(own_device()), arch).config


def arch_of(rung: Rung) -> str:
    """An architecture for which the emulator runs a rung: its own where it can be, else the rung's first."""
    return next(arch for arch in (DEFAULT_ARCH, *ARCHS) if rung.runs_on(arch))


def emulated_rungs() -> list[str]:
    """The rungs of the ladder that are built for the architecture that the emulator knows."""
    return [rung.name for rung in LADDER if rung.runs_on(DEFAULT_ARCH)]


def predicted_wavefronts(result: EmulatedForward, paths: tuple[str, ...]) -> tuple[int, int]:
    """(ideal, actual) wavefronts of some paths together."""
    found = [result.report.by_path().get(path, (0, 0)) for path in paths]
    return sum(ideal for ideal, _ in found), sum(actual for _, actual in found)


def _common(case: Case, name: str, arch: str, layout: SmemLayout | None = None) -> dict:
    config = config_for(case, name, arch, layout)
    return {"name": name, "kind": "rung", **case.as_record(), "layout": config.layout.name, "arch": arch}


def emulated_records(case: Case, name: str, arch: str = DEFAULT_ARCH, layout: SmemLayout | None = None) -> list[dict]:
    """One record a path: ideal and predicted wavefronts. Raises as ``emulate_case``."""
    result = emulate_case(case, name, arch, layout)
    seconds = round(result.report.seconds_per_cta, 5)
    return [
        {
            **_common(case, name, arch, layout),
            "path": path,
            "ideal": ideal,
            "predicted": actual,
            "seconds_per_cta": seconds,
        }
        for path, (ideal, actual) in result.report.by_path().items()
    ]


# --- compared with the GPU ---------------------------------------------------------------------------------


def compare_with_gpu(ncu: str) -> list[dict]:
    """Records of outputs and of counters, for every case and kernel."""
    arch = arch_of_capability(torch.cuda.get_device_capability())
    records, results = [], {}
    for case in CASES:
        for name in emulated_rungs():
            result = results[case, name] = emulate_case(case, name, arch)
            o, lse = _gpu_forward(case, name)
            difference = output_difference(result.o, o.cpu())
            lse_error = _largest_difference(result.lse, lse.cpu())
            seconds = round(result.report.seconds_per_cta, 5)
            record = {"path": "o", **difference, "lse_error": lse_error, "seconds_per_cta": seconds}
            records.append({**_common(case, name, arch), **record})
    counted = count_all(ncu)
    for (case, name), counters in zip(results, counted, strict=True):
        for counter, (paths, exact) in COUNTERS.items():
            ideal, predicted = predicted_wavefronts(results[case, name], paths)
            record = {"path": " + ".join(paths), "counter": counter, "exact": exact, "ideal": ideal}
            record |= {"wavefronts": counters[counter], "predicted": predicted}
            records.append({**_common(case, name, arch), **record})
    return records


def differing(records: list[dict]) -> list[dict]:
    """The records of exact counters, as far as they were counted, that the emulator did not predict."""
    counted = (record for record in records if record.get("exact") and "wavefronts" in record)
    return [record for record in counted if record["wavefronts"] != record["predicted"]]


def _gpu_forward(case: Case, name: str):
    # Drawn on the CPU, so that the emulator and the GPU get the same inputs.
    q, k, v = (tensor.to("cuda") for tensor in case.tensors("cpu"))
    return cute_fa.forward(q, k, v, causal=case.causal, kernel=name, return_lse=True)


def launch_all() -> None:
    """Launches every kernel once, in the order of ``compare_with_gpu``: what ncu runs."""
    for case in CASES:
        for name in emulated_rungs():
            _gpu_forward(case, name)
            mark()
    torch.cuda.synchronize()


def output_difference(a: torch.Tensor, b: torch.Tensor) -> dict:
    """How far two outputs (..., D) of 16 bits are apart.

    Returns:
        ``equal``: share of elements with equal bits. ``max_ulp``: largest difference in units of the last place
        of the larger of the two elements. ``max_row_ulp``: the same in units of the last place of the largest
        element of the row, which the rounding errors of a sum over keys go by.
    """
    x, y = a.double(), b.double()
    difference = (x - y).abs()
    larger = torch.maximum(x.abs(), y.abs())
    unit, row_unit = (_last_place(t, a.dtype) for t in (larger, larger.amax(-1, keepdim=True)))
    return {
        "equal": round((a == b).double().mean().item(), 6),
        "max_ulp": round((difference / unit).max().item(), 3),
        "max_row_ulp": round((difference / row_unit).max().item(), 3),
    }


def _last_place(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(values.clamp(min=info.smallest_normal)))
    return torch.exp2(exponent) * info.eps


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    equal = a == b  # also where both are infinite
    return torch.where(equal, 0.0, (a - b).abs()).max().item()


# --- Nsight Compute ----------------------------------------------------------------------------------------


def count_all(ncu: str) -> list[dict[str, int]]:
    """The counters of every launch of ``launch_all``, in order.

    Raises:
        NcuError: ncu failed, or did not see the calls that were made.
    """
    options = ["--kernel-name", f"regex:^cute_fa|{MARK}", "--metrics", ",".join(COUNTERS)]
    rows = parse_ncu(run_ncu(ncu, options, ["-c", _LAUNCHES]))
    calls = split_at_marks(rows, len(CASES) * len(emulated_rungs()))
    return [{counter: sum(count(row, counter) for row in call) for counter in COUNTERS} for call in calls]


# --- printed -----------------------------------------------------------------------------------------------


def print_tables(records: list[dict]) -> None:
    """Tables of outputs, where they were compared, of wavefronts, and of the emulator's time."""
    outputs = [r for r in records if r["path"] == "o"]
    if outputs:
        headers = ["case", "kernel", "bits equal", "max ulp", "max ulp of row", "lse error"]
        rows = [
            [_case_of(r), r["name"], f"{r['equal']:.2%}", cell(r["max_ulp"]), cell(r["max_row_ulp"]),
             cell(r["lse_error"], ".1e")] for r in outputs
        ]  # fmt: skip
        print(f"Outputs of the GPU and the emulator\n\n{plain_table(headers, rows)}\n")
    print(f"Wavefronts of shared memory\n\n{wavefront_table(records)}\n")
    seconds = {(_case_of(r), r["name"]): r["seconds_per_cta"] for r in records if "seconds_per_cta" in r}
    rows = [[*which, cell(1e3 * each, ".1f")] for which, each in seconds.items()]
    print(f"Time of the emulator\n\n{plain_table(['case', 'kernel', 'ms a CTA'], rows)}")


def wavefront_table(records: list[dict]) -> str:
    """Ideal and emulated wavefronts by path, and what a GPU counted where it did."""
    rows = []
    for r in (r for r in records if r["path"] != "o"):
        counted = r.get("wavefronts")
        difference = None if counted is None else counted - r["predicted"]
        ways = r["predicted"] / r["ideal"] if r["ideal"] else None
        numbers = [cell(r["ideal"], ","), cell(r["predicted"], ","), cell(ways, ".2f"), cell(counted, ",")]
        rows.append([_case_of(r), f"{r['name']} {r['layout']}", r["path"], *numbers, cell(difference, "+,")])
    headers = ["case", "kernel", "path", "ideal", "emulated", "ways", "counted", "difference"]
    return plain_table(headers, rows)


def _case_of(record: dict) -> str:
    return str(Case(**{key: record[key] for key in Case.__dataclass_fields__}))
