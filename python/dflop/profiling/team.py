"""The ranks that torchrun started, working in step: rank 0 says what to do next, the others do it and answer.

    rank 0    act, arguments -->    the same act on ranks 0 .. n-1    --> one answer a rank
    others    wait for an act, do it, answer

These messages go over gloo, whatever the acts themselves use. There are two kinds of act. In the first, each
rank works on its own. Such an act may fail on any rank; the answer says so, and no rank waits. In the second,
ranks wait for each other inside the act. There a rank that fails cannot go on: it writes the reason to the
store and ends, and the others notice that the connection is closed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from dflop._native import Error
from dflop.device import take_device
from dflop.models.errors import profile_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Self

TIMEOUT_S = 300.0
"""A rank that does not answer within so many seconds counts as lost."""
_IDLE = timedelta(days=7)
# Seconds to wait for the reason that a failed rank writes to the store.
_WORD_S = 5.0


class LeaderStoppedError(RuntimeError):
    """Rank 0, or a rank it waited for, has failed and said why."""


def is_started() -> bool:
    """Whether torchrun started this process as one of several ranks.

    Returns:
        False without torchrun, and for a single rank.
    """
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


class Team:
    """One rank's view of all ranks. A context: at its end, rank 0 tells the others to end."""

    def __init__(self, device: str) -> None:
        """Joins the others; all ranks must call it at the same time.

        Args:
            device: `cpu` or `cuda`, whose current device becomes that of this rank.

        Raises:
            Error: there is no GPU for this rank.
        """
        take_device(device)
        self._is_mine = not dist.is_initialized()
        if self._is_mine:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.ranks_per_node = min(int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks)), self.num_ranks)
        # A group for messages only: they must not wait for a GPU, and its timeout is long, since the other
        # ranks wait while rank 0 measures alone.
        self._messages = cast("Any", dist.new_group(backend="gloo", timeout=_IDLE))
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._is_in_act, self._is_interrupted = False, False
        self._handler: Any = None
        self._result: Any = None

    def __enter__(self) -> Self:
        """Takes over Ctrl-C: it ends rank 0 between two acts, and the other ranks when rank 0 says so."""
        if threading.current_thread() is threading.main_thread():
            on_interrupt = self._on_interrupt if self.rank == 0 else signal.SIG_IGN
            self._handler = signal.signal(signal.SIGINT, on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the other ranks, with the result or the error."""
        if self.rank == 0:
            how = "interrupted" if kind is KeyboardInterrupt else f"{kind.__name__}: {error}" if kind else ""
            for rank in range(1, self.num_ranks):
                try:
                    self._send(rank, {"act": None, "error": how, "result": self._result}, _WORD_S)
                except RuntimeError:
                    # That rank has gone, or waits for one that has.
                    continue
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
        # After a failure this might wait for ranks that have gone. Then the end of the process does it.
        if self._is_mine and kind is None:
            dist.destroy_process_group()

    def _on_interrupt(self, *_: object) -> None:
        if not self._is_in_act or self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True

    def group(self, degree: int) -> dist.ProcessGroup:
        """The group of the first ranks; all ranks of the team must call it at the same time.

        Args:
            degree: how many ranks.

        Returns:
            The same group at each call.
        """
        if degree not in self._groups:
            timeout = timedelta(seconds=TIMEOUT_S)
            # Ranks that are not in the group get a placeholder, which they never use.
            self._groups[degree] = cast("Any", dist.new_group(list(range(degree)), timeout=timeout))
        return self._groups[degree]

    def do(
        self,
        num_ranks: int,
        act: str,
        arguments: Sequence[Any],
        own: Callable[[], Any],
        what: str,
        *,
        together: bool = False,
    ) -> list[Any]:
        """Makes the first ranks do one act. Only rank 0 calls it.

        Args:
            num_ranks: how many, rank 0 included.
            act: name of the method that the other ranks call.
            arguments: of that method; anything that JSON can hold.
            own: does the act on rank 0.
            what: the act in words, for errors.
            together: whether the ranks wait for each other inside the act.

        Returns:
            What the act gave on each rank, in order.

        Raises:
            KeyboardInterrupt: Ctrl-C has come since the last act; this one is not begun.
            ProfileError: a rank failed or is gone; the message names it.
        """
        if self._is_interrupted:
            raise KeyboardInterrupt
        others = range(1, num_ranks)
        message = {"act": act, "arguments": list(arguments), "what": what, "together": together}
        self._is_in_act = True
        failed: Exception | None = None
        results: list[Any] = [None]
        try:
            for rank in others:
                self._send_or_name(rank, message, num_ranks)
            try:
                results[0] = own()
            except Exception as error:
                if together or not isinstance(error, Error):
                    failed = self._explain(num_ranks, what, error)
                else:
                    failed = error
                if together:
                    raise failed from error
            for rank in others:
                answer = self._answer_of(rank, num_ranks, what)
                if "error" in answer:
                    text = f"{label(rank, num_ranks)} {what}: {answer['error']}"
                    failed = failed or profile_error(text)
                results.append(answer.get("value"))
        finally:
            self._is_in_act = False
        if failed is not None:
            raise failed
        return results

    def serve(self, acts: Any) -> Any:
        """Does what rank 0 says, until rank 0 ends. All other ranks call it.

        Args:
            acts: an object with a method for each act.

        Returns:
            The result that rank 0 has set.

        Raises:
            KeyboardInterrupt: rank 0 was interrupted.
            LeaderStoppedError: rank 0 or another rank has failed, and said why.
            ProfileError: this rank failed inside an act that the ranks do together, or rank 0 is gone.
        """
        while True:
            try:
                message = self._receive(0, _IDLE)
            except RuntimeError as error:
                text = f"{label(self.rank, self.num_ranks)} rank 0 is gone: {first_line(error)}"
                raise profile_error(text) from error
            if message["act"] is None:
                if message["error"] == "interrupted":
                    raise KeyboardInterrupt
                if message["error"]:
                    raise LeaderStoppedError(message["error"])
                return message["result"]
            self._send(0, self._obey(acts, message), TIMEOUT_S)

    def _obey(self, acts: Any, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": getattr(acts, message["act"])(*message["arguments"])}
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            if not message["together"]:
                return {"error": text}
            is_echo = _is_of_others(error)
            self._leave_word({"text": text, "is_echo": is_echo})
            if is_echo:
                raise LeaderStoppedError(text) from error
            failure = f"{label(self.rank, self.num_ranks)} {message['what']}: {text}"
            raise profile_error(failure) from error

    def finish(self, result: Any) -> None:
        """Sets the result that the other ranks get in the end.

        Args:
            result: anything that JSON can hold.
        """
        self._result = result

    def _answer_of(self, rank: int, num_ranks: int, what: str) -> dict[str, Any]:
        try:
            return self._receive(rank, timedelta(seconds=TIMEOUT_S))
        except RuntimeError as error:
            raise self._explain(num_ranks, what, error, of=rank) from error

    def _explain(self, num_ranks: int, what: str, error: Exception, of: int | None = None) -> Exception:
        """The error to raise, with the rank where it began."""
        if not _is_of_others(error):
            return profile_error(f"{label(0, num_ranks)} {what}: {type(error).__name__}: {first_line(error)}")
        words: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _WORD_S
        while len(words) < num_ranks - 1 and time.monotonic() < deadline:
            words |= self._words(set(range(1, num_ranks)) - set(words))
            if any(not word["is_echo"] for word in words.values()):
                break
            time.sleep(0.02)
        for rank, word in sorted(words.items()):
            if not word["is_echo"]:
                return profile_error(f"{label(rank, num_ranks)} {what}: {word['text']}")
        silent = [rank for rank in range(1, num_ranks) if rank not in words]
        lost = [of] if of is not None and of in silent else silent
        named = ", ".join(label(rank, num_ranks) for rank in lost) or "a rank"
        return profile_error(f"{named} {what}: ended or does not answer ({first_line(error)})")

    def _leave_word(self, word: dict[str, Any]) -> None:
        _store().set(f"dflop failure {self.rank}", json.dumps(word))

    def _words(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        store = _store()
        keys = {rank: f"dflop failure {rank}" for rank in ranks}
        return {rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])}

    def _send_or_name(self, rank: int, message: dict[str, Any], num_ranks: int) -> None:
        try:
            self._send(rank, message, TIMEOUT_S)
        except RuntimeError as error:
            raise self._explain(num_ranks, message["what"], error, of=rank) from error

    def _send(self, rank: int, message: dict[str, Any], timeout_s: float) -> None:
        text = json.dumps(message).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for part in (torch.tensor([len(text)]), data):
            work = dist.isend(part, rank, group=self._messages)
            assert work is not None, "this rank is in the group"
            work.wait(timedelta(seconds=timeout_s))

    def _receive(self, rank: int, timeout: timedelta) -> dict[str, Any]:
        def receive(tensor: torch.Tensor) -> torch.Tensor:
            work = dist.irecv(tensor, rank, group=self._messages)
            assert work is not None, "this rank is in the group"
            work.wait(timeout)
            return tensor

        size = int(receive(torch.zeros(1, dtype=torch.int64)))
        return json.loads(receive(torch.zeros(size, dtype=torch.uint8)).numpy().tobytes())


def label(rank: int, num_ranks: int) -> str:
    """What errors call a rank among those that do an act.

    Args:
        rank: from 0.
        num_ranks: ranks that do it.

    Returns:
        As in `[tp 1/2]`.
    """
    return f"[tp {rank}/{num_ranks}]"


def first_line(error: BaseException) -> str:
    """What an error says, without the stack that PyTorch adds.

    Args:
        error: any.

    Returns:
        One line; empty if it says nothing.
    """
    return str(error).partition("\n")[0]


def _is_of_others(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or does not answer."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _store() -> Any:
    # Under torchrun this is the store of its agent, which outlives the ranks. There is no public function.
    return dist.distributed_c10d._get_default_store()
