"""Experts in place of the MLP of a backbone's layers, or beside it: which layers have them, and the rules."""

from __future__ import annotations

import dataclasses
from typing import Any

from dflop.models.rules import Rule
from dflop.models.tensor import Cut, LayerPlan

WITH_DENSE_FIRST = ("glm4v_moe_text",)
"""`model_type` of the backbones whose first layers have an MLP, all others experts."""
WITH_EXPERTS = (
    "qwen3_moe",
    "qwen3_vl_moe_text",
    "qwen3_omni_moe_text",
    "qwen3_5_moe_text",
    *WITH_DENSE_FIRST,
)
"""`model_type` of the backbones whose layers have experts in place of the MLP."""
WITH_SHARED_GATE = ("qwen3_5_moe_text",)
"""`model_type` of the backbones with one expert for all tokens, times a gate."""
BESIDE_MLP = ("gemma4_text",)
"""`model_type` of the backbones whose layers may have experts beside the MLP (`enable_moe_block`)."""
_NORMS_BESIDE = (
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
)
"""Norms of such layers: behind the MLP, before the experts, behind them."""


def with_experts(text: Any, layer: LayerPlan, mlp: tuple[Cut, ...]) -> LayerPlan:
    """How tensor parallelism cuts a layer with experts: each expert's width is dealt out, as an MLP's is.

    A rank has a part of every expert and the whole router. All ranks choose the same experts, as they read
    the same rows; each has a summand of what the experts give.

    Args:
        text: configuration of a backbone with experts.
        layer: how attention and norms are cut.
        mlp: how an MLP beside experts is cut.

    Returns:
        The plan.
    """
    width = ("text_config.moe_intermediate_size", text.moe_intermediate_size)

    def experts(path: str) -> tuple[Cut, Cut]:
        # Gates lie before all others in one parameter, and each half is cut.
        first = Cut(path, *width, num_blocks=2, kind="gate_up_proj")
        return first, Cut(path, *width, by_input=True, kind="down_proj")

    if text.model_type in BESIDE_MLP:
        # Norms and router stand before the rows are gathered.
        return dataclasses.replace(
            layer,
            cuts=(*layer.cuts, *mlp, *experts(experts_path(text))),
            entries=(*layer.entries, "experts"),
            between=(*layer.between, *_NORMS_BESIDE, "router", "router.proj"),
        )
    shared, gate = (), ()
    names = (("gate_proj", False), ("up_proj", False), ("down_proj", True))
    if text.model_type in WITH_DENSE_FIRST:
        wide = (width[0], text.moe_intermediate_size * text.n_shared_experts)
        shared = tuple(Cut(f"mlp.shared_experts.{name}", *wide, by_input=by) for name, by in names)
    elif text.model_type in WITH_SHARED_GATE:
        wide = ("text_config.shared_expert_intermediate_size", text.shared_expert_intermediate_size)
        # The router reads the same rows, in their own dtype.
        shared = tuple(
            Cut(f"mlp.shared_expert.{name}", *wide, by_input=by, keeps_all_rows=not by) for name, by in names
        )
        gate = ("mlp.shared_expert_gate",)
    return dataclasses.replace(
        layer,
        cuts=(*layer.cuts, *experts(experts_path(text)), *shared),
        # Experts, and what all tokens read, are summed once.
        exits=("mlp",),
        partial=("mlp.gate", *gate),
    )


def experts_field(text: Any) -> str:
    """Name of the field that says how many experts a layer has.

    Args:
        text: configuration of a backbone that may have experts.

    Returns:
        The field of `text_config`.
    """
    return "n_routed_experts" if text.model_type in WITH_DENSE_FIRST else "num_experts"


def experts_path(text: Any) -> str:
    """Path of the module that has the experts' parameters, inside a layer.

    Args:
        text: configuration of a backbone with experts.

    Returns:
        The path.
    """
    return "experts" if text.model_type in BESIDE_MLP else "mlp.experts"


def num_experts(text: Any) -> int:
    """Experts of a layer that has them.

    Args:
        text: configuration of a backbone that may have experts.

    Returns:
        The number, without those that all tokens read.
    """
    return getattr(text, experts_field(text))


