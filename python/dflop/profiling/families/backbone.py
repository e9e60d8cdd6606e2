"""The pieces of the backbone, which all families share: Qwen2, Llama and their kin, with or without mrope.

    llm_embedding   ids_T, features_ED -> hidden_TD     once a call: the angles of the rotary embedding too
    llm_layer       hidden_TD          -> hidden_TD     packed attention, as in training
    llm_head        hidden_TD, targets -> loss          norm, logits and loss where there is a target

Shape letters: T LLM tokens, E feature tokens, D width, K label tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop.profiling.families.shards import Cut, LayerPlan, cut_layer, cut_vocabulary, heads_of_rank
from dflop.profiling.families.source import (
    Fed,
    ModelPiece,
    Rule,
    Source,
    bounds_of,
    layers_at_once,
    random_states,
)
from dflop.profiling.pieces import AttentionKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.profiling.pieces import PieceSettings

TEXT_MODELS = ("llama", "mistral", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text")
"""`model_type` of the backbones whose layers are built of the maps that `layer_plan` names."""

# Frequencies of these depend on the longest position of a call, hence on what a sample is packed with.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Of the tokens of a pack, those that features fill; of the tokens of a pack with labels, those with a label.
_FEATURE_RATIO, _TOKENS_PER_LABEL = 0.75, 3


@dataclass(frozen=True)
class Pack:
    """What layers know of the samples that lie behind each other."""

    cu_seqlens: torch.Tensor
    """[M + 1] int32."""
    segment_tokens: tuple[int, ...]
    """Its differences."""
    positions_1T: torch.Tensor
    """[1, T]; restarts at 0 with each sample."""
    angles: tuple[torch.Tensor, torch.Tensor]
    """Cosine and sine of the rotary embedding."""


def rotate(rotary: nn.Module, positions: torch.Tensor, like: torch.Tensor) -> Any:
    """Cosine and sine of the rotary embedding.

    Args:
        rotary: Hugging Face's.
        positions: [1, T], or [3, 1, T] (time, height, width) where the backbone has mrope.
        like: tells device and dtype.

    Returns:
        Two tensors, as the backbone's layers take them.
    """
    if hasattr(rotary, "mrope_section") and positions.dim() == 2:
        positions = positions[None].expand(3, -1, -1)
    return rotary(like, positions)


class LlmEmbedding(nn.Module):
    """Embedding with features put in."""

    def __init__(self, embed_tokens: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.rotary = embed_tokens, rotary

    def forward(
        self,
        features_ED: torch.Tensor,
        ids_T: torch.Tensor,
        mask_T: torch.Tensor,
        positions_1T: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states before the first layer.

        Args:
            features_ED: of all media.
            ids_T: int64; any number where a feature goes.
            mask_T: bool; true where a feature goes.
            positions_1T: int64.

        Returns:
            hidden_TD.
        """
        embedded_TD = self.embed_tokens(ids_T.masked_fill(mask_T, 0))
        # Not of the layers, whose time is multiplied by their number: a stage does it once.
        rotate(self.rotary, positions_1T, embedded_TD)
        return embedded_TD.masked_scatter(mask_T[:, None], features_ED)


class LlmLayers(nn.Module):
    """A run of decoder layers over packed samples."""

    def __init__(self, layers: Sequence[nn.Module], rotary: nn.Module) -> None:
        super().__init__()
        self.layers, self.rotary = nn.ModuleList(layers), rotary

    def pack(
        self, segments: Sequence[int], like: torch.Tensor, positions: torch.Tensor | None = None
    ) -> Pack:
        """What the layers must know of these samples.

        Args:
            segments: tokens each.
            like: tells device and dtype.
            positions: as in `rotate`; None: those of text.

        Returns:
            Arguments of `forward`.
        """
        of_text_1T = torch.cat([torch.arange(tokens) for tokens in segments])[None].to(like.device)
        angles = rotate(self.rotary, of_text_1T if positions is None else positions, like)
        return Pack(bounds_of(segments, like.device), tuple(segments), of_text_1T, angles)

    def forward(self, hidden_TD: torch.Tensor, pack: Pack) -> torch.Tensor:
        """Hidden states after the layers.

        Args:
            hidden_TD: before.
            pack: of the samples.

        Returns:
            hidden_TD.
        """
        hidden_1TD = hidden_TD[None]
        for layer in self.layers:
            hidden_1TD = layer(
                hidden_1TD,
                attention_mask=None,
                position_ids=pack.positions_1T,
                use_cache=False,
                position_embeddings=pack.angles,
                cu_seq_lens_q=pack.cu_seqlens,
                segment_tokens=pack.segment_tokens,
            )
        return hidden_1TD[0]


