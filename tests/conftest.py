"""What all tests share: one thread a process, and what tests lend each other on the path.

They run against the installed wheel: what users get is what is tested.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
_ELSEWHERE = ("layouts", "gpu", "site")
"""Marks of tests that have a target of their own."""
for folder in (_TESTS, _TESTS / "unit", _TESTS / "dist"):
    sys.path.insert(0, str(folder))

# A shell starts `nohup make test &` with these ignored, and children inherit it; tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Before torch is imported anywhere: two ranks with two threads each would fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# So that a failed assertion in it says what was compared.
pytest.register_assert_rewrite("shape_oracle")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked `some(n)` n cases stay, evenly spread; the others are marked `more`, and are left to CI.

    With `some(n, m)` CI has m of those others, evenly spread as well; what remains is marked `layouts`.
    """
    cases = defaultdict(list)
    for item in items:
        # What is left to another target anyway is none of the n.
        if item.get_closest_marker("some") and not any(item.get_closest_marker(name) for name in _ELSEWHERE):
            cases[item.nodeid.partition("[")[0]].append(item)
    for found in cases.values():
        num, *num_more = found[0].get_closest_marker("some").args
        others = _without(_spread(found, num), found)
        further = _spread(others, num_more[0]) if num_more else others
        for item in further:
            item.add_marker("more")
        for item in _without(further, others):
            item.add_marker("layouts")
    _skip_newer(items)


def _spread(items, num):
    """`num` of the items, or all where there are fewer, evenly spread."""
    num = min(len(items), num)
    return [items[place * len(items) // num] for place in range(num)]


def _without(some, items):
    """The items that are not among `some`."""
    taken = {id(item) for item in some}
    return [item for item in items if id(item) not in taken]


def _skip_newer(items):
    """Skips Qwen2.5-Omni, Qwen3-Omni, Gemma 4, LFM2-VL and MiniCPM-V where transformers is older than they ask for, as in `make test-oldest`."""
    if tuple(map(int, version("transformers").split(".")[:2])) < (5, 23):
        skip = pytest.mark.skip(reason="these families need transformers 5.23")
        for item in (
            item
            for item in items
            # Of a trainer whose name ends so, not of a family.
            if any(
                name in item.nodeid.replace("veomni", "")
                for name in ("omni", "gemma4", "lfm2", "minicpm", "short_conv")
            )
        ):
            item.add_marker(skip)


def pytest_collection_finish(session):
    """All is imported that tests import, and nothing has run yet."""
    if session.items and not session.config.option.collectonly:
        import warm

        if torch := sys.modules.get("torch"):
            # A process's first backward starts threads of autograd for each device that it knows, and no process that is
            # forked later could run a backward. A CPU has none; after a first `FakeTensorMode` there is a device.
            torch.zeros(1, requires_grad=True).sum().backward()
        # Millions of objects of torch and transformers, which outlive all tests: a collection in this process, or in one
        # of hundreds of forks, would look at each again, and a fork would copy the pages that they are on.
        gc.collect()
        gc.freeze()
        warm.start()


def pytest_unconfigure():
    """What is frozen cannot be freed, and native modules would report it as leaked at the end."""
    gc.unfreeze()


@pytest.fixture
def quiet():
    """One thread, and of transformers only errors."""
    import torch

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
