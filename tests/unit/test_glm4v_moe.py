"""GLM-4.5V: dense first layers, sigmoid routers in groups, a shared expert, and a bias that no gradient reaches."""

import json

import pytest
import torch
from conformance import (
    CPU,
    FLOAT,
    check_gradients,
    conversations,
    expected_gradients,
    pretrained,
    write_model,
)
from safetensors.torch import load_file, save_file

from dflop._native import ProfileError
from dflop.checking.pair import first_layers
from dflop.data.collate import llm_input
from dflop.models import load_adapter
from dflop.models.export import write_model as export
from dflop.models.load import Weights
from dflop.models.parameters import kept_buffers
from dflop.models.tensor import TensorRank
from dflop.profiling.families import load_pieces
from dflop.profiling.pieces import PieceSettings

pytestmark = pytest.mark.usefixtures("quiet")
NAME, SEED = "glm4v_moe", 3
BIASES = {f"model.language_model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}


def changed(folder, **fields):
    """A folder with the tiny model, whose backbone has these fields."""
    directory = write_model(folder, NAME)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"].update(fields)
    path.write_text(json.dumps(config))
    return directory


def with_weights(folder):
    """A model directory as the hub has it: a tensor for each matrix of each expert, biases in float32."""
    directory = write_model(folder, NAME)
    pretrained(load_adapter(directory), folder / "saved", SEED)
    tensors = load_file(folder / "saved" / "model.safetensors")
    assert any(".experts.5.down_proj.weight" in name for name in tensors)
    for index, name in enumerate(sorted(BIASES)):
        tensors[name] = torch.rand(6, generator=torch.Generator().manual_seed(index)) - 0.5
    # A layer that predicts several tokens, which transformers leaves out.
    tensors["model.language_model.layers.46.embed_tokens.weight"] = torch.ones(2, 2)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, tensors


def test_weights_and_biases_are_read_and_decide_as_in_hugging_faces_model(tmp_path):
    directory, tensors = with_weights(tmp_path)
    adapter = load_adapter(directory)
    stages = [adapter.build_llm_stage(first, 1, CPU, torch.bfloat16, SEED + 1) for first in range(3)]
    weights = Weights(directory, adapter.build_whole()[0])
    for stage in stages:
        weights.fill(stage)
    found = {name: value for stage in stages for name, value in kept_buffers(stage).items()}
    # A stage has those of its layers; the first layer has none.
    assert found.keys() == BIASES
    assert kept_buffers(stages[0]) == {}
    for name, value in found.items():
        # Whatever the parameters' dtype.
        assert value.dtype == FLOAT
        assert torch.equal(value, tensors[name])
    stage = adapter.build_llm_stage(0, 3, CPU, FLOAT, SEED + 1)
    weights.fill(stage)
    sample = conversations(tmp_path / "media", adapter, NAME)["text"]
    loss = stage(llm_input([sample.sample]), torch.empty(0, adapter.feature_width))
    loss.backward()
    model = adapter.model_class.from_pretrained(directory, dtype=FLOAT).train()
    wanted, gradients = expected_gradients(model, [sample])
    assert float(loss.detach()) == pytest.approx(wanted, rel=1e-6)
    own = {name: p.grad for name, p in stage.named_parameters()}
    check_gradients(own, {name: gradients[name] for name in own})
    assert all(not value.requires_grad for value in kept_buffers(stage).values())
    # Without them the tokens go to other experts.
    for value in kept_buffers(stage).values():
        value.zero_()
    other = stage(llm_input([sample.sample]), torch.empty(0, adapter.feature_width))
    assert float(other.detach()) != pytest.approx(wanted, rel=1e-6)


def test_biases_are_exported_as_they_were(tmp_path):
    """In float32 beside weights in half precision, as transformers writes them; none may be missing."""
    directory, tensors = with_weights(tmp_path)
    adapter = load_adapter(directory)
    model = adapter.model_class.from_pretrained(directory, dtype=FLOAT)
    values = {name: p.detach() for name, p in model.named_parameters()}
    whole = adapter.build_whole()[0]
    with pytest.raises(ProfileError, match="e_score_correction_bias` is missing"):
        export(whole, values, directory, tmp_path / "out", torch.bfloat16, 1 << 30)
    held = {**values, **kept_buffers(model)}
    export(whole, held, directory, tmp_path / "out", torch.bfloat16, 1 << 30)
    adapter.model_class.from_pretrained(directory, dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        # From transformers 5.24 on the matrix of the router stays in float32, too.
        assert value.dtype == theirs[name].dtype, name
        assert value.dtype == torch.bfloat16 or ".gate." in name, name
        assert torch.equal(value, theirs[name]), name
    for name in BIASES:
        assert ours[name].dtype == FLOAT
        assert torch.equal(ours[name], tensors[name])


def test_layers_of_both_kinds_are_cut(tmp_path):
    """The first has an MLP, 96 wide; the others experts and one for all, each 32 wide."""
    adapter = load_adapter(write_model(tmp_path, NAME))
    stage = adapter.build_llm_stage(0, 3, CPU, FLOAT, SEED, tensor=TensorRank(2, 1))
    shapes = {name: tuple(p.shape) for name, p in stage.named_parameters()}
    layers = "model.language_model.layers"
    assert shapes[f"{layers}.0.mlp.down_proj.weight"] == (48, 48)
    assert shapes[f"{layers}.1.mlp.experts.gate_up_proj"] == (6, 32, 48)
    assert shapes[f"{layers}.1.mlp.experts.down_proj"] == (6, 48, 16)
    assert shapes[f"{layers}.1.mlp.shared_experts.down_proj.weight"] == (48, 16)
    assert shapes[f"{layers}.1.mlp.gate.weight"] == (6, 48)
    half = adapter.build_encoder(CPU, FLOAT, SEED, tensor=TensorRank(2, 0))
    shapes = {name: tuple(p.shape) for name, p in half.named_parameters()}
    assert shapes["model.visual.blocks.0.mlp.gate_proj.weight"] == (24, 32)


def test_layers_without_experts_are_cut_where_all_have_none(tmp_path):
    adapter = load_adapter(changed(tmp_path, first_k_dense_replace=3))
    stage = adapter.build_llm_stage(0, 3, CPU, FLOAT, SEED, tensor=TensorRank(2, 1))
    assert stage.layers_in_order()[2].mlp.gate_proj.weight.shape == (48, 48)
    assert kept_buffers(stage) == {}


def test_what_is_measured_stands_for_the_layers_with_experts(tmp_path):
    settings = PieceSettings(CPU, FLOAT)
    for folder, first, kind in (("some", 2, "Glm4vMoeTextMoE"), ("none", 3, "Glm4vMoeTextMLP")):
        found = load_pieces(changed(tmp_path / folder, first_k_dense_replace=first))
        piece = next(piece for piece in found if piece.name == "llm_layer")
        layers = piece.build(settings).layers
        assert piece.count == 3
        assert {type(layer.mlp).__name__ for layer in layers} == {kind}


@pytest.mark.parametrize(("num_layers", "has"), [(1, [True]), (2, [False, True]), (9, [False, True, True])])
def test_fewer_layers_to_check_have_both_kinds_where_they_can(tmp_path, num_layers, has):
    with first_layers(write_model(tmp_path, NAME), num_layers) as directory:
        config = load_adapter(directory).config.text_config
        assert config.num_hidden_layers == len(has)
        assert [layer >= config.first_k_dense_replace for layer in range(len(has))] == has


def test_a_file_without_a_field_that_transformers_asks_for_is_built(tmp_path):
    """As the hub's files are: the standard deviation of initial values stands in the parts alone, if anywhere."""
    directory = write_model(tmp_path, NAME)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["initializer_range"]
    path.write_text(json.dumps(config))
    assert load_adapter(directory).build_whole()[1].initializer_range == 0.1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_router_logits": True}, "`text_config.output_router_logits` is True, must be false"),
        ({"num_experts_per_tok": 7}, "`text_config.num_experts_per_tok` is 7, must be from 1 to `n_routed_"),
        ({"n_group": 4}, "`text_config.n_group` is 4, must be groups of equal size"),
        ({"n_group": 6}, "`text_config.n_group` is 6, must be groups of equal size, of 2 experts or more"),
        ({"topk_group": 4}, "`text_config.topk_group` is 4, must be from 1 to `n_group`, 3"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "`text_config.topk_group` is 1, must be from 1 to"),
        ({"head_dim": 16}, r"`text_config.rope_parameters.mrope_section` is \[1, 1, 1\], must be three"),
    ],
)
def test_what_would_not_train_is_refused_by_name(tmp_path, fields, words):
    with pytest.raises(ProfileError, match=words):
        load_adapter(changed(tmp_path, **fields))
