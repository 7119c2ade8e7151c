"""The status of launches in the OpenMetrics text format, for a Prometheus collector of text files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Facts = dict[str, Any]
    Sample = tuple[dict[str, object], float | None]


class _Family(NamedTuple):
    kind: str
    help: str
    unit: str = ""


_FAMILIES: Final = {
    "ddpsafe_launch_running": _Family("gauge", "1 while the launcher answers, else 0"),
    "ddpsafe_launch_ranks": _Family("gauge", "Number of ranks of the launch"),
    "ddpsafe_launch_nodes": _Family("gauge", "Number of hosts with a rank of the launch"),
    "ddpsafe_launch_attempts": _Family("gauge", "The attempt under way, counted from 1"),
    "ddpsafe_launch_longest_step_seconds": _Family(
        "gauge", "Longest time between two steps of this attempt so far", "seconds"
    ),
    "ddpsafe_rank_steps": _Family("counter", "Optimizer steps of a rank in this attempt"),
    "ddpsafe_rank_steps_per_second": _Family("gauge", "Steps per second of a rank"),
    "ddpsafe_rank_since_step_seconds": _Family(
        "gauge", "Time since the last step of a rank of this host", "seconds"
    ),
    "ddpsafe_rank_memory_bytes": _Family(
        "gauge", "Resident memory of a rank of this host and its children", "bytes"
    ),
    "ddpsafe_waited_seconds": _Family(
        "gauge", "How long the other ranks have waited for these ranks, lately", "seconds"
    ),
    "ddpsafe_waited_ratio": _Family(
        "gauge", "The part of that time in which they waited for these ranks", "ratio"
    ),
}
"""Every metric; the name of one with a unit ends with it."""


def render(launches: Iterable[Facts]) -> str:
    """Return what ``ddpsafe status --json`` shows as metrics, in the OpenMetrics text format 1.0.

    A value that is not known, such as the memory of a rank on another host, has no sample.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in _FAMILIES}
    for launch in launches:
        for name, labels, value in _samples_of(launch):
            samples[name].append((labels, value))
    lines = [line for name in _FAMILIES for line in _lines_of(name, samples[name])]
    return "\n".join([*lines, "# EOF"])


def _samples_of(launch: Facts) -> Iterator[tuple[str, dict[str, object], float | None]]:
    own_labels: dict[str, object] = {"run_dir": launch["run_dir"]}
    yield "ddpsafe_launch_running", own_labels, launch["state"] == "running"
    if launch["state"] != "running":
        return
    ranks = launch["ranks"]
    yield "ddpsafe_launch_ranks", own_labels, launch["world_size"]
    yield "ddpsafe_launch_nodes", own_labels, len({rank["hostname"] for rank in ranks})
    yield "ddpsafe_launch_attempts", own_labels, launch["attempt"]
    yield "ddpsafe_launch_longest_step_seconds", own_labels, launch["longest_step_s"]
    for rank in ranks:
        labels = {**own_labels, "rank": rank["rank"], "host": rank["hostname"]}
        yield "ddpsafe_rank_steps", labels, rank["steps"]
        yield "ddpsafe_rank_steps_per_second", labels, rank["steps_per_s"]
        yield "ddpsafe_rank_since_step_seconds", labels, rank["last_step_s"]
        yield "ddpsafe_rank_memory_bytes", labels, rank.get("memory_bytes")
    for straggler in launch["stragglers"]:
        labels = {**own_labels, "ranks": ",".join(map(str, straggler["ranks"]))}
        yield "ddpsafe_waited_seconds", labels, straggler["waited_s"]
        yield "ddpsafe_waited_ratio", labels, straggler["share"]


def _lines_of(name: str, samples: Iterable[Sample]) -> Iterator[str]:
    family = _FAMILIES[name]
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return
    yield f"# TYPE {name} {family.kind}"
    if family.unit:
        yield f"# UNIT {name} {family.unit}"
    yield f"# HELP {name} {family.help}"
    suffix = "_total" if family.kind == "counter" else ""
    for labels, value in known:
        listed = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{suffix}{{{listed}}} {float(value)}"


def _escaped(text: object) -> str:
    return str(text).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
