"""What a trainer reads is balanced when it is there: streams, and datasets that make their samples on the fly.

Each trainer is transformers' own on two ranks. Its steps have the samples that they have without the line, so
parameters and losses equal those without it, or those of one process that computes each sample alone.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import tiny_text
import torch
from ranks import free_port, results, run_ranks
from test_trainers import NUM_RANKS, TOLERANCE, as_launched, check, losses_of
from torch.utils.data import Dataset, IterableDataset
from trainer_settings import BATCH_SIZE, trainer_arguments

import warm
from dflop.integrations import remove_padding
from dflop.integrations.read_rows import ReadRows
from dflop.integrations.sent_rows import _packed, _unpacked
from dflop.integrations.transformers import balance

SHARED_OUT = {"accelerator_config": {"dispatch_batches": False}}
"""Every rank reads a stream, and keeps its share; by default rank 0 reads it for all."""


class Stream(IterableDataset):
    """Has no length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


class OnTheFly(Dataset):
    """Makes a sample when it is asked for; tensors, as the training scripts of many models have them."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {name: torch.tensor(value) for name, value in self.rows[index].items()}


def collate(rows):
    return tiny_text.collate([{k: torch.as_tensor(v).tolist() for k, v in row.items()} for row in rows])


def with_shifted(rows):
    """The labels twice, as collations for long sequences have them."""
    batch = tiny_text.collate(rows)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return {**batch, "shift_labels": shifted}


def emptying(rows):
    """Takes out of the samples what it collates, as collations of media do."""
    return tiny_text.collate([{name: row.pop(name) for name in tuple(row)} for row in rows])


def sizes_of(trainer):
    """Notes the real tokens of each microbatch."""
    found = []
    step = trainer.training_step

    def training_step(model, inputs, *given, **named):
        found.append(int(inputs["attention_mask"].sum()))
        return step(model, inputs, *given, **named)

    trainer.training_step = training_step
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (OnTheFly, {"num_train_epochs": 2}),
        (OnTheFly, {"num_train_epochs": 1, "dataloader_num_workers": 1, "gradient_accumulation_steps": 1}),
        (Stream, {"max_steps": 5}),
        (Stream, {"max_steps": 5, **SHARED_OUT, "dataloader_num_workers": 1}),
    ],
    ids=["on the fly", "workers", "stream", "stream shared out"],
)
def test_steps_are_those_of_the_trainer(kind, options, tmp_path, quiet):
    """The same losses and parameters, with more even microbatches."""
    from transformers import Trainer

    # Where a stream ends inside of a step, the trainer repeats samples to fill it, and the line does not.
    samples, port = tiny_text.Samples(36 if kind is Stream else 38), free_port()

    def run(rank):
        as_launched(rank, port)
        found = []
        for is_balanced in (False, True):
            # By default transformers refuses a stream whose batches differ in width.
            mine = options if is_balanced else {**options, **SHARED_OUT}
            arguments = trainer_arguments(tmp_path / f"{rank}{is_balanced}", **mine)
            trainer = Trainer(tiny_text.make_model(), arguments, collate, kind(samples.rows))
            if is_balanced:
                balance(trainer, when_loaded=True)
                remove_padding(trainer.model)
            sizes = sizes_of(trainer)
            trainer.train()
            parameters = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
            found.append((losses_of(trainer), parameters, sizes))
        return found

    ranks = results(run_ranks(NUM_RANKS, run, tmp_path / "ranks"))
    for theirs, ours in ranks:
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert tiny_text.difference(ours[1], theirs[1]) <= TOLERANCE

    def unevenness(arm):
        """How many tokens the fuller rank has more than the other, over all steps."""
        num = options.get("gradient_accumulation_steps", 2)
        sizes = [torch.tensor(rank[arm][2]) for rank in ranks]
        by_step = [[int(part.sum()) for part in one.split(num)] for one in sizes]
        return sum(abs(one - other) for one, other in zip(*by_step, strict=True))

    assert sum(map(sum, (rank[0][2] for rank in ranks))) == sum(map(sum, (rank[1][2] for rank in ranks)))
    assert unevenness(1) < unevenness(0) / 2


def test_a_stream_that_ends_on_one_rank_first(tmp_path, quiet):
    """Shards of unequal lengths: the ranks go on together, each sample is trained once, and nobody waits for ever."""
    import datasets
    from transformers import Trainer

    samples, port = tiny_text.Samples(14), free_port()
    first, second = samples.rows[:9], samples.rows[9:]
    # A step has what both ranks read: three samples each, until the second has two, and then none.
    steps = [[0, 1, 2, 9, 10, 11], [3, 4, 5, 12, 13], [6, 7, 8]]
    more = [[0], [1]]
    # Two microbatches a step; behind the end the stream is read again.
    in_two = [[0, 1, 2, 3, 9, 10, 11, 12], [4, 5, 6, 7, 13], [8], [0, 1, 2, 3, 9, 10, 11, 12]]
    expected = [tiny_text.reference(samples, steps) for steps in (steps, more, in_two)]

    def of_shards(shards):
        for shard in shards:
            yield from shard

    def run(rank):
        as_launched(rank, port)
        found = []
        for shards, batch_size, accumulation, num_steps, then, padded in (
            ([first, second], 3, 1, 3, expected[0], tiny_text.collate),
            # The last steps have one sample for two ranks.
            ([samples.rows[:2], []], 1, 1, 2, expected[1], with_shifted),
            ([first, second], 2, 2, 4, expected[2], emptying),
        ):
            options = {"per_device_train_batch_size": batch_size, "max_steps": num_steps, **SHARED_OUT}
            arguments = trainer_arguments(
                tmp_path / f"{rank}{num_steps}", gradient_accumulation_steps=accumulation, **options
            )
            stream = datasets.IterableDataset.from_generator(of_shards, gen_kwargs={"shards": shards})
            trainer = Trainer(tiny_text.make_model(), arguments, padded, stream)
            balance(trainer)
            trainer.train()
            gap = tiny_text.difference(dict(trainer.model.named_parameters()), then[1])
            found.append((losses_of(trainer), gap))
        return found

    ranks = results(run_ranks(NUM_RANKS, run, tmp_path / "ranks"))
    for case, of_case in enumerate(expected):
        check([rank[case] for rank in ranks], of_case)


def test_a_run_resumes_inside_an_epoch(tmp_path, quiet):
    """As the trainer itself resumes: it skips what was read."""
    from transformers import Trainer

    samples, port = tiny_text.Samples(), free_port()
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def run(rank):
        as_launched(rank, port)

        def train(**named):
            arguments = trainer_arguments(tmp_path / "out", **options)
            trainer = Trainer(tiny_text.make_model(), arguments, tiny_text.collate, Stream(samples.rows))
            balance(trainer)
            trainer.train(**named)
            return {name: one.detach().clone() for name, one in trainer.model.named_parameters()}

        whole = train()
        return tiny_text.difference(train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2")), whole)

    assert max(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks"))) <= TOLERANCE


def test_a_stream_that_is_a_part_already_is_refused(tmp_path, quiet):
    """It would be divided again; the whole stream is trained by two ranks, and a part by one."""
    import datasets
    from datasets.distributed import split_dataset_by_node
    from transformers import Trainer

    rows, port, alone = tiny_text.Samples(8).rows, free_port(), free_port()

    def run(rank, port, num_ranks):
        as_launched(rank, port, num_ranks)
        whole = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)
        part = split_dataset_by_node(whole, rank=rank, world_size=2)
        arguments = trainer_arguments(tmp_path, max_steps=1)
        trainers = [
            Trainer(tiny_text.make_model(), arguments, tiny_text.collate, one) for one in (whole, part)
        ]
        balance(trainers[0])
        if num_ranks == 1:
            balance(trainers[1]).train()
            return True
        with pytest.raises(
            ValueError, match=r"is one of 2 parts \(`split_dataset_by_node`\).* Give it the whole stream"
        ):
            balance(trainers[1])
        return True

    assert all(results(run_ranks(NUM_RANKS, lambda rank: run(rank, port, 2), tmp_path / "two")))
    assert all(results(run_ranks(1, lambda rank: run(rank, alone, 1), tmp_path / "one")))


def test_what_cannot_be_balanced_when_it_is_loaded(tmp_path, quiet):
    """By name, before training or in its first step."""
    from transformers import Trainer

    samples = tiny_text.Samples(8)
    port = free_port()

    def run(rank):
        as_launched(rank, port, 1)

        def make(rows):
            return Trainer(tiny_text.make_model(), trainer_arguments(tmp_path, max_steps=1), list, rows)

        with pytest.raises(ValueError, match="`costs` is given, and samples are balanced when"):
            balance(make(Stream(samples.rows)), samples.costs)
        with pytest.raises(ValueError, match="`meets` is given"):
            balance(make(OnTheFly(samples.rows)), when_loaded=True, meets="phase")
        with pytest.raises(ValueError, match="has no length, .* leave `when_loaded=False` out"):
            balance(make(Stream(samples.rows)), when_loaded=False)
        with pytest.raises(ValueError, match="the collation gives a `list` without `input_ids`"):
            balance(make(Stream([{"text": "a"}] * 8))).train()
        dispatched = make(OnTheFly(samples.rows))
        dispatched.accelerator.dataloader_config.dispatch_batches = True
        with pytest.raises(
            ValueError, match="`dispatch_batches` is True, must be left out for a dataset with"
        ):
            balance(dispatched, when_loaded=True).train()
        return True

    assert results(run_ranks(1, run, tmp_path / "ranks")) == [True]


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import tiny_text, torch
from trainer_settings import trainer_arguments
from transformers import Trainer

model = tiny_text.make_model()
num_rows = []
model.model.layers[0].register_forward_pre_hook(lambda _, given: num_rows.append(len(given[0])))
trainer = Trainer(model, trainer_arguments(sys.argv[1]), tiny_text.collate, tiny_text.Samples().rows)
trainer.train()
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
torch.save((losses, trainer.model.state_dict(), sys.argv[2:], num_rows), sys.argv[1] + ".pt")
"""


