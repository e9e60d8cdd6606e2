"""Which rank the others wait for: each rank writes twice a second to a store where it is.

A rank that has waited too long knows only that another rank has not come. From the store it learns which one:
a rank whose process no longer writes or, where all processes write, the rank that is in the earliest step.
"""

from __future__ import annotations

import json
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dflop.runtime.mesh import role_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflop._native import Plan

EVERY_S = 0.5
"""Seconds from one entry of a rank to its next."""
ANSWER_S = 10.0
"""Seconds to wait for the store, which has no such timeout; then its machine counts as out of reach."""


class Watch:
    """Says where this rank is, and asks where the others are, through torchrun's store."""

    def __init__(self, plan: Plan, rank: int, place: Callable[[], tuple[int | None, str | None]]) -> None:
        """Begins to write to the store, in a thread; does nothing where the environment names none.

        Args:
            plan: The layout.
            rank: Of this process.
            place: Gives the step and the action under way; called in the thread.
        """
        self._plan = plan
        self.rank = rank
        """Of this process."""
        self._place = place
        self._store = _store()
        self._is_over = False
        if self._store is not None:
            threading.Thread(target=self._say, daemon=True, name="watch").start()

    def _say(self) -> None:
        assert self._store is not None
        count = 0
        while not self._is_over:
            step, action = self._place()
            try:
                self._store.set(_key(self.rank), json.dumps([count, step, action]))
            except RuntimeError:
                # The store has ended, and the run with it.
                return
            count += 1
            time.sleep(EVERY_S)

    def stop(self) -> None:
        """Ends the thread."""
        self._is_over = True

    def blame(self) -> str | None:
        """Which rank this one has waited for, in words; takes a second or two. Called when it gives up.

        Returns:
            As in `rank 1 (llm stage 1, replica 0) is at step 37, action 1F5`; none where no rank is known.
            Where the store does not answer in ten seconds: that its machine does not answer.
        """
        found: list[str | None] = []
        asking = threading.Thread(target=lambda: found.append(self._asked()), daemon=True, name="blame")
        asking.start()
        asking.join(ANSWER_S)
        if found or not asking.is_alive():
            return found[0] if found else None
        return f"the machine of rank 0, {os.environ.get('MASTER_ADDR')}, does not answer"

    def _asked(self) -> str | None:
        first = self._ask()
        time.sleep(3 * EVERY_S)
        second = self._ask()
        others = [rank for rank in second if rank != self.rank and rank in first]
        still = [rank for rank in others if first[rank][0] == second[rank][0]]
        if still:
            return self._words(still[0], second[still[0]], "stands still or is gone, last seen")
        # All processes still write: a rank in the earliest step is the one that is waited for.
        earliest = min((second[rank][1] or 0 for rank in others), default=0)
        late = [rank for rank in others if (second[rank][1] or 0) == earliest]
        return self._words(late[0], second[late[0]], "is") if late else None

    def _words(self, rank: int, seen: list[Any], how: str) -> str:
        role, replica = role_of(self._plan, rank)
        _, step, action = seen
        at = "before the first step" if step is None else f"at step {step}"
        at += "" if action is None else f", action {action}"
        return f"rank {rank} ({role}, replica {replica}) {how} {at}"

    def _ask(self) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        if self._store is None:
            return found
        try:
            for rank in range(self._plan.num_ranks):
                if self._store.check([_key(rank)]):
                    found[rank] = json.loads(self._store.get(_key(rank)))
        except RuntimeError:
            # The process that held the store has ended.
            pass
        return found


def _key(rank: int) -> str:
    return f"dflop/watch/{rank}"


def _store() -> dist.Store | None:  # pyright: ignore[reportPrivateImportUsage]
    """A new connection to torchrun's store, so that the ranks' own messages never wait for this thread."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        return None
    timeout = timedelta(seconds=30)
    store = dist.TCPStore(address, int(port), is_master=False, timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
    # Ranks that torchrun starts again find the same store, so each start has a prefix of its own.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(restart, store)  # pyright: ignore[reportPrivateImportUsage]
