"""The files of a dataset in an order that is the same on every host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddpsafe._errors import Explanation
from ddpsafe.data.errors import DataConfigError

if TYPE_CHECKING:
    from collections.abc import Collection


def sorted_files(
    root: str | os.PathLike[str],
    pattern: str = "**/*",
    *,
    suffixes: Collection[str] | None = None,
) -> list[Path]:
    """List the files below `root`, ordered by the bytes of their relative paths.

    The order of ``os.listdir`` and ``glob`` is the file system's and differs between hosts;
    sorting by text differs between locales. Hidden files are left out, links are followed.

    Args:
        root: The directory.
        pattern: As in ``Path.glob``.
        suffixes: Keep only these, e.g. ``{".jpg", ".png"}``; upper and lower case are equal.

    Returns:
        The files, as paths that begin with `root`.

    Raises:
        DataConfigError: There is no such directory, or no such file in it.
    """
    top = Path(root)
    if not top.is_dir():
        raise DataConfigError(
            Explanation(
                f"There is no directory {top} (looked at {top.absolute()}).",
                cause="the path is wrong, relative to another directory, or not mounted here.",
                fix="pass an absolute path that exists on every host.",
            )
        )
    wanted = None if suffixes is None else {suffix.lower() for suffix in suffixes}
    found = [
        path
        for path in top.glob(pattern)
        if (wanted is None or path.suffix.lower() in wanted)
        and not any(part.startswith(".") for part in path.relative_to(top).parts)
        and path.is_file()
    ]
    if not found:
        raise DataConfigError(
            Explanation(
                f"No file in {top.absolute()} matches {pattern!r}"
                f"{'' if wanted is None else f' with a suffix of {sorted(wanted)}'}.",
                cause="the pattern does not fit, or the directory is empty on this host.",
                fix="check the pattern, and that the data are mounted.",
            )
        )
    return sorted(found, key=lambda path: os.fsencode(path.relative_to(top).as_posix()))
