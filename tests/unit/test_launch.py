"""What the command that starts the ranks does before it starts any."""

from __future__ import annotations

import pytest

from dflop import Error
from dflop.runtime import worker
from dflop.runtime.directory import alone_in
from dflop.runtime.launch import launch


def test_two_commands_do_not_train_in_one_directory(tmp_path):
    """The second is told what to do, and the directory is free when the first has ended, whatever ended it."""
    out = tmp_path / "runs" / "one"

    def refused():
        with (
            pytest.raises(OSError, match="another command is training there, only one may") as told,
            alone_in(out),
        ):
            pass
        assert told.value.__notes__ == ["wait until it has ended, or choose another directory with `--out`"]

    def interrupted():
        with alone_in(out):
            refused()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with alone_in(out), alone_in(tmp_path / "runs" / "two"):
        assert list(out.iterdir()) == []


def test_a_file_is_no_directory_to_train_in(tmp_path):
    (tmp_path / "run").write_text("")
    with (
        pytest.raises(OSError, match="it is no directory, the run must be written there"),
        alone_in(tmp_path / "run"),
    ):
        pass


def test_a_rank_of_an_external_torchrun_says_which_settings_of_the_profile_it_lacks(monkeypatch, capsys):
    """The first rank says it, once; where nothing is missing there is nothing to say."""
    monkeypatch.setattr(worker, "run", lambda request: 0)
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    request = {"environment": {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0"}}
    for rank, said in (
        ("0", "warning: the profile was measured with MALLOC_MMAP_MAX_ set: times may differ\n"),
        ("1", ""),
    ):
        monkeypatch.setenv("RANK", rank)
        assert launch(request) == 0
        assert capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert launch(request) == 0
    assert capsys.readouterr().err == ""


OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", None, "RANK is set to `0`, and WORLD_SIZE is not: a rank needs both"),
        ("MASTER_ADDR", None, "RANK is set to `0`, and MASTER_ADDR is not: a rank needs both"),
        ("MASTER_PORT", "", "RANK is set to `0`, and MASTER_PORT is not: a rank needs both"),
        ("RANK", "x", "RANK is `x`, must be an integer from 0 to 1"),
        ("RANK", "2", "RANK is `2`, must be an integer from 0 to 1"),
        ("RANK", "-1", "RANK is `-1`, must be an integer from 0 to 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is `0`, must be an integer from 1 to 2147483647"),
        ("WORLD_SIZE", "2.0", "WORLD_SIZE is `2.0`, must be an integer from 1 to 2147483647"),
        ("MASTER_PORT", "65536", "MASTER_PORT is `65536`, must be an integer from 1 to 65535"),
    ],
)
def test_a_rank_without_what_torchrun_gives_it_is_refused(name, value, said, monkeypatch):
    """By the name of the variable, and not with a traceback of PyTorch's, or a wait for ranks that never come."""
    monkeypatch.setattr(worker, "run", lambda request: 0)
    for other, usual in OF_TORCHRUN.items():
        monkeypatch.setenv(other, usual)
    assert launch({"environment": {}}) == 0
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(Error) as refused:
        launch({"environment": {}})
    assert str(refused.value) == said
    (hint,) = refused.value.__notes__
    assert "let `torchrun` start the ranks" in hint
