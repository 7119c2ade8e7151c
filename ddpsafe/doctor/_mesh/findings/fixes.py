"""Lines to copy: rules that open a firewall, and variables that choose an interface."""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddpsafe._host import LIBRARY_VARIABLES, interface_variables, is_overlay, leads_to_containers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpsafe.doctor._mesh.findings.connections import Way
    from ddpsafe.doctor._mesh.findings.observations import Results
    from ddpsafe.doctor._mesh.protocol import FilterChain, Node
    from ddpsafe.doctor._subject import VariableSource

Hook = Literal["input", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a host's packet filter has to allow.

    Attributes:
        host: The host.
        hook: Whether its incoming or outgoing packets are blocked.
        replies: Whether these are the replies of the connections.
        peers: The nodes at the other end.
        chains: The chains that may block them; empty if unknown.
    """

    host: Node
    hook: Literal["input", "output"]
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

    Args:
        results: Everything that was collected.
        ways: The directions.

    Returns:
        What to open; nothing if both hosts of every direction are known not to filter.
    """
    found: dict[tuple[int, Hook, bool], list[int]] = {}
    for source, target in ways:
        places: list[tuple[int, Hook, bool, int]] = [
            (target, "input", False, source),
            (source, "output", False, target),
        ]
        replies: list[tuple[int, Hook, bool, int]] = [
            (source, "input", True, target),
            (target, "output", True, source),
        ]
        chosen = [each for each in places if _chains_of(results, each[0], each[1])]
        chosen = chosen or [each for each in replies if _chains_of(results, each[0], each[1])]
        if not chosen and not results.reports[target].chains_known:
            chosen = [places[0]]
        for host, hook, is_reply, peer in chosen:
            peers = found.setdefault((host, hook, is_reply), [])
            if peer not in peers:
                peers.append(peer)
    return [
        Opening(
            host=results.nodes[host],
            hook=hook,
            replies=is_reply,
            peers=tuple(results.nodes[peer] for peer in sorted(peers)),
            chains=_chains_of(results, host, hook),
        )
        for (host, hook, is_reply), peers in sorted(found.items())
    ]


def _chains_of(results: Results, node_rank: int, hook: Hook) -> tuple[FilterChain, ...]:
    return tuple(chain for chain in results.reports[node_rank].chains if chain.hook == hook)


def describe_chain(chain: FilterChain) -> str:
    """Return the name of a chain as nft takes it."""
    return f"{chain.family} {chain.table} {chain.name}"


def allow(chain: FilterChain, origin: str, first: int, last: int, side: str = "dport") -> str:
    """Return the command that allows packets of a port range in a chain.

    Args:
        chain: A chain of the host's packet filter.
        origin: The peers' addresses or network; empty for all.
        first: The first port.
        last: The last port.
        side: ``dport`` if the ports are the destination, ``sport`` if they are the source.
    """
    if chain.table == "firewalld" and chain.hook == "input":
        return _firewalld(origin, first, last)
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
        f'--add-rich-rule=\'rule family="{family}" source address="{each}" '
        f'port port="{ports}" protocol="tcp" accept\''
        for each in origin.strip("{ }").split(", ")
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


def library_setting(backend: str, interface: str) -> tuple[str, str]:
    """Return the variable of the library behind a backend, and its value for an interface."""
    library = LIBRARY_VARIABLES[1] if "nccl" in backend else LIBRARY_VARIABLES[0]
    return library, interface_variables(interface)[library]


def common_networks(nodes: Sequence[Node]) -> list[str]:
    """Return the networks that connect all hosts, the one that leads to the endpoint first.

    Every host has a different address in such a network. The bridge to a host's own containers has
    the same network, and mostly the same address, on every host, and connects none of them.
    """
    # For each host, its addresses by network, without bridges to containers.
    tables: list[dict[str, list[str]]] = []
    for node in nodes:
        networks: dict[str, list[str]] = defaultdict(list)
        for name, table in node.interfaces.items():
            for address, network in () if leads_to_containers(name) else table.items():
                networks[network].append(address)
        tables.append(networks)
    found = set.intersection(*map(set, tables)) if tables else set()
    connecting = []
    for network in found:
        owners = {
            (address, node.machine)
            for node, table in zip(nodes, tables, strict=True)
            for address in table[network]
        }
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

    Args:
        results: Everything that was collected.
        odd: The hosts whose announced address is of no use.

    Returns:
        None if no network connects all hosts.
    """
    nodes = [results.nodes[rank] for rank in sorted(results.nodes)]
    fine = {node.network for node in nodes if node not in odd}
    if len(fine) == 1 and all(_is_in(node.announced.otherwise, *fine) for node in odd):
        lines = [
            f"{_place_of(node).unset_line(node.announced.variable)}    # on {node.hostname}"
            for node in odd
        ]
        return (
            "Without the variable the library chooses the network of the others; unset it:",
            lines,
        )
    shared = common_networks(nodes)
    if not shared:
        return None
    settings = {
        node.node_rank: _place_of(node).set_line(
            *library_setting(results.backend, interface_in(node, shared[0]) or "")
        )
        for node in nodes
    }
    what = f"Use the network that connects all hosts, {shared[0]}:"
    if len(set(settings.values())) == 1:
        return what, [f"{settings[nodes[0].node_rank]}    # on every host"]
    return what, [f"{settings[node.node_rank]}    # on {node.hostname}" for node in nodes]


def _place_of(node: Node) -> VariableSource:
    return node.announced.place_of_variable()


def _is_in(address: str, network: str) -> bool:
    return bool(address and network) and ipaddress.ip_address(address) in ipaddress.ip_network(
        network
    )
