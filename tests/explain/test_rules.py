"""What the catalogue finds in a log: the first cause, the rank, and what must never come first."""

from __future__ import annotations

import io
import random
import re
import time
from typing import Final

import pytest
from explained import built_in_files

from ddpsafe._explain.catalogue import built_in, grams_of
from ddpsafe._explain.reader import LogReader, explain_text
from ddpsafe._launcher.diagnosis.root_cause import CONCLUSIONS, RuleName

_NUMPY_S: Final = 0.5
"""The most that importing numpy may take."""

LAUNCHERS: Final = {
    "plain": "{}",
    "torch": "[rank3]: {}",
    "torchrun": "[default3]:{}",
    "srun": "3: {}",
    "mpirun": "[1,3]<stderr>:{}",
    "compose": "trainer-1  | {}",
    "ray": "(RayTrainWorker pid=4711, ip=10.0.0.3) {}",
    "time": "2026-11-22 10:11:12,345 {}",
    "ray-logger": "2026-11-22 10:11:12,345\tERROR tune.py:12 -- {}",
    "vllm": "ERROR 11-22 10:11:12 [worker.py:12] {}",
    "colour": "\x1b[31m{}\x1b[0m",
}


@pytest.mark.parametrize("prefix", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_prefixes_of_launchers_do_not_hide_a_failure(prefix: str) -> None:
    """Rank prefixes, timestamps and colours are removed, and a rank in them is kept."""
    causes = explain_text(prefix.format("OSError: [Errno 28] No space left on device") + "\n")
    assert [cause.code for cause in causes] == ["DS-DISK-full"]
    if "3" in prefix and "10.0.0.3" not in prefix and "345" not in prefix and "31m" not in prefix:
        assert causes[0].rank == 3


DECORATIONS: Final = (
    "`{}`",
    "```{}```",
    "    {}",
    "ERROR: {}",
    "ERROR:root:{}",
    "[ERROR] {}",
    "[2026-11-22 10:11:12,345][__main__][ERROR] - {}",
    "2026-11-22 10:11:12,345 - {}",
    "ERROR    root:train.py:12 {}",
    "E       {}",
    "> {}",
    "  | {}",
    "│ {} │",
    "- {}",
    "train.py:12: {}",
    "Caught exception: {}",
    "rank 1: {}",
    "'{}'",
    '"{}"',
)
"""What loggers, pytest, boxes and pastes add to an exception."""


@pytest.mark.parametrize(
    ("exception", "code"),
    [
        ("quux.BarError: foo is not bar", "USER-exception"),
        ("EOFError", "CKPT-empty"),
        ("StopIteration", "DATA-exhausted"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'ninja'", "DATA-path"),
    ],
)
def test_decorations_do_not_hide_an_exception(exception: str, code: str) -> None:
    """The exception's line is enough, whatever surrounds it."""
    for decoration in DECORATIONS:
        log = decoration.format(exception) + "\n"
        assert [cause.code for cause in explain_text(log)] == [f"DS-{code}"], log
        if code == "USER-exception":
            assert explain_text(log)[0].cause == f"The script raised {exception}.", log


@pytest.mark.parametrize("logged", ["ERROR:root:{}", "2026-11-22 10:11:12,345 - ERROR - {}"])
def test_a_logged_exception_followed_by_progress_is_not_a_failure(logged: str) -> None:
    """The program has continued after it."""
    log = logged.format("quux.BarError: foo is not bar") + "\n"
    assert [cause.code for cause in explain_text(log)] == ["DS-USER-exception"]
    assert explain_text(log + "epoch 3 step 20 loss 0.31\n") == []


TRACEBACK: Final = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 31, in train
[rank1]:     raise ValueError("bad batch")
[rank1]: ValueError: bad batch
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("CUDA_ERROR_LAUNCH_FAILED", "CUDA-illegal-access"),
        ("RuntimeError: cudaErrorNoKernelImageForDevice", "CUDA-arch"),
        ("hipErrorNoBinaryForGpu", "CUDA-arch"),
        ("RuntimeError: CUDA failure 700", "CUDA-illegal-access"),
        ("ValueError: CUDA driver error code: 999", "CUDA-unknown"),
        ("    if (e == cudaErrorNoKernelImageForDevice) return;", None),
        ("step 3 of 9: 12 values of cudaError_t", None),
    ],
)
def test_a_cuda_error_is_known_by_its_name_and_number(line: str, code: str | None) -> None:
    """Programs print only these if they do not ask CUDA for a description."""
    assert [cause.code for cause in explain_text(line)] == ([f"DS-{code}"] if code else [])


