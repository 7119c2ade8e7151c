"""Keys of a store: those of torch's, of a folder, and signed ones."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from ddpsafe._clock import Deadline
from ddpsafe._host import without_cpp_warnings
from ddpsafe._job.secret import Signer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

T = TypeVar("T")

# Where this file is missing, the folder of a `FolderStore` has been cleaned.
_COMPLETE: Final = ".complete"
# How long the folder may take to be removed, and another rank to put back a key.
_CLEANING: Final = timedelta(seconds=5)


class Keys(Protocol):
    """What `Control` needs of a store; torch's stores and `FolderStore` have it."""

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all the keys are set."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key if it has the expected value, empty for not set; return its value afterwards."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; return whether it was set."""


class FolderStore:
    """A store for ranks of one host; each key is a file in a folder.

    It has no server that could be suspended or starved, and no lock: wherever a rank is stopped or killed,
    every key is either set or not. If the folder is removed meanwhile (by a cleaner of temporary files, or at
    the logout of its user), whoever notices makes it again, and each rank puts back what it has set itself.
    The folder is made if it does not exist. It must be private to the user.
    """

    _numbers = itertools.count()
    # What is older has been read: a rank sets a few keys, and waits until the others have read them.
    _MOST_KEPT: Final = 1_000

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._own: dict[str, bytes] = {}
        self._made: tuple[int, int] | None = None
        self._require_folder()

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key atomically."""
        # torch's `FileStore` appends to one file under a lock: a rank that is stopped there blocks
        # all others without a timeout.
        data = value.encode() if isinstance(value, str) else value
        self._made_again(lambda: os.replace(self._written(data), self._path(key)))  # noqa: PTH105 - plain paths: it is called often
        self._keep(key, data)

    def get(self, key: str, /) -> bytes:
        # A key that was set a moment ago is put back by the rank that set it.
        return self._made_again(lambda: self._read(key))

    def check(self, keys: list[str], /) -> bool:
        if all(os.path.exists(self._path(key)) for key in keys):  # noqa: PTH110 - as above
            return True
        if self._is_new():
            self._made_again(self._restore)
        return False

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key unless it is set; return its value."""
        assert expected == "", "only a key that is not set can be compared"  # noqa: S101

        def link() -> bytes:
            self._link(key, desired.encode())
            return self._read(key)

        value = self._made_again(link)
        self._keep(key, value)
        return value

    def delete_key(self, key: str, /) -> bool:
        self._own.pop(key, None)
        try:
            os.unlink(self._path(key))  # noqa: PTH108 - as above
        except FileNotFoundError:
            return False
        return True

    def _keep(self, key: str, value: bytes) -> None:
        self._own[key] = value
        if len(self._own) > self._MOST_KEPT:
            del self._own[next(iter(self._own))]

    def _made_again(self, use: Callable[[], T]) -> T:
        """Use the folder; while it is being removed or has been, make it again first."""
        was_removed = False
        for pause_s in Deadline.after(_CLEANING).pauses_s():
            try:
                return use()
            except FileNotFoundError:
                was_removed |= self._is_new()
                if not was_removed:  # the folder is as it was, so there is no such key
                    raise
            with contextlib.suppress(FileNotFoundError):  # the cleaner is still at it
                self._restore()
            time.sleep(pause_s)
        return use()

    def _restore(self) -> None:
        """Make the folder again, with the keys that this rank has set."""
        self._require_folder()
        for key, value in [*self._own.items()]:
            self._link(key, value)

    def _is_new(self) -> bool:
        """Return whether the folder is another one than this rank has put its keys into."""
        try:
            status = os.stat(f"{self._folder}/{_COMPLETE}")  # noqa: PTH116 - as above
        except FileNotFoundError:
            return True
        return (status.st_ino, status.st_mtime_ns) != self._made

    def _read(self, key: str) -> bytes:
        with open(self._path(key), "rb") as file:  # noqa: PTH123 - as above
            return file.read()

    def _require_folder(self) -> None:
        parent = os.path.dirname(self._folder)  # noqa: PTH120 - as above
        for folder in (parent, self._folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, mode=0o700)  # noqa: PTH102 - as above
        with open(f"{self._folder}/{_COMPLETE}", "ab") as file:  # noqa: PTH123 - as above
            status = os.fstat(file.fileno())
        self._made, owner_uid = (status.st_ino, status.st_mtime_ns), status.st_uid
        # Another user may have taken the name of a folder that was removed.
        if os.lstat(self._folder).st_uid != owner_uid or os.lstat(parent).st_uid not in (
            owner_uid,
            0,
        ):
            raise PermissionError(errno.EPERM, "another user owns it", self._folder)

    def _path(self, key: str) -> str:
        # Hashed: a key may be any text of any length, and some file systems do not tell "a" from "A".
        return f"{self._folder}/{hashlib.sha256(key.encode()).hexdigest()}"

    def _link(self, key: str, value: bytes) -> None:
        """Set a key unless it is set."""
        written = self._written(value)
        with contextlib.suppress(FileExistsError):
            os.link(written, self._path(key))
        os.unlink(written)  # noqa: PTH108 - as above

    def _written(self, value: bytes) -> str:
        """Write a value to a file of its own; return the path."""
        path = f"{self._folder}/.{os.getpid()}-{next(self._numbers)}"
        with open(path, "wb") as file:  # noqa: PTH123 - as above
            file.write(value)
        return path


class ReopenedStore:
    """A store on another host: a connection that breaks is opened again, and the call made again.

    Once it could not be opened again, each call fails at once. `reopen_store` connects to it after an outage,
    and waits for the network.
    """

    def __init__(
        self, open_store: Callable[[], Keys], reopen_store: Callable[[], Keys] | None = None
    ) -> None:
        self._reopen_store = reopen_store or open_store
        self._store = open_store()
        self._lock = threading.Lock()
        self._is_lost = False

    def set(self, key: str, value: str | bytes, /) -> None:
        def set_key(store: Keys) -> None:
            store.set(key, value)  # type: ignore[arg-type]  # all take bytes too
            # torch's stores answer to this only: a lost key would not be noticed.
            store.check([key])

        self._call(set_key)

    def get(self, key: str, /) -> bytes:
        return self._call(lambda store: store.get(key))

    def check(self, keys: list[str], /) -> bool:
        return self._call(lambda store: store.check(keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._call(lambda store: store.compare_set(key, expected, desired))

    def delete_key(self, key: str, /) -> bool:
        return self._call(lambda store: store.delete_key(key))

    def _call(self, use: Callable[[Keys], T]) -> T:
        from torch.distributed import DistNetworkError

        with without_cpp_warnings():
            broken = self._store
            try:
                return use(broken)
            except DistNetworkError:
                with self._lock:  # several threads use it
                    # Else each further call would wait for the network, the next one for 5 min.
                    if self._is_lost:
                        raise
                    if self._store is broken:
                        self._is_lost = True
                        self._store = self._reopen_store()
                        self._is_lost = False
                # The first call may have arrived: this one sets the same value, or finds what that
                # has set.
                return use(self._store)


class SignedKeys:
    """Signed keys, for a store to which others can write: an unsigned value counts as not set.

    This rejects forged values. It does not protect the store itself: others can still remove keys. The scope
    is that of a `Signer`, new for each start of the ranks.
    """

    _MAX_TRIES: Final = 8

    def __init__(self, store: Keys, secret: bytes, scope: str) -> None:
        self._store = store
        self._signer = Signer(secret, scope)

    def set(self, key: str, value: str | bytes, /) -> None:
        """Set a key to a signed value."""
        self._store.set(key, self._sign(key, value))  # type: ignore[arg-type]  # all take bytes too

    def get(self, key: str, /) -> bytes:
        value = self._find(key)
        if value is None:
            # RuntimeError, as torch's stores raise when their server has exited.
            raise RuntimeError(f"{key} is not set, or was set by another program")
        return value

    def check(self, keys: list[str], /) -> bool:
        """Return whether all the keys are set and signed."""
        return self._store.check(keys) and all(self._find(key) is not None for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        signed = self._sign(key, desired)
        known = self._sign(key, expected) if expected else b""
        for _ in range(self._MAX_TRIES):  # an unsigned value counts as not set: replace it
            stored = self._store.compare_set(key, known, signed)  # type: ignore[arg-type]  # as above
            value = self._signer.verified(key, stored)
            if value is not None:
                return value
            known = stored
        raise RuntimeError(f"another program keeps writing to {key}")

    def delete_key(self, key: str, /) -> bool:
        return self._store.delete_key(key)

    def _find(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        return self._signer.verified(key, self._store.get(key))

    def _sign(self, key: str, value: str | bytes) -> bytes:
        return self._signer.sign(key, value.encode() if isinstance(value, str) else value)
