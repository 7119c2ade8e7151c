"""The private names of the standard library that ddpsafe touches, all of them, each with its reason.

Nothing else in the package may use one, as with torch's in `_worker.torch_hooks`. Where a Python
renames one, the convenience behind it is lost and nothing else; a test uses each of them.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import multiprocessing.util
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from concurrent.futures import Executor
    from multiprocessing.process import BaseProcess


def is_importing_main() -> bool:
    """Tell whether `multiprocessing` is importing the main script of the parent here.

    It sets the mark for its own check, which comes too late to tell who launched.
    """
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def helpers_folder() -> Path | None:
    """Return the folder of the forkserver's socket, if `multiprocessing` has made one in this process.

    The public function makes one. What it has made in a process that this one was forked from, or
    started by, is that one's: only there is it registered to be removed.
    """
    folder = _config().get("tempdir")
    for each in [*getattr(multiprocessing.util, "_finalizer_registry", {}).values()]:
        is_own = getattr(each, "_pid", None) == os.getpid()
        if is_own and folder is not None and folder in (getattr(each, "_args", None) or ()):
            return Path(folder)
    return None


def name_semaphores(prefix: str) -> None:
    """Let the names of semaphores that are made here, and in processes started here, begin so."""
    _config()["semprefix"] = prefix


def _config() -> dict[str, Any]:
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    return config


def forget_child(process: BaseProcess) -> None:
    """Keep the interpreter from joining a process at its exit: no signal ends that one."""
    getattr(multiprocessing.process, "_children", set()).discard(process)


def end_as_interpreter() -> None:
    """Join the threads and run what `atexit` has, in the interpreter's order, before `os._exit`."""
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001


def has_started(executor: Executor) -> bool:
    """Tell whether an executor has threads or processes, which a fork loses or shares."""
    threads: set[threading.Thread] = getattr(executor, "_threads", set())
    return any(thread.is_alive() for thread in threads) or bool(getattr(executor, "_processes", 0))


def is_fed(pool: object) -> bool:
    """Tell whether a `multiprocessing.Pool` has not been ended: the thread that feeds it lives."""
    feeder = getattr(pool, "_worker_handler", None)
    return feeder is not None and bool(feeder.is_alive())


def serves_forks(part: object) -> bool:
    """Tell whether a lock of `multiprocessing` was made for forked processes: it has no name then."""
    return getattr(getattr(part, "_semlock", None), "name", "") is None


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options that a parser knows, in all their spellings."""
    actions: list[argparse.Action] = getattr(parser, "_actions", [])
    return [each for action in actions for each in action.option_strings]
