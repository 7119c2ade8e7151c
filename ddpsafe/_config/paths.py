"""Paths of data: absolute, and looked at before anything starts, without ever hanging."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict, Unpack

from ddpsafe._clock import Deadline
from ddpsafe._config.durations import Duration
from ddpsafe._config.problems import Part, show, wrong
from ddpsafe._config.wait_for_paths import PATIENCE, PathWatch, find_not_ready, preflight_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpsafe._config.durations import DurationLike

_WINDOWS: Final = os.name == "nt"


def _validate_path(value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)) or isinstance(value, bytes):
        raise wrong(
            f"expected a path, got a {type(value).__name__}",
            write='an absolute path: "/data/train"',
        )
    text = os.fspath(value)
    if not isinstance(text, str):
        raise wrong("a path in bytes", write='an absolute path as text: "/data/train"')
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
            "'~' is expanded by shells only; here it is a directory of that name",
            write=f'"{Path(text).expanduser()}"' if text[:2] in {"~", "~/"} else example,
        )
    if not _WINDOWS and "\\" in text:
        raise wrong(
            "it has backslashes, which do not separate directories on this system but are part "
            "of a name",
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
            write=f'"{here / text}"; for a data path also DataPath.here("{text}"), which means '
            "relative to the directory the job is launched from",
        )
    return Path(text)


AbsolutePath = Annotated[Path, BeforeValidator(_validate_path)]
"""A `pathlib.Path` that is absolute; usable as a field's type in any pydantic model."""


class DataPathFields(TypedDict, total=False):
    """The fields of a `DataPath` beside its path, as keyword arguments."""

    kind: Literal["any", "directory", "file"]
    wait: DurationLike | None
    mount: Literal["any", "inside", "point"]
    min_entries: int | None
    marker: str | None


class DataPath(Part):
    """A path the job needs, and what has to be true of it before any rank starts.

    Making one looks at nothing; `check` looks once, `require` waits.
    """

    path: AbsolutePath = Field(
        description="Where it is: an absolute path.", examples=['"/data/train"']
    )
    kind: Literal["any", "directory", "file"] = Field(
        default="any",
        description="What it has to be.",
        examples=['"directory"', '"file"', '"any"'],
    )
    wait: Duration | None = Field(
        default=None,
        description="How long to wait for a mount that comes late. None: one look.",
        examples=['"2min"', "None"],
    )
    mount: Literal["any", "inside", "point"] = Field(
        default="any",
        description='"inside": on a file system mounted anywhere below "/", so that the empty '
        'directory under a mount that failed does not pass. "point": the path itself is where '
        "it is mounted.",
        examples=['"inside"', '"point"', '"any"'],
    )
    min_entries: int | None = Field(
        default=None,
        ge=1,
        description="A directory with fewer entries is not ready.",
        examples=["1000", "None"],
    )
    marker: str | None = Field(
        default=None,
        description="A file inside the directory whose presence says that it is complete.",
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
    def _ask_of_directories_only(
        cls, value: int | str | None, info: ValidationInfo
    ) -> int | str | None:
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
            raise wrong("it has to name a file inside the directory", write='marker="_SUCCESS"')
        return value

    @classmethod
    def here(
        cls,
        path: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str] | None = None,
        **fields: Unpack[DataPathFields],
    ) -> DataPath:
        """Make one from a path that is relative on purpose.

        Args:
            path: The path, relative to `base`.
            base: An absolute directory; the current one by default, at the time of this call,
                which is the directory the job is launched from.
            **fields: The other fields.
        """
        given: object = path  # what is not a path is validated as it is, and refused
        text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else given
        if isinstance(text, str) and not text.startswith("~"):
            path = os.path.normpath((Path.cwd() if base is None else Path(base)) / text)
        return cls(path=path, **fields)

    def check(self, *, patience: timedelta = PATIENCE) -> list[str]:
        """Look once, without waiting for what is late.

        Args:
            patience: How long the file system may take to answer before it counts as hung.

        Returns:
            What is not ready and what to do about it; empty when all is well.
        """
        return [str(reason) for reason in PathWatch(self).look(patience)]

    def require(
        self,
        name: str = "data",
        *,
        deadline: Deadline | None = None,
        report: Callable[[str], None] | None = None,
    ) -> Path:
        """Return the path once it is ready; wait for it as long as `wait` says.

        Args:
            name: What to call it in messages.
            deadline: Ends the wait earlier than `wait` does.
            report: Takes a line now and then while the wait is long; logs a warning by default.

        Raises:
            PreflightError: When it is not ready by then; its kind is "mount".
        """
        require_data_paths({name: self}, deadline=deadline, report=report)
        return self.path


def require_data_paths(
    data_paths: Mapping[str, DataPath],
    *,
    deadline: Deadline | None = None,
    report: Callable[[str], None] | None = None,
) -> None:
    """Wait until all data paths are ready, each as long as its own `wait` says.

    The waits run from the same moment, so that they do not add up.

    Args:
        data_paths: The paths by name.
        deadline: Ends every wait; none by default.
        report: Takes a line now and then while a wait is long; logs a warning by default.

    Raises:
        PreflightError: When some are not ready, with all of them; its kind is "mount".
    """
    began = Deadline.after(None) if deadline is None else deadline
    own = {
        name: Deadline.after(wanted.wait or timedelta(0), clock=began.clock).earlier(began)
        for name, wanted in data_paths.items()
    }
    left = {
        name: find_not_ready(wanted, name=name, deadline=own[name], report=report)
        for name, wanted in data_paths.items()
    }
    found = [(name, data_paths[name].path, reasons) for name, reasons in left.items() if reasons]
    if found:
        waited_s = max(own[name].waited_s() for name, _, _ in found)
        raise preflight_error(found, waited_s=waited_s)
