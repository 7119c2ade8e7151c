"""Secrets of the environment: recognised, taken out of what is shown, and kept from programs of the user's."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

JOB_SECRET: Final = "DDPSAFE_JOB_SECRET"  # noqa: S105 - the name of a variable
"""The variable with what only the launchers, or the attached ranks, of one job know."""

DOCTOR_SECRET: Final = "DDPSAFE_DOCTOR_SECRET"  # noqa: S105 - the name of a variable
"""The variable with what only the doctors of one check know."""

OWN_SECRETS: Final = (JOB_SECRET, DOCTOR_SECRET)
"""What programs that the user's code starts have no use for, and so must not inherit."""

_environment = threading.RLock()
_taken: dict[str, str] = {}


def find_own_secret(name: str) -> str:
    """Return one of `OWN_SECRETS`, also after `take_own_secrets`; empty where there is none."""
    with _environment:
        return os.environ.get(name) or _taken.get(name, "")


def take_own_secrets() -> None:
    """Take `OWN_SECRETS` out of the environment of this process, which knows them from now on."""
    with _environment:
        for name in OWN_SECRETS:
            text = os.environ.pop(name, None)
            if text:
                _taken[name] = text


@contextlib.contextmanager
def withheld_own_secrets() -> Iterator[None]:
    """Keep `OWN_SECRETS` from a process that is started meanwhile.

    `multiprocessing` hands on the environment as it is. The script that a rank imports first may
    start programs, so it is too late to remove them in the rank.
    """
    with _environment:
        kept = {name: os.environ.pop(name) for name in OWN_SECRETS if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(kept)


HIDDEN: Final = "***"

_SECRET_NAME: Final = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_KEY$|^KEY$|_PAT$"
    r"|AUTH|COOKIE|_DSN$|^DSN$|WEBHOOK|JWT|_PWD$|PASS$|PASSCODE|CONN(?:ECTION)?_?STR(?:ING)?|_SAS$"
    r"|SIGNING",
    re.IGNORECASE,
)
_NO_SECRET_NAME: Final = re.compile(r"_(PATH|FILE|DIR|SOCK)$|^TOKENIZERS_|^XAUTHORITY$")
"""Where a secret lies is none; its directory may stand in a line to copy."""

_NAMED: Final = (
    r"account_?key|shared_?access_?(?:key|signature)|access_?key|api[_-]?key|client_?secret|secret"
    r"|passw(?:or)?d|passphrase|pwd|(?:access_|auth_|refresh_)?token|credentials?|sig|x-amz-\w+"
)
_PARTS: Final = [
    # Options of a command line, also of another process: --db-password=x, --token x.
    (r"(-[\w-]*(?:passw|token|secret|credential|api-?key)[\w-]*[= ]+)\S+", r"\1***"),
    (r"(\bsshpass\s+-p\s*)\S+", r"\1***"),
    (r"(\s(?:-u|--user)[= ]+[^\s:]+:)\S+", r"\1***"),
    # Parts of connection strings, queries, JSON: AccountKey=x;  ?sig=x&  "password": "x".
    (r"(\b(?:password|pwd)\s*=\s*)(?!\*\*\*)[^;\n]+(?=;)", r"\1***"),
    (rf"(\b(?:{_NAMED})[\"']?\s*[=:]\s*[\"']?)(?!\*\*\*)[^\s;&,\"'}}]+", r"\1***"),
    (r"(\bauthorization[\"']?\s*[=:]\s*[\"']?(?:\w+\s+)?)(?!\*\*\*)[^\s,\"']+", r"\1***"),
    (r"(\bbearer\s+)[\w.~+/=-]{8,}", r"\1***"),
    # User and password of a URL, slashes and at signs included; a port is none: http://host:80/.
    (r"(?<=://)[^\s/@:]*:(?!\d+(?:/|\Z))[^\s\"'<>]*(?=@)|(?<=://)[^\s/@:]{8,}(?=@)", "***"),
    # What shows by its shape that it is one.
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", "***"),
    (r"\b(?:gh[pousr]_|github_pat_|hf_|sk-|glpat-|xox[abprs]-)[\w-]{16,}", "***"),
    (r"\b(?:AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)", "***"),
]
_PATTERNS: Final = [
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), shown) for pattern, shown in _PARTS
]
"""What is a secret inside of a text, and what is shown instead, in this order."""

_SHORTEST_SECRET: Final = 6
"""Shorter values are words such as "1" or "none", and would be struck out of innocent text."""


def is_secret_name(name: str) -> bool:
    """Tell whether a variable of this name probably holds a secret."""
    looks_secret = _SECRET_NAME.search(name) is not None
    return looks_secret and _NO_SECRET_NAME.search(name) is None


def hide_value(name: str, value: str) -> str:
    """Return a variable's value as it may be shown."""
    return HIDDEN if is_secret_name(name) else hide_parts(value)


def hide_parts(text: str) -> str:
    """Return a text without what shows by its form that it is a secret."""
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return text


@dataclass(frozen=True, slots=True)
class Mask:
    """Strikes the secrets of one environment out of texts.

    Attributes:
        secrets: The values to hide, the longest first: one may contain another.
    """

    secrets: tuple[str, ...]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Mask:
        """Collect the values of all variables whose names look secret."""
        found = {value for name, value in env.items() if is_secret_name(name)}
        found.update(_taken.values())
        long = [value for value in found if len(value) >= _SHORTEST_SECRET]
        return cls(tuple(sorted(long, key=len, reverse=True)))

    def text(self, text: str) -> str:
        """Return `text` without the secrets, passwords in URLs and values of secret options."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return hide_parts(text)

    def value(self, value: object) -> object:
        """Do the same throughout a JSON-like value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value
