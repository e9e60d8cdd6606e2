"""Kinds of layers of a backbone of which most see a window (Gemma 3): which there are, what they must be."""

from __future__ import annotations

from typing import Any

from dflop.models.rules import Rule, rope_rule

SLIDING, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in `layer_types`."""
WITH_WINDOWS = ("gemma3_text",)
"""`model_type` of the backbones of which some layers see a window, and whose pictures are seen whole."""
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
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    both = text.use_bidirectional_attention
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
        Rule(
            "text_config.use_bidirectional_attention", both, not both, "false: text is seen from before alone"
        ),
        *(Rule(f"text_config.{cap}", getattr(text, cap), getattr(text, cap) is None, "null") for cap in caps),
        *(rope_rule(text, kind) for kind in (SLIDING, FULL)),
    ]
