"""Secrets of the environment: recognised, and taken out of everything that is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

HIDDEN: Final = "***"

_SECRET_NAME: Final = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|_KEY$|^KEY$|_PAT$"
    r"|AUTH|COOKIE|_DSN$|WEBHOOK|JWT|_PWD$|_PASS$",
    re.IGNORECASE,
)
_NO_SECRET_NAME: Final = re.compile(r"_(PATH|FILE|DIR|SOCK)$|^TOKENIZERS_|^XAUTHORITY$")
"""Where a secret lies is none; its directory may stand in a line to copy."""

_OPTION: Final = re.compile(
    r"(-[\w-]*(?:passw|token|secret|credential|api-?key)[\w-]*[= ]+)\S+", re.IGNORECASE
)
"""A secret in the command line of another process."""

_URL_PASSWORD: Final = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)|(?<=://)[^\s/@:]{8,}(?=@)")
_SHORTEST_SECRET: Final = 6
"""Shorter values are words such as "1" or "none", and would be struck out of innocent text."""


def is_secret_name(name: str) -> bool:
    """Tell whether a variable of this name probably holds a secret."""
    looks_secret = _SECRET_NAME.search(name) is not None
    return looks_secret and _NO_SECRET_NAME.search(name) is None


def hide_value(name: str, value: str) -> str:
    """Return a variable's value as it may be shown."""
    return HIDDEN if is_secret_name(name) else _URL_PASSWORD.sub(HIDDEN, value)


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
        long = [value for value in found if len(value) >= _SHORTEST_SECRET]
        return cls(tuple(sorted(long, key=len, reverse=True)))

    def text(self, text: str) -> str:
        """Return `text` without the secrets, passwords in URLs and values of secret options."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        text = _OPTION.sub(rf"\1{HIDDEN}", text)
        return _URL_PASSWORD.sub(HIDDEN, text)

    def value(self, value: object) -> object:
        """Do the same throughout a JSON-like value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value
