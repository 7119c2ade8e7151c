"""Texts of torch, gloo, NCCL, CUDA and Python that show where a failure comes from, or its kind.

gloo raises plain RuntimeError, and NCCL mostly does too, so the text is the only information. This is the
only module that matches texts of errors. ddpsafe's own texts are never matched, because its errors carry
their origin and kind as data. Each row names where it was seen; a test produces the gloo ones with the
installed torch.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

from ddpsafe._errors import FailureKind, Origin  # noqa: TC001 - pydantic reads them for messages between nodes

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")

PeerOrigin = Literal["peer-lost", "timeout"]
"""The origins (see `Origin`) that blame another rank: it was lost, or a wait for it timed out."""


_PEER_TEXTS: Final[tuple[tuple[str, PeerOrigin, str], ...]] = (
    (r"Connection closed by peer", "peer-lost", "2.13 gloo"),
    # Not Python's ConnectionResetError: that comes from a DataLoader worker or from the user's code.
    (r"^(?!Connection\w*Error).*Connection reset by peer", "peer-lost", "2.13 gloo"),
    (r"(?:write|writev|send).*Broken pipe", "peer-lost", "2.13 gloo"),
    (r"connectFullMesh failed", "peer-lost", "2.13 gloo"),
    (r"remote process exited or there was a network error", "peer-lost", "2.x nccl"),
    (r"ncclRemoteError", "peer-lost", "2.x nccl"),
    (r"NCCL communicator was aborted", "peer-lost", "2.x nccl"),
    (r"NCCL communicator encountered error set by ProcessGroupNCCL", "peer-lost", "2.x nccl"),
    (r"(?s)ncclSystemError.*Connection closed by remote peer", "peer-lost", "nccl 2.18"),
    (r"socket\w*: Connect to \S+ .*failed|Net : Connect to \S+ failed", "peer-lost", "nccl"),
    (r"NET/IB ?: Got (?:async|completion).*(?:status=|error )\d+", "peer-lost", "nccl"),
    (r"DistNetworkError|DistStoreError.*(?:closed|reset)", "peer-lost", "2.13 store"),
    (r"Timed out waiting \d+ms for (?:recv|send)", "timeout", "2.13 gloo"),
    (r"Application timeout caused pair closure", "timeout", "2.13 gloo"),
    (r"Socket Timeout|wait timeout after \d+ms", "timeout", "2.13 TCPStore"),
    (r": Wait timeout$|Timeout waiting for key: ", "timeout", "2.13 FileStore"),
    (r"Watchdog caught collective operation timeout", "timeout", "2.x nccl"),
    (r"timed out in blocking wait|timeout - .*operation time", "timeout", "2.x nccl"),
    (r"monitoredBarrier", "timeout", "2.13 gloo"),
    (r"RPCErr:\d+:RPC ran for more than set timeout", "timeout", "2.13 rpc"),
    (r"this error originated at tensorpipe", "peer-lost", "2.13 rpc"),
)
"""Exceptions that blame another rank: a pattern of "TypeName: message", without regard to case, the origin,
and the versions in whose output it was seen. The first match wins."""

# An error has several lines, up to the next message of torch's log.
_ERROR: Final = r"(?P<error>.*\n?(?:(?!\[rank\d|\[E).*\n?){0,7})"

NATIVE_TEXTS: Final = tuple(
    tuple(re.compile(pattern) for pattern in patterns)
    for patterns in (
        (
            rf"raised the following async exception: {_ERROR}",
            r"(?P<error>CUDA error during \w+ event query: .*)",
        ),
        (
            r"(?P<error>Watchdog caught collective operation timeout.*)",
            rf"watchdog thread terminated with exception: {_ERROR}",
            rf"terminate called after throwing .*\s*what\(\): +{_ERROR}",
            r"Aborting process on rank \d+ due to (?P<error>.*)",
        ),
        (
            r"(?P<stuck>watchdog got stuck for \d+ seconds.*)",
            r"(?P<stuck>Terminating the process after attempting to dump debug info, due to .*)",
        ),
    )
)
"""What native code, such as NCCL's watchdog, writes to stderr before it ends the process.

