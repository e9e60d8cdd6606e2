"""`balance_encoder`, `attend_encoder`: gradients are those of the model as it was, whoever encodes; text alone hangs nobody."""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import pytest
import torch
import transformers
from ranks import results, run_ranks
from shards import whole_of
from tiny_media import FAMILIES, ROUNDED, make_model, steps_of
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dflop.integrations.assignment import assign_units
from dflop.integrations.backbone import backbone_of
from dflop.integrations.encoder import attend_encoder, balance_encoder, handle_of
from dflop.integrations.encoder_tiles import ChunkTower, SquareTower
from dflop.integrations.loss import num_label_tokens, token_loss

TOLERANCE = 1e-5
"""Relative error of a parameter's gradient norm in float32: the order of sums differs, nothing else."""


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        if any(part in name for part in frozen):
            parameter.requires_grad_(False)


TOWERS = ("vision_tower", "vision_encoder", "vision_model", "visual", "audio_tower")


def expected_gradients(model, microbatches):
    """By one process and the model as it is: the sum over all ranks' microbatches."""
    model.zero_grad(set_to_none=True)
    tokens = sum(int(m["labels"][..., 1:].ne(-100).sum()) for m in microbatches)
    for m in microbatches:
        arguments = {k: v for k, v in m.items() if k != "labels"}
        token_loss(model(**arguments).logits, m["labels"], tokens).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def join(rank, num_ranks, directory):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(str(directory / "store"), num_ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def blocks_of(model):
    """What a user of FSDP2 shards one by one: the towers, their layers, and those of the LLM."""
    # Llama 4 holds its parts itself.
    inner = getattr(model, "model", model)
    # Gemma 4 of the large sizes has none for sounds.
    towers = [tower for name in TOWERS if (tower := getattr(inner, name, None)) is not None]
    found = []
    for tower in towers:
        encoder = getattr(tower, "vision_model", tower)
        layers = getattr(encoder, "blocks", None) or getattr(encoder, "layers", None)
        if layers is None:
            nested = next(
                getattr(encoder, n) for n in ("encoder", "transformer", "model") if hasattr(encoder, n)
            )
            layers = getattr(nested, "layers", None) or nested.layer
        found += list(layers)
    return towers, found, list(backbone_of(model).layers)


def shard(model, num_ranks, whole_components, is_shared=True):
    mesh = init_device_mesh("cpu", (num_ranks,))
    towers, encoder_layers, llm_layers = blocks_of(model)
    for layer in [*encoder_layers, *llm_layers]:
        fully_shard(layer, mesh=mesh)
    if whole_components:
        # transformers finds the hidden states of a tower by its class, which FSDP changes: not of LLaVA's and Aya Vision's. Those of
        # Mistral3 the shared encoder makes itself.
        if not model.config.model_type.startswith(
            ("llava", "aya") if is_shared else ("llava", "aya", "mistral3", "lighton")
        ):
            for tower in towers:
                fully_shard(tower, mesh=mesh)
        for projector in (
            "multi_modal_projector",
            "vision_projection",
            "projector",
            "connector",
            "embed_vision",
            "embed_audio",
        ):
            # LFM2-VL's model calls its projector once a tile.
            inner = getattr(model, "model", model)
            if getattr(inner, projector, None) is not None and model.config.model_type != "lfm2_vl":
                fully_shard(getattr(inner, projector), mesh=mesh)
        backbone = backbone_of(model)
        if hasattr(backbone, "embed_tokens_per_layer"):
            # Gemma 4's model reads an embedding of its small backbones itself: it must stay with the model.
            fully_shard(backbone.embed_tokens_per_layer, mesh=mesh)
        else:
            # The model embeds before it calls the backbone.
            fully_shard(backbone.embed_tokens, mesh=mesh)
            fully_shard(backbone, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def error_of(model, expected):
    """The largest relative error over parameters, and of which."""
    worst = (0.0, "")
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    gradients = whole_of({name: p.grad for name, p in parameters.items() if p.grad is not None})
    for name, parameter in parameters.items():
        gradient = gradients.get(name)
        if not parameter.requires_grad:
            assert gradient is None
            continue
        reference = expected.get(name)
        if gradient is None:
            assert reference is None, f"{name} has no gradient"
            continue
        reference = torch.zeros_like(gradient) if reference is None else reference
        # Of a gradient that is nothing but rounding, such as that of a key's bias, the size is no measure.
        size = max(float(reference.norm()), 1e-4)
        worst = max(worst, (float((gradient - reference).norm()) / size, name))
    return worst


CASES = [
    # layout, whether FSDP shards the components too, what is frozen, recomputation
    ("ddp", False, (), False),
    ("ddp", False, TOWERS, False),
    ("fsdp2", False, (), False),
    ("fsdp2", True, (), True),
    ("fsdp2", True, TOWERS, False),
]
CASES_OF_FOUR = [CASES[0], CASES[3]]
"""Beside these, what more ranks change is who encodes for whom, and that is the same in all cases."""


def run_case(case, model, num_ranks, rank, steps, references, line=balance_encoder):
    layout, whole_components, frozen, recomputes = case
    is_ddp = layout == "ddp"
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    handle = line(model)
    if is_ddp:
        if frozen:
            # What is copied computes with weights of its own, and meets the other ranks' copies.
            model, before = copy.deepcopy(model), model
            handle = handle_of(getattr(getattr(model, "model", model), handle._families[0].tower))
            for parameter in before.parameters():
                parameter.data.zero_()
        model = DistributedDataParallel(model)
    else:
        model = shard(model, num_ranks, whole_components, is_shared=line is balance_encoder)
    errors, loads = [], []
    for microbatches, reference in zip(steps, references, strict=True):
        mine = microbatches[rank]
        tokens = num_label_tokens(mine["labels"])
        arguments = {k: v for k, v in mine.items() if k != "labels"}
        loss = token_loss(model(**arguments).logits, mine["labels"], tokens, num_ranks)
        loss.backward()
        errors.append(error_of(model, reference))
        loads.append(handle.loads)
        model.zero_grad(set_to_none=True)
    if is_ddp and rank == 0:
        # In evaluation a rank may be alone.
        model.module.eval()
        model.module(**{k: v for k, v in steps[0][0].items() if k != "labels"})
    return errors, loads


@pytest.mark.some(1, 5)
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    # Which family it is has nothing to do with how many ranks there are.
    [
        # Towers of another family, in another's backbone.
        pytest.param(name, 2, marks=pytest.mark.layouts)
        if name
        in ("glm4v_moe", "glm46v", "glm_ocr", "idefics3", "qwen3_vl_moe", "qwen3_5_moe", "cohere2_vision")
        else (name, 2)
        for name in FAMILIES
    ]
    + [("llava_onevision", 4)]
    + [pytest.param(name, 4, marks=pytest.mark.layouts) for name in ("qwen2_5_vl", "gemma4-e2b")],
)
def test_gradients_are_those_of_the_model_as_it_was(name, num_ranks, tmp_path, quiet):
    """DDP and FSDP2, the encoder trained or frozen, ranks of text alone included."""
    cases = CASES if num_ranks == 2 else CASES_OF_FOUR
    steps = steps_of(name, num_ranks)
    models, references = {}, {}
    for frozen in {case[2] for case in cases}:
        model = make_model(name, tmp_path)
        freeze(model, frozen)
        # A copy made after a forward has no hooks of transformers: it gives no hidden states.
        models[frozen] = copy.deepcopy(model)
        references[frozen] = [expected_gradients(model, m) for m in steps]

    def run(rank):
        join(rank, num_ranks, tmp_path)
        found = []
        for case in cases:
            model = copy.deepcopy(models[case[2]])
            found.append(run_case(case, model, num_ranks, rank, steps, references[case[2]]))
        distributed.destroy_process_group()
        return found

    for found in results(run_ranks(num_ranks, run, tmp_path / "ranks", timeout_s=280)):
        for case, (errors, loads) in zip(cases, found, strict=True):
            shared, alone = loads[0]
            assert sum(shared) == pytest.approx(sum(alone))
            assert max(shared) < max(alone), (name, case)
            for step, (error, parameter) in enumerate(errors):
                assert error <= TOLERANCE * ROUNDED.get(name, 1), (name, case, step, error, parameter)


@pytest.mark.some(1, 5)
@pytest.mark.parametrize("name", FAMILIES)
def test_text_alone_hangs_nobody_where_each_rank_encodes_its_own(name, tmp_path, quiet):
    """FSDP2: one rank has text alone, or media of fewer kinds; gradients are those of the model as it was."""
    cases, steps = CASES[2:], steps_of(name, 2)
    models, references = {}, {}
    for frozen in {case[2] for case in cases}:
        model = make_model(name, tmp_path)
        freeze(model, frozen)
        models[frozen] = copy.deepcopy(model)
        references[frozen] = [expected_gradients(model, m) for m in steps]

    def run(rank):
        join(rank, 2, tmp_path)
        found = []
        for case in cases:
            model = copy.deepcopy(models[case[2]])
            found.append(run_case(case, model, 2, rank, steps, references[case[2]], attend_encoder))
        distributed.destroy_process_group()
        return found

    for found in results(run_ranks(2, run, tmp_path / "ranks", timeout_s=280)):
        for case, (errors, loads) in zip(cases, found, strict=True):
            assert loads == [([], [])] * len(steps)
            for step, (error, parameter) in enumerate(errors):
                assert error <= TOLERANCE * ROUNDED.get(name, 1), (name, case, step, error, parameter)


@pytest.mark.parametrize("is_view", [False, True])
def test_what_no_feature_depends_on_has_no_gradient_under_ddp(is_view, tmp_path, quiet):
    """The last layers of LLaVA's tower, as with one process: weight decay would change them. Without `find_unused_parameters`."""
    steps, model = steps_of("llava", 2), make_model("llava", tmp_path)
    untouched = copy.deepcopy(model)
    references = [expected_gradients(model, m) for m in steps]
    unread = {name for name, _ in model.named_parameters()}.difference(*references)
    assert any("layers" in name for name in unread), unread

    def run(rank):
        join(rank, 2, tmp_path)
        model = copy.deepcopy(untouched)
        balance_encoder(model)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=is_view)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        found = []
        for microbatches in steps:
            mine = microbatches[rank]
            arguments = {k: v for k, v in mine.items() if k != "labels"}
            tokens = num_label_tokens(mine["labels"])
            # Two microbatches a step: those before the last are not summed over ranks.
            with wrapped.no_sync():
                token_loss(wrapped(**arguments).logits, mine["labels"], 2 * tokens, 2).backward()
            token_loss(wrapped(**arguments).logits, mine["labels"], 2 * tokens, 2).backward()
            found.append({name for name, p in model.named_parameters() if p.grad is None})
            optimizer.step()
            optimizer.zero_grad()
        before = dict(untouched.named_parameters())
        changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        distributed.destroy_process_group()
        return found, changed

    for found, changed in results(run_ranks(2, run, tmp_path / "ranks", timeout_s=280)):
        assert found == [unread] * len(steps)
        assert not changed & unread
        assert changed


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_layers_that_enter_autograd_again_are_refused_where_ddp_would_fail(name, tmp_path, quiet):
    """By name and on all ranks, before anything is sent: where the encoder's layers train under DDP, and nowhere else."""
    model = make_model(name, tmp_path)
    step = steps_of(name, 2)[0]
    trained = expected_gradients(model, step)
    frozen = copy.deepcopy(model)
    freeze(frozen, TOWERS)
    references = {True: expected_gradients(frozen, step), False: trained}

    def run(rank):
        join(rank, 2, tmp_path)
        mine = step[rank]
        arguments = {k: v for k, v in mine.items() if k != "labels"}
        tokens = num_label_tokens(mine["labels"])
        errors = []
        for is_frozen, enters_again, in_ddp in [
            (True, True, True),
            (False, False, True),
            (False, True, False),
            (False, True, True),
        ]:
            made = copy.deepcopy(frozen if is_frozen else model)
            made.gradient_checkpointing_enable({"use_reentrant": enters_again})
            made.enable_input_require_grads()
            balance_encoder(made)
            wrapped = DistributedDataParallel(made) if in_ddp else made
            if in_ddp and enters_again and not is_frozen:
                with pytest.raises(ValueError, match=r'layer `.*0` of the encoder .*"use_reentrant": False'):
                    wrapped(**arguments)
                continue
            token_loss(wrapped(**arguments).logits, mine["labels"], tokens, 2).backward()
            if in_ddp:
                errors.append(error_of(made, references[is_frozen])[0])
        distributed.destroy_process_group()
        return errors

    for errors in results(run_ranks(2, run, tmp_path / "ranks", timeout_s=280)):
        assert len(errors) == 2
        assert max(errors) <= TOLERANCE


