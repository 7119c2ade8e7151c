"""``ddpsafe template``: prints a job file to start from."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Final

from ddpsafe.cli import HEALTHY, TEMPLATES, say

if TYPE_CHECKING:
    from argparse import Namespace

_FILES: Final = dict(
    zip(TEMPLATES, ("slurm.sh", "kubernetes.yaml", "compose.yaml", "sagemaker.txt"), strict=True)
)


def print_template(options: Namespace) -> int:
    """Print the template of a place."""
    say(read_template(options.place).rstrip("\n"))
    return HEALTHY


def read_template(place: str) -> str:
    """Return the template of a place as text."""
    return (files("ddpsafe") / "templates" / _FILES[place]).read_text(encoding="utf-8")
