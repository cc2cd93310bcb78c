"""``python -m perf emulate``: the emulator beside the GPU, on the same inputs.

On a machine with a GPU and Nsight Compute it compares, for kernel1 and kernel2 over ``SHAPES``, the outputs
bit by bit and the emulated wavefronts of shared memory with the hardware's counters, and writes
``perf/results/<device>/emulation.json``. Without them it prints what the emulator alone can tell.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch
from tabulate import tabulate

import cute_fa
from cute_fa.arch import arch_of_capability
from cute_fa.emulator import DEFAULT_ARCH, EmulatedForward, emulate_forward
from cute_fa.ladder import resolve_kernel
from perf.records import write_results

KERNELS = ("kernel1", "kernel2")
_COUNTER = "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_{}.sum"
# Counter → the emulator's paths that it counts, and whether it is exact.
COUNTERS = {
    _COUNTER.format("ldsm"): (("ldmatrix", "ldmatrix.trans"), True),
    _COUNTER.format("st"): (("st.shared",), True),
    _COUNTER.format("ld"): (("ld.shared",), True),
    _COUNTER.format("ldgsts"): (("cp.async",), False),
}
_NCU_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LAUNCHES = "import perf.emulation; perf.emulation.launch_all()"


@dataclass(frozen=True)
class Shape:
    """One problem, by the keys of results files: lengths, head dimension, mask, type, batch, heads."""

    S_q: int
    S_k: int
    D: int
    causal: bool = False
    dtype: str = "bf16"
    B: int = 1
    H: int = 2
    H_kv: int = 2

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random normal q, k, v; the same on every device."""
        generator = torch.Generator().manual_seed(0)
        shapes = ((self.S_q, self.H), (self.S_k, self.H_kv), (self.S_k, self.H_kv))
        drawn = [torch.randn(self.B, s, h, self.D, generator=generator) for s, h in shapes]
        return tuple(t.to(_DTYPES[self.dtype]).to(device) for t in drawn)

    def __str__(self):
        heads = f"{self.H}" if self.H_kv == self.H else f"{self.H}/{self.H_kv}"
        text = f"{self.dtype} B={self.B} S={self.S_q}x{self.S_k} H={heads} D={self.D}"
        return text + (" causal" if self.causal else "")


SHAPES = (
    Shape(256, 256, 64),
    Shape(256, 256, 128, causal=True),
    Shape(129, 129, 64, causal=True, dtype="fp16"),
    Shape(200, 333, 128, B=2, H=4),
    Shape(65, 65, 128),
    Shape(200, 60, 64, causal=True, dtype="fp16", H_kv=1),
    Shape(1, 500, 128, causal=True, H=4, H_kv=1),
    Shape(512, 512, 128),
)


def add_arguments(parser) -> None:
    """The options of ``python -m perf emulate``."""
    parser.add_argument("--json", action="store_true", help="print the records as JSON instead of tables")


def main(args) -> int:
    """Runs the comparison; returns 1 when an exact counter and the emulator differ or nothing could be compared."""
    if not torch.cuda.is_available():
        records = [record for shape in SHAPES[:2] for name in KERNELS for record in emulated_records(shape, name)]
        _print(records, args.json)
        print("Not measured: outputs and counters of a GPU; no CUDA device is visible to PyTorch.", file=sys.stderr)
        return 0
    ncu = find_ncu()
    if ncu is None:
        print("ncu (Nsight Compute) is neither on PATH nor in its usual places; nothing was compared", file=sys.stderr)
        return 1
    records = compare_with_gpu(ncu)
    path = write_results("emulation", "python -m perf emulate", records)
    _print(records, args.json)
    print(f"wrote {path}", file=sys.stderr)
    differing = [r for r in records if r.get("exact") and r["wavefronts"] != r["predicted"]]
    if differing:
        print(f"{len(differing)} exact counters differ from the emulator", file=sys.stderr)
    return 1 if differing else 0


# --- emulated ----------------------------------------------------------------------------------------------


def emulate_shape(shape: Shape, name: str, arch: str = DEFAULT_ARCH) -> EmulatedForward:
    """A rung on a shape through the emulator; raises EmulationFault if that finds a fault."""
    result = emulate_forward(*shape.tensors("cpu"), causal=shape.causal, kernel=name, arch=arch)
    result.report.raise_for_faults()
    return result


def predicted_wavefronts(result: EmulatedForward, paths: tuple[str, ...]) -> tuple[int, int]:
    """(ideal, actual) wavefronts of some paths together."""
    found = [result.report.by_path().get(path, (0, 0)) for path in paths]
    return sum(ideal for ideal, _ in found), sum(actual for _, actual in found)


def _common(shape: Shape, name: str, arch: str) -> dict:
    layout = resolve_kernel(name).config.layout.name
    return {"name": name, "kind": "rung", **asdict(shape), "layout": layout, "arch": arch}


