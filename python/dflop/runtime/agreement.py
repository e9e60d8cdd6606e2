"""Before each step all ranks show what they are about to do; if one would do something else, all stop."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflop.runtime.failure import RankError, talking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.runtime.mesh import Mesh

_WIDTH = 512
"""Bytes of a statement on the wire, padded. With equal sizes one collective is enough; else two."""


@dataclass(frozen=True)
class Statement:
    """What one rank is about to do."""

    step: int
    schedule: str
    """Digest of the schedule."""
    samples: str
    """Digest of the sizes of the global batch's samples, by this rank's data profile."""
    num_targets: int
    """Positions with loss on this rank."""
    stop: int
    """Number of the signal that told this process to stop; 0: none did."""
    save_failed: bool = False
    """The checkpoint that this rank was writing has failed."""
    num_bad: int = 0
    """Samples of this rank that cannot be trained."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks know alike before a step."""

    stop: int
    """Number of a signal that told some rank to stop, the largest of several; 0: train on."""
    save_failed: bool
    """The checkpoint under way has failed on some rank."""
    is_bad: bool = False
    """Some rank has samples that cannot be trained. Then nothing else was compared."""


def agree(mesh: Mesh, own: Statement, label_tokens: int) -> Agreement:
    """Compares what the ranks are about to do, and tells whether one wants to stop.

    Every rank must call it before each step. It sends 512 bytes to all ranks and blocks until all have come,
    so it is also the barrier that starts the step.

    Args:
        mesh: This rank's coordinates.
        own: This rank's statement.
        label_tokens: Of the global batch, by the schedule: what the loss will be divided by.

    Returns:
        Whether some rank wants to stop, or failed to save; on every rank alike.

    Raises:
        RankError: Ranks differ in step, schedule or samples, or the label tokens are not those of the
            schedule; on every rank alike, with the ranks and their values.
    """
    encoded = json.dumps(asdict(own)).encode()
    assert len(encoded) <= _WIDTH, "digests have a fixed length"
    payload = torch.zeros(_WIDTH, dtype=torch.uint8)
    payload[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    gathered = [torch.empty_like(payload) for _ in range(mesh.num_ranks)]
    with talking("compare digests"):
        dist.all_gather(gathered, payload, group=mesh.control)
    statements = [Statement(**json.loads(bytes(g.tolist()).rstrip(b"\0"))) for g in gathered]
    stop, save_failed = max(s.stop for s in statements), any(s.save_failed for s in statements)
    if any(s.num_bad for s in statements):
        return Agreement(stop, save_failed, is_bad=True)
    for field in ("step", "schedule", "samples"):
        _check_equal(field, [getattr(s, field) for s in statements])
    num_targets = sum(s.num_targets for s in statements)
    if num_targets != label_tokens:
        message = f"the ranks hold {num_targets} label tokens, the schedule divides by {label_tokens}"
        raise RankError(message)
    return Agreement(stop, save_failed)


def _check_equal(field: str, values: Sequence[object]) -> None:
    ranks: dict[object, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    if len(ranks) > 1:
        who = "; ".join(f"ranks {members}: {value}" for value, members in ranks.items())
        message = f"ranks disagree about the {field} ({who}), must be equal"
        raise RankError(message)
