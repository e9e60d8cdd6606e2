"""What every family must do: its pieces, run on packed samples, are Hugging Face's own model run on each alone."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conformance import (
    CPU,
    FLOAT,
    SETTINGS,
    UNTOLD_NORM,
    check_gradients,
    conversations,
    expected_gradients,
    hugging_face,
    pretrained,
    write_model,
)
from tiny_families import RESORTED
from transformers import Trainer

from dflop._native import families
from dflop.data.collate import encoder_input, llm_input
from dflop.data.shares import share_of
from dflop.models import load_adapter
from dflop.models.adapter import EncoderInput
from dflop.models.mel_chunks import frames_of as chunks_of
from dflop.models.mel_windows import frames_of
from dflop.models.recompute import NONE, recomputing
from dflop.parallel.shard import layers_of
from dflop.runtime.optim import undecayed

pytestmark = pytest.mark.usefixtures("quiet")
SEED = 3


def test_every_family_that_trains_is_put_to_the_test():
    tested = {name.split("-")[0] for name in SETTINGS}
    assert tested == {name for name, can in families().items() if can["train"]}


# `make test` has every other family here, and each in some of the other tests.
ALL = [pytest.param(name, marks=pytest.mark.more if place % 2 else ()) for place, name in enumerate(SETTINGS)]


@pytest.fixture(scope="module", params=ALL)
def family(request, tmp_path_factory):
    """(name, adapter, samples by name) of a tiny model."""
    folder = tmp_path_factory.mktemp("family")
    adapter = load_adapter(write_model(folder, request.param))
    return request.param, adapter, conversations(folder / "media", adapter, request.param)


@pytest.fixture(scope="module")
def expected(family, tmp_path_factory):
    """Summed loss and gradients of all samples, one after the other, by Hugging Face's own model."""
    _, adapter, samples = family
    model = pretrained(adapter, tmp_path_factory.mktemp("saved"), SEED)
    return expected_gradients(model, samples.values())


def run(adapter, samples, cuts, dtype=FLOAT, prepare=lambda pieces: None, mode=NONE):
    """(loss, gradients by name) of samples packed into one microbatch, by stages of so many layers.

    `prepare` gets all pieces before they run; `mode` says what their layers recompute.
    """
    stages, first = [], 0
    for layers in cuts:
        stages.append(adapter.build_llm_stage(first, layers, CPU, dtype, SEED))
        first += layers
    encoder = adapter.build_encoder(CPU, dtype, SEED)
    with_media = [sample for sample in samples if sample.media]
    shares = [share_of(sample.sample) for sample in with_media]
    batch = (
        encoder_input(shares, [sample.tiles() for sample in with_media], dtype)
        if shares
        else EncoderInput(torch.empty(0, *adapter.input_shape), [])
    )
    pieces = [encoder, *stages]
    prepare(pieces)
    with ExitStack() as recomputed:
        for piece in pieces:
            recomputed.enter_context(recomputing(layers_of(piece), mode))
        hidden = encoder(batch)
        packed = llm_input([sample.sample for sample in samples])
        for stage in stages:
            hidden = stage(packed, hidden)
    hidden.backward()
    named = [(name, p) for piece in pieces for name, p in piece.named_parameters() if p.requires_grad]
    return hidden.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def test_weights_decay_as_those_of_the_trainer_but_for_norms_that_it_does_not_see(family):
    name, adapter, _ = family
    with torch.device("meta"):
        model = adapter.model_class(adapter.config_class.from_pretrained(adapter.model_dir))
    by_name = set(Trainer.get_decay_parameter_names(SimpleNamespace(), model))
    own = {key for key, _ in model.named_parameters()} - undecayed([model])
    assert own <= by_name
    assert by_name - own == {key for key in by_name if UNTOLD_NORM.search(key)}
    with_untold = (
        "qwen2_5_vl",
        "qwen2_5_omni",
        "mistral3",
        "lighton_ocr",
        "glm4v",
        "glm4v_moe",
        "glm46v",
        "glm_ocr",
    )
    assert (by_name != own) == (adapter.family in with_untold)


@pytest.mark.some(10)
@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.more), 2])
def test_packed_samples_have_the_gradients_of_hugging_face(family, expected, num_stages):
    name, adapter, samples = family
    # Not in the order in which Hugging Face's model had them.
    order = sorted(samples.values(), key=lambda sample: sample.ids)
    layers = adapter.num_llm_layers
    cuts = [layers] if num_stages == 1 else [1, layers - 1]
    loss, gradients = run(adapter, order, cuts)
    assert loss == pytest.approx(expected[0], rel=1e-6)
    check_gradients(gradients, expected[1], RESORTED.get(name, 1))


def test_half_precision_stays_near(family, expected):
    """All parts run in bfloat16, and positions, masks and bounds are as exact as before: the loss is near."""
    _, adapter, samples = family
    loss, gradients = run(adapter, list(samples.values()), [adapter.num_llm_layers], torch.bfloat16)
    assert loss == pytest.approx(expected[0], rel=0.02)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_text_alone_leaves_the_encoder_a_gradient_of_zero(family):
    _, adapter, samples = family
    _, gradients = run(adapter, [samples["text"]], [adapter.num_llm_layers])
    of_encoder = [g for name, g in gradients.items() if name.split(".")[1] in adapter.encoder_modules]
    assert of_encoder
    assert not any(gradient.any() for gradient in of_encoder)


