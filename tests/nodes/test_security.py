"""An unknown sender that reaches a job's ports cannot run code, join the job or stop it."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from cut_wire import HELLO, dial, listen
from hosts import Network
from nodes_kit import Case, await_files, finish_job, retrying, start_job

from ddpsafe._clock import Deadline
from ddpsafe._job import channel as channel_module
from ddpsafe._job.channel import Alive, Channel, GarbledError, Lost, RefusedError
from ddpsafe._job.endpoint import rank_store
from ddpsafe._launcher.nodes import torchs_rendezvous
from ddpsafe._launcher.nodes.node_messages import (
    CODEC,
    Answered,
    Ask,
    LetRanksExit,
    RankReport,
    Warned,
    rank_report,
    read_rank_report,
)
from ddpsafe._launcher.nodes.torchs_rendezvous import SharedState
from ddpsafe._launcher.processes.store_folder import reserved_port
from ddpsafe._limits import LOSS_S
from ddpsafe._wire.messages import Position, Raised, Returned


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


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


def test_a_sender_without_the_secret_is_refused(channel: Channel) -> None:
    """Node 0 reads nothing from it but who it says it is, and both ends know why it is refused."""
    with pytest.raises(RefusedError) as caught:
        dial(channel.port, secret=b"a guess", about={"hostname": "h9"})
    assert caught.value.refusal == "secret"
    assert channel.refused == [("secret", {"hostname": "h9"})]
    assert list(channel.events()) == []
    node = dial(channel.port)
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
        (b"ddpsafe-4 nonce another-scope\n", "other-program"),
        (b"ddpsafe-4 nonce round\nrefused secret\n", "secret"),
        (b"ddpsafe-4 nonce round\nrefused \xff\n", "secret"),
        (b"ddpsafe-4 nonce round\n" + b"0" * 64 + b" 0\n", "secret"),
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


@pytest.mark.parametrize(
    "letter", ["x", "\N{CJK UNIFIED IDEOGRAPH-4E2D}", "\N{SLIGHTLY SMILING FACE}", "\udc80"]
)
def test_a_message_of_any_size_arrives(channel: Channel, letter: str) -> None:
    """In both directions and in order, whatever script its text is in: it comes in pieces."""
    node = dial(channel.port)
    assert read_events(channel, 1) == [(1, HELLO)]
    for size in (1, channel_module._PIECE_BYTES, 20 << 20):
        message = Warned(text=letter * (size // len(json.dumps(letter)) + 1))
        node.send(message)
        node.send(LetRanksExit())
        assert read_events(channel, 2) == [(1, message), (1, LetRanksExit())]
        channel.send(message)
        assert read_events(node, 1) == [(0, message)]
    node.close()


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"\x00\xce\xf7\x85\x3c", "a client of torch's TCPStore, such as torchrun"),
        (b"GET / HTTP/1.1\r\nHost: h0\r\n\r\n", "an HTTP client"),
        (b"\x16\x03\x01\x02\x00", "a TLS client"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an SSH client"),
        (b"", "a port scanner or a health check: it sent nothing"),
        (b"hello\n", "a program that does not speak ddpsafe's protocol"),
    ],
)
def test_another_program_at_the_endpoint_is_named_once(
    said: bytes, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With its address and what it seems to be; it is closed, and the nodes of the job stay."""
    channel = listen(warns=True)
    port = channel.port
    with contextlib.closing(channel), contextlib.closing(dial(port)):
        for _ in range(3):
            with socket.create_connection(
                ("127.0.0.1", port), 5, source_address=("127.0.0.9", 0)
            ) as sender:
                sender.sendall(said)
                sender.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    while sender.recv(4096):
                        pass
        assert channel.connected() == {1}
    assert caplog.text.count("is not a node of it") == 1
    assert f"127.0.0.9 reached the endpoint of this job, port {port}, and" in caplog.text
    assert kind in caplog.text


def test_torchs_own_client_is_recognized(caplog: pytest.LogCaptureFixture) -> None:
    """This is what torchrun does if its endpoint is that of a job of ddpsafe."""
    from torch.distributed import TCPStore

    channel = listen(warns=True)
    with contextlib.closing(channel):
        with pytest.raises(RuntimeError):
            TCPStore(
                "127.0.0.1", channel.port, timeout=timedelta(seconds=3), wait_for_workers=False
            )
        scripts.wait_until(lambda: "a client of torch's TCPStore" in caplog.text)


STOPPED: Final = """
import sys, time
from datetime import timedelta
from ddpsafe._clock import Deadline
from ddpsafe._job.channel import Channel, Hello
from ddpsafe._launcher.nodes.node_messages import CODEC, Warned

channel = Channel.dial(("127.0.0.1", int(sys.argv[1])), secret=b"secret", scope="round", codec=CODEC, node=1,
    hello=lambda: Hello(mono_ns=1, wall_ns=1), deadline=Deadline.after(timedelta(seconds=20)))
heard = 0
while heard < 40:
    heard += sum(isinstance(event, Warned) for _, event in channel.events())
    time.sleep(0.01)
channel.close()
"""


