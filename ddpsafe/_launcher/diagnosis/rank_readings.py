"""Read where each rank is: from its answers and stacks before it is ended, or from what it wrote at a crash.

Also counts how many processes the kernel has killed for memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from traceback import StackSummary
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._clock import Deadline
from ddpsafe._errors import Explanation
from ddpsafe._launcher.processes.descendants import command_of, describe_program
from ddpsafe._launcher.processes.rank_process import RankReading, StackReading
from ddpsafe._wire.exception_facts import (
    PRINTED_CALL,
    find_own_files,
    is_point_to_point,
    own_line_of,
)
from ddpsafe._wire.foreign_texts import (
    find_native_error,
    find_peer_origin,
    find_printed_error,
    read_places,
)
from ddpsafe._wire.messages import (
    UNKNOWN_COLLECTIVE,
    BeforeFirstEnd,
    Collective,
    Frame,
    Position,
    Raised,
    RankOutcome,
    ThreadStack,
)
from ddpsafe._wire.spec import STACKS_SIGNAL, open_log, read_log, unreported_mark
from ddpsafe._world import is_inherited

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpsafe._launcher.processes.rank_process import RankProcess
    from ddpsafe._wire.foreign_texts import PrintedError

_ANSWER_TIMEOUT: Final = timedelta(seconds=0.8)
_SUSPEND_TIMEOUT: Final = timedelta(seconds=0.5)
_NOT_RUNNING: Final = {
    "",  # there is no such process
    psutil.STATUS_STOPPED,
    psutil.STATUS_TRACING_STOP,
    psutil.STATUS_ZOMBIE,
}
_POLL_S: Final = 0.02
# Timeouts of collectives are measured from a moment after they have been entered.
_SAME_MOMENT_NS: Final = 200_000_000
_CAUGHT_SIGNALS: Final = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
_BACKWARD: Final = re.compile(r"/torch/(?:autograd|nn/parallel)/")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
_OOM_KILLS: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_COLLECTIVES: Final = "distributed_c10d.py"
_RPC: Final = "/torch/distributed/rpc/"
_RPC_CALLEE: Final = "/torch/distributed/rpc/internal.py"
_MAX_DUMPED_FRAMES: Final = 100  # faulthandler writes no more of a thread
_MAX_RECURSIVE_FUNCTIONS: Final = 5
_RUN_RANK: Final = re.compile(r'_worker/entrypoint\.py", line \d+ in run_rank$', re.MULTILINE)
"""The outermost frame of the main thread of a rank, so the last line of its stack in a dump."""

_DDP: Final = "/ddpsafe/_worker/model_check.py"
_DDP_CHECKS: Final = "check_before_ddp"
_DATALOADER: Final = "torch/utils/data/dataloader.py"
_WAITS_FOR_CHILD: Final = ("/subprocess.py", "/multiprocessing/popen_fork.py")
_OUTERMOST: Final = re.compile(
    rf'{_RUN_RANK.pattern}|File "<string>", line 1 in <module>$', re.MULTILINE
)
"""The end of a worker's stack: a fork has the rank's below its own, a new interpreter is ``python -c``."""
_WORKER_LOOP: Final = "torch/utils/data/_utils/worker.py"
_QUEUES: Final = "multiprocessing/queues.py"

_EXIT_CODE_OF_ERROR: Final = 1
"""What Python exits with after an exception that nothing has caught."""

_TIME_OVER: Final = re.compile(
    r"^Timeout \((?P<limit>\d+:\d\d:\d\d(?:\.\d+)?)\)!\n(?P<stacks>(?:(?:Thread |Current thread |  ).*\n|\n)*  (?:File .*|\.\.\.)\n)\Z",
    re.MULTILINE,
)
"""What faulthandler writes last once the time of `dump_traceback_later` is over, with ``exit=True``."""
_FIX_OF_FAULTHANDLER: Final = "see why it takes so long there, or allow more time; the stacks of its threads are in the log below."

CRASH: Final = "Fatal Python error:"
"""The beginning of what faulthandler writes at a crash."""


def collect(processes: Sequence[RankProcess]) -> dict[int, RankReading]:
    """Read state, stack and position of every rank that still works, within one to three seconds.

    A suspended process is resumed until it has answered. In that case all ranks are left suspended;
    `RankProcess.end` resumes them.

    Returns:
        What was read, by rank, without ranks that ended without a crash.
    """
    # A rank that has reported how it ended runs its exit functions: where these are shows nothing.
    alive = [
        process
        for process in processes
        if process.alive and process.returned is None and not process.failed
    ]
    states = {process.rank: _state(process) for process in alive}
    stopped = [process for process in alive if states[process.rank] == psutil.STATUS_STOPPED]
    running = [process for process in alive if process not in stopped]
    readings = _question(running, states)
    if stopped:
        # Otherwise they continue as soon as the rank that they wait for does: what it sends while
        # it answers could let them finish their function.
        for process in running:
            process.signal(signal.SIGSTOP)
        # The main thread takes the signal; until then, the other threads may run.
        deadline = Deadline.after(_SUSPEND_TIMEOUT)
        for process in running:
            while not deadline.expired() and _state(process) not in _NOT_RUNNING:
                wait([], _POLL_S)
        for process in stopped:
            process.was_stopped = True
        readings |= _question(stopped, states)
    for process in processes:
        if not process.crashed:
            continue
        stderr = process.error_text()
        reading = readings.get(process.rank, RankReading(position=process.position))
        readings[process.rank] = replace(
            reading,
            place=read_crash(stderr),
            native=find_native_error(stderr),
            position=read_position(stderr, reading.position),
        )
    return readings | {
        process.rank: _complete(process, readings[process.rank]) for process in alive
    }


def find_before_first_end(processes: Sequence[RankProcess]) -> dict[int, BeforeFirstEnd]:
    """Find the ranks that went on only when another one had given up waiting, and where they were before."""
    # A rank that gives up releases what it holds, such as the lock of a file. A rank that waited
    # for that enters the collective then. Without this, it was reported as 20 s late, with the
    # advice to raise the timeout.
    gave_up = [
        process.raised
        for process in processes
        if process.raised is not None and process.raised.origin == "timeout"
    ]
    if not gave_up:
        return {}
    first = min(gave_up, key=lambda raised: raised.at_ns)
    # It is reported when the exception has left the function, which may take a `finally` some time.
    wait = first.position.newest()
    end_ns = first.wall_ns
    if wait is not None and wait.timeout_s and wait.entered_ns:
        end_ns = min(end_ns, wait.entered_ns + int(wait.timeout_s * 1e9))
    ago_ns = first.at_ns - (first.wall_ns - end_ns)
    before_first_end = {}
    for process in processes:
        sightings = [sighting for sighting in process.sightings if sighting.at_ns <= ago_ns]
        if not sightings or process.raised is first or process.was_stopped:
            continue
        answer = sightings[-1].answer
        place = read_frames(answer.main_frames)
        if not place.stack or place.in_collective:
            continue
        numbers = {before.group: before.number for before in answer.position.collectives}
        position = None if process.returned is None else process.returned.position
        position = position or process.position
        later = [
            collective
            for collective in (() if position is None else position.collectives)
            if collective.number > numbers.get(collective.group, 0)
        ]
        has_returned = process.returned is not None and process.began_ns["leaving"] >= ago_ns
        if not (later or has_returned) or any(
            collective.entered_ns < end_ns - _SAME_MOMENT_NS for collective in later
        ):
            continue
        then = "returned only when another rank had given up"
        if later:
            after_s = max(0, later[0].entered_ns - end_ns) / 1e9
            then = f"entered {later[0]} only {after_s:.2f} s after another rank had given up"
        before_first_end[process.rank] = BeforeFirstEnd(
            stack=place.stack,
            waited_s=(ago_ns - sightings[-1].since_ns) / 1e9,
            position=answer.position,
            then=then,
        )
    return before_first_end


def _state(process: RankProcess) -> str:
    with contextlib.suppress(psutil.Error):
        if process.pid is not None:
            return str(psutil.Process(process.pid).status())
    return ""


def continue_suspended(processes: Sequence[RankProcess]) -> None:
    """Resume the ranks that `collect` has suspended, but not those that were suspended before."""
    for process in processes:
        if not process.was_stopped:
            process.signal(signal.SIGCONT)


def _complete(process: RankProcess, reading: RankReading) -> RankReading:
    """Complete the reading of a rank with what its own answer does not show."""
    position, place = reading.position, reading.place
    serves = read_rpc(_dump_of(process))
    if serves is not None:
        place = serves
    elif not place.stack:
        # In the kernel, its main thread takes no signal, but another thread may have written its stack since.
        place = read_stack(_dump_of(process))
    # If its pipe is closed and its signal handlers are gone, it has probably called exec.
    is_cut_off = process.alive and process.receiver.closed
    if not place.stack and is_cut_off and not _catches_stacks_signal(process):
        name = "another program"
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(process.pid).name()
        place = StackReading(stack=f"exec of {name}", in_collective=False)
    waits_for = name_awaited_processes(process, _main_thread(_dump_of(process)))
    # NCCL's watchdog may have written the position that the recorder does not have.
    if reading.native is not None and (position is None or not position.collectives):
        position = read_position(process.error_text(), position)
    # While the GPU is in a collective that the rank has queued, its Python code may be anywhere.
    newest = None if position is None else position.newest()
    is_queued = newest is not None and newest.is_queued_ahead and not newest.done
    is_in_store = newest is not None and newest.is_own_wait
    if process.was_stopped and not place.in_collective and not is_queued:
        position = None  # it may have entered a collective after it was resumed to be asked
    place = replace(
        place,
        stack=place.stack + waits_for,
        in_collective=True if is_queued or is_in_store else place.in_collective,
    )
    printed = None
    # A rank that has entered collectives where ddpsafe sees them also reports what it raises.
    if not (process.position and process.position.collectives):
        printed = find_printed_error(process.error_text())
    return replace(reading, place=place, position=position, printed=printed)


def _question(
    processes: Sequence[RankProcess], states: Mapping[int, str]
) -> dict[int, RankReading]:
    # The stack comes from faulthandler, which needs no GIL; the position from a thread, which does.
    known = {process.rank: process.position for process in processes}
    for process in processes:
        _ask(process)
    _await_answers(processes, known, Deadline.after(_ANSWER_TIMEOUT))
    for process in processes:
        if process.was_stopped:
            # At once: in the time of all answers, such a rank returned, and its place was no
            # longer that of the hang.
            process.signal(signal.SIGSTOP)
    places = {process.rank: read_stack(_dump_of(process)) for process in processes}
    # Ranks that answer also write the stacks of all their threads, for the report.
    answering = [
        process
        for process in processes
        if _new_position(process, known) is not None and not process.was_stopped
    ]
    before = {process.rank: process.position for process in answering}
    for process in answering:
        process.ask_stacks()
    _await_answers(answering, before, Deadline.after(_ANSWER_TIMEOUT))
    return {
        process.rank: RankReading(
            state=states[process.rank],
            place=places[process.rank],
            position=_new_position(process, known),
            native=process.native,
        )
        for process in processes
    }


def _new_position(process: RankProcess, known: Mapping[int, Position | None]) -> Position | None:
    """Return a rank's position unless it is an old answer."""
    # By an old answer, the rank could look behind.
    is_old = process.raised is None and process.position is known[process.rank]
    return None if is_old else process.position


