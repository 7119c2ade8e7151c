"""Compare what should be the same on every host, and name the hosts that differ."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._findings import Finding, failed, to_copy, warning
from ddpsafe.doctor._mesh.findings.fixes import mtu_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ddpsafe.doctor._mesh.findings.observations import Results
    from ddpsafe.doctor._mesh.protocol import Node
    from ddpsafe.doctor._mesh.transport import Json

_ABSENT: Final = "(none)"
_LONGEST_SHOWN: Final = 60
_MOST_CLOCK_OFFSET_S: Final = 5.0
_MOST_SHOWN: Final = 8
_NOT_BY_PIP: Final = ("driver", "python", "platform", "nccl", "cuda")
# Endings of the names of variables that legitimately differ between hosts.
_MAY_DIFFER: Final = (
    "_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "_HCA",
    "TORCH_DISTRIBUTED_ERROR_FILE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact that is not the same everywhere.

    Attributes:
        usual: What most hosts have.
        odd: What the others have, by node rank.
    """

    name: str
    usual: str
    odd: Mapping[int, str]


def find_differences(nodes: Mapping[int, Node], section: str) -> list[Difference]:
    """Compare one section of the hosts' facts, name by name."""
    tables = {rank: _table(getattr(node.facts, section), section) for rank, node in nodes.items()}
    names = sorted({name for table in tables.values() for name in table})
    differences = []
    for name in names:
        values = {rank: table.get(name, _ABSENT) for rank, table in tables.items()}
        # On a tie the value of the lowest rank counts as usual, because Counter keeps the order.
        usual, _ = Counter(values[rank] for rank in sorted(values)).most_common(1)[0]
        odd = {rank: value for rank, value in values.items() if value != usual}
        if odd:
            differences.append(Difference(name=name, usual=usual, odd=odd))
    return differences