def test_a_script_that_knows_nothing_of_dflop(tmp_path, quiet):
    """`python -m dflop.integrations.script`: rows are counted, batches balanced, padding removed; then all is as before."""
    from transformers import Trainer

    from dflop.integrations import script

    samples, port = tiny_text.Samples(), free_port()
    expected = tiny_text.reference(
        samples, tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * 2, 2, seed=3)
    )
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    page = (Path(__file__).parents[2] / "docs/frameworks.md").read_text()
    command = re.search(r"^torchrun --nproc-per-node 8 -m dflop.integrations.script (.*)$", page, flags=re.M)
    assert command
    lines, own = command[1].split(" train.py ")
    theirs = Trainer.train

    def run(rank):
        as_launched(rank, port)
        script.main([*lines.split(), str(path), str(tmp_path / f"out{rank}"), *own.split()])
        losses, parameters, arguments, num_rows = torch.load(tmp_path / f"out{rank}.pt", weights_only=True)
        assert arguments == own.split()
        assert set(num_rows) == {1}, "one row of real tokens enters the layers"
        assert Trainer.train is theirs
        return losses, tiny_text.difference(parameters, expected[1])

    check(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")), expected)


def test_a_script_without_a_trainer_says_so(tmp_path, capsys, monkeypatch):
    """And one that is not there."""
    from dflop.integrations import script

    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "train.py"
    path.write_text("import sys\nassert sys.argv[1:] == ['--a', '1']\n")
    script.main([str(path), "--a", "1"])
    assert "trained with no trainer of transformers: nothing was balanced" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="is no file: name the script"):
        script.main([str(tmp_path / "none.py")])


