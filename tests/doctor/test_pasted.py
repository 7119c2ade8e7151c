"""Lines that the doctor prints, pasted on the hosts they name, repair the network: the job trains."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any, Final

import pytest
from hosts import names_as_debian, names_of_all, wait_for_state
from mesh_kit import PROGRAM, Told, agree, examine

if TYPE_CHECKING:
    from hosts import Network
    from mesh_kit import MakeHosts

pytestmark = pytest.mark.root

ON: Final = re.compile(r"    # on (.*)$")
Variables = dict[int, dict[str, str]]


def paste(network: Network, finding: dict[str, Any], env: Variables) -> None:
    """Do what the lines of a fix say, where they say it.

    What is exported or unset changes the variables of what is started on that host afterwards.
    """
    lines = [line.strip() for line in finding["fix"].splitlines() if line.startswith("    ")]
    assert lines, finding["fix"]
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
            out, err = started.communicate(timeout=30)
            assert started.returncode == 0, f"{command}: {err}"
            after = dict(each.split("=", 1) for each in out.split("\0") if "=" in each)
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                variables[name] = after.get(name, "")


def trains(network: Network, env: Variables) -> bool:
    """Tell whether a job of gloo, one rank on each host, sums up a tensor."""
    started = [
        host.start(
            [sys.executable, PROGRAM, "train", json.dumps({"timeout_s": 15})],
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
    outputs = [each.communicate(timeout=100) for each in started]
    return all("TRAINED" in out for out, _ in outputs)


def diagnose(network: Network, env: Variables) -> Told:
    """Run the doctor on all hosts with their variables."""
    each = {index: {"env": variables} for index, variables in env.items()}
    return agree(examine(network, each=each, timeout_s=10))


def require_repair(network: Network, env: Variables, *codes: str) -> None:
    """Find exactly these codes, paste their lines, and see the job train."""
    report = diagnose(network, env)
    assert report.codes() == [*codes], [each["fact"] for each in report.findings]
    for code in codes:
        paste(network, report.one(code), env)
    assert diagnose(network, env).codes() == []
    assert trains(network, env)


def nothing_set(network: Network) -> Variables:
    """Return variables for each host: none."""
    return {host.index: {} for host in network}


def with_docker(make_hosts: MakeHosts, size: int = 2, **kinds: object) -> Network:
    """Make hosts that all have a bridge to containers, whose network sorts before the hosts' own."""
    network = make_hosts(size, **{"nics": {"eth0": "192.168.5"}, **kinds})
    for host in network:
        host.add_bridge("docker0", "172.17.0.1/16")
    return network


def test_variable_set_on_one_host_is_unset_there(make_hosts: MakeHosts) -> None:
    """Not replaced by a bridge that every host has for itself, though its network is on all hosts."""
    network = with_docker(make_hosts)
    env = nothing_set(network)
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


def test_bridge_to_containers_on_all_hosts_is_not_the_network_that_joins_them(
    make_hosts: MakeHosts,
) -> None:
    """Every host would announce 172.17.0.1 and dial itself: no firewall is to be opened."""
    network = with_docker(make_hosts, 3)
    env: Variables = {host.index: {"GLOO_SOCKET_IFNAME": "docker0"} for host in network}
    require_repair(network, env, "DS-MESH-024")


def test_absent_interface_is_replaced_by_the_one_that_joins_the_hosts(
    make_hosts: MakeHosts,
) -> None:
    """With docker0 on all hosts, and a variable that is right on none but one."""
    network = with_docker(make_hosts)
    env: Variables = {host.index: {"GLOO_SOCKET_IFNAME": "ib0"} for host in network}
    require_repair(network, env, "DS-MESH-021")


def test_name_on_loopback_is_repaired_on_all_hosts_by_one_line(make_hosts: MakeHosts) -> None:
    """One finding for all of them: the cause is one."""
    network = make_hosts(3, hosts_file=names_as_debian)
    require_repair(network, nothing_set(network), "DS-MESH-020")


