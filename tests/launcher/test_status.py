"""``ddpsafe status`` shows a running, ended or dead launch in another terminal, and which ranks make others wait."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import hang_programs as programs
import pytest
import scripts
from fault_kit import World
from forked_ranks import free_port
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from ddpsafe._commands import openmetrics, status
from ddpsafe._gpus import GpuReading
from ddpsafe._launcher.diagnosis.stragglers import find_stragglers
from ddpsafe._launcher.watch.status_socket import SOCKET, StatusSocket, ask
from ddpsafe.cli import main


@pytest.mark.full(but=["stopped"])
@pytest.mark.parametrize("how", ["stopped", "with the GIL"])
def test_all_ranks_are_shown_while_one_cannot_answer(tmp_path: Path, how: str) -> None:
    """That rank's steps, and its state or line, are read without its help."""
    result = World(folder=tmp_path).launch(programs.ask_for_status, how)
    (launch,) = json.loads(result.values[0])["launches"]
    assert launch["state"] == "running"
    assert launch["run_dir"] == str(tmp_path / "run")
    asking, away = launch["ranks"]
    assert (asking["rank"], away["rank"]) == (0, 1)
    assert (asking["steps"], away["steps"]) == (3, 3)
    assert (asking["answered"], away["answered"]) == (True, False)
    assert asking["phase"] == "running"
    assert asking["memory_bytes"] > 1 << 20
    assert "in call_status" in asking["where"]
    assert any("subprocess.py" in frame[0] for frame in asking["threads"][0]["frames"])
    if how == "stopped":
        assert away["state"] == "stopped"
    else:
        assert "in wait_with_the_gil" in away["where"]
    assert not (tmp_path / "run" / SOCKET).exists()
    metrics = parsed(openmetrics.render([launch]))
    assert metrics["ddpsafe_launch_ranks"] == {("",): 2}
    assert metrics["ddpsafe_rank_steps_total"] == {("0",): 3, ("1",): 3}
    assert metrics["ddpsafe_rank_memory_bytes"]["0",] > 1 << 20


@pytest.mark.full
def test_nodes_that_share_a_run_directory_are_found_in_it_and_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two launchers on one host stand for two nodes; each listens beside its own logs."""
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\n"
    script = scripts.write(tmp_path, "train.py", waits)
    run_dir, end = tmp_path / "shared", tmp_path / "end"
    nodes = ["--nnodes", "2", "--rdzv-endpoint", f"{socket.gethostname()}:{free_port()}"]
    command = ["-m", "ddpsafe", "run", *nodes, "--rdzv-id", "7", "--run-dir", str(run_dir)]
    launchers = [
        scripts.Script([*command, "--node-rank", rank, str(script), str(end)], folder=tmp_path)
        for rank in "01"
    ]

    def states(*folder: str) -> set[str]:
        main(["status", "--json", *folder])
        launches = json.loads(capsys.readouterr().out)["launches"]
        return {each["state"] for each in launches if each["run_dir"] == str(run_dir)}

    scripts.wait_until(lambda: len([*run_dir.glob(f"node-*/{SOCKET}")]) == 2)
    scripts.wait_until(lambda: states() == states(str(run_dir)) == {"running"})
    os.kill(launchers[0].pid, signal.SIGSTOP)
    assert states(str(run_dir)) == {"running"}
    os.kill(launchers[0].pid, signal.SIGCONT)
    end.touch()
    assert [each.end().code for each in launchers] == [0, 0]


def parsed(text: str) -> dict[str, dict[tuple[str], float]]:
    """Read metrics with the parser of prometheus_client: by name, then by the label ``rank``."""
    found: dict[str, dict[tuple[str], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rank = sample.labels.get("rank", "")
            found.setdefault(sample.name, {})[rank,] = sample.value
    return found


def test_metrics_of_several_launches_are_read_by_prometheus() -> None:
    """One of them has a rank on another host, one has ended, and a path may be any text."""
    path = 'a "b"\\c\nd'
    rank = {"rank": 0, "hostname": "one", "steps": 7, "steps_per_s": 0.5, "last_step_s": 2.0}
    away = {**rank, "rank": 1, "hostname": "two", "last_step_s": None}
    late = {"ranks": [1, 3], "waited_s": 1.5, "share": 0.25}
    running = {
        "run_dir": path, "state": "running", "world_size": 2, "attempt": 3, "longest_step_s": 4.0,
        "ranks": [rank, away], "stragglers": [late],
    }  # fmt: skip
    text = openmetrics.render([running, {"run_dir": "other", "state": "ended"}])
    families = {each.name: each for each in text_string_to_metric_families(text)}
    assert {
        each.labels["run_dir"]: each.value for each in families["ddpsafe_launch_running"].samples
    } == {path: 1, "other": 0}
    assert families["ddpsafe_rank_steps"].type == "counter"
    (since,) = families["ddpsafe_rank_since_step_seconds"].samples
    assert (since.labels, since.value) == ({"run_dir": path, "rank": "0", "host": "one"}, 2)
    (waited,) = families["ddpsafe_waited_seconds"].samples
    assert (waited.labels["ranks"], waited.value) == ("1,3", 1.5)
    assert families["ddpsafe_launch_nodes"].samples[0].value == 2
    assert "ddpsafe_rank_memory_bytes" not in families


def test_metrics_without_a_launch_are_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The collector reads them all the same, and the exit code says that nothing runs."""
    assert main(["status", "--openmetrics", str(tmp_path)]) == 1
    assert parsed(capsys.readouterr().out) == {"ddpsafe_launch_running": {("",): 0}}


