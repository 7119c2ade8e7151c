"""Another user of the host cannot interfere with a launch on one node, nor read or redirect its logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import other_user_programs as programs
import pytest
import scripts
from launch_programs import add_up

import ddpsafe
from ddpsafe._clock import Deadline
from ddpsafe._job.control import Control
from ddpsafe._job.store_keys import FolderStore
from ddpsafe._launcher.run_directory import open_run_directory
from ddpsafe._wire.messages import Position, Raised, RankOutcome
from ddpsafe._wire.spec import open_log, read_log
from ddpsafe._worker.environment import capture_output
from ddpsafe._world import World

LIMIT = timedelta(seconds=60)


@pytest.mark.root
def test_another_user_cannot_join_read_stop_or_fail_a_launch(tmp_path: Path) -> None:
    """The attacker knows every path, port and pid, has torch, and attacks while the ranks run."""
    with ThreadPoolExecutor(1) as executor, _open_to_all(Path(tempfile.gettempdir())):
        launching = executor.submit(
            ddpsafe.launch,
            programs.train_under_attack,
            (tmp_path,),
            nproc_per_node=2,
            backend="gloo",
            start_method="forkserver",
        )
        try:
            files = [tmp_path / f"facts-{rank}" for rank in range(2)]
            scripts.wait_until(lambda: all(file.exists() for file in files) or launching.done())
            facts = [json.loads(file.read_text()) for file in files]
            succeeded = [_attack(tmp_path, each) for each in facts]
        finally:
            (tmp_path / "attacked").touch()
        result = launching.result()
    assert succeeded == [[], []]
    assert [each["ports_of_launcher"] for each in facts] == [[], []]
    assert result.values == {0: 3.0, 1: 3.0}
    assert result.attempts == 1


@contextlib.contextmanager
def _open_to_all(folder: Path) -> Iterator[None]:
    """Let other users traverse a folder, as they may traverse /tmp."""
    before = stat.S_IMODE(folder.stat().st_mode)
    folder.chmod(before | 0o055)
    try:
        yield
    finally:
        folder.chmod(before)


def _attack(folder: Path, facts: dict[str, object]) -> list[str]:
    """Attack from a process that first imports what it needs and then becomes the other user."""
    command = [str(scripts.write(folder, "attack.py", ATTACK)), json.dumps(facts)]
    run = scripts.Script(command, folder=folder).end()
    assert run.code == 0, run.err
    found: list[str] = json.loads(run.out)
    return found


ATTACK = """
    import json, sys, other_user_programs

    print(json.dumps(other_user_programs.attack(json.loads(sys.argv.pop()))))
"""


PLANTED = "import os\nopen(os.environ['MARK'], 'a').write(__file__ + chr(10))\n"
LAUNCHES = """
    import os, sys
    import ddpsafe

    def find(ctx):
        return os.getcwd(), os.environ.get("PYTHONSAFEPATH")

    if __name__ == "__main__":
        options = {"nproc_per_node": 1, "backend": "gloo", "start_method": sys.argv[1]}
        print(*ddpsafe.launch(find, **options).values[0])