@pytest.mark.parametrize("lines", ["first", "all", "fsdp2"])
def test_pictures_and_text_alone(lines, tmp_path, quiet, monkeypatch):
    """A third of the samples is of text alone. Pixels travel with their samples; the encoder's work counts."""
    from shards import whole_of
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Trainer

    from dflop.integrations import balance_encoder, cost_of_parameters

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    from tiny import Samples, make_model
    from tiny import collate as padded

    samples, port = Samples(24), free_port()
    stream = Stream([samples[i] for i in range(24)])
    # Evaluated are a sample with pictures on one rank, text alone on the other.
    held_back = [
        next(s for s in map(samples.__getitem__, range(24)) if bool(len(s["pixel_values"])) == has)
        for has in (True, False)
    ]
    options = {
        "max_steps": 2,
        "learning_rate": 0.05,
        "ddp_find_unused_parameters": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 1,
        **SHARED_OUT,
    }

    def run(rank):
        as_launched(rank, port)
        found = []
        for is_balanced in (False, True):
            torch.manual_seed(0)
            model = make_model()
            is_sharded = is_balanced and lines == "fsdp2"
            if is_sharded:
                mesh = init_device_mesh("cpu", (NUM_RANKS,))
                for layer in [*model.model.vision_tower.encoder.layer, *model.model.language_model.layers]:
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            arguments = trainer_arguments(tmp_path / f"{rank}{is_balanced}", **options)
            trainer = Trainer(model, arguments, padded, stream, held_back)
            if is_sharded:
                # accelerate shards nothing on a CPU: the model comes sharded, and is not to be wrapped again.
                trainer.accelerator.prepare_model = lambda model, **_: model
            if is_balanced:
                if lines == "all":
                    balance_encoder(model)
                    remove_padding(model)
                balance(trainer, is_padded=None if lines == "all" else False)
            work = []
            step = trainer.training_step

            def training_step(model, inputs, *given, step=step, work=work, **named):
                # Tiles have 16 patches.
                num_patches = 16 * len(inputs.get("pixel_values", ()))
                work.append(sum(cost((num_patches, int(inputs["attention_mask"].sum())))))
                return step(model, inputs, *given, **named)

            trainer.training_step = training_step
            trainer.train()
            losses = [
                one
                for entry in trainer.state.log_history
                for one in (entry.get("loss"), entry.get("eval_loss"))
                if one
            ]
            found.append((losses, whole_of(dict(model.named_parameters())), work))
        return found

    cost = cost_of_parameters(make_model())
    ranks = results(run_ranks(NUM_RANKS, run, tmp_path / "ranks"))
    for theirs, ours in ranks:
        assert len(theirs[0]) == 4
        assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
        assert tiny_text.difference(ours[1], theirs[1]) <= TOLERANCE
    if lines == "first":
        # Two microbatches a step: work of the fuller rank over that of the other.
        uneven = [
            sum(
                abs(sum(one) - sum(other))
                for one, other in zip(*[(w[:2], w[2:]) for w in works], strict=True)
            )
            for works in ([rank[arm][2] for rank in ranks] for arm in (0, 1))
        ]
        assert uneven[1] < uneven[0] / 2


