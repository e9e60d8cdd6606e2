"""Where pieces come from: a model's configuration, and its modules on the meta device.

    config.json --> the whole model with few layers, on the meta device --> modules of a piece --> values

A whole model on the meta device takes no memory, and the modules of a piece are Hugging Face's own.
"""

from __future__ import annotations

import functools
import json
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.experts import WITH_DENSE_FIRST, has_experts
from dflop.models.layer_kinds import keep_none_for_others
from dflop.models.packing import PACKED
from dflop.models.parameters import fill_parameter, materialise
from dflop.models.rules import check_rules, trained_part
from dflop.models.short_conv import WITH_SHORT_CONV, kinds_like_all
from dflop.models.towers import backbone_of
from dflop.profiling.families.lora import add_adapters
from dflop.profiling.pieces import Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.rules import Rule
    from dflop.profiling.pieces import AttentionKind, PieceSettings

# How many layers are run at once: as many as a small stage has. The weights of a single one would stay in the
# cache.
_MAX_LAYERS, _MAX_LAYERS_LARGE, _LARGE_LAYER_PARAMETERS = 4, 2, 50_000_000
_STD = 0.02
_SEED = 0
# How many values `_fill_fast` repeats. Odd, so that the rows of a weight are not all equal.
_BLOCK_VALUES = 1_000_003


def set_hidden_layers(encoder: Any, count: int) -> None:
    """Sets the number of layers, where it has its usual name.

    Args:
        encoder: configuration of the encoder.
        count: layers.
    """
    encoder.num_hidden_layers = count


class Source:
    """The configuration of a model and the way to its modules."""

    def __init__(
        self,
        model_dir: Path,
        config_class: Any,
        model_class: Any,
        set_encoder_layers: Callable[[Any, int], None],
        encoder_attention: str = "sdpa",
        encoders: tuple[str, ...] = (),
    ) -> None:
        """Reads `config.json`.

        Args:
            model_dir: folder with `config.json`.
            config_class: Hugging Face's class of the configuration.
            model_class: Hugging Face's class of the model, with `.model` and `.lm_head`.
            set_encoder_layers: sets the number of layers in the encoder's configuration, its first argument.
            encoder_attention: name of the attention function of the encoder's layers.
            encoders: fields of the configuration that describe the encoders, where there are several.
        """
        self.path = model_dir / "config.json"
        self._content, self._prefix = trained_part(json.loads(self.path.read_bytes()))
        self._config_class, self._model_class = config_class, model_class
        self._set_encoder_layers = set_encoder_layers
        self._encoder_attention = encoder_attention
        self._encoders = encoders
        self.config = self._read()

    def _read(self) -> Any:
        return self._config_class.from_dict(deepcopy(self._content))

    @property
    def text(self) -> Any:
        """Configuration of the backbone."""
        return self.config.text_config

    def encoders_of(self, config: Any) -> list[Any]:
        """What a configuration says of each encoder.

        Args:
            config: Hugging Face's.

        Returns:
            Its parts; mostly one.
        """
        named = self._encoders or (
            ("audio_config",) if hasattr(config, "audio_config") else ("vision_config",)
        )
        return [getattr(config, name) for name in named]

    @property
    def encoder(self) -> Any:
        """Configuration of the encoder; of several, of the first."""
        return self.encoders_of(self.config)[0]

    def check(self, rules: Sequence[Rule]) -> None:
        """Refuses a configuration that breaks a rule.

        Args:
            rules: all of them; the message names each that is broken.

        Raises:
            ProfileError: one is broken.
        """
        check_rules(self.path, rules, self._prefix)

    def whole(self, num_layers: int) -> Any:
        """The whole model on the meta device, with few layers and a real rotary embedding.

        Args:
            num_layers: layers of the encoder, and of the backbone unless it has fewer.

        Returns:
            The model; its layers use the attention functions of training.
        """
        config = self._read()
        text = config.text_config
        text.num_hidden_layers = min(num_layers, text.num_hidden_layers)
        if text.model_type in WITH_SHORT_CONV:
            # Those that are built stand for all.
            text.layer_types = kinds_like_all(self.text) * text.num_hidden_layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
        if text.model_type in WITH_DENSE_FIRST and has_experts(self.text):
            # The first layers have no experts; those that are built stand for the layers behind them.
            text.first_k_dense_replace = 0
        for encoder in self.encoders_of(config):
            self._set_encoder_layers(encoder, num_layers)
        with torch.device("meta"):
            whole = self._model_class(config)
        # Layers look their attention function up by this name at each call.
        text._attn_implementation = PACKED
        for encoder in self.encoders_of(config):
            encoder._attn_implementation = self._encoder_attention
        backbone = backbone_of(whole)
        keep_none_for_others(backbone.layers)
        backbone.rotary_emb = type(backbone.rotary_emb)(config=text)
        for module in backbone.layers.modules():
            for name, buffer in module.named_buffers(recurse=False):
                # As before weights are read: the scale of a layer is 1, the correction of a router 0.
                value = 1.0 if name == "layer_scalar" else 0.0
                setattr(module, name, torch.full_like(buffer, value, device="cpu"))
        scale = getattr(backbone.embed_tokens, "scalar_embed_scale", None)
        if scale is not None:
            # A buffer, so it is not filled along with the parameters.
            backbone.embed_tokens.embed_scale = torch.tensor(scale)
        return whole


