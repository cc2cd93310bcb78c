"""``python -m perf banks``: the bank model beside the hardware's counters, access by access.

Every probe is one path under one layout, run by a kernel that does nothing else (``perf.bank_kernels``)
under one ncu process. The counters used count the wavefronts of the instructions themselves, so the bar
is equality.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from layouts import CATALOG, SmemLayout
from layouts.access import WARP_LANES, Path, array_paths, broadcast, by_column, by_row, kernel_paths, ldmatrix
from layouts.banks import BankReport, report
from layouts.toys import TOYS
from perf import results
from perf.ncu import CONFLICTS, MISSING, WAVEFRONTS, NcuError, count, find_ncu, launched, parse_ncu, run_ncu
from perf.output import add_output_arguments, as_csv, emit, plain_table, progress, wants_tables

# ncu has no counter of its own for the conflicts of ld and st: they are the wavefronts less the ideal.
# That of ldgsts reads 0, however many wavefronts cp.async takes to split lines.
_OPS_WITH_CONFLICTS = ("ldsm", "ldgsts")
_OPS = ("ldsm", "ldgsts", "ld", "st")


@dataclass(frozen=True, eq=False)
class Probe:
    """One path under one layout: a row of the table."""

    name: str
    layout: SmemLayout
    path: Path

    @property
    def op(self) -> str:
        """How ncu's counters call the instruction: "ldsm", "ldgsts", "ld" or "st"."""
        return _op(self.path.instruction)

    def predict(self) -> BankReport:
        """What the bank model says."""
        return report(self.layout, self.path)


def _op(instruction: str) -> str:
    prefixes = {"ldmatrix": "ldsm", "cp.async": "ldgsts", "ld.shared": "ld", "st.shared": "st"}
    return next(op for prefix, op in prefixes.items() if instruction.startswith(prefix))


def kernel_name(instruction: str) -> str:
    """The name of the kernel that makes an instruction, to which the DSL adds a number.

    ncu tells probes apart by it and by the order of their launches.
    """
    return "bank_" + re.sub(r"\W+", "_", instruction)


# Named one by one, so that a layout added to the catalog leaves the committed measurements complete.
_AT_HEAD_DIM_128 = (
    "PLAIN",
    "SWIZZLE_333",
    "PADDED_8",
    "SWIZZLE_233",
    "SWIZZLE_133",
    "ATOM_64B",
    "ATOM_32B",
    "DIRECT_333",
    "DIRECT_334",
)
_AT_HEAD_DIM_64 = ("PLAIN", "SWIZZLE_333", "DIRECT_334")
# Under the narrow atoms the loads of O conflict and cp.async splits lines, under the padding only the latter.
_ON_EVERY_PATH = ("PLAIN", "SWIZZLE_333", "PADDED_8", "ATOM_64B", "ATOM_32B")


def _kernel_probes() -> Iterable[tuple[SmemLayout, Path]]:
    """The attention kernel's own paths: the conflicting ones under every layout, the others under some."""
    always = ("ldmatrix K", "ldmatrix.trans V", "st.shared O")
    others = ("ldmatrix Q", "cp.async K", "ld.shared O")
    for head_dim, names in ((128, _AT_HEAD_DIM_128), (64, _AT_HEAD_DIM_64)):
        for name in names:
            for path in kernel_paths(head_dim, 64, 64):
                if path.name in always or (head_dim == 128 and name in _ON_EVERY_PATH and path.name in others):
                    yield CATALOG[name], path


