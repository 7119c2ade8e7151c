"""What the fork server imports once, so that the ranks it forks need not.

None of these imports starts a thread: a forked process would lack it.
"""

import atexit
import gc
import os
import signal

from ddpsafe._wire import payload  # noqa: F401 - for the ranks, as the next line
from ddpsafe._worker import context, entrypoint, process_group, session, torch_hooks  # noqa: F401
from ddpsafe._worker.stop_signals import STOP_SIGNALS, hold_in_server

_SERVER = os.getpid()

gc.disable()  # collections take a fifth of the import of torch, which comes next and stays loaded


@atexit.register
def _end_at_once() -> None:
    """Exit without tearing torch down, which takes seconds on a busy machine."""
    # Registered first, so it runs last. Forked ranks inherit it: it is not for them.
    if os.getpid() == _SERVER:
        os._exit(0)


# The server itself ignores Ctrl-C, but only once all imports are done. `run_rank` undoes this in
# the ranks.
signal.signal(signal.SIGINT, signal.SIG_IGN)

# Schedulers often signal a whole process group, or all processes of a job, to make it stop. Ranks die
# with the server that forked them, so the server ignores these signals until the ranks have saved.
# The signals are blocked too: one that reaches a child between its fork and its own code is then
# delivered there, while an ignored one would be lost.
hold_in_server()
for _signum in STOP_SIGNALS:
    signal.signal(_signum, signal.SIG_IGN)


def _restore_signals() -> None:
    """Let forked processes, ranks or the user's own, receive signals again; resume collections."""
    if os.getppid() == _SERVER:
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_DFL)
        # What is loaded stays for good. Without the freeze, the first collection in a rank writes to
        # every page of torch's objects and so copies it: 0.2 s of each short launch.
        gc.freeze()
        gc.enable()


os.register_at_fork(after_in_child=_restore_signals)
