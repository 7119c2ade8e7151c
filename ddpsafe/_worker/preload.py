"""What the forkserver loads once, so that every rank it forks has it already.

None of these imports starts a thread, which a forked process would lose.
"""

import atexit
import gc
import os
import signal

from ddpsafe._wire import payload
from ddpsafe._worker import context, entrypoint, process_group, session, torch_hooks

__all__ = [
    "context",
    "entrypoint",
    "payload",
    "process_group",
    "session",
    "torch_hooks",
]

_SERVER = os.getpid()

gc.disable()  # torch, which is loaded next, stays; to look for garbage takes a fifth of its import


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

# A request to stop is often sent to a process group or to all of a job's processes. Ranks die with
# the server that forked them, so it must not die before they have saved.
# Blocked, too: one that is sent to a rank between its fork and `_give_back` then waits until there,
# while one that is ignored would be lost.
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
_BLOCKED = set(_REQUESTS) - signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
for _signum in _REQUESTS:
    signal.signal(_signum, signal.SIG_IGN)


def _give_back() -> None:
    """Let what the server forks, ranks or processes of the user's own, take signals again."""
    if os.getppid() == _SERVER:
        for signum in _REQUESTS:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
        # All that is loaded stays for good. Without this the first collection in a rank writes to
        # every page of torch's objects, and so copies them: 0.2 s of each short launch.
        gc.freeze()
        gc.enable()


os.register_at_fork(after_in_child=_give_back)
