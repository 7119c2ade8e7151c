"""Which directions between hosts are closed, why, and what opens them."""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._mesh.findings.fixes import (
    cloud_lines,
    describe_chain,
    find_openings,
    interface_line,
    library_variable,
    mtu_lines,
)
from ddpsafe.doctor._mesh.findings.observations import as_details, is_closed
from ddpsafe.doctor._mesh.probe import SMALLEST_MTU_BYTES
from ddpsafe.doctor._system.tcp import MAIN_TABLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from ddpsafe.doctor._mesh.findings.fixes import Opening
    from ddpsafe.doctor._mesh.findings.observations import Results, Way
    from ddpsafe.doctor._mesh.protocol import Dialled, Route


Shape = Literal["everywhere", "split", "around", "to", "from", "pair", "one-way"]

# How many directions must agree before a host is blamed. With only one, nothing shows which of its
# two hosts is at fault, so the direction is reported.
_LEAST_AGREEING: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Directions with one explanation.

    Attributes:
        shape: ``everywhere``: all directions; ``split``: all between two sides; ``around``: all to
            and from these hosts; ``to``, ``from``: all in that direction; ``pair``: both between
            two hosts; ``one-way``: one of them.
        nodes: The hosts that explain it; for ``split`` the smaller side; for ``pair`` and
            ``one-way`` the dialling host, then the listening one.
    """

    shape: Shape
    nodes: tuple[int, ...]
    ways: tuple[Way, ...]

    @property
    def ends(self) -> list[int]:
        """All hosts at either end of the directions."""
        return sorted(set(itertools.chain(*self.ways)))


def group_ways(blocked: Collection[Way], tried: Collection[Way]) -> list[Group]:
    """Explain directions that failed, all in the same way, with as few hosts as possible.

    `tried` are all directions that were tried, these included.
    """
    left = set(blocked)
    if not left:
        return []
    nodes = {node for way in tried for node in way}
    if left == set(tried):
        return [Group(shape="everywhere", nodes=tuple(sorted(nodes)), ways=tuple(sorted(left)))]
    opened = set(tried) - left
    groups = _find_split(left, opened, nodes)
    for group in groups:
        left.difference_update(group.ways)
    shapes: tuple[Shape, ...] = ("around", "to", "from")
    for shape in shapes:
        # Find hosts with every direction of this kind blocked.
        ends = {"around": (0, 1), "to": (1,)}.get(shape, (0,))
        open_at = {way[end] for way in opened for end in ends}
        counts = Counter(way[end] for way in left for end in ends)
        needed = _LEAST_AGREEING * len(ends)
        hosts = {node for node, count in counts.items() if count >= needed and node not in open_at}
        if hosts:
            ways = tuple(sorted(way for way in left if any(way[end] in hosts for end in ends)))
            groups.append(Group(shape=shape, nodes=tuple(sorted(hosts)), ways=ways))
            left.difference_update(ways)
    for source, target in sorted(left):
        both = (target, source) in left
        if not both:
            groups.append(Group(shape="one-way", nodes=(source, target), ways=((source, target),)))
        elif source < target:
            ways = ((source, target), (target, source))
            groups.append(Group(shape="pair", nodes=(source, target), ways=ways))
    return groups


def _find_split(blocked: set[Way], opened: set[Way], nodes: set[int]) -> list[Group]:
    """Find two sides, each of several connected hosts, with no open direction between them."""
    neighbours: dict[int, set[int]] = defaultdict(set)
    for source, target in opened:
        neighbours[source].add(target)
        neighbours[target].add(source)
    sides: list[set[int]] = []
    unseen = set(nodes)
    while unseen:
        side: set[int] = set()
        pending = [unseen.pop()]
        while pending:
            node = pending.pop()
            side.add(node)
            pending += neighbours[node] - side
        unseen -= side
        sides.append(side)
    sides.sort(key=len)
    if len(sides) != 2 or len(sides[0]) < _LEAST_AGREEING:  # noqa: PLR2004 - two sides are a split
        return []
    smaller = sides[0]
    across = [way for way in blocked if (way[0] in smaller) is not (way[1] in smaller)]
    return [Group(shape="split", nodes=tuple(sorted(smaller)), ways=tuple(sorted(across)))]


_CODES: Final = {"dropped": "DS-MESH-031", "refused": "DS-MESH-032", "no-route": "DS-MESH-033"}
_IMMEDIATE_S: Final = 1.0  # a firewall answers "prohibited" within milliseconds
_MOST_NAMED: Final = 8
# A busy host resends a few packets although none was lost; a bad cable loses more.
_LOSS_SHARE: Final = 0.05
_LEAST_RESENT: Final = 8


def check_connections(results: Results, explained: Mapping[Way, Dialled]) -> Iterator[Finding]:
    """Check the connections that were tried.

    Other findings explain the directions in `explained` already.
    """
    tried = {way: dialled for way, dialled in results.connections().items() if way not in explained}
    if not tried:
        return
    closed = {way for way, dialled in tried.items() if is_closed(dialled.result)}
    strange = {way for way, dialled in tried.items() if dialled.result == "wrong-peer"}
    large_lost = {way for way, dialled in tried.items() if dialled.result == "large-lost"}
    routed = {way for way in closed if _other_route(results, way) is not None}
    lossy = {way for way, dialled in tried.items() if _loses_packets(dialled)}
    smaller: dict[int, set[Way]] = defaultdict(set)
    for way, dialled in tried.items():
        if dialled.result == "open" and dialled.path_mtu_bytes < results.nodes[way[1]].mtu_bytes:
            smaller[dialled.path_mtu_bytes].add(way)
    # The path carries as much as the interface; if that is less, DS-MESH-042 has it.
    smaller.pop(0, None)
    for ways, describe in (
        (routed, _routed),
        (closed - routed, _closed),
        (strange, _wrong_peer),
        (large_lost, _large_lost),
        (lossy, _lossy),
        *((smaller[mtu_bytes], _smaller_path) for mtu_bytes in sorted(smaller)),
    ):
        for group in group_ways(ways, tried):
            yield describe(results, group, {way: tried[way] for way in group.ways})
    if not (closed or strange or large_lost or explained):
        yield _all_open(results, tried)


def _closed(results: Results, group: Group, outcomes: Mapping[Way, Dialled]) -> Finding:
    kinds = sorted({outcome.result for outcome in outcomes.values()})
    verb = " or ".join({"no-route": "unreachable"}.get(kind, kind) for kind in kinds)
    said = ", ".join(sorted({outcome.said for outcome in outcomes.values() if outcome.said}))
    if group.shape == "everywhere":
        said += f"; port {results.port} of the endpoint is open"
    only_endpoint = group.shape == "everywhere" and not _lacks_route(outcomes)
    code = "DS-MESH-036" if only_endpoint else _CODES[kinds[0]]
    if _lacks_route(outcomes):
        lines = []
        for source, target in sorted(outcomes)[:_MOST_NAMED]:
            address = results.nodes[target].announced.address
            lines.append(f"ip route get {address}    # on {results.name_of(source)}")
            lines.append(f"ip neigh show {address}    # on {results.name_of(source)}")
        what = (
            "Repair the cable, the switch port, the VLAN or the route, or choose another interface:"
        )
        fix = to_copy(what, *lines)
    elif openings := find_openings(results, group.ways):
        lines = [
            f"{rule}    # on {opening.host.hostname}"
            for opening in openings
            for rule in opening.rules()
        ]
        # If a host's filter is unknown, one between the hosts may drop the packets instead.
        if any(not opening.chains for opening in openings):
            lines += cloud_lines(results, group.ways)
        what = "Allow the packets of the job, as root, and run the doctor again:"
        fix = to_copy(what, *list(dict.fromkeys(lines))[: 3 * _MOST_NAMED])
    else:
        what = "Allow them in the firewall or security group between the hosts:"
        fix = to_copy(what, *cloud_lines(results, group.ways)[: 3 * _MOST_NAMED])
    return failed(
        code,
        f"{_where(results, group, 'open a connection to')}: {verb} ({said}).",
        cause=_closed_cause(results, group, outcomes),
        fix=fix,
        hosts=results.hostnames(group.nodes),
        shape=group.shape,
        directions=as_details(outcomes),
    )


def _lacks_route(outcomes: Mapping[Way, Dialled]) -> bool:
    """Return whether packets do not even get to where a firewall could reject them."""
    return any(
        outcome.reason == "no-arp" or outcome.error == "ENETUNREACH"
        for outcome in outcomes.values()
    )


def _where(results: Results, group: Group, doing: str) -> str:
    """Return a sentence on which directions are affected.

    `doing` is what fails, up to the preposition before the other host, e.g. ``"connect to"``.
    """
    verb, _, preposition = doing.rpartition(" ")
    names = _several(results, group.nodes)
    others = _several(results, tuple(node for node in group.ends if node not in group.nodes))
    first, last = results.label(group.nodes[0]), results.label(group.nodes[-1])
    sentences: dict[Shape, str] = {
        "everywhere": f"No host can {doing} any other: "
        f"all {len(group.ways)} directions between {names}",
        "split": f"{names} on one side and {others} on the other cannot {doing} each other",
        "around": f"No host can {doing} {names}, and {names} cannot {doing} any host",
        "to": f"No host can {verb} {preposition.upper()} {names}",
        "from": f"{names} cannot {doing} any host",
        "pair": f"{first} and {last} cannot {doing} each other",
        "one-way": f"{first} cannot {doing} {last}; the other direction works",
    }
    return sentences[group.shape]


def _several(results: Results, nodes: tuple[int, ...]) -> str:
    labels = [results.label(node) for node in nodes[:_MOST_NAMED]]
    more = len(nodes) - len(labels)
    return ", ".join(labels) + (f" and {more} more" if more else "")


def _closed_cause(results: Results, group: Group, outcomes: Mapping[Way, Dialled]) -> str:
    kinds = {outcome.result for outcome in outcomes.values()}
    if any(outcome.reason == "no-arp" for outcome in outcomes.values()):
        return (
            "the host does not even answer ARP: a cable, a switch port or a VLAN. "
            "A firewall does not cause that."
        )
    if any(outcome.error == "ENETUNREACH" for outcome in outcomes.values()):
        return "the dialling host has no route to that network."
    if kinds == {"no-route"} and all(
        outcome.took_s < _IMMEDIATE_S for outcome in outcomes.values()
    ):
        return (
            'a firewall that answers "prohibited" (firewalld does), on the listening host or on the '
            "way; the endpoint's port is reachable, so a route exists."
        )
    ports = "gloo and NCCL listen on ports that the system chooses"
    openings = find_openings(results, outcomes)
    outgoing = [opening for opening in openings if opening.hook == "output"]
    verb = "drops" if kinds == {"dropped"} else "rejects"
    if outgoing:
        named = ", ".join(f"{opening.host} ({_chains(opening)})" for opening in outgoing)
        return f"the packet filter of {named} {verb} outgoing packets that no rule allows; {ports}."
    if group.shape == "everywhere":
        return f"only port {results.port} is open between the hosts; {ports}."
    if openings and all(opening.chains for opening in openings):
        named = ", ".join(f"{opening.host} ({_chains(opening)})" for opening in openings)
        return f"the packet filter of {named} {verb} what no rule allows; {ports}."
    if not openings:
        return (
            f"neither host filters packets itself: a firewall or security group between them {verb} "
            f"what no rule allows; {ports}."
        )
    return f"a firewall or security group, on the listening host or on the way, {verb} what no rule allows; {ports}."


def _chains(opening: Opening) -> str:
    return ", ".join(describe_chain(chain) for chain in opening.chains) or "unknown chains"


def _other_route(results: Results, way: Way) -> tuple[int, Route] | None:
    """Return the node and route by which a direction's packets, or the replies, leave elsewhere."""
    source, target = way
    for here, there in ((source, target), (target, source)):
        for route in results.reports[here].routes:
            if route.target == there:
                return here, route
    return None


