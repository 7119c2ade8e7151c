"""The facts of an exception: which one of its chain explains the failure, its line, text and exit code.

Nothing here raises or sends anything; `messages` sends these facts.

The exception that leaves the user's function is often not what went wrong. ``except Exception:
sys.exit(1)`` and ``raise RuntimeError("epoch 3") from exc`` may wrap an error that another rank's end
caused. A collective in a ``finally`` may hide the rank's own error behind such a peer error.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import os
import re
import signal
import stat
import sys
import sysconfig
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpsafe._errors import DDPSafeError
from ddpsafe._stdlib_private import end_as_interpreter
from ddpsafe._text import signal_name
from ddpsafe._torch_private import is_expected, workers_of
from ddpsafe._wire.foreign_texts import (
    find_kind,
    find_missed_barrier,
    find_peer_origin,
    find_printed_error,
    find_signal_of_worker,
    is_of_a_backend,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from types import FrameType, TracebackType

    from ddpsafe._errors import Origin

_ELLIPSIS: Final = " […] "
# A `finally` may wait for the others once or twice while an exception passes through it.
_WAITS_TO_CONTINUE: Final = 3
_TRY: Final = (ast.Try, getattr(ast, "TryStar", ast.Try))  # except* is new in Python 3.11
_MAX_GROUP_DEPTH: Final = 4
_MAX_HANDLED: Final = 20
_GROUP: Final[Any] = getattr(builtins, "BaseExceptionGroup", ())  # new in Python 3.11

MAX_MESSAGE: Final = 4_000
"""How many characters of an exception's text are matched and shown."""


def clip(text: str, limit: int) -> str:
    """Shorten text in its middle: the head shows what it is, the tail how it ended."""
    if len(text) <= limit:
        return text
    half = (limit - len(_ELLIPSIS)) // 2
    return text[:half] + _ELLIPSIS + text[-half:]


def where_of(tb: TracebackType | None) -> str:
    """Return the innermost line of a traceback that is in the user's code.

    Returns:
        ``path:line in function``, or an empty string if every frame is a library's.
    """
    return own_line_of(traceback.extract_tb(tb))


def own_line_of(calls: traceback.StackSummary) -> str:
    """Return the innermost of some calls that is in the user's code, as `where_of` does."""
    own = find_own_files(call.filename for call in calls)
    innermost = next((call for call in reversed(calls) if call.filename in own), None)
    if innermost is None:
        return ""
    return f"{innermost.filename}:{innermost.lineno} in {innermost.name}"


_MAX_HELD: Final = 200
_BY_SIGNAL: Final = 128
_DATALOADER: Final = "torch/utils/data/dataloader.py"
MONITORED_BARRIER: Final = "monitored_barrier"
_PREPOSITIONS: Final = {
    "send": "to",
    "isend": "to",
    "recv": "from",
    "irecv": "from",
    MONITORED_BARRIER: "",
}


class PointToPoint(NamedTuple):
    """A call of torch that sends to one rank or receives from one, or the monitored barrier, which is made of these.

    torch's flight recorder does not record these for gloo, so by the recorder alone a rank seems to be in its
    last collective.

    Attributes:
        peer: The other rank; ``None`` if it is unknown or may be any rank. In a monitored barrier it is the first
            rank of the group, from which the others receive.
    """

    call: str
    peer: int | None

    @property
    def sender(self) -> int | None:
        """The peer, if the call receives."""
        return None if _PREPOSITIONS[self.call] == "to" else self.peer

    def __str__(self) -> str:
        preposition = _PREPOSITIONS[self.call]
        is_named = preposition and self.peer is not None
        return f"{self.call} {preposition} rank {self.peer}" if is_named else self.call


def point_to_point_of(tb: TracebackType | None) -> PointToPoint | None:
    """Return the send or receive of torch that a traceback comes from."""
    calls = [_read_point_to_point(frame) for frame, _ in traceback.walk_tb(tb)]
    return next(filter(None, reversed(calls)), None)


def point_to_point_in(frame: FrameType | None) -> PointToPoint | None:
    """Return the send or receive of torch that a thread is in, given its innermost frame."""
    call = None
    while frame is not None and call is None:
        call = _read_point_to_point(frame)
        frame = frame.f_back
    return call


