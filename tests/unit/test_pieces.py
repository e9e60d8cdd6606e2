"""The pieces that the profiler runs are the model: its numbers, its parameters, nothing left out.

Oracle: Hugging Face's own towers and backbones on the same weights, each sample alone.
"""

from types import SimpleNamespace

import pytest
import torch
from piece_oracles import PAGES, PICTURES, QWEN_VL, SLICES, SQUARES, encoder_inputs, masks_of_pictures
from real_families import REAL
from tiny_backbone import VOCABULARY
from tiny_families import (
    OF_SOUND,
    OMNI,
    TEXT,
    TINY,
    hugging_face_model,
    some_segments,
    tiny,
    write_config,
)
from tiny_llava import write_model_dir
from torch import nn
from torch.nn.functional import cross_entropy

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.families.gemma4 import bounds_of as bounds_of_squares
from dflop.models.families.gemma4 import positions_of
from dflop.models.families.minicpmv4_6 import bounds_of as bounds_of_slices
from dflop.models.families.minicpmv4_6 import embed as embed_slices
from dflop.models.families.minicpmv4_6 import merge_windows
from dflop.models.families.minicpmv4_6 import run_layer as run_slices
from dflop.models.families.mistral3 import bounds_of
from dflop.models.families.paddleocr_vl import bounds_of as bounds_of_pages
from dflop.models.families.paddleocr_vl import lay_out_pages
from dflop.models.layer_kinds import keep_none_for_others
from dflop.models.naflex import bounds_of as bounds_of_tiles
from dflop.models.packing import PACKED, PACKED_ENCODER
from dflop.models.patch_layout import lay_out
from dflop.models.patches import merge
from dflop.models.towers import backbone_of
from dflop.profiling.assemble import experts_of
from dflop.profiling.families import load_pieces
from dflop.profiling.pieces import PieceSettings

CPU = torch.device("cpu")
WHOLE = PieceSettings(CPU, torch.float32)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def real_model(directory):
    """Hugging Face's whole model, its parameters large enough that every part changes the result."""
    torch.manual_seed(5)
    model = hugging_face_model(directory).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


def taken(piece, model, settings=WHOLE):
    """The piece with the modules of a real model; its layers attend as in training from now on."""
    for encoder in piece.source.encoders_of(model.config):
        encoder._attn_implementation = piece.source._encoder_attention
    model.config.text_config._attn_implementation = PACKED
    return piece.take(model, settings)


def as_hugging_face(model):
    """Its own attention again."""
    parts = (getattr(model.config, f"{part}_config", None) for part in ("vision", "audio", "text"))
    for part in (part for part in parts if part is not None):
        part._attn_implementation = "sdpa"
    return model


@pytest.mark.some(12, 10)
@pytest.mark.parametrize("name", TINY)
def test_pieces_run_forward_and_backward_at_any_packing(tmp_path, name):
    for piece in tiny(tmp_path, name)[0].values():
        module = piece.build(WHOLE)
        assert module.training
        assert all(parameter.grad is None for parameter in module.parameters())
        for segments in some_segments(piece):
            prepared = piece.prepare(module, segments, WHOLE)
            result = prepared.forward()
            result.sum().backward()
            assert torch.isfinite(result).all()
            assert not any(tensor.requires_grad for tensor in prepared.inputs)
            # The same inputs at each call.
            assert torch.equal(prepared.forward(), result)
        wanted = {path: p for path, p in module.named_parameters() if p.requires_grad}
        assert wanted
        idle = {path for path, parameter in wanted.items() if parameter.grad is None}
        # The last layer and norm of LLaVA's tower, SigLIP's head, and the bounds of sounds of Qwen2.5-Omni are held,
        # as in training, and not run.
        unread = ("unread.", "post_layernorm", ".head.")
        assert all(any(part in path for part in unread) for path in idle)
        assert not idle or (
            name.startswith(("llava", "minicpm"))
            and piece.name == "encoder_embedding"
            or piece.name == "sound_embedding"
        )


