"""Models whose loss is their own: the line trains as one batch a step does without it, or refuses.

The oracle is transformers' trainer without the line, whose batch is the whole step.
"""

from __future__ import annotations

import random
import warnings

import pytest
import tiny_media
import tiny_text
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from trainer_settings import BATCH_SIZE, trainer_arguments
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from dflop.integrations.transformers import balance

SIZES = {"vocab_size": tiny_text.VOCABULARY, "hidden_size": 16, "intermediate_size": 32}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2}
OF_T5 = {"vocab_size": tiny_text.VOCABULARY, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1}
OF_T5 |= {"num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}


class Samples(tiny_text.Samples):
    """Each token of a text is learnt from, the first too, if a loss asks for it."""

    def __init__(self, count=12):
        super().__init__(count)
        for row in self.rows:
            row["labels"] = list(row["input_ids"])


SAMPLES = Samples()


class Classes(Samples):
    """A number for each text."""

    def __init__(self, number=4):
        super().__init__()
        draw = random.Random(1)
        for row in self.rows:
            row["labels"] = draw.random() * 3 if number == 1 else draw.randrange(number)


def collate_classes(rows):
    labels = torch.tensor([row["labels"] for row in rows])
    return {**tiny_text.collate([{**row, "labels": row["input_ids"]} for row in rows]), "labels": labels}


def make_trainer(folder, model, samples=SAMPLES, collate=tiny_text.collate, kind=Trainer, **named):
    arguments = trainer_arguments(folder, ddp_backend=None, num_train_epochs=1, learning_rate=0.1)
    return kind(model, arguments, collate, samples, **named)


def of(trainer):
    """(losses, parameters) after its training."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def balanced(folder, model, samples=SAMPLES, **named):
    trainer = make_trainer(folder, model, samples, **named)
    return of(balance(trainer, samples.costs))


def whole(folder, model, samples=SAMPLES, **named):
    """Without the line, each step one batch of the same samples."""
    trainer = make_trainer(folder, model, samples, **named)
    trainer.args.gradient_accumulation_steps = 1
    steps = tiny_text.global_batches(samples, BATCH_SIZE, 2, 1, seed=3)
    loader = DataLoader(samples, batch_sampler=steps, collate_fn=trainer.data_collator)
    trainer.get_train_dataloader = lambda: loader
    return of(trainer)


def check_equal(found, expected):
    assert len(expected[0]) == 2
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert tiny_text.difference(found[1], expected[1]) < 1e-5


class Own(torch.nn.Module):
    """As most write it: no `num_items_in_batch`, and logits alone without labels."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_text.make_model()
        self.config = self.inner.config

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Smoothing(Own):
    """A part of each loss is of tokens that were not the next."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.3)


class Shifted(Own):
    """Labels stand where they are predicted."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Tuple(Own):
    """Loss and logits in a tuple: there is nothing that has the name of logits."""

    def forward(self, input_ids, attention_mask, labels=None):
        return tuple(super().forward(input_ids, attention_mask, labels).values())


class Demanding(Own):
    """It cannot be called without labels."""

    def forward(self, input_ids, attention_mask, labels):
        return super().forward(input_ids, attention_mask, labels)


def bert():
    """Without training: each kind of loss is about the logarithm of the vocabulary."""
    return BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def test_the_loss_of_a_model_of_ones_own_is_that_of_one_batch(tmp_path):
    """First tokens are predicted by none, and are not counted."""
    check_equal(balanced(tmp_path, Own()), whole(tmp_path, Own()))


@pytest.mark.parametrize("make", [Smoothing, Shifted, bert])
def test_another_loss_is_not_replaced(make, tmp_path):
    with pytest.raises(ValueError, match=r"the loss of `\w+` is .* the cross entropy of its next tokens"):
        balanced(tmp_path, make())


def test_a_loss_that_nothing_can_stand_in_for_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`Demanding` takes no .* and its `forward` demands `labels`"):
        balanced(tmp_path, Demanding())
    with pytest.raises(ValueError, match="the model gives no `logits` without labels"):
        balanced(tmp_path, Tuple())


def smoothed_sum(outputs, labels, num_items_in_batch):
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.3) / num_items_in_batch


def test_what_the_refusal_advises_trains(tmp_path):
    """Of texts whose first token is no label: a loss of one's own counts with transformers, which counts it."""
    samples = tiny_text.Samples(12)
    found = balanced(tmp_path, Smoothing(), samples, compute_loss_func=smoothed_sum)
    check_equal(found, whole(tmp_path, Smoothing(), samples))


