"""What travels between two doctors: one JSON object per line, of bounded length, never unpickled."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe.doctor._mesh._board import Json

NO_SECRET: Final = ""
"""The hub's answer proves that it speaks the language, not who it is: nobody could know that yet."""

VERSION: Final = 1
"""Of what is said to each other; doctors of different versions do not talk."""

LONGEST_FROM_NODE_BYTES: Final = 4 << 20
LONGEST_FROM_HUB_BYTES: Final = 64 << 20

_SMALL_SEGMENT_BYTES: Final = 1160
"""With IPv6, TCP and options, less than the 1280 bytes that every link of IPv6 has to carry."""

_NOTICE_S: Final = 1
_NOTICES: Final = 3


class StrangerError(Exception):
    """What was read is not what a doctor says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """How a node introduces itself at the endpoint.

    Attributes:
        nnodes: Nodes of its job.
        node_rank: Which it says it is.
        hostname: Its name.
        pid: Of its doctor, to tell two of them on one host apart.
        job: What its launcher calls the job; empty where nothing does.
        challenge: Only who speaks this language knows the answer to it.
    """

    nnodes: int
    node_rank: int
    hostname: str
    pid: int
    job: str
    challenge: str

    def to_json(self) -> dict[str, Json]:
        """Return it as a message."""
        return {"ddpsafe_doctor": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, message: Mapping[str, Json]) -> Greeting:
        """Read it from a message.

        Raises:
            StrangerError: It is no greeting of this version.
        """
        if message.get("ddpsafe_doctor") != VERSION:
            raise StrangerError(f"version {message.get('ddpsafe_doctor')}, not {VERSION}")
        try:
            return cls(
                nnodes=int(str(message["nnodes"])),
                node_rank=int(str(message["node_rank"])),
                hostname=str(message["hostname"])[:255],
                pid=int(str(message["pid"])),
                job=str(message["job"])[:255],
                challenge=str(message["challenge"])[:64],
            )
        except (KeyError, ValueError) as exc:
            raise StrangerError(f"an incomplete greeting: {exc}") from exc


def answer_to(challenge: str, secret: str) -> str:
    """Return what only the one who was asked can answer."""
    return hashlib.sha256(f"ddpsafe {VERSION} {secret} {challenge}".encode()).hexdigest()


def make_secret() -> str:
    """Return what nobody guesses."""
    return secrets.token_hex(16)


def encode(message: Mapping[str, Json]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"


async def read(reader: asyncio.StreamReader) -> dict[str, Json] | None:
    """Read the next message; None at the end.

    Raises:
        StrangerError: The line is too long or no JSON object.
        OSError: The connection broke.
    """
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as exc:
        raise StrangerError("a line without end") from exc
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise StrangerError(f"no JSON: {line[:40]!r}") from exc
    if not isinstance(message, dict):
        raise StrangerError(f"no JSON object: {line[:40]!r}")
    return message


def keep_packets_small(connection: socket.socket) -> None:
    """Make both sides send small packets; call it before connecting, or on a listening socket.

    What is said about a network that loses large packets must itself get through.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT_BYTES)


def notice_loss(connection: socket.socket) -> None:
    """Let the kernel find out within 3 s that the other host has vanished.

    It sends probes while nothing else is said. Unlike a heartbeat of our own, they go on while
    this process waits for a busy CPU.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError, OSError):  # other systems have other names
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _NOTICE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _NOTICE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NOTICES - 1)
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NOTICE_S * _NOTICES * 1000
        )
