"""What a run learns is what one process learns: Hugging Face's model, its own loss, PyTorch's AdamW.

The ranks train by the schedules of our scheduler on demo data; the oracle takes the same global batches sample after
sample, unpacked.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_llava
import torch
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, request, run_training, write_demo
from ranks import results
from shards import whole_of
from toy_run import write_colocated, write_plan
from transformers import Trainer

from dflop._native import Dataset
from dflop._native.testing import load_config
from dflop.data.dataset import sample_from_encoded
from dflop.data.loader import SampleLoader
from dflop.models import load_adapter
from dflop.runtime import gradients, sharded, trainer

BATCH, MICROBATCHES, SEED = 8, 4, 3
SCHEDULES = ("blind", "tokens", "balanced", "ordered", "shaped", "aware")
ARMS = [f"{arm}{ahead}" for arm in SCHEDULES for ahead in ("", "-ahead")]
TOLERANCE = 1e-5
"""Relative error of a parameter's gradient norm in float32: the order of sums differs, nothing else."""


def make(directory, num_samples, spoil=None, **data):
    """A demo of so many samples."""
    return write_demo(directory, num_samples, BATCH, MICROBATCHES, spoil, **data)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """20 samples: an epoch of global batches of 8, 8 and 4."""
    return make(tmp_path_factory.mktemp("demo"), 20)


def is_noise(gradient, all_gradients):
    """Whether a gradient is nothing but rounding, as those of key biases are.

    A softmax does not see what all its scores share.
    """
    return float(gradient.norm()) < 1e-5 * float(torch.stack([g.norm() for g in all_gradients]).norm())


class Oracle:
    """Hugging Face's model in one process, on the samples of a data profile."""

    def __init__(self, demo, directory):
        self.adapter = load_adapter(demo / "model")
        self.dataset = self.dataset_of(demo)
        self.loader = SampleLoader(self.dataset, self.adapter)
        self.model = tiny_llava.pretrained(demo / "model", directory, SEED)
        self.losses = {}
        """Of each sample, summed over its label tokens."""
        # What no sample reaches has a gradient of zeros, as in a run: AdamW decays it.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    @staticmethod
    def dataset_of(demo):
        """The samples of its data profile."""
        return Dataset(str(demo / "dflop.yaml"), str(demo / "data_profile.parquet"))

    def backward(self, batch):
        """The loss of a global batch, over its label tokens; its gradients are added to those there are."""
        total = sum(self.dataset.shape(index)[2] for index in batch)
        loss = 0.0
        for index in batch:
            encoded = self.dataset.encode(index)
            sample = sample_from_encoded(index, encoded, self.adapter)
            tiles = [self.adapter.pixels(Path(m.path), m.kind, m.frame_indices) for m in encoded.media]
            own = SimpleNamespace(
                ids=encoded.input_ids,
                labels=encoded.labels,
                targets=sample.targets_T.tolist(),
                grids=sample.media,
                pixels=torch.cat(tiles) if tiles else None,
            )
            part = tiny_llava.labels_loss(self.model, own) / total
            self.losses[index] = float(part.detach()) * total
            if part.requires_grad:
                part.backward()
            loss += float(part.detach())
        return loss

    def gradients(self):
        """By name; a copy."""
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}


def config_with(demo, **train):
    """The configuration with other fields of `train`."""
    config = load_config(str(demo / "dflop.yaml"))
    config["train"] |= {"seed": SEED, **train}
    return config


def keep_gradients(directory):
    """Has each rank write what it has after the sum over replicas, a file a step."""

    def keep_of(kind, index):
        reduce, count = kind.reduce, iter(range(1000))

        def keeping(self):
            reduce(self)
            found = whole_of({name: p.grad for name, p in self.parameters.items()})
            torch.save(found, directory / f"gradients {next(count)} {index}")

        kind.reduce = keeping

    def before(index):
        for kind in (gradients.Gradients, sharded.ShardedGradients):
            keep_of(kind, index)

    return before