@pytest.mark.full
def test_stacks_show_what_a_loader_worker_reads(tmp_path: Path) -> None:
    """The rank waits in its loader, and the worker's stack shows the line of the dataset."""
    result = World(folder=tmp_path).launch(programs.ask_for_status_of_a_loader)
    said = result.values[0].splitlines()
    assert "rank 1, thread MainThread, the last call first:" in said
    assert any("dataloader.py" in line for line in said)
    (head,) = [i for i, line in enumerate(said) if "DataLoader worker" in line]
    assert said[head].startswith("rank 1, DataLoader worker ")
    assert "(pid " in said[head]
    calls = said[head + 1 :]
    assert any("hang_programs.py" in line and "in __getitem__" in line for line in calls)
    assert any("fetch.py" in line for line in calls)


def test_a_dead_launcher_is_distinguished_from_one_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dead launcher leaves its socket, on which no process listens."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET))
    assert main(["status", str(tmp_path)]) == 1
    assert "died without cleaning up" in capsys.readouterr().out
    (tmp_path / SOCKET).unlink()
    assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"no launch is running in {tmp_path}\n"


def test_a_failed_launch_is_shown_with_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest report is shown, with control characters made visible."""
    for number in (1, 2, 9, 10):
        folder = tmp_path / f"attempt-{number}"
        folder.mkdir()
        report = {
            "error": "RankRaisedError",
            "message": f"rank {number} \x1b[2J\nmore",
            "attempt": number,
        }
        (folder / "report.json").write_text(json.dumps(report))
    assert main(["status", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "attempt 10 failed: RankRaisedError: rank 10 " in said
    assert "\x1b" not in said
    assert "more" not in said


def test_a_missing_path_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said in words, and the exit code is that of no running launch."""
    assert main(["status", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().out.startswith("there is no directory ")


def facts() -> dict[str, object]:
    """Return the answer of a launcher whose only rank is this process."""
    rank = {
        "rank": 0, "local_rank": 0, "hostname": "host", "pid": os.getpid(), "phase": "running",
        "state": "sleeping", "answered": True, "steps": 7, "steps_per_s": 2.0, "saves": 0,
        "resumed_from": "", "last_step_s": 0.2, "collective": None, "where": "train.py:11 in train",
        "in_collective": False, "threads": [], "loader_workers": [],
    }  # fmt: skip
    return {
        "schema": 1, "pid": os.getpid(), "attempt": 1, "world_size": 1, "longest_step_s": 0.5,
        "stragglers": [{"text": "all others waited for rank 3 14 % of the time"}], "ranks": [rank],
    }  # fmt: skip


def await_question(listener: StatusSocket) -> bool:
    """Wait as a launcher does; return whether it asks for stacks."""
    while (wants_stacks := listener.accept()) is None:
        assert select.select(listener.handles(), [], [], 30)[0]
    return wants_stacks


@contextlib.contextmanager
def launcher_that_answers(folder: Path, times: int) -> Iterator[None]:
    """Answer so many questions about a launch, in a thread."""
    listener = StatusSocket(folder)

    def be_the_launcher() -> None:
        for _ in range(times):
            assert await_question(listener) is False
            listener.answer(facts() | {"run_dir": str(folder)})
        listener.close()

    launcher = threading.Thread(target=be_the_launcher)
    launcher.start()
    yield
    launcher.join()


def test_watch_repeats_the_status_until_the_launch_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each time it lists, below the table, the ranks that make others wait; then it shows the end."""
    with launcher_that_answers(tmp_path, times=2):
        assert main(["status", str(tmp_path), "--watch"]) == 1
    said = capsys.readouterr().out
    assert said.count("train.py:11 in train") == 2
    assert said.count("all others waited for rank 3 14 % of the time\n") == 2
    assert said.endswith(f"no launch is running in {tmp_path}\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_is_as_wide_as_the_terminal(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    """Where a row does not fit, what a rank does stands below it; only a path may be longer."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with launcher_that_answers(tmp_path, times=1):
        assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if len(line) > columns and len(line.split()) > 1] == []
    assert any(line[:2] == "0 " and "train.py:11" in line for line in said) == (columns > 80)


def test_a_path_that_is_not_utf_8_can_be_sent(tmp_path: Path) -> None:
    """Scripts and datasets may have such paths, and the launch continues."""
    listener = StatusSocket(tmp_path)
    path = os.fsdecode(b"/data/caf\xe9.py")

    def be_the_launcher() -> None:
        await_question(listener)
        listener.answer({"where": path})

    launcher = threading.Thread(target=be_the_launcher)
    launcher.start()
    assert ask(tmp_path)["where"] == path
    launcher.join()
    listener.close()


def test_the_launcher_does_not_wait_for_a_process_that_sends_nothing(tmp_path: Path) -> None:
    """A client is answered once it asks; else it is disconnected, at the latest at the launch's end."""
    listener = StatusSocket(tmp_path)
    with contextlib.ExitStack() as stack:
        silent, later, asking, gone, *more = (
            stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(11)
        )
        for client in (silent, later, asking, gone, *more):
            client.settimeout(30)
        for client in (silent, later, gone):
            client.connect(str(tmp_path / SOCKET))
            assert listener.accept() is None
        assert select.select(listener.handles(), [], [], 0)[0] == []
        gone.close()
        asking.connect(str(tmp_path / SOCKET))
        asking.sendall(b"stacks\n")
        assert await_question(listener) is True
        listener.answer({"ranks": 2})
        assert asking.recv(100) == b'{"ranks": 2}\n'
        assert select.select(listener.handles(), [], [], 0)[0] == []
        for client in more:
            client.connect(str(tmp_path / SOCKET))
            assert listener.accept() is None
        assert silent.recv(1) == b""
        later.sendall(b"status\n")
        assert await_question(listener) is False
        assert listener.is_asked
        listener.close()
        assert [client.recv(1) for client in (later, *more)] == [b""] * 8
    assert listener.handles() == []


def test_without_a_socket_the_launcher_has_nothing_to_wait_for(tmp_path: Path) -> None:
    """A socket that does not listen is always readable, so the launcher would never sleep."""
    assert StatusSocket(tmp_path / "none").handles() == []


def test_a_launcher_without_a_descriptor_is_not_woken_again(tmp_path: Path) -> None:
    """A client that cannot be answered must not keep a core busy; the next look answers it."""
    listener = StatusSocket(tmp_path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / SOCKET))
        assert select.select(listener.handles(), [], [], 30)[0]
        free = os.dup(client.fileno())
        os.close(free)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            assert listener.accept() is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert listener.handles() == []
        client.sendall(b"status")
        assert await_question(listener) is False
        assert select.select(listener.handles(), [], [], 0) == ([], [], [])
        listener.answer({"ranks": 2})
        assert client.recv(100) == b'{"ranks": 2}\n'
    listener.close()


