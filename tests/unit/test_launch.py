"""What the command that starts the ranks does before it starts any."""

from __future__ import annotations

import pytest

from dflop.runtime.launch import _alone_in


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
