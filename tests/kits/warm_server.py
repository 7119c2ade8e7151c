"""An interpreter that has imported what scripts need, and forks one process for each script.

A script has everything that a new interpreter would give it: its own main module, arguments,
environment, folder, streams, signals and exit. It saves the import of torch, and that of the fork
server of its launches: a second process, forked before the script runs, waits to become it.

Started with the number of a socket and the names of modules to import; see `warm_python`. Where that
socket listens, each pytest that connects gets an interpreter of its own, forked from this one.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Final, TextIO

NAMESPACES: Final = {"mnt": 0x00020000, "uts": 0x04000000, "net": 0x40000000, "pid": 0x20000000}
"""Files of /proc/PID/ns, and their flags in <linux/sched.h>."""

READ_AT_START: Final = (
    "PYTHON", "LD_", "LC_", "LANG", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_",
)  # fmt: skip
"""Prefixes of variables that Python, the linker or torch read when they start or are imported."""

MARK: Final = "PYTEST_RUN_MARK"
"""Set in pytest's environment: every process that inherits it, even an orphan, is of this run."""

UNBUFFERED: Final = "PYTHONUNBUFFERED"
"""The one of them that a fork takes over, with its streams."""

_STOPPING: Final = {signal.SIGKILL, signal.SIGSTOP}
_PR_SET_PDEATHSIG: Final = 1


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a running process cannot take over."""
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(READ_AT_START) and name != UNBUFFERED
    }


def enter(pid: int | str, *names: str) -> None:
    """Move into namespaces of a process; into a PID namespace, only children are moved."""
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
    for name, fd in zip(names, opened, strict=True):
        if libc.setns(fd, NAMESPACES[name]) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(fd)


def serve_each(listening: socket.socket) -> socket.socket:
    """Fork a server for each pytest that connects, until the one that started this ends; return its connection."""
    die_with_parent(os.getppid(), is_on_host=False)
    own = os.getpid()
    while True:
        asking, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            die_with_parent(own, is_on_host=False)
            return asking
        asking.close()


class ShownEnvironment:
    """What /proc/PID/environ shows: what a test left behind is found by its mark there.

    It is the memory in which the kernel has put the variables of the interpreter that is forked.
    """

    def __init__(self) -> None:
        _, _, fields = Path("/proc/self/stat").read_text().rpartition(")")
        self._start, end = map(int, fields.split()[47:49])
        self._shown = ctypes.string_at(self._start, end - self._start)

    def take_over(self, name: str, environment: Mapping[str, str]) -> None:
        """Show a variable that was shown before, with as long a value."""
        found = self._shown.find(f"\0{name}=".encode())
        if found >= 0 and name in environment:
            text = f"\0{name}={environment[name]}\0".encode()
            assert self._shown.find(b"\0", found + 1) == found + len(text) - 1
            ctypes.memmove(self._start + found, text, len(text))


def serve(asking: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork the requested processes and report how they ended; return, in each fork, what was asked and its streams."""
    server = os.getpid()
    while True:
        raw, fds = b"", []
        with contextlib.suppress(ConnectionResetError):  # the tests ended with an answer unread
            raw, fds, _, _ = socket.recv_fds(asking, 1 << 20, 250)
        if not raw:
            os._exit(0)
        asked = json.loads(raw)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = fork_into(asked.get("host"))
            if pid == 0:
                asking.close()
                # The server ends with the tests that it serves, killed ones too, and with it this.
                die_with_parent(server, is_on_host=asked.get("host") is not None)
                return asked, fds
            for fd in fds:
                os.close(fd)
            answer = {"pid": pid}
        asking.send(json.dumps(answer).encode())


def fork_into(host: int | None) -> int:
    """Fork, into the PID namespace of a process if one is given."""
    if host is None:
        return os.fork()
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    enter(host, "pid")
    pid = os.fork()
    if pid:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(own, NAMESPACES["pid"]) != 0:
            raise OSError(ctypes.get_errno(), "setns pid")
    os.close(own)
    return pid


