"""``ddpsafe config``: prints the configuration that applies here, and where each value comes from."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpsafe._config import LaunchConfig
from ddpsafe._config.durations import show_duration
from ddpsafe._config.sources import find_variable, read_config_file
from ddpsafe._errors import ConfigError
from ddpsafe._secrets import Mask, hide_value
from ddpsafe.cli import HEALTHY, USAGE, complain, on_terminal, say

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from ddpsafe._config.sources import ConfigFile

    Row = tuple[str, str, str]


def explain_config(options: Namespace) -> int:
    """Print every field with its value and its source."""
    try:
        config = LaunchConfig.from_toml(options.config) if options.config else LaunchConfig()
        file = read_config_file(options.config)
    except ConfigError as error:
        complain(str(error))
        return USAGE
    mask = Mask.of(config.env)
    rows: list[Row] = []
    for location, value in _values(config):
        source = find_variable(location) or _in_file(location, file) or "default"
        plain = json.loads(json.dumps(value, default=str))
        text = plain if isinstance(plain, str) else json.dumps(plain)
        field: object = config
        for part in location:
            field = getattr(field, part, None)
        if isinstance(field, timedelta):
            text = show_duration(field)  # "30s", and not the ISO 8601 of pydantic's JSON
        if location[0] == "env":
            text = hide_value(location[-1], text)
        rows.append((".".join(location), mask.text(text), source))
    if options.json:
        fields = {name: {"value": value, "source": source} for name, value, source in rows}
        say(json.dumps(fields, indent=2))
    else:
        _show(rows)
    return HEALTHY


def _values(model: BaseModel, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the location and value of every field, also those inside parts and tables."""
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


def _in_file(location: tuple[str, ...], file: ConfigFile | None) -> str | None:
    value: object = {} if file is None else file.table
    for part in location:
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return None if file is None else str(file.path)


def _show(rows: list[Row]) -> None:
    if not on_terminal():
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
