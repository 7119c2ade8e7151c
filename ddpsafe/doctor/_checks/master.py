"""MASTER_ADDR and MASTER_PORT, as a rank under torchrun, Slurm or a hand-written script reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from ddpsafe._config.endpoint import DEFAULT_PORT, parse_endpoint
from ddpsafe.doctor._report import Finding, failed, ok, to_copy, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._context import Subject

_PORTS: Final = range(1024, 65536)


def check_address(subject: Subject) -> Iterator[Finding]:
    """Judge MASTER_ADDR as written; whether it resolves is DS-NAME-002."""
    host = subject.env.get("MASTER_ADDR")
    if host is None:
        yield ok("DS-ENV-003", "MASTER_ADDR is not set; `launch` sets it for its ranks.")
        return
    try:
        parsed = parse_endpoint(f"{host}:{DEFAULT_PORT}")
    except ValidationError as error:
        yield _unusable(subject, host, error)
        return
    if subject.nnodes > 1 and parsed.is_loopback:
        yield _loopback(subject, host)
    else:
        yield ok("DS-ENV-003", f"MASTER_ADDR={host!r} can be read.")


def _judge(subject: Subject) -> Callable[..., Finding]:
    """Return how bad it is: an endpoint that is given by hand goes before the variables."""
    return failed if subject.config.rendezvous.endpoint is None else warning


def _unusable(subject: Subject, host: str, error: ValidationError) -> Finding:
    context = error.errors()[0].get("ctx", {})
    example = host.strip().strip("[]") if host.strip().strip("[]") != host else "gpu-01"
    return _judge(subject)(
        "DS-ENV-003",
        f"MASTER_ADDR={host!r} is not a host: {context.get('why', 'it cannot be read')}.",
        cause="a line break of a command's output, an IPv6 address in brackets, or a URL.",
        fix=to_copy(
            "Write the host alone, as a name or an address:", f"export MASTER_ADDR={example}"
        ),
    )


def _loopback(subject: Subject, host: str) -> Finding:
    return _judge(subject)(
        "DS-ENV-003",
        f"MASTER_ADDR={host!r} is each node itself, so {subject.nnodes} nodes never meet there.",
        cause="a script written for one machine.",
        fix=to_copy(
            "Write the first node's name or address on all nodes; this prints it there:",
            "hostname -I",
        ),
    )


def check_port(subject: Subject) -> Iterator[Finding]:
    """Judge MASTER_PORT as written; whether it is free is DS-PORT-001."""
    text = subject.env.get("MASTER_PORT")
    if text is None:
        yield ok("DS-ENV-004", "MASTER_PORT is not set; `launch` sets it for its ranks.")
        return
    is_number = text.isascii() and text.isdecimal()
    if is_number and int(text) in _PORTS:
        yield ok("DS-ENV-004", f"MASTER_PORT={text} can be used.")
        return
    why = "no number" if not is_number else "outside of 1024 to 65535"
    yield failed(
        "DS-ENV-004",
        f"MASTER_PORT={text!r} is {why}.",
        cause="a typing error; ports below 1024 need root, and ports end at 65535.",
        fix=to_copy("Write a port, the same on all nodes:", "export MASTER_PORT=29500"),
    )


CHECKS: Final[tuple[Check, ...]] = (check_address, check_port)
