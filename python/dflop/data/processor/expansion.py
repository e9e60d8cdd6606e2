"""What a processor writes in place of a placeholder, as words and runs of feature tokens.

text with a placeholder -> processor -> the text that it hands to its tokenizer
    -> between the marks: `<img>`, 64 x `<patch>`, `</img>` -> ["<img>", 64, "</img>"]
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BEFORE, AFTER = "dflopbegin", "dflopend"
"""Words around a placeholder: what the processor writes stands between them."""


@contextmanager
def heard(tokenizer: Any) -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Listens to a tokenizer: the processor's own words, whatever version and class it is.

    Args:
        tokenizer: Of the processor.

    Yields:
        (text, keywords) of each call so far.
    """
    calls: list[tuple[Any, dict[str, Any]]] = []
    own: Any = type(tokenizer)

    def call(self: Any, text: Any = None, *rest: Any, **keywords: Any) -> Any:
        calls.append((text, keywords))
        return own.__call__(self, text, *rest, **keywords)

    # Python looks for `__call__` in the class. Its name stays: processors check it.
    tokenizer.__class__ = type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__})
    try:
        yield calls
    finally:
        tokenizer.__class__ = own


def asking(placeholder: str, count: int) -> str:
    """The text that a processor is asked with.

    Args:
        placeholder: Of one medium.
        count: Media.

    Returns:
        So many placeholders, each between two marks.
    """
    return f"{BEFORE}{placeholder}{AFTER}" * count


def between(text: str, count: int) -> list[str]:
    """What stands between the marks.

    Args:
        text: As the processor wrote it.
        count: Media.

    Returns:
        What it wrote for each medium.

    Raises:
        RuntimeError: It moved or changed the words around.
    """
    _, *pieces = text.split(BEFORE)
    parted = [piece.split(AFTER) for piece in pieces]
    if len(parted) != count or any(len(part) != 2 for part in parted) or any(p[1] for p in parted[:-1]):
        message = "it changes the words around a medium, which a shape rule cannot follow"
        raise RuntimeError(message)
    return [part[0] for part in parted]


def pieces_of(written: str, feature_token: str) -> list[str | int]:
    """Words and numbers of feature tokens.

    Args:
        written: What the processor wrote for a medium.
        feature_token: The token of one feature.

    Returns:
        Texts, and how often the feature token stands there in a row, in order.
    """
    pieces: list[str | int] = []
    run = 0
    for index, words in enumerate(written.split(feature_token)):
        run += index > 0
        if words:
            pieces += [run, words] if run else [words]
            run = 0
    return [*pieces, run] if run else pieces


def check_tokens(
    tokenizer: Any, keywords: dict[str, Any], text: str, ids: Sequence[int], feature: tuple[str, int]
) -> None:
    """Checks that words and runs tokenise to the processor's own ids.

    dflop tokenises the text with one feature token a run, and repeats the token then.

    Args:
        tokenizer: Of the processor.
        keywords: With which the processor called it.
        text: As the processor wrote it.
        ids: What the processor gave.
        feature: The token of one feature and its id.

    Raises:
        RuntimeError: The ids are others.
    """
    token, feature_id = feature
    short = "".join(token if isinstance(piece, int) else piece for piece in pieces_of(text, token))
    keywords = {name: value for name, value in keywords.items() if name == "add_special_tokens"}
    ours = list(tokenizer(short, **keywords)["input_ids"])
    theirs: list[int] = []
    for token_id, run in itertools.groupby(ids):
        theirs += [token_id] if token_id == feature_id else list(run)
    if ours != theirs:
        at = next((k for k, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
        message = (
            f"its ids are not those of its words: {len(theirs)} and {len(ours)} tokens where a run of "
            f"`{token}` is one, the first difference is at token {at}"
        )
        raise RuntimeError(message)
