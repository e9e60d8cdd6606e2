"""Sequence parallelism: rows between the cut maps are shared, whatever their number; what is kept is a part."""

from __future__ import annotations

import pytest
import tiny_llava
import torch
import torch.distributed as dist
from memory_profile import llm_input
from ranks import environment, free_port, results, run_ranks

from dflop.models import load_adapter
from dflop.models.recompute import recomputing
from dflop.models.sequence import rows_of_rank
from dflop.models.split_backward import split_backward
from dflop.models.sums import Sums
from dflop.models.tensor import TensorRank, add_collectives, slices_of
from dflop.profiling.memory import saved_for_backward

CPU = torch.device("cpu")
WIDTH, RANKS = 48, 4
LENGTHS = (1, 2, 3, 5, 8, 17)
"""Of the pack: fewer rows than ranks, and rows that ranks do not divide."""
MODES = ("none", "selective", "full", "split")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_llava.write_model_dir(tmp_path_factory.mktemp("model"))


def layers(model_dir, tensor=None):
    """Two layers of the backbone, between others."""
    return load_adapter(model_dir).build_llm_stage(
        1, 2, CPU, torch.float32, 0, **({} if tensor is None else {"tensor": tensor})
    )


def passed(stage, batch, states, given, mode):
    """Result and gradients of one forward and backward, by name; of what came in, under no name."""
    stage.zero_grad()
    leaf = states.clone().requires_grad_()
    if mode == "split":
        with split_backward(stage) as queue:
            result = stage(batch, leaf)
            result.backward(given)
            queue.flush()
    else:
        with recomputing(stage.layers_in_order(), mode):
            result = stage(batch, leaf)
            result.backward(given)
    gradients = {name: p.grad.clone() for name, p in stage.named_parameters()}
    return result.detach(), gradients | {"": leaf.grad}


def drawn(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    return [torch.randn(num_tokens, WIDTH, generator=generator) for _ in range(2)]


@pytest.mark.more
def test_ranks_share_any_number_of_rows(model_dir, tmp_path):
    """Of four ranks each has its rows of the result and of its gradient; norms have a summand on each."""
    port = free_port()
    whole = layers(model_dir)
    expected = {}
    for num_tokens in LENGTHS:
        batch = llm_input(num_tokens, 1, num_segments=min(2, num_tokens))
        expected[num_tokens] = batch, passed(whole, batch, *drawn(num_tokens), "none")

    def rank(index):
        import os

        os.environ |= environment(index, RANKS, port)
        dist.init_process_group("gloo")
        stage = layers(model_dir, TensorRank(RANKS, index))
        slices = slices_of(stage)
        add_collectives(stage, Sums(dist.group.WORLD))
        norms = [name for name in slices if "norm" in name]
        assert len(norms) == 4
        for num_tokens, (batch, (result_TD, gradients)) in expected.items():
            each = rows_of_rank(num_tokens, RANKS)
            own = slice(index * each, (index + 1) * each)

            def rows(states, each=each, own=own):
                part = states[own]
                return torch.cat([part, part.new_zeros(each - part.shape[0], WIDTH)])

            given = [rows(states) for states in drawn(num_tokens)]
            for mode in MODES:
                found, of = passed(stage, batch, *given, mode)
                told = f"{num_tokens} tokens, {mode}: "
                torch.testing.assert_close(found, rows(result_TD), msg=told + "result")
                for name, gradient in of.items():
                    wanted = slices[name].take(gradients[name]) if name in slices else gradients[name]
                    if not name:
                        wanted = rows(wanted)
                    elif name in norms:
                        dist.all_reduce(gradient)
                    elif "k_proj" in name or "v_proj" in name:
                        # Two ranks hold each head: what each has is a summand.
                        other = [torch.empty_like(gradient) for _ in range(RANKS)]
                        dist.all_gather(other, gradient)
                        gradient = other[index] + other[index ^ 1]
                    elif name not in slices:
                        continue
                    torch.testing.assert_close(
                        gradient, wanted, rtol=1e-4, atol=1e-5, msg=lambda m, n=name, t=told: f"{t}{n}: {m}"
                    )
        dist.destroy_process_group()
        return index

    assert results(run_ranks(RANKS, rank, tmp_path)) == list(range(RANKS))


def kept_bytes(model_dir, degree, num_tokens, dtype=torch.float32):
    """Of one layer; what all layers have in common, the angles of the positions, is left out."""
    tensor = {} if degree == 1 else {"tensor": TensorRank(degree, 0)}
    stage = load_adapter(model_dir).build_llm_stage(1, 1, CPU, dtype, 0, **tensor)
    if degree > 1:
        add_collectives(stage, Sums(None, degree))
    states_RD = torch.randn(rows_of_rank(num_tokens, degree), WIDTH, dtype=dtype)
    batch = llm_input(num_tokens, 1)
    saved = saved_for_backward(
        lambda: stage(batch, states_RD.clone().requires_grad_()), list(stage.parameters())
    )
    angles = 2 * num_tokens * 12 * dtype.itemsize
    return saved.total_bytes - angles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_layer_keeps_is_a_part_of_the_whole(dtype, model_dir):
    """The number that a model profile has, and so the memory model: 1/n, and heads that two ranks hold twice."""
    num_tokens = 96
    whole = kept_bytes(model_dir, 1, num_tokens, dtype)
    assert whole == 2 * kept_bytes(model_dir, 2, num_tokens, dtype)
    # Two heads of keys and values, 12 wide, on four ranks: half of what each keeps of them is another's too.
    twice = 2 * 12 * num_tokens * dtype.itemsize // 2
    assert kept_bytes(model_dir, 4, num_tokens, dtype) == whole // 4 + twice
