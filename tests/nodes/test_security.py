"""An unknown sender that reaches a job's ports cannot run code, join the job or stop it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import scripts
from nodes_kit import Case, finish_job, start_job

from ddpsafe._clock import Deadline
from ddpsafe._host import open_tcp_store
from ddpsafe._job.channel import (
    Alive,
    Channel,
    GarbledError,
    Hello,
    Lost,
    RefusedError,
)
from ddpsafe._job.secret import Signer
from ddpsafe._launcher.nodes.node_messages import (
    CODEC,
    LetRanksExit,
    NodeFacts,
    RankReport,
    error_of,
    rank_report,
    read_rank_report,
    round_result_of,
)
from ddpsafe._launcher.nodes.torchs_rendezvous import make_signed_backend
from ddpsafe._wire.messages import Position, Raised, Returned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hosts import Network

HELLO = Hello(mono_ns=1, wall_ns=2)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        """Store the file that the command creates."""
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        """Tell pickle to run the command."""
        return os.system, (f"touch {self._mark}",)


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Open node 0's end for three nodes."""
    listening = Channel.listen("127.0.0.1", secret=b"secret", scope="round", codec=CODEC, nnodes=3)
    yield listening
    listening.close()


def dial(
    channel: Channel | int, *, node: int = 1, secret: bytes = b"secret", about: object = None
) -> Channel:
    """Connect as a node, to a channel or to whatever is at a port."""
    return Channel.dial(
        ("127.0.0.1", channel if isinstance(channel, int) else channel.port),
        secret=secret,
        scope="round",
        codec=CODEC,
        node=node,
        hello=lambda: HELLO,
        deadline=Deadline.after(timedelta(seconds=5)),
        about=about,
    )


def read_events(channel: Channel, number: int) -> list[tuple[int, object]]:
    """Wait for this many events, besides the signs of life that each launcher sends every second."""
    heard: list[tuple[int, object]] = []
    for _ in Deadline.after(timedelta(seconds=10)).pauses_s():
        heard += [event for event in channel.events() if not isinstance(event[1], Alive)]
        if len(heard) >= number:
            break
        with_timeout = Deadline.after(timedelta(milliseconds=20))
        _wait(channel, with_timeout.remaining_s())
    return heard


def _wait(channel: Channel, limit_s: float) -> None:
    from multiprocessing.connection import wait

    wait([channel.fileno()], limit_s)


def test_nodes_that_know_the_secret_can_talk(channel: Channel) -> None:
    """In both directions and in order; the end of a connection is read after its messages."""
    node = dial(channel)
    node.send(LetRanksExit())
    assert read_events(channel, 2) == [(1, HELLO), (1, LetRanksExit())]
    channel.send(LetRanksExit(), to=1)
    assert read_events(node, 1) == [(0, LetRanksExit())]
    node.send(HELLO)
    node.close()
    (_, last), (_, lost) = read_events(channel, 2)
    assert last == HELLO
    assert isinstance(lost, Lost)
    assert not lost.is_silent


def test_a_sender_without_the_secret_is_refused(channel: Channel) -> None:
    """Node 0 reads nothing from it but who it says it is, and both ends know why it is refused."""
    with pytest.raises(RefusedError) as caught:
        dial(channel, secret=b"a guess", about={"hostname": "h9"})
    assert caught.value.refusal == "secret"
    assert channel.refused == [("secret", {"hostname": "h9"})]
    assert list(channel.events()) == []
    node = dial(channel)
    assert read_events(channel, 1) == [(1, HELLO)]
    node.close()


