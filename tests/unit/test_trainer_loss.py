"""Which trainers of transformers can be balanced by their loss and their sampler; the others are told why not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_media
import tiny_text
import torch
from torch.utils.data import SequentialSampler, WeightedRandomSampler
from transformers import Trainer, TrainingArguments

from dflop.integrations import balance_encoder
from dflop.integrations.text_alone import unused_in_ddp
from dflop.integrations.trainer_loss import check_loss
from dflop.integrations.transformers import balance

SAMPLES = tiny_text.Samples(12)


def trained(folder, kind=Trainer, model=None, **named):
    """The parameters after an epoch of one process, with the line."""
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=0.1,
        seed=3,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = kind(model or dropping(), arguments, tiny_text.collate, SAMPLES, **named)
    balance(trainer, SAMPLES.costs)
    trainer.train()
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def dropping():
    model = tiny_text.make_model()
    model.model.layers[0].self_attn.attention_dropout = 0.3
    return model


class MeanOfEach(Trainer):
    """As tutorials write it."""

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class MeanOfStep(Trainer):
    """A loss of one's own that is right."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return loss / num_items_in_batch


class Wrapped(torch.nn.Module):
    """Takes `num_items_in_batch`, and leaves it unread, as code of a model's own directory may."""

    def __init__(self):
        super().__init__()
        self.inner = dropping()

    def forward(self, input_ids, attention_mask, labels, **named):
        return {"loss": self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss}


def mean_of_each(outputs, labels, num_items_in_batch):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    "asked",
    [{"kind": MeanOfEach}, {"compute_loss_func": mean_of_each}, {"model": Wrapped}],
    ids=["compute_loss", "compute_loss_func", "model"],
)
def test_a_mean_of_each_microbatch_is_refused(asked, tmp_path):
    if "model" in asked:
        asked = {"model": asked["model"]()}
    with pytest.raises(ValueError, match="whatever `num_items_in_batch` is: a mean of each microbatch"):
        trained(tmp_path, **asked)


def test_the_look_changes_nothing(tmp_path):
    """A loss that is right trains as transformers' own does, dropout too."""
    expected = trained(tmp_path)
    for found in (trained(tmp_path, MeanOfStep), trained(tmp_path, compute_loss_func=mean_of_step)):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def mean_of_step(outputs, labels, num_items_in_batch):
    loss = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return loss / num_items_in_batch


def test_batches_without_labels_are_refused(tmp_path):
    class Unlabelled(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).logits.square().mean()

    collate = tiny_text.collate

    def without(rows):
        batch = collate(rows)
        del batch["labels"]
        return batch

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], remove_unused_columns=False)
    trainer = balance(Unlabelled(dropping(), arguments, without, SAMPLES), SAMPLES.costs)
    with pytest.raises(ValueError, match="`Unlabelled` whose batches have no `labels` that it counts"):
        trainer.train()


def test_other_trainers_of_trl_are_refused():
    from trl import KTOTrainer

    trainer = object.__new__(KTOTrainer)
    with pytest.raises(
        ValueError, match="a `KTOTrainer`, .*of TRL's trainers `SFTTrainer`, `DPOTrainer`, `Rew"
    ):
        check_loss(trainer)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_type": ["sigmoid", "aot"]}, "`loss_type` is `aot`, and it sorts the pairs of a microbatch"),
        ({"loss_type": ["sft"], "use_weighting": True}, "has `sft`, whose mean `use_weighting` multiplies"),
    ],
)
def test_pairs_that_depend_on_their_microbatch_are_refused(options, reason):
    from trl import DPOTrainer

    trainer = object.__new__(DPOTrainer)
    trainer.args = SimpleNamespace(**options)
    with pytest.raises(ValueError, match=reason):
        check_loss(trainer)

    class Own(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            return model(**inputs).logits.mean()

    trainer = object.__new__(Own)
    trainer.args = SimpleNamespace(loss_type=["sigmoid"])
    with pytest.raises(ValueError, match=r"a `Own`, .* its loss is not TRL's own"):
        check_loss(trainer)


def test_a_sampler_of_ones_own_is_not_left_out_in_silence(tmp_path):
    class Own(Trainer):
        def _get_train_sampler(self, train_dataset=None):
            return self.made

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], remove_unused_columns=False)

    def loader(sampler, **options):
        trainer = Own(tiny_text.make_model(), arguments, tiny_text.collate, SAMPLES)
        trainer.made = sampler
        return balance(trainer, SAMPLES.costs, **options).get_train_dataloader()

    with pytest.raises(ValueError, match="`WeightedRandomSampler`, which chooses samples in its own way"):
        loader(WeightedRandomSampler([1.0] * 12, 12))
    with pytest.raises(ValueError, match="`SequentialSampler`, .*: give `shuffle=False` to keep it"):
        loader(SequentialSampler(SAMPLES))
    assert len(loader(SequentialSampler(SAMPLES), shuffle=False))


def test_ddp_that_would_wait_for_an_encoder_is_named(tmp_path):
    """Only where some samples have media and others none, the encoder trains, and nothing prevents it."""
    model = tiny_media.make_model("llava", tmp_path)

    def told(num_alone=2, **changes):
        facts = {"find_unused": False, "world_size": 2, "is_fsdp_enabled": False} | changes
        trainer = SimpleNamespace(
            model=model,
            args=SimpleNamespace(world_size=facts["world_size"]),
            accelerator=SimpleNamespace(
                ddp_handler=SimpleNamespace(find_unused_parameters=facts["find_unused"])
            ),
            is_fsdp_enabled=facts["is_fsdp_enabled"],
            is_deepspeed_enabled=False,
        )
        return unused_in_ddp(trainer, (num_alone, 8))

    assert told().startswith("2 of 8 samples have nothing for the encoder, which trains")
    assert (
        told(0)
        is told(8)
        is told(world_size=1)
        is told(find_unused=True)
        is told(is_fsdp_enabled=True)
        is None
    )
    line = balance_encoder(model)
    assert told() is None
    line.remove()
    assert told() is not None
    model.model.vision_tower.requires_grad_(requires_grad=False)
    model.model.multi_modal_projector.requires_grad_(requires_grad=False)
    assert told() is None