def _ask(process: RankProcess) -> None:
    # The live watch may have asked the rank or its DataLoader workers before: remove those stacks.
    with contextlib.suppress(OSError):  # the run directory may have been removed
        os.close(open_log(process.spec.logs.stacks, os.O_WRONLY | os.O_TRUNC))
    process.ask_position()
    # Without ddpsafe's handler the signal would end the process; without its file faulthandler would write
    # to whatever has that descriptor now.
    if process.phase != "starting" and _catches_stacks_signal(process) and _holds_stacks(process):
        _ask_stacks(process)
    if process.was_stopped:
        process.signal(signal.SIGCONT)


def _await_answers(
    processes: Sequence[RankProcess], known: Mapping[int, Position | None], deadline: Deadline
) -> None:
    while not deadline.expired():
        # If the run directory was removed, there will be no stacks to wait for.
        silent = [
            process
            for process in processes
            if process.alive
            and (
                process.position is known[process.rank]
                or (
                    not _RUN_RANK.search(_dump_of(process))
                    and Path(process.spec.logs.stacks).exists()
                )
            )
        ]
        if not silent:
            return
        pipes = [process.receiver for process in processes if not process.receiver.closed]
        wait([pipe.fileno() for pipe in pipes], _POLL_S)
        for process in processes:
            process.take_reports()


