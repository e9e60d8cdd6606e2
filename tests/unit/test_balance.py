"""`dflop.balance`: what it takes as numbers, and how it refuses the rest."""

from __future__ import annotations

import inspect
import pydoc
import re

import pytest

import dflop

TOP = 2**64 - 1


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "message"),
    [
        (([1, -2], [1, 1], 2), {}, ValueError, f"`encoder_ns[1]` is -2, must be an integer from 0 to {TOP}"),
        (([1, 2], [1, 2**64], 2), {}, ValueError, f"`llm_ns[1]` is {2**64}, must be an integer"),
        (([1.5, 2], [1, 1], 2), {}, TypeError, "`encoder_ns[0]` is 1.5, must be an integer"),
        (([1, 2], [1, float("nan")], 2), {}, TypeError, "`llm_ns[1]` is nan, must be an integer"),
        (([1, 2], 7, 2), {}, TypeError, "`llm_ns` is 7, must be a list of integers"),
        (([[1, 2]], [1], 1), {}, TypeError, "`encoder_ns[0]` is [1, 2], must be an integer"),
        (([1], [1], -1), {}, ValueError, f"`num_buckets` is -1, must be an integer from 1 to {2**32 - 1}"),
        (([1], [1], 0), {}, ValueError, "`num_buckets` is 0, must be an integer from 1"),
        (([1], [1], 1.0), {}, TypeError, "`num_buckets` is 1.0, must be an integer from 1"),
        (([1], [1], 1), {"seed": -1}, ValueError, "`seed` is -1, must be an integer from 0"),
        (([1], [1], 1), {"bytes": [-1]}, ValueError, "`bytes[0]` is -1, must be an integer from 0"),
        (
            ([1], [1], 1),
            {"bucket_tokens_max": -1},
            ValueError,
            "`bucket_tokens_max` is -1, must be an integer",
        ),
    ],
)
def test_what_is_no_cost_is_named(arguments, options, kind, message):
    """Which entry, its value and the rule."""
    with pytest.raises(kind) as caught:
        dflop.balance(*arguments, **options)
    assert str(caught.value).startswith(message)


def test_arrays_are_the_lists_they_are():
    """Tensors and arrays of integers and one dimension; of floats or two dimensions they are refused."""
    torch = pytest.importorskip("torch")
    encoder, llm = [7, 0, 3, 9, 1], [2, 8, 8, 1, 4]
    expected = dflop.balance(encoder, llm, 2).assignment
    for array in (torch.tensor, lambda numbers: torch.tensor(numbers).numpy()):
        assert dflop.balance(array(encoder), array(llm), 2).assignment == expected
        with pytest.raises(TypeError, match=r"`encoder_ns\[0\]` is 7.0, must be an integer"):
            dflop.balance(array([7.0, 1.0]), array([1, 1]), 2)
        with pytest.raises(TypeError, match=r"`llm_ns\[0\]` is \[1, 2\], must be an integer"):
            dflop.balance(array([1]), array([[1, 2]]), 1)
        with pytest.raises(ValueError, match=r"`llm_ns\[1\]` is -1, must be an integer"):
            dflop.balance(array([1, 1]), array([1, -1]), 1)


def test_help_says_what_balance_takes_and_gives():
    """`help(dflop.balance)` stands alone: every argument, what comes back, no file of this project."""
    text = pydoc.render_doc(dflop.balance)
    assert "_native.pyi" not in text + pydoc.render_doc(dflop.Balance)
    for argument in inspect.signature(dflop.balance).parameters:
        assert re.search(rf"^\s+{argument}: \S", text, flags=re.M), argument
    assert "Returns:" in text
    assert "Raises:" in text
    assert dflop.balance([3, 0, 7, 2], [4, 5, 1, 2], 2, meets="pipeline").max_load_ns == 7, "its example"
