"""Make the error of a failed attempt: its class, its message with cause and advice, its facts."""

from __future__ import annotations

import re
import signal
import socket
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil

from ddpsafe import _gpus
from ddpsafe._advice import ADVICE, general_advice
from ddpsafe._config.durations import show_duration
from ddpsafe._errors import (
    DDPSafeError,
    Explanation,
    LaunchError,
    LaunchTimeoutError,
    Limit,
    RankExitedError,
    RankFailedError,
    RankKilledError,
    RankLeftEarlyError,
    RankRaisedError,
    RendezvousTimeoutError,
)
from ddpsafe._launcher.diagnosis.rank_readings import CRASH, could_not_report, is_endless_recursion
from ddpsafe._launcher.diagnosis.root_cause import (
    CONCLUSIONS,
    find_passed,
    find_proof_of_torch,
    find_root_cause,
    find_stuck_on_gpu,
    find_topic,
    is_own_fault,
    kind_of,
)
from ddpsafe._launcher.diagnosis.wait_graph import call_lines, differ, family
from ddpsafe._text import listed, name_cells, ranks_text, signal_name
from ddpsafe._wire import payload
from ddpsafe._wire.exception_facts import PRINTED_CALL, clip, find_own_files
from ddpsafe._wire.foreign_texts import (
    crashed_while_building_ddp,
    find_handled_errors,
    find_missed_barrier,
    find_printed_error,
    without_source,
)
from ddpsafe._wire.messages import CHECKPOINTS, DDP_EVALUATION, is_peer_origin
from ddpsafe._wire.spec import read_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ddpsafe._config import RetryPolicy, Timeouts
    from ddpsafe._errors import FailureKind
    from ddpsafe._launcher.diagnosis.root_cause import Advice, RootCause, Topic
    from ddpsafe._launcher.diagnosis.wait_graph import Deadlock
    from ddpsafe._wire.messages import Collective, Raised, RankOutcome

_MAX_MESSAGE: Final = 500
"""The whole text of an exception is at the end of its traceback."""
_MAX_EXPLANATION: Final = 1_000
_MAX_NATIVE_TEXT: Final = 400
_LOG_MARGIN_S: Final = 60.0
"""The kernel's log is read from this long before the attempt: a GPU may fail before a rank notices."""
_UNKNOWN_CODE: Final = 255
"""The exit code that `multiprocessing` gives for a process whose fork server has exited."""

_STDERR_LINES: Final = 8
_TRACEBACK_LINES: Final = 4
_HANDLED_LINES: Final = 3
_STDERR_WIDTH: Final = 160
_SHOWN_RANKS: Final = 16
_SHOWN_NODES: Final = 4
_SHOWN_BARRIERS: Final = 4
"""The lines of the ranks that timed out at one barrier differ only in the rank."""
_SUMMARY_WIDTH: Final = 100