def _ask_stacks(process: RankProcess) -> None:
    """Send the signal to the main thread, which then writes its stack before it does anything else."""
    # If it were sent to a suspended process, any thread could take it after SIGCONT while the main
    # thread continues.
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc has it since 2.30
    if tgkill is None or process.pid is None or process.exitcode is not None:
        process.signal(STACKS_SIGNAL)
    else:
        tgkill(process.pid, process.pid, STACKS_SIGNAL)


def ask_for_stacks(process: RankProcess) -> int:
    """Make a rank that does not answer write its main thread's stack, by a signal, if that is safe.

    Returns:
        The length of its stacks file before that.
    """
    before = len(_dump_of(process))
    if process.alive and _catches_stacks_signal(process) and _holds_stacks(process):
        _ask_stacks(process)
    return before


def read_new_stack(process: RankProcess, before: int) -> list[Frame]:
    """Return the stack that its main thread has written since, the innermost call first."""
    return _main_thread(_dump_of(process)[before:])


def name_awaited_processes(process: RankProcess, frames: Sequence[Frame]) -> str:
    """Return a suffix for the rank's line that names the processes of its own that it waits for.

    Those are workers of a DataLoader, and a program that has the rank's place in the job.
    """
    awaited: list[str] = []
    if any(frame.file.endswith(_DATALOADER) for frame in frames):
        workers = find_busy_loader_workers(process)
        awaited = [f"{worker.name} at {_line_of(worker.frames)}" for worker in workers]
    elif any(frame.file.endswith(_WAITS_FOR_CHILD) for frame in frames):
        awaited = _find_programs_in_its_place(process)
    return "".join(f", waiting for {child}" for child in awaited)


