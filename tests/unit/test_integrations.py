"""Integrations that need one process: parts of even work, Energon's packs, torchtitan's loader, the loss."""

from __future__ import annotations

import random
import subprocess
import sys
from heapq import heappop, heappush
from importlib import import_module
from importlib.util import find_spec
from itertools import combinations

import pytest

from dflop import ScheduleError
from dflop.integrations.energon import even_packs
from dflop.integrations.even_parts import equal_parts, even_parts


def lengths_of(count, seed):
    draw = random.Random(seed)
    return [1 + int(draw.lognormvariate(6, 1)) for _ in range(count)]


def differencing(lengths, num_parts, equal_size):
    """The loads of Karmarkar and Karp's method, which verl uses, written from its description."""
    order = sorted(lengths, reverse=True)
    step = num_parts if equal_size else 1
    heap = []
    for start in range(0, len(order), step):
        answer = sorted(order[start : start + step] + [0] * (num_parts - step), reverse=True)
        heappush(heap, (answer[-1] - answer[0], start, answer))
    while len(heap) > 1:
        _, first, mine = heappop(heap)
        _, _, theirs = heappop(heap)
        joined = sorted((a + b for a, b in zip(mine, reversed(theirs), strict=True)), reverse=True)
        heappush(heap, (joined[-1] - joined[0], first, joined))
    return heap[0][2]


def parts_of(lengths, num_parts, equal_size):
    """Of work in the LLM alone, as verl has it."""
    divide = equal_parts if equal_size else even_parts
    return divide([0] * len(lengths), lengths, num_parts)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize(("count", "num_parts"), [(8, 8), (12, 4), (64, 8), (256, 16), (40, 2), (5, 1)])