def _read_point_to_point(frame: FrameType) -> PointToPoint | None:
    code = frame.f_code
    if not code.co_filename.endswith("distributed_c10d.py") or not is_point_to_point(code.co_name):
        return None
    return PointToPoint(code.co_name, read_peer(frame))


def read_peer(frame: FrameType) -> int | None:
    """Return the rank that a function of torch sends to or receives from, in the group of all ranks."""
    names = frame.f_locals
    peer, group = names.get("dst", names.get("src")), names.get("group")
    if peer is None:
        peer = names.get("group_dst", names.get("group_src"))
        if frame.f_code.co_name == MONITORED_BARRIER:
            peer = 0
        if "authoritative_rank" in names:  # in DDP
            peer, group = names["authoritative_rank"], names["self"].process_group
        if peer is not None:  # it is a rank of that group
            peer = _rank_in_launch(group, peer)
    return peer if isinstance(peer, int) else None


def _rank_in_launch(group: object, rank: int) -> int | None:
    """Return the number that a rank of a group of torch has in the group of all ranks, if it is known."""
    if group is None:
        return rank
    try:
        return int(sys.modules["torch.distributed"].get_global_rank(group, rank))
    except Exception:  # noqa: BLE001 - this function of torch may change
        return None


def missed_barrier_of(exc: BaseException) -> tuple[int, ...]:
    """Return the ranks that have not reached torch's monitored barrier, if the exception comes from there."""
    for error in _chain_of(exc):
        named = find_missed_barrier(line_of(error, MAX_MESSAGE))
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, every collective begins with such a barrier.
        groups = [
            frame.f_locals["group"]
            for frame, _ in traceback.walk_tb(error.__traceback__ if named else None)
            if frame.f_code.co_filename.endswith("distributed_c10d.py")
            and "group" in frame.f_locals
        ]
        if groups:
            ranks = [_rank_in_launch(groups[-1], rank) for rank in named]
            return tuple(rank for rank in ranks if rank is not None)
    return ()


_WORKER_EXIT_WAIT_S: Final = 0.5
"""A dying worker closes its connection first; its exit code is waited for this long."""
_WORKER_FLUSH_WAIT_S: Final = 2.0
"""The same for one that has removed its socket: it exits in order, and flushes its queues."""


def dead_worker_of(exc: BaseException) -> str:
    """Return which worker of torch's DataLoader died and how, if the exception comes from one."""
    # torch itself reports "exited unexpectedly" or a reset connection, without the signal.
    dead = _find_dead_worker(exc, waits=True)
    if dead is None:
        return ""
    number, worker = dead
    code = worker.exitcode or 0
    how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    last_error = read_last_error() if code > 0 else ""
    return f"DataLoader worker {number} (pid {worker.pid}) {how}" + (
        f"; {last_error}" if last_error else ""
    )


