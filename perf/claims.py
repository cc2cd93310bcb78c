"""The claims of the two texts that the project follows, each judged by figures of results files.

The texts: chapter 4 of a FlashAttention-2 course (kernel 1 becomes kernel 2 by swizzling, RTX 3090), and a note
on bank conflicts of shared memory (definition, formula, remedies, a transpose to build).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cute_fa.ladder import LADDER
from perf import results
from perf.counters import named_stalls

COURSE, NOTE = "course", "note"
HOLDS, MORE, IN_PART, FAILS = "holds", "more than claimed", "holds in part", "does not hold"
UNKNOWN = "not measured"
CLOSE = 0.1  # two times, rates or shares that differ by less are called equal
_CONFLICTING, _SWIZZLED = LADDER[0].name, LADDER[1].name
_LADDER_CASE = {"D": 128, "S_q": 4096, "S_k": 4096, "causal": False}


class Missing(Exception):
    """No results file has the figures that a claim is judged by."""


@dataclass(frozen=True)
class Evidence:
    """The records of one device, by results file."""

    device: str
    records: dict[str, list[dict]]

    @staticmethod
    def all() -> list[Evidence]:
        """Every device that has results."""
        found = []
        for folder in sorted(path for path in results.RESULTS.glob("*") if path.name != results.COMPILED):
            documents = {path.stem: results.read_results(path) for path in sorted(folder.glob("*.json"))}
            if documents:
                device = next(iter(documents.values()))["device"]
                found.append(Evidence(device, {what: document["records"] for what, document in documents.items()}))
        return found

    def find(self, what: str, **keys) -> list[dict]:
        """The records of a file that have these values.

        Raises:
            Missing: there is none.
        """
        found = [record for record in self.records.get(what, ()) if keys.items() <= record.items()]
        if not found:
            raise Missing(f"{what}.json has no record with {keys}" if what in self.records else f"no {what}.json")
        return found

    def one(self, what: str, **keys) -> dict:
        """The first of them."""
        return self.find(what, **keys)[0]

    def value(self, key: str, what: str, **keys) -> float:
        """A number of the first of them; raises Missing where it has none."""
        record = self.one(what, **keys)
        if key not in record:
            raise Missing(f"{what}: {record['name']} has no {key}")
        return record[key]

    def stall(self, name: str, reason: str) -> float:
        """Share of a reason among all stalls."""
        return named_stalls(self.value("stalls", "profile", name=name))[reason]

    def ways(self, name: str, path: str) -> float:
        """Measured over ideal wavefronts of a rung's path."""
        record = self.one("profile", name=name, path=path)
        if "wavefronts" not in record:
            raise Missing(f"the wavefronts of {name} were not counted")
        return record["wavefronts"] / record["ideal"]

    def variant(self, experiment: str, variant: str, dtype: str = "fp32", size: int | None = None) -> dict:
        """A variant of an experiment, timed; the largest size unless one is given."""
        keys = {"experiment": experiment, "variant": variant, "dtype": dtype} | ({"size": size} if size else {})
        record = max(self.find("experiments", **keys), key=lambda record: record["size"])
        if "ms" not in record:
            raise Missing(f"{experiment} {variant} was not timed")
        return record


Judgement = tuple[str, str]  # what was found here, and the verdict


@dataclass(frozen=True)
class Claim:
    """One claim.

    Args:
        text: where it stands.
        claim: what it says.
        there: its figure there.
        judge: figures here and verdict; raises Missing.
    """

    text: str
    claim: str
    there: str
    judge: Callable[[Evidence], Judgement]

    def judged(self, evidence: Evidence) -> Judgement:
        """As ``judge``; "not measured" where figures are missing."""
        try:
            return self.judge(evidence)
        except Missing:
            return "-", UNKNOWN


def _verdict(parts: Iterable[bool]) -> str:
    parts = list(parts)
    return HOLDS if all(parts) else IN_PART if any(parts) else FAILS


def _equal(a: float, b: float) -> bool:
    return abs(a / b - 1) <= CLOSE


# --- the course --------------------------------------------------------------------------------------------


