"""The shape rule of Gemma 3 equals Hugging Face's processor and model, integer for integer."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shape_oracle import drawn_sizes
from transformers import Gemma3Config, Gemma3Model, Gemma3Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261127"))
# (height, width): lines, ratios of exactly 1.2 and of halves, crops of exactly the least size, and one pixel less.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (600, 500), (500, 600), (599, 500), (400, 1000), (1000, 400)]
EXTREMES += [
    (256, 512),
    (512, 256),
    (255, 512),
    (256, 511),
    (300, 750),
    (4320, 6480),
    (300, 3000),
    (257, 1024),
]
PARTS = ("do_pan_and_scan", "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops")
SCANS = {
    "plain": {},
    "scanned": {"do_pan_and_scan": True},
    "small": {**dict(zip(PARTS, (True, 30, 7), strict=True)), "pan_and_scan_min_ratio_to_activate": 1.75},
    "one": dict(zip(PARTS, (True, 10, 1), strict=True)),
}
WORDS = SimpleNamespace(full_image_sequence="\n\n<start_of_image>" + "v" * 256 + "<end_of_image>\n\n")


def rule_of(config, fields):
    def shape(height, width):
        return testing.media_shape(config, json.dumps(fields), "{}", "image", height=height, width=width)

    return shape


@pytest.mark.parametrize("scan", SCANS)
def test_thousands_of_sizes(scan):
    """Crops by the processor's own function, text by its own words; a picture alone as a call makes it."""
    config = json.dumps(
        {"model_type": "gemma3", "vision_config": {"image_size": 896, "patch_size": 14}},
    )
    shape = rule_of(config, {"size": {"height": 896, "width": 896}, **SCANS[scan]})
    # Where a file does not say it, the processor's call does.
    asked = {**Gemma3Processor.images_kwargs, **SCANS[scan]}
    asked.pop("do_convert_rgb")
    is_scanned = asked.pop("do_pan_and_scan")
    seen = set()
    for size in EXTREMES + drawn_sizes(SEED, 1500):
        picture = np.broadcast_to(np.zeros(1, dtype=np.uint8), (3, *size))
        crops = len(Gemma3ImageProcessorPil().pan_and_scan(picture, **asked)) if is_scanned else 0
        seen.add(crops)
        found = shape(*size)
        assert found.num_tiles == 1 + crops, size
        assert found.segments == [(1 + crops, 4096)]
        text = Gemma3Processor.replace_image_token(WORDS, {"num_crops": [crops]}, 0)
        assert "".join(text if text is not None else "v" * count for text, count in found.pieces) == text
    most = SCANS[scan].get("pan_and_scan_max_num_crops", 4)
    # A picture is cut in two at least, unless one crop is all that is allowed.
    assert seen == ({0} if not is_scanned else {0, *range(min(2, most), most + 1)})


def test_the_whole_processor_and_model():
    """Pixel values of the call itself, and a forward of the model's encoder: tokens and features."""
    torch.manual_seed(SEED)
    small = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    vision = {"model_type": "siglip_vision_model", "image_size": 48, "patch_size": 6, **small}
    config = Gemma3Config(
        vision_config={**vision, "vision_use_head": False},
        text_config={"vocab_size": 32, "num_key_value_heads": 1, "head_dim": 8, **small},
        mm_tokens_per_image=16,
    )
    fields = {"size": {"height": 48, "width": 48}, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    processor = Gemma3ImageProcessorPil(
        **fields, pan_and_scan_max_num_crops=4, pan_and_scan_min_ratio_to_activate=1.2
    )
    text = json.dumps(config.to_diff_dict())
    with pytest.raises(Exception, match=r"`image_seq_length` is missing, must be 16, as the model has it"):
        rule_of(text, fields)(50, 60)
    # The processor's own file has both.
    shape = rule_of(text, {"image_processor": fields, "image_seq_length": 16})
    model = Gemma3Model(config).eval()
    seen = []
    model.vision_tower.encoder.layers[0].register_forward_pre_hook(
        lambda _, args, given: seen.append((args[0] if args else given["hidden_states"]).shape[:2]),
        with_kwargs=True,
    )
    for size in [(50, 60), (50, 61), (30, 200), (200, 45), (19, 100)]:
        pixels = processor([np.zeros((*size, 3), dtype=np.uint8)], return_tensors="pt")
        found = shape(*size)
        assert pixels["num_crops"].tolist() == [found.num_tiles - 1]
        with torch.no_grad():
            features = model.get_image_features(pixels["pixel_values"]).pooler_output
        assert features.shape[:2] == (found.num_tiles, 16)
        assert sum(count for _, count in found.pieces) == found.num_tiles * 16
        assert tuple(seen.pop()) == (found.num_tiles, found.segments[0][1])
