"""Lines that the doctor prints, pasted on the hosts they name, repair the network: the job trains."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
import scripts
from hosts import Network, names_as_debian, names_of_all, wait_for_state
from mesh_kit import MakeHosts, Told, agree, examine, start_one

pytestmark = pytest.mark.root

ON: Final = re.compile(r"    # on (.*)$")
Variables = dict[int, dict[str, str]]


def paste(network: Network, finding: dict[str, Any], env: Variables) -> None:
    """Run the lines of a fix on the hosts that they name; variables change for later programs there."""
    lines = [line.strip() for line in finding["fix"].splitlines() if line.startswith("    ")]
    for line in lines:
        where = ON.search(line)
        command = ON.sub("", line)
        if command.startswith("#"):
            continue
        assert where is not None, line
        names = where[1]
        chosen = [
            host for host in network if names == "every host" or host.name in names.split(", ")
        ]
        assert chosen, line
        for host in chosen:
            variables = env[host.index]
            script = f"{command}\nenv -0"
            started = host.start(["bash", "-ec", script], env={**variables, "LEFT": ""})
            out, err = started.communicate(timeout=scripts.LIMIT_S)
            assert started.returncode == 0, f"{command}: {err}"
            after = dict(each.split("=", 1) for each in out.split("\0") if "=" in each)
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                variables[name] = after.get(name, "")


def trains(network: Network, env: Variables) -> bool:
    """Return whether a gloo job with one rank on each host completes an all-reduce."""
    started = [
        start_one(
            host,
            network,
            program="train",
            timeout_s=15,
            env={
                **env[host.index],
                "RANK": str(host.index),
                "WORLD_SIZE": str(len(network)),
                "MASTER_ADDR": "h0",
                "MASTER_PORT": "29500",
            },
        )
        for host in network
    ]
    outputs = [each.communicate(timeout=scripts.LIMIT_S) for each in started]
    return all("TRAINED" in out for out, _ in outputs)


def diagnose(network: Network, env: Variables) -> Told:
    """Run the doctor on all hosts with their variables."""
    each = {index: {"env": variables} for index, variables in env.items()}
    return agree(examine(network, each=each, timeout_s=10))


def require_repair(network: Network, env: Variables, *codes: str) -> None:
    """Require exactly these codes, paste their lines, and require that the job trains."""
    report = diagnose(network, env)
    assert report.codes() == [*codes], [each["fact"] for each in report.findings]
    for code in codes:
        paste(network, report.one(code), env)
    assert diagnose(network, env).codes() == []
    assert trains(network, env)


def no_variables(network: Network) -> Variables:
    """Return an empty set of variables for each host."""
    return {host.index: {} for host in network}


def with_docker(make_hosts: MakeHosts, size: int = 2, **kinds: object) -> Network:
    """Make hosts that all have a container bridge, whose network sorts before the hosts' own."""
    network = make_hosts(size, **{"nics": {"eth0": "192.168.5"}, **kinds})
    for host in network:
        host.add_bridge("docker0", "172.17.0.1/16")
    return network


@pytest.mark.full
def test_variable_set_on_one_host_is_unset_there(make_hosts: MakeHosts) -> None:
    """It is not replaced by each host's local bridge, although all hosts have that network."""
    network = with_docker(make_hosts)
    env = no_variables(network)
    network[1].shell(
        "ip link add own0 type veth peer name own1; ip addr add 10.66.0.2/24 dev own0; ip link set own0 up; ip link set own1 up"
    )
    env[1]["GLOO_SOCKET_IFNAME"] = "own0"
    report = diagnose(network, env)
    assert "unset GLOO_SOCKET_IFNAME    # on h1" in report.only("DS-MESH-023")["fix"]
    paste(network, report.one("DS-MESH-023"), env)
    assert diagnose(network, env).codes() == []
    assert trains(network, env)


