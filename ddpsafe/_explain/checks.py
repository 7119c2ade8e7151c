"""What a rule's pattern alone cannot say: pieces of patterns with a name, and checks of a match.

A rule of ``rules/*.toml`` writes ``(?&exited)`` in a pattern for the piece of that name, and
``check = "is-exception"`` for the check of that name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_EXITED: Final = (
    r"(?:(?i:exit(?:ed|s)?(?: with)?(?: an?)?(?: error| return| status| non-?zero)?(?: exit)?[ _-]?(?:code|status)(?: code)?)"
    r"|(?i:return code|returned code|non-zero status)|terminated with code)['\"]?(?: of)? {0,4}[:=]? {0,8}"
)
"""What launchers, shells, containers and schedulers write before the exit code of a process."""

_SIGNALS: Final = {
    "SIGHUP": (1, "Hangup"),
    "SIGINT": (2, "Interrupt"),
    "SIGILL": (4, "Illegal instruction"),
    "SIGABRT": (6, "Aborted"),
    "SIGBUS": (7, "Bus error"),
    "SIGFPE": (8, "Floating point"),
    "SIGKILL": (9, "Killed"),
    "SIGUSR1": (10, "User defined signal"),
    "SIGSEGV": (11, "Segmentation fault"),
    "SIGUSR2": (12, "User defined signal"),
    "SIGTERM": (15, "Terminated"),
    "SIGXCPU": (24, "CPU time limit exceeded"),
    "SIGXFSZ": (25, "File size limit exceeded"),
}
"""Signals with their numbers on Linux and how a shell describes a process that one ended."""


def _ended_by(number: int, name: str, described: str) -> str:
    """Return a pattern for what they all write of a process that a signal ended: its code, number or name."""
    return (
        rf"{_EXITED}(?:-{number}|{128 + number})(?!\d|\.\d)|ExitCode=0:{number}\b"
        rf"|got sig(?:nal|val) ?: ?{number}\b|Received (?:{number}|Signals\.{name}) death signal"
        rf"|\*\*\* {name} received (?:by|at) |\({name}\)|Signals\.{name}|{name}\(-{number}\)|SIGNAL: {number}\b"
        rf"|(?i:(?:killed|terminated|exited|died|crashed|interrupted)[ :]{{1,2}}(?:(?:by|on|with|due to) )?)signal:? ?(?:{number}\b|{name}\b)"
        rf"|(?:tasks? [\d,-]+:|line \d+: +\d+|Signal:|EXIT STRING:) +{described}\b"
    )


PIECES: Final[dict[str, str]] = {
    "exited": _EXITED,
    # Around the name of an exception that was raised, and is not in a sentence or in source code.
    "thrown": r"(?<!except )(?<!except \()(?<!class )(?<!raise )(?<!import )(?<![(,`'] )(?<![(`'])",
    "thrown-end": r"(?=(?::? in DataLoader|:? in replica|: |:?[\s`'\"*│\]]*$))",
    # A signal that a process got, and not one that it may get.
    "got": r"(?i:(?:receiv\w+|caught|got|killed|terminated|exited|died|crashed|by|fatal|code|status)[ :=(]{1,3}(?:a |by |with |on |of )?(?:fatal )?(?:signal[ :=(]{1,3})?(?:\d+ ?[,(:]? ?)?|^\W{0,3}|signal[ :]{1,2})",
    "watchdog-timed-out": (
        r"Watchdog caught collective operation timeout|collective operation timeout: WorkNCCL"
        r"|flight recorder dump signal from another rank"
        r"|dump signal due to a collective timeout(?: from rank (?P<rank>\d+))?"
        r"|Some NCCL operations have failed or timed out|taking the entire process down"
        r"|Timeout at (?:NCCL|collective)|failure detected by watchdog|detected by watchdog at work"
    ),
    "wait-timed-out": (
        r"Timed out waiting \d+ms for (?:recv|send)|(?:Read|Write|Send) timeout \[|[Tt]imeout waiting for key"
        r"|Application timeout caused pair closure|monitoredBarrier|wait timeout(?: after \d|\s*$)"
        r"|Socket Timeout|timed out in blocking wait|c10d/TraceUtils\.h"
        r"|submitted to be reduced, gathered or broadcasted by subset of ranks|Stalled ranks:"
        r"|RPC ran for more than set timeout|(?i:LaunchTimeoutError)|waitForInput"
        r"|EI000[26]|Getting socket times out|timeout when waiting for nonblocking call"
        r"|barrier timeout after \d+ ?ms|waiting for keys in EtcdStore|Remote Rank did not send"
        r"|(?i:stream sync(?:hronize)? timeout)|reason=\[task timeout\]"
    ),
    **{
        f"ended-by-{name}": _ended_by(number, name, text)
        for name, (number, text) in _SIGNALS.items()
    },
}
"""Patterns by the name that rules use for them."""

_PIECE: Final = re.compile(r"\(\?&([\w-]+)\)")


def expand(pattern: str) -> str:
    """Return a pattern with the pieces that it names; raise KeyError for one that does not exist."""
    return _PIECE.sub(lambda piece: f"(?:{PIECES[piece[1]]})", pattern)


_GIB: Final[dict[str, float]] = {"K": 1 / 1024**2, "M": 1 / 1024, "G": 1.0}
_SIZE: Final = r"([\d.]+) ([KMG])iB"
# Bound on the elements that pad the shards of flat parameters: fewer than the number of ranks times
# an alignment.
_MOST_PADDING: Final = 1_024
# From this share of a GPU's memory on, the process itself fills it.
_MOSTLY_OWN: Final = 0.5


def _gib(pattern: str, text: str) -> float | None:
    """Return the size that a text names, in GiB."""
    match = re.search(pattern, text)
    return None if match is None else float(match[1]) * _GIB[match[2]]


def _own_share(match: re.Match[str]) -> float:
    """Return the share of its GPU that the process that ran out of memory has itself reserved, from 0 to 1."""
    text = match.string
    total = _gib(rf"total capac\w+ of {_SIZE}", text) or _gib(rf"{_SIZE} total capacity", text)
    own = _gib(rf"{_SIZE} reserved in total", text)
    if own is None and (used := _gib(rf"{_SIZE} already\b", text)) is not None:
        own = used + (_gib(rf"{_SIZE} cached", text) or 0.0)
    if own is None and (used := _gib(rf"{_SIZE} is allocated by PyTorch", text)) is not None:
        own = used + (_gib(rf"{_SIZE} is reserved by PyTorch but", text) or 0.0)
    return 0.0 if own is None or not total else own / total


def _is_sharded_otherwise(match: re.Match[str]) -> bool:
    """Return whether one size is a multiple of the other, apart from the padding of the last shard."""
    small, large = sorted((int(match["a"]), int(match["b"])))
    times = round(large / max(small, 1))
    return times > 1 and abs(large - times * small) < _MOST_PADDING


CHECKS: Final[dict[str, Callable[[re.Match[str]], bool]]] = {
    # The line is the last one of an exception.
    "is-exception": lambda match: (
        re.match(r"[\w.]+(?:Error|Exception): ", match.string) is not None
    ),
    # In a container the process finds itself under a number that it does not know as its own.
    "others-fill-the-gpu": lambda match: _own_share(match) < _MOSTLY_OWN,
    "itself-fills-the-gpu": lambda match: _own_share(match) >= _MOSTLY_OWN,
    "is-sharded-otherwise": _is_sharded_otherwise,
    "too-many-joined": lambda match: int(match["count"]) > int(match["world"]),
    "too-few-joined": lambda match: int(match["count"]) < int(match["world"]),
    "not-all-came": lambda match: (
        match.groupdict().get("came") is None or match["came"] != match["all"]
    ),
}
"""Conditions on a match by the name that rules use for them."""
