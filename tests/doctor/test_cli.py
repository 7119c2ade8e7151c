"""The command ``ddpsafe``: help, exit codes, JSON, the HTML page, secrets that stay hidden, and pages of codes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import scripts
from source_tree import CHECKOUT, PACKAGE, python_files

from ddpsafe import cli
from ddpsafe.cli import main
from ddpsafe.doctor._findings import find_pages

TORCH_IS_BROKEN: Final = "raise ImportError('no torch in this test: its import takes seconds')"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(folder: Path, *arguments: str, **env: str) -> scripts.Run:
    """Run the command in a separate process in which torch cannot be imported."""
    scripts.write(folder, "no-torch/torch.py", TORCH_IS_BROKEN)
    path = str(folder / "no-torch")
    process = scripts.Script(
        ["-m", "ddpsafe", *arguments], folder=folder, env={"PYTHONPATH": path, **env}
    )
    return process.end()


def test_help_is_instant_and_loads_neither_torch_nor_pydantic(tmp_path: Path) -> None:
    """Every command has its own help, which loads only the standard library."""
    code = """
    import contextlib, io, sys
    from ddpsafe.cli import main
    for command in ([], ["doctor"], ["config"], ["run"]):
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main([*command, "--help"])
    print(*sorted({"torch", "pydantic", "rich", "psutil"} & sys.modules.keys()))
    """
    assert scripts.run(tmp_path, code, fresh=True).lines() == [""]


@pytest.mark.parametrize("name", ["run", "doctor", "config"])
def test_help_is_printed_in_any_terminal_encoding(name: str, tmp_path: Path) -> None:
    """In ASCII, characters that cannot be encoded become question marks."""
    run = command(tmp_path, name, "--help", PYTHONIOENCODING="ascii")
    assert (run.code, run.err) == (0, "")
    assert run.out.startswith(f"usage: ddpsafe {name}")


@pytest.mark.full
@pytest.mark.parametrize("arguments", [["config"], ["config", "--config", "no"]])
def test_a_reader_that_closed_the_pipe_causes_no_traceback(
    arguments: list[str], tmp_path: Path
) -> None:
    """As with ``ddpsafe config | head -1``; the exit code is that of SIGPIPE."""
    reading, writing = os.pipe()
    os.close(reading)
    ending = subprocess.run(
        [sys.executable, "-m", "ddpsafe", *arguments],
        cwd=tmp_path,
        stdout=writing,
        stderr=writing if "no" in arguments else subprocess.PIPE,
        timeout=scripts.LIMIT_S,
        check=False,
    )
    os.close(writing)
    assert (ending.returncode, ending.stderr or b"") == (cli.NOBODY_READS, b"")


@pytest.mark.full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("redirected", "code", "told"),
    [
        (
            "config > /dev/full",
            2,
            "ddpsafe: the output cannot be written: No space left on device\n",
        ),
        ("config --json > /dev/full 2>&1", 2, ""),
        ("no-such-command 2> /dev/full", 2, ""),
        ("no-such-command 2> /dev/full >&-", 2, ""),
        ("config >&-", 0, ""),
    ],
)
def test_an_output_that_cannot_be_written_is_told_in_one_line(
    redirected: str, code: int, told: str, unbuffered: str, tmp_path: Path
) -> None:
    """The exit code is that of wrong usage, whenever Python notices it; a closed output is not wanted."""
    ending = subprocess.run(
        f"exec {sys.executable} -m ddpsafe {redirected}",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=scripts.LIMIT_S,
        check=False,
    )
    assert (ending.returncode, ending.stderr) == (code, told)


def test_a_failure_exits_with_1_and_prints_cause_fix_and_page(tmp_path: Path) -> None:
    """In a pipe the output has no escape sequences."""
    run = command(tmp_path, "doctor", GLOO_SOCKET_IFNAME="ib7")
    assert run.code == 1
    assert "failed DS-NET-001: GLOO_SOCKET_IFNAME" in run.out
    assert "  Likely cause: " in run.out
    assert re.search(r"^      export GLOO_SOCKET_IFNAME=\w+$", run.out, re.MULTILINE)
    assert "  Read on: ddpsafe doctor --explain DS-NET-001" in run.out
    assert "DS-VER-001" in run.out  # torch is broken, and everything else was checked
    assert "\x1b[" not in run.out
    assert run.err == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--nnodes", "two"],
        ["doctor", "--nnodes", "2"],
        ["doctor", "--nnodes", "2", "--rdzv-endpoint", "10.0.0.7:29500"],
        ["doctor", "--timeout", "soon"],
        ["doctor", "--config", "missing.toml"],
        ["doctor", "--backend", "ncll"],
        ["doctor", "--no-such-option"],
        ["config", "--config", "missing.toml"],
        ["run", "missing.py"],
        ["run", "--nproc-per-node", "0", "missing.py"],
        ["fly"],
        [],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_shows_the_right_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is examined or started."""
    try:
        code = cli.main(arguments)
    except SystemExit as end:  # raised by argparse
        code = int(str(end.code))
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert len(printed.err) > 20


