"""Parts of parameters in a checkpoint: what tensor parallelism has cut is saved as parts of the whole.

    layers.0.q_proj.weight [48, 48] on 2 ranks   -> `...@0`: [24, 48], its rows 0 to 24 of the whole; 24 to 48
    the same, its replicas' shards (ZeRO)        -> each the rows that it has of its rank's rows
    qkv.weight, three maps behind each other     -> `...@0`, `...@1`, `...@2`: a run of rows each

So a checkpoint has whole tensors by their own names, whatever wrote it, and is read by ranks of any layout.
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
class Part:
    """Where a tensor of this rank stands in a whole one."""

    name: str
    """Of the whole one."""
    chunk: ChunkStorageMetadata
    shape: torch.Size
    """Of the whole one."""


def parts_of(name: str, tensor: torch.Tensor, part: Slice) -> dict[str, tuple[torch.Tensor, Part]]:
    """What a rank has of a tensor, in rectangles of the whole one.

    Args:
        name: of the tensor.
        tensor: this rank's slice, or its shard of that.
        part: which slice it is.

    Returns:
        By a name of its own: a view, and where it stands. None where the rank's shard is empty.
    """
    rows = range(tensor.shape[0])
    values = tensor
    if isinstance(tensor, DTensor):
        sharded: Any = tensor
        chunk = sharded.__create_chunk_list__()[0]
        rows = range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        values = tensor.to_local()
    found: dict[str, tuple[torch.Tensor, Part]] = {}
    position = 0
    for index, (first, count) in enumerate(part.runs):
        offsets = [0] * tensor.dim()
        offsets[0] = rows.start
        view = values
        if part.dim == 0:
            start, stop = max(rows.start, position), min(rows.stop, position + count)
            view = values[start - rows.start : max(start, stop) - rows.start]
            offsets[0] = first + start - position
        else:
            view = values.narrow(part.dim, position, count)
            offsets[part.dim] = first
        position += count
        if view.numel() > 0:
            chunk = ChunkStorageMetadata(torch.Size(offsets), view.shape)
            found[f"{name}@{index}"] = (view, Part(name, chunk, torch.Size(part.shape)))
    return found


class PartSavePlanner(DefaultSavePlanner):
    """Writes tensors that are parts as such."""

    def __init__(self, places: Mapping[str, Part]) -> None:
        """As DCP's own.

        Args:
            places: Of the tensors that are parts, by their names in the state.
        """
        super().__init__()
        self._places = places
        self._keys = {(part.name, tuple(part.chunk.offsets)): key for key, part in places.items()}

    def create_local_plan(self) -> SavePlan:
        """What this rank can write."""
        plan = super().create_local_plan()
        items = [self._placed(item) for item in plan.items]
        names = {item.index.fqn: (item.index.fqn,) for item in items}
        self.plan = dataclasses.replace(plan, items=items, planner_data=names)
        return self.plan

    def _placed(self, item: WriteItem) -> WriteItem:
        part = self._places.get(item.index.fqn)
        if part is None or item.tensor_data is None:
            return item
        return dataclasses.replace(
            item,
            index=MetadataIndex(part.name, part.chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(part.chunk, item.tensor_data.properties, part.shape),
        )

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of an item."""
        key = None if index.offset is None else self._keys.get((index.fqn, tuple(index.offset)))
        return super().lookup_object(index) if key is None else self.state_dict[key]


class PartLoadPlanner(DefaultLoadPlanner):
    """Reads of whole tensors what this rank has of them."""

    def __init__(self, places: Mapping[str, Part]) -> None:
        """As DCP's own.

        Args:
            places: Of the tensors that are parts, by their names in the state.
        """
        super().__init__()
        self._places = places

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads.

        Returns:
            The plan: tensors that are whole as DCP reads them, and the parts of others.

        Raises:
            ValueError: A tensor has another shape in the checkpoint.
        """
        assert self.metadata is not None, "`set_up_planner` comes before"
        whole = {key: value for key, value in self.state_dict.items() if key not in self._places}
        plan = create_default_local_load_plan(whole, self.metadata)
        items = list(plan.items)
        for key, part in self._places.items():
            held: Any = self.metadata.state_dict_metadata[part.name]
            if held.size != part.shape:
                message = f"Size mismatch between saved {held.size} and current: {part.shape} for {part.name}"
                raise ValueError(message)
            for item in create_read_items_for_chunk_list(part.name, held, [part.chunk]):
                items.append(dataclasses.replace(item, dest_index=MetadataIndex(key)))
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where an item goes."""
        return self.state_dict[index.fqn] if index.fqn in self._places else super().lookup_tensor(index)
