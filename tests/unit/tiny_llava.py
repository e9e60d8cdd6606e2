"""A LLaVA-OneVision small enough for a test: its files, samples, and the oracle's way to run them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from dflop.models import load_adapter
from dflop.models.adapter import EncoderInput, LlmInput, MediaGrid

IMAGE_TOKEN, VIDEO_TOKEN, VOCABULARY = 298, 299, 300
TILE, PATCHES_PER_SIDE = 126, 9
PINPOINTS = [[h * TILE, w * TILE] for h in range(1, 4) for w in range(1, 4)]


def write_model_dir(directory, **changes):
    """Writes `config.json` and `preprocessor_config.json`; `changes` go into the text configuration."""
    text = {
        "model_type": "qwen2",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        # Larger than usual, so that every part of so small a model changes the loss.
        "initializer_range": 0.1,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "image_size": TILE,
        "patch_size": 14,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vision_use_head": False,
        "initializer_range": 0.1,
    }
    config = {
        "model_type": "llava_onevision",
        "image_token_index": IMAGE_TOKEN,
        "video_token_index": VIDEO_TOKEN,
        "image_grid_pinpoints": PINPOINTS,
        "tie_word_embeddings": False,
        "vision_config": vision,
        "text_config": {**text, **changes},
    }
    if "tie_word_embeddings" in changes:
        config["tie_word_embeddings"] = changes["tie_word_embeddings"]
    processor = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "size": {"height": TILE, "width": TILE},
        "image_grid_pinpoints": PINPOINTS,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "do_pad": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def num_features(kind, height, width, num_tiles):
    """Features of one medium by Hugging Face's processor, whose counting code is not the packing code."""
    from transformers import LlavaOnevisionProcessor

    processor = object.__new__(LlavaOnevisionProcessor)
    processor.num_image_tokens = PATCHES_PER_SIDE**2
    processor.vision_aspect_ratio = "anyres_max_9"
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=PINPOINTS)
    if kind == "image":
        return processor._get_number_of_features(height, width, TILE, TILE)
    if kind == "multi_image":
        return PATCHES_PER_SIDE**2 + 1
    return num_tiles * ((PATCHES_PER_SIDE + 1) // 2) ** 2 + 1


def num_tiles_of_image(height, width):
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    return image_size_to_num_patches([height, width], PINPOINTS, TILE)


def parts(grid):
    """(count, tiles, features) of its parts: a frame each, the last with the newline; an image is one."""
    if grid.kind != "video":
        return ((1, grid.num_tiles, grid.num_features),)
    pooled = ((PATCHES_PER_SIDE + 1) // 2) ** 2
    last = (1, 1, pooled + 1)
    return ((grid.num_tiles - 1, 1, pooled), last) if grid.num_tiles > 1 else (last,)


class Sample:
    """Text around media, as token ids and labels, with random pixels."""

    def __init__(self, media, num_text, seed, num_prompt=4):
        """`media` is a list of (kind, height, width, frames)."""
        generator = torch.Generator().manual_seed(seed)

        def words(count):
            return torch.randint(0, IMAGE_TOKEN, (count,), generator=generator).tolist()

        self.grids, ids, labels = [], words(num_prompt), [-100] * num_prompt
        for kind, height, width, frames in media:
            tiles = {"image": num_tiles_of_image(height, width), "multi_image": 1, "video": frames}[kind]
            features = num_features(kind, height, width, tiles)
            self.grids.append(MediaGrid(kind, tiles, height, width, features))
            ids += [VIDEO_TOKEN if kind == "video" else IMAGE_TOKEN] * features
            labels += [-100] * features
        answer = words(num_text)
        self.ids, self.labels = ids + answer, labels + answer
        total = sum(grid.num_tiles for grid in self.grids)
        self.pixels = torch.randn(total, 3, TILE, TILE, generator=generator)

    @property
    def targets(self):
        """The id that each position must predict."""
        return [*self.labels[1:], -100]


def pack(samples):
    """(EncoderInput, LlmInput) of samples packed into one microbatch."""
    ids = torch.tensor([i for s in samples for i in s.ids], dtype=torch.int64)
    bounds = [0]
    for sample in samples:
        bounds.append(bounds[-1] + len(sample.ids))
    llm = LlmInput(
        input_ids_T=ids,
        feature_mask_T=(ids == IMAGE_TOKEN) | (ids == VIDEO_TOKEN),
        positions_T=torch.tensor([p for s in samples for p in range(len(s.ids))], dtype=torch.int64),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        targets_T=torch.tensor([t for s in samples for t in s.targets], dtype=torch.int64),
    )
    pixels = torch.cat([torch.empty(0, 3, TILE, TILE), *(s.pixels for s in samples)])
    return EncoderInput(pixels, [g for s in samples for g in s.grids]), llm


def hf_arguments(sample):
    """Arguments of Hugging Face's whole model for one sample alone."""
    arguments = {"input_ids": torch.tensor([sample.ids]), "use_cache": False}
    tiles = sample.pixels.split([g.num_tiles for g in sample.grids]) if sample.grids else []
    images = [(g, t) for g, t in zip(sample.grids, tiles, strict=True) if g.kind != "video"]
    videos = [t for g, t in zip(sample.grids, tiles, strict=True) if g.kind == "video"]
    if images:
        most = max(t.shape[0] for _, t in images)
        arguments["pixel_values"] = torch.stack(
            [torch.cat([t, torch.zeros(most - t.shape[0], 3, TILE, TILE)]) for _, t in images]
        )
        arguments["image_sizes"] = torch.tensor([[g.height, g.width] for g, _ in images])
        arguments["batch_num_images"] = torch.tensor([len(images)])
    if videos:
        arguments["pixel_values_videos"] = torch.stack(videos)
    return arguments


def pretrained(model_dir, directory, seed):
    """Hugging Face's own model as its users get it: saved, then loaded with `from_pretrained`; to be trained.

    Its parameters are those that the pieces start from, under the names that Hugging Face gives them.
    """
    from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

    adapter, cpu = load_adapter(model_dir), torch.device("cpu")
    pieces = [
        adapter.build_encoder(cpu, torch.float32, seed),
        adapter.build_llm_stage(0, adapter.num_llm_layers, cpu, torch.float32, seed),
    ]
    values = {name: p.detach() for piece in pieces for name, p in piece.named_parameters()}
    model = LlavaOnevisionForConditionalGeneration(LlavaOnevisionConfig.from_pretrained(model_dir))
    own = {name for name, _ in model.named_parameters()}
    assert set(values) == own, "the pieces' parameters are Hugging Face's"
    model.load_state_dict(values, strict=False)
    model.save_pretrained(directory)
    return LlavaOnevisionForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).train()


def labels_loss(model, sample):
    """Sum of the loss over the label tokens of one sample, by the model's own `labels=`, a mean over them."""
    num_targets = sum(target != -100 for target in sample.targets)
    return num_targets * model(**hf_arguments(sample), labels=torch.tensor([sample.labels])).loss


def hf_loss(reference, sample):
    """(logits [T, V], sum of the cross entropy) of one sample by Hugging Face's whole model."""
    logits = reference(**hf_arguments(sample)).logits[0]
    targets = torch.tensor(sample.targets)
    return logits, torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")
