"""What samples cost by times of the model: a clock that each module sets forward by a known amount."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from tiny_families import TINY
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

import dflop
from dflop.integrations import measure_cost, measured_cost

SHAPES = [(0, 40), (900, 800), (9600, 6500), (0, 6500), (64, 80), (1200, 700), (4800, 3000), (0, 15)]


class Clock:
    """Nanoseconds that pass where a module says so."""

    def __init__(self):
        self.now = 0

    def perf_counter_ns(self):
        return self.now


class Passes(torch.autograd.Function):
    """Hands a tensor on, while the clock moves in forward and in backward."""

    @staticmethod
    def forward(ctx, x, clock, forward_ns, backward_ns):
        ctx.clock, ctx.backward_ns = clock, backward_ns
        clock.now += forward_ns
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.backward_ns
        return gradient, None, None, None


class Backbone(nn.Module):
    """40 ns a token and 1 ns for ten pairs, after 5,000 ns."""

    def __init__(self, clock):
        super().__init__()
        self.config = SimpleNamespace()
        self.clock, self.layers = clock, nn.ModuleList([nn.Linear(1, 1)])

    def forward(self, inputs_embeds):
        n = inputs_embeds.shape[1]
        ns = 5_000 + 40 * n + n * n // 10
        return self.layers[0](Passes.apply(inputs_embeds, self.clock, ns, 2 * ns))


class Model(nn.Module):
    """An encoder of 70 ns a token after 9,000 ns, three times that with its backward; a backbone; a head."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.encoder, self.backbone = clock, nn.Linear(1, 1), Backbone(clock)
        self.embedding, self.dropout = nn.Parameter(torch.ones(1, 1, 1)), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def get_decoder(self):
        return self.backbone

    def forward(self, encoder_tokens, input_ids):
        assert self.training
        self.count += 1
        x = self.dropout(self.embedding.expand(1, input_ids.shape[1], 1))
        if encoder_tokens:
            ns = 9_000 + 70 * encoder_tokens
            # In this order the backward leaves the encoder last.
            x = Passes.apply(self.encoder(x), self.clock, ns, 2 * ns)
        hidden = Passes.apply(self.backbone(inputs_embeds=x), self.clock, 30 * x.shape[1], 60 * x.shape[1])
        return SimpleNamespace(loss=hidden.sum())


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measured_cost, "time", clock)
    return clock


def batches(shapes, seen=None):
    def batch_of(position):
        if seen is not None:
            seen.append(position)
        encoder, llm = shapes[position]
        return {"encoder_tokens": encoder, "input_ids": torch.zeros(1, llm, dtype=torch.long)}

    return batch_of


def test_times_are_split_between_encoder_and_llm_and_fitted(clock):
    cost = measure_cost(Model(clock), batches(SHAPES), SHAPES)
    assert cost.encoder.token_ns == pytest.approx(210)
    assert cost.encoder.start_ns == pytest.approx(27_000)
    assert cost.encoder.pair_ns == pytest.approx(0, abs=1e-4)
    # The head is the LLM's.
    assert cost.llm.token_ns == pytest.approx(210, rel=1e-3)
    assert cost.llm.pair_ns == pytest.approx(0.3, rel=1e-3)
    assert cost.llm.start_ns == pytest.approx(15_000, rel=1e-3)
    assert cost.llm.error < 1e-3
    assert cost.encoder.error < 1e-3
    assert (cost.encoder.tokens_max, cost.llm.tokens_max, cost.num_samples) == (9600, 6500, len(SHAPES))
    assert "LLM 0.21 us a token, 2.16 us in a sample of 6,500 (predicted from the others: 0% off)" in str(
        cost
    )
    costs = dflop.costs(SHAPES, cost=cost)
    assert costs.encoder_ns[0] == 0
    assert costs.llm_ns[2] / costs.encoder_ns[2] == pytest.approx(
        (210 + 0.3 * 6500) * 6500 / (210 * 9600), rel=1e-3
    )


def test_a_frozen_encoder_has_no_backward(clock):
    model = Model(clock)
    model.encoder.requires_grad_(False)
    model.embedding.requires_grad_(False)
    cost = measure_cost(model, batches(SHAPES), SHAPES)
    assert cost.encoder.token_ns == pytest.approx(70)
    assert cost.encoder.start_ns == pytest.approx(9_000)
    # Nothing before the backbone needs a gradient: its own input has none either.
    assert cost.llm.pair_ns == pytest.approx(0.1, rel=1e-3)