def _routed(results: Results, group: Group, outcomes: Mapping[Way, Dialled]) -> Finding:
    routes = dict.fromkeys(
        leaving for way in sorted(outcomes) if (leaving := _other_route(results, way))
    )
    facts, lines = [], []
    for here, route in routes:
        node, other = results.nodes[here], results.nodes[route.target]
        address, on = other.announced.address, f"    # on {results.name_of(here)}"
        if not route.interface:
            lines.append(f"ip route show to match {address}{on}")
            facts.append(f"a route of {node} rejects packets to {other} ({address})")
            lines.append(
                f"ip route del {route.prefix}{on}" if route.prefix else f"ip rule show{on}"
            )
            continue
        lines.append(f"ip route get {address} from {node.announced.address}{on}")
        facts.append(
            f"packets from {node} to {other} ({address}) leave by {route.interface}, but it announces "
            f"{node.announced.address} on {node.announced.interface}"
        )
        if route.table != MAIN_TABLE:
            lines.append(f"ip rule del table {route.table}{on}")
        elif route.prefix != node.network:  # not the network's own route
            lines.append(f"ip route del {route.prefix} dev {shlex.quote(route.interface)}{on}")
        else:
            variable = library_variable(results.backend)
            lines.append(interface_line(node, variable, route.interface) + on)
    return failed(
        "DS-MESH-038",
        f"{_where(results, group, 'open a connection to')}: {'; '.join(facts)}.",
        cause="a route or a rule was added by hand, or two interfaces are in the same network; the other "
        "host drops packets from an interface that it would not reply on (rp_filter), or never receives "
        "them.",
        fix=to_copy("Remove the route or rule, or announce the interface that it uses:", *lines),
        hosts=results.hostnames({here for here, _ in routes}),
        routes=[{"source": here, **route._asdict()} for here, route in routes],
        directions=as_details(outcomes),
    )


