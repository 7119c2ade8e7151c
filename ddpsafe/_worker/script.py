"""The function that a rank of ``ddpsafe run`` calls: it runs the user's script, module or program."""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pkgutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from ddpsafe._errors import PreemptedError
from ddpsafe._host import end_by_signal
from ddpsafe._stdlib_private import become_main_process, run_as_main
from ddpsafe._wire.exception_facts import exit_code_of, where_of
from ddpsafe._wire.messages import ScriptExit

Kind = Literal["script", "module", "program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What each rank of ``ddpsafe run`` runs.

    Attributes:
        target: The absolute path of the script, or the name of the module or program.
        name: The target as the user wrote it.
        launcher_path: The first entry of the launcher's ``sys.path``, which is about the launcher's own
            program; ``None`` if Python added none.
        has_stdin: Whether the launcher has a standard input.
    """

    target: str
    name: str
    arguments: tuple[str, ...]
    kind: Kind
    launcher_path: str | None
    has_stdin: bool


def run_script(local_rank: int, script: Script) -> ScriptExit | None:
    """Run the script in this rank, as ``python script.py`` would.

    Returns where the script called ``sys.exit(0)``, if it did: the other ranks may still wait for a rank that
    exits so.
    """
    target, kind = script.target, script.kind
    if script.has_stdin and local_rank == 0:
        # `multiprocessing` has opened /dev/null instead; the descriptor itself is still the launcher's.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open for as long as the script runs
    if kind == "program":
        # This process ends as the program does: by the same signal or exit code.
        code = subprocess.run([target, *script.arguments], check=False).returncode  # noqa: S603 - the user's own
        if code < 0:
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            end_by_signal(-code)
        if code:
            raise SystemExit(code)
        return None
    become_main_process()  # logs name the process, and libraries ask whether it is the first one
    sys.argv = [script.name, *script.arguments]
    if sys.path[:1] == [script.launcher_path]:
        del sys.path[0]
    if kind == "module":
        first = str(Path.cwd())
    elif pkgutil.get_importer(target) is not None:  # a zip file with a __main__.py
        first = target
    else:
        first = str(Path(target).resolve().parent)
    if kind == "module" or not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, first)
    try:
        # Its module stays `__main__` until the interpreter ends: threads and exit functions still pickle
        # its classes then. `runpy.run_path` and `run_module` would put the previous one back. Instances that
        # spawned children send back name their classes `__mp_main__.X`.
        main = ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        if kind == "module":
            run_as_main(target)
        elif first == target:
            run_as_main("__main__", alter_argv=False)
        else:
            with io.open_code(target) as file:
                source = file.read()
            main.__file__ = target
            vars(main)["__cached__"] = None
            compiled = compile(source, target, "exec", dont_inherit=True)
            exec(compiled, vars(main))  # noqa: S102 - the user's own script
    except SystemExit as end:
        if exit_code_of(end):
            raise
        return ScriptExit(where=where_of(end.__traceback__))
    except PreemptedError:
        # `launch` in the script has stopped at this launcher's request. This launcher itself reports
        # that all ranks have stopped.
        return None
    return None