CLIENT_LEAVES_EARLY: Final = """
    import signal
    import socket
    import subprocess
    import threading
    import time
    from pathlib import Path

    import ddpsafe
    from ddpsafe._launcher.watch.status_socket import SOCKET

    def ask_and_leave(_, run_dir):
        assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        for waits in (False, True):
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(str(run_dir / SOCKET))
                asking.sendall(b"status")
                assert not waits or asking.recv(1)

    def start_program():
        while not (run_dir / SOCKET).exists():
            time.sleep(0.01)
        ended = subprocess.run(["sh", "-c", "kill -s PIPE $$"], restore_signals=False)
        print("a program ends by", -ended.returncode)

    if __name__ == "__main__":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        run_dir = Path("run").absolute()
        starting = threading.Thread(target=start_program)
        starting.start()
        ddpsafe.launch(ask_and_leave, (run_dir,), nproc_per_node=1, run_dir=run_dir)
        starting.join()
        ddpsafe.spawn(
            ask_and_leave, (run_dir,), join=False, start_method="forkserver", run_dir=run_dir
        ).join()
        print("after", signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL)
"""


@pytest.mark.full
def test_a_client_that_leaves_early_does_not_end_a_launcher_by_sigpipe(tmp_path: Path) -> None:
    """A script may set SIGPIPE to its default action, which is restored after the launch."""
    ended = scripts.run(tmp_path, CLIENT_LEAVES_EARLY)
    assert (ended.code, ended.out) == (0, "a program ends by 13\nafter True\n"), ended.err