def _loses_packets(outcome: Dialled) -> bool:
    """Return whether a direction loses packets although its connections stay open."""
    share = _LOSS_SHARE * (outcome.packets + outcome.resent)
    return outcome.result == "open" and outcome.resent >= max(_LEAST_RESENT, share)


def _lossy(results: Results, group: Group, outcomes: Mapping[Way, Dialled]) -> Finding:
    sent = sum(outcome.packets for outcome in outcomes.values())
    resent = sum(outcome.resent for outcome in outcomes.values())
    return warning(
        "DS-MESH-037",
        f"{_where(results, group, 'send without loss to')}: {resent} of {sent + resent} packets "
        f"({100 * resent / (sent + resent):.0f} %) were retransmitted.",
        cause="a bad cable or port, an overloaded link, or a limit on packets per second; a job "
        "runs many times slower, and connections sometimes break.",
        fix=to_copy(
            "Check the interface for errors and drops, then the switch:",
            *(
                f"ip -s link show dev {shlex.quote(results.nodes[node].announced.interface)}"
                f"    # on {results.name_of(node)}"
                for node in group.ends[:_MOST_NAMED]
            ),
        ),
        hosts=results.hostnames(group.nodes),
        sent=sent,
        resent=resent,
        directions=[list(way) for way in group.ways],
    )


