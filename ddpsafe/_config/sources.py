"""The sources of a config's fields other than arguments: ``DDPSAFE_*`` variables and a TOML file.

Also finds which variable set a value, which variables are misspelt, and which file can be trusted.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pydantic_settings import EnvSettingsSource

from ddpsafe._config.problems import find_near, raise_config_error, show, show_at
from ddpsafe._errors import ConfigProblem
from ddpsafe._host import is_owner_trusted, others_may_write
from ddpsafe._logging import get_logger

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

PREFIX: Final = "DDPSAFE_"
DELIMITER: Final = "__"
_EXPLAIN: Final = "explain"
_ENV_PREFIX: Final = f"{PREFIX}ENV{DELIMITER}"

_UNDERSCORES: Final = re.compile("__+")
_OF_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT\w*)$|_PORT(_\d+_[A-Z]+\w*)?$")
"""Variables that Kubernetes sets for a service whose name begins with "ddpsafe"."""
_KEY_OF_TABLE: Final = re.compile(
    r"^(env(?=_(?:nccl|gloo|torch|cuda|omp)_)|data_paths(?=_[^_]))_", re.IGNORECASE
)
"""The name of a table with any keys, with one underscore after it instead of two."""
_ONE_MEANING: Final = {
    **dict.fromkeys(("nprocs", "num_processes", "world_size"), "nproc_per_node"),
    "max_restarts": "retry__attempts",
}
"""Fields, by those names of other launchers that mean nothing else in a variable; see `problems`."""

_RUNS_CODE: Final = re.compile(
    r"LD_.*|DYLD_.*|PYTHON.*|PATH|BASH_ENV|ENV|GCONV_PATH|NCCL_\w*PLUGIN\w*|\w+_INJECTION\d*_PATH"
    r"|OMP_TOOL_LIBRARIES|FI_PROVIDER_PATH|UCX_MODULE_DIR|TRITON_\w*_PATH|CC|CXX",
    re.IGNORECASE,
)
"""Variables that choose which code a process runs."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A configuration file that was read.

    Attributes:
        is_implicit: Whether it was found in the current directory, not named.
    """

    path: Path
    table: dict[str, Any]
    is_implicit: bool


class EnvironmentSource(EnvSettingsSource):
    """``DDPSAFE_*`` variables, read when a config is created.

    It differs from pydantic-settings in two ways. A string that is not JSON is passed to the field's
    validator, which has a better error message. And ``DDPSAFE_ENV__NAME`` keeps the case of NAME.
    """

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Parse JSON; leave other strings to the field's validator."""
        try:
            return super().decode_complex_value(field_name, field, value)
        except (ValueError, RecursionError):
            return value

    def explode_env_vars(
        self, field_name: str, field: FieldInfo, env_vars: Mapping[str, str | None]
    ) -> dict[str, Any]:
        """Collect the nested variables of a field; those of `env` keep the case of their names."""
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
    # pydantic-settings, too, ignores the case of names and variables that are empty.
    names = {name.upper(): name for name, text in os.environ.items() if text}
    # A variable may also set a whole part or table, as JSON.
    while parts:
        variable = PREFIX + DELIMITER.join(parts)
        if variable in names:
            return names[variable]
        parts.pop()
    return None


def slipped_variables(model: type[BaseModel]) -> Iterator[ConfigProblem]:
    """Yield a problem for every ``DDPSAFE_*`` variable that looks like a misspelt field of a config.

    Other unknown variables may belong to another version or to a tool of the user.
    """
    fields = model.model_fields
    keys = {name: getattr(field.annotation, "model_fields", ()) for name, field in fields.items()}
    paths = [*fields, *(name + DELIMITER + key for name in keys for key in keys[name])]
    meant = _ONE_MEANING | {_UNDERSCORES.sub("_", path): path for path in paths}
    for name, text in sorted(os.environ.items()):
        # Comparing each variable of the environment took 50 ms for a launch with 36 of them.
        if not name.upper().startswith(PREFIX) or not text or _OF_KUBERNETES.search(name):
            continue
        word = name[len(PREFIX) :]
        head, *rest = word.split(DELIMITER)
        if head.lower() in fields:  # pydantic checks what is in it
            continue
        folded = _UNDERSCORES.sub("_", word.lower().strip("_"))
        # A name with something added, such as RUN_DIR_2, is that of something else.
        choices = [choice for choice in meant if not folded.startswith(f"{choice}_")]
        path = _KEY_OF_TABLE.sub(r"\1__", word)
        if path == word and (near := find_near(folded, choices, cutoff=0.9)) is not None:
            path = meant[near].upper()
        elif path == word:
            near = find_near(head, filter(fields.__contains__, choices), cutoff=0.8)
            path = DELIMITER.join([near.upper(), *rest]) if near else word
        if path != word:
            yield ConfigProblem(
                field=word.lower(),
                given=show_at(path.split(DELIMITER), text),
                source=name,
                why="there is no such field",
                write=PREFIX + path,
                is_guess=True,
            )


