"""Pieces with adapters, and the parts of them that one of several ranks has."""

import pytest
import torch
from real_families import REAL
from tiny_families import TINY, WITH_EXPERTS, some_segments, tiny, write_config

from dflop import ProfileError
from dflop.models.sums import Sums
from dflop.models.tensor import add_collectives
from dflop.profiling.families import load_pieces
from dflop.profiling.pieces import PieceSettings

CPU = torch.device("cpu")
WHOLE = PieceSettings(CPU, torch.float32)
WITH_LINEAR = ("qwen3_5", "minicpm")
"""Families with Qwen3.5's backbone."""
ONE_GATE = ("glm4v", "glm46v", "glm_ocr")
"""Families whose MLP has one map for gate and up."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.some(12, 10)
@pytest.mark.parametrize("name", TINY)
def test_with_lora_only_the_adapters_of_the_backbones_layers_train(tmp_path, name):
    lora = PieceSettings(CPU, torch.float32, lora_rank=3)
    pieces, _ = tiny(tmp_path, name)
    for part in ("llm_embedding", "llm_layer", "llm_head"):
        piece = pieces[part]
        module = piece.build(lora)
        piece.prepare(module, [6, 2], lora).forward().sum().backward()
        trained = {key for key, value in module.named_parameters() if value.grad is not None}
        adapters = {key for key, value in module.named_parameters() if "lora_" in key}
        assert trained == adapters == {key for key, value in module.named_parameters() if value.requires_grad}
        # A and B on seven maps of three layers; experts have none, and GLM has one map for gate and up.
        maps = 3 * (4 if name in WITH_EXPERTS and "gemma4" not in name else 6 if name in ONE_GATE else 7)
        if name.startswith(WITH_LINEAR):
            # Linear attention has five maps instead of four. What all tokens read beside experts has four.
            maps += 2 + (3 * 4 if name in WITH_EXPERTS else 0)
        # Three of the expert that all tokens read.
        maps += 9 * (name == "glm4v_moe")
        # A convolution has two maps instead of four, in two layers.
        maps -= 4 * (name == "lfm2_vl")
        # Where its layers see all tokens, keys are values too.
        maps -= name.startswith("gemma4")
        assert len(adapters) == (2 * maps if part == "llm_layer" else 0)
    base, with_adapters = pieces["llm_layer"].build(WHOLE), pieces["llm_layer"].build(lora)
    # q, o: 48 + 48; k, v: 48 + 24; gate, up, down: 48 + 96; gate and up in one: 48 + 192.
    mlp = 0 if name in WITH_EXPERTS and "gemma4" not in name else 240 + 144 if name in ONE_GATE else 3 * 144
    added = 3 * 3 * (2 * 96 + 2 * 72 + mlp)
    if name.startswith(WITH_LINEAR):
        # One layer has queries with gates, two have queries, keys and values, gates, two numbers a head, and the sum.
        added = 3 * (144 + 2 * 72 + 96 + 2 * (160 + 96 + 2 * 56 + 96))
        # The shared expert and its gate.
        added += 3 * 3 * (3 * (48 + 40) + 49 if name in WITH_EXPERTS else 3 * 144)
    added += 3 * 3 * 3 * (48 + 32) * (name == "glm4v_moe")
    # In two layers gates and what they gate, and the sum.
    added += 3 * 2 * (192 + 96 - 2 * 96 - 2 * 72) * (name == "lfm2_vl")
    # One layer has queries and output 48 + 64, keys 48 + 16, no values.
    added += 3 * (2 * 112 + 64 - 2 * 96 - 2 * 72) * name.startswith("gemma4")
    assert sum(p.numel() for p in with_adapters.parameters()) == added + sum(
        p.numel() for p in base.parameters()
    )


@pytest.mark.some(8)
@pytest.mark.parametrize("name", TINY)
def test_a_part_of_one_rank_has_its_heads_and_width(tmp_path, name):
    pieces, _ = tiny(tmp_path, name)
    half = PieceSettings(CPU, torch.float32, tensor_parallel_degree=2)
    quarter = PieceSettings(CPU, torch.float32, tensor_parallel_degree=4)
    # Two heads of keys and values: one each on two ranks, the same one on two of four.
    for settings, heads, shape in ((half, (2, 1), (24, 12, 48)), (quarter, (1, 1), (12, 12, 24))):
        kind = pieces["llm_layer"].attention(settings)
        assert (kind.num_heads, kind.num_key_value_heads) == heads
        assert kind.is_causal
        module = pieces["llm_layer"].build(settings)
        # Of backbones with two kinds the last has full attention.
        layer = module.layers[-1] if name.startswith((*WITH_LINEAR, "lfm2")) else module.layers[0]
        # Its queries come with their gates.
        gates = 2 if name.startswith(WITH_LINEAR) else 1
        found = (layer.self_attn.q_proj.out_features // gates, layer.self_attn.k_proj.out_features)
        assert found == shape[:2]
        if name in WITH_EXPERTS:
            # 6 experts, 32 wide; gates and the others are one parameter.
            experts = getattr(layer, "experts", None) or layer.mlp.experts
            assert experts.gate_up_proj.shape == (6, 64 // settings.tensor_parallel_degree, 48)
        if name in WITH_EXPERTS and not hasattr(layer, "experts"):
            continue
        if name == "lfm2_vl":
            assert layer.feed_forward.w1.out_features == shape[2]
            gated = module.layers[0].conv
            part = 48 // settings.tensor_parallel_degree
            assert (gated.in_proj.out_features, *gated.conv.weight.shape) == (3 * part, part, 1, 3)
            continue
        first = layer.mlp.gate_up_proj if name in ONE_GATE else layer.mlp.gate_proj
        assert first.out_features // (1 + (name in ONE_GATE)) == shape[2]
    assert pieces["llm_embedding"].build(half).embed_tokens.weight.shape == (150, 48)
    assert pieces["llm_head"].build(half).lm_head.weight.shape == (150, 48)
    for piece in pieces.values():
        if (name, piece.name) == ("internvl-llama", "encoder_layer"):
            with pytest.raises(ProfileError, match="`vision_config.use_qk_norm` is True, must be false"):
                piece.build(half)
            continue
        for settings in (half, quarter):
            module = piece.build(settings)
            # One rank's rows between the cut maps, as it is measured alone.
            add_collectives(module, Sums(None, settings.tensor_parallel_degree))
            piece.prepare(module, some_segments(piece)[-1], settings).forward().sum().backward()


@pytest.mark.parametrize(
    ("name", "part", "degree", "field"),
    [
        ("qwen2_5_vl", "llm_layer", 8, "`text_config.num_attention_heads` is 28"),
        ("qwen2_5_vl", "encoder_layer", 8, "`vision_config.intermediate_size` is 3420"),
        ("qwen2_audio", "encoder_layer", 8, "`audio_config.encoder_attention_heads` is 20"),
        ("audioflamingo3", "encoder_layer", 8, "`audio_config.num_attention_heads` is 20"),
        ("voxtral", "encoder_layer", 8, "`audio_config.num_attention_heads` is 20"),
        ("qwen2_5_omni", "sound_layer", 8, "`audio_config.encoder_attention_heads` is 20"),
        ("internvl", "llm_layer", 3, "`text_config.num_attention_heads` is 32"),
    ],
)
def test_what_cannot_be_cut_is_named(tmp_path, name, part, degree, field):
    pieces = {p.name: p for p in load_pieces(write_config(tmp_path, name, REAL[name]))}
    message = f"{field}, must be a multiple of the tensor parallel degree {degree}"
    with pytest.raises(ProfileError, match=message):
        pieces[part].build(PieceSettings(CPU, torch.float32, tensor_parallel_degree=degree))
