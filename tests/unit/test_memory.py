"""The byte counter: every number by hand, and what a chain of pieces needs from what each needs alone."""

import gc
import weakref

import pytest
import torch
from piece_bytes import peak_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflop.models.byte_counter import ByteCounter, Phase
from dflop.models.parameters import squared_norm
from dflop.models.split_backward import split_backward
from dflop.profiling.memory import count_split, held_bytes, saved_for_backward

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_phases_are_counted_to_the_byte():
    counter = ByteCounter(CPU)
    with counter:
        unnamed = torch.empty(100)
        counter.phase("grow")
        kept = torch.empty(500)
        torch.empty(2000)
        counter.phase("rest")
        counter.phase("shrink")
        del unnamed
    del kept
    expected = [Phase("grow", 10_400, 2_400), Phase("rest", 2_400, 2_400), Phase("shrink", 2_400, 2_000)]
    assert counter.phases == expected
    assert counter.peak_bytes == 10_400


def test_buffers_inside_an_operator_count():
    """The norm of a float32 tensor in float64 makes a float64 copy of it, on a CPU."""
    values = torch.ones(1 << 16)
    counter = ByteCounter(CPU)
    with counter:
        counter.phase("norm")
        torch.linalg.vector_norm(values, dtype=torch.float64)
    assert counter.peak_bytes >= 8 << 16


def test_an_error_in_the_block_is_the_callers():
    def broken():
        with ByteCounter(CPU) as counter:
            counter.phase("broken")
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    with ByteCounter(CPU) as counter:
        counter.phase("again")
    assert counter.phases == [Phase("again", 0, 0)]


def test_kept_and_workspace_by_hand():
    """With y = exp(x w): keeps x (given), w (parameter), y; the backward makes dy y, then both gradients."""
    buffer = torch.ones(1000)
    weight = torch.nn.Parameter(torch.ones(100))

    def forward():
        leaf = buffer[:100].detach().requires_grad_()
        return (leaf * weight).exp()

    piece = peak_bytes(forward, CPU, [weight], [buffer])
    assert piece.kept_bytes == saved_for_backward(forward, [weight], [buffer]).total_bytes == 4 * (100 + 100)
    # Forward: the product beside its exponential. Backward: gradient of the product, then of both factors.
    assert piece.workspace_bytes == 4 * (100 + 100 + 100)


