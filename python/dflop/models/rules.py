"""Rules that a model's configuration must keep, and the error that lists those it breaks."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.models.errors import hinted, profile_error

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

# In these kinds, frequencies depend on the longest position of a call, hence on the samples packed together.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Parts of the names of fields, such as `attention_dropout`, `layerdrop`, `drop_path_rate`, `resid_pdrop`.
_DROPS = ("dropout", "layerdrop", "drop_path", "pdrop")
# Where a file is of a whole model that hears, thinks and talks: the part that hears and thinks.
_THINKER = "thinker_config"


@dataclass(frozen=True)
class Rule:
    """A field of the configuration, and what it must be."""

    field: str
    """Its path in `config.json`."""
    value: Any
    """The value that the field has."""
    holds: bool
    """Whether the rule holds."""
    wanted: str
    """What the field must be, in words that follow `must be`."""


def trained_part(content: Mapping[str, Any]) -> tuple[Any, str]:
    """What `config.json` says of the model that trains.

    Args:
        content: of the file.

    Returns:
        All of it, or the section of a thinker (Qwen2.5-Omni, Qwen3-Omni); and what stands before the names of
        its fields.
    """
    section = content.get(_THINKER)
    return (section, f"{_THINKER}.") if isinstance(section, dict) else (content, "")


def check_rules(path: Path, rules: Sequence[Rule], prefix: str = "") -> None:
    """Refuses a configuration that breaks a rule.

    Args:
        path: of `config.json`.
        rules: all of them; the message names each that is broken.
        prefix: as `trained_part` gives it.

    Raises:
        ProfileError: one is broken.
    """
    broken = [f"  `{prefix}{r.field}` is {r.value}, must be {r.wanted}" for r in rules if not r.holds]
    if broken:
        message = "\n".join([f"`{path}` cannot be used", *broken])
        raise profile_error(message)


def rope_rule(text: Any, kind: str | None = None) -> Rule:
    """The rotary embedding of a sample must be the same in a pack as alone.

    Args:
        text: configuration of the backbone.
        kind: of the layers, where each kind has parameters of its own.

    Returns:
        The rule.
    """
    parameters = getattr(text, "rope_parameters", None) or {}
    field = "text_config.rope_parameters"
    if kind is not None:
        parameters, field = parameters.get(kind) or {}, f"{field}.{kind}"
    rope = parameters.get("rope_type", "default")
    wanted = f"none of {_LENGTH_DEPENDENT_ROPE}"
    return Rule(f"{field}.rope_type", rope, rope not in _LENGTH_DEPENDENT_ROPE, wanted)


def dropout_rules(config: Mapping[str, Any]) -> list[Rule]:
    """There must be no dropout: random draws would depend on how samples are packed and dealt out to ranks.

    Then the gradient of a global batch would depend on its schedule, which it must not.

    Args:
        config: the fields of `config.json`, or of Hugging Face's configuration.

    Returns:
        A rule for each field that drops, in each part of the configuration.
    """
    rules = []
    for name, value in config.items():
        if hasattr(value, "items"):
            rules += [replace(rule, field=f"{name}.{rule.field}") for rule in dropout_rules(value)]
        elif any(word in str(name) for word in _DROPS) and isinstance(value, (int, float)):
            wanted = "0: what is dropped at random would depend on the schedule, and with it the gradient"
            rules.append(Rule(name, value, value == 0, wanted))
    return rules


def read_family(model_dir: str | os.PathLike[str], families: Sequence[str]) -> str:
    """The family of the model in `model_dir`: the `model_type` of its `config.json`.

    Args:
        model_dir: folder with `config.json`, Hugging Face form.
        families: those that are known.

    Returns:
        One of `families`.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: `config.json` is not JSON, or its family is not known; the message names those that are.
    """
    path = Path(model_dir) / "config.json"
    try:
        family = json.loads(path.read_bytes()).get("model_type")
    except (ValueError, AttributeError) as error:
        message = f"`{path}` is not a model configuration: {error}"
        raise profile_error(message) from error
    if family not in families:
        known = ", ".join(f"`{name}`" for name in families)
        message = f"`{path}` is of model family `{family}`, known are {known}"
        raise hinted(profile_error(message), _way_out(family))
    return family


def _way_out(family: object) -> str:
    """What a user can do about a family that is not known here.

    Args:
        family: `model_type` of a `config.json`; may be of any type.

    Returns:
        A hint.
    """
    from dflop._native import families

    can = families().get(family) if isinstance(family, str) else None
    if can is not None and can["estimate"]:
        return (
            "plan with it on estimated times: `dflop profile model --estimate --hardware NAME`; "
            "`dflop models` lists what dflop can do with each family"
        )
    return (
        "with a family of your own dflop can profile data only: CONTRIBUTING.md, `Add a model family`, "
        "says what it needs to be measured and trained; `dflop models` lists what each family can do"
    )