"""


@pytest.mark.full
@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python before 3.11 has no safe path and only gets a warning"
)
@pytest.mark.parametrize(
    "start_method", ["spawn", pytest.param("forkserver", marks=pytest.mark.soak)]
)
def test_modules_planted_in_the_current_directory_do_not_run(
    tmp_path: Path, start_method: str
) -> None:
    """``python -c``, which starts the processes of a launch, searches the current directory first."""
    script = scripts.write(tmp_path, "own/train.py", LAUNCHES)
    shared, mark = tmp_path / "shared", tmp_path / "mark"
    shared.mkdir()
    shared.chmod(0o1777)
    for name in ("multiprocessing", "json", "pickle", "socket", "site", "torch", "ddpsafe"):
        (shared / f"{name}.py").write_text(PLANTED)
    env = {"MARK": str(mark)}
    run = scripts.Script([str(script), start_method], folder=shared, env=env, fresh=True).end()
    assert run.lines() == [f"{shared} None"]
    assert not mark.exists(), mark.read_text()


def _stores(folder: Path) -> dict[str, object]:
    from torch.distributed import FileStore, HashStore

    return {
        "of torch, in memory": HashStore(),
        "of torch, a file": FileStore(str(folder / "file"), -1),
        "a folder": FolderStore(folder / "folder"),
    }


@pytest.mark.parametrize("which", ["of torch, in memory", "of torch, a file", "a folder"])
def test_a_folder_store_behaves_as_torchs_stores_do(tmp_path: Path, which: str) -> None:
    """`Control` accepts all of them."""
    store = _stores(tmp_path)[which]
    assert isinstance(store, FolderStore) or hasattr(store, "wait")
    keys = ["plain", "with/slash", "../up", "A", "a", "x" * 1000, "ünïcode\n"]
    assert [store.check([key]) for key in keys] == [False] * len(keys)  # type: ignore[attr-defined]
    for number, key in enumerate(keys):
        store.set(key, str(number))  # type: ignore[attr-defined]
    assert [store.get(key) for key in keys] == [b"%d" % each for each in range(len(keys))]  # type: ignore[attr-defined]
    assert store.check(keys)  # type: ignore[attr-defined]
    assert not store.check([*keys, "other"])  # type: ignore[attr-defined]
    assert bytes(store.compare_set("new", "", "first")) == b"first"  # type: ignore[attr-defined]
    assert bytes(store.compare_set("new", "", "second")) == b"first"  # type: ignore[attr-defined]
    store.set("bytes", b"\0\xff" * 1000)  # type: ignore[attr-defined]
    assert bytes(store.get("bytes")) == b"\0\xff" * 1000  # type: ignore[attr-defined]
    store.delete_key("plain")  # type: ignore[attr-defined]
    store.delete_key("plain")  # type: ignore[attr-defined]
    assert not store.check(["plain"])  # type: ignore[attr-defined]


@pytest.mark.full
def test_a_key_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    """Wherever a writer is killed, no reader finds half a value and no later writer waits for it."""
    store = FolderStore(tmp_path / "store")
    values = {bytes([letter]) * 5000 for letter in b"abc"}
    for _ in range(30):
        writer = _forked(lambda: _write_for_ever(store, sorted(values)))
        scripts.wait_until(lambda: store.check(["key", "once"]))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        assert store.get("key") in values
        assert store.compare_set("once", "", "mine") == b"set"
        store.delete_key("key")
        store.delete_key("once")
    store.set("key", "well")
    assert store.get("key") == b"well"


def _write_for_ever(store: FolderStore, values: list[bytes]) -> None:
    while True:
        for value in values:
            store.set("key", value)
            store.compare_set("once", "", "set")


def _forked(function: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(1)
    return pid


def test_barriers_do_not_fill_the_store(tmp_path: Path) -> None:
    """The keys of a barrier are removed once all ranks have reached the next one of its name."""
    size, steps = 3, 50
    store = FolderStore(tmp_path)
    ranks = [Control(store, rank=rank, world_size=size) for rank in range(size)]
    with ThreadPoolExecutor(size) as executor:
        for _ in range(steps):
            barriers = [
                executor.submit(each.barrier, "step", deadline=Deadline.after(LIMIT))
                for each in ranks
            ]
            assert [each.result() for each in barriers] == [[], [], []]
    assert len(list(tmp_path.iterdir())) <= 2 * (size + 1)


WRITE = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a file that must neither be written to nor shown."""
    file = tmp_path / "home" / "bashrc"
    file.parent.mkdir()
    file.write_text("private")
    return file


@pytest.mark.parametrize("planted", ["link", "dangling link", "pipe", "linked folder"])
def test_planted_links_and_pipes_are_neither_written_nor_read(
    tmp_path: Path, victim: Path, planted: str
) -> None:
    """A link instead of the file or its folder is refused, and a pipe does not block."""
    folder = tmp_path / "attempt-1"
    log = folder / "rank-0.out"
    if planted == "linked folder":
        folder.symlink_to(victim.parent)
        (victim.parent / log.name).write_text("private")
    else:
        folder.mkdir()
        if planted == "pipe":
            os.mkfifo(log)
        else:
            log.symlink_to(victim if planted == "link" else victim.parent / "new")
    with pytest.raises(OSError, match=r"link|regular|Not a directory|No such device"):
        open_log(log, WRITE)
    assert read_log(log) == ""
    assert victim.read_text() == "private"
    assert sorted(path.name for path in victim.parent.iterdir()) in (
        ["bashrc"],
        ["bashrc", "rank-0.out"],
    )


