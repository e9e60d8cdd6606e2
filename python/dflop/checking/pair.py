"""One model twice, with the same parameters: dflop's pieces, and Hugging Face's own class."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflop.data.collate import encoder_input, llm_input
from dflop.data.decoding import Job, decode
from dflop.data.shares import share_of
from dflop.models import layer_kinds, load_adapter
from dflop.models.adapter import EncoderInput
from dflop.models.compiled import compile_layers
from dflop.models.errors import hinted, profile_error
from dflop.models.load import Weights
from dflop.models.recompute import FULL, recomputing
from dflop.models.rules import trained_part
from dflop.parallel.shard import layers_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dflop.data.sample import Sample
    from dflop.models.adapter import ModelAdapter
    from dflop.models.media import MediaFile

_CPU, _FLOAT = torch.device("cpu"), torch.float32
_COPIES = 3
"""Of all parameters, at once: their values, and the gradients of both."""


class Pair:
    """The two models, in float32 on the CPU; they share the memory of their parameters."""

    def __init__(self, adapter: Any, seed: int | None) -> None:
        """Builds both.

        Args:
            adapter: Of the model; a `ModelAdapter`.
            seed: The parameters are drawn from it; none: they are read from the model directory, by dflop for
                the pieces and by `from_pretrained` for the other.

        Raises:
            ProfileError: There is too little memory; or weights are missing, or both read them differently.
        """
        self.adapter: ModelAdapter = adapter
        whole, _ = adapter.build_whole()
        _check_memory(sum(parameter.numel() for parameter in whole.parameters()))
        pieces = [
            adapter.build_encoder(_CPU, _FLOAT, seed),
            adapter.build_llm_stage(0, adapter.num_llm_layers, _CPU, _FLOAT, seed),
        ]
        if seed is None:
            weights = Weights(adapter.model_dir, whole)
            for piece in pieces:
                weights.fill(piece)
            self.model = adapter.model_class.from_pretrained(adapter.model_dir, dtype=_FLOAT)
        else:
            self.model = adapter.model_class(adapter.config_class.from_pretrained(adapter.model_dir)).float()
        self.encoder, self.llm = (piece.train() for piece in pieces)
        self.model.train()
        # Layers keep their inputs alone: a large model has more activations than parameters.
        if self.model.supports_gradient_checkpointing:
            # Its newer name, where transformers has it.
            old = self.model.gradient_checkpointing_enable
            getattr(self.model, "activation_checkpointing_enable", old)()
        self._share(is_read=seed is None)

    def _share(self, *, is_read: bool) -> None:
        """Gives the model the parameters of the pieces; where both were read, they must be equal."""
        ours = self.parameters()
        theirs = dict(self.model.named_parameters())
        differing = sorted(set(ours) ^ set(theirs))
        if is_read:
            differing += [n for n in ours if n in theirs and not torch.equal(ours[n], theirs[n])]
        if differing:
            message = (
                f"{len(differing)} parameters are not those of `{type(self.model).__name__}`, the first is "
                f"`{differing[0]}`"
            )
            raise profile_error(message)
        for name, parameter in theirs.items():
            parameter.data = ours[name].data

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of the pieces, by Hugging Face's names."""
        return {n: p for piece in (self.encoder, self.llm) for n, p in piece.named_parameters()}

    def compile_layers(self) -> None:
        """Compiles the layers of the pieces, as `train.compile: layers` does."""
        for piece in (self.encoder, self.llm):
            compile_layers(piece, layers_of(piece))

    def packed_loss(self, samples: Sequence[Sample], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of samples in one microbatch, by dflop: a sum over their label tokens.

        Args:
            samples: At least one.
            inputs: What the encoder reads of each, [n, *input_shape]; n is 0 for text.

        Returns:
            A scalar.
        """
        shares = [(share_of(sample), tiles) for sample, tiles in zip(samples, inputs, strict=True)]
        with_media = [(share, tiles) for share, tiles in shares if share.sample.media]
        if with_media:
            batch = encoder_input([share for share, _ in with_media], [t for _, t in with_media], _FLOAT)
        else:
            batch = EncoderInput(torch.empty(0, *self.adapter.input_shape), [])
        with recomputing(layers_of(self.encoder), FULL), recomputing(layers_of(self.llm), FULL):
            return self.llm(llm_input(samples), self.encoder(batch))

    def own_loss(self, arguments: dict[str, torch.Tensor], num_targets: int) -> torch.Tensor:
        """The loss of one sample alone, by Hugging Face's model: a sum over its label tokens.

        Args:
            arguments: Of the model; `labels` among them.
            num_targets: Label tokens.

        Returns:
            A scalar.
        """
        # With `labels=` the model gives their mean.
        return num_targets * self.model(**arguments, use_cache=False).loss


def inputs_of(
    adapter: ModelAdapter, sample: Sample, files: Sequence[tuple[MediaFile, Sequence[int]]]
) -> torch.Tensor:
    """What the encoder reads of a sample, decoded as for training.

    Args:
        adapter: Of the family.
        sample: Which.
        files: Of its media, in their order: the file, and the frames that are read.

    Returns:
        [n, *input_shape] float32.

    Raises:
        ProfileError: A file cannot be decoded; the message names it.
    """
    found = [
        decode(adapter, Job(file, frames, grid, 0, grid))
        for (file, frames), grid in zip(files, sample.media, strict=True)
    ]
    return torch.cat(found) if found else torch.empty(0, *adapter.input_shape)


@contextmanager
def first_layers(model_dir: Path, num_layers: int | None) -> Iterator[Path]:
    """A directory like that of a model, whose LLM has fewer layers and no weights.

    Where the first layers of the LLM are of one kind and the model has another, the last of them is of that.

    Args:
        model_dir: Of the model.
        num_layers: How many of the LLM's layers, the first ones; none: all, and the directory itself is
            given.

    Yields:
        The directory; it is gone afterwards.

    Raises:
        ProfileError: The whole model cannot be used.
    """
    if num_layers is None:
        yield model_dir
        return
    whole: Any = load_adapter(model_dir)
    content = json.loads((model_dir / "config.json").read_bytes())
    # Older files have the backbone's fields at the top.
    trained, _ = trained_part(content)
    text = trained.get("text_config", trained)
    num = text["num_hidden_layers"] = min(num_layers, whole.num_llm_layers)
    kinds = getattr(whole.config.text_config, "layer_types", None)
    if kinds:
        text["layer_types"] = [*kinds[:num]]
        if missing := [kind for kind in dict.fromkeys(kinds) if kind not in text["layer_types"]]:
            text["layer_types"][-1] = missing[-1]
        if own := text.get("per_layer_config"):
            # As transformers saves Gemma 4: heads of each layer that sees all tokens, which are alike.
            full = [n for n, kind in enumerate(text["layer_types"]) if kind == layer_kinds.FULL]
            text["per_layer_config"] = {str(n): next(iter(own.values())) for n in full}
    if (first := getattr(whole.config.text_config, "first_k_dense_replace", None)) is not None:
        # As many without experts as of the model, but not all where it has some with them.
        text["first_k_dense_replace"] = first if first >= whole.num_llm_layers else min(first, num - 1)
    if isinstance(text.get("mlp_layer_types"), list):
        text["mlp_layer_types"] = text["mlp_layer_types"][:num]
    # So many layers of the encoder give features to as many layers of the LLM.
    deep = getattr(getattr(whole.config, "vision_config", None), "deepstack_visual_indexes", None)
    if deep:
        trained["vision_config"]["deepstack_visual_indexes"] = [*deep[:num]]
    with TemporaryDirectory(prefix="dflop-check-") as folder:
        for path in model_dir.iterdir():
            if path.name != "config.json" and path.suffix not in {".safetensors", ".bin"}:
                (Path(folder) / path.name).symlink_to(path.resolve())
        (Path(folder) / "config.json").write_text(json.dumps(content))
        yield Path(folder)


def _check_memory(num_parameters: int) -> None:
    """Refuses a model that this machine cannot hold so often."""
    needed = 4 * _COPIES * num_parameters
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        # Elsewhere than on Linux the system says it when memory is used up.
        return
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    if needed > free:
        message = (
            f"{num_parameters:,} parameters in float32, with two gradients of each, are "
            f"{needed / 2**30:.1f} GiB; {free / 2**30:.1f} GiB are free"
        )
        raise hinted(
            profile_error(message), "pass `--layers 2`: the first layers of the LLM, with random weights"
        )
