"""Qwen2-Audio: a Whisper encoder over windows of 30 seconds, pooling by two, a linear projector.

    sound --mel--> [N, B + 1, F] --two convolutions--> [N, P, V] --layers, pool, projector--> features_ED

A window is read whole, silence included. The last of its B + 1 rows is 1 in mel frames with sound, else 0.
Attention does not see tokens of silence (they are masked as keys), and they give no features. A sound is one
window here, several in Audio Flamingo 3, which has the same encoder (`audioflamingo3.py`). Shape letters: see
`models/adapter.py`; B mel bins, F mel frames, V the width of the encoder.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from dflop.models import sound
from dflop.models.adapter import MediaGrid
from dflop.models.errors import profile_error
from dflop.models.processor_files import processor_fields
from dflop.models.rules import Rule
from dflop.models.tiles import TileFamily, tile_plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.media import MediaFile
    from dflop.models.tensor import LayerPlan

_FRAMES_PER_TOKEN = 2
"""The stride of the second convolution."""


def num_features(num_frames: int) -> int:
    """How many features so many mel frames of a window give, as in `_get_feat_extract_output_lengths`."""
    return ((num_frames - 1) // 2 + 1 - 2) // 2 + 1


class Qwen2Audio(TileFamily):
    """`ModelAdapter` of Qwen2-Audio."""

    heads_field: str = "encoder_attention_heads"
    """How `audio_config` calls the number of heads."""
    mlp_field: str = "encoder_ffn_dim"
    """How it calls the width of the MLP."""
    drop_field: str = "encoder_layerdrop"
    """How it calls the share of layers that are left out."""

    family = "qwen2_audio"
    config_class = Qwen2AudioConfig
    model_class = Qwen2AudioForConditionalGeneration
    encoder_modules = ("audio_tower", "multi_modal_projector")
    encoder_config = "audio_config"
    runs_read_inputs = True

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        audio = self.vision
        self.num_encoder_layers = audio.encoder_layers
        self.feature_layers = (audio.encoder_layers,)
        self.num_mel_bins: int = audio.num_mel_bins
        self.encoder_tokens_per_tile = audio.max_source_positions
        self.input_shape = (audio.num_mel_bins + 1, _FRAMES_PER_TOKEN * audio.max_source_positions)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        drop = getattr(self.vision, self.drop_field)
        wanted = "0: its layers are left out at random"
        return [Rule(f"audio_config.{self.drop_field}", drop, drop == 0.0, wanted)]

    def embed(self, model: Any, inputs_N: torch.Tensor) -> torch.Tensor:
        """See `TileFamily.embed`; the same lines as in the forward of Hugging Face's tower."""
        tower = model.audio_tower
        hidden_NVF = F.gelu(tower.conv1(inputs_N[:, : self.num_mel_bins]))
        hidden_NVP = F.gelu(tower.conv2(hidden_NVF))
        return hidden_NVP.permute(0, 2, 1) + tower.embed_positions.weight

    @property
    def encoder_width(self) -> int:
        """See `TileFamily.encoder_width`."""
        return self.vision.d_model

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [(tower := model.audio_tower).conv1, tower.conv2, tower.embed_positions]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return model.audio_tower.layers

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        audio = self.vision
        return tile_plan(
            "self_attn",
            "out_proj",
            ("fc1", "fc2", "fc1"),
            (f"audio_config.{self.heads_field}", audio.encoder_attention_heads),
            (f"audio_config.{self.mlp_field}", audio.encoder_ffn_dim),
            ("num_heads",),
        )

    def layer_arguments(self, inputs_N: torch.Tensor) -> tuple[Any, ...]:
        """The mask that hides keys of silence: [N, 1, P, P], true where a token is seen."""
        # Mel frame 2p is in the middle of what token p reads: the token is sound if that frame is.
        is_sound_NP = inputs_N[:, self.num_mel_bins, ::_FRAMES_PER_TOKEN] > 0
        tokens = is_sound_NP.shape[1]
        return (is_sound_NP[:, None, None, :].expand(-1, 1, tokens, -1),)

    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """See `TileFamily.project`."""
        tower = model.audio_tower
        pooled_NQV = tower.avg_pooler(hidden_NPV.permute(0, 2, 1)).permute(0, 2, 1)
        features_NQD = model.multi_modal_projector(tower.layer_norm(pooled_NQV))
        # All windows of a sound but the last are full, so its features come first.
        sounds = features_NQD.split([grid.num_tiles for grid in media])
        return torch.cat([own.flatten(0, 1)[: g.num_features] for own, g in zip(sounds, media, strict=True)])

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Sounds that fill a window each; see `ModelAdapter.example_media`."""
        features = num_features(self.input_shape[1])
        return [MediaGrid("audio", 1, 0, 0, features)] * num_tiles

    def make_processor(self) -> Any:
        """Hugging Face's feature extractor of this model."""
        from transformers import WhisperFeatureExtractor

        return WhisperFeatureExtractor.from_dict(processor_fields(self.model_dir, "feature_extractor"))

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """See `ModelAdapter.pixels`: the windows of the sound, [n, B + 1, F]."""
        if kind != "audio":
            message = f"`{kind}` is no kind of media that `{self.family}` reads, it reads `audio`"
            raise ValueError(message)
        del frame_indices
        extractor = self.processor
        samples = sound.decode_sound(file, extractor.sampling_rate)
        each, most = extractor.n_samples, self.max_windows * extractor.n_samples
        options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
        windows = [samples[first : first + each] for first in range(0, min(len(samples), most), each)]
        found = extractor(windows, sampling_rate=extractor.sampling_rate, **options)
        mask_NF = found["attention_mask"]
        features = sum(num_features(frames) for frames in mask_NF.sum(1).tolist())
        if len(samples) > most or (grid is not None and features != grid.num_features):
            wanted = "" if grid is None else f", profiled as {grid.num_features}"
            message = (
                f"`{file}` has {len(samples)} samples of sound, {features} features{wanted}; "
                f"at most {most} samples are read"
            )
            raise profile_error(message)
        return torch.cat([found["input_features"], mask_NF[:, None].float()], dim=1).float()

    @cached_property
    def max_windows(self) -> int:
        """Windows of a sound, at most; a longer one is refused."""
        return 1


ADAPTER = Qwen2Audio
