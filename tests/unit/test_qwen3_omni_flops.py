"""Operations, parameters and kept bytes of Qwen3-Omni's two encoders are PyTorch's own, to the last one."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from flop_configs import EXPERTS, QWEN3_TEXT, QWEN3_VISION
from flop_modules import Ran
from kept_bytes import kept_bytes
from test_flops import operations
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

import dflop
from dflop._native import testing

pytestmark = pytest.mark.usefixtures("quiet")
THINKER = {
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 72,
        # Odd after each halving, so that the convolutions round up.
        "num_mel_bins": 10,
        "downsample_hidden_size": 6,
        "output_dim": 48,
    },
    "vision_config": QWEN3_VISION,
    "text_config": {**QWEN3_TEXT, **EXPERTS},
}
CONFIG = json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": THINKER})


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def build():
    config = Qwen3OmniMoeThinkerConfig(**json.loads(json.dumps(THINKER)))
    config._attn_implementation = "sdpa"
    # The counter does not know products of experts in one kernel.
    config._experts_implementation = "eager"
    return Qwen3OmniMoeThinkerForConditionalGeneration(config).train().model


def bounds(segments):
    return torch.tensor([0, *segments]).cumsum(0).to(torch.int32)


def vision_layer():
    layer, segments = build().visual.blocks[1], [24, 8, 40]
    angles = (torch.randn(sum(segments), 8), torch.randn(sum(segments), 8))
    run = functools.partial(layer, cu_seqlens=bounds(segments), position_embeddings=angles)
    return Ran(run, torch.randn(sum(segments), 32), True, segments, [layer], angles)


def vision_projector():
    mergers = [build().visual.merger, *build().visual.merger_list]
    return Ran(
        lambda hidden: torch.cat([merger(hidden) for merger in mergers], dim=1),
        torch.randn(24, 32),
        True,
        [16, 8],
        mergers,
    )


def sound_layer():
    layer, segments = build().audio_tower.layers[0], [104, 104, 33]
    run = functools.partial(layer, cu_seqlens=bounds(segments))
    return Ran(run, torch.randn(sum(segments), 32), True, segments, [layer])


def sound_embedding():
    """Whole chunks: a shorter last one is computed as if it were whole."""
    audio = build().audio_tower
    convolutions = [audio.conv2d1, audio.conv2d2, audio.conv2d3]

    def run(hidden):
        for convolution in convolutions:
            hidden = F.gelu(convolution(hidden))
        hidden = audio.conv_out(hidden.permute(0, 3, 1, 2).flatten(2))
        return hidden + audio.positional_embedding.positional_embedding[: hidden.shape[1]]

    return Ran(run, torch.randn(3, 1, 10, 100), False, [26, 13], [*convolutions, audio.conv_out])


def sound_projector():
    audio = build().audio_tower
    return Ran(
        lambda hidden: audio.proj2(audio.act(audio.proj1(audio.ln_post(hidden)))),
        torch.randn(39, 32),
        True,
        [26, 13],
        [audio.ln_post, audio.proj1, audio.proj2],
    )


MODULES = {
    "encoder_layer": vision_layer,
    "projector": vision_projector,
    "sound_embedding": sound_embedding,
    "sound_layer": sound_layer,
    "sound_projector": sound_projector,
}


@pytest.mark.parametrize("module", MODULES)
def test_operations_are_those_of_the_counter(module):
    ran = MODULES[module]()
    ours = testing.module_flops(CONFIG, module, ran.segments)
    forward, backward = operations(ran)
    assert (ours["forward"], ours["input"] + ours["weight"]) == (forward, backward)
    again = operations(ran, lambda leaf: checkpoint(ran.run, leaf, use_reentrant=False))
    assert again == (forward, backward + ours["recomputed"])


@pytest.mark.parametrize("module", MODULES)
def test_parameters_are_those_of_the_module(module):
    counted, _ = testing.model_modules(CONFIG)
    assert counted[module][1] == sum(p.numel() for part in MODULES[module]().parts for p in part.parameters())


def test_parameters_are_those_of_hugging_faces_thinker():
    counted, total = testing.model_modules(CONFIG)
    whole = Qwen3OmniMoeThinkerForConditionalGeneration(
        Qwen3OmniMoeThinkerConfig(**json.loads(json.dumps(THINKER)))
    )
    assert total == sum(p.numel() for p in whole.parameters())
    assert (counted["encoder_layer"][0], counted["sound_layer"][0]) == (4, 2)


@pytest.mark.parametrize("module", ["encoder_layer", "sound_layer"])
def test_layers_keep_what_the_rule_says(module):
    ran = MODULES[module]()
    ours = testing.module_activation_bytes(CONFIG, module, ran.segments, value_bytes=4)
    # Hugging Face's loop over segments copies their results into one tensor; packed kernels do not.
    assert kept_bytes(ran, torch.float32) == ours + ran.leaf.numel() * 4


def test_the_convolutions_keep_what_the_rule_says():
    """The spectrogram, and of each convolution what goes into its activation and what comes of it."""
    ran = MODULES["sound_embedding"]()
    ours = testing.module_activation_bytes(CONFIG, "sound_embedding", ran.segments, value_bytes=4)
    # 50 x 5, 25 x 3 and 13 x 2 places of six channels. What the linear map reads is a copy of the last.
    places = 2 * (50 * 5 + 25 * 3 + 13 * 2) * 6 * 4 * 3
    assert kept_bytes(ran, torch.float32) == places + 3 * 10 * 100 * 4 == ours


def test_backbone_layers_are_those_of_the_counter():
    layer, rotary = build().language_model.layers[0], build().language_model.rotary_emb
    hidden = torch.randn(2, 14, 48)
    angles = rotary(hidden, torch.arange(14).expand(3, 2, -1))
    run = functools.partial(layer, attention_mask=None, use_cache=False, position_embeddings=angles)
    ran = Ran(run, hidden, True, [14, 14], [layer], angles)
    ours = testing.module_flops(CONFIG, "llm_layer", ran.segments)
    assert operations(ran) == (ours["forward"], ours["input"] + ours["weight"])


@pytest.mark.parametrize(
    ("section", "fields", "rule"),
    [
        ("audio_config", {"activation_dropout": 0.1}, "audio_config.activation_dropout` is 0.1"),
        ("audio_config", {"n_window": 40}, "audio_config.n_window` is 40, must be 50"),
        ("audio_config", {"output_dim": 32}, "audio_config.output_dim` is 32"),
        ("audio_config", {"model_type": "qwen2_5_omni_audio_encoder"}, "audio_config.model_type` is"),
        ("vision_config", {"deepstack_visual_indexes": [9]}, "vision_config.deepstack_visual_indexes` is"),
    ],
)
def test_what_is_not_counted_is_refused_by_name(section, fields, rule):
    thinker = {**THINKER, section: {**THINKER[section], **fields}}
    with pytest.raises(dflop.ProfileError, match=f"`thinker_config.{rule}"):
        testing.model_modules(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker}))
