"""What an error of a launch says: likely causes and advice, and a line for each rank."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._launcher.diagnosis.evidence import CRASH
from ddpsafe._launcher.diagnosis.root_cause import is_own_fault, newest_collective
from ddpsafe._wire.exceptions import is_library
from ddpsafe._wire.messages import is_peer_origin
from ddpsafe._wire.peer_errors import without_source

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpsafe._errors import FailureKind
    from ddpsafe._launcher.diagnosis.failure_kind import Topic
    from ddpsafe._launcher.diagnosis.root_cause import RootCause, RuleName
    from ddpsafe._wire.messages import RankOutcome

_LAST_LINES: Final = 8
_LAST_COMPLAINT: Final = 4
_SHOWN_RANKS: Final = 16
_WIDTH: Final = 100
_FRAME: Final = re.compile(r'^\s*File "(?P<file>.+)", line \d+ in ')

Advice = tuple[str, str]
"""Likely cause, what to do."""

BY_KIND: Final[dict[FailureKind, Advice]] = {
    "user-error": (
        "the error above, where its traceback ends.",
        "fix that line; the other ranks ended only because of it.",
    ),
    "out-of-memory": (
        "the rank asked for more memory than there was.",
        "lower the batch size, num_workers or prefetch_factor, or raise the memory limit.",
    ),
    "network": (
        "a connection that this rank had opened itself broke; that may pass.",
        'see which address it talked to; RetryPolicy(on={"network"}) tries again.',
    ),
    "startup-network": (
        "the ranks could not be connected.",
        "check the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall.",
    ),
    "port": (
        "another program holds the port the script asks for.",
        "remove the hard-coded port (the launcher chooses one), or end that program.",
    ),
    "peer-lost": (
        "a peer disconnected, and no rank of this launch reported why.",
        "look at the logs of all ranks, and at dmesg for the out-of-memory killer.",
    ),
    "hang": (
        "a collective timed out: a rank did not take part in it, or took part in another one.",
        "compare where the ranks were; call the same collectives, in the same order, everywhere.",
    ),
    "unpicklable": (
        "the value cannot be sent to another process.",
        "return plain data: numbers, strings, tensors; keep open files and locks in the rank.",
    ),
    "killed": (
        "a worker process of its DataLoader died: killed for memory, a full /dev/shm, or a crash.",
        "lower num_workers or prefetch_factor; num_workers=0 shows an error of the dataset itself.",
    ),
    "hardware": (
        "the device itself reported an error.",
        "take the host out of service and run elsewhere; a retry on it will not help.",
    ),
}

BY_SIGNAL: Final[dict[int, Advice]] = {
    int(signal.SIGKILL): (
        "the kernel's out-of-memory killer, a container's memory limit, or a kill -9 by hand.",
        "see dmesg on {host}; lower num_workers or the batch size, or raise the memory limit.",
    ),
    int(signal.SIGSEGV): (
        "a bug in native code: an extension, a driver, mixed library versions.",
        "the Python stack at the crash is in the log below; check versions of CUDA and torch.",
    ),
    int(signal.SIGBUS): (
        "shared memory or a mapped file ran out: /dev/shm is 64 MB in most containers.",
        "enlarge it (docker run --shm-size=8g, or an emptyDir of medium Memory).",
    ),
    int(signal.SIGABRT): (
        "native code gave up: a failed assertion, or collectives of different sizes under gloo.",
        "read the end of the log below; compare the shapes that the ranks pass.",
    ),
}

ON_THE_GPU: Final[Advice] = (
    "a kernel failed on the GPU: an index out of range, a bug in a kernel, or the GPU itself.",
    "CUDA_LAUNCH_BLOCKING=1 shows the line; look for an Xid in dmesg if it is another one each time.",
)

BY_TOPIC: Final[dict[Topic, Advice]] = {
    "port": BY_KIND["port"],
    "disk": (
        "no room to write: the disk, a quota, or a limit on the size of files (ulimit -f) is full.",
        "make room or write elsewhere (df -h, quota, ulimit -f); what was written is incomplete.",
    ),
    "worker-exit": (
        "code in a DataLoader worker called sys.exit() or os._exit(), or the worker could not start.",
        "read what the worker wrote; num_workers=0 shows an error of the dataset itself.",
    ),
}

INTERRUPTED: Final[Advice] = (
    "SIGINT was sent to this rank only, or its code raised KeyboardInterrupt{at}.",
    "find what signals process {pid} on {host}; Ctrl-C goes to the launcher, which ends all ranks.",
)

RECURSION: Final[Advice] = (
    "endless recursion: the stack at the crash is one function, or a few, again and again.",
    "end the recursion of the function in the log below, or make it a loop.",
)

IN_A_CYCLE: Final[Advice] = (
    "the ranks call the collectives of overlapping groups in different orders.",
    "call them in the same order on every rank, or use async_op=True and wait for all of them.",
)

KILLED_FOR_MEMORY: Final[Advice] = (
    "the kernel's out-of-memory killer: the cgroup counts a kill during this attempt.",
    "lower num_workers or the batch size, or raise the limit; dmesg on {host} names the process.",
)

OTHER_SIGNAL: Final[Advice] = (
    "another process sent it: a scheduler, another user, or the script itself.",
    "find the sender on {host}; ddpsafe itself ended no rank before this.",
)

_LEFT: Final[Advice] = (
    "the ranks had different numbers of batches or took different branches.",
    "give every rank the same number of steps: drop_last, DistributedSampler or torch's Join.",
)

BY_RULE: Final[dict[RuleName, Advice]] = {
    "suspended": (
        "SIGSTOP was sent to it, or a debugger or a container runtime froze it.",
        "kill -CONT {pid} would have resumed it; find out what stops processes on {host}.",
    ),
    "returned-behind": _LEFT,
    "returned": _LEFT,
    "behind": (
        "the rank hangs or works at its line, or skipped a collective that the others entered.",
        (
            "see its line below. If it works there, move that work away from the others' collectives or "
            "raise timeouts.{setting}. Else call the same collectives in the same order on every rank."
        ),
    ),
    "late": (
        "the rank worked longer than the others wait: loading, evaluating or saving, on one rank.",
        "divide that work among the ranks, or raise timeouts.{setting} above the time it takes.",
    ),
    "in-rpc": (
        "the call that it executes for another rank (RPC) hangs or takes long.",
        "see its line below; raise the rpc_timeout of init_rpc if the call takes that long.",
    ),
    "elsewhere": (
        "the rank was busy outside of the collective that the others waited in.",
        (
            "see its line below. Keep long work of one rank away from the others' collectives, or raise "
            "timeouts.{setting}."
        ),
    ),
    "mismatch": (
        "other collectives or shapes, or one rank alone in the forward pass of the DDP wrapper.",
        "call the same collectives in the same order; use ctx.unwrap(model) on one rank alone.",
    ),
    "stuck-on-gpu": (
        "a GPU or a link between GPUs (NVLink, InfiniBand, the network) is stuck.",
        (
            "see dmesg for Xid and `nvidia-smi nvlink -s` on {host}; NCCL_DEBUG=INFO shows the links, "
            "TORCH_NCCL_ENABLE_TIMING=1 which GPU has not begun."
        ),
    ),
    "unknown": (
        "every rank only saw another one disconnect or hang, and none reported why.",
        "compare where the ranks were, in the logs.",
    ),
}

HANDLING: Final[Advice] = (
    "it was still handling the error in its line below, in an except or a finally.",
    "fix that error first; then see what takes so long in handling it.",
)

IN_KERNEL: Final[Advice] = (
    "a disk, a mount or a device on {host} does not answer. Until it does, not even SIGKILL ends it.",
    "look at dmesg and the mount on {host}; keep the data where it answers.",
)


def where(outcome: RankOutcome) -> str:
    """Say where a rank was: the line that raised, or the line it was at when it was asked."""
    if outcome.raised is None or outcome.state == psutil.STATUS_STOPPED:
        return outcome.stack
    return outcome.raised.where


def others(outcomes: Iterable[RankOutcome], cause: RootCause) -> list[str]:
    """Name the ranks that failed because of the one that broke, or beside it."""
    because = f"failed because of rank {cause.root.rank}"
    lines = [
        f"rank {out.rank} {'also failed' if is_own_fault(out) else because}: {_first_line(out)}"
        for out in cause.collateral[:_SHOWN_RANKS]
    ]
    named = (cause.root, *cause.collateral)
    stopped = [out for out in outcomes if out.status == "stopped" and out not in named]
    for outcome in stopped[:_SHOWN_RANKS]:
        at = f" at {outcome.stack}" if outcome.stack else ""
        lines.append(f"rank {outcome.rank} was stopped by the launcher{at}")
    return lines


def _first_line(outcome: RankOutcome) -> str:
    raised = outcome.raised
    if raised is None and outcome.native is not None:
        return outcome.native.text[:_WIDTH]
    if raised is None:
        return outcome.status if outcome.signal_name is None else f"killed by {outcome.signal_name}"
    text = without_source(f"{raised.type_name}: {raised.message}".splitlines()[0])
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def positions(outcomes: Iterable[RankOutcome]) -> list[str]:
    """Say of each rank where it was, in the code and in the sequence of collectives."""
    return [_position(outcome) for outcome in list(outcomes)[:_SHOWN_RANKS]]


def _position(outcome: RankOutcome) -> str:
    parts = [f"rank {outcome.rank}"]
    if outcome.state == psutil.STATUS_STOPPED:
        parts.append("is stopped (SIGSTOP)")
    elif outcome.state == psutil.STATUS_DISK_SLEEP:
        parts.append("was waiting in the kernel for a disk or a device")
    elif outcome.status == "returned":
        parts.append(
            f"called sys.exit(0) at {outcome.exited_at}" if outcome.exited_at else "has returned"
        )
    raised = outcome.raised
    if raised is not None and (not raised.is_peer_error or raised.is_wrapped):
        did = "raised" if raised.final and not raised.hidden_by else "was handling"
        parts.append(f"{did} {_first_line(outcome)}")
    if outcome.position is not None and outcome.position.handling:
        parts.append(f"was handling {outcome.position.handling};")
    if text := where(outcome):
        parts.append(f"at {text}")
    last = newest_collective(outcome)
    if outcome.sends_or_receives:
        parts.append(f"{_relation(outcome, done=False)} {outcome.sends_or_receives}")
        parts += [f"after {last}"] if last is not None else []
    elif last is not None:
        parts.append(f"{_relation(outcome, done=last.done)} {last}")
    return ", ".join(parts)


def _relation(outcome: RankOutcome, *, done: bool) -> str:
    """Say how a rank stands to its last collective; torch marks one that failed as done too."""
    if outcome.status == "returned":
        return "after"
    if outcome.raised is not None and outcome.raised.hidden_by:
        return "in"
    if is_peer_origin(outcome.origin):
        return "timed out in" if outcome.origin == "timeout" else "lost a peer in"
    return "after" if done else "in"


def last_output(outcome: RankOutcome) -> list[str]:
    """Show the last lines a rank wrote to stderr, when nothing else says why it ended.

    Of the stacks that faulthandler writes at a crash only the user's lines are shown.
    """
    if outcome.stderr is None or outcome.raised is not None:
        return []
    said, _, stacks = outcome.error_text().partition(CRASH)
    lines = said.splitlines()[-_LAST_LINES:]
    lines += [line for line in stacks.splitlines() if _is_users_frame(line)]
    if not lines:
        return []
    return ["last lines of its stderr:", *(f"| {line.rstrip()[:160]}" for line in lines)]


def last_traceback(outcome: RankOutcome) -> list[str]:
    """Show the end of a traceback that a rank has printed, as of a thread that died, if it hangs."""
    if outcome.stderr is None or outcome.raised is not None:
        return []
    _, mark, trace = outcome.error_text().rpartition("Traceback (most recent call last):")
    lines = [line for line in trace.splitlines() if line.strip()][-_LAST_COMPLAINT:]
    return ["it has printed a traceback:", *(f"| {line[:160]}" for line in lines)] if mark else []


def _is_users_frame(line: str) -> bool:
    frame = _FRAME.match(line)
    return frame is not None and frame["file"] != "<string>" and not is_library(frame["file"])
