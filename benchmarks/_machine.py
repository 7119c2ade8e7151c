"""The lines of a page that say when and on what it was measured."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import version


def measured_on() -> str:
    """Return the date, the machine with its load of the last quarter of an hour, and the versions."""
    today = datetime.now(tz=timezone.utc).date().isoformat()
    machine = f"{platform.system()} {platform.machine()}, load average {os.getloadavg()[2]:.1f}"
    return (
        f"Measured on {today}: {os.cpu_count()} cores, {machine},\n"
        f"Python {platform.python_version()}, torch {version('torch')}, gloo."
    )
