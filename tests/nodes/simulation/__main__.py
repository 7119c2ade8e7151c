"""Runs simulations: ``python tests/nodes/simulation --seeds 300``, or one again: ``--seed 17``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of what a seed decides
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})

sys.path.insert(0, str(Path(__file__).parent))

import virtual_time

virtual_time.install()

import simulate  # noqa: E402

simulate.main()