def die_with_parent(parent: int, *, is_on_host: bool) -> None:
    """Have the kernel end this process with its parent, whose id is not to be seen from a host."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if not is_on_host and os.getppid() != parent:  # it has ended before
        os._exit(0)


def be_new(asked: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Take over what a new process gets from its parent."""
    if asked["host"] is not None:
        enter(asked["host"], "net", "uts", "mnt")
    if asked["session"]:
        os.setsid()
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    close_all_but(3)
    if asked["terminal"]:
        # The leader of a session gets the first terminal that it opens as its controlling one.
        terminal = os.open(asked["terminal"], os.O_RDONLY)
        os.dup2(terminal, 0)
        os.close(terminal)
    take_over(asked["env"], asked["folder"])
    sys.stdout = sys.__stdout__ = reopened(sys.stdout, 1)
    sys.stderr = sys.__stderr__ = reopened(sys.stderr, 2)


def reopened(stream: TextIO, fd: int) -> io.TextIOWrapper:
    """Open stdout or stderr as Python does at its start."""
    raw = io.FileIO(fd, "w", closefd=False)
    raw.name = stream.name
    unbuffered = bool(os.environ.get(UNBUFFERED))
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=not unbuffered and (fd == 2 or raw.isatty()),
        write_through=unbuffered,
    )


def take_over(environment: Mapping[str, str], folder: str) -> None:
    """Take over an environment and a working directory."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    tempfile.tempdir = None  # what torch has asked for at its import


def close_all_but(kept: int) -> None:
    """Close every file descriptor from this number on."""
    os.closerange(kept, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # noqa: PTH208


def be_main(arguments: Sequence[str], first_of_path: str) -> types.ModuleType:
    """Become the main module of an interpreter with these arguments."""
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={})
    # Under the second name, which multiprocessing gives it, ranks send back the script's types.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    sys.argv[:] = arguments
    sys.orig_argv[:] = [sys.executable, *arguments]
    sys.path[0] = first_of_path
    return module


def run(arguments: Sequence[str]) -> None:
    """Run a script, or ``-m`` a module, as ``python *arguments`` does, including its exit."""
    try:
        if arguments[0] == "-m":
            be_main(["-m", *arguments[2:]], str(Path.cwd()))
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # what Python calls
        else:
            path = os.path.abspath(arguments[0])  # noqa: PTH100 - as Python does
            module = be_main(arguments, os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
            loader = SourceFileLoader("__main__", path)
            vars(module).update(__file__=path, __cached__=None, __loader__=loader)
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        traceback = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        if isinstance(error, KeyboardInterrupt):  # of which the interpreter then dies by SIGINT
            sys.excepthook = lambda *_: None
            raise
        sys.exit(1)


def asked_fork_server(arguments: Sequence[Any], fds: Sequence[int]) -> dict[str, Any] | None:
    """Return what a fork has to take over to be a fork server, None for another program.

    That is one that `multiprocessing` starts as ``python -c "… from multiprocessing.forkserver …"``; since
    3.14 what follows are the arguments of the script.
    """
    texts = [os.fsdecode(each) for each in arguments]
    code, *argv = texts[texts.index("-c") + 1 :] if "-c" in texts else [""]
    if "from multiprocessing.forkserver import main" not in code:
        return None
    return {
        "code": code,
        "argv": ["-c", *argv],
        "fds": [*(fd for fd in (0, 1, 2) if is_open(fd)), *fds],
        "env": dict(os.environ),
        "folder": str(Path.cwd()),
        "ignored": [each for each in signals() if signal.getsignal(each) == signal.SIG_IGN],
        "blocked": [*signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }


def be_fork_server(asked: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Become the requested fork server; drop blocked signals that arrived before."""
    put_at(fds, asked["fds"])
    for signum in signals():
        usual = signal.getsignal(signum)
        signal.signal(signum, signal.SIG_IGN)
        if signum not in asked["ignored"]:
            signal.signal(signum, usual)
    take_over(asked["env"], asked["folder"])
    module = be_main(asked["argv"], "")
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    exec(asked["code"], vars(module))


