"""The verdict on the addresses that hosts would announce, before anybody dials them."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING

from ddpsafe.doctor import _mesh_codes as _codes
from ddpsafe.doctor._finding import Finding, to_copy
from ddpsafe.doctor._mesh._advice import common_networks, export_line, exports_for
from ddpsafe.doctor._mesh._case import as_details, is_closed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._mesh._case import Case
    from ddpsafe.doctor._mesh._grouping import Way
    from ddpsafe.doctor._mesh._messages import Dialled, Node


def judge_addresses(case: Case) -> Iterator[Finding]:
    """Judge what each host would announce."""
    nodes = list(case.nodes.values())
    apart = len({node.machine for node in nodes}) > 1
    for node in nodes:
        flaw = node.announced.flaw
        if flaw in ("loopback", "unresolved", "silent-resolver") and apart:
            yield _loopback(case, node)
        elif flaw == "absent-interface":
            yield _absent(case, node)
        elif flaw == "not-running":
            yield _not_running(case, node)


def excuse_ways(case: Case) -> dict[Way, Dialled]:
    """Return closed directions that follow from what `judge_addresses` finds."""
    flawed = {rank for rank, node in case.nodes.items() if node.announced.flaw}
    stopped = {rank for rank, node in case.nodes.items() if node.announced.flaw == "not-running"}
    return {
        way: each
        for way, each in case.verdicts().items()
        if (each.verdict == "no-route" and flawed & {*way})
        or (is_closed(each.verdict) and stopped & {*way})
    }


def judge_networks(case: Case, excused: dict[Way, Dialled]) -> Iterator[Finding]:
    """Find hosts that announce addresses in networks between which nothing is open.

    Directions that this explains are added to `excused`.
    """
    nodes = case.nodes
    found = {
        way: each
        for way, each in case.verdicts().items()
        if way not in excused
        and is_closed(each.verdict)
        and nodes[way[0]].network != nodes[way[1]].network
        and (each.error == "ENETUNREACH" or common_networks(list(nodes.values())))
    }
    if not found:
        return
    # The way back is closed for the same reason, whatever it looks like from there.
    back = {(target, source) for source, target in found}
    closed = {way: each for way, each in case.verdicts().items() if is_closed(each.verdict)}
    found |= {way: closed[way] for way in back if way in closed}
    excused.update(found)
    yield _different_networks(case, found)


def _loopback(case: Case, node: Node) -> Finding:
    announced = node.announced
    usual = announced.flaw == "loopback"
    named = f"{announced.wanted} ({announced.chosen_by})" if usual else announced.wanted
    fact = f"The ranks of {node} would announce {named}, which leads every other host to itself."
    cause = (
        f"its /etc/hosts gives its own name the address {announced.wanted}, as Debian and Ubuntu do."
        if usual
        else f"{announced.chosen_by} does not resolve there, and gloo then takes loopback."
    )
    return Finding(
        code=_codes.ANNOUNCES_LOOPBACK,
        severity="failed",
        fact=fact,
        cause=cause,
        fix=to_copy(
            f'Name the interface on {node.hostname} (or write Rendezvous(interface="auto")), or '
            f"give the name the address {announced.address} in its /etc/hosts:",
            export_line(case.backend, announced.interface),
        ),
        hosts=(node.hostname,),
        details={"announced": announced.wanted, "usable": announced.address},
    )


def _absent(case: Case, node: Node) -> Finding:
    announced = node.announced
    nodes = list(case.nodes.values())
    shared = common_networks(nodes)
    lines = (
        exports_for(nodes, shared[0], case.backend)
        if shared
        else [f"{export_line(case.backend, announced.interface)}    # on {node.hostname}"]
    )
    has = ", ".join(f"{name} ({', '.join(table)})" for name, table in node.interfaces.items())
    return Finding(
        code=_codes.ABSENT_INTERFACE,
        severity="failed",
        fact=f"{node} has no interface {announced.wanted} with an address ({announced.chosen_by}); "
        f"it has {has or 'none but loopback'}.",
        cause="names of interfaces differ from host to host, and the variable is the same on all.",
        fix=to_copy("Choose by host, in a network that all of them share:", *lines),
        hosts=(node.hostname,),
        details={"wanted": announced.wanted, "interfaces": dict(node.interfaces)},
    )


def _not_running(case: Case, node: Node) -> Finding:
    announced = node.announced
    others = {name: table for name, table in node.interfaces.items() if name != announced.interface}
    lines = [f"ip link show {shlex.quote(announced.interface)}    # on {node.hostname}"]
    lines += [f"{export_line(case.backend, name)}    # on {node.hostname}" for name in others]
    return Finding(
        code=_codes.INTERFACE_DOWN,
        severity="failed",
        fact=f"Interface {announced.interface} of {node} ({announced.address}, "
        f"{announced.chosen_by}) is down or has no carrier.",
        cause="the cable, the switch port or the driver; or the interface was never brought up.",
        fix=to_copy("Bring it up, or take another one:", *lines),
        hosts=(node.hostname,),
        details={"interface": announced.interface, "address": announced.address},
    )


def _different_networks(case: Case, found: dict[Way, Dialled]) -> Finding:
    involved = sorted({node for way in found for node in way})
    nodes = [case.nodes[each] for each in sorted(case.nodes)]
    usual, _ = Counter(node.network for node in nodes).most_common(1)[0]
    odd = [node for node in nodes if node.network != usual]
    listed = "; ".join(
        f"{node} {node.announced.address} on {node.announced.interface}" for node in odd
    )
    shared = common_networks(nodes)
    lines = exports_for(nodes, shared[0], case.backend) if shared else []
    return Finding(
        code=_codes.DIFFERENT_NETWORKS,
        severity="failed",
        fact=f"The hosts announce addresses of networks that do not meet: {listed}; the others are "
        f"in {usual or 'no network'}.",
        cause="each host chose by its own name or by the order of its interfaces "
        f"({', '.join(sorted({node.announced.chosen_by for node in odd}))}).",
        fix=to_copy("Take the network that all hosts share:", *lines)
        if shared
        else f"No network has all hosts: give {', '.join(n.hostname for n in odd)} a route to {usual}, "
        "or an interface in it.",
        hosts=case.hostnames(node.node_rank for node in odd),
        details={
            "networks": {node.hostname: node.network for node in nodes},
            "hosts": list(case.hostnames(involved)),
            "directions": as_details(found),
        },
    )
