"""Qwen2.5-Omni's thinker: pictures and videos by Qwen2.5-VL's encoder, sounds by one like Whisper's.

What it shares with other families of two encoders: `models/omni.py`. How sounds lie in rows:
`models/mel_windows.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as hugging_face

from dflop.models import mel_windows
from dflop.models.adapter import MediaGrid
from dflop.models.families.qwen2_5_vl import Qwen25Vl
from dflop.models.omni import OmniFamily
from dflop.models.tensor import Cut, LayerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from torch import nn

    from dflop.models.mel_windows import Windows


class Qwen25Omni(OmniFamily, Qwen25Vl):
    """`ModelAdapter` of Qwen2.5-Omni's thinker."""

    family = "qwen2_5_omni"
    config_class = Qwen2_5OmniThinkerConfig
    model_class = Qwen2_5OmniThinkerForConditionalGeneration
    model_methods = hugging_face.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    model_module = hugging_face
    thinker_class = "Qwen2_5OmniThinkerModel"
    processor_class = Qwen2_5OmniProcessor
    untold_fps = 2.0
    frames_per_row = mel_windows.FRAMES_PER_ROW

    @property
    def window_rows(self) -> int:
        """See `OmniFamily.window_rows`."""
        return self.audio.n_window

    @property
    def shortest_sound(self) -> MediaGrid:
        """See `OmniFamily.shortest_sound`."""
        return MediaGrid("audio", 1, 0, 0, 1, patches=(self.window_rows, 1), last_segment_tokens=2)

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`: of the layers of pictures."""
        heads = ("vision_config.num_heads", self.vision.num_heads)
        width = ("vision_config.intermediate_size", self.vision.intermediate_size)
        return LayerPlan(
            cuts=(
                *(Cut(f"attn.{name}", *heads) for name in "qkv"),
                Cut("attn.proj", *heads, by_input=True),
                *(Cut(f"mlp.{name}", *width) for name in ("gate_proj", "up_proj")),
                Cut("mlp.down_proj", *width, by_input=True),
            ),
            entries=("attn", "mlp"),
            counts=(("attn", "num_heads"),),
        )

    def sound_plan(self) -> LayerPlan:
        """See `OmniFamily.sound_plan`."""
        return mel_windows.sound_plan(self.audio)

    def before_sounds(self, tower: Any) -> Sequence[nn.Module]:
        """See `OmniFamily.before_sounds`."""
        return [tower.conv1, tower.conv2]

    def embed_sounds(self, tower: Any, rows_NC: torch.Tensor, windows: Windows) -> torch.Tensor:
        """See `OmniFamily.embed_sounds`."""
        return mel_windows.embed_windows(tower, rows_NC, windows)

    def project_sounds(self, tower: Any, hidden_SV: torch.Tensor, windows: Windows) -> torch.Tensor:
        """See `OmniFamily.project_sounds`."""
        return mel_windows.project_sounds(tower, hidden_SV, windows)

    def frames_of_features(self, num_features: int) -> int:
        """See `OmniFamily.frames_of_features`."""
        return 4 * num_features

    @property
    def most_samples(self) -> int | None:
        """See `OmniFamily.most_samples`."""
        return self.extractor.n_samples

    def rows_of_sound(self, samples: np.ndarray) -> tuple[torch.Tensor, int]:
        """See `OmniFamily.rows_of_sound`."""
        extractor = self.extractor
        options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
        found = extractor(samples, sampling_rate=extractor.sampling_rate, **options)
        num_frames = int(found["attention_mask"].sum())
        mel_BF = found["input_features"][0][:, :num_frames]
        tokens = -(-num_frames // mel_windows.FRAMES_PER_ROW)
        return mel_windows.to_rows(mel_BF, self.window_rows, self.input_shape[0]), tokens // 2


ADAPTER = Qwen25Omni
