"""Refuses names of backends that torch does not know, and suggests similar ones that it knows."""

from __future__ import annotations

from typing import Final

from ddpsafe._config.problems import find_near, raise_config_error, show
from ddpsafe._errors import ConfigProblem

KNOWN_TO_EVERY_TORCH: Final = ("nccl", "gloo", "mpi", "ucc")
"""torch knows these names even if it was built without the libraries."""

_NO_BACKEND: Final = "undefined"
"""torch's entry for a group without a backend."""


def find_unknown(backend: str, known: list[str]) -> list[str]:
    """Return the names in a backend such as ``cpu:gloo,cuda:nccl`` that are not among `known`."""
    names = [part.rpartition(":")[2] for part in backend.split(",")]
    return [name for name in names if name not in {*known, "auto"} - {_NO_BACKEND}]


def suggest(backend: str, known: list[str]) -> str:
    """Return what to write instead of a backend that torch does not know."""
    names = [name for name in known if name != _NO_BACKEND]
    for name in find_unknown(backend, known):
        near = find_near(name, names)
        if near is not None:
            return repr(backend.replace(name, near))
    return f"one of {', '.join(names)}"


def require_backend(backend: str) -> None:
    """Refuse a backend that torch does not know in this process.

    Raises:
        ConfigError: No package imported so far has registered it.
    """
    # Nearly every launch uses one of these, and then torch need not be imported here.
    if not find_unknown(backend, list(KNOWN_TO_EVERY_TORCH)):
        return
    import torch.distributed as dist

    known = list(dist.Backend.backend_list) if dist.is_available() else []
    unknown = find_unknown(backend, known) if known else []
    if unknown:
        why = (
            f"torch knows no backend called {' or '.join(map(repr, unknown))}; a package that "
            "registers one must be imported at the start of the script"
        )
        write = suggest(backend, known)
        raise_config_error(
            ConfigProblem(field="backend", given=show(backend), why=why, write=write)
        )
