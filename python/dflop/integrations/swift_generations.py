"""Balanced microbatches of what ms-swift generates: `swift rlhf --rlhf_type grpo`.

prompts -> ms-swift generates and rewards -> each rank encodes its own samples -> costs of those of all ranks
    -> encoded samples travel -> microbatches, collated, scored and trained where they arrive
    -> advantages, known on all ranks, find their samples

A microbatch is scored by the older and the reference model on the rank that trains it: samples travel once.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

# Of ms-swift, whose own versions of everything stand apart from ours.
from swift.rl_core.data import GRPOBatch, GRPOSample  # pyright: ignore[reportMissingImports]
from swift.rlhf_trainers.utils import encode_sample  # pyright: ignore[reportMissingImports]

from dflop.integrations.spread import Spread
from dflop.integrations.text_alone import is_sharded_by_fsdp2, meeting_in_evaluation, paused
from dflop.integrations.trainer_loss import uneven_error

if TYPE_CHECKING:
    from dflop.integrations.sent_rows import Row

_THEIRS = (
    "compute_loss",
    "split_by_mini_batches",
    "_compute_advantages",
    "_compute_loss",
    "_generate_completions",
    "_postprocess_batch",
    "_prepare_batch_inputs",
    "_prepare_inputs",
)
"""Methods that must be ms-swift's own: the lines below know what they read and give."""

_OF_GENERATION = ("cispo", "dapo")
"""Losses that are divided by the tokens of all samples of a generation."""

_OF_SAMPLES = ("dr_grpo", "grpo", "sapo")
"""Losses that are means over the samples of a microbatch."""

_OF_BATCHES = {
    "bnpo": "it divides by the tokens of a microbatch: take `dapo`, which divides by those of all samples",
    "real": "it compares the answers to one prompt within a microbatch",
}
"""Losses in which a sample's part depends on the others of its microbatch."""

_OF_TEACHER = ("teacher_prompt", "teacher_images")
"""Columns of the data by which a model teaches itself."""


def balance_generations_of_swift(trainer: Any, *, is_padded: bool | None = None) -> None:
    """Makes `trainer` compute what it generated in microbatches of even work; call it on every rank.

    A step has the samples it would have, and its gradient is the same. Which rank computes which sample
    changes, and each microbatch is padded to its own longest row.

    Args:
        trainer: ms-swift's `GRPOTrainer`.
        is_padded: whether the model computes the padding of a microbatch; None: unless `remove_padding` is in
            force.

    Raises:
        ValueError: a sample's part of its loss depends on the others of its microbatch, or its settings
            cannot be balanced; the message says which.
    """
    _check(trainer)
    if isinstance(trainer.split_by_mini_batches, _Generations):
        trainer.split_by_mini_batches.spread.is_padded = is_padded
        return
    generations = _Generations(trainer, Spread(trainer, is_padded))
    trainer.split_by_mini_batches = generations
    trainer._compute_advantages = partial(generations.advantages, trainer._compute_advantages)
    trainer._prepare_batch_inputs = partial(_prepared, trainer, trainer._prepare_batch_inputs)
    trainer._generate_completions = partial(_generated, trainer, trainer._generate_completions)
    trainer.compute_loss = partial(_loss, trainer, trainer.compute_loss)
    trainer.template.encode = partial(_encoded, trainer.template.encode)


def _generated(trainer: Any, theirs: Any, *given: Any, **named: Any) -> Any:
    """What stands in for `_generate_completions`."""
    # A rank calls the model as often as its longest answer has tokens.
    with paused(trainer.model):
        return theirs(*given, **named)


def _prepared(trainer: Any, theirs: Any, samples: Any) -> Any:
    """What stands in for `_prepare_batch_inputs`, where samples are collated and scored."""
    if not trainer.model.training:
        return theirs(samples)
    with ExitStack() as stack:
        for model in (trainer.model, trainer.ref_model):
            # A reference is another model, in evaluation mode: text alone hangs nobody there either.
            stack.enter_context(meeting_in_evaluation(model, is_fsdp2=is_sharded_by_fsdp2(model)))
        return theirs(samples)


