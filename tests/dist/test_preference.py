"""TRL's trainers of pairs on balanced batches: uneven ranks give what one process gives for the whole step.

The oracle is TRL's own loss, of one process whose microbatch is the whole global batch: a mean over all its pairs.
"""

from __future__ import annotations

import copy
import random

import datasets
import pytest
import tiny_text
import torch
from PIL import Image
from processor_dirs import write
from ranks import free_port, results, run_ranks
from test_trainers import (
    BATCH_SIZE,
    NUM_RANKS,
    as_launched,
    check,
    losses_of,
    tiny_tokenizer,
)
from tiny_families import TINY
from torch.utils.data import DataLoader
from trainer_settings import trl_arguments

from dflop.integrations import balance_encoder, costs_of_rows, remove_padding
from dflop.integrations.accelerate import keep_batches
from dflop.integrations.transformers import balance

NUM_PAIRS = 26


def words(draw, most):
    return " ".join(f"w{draw.randrange(3, tiny_text.VOCABULARY)}" for _ in range(draw.randrange(1, most)))


def pairs():
    """Texts of very uneven lengths; chosen and rejected answers do not vary together."""
    draw = random.Random(0)
    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(draw, 4 if position % 3 else 40),
                "chosen": f" {words(draw, 30)}",
                "rejected": f" {words(draw, 12)}",
            }
            for position in range(NUM_PAIRS)
        ]
    )


def arguments(kind, folder, **changes):
    return trl_arguments(kind, folder, **{"num_train_epochs": 1, "learning_rate": 0.1, **changes})


def whole_steps(trainer, steps):
    """The trainer reads each global batch as one microbatch."""
    loader = DataLoader(trainer.train_dataset, batch_sampler=steps, collate_fn=trainer.data_collator)
    trainer.get_train_dataloader = lambda: keep_batches(trainer.accelerator, loader)


def steps_of_pairs(accumulation=2):
    class Alike:
        costs = [(0, 1)] * NUM_PAIRS

    return tiny_text.global_batches(Alike, BATCH_SIZE, NUM_RANKS * accumulation, 1, seed=3)


LEFT_OUT = ("epoch", "learning_rate", "grad_norm", "loss", "min_reward", "max_reward", "num_tokens")
"""Of what is logged at a step: no means over pairs or tokens (`loss` has its own check)."""