@pytest.mark.parametrize("bytes_each", [10, 1 << 20])
def test_a_stopped_reader_is_not_a_host_that_does_not_answer(
    channel: Channel, bytes_each: int
) -> None:
    """Whatever waits for it: its kernel answers that its buffer is full. It gets all of that later."""
    reader = subprocess.Popen([sys.executable, "-c", STOPPED, str(channel.port)])
    try:
        scripts.wait_until(channel.connected)
        reader.send_signal(signal.SIGSTOP)
        for _ in range(40):
            channel.send(Warned(text="x" * bytes_each))
        (connection,) = channel._connections()
        beats = 2 * LOSS_S / channel_module.BEAT_S
        scripts.wait_until(lambda: connection.unanswered > beats or channel.away())
        assert not channel.away()
        reader.send_signal(signal.SIGCONT)
        assert reader.wait(scripts.LIMIT_S) == 0
        scripts.wait_until(lambda: not channel.connected())
        ends = [event.how for _, event in channel.events() if isinstance(event, Lost)]
        assert ends == ["goodbye"]
    finally:
        reader.kill()
        reader.wait()


@pytest.mark.parametrize("times", [0, 1])
def test_a_line_that_a_node_has_not_sent_ends_its_connection(channel: Channel, times: int) -> None:
    """Each is signed for one connection and its number in that, so none can be added or repeated."""
    with contextlib.closing(dial(channel.port)) as node:
        read_events(channel, 1)
        line = b"." + CODEC.pack(LetRanksExit()) + b"\n"
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
    node = dial(channel.port)
    with pytest.raises((RefusedError, OSError)):
        dial(channel.port)
    assert channel.connected() == {1}
    node.close()


def greeting_with(name: str, value: object) -> bytes:
    """Return a greeting that has every field; one is not what a node sends."""
    usual = {"version": "ddpsafe-4", "node": 1, "challenge": "x", "received": 0, "token": "x"}
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
        node = dial(channel.port)
        assert read_events(channel, 1) == [(1, HELLO)]
        node.close()


def is_open(sender: socket.socket) -> bool:
    """Return whether the other side has not ended a connection."""
    sender.settimeout(0)
    try:
        while sender.recv(1000):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_a_flood_of_connections_keeps_no_node_out(channel: Channel) -> None:
    """The number of silent unknown senders is limited, and connected nodes stay."""
    first = dial(channel.port, node=1)
    senders = [socket.create_connection(("127.0.0.1", channel.port)) for _ in range(400)]
    second = dial(channel.port, node=2)
    assert channel.connected() == {1, 2}
    assert 0 < sum(is_open(sender) for sender in senders) <= 200
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
    dial(channel.port, node=2).close()  # node 0 has accepted all that came before
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
    assert said == "ddpsafe-4"


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


def shared_state(*away: str) -> SharedState:
    """Return the state at node 0, for which all other launchers are there."""
    return SharedState("a", timedelta(seconds=10), lambda those: set(those).difference(away))


def asked(shared: SharedState, launcher: str, **question: Any) -> Answered | None:
    """Return the answer of node 0; ``None`` if it has to wait."""
    answers: list[Answered] = []
    shared.take(launcher, Ask(number=1, **question), answers.append)
    return answers[0] if answers else None


def state_of(*launchers: str, **fields: Any) -> str:
    """Return a state in which these launchers have joined, as a node sends it."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

    state = _RendezvousState()
    for number, launcher in enumerate(launchers):
        node = _NodeDesc(f"00000{number}\thost\taddress\t{launcher}", 1, number)
        state.participants[node] = number
        state.last_heartbeats[node] = dt.datetime.now(dt.timezone.utc)
    state.wait_list.add(_NodeDesc("000009 host", 2, 0))
    vars(state).update(fields)
    return torchs_rendezvous._dump(state)


def test_a_state_of_the_rendezvous_is_checked_before_it_is_unpickled(tmp_path: Path) -> None:
    """Not even a node of the job can have another one run code; torch alone would."""
    mark = tmp_path / "mark"
    shared = shared_state()
    for text in (torchs_rendezvous._dump(Evil(mark)), "no base 85 \x00", ""):
        found = asked(shared, "a", value=text)
        assert found is not None
        assert (found.value, found.has_set) == (None, False)
    assert not mark.exists()


def test_every_state_of_this_torch_can_be_loaded() -> None:
    """Every class of a state is on the list of those that may be unpickled."""
    found = asked(
        shared_state(), "a", value=state_of("a", deadline=dt.datetime.now(dt.timezone.utc))
    )
    assert found is not None
    assert found.has_set
    assert found.value is not None
    assert len(torchs_rendezvous._load(found.value).participants) == 1
    assert found.left_s == pytest.approx(10, abs=5)


def test_a_state_is_set_only_by_who_knows_the_last_one() -> None:
    """As torch's interface says: else two nodes that join at once would overwrite each other."""
    shared = shared_state()
    first = asked(shared, "a", value=state_of("a"))
    assert first is not None
    for token in (None, (first.token or 0) - 1, (first.token or 0) + 1):
        late = asked(shared, "b", value=state_of("b"), token=token)
        assert late is not None
        assert (late.has_set, late.token, late.value) == (False, first.token, first.value)
    known = asked(shared, "b", token=first.token)
    assert known is not None
    assert (known.token, known.value) == (first.token, None)  # it does not travel again
    both = asked(shared, "b", value=state_of("a", "b", complete=True), token=first.token)
    assert both is not None
    assert both.has_set
    assert shared.complete_round() == ("a", "b")
    shared.restart()
    stale = asked(shared, "a", value=state_of("a", "b"), token=both.token)
    assert stale is not None
    assert (stale.has_set, stale.token) == (False, None)


