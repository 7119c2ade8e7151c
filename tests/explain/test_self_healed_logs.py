"""A program that reports, quotes, tests or survives a failure has not failed.

The logs are written by the programs themselves where that takes milliseconds: Python's logging, warnings,
traceback, unittest, doctest and pdb, tenacity, bash, git and pytest; the others as those programs print them.
"""

from __future__ import annotations

import code
import concurrent.futures
import contextlib
import doctest
import faulthandler
import io
import json
import logging
import pdb  # noqa: T100 - what it prints is read here
import socket
import subprocess
import sys
import textwrap
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import tenacity

from ddpsafe._explain.reader import explain_text

STEPS: Final = "step 10 loss 0.31\nstep 20 loss 0.29\n"
MEMORY: Final = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.2 GiB is free."

PROGRAMS: Final[dict[str, Callable[[Path], str]]] = {}


def program(function: Callable[[Path], str]) -> Callable[[Path], str]:
    """Add a program that returns what it printed."""
    PROGRAMS[function.__name__] = function
    return function


@contextlib.contextmanager
def logged(form: str = logging.BASIC_FORMAT) -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger, and what it writes."""
    text = io.StringIO()
    logger, handler = logging.getLogger("self_healed"), logging.StreamHandler(text)
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    handler.setFormatter(logging.Formatter(form))
    logger.addHandler(handler)
    try:
        yield logger, text
    finally:
        logger.removeHandler(handler)


def caught(call: Callable[..., object], *arguments: object) -> Exception:
    """Return the exception of a call, with its traceback."""
    try:
        call(*arguments)
    except Exception as error:  # noqa: BLE001 - any
        return error
    raise AssertionError


def fail(error: Exception) -> None:
    """Raise an exception."""
    raise error


def shell(script: str, folder: Path) -> str:
    """Return what bash and its commands print."""
    run = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


# A program says that it continues without what failed.


@program
def skips_a_batch_by_logging(_: Path) -> str:
    """The same with the text of the exception, at the level of an error."""
    with logged() as (logger, text):
        logger.error("ran out of memory on batch 17, skipping this batch: %s", MEMORY)
        logger.info("step 18 loss 0.3")
    return text.getvalue()


@program
def skips_a_damaged_file(_: Path) -> str:
    """Several files, one after the other, and then a summary."""
    with logged("%(asctime)s %(levelname)s %(name)s: %(message)s") as (logger, text):
        for name in ("a.png", "b.png", "c.png"):
            error = caught(
                fail, OSError(f"image file is truncated (12 bytes not processed): {name}")
            )
            logger.warning("cannot read %s (%s), skipping it", name, error)
        logger.warning("3 corrupt files were ignored")
    return text.getvalue()


@program
def logs_the_traceback_of_what_it_skips(_: Path) -> str:
    """`logger.exception` in a loop over samples."""
    with logged() as (logger, text):
        for number in range(3):
            error = caught(dict[str, int]().__getitem__, "boxes")
            logger.error("sample %d has no boxes, skipping it", number, exc_info=error)
        logger.info("kept 997 of 1000 samples")
    return text.getvalue()


@program
def falls_back_to_a_default(_: Path) -> str:
    """A file that need not exist."""
    with logged() as (logger, text):
        error = caught(open, "/nonexistent/config.yaml")
        logger.warning("%s: %s; using the default configuration", type(error).__name__, error)
    return text.getvalue()


@program
def warns_of_a_slower_way(_: Path) -> str:
    """`warnings.warn`, as libraries do for a missing kernel."""
    said = (
        "ImportError: No module named 'flash_attn', falling back to eager",
        "cuda_ext: undefined symbol: foo; continuing without the fused kernel",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for text in said:
            warnings.warn(text, stacklevel=1)
    return (
        "".join(
            map(
                str,
                (
                    warnings.formatwarning(w.message, w.category, w.filename, w.lineno)
                    for w in caught
                ),
            )
        )
        + STEPS
    )


# A program tries again, and it works.


@program
def retries_a_download(_: Path) -> str:
    """With tenacity and its log."""
    with logged() as (logger, text):

        @tenacity.retry(
            stop=tenacity.stop_after_attempt(3),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
        )
        def download(tries: list[int]) -> None:
            tries.append(1)
            if len(tries) < 3:
                raise ConnectionError(
                    "HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out."
                )

        download([])
        logger.info("download finished")
    return text.getvalue()


@program
def connects_at_the_third_try(_: Path) -> str:
    """A server that is started late."""
    with logged() as (logger, text), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for attempt in range(1, 3):
            error = caught(socket.create_connection, closed.getsockname())
            logger.warning("attempt %d of 3: %s, retrying in 1 s", attempt, error)
        logger.warning("connected at attempt 3")
    return text.getvalue()


@program
def waits_for_the_master(_: Path) -> str:
    """What torch prints until rank 0 listens."""
    line = "[W1122 10:00:03.1 socket.cpp:697] [c10d] The client socket has failed to connect to [node-0]:29500 (errno: 111 - Connection refused).\n"
    return 3 * line + STEPS


@program
def a_pool_is_made_again(_: Path) -> str:
    """Its worker raised, and the exception is printed by the caller, which continues."""
    text = io.StringIO()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(int, "x").result()
        except ValueError:
            text.write("worker failed, starting another one:\n")
            traceback.print_exc(file=text)
    return text.getvalue() + "".join(f"epoch {n} step {n}00 loss 0.{9 - n}\n" for n in range(1, 6))


# Someone looks at a failure, quotes one, or writes about one.


@program
def a_debugger_echoes_a_mistake(_: Path) -> str:
    """A mistyped name at pdb's prompt."""
    text = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("p los\nq\n"), stdout=text, nosigint=True, readrc=False)
    with contextlib.suppress(Exception):
        debugger.run("x = 1")
    assert "*** NameError" in text.getvalue()
    return text.getvalue()


