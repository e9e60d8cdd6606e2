"""LLaVA-OneVision in pieces: the modules of training, split into those of the profile.

    pixels_NCHW --embeddings--> [N, P, Dv] --layers--> [N, P, Dv] --projector, packing by media--> features_ED

All tiles have one size, so the attention of the tower is part of its layers' time. LoRA puts adapters on
the backbone's layers and freezes the rest of the backbone. Shape letters: see `models/adapter.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dflop.models.adapter import IGNORED, LlmInput
from dflop.models.backbone import LlmStage
from dflop.models.encoder import Encoder
from dflop.models.families.llava_onevision import LlavaOnevision
from dflop.models.parameters import materialise
from dflop.models.sequence import rows_of_rank
from dflop.models.tensor import cut_layer, heads_of_rank
from dflop.models.towers import inner_tower
from dflop.models.vocabulary import cut_vocabulary
from dflop.profiling.families.backbone import FEATURE_RATIO, TOKENS_PER_LABEL
from dflop.profiling.families.lora import add_adapters
from dflop.profiling.families.source import bounds_of, layers_at_once
from dflop.profiling.pieces import AttentionKind, Prepared

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dflop.profiling.pieces import Piece, PieceSettings

_STD = 0.02


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of the model in `model_dir`.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        From pixels to loss.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: the configuration asks for what training does not do.
    """
    adapter = LlavaOnevision(model_dir)
    return [
        _TowerEmbedding(adapter),
        _TowerLayer(adapter),
        _Projector(adapter),
        _TokenEmbedding(adapter),
        _LlmLayer(adapter),
        _Head(adapter),
    ]


class _Inputs:
    """Random tensors by name. Those of one name are views of the largest one so far, to save memory."""

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


class _Piece(ABC):
    """What the pieces of this family share."""

    name: str
    count = 1
    num_layers = 1
    segment_tokens: int | None = None
    max_segment_tokens: int | None = None
    wants_input_gradient = True
    is_tied = False

    def __init__(self, adapter: LlavaOnevision) -> None:
        self.adapter = adapter
        self.inputs = _Inputs()

    def attention(self, settings: PieceSettings) -> AttentionKind | None:
        del settings
        return None

    def unit(self) -> int:
        return 1

    def build(self, settings: PieceSettings) -> nn.Module:
        part = self._take(*self.adapter.build_whole(), settings)
        materialise(part, settings.device, settings.dtype, 0, lambda _: _STD)
        return part.train()

    @abstractmethod
    def _take(self, whole: Any, config: Any, settings: PieceSettings) -> nn.Module:
        """This part of the whole model, on the meta device; cut and frozen as the settings say."""

    @abstractmethod
    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        """See `Piece.prepare`."""


def _tower(whole: Any) -> Any:
    return inner_tower(whole.model.vision_tower)


class _TowerEmbedding(_Piece):
    """Pixels to hidden states of patches. It also holds parts of the tower that take memory but never run."""

    name = "encoder_embedding"
    wants_input_gradient = False

    def unit(self) -> int:
        return self.adapter.encoder_tokens_per_tile

    def _take(self, whole: Any, config: Any, settings: PieceSettings) -> nn.Module:
        # Layers after the last one that is read stay: they do not run, but their parameters take memory.
        del _tower(whole).encoder.layers[: max(self.adapter.feature_layers)]
        return whole.model.vision_tower

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        tiles = sum(segments) // self.unit()
        side = self.adapter.image_size
        pixels_NCHW = self.inputs.rows("pixels", tiles, (3, side, side), settings)
        embeddings = inner_tower(module).embeddings
        return Prepared(lambda: embeddings(pixels_NCHW), (pixels_NCHW,))


class _TowerLayer(_Piece):
    """Layers of the tower, attention over each tile included."""

    name = "encoder_layer"

    def __init__(self, adapter: LlavaOnevision) -> None:
        super().__init__(adapter)
        self.count = max(adapter.feature_layers)
        whole, _ = adapter.build_whole()
        self.num_layers = layers_at_once(self.count, _tower(whole).encoder.layers[0])
        self.segment_tokens: int | None = adapter.encoder_tokens_per_tile

    def unit(self) -> int:
        return self.adapter.encoder_tokens_per_tile

    def _take(self, whole: Any, config: Any, settings: PieceSettings) -> nn.Module:
        layers = nn.ModuleList(_tower(whole).encoder.layers[: self.num_layers])
        for layer in layers:
            cut_layer(layer, self.adapter.encoder_plan(), settings.tensor_parallel_degree)
        return layers

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

    def _take(self, whole: Any, config: Any, settings: PieceSettings) -> nn.Module:
        encoder = Encoder(whole, self.adapter)
        del encoder.model.vision_tower
        return encoder

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        tiles = sum(segments) // self.unit()
        config = self.adapter.config
        width = config.vision_config.hidden_size * len(self.adapter.feature_layers)
        hidden_NPD = self.inputs.rows("hidden", tiles, (self.unit(), width), settings)
        media = self.adapter.example_media(tiles)
        model = cast("Encoder", module).model
        return Prepared(
            lambda: self.adapter.project(model, hidden_NPD.detach().requires_grad_(), media), (hidden_NPD,)
        )