def means_of(trainer):
    """What TRL logs beside the loss, at each step."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [
        {name: value for name, value in entry.items() if name not in LEFT_OUT and name != "step"}
        for entry in entries
    ]


def compare(make, tmp_path, lines=lambda trainer: balance(trainer), num_means=0):
    """`make(folder, accumulation)` gives a trainer: two ranks with `lines` against one process without them.

    `num_means` numbers beside the loss are equal, too.
    """
    steps, ports = steps_of_pairs(), [free_port(), free_port()]
    assert len(set(map(len, steps))) > 1, "steps of unequal counts too"

    def alone(rank):
        as_launched(rank, ports[0], 1)
        trainer = make(tmp_path / "alone", 1)
        whole_steps(trainer, steps)
        trainer.train()
        parameters = {name: p.detach() for name, p in trainer.model.named_parameters()}
        return losses_of(trainer), parameters, means_of(trainer)

    expected = results(run_ranks(1, alone, tmp_path / "one"))[0]

    def run(rank):
        as_launched(rank, ports[1])
        trainer = make(tmp_path / f"out{rank}", 2)
        lines(trainer)
        sizes = []
        collate = trainer.data_collator

        def counted(rows):
            sizes.append(len(rows))
            return collate(rows)

        trainer.data_collator = counted
        trainer.train()
        assert len(set(sizes)) > 1, "microbatches of uneven counts"
        gap = tiny_text.difference(dict(trainer.model.named_parameters()), expected[1])
        return losses_of(trainer), gap, means_of(trainer)

    found = results(run_ranks(NUM_RANKS, run, tmp_path / "ranks", timeout_s=280))
    check([(losses, gap) for losses, gap, _ in found], expected)
    if num_means:
        for mine, theirs in zip(found[0][2], expected[2], strict=True):
            assert len(theirs) == num_means, sorted(theirs)
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.fixture(autouse=True)
def _imported():
    import trl.trainer.dpo_trainer
    import trl.trainer.reward_trainer  # noqa: F401


MIXED = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}


@pytest.mark.some(1)
@pytest.mark.parametrize("changes", [MIXED, {}])
def test_preference_optimization(changes, tmp_path, quiet):
    """DPO, and its mixture (MPO) with a part that is a mean over the tokens of chosen answers; rows unpadded there."""
    from trl import DPOConfig, DPOTrainer

    def make(folder, accumulation):
        given = arguments(DPOConfig, folder, gradient_accumulation_steps=accumulation, **changes)
        model, reference = tiny_text.make_model(), tiny_text.make_model()
        with torch.no_grad():
            # Of equal models rounding says which answer is the better one.
            for parameter in reference.parameters():
                parameter.mul_(0.8)
        return DPOTrainer(
            model, reference, args=given, train_dataset=pairs(), processing_class=spaced_tokenizer()
        )

    def lines(trainer):
        if changes:
            remove_padding(trainer.model)
        balance(trainer)

    compare(make, tmp_path, lines, num_means=10)


def test_rewards(tmp_path, quiet):
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    def make(folder, accumulation):
        given = arguments(RewardConfig, folder, gradient_accumulation_steps=accumulation)
        given.center_rewards_coefficient = 0.01
        config = copy.deepcopy(tiny_text.make_model().config)
        config.num_labels, config.pad_token_id = 1, 0
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        return RewardTrainer(model, args=given, train_dataset=pairs(), processing_class=spaced_tokenizer())

    compare(make, tmp_path, num_means=3)


ODDS = {
    "odds": ("orpo", "ORPO", {"beta": 0.5}),
    "margins": ("cpo", "CPO", {"loss_type": "simpo", "simpo_gamma": 0.3, "cpo_alpha": 0.7}),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", list(ODDS))
def test_preferences_without_a_reference(kind, tmp_path, quiet):
    """ORPO and CPO (SimPO): a mean over pairs, and one over the tokens of chosen answers."""
    from importlib import import_module

    package, name, changes = ODDS[kind]
    place = import_module(f"trl.experimental.{package}")

    def make(folder, accumulation):
        given = arguments(
            getattr(place, f"{name}Config"), folder, gradient_accumulation_steps=accumulation, **changes
        )
        return getattr(place, f"{name}Trainer")(
            tiny_text.make_model(), args=given, train_dataset=pairs(), processing_class=spaced_tokenizer()
        )

    def lines(trainer):
        remove_padding(trainer.model)
        balance(trainer)

    compare(make, tmp_path, lines)


def spaced_tokenizer():
    from tokenizers import pre_tokenizers

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def llava(folder):
    """A tiny LLaVA with its processor."""
    return write(
        folder,
        "llava",
        copy.deepcopy(TINY["llava"]),
        tokens=["<image>"],
        marks={"image": "<image>"},
        ids={"image_token_index": "<image>"},
        parts={"image_processor": {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}},
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def tiny_llava(folder):
    """Its model with weights of a size that matters."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    for name, parameter in model.named_parameters():
        # Biases too: that of the keys has no gradient, and a value of zero would be nothing but rounding.
        torch.nn.init.normal_(parameter, mean=float("layer" in name and "norm" in name), std=0.1)
    return model.train()


def pairs_with_pictures():
    """Chats as TRL's collation for pictures wants them: up to three pictures, some rows with none."""
    draw = random.Random(1)
    rows = []
    for position in range(NUM_PAIRS):
        turns = {
            "prompt": [{"role": "user", "content": words(draw, 6)}],
            "chosen": [{"role": "assistant", "content": words(draw, 20)}],
            "rejected": [{"role": "assistant", "content": words(draw, 8)}],
        }
        colours = [tuple(draw.randrange(256) for _ in range(3)) for _ in range(position % 4)]
        rows.append({**turns, "images": [Image.new("RGB", (70, 60), colour) for colour in colours]})
    return datasets.Dataset.from_list(rows)


@pytest.mark.some(1, 1)
@pytest.mark.parametrize("lines", ["all", "first", "lora"])
def test_preference_optimization_of_pictures(lines, tmp_path, quiet):
    """Text alone in a microbatch, in a pair nobody's; the first line alone, and all three."""
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    processor, rows = llava(tmp_path / "llava"), pairs_with_pictures()

    def fresh():
        return tiny_llava(tmp_path / "llava")

    def make(folder, accumulation):
        given = arguments(DPOConfig, folder, gradient_accumulation_steps=accumulation, loss_type=["sigmoid"])
        given_model = {"model": fresh(), "ref_model": fresh()}
        if lines == "lora":
            # Without a second model: its answers are those without the adapters.
            targets = ["q_proj", "down_proj", "fc1"]
            given_model = {
                "model": fresh(),
                "peft_config": LoraConfig(target_modules=targets, init_lora_weights=False),
            }
        return DPOTrainer(**given_model, args=given, train_dataset=rows, processing_class=processor)

    def take(trainer):
        costs = costs_of_rows(trainer.train_dataset, trainer.model, processor)
        assert costs.encoder_ns[3] == pytest.approx(3 * costs.encoder_ns[1], rel=1e-6)
        assert costs.encoder_ns[1] > costs.encoder_ns[4] == 0
        if lines != "first":
            balance_encoder(trainer.model)
            remove_padding(trainer.model)
            costs = costs.llm_alone()
        balance(trainer, costs)

    compare(make, tmp_path, take)