The first tuple with a match decides, and in it the text that was written first. ``error`` is the text of an
exception; ``stuck`` means that the watchdog itself hangs. Seen in torch 2.6 to 2.13, and as texts in 2.15.
"""

_ENDING: Final = re.compile(
    rb"\[E[\d :.]*ProcessGroupNCCL\w*\.cpp:\d+\] (?:"
    rb"\[PG[^\]]*\] +(?:failure detected by watchdog at work sequence id"
    rb"|Process group watchdog thread terminated with exception)|\[TC\]\S* Aborting process on rank \d)"
)

_PLACE: Final = (
    r"\[PG ID (?P<id>\d+) PG GUID (?P<guid>[^\s(\]]+)(?:\((?P<name>[^)]*)\))? Rank \d+\] +"
)
_STATUS: Final = re.compile(
    _PLACE + r"(?:failure detected by watchdog at work sequence id: (?P<number>\d+) PG status: "
    r"last enqueued work: (?P<queued>-?\d+), last completed work: (?P<completed>-?\d+)|"
    r"Received a dump signal .*Last enqueued NCCL work: (?P<queued_by_now>-?\d+), "
    r"last completed NCCL work: (?P<completed_by_now>-?\d+))"
)
_WORK: Final = re.compile(
    r"operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<numel>\d+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeError:
    """What native code, such as NCCL's watchdog, wrote to stderr before it ended its process.

    Attributes:
        origin: Whether it blames another rank, and how.
        text: The line.
        kind: The kind of failure, if the rank itself failed and the text shows it.
    """

    origin: Origin
    text: str
    kind: FailureKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogPlace:
    """Where a rank is in one process group, according to NCCL's watchdog.

    Attributes:
        number: The first collective that has not ended.
        queued: The last one that is queued.
        completed: The last one that has ended; 0 for none.
        operation: The operation of the first one, e.g. ``ALLREDUCE``; empty if unknown.
        numel: Its number of elements; empty if unknown.
    """

    group: str
    number: int
    queued: int
    completed: int
    operation: str = ""
    numel: str = ""


_WORKER_EXIT: Final = re.compile(
    r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code \d"
)
"""Seen in torch 2.6 to 2.13; a worker that a signal ended is reported as "is killed by signal"."""

_KIND_TEXTS: Final[tuple[tuple[str, FailureKind, str], ...]] = (
    (r"^[\w.]+: DataLoader worker \(pid", "killed", "2.13 torch"),
    (r"ibv_\w+ failed.*Cannot allocate memory|no socket interface found", "network", "nccl"),
    (
        (
            r"OutOfMemoryError|MemoryError|out of memory|(?:can't|cannot) allocate memory"
            r"|CU\w+_STATUS_ALLOC_FAILED"
        ),
        "out-of-memory",
        "2.13 torch, Python 3.11",
    ),
    (
        (
            r"uncorrectable (?:ECC|NVLink)|\bXid\b|fallen off the bus|GPU is lost"
            r"|CUDA(?: error(?: during \w+ event query)?:)? unknown error|failure 999 'unknown error'|hardware stack error"
            r"|access of peer GPU memory over nvlink|CUDA-capable devices?(?:\(s\) is/| )are busy"
            r"|system not yet initialized|No CUDA GPUs are available"
            r"|Unable to determine the device handle"
        ),
        "hardware",
        "CUDA 11 to 13, NVML",
    ),
    (r"EADDRINUSE|Address already in use", "port", "2.13 store, Linux"),
    # A connection that a setting forbids does not come back.
    (r"(?i:offline[ _]?mode|\w_OFFLINE\b)", "user-error", "huggingface_hub 1.0"),
    # Only the TimeoutError of a socket; futures and asyncio raise the same class.
    (
        r"^TimeoutError: (?:\[Errno \d+\]|_ssl\.c|timed out$|The \w+ operation timed out)",
        "network",
        "Python 3.11",
    ),
    (
        (
            r"^Connection\w*Error|^BrokenPipeError|Stale file handle|gaierror"
            r"|Name or service not known|Temporary failure in name resolution|No route to host"
        ),
        "network",
        "Python 3.11, Linux",
    ),
)
"""What kind of failure an exception is, in rows as above; the first match wins."""

_ABORT_REASON: Final = "Original reason for failure was:"

_FULL_DISK: Final = re.compile(
    # torch.save: its archive writer notices that less was written than requested.
    r"inline_container\.cc.*(?:unexpected pos|file write)|PytorchStreamWriter failed writing"
    r"|No space left on device|Disk quota exceeded|\bFile too large",
    re.IGNORECASE | re.DOTALL,
)
_READ_ONLY: Final = re.compile(r"Read-only file system")
_FULL_SHARED_MEMORY: Final = re.compile(
    # torch's allocator of shared files; its worker of a DataLoader quotes that in an error of its own.
    r"(?:shared memory|unable to (?:resize|write to) file </torch_).{0,200}No space left"
    r"|No space left on device.{0,80}/dev/shm/",
    re.IGNORECASE | re.DOTALL,
)
_IN_SHARED_MEMORY: Final = re.compile(r"/multiprocessing/(?:synchronize|heap|shared_memory)\.py$")
"""Where Python makes semaphores and shared memory: its OSError names no file."""
_NO_DESCRIPTORS: Final = re.compile(r"Too many open files(?! in system)|items of ancdata")
_OF_A_BACKEND: Final = re.compile(
    r"/gloo/|nccl|c10d|ProcessGroup|(?:Read error|closed by peer) \[|originated at tensorpipe|^RuntimeError: RPCErr:",
    re.IGNORECASE,
)
_OF_TORCH: Final = re.compile(r"/torch/(?:distributed/(?!elastic/)|nn/parallel/|autograd/)")
_GLOO_SOURCE: Final = re.compile(r"\[\S*/gloo/\S+:\d+\] ")


def _first_match(rows: Iterable[tuple[str, T, str]], text: str) -> T | None:
    return next(
        (means for pattern, means, _ in rows if re.search(pattern, text, re.IGNORECASE)), None
    )


def find_peer_origin(line: str) -> PeerOrigin | None:
    """Return the origin of an exception, as "TypeName: message", that blames another rank."""
    # An aborted NCCL communicator appends why it was aborted, which may be the rank's own fault.
    _, _, reason = line.partition(_ABORT_REASON)
    return _first_match(_PEER_TEXTS, reason if reason.strip() else line)


# torch 2.6 to 2.15. The first rank of a group raises it, with their ranks in the group.
_MISSED_BARRIER: Final = re.compile(r"Ranks? (\d+(?:, \d+)*) failed to pass monitoredBarrier")


def find_missed_barrier(line: str) -> list[int]:
    """Return the ranks of a group that have not reached torch's monitored barrier, by the text of an exception."""
    match = _MISSED_BARRIER.search(line)
    return [] if match is None else [int(rank) for rank in match[1].split(", ")]


