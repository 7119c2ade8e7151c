"""Full, read-only, frozen or missing disks: the save fails, the training need not."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import checkpoint_programs as programs
import machine
import psutil
import pytest
import scripts
import torch
from scripts import wait_until

from ddpsafe.checkpoint import Checkpointer, _directory, errors

Mount = Callable[[str, str], Path]


@pytest.mark.root
def test_save_that_cannot_fit_is_refused_before_anything_is_written(mount: Mount) -> None:
    """The error has needed and free bytes; earlier checkpoints stay intact, and a smaller state fits."""
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
    """The check adds up what all ranks will write, before any of them starts."""
    directory = mount("tmpfs", "size=3m")
    found = programs.run_ranks(programs.save_large_shards, directory)
    for rank in range(2):
        assert found[rank]["class"] == "NoSpaceError", found
        assert found[rank]["needed_bytes"] > 4_000_000 > found[rank]["free_bytes"]
    assert list(directory.glob("*saving*")) == []


@pytest.mark.root
@pytest.mark.parametrize("asynchronous", [False, True])
def test_disk_that_fills_up_during_a_save_fails_it(mount: Mount, asynchronous: bool) -> None:  # noqa: FBT001
    """No partial file stays, so the space is free again."""
    directory = mount("tmpfs", "size=4m")
    # The estimate does not expect an integer of five million bytes.
    state: dict[str, Any] = {"x": torch.ones(8), "huge": 1 << 8 * 5_000_000}
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": torch.ones(8), "huge": 0}, 1)
        with pytest.raises(errors.NoSpaceError, match="does not fit"):
            save_and_wait(checkpointer, state, asynchronous=asynchronous)
        assert sorted(path.name for path in directory.glob("*step*")) == ["step-000000000001"]
        assert list(directory.glob(".saving*")) == []
        assert checkpointer.restore({"x": torch.zeros(8)}) == 1


def save_and_wait(checkpointer: Checkpointer, state: dict[str, Any], *, asynchronous: bool) -> None:
    """Save step 2, and wait until it is written."""
    checkpointer.save(state, 2, asynchronous=asynchronous)
    checkpointer.wait()


@pytest.mark.root
def test_training_may_continue_on_a_full_disk(mount: Mount) -> None:
    """``on_failure="warn"`` warns of each failure, and saves again when there is space."""
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


def test_save_whose_rename_cannot_be_synced_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed save leaves no checkpoint behind, and the step can be saved again."""
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


def test_new_directory_entries_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a crash after the first save may leave a checkpoint without a path to it."""
    synced: list[Path] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with Checkpointer(tmp_path / "runs" / "one" / "c"):
        assert {tmp_path, tmp_path / "runs", tmp_path / "runs" / "one"} <= set(synced)


def test_unlistable_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with mode 300 can be written but not read: ddpsafe raises its own error, and leaves no lock."""

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
    """As ext4 does after a disk error; here the file system's own switch triggers it."""
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
def test_job_on_a_read_only_file_system_does_not_start(mount: Mount) -> None:
    """The error is raised before the first step; reading works."""
    directory = mount("tmpfs", "size=4m")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": 1}, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    with pytest.raises(errors.DirectoryError, match="Read-only file system"):
        Checkpointer(directory)
    assert Checkpointer(directory, access="read").restore({"x": 0}) == 1


def test_file_in_place_of_the_directory_is_reported(tmp_path: Path) -> None:
    """Any refusal of the file system is raised as one class, with the system's text."""
    (tmp_path / "file").touch()
    with pytest.raises(errors.DirectoryError, match=r"(?s)File exists.*it is a file"):
        Checkpointer(tmp_path / "file")
    reader = Checkpointer(tmp_path / "file", access="read")
    for call in (lambda: reader.restore({"x": 0}), reader.latest):
        with pytest.raises(errors.DirectoryError, match=r"(?s)cannot be read.*it is a file"):
            call()


