"""The pieces of a model, put together, are Hugging Face's whole model."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_families import TINY, write_config
from tiny_llava import TILE, Sample, hf_loss, num_features, num_tiles_of_image, pack, write_model_dir
from tiny_llava import parts as tiny_parts
from transformers import LlavaOnevisionForConditionalGeneration

import dflop
from dflop._native.testing import media_shape
from dflop.data import dataset
from dflop.data.collate import encoder_input
from dflop.data.shares import share_of
from dflop.models import load_adapter
from dflop.models.media import MediaBytes
from dflop.models.rules import dropout_rules

CPU, FLOAT = torch.device("cpu"), torch.float32
SAMPLES = {
    "text": Sample([], 23, seed=1),
    "image": Sample([("image", 200, 300, 0)], 9, seed=2),
    "wide image": Sample([("image", 40, 400, 0)], 9, seed=3),
    # More than nine tiles' worth of features: the bilinear way down is taken.
    "large image": Sample([("image", 1200, 1200, 0)], 5, seed=4),
    "multi image": Sample([("multi_image", 90, 60, 0), ("multi_image", 300, 500, 0)], 11, seed=5),
    "video": Sample([("video", 240, 320, 5)], 8, seed=6),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return load_adapter(write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def reference(adapter):
    return adapter.reference_model(seed=7)


def build(adapter, cuts, seed=7):
    """Encoder and LLM stages; `cuts` are the layers of each stage."""
    stages, first = [], 0
    for layers in cuts:
        stages.append(adapter.build_llm_stage(first, layers, CPU, FLOAT, seed))
        first += layers
    return adapter.build_encoder(CPU, FLOAT, seed), stages


def run(encoder, stages, samples):
    encoder_input, llm_input = pack(samples)
    hidden = encoder(encoder_input)
    for stage in stages:
        hidden = stage(llm_input, hidden)
    return hidden


def gradients(modules):
    found = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad
    return found


def relative_error(found, expected):
    """Norm of the difference over the norm of the expected, over all parameters together."""
    assert found.keys() == expected.keys()
    difference = sum((found[n] - expected[n]).double().square().sum() for n in expected)
    return (difference / sum(g.double().square().sum() for g in expected.values())).sqrt().item()


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("cuts", [(4,), (3, 1)], ids=["one stage", "two stages"])
def test_pieces_equal_the_whole_model(adapter, reference, kind, cuts):
    sample = SAMPLES[kind]
    reference.zero_grad(set_to_none=True)
    expected_logits, expected_loss = hf_loss(reference, sample)
    expected_loss.backward()
    expected = gradients([reference])
    # Text alone gives the encoder no gradient in either; neither do modules that nothing reads.
    assert any("vision_tower" in name for name in expected) == bool(sample.grids)

    encoder, stages = build(adapter, cuts)
    loss = run(encoder, stages, [sample])
    loss.backward()
    found = {n: g for n, g in gradients([encoder, *stages]).items() if n in expected or g.any()}
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert relative_error(found, expected) <= 1e-5

    encoder_input, llm_input = pack([sample])
    hidden = encoder(encoder_input)
    for stage in stages[:-1]:
        hidden = stage(llm_input, hidden)
    logits, targets = stages[-1].logits(llm_input, stages[-1].hidden(llm_input, hidden))
    chosen = torch.tensor(sample.targets) != -100
    assert targets.tolist() == [t for t in sample.targets if t != -100]
    torch.testing.assert_close(logits, expected_logits[chosen], atol=1e-5, rtol=1e-5)


def test_packed_samples_give_the_sum_of_their_losses_and_gradients(adapter, reference):
    samples = list(SAMPLES.values())
    reference.zero_grad(set_to_none=True)
    total = sum(hf_loss(reference, sample)[1] for sample in samples)
    total.backward()
    encoder, stages = build(adapter, (2, 2))
    loss = run(encoder, stages, samples)
    loss.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-6)
    assert relative_error(gradients([encoder, *stages]), gradients([reference])) <= 1e-5


PARTS_OF = {
    # Tiles, features: 9 x 9 patches a tile; pooled by 2, 5 x 5 a frame.
    "image": 1, "wide image": 1, "large image": 1, "multi image": 2, "video": 5,
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTS_OF)
def test_parts_encoded_apart_are_the_sample_encoded_whole(kind, adapter):
    """By the parts of the shape rule: their features one after the other, and the sum of their gradients."""
    sample, files = (
        SAMPLES[kind],
        [adapter.model_dir / n for n in ("config.json", "preprocessor_config.json")],
    )
    texts = [file.read_text() for file in files]
    parts = []
    for grid in sample.grids:
        name = "video" if grid.kind == "video" else "image"
        several = 1 + (grid.kind == "multi_image")
        sizes = {"height": grid.height, "width": grid.width, "num_images": several}
        parts.append(media_shape(*texts, "{}", name, **sizes, num_frames=grid.num_tiles, fps=None).parts)
    assert parts == [list(tiny_parts(grid)) for grid in sample.grids]
    whole = toy_runtime_sample(sample, parts)
    assert sum(count for groups in parts for count, _, _ in groups) == PARTS_OF[kind]
    encoder = adapter.build_encoder(CPU, FLOAT, 7)
    weights = torch.randn(whole.num_features, 48, generator=torch.Generator().manual_seed(1))
    tiles = sample.pixels.split([grid.num_tiles for grid in sample.grids])

    def encode(share):
        pixels = torch.cat([tiles[r.medium][r.first_tile :][: r.grid.num_tiles] for r in share.runs])
        features = encoder(encoder_input([share], [pixels], FLOAT))
        (features * weights[share.rows.start : share.rows.stop]).sum().backward()
        return features.detach()

    expected = encode(share_of(whole))
    wanted = {name: gradient.clone() for name, gradient in gradients([encoder]).items()}
    encoder.zero_grad(set_to_none=True)
    found = torch.cat([encode(share_of(whole, (part, 1))) for part in range(PARTS_OF[kind])])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert relative_error(gradients([encoder]), wanted) <= 1e-5


def toy_runtime_sample(sample, parts):
    """The sample as the runtime has it; what the encoder does not read is left empty."""
    none = torch.empty(0)
    total = sum(grid.num_features for grid in sample.grids)
    return dataset.Sample(
        0, "toy", none, none, none, none, tuple(sample.grids), (), total, tuple(tuple(p) for p in parts)
    )


def test_every_layout_has_the_parameters_of_the_whole_model(adapter, reference):
    whole = reference.state_dict()
    for cuts in [(4,), (1, 3), (2, 1, 1)]:
        encoder, stages = build(adapter, cuts)
        pieces = {name: value for m in [encoder, *stages] for name, value in m.state_dict().items()}
        assert pieces.keys() == whole.keys()
        assert all(torch.equal(pieces[name], whole[name]) for name in whole)
    other = adapter.build_llm_stage(0, 4, CPU, FLOAT, 8).state_dict()
    assert not torch.equal(other["lm_head.weight"], whole["lm_head.weight"])


def test_values_of_a_parameter_are_those_of_its_kind(reference):
    values = dict(reference.named_parameters())
    assert values["model.vision_tower.encoder.layers.0.layer_norm1.weight"].unique().tolist() == [1.0]
    assert values["model.language_model.layers.3.input_layernorm.weight"].unique().tolist() == [1.0]
    assert not values["model.language_model.layers.3.self_attn.q_proj.bias"].any()
    head = values["lm_head.weight"]
    assert head.std().item() == pytest.approx(0.1, rel=0.05)
    assert abs(head.mean().item()) < 0.01


def test_buffers_are_real_and_frequencies_stay_float32(adapter):
    from transformers import LlavaOnevisionForConditionalGeneration

    expected = dict(LlavaOnevisionForConditionalGeneration(adapter.config).named_buffers())
    pieces = [
        adapter.build_encoder(CPU, torch.bfloat16, 0),
        adapter.build_llm_stage(0, 4, CPU, torch.bfloat16, 0),
    ]
    found = {name: buffer for piece in pieces for name, buffer in piece.named_buffers()}
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert buffer.dtype == expected[name].dtype
        assert torch.equal(buffer, expected[name])


def test_empty_input_gives_no_features_and_gradients_of_zero(adapter):
    encoder, stages = build(adapter, (2, 2))
    encoder_input, llm_input = pack([])
    features = encoder(encoder_input)
    assert features.shape == (0, 48)
    incoming, hidden = features.detach().requires_grad_(), None
    hidden = stages[0](llm_input, incoming)
    assert hidden.shape == (0, 48)
    between = hidden.detach().requires_grad_()
    loss = stages[1](llm_input, between)
    assert loss.item() == 0.0
    assert loss.dtype == torch.float32
    loss.backward()
    torch.autograd.backward(hidden, between.grad)
    torch.autograd.backward(features, incoming.grad)
    found = gradients([encoder, *stages])
    assert found
    assert not any(gradient.any() for gradient in found.values())


def test_text_without_tiles_and_labels_leaves_the_encoder_a_gradient_of_zero(adapter):
    encoder, stages = build(adapter, (4,))
    sample = Sample([], 10, seed=3)
    sample.labels = [-100] * len(sample.ids)
    encoder_input, llm_input = pack([sample])
    features = encoder(encoder_input)
    incoming = features.detach().requires_grad_()
    loss = stages[0](llm_input, incoming)
    loss.backward()
    assert loss.item() == 0.0
    assert incoming.grad.shape == (0, 48)
    torch.autograd.backward(features, incoming.grad)
    assert not any(gradient.any() for gradient in gradients([encoder, *stages]).values())


def test_feature_counts_are_those_of_the_processor(adapter):
    """Sizes at random, and the extremes; a wrong count is an error, not a shift of all that follows."""
    encoder = adapter.build_encoder(CPU, FLOAT, 0)
    sizes = np.random.default_rng(11).integers(1, 900, size=(12, 2)).tolist()
    for height, width in [*sizes, [1, 1], [1, 1000], [1000, 1], [10, 100], [5000, 5600]]:
        sample = Sample([("image", height, width, 0)], 2, seed=1)
        encoder_input, _ = pack([sample])
        with torch.no_grad():
            features = encoder(encoder_input)
        tiles = num_tiles_of_image(height, width)
        assert features.shape[0] == num_features("image", height, width, tiles), (height, width)
    wrong = [dataclasses.replace(sample.grids[0], num_features=7)]
    with pytest.raises(ValueError, match="7 were expected"):
        encoder(dataclasses.replace(encoder_input, media=wrong))


def test_features_and_places_must_agree(adapter):
    stage = adapter.build_llm_stage(0, 4, CPU, FLOAT, 0)
    _, llm_input = pack([SAMPLES["video"]])
    with pytest.raises(ValueError, match="3 features for 126 places"):
        stage(llm_input, torch.zeros(3, 48))


def test_tied_embeddings_share_one_tensor_and_a_name_on_two_stages(tmp_path):
    adapter = load_adapter(write_model_dir(tmp_path, tie_word_embeddings=True))
    sample = SAMPLES["image"]
    reference = adapter.reference_model(seed=1)
    with torch.device("meta"):
        published = LlavaOnevisionForConditionalGeneration(adapter.config)
    # Each matrix once, as Hugging Face's own class counts them.
    assert sum(p.numel() for p in reference.parameters()) == sum(p.numel() for p in published.parameters())
    stage = adapter.build_llm_stage(0, 4, CPU, FLOAT, 1)
    assert stage.lm_head.weight is stage.model.language_model.embed_tokens.weight
    assert reference.lm_head.weight is reference.model.language_model.embed_tokens.weight
    expected_loss = hf_loss(reference, sample)[1]
    expected_loss.backward()
    encoder, stages = build(adapter, (4,), seed=1)
    loss = run(encoder, stages, [sample])
    loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert relative_error(gradients([encoder, *stages]), gradients([reference])) <= 1e-5
    # Apart, both ends have it under the name of the embedding, and the same values.
    encoder, stages = build(adapter, (2, 2), seed=1)
    name = "model.language_model.embed_tokens.weight"
    ends = [dict(stage.named_parameters()) for stage in stages]
    assert [sorted(n for n in end if "layers" not in n) for end in ends] == [
        [name],
        [name, "model.language_model.norm.weight"],
    ]
    assert torch.equal(ends[0][name], ends[1][name])
    run(encoder, stages, [sample]).backward()
    whole = reference.get_parameter(name).grad
    parts = [end[name].grad for end in ends]
    assert relative_error({name: parts[0] + parts[1]}, {name: whole}) <= 1e-5
    assert all(relative_error({name: part}, {name: whole}) > 0.1 for part in parts)


def test_an_unknown_family_is_named_with_those_known(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        dflop.ProfileError,
        match="`gpt2`, known are .*`llava_onevision`, `minicpmv4_6`, `mistral3`, `paddleocr_vl`, `qwen2_5_omni`, `qwen2_5_vl`",
    ) as error:
        load_adapter(tmp_path)
    assert "says what it needs to be measured and trained" in error.value.__notes__[0]
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}')
    with pytest.raises(dflop.ProfileError, match="`internvl_chat`, known are .*`llava_onevision`") as error:
        load_adapter(tmp_path)
    assert "`dflop profile model --estimate --hardware NAME`" in error.value.__notes__[0]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(dflop.ProfileError, match=r"config\.json"):
        load_adapter(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_adapter(tmp_path / "nowhere")


def test_a_configuration_that_cannot_be_packed_is_refused(tmp_path):
    changed = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    with pytest.raises(dflop.ProfileError, match="text_config.sliding_window"):
        load_adapter(write_model_dir(tmp_path, **changed))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("vision", {"out_hidden_size": 40}, "vision_config.out_hidden_size` is 40, must be `text_config.hidden_size`"),
        ("vision", {"temporal_patch_size": 1}, "vision_config.temporal_patch_size` is 1, must be 2"),
        ("vision", {"image_size": [84, 84]}, "vision_config.image_size` is .84, 84., must be one side"),
        ("text", {"head_dim": 16}, "text_config.head_dim` is 16, must be `hidden_size` over"),
        ("text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "mrope_section` is .8, 12, 12., must be"),
    ],
)  # fmt: skip
def test_a_glm_whose_parts_do_not_fit_is_refused_by_name(tmp_path, part, change, message):
    config = {**TINY["glm4v"], f"{part}_config": {**TINY["glm4v"][f"{part}_config"], **change}}
    with pytest.raises(dflop.ProfileError, match=message):
        load_adapter(write_config(tmp_path, "glm4v", config))


def test_a_glm_with_the_backbones_fields_at_the_top_is_refused(tmp_path):
    """As the oldest files are; transformers 5 takes none of them."""
    config = {**TINY["glm4v"]["text_config"], **TINY["glm4v"]}
    del config["text_config"]
    with pytest.raises(dflop.ProfileError, match="`text_config` is None, must be a section"):
        load_adapter(write_config(tmp_path, "glm4v", config | {"model_type": "glm4v"}))


def test_dropout_is_refused_by_name(tmp_path):
    """What it drops depends on how samples are packed and dealt out, and so would the gradient."""
    rule = "is 0.1, must be 0: what is dropped at random would depend on the schedule"
    with pytest.raises(dflop.ProfileError, match=f"`text_config.attention_dropout` {rule}"):
        load_adapter(write_model_dir(tmp_path, attention_dropout=0.1))
    load_adapter(write_model_dir(tmp_path, attention_dropout=0.0))
    found = dropout_rules({"resid_pdrop": 0.1, "a": {"layerdrop": 0.0, "b": {"drop_path_rate": 1}}, "x": 3})
    assert [(rule.field, rule.holds) for rule in found] == [
        ("resid_pdrop", False), ("a.layerdrop", True), ("a.b.drop_path_rate", False),
    ]  # fmt: skip


def picture(width, height, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def test_image_tiles_are_those_of_the_hf_processor(adapter, tmp_path):
    image = picture(200, 130)
    image.save(tmp_path / "a.png")
    tiles = adapter.pixels(tmp_path / "a.png", "image", [])
    expected = adapter.processor.preprocess([image], return_tensors="pt")["pixel_values"][0]
    assert tiles.shape == (num_tiles_of_image(130, 200), 3, TILE, TILE)
    assert tiles.dtype == torch.float32
    assert torch.equal(tiles, expected.float())
    # The base tile is normalised: mean and standard deviation of 0.5 map to -1..1.
    assert tiles[0].min() >= -1.0
    assert tiles[0].max() <= 1.0


def test_one_of_several_images_is_one_padded_tile(adapter, tmp_path):
    image, other = picture(200, 130), picture(60, 90, seed=1)
    image.save(tmp_path / "a.png")
    tiles = adapter.pixels(tmp_path / "a.png", "multi_image", [])
    expected = adapter.processor.preprocess([[image, other]], return_tensors="pt")["pixel_values"][0]
    assert tiles.shape == (1, 3, TILE, TILE)
    assert torch.equal(tiles, expected.float())


def test_exif_rotation_is_applied(adapter, tmp_path):
    image = picture(200, 130)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "upright.png")
    turned = adapter.pixels(tmp_path / "turned.png", "image", [])
    assert torch.equal(turned, adapter.pixels(tmp_path / "upright.png", "image", []))
    in_memory = MediaBytes("row 3", (tmp_path / "turned.png").read_bytes())
    assert torch.equal(turned, adapter.pixels(in_memory, "image", []))
    assert turned.shape[0] == num_tiles_of_image(200, 130)


def shaded_frames(count, size=(64, 48)):
    """Frames that a lossy codec keeps apart: each of one shade."""
    return [Image.new("RGB", size, (20 * index, 20 * index, 20 * index)) for index in range(count)]


def shade_of(tile):
    return round(((tile.mean().item() + 1) / 2) * 255 / 20)


@pytest.mark.parametrize("ending", ["gif", "webp", "mp4", "mkv", "webm"])
def test_the_named_frames_are_decoded(adapter, tmp_path, ending):
    path, frames = tmp_path / f"clip.{ending}", shaded_frames(8)
    if ending in ("gif", "webp"):
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=100)
    else:
        write_video(path, frames, "libvpx" if ending == "webm" else "mpeg4")
    tiles = adapter.pixels(path, "video", [5, 0, 3, 3])
    assert tiles.shape == (4, 3, TILE, TILE)
    assert [shade_of(tile) for tile in tiles] == [5, 0, 3, 3]
    assert adapter.pixels(path, "video", []).shape == (0, 3, TILE, TILE)
    in_memory = MediaBytes("row 3", path.read_bytes())
    assert torch.equal(adapter.pixels(in_memory, "video", [5, 0, 3, 3]), tiles)
    with pytest.raises(dflop.ProfileError, match="has 8 frames, frame 8 was asked for"):
        adapter.pixels(path, "video", [0, 8])


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_pipe_in_the_place_of_a_medium_is_not_waited_for(adapter, tmp_path, kind):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(dflop.ProfileError, match="pipe or socket, must be a regular file"):
        adapter.pixels(tmp_path / "pipe.png", kind, [0] if kind == "video" else [])


def write_video(path, frames, codec):
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 1_000_000
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode(None))


def test_video_tiles_are_those_of_the_hf_video_processor(adapter, tmp_path):
    pytest.importorskip("torchvision")
    from transformers import LlavaOnevisionVideoProcessor

    gradient = np.linspace(0, 255, 90 * 70 * 3).reshape(70, 90, 3).astype(np.uint8)
    frames = [Image.fromarray(np.roll(gradient, 9 * index, axis=1)) for index in range(3)]
    frames[0].save(
        tmp_path / "clip.webp", save_all=True, append_images=frames[1:], lossless=True, duration=100
    )
    tiles = adapter.pixels(tmp_path / "clip.webp", "video", [0, 1, 2])
    processor = LlavaOnevisionVideoProcessor(
        size={"height": TILE, "width": TILE}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    expected = processor([np.stack([np.asarray(f) for f in frames])], return_tensors="pt")[
        "pixel_values_videos"
    ][0]
    assert torch.equal(tiles, expected)


@pytest.mark.parametrize(("name", "kind"), [("a.jpg", "image"), ("a.mp4", "video"), ("a.gif", "video")])
def test_a_broken_file_is_named(adapter, tmp_path, name, kind):
    path = tmp_path / name
    path.write_bytes(b"\xff\xd8\xff\xe0 not a picture")
    with pytest.raises(dflop.ProfileError, match=f"cannot decode `.*{name}`"):
        adapter.pixels(path, kind, [0])
    with pytest.raises(dflop.ProfileError, match="cannot decode `row 3`"):
        adapter.pixels(MediaBytes("row 3", path.read_bytes()), kind, [0])
    with pytest.raises(FileNotFoundError):
        adapter.pixels(tmp_path / f"missing-{name}", kind, [0])


def test_a_truncated_jpeg_is_broken(adapter, tmp_path):
    picture(200, 130).save(tmp_path / "whole.jpg")
    whole = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(dflop.ProfileError, match=r"half\.jpg"):
        adapter.pixels(tmp_path / "half.jpg", "image", [])
