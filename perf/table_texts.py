"""What the tables of the documents say: one function a table, from results files to markdown."""

from __future__ import annotations

from collections.abc import Callable

from cute_fa.ladder import LADDER
from perf import results
from perf.features import FEATURES, PEERS, SOURCES
from perf.inspect_table import DEFAULT_ARCHS
from perf.output import cell, markdown_table

NOT_MEASURED = "_Not measured yet: `python -m perf all` on a GPU machine fills this in._"
NOT_COMPILED = "_Not compiled yet: `python -m perf all` fills this in; it needs no GPU for this one._"
FLASH = "sdpa_flash"
LADDER_CASE = {"D": 128, "S_q": 4096, "S_k": 4096, "causal": False}
CASE_KEYS = ("S_q", "S_k", "causal")


def ladder_table() -> str:
    """The rungs, what each changed, and what that gave on each device that has results."""
    blocks = []
    for document in _documents("timing_bf16"):
        records = [record for record in document["records"] if LADDER_CASE.items() <= record.items()]
        by_name = {record["name"]: record for record in records}
        rows = []
        for rung in LADDER:
            record = by_name.get(rung.name, {})
            rows.append([
                rung.name,
                rung.changed,
                cell(record.get("tflops"), ".1f"),
                _ratio(by_name, rung.name, LADDER[0].name),
                _ratio(by_name, rung.name, FLASH),
                cell(record.get("registers")),
                cell(record.get("smem_bytes")),
            ])  # fmt: skip
        headers = ["rung", "what it changed", "TFLOP/s", f"/ {LADDER[0].name}", "/ SDPA flash", "registers", "smem B"]
        case = "bf16, " + ", ".join(f"{key}={records[0][key]}" for key in ("B", "S_q", "H", "D")) if records else ""
        blocks.append(f"{_caption(document)}; {case}, full.\n\n{markdown_table(headers, rows, text_columns=2)}")
    return "\n\n".join(blocks) or NOT_MEASURED


def timing_table(what: str) -> str:
    """Every case of a timing file: TFLOP/s of all contestants, and what the layout and the best rung give."""
    blocks = []
    for document in _documents(what):
        records = [record for record in document["records"] if record["kind"] != "ceiling"]
        names = list(dict.fromkeys(record["name"] for record in records))
        best = next((record["name"] for record in records if record.get("auto")), LADDER[-1].name)
        pairs = dict.fromkeys([(LADDER[1].name, LADDER[0].name), (best, FLASH)])
        cases: dict[tuple, dict] = {}
        for record in records:
            cases.setdefault(tuple(record[key] for key in CASE_KEYS), {})[record["name"]] = record
        rows = []
        for (seqlen_q, seqlen_k, causal), by_name in cases.items():
            rows.append([
                str(seqlen_q) if seqlen_q == seqlen_k else f"{seqlen_q}x{seqlen_k}",
                "causal" if causal else "full",
                *(cell(by_name.get(name, {}).get("tflops"), ".1f") for name in names),
                *(_ratio(by_name, top, base) for top, base in pairs),
                _largest_rung_error(by_name),
                cell(by_name.get(FLASH, {}).get("error"), ".1e"),
            ])  # fmt: skip
        headers = ["S", "mask", *names, *(f"{top} / {base}" for top, base in pairs), "rungs' error", "SDPA's error"]
        first = records[0]
        ceilings = [record for record in document["records"] if record["kind"] == "ceiling"]
        ceiling = "".join(f"; {r['name']} in the same run: {r['tflops']:.0f} TFLOP/s" for r in ceilings)
        case = f"TFLOP/s, {first['dtype']}, D={first['D']}, H={first['H']}, B·S={first['B'] * first['S_k']}"
        blocks.append(f"{_caption(document)}; {case}{ceiling}.\n\n{markdown_table(headers, rows, text_columns=2)}")
    return "\n\n".join(blocks) or NOT_MEASURED


def resources_table() -> str:
    """What the rungs take on each architecture; which of those were run is read off the results folders."""
    document = results.read_results(results.results_path(results.COMPILED, "resources"))
    if document is None:
        return NOT_COMPILED
    ran = {record.get("arch") for timing in _documents("timing_bf16") for record in timing["records"]}
    kernels: dict[tuple, dict[bool, dict]] = {}
    for record in sorted(document["records"], key=lambda record: DEFAULT_ARCHS.index(record["arch"])):
        key = (record["arch"], record["D"], record["name"], record["layout"])
        kernels.setdefault(key, {})[record["causal"]] = record
    rows = []
    for (arch, head_dim, name, layout), by_causal in kernels.items():

        def both(key, form="", by_causal=by_causal):
            values = [cell(by_causal.get(causal, {}).get(key), form) for causal in (False, True)]
            return values[0] if values[0] == values[1] else " / ".join(values)

        rows.append([
            arch if arch in ran else f"{arch} (compiled, not run)",
            f"{name} {layout}",
            str(head_dim),
            *(both(key) for key in ("registers", "stack_bytes", "smem_bytes", "ctas_per_sm")),
            both("occupancy", ".0%"),
        ])  # fmt: skip
    headers = ["arch", "kernel", "D", "registers", "spill B", "smem B", "CTAs/SM", "occupancy"]
    versions = f"CuTe DSL {document['versions']['cutlass_dsl']}, commit {_short(document['commit'])}"
    return f"{versions}; full / causal where they differ.\n\n{markdown_table(headers, rows, text_columns=2)}"


