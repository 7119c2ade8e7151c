"""All private names of the standard library that ddpsafe uses, each with its reason.

No other module may use one; for torch's, see `_worker.torch_hooks`. If a version of Python renames one,
ddpsafe loses the feature behind it and nothing else. A test uses each of them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing.process
import multiprocessing.queues
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import sys
import tempfile
import threading
import weakref
import zipfile
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager
    from multiprocessing.process import BaseProcess
    from types import FrameType


def is_importing_main() -> bool:
    """Return whether `multiprocessing` is importing the parent's main script in this process."""
    # It sets the attribute for its own check, which comes too late to say which call launched.
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def helpers_folder() -> Path | None:
    """Return the folder of the fork server's socket, if `multiprocessing` made one in this process."""
    # The public function would make one. A folder that this process inherited from its parent belongs
    # to the parent: only there a finalizer is registered that removes it.
    folder = _config().get("tempdir")
    for finalizer in [*getattr(multiprocessing.util, "_finalizer_registry", {}).values()]:
        is_own = getattr(finalizer, "_pid", None) == os.getpid()
        if is_own and folder is not None and folder in (getattr(finalizer, "_args", None) or ()):
            return Path(folder)
    return None


def use_sockets_folder(folder: str) -> None:
    """Have `multiprocessing` put its sockets here, for this process and those that it starts."""
    # It would make a folder `pymp-…` in each process, which stays if the process is killed.
    stock = multiprocessing.util.get_temp_dir

    def get_temp_dir() -> str:
        if _config().get("tempdir") == folder and not os.access(folder, os.W_OK | os.X_OK):
            del _config()["tempdir"]  # this process has become another user
        return stock()

    multiprocessing.util.get_temp_dir = get_temp_dir
    _config()["tempdir"] = folder


def name_semaphores(prefix: str) -> None:
    """Set how the names of semaphores begin, in this process and in those that it starts."""
    _config()["semprefix"] = prefix


def pass_to_children(key: str, mark: object) -> None:
    """Give a mark to the children that `multiprocessing` starts here, and to theirs in turn."""
    _config()[key] = mark


def withhold_from_child(process: BaseProcess, key: str) -> None:
    """Keep a child that has not started yet from getting a mark of `pass_to_children`."""
    getattr(process, "_config", {}).pop(key, None)


def before_own_code(then: Callable[[Mapping[str, Any]], None]) -> None:
    """Call `then` with its marks in each child of `multiprocessing`, before the child's own code.

    It has to be called in the child if that is a new interpreter, else in its parent.
    """
    base: Any = multiprocessing.process.BaseProcess
    stock = getattr(base, "_bootstrap", None)
    if stock is None or stock.__module__ == __name__:
        return

    def bootstrap(self: BaseProcess, *args: Any, **kwargs: Any) -> Any:
        then(getattr(self, "_config", {}))
        return stock(self, *args, **kwargs)

    base._bootstrap = bootstrap  # noqa: SLF001


def before_main(make: Callable[[], object]) -> None:
    """Have each child that starts as a new interpreter unpickle what `make` returns.

    That is the first thing that it does: `sys.path` is not its parent's yet, and the parent's main script is
    not imported.
    """
    stock = multiprocessing.spawn.get_preparation_data
    if stock.__module__ == __name__:
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**stock(name), "ddpsafe": make()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def around_start(
    around: Callable[[str | None, dict[str, Any]], AbstractContextManager[None]],
) -> None:
    """Start each child of `multiprocessing` inside of ``around(start method, marks of the child)``.

    A child that is not forked unpickles its marks.
    """
    base = multiprocessing.process.BaseProcess
    stock = base.start
    if stock.__module__ == __name__:
        return

    def start(self: BaseProcess) -> None:
        method = getattr(self, "_start_method", None) or multiprocessing.get_start_method()
        with around(method, getattr(self, "_config", {})):
            stock(self)

    base.start = start  # type: ignore[method-assign]


