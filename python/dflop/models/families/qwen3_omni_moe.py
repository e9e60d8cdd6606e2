"""Qwen3-Omni's thinker: pictures and videos by Qwen3-VL's encoder (DeepStack), sounds by one of its own.

What it shares with other families of two encoders: `models/omni.py`. How sounds lie in rows:
`models/mel_chunks.py`. The backbone has experts. A feature of a picture is several hidden states wide. That
of a sound is as wide, with zeros for the layers that add features of pictures. Frame pairs stand side by
side, without the time stamps of Qwen3-VL: positions in time count seconds, and are no whole numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import (
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hugging_face

from dflop.models import mel_chunks
from dflop.models.adapter import MediaGrid
from dflop.models.families.qwen3_vl import Qwen3Vl
from dflop.models.mel_windows import sound_plan
from dflop.models.omni import OmniFamily
from dflop.models.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from torch import nn

    from dflop.models.mel_windows import Windows
    from dflop.models.tensor import LayerPlan


class Qwen3OmniMoe(OmniFamily, Qwen3Vl):
    """`ModelAdapter` of Qwen3-Omni's thinker."""

    family = "qwen3_omni_moe"
    config_class = Qwen3OmniMoeThinkerConfig
    model_class = Qwen3OmniMoeThinkerForConditionalGeneration
    model_methods = hugging_face.Qwen3OmniMoePreTrainedModelForConditionalGeneration
    model_module = hugging_face
    thinker_class = "Qwen3OmniMoeThinkerModel"
    processor_class = Qwen3OmniMoeProcessor
    video_processor_class = "Qwen2VLVideoProcessor"
    mergers = staticmethod(lambda tower: [tower.merger, *tower.merger_list])
    untold_fps = 1.0
    frames_per_row = mel_chunks.FRAMES_PER_ROW

    @property
    def window_rows(self) -> int:
        """See `OmniFamily.window_rows`."""
        return self.audio.n_window_infer // mel_chunks.CHUNK_FRAMES * mel_chunks.CHUNK_TOKENS

    @property
    def shortest_sound(self) -> MediaGrid:
        """See `OmniFamily.shortest_sound`."""
        return MediaGrid("audio", 1, 0, 0, 1, patches=(self.window_rows, 1), last_segment_tokens=1)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        audio, frames = self.config.audio_config, mel_chunks.CHUNK_FRAMES
        half, most = audio.n_window, audio.n_window_infer
        return [
            *super().rules(),
            Rule(
                "audio_config.n_window",
                half,
                2 * half == frames,
                f"{frames // 2}: transformers counts {mel_chunks.CHUNK_TOKENS} tokens for a whole chunk",
            ),
            Rule("audio_config.n_window_infer", most, most >= frames, f"at least a chunk of {frames} frames"),
        ]

    def sound_plan(self) -> LayerPlan:
        """See `OmniFamily.sound_plan`."""
        return sound_plan(self.audio)

    def before_sounds(self, tower: Any) -> Sequence[nn.Module]:
        """See `OmniFamily.before_sounds`."""
        return [tower.conv2d1, tower.conv2d2, tower.conv2d3, tower.conv_out]

    def embed_sounds(self, tower: Any, rows_NC: torch.Tensor, windows: Windows) -> torch.Tensor:
        """See `OmniFamily.embed_sounds`."""
        return mel_chunks.embed_chunks(tower, rows_NC, windows)

    def project_sounds(self, tower: Any, hidden_SV: torch.Tensor, windows: Windows) -> torch.Tensor:
        """See `OmniFamily.project_sounds`."""
        del windows
        return mel_chunks.project_sounds(tower, hidden_SV)

    def frames_of_features(self, num_features: int) -> int:
        """See `OmniFamily.frames_of_features`."""
        whole, rest = divmod(num_features, mel_chunks.CHUNK_TOKENS)
        return whole * mel_chunks.CHUNK_FRAMES + rest * mel_chunks.FRAMES_PER_ROW

    def rows_of_sound(self, samples: np.ndarray) -> tuple[torch.Tensor, int]:
        """See `OmniFamily.rows_of_sound`: as the processor reads it alone, neither padded nor cut."""
        extractor = self.extractor
        options = {"padding": True, "truncation": False, "return_tensors": "pt"}
        found = extractor(samples, sampling_rate=extractor.sampling_rate, **options)
        mel_BF = found["input_features"][0]
        rows_NC = mel_chunks.to_rows(mel_BF, self.window_rows, self.input_shape[0])
        return rows_NC, mel_chunks.tokens_of(mel_BF.shape[1])


ADAPTER = Qwen3OmniMoe
