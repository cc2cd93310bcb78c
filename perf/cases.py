"""The problems that are timed, and the options that choose them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from cute_fa.problem import HEAD_DIMS, NO_FEATURES, AttentionProblem, StaticProblem
from layouts.arguments import positive_int

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS = 16384  # B * S of the default set
MODEL_DIM = 2048  # H * D of the default set
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Case:
    """One attention problem: q (B, S_q, H, D), k and v (B, S_k, H_kv, D)."""

    dtype: str
    B: int
    S_q: int
    S_k: int
    H: int
    H_kv: int
    D: int
    causal: bool

    @property
    def static(self) -> StaticProblem:
        """What a kernel is compiled for."""
        return StaticProblem(DTYPES[self.dtype], self.D, self.causal, False)

    def problem(self, device: torch.device) -> AttentionProblem:
        """The problem as ``cute_fa`` describes it."""
        dtype = DTYPES[self.dtype]
        return AttentionProblem(
            self.B, self.S_q, self.S_k, self.H, self.H_kv, self.D, self.D, dtype, device, self.causal, False,
            (-1, -1), NO_FEATURES,
        )  # fmt: skip

    def tensors(self, device: str | torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, random normal: constant data would draw less power and run faster than real data."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(seqlen: int, heads: int) -> torch.Tensor:
            shape = (self.B, seqlen, heads, self.D)
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[self.dtype])

        return draw(self.S_q, self.H), draw(self.S_k, self.H_kv), draw(self.S_k, self.H_kv)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each read once."""
        return 2 * self.B * self.S_k * self.H_kv * self.D * DTYPES[self.dtype].itemsize

    def as_record(self) -> dict:
        """The fields under the names that results files use."""
        return asdict(self)

    def __str__(self):
        seqlen = f"S={self.S_q}" if self.S_q == self.S_k else f"S_q={self.S_q} S_k={self.S_k}"
        heads = f"H={self.H}" if self.H_kv == self.H else f"H={self.H} H_kv={self.H_kv}"
        return f"{self.dtype} B={self.B} {seqlen} {heads} D={self.D} {'causal' if self.causal else 'full'}"


@dataclass(frozen=True)
class CaseSet:
    """Cases that are timed together.

    Args:
        help: what they stand for.
        cases: dtype -> the cases.
        cold_l2: whether L2 is emptied of the data before each call, as between the layers of a model.
    """

    help: str
    cases: Callable[[str], list[Case]]
    cold_l2: bool = False


def _decode_cases(dtype: str) -> list[Case]:
    sizes = [(B, S_k) for B in (1, 4, 16, 64) for S_k in (4096, 8192, 32768, 131072) if B * S_k <= 2**21]
    return [Case(dtype, B, 1, S_k, 32, 8, 128, False) for B, S_k in sizes]


def _gqa_cases(dtype: str) -> list[Case]:
    return [Case(dtype, 1, S, S, 64, 8, 128, causal) for S in (2048, 8192, 16384) for causal in (False, True)]


SETS: dict[str, CaseSet] = {
    "decode": CaseSet("one query, 32 heads on 8 of K and V, D=128, a cold L2", _decode_cases, cold_l2=True),
    "gqa": CaseSet("B=1, 64 heads on 8 of K and V, D=128", _gqa_cases),
}


# Cases in which the newest rung for them is held up by something: where a profile shows by what.
LIMITS: dict[str, tuple[str, Case]] = {
    "decode": ("kernel7", Case("bf16", 1, 1, 8192, 32, 8, 128, False)),
    "decode_batch": ("kernel7", Case("bf16", 64, 1, 8192, 32, 8, 128, False)),
    "d64": ("kernel11", Case("bf16", 1, 16384, 16384, 32, 32, 64, False)),
}


def seqlen_pair(text: str) -> tuple[int, int]:
    """ "4096" -> (4096, 4096); "1x8192" -> (1, 8192): S_q queries over S_k keys."""
    first, separator, second = text.partition("x")
    try:
        seqlen_q = positive_int(first)
        return seqlen_q, positive_int(second) if separator else seqlen_q
    except argparse.ArgumentTypeError:
        message = f"must be S or S_qxS_k, integers of at least 1 such as 4096 or 1x8192, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def add_static_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose what kernels are compiled for."""
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of q, k, v and o (default: bf16)")
    parser.add_argument(
        "--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=[128], metavar="D", help="default: 128"
    )
    parser.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, default=None, help="only causal or only full; default: both"
    )


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose the problems to time."""
    add_static_arguments(parser)
    described = "; ".join(f"{name}: {case_set.help}" for name, case_set in SETS.items())
    parser.add_argument("--set", choices=SETS, help=f"these cases, in place of all other choices of cases; {described}")
    parser.add_argument(
        "--seqlen", type=seqlen_pair, nargs="+", metavar="S|S_qxS_k", help=f"default: {', '.join(map(str, SEQLENS))}"
    )
    parser.add_argument("--batch", type=positive_int, metavar="B", help=f"default: {TOKENS} / S_k, at least 1")
    parser.add_argument("--heads", type=positive_int, metavar="H", help=f"default: {MODEL_DIM} / D")
    parser.add_argument("--heads-kv", type=positive_int, metavar="H_kv", help="default: H")


def causal_values(args: argparse.Namespace) -> tuple[bool, ...]:
    """Both without an option."""
    return (False, True) if args.causal is None else (args.causal,)


def is_default_set(args: argparse.Namespace) -> bool:
    """Whether only dtype and one head dimension were chosen."""
    chosen = (args.seqlen, args.batch, args.heads, args.heads_kv, args.causal)
    return len(args.head_dim) == 1 and all(option is None for option in chosen)


def cases_from(args: argparse.Namespace) -> list[Case]:
    """Every combination of the options, short sequences first.

    Raises:
        ValueError: H is not a multiple of H_kv.
    """
    if args.set:
        return SETS[args.set].cases(args.dtype)
    cases = []
    for head_dim in args.head_dim:
        heads = args.heads or max(1, MODEL_DIM // head_dim)
        heads_kv = args.heads_kv or heads
        if heads % heads_kv:
            raise ValueError(f"--heads must be a multiple of --heads-kv ({heads_kv}), got {heads}")
        for seqlen_q, seqlen_k in args.seqlen or [(s, s) for s in SEQLENS]:
            batch = args.batch or max(1, TOKENS // seqlen_k)
            cases += [
                Case(args.dtype, batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal)
                for causal in causal_values(args)
            ]
    return cases