@program
def a_console_shows_a_mistake(_: Path) -> str:
    """A mistyped expression in an embedded interpreter, and then training."""
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        code.InteractiveInterpreter({}).runsource("1 / 0")
    return (
        ">>> 1 / 0\n"
        + text.getvalue()
        + ">>> train()\n"
        + 3 * STEPS.replace("step", "epoch 1 step")
        + "".join(f"step {n} loss 0.2\n" for n in range(30, 80, 10))
    )


@program
def git_lists_commits(folder: Path) -> str:
    """Subjects that name errors."""
    return shell(
        "git init -q . && git -c user.name=a -c user.email=a@b commit -q --allow-empty"
        " -m 'Fix RuntimeError: Expected to mark a variable ready only once'"
        " && git -c user.name=a -c user.email=a@b commit -q --allow-empty"
        " -m 'Retry on CUDA out of memory' && git log --oneline",
        folder,
    )


@program
def bash_prints_a_script(folder: Path) -> str:
    """`set -x`, and a script that is shown before it runs."""
    script = textwrap.dedent("""\
        try:
            loss = model(x)
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise ValueError("CUDA out of memory: lower the batch size") from error
    """)
    (folder / "train.py").write_text(script, encoding="utf-8")
    return shell(
        "set -x; export NCCL_ASYNC_ERROR_HANDLING=1; cat train.py; echo step 1 loss 2", folder
    )


@program
def a_config_is_dumped(_: Path) -> str:
    """Options that are named for failures."""
    table = {
        "on_error": "retry",
        "retry_on": ["OSError", "ConnectionError: reset", "out of memory"],
        "timeouts": {"nccl_watchdog": 600},
        "kill_signal": "SIGKILL",
    }
    return f"config: {json.dumps(table)}\n{json.dumps(table, indent=2)}\n"


# Tests that expect a failure.


