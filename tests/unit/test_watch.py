"""Whom a rank blames that gives up."""

from __future__ import annotations

import threading

from dflop.runtime import watch


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch):
    """The machine that holds it may be the one that is gone: nothing ever comes back."""
    forever = threading.Event()

    class Silent:
        def set(self, *_):
            forever.wait()

        check = get = set

    monkeypatch.setattr(watch, "_store", Silent)
    monkeypatch.setattr(watch, "ANSWER_S", 0.01)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    one = watch.Watch(plan=type("OfTwo", (), {"num_ranks": 2})(), rank=1, place=lambda: (3, None))
    assert one.blame() == "the machine of rank 0, 10.0.0.7, does not answer"
    one.stop()
    forever.set()
