"""Every command on the pages runs in a test, or a table gives the reason why it does not."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from machine import hang_limit
from source_tree import CHECKOUT

from ddpsafe.cli import main

BLOCK: Final = re.compile(r"^```(console|text|sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES: Final = [
    *(CHECKOUT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(path for path in sorted((CHECKOUT / "docs").rglob("*.md")) if "_build" not in path.parts),
]


def commands() -> list[str]:
    """Return ``page: command`` for each shell line that a page shows."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(CHECKOUT))
        for kind, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                is_typed = kind in ("sh", "bash") or line.startswith("$ ")
                text = line.removeprefix("$ ").strip()
                if is_typed and text and not text.startswith("#"):
                    found.append(f"{name}: {text}")
    return found


SHELL: Final = "in a shell"
PYTHON: Final = "in Python"
DDPSAFE: Final = "in this process"
KINDS: Final[tuple[tuple[str, str], ...]] = (
    # run by another test
    (r"^README.md: python3 -m venv", ".ci/run"),
    (r"/(first-run|survive-a-kill).md: (python|torchrun|rm|kill|pkill) ", "tests/docs/test_examples.py"),
    (r"/lose-a-node.md: ", "tests/nodes/test_schedulers.py"),
    (r": ddpsafe run ", "tests/launcher/test_run_command.py"),
    (r": ddpsafe doctor( --json| --verbose)?$", "tests/doctor/test_cli.py"),
    (r": NCCL_\w+=\w+ ddpsafe doctor --verbose$", "tests/doctor/test_cli.py"),
    (r": ddpsafe doctor .*--nnodes", "tests/doctor/test_mesh_attendance.py"),
    (r": ddpsafe doctor --config", "tests/doctor/test_cli.py"),
    (r": ddpsafe checkpoint import", "tests/checkpoint/test_commands.py"),
    (r": ddpsafe explain", "tests/explain/test_command.py"),
    (r": pytest$", "tests/testing/test_plugin.py"),
    # cannot run here
    (r": (python -m )?pip (install|download|uninstall)\b", "needs a package index"),
    (r"^CONTRIBUTING.md: (python3 -m venv|.venv/bin/p)", "needs a package index"),
    (r"(: |-)nvidia-smi|GPU-(009|012).*python|pynvml|: lspci|nvidia-fabricmanager|xid", "needs a GPU"),
    (r": (srun|sbatch|kubectl|docker|traffic\.sidecar)|scontrol|: python submit", "needs a cluster"),
    (r"/(preemption|several-nodes).md: (code=|exit |for |done|wait|ssh)", "needs a cluster"),
    (r"DS-MESH-044|: (ping|tracepath|nc|arping|ip route get|ip neigh) |gpu-01\b", "needs another host"),
    (r": (iptables|nft|firewall-cmd|timedatectl|mount|ethtool) ", "changes or needs the machine"),
    (r": ip (link set|addr del|route del|rule del) |: sysctl \S+=|>+ /(etc|proc)", "changes the machine"),
    (r": (dd|du|df|namei|findmnt) .*/(scratch|data)", "needs a mount"),
    (r": (mv torch|tmux|ls /sys/class/inf|ulimit -[lu] unl)|: (nstat|dmesg|ibstat|cat /sys/class/inf)|sha256sum", "needs what it is about"),
    (r": ip (link show|-s link show|-brief address show) dev eth0|: ip link show eth0|/net/eth0/", "needs eth0"),
    (r": getent hosts 1|: time getent|MASTER_ADDR\" \| cut", "needs a name server"),
    (r": (openssl|chmod|\(umask)", "writes a secret into the home folder"),
    # run below
    (r": ddpsafe (config|status|template \w+|--version)\b", DDPSAFE),
    (r": python (-X importtime )?-c |: python -m torch.utils.collect_env", PYTHON),
    (r": (env|printenv|unset|export|echo|printf|ulimit|cat|free|nproc|ps|ss|ip|sysctl|date|ls|grep|df|pip|getent)\b", SHELL),
)  # fmt: skip
"""Patterns of ``page: command``, with how it runs, which test runs it, or why none does; the first match counts."""


def kind_of(command: str) -> str | None:
    """Return how a command runs, by the first pattern that matches."""
    return next((kind for pattern, kind in KINDS if re.search(pattern, command)), None)


def of_kind(kind: str) -> list[str]:
    """Return the commands that run in this way, each once, without pages and comments."""
    texts = [each.partition(": ")[2] for each in commands() if kind_of(each) == kind]
    return list(dict.fromkeys(re.sub(r" +#.*", "", text) for text in texts))


def test_every_command_is_in_the_table() -> None:
    """Each command matches a pattern, and each pattern matches a command."""
    assert [each for each in commands() if kind_of(each) is None] == []
    first = {
        next(pattern for pattern, _ in KINDS if re.search(pattern, each)) for each in commands()
    }
    assert [pattern for pattern, _ in KINDS if pattern not in first] == []
    named = {kind for _, kind in KINDS if kind.startswith((".ci/", "tests/"))}
    assert [name for name in named if not (CHECKOUT / name).is_file()] == []


@pytest.mark.full
def test_shell_commands_run(tmp_path: Path) -> None:
    """The programs accept the options; `grep` may find nothing, and a name may be unknown."""
    texts = [
        text
        for text in of_kind(SHELL)
        if re.match(r"(unset|export|ulimit|echo|printf)\b", text) or shutil.which(text.split()[0])
    ]
    assert len(texts) > 30
    lines = [
        f"( {text} ) >/dev/null 2>err; c=$?; [ $c -le 2 ] && ! grep -qiE "
        f"'usage|invalid|unrecognized|unknown|not found' err || {{ echo {shlex.quote(text)} $c; cat err; }}"
        for text in texts
    ]
    run = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=tmp_path,
        env={
            "PATH": str(Path(sys.executable).parent) + ":/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(tmp_path),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        },
        capture_output=True,
        text=True,
        timeout=hang_limit(300),
        check=False,
    )
    assert run.stdout + run.stderr == ""


@pytest.mark.full
def test_python_commands_run(tmp_path: Path) -> None:
    """All run in one interpreter, because importing torch takes most of their time."""
    code = []
    for text in of_kind(PYTHON):
        words = shlex.split(text.partition(" | ")[0].replace("2>&1", ""))
        code.append(
            words[words.index("-c") + 1] if "-c" in words else "import torch.utils.collect_env"
        )
    assert len(code) > 5
    command = [sys.executable, "-c", "\n".join(code)]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=hang_limit(300), check=False
    )
    assert run.returncode == 0, run.stderr


def test_ddpsafe_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They print something, and a status without a launch exits with 1."""
    monkeypatch.chdir(tmp_path)
    texts = of_kind(DDPSAFE)
    assert len(texts) > 5
    for text in texts:
        try:
            code = main(shlex.split(text)[1:])
        except SystemExit as end:
            code = int(end.code or 0)
        assert code == 0 or "status" in text, text
        said = capsys.readouterr()
        assert said.out + said.err, text