def test_a_new_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """Logs may contain data that other users must not see."""
    before = os.umask(0)
    try:
        os.close(open_log(tmp_path / "log", WRITE))
        with open_run_directory(tmp_path / "run") as directory:
            directory.make_attempt_folder(1)
    finally:
        os.umask(before)
    found = [tmp_path / "log", tmp_path / "run", tmp_path / "run" / "attempt-1"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in found] == [0o600, 0o700, 0o700]


@pytest.mark.parametrize("by", ["link", "folder of another user"])
def test_a_rank_refuses_a_swapped_attempt_folder(tmp_path: Path, victim: Path, by: str) -> None:
    """A user who may write to the run directory can rename the folder, but ranks refuse the new one."""
    world = World.alone()
    with open_run_directory(tmp_path / "run") as directory:
        attempt = directory.make_attempt_folder(1)
        attempt.rename(attempt.with_name("mine"))
        if by == "link":
            attempt.symlink_to(victim.parent)
            (victim.parent / "rank-0.out").symlink_to(victim)
        elif os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        else:
            attempt.mkdir()
            os.chown(attempt, 65534, 65534)
        with pytest.raises(ddpsafe.PreflightError, match="run_dir=") as caught:
            capture_output(directory.logs(1, world, is_shown=True), print)
        assert str(attempt) in caught.value.explanation.what
    assert victim.read_text() == "private"


@pytest.mark.parametrize("name", ["attempt-1", "earlier"])
def test_a_link_planted_before_the_launch_is_not_followed(
    tmp_path: Path, victim: Path, name: str
) -> None:
    """An old attempt is moved aside unread; a link instead of the folder for old attempts is refused."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "attempt-1").symlink_to(victim.parent)
    if name == "earlier":
        (run_dir / "earlier").symlink_to(victim.parent)
        with (
            pytest.raises(ddpsafe.PreflightError, match="symbolic link"),
            open_run_directory(run_dir),
        ):
            pass
    else:
        options = {"nproc_per_node": 2, "backend": "gloo", "start_method": "forkserver"}
        result = ddpsafe.launch(add_up, (1,), run_dir=run_dir, **options)
        assert result.values == {0: 2.0, 1: 3.0}
        assert not (run_dir / "attempt-1").is_symlink()
    assert [path.name for path in victim.parent.iterdir()] == ["bashrc"]
    assert victim.read_text() == "private"


@pytest.mark.parametrize(
    ("mode", "warnings"), [(0o700, 0), (0o755, 0), (0o1777, 0), (0o775, 1), (0o777, 1)]
)
def test_a_run_directory_that_other_users_can_change_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warnings: int
) -> None:
    """They could remove the logs, or make the launch fail."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    with open_run_directory(run_dir):
        pass
    assert caplog.text.count("other users can rename") == warnings


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    """A rank may write gigabytes; the launcher does not load them to find the last lines."""
    log = tmp_path / "rank-0.err"
    log.write_bytes(b"\xc3\xa9 and so on\n" * 200_000 + b"the last words\n")
    text = read_log(log)
    assert text.endswith("and so on\nthe last words\n")
    assert len(text) <= 1 << 20


@pytest.mark.parametrize(("said", "times"), [(None, 1), ("a line\n", 0)], ids=["own", "another's"])
def test_only_its_own_launcher_appends_the_traceback_of_a_rank(
    tmp_path: Path, said: str | None, times: int
) -> None:
    """The launchers of several nodes may share the directory."""
    raised = Raised(
        type_name="ValueError",
        message="bad batch",
        traceback="ValueError: bad batch\n",
        payload=None,
        phase="running",
        where="train.py:3",
        position=Position(collectives=()),
        at_ns=1,
    )
    with open_run_directory(tmp_path / "run") as directory:
        directory.make_attempt_folder(1)
        log = directory.logs(1, World.alone(), is_shown=True).stderr
        outcome = RankOutcome(
            rank=0,
            local_rank=0,
            pid=1,
            hostname="h1",
            status="raised",
            phase="running",
            exit_code=1,
            raised=raised,
            stderr=log,
            said=said,
        )
        directory.note_tracebacks([outcome])
        assert read_log(log).count("bad batch") == times