def _config() -> dict[str, Any]:
    config: dict[str, Any] = getattr(multiprocessing.current_process(), "_config", {})
    return config


def forget_child(process: BaseProcess) -> None:
    """Keep the interpreter from joining a child at exit: one that no signal can end."""
    getattr(multiprocessing.process, "_children", set()).discard(process)


def become_main_process() -> None:
    """Make this child of `multiprocessing` look as if it had been started by hand."""
    multiprocessing.current_process().name = "MainProcess"
    if hasattr(multiprocessing.process, "_parent_process"):
        multiprocessing.process._parent_process = None  # noqa: SLF001


def run_as_main(name: str, *, alter_argv: bool = True) -> None:
    """Run a module in the namespace of the module ``__main__``, as ``python -m`` does."""
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]  # noqa: SLF001


def end_as_interpreter(after_threads: Callable[[], object] = lambda: None) -> None:
    """Before `os._exit`, do what the interpreter does at its end for the script, in its order.

    Threads are joined, `atexit` functions run, then the finalizers of objects that still exist, and files that
    are still open are written and closed. Not the interpreter's own end: with DDP's native objects
    in memory that may not return.

    `after_threads` is called once the threads have been joined.
    """
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        after_threads()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # noqa: SLF001
    with contextlib.suppress(Exception):
        # Since 3.13 a child of a fork server has no exit functions of the server, but weakref believes that
        # its own is still registered: temporary directories would stay. A second call finds nothing.
        weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # noqa: SLF001
    with contextlib.suppress(Exception):
        gc.unfreeze()  # else what existed when the process was frozen is not found
        finalizers, files = _find_left_open(gc.get_objects())
        # Kept until `os._exit`: what a finalizer drops would otherwise be finalized a second time.
        _finalized.extend(finalizers)
        for finalize in finalizers:
            with contextlib.suppress(BaseException):
                finalize()
        _close_files(files)


_finalized: list[Callable[[], object]] = []


def _find_left_open(objects: list[Any]) -> tuple[list[Callable[[], object]], list[Any]]:
    """Return what module teardown would do: the calls of ``__del__``, and the files that it would close."""
    finalized, files = set(), set()
    # By class: a process with torch has 300,000 objects of 6,000 classes.
    for kind in set(map(type, objects)):
        with contextlib.suppress(Exception):  # a metaclass may refuse any question
            if _has_finalizer(kind):
                finalized.add(kind)
            if _is_file(kind):
                files.add(kind)
    found = [each for each in objects if type(each) in finalized or type(each) in files]
    return (
        [partial(type(each).__del__, each) for each in found if type(each) in finalized],
        [each for each in found if type(each) in files],
    )


def _has_finalizer(kind: type[Any]) -> bool:
    # Not of the standard library, torch and ddpsafe: what theirs free ends with the process.
    package = kind.__module__.partition(".")[0]
    is_own = package not in {"torch", "ddpsafe"} and package not in sys.stdlib_module_names
    return is_own and isinstance(getattr(kind, "__del__", None), FunctionType)


def standard_streams() -> tuple[object, ...]:
    """Return the process's stdin, stdout and stderr, those of its start and those that replace them."""
    return (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)


def _close_files(files: list[Any]) -> None:
    """Write what open files still hold, as their destructors would."""
    # `os._exit` is still to come, and with it what daemon threads and ddpsafe write.
    kept: set[int] = set()
    for stream in standard_streams():
        buffer = getattr(stream, "buffer", None)
        kept |= {id(stream), id(buffer), id(getattr(buffer, "raw", None))}
    files = [each for each in files if id(each) not in kept]
    # From the outside to the inside: text may be in front of a gzip file, which is in front of a buffer.
    for finish in (
        *(file.flush for file in files if type(file) is io.TextIOWrapper),
        *(file.close for file in files if type(file).__module__ != "_io"),
        *(file.flush for file in files if type(file).__module__ == "_io"),
    ):
        with contextlib.suppress(Exception):  # closed, or its disk is full
            finish()


