"""Layers, embedding and head cut over ranks, with their collectives, are the whole: results and gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import results, run_ranks
from tiny_families import some_segments, tiny
from torch.testing import assert_close

from dflop.models.sequence import all_rows, own_rows
from dflop.models.sums import Sums
from dflop.models.tensor import add_collectives, cut_layer
from dflop.models.vocabulary import cut_vocabulary
from dflop.profiling.pieces import PieceSettings

CPU = torch.device("cpu")
WHOLE = PieceSettings(CPU, torch.float32)
STACKS = [
    ("internvl", "encoder_layer"),
    ("internvl", "llm_layer"),
    ("internvl-llama", "llm_layer"),
    ("llava_next", "encoder_layer"),
    ("llava_next", "llm_layer"),
    ("qwen2_vl", "encoder_layer"),
    ("qwen2_vl", "llm_layer"),
    ("qwen2_5_vl", "encoder_layer"),
    ("qwen2_5_vl", "encoder_window_layer"),
    ("qwen2_5_vl", "llm_layer"),
    ("qwen2_audio", "encoder_layer"),
    ("audioflamingo3", "encoder_layer"),
    ("voxtral", "encoder_layer"),
    # Layers of two kinds: linear and full attention.
    ("qwen3_5", "llm_layer"),
    ("qwen3_5_moe", "llm_layer"),
]
ON_FOUR = [stack for stack in STACKS if stack[0] in ("internvl", "qwen2_vl", "qwen3_5", "qwen3_5_moe")]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def run(piece, module):
    """(input, result, gradient of the input) of a seeded run."""
    leaves = []
    hook = module.register_forward_pre_hook(lambda _, args: leaves.append(args[0]), prepend=True)
    result = piece.prepare(module, some_segments(piece)[1], WHOLE).forward()
    hook.remove()
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    (result * weights).sum().backward()
    return leaves[0], result, leaves[0].grad


def cut(module, plans, rank, num_ranks):
    for layer, plan in zip(module.layers, plans, strict=True):
        cut_layer(layer, plan, num_ranks, rank)
    return module


def compare(piece, rank, num_ranks):
    """Compares the cut layers with the whole ones; all ranks have the same values before the cut."""
    settings = PieceSettings(CPU, torch.float32, tensor_parallel_degree=num_ranks)
    plans = [layer.tensor_parallel_plan for layer in piece.build(settings).layers]
    whole = piece.build(WHOLE)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            # Biases too: they must be added once. Norms and scales let all through.
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0.0, 0.2, generator=generator)
            elif name.endswith("A_log"):
                # Low rates: sums of high ones over 64 tokens are so large that their exponent is all rounding.
                parameter.uniform_(-3.0, -1.0, generator=generator)
            else:
                parameter.fill_(1.0)
    part = cut(copy.deepcopy(whole), plans, rank, num_ranks)
    sums = Sums(dist.group.WORLD)
    assert add_collectives(part, sums) == piece.num_layers
    if plans[0].between:
        # The layers take and give a rank's rows.
        part.register_forward_pre_hook(lambda _, args: (own_rows(args[0], sums), *args[1:]))
        part.register_forward_hook(lambda _, args, rows: all_rows(rows, args[1].positions_1T.shape[-1], sums))
    states, wanted, wanted_gradient = run(piece, whole)
    _, found, gradient = run(piece, part)
    scale = float((wanted - states).detach().abs().max())
    assert_close(found, wanted, rtol=1e-5, atol=1e-5 * scale)
    largest = max(float(parameter.grad.abs().max()) for parameter in whole.parameters())
    assert_close(gradient, wanted_gradient, rtol=1e-5, atol=1e-5 * largest)

    # Gradients of the weights are cut as the weights are.
    of_whole = copy.deepcopy(whole)
    with torch.no_grad():
        for target, source in zip(of_whole.parameters(), whole.parameters(), strict=True):
            target.copy_(source.grad)
    expected = dict(cut(of_whole, plans, rank, num_ranks).named_parameters())
    # Two of keys and values; towers have as many as of queries.
    repeated = num_ranks == 4 and piece.name == "llm_layer"
    summands = {path for plan in plans for path in (*plan.between, *plan.partial)}
    for name, parameter in part.named_parameters():
        if any(f".{path}." in name for path in summands):
            dist.all_reduce(parameter.grad)
        if repeated and ("k_proj" in name or "v_proj" in name):
            # Two ranks hold the head, each with a summand.
            dist.all_reduce(parameter.grad, group=pair(rank))
        # Against the largest: biases of keys have a gradient of 0 but for rounding.
        assert_close(parameter.grad, expected[name].detach(), rtol=1e-5, atol=1e-5 * largest)
    return scale


def compare_vocabulary(piece, rank, num_ranks):
    """Likewise for the embedding or the head."""
    whole = piece.build(WHOLE)
    part = copy.deepcopy(whole)
    name = "embed_tokens" if piece.name == "llm_embedding" else "lm_head"
    cut_vocabulary(getattr(part, name), num_ranks, rank)
    sums = Sums(dist.group.WORLD)
    add_collectives(part, sums)
    seen = []
    whole.register_forward_pre_hook(lambda _, args: seen.append(args))
    # Scaled, for the logits to be far apart.
    with torch.no_grad():
        getattr(whole, name).weight.mul_(100.0)
        getattr(part, name).weight.mul_(100.0)
    wanted = piece.prepare(whole, [40, 8], WHOLE).forward()
    leaf, *others = seen[0]
    own = leaf.detach().clone().requires_grad_()
    if piece.name == "llm_embedding":
        found = all_rows(part(own, *others), wanted.shape[0], sums)
    else:
        found = part(own_rows(own, sums), *others)
    scale = float(wanted.detach().abs().max())
    assert_close(found, wanted, rtol=1e-5, atol=1e-5 * scale)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    assert_close(own.grad, leaf.grad, rtol=1e-5, atol=1e-5 * float(leaf.grad.abs().max()))
    of_whole = getattr(whole, name).weight.grad.chunk(num_ranks)[rank]
    assert_close(
        getattr(part, name).weight.grad, of_whole, rtol=1e-5, atol=1e-5 * float(of_whole.abs().max())
    )


_PAIRS = {}


def pair(rank):
    return _PAIRS[rank // 2]


def one_rank(rank, num_ranks, directory, stacks):
    store = dist.FileStore(str(directory / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    if num_ranks == 4:
        _PAIRS.update({first // 2: dist.new_group([first, first + 1]) for first in (0, 2)})
    scales = [compare(tiny(directory / str(rank), name)[0][part], rank, num_ranks) for name, part in stacks]
    pieces, _ = tiny(directory / str(rank), "qwen2_vl")
    for name in ("llm_embedding", "llm_head"):
        compare_vocabulary(pieces[name], rank, num_ranks)
    dist.destroy_process_group()
    return scales


@pytest.mark.more
@pytest.mark.parametrize(("num_ranks", "stacks"), [(2, STACKS), (4, ON_FOUR)])
def test_cut_layers_with_collectives_are_the_whole_layer(tmp_path, num_ranks, stacks):
    """On four ranks the two heads of keys and values of an LLM lie on two ranks each."""
    # Imported once, for all forked ranks.
    for name, _ in stacks:
        tiny(tmp_path / "first", name)
    found = results(
        run_ranks(num_ranks, lambda rank: one_rank(rank, num_ranks, tmp_path, stacks), tmp_path / "ranks")
    )
    assert found == [found[0]] * num_ranks
    # What the layers add to the residual is no small thing.
    assert min(found[0]) > 4.0
