"""LLaVA-OneVision in pieces: the modules of the training, cut where the profile has its cuts.

    pixels_NCHW --embeddings--> [N, P, Dv] --layers--> [N, P, Dv] --projector, packing by media--> features_ED

All tiles are of one size, so the attention of the tower is part of its layers' time. Shape letters: see
`models/adapter.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dflop.models.adapter import LlmInput
from dflop.models.errors import profile_error
from dflop.models.llava_onevision import LlavaOnevisionAdapter
from dflop.models.llava_onevision_pieces import IGNORED, LlavaOnevisionEncoder
from dflop.models.parameters import materialise
from dflop.profiling.pieces import AttentionKind, Prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dflop.profiling.pieces import Piece, PieceSettings

# Layers run at once: on a CPU as many as a small stage has, since one alone would keep its weights in cache.
_MAX_LAYERS, _MAX_LAYERS_LARGE, _LARGE_LAYER_PARAMETERS = 4, 2, 50_000_000
# Of the tokens of a pack, those that features fill; of the tokens of a pack with labels, those with a label.
_FEATURE_RATIO, _TOKENS_PER_LABEL = 0.75, 3


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of the model in `model_dir`.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        From pixels to loss.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: the configuration asks for what the training does not do.
    """
    adapter = LlavaOnevisionAdapter(model_dir)
    return [
        _TowerEmbedding(adapter),
        _TowerLayer(adapter),
        _Projector(adapter),
        _TokenEmbedding(adapter),
        _LlmLayer(adapter),
        _Head(adapter),
    ]


