"""Which nodes are missing, which joined twice, and what kept a node from the endpoint."""

from __future__ import annotations

import contextlib
import errno
import shlex
import socket
from importlib import metadata
from typing import TYPE_CHECKING, Final

from ddpsafe._advice import ADVICE, COMMANDS
from ddpsafe._host import find_interface_of, list_interfaces, show_endpoint, source_address
from ddpsafe.doctor._findings import Finding, to_copy
from ddpsafe.doctor._mesh.findings.fixes import allow, describe_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddpsafe.doctor._mesh.findings.observations import Results
    from ddpsafe.doctor._mesh.protocol import FilterChain, Rejected
    from ddpsafe.doctor._mesh.reach_node_zero import Obstacle


def describe_obstacle(
    obstacle: Obstacle,
    *,
    host: str,
    port: int,
    node_rank: int,
    nnodes: int,
    chains: Sequence[FilterChain] | None = None,
) -> Finding:
    """Return the finding on what kept this node from node rank 0.

    Args:
        obstacle: What it was.
        host: The endpoint's host.
        port: The endpoint's port.
        node_rank: The rank of this node.
        nnodes: The number of nodes.
        chains: The chains of this host's packet filter; None if they were not or cannot be read.
    """
    here = f"{socket.gethostname()} (node rank {node_rank} of {nnodes})"
    if obstacle.trouble == "late":
        return late(
            f"{here} reached {show_endpoint(host, port)}", waited="the others had stopped waiting"
        )
    if obstacle.trouble == "secret":
        return no_secret(
            f"{here} reached {show_endpoint(host, port)}", hosts=(socket.gethostname(), host)
        )
    if obstacle.trouble == "version":
        other = obstacle.holder or host
        what = f"{here} is refused by {other} at {show_endpoint(host, port)}: {obstacle.said}"
        return other_version(what, hosts=(socket.gethostname(), other))
    code, describe = _DESCRIPTIONS[obstacle.trouble]
    what, cause, fix = describe(obstacle, host, port)
    if chains and obstacle.addresses:
        # Name this host's packet filter first: it may drop what this host sends, or the replies.
        address = obstacle.addresses[0]
        named = ", ".join(map(describe_chain, chains))
        rules = [
            allow(chain, address, port, port, "dport" if chain.hook == "output" else "sport")
            for chain in chains
        ]
        cause = (
            f"the packet filter of this host ({named}) may drop what it sends, or the replies; "
            f"otherwise a firewall drops port {port} on {host} or on the way."
        )
        fix = to_copy(
            f"Allow it here, as root. If that does not help, open the port on {host}; the doctor there "
            "prints how:",
            *(f"{rule}    # on {socket.gethostname()}" for rule in rules),
        )
    waited = f" ({obstacle.waited_s:.1f} s)" if obstacle.waited_s else ""
    return Finding(
        code=code,
        severity="failed",
        fact=f"{here} {what}{waited}.",
        cause=cause,
        fix=fix,
        hosts=(socket.gethostname(), host),
        details={
            "endpoint": show_endpoint(host, port),
            "addresses": list(obstacle.addresses),
            "trouble": obstacle.trouble,
            "said": obstacle.said,
            "waited_s": round(obstacle.waited_s, 1),
        },
    )


def describe_trouble(obstacle: Obstacle, *, host: str, port: int) -> str:
    """Return a progress line on why node rank 0 has not been reached yet."""
    seconds = f"{obstacle.waited_s:.0f} s"
    return f"waiting for node rank 0 at {show_endpoint(host, port)}: {obstacle.trouble} ({obstacle.said}), {seconds}"


_Description = tuple[str, str, str]


def _dropped(obstacle: Obstacle, host: str, port: int) -> _Description:
    addresses = ", ".join(obstacle.addresses)
    return (
        f"gets no answer from {show_endpoint(host, port)} ({addresses}): packets are lost",
        (
            f"a firewall or security group drops port {port} on {host} or on the way, or the host is "
            "off; or another host has this host's address and receives the replies."
        ),
        to_copy(
            f"Open the port on {host}, as root:",
            f"{_iptables(obstacle)} -I INPUT -p tcp --dport {port} -j ACCEPT",
            f"firewall-cmd --permanent --add-port={port}/tcp && firewall-cmd --reload",
            f"# in a cloud: an inbound rule of the security group, TCP {port}",
            *_find_namesake(obstacle),
        ),
    )


