"""TRL's trainers that generate: what they generated is balanced, and uneven ranks give what one process gives.

The oracle is TRL itself, of one process whose microbatch is the whole step. Answers are a function of prompt and
place in the group, so that both runs have the same.
"""

from __future__ import annotations

import random
import zlib

import datasets
import pytest
import tiny_text
import torch
from PIL import Image
from ranks import free_port, results, run_ranks
from shards import whole_of
from test_preference import arguments, llava, spaced_tokenizer, tiny_llava, words
from test_trainers import NUM_RANKS, as_launched, losses_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from dflop.integrations import balance_encoder, remove_padding
from dflop.integrations.transformers import balance

NUM_PROMPTS, GROUP = 8, 4


def texts():
    draw = random.Random(0)
    return datasets.Dataset.from_list(
        [{"prompt": words(draw, 4 if position % 3 else 40)} for position in range(NUM_PROMPTS)]
    )


def answer(ids, place):
    """Tokens of an answer, of very uneven lengths."""
    draw = random.Random(zlib.crc32(bytes(str((list(ids), place)), "ascii")))
    most = 60 if draw.random() < 0.2 else 8
    return [draw.randrange(3, tiny_text.VOCABULARY) for _ in range(draw.randrange(1, most))]


def fixed_answers(trainer):
    is_scored = "RLOO" not in type(trainer).__name__

    def generate(prompt_ids, *_, **__):
        found = [answer(ids, place % GROUP) for place, ids in enumerate(prompt_ids)]
        return (found, None) if is_scored else found

    trainer._generate_single_turn = generate


def rewards(completion_ids, **_):
    return [float(sum(ids) % 17) for ids in completion_ids]


