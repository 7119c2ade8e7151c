"""Data paths: absolute, and checked before anything starts, without ever hanging."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from typing_extensions import TypedDict, Unpack

from ddpsafe._clock import Deadline
from ddpsafe._config.durations import Duration
from ddpsafe._config.problems import Part, show, wrong
from ddpsafe._config.wait_for_paths import PathWatch, find_not_ready, preflight_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe._config.durations import DurationLike

_WINDOWS: Final = os.name == "nt"


def _validate_path(value: object, *, or_else: str = "") -> Path:
    if not isinstance(value, (str, os.PathLike)) or isinstance(value, bytes):
        raise wrong(
            f"expected a path, got a {type(value).__name__}",
            write='an absolute path: "/data/train"',
        )
    text = os.fspath(value)
    if not isinstance(text, str):
        raise wrong("it is a path in bytes", write='an absolute path as a string: "/data/train"')
    example = 'an absolute path: "/data/train"'
    if not text.strip():
        raise wrong("it is empty, which means the current directory", write=example)
    try:
        is_possible = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise wrong(f"{show(text)} has characters that no path can have", write=example)
    if text.startswith("~"):
        raise wrong(
            "only shells expand '~'; here it is a directory of that name",
            write=f'"{Path(text).expanduser()}"' if text[:2] in {"~", "~/"} else example,
        )
    if not _WINDOWS and "\\" in text:
        raise wrong(
            "it has backslashes, which on this system do not separate directories but are part of "
            "a name",
            write=f'"{text.replace(chr(92), "/")}"',
        )
    if not Path(text).is_absolute():
        try:
            here = Path.cwd()
        except OSError:  # the current directory was removed
            here = Path("/…")
        raise wrong(
            "it is relative, and ranks on other nodes or under another launcher start in other "
            "directories",
            write=f'"{here / text}"{or_else.format(text=text)}',
        )
    return Path(text)


def _validate_data_path(value: object) -> Path:
    return _validate_path(
        value,
        or_else=', or DataPath.here("{text}") to mean the directory from which the job is launched',
    )


AbsolutePath = Annotated[Path, BeforeValidator(_validate_path)]
"""An absolute `pathlib.Path`; usable as the type of a field in any pydantic model."""


class DataPathFields(TypedDict, total=False):
    """The fields of a `DataPath` other than its path, as keyword arguments."""

    kind: Literal["any", "directory", "file"]
    wait: DurationLike | None
    mount: Literal["any", "inside", "point"]
    min_entries: int | None
    marker: str | None


class DataPath(Part):
    """A path that the job needs, and conditions that it must meet before any rank starts.

    Creating one does not access the path. `check` checks it once, `require` waits for it.
    """

    path: Annotated[Path, BeforeValidator(_validate_data_path)] = Field(
        description="The absolute path.", examples=['"/data/train"']
    )
    kind: Literal["any", "directory", "file"] = Field(
        default="any",
        description="What the path must be.",
        examples=['"directory"', '"file"', '"any"'],
    )
    wait: Duration | None = Field(
        default=None,
        description="How long to wait for a late mount. None: check once.",
        examples=['"2min"', "None"],
    )
    mount: Literal["any", "inside", "point"] = Field(
        default="any",
        description='"inside": it must be on a file system mounted below "/", so that the empty '
        'directory left by a failed mount does not pass. "point": it must be a mount point itself.',
        examples=['"inside"', '"point"', '"any"'],
    )
    min_entries: int | None = Field(
        default=None,
        ge=1,
        description="Smallest number of entries that a ready directory has.",
        examples=["1000", "None"],
    )
    marker: str | None = Field(
        default=None,
        description="A file inside the directory whose presence shows that it is complete.",
        examples=['"_SUCCESS"', "None"],
    )

    if TYPE_CHECKING:

        def __init__(
            self, *, path: str | os.PathLike[str], **fields: Unpack[DataPathFields]
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, (str, os.PathLike)) else value

    @field_validator("min_entries", "marker")
    @classmethod
    def _require_directory(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        if value is not None and info.data.get("kind") == "file":
            raise wrong(
                f"only a directory can have {info.field_name}, and kind is 'file'",
                write='kind="directory", or leave it out',
            )
        return value

    @field_validator("marker")
    @classmethod
    def _stay_inside(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = Path(value).parts
        if not parts or Path(value).is_absolute() or ".." in parts or "\0" in value:
            raise wrong("it must name a file inside the directory", write='marker="_SUCCESS"')
        return value

    @classmethod
    def here(
        cls,
        path: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        **fields: Unpack[DataPathFields],
    ) -> DataPath:
        """Make one from an intentionally relative path.

        Args:
            path: The path, relative to `base`.
            base: An absolute directory; by default the current one at the time of this call, from
                which the job is launched.
            **fields: The other fields.
        """
        given: object = path  # the constructor refuses what is not a path
        text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else given
        if isinstance(text, str) and not text.startswith("~"):
            path = os.path.normpath((Path.cwd() if base is None else Path(base)) / text)
        return cls(path=path, **fields)

    def check(self) -> list[str]:
        """Check the path once, without waiting for it to become ready.

        Returns:
            What is not ready and what to do about it; empty if the path is ready.
        """
        return [str(reason) for reason in PathWatch(self).look()]

    def require(self, name: str = "data", *, deadline: Deadline | None = None) -> Path:
        """Return the path once it is ready; wait for it up to `wait`, with a warning now and then.

        Args:
            name: Name of the path in messages.
            deadline: Ends the wait before `wait` does.

        Raises:
            PreflightError: It is not ready by then; the error's kind is "mount".
        """
        require_data_paths({name: self}, deadline=deadline)
        return self.path


def require_data_paths(
    data_paths: Mapping[str, DataPath], *, deadline: Deadline | None = None
) -> None:
    """Wait until all data paths are ready, for each up to its own `wait`.

    Raises:
        PreflightError: Some are not ready; it lists all of them, and its kind is "mount".
    """
    began = Deadline.after(None) if deadline is None else deadline
    # All waits begin at the same moment, so that they do not add up.
    own = {
        name: Deadline.after(data_path.wait or timedelta(0), clock=began.clock).earlier(began)
        for name, data_path in data_paths.items()
    }
    reasons_of = {
        name: find_not_ready(data_path, name=name, deadline=own[name])
        for name, data_path in data_paths.items()
    }
    not_ready = [
        (name, data_paths[name].path, reasons) for name, reasons in reasons_of.items() if reasons
    ]
    if not_ready:
        waited_s = max(own[name].waited_s() for name, _, _ in not_ready)
        raise preflight_error(not_ready, waited_s=waited_s)