def t5():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**OF_T5))


def whisper():
    config = WhisperConfig(
        vocab_size=tiny_text.VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return WhisperForConditionalGeneration(config)


@pytest.mark.parametrize("make", [t5, whisper])
def test_an_encoder_decoder_is_refused(make, tmp_path):
    trainer = make_trainer(tmp_path, make())
    with pytest.raises(ValueError, match=r"`\w+ForConditionalGeneration`, an encoder-decoder, takes no"):
        balance(trainer, SAMPLES.costs)


def decoded(rows):
    batch = tiny_text.collate(rows)
    inputs = batch["labels"].roll(1, dims=1)
    inputs[:, 0] = 0
    return {**batch, "decoder_input_ids": inputs.clamp(min=0)}


def sum_where_they_stand(outputs, labels, num_items_in_batch):
    logits = outputs.logits.flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def test_an_encoder_decoder_trains_as_its_refusal_advises(tmp_path):
    found = balanced(tmp_path, t5(), collate=decoded, compute_loss_func=sum_where_they_stand)
    check_equal(found, whole(tmp_path, t5(), collate=decoded))


class SumOfStep(Trainer):
    """A `compute_loss` of one's own that divides, and asks no other."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return sum_where_they_stand(model(**inputs), labels, num_items_in_batch)


def test_an_encoder_decoder_with_a_loss_of_ones_own_is_taken(tmp_path):
    samples = tiny_text.Samples(12)
    found = balanced(tmp_path, t5(), samples, collate=decoded, kind=SumOfStep)
    check_equal(found, whole(tmp_path, t5(), samples, collate=decoded))


def of_classes(num_labels):
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, num_key_value_heads=1, num_labels=num_labels, pad_token_id=0)
    return Qwen2ForSequenceClassification(config)


@pytest.mark.parametrize("num_labels", [1, 4])
def test_a_classifier_of_transformers_is_refused(num_labels, tmp_path):
    """It takes `num_items_in_batch`, and leaves it unread."""
    with pytest.raises(ValueError, match="whatever `num_items_in_batch` is: a mean of each microbatch"):
        balanced(tmp_path, of_classes(num_labels), Classes(num_labels), collate=collate_classes)


def sum_over_classes(outputs, labels, num_items_in_batch):
    return F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch


def test_a_classifier_trains_as_its_refusal_advises(tmp_path):
    named = {"samples": Classes(), "collate": collate_classes}
    found = balanced(tmp_path, of_classes(4), compute_loss_func=sum_over_classes, **named)
    check_equal(found, whole(tmp_path, of_classes(4), **named))


def test_a_tagger_of_transformers_is_refused(tmp_path):
    config = Qwen2Config(**SIZES, num_key_value_heads=1, num_labels=tiny_text.VOCABULARY)
    with pytest.raises(ValueError, match="whatever `num_items_in_batch` is: a mean of each microbatch"):
        balanced(tmp_path, Qwen2ForTokenClassification(config))


def test_the_loss_of_a_router_is_not_left_out(tmp_path):
    """Qwen3-VL-MoE adds it, and takes no `num_items_in_batch`."""

    def make(coefficient):
        model = tiny_media.make_model("qwen3_vl_moe", tmp_path)
        model.config.text_config.output_router_logits = True
        model.config.text_config.router_aux_loss_coef = model.router_aux_loss_coef = coefficient
        return make_trainer(tmp_path, model)

    with pytest.raises(ValueError, match="`output_router_logits` is True, and the loss of `Qwen3VLMoe"):
        balance(make(1.0), SAMPLES.costs)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "`output_router_logits`")
        balance(make(0.0), SAMPLES.costs)


class Unmarked(Samples):
    """The first step has no label."""

    def __init__(self):
        super().__init__()
        for row in self.rows[: 2 * BATCH_SIZE]:
            row["labels"] = [-100] * len(row["labels"])


def test_a_microbatch_without_labels_says_nothing(tmp_path):
    """The next is looked at."""
    seen = []

    class Mean(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            seen.append(int(labels[:, 1:].ne(-100).sum()))
            logits = model(**inputs).logits[:, :-1]
            losses = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            return losses / max(seen[-1], 1)

    trainer = make_trainer(tmp_path, tiny_text.make_model(), Unmarked(), kind=Mean)
    with pytest.raises(ValueError, match="whatever `num_items_in_batch` is: a mean of each microbatch"):
        of(balance(trainer, SAMPLES.costs, shuffle=False))
    # Two looks and a loss of each of two microbatches, then two looks.
    assert [count > 0 for count in seen] == [False] * 6 + [True] * 2


class Distilled(Trainer):
    """A part of the loss is a mean of the microbatch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return outputs.loss + 0.1 * outputs.logits.square().mean()


def test_a_part_that_is_not_divided_is_told_of(tmp_path):
    with pytest.warns(UserWarning, match="a part of it is not divided by `num_items_in_batch`"):
        balanced(tmp_path, tiny_text.make_model(), kind=Distilled)


class Noisy(Own):
    """Draws by each kind of chance, and keeps means of what it saw."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(tiny_text.VOCABULARY)

    def forward(self, input_ids, attention_mask, labels=None):
        import numpy as np

        found = super().forward(input_ids, attention_mask)
        noise = random.random() + float(np.random.rand()) + torch.rand(())  # noqa: NPY002
        logits = self.norm((found["logits"] * (1 + 0.1 * noise)).transpose(1, 2)).transpose(1, 2)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}


def test_the_look_at_a_models_own_loss_changes_nothing(tmp_path, monkeypatch):
    """As without the look; chance would be another after it, and so would what a BatchNorm keeps."""
    import numpy as np

    from dflop.integrations import trainer_loss

    def run():
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        model = Noisy()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is a BatchNorm")
            losses, parameters = balanced(tmp_path, model)
        return losses, parameters, model.norm.running_mean.clone()

    found = run()
    looks = []
    monkeypatch.setattr(trainer_loss, "look_once", lambda *_, **__: looks.append(1))
    expected = run()
    assert looks == [1]
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    assert torch.equal(found[2], expected[2])


def test_gradients_are_divided_once(tmp_path):
    """As if accelerate were told to divide by the step's microbatches, as transformers 5.2.0 to 5.5.3 tells it."""
    expected = whole(tmp_path, tiny_text.make_model(), tiny_text.Samples(12))
    trainer = make_trainer(tmp_path, tiny_text.make_model(), tiny_text.Samples(12))
    trainer.accelerator.gradient_accumulation_steps = 2
    with pytest.warns(UserWarning, match=r"would divide gradients by `gradient_accumulation_steps` \(2\)"):
        balance(trainer, trainer.train_dataset.costs)
    check_equal(of(trainer), expected)


class Silent(Own):
    """It takes labels, and says no loss."""

    def forward(self, input_ids, attention_mask, labels=None):
        return {"logits": self.inner(input_ids=input_ids, attention_mask=attention_mask).logits}


def number(labels, of_step):
    """Without the line transformers counts none for such models: a batch is the step."""
    return labels.ne(-100).sum() if of_step is None else of_step


class Sums(Trainer):
    """The labels go to the model, and the loss is the trainer's own: the model's is not asked."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        labels = inputs["labels"][:, 1:].flatten()
        loss = F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels, reduction="sum")
        return loss / number(labels, num_items_in_batch)


class Weighs(Trainer):
    """The model's own mean, weighed in its place."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        labels = inputs["labels"][:, 1:]
        outputs["loss"] *= labels.ne(-100).sum() / number(labels, num_items_in_batch)
        return outputs["loss"]


class SumsFromTheFirst(Trainer):
    """Labels stand where they are predicted, the first too."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels").flatten()
        logits = model(**inputs)["logits"].flatten(0, 1)
        return F.cross_entropy(logits, labels, reduction="sum") / number(labels, num_items_in_batch)


@pytest.mark.parametrize(
    ("kind", "model", "samples"),
    [
        (Sums, Own, tiny_text.Samples(12)),
        (Sums, Smoothing, tiny_text.Samples(12)),
        (Sums, Silent, tiny_text.Samples(12)),
        (Weighs, Own, tiny_text.Samples(12)),
        (SumsFromTheFirst, Own, SAMPLES),
    ],
)
def test_a_trainer_that_computes_the_loss_itself_is_taken(kind, model, samples, tmp_path):
    """Whatever the model's own loss is, nobody stands in for it."""
    torch.manual_seed(0)
    first = model()
    other = model()
    other.load_state_dict(first.state_dict())
    expected = whole(tmp_path / "whole", other, samples, kind=kind)
    check_equal(balanced(tmp_path / "balanced", first, samples, kind=kind), expected)


def test_packed_weights_are_not_copied_for_the_look(tmp_path):
    """Quantised models keep weights in buffers of whole numbers."""
    model = Own()
    model.register_buffer("packed", torch.zeros(8, dtype=torch.int32))
    copied = []
    model.packed.clone = lambda: copied.append(True)
    balanced(tmp_path, model)
    assert not copied