def test_the_others_wait_until_node_0_has_joined() -> None:
    """Else a spare and the others could complete a round without it."""
    shared = shared_state()
    answers: list[Answered] = []
    shared.take("b", Ask(number=7), answers.append)
    assert not answers
    asked(shared, "a", value=state_of("a"))
    assert [answer.number for answer in answers] == [7]
    assert answers[0].value is not None


def test_a_node_that_cannot_be_reached_does_not_count() -> None:
    """It counts again once it is back; of a launcher that joined twice the last time counts."""
    away: set[str] = set()
    shared = SharedState("a", timedelta(seconds=10), lambda those: set(those) - away)
    asked(shared, "a", value=state_of("a", "b", "b"))
    assert len(shared.arrivals().labels) == 2
    token = (asked(shared, "a") or Answered(number=0)).token
    away.add("b")
    told = asked(shared, "a", token=token)
    assert told is not None
    assert told.value is not None  # who knows the state is told
    beats = torchs_rendezvous._load(told.value).last_heartbeats.values()
    assert sorted(str(beat)[:4] for beat in beats) == ["2000", "2000", "None"]
    assert len(shared.arrivals().labels) == 1
    away.clear()
    assert len(shared.arrivals().labels) == 2


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


@pytest.mark.root
def test_node_0_listens_only_in_a_range_of_ports(network: Network, tmp_path: Path) -> None:
    """For a firewall: besides the endpoint, in each attempt; the ranks' own ports are gloo's."""
    retry = retrying(2, "killed")
    fields = {"rendezvous": {"ports": "29981-29982"}, "retry": retry}
    cases = [
        Case(name="kills", what="kill-until-2", rank=1, fields=fields),
        Case(name="held", what="held", fields=fields),
    ]
    launchers = start_job(network, cases, tmp_path, nproc=(1, 1), port=29970)
    await_files(launchers, tmp_path, "running-held-1-*", 2)
    ports = {port for _, port in listening_of(launchers[0].pid)}
    (tmp_path / "release-held").touch()
    found = finish_job(network, cases, launchers)
    assert ports <= {29970 + 1, 29981, 29982}
    assert len(ports) == 2
    assert [each["kills"]["attempts"] for each in found] == [2, 2]


def test_ports_of_a_range_are_taken_once() -> None:
    """The one that a socket is bound to, and the one that is reserved for ranks; then none is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        ports = f"{first}-{first + 1}"
        with rank_store("127.0.0.1", f"{first + 1}-{first + 1}") as store:
            assert store == first + 1
            with pytest.raises(OSError, match=rf"no port of rendezvous.ports='{ports}' is free"):
                reserved_port("127.0.0.1", ports).__enter__()
    with (
        reserved_port("127.0.0.1", ports) as one,
        reserved_port("127.0.0.1", ports) as other,
        socket.socket() as rank,
    ):
        assert {one, other} == {first, first + 1}
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("127.0.0.1", one))  # as torch's store does
        rank.listen()


@pytest.mark.full
@pytest.mark.root
def test_a_job_ignores_whatever_an_unknown_host_sends_to_its_launchers(
    network: Network, tmp_path: Path
) -> None:
    """Garbage, pickles, a line of 1 GB and 2,000 connections, to every port of every launcher."""
    retry = retrying(2, "killed")
    cases = [
        Case(name="held", what="held", fields={"timeouts": {"collective": 60}}),
        Case(name="kills", what="kill-until-2", rank=1, fields={"retry": retry}),
    ]
    launchers = start_job(network, cases, tmp_path, nproc=(1, 1))
    await_files(launchers, tmp_path, "running-held-1-*", 2)
    mark = tmp_path / "code of the unknown sender ran"
    for node, launcher in enumerate(launchers):
        listening = listening_of(launcher.pid)
        address = network[node].address()
        assert {each for each, _ in listening} <= {address}, "bound to one address"
        assert node == 1 or len(listening) >= 2, "the endpoint and the store of the ranks"
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
