"""Samples that TRL's `GRPOTrainer` or `RLOOTrainer` generated: cut out of a batch, sent, joined again."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from dflop.models.sums import Sums, send_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[str, Any]
"""One sample: tensors and numbers by TRL's names, without padding."""

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


class _Joined(tuple[torch.Tensor]):
    """A tensor of which a sample has several rows or none, such as its patches."""

    __slots__ = ()


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
                row[name] = _Joined((value,))
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
        elif isinstance(values[0], (torch.Tensor, _Joined)):
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


def _media(name: str, values: list[torch.Tensor | _Joined | None]) -> torch.Tensor | None:
    """Behind each other where samples have rows of their own (None: nobody has any); else one a sample."""
    present = [value for value in values if value is not None]
    if all(isinstance(value, _Joined) for value in present):
        tensors = [value[0] for value in present if len(value[0])]
        return torch.cat(_even(tensors, first=1)) if tensors else None
    # Where each sample of a rank has one picture, TRL has split them one by one; else a sample is one row.
    rows = [
        value[0].squeeze(0) if isinstance(value, _Joined) and len(value[0]) == 1 else value
        for value in values
    ]
    known = next(row for row in rows if isinstance(row, torch.Tensor))
    if any(row is not None and (isinstance(row, _Joined) or row.dim() != known.dim()) for row in rows):
        message = f"ranks have `{name}` in different forms: one row a sample, and several"
        raise ValueError(message)
    of_samples = [torch.zeros_like(known) if row is None else row for row in rows]
    return torch.stack(_even(of_samples, first=0))  # type: ignore[arg-type]


def _even(values: list[torch.Tensor], first: int) -> list[torch.Tensor]:
    """Zeros behind, from dimension `first` on, until all are equally large: each rank pads to its largest."""
    most = [max(sizes) for sizes in zip(*[value.shape for value in values], strict=True)]
    found = []
    for value in values:
        missing = [large - size for size, large in zip(value.shape, most, strict=True)]
        missing[:first] = [0] * first
        behind = [number for size in reversed(missing) for number in (0, size)]
        found.append(torch.nn.functional.pad(value, behind) if any(missing) else value)
    return found


def exchange(
    rows: Sequence[Row], targets: Sequence[Sequence[int]], rank: int, device: torch.device
) -> list[Row]:
    """Samples of all ranks for this one; every rank calls it.

    Args:
        rows: samples of this rank.
        targets: of each rank, where each of its samples goes.
        rank: this one.
        device: of the tensors.

    Returns:
        Those that come here: those of the first rank first, each rank's in their order.
    """
    num_ranks = len(targets)
    if num_ranks == 1:
        return list(rows)
    packed = [
        _packed(row, device) if target != rank else torch.empty(0, dtype=torch.uint8, device=device)
        for row, target in zip(rows, targets[rank], strict=True)
    ]
    most = max(map(len, targets))
    own = torch.zeros(1, most, dtype=torch.int64, device=device)
    own[0, : len(rows)] = torch.tensor([len(one) for one in packed])
    sizes = Sums(distributed.group.WORLD).gather(own).tolist()
    order = sorted(range(len(rows)), key=targets[rank].__getitem__)
    sent = [0] * num_ranks
    for one, target in zip(packed, targets[rank], strict=True):
        sent[target] += len(one)
    coming = [
        [size for size, target in zip(sizes[source], targets[source], strict=False) if target == rank]
        for source in range(num_ranks)
    ]
    leaving = torch.cat([packed[position] for position in order])
    # Pictures take much memory, and their samples hold them already.
    del packed
    arrived = send_rows(leaving, sent, list(map(sum, coming)), None)
    del leaving
    found: list[Row] = []
    start = 0
    for source, lengths in enumerate(coming):
        if source == rank:
            found += [row for row, target in zip(rows, targets[rank], strict=True) if target == rank]
            continue
        for length in lengths:
            found.append(_unpacked(arrived[start : start + length]))
            start += length
    return found


def _packed(row: Row, device: torch.device) -> torch.Tensor:
    """A sample as bytes: how long the header is, the header, the tensors behind each other."""
    header: list[tuple[str, Any]] = []
    tensors = []
    for name, value in row.items():
        if isinstance(value, (torch.Tensor, _Joined)):
            tensor = value if isinstance(value, torch.Tensor) else value[0]
            header.append((name, (isinstance(value, _Joined), tuple(tensor.shape), tensor.dtype)))
            tensors.append(tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8))
        else:
            header.append((name, value))
    text = pickle.dumps(header)
    start = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([start.to(device), *tensors])


def _unpacked(sent: torch.Tensor) -> Row:
    size = int.from_bytes(bytes(sent[:8].tolist()), "little")
    row: Row = {}
    start = 8 + size
    for name, value in pickle.loads(bytes(sent[8:start].tolist())):  # noqa: S301: of a rank of this run
        if not isinstance(value, tuple):
            row[name] = value
            continue
        is_joined, shape, dtype = value
        length = torch.Size(shape).numel() * dtype.itemsize
        # A copy begins where its numbers may.
        tensor = sent[start : start + length].clone().view(dtype).view(shape)
        row[name] = _Joined((tensor,)) if is_joined else tensor
        start += length
    return row