def _loss(trainer: Any, theirs: Any, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
    """What stands in for `compute_loss`: a microbatch's part of the step's loss."""
    loss = theirs(model, inputs, *given, **named)
    if not trainer.model.training or trainer.loss_type not in _OF_SAMPLES:
        return loss
    # The trainer's mean has as many samples in each microbatch.
    return loss * (len(inputs["grpo_batch"].truncated_mask) / trainer.args.per_device_train_batch_size)


def _encoded(theirs: Any, inputs: Any, *given: Any, **named: Any) -> Any:
    """What stands in for `encode` of the template: what is encoded already stays."""
    return inputs if isinstance(inputs, _Encoded) else theirs(inputs, *given, **named)


class _Encoded(dict[str, Any]):
    """What the template made of a sample."""


class _Moved(GRPOSample):
    """A sample as it is trained on, on whichever rank."""

    def to_template_dict(self) -> dict[str, Any]:
        """What ms-swift would encode."""
        return _Encoded(self.encoded)


class _Generations:
    """Stands in for `split_by_mini_batches`: the samples of each microbatch, from whichever rank."""

    def __init__(self, trainer: Any, spread: Spread) -> None:
        self.spread = spread
        self._trainer = trainer
        self._theirs = trainer.split_by_mini_batches
        # What was generated at last, until its advantages are known; microbatches, and where in the
        # generation of all ranks each of their samples was.
        self._samples: Any = None
        self._microbatches: list[list[Any]] = []
        self._places: list[int] = []

    def __call__(self, samples: Any) -> list[list[Any]]:
        """Microbatches of these samples; ms-swift asks twice: to collate them and to give them advantages."""
        if not self._trainer.model.training:
            return self._theirs(samples)
        if self._samples is not samples:
            self._samples, (self._microbatches, self._places) = samples, self._balanced(samples)
            return self._microbatches
        found, self._samples, self._microbatches = self._microbatches, None, []
        return found

    def _balanced(self, samples: Any) -> tuple[list[list[Any]], list[int]]:
        """Balances the samples of each optimizer step over its microbatches and all ranks."""
        trainer = self._trainer
        rank = trainer.args.process_index
        microbatches = self._theirs(samples)
        rows = [[self._row(sample) for sample in microbatch] for microbatch in microbatches]
        num_joined = min(len(microbatches), trainer.args.gradient_accumulation_steps)
        found: list[list[Any]] = []
        places: list[int] = []
        start = 0
        for step in range(0, len(rows), num_joined):
            own = [row for microbatch in rows[step : step + num_joined] for row in microbatch]
            parts = self.spread.split([row[""]["size"] for row in own], num_joined)
            for numbers, held, _ in parts.of_rank(own, rank):
                found.append([_moved(row) for row in held])
                places += [
                    number // len(own) * len(samples) + start + number % len(own) for number in numbers
                ]
            start += len(own)
        return found, places

    def _row(self, sample: Any) -> Row:
        """A sample that can travel: its tensors by their names, and all else by none."""
        trainer = self._trainer
        if trainer.dynamic_num_samples:
            message = "ms-swift made several samples of one answer (multi-turn): ranks have unequal numbers"
            raise uneven_error(trainer, message)
        if any(getattr(sample, name) is not None for name in _OF_TEACHER):
            raise uneven_error(trainer, _wrong_of_teacher(_OF_TEACHER[0]))
        template = trainer.template
        with trainer._template_context(template):
            encoded = encode_sample(sample, template)
        encoded.pop("_extra_kwargs", None)
        ids = encoded["input_ids"]
        size = sum(count * ids.count(token) for token, count in self.spread.media.items()), len(ids)
        if not size[0] and (sample.images or sample.videos or sample.audios):
            message = (
                f"a row of `{type(template).__name__}` has media and none of the tokens "
                f"{sorted(self.spread.media)} that the model's configuration names for them, so nobody "
                "knows what the encoder reads"
            )
            raise uneven_error(trainer, message)
        tensors = {name: value for name, value in encoded.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in encoded.items() if name not in tensors}
        kept = {name: getattr(sample, name) for name in ("finish_reason", "rollout_logprobs")}
        return {**tensors, "": {"size": size, "encoded": others, "sample": kept}}

    def advantages(self, theirs: Any, samples: Any, rewards: Any, batches: list[Any]) -> torch.Tensor:
        """What stands in for `_compute_advantages`: of all ranks' samples, in the order of generation."""
        trainer = self._trainer
        if not trainer.model.training:
            return theirs(samples, rewards, batches)
        if trainer.kl_in_reward and trainer.beta:
            batches = [{"grpo_batch": self._divergence(batches, len(samples))}]
        found = theirs(samples, rewards, batches)
        moved = [sample for microbatch in self._microbatches for sample in microbatch]
        for sample, place in zip(moved, self._places, strict=True):
            sample.advantages = found[place]
        return found

    def _divergence(self, batches: list[Any], num_samples: int) -> Any:
        """That of each sample that this rank generated, as a batch of answers of one token."""
        trainer = self._trainer
        of_moved = [
            ((batch.old_per_token_logps - batch.ref_per_token_logps) * batch.completion_mask).sum(-1)
            for batch in (one["grpo_batch"] for one in batches)
        ]
        own = torch.cat(of_moved)
        everyone = own.new_zeros(trainer.args.world_size * num_samples)
        everyone[self._places] = own
        everyone = trainer.accelerator.reduce(everyone, "sum")
        start = trainer.args.process_index * num_samples
        values = everyone[start : start + num_samples, None]
        ones = torch.ones_like(values, dtype=torch.bool)
        return GRPOBatch(
            completion_mask=ones,
            truncated_mask=ones[:, 0],
            seq_lengths=ones[:, 0].long(),
            old_per_token_logps=values,
            ref_per_token_logps=torch.zeros_like(values),
        )


def _moved(row: Row) -> Any:
    """The sample of a row; its tensors are where ms-swift's own encoding leaves them."""
    rest = row[""]
    tensors = {name: value.cpu() for name, value in row.items() if name}
    return _Moved(messages=[], encoded={**rest["encoded"], **tensors}, **rest["sample"])


def _wrong_of_teacher(name: str) -> str:
    return f"the data has a column `{name}`, by which a model teaches itself: nobody has tried that"


def _check(trainer: Any) -> None:
    """Refuses what cannot be balanced."""
    args, kind, loss = trainer.args, type(trainer), trainer.loss_type
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    own = [
        one
        for one in _THEIRS
        if not str(getattr(getattr(kind, one, None), "__module__", "")).startswith("swift.rlhf_trainers.")
    ]
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    taught = [name for name in _OF_TEACHER if name in columns]
    wrong = None
    if own:
        wrong = f"its `{own[0]}` is not ms-swift's own (4.6 was tried): nobody knows what it reads and gives"
    elif loss in _OF_BATCHES:
        wrong = f"`--loss_type` is `{loss}`, and {_OF_BATCHES[loss]}"
    elif loss not in (*_OF_GENERATION, *_OF_SAMPLES):
        known = ", ".join(f"`{one}`" for one in (*_OF_GENERATION, *_OF_SAMPLES))
        wrong = f"`--loss_type` is `{loss}`, must be one of {known}"
    elif trainer.use_liger_loss:
        wrong = "`--use_liger_kernel` is true, and has a loss of its own that nobody has tried: leave it out"
    elif trainer.chord_sft_iterator is not None:
        wrong = "`--chord_sft_dataset` adds a loss that is a mean over a microbatch: leave it out"
    elif trainer._has_teacher_explicit():
        wrong = "it has a teacher (`--teacher_model`, `--teacher_model_server`): nobody has tried that"
    elif taught:
        wrong = _wrong_of_teacher(taught[0])
    elif trainer.multi_turn_scheduler is not None:
        wrong = "`--multi_turn_scheduler` is given, and may make several samples of one answer: leave it out"
    elif args.top_entropy_quantile < 1.0:
        wrong = (
            f"`--top_entropy_quantile` is {args.top_entropy_quantile}, a quantile over the tokens of a "
            "microbatch: leave it out"
        )
    elif args.log_entropy:
        wrong = "`--log_entropy` is true, which gathers equally many numbers of each rank: leave it out"
    elif steps % accumulation and accumulation % steps:
        wrong = (
            f"`--steps_per_generation` is {steps} and `--gradient_accumulation_steps` is {accumulation}: one "
            "must be a multiple of the other, so that the samples of a step are known together"
        )
    if wrong is not None:
        raise uneven_error(trainer, wrong)
