"""Starts the processes of one attempt, all of them or none, and owns them until they are reaped."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from multiprocessing import resource_tracker
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from ddpsafe._advice import ADVICE
from ddpsafe._errors import Explanation, PreflightError
from ddpsafe._host import is_directory_foreign
from ddpsafe._launcher.processes.rank_process import RankProcess
from ddpsafe._launcher.processes.reaper import LIMITS
from ddpsafe._logging import get_logger
from ddpsafe._secrets import withheld_own_secrets
from ddpsafe._stdlib_private import withhold_from_child
from ddpsafe._torch_private import COMPILER
from ddpsafe._wire.rank_pipe import Inheritance, InheritedFd, StepCounter, open_memory
from ddpsafe._wire.spec import HELPER, SAFE_PATH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpsafe._launcher.processes.descendants import RankIdentity
    from ddpsafe._launcher.processes.reaper import Reaper
    from ddpsafe._wire.payload import Pickled
    from ddpsafe._wire.spec import CallStyle, RankSpec

    RunRank = Callable[[RankSpec, Inheritance], object]

logger = get_logger(__name__)

# Measured with 2 and 8 ranks: 22, and 9 for each rank, are just enough; of these 6 and 2 are `NodeMemory`.
_FILES_OF_LAUNCHER: Final = 26
_FILES_PER_RANK: Final = 9
# Larger arguments are kept in a temporary file, whose pages the kernel can reclaim.
_MOST_IN_MEMORY_BYTES: Final = 4 << 30


class CallFile:
    """The user's function and arguments, pickled before anything starts, in a file without a name.

    `multiprocessing` would send them on a pipe to one rank after the other, and each start would wait until
    that rank has imported the script. The pickle stays in memory until the first attempt.

    Attributes:
        handles: What else ranks have to inherit to unpickle them.
    """

    def __init__(self, pickled: Pickled) -> None:
        self._pickled: Pickled | None = pickled
        self._file: IO[bytes] | None = None
        self.handles = pickled.handles

    def fileno(self) -> int:
        """Return the file's descriptor; the first attempt writes the file, and later ones reuse it.

        Raises:
            OSError: The file cannot be written.
        """
        if self._file is None:
            large = self._pickled is not None and self._pickled.nbytes() > _MOST_IN_MEMORY_BYTES
            self._file = tempfile.TemporaryFile(prefix="ddpsafe-") if large else open_memory()  # noqa: SIM115 - closed by `close`
        if self._pickled is not None:
            self._file.writelines(self._pickled.chunks())
            self._file.flush()
            self._pickled = None
        return self._file.fileno()

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()


def require_room(nproc: int) -> None:
    """Check, before anything starts, that this process can open enough files and see processes.

    Raises:
        PreflightError: It cannot.
    """
    if sys.platform == "linux" and not Path("/proc/self/stat").exists():
        what = "/proc is not mounted, so no process that a rank starts could be found and ended."
        cause = "this is a container or a chroot without it."
        raise PreflightError(
            Explanation(what, cause=cause, fix="mount it:  mount -t proc proc /proc")
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = limit - _count_open_files(limit)
    needed = _FILES_OF_LAUNCHER + nproc * _FILES_PER_RANK
    if limit != resource.RLIM_INFINITY and free < needed:
        what = (
            f"{nproc} ranks need {needed} file descriptors in the process that starts them, but only "
            f"{max(free, 0)} of its {limit} are free."
        )
        cause, fix = ADVICE["DS-MEM-descriptors"]
        fix = fix.format(files=max(4096, 2 * (limit + needed)))
        raise PreflightError(Explanation(what, cause=cause, fix=fix))


def _count_open_files(limit: int) -> int:
    try:
        return len(os.listdir("/dev/fd")) - 1  # noqa: PTH208 - without the descriptor of the listing
    except FileNotFoundError:
        return 0
    except OSError:  # no descriptor is left to list the folder
        return limit


@contextlib.contextmanager
def started_processes(
    specs: Sequence[RankSpec],
    call: CallFile,
    *,
    start_method: str,
    expects_restarts: bool,
    daemon: bool,
    run_rank: RunRank,
    reaper: Reaper,
    end: Callable[[Sequence[RankProcess]], None],
) -> Iterator[list[RankProcess]]:
    """Start one process for each spec; leaving the context ends and reaps all that still run.

    Each process is started by itself, through the `multiprocessing` context that torch uses, too.
    `torch.multiprocessing.start_processes` gives every rank the same arguments, so each would hold the
    others' pipes, and when a later start fails it forgets the processes that it has started. `run_rank` is
    imported by name in each process. `reaper` ends the ranks if this process is killed, `end` ends and reaps
    them. With `expects_restarts` the user asked for more attempts after a failure in training.

    Raises:
        PreflightError: The system did not start a process.
    """
    # Later versions have PYTHONSAFEPATH, which `_no_foreign_modules` sets.
    if sys.version_info < (3, 11) and is_directory_foreign():
        logger.warning(
            "Other users may write to the current directory, from which Python %d.%d imports modules "
            "when it starts processes: launch from a directory of your own.",
            *sys.version_info[:2],
        )
    context = _context(start_method, expects_restarts=expects_restarts)
    processes: list[RankProcess] = []
    with contextlib.ExitStack() as closing, contextlib.ExitStack() as ending:
        ending.callback(end, processes)
        # Schedulers send SIGUSR1 to whole process groups, and it must not end Python's resource
        # tracker, which inherits this mask.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            with withheld_own_secrets(), _no_foreign_modules():
                resource_tracker.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with _translated(specs[0]):
            call_file = call.fileno()
        for spec in specs:
            # `multiprocessing` flushes these, too, but there an error would look like a failed start.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, ValueError):
                    stream.flush()
            with _translated(spec):
                process = _start(
                    context,
                    spec,
                    call_file,
                    call.handles,
                    daemon=daemon,
                    run_rank=run_rank,
                    track=reaper.track,
                )
            closing.callback(process.close)
            processes.append(process)
        for process in processes:
            process.announce_all_started()
        yield processes


@contextlib.contextmanager
def _translated(spec: RankSpec) -> Iterator[None]:
    """Translate an error of the system at the start of a rank into a PreflightError."""
    try:
        yield
    except (OSError, EOFError) as exc:
        text, world = str(exc) or type(exc).__name__, spec.world
        what = f"could not start rank {world.rank} (world_size {world.world_size}): {text}."
        if isinstance(exc, (EOFError, ConnectionError, ChildProcessError)):
            cause = "Python's fork server has ended: it was killed, or this process is a fork of its owner."
            fix = 'look at stderr above, or use start_method="spawn", which needs no server.'
        elif str(exc) == "AF_UNIX path too long":  # Python's own text, without an errno
            cause = f"the fork server's socket in {tempfile.gettempdir()} has too long a path."
            fix = 'set TMPDIR to a short path, such as /tmp, or use start_method="spawn".'
        else:
            cause = LIMITS.get(
                exc.errno or 0,
                "a limit of this machine: processes (ulimit -u), open files (ulimit -n), memory, disk.",
            )
            fix = "raise the limit, or start fewer ranks. The ranks that had started were ended."
        raise PreflightError(Explanation(what, cause=cause, fix=fix)) from exc


def _context(start_method: str, *, expects_restarts: bool) -> Any:
    """Return the context; a fork server imports torch once, for all ranks that it will fork."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        modules = ["ddpsafe._worker.preload", "torch"]
        # To import it in the server delays the first start, and pays once ranks are started again.
        context.set_forkserver_preload([*modules, *([COMPILER] * expects_restarts)])
    return context


