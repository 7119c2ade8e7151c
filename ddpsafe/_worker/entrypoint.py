"""A rank from start to exit: prepare the process, call the user's function, report, exit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, cast

from ddpsafe import _stdlib_private
from ddpsafe._clock import BoundedCall, Deadline, HeldClock
from ddpsafe._garbage import exempt_from_gc
from ddpsafe._logging import name_rank
from ddpsafe._stdlib_private import end_as_interpreter, read_exit
from ddpsafe._wire import payload
from ddpsafe._wire.exception_facts import (
    MAX_MESSAGE,
    exit_code_of,
    find_on_its_way,
    find_own_files,
    is_internal,
    line_of,
    point_to_point_in,
    type_name_of,
)
from ddpsafe._wire.foreign_texts import find_kind
from ddpsafe._wire.log_overflow import LogOverflow
from ddpsafe._wire.messages import (
    CheckpointFolder,
    Entered,
    Finishing,
    LivingThreads,
    Position,
    Raised,
    Recovered,
    Returned,
    ScriptExit,
    Whereabouts,
    in_a_line,
)
from ddpsafe._wire.rank_pipe import (
    ALL_STARTED,
    ASK_POSITION,
    ASK_STACKS,
    ASK_STOP,
    ASK_THREADS,
    ASK_WHEREABOUTS,
    CALL_NUMBER,
    END_NOW,
    LOGS_FULL,
    RESULT_OFFSET,
    STOP_AT,
    Claim,
    Sender,
)
from ddpsafe._wire.spec import open_log, semaphore_prefix, unreported_mark
from ddpsafe._worker import environment, pending_exception
from ddpsafe._worker.inherited_place import prepare_interpreters
from ddpsafe._worker.rank import this_rank
from ddpsafe._worker.stop_agreement import LauncherLine, StopCalls, Stopping
from ddpsafe._worker.stop_signals import prepare_helpers, set_death_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType

    import torch

    from ddpsafe._wire.messages import Collective, Phase
    from ddpsafe._wire.rank_pipe import Inheritance
    from ddpsafe._wire.spec import RankSpec

    Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


_GIB = 1 << 30

_SETTLED: Final = timedelta(milliseconds=50)


def is_out_of_memory(exc: BaseException) -> bool:
    """Return whether the exception means that the host or a GPU ran out of memory."""
    if isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError":
        return True
    # torch's host allocator, CUDA and NCCL have no exception class for it.
    return isinstance(exc, RuntimeError) and find_kind(line_of(exc, MAX_MESSAGE)) == "out-of-memory"


def describe_memory() -> str:
    """Return a text with the memory of this process, on the host and on its GPU if it uses one."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    parts = [f"{peak / _GIB:.2f} GiB of host memory at its peak"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        gpu_memory = f"{allocated / _GIB:.2f} GiB in tensors of {reserved / _GIB:.2f} GiB reserved"
        parts.append(f"{gpu_memory} on the GPU")
    return "; ".join(parts)


def find_living_threads() -> LivingThreads:
    """Return the threads that Python joins at exit, each with the line it is at.

    If there are none, the main thread itself has not finished: a function that is registered with
    `atexit` may still run.
    """
    main = threading.main_thread()
    living = [
        thread for thread in threading.enumerate() if thread is not main and not thread.daemon
    ]
    frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
    if not living:
        at_exit = read_exit(frames.get(main.ident or 0))
        return LivingThreads(
            places=(),
            main=_place_of(main, frames, is_main=True),
            queue=at_exit == "queue",
            children=tuple(
                f"process {child.name!r} (pid {child.pid})"
                for child in multiprocessing.active_children()
            )
            if at_exit == "children"
            else (),
        )
    places = [(thread.name, _place_of(thread, frames, is_main=False)) for thread in living]
    return LivingThreads(
        places=tuple(
            f"thread {name!r}" + (f" at {place}" if place else "") for name, place in places
        )
    )


