"""Where this rank is while it keeps running: its collectives, its groups, what its threads do.

The lifeline's thread reads this. The main thread is not interrupted by a signal: that could end early
what it waits for.
"""

from __future__ import annotations

import dis
import itertools
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe import _stdlib_private
from ddpsafe._wire.exception_facts import (
    find_own_files,
    is_library,
    package_of,
    point_to_point_in,
    read_peer,
)
from ddpsafe._wire.messages import (
    DDP_EVALUATION,
    DDP_FORWARD,
    OWN_WAIT,
    Collective,
    Frame,
    Position,
    ThreadStack,
    Whereabouts,
)
from ddpsafe._worker.rank import this_rank
from ddpsafe._worker.torch_hooks import read_groups, read_recorders

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType

    from ddpsafe._job.control import StoreWait

_MAX_FRAMES: Final = 64
_ENTRYPOINT: Final = "ddpsafe/_worker/entrypoint.py"
_OWN_THREADS: Final = "ddpsafe"  # how the names of ddpsafe's threads begin
_JOB: Final = "/ddpsafe/_job/"
_JOINS: Final = ("join", "_wait_for_tstate_lock")  # in the second, up to Python 3.12

# The innermost Python functions while C++ waits for a collective; they do nothing else for long.
_WAITS: Final = {
    "torch/distributed/distributed_c10d.py": frozenset(
        (
            "all_gather",
            "all_gather_coalesced",
            "all_gather_into_tensor",
            "all_gather_single",
            "all_reduce",
            "all_reduce_coalesced",
            "all_to_all",
            "all_to_all_single",
            "barrier",
            "broadcast",
            "gather",
            "reduce",
            "reduce_scatter",
            "reduce_scatter_single",
            "reduce_scatter_tensor",
            "scatter",
        )
    ),
    "torch/autograd/graph.py": frozenset(("_engine_run_backward",)),  # for the buckets of DDP
    "torch/nn/parallel/distributed.py": frozenset(("_distributed_broadcast_coalesced",)),
    "torch/distributed/utils.py": frozenset(
        ("_sync_params_and_buffers", "_verify_param_shape_across_processes")
    ),
}

_CALLERS: Final = (
    ("torch/nn/parallel/distributed.py", "forward", DDP_FORWARD),
    ("torch/nn/parallel/distributed.py", "__init__", "DistributedDataParallel(…)"),
    ("torch/autograd/graph.py", "_engine_run_backward", "a backward pass"),
    ("ddpsafe/_worker/context.py", "", "ddpsafe.{}"),
)
"""What calls collectives by itself, with the name for messages; of ddpsafe, every method of the context."""

_NO_OPERATION: Final = ("CACHE", "PRECALL", "EXTENDED_ARG", "PUSH_NULL", "NOP")
_WITH_ROOT: Final = ("broadcast", "reduce", "gather", "scatter", "_distributed_broadcast_coalesced")


@dataclass(frozen=True, kw_only=True)
class _Thread:
    """A thread of this rank, and where it is; `own_files` are those of the user on its stack."""

    thread: threading.Thread
    frame: FrameType
    stack: tuple[Frame, ...]
    own_files: frozenset[str]

    @classmethod
    def all(cls) -> tuple[list[_Thread], bool]:
        """Return the threads of this rank, the main thread first, and whether `threading` knows all of them."""
        frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
        threads = []
        for thread in threading.enumerate():
            frame = frames.pop(thread.ident or 0, None)
            if frame is not None:
                stack = _read_stack(frame)
                own_files = find_own_files(place.file for place in reversed(stack))
                threads.append(cls(thread=thread, frame=frame, stack=stack, own_files=own_files))
        return sorted(threads, key=lambda each: not each.is_main), not frames

    @property
    def ident(self) -> int:
        """What torch's recorder and `Waits` know it by."""
        return self.thread.ident or 0

    @property
    def is_main(self) -> bool:
        """Whether it is the main thread."""
        return self.thread is threading.main_thread()

    @property
    def is_of_ddpsafe(self) -> bool:
        """Whether ddpsafe has started it."""
        return self.thread.name.startswith(_OWN_THREADS)

    @property
    def above_script(self) -> tuple[Frame, ...]:
        """The calls that the user's innermost line has led to, the innermost first."""
        return tuple(
            itertools.takewhile(lambda place: place.file not in self.own_files, self.stack)
        )

    def __str__(self) -> str:
        """Return its name and the user's line that it is at, for a message."""
        line = next((f" at {place}" for place in self.stack if place.file in self.own_files), "")
        return f"thread {self.thread.name!r}{line}"


