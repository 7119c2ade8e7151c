"""The reference page of the configuration matches the models."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Final

import pytest
from pydantic import BaseModel

from ddpsafe._config import LaunchConfig, Rendezvous, RetryPolicy, Timeouts
from ddpsafe._config.durations import show_duration
from ddpsafe._config.paths import DataPath

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "config.md"
MODELS: Final[list[tuple[type[BaseModel], str]]] = [
    (LaunchConfig, ""),
    (Timeouts, "TIMEOUTS__"),
    (RetryPolicy, "RETRY__"),
    (Rendezvous, "RENDEZVOUS__"),
    (DataPath, "DATA_PATHS__<NAME>__"),
]


def show_default(model: type[BaseModel], name: str) -> str:
    """Return a field's default in the page's notation."""
    if model.model_fields[name].is_required():
        return "required"
    value = getattr(model(path="/x") if model is DataPath else model.model_construct(), name)
    if isinstance(value, timedelta):
        return show_duration(value)
    if isinstance(value, BaseModel):
        return f"`{type(value).__name__}()`"
    return f"`{sorted(value)}`" if isinstance(value, frozenset) else f"`{value!r}`"


def show_row(model: type[BaseModel], prefix: str, name: str) -> str:
    """Return the row of the page's table for one field."""
    text = re.sub(r"\s+", " ", model.model_fields[name].description or "").replace("`", "")
    return f"| `{name}` | {show_default(model, name)} | `DDPSAFE_{prefix}{name.upper()}` | {text} |"


@pytest.mark.parametrize(("model", "prefix"), MODELS)
def test_reference_has_a_row_for_every_field(model: type[BaseModel], prefix: str) -> None:
    """Name, default, variable and description match the model; paste a missing row from the failure."""
    page = PAGE.read_text(encoding="utf-8")
    rows = [show_row(model, prefix, name) for name in model.model_fields]
    assert [row for row in rows if row not in page] == []


def test_toml_example_of_the_reference_sets_every_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example is valid as printed, and omits no field."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    path = tmp_path / "pyproject.toml"
    path.write_text(blocks[0], encoding="utf-8")
    config = LaunchConfig.from_toml(path)
    # A file that all nodes share cannot set one node's rank.
    assert set(LaunchConfig.model_fields) - config.model_fields_set == {"node_rank"}
    assert set(Timeouts.model_fields) == config.timeouts.model_fields_set
    assert set(RetryPolicy.model_fields) == config.retry.model_fields_set
