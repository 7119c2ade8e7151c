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
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config import LaunchConfig, require_data_paths
from ddpsafe._errors import (
    DDPSafeError,
    Explanation,
    LaunchError,
    NodeLostError,
    PreflightError,
    RendezvousTimeoutError,
)
from ddpsafe._garbage import exempt_from_gc
from ddpsafe._job.channel import Lost
from ddpsafe._job.endpoint import listen_at, rank_store, trouble_of
from ddpsafe._launcher.nodes import limits
from ddpsafe._launcher.nodes.lobby import SCRIPT
from ddpsafe._launcher.nodes.node_messages import (
    FolderCheck,
    FoldersSeen,
    NodeFacts,
    Ready,
    RoundPlan,
    RoundResult,
    as_error,
    error_of,
    plan_of_node_0,
    round_result_of,
)
from ddpsafe._launcher.nodes.node_zero import run_as_node_0, world_of
from ddpsafe._launcher.nodes.other_node import Participant
from ddpsafe._launcher.nodes.rendezvous import NodeRendezvous, make_random_id
from ddpsafe._launcher.nodes.texts import lost_node_error
from ddpsafe._launcher.plan import NodesPlace
from ddpsafe._launcher.processes.store_folder import reserved_port
from ddpsafe._launcher.retry import is_retried, run_attempts
from ddpsafe._launcher.watch.console import note_event
from ddpsafe._launcher.watch.signals import Interrupted, open_inbox
from ddpsafe._logging import get_logger, note_attempt
from ddpsafe._text import listed
from ddpsafe._wire.spec import StorePlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import timedelta

    from ddpsafe._launcher.launch_parts import LaunchParts
    from ddpsafe._launcher.nodes.lobby import Membership
    from ddpsafe._launcher.nodes.rendezvous import RoundChannel
    from ddpsafe._launcher.plan import LaunchPlan
    from ddpsafe._launcher.watch.signals import SignalInbox

logger = get_logger(__name__)

_AGAIN_S: Final = 1.0

_COMPARED_VARIABLES: Final = ("NCCL_", "GLOO_", "TORCH_")


class _NoRound(Exception):  # noqa: N818 - it carries the error
    """There can be no round, and another attempt would not help."""

    def __init__(self, error: DDPSafeError | Interrupted) -> None:
        super().__init__(str(error))
        self.error = error


class _JoinAgain(Exception):  # noqa: N818 - this node has not failed
    """Node 0 has refused another node, and begins the round again without it."""