_BY_KIND: Final[dict[FailureKind, Advice]] = {
    "user-error": (
        "the error above, where its traceback ends.",
        "fix that line; the other ranks ended only because of it.",
    ),
    "out-of-memory": (
        "the rank asked for more memory than there was.",
        "lower the batch size, num_workers or prefetch_factor, or raise the memory limit.",
    ),
    "network": (
        "a connection that this rank had opened itself broke; that may be temporary.",
        'see which address it connected to; RetryPolicy(on={"network"}), or --retry.on network, tries again.',
    ),
    "startup-network": (
        "the ranks could not be connected.",
        "check the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall.",
    ),
    "port": (
        ADVICE["DS-PORT-taken"][0],
        (
            "remove the hard-coded port (the launcher chooses one), or stop the program that holds it; "
            "start a script that starts its own ranks (mp.spawn) with python, or let it use ddpsafe.spawn."
        ),
    ),
    "peer-lost": (
        "a peer disconnected, and no rank of this launch reported why.",
        "look at the logs of all ranks, and at dmesg for the out-of-memory killer.",
    ),
    "hang": (
        "a collective timed out: a rank did not take part in it, or took part in another one.",
        "compare where the ranks were; call the same collectives in the same order on every rank.",
    ),
    "unpicklable": (
        "an object cannot be sent to another process.",
        "return plain data, or send what is at the top of a module; open files and locks where they are used.",
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

_BY_SIGNAL: Final[dict[int, Advice]] = {
    int(signal.SIGKILL): ADVICE["DS-END-sigkill"],
    int(signal.SIGSEGV): (
        "a bug in native code: an extension, a driver, mixed library versions.",
        "the Python stack at the crash is in the log below; check versions of CUDA and torch.",
    ),
    int(signal.SIGBUS): (
        f"a mapped file was shortened, or {ADVICE['DS-MEM-shm'][0]}",
        ADVICE["DS-MEM-shm"][1],
    ),
    int(signal.SIGABRT): (
        "native code aborted: a failed assertion, or collectives of different sizes under gloo.",
        "read the end of the log below; compare the shapes and dtypes that the ranks pass, also after an except.",
    ),
    int(signal.SIGILL): (
        "native code was built for another processor: this one lacks an instruction that it uses.",
        "the Python stack in the log below leads to it; install a build for {host}, or build it there.",
    ),
    int(signal.SIGFPE): (
        "native code divided an integer by zero; floating point numbers do not do this.",
        "the Python stack in the log below leads to it; look for a size or a count of 0 that is passed.",
    ),
    int(signal.SIGTRAP): (
        "native code ended itself at a failed check, or at a breakpoint without a debugger.",
        "read the end of the log below; see which library was called last.",
    ),
    int(signal.SIGXCPU): (
        "the limit of processor time is used up: ulimit -t, which login nodes set, or RLIMIT_CPU in the script.",
        "run it as a job of the scheduler (sbatch, srun), or raise the limit (ulimit -t unlimited).",
    ),
    **dict.fromkeys(
        map(int, (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)),
        (
            "a timer of the rank itself: signal.alarm() or setitimer(), and no handler for its signal.",
            "set the handler before the timer, or cancel it (signal.alarm(0)) once the work is done.",
        ),
    ),
}

_CPU_LIMIT: Final[Advice] = (
    "it has used the {limit_s} s of processor time that a rank may use (ulimit -t), as login nodes set it.",
    _BY_SIGNAL[signal.SIGXCPU][1],
)

_ON_THE_GPU: Final[Advice] = (
    "a kernel failed on the GPU: an index out of range, a bug in a kernel, or the GPU itself.",
    "CUDA_LAUNCH_BLOCKING=1 shows the line; if the line changes from run to run, look for an Xid in dmesg.",
)


_BY_TOPIC: Final[dict[Topic, Advice]] = {
    "port": _BY_KIND["port"],
    "descriptors": general_advice("DS-MEM-descriptors"),
    "shared-memory": general_advice("DS-MEM-shm"),
    "disk": (
        "no room to write: the disk, a quota, or a limit on the size of files (ulimit -f) is full.",
        "make room or write elsewhere (df -h, quota, ulimit -f); what was written is incomplete.",
    ),
    "read-only": ADVICE["DS-DISK-read-only"],
    "pipe": (
        "what read the other end has ended: a program that this rank had started, or a server.",
        'see the program\'s exit code and output; if it is a server: RetryPolicy(on={"network"}) tries again.',
    ),
    "unfinished-reduction": (
        "the last backward pass did not reach its end: an error in it was swallowed, or parameters are unused.",
        "let errors of a step through, or skip it on all ranks; else see find_unused_parameters=True.",
    ),
    "worker-timeout": ADVICE["DS-DATA-worker-timeout"],
    "worker-exit": (
        "code in a DataLoader worker called sys.exit() or os._exit(), or the worker could not start.",
        "read the worker's output; num_workers=0 shows an error of the dataset itself.",
    ),
}

_LOST_CODE: Final = re.compile(r"-?[1-9]\d{2,8}")
"""What `sys.exit` was given, if that may have no bit among the eight that the system keeps."""
_ENDED_BY_SIGNAL: Final = 128
"""A shell adds this to the number of the signal that has ended a program."""
_USAGE: Final = 2
"""The exit code of argparse for arguments that are missing or unknown."""
_LOCAL_RANK: Final = re.compile(r"error: the following arguments are required:.*--local[-_]rank")
_ARGUMENT_OF_OLD_LAUNCHERS: Final[Advice] = (
    "the script requires --local_rank, which torch.distributed.launch passed and torchrun does not",
    "read the local rank from the environment: default=int(os.environ['LOCAL_RANK']), required=False.",
)

_NUMBER: Final = re.compile(r"\d+")
_SWALLOWED: Final[Advice] = (
    "the rank probably handled the error below and skipped calls that the other ranks made.",
    "let the error through, or agree on all ranks to skip the batch: ddpsafe.current().all_reduce(ok, op='min').",
)

_INTERRUPTED: Final[Advice] = (
    "SIGINT was sent to this rank only, or its code raised KeyboardInterrupt{where}.",
    "find what signals process {pid} on {host}; Ctrl-C goes to the launcher, which ends all ranks.",
)

_EXITED_EARLY: Final[Advice] = (
    "sys.exit(0) was called at {where} while the other ranks had work left.",
    "remove that sys.exit(0), or let all ranks reach it together.",
)

_RECURSION: Final[Advice] = (
    "endless recursion: the stack at the crash repeats one function, or a few.",
    "give the function in the log below an end to its recursion, or make it a loop.",
)

_OTHER_SHAPES: Final[Advice] = (
    "the ranks have tensors of different shapes: a last batch, or what a filter leaves, down to nothing.",
    "pad to one shape after a reduction of the sizes with MAX; ddpsafe.current().all_gather(obj) takes any size.",
)

_OTHER_DTYPES: Final[Advice] = (
    "the ranks have tensors of different dtypes: numbers of NumPy or Python on one branch, or autocast on some ranks.",
    "convert them to one dtype on every rank, for example with .float(), before the collective.",
)

_OTHER_ROOTS: Final[Advice] = (
    "the ranks compute src or dst differently, for example from their own rank.",
    "pass the same src or dst on every rank.",
)

_FROM_A_THREAD: Final[Advice] = (
    "a rank calls it in another thread than the main one, so that the order of calls differs between ranks.",
    "make calls that meet other ranks in one thread, or give the thread a group of its own: dist.new_group() on every rank.",
)

_ON_ONE_RANK: Final[Advice] = (
    "not all ranks run the DDP model, whose forward copies buffers between ranks, in eval() mode too.",
    "evaluate with the model inside DDP, model.module, or on every rank.",
)

_NOT_ON_ALL: Final[Advice] = (
    "only some ranks call a method of Checkpointer, below a condition such as `if rank == 0`, or a rank left it out.",
    "call it on every rank: each sends its part, and rank 0 writes the file.",
)

_IN_A_CYCLE: Final[Advice] = (
    "a rank skips a step that the others make, or calls the collectives of overlapping groups in another order.",
    "make the same calls in the same order on every rank; or use async_op=True and wait for all of them.",
)

_OTHER_SIGNAL: Final[Advice] = (
    "another process sent it: a scheduler, another user, or the script itself.",
    "find the sender on {host}; ddpsafe itself ended no rank before this.",
)

_TOO_LONG: Final[Advice] = (
    "the work takes longer than the timeout, or a rank hangs.",
    "see where the ranks were; if they were busy, raise timeouts.{setting}.",
)

_IN_KERNEL: Final[Advice] = (
    "a disk, mount or device on {host} does not respond; until it does, not even SIGKILL ends the rank.",
    "look at dmesg and the mounts on {host}; move the data to storage that responds.",
)

_WENT_ON: Final[Advice] = (
    (
        "it probably waited for something that a rank in the collective held, such as the lock of a file; if "
        "not, its work takes a little longer than the timeout."
    ),
    (
        "hold no lock while you wait for other ranks: release it before the collective; "
        "ddpsafe.current().rank_zero_first lets one rank work first."
    ),
)

_DOING: Final = {
    "starting": "starting (importing the script)",
    "loading": "loading what it is to run",
    "joining": "joining the process group",
    "running": "running",
    "leaving": "leaving",
}


EndReason = Literal[
    "signal",
    "failed",
    "node-lost",
    "done",
    "stuck-with-error",
    "left",
    "deadlock",
    "stop-timeout",
    "attempt-timeout",
    "no-progress",
    "start-timeout",
    "finish-timeout",
]
"""If several apply, the first one is the reason, because it explains most.

- ``signal``: a signal to a launcher ends the ranks without the time to save.
- ``failed``: a rank has reported a failure, or ended without any report.
- ``node-lost``: one of several nodes is lost, leaves without a save, or could not start its ranks.
- ``done``: all ranks have returned.
- ``stuck-with-error``: a rank with an exception in flight and another rank wait for each other.
- ``left``: a rank has returned, and another one waits in a collective that needs it.
- ``deadlock``: ranks are proved to wait for ever.
- ``stop-timeout``: not all ranks returned within ``timeouts.stop`` of a request to stop.
- ``attempt-timeout``: the attempt has taken longer than ``timeouts.attempt``.
- ``no-progress``: no rank has made a step or entered a collective within ``timeouts.progress``.
- ``start-timeout``: not all ranks have joined within ``timeouts.start``.
- ``finish-timeout``: all ranks have returned, but what one of them still does was not done within
  ``timeouts.finish``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why the watch ended.

    Attributes:
        proof: The deadlock, if that is the reason.
        progress: The limit for the time without progress when the watch ended.
        unfinished: What ranks that have returned still did when their time was over, by rank.
    """

    reason: EndReason
    waited_s: float
    proof: Deadlock | None = None
    progress: timedelta | None = None
    unfinished: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """What is known about a failed attempt, with the phrases that its errors share.

    Attributes:
        attempt: The attempt, counted from 1.
        oom_kills: How many processes the kernel killed for memory during the attempt.
        unknown_ranks: Number of ranks of other nodes that `outcomes` does not have.
        is_script: Whether the ranks ran a script under ``ddpsafe run``, and no function.
    """

    outcomes: Mapping[int, RankOutcome]
    ending: Ending
    attempt: int
    retry: RetryPolicy
    run_dir: Path
    oom_kills: int
    timeouts: Timeouts
    nnodes: int = 1
    unknown_ranks: int = 0
    is_script: bool = False

    @property
    def code(self) -> str:
        """What a rank runs, as its user knows it."""
        return "script" if self.is_script else "function"

    @property
    def returned(self) -> str:
        """How what a rank runs ends in order."""
        return "its script ended" if self.is_script else "its function returned"

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return len(self.outcomes) + self.unknown_ranks

    def when(self, kind: FailureKind) -> str:
        """Return which attempt it was and after how long it ended."""
        # If this kind is never retried, "attempt 1 of 3" would promise two more attempts.
        shows_total = self.retry.attempts > 1 and (self.attempt > 1 or kind in self.retry.on)
        number = f"attempt {self.attempt}" + (f" of {self.retry.attempts}" if shows_total else "")
        return f"{number}, after {self.ending.waited_s:.1f} s"

    def limit(self, field: str) -> str:
        """Return a timeout with its value, as in a configuration."""
        value = getattr(self.timeouts, field)
        if value == "auto":
            longest = self.ending.progress
            known = ""
            if longest is not None:
                learned = timedelta(seconds=round(longest.total_seconds(), 1))
                known = f": {show_duration(learned)}, as learned"
            return f"timeouts.{field} (auto{known})"
        return f"timeouts.{field} ({show_duration(value)})"

    def names(self, ranks: Iterable[int]) -> str:
        """Return the names of ranks with the world size."""
        return f"{ranks_text(ranks)} (world_size {self.world_size})"

    def name(self, outcome: RankOutcome) -> str:
        """Return a rank's name with the world size, and with its node if there are several."""
        if self.nnodes == 1:
            return self.names([outcome.rank])
        place = f"node {outcome.node_rank} {outcome.hostname!r}, local rank {outcome.local_rank}"
        return f"rank {outcome.rank} ({place}, world_size {self.world_size})"

    def name_all(self, outcomes: Sequence[RankOutcome]) -> str:
        """Return the name of one rank as `name` does, or those of several."""
        is_one = len(outcomes) == 1
        return self.name(outcomes[0]) if is_one else self.names(out.rank for out in outcomes)

    def place(self, outcome: RankOutcome, kind: FailureKind) -> str:
        """Return on which host a rank was, in which phase, and when the attempt ended."""
        return f"on {outcome.hostname} while {_DOING[outcome.phase]}, {self.when(kind)}"

    def current(self, outcome: RankOutcome) -> Collective | None:
        """Return the collective that a rank was in, else the last that it entered, the same in all of a message."""
        proof = self.ending.proof
        if proof is not None:
            waits = {wait.rank: wait.collective for wait in proof.waits} | dict(proof.calls)
            proven = waits.get(outcome.rank)
            if proven is not None and not proven.done:
                return proven
        return None if outcome.position is None else outcome.position.current()

    @property
    def logs(self) -> Path | str:
        """The run directory, with its host if there are several nodes."""
        return self._on(socket.gethostname(), self.run_dir)

    def log_of(self, outcome: RankOutcome) -> Path | str:
        """Return the rank's log, or the run directory if the rank wrote nothing."""
        log = Path(outcome.stderr) if outcome.stderr else None
        if outcome.said is not None:  # its log is on another host
            return self._on(outcome.hostname, log or self.run_dir)
        has_written = log is not None and log.exists() and log.stat().st_size
        return self._on(outcome.hostname, log) if log and has_written else self.logs

    def _on(self, hostname: str, path: Path) -> Path | str:
        # All nodes show the same message, so the path alone would be looked for on the wrong host.
        return path if self.nnodes == 1 else f"{hostname}:{path}"

    def facts(self) -> dict[str, Any]:
        """Return the attributes of every `LaunchError`."""
        return {
            "attempt": self.attempt,
            "attempts": self.retry.attempts,
            "outcomes": dict(self.outcomes),
            "run_dir": self.run_dir,
        }

    def rank_facts(self, root: RankOutcome) -> dict[str, Any]:
        """Return the attributes of every `RankFailedError`."""
        return {
            **self.facts(),
            "rank": root.rank,
            "local_rank": root.local_rank,
            "hostname": root.hostname,
            "pid": root.pid,
            "log_path": Path(root.stderr) if root.stderr else None,
        }

    def timeout_error(
        self,
        setting: Limit,
        what: str,
        advice: Advice,
        details: Sequence[str],
        *,
        missing: Iterable[RankOutcome],
        kind: FailureKind = "hang",
    ) -> LaunchTimeoutError:
        """Return the error of a wait that a field of `Timeouts` limits, with its attributes."""
        stacks = {rank: where(outcome) for rank, outcome in self.outcomes.items()}
        cls = RendezvousTimeoutError if setting == "start" else LaunchTimeoutError
        return cls(
            Explanation(what, *advice, details, self.logs),
            **self.facts(),
            setting=setting,
            waited_s=self.ending.waited_s,
            missing_ranks=tuple(outcome.rank for outcome in missing),
            stacks={rank: text for rank, text in stacks.items() if text},
            kind=kind,
        )


def _filled(advice: Advice, rank: RankOutcome, **facts: str) -> Advice:
    """Put the facts of a rank into the advice about it."""
    likely, fix = (text.format(host=rank.hostname, pid=rank.pid, **facts) for text in advice)
    return likely, fix


def make_error(ended: EndedAttempt) -> LaunchError:
    """Return the error to raise for a failed attempt, with the rank's exception as its cause."""
    if ended.ending.reason == "start-timeout":
        return _join_error(ended)
    if ended.ending.reason == "finish-timeout":
        return _unfinished_error(ended)
    cause = find_root_cause(
        ended.outcomes, is_stuck_with_error=ended.ending.reason == "stuck-with-error"
    )
    if ended.ending.reason == "attempt-timeout":
        return _too_long_error(ended, cause, "attempt", "did not end within")
    if ended.ending.reason == "no-progress":
        return _too_long_error(ended, cause, "progress", "made no step within")
    conclusion = cause.conclusion
    if conclusion.is_start_likelier and _find_early(ended):
        return _join_error(ended)  # a rank's timeout ended just before the launcher's
    proof = ended.ending.proof
    has_broken = conclusion.error is RankFailedError and conclusion.blames != "nothing"
    if proof is not None and not has_broken:
        return _deadlock_error(ended, cause, proof)
    if (proof := find_proof_of_torch(cause.root, ended.outcomes)) is not None:
        return _deadlock_error(
            ended, cause, proof, what="torch has compared the ranks' calls, which differ:"
        )
    return _ERROR_OF[conclusion.error](ended, cause)


def unloadable(ended: EndedAttempt, rank: int, exc: Exception) -> RankFailedError:
    """Return the error of an attempt in which only the loading of a returned value failed."""
    root = ended.outcomes[rank]
    message = Explanation(
        f"what {ended.name(root)} returned on {root.hostname}, {ended.when('unpicklable')}, "
        f"cannot be loaded here: {type(exc).__name__}: {clip(str(exc), _MAX_MESSAGE)}",
        cause="it contains something that exists only in the rank, such as a process group.",
        fix="return plain data: numbers, strings, tensors, state dicts.",
        logs=ended.logs,
    )
    return RankFailedError(message, **ended.rank_facts(root), kind="unpicklable")


def _failed_error(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    if cause.root.status == "killed" or cause.root.native is not None:
        return _killed_error(ended, cause)
    if cause.root.raised is not None and cause.root.raised.exit_code is None:
        raised = cause.root.raised
        if raised.wraps_peer_error:
            # No rank hangs, so this exception counts even though a peer's failure triggered it.
            raised = replace(raised, origin="own")
        return _raised_error(ended, cause, raised)
    return _exited_error(ended, cause)


def _raised_error(ended: EndedAttempt, cause: RootCause, raised: Raised) -> LaunchError:
    root, kind = cause.root, kind_of(raised)
    topic = find_topic(raised)
    advice = _BY_KIND.get(kind, _BY_KIND["user-error"]) if topic is None else _BY_TOPIC[topic]
    text = clip(raised.message, _MAX_MESSAGE)
    handled: list[str] = []
    if topic == "unfinished-reduction" and (
        handled := handled_errors(root, ended, or_others=False)
    ):
        advice = _SWALLOWED
    if raised.explanation is not None:  # an error of ddpsafe has its own advice
        text = "\n".join([raised.explanation.what, *raised.explanation.details])
        text = clip(text, _MAX_EXPLANATION)
        advice = (raised.explanation.cause or advice[0], raised.explanation.fix or advice[1])
    details = [f"at {raised.where}"] if raised.where else []
    if not raised.final and root.stack and root.in_collective is False:
        details.append(f"was still handling it at {root.stack}, in an except or a finally")
    if raised.dead_worker:
        details.append(raised.dead_worker)
    if raised.held:
        details.append(f"held: {raised.held}")
    if could_not_report(root):
        details.append("read from its log: the script had closed the pipe for it (os.closerange?)")
    # A GPU that has failed mostly says so in the kernel's log only.
    if kind == "hardware":
        details += _gpus.read_errors(ended.ending.waited_s + _LOG_MARGIN_S)
    if raised.hidden_by:
        details.append(f"on top of it, in an except or a finally: {raised.hidden_by}")
    quoted = f": {text}" if text else "."
    message = Explanation(
        f"{ended.name(root)} raised {raised.type_name} {ended.place(root, kind)}{quoted}",
        *advice,
        details=[*details, *handled, *other_ranks(ended.outcomes.values(), cause)],
        logs=ended.log_of(root),
    )
    error = RankRaisedError(message, **ended.rank_facts(root), kind=kind)
    set_cause(error, raised)
    return error


def set_cause(error: LaunchError, raised: Raised) -> None:
    """Make what a rank has raised the cause of the attempt's error, which quotes it already."""
    error.__cause__ = original_of(raised)
    if isinstance(error.__cause__, DDPSafeError):
        error.__cause__.is_quoted = True


def _killed_error(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    root = cause.root
    number = -(root.exit_code or 0)
    kind: FailureKind = "killed"
    advice = _filled(_BY_SIGNAL.get(number, _OTHER_SIGNAL), root)
    if root.cpu_limit_s is not None:
        advice = _filled(_CPU_LIMIT, root, limit_s=str(root.cpu_limit_s))
    elif number == signal.SIGKILL and ended.oom_kills:
        kind, advice = "out-of-memory", _filled(ADVICE["DS-MEM-host-oom"], root)
    if is_endless_recursion(root.error_text()):
        advice = _RECURSION
    elif crashed_while_building_ddp(root.error_text()):
        advice = ADVICE["DS-DDP-debug-crash"]
    how = f"killed by {root.signal_name}"
    if root.native is not None:
        how = f"ended by native code ({root.native.text[:_MAX_NATIVE_TEXT]})"
        number = signal.SIGABRT
        if root.native.kind is not None:
            kind = root.native.kind
            advice = _ON_THE_GPU if kind == "user-error" else _BY_KIND[kind]
    if root.phase == "leaving":
        how += f" in what its {ended.code} had left running (a thread, a queue, an exit function)"
    details = [*last_output(root), *other_ranks(ended.outcomes.values(), cause)]
    if number == signal.SIGABRT:  # gloo aborts if the ranks pass different shapes
        handled = handled_errors(root, ended)
        # The shapes may differ because a rank has handled an error and so skipped a call.
        if handled and advice == _BY_SIGNAL[number]:
            advice = _SWALLOWED
        details += handled
        passed = {out.rank: call for out, call in cause.evidence.calls}
        is_one_call = len({(family(call), call.sizes) for call in passed.values()}) == 1
        dtypes = {call.dtypes for call in passed.values()} - {""}
        if advice == _BY_SIGNAL[number] and is_one_call and len(dtypes) > 1:
            advice = _OTHER_DTYPES
            details += [f"rank {rank} passed {call.inputs}" for rank, call in passed.items()]
        details += positions(
            ended, [out for out in ended.outcomes.values() if out.position is not None]
        )
    message = Explanation(
        f"{ended.name(root)} was {how} {ended.place(root, kind)}.",
        *advice,
        details=details,
        logs=ended.log_of(root),
    )
    return RankKilledError(message, **ended.rank_facts(root), exit_code=128 + number, kind=kind)


def _exited_error(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    root, raised = cause.root, cause.root.raised
    code = root.exit_code or 0
    is_unknown = root.exit_code is None and raised is None
    likely = "sys.exit() or os._exit() was called in the rank"
    fix = f"{'let the script reach its end' if ended.is_script else 'return from the function'} for success; raise an exception to report a failure."
    if raised is not None and raised.exit_code is not None:
        code = raised.exit_code
        likely = f"{raised.type_name} was raised at {raised.where}"
        if not raised.where:  # under --no-python
            likely, number = "the program ended with that code", code - _ENDED_BY_SIGNAL
            if 0 < number <= signal.SIGRTMAX:
                likely += f", as a shell does when {signal_name(number)} has ended what it runs"
            fix = "see the end of its output above or in the log."
        if raised.message not in ("", str(code)):
            likely += f": {clip(raised.message, _MAX_MESSAGE)}"
        if _LOST_CODE.fullmatch(raised.message) and int(raised.message) % 256 == 0:
            likely += ", which the system would make 0, a success, so ddpsafe makes it 1"
            fix = "os.system() returns such a status: pass os.waitstatus_to_exitcode(status) to sys.exit()."
        if raised.explanation is not None:
            likely, fix = raised.explanation.cause.rstrip("."), raised.explanation.fix
        elif code == _USAGE and _LOCAL_RANK.search(root.error_text()):  # handled in argparse itself
            likely, fix = _ARGUMENT_OF_OLD_LAUNCHERS
        elif raised.handled:
            likely += f", while it handled {raised.handled}"
            fix = "fix that line; if you let the exception through, its traceback is shown."
    elif is_unknown:
        likely = "a SIGCHLD handler or an os.wait() in the launching program collected the exit status before ddpsafe could"
        fix = "let it wait only for its own children: os.waitpid(pid, …)."
    elif root.phase == "leaving":
        likely = f"a thread or an exit function (atexit) that the {ended.code} had left running called os._exit()"
        fix = f"let it raise or return; what a rank does after its {ended.code} is part of the job."
    elif root.phase == "starting":
        likely = "the script failed while the new process imported it; its output is above"
        fix = "fix the error in the traceback above; a rank imports the script from its first line."
    elif could_not_report(root):
        what = "the error below" if code else ended.returned
        likely = f"{what}; the script had closed the pipe on which it is reported (os.closerange?)"
        fix = "close only what the script has opened, and fix the error below if there is one."
    elif code == _UNKNOWN_CODE:
        likely += ", or Python's fork server was killed, so the exit codes of its ranks are lost"
    likely += "."
    if code == 128 + signal.SIGINT and raised is not None and not raised.handled:
        place = f" at {raised.where}" if raised.where else ""
        likely, fix = _filled(_INTERRUPTED, root, where=place)
    how = "ended" if is_unknown else f"exited with code {code}"
    message = Explanation(
        f"{ended.name(root)} {how} {'after' if root.phase == 'leaving' else 'before'} {ended.returned}, "
        f"{ended.place(root, 'user-error')}{'; its exit status is unknown' if is_unknown else ''}.",
        cause=likely,
        fix=fix,
        details=[*last_output(root), *other_ranks(ended.outcomes.values(), cause)],
        logs=ended.log_of(root),
    )
    cls = RankLeftEarlyError if code == 0 and not is_unknown else RankExitedError
    kind = None if raised is None else raised.kind
    error = cls(message, **ended.rank_facts(root), exit_code=code or 1, kind=kind or cls.kind)
    if raised is not None and raised.handled:
        error.__cause__ = original_of(raised)
    return error


def _returned_error(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    """Return the error of a rank that returned while others still waited for it."""
    root = cause.root
    waiting = [outcome.rank for outcome in ended.outcomes.values() if outcome.status != "returned"]
    advice = cause.conclusion.advice
    kind = cause.conclusion.kind or "user-error"
    if root.exited_at:
        advice = _filled(_EXITED_EARLY, root, where=root.exited_at)
    handled = handled_errors(root, ended)
    message = Explanation(
        f"{ended.name(root)} returned early on {root.hostname}, {ended.when(kind)}: "
        f"{ranks_text(waiting)} {_were(waiting)} still waiting for it.",
        *(_SWALLOWED if handled else advice),
        details=[*handled, *positions(ended)],
        logs=ended.logs,
    )
    return RankLeftEarlyError(message, **ended.rank_facts(root), kind=kind)


def _wait_error(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    """Return the error of a wait that timed out or never ends; it names the rank waited for."""
    outcomes, conclusion = ended.outcomes.values(), cause.conclusion
    # ddpsafe's own rendezvous and barrier have limits of their own.
    own: tuple[Limit, ...] = ("start", "barrier")
    setting: Limit = next(
        (limit for limit in own if any(_has_raised(each, limit) for each in outcomes)), "collective"
    )
    at_barriers = [
        out.raised.explanation
        for out in outcomes
        if out.raised is not None
        and out.raised.explanation is not None
        and _has_raised(out, "barrier")
    ]
    if conclusion.blames == "nothing" and at_barriers:
        return _barrier_error(ended, at_barriers)
    if conclusion.blames == "gpu":
        return _stuck_gpu_error(ended, cause, setting)
    root = cause.root
    if cause.rule.name == "mismatch" and setting != "start":
        calls = [(out.rank, call) for out, call in cause.evidence.calls]
        return _mismatch_error(ended, root, calls, _calls_of(cause), setting)
    if cause.rule.name == "missed-barrier":
        return _missed_barrier_error(ended, cause, setting)
    place = f" at {where(root)}" if where(root) else ""
    waiting, goal = cause.evidence.find_who_waited(root)
    late = {out.rank: delay_s for out, delay_s in cause.evidence.late}
    also_late = [rank for rank in late if rank != root.rank] if cause.rule.name == "late" else []
    behaviour = conclusion.behaviour.format(
        delay_s=late.get(root.rank, 0.0),
        first="the first rank" if also_late else "the others",
        newest=ended.current(root),
        wait=root.sends_or_receives or "a collective",
    )
    awaited = ""
    if goal is not None:
        awaited = f"; {ranks_text(waiting)} {_were(waiting)} waiting for it in {goal}"
    awaited += "".join(
        f"; rank {rank} entered it {late[rank]:.1f} s after the first rank" for rank in also_late
    )
    kind: FailureKind = _kind_of_join(ended) if setting == "start" else conclusion.kind or "hang"
    missing = [] if conclusion.blames == "nothing" else [root]
    return ended.timeout_error(
        setting,
        f"{ended.name(root)} {behaviour}{place}, on {root.hostname}, {ended.when(kind)}{awaited}.",
        _filled(_advice_on_hang(cause), root, setting=setting),
        [
            # They name the barrier, and how long each rank has waited there.
            *(explanation.what for explanation in at_barriers[:_SHOWN_BARRIERS]),
            *handled_errors(root, ended, or_others=False),
            *positions(ended),
            *last_traceback(root),
        ],
        missing=[*missing, *(ended.outcomes[rank] for rank in also_late)],
        kind=kind,
    )


def _missed_barrier_error(ended: EndedAttempt, cause: RootCause, setting: Limit) -> LaunchError:
    """Return the error of ranks that torch's monitored barrier names, with torch's own sentence."""
    root, missed = cause.root, cause.evidence.missed_barrier
    what = cause.conclusion.behaviour
    if len(missed) > 1:
        what = f"{ended.names(out.rank for out in missed)} {what}"
    else:
        place = f" and was at {where(root)}" if where(root) else ""
        what = f"{ended.name(root)} {what}{place}, on {root.hostname}"
    by_torch = []
    for out in ended.outcomes.values():
        if out.raised is not None and out.raised.missed_barrier:
            # The rank may have raised another error from it, with another text.
            lines = map(str.strip, out.raised.traceback.splitlines())
            line = next(filter(find_missed_barrier, lines), first_line(out))
            is_same = find_missed_barrier(line) == [*out.raised.missed_barrier]
            numbers = "" if is_same else ", with the numbers of the ranks in their group"
            by_torch.append(f"rank {out.rank} raised {clip(line, _SUMMARY_WIDTH)}{numbers}")
    return ended.timeout_error(
        setting,
        f"{what}, {ended.when('hang')}.",
        _filled(_advice_on_hang(cause), root, setting=setting),
        [
            *by_torch,
            *handled_errors(root, ended, or_others=False),
            *positions(ended),
        ],
        missing=missed,
    )


_ERROR_OF: Final[dict[type[LaunchError], Callable[[EndedAttempt, RootCause], LaunchError]]] = {
    RankFailedError: _failed_error,
    RankLeftEarlyError: _returned_error,
    LaunchTimeoutError: _wait_error,
}


def _calls_of(cause: RootCause) -> list[str]:
    """Return what each rank called under one number, if the ranks called it differently."""
    calls = [(out.rank, call) for out, call in cause.evidence.calls]
    if cause.rule.name != "mismatch":
        return []
    # A collective that has failed counts as done, so it is not known which ranks have left it.
    lines = call_lines(calls, verbs=("called", "called"))
    return ["the calls that differ:", *(f"| {line}" for line in lines)]


_SHOWN_SIDES: Final = 4


def _mismatch_error(
    ended: EndedAttempt,
    root: RankOutcome,
    calls: Sequence[tuple[int, Collective]],
    details: Sequence[str],
    setting: Limit = "collective",
) -> LaunchError:
    """Return the error of ranks that called one number of a group differently.

    All but those in the most frequent call are named, and `root` first; if no call is more frequent, all are.
    """
    own_call = next(call for rank, call in calls if rank == root.rank)
    others = [call for rank, call in calls if rank != root.rank]
    is_same = not own_call.is_own_wait and all(
        (family(call), call.number) == (family(own_call), own_call.number) for call in others
    )
    has_roots = is_same and len({call.root for _, call in calls} - {None}) > 1

    def what_differs(call: Collective) -> str:
        """Return what a rank did that others did not, as the end of a clause."""
        called = f"{family(call)}{'' if call.is_own_wait else f' number {call.number}'}"
        if not is_same:
            return f"entered {called}"
        if has_roots:
            return f"named rank {call.root} as the root of {called}"
        return f"passed {call.inputs or 'an unknown shape'} to {called}"

    sides: dict[str, list[RankOutcome]] = defaultdict(list)
    for rank, call in calls:
        if not (has_roots and call.root is None):
            sides[what_differs(call)].append(ended.outcomes[rank])
    # Of two ranks, or two halves, the one that is named alone would be the wrong one in half of the
    # cases.
    largest = max(sides.values(), key=len)
    has_majority = sum(len(side) == len(largest) for side in sides.values()) == 1
    odd = [side for side in sides.values() if not (has_majority and side is largest)]
    if not any(root in side for side in odd):
        root = min(odd, key=len)[0]
    odd.sort(key=lambda side: root not in side)
    called_by = dict(calls)
    advice = CONCLUSIONS["mismatch"].advice
    if is_same:
        advice = _OTHER_SHAPES if len({call.sizes for _, call in calls}) > 1 else _OTHER_DTYPES
    if has_roots:
        advice = _OTHER_ROOTS
    if not is_same and any(call.caller == DDP_EVALUATION for _, call in calls):
        advice = _ON_ONE_RANK
    elif len({bool(call.thread) for _, call in calls}) > 1:
        advice = _FROM_A_THREAD
    elif any(call.is_own_wait and call.group.startswith(CHECKPOINTS) for _, call in calls):
        advice = _NOT_ON_ALL
    handled = [] if is_same else handled_errors(root, ended)
    # An error that such a thread has died of follows from its call.
    if handled and advice != _FROM_A_THREAD:
        advice = _SWALLOWED
    behaviour = ""
    if has_majority and len(odd) == 1 and not is_same:
        is_own_wait = any(call.is_own_wait for _, call in calls)
        behaviour = CONCLUSIONS["mismatch"].behaviour
        behaviour = "made another call than the others" if is_own_wait else behaviour
    clauses: list[str] = []
    shown = odd if len(odd) <= _SHOWN_SIDES else odd[: _SHOWN_SIDES - 1]
    for side in shown:
        call = called_by[side[0].rank]
        who = ended.name_all(side)
        unlike = ", unlike the others," if has_majority and not behaviour and not clauses else ""
        did = behaviour or what_differs(call)
        clauses.append(f"{who}{unlike} {did}{_is_at(ended, side[0], call)}")
    if len(odd) > len(shown):
        clauses.append(f"{sum(map(len, odd[len(shown) :]))} more ranks differ from these")
    missing = [out for side in odd for out in side]
    if len(missing) == 1:
        clauses[0] += f", on {root.hostname}"
    is_either = len(clauses) == 2 and not has_majority  # noqa: PLR2004 - either side may be wrong
    what = listed(clauses, last=", but " if is_either else ", and ")
    lines = [*details, *handled, *positions(ended)]
    what = f"{what}, {ended.when('hang')}."
    return ended.timeout_error(setting, what, advice, lines, missing=missing)


def _is_at(ended: EndedAttempt, outcome: RankOutcome, called: Collective) -> str:
    """Return where a rank is that has called a collective, as the end of a clause."""
    newest = ended.current(outcome)
    if called.thread:
        return f" in {called.thread}"
    is_later = newest is not None and newest.group == called.group and newest.number > called.number
    return f"{', and is now' if is_later else ''} at {where(outcome)}" if where(outcome) else ""


def _deadlock_error(
    ended: EndedAttempt,
    cause: RootCause,
    proof: Deadlock,
    what: str = "this is a deadlock, so ddpsafe did not wait for a timeout:",
) -> LaunchError:
    """Return the error of a proven deadlock: the proof, then where the ranks were."""
    if proof.reason == "mismatch" and any(call.is_own_wait for _, call in proof.calls):
        proof = differ(_with_latecomers(proof.calls, ended))
    proof_lines = [what, *(f"| {line}" for line in proof.lines())]
    if proof.reason == "mismatch":
        # The rule sees no roots, which only the ranks' stacks show.
        rank = cause.root.rank if cause.root.rank in proof.ranks else proof.ranks[-1]
        return _mismatch_error(ended, ended.outcomes[rank], proof.calls, proof_lines)
    if proof.reason != "cycle":
        has_returned = cause.conclusion.error is RankLeftEarlyError
        error = (_returned_error if has_returned else _wait_error)(ended, cause)
        message = error.explanation
        error.explanation = replace(message, details=(*proof_lines, *message.details))
        return error
    has_threads = any(wait.collective.thread for wait in proof.waits)
    return ended.timeout_error(
        "collective",
        f"{ended.names(proof.ranks)} wait for each other in collectives of different groups, "
        f"{ended.when('hang')}.",
        _FROM_A_THREAD if has_threads else _IN_A_CYCLE,
        [*proof_lines, *positions(ended)],
        missing=[ended.outcomes[rank] for rank in proof.ranks],
    )


def _with_latecomers(
    calls: Sequence[tuple[int, Collective]], ended: EndedAttempt
) -> list[tuple[int, Collective]]:
    """Add the ranks that came to one of these calls too late to be a part of the proof."""
    known = {_what(call) for _, call in calls}
    last = {rank: ended.current(outcome) for rank, outcome in ended.outcomes.items()}
    late = {
        rank: call
        for rank, call in last.items()
        if call is not None and not call.done and _what(call) in known
    }
    return sorted((late | dict(calls)).items())


def _what(call: Collective) -> tuple[str, ...]:
    """Return what is equal for ranks that are in one call."""
    return (call.name,) if call.is_own_wait else (family(call), call.group, str(call.number))


def _were(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _stuck_gpu_error(ended: EndedAttempt, cause: RootCause, setting: Limit) -> LaunchError:
    """Return the error of a collective that all its ranks have queued but that does not end."""
    stuck = find_stuck_on_gpu(cause.evidence)
    # Not the newest of each rank, which may have queued collectives of another group since.
    calls = {out.rank: call for out, call in stuck}
    started = [rank for rank, call in calls.items() if call.state == "started"]
    queued = [rank for rank in calls if rank not in started]
    details = [*positions(ended), *_gpus.read_errors(ended.ending.waited_s + _LOG_MARGIN_S)]
    if started and queued:  # known only with TORCH_NCCL_ENABLE_TIMING=1
        details = [f"on the GPU of {ranks_text(queued)} it has not even started", *details]
    behaviour = cause.conclusion.behaviour.format(newest=stuck[0][1])
    what = f"{ended.names(calls)} {behaviour}, {ended.when('hang')}."
    advice = _filled(cause.conclusion.advice, stuck[0][0])
    return ended.timeout_error(setting, what, advice, details, missing=[])


def _barrier_error(ended: EndedAttempt, texts: list[Explanation]) -> LaunchError:
    """Return the error of ranks that timed out at barriers while none is known to hang."""
    first, *others = texts
    return ended.timeout_error(
        "barrier",
        f"{first.what} ({ended.when('hang')})",
        (first.cause, first.fix),
        [*(explanation.what for explanation in others), *positions(ended)],
        missing=[out for out in ended.outcomes.values() if not _has_raised(out, "barrier")],
    )


def _has_raised(outcome: RankOutcome, setting: Limit) -> bool:
    return outcome.raised is not None and outcome.raised.setting == setting


def _advice_on_hang(cause: RootCause) -> Advice:
    root = cause.root
    outlived_sigkill = root.status == "stopped" and root.ended_ns is None
    # It was late because of a rank that had given up: a longer timeout would not help.
    if root.before is not None:
        return _WENT_ON
    in_kernel = root.state == psutil.STATUS_DISK_SLEEP and outlived_sigkill
    return _IN_KERNEL if in_kernel else cause.conclusion.advice


def _join_error(ended: EndedAttempt) -> LaunchError:
    """Return the error of ranks that did not join."""
    # Ranks that wait for these are in "joining" too, so they are named only if no rank is earlier.
    missing = _find_early(ended) or [
        out for out in ended.outcomes.values() if out.phase == "joining"
    ]
    kind = _kind_of_join(ended)
    where_to = (
        "below init_process_group"
        if ended.is_script
        else "below the main guard or into the function"
    )
    return ended.timeout_error(
        "start",
        f"{ended.names(out.rank for out in missing)} did not join within {ended.limit('start')}, "
        f"{ended.when(kind)}.",
        (
            "slow imports, work at the top of the script, or a rank that hangs before it joins.",
            f"move heavy work {where_to}, or raise timeouts.start.",
        ),
        [f"rank {out.rank} was {_DOING[out.phase]} {where(out)}" for out in missing],
        missing=missing,
        kind=kind,
    )


def _kind_of_join(ended: EndedAttempt) -> FailureKind:
    """Return the kind of a join that failed."""
    # Startup kinds are retried by default, which is safe only before the function has run.
    has_run = any(outcome.phase in ("running", "leaving") for outcome in ended.outcomes.values())
    return "hang" if has_run else "startup-network"


def _find_early(ended: EndedAttempt) -> list[RankOutcome]:
    """Return the ranks that had not yet begun to join."""
    return [out for out in ended.outcomes.values() if out.phase in ("starting", "loading")]


def _too_long_error(
    ended: EndedAttempt, cause: RootCause, setting: Limit, behaviour: str
) -> LaunchError:
    """Return the error of an attempt that exceeded `timeouts.attempt` or `timeouts.progress`."""
    running = [
        outcome for outcome in ended.outcomes.values() if outcome.status in ("running", "stopped")
    ]
    blames_one = cause.conclusion.blames == "rank"
    missing = (_alike(cause.root, running) if blames_one else running) or [cause.root]
    advice = _advice_on_hang(cause) if blames_one else _TOO_LONG
    nodes = [*dict.fromkeys(f"node {out.node_rank} {out.hostname!r}" for out in missing)]
    who = ended.name_all(missing)
    if len(missing) > 1 and ended.nnodes > 1 and len(nodes) <= _SHOWN_NODES:
        who += f", on {listed(nodes)},"
    return ended.timeout_error(
        setting,
        f"{who} {behaviour} {ended.limit(setting)}, {ended.when('hang')}.",
        _filled(advice, cause.root if blames_one else missing[0], setting=setting),
        [*_calls_of(cause), *positions(ended)],
        missing=missing,
    )


def _alike(root: RankOutcome, running: Iterable[RankOutcome]) -> list[RankOutcome]:
    """Return the ranks that do the same as the one that is to blame: they work at its line."""

    def doing(out: RankOutcome) -> tuple[object, ...]:
        is_stopped = out.state == psutil.STATUS_STOPPED
        return where(out), out.in_collective, out.sends_or_receives, is_stopped, out.raised is None

    if root.in_collective or not where(root):
        return [root]
    return [out for out in running if doing(out) == doing(root)]


def _unfinished_error(ended: EndedAttempt) -> LaunchError:
    """Return the error for what ranks that have returned had not finished within `timeouts.finish`."""
    late = [ended.outcomes[rank] for rank in ended.ending.unfinished]
    have = "has" if len(late) == 1 else "have"
    return ended.timeout_error(
        "finish",
        f"{ended.names(ended.ending.unfinished)} {have} returned, but what still ran in the background was "
        f"not done within {ended.limit('finish')}, and was cut off, {ended.when('hang')}.",
        (
            (
                f"a thread, an executor, an exit function or a queue that the {ended.code} has left behind works "
                "longer than that, or hangs."
            ),
            (
                f"wait for it before the {ended.code} ends, or raise timeouts.finish (None: no limit); a queue "
                "whose sender was cut off may hold half an item, for which its reader waits for ever."
            ),
        ),
        [f"rank {rank} waited for {what}" for rank, what in ended.ending.unfinished.items()],
        missing=late,
    )


# ---- lines on each rank ----


def where(outcome: RankOutcome) -> str:
    """Return where a rank was: the line that raised, or the line it was at when it was asked."""
    is_stopped = outcome.state == psutil.STATUS_STOPPED
    if outcome.raised is None or is_stopped or outcome.before is not None:
        return outcome.stack
    return outcome.raised.where


def other_ranks(outcomes: Iterable[RankOutcome], cause: RootCause) -> list[str]:
    """Return a line for each rank that failed because of the one that broke, or was stopped."""
    because = f"failed because of rank {cause.root.rank}"
    explanation = None if cause.root.raised is None else cause.root.raised.explanation
    # An error of ddpsafe that all ranks raise has a long text, which the message of the root has.
    same = [
        out.rank
        for out in cause.collateral
        if explanation is not None
        and out.raised is not None
        and out.raised.explanation == explanation
    ]
    lines = [f"{ranks_text(same)} raised the same error"] if same else []
    lines += [
        f"rank {out.rank} {'also failed' if is_own_fault(out) else because}: {first_line(out)}"
        for out in cause.collateral[:_SHOWN_RANKS]
        if out.rank not in same
    ]
    named = (cause.root, *cause.collateral)
    stopped = [out for out in outcomes if out.status == "stopped" and out not in named]
    for outcome in stopped[:_SHOWN_RANKS]:
        where_text = f" at {outcome.stack}" if outcome.stack else ""
        lines.append(f"rank {outcome.rank} was stopped by the launcher{where_text}")
    return lines


def first_line(outcome: RankOutcome) -> str:
    """Return in one line how a rank failed."""
    raised = outcome.raised
    if raised is None and outcome.native is not None:
        return outcome.native.text[:_SUMMARY_WIDTH]
    if raised is None and outcome.status == "exited":
        error = find_printed_error(outcome.error_text()) if outcome.phase == "starting" else None
        text = f"exited with code {outcome.exit_code}" + (f": {error}" if error else "")
        return clip(text, _SUMMARY_WIDTH)
    if raised is None:
        return outcome.status if outcome.signal_name is None else f"killed by {outcome.signal_name}"
    text = without_source(f"{raised.type_name}: {raised.message}".splitlines()[0])
    return text if len(text) <= _SUMMARY_WIDTH else text[: _SUMMARY_WIDTH - 1] + "…"


def positions(ended: EndedAttempt, outcomes: Iterable[RankOutcome] | None = None) -> list[str]:
    """Return a line for each rank: where it was in the code and in the sequence of collectives."""
    passed = find_passed(ended.outcomes.values(), ended.current)
    lines = []
    for outcome in list(ended.outcomes.values() if outcomes is None else outcomes)[:_SHOWN_RANKS]:
        parts = [f"rank {outcome.rank}"]
        if outcome.state == psutil.STATUS_STOPPED:
            parts.append("is stopped (SIGSTOP)")
        elif outcome.state == psutil.STATUS_DISK_SLEEP:
            parts.append("was waiting in the kernel for a disk or a device")
        elif outcome.status == "returned":
            parts.append(
                f"called sys.exit(0) at {outcome.exited_at}"
                if outcome.exited_at
                else "has returned"
            )
        raised = outcome.raised
        if raised is not None and (not raised.is_peer_error or raised.wraps_peer_error):
            verb = "raised" if raised.final and not raised.hidden_by else "was handling"
            parts.append(f"{verb} {first_line(outcome)}")
        if outcome.position is not None and outcome.position.handling:
            parts.append(f"was handling {outcome.position.handling};")
        if text := where(outcome):
            parts.append(f"at {text}")
        last = ended.current(outcome)
        if outcome.sends_or_receives:
            parts.append(f"{_relation(outcome, done=False)} {outcome.sends_or_receives}")
            parts += [f"after {last}"] if last is not None else []
        elif last is not None:
            is_complete = last.done and (last.group, last.number) in passed
            relation = "after" if is_complete else _relation(outcome, done=last.done)
            parts.append(f"{relation} {last}")
        if outcome.before is not None:
            parts.append(f"where it had been seen for {outcome.before.waited_s:.0f} s")
            parts.append(f"and {outcome.before.then}")
        lines.append(", ".join(parts))
    return lines


def _relation(outcome: RankOutcome, *, done: bool) -> str:
    """Return whether a rank was in its last collective, after it, or failed in it."""
    if outcome.status == "returned" or outcome.before is not None:
        return "after"
    if outcome.raised is not None and outcome.raised.hidden_by:
        return "in"
    if is_peer_origin(outcome.origin):  # before `done`: torch marks a failed collective as done too
        return "timed out in" if outcome.origin == "timeout" else "lost a peer in"
    return "after" if done else "in"


def last_output(outcome: RankOutcome) -> list[str]:
    """Return the last lines that a rank wrote to stderr, if nothing else shows why it ended.

    Of the stacks that faulthandler writes at a crash, only the user's lines are kept.
    """
    if outcome.stderr is None or outcome.raised is not None:
        return []
    output, _, stacks = outcome.error_text().partition(CRASH)
    lines = output.splitlines()[-_STDERR_LINES:]
    frames = [
        (frame["file"], line) for line in stacks.splitlines() if (frame := PRINTED_CALL.match(line))
    ]
    own = find_own_files(file for file, _ in reversed(frames))
    lines += [line for file, line in frames if file in own]
    if not lines:
        return []
    return ["last lines of its stderr:", *(f"| {line.rstrip()[:_STDERR_WIDTH]}" for line in lines)]


def _without_end(outcome: RankOutcome) -> str:
    """Return what a rank wrote to stderr, without the traceback that torch's `sys.excepthook` wrote at its end."""
    mark = f"[rank{outcome.rank}]: "
    is_ended = outcome.raised is not None and outcome.raised.final
    lines = outcome.error_text().splitlines()
    return "\n".join(line for line in lines if not (is_ended and line.startswith(mark)))


def handled_errors(root: RankOutcome, ended: EndedAttempt, *, or_others: bool = True) -> list[str]:
    """Return the last lines of the root, or else another rank, that has written of an error that it handled.

    An error that an ``except`` swallows leaves nothing else behind, and then the ranks are out of step.
    """
    lines_of = {
        rank: [
            *find_handled_errors(_without_end(outcome)),
            *find_handled_errors(read_log(outcome.stdout) if outcome.stdout else ""),
        ]
        for rank, outcome in ended.outcomes.items()
    }
    alike = [{_NUMBER.sub("", line) for line in lines} for lines in lines_of.values()]
    # What every rank has written does not explain why they differ.
    by_all = set.intersection(*alike) if len(alike) > 1 else set()
    others = [out for out in ended.outcomes.values() if out is not root] if or_others else []
    for outcome in (root, *others):
        raised = outcome.raised
        if raised is not None and outcome is not root:
            continue  # it has written about the error that ended it
        lines = [
            line
            for line in lines_of[outcome.rank]
            if _NUMBER.sub("", line) not in by_all
            and not (raised is not None and _is_about(line, raised))
        ]
        if lines:
            ends = [f"| {line[:_STDERR_WIDTH]}" for line in lines[-_HANDLED_LINES:]]
            return [f"rank {outcome.rank} has written about an error, and continued:", *ends]
    return []


def _is_about(line: str, raised: Raised) -> bool:
    """Return whether a line of output is a part of the traceback of an exception, or quotes it."""
    shown = {each.strip() for each in (raised.message + "\n" + raised.traceback).splitlines()}
    name = raised.type_name.rpartition(".")[2]
    text = raised.message.partition("\n")[0].strip()
    # Many lines end in a number or a word, such as the text of `KeyError(1)`.
    ending = text if " " in text else f": {text}"
    return line in shown or line.startswith(name) or (bool(text) and line.endswith(ending))


def last_traceback(outcome: RankOutcome) -> list[str]:
    """Return the end of a traceback that a hanging rank has printed, for example from a thread."""
    if outcome.stderr is None or outcome.raised is not None:
        return []
    error = find_printed_error(outcome.error_text())
    if error is None:
        return []
    lines = [line for line in error.traceback.splitlines() if line.strip()][-_TRACEBACK_LINES:]
    return ["it has printed a traceback:", *(f"| {line[:_STDERR_WIDTH]}" for line in lines)]


# ---- the rank's own exception ----


class RemoteTraceback(Exception):  # noqa: N818 - shown as text above the error it belongs to
    """The traceback of another process, as text."""

    __module__ = "ddpsafe"

    def __str__(self) -> str:
        return name_cells(f"\n{self.args[0]}")


def original_of(raised: Raised) -> BaseException:
    """Return the rank's exception with its traceback as cause; only the traceback if it cannot be loaded."""
    remote = RemoteTraceback(raised.traceback)
    if raised.payload is None:
        return remote
    # Python shows the exception right below its traceback.
    frames = without_message(raised)
    try:
        exc = payload.loads(raised.payload)
    except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything, SystemExit too
        return remote
    if not isinstance(exc, BaseException):
        return remote
    if isinstance(exc, SyntaxError):  # the line that cannot be compiled is shown with the exception
        frames = frames.rpartition('  File "')[0]
    exc.__cause__ = RemoteTraceback(frames) if frames else None
    return exc


def without_message(raised: Raised) -> str:
    """Return the traceback of an exception without the text of the exception at its end."""
    lines = raised.traceback.rstrip().splitlines()
    last = max((i for i, line in enumerate(lines) if line.startswith('  File "')), default=-1)
    end = next(
        (i for i in range(last + 1, len(lines)) if lines[i].startswith(raised.type_name)),
        len(lines),
    )
    return "\n".join(lines[:end]) if last >= 0 else raised.traceback
