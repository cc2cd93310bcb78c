"""Random problems in many processes at once, each against float64: what no list of cases thought of.

Every process draws a few kinds of problems (what a kernel is compiled for) and many problems of each: lengths, batch,
heads, strides, magnitudes, values of options. A result must be within twice the error that rounding P costs, all else
exact, and one rounding more; a second call must give the same bits.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

import cute_fa
from cute_fa.arch import arch_of_capability
from cute_fa.emulator import DEFAULT_ARCH
from cute_fa.ladder import select
from cute_fa.problem import DTYPES, FP8, HEAD_DIMS, AttentionProblem, ScoreOptions, compute_dtype
from cute_fa.reference import attention_reference
from cute_fa.varlen import forward_varlen
from layouts.arguments import positive_int
from perf import results
from perf.output import add_output_arguments, emit, plain_table, progress, wants_tables

KINDS = 6  # of problems that a process draws: each is a compilation
GPU_DEFAULTS = {"problems": 1000, "processes": 10, "longest": 3000}
CPU_DEFAULTS = {"problems": 20, "processes": 1, "longest": 120}
RARE = 0.15  # how often an option is on
PLACES = ("slices", "packed", "cache", "pages")  # of the members of a batch; all but the first by forward_varlen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``python -m perf soak``."""
    for name, value in GPU_DEFAULTS.items():
        parser.add_argument(
            f"--{name}", type=positive_int, metavar="N", help=f"default: {value}, or without a GPU {CPU_DEFAULTS[name]}"
        )
    parser.add_argument("--seed", type=int, default=0, help="of the first process; default: 0")
    parser.add_argument(
        "--seconds", type=positive_int, default=600, metavar="N", help="end processes that take longer; default: 600"
    )
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """1 if a result was wrong or a process died; without a GPU the emulator runs a few problems."""
    has_gpu = torch.cuda.is_available()
    defaults = GPU_DEFAULTS if has_gpu else CPU_DEFAULTS
    problems, processes, longest = (getattr(args, name) or value for name, value in defaults.items())
    processes = min(processes, problems)
    counts = [problems // processes + (i < problems % processes) for i in range(processes)]
    records = run_all([(args.seed + i, count, longest) for i, count in enumerate(counts)], args.seconds)
    failures = [failure for record in records for failure in record["failures"]]
    if wants_tables(args):
        rows = [
            [r["name"], str(r["seed"]), str(r["problems"]), str(len(r["failures"])), f"{r['seconds']:.0f}",
             ", ".join(f"{name} {count}" for name, count in sorted(r["kernels"].items()))]
            for r in records
        ]  # fmt: skip
        print(plain_table(["", "seed", "problems", "wrong", "s", "kernels"], rows))
    for failure in failures:
        progress(f"WRONG: {failure}")
    if has_gpu:
        path = results.results_path(results.device_name(), "soak")
        emit(args, results.make_document(records, results.device_name(), not failures), path)
    else:
        progress("Emulated only: no CUDA device is visible to PyTorch.")
    return int(bool(failures))


def run_all(jobs: list[tuple[int, int, int]], seconds: float) -> list[dict]:
    """``soak`` of each job in a process of its own; one that dies or hangs is a failure, and nobody else's."""
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    running = []
    for job in jobs:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(there, *job))
        process.start()
        there.close()
        running.append((job, process, here))
    records = []
    for number, ((seed, count, _), process, here) in enumerate(running):
        found = {"problems": 0, "failures": [], "kernels": {}, "seconds": seconds}
        try:
            if here.poll(max(0.0, deadline - time.monotonic())):
                found = here.recv()
            else:
                found["failures"] = [f"{count} problems of seed {seed} took longer than {seconds} s: a hang?"]
        except EOFError:
            found["failures"] = [f"the process of seed {seed} died"]
        process.kill()
        process.join()
        records.append({"name": f"process {number}", "kind": "soak", "seed": seed, **found})
    return records


def _work(pipe, *job) -> None:
    pipe.send(soak(*job))


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for, and which options are given."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    causal: bool
    options: frozenset[str]
    place: str

    @staticmethod
    def draw(rng: random.Random) -> Kind:
        """The usual head dimensions often, each option rarely."""
        head_dim = rng.choice([64, 64, 128, 128, 256, rng.choice(HEAD_DIMS)])
        place = rng.choice(PLACES[1:]) if rng.random() < 2 * RARE else "slices"
        names = ["left", "right", "softcap", "alibi_slopes", "sinks"]
        names += ["attn_bias", "mask"] if place == "slices" else []
        options = {name for name in names if rng.random() < RARE}
        if "mask" in options:
            options.discard("attn_bias")
        return Kind(
            dtype=FP8 if rng.random() < RARE else rng.choice(DTYPES),
            head_dim=head_dim,
            head_dim_v=rng.choice(HEAD_DIMS) if rng.random() < RARE else head_dim,
            causal=rng.random() < 0.5,
            options=frozenset(options),
            place=place,
        )


