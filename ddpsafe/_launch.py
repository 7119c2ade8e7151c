"""`launch` and `spawn`: plan a launch, run its attempts, return the result or raise the error."""

from __future__ import annotations

import os
import socket
import warnings
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from ddpsafe._config import LaunchConfig, SpawnFields, refuse_fields, require_data_paths
from ddpsafe._errors import DDPSafeError, Explanation
from ddpsafe._garbage import exempt_from_gc
from ddpsafe._launcher.attempt import run_attempt
from ddpsafe._launcher.handle import SpawnHandle, as_torchs
from ddpsafe._launcher.launch_parts import LaunchParts
from ddpsafe._launcher.plan import Calls, make_plan, require_can_start_ranks, require_main_guard
from ddpsafe._launcher.retry import run_attempts
from ddpsafe._launcher.run_directory import open_run_directory
from ddpsafe._launcher.uncaught import presentable
from ddpsafe._launcher.watch.console import shown_log
from ddpsafe._launcher.watch.signals import (
    Interrupted,
    broken_pipes_raise,
    interrupts_kept,
    open_inbox,
    pass_on,
)
from ddpsafe._logging import json_scope, launch_fields
from ddpsafe._preflight import (
    require_ready_between_nodes,
    require_ready_to_join,
    require_ready_to_launch,
)
from ddpsafe._worker.entrypoint import run_rank
from ddpsafe._worker.join import attached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Unpack

    from ddpsafe._config import LaunchFields
    from ddpsafe._launcher.handle import GracePeriod, OnStart
    from ddpsafe._launcher.plan import LaunchPlan, OnRetry
    from ddpsafe._wire.spec import CallStyle
    from ddpsafe._worker.context import RankContext

__tracebackhide__ = True  # pytest shows the caller's line, not the frames of this file

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult(Generic[R]):
    """The result of a successful launch.

    Attributes:
        values: The return value of each rank, by rank. In a rank that another launcher started,
            only that rank's own value.
        attempts: How many attempts ran, the successful one included. (`LaunchError.attempts` is how many
            the retry policy allowed.)
        run_dir: The run directory; ``None`` if it was temporary and has been removed.
    """

    values: dict[int, R]
    attempts: int
    run_dir: Path | None = field(default=None)


