"""The order of timed calls, with events stood in for."""

from __future__ import annotations

import itertools

import pytest
import torch

from perf import timing


class _Event:
    """Time is the number of calls so far, in ms."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = _Event.now

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def calls(monkeypatch):
    """Three calls of 1, 2 and 3 ms, and what was called when."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made = []

    def call_of(name, ms):
        def call():
            made.append(name)
            _Event.now += ms

        return call

    return {name: call_of(name, ms) for name, ms in (("a", 1.0), ("b", 2.0), ("c", 3.0))}, made


def test_each_round_has_its_own_order_and_every_call_twice_in_a_row(calls):
    named, made = calls
    times = timing.time_interleaved(named, budget_s=1.0, repeats=12)
    assert {name: (one.ms, one.samples) for name, one in times.items()} == {
        "a": (1.0, 12),
        "b": (2.0, 12),
        "c": (3.0, 12),
    }
    timed = made[-12 * 2 * len(named) :]
    assert timed[::2] == timed[1::2]  # an untimed call before each timed one
    rounds = [tuple(timed[2 * len(named) * i : 2 * len(named) * (i + 1) : 2]) for i in range(12)]
    assert all(sorted(one) == sorted(named) for one in rounds)
    predecessors = {(one, other) for order in rounds for one, other in itertools.pairwise(order)}
    assert len(predecessors) == 6  # every call has followed every other


def test_rounds_follow_from_the_time_that_there_is(calls):
    named, _ = calls
    times = timing.time_interleaved(named, budget_s=0.6)  # a round takes 6 ms, and as long again untimed
    assert {one.samples for one in times.values()} == {50}
    assert timing.time_interleaved(named, budget_s=1e-6)["a"].samples == timing.MIN_ROUNDS
