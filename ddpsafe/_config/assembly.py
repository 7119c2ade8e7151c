"""How a config is put together: parts merged field by field, every problem in one error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic import BaseModel, ValidationError

from ddpsafe._config.policies import Rendezvous, RetryPolicy
from ddpsafe._config.problems import problems_of, raise_config_error, show, show_at, word_problem
from ddpsafe._config.sources import find_variable, slipped_variables
from ddpsafe._config.timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTS: Final = (Timeouts, RetryPolicy, Rendezvous)
"""Models that are merged field by field; what the user did not set in one is not there."""


def parts_as_tables(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn parts that are models into what the user set of them, so that sources can merge."""
    return {
        name: set_fields(value) if isinstance(value, PARTS) else value
        for name, value in fields.items()
    }


def set_fields(model: BaseModel) -> dict[str, Any]:
    return parts_as_tables({name: getattr(model, name) for name in model.model_fields_set})


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            merged[name] = {**below[name], **above[name]}
    return merged


def build(
    model: type[BaseModel],
    make: Callable[[dict[str, Any]], None],
    given: dict[str, Any],
) -> None:
    """Call `make` with the fields; translate what pydantic finds into one `ConfigError`."""
    # pydantic-settings takes names with an underscore for options of its own.
    odd = [name for name in given if name.startswith("_")]
    problems = [
        word_problem(
            show(name),
            given=show_at([name.strip("_")], given[name]),
            why="there is no such field",
            write=f"one of the fields of {model.__name__}: {', '.join(model.model_fields)}",
        )
        for name in odd
    ]
    try:
        make({name: value for name, value in given.items() if name not in odd})
    except ValidationError as error:
        problems += problems_of(error, model, origin=lambda loc: _origin(loc, given))
    problems += slipped_variables(model.model_fields)
    if problems:
        raise_config_error(problems)


def _origin(location: Sequence[int | str], given: Mapping[str, object]) -> str:
    value: object = given
    for part in location:
        if not isinstance(value, Mapping):
            return ""
        if part not in value:
            variable = find_variable(location)
            return "" if variable is None else f"the environment variable {variable}"
        value = value[part]
    return ""


def refuse_config(config: object) -> NoReturn:
    raise_config_error(
        [
            word_problem(
                "config",
                given=show_at((), config),
                why=f"it is a {type(config).__name__}, no LaunchConfig",
                write="config=LaunchConfig(...), or the fields as keyword arguments",
            )
        ]
    )