def test_address_that_a_second_host_has_too_is_taken_from_it(make_hosts: MakeHosts) -> None:
    """The roll-call has both tables of interfaces, and the duplicate is in them."""
    network = make_hosts(3)
    network[2].shell(f"ip addr add {network[1].address()}/24 dev eth0")
    require_repair(network, nothing_set(network), "DS-MESH-024")


@pytest.mark.parametrize("stateful", [pytest.param(True, marks=pytest.mark.soak), False])
def test_firewall_that_lets_nothing_out_is_opened_at_its_host(
    make_hosts: MakeHosts, *, stateful: bool
) -> None:
    """The healthy listeners are not told to open anything."""
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
    report = diagnose(network, nothing_set(network))
    assert report.codes() == ["DS-MESH-031"]
    finding = report.one("DS-MESH-031")
    assert "inet guard out" in finding["cause"]
    assert "# on h0" not in finding["fix"]
    assert "# on h1" not in finding["fix"]
    require_repair(network, nothing_set(network), "DS-MESH-031")


def test_firewall_that_drops_by_port_without_state_is_opened_at_its_host(
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
    report = diagnose(network, nothing_set(network))
    assert all("# on h1" not in each["fix"] for each in report.findings)
    require_repair(network, nothing_set(network), *report.codes())


@pytest.mark.parametrize(
    "mtu_bytes",
    [
        pytest.param(1390, marks=pytest.mark.soak),
        1300,
        pytest.param(1000, marks=pytest.mark.soak),
    ],
)
def test_size_of_packets_that_pass_is_found_and_advised_once(
    make_hosts: MakeHosts, mtu_bytes: int
) -> None:
    """Whatever size the tunnel between has; after the lines nothing is left to advise."""
    network = make_hosts(2)
    for host in network:
        host.shell("ip link set eth0 gso_max_segs 1")  # offload would carry what the wire does not
    network.switch.shell(f"ip link set {network[1].port('eth0')} mtu {mtu_bytes}")
    report = diagnose(network, nothing_set(network))
    assert report.codes() == ["DS-MESH-035"]
    found = report.one("DS-MESH-035")["details"]["mtu_bytes"]
    assert mtu_bytes - 8 <= found <= mtu_bytes
    require_repair(network, nothing_set(network), "DS-MESH-035")


def test_route_by_another_interface_is_taken_out(make_hosts: MakeHosts) -> None:
    """rp_filter drops what comes in by an interface that no answer would leave by: no cable is broken."""
    network = make_hosts(3, nics={"eth0": "10.77.0", "eth1": "10.88.0"})
    env: Variables = {host.index: {"GLOO_SOCKET_IFNAME": "eth0"} for host in network}
    network[1].shell("""
        echo 1 > /proc/sys/net/ipv4/conf/all/rp_filter
        echo 1 > /proc/sys/net/ipv4/conf/eth1/rp_filter
    """)
    network[2].shell("ip route add 10.77.0.2 dev eth1 src 10.77.0.3")
    require_repair(network, env, "DS-MESH-038")


def test_variable_that_reached_some_hosts_is_a_warning(make_hosts: MakeHosts) -> None:
    """All packets pass today, and a part of the job takes another network."""
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


def test_lost_packets_are_named_with_their_share(make_hosts: MakeHosts) -> None:
    """Connections hold and nothing is closed: the cause is neither a port nor a version."""
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
    report = diagnose(network, nothing_set(network))
    assert report.codes() == ["DS-MESH-037"], [each["fact"] for each in report.findings]
    finding = report.one("DS-MESH-037")
    assert finding["severity"] == "warning"
    assert "h1" in finding["hosts"]
    assert re.search(r"\(\d+ %\) had to be sent again", finding["fact"])


def test_address_translation_is_named_and_no_firewall(make_hosts: MakeHosts) -> None:
    """The endpoint leads to node rank 0 by an address that it does not have."""

    def outside(network: Network, index: int) -> str:
        text = names_of_all(network, index)
        return text.replace("10.77.0.1 h0", "34.0.0.1 h0") if index else text

    network = make_hosts(2, nics={"eth0": "10.77.0", "eth1": "10.88.0"}, hosts_file=outside)
    # Each host has a network of its own, which no packet of the other finds.
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


def test_bridge_without_a_container_is_replaced_by_one_finding_for_all_hosts(
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
