"""Layers that `torch.compile` has compiled compute what they computed before, and are not compiled for each shape."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch._dynamo
from conformance import check_gradients, conversations, write_model
from test_conformance import run
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dflop
from dflop.models import compiled, load_adapter
from dflop.models.compiled import WARNED_FROM, compile_layers, recompilations
from dflop.models.packing import PACKED, packed_attention
from dflop.models.recompute import FULL, MODES, recomputing
from dflop.models.split_backward import split_backward
from dflop.parallel.shard import layers_of

WIDTH = 8


class Layer(nn.Module):
    """A decoder layer in small: attention over packed samples between two linear maps, and what is added to it."""

    factor = "1"
    """Text, since a number would be a symbol in what is compiled."""

    def __init__(self):
        super().__init__()
        self.norm, self.into, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, states, **kwargs):
        heads = self.into(self.norm(states)).view(1, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended, _ = ALL_ATTENTION_FUNCTIONS[PACKED](self, *heads, None, **kwargs)
        return states + float(self.factor) * self.out(attended.reshape(1, -1, WIDTH))


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before, and nothing left of it."""
    counters.clear()
    yield
    torch._dynamo.reset()
    compiled._again.clear()
    compiled._begun.clear()
    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)


@pytest.fixture
def stacks():
    """(three layers, the same compiled)."""
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer(), Layer())
    fast = copy.deepcopy(plain)
    compile_layers(fast, list(fast), "aot_eager")
    return plain, fast


def gradients(layers, sizes, mode="none"):
    """Gradients of a pack of samples of these sizes, by parameter; `states` is that of the input."""
    layers.zero_grad()
    states = torch.randn(1, sum(sizes), WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    bounds = torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32)
    found = states
    with recomputing(list(layers), mode):
        for layer in layers:
            found = layer(found, cu_seq_lens_q=bounds, segment_tokens=sizes)
    found.square().sum().backward()
    return {"states": states.grad, **{name: p.grad for name, p in layers.named_parameters()}}


@pytest.mark.more
def test_layers_and_shapes_share_what_is_compiled(stacks):
    """One layer is compiled, for all layers, numbers of samples and sizes, and ways that layers recompute."""
    plain, fast = stacks
    # Not 8 tokens in all: a size that equals a width, when a layer is first compiled, is taken for it.
    for sizes, mode in [([5, 4], "none"), ([7], FULL)]:
        check_gradients(gradients(fast, sizes, mode), gradients(plain, sizes))
    # Two parts of a layer, each for states that are somebody's result and for states that are nobody's.
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_graphs <= 6
    packs = [([6, 6], "none"), ([4, 2, 9], FULL), ([13], "full:1"), ([2, 3, 4, 5], "none")]
    for sizes, mode in packs:
        check_gradients(gradients(fast, sizes, mode), gradients(plain, sizes))
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert list(dict(fast.named_parameters())) == list(dict(plain.named_parameters()))


def test_what_needs_single_operators_is_not_compiled(stacks, caplog):
    """Selective recomputation keeps results of operators, and a split backward replaces linear maps."""
    plain, fast = stacks
    compiled._tell_of_halves.cache_clear()
    check_gradients(gradients(fast, [5, 3], "selective"), gradients(plain, [5, 3]))
    with split_backward(fast) as queue:
        found = gradients(fast, [5, 3])
        assert len(queue) == 6
        queue.flush()
    found = {name: fast.get_parameter(name).grad if name != "states" else one for name, one in found.items()}
    check_gradients(found, gradients(plain, [5, 3]))
    assert counters["stats"]["unique_graphs"] == 0
    assert caplog.text.count("backward runs in two parts run their layers uncompiled") == 1


@pytest.mark.more
def test_frequent_recompilation_is_said_with_its_reason(caplog):
    layers = nn.Sequential(Layer())
    compile_layers(layers, list(layers), "eager")
    with caplog.at_level(logging.WARNING, "dflop"):
        for turn in range(WARNED_FROM + 1):
            layers[0].factor = str(turn)
            layers[0](torch.ones(1, 3, WIDTH), cu_seq_lens_q=torch.tensor([0, 3]), segment_tokens=[3])
    assert recompilations() == {"Layer": WARNED_FROM}
    assert f"`Layer` were compiled again {WARNED_FROM} times, last since" in caplog.text
    assert "factor" in caplog.text


def test_a_layer_that_cannot_be_compiled_is_named(stacks):
    def broken(*_):
        message = "No working C++ compiler found"
        raise OSError(message)

    plain, _ = stacks
    compile_layers(plain, [plain[1]], broken)
    with pytest.raises(
        dflop.ProfileError, match=r"layer `1` cannot be compiled: OSError: No working C\+\+"
    ) as error:
        gradients(plain, [4])
    assert error.value.__notes__ == [
        "install a C++ compiler (`g++`), which `torch.compile` needs; `train.compile: none` trains without compiling"
    ]


FAMILIES = ["llava_onevision", "qwen2_vl", "gemma3", "qwen3_vl_moe", "qwen3_5", "qwen2_5_omni"]


@pytest.mark.some(0, 1)
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_layers_of_a_family_have_its_gradients(name, tmp_path):
    """Packs of other samples are compiled no more after the first ones, in any way to recompute."""
    adapter = load_adapter(write_model(tmp_path, name))
    samples = list(conversations(tmp_path / "media", adapter, name).values())
    cuts = [adapter.num_llm_layers]
    _, expected = run(adapter, samples, cuts)

    def prepare(pieces):
        for piece in pieces:
            compile_layers(piece, layers_of(piece), "aot_eager")

    for count in range(1, len(samples)):
        run(adapter, samples[:count], cuts, prepare=prepare)
    num_graphs = counters["stats"]["unique_graphs"]
    for mode in MODES:
        _, found = run(adapter, samples, cuts, prepare=prepare, mode=mode)
        check_gradients(found, expected)
    assert counters["stats"]["unique_graphs"] == num_graphs
    assert max(recompilations().values(), default=0) < WARNED_FROM


@pytest.mark.more
def test_generated_code_has_the_gradients_of_pytorchs_operators(stacks):
    """`inductor`, which training uses: it writes C++ and compiles it."""
    plain, _ = stacks
    fast = copy.deepcopy(plain)
    compile_layers(fast, list(fast))
    for sizes in ([5, 3], [7], [4, 2, 9]):
        check_gradients(gradients(fast, sizes, FULL), gradients(plain, sizes))
        check_gradients(gradients(fast, sizes), gradients(plain, sizes))
