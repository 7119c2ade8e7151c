"""`ddpsafe.testing`: a marked test runs in every rank, and its report is pytest's own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import machine
import pytest
import scripts

import ddpsafe
from ddpsafe._launcher.plan import make_plan

_LIMIT_S: Final = machine.hang_limit(150)

_TESTS_OF_EACH_KIND = """
import os
import time
import unittest

import pytest
import torch.distributed as dist


@pytest.mark.ddp(nproc=2)
def test_ranks_talk_and_share_a_folder(ddp_context, tmp_path, tmp_path_factory):
    assert ddp_context.all_reduce(ddp_context.rank + 1) == 3
    (tmp_path / f"{ddp_context.rank}").touch()
    ddp_context.barrier()
    assert len(list(tmp_path.iterdir())) == 2
    own = tmp_path_factory.mktemp("own")
    assert len(set(ddp_context.all_gather(str(own)))) == 2


@pytest.mark.ddp
def test_assertion_of_one_rank(ddp_context):
    print("output of", ddp_context.rank)
    x = 7 if ddp_context.rank == 1 else 0
    assert x == 0
    ddp_context.barrier()


@pytest.fixture
def waits_at_its_end(ddp_context):
    yield
    ddp_context.barrier()


@pytest.mark.ddp(timeout=60)
def test_fixture_that_waits_for_the_rank_that_failed(ddp_context, waits_at_its_end):
    assert ddp_context.rank == 0
    ddp_context.all_reduce(1)


@pytest.fixture
def fails_at_its_end(ddp_context):
    yield
    assert ddp_context.rank != 1


@pytest.mark.ddp
def test_teardown(fails_at_its_end, record_property):
    record_property("name", 0.5)


@pytest.mark.ddp
def test_call_and_teardown(ddp_context, fails_at_its_end):
    assert ddp_context.rank != 1


@pytest.mark.ddp(nproc=2)
def test_crash(ddp_context):
    if ddp_context.rank == 1:
        os.kill(os.getpid(), 11)
    ddp_context.barrier()


@pytest.mark.ddp(nproc=2, timeout=3)
def test_hang(ddp_context):
    if ddp_context.rank == 1:
        time.sleep(1000)
    ddp_context.barrier()


@pytest.mark.timeout(14)
@pytest.mark.ddp(nproc=2)
def test_hang_with_the_limit_of_pytest_timeout():
    time.sleep(1000)


@pytest.mark.ddp(nproc=[1, 2])
@pytest.mark.parametrize("x", ["a", "b"])
def test_worlds(ddp_context, x):
    assert x in "ab"
    assert f"nproc={dist.get_world_size()}" in os.environ["PYTEST_CURRENT_TEST"]


@pytest.mark.ddp
@pytest.mark.parametrize("nproc", [3])
def test_world_of_a_parameter(nproc):
    assert dist.get_world_size() == 3


@pytest.mark.ddp
def test_skipped_by_all():
    pytest.skip("the reason")


@pytest.mark.ddp
def test_skipped_by_one(ddp_context):
    if ddp_context.rank == 1:
        pytest.skip("the reason")


@pytest.mark.ddp
def test_skipped_while_another_waits(ddp_context):
    if ddp_context.rank == 1:
        pytest.skip("why it is skipped")
    ddp_context.barrier()


@pytest.mark.ddp
@pytest.mark.xfail
def test_expected_to_fail(ddp_context):
    assert ddp_context.rank == 5


@pytest.mark.ddp
@pytest.mark.xfail(strict=True)
def test_passes_though_expected_to_fail():
    pass


@pytest.mark.ddp(backend="nccl", nproc=99)
def test_needs_gpus():
    pass


class TestOfAClass:
    @pytest.fixture(autouse=True)
    def five(self):
        self.five = 5

    @pytest.mark.ddp
    def test_method(self):
        assert self.five == 5


@pytest.mark.ddp
@pytest.mark.filterwarnings("error::UserWarning")
def test_warning_is_an_error():
    import warnings

    warnings.warn("a warning")


class OwnWarning(UserWarning):
    pass


@pytest.mark.ddp
@pytest.mark.filterwarnings("default")
def test_warnings(ddp_context):
    import warnings

    warnings.warn("of both", OwnWarning)
    warnings.warn(f"of rank {ddp_context.rank}", type("Local", (Warning,), {}))


def test_without_mark(ddp_context):
    pass


@pytest.mark.ddp
def test_unknown_fixture(nonexistent):
    pass


class TestOfUnittest(unittest.TestCase):
    @pytest.mark.ddp
    def test_of_unittest(self):
        pass
"""

# What a user's wrapper sees of each report, as recipes of pytest's documentation do.
_CONFTEST = """
import pytest

