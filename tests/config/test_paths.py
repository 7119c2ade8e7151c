"""Data paths: absolute, validated before the launch, awaited under a deadline."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pydantic
import pytest
import scripts
from doctor_kit import needs_namespaces
from hypothesis import given
from hypothesis import strategies as st
from texts import any_text

from ddpsafe._clock import Deadline
from ddpsafe._config.paths import AbsolutePath, DataPath, PathWatch, require_data_paths
from ddpsafe._errors import ConfigError, PreflightError
from ddpsafe._host import find_mount_point, list_mount_points


class Mine(pydantic.BaseModel):
    """A user's own model."""

    output: AbsolutePath
    train: DataPath = DataPath(path="/data/train")


@pytest.mark.parametrize(
    ("path", "hint"),
    [("data/train", "relative"), ("./x", "relative"), ("", "empty"), ("~/x", "shells"),
     ("/data\\train", "backslashes"), ("/a\0b", "no path can have"), (b"/x", "expected a path"),
     (3, "expected a path"), ("/\ud800", "no path can have")],
)  # fmt: skip
def test_unportable_paths_are_refused(path: object, hint: str) -> None:
    """The error has the reason."""
    with pytest.raises(pydantic.ValidationError, match=hint):
        Mine(output=path)


def test_relative_path_is_answered_with_its_absolute_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suggested path can be copied."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pydantic.ValidationError) as caught:
        Mine(output="data/train")
    assert caught.value.errors()[0]["ctx"]["write"] == f'"{tmp_path / "data/train"}"'
    with pytest.raises(pydantic.ValidationError) as caught:
        Mine(output="/out", train="data/train")
    assert caught.value.errors()[0]["ctx"]["write"] == (
        f'"{tmp_path / "data/train"}", or DataPath.here("data/train") to mean the directory from '
        "which the job is launched"
    )


@given(any_text() | st.none() | st.integers() | st.floats() | st.lists(any_text()))
def test_any_value_is_accepted_or_refused(path: object) -> None:
    """Arbitrary input raises this one error, and an accepted path is absolute."""
    try:
        assert Mine(output=path).output.is_absolute()
    except pydantic.ValidationError:
        return


def test_data_path_needs_only_a_path_and_reads_nothing() -> None:
    """Text or a Path is enough, and the path need not exist yet."""
    assert Mine(output="/out", train="/no/such/place").train.path == Path("/no/such/place")
    assert Mine(output="/out", train=Path("/x")).train == DataPath(path="/x")


