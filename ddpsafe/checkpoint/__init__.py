"""Checkpoints that survive: atomic, verified, agreed on by all ranks.

Errors are in `ddpsafe.checkpoint.errors`.
"""

from ddpsafe.checkpoint._checkpointer import Checkpointer
from ddpsafe.checkpoint._snapshot import PerRank

__all__ = ["Checkpointer", "PerRank"]
