"""Measured choices and the JSON files that keep them: one record a choice, with who measured it and how far ahead.

``python -m perf tune`` writes them. A user's own lie beside the compile cache, one file a card; those that
come with the package lie in this folder, one file an architecture.
"""

from __future__ import annotations

import functools
import json
import math
import typing
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from cute_fa.cache import cache_dir, slug
from cute_fa.config import KernelConfig, PipelinedConfig
from layouts import CATALOG


@dataclass(frozen=True)
class Measurement:
    """Who measured a choice: the card, the commit of the source, the time in UTC, versions; and with what result.

    ``case`` has the problem under the names that results files use; ``tflops`` counts by
    ``reference.flops``. The runner-up, as text, is missing where only one candidate was left.
    """

    device: str
    commit: str
    date: str
    versions: dict
    case: dict
    tflops: float
    runner_up: str | None
    runner_up_tflops: float | None


@dataclass(frozen=True)
class MeasuredChoice:
    """The configuration that was fastest for a rung, an architecture, a dtype ("bfloat16"), a head dimension, a mask
    and ``seqlen`` keys."""

    rung: str
    arch: str
    dtype: str
    head_dim: int
    causal: bool
    seqlen: int
    config: KernelConfig
    measurement: Measurement

    @property
    def key(self) -> tuple:
        """What it is the choice for."""
        return self.rung, self.arch, self.dtype, self.head_dim, self.causal, self.seqlen


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as files have it ("bfloat16")."""
    return str(dtype).removeprefix("torch.")


def user_file(device: str) -> Path:
    """The choices measured on a card of the user's, by its name ("NVIDIA H200")."""
    return cache_dir() / "choices" / f"{slug(device)}.json"


def shipped_file(arch: str) -> Path:
    """The choices for an architecture that come with the package; not every one has been measured."""
    return Path(__file__).parent / f"{arch}.json"


def nearest(
    choices: Iterable[MeasuredChoice], rung: str, arch: str, dtype: str, head_dim: int, causal: bool, seqlen: int
) -> MeasuredChoice | None:
    """The choice measured at the length that is nearest as a ratio; None where nothing that fits was measured."""
    same = [choice for choice in choices if choice.key[:-1] == (rung, arch, dtype, head_dim, causal)]
    return min(same, key=lambda choice: abs(math.log2(choice.seqlen / max(1, seqlen))), default=None)


def read_choices(path: Path) -> tuple[MeasuredChoice, ...]:
    """The choices in a file, none if it is missing. What can't be read is left alone with a warning that names it."""
    try:
        state = path.stat()
    except OSError:
        return ()
    return _read(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: Path, _mtime_ns: int, _size: int) -> tuple[MeasuredChoice, ...]:
    try:
        return loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"cute_fa ignores the measured choices in {path}: {error}", stacklevel=2)
        return ()


def dumps(choices: Iterable[MeasuredChoice]) -> str:
    """The text of a file, one choice a line, in the order of their keys."""
    lines = [json.dumps(_as_record(choice)) for choice in sorted(choices, key=lambda choice: choice.key)]
    return '{"choices": [\n ' + ",\n ".join(lines) + "\n]}\n"


def loads(text: str) -> tuple[MeasuredChoice, ...]:
    """The choices in the text of a file.

    Raises:
        ValueError: it is not what ``dumps`` writes; the message says where.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("choices"), list):
        raise ValueError('it must be an object with a list "choices"')
    return tuple(_from_record(record, f"choice {i}") for i, record in enumerate(document["choices"]))


def _as_record(choice: MeasuredChoice) -> dict:
    config = {field.name: getattr(choice.config, field.name) for field in fields(choice.config)}
    return asdict(choice) | {"config": config | {"layout": choice.config.layout.name}}


def _from_record(record, where: str) -> MeasuredChoice:
    values = _fields_of(MeasuredChoice, record, where, parsed=("config", "measurement"))
    if values["seqlen"] < 1:
        raise ValueError(f"{where}: seqlen must be at least 1, got {values['seqlen']}")
    config = _fields_of(PipelinedConfig, values["config"], f"{where}, config", parsed=("layout",))
    if config["layout"] not in list(CATALOG):
        raise ValueError(f"{where}: layout must be one of {', '.join(CATALOG)}, got {config['layout']!r}")
    measurement = _fields_of(Measurement, values["measurement"], f"{where}, measurement")
    parsed = {"config": PipelinedConfig(**config | {"layout": CATALOG[config["layout"]]})}
    return MeasuredChoice(**values | parsed | {"measurement": Measurement(**measurement)})


def _fields_of(kind: type, record, where: str, parsed: tuple[str, ...] = ()) -> dict:
    """The fields of a dataclass out of JSON, each of its type but those that are to be ``parsed``."""
    types = typing.get_type_hints(kind)
    if not isinstance(record, dict) or set(record) != set(types):
        raise ValueError(f"{where} must have exactly the fields {', '.join(types)}")
    for name in set(types) - set(parsed):
        value, wanted = record[name], types[name]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"{where}: {name} must be {getattr(wanted, '__name__', wanted)}, got {value!r}")
    return record