def _place_of(thread: threading.Thread, frames: dict[int, FrameType], *, is_main: bool) -> str:
    """Return the innermost line of the user's code, if the thread runs any.

    Otherwise return its innermost line of any code, for the main thread outside of Python and ddpsafe.
    """
    frame = frames.get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    files = find_own_files(entry.filename for entry in stack)
    own = [entry for entry in stack if entry.filename in files]
    # The code of a process that `multiprocessing` has started is in "<string>".
    candidates = own or [
        entry
        for entry in stack
        if not (is_main and (is_internal(entry.filename) or entry.filename == "<string>"))
    ]
    if not candidates:
        return ""
    innermost = candidates[-1]
    return f"{innermost.filename}:{innermost.lineno} in {innermost.name}"


_MAX_EXCEPTION_BYTES = 1 << 20
# The modules that call the user's code, which begins after their frames.
_CALLERS = (__name__, "ddpsafe._worker.script", "ddpsafe._stdlib_private", "runpy")
# From this size on, a result goes through shared memory instead of the pipe.
_LARGE_RESULT_BYTES = 1 << 20
# How long a user's `__str__` may delay the position that the launcher has asked for.
_DESCRIBE_S = 0.2
# The path of a socket has at most 107 characters, and its name 17: listener-xxxxxxxx.
_LONGEST_SOCKETS_FOLDER = 85