def _is_file(kind: type[Any]) -> bool:
    """Return whether a class is one of files; not asked of the object, which may be a proxy."""
    if issubclass(kind, (io.IOBase.__mro__[1], zipfile.ZipFile, _TEMPORARY)):
        return True
    # Those of libraries, such as of HDF5, need not be known to `io`.
    return all(callable(getattr(kind, name, None)) for name in ("flush", "close"))


_TEMPORARY: Any = getattr(tempfile, "_TemporaryFileWrapper", zipfile.ZipFile)
"""The class of named temporary files, which does not derive from a file's."""


def will_call_back(frame: FrameType | None) -> bool:
    """Return whether a thread that waits in the standard library may still call a function of the script.

    `frame` is the thread's innermost.
    """
    if frame is not None and frame.f_code is threading.Thread.run.__code__:
        return True  # its target is native, so nothing shows what that does, as the loop of uvloop
    while frame is not None:
        file = frame.f_code.co_filename
        has_work = next((found for name, found in _HAVE_WORK.items() if file.endswith(name)), None)
        if has_work is not None:
            try:
                return has_work(frame.f_locals)
            except (AttributeError, KeyError, RuntimeError):  # RuntimeError: it changes right now
                return True
        frame = frame.f_back
    return False


def _has_tasks(names: Mapping[str, Any]) -> bool:
    import asyncio  # this frame is in it, so it is loaded

    loop = names["self"]
    return bool(asyncio.all_tasks(loop) or loop._scheduled or loop._ready)  # noqa: SLF001


_HAVE_WORK: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "/asyncio/base_events.py": _has_tasks,
    "/concurrent/futures/process.py": lambda names: bool(names["self"].pending_work_items),
    "/multiprocessing/pool.py": lambda names: bool(names.get("cache")),
    "/sched.py": lambda _: True,
}
"""What calls functions of the script in threads of its own, and whether it has any to call, by local names."""


def read_exit(frame: FrameType | None) -> Literal["queue", "children", "other"]:
    """Return what the main thread waits for while `multiprocessing` ends, given its innermost frame.

    That is the thread that sends the items of a queue, or a child process.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_finalize_join" and code.co_filename == multiprocessing.queues.__file__:
            return "queue"
        if code.co_name == "join" and code.co_filename == multiprocessing.process.__file__:
            return "children"
        frame = frame.f_back
    return "other"


def has_started(executor: Executor) -> bool:
    """Return whether an executor has started threads or processes, which a fork would lose or share."""
    threads: set[threading.Thread] = getattr(executor, "_threads", set())
    return any(thread.is_alive() for thread in threads) or bool(getattr(executor, "_processes", 0))


def is_fed(pool: object) -> bool:
    """Return whether a `multiprocessing.Pool` is open: its worker handler thread is alive."""
    feeder = getattr(pool, "_worker_handler", None)
    return feeder is not None and bool(feeder.is_alive())


def serves_forks(part: object) -> bool:
    """Return whether a lock of `multiprocessing` was made for forked processes: it has no name."""
    return getattr(getattr(part, "_semlock", None), "name", "") is None


def parser_of_beginnings() -> type[argparse.ArgumentParser]:
    """Return a parser that takes the beginning of an option for it if no other one begins so."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def _get_option_tuples(self, option_string: str) -> list[Any]:
            matches: list[Any] = super()._get_option_tuples(option_string)
            options = {match[0].dest for match in matches}
            # argparse would refuse a beginning of two options, also among the arguments of a
            # script.
            return matches[:1] if len(options) == 1 else []

    return Parser


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return all option strings of a parser."""
    actions: list[argparse.Action] = getattr(parser, "_actions", [])
    return [option for action in actions for option in action.option_strings]
