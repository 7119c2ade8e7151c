"""The function that a rank of ``ddpsafe run`` calls: it runs the user's script, module or program."""

from __future__ import annotations

import builtins
import contextlib
import io
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from ddpsafe._errors import PreemptedError
from ddpsafe._host import end_by_signal
from ddpsafe._stdlib_private import run_as_main
from ddpsafe._wire.exception_facts import where_of
from ddpsafe._wire.messages import ScriptExit

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal["script", "module", "program"]


def run_script(
    local_rank: int, target: str, arguments: Sequence[str], kind: Kind
) -> ScriptExit | None:
    """Run the script in this rank, as ``python script.py`` would.

    Returns:
        Where the script called ``sys.exit(0)``, if it did: the other ranks may still wait for a rank
        that exits so.
    """
    del local_rank  # the script reads RANK and LOCAL_RANK
    if kind == "program":
        # This process ends as the program does: by the same signal or exit code.
        code = subprocess.run([target, *arguments], check=False).returncode  # noqa: S603 - the user's own
        if code < 0:
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            end_by_signal(-code)
        if code:
            raise SystemExit(code)
        return None
    sys.argv = [target, *arguments]
    try:
        # Its module stays `__main__` until the interpreter ends: threads and exit functions still pickle
        # its classes then. `runpy.run_path` and `run_module` would put the previous one back.
        main = ModuleType("__main__")
        vars(main)["__builtins__"] = builtins
        sys.modules["__main__"] = main
        if kind == "module":
            sys.path.insert(0, str(Path.cwd()))
            run_as_main(target)
        elif pkgutil.get_importer(target) is not None:  # a zip file or a folder with a __main__.py
            sys.path.insert(0, target)
            run_as_main("__main__", alter_argv=False)
        else:
            sys.path.insert(0, str(Path(target).parent))
            with io.open_code(target) as file:
                source = file.read()
            main.__file__ = target
            vars(main)["__cached__"] = None
            compiled = compile(source, target, "exec", dont_inherit=True)
            exec(compiled, vars(main))  # noqa: S102 - the user's own script
    except SystemExit as end:
        if end.code not in {None, 0}:
            raise
        return ScriptExit(where=where_of(end.__traceback__))
    except PreemptedError:
        # `launch` in the script has stopped at this launcher's request. This launcher itself reports
        # that all ranks have stopped.
        return None
    return None
