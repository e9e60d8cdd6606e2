"""Spans of a rank on a GPU, by a clock that stands for the device's."""

import itertools

import pytest
import torch

from dflop.runtime.spans import SpanRecorder


class Event:
    """Reads a clock that goes on by a millisecond with each reading."""

    made = 0
    clock = itertools.count()

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1

    def record(self, stream):
        assert stream == "the stream"
        self.at_ms = next(Event.clock)

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the stream")
    return SpanRecorder(3, torch.device("cuda", 0))


def test_a_step_takes_the_events_of_the_step_before(recorder):
    """Each event is one of the step's own until the step was read."""
    for _ in range(3):
        recorder.begin()
        for action in ("0F0", "0B0"):
            start = recorder.now()
            recorder.add(action, start)
        recorder.add("tail", recorder.now())
        spans = recorder.finish()
        zero = spans.start_ns
        assert [(name, start - zero, end - zero) for name, start, end in spans.actions] == [
            ("0F0", 1_000_000, 2_000_000),
            ("0B0", 3_000_000, 4_000_000),
        ]
        assert [at - zero for at in spans.tail] == [5_000_000, 6_000_000]
    assert Event.made == 7
