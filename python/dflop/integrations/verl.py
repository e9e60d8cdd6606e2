"""verl on batches of even work: one line of its own configuration.

    actor_rollout_ref.model.external_lib=dflop.integrations.verl  # PPO, GRPO; of its SFT: model.external_lib

generated samples -> verl's trainer: `_balance_batch`         --> as many samples for each rank | by encoder
a rank's samples  -> verl's engine: `rearrange_micro_batches` --> microbatches under its cap    | and LLM work

verl imports that module in each process that reads the model's configuration: where its trainer runs, and on
every rank. Imported where verl is not loaded, it does nothing.
"""

from __future__ import annotations

import sys
import warnings
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dflop.integrations.verl_costs import Counted, Work

_TRIED = "0.9.1"
_LINE = "`actor_rollout_ref.model.external_lib=dflop.integrations.verl` (SFT: `model.external_lib`)"

_STRATEGIES = ("fsdp", "fsdp2")
"""Engines whose microbatches were compared with verl's own; pipelines of Megatron have other needs."""

_OF_MICROBATCH = {
    "clip_cov": "it draws the tokens that it leaves out from those of a microbatch",
    "kl_cov": "it chooses tokens by means and ranks over a microbatch",
    "geo_mean": "it is a mean over the samples of a microbatch",
}
"""Losses of verl in which a sample's part depends on the others of its microbatch."""

_WORK: ContextVar[Work | None] = ContextVar("work", default=None)
"""Of the samples that verl is about to divide."""

_ENGINE: ContextVar[tuple[Counted, bool] | None] = ContextVar("engine", default=None)
"""Whose microbatches are about to be made: the costs of its model, and whether it trains."""

_TRAINER: ContextVar[Any] = ContextVar("trainer", default=None)
"""Which divides a batch among ranks and has not completed it yet."""

_theirs: dict[str, Any] = {}
"""verl's own functions, by name; empty before `balance_batches` ran."""


def balance_batches() -> None:
    """Makes verl divide samples by their counted work; importing this module where verl is loaded does it.

    A sample costs what an encoder token and an LLM token cost in the model that trains
    (`cost_of_parameters`), counted from the model's configuration and the sample's own tokens. Ranks get as
    many samples as before, and a microbatch never more tokens than verl's cap. Of its microbatches the
    encoder work is made even and, separately, the LLM work, because under FSDP ranks meet in every layer.
    A second call does nothing.

    Raises:
        RuntimeError: this version of verl lacks a function that is changed here.
    """
    if _theirs:
        return
    balancing: Any = import_module("verl.utils.seqlen_balancing")
    base: Any = import_module("verl.workers.engine.base")
    names = ("calculate_workload", "get_seqlen_balanced_partitions", "rearrange_micro_batches")
    lacking = [f"`seqlen_balancing.{name}`" for name in names if not hasattr(balancing, name)]
    lacking += [
        f"`BaseEngine.{name}`"
        for name in ("train_batch", "infer_batch")
        if not hasattr(base.BaseEngine, name)
    ]
    if lacking:
        message = f"this version of verl has no {', no '.join(lacking)}: pip install verl=={_TRIED}"
        raise RuntimeError(message)
    _theirs.update({name: getattr(balancing, name) for name in names})
    ours: tuple[Any, ...] = (_workload, _partitions, _microbatches)
    for name, one in zip(names, ours, strict=True):
        changed = wraps(_theirs[name])(one)
        for module in _modules():
            if getattr(module, name, None) is _theirs[name]:
                setattr(module, name, changed)
    for name, is_trained in (("train_batch", True), ("infer_batch", False)):
        setattr(base.BaseEngine, name, _with_engine(getattr(base.BaseEngine, name), is_trained=is_trained))
    for module in _modules():
        _change_trainers(module)


def _modules() -> Iterator[Any]:
    """Verl's modules that are loaded, and the program, which may be one of them."""
    return (
        module
        for name, module in list(sys.modules.items())
        if name == "__main__" or name.partition(".")[0] == "verl"
    )


def _change_trainers(module: Any) -> None:
    """Lets the trainers that a module defines say which batch they divide."""
    for kind in [
        one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__
    ]:
        if "_balance_batch" in vars(kind):
            kind._balance_batch = _with_batch(kind._balance_batch)
        if kind.__name__ == "SFTTrainer" and "_get_batch_seqlens" in vars(kind):
            kind._get_batch_seqlens = _with_lengths(kind._get_batch_seqlens)
    complete = getattr(module, "upsample_batch_to_divisible_size", None)
    if complete is not None and hasattr(module, "PPOTrainer"):
        module.upsample_batch_to_divisible_size = _with_completed(complete, module)


def _with_engine(theirs: Callable[..., Any], *, is_trained: bool) -> Callable[..., Any]:
    """What stands in for `train_batch` and `infer_batch` of an engine."""

    @wraps(theirs)
    def compute(engine: Any, *given: Any, **named: Any) -> Any:
        if (strategy := engine.engine_config.strategy) not in _STRATEGIES:
            known = " or ".join(f"`{one}`" for one in _STRATEGIES)
            message = f"the engine's `strategy` is `{strategy}`, must be {known} with {_LINE}"
            raise ValueError(message)
        token = _ENGINE.set((_counted(engine, engine.model_config), is_trained))
        try:
            return theirs(engine, *given, **named)
        finally:
            _ENGINE.reset(token)

    return compute


