"""The pieces of the backbone, which all families share: Qwen2, Llama and similar ones.

    llm_embedding   ids_T, features_ED -> hidden_TD     also rotary angles, computed once a call
    llm_layer       hidden_TD          -> hidden_TD     packed attention, as in training
    llm_head        hidden_TD, targets -> loss          norm, logits and loss where there is a target

Shape letters: T LLM tokens, E feature tokens, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflop.models.backbone import kinds_to_cut, layer_plan
from dflop.models.delta_rule import layer_period
from dflop.models.layer_kinds import (
    WITH_HEADS_OF_KINDS,
    heads_of,
    kinds_of_layers,
    layers_that_attend,
    run_like_all,
    sees_pictures_whole,
    window_of,
)
from dflop.models.loss import cap_logits
from dflop.models.sequence import rows_of_rank
from dflop.models.short_conv import WITH_SHORT_CONV, kinds_like_all
from dflop.models.tensor import cut_layer, heads_of_rank
from dflop.models.towers import backbone_of, final_norm_name
from dflop.models.vocabulary import cut_vocabulary
from dflop.profiling.families.backbone_modules import LlmEmbedding, LlmHead, LlmLayers
from dflop.profiling.families.source import (
    Fed,
    ModelPiece,
    Source,
    layers_at_once,
    random_states,
)
from dflop.profiling.pieces import AttentionKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from dflop.profiling.pieces import PieceSettings

FEATURE_RATIO = 0.75
"""Share of the tokens of a pack that are features."""
TOKENS_PER_LABEL = 3
"""Tokens of a pack for each label token, where labels are measured."""


def backbone_pieces(
    source: Source, feature_width: int | None = None, picture_tokens: int | None = None
) -> list[ModelPiece]:
    """Embedding, layers and head.

    Args:
        source: of the model.
        feature_width: values of a feature; None: as many as a hidden state has.
        picture_tokens: features of a picture, where layers see pictures whole.

    Returns:
        Three pieces.
    """
    text = source.text
    few_heads, head_size = heads_of(text)

    def take_embedding(whole: Any, settings: PieceSettings) -> nn.Module:
        backbone = backbone_of(whole)
        cut_vocabulary(backbone.embed_tokens, settings.tensor_parallel_degree)
        return LlmEmbedding(backbone.embed_tokens, backbone.rotary_emb, backbone.config)

    def feed_embedding(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        total = sum(segments)
        features = int(FEATURE_RATIO * total)
        rows_T = torch.arange(total, device=settings.device)
        mask_T = rows_T < features
        ids_T = _random_ids(total, module.embed_tokens.num_embeddings, settings)
        positions_1T = torch.cat([torch.arange(tokens) for tokens in segments])[None].to(settings.device)
        leaf = random_states(settings, features, feature_width or text.hidden_size)
        return Fed(leaf, (ids_T, mask_T, rows_T[:features], positions_1T), (ids_T,))

    def own_rows(total: int, settings: PieceSettings) -> int:
        return rows_of_rank(total, settings.tensor_parallel_degree)

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        backbone = backbone_of(whole)
        for kind, layer in zip(kinds_to_cut(backbone.config), backbone.layers, strict=True):
            cut_layer(layer, layer_plan(text, kind), settings.tensor_parallel_degree)
        return LlmLayers(list(backbone.layers), backbone.rotary_emb, backbone.config, picture_tokens)

    def feed_layers(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf = random_states(settings, own_rows(sum(segments), settings), text.hidden_size)
        return Fed(leaf, (module.pack(segments, leaf),))

    def take_head(whole: Any, settings: PieceSettings) -> nn.Module:
        backbone = backbone_of(whole)
        cut_vocabulary(whole.lm_head, settings.tensor_parallel_degree)
        cap_logits(whole.lm_head, getattr(text, "final_logit_softcapping", None))
        return LlmHead(getattr(backbone, final_norm_name(backbone)), whole.lm_head)

    def feed_head(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        labels = sum(segments)
        total = TOKENS_PER_LABEL * labels
        targets_T = _random_ids(total, module.lm_head.out_features, settings)
        targets_T[: total - labels] = -100
        leaf = random_states(settings, own_rows(total, settings), text.hidden_size)
        return Fed(leaf, (targets_T,), (targets_T,))

    def kind(settings: PieceSettings) -> AttentionKind:
        degree = settings.tensor_parallel_degree
        heads = heads_of_rank(text.num_attention_heads, few_heads, degree)
        return AttentionKind(
            *heads,
            head_size,
            is_causal=True,
            layers_with=sum(attend) / len(attend),
            windows=windows,
            picture_tokens=picture_tokens,
            whole=whole_in,
            heads_of_layers=tuple((max(1, few // degree), size) for few, size in own_heads),
        )

    count: int = text.num_hidden_layers
    kinds = kinds_of_layers(text)
    # Of the layers that are run at once.
    if text.model_type in WITH_SHORT_CONV:
        period, comes_again = len(kinds_like_all(text)), False
    elif kinds is None:
        period, comes_again = layer_period(text) or count, True
    else:
        period, comes_again = run_like_all(text), False
    windows = () if kinds is None else tuple(window_of(text, kind) for kind in kinds[:period])
    run = kinds[:period] if kinds else []
    whole_in = tuple({window_of(text, kind) for kind in run if sees_pictures_whole(text, kind)})
    own_heads = [heads_of(text, kind) for kind in run if text.model_type in WITH_HEADS_OF_KINDS]
    attend = layers_that_attend(text)
    few = source.whole(1)
    backbone = backbone_of(few)
    return [
        ModelPiece("llm_embedding", 1, source, take_embedding, feed_embedding, adapters="none"),
        ModelPiece(
            "llm_layer",
            count,
            source,
            take_layers,
            feed_layers,
            num_layers=(
                layers_at_once(count, backbone.layers[0], period) if comes_again or period == 1 else period
            ),
            kind=kind,
            adapters="layers",
        ),
        ModelPiece(
            "llm_head",
            1,
            source,
            take_head,
            feed_head,
            # Read from Hugging Face's model, since families have the field in different configurations.
            is_tied=few.lm_head.weight is backbone.embed_tokens.weight,
            adapters="none",
        ),
    ]


def _random_ids(count: int, below: int, settings: PieceSettings) -> torch.Tensor:
    generator = torch.Generator(settings.device).manual_seed(0)
    return torch.randint(0, below, (count,), generator=generator, device=settings.device)