def layers_at_once(count: int, one: nn.Module, period: int = 1) -> int:
    """How many layers of a stack to measure at once.

    Args:
        count: layers of the stack.
        one: one of them, on any device.
        period: of the kinds of layers, which come again after so many; divides `count`.

    Returns:
        At least 1, at most `count`, a multiple of `period`.
    """
    is_large = sum(parameter.numel() for parameter in one.parameters()) > _LARGE_LAYER_PARAMETERS
    few = min(count, _MAX_LAYERS_LARGE if is_large else _MAX_LAYERS)
    return max(period, few - few % period)


@dataclass(frozen=True)
class Fed:
    """The inputs of a piece for one size."""

    leaf: torch.Tensor
    """What arrives from the piece before; or pixels, sound or ids."""
    others: tuple[Any, ...] = ()
    """Further arguments of the piece's forward."""
    buffers: tuple[torch.Tensor, ...] = ()
    """Large tensors among `others`."""


@dataclass
class ModelPiece:
    """A `Piece` made of two functions: one takes its modules from the model, one makes its inputs."""

    name: str
    count: int
    source: Source
    take: Callable[[Any, PieceSettings], nn.Module]
    """(whole model on the meta device, settings) -> modules of the piece, its buffers real."""
    feed: Callable[[nn.Module, Sequence[int], PieceSettings], Fed]
    """(what `take` gave, segments, settings) -> inputs."""
    num_layers: int = 1
    segment_tokens: int | None = None
    max_segment_tokens: int | None = None
    wants_input_gradient: bool = True
    is_tied: bool = False
    kind: Callable[[PieceSettings], AttentionKind] | None = None
    size_unit: int = 1
    adapters: str | None = None
    """With LoRA: the name of the modules that get adapters, such as `layers`; `none`: frozen, without
    adapters; None: LoRA does not change it."""

    def attention(self, settings: PieceSettings) -> AttentionKind | None:
        """See `Piece.attention`.

        Args:
            settings: how it would be built.

        Returns:
            Sizes of one rank's part.
        """
        return self.kind(settings) if self.kind is not None else None

    def unit(self) -> int:
        """See `Piece.unit`.

        Returns:
            Tokens.
        """
        return self.size_unit

    def build(self, settings: PieceSettings) -> nn.Module:
        """See `Piece.build`.

        Args:
            settings: how to build it.

        Returns:
            The module, in training mode.

        Raises:
            ProfileError: its layers cannot be cut over so many ranks; the message names the field.
        """
        module = self.take(self.source.whole(self.num_layers), settings)
        if settings.lora_rank and self.adapters is not None:
            module.requires_grad_(False)
            if self.adapters != "none":
                add_adapters(module.get_submodule(self.adapters), settings.lora_rank)
        materialise(module, settings.device, settings.dtype, _SEED, lambda _: _STD, _fill_fast)
        return module.train()

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        """See `Piece.prepare`.

        Args:
            module: what `build` gave.
            segments: tokens each.
            settings: those of `build`.

        Returns:
            The piece with inputs.

        Raises:
            ValueError: there are no segments, or one does not fit `segment_tokens` or `unit`.
        """
        wrong = [tokens for tokens in segments if tokens < 1 or tokens % self.size_unit]
        if wrong or not segments:
            message = (
                f"segments {list(segments)} of `{self.name}`: each must be a multiple of {self.size_unit}"
            )
            raise ValueError(message)
        fed = self.feed(module, segments, settings)

        def forward() -> torch.Tensor:
            leaf = fed.leaf.detach()
            return module(leaf.requires_grad_() if self.wants_input_gradient else leaf, *fed.others)

        return Prepared(forward, (fed.leaf, *fed.buffers))


@functools.cache
def _block(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(_BLOCK_VALUES, generator=generator).to(device, dtype)


@torch.no_grad()
def _fill_fast(parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
    """As `fill_parameter`, but repeats few values, which is fast: no operator's time depends on values."""
    if parameter.dim() < 2 or parameter.numel() <= _BLOCK_VALUES:
        fill_parameter(parameter, name, seed, std)
        return
    block = _block(parameter.device, parameter.dtype) * std
    for part in parameter.view(-1).split(_BLOCK_VALUES):
        part.copy_(block[: part.numel()])


def random_states(settings: PieceSettings, *shape: int) -> torch.Tensor:
    """Random activations, the same at each call.

    Args:
        settings: tell device and dtype.
        *shape: of the tensor.

    Returns:
        Normal values.
    """
    generator = torch.Generator(settings.device).manual_seed(_SEED)
    return torch.randn(shape, generator=generator, device=settings.device, dtype=settings.dtype)


def bounds_of(segments: Sequence[int], device: torch.device) -> torch.Tensor:
    """Where segments begin and end.

    Args:
        segments: tokens each.
        device: of the result.

    Returns:
        [M + 1] int32.
    """
    return torch.tensor([0, *segments]).cumsum(0).to(torch.int32).to(device)