def _smaller_path(results: Results, group: Group, outcomes: Mapping[Way, Dialled]) -> Finding:
    passing = outcomes[group.ways[0]].path_mtu_bytes
    return warning(
        "DS-MESH-039",
        f"{_where(results, group, f'send packets of more than {passing} bytes to')}, though "
        f"their interfaces send up to {max(results.nodes[end].mtu_bytes for end in group.ends)}.",
        cause="a tunnel, a VPN or a router on the way carries less, and says so by ICMP; TCP copes, "
        "other protocols (RDMA over Ethernet) may not, and a firewall that drops ICMP makes large "
        "packets vanish.",
        fix=to_copy(
            "Lower the MTU on the hosts, as root, or raise that of the path:",
            *mtu_lines(results, group.ends[: 2 * _MOST_NAMED], passing),
        ),
        hosts=results.hostnames(group.nodes),
        mtu_bytes=passing,
        directions=[list(way) for way in group.ways],
    )


def _wrong_peer(results: Results, group: Group, outcomes: Mapping[Way, Dialled]) -> Finding:
    said = ", ".join(sorted({outcome.said for outcome in outcomes.values()}))
    listeners = {target for _, target in group.ways}
    addresses = sorted({results.nodes[node].announced.address for node in listeners})
    return failed(
        "DS-MESH-034",
        f"{_where(results, group, 'reach the doctor on')}: another program accepts the connection ({said}).",
        cause="a transparent proxy or a service mesh between the hosts accepts every connection, or "
        "two hosts have the same address.",
        fix=to_copy(
            "Exclude the job's ports from the proxy (Istio: the annotations below on every pod), or "
            "check for a second host with the address:",
            f'traffic.sidecar.istio.io/excludeInboundPorts: "{_range(results, listeners)}"',
            f'traffic.sidecar.istio.io/excludeOutboundPorts: "{_range(results, listeners)}"',
            *(
                f"arping -D -c 3 {address}    # on another host"
                for address in addresses[:_MOST_NAMED]
            ),
        ),
        hosts=results.hostnames(group.nodes),
        shape=group.shape,
        directions=as_details(outcomes),
    )


