"""Parameters that tensor parallelism has cut, in a checkpoint: saved as rectangles of the whole tensors.

    layers.0.q_proj.weight [48, 48] on 2 ranks   -> `...@0` [24, 48]: rows 0 to 24, on the other 24 to 48
    the same, also sharded over replicas (ZeRO)  -> each replica writes its part of these rows
    qkv.weight, three maps one after the other   -> `...@0`, `...@1`, `...@2`: a run of rows of each map

So a checkpoint holds whole tensors under their own names, whatever layout wrote it; any layout can read it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem

    from dflop.models.tensor import Slice


@dataclass(frozen=True)
class Rectangle:
    """Where a part of a tensor, held by this rank, stands in the whole tensor."""

    name: str
    """Name of the whole tensor."""
    box: ChunkStorageMetadata
    """Offsets of the part in the whole tensor, and its sizes."""
    shape: torch.Size
    """Tensor shape of the whole tensor."""


def rectangles_of(name: str, tensor: torch.Tensor, cut: Slice) -> dict[str, tuple[torch.Tensor, Rectangle]]:
    """The part of a tensor that a rank has, as rectangles of the whole tensor.

    Args:
        name: of the tensor.
        tensor: this rank's slice, or its shard of that slice (a DTensor).
        cut: which part of the whole tensor the slice is.

    Returns:
        By names such as `NAME@0`: a view of `tensor`, and where it stands. Empty where the shard is empty.
    """
    rows = range(tensor.shape[0])
    values = tensor
    if isinstance(tensor, DTensor):
        sharded: Any = tensor
        box = sharded.__create_chunk_list__()[0]
        rows = range(box.offsets[0], box.offsets[0] + box.sizes[0])
        values = tensor.to_local()
    found: dict[str, tuple[torch.Tensor, Rectangle]] = {}
    position = 0
    for index, (first, count) in enumerate(cut.runs):
        offsets = [0] * tensor.dim()
        offsets[0] = rows.start
        view = values
        if cut.dim == 0:
            start, stop = max(rows.start, position), min(rows.stop, position + count)
            view = values[start - rows.start : max(start, stop) - rows.start]
            offsets[0] = first + start - position
        else:
            view = values.narrow(cut.dim, position, count)
            offsets[cut.dim] = first
        position += count
        if view.numel() > 0:
            box = ChunkStorageMetadata(torch.Size(offsets), view.shape)
            found[f"{name}@{index}"] = (view, Rectangle(name, box, torch.Size(cut.shape)))
    return found


class RectangleSavePlanner(DefaultSavePlanner):
    """DCP's planner, which here writes some tensors as rectangles of whole ones."""

    def __init__(self, rectangles: Mapping[str, Rectangle]) -> None:
        """As DCP's own.

        Args:
            rectangles: Of the tensors that are rectangles, by their names in the state.
        """
        super().__init__()
        self._rectangles = rectangles
        self._keys = {
            (rectangle.name, tuple(rectangle.box.offsets)): key for key, rectangle in rectangles.items()
        }

    def create_local_plan(self) -> SavePlan:
        """What this rank can write, for DCP."""
        plan = super().create_local_plan()
        items = [self._as_rectangle(item) for item in plan.items]
        names = {item.index.fqn: (item.index.fqn,) for item in items}
        self.plan = dataclasses.replace(plan, items=items, planner_data=names)
        return self.plan

    def _as_rectangle(self, item: WriteItem) -> WriteItem:
        rectangle = self._rectangles.get(item.index.fqn)
        if rectangle is None or item.tensor_data is None:
            return item
        return dataclasses.replace(
            item,
            index=MetadataIndex(rectangle.name, rectangle.box.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(rectangle.box, item.tensor_data.properties, rectangle.shape),
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor that an item of the plan writes."""
        key = None if index.offset is None else self._keys.get((index.fqn, tuple(index.offset)))
        return super().lookup_object(index) if key is None else self.state_dict[key]


class RectangleLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which here reads some tensors as rectangles of whole ones."""

    def __init__(self, rectangles: Mapping[str, Rectangle]) -> None:
        """As DCP's own.

        Args:
            rectangles: Of the tensors that are rectangles, by their names in the state.
        """
        super().__init__()
        self._rectangles = rectangles

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads.

        Returns:
            DCP's plan for tensors that the rank holds whole, and items for the rectangles of the others.

        Raises:
            ValueError: A tensor has another shape in the checkpoint.
        """
        assert self.metadata is not None, "`set_up_planner` comes before"
        whole = {key: value for key, value in self.state_dict.items() if key not in self._rectangles}
        plan = create_default_local_load_plan(whole, self.metadata)
        items = list(plan.items)
        for key, rectangle in self._rectangles.items():
            held: Any = self.metadata.state_dict_metadata[rectangle.name]
            if held.size != rectangle.shape:
                sizes = f"saved {held.size} and current: {rectangle.shape}"
                message = f"Size mismatch between {sizes} for {rectangle.name}"
                raise ValueError(message)
            for item in create_read_items_for_chunk_list(rectangle.name, held, [rectangle.box]):
                items.append(dataclasses.replace(item, dest_index=MetadataIndex(key)))
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor that an item of the plan is read into."""
        return self.state_dict[index.fqn] if index.fqn in self._rectangles else super().lookup_tensor(index)