@pytest.mark.more
@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_5_vl"])
def test_compiled_layers_have_the_gradients_of_the_model_as_it_was(name, tmp_path, quiet):
    """`layer.compile()` of towers and LLM; what the compiler makes of the graphs is not ours."""
    steps, model = steps_of(name, 2), make_model(name, tmp_path)
    untouched = copy.deepcopy(model)
    references = [expected_gradients(model, m) for m in steps]

    def run(rank):
        join(rank, 2, tmp_path)
        found = []
        for case in (CASES[0], CASES[2]):
            graphs = []

            def backend(graph, _, graphs=graphs):
                graphs.append(graph)
                return graph.forward

            model = copy.deepcopy(untouched)
            _, encoder_layers, llm_layers = blocks_of(model)
            for layer in [*encoder_layers, *llm_layers]:
                layer.compile(backend=backend)
            errors, _ = run_case(case, model, 2, rank, steps, references)
            found.append((errors, len(graphs)))
        distributed.destroy_process_group()
        return found

    for found in results(run_ranks(2, run, tmp_path / "ranks", timeout_s=280)):
        # The second layout may run what was compiled for the first.
        assert sum(num_graphs for _, num_graphs in found) > 0
        assert max(error for errors, _ in found for error, _ in errors) <= TOLERANCE


