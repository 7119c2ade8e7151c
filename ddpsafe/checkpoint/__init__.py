"""Checkpoints that survive: atomic, verified, agreed on by all ranks.

Errors are in `ddpsafe.checkpoint.errors`. Inside, what a user calls is in `_checkpointer`; it calls
`_save` and `_restore` (which calls `_compare`), both of them `_sharded`, `_state` and `_directory`, which
all ranks use through `_exchange`; at the bottom are `_format`, `_lock`, `_trees` and `_checksums`.
"""

from ddpsafe.checkpoint._checkpointer import Checkpointer, CheckpointInfo, import_file
from ddpsafe.checkpoint._directory import Keep
from ddpsafe.checkpoint._state import PerRank

__all__ = ["CheckpointInfo", "Checkpointer", "Keep", "PerRank", "import_file"]