def _with_batch(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for `_balance_batch` of a trainer."""

    @wraps(theirs)
    def balance_batch(trainer: Any, batch: Any, *given: Any, **named: Any) -> Any:
        actor = trainer.config.actor_rollout_ref.actor
        if getattr(trainer, "use_prefix_grouper", False):
            message = (
                f"`use_prefix_grouper` is True, must be False with {_LINE}: groups are divided by tokens"
            )
            raise ValueError(message)
        rows = getattr(batch, "batch", None)
        _warn_of_loss(actor, is_nested=rows is None)
        # The newer trainer has keys alone there, and adds samples before it divides them.
        work = None if rows is None else _of_trainer(trainer).work(rows)
        tokens = _WORK.set(work), _TRAINER.set(trainer)
        try:
            return theirs(trainer, batch, *given, **named)
        finally:
            _WORK.reset(tokens[0])
            _TRAINER.reset(tokens[1])

    return balance_batch


def _with_completed(theirs: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """What stands in for the function that completes a batch of keys with samples that train nothing."""

    @wraps(theirs)
    def complete(batch: Any, *given: Any, **named: Any) -> Any:
        found = theirs(batch, *given, **named)
        if (trainer := _TRAINER.get()) is not None:
            rows = module.tq.kv_batch_get(
                keys=found.keys, partition_id=found.partition_id, select_fields=["input_ids"]
            )
            _WORK.set(_of_trainer(trainer).work(rows))
        return found

    return complete


def _with_lengths(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for the function that `SFTTrainer` asks for lengths before it divides a batch."""

    @wraps(theirs)
    def lengths(trainer: Any, data: Any) -> Any:
        _WORK.set(_counted(trainer, trainer.model_config).work(data))
        return theirs(trainer, data)

    return lengths


def _of_trainer(trainer: Any) -> Counted:
    config: Any = import_module("verl.utils.config")
    return _counted(trainer, lambda: config.omega_conf_to_dataclass(trainer.config.actor_rollout_ref.model))


def _counted(holder: Any, model_config: Any) -> Counted:
    """Costs of a model's tokens, counted once."""
    found = vars(holder).get("_dflop_counted")
    if found is None:
        kind: Any = import_module("dflop.integrations.verl_costs").Counted
        found = holder._dflop_counted = kind.of(model_config() if callable(model_config) else model_config)
    return found


def _workload(seqlen_list: Any) -> Any:
    """What stands in for `calculate_workload`: work of the samples whose lengths these are."""
    work = _WORK.get()
    if work is None:
        warnings.warn(
            f"verl divides {len(seqlen_list)} samples by their tokens: dflop was not told which they are. "
            f"Give {_LINE}",
            stacklevel=2,
        )
        return _theirs["calculate_workload"](seqlen_list)
    return work.total(seqlen_list)


def _partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """What stands in for `get_seqlen_balanced_partitions`."""
    loads = [int(load) for load in seqlen_list]
    work = _WORK.get()
    found = None if work is None else work.parts(loads, k_partitions, equal_size=equal_size)
    return (
        _theirs["get_seqlen_balanced_partitions"](loads, k_partitions, equal_size) if found is None else found
    )


def _microbatches(batch: Any, max_token_len: Any, *given: Any, **named: Any) -> Any:
    """What stands in for `rearrange_micro_batches`; each rank of `dp_group` calls it."""
    engine = _ENGINE.get()
    if engine is None:
        return _theirs["rearrange_micro_batches"](batch, max_token_len, *given, **named)
    counted, is_trained = engine
    work = counted.work(batch, is_trained=is_trained).capped(
        int(max_token_len), named.get("force_group_size", 1)
    )
    token = _WORK.set(work)
    try:
        return _theirs["rearrange_micro_batches"](batch, max_token_len, *given, **named)
    finally:
        _WORK.reset(token)


def _warn_of_loss(actor: Any, *, is_nested: bool) -> None:
    """Says where verl's own gradient depends on how samples are divided."""
    mode = actor.policy_loss.get("loss_mode", "vanilla")
    why = _OF_MICROBATCH.get(mode)
    name = f"`actor.policy_loss.loss_mode` is `{mode}`"
    is_norm = actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None
    if why is None and is_norm and is_nested:
        name = "`actor.loss_agg_mode` is `seq-mean-token-sum-norm` without `actor.loss_scale_factor`"
        why = "it divides by the longest answer of a microbatch"
    correction = actor.policy_loss.get("rollout_correction") or {}
    if mode == "bypass_mode" and correction.get("rollout_is_batch_normalize"):
        why = "`rollout_is_batch_normalize` is a mean over a microbatch"
    if why is not None:
        warnings.warn(
            f"{name}: {why}. So the gradient depends on how samples are divided, with dflop and without",
            stacklevel=3,
        )


if "verl" in sys.modules:
    balance_batches()
