"""EasyR1 on batches of even work: one variable in front of its own command.

    RAY_RUNTIME_ENV_HOOK=dflop.integrations.easyr1.runtime_env python3 -m verl.trainer.main config=...

Ray's environment of EasyR1's processes -> `balance_batches` in each, before EasyR1 is imported there
generated samples -> EasyR1's trainer: `_balance_batch`       --> as many samples for each rank | by encoder
a rank's samples  -> its policy: `rearrange_micro_batches`    --> microbatches under its cap    | and LLM work

EasyR1 is a fork of verl, of the same package name, whose trainers and workers are others.
"""

from __future__ import annotations

import sys
import warnings
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dflop.integrations.when_imported import WhenImported

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflop.integrations.verl_costs import Counted, Work

_TRIED = "b44b311"
"""Commit of EasyR1 (0.3.3.dev0)."""

_SETUP = "worker_process_setup_hook"
_LINE = "`RAY_RUNTIME_ENV_HOOK=dflop.integrations.easyr1.runtime_env`"
_BALANCING = "verl.utils.seqlen_balancing"
_TRAINER = "verl.trainer.ray_trainer"
_POLICY = "verl.workers.actor.dp_actor"


@dataclass(frozen=True)
class _Divided:
    """Samples that EasyR1 is about to divide."""

    work: Work
    num_mini_batches: int = 1
    """Of as many samples in a row, each of which is divided among the ranks."""
    ulysses_size: int = 1
    """Ranks in a row that hold the same samples."""


_DIVIDED: ContextVar[_Divided | None] = ContextVar("divided", default=None)
_POLICY_COUNTED: ContextVar[tuple[Counted, bool] | None] = ContextVar("policy_counted", default=None)
"""Whose microbatches are about to be made: the costs of its model, and whether it trains."""

_theirs: dict[str, Any] = {}
"""EasyR1's own functions, by name."""


def runtime_env(given: Any = None) -> dict[str, Any]:
    """Ray's environment for EasyR1 with `balance_batches`, for Ray to ask: `RAY_RUNTIME_ENV_HOOK` names it.

    Args:
        given: the environment that EasyR1 asks for.

    Returns:
        The same, with the line in each process of the job.

    Raises:
        ValueError: it has another `worker_process_setup_hook` already.
    """
    ours = f"{__name__}.balance_batches"
    found = dict(given or {})
    if (other := found.get(_SETUP)) not in (None, ours):
        message = (
            f"Ray's environment has a `{_SETUP}` already ({other!r}), must have none with {_LINE}: "
            f"call `{ours}()` in that function instead, and leave the variable out"
        )
        raise ValueError(message)
    return {**found, _SETUP: ours}


def balance_batches() -> None:
    """Makes EasyR1 divide samples by their counted work, once it is imported.

    A sample costs what an encoder token and an LLM token cost in the model that trains
    (`cost_of_parameters`), counted from the model's configuration and the sample's own tokens. Ranks get as
    many samples of each mini-batch, and a mini-batch holds samples in the order in which they were
    generated, as EasyR1 has it on one rank. A rank has as many microbatches as EasyR1 asks for. Of them the
    encoder work is made even and, separately, the LLM work, because under FSDP ranks meet in every layer.
    A second call does nothing.

    Raises:
        RuntimeError: EasyR1 is imported already, or this version of it lacks a function that is changed.
    """
    if any(isinstance(one, WhenImported) and one.changes is _CHANGES for one in sys.meta_path):
        return
    early = [name for name in _CHANGES if name in sys.modules]
    if early:
        message = f"`{early[0]}` is imported already: call `{__name__}.balance_batches()` before"
        raise RuntimeError(message)
    sys.meta_path.insert(0, WhenImported(_CHANGES))


def _change_balancing(module: Any) -> None:
    """Lets the divisions take work for tokens, before anybody imports them by name."""
    if find_spec(_TRAINER) is None:
        message = (
            "this `verl` is not EasyR1: verl itself takes "
            "`actor_rollout_ref.model.external_lib=dflop.integrations.verl`"
        )
        raise RuntimeError(message)
    names = ("get_seqlen_balanced_partitions", "rearrange_micro_batches")
    changed: tuple[Any, ...] = (_partitions, _microbatches)
    for name, ours in zip(names, changed, strict=True):
        _theirs[name] = _own(module, name)
        setattr(module, name, wraps(_theirs[name])(ours))


def _change_trainer(module: Any) -> None:
    """Lets the trainer say which batch it divides."""
    kind = _own(module, "RayPPOTrainer")
    kind._balance_batch = _with_batch(_own(kind, "_balance_batch"))


def _change_policy(module: Any) -> None:
    """Lets a policy say whose microbatches it makes."""
    kind = _own(module, "DataParallelPPOActor")
    for name, is_trained in (("update_policy", True), ("compute_log_prob", False)):
        setattr(kind, name, _with_policy(_own(kind, name), is_trained=is_trained))


_CHANGES: dict[str, Callable[[Any], None]] = {
    _BALANCING: _change_balancing,
    _TRAINER: _change_trainer,
    _POLICY: _change_policy,
}


def _own(holder: Any, name: str) -> Any:
    found = getattr(holder, name, None)
    if found is None:
        message = f"this version of EasyR1 has no `{holder.__name__}.{name}`: take its commit {_TRIED}"
        raise RuntimeError(message)
    return found