def _find_namesake(obstacle: Obstacle) -> Iterator[str]:
    """Yield the command that checks whether another host has this host's address."""
    for address in obstacle.addresses[:1]:
        with contextlib.suppress(OSError):  # the route has disappeared
            own = source_address(address)
            interface = find_interface_of(own)
            if interface is not None and not interface.is_loopback and ":" not in own:
                device = shlex.quote(interface.name)
                yield f"# does another host have {own}? arping -D -c 3 -I {device} {own}    # on {socket.gethostname()}"


def _iptables(obstacle: Obstacle) -> str:
    """Return the iptables command for the IP version of the endpoint's addresses."""
    return "ip6tables" if all(":" in each for each in obstacle.addresses) else "iptables"


def _refused(obstacle: Obstacle, host: str, port: int) -> _Description:
    addresses = ", ".join(obstacle.addresses)
    own = {address for each in list_interfaces() for address in each.addresses}
    if obstacle.addresses and own.issuperset(obstacle.addresses):
        here = socket.gethostname()
        return (
            f"is refused by {show_endpoint(host, port)} ({addresses}), which is {here} itself",
            (
                f"the endpoint names {here}, but node rank 0 was not started here: two hosts have each "
                "other's --node-rank, or --rdzv-endpoint names the wrong host."
            ),
            f"Give --node-rank 0 to {here}, or name the host that has it in --rdzv-endpoint.",
        )
    return (
        f"is refused by {show_endpoint(host, port)} ({addresses})",
        f"the doctor does not run on {host} yet, it uses another port, or a firewall there rejects the connection.",
        to_copy(
            f"Check on {host} whether it listens; if it does, open the port:",
            f"ss -ltn 'sport = :{port}'",
            f"{_iptables(obstacle)} -I INPUT -p tcp --dport {port} -j ACCEPT",
        ),
    )


def _no_route(obstacle: Obstacle, host: str, port: int) -> _Description:
    addresses = ", ".join(obstacle.addresses)
    first = obstacle.addresses[0] if obstacle.addresses else host
    return (
        f"has no route to {show_endpoint(host, port)} ({addresses}): {obstacle.said}",
        'no route leads there, the host is off, or a firewall answers "prohibited".',
        to_copy(
            "Compare these, and use an address of node rank 0 in a network of this host:",
            shlex.join(["ip", "route", "get", first]),
            f"ip -br address    # on {host}",
        ),
    )


def _unresolved(obstacle: Obstacle, host: str, _port: int) -> _Description:
    silent = obstacle.trouble == "silent-resolver"
    return (
        f"cannot resolve {host}: {obstacle.said}",
        "the name server of /etc/resolv.conf does not answer."
        if silent
        else ADVICE["DS-NAME-unresolved"][0].format(given=host),
        to_copy(
            "Use the address of node rank 0 in --rdzv-endpoint, or add a line to /etc/hosts; check with:",
            COMMANDS["DS-NAME-unresolved"][0].format(name=shlex.quote(host)),
        ),
    )


def _loopback(obstacle: Obstacle, host: str, port: int) -> _Description:
    addresses = ", ".join(obstacle.addresses)
    return (
        f"resolves {show_endpoint(host, port)} to itself ({addresses})",
        ADVICE["DS-RDZV-loopback"][0].format(given=host),
        to_copy(
            "Correct that line, or use the address in --rdzv-endpoint; check with:",
            COMMANDS["DS-RDZV-loopback"][0].format(name=shlex.quote(host)),
        ),
    )


