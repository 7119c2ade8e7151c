"""The checks of this host, one after the other, each under a deadline of its own."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe.doctor._checks import all_checks, launch_checks
from ddpsafe.doctor._finding import warning

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._finding import Finding
    from ddpsafe.doctor._subject import Subject

LIMIT: Final = timedelta(seconds=10)
"""How long one check may take; one that waits for torch has until the end of the examination."""

_ASKS_TORCH: Final = frozenset({"GPU", "VER"})


def examine_host(
    subject: Subject, checks: str | Collection[str], *, on_progress: Callable[[str], None]
) -> list[Finding]:
    """Do the checks and return what they found, in their order.

    Args:
        subject: What to look at.
        checks: ``"all"``, ``"launch"``, or names of areas.
        on_progress: Takes a line for each area.
    """
    chosen = _choose(checks)
    findings: list[Finding] = []
    with _torch_asked(
        subject, wanted=bool(_ASKS_TORCH & chosen.keys()) and not subject.at_launch
    ) as asked:
        for area, members in chosen.items():
            on_progress(f"checking {area}")
            for check in members:
                findings += _bounded(check, asked, patient=area in _ASKS_TORCH)
    return findings


def _choose(checks: str | Collection[str]) -> dict[str, tuple[Check, ...]]:
    if checks == "launch":
        return launch_checks()
    everything = all_checks()
    if checks == "all":
        return everything
    wanted = {checks} if isinstance(checks, str) else set(checks)
    unknown = wanted - everything.keys()
    if unknown:
        what = f"checks: there is no area {', '.join(sorted(unknown))}."
        fix = f'write "all", "launch", or a set of {", ".join(everything)}.'
        raise ConfigError(Explanation(what, cause="a typing error.", fix=fix))
    return {area: members for area, members in everything.items() if area in wanted}


@contextlib.contextmanager
def _torch_asked(subject: Subject, *, wanted: bool) -> Iterator[Subject]:
    if not wanted:
        yield subject
        return
    from ddpsafe.doctor._torch_probe import TorchProbe

    probe = TorchProbe(subject.env)
    try:
        yield replace(subject, probe=probe)
    finally:
        probe.close()


def _bounded(check: Check, subject: Subject, *, patient: bool) -> list[Finding]:
    """Do one check; one that fails or does not come back is a finding, not the end."""
    own = Deadline.after(None if patient else LIMIT).earlier(subject.deadline)
    found: list[Finding] = []  # what it said before it stuck counts
    call = BoundedCall(lambda: found.extend(check(subject)), name=f"ddpsafe-{check.__name__}")
    # A moment longer than the check's own deadline: it knows better what it waited for.
    if not call.wait(own.remaining_s() + 1.0):
        return [*found, _unfinished(check, f"has not come back after {own.waited_s():.1f} s")]
    try:
        call.result()
    except Exception as error:  # noqa: BLE001 - a check that fails must not hide what others find
        return [*found, _unfinished(check, f"failed with {type(error).__name__}: {error}")]
    return found


def _unfinished(check: Check, what: str) -> Finding:
    return warning(
        "DS-PROC-004",
        f"The check {check.__name__!r} {what}.",
        cause="this system answers in a way that the check does not know, or does not answer.",
        fix="What it would have found is unknown; the other checks are not concerned. "
        "Please report it with the output of `ddpsafe doctor --json`.",
        check=check.__name__,
    )
