"""Times the rungs and their peers, after checking their results, in one interleaved run."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from cute_fa.arch import arch_of_capability
from cute_fa.emulator import EmulationError, EmulationFault
from cute_fa.ladder import LADDER, select
from cute_fa.reference import flops
from layouts.arguments import positive_int
from perf import inspect_table, results
from perf.cases import SETS, Case, add_case_arguments, cases_from, is_default_set
from perf.ceilings import MATMUL_SIZE, matmul_call, mma_call
from perf.contestants import Contestant, Unavailable, add_rung_arguments, own_device, rungs_from
from perf.correctness import ErrorCheck
from perf.emulation import arch_of, emulated_records, wavefront_table
from perf.output import add_output_arguments, cell, emit, plain_table, progress, wants_tables
from perf.peers import PEERS, SDPA_FLASH
from perf.resources import resources_of
from perf.timing import time_interleaved

CASE_BUDGET_S = 1.0
EMULATED_LENGTHS = (256, 256)
EMULATED_HEADS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf``."""
    add_case_arguments(parser)
    add_rung_arguments(parser)
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME", help=f"of {', '.join(PEERS)}"
    )
    parser.add_argument("--cold-l2", action="store_true", help="empty L2 of the data before each timed call")
    parser.add_argument("--repeats", type=positive_int, metavar="N", help="timed calls; default: by a time budget")
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Times the cases; without a CUDA device, inspects compiled kernels. 1 if a rung is wrong."""
    try:
        cases = cases_from(args)
    except ValueError as error:
        progress(f"python -m perf: error: {error}")
        return 2
    if not torch.cuda.is_available():
        status = inspect_table.main(args)
        if wants_tables(args):
            text, faulty = _emulated(args)
            print(f"\n{text}")
            status = status or int(faulty)
        return status

    ceilings = _ceiling_records(args)
    records, failures = [*ceilings], []
    if wants_tables(args):
        rates = ", ".join(f"{ceiling['name']} {ceiling['tflops']:.0f} TFLOP/s" for ceiling in ceilings)
        print(f"{results.device_name()}: {rates} ({args.dtype})\n")
    for index, case in enumerate(cases):
        progress(f"[{index + 1}/{len(cases)}] {case}")
        case_records = _time_case(case, args)
        records += case_records
        failures += [record for record in case_records if record["kind"] == "rung" and not record.get("correct", True)]
        if wants_tables(args):
            print(f"{case}\n{_table(case_records)}\n", flush=True)
    emit(args, results.make_document(records, results.device_name(), not failures), _default_path(args))
    for record in failures:
        progress(
            f"WRONG: {record['name']} ({record['layout']}), S_q={record['S_q']} S_k={record['S_k']} D={record['D']} "
            f"causal={record['causal']}: error {record['error']:.3g}, allowed {record['error_allowed']:.3g}"
        )
    return 1 if failures else 0


def _emulated(args) -> tuple[str, bool]:
    """What the emulator counts when it runs the chosen rungs, and whether it found a fault in one."""
    records, notes, faults, runs = [], [], [], 0
    for head_dim in args.head_dim:
        case = Case(args.dtype, 1, *EMULATED_LENGTHS, EMULATED_HEADS, EMULATED_HEADS, head_dim, False)
        for contestant in rungs_from(args):
            progress(f"emulating {contestant.label}, D={head_dim}")
            try:
                records += emulated_records(case, contestant.name, arch_of(contestant.rung), contestant.layout)
                runs += 1  # its report has no fault, else it had been raised
            except EmulationFault as fault:
                faults.append(f"FAULTY: {contestant.label}, D={head_dim}: {fault}")
            except (ValueError, EmulationError) as error:
                notes.append(f"{contestant.label} not emulated: {error}")
    if runs:
        clean = "the run above" if runs == 1 else f"the {runs} runs above"
        notes.insert(0, f"The emulator found no race, stray access or uninitialised read in {clean}.")
    title = "Emulated on the CPU, the compiled kernels themselves:"
    return "\n".join([title, wavefront_table(records), *faults, *notes]), bool(faults)


def _default_path(args):
    """The evidence's file for the default set; all other choices share one, so that they don't replace it."""
    rungs_are_default = args.layout is None and len(args.kernels) == len(LADDER) and len(args.peers) == len(PEERS)
    what = "custom"
    if args.set:
        what = f"timing_{args.set}"
    elif is_default_set(args) and rungs_are_default and not args.cold_l2 and args.repeats is None:
        head_dim = args.head_dim[0]
        what = f"timing_{args.dtype}" + (f"_d{head_dim}" if head_dim != 128 else "")
    return results.results_path(results.device_name(), what)


def _ceiling_records(args) -> list[dict]:
    made = {"mma_sync": mma_call, f"matmul_{MATMUL_SIZE}": matmul_call}
    made = {name: make(args.dtype, own_device()) for name, make in made.items()}
    # One after the other: beside a matrix product, which takes all the power, the clock falls for both.
    timings = {}
    for name, (call, _) in made.items():
        timings |= time_interleaved({name: call}, budget_s=0.25)
    return [
        {
            "name": name,
            "kind": "ceiling",
            "dtype": args.dtype,
            **asdict(timings[name]),
            "tflops": operations / timings[name].ms / 1e9,
        }
        for name, (_, operations) in made.items()
    ]


def _time_case(case: Case, args) -> list[dict]:
    """Checks every contestant, then times all that can run; one record each, in the table's order."""
    device = own_device()
    q, k, v = case.tensors(device)
    check = ErrorCheck.of(case, q, k, v)
    contestants = [*rungs_from(args), *(PEERS[name] for name in PEERS if name in args.peers)]
    calls, reasons, errors, rms_errors = {}, {}, {}, {}
    for contestant in contestants:
        try:
            calls[contestant.label] = contestant.prepare(case, q, k, v)
        except Unavailable as reason:
            reasons[contestant.label] = str(reason)
        else:
            o = calls[contestant.label]()
            errors[contestant.label], rms_errors[contestant.label] = check.error(o), check.rms_error(o)
    allowed = check.allowed(_flash_error(case, q, k, v, check, errors))
    cold_l2 = args.cold_l2 or (args.set in SETS and SETS[args.set].cold_l2)
    timings = time_interleaved(calls, budget_s=CASE_BUDGET_S, repeats=args.repeats, cold_l2=cold_l2)

    operations = flops(case.problem(device))
    records = []
    for contestant in contestants:
        record = {"name": contestant.name, "kind": contestant.kind, **case.as_record()}
        if contestant.kind == "rung":
            record |= _rung_fields(contestant, case, device)
        if contestant.label in reasons:
            record["reason"] = reasons[contestant.label]
        else:
            timing, error = timings[contestant.label], errors[contestant.label]
            record |= {**asdict(timing), "tflops": operations / timing.ms / 1e9, "cold_l2": cold_l2}
            record["kv_tbps"] = case.kv_bytes / timing.ms / 1e9
            record |= {"error": error, "error_allowed": allowed, "correct": error <= allowed}
            record["rms_error"] = rms_errors[contestant.label]
        records.append(record)
    return records