def _other_program(obstacle: Obstacle, host: str, port: int) -> _Description:
    return (
        f"connects to {show_endpoint(host, port)}, but what answers is not ddpsafe doctor: {obstacle.said}",
        "another program uses the port, or a proxy between the hosts accepts every connection.",
        to_copy(
            f"Choose another port, or check on {host} what listens:",
            COMMANDS["DS-PORT-taken"][0].format(port=port),
        ),
    )


def _other_job(obstacle: Obstacle, host: str, port: int) -> _Description:
    return (
        f"found another job at {show_endpoint(host, port)}, on {obstacle.holder}: {obstacle.said}",
        "another job uses this endpoint, or --nnodes differs from host to host.",
        "Give each job its own port, and all nodes of a job the same --nnodes.",
    )


def _duplicate(obstacle: Obstacle, host: str, port: int) -> _Description:
    return (
        f"was refused by {show_endpoint(host, port)}: its node rank is taken by {obstacle.holder}",
        "two hosts were started with the same --node-rank, or an earlier run still runs.",
        "Give each host its own --node-rank, counted from 0.",
    )


_DESCRIPTIONS: Final[dict[str, tuple[str, Callable[[Obstacle, str, int], _Description]]]] = {
    "dropped": ("DS-MESH-004", _dropped),
    "refused": ("DS-MESH-005", _refused),
    "no-route": ("DS-MESH-006", _no_route),
    "unresolved": ("DS-MESH-007", _unresolved),
    "silent-resolver": ("DS-MESH-007", _unresolved),
    "loopback": ("DS-MESH-008", _loopback),
    "other-program": ("DS-MESH-003", _other_program),
    "other-job": ("DS-MESH-013", _other_job),
    "duplicate": ("DS-MESH-002", _duplicate),
}


def check_attendance(results: Results) -> Iterator[Finding]:
    """Check which nodes joined, as node rank 0 saw it."""
    named = {*results.nodes, *results.garbled, *results.find_shadowed()}
    missing = [node for node in range(results.nnodes) if node not in named]
    doubled = {rank for ranks in results.find_duplicates().values() for rank in ranks}
    lost = [node for node in results.nodes if node not in results.reports]
    # Refused nodes are the missing ones: reporting them as not joined as well would be wrong.
    if len(missing) > count_refused(results.rejected) and not results.other_coordinator:
        yield _missing(results, missing)
    for node in lost:
        if node not in results.garbled and node not in doubled:
            yield _lost(results, node)
    if results.garbled:
        yield _garbled(results)
    seen = set()
    for each in results.rejected:
        key = (each.reason, each.greeting.hostname, each.greeting.node_rank)
        if key not in seen:
            seen.add(key)
            yield _rejected(results, each)
    # Behind address translation node rank 0 often cannot reach itself at the outer address.
    obstacle = results.obstacle
    if obstacle is not None and not results.is_translated():
        addresses = ", ".join(obstacle.addresses) or "no address"
        own = results.nodes[0].hostname
        yield Finding(
            code="DS-MESH-009",
            severity="warning" if len(results.nodes) == results.nnodes else "failed",
            fact=f"{show_endpoint(results.host, results.port)} ({addresses}) does not lead to {own}, which is node rank 0: "
            f"{obstacle.trouble} ({obstacle.said}).",
            cause="--node-rank 0 was given to a different host than the one the endpoint names.",
            fix=f"Start node rank 0 on {results.host}, or name {own} in --rdzv-endpoint.",
            hosts=(own,),
            details={"addresses": list(obstacle.addresses), "trouble": obstacle.trouble},
        )
    if results.other_coordinator:
        yield Finding(
            code="DS-MESH-002",
            severity="failed",
            fact=f"{results.nodes[0].hostname} is node rank 0, and so is {results.other_coordinator}, where "
            f"{show_endpoint(results.host, results.port)} leads.",
            cause="two hosts were started with --node-rank 0.",
            fix="Give each host its own --node-rank; 0 belongs to the host that the endpoint names.",
            hosts=(results.other_coordinator,),
            details={"node_rank": 0},
        )


