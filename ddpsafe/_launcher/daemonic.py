"""A process that may have no children, found before anything starts."""

from __future__ import annotations

import multiprocessing

from ddpsafe._errors import ConfigError, Explanation


def require_may_have_children() -> None:
    """Refuse a launch from a daemonic process, in which Python starts no other process.

    Raises:
        ConfigError: This process is daemonic.
    """
    process = multiprocessing.current_process()
    if process.daemon:
        raise ConfigError(
            Explanation(
                f"{process.name} is a daemonic process, which may not have children: no rank can "
                "be started from it.",
                cause="it is a worker of multiprocessing.Pool or of a DataLoader, or was started "
                "with daemon=True.",
                fix="launch from the main process, start this one with daemon=False, or use "
                "concurrent.futures.ProcessPoolExecutor in place of the Pool.",
            )
        )
