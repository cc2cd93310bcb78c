"""Which configuration a rung runs a problem with: measured on the user's card, measured for the package, or by rule."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cute_fa.arch import get_arch
from cute_fa.choices.files import MeasuredChoice, dtype_name, nearest, read_choices, shipped_file, user_file
from cute_fa.choices.rule import preferred
from cute_fa.config import KernelConfig
from cute_fa.problem import AttentionProblem, StaticProblem, padded_head_dim
from layouts import SmemLayout

if TYPE_CHECKING:
    from cute_fa.ladder import Rung

OWN = "the rung's only one"
CARD = "measured on this card"
SHIPPED = "measured, comes with the package"
RULE = "the rule, not measured"


@dataclass(frozen=True)
class Choice:
    """A configuration and where it comes from: ``OWN``, ``CARD``, ``SHIPPED`` or ``RULE``."""

    config: KernelConfig
    source: str
    measured: MeasuredChoice | None = None


def choose(rung: Rung, problem: AttentionProblem, arch: str, layout: SmemLayout | None = None) -> Choice:
    """The configuration of a rung for a problem on an architecture, with the caller's layout if there is one.

    The first of: the nearest length measured on the problem's card; the nearest one shipped for the
    architecture; the rule. A measured choice that can't be built is passed over, with a warning unless that may be
    due to the caller's layout or to score options, which none was measured with.
    """
    static = problem.static
    head_dim = padded_head_dim(static.widest_head_dim)
    preferences = dict(rung.preferences).get(head_dim)
    if preferences is None:
        config = rung.config_for(head_dim, problem.causal, problem.seqlen_q, layout, static.is_plain)
        return Choice(config, OWN)
    for source, path in _files(problem.device, arch):
        choices = read_choices(path)
        found = nearest(choices, rung.name, arch, dtype_name(static.dtype), head_dim, problem.causal, problem.seqlen_k)
        if found is None:
            continue
        config = _with_layout(found.config, layout)
        try:
            rung.kernel.check(static, config, arch)
        except ValueError as error:
            if layout is None and static.is_plain:
                warnings.warn(f"cute_fa ignores a choice for {rung.name} in {path}: {error}", stacklevel=2)
            continue
        return Choice(config, source, found)
    preferences = [replace(one, config=_with_layout(one.config, layout)) for one in preferences]
    buildable = [one for one in preferences if _can_be_built(rung, static, one.config, arch)]
    if not buildable:
        return Choice(preferences[0].config, RULE)  # whose check says why
    smem_bytes = [rung.kernel.smem_bytes(static, one.config) for one in buildable]
    return Choice(preferred(buildable, smem_bytes, get_arch(arch), problem.causal).config, RULE)


def _can_be_built(rung: Rung, static: StaticProblem, config: KernelConfig, arch: str) -> bool:
    try:
        rung.kernel.check(static, config, arch)
    except ValueError:
        return False
    return True


def _with_layout(config: KernelConfig, layout: SmemLayout | None) -> KernelConfig:
    return config if layout is None else replace(config, layout=layout)


def _files(device: torch.device, arch: str) -> Iterator[tuple[str, Path]]:
    if device.type == "cuda" and torch.cuda.is_available():
        yield CARD, user_file(torch.cuda.get_device_name(device))
    yield SHIPPED, shipped_file(arch)
