"""Disks that are full, read-only, frozen or gone: the save fails, the training need not."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import checkpoint_programs as programs
import psutil
import pytest
import torch
from scripts import wait_until

from ddpsafe.checkpoint import Checkpointer, _directory, errors

if TYPE_CHECKING:
    from collections.abc import Callable

    Mount = Callable[[str, str], Path]


@pytest.mark.root
def test_save_that_cannot_fit_is_refused_before_a_byte_is_written(mount: Mount) -> None:
    """Needed and free bytes are told; what was saved before is whole; a smaller state fits."""
    directory = mount("tmpfs", "size=6m")
    small, large = {"x": torch.ones(2**18)}, {"x": torch.ones(2**21)}
    with Checkpointer(directory, keep=1) as checkpointer:
        checkpointer.save(small, 1)
        with pytest.raises(errors.NoSpaceError) as caught:
            checkpointer.save(large, 2)
        assert caught.value.needed_bytes > large["x"].nbytes > caught.value.free_bytes
        assert [path.name for path in directory.glob(".saving*")] == []
        checkpointer.save(small, 3)
        assert checkpointer.restore(small) == 3


@pytest.mark.root
def test_shards_that_cannot_fit_are_refused_on_every_rank(mount: Mount) -> None:
    """What all ranks would write counts, before any of them begins."""
    directory = mount("tmpfs", "size=3m")
    found = programs.run_ranks(programs.save_large_shards, directory)
    for rank in range(2):
        assert found[rank]["class"] == "NoSpaceError", found
        assert found[rank]["needed_bytes"] > 4_000_000 > found[rank]["free_bytes"]
    assert list(directory.glob("*saving*")) == []


@pytest.mark.root
@pytest.mark.parametrize("asynchronous", [False, True])
def test_disk_that_fills_up_meanwhile_fails_the_save(mount: Mount, asynchronous: bool) -> None:  # noqa: FBT001
    """Nothing half-written stays, so the space is free again."""
    directory = mount("tmpfs", "size=4m")
    # A number of five million bytes, which is hardly to be expected, defeats the estimate.
    state: dict[str, Any] = {"x": torch.ones(8), "huge": 1 << 8 * 5_000_000}
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": torch.ones(8), "huge": 0}, 1)
        with pytest.raises(errors.NoSpaceError, match="does not fit"):
            save_and_wait(checkpointer, state, asynchronous=asynchronous)
        assert sorted(path.name for path in directory.glob("*step*")) == ["step-000000000001"]
        assert list(directory.glob(".saving*")) == []
        assert checkpointer.restore({"x": torch.zeros(8)}) == 1


def save_and_wait(checkpointer: Checkpointer, state: dict[str, Any], *, asynchronous: bool) -> None:
    """Save step 2 to the end."""
    checkpointer.save(state, 2, asynchronous=asynchronous)
    checkpointer.wait()


@pytest.mark.root
def test_training_may_go_on_over_a_full_disk(mount: Mount) -> None:
    """``on_failure="warn"`` says so each time, and saves again when there is room."""
    directory = mount("tmpfs", "size=6m")
    state = {"x": torch.ones(2**19)}
    filler = directory / "filler"
    with Checkpointer(directory, keep=1, on_failure="warn") as checkpointer:
        checkpointer.save(state, 1)
        filler.write_bytes(bytes(3 * 2**20))
        with pytest.warns(errors.CheckpointWarning, match="step 2 does not fit") as warned:
            checkpointer.save(state, 2)
        assert [each.filename for each in warned] == [__file__]
        filler.unlink()
        checkpointer.save(state, 3)
        assert checkpointer.latest() == 3


def test_save_whose_rename_does_not_reach_the_disk_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that failed does not leave a checkpoint; the step can be saved again."""
    fsync = os.fsync

    def refuse(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink() == tmp_path / "c":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"x": 1}, 1)
        monkeypatch.setattr(os, "fsync", refuse)
        with pytest.raises(errors.SaveError, match="the disk has failed"):
            checkpointer.save({"x": 2}, 2)
        assert checkpointer.steps() == [1]
        assert list((tmp_path / "c").glob(".saving*")) == []
        monkeypatch.undo()
        checkpointer.save({"x": 2}, 2)
        assert checkpointer.steps() == [2, 1]


def test_entries_of_new_directories_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash after the first save may leave a checkpoint that no path leads to."""
    synced: list[Path] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with Checkpointer(tmp_path / "runs" / "one" / "c"):
        assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "one"} <= set(synced)


def test_directory_that_cannot_be_listed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written to but not read, as with mode 300: an error of ddpsafe, and no lock is left."""

    def refuse(_: object) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refuse)
        with pytest.raises(errors.DirectoryError, match="Permission denied"):
            Checkpointer(tmp_path / "c")
        with pytest.raises(errors.DirectoryError, match="Permission denied"):
            Checkpointer(tmp_path / "c", access="read").latest()
    Checkpointer(tmp_path / "c").close()


