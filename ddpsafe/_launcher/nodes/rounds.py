"""The attempts of this node: join a round, run it as node 0 or as another node, end it or go again."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import shlex
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
from ddpsafe._garbage import exempt_from_gc
from ddpsafe._launcher.nodes.control_channel import Channel, Lost, RefusedError
from ddpsafe._launcher.nodes.node_messages import (
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
from ddpsafe._launcher.nodes.node_zero import lost_node_error, run_as_node_0, world_of
from ddpsafe._launcher.nodes.other_node import Participant
from ddpsafe._launcher.nodes.rendezvous import (
    NodeRendezvous,
    Seat,
    make_random_id,
    rank_store,
    require_same_settings,
    warn_of_differences,
    warn_of_refused_node,
)
from ddpsafe._launcher.plan import NodesPlace
from ddpsafe._launcher.processes.store_folder import reserved_port
from ddpsafe._launcher.retry import run_attempts
from ddpsafe._launcher.watch.signals import Interrupted, open_inbox
from ddpsafe._logging import get_logger
from ddpsafe._wire.spec import StorePlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpsafe._launcher.launch_parts import LaunchParts
    from ddpsafe._launcher.plan import LaunchPlan

logger = get_logger(__name__)

_REFUSAL_READ: Final = timedelta(seconds=3)
_FILE_APPEARS: Final = timedelta(seconds=5)
"""Network file systems show a new file on another host after some seconds."""

_EXAMINATION_READ: Final = timedelta(seconds=10)

_COMPARED_VARIABLES: Final = ("NCCL_", "GLOO_", "TORCH_")

# Keys of a round.
_PLAN: Final = "ddpsafe/plan"
_REFUSAL: Final = "ddpsafe/refusal"  # why it does not begin, and below it who has read that
_EXAMINED: Final = "ddpsafe/examined"  # how many nodes have examined their connections
_FAILED: Final = "ddpsafe/failed"  # why a node other than node 0 cannot begin
_FOLDERS: Final = "ddpsafe/folders"  # what new nodes have to see, and below it what they saw


class _NoRound(Exception):  # noqa: N818 - it carries the error
    """There can be no round, and another attempt would not help."""

    def __init__(self, error: DDPSafeError | Interrupted) -> None:
        super().__init__(str(error))
        self.error = error


class _JoinAgain(Exception):  # noqa: N818 - this node has not failed
    """Node 0 has refused another node, and begins the round again without it."""


class NodeLaunch:
    """The launch of a job of several nodes, on this node.

    Args:
        parts: What to start here, and how.
    """

    def __init__(self, parts: LaunchParts) -> None:
        """Keep the parts; `run` starts."""
        self._parts = parts
        self._plan = parts.plan
        self._channel: Channel | None = None
        self._is_between_rounds = False
        self._earlier: list[DDPSafeError] = []
        self._checkpoint_folders: set[str] = set()
        self.attempts = 0

    def run(self) -> dict[int, object]:
        """Run attempts until one succeeds or none is left; return the values of this node's ranks.

        Raises:
            DDPSafeError: As `run_attempt` raises it, the same on all nodes.
            Interrupted: A signal to the launcher of some node ended the attempt.
        """
        with open_inbox() as inbox:
            rendezvous = NodeRendezvous(
                self._plan.config,
                inbox,
                settings=settings_of(self._plan),
                nproc=self._plan.nproc,
                setup=setup_of(self._plan, self._parts.calls.command),
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
            self._close_channel()
            rendezvous.close(may_answer=may_answer)

    def _lead(self, rendezvous: NodeRendezvous) -> dict[int, object]:
        """Run attempts as node 0, whose retry policy decides for all nodes."""

        def announce(error: DDPSafeError) -> bool:
            self._earlier.append(error)
            self._send_result(round_result_of(error, is_final=False))
            self._is_between_rounds = True
            return self._parts.calls.change(error)

        try:
            return run_attempts(
                self._plan.config.retry,
                lambda number: self._attempt_as_node_0(rendezvous, number),
                change=announce,
                cancelled=self._parts.cancelled,
            )
        except _NoRound as exc:
            if isinstance(exc.error, DDPSafeError):
                exc.error.previous_attempts = tuple(self._earlier)
            raise exc.error from exc.error.__cause__
        except BaseException as exc:
            error = as_error(
                exc, rendezvous.facts.named(0), "could not begin another attempt", phase="retry"
            )
            self._send_result(round_result_of(error, is_final=True))
            if self._is_between_rounds:  # the others wait for the next round
                rendezvous.dismiss(error)
            raise

    def _send_result(self, result: RoundResult) -> None:
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
                    raise  # the retry policy decides whether there is another attempt
                except (Exception, Interrupted) as exc:
                    error = self._refuse(rendezvous, seat, exc)
                    raise _NoRound(error) from exc
                self._close_channel()
                ports.close()
            try:
                return run_as_node_0(
                    number,
                    self._placed(round_plan, 0, rendezvous),
                    round_plan=round_plan,
                    channel=channel,
                    inbox=inbox,
                    checkpoint_folders=self._checkpoint_folders,
                )
            finally:
                self._forget_missing(rendezvous, round_plan, channel)

    @staticmethod
    def _forget_missing(
        rendezvous: NodeRendezvous, round_plan: RoundPlan, channel: Channel
    ) -> None:
        """Let the next round begin without the nodes that are not connected."""
        for node in {*range(1, len(round_plan.nodes))} - channel.connected():
            rendezvous.forget(round_plan.nodes[node])

    def _gather(self, rendezvous: NodeRendezvous) -> tuple[Seat, list[NodeFacts]]:
        """Wait for the nodes of a round; refuse new ones that do not see the others' checkpoints.

        Raises:
            _NoRound: Too few nodes joined, or they cannot run together.
        """
        while True:
            try:
                seat = rendezvous.join()
            except (DDPSafeError, Interrupted) as exc:
                if isinstance(exc, Interrupted):
                    rendezvous.dismiss(exc)
                raise _NoRound(exc) from exc
            assert seat is not None, "the node that serves the endpoint is not a replacement"  # noqa: S101
            self._is_between_rounds = False
            try:
                if seat.node_rank != 0:
                    what = (
                        f"{socket.gethostname()} serves the endpoint, but the rendezvous made it node "
                        f"{seat.node_rank} of {seat.nnodes}."
                    )
                    cause = "another node has node_rank 0, or the clocks of the nodes differ by many seconds."
                    fix = (
                        "give node rank 0 to the host of the endpoint; compare `date` on all nodes."
                    )
                    raise PreflightError(  # noqa: TRY301 - sent to the others below
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

        The ranks would notice as well, but that would end all of them.

        Returns:
            The refused node, if there is one; the others join again.
        """
        new = [
            number for number, node in enumerate(nodes) if node.launcher not in rendezvous.launchers
        ]
        if not new or not rendezvous.launchers or not self._checkpoint_folders:
            return None
        limit = min(2 * _FILE_APPEARS, self._plan.config.timeouts.rendezvous)
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
                f"{who} has not reported within {limit.total_seconds():g} s whether it sees the "
                f"checkpoints of this job: {' and '.join(folders)}."
            )
            cause = "a network file system does not answer there, or its launcher has ended or is stopped."
            fix = f"on {name}:  ls {folders[0]}  ; then start the launcher there again."
        else:
            what = (
                f"{' and '.join(seen.missing)} is missing on {who}, or is not the same storage as on node 0 "
                f"({nodes[0].hostname!r}): it holds the checkpoints of this job."
            )
            cause = "the folder is not shared between the nodes, or a mount is missing there."
            fix = f"mount it on {name}, and start the launcher there again."
        error = PreflightError(Explanation(what, cause=cause, fix=fix), kind="mount")
        self._refuse_new_node(rendezvous, seat, nodes, unfit, error)
        return unfit

    def _refuse_new_node(
        self,
        rendezvous: NodeRendezvous,
        seat: Seat,
        nodes: Sequence[NodeFacts],
        unfit: int,
        error: PreflightError,
    ) -> None:
        """End a new node with an error; the others join again, and wait for another one."""
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
        """Publish the plan of the round, and open the control channel."""
        address = rendezvous.address
        self._require_data_paths(rendezvous)
        require_same_settings(nodes)
        warn_of_differences(
            [nodes[0], *(each for each in nodes[1:] if each.launcher not in rendezvous.launchers)]
        )
        round_id = make_random_id()
        channel = Channel.listen(
            address,
            secret=rendezvous.secret,
            round_id=round_id,
            nnodes=len(nodes),
            node_loss=self._plan.config.timeouts.node_loss,
        )
        self._channel = channel  # closed before the next round and at the end, whatever is raised
        launchers = {node.launcher for node in nodes}
        is_new = not launchers <= rendezvous.launchers  # some node has not been examined yet
        rendezvous.launchers = launchers
        round_plan = RoundPlan(
            round_id=round_id,
            attempt=number,
            nodes=tuple(replace(each, settings={}, setup={}) for each in nodes),
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
        """Examine the connections; if a finding names a new node, refuse it and return False.

        Raises:
            PreflightError: Something was found that no replacement would change: no node is new, or
                all are, or no finding names a new one.
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
            self._refuse_new_node(rendezvous, seat, plan.nodes, unfit, exc)
            return False
        return True

    def _require_data_paths(self, rendezvous: NodeRendezvous) -> None:
        """Wait for the data paths, each up to its own limit; a signal ends the wait."""
        rendezvous.call(lambda: require_data_paths(self._plan.config.data_paths), None)

    def _refuse(
        self, rendezvous: NodeRendezvous, seat: Seat, exc: BaseException
    ) -> DDPSafeError | Interrupted:
        """Report to the nodes of a round why it does not begin; return the error that all end with."""
        error = as_error(
            exc, rendezvous.facts.named(seat.node_rank), "could not open the round", phase="start"
        )
        rendezvous.takes_signals = False  # a signal must not cut this short: the others get it too
        with contextlib.suppress(RendezvousTimeoutError):  # the store is this node's own
            failed = seat.board.find(_FAILED, RoundResult)
            if failed is not None and not isinstance(error, Interrupted):
                error = _with_own_report(error_of(failed), error)
            result = round_result_of(error, is_final=True)
            self._send_result(result)
            seat.board.put(_REFUSAL, result)
            # The store ends with this node, so wait until the others have read it.
            reading = Deadline.after(_REFUSAL_READ)
            connected = set() if self._channel is None else self._channel.connected()
            for node in set(range(seat.nnodes)) - {seat.node_rank} - connected:
                seat.board.wait_for(f"{_REFUSAL}/{node}", RoundResult, reading)
            if self._is_between_rounds:  # a node was refused, and the others join again
                rendezvous.dismiss(error)
        return error

    def _examine(self, rendezvous: NodeRendezvous, seat: Seat, plan: RoundPlan) -> None:
        """Examine the connections between the nodes, together with all other nodes.

        Raises:
            PreflightError: Something was found that will break the launch; the same on all nodes.
        """
        if not plan.examines:
            return
        try:
            self._parts.examine_nodes(
                seat.board.store,
                self._plan.config,
                nnodes=seat.nnodes,
                node_rank=seat.node_rank,
                backend=self._plan.backend,
            )
        finally:
            # The store ends with node 0, which waits until the others have read the findings.
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
        """Wait until all nodes have connected to the control channel.

        Raises:
            NodeLostError: A node has not connected, or a new one has reported why it cannot.
            DDPSafeError: A node of the last round has reported why it cannot connect.
        """
        assert self._channel is not None  # noqa: S101 - _open_round has opened it
        missing: set[int] = set()
        ever_connected: set[int] = set()
        rejoining: set[int] = set()
        refused: int | None = None
        explained: Explanation | None = None
        # A node that cannot connect reports why only after its own limit.
        limit = self._plan.config.timeouts.rendezvous + _REFUSAL_READ
        for pause_s in Deadline.after(limit).pauses_s():
            connected = self._channel.connected()
            ever_connected |= connected
            missing = set(range(1, len(plan.nodes))) - connected
            if not missing:
                return
            rendezvous.require_no_signal()
            if refused is None and (failed := seat.board.find(_FAILED, RoundResult)) is not None:
                failing = failed.failed_node
                error = error_of(failed)
                is_old = failing is None or plan.nodes[failing].launcher in known
                if not known or failing not in missing or is_old:
                    raise error
                refused = failing
                if isinstance(error, DDPSafeError):
                    explained = error.explanation
                seat.board.put(_REFUSAL, replace(failed, is_final=False))
            if refused is not None:
                # The others may be about to connect; one that cannot reads the refusal and joins again.
                late = missing - ever_connected - {refused}
                rejoining = {each for each in late if seat.board.has(f"{_REFUSAL}/{each}")}
                if late == rejoining:
                    break
            time.sleep(pause_s)
        self._is_between_rounds = bool(rejoining)
        for each in missing - rejoining:
            rendezvous.forget(plan.nodes[each])
        node = min(missing) if refused is None else refused
        why = f"it joined, but opened no control channel to {plan.address}:{plan.channel_port}"
        lost = Lost(
            why=why if explained is None else explained.what.rstrip("."),
            how="goodbye" if explained is not None else "ended",
            seen_ns=time.monotonic_ns(),
        )
        raise lost_node_error(
            plan,
            node,
            lost,
            explained=explained,
            when=f"attempt {plan.attempt}",
            attempt=plan.attempt,
            attempts=self._plan.config.retry.attempts,
            run_dir=self._parts.directory.path,
        )

    def _follow(self, rendezvous: NodeRendezvous) -> dict[int, object]:
        """Run attempts as another node, for as long as node 0 begins rounds."""
        while True:
            self._close_channel()
            with open_inbox(rendezvous.inbox) as inbox:
                rendezvous.inbox = inbox
                try:
                    self._require_data_paths(rendezvous)
                except DDPSafeError as exc:
                    # The others wait for this node, unless it is new and was to replace another one.
                    rendezvous.object(exc, None if self.attempts else _REFUSAL_READ)
                    raise
                try:
                    seat = rendezvous.join()
                except Interrupted:
                    self._report_signal(rendezvous)
                    raise
                if seat is None:
                    return {}
                try:
                    round_plan = self._read_plan(rendezvous, seat)
                    self._examine(rendezvous, seat, round_plan)
                    self.attempts = round_plan.attempt
                    self._channel = self._dial(rendezvous, seat, round_plan)
                except _JoinAgain:
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
                    self._placed(round_plan, seat.node_rank, rendezvous),
                    round_plan=round_plan,
                    channel=self._channel,
                    inbox=inbox,
                ).run()
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
                self._parts.calls.change(ended.error)
            except BaseException as exc:
                here = rendezvous.facts.named(seat.node_rank)
                error = as_error(exc, here, "could not begin another attempt", phase="retry")
                rendezvous.object(error, None)
                raise

    def _failed_to_begin(
        self, rendezvous: NodeRendezvous, seat: Seat, exc: BaseException
    ) -> DDPSafeError | Interrupted | None:
        """Report to node 0 why this node cannot begin; return the error that node 0 has all end with.

        ``None`` if node 0 has refused another node, and the others join again.

        Raises:
            Interrupted: They join again, but this launcher has received a signal.
        """
        error = as_error(
            exc, rendezvous.facts.named(seat.node_rank), "could not begin the round", phase="start"
        )
        if isinstance(error, RendezvousTimeoutError):
            return error  # node 0 cannot be reached, or does not respond
        rendezvous.takes_signals = False
        with contextlib.suppress(RendezvousTimeoutError):
            if not seat.board.has(_REFUSAL):
                failed = round_result_of(error, is_final=True, failed_node=seat.node_rank)
                seat.board.put(_FAILED, failed)
            reading = Deadline.after(_REFUSAL_READ + _EXAMINATION_READ)
            refusal = seat.board.wait_for(_REFUSAL, RoundResult, reading)
            if refusal is not None:
                seat.board.put(f"{_REFUSAL}/{seat.node_rank}", refusal)
                if _refuses_another(refusal, seat):
                    self._report_signal(rendezvous)
                    rendezvous.takes_signals = True
                    rendezvous.require_no_signal()  # the next round would not see it: it has a new inbox
                    return None
                shared = _with_own_report(error_of(refusal), error)
                if refusal.failed_node == seat.node_rank:
                    shared.__cause__ = error.__cause__
                return shared
        return error

    def _report_signal(self, rendezvous: NodeRendezvous) -> None:
        """Report a signal to node 0 if it waits for this node, which was in the last round."""
        if self._earlier and rendezvous.inbox.received is not None:
            rendezvous.takes_signals = False
            interrupted = Interrupted(rendezvous.inbox.received, socket.gethostname())
            rendezvous.object(interrupted, _REFUSAL_READ)

    def _read_plan(self, rendezvous: NodeRendezvous, seat: Seat) -> RoundPlan:
        # Node 0 gives up first and reports why: it knows which nodes are missing.
        deadline = Deadline.after(self._plan.config.timeouts.rendezvous + _REFUSAL_READ)
        rendezvous.introduce(seat, deadline)
        has_check = False
        checking: BoundedCall[tuple[str, ...]] | None = None
        for pause_s in deadline.pauses_s():
            if (plan := seat.board.find(_PLAN, RoundPlan)) is not None:
                return plan
            if not has_check and (check := seat.board.find(_FOLDERS, FolderCheck)) is not None:
                has_check = True
                if seat.node_rank in check.new_nodes:
                    checking = BoundedCall(partial(_find_missing, check), name="ddpsafe-folders")
            if checking is not None and checking.wait(0):
                seen = FoldersSeen(missing=checking.result())
                seat.board.put(f"{_FOLDERS}/{seat.node_rank}", seen)
                checking = None
            if (refusal := seat.board.find(_REFUSAL, RoundResult)) is not None:
                if _refuses_another(refusal, seat):
                    seat.board.put(f"{_REFUSAL}/{seat.node_rank}", refusal)
                    raise _JoinAgain
                raise error_of(refusal)
            rendezvous.require_no_signal()
            time.sleep(pause_s)
        raise rendezvous.lost("node 0 has not published the plan of the round", deadline)

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
                    hello=lambda: Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
                    deadline=deadline,
                    node_loss=self._plan.config.timeouts.node_loss,
                ),
                self._plan.config.timeouts.rendezvous,
            )
        except (OSError, RefusedError) as exc:
            here, at = socket.gethostname(), f"{plan.address}:{plan.channel_port}"
            why = getattr(exc, "strerror", None) or exc
            what = f"{here} reached no control channel of node 0 at {at}: {why}."
            cause = (
                "a firewall allows only the port of the endpoint, or node 0's launcher has ended."
            )
            fix = f"open all TCP ports between the nodes; on {here}:  nc -vz {plan.address} 22"
            raise PreflightError(
                Explanation(what, cause=cause, fix=fix), kind="startup-network"
            ) from exc

    def _placed(self, round_plan: RoundPlan, node: int, rendezvous: NodeRendezvous) -> LaunchParts:
        """Return the parts with this node's ranks in the round, and the store where all ranks meet."""
        place = NodesPlace(
            store=StorePlace(
                host=round_plan.address, port=round_plan.store_port, key=round_plan.round_id
            ),
            master_port=round_plan.master_port,
            interfaces=rendezvous.interface_settings(),
        )
        worlds = tuple(world_of(round_plan, rank) for rank in round_plan.ranks_of(node))
        return self._parts.with_plan(replace(self._plan, worlds=worlds, place=place))

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _refuses_another(refusal: RoundResult, seat: Seat) -> bool:
    """Return whether only another node is refused, and the others join again."""
    return refusal.is_final is False and refusal.failed_node != seat.node_rank


def _find_missing(check: FolderCheck) -> tuple[str, ...]:
    """Return the folders in which node 0's file does not appear; hangs if a file system does."""
    deadline = Deadline.after(_FILE_APPEARS)
    missing = []
    for folder in check.folders:
        for pause_s in deadline.pauses_s():
            # List the folder: network file systems cache that a file does not exist.
            with contextlib.suppress(OSError):
                if check.file in os.listdir(folder):  # noqa: PTH208 - names alone
                    break
            time.sleep(pause_s)
        else:
            missing.append(folder)
    return tuple(missing)


@contextlib.contextmanager
def _file_in(folders: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Put a file into folders for the context; yield its name, and the folders where that worked in time."""
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

    has_written = writing.wait(_FILE_APPEARS.total_seconds())
    if not has_written:
        logger.warning(
            "no file could be written within %.0f s to %s, so new nodes are not checked for access to the "
            "checkpoints there",
            _FILE_APPEARS.total_seconds(),
            " and ".join(sorted(folders)),
        )
    try:
        yield file, writing.result() if has_written else ()
    finally:
        BoundedCall(remove, name="ddpsafe-folders").wait(_FILE_APPEARS.total_seconds())


def _with_own_report(
    received: DDPSafeError | Interrupted, own: DDPSafeError | Interrupted
) -> DDPSafeError | Interrupted:
    """Return the error of another node with this node's own report of the examination."""
    if isinstance(received, PreflightError) and isinstance(own, PreflightError):
        received.report = own.report
    return received


def settings_of(plan: LaunchPlan) -> dict[str, str]:
    """Return what has to be the same on all nodes; their numbers of ranks may differ."""
    # With launch() and spawn() this is the user's own process, whose garbage would stay.
    with exempt_from_gc() if plan.style == "run" else contextlib.nullcontext():
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


def setup_of(plan: LaunchPlan, command: Sequence[str]) -> dict[str, str]:
    """Return what should be the same on all nodes, because ranks that differ in it fail in odd ways."""
    script, *arguments = command
    name = Path(script).name
    with contextlib.suppress(OSError):  # a module, a program, a notebook
        name += f" (sha256 {hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12]})"
    variables = {**os.environ, **plan.config.env}
    return {
        "the script": name,
        "its arguments": shlex.join(arguments),
        **{each: variables[each] for each in variables if each.startswith(_COMPARED_VARIABLES)},
    }
