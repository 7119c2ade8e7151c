"""The attempts of this node: joined at the rendezvous, run as node 0 or as another node, ended."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import socket
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config import require_data_paths
from ddpsafe._errors import (
    DDPSafeError,
    Explanation,
    NodeLostError,
    PreflightError,
    RendezvousTimeoutError,
)
from ddpsafe._garbage import out_of_collections
from ddpsafe._host import interface_variables
from ddpsafe._launcher.nodes.control_channel import Channel, Lost, RefusedError
from ddpsafe._launcher.nodes.node_messages import (
    FAILED_NODE,
    FolderCheck,
    FoldersSeen,
    Hello,
    NodeFacts,
    RoundPlan,
    RoundResult,
    as_error,
    error_of,
    round_result_of,
)
from ddpsafe._launcher.nodes.node_zero import coordinate, lost_node_error, world_of
from ddpsafe._launcher.nodes.other_node import Participant
from ddpsafe._launcher.nodes.rendezvous import (
    NodeRendezvous,
    Seat,
    make_random_id,
    rank_store,
    require_same_settings,
    warn_of_refused_node,
)
from ddpsafe._launcher.plan import NodesPlace
from ddpsafe._launcher.processes.launcher_store import reserved_port
from ddpsafe._launcher.retry import run_attempts
from ddpsafe._launcher.watch.signals import Interrupted, open_inbox
from ddpsafe._logging import get_logger
from ddpsafe._wire.spec import StorePlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from threading import Event

    from ddpsafe._launcher.plan import Calls, LaunchPlan
    from ddpsafe._launcher.processes.start import RunRank
    from ddpsafe._launcher.run_directory import RunDirectory

logger = get_logger(__name__)

_REFUSAL_READ: Final = timedelta(seconds=3)
_FOLDER_APPEARS: Final = timedelta(seconds=5)
"""Network file systems show a new file on another host after some seconds."""

_EXAMINATION_READ: Final = timedelta(seconds=10)
_PLAN, _REFUSAL, _EXAMINED = "ddpsafe/plan", "ddpsafe/refusal", "ddpsafe/examined"
_FAILED, _FOLDERS = "ddpsafe/failed", "ddpsafe/folders"
"""Keys of a round: its plan, or why it does not begin, and the first failure of another node."""


class _NoRound(Exception):  # noqa: N818 - it carries the error
    """There can be no round of the nodes, and another attempt would change nothing."""

    def __init__(self, error: DDPSafeError | Interrupted) -> None:
        super().__init__(str(error))
        self.error = error


class _ComeAgain(Exception):  # noqa: N818 - this node has not failed
    """Node 0 has refused another node, and begins the round again without it."""


class NodeLaunch:
    """The launch of a job of several nodes, on this one.

    Args:
        plan: What to start here; its ranks are counted again in each round.
        calls: What the ranks run.
        run_rank: What their processes run.
        directory: Where the logs go.
        cancelled: Set when the launcher is to stop.
        require_ready_between_nodes: Examines the connections between the nodes, see `_preflight`.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        calls: Calls,
        *,
        run_rank: RunRank,
        directory: RunDirectory,
        cancelled: Event,
        require_ready_between_nodes: Callable[..., None],
    ) -> None:
        """Keep what is given."""
        self._require_ready_between_nodes = require_ready_between_nodes
        self._plan, self._calls, self._run_rank = plan, calls, run_rank
        self._directory, self._cancelled = directory, cancelled
        self._channel: Channel | None = None
        self._is_between_rounds = False
        self._earlier: list[DDPSafeError] = []
        self._checkpoint_folders: set[str] = set()
        self.attempts = 0

    def run(self) -> dict[int, object]:
        """Run attempts until one ends well or there is no other; return the values of own ranks.

        Raises:
            DDPSafeError: As `run_attempt` raises it, the same on all nodes.
            Interrupted: A signal to the launcher of some node ended the attempt.
        """
        with open_inbox() as inbox:
            rendezvous = NodeRendezvous(
                self._plan.config, inbox, settings=settings_of(self._plan), nproc=self._plan.nproc
            )
            try:
                rendezvous.open()
            except BaseException:
                rendezvous.close()
                raise
        may_answer = True
        try:
            if rendezvous.serves:
                return self._lead(rendezvous)
            return self._follow(rendezvous)
        except NodeLostError:
            may_answer = rendezvous.serves
            raise
        finally:
            if self._channel is not None:
                self._channel.close()
            rendezvous.close(may_answer=may_answer)

    def _lead(self, rendezvous: NodeRendezvous) -> dict[int, object]:
        """Be node 0, whose retry policy decides for all."""
        policy = self._plan.config.retry

        def announce(error: DDPSafeError) -> bool:
            self._earlier.append(error)
            self._tell(round_result_of(error, is_final=False))
            self._is_between_rounds = True
            return self._calls.change(error)

        try:
            return run_attempts(
                policy,
                lambda number: self._attempt_as_node_0(rendezvous, number),
                change=announce,
                cancelled=self._cancelled,
            )
        except _NoRound as exc:
            if isinstance(exc.error, DDPSafeError):
                exc.error.previous_attempts = tuple(self._earlier)
            raise exc.error from exc.error.__cause__
        except BaseException as exc:
            error = as_error(
                exc, rendezvous.facts.named(0), "could not begin another attempt", phase="retry"
            )
            self._tell(round_result_of(error, is_final=True))
            if self._is_between_rounds:  # others wait for the next one
                rendezvous.dismiss(error)
            raise

    def _tell(self, result: RoundResult) -> None:
        if self._channel is not None:
            self._channel.send(result)

    def _attempt_as_node_0(self, rendezvous: NodeRendezvous, number: int) -> dict[int, object]:
        self.attempts = number
        self._close_channel()
        with contextlib.ExitStack() as stack:
            inbox = stack.enter_context(open_inbox(rendezvous.inbox))
            rendezvous.inbox = inbox
            known = rendezvous.launchers
            while True:
                seat, nodes = self._gather(rendezvous)
                ports = stack.enter_context(contextlib.ExitStack())
                try:
                    round_plan, channel = self._open_round(rendezvous, seat, nodes, number, ports)
                    if self._examine_with_new_nodes(rendezvous, seat, round_plan, known):
                        self._await_nodes(rendezvous, seat, round_plan, known)
                        break
                except NodeLostError:
                    raise  # the retry policy decides
                except (Exception, Interrupted) as exc:
                    error = self._refuse(rendezvous, seat, exc)
                    raise _NoRound(error) from exc
                self._close_channel()
                ports.close()
            try:
                return coordinate(
                    number,
                    plan=self._placed(round_plan, 0, rendezvous),
                    round_plan=round_plan,
                    channel=channel,
                    call=self._calls.current,
                    run_rank=self._run_rank,
                    directory=self._directory,
                    inbox=inbox,
                    checkpoint_folders=self._checkpoint_folders,
                )
            finally:
                if inbox.received is not None:
                    self._cancelled.set()
                self._forget_missing(rendezvous, round_plan, channel)

    @staticmethod
    def _forget_missing(
        rendezvous: NodeRendezvous, round_plan: RoundPlan, channel: Channel
    ) -> None:
        """Let the next round begin without the nodes whose connection is gone, or never came."""
        for node in {*range(1, len(round_plan.nodes))} - channel.connected():
            rendezvous.forget(round_plan.nodes[node])

    def _gather(self, rendezvous: NodeRendezvous) -> tuple[Seat, list[NodeFacts]]:
        """Wait for the nodes of a round, without new ones that do not see the others' checkpoints.

        Raises:
            _NoRound: They do not come together.
        """
        while True:
            try:
                seat = rendezvous.join()
            except (DDPSafeError, Interrupted) as exc:
                if isinstance(exc, Interrupted):
                    rendezvous.dismiss(exc)
                raise _NoRound(exc) from exc
            assert seat is not None, "who serves the endpoint replaces no other"  # noqa: S101
            self._is_between_rounds = False
            try:
                if seat.node_rank != 0:
                    what = (
                        f"{socket.gethostname()} serves the endpoint and came out as node "
                        f"{seat.node_rank} of {seat.nnodes}."
                    )
                    cause = "another node has node_rank 0, or the clocks of the nodes differ by many seconds."
                    fix = (
                        "give node rank 0 to the host of the endpoint; compare `date` on all nodes."
                    )
                    raise PreflightError(  # noqa: TRY301 - told to the others below
                        Explanation(what, cause=cause, fix=fix), kind="startup-network"
                    )
                limit = self._plan.config.timeouts.rendezvous
                nodes = rendezvous.introduce(seat, Deadline.after(limit))
                unfit = self._refuse_unfit(rendezvous, seat, nodes)
            except (Exception, Interrupted) as exc:
                raise _NoRound(self._refuse(rendezvous, seat, exc)) from exc
            if unfit is None:
                return seat, nodes

    def _refuse_unfit(
        self, rendezvous: NodeRendezvous, seat: Seat, nodes: list[NodeFacts]
    ) -> int | None:
        """Refuse a new node that does not see the folders with the checkpoints of earlier attempts.

        The ranks would find out, too, and all of them would end.

        Returns:
            The node; the others come again.
        """
        new = [
            number for number, node in enumerate(nodes) if node.launcher not in rendezvous.launchers
        ]
        if not new or not rendezvous.launchers or not self._checkpoint_folders:
            return None
        limit = min(2 * _FOLDER_APPEARS, self._plan.config.timeouts.rendezvous)
        found: dict[int, FoldersSeen | None] = {}
        with _file_in(self._checkpoint_folders) as (file, folders):
            if not folders:
                return None
            check = FolderCheck(file=file, folders=folders, new_nodes=tuple(new))
            seat.board.put(_FOLDERS, check)
            deadline = Deadline.after(limit)
            for number in new:
                found[number] = seat.board.wait_for(f"{_FOLDERS}/{number}", FoldersSeen, deadline)
        blind = [(number, seen) for number, seen in found.items() if seen is None or seen.missing]
        if not blind:
            return None
        unfit, seen = blind[0]
        name, who = nodes[unfit].hostname, nodes[unfit].named(unfit)
        if seen is None:
            what = (
                f"{who} has not said within {limit.total_seconds():g} s whether it sees the checkpoints "
                f"of this job: {' and '.join(folders)}."
            )
            cause = "a network file system does not answer there, or its launcher has ended or is stopped."
            fix = f"on {name}:  ls {folders[0]}  ; then start the launcher there again."
        else:
            what = (
                f"{' and '.join(seen.missing)} on {who} is missing, or is not the storage that node 0 "
                f"({nodes[0].hostname!r}) has there: the checkpoints of this job."
            )
            cause = "the folder is not shared between the nodes, or a mount is missing there."
            fix = f"mount it on {name}, and start the launcher there again."
        error = PreflightError(Explanation(what, cause=cause, fix=fix), kind="mount")
        self._turn_away(rendezvous, seat, nodes, unfit, error)
        return unfit

    def _turn_away(
        self,
        rendezvous: NodeRendezvous,
        seat: Seat,
        nodes: Sequence[NodeFacts],
        unfit: int,
        error: PreflightError,
    ) -> None:
        """End a new node with an error; the others come again, and wait for another one."""
        warn_of_refused_node(nodes[unfit], error)
        seat.board.put(_REFUSAL, round_result_of(error, is_final=False, failed_node=unfit))
        self._is_between_rounds = True
        deadline = Deadline.after(_REFUSAL_READ)
        for number in range(1, seat.nnodes):
            seat.board.wait_for(f"{_REFUSAL}/{number}", RoundResult, deadline)
        rendezvous.forget(nodes[unfit])

    def _open_round(
        self,
        rendezvous: NodeRendezvous,
        seat: Seat,
        nodes: list[NodeFacts],
        number: int,
        stack: contextlib.ExitStack,
    ) -> tuple[RoundPlan, Channel]:
        """Tell the nodes who starts what, and listen for them."""
        address = rendezvous.address
        self._require_data_paths(rendezvous)
        require_same_settings(nodes)
        round_id = make_random_id()
        channel = Channel.listen(
            address, secret=rendezvous.secret, round_id=round_id, nnodes=len(nodes)
        )
        self._channel = channel  # closed with the next round or the run, whatever comes now
        launchers = {node.launcher for node in nodes}
        is_new = not launchers <= rendezvous.launchers  # not examined together with the others
        rendezvous.launchers = launchers
        round_plan = RoundPlan(
            round_id=round_id,
            attempt=number,
            nodes=tuple(nodes),
            store_port=stack.enter_context(rank_store(address)),
            channel_port=channel.port,
            master_port=stack.enter_context(reserved_port(address)),
            examines=is_new and self._plan.config.preflight == "full",
        )
        seat.board.put(_PLAN, round_plan)
        return round_plan, channel

    def _examine_with_new_nodes(
        self, rendezvous: NodeRendezvous, seat: Seat, plan: RoundPlan, known: set[str]
    ) -> bool:
        """Examine the connections; refuse a new node with which they are not what they were without it.

        Raises:
            PreflightError: Something was found, and no node is new, or all are, or no finding names a
                new one: another in its place would change nothing.
        """
        try:
            self._examine(rendezvous, seat, plan)
        except PreflightError as exc:
            new = [each for each, node in enumerate(plan.nodes) if node.launcher not in known]
            if not known or not new:
                raise
            named = Counter(
                host
                for finding in getattr(exc.report, "findings", ())
                if finding.severity == "failed"
                for host in finding.hosts
            )
            unfit = max(new, key=lambda each: named[plan.nodes[each].hostname])
            if not named[plan.nodes[unfit].hostname]:
                raise
            rendezvous.launchers = known
            self._turn_away(rendezvous, seat, plan.nodes, unfit, exc)
            return False
        return True

    def _require_data_paths(self, rendezvous: NodeRendezvous) -> None:
        """Wait for the data paths, as long as they say, or until a signal comes."""
        rendezvous.call(lambda: require_data_paths(self._plan.config.data_paths), None)

    def _refuse(
        self, rendezvous: NodeRendezvous, seat: Seat, exc: BaseException
    ) -> DDPSafeError | Interrupted:
        """Tell the nodes of a round why it does not begin; return the error that all end with."""
        error = as_error(
            exc, rendezvous.facts.named(seat.node_rank), "could not open the round", phase="start"
        )
        rendezvous.takes_signals = False  # the others are told of the signal, too
        with contextlib.suppress(RendezvousTimeoutError):  # the store is this node's own
            failed = seat.board.find(_FAILED, RoundResult)
            if failed is not None and not isinstance(error, Interrupted):
                error = _with_own_report(error_of(failed), error)
            result = round_result_of(error, is_final=True)
            self._tell(result)
            seat.board.put(_REFUSAL, result)
            # The store ends with this node: the others have to read it before.
            reading = Deadline.after(_REFUSAL_READ)
            connected = set() if self._channel is None else self._channel.connected()
            for node in set(range(seat.nnodes)) - {seat.node_rank} - connected:
                seat.board.wait_for(f"{_REFUSAL}/{node}", RoundResult, reading)
            if self._is_between_rounds:  # a node was refused, and the others come again
                rendezvous.dismiss(error)
        return error

    def _examine(self, rendezvous: NodeRendezvous, seat: Seat, plan: RoundPlan) -> None:
        """Examine the connections between the nodes, all of them at once.

        Raises:
            PreflightError: Something was found that will break the launch; the same on all nodes.
        """
        if not plan.examines:
            return
        try:
            self._require_ready_between_nodes(
                seat.board.store,
                self._plan.config,
                nnodes=seat.nnodes,
                node_rank=seat.node_rank,
                backend=self._plan.backend,
            )
        finally:
            # The store ends with node 0: the others have to read what was found before.
            seat.board.count(_EXAMINED, 1)
            if seat.node_rank == 0:
                for pause_s in Deadline.after(_EXAMINATION_READ).pauses_s():
                    if seat.board.count(_EXAMINED) == seat.nnodes:
                        break
                    rendezvous.require_no_signal()
                    time.sleep(pause_s)

    def _await_nodes(
        self, rendezvous: NodeRendezvous, seat: Seat, plan: RoundPlan, known: set[str]
    ) -> None:
        """Wait until all nodes have opened their control channel.

        Raises:
            NodeLostError: A node has not, or a new one says why it cannot.
            DDPSafeError: A node that was there before says why it cannot.
        """
        assert self._channel is not None  # noqa: S101 - opened a line before
        missing: set[int] = set()
        came: set[int] = set()
        again: set[int] = set()
        refused: int | None = None
        said: Explanation | None = None
        # A node that cannot come says why, once its own time is over.
        limit = self._plan.config.timeouts.rendezvous + _REFUSAL_READ
        for pause_s in Deadline.after(limit).pauses_s():
            connected = self._channel.connected()
            came |= connected
            missing = set(range(1, len(plan.nodes))) - connected
            if not missing:
                return
            rendezvous.require_no_signal()
            if refused is None and (failed := seat.board.find(_FAILED, RoundResult)) is not None:
                speaker = failed.facts.get(FAILED_NODE)
                if not known or speaker not in missing or plan.nodes[speaker].launcher in known:
                    raise error_of(failed)
                refused, said = speaker, failed.explanation
                seat.board.put(_REFUSAL, replace(failed, is_final=False))
            if refused is not None:
                # The others may be about to dial; one that cannot reads the refusal, and comes again.
                late = missing - came - {refused}
                again = {each for each in late if seat.board.has(f"{_REFUSAL}/{each}")}
                if late == again:
                    break
            time.sleep(pause_s)
        self._is_between_rounds = bool(again)
        for each in missing - again:
            rendezvous.forget(plan.nodes[each])
        node = min(missing) if refused is None else refused
        why = f"it joined, and opened no control channel to {plan.address}:{plan.channel_port}"
        lost = Lost(
            why=why if said is None else said.what.rstrip("."),
            is_silent=False,
            seen_ns=time.monotonic_ns(),
        )
        raise lost_node_error(
            plan,
            node,
            lost,
            said=said,
            when=f"attempt {plan.attempt}",
            attempt=plan.attempt,
            attempts=self._plan.config.retry.attempts,
            run_dir=self._directory.path,
        )

    def _follow(self, rendezvous: NodeRendezvous) -> dict[int, object]:
        """Be another node, round by round, as long as node 0 says so."""
        while True:
            self._close_channel()
            with open_inbox(rendezvous.inbox) as inbox:
                rendezvous.inbox = inbox
                try:
                    self._require_data_paths(rendezvous)
                except DDPSafeError as exc:
                    # The others wait for this node, unless it only came to replace another.
                    rendezvous.object(exc, None if self.attempts else _REFUSAL_READ)
                    raise
                try:
                    seat = rendezvous.join()
                except Interrupted:
                    self._withdraw(rendezvous)
                    raise
                if seat is None:
                    return {}
                try:
                    round_plan = self._read_plan(rendezvous, seat)
                    self._examine(rendezvous, seat, round_plan)
                    self.attempts = round_plan.attempt
                    self._channel = self._dial(rendezvous, seat, round_plan)
                except _ComeAgain:
                    continue
                except (Exception, Interrupted) as exc:
                    error = self._failed_to_begin(rendezvous, seat, exc)
                    if error is None:
                        continue
                    if error is exc:
                        raise
                    raise error from exc
                ended = Participant(
                    round_plan.attempt,
                    plan=self._placed(round_plan, seat.node_rank, rendezvous),
                    round_plan=round_plan,
                    channel=self._channel,
                    inbox=inbox,
                    directory=self._directory,
                ).run(self._calls.current, self._run_rank)
            if ended.error is None:
                assert ended.values is not None  # noqa: S101 - without an error there are values
                return ended.values
            if not ended.is_again or isinstance(ended.error, Interrupted):
                if isinstance(ended.error, DDPSafeError):
                    ended.error.previous_attempts = tuple(self._earlier)
                raise ended.error
            self._earlier.append(ended.error)
            logger.warning("attempt %d failed: %s", self.attempts, ended.error.explanation.what)
            try:
                self._calls.change(ended.error)
            except BaseException as exc:
                here = rendezvous.facts.named(seat.node_rank)
                error = as_error(exc, here, "could not begin another attempt", phase="retry")
                rendezvous.object(error, None)
                raise

    def _failed_to_begin(
        self, rendezvous: NodeRendezvous, seat: Seat, exc: BaseException
    ) -> DDPSafeError | Interrupted | None:
        """Tell node 0 why this one cannot begin; return the error that all end with, which node 0 says.

        ``None`` if node 0 has refused another node, and the others come again.

        Raises:
            Interrupted: They come again, and this launcher has been told to go.
        """
        error = as_error(
            exc, rendezvous.facts.named(seat.node_rank), "could not begin the round", phase="start"
        )
        if isinstance(error, RendezvousTimeoutError):
            return error  # node 0 is gone, or says nothing
        rendezvous.takes_signals = False
        with contextlib.suppress(RendezvousTimeoutError):
            if not seat.board.has(_REFUSAL):
                failed = round_result_of(error, is_final=True, failed_node=seat.node_rank)
                seat.board.put(_FAILED, failed)
            reading = Deadline.after(_REFUSAL_READ + _EXAMINATION_READ)
            refusal = seat.board.wait_for(_REFUSAL, RoundResult, reading)
            if refusal is not None:
                seat.board.put(f"{_REFUSAL}/{seat.node_rank}", refusal)
                if _is_of_another(refusal, seat):
                    self._withdraw(rendezvous)
                    rendezvous.takes_signals = True
                    rendezvous.require_no_signal()  # the next round has an inbox of its own
                    return None
                said = _with_own_report(error_of(refusal), error)
                if refusal.facts.get(FAILED_NODE) == seat.node_rank:
                    said.__cause__ = error.__cause__
                return said
        return error

    def _withdraw(self, rendezvous: NodeRendezvous) -> None:
        """Tell node 0 of a signal here while it waits for this node, which was in the last round."""
        if self._earlier and rendezvous.inbox.received is not None:
            rendezvous.takes_signals = False
            told = Interrupted(rendezvous.inbox.received, socket.gethostname())
            rendezvous.object(told, _REFUSAL_READ)

    def _read_plan(self, rendezvous: NodeRendezvous, seat: Seat) -> RoundPlan:
        # Node 0 gives up first, and says why: it knows who is missing.
        deadline = Deadline.after(self._plan.config.timeouts.rendezvous + _REFUSAL_READ)
        rendezvous.introduce(seat, deadline)
        has_looked = False
        looking: BoundedCall[tuple[str, ...]] | None = None
        for pause_s in deadline.pauses_s():
            if (plan := seat.board.find(_PLAN, RoundPlan)) is not None:
                return plan
            if not has_looked and (check := seat.board.find(_FOLDERS, FolderCheck)) is not None:
                has_looked = True
                if seat.node_rank in check.new_nodes:
                    looking = BoundedCall(partial(_find_missing, check), name="ddpsafe-folders")
            if looking is not None and looking.wait(0):
                seen = FoldersSeen(missing=looking.result())
                seat.board.put(f"{_FOLDERS}/{seat.node_rank}", seen)
                looking = None
            if (refusal := seat.board.find(_REFUSAL, RoundResult)) is not None:
                if _is_of_another(refusal, seat):
                    seat.board.put(f"{_REFUSAL}/{seat.node_rank}", refusal)
                    raise _ComeAgain
                raise error_of(refusal)
            rendezvous.require_no_signal()
            time.sleep(pause_s)
        raise rendezvous.lost("node 0 has not said who starts what", deadline)

    def _dial(self, rendezvous: NodeRendezvous, seat: Seat, plan: RoundPlan) -> Channel:
        deadline = Deadline.after(self._plan.config.timeouts.rendezvous)
        address = (plan.address, plan.channel_port)
        try:
            return rendezvous.call(
                lambda: Channel.dial(
                    address,
                    secret=rendezvous.secret,
                    round_id=plan.round_id,
                    node=seat.node_rank,
                    hello=Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
                    deadline=deadline,
                ),
                self._plan.config.timeouts.rendezvous,
            )
        except (OSError, RefusedError) as exc:
            here, at = socket.gethostname(), f"{plan.address}:{plan.channel_port}"
            why = getattr(exc, "strerror", None) or exc
            what = f"{here} reached no control channel of node 0 at {at}: {why}."
            cause = "a firewall lets only the port of the endpoint through, or node 0 has gone."
            fix = f"open all TCP ports between the nodes; on {here}:  nc -vz {plan.address} 22"
            raise PreflightError(
                Explanation(what, cause=cause, fix=fix), kind="startup-network"
            ) from exc

    def _placed(self, round_plan: RoundPlan, node: int, rendezvous: NodeRendezvous) -> LaunchPlan:
        """Return the plan with this node's ranks of the round, and with where they meet."""
        name = rendezvous.interface
        place = NodesPlace(
            store=StorePlace(
                host=round_plan.address, port=round_plan.store_port, key=round_plan.round_id
            ),
            master_port=round_plan.master_port,
            interfaces={} if name is None else interface_variables(name),
        )
        worlds = tuple(world_of(round_plan, rank) for rank in round_plan.ranks_of(node))
        return replace(self._plan, worlds=worlds, place=place)

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _is_of_another(refusal: RoundResult, seat: Seat) -> bool:
    """Tell whether another node alone is refused, and the others begin the round again."""
    return refusal.is_final is False and refusal.facts.get(FAILED_NODE) != seat.node_rank


