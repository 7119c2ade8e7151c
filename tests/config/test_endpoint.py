"""Endpoints and interface names: validated without network access, resolved under a deadline."""

from __future__ import annotations

import ipaddress
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from texts import any_text

from ddpsafe import ConfigError, Rendezvous
from ddpsafe._config.endpoint import Endpoint, complete_endpoint, parse_endpoint
from ddpsafe._config.interfaces import (
    GLOO,
    NCCL,
    check_interface,
    check_interfaces,
    find_shape_problem,
)
from ddpsafe._host import Interface, expand_nccl, list_names

EXISTING = ["lo", "eth0", "eth1", "docker0"]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu-01:29400", "gpu-01", 29400),
        ("10.0.0.7:1024", "10.0.0.7", 1024),
        ("job-0.svc.cluster.local:65535", "job-0.svc.cluster.local", 65535),
        ("my_service:29400", "my_service", 29400),
        ("2001:db8::1:29400", "2001:db8::1", 29400),
        ("[2001:db8::1]:29400", "2001:db8::1", 29400),
        ("[2001:DB8:0:0::1]:29400", "2001:db8::1", 29400),
        ("[::ffff:10.66.0.1]:29400", "10.66.0.1", 29400),
        ("2001:db8::1:2940", "2001:db8::1", 2940),
        ("1:2:3:4:5:6:7:8:29400", "1:2:3:4:5:6:7:8", 29400),
        ("[::1]:0", "::1", 0),
        ("::1:0", "::1", 0),
        ("localhost:0", "localhost", 0),
    ],
)
def test_valid_endpoints_are_parsed(text: str, host: str, port: int) -> None:
    """The last colon separates the port, with or without brackets around an IPv6 address."""
    endpoint = parse_endpoint(text)
    assert endpoint == Endpoint(host=host, port=port)
    assert parse_endpoint(str(endpoint)) == endpoint
    assert Rendezvous(endpoint=text).endpoint == str(endpoint)


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        ("gpu-01", "gpu-01:29400"),
        ("10.0.0.7", "10.0.0.7:29400"),
        ("fd77::1", "[fd77::1]:29400"),
        ("[fd77::1]", "[fd77::1]:29400"),
        ("1:2:3:4:5:6:7:8", "[1:2:3:4:5:6:7:8]:29400"),
        ("gpu-01:29500", "gpu-01:29500"),
        ("fd77::1:29500", "fd77::1:29500"),
        ("[fd77::1]:29500", "[fd77::1]:29500"),
        (":29500", ":29500"),
    ],
)
def test_host_without_a_port_gets_torchruns_default(text: str, completed: str) -> None:
    """If the last group of an IPv6 address could be a port, the host alone needs brackets."""
    assert complete_endpoint(text) == completed


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gpu-01", "port is missing"),
        (":29400", "host is missing"),
        ("gpu-01:", "port is missing"),
        ("", "port is missing"),
        (" gpu-01:29400", "blanks"),
        ("gpu-01:29400\n", "blanks"),
        ("[gpu-01]:29400", "brackets"),
        ("[10.0.0.7]:29400", "brackets"),
        ("[2001:db8::1:29400", "brackets"),
        ("[[2001:db8::1]]:29400", "brackets"),
        ("[]:29400", "brackets"),
        ("[2001:db8::1]29400", "brackets"),
        ("[2001:db8::1]", "port is missing"),
        ("[2001:db8::1]:", "port is missing"),
        ("fd77::1", "port is missing"),
        ("::1", "port is missing"),
        ("fd77::1%eth0:29400", "%eth0 names an interface of one host"),
        ("[fd77::1%eth0]:29400", "%eth0 names an interface of one host"),
        ("[fe80::1%eth0]:29400", "link-local"),
        ("[::]:29400", "any address"),
        ("[2001:db8::1]:80", "need root"),
        ("tcp://gpu-01:29400", "URL"),
        ("6841231:29400", "0.104.99.143"),
        ("127.1:29400", "not an IPv4 address"),
        ("0x7f.0.0.1:29400", "not an IPv4 address"),
        ("010.0.0.1:29400", "not an IPv4 address"),
        ("300.1.1.1:29400", "not an IPv4 address"),
        ("gpu..01:29400", "neither a host name"),
        ("gpü:29400", "neither a host name"),
        ("-gpu:29400", "neither a host name"),
        ("2001:db8:29400", "neither a host name"),
        ("0.0.0.0:29400", "any address"),
        ("0.1.2.3:29400", "any address"),
        (":::29400", "any address"),
        ("169.254.1.1:29400", "link-local"),
        ("fe80::1:29400", "link-local"),
        ("::ffff:169.254.1.1:29400", "link-local"),
        ("224.0.0.1:29400", "many hosts"),
        ("gpu-01:80", "need root"),
        ("gpu-01:65536", "end at 65535"),
        ("gpu-01:http", "not a port number"),
        ("gpu-01:-1", "not a port number"),
        ("gpu-01:٢٩٤٠٠", "not a port number"),
    ],
)
def test_invalid_endpoints_are_refused(text: str, hint: str) -> None:
    """Each pitfall is named, and answered with a form that works."""
    with pytest.raises(ValidationError) as caught:
        parse_endpoint(text)
    (detail,) = caught.value.errors()
    assert hint in detail["msg"]
    assert detail["ctx"]["write"]