def find_native_error(stderr: str) -> NativeError | None:
    """Return the error that native code wrote to a rank's stderr before it ended the process."""
    matches = (
        [match for pattern in patterns if (match := pattern.search(stderr))]
        for patterns in NATIVE_TEXTS
    )
    alike = next((group for group in matches if group), None)
    if alike is None:
        return None
    # An error of NCCL leads to timeouts, which are written later.
    first = min(alike, key=lambda match: match.start())
    start = stderr.rfind("\n", 0, first.start()) + 1
    line = stderr[start:].partition("\n")[0].strip()
    error = first.groupdict().get("error")
    if error is None:
        return NativeError(origin="timeout", text=line)
    peer = find_peer_origin(f"DistBackendError: {error}")
    if peer is not None:
        return NativeError(origin=peer, text=line)
    kind = find_kind(f"DistBackendError: {error}")
    if kind is None and "CUDA error" in error:  # an illegal access, a device-side assert
        kind = "user-error"
    return NativeError(origin="own", text=line, kind=kind)


def says_that_it_ends(chunk: bytes) -> bool:
    """Return whether NCCL's watchdog has reported that it is about to end its process."""
    # The pattern needs the prefix of torch's log, because a script may print the same words.
    return _ENDING.search(chunk) is not None


def read_places(stderr: str) -> list[WatchdogPlace]:
    """Return where the rank is in each group, according to NCCL's watchdog."""
    works = {match["number"]: match for match in _WORK.finditer(stderr)}
    places: dict[str, WatchdogPlace] = {}
    for match in _STATUS.finditer(stderr):
        has_number = match["number"] is not None
        completed = max(0, int(match["completed"] if has_number else match["completed_by_now"]))
        queued = max(0, int(match["queued"] if has_number else match["queued_by_now"]))
        number = int(match["number"]) if has_number else min(completed + 1, queued)
        work = works.get(str(number))
        is_main = match["name"] == "default_pg" or (match["id"], match["guid"]) == ("0", "0")
        place = WatchdogPlace(
            group="default_pg" if is_main else match["guid"],
            number=number,
            queued=queued,
            completed=completed,
            operation="" if work is None else work["op"],
            numel="" if work is None else work["numel"] or "",
        )
        places.setdefault(place.group, place)
    return list(places.values())


