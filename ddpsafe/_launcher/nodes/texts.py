"""What is said of nodes: errors that name them, warnings and events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpsafe._errors import Explanation, NodeLostError
from ddpsafe._job.channel import Away, Back, EndOfConnection, Lost
from ddpsafe._launcher.attempt import CAUSE_OF_STOP
from ddpsafe._launcher.watch.console import note_event
from ddpsafe._launcher.watch.signals import NONE_LEFT
from ddpsafe._logging import get_logger
from ddpsafe._text import listed, ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from datetime import timedelta
    from signal import Signals

    from ddpsafe._launcher.diagnosis.attempt_error import EndedAttempt
    from ddpsafe._launcher.nodes.node_messages import RoundPlan

logger = get_logger(__name__)

OTHERS_CONTINUE: Final = "The other nodes continue (rendezvous.signal_scope)."


def lost_nodes_error(ended: EndedAttempt, plan: RoundPlan, lost: dict[int, Lost]) -> NodeLostError:
    """Return the error for lost nodes, named after the first one."""
    node, first = min(lost.items(), key=lambda item: item[1].seen_ns)
    others = [other for other in lost if other != node]
    details = [
        f"{plan.name_of(other, ranks_text(plan.ranks_of(other)))} was lost, too: {lost[other].why}"
        for other in others
    ]
    if others and len(lost) == len(plan.nodes) - 1:
        details.append("All other nodes at once: the network of this one is the likely cause.")
    return lost_node_error(
        plan, node, first, when=ended.when("peer-lost"), details=details, **ended.facts()
    )


_LOSSES: Final[dict[EndOfConnection, tuple[str, str]]] = {
    "silence": (
        "its host has lost power or network, or its kernel hangs.",
        "ping {host}; check what the scheduler reports about the node.",
    ),
    "reset": (
        "its launcher has ended, its host has started again, or a firewall rejects the connection.",
        "check uptime, dmesg and the launcher's log on {host}.",
    ),
    "garbled": (
        "another program, on that host or on the way, has taken over the connection, or a bug in ddpsafe.",
        "check the launcher's log on {host}, and what stands between the nodes (a proxy, a VPN).",
    ),
    "ended": (
        "its launcher has ended without a word: it was killed or has crashed, or its job step was ended.",
        "check dmesg (out of memory?) and the launcher's log on {host}; its ranks ended with it.",
    ),
    "goodbye": ("its launcher has left the job.", "see what it wrote on {host} before it ended."),
}
"""The likely cause and the fix, by how the last connection to a node has ended."""

_OUTAGES: Final[dict[EndOfConnection, tuple[str, str]]] = {
    "silence": ("its host or the network does not answer", " (timeouts.node_loss)"),
    "reset": ("its launcher has ended, or a firewall rejects the connection", ""),
}
"""What may have broken a connection to a node that may come back, and what limits the wait for it."""


def outage_text(name: str, event: Away | Back) -> str:
    """Return the warning that a node cannot be reached, or can be again; its ranks run meanwhile."""
    if isinstance(event, Back):
        return f"{name} can be reached again after {event.away_s:.0f} s, and nothing is missing"
    why, limit = _OUTAGES[event.how]
    lost = f"It counts as lost in {event.limit_s:.0f} s{limit}"
    return f"{name} cannot be reached ({event.why}): {why}; its ranks may still run. {lost}"


def tell_of_connection(plan: RoundPlan, node: int, event: Lost | Away | Back) -> None:
    """Tell what has become of the connection to a node; what follows from a loss comes later."""
    name = plan.name_of(node)
    if isinstance(event, Lost):
        note_event("lost", f"{name} was lost: {event.why}", of_node=node)
        return
    facts = {"event": "back" if isinstance(event, Back) else "away", "of_node": node}
    logger.warning("%s", outage_text(name, event), extra=facts)


def lost_node_error(
    plan: RoundPlan,
    node: int,
    lost: Lost,
    *,
    when: str,
    explained: Explanation | None = None,
    details: Iterable[str] = (),
    **facts: object,
) -> NodeLostError:
    """Return the error for a lost node.

    `when` is in which attempt, and after how long; `explained` is what the node itself has reported, if it
    could; `facts` are those of `LaunchError`.
    """
    who, ranks = plan.nodes[node], plan.ranks_of(node)
    why = lost.why
    if explained is not None:
        cause, fix = explained.cause, explained.fix
    else:
        cause, fix = (text.format(host=who.hostname) for text in _LOSSES[lost.how])
    if lost.is_silent:
        why = f"nothing has arrived from {who.address} for {lost.silent_s:.1f} s ({lost.why})"
    place = [f"{ranks_text(ranks)} of world_size {plan.world_size}"] if ranks else []
    name = plan.name_of(node, *place)
    what = f"{name} was lost, {when}: {why}."
    return NodeLostError(
        Explanation(what, cause=cause, fix=fix, details=tuple(details)),
        node_rank=node,
        hostname=who.hostname,
        ranks=tuple(ranks),
        why=why,
        **facts,  # type: ignore[arg-type]  # those of LaunchError
    )


def left_error(
    ended: EndedAttempt, plan: RoundPlan, leaving: Mapping[int, Signals], *, has_saved: bool
) -> NodeLostError:
    """Return the error of an attempt that ended because nodes leave the job.

    `leaving` has the signal to the launcher of each of those nodes. If `has_saved`, the ranks have stopped as
    they were asked to.
    """
    nodes = sorted(leaving)
    names = [plan.name_of(node, ranks_text(plan.ranks_of(node))) for node in nodes]
    signals = listed(sorted({received.name for received in leaving.values()}))
    leave, whose = ("leaves", "its launcher") if len(names) == 1 else ("leave", "their launchers")
    why = f"{whose} received {signals}"
    saved = ", and all ranks have stopped at one step" if has_saved else ""
    return NodeLostError(
        Explanation(
            f"{listed(names)} {leave} the job, {ended.when('peer-lost')}: {why}{saved}.",
            cause=CAUSE_OF_STOP,
            fix="nothing: the other nodes start another attempt, with a replacement if one joins. Set "
            'rendezvous.signal_scope to "job" to stop all nodes instead.',
            logs=ended.logs,
        ),
        node_rank=nodes[0],
        hostname=plan.nodes[nodes[0]].hostname,
        ranks=tuple(plan.ranks_of(nodes[0])),
        why=why,
        **ended.facts(),
    )


def who_is_left(plan: RoundPlan, unreachable: Collection[int], node_loss: timedelta) -> str:
    """Return which ranks are left running after a stop, as a sentence.

    The nodes `unreachable` have not reported that their ranks have ended, and no longer can. The launchers
    there end them after `node_loss`.
    """
    if not unreachable:
        return NONE_LEFT
    names = listed([plan.name_of(node) for node in sorted(unreachable)])
    return (
        f"{NONE_LEFT}, but those of {names}, which cannot be reached, may be for up to "
        f"{node_loss.total_seconds():g} s (timeouts.node_loss)"
    )
