"""How a wrong configuration is reported: every problem at once, in one `ConfigError`.

Validators raise `wrong`, pydantic collects these errors, and `problems_of` turns them into
`ConfigProblem`s.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ddpsafe._errors import ConfigError, ConfigProblem, Explanation
from ddpsafe._secrets import HIDDEN, is_secret_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pydantic_core import ErrorDetails

    Location = tuple[int | str, ...]

__tracebackhide__ = True  # pytest shows the line of the caller, not these

_MAX_SHOWN_CHARS: Final = 120

SAME: Final = object()
"""Default of `Problem.given`: the user gave the validated value itself."""

_UNKNOWN: Final = "there is no such field"

_COUNTS_OF_RANKS: Final = (
    "nprocs nproc n_procs num_procs num_processes nprocs_per_node procs_per_node processes devices gpus "
    "ngpus num_gpus gpus_per_node num_workers n_workers workers workers_per_host ntasks ntasks_per_node "
    "local_world_size ranks world_size"
)
COUNTS_OF_RANKS: Final = frozenset(_COUNTS_OF_RANKS.split())
"""What other launchers and torch call the number of ranks."""

# What to write instead of the names that other launchers and torch have for a field, by model.
# `{value}` is the given value.
_NAMES_ELSEWHERE: Final[dict[str, dict[str, str]]] = {
    "LaunchConfig": {
        "nproc_per_node={value}": _COUNTS_OF_RANKS,
        "nnodes={value}": "num_nodes nodes n_nodes num_machines",
        "node_rank={value}": "machine_rank group_rank node_id",
        'rendezvous={{"endpoint": "host:port"}}; one node needs none: a free port is found': (
            "rdzv_endpoint master_addr master_address master_port init_method main_process_ip "
            "main_process_port rdzv_backend port endpoint"
        ),
        'rendezvous={{"interface": {value}}}': "interface ifname",
        "backend={value}": "dist_backend process_group_backend distributed_backend",
        "start_method={value}": "mp_start_method multiprocessing_context mp_context method",
        'timeouts={{"collective": {value}}}': "timeout ddp_timeout pg_timeout dist_timeout",
        'timeouts={{"start": {value}}}': "join_timeout rdzv_timeout init_timeout start_timeout",
        'timeouts={{"grace": {value}}}': "grace_period shutdown_timeout",
        'retry={{"attempts": {one_more}}} (the first attempt counts)': (
            "max_restarts restarts max_retries retries num_retries max_failures"
        ),
        'retry={{"attempts": {value}}}': "attempts max_attempts",
        "run_dir={value}": "log_dir logdir logs_dir log_folder output_dir log_path",
        'console="all", "tagged", "json", "rank-zero" or "none"': (
            "tee redirects verbose quiet local_ranks_filter log_line_prefix"
        ),
        "env={value}": "env_vars extra_env_vars default_env_vars environ environment",
        "seed={value}": "random_seed manual_seed",
    },
    "Timeouts": {
        "start={value}": "join rendezvous startup init connect",
        "collective={value}": "process_group all_reduce nccl gloo timeout",
        "attempt={value}": "total job run overall",
        "progress={value}": "step steps hang",
        "grace={value}": "grace_period shutdown sigterm kill terminate",
        "finish={value}": "exit teardown close",
    },
    "RetryPolicy": {
        "attempts={one_more} (the first attempt counts)": "max_restarts restarts max_retries retries",
        "attempts={value}": "max_attempts tries stop_after_attempt",
        "backoff_initial={value}": "backoff wait delay wait_initial initial",
        "backoff_max={value}": "wait_max max_delay max_wait",
        "jitter={value}": "wait_jitter",
        "on={value}": "exceptions retry_on kinds errors",
    },
    "Rendezvous": {
        'endpoint="host:port"': "host address addr master_addr rdzv_endpoint port master_port",
        "interface={value}": "ifname nic iface local_addr",
    },
    "DataPath": {
        "wait={value}": "timeout patience",
        "kind={value}": "type",
        "min_entries={value}": "min_files entries",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem that a validator found; pydantic adds its place in the configuration.

    Attributes:
        why: Why the value is wrong, as a clause without a full stop.
        write: What to write instead, ready to copy if possible.
        where: Keys below the validated field; empty for the field itself.
        given: The value as the user gave it, if it differs from the validated value.
    """

    why: str
    write: str
    where: tuple[int | str, ...] = ()
    given: object = SAME


