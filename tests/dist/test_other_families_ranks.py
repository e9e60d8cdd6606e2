"""Families that dflop has no rules for, on two ranks under DDP: trained by `transformers.Trainer`, and encoders shared out."""

from __future__ import annotations

import pytest
import torch
from other_families import build
from other_rows import padded, sample
from ranks import environment, free_port, results, run_ranks
from test_other_families import SHARED, TABLE, TOLERANCE, check_equal
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from trainer_settings import trainer_arguments

from dflop.integrations import attend_encoder, balance_encoder, remove_padding

ROUNDED = {"gemma4_unified": 2}
"""How much larger rounding is after two epochs (measured: 1.03e-5), as of Gemma 4."""
WITH_IDLE_EXPERTS = ("ernie4_5_vl_moe",)
"""Families with experts that tokens of text never read: DDP has to look for parameters without gradient."""
STEPS = [
    [(2, 7), (0, 20)],
    [(0, 9), (1, 5)],
    [(1, 9), (2, 5)],
    [(0, 4), (0, 5)],
]
"""Media and words of each rank's sample, by step: text alone on one rank or on both."""

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.usefixtures("quiet")]


def frozen_norms(model):
    """BatchNorm stays in evaluation mode, whatever the trainer says."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval().train = lambda mode=True, module=module: module
    return model


def losses(model, rows):
    tokens = torch.tensor(sum(int(row["labels"][..., 1:].ne(-100).sum()) for row in rows))
    return lambda row: model(**row, num_items_in_batch=tokens).loss


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.some(2, 20)
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("name", [name for name, (*_, second) in TABLE.items() if second == SHARED])
def test_encoders_are_shared_out(name, is_shared, tmp_path):
    """The loss gets `num_items_in_batch` as trainers give it, which models hand on to their towers."""
    model = build(name)
    steps = [
        [sample(model, name, 9 * step + rank, *sizes) for rank, sizes in enumerate(ranks)]
        for step, ranks in enumerate(STEPS)
    ]
    loss = losses(model, steps[0])
    for row in steps[0]:
        loss(row).backward()
    for parameter in model.parameters():
        # Layers behind the last that is read, and indexers that choose tokens.
        parameter.requires_grad_(parameter.grad is not None)
    model.zero_grad(set_to_none=True)
    expected = []
    for rows in steps:
        loss = losses(model, rows)
        for row in rows:
            loss(row).backward()
        expected.append(gradients(model))

    def run(rank):
        torch.set_num_threads(1)
        store = distributed.FileStore(str(tmp_path / "store"), 2)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        (balance_encoder if is_shared else attend_encoder)(model)
        wrapped = DistributedDataParallel(model, find_unused_parameters=name in WITH_IDLE_EXPERTS)
        found = []
        for rows in steps:
            (2 * losses(wrapped, rows)(rows[rank])).backward()
            found.append(gradients(model))
        return found

    for found in results(run_ranks(2, run, tmp_path / "ranks")):
        for one, of_one_process in zip(found, expected, strict=True):
            check_equal(one, of_one_process, TOLERANCE)


@pytest.mark.some(2, 6)
@pytest.mark.parametrize(
    "name",
    [
        "granite_speech",
        "ernie4_5_vl_moe",
        "phi4_multimodal",
        "kimi_k25",
        "gemma4_unified",
        "ovis2",
        "step3p7",
        "glmasr",
    ],
)
def test_a_trainer_trains_as_one_process(name, tmp_path):
    """`balance(trainer)` without costs, rows of tokens and tensors; in one process a microbatch is the whole step."""
    model = frozen_norms(build(name))
    sizes = [
        (1, 4),
        (0, 30),
        (2, 9),
        (0, 5),
        (1, 22),
        (0, 12),
        (2, 3),
        (1, 7),
        (0, 2),
        (0, 17),
        (1, 1),
        (2, 14),
    ]
    rows = [sample(model, name, seed, *size) for seed, size in enumerate(sizes)]
    start = {key: value.clone() for key, value in model.state_dict().items()}
    port = free_port()

    def run(rank, num_ranks):
        import os

        from transformers import Trainer

        from dflop.integrations.transformers import balance

        if num_ranks > 1:
            os.environ.update(environment(rank, num_ranks, port))
        torch.set_num_threads(1)
        changes = {
            "per_device_train_batch_size": 4 // num_ranks,
            "gradient_accumulation_steps": 1,
            "learning_rate": 0.02,
            "ddp_find_unused_parameters": True,
            **({} if num_ranks > 1 else {"ddp_backend": None}),
        }
        arguments = trainer_arguments(tmp_path / f"{num_ranks}-{rank}", **changes)
        model.load_state_dict(start)
        trainer = balance(Trainer(model, arguments, padded, rows))
        if num_ranks > 1 and not TABLE[name][2].startswith("refused"):
            remove_padding(model)
        trainer.train()
        return {key: value.clone() for key, value in model.state_dict().items()}

    (expected,) = results(run_ranks(1, lambda rank: run(rank, 1), tmp_path / "one"))
    for found in results(run_ranks(2, lambda rank: run(rank, 2), tmp_path / "two")):
        ends = (expected, found)
        moved = {key for key in start if any(not torch.equal(end[key], start[key]) for end in ends)}
        assert len(moved) > len(expected) // 4
        both = [{key: of[key] for key in moved} for of in (found, expected)]
        check_equal(*both, TOLERANCE * ROUNDED.get(name, 1))