@pytest.mark.parametrize(
    ("calls", "who"),
    [
        (
            ("train.py:9 main", "/env/torch/utils/data/_utils/fetch.py:54 fetch", "data.py:9 pad"),
            "The dataset",
        ),
        (("train.py:9 main", "data.py:12 collate_fn"), "The dataset"),
        (
            ("/env/torch/nn/modules/module.py:1553 _wrapped_call_impl", "model.py:40 encode"),
            "The model's forward",
        ),
        (
            ("data.py:9 __getitem__", "/env/torch/nn/modules/module.py:15 _call_impl", "m.py:4 f"),
            "The model's forward",
        ),
        (
            (
                "/env/torch/_tensor.py:581 backward",
                "/env/torch/autograd/graph.py:825 _engine_run_backward",
            ),
            "The backward",
        ),
        (("/w/trainer.py:77 load_checkpoint", "/w/io.py:3 parse"), "Loading the weights"),
        (("/env/torch/optim/adam.py:3 step", "x.py:4 f"), "The optimizer's step"),
        (
            ("/env/site-packages/datasets/arrow_dataset.py:3 _map_single", "x.py:4 f"),
            "The function",
        ),
        (("train.py:9 main", "loop.py:3 step"), "The script raised"),
    ],
)
def test_the_calls_of_a_traceback_show_what_the_script_was_doing(
    calls: tuple[str, ...], who: str
) -> None:
    """The innermost known call decides."""
    lines = (re.sub(r"(.+):(\d+) (\w+)", r'  File "\1", line \2, in \3', call) for call in calls)
    [found] = explain_text(
        "\n".join(["Traceback (most recent call last):", *lines, "ValueError: odd"])
    )
    assert found.cause.startswith(who)
    assert found.cause.count("ValueError: odd") == 1


def test_a_logged_error_counts_only_without_any_other_failure() -> None:
    """Its message is quoted, as nothing more is known; progress afterwards takes it back."""
    logged = "2026-11-22 10:11:12 ERROR trainer.py:12: the quux of rank 3 has no bar\n"
    [found] = explain_text(logged)
    assert found.cause == "A program reported an error: the quux of rank 3 has no bar."
    assert explain_text(logged + "epoch 3 step 20 loss 0.31\n") == []
    assert [cause.code for cause in explain_text(logged + "MemoryError\n")] == ["DS-MEM-alloc"]


PEER: Final = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711\n"
SUMMARY: Final = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"


@pytest.mark.parametrize("log", [PEER + TRACEBACK + SUMMARY, TRACEBACK + PEER, SUMMARY + TRACEBACK])
def test_the_scripts_own_error_comes_before_its_consequences(log: str) -> None:
    """In any order of printing: the exception with its line and rank, then the lost peers."""
    first, *others = explain_text(log)
    assert first.code == "DS-USER-exception"
    assert first.rank == 1
    assert "ValueError: bad batch at /home/me/train.py:31 in train" in first.cause
    assert {each.code for each in others} <= {"DS-PEER-lost", "DS-PEER-childfailed"}


NETWORK: Final = re.compile(r"firewall|interface|port", re.IGNORECASE)


@pytest.mark.parametrize(
    "end",
    [
        "E api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 8091) of binary: python3",
        "kernel: Out of memory: Killed process 8091 (python3)",
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory.",
        "Fatal Python error: Segmentation fault",
    ],
)
def test_the_death_of_a_peer_is_never_blamed_on_the_network(end: str) -> None:
    """The survivors' errors look like a network failure; the dead rank's output shows that it was not."""
    causes = explain_text(f"{PEER}{end}\n{PEER}")
    assert causes[0].code not in {"DS-PEER-lost", "DS-GLOO-refused", "DS-NCCL-unreachable"}
    assert NETWORK.search(causes[0].cause) is None