class NodeLaunch:
    """The launch of a job of several nodes, on this node."""

    def __init__(self, parts: LaunchParts) -> None:
        self._parts = parts
        self._plan = parts.plan
        self._round_channel: RoundChannel | None = None
        self._round_plan: RoundPlan | None = None
        self._earlier: list[DDPSafeError] = []
        self._error_without_node_0: LaunchError | PreflightError | None = None
        self._checkpoint_folders: set[str] = set()
        self._back_by = Deadline.after(None)
        self.attempts = 0

    def run(self) -> dict[int, object]:
        """Run attempts until one succeeds or none is left; return the values of this node's ranks.

        Raises:
            DDPSafeError: As `run_attempt` raises it, the same on all nodes.
            Interrupted: A signal to the launcher of some node ended the attempt.
        """
        inbox: SignalInbox | None = None
        while True:
            with open_inbox(inbox) as inbox:
                rendezvous = NodeRendezvous(
                    self._plan.config,
                    inbox,
                    settings=settings_of(self._plan, self._parts.calls.command),
                    nproc=self._plan.nproc,
                    setup=setup_of(self._plan, self._parts.calls.command),
                    may_serve=not self._earlier,
                )
                try:
                    rendezvous.open()
                except BaseException as exc:
                    rendezvous.close()
                    # After the loss of node 0, its successor may still be starting.
                    if not self._earlier or not _is_no_launcher_yet(exc):
                        raise
                    if self._back_by.expired():
                        raise self._earlier[-1] from exc
                    time.sleep(_AGAIN_S)
                    continue
            try:
                if rendezvous.serves:
                    return self._lead(rendezvous)
                return self._follow(rendezvous)
            except (LaunchError, PreflightError) as exc:
                is_lost = isinstance(exc, NodeLostError) and exc.node_rank == 0
                has_lost_node_0 = is_lost or exc is self._error_without_node_0
                # Any other error is the decision of node 0.
                if not has_lost_node_0 or exc in self._earlier or not self._may_come_back(exc):
                    raise
                self._note_loss(exc)
            finally:
                rendezvous.close()
            inbox = rendezvous.inbox

    def _may_come_back(self, error: LaunchError | PreflightError) -> bool:
        """Return whether a node that has lost node 0 joins again: node 0, or its successor, replaces lost nodes."""
        retry = self._plan.config.retry
        # Not after a failure of its own ranks that is not retried: it would only happen there
        # again.
        return retry.attempts > 1 and "peer-lost" in retry.on and is_retried(error, retry)

    def _note_loss(self, error: LaunchError | PreflightError) -> None:
        """Prepare to join again after the loss of node 0."""
        self._earlier.append(error)
        self._round_plan = None
        self._back_by = Deadline.after(self._plan.config.rendezvous.join)
        logger.warning(
            "%s Joining again for %g s (rendezvous.join).",
            error.explanation.what,
            self._plan.config.rendezvous.join.total_seconds(),
        )
        self._parts.calls.change(error)

    def _lead(self, rendezvous: NodeRendezvous) -> dict[int, object]:
        """Run attempts as node 0, whose retry policy decides for all nodes."""
        lobby = rendezvous.lobby

        def announce(error: DDPSafeError) -> bool:
            self._earlier.append(error)
            rendezvous.meet_again()
            if self._round_channel is not None:
                self._round_channel.send(round_result_of(error, is_final=False))
            rendezvous.perform(lobby.end_round())
            return self._parts.calls.change(error)

        try:
            values = run_attempts(
                self._plan.config.retry,
                lambda number: self._attempt_as_node_0(rendezvous, number),
                change=announce,
                cancelled=self._parts.cancelled,
            )
        except _NoRound as exc:
            if isinstance(exc.error, DDPSafeError):
                exc.error.previous_attempts = tuple(self._earlier)
            # To all, not to those of the round alone: a node that is to join again would find the
            # job closed, and report that it was too late.
            error = _with_node_0(exc.error, rendezvous)
            rendezvous.channel.send(round_result_of(error, is_final=True))
            raise exc.error from exc.error.__cause__
        except BaseException as exc:
            error = as_error(
                exc, rendezvous.facts.named(0), "could not begin another attempt", phase="retry"
            )
            error = _with_node_0(error, rendezvous)
            rendezvous.channel.send(round_result_of(error, is_final=True))
            raise
        rendezvous.channel.send(RoundResult(is_final=True))
        note_event("ended", "the job has ended")
        return values

    def _attempt_as_node_0(self, rendezvous: NodeRendezvous, number: int) -> dict[int, object]:
        self.attempts = number
        with contextlib.ExitStack() as stack:
            # It takes over a signal that came too late for the inbox before: no wait would notice
            # it.
            inbox = stack.enter_context(open_inbox(rendezvous.inbox))
            rendezvous.inbox = inbox
            while True:
                ports, is_planned = stack.enter_context(contextlib.ExitStack()), False
                try:
                    nodes = self._gather(rendezvous)
                    plan = self._open_round(rendezvous, nodes, number, ports)
                    self._round_channel, is_planned = rendezvous.send_plan(plan), True
                    if self._examine_with_new_nodes(rendezvous, plan):
                        self._await_nodes(rendezvous, plan)
                        break
                except (Exception, Interrupted) as exc:
                    if is_planned and isinstance(exc, NodeLostError):
                        raise  # the retry policy decides whether there is another attempt
                    raise _NoRound(self._reason(rendezvous, exc)) from exc
                ports.close()
            rendezvous.begin(plan)
            return run_as_node_0(
                number,
                self._placed(plan, 0, rendezvous),
                round_plan=plan,
                channel=self._round_channel,
                inbox=inbox,
                checkpoint_folders=self._checkpoint_folders,
            )

    def _gather(self, rendezvous: NodeRendezvous) -> tuple[NodeFacts, ...]:
        """Wait for the nodes of a round; refuse new ones that do not see the others' checkpoints.

        Raises:
            DDPSafeError: Too few nodes joined, or they cannot run together.
        """
        lobby = rendezvous.lobby
        least = self._plan.config.rendezvous.min_nodes or self._plan.config.nnodes
        while True:
            launchers = rendezvous.join()
            assert launchers is not None  # noqa: S101 - only a replacement can find the job ended
            others = launchers[1:]
            # Each has connected before it joined, and may have left since.
            rendezvous.wait_until(
                lambda others=others: all(map(lobby.has_come_or_left, others)),  # type: ignore[misc]
                Deadline.after(self._plan.config.timeouts.start),
            )
            # torch's rendezvous may have completed with a host that has no power by now. One that is only
            # away joins again once it is back.
            there = lobby.nodes
            here = [each for each in others if each in there and not lobby.of(each).is_away]
            nodes = (rendezvous.facts, *(there[launcher] for launcher in here))
            if len(nodes) == len(launchers) >= least and self._are_fit(rendezvous, nodes):
                return nodes
            rendezvous.meet_again()
            rendezvous.perform(lobby.give_up_round(others))

    def _are_fit(self, rendezvous: NodeRendezvous, nodes: Sequence[NodeFacts]) -> bool:
        """Refuse a new node that reaches only the endpoint, or does not see the checkpoints of earlier attempts."""
        # Before any rank starts: the ranks would notice as well, but that would end all of them.
        lobby = rendezvous.lobby
        new = [node for node in nodes[1:] if lobby.is_new(node.launcher)]
        if not new:
            return True
        limit = 2 * limits.FILE_APPEARS

        def has_answered(launcher: str) -> bool:
            return lobby.of(launcher).seen is not None

        def has_left(launcher: str) -> bool:
            return launcher in lobby.out or lobby.of(launcher).is_away

        with (
            _file_in(self._checkpoint_folders) as (file, folders),
            listen_at(nodes[0].address, self._plan.config.rendezvous.ports) as listening,
        ):
            check = FolderCheck(file=file, folders=folders, port=listening.getsockname()[1])
            callers = [node.launcher for node in new]
            rendezvous.perform(lobby.check(check, callers))
            rendezvous.wait_until(
                lambda: any(map(has_left, callers)) or all(map(has_answered, callers)),
                Deadline.after(limit),
            )
        if any(map(has_left, callers)):
            return False  # one that is only away joins again once it is back
        for node in new:
            answer = lobby.of(node.launcher).seen
            # A node that does not answer is refused, too: a look at a dead mount does not return.
            if answer is not None and not (answer.missing or answer.unreached):
                continue
            name, who = node.hostname, node.named(nodes.index(node))
            if answer is None:
                what = (
                    f"{who} has not reported within {limit.total_seconds():g} s whether it sees the "
                    f"checkpoints of this job: {' and '.join(folders) or 'there are none yet'}."
                )
                cause = "a network file system does not answer there, or its launcher has ended or is stopped."
                fix = f"on {name}:  ls {' '.join(folders)}  ; then start the launcher there again."
            else:
                what = (
                    f"{' and '.join(answer.missing)} is missing on {who}, or is not the same storage as on "
                    f"node 0 ({nodes[0].hostname!r}): it holds the checkpoints of this job."
                )
                cause = "the folder is not shared between the nodes, or a mount is missing there."
                fix = f"mount it on {name}, and start the launcher there again."
            refusal = PreflightError(Explanation(what, cause=cause, fix=fix), kind="mount")
            if answer is not None and answer.unreached:
                refusal = _no_way(answer.unreached, name, nodes[0].address)
            rendezvous.perform(lobby.refuse(node.launcher, refusal))
            return False
        return True

    def _open_round(
        self,
        rendezvous: NodeRendezvous,
        nodes: tuple[NodeFacts, ...],
        number: int,
        stack: contextlib.ExitStack,
    ) -> RoundPlan:
        """Open what the ranks of a round need here; return its plan."""
        address = rendezvous.endpoint.address
        ports = self._plan.config.rendezvous.ports
        self._require_data_paths(rendezvous)
        # Some node may not have been examined yet.
        is_new = not {node.launcher for node in nodes} <= rendezvous.lobby.settled
        return RoundPlan(
            round_id=make_random_id(),
            attempt=number,
            # Settings are compared when a node joins. Here those of all nodes would go to every
            # node.
            nodes=tuple(replace(node, settings={}, setup={}) for node in nodes),
            store_port=stack.enter_context(rank_store(address, ports)),
            master_port=stack.enter_context(reserved_port(address, ports)),
            examines=is_new and self._plan.config.preflight == "full",
        )

    def _examine_with_new_nodes(self, rendezvous: NodeRendezvous, plan: RoundPlan) -> bool:
        """Examine the connections; if a finding names a new node, refuse it and return False.

        Raises:
            PreflightError: Something was found that no replacement would change: no node is new, or
                all are, or no finding names a new one.
        """
        lobby = rendezvous.lobby
        others = {node.launcher for node in plan.nodes[1:]}
        try:
            self._examine(rendezvous, plan, 0)
        except PreflightError as exc:
            # The others read the findings over the channel, from this node.
            rendezvous.wait_until(
                lambda: all(map(lobby.has_answered, others)),
                Deadline.after(limits.EXAMINATION_READ),
            )
            new = [number for number, node in enumerate(plan.nodes) if lobby.is_new(node.launcher)]
            if not new:
                raise
            counts = Counter(
                host
                for finding in getattr(exc.report, "findings", ())
                if finding.severity == "failed"
                for host in finding.hosts
            )
            unfit = max(new, key=lambda number: counts[plan.nodes[number].hostname])
            if not counts[plan.nodes[unfit].hostname]:
                raise  # the next new node would be refused as well, without end
            launcher = plan.nodes[unfit].launcher
            rendezvous.perform(lobby.refuse(launcher, exc))
            rendezvous.meet_again()
            rendezvous.perform(lobby.give_up_round(others - {launcher}))
            return False
        return True

    def _require_data_paths(self, rendezvous: NodeRendezvous) -> None:
        """Wait for the data paths, each up to its own limit; a signal ends the wait."""
        rendezvous.endpoint.call(lambda: require_data_paths(self._plan.config.data_paths), None)

    @staticmethod
    def _reason(rendezvous: NodeRendezvous, exc: BaseException) -> DDPSafeError | Interrupted:
        """Return the error that all nodes end with, because there is no round."""
        failure = "could not open the round"
        error = as_error(exc, rendezvous.facts.named(0), failure, phase="start")
        lobby = rendezvous.lobby
        rendezvous.look()  # a node may have said why since
        # A new node is refused, and the job continues without it: see `Lobby.settled`.
        for launcher, refusal in lobby.unable.items():
            if not isinstance(error, Interrupted) and not lobby.is_new(launcher):
                return _with_own_report(error_of(refusal.result), error)
        return error

    def _examine(self, rendezvous: NodeRendezvous, plan: RoundPlan, node: int) -> None:
        """Examine the connections between the nodes, together with all other nodes.

        Raises:
            PreflightError: Something was found that will break the launch; the same on all nodes.
        """
        if plan.examines:
            # Over the channel, whose port all nodes have reached: what is examined may be why a firewall lets
            # a node reach no other one.
            config, backend = self._plan.config, self._plan.backend
            self._parts.examine_nodes(
                rendezvous.keys_of(plan.round_id),
                config,
                nnodes=len(plan.nodes),
                node_rank=node,
                backend=backend,
            )

    def _await_nodes(self, rendezvous: NodeRendezvous, plan: RoundPlan) -> None:
        """Wait until all nodes have read the plan, and start their ranks.

        Raises:
            NodeLostError: A node has left, or a new one has reported why it cannot.
            DDPSafeError: A node of the last round has reported why it cannot.
        """
        lobby = rendezvous.lobby
        others = {facts.launcher: node for node, facts in enumerate(plan.nodes) if node}

        def find_missing() -> list[str]:
            return [launcher for launcher in others if not lobby.is_present(launcher)]

        def is_decided() -> bool:
            missing = find_missing()
            return not missing or any(map(lobby.has_answered, missing))

        rendezvous.wait_until(
            is_decided, Deadline.after(self._plan.config.timeouts.start + limits.READ)
        )
        missing = find_missing()
        if not missing:
            tell_who_joined(plan, 0)
            return
        unable = [launcher for launcher in missing if launcher in lobby.unable]
        gone = [launcher for launcher in missing if lobby.of(launcher).lost is not None]
        launcher = (unable + gone + missing)[0]
        refusal = lobby.unable.get(launcher)
        rendezvous.perform(lobby.refuse_unable(self._plan.config, plan))
        lost = lobby.of(launcher).lost
        explained: Explanation | None = None
        if refusal is not None:
            error = error_of(refusal.result)
            if isinstance(error, Interrupted):
                why = f"its launcher received {error.signum.name}"
            else:
                explained = error.explanation
                why = explained.what.rstrip(".")
            lost = Lost(why=why, how="goodbye", seen_ns=time.monotonic_ns())
        elif lost is None:
            why = "it joined, but has not begun the round"
            lost = Lost(why=why, how="ended", seen_ns=time.monotonic_ns())
        lost_error = lost_node_error(
            plan,
            others[launcher],
            lost,
            explained=explained,
            when=f"attempt {plan.attempt}",
            attempt=plan.attempt,
            attempts=self._plan.config.retry.attempts,
            run_dir=self._parts.directory.path,
        )
        if launcher in lobby.nodes:  # it is there, and does nothing
            rendezvous.perform(lobby.refuse(launcher, lost_error))
        raise lost_error

    def _follow(self, rendezvous: NodeRendezvous) -> dict[int, object]:
        """Run attempts as another node, for as long as node 0 begins rounds."""
        membership = rendezvous.membership
        while True:
            membership.leave_round()
            with open_inbox(rendezvous.inbox) as inbox:
                rendezvous.inbox = inbox
                try:
                    self._require_ready(rendezvous)
                    joined = rendezvous.join()
                except Interrupted as exc:
                    if self._earlier and membership.running is None:  # node 0 waits for this node
                        received = Interrupted(exc.signum, socket.gethostname())
                        self._tell_cannot_take_part(rendezvous, received, limits.READ)
                    raise
                except RendezvousTimeoutError as exc:
                    rendezvous.look()
                    lost = membership.lost
                    if lost is None or membership.result is not None:  # node 0 has said why
                        raise
                    raise self._lost_node_0(membership, lost) from exc
                if joined is None:
                    logger.warning(
                        "the job at %s has ended; no node of it had to be replaced",
                        rendezvous.endpoint,
                    )
                    note_event("ended", "the job has ended")
                    return {}
                try:
                    plan = self._read_plan(rendezvous)
                    node = [node.launcher for node in plan.nodes].index(rendezvous.facts.launcher)
                    self._examine(rendezvous, plan, node)
                    if self._round_plan is None:  # before any rank starts
                        what = self._find_no_way(rendezvous, plan.address, plan.store_port)
                        if what:
                            raise _no_way(what, socket.gethostname(), plan.address)  # noqa: TRY301
                    parts = self._placed(plan, node, rendezvous)
                    if plan.attempt <= self.attempts:  # node 0 was started again
                        self._parts.directory.set_attempts_aside()
                    self.attempts, self._round_plan = plan.attempt, plan
                except _JoinAgain:
                    continue
                except (Exception, Interrupted) as exc:
                    error = self._failed_to_begin(rendezvous, exc)
                    if error is None:
                        continue
                    if error is exc:
                        raise
                    raise error from exc
                rendezvous.channel.send(Ready(round_id=plan.round_id))
                tell_who_joined(plan, node)
                participant = Participant(
                    plan.attempt, parts, round_plan=plan, channel=rendezvous.channel, inbox=inbox
                )
                ended = participant.run()
            if not isinstance(ended, (DDPSafeError, Interrupted)):
                note_event("ended", "the job has ended")
                return ended
            if not participant.core.is_another_to_follow or isinstance(ended, Interrupted):
                if isinstance(ended, DDPSafeError):
                    ended.previous_attempts = tuple(self._earlier)
                if participant.core.is_alone and isinstance(ended, (LaunchError, PreflightError)):
                    self._error_without_node_0 = ended
                raise ended
            self._earlier.append(ended)
            logger.warning("attempt %d failed: %s", self.attempts, ended.explanation.what)
            try:
                self._parts.calls.change(ended)
            except BaseException as exc:
                here = rendezvous.facts.named(node)
                error = as_error(exc, here, "could not begin another attempt", phase="retry")
                self._tell_cannot_take_part(rendezvous, error, None)
                raise

    def _require_ready(self, rendezvous: NodeRendezvous) -> None:
        """Wait for the data paths; if they do not come, tell node 0 so."""
        try:
            self._require_data_paths(rendezvous)
        except DDPSafeError as exc:
            # The others wait for this node, unless it is new and was to replace another one.
            is_awaited = self._round_plan is not None
            self._tell_cannot_take_part(rendezvous, exc, None if is_awaited else limits.READ)
            raise

    def _failed_to_begin(
        self, rendezvous: NodeRendezvous, exc: BaseException
    ) -> DDPSafeError | Interrupted | None:
        """Report to node 0 why this node cannot begin; return the error that node 0 has all end with.

        ``None`` if node 0 has refused another node, and the others join again.

        Raises:
            Interrupted: They join again, but this launcher has received a signal.
        """
        membership, own = rendezvous.membership, rendezvous.facts
        launchers = [] if membership.plan is None else [n.launcher for n in membership.plan.nodes]
        node = launchers.index(own.launcher) if own.launcher in launchers else own.node_rank or 1
        error = as_error(exc, own.named(node), "could not begin the round", phase="start")
        if membership.lost is not None and membership.result is None:
            return self._lost_node_0(membership, membership.lost)
        if membership.result is not None or isinstance(error, RendezvousTimeoutError):
            return error  # node 0 says so, or does not respond
        plan = membership.plan
        result = self._tell_cannot_take_part(
            rendezvous,
            error,
            limits.READ + limits.EXAMINATION_READ,
            round_id="" if plan is None or isinstance(error, Interrupted) else plan.round_id,
        )
        if membership.joins_again:
            if rendezvous.inbox.received is not None and self._earlier:
                received = Interrupted(rendezvous.inbox.received, socket.gethostname())
                self._tell_cannot_take_part(rendezvous, received, limits.READ)
            rendezvous.require_no_signal()
            return None
        if result is None or result == round_result_of(error, is_final=True):
            return error
        return _with_own_report(error_of(result), error)

    @staticmethod
    def _tell_cannot_take_part(
        rendezvous: NodeRendezvous,
        error: DDPSafeError | Interrupted,
        limit: timedelta | None,
        round_id: str = "",
    ) -> RoundResult | None:
        """Tell node 0 why this node cannot take part, and wait for what it decides; return that."""
        rendezvous.report_cannot_take_part(error, round_id=round_id)
        membership = rendezvous.membership
        rendezvous.wait_until(
            lambda: membership.is_told, Deadline.after(limit), heeds_signals=limit is None
        )
        return membership.result

    def _lost_node_0(self, membership: Membership, lost: Lost) -> NodeLostError:
        """Return the error for the loss of node 0 before or between attempts."""
        return lost_node_error(
            membership.plan or self._round_plan or plan_of_node_0(membership.node_0),
            0,
            lost,
            when=f"after attempt {self.attempts}" if self.attempts else "before attempt 1",
            attempt=self.attempts,
            attempts=self._plan.config.retry.attempts,
            run_dir=self._parts.directory.path,
        )

    def _read_plan(self, rendezvous: NodeRendezvous) -> RoundPlan:
        # Node 0 gives up first and reports why: it knows which nodes are missing.
        # It may also wait for what new nodes see.
        longest = max(self._plan.config.timeouts.start, 3 * limits.FILE_APPEARS)
        deadline = Deadline.after(longest + limits.READ)
        membership = rendezvous.membership
        checking: BoundedCall[FoldersSeen] | None = None
        unreached = ""

        def has_plan() -> bool:
            nonlocal checking, unreached
            _require_round(rendezvous)
            if membership.check is not None:
                check, membership.check = membership.check, None
                # In a thread: a look at a dead mount does not return, and this node still has to
                # take a signal.
                checking = BoundedCall(partial(_look_at, check), name="ddpsafe-folders")
                # Meanwhile, so that both together take less than node 0 waits.
                address = membership.node_0.address
                unreached = self._find_no_way(rendezvous, address, check.port)
            if checking is not None and checking.wait(0):
                rendezvous.channel.send(replace(checking.result(), unreached=unreached))
                checking = None
            return membership.plan is not None

        rendezvous.wait_until(has_plan, deadline)
        if membership.plan is None:
            raise rendezvous.endpoint.lost(
                "node 0 has not published the plan of the round", deadline
            )
        return membership.plan

    def _find_no_way(self, rendezvous: NodeRendezvous, address: str, port: int) -> str:
        """Return why a port of node 0 cannot be reached, as a sentence; empty if it can."""

        def find_trouble(limit: timedelta) -> str:
            return rendezvous.endpoint.call(lambda: _unreached(address, port, limit), 2 * limit)

        def is_connected() -> bool:
            _require_round(rendezvous)
            return rendezvous.channel.carries()

        start = self._plan.config.timeouts.start
        what = find_trouble(min(limits.CONNECT, start))
        while what:
            # In an outage no port is reached, nor for seconds after it, when the kernel tries again.
            rendezvous.wait_until(is_connected, Deadline.after(start))
            what = find_trouble(limits.CONNECT_AGAIN)
            if what and is_connected():
                break
        return what

    def _placed(self, round_plan: RoundPlan, node: int, rendezvous: NodeRendezvous) -> LaunchParts:
        """Return the parts with this node's ranks in the round, and the store where all ranks meet."""
        place = NodesPlace(
            store=StorePlace(
                host=round_plan.address, port=round_plan.store_port, key=round_plan.round_id
            ),
            master_port=round_plan.master_port,
            interfaces=rendezvous.endpoint.interface_settings(),
        )
        worlds = tuple(world_of(round_plan, rank) for rank in round_plan.ranks_of(node))
        return self._parts.with_plan(replace(self._plan, worlds=worlds, place=place))