def test_samples_of_every_kind(tmp_path, quiet):
    """A sample keeps its type and what it holds. One token a picture is refused. `image_id` is no picture."""
    from transformers import BatchEncoding, Trainer

    samples = tiny_text.Samples(8)
    port = free_port()

    class Named(Stream):
        def __iter__(self):
            for number, row in enumerate(self.rows):
                yield BatchEncoding({**row, "image_id": torch.tensor(number), "text": None})

    def attributes(rows):
        assert all(row.text is None and row["image_id"].dim() == 0 for row in rows)
        return tiny_text.collate([{"input_ids": row.input_ids, "labels": row.labels} for row in rows])

    def run(rank):
        as_launched(rank, port)
        arguments = trainer_arguments(tmp_path / str(rank), max_steps=1, gradient_accumulation_steps=1)
        trainer = Trainer(tiny_text.make_model(), arguments, attributes, Named(samples.rows))
        balance(trainer).train()
        # Its iterator is at its end; a later call asks nobody.
        loaded = trainer.get_batch_samples.__self__
        loaded._ended = ended = iter(())
        assert loaded.step(ended, 1, "cpu")[0] == []
        loaded.spread.media = {5: 1.0}
        small = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "images": ["one picture"]}
        # Pictures of one token each pass beside others of more.
        loaded._size(small), loaded._size({**small, "input_ids": [5, 5, 7]})
        assert (loaded._num_tokens, loaded._num_media) == (3, 2)
        loaded._num_tokens = loaded._num_media = 0
        pictures = [small] * 6
        with pytest.raises(ValueError, match="the rows have 6 media and 6 tokens for them"):
            loaded.step(iter([ReadRows(pictures)]), 1, "cpu")
        return len(losses_of(trainer))

    assert results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")) == [1, 1]


def test_samples_cross_from_a_worker_as_bytes():
    """A tensor alone takes a file descriptor each; a view takes its own numbers with it, and no others."""
    whole = torch.arange(1_000_000)
    read = ReadRows([{"view": whole[:3], "list": [whole[3:5]], "text": "a"}])
    sent = pickle.dumps(read)
    assert len(sent) < 10_000
    (row,) = pickle.loads(sent).rows
    assert row["view"].tolist() == [0, 1, 2]
    assert row["list"][0].tolist() == [3, 4]
    assert row["text"] == "a"
    # Between ranks too.
    packed = _packed(read.rows[0], torch.device("cpu"))
    assert len(packed) < 10_000
    assert _unpacked(packed)["list"][0].tolist() == [3, 4]


IMPORTS = """
import os, sys
assert "transformers" not in sys.modules or "warm" in sys.modules, "nothing imports it before"
sys.path.insert(0, {tests!r})
import tiny_text
from trainer_settings import trainer_arguments
from transformers import Trainer
from dflop.integrations.transformers import balance

data = tiny_text.Samples(8)
options = {{"ddp_backend": None, "num_train_epochs": 1}}
trainer = Trainer(tiny_text.make_model(), trainer_arguments(sys.argv[1], **options), tiny_text.collate, data)
theirs = balance(trainer, data.costs).get_train_dataloader
trainer.train()
assert trainer.get_train_dataloader is theirs
made = Trainer(None, trainer_arguments(sys.argv[1], **options), tiny_text.collate, data.rows, model_init=tiny_text.make_model)
try:
    made.train()
except ValueError as error:
    print(error)
"""


def test_a_script_imports_transformers_when_it_likes(tmp_path):
    """What it sets before holds; a trainer that it balances itself stays as it is; `model_init` is refused."""
    path = tmp_path / "train.py"
    path.write_text(IMPORTS.format(tests=str(Path(__file__).parent)))
    asked = ["-m", "dflop.integrations.script", "--remove-padding", str(path), str(tmp_path / "out")]
    done = warm.run(asked, check=True)
    assert "trained with no trainer" not in done.stderr
    assert "`remove_padding` is for a model that is there: leave it out" in done.stdout