def count_refused(rejected: Iterable[Rejected]) -> int:
    """Count the processes that were refused because they do not belong to this job."""
    return len(
        {
            (each.greeting.hostname, each.greeting.pid)
            for each in rejected
            if each.reason in ("duplicate", "other-job", "version")
        }
    )


def _missing(results: Results, missing: list[int]) -> Finding:
    labels = ", ".join(results.label(node) for node in missing)
    coordinator, joined = results.nodes[0], len(results.nodes)
    own = results.reports[0].chains if 0 in results.reports else ()
    incoming = [chain for chain in own if chain.hook == "input" and not results.at_store]
    if results.at_store:
        cause = "the first rank there was not started, has failed, or is slow to start."
        fix = "Check the logs of the ranks there."
    else:
        filtered = (
            f", or the packet filter of {coordinator.hostname} "
            f"({', '.join(map(describe_chain, incoming))}) blocks it"
            if incoming
            else ""
        )
        cause = (
            "the doctor was not started there, it waits for another endpoint, or it cannot reach this "
            f"one{filtered}; its output there shows which."
        )
        where = shlex.quote(show_endpoint(results.host, results.port))
        fix = to_copy(
            "Start it there and read its output:",
            *(
                f"ddpsafe doctor --nnodes {results.nnodes} --node-rank {node} --rdzv-endpoint {where}"
                for node in missing[:4]
            ),
            *(
                f"{allow(chain, '', results.port, results.port)}    # on {coordinator.hostname}"
                for chain in incoming
            ),
        )
    return Finding(
        code="DS-MESH-001",
        severity="failed",
        fact=f"{joined} of {results.nnodes} nodes joined within {results.waited_s:.1f} s; missing: {labels}.",
        cause=cause,
        fix=fix,
        hosts=results.hostnames(missing),
        details={"missing_node_ranks": missing, "waited_s": round(results.waited_s, 1)},
    )


def _lost(results: Results, node: int) -> Finding:
    return Finding(
        code="DS-MESH-010",
        severity="failed",
        fact=f"{results.label(node)} joined and was lost during the check.",
        cause=f"the {_process(at_store=results.at_store)} there was ended, or the host crashed or lost "
        "its network.",
        fix=to_copy(
            f"Check whether the host is up and what its {_process(at_store=results.at_store)} printed last:",
            shlex.join(["ping", "-c", "3", results.nodes[node].announced.address]),
        ),
        hosts=results.hostnames([node]),
        details={"node_rank": node},
    )


def _rejected(results: Results, each: Rejected) -> Finding:
    who, rank = each.greeting.hostname, each.greeting.node_rank
    if each.reason == "duplicate":
        return Finding(
            code="DS-MESH-002",
            severity="failed",
            fact=f"{who} tried to join as node rank {rank}, which {each.holder} "
            f"(pid {each.holder_pid}) already has.",
            cause="two hosts were started with the same --node-rank, or an earlier run still runs.",
            fix=f"Give each of the {results.nnodes} hosts its own --node-rank, 0 to {results.nnodes - 1}.",
            hosts=(who, each.holder),
            details={"node_rank": rank},
        )
    if each.reason == "secret":
        return no_secret(f"{who} (node rank {rank}) tried to join", hosts=(who,))
    if each.reason == "version":
        what = f"its doctor has protocol version {each.greeting.version}, node rank 0 another one"
        return other_version(f"{who} (node rank {rank}) was refused: {what}", hosts=(who,))
    if each.reason == "late":
        return late(
            f"{who} (node rank {rank}) tried to join", waited="the others had stopped waiting"
        )
    return Finding(
        code="DS-MESH-013",
        severity="failed",
        fact=f"{who} tried to join as node rank {rank} of {each.greeting.nnodes}"
        f" (job {each.greeting.job or 'without a name'}); this job has {results.nnodes} nodes.",
        cause="another job uses this endpoint, or --nnodes differs from host to host.",
        fix=f"Start it on {who} with --nnodes {results.nnodes}, or give the other job its own port.",
        hosts=(who,),
        details={"nnodes_there": each.greeting.nnodes, "nnodes_here": results.nnodes},
    )


