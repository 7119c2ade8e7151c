"""One attempt: make a fresh store, start the ranks, watch them, end them, return or raise the result."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.util import get_temp_dir
from typing import TYPE_CHECKING, Final, Protocol

from ddpsafe._errors import (
    STARTUP_KINDS,
    TRY_AGAIN_EXIT_CODE,
    Explanation,
    PreemptedError,
    RankFailedError,
    RankKilledError,
)
from ddpsafe._launcher.diagnosis import attempt_error, rank_readings
from ddpsafe._launcher.diagnosis.stragglers import log_stragglers
from ddpsafe._launcher.plan import rank_env
from ddpsafe._launcher.processes import shutdown
from ddpsafe._launcher.processes.reaper import running_reaper
from ddpsafe._launcher.processes.start import require_room, started_processes
from ddpsafe._launcher.processes.store_folder import open_store
from ddpsafe._launcher.watch.console import drawn_streams, is_shown, open_console, tag_of
from ddpsafe._launcher.watch.signals import Interrupted, is_order
from ddpsafe._launcher.watch.supervisor import AttemptWatch, Peers
from ddpsafe._logging import note_attempt
from ddpsafe._secrets import OWN_SECRETS
from ddpsafe._stdlib_private import helpers_folder
from ddpsafe._text import ranks_text
from ddpsafe._wire import payload
from ddpsafe._wire.spec import RankSpec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from mmap import mmap

    from ddpsafe._errors import LaunchError
    from ddpsafe._launcher.diagnosis.attempt_error import EndedAttempt
    from ddpsafe._launcher.launch_parts import LaunchParts
    from ddpsafe._launcher.processes.rank_process import RankProcess, RankState
    from ddpsafe._launcher.processes.store_folder import LauncherStore
    from ddpsafe._launcher.run_directory import RunDirectory
    from ddpsafe._launcher.watch.preemption import StopRequest
    from ddpsafe._launcher.watch.signals import SignalInbox
    from ddpsafe._wire.messages import RankOutcome


def run_attempt(
    number: int, parts: LaunchParts, *, inbox: SignalInbox, peers: Peers | None = None
) -> dict[int, object]:
    """Run all ranks once, those of other nodes included.

    Returns:
        What each rank of this node returned, by rank.

    Raises:
        LaunchError: A rank failed, a deadline passed, or a node was lost.
        PreemptedError: The ranks stopped because they were asked to.
        PreflightError: The ranks could not be started.
        Interrupted: The launcher has to stop; all ranks have ended.
    """
    peers = Peers() if peers is None else peers
    plan, timeouts = parts.plan, parts.plan.config.timeouts
    oom_kills_before = rank_readings.count_oom_kills()
    is_alone = not peers.ranks
    error: BaseException | None = None
    try:
        with ExitStack() as stack:
            processes, end_ranks = stack.enter_context(started_ranks(number, parts, inbox))
            stack.enter_context(
                open_console(processes, plan.console, inbox=inbox, limit=timeouts.attempt)
            )
            watch = AttemptWatch(
                processes, timeouts=timeouts, inbox=inbox, peers=peers, learned=parts.learned
            )
            ending = peers.gather_evidence(watch.until_end(), processes, ask_where)
            grace = timeouts.grace
            if ending.reason == "failed":
                given_s = peers.longest_grace_s(parts.grace_period())
                grace = let_others_run(watch, processes, given_s, grace)
            if is_alone:
                end_ranks(processes, grace=grace)  # how ranks end is evidence, too
            ended = attempt_error.EndedAttempt(
                outcomes=dict(sorted((outcomes_of(processes) | peers.outcomes()).items())),
                ending=ending,
                attempt=number,
                retry=plan.config.retry,
                run_dir=parts.directory.path,
                oom_kills=rank_readings.count_oom_kills() - oom_kills_before + peers.oom_kills(),
                timeouts=timeouts,
                nnodes=plan.worlds[0].nnodes,
                is_script=plan.style == "run",
            )
            if is_alone:
                stack.close()  # a signal also counts while the last output waits for its reader
            values: dict[int, object] = {}
            try:
                peers.require_all_nodes(ended)
                values = values_or_raise(
                    ended,
                    processes,
                    watch.stop_request,
                    inbox.received,
                    parts.directory,
                    peers=peers,
                )
            except (Exception, Interrupted) as exc:  # noqa: BLE001 - raised once all have ended
                error = peers.announce(exc, ended)
            if not is_alone:
                # The decision came first, so that the ranks of all nodes end at the same time.
                end_ranks(processes, grace=grace)
            error = peers.await_ends(ended, error, grace)
            if error is not None:
                raise error
            return values
    finally:
        error = None  # its traceback refers to this frame, which would keep what the ranks returned
        if inbox.received is not None:
            parts.cancelled.set()  # no further attempt, whatever the result of this one


def outcomes_of(processes: Sequence[RankProcess]) -> dict[int, RankOutcome]:
    """Return what became of the ranks of this node; those still running are about to be ended."""
    outcomes = {}
    for process in processes:
        outcome = process.outcome()
        if outcome.status == "running":
            outcome = replace(outcome, status="stopped")
        seen = None if process.reading is None else process.reading.printed
        outcomes[process.rank] = rank_readings.with_printed_end(outcome, seen)
    return outcomes


class EndRanks(Protocol):
    """`shutdown.end_processes` for this launch, with ``timeouts.grace`` unless `grace` is given."""

    def __call__(self, processes: Sequence[RankProcess], *, grace: timedelta = ...) -> None:
        """End the ranks that still run, and everything that any rank has started."""


@contextmanager
def started_ranks(
    number: int, parts: LaunchParts, inbox: SignalInbox
) -> Iterator[tuple[list[RankProcess], EndRanks]]:
    """Start the ranks of this node for one attempt; leaving the context ends those still running.

    Yields:
        The ranks, and the function that ends them.

    Raises:
        PreflightError: They could not be started.
    """
    plan, directory = parts.plan, parts.directory
    require_room(plan.nproc)
    directory.make_attempt_folder(number)
    place = plan.worlds[0]
    note_attempt(number, world_size=place.world_size, node_rank=place.node_rank)
    config = plan.config
    with ExitStack() as stack:
        reaper = stack.enter_context(running_reaper(plan.launch_id))
        if config.start_method == "forkserver":
            # The fork server makes its folder when it starts. Make it now, so that the reaper knows it
            # even if this process is killed during that start; an error is reported by the start.
            with suppress(OSError):
                get_temp_dir()
        for folder in (helpers_folder(), None if directory.is_kept else directory.path):
            if folder is not None:
                reaper.remove_later(folder)
        store = stack.enter_context(open_store(reaper))

        end_ranks = partial(
            shutdown.end_processes, grace=config.timeouts.grace, launch_id=plan.launch_id
        )
        processes = stack.enter_context(
            started_processes(
                _specs(parts, number, store),
                parts.calls.current,
                start_method=config.start_method,
                expects_restarts=bool(config.retry.on - STARTUP_KINDS),
                daemon=plan.daemon,
                run_rank=parts.run_rank,
                reaper=reaper,
                end=end_ranks,
            )
        )
        if parts.on_start is not None:
            parts.on_start(processes, inbox)
        yield processes, end_ranks


def ask_where(processes: Sequence[RankProcess]) -> None:
    """Ask the ranks that are alive where they are, before they are ended.

    If one of them is suspended, `rank_readings.collect` may leave all of them so; `EndRanks` resumes and
    ends them.
    """
    # A rank may have died unnoticed, as while the launcher was suspended, or may die while it is asked.
    shutdown.note_ends(processes)
    readings = rank_readings.collect(processes)
    for process in processes:
        process.note_reading(readings.get(process.rank))
    before = rank_readings.find_before_first_end(processes)
    for process in processes:
        process.note_before(before.get(process.rank))
    shutdown.note_ends(processes)


def let_others_run(
    watch: AttemptWatch, processes: Sequence[RankProcess], given_s: float | None, grace: timedelta
) -> timedelta:
    """Let the other ranks run on after one has failed, if ``join(grace_period=…)`` asks for it.

    Returns:
        How long they then have after SIGTERM: the same time again, as with torch's ``join``. Without
        `given_s`, or after a signal that ends the job, it is `grace`.
    """
    if given_s is None:
        return grace
    rank_readings.continue_suspended(processes)
    period = timedelta(seconds=given_s)
    return period if watch.let_ranks_run(period) else grace


def values_or_raise(
    ended: EndedAttempt,
    processes: Sequence[RankProcess],
    request: StopRequest,
    received: signal.Signals | None,
    directory: RunDirectory,
    *,
    peers: Peers,
) -> dict[int, object]:
    """Return what the ranks of this node returned, or raise the attempt's error.

    `received` is the signal that this launcher, or another node's, received.

    Raises:
        LaunchError: A rank failed, or a deadline passed.
        PreemptedError: The ranks stopped because they were asked to.
        Interrupted: The launcher has to stop.
    """
    reason = ended.ending.reason
    ranks: list[RankState] = [*processes, *peers.ranks]
    if reason == "stop-timeout" or (
        reason == "done" and any(rank.stop.is_stopping for rank in ranks)
    ):
        values = dict.fromkeys(rank.rank for rank in peers.ranks if rank.returned is not None)
        values |= values_of(processes, ended, directory)
        values = {
            rank: value for rank, value in values.items() if rank not in ended.ending.unfinished
        }
        stopped = preempted_error(ended, request, values, keeps_logs=directory.is_kept)
        directory.holds_failure |= bool(stopped.unfinished_ranks)
        raise stopped
    if reason == "done" and not is_order(received):
        return values_of(processes, ended, directory)
    if reason in ("done", "signal"):
        raise Interrupted(received or signal.SIGTERM)
    directory.note_tracebacks(ended.outcomes.values())
    error = attempt_error.make_error(ended)
    error.add_details(*peers.silent_nodes())
    # The exception itself is not sent between nodes, so that the retry policy cannot look at its
    # type.
    if getattr(error, "rank", None) in peers.retried:
        error.is_of_retried_type = True
    leaving = peers.find_leaving().values()
    if _died_of_request(error, ended, request, {received, *leaving}):
        if request.deadline is not None:
            directory.report(ended.attempt, error)
            raise preempted_error(ended, request, {}, keeps_logs=True, failure=error)
        directory.report(ended.attempt, error, is_kept=False)
        raise Interrupted(received or next(iter(leaving)))
    directory.report(ended.attempt, error)
    raise error


def _died_of_request(
    error: LaunchError,
    ended: EndedAttempt,
    request: StopRequest,
    received: Collection[signal.Signals | None],
) -> bool:
    """Return whether the rank, or a process that it needs, died of the signal that asks the job to stop."""
    # A cgroup or `scancel --full` sends the signal to all processes. So it is a request to the job,
    # and not the failure of a rank.
    if not isinstance(error, RankFailedError):
        return False
    raised = ended.outcomes[error.rank].raised
    died_of = 0 if raised is None else raised.child_signal
    if isinstance(error, RankKilledError):
        died_of = error.signal
    # Ranks that were asked may have been sent another one: Slurm's warning precedes SIGTERM.
    asks = (signal.SIGTERM, signal.SIGUSR1) if request.deadline is not None else received
    return died_of in asks


CAUSE_OF_STOP: Final = (
    "a scheduler is taking the machine back (preemption, time limit, drained node), or the signal was "
    "sent by hand."
)


def preempted_error(
    ended: EndedAttempt,
    request: StopRequest,
    values: Mapping[int, object],
    *,
    keeps_logs: bool,
    failure: LaunchError | None = None,
) -> PreemptedError:
    """Return the error that names the ranks that stopped or did not, and how to continue the job.

    `failure` is what the signal itself has ended, so that the ranks did not save.
    """
    late = sorted(set(ended.outcomes) - set(values))
    ranks = f"{ranks_text(late or ended.outcomes)} (world_size {ended.world_size})"
    where = ended.when("preempted")
    if ended.nnodes == 1:
        where = f"on {socket.gethostname()}, {where}"
    limit_s = request.limit.total_seconds()
    details: list[str] = []
    if failure is not None:
        what = (
            f"{ranks} did not save: {request.source()} asked them to, and a process that they need died "
            f"of the same signal, {where}."
        )
        fix = (
            "start the same command again, it continues from the last checkpoint; send the signal to the "
            "launcher alone, or let programs that a rank starts handle it."
        )
        details = [failure.explanation.what]
    elif late:
        what = (
            f"{ranks} did not return and exit within {limit_s:g} s of {request.source()}, {where}."
        )
        fix = "raise timeouts.stop if saving takes longer, else see where they were."
        details = attempt_error.positions(ended)
        details += [
            f"rank {rank} waited for {work}" for rank, work in ended.ending.unfinished.items()
        ]
    else:
        what = f"{ranks} stopped on {request.source()} and returned, {where}."
        fix = f"start the same command again; exit code {TRY_AGAIN_EXIT_CODE} tells a scheduler to do so."
    keeps_logs = keeps_logs or bool(late)
    logs = ended.logs if keeps_logs else None
    return PreemptedError(
        Explanation(what, cause=CAUSE_OF_STOP, fix=fix, details=details, logs=logs),
        values=dict(values),
        unfinished_ranks=tuple(late),
        attempt=ended.attempt,
        attempts=ended.retry.attempts,
        outcomes=dict(ended.outcomes),
        run_dir=ended.run_dir if keeps_logs else None,
    )


def values_of(
    processes: Sequence[RankProcess], ended: EndedAttempt, directory: RunDirectory
) -> dict[int, object]:
    """Return what the ranks of this node returned.

    Raises:
        RankFailedError: A value cannot be loaded here.
    """
    log_stragglers(ended.outcomes)
    values: dict[int, object] = {}
    for process in processes:
        if process.returned is not None:
            try:
                values[process.rank] = _load(process.result)
            except Exception as exc:
                error = attempt_error.unloadable(ended, process.rank, exc)
                directory.report(ended.attempt, error)
                raise error from exc
    directory.note_end(ended.attempt, ended.outcomes)
    return values


def _load(value: bytes | mmap | None) -> object:
    """Load what a rank returned."""
    if value is None:
        msg = "the shared memory that holds it could not be mapped"
        raise payload.CannotTravelError(msg)
    try:
        return payload.loads(value)
    except SystemExit as exc:  # of the user's code, which must not end the launcher
        msg = f"loading it raised {exc!r}"
        raise payload.CannotTravelError(msg) from exc


def _specs(parts: LaunchParts, number: int, store: LauncherStore) -> list[RankSpec]:
    plan, directory = parts.plan, parts.directory
    config = plan.config
    launcher_environment = None
    if config.start_method == "forkserver":
        # A fork server keeps the environment it was started with, so send today's.
        launcher_environment = {
            name: text for name, text in os.environ.items() if name not in OWN_SECRETS
        }
    logs = {
        world.rank: directory.logs(
            number,
            world,
            is_shown=is_shown(plan.console, world.rank),
            drawn=drawn_streams(plan.console, world.rank),
            tag_columns=(
                len(tag_of(world.rank, world.local_rank)) if plan.console == "tagged" else 0
            ),
        )
        for world in plan.worlds
    }
    return [
        RankSpec(
            world=world,
            attempt=number,
            launch_id=plan.launch_id,
            launcher_pid=os.getpid(),
            store_dir=str(store.folder),
            groups_file=store.groups,
            store_place=None if plan.place is None else plan.place.store,
            backend=plan.backend,
            asked_backend=config.backend,
            device=plan.devices[world.local_rank],
            timeouts=plan.timeouts,
            style=plan.style,
            env=rank_env(plan, world, store.master_port, logs[world.rank], attempt=number),
            inherited_env=launcher_environment,
            cwd=os.getcwd(),  # noqa: PTH109 - a plain string is sent to the rank
            seed=config.seed,
            child_start_method=plan.child_start_method,
            num_threads=plan.num_threads,
            logs=logs[world.rank],
            run_dir=str(directory.path),
            memory=parts.memory.files(plan.nproc),
        )
        for world in plan.worlds
    ]
