"""torch is prepared when a script imports it, and its store gets what its version takes."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
import torch.distributed

from ddpsafe._clock import Deadline
from ddpsafe._host import open_tcp_store
from ddpsafe._worker.join import store
from ddpsafe._worker.join.store_endpoint import StoreEndpoint
from ddpsafe._worker.torch_hooks import after_import_of_torch
from ddpsafe._world import World

ASK: Final = """
import socket, time
from ddpsafe._host import open_tcp_store
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.53", 53))
store = open_tcp_store("127.0.0.1", 0, listening=socket.create_server(("127.0.0.1", 0)))
store.set("key", "value")
server.setblocking(False)
server.recv(512)  # torch has asked it, and had no answer
began_s = time.monotonic()
try:
    store.get("missing")
except RuntimeError:
    print(time.monotonic() - began_s)
"""


@pytest.mark.root
@pytest.mark.full
def test_a_name_server_that_loses_a_question_does_not_fail_the_store(tmp_path: Path) -> None:
    """Torch looks up the name of each address, for 5 s if a packet is lost; calls still take at most 5 s."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\noptions timeout:6 attempts:1\n")
    (tmp_path / "ask.py").write_text(ASK)
    shell = (
        f"ip link set lo up && mount --bind {tmp_path}/resolv.conf /etc/resolv.conf && "
        f"exec {shlex.quote(sys.executable)} {tmp_path}/ask.py"
    )
    command = ["unshare", "--net", "--mount", "sh", "-c", shell]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert float(done.stdout) >= 5


def _of_a_launch() -> None:
    open_tcp_store("127.0.0.1", 0, listening=socket.create_server(("127.0.0.1", 0)))


def _of_ranks_of_another_launcher() -> None:
    endpoint = StoreEndpoint(host="127.0.0.1", port=0, is_served=False, is_on_this_host=True)
    deadline = Deadline.after(timedelta(seconds=30))
    store._connect(endpoint, World.alone(), deadline, serves=True)


@pytest.mark.parametrize("opens", [_of_a_launch, _of_ranks_of_another_launcher])
@pytest.mark.parametrize(
    ("version", "by_libuv"),
    [
        ("2.6.0+cu124", False),
        ("2.7.1", False),
        ("2.8.0", True),
        ("2.10.0+cpu", True),  # later than 2.8, although it sorts before it as text
        ("2.13.0+cpu", True),
    ],
)
def test_the_store_takes_a_listening_socket_in_every_torch_version(
    opens: Any, version: str, monkeypatch: pytest.MonkeyPatch, *, by_libuv: bool
) -> None:
    """Up to torch 2.7, the libuv server refuses one, so the other server is used there."""
    given: dict[str, Any] = {}

    def take(*_: object, **options: Any) -> Any:
        given.update(options)
        socket.close(options["master_listen_fd"])
        return SimpleNamespace(set_timeout=lambda _: None)

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.distributed, "TCPStore", take)
    opens()
    assert (given["is_master"], given["use_libuv"]) == (True, by_libuv)


@pytest.fixture
def _other_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this process find another torch, which fails if a file says so."""
    (tmp_path / "torch.py").write_text(
        "from pathlib import Path\nif Path(__file__).with_name('fails').exists(): raise OSError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    importlib.invalidate_caches()
    yield
    sys.modules.pop("torch", None)


@pytest.mark.usefixtures("_other_torch")
def test_a_look_whether_torch_is_installed_uses_up_no_hook() -> None:
    """transformers, datasets and others ask `find_spec` before anything imports torch."""
    calls: list[bool] = []
    after_import_of_torch(lambda: calls.append("torch" in sys.modules))
    assert importlib.util.find_spec("torch") is not None
    assert importlib.util.find_spec("torch") is not None
    assert calls == []
    importlib.import_module("torch")
    importlib.import_module("torch")
    assert calls == [True]


@pytest.mark.usefixtures("_other_torch")
def test_an_import_that_fails_and_is_tried_again_has_the_hook(tmp_path: Path) -> None:
    """A library may be preloaded in between."""
    calls: list[int] = []
    after_import_of_torch(lambda: calls.append(1))
    (tmp_path / "fails").touch()
    with pytest.raises(OSError):  # noqa: PT011 - of the other torch
        importlib.import_module("torch")
    (tmp_path / "fails").unlink()
    importlib.import_module("torch")
    assert calls == [1]
