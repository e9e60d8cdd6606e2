"""Microbatches of text alone, where ranks meet in the encoder (FSDP) or wait for its gradients (DDP)."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from dflop.integrations.backbone import backbone_of, unwrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from dflop.data.sampler import BalancedBatchSampler


OF_ENCODER = "Take `balance_encoder(model)`, or `ddp_find_unused_parameters=True`, or freeze the encoder"
"""What helps where DDP waits for the encoder (`unused_in_ddp`), in trainers of transformers."""


def is_sharded_by_fsdp2(model: nn.Module | None) -> bool:
    """Whether `fully_shard` was called on the model or on modules of it."""
    return model is not None and any(isinstance(module, FSDPModule) for module in model.modules())


def is_under_fsdp2(trainer: Any) -> bool:
    """Whether FSDP2 shards the model of a trainer of transformers, or will.

    Args:
        trainer: of transformers.

    Returns:
        Whether it does.
    """
    return bool(trainer.accelerator.is_fsdp2) or is_sharded_by_fsdp2(trainer.model)


def counts_of(sampler: BalancedBatchSampler) -> tuple[int, int]:
    """How many samples have nothing for the encoder, and how many there are.

    Args:
        sampler: of the training data.

    Returns:
        Both numbers.
    """
    return sampler.num_text_alone, int(sampler.state_dict()["num_samples"])


def meet_in_encoder(
    model: nn.Module | None, text_alone: tuple[int, int], rank: int, *, is_fsdp2: bool
) -> None:
    """Takes `attend_encoder` where it can; else rank 0 warns, if some samples have media and others none.

    Call it on every rank of a model whose layers are gathered from all ranks, before training. It makes
    groups of ranks.

    Args:
        model: that trains; None: it is not known here.
        text_alone: how many samples have nothing for the encoder, and how many there are.
        rank: of this process.
        is_fsdp2: whether FSDP2 shards the model, or will.
    """
    reason = _why_not_attended(model, is_fsdp2)
    num_alone, num_samples = text_alone
    if reason is not None and rank == 0 and 0 < num_alone < num_samples:
        warnings.warn(
            f"{num_alone} of {num_samples} samples have nothing for the encoder. A microbatch of those alone "
            "leaves the encoder out on one rank, while the others gather its weights and wait for that rank: "
            f"training hangs. Under FSDP2 `attend_encoder` prevents that, but {reason}. Or have the "
            "collation add a blank picture, without labels, to a microbatch of text alone",
            stacklevel=3,
        )


def meet_or_warn(trainer: Any, text_alone: tuple[int, int], meets: str) -> None:
    """Before a trainer of transformers trains: text alone hangs nobody, or a warning says that it will.

    Args:
        trainer: of transformers; each rank calls it.
        text_alone: how many samples have nothing for the encoder, and how many there are.
        meets: where ranks wait for each other.
    """
    rank = trainer.args.process_index
    if meets == "phase":
        meet_in_encoder(trainer.model, text_alone, rank, is_fsdp2=is_under_fsdp2(trainer))
    elif rank == 0 and (fact := unused_in_ddp(trainer, text_alone)):
        warnings.warn(f"{fact}. {OF_ENCODER}", stacklevel=2)


@contextmanager
def meeting_in_evaluation(model: nn.Module | None, *, is_fsdp2: bool) -> Iterator[None]:
    """Ranks meet in the encoder while they evaluate: text alone hangs nobody, as in training.

    Every rank enters it, and calls the model equally often within. Where `attend_encoder` cannot be taken,
    nothing changes.

    Args:
        model: that is evaluated.
        is_fsdp2: whether FSDP2 shards it, or will.
    """
    if model is None or _why_not_attended(model, is_fsdp2) is not None:
        yield
        return
    from dflop.integrations.encoder import attend_encoder

    with attend_encoder(model).evaluating():
        yield


def unused_in_ddp(trainer: Any, text_alone: tuple[int, int]) -> str | None:
    """What happens where DDP waits for an encoder that a microbatch of text alone leaves out.

    Args:
        trainer: of transformers.
        text_alone: how many samples have nothing for the encoder, and how many there are.

    Returns:
        The fact, without a way out; None where that cannot happen.
    """
    handler = getattr(trainer.accelerator, "ddp_handler", None)
    num_alone, num_samples = text_alone
    if trainer.args.world_size == 1 or not 0 < num_alone < num_samples or handler is None:
        return None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or handler.find_unused_parameters:
        return None
    if not waits_for_encoder(trainer.model):
        return None
    return (
        f"{num_alone} of {num_samples} samples have nothing for the encoder, which trains: after a "
        "microbatch of those alone DDP waits for its gradients for ever"
    )


def handles_of(model: nn.Module) -> list[Any]:
    """Who lets all ranks meet in the towers of a model.

    Args:
        model: of transformers.

    Returns:
        What `balance_encoder` or `attend_encoder` has made of it: one, or none.
    """
    # It imports transformers, which accelerate and Lightning do without.
    from dflop.integrations.encoder import handle_of

    found = [handle for module in model.modules() if (handle := handle_of(module)) is not None]
    return list(dict.fromkeys(found))


@contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """Ranks do not meet in the towers of a model: for generation, which calls it unequally often on each.

    Args:
        model: of transformers, in training mode or not.
    """
    with ExitStack() as stack:
        for handle in handles_of(model):
            stack.enter_context(handle.paused())
        yield


def waits_for_encoder(model: nn.Module) -> bool:
    """Whether a microbatch of text alone leaves gradients out that DDP waits for.

    Args:
        model: it, wrapped or not.

    Returns:
        Whether the encoder trains, and each rank encodes its own media.
    """
    whole = unwrapped(model)
    # The second line gives every parameter of the encoder that features depend on a gradient on every rank.
    if handles_of(whole):
        return False
    try:
        parts = (backbone_of(model), whole.get_output_embeddings())
    except ValueError:
        return False
    of_llm = {id(weight) for part in parts if part is not None for weight in part.parameters()}
    return any(weight.requires_grad and id(weight) not in of_llm for weight in whole.parameters())


def _why_not_attended(model: nn.Module | None, is_fsdp2: bool) -> str | None:
    """None where all ranks meet in the encoder, now or before."""
    if model is None:
        return "the model is not known here: prepare it before you make the loader"
    if not is_fsdp2:
        return "the model is not under FSDP2: take it, or a ZeRO stage below 3"
    try:
        # It imports transformers, which accelerate and Lightning do without.
        from dflop.integrations.encoder import attend_encoder

        attend_encoder(model)
    except (ValueError, ModuleNotFoundError) as error:
        return str(error)
    return None
