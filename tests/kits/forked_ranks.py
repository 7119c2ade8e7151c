"""Ranks started by another launcher: one process each, with given variables.

They are forked from a server that has already imported torch, which takes a tenth of a second; a new
interpreter takes two. Tests of the interpreter's exit use real scripts.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.process
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import machine

Env = Mapping[str, str]

LIMIT_S: Final = machine.hang_limit(60)
"""How long the ranks may take together on a busy machine."""

LAUNCHERS: Final = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHEL")
"""Prefixes of variables that a launcher of the whole test run may have set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one rank ended; `took_s` is not a number if it was killed, and `stderr` is all of descriptor 2."""

    value: Any
    error: BaseException | None
    took_s: float
    stderr: str
    exitcode: int | None


def by_hand(rank: int, world_size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    """Return the variables that users set by hand and that torch's ``env://`` reads."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port that is free now, and that only a program that names it will use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def hand_started(ranks: int) -> list[dict[str, str]]:
    """Return the variables of that many ranks, which meet at a free port."""
    port = free_port()
    return [by_hand(rank, ranks, port) for rank in range(ranks)]


def run(
    program: Callable[..., object], envs: Sequence[Env], *args: object, folder: Path
) -> list[Ended]:
    """Run ``program(*args)``, which a new process can import, in one process for each environment, all at once."""
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(_started(program, env, args, folder / f"stderr-{number}"))
            for number, env in enumerate(envs)
        ]
        ends_s = time.monotonic() + LIMIT_S
        return [_await(process, reports, log, ends_s) for process, reports, log in started]


def values(ranks: Sequence[Ended]) -> list[Any]:
    """Return the values of ranks that must all have succeeded silently."""
    for rank in ranks:
        if rank.error is not None:
            raise rank.error
    assert [(rank.exitcode, rank.stderr) for rank in ranks] == [(0, "")] * len(ranks)
    return [rank.value for rank in ranks]


def server() -> ForkServerContext:
    """Return the context that forks processes from the server that launches use, too."""
    context = multiprocessing.get_context("forkserver")
    # Preload what launches do: the first to start the server starts it for all.
    context.set_forkserver_preload(["torch", "ddpsafe._worker.preload"])
    return context


@contextlib.contextmanager
def _started(
    program: Callable[..., object], env: Env, args: tuple[object, ...], log: Path
) -> Iterator[tuple[BaseProcess, Connection, Path]]:
    context = server()
    reports, sender = context.Pipe(duplex=False)
    process = context.Process(target=_be, args=(sender, _environment(env), program, args, str(log)))
    process.start()
    sender.close()
    try:
        yield process, reports, log
    finally:
        reports.close()
        process.kill()
        process.join()
        process.close()


def _environment(env: Env) -> dict[str, str]:
    ours = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**ours, **env}


def _await(process: BaseProcess, reports: Connection, log: Path, ends_s: float) -> Ended:
    assert reports.poll(max(0.0, ends_s - time.monotonic())), f"it did not end: {log.read_text()}"
    value, error, took_s = None, None, math.nan
    with contextlib.suppress(EOFError):  # it was killed
        value, error, took_s = reports.recv()
    process.join(max(0.0, ends_s - time.monotonic()))
    return Ended(
        value=value,
        error=error,
        took_s=took_s,
        stderr=log.read_text(encoding="utf-8"),
        exitcode=process.exitcode,
    )


def _be(
    sender: Connection, env: Env, program: Callable[..., object], args: tuple[object, ...], log: str
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(env)
    # A shell or a scheduler starts processes without a parent known to multiprocessing.
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    started_s = time.monotonic()
    value, error = None, None
    try:
        value = program(*args)
    except BaseException as exc:  # noqa: BLE001 - sent to the test, which checks it
        error = _portable(exc)
    sender.send((value, error, time.monotonic() - started_s))


def _portable(exc: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(exc))
    except Exception:  # noqa: BLE001 - an exception may fail to pickle in any way
        return RuntimeError(f"{type(exc).__name__}: {exc}")
    return exc
