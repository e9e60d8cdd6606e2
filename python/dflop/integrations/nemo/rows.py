"""The rows of Automodel's datasets as records that `costs_of_rows` counts.

conversation with parts --> {"messages": ...}
picture in memory       --> a blank one of its size, as the size alone counts
"""

from __future__ import annotations

import base64
import io
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable

_HINT = (
    "give `dflop.data_profile`: the path of a profile that `dflop profile data` makes of the same rows in "
    "the same order"
)
_MEDIA = ("image", "video", "audio")
_SAME = {"type", *_MEDIA, "text"}
"""What a part may hold without a size of another rule."""


def records_of(dataset: Any, with_blank_picture: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """A record of each row of a dataset, in its order.

    Args:
        dataset: as Automodel's loader holds it.
        with_blank_picture: adds Automodel's blank picture to a conversation.

    Returns:
        Records with `input_ids`, or with `messages` whose media are paths, URLs, or blank pictures.

    Raises:
        ValueError: a row of another form, or a medium in memory whose size nobody can say.
    """
    # The wrapper that tokenizes row by row; it decodes all media of a row that it gives.
    held = getattr(dataset, "dataset", dataset)
    is_filled = bool(getattr(dataset, "inject_fake_images", False))
    found = []
    for position in range(len(held)):
        row = held[position]
        if isinstance(row, dict) and "input_ids" in row:
            found.append({"input_ids": row["input_ids"]})
            continue
        conversation = row.get("conversation") if isinstance(row, dict) else None
        if not conversation:
            message = (
                f"row {position} of the dataset has no `conversation` and no `input_ids`, must have one of "
                f"them to be counted; {_HINT}"
            )
            raise ValueError(message)
        if is_filled and not _has_media(conversation):
            conversation = with_blank_picture(conversation)
        found.append({"messages": [_turn(turn, position) for turn in conversation]})
    return found


def _has_media(conversation: Any) -> bool:
    """As Automodel looks for them before it adds a picture."""
    parts = [part for turn in conversation for part in _parts(turn)]
    return any(part.get("type") in _MEDIA[:2] or "image" in part or "video" in part for part in parts)


def _parts(turn: dict[str, Any]) -> list[dict[str, Any]]:
    content = turn.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _turn(turn: dict[str, Any], position: int) -> dict[str, Any]:
    content = turn.get("content")
    if isinstance(content, list):
        content = [_part(part, position) for part in content]
    return {"role": turn.get("role"), "content": content}


def _part(part: Any, position: int) -> Any:
    if not isinstance(part, dict):
        return part
    kind = next((kind for kind in _MEDIA if kind in part), None)
    if kind is None:
        return part
    medium = part[kind]
    if others := sorted(part.keys() - _SAME):
        message = (
            f"row {position} of the dataset has {_named(kind)} with `{others[0]}`, must have none: its size "
            f"is then another than that of the file; {_HINT}"
        )
        raise ValueError(message)
    if isinstance(medium, Image.Image):
        medium = _blank(medium.size)
    elif not isinstance(medium, str):
        message = (
            f"row {position} of the dataset has {_named(kind)} as a `{type(medium).__name__}`, must be a path"
            f"{' or a picture of PIL' if kind == 'image' else ''} to be counted; {_HINT}"
        )
        raise ValueError(message)
    return {"type": kind, kind: medium}


def _named(kind: str) -> str:
    return "a video" if kind == "video" else f"an {kind}"


@lru_cache(maxsize=4096)
def _blank(size: tuple[int, int]) -> str:
    """A picture of this size in a URL: black, as its pixels are not looked at."""
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
