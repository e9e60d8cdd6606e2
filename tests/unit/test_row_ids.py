"""Rows that have their tokens, in every form in which trainers hold them, are counted alike."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dflop
from dflop.integrations import balanced_loader, costs_of_rows, measure_cost
from dflop.integrations.row_ids import batches_of_ids, held
from dflop.integrations.script import balanced_trainers
from dflop.integrations.transformers import balance

LENGTHS = [3, 9, 1, 4]
ROWS = [{"input_ids": list(range(1, n + 1))} for n in LENGTHS]


@pytest.fixture(scope="module")
def model():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=60))


def table(column):
    return datasets.Dataset.from_dict({"input_ids": column})


def forms():
    ids = [row["input_ids"] for row in ROWS]
    yield "list", ROWS
    yield "tuple", tuple(ROWS)
    yield "encodings", [BatchEncoding(row) for row in ROWS]
    yield "rows of a batch of one", [{"input_ids": torch.tensor([row])} for row in ids]
    yield "dataset", table(ids)
    yield "dataset of batches of one", table([[row] for row in ids])
    yield "deeper still, and cut in pieces", table([[[row[:1]], [row[1:]]] for row in ids])
    yield "part of a list", Subset([*ROWS, {"input_ids": [5]}], range(4))
    yield "part of a dataset", Subset(table([[5], *ids]), [1, 2, 3, 4])
    yield "part of a part", Subset(Subset([{"input_ids": [5]}, *ROWS], range(5)), [1, 2, 3, 4])
    yield "lists in turn", ConcatDataset([ROWS[:1], ROWS[1:]])
    yield "datasets in turn", ConcatDataset([table(ids[:2]), table(ids[2:])])
    yield "list and part in turn", ConcatDataset([ROWS[:2], Subset(ROWS, [2, 3])])


@pytest.mark.parametrize("rows", [pytest.param(rows, id=name) for name, rows in forms()])
def test_every_form_has_the_same_tokens_and_costs(rows, model):
    expected = costs_of_rows(ROWS, model)
    found = costs_of_rows(rows, model)
    assert np.array_equal(found.llm_ns, expected.llm_ns)
    tokens, lengths = zip(*batches_of_ids(held(rows), "input_ids"), strict=True)
    assert np.concatenate(lengths).tolist() == LENGTHS
    assert np.concatenate(tokens).tolist() == [token for row in ROWS for token in row["input_ids"]]


def test_arrays_of_a_shape_are_counted(model):
    features = datasets.Features({"input_ids": datasets.Array2D((1, 5), "int64")})
    column = [np.ones((1, 5), dtype=np.int64)] * 3
    rows = datasets.Dataset.from_dict({"input_ids": column}, features=features)
    ((_, lengths),) = batches_of_ids(rows, "input_ids")
    assert lengths.tolist() == [5, 5, 5]
    assert len(costs_of_rows(rows, model).llm_ns) == 3


def test_a_split_has_its_own_rows(model):
    split, _ = random_split(ROWS, [3, 1], torch.Generator().manual_seed(1))
    expected = costs_of_rows([ROWS[index] for index in split.indices], model)
    assert np.array_equal(costs_of_rows(split, model).llm_ns, expected.llm_ns)


def test_a_row_without_tokens_is_named(model):
    with pytest.raises(ValueError, match="row 2 has no `input_ids`, must have a list of tokens"):
        costs_of_rows(table([[1], [2, 3], None, [4]]), model)


def test_a_row_of_no_tokens_costs_nothing(model):
    assert costs_of_rows(table([[1], [], [4]]), model).llm_ns[1] == 0


def test_rows_that_change_when_they_are_read_are_told(model):
    rows = table([[1, 2, 3]]).with_transform(
        lambda batch: {"input_ids": [ids[:1] for ids in batch["input_ids"]]}
    )
    with pytest.warns(UserWarning, match="`input_ids` is counted as it is stored"):
        costs_of_rows(rows, model)


@pytest.mark.parametrize("name", ["chosen_ids", "length"])
def test_columns_that_change_when_they_are_read_are_told(name, model):
    """Of pairs and of stored lengths, too, whatever the function does with a column alone."""

    def fail(batch):
        raise KeyError(batch)

    columns = {"length": [3, 4]} if name == "length" else {n: [[1], [2]] for n in (name, "rejected_ids")}
    rows = datasets.Dataset.from_dict(columns).with_transform(fail)
    with pytest.warns(UserWarning, match=f"`{name}` is counted as it is stored"):
        costs_of_rows(rows, model)


@pytest.mark.parametrize("way", ["in memory", "in files", "in turn"])
def test_chats_that_change_when_they_are_read_are_refused(way, model, tmp_path):
    """By the line, by a script that knows nothing of it, and by `dflop.costs`."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = datasets.Dataset.from_list([{"messages": turns}] * 4)
    if way == "in files":
        rows.save_to_disk(tmp_path / "rows")
        rows = datasets.load_from_disk(tmp_path / "rows")
    plain, rows = rows, rows.with_transform(lambda batch: batch)
    with pytest.raises(
        ValueError, match="changes its rows when they are read .* measured as they are stored"
    ):
        dflop.costs(rows, model_dir=tmp_path)
    arguments = TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to=[])
    given = ConcatDataset([plain, rows]) if way == "in turn" else rows
    trainer = Trainer(model, arguments, train_dataset=given)
    refusal = r"`train_dataset` changes its rows when they are read .* give `costs`: .*when_loaded=True\)"
    with pytest.raises(ValueError, match=refusal):
        balance(trainer)
    with balanced_trainers(), pytest.raises(ValueError, match=f"{refusal}.*`--when-loaded`"):
        trainer.train()


def test_others_name_the_ways_out(model):
    with pytest.raises(ValueError, match=r"a `TensorDataset` whose rows say nothing.*`--when-loaded`"):
        costs_of_rows(TensorDataset(torch.ones(4, 3)), model)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": None}, "`sampler` is given, leave it out: dflop chooses the samples"),
        ({"num_worker": 2}, "`num_worker` is no option that is known: did you mean `num_workers`?"),
        ({"is_paded": True}, "did you mean `is_padded`?"),
        ({"zzz": 1}, "there are collate_fn, drop_last, generator"),
    ],
)
def test_an_option_that_nobody_knows_is_refused(options, said):
    with pytest.raises(TypeError) as error:
        balanced_loader([1, 2], [(0, 1), (0, 1)], batch_size=1, **options)
    assert said in str(error.value)


def test_a_model_of_text_is_measured_without_an_encoder(model):
    def batch(index):
        ids = torch.tensor([ROWS[index]["input_ids"]])
        return {"input_ids": ids, "labels": ids}

    found = measure_cost(model, batch, [(0, n) for n in LENGTHS])
    assert "encoder: no sample has tokens for it; LLM " in str(found)
    assert "nan" not in str(found)