@pytest.mark.more
def test_ranks_share_and_evaluate_alone_where_accelerate_compiles_the_layers(tmp_path, quiet):
    """Its model is a copy, which is evaluated without the model that had the line."""
    from accelerate.utils import compile_regions

    (microbatches, *_), model = steps_of("qwen2_5_vl", 2), make_model("qwen2_5_vl", tmp_path)
    untouched = copy.deepcopy(model)
    reference = expected_gradients(model, microbatches)

    def run(rank):
        join(rank, 2, tmp_path)
        model, mine = copy.deepcopy(untouched), microbatches[rank]
        handle = balance_encoder(model)
        compiled = compile_regions(model, backend="eager")
        arguments = {k: v for k, v in mine.items() if k != "labels"}
        wrapped = DistributedDataParallel(compiled)
        logits = wrapped(**arguments).logits
        token_loss(logits, mine["labels"], num_label_tokens(mine["labels"]), 2).backward()
        shared, alone = handle.loads
        if rank == 0:
            compiled.eval()
            compiled(**arguments)
        distributed.destroy_process_group()
        # The copy has the parameters of the model.
        return error_of(model, reference), max(shared) / max(alone)

    for (error, parameter), ratio in results(run_ranks(2, run, tmp_path / "ranks")):
        assert error <= TOLERANCE, parameter
        assert ratio < 1