def _require_round(rendezvous: NodeRendezvous) -> None:
    """Look what node 0 has decided, and leave a wait if the round does not begin."""
    rendezvous.require_member()
    if rendezvous.membership.joins_again:
        raise _JoinAgain


def _is_no_launcher_yet(exc: BaseException) -> bool:
    """Return whether an endpoint that served the job before is not served, or not yet by its next launcher."""
    kinds = ("startup-network", "port", "peer-lost")
    is_startup = isinstance(exc, PreflightError) and exc.kind in kinds
    return isinstance(exc, RendezvousTimeoutError) or is_startup


def tell_who_joined(plan: RoundPlan, node: int) -> None:
    """Tell that an attempt begins, and with which nodes."""
    note_attempt(plan.attempt, world_size=plan.world_size, node_rank=node)
    hosts = listed([node.hostname for node in plan.nodes])
    logger.warning(
        "attempt %d begins with %d node%s, %d rank%s: %s",
        plan.attempt,
        len(plan.nodes),
        "s" * (len(plan.nodes) != 1),
        plan.world_size,
        "s" * (plan.world_size != 1),
        hosts,
        extra={"event": "attempt"},
    )


def _unreached(address: str, port: int, limit: timedelta) -> str:
    """Return why a port of node 0 cannot be reached, as a sentence; empty if it can."""
    try:
        socket.create_connection((address, port), limit.total_seconds()).close()
    except OSError as exc:
        return (
            f"{socket.gethostname()} reached no store of the ranks on node 0, at {address}:{port}: "
            f"{trouble_of(exc)[1]}."
        )
    return ""


