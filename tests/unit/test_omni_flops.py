"""Operations, parameters and kept bytes of Qwen2.5-Omni's two encoders are PyTorch's own, to the last one."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from flop_configs import PATCHES, VL_TEXT
from flop_modules import Ran
from kept_bytes import kept_bytes
from test_flops import operations
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

import dflop
from dflop._native import testing
from dflop.models.towers import backbone_of

pytestmark = pytest.mark.usefixtures("quiet")
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}}
THINKER = {
    "audio_config": {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 72,
        "num_mel_bins": 10,
        "n_window": 4,
        "output_dim": 48,
    },
    "vision_config": {
        **PATCHES,
        "hidden_size": 32,
        "intermediate_size": 40,
        "out_hidden_size": 48,
        "window_size": 28,
        "fullatt_block_indexes": [1, 3],
    },
    "text_config": {**VL_TEXT, **ROPE},
}
CONFIG = json.dumps({"model_type": "qwen2_5_omni", "thinker_config": THINKER})


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def build():
    config = Qwen2_5OmniThinkerConfig(**json.loads(json.dumps(THINKER)))
    config._attn_implementation = "sdpa"
    return Qwen2_5OmniThinkerForConditionalGeneration(config).train()


def tower(kind):
    """Older transformers have the towers beside the backbone, newer ones below `.model`."""
    return next(m for name, m in build().named_modules() if name.split(".")[-1] == kind)


def bounds(segments):
    return torch.tensor([0, *segments]).cumsum(0).to(torch.int32)


def vision_layer(index, segments):
    layer = tower("visual").blocks[index]
    angles = (torch.randn(sum(segments), 8), torch.randn(sum(segments), 8))
    run = functools.partial(layer, cu_seqlens=bounds(segments), position_embeddings=angles)
    return Ran(run, torch.randn(sum(segments), 32), True, segments, [layer], angles)


def vision_embedding():
    patches = tower("visual").patch_embed
    return Ran(patches, torch.randn(24, 3 * 2 * 7 * 7), False, [16, 8], [patches])


def vision_projector():
    merger = tower("visual").merger
    return Ran(merger, torch.randn(24, 32), True, [16, 8], [merger])


def sound_layer():
    layer, segments = tower("audio_tower").layers[0], [4, 4, 3]
    run = functools.partial(layer, cu_seqlens=bounds(segments))
    return Ran(run, torch.randn(sum(segments), 32), True, segments, [layer])


def sound_embedding():
    """Whole windows: of a shorter last one PyTorch computes what is padded too."""
    audio = tower("audio_tower")

    def run(mel):
        hidden = F.gelu(audio.conv2(F.gelu(audio.conv1(mel)))).transpose(1, 2)
        return hidden + audio.positional_embedding.positional_embedding[: hidden.shape[1]]

    return Ran(
        run, torch.randn(3, 10, 8), False, [4, 4, 4], [audio.conv1, audio.conv2, audio.audio_bos_eos_token]
    )


def sound_projector():
    audio = tower("audio_tower")
    return Ran(
        lambda hidden: audio.proj(audio.ln_post((hidden[::2] + hidden[1::2]) / 2)),
        torch.randn(12, 32),
        True,
        [4, 4, 4],
        [audio.ln_post, audio.proj],
    )


MODULES = {
    "encoder_embedding": vision_embedding,
    "encoder_layer": functools.partial(vision_layer, 1, [24, 8, 40]),
    "encoder_window_layer": functools.partial(vision_layer, 0, [16, 16, 8]),
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
    if ran.wants_gradient:
        parameters = [p for part in ran.parts for p in part.parameters()]
        for parameter in parameters:
            parameter.requires_grad_(False)
        assert operations(ran) == (forward, ours["input"])
        for parameter in parameters:
            parameter.requires_grad_(True)


@pytest.mark.parametrize("module", MODULES)
def test_parameters_are_those_of_the_module(module):
    counted, _ = testing.model_modules(CONFIG)
    own = sum(p.numel() for part in MODULES[module]().parts for p in part.parameters())
    if module == "sound_embedding":
        # The embeddings of begin and end, which no forward of the thinker reads, are counted behind the layers.
        own -= 2 * 48
    if module == "sound_projector":
        own += 2 * 48
    assert counted[module][1] == own


@pytest.mark.parametrize("module", ["encoder_layer", "encoder_window_layer", "sound_layer"])
def test_layers_keep_what_the_rule_says(module):
    ran = MODULES[module]()
    ours = testing.module_activation_bytes(CONFIG, module, ran.segments, value_bytes=4)
    # Hugging Face's loop over segments copies their results into one tensor; packed kernels do not.
    assert kept_bytes(ran, torch.float32) == ours + ran.leaf.numel() * 4


@pytest.mark.parametrize("place", ["neither", "thinker", "text"])
def test_embedding_and_head_are_tied_where_hugging_face_ties_them(place):
    thinker = json.loads(json.dumps(THINKER))
    if place != "neither":
        (thinker if place == "thinker" else thinker["text_config"])["tie_word_embeddings"] = True
    with torch.device("meta"):
        model = Qwen2_5OmniThinkerForConditionalGeneration(Qwen2_5OmniThinkerConfig(**thinker))
    config = json.dumps({"model_type": "qwen2_5_omni", "thinker_config": thinker})
    counted, total = testing.model_modules(config)
    assert total == sum(p.numel() for p in model.parameters())
    assert counted["sound_layer"][0] == 2
    assert counted["encoder_layer"][0] + counted["encoder_window_layer"][0] == 4


def test_backbone_layers_are_those_of_the_counter():
    layer = backbone_of(build()).layers[0] if hasattr(build().model, "visual") else build().model.layers[0]
    rotary = next(m for name, m in build().named_modules() if name.endswith("rotary_emb"))
    hidden = torch.randn(2, 14, 48)
    angles = rotary(hidden, torch.arange(14).expand(3, 2, -1))
    run = functools.partial(layer, attention_mask=None, use_cache=False, position_embeddings=angles)
    ran = Ran(run, hidden, True, [14, 14], [layer], angles)
    ours = testing.module_flops(CONFIG, "llm_layer", ran.segments)
    assert operations(ran) == (ours["forward"], ours["input"] + ours["weight"])


def test_a_dropout_is_refused_by_name():
    thinker = {**THINKER, "audio_config": {**THINKER["audio_config"], "activation_dropout": 0.1}}
    with pytest.raises(dflop.ProfileError, match=r"thinker_config.audio_config.activation_dropout` is 0.1"):
        testing.model_modules(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": thinker}))
