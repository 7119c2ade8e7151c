"""Findings on the addresses that hosts would announce, before they are dialled."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

from ddpsafe._advice import ADVICE
from ddpsafe.doctor._findings import Finding, failed, to_copy, warning
from ddpsafe.doctor._mesh.findings.fixes import (
    announced_lines,
    common_networks,
    endpoint_lines,
    interface_in,
    interface_line,
    network_lines,
)
from ddpsafe.doctor._mesh.findings.observations import as_details, is_closed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpsafe.doctor._mesh.findings.observations import Results, Way
    from ddpsafe.doctor._mesh.protocol import Dialled, Node


def check_addresses(results: Results) -> Iterator[Finding]:
    """Check the address that each host would announce."""
    nodes = list(results.nodes.values())
    looping: dict[str, list[Node]] = defaultdict(list)
    # Nodes of one host reach each other over loopback.
    if len({node.machine for node in nodes}) > 1:
        for node in nodes:
            if node.announced.flaw in ("loopback", "link-local", "unresolved", "silent-resolver"):
                looping[node.announced.flaw].append(node)
    for flawed in looping.values():
        yield _loopback(results, flawed)
    absent = [node for node in nodes if node.announced.flaw == "absent-interface"]
    if absent:
        yield _absent(results, absent)
    stopped = [node for node in nodes if node.announced.flaw == "not-running"]
    if stopped:
        yield _not_running(results, stopped)
    duplicate = results.find_duplicates()
    for rank, other in results.find_shadowed().items():
        yield _shadowed(results, rank, other)
    if duplicate and not (absent or looping):
        yield _translated(results) if results.is_translated() else _same_address(results, duplicate)
    yield from _check_variable(results)


def find_explained(results: Results) -> dict[Way, Dialled]:
    """Return closed directions that follow from what `check_addresses` finds."""
    flawed = {rank for rank, node in results.nodes.items() if node.announced.flaw}
    stopped = {rank for rank, node in results.nodes.items() if node.announced.flaw == "not-running"}
    duplicate = {rank for ranks in results.find_duplicates().values() for rank in ranks}
    return {
        way: outcome
        for way, outcome in results.connections().items()
        if (outcome.result == "no-route" and flawed & {*way})
        or (is_closed(outcome.result) and stopped & {*way})
        or (outcome.result != "open" and duplicate & {*way})
    }


def check_networks(results: Results, explained: dict[Way, Dialled]) -> Iterator[Finding]:
    """Find hosts that announce addresses in networks with no open direction between them.

    Adds the directions that this explains to `explained`.
    """
    nodes = results.nodes
    translated = results.is_translated()
    shared = common_networks(list(nodes.values()))
    # Different networks alone prove nothing, because a router may connect them.
    apart = {
        way: outcome
        for way, outcome in results.connections().items()
        if way not in explained
        and is_closed(outcome.result)
        and nodes[way[0]].network != nodes[way[1]].network
        and (outcome.error == "ENETUNREACH" or shared or translated)
    }
    if not apart:
        return
    # The opposite direction is closed for the same reason, whatever error it reports.
    back = {(target, source) for source, target in apart}
    closed = {
        way: outcome for way, outcome in results.connections().items() if is_closed(outcome.result)
    }
    apart |= {way: closed[way] for way in back if way in closed}
    explained.update(apart)
    yield _translated(results) if translated and not shared else _different_networks(results, apart)


def check_family(results: Results, explained: dict[Way, Dialled]) -> Iterator[Finding]:
    """Check whether hosts announce addresses of one IP version while only the other one works.

    Adds the directions that this explains to `explained`.
    """
    at_endpoint = {_version(node.endpoint) for node in results.nodes.values() if node.endpoint}
    connections = results.connections()
    versions = {way: _version(results.nodes[way[1]].announced.address) for way in connections}
    working = {
        versions[way] for way, outcome in connections.items() if not is_closed(outcome.result)
    }
    closed = {
        way: outcome
        for way, outcome in connections.items()
        if way not in explained
        and is_closed(outcome.result)
        and versions[way] not in working | at_endpoint
    }
    nodes = list(results.nodes.values())
    shared = [network for network in common_networks(nodes) if _version(network) in at_endpoint]
    if not closed or not shared:
        return
    explained.update(closed)
    odd = [node for node in nodes if _version(node.announced.address) not in at_endpoint]
    name = f"IPv{_version(odd[0].announced.address)}"
    works = f"IPv{_version(shared[0])}"
    listed = ", ".join(f"{node} {node.announced.address}" for node in odd)
    yield failed(
        "DS-MESH-027",
        f"No connection over {name} opens between the hosts, and the endpoint is reached over "
        f"{works}; the ranks would announce {listed}.",
        cause=f"a router or a firewall that passes only {works}; the hosts' names have addresses of both "
        "versions, and the first one is used.",
        fix=to_copy(
            f"Set the interface, whose first address is {works}, or remove the {name} addresses from DNS "
            "or /etc/hosts:",
            *network_lines(results, nodes, shared[0]),
        ),
        hosts=results.hostnames(node.node_rank for node in odd),
        directions=as_details(closed),
    )


def _version(address: str) -> int:
    return 6 if ":" in address else 4


_ASSIGNED_TWICE: Final = (
    "the same address was assigned twice, by hand or by two sources of configuration."
)
_OTHER_ADDRESS: Final = "Give one of them another address; check where it is set:"


def _same_address(results: Results, duplicate: Mapping[str, list[int]]) -> Finding:
    named = "; ".join(
        f"{address}: {', '.join(map(results.label, ranks))}" for address, ranks in duplicate.items()
    )
    involved = sorted({rank for ranks in duplicate.values() for rank in ranks})
    odd = [
        results.nodes[rank]
        for rank in involved
        if results.nodes[rank].announced.address in duplicate
    ]
    spare = [
        f"ip addr del {address}/{table[address].partition('/')[2]} dev {shlex.quote(name)}"
        f"    # on {node.hostname}"
        for address, ranks in duplicate.items()
        for node in (results.nodes[rank] for rank in ranks)
        for name, table in node.interfaces.items()
        if address in table and node.announced.address != address
    ]
    cause = _ASSIGNED_TWICE
    if spare:
        what, lines = "Remove the address from the host that does not need it, as root:", spare
    elif endpoint := endpoint_lines(results, odd):
        what, lines = endpoint
        cause = "it belongs to a bridge or an interface that exists on every host separately, like docker0."
    else:
        what = _OTHER_ADDRESS
        lines = [f"ip -br address    # on {results.name_of(rank)}" for rank in involved]
    return failed(
        "DS-MESH-024",
        f"Hosts have the same address, so packets for one arrive at another: {named}.",
        cause=cause,
        fix=to_copy(what, *lines),
        hosts=results.hostnames(involved),
        addresses={address: [*ranks] for address, ranks in duplicate.items()},
    )


def _shadowed(results: Results, rank: int, other: int) -> Finding:
    peer, node = results.peers[rank], results.nodes[other]
    return failed(
        "DS-MESH-024",
        f"{peer.hostname} (node rank {rank}) joined from {peer.address} and was lost at once, and "
        f"{node} announces the same address.",
        cause=_ASSIGNED_TWICE,
        fix=to_copy(
            _OTHER_ADDRESS,
            *(f"ip -br address    # on {name}" for name in (peer.hostname, node.hostname)),
        ),
        hosts=(peer.hostname, node.hostname),
        addresses={peer.address: [rank, other]},
    )


def _translated(results: Results) -> Finding:
    coordinator = results.nodes[0]
    outside = sorted(
        {node.endpoint for node in results.nodes.values() if node.endpoint}
        - {coordinator.announced.address}
    )
    listed = ", ".join(f"{node} {node.announced.address}" for node in results.nodes.values())
    return failed(
        "DS-MESH-025",
        f"The others reach {coordinator} at {', '.join(outside)}, which none of its interfaces has: "
        f"the address is translated on the way. The ranks would announce {listed}.",
        cause="gloo and NCCL announce the addresses of a host's own interfaces, which cannot be reached "
        "from the other network: hosts in two clouds or sites, or containers with their own networks.",
        fix=to_copy(
            "Connect the networks with a VPN or peering, or give the hosts an interface in one network; "
            "a container gets the network of its host with:",
            "docker run --network=host …",
        ),
        hosts=results.hostnames(results.nodes),
        endpoint=outside,
        networks={node.hostname: node.network for node in results.nodes.values()},
    )


def _check_variable(results: Results) -> Iterator[Finding]:
    """Find an interface variable that is set on some hosts only, even if it does no harm yet."""
    having = {rank for rank, node in results.nodes.items() if node.announced.variable}
    without = sorted(results.nodes.keys() - having)
    if not having or not without or any(node.announced.flaw for node in results.nodes.values()):
        return
    if any(is_closed(outcome.result) for outcome in results.connections().values()):
        return  # the finding on the closed directions has the lines that fix it
    name = results.nodes[min(having)].announced.variable
    networks = {rank: node.network for rank, node in results.nodes.items()}
    apart = len(set(networks.values())) > 1
    endpoint = endpoint_lines(results, [results.nodes[rank] for rank in without])
    what, lines = endpoint or ("", [])
    if endpoint is None or not apart:
        what, lines = "Set it on every host, or on none:", []
        chosen = results.nodes[min(having)]
        for rank in without:
            node = results.nodes[rank]
            interface = interface_in(node, chosen.network) or node.announced.interface
            lines.append(f"{interface_line(node, name, interface)}    # on {node.hostname}")
    listed = ", ".join(
        f"{results.label(rank)} {results.nodes[rank].announced.address} on "
        f"{results.nodes[rank].announced.interface}"
        for rank in without
    )
    yield warning(
        "DS-MESH-026",
        f"{name} is set on {', '.join(map(results.label, sorted(having)))} but not on the others, "
        f"which announce: {listed}.",
        cause="the variable was exported in one shell, or the launcher does not pass it on"
        + ("; part of the job uses another network, or does not work at all." if apart else "."),
        fix=to_copy(what, *lines),
        hosts=results.hostnames(without),
        variable=name,
        networks={results.name_of(rank): network for rank, network in networks.items()},
    )


def _loopback(results: Results, nodes: list[Node]) -> Finding:
    announced = nodes[0].announced
    named = ", ".join(f"{node}: {node.announced.wanted}" for node in nodes)
    if announced.flaw == "loopback":
        cause = ADVICE["DS-RDZV-loopback"][0].format(given="the host's own name")
    elif announced.flaw == "link-local":
        cause = (
            f"{announced.chosen_by} leads to a link-local address, which is valid on one link only."
        )
    else:
        cause = f"{announced.chosen_by} does not resolve there, and gloo then uses loopback."
    # On every host if one network connects all: setting it on some only would be DS-MESH-026.
    _, lines = endpoint_lines(results, nodes) or ("", announced_lines(results, nodes))
    return failed(
        "DS-MESH-020",
        f"Ranks would announce an address at which every other host reaches itself ({named}; "
        f"{announced.chosen_by}).",
        cause=cause,
        fix=to_copy(
            'Set the interface (or use Rendezvous(interface="auto")), or correct the address of the name '
            "in /etc/hosts:",
            *lines,
        ),
        hosts=results.hostnames(node.node_rank for node in nodes),
        announced={node.hostname: node.announced.wanted for node in nodes},
        usable={node.hostname: node.announced.address for node in nodes},
    )


def _absent(results: Results, odd: list[Node]) -> Finding:
    what, lines = endpoint_lines(results, odd) or (
        "Choose an interface on each host; no network connects all of them:",
        announced_lines(results, odd),
    )
    facts = []
    for node in odd:
        there = [f"{name} ({', '.join(table)})" for name, table in node.interfaces.items()]
        facts.append(
            f"{node} has no interface {node.announced.wanted} with an address "
            f"({node.announced.chosen_by}); it has {', '.join(there) or 'only loopback'}"
        )
    return failed(
        "DS-MESH-021",
        f"{'; '.join(facts)}.",
        cause="interface names differ between hosts but the variable is the same on all of them, or it "
        "was meant for another host.",
        fix=to_copy(what, *lines),
        hosts=results.hostnames(node.node_rank for node in odd),
        wanted={node.hostname: node.announced.wanted for node in odd},
        interfaces={node.hostname: dict(node.interfaces) for node in odd},
    )


def _not_running(results: Results, odd: list[Node]) -> Finding:
    what, lines = endpoint_lines(results, odd) or ("No other network connects all hosts.", [])
    named = "; ".join(
        f"interface {node.announced.interface} of {node} ({node.announced.address}, "
        f"{node.announced.chosen_by})"
        for node in odd
    )
    commands = [
        f"ip link show {shlex.quote(node.announced.interface)}    # on {node.hostname}"
        for node in odd
    ]
    return failed(
        "DS-MESH-022",
        f"An interface that the ranks would use is down or has no carrier: {named}.",
        cause="the cable, the switch port or the driver; or it was never brought up; or it is a bridge "
        "to containers of this host, and none of them runs.",
        fix=to_copy(f"Bring it up, or go without it. {what}", *commands, *lines),
        hosts=results.hostnames(node.node_rank for node in odd),
        interfaces={node.hostname: node.announced.interface for node in odd},
        addresses={node.hostname: node.announced.address for node in odd},
    )


def _different_networks(results: Results, closed: dict[Way, Dialled]) -> Finding:
    involved = sorted({node for way in closed for node in way})
    nodes = [results.nodes[rank] for rank in sorted(results.nodes)]
    usual, _ = Counter(node.network for node in nodes).most_common(1)[0]
    odd = [node for node in nodes if node.network != usual]
    listed = "; ".join(
        f"{node} {node.announced.address} on {node.announced.interface}" for node in odd
    )
    endpoint = endpoint_lines(results, odd)
    return Finding(
        code="DS-MESH-023",
        severity="failed",
        fact=f"The hosts announce addresses in networks that cannot reach each other: {listed}; the others are "
        f"in {usual or 'no network'}.",
        cause="each host chose by its own name or by the order of its interfaces "
        f"({', '.join(sorted({node.announced.chosen_by for node in odd}))}).",
        fix=to_copy(endpoint[0], *endpoint[1])
        if endpoint is not None
        else f"No network connects all hosts: give {', '.join(n.hostname for n in odd)} a route to {usual}, "
        "or an interface in it.",
        hosts=results.hostnames(node.node_rank for node in odd),
        details={
            "networks": {node.hostname: node.network for node in nodes},
            "hosts": list(results.hostnames(involved)),
            "directions": as_details(closed),
        },
    )
