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
from ddpsafe.doctor._findings import Finding, failed, to_copy, warning
from ddpsafe.doctor._mesh.findings.fixes import allow, describe_chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpsafe.doctor._mesh.findings.observations import Results
    from ddpsafe.doctor._mesh.protocol import FilterChain, Refusal, Rejected
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

    The chains of this host's packet filter are None if they were not or cannot be read.
    """
    own_name = socket.gethostname()
    here = f"{own_name} (node rank {node_rank} of {nnodes})"
    endpoint = show_endpoint(host, port)
    trouble: str = obstacle.trouble
    addresses = obstacle.addresses
    if trouble == "refused" and addresses:
        own = {address for interface in list_interfaces() for address in interface.addresses}
        # Node rank 0 was started on another host, and no firewall is involved.
        if own.issuperset(addresses):
            trouble = "refused-by-itself"
    facts = {
        "endpoint": endpoint,
        "given": host,
        "host": host,
        "name": shlex.quote(host),
        "port": port,
        "here": own_name,
        "addresses": ", ".join(addresses),
        "address": shlex.quote(addresses[0] if addresses else host),
        "iptables": "ip6tables" if all(":" in address for address in addresses) else "iptables",
        "said": obstacle.said,
        "holder": obstacle.holder or host,
        "waited": f" ({obstacle.waited_s:.1f} s)" if obstacle.waited_s else "",
        **_general_facts(nnodes),
    }
    code, *texts = _OBSTACLES[trouble]
    what, cause, *fix = (text.format(**facts) for text in texts)
    if trouble == "dropped":
        fix += _find_namesake(obstacle)
    if chains and addresses:
        # Name this host's packet filter first: it may drop what this host sends, or the replies.
        named = ", ".join(map(describe_chain, chains))
        cause = (
            f"the packet filter of this host ({named}) may drop what it sends, or the replies; "
            f"otherwise a firewall drops port {port} on {host} or on the way."
        )
        fix = [
            (
                f"Allow it here, as root. If that does not help, open the port on {host}; the doctor there "
                "prints how:"
            )
        ]
        for chain in chains:
            side = "dport" if chain.hook == "output" else "sport"
            fix.append(f"{allow(chain, addresses[0], port, port, side)}    # on {own_name}")
    return failed(
        code,
        f"{here} {what}.",
        cause=cause,
        fix=to_copy(*fix),
        hosts=(own_name, host),
        endpoint=endpoint,
        addresses=list(addresses),
        trouble=obstacle.trouble,
        said=obstacle.said,
        waited_s=round(obstacle.waited_s, 1),
    )


def describe_trouble(obstacle: Obstacle, *, host: str, port: int) -> str:
    """Return a progress line on why node rank 0 has not been reached yet."""
    seconds = f"{obstacle.waited_s:.0f} s"
    return f"waiting for node rank 0 at {show_endpoint(host, port)}: {obstacle.trouble} ({obstacle.said}), {seconds}"


_USE_THE_ADDRESS: Final = (
    "Use the address of node rank 0 in --rdzv-endpoint, or add a line to /etc/hosts; check with:"
)

_OBSTACLES: Final[dict[str, tuple[str, ...]]] = {
    "dropped": (
        "DS-MESH-004",
        "gets no answer from {endpoint} ({addresses}): packets are lost{waited}",
        (
            "a firewall or security group drops port {port} on {host} or on the way, or the host is "
            "off; or another host has this host's address and receives the replies."
        ),
        "Open the port on {host}, as root:",
        "{iptables} -I INPUT -p tcp --dport {port} -j ACCEPT",
        "firewall-cmd --permanent --add-port={port}/tcp && firewall-cmd --reload",
        "# in a cloud: an inbound rule of the security group, TCP {port}",
    ),
    "refused": (
        "DS-MESH-005",
        "is refused by {endpoint} ({addresses}){waited}",
        (
            "the doctor does not run on {host} yet, it uses another port, or a firewall there rejects the "
            "connection."
        ),
        "Check on {host} whether it listens; if it does, open the port:",
        "ss -ltn 'sport = :{port}'",
        "{iptables} -I INPUT -p tcp --dport {port} -j ACCEPT",
    ),
    "refused-by-itself": (
        "DS-MESH-005",
        "is refused by {endpoint} ({addresses}), which is {here} itself{waited}",
        (
            "the endpoint names {here}, but node rank 0 was not started here: two hosts have each "
            "other's --node-rank, or --rdzv-endpoint names the wrong host."
        ),
        "Give --node-rank 0 to {here}, or name the host that has it in --rdzv-endpoint.",
    ),
    "no-route": (
        "DS-MESH-006",
        "has no route to {endpoint} ({addresses}): {said}{waited}",
        'no route leads there, the host is off, or a firewall answers "prohibited".',
        "Compare these, and use an address of node rank 0 in a network of this host:",
        "ip route get {address}",
        "ip -br address    # on {host}",
    ),
    "unresolved": (
        "DS-MESH-007",
        "cannot resolve {host}: {said}{waited}",
        ADVICE["DS-NAME-unresolved"][0],
        _USE_THE_ADDRESS,
        *COMMANDS["DS-NAME-unresolved"],
    ),
    "silent-resolver": (
        "DS-MESH-007",
        "cannot resolve {host}: {said}{waited}",
        "the name server of /etc/resolv.conf does not answer.",
        _USE_THE_ADDRESS,
        *COMMANDS["DS-NAME-unresolved"],
    ),
    "loopback": (
        "DS-MESH-008",
        "resolves {endpoint} to itself ({addresses}){waited}",
        ADVICE["DS-RDZV-loopback"][0],
        "Correct that line, or use the address in --rdzv-endpoint; check with:",
        *COMMANDS["DS-RDZV-loopback"],
    ),
    "other-program": (
        "DS-MESH-003",
        "connects to {endpoint}, but what answers is not ddpsafe doctor: {said}{waited}",
        "another program uses the port, or a proxy between the hosts accepts every connection.",
        "Choose another port, or check on {host} what listens:",
        *COMMANDS["DS-PORT-taken"],
    ),
    "other-job": (
        "DS-MESH-013",
        "found another job at {endpoint}, on {holder}: {said}{waited}",
        "another job uses this endpoint, or --nnodes differs from host to host.",
        "Give each job its own port, and all nodes of a job the same --nnodes.",
    ),
    "duplicate": (
        "DS-MESH-002",
        "was refused by {endpoint}: its node rank is taken by {holder}{waited}",
        "two hosts were started with the same --node-rank, or an earlier run still runs.",
        "Give each of the {nnodes} hosts its own --node-rank, 0 to {last}.",
    ),
    "late": (
        "DS-MESH-012",
        "reached {endpoint} after the others had stopped waiting",
        "it was started later than the doctor waits.",
        "Start all nodes again, at about the same time, or give the doctor a longer --timeout.",
    ),
    "secret": (
        "DS-MESH-015",
        "reached {endpoint} without the secret of the others",
        "--secret-file or DDPSAFE_JOB_SECRET is missing on one of them, or differs.",
        "Give every node the same file: `ddpsafe doctor --secret-file FILE …`.",
    ),
    "version": (
        "DS-MESH-040",
        "is refused by {holder} at {endpoint}: {said}",
        "another version of ddpsafe is installed there.",
        "Install {version}, or one other version, on every host, from the same wheel or checkout:",
        "pip install ddpsafe-*.whl",
    ),
}
"""For each trouble: the code, what it is, its cause, what to do, and lines to copy."""


def _general_facts(nnodes: int) -> dict[str, object]:
    return {"nnodes": nnodes, "last": nnodes - 1, "version": metadata.version("ddpsafe")}


def _find_namesake(obstacle: Obstacle) -> Iterator[str]:
    """Yield the command that checks whether another host has this host's address."""
    for address in obstacle.addresses[:1]:
        with contextlib.suppress(OSError):  # the route has disappeared
            own = source_address(address)
            interface = find_interface_of(own)
            if interface is not None and not interface.is_loopback and ":" not in own:
                command = f"arping -D -c 3 -I {shlex.quote(interface.name)} {own}"
                yield f"# does another host have {own}? {command}    # on {socket.gethostname()}"


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
    for rejected in results.rejected:
        key = (rejected.reason, rejected.greeting.hostname, rejected.greeting.node_rank)
        if key not in seen:
            seen.add(key)
            yield _rejected(results, rejected)
    endpoint = show_endpoint(results.host, results.port)
    own_name = results.nodes[0].hostname
    obstacle = results.obstacle
    # Behind address translation node rank 0 often cannot reach itself at the outer address.
    if obstacle is not None and not results.is_translated():
        addresses = ", ".join(obstacle.addresses) or "no address"
        yield (warning if len(results.nodes) == results.nnodes else failed)(
            "DS-MESH-009",
            f"{endpoint} ({addresses}) does not lead to {own_name}, which is node rank 0: "
            f"{obstacle.trouble} ({obstacle.said}).",
            cause="--node-rank 0 was given to a different host than the one the endpoint names.",
            fix=f"Start node rank 0 on {results.host}, or name {own_name} in --rdzv-endpoint.",
            hosts=(own_name,),
            addresses=list(obstacle.addresses),
            trouble=obstacle.trouble,
        )
    if results.other_coordinator:
        yield failed(
            "DS-MESH-002",
            f"{own_name} is node rank 0, and so is {results.other_coordinator}, where {endpoint} leads.",
            cause="two hosts were started with --node-rank 0.",
            fix="Give each host its own --node-rank; 0 belongs to the host that the endpoint names.",
            hosts=(results.other_coordinator,),
            node_rank=0,
        )