def keep_weights(directory):
    """Has each rank write its parameters at the end, whole ones."""

    def before(index):
        run = trainer.Trainer.run

        def keeping(self):
            is_done = run(self)
            # The frozen ones too.
            torch.save(whole_of(self._gradients.held), directory / f"weights {index}")
            return is_done

        trainer.Trainer.run = keeping

    return before


def layout_of(demo, tmp_path, layout):
    """A plan of (encoder dp, LLM dp, LLM pp), and the changes of a request that trains as it says.

    Of a colocated layout: (replicas, zero). A dictionary at the end has what else the plan says.
    """
    path = tmp_path / "plan.json"
    *sizes, last = layout
    sizes, more = (sizes, last) if isinstance(last, dict) else (layout, {})
    if len(sizes) == 2:
        dp, zero = sizes
        plan = write_colocated(path, dp, MICROBATCHES, zero=zero, global_batch_size=BATCH, **more)
    else:
        plan = write_plan(path, *sizes, MICROBATCHES, global_batch_size=BATCH, **more)
    return {"num_ranks": plan.num_ranks, "plan": str(path)}


def check_groups(loss_by, oracle, batch):
    """The loss by kind and by source is that of the oracle's samples, whatever microbatch they were in."""
    names = {"kind": oracle.dataset.kind, "source": oracle.dataset.source}
    for by, name_of in names.items():
        groups = loss_by[by]
        assert sorted(groups) == sorted({name_of(index) for index in batch})
        for name, found in groups.items():
            own = [index for index in batch if name_of(index) == name]
            label_tokens = sum(oracle.dataset.shape(index)[2] for index in own)
            assert (found["samples"], found["label_tokens"]) == (len(own), label_tokens)
            expected = sum(oracle.losses[index] for index in own) / label_tokens
            assert found["loss"] == pytest.approx(expected, rel=1e-5), name


# One replica of one stage, and replicas that cut nothing, are parts of the others.
COVERED = [pytest.param(layout, marks=pytest.mark.layouts) for layout in ((1, 1, 1), (2, 0))]


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", [*COVERED, (2, 2, 2), (3, 2), (2, 3)], ids=str)
def test_every_arm_of_the_scheduler_has_the_gradient_of_one_process(layout, demo, tmp_path):
    """One global batch by each way to schedule; without a learning rate the weights stay what they are.

    On colocated ranks nothing runs ahead, so one arm is asked for that says so.
    """
    arms = ARMS if len(layout) == 3 else [*SCHEDULES, f"{SCHEDULES[-1]}-ahead"]
    asked = request(
        demo,
        tmp_path / "run",
        **layout_of(demo, tmp_path, layout),
        config=config_with(demo, learning_rate=0.0, weight_decay=0.0, max_grad_norm=None),
        compare=True,
        arms=arms,
        steps=1,
    )
    assert set(results(run_training(asked, tmp_path, keep_gradients(tmp_path)))) == {0}
    metrics, turns = (lines(tmp_path / f"run/{name}.jsonl") for name in ("metrics", "schedules"))
    assert sorted(m["arm"] for m in metrics) == sorted(arms)
    placed = {turn["arm"]: turn["schedule"]["llm"] for turn in turns}
    assert placed["blind"] != placed["balanced"] != placed["tokens"]
    oracle = Oracle(demo, tmp_path / "pretrained")
    loss = oracle.backward(turns[0]["samples"])
    expected = oracle.gradients()
    for turn, m in enumerate(metrics):
        assert m["loss"] == pytest.approx(loss, rel=1e-6), m["arm"]
        check_groups(m["loss_by"], oracle, turns[0]["samples"])
        seen = set()
        for rank in range(asked["num_ranks"]):
            for name, gradient in torch.load(tmp_path / f"gradients {turn} {rank}").items():
                seen.add(name)
                if is_noise(expected[name], expected.values()):
                    assert is_noise(gradient, expected.values()), f"{name}, {m['arm']}"
                    continue
                error = float((gradient - expected[name]).norm() / expected[name].norm())
                assert error <= TOLERANCE, f"{name} on rank {rank}, {m['arm']}"
        assert seen == set(expected)


