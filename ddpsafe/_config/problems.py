"""How a wrong configuration is worded: field, value given, why it is wrong, what to write."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ddpsafe._errors import ConfigError
from ddpsafe._secrets import HIDDEN, is_secret_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic_core import ErrorDetails

    Location = tuple[int | str, ...]

_SHOWN_CHARS: Final = 120

SAME: Final = object()
"""Stands for: the judged value itself is what the user gave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a value.

    Attributes:
        why: Why the value is wrong, as a clause without a full stop.
        write: What to write instead, to copy where possible.
        where: Keys below the field that is judged; empty for the field itself.
        given: The value as the user gave it, where it is not the judged value itself.
    """

    why: str
    write: str
    where: tuple[int | str, ...] = ()
    given: object = SAME


def wrong(why: str, *, write: str) -> PydanticCustomError:
    """Make the error that a validator raises for one problem."""
    # The texts travel as context: braces in a user's value must not be read as a template.
    return PydanticCustomError("ddpsafe", "{why}", {"why": why, "write": write})


def require_none(problems: Iterable[Problem], *, given: object) -> None:
    """Raise all the problems of one value at once, if there are any.

    Args:
        problems: What is wrong.
        given: The judged value; shown for problems that carry none of their own.

    Raises:
        ValidationError: When there is a problem; pydantic merges it into its own report.
    """
    details: list[InitErrorDetails] = [
        {
            "type": wrong(problem.why, write=problem.write),
            "loc": problem.where,
            "input": given if problem.given is SAME else problem.given,
        }
        for problem in problems
    ]
    if details:
        raise ValidationError.from_exception_data("ddpsafe", details)


def show(value: object) -> str:
    """Return a printable, short form of any value, however odd it is."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the repr of a stranger's object may raise anything
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def show_at(location: Iterable[int | str], value: object) -> str:
    """Return what may be shown of the value at a place of the configuration.

    The variables of the ranks hold tokens and passwords, and what is wrong may be the very text
    that they are to be read from: of `env` as a whole nothing is shown, nor of a secret name.
    """
    path = [str(part) for part in location]
    if [part.casefold() for part in path] == ["env"]:
        return f"a {type(value).__name__} that is not shown, as it may hold secrets"
    return HIDDEN if any(map(is_secret_name, path)) else show(_without_secrets(value))


def _without_secrets(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {
        key: HIDDEN
        if isinstance(key, str) and (key == "env" or is_secret_name(key))
        else _without_secrets(item)
        for key, item in value.items()
    }


def find_near(word: object, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice that `word` looks like a slip of, if there is one."""
    if not isinstance(word, str) or len(word) > _SHOWN_CHARS:
        return None
    folded = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None


def raise_config_error(problems: Iterable[str]) -> NoReturn:
    """Raise the one `ConfigError` that lists all problems.

    Without a cause: pydantic's own list of the same problems would only stand above ours.
    """
    found = tuple(problems)
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    lines = [f"The configuration has {count}; nothing was started."]
    lines += [f"  {number}. {text}" for number, text in enumerate(found, start=1)]
    raise ConfigError("\n".join(lines), problems=found) from None


def word_problem(field: str, *, given: str, why: str, write: str, origin: str = "") -> str:
    """Word one problem: the field, the value, why it is wrong, what to write instead."""
    came_from = f" (from {origin})" if origin else ""
    return f"{field}: got {given}{came_from}: {why}.\n     Write {write}."


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    *,
    origin: Callable[[Location], str] = lambda _: "",
) -> list[str]:
    """Word every problem of a pydantic error in the terms of `model`.

    Args:
        error: What pydantic found.
        model: The model that was built; its field names and examples help the reader.
        origin: Tells where the value at a location came from; empty for an argument.

    Returns:
        One text for each problem.
    """
    return [
        word_problem(
            ".".join(str(part) for part in detail["loc"]) or model.__name__,
            given=show_at(detail["loc"], detail["input"]),
            why=_why(detail),
            write=_write(detail, model),
            origin=origin(detail["loc"]),
        )
        for detail in error.errors(include_url=False)
        # A default that depends on a field which is wrong: not a second problem.
        if detail["type"] != "default_factory_not_called"
    ]


def _why(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return "there is no such field"
        case "missing":
            return "this field has to be given"
        case "value_error":
            return str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
    text = detail["msg"].rstrip(".")
    return text[:1].lower() + text[1:]


def _write(detail: ErrorDetails, model: type[BaseModel]) -> str:
    if detail["type"] == "ddpsafe":
        return str(detail["ctx"]["write"])
    *parents, name = detail["loc"] or ("",)
    if detail["type"] == "extra_forbidden":
        return _nearest_field(name, _model_at(model, parents) or model)
    owner = _model_at(model, parents)
    field = owner.model_fields.get(str(name)) if owner is not None else None
    if field is not None and field.examples:
        return " or ".join(f"{name}={example}" for example in field.examples)
    return "a value of the kind the reference of the configuration shows for this field"


def _nearest_field(name: object, model: type[BaseModel]) -> str:
    near = find_near(name, model.model_fields)
    if near is not None:
        return f"{near!r}, if that is what you mean"
    return f"one of the fields of {model.__name__}: {', '.join(model.model_fields)}"


def _model_at(model: type[BaseModel], path: Iterable[int | str]) -> type[BaseModel] | None:
    current: type[BaseModel] | None = model
    for part in path:
        field = None if current is None else current.model_fields.get(str(part))
        kind = None if field is None else field.annotation
        # Python 3.10 takes dict[str, …] for a class, and issubclass then raises.
        plain = kind if get_origin(kind) is None else None
        current = plain if isinstance(plain, type) and issubclass(plain, BaseModel) else None
    return current
