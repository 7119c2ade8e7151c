"""The attempts of this node: joined at the rendezvous, run as node 0 or as another node, ended."""

from __future__ import annotations

import contextlib
import platform
import socket
import time
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._clock import Deadline
from ddpsafe._config import require_data_paths
from ddpsafe._errors import (
    DDPSafeError,
    Explanation,
    PreflightError,
)
from ddpsafe._host import interface_variables
from ddpsafe._launcher.nodes.channel import Channel, Lost, RefusedError
from ddpsafe._launcher.nodes.coordinator import coordinate, lost_node_error, world_of
from ddpsafe._launcher.nodes.messages import (
    Hello,
    NodeFacts,
    RoundPlan,
    Verdict,
    error_of,
    verdict_of,
)
from ddpsafe._launcher.nodes.participant import Participant
from ddpsafe._launcher.nodes.rendezvous import (
    Rendezvous,
    Seat,
    make_round_id,
    rank_store,
    require_same_settings,
)
from ddpsafe._launcher.plan import NodesPlace
from ddpsafe._launcher.processes.store import reserved_port
from ddpsafe._launcher.retry import run_attempts
from ddpsafe._launcher.watch.signals import Interrupted, open_inbox
from ddpsafe._logging import get_logger
from ddpsafe._wire.spec import StorePlace

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Event

    from ddpsafe._launcher.plan import Calls, LaunchPlan
    from ddpsafe._launcher.processes.start import RunRank
    from ddpsafe._launcher.run_directory import RunDirectory
    from ddpsafe._launcher.watch.signals import SignalInbox

logger = get_logger(__name__)

_REFUSAL_READ: Final = timedelta(seconds=3)
_EXAMINATION_READ: Final = timedelta(seconds=10)
_PLAN, _REFUSAL, _EXAMINED = "ddpsafe/plan", "ddpsafe/refusal", "ddpsafe/examined"


class _NoRound(Exception):  # noqa: N818 - it carries the error
    """There can be no round of the nodes, and another attempt would change nothing."""

    def __init__(self, error: DDPSafeError) -> None:
        super().__init__(str(error))
        self.error = error


