"""A tiny model of each family that trains, samples of every kind it reads, and Hugging Face's way to run them.

To put a family to the test, add it to `SETTINGS`, and say in `dflop/checking/reference.py` how its own model takes one sample.
"""

from __future__ import annotations

import copy
import json
import re
import wave
from functools import cached_property

import numpy as np
import pytest
import torch
from conformance_settings import AUDIO_START, IMAGE, SETTINGS, SOUND, VIDEO, VISION_START
from PIL import Image
from tiny_families import OMNI, write_config

from dflop._native.testing import media_shape
from dflop.checking.gradients import DECAYS, errors_of
from dflop.checking.reference import Medium as Reference
from dflop.checking.reference import arguments_of
from dflop.data.sample import Sample
from dflop.data.shares import share_of
from dflop.models.adapter import MediaGrid

CPU, FLOAT = torch.device("cpu"), torch.float32
RATE = 16_000
OF_IMAGE_TOKENS = ("internvl", "smolvlm", "glm4v", "glm4v_moe", "glm46v", "glm_ocr")
"""Families whose videos have the token of images."""
UNTOLD_NORM = re.compile(
    r"\.(visual\.(blocks\.\d+\.norm[12]|merger\.ln_q)|vision_(tower|encoder)\.ln_pre)\.weight$"
)
"""Norms in the encoders of Qwen2.5-VL, GLM, Mistral3 and LightOnOCR. Neither name nor class tells it to the `Trainer`, which decays
them."""
# So that every part of so small a model changes the loss.
_LOUD = {"initializer_range": 0.1}
ALIKE = (
    *(
        "llava_onevision-llama3",
        "glm46v",
        "idefics3",
        "internvl-qwen3",
        "minicpmv4_6-4x",
        "mistral3",
        "paddleocr_vl",
        "qwen2_audio",
        "qwen3_5_moe",
        "qwen3_omni_moe",
    ),
)
"""Those whose ranks do nothing that another's do not."""
ON_RANKS = [pytest.param(name, marks=pytest.mark.layouts) if name in ALIKE else name for name in SETTINGS]
"""Families for tests with several ranks, of which `make test` needs not all."""