def read_whereabouts() -> Whereabouts:
    """Return where this rank is; without collectives if torch is not loaded yet."""
    waits = this_rank.waits
    # Before the stacks, which then show whether a thread is still there.
    in_store = {} if waits is None else dict(waits.now)
    threads, are_all = _Thread.all()
    main = threads[0]
    collectives, arrivals = read_recorders(asks_events=False)
    position = _name_threads(
        Position(
            collectives=collectives, arrivals=arrivals, point_to_point=point_to_point_in(main.frame)
        ),
        threads,
    )
    actors = _find_actors(threads, position)
    found = [_find_wait(each, in_store, position, is_alone=len(actors) == 1) for each in actors]
    done = _read_done(threads, actors, in_store) if are_all else None
    in_main = _find_own_wait(actors[0], in_store)
    groups = read_groups()
    groups |= {own.key: own.ranks for each in actors if (own := in_store.get(each.ident))}
    # Threads of C++, as those for gradients, and threads that have ended: they cannot be told apart.
    known = {0, *(each.ident for each in threads)}
    newest = position.newest()
    completed_calls = [(call.name, call.sizes) for call in position.collectives if call.done]
    return Whereabouts(
        position=replace(position, done=done, in_store=in_main),
        groups=groups,
        threads=tuple(
            ThreadStack(name=each.thread.name, frames=each.stack)
            for each in threads
            if not each.is_of_ddpsafe
        ),
        waits=tuple(wait for wait, _ in filter(None, found)),
        is_held=are_all and all(found) and all(call.thread_id in known for call in collectives),
        ran=tuple(counter for _, ran in filter(None, found) for counter in ran),
        completed=0 if newest is None else completed_calls.count((newest.name, newest.sizes)),
        is_evaluating=_is_evaluating(main.frame),
    )


def with_threads(position: Position) -> Position:
    """Return a position that shows other threads' calls as such, and the main thread's wait in the store."""
    in_store = {} if this_rank.waits is None else dict(this_rank.waits.now)
    threads, _ = _Thread.all()
    position = _name_threads(position, threads)
    main = _find_actors(threads, position)[0]
    return replace(position, in_store=_find_own_wait(main, in_store))


def _name_threads(position: Position, threads: Iterable[_Thread]) -> Position:
    names = {each.ident: str(each) for each in threads if not each.is_main}
    calls = (
        replace(call, thread=names[call.thread_id]) if call.thread_id in names else call
        for call in position.collectives
    )
    return replace(position, collectives=tuple(calls))


def _read_stack(frame: FrameType | None) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        if code.co_filename.endswith(_ENTRYPOINT):  # it calls the user's function
            break
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(frames)


def _find_actors(threads: Sequence[_Thread], position: Position) -> list[_Thread]:
    """Return the threads that may call a collective, or let another thread continue; the main thread's first.

    In place of a main thread that waits for the end of another one, that thread is returned.
    """
    main, *others = threads
    # The user's project may be installed.
    packages = {package_of(file) for file in main.own_files} - {""}
    callers = {call.thread_id for call in position.collectives}
    joined = _find_joined(main.frame)
    first = next((each for each in others if each.thread is joined), main)
    acting = (
        each
        for each in others
        if each.ident in callers
        or isinstance(each.thread, threading.Timer)
        or _stdlib_private.will_call_back(each.frame)
        or any(
            not is_library(place.file)
            or package_of(place.file) in packages
            or "/torch/distributed/" in place.file
            for place in each.stack
        )
    )
    return [first, *(each for each in acting if each is not first and not each.is_of_ddpsafe)]


def _find_joined(frame: FrameType) -> threading.Thread | None:
    """Return the thread whose end a thread waits for, without a limit or in ddpsafe's own code."""
    code = frame.f_code
    if not code.co_filename.endswith("/threading.py") or code.co_name not in _JOINS:
        return None
    joined, limit_s = frame.f_locals.get("self"), frame.f_locals.get("timeout", 0)
    if not isinstance(joined, threading.Thread):
        return None
    has_no_limit = limit_s in (None, -1) or joined.name.startswith(_OWN_THREADS)
    return joined if has_no_limit else None


def _read_done(
    threads: Iterable[_Thread], actors: Iterable[_Thread], in_store: Mapping[int, StoreWait]
) -> Mapping[str, int] | None:
    """Return what this rank has done for others, unless another thread may do more of it, as that of a save."""
    waits = this_rank.waits
    if waits is None:
        return None
    seen = {each.ident for each in actors} | in_store.keys()
    others = {each.ident for each in threads if not each.is_main}
    return None if waits.callers & others - seen else waits.known