@pytest.mark.some(12, 10)
@pytest.mark.parametrize("name", TINY)
def test_backward_reaches_the_piece_before(tmp_path, name):
    leaves = []
    for piece in tiny(tmp_path, name)[0].values():
        module = piece.build(WHOLE)
        module.register_forward_pre_hook(lambda _, args: leaves.append(args[0]))
        piece.prepare(module, some_segments(piece)[-1], WHOLE).forward().sum().backward()
        assert (leaves[-1].grad is not None) == piece.wants_input_gradient == leaves[-1].requires_grad


@pytest.mark.some(12, 10)
@pytest.mark.parametrize("name", TINY)
def test_embedding_layers_and_projector_are_the_tower(tmp_path, name):
    pieces, directory = tiny(tmp_path, name)
    model = real_model(directory)
    inputs, wanted = encoder_inputs(name, as_hugging_face(model))
    embedding, projector = (taken(pieces[part], model) for part in ("encoder_embedding", "projector"))
    stack = taken(pieces["encoder_layer"], model)
    if name in ("llava", "llava_next"):
        # Its features are those of the last layer but one.
        stack.layers = stack.layers[: pieces["encoder_layer"].count]
    with torch.no_grad():
        if name == "lfm2_vl":
            tiles = [(6, 4), (2, 4)]
            hidden = stack(embedding(inputs, tiles), bounds_of_tiles(tiles, CPU))
            found = projector(hidden, tiles)
        elif name.startswith("minicpm"):
            # The merger is measured with the embedding, and stands between layers.
            merges, tower = load_adapter(directory).num_merges, model.model.vision_tower
            hidden = embed_slices(tower.embeddings, inputs, SLICES, merges)
            for number, layer in enumerate(stack.layers):
                is_merged = merges == 2 and number == 2
                if is_merged:
                    hidden = merge_windows(embedding.vit_merger, hidden)
                hidden = run_slices(layer, hidden, bounds_of_slices(SLICES, CPU, is_merged=is_merged))
            found = projector(hidden)
        elif name.startswith(("mistral3", "lighton")):
            pictures = [(5, 2), (2, 4)]
            hidden = embedding(inputs, pictures)
            found = projector(stack(hidden, bounds_of(stack.rotary, pictures, hidden)), pictures)
        elif name == "paddleocr_vl":
            places = lay_out_pages(PAGES, load_adapter(directory).geometry, CPU)
            hidden = embedding(inputs, places)
            found = projector(stack(hidden, bounds_of_pages(stack.rotary, places, hidden)))
        elif name.startswith("gemma4"):
            positions = positions_of(SQUARES, CPU)
            hidden = embedding(inputs, SQUARES)
            hidden = stack(hidden, bounds_of_squares(stack.rotary, SQUARES, positions, hidden), positions)
            found = projector(hidden, SQUARES)
        elif name in QWEN_VL:
            patches = lay_out(PICTURES, stack.geometry, CPU)
            hidden = embedding(inputs, patches)
            deep = []
            for index, layer in enumerate(list(stack.layers)):
                stack.layers = nn.ModuleList([layer])
                stack.has_windows = name in ("qwen2_5_vl", "qwen2_5_omni") and index not in (1, 3)
                hidden = stack(hidden, stack.bounds(patches, hidden))
                if name.startswith(("qwen3_vl", "qwen3_omni")) and index in (1, 2):
                    deep.append(hidden)
            found = merge(projector.mergers, [hidden, *deep], patches.order)
        else:
            found = projector(stack(embedding(inputs)))
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.some(12, 10)
@pytest.mark.parametrize("name", TINY)
def test_packed_backbone_is_hugging_faces_sample_by_sample(tmp_path, name):
    """Loss over packed samples, the first with features in it; with mrope, at positions as pictures have."""
    pieces, directory = tiny(tmp_path, name)
    model = real_model(directory)
    sizes, features = [7, 1, 12], 4
    total = sum(sizes)
    generator = torch.Generator().manual_seed(2)
    ids_T = torch.randint(0, VOCABULARY, (total,), generator=generator)
    targets_T = torch.randint(0, VOCABULARY, (total,), generator=generator)
    targets_T[: features + 1] = -100
    features_ED = torch.randn(features, TEXT["hidden_size"], generator=generator)
    mask_T = torch.arange(total) < features
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    if name in QWEN_VL:
        positions = torch.randint(0, 9, (3, 1, total), generator=generator)

    inner = backbone_of(as_hugging_face(model))
    embedded_TD = inner.embed_tokens(ids_T).masked_scatter(mask_T[:, None], features_ED)
    logits, start = [], 0
    for size in sizes:
        rows = slice(start, start + size)
        hidden = inner(
            inputs_embeds=embedded_TD[None, rows],
            attention_mask=masks_of_pictures(name, model, mask_T[rows]) if name.startswith("gemma") else None,
            position_ids=positions[..., rows],
            use_cache=False,
        )
        logits.append(model.lm_head(hidden.last_hidden_state[0]))
        start += size
    logits_TV = torch.cat(logits)
    if name.startswith("gemma4"):
        logits_TV = 3.0 * torch.tanh(logits_TV / 3.0)
    wanted = cross_entropy(logits_TV, targets_T, reduction="sum")

    keep_none_for_others(inner.layers)
    layers, head = taken(pieces["llm_layer"], model), taken(pieces["llm_head"], model)
    hidden_TD = taken(pieces["llm_embedding"], model)(
        features_ED, ids_T, mask_T, mask_T.nonzero().squeeze(1), positions
    )
    hidden_TD = layers(hidden_TD, layers.pack(sizes, hidden_TD, positions, mask_T))
    chosen_T = targets_T != -100
    scale = float(logits_TV.detach().abs().max())
    torch.testing.assert_close(
        head.logits(hidden_TD, chosen_T), logits_TV[chosen_T], rtol=1e-5, atol=1e-5 * scale
    )
    torch.testing.assert_close(head(hidden_TD, targets_T), wanted, rtol=1e-5, atol=0)


