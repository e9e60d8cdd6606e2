"""Families with two encoders: pictures and videos by one of patches, sounds by another, in one sample.

    inputs_NC, media --rows of pictures--> visual -------+
                     --rows of sounds----> audio_tower --+--in the order of the media--> features_EW

A run of layers is one of both encoders: of 32 layers of pictures and 24 of sounds the first half has 16 and
12. Between two runs rows of pictures stand before those of sounds, and each is as wide as the wider of both.

`config.json` is that of the whole model, of which its section `thinker_config` is built, read and trained.
Talker and vocoder are neither read nor written. Shape letters: see `adapter.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.image_utils import SizeDict

from dflop.models import sound
from dflop.models.adapter import EncoderInput, MediaGrid
from dflop.models.encoder import EncoderRun, cut_to, numbered
from dflop.models.errors import hinted, profile_error
from dflop.models.mel_windows import ATTENTION, Windows, run_sound_layers, windows_of
from dflop.models.packing import PACKED
from dflop.models.patches import PatchFamily
from dflop.models.processor_files import processor_fields, processor_of_videos
from dflop.models.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from torch import nn

    from dflop.models.media import MediaFile
    from dflop.models.tensor import LayerPlan


class OmniFamily(PatchFamily):
    """What the families with two encoders share.

    In the bases of a family the class of its pictures stands behind this one.
    """

    encoder_modules = ("visual", "audio_tower")
    model_module: Any
    """Of transformers, with the classes of the model."""
    thinker_class: str
    """Name, in `model_module`, of the model without its head."""
    processor_class: Any
    """Hugging Face's: it has the range of pixels of a frame, whatever the model's files say."""
    untold_fps: float
    """Frames a second of a video whose file does not tell its rate, as Hugging Face's processor has it."""
    frames_per_row: int
    """Mel frames in a row of a sound."""

    def __init__(self, model_dir: Path) -> None:
        if not hasattr(self.model_module, self.thinker_class):
            message = (
                f"transformers is {transformers.__version__}, whose {self.family} has its encoders elsewhere"
            )
            raise hinted(profile_error(message), "pip install 'transformers>=5.23'")
        super().__init__(model_dir)
        self.audio: Any = self.config.audio_config

    @property
    @abstractmethod
    def window_rows(self) -> int:
        """Rows of a window of sound: encoder tokens of a full one."""

    @abstractmethod
    def before_sounds(self, tower: Any) -> Sequence[nn.Module]:
        """The modules with parameters before the layers of the encoder of sounds."""

    @abstractmethod
    def embed_sounds(self, tower: Any, rows_NC: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Hidden states of sounds before the first layer.

        Args:
            tower: Hugging Face's, of sounds.
            rows_NC: of all windows.
            windows: which they are.

        Returns:
            hidden_SV.
        """

    @abstractmethod
    def project_sounds(self, tower: Any, hidden_SV: torch.Tensor, windows: Windows) -> torch.Tensor:
        """Features of sounds, one sound after the other.

        Args:
            tower: Hugging Face's, of sounds.
            hidden_SV: after the last layer.
            windows: which they are.

        Returns:
            features_ED, as wide as the backbone.
        """

    @abstractmethod
    def rows_of_sound(self, samples: np.ndarray) -> tuple[torch.Tensor, int]:
        """What the encoder reads of a sound.

        Args:
            samples: of the sound, at the extractor's rate.

        Returns:
            Rows [N, C] of its windows, and how many features they give.
        """

    @abstractmethod
    def frames_of_features(self, num_features: int) -> int:
        """Mel frames for which Hugging Face's model counts so many features."""

    @abstractmethod
    def sound_plan(self) -> LayerPlan:
        """How tensor parallelism cuts a layer of the encoder of sounds."""

    def sound_layers(self, run: EncoderRun) -> range:
        """The layers of sounds in a run: spread evenly over those of pictures, as in the cost model.

        Args:
            run: of layers of pictures.

        Returns:
            Their numbers; none, where there are fewer of them and the run is short.
        """
        first, end = (
            layer * self.audio.encoder_layers // run.num_layers for layer in (run.first_layer, run.end_layer)
        )
        return range(first, end)

    def cut_to_run(self, model: Any, run: EncoderRun) -> None:
        """See `FamilyAdapter.cut_to_run`; each encoder is cut by itself."""
        cut_to(model.visual, run, self.tower_layers(model), self.before_layers(model))
        tower = model.audio_tower
        cut_to(tower, run, tower.layers, self.before_sounds(tower), self.sound_layers(run))

    def row_width(self, layer: int) -> int:
        """See `FamilyAdapter.row_width`: of the wider encoder."""
        return max(super().row_width(layer), self.audio.d_model)

    def num_rows(self, media: Sequence[MediaGrid]) -> int:
        """See `FamilyAdapter.num_rows`: patches of pictures, and tokens of sounds."""
        pictures, sounds = (
            [g for g in media if (g.kind == "audio") == is_sound] for is_sound in (False, True)
        )
        return super().num_rows(pictures) + sum(windows_of(sounds, self.window_rows).tokens)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        audio, start = self.config.audio_config, getattr(self.config, "vision_start_token_id", None)
        bins, width, each = audio.num_mel_bins, self.text.hidden_size, self.frames_per_row
        most = self.patch_values // each - 1
        wanted = "the id of the token before a picture"
        return [
            *super().rules(),
            Rule("vision_start_token_id", start, isinstance(start, int), wanted),
            Rule(
                "audio_config.num_mel_bins",
                bins,
                bins <= most,
                f"at most {most}: a row as wide as a patch holds {each} frames",
            ),
            Rule("audio_config.output_dim", audio.output_dim, audio.output_dim == width, f"{width}"),
        ]

    def layers_in_order(self, model: Any) -> list[nn.Module]:
        """See `FamilyAdapter.layers_in_order`: those of pictures, then those of sounds."""
        both = (model.visual.blocks, model.audio_tower.layers)
        return [layer for layers in both for _, layer in numbered(layers)]

    def plan_of(self, layer: nn.Module) -> LayerPlan:
        """See `FamilyAdapter.plan_of`."""
        # A layer of sounds has attention by another name.
        return self.encoder_plan() if hasattr(layer, "attn") else self.sound_plan()

    def build_whole(
        self, attention: str = PACKED, encoder_attention: str | None = None
    ) -> tuple[nn.Module, Any]:
        """See `FamilyAdapter.build_whole`."""
        whole, config = super().build_whole(attention, encoder_attention)
        config.audio_config._attn_implementation = encoder_attention or ATTENTION
        return whole, config

    def std(self, name: str) -> float:
        """See `FamilyAdapter.std`."""
        is_of_sounds = name.startswith("model.audio_tower.")
        return float(self.audio.initializer_range) if is_of_sounds else super().std(name)

    def idle_media(self, media: Sequence[MediaGrid]) -> list[MediaGrid]:
        """See `FamilyAdapter.idle_media`: the smallest picture or sound, where there is none."""
        merge, kinds = self.geometry.merge, {grid.kind == "audio" for grid in media}
        picture = MediaGrid("image", 1, 0, 0, 1, patches=(merge, merge))
        return [
            grid
            for is_sound, grid in ((False, picture), (True, self.shortest_sound))
            if is_sound not in kinds
        ]

    @property
    @abstractmethod
    def shortest_sound(self) -> MediaGrid:
        """A sound of one feature."""

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`; each encoder runs once, over all that is its own."""
        own = [
            [k for k, g in enumerate(batch.media) if (g.kind == "audio") == sound] for sound in (False, True)
        ]
        parts = [self._part_of(batch, numbers, reads_inputs=incoming_RU is None) for numbers in own]
        states: list[torch.Tensor | None] = [None, None]
        if incoming_RU is not None:
            num_pictures = super().num_rows(parts[0].media)
            width = super().row_width(run.first_layer)
            pictures_RU, sounds_RU = incoming_RU[:num_pictures], incoming_RU[num_pictures:]
            states = [pictures_RU[:, :width], sounds_RU[:, : self.audio.d_model].contiguous()]
        made = []
        if own[0]:
            made.append(super().encode_run(model, parts[0], run, states[0]))
        if own[1]:
            made.append(self._hear(model, parts[1], run, states[1]))
        # Features of sounds too are as wide as those of pictures: later layers add nothing to them.
        width = self.feature_width if run.is_last else self.row_width(run.end_layer)
        made = [torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in made]
        if len(made) == 1 or not run.is_last:
            return made[0] if len(made) == 1 else torch.cat(made)
        counts = ([grid.num_features for grid in part.media] for part in parts)
        split = [one.split(each) for one, each in zip(made, counts, strict=True)]
        found = dict(zip(own[0], split[0], strict=True)) | dict(zip(own[1], split[1], strict=True))
        return torch.cat([found[k] for k in range(len(batch.media))])

    def _part_of(self, batch: EncoderInput, numbers: list[int], *, reads_inputs: bool) -> EncoderInput:
        """Some media of a batch, with what the first run reads of them."""
        media = [batch.media[k] for k in numbers]
        if len(media) == len(batch.media) or not reads_inputs:
            return EncoderInput(batch.inputs_N, media)
        rows = batch.inputs_N.split([grid.num_inputs for grid in batch.media])
        return EncoderInput(torch.cat([batch.inputs_N[:0], *(rows[k] for k in numbers)]), media)

    def _hear(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_SV: torch.Tensor | None
    ) -> torch.Tensor:
        """Sounds through a run: hidden_SV, or from the last one features_ED."""
        tower, windows = model.audio_tower, windows_of(batch.media, self.window_rows)
        hidden_SV = incoming_SV
        if hidden_SV is None:
            hidden_SV = self.embed_sounds(tower, batch.inputs_N, windows)
        hidden_SV = run_sound_layers(tower, hidden_SV, windows)
        return self.project_sounds(tower, hidden_SV, windows) if run.is_last else hidden_SV

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
            attention_mask=torch.ones_like(input_ids_T)[None],
            audio_seqlens=torch.tensor([self.frames_of_features(grid.num_features) for grid in sounds]),
            second_per_grids=torch.tensor([pair / (grid.sampled_fps or self.untold_fps) for grid in videos]),
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
        made.size = SizeDict(**self.processor_class.videos_kwargs["size"])
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
        samples = sound.decode_sound(file, self.extractor.sampling_rate)
        most = self.most_samples
        is_long = most is not None and len(samples) > most
        rows_NC, num_features = self.rows_of_sound(samples)
        if is_long or (grid is not None and num_features != grid.num_features):
            wanted = "" if grid is None else f", profiled as {grid.num_features}"
            limit = "" if most is None else f"; at most {most} samples are read"
            message = f"`{file}` has {len(samples)} samples of sound, {num_features} features{wanted}{limit}"
            raise profile_error(message)
        return rows_NC

    @property
    def most_samples(self) -> int | None:
        """Samples of a sound that are read at most; None: all are."""
        return None
