"""The line in EasyR1, as far as it needs no EasyR1: how it is switched on, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from dflop.integrations import easyr1

HOOK = "worker_process_setup_hook"
OURS = "dflop.integrations.easyr1.balance_batches"


def test_the_environment_of_ray_keeps_what_was_asked():
    """And gets the line."""
    given = {"env_vars": {"NCCL_DEBUG": "WARN"}}
    assert easyr1.runtime_env(given) == {**given, HOOK: OURS}
    assert given == {"env_vars": {"NCCL_DEBUG": "WARN"}}
    assert easyr1.runtime_env() == {HOOK: OURS}
    # Ray asks again where one was given by a job.
    assert easyr1.runtime_env({HOOK: OURS}) == {HOOK: OURS}


def test_another_setup_of_processes_is_refused():
    """Ray has room for one."""
    with pytest.raises(
        ValueError, match=r"has a `worker_process_setup_hook` already \('mine.setup'\), must have none"
    ):
        easyr1.runtime_env({HOOK: "mine.setup"})


def package(folder, *, is_easyr1, has_functions):
    """Modules of a name that EasyR1 has."""
    for module in ("", "utils", "trainer"):
        (folder / "verl" / module).mkdir(parents=True, exist_ok=True)
        (folder / "verl" / module / "__init__.py").write_text("")
    functions = "def get_seqlen_balanced_partitions(*given): return given\n" * has_functions
    (folder / "verl/utils/seqlen_balancing.py").write_text(functions)
    if is_easyr1:
        (folder / "verl/trainer/ray_trainer.py").write_text("class RayPPOTrainer: pass\n")


@pytest.mark.parametrize(
    ("is_easyr1", "has_functions", "code", "said"),
    [
        (
            False,
            True,
            "balance_batches(); import verl.utils.seqlen_balancing",
            "this `verl` is not EasyR1: verl itself takes `actor_rollout_ref.model.external_lib=",
        ),
        (
            True,
            True,
            "import verl.utils.seqlen_balancing; balance_batches()",
            f"`verl.utils.seqlen_balancing` is imported already: call `{OURS}()` before",
        ),
        (
            True,
            False,
            "balance_batches(); import verl.utils.seqlen_balancing",
            "this version of EasyR1 has no `verl.utils.seqlen_balancing.get_seqlen_balanced_partitions`",
        ),
        (
            True,
            True,
            "balance_batches(); import verl.trainer.ray_trainer",
            "this version of EasyR1 has no `RayPPOTrainer._balance_batch`",
        ),
    ],
)
def test_what_is_not_easyr1_is_refused(is_easyr1, has_functions, code, said, tmp_path):
    """When it is imported, and nothing before."""
    package(tmp_path, is_easyr1=is_easyr1, has_functions=has_functions)
    code = f"from dflop.integrations.easyr1 import balance_batches\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert f"RuntimeError: {said}" in done.stderr


def test_the_line_needs_no_torch():
    """It stands in each process of Ray."""
    code = (
        "import sys; from dflop.integrations.easyr1 import balance_batches\n"
        "balance_batches(); balance_batches()\n"
        "assert 'torch' not in sys.modules and len(sys.meta_path) == before + 1\n"
    )
    subprocess.run(
        [sys.executable, "-c", f"import sys; before = len(sys.meta_path)\n{code}"], check=True, timeout=300
    )


def _work(tokens):
    from dflop.integrations.verl_costs import Work

    return Work.of([(0.0, float(count)) for count in tokens], tokens)


def test_ranks_of_a_ulysses_group_have_its_samples_in_order():
    """They put them one behind the other, and cut mini-batches of them."""
    tokens = [3, 9, 4, 8, 5, 7, 6, 6, 1, 2, 2, 1, 4, 4, 3, 5]
    ranks = easyr1._of_ranks(easyr1._Divided(_work(tokens), num_mini_batches=2, ulysses_size=2), 4)
    assert [len(rank) for rank in ranks] == [4] * 4
    groups = [ranks[0] + ranks[1], ranks[2] + ranks[3]]
    for group in groups:
        assert all(one < other for one, other in pairwise(group))
        assert max(group[:4]) < 8 <= min(group[4:])
    for start in (0, 4):
        assert len({sum(tokens[sample] for sample in group[start : start + 4]) for group in groups}) == 1


def test_other_samples_than_those_counted_are_refused():
    """Else work would be that of others."""
    token = easyr1._DIVIDED.set(easyr1._Divided(_work([2, 4])))
    try:
        with pytest.raises(ValueError, match="EasyR1 divides 2 samples of 5 tokens, dflop counted 2 of 6"):
            easyr1._partitions([2, 3], 2, equal_size=False)
    finally:
        easyr1._DIVIDED.reset(token)


def test_where_no_microbatches_keep_the_cap_those_of_easyr1_are_taken(monkeypatch):
    """With a warning; theirs is by tokens, and its cap is no promise."""
    monkeypatch.setitem(easyr1._theirs, "get_seqlen_balanced_partitions", lambda *_: [[0, 1], [2]])
    token = easyr1._DIVIDED.set(easyr1._Divided(_work([4, 4, 4]).capped(6, 1)))
    try:
        with pytest.warns(UserWarning, match="no 2 microbatches of even work keep the cap of 6 tokens"):
            assert easyr1._partitions([4, 4, 4], 2, equal_size=False) == [[0, 1], [2]]
    finally:
        easyr1._DIVIDED.reset(token)


def test_mini_batches_that_do_not_divide_are_named():
    """Other samples form them then."""
    assert easyr1._num_mini_batches(24, 12, 4) == 2
    # One mini-batch is all there is.
    assert easyr1._num_mini_batches(10, 10, 4) == 1
    for count, size in ((10, 4), (20, 10)):
        with pytest.warns(UserWarning, match=f"{count} samples in mini-batches of {size} on 4 ranks"):
            assert easyr1._num_mini_batches(count, size, 4) == 1