seen = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    raised = "" if call.excinfo is None else "with an exception"
    seen.append(f"saw {item.name} {report.when} {report.outcome} {raised} {item.user_properties}")
    return report


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line("\\n".join(seen))
"""

_WRONG_MARKS = (
    ("nprocs=3", "ERROR", "ddp has no nprocs; write ddp(nproc=2)"),
    ("backend='glo'", "FAILED", "problem"),
    ("timout=3", "ERROR", "ddp has no timout; write ddp(timeout=30)"),
    ("timeout='abc'", "ERROR", "timeout must be a number of seconds > 0, not 'abc'"),
    ("nproc=[]", "ERROR", "nproc must be an integer >= 1, not []"),
    ("nproc=10**9", "FAILED", "problem"),
)

_TESTS_WITH_WRONG_MARKS = "".join(
    f"@pytest.mark.ddp({arguments})\ndef test_wrong_{number}():\n    pass\n"
    for number, (arguments, _, _) in enumerate(_WRONG_MARKS)
)

_OUTCOMES = (
    ("ranks_talk_and_share_a_folder", "PASSED", ""),
    ("assertion_of_one_rank", "FAILED", "rank 1 (world_size 2): assert 7 == 0"),
    ("fixture_that_waits_for_the_rank_that_failed", "FAILED", "rank 1 (world_size 2): Assert"),
    ("teardown", "PASSED", ""),
    ("teardown", "ERROR", "rank 1 (world_size 2): Assert"),
    ("call_and_teardown", "FAILED", "rank 1 (world_size 2): Assert"),
    ("call_and_teardown", "ERROR", "rank 1 (world_size 2): Assert"),
    ("crash", "FAILED", "rank 1 (world_size 2) was killed by SIGSEGV"),
    ("hang", "FAILED", "did not end within"),
    ("hang_with_the_limit_of_pytest_timeout", "FAILED", "did not end within"),
    ("worlds[nproc=1-a]", "PASSED", ""),
    ("worlds[nproc=2-b]", "PASSED", ""),
    ("world_of_a_parameter[3]", "PASSED", ""),
    ("skipped_by_all", "SKIPPED", "the reason"),
    ("skipped_by_one", "FAILED", "rank 1 (world_size 2) skipped the test"),
    ("skipped_while_another_waits", "FAILED", "rank 1 (world_size 2) skipped the test"),
    ("expected_to_fail", "XFAIL", ""),
    ("passes_though_expected_to_fail", "FAILED", "XPASS(strict)"),
    ("needs_gpus", "SKIPPED", "nccl needs 99 GPUs"),
    ("warning_is_an_error", "FAILED", "UserWarning: a warning"),
    ("without_mark", "ERROR", "mark the test with @pytest.mark.ddp(nproc=2)"),
    ("unknown_fixture", "ERROR", "(world_size 2)"),
    ("of_unittest", "ERROR", "not of a TestCase"),
    *((f"wrong_{number}", how, text) for number, (_, how, text) in enumerate(_WRONG_MARKS)),
)


_PYTEST: Final = (
    *("-m", "pytest", "-p", "ddpsafe.testing", "-p", "no:cacheprovider"),
    # The fork server has imported ddpsafe before pytest could rewrite its asserts.
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)


def _environment() -> dict[str, str]:
    """Return the environment without the variables of the pytest that runs this test."""
    kept = {
        name: text
        for name, text in scripts.clean_environment().items()
        if not name.startswith(("PYTEST_", "COV_"))
    }
    return {**kept, "COLUMNS": "300"}


def _pytest(folder: Path, *options: str) -> str:
    """Run pytest in a folder as a user does, but in a forked process, and return its output."""
    printed = folder.with_name(f"{folder.name}-printed")
    with printed.open("wb") as file, Path(os.devnull).open("rb") as nothing:
        streams = (nothing.fileno(), file.fileno(), file.fileno())
        arguments = [*_PYTEST, *options]
        pytest = scripts.start(
            arguments, folder=folder, streams=streams, environment=_environment()
        )
    try:
        pytest.wait(_LIMIT_S)
    finally:
        pytest.kill()
        pytest.wait()
    return printed.read_text()


def _project(folder: Path, **files: str) -> Path:
    # As strict as real projects: the plugin itself causes no warning.
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return pytest's output for a file with tests of each kind; run once for all xdist workers."""
    folder = tmp_path_factory.mktemp("project")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    printed = shared / "session-of-test-plugin"
    with printed.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():
            tests = _TESTS_OF_EACH_KIND + _TESTS_WITH_WRONG_MARKS
            printed.write_text(
                _pytest(_project(folder, test_many=tests, conftest=_CONFTEST), "-rA")
            )
        return printed.read_text()


