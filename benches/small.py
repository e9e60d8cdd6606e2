"""A small LLaVA-OneVision on demo data in a folder: profiled, planned, ready to train on two ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}


def prepare(
    folder: Path,
    num_samples: int,
    fields: Mapping[str, object],
    *,
    more: str = "",
    is_tiny: bool = True,
    seconds: float = 10.0,
    only: Sequence[str] = (),
    weights_seed: int | None = None,
) -> None:
    """Demo data, profiles and a plan.

    Args:
        folder: where to; it exists.
        num_samples: of the data.
        fields: of `dflop.yaml`, whose values take the place of the demo's.
        more: sections to add to it.
        is_tiny: a model of widths of 32, instead of the demo's.
        seconds: for measuring the model.
        only: what the planner may choose, as `dflop plan --only` has it.
        weights_seed: write weights drawn with it, and train from them; none: the run draws its own.
    """
    dflop("demo-data", folder, "--samples", num_samples, "--force", folder=folder)
    if is_tiny:
        path = folder / "model/config.json"
        model = json.loads(path.read_text())
        model["vision_config"] |= VISION
        model["text_config"] |= TEXT
        path.write_text(json.dumps(model))
    if weights_seed is not None:
        fields = {**fields, "init": "pretrained"}
        write_weights(folder, weights_seed)
    config = folder / "dflop.yaml"
    text = config.read_text()
    for key, value in fields.items():
        text, count = re.subn(rf"{key}: [\w.e-]+", f"{key}: {value}", text)
        if count != 1:
            message = f"the demo's configuration has `{key}` {count} times, must be once"
            raise ValueError(message)
    config.write_text(text + more)
    dflop("profile", "data", folder=folder)
    dflop("profile", "model", "--budget-seconds", seconds, "--recompute", "none", "--fresh", folder=folder)
    dflop("plan", *(flag for rule in only for flag in ("--only", rule)), folder=folder)


def write_weights(folder: Path, seed: int) -> None:
    """Weights drawn with `seed`, as Hugging Face saves them, beside the model's configuration."""
    from dflop.models import load_adapter

    saved = folder / "saved"
    adapter: Any = load_adapter(folder / "model")
    adapter.reference_model(seed).save_pretrained(saved)
    for path in saved.glob("*.safetensors*"):
        path.rename(folder / "model" / path.name)


def dflop(*arguments: object, folder: Path) -> None:
    """Runs the command line of this environment; its talk goes to stderr."""
    command = [sys.executable, "-m", "dflop", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a journal."""
    return [json.loads(line) for line in path.read_text().splitlines()]
