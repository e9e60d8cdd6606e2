"""Balanced batches in `transformers.Trainer` and its subclasses, such as TRL's `SFTTrainer`: one line.

Dataset, collator and workers are those of the trainer's own DataLoader; dflop only chooses the samples.
"""

from __future__ import annotations

from dflop.data import needs_torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
from typing import TYPE_CHECKING, Any

from torch import distributed
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from dflop.data.costs import costs as costs_of
from dflop.data.sampler import BalancedBatchSampler
from dflop.integrations.accelerate import keep_batches, meets_of
from dflop.integrations.generations import balance_generations, is_generating, is_of_swift
from dflop.integrations.loaded import balance_loaded
from dflop.integrations.loader import check_length, check_names
from dflop.integrations.neighbours import warn_of_neighbours
from dflop.integrations.padded_rows import watched
from dflop.integrations.row_costs import costs_of_rows
from dflop.integrations.text_alone import (
    counts_of,
    is_under_fsdp2,
    meet_or_warn,
    meeting_in_evaluation,
)
from dflop.integrations.trainer_loss import (
    check_loss,
    degree_of,
    divides_by_tokens,
    keep_the_mean,
)

if TYPE_CHECKING:
    import os

    from transformers import Trainer


_OF_TRAINER = {
    "batch_size": "`per_device_train_batch_size`",
    "num_replicas": "its number of ranks",
    "rank": "its rank",
    "num_buckets": "`gradient_accumulation_steps`",
}
"""Arguments of the sampler that the trainer decides, and by what."""

_PLAIN = (RandomSampler, SequentialSampler, DistributedSampler, BalancedBatchSampler)
"""Samplers that the trainer chooses by its arguments, and the one of an earlier `balance`."""

_THEIR_OWN = ("axolotl.", "llamafactory.", "swift.")
"""Frameworks whose settings are looked at elsewhere."""