@dataclass(frozen=True)
class Problem:
    """One call: a kind with extents and what else is drawn. ``lengths`` has (S_q, S_k) of each member."""

    kind: Kind
    lengths: tuple[tuple[int, int], ...]
    num_heads: int
    num_heads_kv: int
    magnitude: float
    softmax_scale: float | None
    strides: str
    descaled: bool
    seed: int

    @staticmethod
    def draw(kind: Kind, rng: random.Random, longest: int) -> Problem:
        """Short lengths as often as long ones. Packed members differ, those of a cache in their keys alone."""

        def length(least: int) -> int:
            return max(least, round(math.exp(rng.uniform(0, math.log(longest)))))

        batch = rng.choice([1, 1, 2, 3])
        pairs = tuple((length(1), length(1)) for _ in range(batch))
        if kind.place != "slices":
            pairs = tuple((rng.choice([0, s_q, s_q]), rng.choice([0, s_k, s_k])) for s_q, s_k in pairs)
            if kind.place != "packed":
                seqlen_q = rng.choice([1, 1, 4, pairs[0][0]])
                pairs = tuple((seqlen_q, seqlen_k) for _, seqlen_k in pairs)
        elif rng.random() < 0.5:
            pairs = ((pairs[0][0], pairs[0][0]),) * batch
        else:
            pairs = pairs[:1] * batch
        num_heads_kv = rng.choice([1, 2, 3])
        return Problem(
            kind, pairs, num_heads_kv * rng.choice([1, 1, 2, 4, 8]), num_heads_kv, rng.choice([0.1, 1.0, 1.0, 4.0]),
            rng.choice([None, None, 0.02, 0.3]), rng.choice(["plain", "heads first", "sliced"]),
            kind.dtype == FP8 and rng.random() < 0.7, rng.randrange(2**31),
        )  # fmt: skip

    def tensor(self, generator: torch.Generator, batch: int, rows: int, heads: int, head_dim: int) -> torch.Tensor:
        """Random normal (batch, rows, heads, head_dim) with the problem's strides."""
        shape = (batch, rows, heads, head_dim)
        if self.strides == "heads first":
            shape = (batch, heads, rows, head_dim)
        elif self.strides == "sliced":
            shape = (batch, rows, heads + 1, head_dim + 16)
        values = torch.randn(shape, generator=generator, device=generator.device) * self.magnitude
        values = (values * (20 if self.descaled else 1)).to(self.kind.dtype)
        if self.strides == "heads first":
            return values.transpose(1, 2)
        return values[:, :, 1:, 16:] if self.strides == "sliced" else values


