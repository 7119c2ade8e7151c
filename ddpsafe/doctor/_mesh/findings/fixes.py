"""Lines to copy: rules that open a firewall, variables that choose an interface, and MTUs."""

from __future__ import annotations

import ipaddress
import shlex
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddpsafe._host import LIBRARY_VARIABLES, interface_variables, is_overlay, leads_to_containers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpsafe.doctor._mesh.findings.observations import Results, Way
    from ddpsafe.doctor._mesh.protocol import FilterChain, Node

Hook = Literal["input", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a host's packet filter has to allow.

    Attributes:
        hook: Whether its incoming or outgoing packets are blocked.
        replies: Whether these are the replies of the connections.
        chains: The chains that may block them; empty if unknown.
    """

    host: Node
    hook: Hook
    replies: bool
    peers: tuple[Node, ...]
    chains: tuple[FilterChain, ...]

    def rules(self) -> list[str]:
        """Return the commands, one for each chain."""
        # Replies leave from the listening ports, and arrive at the ports that dialled.
        listener = self.peers[0] if self.hook == "output" and not self.replies else self.host
        first, last = listener.port_range
        origin = _origin(self.peers, self.host)
        side = "sport" if self.hook == "output" and self.replies else "dport"
        if not self.chains:
            unknown = [_iptables(origin, first, last, self.hook, side)]
            return [*unknown, f"{_firewalld(origin, first, last)}    # with firewalld"]
        return [allow(chain, origin, first, last, side) for chain in self.chains]


def find_openings(results: Results, ways: Iterable[Way]) -> list[Opening]:
    """Find the packet filters that may block closed directions.

    There are none if both hosts of every direction are known not to filter.
    """
    blocked: dict[tuple[int, Hook, bool], set[int]] = defaultdict(set)
    for source, target in ways:
        # First the filters of the connection's own packets; if there are none, those of the replies.
        places: list[tuple[int, Hook, bool, int]] = [
            (target, "input", False, source),
            (source, "output", False, target),
            (source, "input", True, target),
            (target, "output", True, source),
        ]
        filtering = [place for place in places if _chains_of(results, place[0], place[1])]
        are_replies = all(is_reply for _, _, is_reply, _ in filtering)
        if not filtering and not results.reports[target].chains_known:
            filtering, are_replies = [places[0]], False
        for host, hook, is_reply, peer in filtering:
            if is_reply is are_replies:
                blocked[host, hook, is_reply].add(peer)
    return [
        Opening(
            host=results.nodes[host],
            hook=hook,
            replies=is_reply,
            peers=tuple(results.nodes[peer] for peer in sorted(peers)),
            chains=_chains_of(results, host, hook),
        )
        for (host, hook, is_reply), peers in sorted(blocked.items())
    ]


def _chains_of(results: Results, node_rank: int, hook: Hook) -> tuple[FilterChain, ...]:
    return tuple(chain for chain in results.reports[node_rank].chains if chain.hook == hook)


def describe_chain(chain: FilterChain) -> str:
    """Return the name of a chain as nft takes it."""
    return f"{chain.family} {chain.table} {chain.name}"


def allow(chain: FilterChain, origin: str, first: int, last: int, side: str = "dport") -> str:
    """Return the command that allows packets of a port range in a chain.

    `origin` are the peers' addresses or network; empty for all. The side is ``dport`` if the ports are the
    destination, ``sport`` if they are the source.
    """
    # firewalld replaces its table whenever it is reloaded, so a rule of nft would not stay.
    if chain.table == "firewalld" and chain.hook == "input":
        return _firewalld(origin, first, last)
    # Chains of iptables-nft, whose tables only iptables should change.
    if chain.name in ("INPUT", "OUTPUT") and chain.family != "inet":
        return _iptables(origin, first, last, chain.hook, side)
    family = "ip6" if ":" in origin else "ip"
    peer = "saddr" if chain.hook == "input" else "daddr"
    whose = f"{family} {peer} {origin} " if origin else ""
    ports = str(first) if first == last else f"{first}-{last}"
    return f"nft insert rule {describe_chain(chain)} {whose}tcp {side} {ports} accept"


def _iptables(origin: str, first: int, last: int, hook: Hook = "input", side: str = "dport") -> str:
    command = "ip6tables" if ":" in origin else "iptables"
    chain, flag = ("INPUT", "-s") if hook == "input" else ("OUTPUT", "-d")
    whose = f"{flag} {origin.strip('{ }').replace(', ', ',')} " if origin else ""
    ports = str(first) if first == last else f"{first}:{last}"
    return f"{command} -I {chain} -p tcp {whose}--{side} {ports} -j ACCEPT"


def _firewalld(origin: str, first: int, last: int) -> str:
    ports = str(first) if first == last else f"{first}-{last}"
    if not origin:
        return f"firewall-cmd --permanent --add-port={ports}/tcp && firewall-cmd --reload"
    family = "ipv6" if ":" in origin else "ipv4"
    rules = " ".join(
        f'--add-rich-rule=\'rule family="{family}" source address="{address}" '
        f'port port="{ports}" protocol="tcp" accept\''
        for address in origin.strip("{ }").split(", ")
    )
    return f"firewall-cmd --permanent {rules} && firewall-cmd --reload"


def cloud_lines(results: Results, ways: Iterable[Way]) -> list[str]:
    """Return what to allow in a firewall between the hosts."""
    by_target: dict[int, list[Node]] = defaultdict(list)
    for source, target in sorted(ways):
        by_target[target].append(results.nodes[source])
    return [
        f"# an inbound rule for {results.name_of(target)}: TCP "
        f"{results.nodes[target].port_range[0]}-{results.nodes[target].port_range[1]} "
        f"from {_origin(sources, results.nodes[target])}"
        for target, sources in by_target.items()
    ]


def _origin(sources: Sequence[Node], target: Node) -> str:
    """Return the network that all sources share with the target, else their addresses."""
    networks = {node.network for node in sources}
    if networks == {target.network} and target.network:
        return target.network
    addresses = sorted({node.announced.address for node in sources})
    return addresses[0] if len(addresses) == 1 else f"{{ {', '.join(addresses)} }}"


def interface_line(node: Node, variable: str, interface: str) -> str:
    """Return the line that gives a host's variable the value for an interface, where it is set there."""
    value = interface_variables(interface)[variable]
    return node.announced.place.set_line(variable, value)


def library_variable(backend: str) -> str:
    """Return the variable of the library behind a backend."""
    return LIBRARY_VARIABLES[1] if "nccl" in backend else LIBRARY_VARIABLES[0]


def network_lines(results: Results, nodes: Sequence[Node], network: str) -> list[str]:
    """Return the lines that choose the interfaces of all hosts in a network: one, if they are equal."""
    variable = library_variable(results.backend)
    lines = [interface_line(node, variable, interface_in(node, network) or "") for node in nodes]
    if len(set(lines)) == 1:
        return [f"{lines[0]}    # on every host"]
    return [f"{line}    # on {node.hostname}" for line, node in zip(lines, nodes, strict=True)]


def announced_lines(results: Results, nodes: Sequence[Node]) -> list[str]:
    """Return the lines that choose the interface that each of some hosts announces now."""
    variable = library_variable(results.backend)
    return [
        f"{interface_line(node, variable, node.announced.interface)}    # on {node.hostname}"
        for node in nodes
    ]


def mtu_lines(results: Results, node_ranks: Iterable[int], mtu_bytes: int) -> list[str]:
    """Return the lines that set the MTU of the announced interfaces of some hosts."""
    return [
        f"ip link set dev {shlex.quote(results.nodes[rank].announced.interface)} mtu {mtu_bytes}"
        f"    # on {results.name_of(rank)}"
        for rank in node_ranks
    ]


def common_networks(nodes: Sequence[Node]) -> list[str]:
    """Return the networks that connect all hosts, the one that leads to the endpoint first."""
    # For each host, its addresses by network, without bridges to containers.
    tables: list[dict[str, list[str]]] = []
    for node in nodes:
        networks: dict[str, list[str]] = defaultdict(list)
        for name, table in node.interfaces.items():
            for address, network in () if leads_to_containers(name) else table.items():
                networks[network].append(address)
        tables.append(networks)
    connecting = []
    for network in set.intersection(*map(set, tables)) if tables else ():
        owners = {
            (address, node.machine)
            for node, table in zip(nodes, tables, strict=True)
            for address in table[network]
        }
        # Every host has a different address in such a network. The bridge to a host's own containers
        # has the same network, and mostly the same address, on every host, and connects none of them.
        if len({address for address, _ in owners}) == len(owners):
            connecting.append(network)

    def rank(network: str) -> tuple[int, bool, str]:
        overlay = any(is_overlay(interface_in(node, network) or "") for node in nodes)
        # A network works if hosts reach the endpoint from their address in it.
        leading_there = sum(
            node.source in table[network] for node, table in zip(nodes, tables, strict=True)
        )
        return -leading_there, overlay, network

    return sorted(connecting, key=rank)


def interface_in(node: Node, network: str) -> str | None:
    """Return the interface of a host that leads to a network."""
    for name, table in node.interfaces.items():
        if network in table.values() and not leads_to_containers(name):
            return name
    return None


def endpoint_lines(results: Results, odd: Sequence[Node]) -> tuple[str, list[str]] | None:
    """Return a sentence and the lines that make all hosts announce addresses of one network.

    `odd` are the hosts whose announced address is of no use. Returns None if no network
    connects all hosts.
    """
    nodes = [results.nodes[rank] for rank in sorted(results.nodes)]
    fine = {node.network for node in nodes if node not in odd}
    if len(fine) == 1 and all(_is_in(node.announced.otherwise, *fine) for node in odd):
        what = "Without the variable the library chooses the network of the others; unset it:"
        lines = []
        for node in odd:
            unset = node.announced.place.unset_line(node.announced.variable)
            lines.append(f"{unset}    # on {node.hostname}")
        return what, lines
    shared = common_networks(nodes)
    if not shared:
        return None
    what = f"Use the network that connects all hosts, {shared[0]}:"
    return what, network_lines(results, nodes, shared[0])


def _is_in(address: str, network: str) -> bool:
    return bool(address and network) and ipaddress.ip_address(address) in ipaddress.ip_network(
        network
    )