def _with_batch(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in for `_balance_batch` of the trainer."""

    @wraps(theirs)
    def balance_batch(trainer: Any, batch: Any, *given: Any, **named: Any) -> Any:
        settings = trainer.config.worker
        counted = vars(trainer).get("_dflop_counted")
        if counted is None:
            costs: Any = import_module("dflop.integrations.easyr1_costs")
            counted = trainer._dflop_counted = costs.counted_by_settings(settings.actor.model)
            _warn_of_loss(settings.actor)
            print("dflop: batches of even work", file=sys.stderr, flush=True)
        count, ulysses_size = len(batch), settings.actor.ulysses_size
        size = settings.actor.global_batch_size * settings.rollout.n
        num_parts = trainer.actor_rollout_ref_wg.world_size // ulysses_size
        num_mini_batches = _num_mini_batches(count, size, num_parts)
        token = _DIVIDED.set(_Divided(counted.work(batch.batch), num_mini_batches, ulysses_size))
        try:
            return theirs(trainer, batch, *given, **named)
        finally:
            _DIVIDED.reset(token)

    return balance_batch


def _num_mini_batches(count: int, size: int, num_parts: int) -> int:
    """Mini-batches of `size` into which a batch is cut before `num_parts` ranks get its samples."""
    if count % size == 0 and size % num_parts == 0:
        return count // size
    # Then EasyR1 cuts the mini-batches of a rank elsewhere.
    if count > size:
        warnings.warn(
            f"{count} samples in mini-batches of {size} on {num_parts} ranks: must divide without a rest, or "
            "the whole batch is dealt out to the ranks at once, and other samples form a mini-batch",
            stacklevel=3,
        )
    return 1


def _with_policy(theirs: Callable[..., Any], *, is_trained: bool) -> Callable[..., Any]:
    """What stands in for `update_policy` and `compute_log_prob`."""

    @wraps(theirs)
    def compute(policy: Any, *given: Any, **named: Any) -> Any:
        counted = vars(policy).get("_dflop_counted")
        if counted is None:
            costs: Any = import_module("dflop.integrations.easyr1_costs")
            counted = policy._dflop_counted = costs.counted_of_policy(policy)
        token = _POLICY_COUNTED.set((counted, is_trained))
        try:
            return theirs(policy, *given, **named)
        finally:
            _POLICY_COUNTED.reset(token)

    return compute


def _partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """What stands in for `get_seqlen_balanced_partitions`."""
    divided = _DIVIDED.get()
    found = None
    if divided is not None:
        tokens = [int(one) for one in seqlen_list]
        if tokens != divided.work.tokens:
            message = (
                f"EasyR1 divides {len(tokens)} samples of {sum(tokens)} tokens, dflop counted "
                f"{len(divided.work.tokens)} of {sum(divided.work.tokens)}: must be the same"
            )
            raise ValueError(message)
        if not equal_size:
            found = divided.work.parts(tokens, k_partitions, equal_size=False)
            if found is None:
                warnings.warn(
                    f"no {k_partitions} microbatches of even work keep the cap of {divided.work.max_tokens} "
                    "tokens: those of EasyR1 are taken, which are even in tokens",
                    stacklevel=2,
                )
        elif len(tokens) % k_partitions == 0:
            found = _of_ranks(divided, k_partitions)
    if found is None:
        return _theirs["get_seqlen_balanced_partitions"](seqlen_list, k_partitions, equal_size)
    return found


def _of_ranks(divided: _Divided, num_ranks: int) -> list[list[int]]:
    """Of each rank its samples, mini-batch by mini-batch.

    Ranks of a Ulysses group put theirs one behind the other before they cut mini-batches of them.
    """
    work, size = divided.work, divided.ulysses_size
    num_samples = len(work.tokens) // divided.num_mini_batches
    groups: list[list[int]] = [[] for _ in range(num_ranks // size)]
    for start in range(0, len(work.tokens), num_samples):
        own = work.rows(start, start + num_samples)
        parts = own.parts(own.tokens, len(groups), equal_size=True) or []
        for group, part in zip(groups, parts, strict=True):
            group += [start + at for at in part]
    each = len(work.tokens) // num_ranks
    return [group[place * each : (place + 1) * each] for group in groups for place in range(size)]


def _microbatches(batch: Any, max_token_len: Any, *given: Any, **named: Any) -> Any:
    """What stands in for `rearrange_micro_batches`; each rank calls it."""
    theirs = _theirs["rearrange_micro_batches"]
    if (policy := _POLICY_COUNTED.get()) is None:
        return theirs(batch, max_token_len, *given, **named)
    counted, is_trained = policy
    work = counted.work(batch, is_trained=is_trained).capped(int(max_token_len), 1)
    token = _DIVIDED.set(_Divided(work))
    try:
        rows, places = theirs(batch, max_token_len, *given, **named)
    finally:
        _DIVIDED.reset(token)
    # Where single samples are heavy, no parts are even: then like ones of all ranks meet.
    loads = [sum(work.encoder[at] + work.llm[at] for at in held) for held in places]
    order = sorted(range(len(places)), key=lambda at: (-loads[at], places[at]))
    return [rows[at] for at in order], [places[at] for at in order]


def _warn_of_loss(actor: Any) -> None:
    """Says where EasyR1's own gradient depends on how samples are divided."""
    if actor.loss_avg_mode == "seq":
        warnings.warn(
            "`worker.actor.loss_avg_mode` is `seq`: EasyR1 takes the mean over the samples of a microbatch, "
            "and weighs it by the microbatch's tokens. So the gradient depends on how samples are divided, "
            "with dflop and without; with `token` it does not",
            stacklevel=3,
        )
