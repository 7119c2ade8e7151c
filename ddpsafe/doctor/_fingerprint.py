"""What has to be the same on every node, in a form that can be sent and compared."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from importlib import metadata
from itertools import islice
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall
from ddpsafe._gpus import read_build
from ddpsafe._secrets import Mask, hide_value
from ddpsafe.doctor._checks.storage import find_storage
from ddpsafe.doctor._subject import environment_of
from ddpsafe.doctor._system.infiniband import list_ports
from ddpsafe.doctor._system.nvidia import read_driver

if TYPE_CHECKING:
    from pathlib import Path

    from ddpsafe._config import LaunchConfig

_PACKAGES: Final = ("torch", "ddpsafe", "numpy", "torchvision", "cloudpickle")
_COMPARED_PREFIXES: Final = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "UCX_", "FI_", "PYTORCH_")
_COMPARED_NAMES: Final = (
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)
_MAX_ENTRIES: Final = 10_000
_PATH_LIMIT_S: Final = 3.0


def fingerprint(config: LaunchConfig) -> dict[str, object]:
    """Return what the nodes of a job compare, JSON-serializable and without secrets.

    Keys: ``versions``, ``env``, ``driver``, ``infiniband`` (port to state and rate), ``data_paths``,
    ``config``.
    """
    env = environment_of(config)
    driver = read_driver()
    names = {*_COMPARED_NAMES, *config.env}
    facts: dict[str, object] = {
        "versions": _versions(),
        "env": {
            name: hide_value(name, value)
            for name, value in sorted(env.items())
            if name.startswith(_COMPARED_PREFIXES) or name in names
        },
        "driver": None if driver is None else driver.version,
        "infiniband": {name: str(port) for name, port in list_ports().items()},
        "data_paths": {
            name: _data_path(data_path.path) for name, data_path in config.data_paths.items()
        },
        "config": {
            "backend": config.backend,
            "nproc_per_node": config.nproc_per_node,
            "nnodes": config.nnodes,
        },
    }
    mask = Mask.of(env)
    return {section: mask.value(value) for section, value in facts.items()}


def _versions() -> dict[str, str]:
    """Return the installed versions."""
    # From the metadata of the packages: torch may be broken, and is slow to import.
    versions = {"python": platform.python_version(), "platform": platform.machine()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    for dist in metadata.distributions():
        name = str(dist.metadata["Name"] or "")
        if name.startswith("nvidia-nccl-"):
            versions["nccl"] = dist.version
    # The version of a torch from PyPI does not show the CUDA version that it is built for.
    if cuda := read_build().get("cuda"):
        versions["cuda"] = str(cuda)
    return versions


def _data_path(path: Path) -> dict[str, object]:
    """Describe a path so that two nodes can compare it."""
    # In a thread, because any call on a dead mount may never return.
    call = BoundedCall(lambda: _describe(path), name="ddpsafe-fingerprint")
    if not call.wait(_PATH_LIMIT_S):
        return {"state": f"no answer within {_PATH_LIMIT_S:g} s"}
    try:
        return call.result()
    except OSError as error:
        return {"state": error.strerror or str(error)}


def _describe(path: Path) -> dict[str, object]:
    kind, _ = find_storage(path)
    if not path.is_dir():
        return {"state": "file", "size_bytes": path.stat().st_size, "file_system": kind}
    with os.scandir(path) as entries:
        names = sorted(entry.name for entry in islice(entries, _MAX_ENTRIES))
    digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    # A truncated listing has whichever names the file system returned first: hosts cannot compare it.
    is_whole = len(names) < _MAX_ENTRIES
    return {
        "state": "directory",
        "entries": len(names) if is_whole else f"{_MAX_ENTRIES} or more",
        "names": digest if is_whole else "not compared",
        "file_system": kind,
    }
