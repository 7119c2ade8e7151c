"""Validators for single fields of a `LaunchConfig`."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Mapping
from typing import Final

from ddpsafe._config.backend_names import KNOWN_TO_EVERY_TORCH
from ddpsafe._config.interfaces import GLOO, NCCL, find_shape_problem
from ddpsafe._config.problems import Problem, find_near, require_none, show, wrong

# More than any machine has cores; a typo must not start 80000 processes.
MOST_RANKS_PER_NODE: Final = 4096

_BACKEND: Final = re.compile(r"[a-z][a-z0-9_-]*", re.ASCII)
_COMMON_BACKENDS: Final = (*KNOWN_TO_EVERY_TORCH, "auto")
# Vendors' libraries whose names are one letter off nccl and no typos: xccl, hccl, rccl, mccl, cncl.
_VENDOR_BACKENDS: Final = re.compile(r"[a-z]?ccl|cncl", re.ASCII)

_SET_BY_LAUNCHER: Final = {
    "RANK": "each rank gets its own",
    "LOCAL_RANK": "each rank gets its own",
    "WORLD_SIZE": "it follows from nnodes and nproc_per_node",
    "LOCAL_WORLD_SIZE": "it is nproc_per_node",
    "NODE_RANK": "it is the field node_rank",
    "GROUP_RANK": "it is the field node_rank",
    "GROUP_WORLD_SIZE": "it is the field nnodes",
    "ROLE_RANK": "each rank gets its own",
    "ROLE_WORLD_SIZE": "it follows from nnodes and nproc_per_node",
    "MASTER_ADDR": "it follows from the field rendezvous",
    "MASTER_PORT": "a free port is found for every attempt",
}


def validate_nproc(value: object) -> object:
    """Validate `nproc_per_node`: a number from 1, or what to count."""
    write = 'nproc_per_node=4 (a number from 1), "gpu", "cpu" or "auto"'
    if isinstance(value, str) and not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", value, re.ASCII):
        word = value.strip().lower()
        if word in ("gpu", "cpu", "auto"):
            return word
        near = find_near(word, ("gpu", "cpu", "auto"))
        raise wrong(
            "it is not a number of ranks",
            write=repr(near) if near else write,
            is_guess=near is not None,
        )
    count = require_integer(value, write=write)
    if count < 1:
        raise wrong(
            "zero ranks would train nothing and succeed "
            "(torch.cuda.device_count() is 0 on a machine without GPUs)"
            if count == 0
            else "the smallest number of ranks is 1",
            write='"auto" for one rank per GPU, or per core where there is no GPU; or a number from 1',
        )
    if count > MOST_RANKS_PER_NODE:
        raise wrong(f"no node runs more than {MOST_RANKS_PER_NODE} ranks", write=write)
    return count


def require_integer(value: object, *, write: str) -> int:
    """Return `value` as an int: an integer of any type, a whole float or a string; not a bool."""
    if isinstance(value, bool):
        raise wrong("expected an integer, got a bool", write=write)
    try:
        if isinstance(value, str):
            return int(value)
        if isinstance(value, float) and value.is_integer() and math.isfinite(value):
            return int(value)
        return operator.index(value)  # type: ignore[arg-type] # raises TypeError for others
    except (TypeError, ValueError):
        raise wrong(f"expected an integer, got a {type(value).__name__}", write=write) from None


def validate_integer(value: object) -> object:
    """Read an integer as `require_integer` does."""
    return require_integer(value, write="an integer, e.g. 2")


def validate_start_method(value: object) -> object:
    """Validate `start_method`; explain why fork is refused."""
    if value == "fork":
        raise wrong(
            "a forked rank inherits CUDA (which then fails to initialise), locks held by threads "
            "that do not exist in it, and open files and sockets that all ranks share",
            write='"forkserver" to start as fast, or "spawn"',
        )
    return value


def validate_backend(value: object) -> object:
    """Validate a backend's name without torch: refuse malformed names and typos of known ones."""
    if not isinstance(value, str):
        raise wrong(
            f"expected a name, got a {type(value).__name__}", write='"auto", "nccl" or "gloo"'
        )
    backend = value.strip().lower()
    parts = backend.split(",")
    pairs = [part.rpartition(":") for part in parts]
    write = '"auto", one name ("nccl", "gloo"), or one for each device: "cpu:gloo,cuda:nccl"'
    words = [
        word for device, colon, name in pairs for word in ((device, name) if colon else (name,))
    ]
    if not all(_BACKEND.fullmatch(word) for word in words):
        raise wrong("it is neither a name nor a list of device:name", write=write)
    devices = [device for device, _, _ in pairs]
    if len(pairs) > 1 and ("" in devices or len(set(devices)) < len(devices)):
        raise wrong("a list names every device exactly once", write=write)
    if len(pairs) > 1 and any(name == "auto" for _, _, name in pairs):
        raise wrong('"auto" chooses for all devices and cannot be part of a list', write=write)
    for _, _, name in pairs:
        # Any package can register a backend, so an unknown name is not wrong by itself.
        near = find_near(name, _COMMON_BACKENDS, cutoff=0.7)
        if near not in {None, name} and not _VENDOR_BACKENDS.fullmatch(name):
            raise wrong(
                f"no backend is called {name!r}",
                write=repr(backend.replace(name, near or "")),
                is_guess=True,
            )
    return backend


def validate_env(value: object) -> object:
    """Validate the extra variables of the ranks: their names, their values, and who sets them."""
    if not isinstance(value, Mapping):
        raise wrong(
            f"expected a table of variables, got a {type(value).__name__}",
            write='env={"NCCL_DEBUG": "INFO"}',
        )
    problems = []
    for name, text in value.items():
        problem = _name_problem(name) or _value_problem(str(name), text)
        if problem is not None:
            bare = _without_value(name)
            where = bare if isinstance(bare, str) and bare.isprintable() else show(bare)
            problems.append(
                Problem(why=problem.why, write=problem.write, where=(where,), given=text)
            )
    require_none(problems, given=value)
    return {str(name): str(text) for name, text in value.items()}


def _without_value(name: object) -> object:
    """Return a name as a message may show it: given as ``TOKEN=abc``, it contains a secret value."""
    if not isinstance(name, str) or "=" not in name:
        return name
    return f"{name.partition('=')[0]}=…"


def _name_problem(name: object) -> Problem | None:
    if not isinstance(name, str) or not _is_text(name) or not name or "=" in name:
        return Problem(
            why=f"{show(_without_value(name))} cannot be the name of a variable (a string, not empty, no '=')",
            write='env={"NCCL_DEBUG": "INFO"}',
        )
    reason = _SET_BY_LAUNCHER.get(name)
    if reason is None and name.startswith(("TORCHELASTIC_", "DDPSAFE_")):
        reason = "ranks read from it how they were started"
    if reason is None:
        return None
    return Problem(why=f"the launcher sets it: {reason}", write="nothing; leave it out of env")


def _value_problem(name: str, text: object) -> Problem | None:
    if isinstance(text, bool):
        why = 'libraries differ in how they spell a bool ("1", "true", "ON")'
        return Problem(why=why, write=f'the string that this library reads, e.g. {{"{name}": "1"}}')
    if isinstance(text, (int, float)):
        return None
    if not isinstance(text, str) or not _is_text(text):
        why = "the value of a variable must be a string without a null character"
        return Problem(why=why, write=f'{{"{name}": "…"}}, or leave it out to inherit it')
    return find_shape_problem(name, text) if name in {GLOO, NCCL} else None


def _is_text(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False
