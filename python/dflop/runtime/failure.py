"""A rank that fails says who it is, at which step and action."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dflop._native import Error
from dflop.models.errors import hinted

if TYPE_CHECKING:
    from collections.abc import Iterator

HOPELESS = "is_hopeless"
"""Field of what a rank tells the agent: true where starting the ranks again is of no use."""


IS_OF_OTHER = "is_of_other"
"""Field of what a rank tells the agent: true where it only waited for another, which is at fault."""
NAMES_CAUSE = "DFLOP_AGENT_NAMES_CAUSE"
"""Variable of the ranks of an agent of ours: it says in the end what the cause was."""


class RankError(RuntimeError):
    """An error that stops a rank and that its message explains: no traceback is shown."""

    def __init__(
        self, message: str, hint: str | None = None, *, is_of_all: bool = False, is_of_other: bool = False
    ) -> None:
        """Keeps the hint as a note of the exception.

        Args:
            message: What went wrong: value, rule.
            hint: What to do about it.
            is_of_all: Whether all ranks raise it at the same place; then only one of them prints it.
            is_of_other: Whether another rank is at fault, for which this one has waited.
        """
        super().__init__(message)
        self.is_of_all = is_of_all
        self.is_of_other = is_of_other
        if hint is not None:
            hinted(self, hint)


@contextmanager
def talking(what: str) -> Iterator[None]:
    """Around a call that waits for other ranks: what it raises becomes a `RankError`.

    Args:
        what: What the ranks were doing together, as in "sum gradients".

    Raises:
        RankError: Another rank has gone, or did not come within the timeout.
    """
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        # gloo puts a line of its source code before the cause, and advice after it: both are cut off.
        cause = re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
        message = f"cannot {what}, another rank stopped or is too slow ({cause})"
        raise RankError(message, is_of_other=True) from error


def describe(coordinates: str, step: int | None, action: str | None, cause: BaseException) -> str:
    """One line, as in "[encoder dp 1/2] step 37, action 0F5: cause".

    Args:
        coordinates: The rank in words, without brackets.
        step: The step, where it had begun.
        action: The action, where one was running.
        cause: What went wrong.

    Returns:
        The line, without an end of line.
    """
    places = [] if step is None else [f"step {step}"]
    places += [] if action is None else [f"action {action}"]
    text = str(cause) or type(cause).__name__
    return f"[{coordinates}] {', '.join(places)}{': ' if places else ''}{text}"


def tell_agent(line: str, error: Exception) -> None:
    """Leaves word for torchrun's agent, in the file that it names: what went wrong, and whether to try again.

    Args:
        line: For people.
        error: What was raised.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    about = {"py_callstack": "", "timestamp": str(int(time.time())), HOPELESS: is_hopeless(error)}
    about[IS_OF_OTHER] = isinstance(error, RankError) and error.is_of_other
    # The disk may be full, and that may be what went wrong. The agent then still has the exit status.
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": about}}))


def is_hopeless(error: Exception) -> bool:
    """Whether restarted ranks would fail again: with a foreseen error that is not another rank's fault."""
    return isinstance(error, Error) or (isinstance(error, RankError) and not error.is_of_other)


def complain(line: str, error: Exception) -> None:
    """Writes one line to stderr, with a traceback below it where the error is not one that we foresaw.

    Args:
        line: For people, as `describe` gives it.
        error: What was raised; its notes are shown as hints.
    """
    # Of a rank that is killed all others say that they wait for it. The cause alone is called an error.
    is_effect = isinstance(error, RankError) and error.is_of_other and NAMES_CAUSE in os.environ
    sys.stderr.write(f"\n{'note' if is_effect else 'error'}: {line}\n")
    for note in getattr(error, "__notes__", []):
        sys.stderr.write(f"hint: {note}\n")
    if not isinstance(error, (Error, RankError, OSError)):
        sys.stderr.write("".join(traceback.format_exception(error)))
    sys.stderr.flush()