def test_node_0_tells_a_node_of_another_version(channel: Channel) -> None:
    """Whatever else that version sends: its version and who it is are read first."""
    proof = {"node": 1, "challenge": "x", "received": 0, "token": "t", "proof": "p"}
    greeting = {**proof, "version": "ddpsafe-99", "about": {"hostname": "h9"}}
    with socket.create_connection(("127.0.0.1", channel.port)) as sender, sender.makefile() as said:
        sender.sendall(json.dumps(greeting).encode() + b"\n")
        assert said.readline().startswith("ddpsafe-")
        assert said.readline() == "refused version\n"
    assert channel.refused == [("version", {"hostname": "h9"})]


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        (b"ddpsafe-99 nonce scope\n", "version"),
        (b"SSH-2.0-OpenSSH_9.6\n", "other-program"),
        (b"", "other-program"),
        (b"x" * 100_000, "other-program"),
        (b"ddpsafe-3 nonce another-scope\n", "other-program"),
        (b"ddpsafe-3 nonce round\nrefused secret\n", "secret"),
        (b"ddpsafe-3 nonce round\nrefused \xff\n", "secret"),
        (b"ddpsafe-3 nonce round\n" + b"0" * 64 + b" 0\n", "secret"),
    ],
    ids=lambda each: str(each[:24]),
)
def test_a_node_knows_why_what_answers_is_not_node_0(said: bytes, refusal: str) -> None:
    """Another program, another version, or one that does not know the secret."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = listening.accept()
                    with accepted:
                        accepted.sendall(said)
                        if said:
                            accepted.recv(1 << 16)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(RefusedError) as caught:
            dial(listening.getsockname()[1])
        assert caught.value.refusal == refusal
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("times", [0, 1])
def test_a_line_that_a_node_has_not_sent_ends_its_connection(channel: Channel, times: int) -> None:
    """Each is signed for one connection and its number in that, so none can be added or repeated."""
    with contextlib.closing(dial(channel)) as node:
        read_events(channel, 1)
        line = CODEC.pack(LetRanksExit())
        with node._lock:  # its thread signs the beats, and sends them in the same order
            connection = node._peers[0].connection
            assert connection is not None
            signed = connection.sending.sign(line) + line if times else b"0" * 32 + line
            connection.to_send += signed * (times + 1)
        node._wake()
        *before, (_, lost) = read_events(channel, times + 1)
        assert before == [(1, LetRanksExit())] * times
        assert isinstance(lost, Lost)
        assert lost.how == "garbled"


def test_a_node_rank_is_accepted_once(channel: Channel) -> None:
    """A second node with the same rank is refused, and the first one stays."""
    node = dial(channel)
    with pytest.raises((RefusedError, OSError)):
        dial(channel)
    assert channel.connected() == {1}
    node.close()


def greeting_with(name: str, value: object) -> bytes:
    """Return a greeting that has every field; one is not what a node sends."""
    usual = {"version": "ddpsafe-3", "node": 1, "challenge": "x", "received": 0, "token": "x"}
    return json.dumps({**usual, "proof": "0" * 64, "about": None, name: value}).encode() + b"\n"


UNKNOWN_SENDERS = [
    *(
        greeting_with(name, value)
        for name in ("version", "node", "challenge", "received", "token", "proof", "about")
        for value in ("\ud800", [1], {}, None, 1e300)
    ),
    b"GET / HTTP/1.1\r\n\r\n",
    pickle.dumps({"node": 1}) + b"\n",
    b"x" * 1_000_000,
    b'{"node": 1}\n',
    json.dumps({"node": 1, "challenge": "x", "proof": "0" * 64}).encode() + b"\n",
    b'{"node": Infinity, "challenge": "x", "proof": "x"}\n',
    b'{"node": 1, "challenge": "x", "proof": "\\udce9"}\n',
    b"[" * 100_000 + b"\n",
    b"\xff\xfe\n",
]


@pytest.mark.parametrize("said", UNKNOWN_SENDERS, ids=range(len(UNKNOWN_SENDERS)))
def test_an_unknown_sender_is_dropped_whatever_it_sends(channel: Channel, said: bytes) -> None:
    """A node that connects afterwards is still accepted."""
    with socket.create_connection(("127.0.0.1", channel.port)) as sender:
        try:
            sender.sendall(said)
            while sender.recv(4096):
                pass
        except OSError:
            pass
        node = dial(channel)
        assert read_events(channel, 1) == [(1, HELLO)]
        node.close()


def test_a_flood_of_connections_keeps_no_node_out(channel: Channel) -> None:
    """The number of silent unknown senders is limited, and connected nodes stay."""
    first = dial(channel, node=1)
    senders = [socket.create_connection(("127.0.0.1", channel.port)) for _ in range(400)]
    second = dial(channel, node=2)
    assert channel.connected() == {1, 2}
    for sender in senders:
        sender.close()
    for node in (first, second):
        node.close()


def test_a_flood_drops_no_node_that_is_slow_to_greet(channel: Channel) -> None:
    """What is dropped is from the host that has opened the most connections."""
    address = ("127.0.0.1", channel.port)
    slow = socket.create_connection(address, 5)
    flood = [
        socket.create_connection(address, 5, source_address=("127.0.0.2", 0)) for _ in range(400)
    ]
    dial(channel, node=2).close()  # node 0 has accepted all that came before
    slow.settimeout(0)
    assert slow.recv(1000)
    with pytest.raises(BlockingIOError):  # and not the end of the connection
        slow.recv(1)
    for each in (slow, *flood):
        each.close()


OUT_OF_DESCRIPTORS: Final = """
import os, resource, socket, time
from ddpsafe._launcher.nodes import node_messages
from ddpsafe._job.channel import Channel