def run_unittest(case: type[unittest.TestCase]) -> str:
    """Return what unittest prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        suite = unittest.defaultTestLoader.loadTestsFromTestCase(case)
        unittest.TextTestRunner(stream=text, verbosity=2).run(suite)
    return text.getvalue()


@program
def unittest_expects_failures(_: Path) -> str:
    """An expected failure, and a handled one whose traceback is printed."""

    class TestMemory(unittest.TestCase):
        @unittest.expectedFailure
        def test_out_of_memory_is_survived(self) -> None:
            self.fail(MEMORY)

        def test_reports_oom(self) -> None:
            traceback.print_exception(caught(fail, RuntimeError(MEMORY)))

    return run_unittest(TestMemory)


@program
def unittest_prints_errors(_: Path) -> str:
    """The code under test logs errors."""

    class TestLoader(unittest.TestCase):
        def test_missing_file(self) -> None:
            print("ERROR: FileNotFoundError: [Errno 2] No such file or directory: '/data/x'")

    return run_unittest(TestLoader)


@program
def doctest_shows_an_exception(_: Path) -> str:
    """The expected one of an example."""
    text = io.StringIO()
    example = ">>> int('x')\nTraceback (most recent call last):\nValueError: invalid literal for int() with base 10: 'x'\n"
    test = doctest.DocTestParser().get_doctest(example, {}, "doc", "doc.md", 0)
    with contextlib.redirect_stdout(text):
        runner = doctest.DocTestRunner(verbose=True)
        runner.run(test)
        runner.summarize()
    return text.getvalue()


@program
def pytest_has_expected_failures(folder: Path) -> str:
    """With the output of passed tests, as -rA shows it."""
    (folder / "test_oom.py").write_text(
        textwrap.dedent(f"""\
            import traceback, pytest
            def test_oom_is_printed():
                try:
                    raise RuntimeError({MEMORY!r})
                except RuntimeError:
                    traceback.print_exc()
            @pytest.mark.xfail(reason="RuntimeError: NCCL communicator was aborted on rank 1.")
            def test_nccl():
                raise RuntimeError("NCCL communicator was aborted on rank 1.")
            @pytest.mark.skip(reason="AssertionError: Torch not compiled with CUDA enabled")
            def test_cuda():
                pass
        """),
        encoding="utf-8",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rA",
        "-p",
        "no:ddpsafe.testing",
        "-p",
        "no:cacheprovider",
        "-q",
        "test_oom.py",
    ]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    return run.stdout


# What is only information.


@program
def information_about_helpers(_: Path) -> str:
    """A supervisor that replaces workers."""
    with logged("%(asctime)s %(levelname)s %(name)s: %(message)s") as (logger, text):
        logger.info("worker 3 (pid 812) exited with code 1, restarting it")
        logger.info("worker 4 was killed by signal 9 (idle), its place is free")
        logger.info("connection to 10.0.0.3 timed out, using 10.0.0.4")
        logger.debug("OSError: [Errno 11] Resource temporarily unavailable")
        logger.info("step 10 loss 0.3")
    return text.getvalue()


@program
def information_about_limits(_: Path) -> str:
    """What a start prints about memory and devices."""
    with logged("[%(asctime)s][%(name)s][%(levelname)s] - %(message)s") as (logger, text):
        logger.info("if CUDA runs out of memory, lower train.batch_size")
        logger.info("oom_score_adj of this process is 0; memory limit exceeded: never")
        logger.info("handlers for SIGTERM and SIGUSR1 installed, SIGKILL cannot be caught")
    return text.getvalue()


@program
def bash_ends_its_own_helper(folder: Path) -> str:
    """A monitor in the background is killed when the job is done."""
    return shell("set -m; sleep 60 & kill $!; wait $! || true; echo training finished", folder)


@program
def a_loop_waits_for_a_file(folder: Path) -> str:
    """Messages of ls and cat until it exists."""
    return shell(
        "for i in 1 2; do cat ready 2>&1 || echo 'not ready yet, waiting'; touch ready; done; echo step 1 loss 2; echo step 2 loss 1",
        folder,
    )


@program
def stacks_are_dumped_on_request(folder: Path) -> str:
    """`faulthandler` shows where a healthy process is."""
    path = folder / "stacks"
    with path.open("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read() + STEPS


@program
def an_exception_is_ignored(_: Path) -> str:
    """Python reports one of a finalizer, and continues."""
    text = io.StringIO()

    class Handle:
        def __del__(self) -> None:
            raise OSError(9, "Bad file descriptor")

    before = sys.unraisablehook
    sys.unraisablehook = sys.__unraisablehook__
    try:
        with contextlib.redirect_stderr(text):
            Handle()
    finally:
        sys.unraisablehook = before
    assert text.getvalue().startswith("Exception ignored ")  # since Python 3.14 "while", not "in"
    return text.getvalue() + STEPS


@program
def metrics_are_named_for_failures(_: Path) -> str:
    """JSON lines of a monitor."""
    rows = [
        {"step": n, "oom_kills": 0, "nccl_timeouts": 0, "exit_code": 0, "error": None}
        for n in (1, 2, 3)
    ]
    return "\n".join(map(json.dumps, rows)) + "\n"


@program
def an_evaluation_fails_and_training_goes_on(_: Path) -> str:
    """A callback's traceback in the middle of a long run."""
    text = io.StringIO()
    try:
        list[int]()[0]
    except IndexError:
        traceback.print_exc(file=text)
    steps = "".join(f"epoch 2 step {n} loss 0.2\n" for n in range(100, 140, 10))
    return f"{STEPS}{text.getvalue()}{steps}`Trainer.fit` stopped: `max_epochs=2` reached.\n"


