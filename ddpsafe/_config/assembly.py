"""How a config is put together: parts merged field by field, every problem in one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import BaseModel, ValidationError

from ddpsafe._config.problems import (
    Part,
    problems_of,
    raise_config_error,
    show_at,
    unknown_field,
)
from ddpsafe._config.sources import find_variable, implicit_file_problems, slipped_variables
from ddpsafe._errors import ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpsafe._config.sources import ConfigFile


__tracebackhide__ = True  # pytest shows the line of the caller, not these


def parts_as_tables(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn parts that are models into what the user set of them, so that sources can merge."""
    return {
        name: set_fields(value) if isinstance(value, Part) else value
        for name, value in fields.items()
    }


def set_fields(model: BaseModel) -> dict[str, Any]:
    """Return the fields of a model that the user has set, those of its parts as tables."""
    return parts_as_tables({name: getattr(model, name) for name in model.model_fields_set})


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay fields over others; parts and tables are merged field by field."""
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            merged[name] = {**below[name], **above[name]}
    return merged


def build(
    model: type[BaseModel],
    make: Callable[[dict[str, Any]], None],
    given: dict[str, Any],
    file: ConfigFile | None = None,
) -> None:
    """Call `make` with the fields; translate what pydantic finds into one `ConfigError`.

    Args:
        model: What is built.
        make: Builds it.
        given: The arguments of the call.
        file: The file below them, where one is read.
    """

    def source(location: Sequence[int | str]) -> str:
        """Return the variable or the file that the value at `location` came from, if one did."""
        if _is_in(location, given):
            return ""
        variable = find_variable(location)
        if variable is not None:
            return variable
        return str(file.path) if file is not None and _is_in(location, file.table) else ""

    # pydantic-settings takes names with an underscore for options of its own.
    odd = [name for name in given if name.startswith("_")]
    problems = [unknown_field(name, given[name], model) for name in odd]
    try:
        make({name: value for name, value in given.items() if name not in odd})
    except ValidationError as error:
        problems += problems_of(error, model, source=source)
    problems += slipped_variables(model.model_fields)
    problems += implicit_file_problems(file)
    if problems:
        raise_config_error(problems)


def _is_in(location: Sequence[int | str], table: Mapping[str, object]) -> bool:
    value: object = table
    for part in location:
        if not isinstance(value, Mapping):
            return True  # the value as a whole was given, and is wrong further down
        if part not in value:
            return False
        value = value[part]
    return True


def refuse_config(config: object) -> NoReturn:
    """Refuse what was passed as a config and is none."""
    problem = ConfigProblem(
        field="config",
        given=show_at((), config),
        why=f"expected a LaunchConfig, got a {type(config).__name__}",
        write="config=LaunchConfig(...), or the fields as keyword arguments",
    )
    raise_config_error([problem])