def _find_programs_in_its_place(process: RankProcess) -> list[str]:
    """Describe the programs that a rank has started with its variables, and that have loaded torch."""
    # They would join the rank's job, whose ranks have joined already.
    programs = []
    with contextlib.suppress(psutil.Error, OSError):  # one may end at any moment
        rank = psutil.Process(process.pid)
        for child in rank.children(recursive=True):
            environment = child.environ()
            has_torch = any("libtorch" in library.path for library in child.memory_maps())
            if has_torch and is_inherited(environment, child.pid):
                program = describe_program(child.pid, command_of(child))
                programs.append(
                    f"{program}, which has the variables of rank {process.rank} and so "
                    "would wait for the job if it joins; start it with env=ddpsafe.clean_environment()"
                )
    return programs


def is_alone_in_job(pid: int) -> bool:
    """Return whether a program has joined as rank 0, which has started it, and waits for the other ranks."""
    try:
        process = psutil.Process(pid)
        environment = process.environ()
        if not is_inherited(environment, pid):
            return False
        port = int(environment["MASTER_PORT"])
        list_connections = getattr(process, "net_connections", None) or process.connections
        connections = list_connections("tcp")  # psutil 6 has renamed the function
    except (psutil.Error, OSError, KeyError, ValueError):
        return False
    # Such a program listens at MASTER_PORT, and has no connection there but its own.
    own_ports = {socket.laddr.port for socket in connections if socket.laddr}
    at_port = [socket for socket in connections if socket.laddr and socket.laddr.port == port]
    return any(socket.status == psutil.CONN_LISTEN for socket in at_port) and all(
        socket.raddr.port in own_ports for socket in at_port if socket.raddr
    )


def find_busy_loader_workers(process: RankProcess) -> list[ThreadStack]:
    """Return the stack of each DataLoader worker of a rank that loads or collates, and waits for no index."""
    deadline = Deadline.after(_ANSWER_TIMEOUT)
    busy = []
    with contextlib.suppress(psutil.Error, OSError):  # a worker may end at any moment
        # One after another: all of them write to the rank's file, which tells whose they are. Those of a fork
        # server, the default of Python 3.14, are children of the rank's parent, if that is the same server.
        rank = psutil.Process(process.pid)
        for child in (rank.parent() or rank).children(recursive=True):
            # What a zombie had open is hidden from others than root, and it answers nothing.
            if child.pid == process.pid or child.status() == psutil.STATUS_ZOMBIE:
                continue
            if not (
                _catches_stacks_signal(process, child.pid) and _holds_stacks(process, child.pid)
            ):
                continue
            before, answer = len(_dump_of(process)), ""
            os.kill(child.pid, STACKS_SIGNAL)
            while not _OUTERMOST.search(answer) and not deadline.expired():
                wait([], _POLL_S)
                answer = _dump_of(process)[before:]
            frames = _frames_of(_threads_of(answer)[-1])
            ends = [i for i, frame in enumerate(frames) if frame.file.endswith(_WORKER_LOOP)]
            inner = frames[: ends[0]] if ends else []
            if not inner or any(frame.file.endswith(_QUEUES) for frame in inner):
                continue  # not a DataLoader worker, or one that waits for an index
            name = f"{child.name()} (pid {child.pid})"
            busy.append(ThreadStack(name=name, frames=tuple(inner)))
    return busy


