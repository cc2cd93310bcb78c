"""What the tables of the documents say: one function a table, from results files to markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cute_fa.ladder import LADDER, Rung
from perf import results
from perf.cases import LIMITS, Case
from perf.claims import CLAIMS, Evidence
from perf.counters import COUNTERS, REST, STALL_MEANINGS, named_stalls
from perf.features import FEATURES, PEERS, SOURCES
from perf.inspect_table import DEFAULT_ARCHS
from perf.output import cell, markdown_table
from perf.profile_table import compared_rows, counter_rows, line_rows, sampled_rows, stall_rows

NOT_MEASURED = "_Not measured yet: `python -m perf all` on a GPU machine fills this in._"
NOT_COMPILED = "_Not compiled yet: `python -m perf all` fills this in; it needs no GPU for this one._"
FLASH, FLASH_4 = "sdpa_flash", "flash_attn_4"
BEST_MMA_SYNC = next(rung for rung in reversed(LADDER) if rung.min_arch == (8, 0) and rung.max_rows is None)
LADDER_CASE = {"D": 128, "S_q": 4096, "S_k": 4096, "causal": False}
CASE_KEYS = ("S_q", "S_k", "causal")
_LIMIT_COUNTERS = [
    counter for counter in COUNTERS if counter.key in ("us", "tensor_share", "issue_share", "exp_share", "memory_share")
]


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
        peers = list(dict.fromkeys(record["name"] for record in records if record["kind"] == "peer"))
        best = next((record["name"] for record in records if record.get("auto")), LADDER[-1].name)
        # Of the rungs the first two, and the best of all and of those that any card runs.
        names = list(dict.fromkeys([LADDER[0].name, LADDER[1].name, BEST_MMA_SYNC.name, best, *peers]))
        cases: dict[tuple, dict] = {}
        for record in records:
            cases.setdefault(tuple(record[key] for key in CASE_KEYS), {})[record["name"]] = record
        ceilings = {r["name"]: r["tflops"] for r in document["records"] if r["kind"] == "ceiling"}
        rows, ratios = [], []
        for (seqlen_q, seqlen_k, causal), by_name in cases.items():
            tflops = {name: record["tflops"] for name, record in by_name.items() if "tflops" in record}
            ratios.append([
                _quotient(tflops.get(LADDER[1].name), tflops.get(LADDER[0].name)),
                _quotient(tflops.get(BEST_MMA_SYNC.name), tflops.get(FLASH)),
                _quotient(tflops.get(BEST_MMA_SYNC.name), ceilings.get("mma_sync")),
                _quotient(tflops.get(best), _largest(tflops, peers)),
                _quotient(*(by_name.get(name, {}).get("rms_error") for name in (best, FLASH_4))),
            ])  # fmt: skip
            rows.append([
                str(seqlen_q) if seqlen_q == seqlen_k else f"{seqlen_q}x{seqlen_k}",
                "causal" if causal else "full",
                *(cell(tflops.get(name), ".1f") for name in names),
                *(cell(ratio, ".2f") for ratio in ratios[-1]),
                _largest_rung_error(by_name),
                cell(by_name.get(FLASH, {}).get("error"), ".1e"),
            ])  # fmt: skip
        means = [_geometric_mean(column) for column in zip(*ratios, strict=True)]
        rows.append(["mean", "geometric", *[""] * len(names), *(cell(mean, ".2f") for mean in means), "", ""])
        headers = ["S", "mask", *names, f"{LADDER[1].name} / {LADDER[0].name}"]
        headers += [f"{BEST_MMA_SYNC.name} / {other}" for other in (FLASH, "mma_sync")]
        headers += [f"{best} / best peer", f"{best} / {FLASH_4}, rms error", "rungs' error", "SDPA's error"]
        first = records[0]
        ceiling = "".join(f"; {name} in the same run: {value:.0f} TFLOP/s" for name, value in ceilings.items())
        case = f"TFLOP/s, {first['dtype']}, D={first['D']}, H={first['H']}, B·S={first['B'] * first['S_k']}"
        blocks.append(f"{_caption(document)}; {case}{ceiling}.\n\n{markdown_table(headers, rows, text_columns=2)}")
    return "\n\n".join(blocks) or NOT_MEASURED


def decode_table() -> str:
    """Decoding: TB/s of K and V, read once, of the rung that "auto" takes and its peers."""
    blocks = []
    for document in _documents("timing_decode"):
        records = [record for record in document["records"] if record["kind"] != "ceiling"]
        peers = list(dict.fromkeys(record["name"] for record in records if record["kind"] == "peer"))
        best = next((record["name"] for record in records if record.get("auto")), LADDER[-1].name)
        sdpa = [name for name in peers if name.startswith("sdpa")]
        cases: dict[tuple, dict] = {}
        for record in records:
            cases.setdefault((record["B"], record["S_k"]), {})[record["name"]] = record
        rows, ratios = [], []
        for (batch, seqlen_k), by_name in cases.items():
            rates = {name: record["kv_tbps"] for name, record in by_name.items() if "kv_tbps" in record}
            ratios.append([_quotient(rates.get(best), _largest(rates, names)) for names in (sdpa, peers)])
            rows.append([
                str(batch),
                str(seqlen_k),
                *(cell(rates.get(name), ".2f") for name in (best, *peers)),
                *(cell(ratio, ".2f") for ratio in ratios[-1]),
            ])  # fmt: skip
        means = [_geometric_mean(column) for column in zip(*ratios, strict=True)]
        rows.append(["mean", "geometric", *[""] * (1 + len(peers)), *(cell(mean, ".2f") for mean in means)])
        first = records[0]
        case = (
            f"TB/s of K and V, S_q=1, H={first['H']}, H_kv={first['H_kv']}, D={first['D']}, {first['dtype']}, cold L2"
        )
        headers = ["B", "S_k", best, *peers, f"{best} / best SDPA", f"{best} / best peer"]
        table = markdown_table(headers, rows, text_columns=2)
        blocks.append(f"{_caption(document)}; {case}.\n\n{table}")
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


def counters_table(what: str = "profile") -> str:
    """The counters of a profile, a counter a row and a kernel a column, each with its meaning."""
    blocks = []
    for document in _documents(what):
        profiled = _profiled(document)
        headers, rows = counter_rows(profiled)
        meanings = {counter.label: counter.meaning for counter in COUNTERS}
        rows = [[*row, meanings[row[0]]] for row in rows]
        align = ["left"] + ["right"] * (len(headers) - 1) + ["left"]
        blocks.append(_block(document, [*headers, "what it is"], rows, align=align))
    return "\n\n".join(blocks) or NOT_MEASURED


def limits_table() -> str:
    """What is busy where a rung is held up, of it and its peers, and why warps stalled most."""
    blocks = []
    for name in LIMITS:
        for document in _documents(f"limit_{name}"):
            profiled = [record for record in _profiled(document) if "us" in record]
            rows = []
            for record in profiled:
                stalls = {reason: share for reason, share in named_stalls(record["stalls"]).items() if reason != REST}
                reason = max(stalls, key=stalls.get)
                shares = [cell(record.get(counter.key), counter.form) for counter in _LIMIT_COUNTERS]
                rows.append([record["name"], *shares, f"{reason} {stalls[reason]:.0%}"])
            headers = ["", *(counter.label for counter in _LIMIT_COUNTERS), "first stall"]
            blocks.append(_block(document, headers, rows))
    return "\n\n".join(blocks) or NOT_MEASURED


def stalls_table() -> str:
    """Shares of the reasons for which warps stalled, of all that were profiled, with the change between rungs."""
    blocks = []
    for document in _documents("profile"):
        headers, rows = stall_rows(_profiled(document))
        blocks.append(_block(document, headers, rows, "; shares of all stalls, changes in percentage points"))
    return "\n\n".join(blocks) or NOT_MEASURED


def swizzle_stalls_table() -> str:
    """The stalls of the first two rungs, the change, and those of the reference: the table of the course."""
    blocks = []
    for document in _documents("profile"):
        by_name = {record["name"]: named_stalls(record["stalls"]) for record in _profiled(document)}
        before, after = (by_name.get(rung.name) for rung in LADDER[:2])
        if before is None or after is None:
            continue
        reference = by_name.get(FLASH, {})
        rows = [
            [
                reason,
                f"{before[reason]:.2%}",
                f"{after[reason]:.2%}",
                f"{100 * (after[reason] - before[reason]):+.2f}",
                cell(reference.get(reason), ".2%"),
            ]
            for reason in before
        ]
        headers = ["stall", LADDER[0].name, LADDER[1].name, "change, points", FLASH]
        blocks.append(_block(document, headers, rows, "; shares of all stalls"))
    return "\n\n".join(blocks) or NOT_MEASURED


def stall_meanings_table() -> str:
    """What each reason means."""
    return markdown_table(["stall", "a warp"], [[name, text] for name, text in STALL_MEANINGS.items()], text_columns=2)


def predicted_table(rungs: Sequence[Rung] = LADDER) -> str:
    """Wavefronts of some rungs, predicted and counted, at full size."""
    names = [rung.name for rung in rungs]
    blocks = []
    for document in _documents("profile"):
        compared = [record for record in document["records"] if "counter" in record and record["name"] in names]
        headers, rows = compared_rows(compared)
        blocks.append(_block(document, headers, rows, text_columns=2))
    return "\n\n".join(blocks) or NOT_MEASURED


def lines_table() -> str:
    """The source lines of each rung that cost most wavefronts."""
    blocks = []
    for document in _documents("profile"):
        headers, rows = line_rows([record for record in document["records"] if "instruction" in record])
        blocks.append(_block(document, headers, rows, text_columns=3))
    return "\n\n".join(blocks) or NOT_MEASURED


def sampled_lines_table() -> str:
    """The source lines of each rung at which most warps were found stalled, with their code."""
    blocks = []
    for document in _documents("profile"):
        headers, rows = sampled_rows(document["records"])
        code = {record["source"]: record["code"] for record in document["records"] if "samples" in record}
        rows = [[*row, f"`{code[row[1]]}`".replace("|", r"\|")] for row in rows]
        align = ["left", "left", "right", "right", "right", "right", "left"]
        blocks.append(_block(document, [*headers, "code"], rows, align=align))
    return "\n\n".join(blocks) or NOT_MEASURED


def experiments_table(experiment: str) -> str:
    """All variants of an experiment: ways, wavefronts, times."""
    blocks = []
    for document in _documents("experiments"):
        rows = []
        for record in document["records"]:
            if record["experiment"] != experiment:
                continue
            loads, stores = ([record[op].get(key) for key in ("predicted", "measured")] for op in ("ld", "st"))
            rows.append([
                record["dtype"],
                str(record["size"]),
                record["variant"],
                cell(record.get("ways")),
                *(cell(value, ",") if "ways" in record else "" for value in (*loads, *stores)),
                cell(1e3 * record["ms"], ",.2f"),
                cell(record["gbps"], ",.0f"),
                cell(record.get("share_of_copy"), ".2f"),
            ])  # fmt: skip
        headers = ["dtype", "size", "variant", "ways", "ld predicted", "ld counted", "st predicted", "st counted"]
        headers += ["µs", "GB/s", "of the copy's"]
        blocks.append(_block(document, headers, rows, text_columns=3))
    return "\n\n".join(blocks) or NOT_MEASURED


def claims_table() -> str:
    """The claims of the two texts, judged by the results of each device."""
    blocks = []
    for evidence in Evidence.all():
        rows = [[claim.text, claim.claim, claim.there, *claim.judged(evidence)] for claim in CLAIMS]
        table = markdown_table(["text", "claim", "there", "here", "verdict"], rows, text_columns=5)
        blocks.append(f"{evidence.device}.\n\n{table}")
    return "\n\n".join(blocks) or NOT_MEASURED


def _profiled(document: dict) -> list[dict]:
    return [record for record in document["records"] if "kernels" in record]


def _block(document: dict, headers: list[str], rows: list[list[str]], more: str = "", **options) -> str:
    """A table under the line that says where and when its figures were measured, and of which problem."""
    first = document["records"][0]
    case = f"; {Case(**{key: first[key] for key in Case.__dataclass_fields__})}" if "S_q" in first else ""
    return f"{_caption(document)}{case}{more}.\n\n{markdown_table(headers, rows, **options)}"


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
    "timing_fp16_d64": lambda: timing_table("timing_fp16_d64"),
    "timing_bf16_d256": lambda: timing_table("timing_bf16_d256"),
    "timing_fp16_d256": lambda: timing_table("timing_fp16_d256"),
    "timing_gqa": lambda: timing_table("timing_gqa"),
    "decode": decode_table,
    "resources": resources_table,
    "host": host_table,
    "tests": tests_table,
    "banks": banks_table,
    "emulation": emulation_table,
    "emulation_time": emulation_time_table,
    "counters": counters_table,
    "hopper_layouts": lambda: counters_table("hopper_layouts"),
    "limits": limits_table,
    "stalls": stalls_table,
    "stall_meanings": stall_meanings_table,
    "predicted": predicted_table,
    "swizzle_stalls": swizzle_stalls_table,
    "swizzle_predicted": lambda: predicted_table(LADDER[:2]),
    "lines": lines_table,
    "sampled_lines": sampled_lines_table,
    "transposes": lambda: experiments_table("transpose"),
    "softmax": lambda: experiments_table("softmax"),
    "reads": lambda: experiments_table("reads"),
    "claims": claims_table,
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


def _quotient(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top and bottom else None


def _largest(figures: dict[str, float], names: Sequence[str]) -> float | None:
    return max((figures[name] for name in names if name in figures), default=None)


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def _ratio(by_name: dict[str, dict], name: str, base: str) -> str:
    top, bottom = (by_name.get(key, {}).get("tflops") for key in (name, base))
    return cell(top / bottom if top and bottom else None, ".2f")


def _largest_rung_error(by_name: dict[str, dict]) -> str:
    errors = [record["error"] for record in by_name.values() if record["kind"] == "rung" and "error" in record]
    return cell(max(errors, default=None), ".1e")