def test_a_model_is_wrapped_once_and_unwrapped(tmp_path, quiet):
    """One process has nothing to share; what is no such model, or is shared already, is refused."""
    model = make_model("internvl", tmp_path)
    arguments = {k: v for k, v in steps_of("internvl", 1)[0][0].items() if k != "labels"}
    before = model(**arguments).logits
    handle = balance_encoder(model)
    assert torch.equal(model(**arguments).logits, before)
    with pytest.raises(ValueError, match="the encoder of this model is shared out already"):
        balance_encoder(model)
    handle.remove()
    assert "forward" not in vars(model.model.vision_tower)
    assert "get_image_features" not in vars(model.model)
    balance_encoder(model).remove()
    attended = attend_encoder(model)
    assert attend_encoder(model) is attended
    # Sharing does more, and takes its place.
    shared = balance_encoder(model)
    assert attend_encoder(model) is shared
    shared.remove()
    next(model.parameters()).ds_id = 0
    for line in (balance_encoder, attend_encoder):
        with pytest.raises(ValueError, match="must be under FSDP2, and this one is under DeepSpeed's ZeRO-3"):
            line(model)
    config = SimpleNamespace(model_type="llava", vision_config=SimpleNamespace(model_type="pixtral"))
    with pytest.raises(ValueError, match="encoder of a `llava` is `pixtral`, must be `clip_vision_model`"):
        SquareTower(SimpleNamespace(config=config))
    with pytest.raises(
        ValueError,
        match="`Linear` holds no model with an encoder of audioflamingo3, aya_vision, cohere2_vision, .*, gemma3, gemma4, glm46v, glm4v",
    ):
        balance_encoder(torch.nn.Linear(1, 1))


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "internvl", "qwen3_vl", "gemma3"])
def test_generation_is_that_of_the_model_as_it_was(name, tmp_path):
    """Its `generate` hands the media to a method of the model, by the names in its signature."""
    model = make_model(name, tmp_path).eval()
    whole = next(one for ranks in steps_of(name, 2) for one in ranks if "pixel_values" in one)
    prompt = {key: value for key, value in whole.items() if key != "labels"}

    def answer():
        return model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)

    expected = answer()
    handle = balance_encoder(model)
    assert torch.equal(answer(), expected)
    handle.remove()
    assert torch.equal(answer(), expected)