def read_last_error() -> str:
    """Return a text with the error of the last traceback in the file that is this process's stderr.

    Another thread or process of the rank may have written it. The text is empty if there is none, or if
    stderr is a terminal or a pipe.
    """
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):
            return ""
        with open("/proc/self/fd/2", "rb") as file:  # noqa: PTH123 - a link to a file
            file.seek(max(0, os.fstat(2).st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
    error = find_printed_error(text)
    if error is None:
        return ""
    return f"the last error on this rank's stderr, which may be the reason: {error}"


_TAIL_BYTES: Final = 1 << 14


def _find_dead_worker(exc: BaseException, *, waits: bool = False) -> tuple[int, BaseProcess] | None:
    # torch raises in the rank what a worker has raised: that does not show the worker's end.
    if isinstance(exc, DDPSafeError) or text_of(exc).startswith("Caught "):
        return None
    iterator: object = None
    for frame, _ in traceback.walk_tb(exc.__traceback__):
        if frame.f_code.co_filename.endswith(_DATALOADER) and not workers_of(iterator):
            iterator = frame.f_locals.get("self")
    workers = workers_of(iterator)
    # A worker that exits removes the socket of what it has sent before it is read, a file without a name.
    is_flushing = isinstance(exc, FileNotFoundError) and exc.filename is None
    is_its_end = is_flushing or isinstance(exc, (ConnectionError, EOFError))
    if waits and workers and is_its_end:
        limit_s = _WORKER_FLUSH_WAIT_S if is_flushing else _WORKER_EXIT_WAIT_S
        connection.wait([worker.sentinel for worker in workers], limit_s)
    line = line_of(exc, MAX_MESSAGE)
    named = line if find_kind(line) == "killed" else ""  # torch gives the pid
    ended = [(i, each) for i, each in enumerate(workers) if each.exitcode is not None]
    # One that has come to the end of its stream exits with 0, too.
    return next(
        (
            (number, worker)
            for number, worker in ended
            if worker.exitcode
            or str(worker.pid) in named
            or (is_its_end and is_expected(iterator, number))
        ),
        None,
    )


def signal_that_ended_a_child(exc: BaseException) -> int:
    """Return the signal by which a process ended whose end is the reason of an exception; 0 if unknown.

    That is a worker of a DataLoader, or a program that the script has started.
    """
    for error in _chain_of(exc):
        dead = _find_dead_worker(error)
        code: object = None if dead is None else dead[1].exitcode
        for name in ("exitcode", "returncode"):  # of WorkerDiedError and of CalledProcessError
            code = getattr(error, name, None) if code is None else code
        if isinstance(code, int) and code < 0:
            return -code
        if isinstance(code, int) and code > _BY_SIGNAL:  # as a shell exits
            return code - _BY_SIGNAL
        signum = find_signal_of_worker(line_of(error, MAX_MESSAGE))
        if signum:
            return signum
    return next((-code for code in _exit_codes_in(exc) if code < 0), 0)


def _exit_codes_in(exc: BaseException) -> Iterator[int]:
    """Yield the exit codes of the processes that the frames of an exception hold, as of a decoder."""
    # The exception may be the script's own, such as "the decoder has closed its pipe".
    # Without the module, no frame holds a program.
    programs = getattr(sys.modules.get("subprocess"), "Popen", ())
    for error in _chain_of(exc):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            held = [*frame.f_locals.values()]
            held += vars(held[0]).values() if held and hasattr(held[0], "__dict__") else []
            for value in held[:_MAX_HELD]:
                code: object = None
                with contextlib.suppress(Exception):  # of a class that overrides them
                    if isinstance(value, programs):
                        code = value.poll()
                    elif isinstance(value, BaseProcess):
                        code = value.exitcode
                if isinstance(code, int):
                    yield code


def is_point_to_point(function: str) -> bool:
    """Return whether a function of torch is one of those that a `PointToPoint` describes."""
    return function in _PREPOSITIONS


def is_library(filename: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to ddpsafe."""
    # The code of the fork server is in "<string>".
    return filename.startswith(("<string>", *_OWN)) or bool(package_of(filename))


def find_own_files(files: Iterable[str]) -> frozenset[str]:
    """Return which files of a stack, the outermost first, are the user's.

    If all are in installed packages, the package that was called first is taken for the user's project.
    """
    paths = list(files)
    # The user's project may be installed beside the libraries, with pip for example.
    own = frozenset(path for path in paths if not is_library(path))
    packages = (package_of(path) for path in paths if not is_internal(path))
    first = next(filter(None, packages), "")
    if own or not first:
        return own
    return frozenset(path for path in paths if package_of(path) == first)


_CRASHED: Final = re.compile(r"^Current thread .*\n((?: +File .*\n?)+)", re.MULTILINE)
PRINTED_CALL: Final = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE
)
"""A call in what faulthandler writes, where the innermost comes first, or in a traceback, where it comes last."""


def crashed_in_users_exit(stderr: str) -> bool:
    """Return whether a process crashed in an exit function of the user's, by what faulthandler wrote."""
    crashed = _CRASHED.search(stderr)
    calls = list(PRINTED_CALL.finditer(crashed[1])) if crashed else []
    names = [call["name"] for call in calls]
    ending = end_as_interpreter.__name__
    # A library may crash while it takes itself down, but a save of the user's at exit is part of
    # the job.
    return ending in names and not all(
        is_library(call["file"]) for call in calls[: names.index(ending)]
    )


def is_internal(filename: str) -> bool:
    """Return whether a file is Python's, ddpsafe's, or in a package that ddpsafe calls through.

    Any other installed package may be the user's project.
    """
    package = package_of(filename)
    return package in _CALLED_THROUGH if package else filename.startswith(_OWN)


def package_of(filename: str) -> str:
    """Return the name of the installed package that a file belongs to; empty if it is in none."""
    match = _INSTALLED.search(filename)
    return match[1] if match else ""


# Debian's Python, and so that of NVIDIA's containers, installs into dist-packages.
_INSTALLED: Final = re.compile(r"/(?:site|dist)-packages/([^/.]+)")
_CALLED_THROUGH: Final = frozenset(
    ("cloudpickle", "ddpsafe", "psutil", "pydantic", "pydantic_settings", "tenacity", "torch")
)
_OWN: Final = (
    "<frozen",
    os.path.join(Path(__file__).parents[1], ""),  # noqa: PTH118 - keeps the separator at the end
    os.path.join(sysconfig.get_path("stdlib"), ""),  # noqa: PTH118 - as above
    # An environment's Python may be a link.
    os.path.join(os.path.realpath(sysconfig.get_path("stdlib")), ""),  # noqa: PTH118 - as above
)


def type_name_of(exc: BaseException) -> str:
    """Return the qualified name of an exception's type, as a traceback shows it."""
    cls = type(exc)
    if cls.__module__ in ("builtins", "__main__", "__mp_main__"):
        return cls.__qualname__
    return f"{cls.__module__}.{cls.__qualname__}"


def text_of(exc: BaseException) -> str:
    """Return ``str()`` of an exception, even if its ``__str__`` raises."""
    try:
        return str(exc)
    except BaseException as broken:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"(its __str__ raised {type(broken).__name__})"


def line_of(exc: BaseException, limit: int) -> str:
    """Return an exception's type and shortened text, like the last line of a traceback."""
    return f"{type_name_of(exc)}: {clip(text_of(exc), limit)}"


def traceback_of(exc: BaseException) -> str:
    """Return the traceback with its chain, as Python prints it."""
    try:
        return "".join(traceback.format_exception(exc))
    except BaseException:  # noqa: BLE001 - formatting calls the user's __str__ and __repr__
        return "".join(traceback.format_tb(exc.__traceback__)) + type_name_of(exc)


def exit_code_of(exc: BaseException) -> int | None:
    """Return the exit code that an exception requests; ``None`` if it requests no exit."""
    if isinstance(exc, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(exc, SystemExit):
        return None
    if exc.code is None:
        return 0
    if not isinstance(exc.code, int):
        return 1
    # The kernel keeps eight bits. ``sys.exit(os.system(…))`` may exit with 256, which must not become 0.
    return exc.code & 0xFF or int(exc.code != 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """What a chain of exceptions means.

    Attributes:
        shown: The exception to show: the one that left the function, or the rank's own error that a
            peer error hides.
        origin: Where the failure comes from; another rank only if the whole chain shows that.
        wraps_peer_error: Whether `shown` was raised while a peer error was handled.
        hidden_by: The peer error that was raised on top of `shown` and hides it.
    """

    shown: BaseException
    origin: Origin = "own"
    wraps_peer_error: bool = False
    hidden_by: BaseException | None = None


def note_wait(exc: BaseException) -> None:
    """Count one wait of the rank for the others while it handles an exception."""
    with contextlib.suppress(Exception):  # its class may allow no further attribute
        exc._ddpsafe_waits = _count_waits(exc) + 1  # type: ignore[attr-defined]  # noqa: SLF001 - a mark that ddpsafe sets


def has_continued(exc: BaseException) -> bool:
    """Return whether the rank has continued its work while it handles an exception."""
    return _count_waits(exc) >= _WAITS_TO_CONTINUE


def _count_waits(exc: BaseException) -> int:
    return int(getattr(exc, "__dict__", {}).get("_ddpsafe_waits", 0))


def find_on_its_way(exc: BaseException, running: Collection[FrameType]) -> BaseException | None:
    """Return the exception that is about to leave the program, of all that a thread handles."""
    passed: Counter[FrameType] = Counter()
    # Not always the innermost one: a cleanup in a `finally` may handle another one meanwhile, such
    # as an upload that it retries, and a generator is left by a `GeneratorExit`.
    handled: BaseException | None = exc
    for _ in range(_MAX_HANDLED):
        if handled is None:
            break
        tb = handled.__traceback__
        # If the frame has returned, it handled this one, which is only the context of a later exception.
        is_over = passed and (tb is None or tb.tb_frame not in running)
        if not is_over and not isinstance(handled, GeneratorExit):
            if tb is None or not _is_caught(tb.tb_frame, passed):
                return handled
            passed[tb.tb_frame] += 1
        handled = handled.__context__
    return None


def _is_caught(frame: FrameType, passed: Counter[FrameType]) -> bool:
    """Return whether an exception is in an ``except`` block after which the program continues.

    Otherwise it is about to leave: it is in a ``finally``, at the end of a ``with``, or in an ``except``
    block whose last statement raises or exits. Without a source, the innermost exception counts as about to
    leave.

    Args:
        frame: The function that handles it.
        passed: How many exceptions raised while this one was handled each frame handles.
    """
    # Python does not expose the difference, so the source of the function that handles it is read.
    # linecache also knows the cells of a notebook.
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return bool(passed)
    blocks = []
    for node in ast.walk(tree):
        if isinstance(node, _TRY):
            blocks += [(handler.body, not _leaves(handler.body[-1])) for handler in node.handlers]
            blocks += [(node.finalbody, False)] if node.finalbody else []
        elif passed and isinstance(node, (ast.With, ast.AsyncWith)):  # its exit has this line too
            blocks.append(([item.context_expr for item in node.items], False))
    around = [
        (block[0].lineno, is_caught)
        for block, is_caught in blocks
        if block[0].lineno <= frame.f_lineno <= (block[-1].end_lineno or 0)
    ]
    around.sort(key=lambda block: block[0], reverse=True)
    inner = passed[frame]
    if len(around) <= inner:  # one of the passed exceptions is no longer handled in any block
        return bool(passed)
    return around[inner][1]


def _leaves(statement: ast.stmt) -> bool:
    """Return whether a statement raises or calls a function that ends the process."""
    if isinstance(statement, ast.Raise):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in ("exit", "_exit", "quit", "abort")


def read_chain(exc: BaseException) -> ChainFacts:
    """Find which exception explains why the rank failed, given the one that left its function."""
    with contextlib.suppress(Exception):  # the user's class may break any attribute that is read
        return _read(exc)
    return ChainFacts(shown=exc)


def _read(exc: BaseException, depth: int = 0) -> ChainFacts:
    chain = _chain_of(exc)
    for number in reversed(range(len(chain))):
        outer, inner = chain[number], chain[number + 1 : number + 2]
        origin = _origin_of(outer, depth)
        # A script that raises "from None" has decided that the context does not matter.
        has_context = isinstance(outer, DDPSafeError) or not outer.__suppress_context__
        if inner and origin != "own" and has_context:
            return ChainFacts(shown=inner[0], hidden_by=outer, origin=_origin_of(inner[0], depth))
        if origin in ("peer-lost", "timeout"):
            return ChainFacts(shown=exc, origin=origin, wraps_peer_error=outer is not exc)
    return ChainFacts(shown=exc, origin=_origin_of(exc, depth))


def _chain_of(exc: BaseException) -> list[BaseException]:
    """Return the exception, then the one that it was raised from or while handling, and so on."""
    chain: list[BaseException] = []
    seen: set[int] = set()
    error: object = exc
    while isinstance(error, BaseException) and id(error) not in seen:
        seen.add(id(error))
        chain.append(error)
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return chain


def _origin_of(exc: BaseException, depth: int) -> Origin:
    """Return where one exception comes from, without regard to its chain.

    ddpsafe's own errors carry their origin. torch's errors are recognized by their text, but only if torch
    raised them. A group of exceptions comes from another rank only if all of its members do.
    """
    if isinstance(exc, DDPSafeError):
        return exc.origin
    if isinstance(exc, _GROUP):
        if depth == _MAX_GROUP_DEPTH:
            return "own"
        origins = [_read(member, depth + 1).origin for member in exc.exceptions]
        return "own" if "own" in origins or "mismatch" in origins else origins[0]
    if not isinstance(exc, RuntimeError):
        return "own"
    # torch raised it if its type, its text or the file that raised it is torch's. The user's own
    # connections fail with the same texts.
    line = line_of(exc, MAX_MESSAGE)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(exc.__traceback__)]
    file = files[-1] if files else ""
    if type(exc).__module__.partition(".")[0] != "torch" and not is_of_a_backend(line, file):
        return "own"
    return find_peer_origin(line) or "own"
