"""``ddpsafe config``: the configuration as it is resolved here, and where each value comes from."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpsafe._config import LaunchConfig
from ddpsafe._config.durations import show_duration
from ddpsafe._config.sources import as_file, find_file, find_variable, read_table
from ddpsafe._errors import ConfigError
from ddpsafe._secrets import Mask, hide_value
from ddpsafe.cli import HEALTHY, USAGE, complain, say

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator
    from pathlib import Path

    Row = tuple[str, str, str]


def explain_config(options: Namespace) -> int:
    """Print every field with its value and its source."""
    try:
        config = LaunchConfig.from_toml(options.config) if options.config else LaunchConfig()
        path = as_file(options.config) if options.config else find_file()
        table = {} if path is None else read_table(path)
    except ConfigError as error:
        complain(str(error))
        return USAGE
    rows = list(_rows(config, table, path))
    if options.json:
        found = {name: {"value": value, "source": source} for name, value, source in rows}
        say(json.dumps(found, indent=2))
    else:
        _show(rows)
    return HEALTHY


def _rows(config: LaunchConfig, table: dict[str, Any], path: Path | None) -> Iterator[Row]:
    mask = Mask.of(config.env)
    for location, value in _values(config):
        source = find_variable(location) or _in_file(location, table, path) or "default"
        shown = json.loads(json.dumps(value, default=str))
        text = shown if isinstance(shown, str) else json.dumps(shown)
        text = _as_duration(config, location) or text
        if location[0] == "env":
            text = hide_value(location[-1], text)
        yield ".".join(location), mask.text(text), source


def _as_duration(config: LaunchConfig, location: tuple[str, ...]) -> str | None:
    """Return a duration as one would write it, rather than in ISO 8601."""
    value: object = config
    for part in location:
        value = getattr(value, part, None)
    return show_duration(value) if isinstance(value, timedelta) else None


def _values(model: BaseModel, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every field, those of parts and tables one by one."""
    plain = model.model_dump(mode="json")
    for name in type(model).model_fields:
        value = getattr(model, name)
        location = (*above, name)
        if isinstance(value, BaseModel):
            yield from _values(value, location)
        elif isinstance(value, dict) and value:
            yield from (((*location, key), plain[name][key]) for key in value)
        else:
            yield location, plain[name]


def _in_file(location: tuple[str, ...], table: dict[str, Any], path: Path | None) -> str | None:
    value: object = table
    for part in location:
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return str(path)


def _show(rows: list[Row]) -> None:
    if not sys.stdout.isatty():
        width = max(len(name) for name, _, _ in rows)
        for name, value, source in rows:
            say(f"{name:{width}}  {value}  ({source})")
        return
    table = Table(show_edge=False, pad_edge=False)
    for title in ("field", "value", "comes from"):
        table.add_column(title)
    for name, value, source in rows:
        table.add_row(name, Text(value), Text(source, style="dim" if source == "default" else ""))
    Console().print(table)
