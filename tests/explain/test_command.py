"""``ddpsafe explain``: what it reads, what it prints, and its exit codes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from explained import explain
from source_tree import PACKAGE

from ddpsafe._explain.catalogue import PACKED, built_in

LOST: Final = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711\n"
KILLED: Final = (
    "E api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 8091) of binary: python3\n"
)


def test_json_of_standard_input() -> None:
    """The best finding comes first, with the keys that programs read; run as a user runs it."""
    command = [sys.executable, "-m", "ddpsafe", "explain", "--json", "-"]
    log = LOST + KILLED
    run = subprocess.run(command, input=log, capture_output=True, text=True, check=False)
    findings = json.loads(run.stdout)["findings"]
    assert run.returncode == 1
    assert [each["code"] for each in findings] == ["DS-END-sigkill", "DS-PEER-lost"]
    assert {"code", "cause", "fix", "rank", "evidence", "retry"} <= findings[0].keys()
    assert findings[0]["rank"] == 1
    assert findings[0]["evidence"] == [{"line": 2, "text": KILLED.strip()}]


def cpu_s(*command: str, folder: Path) -> float:
    """Return the least CPU time of three runs of a Python command, of which the first keeps its bytecode."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": str(folder)}
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *command],
            input=KILLED,
            capture_output=True,
            text=True,
            check=False,
            env=env,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(took)


@pytest.mark.full
def test_a_short_log_is_explained_at_once(tmp_path: Path) -> None:
    """Within 9 times what three imports of any small program cost; it is 4 to 5.

    It was 20 when every rule was built and every pattern indexed at the start.
    """
    shutil.copytree(PACKAGE, tmp_path / "ddpsafe", ignore=shutil.ignore_patterns("__pycache__"))
    packed = tmp_path / "ddpsafe" / "_explain" / PACKED  # as a wheel has them
    packed.write_text(json.dumps(built_in().packed), encoding="utf-8")
    small = cpu_s("-c", "import re, json, argparse", folder=tmp_path)
    assert cpu_s("-m", "ddpsafe", "explain", "-", folder=tmp_path) < 9 * small


def test_a_log_without_a_failure_is_reported_as_such() -> None:
    """With exit code 0 and one sentence."""
    run = explain(log="epoch 1 loss 0.3\n")
    assert run.code == 0
    assert "No known failure was found in this line." in run.out


def test_a_finding_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words stay whole, so that an option or a command can be copied; a line of the log is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    run = explain(
        log=f"[rank3]: OSError: [Errno 28] No space left on device: '/{'x' * 200}'\n{LOST}"
    )
    assert max(map(len, run.out.splitlines())) <= 80
    fixes = [rule.fix for rule in built_in().rules if rule.code in ("DS-DISK-full", "DS-PEER-lost")]
    assert all(" ".join(fix.split()) in " ".join(run.out.split()) for fix in fixes)


def test_files_and_folders_are_read_together(tmp_path: Path) -> None:
    """With one log for each rank, the rank that failed comes before the rank that lost its peer."""
    (tmp_path / "rank-0.err").write_text(LOST, encoding="utf-8")
    (tmp_path / "rank-1.err").write_text("MemoryError\n", encoding="utf-8")
    run = explain(str(tmp_path))
    assert run.out.startswith("DS-MEM-alloc")
    assert "DS-PEER-lost" in run.out


REPORT: Final = {
    "schema": 1,
    "error": "RankKilledError",
    "kind": "killed",
    "what": "rank 1 (world_size 2) was killed by SIGKILL on host while running.",
    "cause": "the kernel's out-of-memory killer.",
    "fix": "see dmesg on host.",
    "details": ["rank 0 failed because of rank 1"],
    "attempt": 2,
    "rank": 1,
}


def test_a_run_directory_is_explained_by_its_report(tmp_path: Path) -> None:
    """The report of the newest attempt comes first, with its rank, kind and fix."""
    for attempt in (1, 2):
        folder = tmp_path / f"attempt-{attempt}"
        folder.mkdir()
        facts = REPORT | {"attempt": attempt, "kind": ("hang", "killed")[attempt - 1]}
        (folder / "report.json").write_text(json.dumps(facts), encoding="utf-8")
        (folder / "report.txt").write_text("RankKilledError: rank 1\n", encoding="utf-8")
        (folder / "rank-0.err").write_text(LOST, encoding="utf-8")
    first, second = json.loads(explain("--json", str(tmp_path)).out)["findings"]
    assert (first["code"], first["rank"], first["kind"]) == ("DS-RUN-report", 1, "killed")
    assert first["fix"] == "see dmesg on host."
    assert second["code"] == "DS-PEER-lost"


def test_an_invalid_report_is_read_as_a_log(tmp_path: Path) -> None:
    """It is truncated, or another program wrote it."""
    for text in ("{", "[1]", '{"kind": "x"}', '{"error": "MemoryError"}\nMemoryError\n'):
        (tmp_path / "report.json").write_text(text, encoding="utf-8")
        assert explain(str(tmp_path)).code in (0, 1)


def test_a_markdown_summary_is_a_table() -> None:
    """GitHub renders it in an issue."""
    run = explain("--markdown", log=KILLED)
    assert run.out.startswith("| code | rank | cause | what to do |\n|---|---|---|---|\n")


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    """The message names the file and is not a traceback."""
    run = explain(str(tmp_path / "none.log"))
    assert run.code == 2
    assert "none.log cannot be read: No such file or directory" in run.err


def test_binary_data_and_a_very_long_line_are_read(tmp_path: Path) -> None:
    """Arbitrary bytes and 8 MB without a line break cause no traceback, and later lines are read."""
    junk = (
        bytes(range(256)) * 200
        + b"x" * (8 << 20)
        + b"\nOSError: [Errno 28] No space left on device"
    )
    (tmp_path / "junk.log").write_bytes(junk)
    run = explain("--json", str(tmp_path / "junk.log"))
    assert [each["code"] for each in json.loads(run.out)["findings"]] == ["DS-DISK-full"]


def test_the_command_does_not_import_torch() -> None:
    """It answers at once, and also where torch is broken."""
    code = (
        "import sys, io, ddpsafe.cli; sys.stdin = io.TextIOWrapper(io.BytesIO(b'x'));"
        "ddpsafe.cli.main(['explain']); sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
