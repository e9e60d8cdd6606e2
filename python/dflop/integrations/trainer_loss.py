"""What the loss of a `transformers.Trainer` is a mean over, and how it stays that in uneven microbatches.

sum over label tokens / those of the step -> as it is
TRL's own of SFT, where it counts itself  -> as it is, and told to count those of the step
mean over label tokens of a microbatch    -> `mean_over_tokens` in its place
mean over the pairs of a microbatch       -> `pair_loss.py`
any other                                 -> refused, here or in the first microbatch (`loss_look.py`)
"""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from dflop.integrations.backbone import unwrapped
from dflop.integrations.loss import token_loss
from dflop.integrations.loss_look import look_once
from dflop.integrations.neighbours import has_router_loss
from dflop.integrations.pair_loss import OF_BATCHES, OF_PAIRS, is_of_pairs, module_of_pairs, weigh_pairs

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import Trainer

_SFT = "trl.trainer.sft_trainer"
_OF_TOKENS = ("transformers.", _SFT)
"""Modules whose `compute_loss` divides by `num_items_in_batch`, or lets the model do it."""


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

    Raises:
        ValueError: the model gives no logits.
    """
    logits = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    if logits is None:
        message = (
            "the model gives no `logits` without labels, of which the loss over the step's label tokens is "
            "computed: give the trainer a `compute_loss_func`"
        )
        raise ValueError(message)
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


def divides_by_tokens(trainer: Trainer) -> bool:
    """Looks whether the loss is summed and divided by `num_items_in_batch` already.

    Args:
        trainer: of transformers, or made of it.

    Returns:
        Whether it is, as far as signatures say.
    """
    if _counts_itself(trainer):
        return True
    given = inspect.signature(trainer.compute_loss).parameters
    takes = "num_items_in_batch" in given or any(one.kind is one.VAR_KEYWORD for one in given.values())
    return takes and bool(trainer.model_accepts_loss_kwargs) and not _leaves_unread(trainer)


def _counts_itself(trainer: Any) -> bool:
    """Whether TRL's `SFTTrainer` divides by `num_items_in_batch`, whatever the model does: since 1.15.

    Before, it takes the loss of transformers' trainer.
    """
    sft = next((one for one in type(trainer).__mro__ if one.__module__ == _SFT), None)
    if sft is None or trainer.compute_loss_func is not None:
        return False
    return "outputs.log_probs" in inspect.getsource(sft.compute_loss)


def _class_of(model: nn.Module) -> Any:
    """A model's own class, which `fully_shard` makes another one of."""
    kinds = type(unwrapped(model)).__mro__
    return next(kind for kind in kinds if not kind.__module__.startswith("torch.distributed."))


def _leaves_unread(trainer: Any) -> bool:
    """Whether the model takes any argument, and computes a mean of the microbatch whatever it is given.

    transformers asks the signature alone, and Granite Speech's has `**kwargs`.
    """
    source = _forward_of(trainer.model)
    # Of a model of other code the first microbatch shows it.
    return source is not None and "CrossEntropyLoss" in source and "loss_function" not in source


def _forward_of(model: nn.Module) -> str | None:
    """The source of the forward of a model of transformers; None: there is none."""
    kind = _class_of(model)
    if not kind.__module__.startswith("transformers."):
        return None
    try:
        return inspect.getsource(inspect.unwrap(kind.forward))
    except (OSError, TypeError):
        return None


