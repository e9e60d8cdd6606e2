"""The shape rule of LightOnOCR equals Hugging Face's processor and model, integer for integer."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shape_oracle import drawn_sizes, outcome
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LightOnOcrProcessor,
    PreTrainedTokenizerFast,
)
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261128"))
# (height, width): a pixel, lines of pixels, 10:1, 28 megapixels both ways, and the edges of one feature.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (28, 28)]
EXTREMES += [(29, 28), (14, 28), (15, 15), (1540, 1541), (1, 1541), (2, 3081), (1, 2), (3000, 1999)]
# Side of a patch, patches a feature each way, the image processor's patch, longest edge.
SETTINGS = {
    "2-1b": (14, 2, 14, 1540),
    "by features": (14, 2, {"height": 28, "width": 28}, 1024),
    "odd": (8, 3, 16, 250),
}
TOKENS = {token: index for index, token in enumerate(("<unk>", "<pad>", "<|image_pad|>", "<b>", "<e>"))}


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    patch, merge, rounded, edge = SETTINGS[request.param]
    small = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    config = LightOnOcrConfig(
        vision_config={"model_type": "pixtral", "patch_size": patch, "image_size": edge, "head_dim": 8, **small},
        text_config={
            "model_type": "qwen3", "vocab_size": 16, "num_key_value_heads": 2, "head_dim": 8, **small,
        },
        image_token_id=2,
        spatial_merge_size=merge,
    )  # fmt: skip
    words = Tokenizer(WordLevel(TOKENS, unk_token="<unk>"))
    words.pre_tokenizer = Split(" ", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)[2:]})
    for field, token in zip(("image", "image_break", "image_end"), list(TOKENS)[2:], strict=True):
        setattr(tokenizer, f"{field}_token", token)
        setattr(tokenizer, f"{field}_token_id", TOKENS[token])
    # Pixel values decide no shape; without their arithmetic many megapixels take less time.
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0, "size": {"longest_edge": edge}}
    images = PixtralImageProcessorPil(**cheap, patch_size=rounded)
    processor = LightOnOcrProcessor(images, tokenizer, patch_size=patch, spatial_merge_size=merge)
    config_json, preprocessor_json = json.dumps(config.to_dict()), images.to_json_string()
    unit = rounded if isinstance(rounded, int) else rounded["height"]

    def shape(height, width):
        return testing.media_shape(config_json, preprocessor_json, "{}", "image", height=height, width=width)

    return SimpleNamespace(
        config=config, processor=processor, shape=shape, patch=patch, merge=merge, unit=unit
    )


def written(shape):
    """The text of a shape's pieces, with the features spelt out."""
    return "".join(text if text is not None else "<|image_pad|>" * count for text, count in shape.pieces)


def test_thousands_of_sizes(setting):
    """Sides by the processor's own function; our rule refuses those that vanish or fill no feature."""
    refused = 0
    edge = setting.processor.image_processor.size["longest_edge"]
    for size in EXTREMES + drawn_sizes(SEED, 2000):
        picture = np.broadcast_to(np.zeros(1, dtype=np.uint8), (3, *size))
        resized = get_resize_output_image_size(picture, edge, setting.unit, ChannelDimension.FIRST)
        text = setting.processor.replace_image_token({"image_sizes": [resized]}, 0)
        shape = outcome(lambda size=size: setting.shape(*size))
        if not text:
            assert shape == "refused", size
            refused += 1
            continue
        assert shape != "refused", size
        assert shape.patches == tuple(pixels // setting.patch for pixels in resized), size
        assert shape.segments == [(1, shape.patches[0] * shape.patches[1])]
        assert text == written(shape), size
    assert 0 < refused < 1500


def test_the_whole_processor_and_model(setting):
    """Pixel values and ids of the call itself, and a forward, which compares placeholders with features."""
    torch.manual_seed(SEED)
    model = LightOnOcrForConditionalGeneration(setting.config).eval()
    seen = []
    model.model.vision_encoder.transformer.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    # A picture of a single feature is a fault in the model itself (transformers 5.23): it takes that for a batch of one.
    drawn = [size for size in drawn_sizes(SEED, 60, largest=300) if min(size) > 45][:14]
    for sample in [[size] for size in drawn] + [drawn[:3]]:
        encoded = setting.processor(
            images=[np.zeros((*size, 3), dtype=np.uint8) for size in sample],
            text=" ".join(["<|image_pad|>"] * len(sample)),
            images_kwargs={"input_data_format": "channels_last"},
            return_tensors="pt",
        )
        shapes = [setting.shape(*size) for size in sample]
        expected = setting.processor.tokenizer(" ".join(written(shape) for shape in shapes))["input_ids"]
        assert encoded["input_ids"][0].tolist() == expected, sample
        with torch.no_grad():
            model(
                input_ids=encoded["input_ids"],
                pixel_values=encoded["pixel_values"].float() / 255,
                image_sizes=encoded["image_sizes"],
            )
        assert seen[-1] == sum(tokens for shape in shapes for _, tokens in shape.segments)