class StandIn:
    """A fork of an interpreter that has run nothing yet, which becomes the fork server of a script.

    Unless the script has changed what a new interpreter would have inherited in other ways than
    `asked_fork_server` tells.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._state = inherited_state()
        script = os.pidfd_open(
            os.getpid()
        )  # here: a short script may have ended before the fork runs
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            self.wait(theirs, script)
        theirs.close()
        os.close(script)
        util = sys.modules["multiprocessing.util"]
        self._start = util.spawnv_passfds
        util.spawnv_passfds = self.start  # type: ignore[attr-defined]

    def start(self, path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        """Start a process of `multiprocessing`; the first fork server is there already."""
        asked = asked_fork_server(arguments, fds)
        if asked and self._socket.fileno() >= 0 and self._state == inherited_state():
            with self._socket, contextlib.suppress(OSError):  # it was killed
                socket.send_fds(self._socket, [json.dumps(asked).encode()], asked["fds"])
                return self._pid
        return self._start(path, arguments, fds)

    def wait(self, asking: socket.socket, script: int) -> None:
        """Run the stand-in: wait for requests, and exit with the script, which is a pidfd."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signals())
        select.select([asking, script], [], [])
        asking.settimeout(0)
        try:
            raw, fds, _, _ = socket.recv_fds(asking, 1 << 20, 250)
        except BlockingIOError:
            raw = b""
        if not raw:
            os._exit(0)
        asking.detach()
        be_fork_server(json.loads(raw), fds)
        sys.exit()


def signals() -> set[signal.Signals]:
    """Return the signals that a process may handle or ignore."""
    return {signum for signum in signal.valid_signals() if signum not in _STOPPING}  # type: ignore[misc]


def inherited_state() -> tuple[object, ...]:
    """Return what a child process inherits and a stand-in would not."""
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return (
        [resource.getrlimit(getattr(resource, name)) for name in limits],
        (os.getsid(0), os.getpgrp(), os.getresuid(), os.getresgid()),
        (os.nice(0), os.sched_getaffinity(0)),
        read_at_start(os.environ),
        sys.warnoptions[:],
    )


def is_open(fd: int) -> bool:
    """Return whether a file descriptor is open."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def put_at(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Give file descriptors these numbers, and close all others."""
    beyond = max([*fds, *numbers]) + 1
    for offset, fd in enumerate(fds):
        os.dup2(fd, beyond + offset)
    os.closerange(0, beyond)
    for offset, number in enumerate(numbers):
        os.dup2(beyond + offset, number)
    for offset in range(len(fds)):
        os.close(beyond + offset)


class LastAtExit:
    """Runs after all other functions of `atexit`, and ends the process.

    To free what torch has imported takes a third of a second of each fork. What the script itself
    holds is freed.
    """

    ended_by: BaseException | None = None

    def __call__(self) -> None:
        """Exit with the status with which the interpreter would exit."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self.end()
        # The interpreter has something to say: of a stream that is closed, or has no reader. Builds of
        # torch for CUDA come with triton, which calls what no collection finds at the end a leak.
        gc.unfreeze()

    def end(self) -> None:
        """End the process, unless it is not known how; raise where a stream cannot be written."""
        match self.ended_by:
            case None:
                return
            case SystemExit(code=None):
                status = 0
            case SystemExit(code=int() as code):
                status = code & 0xFF
            case _:
                status = 1  # of a text, which the interpreter has printed
        if threading.active_count() == 1:  # none that still looks at it
            vars(sys.modules["__main__"]).clear()
            gc.collect()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if isinstance(self.ended_by, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status)


def main() -> None:
    """Import, serve, and in each fork run a script."""
    gc.disable()  # imported modules stay
    last = LastAtExit()
    atexit.register(last)  # before what the imports register, which therefore runs earlier
    asking = socket.socket(fileno=int(sys.argv[1]))
    importlib.import_module("multiprocessing.util")
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would lose a thread"
    sys.path[0] = ""
    gc.freeze()  # or the first collection in each fork would copy every page
    shown = ShownEnvironment()
    if asking.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        asking = serve_each(asking)
    asking.send(b"{}")
    asked, streams = serve(asking)
    gc.enable()
    try:
        shown.take_over(MARK, asked["env"])
        if "code" in asked:
            be_fork_server(asked, streams)
        else:
            be_new(asked, streams)
            if asked["launches"]:
                StandIn()
            run(asked["argv"])
    except (SystemExit, KeyboardInterrupt) as error:
        # Without the frames of its traceback, which hold what the script has made.
        is_exit = isinstance(error, SystemExit)
        last.ended_by = SystemExit(error.code) if is_exit else KeyboardInterrupt()
        raise
    last.ended_by = SystemExit()


if __name__ == "__main__":
    main()