def test_json_is_all_of_stdout_and_has_every_finding(tmp_path: Path) -> None:
    """A program can parse stdout as it is."""
    run = command(tmp_path, "doctor", "--json")
    report = json.loads(run.out)
    assert {"findings", "hostname", "matrix", "took_s"} <= report.keys()
    assert {"code", "severity", "fact", "cause", "fix", "hosts", "details"} <= report["findings"][
        0
    ].keys()
    assert run.err == ""


@pytest.mark.full
def test_secrets_of_the_environment_are_never_printed(tmp_path: Path) -> None:
    """Not in a fact, a fix or an error, in any format of the report."""
    secret = "hunter2hunter2"
    env = {
        "WANDB_API_KEY": secret,
        "MASTER_ADDR": f"tcp://admin:{secret}@gpu-01",
        "MASTER_PORT": secret,
        "GLOO_SOCKET_IFNAME": f"https://user:pass-{secret}@x",
        "DDPSAFE_ENV__MY_TOKEN": secret,
    }
    printed = [
        command(tmp_path, "doctor", "--verbose", **env),
        command(tmp_path, "doctor", "--json", "--html", "page.html", **env),
        command(tmp_path, "config", **env),
        command(tmp_path, "config", "--json", **env),
    ]
    unreadable = {"DDPSAFE_ENV": f'{{"HF_TOKEN": "{secret}"'}
    printed += [
        command(tmp_path, "doctor", **unreadable),
        command(tmp_path, "doctor", "--json", **unreadable),
    ]
    assert "DS-ENV-007" in printed[-1].out
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "MASTER_ADDR" in printed[0].out
    assert "env.MY_TOKEN" in printed[2].out
    assert secret not in "".join(run.out + run.err for run in printed) + page