def test_the_watchdog_finding_names_the_rank_that_is_behind() -> None:
    """Of ranks that timed out at different numbers, the others waited for the one with the lowest."""
    line = "[rank{0}]:[E] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE)\n"
    log = "".join(line.format(rank, number) for rank, number in ((0, 96), (5, 64), (7, 96)))
    (cause,) = explain_text(log)
    assert (cause.code, cause.rank, cause.count) == ("DS-HANG-watchdog", 5, 3)
    assert "Rank 5 waited in number 64, and rank 7 in 96" in cause.cause
    (cause,) = explain_text("".join(line.format(rank, 96 - rank) for rank in (0, 1)))
    assert "waited in number" not in cause.cause
    groups = (line.replace("[E]", f"[PG {n}]").format(n, 96 - 20 * n) for n in (0, 1))
    (cause,) = explain_text("".join(groups))
    assert "waited in number" not in cause.cause


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (
            "Parameter indices which did not receive grad for rank 1: 12 13 88",
            "numbers are 12 13 88.",
        ),
        (
            "Parameters which did not receive grad for rank 0: a.bias, a.weight",
            "are a.bias, a.weight.",
        ),
        (
            "Parameter indices which did not receive grad for rank 0: 0 1 2 3 4 5",
            "0 1 2 3 and more.",
        ),
    ],
)
def test_unused_parameters_are_named(named: str, told: str) -> None:
    """DDP names them in a separate line or at the end of its message."""
    message = "RuntimeError: Expected to have finished reduction in the prior iteration."
    for joint in ("\n", " "):
        (cause,) = explain_text(f"{message}{joint}{named}\n")
        assert cause.code == "DS-DDP-unused"
        assert cause.cause.endswith(told)


def test_no_advice_sets_a_debug_level_with_which_ddp_crashes() -> None:
    """In torch's gloo, DistributedDataParallel(…) crashes with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    assert [rule.code for rule in built_in().rules if "=DETAIL" in rule.fix] == []


def test_ranks_that_time_out_in_different_collectives_are_distinguished() -> None:
    """The watchdog prints each rank's collective: one rank validates while the others train."""
    line = "[rank{0}]:[E x.cpp:563] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType={1}, NumelIn={2}, NumelOut=9, Timeout(ms)=600000) ran for 600057 milliseconds before timing out.\n"
    same = "".join(line.format(rank, "ALLREDUCE", 4311252) for rank in range(8))
    gathered = "".join(line.format(rank, "GATHER", rank) for rank in range(8))
    for log in (same, gathered):
        assert explain_text(log)[0].code == "DS-HANG-watchdog"
    for other in (line.format(8, "ALLREDUCE", 1), line.format(8, "BROADCAST", 4311252)):
        first, *others = explain_text(same + other)
        assert (first.code, first.retry) == ("DS-HANG-mismatch", "never")
        assert "rank 8 calls" in first.cause
        assert "rank 0 ALLREDUCE of 4311252 elements" in first.cause
        assert others == []


def test_every_rank_counts_in_the_search_for_the_one_behind() -> None:
    """Of lines that differ only in numbers most are skipped, but the watchdog's are all read."""
    line = "[rank{0}]:[E] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE)\n"
    log = "".join(line.format(rank, 96 - (rank == 61)) for rank in range(64))
    (cause,) = explain_text(log)
    assert (cause.rank, cause.count) == (61, 64)


def test_torchruns_summary_provides_the_global_rank() -> None:
    """Its other lines have only the local rank."""
    log = (
        "E1 api.py:869] failed (exitcode: -9) local_rank: 3 (pid: 7) of binary: python\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2025-11-20_10:25:01\n"
        "  rank      : 11 (local_rank: 3)\n  exitcode  : -9 (pid: 7)\n"
    )
    first, *_ = explain_text(log)
    assert (first.code, first.rank) == ("DS-END-sigkill", 11)


def test_torchruns_summary_of_many_ranks_names_the_first_one() -> None:
    """Its lines differ only in numbers, and the ranks that torchrun ended itself are not the cause."""
    entry = "[{0}]:\n  time      : 2026-09-07_13:02:58\n  rank      : {1} (local_rank: {1})\n  exitcode  : {2} (pid: 1{1})\n  error_file: <N/A>\n  traceback : {3}\n"
    others = "".join(
        entry.format(number, rank, -9, f"Signal 9 (SIGKILL) received by PID 1{rank}")
        for number, rank in enumerate((0, 2, 3, 4, 5), start=1)
    )
    first = entry.format(0, 1, 1, "To enable traceback see: https://pytorch.org")
    log = f"Failures:\n{others}-----\nRoot Cause (first observed failure):\n{first}"
    found = explain_text(log)
    assert [(cause.code, cause.rank) for cause in found] == [("DS-END-exit-code", 1)]