def count_refused(rejected: Iterable[Rejected]) -> int:
    """Count the processes that were refused because they do not belong to this job."""
    return len(
        {
            (node.greeting.hostname, node.greeting.pid)
            for node in rejected
            if node.reason in ("duplicate", "other-job", "version")
        }
    )


def _missing(results: Results, missing: list[int]) -> Finding:
    coordinator = results.nodes[0].hostname
    labels = ", ".join(map(results.label, missing))
    if results.at_store:
        cause = "the first rank there was not started, has failed, or is slow to start."
        fix = "Check the logs of the ranks there."
    else:
        chains = results.reports[0].chains if 0 in results.reports else ()
        incoming = [chain for chain in chains if chain.hook == "input"]
        named = ", ".join(map(describe_chain, incoming))
        filtered = f", or the packet filter of {coordinator} ({named}) blocks it"
        cause = (
            "the doctor was not started there, it waits for another endpoint, or it cannot reach this "
            f"one{filtered if incoming else ''}; its output there shows which."
        )
        endpoint = shlex.quote(show_endpoint(results.host, results.port))
        fix = to_copy(
            "Start it there and read its output:",
            *(
                f"ddpsafe doctor --nnodes {results.nnodes} --node-rank {node} --rdzv-endpoint {endpoint}"
                for node in missing[:4]
            ),
            *(
                f"{allow(chain, '', results.port, results.port)}    # on {coordinator}"
                for chain in incoming
            ),
        )
    return failed(
        "DS-MESH-001",
        f"{len(results.nodes)} of {results.nnodes} nodes joined within {results.waited_s:.1f} s; "
        f"missing: {labels}.",
        cause=cause,
        fix=fix,
        hosts=results.hostnames(missing),
        missing_node_ranks=missing,
        waited_s=round(results.waited_s, 1),
    )


