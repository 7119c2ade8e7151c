"""What the forkserver loads once, so that every rank it forks has it already."""

from ddpsafe._wire import payload
from ddpsafe._worker import context, control, entrypoint, process_group, session, torch_hooks

__all__ = [
    "context",
    "control",
    "entrypoint",
    "payload",
    "process_group",
    "session",
    "torch_hooks",
]
