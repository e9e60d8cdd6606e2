"""The LLM backbone, which all families share: a run of its layers, and the ends where the run has them.

    input_ids_T --embedding--> [T, D] <--features_ED at feature_mask_T
    hidden_TD --layers, packed attention--> hidden_TD --norm, head at targets--> sum of cross entropy

Where features are wider than D (DeepStack), a row holds, after its hidden states, what is to be added to them
after the next layers: [R, D x (1 + n)] before n such layers, [R, D] after the last of them.

Shape letters: see `adapter.py`. K is the number of positions with a target. R is the number of rows that a
rank has between layers: all T, or a part of them where ranks share the layers (`sequence.py`). All modules
and the names of parameters are Hugging Face's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dflop.models.delta_rule import LINEAR, head_rules, layer_period, linear_layers, linear_plan
from dflop.models.experts import (
    BESIDE_MLP,
    WITH_EXPERTS,
    expert_rules,
    has_experts,
    layers_with_experts,
    with_experts,
)
from dflop.models.layer_kinds import (
    FULL,
    WITH_HEADS_OF_KINDS,
    WITH_WINDOWS,
    heads_of,
    kinds_of_layers,
    sees_pictures_whole,
    window_of,
    window_rules,
)
from dflop.models.loss import cap_logits, capped, cross_entropy_rows
from dflop.models.rules import Rule, rope_rule
from dflop.models.sequence import all_rows, own_rows
from dflop.models.short_conv import WITH_SHORT_CONV, conv_rules, short_conv_plan
from dflop.models.sight import sights
from dflop.models.tensor import Cut, LayerPlan, cut_layer
from dflop.models.towers import backbone_name, backbone_of, final_norm_name
from dflop.models.vocabulary import cut_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflop.models.adapter import LlmInput
    from dflop.models.sums import Sums
    from dflop.models.tensor import TensorRank

WITH_NORMS_AFTER = ("glm4v_text", "glm_ocr_text")
"""`model_type` of the backbones that have one map for gate and up, and norms after attention and MLP."""
TEXT_MODELS = (
    "llama",
    "ministral3",
    "mistral",
    "paddleocr_vl_text",
    "qwen2",
    "qwen2_5_omni_text",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3",
    "qwen3_5_text",
    "qwen3_vl_text",
    *WITH_EXPERTS,
    *WITH_NORMS_AFTER,
    *WITH_SHORT_CONV,
    *WITH_WINDOWS,
)
"""`model_type` of the backbones whose layers `LlmStage` can call."""


def backbone_rules(text: Any) -> list[Rule]:
    """What the backbone's configuration must be.

    Args:
        text: configuration of the backbone.

    Returns:
        Rules for `check_rules`.
    """
    # Qwen2 uses its window only where `use_sliding_window` is true; Mistral uses it wherever there is one.
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    return [
        Rule(
            "text_config.model_type",
            text.model_type,
            text.model_type in TEXT_MODELS,
            f"one of {TEXT_MODELS}",
        ),
        *(
            window_rules(text)
            if text.model_type in WITH_WINDOWS
            else [
                Rule("text_config.sliding_window", window, window is None, "null, or not in use"),
                rope_rule(text),
            ]
        ),
        Rule(
            "text_config.layer_types",
            getattr(text, "layer_types", None),
            layer_period(text) is not None,
            "a pattern that comes again and again, as in three linear layers and a full one",
        ),
        *head_rules(text),
        *(conv_rules(text) if text.model_type in WITH_SHORT_CONV else ()),
        *(expert_rules(text) if text.model_type in (*WITH_EXPERTS, *BESIDE_MLP) else ()),
    ]


def norms_of_heads(text: Any) -> tuple[str, ...]:
    """Names, in a layer, of norms over single heads of queries and keys; empty where it has none."""
    if text.model_type in WITH_SHORT_CONV:
        return ("self_attn.q_layernorm", "self_attn.k_layernorm")
    has_them = text.model_type.startswith("qwen3") or text.model_type in WITH_WINDOWS
    return ("self_attn.q_norm", "self_attn.k_norm") if has_them else ()


def kinds_to_cut(text: Any) -> list[str | None]:
    """The kind of each layer, by which tensor parallelism cuts it.

    Args:
        text: configuration of the backbone.

    Returns:
        A kind of `layer_types` for each, or None for each where all layers are cut alike.
    """
    if any(linear_layers(text)):
        return [LINEAR if is_linear else FULL for is_linear in linear_layers(text)]
    if text.model_type in WITH_SHORT_CONV:
        return list(text.layer_types[: text.num_hidden_layers])
    return [*(kinds_of_layers(text) or [None] * text.num_hidden_layers)]


def layer_plan(text: Any, kind: str | None = None, is_dense: bool = False) -> LayerPlan:
    """How tensor parallelism cuts a decoder layer.

    Args:
        text: configuration of the backbone.
        kind: of the layer, of `kinds_to_cut`.
        is_dense: whether the layer is one of the first, which have no experts.

    Returns:
        The plan.
    """
    if text.model_type in WITH_SHORT_CONV:
        return short_conv_plan(text, kind)
    attention = linear_plan(text) if kind == LINEAR else _attention_plan(text, kind)
    if has_experts(text) and not is_dense:
        # Where experts stand in place of the MLP, the configuration need not say how wide that would be.
        return with_experts(text, attention, mlp_cuts(text) if text.model_type in BESIDE_MLP else ())
    return dataclasses.replace(attention, cuts=(*attention.cuts, *mlp_cuts(text)))


def _attention_plan(text: Any, kind: str | None) -> LayerPlan:
    heads = ("text_config.num_attention_heads", text.num_attention_heads)
    has_own = text.model_type in WITH_HEADS_OF_KINDS and kind == FULL and text.attention_k_eq_v
    few = (f"text_config.num_{'global_' if has_own else ''}key_value_heads", heads_of(text, kind)[0])
    has_after = text.model_type in WITH_NORMS_AFTER
    after = ("post_self_attn_layernorm", "post_mlp_layernorm") if has_after else ()
    if text.model_type in WITH_WINDOWS:
        # Those around the MLP; the one behind attention has the name that others' has before the MLP.
        after = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return LayerPlan(
        cuts=(
            Cut("self_attn.q_proj", *heads),
            Cut("self_attn.k_proj", *few, may_repeat=True),
            # Where keys are values too, there is no map for values.
            *(() if has_own else (Cut("self_attn.v_proj", *few, may_repeat=True),)),
            Cut("self_attn.o_proj", *heads, by_input=True),
        ),
        entries=("self_attn", "mlp"),
        # Norms over single heads run on a rank's own heads: they too have only a summand of their gradients.
        between=("input_layernorm", "post_attention_layernorm", *after, *norms_of_heads(text)),
    )


def mlp_cuts(text: Any) -> tuple[Cut, ...]:
    """How tensor parallelism cuts the MLP of a decoder layer.

    Args:
        text: configuration of the backbone.

    Returns:
        A cut of each of its maps.
    """
    width = ("text_config.intermediate_size", text.intermediate_size)
    # One map for both is cut in each of its halves.
    is_joined = text.model_type in WITH_NORMS_AFTER
    first = (("gate_up_proj", 2),) if is_joined else (("gate_proj", 1), ("up_proj", 1))
    return (
        *(Cut(f"mlp.{name}", *width, num_blocks=blocks) for name, blocks in first),
        Cut("mlp.down_proj", *width, by_input=True),
    )


def rotate(rotary: Any, positions: torch.Tensor, like: torch.Tensor, kind: str | None = None) -> Any:
    """Cosine and sine of the rotary embedding.

    Args:
        rotary: Hugging Face's.
        positions: [1, T], or [3, 1, T] (time, height, width) where the backbone has M-RoPE.
        like: tells device and dtype.
        kind: of the layers, where each kind has angles of its own.

    Returns:
        Two tensors, as the backbone's layers take them.
    """
    if kind is not None:
        return rotary(like, positions, kind)
    if hasattr(rotary, "mrope_section") and positions.dim() == 2:
        positions = positions[None].expand(3, -1, -1)
    return rotary(like, positions)


class LlmStage(nn.Module):
    """A run of layers of the backbone; parameter names are those of the whole model."""

    def __init__(self, whole: nn.Module, layers: range, is_first: bool, is_last: bool) -> None:
        super().__init__()
        source = backbone_of(whole)
        self.is_first = is_first
        self.is_last = is_last
        self.width: int = source.config.hidden_size
        self.row_losses_K: torch.Tensor | None = None
        """Loss of each position with a target, from the last forward: [K] float32; last stage only."""
        self.row_sums: Sums | None = None
        """Collectives of the ranks that share layers and rows; none where a rank has its layers whole."""
        self.model = nn.Module()
        stage: Any = nn.Module()
        setattr(self.model, backbone_name(whole), stage)
        is_tied = cast("Any", whole).lm_head.weight is source.embed_tokens.weight
        if self.is_first or (self.is_last and is_tied):
            # A tied head holds the embedding's matrix under the embedding's name. By that name the first and
            # the last stage draw the same values and sum their gradients.
            stage.embed_tokens = source.embed_tokens
        # A dictionary, since the keys of a list would start at 0 in every stage.
        stage.layers = nn.ModuleDict({str(index): source.layers[index] for index in layers})
        kinds = kinds_of_layers(source.config)
        self.kinds: list[str | None] = [None if kinds is None else kinds[index] for index in layers]
        """Of its layers in order, where there are several kinds."""
        have = layers_with_experts(source.config) if has_experts(source.config) else None
        of_plans = kinds_to_cut(source.config)
        self.kinds_to_cut = [of_plans[index] for index in layers]
        """Of its layers in order: the kind by which each is cut."""
        self.are_dense = [have is not None and not have[index] for index in layers]
        """Of its layers in order: whether a layer has no experts though others have."""
        self.windows = {kind: window_of(source.config, kind) for kind in self.kinds if kind is not None}
        self.whole_in = {w for kind, w in self.windows.items() if sees_pictures_whole(source.config, kind)}
        """Windows of those of its layers that see pictures whole."""
        if layers:
            stage.rotary_emb = source.rotary_emb
        if self.is_last:
            name = final_norm_name(source)
            setattr(stage, name, getattr(source, name))
            self.lm_head = cast("Any", whole).lm_head
            cap_logits(self.lm_head, getattr(source.config, "final_logit_softcapping", None))

    def cut(self, plan_of: Callable[[str | None, bool], LayerPlan], tensor: TensorRank) -> None:
        """Reduces its layers, and its embedding and head if it has them, to the part of one rank.

        Args:
            plan_of: how a layer is cut, by its kind and whether it has no experts though others have.
            tensor: whose part.

        Raises:
            ProfileError: heads, widths or the vocabulary cannot be dealt out; the message names the field.
        """
        for kind, is_dense, layer in zip(
            self.kinds_to_cut, self.are_dense, self.layers_in_order(), strict=True
        ):
            cut_layer(layer, plan_of(kind, is_dense), tensor.degree, tensor.rank)
        stage = backbone_of(self)
        ends = [stage.embed_tokens] if hasattr(stage, "embed_tokens") else []
        ends += [self.lm_head] if self.is_last else []
        is_tied = len({end.weight for end in ends}) < len(ends)
        for end in ends:
            cut_vocabulary(end, tensor.degree, tensor.rank)
        if is_tied:
            # Embedding and head were cut one by one, to the same rows: here they are tied again.
            self.lm_head.weight = stage.embed_tokens.weight

    def layers_in_order(self) -> list[nn.Module]:
        """Its layers, in the order in which a forward runs them."""
        return list(backbone_of(self).layers.values())

    def ends(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Embedding and head: the most that it has beside its layers.

        Returns:
            Each that it holds and whose matrix is its own. A matrix that both share can be in neither alone.
        """
        embedding = getattr(backbone_of(self), "embed_tokens", None)
        head = self.lm_head if self.is_last else None
        if embedding is not None and head is not None and embedding.weight is head.weight:
            return None, None
        return embedding, head

    def forward(self, batch: LlmInput, incoming: torch.Tensor) -> torch.Tensor:
        """The stage's part of the way from tokens to loss.

        Args:
            batch: the packed samples.
            incoming: features_ED [E, D] for the first stage, hidden_RD [R, D] for the others: all T rows, or
                this rank's where a tensor group shares them.

        Returns:
            hidden_RD [R, D]; from the last stage the sum of the cross entropy over all targets, a float32
            scalar.

        Raises:
            ValueError: the number of features differs from that of their places.
        """
        hidden_RD = self.hidden(batch, incoming)
        if not self.is_last:
            return hidden_RD
        num_tokens = batch.input_ids_T.shape[0]
        hidden_TD = hidden_RD if self.row_sums is None else all_rows(hidden_RD, num_tokens, self.row_sums)
        rows_K = cross_entropy_rows(self.lm_head, *self.normed(batch, hidden_TD))
        self.row_losses_K = rows_K.detach()
        return rows_K.sum()

    def hidden(self, batch: LlmInput, incoming: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layers of this stage, before the final norm.

        Args:
            batch: the packed samples.
            incoming: as in `forward`.

        Returns:
            hidden_RD: [R, D], all T rows or this rank's.

        Raises:
            ValueError: the number of features differs from that of their places.
        """
        if batch.input_ids_T.shape[0] == 0:
            # Nothing is computed, but backward can start from the result and gives gradients of exactly zero.
            smallest = min(self.parameters(), key=torch.Tensor.numel)
            width = self.outgoing_width(incoming.shape[1])
            return incoming[:0, :width] + smallest.reshape(-1)[:0].sum()
        hidden_RD = self._embed(batch, incoming) if self.is_first else incoming
        if self.is_first and self.row_sums is not None:
            hidden_RD = own_rows(hidden_RD, self.row_sums)
        stage = backbone_of(self)
        if not stage.layers:
            return hidden_RD
        hidden_RD, *deep_RD = hidden_RD.split(self.width, dim=1)
        # A copy where it is a view, which would keep the memory of all that is added later.
        hidden_1RD = hidden_RD.contiguous()[None]
        # [T] becomes [1, T]; [3, T] of M-RoPE becomes [3, 1, T].
        positions = batch.positions_T.unsqueeze(-2)
        angles = {kind: rotate(stage.rotary_emb, positions, hidden_1RD, kind) for kind in set(self.kinds)}
        seen = {"sights": self._sights(batch)} if self.windows else {}
        for kind, layer in zip(self.kinds, stage.layers.values(), strict=True):
            hidden_1RD = layer(
                hidden_1RD,
                attention_mask=None,
                position_ids=positions if positions.dim() == 2 else positions[0],
                use_cache=False,
                position_embeddings=angles[kind],
                cu_seq_lens_q=batch.cu_seqlens,
                segment_tokens=batch.segment_tokens,
                **seen,
            )
            if deep_RD:
                hidden_1RD = hidden_1RD + deep_RD.pop(0)
        return torch.cat([hidden_1RD[0], *deep_RD], dim=1) if deep_RD else hidden_1RD[0]

    def _sights(self, batch: LlmInput) -> Any:
        """What each kind of its layers sees, by window."""
        return sights(
            self.windows.values(),
            batch.feature_mask_T,
            batch.cu_seqlens,
            batch.segment_tokens,
            has_pictures=batch.num_features > 0,
            whole=self.whole_in,
        )

    def outgoing_width(self, incoming_width: int) -> int:
        """Values of a row after the layers of this stage.

        Args:
            incoming_width: of features or of a row before them.

        Returns:
            D, or more where further stages add features.
        """
        return max(self.width, incoming_width - self.width * len(self.layers_in_order()))

    def _embed(self, batch: LlmInput, features_ED: torch.Tensor) -> torch.Tensor:
        """Text embeddings with the features in their places: [T, D], or as wide as features are."""
        mask_T = batch.feature_mask_T
        places = batch.num_features
        if places != features_ED.shape[0]:
            message = f"{features_ED.shape[0]} features for {places} places"
            raise ValueError(message)
        # Placeholders read row 0, since their own id may lie outside the vocabulary. They add nothing to its
        # gradient: features take their places.
        embedded_TD = backbone_of(self).embed_tokens(batch.input_ids_T.masked_fill(mask_T, 0))
        # What later layers add to text is zero.
        embedded_TD = nn.functional.pad(embedded_TD, (0, features_ED.shape[1] - self.width))
        if places == 0:
            # Features without rows still take part in the result, so that their gradient exists (as zeros).
            return embedded_TD + features_ED.sum() if features_ED.requires_grad else embedded_TD
        # Not by the mask: the backward of `masked_scatter` asks the device how many places it has.
        return embedded_TD.index_copy(0, batch.feature_rows_E, features_ED.to(embedded_TD.dtype))

    def logits(self, batch: LlmInput, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits where there is a target.

        Norm and head work on rows alone, so the other rows need not be computed.

        Args:
            batch: the packed samples.
            hidden_TD: [T, D], all rows of the result of `hidden` of the last stage.

        Returns:
            logits_KV [K, V] and targets_K [K] of the K positions with a target, in order.
        """
        normed_KD, targets_K = self.normed(batch, hidden_TD)
        return capped(self.lm_head, self.lm_head(normed_KD)), targets_K

    def normed(self, batch: LlmInput, hidden_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the head reads, where there is a target.

        Args:
            batch: the packed samples.
            hidden_TD: [T, D], all rows of the result of `hidden` of the last stage.

        Returns:
            Rows [K, D] after the final norm, and targets_K [K], of the K positions with a target, in order.
        """
        rows_K = batch.target_rows_K
        stage = backbone_of(self)
        normed_KD = getattr(stage, final_norm_name(stage))(hidden_TD.index_select(0, rows_K))
        return normed_KD, batch.targets_T.index_select(0, rows_K)