def _table(value: Json, section: str) -> dict[str, str]:
    if not isinstance(value, dict):
        return {section: _as_text(value)} if value is not None else {}
    return {name: _as_text(fact) for name, fact in value.items() if not name.endswith(_MAY_DIFFER)}


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _show(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _install_line(version: Difference) -> str:
    if version.name in _NOT_BY_PIP or version.usual == _ABSENT:
        return f"# {version.name}: {_show(version.usual)}"
    # torch builds with a local version, e.g. 2.13.0+cpu, are on an index of their own.
    number, _, local = version.usual.partition("+")
    index = ["--index-url", f"https://download.pytorch.org/whl/{local}"] if local else []
    return shlex.join(["pip", "install", f"{version.name}=={number}", *index])


def _set_line(variable: Difference) -> str:
    if variable.usual == _ABSENT:
        return f"unset {variable.name}"
    return f"export {variable.name}={shlex.quote(variable.usual)}"


def _breaks_infiniband(results: Results, _: Sequence[Difference]) -> bool:
    """Return whether some hosts have an active port and others none, where NCCL would use it."""
    # NCCL of a host without an active port uses TCP, and does not meet the others.
    facts = [node.facts for node in results.nodes.values()]
    active = {any(port.startswith("ACTIVE") for port in host.infiniband.values()) for host in facts}
    is_unused = all(
        host.env.get("NCCL_IB_DISABLE") == "1" or host.env.get("NCCL_NET", "").lower() == "socket"
        for host in facts
    )
    return "nccl" in results.backend and len(active) > 1 and not is_unused


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """Facts that have to be the same on all hosts, and what to report if they are not.

    Attributes:
        title: How its fact begins.
        line: Makes the line to copy below it.
        breaks: Tells whether these differences break a job.
    """

    code: str
    title: str
    sections: tuple[str, ...]
    cause: str
    fix: str
    line: Callable[[Difference], str] | None = None
    breaks: Callable[[Results, Sequence[Difference]], bool] = lambda _, __: True


_COMPARISONS: Final = (
    _Comparison(
        code="DS-MESH-040",
        title="Versions differ between hosts",
        sections=("versions", "driver"),
        cause="the hosts have different virtual environments, images or drivers.",
        fix="Install the same on every host, e.g. from one lock file; on the host that differs:",
        line=_install_line,
        # Ranks with other versions of these cannot communicate.
        breaks=lambda _, differences: any(
            version.name in ("torch", "nccl", "ddpsafe") for version in differences
        ),
    ),
    _Comparison(
        code="DS-MESH-041",
        title="Environment variables differ between hosts",
        sections=("env",),
        cause="a variable was set in one shell, or in a start-up file of one host.",
        fix="Set it to the same value on every host; on the host that differs:",
        line=_set_line,
        breaks=lambda _, __: False,
    ),
    _Comparison(
        code="DS-MESH-047",
        title="InfiniBand ports differ between hosts",
        sections=("infiniband",),
        cause="a cable, a switch port, the subnet manager or a driver: NCCL uses the ports that are active.",
        fix="Make the ports of all hosts equal, or name the same ones in NCCL_IB_HCA; on the host that "
        "differs:",
        line=lambda port: (
            f"ibstat {port.name.replace(':', ' ')}    # elsewhere {_show(port.usual)}"
        ),
        breaks=_breaks_infiniband,
    ),
    _Comparison(
        code="DS-MESH-044",
        title="Data differ between hosts",
        sections=("data_paths",),
        cause="a copy is incomplete or old, or a mount is missing and its empty mount point shows.",
        fix="Compare the directory with that of a correct host; on the host that differs:",
        line=lambda path: f"# {path.name}: findmnt -T its path",
    ),
    _Comparison(
        code="DS-MESH-045",
        title="Hosts differ",
        sections=("config",),
        cause="the job was started with other arguments on one host.",
        fix="Start it with the same arguments on every host.",
    ),
)


def check_facts(results: Results) -> Iterator[Finding]:
    """Check the differences between the hosts' fingerprints."""
    if len(results.nodes) < 2:  # noqa: PLR2004 - one host does not differ
        return
    for comparison in _COMPARISONS:
        differences = [
            difference
            for section in comparison.sections
            for difference in find_differences(results.nodes, section)
        ]
        if differences:
            yield _different(results, comparison, differences)
    yield from _check_mtus(results)
    yield from _check_clocks(results)
    yield from _check_resolvers(results)


def _different(
    results: Results, comparison: _Comparison, differences: Sequence[Difference]
) -> Finding:
    named = [
        f"{difference.name} is {_show(difference.usual)}, "
        + ", ".join(
            f"{results.name_of(rank)} has {_show(value)}" for rank, value in difference.odd.items()
        )
        for difference in differences[:_MOST_SHOWN]
    ]
    lines = map(comparison.line, differences[:_MOST_SHOWN]) if comparison.line else ()
    breaks = comparison.breaks(results, differences)
    return (failed if breaks else warning)(
        comparison.code,
        f"{comparison.title}: {'; '.join(named)}.",
        cause=comparison.cause,
        fix=to_copy(comparison.fix, *lines),
        hosts=results.hostnames(rank for difference in differences for rank in difference.odd),
        table={
            difference.name: {
                "usual": difference.usual,
                "odd": {results.name_of(rank): value for rank, value in difference.odd.items()},
            }
            for difference in differences
        },
    )


def _check_mtus(results: Results) -> Iterator[Finding]:
    if any(dialled.result == "large-lost" for dialled in results.connections().values()):
        return  # DS-MESH-035 says which MTU passes
    mtus = {rank: node.mtu_bytes for rank, node in results.nodes.items() if node.mtu_bytes}
    if len(set(mtus.values())) > 1:
        usual, _ = Counter(mtus.values()).most_common(1)[0]
        others = {rank: mtu for rank, mtu in mtus.items() if mtu != usual}
        named = ", ".join(
            f"{results.label(rank)} sends up to {mtu} bytes" for rank, mtu in others.items()
        )
        yield warning(
            "DS-MESH-042",
            f"The interfaces of most hosts send packets of up to {usual} bytes, but {named}.",
            cause="jumbo frames are configured on some hosts only; TCP copes, other protocols may not.",
            fix=to_copy("Make them equal:", *mtu_lines(results, others, usual)),
            hosts=results.hostnames(others),
            mtu_bytes={results.name_of(rank): mtu for rank, mtu in mtus.items()},
        )


def _check_clocks(results: Results) -> Iterator[Finding]:
    ahead = {rank: report.clock_ahead_s for rank, report in results.reports.items()}
    # All are measured against node rank 0's clock, which may be the wrong one: so the median counts.
    middle = sorted(ahead.values())[len(ahead) // 2] if ahead else 0.0
    odd = {
        rank: by - middle for rank, by in ahead.items() if abs(by - middle) > _MOST_CLOCK_OFFSET_S
    }
    if odd:
        named = ", ".join(f"{results.label(rank)} by {by:+.0f} s" for rank, by in odd.items())
        yield warning(
            "DS-MESH-043",
            f"Clocks are off: {named}.",
            cause="no time service runs there; logs and file times of the hosts cannot be compared.",
            fix=to_copy("Start it:", "timedatectl set-ntp true"),
            hosts=results.hostnames(odd),
            ahead_s={results.name_of(rank): round(by, 1) for rank, by in odd.items()},
        )


def _check_resolvers(results: Results) -> Iterator[Finding]:
    waited_s = {rank: report.resolver_silent_s for rank, report in results.reports.items()}
    silent = [rank for rank in waited_s if waited_s[rank]]
    if silent:
        longest_s = max(waited_s.values())
        yield warning(
            "DS-MESH-046",
            f"No name server answers on {', '.join(map(results.label, silent))}: looking up the name of "
            f"an address of this job took more than {longest_s:.1f} s.",
            cause="/etc/resolv.conf names a server that is down or firewalled; torch looks up every "
            "host that connects to its store, which adds 10 to 20 s to each start.",
            fix=to_copy(
                "Correct the server, or shorten the wait, on these hosts:",
                "echo 'options timeout:1 attempts:1' >> /etc/resolv.conf",
            ),
            hosts=results.hostnames(silent),
            waited_s=round(longest_s, 1),
        )