class Part(BaseModel):
    """A part of the configuration. Created on its own, it reports problems like the whole config."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __init__(self, /, **fields: Any) -> None:
        """Validate every field.

        Raises:
            ConfigError: A field is wrong; it lists every problem.
        """
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise_config_error(*problems_of(error, type(self)))

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        describe_fields(cls)

    # Without this mark, pydantic would also call `__init__` for a part inside another model. There the
    # problems must reach pydantic one by one, so that each gets its place in the whole config.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


def describe_fields(model: type[BaseModel]) -> None:
    """Add each field's name and description to a model's docstring, for ``help()``."""
    if model.__doc__ is not None:  # it is None under python -OO
        lines = [f"    {name}: {field.description}" for name, field in model.model_fields.items()]
        model.__doc__ = "\n".join([inspect.cleandoc(model.__doc__), "", "Attributes:", *lines])


def wrong(why: str, *, write: str, is_guess: bool = False) -> PydanticCustomError:
    """Make the error that a validator raises for one problem."""
    # pydantic formats the message as a template, so the texts, which may contain braces, are context.
    context = {"why": why, "write": write, "is_guess": is_guess}
    return PydanticCustomError("ddpsafe", "{why}", context)


def require_none(problems: Iterable[Problem], *, given: object) -> None:
    """Raise all problems of one value at once, if there are any; `given` is what the user gave.

    Raises:
        ValidationError: There are problems; pydantic merges them into its own report.
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
    """Return a short, printable form of any value."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the repr of a user's object may raise anything
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def show_at(location: Iterable[int | str], value: object) -> str:
    """Return the value at a place in the configuration as a message may show it, without secrets."""
    # The ranks' variables hold tokens and passwords. So neither `env` as a whole, which may be a string
    # that could not be parsed, nor a variable with a secret name is shown.
    path = [str(part) for part in location]
    if len(path) == 1 and "env" in path[0].casefold():  # env and misspellings of it
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
    """Return the choice that `word` is probably a misspelling of, if any."""
    if not isinstance(word, str) or len(word) > _MAX_SHOWN_CHARS:
        return None
    folded = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None


def raise_config_error(*problems: ConfigProblem) -> NoReturn:
    """Raise one `ConfigError` that lists all problems."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    what = f"The configuration has {count}; nothing was started."
    lines = [f"{number}. {problem}" for number, problem in enumerate(problems, start=1)]
    # With its cause, a traceback would first show pydantic's own list of the same problems.
    raise ConfigError(Explanation(what, details=lines), problems=problems) from None


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    *,
    source: Callable[[Location], str] = lambda _: "",
) -> list[ConfigProblem]:
    """Turn a pydantic error into problems, in the terms of `model`.

    `source` returns where the value at a location came from; empty for an argument.
    """
    problems = []
    for detail in error.errors(include_url=False):
        # A default that depends on a wrong field is not a second problem.
        if detail["type"] == "default_factory_not_called":
            continue
        location = detail["loc"]
        *parents, name, _ = ("", "", *location)
        owner = _model_at(model, [part for part in parents if part != ""])
        field = None if owner is None else owner.model_fields.get(str(name))
        if field is not None and get_origin(field.annotation) is frozenset:
            location = location[:-1]  # the index in the set, which means nothing to the user
        write, is_guess = _write(detail, model)
        problem = ConfigProblem(
            field=".".join(map(str, location)) or model.__name__,
            given=show_at(location, detail["input"]),
            why=_why(detail),
            write=write,
            source=source(location),
            is_guess=is_guess,
        )
        problems.append(problem)
    return problems


def _why(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return _UNKNOWN
        case "missing":
            return "this field is required"
        case "time_delta_parsing":
            return "it is not a duration"
        case "ddpsafe":  # made by `wrong`
            return detail["msg"]
        case "value_error":
            return str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
    text = detail["msg"].rstrip(".")
    return text[:1].lower() + text[1:]


def _write(detail: ErrorDetails, model: type[BaseModel]) -> tuple[str, bool]:
    """Return what to write instead, and whether that is a guess at what the user meant."""
    if detail["type"] == "ddpsafe":
        return str(detail["ctx"]["write"]), bool(detail["ctx"]["is_guess"])
    *parents, name = detail["loc"] or ("",)
    owner = _model_at(model, parents)
    if detail["type"] == "extra_forbidden":
        return suggest_field(name, detail["input"], owner or model)
    field = owner.model_fields.get(str(name)) if owner is not None else None
    if field is not None and detail["type"] == "literal_error":
        near = find_near(detail["input"], [str(word) for word in get_args(field.annotation)])
        if near is not None:
            return repr(near), True
    if field is not None and field.examples:
        return " or ".join(f"{name}={example}" for example in field.examples), False
    return "a value as shown for this field in the configuration reference", False


def suggest_field(name: object, value: object, model: type[BaseModel]) -> tuple[str, bool]:
    """Return what to write instead of a field that does not exist, and whether it is a guess."""
    word, known = str(name).casefold().strip("_-"), _NAMES_ELSEWHERE.get(model.__name__, {})
    template = next((text for text, words in known.items() if word in words.split()), None)
    # torch's "timeout" is one duration; a table under that name is a misspelling of "timeouts".
    if template is not None and not (isinstance(value, (Mapping, Part)) and "{{" in template):
        is_count = isinstance(value, int) and not isinstance(value, bool)
        one_more = show(int(value) + 1) if is_count else "3"  # type: ignore[call-overload] # is_count
        return template.format(value=show_at([str(name)], value), one_more=one_more), True
    near = find_near(name, model.model_fields)
    if near is not None:
        return repr(near), True
    return f"one of the fields of {model.__name__}: {', '.join(model.model_fields)}", False


def unknown_field(name: str, value: object, model: type[BaseModel]) -> ConfigProblem:
    """Make the problem for a field that does not exist and that pydantic does not see."""
    write, is_guess = suggest_field(name, value, model)
    given = show_at([name.strip("_")], value)
    return ConfigProblem(field=name, given=given, why=_UNKNOWN, write=write, is_guess=is_guess)


def _model_at(model: type[BaseModel], path: Iterable[int | str]) -> type[BaseModel] | None:
    current: Any = model
    for part in path:
        if get_origin(current) is dict:  # a table, whose values all have one type
            current = get_args(current)[1]
            continue
        field = None if current is None else current.model_fields.get(str(part))
        kind = None if field is None else field.annotation
        is_model = isinstance(kind, type) and get_origin(kind) is None
        known = get_origin(kind) is dict or (is_model and issubclass(kind, BaseModel))  # type: ignore[arg-type] # is_model
        current = kind if known else None
    # On Python 3.10, dict[…] is an instance of type too.
    return current if isinstance(current, type) and get_origin(current) is None else None
