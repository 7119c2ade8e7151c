"""``ddpsafe status``: what another terminal is told of a launch, running, ended or dead."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from typing import TYPE_CHECKING

import live_programs as programs
import pytest
from fault_kit import World

from ddpsafe._launcher.watch.status_socket import SOCKET, StatusSocket, answer
from ddpsafe.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("how", ["stopped", "with the GIL"])
def test_ranks_are_shown_while_one_cannot_answer(tmp_path: Path, how: str) -> None:
    """Steps are read without the rank, and its state, or its line, is known all the same."""
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


def test_stacks_show_what_a_loader_worker_reads(tmp_path: Path) -> None:
    """The rank waits in its loader; the line of the dataset is the worker's."""
    result = World(folder=tmp_path).launch(programs.ask_for_status_of_a_loader)
    said = result.values[0].splitlines()
    assert "rank 1, thread MainThread, the last call first:" in said
    assert any("dataloader.py" in line for line in said)
    (waits,) = [line for line in said if line.startswith("rank 1 waits for ")]
    assert "(pid " in waits
    assert waits.endswith("in __getitem__")
    assert "live_programs.py" in waits
    assert not [line for line in said if line.startswith("rank 0 waits for ")]


def test_a_dead_launcher_is_told_from_one_that_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its socket is still there, but no process listens on it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET))
    assert main(["status", str(tmp_path)]) == 1
    assert "died without cleaning up" in capsys.readouterr().out
    (tmp_path / SOCKET).unlink()
    assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"no launch is running in {tmp_path}\n"


def test_a_launch_that_failed_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest report is shown, with control characters made visible."""
    for number in (1, 2):
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
    assert "attempt 2 failed: RankRaisedError: rank 2 " in said
    assert "\x1b" not in said
    assert "more" not in said


def test_what_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that does not exist is one case, and both a path and --all is wrong usage."""
    assert main(["status", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().out.startswith("there is no directory ")
    assert main(["status", str(tmp_path), "--all"]) == 2


def facts() -> dict[str, object]:
    """Return what a launcher of one rank, this process, answers."""
    rank = {
        "rank": 0,
        "local_rank": 0,
        "hostname": "host",
        "pid": os.getpid(),
        "phase": "running",
        "state": "sleeping",
        "answered": True,
        "steps": 7,
        "steps_per_s": 2.0,
        "saves": 0,
        "last_step_s": 0.2,
        "collective": None,
        "where": "train.py:11 in train",
        "in_collective": False,
        "threads": [],
        "loader_workers": [],
    }
    return {
        "schema": 1,
        "pid": os.getpid(),
        "attempt": 1,
        "world_size": 1,
        "longest_step_s": 0.5,
        "stragglers": [{"text": "all others waited for rank 3 14 % of the time"}],
        "ranks": [rank],
    }


def test_watching_shows_it_again_until_the_launch_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every second, with who makes the others wait below the table; then how it ended."""
    listener = StatusSocket(tmp_path)

    def be_the_launcher() -> None:
        for _ in range(2):
            select.select(listener.handles(), [], [], 30)
            request = listener.accept()
            assert request is not None
            answer(request[0], facts() | {"run_dir": str(tmp_path)})
        listener.close()

    launcher = threading.Thread(target=be_the_launcher)
    launcher.start()
    assert main(["status", str(tmp_path), "--watch"]) == 1
    launcher.join()
    said = capsys.readouterr().out
    assert said.count("train.py:11 in train") == 2
    assert said.count("all others waited for rank 3 14 % of the time\n") == 2
    assert said.endswith(f"no launch is running in {tmp_path}\n")
