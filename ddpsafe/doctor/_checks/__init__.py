"""The checks of one host, by area. Each examines one thing and yields what it found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._findings import Finding
    from ddpsafe.doctor._subject import Subject


class Check(Protocol):
    """A function that examines one thing."""

    @property
    def __name__(self) -> str: ...

    def __call__(self, subject: Subject, /) -> Iterator[Finding]:
        """Yield the findings, including those that everything is as it should be."""


def launch_checks() -> dict[str, tuple[Check, ...]]:
    """Return the checks that every launch runs: cheap ones, of what would break it."""
    from ddpsafe.doctor._checks import networks, resources, storage, variables

    return {
        "ENV": (variables.check_debugging,),
        "NET": (networks.check_loopback, networks.check_interface_variables),
        "LIM": (
            resources.check_shared_memory,
            resources.check_open_files,
            resources.check_processes,
            resources.check_memory,
        ),
        # The launch itself refuses a run directory that cannot be written.
        "PATH": (storage.check_temporary_directory, storage.check_room),
    }


def all_checks() -> dict[str, tuple[Check, ...]]:
    """Return every check, by area, in the order of the report.

    Those that need the torch probe come last, because it runs while the others do.
    """
    from ddpsafe.doctor._checks import (
        cuda,
        names,
        networks,
        ports,
        processes,
        resources,
        storage,
        variables,
        versions,
    )

    return {
        "ENV": variables.CHECKS,
        "NAME": names.CHECKS,
        "PORT": ports.CHECKS,
        "NET": networks.CHECKS,
        "LIM": resources.CHECKS,
        "PATH": storage.CHECKS,
        "PROC": processes.CHECKS,
        "VER": versions.CHECKS,
        "GPU": cuda.CHECKS,
    }