def _twice_as_fast(evidence: Evidence) -> Judgement:
    slow, fast = (
        evidence.value("tflops", "timing_bf16", name=name, **_LADDER_CASE) for name in (_CONFLICTING, _SWIZZLED)
    )
    verdict = MORE if fast / slow > 2 * (1 + CLOSE) else _verdict([fast / slow > 2 * (1 - CLOSE)])
    return f"{slow:.1f} → {fast:.1f} TFLOP/s, {fast / slow:.2f}x", verdict


def _near_the_reference(evidence: Evidence) -> Judgement:
    ours, flash = (
        evidence.value("tflops", "timing_bf16", name=name, **_LADDER_CASE) for name in (_SWIZZLED, "sdpa_flash")
    )
    return f"{ours / flash:.1%} of PyTorch's FlashAttention-2", _verdict([ours / flash > 0.9])


def _eight_ways(evidence: Evidence) -> Judgement:
    ways = {path: evidence.ways(_CONFLICTING, path) for path in ("ldmatrix + ldmatrix.trans", "st.shared")}
    found = ", ".join(f"{path}: {value:.2f}-way" for path, value in ways.items())
    return found, _verdict(value == 8 for value in ways.values())


def _copies_are_free(evidence: Evidence) -> Judgement:
    ways = {path: evidence.ways(_CONFLICTING, path) for path in ("cp.async", "ld.shared")}
    found = ", ".join(f"{path}: {value:.3f}-way" for path, value in ways.items())
    return found, _verdict(abs(value - 1) < 1e-2 for value in ways.values())


def _conflicts_are_gone(evidence: Evidence) -> Judgement:
    paths = ("ldmatrix + ldmatrix.trans", "st.shared")
    before, after = (
        sum(evidence.value("wavefronts", "profile", name=name, path=path) for path in paths)
        for name in (_CONFLICTING, _SWIZZLED)
    )
    ways = [evidence.ways(_SWIZZLED, path) for path in paths]
    return f"{before:,} → {after:,} wavefronts of ldmatrix and stores", _verdict(value == 1 for value in ways)


def _smem_is_busy(evidence: Evidence) -> Judgement:
    ours, cured = (evidence.value("smem_share", "profile", name=name) for name in (_CONFLICTING, _SWIZZLED))
    found = f"{ours:.1%}, and {cured:.1%} without conflicts"
    return found, _verdict([_equal(ours, 0.9364), ours > cured])


def _math_pipe(evidence: Evidence) -> Judgement:
    ours = evidence.stall(_CONFLICTING, "math_pipe_throttle")
    return f"{ours:.2%}", _verdict([_equal(ours, 0.1188)])


def _stall(reason: str, before: float, after: float) -> Callable[[Evidence], Judgement]:
    """Of a share that changes from ``before`` to ``after`` there: does it change as far here, in points?

    One that falls as far, but to more than twice what is left there, is said to leave more.
    """

    def judge(evidence: Evidence) -> Judgement:
        ours = [evidence.stall(name, reason) for name in (_CONFLICTING, _SWIZZLED)]
        direction = 1 if after > before else -1
        change = direction * (ours[1] - ours[0])
        found = f"{ours[0]:.2%} → {ours[1]:.2%} ({100 * (ours[1] - ours[0]):+.2f} points)"
        if change <= 0:
            return found, FAILS
        if change < abs(after - before):
            return found, f"{IN_PART}: less far"
        return found, f"{HOLDS}, but more is left" if direction < 0 and ours[1] > 2 * after else HOLDS

    return judge


# --- the note ----------------------------------------------------------------------------------------------


def _words_and_banks(evidence: Evidence) -> Judgement:
    records = evidence.find("bank_table")
    equal = sum(record["predicted"] == record["measured"] for record in records)
    return f"{equal} of {len(records)} measured accesses take exactly the wavefronts of the model", _verdict(
        [equal == len(records)]
    )


def _broadcast(evidence: Evidence) -> Judgement:
    records = [record for record in evidence.find("bank_table") if "broadcast" in record["path"]]
    if not records:
        raise Missing("no broadcast")
    free = sum(record["measured"] == record["ideal"] for record in records)
    return f"{free} of {len(records)} widths without a conflict", _verdict([free == len(records)])


_READS = ("plain_4B", "plain_16B", "padded_1_4B", "padded_4_4B", "padded_4_16B", "xor_vectors_4B", "xor_vectors_16B")


