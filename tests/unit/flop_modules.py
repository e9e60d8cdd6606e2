"""Modules of Hugging Face's models at some sizes, by the names that a model profile has."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from flop_configs import CONFIGS
from kept_bytes import has_linear_attention, has_short_convolution, has_windows
from transformers import (
    AudioFlamingo3ForConditionalGeneration,
    AutoConfig,
    AutoModelForImageTextToText,
    Qwen2AudioForConditionalGeneration,
    VoxtralForConditionalGeneration,
)

from dflop.models.families.gemma4 import embed as embed_squares
from dflop.models.families.gemma4 import positions_of
from dflop.models.families.gemma4 import project as project_squares
from dflop.models.families.glm4v import embed as embed_glm
from dflop.models.families.glm4v import project as project_glm
from dflop.models.families.minicpmv4_6 import embed as embed_slices
from dflop.models.families.minicpmv4_6 import merge_windows
from dflop.models.families.minicpmv4_6 import project as project_slices
from dflop.models.families.mistral3 import embed as embed_patches
from dflop.models.families.paddleocr_vl import embed as embed_pages
from dflop.models.families.paddleocr_vl import lay_out_pages
from dflop.models.families.paddleocr_vl import project as project_pages
from dflop.models.layer_kinds import keep_none_for_others
from dflop.models.naflex import embed as embed_tiles
from dflop.models.naflex import project as project_tiles
from dflop.models.patch_layout import Geometry, lay_out
from dflop.models.towers import backbone_of, final_norm_name, inner_tower

SHUFFLED = ("idefics3", "smolvlm")


@functools.cache
def build(name):
    config = AutoConfig.for_model(**CONFIGS[name])
    config._attn_implementation = "sdpa"
    # PyTorch's counter does not know products of experts in one kernel.
    config._experts_implementation = "eager"
    return class_of(name)(config).train()


def class_of(name):
    return OF_SOUND.get(CONFIGS[name]["model_type"], AutoModelForImageTextToText.from_config)


def is_of_sound(name):
    return CONFIGS[name]["model_type"] in OF_SOUND


@dataclass
class Ran:
    """A module of Hugging Face's, at some sizes."""

    run: object
    """Takes the leaf."""
    leaf: torch.Tensor
    wants_gradient: bool
    segments: list[int]
    parts: list[torch.nn.Module]
    constants: tuple = ()
    """Tensors that all layers share."""


def encoder_tower(model):
    base = model.model
    names = ("vision_tower", "vision_encoder", "vision_model", "visual", "audio_tower")
    return inner_tower(next(getattr(base, name) for name in names if hasattr(base, name)))


def encoder_layers(name, tower):
    if name.startswith("internvl"):
        return tower.encoder.layer
    if is_of_sound(name):
        return tower.layers
    if name.startswith(("mistral3", "lighton")):
        return tower.transformer.layers
    return tower.blocks if is_native(name) and name != "paddleocr_vl" else tower.encoder.layers


OF_SOUND = {
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
    "audioflamingo3": AudioFlamingo3ForConditionalGeneration,
    "voxtral": VoxtralForConditionalGeneration,
}
WITH_CLIP = {"llava", "llava_next"}
"""Their tower has a class token, and a norm before its layers; all layers but the last are read."""


def tile_tokens(name):
    return 12 if is_of_sound(name) else 16 + (name in WITH_CLIP or name.startswith("internvl"))


def is_native(name):
    """Whether pictures keep their own size."""
    return name.startswith(("qwen", "glm", "paddle")) and "audio" not in name


