"""What the forkserver loads once, so that every rank it forks has it already.

None of these imports starts a thread, which a forked process would lose.
"""

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

# The server itself ignores Ctrl-C, but only once it has loaded everything; `restore_interrupt`
# gives it back to the ranks.
signal.signal(signal.SIGINT, signal.SIG_IGN)
