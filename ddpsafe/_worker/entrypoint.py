"""The first and the last lines of a rank: prepare, call the user's function, report, leave."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from ddpsafe._clock import BoundedCall, Deadline, HeldClock
from ddpsafe._garbage import out_of_collections
from ddpsafe._logging import name_rank
from ddpsafe._stdlib_private import end_as_interpreter
from ddpsafe._wire import payload
from ddpsafe._wire.exception_facts import (
    MAX_MESSAGE,
    exit_code_of,
    find_on_its_way,
    find_own_files,
    line_of,
    point_to_point_in,
)
from ddpsafe._wire.foreign_texts import find_kind
from ddpsafe._wire.messages import (
    CheckpointFolder,
    Entered,
    LivingThreads,
    Position,
    Raised,
    Recovered,
    Returned,
    ScriptExit,
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
    RESULT_OFFSET,
    STOP_AT,
    Claim,
    Sender,
)
from ddpsafe._wire.spec import open_log, unreported_mark
from ddpsafe._worker import environment, pending_exception, stop_agreement
from ddpsafe._worker.stop_agreement import LauncherLine, StopCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from ddpsafe._wire.messages import Phase
    from ddpsafe._wire.rank_pipe import Inheritance
    from ddpsafe._wire.spec import RankSpec

    Call = tuple[Callable[..., object], tuple[object, ...], dict[str, object]]


_GIB = 1 << 30
_PR_SET_PDEATHSIG: Final = 1


def is_out_of_memory(exc: BaseException) -> bool:
    """Tell whether the exception says that memory ran out, on the host or on a GPU."""
    if isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError":
        return True
    # torch's allocator of host memory, CUDA's own errors and NCCL's have no class for it.
    return isinstance(exc, RuntimeError) and find_kind(line_of(exc, MAX_MESSAGE)) == "out-of-memory"


def describe_memory() -> str:
    """Say what this process holds, on the host and on its GPU if it uses one."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    parts = [f"{peak / _GIB:.2f} GiB of host memory at its peak"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        held = f"{allocated / _GIB:.2f} GiB in tensors of {reserved / _GIB:.2f} GiB reserved"
        parts.append(f"{held} on the GPU")
    return "; ".join(parts)


def find_living_threads() -> LivingThreads:
    """Name each thread that Python waits for at its end, with its place.

    Without one it is the main thread that has not come to the end, as in a function that is
    registered with `atexit`.
    """
    main = threading.main_thread()
    kept = [each for each in threading.enumerate() if each is not main and not each.daemon]
    frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
    if not kept:
        return LivingThreads(places=(), main=_place_of(main, frames, is_main=True))
    places = [(each.name, _place_of(each, frames, is_main=False)) for each in kept]
    return LivingThreads(
        places=tuple(
            f"thread {name!r}" + (f" at {place}" if place else "") for name, place in places
        )
    )


def _place_of(thread: threading.Thread, frames: dict[int, FrameType], *, is_main: bool) -> str:
    """Return the innermost line that a thread is at: one of the user's, of the main thread only such."""
    frame = frames.get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    files = find_own_files(each.filename for each in stack)
    own = [each for each in stack if each.filename in files]
    shown = own or ([] if is_main else stack)
    return f"{shown[-1].filename}:{shown[-1].lineno} in {shown[-1].name}" if shown else ""


_MAX_EXCEPTION_BYTES = 1 << 20
_LARGE_RESULT_BYTES = 1 << 20
_DESCRIBE_S = 0.2