@dataclass(frozen=True)
class Placement:
    """Where a problem's members lie.

    Args:
        shape_q, shape_k: (batch, rows) of the tensors of queries, and of keys and values.
        arguments: of ``forward_varlen``; None for ``cute_fa.forward``.
        queries: of each member, (first, end) in a batch of one; None if each has a slice.
        keys: takes (tensor, member) to that member's rows (1, S_k, heads, D).
    """

    shape_q: tuple[int, int]
    shape_k: tuple[int, int]
    arguments: dict | None
    queries: list[tuple[int, int]] | None
    keys: Callable[[torch.Tensor, int], torch.Tensor] | None

    @staticmethod
    def of(problem: Problem, device: torch.device) -> Placement:
        """Draws what the problem's kind leaves open."""
        lengths_q, lengths_k = map(list, zip(*problem.lengths, strict=True))
        batch, place, rng = len(lengths_q), problem.kind.place, random.Random(problem.seed)

        def integers(values) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        if place == "slices":
            return Placement((batch, lengths_q[0]), (batch, lengths_k[0]), None, None, None)
        longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
        if place == "packed":
            bounds_q, bounds_k = ([0, *accumulate(side)] for side in (lengths_q, lengths_k))
            packed = longest | {"cu_seqlens_q": integers(bounds_q), "cu_seqlens_k": integers(bounds_k)}
            both = (1, bounds_q[-1]), (1, bounds_k[-1])
            parts = list(pairwise(bounds_k))
            return Placement(*both, packed, list(pairwise(bounds_q)), lambda t, i: t[:, slice(*parts[i])])
        used = longest | {"seqused_k": integers(lengths_k)}
        if place == "cache":
            rows, num_slots = max(lengths_k) + rng.choice([0, 1, 50]), batch + rng.choice([0, 2])
            slots = rng.sample(range(num_slots), batch)
            starts = [rng.randint(0, length) if rng.random() < 0.5 else 0 for length in lengths_k]
            used |= {"cache_batch_idx": integers(slots), "leftpad_k": integers(starts)}
            spans = list(zip(slots, starts, lengths_k, strict=True))
            shape_k = (num_slots, rows)
            return Placement((batch, lengths_q[0]), shape_k, used, None, lambda t, i: _span(t, *spans[i]))
        page_size = rng.choice([1, 16, 64, 100])
        blocks = max(1, *(-(-length // page_size) for length in lengths_k))
        table = rng.sample(range(batch * blocks + 3), batch * blocks)
        table = [table[i * blocks : (i + 1) * blocks] for i in range(batch)]
        used |= {"block_table": integers(table)}
        return Placement(
            (batch, lengths_q[0]), (batch * blocks + 3, page_size), used, None,
            lambda t, i: t[table[i]].flatten(0, 1)[None, : lengths_k[i]],
        )  # fmt: skip


def _span(tensor: torch.Tensor, batch: int, first: int, end: int) -> torch.Tensor:
    return tensor[batch : batch + 1, first:end]


def soak(seed: int, count: int, longest: int) -> dict:
    """Runs ``count`` problems: how many there were, those that were wrong, how often each kernel was taken."""
    torch.set_num_threads(1)
    rng, start = random.Random(seed), time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = [Kind.draw(rng) for _ in range(min(KINDS, count))]
    failures, kernels, done = [], Counter(), 0
    for number in range(count):
        problem = Problem.draw(kinds[number % len(kinds)], rng, longest)
        try:
            kernel, wrong = attempt(problem, device)
        except Exception as error:  # after a fault of the device nothing more can be run
            failures.append(f"{type(error).__name__}: {str(error)[:500]}: {problem}")
            break
        done += 1
        kernels[kernel] += 1
        if wrong:
            failures.append(f"{kernel}, {wrong}: {problem}")
    return {"problems": done, "failures": failures, "kernels": kernels, "seconds": time.monotonic() - start}


def attempt(problem: Problem, device: torch.device) -> tuple[str, str]:
    """(which kernel was taken, what was wrong with its result or "")."""
    kind, generator = problem.kind, torch.Generator(device).manual_seed(problem.seed)
    placement = Placement.of(problem, device)
    q = problem.tensor(generator, *placement.shape_q, problem.num_heads, kind.head_dim)
    k = problem.tensor(generator, *placement.shape_k, problem.num_heads_kv, kind.head_dim)
    v = problem.tensor(generator, *placement.shape_k, problem.num_heads_kv, kind.head_dim_v)
    options = _draw_options(problem, generator)
    if placement.arguments is None:
        kernel, call = _plain_call(problem, q, k, v, options)
    else:
        kernel, call = kind.place, _placed_call(problem, placement, q, k, v, options)
    o, lse = call()
    for name, result, expected, allowed in _expectations(problem, placement, q, k, v, options, o, lse):
        error = (result - expected).abs().nan_to_num(torch.inf)
        error = error.masked_fill(result == expected, 0.0)  # infinities
        if (error > allowed).any():
            return kernel, f"{name} is off by {error.max():.3g}, allowed {float(torch.as_tensor(allowed).max()):.3g}"
    if not all(map(torch.equal, (o, lse), call())):
        return kernel, "a second call gave other bits"
    return kernel, ""


def _draw_options(problem: Problem, generator: torch.Generator) -> ScoreOptions:
    kind, device = problem.kind, generator.device
    batch, (seqlen_q, seqlen_k) = len(problem.lengths), problem.lengths[0]
    rng = random.Random(problem.seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    def side(name: str) -> int:
        return rng.choice([0, 1, 17, 64, 300]) if name in kind.options else -1

    found = {"window_size": (side("left"), 0 if kind.causal else side("right"))}
    if "softcap" in kind.options:
        found["softcap"] = rng.choice([1.0, 20.0, 50.0])
    if "alibi_slopes" in kind.options:
        found["alibi_slopes"] = uniform(*rng.choice([(problem.num_heads,), (batch, problem.num_heads)]))
    if "sinks" in kind.options:
        found["sinks"] = uniform(problem.num_heads) * 8 - 4
    shapes = [(seqlen_q, seqlen_k), (batch, 1, 1, seqlen_k), (batch, problem.num_heads, seqlen_q, seqlen_k)]
    if "mask" in kind.options:
        found["attn_bias"] = uniform(*rng.choice(shapes)) < 0.7
    elif "attn_bias" in kind.options:
        found["attn_bias"] = uniform(*rng.choice(shapes)) * 4 - 2
    if problem.descaled:
        shape = rng.choice([(problem.num_heads_kv,), (batch, problem.num_heads_kv)])
        found |= {name: uniform(*shape) * 0.08 + 0.01 for name in ("q_descale", "k_descale", "v_descale")}
    return ScoreOptions(**found)


def _plain_call(problem: Problem, q, k, v, options: ScoreOptions):
    causal, scale = problem.kind.causal, problem.softmax_scale
    arch = arch_of_capability(torch.cuda.get_device_capability()) if q.is_cuda else DEFAULT_ARCH
    described = AttentionProblem.from_tensors(q, k, v, causal=causal, return_lse=True, options=options)
    arguments = {"window_size": options.window_size, "softcap": options.softcap, **options.tensors}

    def call():
        return cute_fa.forward(q, k, v, causal=causal, softmax_scale=scale, return_lse=True, **arguments)

    return select(described, arch)[0].name, call


def _placed_call(problem: Problem, placement: Placement, q, k, v, options: ScoreOptions):
    packed = problem.kind.place == "packed"
    tensors = [tensor[0] for tensor in (q, k, v)] if packed else [q, k, v]

    def call():
        o, lse = forward_varlen(
            *tensors, **placement.arguments, causal=problem.kind.causal, softmax_scale=problem.softmax_scale,
            options=options,
        )  # fmt: skip
        return (o[None], lse[None]) if packed else (o, lse)

    return call


def _expectations(problem: Problem, placement: Placement, q, k, v, options: ScoreOptions, o, lse):
    """(name, result, expected, allowed) for o and lse, of members with lengths of their own one after the other."""
    if placement.arguments is None:
        yield from _of_batch(problem, q, k, v, options, o, lse)
        return
    for i in range(len(problem.lengths)):
        batch, (first, end) = (i, (0, q.shape[1])) if placement.queries is None else (0, placement.queries[i])
        own = {
            name: tensor[i : i + 1] for name, tensor in options.tensors.items() if name != "sinks" and tensor.dim() == 2
        }
        keys = (placement.keys(tensor, i) for tensor in (k, v))
        results = _span(o, batch, first, end), lse[batch : batch + 1, :, first:end]
        yield from _of_batch(problem, _span(q, batch, first, end), *keys, replace(options, **own), *results)


def _of_batch(problem: Problem, q, k, v, options: ScoreOptions, o, lse):
    if not o.numel():
        return
    dtype, group = compute_dtype(problem.kind.dtype), problem.num_heads // problem.num_heads_kv
    q = _exact(q, None if options.q_descale is None else options.q_descale.repeat_interleave(group, -1))
    k, v = _exact(k, options.k_descale), _exact(v, options.v_descale)
    how = {
        "causal": problem.kind.causal, "softmax_scale": problem.softmax_scale, "dtype": torch.float64,
        "window_size": options.window_size, "softcap": options.softcap, "alibi_slopes": options.alibi_slopes,
        "sinks": options.sinks, "attn_bias": options.attn_bias,
    }  # fmt: skip
    expected, expected_lse = attention_reference(q, k, v, **how)
    rounded = attention_reference(q, k, v, **how, round_probs_to=dtype)[0].to(dtype)
    allowed = 2 * (rounded - expected).abs().max() + torch.finfo(dtype).eps * expected.abs().max() / 2
    yield "o", o.double(), expected, allowed
    finite = expected_lse.nan_to_num(0.0, posinf=0.0, neginf=0.0)
    yield "lse", lse.double(), expected_lse, 1e-3 + 1e-5 * finite.abs()


def _exact(tensor: torch.Tensor, descale: torch.Tensor | None) -> torch.Tensor:
    """What (B, S, heads, D) stands for, in float64."""
    values = tensor.double()
    if descale is None:
        return values
    return values * descale.double()[..., None, :, None]
