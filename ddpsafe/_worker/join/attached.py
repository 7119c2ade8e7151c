"""`process_group`, `setup` and `cleanup`, for ranks of any launcher and for a process alone."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import TRY_AGAIN_EXIT_CODE, DDPSafeError, Explanation, PreemptedError
from ddpsafe._logging import get_logger
from ddpsafe._wire.exception_facts import clip, exit_code_of, read_chain, text_of, type_name_of
from ddpsafe._worker import environment, stop_agreement
from ddpsafe._worker import process_group as groups
from ddpsafe._worker.context import barrier_timeout_error, peer_failed_error, peer_failure_line
from ddpsafe._worker.join.joining import (
    adopt_group,
    as_in_script,
    describe,
    device_of_script,
    join_job,
    join_launch,
    place_of,
)
from ddpsafe._worker.rank import this_rank
from ddpsafe._world import JOINED, World, find_world, joined_mark, require_not_inherited

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Unpack

    from ddpsafe._config import GroupFields, LaunchConfig
    from ddpsafe._job.control import Control, Departure
    from ddpsafe._worker.context import RankContext


def is_rank(env: Mapping[str, str]) -> bool:
    """Return whether some launcher, ddpsafe's included, has started this process as a rank."""
    if this_rank.is_launched:
        return True
    world = find_world(env)
    # The only task of a Slurm step is not a rank: `srun python train.py` only runs a program on a
    # node of the allocation, and that program may start its own ranks.
    return world is not None and (world.started_by, world.world_size) != ("slurm", 1)


def find_place(env: Mapping[str, str]) -> World | None:
    """Return the place that an outer launcher gave this rank.

    That is ``None`` in a rank of `launch` or `spawn`, whose launcher has read it already, and in a process
    that no launcher started.
    """
    return None if this_rank.is_launched else find_world(env)


@contextlib.contextmanager
def process_group(
    backend: str = "auto", *, config: LaunchConfig | None = None, **fields: Unpack[GroupFields]
) -> Iterator[RankContext]:
    """Join the process group for as long as the context is open.

    Works under torchrun, srun, mpirun, in a rank of `launch` or `spawn`, in a process whose
    ``RANK`` and ``WORLD_SIZE`` were set by hand, and in a process alone, where it needs no port. A
    group that exists already is used as it is and not closed.

    Args:
        backend: Backend for torch; ``auto`` takes nccl if every rank has a GPU, else gloo.
        config: Timeouts, seed and variables; by default from environment and file.
        **fields: Fields of `LaunchConfig` that override it: `timeouts`, `rendezvous`, `env`,
            `seed`, `preflight`, `data_paths` and `run_dir`. The others are about starting ranks.

    Yields:
        This rank's context.

    Raises:
        ConfigError: The launcher's variables are incomplete or contradict each other, or the
            store belongs to another job.
        PreflightError: The port is taken; or the nodes cannot all reach each other, which
            ``preflight="full"`` examines.
        RendezvousTimeoutError: Ranks did not join within ``timeouts.start``.
        RankRaisedError: At the end, if this rank has finished but another one has failed.
    """
    member, opened = _enter(None, None, backend, config, fields)
    try:
        yield member
    except BaseException as exc:
        # No barrier and no destroy on a failing path: the peers would wait for each other.
        if opened:
            _abandon(member, exc)
        raise
    _close(member, opened=opened)


logger = get_logger(__name__)

_DEPART_S: Final = 2.0
_MAX_REASON: Final = 300


def setup(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    *,
    config: LaunchConfig | None = None,
    **fields: Unpack[GroupFields],
) -> RankContext:
    """Join the process group: the hand-written ``setup(rank, world_size)``, made safe.

    Args:
        rank: This rank; by default from the launcher.
        world_size: Number of ranks; by default from the launcher.
        backend: Backend for torch; chosen as in `process_group` by default.
        config: As in `process_group`.
        **fields: As in `process_group`.

    Returns:
        This rank's context.

    Raises:
        ConfigError: As in `process_group`; also if only one of `rank` and `world_size` is given.
        PreflightError: As in `process_group`.
        RendezvousTimeoutError: As in `process_group`.
    """
    member, opened = _enter(rank, world_size, backend or "auto", config, fields)
    if opened:
        this_rank.opened = member
        this_rank.handled_at_setup = sys.exc_info()[1]
    return member


def cleanup() -> None:
    """Leave the process group that `setup` joined; harmless if called twice or without `setup`.

    While an exception propagates, as in ``finally: cleanup()``, it does not wait for the others.
    """
    member, this_rank.opened = this_rank.opened, None
    if member is None:
        return
    exc = sys.exc_info()[1]
    # setup() may have been called in an `except` block, which is still being handled then.
    if exc is None or exc is this_rank.handled_at_setup:
        _close(member, opened=True)
    else:
        _abandon(member, exc)


def _abandon(member: RankContext, exc: BaseException) -> None:
    """Leave on a failing path: no other rank waits for this one, now or at the end."""
    stop = _own_stopping()
    if stop is not None:
        stop.others.leave()
        stop.signals.close()
    control = member.control
    if control is not None:
        # Bounded: if the store's host has vanished, torch's client waits for it.
        leaving = BoundedCall(partial(report_departure, control, exc), name="ddpsafe-leave")
        if leaving.wait(_DEPART_S):
            # A peer error ("Connection closed by peer") does not name the rank that failed first.
            first = leaving.result()
            if first is not None and first.rank != member.rank and first.is_failure:
                line = f"ddpsafe: {peer_failure_line(first)} (this is {member.world})"
                if sys.version_info >= (3, 11):
                    exc.add_note(line)
                else:
                    logger.error("%s", line)
    _forget(member)