class Reporter:
    """What this rank tells its launcher, and at which phase it is."""

    def __init__(self, sender: Sender, log: str, shared_fd: int) -> None:
        """Start in the phase every process starts in.

        Args:
            sender: The pipe.
            log: The file of the rank's stderr.
            shared_fd: See `Inheritance.shared`.
        """
        self._sender = sender
        self._log = log
        self._shared_fd = shared_fd
        self._has_shared = Claim(shared_fd)
        self._told: set[int] = set()
        self.phase: Phase = "starting"

    def is_here(self) -> bool:
        """Tell whether this process is the rank, and not a fork of it."""
        return self._sender.is_here()

    def enter(self, phase: Phase) -> None:
        """Say that a phase begins."""
        self.phase = phase
        self._sender.send(Entered(phase=phase))

    def returned(self, value: object, *, stop_calls: int) -> None:
        """Say that the user's function returned; raises where the value cannot travel."""
        exited_at = value.where if isinstance(value, ScriptExit) else ""
        result = None if exited_at else value
        try:
            pickled = payload.dumps_result(result)
        except Exception as exc:
            culprit = payload.find_unpicklable(result, "the returned value")
            where = culprit[0] if culprit else "the returned value"
            msg = f"the function's result cannot be sent to the launcher: {where}: {exc}"
            raise payload.CannotTravelError(msg) from exc
        is_shared = (
            pickled.nbytes() >= _LARGE_RESULT_BYTES
            and self._has_shared.holds()  # the script may have closed all descriptors
            and _write_result(pickled, self._shared_fd)
        )
        self._sender.send(
            Returned(
                payload=None if is_shared else bytes(pickled),
                position=position(asks_events=False),
                stop_calls=stop_calls,
                exited_at=exited_at,
            )
        )
        self._write_down_if_lost(
            "the function has returned, but the pipe to the launcher is closed"
        )
        self.phase = "leaving"

    def raised(self, exc: BaseException, *, final: bool, is_caught: bool = False) -> None:
        """Say that an exception is on its way, once in flight and once when it is final."""
        if not final and id(exc) in self._told:
            return
        # Before the work of describing it, during which others fail too.
        at_ns, wall_ns = time.monotonic_ns(), time.time_ns()
        self._told.add(id(exc))
        # The traceback begins at the user's function.
        tb = exc.__traceback__
        while tb is not None and tb.tb_frame.f_globals.get("__name__") == __name__:
            tb = tb.tb_next
        raised = Raised.from_exception(
            exc.with_traceback(tb) if tb is not None else exc,
            phase=self.phase,
            pickled=_exception_bytes,
            position=position(asks_events=final),
            final=final,
            held=describe_memory() if is_out_of_memory(exc) else "",
            at_ns=at_ns,
            wall_ns=wall_ns,
        )
        self._sender.send(replace(raised, is_caught=is_caught))
        if final:
            self._write_down_if_lost(raised.traceback)

    def _write_down_if_lost(self, text: str) -> None:
        """Append to the rank's log what the pipe does not take any more, and mark that it is there.

        The log is opened by its name, for the script may have closed file descriptor 2 as well.
        """
        if self._sender.is_lost:
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

    def position(self, *, asks_events: bool = False) -> None:
        """Say where this rank is in the sequence of collectives."""
        self._sender.send(position(asks_events=asks_events))

    def whereabouts(self) -> None:
        """Say where this rank is and what its threads do, while it goes on."""
        from ddpsafe._worker.whereabouts import read_whereabouts

        self._sender.send(read_whereabouts())

    def position_after(self, show_stacks: Callable[[], None]) -> None:
        """Show the stacks, and then say in full where this rank is: the attempt is over by now.

        An exception that the main thread has on its way is reported before.
        """
        show_stacks()
        # In a thread of its own: a user's __str__ may hang, and this one watches the launcher.
        describing = BoundedCall(self._pending_exception, name="ddpsafe-exception")
        done = describing.wait(_DESCRIBE_S)
        handling = ""
        if done:
            with contextlib.suppress(Exception):  # the position must be told in any case
                handling = describing.result()
        self._sender.send(replace(position(asks_events=True), handling=handling))

    def _pending_exception(self) -> str:
        """Report what the main thread has on its way; return what it handles and goes on, in a line."""
        # Exceptions themselves from 3.12 on, `sys.exc_info()` of each thread before.
        threads: dict[int, Any] = sys._current_exceptions()  # noqa: SLF001 - documented, in spite of its name
        current = threads.get(threading.main_thread().ident or 0)
        exc = current[1] if isinstance(current, tuple) else current
        if not isinstance(exc, BaseException) or _is_ours(exc):
            return ""
        main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - as above
        leaving = find_on_its_way(exc, _frames_above(main))
        if leaving is None:
            return in_a_line(exc)
        self.raised(leaving, final=False)
        return ""

    def checkpoint_folder(self, path: str) -> None:
        """Say where the rank keeps checkpoints."""
        self._sender.send(CheckpointFolder(path=path))

    def living_threads(self) -> None:
        """Say which threads keep this process alive."""
        self._sender.send(find_living_threads())

    def exception_in_flight(self) -> BaseException | None:
        """Report an exception that the user's ``except`` or ``finally`` is at; return it.

        One of a fork is not the rank's: it is not reported, so nothing has to be taken back.
        """
        exc = sys.exc_info()[1] if self.is_here() else None
        if exc is None:
            return None
        leaving = find_on_its_way(exc, _frames_above(sys._getframe()))  # noqa: SLF001 - documented, in spite of its name
        if leaving is None and isinstance(exc, GeneratorExit):
            return None
        self.raised(leaving or exc, final=False, is_caught=leaving is None)
        return exc

    def recovered(self) -> None:
        """Say that the rank goes on in spite of the exception it has reported."""
        self._told.clear()
        self._sender.send(Recovered())