def _find_missing(check: FolderCheck) -> tuple[str, ...]:
    """Return the folders in which node 0's file does not appear; hangs with a dead file system."""
    deadline = Deadline.after(_FOLDER_APPEARS)
    missing = []
    for folder in check.folders:
        for pause_s in deadline.pauses_s():
            # A look at the folder itself: network file systems remember that a file was not there.
            with contextlib.suppress(OSError):
                if check.file in os.listdir(folder):  # noqa: PTH208 - names alone
                    break
            time.sleep(pause_s)
        else:
            missing.append(folder)
    return tuple(missing)


@contextlib.contextmanager
def _file_in(folders: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keep a file in folders for a while; yield its name, and the folders that took it in time."""
    file = f".ddpsafe-{make_random_id()}"

    def write() -> tuple[str, ...]:
        written = []
        for folder in sorted(folders):
            with contextlib.suppress(OSError):
                Path(folder, file).touch()
                written.append(folder)
        return tuple(written)

    writing = BoundedCall(write, name="ddpsafe-folders")

    def remove() -> None:
        writing.wait(math.inf)
        for folder in folders:
            with contextlib.suppress(OSError):
                Path(folder, file).unlink()

    has_written = writing.wait(_FOLDER_APPEARS.total_seconds())
    if not has_written:
        logger.warning(
            "nothing could be written within %.0f s to %s: whether new nodes see the checkpoints there is "
            "not checked",
            _FOLDER_APPEARS.total_seconds(),
            " and ".join(sorted(folders)),
        )
    try:
        yield file, writing.result() if has_written else ()
    finally:
        BoundedCall(remove, name="ddpsafe-folders").wait(_FOLDER_APPEARS.total_seconds())


def _with_own_report(
    told: DDPSafeError | Interrupted, own: DDPSafeError | Interrupted
) -> DDPSafeError | Interrupted:
    """Return what another node has found, with what this one has examined itself."""
    if isinstance(told, PreflightError) and isinstance(own, PreflightError):
        told.report = own.report
    return told


def settings_of(plan: LaunchPlan) -> dict[str, str]:
    """Return what has to be the same on all nodes; their numbers of ranks may differ."""
    # The launcher of a script is the user's own process.
    with out_of_collections() if plan.style == "run" else contextlib.nullcontext():
        import torch

    config: dict[str, Any] = plan.config.model_dump(mode="json")
    names = ("nnodes", "timeouts", "retry", "seed", "preflight")
    return {
        **{name: str(config[name]) for name in names},
        "rendezvous.min_nodes": str(plan.config.rendezvous.min_nodes),
        "backend": plan.backend,
        "the call (launch, spawn or run)": plan.style,
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "ddpsafe": version("ddpsafe"),
    }