def test_dangling_link_is_reported(tmp_path: Path) -> None:
    """A missing mount leaves such a link, and "File exists" alone would be confusing."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(errors.DirectoryError, match=r"link to .*gone, which does not exist"):
        Checkpointer(tmp_path / "link")


def test_link_in_place_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    """Pruning it or setting it aside removes the link only, not its target."""
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
def test_disk_without_free_inodes_is_reported(mount: Mount) -> None:
    """There is space, but no file can be created."""
    directory = mount("tmpfs", "size=4m,nr_inodes=12")
    with Checkpointer(directory, keep=None) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        checkpointer.save({"x": 2}, 2)
        with pytest.raises(errors.NoSpaceError, match="has no inodes left"):
            checkpointer.save({"x": 3}, 3)
        assert checkpointer.restore({"x": 0}) == 2


def test_directory_named_latest_is_left_alone(tmp_path: Path) -> None:
    """No link is made then, and no temporary link stays behind."""
    (tmp_path / "latest").mkdir()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save({"x": 1}, 1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "latest", "step-000000000001"]


def test_removed_directory_fails_the_save(tmp_path: Path) -> None:
    """If it was deleted or unmounted, nothing is written to a directory created in its place."""
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save({"x": 1}, 1)
        shutil.rmtree(tmp_path / "c")
        with pytest.raises(errors.SaveError, match=r"has lost its lock on"):
            checkpointer.save({"x": 2}, 2)
        (tmp_path / "c").mkdir()
        with pytest.raises(errors.SaveError, match=r"has lost its lock on"):
            checkpointer.save({"x": 2}, 3)
    assert list((tmp_path / "c").iterdir()) == []


SHORT: Final = timedelta(seconds=0.5)
"""The timeout of a save that never ends."""


@contextlib.contextmanager
def frozen(directory: Path) -> Iterator[None]:
    """Freeze a file system, so that writes block in the kernel."""
    subprocess.run(["fsfreeze", "-f", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(directory)], check=True)


def require_only_the_first(directory: Path) -> None:
    """Fail unless the second save, which has timed out, leaves nothing, and another one can be made."""
    for thread in threading.enumerate():
        if thread.name == "ddpsafe-save-2":
            thread.join(scripts.LIMIT_S)
    assert list(directory.glob(".saving*")) == []
    with Checkpointer(directory) as checkpointer:
        assert checkpointer.latest() == 1
        checkpointer.save({"x": 3}, 3)
        assert checkpointer.latest() == 3


@pytest.mark.root
def test_save_on_unresponsive_storage_times_out(mount: Mount) -> None:
    """The deadline holds while the writer is stuck in the kernel, and the writer never publishes later."""
    directory = mount("ext4", "loop")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": 1}, 1)
    with Checkpointer(directory, timeout=SHORT) as checkpointer:
        with frozen(directory), pytest.raises(errors.SaveTimeoutError) as caught:
            checkpointer.save({"x": 2}, 2)
        assert caught.value.missing_ranks == (0,)
        assert caught.value.waited_s < machine.hang_limit(10)
    require_only_the_first(directory)


@pytest.mark.root
def test_save_that_hangs_in_the_rename_publishes_nothing_later(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the save has timed out before the kernel renames its folder, the rename is undone."""
    directory = mount("ext4", "loop")
    publish, freezing = _directory.publish, contextlib.ExitStack()

    def freeze_and_publish(*args: Any, **kwargs: Any) -> bool:
        freezing.enter_context(frozen(directory))
        return publish(*args, **kwargs)

    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": 1}, 1)
    with Checkpointer(directory, timeout=SHORT) as checkpointer:
        monkeypatch.setattr(_directory, "publish", freeze_and_publish)
        with freezing, pytest.raises(errors.SaveTimeoutError):
            checkpointer.save({"x": 2}, 2)
    monkeypatch.undo()
    require_only_the_first(directory)


@pytest.mark.root
def test_interrupted_save_does_not_appear_later(mount: Mount) -> None:
    """After Ctrl-C in save(), its writer ends without publishing, and the step can be saved again."""
    directory = mount("ext4", "loop")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save({"x": 1}, 1)
        with frozen(directory):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save({"x": 2}, 2)
        # Not join(): after an interrupt it takes the thread for finished (Python 3.11).
        wait_until(lambda: not list(directory.glob(".saving*")))
        assert checkpointer.latest() == 1
        checkpointer.save({"x": 2}, 2)
        assert checkpointer.latest() == 2


def test_folder_in_the_way_of_a_save_is_reported(tmp_path: Path) -> None:
    """Nothing is overwritten; the error names the folder, and the next step can be saved."""
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
    """The new checkpoint is there; the warning says that the disk will fill up."""
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
