"""Compare what should be the same on every host, and name the hosts that differ."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._codes import CODES
from ddpsafe.doctor._findings import Finding, to_copy, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ddpsafe.doctor._findings import Severity
    from ddpsafe.doctor._mesh.findings.observations import Results
    from ddpsafe.doctor._mesh.protocol import Node
    from ddpsafe.doctor._mesh.transport import Json

_ABSENT: Final = "(none)"
_LONGEST_SHOWN: Final = 60
_MOST_CLOCK_OFFSET_S: Final = 5.0
_MOST_SHOWN: Final = 8
_NOT_BY_PIP: Final = ("driver", "python", "platform", "nccl", "cuda")
_MAY_DIFFER: Final = (
    "_IFNAME",
    "CUDA_VISIBLE_DEVICES",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "_HCA",
    "TORCH_DISTRIBUTED_ERROR_FILE",
)
"""Endings of the names of variables that legitimately differ between hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact that is not the same everywhere.

    Attributes:
        name: The fact.
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
    found = []
    for name in names:
        values = {rank: table.get(name, _ABSENT) for rank, table in tables.items()}
        # On a tie the value of the lowest rank counts as usual, because Counter keeps the order.
        usual, _ = Counter(values[rank] for rank in sorted(values)).most_common(1)[0]
        odd = {rank: value for rank, value in values.items() if value != usual}
        if odd:
            found.append(Difference(name=name, usual=usual, odd=odd))
    return found


def _table(value: Json, section: str) -> dict[str, str]:
    if not isinstance(value, dict):
        return {section: _as_text(value)} if value is not None else {}
    return {name: _as_text(each) for name, each in value.items() if not name.endswith(_MAY_DIFFER)}


def _as_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _show(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def check_facts(results: Results) -> Iterator[Finding]:
    """Check the differences between the hosts' fingerprints."""
    if len(results.nodes) < 2:  # noqa: PLR2004 - one host does not differ
        return
    versions = find_differences(results.nodes, "versions") + find_differences(
        results.nodes, "driver"
    )
    if versions:
        # Ranks with different versions of these cannot communicate.
        breaks = any(each.name in ("torch", "nccl", "ddpsafe") for each in versions)
        yield _different(
            results,
            versions,
            code="DS-MESH-040",
            severity="failed" if breaks else "warning",
            cause="the hosts have different virtual environments, images or drivers.",
            fix="Install the same on every host, e.g. from one lock file; on the host that differs:",
            line=_install_line,
        )
    variables = find_differences(results.nodes, "env")
    if variables:
        yield _different(
            results,
            variables,
            code="DS-MESH-041",
            severity="warning",
            cause="a variable was set in one shell, or in a start-up file of one host.",
            fix="Set it to the same value on every host; on the host that differs:",
            line=lambda each: (
                f"unset {each.name}"
                if each.usual == _ABSENT
                else f"export {each.name}={shlex.quote(each.usual)}"
            ),
        )
    ports = find_differences(results.nodes, "infiniband")
    if ports:
        active = {
            rank: any(state.startswith("ACTIVE") for state in node.facts.infiniband.values())
            for rank, node in results.nodes.items()
        }
        is_unused = all(
            node.facts.env.get("NCCL_IB_DISABLE") == "1"
            or node.facts.env.get("NCCL_NET", "").lower() == "socket"
            for node in results.nodes.values()
        )
        # NCCL of a host without an active port uses TCP, and does not meet the others.
        breaks = "nccl" in results.backend and len(set(active.values())) > 1 and not is_unused
        yield _different(
            results,
            ports,
            code="DS-MESH-047",
            severity="failed" if breaks else "warning",
            cause="a cable, a switch port, the subnet manager or a driver: NCCL uses the ports that are active.",
            fix="Make the ports of all hosts equal, or name the same ones in NCCL_IB_HCA; on the host that "
            "differs:",
            line=lambda port: (
                f"ibstat {port.name.replace(':', ' ')}    # elsewhere {_show(port.usual)}"
            ),
        )
    differences = find_differences(results.nodes, "data_paths")
    if differences:
        yield _different(
            results,
            differences,
            code="DS-MESH-044",
            severity="failed",
            cause="a copy is incomplete or old, or a mount is missing and its empty mount point shows.",
            fix="Compare the directory with that of a correct host; on the host that differs:",
            line=lambda each: f"# {each.name}: findmnt -T its path",
        )
    differences = find_differences(results.nodes, "config")
    if differences:
        yield _different(
            results,
            differences,
            code="DS-MESH-045",
            severity="failed",
            cause="the job was started with other arguments on one host.",
            fix="Start it with the same arguments on every host.",
        )
    if all(each.result != "large-lost" for each in results.connections().values()):
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
                fix=to_copy(
                    "Make them equal:",
                    *(
                        f"ip link set dev {shlex.quote(results.nodes[rank].announced.interface)} mtu {usual}"
                        f"    # on {results.name_of(rank)}"
                        for rank in others
                    ),
                ),
                hosts=results.hostnames(others),
                mtu_bytes={results.name_of(rank): mtu for rank, mtu in mtus.items()},
            )
    ahead = {rank: each.clock_ahead_s for rank, each in results.reports.items()}
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
    silent = {
        rank: each.resolver_silent_s
        for rank, each in results.reports.items()
        if each.resolver_silent_s
    }
    if silent:
        named = ", ".join(map(results.label, silent))
        longest = max(silent.values())
        yield warning(
            "DS-MESH-046",
            f"No name server answers on {named}: looking up the name of an address of this job "
            f"took more than {longest:.1f} s.",
            cause="/etc/resolv.conf names a server that is down or firewalled; torch looks up every "
            "host that connects to its store, which adds 10 to 20 s to each start.",
            fix=to_copy(
                "Correct the server, or shorten the wait, on these hosts:",
                "echo 'options timeout:1 attempts:1' >> /etc/resolv.conf",
            ),
            hosts=results.hostnames(silent),
            waited_s=round(longest, 1),
        )


def _install_line(each: Difference) -> str:
    if each.name in _NOT_BY_PIP or each.usual == _ABSENT:
        return f"# {each.name}: {_show(each.usual)}"
    # torch builds with a local version, e.g. 2.13.0+cpu, are on an index of their own.
    version, _, local = each.usual.partition("+")
    index = ["--index-url", f"https://download.pytorch.org/whl/{local}"] if local else []
    return shlex.join(["pip", "install", f"{each.name}=={version}", *index])


def _different(
    results: Results,
    differences: list[Difference],
    *,
    code: str,
    severity: Severity,
    cause: str,
    fix: str,
    line: Callable[[Difference], str] | None = None,
) -> Finding:
    shown = []
    for each in differences[:_MOST_SHOWN]:
        odd = ", ".join(
            f"{results.name_of(rank)} has {_show(value)}" for rank, value in each.odd.items()
        )
        shown.append(f"{each.name} is {_show(each.usual)}, {odd}")
    lines = [line(each) for each in differences[:_MOST_SHOWN]] if line else []
    ranks = {rank for each in differences for rank in each.odd}
    return Finding(
        code=code,
        severity=severity,
        fact=f"{CODES[code]}: {'; '.join(shown)}.",
        cause=cause,
        fix=to_copy(fix, *lines) if lines else fix,
        hosts=results.hostnames(ranks),
        details={
            "table": {
                each.name: {
                    "usual": each.usual,
                    "odd": {results.name_of(rank): value for rank, value in each.odd.items()},
                }
                for each in differences
            }
        },
    )