def late(who: str, *, waited: str) -> Finding:
    """Return the finding that a node joined too late."""
    return Finding(
        code="DS-MESH-012",
        severity="failed",
        fact=f"{who} after {waited}.",
        cause="it was started later than the doctor waits.",
        fix="Start all nodes again, at about the same time, or give the doctor a longer --timeout.",
    )


def other_version(what: str, *, hosts: tuple[str, ...]) -> Finding:
    """Return the finding that a node has another version of the doctor."""
    return Finding(
        code="DS-MESH-040",
        severity="failed",
        fact=f"{what}.",
        cause="another version of ddpsafe is installed there.",
        fix=to_copy(
            f"Install {metadata.version('ddpsafe')}, or one other version, on every host, from the same "
            "wheel or checkout:",
            "pip install ddpsafe-*.whl",
        ),
        hosts=hosts,
    )


def _process(*, at_store: bool) -> str:
    return "first rank" if at_store else "doctor"


def coordinator_lost(host: str, why: str, *, at_store: bool) -> Finding:
    """Return the finding that node rank 0 was lost during the check."""
    process = _process(at_store=at_store)
    return Finding(
        code="DS-MESH-011",
        severity="failed",
        fact=f"{host} (node rank 0) was lost during the check: {why}.",
        cause=f"the {process} there was ended, or the host crashed or lost its network.",
        fix=f"Check what the {process} on {host} printed last, and start it on all nodes again.",
        hosts=(host,),
        details={"node_rank": 0, "said": why},
    )


def cannot_serve(exc: OSError, *, port: int, owner: str) -> Finding:
    """Return the finding that node rank 0 cannot listen on the endpoint's port."""
    taken = exc.errno == errno.EADDRINUSE
    return Finding(
        code="DS-MESH-009",
        severity="failed",
        fact=f"Node rank 0 cannot listen on port {port}: {exc.strerror or exc}{owner}.",
        cause=ADVICE["DS-PORT-taken"][0] if taken else "this process may not use the port.",
        fix=to_copy(
            "Choose another port for all nodes, or end the process that uses it:",
            COMMANDS["DS-PORT-taken"][0].format(port=port),
        ),
        details={"port": port, "error": errno.errorcode.get(exc.errno or 0, str(exc))},
    )


def _garbled(results: Results) -> Finding:
    topics = {"hello": "itself", "mesh": "its connections", "reduced": "the all-reduce"}
    named = ", ".join(
        f"{results.label(rank)} about {topics[topic]}"
        for rank, topic in sorted(results.garbled.items())
    )
    return Finding(
        code="DS-MESH-014",
        severity="failed",
        fact=f"A node sent a message that the doctor never sends: {named}.",
        cause="another version of ddpsafe runs there, or another program has taken the node's place.",
        fix="Start the same version of ddpsafe on every host; if others can reach the endpoint, "
        "give all nodes one --secret-file.",
        hosts=results.hostnames(results.garbled),
        details={
            "topics": {results.name_of(rank): topic for rank, topic in results.garbled.items()}
        },
    )


def coordinator_garbled(host: str, why: str) -> Finding:
    """Return the finding that node rank 0 sent an invalid message."""
    return Finding(
        code="DS-MESH-014",
        severity="failed",
        fact=f"{host} (node rank 0) sent a message that the doctor never sends: {why}.",
        cause="another version of ddpsafe runs there, or another program has taken its place.",
        fix="Start the same version of ddpsafe on every host; if others can reach the endpoint, "
        "give all nodes one --secret-file.",
        hosts=(host,),
        details={"node_rank": 0},
    )


def no_secret(who: str, *, hosts: tuple[str, ...] = ()) -> Finding:
    """Return the finding that a node does not have the secret of the others."""
    return Finding(
        code="DS-MESH-015",
        severity="failed",
        fact=f"{who} without the secret of the others.",
        cause="--secret-file or DDPSAFE_JOB_SECRET is missing on one of them, or differs.",
        fix="Give every node the same file: `ddpsafe doctor --secret-file FILE …`.",
        hosts=hosts,
    )
