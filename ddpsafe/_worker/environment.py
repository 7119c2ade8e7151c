"""What a rank finds around it: directory, variables, output, threads, device, seeds."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import signal
import sys
from typing import TYPE_CHECKING, Final, TextIO

from ddpsafe import _stdlib_private
from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._wire.rank_pipe import Claim, StepCounter
from ddpsafe._wire.spec import SAFE_PATH, STACKS_SIGNAL, open_log, semaphore_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from ddpsafe._wire.spec import LogFiles, RankSpec

# torch's own rendezvous would turn every private store into a client of an agent that is not
# there (pytorch #191989), so it must never be inherited.
_NEVER_INHERITED: Final = ("TORCHELASTIC_USE_AGENT_STORE",)


def capture_output(logs: LogFiles) -> None:
    """Send file descriptors 1 and 2 to files: what C++ prints is caught too.

    Raises:
        PreflightError: A file cannot be opened, or is not where the launcher made its directory.
    """
    for fd, path in ((1, logs.stdout), (2, logs.stderr)):
        target = _open_to_append(path, logs)
        if target != fd:  # the caller may have closed the descriptor: then it is taken already
            os.dup2(target, fd)
            os.close(target)
    sys.stdout = _line_buffered(sys.stdout, 1)
    sys.stderr = _line_buffered(sys.stderr, 2)


def _open_to_append(path: str, logs: LogFiles) -> int:
    try:
        return open_log(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, owner_uid=logs.owner_uid)
    except OSError as exc:
        what = f"the log {path} cannot be opened: {exc.strerror or exc}."
        cause = "the attempt's directory was removed, or another user put something in its place."
        fix = "pass run_dir= with a directory that only you can write to."
        raise PreflightError(Explanation(what, cause=cause, fix=fix)) from exc


def _line_buffered(stream: TextIO | None, fd: int) -> TextIO:
    """Return the stream, or a new one where Python found the descriptor closed at its start."""
    if not isinstance(stream, io.TextIOWrapper):
        return open(fd, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
    stream.reconfigure(line_buffering=True)
    return stream


class Stacks:
    """Where every thread is, for a launcher that asks."""

    def __init__(self, logs: LogFiles) -> None:
        """Write nothing yet."""
        self._logs = logs
        self._file: TextIO | None = None
        self._claim: Claim | None = None

    def follow_signal(self) -> None:
        """Show the main thread's stack on a signal: that works while the GIL is held, too.

        The other threads run meanwhile, and to read their frames then has crashed ranks.
        """
        fd = _open_to_append(self._logs.stacks, self._logs)
        self._file = open(fd, "a", encoding="utf-8")  # noqa: SIM115, PTH123 - open while the rank lives
        self._claim = Claim(self._file.fileno())
        faulthandler.register(STACKS_SIGNAL, file=self._file, all_threads=False)
        faulthandler.enable()

    def show_all(self) -> None:
        """Show the stacks of all threads; the caller holds the GIL, so none of them moves."""
        if self._file is not None and self._claim is not None and self._claim.holds():
            self._file.truncate(0)
            faulthandler.dump_traceback(self._file, all_threads=True)


def apply_environment(spec: RankSpec) -> None:
    """Set directory and variables as the caller has them, then those of this rank."""
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
    """Set variables for as long as the process group lives; see `give_back`."""
    for name, text in variables.items():
        _borrowed.setdefault(name, os.environ.get(name))
        os.environ[name] = text


def give_back() -> None:
    """Set what was borrowed to what it was before."""
    for name, text in _borrowed.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
    _borrowed.clear()


_borrowed: dict[str, str | None] = {}


def name_semaphores(launch_id: str) -> None:
    """Let the launcher recognise the semaphores of this rank and of the processes it starts."""
    _stdlib_private.name_semaphores(semaphore_prefix(launch_id))


def use_start_method(name: str | None) -> None:
    """Set how `multiprocessing` starts processes here, which it has just made "spawn" or "forkserver".

    Args:
        name: See `RankSpec.child_start_method`.
    """
    multiprocessing.set_start_method(name, force=True)


def restore_interrupt() -> None:
    """Let SIGINT raise KeyboardInterrupt, as Python starts with; the forkserver ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def use_threads(num_threads: int | None) -> None:
    """Limit intra-op threads, so that N ranks do not start N times all cores.

    torch reads OMP_NUM_THREADS when it is loaded, which the script or the forkserver may have done
    before the rank's variables were set.
    """
    told = os.environ.get("OMP_NUM_THREADS", "").strip()
    chosen = told if num_threads is None else str(num_threads)
    if not chosen.isdecimal() or int(chosen) < 1:
        return
    import torch

    torch.set_num_threads(int(chosen))


def count_steps(
    fd: int, *, after_step: Callable[[], None], tell_folder: Callable[[str], None]
) -> None:
    """Count optimizer steps where the launcher can read them: its sign that the rank gets on.

    Args:
        fd: The rank's shared memory; see `Inheritance`.
        after_step: Called after each of them too.
        tell_folder: Tells the launcher where checkpoints are.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    global _counter, _tell_folder  # noqa: PLW0603 - one process is one rank
    _counter = counter = StepCounter(fd)
    _tell_folder = tell_folder
    rank_pid = os.getpid()

    def count(*_: object) -> None:
        if os.getpid() == rank_pid:  # steps of a fork do not show that the rank makes progress
            counter.count()
            after_step()

    register_optimizer_step_post_hook(count)


_counter: StepCounter | None = None
_tell_folder: Callable[[str], None] | None = None


def note_checkpoint(step: int, *, is_new: bool) -> None:
    """Let the launcher know how far the rank has come: a retry that comes no further is stopped."""
    if _counter is not None:
        _counter.note_checkpoint(step, is_new=is_new)


def note_checkpoint_folder(path: str) -> None:
    """Let the launcher know where checkpoints are: a node that comes later has to see that folder."""
    if _tell_folder is not None:
        _tell_folder(path)


def note_saving() -> None:
    """Let the launcher know that the rank saves: that may take longer than its steps do."""
    if _counter is not None:
        _counter.note_saving()


def use_device(name: str, *, is_current: bool = True) -> torch.device:
    """Make the rank's device the current one, which initialises CUDA; or only name it."""
    import torch

    device = torch.device(name)
    if device.type == "cuda" and is_current:
        torch.cuda.set_device(device)
    return device


RUN_SEED = "_DDPSAFE_SEED"
"""The variable that tells `ddpsafe.data`, DataLoader workers included, the seed of the run."""


def seed_run(seed: int) -> None:
    """Seed this rank with the seed of the launch, which orders and workers of the data follow."""
    os.environ[RUN_SEED] = str(seed)
    seed_all(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of this rank.

    torch is seeded the same on every rank, so that models and splits agree; ``random`` and numpy
    are seeded by rank, so that data augmentation differs. Seeds set in the process that called
    `launch` do not reach the ranks.

    Args:
        seed: Base seed, 0 <= seed < 2**63.
    """
    import random

    import torch

    from ddpsafe._worker.session import current_world

    rank = current_world().rank
    torch.manual_seed(seed)
    random.seed(f"ddpsafe/{seed}/{rank}")
    if "numpy" in sys.modules:
        import numpy as np

        state = np.random.SeedSequence([seed, rank]).generate_state(4)
        np.random.seed(state)  # noqa: NPY002 - the global generator is what scripts use
