"""``ddpsafe explain``: what it reads, what it prints, and its exit codes; recordings of torch's flight recorder."""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
from explained import explain
from source_tree import PACKAGE

from ddpsafe._explain.catalogue import PACKED, built_in
from ddpsafe._explain.flight import FlightRecordings

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


RANKS: Final = (0, 1, 2)
TORCHS: Final = "torch.distributed.flight_recorder.fr_trace"
HAS_TORCHS: Final = find_spec("torch.distributed.flight_recorder") is not None


def call(number: int, *, op: str = "all_reduce", size: int = 4, dtype: str = "Float", state: str = "completed", line: int = 9) -> dict[str, Any]:  # fmt: skip
    """Return one entry with the keys that torch 2.5 to 2.13 write."""
    return {
        "record_id": number - 1,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [[size]],
        "input_dtypes": [dtype],
        "output_sizes": [[size * (len(RANKS) if "gather" in op else 1)]],
        "output_dtypes": [dtype],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        "timeout_ms": 600_000,
        "time_created_ns": number,
        "frames": [
            {"name": "all_reduce", "filename": "/env/site-packages/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "step", "filename": "/w/train.py", "line": line},
        ],
    }  # fmt: skip


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    """Return the dump of one rank."""
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(RANKS))}},
        "pg_status": {},
        "entries": list(entries),
    }


WAITING: Final = dump(call(1), call(2, state="started"))
ROWS: Final[dict[str, tuple[dict[int, dict[str, Any]], str, int | None, str]]] = {
    "a rank never came": ({0: WAITING, 1: dump(call(1, line=44)), 2: WAITING}, "FLIGHT-missing", 1,
        "wait for rank 1, which never called all_reduce number 2 of group 0. In it: ranks 0 and 2."),
    "a rank called another collective": ({0: WAITING,
        1: dump(call(1), call(2, op="broadcast", state="started", line=7)), 2: WAITING}, "FLIGHT-mismatch",
        1,
        "rank 1 calls broadcast of shape [4] and dtype Float at /w/train.py:7 in step. Of ranks 0 and 2 it is all_reduce of shape [4]"),
    "a rank passed another shape": ({0: WAITING, 1: WAITING,
        2: dump(call(1), call(2, size=3, state="scheduled"))}, "FLIGHT-mismatch", 2,
        "rank 2 calls all_reduce of shape [3]"),
    "a rank passed another dtype": ({0: WAITING, 1: dump(call(1), call(2, dtype="Half", state="started")),
        2: WAITING}, "FLIGHT-mismatch", 1,
        "rank 1 calls all_reduce of shape [4] and dtype Half at /w/train.py:9 in step. Of ranks 0 and 2 it is all_reduce of shape [4] and dtype Float"),
    "a rank gathers another shape": ({rank: dump(call(1, op="_all_gather_base", size=size, state="started"))
        for rank, size in enumerate((4, 5, 4))}, "FLIGHT-mismatch", 1,
        "rank 1 calls _all_gather_base of shape [5]"),
    "shapes of an all_to_all may differ": ({rank: dump(call(1, op="all_to_all", size=size, state="started"))
        for rank, size in enumerate((4, 5, 4))}, "FLIGHT-stuck", None, "All ranks are in all_to_all number 1"),
    "a rank left no dump": ({0: WAITING, 2: WAITING}, "FLIGHT-no-dump", 1,
        "There is no recording of rank 1. Waiting in all_reduce number 2 of group 0: ranks 0 and 2."),
    "a GPU is behind": ({0: WAITING, 1: dump(call(1), call(2, state="scheduled")), 2: WAITING},
        "FLIGHT-not-started", 1, "on rank 1 the GPU has not started it"),
    "all are in it": (dict.fromkeys(RANKS, WAITING), "FLIGHT-stuck", None,
        "All ranks are in all_reduce number 2"),
}  # fmt: skip


def findings_of(folder: Path) -> list[dict[str, Any]]:
    """Run the command on a folder and return its findings."""
    found: list[dict[str, Any]] = json.loads(explain("--json", str(folder)).out)["findings"]
    return found


