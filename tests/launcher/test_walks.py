"""The documented files of a launch are the files that actually run in it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
from forked_ranks import free_port
from scripts import SPAWNING, Script

CHECKOUT: Final = Path(__file__).parents[2]
PAGE: Final = CHECKOUT / "docs" / "explanation" / "files-of-a-launch.md"
PROGRAM: Final = CHECKOUT / "tests" / "programs" / "walk_programs.py"
PATH: Final = re.compile(r"`([\w/]+(?:\.py|/))`")

WALKS: Final = {
    "launch": ("launch(fn)", 25),
    "exception": ("an exception", 12),
    "timeout": ("a collective", 14),
    "nodes": ("two nodes", 13),
}
"""The text that each walk's heading contains, and how many files the walk may have."""


SUCCEED: Final = ("launch", "nodes")
ERRORS: Final = {"exception": "RankRaisedError", "timeout": "LaunchTimeoutError"}
"""What a walk to a failure ends with."""


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of the page."""
    (section,) = [
        each for each in PAGE.read_text(encoding="utf-8").split("\n## ") if heading in each[:80]
    ]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.strip("|").split("|") for line in lines[2:]]


def listed(walk: str) -> list[str]:
    """Return the files that the page lists for a walk, in reading order."""
    return [file for row in rows_of(WALKS[walk][0]) for file in PATH.findall(row[0])]


def not_counted(walk: str) -> list[str]:
    """Return the files and folders that the page excludes from a walk."""
    rows = rows_of("need not be opened")
    return [file for row in rows if row[1].strip() == "any" or walk in row[1] or (walk == "nodes" and "launch" in row[1]) for file in PATH.findall(row[0])]  # fmt: skip


def is_below(file: str, entries: Iterable[str]) -> bool:
    """Return whether a file is one of the entries, or in a folder that is one."""
    return any(file == each or (each.endswith("/") and file.startswith(each)) for each in entries)


@pytest.mark.full(but=["exception"])
@pytest.mark.recorder
@pytest.mark.parametrize("walk", WALKS)
def test_the_files_of_a_walk_are_the_files_that_run(walk: str, tmp_path: Path) -> None:
    """Each listed file runs, and each file that runs is listed or excluded for a stated reason."""
    env = {"WALK_FOLDER": str(tmp_path), "WALK_PORT": str(free_port())} | (
        SPAWNING if walk in SUCCEED else {}
    )
    launchers = [Script([str(PROGRAM), walk], folder=tmp_path, env=env)]
    if walk == "nodes":
        launchers.append(Script([str(PROGRAM), walk], folder=tmp_path, env=env))
    for run in [launcher.end() for launcher in launchers]:
        assert (run.code == 0) is (walk in SUCCEED), run.err
        assert ERRORS.get(walk, "") in run.err
    ran = {line for file in tmp_path.glob("*.files") for line in file.read_text().splitlines()}
    assert len(list(tmp_path.glob("*.files"))) == len(launchers) + 2, "launchers and both ranks"
    beyond = set() if walk != "nodes" else set(listed("launch"))
    assert set(listed(walk)) - ran == set(), "listed, but it takes no part"
    counted = {file for file in ran if not is_below(file, not_counted(walk))}
    assert counted - set(listed(walk)) - beyond == set(), "takes part, but is not listed"


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_short(walk: str) -> None:
    """At most 25 files lead to the result, 12 and 14 to an error; two nodes add at most 13."""
    files = listed(walk)
    assert len(files) == len(set(files)) <= WALKS[walk][1]
