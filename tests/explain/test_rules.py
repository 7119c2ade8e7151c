# ruff: noqa: ISC004 - logs of several lines stand in rows
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

DECORATIONS: Final = (
    "`{}`", "```{}```", "    {}", "ERROR: {}", "ERROR:root:{}", "[ERROR] {}",
    "[2026-11-22 10:11:12,345][__main__][ERROR] - {}", "2026-11-22 10:11:12,345 - {}",
    "ERROR    root:train.py:12 {}", "E       {}", "> {}", "  | {}", "│ {} │", "- {}",
    "train.py:12: {}", "Caught exception: {}", "rank 1: {}", "'{}'", '"{}"',
)  # fmt: skip
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


TRACEBACK: Final = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 31, in train
[rank1]:     raise ValueError("bad batch")
[rank1]: ValueError: bad batch
"""


PEER: Final = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4711\n"
SUMMARY: Final = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"


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


@pytest.mark.full
def test_a_large_log_is_read_like_a_small_one() -> None:
    """Only for a large log numpy finds the lines; the causes are the same."""
    choose = random.Random(0)
    filler = "\n".join(f"error {choose.randbytes(24).hex()}" for _ in range(1500))
    logs = [
        table.examples[0]
        for file in built_in_files()
        for table in [*file.tables.values()][::8]
        # A large log is not searched for lines that a paste has folded.
        if table.examples and ("\n" not in table.examples[0] or 'File "' in table.examples[0])
    ]
    for log in (*logs, "bash: torchrun: 未找到命令"):
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
    (24, "SIGXCPU", "CPU time limit exceeded", "DS-END-rlimit"),
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


def called(*calls: str) -> str:
    """Return a traceback through these calls: a file, a line and a function each."""
    lines = (re.sub(r"(.+):(\d+) (\w+)", r'  File "\1", line \2, in \3', call) for call in calls)
    return "\n".join(["Traceback (most recent call last):", *lines, "ValueError: odd"])


UNUSED: Final = (
    "RuntimeError: Expected to have finished reduction in the prior iteration.{}Parameter{}\n"
)
LOGGED: Final = "2026-11-22 10:11:12 ERROR trainer.py:12: the quux of rank 3 has no bar\n"
NOTICE: Final = "[W socket.cpp:401] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not supported by protocol).\n"
PROGRESS: Final = "epoch 3 step 20 loss 0.31\n"
CALLS: Final = "Traceback (most recent call last): File "
ODD: Final = called("/w/train.py:5 f")
OTHER_END: Final = 'Traceback (most recent call last):\n  File "/env/multiprocessing/connection.py", line 383, in _recv\nEOFError\n'
SPAWNED: Final = (
    'Traceback (most recent call last):\n  File "/env/site-packages/torch/multiprocessing/spawn.py", line 118, in join\n'
    "Exception:\n\n-- Process 1 terminated with the following error:\n"
)
HANDLING: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSING: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
OOM: Final = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
NO_FILE: Final = "FileNotFoundError: [Errno 2] No such file or directory: 'last.pt'"


def chain(*exceptions: str) -> str:
    """Return a traceback for each exception; what joins it to the next one stands before that one."""
    begin = (
        'Traceback (most recent call last):\n  File "/w/train.py", line 4, in load\n    load()\n'
    )
    return "".join(
        each if each in (HANDLING, CAUSING) else f"{begin}{each}\n" for each in exceptions
    )


def of_ranks(count: int, log: str) -> str:
    """Return what several ranks print line by line, all the same."""
    return "".join(f"[rank{rank}]: {line}\n" for line in log.splitlines() for rank in range(count))


LOST: Final = chain("RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:4711")


def ended_with(code: int, rank: int) -> str:
    """Return torchrun's summary of the rank that it calls the first to fail."""
    return (
        f"E1130 api.py:1002] failed (exitcode: {code}) local_rank: {rank} (pid: 7) of binary: python\n"
        f"Root Cause (first observed failure):\n[0]:\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: 7)\n"
    )