PRINTED: Final[dict[str, str]] = {
    # The batch is left out, as fairseq and others do.
    "skips a batch without memory": f"epoch 1\n| WARNING: ran out of memory in worker 0, skipping batch\n{STEPS}",
    # As Accelerate's find_executable_batch_size does.
    "halves the batch": f"RuntimeError: {MEMORY}\nReducing batch size from 64 to 32 and trying again\n{STEPS}Training completed.\n",
    # The second attempt ends well.
    "torchrun restarts the ranks": """\
E1121 01:18:43.214000 8085 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 8091) of binary: /usr/bin/python3
I1121 01:18:43.215000 8085 torch/distributed/elastic/agent/server/api.py:917] [default] Worker group FAILED. 3/3 attempts left; will restart worker group
I1121 01:18:43.216000 8085 torch/distributed/elastic/agent/server/api.py:733] [default] Restarting worker group
resumed from step 500
step 510 loss 0.41
step 520 loss 0.40
step 530 loss 0.39
I1121 02:18:43.216000 8085 torch/distributed/elastic/agent/server/api.py:885] [default] worker group successfully finished. Waiting 300 seconds for other agents to finish.
""",
    # And the trial completes.
    "ray retries a task": """\
(raylet) Task train failed. There are 2 retries remaining, so the task will be retried. Error: The worker died unexpectedly while executing this task.
(train pid=954) step 10 loss 0.3
Trial TorchTrainer_1 completed after 10 iterations at 2024-05-01 10:10:00. Total running time: 8min
""",
    # Events of Kubernetes before it runs.
    "a pod waits for its volume": """\
Warning  FailedMount       2m    kubelet  MountVolume.SetUp failed for volume "data" : mount failed: exit status 32, will retry
Warning  Unhealthy         90s   kubelet  Readiness probe failed: dial tcp 10.0.0.7:8080: connect: connection refused
Normal   Started           80s   kubelet  Started container trainer
Normal   Ready             60s   kubelet  pod is ready
""",
    # A preempted job, and its second run.
    "slurm requeues and completes": """\
slurmstepd: error: *** JOB 123 ON node4 CANCELLED AT 2024-01-01T00:00:00 DUE TO PREEMPTION ***
JobId=123 requeued
resumed from step 500
step 600 loss 0.2
step 700 loss 0.2
step 800 loss 0.2
JobId=123 JobState=COMPLETED ExitCode=0:0
""",
    # With the quote marks of mail and Markdown.
    "a mail quotes a log": "Last week's job had:\n> [rank1]: RuntimeError: CUDA error: device-side assert triggered\n> srun: error: n1: task 0: Exited with exit code 1\nThis one ran to the end.\n"
    + STEPS,
    # What a release fixed.
    "a changelog is shown": """\
What is new in 2.3:
 - Fixed: "RuntimeError: NCCL communicator was aborted" at the end of training (#12)
 - Fixed a segmentation fault in the decoder
 - No longer fails with "Address already in use" when two jobs share a host
""",
    # Its help.
    "the options of a script are listed": """\
usage: train.py [-h] [--on-oom {skip,raise}] [--max-restarts N]
  --on-oom {skip,raise}  what to do if CUDA runs out of memory (default: skip)
  --max-restarts N       restart ranks that were killed by SIGKILL (default: 0)
  --timeout S            NCCL watchdog timeout in seconds (default: 600)
""",
    # A process that has to die.
    "googletest has death tests": """\
[ RUN      ] QueueDeathTest.AbortsOnMisuse
terminate called after throwing an instance of 'std::runtime_error'
  what():  CUDA error: an illegal memory access was encountered
[       OK ] QueueDeathTest.AbortsOnMisuse (12 ms)
[==========] 1 test from 1 test suite ran. (12 ms total)
[  PASSED  ] 1 test.
""",
    # A test that should panic.
    "cargo tests panic": """\
running 2 tests
thread 'tests::full' panicked at src/lib.rs:12:5: No space left on device (os error 28)
test tests::full - should panic ... ok
test tests::empty ... ok

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out
""",
    # A signal that asks for a checkpoint only.
    "a preempted rank saves and continues": f"received signal SIGUSR1: saving a checkpoint, then continuing\nsaved checkpoint to /ckpt/100.pt\n{STEPS}",
    # Mixed precision, and a guard for the loss.
    "nan is skipped": f"Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 16384\nloss is nan at step 7, skipping the update\n{STEPS}",
    # What TensorFlow and others print at import.
    "a library is optional": f"""\
2024-05-01 10:00:02.000000: W tensorflow/stream_executor/platform/default/dso_loader.cc:64] Could not load dynamic library 'libcudart.so.11.0'; dlerror: libcudart.so.11.0: cannot open shared object file: No such file or directory
2024-05-01 10:00:02.000000: I tensorflow/stream_executor/cuda/cudart_stub.cc:29] Ignore above cudart dlerror if you do not have a GPU set up on your machine.
apex is not installed (ModuleNotFoundError: No module named 'apex'), using torch's own optimizer instead
{STEPS}""",
    # TensorBoard and Jupyter take the next one.
    "ports are tried in turn": "The port 8888 is already in use, trying another port.\nTensorBoard could not bind to port 6006, it was already in use; trying 6007\nTensorBoard 2.15 at http://n1:6007/ (Press CTRL+C to quit)\n",
}
"""What other programs print."""


