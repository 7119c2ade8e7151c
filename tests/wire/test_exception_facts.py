"""Which lines of a traceback are the user's, and which only lie between two of them."""

from __future__ import annotations

import signal
import subprocess
import sysconfig
from pathlib import Path
from typing import Final

import pytest

import ddpsafe
from ddpsafe import PreflightError
from ddpsafe._launcher.uncaught import presentable
from ddpsafe._wire.exception_facts import find_own_files, is_library, signal_that_ended_a_child

OURS: Final = str(Path(ddpsafe.__file__).parent)
STDLIB: Final = sysconfig.get_path("stdlib")
VENV: Final = "/venv/lib/python3.11/site-packages"
DEBIAN: Final = "/usr/local/lib/python3.12/dist-packages"

FILES: Final = [
    # the file, whether it belongs to a library or to Python, whether its traceback is hidden
    (f"{OURS}/_launch.py", True, True),
    (f"{STDLIB}/socket.py", True, True),
    ("<frozen importlib._bootstrap>", True, True),
    (f"{VENV}/ddpsafe/_launch.py", True, True),
    (f"{VENV}/tenacity/__init__.py", True, True),
    (f"{VENV}/torch/distributed/rendezvous.py", True, True),
    (f"{DEBIAN}/torch/distributed/rendezvous.py", True, True),
    (f"{STDLIB}/site-packages/torch/serialization.py", True, True),
    (f"{VENV}/numpy/core/multiarray.py", True, False),
    (f"{VENV}/torch_project/train.py", True, False),
    (f"{VENV}/train.py", True, False),
    (f"{DEBIAN}/project/train.py", True, False),
    (f"{STDLIB}/site-packages/project/train.py", True, False),
    ("<string>", True, False),  # the fork server's first line, or all of `python -c`
    ("/home/me/train.py", False, False),
    (f"{OURS}_project/train.py", "-packages" in OURS, False),
    (f"{STDLIB}-project/train.py", False, False),
]


@pytest.mark.parametrize(("file", "is_of_library"), [row[:2] for row in FILES])
def test_library_files_are_not_the_users(file: str, *, is_of_library: bool) -> None:
    """This holds wherever Python installs them: NVIDIA's containers use Debian's dist-packages."""
    assert is_library(file) is is_of_library


@pytest.mark.parametrize(("file", "is_hidden"), [(row[0], row[2]) for row in FILES])
def test_a_cause_keeps_its_traceback_if_a_line_may_be_the_users(
    file: str, *, is_hidden: bool
) -> None:
    """A project may be installed as libraries are, and its line is the one to look at."""
    error = PreflightError("It cannot be sent.")
    with pytest.raises(KeyError) as caught:
        exec(compile("raise KeyError", file, "exec"))
    error.__cause__ = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # type: ignore[union-attr] # type: ignore[union-attr] # without this file's line
    presentable(error)
    assert (caught.value.__traceback__ is None) is is_hidden


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ((f"{OURS}/x.py", "/me/a.py", f"{VENV}/numpy/n.py", "/me/b.py"), ("/me/a.py", "/me/b.py")),
        ((f"{OURS}/x.py", f"{VENV}/torch/t.py", f"{VENV}/project/a.py", f"{VENV}/numpy/n.py"),
            (f"{VENV}/project/a.py",)),
        (("<string>", f"{VENV}/project/a.py", f"{VENV}/numpy/n.py", f"{VENV}/project/b.py"),
            (f"{VENV}/project/a.py", f"{VENV}/project/b.py")),
        ((f"{VENV}/project/a.py", "/me/b.py"), ("/me/b.py",)),
        ((f"{STDLIB}/threading.py", f"{VENV}/torch/autograd/graph.py"), ()),
        ((), ()),
    ],
)  # fmt: skip
def test_the_users_files_are_found_in_a_stack(files: tuple[str, ...], own: tuple[str, ...]) -> None:
    """They are those outside the libraries; if there are none, the package that was called first."""
    assert find_own_files(files) == set(own)


class Decoder:
    """An object that owns a program, as a reader of videos does."""

    def __init__(self, signum: int) -> None:
        """Start a program, and end it."""
        self.program = subprocess.Popen(["sleep", "60"])
        self.program.send_signal(signum)
        self.program.wait()

    def read(self) -> None:
        """Fail in words of its own."""
        raise RuntimeError("the decoder has closed its pipe")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_program_that_died_of_a_signal_is_found_where_the_exception_was_raised(
    signum: signal.Signals,
) -> None:
    """The exception is the script's own, and says nothing of a signal."""
    with pytest.raises(RuntimeError) as caught:
        Decoder(signum).read()
    assert signal_that_ended_a_child(caught.value) == signum


def test_a_program_that_is_running_ended_of_no_signal() -> None:
    """It is one of the frame's values, too."""
    with subprocess.Popen(["sleep", "60"]) as program:
        with pytest.raises(ZeroDivisionError) as caught:
            1 / 0  # noqa: B018 - raises
        assert signal_that_ended_a_child(caught.value) == 0
        program.kill()
