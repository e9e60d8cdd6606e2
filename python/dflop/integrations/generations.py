"""Balanced microbatches of what a trainer generates: TRL's `GRPOTrainer` and `RLOOTrainer`.

prompts -> TRL generates, rewards and shuffles -> costs of the samples of all ranks
        -> samples travel to the rank that computes them -> microbatches, each padded to its own longest rows

Nobody knows before how long an answer will be. So prompts are dealt out as TRL does it, and samples move
afterwards, within their optimizer step.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dflop.data.costs import costs
from dflop.data.split import Split
from dflop.integrations.accelerate import meets_of
from dflop.integrations.generated_rows import cut, exchange, gathered, join
from dflop.integrations.padded_rows import is_removed
from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.row_costs import media_tokens
from dflop.integrations.text_alone import handles_of
from dflop.integrations.trainer_loss import gather_uneven

if TYPE_CHECKING:
    from dflop.integrations.generated_rows import Row

_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
_THEIRS = ("_prepare_inputs", "_generate_and_score_completions", "_compute_loss")
"""Methods that must be TRL's own: the lines below know what they read and give."""

_OF_STEP = ("dapo", "cispo", "vespo")
"""Losses of GRPO that are divided by the tokens of the samples of all ranks; others are means over samples."""

_OF_BATCHES = {
    "bnpo": "it divides by the tokens of a microbatch: take `dapo`, which divides by those of the whole step",
}
"""Losses of GRPO in which a sample's part depends on the others of its microbatch."""


def is_generating(trainer: Any) -> bool:
    """Tells trainers that generate what they train on.

    Args:
        trainer: of transformers, or made of it.

    Returns:
        Whether it is TRL's `GRPOTrainer` or `RLOOTrainer`, or made of one.
    """
    return any(one.__module__ in _MODULES for one in type(trainer).__mro__)


def balance_generations(trainer: Any, *, is_padded: bool | None = None) -> None:
    """Makes `trainer` compute what it generated in microbatches of even work; call it on every rank.

    A step has the samples it would have, and its gradient is the same. Which rank computes which sample
    changes, and each microbatch is padded to its own longest prompt and completion.

    Args:
        trainer: for which `is_generating` holds.
        is_padded: whether the model computes the padding of a microbatch; None: unless `remove_padding` is in
            force.

    Raises:
        ValueError: a sample's part of its loss depends on the others of its microbatch, or its settings
            cannot be balanced; the message says which.
    """
    _check(trainer)
    if isinstance(trainer._prepare_inputs, _Generations):
        trainer._prepare_inputs.is_padded = is_padded
        return
    generations = _Generations(trainer, is_padded)
    trainer._prepare_inputs = generations
    trainer.compute_loss = partial(_loss, trainer, generations, trainer.compute_loss)
    trainer._generate_and_score_completions = partial(
        _generated, trainer, trainer._generate_and_score_completions
    )


def _loss(trainer: Any, generations: _Generations, theirs: Any, *given: Any, **named: Any) -> Any:
    """What stands in for `compute_loss`: a microbatch's part of the step's loss."""
    if not trainer.model.training:
        return theirs(*given, **named)
    counts, weight = generations.at_hand()
    gather_of_theirs = trainer.accelerator.gather
    # TRL gathers numbers of each sample for its metrics.
    trainer.accelerator.gather = partial(gather_uneven, gather_of_theirs, counts, trainer.args.process_index)
    try:
        return theirs(*given, **named) * weight
    finally:
        trainer.accelerator.gather = gather_of_theirs


def _generated(trainer: Any, theirs: Any, inputs: Any) -> Any:
    """What stands in for `_generate_and_score_completions`."""
    # The model is in training mode there, and a rank calls it as often as its longest answer has tokens.
    with ExitStack() as stack:
        for handle in handles_of(trainer.model):
            stack.enter_context(handle.paused())
        return theirs(inputs)


