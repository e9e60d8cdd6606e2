"""All of what ranks hold shards of, to compare it with what one process has."""

from __future__ import annotations

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, Shard


def whole_of(tensors):
    """All of each named tensor, copied. Every rank must ask for the same ones of those that are cut.

    One message with all of them: `DTensor.full_tensor` takes milliseconds for each.
    """
    found, cut = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            assert tensor.placements[-1] == Shard(0), f"{name} is cut otherwise: {tensor.placements}"
            cut.setdefault(tensor.device_mesh, {})[name] = tensor.detach().to_local()
        else:
            found[name] = tensor.detach().clone()
    for mesh, own in cut.items():
        # The last dimension has the shards; one before it, copies.
        parts = [None] * mesh.size(mesh.ndim - 1)
        distributed.all_gather_object(parts, own, group=mesh.get_group(mesh.ndim - 1))
        found |= {name: torch.cat([part[name] for part in parts]) for name in own}
    return {name: found[name] for name in tensors}


def arrays_of(tensors):
    """The same as arrays, which are handed to another process faster."""
    return {name: tensor.numpy() for name, tensor in whole_of(tensors).items()}
