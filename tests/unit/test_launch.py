"""What the command that starts the ranks does before it starts any."""

from __future__ import annotations

import pytest

from dflop.runtime import worker
from dflop.runtime.launch import _alone_in, launch


def test_two_commands_do_not_train_in_one_directory(tmp_path):
    """The second is told what to do, and the directory is free when the first has ended, whatever ended it."""
    out = tmp_path / "runs" / "one"

    def refused():
        with (
            pytest.raises(OSError, match="another command is training there, only one may") as told,
            _alone_in(out),
        ):
            pass
        assert told.value.__notes__ == ["wait until it has ended, or choose another directory with `--out`"]

    def interrupted():
        with _alone_in(out):
            refused()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with _alone_in(out), _alone_in(tmp_path / "runs" / "two"):
        assert list(out.iterdir()) == []


def test_a_file_is_no_directory_to_train_in(tmp_path):
    (tmp_path / "run").write_text("")
    with (
        pytest.raises(OSError, match="it is no directory, the run must be written there"),
        _alone_in(tmp_path / "run"),
    ):
        pass


def test_a_rank_of_an_external_torchrun_says_which_settings_of_the_profile_it_lacks(monkeypatch, capsys):
    """The first rank says it, once; where nothing is missing there is nothing to say."""
    monkeypatch.setattr(worker, "run", lambda request: 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
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
