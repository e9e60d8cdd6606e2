"""A shape rule as a function of Python, for a model family that dflop does not know.

dflop.yaml   model: {dir: ..., family: my_rules:shape}     -> load -> CallableFamily -> native module
                               family: transformers           the model's own processor (`processor/rule.py`)
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dflop._native import ProfileError

KINDS = ("image", "video", "audio")
PROCESSOR = "transformers"
"""What `model.family` says for the processor that transformers has for the model."""


@dataclass(frozen=True)
class CallableFamily:
    """A function that gives the shape of a medium, and what is known of it."""

    name: str
    """As in `my_rules:shape`; a data profile carries it."""
    version: str
    """SHA-256 of the source of its module: shapes of an older one are not taken for its own."""
    marks: Mapping[str, tuple[str, str]]
    """(placeholder of the chat template, token of one feature) for each kind of media that it reads."""
    function: Callable[..., object]


def load(name: str, directory: str | Path) -> CallableFamily:
    """Imports the function that `model.family` names.

    Args:
        name: `module:function`; or `transformers`, for the processor of a model.
        directory: Of the configuration; a module that is installed nowhere is looked for there. For a
            processor, of the model.

    Returns:
        The function and what is known of it.

    Raises:
        ProfileError: It cannot be imported, or `describe` refuses it; or the processor cannot be asked.
    """
    if name == PROCESSOR:
        from dflop.data.processor.rule import ProcessorRule

        rule = ProcessorRule(directory)
        return CallableFamily(name, rule.version(), rule.marks, rule)
    module_name, _, path = name.partition(":")
    place = str(Path(directory).resolve())
    if place not in sys.path:
        # At the end: a file beside the configuration must not stand in for an installed module.
        sys.path.append(place)
    try:
        function: object = importlib.import_module(module_name)
        for attribute in path.split("."):
            function = getattr(function, attribute)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        message = f"`model.family` is `{name}`, it cannot be imported: {cause}"
        raise ProfileError(message) from error
    return describe(function, name)


def describe(family: object, name: str | None = None) -> CallableFamily:
    """What the native module must know of a function.

    Args:
        family: The function, with the attribute `marks`; or what this function returned.
        name: Its name; by default that of its module and its own.

    Returns:
        The function and what is known of it.

    Raises:
        ProfileError: It cannot be called, or its `marks` are not a (placeholder, feature token) for each
            kind.
    """
    if isinstance(family, CallableFamily):
        return family
    own_name = getattr(family, "__qualname__", type(family).__qualname__)
    module_name = getattr(family, "__module__", type(family).__module__)
    name = name or f"{module_name}:{own_name}"
    if not callable(family):
        message = f"`{name}` is of type `{type(family).__name__}`, must be a function"
        raise ProfileError(message)
    return CallableFamily(name, _version(module_name), _marks(name, family), family)


def _marks(name: str, family: object) -> dict[str, tuple[str, str]]:
    """The function's `marks`, checked."""
    marks = getattr(family, "marks", None)
    rule = f"must have `marks`, a (placeholder, feature token) for each of {', '.join(KINDS)} that it reads"
    if not isinstance(marks, Mapping) or not marks:
        message = f"`{name}` {rule}"
        raise ProfileError(message)
    checked: dict[str, tuple[str, str]] = {}
    for kind, pair in marks.items():
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if kind not in KINDS or not is_pair or not all(isinstance(text, str) and text for text in pair):
            message = f"`{name}` has marks {{{kind!r}: {pair!r}}}, {rule}"
            raise ProfileError(message)
        checked[kind] = (pair[0], pair[1])
    return checked


def _version(module_name: str) -> str:
    """SHA-256 of a module's source; `unknown` where there is none, as for a compiled one."""
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return "unknown"
    return hashlib.sha256(source.encode()).hexdigest()