def _peak_over_degree(evidence: Evidence) -> Judgement:
    records = [evidence.variant("reads", variant) for variant in _READS]
    peak = max(record["gbps"] for record in records if record["ways"] == 1)
    shares = {record["variant"]: record["gbps"] * record["ways"] / peak for record in records}
    found = ", ".join(f"{r['ways']}-way {r['gbps'] / peak:.3f} of the peak" for r in records if r["ways"] > 1)
    return found, _verdict(_equal(share, 1) for share in shares.values())


def _thirty_two_times(evidence: Evidence) -> Judgement:
    slow, fast = (evidence.variant("reads", variant)["ms"] for variant in ("plain_4B", "padded_1_4B"))
    return f"{slow / fast:.1f}x slower", _verdict([_equal(slow / fast, 32)])


def _padding_equals_swizzling(evidence: Evidence) -> Judgement:
    found, equal = [], []
    for experiment, dtype in (("transpose", "fp32"), ("transpose", "bf16"), ("softmax", "fp32")):
        padded, swizzled = (evidence.variant(experiment, variant, dtype) for variant in ("padded", "swizzled"))
        ratio = padded["ms"] / swizzled["ms"]
        found.append(f"{experiment} {dtype}: {padded['ways']}- and {swizzled['ways']}-way, times 1 : {ratio:.2f}")
        equal.append(_equal(ratio, 1) and padded["ways"] == swizzled["ways"])
    return "; ".join(found), _verdict(equal)


def _shuffles_need_no_smem(evidence: Evidence) -> Judgement:
    records = [evidence.variant(name, "shuffle") for name in ("transpose", "softmax")]
    counts = [record[op].get("measured") for record in records for op in ("ld", "st")]
    if None in counts:
        raise Missing("shuffles were not counted")
    return f"{sum(counts)} wavefronts of loads and stores", _verdict([sum(counts) == 0])


def _shuffles_are_fastest(evidence: Evidence) -> Judgement:
    found, fastest = [], []
    for shuffle in evidence.find("experiments", variant="shuffle"):
        name, dtype, size = (shuffle[key] for key in ("experiment", "dtype", "size"))
        best = min(evidence.variant(name, variant, dtype, size)["ms"] for variant in ("padded", "swizzled"))
        found.append(f"{name} {dtype} {size}: {best / shuffle['ms']:.2f}x")
        fastest.append(shuffle["ms"] <= best)
    return f"speed over the best through shared memory: {', '.join(found)}", _verdict(fastest)


def _softmax_conflicts(evidence: Evidence) -> Judgement:
    conflicting, padded = (evidence.variant("softmax", variant) for variant in ("conflicting", "padded"))
    found = (
        f"{conflicting['ways']}-way down rows of 128, {conflicting['ms'] / padded['ms']:.2f}x the time of padded ones"
    )
    return found, _verdict([conflicting["ways"] > 1 and conflicting["ms"] > padded["ms"]])


def _faster_transpose(evidence: Evidence) -> Judgement:
    sizes = sorted({record["size"] for record in evidence.find("experiments", experiment="transpose", dtype="fp32")})
    ratios = {
        size: evidence.variant("transpose", "conflicting", "fp32", size)["ms"]
        / evidence.variant("transpose", "padded", "fp32", size)["ms"]
        for size in sizes
    }
    found = ", ".join(f"{size}x{size}: {ratio:.2f}x" for size, ratio in ratios.items())
    if all(ratio > 2 for ratio in ratios.values()):
        return found, MORE
    return found, _verdict(ratio >= 1.5 for ratio in ratios.values())


def _no_conflicts_left(evidence: Evidence) -> Judgement:
    records = [
        evidence.variant("transpose", variant, "fp32", 1024) for variant in ("conflicting", "padded", "swizzled")
    ]
    if any("measured" not in record["ld"] for record in records):
        raise Missing("transposes were not counted")
    beyond = {record["variant"]: record["ld"]["measured"] - record["ld"]["ideal"] for record in records}
    found = ", ".join(f"{variant}: {count:,}" for variant, count in beyond.items())
    return found, _verdict([beyond["padded"] == beyond["swizzled"] == 0 < beyond["conflicting"]])


