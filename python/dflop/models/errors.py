"""Errors and their hints. `ProfileError` is imported late: this file must load without the native module."""

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
    # Python 3.10 has no `add_note`, so the list of notes is set by its name.
    vars(error)["__notes__"] = [hint]
    return error