class NodeLaunch:
    """The launch of a job of several nodes, on this one.

    Args:
        plan: What to start here; its ranks are counted again in each round.
        calls: What the ranks run.
        run_rank: What their processes run.
        directory: Where the logs go.
        cancelled: Set when the launcher is to stop.
        require_ready_nodes: Examines the connections between the nodes, see `_preflight`.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        calls: Calls,
        *,
        run_rank: RunRank,
        directory: RunDirectory,
        cancelled: Event,
        require_ready_nodes: Callable[..., None],
    ) -> None:
        """Keep what is given."""
        self._require_ready_nodes = require_ready_nodes
        self._examined: set[tuple[str, int]] = set()
        self._plan, self._calls, self._run_rank = plan, calls, run_rank
        self._directory, self._cancelled = directory, cancelled
        self._channel: Channel | None = None
        self.attempts = 0

    def run(self) -> dict[int, object]:
        """Run attempts until one ends well or there is no other; return the values of own ranks.

        Raises:
            DDPSafeError: As `run_attempt` raises it, the same on all nodes.
            Interrupted: A signal to the launcher of some node ended the attempt.
        """
        with open_inbox() as inbox:
            rendezvous = Rendezvous(
                self._plan.config, inbox, settings=settings_of(self._plan), nproc=self._plan.nproc
            )
            try:
                rendezvous.open()
            except BaseException:
                rendezvous.close()
                raise
        try:
            if rendezvous.serves:
                return self._lead(rendezvous)
            return self._follow(rendezvous)
        finally:
            if self._channel is not None:
                self._channel.close()
            rendezvous.close()

    def _lead(self, rendezvous: Rendezvous) -> dict[int, object]:
        """Be node 0, whose retry policy decides for all."""
        policy = self._plan.config.retry
        earlier: list[DDPSafeError] = []

        def announce(error: DDPSafeError) -> bool:
            earlier.append(error)
            self._tell(verdict_of(error, is_final=False))
            return self._calls.change(error)

        try:
            return run_attempts(
                policy,
                lambda number: self._attempt_as_node_0(rendezvous, number),
                change=announce,
                cancelled=self._cancelled,
            )
        except _NoRound as exc:
            exc.error.previous_attempts = tuple(earlier)
            raise exc.error from exc.error.__cause__
        except (DDPSafeError, Interrupted) as exc:
            self._tell(verdict_of(exc, is_final=True))
            raise

    def _tell(self, verdict: Verdict) -> None:
        if self._channel is not None:
            self._channel.send(verdict)

    def _attempt_as_node_0(self, rendezvous: Rendezvous, number: int) -> dict[int, object]:
        self.attempts = number
        self._close_channel()
        with contextlib.ExitStack() as stack:
            inbox = stack.enter_context(open_inbox())
            rendezvous.inbox = inbox
            try:
                round_plan, channel = self._open_round(rendezvous, number, stack)
            except DDPSafeError as exc:
                raise _NoRound(exc) from exc
            try:
                self._await_nodes(round_plan, inbox)
                return coordinate(
                    number,
                    plan=self._placed(round_plan, 0, rendezvous),
                    round_plan=round_plan,
                    channel=channel,
                    call=self._calls.current,
                    run_rank=self._run_rank,
                    directory=self._directory,
                    inbox=inbox,
                )
            finally:
                if inbox.received is not None:
                    self._cancelled.set()
                for node in {*range(1, len(round_plan.nodes))} - channel.connected():
                    rendezvous.forget(round_plan.nodes[node])

    def _open_round(
        self, rendezvous: Rendezvous, number: int, stack: contextlib.ExitStack
    ) -> tuple[RoundPlan, Channel]:
        """Wait for the nodes, tell them who starts what, and listen for them.

        Raises:
            DDPSafeError: There can be no round. The others know, and do not come again.
        """
        seat = rendezvous.join()
        assert seat is not None, "who serves the endpoint replaces no other"  # noqa: S101
        if seat.node_rank != 0:
            what = (
                f"{socket.gethostname()} serves the endpoint and came out as node {seat.node_rank} of "
                f"{seat.nnodes}."
            )
            cause = (
                "another node has node_rank 0, or the clocks of the nodes differ by many seconds."
            )
            fix = "give node rank 0 to the host of the endpoint; compare `date` on all nodes."
            raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="startup-network")
        deadline = Deadline.after(self._plan.config.timeouts.rendezvous)
        address = rendezvous.address
        try:
            nodes = rendezvous.introduce(seat, deadline)
            require_data_paths(self._plan.config.data_paths)
            require_same_settings(nodes)
            round_id = make_round_id()
            channel = Channel.listen(
                address, secret=rendezvous.secret, round_id=round_id, nnodes=len(nodes)
            )
            self._channel = channel  # closed with the next round or the run, whatever comes now
            round_plan = RoundPlan(
                round_id=round_id,
                attempt=number,
                nodes=tuple(nodes),
                store_port=stack.enter_context(rank_store(address)),
                channel_port=channel.port,
                master_port=stack.enter_context(reserved_port(address)),
                examines=self._has_to_examine(nodes),
            )
        except DDPSafeError as exc:
            seat.board.put(_REFUSAL, verdict_of(exc, is_final=True))
            # The store ends with this node: the others have to read it before.
            staying = Deadline.after(_REFUSAL_READ)
            for node in range(1, seat.nnodes):
                seat.board.wait_for(f"{_REFUSAL}/{node}", Verdict, staying)
            raise
        seat.board.put(_PLAN, round_plan)
        self._examine(rendezvous, seat, round_plan)
        return round_plan, channel

    def _has_to_examine(self, nodes: list[NodeFacts]) -> bool:
        """Tell whether a node is new, and was not examined together with the others."""
        known = {(node.hostname, node.pid) for node in nodes}
        is_new = not known <= self._examined
        self._examined = known
        return is_new and self._plan.config.preflight == "full"

    def _examine(self, rendezvous: Rendezvous, seat: Seat, plan: RoundPlan) -> None:
        """Examine the connections between the nodes, all of them at once.

        Raises:
            PreflightError: Something was found that will break the launch; the same on all nodes.
        """
        if not plan.examines:
            return
        try:
            self._require_ready_nodes(
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

    def _await_nodes(self, plan: RoundPlan, inbox: SignalInbox) -> None:
        """Wait until all nodes have opened their control channel."""
        assert self._channel is not None  # noqa: S101 - opened a line before
        missing: set[int] = set()
        for pause_s in Deadline.after(self._plan.config.timeouts.rendezvous).pauses_s():
            missing = set(range(1, len(plan.nodes))) - self._channel.connected()
            if not missing:
                return
            if inbox.received is not None:
                raise Interrupted(inbox.received)
            time.sleep(pause_s)
        node = min(missing)
        lost = Lost(
            why=f"it joined, and opened no control channel to {plan.address}:{plan.channel_port}",
            is_silent=False,
            seen_ns=time.monotonic_ns(),
        )
        raise lost_node_error(
            plan,
            node,
            lost,
            when=f"attempt {plan.attempt}",
            attempt=plan.attempt,
            attempts=self._plan.config.retry.attempts,
            run_dir=self._directory.path,
        )

    def _follow(self, rendezvous: Rendezvous) -> dict[int, object]:
        """Be another node, round by round, as long as node 0 says so."""
        earlier: list[DDPSafeError] = []
        while True:
            self._close_channel()
            with open_inbox() as inbox:
                rendezvous.inbox = inbox
                require_data_paths(self._plan.config.data_paths)
                seat = rendezvous.join()
                if seat is None:
                    return {}
                round_plan = self._read_plan(rendezvous, seat)
                self._examine(rendezvous, seat, round_plan)
                self.attempts = round_plan.attempt
                self._channel = self._dial(rendezvous, seat, round_plan)
                obeyed = Participant(
                    round_plan.attempt,
                    plan=self._placed(round_plan, seat.node_rank, rendezvous),
                    round_plan=round_plan,
                    channel=self._channel,
                    inbox=inbox,
                    directory=self._directory,
                ).run(self._calls.current, self._run_rank)
            if obeyed.error is None:
                assert obeyed.values is not None  # noqa: S101 - without an error there are values
                return obeyed.values
            if not obeyed.is_again or isinstance(obeyed.error, Interrupted):
                if isinstance(obeyed.error, DDPSafeError):
                    obeyed.error.previous_attempts = tuple(earlier)
                raise obeyed.error
            earlier.append(obeyed.error)
            logger.warning("attempt %d failed: %s", self.attempts, obeyed.error.explanation.what)
            self._calls.change(obeyed.error)

    def _read_plan(self, rendezvous: Rendezvous, seat: Seat) -> RoundPlan:
        # Node 0 gives up first, and says why: it knows who is missing.
        deadline = Deadline.after(self._plan.config.timeouts.rendezvous + _REFUSAL_READ)
        rendezvous.introduce(seat, deadline)
        for pause_s in deadline.pauses_s():
            if (plan := seat.board.find(_PLAN, RoundPlan)) is not None:
                return plan
            if (refusal := seat.board.find(_REFUSAL, Verdict)) is not None:
                seat.board.put(f"{_REFUSAL}/{seat.node_rank}", refusal)
                raise error_of(refusal)
            rendezvous.require_no_signal()
            time.sleep(pause_s)
        raise rendezvous.lost("node 0 has not said who starts what", deadline)

    def _dial(self, rendezvous: Rendezvous, seat: Seat, plan: RoundPlan) -> Channel:
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

    def _placed(self, round_plan: RoundPlan, node: int, rendezvous: Rendezvous) -> LaunchPlan:
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


def settings_of(plan: LaunchPlan) -> dict[str, str]:
    """Return what has to be the same on all nodes; their numbers of ranks may differ."""
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