def run_of(make, lines, are_fixed=True):
    """What a rank does: trains on fixed answers, and tells losses, parameters and sizes of microbatches."""

    def run(rank):
        trainer = make(rank)
        if are_fixed:
            fixed_answers(trainer)
        lines(trainer)
        sizes, are_tight = [], []
        loss_of_theirs = trainer._compute_loss

        def seen(model, inputs):
            mask = inputs["completion_mask"]
            sizes.append(len(mask))
            step = trainer.pad_to_multiple_of or 1
            are_tight.append(-(-int(mask.sum(dim=1).max()) // step) * step == mask.shape[1])
            return loss_of_theirs(model, inputs)

        trainer._compute_loss = seen
        trainer.train()
        parameters = whole_of(dict(trainer.model.named_parameters()))
        return losses_of(trainer), parameters, sizes, all(are_tight)

    return run


def launched(num_ranks, run, folder):
    port = free_port()

    def rank_of(rank):
        as_launched(rank, port, num_ranks)
        return run(rank)

    return results(run_ranks(num_ranks, rank_of, folder, timeout_s=280))


def check(found, expected, num_samples=NUM_PROMPTS * GROUP):
    losses, parameters, _, _ = expected
    assert sum(size for _, _, sizes, _ in found for size in sizes) == num_samples, "each sample once"
    assert any(len(set(sizes)) > 1 for _, _, sizes, _ in found), "microbatches of uneven counts"
    for own_losses, own, _, is_tight in found:
        assert is_tight, "no column of padding alone, but for multiples of eight"
        assert own_losses == pytest.approx(losses, rel=1e-4, abs=1e-5)
        assert tiny_text.difference(own, parameters) < 1e-5


def make_text(tmp_path, kind, config, samples, microbatches, **changes):
    def make(rank):
        given = arguments(
            config,
            tmp_path / f"out{rank}",
            per_device_train_batch_size=samples,
            num_generations=GROUP,
            max_completion_length=64,
            **{"gradient_accumulation_steps": microbatches, **changes},
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        return kind(model, rewards, args=given, train_dataset=texts(), processing_class=spaced_tokenizer())

    return make


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "changes", [{"loss_type": "dapo"}, {"loss_type": "grpo", "beta": 0.1}, {"loss_type": "dr_grpo"}]
)
def test_uneven_ranks_equal_one_process(changes, tmp_path, quiet):
    from trl import GRPOConfig, GRPOTrainer

    tiny_text.make_model().save_pretrained(tmp_path / "model")
    of = (tmp_path, GRPOTrainer, GRPOConfig)
    alone = launched(1, run_of(make_text(*of, 16, 1, **changes), lambda trainer: None), tmp_path / "alone")
    check(launched(NUM_RANKS, run_of(make_text(*of, 4, 2, **changes), balance), tmp_path / "ranks"), alone[0])


OF_RANKS = {
    # Samples of an older model: two optimizer steps for each generation, each computed twice.
    "steps": ("GRPO", {"steps_per_generation": 4, "num_iterations": 2, "loss_type": "grpo"}, 2),
    "generations": ("GRPO", {"steps_per_generation": 1, "loss_type": "dapo"}, 1),
    "sequences": ("GRPO", {"importance_sampling_level": "sequence", "steps_per_generation": 4}, 1),
    # Padded to multiples of eight, where a reference scores.
    "rloo": ("RLOO", {"pad_to_multiple_of": 8}, 1),
    # The last optimizer step of the epoch has one microbatch a rank.
    "partial": (
        "GRPO",
        {"steps_per_generation": 1, "gradient_accumulation_steps": 3, "loss_type": "sapo"},
        1,
    ),
    "cispo": ("GRPO", {"loss_type": "cispo"}, 1),
    "vespo": ("GRPO", {"loss_type": "vespo"}, 1),
    "luspo": ("GRPO", {"loss_type": "luspo", "importance_sampling_level": "sequence"}, 1),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("case", list(OF_RANKS))
def test_balanced_ranks_equal_those_of_trl(case, tmp_path, quiet):
    """The oracle is TRL on as many ranks, whose samples of a step are the same."""
    import trl

    tiny_text.make_model().save_pretrained(tmp_path / "model")
    name, changes, repeats = OF_RANKS[case]
    kind, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    make = make_text(tmp_path, kind, config, 4, 2, **changes)
    theirs = launched(NUM_RANKS, run_of(make, lambda trainer: None), tmp_path / "theirs")
    found = launched(NUM_RANKS, run_of(make, balance), tmp_path / "ranks")
    check(found, theirs[0], NUM_PROMPTS * GROUP * repeats)


def chats(num_pictures):
    """Prompts of uneven lengths, each with as many pictures as `num_pictures` gives for its position."""
    draw = random.Random(1)
    rows = []
    for position in range(NUM_PROMPTS):
        colours = [tuple(draw.randrange(256) for _ in range(3)) for _ in range(num_pictures(position))]
        rows.append(
            {
                "prompt": [{"role": "user", "content": words(draw, 20)}],
                "images": [Image.new("RGB", (70, 60), colour) for colour in colours],
            }
        )
    return datasets.Dataset.from_list(rows)


def make_pictures(tmp_path, rows, samples, microbatches, adapters=None, shard=None, **changes):
    """Of a tiny LLaVA."""
    from trl import GRPOConfig, GRPOTrainer

    processor = llava(tmp_path / "llava")

    def make(rank):
        given = arguments(
            GRPOConfig,
            tmp_path / f"out{rank}",
            per_device_train_batch_size=samples,
            gradient_accumulation_steps=microbatches,
            num_generations=GROUP,
            max_completion_length=64,
            **changes,
        )
        given.device  # noqa: B018 - starts the process group.
        model = tiny_llava(tmp_path / "llava")
        if shard is not None:
            shard(model)
        torch.manual_seed(0)
        trainer = GRPOTrainer(
            model,
            rewards,
            args=given,
            train_dataset=rows,
            processing_class=processor,
            peft_config=adapters,
        )
        if shard is not None:
            # accelerate shards nothing on a CPU: the model comes sharded, and is not to be wrapped again.
            trainer.accelerator.prepare_model = lambda module, **_: module
        return trainer

    return make


@pytest.mark.some(1, 2)
@pytest.mark.parametrize("lines", ["lora", "generated", "all", "first"])
def test_pictures(lines, tmp_path, quiet):
    """With the first line, all three, or adapters, whose reference is the model without them."""
    from peft import LoraConfig

    rows, changes = chats(lambda position: 1 + position % 3), {}
    if lines == "lora":
        targets = ["q_proj", "down_proj", "fc1"]
        adapters = LoraConfig(target_modules=targets, init_lora_weights=False)
        changes = {"beta": 0.1, "adapters": adapters}

    def take(trainer):
        if lines != "first":
            balance_encoder(trainer.model)
            remove_padding(trainer.model)
        # The second call changes what is asked for, and nothing else.
        balance(balance(trainer), is_padded=lines == "all")

    make = make_pictures(tmp_path, rows, 4, 2, **changes)
    if lines == "generated":
        # Ranks generate answers of unequal lengths, and wait for each other neither in the encoder nor elsewhere.
        found = launched(NUM_RANKS, run_of(make, take, are_fixed=False), tmp_path / "ranks")
        assert sum(size for _, _, sizes, _ in found for size in sizes) == NUM_PROMPTS * GROUP
        assert tiny_text.difference(found[0][1], found[1][1]) == 0.0
        return
    whole = make_pictures(tmp_path, rows, 16, 1, **changes)
    alone = launched(1, run_of(whole, lambda trainer: None), tmp_path / "alone")
    check(launched(NUM_RANKS, run_of(make, take), tmp_path / "ranks"), alone[0])


def test_text_alone_on_one_rank_under_fsdp2(tmp_path, quiet):
    """TRL takes no text alone beside pictures on a rank; samples move between one of pictures and one of text."""
    rows = chats(lambda position: int(position < NUM_PROMPTS // 2))

    def shard(model):
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for layer in [*model.model.vision_tower.encoder.layers, *model.model.language_model.layers]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    changes = {
        "shuffle_dataset": False,
        "steps_per_generation": 4,
        "loss_type": "grpo",
        "log_multimodal": False,
    }
    whole = make_pictures(tmp_path, rows, 4, 2, ddp_find_unused_parameters=True, **changes)
    theirs = launched(NUM_RANKS, run_of(whole, lambda trainer: None), tmp_path / "theirs")
    sharded = make_pictures(tmp_path, rows, 4, 2, shard=shard, **changes)
    check(launched(NUM_RANKS, run_of(sharded, balance), tmp_path / "ranks"), theirs[0])