def encoder_layer(name, is_window=False, segments=None):
    model = build(name)
    tower = encoder_tower(model)
    layer = encoder_layers(name, tower)[0 if is_window or name != "qwen2_5_vl" else 1]
    if name.startswith(("mistral3", "lighton")):
        segments = segments or [24]
        angles = (torch.randn(sum(segments), 8), torch.randn(sum(segments), 8))
        run = functools.partial(layer, attention_mask=None, position_embeddings=angles)
        return Ran(run, torch.randn(1, sum(segments), 32), True, segments, [layer], angles)
    if name.startswith("minicpm"):
        return sliced_layer(layer, segments or [16, 48])
    if is_native(name):
        segments = segments or ([16, 16, 8] if is_window else [24, 8, 40])
        bounds = torch.tensor([0, *segments]).cumsum(0).to(torch.int32)
        angles = (torch.randn(sum(segments), 8), torch.randn(sum(segments), 8))
        run = functools.partial(layer, cu_seqlens=bounds, position_embeddings=angles)
        return Ran(run, torch.randn(sum(segments), 32), True, segments, [layer], angles)
    if name.startswith("gemma4"):
        segments = segments or [24]
        angles = (torch.randn(1, sum(segments), 8), torch.randn(1, sum(segments), 8))
        places = torch.zeros(1, sum(segments), 2, dtype=torch.int64)
        run = functools.partial(layer, position_embeddings=angles, position_ids=places)
        return Ran(run, torch.randn(1, sum(segments), 32), True, segments, [layer], angles)
    tokens = tile_tokens(name)
    run = layer if name.startswith("internvl") else functools.partial(layer, attention_mask=None)
    return Ran(run, torch.randn(3, tokens, 32), True, [tokens] * 3, [layer])


