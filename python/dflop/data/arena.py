"""Memory in which decoded media wait: of a fixed size, shared with the decoding processes, given out in turn.

    turn 3 reserves --> waits for turns 1 and 2, then for room --> a block --> free --> room for turn 4

Media are asked for in the order of the turns. So the media that fill the arena are those that are asked for
next, and a reservation that waits gets its room in the end: no later turn can take it away.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass

import torch

_ALIGNED_BYTES = 64
"""Blocks begin at multiples of it."""


@dataclass(frozen=True)
class Block:
    """A piece of an arena."""

    start: int
    """First byte."""
    num_bytes: int


class ArenaClosedError(Exception):
    """No more room is given out: the run ends."""


class Arena:
    """Bytes that processes forked from this one share; blocks of them, for any thread of this process."""

    def __init__(self, num_bytes: int) -> None:
        """Maps the memory; pages become real when they are written.

        Args:
            num_bytes: In all, at least 1: never is more given out.
        """
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes)
        self._changed = threading.Condition()
        self._taken: list[Block] = []
        """In the order in which they lie."""
        self._next_turn = 0
        self._num_turns = 0
        self._passed: set[int] = set()
        self._is_closed = False
        self.peak_bytes = 0
        """The most that was given out at a time."""

    def turn(self) -> int:
        """A place in the order of reservations; it must be used, by `reserve` or by `give_up`."""
        with self._changed:
            self._num_turns += 1
            return self._num_turns - 1

    def give_up(self, turn: int) -> None:
        """Lets those behind a turn pass; nothing where it has reserved.

        Args:
            turn: Of `turn`.
        """
        with self._changed:
            if turn >= self._next_turn:
                self._pass(turn)

    def reserve(self, turn: int, num_bytes: int) -> Block:
        """Waits for its turn and for room.

        Args:
            turn: Of `turn`; each reserves once.
            num_bytes: At least 1, at most those of the arena.

        Returns:
            A block, until `free`.

        Raises:
            ArenaClosedError: `close` was called.
        """
        size = -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        assert 0 < num_bytes <= self.num_bytes, "more than there is would be waited for without end"
        with self._changed:
            while not self._is_closed:
                start = self._room(min(size, self.num_bytes)) if turn == self._next_turn else None
                if start is not None:
                    block = Block(start, min(size, self.num_bytes))
                    self._taken = sorted([*self._taken, block], key=lambda taken: taken.start)
                    self.peak_bytes = max(self.peak_bytes, self.used_bytes)
                    self._pass(turn)
                    return block
                self._changed.wait()
        raise ArenaClosedError

    def free(self, block: Block) -> None:
        """Gives a block back."""
        with self._changed:
            self._taken.remove(block)
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits, and whoever comes, gets an error; blocks that are out stay as they are."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def used_bytes(self) -> int:
        """Given out now."""
        return sum(block.num_bytes for block in self._taken)

    def view(self, block: Block, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor at the start of a block; no copy.

        Args:
            block: Of this arena, or of that of the process which this one was forked from.
            shape: Of the tensor; it must fit.

        Returns:
            The tensor.
        """
        count = torch.Size(shape).numel()
        assert 4 * count <= block.num_bytes, "a block has room for what it was reserved for"
        return torch.frombuffer(self._memory, dtype=torch.float32, count=count, offset=block.start).view(
            shape
        )

    def _room(self, size: int) -> int | None:
        """The first byte of the first gap that is large enough."""
        end = 0
        for block in self._taken:
            if block.start - end >= size:
                return end
            end = block.start + block.num_bytes
        return end if self.num_bytes - end >= size else None

    def _pass(self, turn: int) -> None:
        self._passed.add(turn)
        while self._next_turn in self._passed:
            self._passed.remove(self._next_turn)
            self._next_turn += 1
        self._changed.notify_all()