class Reporter:
    """Sends this rank's reports to its launcher.

    Args:
        shared_fd: See `Inheritance.shared`.

    Attributes:
        has_failed: Whether the rank has reported its failure, and only ends.
    """

    def __init__(self, sender: Sender, log: str, shared_fd: int) -> None:
        self._sender = sender
        self.send = sender.send
        self._log = log
        self._shared_fd = shared_fd
        self._has_shared = Claim(shared_fd)
        self._reported: set[int] = set()
        self.phase: Phase = "starting"
        self.has_failed = False

    def enter(self, phase: Phase) -> None:
        """Report that a phase begins."""
        self.phase = phase
        self._sender.send(Entered(phase=phase))

    def returned(self, value: object, *, stop_calls: int) -> None:
        """Report that the user's function returned.

        Raises:
            CannotTravelError: The returned value cannot be pickled.
        """
        exited_at = value.where if isinstance(value, ScriptExit) else ""
        result = None if exited_at else value
        try:
            pickled = payload.dumps_result(result)
        except Exception as exc:
            culprit = payload.find_unpicklable(result, "the returned value")
            where = culprit[0] if culprit else "the returned value"
            msg = f"the function's result cannot be sent to the launcher: {where}: {exc}"
            raise payload.CannotTravelError(msg) from exc
        is_shared = False
        # The script may have closed all descriptors, or have a file size limit (ulimit -f).
        if pickled.nbytes() >= _LARGE_RESULT_BYTES and self._has_shared.holds():
            with contextlib.suppress(OSError):
                with open(self._shared_fd, "r+b", closefd=False) as file:
                    file.seek(RESULT_OFFSET)
                    file.writelines(pickled.chunks())
                    file.truncate()
                is_shared = True
        # torch notes the end of a call a moment after it has returned.
        position = read_position(asks_events=False)
        for pause_s in Deadline.after(_SETTLED).pauses_s():
            if all(call.done for call in position.collectives):
                break
            time.sleep(pause_s)
            position = read_position(asks_events=False)
        self._sender.send(
            Returned(
                payload=None if is_shared else bytes(pickled),
                position=position,
                stop_calls=stop_calls,
                exited_at=exited_at,
                has_callers=_has_callers(position.collectives),
            )
        )
        self._log_if_unsent("the rank has ended in order, but the pipe to the launcher is closed")
        self.phase = "leaving"

    def raised(self, exc: BaseException, state: Literal["in-flight", "caught", "final"]) -> None:
        """Report an exception: once before it has left the user's function, and again when it has.

        The state is ``final`` once it has left the function. Before that it is ``caught`` if the exception is
        in an ``except`` block after which the program continues, else ``in-flight``.
        """
        final = state == "final"
        if not final and id(exc) in self._reported:
            return
        # Taken first: describing the exception takes time, in which other ranks fail because of it.
        at_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        self._reported.add(id(exc))
        raised = Raised.from_exception(
            _from_users_code(exc),
            phase=self.phase,
            pickled=_exception_bytes,
            position=read_position(asks_events=final),
            final=final,
            held=describe_memory() if is_out_of_memory(exc) else "",
            at_ns=at_ns,
            wall_ns=wall_ns,
        )
        self._sender.send(replace(raised, is_caught=state == "caught"))
        if final:
            self._log_if_unsent(raised.traceback)

    def _log_if_unsent(self, text: str) -> None:
        """If the script closed the pipe, append the text to the rank's log and mark the log."""
        if self._sender.is_lost:
            # The log is opened by name: the script may have closed file descriptor 2 as well.
            with (
                contextlib.suppress(OSError),
                open(  # noqa: PTH123 - a file descriptor
                    open_log(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT),
                    "a",
                    encoding="utf-8",
                    errors="backslashreplace",
                ) as file,
            ):
                file.write(f"{text.rstrip()}\n")
                unreported_mark(self._log).touch()

    def whereabouts(self) -> None:
        """Report where this rank is and what its threads do, while it keeps running."""
        from ddpsafe._worker.whereabouts import read_whereabouts

        report = Whereabouts(position=Position(collectives=()))
        # Each question has an answer: the launcher counts them.
        with contextlib.suppress(Exception):
            report = read_whereabouts()
        self._sender.send(report)

    def evidence(self, dump_stacks: Callable[[], None]) -> None:
        """Provide what the diagnosis needs from this rank once the attempt is over.

        That is a dump of its stacks, a report of the main thread's exception if one is in flight, and
        last, a report of where it is.
        """
        dump_stacks()
        # In its own thread: a user's __str__ may hang, and this thread watches the launcher.
        describing = BoundedCall(self._pending_exception, name="ddpsafe-exception")
        done = describing.wait(_DESCRIBE_S)
        handling = ""
        if done:
            with contextlib.suppress(Exception):  # the position must be sent in any case
                handling = describing.result()
        self._sender.send(replace(read_position(asks_events=True), handling=handling))

    def _pending_exception(self) -> str:
        """Report the main thread's exception in flight; return a line on one that it only handles."""
        # From Python 3.12 on the values are exceptions; before, they are `sys.exc_info()` tuples.
        threads: dict[int, Any] = sys._current_exceptions()  # noqa: SLF001 - documented, in spite of its name
        current = threads.get(threading.main_thread().ident or 0)
        exc = current[1] if isinstance(current, tuple) else current
        if not isinstance(exc, BaseException):
            return ""
        tb = exc.__traceback__
        if tb is not None and tb.tb_frame.f_globals.get("__name__") == __name__:
            return ""  # this module handles it, and so is reporting it already
        main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - as above
        leaving = find_on_its_way(exc, _frames_above(main))
        if leaving is None:
            return in_a_line(exc)
        self.raised(leaving, "in-flight")
        return ""

    def exception_in_flight(self) -> BaseException | None:
        """Report the exception that the user's ``except`` or ``finally`` is handling; return it."""
        # An exception of a fork is not the rank's: it is not reported, so nothing is withdrawn.
        exc = sys.exc_info()[1] if self._sender.is_rank_process() else None
        if exc is None:
            return None
        leaving = find_on_its_way(exc, _frames_above(sys._getframe()))  # noqa: SLF001 - documented, in spite of its name
        if leaving is None and isinstance(exc, GeneratorExit):
            return None
        self.raised(leaving or exc, "caught" if leaving is None else "in-flight")
        return exc

    def recovered(self) -> None:
        """Report that the rank continues despite the exception that it reported."""
        self._reported.clear()
        self._sender.send(Recovered())


def _has_callers(calls: Iterable[Collective]) -> bool:
    """Return whether other threads than the main one have called collectives, and still run."""
    callers = {call.thread_id for call in calls}
    if this_rank.waits is not None:
        callers |= this_rank.waits.callers
    return any(
        thread.ident in callers
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
    )


def _is_idle() -> bool:
    """Return whether torch has recorded this rank's collectives, and none is under way for other ranks.

    A device may always work for them.
    """
    import torch
    import torch.distributed as dist

    calls = read_position(asks_events=False).collectives
    is_done = bool(calls) and all(call.done for call in calls)
    is_on_cpu = dist.get_backend() == "gloo" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch
    return is_done and is_on_cpu and not _has_callers(calls)


