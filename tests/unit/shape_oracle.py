"""Functions that the tests of shape rules against Hugging Face's processors share."""

import json
import random

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AudioFlamingo3Processor, PreTrainedTokenizerFast, WhisperFeatureExtractor

from dflop import ProfileError
from dflop._native import testing

# The text configuration of the smallest model that takes features among its embeddings.
TINY_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def drawn_sizes(seed, count, largest=6000):
    """(height, width), drawn log-uniformly from 1 to `largest` pixels a side; the seed is printed."""
    print(f"DFLOP_TEST_SEED={seed}")
    rng = random.Random(seed)
    return [(round(largest ** rng.random()), round(largest ** rng.random())) for _ in range(count)]


def outcome(call):
    """What the call returns; "refused" where it raises."""
    try:
        return call()
    except (ValueError, ZeroDivisionError, ProfileError):
        return "refused"


def our_image(config_json, settings, height, width):
    """(encoder tokens, LLM tokens) of an image that is one segment and one run of features."""
    shape = testing.media_shape(config_json, json.dumps(settings), "{}", "image", height=height, width=width)
    assert (shape.num_tiles, len(shape.segments), shape.frame_indices) == (1, 1, [])
    ((count, tokens),) = shape.segments
    assert (count, shape.pieces) == (1, [(None, shape.feature_tokens)])
    return tokens, shape.feature_tokens


def our_clip(config_json, preprocessor, video_preprocessor, clip, **asked):
    """The shape of `clip`: frames, frames a second, height, width."""
    num_frames, fps, height, width = clip
    return testing.media_shape(
        config_json,
        json.dumps(preprocessor),
        json.dumps(video_preprocessor),
        "video",
        height=height,
        width=width,
        num_frames=num_frames,
        fps=fps,
        **asked,
    )


def compare_images(processor, config_json, settings, sizes):
    """Our patches and LLM tokens are the processor's count; some sizes, not many, are refused by both."""
    refused = 0
    for height, width in sizes:

        def theirs(height=height, width=width):
            patches = processor.get_number_of_image_patches(height, width)
            return patches, patches // processor.merge_size**2

        expected = outcome(theirs)
        ours = outcome(lambda h=height, w=width: our_image(config_json, settings, h, w))
        assert ours == expected, (height, width)
        refused += expected == "refused"
    assert 0 < refused < 700


def processor_of_sounds(extractor, max_audio_len):
    """Audio Flamingo 3's, with a tokenizer of which `<sound>` has the id 2."""
    words = Tokenizer(WordLevel({"<unk>": 0, "<pad>": 1, "<sound>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=["<sound>"]
    )
    extractor = WhisperFeatureExtractor(**extractor)
    return AudioFlamingo3Processor(extractor, tokenizer, max_audio_len=max_audio_len)
