"""Names, ports, interfaces and variables, on hosts that the tests build in namespaces."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import doctor_kit
import pytest
import scripts
from doctor_kit import examine, lines_to_copy, needs_namespaces

from ddpsafe import doctor
from ddpsafe.doctor import Finding, Report

TWO_NETWORKS: Final = """
ip link add eth0 type veth peer name eth0-peer
ip link add ib0 type veth peer name ib0-peer
for each in eth0 ib0 eth0-peer ib0-peer; do ip link set $each up; done
ip addr add 10.77.0.1/24 dev eth0
ip addr add 10.88.0.1/24 dev ib0
"""
"""A host with two networks, neither of which leads out, and only link-local IPv6."""


def one_of_two(endpoint: str) -> dict[str, Any]:
    """Return the fields of the second of two nodes."""
    return {"nnodes": 2, "node_rank": 1, "rendezvous": {"endpoint": endpoint}}


OF_LAUNCHERS: Final = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


# Interfaces.


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"GLOO_SOCKET_IFNAME": "ib7"}, "no interface of this machine is called 'ib7'"),
        ({"GLOO_SOCKET_IFNAME": "^docker0"}, "belong to NCCL_SOCKET_IFNAME"),
        ({"GLOO_SOCKET_IFNAME": "127.0.0.1"}, "IP address"),
        ({"DDPSAFE_RENDEZVOUS__INTERFACE": "ib7"}, "no interface of this machine is called 'ib7'"),
    ],
)
def test_interface_variable_is_checked_by_the_rules_of_its_library(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finding names the mistake, and its line to copy repairs it."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (found,) = [each for each in doctor.run(checks={"NET"}).failed if each.code == "DS-NET-001"]
    assert says in found.fact
    (line,) = lines_to_copy({"fix": found.fix})
    name, _, value = line.removeprefix("export ").partition("=")
    assert name in variables
    monkeypatch.setenv(name, value)
    assert doctor.run(checks={"NET"}).healthy


def test_variable_of_an_unused_library_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's profile may set NCCL's interface although only gloo runs."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib7")
    assert doctor.run(checks={"NET"}, backend="gloo").healthy
    assert not doctor.run(checks={"NET"}, backend="nccl").healthy


IB0: Final = {"env": {"GLOO_SOCKET_IFNAME": "ib0"}}
# fmt: off
NETWORKS: Final[dict[str, tuple[str, dict[str, Any], str, str, str, list[str]]]] = {
    # the host, its variables and fields, the code, its severity, a part of its text, and the lines to copy
    "an interface that is down": (TWO_NETWORKS + "ip link set ib0 down", IB0,
        "DS-NET-002", "failed", "ib0, chosen by GLOO_SOCKET_IFNAME, is down", ["ip link set dev ib0 up"]),
    "an interface without an address": (TWO_NETWORKS + "ip addr flush dev ib0", IB0,
        "DS-NET-002", "failed", "has no address", []),
    "an interface that does not lead to the endpoint": (TWO_NETWORKS, {**IB0, **one_of_two("10.77.0.9:29500")},
        "DS-NET-003", "warning", "eth0 leads to the rendezvous endpoint 10.77.0.9", ["export GLOO_SOCKET_IFNAME=eth0"]),
    "and the one that does": (TWO_NETWORKS,
        {"env": {"GLOO_SOCKET_IFNAME": "eth0"}, **one_of_two("10.77.0.9:29500")}, "", "", "", []),
    "an endpoint without a route": (TWO_NETWORKS, one_of_two("10.99.0.9:29500"), "DS-NET-003", "failed", "no route", []),
    # smaller than the minimum of IPv6
    "a small MTU": (TWO_NETWORKS + "ip link set ib0 mtu 1000", {}, "DS-NET-004", "warning", "MTU of ib0 is 1000", []),
    # the line to copy names the network that leads to the endpoint
    "several networks of one of two nodes": (TWO_NETWORKS, one_of_two("10.88.0.9:29500"),
        "DS-NET-005", "warning", "", ["export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME='=ib0'"]),
    "several networks of a single node": (TWO_NETWORKS, {}, "", "", "", []),
    # one node needs no IPv6, no default route and no network
    "loopback alone of one of two nodes": ("", one_of_two("10.77.0.9:29500"), "DS-NET-006", "failed", "", []),
}
# fmt: on


@needs_namespaces
@pytest.mark.parametrize("what", NETWORKS)
def test_interfaces_of_a_host_are_checked(what: str) -> None:
    """What a variable names, or the routes choose, has to lead to the other nodes."""
    host, fields, code, severity, says, lines = NETWORKS[what]
    found = examine("NET", host=host, **fields)
    if not code:
        assert found.problems() == []
        return
    assert (found.severity(code), says in found.of(code)["fact"]) == (severity, True), found.of(
        code
    )
    assert lines in ([], lines_to_copy(found.of(code)))


@needs_namespaces
def test_host_with_only_loopback_is_healthy_as_a_single_node() -> None:
    """It needs no IPv6, no default route and no network."""
    assert examine("NET", "NAME", "PORT", host="").problems() == []


@needs_namespaces
def test_loopback_that_is_down_fails_and_the_copied_line_enables_it() -> None:
    """A new network namespace starts like that."""
    found = examine("NET", host=("ip link set lo down"))
    assert found.severity("DS-NET-007") == "failed"
    (line,) = lines_to_copy(found.of("DS-NET-007"))
    assert examine("NET", host=(f"ip link set lo down; {line}")).problems() == []


PORTS: Final = """
mount -t tmpfs none /mnt
for each in /sys/class/*; do mkdir /mnt/${each##*/}; mount --bind $each /mnt/${each##*/}; done
port() {
    mkdir -p /mnt/infiniband/$1/ports/1
    cd /mnt/infiniband/$1/ports/1
    echo "$2" > state; echo "400 Gb/sec (4X NDR)" > rate; echo InfiniBand > link_layer
    cd /
}
%s
mount --rbind /mnt /sys/class
"""
"""A host whose kernel lists InfiniBand ports; the file formats are those of Linux."""


@needs_namespaces
@pytest.mark.parametrize(
    ("ports", "variables", "says"),
    [
        ("port mlx5_0 '4: ACTIVE'; port mlx5_1 '4: ACTIVE'", {}, ""),
        ("port mlx5_0 '4: ACTIVE'; port mlx5_1 '1: DOWN'", {}, "mlx5_1:1 is DOWN: NCCL does not use it"),
        ("port mlx5_0 '2: INIT'; port mlx5_1 '1: DOWN'", {},
            "mlx5_0:1 is INIT, mlx5_1:1 is DOWN: NCCL does not use them"),
        ("port mlx5_0 '4: ACTIVE'; port mlx5_1 '1: DOWN'", {"NCCL_IB_HCA": "=mlx5_0:1"}, ""),
        ("port mlx5_0 '4: ACTIVE'; port mlx5_1 '1: DOWN'", {"NCCL_IB_HCA": "^mlx5_1"}, ""),
        ("port mlx5_0 '4: ACTIVE'", {"NCCL_IB_HCA": "bnxt"}, "NCCL_IB_HCA=bnxt names no device"),
        ("port mlx5_0 '1: DOWN'", {"NCCL_IB_DISABLE": "1"}, ""),
    ],
)  # fmt: skip
def test_infiniband_device_that_nccl_cannot_use_is_reported(
    ports: str, variables: dict[str, str], says: str
) -> None:
    """NCCL uses TCP without a word, or fewer ports than the other hosts."""
    found = examine("NET", host=TWO_NETWORKS + PORTS % ports, env=variables, backend="nccl")
    told = [problem for problem in found.problems() if "DS-NET-008" in problem]
    assert len(told) == bool(says)
    assert says in "".join(told)


# Names.


def _with_hosts(tmp_path: Path, text: str, more: str = "") -> str:
    (tmp_path / "hosts").write_text(text, encoding="utf-8")
    return f"{TWO_NETWORKS}\nmount --bind {tmp_path}/hosts /etc/hosts\nhostname gpu-01\n{more}"


@needs_namespaces
@pytest.mark.parametrize(
    "line",
    ["127.0.1.1 gpu-01", "127.0.0.1 gpu-01.lan gpu-01 gpu-01-ib", ""],
    ids=["debian", "localhost", "unknown"],
)
def test_hostname_on_loopback_fails_only_with_several_nodes(line: str, tmp_path: Path) -> None:
    """Debian's installer is the classic cause; each copied line repairs it."""
    there = _with_hosts(tmp_path, f"127.0.0.1 localhost\n{line}\n")
    fields = one_of_two("10.77.0.9:29500")
    found = examine("NAME", host=there, **fields)
    assert found.severity("DS-NAME-001") == "failed"
    export, correct = lines_to_copy(found.of("DS-NAME-001"))
    name, _, value = export.removeprefix("export ").partition("=")
    assert examine("NAME", host=there, env={name: value}, **fields).problems() == []
    assert examine("NAME", host=there).problems() == []
    assert examine("NAME", host=f"{there}{correct}", **fields).problems() == []
    after = (tmp_path / "hosts").read_text(encoding="utf-8")
    assert "127.0.0.1 localhost\n" in after
    assert ("gpu-01-ib" in after) is ("gpu-01-ib" in line)


@needs_namespaces
def test_endpoint_that_is_unknown_or_loopback_here_fails(tmp_path: Path) -> None:
    """A node that resolves the master's name to itself waits for itself."""
    there = _with_hosts(tmp_path, "127.0.0.1 localhost gpu-00\n10.77.0.1 gpu-01\n")
    wrong = examine("NAME", host=there, **one_of_two("gpu-00:29500"))
    unknown = examine("NAME", host=there, **one_of_two("gpu-77:29500"))
    assert "would wait for itself" in wrong.of("DS-NAME-002")["fact"]
    assert "does not resolve here" in unknown.of("DS-NAME-002")["fact"]


@needs_namespaces
def test_silent_name_server_is_found_within_seconds(tmp_path: Path) -> None:
    """A server that never answers delays every start by 10 to 20 s."""
    (tmp_path / "resolv.conf").write_text("nameserver 10.77.0.1\n", encoding="utf-8")
    more = f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
    there = _with_hosts(tmp_path, "127.0.0.1 localhost\n10.77.0.1 gpu-01\n", more)
    mute = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('10.77.0.1', 53))"
    found = examine("NAME", host=there, before=mute, **one_of_two("10.77.0.9:29500"))
    assert found.severity("DS-NAME-003") == "warning"
    assert found.report["took_s"] < 6


