"""Environment variables as a rank reads them: of launchers, threads, debugging, and MASTER_*."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from ddpsafe._config.endpoint import DEFAULT_PORT, parse_endpoint
from ddpsafe._errors import ConfigError
from ddpsafe._host import as_setting, count_cores, plain_host, show_endpoint
from ddpsafe._world import find_world
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._subject import find_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_RANK_VARIABLES: Final = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
)
_DEBUG_LEVELS: Final = frozenset({"OFF", "INFO", "DETAIL"})
_RENAMED: Final = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
}
_SLOW: Final = {
    "CUDA_LAUNCH_BLOCKING": "every kernel launch waits for the kernel to finish",
    "NCCL_P2P_DISABLE": "GPUs of this host exchange data through memory instead of directly",
    "NCCL_SHM_DISABLE": "GPUs of this host exchange data through the network",
    "NCCL_IB_DISABLE": "hosts exchange data over TCP although there may be InfiniBand",
}


def check_launcher(subject: Subject) -> Iterator[Finding]:
    """Read the launcher's variables as `launch` would."""
    try:
        world = find_world(subject.env)
    except ConfigError as error:
        names = [name for name in _RANK_VARIABLES if name in os.environ]
        yield failed(
            "DS-ENV-001",
            error.explanation.what,
            cause=error.explanation.cause or "variables left over in the shell.",
            fix=to_copy(
                "Start the script with a launcher that sets all of them, or unset them:",
                f"unset {' '.join(names)}",
            )
            if names
            else error.explanation.fix or "Start the script with a launcher.",
        )
        return
    if world is None:
        yield ok("DS-ENV-001", "No launcher started this process.")
    else:
        yield ok("DS-ENV-001", f"Started by {world.started_by} as {world}.", rank=world.rank)