def read_config_file(path: object = None, fields: Iterable[str] = ()) -> ConfigFile | None:
    """Read the fields of a config from a TOML file.

    Args:
        path: A file with a ``[tool.ddpsafe]`` table, or with the fields at the top level; by
            default the pyproject.toml of the current directory, if it can be trusted.
        fields: The names of fields that a warning names if the file has them beside its table.

    Returns:
        The file; its table is empty if a ``[tool]`` table has none for ddpsafe.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or ``tool.ddpsafe`` is not a table.
    """
    if path is not None and not isinstance(path, (str, os.PathLike)):
        _refuse_file(path, f"expected a path, got a {type(path).__name__}")
    file = find_file() if path is None else Path(path)
    if file is None:
        return None
    # What `ddpsafe explain` reads beside a launch's fields; see `read_explain_rules`.
    table = {name: value for name, value in _table_of(file, fields).items() if name != _EXPLAIN}
    return ConfigFile(path=file, table=table, is_implicit=path is None)


def read_explain_rules() -> list[Path]:
    """Return the files and folders of rules that ``[tool.ddpsafe.explain]`` names.

    Raises:
        ConfigError: The table has something else.
    """
    file = find_file()
    explain: Any = {} if file is None else _table_of(file).get(_EXPLAIN, {})
    is_known = isinstance(explain, dict) and set(explain) <= {"rules"}
    rules: Any = explain.get("rules", []) if is_known else None
    if not isinstance(rules, list) or not all(isinstance(name, str) for name in rules):
        problem = ConfigProblem(
            field=_EXPLAIN,
            given=show(explain),
            why="it is a table with a list of files and folders",
            write='rules = ["rules/acme.toml"] under [tool.ddpsafe.explain]',
            source=str(file),
        )
        raise_config_error(problem)
    return [Path(name) for name in rules]


def find_file() -> Path | None:
    """Return the pyproject.toml of the current directory, if it exists and can be trusted."""
    path = Path("pyproject.toml")
    try:
        if not path.is_file():
            return None
        here = Path.cwd()
        # The rule is that of git's safe.directory (CVE-2022-24765): a file that another user put into
        # the directory where a command happens to be typed must not decide what the command runs.
        # If it is a link, the directory of its target counts too.
        doubt = _doubt_of(path) or _doubt_of(here) or _doubt_of(path.resolve().parent)
    except OSError:  # the directory cannot be searched, or was removed
        return None
    if doubt is None:
        return path
    logger.warning(
        "%s/pyproject.toml is not read: %s. Remove the write permission of others, or name the file: "
        "--config pyproject.toml, LaunchConfig.from_toml('pyproject.toml').",
        here,
        doubt,
    )
    return None


def _doubt_of(path: Path) -> str | None:
    """Return why another user may have written the content of a path, or None."""
    link, status = path.lstat(), path.stat()
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
    if not is_owner_trusted(status):
        return f"the {kind} belongs to another user (uid {status.st_uid})"
    if not is_owner_trusted(link):  # its owner could point it elsewhere after this check
        return f"the link belongs to another user (uid {link.st_uid})"
    if kind == "directory" and status.st_mode & stat.S_ISVTX:
        return None  # sticky, as /tmp: no user can replace the files of another
    return f"other users may write to the {kind}" if others_may_write(status) else None


def implicit_file_problems(file: ConfigFile | None) -> Iterator[ConfigProblem]:
    """Yield a problem for each variable in `env` that an implicit file must not set."""
    env = None if file is None or not file.is_implicit else file.table.get("env")
    if file is None or not isinstance(env, dict):
        return
    for name, text in env.items():
        # `cd /tmp && ddpsafe doctor` must not load the LD_PRELOAD of whoever wrote the file there.
        if _RUNS_CODE.fullmatch(name):
            yield ConfigProblem(
                field=f"env.{name}",
                given=show_at(["env", name], text),
                source=str(file.path),
                why="it chooses which code runs, and this file was found in the current "
                "directory, not named",
                write="nothing here; pass env={…}, set the variable where you start the command, "
                "or name the file (--config, LaunchConfig.from_toml)",
            )


def _table_of(file: Path, fields: Iterable[str] = ()) -> dict[str, Any]:
    """Return the table of ddpsafe in a file: ``[tool.ddpsafe]``, or the top level if it has none."""
    top = _load(file)
    own: Any = top
    for key in ("tool", "ddpsafe"):
        own = own.get(key, {})
        if not isinstance(own, dict):
            _refuse_file(file, f"'{key}' is a {type(own).__name__}, not a table")
    table: dict[str, Any] = own
    has_table = "ddpsafe" in top.pop("tool", {})
    beside = ", ".join(name for name in fields if name in top)
    if file.name == "pyproject.toml":  # its top level is that of other tools
        return table
    if has_table and beside:
        logger.warning("Of %s, only [tool.ddpsafe] is read; not read: %s.", file, beside)
    elif fields and not has_table and not top:
        logger.warning("%s has no table [tool.ddpsafe], and nothing at its top level.", file)
    return table if has_table else top


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            table: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        _refuse_file(path, f"it cannot be read ({error.strerror or error})")
    except (ValueError, RecursionError) as error:
        _refuse_file(path, f"it is not valid TOML ({error})")
    return table


def _refuse_file(path: object, why: str) -> NoReturn:
    problem = ConfigProblem(
        field="the configuration file",
        given=show(str(path) if isinstance(path, Path) else path),
        why=why,
        write="the path of a TOML file with a table [tool.ddpsafe], e.g. `nproc_per_node = 4` in it",
    )
    raise_config_error(problem)
