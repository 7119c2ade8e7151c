"""Nodes that a scheduler starts: the pods of a Job or a PyTorchJob, and a loop over ssh; the loss of one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from hosts import Network, find_obstacle, require
from nodes_kit import Launcher, require_nothing_left

from ddpsafe._commands.template import read_template

yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.root

PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "several-nodes.md"
LATE_NAME: Final = "10.77.0.1 train-0.train\n"

TRAIN: Final = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "of", int(total.item()), flush=True)
    dist.destroy_process_group()
"""


def names_of_pods(network: Network, _: int) -> str:
    """Write the cluster's DNS names, without that of the endpoint, which appears later."""
    lines = ["127.0.0.1 localhost"]
    for index in range(len(network.names)):
        names = f"h{index} job-worker-{index} train-node-0-{index}.train"
        master = "job-master-0" if index == 0 else ""
        lines.append(f"{network.first_address(index)} {names} {master}")
    return "\n".join([*lines, ""])


@pytest.fixture(scope="module")
def pods() -> Iterator[Network]:
    """Two pods."""
    require(find_obstacle())
    with Network(2, hosts_file=names_of_pods) as network:
        yield network


def block(language: str, word: str) -> str:
    """Return the block of the page that contains a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [each for each in blocks if word in each]
    return str(found)


def job_command(text: str) -> tuple[list[str], dict[str, Any]]:
    """Return the command of the Job in a manifest, and the Job's specification."""
    (job,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container["command"], job["spec"]


def start(
    network: Network, index: int, command: list[str], folder: Path, env: dict[str, str]
) -> Launcher:
    """Run the command of a container, with a small script instead of its own."""
    assert command[:2] == ["ddpsafe", "run"]
    script = str(scripts.write(folder, "train.py", TRAIN))
    options = [each for each in command[2:-1] if not each.startswith("--run-dir")]
    arguments = ["-m", "ddpsafe", "run", f"--run-dir={folder}/run", *options, script]
    return Launcher(network[index], arguments, {**scripts.FORKING, **env})


def require_all_ranks(launchers: list[Launcher], ranks: int) -> None:
    """Fail unless all ranks have run together."""
    for launcher in launchers:
        assert launcher.end() == 0, launcher.err
    said = "\n".join(line for launcher in launchers for _, line in launcher.lines)
    found = re.findall(rf"rank (\d) of {ranks}\b", said)
    assert sorted(map(int, found)) == list(range(ranks)), said


@pytest.mark.full
@pytest.mark.parametrize("source", ["template", pytest.param("page", marks=pytest.mark.soak)])
def test_pods_of_an_indexed_job_may_start_in_any_order(
    pods: Network, tmp_path: Path, source: str
) -> None:
    """With the command of the manifest: pod 0's name appears some seconds after pod 1 starts."""
    text = read_template("kubernetes") if source == "template" else block("yaml", "kind: Job")
    command, spec = job_command(text)
    assert spec["completionMode"] == "Indexed"
    launchers = []
    for index in (1, 0):
        env = {
            "JOB_COMPLETION_INDEX": str(index),
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "KUBERNETES_SERVICE_PORT": "443",
            "DDPSAFE_JOB_SECRET": "the secret of the cluster",
            "DDPSAFE_NPROC_PER_NODE": "1",  # instead of one per GPU
        }
        launchers.append(start(pods, index, command, tmp_path, env))
    files = [pods.folder / f"hosts.{index}" for index in (0, 1)]
    before = files[0].read_text()
    try:
        scripts.wait_until(lambda: bool(list((tmp_path / "run").glob("node-1-*"))))
        for file in files:
            with file.open("a") as names:
                names.write(LATE_NAME)
        require_all_ranks(launchers, spec["completions"])
    finally:
        for file in files:
            file.write_text(before)
    require_nothing_left(pods)


OPERATORS: Final[dict[str, dict[str, str]]] = {
    # The variables of a pod; "#" stands for its number.
    "PyTorchJob with a master": {
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "#",
        "RANK": "#",
        "WORLD_SIZE": "4",
    },
    "elastic PyTorchJob": {
        "PYTHONUNBUFFERED": "1",
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "job-worker-0:29400",
        "PET_RDZV_ID": "job",
        "PET_MAX_RESTARTS": "3",
    },
    "Kubeflow Trainer": {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "#",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29400",
        "JOB_COMPLETION_INDEX": "#",
    },
}


IN_SOAK: Final = {"PyTorchJob with a master", "elastic PyTorchJob"}
"""tests/test_world.py has their variables as rows; one launch checks the wiring."""


@pytest.mark.parametrize(
    "operator",
    [pytest.param(name, marks=pytest.mark.soak) if name in IN_SOAK else name for name in OPERATORS],
)
def test_pods_of_an_operator_need_no_option(pods: Network, tmp_path: Path, operator: str) -> None:
    """Number, order, endpoint and ranks of the nodes come from the operator's variables in each pod."""
    given = OPERATORS[operator]
    launchers = [
        start(
            pods,
            index,
            ["ddpsafe", "run", "train.py"],
            tmp_path,
            {name: text.replace("#", str(index)) for name, text in given.items()},
        )
        for index in (1, 0)
    ]
    require_all_ranks(launchers, 4)
    require_nothing_left(pods)


SSH: Final = """
    #!/bin/sh
    # ssh -tt HOST COMMAND, into the namespaces of a host
    test "$1" = -tt && shift
    case "$1" in {cases} *) exit 255;; esac
    exec nsenter --target "$pid" --net --uts --mount --pid -- sh -c "$2"
"""


@pytest.mark.full
def test_the_ssh_loop_of_the_page_starts_a_job(network: Network, tmp_path: Path) -> None:
    """As written, with an ssh that enters namespaces; only its owner may read the secret."""
    folder = tmp_path / "bin"
    folder.mkdir()
    cases = " ".join(f"{host.name}) pid={host.pid};;" for host in network)
    ssh = scripts.write(folder, "ssh", SSH.format(cases=cases).lstrip())
    ssh.chmod(0o755)
    run = scripts.write(
        folder, "ddpsafe", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ddpsafe "$@"\n'
    )
    run.chmod(0o755)
    scripts.write(tmp_path, "train.py", TRAIN)
    loop = block("bash", "ssh -tt").replace("gpu-01", "h0").replace("gpu-02", "h1")
    environment = {
        **scripts.clean_environment(),
        "HOME": str(tmp_path),
        "PATH": f"{folder}:{os.environ['PATH']}:/usr/sbin:/sbin",
        "DDPSAFE_NPROC_PER_NODE": "1",
    }
    ended = subprocess.run(
        ["bash", "-c", loop],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scripts.LIMIT_S,
        check=False,
    )
    assert sorted(re.findall(r"rank (\d) of 2", ended.stdout)) == ["0", "1"], ended.stderr
    assert "is derived from its endpoint" not in ended.stderr
    assert (tmp_path / "job-secret").stat().st_mode & 0o077 == 0
    require_nothing_left(network)


CHECKOUT: Final = Path(__file__).parents[2]
TRAINING_S: Final = 330
"""Twelve epochs take 10 s, or minutes on an overloaded machine."""

PAGE_OF_A_LOSS: Final = CHECKOUT / "docs" / "tutorial" / "lose-a-node.md"


def command_of_the_page(folder: Path) -> list[str]:
    """Return the command of the page, which is the same for the hosts h0, h1 and h2."""
    found = set(re.findall(r"^ddpsafe run .*$", PAGE_OF_A_LOSS.read_text(), re.MULTILINE))
    assert len(found) == 1, "the replacement is started with the command of the start"
    text = found.pop().replace("gpu-01", "h0")
    text = text.replace("examples/", f"{CHECKOUT}/examples/")
    words = shlex.split(text)[1:]
    return ["-m", "ddpsafe", *words, "--out", str(folder), "--data", f"{folder}/d"]


@pytest.mark.soak  # test_replacement.py tests the parts, and tests/docs the training
@pytest.mark.timeout(480)  # two complete trainings
def test_training_continues_after_the_loss_of_a_host(own_network: Network, tmp_path: Path) -> None:
    """One of two hosts loses power in mid-epoch; a third replaces it with the same command."""
    pytest.importorskip("sklearn", reason="the examples need pip install 'ddpsafe[examples]'")
    command = command_of_the_page(tmp_path)
    first, second = (Launcher(own_network[node], command, {}) for node in (0, 1))
    checkpoints = tmp_path / "checkpoints"

    def said() -> str:
        return "\n".join(line for _, line in first.lines) + first.err

    scripts.wait_until(
        lambda: checkpoints.exists() and len(list(checkpoints.iterdir())) >= 2,
        otherwise=lambda: said()[-2000:] + second.err[-1000:],
    )
    own_network[1].power_off()
    lost = r"node 1 \('h1', rank 1 of world_size 2\) was lost, attempt 1 of 4"
    scripts.wait_until(lambda: re.search(lost, said()), otherwise=said)
    third = Launcher(own_network[2], command, {})
    assert first.end(TRAINING_S) == 0, said()[-3000:]
    assert third.end() == 0, third.err[-3000:]
    epochs = [int(number) for number in re.findall(r"ranks \[.*\], (\d+) epochs done", said())]
    assert epochs[0] == 0
    assert len(epochs) == 2
    assert 1 <= epochs[1] < 12
    (accuracy,) = re.findall(r"test accuracy ([0-9.]+) \(world_size 2\)", said())
    assert float(accuracy) > 0.9
    assert (tmp_path / "curves.png").exists()
    require_nothing_left(own_network, besides=[1])
