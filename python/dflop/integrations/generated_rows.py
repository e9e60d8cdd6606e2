"""Samples that TRL's `GRPOTrainer` or `RLOOTrainer` generated: cut out of a batch, joined again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflop.integrations.sent_rows import Joined, even

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.integrations.sent_rows import Row

_OF_PROMPT = ("prompt_ids", "prompt_mask")
# With a value a token, or one a sample.
_OF_COMPLETION = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "advantages",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
_OF_BOTH = ("token_type_ids", "mm_token_type_ids")
_COUNTS = ("num_images", "num_tiles")


def cut(batch: dict[str, Any]) -> list[Row]:
    """The samples of a microbatch.

    Args:
        batch: of the trainer's buffer: prompts [M, P], padded on the left, completions [M, C], padded on the
            right, and what belongs to each sample. What belongs to all (of no dimension) is left out.

    Returns:
        Its samples. Of a completion that TRL has masked as a whole, the first token stays.

    Raises:
        ValueError: it holds something that is neither of each sample nor of all.
    """
    from trl.trainer.utils import split_pixel_values_by_grid

    prompt_mask, completion_mask = batch["prompt_mask"], batch["completion_mask"]
    num_rows, prompt_width = prompt_mask.shape
    width = completion_mask.shape[1]
    begins = (prompt_width - prompt_mask.ne(0).sum(dim=1)).tolist()
    places = torch.arange(1, width + 1, device=completion_mask.device)
    ends = (completion_mask.ne(0) * places).amax(dim=1).clamp(min=1).tolist()
    rows: list[Row] = [{} for _ in range(num_rows)]
    for name, values in split_pixel_values_by_grid(batch).items():
        if values is None or (isinstance(values, torch.Tensor) and values.dim() == 0):
            continue
        if not isinstance(values, (torch.Tensor, list)) or len(values) != num_rows:
            found = type(values).__name__
            found = f"of length {len(values)}" if hasattr(values, "__len__") else f"a `{found}`"
            message = (
                f"`{name}` of a microbatch of {num_rows} samples is {found}: what is not of each sample "
                "cannot travel with it"
            )
            raise ValueError(message)
        is_wide = isinstance(values, torch.Tensor) and values.dim() == 2 and values.shape[1] == width
        for row, value, begin, end in zip(rows, values, begins, ends, strict=True):
            if name in _OF_PROMPT:
                row[name] = value[begin:]
            elif name in _OF_COMPLETION and is_wide:
                row[name] = value[:end]
            elif name in _OF_BOTH:
                row[name] = value[begin : prompt_width + end]
            elif isinstance(values, list) and isinstance(value, torch.Tensor):
                row[name] = Joined((value,))
            else:
                row[name] = value
    return rows


def join(rows: Sequence[Row], padding_id: int, multiple_of: int | None = None) -> dict[str, Any]:
    """A microbatch of these samples, padded to the longest prompt and to the longest completion.

    Args:
        rows: of `cut`, on whichever rank.
        padding_id: the token of padding.
        multiple_of: what widths are multiples of.

    Returns:
        As the trainer's buffer has it, without what belongs to all.
    """
    step = multiple_of or 1
    prompt_width = -(-max(len(row["prompt_ids"]) for row in rows) // step) * step
    width = -(-max(len(row["completion_ids"]) for row in rows) // step) * step
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name in _COUNTS:
            found[name] = [row[name] if name in row else _count(name, row) for row in rows]
        elif name in _OF_BOTH:
            # Zeros where a rank's samples are of text alone.
            kinds = [
                row[name]
                if name in row
                else values[0].new_zeros(len(row["prompt_ids"]) + len(row["completion_ids"]))
                for row in rows
            ]
            lengths = [len(row["prompt_ids"]) for row in rows]
            left = [kind[:length] for kind, length in zip(kinds, lengths, strict=True)]
            right = [kind[length:] for kind, length in zip(kinds, lengths, strict=True)]
            found[name] = torch.cat([_left(left, prompt_width), _right(right, width)], dim=1)
        elif name in _OF_PROMPT:
            found[name] = _left(values, prompt_width, padding_id if name == "prompt_ids" else 0)
        elif name in _OF_COMPLETION and values[0].dim() == 1:
            found[name] = _of_completions(name, rows, width, padding_id)
        elif isinstance(values[0], (torch.Tensor, Joined)):
            media = _media(name, [row.get(name) for row in rows])
            if media is not None:
                found[name] = media
        else:
            found[name] = values
    return found


def _count(name: str, row: Row) -> int:
    """Of a rank that told none: no pictures, or as many tiles as pictures."""
    return len(row["pixel_values"][0]) if name == "num_tiles" and "pixel_values" in row else 0


def _of_completions(name: str, rows: Sequence[Row], width: int, padding_id: int) -> torch.Tensor:
    """Values of each token of the completions, or one a sample."""
    # As TRL pads: a ratio of 1 changes nothing, and a mask of tools has ones where there are none.
    is_one = name in ("tool_mask", "importance_sampling_ratio")
    fill = padding_id if name == "completion_ids" else int(is_one)
    lengths = [len(row["completion_ids"]) for row in rows]
    values = [
        torch.ones_like(row["completion_mask"]) if name == "tool_mask" and name not in row else row.get(name)
        for row in rows
    ]
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        message = f"`{name}` is there for samples of some ranks, must be there for all or none"
        raise ValueError(message)
    sizes = [len(value) for value in present]
    if sizes == lengths:
        return _right(present, width, fill)
    if set(sizes) != {1}:
        message = (
            f"`{name}` has {sizes} values for completions of {lengths} tokens, must have as many, or one"
        )
        raise ValueError(message)
    return torch.stack(present)


def _left(values: Sequence[torch.Tensor], width: int, fill: int = 0) -> torch.Tensor:
    return torch.stack([torch.nn.functional.pad(v, (width - len(v), 0), value=fill) for v in values])


def _right(values: Sequence[torch.Tensor], width: int, fill: int = 0) -> torch.Tensor:
    return torch.stack([torch.nn.functional.pad(v, (0, width - len(v)), value=fill) for v in values])


def _media(name: str, values: list[torch.Tensor | Joined | None]) -> torch.Tensor | None:
    """Behind each other where samples have rows of their own (None: nobody has any); else one a sample."""
    present = [value for value in values if value is not None]
    if all(isinstance(value, Joined) for value in present):
        tensors = [value[0] for value in present if len(value[0])]
        return torch.cat(even(tensors, first=1)) if tensors else None
    # Where each sample of a rank has one picture, TRL has split them one by one; else a sample is one row.
    rows = [
        value[0].squeeze(0) if isinstance(value, Joined) and len(value[0]) == 1 else value for value in values
    ]
    known = next(row for row in rows if isinstance(row, torch.Tensor))
    if any(row is not None and (isinstance(row, Joined) or row.dim() != known.dim()) for row in rows):
        message = f"ranks have `{name}` in different forms: one row a sample, and several"
        raise ValueError(message)
    of_samples = [torch.zeros_like(known) if row is None else row for row in rows]
    return torch.stack(even(of_samples, first=0))  # type: ignore[arg-type]
