"""A script forked from the warm interpreter behaves like one in a new interpreter."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import leftovers
import pytest
import scripts
from warm_python import SharedPython, WarmPython

FACTS = """
    import json, multiprocessing, os, pathlib, signal, sys, tempfile, threading

    def facts():
        main = vars(sys.modules["__main__"])
        return {
            "arguments": sys.argv,
            "main": {name: str(main.get(name)) for name in ("__name__", "__file__", "__spec__")},
            "second name": sys.modules["__mp_main__"] is sys.modules["__main__"],
            "path": sys.path,
            "flags": str(sys.flags),
            "folder": os.getcwd(),
            "environment": {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            "temporary": tempfile.gettempdir(),
            "streams": [
                (each.name, each.encoding, each.errors, each.line_buffering, each.write_through)
                for each in (sys.stdout, sys.stderr)
            ],
            "files": [fd for fd in range(64) if pathlib.Path(f"/proc/self/fd/{fd}").exists()],
            "signals": {
                int(each): str(signal.getsignal(each)).split(" at ")[0]
                for each in signal.valid_signals()
            },
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "threads": threading.active_count(),
            "parent": str(multiprocessing.parent_process()),
            "is_leader": os.getsid(0) == os.getpid(),
            "children": pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        }
"""


def run_new_and_forked(folder: Path, source: str, *arguments: str) -> list[scripts.Run]:
    """Run a script in a new interpreter and in a fork."""
    path = scripts.write(folder, "script.py", source)
    started = [
        scripts.Script([str(path), *arguments], folder=folder, env={"SAID": "so"}, fresh=fresh)
        for fresh in (True, False)
    ]
    return [script.end() for script in started]


def test_a_fork_has_the_state_of_a_new_interpreter(tmp_path: Path) -> None:
    """The exception is a child that waits to become the fork server, and a socket to it."""
    show = "    print(json.dumps(facts()))"
    new, forked = (
        json.loads(run.lines()[0]) for run in run_new_and_forked(tmp_path, FACTS + show, "a", "-b")
    )
    assert (new.pop("children"), len(forked.pop("children").split())) == ("", 1)
    assert (new.pop("files"), forked.pop("files")) == ([0, 1, 2], [0, 1, 2, 3])
    assert forked == new


IN_A_FORK_SERVER = """
    def show(name):
        print(json.dumps({**facts(), "name": name}), flush=True)

    if __name__ == "__main__":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.chdir("/")
        os.environ["LATE"] = "yes"
        for name in ("first", "second"):
            process = multiprocessing.get_context("forkserver").Process(target=show, args=[name])
            process.start()
            process.join()
        print(process.exitcode)
"""


def test_its_fork_server_has_that_state_too(tmp_path: Path) -> None:
    """This includes the script's own changes; the second process is of the same server."""

    def parsed(run: scripts.Run) -> list[Any]:
        found = [json.loads(line) for line in run.lines()]
        for each in found[:-1]:
            each["parent"] = each["parent"].split(" pid")[0].split("=")[0]
        return found

    new, forked = (parsed(run) for run in run_new_and_forked(tmp_path, FACTS + IN_A_FORK_SERVER))
    assert [each["name"] for each in new[:-1]] == ["first", "second"]
    assert forked == new


@pytest.mark.full
@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "raise ValueError('bad batch')",
        "raise SystemExit(3)",
        "raise SystemExit('said at the end')",
        "raise KeyboardInterrupt",
        "import signal; signal.raise_signal(signal.SIGINT)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os._exit(7)",
        "import atexit; atexit.register(print, 'at exit')",
        "import threading; threading.Thread(target=print, args=['a thread']).start()",
        "import sys; sys.excepthook = lambda *_: sys.exit(75); raise ValueError",
        "import sys; print('for no reader', end=''); sys.stdout.close()",
        "1 +",
    ],
)
def test_a_fork_exits_as_a_new_interpreter_does(tmp_path: Path, end: str) -> None:
    """Exit status, final output and the lines of the traceback are the same."""
    new, forked = run_new_and_forked(tmp_path, f"def work():\n    pass\n\nwork()\n{end}\n")
    assert forked == new


