"""Balanced microbatches of what a trainer generates: TRL's `GRPOTrainer` and `RLOOTrainer`.

prompts -> TRL generates -> costs of the samples of all ranks
    scored:  samples travel, forward, log-probabilities travel back -> TRL rewards and shuffles
    trained: samples travel -> microbatches, each padded to its own longest rows

Nobody knows beforehand how long an answer will be. So prompts are dealt out as TRL does it, and samples move
afterwards, within their optimizer step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dflop.integrations.generated_rows import cut, join
from dflop.integrations.pair_loss import gather_uneven
from dflop.integrations.spread import Spread
from dflop.integrations.text_alone import is_sharded_by_fsdp2, meeting_in_evaluation, paused
from dflop.integrations.trainer_loss import check_degree, uneven_error

if TYPE_CHECKING:
    from dflop.integrations.sent_rows import Row

_MODULES = ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer")
_THEIRS = (
    "training_step",
    "compute_loss",
    "_prepare_inputs",
    "_generate",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)
"""Methods that must be TRL's own: the lines below know what they read and give."""

_OF_STEP = ("dapo", "cispo", "vespo")
"""Losses of GRPO that are divided by the tokens of all ranks' samples."""

_OF_SAMPLES = ("grpo", "dr_grpo", "sapo", "luspo", None)
"""Losses that are means over the samples of a microbatch; RLOO has no name for its own."""

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


def is_of_swift(trainer: Any) -> bool:
    """Tells ms-swift's own trainers, some of which are made of TRL's.

    Args:
        trainer: of transformers, or made of it.

    Returns:
        Whether it is one.
    """
    return any(one.__module__.startswith("swift.rlhf_trainers.") for one in type(trainer).__mro__)


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
        trainer._prepare_inputs.spread.is_padded = is_padded
        return
    spread = Spread(trainer, is_padded)
    generations = _Generations(trainer, spread)
    trainer._prepare_inputs = generations
    trainer.compute_loss = partial(_loss, trainer, generations, trainer.compute_loss)
    trainer._generate = partial(_generated, trainer, trainer._generate)
    theirs = trainer._get_per_token_logps_and_entropies
    trainer._get_per_token_logps_and_entropies = partial(_scored, trainer, spread, theirs)


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


def _generated(trainer: Any, theirs: Any, *given: Any, **named: Any) -> Any:
    """What stands in for `_generate`."""
    # The model is in training mode there, and a rank calls it as often as its longest answer has tokens.
    with paused(trainer.model):
        return theirs(*given, **named)


