"""What the forkserver loads once, so that every rank it forks has it already.

None of these imports starts a thread, which a forked process would lose.
"""

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

# The server itself ignores Ctrl-C, but only once it has loaded everything; `restore_interrupt`
# gives it back to the ranks.
signal.signal(signal.SIGINT, signal.SIG_IGN)

# A request to stop is often sent to a process group or to all of a job's processes. Ranks die with
# the server that forked them, so it must not die before they have saved.
_SERVER_PID = os.getpid()
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
for _signum in _REQUESTS:
    signal.signal(_signum, signal.SIG_IGN)


def _give_back() -> None:
    """Let what the server forks, ranks or processes of the user's own, obey again."""
    if os.getppid() == _SERVER_PID:
        for signum in _REQUESTS:
            signal.signal(signum, signal.SIG_DFL)


os.register_at_fork(after_in_child=_give_back)
