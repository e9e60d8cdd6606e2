"""One line in everyone's trainer: what is trained is the global batch, whoever computes which of its samples.

Each trainer is the real package on two ranks. After some steps of plain SGD its parameters and its reported losses
equal those of one process that computes every sample of each global batch alone.
"""

from __future__ import annotations

import importlib
import os

import pytest
import tiny_text
import torch
from ranks import environment, free_port, results, run_ranks
from torch import distributed
from trainer_settings import BATCH_SIZE, trainer_arguments, trl_arguments

TOLERANCE, NUM_RANKS = 1e-5, 2


@pytest.fixture(scope="module")
def samples():
    return tiny_text.Samples()


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """What every rank imports, once, before the ranks are forked. Tests do the same with their trainer: it takes seconds."""
    importlib.import_module("accelerate.state")


def as_launched(rank, port, num_ranks=NUM_RANKS):
    """As torchrun starts a rank, with none of what accelerate kept of an earlier test."""
    from accelerate.state import AcceleratorState, GradientState

    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update(environment(rank, num_ranks, port))


def check(found, expected, num_steps=None):
    """`found` is (losses, difference of the parameters) of each rank."""
    losses = expected[0]
    for mine, gap in found:
        assert gap <= TOLERANCE
        assert mine == pytest.approx(losses if num_steps is None else losses[:num_steps], rel=1e-4)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("layout", "num_ranks", "is_padded"),
    [("ddp", 2, True), ("ddp", 4, False), ("fsdp2", 2, False), ("fsdp2", 4, True)],
)
def test_plain_pytorch(layout, num_ranks, is_padded, samples, tmp_path, quiet):
    """DDP and FSDP2 with a loop as people write it, two epochs, two microbatches a step; padding computed or not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from dflop.integrations import balanced_loader, num_label_tokens, remove_padding, token_loss

    accumulation, num_epochs = 2, 2
    steps = tiny_text.global_batches(samples, BATCH_SIZE, num_ranks * accumulation, num_epochs, seed=3)
    expected = tiny_text.reference(samples, steps)
    port = free_port()

    def run(rank):
        as_launched(rank, port, num_ranks)
        distributed.init_process_group("gloo")
        model = tiny_text.make_model()
        unpadded = None if is_padded else remove_padding(model)
        if layout == "ddp":
            model = DistributedDataParallel(model)
        else:
            fully_shard(model.model.layers[0], mesh=init_device_mesh("cpu", (num_ranks,)))
            fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
        optimizer = torch.optim.SGD(model.parameters(), tiny_text.LEARNING_RATE)
        loader = balanced_loader(
            samples,
            samples.costs,
            BATCH_SIZE,
            accumulation=accumulation,
            seed=3,
            collate_fn=tiny_text.collate,
        )
        losses = []
        for epoch in range(num_epochs):
            loader.batch_sampler.set_epoch(epoch)
            batches = list(loader)
            for start in range(0, len(batches), accumulation):
                microbatches = batches[start : start + accumulation]
                tokens = num_label_tokens([m["labels"] for m in microbatches])
                total = torch.zeros(())
                for m in microbatches:
                    logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
                    loss = token_loss(logits, m["labels"], tokens, num_ranks)
                    loss.backward()
                    total += loss.detach() / num_ranks
                distributed.all_reduce(total)
                losses.append(float(total))
                optimizer.step()
                optimizer.zero_grad()
        assert unpadded is None or unpadded.padding_ratio > 1
        return losses, tiny_text.difference(dict(model.named_parameters()), expected[1])

    check(results(run_ranks(num_ranks, run, tmp_path / "ranks")), expected)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("takes_items", [True, False])
def test_transformers_trainer(takes_items, samples, tmp_path, quiet):
    """Models that divide by `num_items_in_batch` themselves, and those that do not (as Qwen2.5-VL).

    The second kind also trains without padding.
    """
    from transformers import Trainer

    from dflop.integrations import remove_padding
    from dflop.integrations.transformers import balance

    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * 2, 2, seed=3)
    expected = tiny_text.reference(samples, steps)
    port = free_port()

    def run(rank):
        as_launched(rank, port)
        model = tiny_text.make_model()
        if not takes_items:
            model.accepts_loss_kwargs = False
            remove_padding(model)
        trainer = Trainer(model, trainer_arguments(tmp_path / f"out{rank}"), tiny_text.collate, samples)
        balance(trainer, samples.costs)
        trainer.train()
        return losses_of(trainer), tiny_text.difference(dict(model.named_parameters()), expected[1])

    check(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")), expected)


def test_metrics_are_those_of_batches_in_arrival_order(tmp_path, quiet):
    """Four ranks: loss, norm of the gradient, learning rate, epoch and evaluation, with the line and without."""
    from torch.utils.data import DataLoader
    from transformers import Trainer

    from dflop.integrations.accelerate import keep_batches
    from dflop.integrations.transformers import balance

    num_ranks = 4
    samples = tiny_text.Samples(40)
    steps = tiny_text.global_batches(samples, BATCH_SIZE, num_ranks, 2, seed=3)
    port = free_port()
    options = {"gradient_accumulation_steps": 1, "max_grad_norm": 1e9, "eval_strategy": "epoch"}

    def run(rank):
        as_launched(rank, port, num_ranks)

        def train(prepare):
            arguments = trainer_arguments(tmp_path / f"out{rank}", **options)
            held_back = tiny_text.Samples(8, seed=1)
            trainer = Trainer(tiny_text.make_model(), arguments, tiny_text.collate, samples, held_back)
            prepare(trainer)
            trainer.train()
            return trainer.state.log_history

        def arrive(trainer):
            # The samples of each step in the order of the data, cut into equal counts.
            epochs = [
                [
                    sorted(step)[rank * len(step) // num_ranks : (rank + 1) * len(step) // num_ranks]
                    for step in epoch
                ]
                for epoch in (steps[: len(steps) // 2], steps[len(steps) // 2 :])
            ]

            class Arrival:
                epoch = 0

                def set_epoch(self, epoch):
                    self.epoch = epoch

                def __len__(self):
                    return len(epochs[0])

                def __iter__(self):
                    return iter(epochs[self.epoch])

            loader = DataLoader(samples, batch_sampler=Arrival(), collate_fn=tiny_text.collate)
            trainer.get_train_dataloader = lambda: keep_batches(trainer.accelerator, loader)

        return train(arrive), train(lambda trainer: balance(trainer, samples.costs))

    names = {"loss", "grad_norm", "learning_rate", "epoch", "step", "eval_loss", "train_loss"}
    for without, with_line in results(run_ranks(num_ranks, run, tmp_path / "ranks")):
        assert len(without) == len(steps) + 3
        for plain, ours in zip(without, with_line, strict=True):
            assert {name for name in plain if name in names} == {name for name in ours if name in names}
            for name in names & set(plain):
                assert ours[name] == pytest.approx(plain[name], rel=TOLERANCE, abs=TOLERANCE), (name, plain)
    assert names <= {name for entry in without for name in entry}


def test_transformers_trainer_resumes_inside_an_epoch(samples, tmp_path, quiet):
    """From a checkpoint of the third step it trains what remained, each sample once."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS, 1, seed=3)
    expected = tiny_text.reference(samples, steps)
    out, port, later = tmp_path / "out", free_port(), free_port()
    options = {"gradient_accumulation_steps": 1, "num_train_epochs": 1, "save_strategy": "steps"}
    options.update(save_steps=3, save_only_model=False)

    def run(rank, port, resumes):
        as_launched(rank, port)
        model = tiny_text.make_model()
        trainer = Trainer(model, trainer_arguments(out, **options), tiny_text.collate, samples)
        balance(trainer, samples.costs)
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-3") if resumes else None)
        return losses_of(trainer), tiny_text.difference(dict(model.named_parameters()), expected[1])

    check(results(run_ranks(NUM_RANKS, lambda rank: run(rank, port, False), tmp_path / "first")), expected)
    check(results(run_ranks(NUM_RANKS, lambda rank: run(rank, later, True), tmp_path / "second")), expected)


