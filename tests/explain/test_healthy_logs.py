"""The output of healthy runs, builds and tests is not a failure, nor is a warning that stops nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from texts import read_sections

from ddpsafe._explain.reader import explain_text

HEALTHY: Final = read_sections(Path(__file__).with_name("healthy_lines.txt"))
"""Lines and whole logs that programs print in runs that do not fail, by their kind."""


def test_no_healthy_line_has_a_finding() -> None:
    """NCCL, torchrun, Slurm, apt, pip, wandb, Lightning and more: none at all, not even a notice."""
    lines = [line for lines in HEALTHY.values() for line in lines]
    assert len(lines) >= 900
    found = [(cause.code, line) for line in lines for cause in explain_text(line)]
    assert not found, found


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_lines_have_no_finding_beside_each_other(kind: str) -> None:
    """A rule that needs two lines does not find them in a healthy run, nor in one that failed for another reason."""
    log = "\n".join(HEALTHY[kind])
    assert [cause.code for cause in explain_text(log)] == []
    failed = explain_text(f"{log}\n[rank3]: MemoryError\n")
    assert [(cause.code, cause.rank) for cause in failed] == [("DS-MEM-alloc", 3)]


WARNED: Final = "[W1122 socket.cpp:697] [c10d] The client socket has failed to connect to [node-0]:29500 (errno: 111 - Connection refused).\n"
TORN: Final = "WARNING: not read: EOFError: Ran out of input\nin /tmp/torchinductor_me/fx.json\n"
JOINING: Final = "Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/8\n"
ENDED: Final = "KeyboardInterrupt\n"
LATE: Final = "[W ProcessGroupNCCL.cpp:600] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=10, OpType=ALLREDUCE, NumelIn=5) ran for 1805457 milliseconds before timing out.\n"
PROGRESS: Final = "epoch 0 step 10 loss 2.1\n"


@pytest.mark.parametrize(
    ("log", "codes"),
    [
        (WARNED, ["DS-RDZV-refused"]),
        (WARNED + PROGRESS, []),
        (PROGRESS + WARNED, ["DS-RDZV-refused"]),
        (WARNED + PROGRESS + WARNED, ["DS-RDZV-refused"]),
        (WARNED.replace("[W", "[E") + PROGRESS, ["DS-RDZV-refused"]),
        (WARNED + "MemoryError\n" + PROGRESS, ["DS-MEM-alloc"]),
        (TORN, ["DS-COMPILE-cache-torn"]),
        (TORN + PROGRESS, []),
        (LATE, ["DS-HANG-watchdog"]),
        (LATE + PROGRESS, []),
        (JOINING, []),
        (JOINING + ENDED, ["DS-RDZV-members", "DS-END-interrupted"]),
        (JOINING + "All distributed processes registered. Starting with 8 processes\n", []),
        (
            JOINING + "LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [0,1,2,3]\n" + ENDED,
            ["DS-END-interrupted"],
        ),
    ],
    ids=[
        "alone", "goes-on", "at-the-end", "again", "an-error", "beside-an-error", "of-two-lines",
        "of-two-lines-goes-on", "of-the-watchdog", "of-the-watchdog-goes-on", "joining",
        "joining-until-the-end", "joined", "joined-on-another-node",
    ],
)  # fmt: skip
def test_a_warning_followed_by_progress_is_not_a_failure(log: str, codes: list[str]) -> None:
    """Steps that follow show that it stopped nothing; an error always counts."""
    assert [cause.code for cause in explain_text(log)] == codes
