"""The environment of a rank: directory, variables, output, threads, device, seeds."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import io
import os
import sys
from typing import IO, TYPE_CHECKING, Any, Final, TextIO, cast

from ddpsafe import _stdlib_private
from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._wire.log_overflow import LogStream
from ddpsafe._wire.rank_pipe import Claim, StepCounter
from ddpsafe._wire.spec import SAFE_PATH, STACKS_SIGNAL, open_log
from ddpsafe._worker.rank import this_rank
from ddpsafe._worker.terminal import TerminalStream, find_terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from ddpsafe._wire.log_overflow import LogOverflow
    from ddpsafe._wire.spec import LogFiles, RankSpec
    from ddpsafe._worker.terminal import Terminal

# With it, torch's own rendezvous would make every store a client of an agent that does not exist
# (pytorch #191989).
_NEVER_INHERITED: Final = ("TORCHELASTIC_USE_AGENT_STORE",)

_replaced: Final[list[object]] = []


def capture_output(logs: LogFiles, overflow: LogOverflow) -> Terminal | None:
    """Redirect file descriptors 1 and 2 to files, which also captures what C++ prints.

    Once the files take no more, `overflow` takes over. Returns the terminal on which the console draws the
    rank's output, if it does.

    Raises:
        PreflightError: A file cannot be opened, or the directory is not the one that the launcher made.
    """
    terminal = find_terminal(logs)
    for fd, path in ((1, logs.stdout), (2, logs.stderr)):
        target = _open_to_append(path, logs)
        if target != fd:  # equal if the caller had closed the descriptor: open() reuses its number
            os.dup2(target, fd)
            os.close(target)
    overflow.guard()
    raw = {
        fd: LogStream(fd, overflow)
        if terminal is None or fd not in terminal.drawn
        else TerminalStream(fd, overflow, terminal)
        for fd in (1, 2)
    }
    stdout = _line_buffered(sys.stdout, raw[1])
    # A script may have made both one stream.
    stderr = _line_buffered(None if sys.stderr is sys.stdout else sys.stderr, raw[2])
    sys.stdout, sys.stderr = stdout, stderr
    return terminal


def _open_to_append(path: str, logs: LogFiles) -> int:
    try:
        return open_log(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, owner_uid=logs.owner_uid)
    except OSError as exc:
        what = f"the log {path} cannot be opened: {exc.strerror or exc}."
        cause = "the attempt's directory was removed, or another user replaced it."
        fix = "pass run_dir= with a directory that only you can write to."
        raise PreflightError(Explanation(what, cause=cause, fix=fix)) from exc


def _line_buffered(stream: TextIO | None, raw: LogStream) -> TextIO:
    """Return a stream with line buffering over `raw`: the given one, if it is as Python makes them."""
    made = io.TextIOWrapper.__new__(io.TextIOWrapper)
    encoding, errors, unbuffered = "utf-8", "replace", False
    # The same object: a script that `multiprocessing` has imported already may have kept it, in a handler of
    # `logging` for example, and `sys.__stdout__` is it. A class of the script's is made in another way.
    if type(stream) is io.TextIOWrapper:
        # Closed, as a daemon does, or what it holds cannot be written.
        with contextlib.suppress(OSError, ValueError):
            encoding, errors, unbuffered = stream.encoding, stream.errors, stream.write_through  # type: ignore[assignment]
            _replaced.append(stream.detach())
            made = stream
    # One that a script has made would close its descriptor, which is 1 or 2.
    _replaced.append(stream)
    # As Python does itself with -u: no buffer.
    buffer = cast("IO[bytes]", raw if unbuffered else io.BufferedWriter(raw))
    made.__init__(  # type: ignore[misc]  # made again, over another buffer
        buffer, encoding=encoding, errors=errors, line_buffering=True, write_through=unbuffered
    )
    return made


class Stacks:
    """The stacks of this rank's threads, written to a file when the launcher asks for them."""

    def __init__(self, logs: LogFiles) -> None:
        self._logs = logs
        self._file: TextIO | None = None
        self._claim: Claim | None = None

    def follow_signal(self) -> None:
        """Dump the main thread's stack on a signal, which works even while the GIL is held."""
        # Of the main thread only: the others keep running, and reading their frames has crashed ranks.
        fd = _open_to_append(self._logs.stacks, self._logs)
        self._file = open(fd, "a", encoding="utf-8")  # noqa: SIM115, PTH123 - open while the rank lives
        self._claim = Claim(self._file.fileno())
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=False)
        faulthandler.enable()
        _stdlib_private.pass_to_children("ddpsafe-stacks", _StacksOfParent(self._logs.stacks))

    def show_all(self) -> None:
        """Dump the stacks of all threads; the caller holds the GIL, so their frames do not change."""
        if self._file is not None and self._claim is not None and self._claim.holds():
            self._file.truncate(0)
            faulthandler.dump_traceback(self._file, all_threads=True)


class _StacksOfParent:
    """Has a new interpreter that this rank starts write its stack into the rank's file, too, when asked.

    A forked one inherits that. Since Python 3.14, workers of a DataLoader are new interpreters by default.
    """

    def __init__(self, path: str, file: TextIO | None = None) -> None:
        self._path, self._file = path, file

    def __reduce__(self) -> tuple[Any, ...]:
        return _follow_signal, (self._path,)


