"""Hardened launch helpers for PyTorch DistributedDataParallel.

Importing this package imports neither torch nor pydantic: each name is loaded when it is first
used, so that command-line help, the pytest plugin and the spawned ranks start at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ddpsafe import checkpoint as checkpoint
    from ddpsafe import data as data
    from ddpsafe import doctor as doctor
    from ddpsafe._config import (
        DataPath as DataPath,
    )
    from ddpsafe._config import (
        LaunchConfig as LaunchConfig,
    )
    from ddpsafe._config import (
        Rendezvous as Rendezvous,
    )
    from ddpsafe._config import (
        RetryPolicy as RetryPolicy,
    )
    from ddpsafe._config import (
        Timeouts as Timeouts,
    )
    from ddpsafe._errors import (
        AttemptTimeoutError as AttemptTimeoutError,
    )
    from ddpsafe._errors import (
        BarrierTimeoutError as BarrierTimeoutError,
    )
    from ddpsafe._errors import (
        CollectiveTimeoutError as CollectiveTimeoutError,
    )
    from ddpsafe._errors import (
        ConfigError as ConfigError,
    )
    from ddpsafe._errors import (
        ConfigProblem as ConfigProblem,
    )
    from ddpsafe._errors import (
        DDPSafeError as DDPSafeError,
    )
    from ddpsafe._errors import (
        Explanation as Explanation,
    )
    from ddpsafe._errors import (
        LaunchError as LaunchError,
    )
    from ddpsafe._errors import (
        LaunchTimeoutError as LaunchTimeoutError,
    )
    from ddpsafe._errors import (
        MismatchError as MismatchError,
    )
    from ddpsafe._errors import (
        PreemptedError as PreemptedError,
    )
    from ddpsafe._errors import (
        PreflightError as PreflightError,
    )
    from ddpsafe._errors import (
        ProgressTimeoutError as ProgressTimeoutError,
    )
    from ddpsafe._errors import (
        RankExitedError as RankExitedError,
    )
    from ddpsafe._errors import (
        RankFailedError as RankFailedError,
    )
    from ddpsafe._errors import (
        RankKilledError as RankKilledError,
    )
    from ddpsafe._errors import (
        RankLeftEarlyError as RankLeftEarlyError,
    )
    from ddpsafe._errors import (
        RankRaisedError as RankRaisedError,
    )
    from ddpsafe._errors import (
        RendezvousTimeoutError as RendezvousTimeoutError,
    )
    from ddpsafe._functions import (
        barrier as barrier,
    )
    from ddpsafe._functions import (
        broadcast as broadcast,
    )
    from ddpsafe._functions import (
        gather as gather,
    )
    from ddpsafe._functions import (
        is_main as is_main,
    )
    from ddpsafe._functions import (
        loader as loader,
    )
    from ddpsafe._functions import (
        print as print,  # noqa: A004 - the name of RankContext.print
    )
    from ddpsafe._functions import (
        rank_zero_first as rank_zero_first,
    )
    from ddpsafe._functions import (
        reduce_mean as reduce_mean,
    )
    from ddpsafe._functions import (
        seed_all as seed_all,
    )
    from ddpsafe._functions import (
        stop_requested as stop_requested,
    )
    from ddpsafe._functions import (
        unwrap as unwrap,
    )
    from ddpsafe._functions import (
        wrap as wrap,
    )
    from ddpsafe._launch import LaunchResult as LaunchResult
    from ddpsafe._launch import launch as launch
    from ddpsafe._launch import spawn as spawn
    from ddpsafe._worker.attached import (
        cleanup as cleanup,
    )
    from ddpsafe._worker.attached import (
        current as current,
    )
    from ddpsafe._worker.attached import (
        process_group as process_group,
    )
    from ddpsafe._worker.attached import (
        setup as setup,
    )
    from ddpsafe._worker.context import RankContext as RankContext

__version__: Final = "0.1.0"

_HOMES: Final = {
    "ddpsafe._config": (
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
        "ConfigProblem",
        "DDPSafeError",
        "Explanation",
        "LaunchError",
        "LaunchTimeoutError",
        "MismatchError",
        "PreemptedError",
        "PreflightError",
        "ProgressTimeoutError",
        "RankExitedError",
        "RankFailedError",
        "RankKilledError",
        "RankLeftEarlyError",
        "RankRaisedError",
        "RendezvousTimeoutError",
    ),
    "ddpsafe._functions": (
        "barrier",
        "broadcast",
        "gather",
        "is_main",
        "loader",
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
_NAMESPACES: Final = ("checkpoint", "data", "doctor")
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604 - the keys are strings


def __getattr__(name: str) -> object:
    """Load a public name when it is first used (PEP 562)."""
    if name in _NAMESPACES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME_OF.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*__all__, *_NAMESPACES])