@pytest.mark.root
def test_file_system_that_turns_read_only_fails_the_save(mount: Mount) -> None:
    """As ext4 does after an error of its disk, here one that its own switch triggers."""
    directory = mount("ext4", "loop,errors=remount-ro")
    source = next(
        part.device for part in psutil.disk_partitions() if part.mountpoint == str(directory)
    )
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        switch = Path("/sys/fs/ext4") / Path(source).name / "trigger_fs_error"
        switch.write_text("1")
        with pytest.raises(errors.SaveError, match=r"(?s)Read-only file system.*mounted read-only"):
            checkpointer.save({"x": 2}, 2)
        state = {"x": 0}
        assert checkpointer.restore(state) == 1


@pytest.mark.root
def test_job_on_a_read_only_file_system_does_not_begin(mount: Mount) -> None:
    """The error says so before the first step; reading works."""
    directory = mount("tmpfs", "size=4m")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": 1}, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    with pytest.raises(errors.DirectoryError, match="Read-only file system"):
        Checkpointer(directory)
    assert Checkpointer(directory, access="read").restore({"x": 0}) == 1


def test_file_in_the_place_of_the_directory_is_told(tmp_path: Path) -> None:
    """Whatever the file system refuses comes as one class, with its words."""
    (tmp_path / "file").touch()
    with pytest.raises(errors.DirectoryError, match=r"(?s)File exists.*it is a file"):
        Checkpointer(tmp_path / "file")
    reader = Checkpointer(tmp_path / "file", access="read")
    for call in (lambda: reader.restore({"x": 0}), reader.latest):
        with pytest.raises(errors.DirectoryError, match=r"(?s)cannot be read.*it is a file"):
            call()


def test_link_to_nowhere_is_told(tmp_path: Path) -> None:
    """A mount that is missing leaves such a link; "File exists" alone would puzzle."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(errors.DirectoryError, match=r"link to .*gone, which does not exist"):
        Checkpointer(tmp_path / "link")


def test_link_in_the_place_of_a_checkpoint_is_removed_like_one(tmp_path: Path) -> None:
    """Pruned or set aside, it leaves nothing behind, and what it points to is left alone."""
    for name in ("a", "b"):
        with Checkpointer(tmp_path / name, keep=1) as checkpointer:
            checkpointer.save({"x": name}, 1 if name == "a" else 2)
    (tmp_path / "a" / "step-000000000002").symlink_to(tmp_path / "b" / "step-000000000002")
    (tmp_path / "a" / "step-000000000003").write_text("not a folder")
    with Checkpointer(tmp_path / "a", keep=1) as checkpointer:
        with pytest.warns(errors.CheckpointWarning, match="step 3 .* is damaged"):
            assert checkpointer.restore({"x": ""}) == 2
        checkpointer.save({"x": "c"}, 4)
        checkpointer.restore({"x": ""}, step=4)
    (tmp_path / "a" / "step-000000000005").symlink_to("nowhere")
    with (
        pytest.warns(errors.CheckpointWarning, match="step 5 .* is damaged"),
        Checkpointer(tmp_path / "a", keep=1) as checkpointer,
    ):
        checkpointer.restore({"x": ""})
    left = sorted(path.name.partition("-0")[0] for path in (tmp_path / "a").iterdir())
    assert left == [".aside-step", ".lock", "latest", "step"]
    assert (tmp_path / "b" / "step-000000000002" / "state.pt").exists()


@pytest.mark.root
def test_disk_without_inodes_is_told(mount: Mount) -> None:
    """There is space, and no file can be made."""
    directory = mount("tmpfs", "size=4m,nr_inodes=12")
    with Checkpointer(directory, keep=None) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        checkpointer.save({"x": 2}, 2)
        with pytest.raises(errors.NoSpaceError, match="has no inodes left"):
            checkpointer.save({"x": 3}, 3)
        assert checkpointer.restore({"x": 0}) == 2


def test_directory_called_latest_is_left_alone(tmp_path: Path) -> None:
    """There is no link then, and no remains of links that could not be put there."""
    (tmp_path / "latest").mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "latest", "step-000000000001"]


def test_vanished_directory_fails_the_save(tmp_path: Path) -> None:
    """Removed by hand, or unmounted: the next job's directory is not written to."""
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"x": 1}, 1)
        shutil.rmtree(tmp_path / "c")
        with pytest.raises(errors.SaveError, match=r"has lost its lock on"):
            checkpointer.save({"x": 2}, 2)
        (tmp_path / "c").mkdir()
        with pytest.raises(errors.SaveError, match=r"has lost its lock on"):
            checkpointer.save({"x": 2}, 3)
    assert list((tmp_path / "c").iterdir()) == []