def sliced_layer(layer, segments, merged=1):
    """A layer of MiniCPM-V over segments of so many patches, of which `merged` are a row."""
    rows = [tokens // merged for tokens in segments]
    bounds = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    run = functools.partial(layer, attention_mask=None, cu_seqlens=bounds, max_seqlen=max(rows))
    return Ran(run, torch.randn(1, sum(rows), 32), True, segments, [layer])


def encoder_merged_layer(name):
    return sliced_layer(encoder_tower(build(name)).encoder.layers[-1], [64, 32], merged=4)


def encoder_embedding(name):
    tower = encoder_tower(build(name))
    if is_of_sound(name):

        def run(sound):
            hidden = F.gelu(tower.conv2(F.gelu(tower.conv1(sound)))).permute(0, 2, 1)
            return hidden + tower.embed_positions.weight

        parts = [tower.conv1, tower.conv2, tower.embed_positions]
        return Ran(run, torch.randn(3, 10, 24), False, [12] * 3, parts)
    if name == "paddleocr_vl":
        places = lay_out_pages([(4, 4), (2, 4)], Geometry(2, 7, None, 4), torch.device("cpu"))
        run = functools.partial(embed_pages, tower.embeddings, places=places)
        return Ran(run, torch.randn(24, 3 * 7 * 7), False, [16, 8], [tower.embeddings])
    if name == "lfm2_vl":
        run = functools.partial(embed_tiles, tower.embeddings, segments=[(4, 4), (2, 4)])
        return Ran(run, torch.randn(24, 3 * 7 * 7), False, [16, 8], [tower.embeddings])
    if name.startswith("minicpm"):
        merges = 1 if name.endswith("4x") else 2

        def embed_and_merge(patches):
            hidden = embed_slices(tower.embeddings, patches, [(4, 4), (8, 4)], merges)
            return hidden if merges == 1 else merge_windows(tower.vit_merger, hidden)

        parts = [tower.embeddings, tower.vit_merger]
        return Ran(embed_and_merge, torch.randn(48, 3 * 7 * 7), False, [16, 32], parts)
    if is_native(name):
        patches = torch.randn(24, 3 * 2 * 7 * 7)
        if name.startswith("glm4"):
            points = lay_out([(1, 4, 4), (1, 2, 4)], Geometry(2, 7, None, 4, True), torch.device("cpu"))
            run = functools.partial(embed_glm, tower, patches=points, geometry=Geometry(2, 7, None, 4))
            parts = [tower.patch_embed, tower.post_conv_layernorm, tower.embeddings]
            return Ran(run, patches, False, [16, 8], parts)
        if name.startswith("qwen3"):
            places, shares = torch.randint(0, 16, (24, 4)), torch.rand(24, 4, 1)

            def embed(patches):
                return tower.patch_embed(patches) + (tower.pos_embed(places) * shares).sum(1)

            return Ran(embed, patches, False, [16, 8], [tower.patch_embed, tower.pos_embed])
        return Ran(tower.patch_embed, patches, False, [16, 8], [tower.patch_embed])
    if name.startswith(("mistral3", "lighton")):
        patches = torch.randn(24, 3 * 7 * 7)
        return Ran(
            lambda rows: embed_patches(tower, rows), patches, False, [16, 8], [tower.patch_conv, tower.ln_pre]
        )
    if name.startswith("gemma4"):
        places = positions_of([(1, 4, 4), (1, 2, 4)], torch.device("cpu"))
        run = functools.partial(embed_squares, tower, positions_1N2=places)
        return Ran(run, torch.randn(24, 3 * 7 * 7), False, [16, 8], [tower.patch_embedder])
    parts = [tower.embeddings]
    if name in WITH_CLIP:
        parts.append(tower.pre_layrnorm)

    def run(pixels):
        if name in SHUFFLED:
            return tower.embeddings(pixels, torch.ones(2, 4, 4, dtype=torch.bool))
        hidden = tower.embeddings(pixels)
        return tower.pre_layrnorm(hidden) if name in WITH_CLIP else hidden

    return Ran(run, torch.randn(2, 3, 28, 28), False, [tile_tokens(name)] * 2, parts)


def projector(name):
    model = build(name)
    tower = encoder_tower(model)
    if name == "paddleocr_vl":
        parts = [tower.post_layernorm, model.model.projector]
        return Ran(functools.partial(project_pages, *parts), torch.randn(24, 32), True, [16, 8], parts)
    if name == "lfm2_vl":
        parts = [tower.post_layernorm, model.model.multi_modal_projector]
        return Ran(
            lambda hidden: project_tiles(*parts, hidden, [(4, 4), (2, 4)]),
            torch.randn(24, 32),
            True,
            [16, 8],
            parts,
        )
    if name.startswith("minicpm"):
        parts = [tower.post_layernorm, model.model.merger]
        rows = 48 if name.endswith("4x") else 12
        return Ran(functools.partial(project_slices, *parts), torch.randn(rows, 32), True, [16, 32], parts)
    if is_native(name):
        if name.startswith("glm"):
            parts = [tower.post_layernorm, tower.downsample, tower.merger]
            return Ran(functools.partial(project_glm, tower), torch.randn(24, 32), True, [16, 8], parts)
        mergers = [tower.merger, *getattr(tower, "deepstack_merger_list", [])]

        def merge(hidden):
            return torch.cat([merger(hidden) for merger in mergers], dim=1)

        run = merge if len(mergers) > 1 else tower.merger
        return Ran(run, torch.randn(24, 32), True, [16, 8], mergers)
    if name.startswith(("mistral3", "lighton")):
        last = model.model.vision_projection if name == "lighton_ocr" else model.model.multi_modal_projector
        sizes = [(28, 28), (14, 28)]
        return Ran(lambda hidden: last(hidden, sizes), torch.randn(24, 32), True, [16, 8], [last])
    if name in SHUFFLED:
        last = model.model.connector
        parts = [tower.post_layernorm, last]
        return Ran(
            lambda hidden: last(tower.post_layernorm(hidden)), torch.randn(2, 16, 32), True, [16] * 2, parts
        )
    if name.startswith("gemma4"):
        run = functools.partial(project_squares, model.model, pictures=[(1, 4, 4), (1, 2, 4)], pool=2)
        return Ran(run, torch.randn(24, 32), True, [16, 8], [model.model.embed_vision])
    last = model.model.multi_modal_projector
    if name.startswith("gemma3"):
        head = [tower.head] if hasattr(tower, "head") else []
        parts = [tower.post_layernorm, *head, last]
        return Ran(
            lambda hidden: last(tower.post_layernorm(hidden)), torch.randn(2, 16, 32), True, [16] * 2, parts
        )
    if is_of_sound(name):

        def run(hidden):
            if name.startswith("voxtral"):
                return last(tower.layer_norm(hidden).reshape(-1, tower.config.intermediate_size))
            pooled = tower.avg_pooler(hidden.permute(0, 2, 1)).permute(0, 2, 1)
            return last(tower.layer_norm(pooled))

        return Ran(run, torch.randn(2, 12, 32), True, [12] * 2, [tower.layer_norm, last])
    if name.startswith("internvl"):

        def run(hidden):
            grid = hidden[:, 1:].reshape(2, 4, 4, 32)
            shuffled = build(name).model.pixel_shuffle(grid, scale_factor=0.5)
            return last(shuffled.reshape(2, 4, 128))

        parts = [tower.layernorm, last]
    else:
        first = int(name in WITH_CLIP)

        def run(hidden):
            return last(hidden[:, first:])

        unread = [tower.encoder.layers[1]] if name in WITH_CLIP else []
        head = [tower.head] if hasattr(tower, "head") else []
        newlines = [p for p in [getattr(model.model, "image_newline", None)] if p is not None]
        newline = SimpleNamespace(parameters=lambda: newlines)
        parts = [tower.post_layernorm, *head, *unread, newline, last]
    tokens = tile_tokens(name)
    return Ran(run, torch.randn(2, tokens, 32), True, [tokens] * 2, parts)


def llm_layer(name, tokens=14, copies=2, is_other=False):
    backbone = backbone_of(build(name))
    kinds = (has_linear_attention, has_windows, has_short_convolution)
    has_others = any(has(name) for has in kinds) or "glm4v_moe" in name
    layer = backbone.layers[-1 if has_others and not is_other else 0]
    keep_none_for_others([layer])
    hidden = torch.randn(copies, tokens, 48)
    positions = torch.arange(tokens).expand(copies, -1)
    if is_native(name):
        positions = positions.expand(3, -1, -1)
    kind = (layer.self_attn.layer_type,) if has_windows(name) else ()
    angles = backbone.rotary_emb(hidden, positions, *kind)
    run = functools.partial(layer, attention_mask=None, use_cache=False, position_embeddings=angles)
    return Ran(run, hidden, True, [tokens] * copies, [layer], angles)


def llm_head(name):
    model = build(name)
    backbone, head = backbone_of(model), model.lm_head
    norm = getattr(backbone, final_norm_name(backbone))

    cap = CONFIGS[name]["text_config"].get("final_logit_softcapping")

    def run(hidden):
        logits = head(norm(hidden)).float()
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return F.cross_entropy(logits, torch.arange(11), reduction="sum")

    return Ran(run, torch.randn(11, 48), True, [11], [norm, head])


def llm_embedding(name):
    table = backbone_of(build(name)).embed_tokens
    return Ran(lambda features: table(torch.arange(9)) + features, torch.randn(9, 48), True, [9], [table])


MODULES = {
    "encoder_embedding": encoder_embedding,
    "encoder_layer": encoder_layer,
    "encoder_window_layer": functools.partial(encoder_layer, is_window=True),
    "encoder_merged_layer": encoder_merged_layer,
    "projector": projector,
    "llm_embedding": llm_embedding,
    "llm_layer": llm_layer,
    # Two chunks of the recurrence, the second of which is not full.
    "llm_linear_layer": functools.partial(llm_layer, tokens=100, is_other=True),
    "llm_sliding_layer": functools.partial(llm_layer, is_other=True),
    "llm_conv_layer": functools.partial(llm_layer, is_other=True),
    "llm_dense_layer": functools.partial(llm_layer, is_other=True),
    "llm_head": llm_head,
}
SOME = {
    "encoder_window_layer": lambda name: name == "qwen2_5_vl",
    "encoder_merged_layer": lambda name: name == "minicpmv4_6",
    "llm_linear_layer": has_linear_attention,
    "llm_sliding_layer": has_windows,
    "llm_conv_layer": has_short_convolution,
    "llm_dense_layer": lambda name: "glm4v_moe" in name,
}
"""Modules that only some families have."""
CASES = [(name, module) for name in CONFIGS for module in MODULES if module not in SOME or SOME[module](name)]
