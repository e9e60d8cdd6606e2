"""A stage runs the backward whole or in two halves, with several microbatches in flight."""

from __future__ import annotations

import pytest
import torch
from tiny_llava import Sample, pack, write_model_dir

from dflop.models import load_adapter
from dflop.models.recompute import MODES, recomputing
from dflop.runtime.stage import Stage

CPU = torch.device("cpu")
SAMPLES = [
    [Sample([("image", 200, 200, 0)], 9, 1)],
    [Sample([], 30, 2)],
    [Sample([("video", 126, 126, 2)], 7, 3), Sample([], 5, 4)],
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """(a whole tiny backbone, packed microbatches, their features)."""
    torch.set_num_threads(1)
    adapter = load_adapter(write_model_dir(tmp_path_factory.mktemp("model")))
    module = adapter.build_llm_stage(0, adapter.num_llm_layers, CPU, torch.float32, 0)
    generator = torch.Generator().manual_seed(0)
    batches = [pack(samples)[1] for samples in SAMPLES]
    rows = [int(batch.feature_mask_T.sum()) for batch in batches]
    features = [torch.randn(n, adapter.hidden_size, generator=generator) for n in rows]
    return module, batches, features


def run(parts, actions, split=(), keep=None):
    """The gradient of each microbatch's features, and of all parameters, after `actions`."""
    module, batches, features = parts
    module.zero_grad(set_to_none=True)
    stage = Stage(module, True, CPU)
    stage.begin()
    gradients = {}
    for action in actions.split():
        letter, j = action[0], int(action[1:])
        if letter == "F":
            stage.forward(j, batches[j], features[j].clone(), 10, j in split)
        elif letter == "W":
            stage.weights(j)
        else:
            gradients[j] = stage.backward(j, None)
            if keep is not None:
                keep.append({name for name, p in module.named_parameters() if p.grad is not None})
    stage.begin()
    return gradients, {name: p.grad.clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("mode", [*MODES, "full:1"])
def test_gradients_of_split_microbatches_are_those_of_whole_ones(parts, mode):
    """Two split, one not, W late and out of order; also where layers compute their forward again."""
    features, expected = run(parts, "F0 B0 F1 B1 F2 B2")
    layers = list(parts[0].model.language_model.layers.values())
    with recomputing(layers, mode):
        found_features, found = run(parts, "F0 F1 I1 F2 I2 B0 W2 W1", split={1, 2})
    for j, gradient in features.items():
        assert torch.equal(gradient, found_features[j])
    for name, gradient in expected.items():
        scale = gradient.abs().max().clamp(min=1e-6)
        assert ((gradient - found[name]).abs().max() / scale) < 1e-5, name


def test_a_whole_backward_is_pytorchs_own(parts):
    """Beside split ones nothing of it waits, and nothing of the split is left in the module."""
    seen = []
    run(parts, "F0 F1 I1 B0 W1", split={1}, keep=seen)
    after_split, after_whole = seen
    assert "lm_head.weight" not in after_split
    assert {name for name in after_whole if "norm" not in name} >= {"lm_head.weight"}
    assert not any("forward" in vars(layer) for layer in parts[0].modules())


def test_a_step_that_leaves_weights_waiting_is_a_mistake(parts):
    with pytest.raises(AssertionError, match="every I had its W"):
        run(parts, "F0 I0", split={0})