def _catches_stacks_signal(process: RankProcess, pid: int | None = None) -> bool:
    """Return whether the process has ddpsafe's signal handler; true if the system does not show it.

    It has none after exec, or if the script has reset all signals.
    """
    try:
        status = Path(f"/proc/{pid or process.pid}/status").read_text(
            encoding="ascii", errors="replace"
        )
    except OSError:
        return True
    caught = _CAUGHT_SIGNALS.search(status)
    return caught is None or bool(int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1)


def _holds_stacks(process: RankProcess, pid: int | None = None) -> bool:
    """Return whether the process still has the stacks file open."""
    # faulthandler itself does not check what the number of its descriptor refers to by now.
    path = os.path.realpath(process.spec.logs.stacks)
    try:
        links = list(Path(f"/proc/{pid or process.pid}/fd").iterdir())
    except OSError:  # the system does not show it
        return True
    for link in links:
        with contextlib.suppress(OSError):  # it has been closed since
            target = os.readlink(link)  # noqa: PTH115 - verbatim, with "(deleted)" at its end
            if target.startswith(path):
                return True
    return False


def _dump_of(process: RankProcess) -> str:
    return read_log(process.spec.logs.stacks)


def read_stack(dump: str) -> StackReading:
    """Read where the main thread is from what faulthandler wrote, the innermost frames first."""
    return read_frames(_main_thread(dump))


def read_frames(frames: Sequence[Frame]) -> StackReading:
    """Read where a thread is from its stack, the innermost call first."""
    if not frames:
        return StackReading()
    where = _line_of(frames)
    if any(frame.file.endswith(_DDP) and frame.function == _DDP_CHECKS for frame in frames):
        where += ", in the constructor of DistributedDataParallel"
    if _BACKWARD.search(frames[0].file):  # it computes or waits for a bucket of gradients: unknown
        return StackReading(stack=where)
    calls = [frame.function for frame in frames if _COLLECTIVES in frame.file]
    point_to_point = next((name for name in calls if is_point_to_point(name)), "")
    return StackReading(stack=where, in_collective=bool(calls), point_to_point=point_to_point)


def is_in_rpc(frames: Sequence[Frame]) -> bool:
    """Return whether a thread is in a call of torch's RPC."""
    return any(_RPC in frame.file for frame in frames)


def read_rpc(dump: str) -> StackReading | None:
    """Read where a call from another rank is executed, if the main thread only waits for RPC."""
    main = _main_thread(dump)
    if not is_in_rpc(main):
        return None
    threads = [_frames_of(text) for text in _threads_of(dump)]
    serving = [
        frames
        for frames in threads
        if any(_RPC_CALLEE in frame.file for frame in frames) and _own_frames(frames)
    ]
    return (
        StackReading(stack=_line_of(serving[-1]), in_collective=False, in_rpc=True)
        if serving
        else None
    )


def _line_of(frames: Sequence[Frame]) -> str:
    """Return the user's innermost line, or the innermost line if none is the user's."""
    return str((_own_frames(frames) or frames)[0])


def _own_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames of a stack that are in the user's code, in the same order."""
    own = find_own_files(frame.file for frame in reversed(frames))
    return [frame for frame in frames if frame.file in own]


def read_crash(text: str) -> StackReading:
    """Read what faulthandler wrote to stderr when the process crashed; see `read_stack`."""
    _, crash, dump = text.partition(CRASH)
    return read_stack(dump) if crash else StackReading()


def is_endless_recursion(text: str) -> bool:
    """Return whether a process crashed of endless recursion: a full dump of very few functions."""
    _, _, dump = text.partition(CRASH)
    frames = _main_thread(dump) or max(map(_frames_of, _threads_of(dump)), key=len, default=[])
    functions = {(frame.file, frame.function) for frame in frames}
    return len(frames) >= _MAX_DUMPED_FRAMES and len(functions) <= _MAX_RECURSIVE_FUNCTIONS


