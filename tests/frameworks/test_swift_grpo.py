"""ms-swift's GRPO with balanced batches: two ranks train what `swift rlhf --rlhf_type grpo` trains on two ranks.

The model is a tiny LLaVA or Qwen2.5-VL that answers chats with pictures and without by its own sampling, in
transformers. As seeds are the same, equal parameters give equal answers from one step to the next.
"""

from __future__ import annotations

import json

import pytest
import tiny_vision
from safetensors.torch import load_file
from test_swift import LEAVE, TOLERANCE, sft, weights, write_chats, write_model

NUM_CHATS, GROUP, NUM_RANKS = 16, 4, 2
REWARDS = """
from swift.rewards import ORM, orms

class Sums(ORM):
    def __call__(self, completions, **kwargs):
        return [float(sum(map(ord, text)) % 17) for text in completions]

orms["sums"] = Sums
"""
# Writes how many samples each microbatch of a rank had, and whether the last column was padding alone.
SIZES = """
import json
from swift.callbacks import TrainerCallback, callbacks_map

class Sizes(TrainerCallback):
    def __init__(self, args, trainer):
        super().__init__(args, trainer)
        self.found, theirs = [], trainer._compute_loss
        def compute_loss(model, inputs, batch, *given):
            mask = inputs["attention_mask"]
            self.found.append((len(mask), bool(mask[:, -1].any())))
            return theirs(model, inputs, batch, *given)
        trainer._compute_loss = compute_loss

    def on_train_end(self, args, *given, **named):
        with open(f"{args.output_dir}/sizes_{args.process_index}.json", "w") as file:
            json.dump(self.found, file)

callbacks_map["sizes"] = Sizes
"""
# ms-swift writes the ids of the published tokenizer.
IDS = """
from swift.template.templates.qwen import Qwen2VLTemplate

Qwen2VLTemplate.image_token_id, Qwen2VLTemplate.video_token_id = 261, 262
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, prompts and plugins."""
    folder = tmp_path_factory.mktemp("swift_grpo")
    write_model(folder / "model")
    tiny_vision.write_model(folder / "qwen")
    write_chats(folder, NUM_CHATS)
    # Answers end at some bytes, and have no token of pictures, which nothing would stand behind.
    for model, end, specials in (("model", 257, range(256, 260)), ("qwen", 256, range(256, 263))):
        settings = folder / model / "generation_config.json"
        unfit = [token for token in specials if token != end]
        changed = {"eos_token_id": [end, *range(24)], "suppress_tokens": unfit}
        settings.write_text(json.dumps({**json.loads(settings.read_text()), **changed}))
    for name, text in {"leave": LEAVE, "rewards": REWARDS, "sizes": SIZES, "ids": IDS}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def grpo(folder, out, arguments, lines=None, fails=False):
    """Runs it on two ranks, of 4 samples a microbatch; with dflop where `lines` are given."""
    given = {
        "rlhf_type": "grpo",
        "reward_funcs": "sums",
        "num_generations": GROUP,
        "max_completion_length": 24,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "beta": 0,
        "learning_rate": 0.05,
        **arguments,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    plugins, callbacks = ["leave.py", "rewards.py", "sizes.py", "ids.py"], ["sizes"]
    if lines is not None:
        plugin = out.parent / f"{out.name}.py"
        plugin.write_text(f"from dflop.integrations.swift import register\nregister({lines})\n")
        plugins, callbacks = [*plugins, str(plugin)], ["sizes", "dflop"]
    words += ["--external_plugins", *plugins, "--callbacks", *callbacks]
    said = sft(folder, out, NUM_RANKS, *words, fails=fails, verb="rlhf")
    if fails:
        return said
    return [json.loads((out / f"sizes_{rank}.json").read_text()) for rank in range(NUM_RANKS)]


CASES = {
    "grpo": ("", {"beta": 0.1}, 1),
    "qwen": (
        "remove_padding=True",
        {"model": "qwen", "model_type": "qwen2_5_vl", "template": "qwen2_5_vl", "loss_type": "cispo"},
        1,
    ),
    # Groups whose rewards are all the same are generated anew.
    "dapo": ("remove_padding=True", {"loss_type": "dapo", "dynamic_sample": True}, 1),
    # Two optimizer steps for each generation, each computed twice; the reference's part is in the rewards.
    "rloo": (
        "balance_encoder=True, remove_padding=True",
        {"advantage_estimator": "rloo", "beta": 0.1, "steps_per_generation": 4, "num_iterations": 2},
        2,
    ),
    # The reference is the model without adapters, and the last optimizer step has fewer microbatches.
    "lora": (
        "balance_encoder=True",
        {
            "tuner_type": "lora",
            "lora_rank": 4,
            "lora_dtype": "float32",
            # It would draw other numbers for other rows, and answers are drawn after it.
            "lora_dropout": 0,
            "freeze_vit": True,
            "beta": 0.1,
            "loss_type": "dr_grpo",
            "steps_per_generation": 1,
            "gradient_accumulation_steps": 3,
        },
        1,
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_balanced_ranks_train_what_ranks_train(case, folder, tmp_path):
    lines, arguments, repeats = CASES[case]
    theirs = grpo(folder, tmp_path / "theirs", arguments)
    found = grpo(folder, tmp_path / "found", arguments, lines)
    assert {size for sizes in theirs for size, _ in sizes} == {4}
    sizes = [size for of_rank in found for size, _ in of_rank]
    assert sum(sizes) == sum(size for of_rank in theirs for size, _ in of_rank) == NUM_CHATS * GROUP * repeats
    assert len(set(sizes)) > 1, "microbatches of uneven counts"
    assert all(is_tight for of_rank in found for _, is_tight in of_rank), "no column of padding alone"
    if case == "lora":
        expected, own = (
            load_file(next((tmp_path / run).glob("checkpoint-*")) / "adapter_model.safetensors")
            for run in ("theirs", "found")
        )
    else:
        expected, own = weights(tmp_path / "theirs"), weights(tmp_path / "found")
        before = load_file(folder / arguments.get("model", "model") / "model.safetensors")
        assert tiny_vision.difference(before, expected) > 1e-2
    assert tiny_vision.difference(own, expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "lines", "said"),
    [
        ({"loss_type": "bnpo"}, "", "`--loss_type` is `bnpo`, and it divides by the tokens of a microbatch"),
        (
            {"steps_per_generation": 3},
            "",
            "`--steps_per_generation` is 3 and `--gradient_accumulation_steps` is 2: one must be a multiple",
        ),
        ({"log_entropy": True}, "", "`--log_entropy` is true"),
        ({}, "giant_llm_cost=1.0", "`giant_llm_cost` is given, and the trainer generates its samples"),
    ],
)
def test_what_cannot_be_balanced_is_refused(arguments, lines, said, folder, tmp_path):
    """Before anything is generated."""
    assert said in grpo(folder, tmp_path / "out", arguments, lines, fails=True)
