"""Qwen2-Audio: a Whisper encoder over windows of 30 seconds, pooling by two, a linear projector.

    encoder_embedding   mel_NBF    -> hidden_NPV      two convolutions; 3,000 mel frames give 1,500 tokens
    encoder_layer       hidden_NPV -> hidden_NPV      attention within a window
    projector           hidden_NPV -> features_ED     pool of two, norm, linear map

The window is read whole, silence included, as the data profile counts it, and attention is measured without
the mask that hides silence as keys. Shape letters: N windows, B mel bins, F mel frames, P encoder tokens, V
and D widths of encoder and backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from dflop.profiling.families.backbone import backbone_pieces, backbone_rules
from dflop.profiling.families.shards import Cut, LayerPlan, cut_layer
from dflop.profiling.families.source import Fed, ModelPiece, Rule, Source, layers_at_once, random_states

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dflop.profiling.pieces import Piece, PieceSettings

# The stride of the second convolution.
_FRAMES_PER_TOKEN = 2


class SoundEmbedding(nn.Module):
    """Mel frames to hidden states."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.conv1, self.conv2, self.embed_positions = tower.conv1, tower.conv2, tower.embed_positions

    def forward(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """Hidden states before the first layer; Hugging Face has these lines in its tower.

        Args:
            mel_NBF: windows.

        Returns:
            hidden_NPV.
        """
        hidden_NVF = F.gelu(self.conv1(mel_NBF))
        hidden_NVP = F.gelu(self.conv2(hidden_NVF))
        return hidden_NVP.permute(0, 2, 1) + self.embed_positions.weight


class Layers(nn.Module):
    """A run of encoder layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_NPV: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layers.

        Args:
            hidden_NPV: before.

        Returns:
            hidden_NPV.
        """
        for layer in self.layers:
            hidden_NPV = layer(hidden_NPV, None)
        return hidden_NPV


class Projector(nn.Module):
    """The tower's pool and last norm, and the projector."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.avg_pooler, self.layer_norm = model.audio_tower.avg_pooler, model.audio_tower.layer_norm
        self.multi_modal_projector = model.multi_modal_projector

    def forward(self, hidden_NPV: torch.Tensor) -> torch.Tensor:
        """Features of all windows, those of silence included.

        Args:
            hidden_NPV: after the last layer.

        Returns:
            features_ED.
        """
        pooled_NQV = self.avg_pooler(hidden_NPV.permute(0, 2, 1)).permute(0, 2, 1)
        return self.multi_modal_projector(self.layer_norm(pooled_NQV)).flatten(0, 1)


def layer_plan(audio: Any) -> LayerPlan:
    """How an encoder layer is cut.

    Args:
        audio: configuration of the encoder.

    Returns:
        The plan.
    """
    heads = ("audio_config.encoder_attention_heads", audio.encoder_attention_heads)
    width = ("audio_config.encoder_ffn_dim", audio.encoder_ffn_dim)
    return LayerPlan(
        cuts=(
            *(Cut(f"self_attn.{name}_proj", *heads) for name in "qkv"),
            Cut("self_attn.out_proj", *heads, by_input=True),
            Cut("fc1", *width),
            Cut("fc2", *width, by_input=True),
        ),
        entries=("self_attn", "fc1"),
        counts=(("self_attn", "num_heads"),),
    )


def _set_layers(audio: Any, count: int) -> None:
    # Another name for the same field in some versions.
    audio.encoder_layers = audio.num_hidden_layers = count


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen2-Audio model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    source = Source(model_dir, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, _set_layers)
    audio = source.encoder
    drop = audio.encoder_layerdrop
    source.check(
        [
            *backbone_rules(source.text),
            Rule("audio_config.encoder_layerdrop", drop, drop == 0.0, "0: its layers are left out at random"),
        ]
    )
    window: int = audio.max_source_positions
    plan = layer_plan(audio)

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        layers = list(whole.model.audio_tower.layers)
        for layer in layers:
            cut_layer(layer, plan, settings.tensor_parallel_degree)
        return Layers(layers)

    def feed_mel(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        windows = sum(segments) // window
        return Fed(random_states(settings, windows, audio.num_mel_bins, _FRAMES_PER_TOKEN * window))

    def feed_hidden(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments) // window, window, audio.d_model))

    count: int = audio.encoder_layers
    at_once = layers_at_once(count, source.whole(1).model.audio_tower.layers[0])
    sizes: dict[str, Any] = {"segment_tokens": window, "size_unit": window}
    return [
        ModelPiece(
            "encoder_embedding",
            1,
            source,
            lambda whole, _: SoundEmbedding(whole.model.audio_tower),
            feed_mel,
            wants_input_gradient=False,
            **sizes,
        ),
        ModelPiece("encoder_layer", count, source, take_layers, feed_hidden, num_layers=at_once, **sizes),
        ModelPiece("projector", 1, source, lambda whole, _: Projector(whole.model), feed_hidden, **sizes),
        *backbone_pieces(source),
    ]