def _single_warp_probes() -> Iterable[tuple[SmemLayout, Path]]:
    """One warp on small arrays: every width, by row and by column, broadcasts and lanes that sit out."""
    tile = (64, 64)
    for name in ("PLAIN", "SWIZZLE_333", "PADDED_8"):
        for direction in ("ld", "st"):
            for width in (2, 4, 8, 16):
                yield CATALOG[name], by_column(direction, width, tile, 2)
        column = by_column("ld", 16, tile, 2)
        cp_async = "cp.async.cg.shared.global"
        yield CATALOG[name], dataclasses.replace(column, name="cp.async by column", instruction=cp_async)
    for name in ("PLAIN", "SWIZZLE_333"):
        for matrices in (1, 2):
            for operand, trans in (("B", ""), ("Bt", ".trans")):
                yield CATALOG[name], ldmatrix(f"ldmatrix.x{matrices}{trans}", operand, tile, num_matrices=matrices)
    for width in (2, 4, 8, 16):
        for path in (by_row("ld", width, tile, 2), by_row("st", width, tile, 2), broadcast(width, tile, 2)):
            yield CATALOG["PLAIN"], path
    for width in (4, 8, 16):
        column = by_column("ld", width, tile, 2)
        few = np.broadcast_to(np.arange(WARP_LANES) % 4 == 0, column.rows.shape)
        yield CATALOG["PLAIN"], dataclasses.replace(column, name=f"{column.name}, every fourth lane", active=few)
    for name in ("FLOAT_32X32", "FLOAT_32X33"):
        toy = TOYS[name]
        for path in array_paths(toy.tile, toy.element_bytes):
            yield toy.layout, path


