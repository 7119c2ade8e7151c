"""A program that reports, quotes, tests or survives a failure has not failed.

What differs between versions of Python is written by the programs themselves: tracebacks, unittest, doctest,
pdb and pytest. `survived_logs.txt` has what others print.
"""

from __future__ import annotations

import code
import concurrent.futures
import contextlib
import doctest
import faulthandler
import io
import pdb  # noqa: T100 - what it prints is read here
import subprocess
import sys
import textwrap
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from texts import read_sections

from ddpsafe._explain.reader import explain_text

STEPS: Final = "step 10 loss 0.31\nstep 20 loss 0.29\n"
MEMORY: Final = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB of which 1.2 GiB is free."

PROGRAMS: Final[dict[str, Callable[[Path], str]]] = {}


def program(function: Callable[[Path], str]) -> Callable[[Path], str]:
    """Add a program that returns what it printed."""
    PROGRAMS[function.__name__] = function
    return function


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


@program
def logs_the_traceback_of_what_it_skips(_: Path) -> str:
    """`logger.exception` in a loop over samples, with Python's own format."""
    error = caught(dict[str, int]().__getitem__, "boxes")
    skipped = [
        f"ERROR:data:sample {number} has no boxes, skipping it\n"
        + "".join(traceback.format_exception(error))
        for number in range(3)
    ]
    return "".join(skipped) + "INFO:data:kept 997 of 1000 samples\n"


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
        sys.executable, "-m", "pytest", "-rA", "-p", "no:ddpsafe.testing", "-p", "no:cacheprovider",
        "-q", "test_oom.py",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
    return run.stdout


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
def an_evaluation_fails_and_training_goes_on(_: Path) -> str:
    """A callback's traceback in the middle of a long run."""
    text = io.StringIO()
    try:
        list[int]()[0]
    except IndexError:
        traceback.print_exc(file=text)
    steps = "".join(f"epoch 2 step {n} loss 0.2\n" for n in range(100, 140, 10))
    return f"{STEPS}{text.getvalue()}{steps}`Trainer.fit` stopped: `max_epochs=2` reached.\n"


PRINTED: Final = read_sections(Path(__file__).with_name("survived_logs.txt"))
"""What other programs print; the heading names the program or what it does."""


@pytest.mark.parametrize("what", [*PRINTED, *PROGRAMS])
def test_a_failure_that_did_not_end_the_job_is_not_named_as_its_end(
    what: str, tmp_path: Path
) -> None:
    """No finding, or one that is marked."""
    log = PROGRAMS[what](tmp_path) if what in PROGRAMS else "\n".join([*PRINTED[what], ""])
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