def _no_way(what: str, host: str, address: str) -> PreflightError:
    cause = "a firewall allows only the port of the endpoint."
    fix = (
        f"open all TCP ports between the nodes, or those of rendezvous.ports; on {host}:  "
        f"nc -vz {address} 22"
    )
    return PreflightError(Explanation(what, cause=cause, fix=fix), kind="startup-network")


def _look_at(check: FolderCheck) -> FoldersSeen:
    """Return which folders a new node sees; hangs if a file system does."""
    deadline = Deadline.after(limits.FILE_APPEARS)
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
    return FoldersSeen(file=check.file, missing=tuple(missing))


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

    # In a thread: a call to a file system that does not answer does not return.
    writing = BoundedCall(write, name="ddpsafe-folders")

    def remove() -> None:
        writing.wait(math.inf)  # it may write the file after the limit
        for folder in folders:
            with contextlib.suppress(OSError):
                Path(folder, file).unlink()

    has_written = writing.wait(limits.FILE_APPEARS.total_seconds())
    if not has_written:
        logger.warning(
            "no file could be written within %.0f s to %s, so new nodes are not checked for access to the "
            "checkpoints there",
            limits.FILE_APPEARS.total_seconds(),
            " and ".join(sorted(folders)),
        )
    try:
        yield file, writing.result() if has_written else ()
    finally:
        BoundedCall(remove, name="ddpsafe-folders").wait(limits.FILE_APPEARS.total_seconds())