def _lost(results: Results, node: int) -> Finding:
    process = "first rank" if results.at_store else "doctor"
    return failed(
        "DS-MESH-010",
        f"{results.label(node)} joined and was lost during the check.",
        cause=f"the {process} there was ended, or the host crashed or lost its network.",
        fix=to_copy(
            f"Check whether the host is up and what its {process} printed last:",
            shlex.join(["ping", "-c", "3", results.nodes[node].announced.address]),
        ),
        hosts=results.hostnames([node]),
        node_rank=node,
    )


def _rejected(results: Results, rejected: Rejected) -> Finding:
    """Return the finding on a node that was refused; that node's own is in `_OBSTACLES`, too."""
    greeting, reason, nnodes = rejected.greeting, rejected.reason, results.nnodes
    host, rank = greeting.hostname, greeting.node_rank
    who = f"{host} (node rank {rank})"
    what: dict[Refusal, str] = {
        "duplicate": f"{host} tried to join as node rank {rank}, which {rejected.holder} "
        f"(pid {rejected.holder_pid}) already has",
        "other-job": f"{host} tried to join as node rank {rank} of {greeting.nnodes} "
        f"(job {greeting.job or 'without a name'}); this job has {nnodes} nodes",
        "late": f"{who} tried to join after the others had stopped waiting",
        "secret": f"{who} tried to join without the secret of the others",
        "version": f"{who} was refused: its doctor has protocol version {greeting.version}, node rank 0 "
        "another one",
    }
    code, _, cause, *fix = _OBSTACLES[reason]
    if reason == "other-job":
        fix = [f"Start it on {host} with --nnodes {nnodes}, or give the other job its own port."]
    return failed(
        code,
        f"{what[reason]}.",
        cause=cause,
        fix=to_copy(*(line.format(**_general_facts(nnodes)) for line in fix)),
        hosts=(host, rejected.holder) if rejected.holder else (host,),
        node_rank=rank,
        nnodes_there=greeting.nnodes,
        nnodes_here=nnodes,
    )