def _start(
    context: Any,
    spec: RankSpec,
    call_file: int,
    handles: tuple[object, ...],
    *,
    daemon: bool,
    run_rank: RunRank,
    track: Callable[[RankIdentity], None],
) -> RankProcess:
    with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as theirs:
        report_read, report_write = os.pipe()
        on_failure.callback(os.close, report_read)
        theirs.callback(os.close, report_write)
        lifeline_read, lifeline_write = os.pipe()
        on_failure.callback(os.close, lifeline_write)
        theirs.callback(os.close, lifeline_read)
        shared = on_failure.enter_context(open_memory())
        shared.write(StepCounter.EMPTY)
        shared.flush()
        child = context.Process(
            target=run_rank,
            args=(
                spec,
                Inheritance(
                    report=InheritedFd(report_write),
                    lifeline=InheritedFd(lifeline_read),
                    call=InheritedFd(call_file),
                    shared=InheritedFd(shared.fileno()),
                    handles=handles,
                ),
            ),
            name=f"ddpsafe-rank-{spec.world.rank}",
            daemon=daemon,
        )
        # If a rank launches ranks: their launcher, not the signal, decides when they stop.
        withhold_from_child(child, HELPER)
        with (
            _main_to_import(spec.style),
            _search_path_of_text(),
            withheld_own_secrets(),
            _no_foreign_modules(),
        ):
            child.start()
        on_failure.callback(child.join)
        on_failure.callback(child.kill)
        process = RankProcess(
            spec,
            child,
            report_fd=report_read,
            lifeline_fd=lifeline_write,
            shared=shared,
            track=track,
        )
        on_failure.pop_all()
    return process


@contextlib.contextmanager
def _main_to_import(style: CallStyle) -> Iterator[None]:
    """Keep ranks from importing a main module that is not their script.

    That is ``<stdin>``, Python's file name for the script of ``python -``, and under ``ddpsafe run``
    the launcher's own program, which some installers write without a main guard.
    """
    main = sys.modules["__main__"]
    # `python -m pdb` has removed it, and multiprocessing reads it.
    vars(main).setdefault("__spec__", None)
    hidden: dict[str, Any] = {}
    if style == "run":
        hidden = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    elif "__file__" in vars(main) and not Path(str(main.__file__)).exists():
        hidden = {"__file__": main.__file__, "__spec__": main.__spec__}
    if hidden:
        vars(main).pop("__file__", None)
        main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


@contextlib.contextmanager
def _no_foreign_modules() -> Iterator[None]:
    """Keep new interpreters from importing what another user has put into the current directory.

    `multiprocessing` starts them as ``python -c "from multiprocessing…"``, which looks there first.
    Only then do they take over the ``sys.path`` of this process. The caller holds the lock of
    `withheld_own_secrets` on the environment.
    """
    name, text = SAFE_PATH
    if os.environ.get(name) or not is_directory_foreign():
        yield
        return
    os.environ[name] = text
    try:
        yield
    finally:
        os.environ.pop(name)


@contextlib.contextmanager
def _search_path_of_text() -> Iterator[None]:
    """Keep `Path` objects in ``sys.path`` from the fork server, which gets it as Python source.

    The interpreter ignores entries that are not strings, so nothing is lost.
    """
    path = sys.path
    entries: list[object] = [*path]
    sys.path = [entry for entry in entries if isinstance(entry, str)]
    try:
        yield
    finally:
        sys.path = path
