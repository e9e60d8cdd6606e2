"""Weights in, trained, weights out: what a run makes of a model directory is what a plain loop makes of it.

The loop is Hugging Face's model with its own `labels=` loss and PyTorch's AdamW, in one process, over the samples that
`schedules.jsonl` names, one after the other.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, python, request, run_training
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from ranks import results
from test_training import SEED, Oracle, config_with, keep_weights, layout_of, make
from transformers import LlavaOnevisionForConditionalGeneration, Trainer

from dflop.data.loader import SampleLoader
from dflop.models import load_adapter
from dflop.models.adapters import add_adapters
from dflop.models.parameters import component_of

RATE, DECAY = 1e-3, 0.1
RANK, ALPHA = 4, 6.0
TOLERANCE = 1e-5
"""Of each parameter's change, in its norm: the order of sums differs, nothing else. Never below the grain of float32."""
PARTS = {
    "full": {"encoder", "projector", "llm"},
    "projector": {"projector"},
    "frozen-encoder": {"projector", "llm"},
    "frozen-llm": {"encoder", "projector"},
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo whose model directory has weights, in shards; not those that its seed would draw."""
    demo = make(tmp_path_factory.mktemp("demo"), 20)
    model = load_adapter(demo / "model").reference_model(77)
    model.save_pretrained(demo / "pretrained", max_shard_size="200KB")
    for path in (demo / "pretrained").glob("*.safetensors*"):
        path.rename(demo / "model" / path.name)
    assert len(list((demo / "model").glob("*.safetensors"))) > 2
    return demo


class PlainLoop(Oracle):
    """Hugging Face's model from the model directory, of which the parts of a recipe train."""

    def __init__(self, demo, recipe):
        self.start(demo)
        self.train_only(lambda name: component_of(name) in PARTS[recipe])

    def start(self, demo):
        """Reads data and weights."""
        self.adapter = load_adapter(demo / "model")
        self.dataset = self.dataset_of(demo)
        self.loader = SampleLoader(self.dataset, self.adapter)
        self.losses = {}
        self.model = LlavaOnevisionForConditionalGeneration.from_pretrained(
            demo / "model", dtype=torch.float32
        ).train()

    def train_only(self, is_trained):
        """Freezes the rest, and makes the optimizer."""
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(is_trained(name))
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        # As Hugging Face's trainer has it: norms and biases do not decay.
        decays = set(Trainer.get_decay_parameter_names(SimpleNamespace(), self.model))
        groups = [
            {"params": [p], "weight_decay": DECAY * (name in decays)} for name, p in self.trained.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE)
        self.noise = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in self.trained.items()}

    def gradients(self):
        """By name, of what trains; a copy."""
        return {name: p.grad.clone() for name, p in self.trained.items()}

    def step(self, batch):
        """Trains one global batch; its loss."""
        loss = self.backward(batch)
        gradients = self.gradients()
        for name, g in gradients.items():
            # AdamW makes a step of the learning rate of what is nothing but rounding: a key's bias, which a softmax does
            # not see, and numbers far below the others of their tensor.
            self.noise[name] |= (g != 0) & (g.abs() < 1e-5 * g.abs().max()) | name.endswith("k_proj.bias")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss


class LoraLoop(PlainLoop):
    """With peft's adapters on the whole model."""

    def __init__(self, demo, recipe):
        assert recipe == "lora"
        self.start(demo)
        add_adapters(self.model, RANK, ALPHA, SEED)
        self.train_only(lambda name: ".lora_" in name or "multi_modal_projector" in name)


def export(directory, out, *flags):
    """The command, on the last checkpoint of the run: there is one at its end."""
    python(["-m", "dflop", "export", "run", "--out", out, *flags], directory)


def merged_by_peft(model):
    """The weights of a model with its adapters merged by peft, by the names without."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.merge()
    state = {name.replace(".base_layer", ""): p.detach() for name, p in model.named_parameters()}
    return {name: value for name, value in state.items() if ".lora_" not in name}


@pytest.mark.more
def test_lora_is_that_of_peft_merged_and_alone(demo, tmp_path):
    """Three steps on two stages, beside a plain loop of peft; both exports give the model of that loop."""
    settings = {"learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": None}
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA}
    asked = request(
        demo,
        tmp_path / "run",
        **layout_of(demo, tmp_path, (1, 1, 2)),
        config=config_with(demo, init="pretrained", recipe="lora", **lora, **settings),
    )
    assert set(results(run_training(asked, tmp_path, keep_weights(tmp_path)))) == {0}
    parameters = {}
    for rank in range(asked["num_ranks"]):
        parameters |= torch.load(tmp_path / f"weights {rank}")
    loop = LoraLoop(demo, "lora")
    assert set(loop.before) == set(parameters)
    for turn in lines(tmp_path / "run/schedules.jsonl"):
        loop.step(turn["samples"])
    for name, found in parameters.items():
        wanted, before = loop.model.get_parameter(name).detach(), loop.before[name]
        if name in loop.trained:
            error = (found - wanted)[~loop.noise[name]].norm()
            assert float(error) <= TOLERANCE * float((wanted - before).norm()), name
        else:
            assert torch.equal(found, before), name
    export(tmp_path, "adapter", "--adapter")
    export(tmp_path, "out")
    base = LlavaOnevisionForConditionalGeneration.from_pretrained(demo / "model", dtype=torch.float32)
    alone = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    together = LlavaOnevisionForConditionalGeneration.from_pretrained(tmp_path / "out")
    expected = merged_by_peft(loop.model)
    for model in (alone, together):
        found = dict(model.named_parameters())
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name].detach(), value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("full", (2, 1, 2)),
        ("projector", (1, 1, 1)),
        # Of other families `test_family_exports.py` has them.
        *(
            pytest.param(recipe, (1, 1, 1), marks=pytest.mark.layouts)
            for recipe in ("frozen-encoder", "frozen-llm")
        ),
    ],
    ids=str,
)
def test_an_export_of_three_steps_is_that_of_a_plain_loop(recipe, layout, demo, tmp_path):
    settings = {"learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": None}
    asked = request(
        demo,
        tmp_path / "run",
        **layout_of(demo, tmp_path, layout),
        config=config_with(demo, init="pretrained", recipe=recipe, **settings),
    )
    assert set(results(run_training(asked, tmp_path))) == {0}
    loop = PlainLoop(demo, recipe)
    export(tmp_path, "out")
    exported = LlavaOnevisionForConditionalGeneration.from_pretrained(tmp_path / "out")
    metrics, turns = (lines(tmp_path / f"run/{name}.jsonl") for name in ("metrics", "schedules"))
    assert len(turns) == 3
    for turn, m in zip(turns, metrics, strict=True):
        assert m["init"] == "pretrained"
        assert loop.step(turn["samples"]) == pytest.approx(m["loss"], rel=1e-5)
    num_told = 0
    for name, found in exported.named_parameters():
        before, wanted = loop.before[name], loop.model.get_parameter(name).detach()
        if name not in loop.trained:
            assert torch.equal(found, before), f"{name} is frozen"
        else:
            is_told = ~loop.noise[name]
            num_told += int(is_told.sum())
            way = float((wanted - before)[is_told].norm())
            error = float((found.detach() - wanted)[is_told].norm())
            # A float32 near 1 has no finer grain than this.
            grain = torch.finfo(torch.float32).eps * float(wanted[is_told].norm())
            assert error <= max(TOLERANCE * way, grain), name
    num_trained = sum(p.numel() for p in loop.trained.values())
    assert num_told > 0.98 * num_trained
