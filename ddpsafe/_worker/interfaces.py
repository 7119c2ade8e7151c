"""Which network interface this rank's libraries talk on."""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._bounded import BoundedCall
from ddpsafe._clock import Deadline
from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._interfaces import (
    find_address_towards,
    find_interface_of,
    interface_variables,
    list_names,
)
from ddpsafe._worker import environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._worker.endpoint import Endpoint

logger = logging.getLogger(__name__)

_RESOLVE: Final = timedelta(seconds=5)


def prefer(variables: Mapping[str, str]) -> None:
    """Set variables that the user has not set, for as long as the process group lives."""
    environment.borrow({name: text for name, text in variables.items() if name not in os.environ})


def choose(asked: str | None, endpoint: Endpoint, *, deadline: Deadline) -> None:
    """Keep gloo, NCCL and TensorPipe on one interface, as far as the user has not said otherwise.

    Args:
        asked: ``Rendezvous.interface``: a name, ``"auto"``, or None to leave it to the libraries.
        endpoint: Where rank 0 is; its name has been resolved before.
        deadline: When to stop waiting for a name server all the same.

    Raises:
        ConfigError: The interface that was asked for is not there.
    """
    if asked is None:
        return
    name = _find_way(endpoint, deadline) if asked == "auto" else _require(asked)
    if name is None:
        logger.warning("no interface leads to %s: gloo and NCCL choose by themselves", endpoint)
        return
    prefer(interface_variables(name))


def _require(name: str) -> str:
    existing = list_names()
    if name in existing:
        return name
    what = f"rendezvous.interface={name!r}: {socket.gethostname()} has no such interface."
    cause = "names of interfaces differ from host to host."
    fix = f'write interface="auto", or one of {", ".join(existing)}.'
    raise ConfigError(Explanation(what, cause=cause, fix=fix))


def _find_way(endpoint: Endpoint, deadline: Deadline) -> str | None:
    lookup = BoundedCall(
        lambda: socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM),
        name="ddpsafe-resolve",
    )
    addresses: list[str] = []
    if lookup.wait(Deadline.after(_RESOLVE).earlier(deadline).remaining_s()):
        try:
            addresses = [str(entry[4][0]) for entry in lookup.result()]
        except OSError:  # an address that this host cannot look up: the default route decides
            addresses = []
    own = find_address_towards(addresses)
    interface = None if own is None else find_interface_of(own)
    return None if interface is None else interface.name
