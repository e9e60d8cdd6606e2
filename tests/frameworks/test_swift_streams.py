"""ms-swift's `--streaming` with balanced batches: two ranks train what `swift sft` trains in one process without dflop.

Model and chats are those of test_swift.py. A stream is read again when it has ended, in another order.
"""

from __future__ import annotations

import json

import pytest
import tiny_vision
from safetensors.torch import load_file
from test_swift import BALANCED, LEAVE, LORA, TOLERANCE, sft, weights, write_chats, write_model, write_pairs

NUM_CHATS, NUM_RANKS, NUM_STEPS = 28, 2, 7
STREAM = ("--streaming", "true", "--max_steps", str(NUM_STEPS), "--dataset_shuffle", "true")
STREAM += ("--shuffle_buffer_size", "10")
# A stream has another order in a worker.
WORKER = ("--dataloader_num_workers", "1")
# Writes how many samples each microbatch of a rank had.
SIZES = """
import json
from swift.callbacks import TrainerCallback, callbacks_map

class Sizes(TrainerCallback):
    def __init__(self, args, trainer):
        super().__init__(args, trainer)
        self.found, theirs = [], trainer.training_step
        def training_step(model, inputs, *given, **named):
            self.found.append(int((inputs["labels"] != -100).any(dim=1).sum()))
            return theirs(model, inputs, *given, **named)
        trainer.training_step = training_step

    def on_train_end(self, args, *given, **named):
        with open(f"{args.output_dir}/sizes_{args.process_index}.json", "w") as file:
            json.dump(self.found, file)

callbacks_map["sizes"] = Sizes
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model, chats, pairs and plugins."""
    folder = tmp_path_factory.mktemp("swift_streams")
    write_model(folder / "model")
    write_chats(folder, NUM_CHATS)
    write_pairs(folder, folder / "chats.jsonl")
    for name, text in {"leave": LEAVE, "sizes": SIZES}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "plugin.py").write_text("from dflop.integrations.swift import register\nregister()\n")
    return folder


def of_sizes(batch_size, accumulation):
    return (
        "--per_device_train_batch_size",
        str(batch_size),
        "--gradient_accumulation_steps",
        str(accumulation),
    )


def balanced(folder, out, arguments, lines):
    """Losses of two ranks, and the samples of each microbatch of each rank."""
    plugin = out.parent / f"{out.name}.py"
    plugin.write_text(f"from dflop.integrations.swift import register\nregister({lines})\n")
    plugins = ("--external_plugins", "leave.py", "sizes.py", str(plugin))
    losses = sft(folder, out, NUM_RANKS, *STREAM, *arguments, *plugins, "--callbacks", "sizes", "dflop")
    return losses, [json.loads((out / f"sizes_{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """By the samples of a step: losses and weights of ms-swift itself, which has one microbatch a step."""
    found = {}
    for whole, changes in ((6, WORKER), (8, ())):
        out = tmp_path_factory.mktemp("alone")
        given = (*of_sizes(whole, 1), *changes, *STREAM, "--external_plugins", "leave.py")
        losses = sft(folder, out, 1, *given)
        assert len(losses) == NUM_STEPS
        assert tiny_vision.difference(load_file(folder / "model/model.safetensors"), weights(out)) > 1e-2
        found[whole] = losses, weights(out)
    return found


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "lines", "changes"),
    [
        # A pass over the stream has steps of 8, 8, 8 and 4 samples.
        (2, 2, "remove_padding=True", ()),
        (4, 1, "balance_encoder=True, remove_padding=True", ()),
        # Of 6, 6, 6, 6 and 4; of these 4 ms-swift itself would train none on two ranks.
        (3, 1, "", WORKER),
    ],
    ids=["no padding", "all lines", "padded"],
)
def test_two_ranks_train_what_one_process_trains(
    batch_size, accumulation, lines, changes, folder, alone, tmp_path
):
    """Parameters and losses, over the end of the stream and on from its start; microbatches of uneven counts."""
    whole = NUM_RANKS * batch_size * accumulation
    sizes_of = (*of_sizes(batch_size, accumulation), *changes)
    losses, sizes = balanced(folder, tmp_path / "out", sizes_of, lines)
    assert losses == pytest.approx(alone[whole][0], rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), alone[whole][1]) <= TOLERANCE
    num_whole, rest = divmod(NUM_CHATS, whole)
    assert sum(map(sum, sizes)) == sum((([whole] * num_whole + [rest]) * 2)[:NUM_STEPS])
    assert sizes[0] != sizes[1], "microbatches of uneven counts"


def test_a_run_resumes_inside_a_pass(folder, tmp_path):
    """From the second step, with adapters: the same samples, once each."""
    kept = (*of_sizes(2, 2), *LORA, "--save_only_model", "false", "--save_steps", "2", "--max_steps", "4")
    whole, _ = balanced(folder, tmp_path / "whole", kept, "")
    first = ("--resume_from_checkpoint", str(tmp_path / "whole/checkpoint-2"))
    again, _ = balanced(folder, tmp_path / "again", (*kept, *first), "")
    assert again[-2:] == pytest.approx(whole[2:], rel=1e-4)
    adapters = [
        load_file(tmp_path / run / "checkpoint-4/adapter_model.safetensors") for run in ("whole", "again")
    ]
    assert tiny_vision.difference(*adapters) <= TOLERANCE


def test_a_stream_of_pairs_is_refused(folder, tmp_path):
    """Before a step is trained."""
    pairs = ("--rlhf_type", "dpo", "--ref_model", str(folder / "model"), *of_sizes(2, 1))
    pairs += ("--dataset", str(folder / "pairs_response.jsonl"), *STREAM, *BALANCED)
    said = sft(folder, tmp_path / "pairs", 1, *pairs, fails=True, verb="rlhf")
    assert "`--streaming` is set, leave it out: of streams those of `swift sft` alone are balanced" in said
