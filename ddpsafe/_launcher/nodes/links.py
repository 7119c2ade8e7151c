"""A broken link between two nodes, each of which reaches the others: neither of their ranks is at fault."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpsafe._errors import Explanation, NodeLostError
from ddpsafe._launcher.diagnosis.attempt_error import first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._launcher.diagnosis.attempt_error import EndedAttempt
    from ddpsafe._launcher.nodes.node_messages import RoundPlan
    from ddpsafe._wire.messages import RankOutcome

_GIVEN_UP: Final = re.compile(
    r"Connection timed out|No route to host|(?:Network|Host) is unreachable", re.IGNORECASE
)
"""What a kernel reports if the other host does not answer; the end of a process there reads differently."""

_RESET: Final = re.compile(r"Connection (?:reset|closed) by peer", re.IGNORECASE)
"""What gloo reports if a firewall rejects the connection, but also if the process there has ended."""


class BrokenLink(NamedTuple):
    """A pair of nodes between which a connection of the ranks gets no reply, or was reset.

    Attributes:
        first: A rank on the node with the lower rank.
        second: A rank on the other one.
        reporter: The one of them whose kernel gets no reply, or has seen the reset.
        also: Other pairs of nodes of which the same is known.
    """

    first: RankOutcome
    second: RankOutcome
    reporter: RankOutcome
    also: frozenset[frozenset[int]] = frozenset()


def find_broken_link(plan: RoundPlan, outcomes: Mapping[int, RankOutcome]) -> BrokenLink | None:
    """Return the nodes between which a connection gets no reply, although their launchers are connected.

    A kernel has given the connection up, or sends the same packet again and again.
    """
    silent: list[tuple[float, int, RankOutcome, int]] = []
    resets: list[tuple[float, int, RankOutcome, int]] = []
    all_wait = True
    reports: dict[tuple[int, int], RankOutcome] = {}
    for outcome in outcomes.values():
        # A link is the cause only if it explains everything: no rank was killed, has exited, or has
        # raised anything else.
        if outcome.status in ("killed", "exited") or outcome.native is not None:
            return None
        raised, without_reply = outcome.raised, _nodes_without_reply(plan, outcome)
        named_nodes = _named_nodes(plan, outcome)
        if raised is not None and not (named_nodes or raised.is_peer_error):
            return None
        if raised is None:
            waits = outcome.status == "stopped" and outcome.in_collective and outcome.before is None
            all_wait = all_wait and bool(waits)
        if _GIVEN_UP.search(_text_of(outcome)):
            without_reply = (*without_reply, *named_nodes)
        for peer in (*named_nodes, *without_reply):
            reports.setdefault((outcome.node_rank, peer), outcome)
        at_ns = math.inf if raised is None else raised.at_ns
        silent += ((at_ns, outcome.rank, outcome, peer) for peer in without_reply)
        if _RESET.search(_text_of(outcome)):
            resets += ((at_ns, outcome.rank, outcome, peer) for peer in named_nodes)
    # A reset is the network's only if all other ranks wait, so that none has closed its
    # connections.
    if not silent and all_wait:
        silent = resets
    if not silent:
        return None
    *_, reporter, peer = min(silent, key=lambda report: report[:2])
    # The other end need not have reported it: a rank there may have failed a moment earlier because
    # of a third one, as seen on one core.
    other = reports.get((peer, reporter.node_rank)) or outcomes[plan.ranks_of(peer).start]
    first, second = sorted((reporter, other), key=lambda outcome: outcome.node_rank)
    pairs = {frozenset((outcome.node_rank, peer)) for *_, outcome, peer in silent}
    also = frozenset(pairs - {frozenset((first.node_rank, second.node_rank))})
    return BrokenLink(first, second, reporter, also)


def link_error(ended: EndedAttempt, plan: RoundPlan, link: BrokenLink) -> NodeLostError:
    """Return the error that names both ends."""
    ends = (link.first, link.second)
    nodes = [end.node_rank for end in ends]
    addresses = [
        _address_of(plan, nodes[0], seen_by=link.second),
        _address_of(plan, nodes[1], seen_by=link.first),
    ]
    names = [plan.name_of(node, address) for node, address in zip(nodes, addresses, strict=True)]
    hosts = [plan.nodes[node].hostname for node in nodes]
    rank, text = link.reporter.rank, _text_of(link.reporter)
    why = f"what rank {rank} sends is not answered"
    if _GIVEN_UP.search(text):
        why = f"rank {rank} reports that the other host does not answer"
    elif _RESET.search(text):
        why = f"rank {rank} reports that it was reset or closed"
    what = (
        f"the connection between {names[0]} and {names[1]} is broken, {ended.when('peer-lost')}: {why}, "
        "although both launchers are connected to node 0."
    )
    details = [
        f"rank {end.rank} on {end.hostname}: {first_line(end)}" for end in ends if end.raised
    ]
    details += [
        f"also broken: {' and '.join(plan.name_of(node) for node in sorted(pair))}"
        for pair in sorted(link.also, key=sorted)
    ]
    return NodeLostError(
        Explanation(
            what,
            cause="the network between these two hosts: a switch, a firewall or a route.",
            fix=f"on {hosts[0]}:  ping {addresses[1]}",
            details=details,
        ),
        node_rank=nodes[1],
        hostname=hosts[1],
        ranks=tuple(plan.ranks_of(nodes[1])),
        why=why,
        **ended.facts(),
    )


def _nodes_without_reply(plan: RoundPlan, outcome: RankOutcome) -> tuple[int, ...]:
    """Return the other nodes whose kernels do not reply to a rank."""
    nodes = [plan.by_address.get(peer) for _, peer in outcome.unanswered]
    return tuple(node for node in nodes if node is not None and node != outcome.node_rank)


def _named_nodes(plan: RoundPlan, outcome: RankOutcome) -> list[int]:
    """Return the other nodes whose addresses an error of gloo has."""
    nodes = [plan.by_address[address] for address in _named_addresses(plan, outcome)]
    return [node for node in nodes if node != outcome.node_rank]


def _named_addresses(plan: RoundPlan, outcome: RankOutcome) -> list[str]:
    """Return the addresses of nodes that an error of gloo has: in brackets."""
    text = _text_of(outcome)
    if "/gloo/" not in text:
        return []  # a connection of the script itself
    return [address for address in plan.by_address if f"[{address}]" in text]


def _address_of(plan: RoundPlan, node: int, *, seen_by: RankOutcome) -> str:
    """Return the address by which a rank of another node was connected to it; the launcher's if unknown."""
    peers = [connection.peer for connection in seen_by.unanswered]
    candidates = (*peers, *_named_addresses(plan, seen_by), plan.nodes[node].address)
    return next(address for address in candidates if plan.by_address.get(address, node) == node)


def _text_of(outcome: RankOutcome) -> str:
    return "" if outcome.raised is None else outcome.raised.message
