"""The secret of a job, and the store whose keys it signs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from cut_wire import HERE, Wire
from torch.distributed import DistNetworkError, TCPStore

from ddpsafe import ConfigError, LaunchConfig, cli
from ddpsafe._host import ending_when_silent
from ddpsafe._job.endpoint import key_of
from ddpsafe._job.secret import find_job_secret
from ddpsafe._job.store_keys import ReopenedStore
from ddpsafe._worker.join.store_endpoint import job_secret

LONG: Final = "0123456789abcdef"


def config(**rendezvous: Any) -> LaunchConfig:
    """Return the configuration of a job of two nodes."""
    return LaunchConfig(nnodes=2, rendezvous={"endpoint": "10.0.0.7:29400", **rendezvous})


@pytest.mark.parametrize(
    "ask",
    [lambda: key_of(config()), job_secret, find_job_secret],
    ids=["nodes", "attached ranks", "doctor"],
)
def test_a_short_secret_is_refused_wherever_it_is_used(
    ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks under torchrun refused three letters, and launchers of several nodes took them."""
    monkeypatch.setenv("DDPSAFE_JOB_SECRET", LONG[:-1])
    with pytest.raises(ConfigError, match="DDPSAFE_JOB_SECRET has 15 characters, fewer than 16"):
        ask()
    for fine in (LONG, ""):  # an empty variable means no secret
        monkeypatch.setenv("DDPSAFE_JOB_SECRET", fine)
        ask()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"\xff\xfe" * 20, "cannot be read: it is not text"),
        (b"abc\n", "has 3 characters, fewer than 16"),
    ],
)
def test_a_file_without_a_secret_is_refused_by_name(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the setting of a launch, and as the option of the doctor."""
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^rendezvous.secret_file {path} {says}"):
        key_of(config(secret_file=path))
    code = cli.main(["doctor", "--secret-file", str(path), "--no-mesh"])
    assert code == 2
    assert f"--secret-file {path} {says}" in capsys.readouterr().err


def test_a_file_and_the_variable_are_the_same_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node may have it in a file and another one in its environment."""
    path = tmp_path / "secret"
    path.write_text(f"{LONG}\n")
    by_file = key_of(config(secret_file=path))
    derived = key_of(config())
    monkeypatch.setenv("DDPSAFE_JOB_SECRET", LONG)
    assert by_file == key_of(config()) != derived


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Lay a way to a store that runs meanwhile."""
    server = TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    laid = Wire(server.port)
    yield laid
    laid.close()
    del server


def open_store(wire: Wire) -> TCPStore:
    """Connect to the store."""
    return TCPStore(HERE, wire.port, is_master=False, wait_for_workers=False)


def test_each_call_is_made_again_over_a_new_connection(
    wire: Wire, capfd: pytest.CaptureFixture[str]
) -> None:
    """The result is that of one call, whenever the connection broke, and torch writes nothing about it."""
    store = ReopenedStore(lambda: open_store(wire))
    for number in range(10):
        wire.cut()
        store.set(f"{number}", "here")
        wire.cut()
        assert store.check([f"{number}"])
        wire.cut()
        assert store.get(f"{number}") == b"here"
        wire.cut()
        assert store.compare_set("first", "", f"{number}") == b"0"
        wire.cut()
        store.delete_key(f"{number}")
        assert not store.check([f"{number}"])
    assert capfd.readouterr().err == ""


def test_a_store_that_cannot_be_opened_again_is_an_error(wire: Wire) -> None:
    """What was raised there is what the call raises; later calls do not wait for it again."""
    tries: list[str] = []

    def fail() -> TCPStore:
        tries.append("once more")
        raise DistNetworkError("no route")

    store = ReopenedStore(lambda: open_store(wire), fail)
    wire.cut()
    with pytest.raises(DistNetworkError, match="no route"):
        store.check(["key"])
    with pytest.raises(DistNetworkError):
        store.set("key", "value")
    assert tries == ["once more"]


def test_a_default_timeout_of_sockets_does_not_reach_those_of_torch(wire: Wire) -> None:
    """A script or a library may set one; with it torch's calls ended with "Socket Timeout"."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        with ending_when_silent(wire.port, 4):
            store = open_store(wire)
        for number in range(50):
            store.set(f"{number}", "here")
            assert store.check([f"{number}"])
    finally:
        socket.setdefaulttimeout(before)
