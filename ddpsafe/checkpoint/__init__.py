"""Checkpoints that survive: atomic, verified, agreed on by all ranks.

Errors are in `ddpsafe.checkpoint.errors`. The public classes are in `_checkpointer`, which calls `_save`
and `_restore` (and that `_compare`). Both use `_sharded`, `_state` (and that `_replicas`) and `_directory`, and
the ranks communicate through `_ranks`. At the bottom are `_format`, `_lock`, `_trees` and `_checksums`.
"""

from ddpsafe.checkpoint._checkpointer import Checkpointer, CheckpointInfo, import_file
from ddpsafe.checkpoint._directory import Keep
from ddpsafe.checkpoint._state import PerRank

__all__ = ["CheckpointInfo", "Checkpointer", "Keep", "PerRank", "import_file"]
