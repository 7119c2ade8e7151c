"""Where this rank is while it keeps running: its collectives, its groups, what its threads do.

The lifeline's thread reads this. The main thread is not interrupted by a signal: that could end early
what it waits for.
"""

from __future__ import annotations

import dis
import sys
import threading
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpsafe._wire.exception_facts import (
    find_own_files,
    is_library,
    package_of,
    point_to_point_in,
    read_peer,
)
from ddpsafe._wire.messages import Collective, Frame, Position, ThreadStack, Whereabouts
from ddpsafe._worker.torch_hooks import read_groups, read_recorders

if TYPE_CHECKING:
    from types import FrameType

_MAX_FRAMES: Final = 64
_ENTRYPOINT: Final = "ddpsafe/_worker/entrypoint.py"
_OWN_THREADS: Final = "ddpsafe"  # how the names of ddpsafe's threads begin

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

_NO_OPERATION: Final = ("CACHE", "PRECALL", "EXTENDED_ARG", "PUSH_NULL", "NOP")
_WITH_ROOT: Final = ("broadcast", "reduce", "gather", "scatter")


def read_whereabouts() -> Whereabouts:
    """Return where this rank is; without collectives if torch is not loaded yet."""
    frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
    main = threading.main_thread()
    mine = frames.get(main.ident or 0)
    others = [
        (thread, ThreadStack(name=thread.name, frames=_read_stack(frame)))
        for thread in threading.enumerate()
        if thread is not main
        and not thread.name.startswith(_OWN_THREADS)
        and (frame := frames.get(thread.ident or 0)) is not None
    ]
    stack = ThreadStack(name=main.name, frames=_read_stack(mine))
    collectives, arrivals = read_recorders(asks_events=False)
    position = Position(
        collectives=collectives,
        arrivals=arrivals,
        point_to_point=point_to_point_in(mine),
    )
    newest = position.newest()
    # Another thread may call a collective, or let the main thread continue in another way.
    own = {
        package_of(file) for file in find_own_files(place.file for place in reversed(stack.frames))
    } - {""}
    alone = not any(
        isinstance(thread, threading.Timer)
        or any(
            not is_library(place.file)
            or package_of(place.file) in own  # the user's project, which is installed
            or "/torch/distributed/" in place.file
            for place in thread_stack.frames
        )
        for thread, thread_stack in others
    )
    completed_calls = [(call.name, call.sizes) for call in position.collectives if call.done]
    return Whereabouts(
        position=position,
        groups=read_groups(),
        threads=(stack, *(thread_stack for _, thread_stack in others)),
        waits_in=_find_wait(mine, stack, position, main.ident or 0) if alone else None,
        completed=0 if newest is None else completed_calls.count((newest.name, newest.sizes)),
        is_evaluating=_is_evaluating(mine),
    )


def _read_stack(frame: FrameType | None) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        if code.co_filename.endswith(_ENTRYPOINT):  # it calls the user's function
            break
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return tuple(frames)


def _find_wait(
    frame: FrameType | None, stack: ThreadStack, position: Position, thread_id: int
) -> Collective | None:
    """Return the collective that the main thread waits in: the last one that it entered.

    Return None if another thread has entered collectives too: their order may be any.
    """
    top = stack.frames[0] if stack.frames else None
    if frame is None or top is None:
        return None
    if any(call.thread_id not in (0, thread_id) for call in position.collectives):
        return None
    if not any(
        top.file.endswith(file) and top.function in functions for file, functions in _WAITS.items()
    ):
        # For an asynchronous call, the script waits by itself. If several are under way, it may be any.
        under_way = [call for call in position.collectives if not call.done]
        is_one = len(under_way) == 1 and _is_in_wait(frame)
        return under_way[0] if is_one and not under_way[0].is_queued_ahead else None
    last = max(position.collectives, key=lambda call: (call.entered_ns, call.number), default=None)
    if last is None or last.done or last.is_queued_ahead:
        return None
    # The recorder does not keep the root, but the function that waits has it.
    return replace(last, root=read_peer(frame)) if top.function in _WITH_ROOT else last


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
        return (
            True  # handles[i].wait(): no other method of that name is native and has no arguments
        )
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
