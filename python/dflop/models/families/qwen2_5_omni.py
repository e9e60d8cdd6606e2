"""Qwen2.5-Omni's thinker: pictures and videos by Qwen2.5-VL's encoder, sounds by another one, in one sample.

    inputs_NC, media --rows of pictures--> visual -------+
                     --rows of sounds----> audio_tower --+--in the order of the media--> features_ED

Both encoders are one stage: `config.json` is that of the whole model, of which its section `thinker_config`
is built, read and trained. Talker and vocoder are neither read nor written. How sounds lie in rows:
`models/mel_windows.py`. Shape letters: see `adapter.py`.
"""

from __future__ import annotations

from functools import cached_property
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration
from transformers.image_utils import SizeDict
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as hugging_face

from dflop.models import mel_windows, sound
from dflop.models.adapter import EncoderInput, MediaGrid
from dflop.models.encoder import EncoderRun
from dflop.models.errors import hinted, profile_error
from dflop.models.families.qwen2_5_vl import Qwen25Vl
from dflop.models.packing import PACKED
from dflop.models.processor_files import processor_fields, processor_of_videos
from dflop.models.rules import Rule
from dflop.models.tensor import Cut, LayerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.media import MediaFile

_VIDEO_PIXELS = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
"""Of a frame, by Hugging Face's processor, whatever the model's files say."""
SAMPLED_FPS = 2.0
"""Frames a second of a video whose file does not tell its rate, as Hugging Face's processor has it."""


