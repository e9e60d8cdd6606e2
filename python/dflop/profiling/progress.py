"""How far the measuring is, for people."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class Progress(Protocol):
    """Told about each measured point."""

    def __call__(self, ratio: float, label: str) -> None:
        """Shows how far it is.

        Args:
            ratio: from 0 to 1; never falls.
            label: what was just measured, for example `llm_layer 256`.
        """
        ...


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A bar on stderr; nothing where stderr is no terminal.

    Args:
        title: stands before the bar.

    Yields:
        What to call with the progress.
    """
    from tqdm import tqdm

    form = "{desc} {percentage:3.0f}% |{bar:30}| {elapsed}{postfix}"
    # With `disable=None`, tqdm itself checks whether stderr is a terminal.
    with tqdm(total=100.0, desc=title, disable=None, leave=False, bar_format=form) as bar:

        def show(ratio: float, label: str) -> None:
            bar.set_postfix_str(label, refresh=False)
            bar.update(100.0 * ratio - bar.n)

        yield show
