"""Losses that are a mean over the pairs of a microbatch, as those of preferences and rewards.

mean over the pairs of a microbatch       -> times the microbatch's share of the step's pairs
a part over tokens of chosen answers      -> that part times its share of those tokens
what TRL's DPO and Reward trainers log    -> the same
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Trainer

OF_PAIRS = {
    # What computes the loss there; of earlier releases other methods do, from batches of another form.
    "trl.trainer.dpo_trainer": "_compute_loss",
    "trl.trainer.reward_trainer": "compute_loss",
    "llamafactory.train.dpo.trainer": "get_batch_loss_metrics",
    "swift.rlhf_trainers.dpo_trainer": "get_batch_loss_metrics",
    "trl.experimental.orpo.orpo_trainer": "get_batch_loss_metrics",
    "trl.experimental.cpo.cpo_trainer": "get_batch_loss_metrics",
}
"""Modules whose loss is a mean over the pairs of a microbatch."""

_WITH_TOKENS: dict[str, tuple[Callable[[Any], float], Callable[[Any], torch.Tensor]]] = {
    # The part's factor, of the trainer; which chosen tokens it has, of a batch.
    "trl.experimental.orpo.orpo_trainer": (lambda _: 1.0, lambda batch: batch["chosen_attention_mask"]),
    "trl.experimental.cpo.cpo_trainer": (
        lambda trainer: trainer.cpo_alpha,
        lambda batch: batch["chosen_labels"] != -100,
    ),
}
"""Those of them whose loss has a part that is a mean over tokens of chosen answers (`nll_loss`)."""

OF_BATCHES = {
    "aot": "it sorts the pairs of a microbatch",
    "aot_unpaired": "it sorts the pairs of a microbatch",
}
"""Losses of TRL's `DPOTrainer` in which a pair's part depends on the others of its microbatch."""

_WITH_METRICS = ("trl.trainer.dpo_trainer", "trl.trainer.reward_trainer")
"""Those of them that log plain means of numbers that they find in each microbatch (`_metrics`)."""

_LOGGED_AS_THEY_ARE = ("num_tokens", "min_reward", "max_reward")
"""What they log that is no mean."""

_OVER_TOKENS = {
    "entropy": (1, 2),
    "logits/chosen": (1,),
    "logits/rejected": (2,),
    "mean_token_accuracy": (1,),
}
"""Of that the means over tokens, and of which answers (columns of `_sizes`); others are over pairs."""


def is_of_pairs(trainer: Trainer) -> bool:
    """Tells trainers whose rows are pairs of answers, as TRL's `DPOTrainer` and `RewardTrainer`.

    Args:
        trainer: of transformers, or made of it.

    Returns:
        Whether it is one.
    """
    return module_of_pairs(type(trainer)) is not None


def module_of_pairs(kind: type) -> str | None:
    """Where the loss over pairs of a trainer comes from.

    Args:
        kind: its class.

    Returns:
        A name in `OF_PAIRS`; None: its loss is of no pairs.
    """
    return next((one.__module__ for one in kind.__mro__ if one.__module__ in OF_PAIRS), None)


class _Pairs:
    """The step's microbatches: what `_sizes` counts in each, of all ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        module = module_of_pairs(type(trainer))
        self._tokens_of = _WITH_TOKENS[module][1] if module in _WITH_TOKENS else None
        self._sizes = torch.zeros(0)
        self._counts: list[list[int]] = []
        self._next = 0

    def begin(self, batches: list[Any]) -> None:
        """A step of these microbatches on this rank."""
        sizes = [_sizes(batch, self._tokens_of) for batch in batches]
        mine = torch.stack(sizes)[None].to(self._trainer.accelerator.device)
        is_alone = self._trainer.args.world_size == 1
        self._sizes = mine if is_alone else self._trainer.accelerator.gather(mine)
        self._counts = self._sizes[..., 0].long().T.tolist()
        self._next = 0

    def next_weights(self) -> torch.Tensor:
        """Of the next microbatch's means over pairs, and over tokens of chosen and of rejected answers."""
        rank, self._next = self._trainer.args.process_index, self._next + 1
        # The trainer divides by its microbatches, and the gradient is averaged over ranks.
        num_means = self._trainer.args.world_size * self._trainer.current_gradient_accumulation_steps
        return self._sizes[rank, self._next - 1] * num_means / self._sizes.sum(dim=(0, 1))

    def weight_of_logged(self, columns: tuple[int, ...]) -> float:
        """Of a mean over this microbatch on all ranks; the mean over microbatches is logged."""
        sizes = self._sizes[..., columns].sum(dim=(0, 2))
        # Without any token nothing but zeros is logged.
        return float(sizes[self._next - 1] * len(sizes) / sizes.sum().clamp(min=1))

    def gather(
        self, theirs: Callable[[Any], Any], values: torch.Tensor, *, are_means: bool = False
    ) -> torch.Tensor:
        """See `gather_uneven`, for the pairs of a microbatch; `are_means`: so are fractions of a rank."""
        counts, rank = self._counts[self._next - 1], self._trainer.args.process_index
        if are_means and not values.dim() and values.is_floating_point():
            # The mean over ranks is taken behind it.
            values = values * (counts[rank] * len(counts) / sum(counts))
        return gather_uneven(theirs, counts, rank, values)