def report_departure(control: Control, exc: BaseException) -> Departure | None:
    """Report to the others that this rank fails; for a peer error, return who failed first."""
    first = None
    if not this_rank.is_launched:  # under ddpsafe's launcher, the launcher reports the cause
        facts = read_chain(exc)
        error = f"{type_name_of(facts.shown)}: {text_of(facts.shown)}"
        is_failure = exit_code_of(exc) != 0
        with contextlib.suppress(RuntimeError):  # the store has ended, which the others notice too
            control.depart(clip(error, _MAX_REASON), facts.origin, is_failure=is_failure)
        if facts.origin != "own" and not isinstance(exc, DDPSafeError):  # ddpsafe's name it already
            first = control.departure()
    with contextlib.suppress(RuntimeError):
        control.arrive("leave")  # after the reason, which the ranks that wait there read next
    return first


def _enter(
    rank: int | None,
    world_size: int | None,
    backend: str,
    config: LaunchConfig | None,
    fields: GroupFields,
) -> tuple[RankContext, bool]:
    """Return the context, and whether the caller has to close the group."""
    import torch.distributed as dist

    current = this_rank.context
    is_joined = dist.is_initialized()
    # A program that a rank starts inherits its variables: it joined as that rank, and waited for
    # ever.
    if not is_joined and not this_rank.is_launched:
        require_not_inherited(os.environ)
    asks_for_this_launch = current is not None and world_size in (None, current.world_size)
    in_launch = current is not None and asks_for_this_launch and this_rank.is_launched
    if not fields and is_joined:
        return current or adopt_group(), False
    if not fields and current is not None and in_launch:
        if backend == "auto" and config is not None:
            backend = config.backend
        return join_launch(current, backend), True
    from ddpsafe._config import GroupFields, LaunchConfig, refuse_fields, require_data_paths

    refuse_fields(
        fields,
        GroupFields,
        why="process_group() and setup() join ranks that have been started already",
        write="nothing; leave it out, or pass it to launch() or spawn()",
    )
    settings = {**fields, "backend": backend} if backend != "auto" else dict(fields)
    resolved = LaunchConfig.resolve(config, **settings)  # type: ignore[arg-type] # checked there
    if is_joined:
        # A script may call setup() twice with the same fields.
        if resolved != this_rank.joined_with:
            _warn_of_late(fields, "the process group exists already")
        return current or adopt_group(), False
    if current is not None and in_launch:
        _warn_of_late(fields, "the launch that started this rank has decided it")
        return join_launch(current, resolved.backend), True
    require_data_paths(resolved.data_paths)
    member = join_job(place_of(rank, world_size), resolved)
    environment.borrow({JOINED: joined_mark(member.rank, os.environ)})
    this_rank.joined_with = resolved
    return member, True


def _warn_of_late(fields: GroupFields, why: str) -> None:
    """Warn of fields that come too late; no error, as the script needs them under other launchers."""
    names = ", ".join(f"{name}=…" for name in fields)
    warnings.warn(f"{names} has no effect here: {why}.", RuntimeWarning, stacklevel=4)


def current() -> RankContext:
    """Return this rank's context, anywhere in the rank.

    Outside of a rank, it describes the process from the launcher's variables, or as a process alone.
    """
    import torch.distributed as dist

    member = this_rank.context
    if member is not None:
        return as_in_script(member)
    if dist.is_available() and dist.is_initialized():
        return adopt_group()
    place = find_world(os.environ) or World.alone()
    return describe(place, device_of_script(place), "none", None)


def _close(member: RankContext, *, opened: bool) -> None:
    if not opened:
        return
    deadline = Deadline.after(member.barrier_timeout)
    stop = _own_stopping()
    if stop is not None:
        stop.others.leave()
    is_supervised = this_rank.is_launched
    missing = groups.close_group(member.control, deadline=deadline, is_supervised=is_supervised)
    if missing:
        if stop is not None:
            stop.signals.close()
        raise barrier_timeout_error(member, "the end of the process group", missing, deadline)
    _forget(member)
    if stop is not None:
        stop.close()
    failed = None if member.control is None else member.control.failed_peer
    # Without a launcher of ddpsafe's, this rank would end with success in a job that has failed.
    if failed is not None and not is_supervised:
        raise peer_failed_error(member, failed)


def has_stopped() -> bool:
    """Return whether this rank's last group was asked to stop, and the rank has seen the request."""
    stop = this_rank.stopping
    return stop is not None and stop.answered


def stopped_error(member: RankContext, value: object) -> PreemptedError:
    """Return the error of `launch` in a rank of another launcher that was asked to stop."""
    what = (
        f"{member.world} stopped because the job was asked to, and returned, "
        f"on {socket.gethostname()}, attempt {member.attempt}."
    )
    cause = "a scheduler takes the machine back (preemption, time limit, drained node)."
    fix = (
        f"start the same command again; exit code {TRY_AGAIN_EXIT_CODE} tells a scheduler to do so."
    )
    return PreemptedError(
        Explanation(what, cause=cause, fix=fix), values={member.rank: value}, attempt=member.attempt
    )


def _forget(member: RankContext) -> None:
    if not this_rank.is_launched and this_rank.context is member:
        this_rank.context = None
        environment.give_back()


def _own_stopping() -> stop_agreement.Stopping | None:
    """Return this rank's part in stopping; ``None`` under ddpsafe's launcher, which manages it."""
    return this_rank.stopping if not this_rank.is_launched else None