LEFT_ALONE: Final = """\
W1126 10:00:00.1 811 torch/multiprocessing/spawn.py:169] Terminating process 813 via signal SIGTERM
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "/w/train.py", line 12, in main
    dist.all_reduce(x)
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711
"""


def test_the_summary_of_a_rank_that_only_lost_its_peer_does_not_lead_to_its_log() -> None:
    """mp.spawn names the victim first; the rank that left is in another log."""
    [cause] = explain_text(LEFT_ALONE)
    assert cause.code == "DS-PEER-lost"
    assert "logs of the other ranks" in cause.fix


def test_tracebacks_of_ranks_may_be_interleaved() -> None:
    """Each line belongs to its rank's traceback: the file is that of the rank that raised."""
    log = """\
[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/data.py", line 7, in read
[rank0]:   File "/w/train.py", line 9, in train
[rank1]:     raise SampleMissing(name)
[rank1]: SampleMissing: 4711.png
[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:4711
"""
    first, *_ = explain_text(log)
    assert first.rank == 1
    assert first.cause == "The script raised SampleMissing: 4711.png at /w/data.py:7 in read."


@pytest.mark.parametrize(
    "log",
    [
        "",
        "epoch 1 loss 0.31\nepoch 2 loss 0.29\n",
        "INFO: timeout set to 600 s\nconnecting to 8 ranks\nall ranks joined\n",
        "val_error: 0.12, test error rate 0.10\n",
        "Traceback of the stack is turned off\n",
    ],
)
def test_a_log_without_a_failure_has_no_cause(log: str) -> None:
    """Words that only resemble a failure are not reported."""
    assert explain_text(log) == []


def test_notices_are_reported_only_without_any_other_finding() -> None:
    """The IPv6 warning of every torch job on an IPv4 host does not accompany a real failure."""
    notice = "[W socket.cpp:401] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not supported by protocol).\n"
    assert [cause.code for cause in explain_text(notice)] == ["DS-NOISE-ipv6"]
    causes = explain_text(f"{notice}MemoryError\n")
    assert [cause.code for cause in causes] == ["DS-MEM-alloc"]


WAITS: Final = (
    "Warning  FailedScheduling  0/{} nodes are available: {} Insufficient nvidia.com/gpu.\n"
)
PLACED: Final = "Normal  Scheduled  Successfully assigned default/train to node-{}\n"


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([WAITS] * 5 + [PLACED], []),
        ([WAITS] * 5 + [PLACED, WAITS], ["DS-K8S-unschedulable"]),
        ([WAITS, PLACED] * 5, []),
        ([PLACED] * 4 + [WAITS, PLACED], []),
        ([WAITS, PLACED] * 5 + [WAITS], ["DS-K8S-unschedulable"]),
        ([WAITS] * 2_000 + [PLACED, WAITS], ["DS-K8S-unschedulable"]),
        ([WAITS] * 2_000 + [PLACED], []),
    ],
    ids=[
        "over",
        "again",
        "over-each-time",
        "over-late",
        "again-each-time",
        "again-long",
        "over-long",
    ],
)
def test_a_failure_that_a_later_line_takes_back_counts_when_it_recurs(
    lines: list[str], codes: list[str]
) -> None:
    """However often both were printed, although of lines that differ only in numbers most are skipped."""
    log = "".join(line.format(number, number) for number, line in enumerate(lines))
    causes = explain_text(log)
    assert [cause.code for cause in causes] == codes
    assert [cause.evidence[0][0] for cause in causes] == [len(lines)] * len(codes)


def test_a_line_that_denies_a_failure_is_not_one() -> None:
    """It has the words of an error without the error."""
    assert explain_text("No CUDA out of memory seen\n") == []