def read_position(stderr: str, known: Position | None) -> Position | None:
    """Return where a rank was, according to NCCL's watchdog, else as known before.

    This is for a rank that has ended, whose flight recorder can no longer be read.
    """
    places = {place.group: place for place in read_places(stderr)}
    if not places:
        return known
    others = () if known is None else known.collectives
    collectives = [collective for collective in others if collective.group not in places]
    for place in places.values():
        numbers = {place.completed, place.number, max(place.number, place.queued)} - {0}
        collectives += [
            Collective(
                group=place.group,
                number=number,
                name=f"nccl:{place.operation}"
                if place.operation and number == place.number
                else UNKNOWN_COLLECTIVE,
                sizes=f"[[{place.numel}]]" if place.numel and number == place.number else "",
                state="completed" if number <= place.completed else "queued",
                entered_ns=number,  # the watchdog writes no times; the order is enough
            )
            for number in sorted(numbers)
        ]
    return Position(collectives=tuple(collectives))


def _main_thread(dump: str) -> list[Frame]:
    """Return the stack of the thread that runs the rank, from the last dump in the text."""
    threads = _threads_of(dump)
    main_threads = [thread for thread in threads if _RUN_RANK.search(thread)]
    return _frames_of(main_threads[-1]) if main_threads else []


def _threads_of(dump: str) -> list[str]:
    return re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)


def _frames_of(thread: str) -> list[Frame]:
    calls = [match for line in thread.splitlines() if (match := PRINTED_CALL.match(line))]
    return [Frame(call["file"], int(call["line"]), call["name"]) for call in calls]


def with_printed_end(outcome: RankOutcome, seen: PrintedError | None) -> RankOutcome:
    """Add how a rank ended that could only print it: a program in its place, or one that faulthandler ended.

    Such programs come from ``--no-python`` and exec. The one that broke often ends last, because the others lose
    it while it is still in its exit functions: `seen` is what it had printed before its launcher began to end it.
    """
    raised = outcome.raised
    is_program = raised is not None and raised.exit_code == _EXIT_CODE_OF_ERROR and not raised.where
    is_exit = raised is None and outcome.status == "exited"
    text = ""
    if is_program or (is_exit and outcome.exit_code == _EXIT_CODE_OF_ERROR):
        text = outcome.error_text()
        seen = find_printed_error(text)
    elif raised is not None or outcome.status != "stopped":
        return outcome
    end = Raised(
        type_name="Timeout",
        message="",
        traceback="",
        payload=None,
        phase=outcome.phase,
        where="",
        position=outcome.position or Position(collectives=()),
        at_ns=outcome.ended_ns or time.monotonic_ns(),
    )
    if over := _TIME_OVER.search(text):
        stacks = over["stacks"]
        place = read_frames(_main_thread(stacks) or _frames_of(_threads_of(stacks)[-1]))
        cause = (
            "faulthandler.dump_traceback_later(exit=True) has ended it, because it still ran after "
            f"{over['limit']}, at {place.stack}."
        )
        end = replace(
            end,
            message=f"of faulthandler at {place.stack}",
            where=place.stack,
            exit_code=_EXIT_CODE_OF_ERROR,
            kind="hang",
            origin="timeout" if place.in_collective else "own",
            explanation=Explanation(outcome.status, cause, _FIX_OF_FAULTHANDLER),
        )
    # Any other traceback may have been handled long ago.
    elif seen is not None and (seen.rank == outcome.rank or could_not_report(outcome)):
        calls = [
            (call["file"], int(call["line"]), call["name"], "")
            for call in PRINTED_CALL.finditer(seen.traceback)
        ]
        end = replace(
            end,
            type_name=seen.type_name,
            message=seen.message,
            traceback=seen.traceback,
            where=own_line_of(StackSummary.from_list(calls)),
            origin=find_peer_origin(str(seen)) or "own",
        )
    else:
        return outcome
    return replace(outcome, status="raised", raised=end)


def could_not_report(outcome: RankOutcome) -> bool:
    """Return whether a rank had to write to its log how it ended: its script had closed the pipe."""
    is_here = outcome.stderr is not None and outcome.said is None
    return is_here and unreported_mark(outcome.stderr or "").exists()


def count_oom_kills() -> int:
    """Return how many processes of this cgroup the kernel has killed for memory; 0 if unknown.

    The counts before and after an attempt distinguish a SIGKILL from the kernel from any other.
    """
    try:
        lines = _OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    kills = 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if controllers == "":  # version 2; the others are of version 1
            file = _CGROUPS / inside / "memory.events"
        elif "memory" in controllers.split(","):
            file = _CGROUPS / "memory" / inside / "memory.oom_control"
        else:
            continue
        with contextlib.suppress(OSError):
            match = _OOM_KILLS.search(file.read_text(encoding="utf-8"))
            kills += int(match[1]) if match else 0
    return kills
