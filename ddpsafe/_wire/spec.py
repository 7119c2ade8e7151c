"""What one rank needs to know, complete before its process starts."""

from __future__ import annotations

import hashlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from datetime import timedelta

    from ddpsafe._world import World

# A real-time signal: SIGUSR1 and SIGUSR2 belong to schedulers and to the user's own handlers.
STACKS_SIGNAL: Final = int(signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2)

MARKER: Final = "DDPSAFE_LAUNCH_ID"
"""The variable that a rank's processes have, and by which they are found again."""


def semaphore_prefix(launch_id: str) -> str:
    """Return how the names of a launch's semaphores begin; macOS allows them 31 characters.

    Every user of the host can read the names, so they do not show the id itself.
    """
    digest = hashlib.sha256(launch_id.encode()).hexdigest()
    return f"/ddpsafe-{digest[:8]}"


CallStyle = Literal["launch", "spawn", "run"]
"""``launch`` calls ``fn(ctx, *args)`` with the group up; ``spawn`` calls ``fn(rank, *args)``, and the
script makes its group itself; ``run`` is ``spawn`` of a whole script, as torchrun starts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeouts:
    """The deadlines a rank keeps by itself; the launcher keeps the others.

    Attributes:
        rendezvous: For each step of joining: to reach the store, to meet the others, to make the group.
        collective: Timeout of the process group.
        barrier: How long a rank waits for the others at a named barrier.
        chosen: Names of those that the user has set. Where a script makes its group itself, the
            others give way to its own timeouts and to torch's defaults.
    """

    rendezvous: timedelta
    collective: timedelta
    barrier: timedelta
    chosen: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFiles:
    """Where one rank's file descriptors 1 and 2, its stack dumps and what NCCL_DEBUG shows go."""

    stdout: str
    stderr: str
    stacks: str
    nccl: str


def unreported_mark(stderr: Path | str) -> Path:
    """Return the file that a rank makes beside its log when it could not send its last report."""
    return Path(stderr).with_suffix(".unreported")


def read_log(path: Path | str) -> str:
    """Return a file of a rank's, as far as it is text; nothing where it does not exist any more."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Everything the launcher tells one rank.

    Attributes:
        world: The rank's place.
        attempt: This attempt, counted from 1.
        launch_id: Marks the processes of this launch.
        launcher_pid: The process whose death ends this one.
        store_dir: The private folder in which the ranks of this attempt meet.
        backend: Backend of the process group, e.g. ``gloo`` or ``cpu:gloo,cuda:nccl``.
        device: The rank's device, e.g. ``cuda:0``.
        timeouts: See `RankTimeouts`.
        style: How the user's function is called.
        env: Variables to set.
        inherited_env: The caller's whole environment, where the start method does not carry it.
        cwd: The caller's working directory.
        seed: Base seed; ``None`` leaves the generators alone.
        child_start_method: How processes that the rank starts through `multiprocessing` are started
            unless it says otherwise; ``None`` for Python's default.
        num_threads: Intra-op threads of the rank; ``None`` leaves the choice to the user.
        logs: See `LogFiles`.
        run_dir: The run directory.
    """

    world: World
    attempt: int
    launch_id: str
    launcher_pid: int
    store_dir: str
    backend: str
    device: str
    timeouts: RankTimeouts
    style: CallStyle
    env: dict[str, str]
    inherited_env: dict[str, str] | None
    cwd: str
    seed: int | None
    child_start_method: str | None
    num_threads: int | None
    logs: LogFiles
    run_dir: str