def test_parts_keep_the_promises_of_verl(count, num_parts, equal_size):
    """As many parts as asked, each position once, ascending, none empty, of equal size where asked."""
    for seed in range(5):
        lengths = lengths_of(count, seed)
        parts = parts_of(lengths, num_parts, equal_size)
        assert len(parts) == num_parts
        assert sorted(i for part in parts for i in part) == list(range(count))
        assert all(part == sorted(part) and part for part in parts)
        if equal_size:
            assert {len(part) for part in parts} == {count // num_parts}
        # Never worse than what it stands in for.
        loads = [sum(lengths[i] for i in part) for part in parts]
        assert max(loads) <= max(differencing(lengths, num_parts, equal_size))


def test_parts_are_more_even_than_differencing():
    """Over 20 draws of 128 lengths in 16 parts the excess over the mean is at most half."""
    for equal_size in (True, False):
        ours = theirs = 0.0
        for seed in range(20):
            lengths = lengths_of(128, seed)
            mean = sum(lengths) / 16
            bound = max(mean, max(lengths))
            parts = parts_of(lengths, 16, equal_size)
            ours += max(sum(lengths[i] for i in part) for part in parts) / bound - 1
            theirs += max(differencing(lengths, 16, equal_size)) / bound - 1
        assert ours <= theirs / 2


@pytest.mark.parametrize("equal_size", [True, False])
def test_both_components_are_even(equal_size):
    """Encoder and LLM work of 64 samples in 8 parts, each below 1.1 of its mean; of the sum alone one would not be."""
    for seed in range(5):
        encoder = [length if place % 3 else 0 for place, length in enumerate(lengths_of(64, seed))]
        encoder = [min(work, 1500) for work in encoder]
        llm = [min(work, 1500) for work in lengths_of(64, seed + 100)]
        parts = (equal_parts if equal_size else even_parts)(encoder, llm, 8)
        for work in (encoder, llm):
            assert max(sum(work[i] for i in part) for part in parts) <= 1.1 * sum(work) / 8


def test_equal_parts_are_the_best_where_all_can_be_tried():
    """Of six samples in two parts of three, against each of the ten ways."""
    for seed in range(20):
        draw = random.Random(seed)
        work = [[draw.randrange(1, 50) for _ in range(6)] for _ in range(2)]

        def heaviest(part, work=work):
            other = set(range(6)) - set(part)
            return sum(max(sum(one[i] for i in part), sum(one[i] for i in other)) for one in work)

        best = min(map(heaviest, combinations(range(6), 3)))
        found = heaviest(equal_parts(*work, 2)[0])
        # Swaps of one pair reach the best or nearly so.
        assert best <= found <= 1.2 * best


def test_a_cap_on_tokens_is_kept():
    """Or there is an error."""
    tokens = [5, 5, 4, 4, 3, 3]
    parts = even_parts([0, 90, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], 3, tokens, 8)
    assert {sum(tokens[i] for i in part) for part in parts} == {8}
    with pytest.raises(ScheduleError):
        even_parts([0] * 6, [1] * 6, 3, tokens, 7)


def test_parts_refuse_what_verl_refuses():
    """With the same kind of error."""
    with pytest.raises(AssertionError, match=r"number of items:\[2\] < k_partitions:\[3\]"):
        parts_of([1, 2], 3, equal_size=False)
    with pytest.raises(AssertionError, match="5 % 2 != 0"):
        parts_of([1, 2, 3, 4, 5], 2, equal_size=True)
    # Zeros weigh nothing, and no part may be empty.
    assert sorted(map(len, parts_of([9, 0, 0], 3, equal_size=False))) == [1, 1, 1]


def test_verl_and_the_name_of_each_line_need_no_torch():
    """Where verl is not loaded, its line does nothing."""
    code = (
        "import sys, dflop.integrations, dflop.integrations.verl, dflop.integrations.energon\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_without_torch_the_lines_say_what_brings_it():
    """What cuts batches alone still works there."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "lines = ['dflop.BalancedStream', 'dflop.integrations.balance_encoder', 'dflop.integrations.costs_of_rows']\n"
        "lines += [f'dflop.integrations.{name}.balance' for name in ('accelerate', 'lightning', 'torchtitan', 'transformers')]\n"
        "for line in lines:\n"
        "    module, _, name = line.rpartition('.')\n"
        "    try: exec(f'from {module} import {name}')\n"
        "    except ModuleNotFoundError as error: print(line, error.name, error)\n"
        "import dflop.integrations.verl, dflop.integrations.energon\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    said = done.stdout.splitlines()
    assert len(said) == 7, said
    needs = " torch `torch` is not installed, which this part of dflop needs: pip install 'dflop[train]'"
    assert all(line.endswith(needs) for line in said), said


@pytest.mark.skipif(find_spec("llamafactory") is not None, reason="LLaMA-Factory is installed")
def test_the_command_without_llamafactory_says_what_to_install():
    """The newcomer types it in the environment that has dflop alone."""
    command = [sys.executable, "-m", "dflop.integrations.llamafactory", "train.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = "`llamafactory` is not installed beside dflop: pip install llamafactory==0.9.5\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("line", ["accelerate", "transformers"])
def test_a_missing_accelerate_is_told_with_what_to_install(line, monkeypatch):
    ours = {f"dflop.integrations.{name}" for name in ("accelerate", "transformers")}
    for name in [name for name in sys.modules if name in ours or name.startswith("accelerate.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModuleNotFoundError, match=r"`accelerate`.*pip install 'dflop\[integrations\]'"):
        import_module(f"dflop.integrations.{line}")


def test_packs_are_even_and_keep_the_limit_of_tokens():
    """Packs of 128 mixed samples lie within 5 % of each other's work; the limit is hard."""
    draw = random.Random(0)
    samples = [(50 + int(draw.lognormvariate(5, 1)), draw.choice([0, 0, 700, 3_000])) for _ in range(128)]
    total = sum(tokens + encoder for tokens, encoder in samples)
    packs = even_packs(samples, sum, total / 10)
    assert sorted(s for pack in packs for s in pack) == sorted(samples)
    work = [sum(map(sum, pack)) for pack in packs]
    assert len(packs) == 10
    assert max(work) <= 1.05 * min(work)

    capped = even_packs(samples, sum, total / 2, tokens=lambda s: s[0], tokens_max=5_000)
    assert sorted(s for pack in capped for s in pack) == sorted(samples)
    assert all(sum(tokens for tokens, _ in pack) <= 5_000 for pack in capped)
    # Eight samples of seven tokens under a limit of eight are eight packs.
    assert len(even_packs([7] * 8, float, 100.0, tokens=int, tokens_max=8)) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"work_per_pack": 0}, "`work_per_pack` is 0, must be above 0"),
        ({"work_per_pack": 1, "tokens_max": 5}, "`tokens_max` is 5: give `tokens` too"),
        ({"work_per_pack": 1, "tokens_max": 5, "tokens": int}, "sample 1 of the buffer has 9 tokens, `tok"),
    ],
)
def test_packs_refuse_what_cannot_be(arguments, message):
    """Rule and value."""
    with pytest.raises(ValueError, match=message):
        even_packs([3, 9], float, **arguments)


