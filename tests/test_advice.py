"""Advice that several parts of ddpsafe give stands once."""

from __future__ import annotations

import re

import pytest
from source_tree import CHECKOUT, PACKAGE, text_of

from ddpsafe._advice import ADVICE, COMMANDS, GENERAL
from ddpsafe._explain.catalogue import built_in

SOURCES = {
    path: text_of(path)
    for pattern in ("*.py", "*.toml")
    for path in sorted(PACKAGE.rglob(pattern))
    if path.name != "_advice.py"
}


@pytest.mark.parametrize("code", ADVICE)
def test_it_is_what_explain_and_another_part_say(code: str) -> None:
    """And no part has a text of its own beside it."""
    rule = built_in().of_code[code]
    cause, fix = (text.format_map(GENERAL) for text in ADVICE[code])
    assert cause.lower() in rule.cause.lower()
    assert fix.lower() in rule.fix.lower()
    used = [
        path for path, text in SOURCES.items() if f'["{code}"]' in text or f"['{code}']" in text
    ]
    assert used, f"only explain says it; write it in the rule {code}"
    for text in (*ADVICE[code], *COMMANDS.get(code, ())):
        parts = [part.strip(" .;,") for part in re.split(r"\{\w+\}", text)]
        copies = [
            str(path.relative_to(CHECKOUT))
            for part in parts
            if len(part) > len("docker run --shm-size")
            for path, source in SOURCES.items()
            if part in source
        ]
        assert copies == []


def test_every_command_belongs_to_advice_and_names_known_facts() -> None:
    """A fact without general words could not be shown by explain."""
    assert COMMANDS.keys() <= ADVICE.keys()
    for texts in (*ADVICE.values(), *COMMANDS.values()):
        assert all(text.format_map(GENERAL) for text in texts)