class _Generations:
    """Stands in for `_prepare_inputs`: the trainer's own, then samples move."""

    def __init__(self, trainer: Any, is_padded: bool | None) -> None:
        self.is_padded = is_padded
        self._trainer = trainer
        self._theirs = trainer._prepare_inputs
        # Before anything shards the model.
        self._cost = cost_of_parameters(trainer.model)
        self._media = media_tokens(trainer.model, self._cost)
        # Of each microbatch of a generation: samples on each rank, and the weight of this rank's loss.
        self._counts: list[list[int]] = []
        self._weights: list[float] = []

    def __call__(self, batch: Any) -> Any:
        """The next microbatch."""
        trainer = self._trainer
        before = trainer._buffered_inputs
        inputs = self._theirs(batch)
        if not trainer.model.training:
            return inputs
        if trainer._buffered_inputs is not before:
            trainer._buffered_inputs = self._balanced(trainer._buffered_inputs)
        return trainer._buffered_inputs[self._place]

    @property
    def _place(self) -> int:
        return self._trainer._step % self._trainer.args.steps_per_generation

    def at_hand(self) -> tuple[list[int], float]:
        """Of the next microbatch: samples of each rank, and the weight of this rank's mean over samples."""
        return self._counts[self._place], self._weights[self._place]

    def _balanced(self, microbatches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same samples; those of an optimizer step are balanced over its microbatches and all ranks."""
        trainer = self._trainer
        rank, num_ranks = trainer.args.process_index, trainer.args.world_size
        num_joined = min(len(microbatches), trainer.args.gradient_accumulation_steps)
        self._counts, self._weights = [], []
        found = []
        for start in range(0, len(microbatches), num_joined):
            joined = microbatches[start : start + num_joined]
            rows = [row for microbatch in joined for row in cut(microbatch)]
            buckets = self._buckets(rows, num_joined)
            # Where each sample of each rank goes, and in which order they stand when they have come.
            targets = [[0] * len(rows) for _ in range(num_ranks)]
            for bucket, samples in enumerate(buckets):
                for sample in samples:
                    targets[sample // len(rows)][sample % len(rows)] = bucket % num_ranks
            order = sorted(sample for bucket in buckets[rank::num_ranks] for sample in bucket)
            held = dict(zip(order, exchange(rows, targets, rank), strict=True))
            shared = {name: value for name, value in joined[0].items() if _is_of_all(value)}
            for microbatch in range(num_joined):
                of_ranks = buckets[microbatch * num_ranks : (microbatch + 1) * num_ranks]
                own = [held[sample] for sample in of_ranks[rank]]
                padded = join(own, trainer._tokenizer.pad_token_id, trainer.pad_to_multiple_of)
                found.append({**padded, **shared})
                self._counts.append(list(map(len, of_ranks)))
                # The trainer's mean has as many samples in each microbatch.
                is_mean = getattr(trainer, "loss_type", None) not in _OF_STEP
                self._weights.append(len(own) * num_joined / len(rows) if is_mean else 1.0)
        return found

    def _buckets(self, rows: list[Row], num_microbatches: int) -> list[list[int]]:
        """The samples of each microbatch of each rank, numbered through over all ranks; equal on all."""
        trainer = self._trainer
        num_ranks = trainer.args.world_size
        own = torch.tensor([self._cost(self._tokens(row)) for row in rows], dtype=torch.float64)
        everyone = own if num_ranks == 1 else gathered(own.to(trainer.accelerator.device)).cpu()
        is_padded = not is_removed() if self.is_padded is None else self.is_padded
        split = Split.checked(
            num_ranks,
            0,
            num_ranks * num_microbatches,
            meets_of(trainer.accelerator, trainer.model),
            trainer.args.seed,
            is_padded,
        )
        native = costs(everyone.tolist())._native
        return native.buckets(range(len(everyone)), split.cut(num_ranks, None, None))

    def _tokens(self, row: Row) -> tuple[float, int]:
        """Encoder tokens and LLM tokens of a sample."""
        ids = torch.cat([row["prompt_ids"], row["completion_ids"]])
        encoder = sum(count * int((ids == token).sum()) for token, count in self._media.items())
        return encoder, len(ids)


def _is_of_all(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _check(trainer: Any) -> None:
    """Refuses what cannot be balanced."""
    args, kind = trainer.args, type(trainer)
    name = kind.__name__
    loss = getattr(trainer, "loss_type", None)
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    own = [
        one for one in _THEIRS if not getattr(getattr(kind, one), "__module__", "").startswith("trl.trainer.")
    ]
    wrong = None
    if own:
        wrong = f"its `{own[0]}` is not TRL's own (1.16 was tried): nobody knows what it reads and gives"
    elif loss in _OF_BATCHES:
        wrong = f"its `loss_type` is `{loss}`, and {_OF_BATCHES[loss]}"
    elif getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        wrong = (
            f"`top_entropy_quantile` is {trainer.top_entropy_quantile}, a quantile over the tokens of a "
            "microbatch: leave it out"
        )
    elif getattr(trainer, "_entropy_bonus_enabled", False):
        wrong = "the entropy bonus is a mean over the tokens of a microbatch: leave `entropy_coef` out"
    elif getattr(trainer, "aux_loss_enabled", False):
        wrong = "the loss of the router is a mean over a microbatch: leave `router_aux_loss_coef` out"
    elif steps % accumulation and accumulation % steps:
        wrong = (
            f"`steps_per_generation` is {steps} and `gradient_accumulation_steps` is {accumulation}: one must "
            "be a multiple of the other, so that the samples of a step are known together"
        )
    if wrong is not None:
        message = f"the trainer is a `{name}`, and balanced microbatches have unequal numbers of samples: {wrong}"
        raise ValueError(message)
