"""Audio Flamingo 3: the encoder of Qwen2-Audio over the windows of a long sound, a projector of two maps.

    sound --cut into 30 s, mel--> [N, B + 1, F] --as Qwen2-Audio, window by window--> features_ED

The windows of a sound are encoded apart; their features stand one behind the other. A window is padded with
silence, which only the last of a sound has. Shape letters: see `qwen2_audio.py`.
"""

from __future__ import annotations

from functools import cached_property

from transformers import AudioFlamingo3Config, AudioFlamingo3ForConditionalGeneration

from dflop.models.families.qwen2_audio import Qwen2Audio
from dflop.models.processor_files import settings_of_processor
from dflop.models.rules import Rule

_MAX_AUDIO_LEN = 600
"""Seconds of a sound that the processor reads, where its file does not say."""


class AudioFlamingo3(Qwen2Audio):
    """`ModelAdapter` of Audio Flamingo 3."""

    heads_field = "num_attention_heads"
    mlp_field = "intermediate_size"
    drop_field = "layerdrop"
    family = "audioflamingo3"
    config_class = AudioFlamingo3Config
    model_class = AudioFlamingo3ForConditionalGeneration

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        positions = self.vision.max_source_positions
        wanted = "even: two encoder tokens are one token of the LLM"
        return [
            *super().rules(),
            Rule("audio_config.max_source_positions", positions, positions % 2 == 0, wanted),
        ]

    @cached_property
    def max_windows(self) -> int:
        """Windows of a sound, at most: whole windows within `max_audio_len` of the processor."""
        seconds = settings_of_processor(self.model_dir, "feature_extractor").get("max_audio_len")
        return int((_MAX_AUDIO_LEN if seconds is None else seconds) // self.processor.chunk_length)


ADAPTER = AudioFlamingo3
