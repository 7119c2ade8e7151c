"""Containers: the cores they really give, and what they do not share unless told to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._context import count_cores
from ddpsafe.doctor._report import Finding, ok, to_copy, warning
from ddpsafe.doctor._system.cgroups import read_limits, whole_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._context import Subject

_MARKS: Final = {
    "Docker": Path("/.dockerenv"),
    "Podman": Path("/run/.containerenv"),
    "Singularity": Path("/singularity.d"),
    "Apptainer": Path("/.singularity.d"),
}
_LEAST_SHARE: Final = 0.95


def check_cores(subject: Subject) -> Iterator[Finding]:
    """Compare the cores that torch counts with the time that the container gets."""
    counted, share = count_cores(), read_limits().cores
    if share is None or share >= counted * _LEAST_SHARE:
        yield ok("DS-LIM-006", f"{counted} cores may be used.", cores=counted)
        return
    threads = max(1, whole_cores(share) // subject.nproc)
    asked = subject.config.nproc_per_node
    ranks = (
        ""
        if isinstance(asked, int)
        else f"; nproc_per_node={asked!r} would start one rank for each"
    )
    yield warning(
        "DS-LIM-006",
        f"The container gets {share:g} cores' worth of time, but {counted} cores are visible, and "
        f"torch starts threads for all of them{ranks}.",
        cause="a quota (docker --cpus, limits.cpu of Kubernetes) limits time and hides no cores.",
        fix=to_copy(
            "Say how many threads each rank may have, and how many ranks:",
            f"export OMP_NUM_THREADS={threads}",
            f"--nproc-per-node {min(subject.nproc, whole_cores(share))}",
        ),
        quota_cores=share,
        cores=counted,
    )


def check_sharing(subject: Subject) -> Iterator[Finding]:
    """Say what kind of container this is, and warn of one without a reaper of dead processes."""
    kind = find_container(subject.env)
    if kind is None:
        yield ok("DS-LIM-007", "No container is recognised.")
        return
    if os.getpid() == 1:
        yield warning(
            "DS-LIM-007",
            f"This process is the first one of its {kind} container: processes whose "
            "parents have ended are never reaped, and signals without a handler do not reach it.",
            cause="the script is the container's command.",
            fix=to_copy("Let an init come first:", "docker run --init …"),
        )
        return
    yield ok("DS-LIM-007", f"This is a {kind} container.", container=kind)


def find_container(env: Mapping[str, str]) -> str | None:
    """Return what kind of container this process runs in, if it shows."""
    if "KUBERNETES_SERVICE_HOST" in env:
        return "Kubernetes"
    for kind, mark in _MARKS.items():
        if mark.exists():
            return kind
    return None


CHECKS: Final[tuple[Check, ...]] = (check_cores, check_sharing)
