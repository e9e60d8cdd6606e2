"""What the loss of a `transformers.Trainer` is a mean over, and how it stays that in uneven microbatches.

sum over label tokens / those of the step -> as it is, or `mean_over_tokens` in its place
mean over the pairs of a microbatch       -> times the microbatch's share of the step's pairs
a part over tokens of chosen answers      -> that part times its share of those tokens
any other                                 -> refused
"""

from __future__ import annotations

import copy
import inspect
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dflop.integrations.backbone import unwrapped
from dflop.integrations.loss import token_loss

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import Trainer

_OF_PAIRS = {
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

_OF_TOKENS = ("transformers.", "trl.trainer.sft_trainer")
"""Modules whose `compute_loss` divides by `num_items_in_batch`, or lets the model do it."""

_OF_BATCHES = {
    "aot": "it sorts the pairs of a microbatch",
    "aot_unpaired": "it sorts the pairs of a microbatch",
}
"""Losses of TRL's `DPOTrainer` in which a pair's part depends on the others of its microbatch."""

_SAME = 1e-3
"""Losses that differ by less are taken for equal; twice as many label tokens halve the right one."""


def mean_over_tokens(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """The loss of a microbatch, for `compute_loss_func`: summed, over the label tokens of the whole step.

    Models that take no `num_items_in_batch` (Qwen2.5-VL, Qwen2-Audio) give a mean a microbatch instead.

    Args:
        outputs: of the model, with `logits`.
        labels: [M, T].
        num_items_in_batch: label tokens of all ranks' microbatches of the step; None in evaluation of models
            that count none: those of the microbatch.

    Returns:
        A number; the trainer multiplies it by the ranks, over which DDP, FSDP and DeepSpeed average.
    """
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs.logits
    if num_items_in_batch is None:
        num_items_in_batch = labels[..., 1:].ne(-100).sum()
    return token_loss(logits, labels, num_items_in_batch)


def degree_of(trainer: Any) -> int:
    """Ranks that read the same batch: tensor, context and sequence parallel.

    Args:
        trainer: of transformers.

    Returns:
        How many.
    """
    # ms-swift cuts rows itself, and tells nobody else.
    degree = int(getattr(getattr(trainer, "template", None), "sequence_parallel_size", None) or 1)
    for name in ("tp", "cp", "sp"):
        degree *= _size_of(trainer, name)
    return degree


def _size_of(trainer: Any, name: str) -> int:
    """Ranks of a kind of group; earlier releases of transformers know none."""
    size = getattr(trainer, f"get_{name}_size", None)
    return 1 if size is None else int(size())


def check_degree(trainer: Any) -> None:
    """Refuses ranks that read the same samples, where samples move after they were read.

    Args:
        trainer: of transformers.

    Raises:
        ValueError: some do.
    """
    if (degree := degree_of(trainer)) > 1:
        wrong = f"{degree} ranks read the same samples (tensor, context or sequence parallel): take one"
        raise uneven_error(trainer, wrong)


def is_of_pairs(trainer: Trainer) -> bool:
    """Tells trainers whose rows are pairs of answers, as TRL's `DPOTrainer` and `RewardTrainer`.

    Args:
        trainer: of transformers, or made of it.

    Returns:
        Whether it is one.
    """
    return _module_of_pairs(type(trainer)) is not None


def _module_of_pairs(kind: type) -> str | None:
    return next((one.__module__ for one in kind.__mro__ if one.__module__ in _OF_PAIRS), None)


def divides_by_tokens(trainer: Trainer) -> bool:
    """Looks whether the loss is summed and divided by `num_items_in_batch` already.

    Args:
        trainer: of transformers, or made of it.

    Returns:
        Whether it is, as far as signatures say.
    """
    takes = "num_items_in_batch" in inspect.signature(trainer.compute_loss).parameters
    return takes and bool(trainer.model_accepts_loss_kwargs) and not _leaves_unread(trainer)


def _class_of(model: nn.Module) -> Any:
    """A model's own class, which `fully_shard` makes another one of."""
    kinds = type(unwrapped(model)).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith("torch.distributed."))


def _leaves_unread(trainer: Any) -> bool:
    """Whether the model takes any argument, and computes a mean of the microbatch whatever it is given.

    transformers asks the signature alone, and Granite Speech's has `**kwargs`.
    """
    kind = _class_of(trainer.model)
    if not kind.__module__.startswith("transformers."):
        # `_look_once` sees what such a model does.
        return False
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return False
    return "CrossEntropyLoss" in source and "loss_function" not in source


def check_loss(trainer: Any) -> None:
    """Refuses trainers whose loss has no sense in uneven microbatches, as far as their type says it.

    Args:
        trainer: of transformers, or made of it.

    Raises:
        ValueError: it is one of those.
    """
    kind = type(trainer)
    of_trl = [one for one in kind.__mro__ if one.__module__.startswith("trl.")]
    module = _module_of_pairs(kind)
    wrong = None
    if module is not None:
        asked = getattr(trainer.args, "loss_type", None) or []
        unfit = [name for name in ([asked] if isinstance(asked, str) else asked) if name in _OF_BATCHES]
        if unfit:
            wrong = f"its `loss_type` is `{unfit[0]}`, and {_OF_BATCHES[unfit[0]]}: take another"
        elif "sft" in asked and getattr(trainer.args, "use_weighting", False):
            wrong = "its `loss_type` has `sft`, whose mean `use_weighting` multiplies: leave one of them out"
        elif getattr(getattr(kind, _OF_PAIRS[module], None), "__module__", None) != module:
            wrong = "its loss is not TRL's own (tried: 1.9, 1.14, 1.16), and may be a mean over anything"
    elif of_trl and not any(one.__module__ in _OF_TOKENS for one in of_trl):
        wrong = (
            "of TRL's trainers `SFTTrainer`, `DPOTrainer`, `RewardTrainer`, `GRPOTrainer`, `RLOOTrainer`, "
            "`ORPOTrainer` and `CPOTrainer` can be balanced"
        )
    if wrong is None:
        wrong = _wrong_of_parts(trainer)
    if wrong is not None:
        raise uneven_error(trainer, wrong)


def _wrong_of_parts(trainer: Any) -> str | None:
    """What is wrong with the loss where each rank of a group has a part of each row."""
    if (sp := _size_of(trainer, "sp")) > 1:
        return (
            f"`sp_size` of its `parallelism_config` is {sp}, must be 1: with it the loss is a mean of each "
            "microbatch"
        )
    if (
        (cp := _size_of(trainer, "cp")) > 1
        and trainer.compute_loss_func is None
        and not divides_by_tokens(trainer)
    ):
        return (
            f"`cp_size` of its `parallelism_config` is {cp}, must be 1 for this model: its loss takes no "
            "`num_items_in_batch`, and the one that stands in for it needs whole rows"
        )
    return None


def uneven_error(trainer: Any, wrong: str) -> ValueError:
    """What is raised where a trainer cannot have uneven microbatches.

    Args:
        trainer: of transformers, or made of it.
        wrong: why.

    Returns:
        The error.
    """
    message = (
        f"the trainer is a `{type(trainer).__name__}`, and balanced microbatches have unequal numbers of "
        f"samples: {wrong}"
    )
    return ValueError(message)


def keep_the_mean(trainer: Any) -> None:
    """Makes the loss of each microbatch its part of the step's; `check_loss` first.

    Args:
        trainer: of transformers, or made of it; once more changes nothing.
    """
    if getattr(trainer, "_keeps_the_mean", False):
        return
    trainer._keeps_the_mean = True
    if is_of_pairs(trainer):
        _weigh_pairs(trainer)
        return
    is_known = type(trainer).compute_loss.__module__.startswith(_OF_TOKENS)
    if trainer.compute_loss_func is not None:
        is_known = False
    elif not divides_by_tokens(trainer):
        trainer.compute_loss_func = mean_over_tokens
    else:
        # Code of a model's own directory may take `num_items_in_batch` and leave it unread.
        is_known &= _class_of(trainer.model).__module__.startswith("transformers.")
    if not is_known:
        _look_once(trainer)


def warn_of_neighbours(trainer: Any) -> None:
    """Says on rank 0 that a model's gradients depend on which samples share a microbatch, if they do.

    Args:
        trainer: of transformers; of one that has no model yet nothing is said.
    """
    model = getattr(trainer, "model", None)
    if model is None:
        return
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if norms:
        fact = f"`{norms[0]}` is a BatchNorm, one of {len(norms)}, which takes means over a microbatch"
        advice = "Keep these layers in evaluation mode"
    elif getattr(getattr(unwrapped(model), "config", None), "model_type", None) == "hunyuan_vl":
        fact = "`hunyuan_vl` numbers the images of all rows of a microbatch together in their positions"
        advice = "Give `position_ids` that number those of each row"
    else:
        return
    if trainer.args.process_index:
        return
    warnings.warn(
        f"{fact}: the gradient of a sample depends on those beside it, with balanced batches and without. "
        f"{advice} to have the gradient of single samples",
        stacklevel=3,
    )


class _Pairs:
    """The step's microbatches: pairs of each, and tokens of their chosen answers, of all ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        module = _module_of_pairs(type(trainer))
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
        """Of the next microbatch's mean over pairs, and of its mean over tokens."""
        rank, self._next = self._trainer.args.process_index, self._next + 1
        # The trainer divides by its microbatches, and the gradient is averaged over ranks.
        num_means = self._trainer.args.world_size * self._trainer.current_gradient_accumulation_steps
        return self._sizes[rank, self._next - 1] * num_means / self._sizes.sum(dim=(0, 1))

    def gather(self, theirs: Callable[[Any], Any], values: torch.Tensor) -> Any:
        """See `gather_uneven`, for the pairs of a microbatch."""
        counts = self._counts[self._next - 1]
        return gather_uneven(theirs, counts, self._trainer.args.process_index, values)


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


def _weigh_pairs(trainer: Any) -> None:
    """Weighs the loss of each microbatch by its share of the step's pairs: their mean is the step's loss."""
    loss_of_theirs, samples_of_theirs = trainer.compute_loss, trainer.get_batch_samples
    gather_of_theirs = trainer.accelerator.gather
    # The part of DPO's loss that is a mean over the tokens of chosen answers (`sft`, as in MPO).
    shares = list(getattr(trainer, "loss_weights", None) or ())
    of_tokens = [name == "sft" for name in getattr(trainer, "loss_types", ())]
    pairs = _Pairs(trainer)
    module = _module_of_pairs(type(trainer))
    factor = _WITH_TOKENS[module][0](trainer) if module in _WITH_TOKENS else 0.0
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
        of_pair, of_token = pairs.next_weights()
        if any(of_tokens):
            trainer.loss_weights = [
                share * of_token / of_pair if is_of_tokens else share
                for share, is_of_tokens in zip(shares, of_tokens, strict=True)
            ]
        # TRL gathers numbers of each pair for its metrics.
        trainer.accelerator.gather = partial(pairs.gather, gather_of_theirs)
        try:
            found = loss_of_theirs(model, inputs, *given, **named)
        finally:
            trainer.accelerator.gather = gather_of_theirs
            if shares:
                trainer.loss_weights = shares
        loss, *others = found if isinstance(found, tuple) else (found,)
        loss = loss * of_pair
        if factor:
            loss = loss + factor * (of_token - of_pair) * over_tokens.pop()
        return (loss, *others) if isinstance(found, tuple) else loss

    trainer.get_batch_samples, trainer.compute_loss = get_batch_samples, compute_loss


def _sizes(batch: Any, tokens_of: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    """Pairs, and tokens of their chosen answers; without `tokens_of` the rejected stand below the chosen."""
    if tokens_of is not None:
        mask = tokens_of(batch)
        num_pairs = len(mask)
    else:
        num_pairs = int(batch["input_ids"].shape[0]) // 2
        mask = batch.get("completion_mask")
    num_tokens = torch.zeros(()) if mask is None else mask[:num_pairs, 1:].sum().float()
    return torch.stack([torch.tensor(float(num_pairs), device=num_tokens.device), num_tokens])


def _look_once(trainer: Any) -> None:
    """Compares, in the first microbatch, the loss over the step's label tokens and over twice as many."""
    theirs = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if trainer.model.training:
            trainer.compute_loss = theirs
            _check_first(trainer, model, inputs, named.get("num_items_in_batch"))
        return theirs(model, inputs, *given, **named)

    trainer.compute_loss = compute_loss


def _check_first(trainer: Any, model: Any, inputs: Any, num_tokens: Any) -> None:
    name = type(trainer).__name__
    if num_tokens is None:
        message = (
            f"the trainer is a `{name}` whose batches have no `labels` that it counts, so its loss is a mean "
            "of each microbatch, and balanced ones have unequal numbers of samples. Have the collation "
            "give `labels`"
        )
        raise ValueError(message)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    losses = []
    for factor in (1, 2):
        # The same dropout twice, and the numbers that follow stay what they were.
        with torch.no_grad(), torch.random.fork_rng(devices):
            # `compute_loss` may take the labels out of what it is given.
            loss = trainer.compute_loss(model, copy.copy(inputs), num_items_in_batch=factor * num_tokens)
        losses.append(float(loss))
    once, twice = losses
    if once and abs(once - twice) <= _SAME * abs(once):
        message = (
            f"the loss of `{name}` is {once:.6g} whatever `num_items_in_batch` is: a mean of each "
            "microbatch, and balanced ones have unequal numbers of label tokens. Divide the summed loss by "
            "`num_items_in_batch`, the label tokens of the step on all ranks, or leave `compute_loss` and "
            "`compute_loss_func` out"
        )
        raise ValueError(message)
