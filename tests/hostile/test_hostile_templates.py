"""Chat templates are programs from outside: none ends the command that runs it, or takes all memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Answer

TALK = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
)
"""A template that does what it should; what stands before it is the attack."""


def doubling(step: str) -> str:
    """A text that grows by `step` sixty times, in a namespace: a loop forgets what it sets."""
    return (
        "{% set ns = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set ns.x = "
        + step
        + " %}{% endfor %}"
    )


NESTED = "{% set ns = namespace(x=[]) %}{% for i in range(30000) %}{% set ns.x = [ns.x] %}{% endfor %}"

ATTACKS = {
    "a namespace that holds itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "lists that hold each other": "{% set a = namespace() %}{% set a.x = [a] %}{{ a.x }}",
    "a sum of 30,000 numbers": "{{ 1" + "+1" * 30_000 + " }}",
    "30,000 brackets": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "30,000 lists in each other": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
    "30,000 negations": "{{ " + "not " * 30_000 + "1 }}",
    "30,000 filters": "{{ 1" + "|string" * 30_000 + " }}",
    "30,000 ifs": "{% if 1 %}" * 30_000 + "{% endif %}" * 30_000,
    "a deep list that is printed": NESTED + "{{ ns.x }}",
    "a deep list that is dropped": NESTED,
    "a deep list as JSON": NESTED + "{{ ns.x | tojson }}",
    "a deep list compared": NESTED + "{{ ns.x == ns.x }}",
    "doubling by ~": doubling("ns.x ~ ns.x"),
    "doubling by +": doubling("ns.x + ns.x"),
    "doubling by join": doubling("[ns.x, ns.x] | join"),
    "doubling by replace": doubling("ns.x | replace('a', ns.x)"),
    "doubling by a method": doubling("ns.x.replace('a', ns.x)"),
    "doubling by format": doubling("'%s%s' | format(ns.x, ns.x)"),
    "doubling by a list": doubling("[ns.x, ns.x] | string"),
    "doubling by a block": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ ns.x }}"
    "{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "a wide indent": "{{ 'a\nb' | indent(10**10) }}",
    "a wide format": "{{ '%1000000000d' | format(1) }}",
    "a text times a number": "{{ 'abcdefgh' * 10**8 }}{{ 'abcdefgh' * 10**8 }}{{ 'abcdefgh' * 10**8 }}",
    "a wide center": "{{ 'a' | center(10**10) }}",
    "a long range": "{{ range(10**9) | list | length }}",
    "loops in loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "batches of nothing": "{{ [1] | batch(10**9, 'x' * 1000) | list | string | length }}",
}


REFUSED = {
    "a namespace that holds itself",
    "30,000 lists in each other",
    "a deep list that is printed",
    "doubling by ~",
    "doubling by replace",
    "a wide indent",
    "loops in loops",
}
"""Those of which we know that they can come to no good."""


@pytest.mark.some(4, 8)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_ends_no_command(attack: str, demo: Path, dflop: Callable[..., Answer]) -> None:
    """It is refused by name, or does no harm: then the data are profiled."""
    (demo / "model/chat_template.jinja").write_text(ATTACKS[attack] + TALK)
    answer = dflop("profile", "data")
    assert answer.is_sound, answer
    assert answer.status != 0 or attack not in REFUSED
    if answer.status != 0:
        assert "chat_template.jinja" in answer.error, answer.error
        assert "the chat template" in answer.error


def test_one_conversation_that_breaks_a_template_is_one_bad_sample(
    demo: Path, dflop: Callable[..., Answer]
) -> None:
    """The template is sound where it is opened, and explodes on what one record says."""
    bomb = "{% if 'boom' in (messages | string) %}" + doubling("ns.x ~ ns.x") + "{% endif %}"
    (demo / "model/chat_template.jinja").write_text(bomb + TALK)
    record = '{"conversations": [{"from": "human", "value": "boom"}, {"from": "gpt", "value": "yes"}]}\n'
    calm = record.replace("boom", "calm")
    (demo / "data/own.jsonl").write_text(calm + record + calm)
    config = (demo / "dflop.yaml").read_text().replace("mixture.yaml", "own.jsonl")
    (demo / "dflop.yaml").write_text(config)
    assert dflop("profile", "data").refuses("line 2", "the chat template", "1024 MiB")
    (demo / "dflop.yaml").write_text(config.replace("on_bad_sample: fail", "on_bad_sample: skip"))
    answer = dflop("profile", "data")
    assert answer.is_sound, answer


def test_a_sound_template_is_read_as_before(demo: Path, dflop: Callable[..., Answer]) -> None:
    (demo / "model/chat_template.jinja").write_text(TALK)
    answer = dflop("profile", "data")
    assert answer.status == 0, answer.error
