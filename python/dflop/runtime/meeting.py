"""Ranks that tell each other the largest of their numbers, in few messages, over a tree.

    rank 0 of the group <- its 4 children <- theirs ...     up: the largest number below each rank
    rank 0 of the group -> its 4 children -> theirs ...     down: what the first rank decided

gloo's own collectives go round in a ring: among 32 ranks some 2,000 messages one after the other, for each of
which two cores wake a process; that takes longer than many an action. The tree has 62.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHILDREN = 4
"""Of a rank in the tree: 32 ranks are three levels deep, and no rank has more than five neighbours."""
FIRST_TAG = 1 << 24
"""Tags of messages between stages are below it: twice the stages times the microbatches of a step."""


class Meeting:
    """Some ranks that meet again and again."""

    def __init__(self, members: Sequence[int], rank: int, group: dist.ProcessGroup, number: int = 0) -> None:
        """Nobody has come yet; sends nothing.

        Args:
            members: Ranks of `group` that meet; all of them give the same list.
            rank: This one, one of them.
            group: Carries the messages, over gloo; its timeout holds.
            number: Tells several meetings over the same group apart.
        """
        place = members.index(rank)
        self._group = group
        self._tag = FIRST_TAG + number
        self._parent = members[(place - 1) // CHILDREN] if place else None
        self._children = list(members[place * CHILDREN + 1 : (place + 1) * CHILDREN + 1])

    def largest(self, number: int, decide: Callable[[int], int] = int) -> int:
        """What the first member makes of the largest number of all.

        Every member must call it; sends a number to each of its neighbours; blocks until all have come.

        Args:
            number: This rank's, of 64 bits.
            decide: What the first member does with the largest number; only its own is called.

        Returns:
            The same on all members.

        Raises:
            RuntimeError: A member has gone, or did not come within the timeout.
        """
        told = torch.tensor([number], dtype=torch.int64)
        received = torch.empty_like(told)
        for child in self._children:
            dist.recv(received, child, group=self._group, tag=self._tag)
            torch.maximum(told, received, out=told)
        if self._parent is None:
            told[0] = decide(int(told))
        else:
            dist.send(told, self._parent, group=self._group, tag=self._tag)
            dist.recv(told, self._parent, group=self._group, tag=self._tag)
        sends = [dist.isend(told, child, group=self._group, tag=self._tag) for child in self._children]
        for send in sends:
            assert send is not None
            send.wait()
        return int(told)
