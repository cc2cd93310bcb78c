"""The figures of ``python -m perf plots``, each from the records of one device. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from layouts.draw import save  # the first import: it says how to get matplotlib, and chooses its back end

# isort: split
import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from cute_fa.ladder import LADDER
from perf.claims import Evidence, Missing
from perf.counters import REST, named_stalls
from perf.experiments.base import REMEDIES

_RUNG_COLOURS = ("#c62f2f", "#2f8f4e", "#2b6cb0", "#b7791f", "#6b46c1", "#0f766e", "#9d174d", "#334155")
_PEER_COLOURS = {"sdpa_flash": "#8a8f98", "sdpa_cudnn": "#5b616b", "flash_attn_4": "#22262b"}
_STALL_COLOURS = {
    "short_scoreboard": "#c62f2f",
    "mio_throttle": "#e8825a",
    "math_pipe_throttle": "#2f8f4e",
    "long_scoreboard": "#2b6cb0",
    "barrier": "#b7791f",
    "wait": "#8fb6d9",
    "gmma": "#6b46c1",
    REST: "#d3d6da",
}
_LIGHT = ("wait", REST)  # take dark figures
_LADDER_CASE = {"D": 128, "S_q": 4096, "S_k": 4096, "causal": False}


def write(figure: Figure, path: Path) -> None:
    """Saves a figure; the same figure gives the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "cute_fa", "svg.fonttype": "none"}):
        save(figure, path)


def _figure(width: float, height: float, columns: int = 1):
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#eceef1", zorder=0)
        one.set_axisbelow(True)
    return figure, axes


def _colour(name: str) -> str:
    names = [rung.name for rung in LADDER]
    if name in names:
        return _RUNG_COLOURS[names.index(name) % len(_RUNG_COLOURS)]
    return _PEER_COLOURS.get(name, "#5b616b")


def tflops_by_rung(evidence: Evidence) -> Figure:
    """A bar for each rung, and for each peer, at D=128 and S=4096."""
    records = [record for record in evidence.find("timing_bf16", **_LADDER_CASE) if "tflops" in record]
    if not records:
        raise Missing("nothing was timed")
    figure, (axes,) = _figure(1.6 + 0.95 * len(records), 3.4)
    bars = axes.bar(
        [record["name"].replace("_", "\n", 1) for record in records],
        [record["tflops"] for record in records],
        color=[_colour(record["name"]) for record in records],
        width=0.65,
    )
    axes.bar_label(bars, fmt="%.0f", padding=2)
    axes.set_ylabel("TFLOP/s")
    case = records[0]
    axes.set_title(f"{evidence.device}: attention forward, bf16, D={case['D']}, S={case['S_k']}", fontsize=10)
    return figure