def _find_wait(
    each: _Thread, in_store: Mapping[int, StoreWait], position: Position, *, is_alone: bool
) -> tuple[Collective, tuple[int, ...]] | None:
    """Return what a thread is certainly in until it ends, and counters that grow once the thread runs again.

    `is_alone` means that no other thread calls collectives: torch may not have recorded who does.
    """
    own = in_store.get(each.ident)
    if own is not None:
        wait = _find_own_wait(each, in_store)
        return None if wait is None else (wait, (own.since_ns,))
    call = _find_collective(each, position, is_alone=is_alone)
    if call is None:
        return None
    return replace(call, caller=_find_caller(each)), _read_counters(each.thread)


def _find_caller(each: _Thread) -> str:
    """Return what has called the collective that a thread waits in, if that is known; see `_CALLERS`."""
    for frame, _ in traceback.walk_stack(each.frame):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file in each.own_files:
            break
        for of, function, text in _CALLERS:
            if file.endswith(of) and function in ("", name):
                is_training = getattr(frame.f_locals.get("self"), "training", True)
                return text.format(name) if is_training else DDP_EVALUATION
    return ""


def _find_own_wait(each: _Thread, in_store: Mapping[int, StoreWait]) -> Collective | None:
    """Return the wait in ddpsafe's store that a thread is in, unless a handler of a signal has interrupted it."""
    own = in_store.get(each.ident)
    # Such a handler runs in the main thread, above the wait, and may do anything.
    if own is None or not any(
        _JOB in place.file or place.function == own.text for place in each.above_script
    ):
        return None
    return Collective(
        group=own.key,
        number=own.number,
        name=f"{OWN_WAIT}:{own.text}",
        sizes="",
        state="started",
        entered_ns=own.entered_ns,
        thread="" if each.is_main or each.is_of_ddpsafe else str(each),
    )


def _find_collective(each: _Thread, position: Position, *, is_alone: bool) -> Collective | None:
    """Return the collective that a thread waits in: the last one that it has entered; see `_find_wait`."""
    idents = (0, each.ident) if is_alone else (each.ident,)
    calls = [call for call in position.collectives if call.thread_id in idents]
    top = each.stack[0]
    if not any(
        top.file.endswith(file) and top.function in functions for file, functions in _WAITS.items()
    ):
        # For an asynchronous call, the script waits by itself. If several are under way, it may be any.
        under_way = [call for call in calls if not call.done]
        is_one = len(under_way) == 1 and _is_in_wait(each.frame)
        return under_way[0] if is_one and not under_way[0].is_queued_ahead else None
    last = max(calls, key=lambda call: (call.entered_ns, call.number), default=None)
    if last is None or last.done or last.is_queued_ahead:
        return None
    # The recorder does not keep the root, but the function that waits has it.
    return replace(last, root=read_peer(each.frame)) if top.function in _WITH_ROOT else last


def _read_counters(thread: threading.Thread) -> tuple[int, ...]:
    """Return counters that grow whenever a thread runs at all."""
    try:
        ran = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
        return tuple(map(int, ran.split()))
    except (OSError, ValueError):
        return (time.monotonic_ns(),)  # it may have run


def _is_in_wait(frame: FrameType) -> bool:
    """Return whether a thread is in ``work.wait()``, without a timeout, of one of torch's collectives.

    That method is native and has no frame, so the instruction that the caller is at shows it.
    """
    import torch.distributed as dist

    code = [
        step
        for step in dis.get_instructions(frame.f_code)
        if step.offset <= frame.f_lasti and step.opname not in _NO_OPERATION
    ]
    names = [step.opname for step in code[-3:]]
    has_no_arguments = len(code) > 2 and names[2].startswith("CALL") and code[-1].arg == 0  # noqa: PLR2004 - the call, the method, the object
    if not has_no_arguments or code[-2].argval != "wait":
        return False
    if not names[0].startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
        # handles[i].wait(): no other method of that name is native and has no arguments.
        return True
    name = code[-3].argval
    return isinstance(frame.f_locals.get(name, frame.f_globals.get(name)), dist.Work)


def _is_evaluating(innermost: FrameType | None) -> bool:
    """Return whether the innermost user function with a module has it in ``eval()`` mode."""
    torch = sys.modules.get("torch")
    if innermost is None or torch is None:
        return False
    frames = [frame for frame, _ in traceback.walk_stack(innermost)]
    own = find_own_files(frame.f_code.co_filename for frame in reversed(frames))
    for frame in frames:
        if frame.f_code.co_filename in own:
            local_values = frame.f_locals.values()
            modules = [value for value in local_values if isinstance(value, torch.nn.Module)]
            if modules:
                return not all(module.training for module in modules)
    return False
