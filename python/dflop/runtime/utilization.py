"""How much work a step was: operations of the model, and their share of the devices' peak rate (MFU)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflop._native import ModelFlops, ProfileError, peak_gflops

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dflop._native import Dataset

WORK = ("schedule", "pack", "agree", "step", "write")
"""Parts of the clock (`clock.py`) that count as the step; checkpoints and evaluations do not."""


class Utilization:
    """Computes the rates of a run, on the leader."""

    def __init__(
        self,
        model_dir: Path,
        recipe: str,
        lora_rank: int,
        dtype: str,
        device: torch.device,
        num_ranks: int,
    ) -> None:
        """Reads the sizes of the model.

        Args:
            model_dir: With `config.json`.
            recipe: What trains.
            lora_rank: Of the adapters under the recipe `lora`; others have none.
            dtype: What forward and backward compute in.
            device: Of this rank; all ranks have the same kind.
            num_ranks: Number of all ranks.
        """
        self._num_ranks = num_ranks
        self._flops: ModelFlops | None = None
        self._peak_gflops: int | None = None
        self.reason: str | None = None
        """Why MFU cannot be computed; none where it can."""
        try:
            config = (model_dir / "config.json").read_text(encoding="utf-8")
            self._flops = ModelFlops(config, recipe, lora_rank)
        except ProfileError as error:
            self.reason = f"the operations of this model are not counted: {error}"
            return
        name = "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        if device.type == "cuda":
            self._peak_gflops = peak_gflops(name, dtype)
        if self._peak_gflops is None:
            self.reason = f"no vendor's peak rate of {name} is known here"

    def of(self, dataset: Dataset, samples: Sequence[int], clock_ns: dict[str, int]) -> dict[str, Any]:
        """Fields of a line of `metrics.jsonl`.

        Args:
            dataset: Of the run.
            samples: Of the step.
            clock_ns: Parts of the wall clock that passed since the step before was written.

        Returns:
            `samples_per_s` and `tokens_per_s` (LLM tokens), of all ranks by the wall clock; `model_flops` of
            the step, and `mfu`, their share of the peak of all ranks in that time; none where not known.
        """
        work_s = max(1, sum(clock_ns[part] for part in WORK)) / 1e9
        flops = None if self._flops is None else self._flops.of(dataset, samples)
        mfu = None
        if flops is not None and self._peak_gflops is not None:
            mfu = flops / (work_s * self._num_ranks * self._peak_gflops * 1e9)
        tokens = sum(dataset.shape(sample)[1] for sample in samples)
        return {
            "samples_per_s": len(samples) / work_s,
            "tokens_per_s": tokens / work_s,
            "model_flops": flops,
            "mfu": mfu,
        }
