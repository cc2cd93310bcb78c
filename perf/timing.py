"""Device time of calls, by CUDA events, interleaved so that the calls of one run share the card's state."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

WARM_UP_CALLS = 3
# L2 is emptied by reading so many times its size, again and again: half a millisecond on an H200, in which even a host
# that is held up launches what comes behind.
COLD_READ, COLD_READS = 12, 4
MIN_ROUNDS, MAX_ROUNDS = 10, 200


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median and quartiles over ``samples`` calls."""

    ms: float
    ms_q1: float
    ms_q3: float
    samples: int


def time_interleaved(
    calls: dict[str, Callable[[], object]], *, budget_s: float, repeats: int | None = None, cold_l2: bool = False
) -> dict[str, Timing]:
    """Times every call once a round, each round in another order, on the current device and stream.

    A card that a call has driven to its power limit lowers its clock, and the next call meets that clock: in a fixed
    order one call would always follow the same other one. Before each timed call comes either an untimed one (L2 holds
    what that call leaves there) or, with ``cold_l2``, a read of a buffer larger than L2, whose lines nobody has to
    write back. Both also keep the device busy while the timed call is being launched, so that its launch isn't part of
    its time.

    Args:
        calls: the contestants by name.
        budget_s: seconds of device time that choose the number of rounds, within 10 and 200.
        repeats: the number of rounds instead.
        cold_l2: empty L2 of the call's data before each timed call.
    """
    flush = None
    if cold_l2:
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        flush = functools.partial(_read, torch.zeros(COLD_READ * l2_bytes // 4, device="cuda"))
    for call in calls.values():
        for _ in range(WARM_UP_CALLS):
            call()
    order = random.Random(0)
    round_ms = sum(sum(_round(calls, flush, order).values()) for _ in range(2)) / 2
    if repeats is None:
        # The call before each timed one takes about as long again.
        repeats = int(min(MAX_ROUNDS, max(MIN_ROUNDS, 1e3 * budget_s / (2 * max(round_ms, 1e-3)))))
    rounds = [_round(calls, flush, order) for _ in range(repeats)]
    return {name: _summary([times[name] for times in rounds]) for name in calls}


def _read(buffer: torch.Tensor) -> None:
    for _ in range(COLD_READS):
        buffer.sum()


def _round(calls, flush, order: random.Random) -> dict[str, float]:
    events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
    for name, call in order.sample(list(calls.items()), len(calls)):
        (flush or call)()
        start, end = events[name]
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return {name: start.elapsed_time(end) for name, (start, end) in events.items()}


def _summary(samples: list[float]) -> Timing:
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0], 1)
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, q1, q3, len(samples))