def read_position(*, asks_events: bool) -> Position:
    """Return where the rank is in each process group; empty if torch is not loaded yet."""
    from ddpsafe._worker.torch_hooks import read_recorders

    try:
        main = threading.main_thread().ident or 0
        frame = sys._current_frames().get(main)  # noqa: SLF001 - documented, in spite of its name
        collectives, arrivals = read_recorders(asks_events=asks_events)
        waits = this_rank.waits
        position = Position(
            collectives=collectives,
            arrivals=arrivals,
            point_to_point=point_to_point_in(frame),
            done={} if waits is None else waits.known,  # without any, it has done nothing
        )
        callers = {call.thread_id for call in collectives}
        if callers <= {0, main} and not (waits and waits.now):
            return position
        from ddpsafe._worker.whereabouts import with_threads

        return with_threads(position)
    except Exception:  # noqa: BLE001 - losing the position must not cost the report
        return Position(collectives=())


def run_rank(spec: RankSpec, inheritance: Inheritance) -> NoReturn:
    """Run one rank; the target function of its process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])  # see `broken_pipes_raise`
    sender = Sender(inheritance.report.fd)
    reporter = Reporter(sender, spec.logs.stderr, inheritance.shared.fd)
    # The calls of `stop_requested` are numbered, and the ranks agree on the number at which all stop.
    launcher_line = LauncherLine(sender, StopCalls())
    this_rank.stopping = stopping = Stopping(launcher_line)
    stacks = environment.Stacks(spec.logs)
    overflow = LogOverflow(spec.logs, sender.send)
    since_start = HeldClock()
    _tie_to_launcher(
        inheritance.lifeline.fd,
        launcher_pid=spec.launcher_pid,
        is_child=spec.inherited_env is None,
        on_message={
            ALL_STARTED: since_start.release,
            ASK_POSITION: lambda: sender.send(read_position(asks_events=False)),
            ASK_WHEREABOUTS: reporter.whereabouts,
            ASK_STACKS: lambda: reporter.evidence(stacks.show_all),
            ASK_THREADS: lambda: sender.send(find_living_threads()),
            ASK_STOP: launcher_line.promise,
            # A rank that has reported its failure ends by itself; the grace period limits that.
            END_NOW: lambda: None if reporter.has_failed else stopping.signals.die_of_sigterm(),
            LOGS_FULL: lambda: overflow.replace_logs("its disk is nearly full"),
        },
        on_agreement=launcher_line.calls.agree,
    )
    try:
        terminal = environment.capture_output(spec.logs, overflow)
        stacks.follow_signal()
        environment.apply_environment(spec)
        if terminal is not None:
            terminal.note_environment()
        if spec.inherited_env is not None:
            # The fork server ignores SIGINT. Python's default is KeyboardInterrupt.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        # The start of this rank has changed how `multiprocessing` starts processes here.
        multiprocessing.set_start_method(spec.child_start_method, force=True)
        # The launcher recognises the semaphores of this rank and its child processes, and removes their sockets.
        _stdlib_private.name_semaphores(semaphore_prefix(spec.launch_id))
        if len(spec.store_dir) < _LONGEST_SOCKETS_FOLDER:
            _stdlib_private.use_sockets_folder(spec.store_dir)
        prepare_helpers()
        prepare_interpreters()
        reporter.enter("loading")
        value = _run_user_code(spec, reporter, inheritance, since_start)
        if sender.is_rank_process():
            if multiprocessing.active_children():
                # An iterator of a DataLoader may be in a reference cycle. That its workers end is part of what
                # the function does, and not of the end of the process group, which collects garbage too.
                gc.collect()
            reporter.returned(value, stop_calls=launcher_line.calls.count)
    except BaseException as raised:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures
        exc = _describable(raised)
        # Report first. Then what the script has left for its end runs, which the grace period limits; ddpsafe
        # itself calls no collective and no destroy on a failing path.
        try:
            _drop_signal_handlers()
        except BaseException:  # noqa: BLE001 - a handler raised before the function could catch that
            _drop_signal_handlers()
        if sender.is_rank_process():
            reporter.has_failed = True
            # Programs that the script's exit functions start do not inherit it, as they would SIG_IGN.
            signal.signal(signal.SIGTERM, lambda *_: None)
            reporter.raised(exc, "final")
            if spec.style == "run" and sys.excepthook is not sys.__excepthook__:
                _call_hook(exc)
            end_as_interpreter()
        elif exit_code_of(exc) is None:  # a fork's own error: no other process reports it
            with contextlib.suppress(Exception):  # its __str__ raises, or stderr is closed
                traceback.print_exception(_from_users_code(exc))
        _flush()
        code = exit_code_of(exc)
        os._exit(1 if code is None else code)
    if not sender.is_rank_process():
        # The user's function forked, and this is the child: the parent is the rank.
        _flush()
        os._exit(0)
    from ddpsafe._worker import session

    session.leave(Deadline.after(spec.timeouts.barrier), _is_idle)
    # What still runs is the script's own: its threads, and then its exit functions.
    sender.send(Finishing(has_threads=True))
    end_as_interpreter(after_threads=lambda: sender.send(Finishing(has_threads=False)))
    _flush()
    os._exit(0)


def _run_user_code(
    spec: RankSpec, reporter: Reporter, inheritance: Inheritance, since_start: HeldClock
) -> object:
    from ddpsafe._worker import session
    from ddpsafe._worker.torch_hooks import after_import_of_torch

    this_rank.reporter = reporter
    name_rank(spec.world, spec.attempt)
    this_rank.spec = spec
    this_rank.since_start = since_start

    def use_torch() -> torch.device:
        session.install_hooks(spec)
        environment.count_steps(
            inheritance.shared.fd,
            after_step=pending_exception.after_step,
            report_folder=lambda path: reporter.send(CheckpointFolder(path=path)),
        )
        # In spawn style CUDA stays uninitialised: as under mp.spawn, the function may choose its GPUs
        # or fork.
        return environment.use_device(spec.device, is_current=spec.style == "launch")

    def load_call() -> Call:
        # Mapped, not read: all ranks share the file's offset, and a single read ends at 2 GiB.
        data = payload.map_file(inheritance.call.fd)
        os.close(inheritance.call.fd)
        return cast("Call", payload.loads(data, inheritance.handles))

    if spec.style == "run" and spec.seed is None and "torch" not in sys.modules:
        # The script finds the interpreter as under torchrun: what it sets before its own `import torch`, such
        # as OMP_NUM_THREADS or TORCH_LOGS, has an effect.
        fn, args, kwargs = load_call()
        after_import_of_torch(lambda: session.join(spec, use_torch(), on_phase=reporter.enter))
        reporter.enter("running")
        value = fn(spec.world.local_rank, *args, **kwargs)
        return value if isinstance(value, ScriptExit) else None
    with exempt_from_gc(after_script=spec.style != "run"):
        importlib.import_module("torch.distributed")
    environment.use_threads(spec.num_threads)
    # Before unpickling: arguments that go to "cuda" must land on the rank's GPU, not on GPU 0.
    device = use_torch()
    fn, args, kwargs = load_call()
    context = session.join(spec, device, on_phase=reporter.enter)
    if spec.seed is not None:
        environment.seed_run(spec.seed)
    reporter.enter("running")
    if spec.style == "launch":
        return fn(context, *args, **kwargs)
    value = fn(spec.world.local_rank, *args, **kwargs)
    # mp.spawn drops the returned value too, so it need not be picklable.
    return value if isinstance(value, ScriptExit) else None


def _describable(exc: BaseException) -> BaseException:
    """Return the exception, or one that stands for it if its class breaks what each exception has."""
    try:
        is_out_of_memory(exc)
        type_name_of(exc)
        exit_code_of(exc)
        exc.with_traceback(exc.__traceback__)
    except BaseException:  # noqa: BLE001 - the user's class may raise anything
        cls = type(exc)
        name = type.__dict__["__qualname__"].__get__(cls)
        tb = BaseException.__dict__["__traceback__"].__get__(exc)
        if issubclass(cls, SystemExit):
            return SystemExit(SystemExit.__dict__["code"].__get__(exc)).with_traceback(tb)
        message = ""
        with contextlib.suppress(BaseException):  # as above
            message = f": {BaseException.__str__(exc)}"
        text = f"{name}{message} (its class raises where it is described)"
        return RuntimeError(text).with_traceback(tb)
    return exc


def _from_users_code(exc: BaseException) -> BaseException:
    """Return the exception with a traceback that begins at the user's function."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_globals.get("__name__") in _CALLERS:
        tb = tb.tb_next
    # That of a script that cannot be compiled begins nowhere: no line of it has run.
    is_kept = tb is None and not isinstance(exc, SyntaxError)
    return exc if is_kept else exc.with_traceback(tb)


