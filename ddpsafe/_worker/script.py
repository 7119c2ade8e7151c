"""The function that a rank of ``ddpsafe run`` calls: it runs the user's script, module or program."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ddpsafe._errors import PreemptedError
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
            os.kill(os.getpid(), -code)
        if code:
            raise SystemExit(code)
        return None
    sys.argv = [target, *arguments]
    try:
        if kind == "module":
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).parent))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as end:
        if end.code not in {None, 0}:
            raise
        return ScriptExit(where=where_of(end.__traceback__))
    except PreemptedError:
        # `launch` in the script has stopped at this launcher's request. This launcher itself reports
        # that all ranks have stopped.
        return None
    return None