def coordinator_lost(host: str, why: str, *, at_store: bool) -> Finding:
    """Return the finding that node rank 0 was lost during the check."""
    process = "first rank" if at_store else "doctor"
    return failed(
        "DS-MESH-011",
        f"{host} (node rank 0) was lost during the check: {why}.",
        cause=f"the {process} there was ended, or the host crashed or lost its network.",
        fix=f"Check what the {process} on {host} printed last, and start it on all nodes again.",
        hosts=(host,),
        node_rank=0,
        said=why,
    )


def cannot_serve(exc: OSError, *, port: int, owner: str) -> Finding:
    """Return the finding that node rank 0 cannot listen on the endpoint's port."""
    taken = exc.errno == errno.EADDRINUSE
    return failed(
        "DS-MESH-009",
        f"Node rank 0 cannot listen on port {port}: {exc.strerror or exc}{owner}.",
        cause=ADVICE["DS-PORT-taken"][0] if taken else "this process may not use the port.",
        fix=to_copy(
            "Choose another port for all nodes, or end the process that uses it:",
            COMMANDS["DS-PORT-taken"][0].format(port=port),
        ),
        port=port,
        error=errno.errorcode.get(exc.errno or 0, str(exc)),
    )


def garbled(who: str, what: str, hosts: tuple[str, ...], **details: object) -> Finding:
    """Return the finding that a node sent an invalid message."""
    return failed(
        "DS-MESH-014",
        f"{who} sent a message that the doctor never sends: {what}.",
        cause="another version of ddpsafe runs there, or another program has taken its place.",
        fix="Start the same version of ddpsafe on every host; if others can reach the endpoint, "
        "give all nodes one --secret-file.",
        hosts=hosts,
        **details,
    )


def _garbled(results: Results) -> Finding:
    topics = {"hello": "itself", "mesh": "its connections", "reduced": "the all-reduce"}
    named = ", ".join(
        f"{results.label(rank)} about {topics[topic]}"
        for rank, topic in sorted(results.garbled.items())
    )
    by_name = {results.name_of(rank): topic for rank, topic in results.garbled.items()}
    return garbled("A node", named, results.hostnames(results.garbled), topics=by_name)