def launch(
    fn: Callable[Concatenate[RankContext, P], R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    config: LaunchConfig | None = None,
    on_retry: OnRetry | None = None,
    **fields: Unpack[LaunchFields],
) -> LaunchResult[R]:
    """Run ``fn(ctx, *args, **kwargs)`` in every rank, with the process group initialized.

    Replaces ``mp.spawn``, ``setup()`` and ``cleanup()``. If torchrun, Slurm or MPI has already
    started this process as a rank, nothing is spawned: `fn` runs here, as that rank.

    Args:
        fn: The function. One that cannot be imported by name (a notebook's, a closure, a lambda)
            is pickled by value.
        args: Its positional arguments after the context.
        kwargs: Its keyword arguments.
        config: The configuration; by default it is read from the environment and the file.
        on_retry: Called with each failure that `RetryPolicy` retries. Its return value replaces
            `args` (a smaller batch after running out of memory); ``None`` keeps them. If it raises,
            the launch ends with that exception, whose cause is the failure.
        **fields: Fields of `LaunchConfig` that override `config`: `nproc_per_node`, `backend`,
            `start_method`, `timeouts`, `retry`, `data_paths`, `run_dir`, `env`, `preflight`, `seed`,
            `console`, and for several nodes `nnodes`, `node_rank`, `rendezvous`.
            ``help(ddpsafe.LaunchConfig)`` describes each of them.

    Returns:
        What the ranks returned.

    Raises:
        ConfigError: The call, its configuration, or the arguments that `on_retry` returned are
            wrong; nothing was started with them.
        PreflightError: The machine is not ready for the first attempt, or for a retry; that
            attempt did not begin.
        RankFailedError: A rank failed; ``__cause__`` is its own exception if that could be pickled.
        LaunchTimeoutError: A deadline passed.
        PreemptedError: The job was asked to stop, `RankContext.stop_requested` returned true, and
            the ranks have returned.
    """
    try:
        resolved = LaunchConfig.resolve(config, **fields)
        if attached.is_rank(os.environ):
            return _run_here(fn, args, kwargs or {}, resolved)
        require_main_guard()
        require_can_start_ranks()
        plan = _ready_plan(resolved, style="launch")
        return _run_plan(plan, Calls(fn, args, kwargs or {}, on_retry, style="launch"))
    except DDPSafeError as error:
        raise presentable(error)


def spawn(
    fn: Callable[Concatenate[int, P], object],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    daemon: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    start_method: str = "spawn",
    *,
    config: LaunchConfig | None = None,
    on_retry: OnRetry | None = None,
    **fields: Unpack[SpawnFields],
) -> SpawnHandle | None:
    """Run ``fn(local_rank, *args)`` in `nprocs` processes of this node, as ``torch.multiprocessing.spawn`` does.

    On one node, the local rank is the rank. With several nodes the rank is in the variable ``RANK``, unless
    the environment of the launcher sets that itself.

    The function may keep its own ``setup()`` and ``cleanup()``, even with a hard-coded port: its
    ``init_process_group`` uses the store of this launch.

    Args:
        fn: The function; its return value is discarded.
        args: Its arguments after the local rank.
        nprocs: Number of ranks of this node. It overrides `LaunchConfig.nproc_per_node`, the variable
            ``DDPSAFE_NPROC_PER_NODE`` and the file, even where it is omitted.
        join: Wait for the ranks; otherwise return a handle.
        daemon: Make the ranks daemonic processes, which may not have children of their own.
        start_method: ``spawn`` or ``forkserver``. It overrides `LaunchConfig.start_method`, its
            variable and the file, as `nprocs` does.
        config: As in `launch`, except for the two fields above.
        on_retry: As in `launch`.
        **fields: As in `launch`, except for the two fields above: `backend`, `timeouts`, `retry`,
            `data_paths`, `run_dir`, `env`, `preflight`, `seed`, `console`, and for several nodes
            `nnodes`, `node_rank`, `rendezvous`.

    Returns:
        ``None``, or a handle with ``join=False``.

    Raises:
        ConfigError: As in `launch`.
        PreflightError: As in `launch`.
        RankFailedError: As in `launch`; it is also torch's ``ProcessRaisedException`` or
            ``ProcessExitedException``, with their attributes.
        LaunchTimeoutError: As in `launch`.
        PreemptedError: As in `launch`.
    """
    try:
        require_main_guard()
        require_can_start_ranks()
        refuse_fields(
            fields, SpawnFields, why="spawn() has torch's argument for it", write="nprocs=…"
        )
        resolved = LaunchConfig.resolve(
            LaunchConfig.resolve(config, **fields),
            nproc_per_node=nprocs,
            start_method=start_method,  # type: ignore[arg-type]  # checked by the config
        )
        plan = _ready_plan(resolved, style="spawn", daemon=daemon)
        calls = Calls(fn, args, {}, on_retry, style="spawn")
        if join:
            _run_plan(plan, calls)
            return None
        return SpawnHandle(partial(_run_plan, plan, calls), daemon=daemon)
    except DDPSafeError as error:
        raise presentable(as_torchs(error))


def run_processes(
    fn: Callable[..., object],
    args: Sequence[Any],
    config: LaunchConfig,
    *,
    command: Sequence[str] = (),
) -> None:
    """Run ``fn(local_rank, *args)`` in each rank, for ``ddpsafe run``: each rank is a program of its own.

    `command` is the script and its arguments.

    Raises:
        DDPSafeError: As in `launch`.
    """
    # This process runs none of the user's code, so all that it has loaded by now may be frozen, torch
    # above all.
    with exempt_from_gc():
        plan = _ready_plan(config, style="run")
    _run_plan(plan, Calls(fn, args, {}, None, style="run", command=command))


def _ready_plan(config: LaunchConfig, *, style: CallStyle, daemon: bool = False) -> LaunchPlan:
    """Plan a launch and check that the machine is ready for it."""
    # torch's import, which planning needs, sometimes swallows a Ctrl-C.
    with shown_log(config.console), interrupts_kept(), telling_node_0(config):
        plan = make_plan(config, style=style, daemon=daemon)
        require_ready_to_launch(config, nproc=plan.nproc, backend=plan.backend)
    return plan


def _run_plan(
    plan: LaunchPlan,
    calls: Calls,
    on_start: OnStart | None = None,
    cancelled: Event | None = None,
    grace_period: GracePeriod = lambda: None,
) -> LaunchResult[Any]:
    attempts = 0
    folder = ""
    if plan.config.nnodes > 1:  # nodes may share the run directory, so each has a folder in it
        rank = "" if plan.config.node_rank is None else f"{plan.config.node_rank}-"
        folder = f"node-{rank}{socket.gethostname()}"
    try:
        with (
            broken_pipes_raise(),
            closing(calls),
            launch_fields(plan.config.node_rank),
            shown_log(plan.console),
            ExitStack() as stack,
        ):
            # The other nodes wait for this one, which cannot join without a place for its logs.
            with telling_node_0(plan.config):
                opening = open_run_directory(plan.config.run_dir, node=folder)
                directory = stack.enter_context(opening)
            parts = LaunchParts(
                plan=plan,
                calls=calls,
                run_rank=run_rank,
                examine_nodes=require_ready_between_nodes,
                directory=directory,
                on_start=on_start,
                cancelled=cancelled or Event(),
                grace_period=grace_period,
            )
            stack.callback(parts.memory.close)
            if plan.config.nnodes > 1:
                from ddpsafe._launcher.nodes.rounds import NodeLaunch  # imports torch

                nodes = NodeLaunch(parts)
                values = nodes.run()
                attempts = nodes.attempts
            else:

                def attempt(number: int) -> dict[int, object]:
                    nonlocal attempts
                    attempts = number
                    require_data_paths(plan.config.data_paths)
                    with open_inbox() as inbox:
                        return run_attempt(number, parts, inbox=inbox)

                values = run_attempts(
                    plan.config.retry, attempt, change=calls.change, cancelled=parts.cancelled
                )
    except Interrupted as interrupted:
        with json_scope(on=plan.console == "json"):
            pass_on(interrupted)
    run_dir = None if directory.is_ours else directory.path
    return LaunchResult(values=values, attempts=attempts, run_dir=run_dir)


@contextmanager
def telling_node_0(config: LaunchConfig) -> Iterator[None]:
    """Tell node 0 at once, if it can be reached, that this node fails before it can join."""
    try:
        yield
    except DDPSafeError as error:
        if config.nnodes > 1:
            from ddpsafe._launcher.nodes.rounds import tell_node_0  # imports torch

            tell_node_0(config, error)
        raise


def _run_here(
    fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any], config: LaunchConfig
) -> LaunchResult[R]:
    require_data_paths(config.data_paths)
    world = attached.find_place(os.environ)
    if world is not None:
        require_ready_to_join(config, world)
    with attached.process_group(config=config) as context:
        # A launch inside a rank does not get the ranks that it asks for. Where another launcher
        # started the ranks, all of them make this call, so only rank 0 warns.
        if context.world.rank == 0 or context.world.started_by == "ddpsafe":
            counts = {
                "nproc_per_node": context.world.local_world_size,
                "nnodes": context.world.nnodes,
            }
            for name, count in counts.items():
                wanted = getattr(config, name)
                if name in config.model_fields_set and isinstance(wanted, int) and wanted != count:
                    text = Explanation(
                        f"launch({name}={wanted}) runs in a rank of a job with {name}={count}: it starts no "
                        f"processes, and the function runs once in each of the {context.world.world_size} ranks "
                        "of that job.",
                        cause="this process is already a rank, by its variables or because ddpsafe started "
                        "it, so the launch joins that job.",
                        fix=f"ask the outer launcher for the ranks and omit {name} here, or start the "
                        "inner job in a process without RANK, WORLD_SIZE and the like.",
                    )
                    warnings.warn(str(text), RuntimeWarning, stacklevel=3)
        value = fn(context, *args, **kwargs)
    if attached.has_stopped():
        raise attached.stopped_error(context, value)
    return LaunchResult(
        values={context.rank: value}, attempts=context.attempt, run_dir=context.run_dir
    )
