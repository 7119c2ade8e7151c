"""Starts scripts in forks of an interpreter that has imported torch: a tenth of a new one's CPU time.

Tests of the start itself (imports, options of the interpreter, variables that torch reads when it is
imported) use a new interpreter, and so does one real launch for each promise of a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import IO, Final

import machine
from warm_server import MARK, asked_fork_server

PROGRAM: Final = Path(__file__).with_name("warm_server.py")

FORK_SERVERS: Final[set[int]] = set()
"""Pids of this process's fork servers whose parent is another process."""

_LIMIT_S: Final = machine.hang_limit(60)


class Forked:
    """A program that was forked, with the methods of `subprocess.Popen` that tests use."""

    stdin: None = None
    returncode: int | None = None

    def __init__(self, server: WarmPython, pid: int) -> None:
        self.pid = pid
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self._server, self._watch = server, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if self.returncode is None:
            if not select.select([self._watch], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = self._server.ask({"wait": self.pid})["code"]
            os.close(self._watch)
        return self.returncode

    def communicate(self, given: None = None, timeout: float | None = None) -> tuple[str, str]:
        """Read its output until it and all processes that inherited its streams have exited."""
        assert given is None
        assert self.stdout is not None
        assert self.stderr is not None
        texts = ["", ""]

        def read(number: int, stream: IO[str]) -> None:
            with contextlib.suppress(ValueError), stream:  # it was closed, after the limit
                texts[number] = stream.read()

        streams = enumerate((self.stdout, self.stderr))
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """An interpreter that has imported some modules, and forks a process for each script."""

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], shared: str | None = None
    ) -> None:
        """Start it, with its modules and variables or those of a `SharedPython`; the first request waits for it."""
        self._process: subprocess.Popen[bytes] | None = None
        if shared is None:
            self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = started(other, modules, environment)
        else:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(shared)
        self._lock = threading.Lock()
        self._is_ready = False

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        streams: Sequence[int],
        folder: Path | None = None,
        session: bool = False,
        terminal: str | None = None,
        host: int | None = None,
        launches: bool = True,
    ) -> Forked:
        """Start ``python *arguments``, the first of which is a script.

        Its terminal, a path, is also its stdin, and needs a session of its own. `host` is a process whose
        namespaces it enters; with `launches`, a process waits to become the fork server of its ranks.
        """
        asked = {
            "argv": list(arguments),
            "env": dict(environment),
            "folder": str(folder or Path.cwd()),
            "session": session,
            "terminal": terminal,
            "host": host,
            "launches": launches,
        }
        return Forked(self, self.ask(asked, streams)["pid"])

    def serve_forks(self) -> None:
        """Fork the fork server of this process, too, when `multiprocessing` would start it.

        Its parent is another process, so `multiprocessing` cannot ask the kernel whether it runs.
        """
        spawn, server = util.spawnv_passfds, forkserver._forkserver
        ensure_running = server.ensure_running
        watch: list[int] = []

        def start(path: bytes, arguments: Sequence[bytes], fds: Sequence[int]) -> int:
            asked = asked_fork_server(arguments, fds)
            if asked is None:
                return spawn(path, arguments, fds)
            pid = self.ask(asked, asked["fds"])["pid"]
            watch[:] = [os.pidfd_open(pid)]
            FORK_SERVERS.add(pid)
            return pid

        def ensure() -> None:
            if watch and not select.select(watch, [], [], 0)[0]:
                return
            ensure_running()
            if watch:
                server._forkserver_pid = None

        util.spawnv_passfds = start
        server.ensure_running = forkserver.ensure_running = ensure

    def ask(self, asked: Mapping[str, object], fds: Sequence[int] = ()) -> dict[str, int]:
        """Send one request; return the answer."""
        with self._lock:
            if not self._is_ready:
                self._read()
                self._is_ready = True
            socket.send_fds(self._socket, [json.dumps(asked).encode()], fds)
            return self._read()

    def _read(self) -> dict[str, int]:
        answer = self._socket.recv(1 << 16)
        assert answer, "the warm interpreter has ended"
        return dict(json.loads(answer))

    def close(self) -> None:
        """End it."""
        self._socket.close()
        if self._process is not None:
            self._process.wait(_LIMIT_S)


class SharedPython:
    """An interpreter from which pytest workers fork theirs, so that torch is imported only once."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; it ends with this process, and each script of a worker shows the worker's mark."""
        self.address = str(Path(tempfile.mkdtemp(prefix="w-")) / "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.address)
            listening.listen()
            nobodys = {MARK: "0" * len(uuid.uuid4().hex)}
            self._process = started(listening, modules, {**environment, **nobodys})

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(_LIMIT_S)
        shutil.rmtree(Path(self.address).parent)


def started(
    talking: socket.socket, modules: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start an interpreter that imports the modules and answers at a socket, which closes here."""
    with talking:
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), str(talking.fileno()), *modules],
            pass_fds=[talking.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
        )


@contextlib.contextmanager
def piped() -> Iterator[tuple[tuple[int, int, int], tuple[IO[str], IO[str]]]]:
    """Make the streams of a process that is only read: its ends, which close here, and ours."""
    (out, out_there), (err, err_there) = os.pipe(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    ours = os.fdopen(out, encoding="utf-8"), os.fdopen(err, encoding="utf-8")
    try:
        yield (nothing, out_there, err_there), ours
    finally:
        for fd in (nothing, out_there, err_there):
            os.close(fd)
