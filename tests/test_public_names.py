"""Every public name resolves, and the reference lists it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import ddpsafe
from ddpsafe._config.parts import DETERMINISTIC
from ddpsafe._errors import FAILURE_KINDS
from ddpsafe.cli import main

REFERENCE: Final = Path(__file__).parents[1] / "docs" / "reference"


def test_every_public_name_resolves() -> None:
    """Each name in ``__all__`` exists and has no underscore."""
    assert len(set(ddpsafe.__all__)) == len(ddpsafe.__all__)
    for name in ddpsafe.__all__:
        assert hasattr(ddpsafe, name), name
        assert not name.startswith("_") or name == "__version__", name


def test_dir_offers_every_public_name() -> None:
    """Completion in a shell also offers names that are resolved lazily."""
    assert set(ddpsafe.__all__) <= set(dir(ddpsafe))


def test_an_unknown_name_raises_attribute_error() -> None:
    """A missing name fails as for any module, so ``hasattr`` works."""
    with pytest.raises(AttributeError, match="no_such_name"):
        ddpsafe.no_such_name  # noqa: B018 - resolving the name is the test


def test_reference_lists_the_public_names() -> None:
    """docs/reference/signatures.md has one autodoc directive for each public name, and no other."""
    directive = re.compile(r"^\s*\.\. auto\w+:: ddpsafe\.(\w+)\s*$", re.MULTILINE)
    documented = directive.findall((REFERENCE / "signatures.md").read_text(encoding="utf-8"))
    assert sorted(documented) == sorted(set(ddpsafe.__all__) - {"__version__"})


def test_two_pages_have_all_that_a_launch_needs() -> None:
    """docs/reference/api.md names every public name, method and part of the configuration."""
    text = (REFERENCE / "api.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    methods = [name for name in dir(ddpsafe.RankContext) if not name.startswith("_")]
    fields = [*ddpsafe.LaunchConfig.model_fields, *ddpsafe.Timeouts.model_fields]
    kinds = FAILURE_KINDS - DETERMINISTIC
    names = {*ddpsafe.__all__, *methods, *fields, *kinds} - {"__version__"}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []


def test_reference_lists_the_names_of_the_doctor() -> None:
    """docs/reference/doctor.md documents exactly the public names of ``ddpsafe.doctor``."""
    from ddpsafe import doctor

    directive = re.compile(r"^\s*\.\. auto\w+:: ddpsafe\.doctor\.(\w+)\s*$", re.MULTILINE)
    page = REFERENCE / "doctor.md"
    assert sorted(directive.findall(page.read_text(encoding="utf-8"))) == sorted(doctor.__all__)
    assert all(hasattr(doctor, name) for name in doctor.__all__)


def test_help_lists_every_field() -> None:
    """``help(ddpsafe.launch)`` names each field, and that of `LaunchConfig` explains it."""
    fields = set(ddpsafe.LaunchConfig.model_fields)
    for function, own in (
        (ddpsafe.launch, set()),
        (ddpsafe.spawn, {"nproc_per_node", "start_method"}),
    ):
        assert [f for f in fields - own if f"`{f}`" not in (function.__doc__ or "")] == []
    text = ddpsafe.LaunchConfig.__doc__ or ""
    assert [f for f in fields if f"{f}: " not in text] == []


HELPS: Final = (
    *("doctor", "config", "run", "status", "report", "explain", "template", "checkpoint"),
    *(f"checkpoint {action}" for action in ("ls", "verify", "diff", "import")),
)


@pytest.mark.parametrize("command", HELPS)
def test_each_help_has_exit_codes_and_each_option_once(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spellings with underscores are accepted, as by torchrun, and would double the page of `run`."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert "exit codes: 0" in " ".join(text.split())
    assert re.findall(r"^ *--[a-z-]*_|, --[a-z-]*_", text, re.MULTILINE) == []


WITHOUT_POSIX: Final = """
import sys, signal
sys.platform = {platform!r}
for name in {missing}:
    sys.modules[name] = None
for name in {signals}:
    delattr(signal, name)
import ddpsafe
try:
    getattr(ddpsafe, {name!r})
except ImportError as error:
    print(error)
"""


@pytest.mark.full(but=["win32-missing0-signals0-launch", "darwin-missing1-signals1-spawn"])
@pytest.mark.parametrize("name", ["launch", "spawn", "process_group", "current", "RankContext"])
@pytest.mark.parametrize(
    ("platform", "missing", "signals"),
    [
        ("win32", ["resource", "fcntl", "termios", "pwd"], ["SIGUSR1", "SIGHUP", "SIGRTMIN"]),
        ("darwin", [], ["SIGRTMIN"]),
        ("linux", ["resource", "fcntl"], ["SIGUSR1", "SIGRTMIN"]),
    ],
)
def test_other_systems_are_refused_in_one_sentence(
    name: str, platform: str, missing: list[str], signals: list[str]
) -> None:
    """Windows and macOS lack modules and signals; the error names the system and what to use."""
    program = WITHOUT_POSIX.format(platform=platform, missing=missing, signals=signals, name=name)
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == (
        f"ddpsafe starts ranks on Linux only, and this is {platform}: "
        "use WSL 2 on Windows, or a Linux container.\n"
    )