def test_terminal_shows_a_table_and_lines_to_copy_unbroken(tmp_path: Path) -> None:
    """On a narrow terminal the table wraps, but lines to copy do not."""
    scripts.write(tmp_path, "no-torch/torch.py", TORCH_IS_BROKEN)
    ours, theirs = pty.openpty()
    env = {
        **scripts.clean_environment(),
        "PYTHONPATH": str(tmp_path / "no-torch"),
        "COLUMNS": "60",
        "TERM": "xterm",
        "TORCH_DISTRIBUTED_DEBUG": "DETAILS",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "ddpsafe", "doctor"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the process closed its end
            while part := os.read(ours, 65536):
                shown += part
        os.close(ours)
    assert process.returncode == 1
    text = shown.decode()
    assert "✗ failed" in text
    assert "checking" in text  # the progress line
    assert "      export TORCH_DISTRIBUTED_DEBUG=INFO\r\n" in text
    folder = tmp_path / "no-torch"
    assert f"      mv {folder}/torch.py {folder}/my_torch.py\r\n" in text  # longer than a line


def test_config_names_the_source_of_each_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The environment overrides the file, and the file overrides the default."""
    text = "[tool.ddpsafe]\nnproc_per_node = 4\nseed = 1\ntimeouts = {grace = 10}\n"
    (tmp_path / "my.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("DDPSAFE_SEED", "7")
    assert cli.main(["config", "--config", "my.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nproc_per_node"] == {"value": "4", "source": "my.toml"}
    assert found["seed"] == {"value": "7", "source": "DDPSAFE_SEED"}
    assert found["timeouts.grace"] == {"value": "10 s", "source": "my.toml"}
    assert found["backend"] == {"value": "auto", "source": "default"}
    assert cli.main(["config", "--config", "my.toml"]) == 0
    assert re.search(r"timeouts\.grace +10 s +\(my\.toml\)", capsys.readouterr().out)


def test_only_the_first_process_of_a_node_examines_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under srun with several tasks per node, the second one prints nothing."""
    place = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.full
@pytest.mark.parametrize("arguments", ["doctor", "run train.py"])
def test_a_removed_working_directory_is_reported(arguments: str, tmp_path: Path) -> None:
    """Python's and torch's own errors in such a directory are misleading."""
    (tmp_path / "gone").mkdir()
    python = shlex.quote(sys.executable)
    script = f"cd gone && rmdir ../gone && exec {python} -m ddpsafe {arguments}"
    env = {**os.environ, "PYTHONPATH": str(scripts.TESTS.parent)}
    ending = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        timeout=scripts.LIMIT_S,
        check=False,
    )
    printed = (ending.stdout + ending.stderr).decode()
    assert "The current directory has been removed" in printed
    assert "pip install" not in printed
    assert "Traceback" not in printed


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGES: Final = find_pages()
CODE: Final = re.compile(r"DS-[A-Z]+-\d{3}")


def codes_in(*files: Path) -> set[str]:
    """Return the codes that some files contain."""
    return {code for file in files for code in CODE.findall(file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("code", PAGES)
def test_page_has_cause_confirmation_and_fix(code: str) -> None:
    """Each page has its code, a title and the three sections a reader needs, none empty."""
    text = PAGES[code].read_text(encoding="utf-8")
    assert re.match(rf"# {code}: \S.+\n", text)
    sections = dict(section.split("\n", 1) for section in text.split("\n## ")[1:])
    assert list(sections) == ["Cause", "How to confirm", "Fix"]
    assert all(section.strip() for section in sections.values())


def test_every_code_of_a_check_has_a_page_and_every_page_such_a_code() -> None:
    """No message refers to a page that does not exist, and no page is about nothing."""
    assert codes_in(*python_files(PACKAGE)) == set(PAGES)


def test_every_code_is_provoked_by_a_test() -> None:
    """A check that has never reported anything is untested."""
    others = [file for file in python_files(CHECKOUT / "tests") if file != Path(__file__)]
    assert set(PAGES) - codes_in(*others) == set()


def test_installed_package_includes_the_pages(tmp_path: Path) -> None:
    """In the layout of the wheel, away from the checkout, the command prints a page."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for name in wheel["packages"]:
        shutil.copytree(CHECKOUT / name, tmp_path / name)
    for source, target in wheel["force-include"].items():
        shutil.copytree(CHECKOUT / source, tmp_path / target)
    done = subprocess.run(
        [sys.executable, "-m", "ddpsafe", "doctor", "--explain", "ds-net-001"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=scripts.LIMIT_S,
    )
    assert done.stdout.startswith("# DS-NET-001: An interface variable names no interface")
    assert "## How to confirm" in done.stdout


def test_unknown_code_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped code gets the closest one, with the exit code of wrong usage."""
    assert main(["doctor", "--explain", "DS-NET-0001"]) == 2
    assert "DS-NET-001" in capsys.readouterr().err
