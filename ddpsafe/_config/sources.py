"""Where the fields of a config come from besides arguments: the environment and a TOML file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic_settings import EnvSettingsSource

from ddpsafe._config.problems import find_near, raise_config_error, show, show_at, word_problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic.fields import FieldInfo

PREFIX: Final = "DDPSAFE_"
DELIMITER: Final = "__"
_ENV_PREFIX: Final = f"{PREFIX}ENV{DELIMITER}"


class EnvironmentSource(EnvSettingsSource):
    """``DDPSAFE_*`` variables, read when a config is made.

    As pydantic-settings reads them, apart from two things: what is no JSON reaches the field's own
    validator, whose message helps; and ``DDPSAFE_ENV__NAME`` keeps the case of NAME.
    """

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Read JSON where it is JSON; leave other text to the field's validator."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except (ValueError, RecursionError):
            return value

    def explode_env_vars(
        self, field_name: str, field: FieldInfo, env_vars: Mapping[str, str | None]
    ) -> dict[str, Any]:
        """Collect the nested variables of a field; names of the ranks' variables as they are."""
        if field_name != "env":
            return super().explode_env_vars(field_name, field, env_vars)
        return {
            name[len(_ENV_PREFIX) :]: text
            for name, text in os.environ.items()
            if name.upper().startswith(_ENV_PREFIX) and text
        }


def find_variable(location: Iterable[int | str]) -> str | None:
    """Return the ``DDPSAFE_*`` variable that set the value at `location`, if one did."""
    parts = [str(part).upper() for part in location]
    names = {name.upper(): name for name, text in os.environ.items() if text}
    while parts:
        variable = PREFIX + DELIMITER.join(parts)
        if variable in names:
            return names[variable]
        parts.pop()
    return None


def slipped_variables(fields: Iterable[str]) -> Iterator[str]:
    """Yield a problem for every ``DDPSAFE_*`` variable that is nearly, but not, a field.

    Other unknown ones are let be: they may belong to another version or to a tool of the user.
    """
    known = list(fields)
    for name, text in sorted(os.environ.items()):
        field, *rest = name.upper().removeprefix(PREFIX).lower().split(DELIMITER)
        near = find_near(field, known, cutoff=0.8)
        if name.upper().startswith(PREFIX) and near is not None and field not in known:
            meant = DELIMITER.join([PREFIX + near.upper(), *name.split(DELIMITER)[1:]])
            yield word_problem(
                field,
                given=show_at([near, *rest], text),
                origin=f"the environment variable {name}",
                why="there is no such field",
                write=f"{meant}, if that is what you mean, or unset {name}",
            )


def read_table(path: Path) -> dict[str, Any]:
    """Read the fields of a config out of a TOML file.

    Args:
        path: A file with a ``[tool.ddpsafe]`` table, or with the fields at the top level.

    Returns:
        The fields as TOML gave them; empty where a ``[tool]`` table has none for ddpsafe.

    Raises:
        ConfigError: When the file cannot be read, is no TOML, or has no table there.
    """
    table: Any = _load(path)
    for key in ("tool", "ddpsafe") if "tool" in table or path.name == "pyproject.toml" else ():
        table = table.get(key, {})
        if not isinstance(table, dict):
            _refuse_file(path, f"'{key}' is a {type(table).__name__}, no table")
    return dict(table)


def as_file(path: object) -> Path:
    """Return the path of a configuration file, or refuse what is no path."""
    if not isinstance(path, (str, os.PathLike)):
        _refuse_file(path, f"a {type(path).__name__} is no path")
    return Path(path)


def find_file() -> Path | None:
    """Return the pyproject.toml of the current directory, if there is one."""
    path = Path("pyproject.toml")
    try:
        return path if path.is_file() else None
    except OSError:  # a directory that may not be searched
        return None


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            table: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        _refuse_file(path, f"it cannot be read ({error.strerror or error})")
    except (ValueError, RecursionError) as error:
        _refuse_file(path, f"it is no valid TOML ({error})")
    return table


def _refuse_file(path: object, why: str) -> NoReturn:
    raise_config_error(
        [
            word_problem(
                "the configuration file",
                given=show(str(path) if isinstance(path, Path) else path),
                why=why,
                write="the path of a TOML file with a table [tool.ddpsafe], e.g. `nproc_per_node = 4` in it",
            )
        ],
    )
