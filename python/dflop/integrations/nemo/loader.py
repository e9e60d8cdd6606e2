"""The loader of balanced batches, which Automodel's step scheduler and checkpoints take for their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchdata.stateful_dataloader import StatefulDataLoader

if TYPE_CHECKING:
    from dflop.data.sampler import BalancedBatchSampler

_BEGUN = "begun_epoch"
"""Under this name a state keeps the epoch that was running, beside what the sampler keeps."""


class BalancedLoader(StatefulDataLoader):
    """Gives the batches of a `BalancedBatchSampler`. Its state is the sampler's, and equal on all ranks."""

    def __init__(self, dataset: Any, sampler: BalancedBatchSampler, **options: Any) -> None:
        """Reads nothing yet.

        Args:
            dataset: with an entry for each position that the sampler gives.
            sampler: chooses the batches of this rank.
            **options: of the DataLoader.
        """
        super().__init__(dataset, batch_sampler=sampler, **options)
        # The step scheduler sets the epoch of this attribute. torch has a sampler there that it never asks.
        object.__setattr__(self, "sampler", sampler)
        self._balanced = sampler
        self._begun = sampler.epoch
        # Batches given out since the loop began.
        self._taken = 0
        # An epoch of which a loaded state has trained everything.
        self._over: int | None = None

    def __iter__(self) -> Any:
        """Batches of the epoch, from a loaded position on."""
        over, self._over = self._over, None
        if over is not None and self._balanced.epoch == over:
            # Automodel begins with the epoch in which it saved, even behind its last step.
            self._balanced.set_epoch(over + 1)
            return
        self._begun, self._taken = self._balanced.epoch, 0
        for batch in super().__iter__():
            self._taken += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands after the batches that were given out.

        Returns:
            Numbers and texts, equal on all ranks.
        """
        return {**self._balanced.state_dict(num_batches=self._taken), _BEGUN: self._begun}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next loop goes on from there.

        Args:
            state_dict: of `state_dict`.

        Raises:
            ValueError: it is of other data or global batches, or of a run without balanced batches.
        """
        if _BEGUN not in state_dict:
            message = (
                "the checkpoint's loader is none of balanced batches, and goes on without them alone: "
                "samples would be left out or trained twice. Go on with `recipe: FinetuneRecipeForVLM`, or "
                "begin anew in another `checkpoint.checkpoint_dir`"
            )
            raise ValueError(message)
        self._balanced.load_state_dict(state_dict)
        begun = int(state_dict[_BEGUN])
        self._over = begun if self._balanced.epoch > begun else None
        self._taken = 0
