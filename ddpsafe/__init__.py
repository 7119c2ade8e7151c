"""Hardened launch helpers for PyTorch DistributedDataParallel.

Importing this package imports neither torch nor pydantic. Each name is loaded when it is first used, so
that command-line help and ranks start quickly.
"""

# ruff: noqa: I001 - one block for each module

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import ModuleType

    from ddpsafe import checkpoint as checkpoint, data as data, doctor as doctor
    from ddpsafe._config import (
        DataPath as DataPath,
        LaunchConfig as LaunchConfig,
        Rendezvous as Rendezvous,
        RetryPolicy as RetryPolicy,
        Timeouts as Timeouts,
    )
    from ddpsafe._errors import (
        ConfigError as ConfigError,
        ConfigProblem as ConfigProblem,
        DDPSafeError as DDPSafeError,
        Explanation as Explanation,
        LaunchError as LaunchError,
        LaunchTimeoutError as LaunchTimeoutError,
        MismatchError as MismatchError,
        NodeLostError as NodeLostError,
        PreemptedError as PreemptedError,
        PreflightError as PreflightError,
        RankExitedError as RankExitedError,
        RankFailedError as RankFailedError,
        RankKilledError as RankKilledError,
        RankLeftEarlyError as RankLeftEarlyError,
        RankRaisedError as RankRaisedError,
        RendezvousTimeoutError as RendezvousTimeoutError,
    )
    from ddpsafe._launch import LaunchResult as LaunchResult, launch as launch, spawn as spawn
    from ddpsafe._world import clean_environment as clean_environment
    from ddpsafe._worker.environment import seed_all as seed_all
    from ddpsafe._worker.join.attached import (
        cleanup as cleanup,
        current as current,
        process_group as process_group,
        setup as setup,
    )
    from ddpsafe._worker.context import RankContext as RankContext

__version__: Final = "0.2.0"

_HOMES: Final = {
    "ddpsafe._config": ("DataPath", "LaunchConfig", "Rendezvous", "RetryPolicy", "Timeouts"),
    "ddpsafe._errors": (
        "ConfigError",
        "ConfigProblem",
        "DDPSafeError",
        "Explanation",
        "LaunchError",
        "LaunchTimeoutError",
        "MismatchError",
        "NodeLostError",
        "PreemptedError",
        "PreflightError",
        "RankExitedError",
        "RankFailedError",
        "RankKilledError",
        "RankLeftEarlyError",
        "RankRaisedError",
        "RendezvousTimeoutError",
    ),
    "ddpsafe._launch": ("LaunchResult", "launch", "spawn"),
    "ddpsafe._worker.join.attached": ("cleanup", "current", "process_group", "setup"),
    "ddpsafe._worker.context": ("RankContext",),
    "ddpsafe._worker.environment": ("seed_all",),
    "ddpsafe._world": ("clean_environment",),
}
_NAMESPACES: Final = ("checkpoint", "data", "doctor")
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604 - the keys are strings


# Starting and joining ranks needs kernel interfaces of Linux; the other modules do not.
_ON_LINUX: Final = ("ddpsafe._launch", "ddpsafe._worker")
_POSIX: Final = {"fcntl", "resource", "termios", "pwd", "grp", "signal", "os", "socket", "select"}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used (PEP 562)."""
    home = f"{__name__}.{name}" if name in _NAMESPACES else _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _load(home)
    if name in _NAMESPACES:
        return module
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def _load(home: str) -> ModuleType:
    """Import a module; on a system that it cannot run on, raise an `ImportError` with advice."""
    advice = (
        f"ddpsafe starts ranks on Linux only, and this is {sys.platform}: "
        "use WSL 2 on Windows, or a Linux container."
    )
    if sys.platform != "linux" and home.startswith(_ON_LINUX):
        raise ImportError(advice)
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name not in _POSIX:
            raise
        raise ImportError(advice) from error
    except AttributeError as error:
        if getattr(error.obj, "__name__", "") not in _POSIX:
            raise
        raise ImportError(advice) from error


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*__all__, *_NAMESPACES])