def _vectors_do_not_cure(evidence: Evidence) -> Judgement:
    scalar, vector = (evidence.variant("reads", variant) for variant in ("plain_4B", "plain_16B"))
    found = f"{scalar['ways']}-way → {vector['ways']}-way, {scalar['ms'] / vector['ms']:.2f}x as fast"
    return found, _verdict([vector["ways"] > 1, vector["ms"] < scalar["ms"]])


def _gain_on_attention(evidence: Evidence) -> Judgement:
    cases: dict[tuple, dict[str, float]] = {}
    for what in ("timing_bf16", "timing_bf16_d64"):
        for record in evidence.find(what, kind="rung"):
            if "tflops" in record:
                key = tuple(record[k] for k in ("D", "S_q", "S_k", "causal"))
                cases.setdefault(key, {})[record["name"]] = record["tflops"]
    gains = [c[_SWIZZLED] / c[_CONFLICTING] - 1 for c in cases.values() if {_SWIZZLED, _CONFLICTING} <= c.keys()]
    if not gains:
        raise Missing("the two rungs were not timed")
    found = f"{min(gains):.0%} to {max(gains):.0%} more TFLOP/s in {len(gains)} cases"
    return found, MORE if min(gains) > 0.3 else _verdict([min(gains) >= 0.2])


CLAIMS: tuple[Claim, ...] = (
    Claim(COURSE, "Swizzling doubles kernel 1's speed", "33.28 → 66.12 TFLOP/s, 1.99x (RTX 3090)", _twice_as_fast),
    Claim(COURSE, "Kernel 2 comes close to the reference", "66.12 of 67.3 TFLOP/s, 98 %", _near_the_reference),
    Claim(COURSE, "Kernel 1's ldmatrix and stores of O conflict 8-way", "8-way", _eight_ways),
    Claim(COURSE, "Between global and shared memory nothing conflicts", "no conflict", _copies_are_free),
    Claim(COURSE, "Under the swizzle no conflict is left", "about none", _conflicts_are_gone),
    Claim(COURSE, "Conflicts keep shared memory busy in kernel 1", "93.64 %", _smem_is_busy),
    Claim(
        COURSE,
        "short_scoreboard falls",
        "56.37 % → 1.49 % (-54.88 points)",
        _stall("short_scoreboard", 0.5637, 0.0149),
    ),
    Claim(COURSE, "mio_throttle falls", "11.66 % → 0.74 % (-10.92 points)", _stall("mio_throttle", 0.1166, 0.0074)),
    Claim(
        COURSE,
        "long_scoreboard grows: global memory is next",
        "6.31 % → 15.15 % (+8.84 points)",
        _stall("long_scoreboard", 0.0631, 0.1515),
    ),
    Claim(COURSE, "math_pipe_throttle is kernel 1's second stall", "11.88 %", _math_pipe),
    Claim(NOTE, "32 banks of 4 bytes, a word each a cycle", "definition", _words_and_banks),
    Claim(NOTE, "Reading one address is a broadcast, no conflict", "no conflict", _broadcast),
    Claim(NOTE, "Effective bandwidth = peak / conflict degree", "formula", _peak_over_degree),
    Claim(NOTE, "All lanes in one bank are 32 times slower", "32x", _thirty_two_times),
    Claim(NOTE, "Softmax through shared memory conflicts in long rows", "may conflict", _softmax_conflicts),
    Claim(NOTE, "Padding and swizzling do the same", "both free of conflicts", _padding_equals_swizzling),
    Claim(NOTE, "Shuffles need no shared memory", "none", _shuffles_need_no_smem),
    Claim(NOTE, "Shuffles are the fastest", "highest speed", _shuffles_are_fastest),
    Claim(NOTE, "A transpose without conflicts is faster", "1.5 to 2 times", _faster_transpose),
    Claim(NOTE, "ncu counts no conflict in it", "0 conflicts", _no_conflicts_left),
    Claim(NOTE, "16-byte loads take fewer accesses, but don't cure conflicts", "fewer conflicts", _vectors_do_not_cure),
    Claim(NOTE, "Without conflicts attention is faster", "20 to 30 %", _gain_on_attention),
)