@pytest.mark.parametrize(("test", "outcome", "words"), _OUTCOMES, ids=[row[0] for row in _OUTCOMES])
def test_each_outcome_is_reported_as_pytest_does(
    session: str, test: str, outcome: str, words: str
) -> None:
    """Passed, failed, skipped and xfailed look as they do without ranks, and the rank is named."""
    if outcome == "SKIPPED":  # pytest groups these by line
        assert re.search(rf"SKIPPED .*{re.escape(words)}", session), session
        return
    lines = [line for line in session.splitlines() if line.startswith(outcome)]
    found = [line for line in lines if re.search(rf"test_{re.escape(test)}(?![\w\[])", line)]
    assert found, session
    assert words in found[0]


@pytest.mark.parametrize(
    "seen",
    [
        "assertion_of_one_rank call failed with an exception []",
        "unknown_fixture setup failed with an exception []",
        "teardown call passed  [('name', 0.5)]",
        "teardown teardown failed with an exception [('name', 0.5)]",
        "expected_to_fail call skipped with an exception []",
    ],
)
def test_hooks_of_a_conftest_see_the_reports_of_the_ranks(session: str, seen: str) -> None:
    """In their phase, with the exception and the properties that the ranks recorded."""
    assert f"saw test_{seen}\n" in session, session


def test_a_skip_while_another_rank_waits_shows_its_reason(session: str) -> None:
    """The launch sees a rank that returned early, and does not know of the skip."""
    assert "skipped the test, the others ran it\nSkipped: why it is skipped\n" in session, session
    assert "returned early" not in session


def test_failure_shows_the_rewritten_assertion_and_every_ranks_output(session: str) -> None:
    """The report has the failing rank's line, and how each of the other ranks ended."""
    start = session.index("_ test_assertion_of_one_rank _")
    report = session[start : session.index("_ test_fixture_that_waits", start)]
    assert re.search(r"^> +assert x == 0$", report, re.MULTILINE)
    assert "E       assert 7 == 0" in report
    assert "rank 1 (world_size 2) failed first" in report
    assert "rank 0: " in report
    assert re.search(r"Captured stdout of rank 0 -+\noutput of 0", report)
    assert re.search(r"Captured stdout of rank 1 -+\noutput of 1", report)
    assert "Traceback" not in report  # the ranks' own report of the same failure


def test_hang_shows_the_line_of_each_rank(session: str) -> None:
    """The launch ends a hang before pytest-timeout does, so that stacks can be shown."""
    assert re.search(r"rank 1, at .*test_many\.py:\d+ in test_hang$", session, re.MULTILINE)
    assert "in test_hang_with_the_limit_of_pytest_timeout" in session
    assert "@pytest.mark.ddp(timeout=…)" in session


@pytest.mark.parametrize(
    "words", ["OwnWarning: of both", "Warning: of rank 0", "Warning: of rank 1"]
)
def test_warnings_of_ranks_are_in_the_summary(session: str, words: str) -> None:
    """Each is there once, with its place and, if this process has imported it, its class."""
    summary = session[session.index("= warnings summary =") :]
    found = re.findall(
        rf"^test_many\.py::test_warnings\n +\S+/test_many\.py:\d+: {words}$", summary, re.MULTILINE
    )
    assert len(found) == 1, summary


def test_sessions_of_ranks_start_without_a_warning(session: str) -> None:
    """Argparse would warn of a session without arguments."""
    assert "Do not expect" not in session


@pytest.mark.full
def test_xdist_coverage_and_stop_at_the_first_failure(tmp_path: Path) -> None:
    """Lines that only one rank runs are covered, in an xdist worker; -x ends the session."""
    library = "def of(rank):\n    if rank == 1:\n        return 'one'\n    return 'zero'\n"
    tests = """
        import pytest, library

        @pytest.mark.ddp(nproc=2)
        @pytest.mark.parametrize("i", range(2))
        def test_lines(ddp_context, i):
            assert library.of(ddp_context.rank)
    """
    folder = _project(tmp_path, library=library, test_cov=tests.replace("\n        ", "\n"))
    ran = _pytest(folder, "-n1", "--cov=library", "--cov-report=term-missing")
    assert "2 passed" in ran, ran
    assert re.search(r"library\.py +4 +0 +100%", ran), ran

    failing = "import pytest\n\n@pytest.mark.ddp\ndef test_1(): assert 0\n\ndef test_2(): pass\n"
    (folder / "test_cov.py").write_text(failing)
    assert "1 failed in" in _pytest(folder, "-x")


@pytest.mark.full
def test_each_test_reports_why_the_fork_server_did_not_start(tmp_path: Path) -> None:
    """Not only the first test does: here a folder is in the place of a file to write."""
    conftest = """
def pytest_collection_finish(session):
    (session.config._tmp_path_factory.getbasetemp() / "ddpsafe-collection").mkdir()
"""
    tests = "import pytest\n\n@pytest.mark.ddp\n@pytest.mark.parametrize('i', range(2))\ndef test(i): pass\n"
    printed = _pytest(_project(tmp_path, conftest=conftest, test_two=tests), "-rf")
    failed = re.findall(r"^FAILED .*IsADirectoryError.*collection", printed, re.MULTILINE)
    assert len(failed) == 2, printed