@pytest.mark.full
@pytest.mark.parametrize("stateful", [pytest.param(True, marks=pytest.mark.soak), False])
def test_firewall_that_lets_nothing_out_is_opened_on_its_host(
    make_hosts: MakeHosts, *, stateful: bool
) -> None:
    """The healthy hosts that listen get no lines to paste."""
    network = make_hosts(3)
    state = "ct state established,related accept" if stateful else "tcp sport 29500 accept"
    icmp, endpoint = "meta l4proto { icmp, ipv6-icmp } accept", "tcp dport 29500 accept"
    rules = filtered("output", "oif lo accept", state, icmp, endpoint, policy="drop")
    network[2].run("nft", "-f", "-", given=rules)
    report = diagnose(network, no_variables(network))
    finding = report.only("DS-MESH-031")
    assert "inet guard output" in finding["cause"]
    assert "# on h0" not in finding["fix"]
    assert "# on h1" not in finding["fix"]
    require_repair(network, no_variables(network), "DS-MESH-031")


def test_stateless_port_filter_is_opened_on_its_host(make_hosts: MakeHosts) -> None:
    """Both directions fail, as answers are dropped too; the host without a filter gets no lines."""
    network = make_hosts(2)
    source = network[1].address()
    rules = filtered(
        "input",
        f"ip saddr {source} tcp dport 29500 accept",
        f"ip saddr {source} tcp dport > 1024 drop",
    )
    network[0].run("nft", "-f", "-", given=rules)
    report = diagnose(network, no_variables(network))
    assert all("# on h1" not in each["fix"] for each in report.findings)
    require_repair(network, no_variables(network), *report.codes())


@pytest.mark.full
def test_largest_packet_size_that_passes_is_found_and_advised_once(make_hosts: MakeHosts) -> None:
    """As of a tunnel; once the lines are pasted there is no further advice."""
    network, mtu_bytes = make_hosts(2), 1300
    for host in network:
        host.shell("ip link set eth0 gso_max_segs 1")  # offload would carry what the wire does not
    network.switch.shell(f"ip link set {network[1].port('eth0')} mtu {mtu_bytes}")
    report = diagnose(network, no_variables(network))
    found = report.only("DS-MESH-035")["details"]["mtu_bytes"]
    assert mtu_bytes - 8 <= found <= mtu_bytes
    require_repair(network, no_variables(network), "DS-MESH-035")


@pytest.mark.full
def test_variable_that_is_set_on_some_hosts_only_is_a_warning(make_hosts: MakeHosts) -> None:
    """All packets pass today, but part of the job uses another network."""
    network = make_hosts(3, nics={"eth0": "10.77.0", "eth1": "10.88.0"})
    for host in network:
        host.shell("echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter")
    env: Variables = {0: {"GLOO_SOCKET_IFNAME": "eth1"}, 1: {"GLOO_SOCKET_IFNAME": "eth1"}, 2: {}}
    report = diagnose(network, env)
    assert "DS-MESH-026" in report.codes()
    warning = report.one("DS-MESH-026")
    assert (warning["severity"], warning["hosts"]) == ("warning", ["h2"])
    paste(network, warning, env)
    assert diagnose(network, env).codes() == []


@pytest.mark.full
def test_packet_loss_is_reported_with_its_share(make_hosts: MakeHosts) -> None:
    """Connections hold and nothing is closed: neither a port nor a version is the cause."""
    network = make_hosts(3)
    rules = filtered("input", "iifname eth0 numgen random mod 100 < 12 drop")
    network[1].run("nft", "-f", "-", given=rules)
    report = diagnose(network, no_variables(network))
    finding = report.only("DS-MESH-037")
    assert finding["severity"] == "warning"
    assert "h1" in finding["hosts"]
    assert re.search(r"\(\d+ %\) were retransmitted", finding["fact"])


