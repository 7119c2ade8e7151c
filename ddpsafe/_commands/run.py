"""``ddpsafe run``: the ranks of a script, each of which runs it as ``__main__``."""

from __future__ import annotations

import importlib.util
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpsafe._config import LaunchConfig
from ddpsafe._errors import ConfigError, DDPSafeError
from ddpsafe._launch import run_processes
from ddpsafe._machine import is_directory_gone
from ddpsafe._wire.exceptions import where_of
from ddpsafe._wire.outcome import ScriptExit
from ddpsafe.cli import HEALTHY, USAGE, complain

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence


def run_ranks(options: Namespace) -> int:
    """Start the ranks and wait for them; the exit code is that of the error, if there is one."""
    names = ("nproc_per_node", "run_dir", "console", "start_method")
    fields: dict[str, Any] = {
        name: value for name in names if (value := getattr(options, name)) is not None
    }
    try:
        _require_directory()
        if "run_dir" in fields:
            fields["run_dir"] = Path(fields["run_dir"]).absolute()
        config = (
            LaunchConfig.from_toml(options.config, **fields)
            if options.config
            else LaunchConfig(**fields)
        )
        target = (_require_module if options.module else _require_script)(options.script)
    except ConfigError as error:
        complain(str(error))
        return USAGE
    try:
        run_processes(run_script, (target, tuple(options.arguments), options.module), config)
    except DDPSafeError as error:
        # As Python would print it, the rank's own exception first; the frames of ours say nothing.
        complain("".join(traceback.format_exception(error.with_traceback(None))).rstrip())
        return error.exit_code
    return HEALTHY


def _require_directory() -> None:
    if is_directory_gone():
        message = "The current directory has been removed; go to one that exists."
        raise ConfigError(message)


def _require_script(path: str) -> str:
    if not Path(path).is_file():
        message = f"There is no script {path!r} in {Path.cwd()}; for a module write -m MODULE."
        raise ConfigError(message)
    return str(Path(path).absolute())


def _require_module(name: str) -> str:
    """Refuse a module of which not even the package is there; nothing is imported for it."""
    package = name.partition(".")[0]
    path, here = sys.path, str(Path.cwd())
    sys.path = [here, *path]  # as the ranks have it
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # e.g. an empty name, or __main__
        found = None
    finally:
        sys.path = path
    if found is None:
        message = f"There is no module {package!r} in {here} or among the installed ones."
        raise ConfigError(message)
    return name


def run_script(
    rank: int,
    target: str,
    arguments: Sequence[str],
    as_module: bool,  # noqa: FBT001 - spawn passes by position
) -> ScriptExit | None:
    """Be one rank: run the script from its first line, as ``python script.py`` would.

    Returns:
        Where the script called ``sys.exit(0)``, if it did: that is how a rank ends that the others
        may still wait for.
    """
    del rank  # the script reads RANK
    sys.argv = [target, *arguments]
    try:
        if as_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).parent))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        if end.code not in {None, 0}:
            raise
        return ScriptExit(where=where_of(end.__traceback__))
    return None
