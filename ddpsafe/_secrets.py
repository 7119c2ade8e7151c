"""Secrets in the environment: recognised, masked in output, and kept from the user's programs."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

JOB_SECRET: Final = "DDPSAFE_JOB_SECRET"  # noqa: S105 - the name of a variable
"""The variable with the secret of one job, known to its launchers, attached ranks or doctors only."""

OWN_SECRETS: Final = (JOB_SECRET,)
"""Programs that the user's code starts do not need these, so they must not inherit them."""

_environment = threading.RLock()
_taken: dict[str, str] = {}


def find_own_secret(name: str) -> str:
    """Return one of `OWN_SECRETS`, also after `take_own_secrets`; empty if it is not set."""
    with _environment:
        return os.environ.get(name) or _taken.get(name, "")


def take_own_secrets() -> None:
    """Move `OWN_SECRETS` from the environment into a variable of this process."""
    with _environment:
        for name in OWN_SECRETS:
            text = os.environ.pop(name, None)
            if text:
                _taken[name] = text


@contextlib.contextmanager
def withheld_own_secrets() -> Iterator[None]:
    """Keep `OWN_SECRETS` out of the environment of processes that are started in the block."""
    # A rank cannot remove them itself in time: it imports the user's script first, which may start
    # programs. `multiprocessing` always passes the whole environment on.
    with _environment:
        secrets = {name: os.environ.pop(name) for name in OWN_SECRETS if name in os.environ}
        try:
            yield
        finally:
            os.environ.update(secrets)


HIDDEN: Final = "***"

_SECRET_NAME: Final = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_KEY$|^KEY$|_PAT$"
    r"|AUTH|COOKIE|_DSN$|^DSN$|WEBHOOK|JWT|_PWD$|PASS$|PASSCODE|CONN(?:ECTION)?_?STR(?:ING)?|_SAS$"
    r"|SIGNING",
    re.IGNORECASE,
)
_NO_SECRET_NAME: Final = re.compile(r"_(PATH|FILE|DIR|SOCK)$|^TOKENIZERS_|^XAUTHORITY$")
"""The path of a secret is not secret; its directory may be part of a command to copy."""

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
    # User and password of a URL, which may contain "/" and "@"; but not a port, as in http://host:80/.
    (r"(?<=://)[^\s/@:]*:(?!\d+(?:/|\Z))[^\s\"'<>]*(?=@)|(?<=://)[^\s/@:]{8,}(?=@)", "***"),
    # Secrets that are recognised by their format.
    (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", "***"),
    (r"\b(?:gh[pousr]_|github_pat_|hf_|sk-|glpat-|xox[abprs]-)[\w-]{16,}", "***"),
    (r"\b(?:AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)", "***"),
]
_PATTERNS: Final = [
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), replacement) for pattern, replacement in _PARTS
]
"""Patterns of secrets inside a text, each with its replacement; applied in this order."""

_MIN_SECRET_CHARS: Final = 6
"""Shorter values, such as "1" or "none", also occur in text that is not secret."""


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name probably holds a secret."""
    looks_secret = _SECRET_NAME.search(name) is not None
    return looks_secret and _NO_SECRET_NAME.search(name) is None


def hide_value(name: str, value: str) -> str:
    """Return a variable's value for display, masked if it is secret."""
    return HIDDEN if is_secret_name(name) else hide_parts(value)


def hide_parts(text: str) -> str:
    """Return a text with everything masked that is recognised as a secret by its format."""
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


@dataclass(frozen=True, slots=True)
class Mask:
    """Masks the secrets of one environment in texts.

    Attributes:
        secrets: The values to mask, the longest first.
    """

    secrets: tuple[str, ...]

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Mask:
        """Collect the values of all variables whose names look secret."""
        values = {value for name, value in env.items() if is_secret_name(name)}
        values.update(_taken.values())
        long = [value for value in values if len(value) >= _MIN_SECRET_CHARS]
        # One may contain another, of which the rest would be left.
        return cls(tuple(sorted(long, key=len, reverse=True)))

    def text(self, text: str) -> str:
        """Return `text` with secrets, passwords in URLs and values of secret options masked."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return hide_parts(text)

    def value(self, value: object) -> object:
        """Mask all texts in a JSON-like value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value
