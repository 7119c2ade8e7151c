"""Lines to copy: rules that open a firewall, variables that choose an interface, an MTU."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Final

from ddpsafe._interfaces import LIBRARY_VARIABLES, as_setting, interface_variables
from ddpsafe.doctor._mesh._messages import Gate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpsafe.doctor._mesh._messages import Node

_NFT_S: Final = 2.0
_FAMILIES: Final = ("inet", "ip", "ip6")


def find_gates() -> list[Gate]:
    """Return where this host filters what comes in; nothing where it may not be asked."""
    nft = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    if nft is None:
        return []
    try:
        asked = subprocess.run(  # noqa: S603 - a fixed command, found on the system's path
            [nft, "-j", "list", "chains"], capture_output=True, timeout=_NFT_S, check=True
        )
        listed = json.loads(asked.stdout).get("nftables", [])
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    chains = [each["chain"] for each in listed if "chain" in each]
    return [
        Gate(chain["family"], chain["table"], chain["name"])
        for chain in chains
        if chain.get("hook") == "input"
        and chain.get("type") == "filter"
        and chain["family"] in _FAMILIES
    ]


def opening_rules(
    target: Node, sources: Sequence[Node], gates: Sequence[Gate], *, port: int | None = None
) -> list[str]:
    """Return the commands that let other hosts in, for the firewall that a host has.

    Args:
        target: The host to open.
        sources: Who shall come in.
        gates: Where it filters; empty where that is not known.
        port: One port; by default those that its system hands out, where gloo and NCCL listen.
    """
    first, last = (port, port) if port is not None else target.port_range
    origin = _origin(sources, target)
    if not gates:
        return [_iptables(origin, first, last), *_elsewhere(origin, first, last)]
    return [_rule(gate, origin, first, last) for gate in gates]


def _rule(gate: Gate, origin: str, first: int, last: int) -> str:
    if gate.table == "firewalld":
        return _firewalld(origin, first, last)
    if gate.chain == "INPUT" and gate.family != "inet":
        return _iptables(origin, first, last)
    family = "ip6" if ":" in origin else "ip"
    place = f"{gate.family} {gate.table} {gate.chain}"
    return f"nft insert rule {place} {family} saddr {origin} tcp dport {first}-{last} accept"


def _iptables(origin: str, first: int, last: int) -> str:
    command = "ip6tables" if ":" in origin else "iptables"
    origin = origin.strip("{ }").replace(", ", ",")
    return f"{command} -I INPUT -p tcp -s {origin} --dport {first}:{last} -j ACCEPT"


def _firewalld(origin: str, first: int, last: int) -> str:
    family = "ipv6" if ":" in origin else "ipv4"
    rules = " ".join(
        f'--add-rich-rule=\'rule family="{family}" source address="{each}" '
        f'port port="{first}-{last}" protocol="tcp" accept\''
        for each in origin.strip("{ }").split(", ")
    )
    return f"firewall-cmd --permanent {rules} && firewall-cmd --reload"


def _elsewhere(origin: str, first: int, last: int) -> list[str]:
    return [
        f"{_firewalld(origin, first, last)}    # with firewalld",
        f"# in a cloud: an inbound rule of the security group, TCP {first}-{last} from {origin}",
    ]


def _origin(sources: Sequence[Node], target: Node) -> str:
    """Return the network that all sources are in, else their addresses."""
    networks = {node.network for node in sources}
    if networks == {target.network} and target.network:
        return target.network
    addresses = sorted({node.announced.address for node in sources})
    return addresses[0] if len(addresses) == 1 else f"{{ {', '.join(addresses)} }}"


def export_line(backend: str, interface: str) -> str:
    """Return the line that makes the library behind a backend take an interface."""
    library = LIBRARY_VARIABLES[1] if "nccl" in backend else LIBRARY_VARIABLES[0]
    return f"export {as_setting(library, interface_variables(interface)[library])}"


def common_networks(nodes: Sequence[Node]) -> list[str]:
    """Return the networks that every host has an address in."""
    each_has = [
        {network for table in node.interfaces.values() for network in table.values()}
        for node in nodes
    ]
    return sorted(set.intersection(*each_has)) if each_has else []


def interface_in(node: Node, network: str) -> str | None:
    """Return the interface of a host that leads to a network."""
    for name, table in node.interfaces.items():
        if network in table.values():
            return name
    return None


def exports_for(nodes: Sequence[Node], network: str, backend: str) -> list[str]:
    """Return what to export on each host so that all of them meet in one network."""
    names = {node.node_rank: interface_in(node, network) or "?" for node in nodes}
    if len(set(names.values())) == 1:
        return [f"{export_line(backend, names[nodes[0].node_rank])}    # on every host"]
    return [
        f"{export_line(backend, names[node.node_rank])}    # on {node.hostname}" for node in nodes
    ]
