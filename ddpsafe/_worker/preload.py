"""What the forkserver loads once, so that every rank it forks has it already.

None of these imports starts a thread, which a forked process would lose.
"""

import atexit
import os
import signal

from ddpsafe._wire import payload
from ddpsafe._worker import (
    context,
    control,
    current,
    entrypoint,
    process_group,
    session,
    torch_hooks,
)

__all__ = [
    "context",
    "control",
    "current",
    "entrypoint",
    "payload",
    "process_group",
    "session",
    "torch_hooks",
]

_SERVER = os.getpid()


@atexit.register
def _end_at_once() -> None:
    """Spare the server the clearing away of torch, seconds on a busy machine: its launcher is gone.

    Registered first, so it comes last; the ranks that are forked off inherit it, and pass.
    """
    if os.getpid() == _SERVER:
        os._exit(0)


# The server itself ignores Ctrl-C, but only once it has loaded everything; `restore_interrupt`
# gives it back to the ranks.
signal.signal(signal.SIGINT, signal.SIG_IGN)