class LlmHead(nn.Module):
    """Final norm, logits and loss where there is a target."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = norm, lm_head

    def logits(self, hidden_TD: torch.Tensor, chosen_T: torch.Tensor) -> torch.Tensor:
        """Logits of the chosen rows.

        Args:
            hidden_TD: after the last layer.
            chosen_T: bool.

        Returns:
            logits_KV.
        """
        return self.lm_head(self.norm(hidden_TD[chosen_T]))

    def forward(self, hidden_TD: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        """The loss.

        Args:
            hidden_TD: after the last layer.
            targets_T: the id that each row must predict, -100 where there is no loss.

        Returns:
            Sum of the cross entropy, a float32 scalar.
        """
        chosen_T = targets_T != -100
        logits_KV = self.logits(hidden_TD, chosen_T)
        return F.cross_entropy(logits_KV.float(), targets_T[chosen_T], reduction="sum")


def layer_plan(text: Any) -> LayerPlan:
    """How a decoder layer is cut.

    Args:
        text: configuration of the backbone.

    Returns:
        The plan.
    """
    heads = ("text_config.num_attention_heads", text.num_attention_heads)
    few = ("text_config.num_key_value_heads", text.num_key_value_heads)
    width = ("text_config.intermediate_size", text.intermediate_size)
    return LayerPlan(
        cuts=(
            Cut("self_attn.q_proj", *heads),
            Cut("self_attn.k_proj", *few, may_repeat=True),
            Cut("self_attn.v_proj", *few, may_repeat=True),
            Cut("self_attn.o_proj", *heads, by_input=True),
            Cut("mlp.gate_proj", *width),
            Cut("mlp.up_proj", *width),
            Cut("mlp.down_proj", *width, by_input=True),
        ),
        entries=("self_attn", "mlp"),
    )


def backbone_rules(text: Any) -> list[Rule]:
    """What the backbone's configuration must be.

    Args:
        text: it.

    Returns:
        Rules for `Source.check`.
    """
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    # Qwen2 names a window that it uses only where told to; Mistral uses it where there is one.
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    return [
        Rule(
            "text_config.model_type",
            text.model_type,
            text.model_type in TEXT_MODELS,
            f"one of {TEXT_MODELS}",
        ),
        Rule("text_config.sliding_window", window, window is None, "null, or not in use"),
        Rule(
            "text_config.rope_parameters.rope_type",
            rope,
            rope not in _LENGTH_DEPENDENT_ROPE,
            f"none of {_LENGTH_DEPENDENT_ROPE}",
        ),
    ]


def backbone_pieces(source: Source) -> list[ModelPiece]:
    """Embedding, layers and head.

    Args:
        source: of the model.

    Returns:
        Three pieces.
    """
    text = source.text
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    plan = layer_plan(text)

    def take_embedding(whole: Any, settings: PieceSettings) -> nn.Module:
        backbone = whole.model.language_model
        cut_vocabulary(backbone.embed_tokens, settings.tensor_parallel_degree)
        return LlmEmbedding(backbone.embed_tokens, backbone.rotary_emb)

    def feed_embedding(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        total = sum(segments)
        features = int(_FEATURE_RATIO * total)
        mask_T = torch.arange(total, device=settings.device) < features
        ids_T = _random_ids(total, module.embed_tokens.num_embeddings, settings)
        positions_1T = torch.cat([torch.arange(tokens) for tokens in segments])[None].to(settings.device)
        leaf = random_states(settings, features, text.hidden_size)
        return Fed(leaf, (ids_T, mask_T, positions_1T), (ids_T,))

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        backbone = whole.model.language_model
        for layer in backbone.layers:
            cut_layer(layer, plan, settings.tensor_parallel_degree)
        return LlmLayers(list(backbone.layers), backbone.rotary_emb)

    def feed_layers(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf = random_states(settings, sum(segments), text.hidden_size)
        return Fed(leaf, (module.pack(segments, leaf),))

    def take_head(whole: Any, settings: PieceSettings) -> nn.Module:
        cut_vocabulary(whole.lm_head, settings.tensor_parallel_degree)
        return LlmHead(whole.model.language_model.norm, whole.lm_head)

    def feed_head(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        labels = sum(segments)
        total = _TOKENS_PER_LABEL * labels
        targets_T = _random_ids(total, module.lm_head.out_features, settings)
        targets_T[: total - labels] = -100
        return Fed(random_states(settings, total, text.hidden_size), (targets_T,), (targets_T,))

    def kind(settings: PieceSettings) -> AttentionKind:
        heads = heads_of_rank(
            text.num_attention_heads, text.num_key_value_heads, settings.tensor_parallel_degree
        )
        return AttentionKind(*heads, head_size, is_causal=True)

    count: int = text.num_hidden_layers
    one = source.whole(1).model.language_model.layers[0]
    return [
        ModelPiece("llm_embedding", 1, source, take_embedding, feed_embedding, adapters="none"),
        ModelPiece(
            "llm_layer",
            count,
            source,
            take_layers,
            feed_layers,
            num_layers=layers_at_once(count, one),
            kind=kind,
            adapters="layers",
        ),
        ModelPiece("llm_head", 1, source, take_head, feed_head, adapters="none"),
    ]


def _random_ids(count: int, below: int, settings: PieceSettings) -> torch.Tensor:
    generator = torch.Generator(settings.device).manual_seed(0)
    return torch.randint(0, below, (count,), generator=generator, device=settings.device)
