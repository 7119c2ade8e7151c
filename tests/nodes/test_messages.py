"""What launchers of several nodes tell each other is read and written as plain JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from ddpsafe._launcher.nodes import messages

CLASSES = [
    value
    for value in vars(messages).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_can_be_read(cls: Any) -> None:
    """Each type that a field names is there when pydantic reads it, not for type checkers only."""
    adapter = TypeAdapter(cls)
    adapter.rebuild(raise_errors=True)
    json.dumps(adapter.json_schema())