def tflops_by_length(evidence: Evidence) -> Figure:
    """A line for each rung and peer over the length of the sequence, full and causal."""
    figure, both = _figure(10, 3.8, columns=2)
    for axes, causal in zip(both, (False, True), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for record in evidence.find("timing_bf16", D=128, causal=causal):
            if "tflops" in record and record["S_q"] == record["S_k"]:
                lines.setdefault(record["name"], []).append((record["S_k"], record["tflops"]))
        for name, points in lines.items():
            is_rung = name not in _PEER_COLOURS
            style = {"linestyle": "-" if is_rung else "--", "linewidth": 2 if is_rung else 1.2}
            axes.plot(*zip(*sorted(points), strict=True), marker="o", ms=4, color=_colour(name), label=name, **style)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("length of the sequence")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{evidence.device}: {'causal' if causal else 'full'}, bf16, D=128", fontsize=10)
    both[0].set_ylabel("TFLOP/s")
    both[1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def stalls(evidence: Evidence) -> Figure:
    """Why warps stalled: a stacked bar for each rung and peer."""
    records = [record for record in evidence.find("profile") if "stalls" in record]
    if not records:
        raise Missing("nothing was profiled")
    figure, (axes,) = _figure(8.5, 1.4 + 0.42 * len(records))
    names = [record["name"] for record in records]
    left = [0.0] * len(records)
    for reason, colour in _STALL_COLOURS.items():
        shares = [100 * named_stalls(record["stalls"])[reason] for record in records]
        axes.barh(names, shares, left=left, color=colour, label=reason, height=0.7)
        for row, (share, start) in enumerate(zip(shares, left, strict=True)):
            if share >= 5:
                ink = "#22262b" if reason in _LIGHT else "white"
                axes.text(start + share / 2, row, f"{share:.0f}", ha="center", va="center", color=ink, fontsize=8)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of all stalls")
    axes.grid(visible=False)
    axes.legend(ncols=4, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.02))
    axes.set_title(f"{evidence.device}: why warps wait", fontsize=10, pad=42)
    return figure


def predicted_and_measured(evidence: Evidence) -> Figure:
    """Each measured access, kernel and experiment as a point: predicted wavefronts across, counted ones up."""
    groups = {
        "single accesses": [(r["predicted"], r["measured"]) for r in evidence.records.get("bank_table", ())],
        "rungs": [
            (record["predicted"], record["wavefronts"])
            for what in ("emulation", "profile")
            for record in evidence.records.get(what, ())
            if "wavefronts" in record and "predicted" in record
        ],
        "experiments": [
            (record[op]["predicted"], record[op]["measured"])
            for record in evidence.records.get("experiments", ())
            for op in ("ld", "st")
            if "measured" in record[op]
        ],
    }
    groups = {name: [point for point in points if min(point) > 0] for name, points in groups.items()}
    points = [point for group in groups.values() for point in group]
    if not points:
        raise Missing("nothing was counted")
    figure, (axes,) = _figure(4.8, 4.4)
    ends = min(map(min, points)) / 2, max(map(max, points)) * 2
    axes.plot(ends, ends, color="#8a8f98", linewidth=1, label="equal")
    for (name, group), marker, colour in zip(groups.items(), "os^", ("#2b6cb0", "#2f8f4e", "#c62f2f"), strict=True):
        if group:
            across, up = zip(*group, strict=True)
            exact = sum(a == b for a, b in group)
            axes.scatter(
                across, up, marker=marker, s=22, alpha=0.7, color=colour, label=f"{name}: {exact} of {len(group)} equal"
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted wavefronts")
    axes.set_ylabel("counted by ncu")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"{evidence.device}: shared memory", fontsize=10)
    return figure


def remedies(evidence: Evidence) -> Figure:
    """Transposes and softmax by remedy, as share of a copy's speed."""
    sets: dict[str, dict[str, float]] = {}
    for record in evidence.find("experiments"):
        if "share_of_copy" in record:
            key = f"{record['experiment']} {record['dtype']}\n{record['size']}"
            sets.setdefault(key, {})[record["variant"]] = 100 * record["share_of_copy"]
    if not sets:
        raise Missing("no experiment was timed beside a copy")
    figure, (axes,) = _figure(9, 3.4)
    width = 0.8 / len(REMEDIES)
    for number, (variant, colour) in enumerate(zip(REMEDIES, _RUNG_COLOURS, strict=False)):
        places = [place + (number - (len(REMEDIES) - 1) / 2) * width for place in range(len(sets))]
        heights = [variants.get(variant, 0.0) for variants in sets.values()]
        axes.bar_label(axes.bar(places, heights, width, color=colour, label=variant), fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(sets)), list(sets), fontsize=8)
    axes.set_ylabel("% of a copy's speed")
    axes.legend(ncols=4, frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.02))
    axes.set_title(f"{evidence.device}: conflicts and their remedies", fontsize=10, pad=26)
    return figure


FIGURES: dict[str, Callable[[Evidence], Figure]] = {
    "tflops_by_rung": tflops_by_rung,
    "tflops_by_length": tflops_by_length,
    "stalls": stalls,
    "predicted_and_measured": predicted_and_measured,
    "remedies": remedies,
}
