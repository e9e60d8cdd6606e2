"""The shape rule of Mistral3 equals Hugging Face's processor and model, integer for integer."""

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
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralProcessor,
    PreTrainedTokenizerFast,
)
from transformers.image_utils import ChannelDimension
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261126"))
# (height, width): a pixel, lines of pixels, 10:1, 28 megapixels both ways, and the edges of one feature.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (28, 28)]
EXTREMES += [(29, 28), (1540, 1541), (1540, 1540), (1, 1541), (2, 3081), (1, 2), (3000, 1999)]
# Side of a patch, patches a feature each way, longest edge.
SETTINGS = {"small-24b": (14, 2, 1540), "unmerged": (16, 1, 1024), "odd": (8, 3, 250)}
TOKENS = {token: index for index, token in enumerate(("<unk>", "<pad>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"))}


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    patch, merge, edge = SETTINGS[request.param]
    small = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    config = Mistral3Config(
        vision_config={"model_type": "pixtral", "patch_size": patch, "image_size": edge, **small},
        text_config={"model_type": "mistral", "vocab_size": 16, "num_key_value_heads": 2, **small},
        image_token_index=2,
        spatial_merge_size=merge,
    )
    words = Tokenizer(WordLevel(TOKENS, unk_token="<unk>"))
    words.pre_tokenizer = Split(" ", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)[2:]})
    # Pixel values decide no shape; without their arithmetic many megapixels take less time.
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0, "size": {"longest_edge": edge}}
    # The patch of its own file has no effect, as the processor asks for another.
    images = PixtralImageProcessorPil(**cheap, patch_size={"height": 5, "width": 5})
    processor = PixtralProcessor(images, tokenizer, patch_size=patch, spatial_merge_size=merge)
    config_json, preprocessor_json = json.dumps(config.to_diff_dict()), images.to_json_string()

    def shape(height, width):
        return testing.media_shape(config_json, preprocessor_json, "{}", "image", height=height, width=width)

    return SimpleNamespace(config=config, processor=processor, shape=shape, patch=patch, merge=merge)


def written(shape):
    """The text of a shape's pieces, with the features spelt out."""
    return "".join(text if text is not None else "[IMG]" * count for text, count in shape.pieces)


def test_thousands_of_sizes(setting):
    """Sides by the processor's own function; where one vanishes, its resizing raises and our rule refuses."""
    refused = 0
    side = setting.patch * setting.merge
    edge = setting.processor.image_processor.size["longest_edge"]
    for size in EXTREMES + drawn_sizes(SEED, 2000):
        picture = np.broadcast_to(np.zeros(1, dtype=np.uint8), (3, *size))
        resized = get_resize_output_image_size(picture, edge, side, ChannelDimension.FIRST)
        shape = outcome(lambda size=size: setting.shape(*size))
        if min(resized) == 0:
            assert shape == "refused", size
            refused += 1
            continue
        assert shape != "refused", size
        rows, columns = (pixels // side for pixels in resized)
        assert shape.patches == (rows * setting.merge, columns * setting.merge), size
        assert shape.segments == [(1, rows * columns * setting.merge**2)]
        assert setting.processor.replace_image_token({"image_sizes": [resized]}, 0) == written(shape), size
    assert 0 < refused < 1500


def test_the_whole_processor_and_model(setting):
    """Pixel values and ids of the call itself, and a forward, which compares placeholders with features."""
    torch.manual_seed(SEED)
    model = Mistral3ForConditionalGeneration(setting.config).eval()
    seen = []
    model.model.vision_tower.transformer.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0].shape[1])
    )
    # A picture of a single feature is a fault in the model itself (transformers 5.23): it takes that for a batch of one.
    drawn = [size for size in drawn_sizes(SEED, 60, largest=300) if min(size) > 30][:14]
    for sample in [[size] for size in drawn] + [drawn[:3]]:
        encoded = setting.processor(
            images=[np.zeros((*size, 3), dtype=np.uint8) for size in sample],
            text=" ".join(["[IMG]"] * len(sample)),
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


def test_the_files_that_transformers_saves_are_read(setting, tmp_path):
    """`config.json` and the one file into which the processor writes all its fields."""
    setting.config.save_pretrained(tmp_path)
    setting.processor.save_pretrained(tmp_path)
    texts = [(tmp_path / name).read_text() for name in ("config.json", "processor_config.json")]
    shape = testing.media_shape(*texts, "{}", "image", height=123, width=456)
    expected = setting.shape(123, 456)
    assert (shape.segments, shape.pieces, shape.patches) == (
        expected.segments,
        expected.pieces,
        expected.patches,
    )