def _range(results: Results, listeners: set[int]) -> str:
    first = min(results.nodes[node].port_range[0] for node in listeners)
    last = max(results.nodes[node].port_range[1] for node in listeners)
    return f"{first}-{last}"


def _large_lost(results: Results, group: Group, outcomes: Mapping[Way, Dialled]) -> Finding:
    mtus = {results.nodes[node].mtu_bytes for node in group.ends}
    passing = min(outcome.passing_mtu_bytes for outcome in outcomes.values())
    said = max(outcome.said for outcome in outcomes.values())
    has_ipv6 = any(":" in results.nodes[node].announced.address for node in group.ends)
    larger = [
        node for node in group.ends[: 2 * _MOST_NAMED] if results.nodes[node].mtu_bytes > passing
    ]
    proof = (
        f"in packets of {passing} bytes it passes"
        if passing
        else f"not even in packets of {SMALLEST_MTU_BYTES[6 if has_ipv6 else 4]} bytes"
    )
    return failed(
        "DS-MESH-035",
        f"{_where(results, group, 'send more than a packet to')}: connections open and small messages "
        f"pass, but 64 KiB does not ({said}); {proof}.",
        cause=f"the interfaces send packets of up to {max(mtus)} bytes, something on the way carries less, "
        "and the ICMP message about it is lost: an MTU black hole (jumbo frames, a tunnel, a VPN)."
        if passing
        else "a firewall or a proxy ends connections after their first packets; the size is not the cause.",
        fix=to_copy(
            "Lower the MTU on both ends, as root, or repair the switch or tunnel between them:",
            *mtu_lines(results, larger, passing),
        )
        if passing
        else "Find what inspects the connections between these hosts, and exclude the job's ports.",
        hosts=results.hostnames(group.nodes),
        shape=group.shape,
        mtu_bytes=passing,
        directions=as_details(outcomes),
    )


def _all_open(results: Results, tried: Mapping[Way, Dialled]) -> Finding:
    latencies = [outcome.latency_s for outcome in tried.values() if outcome.latency_s is not None]
    rates = [
        outcome.bandwidth_bytes_per_s
        for outcome in tried.values()
        if outcome.bandwidth_bytes_per_s is not None
    ]
    details: dict[str, object] = {"directions": len(tried)}
    numbers = ""
    if latencies and rates:
        usual_rate = statistics.median(rates)
        details |= {"slowest_round_trip_s": max(latencies), "usual_bytes_per_s": usual_rate}
        numbers = (
            f"; round trips take {min(latencies) * 1e3:.2f} to {max(latencies) * 1e3:.2f} ms, "
            f"short bursts reach about {usual_rate / 1e6:.0f} MB/s"
        )
    return ok(
        "DS-MESH-030",
        f"All {len(tried)} directions between {len(results.reports)} hosts are open{numbers}.",
        **details,
    )
