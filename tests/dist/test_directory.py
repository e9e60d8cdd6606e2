"""Ranks of an external torchrun and the directory of their run: all are refused together, and nobody trains beside them."""

from __future__ import annotations

import pytest
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, request, run_training, write_demo

from dflop.runtime import trainer
from dflop.runtime.directory import alone_in

HINTS = {
    "trains": "wait until it has ended, or choose another directory with `--out`",
    "held": "continue it with `--resume auto`, choose another directory with `--out`, or pass `--force`",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), 20, 8, 4)


def check_refused(ranks, message, hint):
    """Both end, and one of them says why."""
    assert [rank.result for rank in ranks] == [1, 1], [rank.stderr for rank in ranks]
    assert f"\nerror: [all ranks] {message}\nhint: {hint}\n" in ranks[0].stderr
    assert "error" not in ranks[1].stderr


def test_ranks_of_an_external_torchrun_train_alone_in_their_directory(demo, tmp_path):
    """Beside a command of any kind both ranks are refused; in each step of theirs nobody else gets in."""
    out = tmp_path / "run"

    def before(index):
        if index == 1:
            step = trainer.Optimizer.step

            def stepping(self, number, *more):
                with pytest.raises(OSError, match="another command is training there"), alone_in(out):
                    pass
                (tmp_path / f"step {number}").touch()
                step(self, number, *more)

            trainer.Optimizer.step = stepping

    asked = request(demo, out, steps=2)
    with alone_in(out):
        ranks = run_training(asked, tmp_path / "1")
    check_refused(ranks, f"`{out}`: another command is training there, only one may", HINTS["trains"])
    assert list(out.iterdir()) == []
    # The lock has ended with the command; that of the ranks ends with them.
    ranks = run_training(asked, tmp_path / "2", before)
    assert [rank.result for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [0, 1]
    assert (tmp_path / "step 0").exists()
    assert (tmp_path / "step 1").exists()
    with alone_in(out):
        pass


def test_all_ranks_of_an_external_torchrun_are_refused_where_an_earlier_run_is(demo, tmp_path):
    """Not the first alone, for which the others would wait; and nothing is refused that may be overwritten."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 0}\n')
    ranks = run_training(request(demo, out, may_overwrite=False), tmp_path / "1")
    check_refused(ranks, f"`{out}` holds an earlier run, it would be overwritten", HINTS["held"])
    assert (out / "metrics.jsonl").read_text() == '{"step": 0}\n'
    # One that was ended before its first step is none.
    (out / "metrics.jsonl").write_text("")
    ranks = run_training(request(demo, out, steps=1, may_overwrite=False), tmp_path / "2")
    assert [rank.result for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    ranks = run_training(request(demo, out, steps=2, may_overwrite=True), tmp_path / "3")
    assert [rank.result for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert len(lines(out / "metrics.jsonl")) == 2


def test_a_directory_that_cannot_be_written_is_refused_on_all_ranks(demo, tmp_path):
    (tmp_path / "run").write_text("")
    ranks = run_training(request(demo, tmp_path / "run"), tmp_path / "1")
    message = f"`{tmp_path / 'run'}`: it is no directory, the run must be written there"
    check_refused(ranks, message, "choose another directory with `--out`")
