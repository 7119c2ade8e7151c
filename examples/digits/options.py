"""The options of the command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

OUT = Path(__file__).resolve().parent / "out"


def absolute(path: str) -> Path:
    """Resolve against the folder in which the command was typed, not a rank's."""
    return Path(path).absolute()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small CNN on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--data", type=absolute, default=OUT / "data", help="the image files")
    parser.add_argument("--out", type=absolute, default=OUT, help="where the pictures go")
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=torch.cuda.device_count() or min(4, os.cpu_count() or 1),
        help="ranks on this machine: by default one for each GPU, or up to four on cores",
    )
    return parser.parse_args()