def gather_uneven(
    theirs: Callable[[Any], Any], counts: list[int], rank: int, values: torch.Tensor
) -> torch.Tensor:
    """What `gather` of accelerate gives for numbers of each sample of a microbatch; it demands equal counts.

    Args:
        theirs: `gather` of accelerate.
        counts: samples of each rank in that microbatch.
        rank: this one.
        values: one number a sample, or several behind each other (as rewards of both answers of a pair).
            Others are gathered as they are.

    Returns:
        The numbers of all ranks.
    """
    own = counts[rank]
    if not values.dim() or len(values) % own or len(set(counts)) == 1:
        return theirs(values)
    lengths = [count * (len(values) // own) for count in counts]
    padded = values.new_zeros((max(lengths), *values.shape[1:]))
    padded[: len(values)] = values
    parts = theirs(padded).chunk(len(lengths))
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def weigh_pairs(trainer: Any) -> None:
    """Weighs the loss of each microbatch by its share of the step's pairs: their mean is the step's loss.

    Args:
        trainer: one for which `is_of_pairs` is true.
    """
    loss_of_theirs, samples_of_theirs = trainer.compute_loss, trainer.get_batch_samples
    gather_of_theirs = trainer.accelerator.gather
    # The part of DPO's loss that is a mean over the tokens of chosen answers (`sft`, as in MPO).
    shares = list(getattr(trainer, "loss_weights", None) or ())
    of_tokens = [name == "sft" for name in getattr(trainer, "loss_types", ())]
    pairs = _Pairs(trainer)
    module = module_of_pairs(type(trainer))
    factor = _WITH_TOKENS[module][0](trainer) if module in _WITH_TOKENS else 0.0
    logged: Any = trainer._metrics["train"] if module in _WITH_METRICS else {}
    over_tokens: list[torch.Tensor] = []
    if factor:
        forward_of_theirs = trainer.concatenated_forward

        def concatenated_forward(*given: Any, **named: Any) -> Any:
            found = forward_of_theirs(*given, **named)
            over_tokens[:] = [found[4]]
            return found

        trainer.concatenated_forward = concatenated_forward

    def get_batch_samples(*given: Any, **named: Any) -> Any:
        found = samples_of_theirs(*given, **named)
        if found[0]:
            pairs.begin(found[0])
        return found

    def compute_loss(model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if not trainer.model.training:
            return loss_of_theirs(model, inputs, *given, **named)
        of_pair, of_token, _ = pairs.next_weights()
        before = {name: len(values) for name, values in logged.items()}
        if any(of_tokens):
            trainer.loss_weights = [
                share * of_token / of_pair if is_of_tokens else share
                for share, is_of_tokens in zip(shares, of_tokens, strict=True)
            ]
        # TRL gathers numbers of each pair for its metrics.
        trainer.accelerator.gather = partial(
            pairs.gather, gather_of_theirs, are_means=module == "trl.trainer.reward_trainer"
        )
        try:
            found = loss_of_theirs(model, inputs, *given, **named)
        finally:
            trainer.accelerator.gather = gather_of_theirs
            if shares:
                trainer.loss_weights = shares
        for name, values in logged.items():
            if name not in _LOGGED_AS_THEY_ARE:
                weight = pairs.weight_of_logged(_OVER_TOKENS.get(name, (0,)))
                start = before.get(name, 0)
                values[start:] = [value * weight for value in values[start:]]
        loss, *others = found if isinstance(found, tuple) else (found,)
        loss = loss * of_pair
        if factor:
            loss = loss + factor * (of_token - of_pair) * over_tokens.pop()
        return (loss, *others) if isinstance(found, tuple) else loss

    trainer.get_batch_samples, trainer.compute_loss = get_batch_samples, compute_loss


def _sizes(batch: Any, tokens_of: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """Pairs, and tokens of their chosen and of their rejected answers.

    Without `tokens_of` the rejected stand below the chosen; with it nobody asks for tokens of the rejected.
    """
    if tokens_of is not None:
        mask = tokens_of(batch)
        num_pairs = len(mask)
    else:
        num_pairs = int(batch["input_ids"].shape[0]) // 2
        mask = batch.get("completion_mask")
    if mask is None:
        return torch.tensor([num_pairs, 0.0, 0.0])
    of_chosen, of_rejected = mask[:num_pairs, 1:].sum(), mask[num_pairs:, 1:].sum()
    return torch.stack([torch.full_like(of_chosen, num_pairs), of_chosen, of_rejected]).float()
