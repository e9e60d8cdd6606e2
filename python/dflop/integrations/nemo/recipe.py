"""NeMo Automodel's VLM recipe on balanced batches; its YAML names the class.

recipe: dflop.integrations.nemo.recipe.BalancedRecipeForVLM   # in place of FinetuneRecipeForVLM
dflop: {remove_padding: true}                                 # if anything is asked for

YAML --> options under `dflop`, checked --> Automodel builds model, dataset and collation
     --> costs of the rows, the lines that were asked for --> `BalancedLoader` in place of its loader

Automodel sums each microbatch's loss and divides it by the label tokens of the whole step on all ranks.
"""

from __future__ import annotations

from dflop.data import needs_torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

# Of Automodel, whose own versions of everything stand apart from ours.
from nemo_automodel.components.config._arg_parser import (  # pyright: ignore[reportMissingImports]
    parse_args_and_load_config,
)
from nemo_automodel.components.datasets.vlm.fake_image import (  # pyright: ignore[reportMissingImports]
    inject_fake_image_into_conversation,
)
from nemo_automodel.components.datasets.vlm.loader import (  # pyright: ignore[reportMissingImports]
    VlmDataloaderConfig,
)
from nemo_automodel.recipes.vlm.finetune import (  # pyright: ignore[reportMissingImports]
    FinetuneRecipeForVLM,
)

from dflop.data.costs import costs
from dflop.data.sampler import BalancedBatchSampler
from dflop.integrations.backbone import unwrapped
from dflop.integrations.loader import check_length
from dflop.integrations.nemo.loader import BalancedLoader
from dflop.integrations.nemo.rows import records_of
from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.row_costs import costs_of_rows
from dflop.integrations.text_alone import (
    counts_of,
    meet_in_encoder,
    meeting_in_evaluation,
    waits_for_encoder,
)
from dflop.integrations.yaml_options import checked, split_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflop.data.costs import Costs

_PROFILE = "data_profile"
"""The key that names a data profile, instead of costs that are counted."""

_ALONE = {
    "pp_size": "a pipeline takes `local_batch_size` samples a microbatch, and balanced ones differ",
    "cp_size": "ranks share samples",
}
"""Degrees that must be 1."""

_STRATEGIES = ("fsdp2", "ddp")

_COUNTS = ("n_images_per_sample", "n_videos_per_sample", "num_patches")
"""What the collation says of this rank's media to models of its own; others hand it to their encoder."""

_OF_ENCODER = (
    "Set `distributed.find_unused_parameters: true`, or `dflop: {balance_encoder: true}`, or freeze it "
    "(`freeze_config.freeze_vision_tower: true`)"
)


@dataclass
class BalancedInput(VlmDataloaderConfig):
    """Automodel's input pipeline, whose loader is replaced by one of balanced batches."""

    balance: Callable[..., Any] | None = None
    """Makes it of what Automodel has built, and of what it was built with."""

    @classmethod
    def of(cls, config: Any, balance: Callable[..., Any]) -> BalancedInput:
        """The same pipeline with balanced batches.

        Args:
            config: Automodel's own.
            balance: as the field.

        Returns:
            A new one.
        """
        return cls(**{one.name: getattr(config, one.name) for one in fields(config)}, balance=balance)

    def build(self, **given: Any) -> Any:
        """What Automodel builds, with another loader.

        Args:
            **given: what Automodel gives.

        Returns:
            The loader and the processor.
        """
        built = super().build(**given)
        if self.balance is None:
            return built
        return replace(built, dataloader=self.balance(self, built, **given))