def test_host_and_port_are_checked_together() -> None:
    """A wrong host does not hide a wrong port."""
    with pytest.raises(ValidationError) as caught:
        parse_endpoint("0.0.0.0:80")
    assert caught.value.error_count() == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "\ud800", "a b"])
def test_a_wrong_host_is_no_example_of_a_right_one(host: str) -> None:
    """Nor does the error hold characters that have no encoding."""
    with pytest.raises(ValidationError) as caught:
        parse_endpoint(f"{host}:80")
    for error in caught.value.errors():
        assert host not in error["ctx"]["write"]


ADDRESSES = st.builds(
    "{}:{}".format,
    st.text("0123456789abcdefx.:[]-", max_size=30),
    st.text(string.digits, max_size=9),
)


@given(any_text(max_size=40) | ADDRESSES | st.builds("{}:{}".format, any_text(), any_text()))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """Arbitrary text raises only this one error, and never uses the network."""
    try:
        endpoint = parse_endpoint(text)
    except ValidationError as refused:
        for error in refused.errors():
            error["ctx"]["write"].encode()
        return
    assert endpoint.port == 0 or 1024 <= endpoint.port <= 65535


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (GLOO, "eth0"), (GLOO, "eth0,eth1"), (NCCL, "eth"), (NCCL, "=eth0"), (NCCL, "^docker,lo"),
        (NCCL, "^=lo"),
    ],
)  # fmt: skip
def test_interface_lists_follow_the_syntax_of_their_library(variable: str, value: str) -> None:
    """Gloo takes literal names; NCCL takes prefixes after an optional '^' and '='."""
    assert find_shape_problem(variable, value) is None
    assert list(check_interfaces({variable: value}, existing=EXISTING)) == []


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        (GLOO, "^lo", "literal names only"),
        (GLOO, "=eth0", "literal names only"),
        (GLOO, "eth0, eth1", "blanks"),
        (GLOO, "10.0.0.1", "IP address"),
        (GLOO, "eth0,", "empty"),
        (NCCL, "eth0,^lo", "very start"),
        (NCCL, "^", "empty"),
        (NCCL, "a-name-that-is-too-long", "15 characters"),
    ],
)
def test_interface_lists_in_the_wrong_syntax_are_refused(
    variable: str, value: str, hint: str
) -> None:
    """One library's syntax is a literal name to the other."""
    problem = find_shape_problem(variable, value)
    assert problem is not None
    assert hint in problem.why


@pytest.mark.parametrize(("variable", "value"), [(GLOO, "eth7"), (GLOO, "eth"), (NCCL, "ib")])
def test_missing_interface_lists_the_existing_ones(variable: str, value: str) -> None:
    """The user sees which names this machine has."""
    (problem,) = check_interfaces({variable: value}, existing=EXISTING)
    assert all(name in problem.why for name in EXISTING)


def test_exclusion_of_all_interfaces_is_refused() -> None:
    """NCCL without an interface fails late; here it fails at once."""
    assert len(list(check_interfaces({NCCL: "^lo"}, existing=["lo"]))) == 1
    assert expand_nccl("^=lo", ["lo", "lo1"]) == ["lo1"]
    assert expand_nccl("eth", EXISTING) == ["eth0", "eth1"]


def test_interfaces_of_this_machine_are_found() -> None:
    """Every machine has at least one, and an invented name is reported as missing."""
    own = list_names()[0]
    assert check_interface(own) is None
    problem = check_interface("absent0")
    assert problem is not None
    assert own in problem.why


@pytest.mark.parametrize(
    ("name", "network", "is_candidate"),
    [
        ("eth0", "10.77.0.1/24", True),
        ("docker0", "172.17.0.1/16", False),
        ("lo", "10.77.0.1/32", False),
        ("weave", "127.0.0.5/8", False),
    ],
)
def test_only_externally_reachable_interfaces_are_proposed(
    name: str, network: str, *, is_candidate: bool
) -> None:
    """Neither loopback nor a container bridge of this host is a candidate."""
    networks = (ipaddress.ip_interface(network),)
    found = Interface(name=name, networks=networks, mtu_bytes=1500, is_running=True)
    assert found.is_candidate is is_candidate
    assert found.addresses == (network.split("/", maxsplit=1)[0],)


@pytest.mark.parametrize(
    ("ports", "taken"),
    [
        ("29401-29420", "29401-29420"),
        (" 29401 - 29402 ", "29401-29402"),
        *(
            (each, None)
            for each in ("", "29401", "29402-29401", "80-90", "1-99999", "a-b", "5-6-7")
        ),
    ],
)
def test_a_range_of_ports_has_two_at_least(ports: str, taken: str | None) -> None:
    """Node 0 needs one for the ranks' store and one for MASTER_PORT; below 1024, ports need root."""
    if taken is not None:
        assert Rendezvous(ports=ports).ports == taken
        return
    with pytest.raises(ConfigError, match="29401-29420"):
        Rendezvous(ports=ports)
