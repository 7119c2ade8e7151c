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
    """Run the lines of a fix on the hosts that they name.

    An export or unset changes the variables of later programs on that host.
    """
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
    assert report.codes() == ["DS-MESH-023"]
    assert "unset GLOO_SOCKET_IFNAME    # on h1" in report.one("DS-MESH-023")["fix"]
    paste(network, report.one("DS-MESH-023"), env)
    assert diagnose(network, env).codes() == []
    assert trains(network, env)


@pytest.mark.full
def test_container_bridge_on_all_hosts_is_not_the_network_that_joins_them(
    make_hosts: MakeHosts,
) -> None:
    """Every host would announce 172.17.0.1 and dial itself, so no firewall should be opened."""
    network = with_docker(make_hosts, 3)
    env: Variables = {host.index: {"GLOO_SOCKET_IFNAME": "docker0"} for host in network}
    require_repair(network, env, "DS-MESH-024")


@pytest.mark.full
def test_missing_interface_is_replaced_by_the_one_that_joins_the_hosts(
    make_hosts: MakeHosts,
) -> None:
    """With docker0 on all hosts, and a variable that is right on only one of them."""
    network = with_docker(make_hosts)
    env: Variables = {host.index: {"GLOO_SOCKET_IFNAME": "ib0"} for host in network}
    require_repair(network, env, "DS-MESH-021")


def test_hostname_on_loopback_is_repaired_on_all_hosts_by_one_line(make_hosts: MakeHosts) -> None:
    """All hosts share one cause, so there is one finding."""
    network = make_hosts(3, hosts_file=names_as_debian)
    require_repair(network, no_variables(network), "DS-MESH-020")


@pytest.mark.full
def test_duplicate_address_is_removed_from_the_second_host(make_hosts: MakeHosts) -> None:
    """Node rank 0 has the interfaces of both hosts, which show the duplicate."""
    network = make_hosts(3)
    network[2].shell(f"ip addr add {network[1].address()}/24 dev eth0")
    require_repair(network, no_variables(network), "DS-MESH-024")


@pytest.mark.full
@pytest.mark.parametrize("stateful", [pytest.param(True, marks=pytest.mark.soak), False])
def test_firewall_that_lets_nothing_out_is_opened_on_its_host(
    make_hosts: MakeHosts, *, stateful: bool
) -> None:
    """The healthy hosts that listen get no lines to paste."""
    network = make_hosts(3)
    state = "ct state established,related accept" if stateful else "tcp sport 29500 accept"
    network[2].run(
        "nft",
        "-f",
        "-",
        given=f"""
        table inet guard {{
        chain out {{
            type filter hook output priority 0; policy drop;
            oif lo accept
            {state}
            meta l4proto {{ icmp, ipv6-icmp }} accept
            tcp dport 29500 accept
        }}
        }}
        """,
    )
    report = diagnose(network, no_variables(network))
    assert report.codes() == ["DS-MESH-031"]
    finding = report.one("DS-MESH-031")
    assert "inet guard out" in finding["cause"]
    assert "# on h0" not in finding["fix"]
    assert "# on h1" not in finding["fix"]
    require_repair(network, no_variables(network), "DS-MESH-031")


def test_stateless_port_filter_is_opened_on_its_host(
    make_hosts: MakeHosts,
) -> None:
    """Both directions fail, as answers are dropped too; the host without a filter gets no lines."""
    network = make_hosts(2)
    source = network[1].address()
    network[0].run(
        "nft",
        "-f",
        "-",
        given=f"""
        table inet filter {{
        chain input {{
            type filter hook input priority 0; policy accept;
            ip saddr {source} tcp dport 29500 accept
            ip saddr {source} tcp dport > 1024 drop
        }}
        }}
        """,
    )
    report = diagnose(network, no_variables(network))
    assert all("# on h1" not in each["fix"] for each in report.findings)
    require_repair(network, no_variables(network), *report.codes())


@pytest.mark.full
@pytest.mark.parametrize(
    "mtu_bytes",
    [
        pytest.param(1390, marks=pytest.mark.soak),
        1300,
        pytest.param(1000, marks=pytest.mark.soak),
    ],
)
def test_largest_packet_size_that_passes_is_found_and_advised_once(
    make_hosts: MakeHosts, mtu_bytes: int
) -> None:
    """Whatever the MTU of the tunnel; once the lines are pasted there is no further advice."""
    network = make_hosts(2)
    for host in network:
        host.shell("ip link set eth0 gso_max_segs 1")  # offload would carry what the wire does not
    network.switch.shell(f"ip link set {network[1].port('eth0')} mtu {mtu_bytes}")
    report = diagnose(network, no_variables(network))
    assert report.codes() == ["DS-MESH-035"]
    found = report.one("DS-MESH-035")["details"]["mtu_bytes"]
    assert mtu_bytes - 8 <= found <= mtu_bytes
    require_repair(network, no_variables(network), "DS-MESH-035")