def _hands_on(model: nn.Module) -> bool:
    """Whether a model of transformers gives `num_items_in_batch` to the cross entropy of next tokens.

    Its other losses (of classifiers, of transducers) need not read it.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    source = _forward_of(model)
    return (
        source is not None
        and "loss_function" in source
        and getattr(unwrapped(model), "loss_function", None) is ForCausalLMLoss
    )


def check_loss(trainer: Any) -> None:
    """Refuses trainers whose loss has no sense in uneven microbatches, as far as their type says it.

    Args:
        trainer: of transformers, or made of it.

    Raises:
        ValueError: it is one of those.
    """
    kind = type(trainer)
    of_trl = [one for one in kind.__mro__ if one.__module__.startswith("trl.")]
    module = module_of_pairs(kind)
    wrong = None
    if module is not None:
        asked = getattr(trainer.args, "loss_type", None) or []
        unfit = [name for name in ([asked] if isinstance(asked, str) else asked) if name in OF_BATCHES]
        if unfit:
            wrong = f"its `loss_type` is `{unfit[0]}`, and {OF_BATCHES[unfit[0]]}: take another"
        elif "sft" in asked and getattr(trainer.args, "use_weighting", False):
            wrong = "its `loss_type` has `sft`, whose mean `use_weighting` multiplies: leave one of them out"
        elif getattr(getattr(kind, OF_PAIRS[module], None), "__module__", None) != module:
            wrong = "its loss is not TRL's own (tried: 1.9, 1.14, 1.16), and may be a mean over anything"
    elif of_trl and not any(one.__module__ in _OF_TOKENS for one in of_trl):
        wrong = (
            "of TRL's trainers `SFTTrainer`, `DPOTrainer`, `RewardTrainer`, `GRPOTrainer`, `RLOOTrainer`, "
            "`ORPOTrainer` and `CPOTrainer` can be balanced"
        )
    wrong = wrong or _wrong_of_parts(trainer) or _wrong_of_stand_in(trainer)
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


def _wrong_of_stand_in(trainer: Any) -> str | None:
    """What is wrong where `mean_over_tokens` would take the place of the model's own loss."""
    model = getattr(trainer, "model", None)
    if model is None or not _needs_stand_in(trainer):
        return None
    model, name = unwrapped(model), f"`{_class_of(model).__name__}`"
    config = getattr(model, "config", None)
    labels = inspect.signature(model.forward).parameters.get("labels")
    # A `compute_loss` of one's own need not ask the one that stands in: the first microbatch shows it.
    is_asked = _is_theirs(trainer)
    if is_asked and getattr(config, "is_encoder_decoder", False):
        return (
            f"the loss of {name}, an encoder-decoder, takes no `num_items_in_batch`. Give the trainer a "
            "`compute_loss_func(outputs, labels, num_items_in_batch)` that sums the cross entropy of labels "
            "where they stand and divides it, and have the collation give `decoder_input_ids` "
            "(`DataCollatorForSeq2Seq(tokenizer, model=model)`)"
        )
    if has_router_loss(config):
        return (
            f"`output_router_logits` is True, and the loss of {name} takes no `num_items_in_batch`: the one "
            "that stands in for it has no router's loss. Set `output_router_logits` to False in the model's "
            "configuration, or take TRL's `SFTTrainer`"
        )
    if is_asked and labels is not None and labels.default is labels.empty:
        return (
            f"the loss of {name} takes no `num_items_in_batch`, and its `forward` demands `labels`: give "
            "`labels` a default of None there, with which it gives `logits` alone"
        )
    return None


def _is_theirs(trainer: Any) -> bool:
    """Whether `compute_loss` is that of transformers or of TRL's `SFTTrainer`."""
    return type(trainer).compute_loss.__module__.startswith(_OF_TOKENS)


def _needs_stand_in(trainer: Any) -> bool:
    """Whether `keep_the_mean` puts `mean_over_tokens` in the place of the model's own loss."""
    return not (is_of_pairs(trainer) or trainer.compute_loss_func is not None or divides_by_tokens(trainer))


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
    _divide_once(trainer)
    if is_of_pairs(trainer):
        weigh_pairs(trainer)
        return
    is_known = _is_theirs(trainer)
    stands_in = _needs_stand_in(trainer)
    if stands_in:
        trainer.compute_loss_func = mean_over_tokens
        # A `compute_loss` of one's own need not ask the stand-in, and may learn first labels.
        if is_known and hasattr(trainer, "_loss_shifts_labels"):
            # The first label of a row is predicted by none: transformers counts it unless it knows the loss.
            trainer._loss_shifts_labels = True
    elif trainer.compute_loss_func is not None:
        is_known = False
    elif _counts_itself(trainer):
        # Else the trainer does not count the label tokens of the step for models that take no number of them.
        trainer.model_accepts_loss_kwargs = True
    else:
        is_known &= _hands_on(trainer.model)
    if trainer.args.label_smoothing_factor:
        # transformers before 5.15 smooths a mean of the microbatch.
        is_known = False
    if stands_in or not is_known:
        look_once(trainer, is_known=is_known, stands_in=stands_in)


def _divide_once(trainer: Any) -> None:
    """Has a sum over microbatches divided by nothing: each has its part of the step's mean already.

    transformers 5.2.0 to 5.5.3 tells accelerate to divide gradients by the microbatches of a step.
    """
    num_steps = trainer.accelerator.gradient_accumulation_steps
    if num_steps == 1 or trainer.is_deepspeed_enabled:
        return
    trainer.accelerator.gradient_accumulation_steps = 1
    if not trainer.args.process_index:
        warnings.warn(
            f"accelerate would divide gradients by `gradient_accumulation_steps` ({num_steps}) once more, as "
            "transformers 5.2.0 to 5.5.3 has it do, and the loss of each microbatch is its part of the "
            f"step's already. dflop prevents it: gradients are {num_steps} times as large as without dflop",
            stacklevel=4,
        )