def balance(
    trainer: Trainer,
    costs: Any = None,
    *,
    model_dir: str | os.PathLike[str] | None = None,
    when_loaded: bool | None = None,
    **options: Any,
) -> Trainer:
    """Makes `trainer` train on balanced batches; call it on every rank, before `trainer.train()`.

    A step has the samples it would have with that seed of the sampler, `per_device_train_batch_size` a
    microbatch on average, or all ranks' microbatches together with `split_batches`; which rank computes
    which of them changes. The loss is divided by the label tokens
    of the whole step. `set_epoch`, resuming and evaluation are the trainer's own. Its checkpoints say which
    samples a step has: `trainer.train` refuses (ValueError) to go on from one whose steps had others, because
    the trainer counts steps, and would leave samples out or train them twice.

    TRL's `GRPOTrainer` and `RLOOTrainer`, and ms-swift's `GRPOTrainer`, deal out their prompts as before;
    what they generate is counted and moves to other ranks, within its step. Their generation and evaluation
    stay as they are.

    Samples that nobody can count before they are read, those of a stream (`IterableDataset`) or of a dataset
    that makes them on the fly, are balanced when they are loaded (`when_loaded`): each rank reads what the
    trainer gives it, a sample is counted by its `input_ids`, and moves to another rank within its step.
    Order, epochs and resuming are the trainer's. A stream may end on one rank before another: ranks go on
    together.

    Under FSDP2 a microbatch of text alone hangs nobody (`attend_encoder`), in evaluation neither. Under FSDP
    of version 1 and ZeRO-3, and with models of other families, a warning counts the samples of text alone.

    Args:
        trainer: of `transformers`, or made of it.
        costs: what `BalancedBatchSampler` takes, a sample of `train_dataset` each. None: they are counted
            from its rows, by the parameters of the model (`dflop.integrations.costs_of_rows`). Of ranks that
            read the same rows (tensor, context, sequence parallel), each has its part of the LLM's.
        model_dir: where costs are counted, and the trainer holds no processor: the directory that has it.
        when_loaded: whether samples are balanced when they have been read; None: if `train_dataset` has no
            length. Then no costs are given, and of the options `is_padded` alone.
        **options: of `BalancedBatchSampler`, as `giant_llm_cost`; `meets` is that of the trainer: `phase`
            under FSDP and DeepSpeed's ZeRO-3, else `step`.

    Returns:
        The same trainer.

    Raises:
        TypeError: it is no such trainer.
        ValueError: what the trainer is set to do cannot be done with batches of uneven counts; the message
            says which setting.
    """
    # Not above: it imports transformers, which says nothing helpful where accelerate is missing.
    from dflop.integrations.trainer_steps import BalancedSteps, load_whole_checkpoints, steps_of

    _check(trainer, when_loaded)
    check_names(options, _OF_TRAINER)
    warn_of_neighbours(trainer)
    if is_generating(trainer):
        _check_unknown("the trainer generates its samples", costs, model_dir, options)
        if is_of_swift(trainer):
            # Not above: it imports ms-swift.
            from dflop.integrations.swift_generations import balance_generations_of_swift

            balance_generations_of_swift(trainer, **options)
        else:
            balance_generations(trainer, **options)
        load_whole_checkpoints(trainer)
        return _balanced(trainer)
    check_loss(trainer)
    if when_loaded or not _has_length(trainer):
        _check_unknown("samples are balanced when they have been read", costs, model_dir, options)
        balance_loaded(trainer, **{"is_padded": None, **options})
        _meet_in_evaluation(trainer)
        load_whole_checkpoints(trainer)
        keep_the_mean(trainer)
        return _balanced(trainer)
    args = trainer.args
    for name in options.keys() & _OF_TRAINER.keys():
        message = f"`{name}` is {options[name]!r}, leave it out: the trainer decides it ({_OF_TRAINER[name]})"
        raise ValueError(message)
    if costs is None:
        model: Any = trainer.model
        costs = costs_of_rows(
            trainer.train_dataset,
            model,
            trainer.processing_class,
            model_dir,
            max_length=getattr(args, "max_length", None),
        )
    elif model_dir is not None:
        message = "`model_dir` is for costs that are counted, and `costs` are given: leave one out"
        raise ValueError(message)
    degree = degree_of(trainer)
    num_ranks = args.world_size // degree
    batch_size = _batch_size(trainer, num_ranks)
    if degree > 1:
        costs = costs_of(costs, batch_size=batch_size).of_groups(degree)
    sampler = BalancedBatchSampler(
        costs,
        batch_size,
        num_ranks,
        args.process_index // degree,
        num_buckets=num_ranks * args.gradient_accumulation_steps,
        **{
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "shuffle": getattr(args, "train_sampling_strategy", "random") != "sequential",
            "drop_last": args.dataloader_drop_last,
            "meets": meets_of(trainer.accelerator, trainer.model),
            **options,
        },
    )
    theirs = trainer.get_train_dataloader

    def get_train_dataloader() -> DataLoader[Any]:
        given = theirs()
        _check_sampler(given, shuffles=bool(sampler.state_dict()["shuffle"]))
        check_length(given.dataset, sampler, "train_dataset")
        meet_or_warn(trainer, counts_of(sampler), meets_of(trainer.accelerator, trainer.model))
        names = ("collate_fn", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        names += ("multiprocessing_context", "worker_init_fn", "timeout", "in_order")
        kept = {name: getattr(given, name) for name in names if hasattr(given, name)}
        kept = watched(kept, options.get("is_padded"), args.process_index)
        loader: DataLoader[Any] = DataLoader(given.dataset, batch_sampler=sampler, **kept)
        return trainer.accelerator.prepare_data_loader(keep_batches(trainer.accelerator, loader))

    trainer.get_train_dataloader = get_train_dataloader
    _meet_in_evaluation(trainer)
    load_whole_checkpoints(trainer)
    trainer.remove_callback(BalancedSteps)
    trainer.add_callback(BalancedSteps(steps_of(sampler, args.gradient_accumulation_steps)))
    keep_the_mean(trainer)
    return _balanced(trainer)


def _batch_size(trainer: Any, num_ranks: int) -> int:
    """Samples of a rank's microbatch, as accelerate would deal them out."""
    size: int = trainer.args.train_batch_size
    if not trainer.accelerator.dataloader_config.split_batches:
        return size
    if size % num_ranks:
        message = (
            f"`per_device_train_batch_size` is {size}, must be a multiple of the {num_ranks} ranks that "
            "`split_batches` of `accelerator_config` divides it among"
        )
        raise ValueError(message)
    return size // num_ranks


def _balanced(trainer: Any) -> Any:
    trainer.is_balanced_by_dflop = True
    return trainer


def _meet_in_evaluation(trainer: Any) -> None:
    """Under FSDP2 text alone hangs nobody in `trainer.evaluate`."""
    theirs = trainer.evaluation_loop

    def evaluation_loop(*given: Any, **named: Any) -> Any:
        if meets_of(trainer.accelerator, trainer.model) != "phase":
            return theirs(*given, **named)
        with meeting_in_evaluation(trainer.model, is_fsdp2=is_under_fsdp2(trainer)):
            return theirs(*given, **named)

    trainer.evaluation_loop = evaluation_loop


def is_known_late(trainer: Any) -> bool:
    """Tells trainers whose samples have no costs before they are there.

    Args:
        trainer: of transformers, or made of it.

    Returns:
        Whether it generates them, or reads a stream.
    """
    return is_generating(trainer) or not _has_length(trainer)


def _check_unknown(why: str, costs: Any, model_dir: Any, options: dict[str, Any]) -> None:
    """Refuses what makes no sense for samples that are known only when they are there."""
    given = {"costs": costs, "model_dir": model_dir, **options}
    if unfit := [name for name, value in given.items() if value is not None and name != "is_padded"]:
        message = (
            f"`{unfit[0]}` is given, and {why}: their costs are counted when "
            "they are there, and only `is_padded` can be chosen. Leave it out"
        )
        raise ValueError(message)


def _has_length(trainer: Any) -> bool:
    """Whether samples can be counted before they are read; a stream with a length has no positions."""
    rows = trainer.train_dataset
    return hasattr(rows, "__len__") and not isinstance(rows, IterableDataset)


def _check_sampler(loader: Any, *, shuffles: bool) -> None:
    """Refuses a loader whose own choice of samples would be dropped without a word."""
    chooser = getattr(loader, "batch_sampler", None)
    for name in ("batch_sampler", "sampler"):
        # accelerate puts its shards around theirs.
        while isinstance(inner := getattr(chooser, name, None), Sampler):
            chooser = inner
    if isinstance(chooser, SequentialSampler) and shuffles:
        wrong = "reads the samples in their order: give `shuffle=False` to keep it"
    elif chooser is None or isinstance(chooser, _PLAIN) or type(chooser).__module__.startswith(_THEIR_OWN):
        return
    else:
        wrong = "chooses samples in its own way, and they are chosen here: leave it out"
    message = f"the sampler of the trainer is a `{type(chooser).__name__}`, which {wrong}"
    raise ValueError(message)


def _check(trainer: Any, when_loaded: bool | None) -> None:
    if not all(hasattr(trainer, name) for name in ("args", "train_dataset", "get_train_dataloader")):
        message = (
            f"`trainer` is a `{type(trainer).__name__}`, must be a `Trainer` of transformers or made of it"
        )
        raise TypeError(message)
    args = trainer.args
    wrong = None
    if trainer.train_dataset is None:
        wrong = "the trainer has no `train_dataset`: give it one, the samples that the costs are of"
    elif when_loaded is False and not _has_length(trainer):
        wrong = (
            "`train_dataset` has no length, so its samples are known only when they are loaded: leave "
            "`when_loaded=False` out"
        )
    elif args.world_size > 1 and not getattr(args, "average_tokens_across_devices", False):
        wrong = (
            "`average_tokens_across_devices` is false, and ranks have unequal numbers of label tokens: "
            "set it to true"
        )
    elif distributed.is_initialized() and (num_ranks := distributed.get_world_size()) != args.world_size:
        wrong = (
            f"`world_size` of the trainer is {args.world_size}, and {num_ranks} ranks run: each would train "
            "the samples of all (under DeepSpeed, transformers counts one rank on CPUs)"
        )
    elif args.n_gpu > 1:
        wrong = (
            f"`n_gpu` is {args.n_gpu}: `DataParallel` deals out one batch, start a process a device instead"
        )
    elif getattr(args, "auto_find_batch_size", False):
        # It would run out of memory again with the same batches, down to a size of zero.
        wrong = (
            "`auto_find_batch_size` is true, and batches do not become smaller here: leave it out and give "
            "a lower `per_device_train_batch_size`, or a cap, `balance(..., max_tokens=)`"
        )
    elif args.label_smoothing_factor and not divides_by_tokens(trainer):
        wrong = (
            f"`label_smoothing_factor` is {args.label_smoothing_factor}, and the model takes no "
            "`num_items_in_batch`: give the trainer a `compute_loss_func` that smooths"
        )
    elif getattr(args, "train_sampling_strategy", "random") not in ("random", "sequential"):
        wrong = (
            f"`train_sampling_strategy` is `{args.train_sampling_strategy}`, leave it out: "
            "samples are chosen here"
        )
    if wrong is not None:
        raise ValueError(wrong)
