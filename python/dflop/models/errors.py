"""Errors and their hints. Ours is imported late: the native module must not be needed to read these files."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


def profile_error(message: str) -> Exception:
    """A `dflop.ProfileError` to raise.

    Args:
        message: what failed, value and rule; names the file.

    Returns:
        The exception.
    """
    from dflop._native import ProfileError

    return ProfileError(message)


def hinted(error: _Error, hint: str) -> _Error:
    """The error with a hint, which is shown below it.

    Args:
        error: Changed in place.
        hint: What to do about it.

    Returns:
        The error.
    """
    # `add_note` is Python 3.11; 3.10 carries the list all the same.
    vars(error)["__notes__"] = [hint]
    return error