def num_parameters(pieces):
    """Of all pieces, each as often as the model has it; counted on the meta device."""
    total = 0
    for piece in pieces.values():
        module = piece.take(piece.source.whole(piece.num_layers), WHOLE)
        number = sum(parameter.numel() for parameter in module.parameters())
        # Layers of several kinds come in their proportion.
        total += number * piece.count // piece.num_layers
    return total


@pytest.mark.some(30)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", [*TINY, "llava_onevision"])
def test_the_head_says_whether_its_matrix_is_the_embeddings(tmp_path, name, is_tied):
    if name == "llava_onevision":
        found = load_pieces(write_model_dir(tmp_path / name, tie_word_embeddings=is_tied))
        directory = tmp_path / name
    else:
        asked = {"tie_word_embeddings": is_tied}
        if "thinker_config" in TINY[name]:
            asked = {"thinker_config": {**TINY[name]["thinker_config"], **asked}}
        directory = write_config(tmp_path / name, name, {**TINY[name], **asked})
        found = load_pieces(directory)
    with torch.device("meta"):
        whole = hugging_face_model(directory)
    # The models of sound tie nothing, whatever their configuration says.
    expected = whole.lm_head.weight is backbone_of(whole).embed_tokens.weight
    assert expected == (is_tied and name not in OF_SOUND)
    assert {piece.name: piece.is_tied for piece in found} == {
        piece.name: expected and piece.name == "llm_head" for piece in found
    }


@pytest.mark.some(12, 10)
@pytest.mark.parametrize("name", TINY)
def test_all_parameters_are_in_a_piece(tmp_path, name):
    pieces, directory = tiny(tmp_path, name)
    with torch.device("meta"):
        whole = hugging_face_model(directory)
    found = sum(parameter.numel() for parameter in whole.parameters())
    # A layer with an MLP counts as one with six experts, a shared one and a router.
    assert num_parameters(pieces) == found + (7 * 3 * 32 + 6 - 3 * 96) * 48 * (name == "glm4v_moe")


