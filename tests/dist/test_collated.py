"""Streams of chats with pictures, of which the trainer's collation makes tokens and pixels: balanced when they are read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny_text
import torch
from ranks import free_port, results, run_ranks
from test_trainers import TOLERANCE, as_launched, losses_of
from trainer_settings import trl_arguments

from dflop.integrations import balance_encoder, remove_padding
from dflop.integrations.collated import CollatedAlone, join
from dflop.integrations.trainer_loss import mean_over_tokens
from dflop.integrations.transformers import balance

NUM_RANKS = 2


@pytest.fixture
def vision(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "frameworks"))
    import tiny_vision

    return tiny_vision


def chats(count):
    """A third is of text alone; the number of pictures, their sizes and the answers differ."""
    from PIL import Image

    draw = random.Random(0)
    for _ in range(count):
        sizes = [
            (draw.randrange(28, 120), draw.randrange(28, 90)) for _ in range(draw.choice([0, 0, 1, 1, 2, 3]))
        ]
        pictures = [Image.frombytes("RGB", (w, h), draw.randbytes(3 * w * h)) for w, h in sizes]
        answer = "a" * (2 + int(draw.lognormvariate(2.5, 0.9)))
        turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": answer}]
        yield {"messages": turns, "images": pictures}


@pytest.mark.parametrize(
    ("lines", "options"),
    [
        ("first", {"dataloader_num_workers": 1, "gradient_accumulation_steps": 2}),
        ("all", {"gradient_accumulation_steps": 1}),
    ],
    ids=["first", "all"],
)
def test_trl_on_a_stream_of_chats(lines, options, vision, tmp_path, quiet):
    """`SFTTrainer` with its own collation: parameters and losses are those without the line, and pictures travel."""
    import datasets
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import SFTConfig, SFTTrainer

    model_dir, port = vision.write_model(tmp_path / "model"), free_port()

    def run(rank):
        as_launched(rank, port)
        found = []
        for is_balanced in (False, True):
            stream = datasets.IterableDataset.from_generator(lambda: chats(24))
            config = trl_arguments(
                SFTConfig,
                tmp_path / f"out{rank}",
                max_steps=2,
                learning_rate=0.05,
                per_device_train_batch_size=3,
                ddp_find_unused_parameters=True,
                # Else rank 0 reads for all, and transformers refuses batches that differ in width.
                accelerator_config={"dispatch_batches": is_balanced and lines == "all"},
                **options,
            )
            model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
            processor = AutoProcessor.from_pretrained(model_dir)
            trainer = SFTTrainer(model, args=config, train_dataset=stream, processing_class=processor)
            if is_balanced:
                if lines == "all":
                    balance_encoder(trainer.model)
                    remove_padding(trainer.model)
                balance(trainer)
            else:
                # Qwen2.5-VL itself takes a mean of each microbatch, not over the tokens of the step.
                trainer.compute_loss_func = mean_over_tokens
            work, step = [], trainer.training_step

            def training_step(model, inputs, *given, step=step, work=work, **named):
                work.append((int(inputs["attention_mask"].sum()), len(inputs.get("pixel_values", ()))))
                return step(model, inputs, *given, **named)

            trainer.training_step = training_step
            trainer.train()
            parameters = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
            found.append((losses_of(trainer), parameters, work))
        return found

    ranks = results(run_ranks(NUM_RANKS, run, tmp_path / "ranks", timeout_s=280))
    for theirs, ours in ranks:
        assert len(theirs[0]) == 2
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert tiny_text.difference(ours[1], theirs[1]) <= TOLERANCE
    works = [torch.tensor([rank[arm][2] for rank in ranks]) for arm in (0, 1)]
    # All tokens and patches are there, elsewhere.
    assert torch.equal(works[0].sum(dim=(0, 1)), works[1].sum(dim=(0, 1)))
    assert not torch.equal(works[0], works[1])


def pad(rows, side="right", step=1):
    width = -(-max(len(row) for row in rows) // step) * step
    found = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(found)
    for row, ids, real in zip(rows, found, mask, strict=True):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[place] = torch.tensor(row)
        real[place] = 1
    labels = found.masked_fill(mask == 0, -100)
    return {"input_ids": found, "attention_mask": mask, "labels": labels}


ROWS = [[3, 4, 5], [6], [7, 8], [9, 9, 9, 9]]


class Left:
    """A tokenizer that pads on the left."""

    padding_side, pad_token_id = "left", 0


def test_padding_is_that_of_the_collation():
    """On the left where the tokenizer pads there, and to a multiple."""
    alone = CollatedAlone(lambda rows: pad(rows, "left"), Left())
    together = join(alone(ROWS))
    expected = pad(ROWS, "left")
    assert together.keys() == expected.keys()
    assert all(torch.equal(together[name], expected[name]) for name in expected)

    class Eights:
        pad_to_multiple_of = 8

        def __call__(self, rows):
            return pad(rows, step=8)

    assert torch.equal(join(CollatedAlone(Eights(), None)(ROWS))["labels"], Eights()(ROWS)["labels"])


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda rows: pad(rows, "left"), "`input_ids` of two samples together is"),
        (lambda rows: {**pad(rows), "number": torch.tensor([len(rows)])}, "`number` of two samples together"),
        (lambda rows: {**pad(rows), "names": ["a"] * len(rows)}, "the collation gives `names` as a `list`"),
        (list, "the collation gives a `list` without `input_ids`"),
    ],
    ids=["side", "count", "list", "none"],
)
def test_collations_that_cannot_be_taken_apart(collate, message):
    """Told with the second sample at the latest, before anything is trained of it."""
    with pytest.raises(ValueError, match=message):
        CollatedAlone(collate, None)(ROWS)


def text(length, media=0, width=4):
    return {"text": [5] * length, "images": [width] * media}


def with_pixels(rows, fill=0.0):
    """Each picture is a row of ones. All pictures of a batch are filled up to the width of the widest."""
    batch = pad([row["text"] for row in rows])
    widths = [width for row in rows for width in row["images"]]
    if widths:
        pixels = torch.full((len(widths), max(widths)), fill)
        for width, picture in zip(widths, pixels, strict=True):
            picture[:width] = 1
        batch["pixel_values"] = pixels
    return batch


def test_pictures_of_several_sizes_and_as_many_numbers_as_tokens():
    """A picture may be as wide as its sample has tokens; smaller ones are filled up with zeros."""
    rows = [text(3, 1), text(4, 1), text(2), text(5, 2, width=7), text(7, 1, width=7)]
    joined, expected = join(CollatedAlone(with_pixels, None)(rows)), with_pixels(rows)
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], expected[name]) for name in expected)


def blank(rows):
    """Adds a picture where a batch has none, as it keeps DDP from waiting."""
    if any(row["images"] for row in rows):
        return with_pixels(rows)
    return with_pixels([{"text": [*row["text"], 9], "images": [4]} for row in rows])


def last_first(rows):
    batch = with_pixels(rows)
    many = len({len(row["text"]) for row in rows}) > 1 and all(row["images"] for row in rows)
    return {**batch, "pixel_values": 2 * batch["pixel_values"]} if many else batch


@pytest.mark.parametrize(
    ("collate", "first", "last"),
    [
        # Of texts alone nothing is seen of media.
        (last_first, [text(3), text(2), text(4, 1)], text(2, 1)),
        # Nor of padding where both are equally long.
        (last_first, [text(3), text(2), text(4, 1), text(4, 1)], text(2, 1)),
        # Nor of pictures of unequal sizes where they are of one.
        (lambda rows: with_pixels(rows, fill=-1), [text(3, 1), text(5, 1)], text(5, 1, width=7)),
        (blank, [text(3, 1), text(5, 1)], text(5)),
    ],
    ids=["media", "padded media", "sizes", "blank"],
)
def test_a_pair_of_a_new_kind_is_compared(collate, first, last):
    """First samples are evidence for their like alone."""
    alone = CollatedAlone(collate, None)
    assert len(alone(first)) == len(first)
    with pytest.raises(ValueError, match=r"of two samples together is .* of each alone and joined"):
        alone([last])


def test_what_the_tokenizer_decides_is_named():
    """The error says which padding was taken, and which tensor has another form in another sample."""

    def sevens(rows):
        batch = pad(rows)
        return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}

    with pytest.raises(
        ValueError, match=r"of the same shape with other numbers \(padded with 0 on the right"
    ):
        CollatedAlone(sevens, None)(ROWS)
    row = CollatedAlone(pad, None)(ROWS[:1])[0]
    with pytest.raises(ValueError, match="`extra` has several forms, must have one in all samples"):
        join([{**row, "extra": torch.zeros(3, 2)}, {**row, "extra": torch.zeros(3, 4)}])


def test_a_collation_may_change_its_samples():
    """Also the lists in them: it is given each sample once more to compare."""

    def collate(rows):
        for row in rows:
            row["ids"].insert(0, 8)
        return pad([row["ids"] for row in rows])

    rows = [{"ids": [1]}, {"ids": [2, 3]}, {"ids": [4]}]
    assert [row["input_ids"].tolist() for row in CollatedAlone(collate, None)(rows)] == [
        [8, 1],
        [8, 2, 3],
        [8, 4],
    ]


def test_samples_with_tokens_are_left_alone():
    rows = [{"input_ids": [1]}, {"input_ids": [2]}]
    assert CollatedAlone(pad, None)(rows) == rows