# torch 2.13, with TORCH_DISTRIBUTED_DEBUG=DETAIL. What follows of the other rank may be garbage.
_FINGERPRINT: Final = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank \d+ is running collective: CollectiveFingerPrint"
    r"\(SequenceNumber=(?P<number>\d+),? ?OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<shape>[\d, ]*)\])?"
)
_OPERATIONS: Final = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}


class Fingerprint(NamedTuple):
    """The call of a rank in which torch has found that another rank makes a different one.

    Attributes:
        number: Its number in its group, from 1.
        shape: The shape of its tensor; ``None`` without one.
    """

    number: int
    operation: str
    shape: list[int] | None


def find_fingerprint(message: str) -> Fingerprint | None:
    """Return the rank's own call from an error in which torch reports that it differs from another rank's."""
    match = _FINGERPRINT.search(message)
    if match is None:
        return None
    operation = _OPERATIONS.get(match["op"], match["op"].lower())
    shape = (
        None if match["shape"] is None else [int(n) for n in match["shape"].split(",") if n.strip()]
    )
    return Fingerprint(int(match["number"]) + 1, operation, shape)


# torch 2.13: raised by its SIGCHLD handler, wherever the main thread is. The name is that of strsignal(3).
_KILLED_WORKER: Final = re.compile(
    r"DataLoader worker \(pid \d+\) is killed by signal: (?P<name>[\w ]+?)\."
)


def find_kind(line: str) -> FailureKind | None:
    """Return the kind of failure that an exception, as "TypeName: message", shows."""
    return _first_match(_KIND_TEXTS, line)


def find_signal_of_worker(line: str) -> int:
    """Return the signal that ended a worker of torch's DataLoader, by torch's own text; 0 if it is another text."""
    match = _KILLED_WORKER.search(line)
    names = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
    return 0 if match is None else names.get(match["name"], 0)


def is_full_disk(line: str) -> bool:
    """Return whether a file could not be written because of a full disk, a quota or a size limit."""
    return _FULL_DISK.search(line) is not None


def is_read_only(line: str) -> bool:
    """Return whether a file could not be written because its file system is mounted read-only."""
    return _READ_ONLY.search(line) is not None


def is_full_shared_memory(line: str, file: str) -> bool:
    """Return whether /dev/shm is full, by the text of an exception and the file that raised it."""
    is_full = "No space left on device" in line and _IN_SHARED_MEMORY.search(file) is not None
    return is_full or _FULL_SHARED_MEMORY.search(line) is not None


def has_no_descriptors(line: str) -> bool:
    """Return whether a process could not open a file, or take one from another process, at its limit of them."""
    return _NO_DESCRIPTORS.search(line) is not None