@pytest.mark.full
def test_a_large_log_is_read_like_a_small_one() -> None:
    """Only for a large log numpy finds the lines; the causes are the same."""
    choose = random.Random(0)
    filler = "\n".join(f"error {choose.randbytes(24).hex()}" for _ in range(1500))
    logs = [
        table.examples[0]
        for file in built_in_files()
        for table in file.tables[::8]
        # A large log is not searched for lines that a paste has folded.
        if table.examples and ("\n" not in table.examples[0] or 'File "' in table.examples[0])
    ]
    for log in (
        *logs,
        "bash: torchrun: 未找到命令",
    ):
        small, large = explain_text(log), explain_text(f"{filler}\n{log}\n{filler}\n")
        assert [(each.code, each.rank) for each in small] == [
            (each.code, each.rank) for each in large
        ], log


SIGNALS: Final[tuple[tuple[int, str, str, str], ...]] = (
    (4, "SIGILL", "Illegal instruction", "DS-END-sigill"),
    (6, "SIGABRT", "Aborted", "DS-END-sigabrt"),
    (8, "SIGFPE", "Floating point exception", "DS-END-sigfpe"),
    (9, "SIGKILL", "Killed", "DS-END-sigkill"),
    (11, "SIGSEGV", "Segmentation fault", "DS-END-sigsegv"),
)


@pytest.mark.parametrize(
    "line",
    [
        "failed (exitcode: -{number}) local_rank: 0 (pid: 1) of binary: python",
        "Signal {number} ({name}) received by PID 44",
        "process 0 terminated with signal {name}",
        "['python', 'train.py'] exits with return code = -{number}",
        "Command '['python', 'x.py']' died with <Signals.{name}: {number}>.",
        "Command '['python', 'x.py']' returned non-zero exit status {code}.",
        "srun: error: n1: tasks 0-3: {described} (core dumped)",
        "srun: error: n1: task 0: Exited with exit code {code}",
        "JobState=FAILED Reason=NonZeroExitCode ExitCode=0:{number}",
        "mpirun noticed that process rank 0 with PID 0 on node n1 exited on signal {number} ({described}).",
        "=   KILLED BY SIGNAL: {number} ({described})",
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: {described} (signal {number})",
        "Global rank 0 (PID 12) exited with code -{number}",
        "Process 1 exit with status code {code}.",
        "command terminated with exit code {code}",
        '"exitCode": {code}, "reason": "Error"',
        "The exit codes of the workers are {{{name}(-{number})}}",
        "run.sh: line 12:  4711 {described}        (core dumped) python train.py",
        "[n1:03131] Signal: {described} ({number})",
    ],
)
def test_every_launchers_report_of_a_signal_is_known(line: str) -> None:
    """torchrun, mp.spawn, DeepSpeed, Composer, Horovod, MPI, Slurm, Kubernetes, shells and joblib."""
    for number, name, described, code in SIGNALS:
        text = line.format(number=number, name=name, described=described, code=128 + number)
        assert [cause.code for cause in explain_text(text)][:1] == [code], text


@pytest.mark.parametrize(
    "log",
    [
        'Traceback (most recent call last): File "t.py", line 3, in <module> main() File "t.py", line 9, in main load(x) KeyError: 3',
        r'{"py_callstack": "Traceback (most recent call last):\n  File \"t.py\", line 9, in main\n    load(x)\nKeyError: 3"}',
        r'{"log": "Traceback (most recent call last):\n'
        + 300 * r"  File \"/env/site-packages/x.py\", line 1, in f\n"
        + r'  File \"t.py\", line 9, in main\n    load(x)\nKeyError: 3"}',
        r'Traceback (most recent call last): File "C:\nets\t.py", line 9, in main KeyError: 3',
    ],
    ids=["pasted", "json", "long-json", "windows"],
)
def test_a_traceback_in_one_line_is_read(log: str) -> None:
    """As in a paste that lost its line breaks, and in torchrun's error file."""
    cause = explain_text(f"[rank3]: {log}")[0]
    assert (cause.code, cause.rank) == ("DS-USER-exception", 3)
    assert "KeyError: 3" in cause.cause
    assert "t.py:9 in main" in cause.cause