_LANE = np.arange(WARP_LANES)
# Which vector each lane takes; loads of 8 and 16 bytes serve two phases as one under some, stores never.
_SHARED_VECTORS = {
    "all the same": 0 * _LANE,
    "l // 2": _LANE // 2,
    "l // 4": _LANE // 4,
    "l and l ^ 2 alike": _LANE % 2 + _LANE // 4 * 2,
    "l and l ^ 4 alike": _LANE % 4 + _LANE // 8 * 4,
    "l % 16": _LANE % 16,
    "l // 2, then l": np.where(_LANE < WARP_LANES // 2, _LANE // 2, _LANE),
}
# Byte addresses of cp.async; p is the phase, i the lane in it.
_PHASE, _IN_PHASE = _LANE // 8, _LANE % 8
_COPY_BYTES = {
    "aligned": 16 * _LANE,
    "16 bytes past a line": 16 * _LANE + 16,
    "64 bytes past a line": 16 * _LANE + 64,
    "rows of 272 bytes": 272 * _PHASE + 16 * _IN_PHASE,
    "rows of 144 bytes": 144 * _PHASE + 16 * _IN_PHASE,
    "permuted in a line": 128 * _PHASE + 16 * (_IN_PHASE ^ 5),
    "pairs in lines of their own": 128 * (_LANE // 2) + 16 * (_LANE % 2) + 32 * (_LANE // 2 % 4),
}


def _lane_probes() -> Iterable[tuple[SmemLayout, Path]]:
    """Accesses of one warp that tell the rules of loads and of cp.async from those of stores and ldmatrix."""

    def at(instruction: str, width: int, what: str, addresses: np.ndarray) -> tuple[SmemLayout, Path]:
        cols = addresses.reshape(1, 1, WARP_LANES) // 2
        return CATALOG["PLAIN"], Path(f"{instruction}, {what}", instruction, width, 0 * cols, cols, (1, 2048))

    for instruction, width in (("ld.shared.v2.b32", 8), ("ld.shared.v4.b32", 16), ("st.shared.v4.b32", 16)):
        for what, vectors in _SHARED_VECTORS.items():
            yield at(instruction, width, what, vectors * width)
    for what, addresses in _COPY_BYTES.items():
        yield at("cp.async.cg.shared.global", 16, what, addresses)


def _probe(layout: SmemLayout, path: Path) -> Probe:
    tile = f"{path.tile[0]}x{path.tile[1]} of {path.element_bytes} B"
    return Probe(f"{layout.name}, {tile}: {path.name}", layout, path)


PROBES = tuple(_probe(*pair) for pair in (*_kernel_probes(), *_single_warp_probes(), *_lane_probes()))


def prediction(probe: Probe) -> dict:
    """The part of a record that needs no GPU."""
    predicted = probe.predict()
    record = {
        "name": probe.name,
        "path": probe.path.name,
        "layout": probe.layout.name,
        "instruction": probe.path.instruction,
        "tile": list(probe.path.tile),
        "element_bytes": probe.path.element_bytes,
        "instructions": probe.path.num_instructions,
        "ways": predicted.ways,
        "ideal": predicted.ideal,
        "counter": WAVEFRONTS.format(probe.op),
        "predicted": predicted.wavefronts,
    }
    if probe.op in _OPS_WITH_CONFLICTS:
        record |= {"conflict_counter": CONFLICTS.format(probe.op), "predicted_conflicts": predicted.conflicts}
    return record


def measure(ncu: str) -> list[dict[str, int]]:
    """Runs all probes under ncu; the counters of each, in the order of ``PROBES``.

    Raises:
        NcuError: ncu failed, or did not see exactly the kernels that were launched.
    """
    metrics = [WAVEFRONTS.format(op) for op in _OPS] + [CONFLICTS.format(op) for op in _OPS_WITH_CONFLICTS]
    options = ["--kernel-name", "regex:^bank_", "--metrics", ",".join(metrics)]
    rows = parse_ncu(run_ncu(ncu, options, ["-m", "perf.bank_kernels"]))
    expected = [kernel_name(probe.path.instruction) for probe in PROBES]
    seen = [re.sub(r"_\d+$", "", launched(row)) for row in rows]
    if seen != expected:
        raise NcuError(f"ncu saw {len(seen)} kernels, not the {len(expected)} that were launched: {seen}")
    return [{metric: count(row, metric) for metric in metrics} for row in rows]


def records(counters: list[dict[str, int]] | None) -> list[dict]:
    """One record a probe: the prediction, and what was measured if ``counters`` is not None."""
    rows = [prediction(probe) for probe in PROBES]
    for row, counted in zip(rows, counters or (), strict=counters is not None):
        row["measured"] = counted[row["counter"]]
        if "conflict_counter" in row:
            row["measured_conflicts"] = counted[row["conflict_counter"]]
    return rows


def agrees(record: dict) -> bool:
    """True when a measured record equals its prediction."""
    return record["predicted"] == record["measured"] and record.get("predicted_conflicts") == record.get(
        "measured_conflicts"
    )


def _table(rows: list[dict]) -> str:
    headers = ["layout, tile: path", "ways", "predicted", "measured", "conflicts predicted", "measured", ""]
    lines = [
        [
            row["name"],
            row["ways"],
            row["predicted"],
            row.get("measured", "-"),
            row.get("predicted_conflicts", ""),
            row.get("measured_conflicts", "-") if "conflict_counter" in row else "",
            "DIFFERS" if "measured" in row and not agrees(row) else "",
        ]
        for row in rows
    ]
    return plain_table(headers, lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf banks``."""
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Predicts and, where a GPU and ncu are, measures; 1 if a measurement fails or differs from its prediction."""
    ncu = find_ncu()
    counters, missing = None, ""
    if not torch.cuda.is_available():
        missing = "there is no CUDA device"
    elif ncu is None:
        missing = MISSING
    else:
        try:
            counters = measure(ncu)
        except NcuError as error:
            progress(f"python -m perf banks: error: {error}")
            return 1
    rows = records(counters)
    if wants_tables(args):
        print(_table(rows))
    if missing:
        if not wants_tables(args):
            print(as_csv(rows) if args.csv else json.dumps(rows, indent=1))
        progress(f"Predictions only; none of these {len(rows)} accesses was measured: {missing}.")
        return 0
    different = sum(not agrees(row) for row in rows)
    device = results.device_name()
    emit(args, results.make_document(rows, device, not different), results.results_path(device, "bank_table"))
    progress(f"{len(rows) - different} of {len(rows)} equal their prediction")
    return int(different > 0)