def write_model(directory, name):
    """Writes the files of a tiny model, and gives their folder."""
    config, processor, video, _ = copy.deepcopy(SETTINGS[name])
    trained = config.get("thinker_config", config)
    for part in ("vision_config", "audio_config", "text_config"):
        if part in trained:
            trained[part].update(_LOUD)
    trained.update(_LOUD)
    directory = write_config(directory / name, name, config)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    if video is not None:
        (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return directory


def picture(height, width, seed):
    """Soft colours, so that resizing keeps most of them, with noise."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / 9 + columns / (7 + k) + seed) * 90 + 128 for k in range(3)]
    noise = random.integers(-20, 20, size=(height, width, 3))
    return Image.fromarray(np.clip(np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8))


class Medium:
    """One image, video or sound: its file, its shape by dflop's rule, and what the encoder reads of it."""

    fps = 5.0

    def __init__(self, directory, adapter, content, is_one_of_several, seed):
        self.kind, *sizes = content
        self.adapter = adapter
        self.file = directory / f"{seed}.{ {'image': 'png', 'video': 'webp', 'audio': 'wav'}[self.kind] }"
        self.pictures, self.samples = [], None
        if self.kind == "audio":
            self.height = self.width = 0
            count = round(sizes[0] * RATE)
            self.samples = np.random.default_rng(seed).integers(-9000, 9000, size=count).astype(np.int16)
            with wave.open(str(self.file), "wb") as written:
                written.setnchannels(1)
                written.setsampwidth(2)
                written.setframerate(RATE)
                written.writeframes(self.samples.tobytes())
            asked = {"duration_s": count / RATE, "sample_rate": RATE}
        else:
            self.height, self.width, *frames = sizes
            self.pictures = [picture(self.height, self.width, seed + 7 * k) for k in range(*frames or [1])]
            animation = {
                "append_images": self.pictures[1:],
                "save_all": True,
                "lossless": True,
                "duration": 200,
            }
            self.pictures[0].save(self.file, **(animation if frames else {}))
            asked = {"height": self.height, "width": self.width, "num_images": 1 + is_one_of_several}
            if frames:
                asked.update(num_frames=frames[0], fps=self.fps)
        texts = [
            _text(adapter.model_dir, name)
            for name in ("config", "preprocessor_config", "video_preprocessor_config")
        ]
        shape = self.shape = media_shape(*texts, self.kind, **asked)
        several = self.kind == "image" and is_one_of_several
        # All frames are read of such short videos, so the rate is that of the file.
        assert shape.frame_indices == list(range(len(self.pictures) if self.kind == "video" else 0))
        self.grid = MediaGrid(
            "multi_image" if several else self.kind, shape.num_tiles, self.height, self.width, shape.feature_tokens,
            patches=shape.patches, sampled_fps=self.fps if self.kind == "video" else None,
            first_patches=shape.first_patches, last_patches=shape.last_patches, last_segment_tokens=shape.segments[-1][1],
        )  # fmt: skip

    @property
    def sound(self):
        """The samples as floats."""
        return self.samples.astype(np.float32) / 32768

    @cached_property
    def inputs(self):
        """What the encoder reads, as the adapter decodes it."""
        return self.adapter.pixels(self.file, self.grid.kind, self.shape.frame_indices, self.grid)


def _text(directory, name):
    path = directory / f"{name}.json"
    return path.read_text() if path.exists() else "{}"


class Conversation:
    """Text around media, as tokens and labels: in the runtime's form, and what Hugging Face's is made of."""

    def __init__(self, directory, adapter, contents, index):
        self.adapter = adapter
        random = torch.Generator().manual_seed(index)

        def words(count):
            return torch.randint(3, IMAGE, (count,), generator=random).tolist()

        images = sum(content[0] == "image" for content in contents)
        self.media = [
            Medium(directory, adapter, content, images > 1, 100 * index + k)
            for k, content in enumerate(contents)
        ]
        ids, labels = words(3), [-100] * 3
        for medium in self.media:
            is_video_token = medium.kind == "video" and adapter.family not in OF_IMAGE_TOKENS
            token = SOUND if medium.kind == "audio" else VIDEO if is_video_token else IMAGE
            # Qwen3-VL and GLM-4.1V write the time of each frame pair of a video, Gemma 4 of each frame.
            has_times = adapter.family.startswith(("qwen3", "glm", "gemma4")) and adapter.family not in OMNI
            is_timed = has_times and medium.kind == "video"
            apart = medium.grid.num_tiles if is_timed else 1
            if adapter.family == "gemma3":
                # So does it behind each square.
                apart = medium.grid.num_tiles
            if adapter.family == "mistral3":
                # Something stands behind each row of features.
                apart = medium.grid.patches[0] // adapter.config.spatial_merge_size
            if adapter.family in OMNI:
                # By it transformers finds media.
                ids.append(AUDIO_START if medium.kind == "audio" else VISION_START)
                labels.append(-100)
            for _ in range(apart):
                ids += [token] * (medium.grid.num_features // apart) + words(2)
                # The words after a medium are learnt, so that what the encoder gives matters early.
                labels += [-100] * (medium.grid.num_features // apart) + ids[-2:]
        answer = words(4 + index)
        self.ids, self.labels = ids + answer, labels + answer
        input_ids_T = torch.tensor(self.ids)
        mask_T = (input_ids_T >= IMAGE) & (input_ids_T <= SOUND)
        grids = tuple(medium.grid for medium in self.media)
        self.sample = Sample(
            index=index,
            id=f"sample-{index}",
            input_ids_T=input_ids_T,
            feature_mask_T=mask_T,
            targets_T=torch.tensor([*self.labels[1:], -100]),
            positions_T=adapter.positions(input_ids_T, mask_T, grids),
            media=grids,
            files=(),
            num_features=sum(grid.num_features for grid in grids),
            parts=tuple(tuple(medium.shape.parts) for medium in self.media),
        )

    @property
    def num_targets(self):
        """Positions with loss."""
        return sum(label != -100 for label in self.labels)

    @property
    def num_parts(self):
        """Parts that may be encoded apart."""
        return sum(count for groups in self.sample.parts for count, _, _ in groups)

    def tiles(self, parts=None):
        """The inputs of a share, decoded as the runtime's loader decodes it."""
        found = []
        for run in share_of(self.sample, parts).runs:
            medium, whole = self.media[run.medium], self.media[run.medium].grid
            frames = medium.shape.frame_indices
            if frames:
                each = -(-len(frames) // whole.num_tiles)
                frames = frames[each * run.first_tile : each * (run.first_tile + run.grid.num_tiles)]
                found.append(self.adapter.pixels(medium.file, whole.kind, frames, run.grid))
            else:
                first = whole.inputs_before(run.first_tile)
                found.append(medium.inputs[first : first + run.grid.num_inputs])
        return torch.cat(found) if found else torch.empty(0, *self.adapter.input_shape)


def conversations(directory, adapter, name):
    """The samples of a family, by name."""
    directory.mkdir(parents=True, exist_ok=True)
    contents = SETTINGS[name][3]
    return {key: Conversation(directory, adapter, each, k) for k, (key, each) in enumerate(contents.items())}


def hugging_face(conversation):
    """Arguments of Hugging Face's own model for one sample, by Hugging Face's own processors."""
    media = [
        Reference(
            m.kind, m.pictures, m.sound if m.kind == "audio" else None, m.fps if m.kind == "video" else None
        )
        for m in conversation.media
    ]
    return arguments_of(conversation.adapter, conversation.sample, media)


def pretrained(adapter, directory, seed):
    """Hugging Face's own model as its users get it: saved, then loaded with `from_pretrained`; to be trained.

    Its parameters are those that the pieces start from, under the names that Hugging Face gives them.
    """
    pieces = [
        adapter.build_encoder(CPU, FLOAT, seed),
        adapter.build_llm_stage(0, adapter.num_llm_layers, CPU, FLOAT, seed),
    ]
    values = {name: p.detach() for piece in pieces for name, p in piece.named_parameters()}
    model = adapter.model_class(adapter.config_class.from_pretrained(adapter.model_dir))
    own = {name for name, _ in model.named_parameters()}
    assert set(values) == own, "the pieces' parameters are Hugging Face's"
    model.load_state_dict(values, strict=False)
    model.save_pretrained(directory)
    return adapter.model_class.from_pretrained(directory, dtype=FLOAT).train()


def loss_of(model, conversation):
    """Sum of the loss over the label tokens of one sample, by the model's own `labels=`, a mean over them."""
    arguments = hugging_face(conversation)
    return conversation.num_targets * model(**arguments, use_cache=False).loss


def expected_gradients(model, samples):
    """Summed loss of all samples, and gradients by name: what no sample reaches has one of zero."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for sample in samples:
        loss = loss_of(model, sample)
        loss.backward()
        total += float(loss.detach())
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return total, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


def check_gradients(found, expected, condition=1):
    """Each parameter's gradient within 1e-5 of the expected, or of the smallest that is not rounding alone.

    Times `condition`, where the layers are given what differs by rounding already.
    """
    for name, error in errors_of(found, expected).items():
        allowed = 1e-5 * (1 if name.endswith(DECAYS) else condition)
        assert error <= allowed, f"{name}: {error} of {float(expected[name].norm())}"