def host_table() -> str:
    """Host microseconds of a call, and seconds of a process's first."""
    blocks = []
    for document in _documents("host"):
        rows = []
        for record in document["records"]:
            value = f"{record['us']:.1f} µs" if "us" in record else f"{record['s']:.2f} s" if "s" in record else "-"
            rows.append([record["name"], value])
        blocks.append(f"{_caption(document)}.\n\n{markdown_table(['', 'median'], rows)}")
    return "\n\n".join(blocks) or NOT_MEASURED


def tests_table() -> str:
    """Tests that passed on each device, by file."""
    blocks = []
    for document in _documents("tests"):
        keys = ("passed", "failed", "skipped")
        rows = [[record["name"], *(str(record[key]) for key in keys)] for record in document["records"]]
        blocks.append(f"{_caption(document)}.\n\n{markdown_table(['tests', *keys], rows)}")
    return "\n\n".join(blocks) or NOT_MEASURED


def banks_table() -> str:
    """The bank model beside the counters, one row an instruction: accesses, and how many were predicted exactly."""
    blocks = []
    for document in _documents("bank_table"):
        instructions: dict[str, list[dict]] = {}
        for record in document["records"]:
            instructions.setdefault(record["instruction"], []).append(record)
        rows = [
            [
                f"`{instruction}`",
                str(len(records)),
                str(sum(record["predicted"] == record["measured"] for record in records)),
                f"{max(record['ways'] for record in records)}",
                f"{sum(record['measured'] for record in records):,}",
            ]
            for instruction, records in instructions.items()
        ]
        headers = ["instruction", "(layout, path) pairs", "predicted exactly", "worst ways", "wavefronts"]
        blocks.append(f"{_caption(document)}.\n\n{markdown_table(headers, rows)}")
    return "\n\n".join(blocks) or NOT_MEASURED


def emulation_table() -> str:
    """Emulated wavefronts beside the counters, summed over all shapes; and how close the outputs are."""
    blocks = []
    for document in _documents("emulation"):
        counted: dict[tuple[str, str], list[dict]] = {}
        for record in document["records"]:
            if "counter" in record:
                counted.setdefault((record["name"], record["path"]), []).append(record)
        rows = []
        for (name, path), records in counted.items():
            sums = [sum(record[key] for record in records) for key in ("ideal", "predicted", "wavefronts")]
            equal = sum(record["predicted"] == record["wavefronts"] for record in records)
            rows.append([name, path, *(f"{value:,}" for value in sums), f"{equal} of {len(records)}"])
        headers = ["kernel", "path", "ideal", "emulated", "counted", "shapes equal"]
        outputs = [record for record in document["records"] if record["path"] == "o"]
        bits = min(record["equal"] for record in outputs)
        worst = max(record["max_row_ulp"] for record in outputs)
        close = f"outputs of GPU and emulator: at least {bits:.1%} of the elements have equal bits, none is more than "
        close += f"{worst:.1f} units of the last place of its row's largest element away"
        blocks.append(f"{_caption(document)}; {close}.\n\n{markdown_table(headers, rows, text_columns=2)}")
    return "\n\n".join(blocks) or NOT_MEASURED


def emulation_time_table() -> str:
    """Milliseconds a CTA that the emulator took."""
    blocks = []
    for document in _documents("emulation"):
        rows = []
        for record in document["records"]:
            if record["path"] == "o":
                lengths = f"{record['S_q']}x{record['S_k']}"
                mask = "causal" if record["causal"] else "full"
                time = cell(1e3 * record["seconds_per_cta"], ".1f")
                rows.append([record["name"], lengths, mask, str(record["D"]), time])
        headers = ["kernel", "S", "mask", "D", "ms a CTA"]
        blocks.append(f"{_caption(document)}.\n\n{markdown_table(headers, rows, text_columns=3)}")
    return "\n\n".join(blocks) or NOT_MEASURED


def features_table() -> str:
    """What cute_fa and its peers can do; ours has tests, the peers' their documentation."""
    rows = [[feature.name, feature.ours, *feature.peers] for feature in FEATURES]
    sources = "; ".join(SOURCES)
    table = markdown_table(["", "cute_fa", *PEERS], rows, text_columns=2 + len(PEERS))
    return f"{table}\n\nOf the peers: {sources}; - is what these don't say."


TABLES: dict[str, Callable[[], str]] = {
    "ladder": ladder_table,
    "timing_bf16": lambda: timing_table("timing_bf16"),
    "timing_fp16": lambda: timing_table("timing_fp16"),
    "timing_bf16_d64": lambda: timing_table("timing_bf16_d64"),
    "resources": resources_table,
    "host": host_table,
    "tests": tests_table,
    "banks": banks_table,
    "emulation": emulation_table,
    "emulation_time": emulation_time_table,
    "features": features_table,
}


def _documents(what: str) -> list[dict]:
    """The results ``what`` of every device that has been measured."""
    paths = sorted(results.RESULTS.glob(f"*/{what}.json"))
    return [results.read_results(path) for path in paths if path.parent.name != results.COMPILED]


def _caption(document: dict) -> str:
    known = document["versions"]
    versions = ", ".join(f"{key} {known[key]}" for key in ("driver", "torch", "cutlass_dsl", "cudnn") if key in known)
    return f"{document['device']}, {document['date'][:10]}, commit {_short(document['commit'])}; {versions}"


def _short(commit: str) -> str:
    digits, *dirty = commit.split("-")
    return "-".join([digits[:12], *dirty])


def _ratio(by_name: dict[str, dict], name: str, base: str) -> str:
    top, bottom = (by_name.get(key, {}).get("tflops") for key in (name, base))
    return cell(top / bottom if top and bottom else None, ".2f")


def _largest_rung_error(by_name: dict[str, dict]) -> str:
    errors = [record["error"] for record in by_name.values() if record["kind"] == "rung" and "error" in record]
    return cell(max(errors, default=None), ".1e")
