"""The saved position in the data: what is in it, and what it must not be loaded into."""

from __future__ import annotations

import hashlib
import warnings
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import Explanation
from ddpsafe.data.errors import DataWarning, StateMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = 1

# torchdata's samplers and loaders write these keys; their position is not ours.
_FOREIGN: Final = ("yielded", "next_yielded", "_snapshot", "_num_yielded", "dl_state_dict")


def parse_state(state: object) -> dict[str, Any]:
    """Check the form of a saved state; what it belongs to is checked by `compare_identity`.

    Raises:
        StateMismatchError: It is not a state, is damaged, or another version wrote it.
    """
    if not isinstance(state, dict):
        raise _damaged(f"a state is a dict, not {type(state).__name__}")
    foreign = [key for key in _FOREIGN if key in state]
    if foreign:
        raise _damaged(f"the key {foreign[0]!r} is torchdata's; its position cannot be read here")
    version = state.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise _damaged("it has no version")
    if version != VERSION:
        older = "an older" if version < VERSION else "a newer"
        raise StateMismatchError(
            Explanation(
                f"The state has version {version}; this ddpsafe reads version {VERSION}.",
                cause=f"{older} ddpsafe wrote it.",
                fix="resume with the ddpsafe that wrote it, or begin the epoch anew.",
            ),
            differences={"version": (version, VERSION)},
        )
    _check_cursor(state)
    return dict(state)


def _check_cursor(state: Mapping[str, Any]) -> None:
    for key in ("epoch", "consumed"):
        value = state.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _damaged(f"{key!r} must be a whole number from 0, not {value!r}")
    if not isinstance(state.get("finished"), bool):
        raise _damaged(f"'finished' must be true or false, not {state.get('finished')!r}")
    if not isinstance(state.get("identity"), dict):
        raise _damaged("'identity' is missing")


def _damaged(why: str) -> StateMismatchError:
    return StateMismatchError(
        Explanation(
            f"The state of the data cannot be read: {why}.",
            cause="the file is damaged, or another library wrote it.",
            fix="load what state_dict() of ddpsafe.data returned.",
        )
    )


def compare_identity(
    saved: Mapping[str, object], current: Mapping[str, object], *, strict: bool, what: str
) -> None:
    """Refuse a state of other data; with ``strict=False`` only warn.

    A fingerprint is compared only where both sides have one.

    Raises:
        StateMismatchError: The state belongs to other data.
    """
    differences = {
        key: (saved.get(key), current.get(key))
        for key in {*saved, *current}
        if saved.get(key) != current.get(key) and not _unknown(key, saved, current)
    }
    if not differences:
        return
    listed = [f"{key}: saved {a!r}, now {b!r}" for key, (a, b) in sorted(differences.items())]
    text = Explanation(
        f"The state does not belong to this {what}: {', '.join(sorted(differences))} differ.",
        cause="the dataset, the seed or the sampler changed after the state was saved.",
        fix="restore them, begin the epoch anew, or load with strict=False if samples may be "
        "lost or repeated.",
        details=listed,
    )
    if strict:
        raise StateMismatchError(text, differences=differences)
    warnings.warn(str(text), DataWarning, stacklevel=4)


def _unknown(key: str, saved: Mapping[str, object], current: Mapping[str, object]) -> bool:
    return key == "fingerprint" and None in (saved.get(key), current.get(key))


def digest(data: bytes | memoryview) -> str:
    """Return the 16-byte BLAKE2b of `data` as hexadecimal text."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