@pytest.mark.some(7)
@pytest.mark.parametrize("name", TINY)
def test_the_experts_of_a_layer_are_counted_apart(tmp_path, name):
    """Six experts of three matrices, of which a token reads two; one that all tokens read, and a router, are none of them."""
    pieces, _ = tiny(tmp_path, name)
    layer = pieces["llm_layer"]
    module = layer.take(layer.source.whole(layer.num_layers), WHOLE)
    found = experts_of(module, layer.num_layers)
    if "moe" not in name and name != "gemma4-experts":
        assert found is None
        return
    number = sum(p.numel() for key, p in module.named_parameters() if ".experts." in f".{key}")
    assert (found["count"], found["per_token"]) == (6, 2)
    assert found["num_parameters"] * layer.num_layers == number
    assert found["parameter_bytes"] == 4 * found["num_parameters"]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("internvl", 8_075_365_376),
        ("smolvlm", 2_246_784_880),
        # Embedding and head each hold the matrix that they share.
        ("gemma3", 4_300_079_472 + 262_208 * 2_560),
        # Without 2,364 numbers that do not train.
        ("gemma4", 31_273_088_876 - 60 - 2 * 1_152 + 262_144 * 5_376),
        ("glm4v", 10_292_777_472),
        # Without the layer that predicts a second token: a layer, the embedding and head, norms and a map of its own.
        ("glm_ocr", 1_325_258_240 - 30_676_992 - 2 * 59_392 * 1_536 - 3 * 1_536 - 2 * 1_536**2),
        # Without its correction biases; a layer without experts counts as one with them.
        ("glm4v_moe", 107_710_933_120 - 45 * 128 + (129 * 3 * 1_408 + 128 - 3 * 10_944) * 4_096),
        # Without what its class does not read, pooling head and second table; embedding and head each count.
        ("paddleocr_vl", 958_588_736 - 15_238_352 - 32_768 * 1_152),
        ("lfm2_vl", 450_822_656 + 65_536 * 1_024),
        ("qwen2_vl", 8_291_375_616),
        ("qwen2_5_vl", 8_292_166_656),
        # As Hugging Face's thinker counts them.
        ("qwen2_5_omni", 8_931_813_888),
        ("qwen3_omni_moe", 31_719_205_488),
        ("qwen3_vl", 8_767_123_696),
        ("qwen3_vl_moe", 31_070_754_032),
        ("qwen2_audio", 8_397_094_912),
        # As Music Flamingo's weights have it, whose modules are the same.
        ("audioflamingo3", 8_267_215_360),
        # As Hugging Face's model counts them.
        ("voxtral", 4_676_271_104),
    ],
)
def test_pieces_of_public_models_have_their_parameters(tmp_path, name, published):
    """Totals as the models' own weight files have them."""
    directory = write_config(tmp_path, name, REAL[name])
    pieces = {piece.name: piece for piece in load_pieces(directory)}
    assert num_parameters(pieces) == published
    counts = {piece.name: piece.count for piece in pieces.values() if piece.count > 1}
    layers = {
        "internvl": 24,
        "glm4v": 24,
        "glm_ocr": 24,
        "lfm2_vl": 12,
        "paddleocr_vl": 27,
        "glm4v_moe": 24,
        "smolvlm": 27,
        "gemma3": 27,
        "gemma4": 27,
        "qwen2_5_vl": 4,
        "qwen2_5_omni": 4,
        "qwen3_omni_moe": 27,
        "qwen3_vl": 27,
        "qwen3_vl_moe": 27,
    }.get(name, 32)
    windows = {"encoder_window_layer": 28} if name.startswith("qwen2_5") else {}
    sounds = {"sound_layer": 32} if name in OMNI else {}
    backbone = {
        "glm4v": 40,
        "glm_ocr": 16,
        "lfm2_vl": 16,
        "paddleocr_vl": 18,
        "glm4v_moe": 46,
        "smolvlm": 24,
        "gemma3": 34,
        "gemma4": 60,
        "qwen2_vl": 28,
        "qwen2_5_vl": 28,
        "qwen2_5_omni": 28,
        "qwen3_omni_moe": 48,
        "audioflamingo3": 28,
        "voxtral": 30,
        "qwen3_vl": 36,
        "qwen3_vl_moe": 48,
    }.get(name, 32)
    assert counts == {"encoder_layer": layers, **windows, **sounds, "llm_layer": backbone}
    # As the data profile counts encoder tokens.
    tokens = {"internvl": 1025, "smolvlm": 729, "gemma3": 4096, **dict.fromkeys(OF_SOUND, 1500)}.get(name)
    assert pieces["encoder_layer"].segment_tokens == tokens
    assert pieces["encoder_layer"].unit() == (tokens or (9 if name == "gemma4" else 4))


