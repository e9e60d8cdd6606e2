"""Gemma 3 as it is published: embedding and head are one matrix, held by the first stage and by the last."""

import copy
import json

import pytest
import torch
from conformance import CPU, FLOAT, check_gradients, conversations, expected_gradients
from conformance_settings import SETTINGS
from safetensors.torch import save_file
from tiny_families import TINY, write_config

from dflop.data.collate import encoder_input, llm_input
from dflop.data.shares import share_of
from dflop.models import load_adapter
from dflop.models.load import Weights

pytestmark = pytest.mark.usefixtures("quiet")
EMBEDDING = "model.language_model.embed_tokens.weight"


@pytest.mark.parametrize("cuts", [[3], [1, 2], [1, 1, 1]])
def test_the_gradients_of_both_ends_are_that_of_the_one_matrix(cuts, tmp_path):
    config, processor, _, _ = copy.deepcopy(SETTINGS["gemma3"])
    config["text_config"]["initializer_range"] = config["vision_config"]["initializer_range"] = 0.1
    # Without a list of kinds, a head of SigLIP that nothing reads, and biases.
    config["text_config"].pop("sliding_window_pattern")
    config["text_config"].update(
        attention_bias=True, layer_types=["full_attention"] + ["sliding_attention"] * 2
    )
    config["vision_config"]["vision_use_head"] = True
    directory = write_config(tmp_path / "gemma3", "gemma3", {**config, "tie_word_embeddings": True})
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    adapter = load_adapter(directory)
    samples = list(conversations(tmp_path / "media", adapter, "gemma3").values())
    total, expected = expected_gradients(adapter.reference_model(7), samples)

    encoder = adapter.build_encoder(CPU, FLOAT, 7)
    firsts = [sum(cuts[:k]) for k in range(len(cuts))]
    stages = [
        adapter.build_llm_stage(first, count, CPU, FLOAT, 7)
        for first, count in zip(firsts, cuts, strict=True)
    ]
    with_media = [sample for sample in samples if sample.media]
    hidden = encoder(
        encoder_input(
            [share_of(sample.sample) for sample in with_media],
            [sample.tiles() for sample in with_media],
            FLOAT,
        )
    )
    packed = llm_input([sample.sample for sample in samples])
    for stage in stages:
        hidden = stage(packed, hidden)
    hidden.backward()
    assert hidden.item() == pytest.approx(total, rel=1e-6)
    found = {}
    for piece in (encoder, *stages):
        for name, parameter in piece.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[name] = found[name] + gradient if name in found else gradient
    holders = [stage for stage in stages if EMBEDDING in dict(stage.named_parameters())]
    assert len(holders) == min(2, len(cuts))
    check_gradients(found, expected)


def test_weights_are_read_under_the_names_of_the_hubs_files(tmp_path):
    """Those of transformers before 4.52, without a head."""
    config = {**TINY["gemma3"], "tie_word_embeddings": True}
    adapter = load_adapter(write_config(tmp_path, "gemma3", config))
    values = adapter.reference_model(3).state_dict()
    older = {"model.language_model.": "language_model.model.", "model.": ""}

    def rename(name):
        new = next(prefix for prefix in older if name.startswith(prefix))
        name = older[new] + name.removeprefix(new)
        is_new = not name.startswith("vision_tower.vision_model.")
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1) if is_new else name

    stored = {rename(name): value.clone() for name, value in values.items() if name != "lm_head.weight"}
    assert {name.split(".")[0] for name in stored} == {
        "language_model",
        "vision_tower",
        "multi_modal_projector",
    }
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    weights = Weights(tmp_path, adapter.build_whole()[0])
    pieces = [adapter.build_encoder(CPU, FLOAT, None), adapter.build_llm_stage(0, 3, CPU, FLOAT, None)]
    for piece in pieces:
        weights.fill(piece)
        for name, parameter in piece.named_parameters():
            assert torch.equal(parameter, values[name]), name
