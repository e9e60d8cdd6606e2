"""ms-swift with balanced batches: two ranks train what `swift sft` trains in one process without dflop.

The model is a tiny LLaVA, the data are chats with pictures and without. The plugin is the one of
docs/frameworks.md. `make test-frameworks` runs these tests in an environment of ms-swift's own versions.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_vision
from safetensors.torch import load_file

pytest.importorskip("swift", reason="ms-swift is not installed: `make test-frameworks`")
PAGE = Path(__file__).resolve().parents[2] / "docs/frameworks.md"
TOLERANCE = 1e-5
# ms-swift ends without it, and then every second process aborts in gloo's threads (PyTorch 2.15, without dflop too).
LEAVE = """
import atexit
from torch import distributed
atexit.register(lambda: distributed.is_initialized() and distributed.destroy_process_group())
"""
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
)


def write_model(folder, num_key_value_heads=1):
    """A tiny LLaVA 1.5 with weights and processor; every byte of text is a token."""
    import torch
    from tokenizers import AddedToken
    from transformers import (
        CLIPImageProcessor,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )

    tokens = tiny_vision.byte_tokens()
    special = ["<s>", "</s>", "<pad>", "<image>"]
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **sizes,
        "model_type": "llama",
        "num_key_value_heads": num_key_value_heads,
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
    }
    config = LlavaConfig(
        vision_config={**sizes, "model_type": "clip_vision_model", "patch_size": 14, "image_size": 56},
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


def write_chats(folder, count=28):
    """As ms-swift's own format has them; a third are of text alone, answers differ in length."""
    from PIL import Image

    draw = random.Random(0)
    lines = []
    for sample in range(count):
        paths = []
        for place in range(draw.choice([0, 0, 1, 1, 2, 3])):
            paths.append(str(folder / f"{sample}_{place}.png"))
            picture = Image.effect_noise((draw.randrange(40, 120), 60), 40).convert("RGB")
            picture.save(paths[-1])
        answer = " ".join(
            draw.choice(["red", "a", "sky"]) for _ in range(2 + int(draw.lognormvariate(2, 0.9)))
        )
        question = {"role": "user", "content": "<image>" * len(paths) + "what?"}
        row = {"messages": [question, {"role": "assistant", "content": answer}]}
        lines.append(json.dumps({**row, "images": paths} if paths else row))
    (folder / "chats.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model, data and the plugin of the page."""
    folder = tmp_path_factory.mktemp("swift")
    write_model(folder / "model")
    write_chats(folder)
    write_pairs(folder, folder / "chats.jsonl")
    section = PAGE.read_text().split("## ms-swift\n")[1]
    (folder / "leave.py").write_text(LEAVE)
    (folder / "plugin.py").write_text(re.findall(r"^```python\n(.*?)^```", section, flags=re.M | re.S)[0])
    return folder


def write_pairs(folder, chats, count=20):
    """Another answer beside the right one, in either of ms-swift's forms."""
    draw = random.Random(1)
    for form in ("response", "messages"):
        lines = []
        for row in map(json.loads, chats.read_text().splitlines()[:count]):
            other = "no " * draw.randrange(1, 12)
            question, answer = row["messages"]
            turns = [question, {**answer, "content": other}]
            rejected = {"rejected_response": other}
            if form == "messages":
                # Then its pictures are its own, too.
                rejected = {"rejected_messages": turns}
                rejected |= {"rejected_images": row["images"]} if "images" in row else {}
            lines.append(json.dumps({**row, **rejected}))
        (folder / f"pairs_{form}.jsonl").write_text("\n".join(lines))


def sft(folder, out, num_ranks, *arguments, fails=False, verb="sft"):
    """Runs `swift sft` as its users do; the losses of its steps, or what it says where it fails."""
    given = {
        "model": folder / "model",
        "model_type": "llava1_5_hf",
        "template": "llava1_5_hf",
        "dataset": folder / "chats.jsonl",
        "tuner_type": "full",
        "freeze_vit": False,
        "freeze_aligner": False,
        "torch_dtype": "float32",
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 1e9,
        # It would act on the layer that nobody reads, which the second line gives a gradient of zero.
        "weight_decay": 0,
        "output_dir": out,
        "add_version": False,
        "logging_steps": 1,
        "save_only_model": True,
        "report_to": "none",
        "split_dataset_ratio": 0,
        "dataset_shuffle": False,
        "train_dataloader_shuffle": False,
        "use_cpu": True,
        "check_model": False,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "MODELSCOPE_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"NPROC_PER_NODE": str(num_ranks), "MASTER_PORT": str(random.randrange(20_000, 40_000))}
    command = [sys.executable, "-m", "swift.cli.main", verb, *words, *arguments]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400, check=False
    )
    assert (done.returncode != 0) == fails, done.stderr[-4000:]
    if fails:
        return done.stdout + done.stderr
    lines = [json.loads(line) for line in (Path(out) / "logging.jsonl").read_text().splitlines()]
    return [float(line["loss"]) for line in lines if "loss" in line]


def weights(out):
    (directory,) = Path(out).glob("checkpoint-*")
    return load_file(directory / "model.safetensors")


BALANCED = ("--external_plugins", "leave.py", "plugin.py", "--callbacks", "dflop")
ALONE = ("--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1")
LORA = ("--tuner_type", "lora", "--lora_rank", "4", "--lora_dtype", "float32", "--freeze_vit", "true")


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """28 chats in steps of 8, the last one of 4, in the order of the file: losses and weights of ms-swift itself."""
    out = tmp_path_factory.mktemp("alone")
    losses = sft(folder, out, 1, *ALONE, "--external_plugins", "leave.py")
    assert len(losses) == 4
    assert tiny_vision.difference(load_file(folder / "model/model.safetensors"), weights(out)) > 1e-2
    return losses, weights(out)


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "lines"),
    [(2, 2, ""), (2, 2, "remove_padding=True"), (4, 1, "balance_encoder=True, remove_padding=True")],
)
def test_two_ranks_train_what_one_process_trains(batch_size, accumulation, lines, folder, alone, tmp_path):
    """With the first line in padded batches, without padding as on the page, and with all three."""
    sizes = (
        "--per_device_train_batch_size",
        str(batch_size),
        "--gradient_accumulation_steps",
        str(accumulation),
    )
    plugin = (folder / "plugin.py").read_text()
    of_page = "register(remove_padding=True)"
    assert of_page in plugin
    (tmp_path / "plugin.py").write_text(plugin.replace(of_page, f"register({lines})"))
    changed = ("--external_plugins", "leave.py", str(tmp_path / "plugin.py"), "--callbacks", "dflop")
    losses = sft(folder, tmp_path / "out", 2, *sizes, *changed)
    assert losses == pytest.approx(alone[0], rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), alone[1]) <= TOLERANCE
    (state,) = (tmp_path / "out").glob("checkpoint-*/trainer_state.json")
    assert "BalancedSteps" in json.loads(state.read_text())["stateful_callbacks"]