@pytest.mark.parametrize(
    ("attempt", "given", "kept"),
    [(3, None, 63), (3, 3, 63), (3, 2, 2), (None, 2, 2), (None, None, 600), (3600, None, 600)],
)
def test_the_limit_of_a_test_ends_a_wait_that_began_with_it(
    attempt: int | None, given: int | None, kept: int
) -> None:
    """Two limits of the same length do not race to end a hang."""
    fields = {} if given is None else {"collective": given, "barrier": given}
    timeouts = ddpsafe.Timeouts(attempt=attempt, **fields)
    config = ddpsafe.LaunchConfig(nproc_per_node=2, backend="gloo", timeouts=timeouts)
    ranks = make_plan(config, style="launch").timeouts
    assert ranks.collective.total_seconds() == kept
    assert ranks.barrier >= ranks.collective


_SLOW = """
import os, pathlib, time
import pytest

def stay(name):
    part = pathlib.Path(name + ".part")
    part.write_text(str(os.getpid()))
    part.rename(name)
    time.sleep(1000)

if {slow_import} and "DDPSAFE_TESTING_COLLECTION" in os.environ:
    stay("server")

@pytest.mark.ddp(nproc=2)
def test_slow(ddp_context):
    stay(f"rank{{ddp_context.rank}}")
"""


@pytest.mark.full(but=["False"])
@pytest.mark.parametrize("slow_import", [True, False])
def test_nothing_outlives_a_killed_pytest(tmp_path: Path, *, slow_import: bool) -> None:
    """Neither ranks nor the fork server stay, even if it is still importing the tests."""
    folder = _project(tmp_path, test_slow=_SLOW.format(slow_import=slow_import))
    with Path(os.devnull).open("r+b") as nothing:
        killed = scripts.start(
            _PYTEST,
            folder=folder,
            streams=[nothing.fileno()] * 3,
            environment=_environment(),
            fresh=slow_import,
        )
    names = ("server",) if slow_import else ("rank0", "rank1")
    try:
        scripts.wait_until(lambda: all((folder / name).exists() for name in names))
        watches = [os.pidfd_open(int((folder / name).read_text())) for name in names]
    finally:
        killed.kill()
        killed.wait()
    for watch in watches:
        assert select.select([watch], [], [], 30)[0]
        os.close(watch)


@pytest.mark.full
def test_debugger_opens_in_rank_0(tmp_path: Path) -> None:
    """``--pdb`` stops at the failure in rank 0, with its variables, in the caller's terminal."""
    tests = """
import pytest

@pytest.mark.ddp(nproc=2)
def test_value(ddp_context):
    value = 40 + ddp_context.rank
    if ddp_context.rank == 0:
        assert value == 1
    ddp_context.barrier()
"""
    folder = _project(tmp_path, test_debugged=tests)
    answers = (("(Pdb)", "p value * 100\n"), ("4000", "c\n"))
    screen = _typed([*_PYTEST, "--pdb"], folder, answers=answers)
    assert "4000" in screen
    assert "1 failed" in screen
    assert "PDB post_mortem" not in screen  # a second one, from the launcher


def _typed(arguments: Sequence[str], folder: Path, *, answers: Sequence[tuple[str, str]]) -> str:
    """Run Python in a terminal, and type each answer when its question appears."""
    terminal, other_end = pty.openpty()
    process = scripts.warm_python().start(
        arguments,
        environment=_environment(),
        streams=[other_end] * 3,
        folder=folder,
        session=True,
        terminal=os.ttyname(other_end),
    )
    os.close(other_end)
    screen, waiting, end = "", list(answers), time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            text = os.read(terminal, 1 << 16)
        except OSError:  # the other end is closed
            break
        screen += text.decode(errors="replace")
        if waiting and waiting[0][0] in screen:
            os.write(terminal, waiting.pop(0)[1].encode())
    os.close(terminal)
    process.kill()
    process.wait()
    return screen


def test_the_page_on_porting_a_test_case_runs(tmp_path: Path) -> None:
    """Each form of such a class becomes a plain one, with methods, parameters and `setup_method`."""
    page = (scripts.TESTS.parent / "docs" / "how-to" / "test-case.md").read_text()
    blocks = re.findall(r"(<!-- not run[^\n]*-->\n)?```python\n(.*?)```", page, re.DOTALL)
    code = "\n".join(block for left_out, block in blocks if not left_out)
    assert code.count("@pytest.mark.ddp") == 3
    printed = _pytest(_project(tmp_path, test_page=code), "-q")
    assert "5 passed" in printed, printed