class Qwen25Omni(Qwen25Vl):
    """`ModelAdapter` of Qwen2.5-Omni's thinker."""

    family = "qwen2_5_omni"
    config_class = Qwen2_5OmniThinkerConfig
    model_class = Qwen2_5OmniThinkerForConditionalGeneration
    model_methods = hugging_face.Qwen2_5OmniPreTrainedModelForConditionalGeneration
    encoder_modules = ("visual", "audio_tower")

    def __init__(self, model_dir: Path) -> None:
        if not hasattr(hugging_face, "Qwen2_5OmniThinkerModel"):
            message = (
                f"transformers is {transformers.__version__}, whose Qwen2.5-Omni has its encoders elsewhere"
            )
            raise hinted(profile_error(message), "pip install 'transformers>=5.23'")
        super().__init__(model_dir)
        self.audio: Any = self.config.audio_config
        self.window_rows: int = self.audio.n_window

    @property
    def num_run_layers(self) -> int:
        """One: two encoders are not cut into stages. So the planner has it too."""
        return 1

    def encoder_run(self, layers: range | None) -> EncoderRun:
        """See `FamilyAdapter.encoder_run`; all layers of both encoders."""
        if layers is not None and layers != range(1):
            message = (
                f"layers {layers.start} to {layers.stop}: two encoders are one stage, which has all layers"
            )
            raise ValueError(message)
        return EncoderRun(0, 1, 1)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        audio, start = self.config.audio_config, getattr(self.config, "vision_start_token_id", None)
        bins, width = audio.num_mel_bins, self.text.hidden_size
        most = self.patch_values // mel_windows.FRAMES_PER_ROW - 1
        wanted = "the id of the token before a picture"
        return [
            *super().rules(),
            Rule("vision_start_token_id", start, isinstance(start, int), wanted),
            Rule(
                "audio_config.num_mel_bins", bins, bins <= most, f"at most {most}: a patch holds two frames"
            ),
            Rule("audio_config.output_dim", audio.output_dim, audio.output_dim == width, f"{width}"),
        ]

    def layers_in_order(self, model: Any) -> list[nn.Module]:
        """See `FamilyAdapter.layers_in_order`: those of pictures, then those of sounds."""
        return [*model.visual.blocks, *model.audio_tower.layers]

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

    def plan_of(self, layer: nn.Module) -> LayerPlan:
        """See `FamilyAdapter.plan_of`."""
        is_of_pictures = isinstance(layer, hugging_face.Qwen2_5OmniVisionBlock)
        return self.encoder_plan() if is_of_pictures else mel_windows.sound_plan(self.audio)

    def build_whole(
        self, attention: str = PACKED, encoder_attention: str | None = None
    ) -> tuple[nn.Module, Any]:
        """See `FamilyAdapter.build_whole`."""
        whole, config = super().build_whole(attention, encoder_attention)
        config.audio_config._attn_implementation = encoder_attention or mel_windows.ATTENTION
        return whole, config

    def std(self, name: str) -> float:
        """See `FamilyAdapter.std`."""
        is_of_sounds = name.startswith("model.audio_tower.")
        return float(self.audio.initializer_range) if is_of_sounds else super().std(name)

    def idle_media(self, media: Sequence[MediaGrid]) -> list[MediaGrid]:
        """See `FamilyAdapter.idle_media`: the smallest picture or sound, where there is none."""
        merge, kinds = self.geometry.merge, {grid.kind == "audio" for grid in media}
        picture = MediaGrid("image", 1, 0, 0, 1, patches=(merge, merge))
        short = MediaGrid("audio", 1, 0, 0, 1, patches=(self.window_rows, 1), last_segment_tokens=2)
        return [grid for is_sound, grid in ((False, picture), (True, short)) if is_sound not in kinds]

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`; each encoder runs once, over all that is its own."""
        rows = batch.inputs_N.split([grid.num_inputs for grid in batch.media])
        found: list[torch.Tensor] = [rows[0]] * len(rows)
        for is_sound in (False, True):
            own = [k for k, grid in enumerate(batch.media) if (grid.kind == "audio") == is_sound]
            if not own:
                continue
            part = batch
            if len(own) < len(rows):
                part = EncoderInput(torch.cat([rows[k] for k in own]), [batch.media[k] for k in own])
            made = self._hear(model, part) if is_sound else super().encode_run(model, part, run, None)
            if part is batch:
                return made
            counts = [grid.num_features for grid in part.media]
            for k, features_ED in zip(own, made.split(counts), strict=True):
                found[k] = features_ED
        return torch.cat(found)

    def _hear(self, model: Any, batch: EncoderInput) -> torch.Tensor:
        """Features of sounds alone."""
        tower, windows = model.audio_tower, mel_windows.windows_of(batch.media, self.window_rows)
        hidden_SV = mel_windows.embed_windows(tower, batch.inputs_N, windows)
        bounds = mel_windows.bounds_of_windows(windows, hidden_SV.device)
        for layer in tower.layers:
            hidden_SV = mel_windows.run_sound_layer(layer, hidden_SV, bounds)
        return mel_windows.project_sounds(tower, hidden_SV, windows)

    def positions(
        self, input_ids_T: torch.Tensor, feature_mask_T: torch.Tensor, media: Sequence[MediaGrid]
    ) -> torch.Tensor:
        """Positions in time, height and width, by Hugging Face's `get_rope_index`.

        Args:
            input_ids_T: of the sample.
            feature_mask_T: not read.
            media: of the sample, in order.

        Returns:
            [3, T].

        Raises:
            ValueError: the token before a medium is missing; Hugging Face's model would take the medium's
                places for text.
        """
        del feature_mask_T
        images, videos, sounds = (
            [grid for grid in media if grid.kind.removeprefix("multi_") == kind]
            for kind in ("image", "video", "audio")
        )
        if not (images or videos):
            # Of sounds too Hugging Face's model counts tokens.
            return torch.arange(input_ids_T.shape[0]).expand(3, -1)
        self._check_starts(input_ids_T, len(images), len(videos), len(sounds))
        grids = [[[grid.num_tiles, *(grid.patches or ())] for grid in own] for own in (images, videos)]
        pair = self.vision.temporal_patch_size
        # The method reads nothing else of its model.
        shell: Any = SimpleNamespace(config=self.config, spatial_merge_size=self.geometry.merge)
        shell.get_llm_pos_ids_for_vision = MethodType(self.model_methods.get_llm_pos_ids_for_vision, shell)
        positions_31T, _ = self.model_methods.get_rope_index(
            shell,
            input_ids_T[None],
            *(torch.tensor(own) if own else None for own in grids),
            # Mel frames that give so many features.
            audio_seqlens=torch.tensor([4 * grid.num_features for grid in sounds]),
            second_per_grids=torch.tensor([pair / (grid.sampled_fps or SAMPLED_FPS) for grid in videos]),
        )
        return positions_31T[:, 0]

    def _check_starts(self, input_ids_T: torch.Tensor, *wanted: int) -> None:
        """Refuses media that Hugging Face's method would not find."""
        config, ids = self.config, input_ids_T.tolist()
        starts = (config.vision_start_token_id, config.audio_start_token_id)
        behind = [after for token, after in zip(ids, [*ids[1:], None], strict=True) if token == starts[0]]
        found = (
            behind.count(config.image_token_id),
            behind.count(config.video_token_id),
            ids.count(starts[1]),
        )
        if found != wanted or None in behind:
            message = (
                f"{wanted} images, videos and sounds, and before them {found} of the tokens {starts}, by "
                "which transformers finds them: they have no positions"
            )
            raise ValueError(message)

    @cached_property
    def video_processor(self) -> Any:
        """See `PatchFamily.video_processor`."""
        made = processor_of_videos(self.model_dir, self.video_processor_class)
        made.size = SizeDict(**_VIDEO_PIXELS)
        return made

    @cached_property
    def extractor(self) -> Any:
        """Hugging Face's feature extractor of this model."""
        return transformers.WhisperFeatureExtractor.from_dict(
            processor_fields(self.model_dir, "feature_extractor")
        )

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """See `ModelAdapter.pixels`; of a sound the rows of its windows."""
        if kind != "audio":
            return super().pixels(file, kind, frame_indices, grid)
        extractor = self.extractor
        samples = sound.decode_sound(file, extractor.sampling_rate)
        options = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
        found = extractor(samples, sampling_rate=extractor.sampling_rate, **options)
        num_frames = int(found["attention_mask"].sum())
        tokens = -(-num_frames // mel_windows.FRAMES_PER_ROW)
        if len(samples) > extractor.n_samples or (grid is not None and tokens // 2 != grid.num_features):
            wanted = "" if grid is None else f", profiled as {grid.num_features}"
            message = (
                f"`{file}` has {len(samples)} samples of sound, {tokens // 2} features{wanted}; "
                f"at most {extractor.n_samples} samples are read"
            )
            raise profile_error(message)
        return mel_windows.to_rows(
            found["input_features"][0][:, :num_frames], self.window_rows, self.input_shape[0]
        )


ADAPTER = Qwen25Omni