class _Inputs:
    """Random tensors by name; sizes of one name are views of the largest so far."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def rows(self, name: str, count: int, shape: Sequence[int], settings: PieceSettings) -> torch.Tensor:
        key = (name, tuple(shape), settings.device, settings.dtype)
        held = self._buffers.get(key)
        if held is None or held.shape[0] < count:
            generator = torch.Generator().manual_seed(0)
            values = torch.randn(count, *shape, generator=generator)
            held = self._buffers[key] = values.to(settings.device, settings.dtype)
        return held[:count]


class _Piece:
    """What the pieces of this family share."""

    name: str
    count = 1
    num_layers = 1
    segment_tokens: int | None = None
    wants_input_gradient = True

    def __init__(self, adapter: LlavaOnevisionAdapter) -> None:
        self.adapter = adapter
        self.inputs = _Inputs()

    def attention(self, settings: PieceSettings) -> AttentionKind | None:
        del settings
        return None

    def unit(self) -> int:
        return 1

    def build(self, settings: PieceSettings) -> nn.Module:
        if settings.tensor_parallel_degree != 1 or settings.lora_rank != 0:
            message = (
                f"`{self.adapter.family}` cannot be measured cut by tensor parallelism or with LoRA yet "
                f"(asked: degree {settings.tensor_parallel_degree}, rank {settings.lora_rank})"
            )
            raise profile_error(message)
        return self._build(settings).train()

    def _build(self, settings: PieceSettings) -> nn.Module:
        raise NotImplementedError

    def _tower(self, settings: PieceSettings, take: Callable[[Any], nn.Module]) -> nn.Module:
        """A part of the whole model, with memory and values."""
        whole, config = self.adapter.build_whole()
        encoder = LlavaOnevisionEncoder(whole, config)
        part = take(encoder)
        vision = self.adapter.config.vision_config
        std = float(getattr(vision, "initializer_range", 0.02))
        materialise(part, settings.device, settings.dtype, 0, lambda _: std)
        return part


def _layers_run(config: Any) -> int:
    """Layers of the tower that the features need."""
    named, last = config.vision_feature_layer, config.vision_config.num_hidden_layers
    return max(index % (last + 1) for index in ([named] if isinstance(named, int) else named))


class _TowerEmbedding(_Piece):
    """Pixels to hidden states of patches; holds what else of the tower is held but not run."""

    name = "encoder_embedding"
    wants_input_gradient = False

    def unit(self) -> int:
        return self.adapter.encoder_tokens_per_tile

    def _build(self, settings: PieceSettings) -> nn.Module:
        def take(encoder: Any) -> nn.Module:
            tower = getattr(encoder.model.vision_tower, "vision_model", encoder.model.vision_tower)
            # Layers above the last one that is read: parameters all the same.
            del tower.encoder.layers[: _layers_run(self.adapter.config)]
            return encoder.model.vision_tower

        return self._tower(settings, take)

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        tiles = sum(segments) // self.unit()
        side = self.adapter.image_size
        pixels_NCHW = self.inputs.rows("pixels", tiles, (3, side, side), settings)
        embeddings = cast("Any", getattr(module, "vision_model", module)).embeddings
        return Prepared(lambda: embeddings(pixels_NCHW), (pixels_NCHW,))


class _TowerLayer(_Piece):
    """Layers of the tower, attention over each tile included."""

    name = "encoder_layer"

    def __init__(self, adapter: LlavaOnevisionAdapter) -> None:
        super().__init__(adapter)
        self.count = _layers_run(adapter.config)
        self.num_layers = min(self.count, _MAX_LAYERS)
        self.segment_tokens = adapter.encoder_tokens_per_tile

    def unit(self) -> int:
        return self.adapter.encoder_tokens_per_tile

    def _build(self, settings: PieceSettings) -> nn.Module:
        def take(encoder: Any) -> nn.Module:
            tower = getattr(encoder.model.vision_tower, "vision_model", encoder.model.vision_tower)
            return nn.ModuleList(tower.encoder.layers[: self.num_layers])

        return self._tower(settings, take)

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        width = self.adapter.config.vision_config.hidden_size
        hidden_NPD = self.inputs.rows("hidden", len(segments), (self.unit(), width), settings)

        def forward() -> torch.Tensor:
            result_NPD = hidden_NPD.detach().requires_grad_()
            for layer in cast("nn.ModuleList", module):
                result_NPD = layer(result_NPD, None)
            return result_NPD

        return Prepared(forward, (hidden_NPD,))


class _Projector(_Piece):
    """Hidden states of patches to features, packed by the media they belong to."""

    name = "projector"

    def unit(self) -> int:
        return self.adapter.encoder_tokens_per_tile

    def _build(self, settings: PieceSettings) -> nn.Module:
        def take(encoder: Any) -> nn.Module:
            del encoder.model.vision_tower
            return encoder

        return self._tower(settings, take)

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        tiles = sum(segments) // self.unit()
        config = self.adapter.config
        named = config.vision_feature_layer
        width = config.vision_config.hidden_size * (1 if isinstance(named, int) else len(named))
        hidden_NPD = self.inputs.rows("hidden", tiles, (self.unit(), width), settings)
        media = self.adapter.example_media(tiles)
        encoder = cast("LlavaOnevisionEncoder", module)
        return Prepared(lambda: encoder.project(hidden_NPD.detach().requires_grad_(), media), (hidden_NPD,))


class _LlmPiece(_Piece):
    """A run of the backbone."""

    def _hidden(self, count: int, settings: PieceSettings) -> torch.Tensor:
        return self.inputs.rows("hidden", count, (self.adapter.hidden_size,), settings)

    def _batch(
        self, segments: Sequence[int], num_features: int, num_labels: int, settings: PieceSettings
    ) -> LlmInput:
        total = sum(segments)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.adapter.vocab_size, (total,), generator=generator)
        bounds = torch.tensor([0, *segments]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(size) for size in segments])
        mask = torch.zeros(total, dtype=torch.bool)
        mask[:num_features] = True
        targets = torch.full((total,), IGNORED)
        targets[total - num_labels :] = ids[total - num_labels :]
        return LlmInput(*(part.to(settings.device) for part in (ids, mask, positions, bounds, targets)))


class _TokenEmbedding(_LlmPiece):
    """Ids to hidden states, features in their places."""

    name = "llm_embedding"

    def _build(self, settings: PieceSettings) -> nn.Module:
        return self.adapter.build_llm_stage(0, 0, settings.device, settings.dtype, 0)

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        num_features = int(_FEATURE_RATIO * sum(segments))
        batch = self._batch(segments, num_features, 0, settings)
        features_ED = self._hidden(num_features, settings)
        return Prepared(
            lambda: module(batch, features_ED.detach().requires_grad_()), (features_ED, batch.input_ids_T)
        )


class _LlmLayer(_LlmPiece):
    """Layers of the backbone over packed samples."""

    name = "llm_layer"

    def __init__(self, adapter: LlavaOnevisionAdapter) -> None:
        super().__init__(adapter)
        self.count = adapter.num_llm_layers
        whole, _ = adapter.build_whole()
        layer = cast("Any", whole).model.language_model.layers[0]
        is_large = sum(p.numel() for p in layer.parameters()) > _LARGE_LAYER_PARAMETERS
        self.num_layers = min(self.count, _MAX_LAYERS_LARGE if is_large else _MAX_LAYERS)

    def attention(self, settings: PieceSettings) -> AttentionKind | None:
        del settings
        shape = self.adapter.attention
        return AttentionKind(shape.num_heads, shape.num_key_value_heads, shape.head_size, is_causal=True)

    def _build(self, settings: PieceSettings) -> nn.Module:
        return self.adapter.build_llm_layers(self.num_layers, settings.device, settings.dtype, 0)

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        batch = self._batch(segments, 0, 0, settings)
        hidden_TD = self._hidden(sum(segments), settings)
        return Prepared(lambda: module(batch, hidden_TD.detach().requires_grad_()), (hidden_TD,))


class _Head(_LlmPiece):
    """Final norm, logits and loss; the tokens without a label are there but cost next to nothing."""

    name = "llm_head"

    def _build(self, settings: PieceSettings) -> nn.Module:
        return self.adapter.build_llm_stage(
            self.adapter.num_llm_layers, 0, settings.device, settings.dtype, 0
        )

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        num_labels = sum(segments)
        total = _TOKENS_PER_LABEL * num_labels
        batch = self._batch([total], 0, num_labels, settings)
        hidden_TD = self._hidden(total, settings)
        return Prepared(lambda: module(batch, hidden_TD.detach().requires_grad_()), (hidden_TD,))
