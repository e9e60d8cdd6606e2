"""The first line in a trainer of transformers, in one process: weights of checkpoints, by whatever names they stand there, and what is refused."""

from __future__ import annotations

import pytest
import tiny_media
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from dflop.integrations.transformers import balance

# The model is told twice that it caches nothing.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def made(folder, **changes):
    """A trainer of LLaVA, whose weights stand in files by other names than transformers' trainer reads."""
    rows = [tiny_media.microbatch("llava", media, seed) for seed, media in enumerate([2, 1, 1])]
    options = {"per_device_train_batch_size": 1, "max_steps": 3, "optim": "sgd", "learning_rate": 1e-3}
    options |= {"save_steps": 1, "save_strategy": "steps", "logging_steps": 1, "report_to": []}
    options |= {"disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False, **changes}
    arguments = TrainingArguments(str(folder / "out"), dataloader_pin_memory=False, **options)
    model = tiny_media.make_model("llava", folder / "config")
    return balance(Trainer(model, arguments, lambda batch: batch[0], rows), [(1, 1)] * 3)


def check_equal(trainer, expected):
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_weights_of_a_checkpoint_come_back_or_are_refused(tmp_path, quiet):
    """Resumed training ends where the whole run ended; a checkpoint that lacks a weight is named with it."""
    whole = made(tmp_path)
    whole.train()
    expected = dict(whole.model.named_parameters())
    resumed = made(tmp_path, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))
    check_equal(resumed, expected)
    best = made(tmp_path, save_strategy="no")
    best.state.best_model_checkpoint = str(tmp_path / "out/checkpoint-3")
    best._load_best_model()
    check_equal(best, expected)
    kept = tmp_path / "out/checkpoint-1/model.safetensors"
    parts = load_file(kept)
    lost = next(name for name in parts if "layers.0.mlp" in name)
    save_file({name: part for name, part in parts.items() if name != lost}, kept, {"format": "pt"})
    with pytest.raises(ValueError, match=r"checkpoint-1` lacks 1 weights of the model, `.*mlp"):
        made(tmp_path, save_strategy="no").train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))


def test_a_search_for_the_batch_size_is_refused(tmp_path, quiet):
    """Its batches would stay as large until its number is zero."""
    with pytest.raises(ValueError, match="`auto_find_batch_size` is true, and batches do not become smaller"):
        made(tmp_path, auto_find_batch_size=True)
