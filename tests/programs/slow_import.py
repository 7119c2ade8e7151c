"""A module that rank 1 imports slowly, as from a busy network disk."""

import os
from pathlib import Path

import scripts

if os.environ.get("RANK") == "1" and "SLOW_IMPORT" in os.environ:
    folder = Path(os.environ["SLOW_IMPORT"])
    (folder / "importing").touch()
    scripts.wait_until((folder / "gate").exists)


def train(_ctx: object) -> None:
    """Print that the rank has trained."""
    print("trained")
