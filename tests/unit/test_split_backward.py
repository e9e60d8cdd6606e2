"""The backward in two gives the gradients of the backward in one."""

import pytest
import torch
from tiny_llava import Sample, pack, write_model_dir
from torch import nn

from dflop.models import load_adapter
from dflop.models.recompute import MODES, modes_of, recomputing
from dflop.models.split_backward import split_backward

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """(all layers of a tiny backbone with embedding and head, packed samples, features)."""
    adapter = load_adapter(write_model_dir(tmp_path_factory.mktemp("model")))
    module = adapter.build_llm_stage(0, adapter.num_llm_layers, CPU, torch.float32, 0)
    samples = [Sample([("image", 200, 200, 0)], 9, 1), Sample([], 30, 2)]
    _, batch = pack(samples)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(int(batch.feature_mask_T.sum()), adapter.hidden_size, generator=generator)
    return module, batch, features


def _gradients(module, batch, features, *, flush=None):
    """Loss, gradient of the features and of all parameters after one backward."""
    module.zero_grad(set_to_none=True)
    leaf = features.detach().requires_grad_()
    loss = module(batch, leaf)
    loss.backward()
    if flush is not None:
        flush()
    named = {name: p.grad.clone() for name, p in module.named_parameters()}
    return loss.detach(), leaf.grad.clone(), named


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_joint_backward(stage, mode):
    module, batch, features = stage
    loss, input_gradient, expected = _gradients(module, batch, features)
    layers = list(module.model.language_model.layers.values())
    with split_backward(module) as queue, recomputing(layers, mode):
        again, input_gradient_again, found = _gradients(module, batch, features, flush=queue.flush)
    assert len(queue) == 0
    assert torch.equal(loss, again)
    assert torch.equal(input_gradient, input_gradient_again)
    for name, gradient in expected.items():
        # The same products by another order of the factors: rounding may differ.
        scale = gradient.abs().max().clamp(min=1e-6)
        assert ((gradient - found[name]).abs().max() / scale) < 1e-5, name


def test_weights_have_no_gradient_before_the_flush(stage):
    module, batch, features = stage
    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    module.zero_grad(set_to_none=True)
    with split_backward(module) as queue:
        module(batch, features.detach().requires_grad_()).backward()
        # Embedding and linear maps wait, norms do not.
        assert len(queue) == len(linear) + 1
        assert all(m.weight.grad is None for m in linear)
        assert all(p.grad is not None for name, p in module.named_parameters() if "norm" in name)
        queue.flush()
    assert all(m.weight.grad is not None for m in linear)
    assert not any("forward" in vars(m) for m in module.modules())


def test_gradients_add_up_over_microbatches_flushed_late():
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, dtype=torch.float64)
    inputs = [torch.randn(2, 4, 5, dtype=torch.float64) for _ in range(3)]
    for x in inputs:
        layer(x).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    with split_backward(layer) as queue:
        for x in inputs:
            layer(x).square().sum().backward()
        queue.flush()
    assert all(torch.allclose(a, p.grad) for a, p in zip(expected, layer.parameters(), strict=True))


def test_frozen_and_shared_weights():
    torch.manual_seed(0)
    frozen, shared = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    frozen.requires_grad_(requires_grad=False)
    tied = nn.Linear(4, 4, bias=False)
    tied.weight = shared.weight
    model = nn.Sequential(shared, frozen, tied)
    x = torch.randn(6, 4)
    model(x).square().sum().backward()
    expected = shared.weight.grad.clone()
    shared.weight.grad = None
    with split_backward(model) as queue:
        model(x).square().sum().backward()
        assert len(queue) == 2
        queue.flush()
    assert torch.allclose(expected, shared.weight.grad)
    assert frozen.weight.grad is None


def test_recomputation_runs_each_layer_once_more(stage):
    """Also with the backward in two: to unpack twice what was kept would be to compute it twice."""
    module, batch, features = stage
    layers = list(module.model.language_model.layers.values())
    calls = []
    hooks = [layer.input_layernorm.register_forward_hook(lambda *_: calls.append(1)) for layer in layers]
    with split_backward(module) as queue, recomputing(layers, "full"):
        module(batch, features.detach().requires_grad_()).backward()
        queue.flush()
    for hook in hooks:
        hook.remove()
    assert len(calls) == 2 * len(layers)
    assert not any("forward" in vars(layer) for layer in layers)


def test_the_first_layers_of_a_stage_may_recompute_everything():
    assert modes_of("full:2", 3) == ["full", "full", "selective"]
    assert modes_of("full:7", 3) == modes_of("full", 3) == ["full"] * 3
    assert modes_of("none", 2) == ["none"] * 2


@pytest.mark.parametrize("mode", ["some", "full:0", "full:-1", "full:", "full:x", "selective:0"])
def test_an_unknown_mode_is_refused(mode):
    with (
        pytest.raises(ValueError, match=f"`{mode}` is no way to recompute, known are `none`"),
        recomputing([], mode),
    ):
        pass
