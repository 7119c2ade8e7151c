"""The configuration of a launch: its fields, the sources they are read from, and their validation.

Start at ``launch_config``. A value passes through ``sources`` and ``field_validators``.
"""

from ddpsafe._config.launch_config import (
    GroupFields,
    LaunchConfig,
    LaunchFields,
    SpawnFields,
    refuse_fields,
)
from ddpsafe._config.parts import Rendezvous, RetryPolicy, Timeouts
from ddpsafe._config.paths import AbsolutePath, DataPath, require_data_paths

__all__ = [
    "AbsolutePath",
    "DataPath",
    "GroupFields",
    "LaunchConfig",
    "LaunchFields",
    "Rendezvous",
    "RetryPolicy",
    "SpawnFields",
    "Timeouts",
    "refuse_fields",
    "require_data_paths",
]