def test_shares_are_even_and_little_travels():
    """Equal units in even counts, each staying where it can; others within 5 % of the mean."""
    assert assign_units([[1.0] * 5, [], [1.0] * 2, [1.0]]) == [[0, 0, 1, 1, 3], [], [2, 2], [3]]
    generator = torch.Generator().manual_seed(0)
    costs = [(torch.rand(n, generator=generator) + 0.1).tolist() for n in (40, 3, 0, 21)]
    owners = assign_units(costs)
    loads = [0.0] * 4
    for units, targets in zip(costs, owners, strict=True):
        for cost, owner in zip(units, targets, strict=True):
            loads[owner] += cost
    assert max(loads) <= 1.05 * sum(loads) / 4
    # What rank 0 holds too much of must go; of what a rank of little holds nothing need.
    assert owners[1] == [1, 1, 1] or sum(owner == 1 for owner in owners[1]) >= 1
    assert assign_units([[], []]) == [[], []]
    assert assign_units([[2.0, 5.0]]) == [[0, 0]]


def test_chunks_of_sounds_are_encoded_apart():
    """Their features are as many as transformers counts for whole sounds; an odd number of tokens is refused."""
    config = transformers.Qwen2_5OmniThinkerConfig(audio_config={"n_window": 8})
    family = ChunkTower(SimpleNamespace(config=config))
    lengths = torch.arange(1, 100)
    media = family.media(
        torch.zeros(8, int(lengths.sum())), {"feature_lens": lengths, "aftercnn_lens": lengths}
    )
    assert media.rows.shape == (int(lengths.sum()), 8)
    assert sum(frames for frames, _ in media.grids) == int(lengths.sum())
    assert {frames for frames, _ in media.grids} == set(range(1, 17))
    expected = ((lengths - 1) // 2 + 1 - 2) // 2 + 1
    assert sum(map(family.rows_out, media.grids)) == int(expected.sum())
    with pytest.raises(ValueError, match="`chunk_lengths` are of this rank's media alone"):
        family.media(torch.zeros(8, 3), {"feature_lens": torch.tensor([3]), "chunk_lengths": lengths})
    odd = SimpleNamespace(config=transformers.Qwen2_5OmniThinkerConfig(audio_config={"n_window": 7}))
    with pytest.raises(ValueError, match="`audio_config.n_window` is 7, must be even"):
        ChunkTower(odd)