def test_what_the_encoder_reads_is_what_the_processor_gives(family):
    """To the bit."""
    _, adapter, samples = family
    compared = 0
    for sample in samples.values():
        if not sample.media:
            continue
        arguments = hugging_face(sample)
        for kind, name in (
            ("image", "pixel_values"),
            ("video", "pixel_values_videos"),
            ("audio", "input_features"),
        ):
            media = [m for m in sample.media if m.kind == kind]
            are_one = adapter.family in ("internvl", "idefics3", "smolvlm")
            if are_one or adapter.family.startswith("glm") and "pixel_values_videos" not in arguments:
                media, name = (sample.media, "pixel_values") if kind == "image" else ([], name)
            if not media:
                continue
            theirs = arguments[name]
            ours = torch.cat([medium.inputs for medium in media])
            if adapter.family == "qwen3_omni_moe" and kind == "audio":
                for medium, mel, mask in zip(media, theirs, arguments["feature_attention_mask"], strict=True):
                    frames, computed = chunks_of(medium.inputs, mel.shape[0])
                    count = int(mask.sum())
                    assert torch.equal(frames.flatten(0, 1)[:count], mel[:, :count].T)
                    assert not frames.flatten(0, 1)[count:].any()
                    assert int(computed.sum()) == (count if count < 100 else -(-count // 100) * 100)
                compared += 1
                continue
            if adapter.family == "qwen2_5_omni" and kind == "audio":
                for medium, mel, mask in zip(media, theirs, arguments["feature_attention_mask"], strict=True):
                    frames, is_frame = frames_of(medium.inputs, mel.shape[0])
                    count = int(mask.sum())
                    assert torch.equal(frames[:count], mel[:, :count].T)
                    assert torch.equal(is_frame, (torch.arange(len(frames)) < count).float())
                compared += 1
                continue
            if kind == "audio" and adapter.family != "voxtral":
                ours, mask = ours[:, :-1], ours[:, -1]
                (theirs_mask,) = (value for key, value in arguments.items() if key.endswith("_mask"))
                assert torch.equal(mask, theirs_mask.float())
            elif adapter.family == "gemma4":
                # Filled up to the budget, and a video for each of its frames.
                real = arguments[f"{kind}_position_ids"][..., 0] >= 0
                assert torch.equal(ours, theirs[real])
                compared += 1
                continue
            elif adapter.family == "lfm2_vl":
                # Each tile is filled up to the largest.
                theirs = theirs[arguments["pixel_attention_mask"].bool()]
            elif adapter.family == "minicpmv4_6":
                # Patches side by side, in one row.
                theirs = theirs[0].unflatten(2, (-1, 14)).permute(2, 0, 1, 3).flatten(1)
            elif adapter.family in ("mistral3", "lighton_ocr"):
                assert ours.shape[0] == sum(medium.inputs.shape[0] for medium in media)
                for medium, padded, (height, width) in zip(
                    media, theirs, arguments["image_sizes"].tolist(), strict=True
                ):
                    rows, columns = medium.grid.patches
                    picture = medium.inputs.reshape(rows, columns, 3, 14, 14).permute(2, 0, 3, 1, 4)
                    assert torch.equal(picture.reshape(3, height, width), padded[:, :height, :width])
                compared += 1
                continue
            elif (
                name == "pixel_values" and theirs.shape[0] == 1 and adapter.family in ("idefics3", "smolvlm")
            ):
                theirs = theirs[0]
            elif adapter.family == "paddleocr_vl":
                theirs = theirs.flatten(1)
            elif theirs.dim() == 5:
                # Filled up with zeros to the largest number of tiles.
                counts = [medium.inputs.shape[0] for medium in media]
                theirs = torch.cat([tiles[:count] for tiles, count in zip(theirs, counts, strict=True)])
            assert torch.equal(ours, theirs)
            compared += 1
    assert compared


def test_parts_encoded_apart_are_the_sample_encoded_whole(family):
    _, adapter, samples = family
    encoder = adapter.build_encoder(CPU, FLOAT, SEED)
    for sample in samples.values():
        if not sample.media:
            continue
        whole = encoder(encoder_input([share_of(sample.sample)], [sample.tiles()], FLOAT))
        shares = [(part, 1) for part in range(sample.num_parts)]
        apart = [
            encoder(encoder_input([share_of(sample.sample, p)], [sample.tiles(p)], FLOAT)) for p in shares
        ]
        torch.testing.assert_close(torch.cat(apart), whole, atol=1e-5, rtol=1e-5)


def test_buffers_are_those_of_hugging_face(family):
    """Made without weights; frequencies stay float32 in every dtype."""
    _, adapter, _ = family
    expected = dict(adapter.model_class(adapter.read_config()).named_buffers())
    pieces = [
        adapter.build_encoder(CPU, torch.bfloat16, 0),
        adapter.build_llm_stage(0, adapter.num_llm_layers, CPU, torch.bfloat16, 0),
    ]
    found = {name: buffer for piece in pieces for name, buffer in piece.named_buffers()}
    assert found.keys() == expected.keys()
    for name, buffer in found.items():
        assert buffer.dtype == expected[name].dtype
        assert np.array_equal(buffer.numpy(), expected[name].numpy()), name


@pytest.mark.some(10, 20)
def test_example_media_are_what_the_encoder_gives(family):
    _, adapter, _ = family
    encoder = adapter.build_encoder(CPU, FLOAT, SEED)
    media = adapter.example_media(7)
    rows = sum(grid.num_inputs for grid in media)
    inputs = torch.ones(rows, *adapter.input_shape)
    assert encoder(EncoderInput(inputs, media)).shape[0] == sum(grid.num_features for grid in media)
    assert sum(grid.num_tiles for grid in media) == 7