def _follow_signal(path: str) -> _StacksOfParent:
    file: TextIO | None = None
    with contextlib.suppress(OSError):
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115, PTH123 - open while the process lives
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False)
    return _StacksOfParent(path, file)


def apply_environment(spec: RankSpec) -> None:
    """Set the caller's directory and variables, then the variables of this rank."""
    os.chdir(spec.cwd)
    if spec.inherited_env is not None:
        os.environ.clear()
        os.environ.update(spec.inherited_env)
    for name in _NEVER_INHERITED:
        os.environ.pop(name, None)
    name, text = SAFE_PATH
    if os.environ.get(name) == text:
        del os.environ[name]
    os.environ.update(spec.env)


def borrow(variables: Mapping[str, str]) -> None:
    """Set variables until `give_back`, for as long as the process group exists."""
    for name, text in variables.items():
        this_rank.borrowed.setdefault(name, os.environ.get(name))
        os.environ[name] = text


def give_back() -> None:
    """Restore the variables that `borrow` set."""
    for name, text in this_rank.borrowed.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
    this_rank.borrowed.clear()


def use_threads(num_threads: int | None) -> None:
    """Limit intra-op threads, so that N ranks do not each start a thread for every core."""
    # torch reads OMP_NUM_THREADS when it is imported. The script or the fork server may have done
    # that before the rank's variables were set.
    from_env = os.environ.get("OMP_NUM_THREADS", "").strip()
    chosen = from_env if num_threads is None else str(num_threads)
    if not chosen.isdecimal() or int(chosen) < 1:
        return
    import torch

    torch.set_num_threads(int(chosen))


def count_steps(
    fd: int, *, after_step: Callable[[], None], report_folder: Callable[[str], None]
) -> None:
    """Count optimizer steps where the launcher can read them: they show that the rank makes progress.

    `report_folder` reports to the launcher where checkpoints are.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    this_rank.counter = counter = StepCounter(fd)
    this_rank.report_folder = report_folder
    rank_pid = os.getpid()

    def count(*_: object) -> None:
        if os.getpid() == rank_pid:  # steps of a fork do not show that the rank makes progress
            counter.count()
            after_step()

    register_optimizer_step_post_hook(count)


def note_checkpoint(step: int, *, is_new: bool, in_memory: bool = False) -> None:
    """Note a checkpoint for the launcher, which stops retrying if attempts get no further."""
    if this_rank.counter is not None:
        this_rank.counter.note_checkpoint(step, is_new=is_new, in_memory=in_memory)


def note_checkpoint_folder(path: str) -> None:
    """Report where checkpoints are: a node that joins later must see the same folder."""
    if this_rank.report_folder is not None:
        this_rank.report_folder(path)


def note_saving() -> None:
    """Note for the launcher that the rank is saving, which may take longer than its steps."""
    if this_rank.counter is not None:
        this_rank.counter.note_saving()


def use_device(name: str, *, is_current: bool = True) -> torch.device:
    """Return the rank's device and, with `is_current`, make it current, which initialises CUDA."""
    import torch

    device = torch.device(name)
    if device.type == "cuda" and is_current:
        torch.cuda.set_device(device)
    return device


RUN_SEED = "_DDPSAFE_SEED"
"""The variable with the seed of the run, for `ddpsafe.data` and its DataLoader workers."""


def seed_run(seed: int) -> None:
    """Seed this rank with the launch's seed, and pass the seed on to `ddpsafe.data`."""
    os.environ[RUN_SEED] = str(seed)
    seed_all(seed)
    this_rank.shared_seed = seed


def seed_apart() -> None:
    """Give torch a seed of the rank's own, as the models are made; before DDP wraps the first one.

    Otherwise dropout draws the same masks on every rank. Rank 0 keeps the launch's seed, so
    that a world of one rank draws what it draws without DDP. A generator that the script has seeded,
    or a checkpoint restored, stays.
    """
    import torch

    seed, this_rank.shared_seed = this_rank.shared_seed, None
    rank = this_rank.world.rank
    if seed is not None and rank > 0 and torch.initial_seed() == seed:
        digest = hashlib.blake2b(f"ddpsafe/{seed}/{rank}".encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "big") >> 1)  # of every GPU as well


def seed_all(seed: int) -> None:
    """Seed the generators of this rank.

    torch gets the same seed on every rank, so that models and splits agree. ``random`` and numpy get
    a seed for each rank, so that data augmentation differs. Seeds that you set in the process that
    calls `launch` do not reach the ranks.

    Args:
        seed: Base seed, 0 <= seed < 2**63.
    """
    import random

    import torch

    rank = this_rank.world.rank
    torch.manual_seed(seed)
    random.seed(f"ddpsafe/{seed}/{rank}")
    if "numpy" in sys.modules:
        import numpy as np

        state = np.random.SeedSequence([seed, rank]).generate_state(4)
        np.random.seed(state)  # noqa: NPY002 - scripts use the global generator
