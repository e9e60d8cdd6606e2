"""Gemma 4 as it is published: one matrix at both ends, numbers that do not train, and the models that are refused."""

import copy
import json

import pytest
import torch
from conformance import CPU, FLOAT, check_gradients, conversations, expected_gradients
from conformance_settings import SETTINGS
from tiny_families import TINY, write_config

from dflop import ProfileError
from dflop.data.collate import encoder_input, llm_input
from dflop.data.shares import share_of
from dflop.models import load_adapter
from dflop.models.load import Weights
from dflop.models.loss import cap_logits, cross_entropy_rows
from dflop.models.parameters import kept_buffers
from dflop.profiling.families import load_pieces

pytestmark = pytest.mark.usefixtures("quiet")
FIXED = ("layer_scalar", "std_bias", "std_scale")
EMBEDDING = "model.language_model.embed_tokens.weight"


def draw_fixed(model):
    """Gives the numbers that do not train values that matter."""
    buffers = {name: one for name, one in kept_buffers(model).items() if name.endswith(FIXED)}
    for index, name in enumerate(sorted(buffers)):
        generator = torch.Generator().manual_seed(index)
        buffers[name].copy_(torch.rand(buffers[name].shape, generator=generator) + 0.5)
    return set(buffers)


@pytest.mark.parametrize(
    ("cuts", "change"),
    [
        ([3], {}),
        ([1, 2], {"use_bidirectional_attention": None, "attention_k_eq_v": False, "attention_bias": True}),
        ([1, 1, 1], {"final_logit_softcapping": None}),
    ],
)
def test_gradients_with_weights_of_a_published_form(cuts, change, tmp_path):
    """Read from files under Hugging Face's names, numbers that do not train among them."""
    config, *processors, _ = copy.deepcopy(SETTINGS["gemma4"])
    config["text_config"].update(initializer_range=0.1, **change)
    config["vision_config"]["initializer_range"] = 0.1
    directory = write_config(tmp_path / "gemma4", "gemma4", {**config, "tie_word_embeddings": True})
    for name, fields in zip(("preprocessor", "video_preprocessor"), processors, strict=True):
        (directory / f"{name}_config.json").write_text(json.dumps(fields))
    adapter = load_adapter(directory)
    samples = list(conversations(tmp_path / "media", adapter, "gemma4").values())
    model = adapter.reference_model(7)
    assert len(draw_fixed(model)) == 3 + 2
    model.save_pretrained(tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*.safetensors"):
        file.rename(directory / file.name)
    total, expected = expected_gradients(model, samples)

    weights = Weights(directory, adapter.build_whole()[0])
    firsts = [sum(cuts[:k]) for k in range(len(cuts))]
    encoder = adapter.build_encoder(CPU, FLOAT, None)
    stages = [
        adapter.build_llm_stage(first, count, CPU, FLOAT, None)
        for first, count in zip(firsts, cuts, strict=True)
    ]
    for piece in (encoder, *stages):
        weights.fill(piece)
    with_media = [sample for sample in samples if sample.media]
    shares = [share_of(sample.sample) for sample in with_media]
    hidden = encoder(encoder_input(shares, [sample.tiles() for sample in with_media], FLOAT))
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


def test_the_numbers_that_do_not_train_decide_the_loss(tmp_path):
    """Else a test with drawn ones would show nothing."""
    adapter = load_adapter(write_config(tmp_path, "gemma4"))
    model = adapter.reference_model(3)
    ids = torch.arange(1, 9)[None]
    before = model(input_ids=ids, labels=ids).loss
    draw_fixed(model)
    assert not torch.allclose(model(input_ids=ids, labels=ids).loss, before, rtol=1e-4)


def test_capped_logits_by_hand():
    """30 tanh(x / 30) of two logits, and the cross entropy of the first."""
    head = torch.nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[60.0], [15.0]]))
    cap_logits(head, 30.0)
    a, b = 30 * torch.tensor([2.0, 0.5], dtype=torch.float64).tanh()
    expected = torch.logaddexp(a, b) - b
    found = cross_entropy_rows(head, torch.ones(1, 1), torch.tensor([1]))
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_config", {"hidden_size_per_layer_input": 8}, "`text_config.hidden_size_per_layer_input` is 8, must be 0"),
        ("text_config", {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 3, "sliding_window": 5},
         "`text_config.num_kv_shared_layers` is 1, must be 0"),
        ("text_config", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
         "`text_config.top_k_experts` is 5, must be from 1 to `num_experts`, 4"),
        ("text_config", {"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 8},
         "`text_config.num_experts` is None, must be above 0, as `enable_moe_block` is true"),
        ("text_config", {"use_bidirectional_attention": "all"}, "`text_config.use_bidirectional_attention` is all"),
        ("vision_config", {"use_clipped_linears": True}, "`vision_config.use_clipped_linears` is True"),
        ("vision_config", {"num_key_value_heads": 2}, "`vision_config.num_key_value_heads` is 2, must be 4"),
        (None, {"audio_config": {}}, "`audio_config` is given, must be null"),
        (None, {"vision_config": None}, "`vision_config` is None"),
    ],
)  # fmt: skip
def test_other_models_are_refused_by_the_field_that_tells_them(part, change, message, tmp_path):
    config = copy.deepcopy(TINY["gemma4"])
    (config if part is None else config[part]).update(change)
    directory = write_config(tmp_path, "gemma4", config)
    for read in (load_adapter, load_pieces):
        with pytest.raises(ProfileError) as raised:
            read(directory)
        assert message in str(raised.value)


def test_an_older_transformers_is_refused(tmp_path, monkeypatch):
    """Its model takes videos in another form; the error says which release does not."""

    def forward(self, input_ids):
        del self, input_ids

    monkeypatch.setattr("transformers.Gemma4ForConditionalGeneration.forward", forward)
    with pytest.raises(ProfileError, match="whose Gemma 4 has layers and videos of another form") as caught:
        load_adapter(write_config(tmp_path, "gemma4"))
    assert "transformers>=5.23" in str(caught.value) + str(caught.value.__notes__)
