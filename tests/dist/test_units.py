"""What ZeRO-3 gathers apart: layers, the embedding, the head. A shared matrix stays with the piece."""

from __future__ import annotations

import pytest
import tiny_llava
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
from ranks import results, run_ranks
from test_layouts import PLACED, Oracle, check, frozen_none, name, schedule_of
from torch.distributed.tensor import DTensor
from toy_run import RankParts, warm_model_dir, write_colocated

from dflop.models import loss
from dflop.models.towers import backbone_of

EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
NORM = "model.language_model.norm.weight"


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    """Of a model whose head has a matrix of its own, and of one whose head shares the embedding's."""
    apart = warm_model_dir(tmp_path_factory.mktemp("apart"))
    return apart, tiny_llava.write_model_dir(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def frozen_embedding(parameter):
    """The embedding is frozen, and the head trains."""
    return parameter == EMBEDDING


def frozen_head(parameter):
    """The head is frozen, and the embedding trains."""
    return parameter == HEAD


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("is_tied", "is_frozen"),
    [(False, frozen_none), (False, frozen_embedding), (False, frozen_head), (True, frozen_none)],
    ids=lambda value: getattr(value, "__name__", f"tied{value}"),
)
def test_a_loss_in_chunks_trains_as_one_process(is_tied, is_frozen, model_dirs, tmp_path, monkeypatch):
    """Three rows of logits at a time: the head is whole for all of them, and its gradient is the sum over them."""
    model_dir = model_dirs[is_tied]
    oracle = Oracle(model_dir, tmp_path / "pretrained", is_frozen)
    monkeypatch.setitem(loss.LOGITS_BYTES_MAX, "cpu", 3 * 4 * tiny_llava.VOCABULARY)
    llm = PLACED["text", 2]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=3, recompute="full:1")
    check(plan, schedule_of(llm), model_dir, oracle, tmp_path, is_frozen)


@pytest.mark.parametrize("is_tied", [False, True], ids=name)
def test_embedding_and_head_are_whole_only_where_they_run(is_tied, model_dirs, tmp_path, monkeypatch):
    """Of the LLM's parameters, what is whole in each forward and recomputation; else each rank has its part."""
    llm = PLACED["text", 2]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=3, recompute="full")

    def rank(index):
        parts = RankParts(plan, model_dirs[is_tied], tmp_path / "store", index)
        piece = next(piece for piece in parts.pieces.values() if hasattr(piece, "lm_head"))
        seen = []

        def see(part):
            whole = {n for n, p in piece.named_parameters() if not isinstance(p, DTensor)}
            layers = {n.split(".layers.")[1].split(".")[0] for n in whole if ".layers." in n}
            seen.append((part, frozenset(n for n in whole if ".layers." not in n), len(layers)))

        for part, module in [
            ("embedding", backbone_of(piece).embed_tokens),
            *(("layer", layer.self_attn) for layer in piece.layers_in_order()),
        ]:
            module.register_forward_pre_hook(lambda *_, part=part: see(part))
        capped = loss.capped
        monkeypatch.setattr(loss, "capped", lambda *given: see("head") or capped(*given))
        parts.step(schedule_of(llm))
        return set(seen)

    root = {NORM, EMBEDDING} if is_tied else {NORM}
    expected = {
        ("embedding", frozenset({*root, EMBEDDING}), 0),
        ("layer", frozenset(root), 1),
        ("head", frozenset(root if is_tied else {*root, HEAD}), 0),
    }
    assert results(run_ranks(2, rank, tmp_path)) == [expected] * 2