@pytest.mark.parametrize("what", [*PRINTED, *PROGRAMS])
def test_a_failure_that_did_not_end_the_job_is_not_named_as_its_end(
    what: str, tmp_path: Path
) -> None:
    """No finding, or one that is marked."""
    log = PRINTED[what] if what in PRINTED else PROGRAMS[what](tmp_path)
    wrong = [
        f"{cause.code} ({cause.level}): {cause.evidence}"
        for cause in explain_text(log)
        if cause.level != "noise"
    ]
    assert not wrong, "\n".join([*wrong, "of", log])


@pytest.mark.parametrize(
    ("log", "code"),
    [
        ("ERROR - CUDA out of memory. Try reducing the batch size.", "DS-CUDA-oom"),
        ("[rank0] No space left on device. Free some space before proceeding.", "DS-DISK-full"),
        ("ERROR: Address already in use. Set REUSE=1 to ignore this error.", "DS-PORT-taken"),
        ("ERROR: unhandled system error; set X=1 to fall back to sockets", "DS-NCCL-system-error"),
    ],
)
def test_advice_to_handle_a_failure_is_not_that_it_was_handled(log: str, code: str) -> None:
    """The same words tell a user what to do."""
    assert [cause.code for cause in explain_text(f"{log}\n")] == [code]


def test_enough_kinds_are_covered() -> None:
    """At least forty logs, together with those of healthy programs."""
    assert len(PROGRAMS) + len(PRINTED) >= 40