def test_an_exception_without_a_message_at_the_end_of_a_line_is_found() -> None:
    """A paste that lost its line breaks has the call, its source and the exception in one line."""
    log = 'Traceback (most recent call last): File "/env/torch/distributed/run.py", line 634, in run raise RendezvousClosedError() torch.distributed.elastic.rendezvous.api.RendezvousClosedError'
    assert [cause.code for cause in explain_text(log)] == ["DS-RDZV-closed"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("FileNotFoundError: [Errno 2] Datei oder Verzeichnis nicht gefunden: 'x'", "DATA-path"),
        ("SafetensorError: No such file or directory (os error 2)", "DATA-path"),
        ("MyError: it ended. There are some potential root causes. (1) OOM", "USER-exception"),
    ],
)
def test_a_traceback_in_one_line_may_have_an_unusual_message(error: str, code: str) -> None:
    """The line does not end with the usual message of its failure."""
    log = f'[rank3]: Traceback (most recent call last): File "t.py", line 9, in main {error}'
    cause = explain_text(log)[0]
    assert (cause.code, cause.rank) == (f"DS-{code}", 3)


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        (
            ["sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification",
             "RuntimeError: DataLoader worker (pid 39637) exited unexpectedly with exit code 1. Details are lost due to multiprocessing. Rerunning with num_workers=0 may give better error trace."],
            ["SLURM-gres", "DATA-worker-exit"],
        ),
        (
            ["FileNotFoundError: [Errno 2] No such file or directory: '/data/imagenet/train'",
             "/var/spool/slurmd/job4711/slurm_script: line 9: torchrun: command not found"],
            ["DATA-path", "ENV-program"],
        ),
    ],
    ids=["the next is longer", "the next is shorter"],
)  # fmt: skip
def test_two_independent_lines_are_not_joined(lines: list[str], codes: list[str]) -> None:
    """The longest line of a log looks folded, whatever follows it."""
    found = [cause.code.removeprefix("DS-") for cause in explain_text("\n".join(lines))]
    assert sorted(found) == sorted(codes)


@pytest.mark.parametrize("rule", ["=" * 23, "- " * 12, "error: " * 24, "[x]" * 12])
def test_the_text_before_an_exception_is_read_in_linear_time(rule: str) -> None:
    """Trying every way to cut off the rule of a table or a box would take forever."""
    reader, started_s = LogReader(), time.process_time()
    reader.read_text(f"{rule} error summary\n")
    assert time.process_time() - started_s < 1
    assert reader.causes() == []


@pytest.mark.parametrize("filler", [":", ": ", "::x ", "- ", "error: ", "\\n", 'File "'])
def test_the_text_after_an_exception_is_read_in_linear_time(filler: str) -> None:
    """It may be names of tests, tables or a dump of bytes."""
    reader, started_s = LogReader(), time.process_time()
    reader.read_text(f"RuntimeError: CUDA error: out of memory {filler * 4000}\n")
    assert time.process_time() - started_s < 1
    assert reader.causes()