_UNFINISHED_REDUCTION: Final = re.compile(
    r"Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once"
)
_HANDLED: Final = re.compile(
    r"""
    \b(?-i:[A-Z]\w*(?:Error|Exception))\b(?!\s*(?:=|:\s*-?\d*\.\d))  # not a metric, such as TopKError: 0.23
    | ^(?-i:ERROR)\b
    | \bout\ of\ memory\b | \bOOM\b
    | \b(?:skip|ignor|drop|discard)(?:ped|ping|ed|ing|es|e|s)?(?:\ [\w/.-]+){0,3}\ (?:batch|sample|step|item|image|file)
    | ,\ skipp(?:ed|ing)\b
    | \bfailed\ to\ (?:read|load|open|decode|parse|fetch)\b
    | \b(?:bad|corrupt\w*|broken|invalid)\ (?:batch|sample|image|file|data)\b
    | \bcaught\b(?!\ up) | (?<!no\ )\bexception\b(?!\ (?:ignored|handler))
    """,
    re.VERBOSE | re.IGNORECASE,
)
_OF_A_PEER: Final = re.compile(r"Connection (?:closed|reset) by peer|Timed out waiting|Warning\b")


def crashed_while_building_ddp(stderr: str) -> bool:
    """Return whether a process crashed in DDP's constructor, by what faulthandler wrote."""
    return "Fatal Python error: Segmentation fault" in stderr and "in _ddp_init_helper\n" in stderr


def is_unfinished_reduction(line: str) -> bool:
    """Return whether DDP refuses a forward pass because the last backward pass did not reach its end."""
    return _UNFINISHED_REDUCTION.search(line) is not None


def find_handled_errors(text: str) -> list[str]:
    """Return the lines of a script's output that talk about an error that it has handled, or of a skip."""
    return [
        line.strip()
        for line in text.splitlines()
        if _HANDLED.search(line) and not _OF_A_PEER.search(line)
    ]


class PrintedError(NamedTuple):
    """An exception by the traceback that a program has printed.

    Attributes:
        message: Its text, or the first line of it if more lines cannot be told from other output.
        traceback: As printed, but without torch's ``[rank1]:``.
        rank: The rank whose `sys.excepthook` has printed it, as torch sets it, and no ``except`` calls it.
    """

    type_name: str
    message: str
    traceback: str
    rank: int | None

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


_OF_EXCEPTHOOK: Final = re.compile(r"\[rank(\d+)\]: ?")
_ERROR_LINE: Final = re.compile(
    r"\A.*\n(?:[ \t].*\n|\n)*(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.MULTILINE
)


def find_printed_error(text: str) -> PrintedError | None:
    """Return the error of the last traceback in a program's output."""
    before, mark, rest = text.rpartition("Traceback (most recent call last):")
    end_of_mark, *lines = rest.split("\n")
    line_before = before.rpartition("\n")[2]
    hook = _OF_EXCEPTHOOK.match(line_before)
    if hook is not None:
        lines = [line[prefix.end() :] for line in lines if (prefix := _OF_EXCEPTHOOK.match(line))]
    calls = "\n".join([mark + end_of_mark, *lines])
    error = _ERROR_LINE.search(calls)
    is_of_group = re.search(r"\||Exception Group $", line_before) is not None
    if not mark or error is None or is_of_group:
        return None
    traceback = calls if hook is not None else calls[: error.end()]
    message = traceback[error.end("type") :].removeprefix(": ").rstrip()
    return PrintedError(error["type"], message, traceback, hook and int(hook[1]))


def says_worker_exited(traceback: str) -> bool:
    """Return whether torch reports that a DataLoader worker exited with an exit code."""
    return _WORKER_EXIT.search(traceback) is not None


def is_late_worker(line: str) -> bool:
    """Return whether torch's DataLoader waited for a batch of its workers for longer than its ``timeout``."""
    return line.startswith("RuntimeError: DataLoader timed out after ")


def is_of_a_backend(line: str, file: str) -> bool:
    """Return whether torch raised a RuntimeError, by its text or by the file that raised it."""
    return _OF_A_BACKEND.search(line) is not None or _OF_TORCH.search(file) is not None


def without_source(line: str) -> str:
    """Return a line of gloo without its place in gloo's source code."""
    return _GLOO_SOURCE.sub("", line)