def _flash_error(case, q, k, v, check: ErrorCheck, errors: dict[str, float]) -> float | None:
    """SDPA flash's error, whether or not it takes part; None where it can't run."""
    if SDPA_FLASH.name not in errors:
        try:
            return check.error(SDPA_FLASH.prepare(case, q, k, v)())
        except Unavailable:
            return None
    return errors[SDPA_FLASH.name]


def _rung_fields(contestant: Contestant, case: Case, device: torch.device) -> dict:
    arch = arch_of_capability(torch.cuda.get_device_capability(device))
    problem = case.problem(device)
    best, _ = select(problem, arch)
    choice = contestant.choose(problem, arch)
    fields = {
        "layout": choice.config.layout.name,
        "config": str(choice.config),
        "chosen_by": choice.source,
        "auto": contestant.layout is None and contestant.rung.name == best.name,
    }
    try:
        return fields | resources_of(case.static, contestant.rung, choice.config, arch).as_record()
    except ValueError:
        return fields  # it can't be built; the attempt to call it has recorded why


def _table(records: list[dict]) -> str:
    """One case for people: ratios to the first rung and to SDPA flash, errors, resources."""
    tflops = {record["name"]: record.get("tflops") for record in reversed(records)}
    flash = next((record.get("error") for record in records if record["name"] == SDPA_FLASH.name), None)

    def ratio(record, base):
        return record["tflops"] / base if base else None

    rows, notes = [], []
    for record in records:
        label = record["name"] if record["kind"] == "peer" else f"{record['name']} {record['layout']}"
        if "reason" in record:
            notes.append(f"{label} not run: {record['reason']}")
            continue
        occupancy = record.get("occupancy")
        rows.append([
            label,
            cell(record["tflops"], ".1f"),
            cell(ratio(record, tflops.get(LADDER[0].name)), ".2f"),
            cell(ratio(record, tflops.get(SDPA_FLASH.name)), ".2f"),
            cell(record["error"], ".1e") + ("" if record["correct"] else " !"),
            cell(flash, ".1e"),
            cell(record.get("registers")),
            cell(record.get("smem_bytes")),
            cell(record.get("stack_bytes")),
            cell(occupancy, ".0%"),
        ])  # fmt: skip
    headers = ["", "TFLOP/s", f"/ {LADDER[0].name}", "/ SDPA flash", "error", "SDPA's", "registers"]
    headers += ["smem B", "spill B", "occupancy"]
    return "\n".join([plain_table(headers, rows), *notes])