HOT: Final = {"sm_mhz": 1200, "max_sm_mhz": 1980, "slowdowns": 0x48, "celsius": 91}
LIMITED: Final = {"sm_mhz": 1755, "max_sm_mhz": 1980, "slowdowns": 0x04, "celsius": 66}
SILENT: Final[dict[str, int | None]] = dict.fromkeys(HOT)


def reading(clocks: dict[str, int | None], used_gib: int | None = 72) -> GpuReading:
    """Return a driver's reading of GPU 3."""
    used = None if used_gib is None else used_gib << 30
    return GpuReading(index=3, used_bytes=used, total_bytes=80 << 30, **clocks)


@pytest.mark.parametrize(
    ("gpu", "text"),
    [
        (reading(HOT), "1200 of 1980 MHz, slowed by the hardware, heat, 91 °C, 72.0 of 80.0 GiB in use"),
        (reading(LIMITED), "1755 of 1980 MHz, slowed by the power limit, 66 °C, 72.0 of 80.0 GiB in use"),
        (reading({**LIMITED, "slowdowns": 0x01}), "1755 of 1980 MHz, 66 °C, 72.0 of 80.0 GiB in use"),
        (reading({**HOT, "slowdowns": 0x60}), "1200 of 1980 MHz, slowed by heat, 91 °C, 72.0 of 80.0 GiB in use"),
        (reading({**SILENT, "sm_mhz": 900}), "900 MHz, 72.0 of 80.0 GiB in use"),
        (reading(SILENT, None), "the driver reports nothing about it"),
    ],
)  # fmt: skip
def test_a_gpu_is_described_in_one_line(gpu: GpuReading, text: str) -> None:
    """It has the clock, the reasons for slowdowns, the temperature and the memory, where known."""
    assert str(gpu) == f"GPU 3: {text}"


@pytest.mark.parametrize(
    ("clocks", "is_late", "is_shown"),
    [(LIMITED, True, True), (LIMITED, False, False), (HOT, False, True), (SILENT, False, False)],
    ids=["late", "at-its-power-limit", "hot", "unknown"],
)
def test_the_gpu_of_a_slow_rank_is_shown(
    clocks: dict[str, int | None],
    is_late: bool,  # noqa: FBT001 - a row
    is_shown: bool,  # noqa: FBT001 - a row
) -> None:
    """It follows a straggler's line; for other ranks only a throttled GPU is shown."""
    launch = facts()
    (rank,) = launch["ranks"]  # type: ignore[misc]
    rank["gpus"] = [status.gpu_facts(reading(clocks))]
    launch["stragglers"] = [{"ranks": [0] if is_late else [], "text": "they wait"}]
    lines = status._lines({**launch, "state": "running", "run_dir": "run"})
    shown = [line for line in lines if line.startswith("rank 0 is on GPU 3: ")]
    assert len(shown) == is_shown
    assert json.loads(json.dumps(rank["gpus"]))[0]["is_throttled"] == (clocks is HOT)