def _with_node_0(
    error: DDPSafeError | Interrupted, rendezvous: NodeRendezvous
) -> DDPSafeError | Interrupted:
    """Return an error for the other nodes, which do not know that this launcher received the signal."""
    if isinstance(error, Interrupted) and not error.where:
        where = rendezvous.inbox.where or rendezvous.facts.named(0)
        return Interrupted(error.signum, where, error.left)
    return error


def _with_own_report(
    received: DDPSafeError | Interrupted, own: DDPSafeError | Interrupted
) -> DDPSafeError | Interrupted:
    """Return the error of another node with this node's own report of the examination."""
    if isinstance(received, PreflightError) and isinstance(own, PreflightError):
        received.report = own.report
    return received


def settings_of(plan: LaunchPlan, command: Sequence[str] = ()) -> dict[str, str]:
    """Return what has to be the same on all nodes; their numbers of ranks may differ."""
    # With launch() and spawn() this is the user's own process, whose garbage would stay.
    with exempt_from_gc() if plan.style == "run" else contextlib.nullcontext():
        import torch

    config: dict[str, Any] = plan.config.model_dump(mode="json")
    names = ("nnodes", "timeouts", "retry", "seed", "preflight")
    # Two jobs may use one endpoint by accident, but hardly one id.
    script = {} if plan.config.rendezvous.id or not command else {SCRIPT: Path(command[0]).name}
    return {
        **script,
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
        **{name: variables[name] for name in variables if name.startswith(_COMPARED_VARIABLES)},
    }


def tell_node_0(config: LaunchConfig, error: DDPSafeError) -> None:
    """Tell node 0, if it can be reached, that this node does not join, and why."""
    if config.node_rank == 0 or config.rendezvous.parsed() is None:
        return
    what = f"{socket.gethostname()} does not join: {error.explanation.what}"
    preflight_error = PreflightError(replace(error.explanation, what=what), kind=error.kind)
    # Whatever goes wrong here, the error itself is what the user has to see.
    with contextlib.suppress(Exception, Interrupted), open_inbox() as inbox:
        brief = LaunchConfig.resolve(
            config, rendezvous={"join": limits.READ}, timeouts={"start": limits.READ}
        )
        rendezvous = NodeRendezvous(brief, inbox, may_serve=False)
        try:
            rendezvous.open(joins=False)
            rendezvous.report_cannot_take_part(preflight_error)
        finally:
            rendezvous.close()