# Ports.


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Listen on a port."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def test_taken_port_is_reported_with_its_owner(taken_port: int) -> None:
    """The process that has it is named, and a free port passes."""
    fields: dict[str, Any] = {"rendezvous": {"endpoint": f"localhost:{taken_port}"}}
    (found,) = doctor.run(checks={"PORT"}, **fields).failed
    assert found.code == "DS-PORT-001"
    assert f"process {os.getpid()} of " in found.fact
    assert found.details["pid"] == os.getpid()


def test_port_of_another_host_is_not_checked_here(taken_port: int) -> None:
    """Only that host can find out whether it is free."""
    fields = one_of_two(f"192.0.2.77:{taken_port}")
    report = doctor.run(checks={"PORT"}, mesh=False, **fields)
    assert "DS-PORT-001" not in {each.code for each in report.findings}


@needs_namespaces
def test_ephemeral_port_and_a_narrow_range_are_reported() -> None:
    """Both come from the same setting; the copied line widens it."""
    there = "echo '20000 20100' > /proc/sys/net/ipv4/ip_local_port_range"
    fields: dict[str, Any] = {"rendezvous": {"endpoint": "localhost:20050"}}
    found = examine("PORT", host=there, **fields)
    assert found.severity("DS-PORT-002") == "warning"
    assert "only 101 ephemeral ports" in found.of("DS-PORT-003")["fact"]
    (line,) = lines_to_copy(found.of("DS-PORT-003"))
    widened = f"echo '20000 20100' > /proc/sys/net/ipv4/ip_local_port_range; {line}"
    assert examine("PORT", host=widened, **fields).problems() == []


