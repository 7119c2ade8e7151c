"""``ddpsafe report``: writes the page of a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpsafe._launcher.diagnosis.report_page import write_page
from ddpsafe.cli import HEALTHY, USAGE, complain, say

if TYPE_CHECKING:
    import argparse


def write_report_page(options: argparse.Namespace) -> int:
    """Write the page and print its path."""
    folder = Path(options.run_dir)
    if not any(folder.glob("attempt-*")):
        complain(f"ddpsafe report: {folder} is not a run directory: it has no attempt-1")
        return USAGE
    try:
        page = write_page(folder, options.html and Path(options.html))
    except OSError as error:
        complain(f"ddpsafe report: cannot write to {options.html or folder}: {error.strerror}")
        return USAGE
    say(str(page))
    return HEALTHY