def _scored(
    trainer: Any,
    spread: Spread,
    theirs: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    **named: Any,
) -> Any:
    """What stands in for `_get_per_token_logps_and_entropies`, where it scores what was generated."""
    is_more = named.get("compute_entropy") or named.get("compute_aux_loss")
    if torch.is_grad_enabled() or not trainer.model.training or is_more:
        return theirs(model, input_ids, attention_mask, logits_to_keep, batch_size, **named)
    batch = {
        "prompt_ids": input_ids[:, :-logits_to_keep],
        "prompt_mask": attention_mask[:, :-logits_to_keep],
        "completion_ids": input_ids[:, -logits_to_keep:],
        "completion_mask": attention_mask[:, -logits_to_keep:],
        **{name: value for name, value in named.items() if not (value is None or isinstance(value, bool))},
    }
    rows = cut(batch)
    rank = trainer.args.process_index
    parts = spread.split(_sizes(rows, spread), -(-len(rows) // (batch_size or len(rows))), model)
    found: dict[int, Row] = {}
    # A reference is another model, in evaluation mode: text alone hangs nobody there either.
    with meeting_in_evaluation(model, is_fsdp2=is_sharded_by_fsdp2(model)):
        for samples, held, _ in parts.of_rank(rows, rank):
            own = _joined(trainer, held)
            width = own["completion_ids"].shape[1]
            ids, mask = (
                torch.cat([own.pop(f"{part}_{name}") for part in ("prompt", "completion")], dim=1)
                for name in ("ids", "mask")
            )
            logps, _, _ = theirs(model, ids, mask, width, len(held), **own)
            for sample, row, values in zip(samples, held, logps, strict=True):
                found[sample] = {"logps": values[: len(row["completion_ids"])]}
    back = parts.returned(found, rank)
    logps = input_ids.new_zeros(len(rows), logits_to_keep, dtype=back[0]["logps"].dtype)
    for values, row in zip(logps, back, strict=True):
        values[: len(row["logps"])] = row["logps"]
    return logps, None, None


class _Generations:
    """Stands in for `_prepare_inputs`: the trainer's own, then samples move."""

    def __init__(self, trainer: Any, spread: Spread) -> None:
        self.spread = spread
        self._trainer = trainer
        self._theirs = trainer._prepare_inputs
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
        """Balances the samples of each optimizer step over its microbatches and all ranks."""
        trainer = self._trainer
        num_joined = min(len(microbatches), trainer.args.gradient_accumulation_steps)
        is_mean = getattr(trainer, "loss_type", None) in _OF_SAMPLES
        self._counts, self._weights = [], []
        found = []
        for start in range(0, len(microbatches), num_joined):
            joined = microbatches[start : start + num_joined]
            rows = [row for microbatch in joined for row in cut(microbatch)]
            shared = {name: value for name, value in joined[0].items() if _is_of_all(value)}
            parts = self.spread.split(_sizes(rows, self.spread), num_joined)
            for _, own, counts in parts.of_rank(rows, trainer.args.process_index):
                found.append({**_joined(trainer, own), **shared})
                self._counts.append(counts)
                # The trainer's mean has as many samples in each microbatch.
                self._weights.append(len(own) * num_joined / len(rows) if is_mean else 1.0)
        return found


def _joined(trainer: Any, rows: list[Row]) -> dict[str, Any]:
    """A microbatch of them."""
    return join(rows, trainer._tokenizer.pad_token_id, trainer.pad_to_multiple_of)


def _sizes(rows: list[Row], spread: Spread) -> list[tuple[float, int]]:
    """Encoder tokens and LLM tokens of each sample; a device is waited for once."""
    of_encoder = torch.zeros(len(rows), dtype=torch.float64, device=rows[0]["prompt_ids"].device)
    for token, count in spread.media.items():
        for part in ("prompt_ids", "completion_ids"):
            of_encoder += count * torch.stack([row[part].eq(token).sum() for row in rows])
    of_llm = [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]
    return list(zip(of_encoder.tolist(), of_llm, strict=True))


def _is_of_all(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _check(trainer: Any) -> None:
    """Refuses what cannot be balanced."""
    check_degree(trainer)
    args, kind = trainer.args, type(trainer)
    loss = getattr(trainer, "loss_type", None)
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    own = [
        one
        for one in _THEIRS
        if not str(getattr(getattr(kind, one, None), "__module__", "")).startswith("trl.trainer.")
    ]
    wrong = None
    if own:
        wrong = f"its `{own[0]}` is not TRL's own (1.16 was tried): nobody knows what it reads and gives"
    elif loss in _OF_BATCHES:
        wrong = f"its `loss_type` is `{loss}`, and {_OF_BATCHES[loss]}"
    elif loss not in (*_OF_STEP, *_OF_SAMPLES):
        known = ", ".join(f"`{one}`" for one in (*_OF_STEP, *_OF_SAMPLES) if one)
        wrong = f"its `loss_type` is `{loss}`, must be one of {known}"
    elif getattr(trainer, "tools", None) and getattr(trainer, "_is_vlm", False):
        wrong = "it has `tools`, which may return pictures that answers are cut off in: nobody has tried that"
    elif getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        wrong = (
            f"`top_entropy_quantile` is {trainer.top_entropy_quantile}, a quantile over the tokens of a "
            "microbatch: leave it out"
        )
    elif getattr(trainer, "_entropy_bonus_enabled", False):
        wrong = (
            "the entropy bonus is a mean over the tokens of a microbatch: leave `entropy_coef` and "
            "`use_adaptive_entropy` out"
        )
    elif getattr(trainer, "aux_loss_enabled", False):
        wrong = (
            f"`router_aux_loss_coef` is {trainer.router_aux_loss_coef}, the weight of a router's loss "
            "that is a mean over a microbatch: set it to 0.0, which leaves that loss out"
        )
    elif steps % accumulation and accumulation % steps:
        wrong = (
            f"`steps_per_generation` is {steps} and `gradient_accumulation_steps` is {accumulation}: one "
            "must be a multiple of the other, so that the samples of a step are known together"
        )
    if wrong is not None:
        raise uneven_error(trainer, wrong)