STEPS = 40
S = 10**9


def arrivals(delay: Callable[[int, int], float], *, ranks: int = 4, buckets: int = 1) -> dict[int, list[tuple[int, int]]]:  # fmt: skip
    """Return when the ranks enter the collectives of their steps.

    A step computes for a second, and `delay` returns how much longer a rank takes. Buckets follow
    each other every 10 ms, and ranks wait only for the last one.
    """
    found: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(ranks)}
    now_s, number = 0.0, 0
    for step in range(STEPS):
        late = {rank: delay(rank, step) for rank in range(ranks)}
        for bucket in range(buckets):
            number += 1
            for rank in range(ranks):
                entered_s = now_s + 1 + late[rank] + 0.01 * bucket
                found[rank].append((number, int(entered_s * S)))
        now_s += 1 + max(late.values()) + 0.01 * buckets
    return found


ONE_NODE = dict.fromkeys(range(4), 0)
TWO_NODES = {0: 0, 1: 0, 2: 1, 3: 1}


def test_the_rank_that_enters_last_is_named_with_its_cost() -> None:
    """It takes 0.5 s longer in each step of a second, so the others wait a third of the time."""
    (found,) = find_stragglers(arrivals(lambda rank, _: 0.5 * (rank == 2)), ONE_NODE)
    assert found.ranks == (2,)
    assert found.share == pytest.approx(1 / 3, abs=0.02)
    assert found.waited_s == pytest.approx(0.5 * STEPS, rel=0.05)
    assert str(found) == (
        "all others waited for rank 2 34 % of the time: 20.0 s of 58.9 s, the last 40 collectives"
    )


def test_buckets_of_one_step_are_counted_once() -> None:
    """A single delay makes all collectives of the step late."""
    (found,) = find_stragglers(arrivals(lambda rank, _: 0.5 * (rank == 2), buckets=5), ONE_NODE)
    assert found.waited_s == pytest.approx(0.54 * STEPS, rel=0.05)


@pytest.mark.parametrize(
    "delay",
    [
        lambda _rank, _step: 0.0,
        lambda rank, step: 0.2 * (rank == step % 4),  # in turns: no rank is the slow one
        lambda rank, _step: 0.05 * rank,
        lambda rank, _step: 0.5 * (rank in (1, 2)),  # two together: no single rank makes all wait
    ],
)
def test_there_is_no_straggler_without_a_single_slow_rank(
    delay: Callable[[int, int], float],
) -> None:
    """Nor is a rank that costs less than a tenth of the time."""
    assert find_stragglers(arrivals(delay), ONE_NODE) == []


def test_a_slow_node_is_named_as_a_node() -> None:
    """Both of its ranks are late in the same steps, and neither is later than the other."""
    found = find_stragglers(arrivals(lambda rank, step: 1.0 * (rank >= 2 and step % 2)), TWO_NODES)
    assert [(each.node_rank, each.ranks) for each in found] == [(1, (2, 3))]


def test_clocks_of_nodes_may_differ() -> None:
    """If a node is late by the same time in every collective, its clock is different."""
    assert find_stragglers(arrivals(lambda rank, _: 0.4 * (rank >= 2)), TWO_NODES) == []


@pytest.mark.parametrize(
    "times", [{}, {0: [(1, S)]}, {0: [], 1: []}, {0: [(n, n * S) for n in range(20)], 1: []}]
)
def test_there_is_no_finding_without_enough_data(times: dict[int, list[tuple[int, int]]]) -> None:
    """There is one rank, no recorder, or too few collectives."""
    assert find_stragglers(times, {}) == []


@pytest.mark.recorder
def test_a_launch_reports_stragglers_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is one INFO line, computed only after the ranks have run."""
    caplog.set_level(logging.INFO, logger="ddpsafe")
    World(folder=tmp_path).launch(programs.reduce_often, 0.08)
    (line,) = [each.message for each in caplog.records if "waited for" in each.message]
    assert line.startswith("all others waited for rank 1 ")