def test_the_largest_and_the_smallest_are_among_those_that_run(clock):
    draw = random.Random(0)
    shapes = [(draw.choice([0, draw.randrange(1, 5000)]), draw.randrange(10, 9000)) for _ in range(300)]
    seen = []
    cost = measure_cost(Model(clock), batches(shapes, seen), shapes, num_samples=12, repeats=1)
    assert len(seen) == len(set(seen)) == cost.num_samples == 12
    chosen = [shapes[position] for position in seen]
    for component in (0, 1):
        sizes = [shape[component] for shape in shapes if shape[component]]
        found = sorted(shape[component] for shape in chosen if shape[component])
        assert (found[0], found[-1]) == (min(sizes), max(sizes))
        assert found[len(found) // 2] > max(sizes) / 5, "not from one end alone"
    few = measure_cost(Model(clock), batches(shapes), shapes, num_samples=4, repeats=1)
    assert (few.num_samples, few.llm.tokens_max) == (4, cost.llm.tokens_max)
    assert seen[0] == max(range(300), key=lambda index: shapes[index][1]), "the largest first"


def test_the_model_is_afterwards_what_it_was(clock):
    model = Model(clock).eval()
    model.backbone.train()
    torch.manual_seed(7)
    before, state = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    measure_cost(model, batches(SHAPES), SHAPES, repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [model.training, model.backbone.training, model.dropout.training] == [False, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not model.backbone._forward_pre_hooks


def test_one_size_of_a_component_gives_a_cost_a_token(clock):
    shapes = [(50, n) for n in (20, 30, 45, 60)]
    cost = measure_cost(Model(clock), batches(shapes), shapes)
    assert cost.encoder.token_ns == pytest.approx(3 * (9_000 + 70 * 50) / 50)
    assert cost.encoder.error != cost.encoder.error
    text = [(0, n) for n in (20, 30, 45, 60)]
    cost = measure_cost(Model(clock), batches(text), text)
    assert cost((0, 30))[0] == 0
    assert cost.llm.token_ns > 0


def test_more_tokens_than_were_measured_are_said(clock):
    cost = measure_cost(Model(clock), batches(SHAPES), SHAPES)
    with pytest.warns(
        UserWarning, match="more LLM tokens than 6500, the most that was measured: extrapolated"
    ):
        dflop.costs([(10, 7000)], cost=cost)


def test_samples_of_another_order_are_said(clock):
    shapes = SHAPES[::-1]
    with pytest.warns(
        UserWarning, match="8 of 8 measured samples are not as long as `shapes` says: sample 5 has"
    ):
        measure_cost(Model(clock), batches(SHAPES), shapes, repeats=1)


def test_what_cannot_be_measured_is_refused(clock):
    with pytest.raises(ValueError, match="`Linear` has no LLM backbone with layers that `get_decoder` finds"):
        measure_cost(nn.Linear(1, 1), batches(SHAPES), SHAPES)
    with pytest.raises(ValueError, match="there are no samples to measure"):
        measure_cost(Model(clock), batches([]), [])
    with pytest.raises(ValueError, match="`num_samples` is 3, must be at least 4"):
        measure_cost(Model(clock), batches(SHAPES), SHAPES, num_samples=3)
    with pytest.raises(ValueError, match="`embedding` is on the `meta` device"):
        measure_cost(Model(clock).to("meta"), batches(SHAPES), SHAPES)
    model = Model(clock)
    model.encoder.weight.grad = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="`encoder.weight` has a gradient: measure before training"):
        measure_cost(model, batches(SHAPES), SHAPES)
    frozen = Model(clock).requires_grad_(False)
    with pytest.raises(ValueError, match="the loss has no gradient"):
        measure_cost(frozen, batches(SHAPES), SHAPES)
    with pytest.raises(ValueError, match="the LLM backbone was not run"):
        measure_cost(Model(clock), batches(SHAPES), SHAPES, loss=lambda model, _: model.embedding.sum())
    with pytest.raises(ValueError, match="the model gave no loss"):
        measure_cost(Silent(clock), batches(SHAPES), SHAPES)


class Silent(Model):
    """Has no loss."""

    def forward(self, **_):
        return SimpleNamespace(loss=None)


def test_a_model_left_on_the_cpu_is_told(clock, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.warns(
        UserWarning, match="on the CPU, and this machine has an accelerator: costs hold for the CPU alone"
    ):
        measure_cost(Model(clock), batches(SHAPES), SHAPES, repeats=1)


def test_a_sample_that_does_not_fit_is_named(clock):
    def loss(model, batch):
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(
        torch.OutOfMemoryError, match="sample 2 with 9600 encoder tokens and 6500 LLM tokens: no m"
    ):
        measure_cost(Model(clock), batches(SHAPES), SHAPES, loss=loss)


def test_a_model_of_hugging_face():
    """Times differ from run to run; that both components are timed, and all is cleared, does not."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**TINY["llava"], model_type="llava", image_token_id=5)
    model = AutoModelForImageTextToText.from_config(config)
    vision, image = config.vision_config, config.image_token_id
    tokens = (vision.image_size // vision.patch_size) ** 2
    shapes = [(k * (tokens + 1), k * tokens + length) for k, length in enumerate((9, 30, 4, 17))]

    def batch_of(position):
        count = position
        ids = torch.tensor([[image] * (tokens * count) + [1] * (shapes[position][1] - tokens * count)])
        batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        if count:
            batch["pixel_values"] = torch.randn(count, 3, vision.image_size, vision.image_size)
        return batch

    cost = measure_cost(model, batch_of, shapes, repeats=1)
    assert cost.llm.token_ns + cost.llm.pair_ns > 0
    assert cost.encoder.token_ns + cost.encoder.pair_ns > 0
    assert all(parameter.grad is None for parameter in model.parameters())
