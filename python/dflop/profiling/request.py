"""What `dflop profile model` asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.compiled import LAYERS
from dflop.models.compiled import MODES as COMPILED
from dflop.models.compiled import NONE as UNCOMPILED
from dflop.models.recompute import FULL, NONE, SELECTIVE

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_BUDGET_S = 600.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    model_dir: Path
    """Folder with `config.json`."""
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    device: str
    """`cpu` or `cuda`."""
    compile: str
    """`none` or `layers`, as `train.compile`."""
    num_neighbours: int
    """How many other ranks will work on this machine, beside one rank; ignored on a GPU."""
    budget_s: float
    """Time to measure, in seconds; exceeded where the least number of runs takes longer."""
    max_encoder_tokens: int
    """Largest microbatch to measure, in encoder tokens; 0 if the data has none."""
    max_encoder_segment_tokens: int
    """Largest encoder segment, in encoder tokens."""
    max_llm_tokens: int
    """Largest microbatch, in LLM tokens."""
    max_segment_tokens: int
    """Largest sample, in LLM tokens."""
    max_label_tokens: int
    """Largest microbatch, in label tokens."""
    recompute: tuple[str, ...]
    """Modes of recomputation that layers are also measured with: of `selective` and `full`."""
    tensor_parallel_degrees: tuple[int, ...]
    """Degrees to measure, above 1: for each, one rank's part of the layers."""
    lora_rank: int
    """Rank of LoRA adapters to measure with, too; 0: none."""
    partial: Path | None
    """File of the measurements so far; None keeps none."""
    network: bool = False
    """Whether all links between ranks are measured, or only point to point."""

    @property
    def compiles_layers(self) -> bool:
        """Whether layers are measured compiled."""
        return self.compile == LAYERS

    @staticmethod
    def parse(fields: Mapping[str, Any]) -> Request:
        """The request in `fields`.

        Args:
            fields: as the command line writes them; `out` is not read here.

        Returns:
            The request.

        Raises:
            ValueError: a field is missing or out of range; the message names it.
        """
        missing = [name for name in ("model_dir", "max_llm_tokens") if name not in fields]
        if missing:
            message = f"request of `profile model`: `{missing[0]}` is missing"
            raise ValueError(message)
        max_llm_tokens = int(fields["max_llm_tokens"])
        max_encoder_tokens = int(fields.get("max_encoder_tokens", 0))
        modes = [str(mode) for mode in fields.get("recompute", (NONE,))]
        degrees = sorted({int(degree) for degree in fields.get("tensor_parallel_degrees", (1,))})
        request = Request(
            model_dir=Path(fields["model_dir"]),
            dtype=str(fields.get("dtype", "float32")),
            device=str(fields.get("device", "cpu")),
            compile=str(fields.get("compile", UNCOMPILED)),
            num_neighbours=int(fields.get("num_neighbours", 0)),
            budget_s=float(fields.get("budget_s") or DEFAULT_BUDGET_S),
            max_encoder_tokens=max_encoder_tokens,
            max_encoder_segment_tokens=int(fields.get("max_encoder_segment_tokens") or max_encoder_tokens),
            max_llm_tokens=max_llm_tokens,
            max_segment_tokens=min(int(fields.get("max_segment_tokens") or max_llm_tokens), max_llm_tokens),
            max_label_tokens=int(fields.get("max_label_tokens") or max_llm_tokens),
            recompute=tuple(mode for mode in (SELECTIVE, FULL) if mode in modes),
            tensor_parallel_degrees=tuple(degree for degree in degrees if degree != 1),
            lora_rank=int(fields.get("lora_rank", 0)),
            partial=Path(fields["partial"]) if fields.get("partial") else None,
            network=bool(fields.get("network", False)),
        )
        unknown = sorted(set(modes) - {NONE, SELECTIVE, FULL})
        rules = [
            ("dtype", request.dtype, request.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            ("device", request.device, request.device in ("cpu", "cuda"), "`cpu` or `cuda`"),
            ("compile", request.compile, request.compile in COMPILED, "`none` or `layers`"),
            ("max_llm_tokens", max_llm_tokens, max_llm_tokens > 0, "above 0"),
            ("num_neighbours", request.num_neighbours, request.num_neighbours >= 0, "0 or more"),
            ("recompute", ", ".join(unknown), not unknown, "of `none`, `selective` and `full`"),
            ("tensor_parallel_degrees", degrees, all(degree > 0 for degree in degrees), "above 0"),
            ("lora_rank", request.lora_rank, request.lora_rank >= 0, "0 or more"),
        ]
        for name, value, holds, rule in rules:
            if not holds:
                message = f"request of `profile model`: `{name}` is {value}, must be {rule}"
                raise ValueError(message)
        return request
