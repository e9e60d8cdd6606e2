"""Voxtral: a Whisper encoder over windows of 30 seconds, all of whose tokens are read, four at a time.

    sound --padded to whole windows, mel--> [N, B, F] --as Qwen2-Audio, nothing hidden--> hidden_NPV
          --norm, four side by side, two linear maps--> features_ED

The spectrum is that of the whole sound, padding included: what is quieter than its loudest frame by more than
80 dB is raised to that, in all windows alike. Then each window is encoded alone. Silence gives features like
sound. Shape letters: see `qwen2_audio.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import VoxtralConfig, VoxtralForConditionalGeneration

from dflop.models import sound
from dflop.models.adapter import MediaGrid
from dflop.models.errors import profile_error
from dflop.models.families.qwen2_audio import Qwen2Audio
from dflop.models.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dflop.models.media import MediaFile

_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


class Voxtral(Qwen2Audio):
    """`ModelAdapter` of Voxtral."""

    heads_field = "num_attention_heads"
    mlp_field = "intermediate_size"
    family = "voxtral"
    config_class = VoxtralConfig
    model_class = VoxtralForConditionalGeneration
    runs_read_inputs = False

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        _, frames = self.input_shape
        self.input_shape = (self.num_mel_bins, frames)
        self.merged_tokens: int = self.vision.intermediate_size // self.vision.hidden_size
        """Encoder tokens of a feature."""

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        audio = self.vision
        width, merged = audio.hidden_size, audio.intermediate_size
        tokens = max(merged // width, 1)
        positions = audio.max_source_positions
        return [
            Rule(
                "audio_config.intermediate_size",
                merged,
                merged % width == 0,
                f"a multiple of `audio_config.hidden_size`, {width}: so many tokens are a feature",
            ),
            Rule(
                "audio_config.max_source_positions",
                positions,
                positions % tokens == 0,
                f"a multiple of {tokens}, the tokens of a feature",
            ),
            *(
                Rule(f"audio_config.{name}", getattr(audio, name), getattr(audio, name) == 0, "0")
                for name in _DROPOUTS
            ),
        ]

    def layer_arguments(self, inputs_N: torch.Tensor) -> tuple[Any, ...]:
        """The attention mask: none, as silence is seen too."""
        del inputs_N
        return (None,)

    def embed(self, model: Any, inputs_N: torch.Tensor) -> torch.Tensor:
        """See `TileFamily.embed`."""
        hidden_NPV = super().embed(model, inputs_N)
        return hidden_NPV.to(inputs_N.dtype)

    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """See `TileFamily.project`."""
        del media
        # A window has a whole number of features, so none is made of two windows.
        merged_EV = model.audio_tower.layer_norm(hidden_NPV).reshape(
            -1, self.merged_tokens * self.encoder_width
        )
        return model.multi_modal_projector(merged_EV)

    def _features(self, num_windows: int) -> int:
        return num_windows * self.encoder_tokens_per_tile // self.merged_tokens

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Sounds of a window each; see `ModelAdapter.example_media`."""
        return [MediaGrid("audio", 1, 0, 0, self._features(1))] * num_tiles

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """See `ModelAdapter.pixels`: the windows of the sound, [n, B, F]."""
        if kind != "audio":
            message = f"`{kind}` is no kind of media that `{self.family}` reads, it reads `audio`"
            raise ValueError(message)
        del frame_indices
        extractor = self.processor
        samples = sound.decode_sound(file, extractor.sampling_rate)
        # As `VoxtralProcessor` calls it; the last frame of the whole, which is not full, is left out.
        found = extractor(
            samples,
            sampling_rate=extractor.sampling_rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=extractor.n_samples,
            return_tensors="pt",
        )
        mel_BF = found["input_features"][0]
        windows_NBF = mel_BF.unflatten(1, (-1, extractor.nb_max_frames)).transpose(0, 1).contiguous()
        features = self._features(windows_NBF.shape[0])
        if grid is not None and features != grid.num_features:
            message = (
                f"`{file}` has {len(samples)} samples of sound, {features} features, "
                f"profiled as {grid.num_features}"
            )
            raise profile_error(message)
        return windows_NBF.float()


ADAPTER = Voxtral
