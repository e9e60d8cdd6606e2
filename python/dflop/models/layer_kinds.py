"""Kinds of layers of a backbone of which most see a window (Gemma 3 and 4), and what they must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflop.models.rules import Rule, rope_rule

if TYPE_CHECKING:
    from collections.abc import Iterable

SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in `layer_types`."""
WITH_HEADS_OF_KINDS = ("gemma4_text",)
"""`model_type` of the backbones of which each kind of layers has heads of its own."""
WITH_WINDOWS = ("gemma3_text", *WITH_HEADS_OF_KINDS)
"""`model_type` of the backbones of which some layers see a window, and whose pictures are seen whole."""
_WITHOUT_ATTENTION = ("linear_attention", "conv")
"""Kinds of layers that have something else in place of attention."""
# The profiler runs so many layers at once, at most.
_RUN_MAX = 8


def kinds_of_layers(text: Any) -> list[str] | None:
    """The kind of each layer, by which it is called with angles of its own.

    Args:
        text: configuration of the backbone.

    Returns:
        `SLIDING` or `FULL` for each; None where all layers are called alike.
    """
    if text.model_type not in WITH_WINDOWS:
        return None
    return list(text.layer_types[: text.num_hidden_layers])


def window_of(text: Any, kind: str) -> int | None:
    """How many tokens a layer sees at most.

    Args:
        text: configuration of the backbone.
        kind: of the layer.

    Returns:
        The number; None: all.
    """
    return text.sliding_window if kind == SLIDING else None


def sees_pictures_whole(text: Any, kind: str) -> bool:
    """Whether the tokens of a picture see those of it that are behind them.

    Args:
        text: configuration of the backbone, of `WITH_WINDOWS`.
        kind: of the layer.

    Returns:
        True for all layers of Gemma 3, and for those of Gemma 4 that see a window, where it is configured so.
    """
    if text.model_type not in WITH_HEADS_OF_KINDS:
        return True
    return kind == SLIDING and text.use_bidirectional_attention == "vision"


def heads_of(text: Any, kind: str | None = None) -> tuple[int, int]:
    """Heads of keys and values, and the width of a head.

    Args:
        text: configuration of the backbone.
        kind: of the layer; None: where all layers have the same heads, or else of the first.

    Returns:
        Both.
    """
    if text.model_type in WITH_HEADS_OF_KINDS:
        layer = 0 if kind is None else text.layer_types.index(kind)
        own = text.per_layer_config[layer]
        return own.num_key_value_heads, own.head_dim
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return text.num_key_value_heads, head_size


def layers_that_attend(text: Any) -> list[bool]:
    """Of each layer of a backbone, whether it has attention over the tokens of a sample, or of a window.

    Args:
        text: configuration of the backbone.

    Returns:
        One answer a layer, in order.
    """
    count = text.num_hidden_layers
    kinds = (getattr(text, "layer_types", None) or [FULL] * count)[:count]
    return [kind not in _WITHOUT_ATTENTION for kind in kinds]


def run_like_all(text: Any) -> int:
    """How many of the first layers stand for all, because of both kinds they have nearly the share of all.

    Args:
        text: configuration of the backbone, of `WITH_WINDOWS`.

    Returns:
        1 where all layers are of one kind; all layers where no short run has both kinds.
    """
    are_full = [kind == FULL for kind in kinds_of_layers(text) or []]
    if len(set(are_full)) < 2:
        return 1
    share = sum(are_full) / len(are_full)
    runs = [n for n in range(2, min(_RUN_MAX, len(are_full)) + 1) if len(set(are_full[:n])) == 2]
    return min(runs, key=lambda n: abs(sum(are_full[:n]) / n - share), default=len(are_full))


def window_rules(text: Any) -> list[Rule]:
    """What the configuration of such a backbone must be.

    Args:
        text: configuration of a backbone of `WITH_WINDOWS`.

    Returns:
        Rules for `check_rules`.
    """
    kinds, window = list(text.layer_types[: text.num_hidden_layers]), text.sliding_window
    return [
        Rule(
            "text_config.layer_types",
            kinds,
            set(kinds) <= {SLIDING, FULL} and len(kinds) == text.num_hidden_layers and FULL in kinds,
            f"`{SLIDING}` or `{FULL}` for each layer, and the latter for one at least",
        ),
        Rule(
            "text_config.sliding_window",
            window,
            SLIDING not in kinds or (isinstance(window, int) and window > 0),
            "a number of tokens, as some layers see a window",
        ),
        *(_rules_of_gemma4(text) if text.model_type in WITH_HEADS_OF_KINDS else _rules_of_gemma3(text)),
        *(rope_rule(text, kind) for kind in (SLIDING, FULL)),
    ]


def keep_none_for_others(layers: Iterable[Any]) -> None:
    """Has layers keep no keys and values for others: no layer of a model that is trained reads them.

    Since transformers 5.24 the last layers of every Gemma 4 keep them, of models without such layers too.

    Args:
        layers: of a backbone.
    """
    for layer in layers:
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "store_full_length_kv", False):
            attention.store_full_length_kv = False


def _rules_of_gemma3(text: Any) -> list[Rule]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    both = text.use_bidirectional_attention
    return [
        Rule(
            "text_config.use_bidirectional_attention", both, not both, "false: text is seen from before alone"
        ),
        *(Rule(f"text_config.{cap}", getattr(text, cap), getattr(text, cap) is None, "null") for cap in caps),
    ]


def _rules_of_gemma4(text: Any) -> list[Rule]:
    """What tells the models that are trained from the small ones."""
    both, width = text.use_bidirectional_attention, text.hidden_size_per_layer_input
    shared, cap = text.num_kv_shared_layers, text.final_logit_softcapping
    return [
        Rule(
            "text_config.use_bidirectional_attention",
            both,
            both in (None, "vision"),
            "null or `vision`: text is seen from before alone",
        ),
        Rule(
            "text_config.hidden_size_per_layer_input",
            width,
            not width,
            "0: models with embeddings for single layers (E2B, E4B) are not trained",
        ),
        Rule(
            "text_config.num_kv_shared_layers",
            shared,
            shared == 0,
            "0: models whose layers read keys and values of others (E2B, E4B) are not trained",
        ),
        Rule("text_config.final_logit_softcapping", cap, cap is None or cap > 0, "null, or above 0"),
    ]
