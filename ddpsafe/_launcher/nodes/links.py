"""A broken link between two nodes, each of which reaches the others: neither of their ranks is at fault."""

from __future__ import annotations

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


class BrokenLink(NamedTuple):
    """A pair of nodes between which a connection of the ranks was given up.

    Attributes:
        first: A rank on the node with the lower rank.
        second: A rank on the other one.
        reporter: The one of them whose kernel has given up the connection.
    """

    first: RankOutcome
    second: RankOutcome
    reporter: RankOutcome


def find_broken_link(plan: RoundPlan, outcomes: Mapping[int, RankOutcome]) -> BrokenLink | None:
    """Return the nodes between which a kernel has given up a connection, although their launchers are connected.

    Only if that explains everything: no rank was killed, has exited, or has raised anything else.
    """
    given_up: list[tuple[int, int, RankOutcome, int]] = []
    reports: dict[tuple[int, int], RankOutcome] = {}
    for outcome in outcomes.values():
        if outcome.status in ("killed", "exited") or outcome.native is not None:
            return None
        if outcome.raised is None:
            continue
        peers = _named_nodes(plan, outcome)
        if not peers and not outcome.raised.is_peer_error:
            return None
        for peer in peers:
            reports.setdefault((outcome.node_rank, peer), outcome)
            if _GIVEN_UP.search(_text_of(outcome)):
                given_up.append((outcome.raised.at_ns, outcome.rank, outcome, peer))
    if not given_up:
        return None
    *_, reporter, peer = min(given_up, key=lambda each: each[:2])
    other = reports.get((peer, reporter.node_rank)) or outcomes[plan.ranks_of(peer).start]
    first, second = sorted((reporter, other), key=lambda each: each.node_rank)
    return BrokenLink(first, second, reporter)


def link_error(ended: EndedAttempt, plan: RoundPlan, link: BrokenLink) -> NodeLostError:
    """Return the error that names both ends."""
    ends = (link.first, link.second)
    nodes = [each.node_rank for each in ends]
    names = [plan.name_of(node, plan.nodes[node].address) for node in nodes]
    hosts = [plan.nodes[node].hostname for node in nodes]
    why = f"rank {link.reporter.rank} reports that the other host does not answer"
    what = (
        f"the connection between {names[0]} and {names[1]} is broken, {ended.when('peer-lost')}: {why}, "
        "although both launchers are connected to node 0."
    )
    details = [
        f"rank {each.rank} on {each.hostname}: {first_line(each)}" for each in ends if each.raised
    ]
    return NodeLostError(
        Explanation(
            what,
            cause="the network between these two hosts: a switch, a firewall or a route.",
            fix=f"on {hosts[0]}:  ping {plan.nodes[nodes[1]].address}",
            details=details,
        ),
        node_rank=nodes[1],
        hostname=hosts[1],
        ranks=list(plan.ranks_of(nodes[1])),
        why=why,
        attempt=ended.attempt,
        attempts=ended.retry.attempts,
        outcomes=ended.outcomes,
        run_dir=ended.run_dir,
    )


def _named_nodes(plan: RoundPlan, outcome: RankOutcome) -> list[int]:
    """Return the other nodes whose addresses an error of gloo has: in brackets."""
    text = _text_of(outcome)
    if "/gloo/" not in text:
        return []  # a connection of the script itself
    return [
        node
        for node, facts in enumerate(plan.nodes)
        if node != outcome.node_rank and f"[{facts.address}]" in text
    ]


def _text_of(outcome: RankOutcome) -> str:
    return "" if outcome.raised is None else outcome.raised.message