def expert_rules(text: Any) -> list[Rule]:
    """What the configuration of a backbone with experts must be.

    Args:
        text: configuration of a backbone that may have experts.

    Returns:
        Rules for `check_rules`.
    """
    if text.model_type in BESIDE_MLP:
        return _rules_beside_mlp(text) if text.enable_moe_block else []
    have, count = layers_with_experts(text), num_experts(text)
    # The planner takes the first layers for ones like the others, which need more memory.
    are_alike = len(set(have)) == 1 or text.model_type in WITH_DENSE_FIRST
    # The text model of Qwen3-VL has no such field in transformers 5.17.
    has_router_loss = getattr(text, "output_router_logits", False)
    is_dealt = getattr(text, "decoder_sparse_step", 1) > 1 and not are_alike
    field = "decoder_sparse_step" if is_dealt else "mlp_only_layers"
    return [
        Rule(
            "text_config.output_router_logits",
            has_router_loss,
            not has_router_loss,
            "false: the loss that balances experts is of a microbatch and not of its samples, so the "
            "gradient would depend on the schedule",
        ),
        Rule(
            f"text_config.{field}",
            getattr(text, field, None),
            are_alike,
            f"such that all {len(have)} layers have experts or none (now {sum(have)} have): the planner "
            "knows one kind of layer",
        ),
        Rule(
            "text_config.num_experts_per_tok",
            text.num_experts_per_tok,
            not any(have) or 1 <= text.num_experts_per_tok <= count,
            f"from 1 to `{experts_field(text)}`, {count}",
        ),
        *(_group_rules(text) if text.model_type in WITH_DENSE_FIRST and any(have) else ()),
    ]


def _rules_beside_mlp(text: Any) -> list[Rule]:
    count, chosen, width = text.num_experts, text.top_k_experts, text.moe_intermediate_size
    are_there = isinstance(count, int) and count > 0
    return [
        Rule("text_config.num_experts", count, are_there, "above 0, as `enable_moe_block` is true"),
        Rule(
            "text_config.top_k_experts",
            chosen,
            not are_there or (isinstance(chosen, int) and 1 <= chosen <= count),
            f"from 1 to `num_experts`, {count}",
        ),
        Rule("text_config.moe_intermediate_size", width, isinstance(width, int) and width > 0, "above 0"),
    ]


def _group_rules(text: Any) -> list[Rule]:
    """Experts in groups: a token reads those of a few alone, chosen by the sum of a group's two best."""
    groups, chosen, count = text.n_group, text.topk_group, num_experts(text)
    are_groups = groups >= 1 and count % groups == 0 and count // groups >= 2
    size = count // groups if are_groups else 0
    return [
        Rule(
            "text_config.n_group",
            groups,
            are_groups,
            f"groups of equal size, of 2 experts or more, that `n_routed_experts`, {count}, form",
        ),
        Rule(
            "text_config.topk_group",
            chosen,
            not are_groups or (1 <= chosen <= groups and chosen * size >= text.num_experts_per_tok),
            f"from 1 to `n_group`, {groups}, and so many groups that they have `num_experts_per_tok` experts",
        ),
    ]


def has_experts(text: Any) -> bool:
    """Whether layers of the backbone have experts, in place of the MLP or beside it.

    Args:
        text: configuration of the backbone.

    Returns:
        True if some have; the family's rules see to it that then all have, or all behind the first ones.
    """
    return text.model_type in (*WITH_EXPERTS, *BESIDE_MLP) and any(layers_with_experts(text))


def layers_with_experts(text: Any) -> list[bool]:
    """Of each layer, whether it has experts: as transformers decides it.

    Args:
        text: configuration of a backbone that may have experts.

    Returns:
        One answer a layer, in order.
    """
    if text.model_type in BESIDE_MLP:
        return [bool(text.enable_moe_block)] * text.num_hidden_layers
    if text.model_type in WITH_DENSE_FIRST:
        first = text.first_k_dense_replace
        return [layer >= first for layer in range(text.num_hidden_layers)]
    # Qwen3.5 has neither field: there all layers have experts.
    without, step = getattr(text, "mlp_only_layers", ()), getattr(text, "decoder_sparse_step", 1)
    return [
        layer not in without and text.num_experts > 0 and (layer + 1) % step == 0
        for layer in range(text.num_hidden_layers)
    ]