@pytest.mark.full
def test_wrong_route_is_removed(make_hosts: MakeHosts) -> None:
    """rp_filter drops packets from an interface that answers would not use: no cable is broken."""
    network = make_hosts(3, nics={"eth0": "10.77.0", "eth1": "10.88.0"})
    env: Variables = {host.index: {"GLOO_SOCKET_IFNAME": "eth0"} for host in network}
    network[1].shell("""
        echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter
        echo 1 > /proc/sys/net/ipv4/conf/eth1/rp_filter
    """)
    network[2].shell("ip route add 10.77.0.2 dev eth1 src 10.77.0.3")
    require_repair(network, env, "DS-MESH-038")


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
    network[1].run(
        "nft",
        "-f",
        "-",
        given="""
        table inet lossy {
        chain input {
            type filter hook input priority 0; policy accept;
            iifname eth0 numgen random mod 100 < 12 drop
        }
        }
        """,
    )
    report = diagnose(network, no_variables(network))
    assert report.codes() == ["DS-MESH-037"], [each["fact"] for each in report.findings]
    finding = report.one("DS-MESH-037")
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
    assert report.codes() == ["DS-MESH-025"], [each["fact"] for each in told[1].findings]
    assert "34.0.0.1" in report.one("DS-MESH-025")["fact"]
    assert "iptables" not in report.one("DS-MESH-025")["fix"]


@pytest.mark.full
def test_bridge_without_containers_is_replaced_by_one_finding_for_all_hosts(
    make_hosts: MakeHosts,
) -> None:
    """docker0 has no carrier while no container runs; another bridge of a host leads nowhere."""
    network = with_docker(make_hosts)
    for host in network:
        host.shell(f"""
            ip link add virbr0 type bridge
            ip addr add 192.168.122.1/24 dev virbr0
            ip link add vm0 type veth peer name vm1
            ip link set vm0 master virbr0 up
            ip link set virbr0 up
            {wait_for_state("virbr0", "down")}
        """)
    env: Variables = {host.index: {"GLOO_SOCKET_IFNAME": "virbr0"} for host in network}
    require_repair(network, env, "DS-MESH-022")


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
def test_filter_that_drops_answers_of_the_endpoint_is_opened_on_its_host(
    make_hosts: MakeHosts,
) -> None:
    """The stateless rule is on the connecting host: node rank 0 filters nothing and is not blamed."""
    network = make_hosts(2)
    rules = filtered("input", f"ip saddr {network[0].address()} tcp dport > 1024 drop")
    network[1].run("nft", "-f", "-", given=rules)
    codes = paste_until_healthy(network, no_variables(network))
    assert "DS-MESH-004" in codes


@pytest.mark.full
def test_filter_that_lets_nothing_in_is_opened_by_the_lines_of_node_rank_0(
    make_hosts: MakeHosts,
) -> None:
    """Only node rank 0 can read its filter and name the chain and the line."""
    network = make_hosts(2)
    rules = filtered(
        "input", "ct state established accept", "meta l4proto icmp accept", policy="drop"
    )
    network[0].run("nft", "-f", "-", given=rules)
    codes = paste_until_healthy(network, no_variables(network))
    assert {"DS-MESH-001", "DS-MESH-004"} <= {*codes}


@pytest.mark.full
def test_filter_that_blocks_traffic_to_the_endpoint_is_opened_on_its_host(
    make_hosts: MakeHosts,
) -> None:
    """The second host lets out nothing but answers."""
    network = make_hosts(2)
    rules = filtered("output", "oif lo accept", "ct state established accept", policy="drop")
    network[1].run("nft", "-f", "-", given=rules)
    paste_until_healthy(network, no_variables(network))


@pytest.mark.full
def test_rule_that_selects_another_table_is_removed(make_hosts: MakeHosts) -> None:
    """The rule matches the source address only, so a look-up without one finds nothing wrong."""
    network = make_hosts(3, nics={"eth0": "10.77.0", "eth1": "10.88.0"})
    env: Variables = {host.index: {"GLOO_SOCKET_IFNAME": "eth0"} for host in network}
    network[1].shell("echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter")
    network[2].shell("""
        ip route add 10.77.0.2 dev eth1 table 100
        ip rule add from 10.77.0.3 table 100
    """)
    require_repair(network, env, "DS-MESH-038")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["blackhole", "unreachable", "prohibit"])
def test_route_that_rejects_is_removed(make_hosts: MakeHosts, kind: str) -> None:
    """The host's own kernel rejects: no firewall answers, and no cable is broken."""
    network = make_hosts(3)
    network[2].shell(f"ip route add {kind} {network[1].address()}")
    require_repair(network, no_variables(network), "DS-MESH-038")


@pytest.mark.full
def test_names_whose_ipv6_is_dropped_are_repaired(make_hosts: MakeHosts) -> None:
    """Every name has both kinds of address, but the network carries only one."""

    def both(network: Network, index: int) -> str:
        lines = [f"fd00:77::{each + 1} {name}" for each, name in enumerate(network.names)]
        return "\n".join([*lines[1:], names_of_all(network, index)])

    network = make_hosts(3, hosts_file=both)
    for host in network:
        host.shell(f"ip -6 addr add fd00:77::{host.index + 1}/64 dev eth0 nodad")
        host.run(
            "nft",
            "-f",
            "-",
            given=filtered("input", "meta nfproto ipv6 meta l4proto tcp drop"),
        )
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
    env: Variables = {
        0: {"GLOO_SOCKET_IFNAME": "bond0"},
        1: {"GLOO_SOCKET_IFNAME": "eth0.100"},
    }
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


def test_name_with_a_link_local_address_is_repaired(make_hosts: MakeHosts) -> None:
    """Other hosts cannot dial such an address, which avahi or a half-configured card leaves."""

    def local(network: Network, index: int) -> str:
        text = names_of_all(network, index)
        return text.replace("10.77.0.2 h1", "169.254.7.7 h1") if index == 1 else text

    network = make_hosts(2, hosts_file=local)
    network[1].shell("ip addr add 169.254.7.7/16 dev eth0")
    require_repair(network, no_variables(network), "DS-MESH-020")


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