def test_address_translation_is_reported_instead_of_a_firewall(make_hosts: MakeHosts) -> None:
    """The endpoint leads to node rank 0 by an address that it does not have."""

    def outside(network: Network, index: int) -> str:
        text = names_of_all(network, index)
        return text.replace("10.77.0.1 h0", "34.0.0.1 h0") if index else text

    network = make_hosts(2, nics={"eth0": "10.77.0", "eth1": "10.88.0"}, hosts_file=outside)
    # Each host has its own network, which no packet of the other reaches.
    network[0].shell("""
        ip addr flush dev eth0; ip addr add 10.71.0.2/24 dev eth0; ip route add 10.72.0.0/24 dev eth0
        ip addr flush dev eth1
        echo 1 > /proc/sys/net/ipv4/conf/eth0/arp_ignore
        nft add table ip nat
        nft 'add chain ip nat pre { type nat hook prerouting priority -100; }'
        nft add rule ip nat pre ip daddr 34.0.0.1 dnat to 10.71.0.2
        nft 'add table inet filter'
        nft 'add chain inet filter input { type filter hook input priority 0; }'
        nft add rule inet filter input ct state established accept
        nft add rule inet filter input ct status dnat accept
        nft add rule inet filter input iifname eth0 meta l4proto tcp drop
        ip link set eth0 address 02:00:00:00:00:01
        ip neigh add 10.72.0.2 lladdr 02:00:00:00:00:02 dev eth0
    """)
    network[1].shell("""
        ip addr flush dev eth0; ip addr add 10.72.0.2/24 dev eth0; ip route add 34.0.0.1 dev eth0
        ip addr flush dev eth1; ip route add 10.71.0.0/24 dev eth0
        ip link set eth0 address 02:00:00:00:00:02
        ip neigh add 34.0.0.1 lladdr 02:00:00:00:00:01 dev eth0
        ip neigh add 10.71.0.2 lladdr 02:00:00:00:00:01 dev eth0
        nft 'add table inet filter'
        nft 'add chain inet filter input { type filter hook input priority 0; }'
        nft add rule inet filter input ct state established accept
        nft add rule inet filter input iifname eth0 meta l4proto tcp drop
    """)
    told = examine(
        network,
        timeout_s=10,
        each={
            0: {"env": {"GLOO_SOCKET_IFNAME": "eth0"}},
            1: {"env": {"GLOO_SOCKET_IFNAME": "eth0"}},
        },
    )
    report = agree(told)
    assert "34.0.0.1" in report.only("DS-MESH-025")["fact"]
    assert "iptables" not in report.one("DS-MESH-025")["fix"]


def filtered(chain: str, *rules: str, policy: str = "accept") -> str:
    """Return a packet filter with one chain."""
    return f"""
        table inet guard {{
        chain {chain} {{
            type filter hook {chain} priority 0; policy {policy};
            iifname lo accept
            {chr(10).join(rules)}
        }}
        }}
        """


def paste_until_healthy(network: Network, env: Variables) -> list[str]:
    """Paste the lines of every host repeatedly, as an operator would; return all codes."""
    seen: list[str] = []
    for _ in range(4):
        told = examine(
            network, each={index: {"env": each} for index, each in env.items()}, timeout_s=4
        )
        findings = {
            (each["code"], each["fact"]): each
            for report in told
            for each in report.findings
            if each["severity"] == "failed"
        }
        if not findings:
            break
        for finding in findings.values():
            seen.append(finding["code"])
            for_hosts = [line for line in finding["fix"].splitlines() if ON.search(line)]
            paste(network, {"fix": "\n".join(for_hosts)}, env)
    else:
        raise AssertionError(f"not well after four times: {seen}")
    assert trains(network, env)
    return seen


@pytest.mark.full
def test_names_whose_ipv6_is_dropped_are_repaired(make_hosts: MakeHosts) -> None:
    """Every name has both kinds of address, but the network carries only one."""

    def both(network: Network, index: int) -> str:
        lines = [f"fd00:77::{each + 1} {name}" for each, name in enumerate(network.names)]
        return "\n".join([*lines[1:], names_of_all(network, index)])

    network = make_hosts(3, hosts_file=both)
    for host in network:
        host.shell(f"ip -6 addr add fd00:77::{host.index + 1}/64 dev eth0 nodad")
        rules = filtered("input", "meta nfproto ipv6 meta l4proto tcp drop")
        host.run("nft", "-f", "-", given=rules)
    # The network drops it, so no host can see a filter.
    env = no_variables(network)
    codes = paste_until_healthy(network, env)
    assert codes[0] == "DS-MESH-027"