SUSPICIOUS_LINE: Final = "2026-11-22 10:00:00 [rank3] error {} loader timeout {}\n"
SUSPICIOUS_TRACEBACK: Final = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/w/{0}/train.py", line 7, in main
[rank3]:     loss = model_{0}(batch)
[rank3]:   File "/env/site-packages/torch/nn/module_{0}.py", line 1553, in _wrapped_call_impl
[rank3]:     return self.forward_{0}(*args, **kwargs)
[rank3]: {1}: CUDA out of memory. Tried to allocate {0}
"""


@pytest.mark.full(but=["errors"])
@pytest.mark.parametrize(
    ("record", "what"),
    [
        (SUSPICIOUS_LINE, ""),
        (SUSPICIOUS_TRACEBACK, "RuntimeError"),
        (SUSPICIOUS_TRACEBACK, "CustomFailed"),
    ],
    ids=["errors", "a-known-exception", "an-exception-of-the-script"],
)
def test_a_log_of_distinct_suspicious_lines_is_read_in_time(record: str, what: str) -> None:
    """Reading costs less than 25 times as much as one short pattern on the same log; it is 1 to 9 times.

    Both are measured here, so a busy machine slows down both. Before the rules' letters sieved the lines,
    it was about 50 times.
    """
    choose = random.Random(1)
    count = 60_000 // record.count("\n")
    log = "".join(
        record.format(choose.randbytes(20).hex(), what or number) for number in range(count)
    )
    reader, started_s = LogReader(), time.process_time()
    reader.read(io.BytesIO(log.encode()))
    took_s = time.process_time() - started_s
    assert reader.lines == 60_000
    started_s = time.process_time()
    assert sum(len(re.findall(r"\w+", line)) for line in log.splitlines())
    pattern_s = time.process_time() - started_s
    assert took_s < 25 * pattern_s + _NUMPY_S, f"{took_s} s for {len(log) / 1e6:.1f} MB"


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-22 10:00:00 info [rank3] epoch 3 step 20 loss 0.31 lr: 0.1 data time 0.2",
        "saved checkpoint, validation accuracy 0.9, memory used 12 gb, error rate 0.1, warning",
        "    output = self.forward(*args, **kwargs)",
        '  file "/w/train.py", line 12, in main',
    ],
)
def test_ordinary_lines_match_no_rules_letters(line: str) -> None:
    """A rule whose letters occur in every line would make all logs slow."""
    assert not grams_of(line) & built_in().grams.keys()


@pytest.mark.parametrize("rule", CONCLUSIONS)
def test_ddpsafes_own_errors_match_no_rule_about_something_else(rule: RuleName) -> None:
    """Its sentences have words such as "different" beside the world size, and advice about GPUs."""
    conclusion = CONCLUSIONS[rule]
    cause, fix = conclusion.advice
    what = f"ddpsafe.LaunchTimeoutError: rank 1 (world_size 2) {conclusion.behaviour}, on vm, attempt 1, after 7 s."
    codes = [
        each.code for each in explain_text(f"{what}\n  Likely cause: {cause}\n  What to do: {fix}")
    ]
    assert codes == ["DS-RUN-error"]


@pytest.mark.parametrize(
    "message", ["lr must be below 1", "shapes do not match", "3 != 4", "the two folders differ"]
)
def test_the_message_of_a_rank_is_not_read_together_with_the_world_size(message: str) -> None:
    """Ddpsafe writes "(world_size 2)" before the user's own message."""
    what = f"rank 1 (world_size 2) raised ValueError at /w/train.py:5 in main on vm: {message}"
    found = explain_text(f"ddpsafe.RankRaisedError: {what}")
    assert not [each.code for each in found if each.code.startswith("DS-ENV-")]


def test_the_place_where_a_known_exception_was_raised_is_reported() -> None:
    """The general advice about an exception is only useful with its line."""
    [cause] = explain_text(
        'Traceback (most recent call last):\n  File "/w/train.py", line 12, in step\n'
        "    batch = next(batches)\nStopIteration"
    )
    assert cause.cause.endswith("Raised at /w/train.py:12 in step.")


OTHER_END: Final = """\
Traceback (most recent call last):
  File "/env/multiprocessing/connection.py", line 383, in _recv
EOFError
"""
SPAWNED: Final = """\
Traceback (most recent call last):
  File "/env/site-packages/torch/multiprocessing/spawn.py", line 118, in join
Exception:

-- Process 1 terminated with the following error:
"""


@pytest.mark.parametrize(
    ("log", "others"), [(OTHER_END, ["DS-MP-other-end"]), (SPAWNED, ["DS-MP-child-failed"])]
)
def test_an_error_that_only_passes_on_a_failure_comes_after_it(log: str, others: list[str]) -> None:
    """The other end of a pipe, and the parent of a spawned process."""
    raised = (
        'Traceback (most recent call last):\n  File "/w/train.py", line 5, in f\nValueError: odd'
    )
    codes = [cause.code for cause in explain_text(log + raised)]
    assert codes == ["DS-USER-exception", *others]


HEALTHY: Final = """\
n1:5:5 [0] NCCL INFO NET/Plugin : Plugin load (libnccl-net.so) returned 2 : libnccl-net.so: cannot open shared object file: No such file or directory
n1:5:5 [0] NCCL INFO NET/IB : No device found.
n1:5:5 [0] NCCL INFO NVLS multicast support is not available on dev 0
n1:5:5 [0] NCCL INFO ncclCommInitRank comm 0x1 rank 0 nranks 2 - Init COMPLETE
[rank0]:[W reducer.cpp:1298] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters
epoch 3 | val_error 0.12 | timeout=600
Killed 3 stale sessions in cleanup; no errors
exitcode: 0
saved checkpoint, 0 files missing
all ranks joined, 8/8 clients joined
"""


def test_output_of_healthy_runs_is_not_a_failure() -> None:
    """The start of NCCL_DEBUG=INFO, hints of DDP, and words that failures also contain."""
    causes = explain_text(HEALTHY)
    assert [cause.code for cause in causes if cause.level != "noise"] == []