def test_a_trainer_resumes_with_the_samples_that_remain_or_not_at_all(tmp_path, quiet):
    """One rank goes on where two stopped: with as many samples a step each comes once, and else it is told."""
    import json

    from transformers import Trainer

    from dflop.integrations.transformers import balance

    samples, out, port = tiny_text.Samples(40), tmp_path / "out", free_port()

    def made(seen, **changes):
        options = {"gradient_accumulation_steps": 1, "num_train_epochs": 1, "save_strategy": "steps"}
        options.update(save_steps=3, save_only_model=False)

        def collate(rows):
            seen.extend(samples.rows.index(row) for row in rows)
            return tiny_text.collate(rows)

        arguments = trainer_arguments(out, **{**options, **changes})
        trainer = Trainer(tiny_text.make_model(), arguments, collate, samples)
        return balance(trainer, samples.costs)

    def first(rank):
        as_launched(rank, port)
        made([], max_steps=3).train()
        return True

    assert results(run_ranks(NUM_RANKS, first, tmp_path / "ranks")) == [True, True]
    # Not those that were collated: accelerate takes a batch before it needs one.
    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS, 1, seed=3)
    trained = {index for step in steps[:3] for index in step}

    def later(**changes):
        seen = []
        trainer = made(seen, **{"save_strategy": "no", **changes})
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-3"))
        return sorted(seen)

    def resume(rank):
        as_launched(rank, alone, 1)
        rest = sorted(set(range(40)) - trained)
        assert later(gradient_accumulation_steps=2) == rest
        assert later(per_device_train_batch_size=2 * BATCH_SIZE) == rest
        with pytest.raises(
            ValueError, match="a run with `global_batch_size` 6, this one has 9: the trainer s"
        ):
            later(gradient_accumulation_steps=3)
        with pytest.raises(ValueError, match="a run with `seed` 3, this one has 4"):
            later(gradient_accumulation_steps=2, seed=4)
        assert trained & set(later(gradient_accumulation_steps=3, ignore_data_skip=True)), "asked for"
        # A trainer that restores its callbacks compares all the same.
        with pytest.raises(ValueError, match="`global_batch_size` 6, this one has 9"):
            later(gradient_accumulation_steps=3, restore_callback_states_from_checkpoint=True)
        kept = out / "checkpoint-3/trainer_state.json"
        state = json.loads(kept.read_text())
        del state["stateful_callbacks"]["BalancedSteps"]
        kept.write_text(json.dumps(state))
        with pytest.warns(UserWarning, match="does not say which samples its steps had"):
            later(gradient_accumulation_steps=2, save_strategy="steps")
        kept = json.loads((out / "checkpoint-6/trainer_state.json").read_text())
        assert kept["stateful_callbacks"]["BalancedSteps"]["args"]["steps"]["global_batch_size"] == 6
        return True

    alone = free_port()
    assert results(run_ranks(1, resume, tmp_path / "alone")) == [True]