def check_leftovers(subject: Subject) -> Iterator[Finding]:
    """Check for variables that make a launch attach to a job that does not exist."""
    leftovers = [name for name in _RANK_VARIABLES if name in subject.env]
    if "TORCHELASTIC_USE_AGENT_STORE" in subject.env:
        leftovers.append("TORCHELASTIC_USE_AGENT_STORE")
    by_launcher = {"TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "DDPSAFE_LAUNCH_ID"} & subject.env.keys()
    is_complete = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= subject.env.keys()
    # All four are what torch's env:// method reads, and some launchers set nothing else.
    if (
        not leftovers
        or by_launcher
        or (is_complete and "TORCHELASTIC_USE_AGENT_STORE" not in leftovers)
    ):
        yield ok("DS-ENV-002", "No variables of another launch are left over.")
        return
    settings = ", ".join(f"{name}={subject.env[name]!r}" for name in leftovers)
    effect = (
        "`launch` takes this process for a rank and starts none"
        if "RANK" in leftovers
        else "scripts that read them take this process for a rank"
    )
    yield warning(
        "DS-ENV-002",
        f"No launcher runs here, yet {settings} {'is' if len(leftovers) == 1 else 'are'} set: {effect}.",
        cause="an `export` in this shell or its start-up files, or a copied environment.",
        fix=to_copy("Unset them:", f"unset {' '.join(leftovers)}"),
        variables=leftovers,
    )


def check_threads(subject: Subject) -> Iterator[Finding]:
    """Compare the threads of all ranks with the cores."""
    text = subject.env.get("OMP_NUM_THREADS")
    cores = count_cores()
    fitting = max(1, cores // subject.nproc)
    if text is None:
        yield ok(
            "DS-ENV-005",
            f"OMP_NUM_THREADS is not set; `launch` gives each of {subject.nproc} ranks {fitting} "
            f"of {cores} cores.",
        )
        return
    # OpenMP also accepts a list, one number for each level of nesting.
    place = find_place(subject.config, "OMP_NUM_THREADS")
    first = text.split(",")[0].strip()
    threads = int(first) if first.isdecimal() else 0
    fix = to_copy(
        "Let the launch choose, or set it:",
        place.unset_line("OMP_NUM_THREADS"),
        place.set_line("OMP_NUM_THREADS", str(fitting)),
    )
    if threads < 1:
        cause = "a typo; libraries read such a value in different ways, and some use all cores."
        yield warning(
            "DS-ENV-005", f"OMP_NUM_THREADS={text!r} is not a number.", cause=cause, fix=fix
        )
    elif threads > 1 and threads * subject.nproc > cores:
        yield warning(
            "DS-ENV-005",
            f"OMP_NUM_THREADS={threads} for {subject.nproc} ranks makes "
            f"{threads * subject.nproc} threads on {cores} cores.",
            cause="the variable was set for one process, not for one of several.",
            fix=fix,
            cores=cores,
        )
    else:
        yield ok(
            "DS-ENV-005", f"OMP_NUM_THREADS={threads}: {subject.nproc} ranks fit {cores} cores."
        )


def check_debugging(subject: Subject) -> Iterator[Finding]:
    """Check for debugging variables that break or slow down a job."""
    level = subject.env.get("TORCH_DISTRIBUTED_DEBUG")
    if level is not None and level.upper() not in _DEBUG_LEVELS:
        yield failed(
            "DS-ENV-006",
            f"TORCH_DISTRIBUTED_DEBUG={level!r} is not a level; torch ends every rank that reads it.",
            cause="a typo; the levels are OFF, INFO and DETAIL.",
            fix=to_copy(
                "Set a valid level, or unset it:",
                find_place(subject.config, "TORCH_DISTRIBUTED_DEBUG").set_line(
                    "TORCH_DISTRIBUTED_DEBUG", "INFO"
                ),
            ),
        )
    if subject.at_launch:
        return
    slow = {name: why for name, why in _SLOW.items() if subject.env.get(name, "0") not in {"", "0"}}
    old = {name: new for name, new in _RENAMED.items() if name in subject.env}
    for name, why in slow.items():
        yield warning(
            "DS-ENV-006",
            f"{name}={subject.env[name]!r} slows the job down: {why}.",
            cause="it was set for debugging and is still set.",
            fix=to_copy(
                "If you no longer need it:", find_place(subject.config, name).unset_line(name)
            ),
        )
    for name, new in old.items():
        yield warning(
            "DS-ENV-006",
            f"{name} is the old name of {new}, and torch warns about it or ignores it.",
            cause="advice written for torch before 2.2.",
            fix=to_copy(
                "Rename it:", f"export {as_setting(new, subject.env[name])}", f"unset {name}"
            ),
        )
    if not slow and not old:
        yield ok("DS-ENV-006", "No debugging variable slows the job down.")


_PORTS: Final = range(1024, 65536)


def check_address(subject: Subject) -> Iterator[Finding]:
    """Check MASTER_ADDR as written; whether it resolves is DS-NAME-002."""
    host = subject.env.get("MASTER_ADDR")
    if host is None:
        yield ok("DS-ENV-003", "MASTER_ADDR is not set; `launch` sets it for its ranks.")
        return
    try:
        parsed = parse_endpoint(show_endpoint(plain_host(host), DEFAULT_PORT))
    except ValidationError as error:
        yield _unusable(subject, host, error)
        return
    if subject.nnodes > 1 and parsed.is_loopback:
        yield _loopback(subject, host)
    elif plain_host(host) != host:
        yield warning(
            "DS-ENV-003",
            f"MASTER_ADDR={host!r} has brackets: ddpsafe accepts them, torch itself does not.",
            cause="an IPv6 address is written like this in front of a port.",
            fix=to_copy(
                "Write the address alone:",
                find_place(subject.config, "MASTER_ADDR").set_line("MASTER_ADDR", plain_host(host)),
            ),
        )
    else:
        yield ok("DS-ENV-003", f"MASTER_ADDR={host!r} can be read.")


def _severity(subject: Subject) -> Callable[..., Finding]:
    """Return `failed`, or `warning` if an explicit endpoint overrides MASTER_ADDR."""
    return failed if subject.config.rendezvous.endpoint is None else warning


def _unusable(subject: Subject, host: str, error: ValidationError) -> Finding:
    context = error.errors()[0].get("ctx", {})
    example = host.strip().strip("[]") if host.strip().strip("[]") != host else "gpu-01"
    return _severity(subject)(
        "DS-ENV-003",
        f"MASTER_ADDR={host!r} is not a host: {context.get('why', 'it cannot be read')}.",
        cause="a line break from a command's output, a URL, or an address with its port.",
        fix=to_copy(
            "Write the host alone, as a name or an address:",
            f"export {as_setting('MASTER_ADDR', example)}",
        ),
    )


def _loopback(subject: Subject, host: str) -> Finding:
    return _severity(subject)(
        "DS-ENV-003",
        f"MASTER_ADDR={host!r} is loopback: each of the {subject.nnodes} nodes would connect to itself.",
        cause="a script written for one machine.",
        fix=to_copy(
            "Set it to the first node's name or address on all nodes; this prints it on that node:",
            "hostname -I",
        ),
    )


def check_port(subject: Subject) -> Iterator[Finding]:
    """Check MASTER_PORT as written; whether it is free is DS-PORT-001."""
    text = subject.env.get("MASTER_PORT")
    if text is None:
        yield ok("DS-ENV-004", "MASTER_PORT is not set; `launch` sets it for its ranks.")
        return
    is_number = text.isascii() and text.isdecimal()
    if is_number and int(text) in _PORTS:
        yield ok("DS-ENV-004", f"MASTER_PORT={text} can be used.")
        return
    why = "not a number" if not is_number else "outside 1024 to 65535"
    yield failed(
        "DS-ENV-004",
        f"MASTER_PORT={text!r} is {why}.",
        cause="a typo; ports below 1024 need root, and the highest port is 65535.",
        fix=to_copy("Set a valid port, the same on all nodes:", "export MASTER_PORT=29500"),
    )


CHECKS: Final[tuple[Check, ...]] = (
    check_launcher,
    check_leftovers,
    check_threads,
    check_debugging,
    check_address,
    check_port,
)
