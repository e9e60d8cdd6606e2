"""The error of this part, imported late: the native module must not be needed to read these files."""

from __future__ import annotations


def profile_error(message: str) -> Exception:
    """A `dflop.ProfileError` to raise.

    Args:
        message: what failed, value and rule; names the file.

    Returns:
        The exception.
    """
    from dflop._native import ProfileError

    return ProfileError(message)