class BalancedRecipeForVLM(FinetuneRecipeForVLM):
    """Fine-tunes a VLM as `FinetuneRecipeForVLM` does, on batches of even work."""

    def setup(self) -> None:
        """Builds everything, as Automodel does, and balances the batches of training.

        Raises:
            ValueError: the YAML asks for what cannot be balanced; the message says which key.
        """
        given = self.cfg.get("dflop", None)
        options = checked(given.to_dict() if hasattr(given, "to_dict") else given, beside=(_PROFILE,))
        config = self.cfg.vlm_dataloader
        _check(self.cfg, config, options)
        if config is not None:
            self.cfg.vlm_dataloader = BalancedInput.of(config, partial(self._balanced, options))
        super().setup()

    def _balanced(
        self,
        options: dict[str, Any],
        config: BalancedInput,
        built: Any,
        *,
        dp_rank: int,
        dp_world_size: int,
        batch_size: int,
        **_: Any,
    ) -> BalancedLoader:
        """The loader of this rank; takes the other lines, too."""
        lines, of_sampler = split_lines(options)
        model, theirs = self.model_parts[0], built.dataloader
        collate = theirs.collate_fn
        is_ddp = _strategy(self.cfg) == "ddp"
        found = self._costs(config, built, of_sampler.pop(_PROFILE, None))
        if "balance_encoder" in lines:
            from dflop.integrations.encoder import balance_encoder

            # What the second line makes even already is none of the first one's.
            found = found.llm_alone()
            balance_encoder(unwrapped(model))
            collate = partial(_without_counts, collate)
        if "remove_padding" in lines:
            from dflop.integrations.padding import remove_padding

            remove_padding(model)
        sampler = BalancedBatchSampler(
            found,
            batch_size,
            dp_world_size,
            dp_rank,
            num_buckets=_num_buckets(self.cfg, batch_size, dp_world_size),
            **{
                "seed": self.cfg.get("seed", 42),
                "shuffle": config.shuffle,
                "drop_last": config.drop_last,
                # Ranks that share the encoder's work meet in each microbatch.
                "meets": "step" if is_ddp and "balance_encoder" not in lines else "phase",
                "is_padded": "remove_padding" not in lines,
                **of_sampler,
            },
        )
        check_length(theirs.dataset, sampler, "dataset")
        if not is_ddp:
            if "balance_encoder" not in lines and sampler.num_text_alone:
                meet_in_encoder(model, counts_of(sampler), self.dist_env.rank, is_fsdp2=True)
        elif dp_world_size > 1 and not self.cfg.get("distributed.find_unused_parameters", False):
            _check_text_alone(model, sampler)
        return BalancedLoader(
            theirs.dataset,
            sampler,
            collate_fn=collate,
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
            persistent_workers=config.persistent_workers,
            prefetch_factor=config.prefetch_factor,
        )

    def _costs(self, config: BalancedInput, built: Any, profile: Any) -> Costs:
        model = self.model_parts[0]
        if profile is not None:
            return costs(profile, cost=cost_of_parameters(model))
        pretokenization, collator, max_length = config.pretokenization, config.collator, None
        if pretokenization is not None and pretokenization.truncate:
            max_length = pretokenization.max_length
        if max_length is None and collator is not None:
            max_length = collator.kwargs.get("max_length")
        rows = records_of(built.dataloader.dataset, inject_fake_image_into_conversation)
        return costs_of_rows(rows, model, built.processor, max_length=max_length)

    def _run_validation_epoch(self, val_dataloader: Any) -> Any:
        """As Automodel does it; under FSDP2 text alone hangs nobody."""
        if _strategy(self.cfg) == "ddp":
            return super()._run_validation_epoch(val_dataloader)
        with meeting_in_evaluation(self.model_parts[0], is_fsdp2=True):
            return super()._run_validation_epoch(val_dataloader)


def _without_counts(collate: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
    batch = collate(rows)
    for name in _COUNTS:
        batch.pop(name, None)
    return batch


def _strategy(cfg: Any) -> str:
    return str(cfg.get("distributed.strategy", "fsdp2")).lower()


def _degree(cfg: Any, name: str) -> int:
    """As Automodel reads it: without a number it is one."""
    value = cfg.get(f"distributed.{name}", 1)
    return value if isinstance(value, int) else 1


def _num_buckets(cfg: Any, batch_size: int, num_ranks: int) -> int:
    size = cfg.step_scheduler.global_batch_size
    if size % (batch_size * num_ranks):
        message = (
            f"`step_scheduler.global_batch_size` is {size}, must be a multiple of `local_batch_size` x "
            f"data-parallel ranks, {batch_size} x {num_ranks}"
        )
        raise ValueError(message)
    return size // batch_size


def _check(cfg: Any, config: Any, options: dict[str, Any]) -> None:
    for name, why in _ALONE.items():
        if (degree := _degree(cfg, name)) > 1:
            message = f"`distributed.{name}` is {degree}, must be 1 for balanced batches: {why}"
            raise ValueError(message)
    if (strategy := _strategy(cfg)) not in _STRATEGIES:
        message = (
            f"`distributed.strategy` is {strategy!r}, must be 'fsdp2' or 'ddp' for balanced batches: no "
            "other was tried"
        )
        raise ValueError(message)
    for name in ("tp_size", "ep_size"):
        if options.get("balance_encoder") and (degree := _degree(cfg, name)) > 1:
            message = (
                f"`distributed.{name}` is {degree}, must be 1 for `dflop.balance_encoder`: the encoder's "
                "work is shared out over data-parallel ranks that hold all of it"
            )
            raise ValueError(message)
    if config is None:
        return
    if config.packing is not None:
        message = (
            f"`packed_sequence.pack_size` is {config.packing.pack_size}, leave `packed_sequence` out for "
            "balanced batches: it makes rows of several samples before they are balanced"
        )
        raise ValueError(message)
    if getattr(config.dataset_config, "shard_data", False):
        message = (
            "`dataset.shard_data` is true, must be false for balanced batches: balancing needs the rows of "
            "all ranks"
        )
        raise ValueError(message)
    length = None if config.collator is None else config.collator.kwargs.get("max_length")
    if length is not None and not options.get("remove_padding"):
        message = (
            f"`dataloader.collate_fn.max_length` is {length}, leave it out or set `dflop.remove_padding`: it "
            "pads every row to that length, so no batch is lighter than another"
        )
        raise ValueError(message)


def _check_text_alone(model: Any, sampler: BalancedBatchSampler) -> None:
    num_alone, num_samples = counts_of(sampler)
    if 0 < num_alone < num_samples and waits_for_encoder(model):
        message = (
            f"{num_alone} of {num_samples} rows have nothing for the encoder, which trains: after a "
            f"microbatch of those alone DDP waits for its gradients for ever. {_OF_ENCODER}"
        )
        raise ValueError(message)


def main() -> None:
    """What Automodel starts on each device: reads `-c train.yaml` and what follows, and trains."""
    recipe = BalancedRecipeForVLM(parse_args_and_load_config())
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
