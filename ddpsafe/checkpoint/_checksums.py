"""Files of which every byte is checked: a CRC-32 for each block, stored in the manifest.

CRC-32 costs least. ISA-L's uses carry-less multiplication and runs at 27 GB/s on one core of an EPYC,
twice that in the cache, so blocks are checked while they are read or written, without another thread.
zlib's runs at 4.2 GB/s, SHA-256 with the processor's own instructions at 1.8 GB/s. CRC-32 finds every
flipped bit and every burst of up to 32 bits. It does not stop an attacker, who can compute it.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Final

from isal.isal_zlib import crc32 as checksum

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Buffer, Self

BLOCK_BYTES: Final = 2**20
"""Length of a block; the last one of a file may be shorter."""

_WRITEBACK_BYTES: Final = 32 * 2**20
"""How many bytes to write before the kernel is asked to start writing them to disk."""

_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h


class DamagedFileError(Exception):
    """A file is not what was written; the text says where."""


class ChecksumWriter:
    """Writes a new file and computes its checksums.

    An error of the file system is raised by `close` and not by `write`. An existing file is written over if
    `replaces`.

    Attributes:
        crc32: One checksum for each block, complete after `close`.
        error: The first error of the file system, if any.
    """

    def __init__(self, path: Path, *, replaces: bool = False) -> None:
        # Opened with "wb", the file of a slot in memory would lose its pages, and get them again one by one.
        self._file = path.open("r+b" if replaces else "xb", buffering=0)
        self._replaces = replaces
        self.size = 0
        self.crc32: list[int] = []
        self.error: OSError | None = None
        self._crc = 0
        self._in_block = 0
        self._unsent = 0

    def write(self, data: Buffer) -> int:
        """Write all of it."""
        view = memoryview(data).cast("B")
        self.size += len(view)
        for start in range(0, len(view), BLOCK_BYTES):
            # Checksum first: the data is then in the cache when the kernel copies it.
            piece = rest = view[start : start + BLOCK_BYTES]
            while len(rest):
                part = rest[: BLOCK_BYTES - self._in_block]
                self._crc = checksum(part, self._crc)
                self._in_block += len(part)
                if self._in_block == BLOCK_BYTES:
                    self._end_block()
                rest = rest[len(part) :]
            try:
                while len(piece) and self.error is None:
                    count = self._file.write(piece)
                    piece = piece[count:]
                    self._start_writeback(count)
            except OSError as exc:
                # torch calls this from C++, and an exception does not always get through that.
                self.error = exc
        return len(view)

    def _start_writeback(self, count: int) -> None:
        # Otherwise the fsync at the end would have to write everything.
        self._unsent += count
        if self._unsent >= _WRITEBACK_BYTES:
            _start_writeback(self._file.fileno(), self._file.tell() - self._unsent, self._unsent)
            self._unsent = 0

    def _end_block(self) -> None:
        self.crc32.append(self._crc)
        self._crc = 0
        self._in_block = 0

    def flush(self) -> None:
        """Do nothing: the file is unbuffered. torch requires the method."""

    def close(self) -> None:
        """Flush the file to disk and close it."""
        if self._in_block:
            self._end_block()
        try:
            if self.error is not None:
                raise self.error
            if self._replaces:
                self._file.truncate()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # An exception of torch may only follow from the file system's error, which close() raises.
        if kind is None or self.error is not None:
            self.close()
        else:
            self._file.close()


def _start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask Linux to start writing, without waiting; if it cannot, the fsync writes everything."""
    # Not posix_fadvise(POSIX_FADV_DONTNEED): it also starts writing, but drops pages that are
    # already written, and a restore would have to read them from the disk.
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


class VerifiedFile:
    """A file of a checkpoint that is checked while it is read; closed by ``with``.

    It closes the descriptor. `size` is the length in bytes when the file was written, `crc32` has a checksum
    for each block, and errors call the file `name`.

    Raises:
        DamagedFileError: The file is shorter or longer.
    """

    def __init__(self, fd: int, name: str, *, size: int, crc32: list[int]) -> None:
        self.fd = fd
        self._name = name
        self._size = size
        self._crc32 = crc32
        length = os.fstat(fd).st_size
        if length != size:
            os.close(fd)
            what = "truncated" if length < size else "longer than what was written"
            raise DamagedFileError(f"{name} is {what}: {length} of {size} bytes")

    def check(self) -> None:
        """Check every block."""
        # Read, not mapped: a disk error then raises OSError, while a mapping would end the process
        # with SIGBUS. The pages stay in the page cache for a mapping of the file later.
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self._size)))
        for number in range(len(self._crc32)):
            self._read_block(number, buffer)

    def read(self, start: int, length: int) -> bytearray:
        """Return bytes, after checking the blocks that contain them."""
        data = bytearray(length)
        view, position = memoryview(data), start
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self._size)))
        while view:
            number, offset = divmod(position, BLOCK_BYTES)
            if offset == 0 and len(view) >= BLOCK_BYTES:  # read a whole block without another copy
                count = len(self._read_block(number, view[:BLOCK_BYTES]))
            else:
                part = self._read_block(number, buffer)[offset : offset + len(view)]
                count = len(part)
                view[:count] = part
            if not count:
                raise DamagedFileError(f"{self._name} ends before byte {start + length}")
            view, position = view[count:], position + count
        return data

    def _read_block(self, number: int, buffer: memoryview) -> memoryview:
        start = number * BLOCK_BYTES
        data = buffer[: max(0, min(BLOCK_BYTES, self._size - start))]
        filled = 0
        while filled < len(data):
            count = os.preadv(self.fd, [data[filled:]], start + filled)
            if not count:
                raise DamagedFileError(f"{self._name} ends before byte {self._size}")
            filled += count
        if len(data) and checksum(data) != self._crc32[number]:
            raise DamagedFileError(
                f"{self._name}: bytes {start} to {start + len(data)} do not have the "
                "checksum they were written with"
            )
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)