def position(*, asks_events: bool) -> Position:
    """Return where the rank is in each group; nowhere where torch is not loaded yet."""
    from ddpsafe._worker.torch_hooks import read_recorders

    try:
        main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented, in spite of its name
        collectives, arrivals = read_recorders(asks_events=asks_events)
        return Position(
            collectives=collectives,
            arrivals=arrivals,
            point_to_point=point_to_point_in(main),
        )
    except Exception:  # noqa: BLE001 - evidence beside the report must never cost the report
        return Position(collectives=())


def run_rank(spec: RankSpec, inheritance: Inheritance) -> NoReturn:
    """Be one rank; the target of its process.

    Args:
        spec: Everything but the user's own function and arguments.
        inheritance: Pipes and files shared with the launcher.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPIPE])  # see `broken_pipes_raise`
    sender = Sender(inheritance.report.fd)
    reporter = Reporter(sender, spec.logs.stderr, inheritance.shared.fd)
    line = LauncherLine(sender, StopCalls())
    stop = stop_agreement.Stopping(line.calls, line)
    stop_agreement.enter(stop)
    stacks = environment.Stacks(spec.logs)
    since_start = HeldClock()
    _tie_to_launcher(
        inheritance.lifeline.fd,
        launcher_pid=spec.launcher_pid,
        is_child=spec.inherited_env is None,
        on_words={
            ALL_STARTED: since_start.release,
            ASK_POSITION: reporter.position,
            ASK_WHEREABOUTS: reporter.whereabouts,
            ASK_STACKS: lambda: reporter.position_after(stacks.show_all),
            ASK_THREADS: reporter.living_threads,
            ASK_STOP: line.promise,
            END_NOW: stop.signals.die_of_sigterm,
        },
        on_agreement=line.calls.agree,
    )
    try:
        environment.capture_output(spec.logs)
        stacks.follow_signal()
        environment.apply_environment(spec)
        if spec.inherited_env is not None:
            environment.restore_interrupt()
        environment.use_start_method(spec.child_start_method)
        environment.name_semaphores(spec.launch_id)
        reporter.enter("loading")
        value = _run_user_code(spec, reporter, inheritance, since_start)
        if reporter.is_here():
            reporter.returned(value, stop_calls=line.calls.count)
    except BaseException as exc:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures
        # Report, flush, exit: no collective, no destroy, no destructor on a failing path.
        _drop_signal_handlers()
        if reporter.is_here():
            reporter.raised(exc, final=True)
        elif exit_code_of(exc) is None:  # a fork's own, which is reported nowhere else
            with contextlib.suppress(Exception):  # its text, or a stream that is closed
                traceback.print_exception(exc)
        _flush()
        code = exit_code_of(exc)
        os._exit(1 if code is None else code)
    if not reporter.is_here():
        # The user's function has forked off this process and let it return: the rank is another.
        _flush()
        os._exit(0)
    from ddpsafe._worker import session

    session.leave(Deadline.after(spec.timeouts.barrier))
    end_as_interpreter()
    _flush()
    os._exit(0)


def _run_user_code(
    spec: RankSpec, reporter: Reporter, inheritance: Inheritance, since_start: HeldClock
) -> object:
    from ddpsafe._worker import session

    pending_exception.tell(reporter)
    name_rank(spec.world, spec.attempt)
    with out_of_collections(after_script=spec.style != "run"):
        session.install_hooks(spec, since_start)  # imports torch
    environment.use_threads(spec.num_threads)
    environment.count_steps(
        inheritance.shared.fd,
        after_step=pending_exception.after_step,
        tell_folder=reporter.checkpoint_folder,
    )
    # What unpickling the arguments does on "cuda" is done on the rank's GPU, not on the first one.
    # In spawn style the script may still choose its GPUs, or fork, as with mp.spawn.
    device = environment.use_device(spec.device, is_current=spec.style == "launch")
    # Mapped, for all ranks share the file's offset, and one read ends at 2 GiB.
    data = payload.map_file(inheritance.call.fd)
    os.close(inheritance.call.fd)
    fn, args, kwargs = cast("Call", payload.loads(data, inheritance.handles))
    context = session.join(spec, device, on_phase=reporter.enter)
    if spec.seed is not None:
        environment.seed_run(spec.seed)
    reporter.enter("running")
    if spec.style == "launch":
        return fn(context, *args, **kwargs)
    value = fn(spec.world.local_rank, *args, **kwargs)
    # mp.spawn drops the value too, which therefore need not be picklable.
    return value if isinstance(value, ScriptExit) else None


def _write_result(pickled: payload.Pickled, fd: int) -> bool:
    """Write a large result to the shared memory, past the pipe; tell whether it is there."""
    try:
        with open(fd, "r+b", closefd=False) as file:
            file.seek(RESULT_OFFSET)
            file.writelines(pickled.chunks())
            file.truncate()
    except OSError:  # a limit of the rank's own (ulimit -f)
        return False
    return True


def _exception_bytes(exc: BaseException) -> bytes | None:
    """Pickle an exception if its reader will be able to load it."""
    try:
        data = bytes(payload.dumps_result(exc))
        if len(data) > _MAX_EXCEPTION_BYTES or not isinstance(payload.loads(data), type(exc)):
            return None
    except BaseException:  # noqa: BLE001 - a user's exception may refuse in any way, exits included
        return None
    return data


def _frames_above(frame: FrameType | None) -> set[FrameType]:
    """Return the frames of a thread, from its innermost one."""
    return {each for each, _ in traceback.walk_stack(frame)}


def _is_ours(exc: BaseException) -> bool:
    """Tell whether this module handles the exception, which is being reported then."""
    tb = exc.__traceback__
    return tb is not None and tb.tb_frame.f_globals.get("__name__") == __name__


def _drop_signal_handlers() -> None:
    """Let no handler of the script raise while its failure is told.

    torch's for SIGCHLD does so for each worker of a DataLoader that dies, in whatever line this is.
    """
    try:
        for signum in filter(lambda each: callable(signal.getsignal(each)), signal.valid_signals()):
            is_child = signum == signal.SIGCHLD
            signal.signal(signum, signal.SIG_DFL if is_child else signal.SIG_IGN)
    except BaseException:  # noqa: BLE001 - raised by one of them just now, and gone with it
        _drop_signal_handlers()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


# ---- the pipe to the launcher ----


def _tie_to_launcher(
    pipe_fd: int,
    *,
    launcher_pid: int,
    is_child: bool,
    on_words: Mapping[bytes, Callable[[], None]],
    on_agreement: Callable[[int], None],
) -> None:
    """End this process, and what it started, when the launcher is gone.

    There are three ways to notice, because each has a blind spot. The kernel's parent-death signal
    reaches a rank that holds the GIL or hangs in C++, but it is bound to the thread that started the
    rank, and other forked processes do not matter to it. The pipe is seen wherever Python still runs,
    also under the forkserver. The parent check covers the moment between the start and both. (The
    launcher's reaper process covers what descends from the rank.)

    Args:
        pipe_fd: Read end of a pipe that only the launcher can write to.
        launcher_pid: The launcher.
        is_child: Whether it is our direct parent (not so under the forkserver).
        on_words: What to call, in a thread, when the launcher says a word such as `ASK_POSITION`.
            `ALL_STARTED` is taken as said, too, once no word can come any more.
        on_agreement: Called in that thread with the call of `stop_requested` that says so.
    """
    listeners = {
        **on_words,
        STOP_AT: lambda: on_agreement(*CALL_NUMBER.unpack(os.read(pipe_fd, CALL_NUMBER.size))),
    }
    # A session of its own: the launcher can end all of it, and the terminal's Ctrl-C goes to the
    # launcher alone, which then ends the ranks in order.
    with contextlib.suppress(PermissionError):
        os.setsid()
    set_death_signal(signal.SIGKILL)
    if is_child and os.getppid() != launcher_pid:
        _end_session()
    threading.Thread(
        target=_listen, args=(pipe_fd, listeners), name="ddpsafe-lifeline", daemon=True
    ).start()


def set_death_signal(signum: int) -> None:
    """Have the kernel send this process a signal when its parent's thread ends; 0 for none."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signum))


def _listen(pipe_fd: int, listeners: Mapping[bytes, Callable[[], None]]) -> None:
    """Do what the launcher says until it is gone, or the script has closed the pipe.

    The number may be a file of the script's by then; the end of the launcher is left to the kernel.
    """
    claim = Claim(pipe_fd)
    while claim.holds():
        try:
            word = os.read(pipe_fd, 1)
        except OSError:  # closed just now
            break
        if not word:
            _end_session()
        with contextlib.suppress(Exception):  # no answer is an answer too
            listeners[word]()
    listeners[ALL_STARTED]()


def _end_session() -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(128 + signal.SIGKILL)