# fmt: off
ROWS: Final[dict[str, tuple[str, str, int | None, str]]] = {
    # a log, the codes of its causes, the rank and a part of the text of the first cause; ... stands for any others
    "an exception in a log": ("ERROR:root:quux.BarError: foo is not bar\n", "USER-exception", None, ""),
    "and progress after it": ("ERROR:root:quux.BarError: foo is not bar\n" + PROGRESS, "", None, ""),
    "an exception in a dated log, and progress":
        ("2026-11-22 10:11:12,345 - ERROR - quux.BarError: foo is not bar\n" + PROGRESS, "", None, ""),
    "an error in a log": (LOGGED, "USER-exception", None, "A program reported an error: the quux of rank 3 has no bar."),
    "an error in a log, and progress": (LOGGED + PROGRESS, "", None, ""),
    "an error in a log, and another one": (LOGGED + "MemoryError\n", "MEM-alloc", None, ""),
    "a notice": (NOTICE, "NOISE-ipv6", None, ""),
    "a notice beside a failure": (NOTICE + "MemoryError\n", "MEM-alloc", None, ""),
    "the name of a CUDA error": ("CUDA_ERROR_LAUNCH_FAILED", "CUDA-illegal-access", None, ""),
    "its other name": ("RuntimeError: cudaErrorNoKernelImageForDevice", "CUDA-arch", None, ""),
    "the name of a HIP error": ("hipErrorNoBinaryForGpu", "CUDA-arch", None, ""),
    "the number of a CUDA error": ("RuntimeError: CUDA failure 700", "CUDA-illegal-access", None, ""),
    "an unknown number": ("ValueError: CUDA driver error code: 999", "CUDA-unknown", None, ""),
    "its name in a source": ("    if (e == cudaErrorNoKernelImageForDevice) return;", "", None, ""),
    "its type": ("step 3 of 9: 12 values of cudaError_t", "", None, ""),
    "the innermost known call is the dataset's": (called("train.py:9 main",
        "/env/torch/utils/data/_utils/fetch.py:54 fetch", "data.py:9 pad"), "...", None, "The dataset"),
    "a collate function": (called("train.py:9 main", "data.py:12 collate_fn"), "...", None, "The dataset"),
    "the model's forward": (called("/env/torch/nn/modules/module.py:1553 _wrapped_call_impl", "model.py:40 encode"),
        "...", None, "The model's forward"),
    "a model in a dataset": (called("data.py:9 __getitem__", "/env/torch/nn/modules/module.py:15 _call_impl", "m.py:4 f"),
        "...", None, "The model's forward"),
    "a backward pass": (called("/env/torch/_tensor.py:581 backward",
        "/env/torch/autograd/graph.py:825 _engine_run_backward"), "...", None, "The backward"),
    "loading": (called("/w/trainer.py:77 load_checkpoint", "/w/io.py:3 parse"), "...", None, "Loading the weights"),
    "an optimizer": (called("/env/torch/optim/adam.py:3 step", "x.py:4 f"), "...", None, "The optimizer's step"),
    "a mapped function": (called("/env/site-packages/datasets/arrow_dataset.py:3 _map_single", "x.py:4 f"),
        "...", None, "The function"),
    "no known call": (called("train.py:9 main", "loop.py:3 step"), "...", None, "The script raised ValueError: odd"),
    "a peer killed": (f"{PEER}E api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 8091) of binary: python3\n{PEER}",
        "END-sigkill ...", None, ""),
    "a peer out of memory": (f"{PEER}kernel: Out of memory: Killed process 8091 (python3)\n{PEER}", "MEM-host-oom ...", None, ""),
    "a peer out of GPU memory": (f"{PEER}[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n{PEER}", "CUDA-oom ...", 1, ""),
    **{f"a peer ended by signal {number}": (f"{PEER}E api.py:1002] failed (exitcode: -{number}) local_rank: 1 (pid: 3) of binary: python3\n"
        "terminate called without an active exception\n  exitcode  : -6 (pid: 2)\n  exitcode  : -15 (pid: 4)  (SIGTERM)\n",
        "END-signal ...", 1, f"signal {number}.") for number in (3, 5, 13, 14, 29, 31, 34, 64)},
    "a peer crashed": (f"{PEER}Fatal Python error: Segmentation fault\n{PEER}", "END-sigsegv ...", None, ""),
    "unused parameters, on their own line": (UNUSED.format("\n", " indices which did not receive grad for rank 1: 12 13 88"),
        "DDP-unused", None, "numbers are 12 13 88."),
    "unused parameters": (UNUSED.format(" ", " indices which did not receive grad for rank 1: 12 13 88"),
        "DDP-unused", None, "numbers are 12 13 88."),
    "unused parameters by name": (UNUSED.format(" ", "s which did not receive grad for rank 0: a.bias, a.weight"),
        "DDP-unused", None, "are a.bias, a.weight."),
    "many unused parameters": (UNUSED.format("\n", " indices which did not receive grad for rank 0: 0 1 2 3 4 5"),
        "DDP-unused", None, "0 1 2 3 and more."),
    "the summary of torchrun has the global rank": ("E1 api.py:869] failed (exitcode: -9) local_rank: 3 (pid: 7) of binary: python\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : 2025-11-20_10:25:01\n"
        "  rank      : 11 (local_rank: 3)\n  exitcode  : -9 (pid: 7)\n", "END-sigkill ...", 11, ""),
    "the summary of mp.spawn, of the one that lost its peer": ("W1126 10:00:00.1 811 torch/multiprocessing/spawn.py:169] Terminating process 813 via signal SIGTERM\n"
        "torch.multiprocessing.spawn.ProcessRaisedException:\n\n-- Process 0 terminated with the following error:\n"
        'Traceback (most recent call last):\n  File "/w/train.py", line 12, in main\n    dist.all_reduce(x)\n'
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711\n",
        "PEER-lost", None, "logs of the other ranks"),
    "tracebacks of two ranks, line by line": ("[rank0]: Traceback (most recent call last):\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/w/data.py", line 7, in read\n[rank0]:   File "/w/train.py", line 9, in train\n'
        "[rank1]:     raise SampleMissing(name)\n[rank1]: SampleMissing: 4711.png\n"
        "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:4711\n",
        "USER-exception ...", 1, "The script raised SampleMissing: 4711.png at /w/data.py:7 in read."),
    **{f"the script's own error before its consequences, {order}":
        (log, "USER-exception ...", 1, "ValueError: bad batch at /home/me/train.py:31 in train")
        for order, log in enumerate((PEER + TRACEBACK + SUMMARY, TRACEBACK + PEER, SUMMARY + TRACEBACK))},
    "nothing": ("", "", None, ""),
    "losses": ("epoch 1 loss 0.31\nepoch 2 loss 0.29\n", "", None, ""),
    "a timeout that is set": ("INFO: timeout set to 600 s\nconnecting to 8 ranks\nall ranks joined\n", "", None, ""),
    "errors of a model": ("val_error: 0.12, test error rate 0.10\n", "", None, ""),
    "no traceback": ("Traceback of the stack is turned off\n", "", None, ""),
    "a failure denied": ("No CUDA out of memory seen\n", "", None, ""),
    "a traceback in one line": (f'[rank3]: {CALLS}"t.py", line 3, in <module> main() File "t.py", line 9, in main load(x) KeyError: 3',
        "USER-exception", 3, "t.py:9 in main"),
    "a traceback in JSON": (r'[rank3]: {"py_callstack": "Traceback (most recent call last):\n  File \"t.py\", line 9, in main\n    load(x)\nKeyError: 3"}',
        "USER-exception", 3, "KeyError: 3"),
    "a traceback in JSON beside other fields": (r'{"rank": 3, "message": "Traceback (most recent call last):\n  File \"t.py\", line 9, in main\n    load(x)\nKeyError: \"a\"", "step": 7}',
        "USER-exception", None, 'KeyError: "a" at t.py:9'),
    "a long traceback in JSON": (r'[rank3]: {"log": "Traceback (most recent call last):\n' + 300 * r"  File \"/env/site-packages/x.py\", line 1, in f\n" + r'  File \"t.py\", line 9, in main\n    load(x)\nKeyError: 3"}',
        "USER-exception", 3, "t.py:9 in main"),
    "a traceback of Windows": (rf'[rank3]: {CALLS}"C:\nets\t.py", line 9, in main KeyError: 3', "USER-exception", 3, "KeyError: 3"),
    "an exception without a message at the end of a line": (f'{CALLS}"/env/torch/distributed/run.py", line 634, in run raise RendezvousClosedError() '
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError", "RDZV-closed", None, ""),
    "a message in German": (f'[rank3]: {CALLS}"t.py", line 9, in main FileNotFoundError: [Errno 2] Datei oder '
        "Verzeichnis nicht gefunden: 'x'", "DATA-path", 3, ""),
    "a message of Rust": (f'[rank3]: {CALLS}"t.py", line 9, in main SafetensorError: No such file or directory (os error 2)',
        "DATA-path", 3, ""),
    "a message of several sentences": (f'[rank3]: {CALLS}"t.py", line 9, in main MyError: it ended. There are some '
        "potential root causes. (1) OOM", "USER-exception", 3, ""),
    "two lines that do not continue each other": (
        "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification\n"
        "RuntimeError: DataLoader worker (pid 39637) exited unexpectedly with exit code 1. Details are lost due to "
        "multiprocessing. Rerunning with num_workers=0 may give better error trace.", "SLURM-gres DATA-worker-exit", None, ""),
    "the first of two is the longest": (
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/imagenet/train'\n"
        "/var/spool/slurmd/job4711/slurm_script: line 9: torchrun: command not found", "DATA-path ENV-program", None, ""),
    "the place of a known exception": ('Traceback (most recent call last):\n  File "/w/train.py", line 12, in step\n    batch = next(batches)\nStopIteration',
        "DATA-exhausted", None, "Raised at /w/train.py:12 in step."),
    "an exception in a handler": (chain("KeyError: 'lr'", HANDLING, "ValueError: no lr"), "USER-exception", None,
        "raised ValueError: no lr at /w/train.py:4 in load. It was raised while KeyError: 'lr' was handled."),
    "and another one in its handler": (chain("KeyError: 'lr'", HANDLING, "ValueError: no lr", HANDLING, "OddError: 7"),
        "USER-exception", None, "raised OddError: 7 at"),
    "an exception in the handler of a known one": (chain(NO_FILE, HANDLING, "ValueError: label 7"), "USER-exception DATA-path", None, "label 7"),
    "on many ranks": (of_ranks(8, chain(NO_FILE, HANDLING, "ValueError: label 7")), "USER-exception DATA-path", 0, "label 7"),
    "a rank that fails in a handler, and one that loses it there":
        (of_ranks(1, chain(NO_FILE, HANDLING, "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:4711"))
         + of_ranks(2, chain(NO_FILE, HANDLING, "ValueError: label 7")), "USER-exception DATA-path PEER-lost", None, "label 7"),
    "another rank that handles nothing": (of_ranks(1, chain(NO_FILE, HANDLING, "ValueError: label 7"))
        + of_ranks(2, chain(NO_FILE.replace("last", "other"))), "DATA-path USER-exception", None, ""),
    "a handler that loses a rank": (chain("KeyError: 'lr'", HANDLING, "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:4711"),
        "USER-exception PEER-lost", None, "KeyError: 'lr'"),
    "a handler that waits too long": (chain(NO_FILE, HANDLING, "RuntimeError: Timed out waiting 5000ms for recv operation"),
        "DATA-path HANG-timeout", None, ""),
    "an exception from another one": (chain("KeyError: 'lr'", CAUSING, "ValueError: no lr"), "USER-exception", None,
        "raised KeyError: 'lr' at /w/train.py:4 in load. It was raised again as ValueError: no lr."),
    "an exception from a known one": (chain(NO_FILE, CAUSING, "ValueError: no lr"), "DATA-path USER-exception", None, ""),
    "an exception in the handler of both": (chain("KeyError: 'lr'", CAUSING, "ValueError: no lr", HANDLING, "OddError: 7"),
        "USER-exception", None, "raised OddError: 7 at"),
    "a module that is optional": (chain("ModuleNotFoundError: No module named 'einops'", HANDLING, "ValueError: label 7"),
        "USER-exception ENV-module", None, "It was raised while ModuleNotFoundError: No module named 'einops' was handled."),
    **{f"cleanup after a known failure, {number}": (chain(*exceptions), codes, None, "")
        for number, (codes, *exceptions) in enumerate((
            ("CUDA-oom USER-exception", OOM, HANDLING, "AttributeError: 'NoneType' object has no attribute 'finish'"),
            ("CUDA-oom USER-exception", OOM, HANDLING, "KeyError: 'model'", CAUSING, "RuntimeError: could not save"),
            ("CUDA-oom CKPT-disk-full", OOM, HANDLING, "RuntimeError: [enforce fail at inline_container.cc:603] . unexpected pos 64 vs 0"),
            ("DISK-full DATA-path", "OSError: [Errno 28] No space left on device", HANDLING, NO_FILE),
            ("CUDA-oom DATA-path", NO_FILE, HANDLING, OOM),
            ("DATA-path USER-exception", NO_FILE, HANDLING, "SystemExit: 1"),
        ))},
    "an exit after an exception": (chain("AssertionError: loss is nan", HANDLING, "SystemExit: 1"), "USER-exception", None,
        "raised AssertionError: loss is nan at /w/train.py:4 in load."),
    "a rank that ended early, without an error": (of_ranks(1, LOST) + ended_with(1, 0), "PEER-lost END-exit-code", 0,
        "No rank of this log failed by itself: the other one ended without an error"),
    "and the other seven": (of_ranks(7, LOST) + ended_with(1, 6), "PEER-lost END-exit-code", None, "without an error"),
    "a rank that lost it and aborted at its end": (of_ranks(1, LOST) + "terminate called without an active exception\n" + ended_with(-6, 0),
        "PEER-lost END-at-exit END-sigabrt", 0, "without an error"),
    "a rank that ended early, with an exit code": (of_ranks(1, LOST) + ended_with(3, 1), "END-exit-code PEER-lost", 1, "code 3"),
    "an exit code of 1, which no exception explains": (of_ranks(1, LOST) + ended_with(1, 1), "END-exit-code PEER-lost", 1, ""),
    "a silent exit beside that of the rank that lost it": (of_ranks(1, LOST) + ended_with(1, 0) + "  exitcode  : 3 (pid: 8)\n",
        "END-exit-code PEER-lost", 0, ""),
    "the other end of a pipe": (OTHER_END + ODD, "USER-exception MP-other-end", None, ""),
    "the parent of a spawned process": (SPAWNED + ODD, "USER-exception MP-child-failed", None, ""),
}
# fmt: on


@pytest.mark.parametrize("what", ROWS)
def test_a_log_has_these_causes(what: str) -> None:
    """In this order, with the rank whose line shows it, and with what the text says."""
    log, codes, rank, says = ROWS[what]
    found = explain_text(log)
    names = [cause.code.removeprefix("DS-") for cause in found]
    expected = codes.removesuffix("...").split()
    assert names[: len(expected)] == expected
    assert codes.endswith("...") or len(names) == len(expected)
    if rank is not None:
        assert found[0].rank == rank
    assert not says or says in f"{found[0].cause} {found[0].fix}"


TAKEN_BACK: Final = {
    "over": "w" * 5 + "p",
    "again": "w" * 5 + "pw",
    "over-each-time": "wp" * 5,
    "over-late": "p" * 4 + "wp",
    "again-each-time": "wp" * 5 + "w",
    "again-long": "w" * 2_000 + "pw",
    "over-long": "w" * 2_000 + "p",
}


@pytest.mark.parametrize("what", TAKEN_BACK)
def test_a_failure_that_a_later_line_takes_back_counts_when_it_recurs(what: str) -> None:
    """However often both were printed, although of lines that differ only in numbers most are skipped."""
    texts = {
        "w": "Warning  FailedScheduling  0/{0} nodes are available: {0} Insufficient nvidia.com/gpu.\n",
        "p": "Normal  Scheduled  Successfully assigned default/train to node-{0}\n",
    }
    lines = TAKEN_BACK[what]
    causes = explain_text("".join(texts[line].format(at) for at, line in enumerate(lines)))
    assert [cause.code for cause in causes] == (
        [] if lines[-1] == "p" else ["DS-K8S-unschedulable"]
    )
    assert [cause.evidence[0][0] for cause in causes] == [len(lines)] * len(causes)


def test_every_rank_counts_in_the_search_for_the_one_behind() -> None:
    """Of lines that differ only in numbers most are skipped, but the watchdog's are all read."""
    line = "[rank{0}]:[E] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE)\n"
    log = "".join(line.format(rank, 96 - (rank == 61)) for rank in range(64))
    (cause,) = explain_text(log)
    assert (cause.rank, cause.count) == (61, 64)


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


@pytest.mark.parametrize(
    "message", ["lr must be below 1", "shapes do not match", "3 != 4", "the two folders differ"]
)
def test_the_message_of_a_rank_is_not_read_together_with_the_world_size(message: str) -> None:
    """Ddpsafe writes "(world_size 2)" before the user's own message."""
    what = f"rank 1 (world_size 2) raised ValueError at /w/train.py:5 in main on vm: {message}"
    found = explain_text(f"ddpsafe.RankRaisedError: {what}")
    assert not [each.code for each in found if each.code.startswith("DS-ENV-")]