@pytest.mark.full
def test_tunnel_is_not_chosen_where_the_network_below_it_joins_the_hosts(
    make_hosts: MakeHosts,
) -> None:
    """tailscale0 and wg0 on all hosts sort before the cards, and carry less."""
    nics = {"wg0": "10.11.0", "eth0": "10.77.0"}

    def lead_to_eth0(network: Network, index: int) -> str:
        return names_of_all(network, index).replace("10.11.0.", "10.77.0.")

    network = make_hosts(2, nics=nics, hosts_file=lead_to_eth0)
    env: Variables = {0: {"GLOO_SOCKET_IFNAME": "ib0"}, 1: {"GLOO_SOCKET_IFNAME": "ib0"}}
    report = diagnose(network, env)
    assert "GLOO_SOCKET_IFNAME=eth0" in report.one("DS-MESH-021")["fix"]
    require_repair(network, env, "DS-MESH-021")


@pytest.mark.full
def test_network_of_bonds_and_vlans_is_repaired(make_hosts: MakeHosts) -> None:
    """Interface names with a dot and a bridge as a host's network are not container bridges."""
    nics = {"bond0": "10.66.0", "br-lan": "10.77.0", "eth0.100": "10.88.0"}

    def lead_to_bridge(network: Network, index: int) -> str:
        del network, index
        return "10.77.0.1 h0\n10.77.0.2 h1\n"

    without = {"bond0": [1], "eth0.100": [0]}
    network = make_hosts(2, nics=nics, without=without, hosts_file=lead_to_bridge)
    env: Variables = {0: {"GLOO_SOCKET_IFNAME": "bond0"}, 1: {"GLOO_SOCKET_IFNAME": "eth0.100"}}
    codes = paste_until_healthy(network, env)
    assert codes == ["DS-MESH-023"]


def test_alias_address_belongs_to_its_interface(make_hosts: MakeHosts) -> None:
    """The kernel labels the address eth0:1, which is not an interface."""

    def alias(network: Network, index: int) -> str:
        return names_of_all(network, index).replace(
            f"10.77.0.{index + 1} ", f"10.99.0.{index + 1} "
        )

    network = make_hosts(2, hosts_file=alias)
    for host in network:
        host.shell(f"ip addr add 10.99.0.{host.index + 1}/24 dev eth0 label eth0:1")
    report = diagnose(network, no_variables(network))
    assert report.codes() == []
    assert report.matrix["addresses"] == ["10.99.0.1", "10.99.0.2"]


def test_rate_limit_is_not_reported_as_broken(make_hosts: MakeHosts) -> None:
    """Large packets arrive late but arrive, so no MTU is blamed."""
    network = make_hosts(3)
    network[1].shell("tc qdisc add dev eth0 root tbf rate 1mbit burst 4kb latency 2s")
    report = diagnose(network, no_variables(network))
    assert "failed" not in {each["severity"] for each in report.findings}
    assert not report.ways("large-lost")


def test_two_hosts_with_the_same_address_are_not_reported_as_lost(make_hosts: MakeHosts) -> None:
    """Packets reach either host; whichever is cut off, the finding names the address."""

    def alike(network: Network, index: int) -> str:
        return names_of_all(network, index).replace("10.77.0.3 h2", "10.77.0.2 h2")

    network = make_hosts(3, hosts_file=alike)
    network[2].shell(f"""
        ip addr flush dev eth0
        ip addr add {network[1].address()}/24 dev eth0
    """)
    told = examine(network, timeout_s=10)
    assert not {"DS-MESH-010", "DS-MESH-011"} & {*told[0].codes()}
    if "DS-MESH-024" not in told[0].codes():  # one of them has never received an answer
        cut_off = [each for each in told[1:] if "DS-MESH-004" in each.codes()]
        assert "arping -D -c 3 -I eth0 10.77.0.2" in cut_off[0].one("DS-MESH-004")["fix"]


def link_local(network: Network, index: int) -> str:
    """Return the names of all hosts, of which the second one leads to a link-local address."""
    text = names_of_all(network, index)
    return text.replace("10.77.0.2 h1", "169.254.7.7 h1") if index == 1 else text