def test_options_and_variables_that_are_read_at_start_need_a_new_interpreter() -> None:
    """A fork cannot change the options of Python or the variables that torch has read."""
    plain = scripts.clean_environment()
    assert scripts.can_be_forked(["script.py", "-x"], plain)
    assert scripts.can_be_forked(["-m", "module"], {**plain, "RANK": "0"})
    assert not scripts.can_be_forked(["-X", "dev", "script.py"], plain)
    assert not scripts.can_be_forked(["-c", "pass"], plain)
    assert not scripts.can_be_forked(["script.py"], {**plain, "OMP_NUM_THREADS": "1"})
    assert not scripts.can_be_forked(["script.py"], {**plain, "PYTHONPATH": "elsewhere"})


OF_A_KILLED_TEST = """
    import os, sys, time
    from warm_python import SharedPython, WarmPython

    shared = SharedPython([], os.environ).address if sys.argv[1] == "shared" else None
    warm = WarmPython([], os.environ, shared)
    print(warm.start(["sleep.py"], environment=os.environ, streams=(0, 1, 2)).pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("interpreter", ["own", "shared"])
def test_a_script_ends_with_the_tests_that_started_it(tmp_path: Path, interpreter: str) -> None:
    """A killed test run leaves no script behind."""
    scripts.write(tmp_path, "sleep.py", "import time; time.sleep(1000)")
    test = scripts.write(tmp_path, "test.py", OF_A_KILLED_TEST)
    kits = os.fspath(Path(__file__).parent)
    command = [sys.executable, str(test), interpreter]
    env = {**os.environ, "PYTHONPATH": kits}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        watch = os.pidfd_open(int(killed.stdout.readline()))
        killed.kill()
        assert select.select([watch], [], [], 30)[0]
        os.close(watch)


def test_leftovers_are_found_by_the_worker_that_started_the_script(tmp_path: Path) -> None:
    """Processes of a shared interpreter show the mark of their own pytest worker only."""
    scripts.write(tmp_path, "sleep.py", "import time; time.sleep(1000)")
    shared = SharedPython([], os.environ)
    workers = [WarmPython([], os.environ, shared.address) for _ in range(2)]
    before = leftovers.Snapshot.take()
    marks = [os.environ[leftovers.MARK], "another worker of the same run"[:32].ljust(32)]
    with open(os.devnull, "r+b") as nothing:  # noqa: PTH123
        started = [
            worker.start(
                ["sleep.py"],
                environment={**os.environ, leftovers.MARK: mark},
                streams=(nothing.fileno(),) * 3,
                folder=tmp_path,
                launches=False,
            )
            for worker, mark in zip(workers, marks, strict=True)
        ]

    def left() -> list[str]:
        return leftovers.Snapshot.take().new_since(before)

    scripts.wait_until(left)
    assert [text.split()[1] for text in left()] == [str(started[0].pid)]
    shared.close()
    scripts.wait_until(lambda: not left())
    for worker in workers:
        worker.close()


OF_SHARED_FORKS = """
    import multiprocessing, os, select, signal, sys
    from pathlib import Path
    from warm_python import SharedPython, WarmPython

    def show(line):
        mark = os.environ["PYTEST_RUN_MARK"].encode()
        is_found = mark in Path("/proc/self/environ").read_bytes()
        line.send((os.getppid(), "colorsys" in sys.modules, is_found))

    def ask():
        ours, theirs = context.Pipe()
        process = context.Process(target=show, args=[theirs])
        process.start()
        process.join()
        return ours.recv()

    if __name__ == "__main__":
        shared = SharedPython(["colorsys"], os.environ)
        warm = WarmPython([], {}, shared.address)
        warm.serve_forks()
        context = multiprocessing.get_context("forkserver")
        first, second = ask(), ask()
        print(first == second, *first[1:])
        watch = os.pidfd_open(first[0])
        os.kill(first[0], signal.SIGKILL)
        select.select([watch], [], [])
        third = ask()
        print(third[0] != first[0], *third[1:])
        warm.close()
        shared.close()
"""


def test_fork_servers_of_pytest_workers_are_forked_too(tmp_path: Path) -> None:
    """They share its imports, their forks show the worker's mark, and a killed one is replaced."""
    run = scripts.run(tmp_path, OF_SHARED_FORKS)
    assert (run.lines(), run.err) == (["True True True"] * 2, "")