def test_here_resolves_against_the_working_directory_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An intentionally relative path becomes absolute when it is created."""
    monkeypatch.chdir(tmp_path)
    assert DataPath.here("data/../x").path == tmp_path / "x"
    assert DataPath.here("x", base="/base", kind="file").path == Path("/base/x")


@pytest.mark.parametrize(
    "fields",
    [{"kind": "file", "marker": "x"}, {"kind": "file", "min_entries": 1}, {"marker": "/x"},
     {"marker": "../x"}, {"marker": ""}, {"min_entries": 0}, {"wait": 0}, {"kind": "dir"}],
)  # fmt: skip
def test_unsatisfiable_requirements_are_refused(fields: dict[str, object]) -> None:
    """A file has no entries, and a marker lies inside the directory."""
    with pytest.raises(ConfigError):
        DataPath(path="/x", **fields)


def test_one_check_finds_all_unmet_requirements(tmp_path: Path) -> None:
    """Each unmet requirement is one text with a cause and a fix."""
    (tmp_path / "one").touch()
    wanted = DataPath(path=tmp_path, kind="directory", min_entries=2, marker="_SUCCESS")
    entries, marker = wanted.check()
    assert "1 of at least 2 entries" in entries
    assert "_SUCCESS" in marker
    (tmp_path / "_SUCCESS").touch()
    assert wanted.check() == []


@pytest.mark.parametrize(
    ("make", "kind", "hint"),
    [
        (lambda _: None, "any", "does not exist"),
        (lambda path: path.touch(), "directory", "is a file"),
        (lambda path: path.mkdir(), "file", "is a directory"),
        (lambda path: path.symlink_to("/no/such/target"), "any", "link to /no/such/target"),
    ],
)
def test_wrong_kind_of_path_is_reported(tmp_path: Path, make, kind: str, hint: str) -> None:  # noqa: ANN001 - a lambda per case
    """It may be missing, of another kind, or a dangling link."""
    make(tmp_path / "data")
    (problem,) = DataPath(path=tmp_path / "data", kind=kind).check()
    assert hint in problem


@pytest.mark.unprivileged
def test_unreadable_path_is_reported(tmp_path: Path) -> None:
    """A file that exists but cannot be opened is found before a rank needs it."""
    secret = tmp_path / "secret"
    secret.touch(mode=0)
    assert "permission" in DataPath(path=secret).check()[0]


def test_missing_paths_give_one_error_with_cause_and_fix(tmp_path: Path) -> None:
    """All missing paths are in one error, which a retry policy treats as a mount failure."""
    paths = {name: DataPath(path=tmp_path / name) for name in ("train", "test")}
    with pytest.raises(PreflightError) as caught:
        require_data_paths(paths)
    assert caught.value.kind == "mount"
    assert all(
        word in str(caught.value) for word in ("'train'", "'test'", "Likely cause", "What to do")
    )


def test_late_directory_is_awaited(tmp_path: Path) -> None:
    """The wait ends as soon as the directory appears."""
    late = tmp_path / "late"
    timer = threading.Timer(0.3, late.mkdir)
    timer.start()
    deadline = Deadline.after(timedelta(seconds=20))
    assert DataPath(path=late, wait=20).require("train") == late
    timer.join()
    assert 0.2 < deadline.waited_s() < 10


def test_wait_ends_at_its_own_deadline(tmp_path: Path) -> None:
    """Several paths are awaited in parallel, and each wait ends when its time is over."""
    paths = {name: DataPath(path=tmp_path / name, wait=0.3) for name in ("a", "b", "c")}
    deadline = Deadline.after(timedelta(seconds=30))
    with pytest.raises(PreflightError, match=r"after 0\.\d s"):
        require_data_paths(paths, deadline=deadline)
    assert 0.3 <= deadline.waited_s() < 5


def test_deadline_of_the_caller_ends_a_longer_wait(tmp_path: Path) -> None:
    """A path that could wait an hour fails when the launch has no time left."""
    deadline = Deadline.after(timedelta(seconds=0.2))
    with pytest.raises(PreflightError):
        DataPath(path=tmp_path / "x", wait="1h").require(deadline=deadline)
    assert deadline.waited_s() < 5


def test_long_wait_reports_what_it_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line has the name, path, reason and progress of the wait; another reports its end."""
    late = tmp_path / "late"
    ready = threading.Event()

    def make() -> None:
        while not caplog.messages:
            ready.wait(0.01)
        late.mkdir()

    thread = threading.Thread(target=make)
    thread.start()
    hurried = Deadline.after(timedelta(hours=1), clock=lambda: 20 * time.monotonic())
    DataPath(path=late, wait=60).require("train", deadline=hurried)
    thread.join()
    assert f"waiting for data path 'train' ({late}): " in caplog.messages[0]
    assert "does not exist" in caplog.messages[0]
    assert "of 60 s" in caplog.messages[0]
    assert "is ready after" in caplog.messages[-1]


class Hanging(type(Path())):  # type: ignore[misc] # type: ignore[misc] # the class of a path differs between systems
    """A path on a file system that does not respond until it is released."""

    released = threading.Event()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Block as stat does on a dead network mount."""
        self.released.wait(30)
        return super().stat(follow_symlinks=follow_symlinks)


def test_hung_mount_does_not_hang_the_caller() -> None:
    """A stuck check times out, uses one thread however often it is repeated, and may recover."""
    wanted = DataPath.model_construct(
        path=Hanging("/"), kind="any", mount="any", min_entries=None, marker=None
    )
    watch = PathWatch(wanted)
    before = threading.active_count()
    for _ in range(3):
        (reason,) = watch.look(timedelta(seconds=0.05))
        assert "has not answered" in reason.what
    assert threading.active_count() == before + 1
    Hanging.released.set()
    assert watch.look(timedelta(seconds=10)) == []


@pytest.mark.skipif(not Path("/proc/self/mountinfo").exists(), reason="needs Linux's mount table")
def test_directory_under_a_missing_mount_does_not_pass(tmp_path: Path) -> None:
    """/proc is a mount point that contains its entries; / does not count."""
    assert DataPath(path="/proc", mount="point").check() == []
    assert DataPath(path="/proc/self", mount="inside").check() == []
    assert Path("/proc") in (list_mount_points() or ())
    assert find_mount_point(Path("/proc/self/status")) == Path("/proc")
    (problem,) = DataPath(path=tmp_path, mount="point").check()
    assert "nothing is mounted" in problem
    assert "Mount it" in problem


LATE_MOUNT = """
import subprocess, sys, threading
from ddpsafe._config.paths import DataPath
place = sys.argv[1]
mount = lambda: subprocess.run(["mount", "-t", "tmpfs", "none", place], check=True)
threading.Timer(0.3, mount).start()
wanted = DataPath(path=place, mount="point", wait=20)
assert wanted.check(), "not mounted yet"
wanted.require("train")
assert not wanted.check()
"""


@pytest.mark.root
@needs_namespaces
def test_late_mount_is_distinguished_from_its_mount_point(tmp_path: Path) -> None:
    """Only a real file system mounted during the wait ends it; the empty directory does not."""
    place = tmp_path / "with blank"
    place.mkdir()
    command = ["unshare", "--mount", sys.executable, "-c", LATE_MOUNT, str(place)]
    subprocess.run(command, check=True, timeout=scripts.LIMIT_S)