def _exception_bytes(exc: BaseException) -> bytes | None:
    """Return the pickled exception; ``None`` if it is too large or does not survive the trip."""
    try:
        data = bytes(payload.dumps_result(exc))
        if len(data) > _MAX_EXCEPTION_BYTES or not isinstance(payload.loads(data), type(exc)):
            return None
    except BaseException:  # noqa: BLE001 - a user's exception may refuse in any way, exits included
        return None
    return data


def _frames_above(frame: FrameType | None) -> set[FrameType]:
    """Return the frames of a thread, given its innermost one."""
    return {above for above, _ in traceback.walk_stack(frame)}


def _drop_signal_handlers() -> None:
    """Remove the script's signal handlers, so that none raises while its failure is reported.

    torch's SIGCHLD handler raises whenever a DataLoader worker dies, at whatever line this is.
    """
    try:
        for signum in (each for each in signal.valid_signals() if callable(signal.getsignal(each))):
            is_child = signum == signal.SIGCHLD
            signal.signal(signum, signal.SIG_DFL if is_child else signal.SIG_IGN)
    except BaseException:  # noqa: BLE001 - one of them raised just now: remove the rest
        _drop_signal_handlers()


def _call_hook(exc: BaseException) -> None:
    """Call the script's `sys.excepthook`, as the interpreter does."""
    if not isinstance(exc, SystemExit):
        with contextlib.suppress(BaseException):  # the launcher has the report already
            sys.excepthook(type(exc), exc, exc.__traceback__)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]  # there may be none
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