def emulated_records(shape: Shape, name: str, arch: str = DEFAULT_ARCH) -> list[dict]:
    """One record a path: ideal and predicted wavefronts."""
    result = emulate_shape(shape, name, arch)
    seconds = round(result.report.seconds_per_cta, 5)
    return [
        {**_common(shape, name, arch), "path": path, "ideal": ideal, "predicted": actual, "seconds_per_cta": seconds}
        for path, (ideal, actual) in result.report.by_path().items()
    ]


# --- compared with the GPU ---------------------------------------------------------------------------------


def compare_with_gpu(ncu: str) -> list[dict]:
    """Records of outputs and of counters, for every shape and kernel."""
    arch = arch_of_capability(torch.cuda.get_device_capability())
    records, results = [], {}
    for shape in SHAPES:
        for name in KERNELS:
            result = results[shape, name] = emulate_shape(shape, name, arch)
            o, lse = _gpu_forward(shape, name)
            difference = output_difference(result.o, o.cpu())
            lse_error = _largest_difference(result.lse, lse.cpu())
            seconds = round(result.report.seconds_per_cta, 5)
            record = {"path": "o", **difference, "lse_error": lse_error, "seconds_per_cta": seconds}
            records.append({**_common(shape, name, arch), **record})
    counted = run_ncu(ncu)
    for (shape, name), counters in zip(results, counted, strict=True):
        for counter, (paths, exact) in COUNTERS.items():
            ideal, predicted = predicted_wavefronts(results[shape, name], paths)
            record = {"path": " + ".join(paths), "counter": counter, "exact": exact, "ideal": ideal}
            record |= {"wavefronts": counters[counter], "predicted": predicted}
            records.append({**_common(shape, name, arch), **record})
    return records


def _gpu_forward(shape: Shape, name: str):
    return cute_fa.forward(*shape.tensors("cuda"), causal=shape.causal, kernel=name, return_lse=True)


def launch_all() -> None:
    """Launches every kernel once, in the order of ``compare_with_gpu``: what ncu runs."""
    for shape in SHAPES:
        for name in KERNELS:
            _gpu_forward(shape, name)
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


def find_ncu() -> str | None:
    """The path of Nsight Compute, the newest of its usual places if it is not on PATH."""
    places = [path for pattern in _NCU_PLACES for path in sorted(glob.glob(pattern), reverse=True)]
    return shutil.which("ncu") or next(iter(places), None)


def run_ncu(ncu: str) -> list[dict[str, int]]:
    """The counters of every launch of ``launch_all``, in order.

    Raises:
        RuntimeError: ncu failed, or counted another number of launches.
    """
    command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--target-processes", "all"]
    command += ["--kernel-name", "regex:cute_fa", "--metrics", ",".join(COUNTERS), sys.executable, "-c", _LAUNCHES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ncu exited with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    launches = parse_ncu(done.stdout)
    expected = len(SHAPES) * len(KERNELS)
    if len(launches) != expected:
        raise RuntimeError(f"ncu counted {len(launches)} launches, expected {expected}:\n{done.stdout[-2000:]}")
    return launches


def parse_ncu(text: str) -> list[dict[str, int]]:
    """The counters of each launch from the output of ``ncu --csv --page raw``.

    Raises:
        RuntimeError: no table in the output, or a counter is missing from it.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise RuntimeError(f"no table in the output of ncu:\n{text[-2000:]}")
    table = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    missing = set(COUNTERS) - set(table.fieldnames or ())
    if missing:
        raise RuntimeError(f"ncu gave no column for {', '.join(sorted(missing))}")
    launches = [row for row in table if row["ID"].strip().isdigit()]  # the row of units has no ID
    return [{counter: round(float(row[counter].replace(",", ""))) for counter in COUNTERS} for row in launches]


# --- printed -----------------------------------------------------------------------------------------------


def _print(records: list[dict], as_json: bool) -> None:
    if as_json:
        print(json.dumps(records, indent=1))
        return
    outputs = [r for r in records if r["path"] == "o"]
    if outputs:
        keys = ("equal", "max_ulp", "max_row_ulp", "lse_error")
        headers = ("shape", "kernel", "bits equal", "max ulp", "max ulp of row", "lse error")
        rows = [[_shape_of(r), r["name"], *(r[key] for key in keys)] for r in outputs]
        print(f"Outputs of the GPU and the emulator\n\n{tabulate(rows, headers)}\n")
    rows = []
    for r in records:
        if r["path"] != "o":
            counted = r.get("wavefronts")
            difference = None if counted is None else counted - r["predicted"]
            ways = f"{r['predicted'] / r['ideal']:.2f}-way" if r["ideal"] else ""
            rows.append([_shape_of(r), r["name"], r["path"], r["ideal"], r["predicted"], ways, counted, difference])
    headers = ("shape", "kernel", "path", "ideal", "emulated", "ways", "counted", "difference")
    print(f"Wavefronts of shared memory\n\n{tabulate(rows, headers)}")


def _shape_of(record: dict) -> str:
    return str(Shape(**{key: record[key] for key in Shape.__dataclass_fields__}))