@pytest.mark.parametrize("form", ["response", "messages"])
def test_preferences(form, folder, tmp_path):
    """`swift rlhf --rlhf_type dpo`: two ranks, uneven and without padding, against one of ms-swift without dflop."""
    pairs = ("--rlhf_type", "dpo", "--ref_model", str(folder / "model"), "--learning_rate", "0.01")
    pairs += ("--dataset", str(folder / f"pairs_{form}.jsonl"))
    losses = sft(folder, tmp_path / "one", 1, *ALONE, *pairs, "--external_plugins", "leave.py", verb="rlhf")
    assert len(losses) == 3
    sizes = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2")
    found = sft(folder, tmp_path / "out", 2, *sizes, *pairs, *BALANCED, verb="rlhf")
    assert found == pytest.approx(losses, rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "one")) <= TOLERANCE


def test_adapters_and_a_run_that_resumes(folder, tmp_path):
    """From the second step of four, in another order than the file's: the same samples, once each."""
    sizes = (
        "--per_device_train_batch_size",
        "4",
        "--gradient_accumulation_steps",
        "1",
        "--train_dataloader_shuffle",
        "true",
    )
    kept = ("--save_only_model", "false", "--save_steps", "2", *LORA, *BALANCED)
    whole = sft(folder, tmp_path / "whole", 2, *sizes, *kept)
    first = ("--resume_from_checkpoint", str(tmp_path / "whole/checkpoint-2"))
    again = sft(folder, tmp_path / "again", 2, *sizes, *kept, *first)
    assert again[-2:] == pytest.approx(whole[-2:], rel=1e-4)
    adapters = [
        load_file(tmp_path / run / "checkpoint-4/adapter_model.safetensors") for run in ("whole", "again")
    ]
    assert tiny_vision.difference(*adapters) <= TOLERANCE


def test_what_cannot_be_balanced_is_refused(folder, tmp_path):
    """Before a step is trained."""
    sizes = (
        "--per_device_train_batch_size",
        "2",
        "--group_by_length",
        "true",
        "--train_dataloader_shuffle",
        "true",
    )
    said = sft(folder, tmp_path / "grouped", 1, *sizes, "--lazy_tokenize", "false", *BALANCED, fails=True)
    assert "`--group_by_length` is set, leave it out: samples are chosen here" in said
    pairs = ("--rlhf_type", "dpo", "--ref_model", str(folder / "model"), *sizes[:2])
    pairs += ("--dataset", str(folder / "pairs_response.jsonl"), "--rpo_alpha", "0.5", *BALANCED)
    said = sft(folder, tmp_path / "rpo", 1, *pairs, fails=True, verb="rlhf")
    assert "`--rpo_alpha` is 0.5, a mean over the tokens of a microbatch: leave it out" in said