# ---- the pipe to the launcher ----


def _tie_to_launcher(
    pipe_fd: int,
    *,
    launcher_pid: int,
    is_child: bool,
    on_message: Mapping[bytes, Callable[[], None]],
    on_agreement: Callable[[int], None],
) -> None:
    """Make this process, and what it started, end when the launcher exits.

    There are three ways to notice the exit, because each has a blind spot. The kernel's parent-death
    signal reaches a rank that holds the GIL or hangs in C++, even if another process inherited the
    pipe's write end and keeps it open; but it is bound to the thread that started the rank. The pipe
    works wherever Python still runs, also under the forkserver. The check of the parent covers the
    moment before both are set up. (The launcher's reaper process ends the rank's descendants.)

    Args:
        pipe_fd: Read end of a pipe that only the launcher can write to.
        launcher_pid: Process id of the launcher.
        is_child: Whether the launcher is the direct parent; under the forkserver it is not.
        on_message: What to call, in a thread, for each message such as `ASK_POSITION`. The function
            for `ALL_STARTED` is also called once no more messages can arrive.
        on_agreement: Called in that thread with the number of the call of `stop_requested` from
            which on the answer is yes.
    """
    handlers = {
        **on_message,
        STOP_AT: lambda: on_agreement(*CALL_NUMBER.unpack(os.read(pipe_fd, CALL_NUMBER.size))),
    }
    # Its own session: the launcher can end all of it at once, and Ctrl-C in the terminal reaches only
    # the launcher, which then ends the ranks in order.
    with contextlib.suppress(PermissionError):
        os.setsid()
    set_death_signal(signal.SIGKILL)
    if is_child and os.getppid() != launcher_pid:
        _end_session()
    threading.Thread(
        target=_watch_lifeline, args=(pipe_fd, handlers), name="ddpsafe-lifeline", daemon=True
    ).start()


def _watch_lifeline(pipe_fd: int, handlers: Mapping[bytes, Callable[[], None]]) -> None:
    """Handle the launcher's messages until it exits or the script closes the pipe."""
    # After the script has closed the pipe, the descriptor may be one of the script's own files. Only
    # the kernel's signal then notices that the launcher exits.
    claim = Claim(pipe_fd)
    while claim.holds():
        try:
            message = os.read(pipe_fd, 1)
        except OSError:  # closed just now
            break
        if not message:
            _end_session()
        with contextlib.suppress(Exception):  # the launcher copes with a missing reply
            handlers[message]()
    handlers[ALL_STARTED]()


def _end_session() -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)