def spoil_one_of_each(directory):
    """A picture and a video that cannot be read any more, and are found so by the profile."""
    media = directory / "data/media"
    for ending in ("jpg", "gif"):
        path = min(media.glob(f"*.{ending}"))
        path.write_bytes(path.read_bytes()[:8])


def check_epoch(policy, oracle, turns, num_samples):
    """Each sample once in the first epoch; a bad one never under `skip`, a neighbour in its place under `substitute`."""
    batches = [turn["samples"] for turn in turns]
    placed = [s for turn in turns for row in turn["schedule"]["llm"] for replica in row for s in replica]
    assert sorted(placed) == sorted(s for batch in batches for s in batch)
    assert sorted(placed) == list(range(len(oracle.dataset)))
    times = Counter(Counter(oracle.dataset.encode(index).id for index in placed).values())
    expected = {
        "fail": {1: num_samples},
        "skip": {1: num_samples - 2},
        "substitute": {1: num_samples - 4, 2: 2},
    }
    assert times == expected[policy]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("policy", "layout"),
    [
        ("fail", (2, 2, 2)),
        ("skip", (1, 1, 1)),
        ("substitute", (1, 2, 1)),
        # A loop over ranks that hold both components is in the next; their states cut, in `test_layouts.py`.
        pytest.param("fail", (2, 1), marks=pytest.mark.layouts),
        ("fail", (3, 3)),
    ],
    ids=str,
)
def test_an_epoch_ends_in_the_weights_of_adamw_in_one_process(policy, layout, demo, tmp_path):
    """Three steps, the last global batch smaller; clipped and decayed. Bad samples are left out or stood in for."""
    num_samples = 20
    if policy != "fail":
        demo = make(tmp_path / "demo", num_samples, spoil_one_of_each, on_bad_sample=policy)
    settings = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    asked = request(
        demo, tmp_path / "run", **layout_of(demo, tmp_path, layout), config=config_with(demo, **settings)
    )
    assert set(results(run_training(asked, tmp_path, keep_weights(tmp_path)))) == {0}
    metrics, turns = (lines(tmp_path / f"run/{name}.jsonl") for name in ("metrics", "schedules"))
    oracle = Oracle(demo, tmp_path / "pretrained")
    check_epoch(policy, oracle, turns, num_samples)
    assert [m["samples"] for m in metrics] == [8, 8, len(oracle.dataset) - 16]
    before = {name: p.detach().clone() for name, p in oracle.model.named_parameters()}
    # As Hugging Face's trainer has it: norms and biases do not decay.
    decays = set(Trainer.get_decay_parameter_names(SimpleNamespace(), oracle.model))
    groups = [
        {"params": [parameter], "weight_decay": settings["weight_decay"] * (name in decays)}
        for name, parameter in oracle.model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings["learning_rate"])
    noise = set()
    for turn, m in zip(turns, metrics, strict=True):
        assert oracle.backward(turn["samples"]) == pytest.approx(m["loss"], rel=1e-5)
        gradients = oracle.gradients()
        noise |= {name for name, g in gradients.items() if g.any() and is_noise(g, gradients.values())}
        norm = torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), settings["max_grad_norm"])
        assert float(norm) == pytest.approx(m["grad_norm"], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    after, seen = {name: p.detach() for name, p in oracle.model.named_parameters()}, set()
    # The tower's last norm, which no sample reaches, has no gradient, and norms do not decay.
    assert all("post_layernorm" in name for name in after if torch.equal(after[name], before[name]))
    for rank in range(asked["num_ranks"]):
        for name, found in torch.load(tmp_path / f"weights {rank}").items():
            seen.add(name)
            wanted = after[name]
            # None where no sample reaches a parameter of zeros, as the bias of the tower's last norm.
            way = float((wanted - before[name]).norm())
            # AdamW makes a step of the learning rate of what is nothing but rounding.
            if name not in noise:
                assert float((found - wanted).norm()) <= 1e-3 * way, f"{name} on rank {rank}"
    assert seen == set(before)
    assert all(name.endswith("k_proj.bias") for name in noise), noise
