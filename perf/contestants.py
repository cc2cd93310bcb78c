"""Who takes part in a measurement: rungs of the ladder, with or without another layout."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

import cute_fa
from cute_fa.choices import Choice, choose
from cute_fa.ladder import KERNELS, LADDER, Rung
from cute_fa.problem import AttentionProblem
from layouts import SmemLayout
from layouts.parse import find_layout
from perf.cases import Case


class Unavailable(Exception):
    """A contestant can't run a case; the text says why."""


@dataclass(frozen=True)
class Contestant:
    """One entry of a timing table.

    Args:
        name: as results files call it.
        kind: "rung" or "peer".
        prepare: (case, q, k, v) -> a call without arguments that returns o; raises Unavailable.
        rung, layout: of a rung, what it is and the layout that replaces its own (None: its own).
    """

    name: str
    kind: str
    prepare: Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]
    rung: Rung | None = None
    layout: SmemLayout | None = None

    @property
    def label(self) -> str:
        """The name, with the layout where it isn't the rung's own."""
        return self.name if self.layout is None else f"{self.name}, {self.layout.name}"

    def choose(self, problem: AttentionProblem, arch: str) -> Choice:
        """What a rung is compiled with for a problem, and where that comes from."""
        return choose(self.rung, problem, arch, self.layout)


def own_device() -> torch.device:
    """The current CUDA device, whose measured choices ``cute_fa.forward`` follows; the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rung_contestant(rung: Rung, layout: SmemLayout | None = None) -> Contestant:
    """A rung through ``cute_fa.forward``, as users call it."""

    def prepare(case: Case, q, k, v):
        call = functools.partial(cute_fa.forward, q, k, v, causal=case.causal, kernel=rung.name, layout=layout)
        try:
            call()
        except ValueError as error:
            raise Unavailable(str(error)) from error
        return call

    return Contestant(rung.name, "rung", prepare, rung, layout)


def layout_argument(text: str) -> SmemLayout:
    """A layout from the command line: a name of the catalog, an expression, or a file that defines one."""
    try:
        layout = find_layout(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(layout, SmemLayout):
        raise argparse.ArgumentTypeError(f"must be a layout that a kernel can take (a SmemLayout), got {text!r}")
    return layout


def add_rung_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose rungs and layouts."""
    parser.add_argument(
        "--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), metavar="NAME", help=f"of {', '.join(KERNELS)}"
    )
    parser.add_argument(
        "--layout",
        type=layout_argument,
        nargs="+",
        metavar="LAYOUT",
        help="each kernel with these layouts, not its own: "
        "names of the catalog, expressions such as 'S<3,3,3> o (8,64):(64,1)', or FILE.py:NAME",
    )


def rungs_from(args: argparse.Namespace) -> list[Contestant]:
    """The chosen rungs in the ladder's order, each with every chosen layout."""
    return [
        rung_contestant(rung, layout)
        for rung in LADDER
        if rung.name in args.kernels
        for layout in args.layout or [None]
    ]