def test_a_trainer_that_cannot_be_balanced_says_why(samples, tmp_path, quiet):
    """Rule and value; and a data set of another length than the costs is refused when training begins."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    def trainer(**changes):
        arguments = trainer_arguments(tmp_path, ddp_backend=None, **changes)
        return Trainer(tiny_text.make_model(), arguments, tiny_text.collate, samples)

    endless = trainer()
    endless.train_dataset = iter(samples.rows)
    with pytest.raises(
        ValueError, match="`costs` is given, and samples are balanced when they have been read"
    ):
        balance(endless, samples.costs)
    with pytest.raises(ValueError, match="`train_sampling_strategy` is `group_by_length`, leave it out"):
        balance(trainer(train_sampling_strategy="group_by_length"), samples.costs)
    with pytest.raises(ValueError, match=r"decides it \(`per_device_train_batch_size`\)"):
        balance(trainer(), samples.costs, batch_size=4)
    (without := trainer()).train_dataset = None
    with pytest.raises(ValueError, match="the trainer has no `train_dataset`: give it one"):
        balance(without, samples.costs)
    with pytest.raises(TypeError, match="`trainer` is a `Qwen2ForCausalLM`, must be a `Trainer`"):
        balance(tiny_text.make_model(), samples.costs)
    short = balance(trainer(), samples.costs[:-2])
    with pytest.raises(ValueError, match="costs of 36 samples, and `train_dataset` has 38, must be equal"):
        short.get_train_dataloader()


def test_accelerate(samples, tmp_path, quiet):
    """A loop of accelerate with two microbatches a step; `prepare` deals no batch out twice."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    from dflop.integrations import num_label_tokens, token_loss
    from dflop.integrations.accelerate import balanced

    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * 2, seed=3)
    expected = tiny_text.reference(samples, steps)
    port = free_port()

    def run(rank):
        as_launched(rank, port)
        # The microbatches of a step are taken before the first is computed, as its label tokens are needed.
        plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model = tiny_text.make_model()
        optimizer = torch.optim.SGD(model.parameters(), tiny_text.LEARNING_RATE)
        loader = balanced(
            accelerator, samples, samples.costs, BATCH_SIZE, seed=3, collate_fn=tiny_text.collate
        )
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert len(loader) == len(loader.batch_sampler)
        losses, batches = [], list(loader)
        for start in range(0, len(batches), 2):
            microbatches = batches[start : start + 2]
            tokens = num_label_tokens([m["labels"] for m in microbatches])
            total = torch.zeros(())
            for m in microbatches:
                with accelerator.accumulate(model):
                    logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
                    loss = token_loss(logits, m["labels"], tokens, accelerator.num_processes)
                    accelerator.backward(loss * accelerator.gradient_accumulation_steps)
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.detach() / NUM_RANKS
            losses.append(float(accelerator.reduce(total)))
        return losses, tiny_text.difference(dict(model.named_parameters()), expected[1])

    check(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")), expected)


def test_sft_trainer_of_trl(samples, tmp_path, quiet):
    """TRL's trainer takes the same line: its loss and its collator stay its own; costs are those of its rows."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    from dflop.integrations.transformers import balance

    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS, 1, seed=3)
    expected = tiny_text.reference(samples, steps)
    port = free_port()

    def run(rank):
        as_launched(rank, port)
        model = tiny_text.make_model()
        trainer = SFTTrainer(
            model,
            args=trl_arguments(
                SFTConfig, tmp_path / f"out{rank}", gradient_accumulation_steps=1, num_train_epochs=1
            ),
            data_collator=tiny_text.collate,
            train_dataset=datasets.Dataset.from_list(samples.rows),
            processing_class=tiny_tokenizer(),
        )
        balance(trainer)
        trainer.train()
        return losses_of(trainer), tiny_text.difference(dict(trainer.model.named_parameters()), expected[1])

    check(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks", timeout_s=280)), expected)


def tiny_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, tiny_text.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.more), 2])
def test_lightning(accumulation, samples, tmp_path, quiet):
    """Lightning's DDP, and a second fit that goes on from a checkpoint inside the epoch.

    Two microbatches a step have unequal label tokens: each is divided by those of both, on both ranks.
    """
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from dflop.integrations.lightning import BalancedData

    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * accumulation, 2, seed=3)
    expected = tiny_text.reference(samples, steps)
    ports = [free_port(), free_port()]

    def run(rank, port, resumes):
        as_launched(rank, port)

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = tiny_text.make_model()
                self.losses = []

            def training_step(self, batch, batch_idx):
                logits = self.model(
                    input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                ).logits
                loss = self.trainer.datamodule.token_loss(logits, batch["labels"], batch_idx)
                mean = float(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")) / accumulation
                # That of a step is the sum over its microbatches.
                self.losses.extend([mean] if batch_idx % accumulation == 0 else [self.losses.pop() + mean])
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), tiny_text.LEARNING_RATE)

        module = Module()
        data = BalancedData(samples, samples.costs, BATCH_SIZE, seed=3, collate_fn=tiny_text.collate)
        keep = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=3, save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=NUM_RANKS,
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_epochs=2,
            accumulate_grad_batches=accumulation,
            use_distributed_sampler=False,
            logger=False,
            callbacks=[keep],
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, data, ckpt_path=str(tmp_path / "kept" / "step=3.ckpt") if resumes else None)
        parameters = dict(module.model.named_parameters())
        return module.losses, tiny_text.difference(parameters, expected[1])

    found = results(run_ranks(NUM_RANKS, lambda r: run(r, ports[0], False), tmp_path / "a", timeout_s=280))
    check(found, expected)
    found = results(run_ranks(NUM_RANKS, lambda r: run(r, ports[1], True), tmp_path / "b", timeout_s=280))
    check(found, (expected[0][3:], expected[1]))
