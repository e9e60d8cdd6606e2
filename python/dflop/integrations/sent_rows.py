"""Samples that travel between ranks: packed as bytes, sent by one all-to-all, unpacked."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from dflop.models.sums import Sums, send_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

Row = dict[str, Any]
"""One sample: tensors and other things by their names."""


class Joined(tuple[torch.Tensor]):
    """A tensor of which a sample has several rows or none, such as its patches."""

    __slots__ = ()


def even(values: Sequence[torch.Tensor], first: int) -> list[torch.Tensor]:
    """Zeros behind, until all are equally large: each rank, or each sample, is padded to its own largest.

    Args:
        values: of as many dimensions each.
        first: the dimension from which on they are filled up.

    Returns:
        As many.
    """
    most = [max(sizes) for sizes in zip(*[value.shape for value in values], strict=True)]
    found = []
    for value in values:
        missing = [large - size for size, large in zip(value.shape, most, strict=True)]
        missing[:first] = [0] * first
        behind = [number for size in reversed(missing) for number in (0, size)]
        found.append(torch.nn.functional.pad(value, behind) if any(missing) else value)
    return found


class _Header(tuple[bool, tuple[int, ...], torch.dtype]):
    """Stands for a tensor: whether it is `Joined`, its shape, its type."""

    __slots__ = ()


def exchange(
    rows: Sequence[Row],
    targets: Sequence[Sequence[int]],
    rank: int,
    device: torch.device,
    lands: torch.device | None = None,
    group: ProcessGroup | None = None,
) -> list[Row]:
    """Samples of all ranks for this one; every rank calls it.

    Args:
        rows: samples of this rank.
        targets: of each rank, where each of its samples goes.
        rank: this one.
        device: through which tensors travel.
        lands: where the tensors of samples that arrive are; None: there.
        group: the ranks; None: all there are.

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
    sizes = Sums(group or distributed.group.WORLD).gather(own).tolist()
    order = sorted(range(len(rows)), key=targets[rank].__getitem__)
    sent = [0] * num_ranks
    for one, target in zip(packed, targets[rank], strict=True):
        sent[target] += len(one)
    coming = [
        [size for size, target in zip(sizes[source], targets[source], strict=False) if target == rank]
        for source in range(num_ranks)
    ]
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    leaving = torch.cat([nothing, *(packed[position] for position in order)])
    # Pictures take much memory, and their samples hold them already.
    del packed
    arrived = send_rows(leaving, sent, list(map(sum, coming)), group).to(lands)
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


def own(value: Any) -> Any:
    """A thing that can be pickled: a tensor in it that is a view would take with it all that it is a view of.

    Args:
        value: of a sample; lists, tuples and dictionaries are looked through.

    Returns:
        The same, with copies of such tensors.
    """
    if isinstance(value, torch.Tensor):
        is_view = value.untyped_storage().nbytes() > value.numel() * value.element_size()
        return value.detach().clone() if is_view else value.detach()
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(own(one) for one in value)
    if type(value) is dict:
        return {name: own(one) for name, one in value.items()}
    return value


def _bytes(sent: torch.Tensor) -> bytes:
    return sent.cpu().numpy().tobytes()


def _packed(row: Row, device: torch.device) -> torch.Tensor:
    """A sample as bytes: how long the header is, the header, the tensors behind each other."""
    header: list[tuple[str, Any]] = []
    tensors = []
    for name, value in row.items():
        if isinstance(value, (torch.Tensor, Joined)):
            tensor = value if isinstance(value, torch.Tensor) else value[0]
            header.append((name, _Header((isinstance(value, Joined), tuple(tensor.shape), tensor.dtype))))
            tensors.append(tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8))
        else:
            header.append((name, own(value)))
    text = pickle.dumps(header)
    start = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([start.to(device), *tensors])


def _unpacked(sent: torch.Tensor) -> Row:
    size = int.from_bytes(_bytes(sent[:8]), "little")
    row: Row = {}
    start = 8 + size
    for name, value in pickle.loads(_bytes(sent[8:start])):  # noqa: S301 of a rank of this run
        if not isinstance(value, _Header):
            row[name] = value
            continue
        is_joined, shape, dtype = value
        length = torch.Size(shape).numel() * dtype.itemsize
        # A copy begins where its numbers may.
        tensor = sent[start : start + length].clone().view(dtype).view(shape)
        row[name] = Joined((tensor,)) if is_joined else tensor
        start += length
    return row