def test_windows_do_not_leak(tmp_path):
    """A changed patch changes its window alone, in a full layer its picture alone."""
    pieces, _ = tiny(tmp_path, "qwen2_5_vl")
    window, full = (pieces[name].build(WHOLE) for name in ("encoder_window_layer", "encoder_layer"))
    patches = lay_out([(1, 16, 20), (1, 8, 8)], window.geometry, CPU)
    assert patches.windows == (64, 64, 32, 64, 64, 32, 64)
    hidden = torch.randn(sum(patches.segments), 32)
    changed = hidden.clone()
    changed[70] += 1.0
    for module, affected in ((window, range(64, 128)), (full, range(320))):
        bounds = module.bounds(patches, hidden)
        differs = (module(hidden, bounds) != module(changed, bounds)).any(dim=1).nonzero().flatten()
        assert differs.tolist() == list(affected)


def test_windows_are_measured_whole_and_pictures_nearly_square(tmp_path):
    pieces, _ = tiny(tmp_path, "qwen2_5_vl")
    seen = []
    for name, segments in (("encoder_window_layer", [192, 64]), ("encoder_layer", [60, 4])):
        module = pieces[name].build(WHOLE)
        module.register_forward_pre_hook(lambda _, args: seen.append(args[1].segment_tokens))
        pieces[name].prepare(module, segments, WHOLE).forward()
    assert seen == [(64,) * 4, (60, 4)]
    geometry = pieces["encoder_layer"].build(WHOLE).geometry
    # 36 features are 6 x 6, 34 are 2 x 17.
    assert [geometry.square(tokens) for tokens in (4 * 36, 4 * 34, 4)] == [(1, 12, 12), (1, 4, 34), (1, 2, 2)]


def test_segments_that_no_picture_has_are_refused(tmp_path):
    piece = tiny(tmp_path, "qwen2_vl")[0]["encoder_layer"]
    with pytest.raises(
        ValueError, match=r"segments \[8, 6\] of `encoder_layer`: each must be a multiple of 4"
    ):
        piece.prepare(nn.Identity(), [8, 6], WHOLE)
    with pytest.raises(ValueError, match="multiple of 4"):
        piece.prepare(nn.Identity(), [], WHOLE)


def test_attention_of_encoders_is_told_where_segments_vary(tmp_path):
    kind = tiny(tmp_path, "qwen2_5_vl")[0]["encoder_layer"].attention(WHOLE)
    assert (kind.num_heads, kind.head_size, kind.is_causal) == (4, 8, False)
    assert tiny(tmp_path, "qwen2_5_vl")[0]["encoder_window_layer"].attention(WHOLE) is None
    for name in ("internvl", *OF_SOUND):
        assert tiny(tmp_path, name)[0]["encoder_layer"].attention(WHOLE) is None


def test_configurations_that_are_not_built_are_named(tmp_path):
    text = {**TEXT, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    config = {**TINY["internvl"], "text_config": {**text, "model_type": "qwen2"}, "vision_feature_layer": -2}
    with pytest.raises(ProfileError) as error:
        load_pieces(write_config(tmp_path, "internvl", config))
    assert str(error.value).splitlines()[1:] == [
        "  `text_config.sliding_window` is 64, must be null, or not in use",
        "  `vision_feature_layer` is -2, must be -1",
    ]
    with pytest.raises(ProfileError, match="of model family `bert`, known are"):
        load_pieces(write_config(tmp_path, "bert", {}))


def test_encoders_are_handed_the_bounds():
    """What the name of the function hinges on, in transformers."""
    from transformers.utils.generic import is_flash_attention_requested

    assert is_flash_attention_requested(SimpleNamespace(_attn_implementation=PACKED_ENCODER))
    assert not is_flash_attention_requested(SimpleNamespace(_attn_implementation=PACKED))
