"""Every block of the pages of the three lines runs as it stands, on one rank of a CPU, after the lines that they take for granted."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import warm

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("integrations.md", "second_line.md", "third_line.md")

# A dataset, its costs in place of the data profile's, a model, a batch and what the model says of it.
SAMPLES = """
import sys, tempfile
sys.path.insert(0, "examples")
from tiny import Samples, collate, make_model, model_inputs
import torch
import dflop
data, model, epoch, num_ranks = Samples(), make_model(), 1, 1
of_pairs, asked = dflop.costs, []
def costs(path):
    asked.append(path)
    return of_pairs(data.costs)
dflop.costs = costs
batch = collate([data[i] for i in range(3)])
logits = model(**model_inputs(batch)).logits
"""
BEFORE = (
    SAMPLES
    + """
from torch import distributed
store = distributed.FileStore(tempfile.mktemp(), 1)
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
"""
)
END = """
distributed.destroy_process_group()
"""
AFTER_LOOP = """
assert asked == ["data_profile.parquet"], asked
state = loader.batch_sampler.state_dict()
assert state["meets"] == MEETS, state
assert sorted(i for bucket in loader.batch_sampler for i in bucket) == list(range(len(data)))
assert int(tokens) == int((batch["labels"][:, 1:] != -100).sum())
loss.backward()
has_second_line = "balance_encoder" in globals()
assert (sum(memoryview(loader.batch_sampler._costs.column("encoder_ns")).cast("Q")) == 0) == has_second_line
"""
# Two microbatches of a step; what the lines compute for the first is held against PyTorch's own loss.
MICROBATCHES = """
from dflop.integrations import num_label_tokens, token_loss
microbatches = [batch, collate([data[i] for i in range(3, 6)])]
m = microbatches[0]
"""
LOSS_IS_RIGHT = """
shifted = [one["labels"][:, 1:] for one in microbatches]
assert int(tokens) == sum(int((labels != -100).sum()) for labels in shifted)
rows = logits[:, :-1].flatten(0, 1), shifted[0].flatten()
expected = torch.nn.functional.cross_entropy(*rows, ignore_index=-100, reduction="sum") / tokens
torch.testing.assert_close(loss, expected)
"""
# Each step computes what the page says, and the model learns from every sample of the epoch.
ARGUMENTS = """per_device_train_batch_size=4, num_train_epochs=1, report_to=[], save_strategy="no", disable_tqdm=True,
    use_cpu=True, dataloader_pin_memory=False"""
TRANSFORMERS = f"""
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(tempfile.mkdtemp(), {ARGUMENTS}, remove_unused_columns=False)
"""
AFTER_TRAINER = """
assert asked == ["data_profile.parquet"], asked
assert trainer.state.global_step == len(data) // 4, trainer.state
assert type(trainer.get_train_dataloader().batch_sampler).__module__.startswith("dflop.")
"""
TRL = f"""
import dflop, random, tempfile
import datasets
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer
folder = tempfile.mkdtemp()
words = {{"<pad>": 0, "<s>": 1, "</s>": 2}} | {{f"w{{i}}": i for i in range(3, 60)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
Qwen2ForCausalLM(Qwen2Config(vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=1)).save_pretrained(folder)
model = Qwen2ForCausalLM.from_pretrained(folder)
draw = random.Random(0)
rows = [[draw.randrange(3, 60) for _ in range(4 + int(draw.lognormvariate(3, 1)))] for _ in range(64)]
data = datasets.Dataset.from_list([{{"input_ids": row}} for row in rows])
of_pairs, asked = dflop.costs, []
def costs(path):
    asked.append(path)
    return of_pairs([(0, len(row)) for row in rows])
dflop.costs = costs
arguments = SFTConfig(folder, {ARGUMENTS}, bf16=False, gradient_checkpointing=False, max_length=None)
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
"""
AFTER_ACCELERATE = """
assert asked == ["data_profile.parquet"], asked
assert sum(len(batch["labels"]) for batch in loader) == len(data)
# `backward` divides by the two microbatches of a step, by which the lines have multiplied.
head = model.lm_head.weight
fresh = model(**model_inputs(m)).logits[:, :-1].flatten(0, 1)
whole = torch.nn.functional.cross_entropy(fresh, shifted[0].flatten(), ignore_index=-100, reduction="sum") / tokens
torch.testing.assert_close(head.grad, torch.autograd.grad(whole, head)[0])
"""
# The last line of the block stands in `training_step`; it is put there.
LIGHTNING = """
import functools
import lightning.pytorch as pl
losses = []
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()
    def training_step(self, batch, batch_idx):
        logits = self.model(**model_inputs(batch)).logits
{in_step}
        losses.append(loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)
module = Module()
# What the reader's trainer has: a device, an end, and nothing written.
own = dict(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
           enable_progress_bar=False, enable_model_summary=False)
pl.Trainer = functools.partial(pl.Trainer, **own)
"""
AFTER_LIGHTNING = """
assert asked == ["data_profile.parquet"], asked
assert trainer.global_step == len(losses) == len(data) // 4
assert all(loss > 0 for loss in losses)
"""
# A line that changes how a model computes changes nothing of what it says of real tokens.
SAME_ANSWERS = """
real = batch["attention_mask"].bool()
again = model(**model_inputs(batch)).logits
torch.testing.assert_close(again[real], logits[real], rtol=1e-4, atol=1e-5)
"""


def blocks() -> list[str]:
    """All blocks of Python on the pages, in their order."""
    text = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def loop(block: str) -> str:
    """A loop of PyTorch: every sample once, by the objective that the line names; the loss has a gradient."""
    meets = "phase" if 'meets="phase"' in block else "step"
    return f"{BEFORE}{block}MEETS = {meets!r}\n{AFTER_LOOP}{END}"


def lightning(block: str) -> str:
    """The module's own step has the line that belongs there."""
    lines, in_step = block.split("# In training_step, which returns it:\n")
    return SAMPLES + LIGHTNING.format(in_step=textwrap.indent(in_step, " " * 8)) + lines + AFTER_LIGHTNING


# Of each block in turn what it is about, a package that it needs, and how it is run.
RUN = [
    ("loss", "", lambda block: BEFORE + MICROBATCHES + block + LOSS_IS_RIGHT + END),
    ("DDP", "", loop),
    ("FSDP2", "", loop),
    ("both lines", "", loop),
    ("transformers", "accelerate", lambda block: SAMPLES + TRANSFORMERS + block + AFTER_TRAINER),
    ("TRL", "trl", lambda block: TRL + block + AFTER_TRAINER),
    (
        "accelerate",
        "accelerate",
        lambda block: SAMPLES + MICROBATCHES + ACCELERATE + block + LOSS_IS_RIGHT + AFTER_ACCELERATE,
    ),
    ("Lightning", "lightning", lightning),
    ("second line", "", lambda block: BEFORE + block + SAME_ANSWERS + END),
    ("third line", "", lambda block: BEFORE + block + SAME_ANSWERS + END),
]


def test_each_block_has_its_way_to_run() -> None:
    """A block more, or one moved, is noticed: none is left out of the test below."""
    assert len(blocks()) == len(RUN)


@pytest.mark.parametrize("index", range(len(RUN)), ids=[name for name, _, _ in RUN])
def test_a_block_runs_as_it_stands(index: int) -> None:
    _, package, whole = RUN[index]
    if package:
        pytest.importorskip(package)
    warm.run(["-c", whole(blocks()[index])], check=True, cwd=ROOT)