def test_counting_what_is_kept_keeps_nothing():
    """An operator that keeps its own result (here the sigmoid) would hold it, and it the operator, for ever."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    found = []

    def forward():
        result = layer(torch.ones(2, 4))
        found.append(weakref.ref(result))
        return result

    assert saved_for_backward(forward, layer.parameters()).has_result
    gc.collect()
    assert found[0]() is None


def test_a_result_that_nobody_saved_is_the_next_pieces():
    leaf = torch.ones(100, requires_grad=True)
    piece = peak_bytes(lambda: leaf + 1.0, CPU, [])
    assert piece.kept_bytes == 0
    assert peak_bytes(lambda: leaf.detach() * 2.0, CPU, []).kept_bytes == 0


WIDTH, TOKENS = 64, 96


def stack_of(num_layers, is_recomputed):
    """Layers of a norm and two linear maps, each added to what came in; and what makes a forward of some."""
    torch.manual_seed(0)
    build = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.LayerNorm(WIDTH),
        torch.nn.Linear(WIDTH, 4 * WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(4 * WIDTH, WIDTH),
    )
    layers = torch.nn.ModuleList(build() for _ in range(num_layers))

    def run(leaf_TD, layers):
        for layer in layers:
            step = checkpoint(layer, leaf_TD, use_reentrant=False) if is_recomputed else layer(leaf_TD)
            leaf_TD = leaf_TD + step
        return leaf_TD

    def forward(layers):
        # A fresh leaf, held by the graph, as hidden states that have come from another rank.
        return lambda: run(torch.randn(TOKENS, WIDTH).requires_grad_(), layers)

    return layers, forward


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_what_waits_for_the_weights_by_hand(num_layers, is_recomputed):
    """Each linear map's input and the gradient of its output, and nothing else; a stack as it is added up."""
    layers, forward = stack_of(num_layers, is_recomputed)
    # Gradients are in place, as in training, and what each needs alone is counted.
    one = peak_bytes(forward(layers[:1]), CPU, layers.parameters())
    incoming = torch.ones(TOKENS, WIDTH)
    backward = lambda result: torch.autograd.backward(result, incoming)  # noqa: E731
    alone = count_split(forward(layers[:1]), backward, layers, CPU, lambda _: [incoming])
    row_bytes = 4 * TOKENS * WIDTH
    # In: WIDTH and four times that; of the gradients likewise.
    assert alone.queued_bytes == (1 + 4 + 4 + 1) * row_bytes
    # The larger weight's gradient, before it is added.
    assert alone.weight_peak_bytes == 4 * 4 * WIDTH * WIDTH
    counter = ByteCounter(CPU)
    with split_backward(layers) as queue, counter:
        counter.phase("forward")
        result_TD = forward(layers)()
        counter.phase("input")
        backward(result_TD)
        counter.phase("rest")
        del result_TD
        counter.phase("weight")
        assert held_bytes(queue.held(), layers.parameters()) == num_layers * alone.queued_bytes
        queue.flush()
    _, of_input, rest, of_weight = counter.phases
    # The incoming gradient waits as well, but was there before.
    assert rest.end_bytes == num_layers * alone.queued_bytes - row_bytes
    assert of_weight.peak_bytes == rest.end_bytes + alone.weight_peak_bytes
    assert of_weight.end_bytes == 0
    # The first layer, or the last: with its result's gradient beside what the others queued.
    first = num_layers * one.kept_bytes
    last = one.kept_bytes + (num_layers - 1) * alone.queued_bytes
    predicted = max(first, last) + alone.input_peak_bytes + row_bytes
    assert predicted * 0.9 <= of_input.peak_bytes <= predicted


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_stack_needs_what_its_layers_keep_and_one_workspace(num_layers, is_recomputed):
    """What the memory model adds up: kept by all layers, the workspace of the last."""
    layers, forward = stack_of(num_layers, is_recomputed)
    one = peak_bytes(forward(layers[:1]), CPU, layers.parameters())
    counter = ByteCounter(CPU)
    with counter:
        counter.phase("forward")
        result_TD = forward(layers)()
        counter.phase("backward")
        result_TD.backward(torch.ones_like(result_TD))
    hidden_bytes = 4 * TOKENS * WIDTH
    assert counter.phases[0].end_bytes == num_layers * one.kept_bytes + hidden_bytes
    # Result and its gradient stand beside: those are the border's.
    predicted = num_layers * one.kept_bytes + one.workspace_bytes + 2 * hidden_bytes
    assert predicted * 0.9 <= counter.peak_bytes <= predicted


def test_what_layers_share_is_counted_for_each():
    """Each of three layers keeps the angles (400 bytes, one tensor) and its own input."""

    class Turn(torch.nn.Module):
        def forward(self, x, angles):
            return x * angles

    layers = torch.nn.ModuleList(Turn() for _ in range(3))

    def forward():
        x, angles = torch.ones(100, requires_grad=True), torch.ones(100).exp().requires_grad_()
        for layer in layers:
            x = layer(x, angles)
        return x

    assert saved_for_backward(forward, [], [], list(layers)).common_bytes == 2 * 400
    assert saved_for_backward(forward, [], [], []).common_bytes == 0


def test_a_norm_copies_a_piece_at_a_time():
    """Of all at once it would copy 4 MiB."""
    values = torch.randn(1 << 19, generator=torch.Generator().manual_seed(0))
    counter = ByteCounter(CPU)
    with counter:
        counter.phase("norm")
        found = squared_norm(values)
    assert float(found) == pytest.approx(float(values.double().square().sum()), rel=1e-12)
    assert counter.peak_bytes < 1 << 20