TWO_CARDS: Final = {"eth0": "10.77.0", "eth1": "10.88.0"}
STRICT: Final = "for each in all eth1; do echo 1 > /proc/sys/net/ipv4/conf/$each/rp_filter; done"
BRIDGE: Final = f"""
    ip link add virbr0 type bridge
    ip addr add 192.168.122.1/24 dev virbr0
    ip link add vm0 type veth peer name vm1
    ip link set vm0 master virbr0 up
    ip link set virbr0 up
    {wait_for_state("virbr0", "down")}
"""
# fmt: off
REPAIRED: Final[dict[str, tuple[int, dict[str, Any], dict[int, str], str, str]]] = {
    # how many hosts, how they are made, what is run on some of them, GLOO_SOCKET_IFNAME on all, and the finding
    "docker0 on all hosts": (3, {"docker": True}, {}, "docker0", "DS-MESH-024"),
    "an interface that no host has": (2, {"docker": True}, {}, "ib0", "DS-MESH-021"),
    "a bridge without containers": (2, {"docker": True}, {0: BRIDGE, 1: BRIDGE}, "virbr0", "DS-MESH-022"),
    "hostnames on loopback": (3, {"hosts_file": names_as_debian}, {}, "", "DS-MESH-020"),
    "a link-local address": (2, {"hosts_file": link_local}, {1: "ip addr add 169.254.7.7/16 dev eth0"}, "", "DS-MESH-020"),
    "an address of two hosts": (3, {}, {2: "ip addr add 10.77.0.2/24 dev eth0"}, "", "DS-MESH-024"),
    # rp_filter drops packets from an interface that answers would not use: no cable is broken
    "a wrong route": (3, {"nics": TWO_CARDS},
        {1: STRICT, 2: "ip route add 10.77.0.2 dev eth1 src 10.77.0.3"}, "eth0", "DS-MESH-038"),
    # the rule matches the source address only, so a look-up without one finds nothing wrong
    "a rule that selects another table": (3, {"nics": TWO_CARDS},
        {1: STRICT, 2: "ip route add 10.77.0.2 dev eth1 table 100; ip rule add from 10.77.0.3 table 100"},
        "eth0", "DS-MESH-038"),
    **{f"a route of kind {kind}": (3, {}, {2: f"ip route add {kind} 10.77.0.2"}, "", "DS-MESH-038")
        for kind in ("blackhole", "unreachable", "prohibit")},
}
# fmt: on


@pytest.mark.full(but=["hostnames on loopback", "a link-local address"])
@pytest.mark.parametrize("what", REPAIRED)
def test_one_finding_repairs_all_hosts(make_hosts: MakeHosts, what: str) -> None:
    """Its lines name the hosts; once they are pasted, there is no finding, and the job trains."""
    size, how, lines, interface, code = REPAIRED[what]
    has_docker = how.get("docker", False)
    network = with_docker(make_hosts, size) if has_docker else make_hosts(size, **how)
    for index, text in lines.items():
        network[index].shell(text)
    variables = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    require_repair(network, {host.index: {**variables} for host in network}, code)


DROPS_ANSWERS: Final = ("input", "ip saddr 10.77.0.1 tcp dport > 1024 drop")
LETS_NOTHING_IN: Final = ("input", "ct state established accept", "meta l4proto icmp accept")
LETS_NOTHING_OUT: Final = ("output", "oif lo accept", "ct state established accept")


@pytest.mark.full
@pytest.mark.parametrize(
    ("host", "chain", "policy", "codes"),
    [
        pytest.param(1, DROPS_ANSWERS, "accept", {"DS-MESH-004"}, id="answers of the endpoint"),
        pytest.param(0, LETS_NOTHING_IN, "drop", {"DS-MESH-001", "DS-MESH-004"}, id="all at node 0"),
        pytest.param(1, LETS_NOTHING_OUT, "drop", set(), id="all but answers"),
    ],
)  # fmt: skip
def test_filter_of_the_endpoint_is_opened_on_its_host(
    make_hosts: MakeHosts, host: int, chain: tuple[str, ...], policy: str, codes: set[str]
) -> None:
    """Only that host can read its filter; node rank 0 is not blamed if it filters nothing."""
    network = make_hosts(2)
    network[host].run("nft", "-f", "-", given=filtered(*chain, policy=policy))
    assert codes <= {*paste_until_healthy(network, no_variables(network))}