@pytest.mark.parametrize("form", ["pickle", "json"])
@pytest.mark.parametrize(("dumps", "code", "rank", "text"), ROWS.values(), ids=ROWS.keys())
def test_the_dumps_name_the_rank_that_the_others_wait_for(
    dumps: dict[int, dict[str, Any]], code: str, rank: int | None, text: str, form: str, tmp_path: Path
) -> None:  # fmt: skip
    """Code, rank, the ranks in the collective, and the last line of the one that is missing."""
    recordings = FlightRecordings()
    for number, each in dumps.items():
        path = tmp_path / f"nccl_trace_rank_{number}"
        path.write_bytes(pickle.dumps(each, 2) if form == "pickle" else json.dumps(each).encode())
        assert recordings.read(path)
    (finding,) = recordings.findings()
    assert (finding.code, finding.rank) == (code, rank)
    assert any("/w/train.py" in line for _, line in finding.evidence)
    (tmp_path / "rank-0.err").write_text(
        "[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE)\n"
    )
    if form == "pickle":  # the whole command, once a row: recordings precede the watchdog
        first, *others = findings_of(tmp_path)
        assert first["code"] == f"DS-{code}"
        assert text in first["cause"]
        assert "DS-HANG-watchdog" not in [each["code"] for each in others]


@pytest.mark.skipif(not HAS_TORCHS, reason="torch before 2.10 has no reader of dumps")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a rank never came", "missing ranks: {1}"),
        ("a rank called another collective", "Error type: COLLECTIVE_TYPE_MISMATCH"),
        ("a rank passed another shape", "Error type: SIZE_OR_SYNTAX_MISMATCH"),
        ("a rank passed another dtype", "Error type: COLLECTIVE_DTYPE_MISMATCH"),
        ("a rank gathers another shape", "Error type: SIZE_OR_SYNTAX_MISMATCH"),
        ("a GPU is behind", "Error type: COLLECTIVE_STATE_MISMATCH"),
        ("a rank left no dump", "Missing dump files from ranks {1}"),
        ("all are in it", ""),
    ],
)
def test_torchs_own_reader_finds_the_same_failure(
    name: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of ranks that differ, it blames those that differ from the file that it happens to read first."""
    for rank, each in ROWS[name][0].items():
        content = {"rank": rank, "host_name": "a", "comm_lib_version": "2.29", **each}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(content))
    with caplog.at_level(logging.INFO, "Flight Recorder"):
        try:
            import_module(TORCHS).main(["-p", "rank_", str(tmp_path)])
        except AssertionError as refused:
            logging.getLogger("Flight Recorder").info("%s", refused)
    assert said in caplog.text if said else "rank" not in caplog.text


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    """All collectives have completed on all ranks."""
    recordings = FlightRecordings()
    for rank in RANKS:
        path = tmp_path / f"trace_{rank}"
        path.write_bytes(pickle.dumps(dump(call(1), call(2))))
        assert recordings.read(path)
    assert list(recordings.findings()) == []


def test_dumps_of_gloo_are_read_without_the_state_completed(tmp_path: Path) -> None:
    """A call of gloo that has ended is retired, even if it failed; the default group has no name."""
    recordings = FlightRecordings()
    for rank, count in {0: 3, 1: 2}.items():
        entries = [call(number, state="scheduled") | {"retired": True} for number in range(1, count + 1)]  # fmt: skip
        config = {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}
        path = tmp_path / f"trace_{rank}"
        path.write_bytes(pickle.dumps(dump(*entries) | {"pg_config": config}))
        assert recordings.read(path)
    (finding,) = recordings.findings()
    assert (finding.code, finding.rank, finding.facts["waiting"]) == ("FLIGHT-missing", 1, "rank 0")


class Attack:
    """An object that runs a command when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """It is read as a log without a known failure; nothing in it is looked up or called."""
    written = tmp_path / "written"
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [Attack(written)]}))
    assert findings_of(folder) == []
    assert not written.exists()


@pytest.mark.parametrize(
    "value",
    [{"entries": 3}, {"entries": [4]}, {"entries": [{"x": 1}]}, [], {"pg_config": []}, {"entries": [call(1) | {"frames": 5}]}],
)  # fmt: skip
def test_malformed_pickles_cause_no_traceback(value: object, tmp_path: Path) -> None:
    """A truncated recording is not accepted as one."""
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(value))
    FlightRecordings().read(path)
    path.write_bytes(pickle.dumps(WAITING)[:-40])
    assert not FlightRecordings().read(path)


def test_a_fifo_in_a_folder_is_skipped(tmp_path: Path) -> None:
    """It has no writer, so reading it would block. The other files are read."""
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "rank-0.err").write_text("MemoryError\n")
    assert [each["code"] for each in findings_of(tmp_path)] == ["DS-MEM-alloc"]