def test_a_task_encoder_of_energon_packs_evenly():
    """The hook is Energon's own: its task encoder calls what the mixin defines."""
    energon = pytest.importorskip("megatron.energon")
    from dflop.integrations.energon import BalancedPacking

    class Encoder(BalancedPacking, energon.DefaultTaskEncoder):
        work_per_pack = 100.0

        def work(self, sample):
            return sample

    packs = Encoder().select_samples_to_pack([50, 50, 70, 30, 100])
    assert sorted(sum(pack) for pack in packs) == [100, 100, 100]
    assert Encoder.select_samples_to_pack is not energon.DefaultTaskEncoder.select_samples_to_pack


def test_the_loader_of_torchtitan_goes_on_on_other_ranks():
    """Built by torchtitan's own `Config.build`; a state of two ranks is loaded on one, each sample once."""
    pytest.importorskip("torchtitan")
    import torch
    from torchtitan.components.dataloader import BaseDataLoader

    from dflop.integrations.torchtitan import BalancedDataLoader

    rows = [[7] * length for length in lengths_of(37, seed=1)]

    def source(tokenizer, seq_len):
        assert (tokenizer, seq_len) == ("t", 64)
        return (
            list(range(37)),
            [(0, len(row)) for row in rows],
            lambda batch: ({"input": batch}, torch.ones(1)),
        )

    def build(num_ranks, rank, accumulation):
        config = BalancedDataLoader.Config(source=source, accumulation=accumulation, num_epochs=2, seed=5)
        return config.build(
            dp_world_size=num_ranks,
            dp_rank=rank,
            tokenizer="t",
            seq_len=64,
            local_batch_size=2,
            snapshot_every_n_steps=1,
        )

    two = [build(2, rank, 2) for rank in range(2)]
    assert isinstance(two[0], BaseDataLoader)
    readers = [iter(loader) for loader in two]
    seen = [i for _ in range(6) for reader in readers for i in next(reader)[0]["input"]]
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1]
    one = build(1, 0, 4)
    one.load_state_dict(states[0])
    seen += [i for inputs, _ in one for i in inputs["input"]]
    assert sorted(seen) == sorted([*range(37)] * 2)
    # After the last batch of an epoch the state stands at the next one's first.
    again = build(1, 0, 4)
    reader = iter(again)
    for _ in range(len(again.sampler)):
        next(reader)
    assert (again.state_dict()["epoch"], again.state_dict()["global_batch"]) == (1, 0)


def test_the_loss_of_parts_is_the_loss_of_the_whole():
    """Uneven parts, each over the tokens of all: their sum is the mean over the label tokens of all."""
    import torch

    from dflop.integrations.loss import num_label_tokens, token_loss

    torch.manual_seed(0)
    logits, labels = torch.randn(5, 9, 11), torch.randint(0, 11, (5, 9))
    labels[torch.rand(5, 9) < 0.4] = -100
    tokens = num_label_tokens([labels[:1], labels[1:]])
    assert int(tokens) == int((labels[:, 1:] != -100).sum())
    whole = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 11), labels[:, 1:].reshape(-1), ignore_index=-100
    )
    parts = [token_loss(logits[:1], labels[:1], tokens), token_loss(logits[1:], labels[1:], tokens)]
    torch.testing.assert_close(sum(parts), whole)
    shifted = token_loss(logits[:, :-1], labels[:, 1:], tokens, num_ranks=4, is_shifted=True)
    torch.testing.assert_close(shifted, 4 * whole)


@pytest.mark.more
def test_steps_of_lightning_that_are_not_whole_are_told():
    """A step of other microbatches than its label tokens were counted of would have another gradient."""
    pl = pytest.importorskip("lightning.pytorch")
    import torch

    from dflop.integrations.lightning import BalancedData

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.row = torch.nn.Parameter(torch.zeros(4))

        def training_step(self, batch, batch_idx):
            labels = torch.ones(len(batch["labels"]), 3, dtype=torch.long)
            logits = self.row.expand(*labels.shape, 4)
            return self.trainer.datamodule.token_loss(logits, labels, batch_idx)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(**settings):
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, use_distributed_sampler=False, **quiet, **settings
        )
        data = [{"labels": torch.ones(3, dtype=torch.long)} for _ in range(12)]
        trainer.fit(Module(), BalancedData(data, [(0, 1)] * 12, batch_size=1))

    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    with pytest.raises(ValueError, match="`accumulate_grad_batches` is 3, the loader was made for 1"):
        fit(max_epochs=2, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
    with pytest.warns(UserWarning, match="leaves 4 batches an epoch, no multiple of .* 3"):
        fit(max_epochs=1, accumulate_grad_batches=3, limit_train_batches=4)