# Facts that the nodes compare.


@needs_namespaces
def test_fingerprint_has_networks_and_versions_and_no_secret(tmp_path: Path) -> None:
    """The other nodes receive plain data without passwords."""
    data, torch = tmp_path / "data", tmp_path / "torch"
    data.mkdir()
    (data / "a.bin").write_bytes(b"1")
    torch.mkdir()
    (torch / "__init__.py").touch()
    # As in a build for CUDA, whose version need not have it.
    (torch / "version.py").write_text("__version__ = '2.13.0'\ncuda: str | None = '13.0'\n")
    env = {
        "NCCL_PASSWORD": "correct-horse",
        "NCCL_NET_PLUGIN": "https://user:battery@host/x",
        "NCCL_IB_HCA": "mlx5",
    }
    program = f"""
from ddpsafe import LaunchConfig
from ddpsafe.doctor._fingerprint import fingerprint
import sys, json, pathlib
sys.path.insert(0, "{tmp_path}")
found = fingerprint(LaunchConfig(data_paths={{"train": "{data}"}}))
pathlib.Path("{tmp_path}/found.json").write_text(json.dumps(found))
"""
    host = TWO_NETWORKS + PORTS % "port mlx5_0 '4: ACTIVE'; port mlx5_1 '1: DOWN'"
    examine("ENV", host=host, before=program, env=env)
    text = (tmp_path / "found.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert found["data_paths"]["train"]["entries"] == 1
    assert found["env"]["NCCL_IB_HCA"] == "mlx5"
    assert found["versions"]["cuda"] == "13.0"
    assert found["infiniband"] == {
        "mlx5_0:1": "ACTIVE InfiniBand 400 Gb/sec (4X NDR)",
        "mlx5_1:1": "DOWN",
    }
    assert "correct-horse" not in text
    assert "battery" not in text


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("argument", 'env={"GLOO_SOCKET_IFNAME": '),
        ("shell", "export GLOO_SOCKET_IFNAME="),
        ("variable", "export DDPSAFE_ENV__GLOO_SOCKET_IFNAME="),
        ("file", "GLOO_SOCKET_IFNAME = "),
    ],
)
def test_fix_fits_the_place_where_the_variable_was_set(
    place: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export has no effect where env= or the file overrides the shell."""
    name, wrong = "GLOO_SOCKET_IFNAME", "no-such0"
    monkeypatch.chdir(tmp_path)
    if place == "file":
        table = f'[tool.ddpsafe.env]\n{name} = "{wrong}"\n'
        (tmp_path / "pyproject.toml").write_text(table, encoding="utf-8")
    elif place != "argument":
        monkeypatch.setenv(name if place == "shell" else f"DDPSAFE_ENV__{name}", wrong)
    fields: Any = {"env": {name: wrong}} if place == "argument" else {}
    report = doctor.run(checks={"NET"}, backend="gloo", **fields)
    (found,) = [each for each in report.failed if each.code == "DS-NET-001"]
    assert any(each.startswith(line) for each in lines_to_copy({"fix": found.fix})), found.fix


def worst(report: Report, code: str) -> Finding:
    """Return the worst finding of a code."""
    return next(finding for finding in report.findings if finding.code == code)


@pytest.mark.parametrize(
    ("variables", "code", "severity", "says"),
    [
        ({"RANK": "0"}, "DS-ENV-001", "failed", "WORLD_SIZE is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "DS-ENV-001", "failed", "RANK is 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "DS-ENV-001", "failed", "not an integer"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "DS-ENV-002", "warning", "starts none"),
        ({"WORLD_SIZE": "2"}, "DS-ENV-002", "warning", "WORLD_SIZE='2'"),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, "DS-ENV-002", "warning", "AGENT_STORE"),
        ({"MASTER_ADDR": "gpu-01\n"}, "DS-ENV-003", "failed", "blanks or line breaks"),
        ({"MASTER_ADDR": "[fd00::1]"}, "DS-ENV-003", "warning", "brackets"),
        ({"MASTER_ADDR": "[gpu-01]"}, "DS-ENV-003", "failed", "brackets"),
        ({"MASTER_ADDR": "gpu-01:29500"}, "DS-ENV-003", "failed", "neither a host name"),
        ({"MASTER_ADDR": "6841231"}, "DS-ENV-003", "failed", "0.104.99.143"),
        ({"MASTER_ADDR": "tcp://gpu-01"}, "DS-ENV-003", "failed", "URL"),
        ({"MASTER_ADDR": "169.254.3.4"}, "DS-ENV-003", "failed", "link-local"),
        ({"MASTER_PORT": "80000"}, "DS-ENV-004", "failed", "1024 to 65535"),
        ({"MASTER_PORT": "29500 "}, "DS-ENV-004", "failed", "not a number"),
        ({"OMP_NUM_THREADS": "many"}, "DS-ENV-005", "warning", "not a number"),
        ({"OMP_NUM_THREADS": "4096"}, "DS-ENV-005", "warning", "cores"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAILS"}, "DS-ENV-006", "failed", "not a level"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "DS-ENV-006", "warning", "waits for the kernel"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1"}, "DS-ENV-006", "warning", "old name"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "1 2"}, "DS-ENV-006", "warning", "old name"),
    ],
)
def test_variable_is_reported_and_the_copied_fix_repairs_it(
    variables: dict[str, str], code: str, severity: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finding names the variable; in a shell that ran its lines the check passes."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = worst(doctor.run(checks={"ENV"}), code)
    assert (found.severity, says in found.fact) == (severity, True), found
    lines = [line.strip() for line in found.fix.splitlines() if line.startswith("    ")]
    # Where several lines are alternatives, the last one that runs decides.
    script = "\n".join([*lines, "env -0"])
    shell = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    after = dict(entry.split("=", 1) for entry in shell.stdout.split("\0") if "=" in entry)
    for name in variables.keys() | OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
        if name in after:
            monkeypatch.setenv(name, after[name])
    assert worst(doctor.run(checks={"ENV"}), code).severity == "ok", lines


def test_torch_really_rejects_the_debug_level_that_is_reported(tmp_path: Path) -> None:
    """An unknown TORCH_DISTRIBUTED_DEBUG ends a process that imports torch."""
    script = scripts.write(
        tmp_path,
        "script.py",
        """
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        """,
    )
    run = scripts.Script(
        [str(script)], folder=tmp_path, env={"TORCH_DISTRIBUTED_DEBUG": "DETAILS"}
    ).end()
    assert run.code != 0


def test_loopback_cannot_be_the_master_of_two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single node may use loopback as its endpoint; two may not."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    two = {"nnodes": 2, "node_rank": 0, "rendezvous": {"endpoint": "10.0.0.7:29500"}}
    alone = doctor.run(checks={"ENV"})
    together = doctor.run(checks={"ENV"}, mesh=False, **two)  # type: ignore[arg-type]
    assert worst(alone, "DS-ENV-003").severity == "ok"
    assert "would connect to itself" in worst(together, "DS-ENV-003").fact


def test_an_unreadable_configuration_is_a_finding(tmp_path: Path) -> None:
    """The finding names the field, and the doctor continues with the defaults."""
    text = "[tool.ddpsafe]\nnproc_per_node = 0\n"
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    report = doctor.run(checks={"ENV", "PATH"})
    found = worst(report, "DS-ENV-007")
    assert "nproc_per_node" in found.fact
    assert worst(report, "DS-PATH-003").severity == "ok"


def test_variables_of_a_running_launcher_are_not_leftovers() -> None:
    """A rank of torchrun has all its variables, and no finding asks to unset them."""
    env = {
        "TORCHELASTIC_RUN_ID": "7", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    found = doctor_kit.examine("ENV", "PORT", env=env)
    assert found.problems() == []
    assert "Started by torchrun as rank 1" in found.of("DS-ENV-001")["fact"]
