"""A DataLoader of balanced batches for plain PyTorch: DDP, FSDP2, or one's own loop."""

from __future__ import annotations

from difflib import get_close_matches
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

from torch import distributed
from torch.utils.data import DataLoader

from dflop.data.sampler import BalancedBatchSampler
from dflop.integrations.padded_rows import watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed import ProcessGroup

T = TypeVar("T")

_OF_LOADER = frozenset(
    [
        "collate_fn", "generator", "in_order", "multiprocessing_context", "num_workers", "persistent_workers",
        "pin_memory", "pin_memory_device", "prefetch_factor", "timeout", "worker_init_fn",
    ]
)  # fmt: skip
"""Arguments of a DataLoader that do not choose samples; all others are the sampler's."""


def ranks_of(group: ProcessGroup | None = None) -> tuple[int, int]:
    """How many ranks there are, and which this is; (1, 0) where `torch.distributed` is not used."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1, 0
    return distributed.get_world_size(group), distributed.get_rank(group)


def of_first_rank(make: Callable[[], T], what: str) -> T:
    """What rank 0 makes, on every rank; each calls it.

    Args:
        make: run on rank 0 alone.
        what: that it does, for the other ranks' error.

    Returns:
        What it gave, which is not None.

    Raises:
        ValueError: on the other ranks, where it failed on rank 0; that rank raises its own error.
    """
    num_ranks, rank = ranks_of()
    found: list[Any] = [None]
    failure: BaseException | None = None
    if rank == 0:
        try:
            found = [make()]
        except Exception as error:  # The other ranks wait: they are told first.
            failure = error
    if num_ranks > 1:
        distributed.broadcast_object_list(found, src=0)
    if failure is not None:
        raise failure
    if found[0] is None:
        message = f"rank 0 could not {what}, its error says why"
        raise ValueError(message)
    return found[0]


_CHOOSE_SAMPLES = ("batch_sampler", "sampler")
"""Arguments of a DataLoader that do what dflop does."""


def check_names(options: Iterable[str], others: Iterable[str] = ()) -> None:
    """Refuses options that nobody knows.

    Args:
        options: their names.
        others: that are known beside those of `BalancedBatchSampler`.

    Raises:
        TypeError: one is not known; it says which is like it.
    """
    # The first four are the costs and where the rank stands.
    known = [*list(signature(BalancedBatchSampler).parameters)[4:], *others]
    for name in options:
        if name in _CHOOSE_SAMPLES:
            message = f"`{name}` is given, leave it out: dflop chooses the samples of each batch"
            raise TypeError(message)
        if name not in known:
            like = get_close_matches(name, known, n=1)
            hint = f"did you mean `{like[0]}`?" if like else f"there are {', '.join(sorted(known))}"
            message = f"`{name}` is no option that is known: {hint}"
            raise TypeError(message)


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the DataLoader, and all others: those of `BalancedBatchSampler`."""
    check_names(options, _OF_LOADER)
    of_loader = {name: value for name, value in options.items() if name in _OF_LOADER}
    return of_loader, {name: value for name, value in options.items() if name not in _OF_LOADER}


def check_length(dataset: Any, sampler: BalancedBatchSampler, name: str) -> None:
    """Refuses a dataset that has not an entry for each position that the costs are of.

    A longer dataset would have samples that are never trained, a shorter one would end the epoch with an
    `IndexError`.

    Args:
        dataset: passed over where it does not know its length.
        sampler: whose positions index it.
        name: of the argument that holds the dataset.

    Raises:
        ValueError: the lengths differ.
    """
    try:
        length = len(dataset)
    except TypeError:
        return
    num_costs = int(sampler.state_dict()["num_samples"])
    if length != sampler.num_records:
        num_bad = sampler.num_records - num_costs
        bad = f" and {num_bad} bad ones" if num_bad else ""
        message = f"there are costs of {num_costs} samples{bad}, and `{name}` has {length}, must be equal"
        raise ValueError(message)


def balanced_loader(
    dataset: Any,
    costs: Any,
    batch_size: int,
    *,
    group: ProcessGroup | None = None,
    accumulation: int = 1,
    loader: type[DataLoader[Any]] = DataLoader,
    **options: Any,
) -> DataLoader[Any]:
    """The DataLoader of this rank; its batches are of even work over the ranks, not of even counts.

    Call `loader.batch_sampler.set_epoch(epoch)` before each epoch, keep
    `loader.batch_sampler.state_dict(num_batches=...)` in checkpoints, and take the loss from `token_loss`.

    Args:
        dataset: with positions from 0.
        costs: what `BalancedBatchSampler` takes: pairs (encoder, LLM), shapes, or a data profile's path.
        batch_size: samples of a microbatch, on average.
        group: the data-parallel ranks; None: all.
        accumulation: microbatches of a rank in a step.
        loader: `DataLoader` or one of its kind, as `torchdata.stateful_dataloader.StatefulDataLoader`.
        **options: those of the loader by their names; all others go to `BalancedBatchSampler`.

    Returns:
        The loader.

    Raises:
        ValueError: the dataset has another number of samples than there are costs, or an argument breaks a
            rule of the sampler.
    """
    num_ranks, rank = ranks_of(group)
    of_loader, of_sampler = split_options(options)
    sampler = BalancedBatchSampler(
        costs, batch_size, num_ranks, rank, num_buckets=num_ranks * accumulation, **of_sampler
    )
    check_length(dataset, sampler, "dataset")
    of_loader = watched(of_loader, of_sampler.get("is_padded"), rank)
    return loader(dataset, batch_sampler=sampler, **of_loader)
