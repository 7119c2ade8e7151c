"""The secret of a job, which only its own processes know: where it comes from, how long it is, what it signs."""

from __future__ import annotations

import hashlib
import hmac
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._secrets import JOB_SECRET, find_own_secret

if TYPE_CHECKING:
    import os

MIN_SECRET_CHARS: Final = 16
"""Whoever reaches the endpoint can try secrets, so a short one protects nothing."""


class Signer:
    """Signs the values that a job writes where others can write too, and rejects those of others.

    The scope is what the values are for. A value that was signed for another scope or another key is
    rejected, so a scope that is new for each start rejects old values.
    """

    _MAC_CHARS: Final = 64

    def __init__(self, secret: bytes, scope: str) -> None:
        self._key = hmac.digest(secret, f"ddpsafe {scope}".encode(), "sha256")

    def sign(self, key: str, value: bytes) -> bytes:
        """Return a value with its signature, which is valid for one key."""
        # With its length, no two pairs of key and value give the same bytes.
        message = len(key).to_bytes(4, "big") + key.encode() + value
        return hmac.new(self._key, message, "sha256").hexdigest().encode() + value

    def verified(self, key: str, signed: bytes) -> bytes | None:
        """Return the value without its signature; ``None`` if this job did not sign it."""
        value = signed[self._MAC_CHARS :]
        # In constant time: who can write to the store could measure how much of a signature is
        # right.
        return value if hmac.compare_digest(signed, self.sign(key, value)) else None


def key_of_secret(secret: str) -> bytes:
    """Return the key of the signatures that a secret gives."""
    return hashlib.sha256(b"secret\0" + secret.encode()).digest()


def find_job_secret(
    path: str | os.PathLike[str] | None = None, *, setting: str = "rendezvous.secret_file"
) -> str:
    """Return the job's secret from a file or from ``DDPSAFE_JOB_SECRET``; empty if there is none.

    `setting` is how the user has named the file, for errors.

    Raises:
        ConfigError: The file cannot be read or is empty, or the secret can be guessed.
    """
    if path is None:
        text = find_own_secret(JOB_SECRET)
        source = JOB_SECRET
        fix = (
            f'export {JOB_SECRET}="$(openssl rand -hex 32)", the same for all processes of the job.'
        )
        if not text:
            return ""
    else:
        source = f"{setting} {path}"
        place = shlex.quote(str(path))
        fix = f"write one:  openssl rand -hex 32 > {place}  and copy that file to every node."
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as exc:
            why = getattr(exc, "strerror", None) or "it is not text"
            raise ConfigError(
                Explanation(
                    f"{source} cannot be read: {why}.",
                    cause="a wrong path, or it is missing on this host.",
                    fix="name a file with one line of text, the same on every node.",
                )
            ) from exc
        if not text:
            raise ConfigError(
                Explanation(f"{source} is empty.", cause="nothing was written to it.", fix=fix)
            )
    if len(text) < MIN_SECRET_CHARS:
        what = f"{source} has {len(text)} characters, fewer than {MIN_SECRET_CHARS}."
        raise ConfigError(Explanation(what, cause="short secrets can be guessed.", fix=fix))
    return text
