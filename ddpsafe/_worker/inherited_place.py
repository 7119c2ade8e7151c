"""Keeps new interpreters that a rank starts through `multiprocessing` from joining in the rank's place.

They inherit RANK, WORLD_SIZE and MASTER_ADDR, and import the rank's main script. If that joins a process group
when it is imported, a worker of a DataLoader would wait for ranks that have joined already, or two workers
would form a group.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from ddpsafe import _stdlib_private
from ddpsafe._worker import torch_hooks
from ddpsafe._world import JOINED, require_not_inherited

# It runs before `sys.path` is the parent's, so ddpsafe may not be found.
_IN_CHILD: Final = """
try:
    from ddpsafe._worker.inherited_place import refuse_to_join
except ImportError:
    pass
else:
    refuse_to_join(mark)
"""


class _Refusal:
    """Calls `refuse_to_join` in the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (_IN_CHILD, {"mark": os.environ.get(JOINED, "")})


def prepare_interpreters() -> None:
    """Refuse to join in the interpreters that this process starts from now on."""
    _stdlib_private.before_main(_Refusal)


def refuse_to_join(mark: str) -> None:
    """Have ``init_process_group`` raise in this process, if it would join in the place of its parent.

    `mark` is `JOINED` of the parent; empty if it is in no group. A fork server may have been started before
    the parent joined or left.
    """
    if mark:
        os.environ[JOINED] = mark
    else:
        os.environ.pop(JOINED, None)
    prepare_interpreters()
    if "torch" in sys.modules:
        _check_rendezvous()
    else:
        torch_hooks.after_import_of_torch(_check_rendezvous)


def _check_rendezvous() -> None:
    torch_hooks.before_rendezvous(_require_own_place)


def _require_own_place(scheme: str) -> None:
    # A process may make a group of its own at another address, but its script, which it imports, joins there
    # as the rank does.
    if scheme == "env" or _stdlib_private.is_importing_main():
        require_not_inherited(os.environ)