node_messages.prepare()
channel, client = Channel.listen("127.0.0.1", secret=b"x", scope="x", codec=node_messages.CODEC, nnodes=2), socket.socket()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    client.connect(("127.0.0.1", channel.port))
began_s = time.process_time()
time.sleep(2)
print(time.process_time() - began_s)
for fd in taken:
    os.close(fd)
print(client.recv(64).split()[0].decode())
channel.close()
"""


def test_a_launcher_without_descriptors_waits_without_using_cpu() -> None:
    """New connections are accepted once a descriptor is free; without a pause, polling would spin."""
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS],
        capture_output=True,
        text=True,
        timeout=scripts.LIMIT_S,
        check=True,
    )
    spent_s, said = done.stdout.split()
    assert float(spent_s) < 1, done.stderr
    assert said == "ddpsafe-3"


@pytest.mark.parametrize(
    "line", [b"", b"{}", b'["Nothing", {}]', b'["Hello", {"mono_ns": "x"}]', b'["Hello"]', b"\xff"]
)
def test_garbage_is_not_a_message(line: bytes) -> None:
    """Every line is either one of the messages or refused with one exception."""
    with pytest.raises(GarbledError):
        CODEC.unpack(line)


def test_no_pickle_of_a_rank_crosses_the_network() -> None:
    """A rank's return value and exception stay on its node; only the facts travel."""
    at = Position(collectives=())
    returned = Returned(payload=b"a pickle", position=at)
    raised = Raised(
        type_name="ValueError",
        message="bad \udc80 batch",
        traceback="…",
        payload=b"a pickle",
        phase="running",
        where="train.py:3",
        position=at,
        at_ns=5,
    )
    for message in (returned, raised):
        line = CODEC.pack(rank_report(3, message))
        assert b"a pickle" not in line
        report = CODEC.unpack(line.rstrip(b"\n"))
        assert isinstance(report, RankReport)
        read = read_rank_report(report)
        assert isinstance(read, (Returned, Raised))
        assert not read.payload
        assert read.position == at


def test_a_state_of_the_rendezvous_is_checked_before_it_is_unpickled(tmp_path: Path) -> None:
    """An unknown sender's pickle in the store is a rendezvous error; torch alone would run it."""
    from torch.distributed.elastic.rendezvous import RendezvousStateError
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = open_tcp_store("127.0.0.1", port, listening=listening)
    mark = tmp_path / "mark"
    evil = pickle.dumps(Evil(mark))
    signer = Signer(b"secret", "job")
    backend = make_signed_backend(server, "job", signer)
    assert backend.set_state(pickle.dumps(_RendezvousState()))[2]
    for state in (evil, Signer(b"another", "job").sign("state", evil), signer.sign("state", evil)):
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
            C10dRendezvousBackend,
        )

        sender = C10dRendezvousBackend(server, "job")
        token = sender.get_state()[1]
        assert sender.set_state(state, token)[2]
        with pytest.raises(RendezvousStateError):
            backend.get_state()
    assert not mark.exists()


