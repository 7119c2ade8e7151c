"""Hardened launch helpers for PyTorch DistributedDataParallel.

Importing this package imports neither torch nor pydantic: each name is loaded when it is first
used, so that command-line help, the pytest plugin and the spawned ranks start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddpsafe._config import (
        AbsolutePath as AbsolutePath,
        DataPath as DataPath,
        LaunchConfig as LaunchConfig,
        Rendezvous as Rendezvous,
        RetryPolicy as RetryPolicy,
        Timeouts as Timeouts,
    )
    from ddpsafe._errors import (
        AttemptTimeoutError as AttemptTimeoutError,
        BarrierTimeoutError as BarrierTimeoutError,
        CollectiveTimeoutError as CollectiveTimeoutError,
        ConfigError as ConfigError,
        DDPSafeError as DDPSafeError,
        LaunchError as LaunchError,
        LaunchTimeoutError as LaunchTimeoutError,
        PreflightError as PreflightError,
        ProgressTimeoutError as ProgressTimeoutError,
        RankExitedError as RankExitedError,
        RankFailedError as RankFailedError,
        RankKilledError as RankKilledError,
        RankLeftEarlyError as RankLeftEarlyError,
        RankRaisedError as RankRaisedError,
        RendezvousTimeoutError as RendezvousTimeoutError,
        ShutdownTimeoutError as ShutdownTimeoutError,
    )
    from ddpsafe._functions import (
        barrier as barrier,
        broadcast as broadcast,
        gather as gather,
        is_main as is_main,
        print as print,  # noqa: A004 - the name of RankContext.print
        rank_zero_first as rank_zero_first,
        reduce_mean as reduce_mean,
        seed_all as seed_all,
        stop_requested as stop_requested,
        unwrap as unwrap,
        wrap as wrap,
    )
    from ddpsafe._launch import LaunchResult as LaunchResult, launch as launch, spawn as spawn
    from ddpsafe._worker.attached import (
        cleanup as cleanup,
        current as current,
        process_group as process_group,
        setup as setup,
    )
    from ddpsafe._worker.context import RankContext as RankContext

__version__: Final = "0.1.0"

_HOMES: Final = {
    "ddpsafe._config": (
        "AbsolutePath",
        "DataPath",
        "LaunchConfig",
        "Rendezvous",
        "RetryPolicy",
        "Timeouts",
    ),
    "ddpsafe._errors": (
        "AttemptTimeoutError",
        "BarrierTimeoutError",
        "CollectiveTimeoutError",
        "ConfigError",
        "DDPSafeError",
        "LaunchError",
        "LaunchTimeoutError",
        "PreflightError",
        "ProgressTimeoutError",
        "RankExitedError",
        "RankFailedError",
        "RankKilledError",
        "RankLeftEarlyError",
        "RankRaisedError",
        "RendezvousTimeoutError",
        "ShutdownTimeoutError",
    ),
    "ddpsafe._functions": (
        "barrier",
        "broadcast",
        "gather",
        "is_main",
        "print",
        "rank_zero_first",
        "reduce_mean",
        "seed_all",
        "stop_requested",
        "unwrap",
        "wrap",
    ),
    "ddpsafe._launch": ("LaunchResult", "launch", "spawn"),
    "ddpsafe._worker.attached": ("cleanup", "current", "process_group", "setup"),
    "ddpsafe._worker.context": ("RankContext",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Load a public name when it is first used (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