class _LlmPiece(_Piece):
    """A run of the backbone."""

    def _hidden(self, count: int, settings: PieceSettings) -> torch.Tensor:
        return self.inputs.rows("hidden", count, (self.adapter.hidden_size,), settings)

    def _own(self, count: int, settings: PieceSettings) -> torch.Tensor:
        """Hidden states of the rows that a rank has."""
        return self._hidden(rows_of_rank(count, settings.tensor_parallel_degree), settings)

    def _batch(
        self, segments: Sequence[int], num_features: int, num_labels: int, settings: PieceSettings
    ) -> LlmInput:
        total = sum(segments)
        generator = torch.Generator().manual_seed(0)
        # Only ids of one rank's part of the vocabulary: the other ranks are not there.
        vocabulary = -(-self.adapter.vocab_size // settings.tensor_parallel_degree)
        ids = torch.randint(0, vocabulary, (total,), generator=generator)
        bounds = bounds_of(segments, settings.device)
        positions = torch.cat([torch.arange(size) for size in segments])
        mask = torch.zeros(total, dtype=torch.bool)
        mask[:num_features] = True
        targets = torch.full((total,), IGNORED)
        targets[total - num_labels :] = ids[total - num_labels :]
        parts = [part.to(settings.device) for part in (ids, mask, positions, bounds, targets)]
        return LlmInput(parts[0], parts[1], parts[2], parts[3], parts[4])


class _TokenEmbedding(_LlmPiece):
    """Ids to hidden states, features in their places."""

    name = "llm_embedding"

    def _take(self, whole: Any, config: Any, settings: PieceSettings) -> nn.Module:
        backbone = whole.model.language_model
        cut_vocabulary(backbone.embed_tokens, settings.tensor_parallel_degree)
        stage = LlmStage(whole, range(0), is_first=True, is_last=False)
        return stage.requires_grad_(settings.lora_rank == 0)

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        num_features = int(FEATURE_RATIO * sum(segments))
        batch = self._batch(segments, num_features, 0, settings)
        features_ED = self._hidden(num_features, settings)
        return Prepared(
            lambda: module(batch, features_ED.detach().requires_grad_()), (features_ED, batch.input_ids_T)
        )


class _LlmLayer(_LlmPiece):
    """Layers of the backbone over packed samples."""

    name = "llm_layer"

    def __init__(self, adapter: LlavaOnevision) -> None:
        super().__init__(adapter)
        self.count = adapter.num_llm_layers
        whole, _ = adapter.build_whole()
        self.num_layers = layers_at_once(self.count, cast("Any", whole).model.language_model.layers[0])

    def attention(self, settings: PieceSettings) -> AttentionKind | None:
        shape = self.adapter.attention
        heads = heads_of_rank(shape.num_heads, shape.num_key_value_heads, settings.tensor_parallel_degree)
        return AttentionKind(*heads, shape.head_size, is_causal=True)

    def _take(self, whole: Any, config: Any, settings: PieceSettings) -> nn.Module:
        for layer in whole.model.language_model.layers[: self.num_layers]:
            cut_layer(layer, self.adapter.llm_plan(), settings.tensor_parallel_degree)
        stage = LlmStage(whole, range(self.num_layers), is_first=False, is_last=False)
        if settings.lora_rank:
            add_adapters(stage, settings.lora_rank)
        return stage

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        batch = self._batch(segments, 0, 0, settings)
        hidden_RD = self._own(sum(segments), settings)
        return Prepared(lambda: module(batch, hidden_RD.detach().requires_grad_()), (hidden_RD,))


class _Head(_LlmPiece):
    """Final norm, logits and loss. Tokens without a label are there, too, but cost almost nothing."""

    name = "llm_head"

    def __init__(self, adapter: LlavaOnevision) -> None:
        super().__init__(adapter)
        self.is_tied = adapter.config.tie_word_embeddings

    def _take(self, whole: Any, config: Any, settings: PieceSettings) -> nn.Module:
        cut_vocabulary(whole.lm_head, settings.tensor_parallel_degree)
        stage = LlmStage(whole, range(0), is_first=False, is_last=True)
        return stage.requires_grad_(settings.lora_rank == 0)

    def prepare(self, module: nn.Module, segments: Sequence[int], settings: PieceSettings) -> Prepared:
        num_labels = sum(segments)
        total = TOKENS_PER_LABEL * num_labels
        batch = self._batch([total], 0, num_labels, settings)
        hidden_RD = self._own(total, settings)
        return Prepared(lambda: module(batch, hidden_RD.detach().requires_grad_()), (hidden_RD,))