def test_the_signed_backend_can_load_every_state_of_this_torch() -> None:
    """Every class of a state is on the list of those that may be unpickled."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
        _NodeDesc,
        _RendezvousState,
    )

    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    server = open_tcp_store("127.0.0.1", port, listening=listening)
    state = _RendezvousState()
    state.participants[_NodeDesc("000000 host", 1, 0)] = 0
    state.wait_list.add(_NodeDesc("000001 host", 2, 0))
    import datetime as dt

    state.last_heartbeats[_NodeDesc("000000 host", 1, 0)] = dt.datetime.now(dt.timezone.utc)
    state.deadline = dt.datetime.now(dt.timezone.utc)
    backend = make_signed_backend(server, "job", Signer(b"secret", "job"))
    backend.set_state(pickle.dumps(state))
    assert pickle.loads(backend.get_state()[0]).round == state.round


def test_a_signature_is_valid_for_one_key_of_one_job() -> None:
    """A value cannot be moved to another key or to another job."""
    signer = Signer(b"secret", "job")
    signed = signer.sign("key", b"value")
    assert signer.verified("key", signed) == b"value"
    assert signer.verified("other", signed) is None
    assert Signer(b"secret", "job2").verified("key", signed) is None
    assert signer.verified("key", signed[:-1]) is None


def test_an_error_is_the_same_on_the_node_that_receives_it() -> None:
    """Class, message, exit code and facts are transmitted."""
    import ddpsafe

    error = ddpsafe.RankKilledError(
        ddpsafe.Explanation("rank 3 was killed", cause="c", fix="f", details=("d",), logs="h:/x"),
        rank=3,
        local_rank=1,
        hostname="h1",
        pid=7,
        exit_code=137,
        kind="killed",
        attempt=2,
        attempts=3,
    )
    copy = error_of(CODEC.unpack(CODEC.pack(round_result_of(error))))  # type: ignore[arg-type]  # a result
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert isinstance(copy, ddpsafe.RankKilledError)
    assert (copy.exit_code, copy.kind, copy.rank, copy.attempt) == (137, "killed", 3, 2)


def test_facts_of_a_node_survive_serialization() -> None:
    """A node introduces itself in JSON."""
    from ddpsafe._job.channel import from_json, to_json

    facts = NodeFacts(hostname="h", pid=1, address="10.0.0.1", nproc=2, settings={"a": "b"})
    assert from_json(NodeFacts, json.loads(json.dumps(to_json(facts)))) == facts


UNKNOWN_SENDER: Final = """
import json, os, pickle, resource, socket, sys, time

host, ports, mark = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {mark}",)


def say(port, data, times=1):
    with socket.create_connection((host, port), 5) as connection:
        connection.settimeout(2)
        try:
            for _ in range(times):
                connection.sendall(data)
            connection.recv(4096)
        except OSError:
            pass


for port in ports:
    for data in (b"GET / HTTP/1.1\\r\\n\\r\\n", pickle.dumps(Evil()) + b"\\n", b"\\xff" * 9, b"[" * 70000):
        say(port, data)
    say(port, b"x" * (1 << 20), times=1024)
    flood = [socket.create_connection((host, port), 5) for _ in range(2000)]
    time.sleep(2)
    for connection in flood:
        connection.close()
print("done", flush=True)
"""


def listening_of(pid: int) -> list[tuple[str, int]]:
    """Return where a process listens in its network namespace."""
    own = {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                host, _, port = local.partition(":")
                words = struct.pack(
                    f"={len(host) // 8}I",
                    *(int(host[each : each + 8], 16) for each in range(0, len(host), 8)),
                )
                found.append((socket.inet_ntop(family, words), int(port, 16)))
    return found


@pytest.mark.full
@pytest.mark.root
def test_a_job_ignores_whatever_an_unknown_host_sends_to_its_launchers(
    network: Network, tmp_path: Path
) -> None:
    """Garbage, pickles, a line of 1 GB and 2,000 connections, to every port of every launcher."""
    retry = {"attempts": 2, "on": ["killed"], "backoff_initial": 0, "jitter": 0}
    cases = [
        Case(name="held", what="held", fields={"timeouts": {"collective": 60}}),
        Case(name="kills", what="kill-until-2", rank=1, fields={"retry": retry}),
    ]
    launchers = start_job(network, cases, tmp_path, nproc=(1, 1))
    scripts.wait_until(
        lambda: len(list(tmp_path.glob("running-held-1-*"))) == 2,
        otherwise=lambda: [each.err for each in launchers],
    )
    mark = tmp_path / "code of the unknown sender ran"
    for node, launcher in enumerate(launchers):
        listening = listening_of(launcher.pid)
        address = network[node].address()
        assert {each for each, _ in listening} <= {address}, "bound to one address"
        assert node == 1 or len(listening) >= 3, "endpoint, control channel and store of the ranks"
        ports = [port for _, port in listening]
        command = [sys.executable, "-c", UNKNOWN_SENDER, address, json.dumps(ports), str(mark)]
        sender = network[2].start(command)
        out, err = sender.communicate(timeout=scripts.LIMIT_S)
        assert out == "done\n", err
    (tmp_path / "release-held").touch()
    for results in finish_job(network, cases, launchers):
        assert results["held"].get("attempts") == 1, results
        assert results["kills"].get("attempts") == 2, results
    assert not mark.exists()