@pytest.mark.root
def test_storage_that_does_not_answer_is_given_up_on(mount: Mount) -> None:
    """The deadline holds though the writer sits in the kernel, and it never publishes later."""
    directory = mount("ext4", "loop")
    with Checkpointer(directory, timeout=timedelta(seconds=0.5)) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        subprocess.run(["fsfreeze", "-f", str(directory)], check=True)
        try:
            with pytest.raises(errors.SaveTimeoutError) as caught:
                checkpointer.save({"x": 2}, 2)
        finally:
            subprocess.run(["fsfreeze", "-u", str(directory)], check=True)
        assert caught.value.missing_ranks == (0,)
        assert caught.value.waited_s < 10
        for thread in threading.enumerate():
            if thread.name == "ddpsafe-save-2":
                thread.join(20)
        assert checkpointer.latest() == 1
        assert list(directory.glob(".saving*")) == []
        checkpointer.save({"x": 3}, 3)


@pytest.mark.root
def test_storage_that_hangs_in_the_rename_publishes_nothing_later(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save had timed out by the time that the kernel renamed its folder, so it is taken back."""
    directory = mount("ext4", "loop")
    publish = _directory.publish

    def freeze_and_publish(*args: Any, **kwargs: Any) -> bool:
        subprocess.run(["fsfreeze", "-f", str(directory)], check=True)
        return publish(*args, **kwargs)

    with Checkpointer(directory, timeout=timedelta(seconds=0.5)) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        monkeypatch.setattr(_directory, "publish", freeze_and_publish)
        try:
            with pytest.raises(errors.SaveTimeoutError):
                checkpointer.save({"x": 2}, 2)
        finally:
            subprocess.run(["fsfreeze", "-u", str(directory)], check=True)
        monkeypatch.undo()
        for thread in threading.enumerate():
            if thread.name == "ddpsafe-save-2":
                thread.join(20)
        assert checkpointer.latest() == 1
        assert list(directory.glob(".saving*")) == []
        checkpointer.save({"x": 3}, 3)
        assert checkpointer.latest() == 3


@pytest.mark.root
def test_save_that_was_interrupted_does_not_appear_later(mount: Mount) -> None:
    """After Ctrl-C in save() its writer ends without publishing, and the step can be saved."""
    directory = mount("ext4", "loop")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        subprocess.run(["fsfreeze", "-f", str(directory)], check=True)
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save({"x": 2}, 2)
        finally:
            subprocess.run(["fsfreeze", "-u", str(directory)], check=True)
        # Not by join(): an interrupted one takes the thread for dead (Python 3.11).
        wait_until(lambda: not list(directory.glob(".saving*")))
        assert checkpointer.latest() == 1
        checkpointer.save({"x": 2}, 2)
        assert checkpointer.latest() == 2


def test_folder_in_the_way_of_a_save_is_told(tmp_path: Path) -> None:
    """Nothing is overwritten; the message names the folder, and the next step is saved."""
    with Checkpointer(tmp_path) as checkpointer:
        other = tmp_path / "step-000000000002" / "other"
        other.parent.mkdir()
        other.touch()
        with pytest.raises(errors.SaveError, match=r"step-000000000002 already exists"):
            checkpointer.save({"x": 2}, 2)
        assert other.exists()
        checkpointer.save({"x": 3}, 3)


@pytest.mark.root
def test_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(mount: Mount) -> None:
    """The new one is there; the warning says that the disk will fill up."""
    directory = mount("ext4", "loop")
    with Checkpointer(directory, keep=1) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        subprocess.run(["chattr", "+i", str(checkpointer.path(1))], check=True)
        with pytest.warns(errors.CheckpointWarning, match="step 1: .*not permitted") as warned:
            checkpointer.save({"x": 2}, 2)
        assert [each.filename for each in warned] == [__file__]
        subprocess.run(["chattr", "-i", str(checkpointer.path(1))], check=True)
        assert checkpointer.latest() == 2
        checkpointer.save({"x": 2}, 2)
        checkpointer.save({"x": 3}, 3)
    assert [path.name for path in directory.glob("*step*")] == ["step-000000000003"]


def test_warning_of_a_failed_save_is_not_raised_by_chance(tmp_path: Path) -> None:
    """With ``on_failure="warn"`` a healthy save is silent."""
    with warnings.catch_warnings(), Checkpointer(tmp_path, on_failure="warn") as checkpointer:
        warnings.simplefilter("error")
        checkpointer.save({"x": 1}, 1)
