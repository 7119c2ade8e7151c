"""``ddpsafe template`` prints valid configurations that contain what ddpsafe relies on.

tests/slurm runs the Slurm template on a real Slurm. The schemas of the others are large;
``nox -s frameworks`` installs them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scripts

from ddpsafe import Timeouts
from ddpsafe._errors import NO_RETRY_EXIT_CODE, TRY_AGAIN_EXIT_CODE
from ddpsafe.cli import TEMPLATES, main, make_parser

yaml = pytest.importorskip("yaml")


def template(place: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of the command."""
    assert main(["template", place]) == 0
    return capsys.readouterr().out


def read_job_request(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the request that the SageMaker program sends."""
    names: dict[str, Any] = {"__name__": "submit"}
    exec(compile(template("sagemaker", capsys), "submit.py", "exec"), names)
    request: dict[str, Any] = names["REQUEST"]
    return request


def require_options(command: list[str]) -> None:
    """Fail unless ``ddpsafe run`` knows all options of a command."""
    assert command[:2] == ["ddpsafe", "run"]
    options, unknown = make_parser().parse_known_args(command[1:])
    assert not unknown
    assert options.script.endswith("train.py")


@pytest.mark.parametrize("place", TEMPLATES)
def test_every_template_names_its_command_and_what_to_edit(
    place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with exactly one newline, so that it can be redirected to a file."""
    text = template(place, capsys)
    assert f'"ddpsafe template {place}"' in text
    assert "edit" in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_an_unknown_template_is_refused_with_the_list_of_templates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit code is the usual one for a usage error."""
    with pytest.raises(SystemExit) as ended:
        main(["template", "lsf"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert all(place in err for place in TEMPLATES)


def test_kubernetes_restarts_only_what_another_attempt_can_fix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit codes, grace period and shared memory match ddpsafe's documented ones."""
    service, _, job = yaml.safe_load_all(template("kubernetes", capsys))
    spec = job["spec"]
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"][:2]}
    assert rules["FailJob"]["onExitCodes"]["values"] == [NO_RETRY_EXIT_CODE]
    assert rules["Ignore"]["onExitCodes"]["values"] == [TRY_AGAIN_EXIT_CODE]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > Timeouts().stop.total_seconds()
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = pod["containers"]
    require_options(container["command"])
    assert f"--nnodes={spec['completions']}" in container["command"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/runs"]]


@pytest.mark.extra("frameworks")
def test_the_kubernetes_template_follows_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes' own schema is checked, and unknown fields are refused."""
    validator = importlib.import_module("kubernetes_validate")
    for document in yaml.safe_load_all(template("kubernetes", capsys)):
        validator.validate(document, "1.31", strict=True)


def test_compose_gives_the_ranks_time_and_shared_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The grace period is longer than `timeouts.stop`, and logs are kept outside the container."""
    (service,) = yaml.safe_load(template("compose", capsys))["services"].values()
    require_options(service["command"])
    minutes, seconds = re.fullmatch(r"(\d+)m(\d+)s", service["stop_grace_period"]).groups()  # type: ignore[union-attr]
    assert int(minutes) * 60 + int(seconds) > Timeouts().stop.total_seconds()
    assert service["shm_size"] == "16gb"
    assert service["init"] is True
    assert any(volume.endswith(":/runs") for volume in service["volumes"])


@pytest.mark.extra("frameworks")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("", ""), ("shm_size:", "shm_sise:"), ("stop_grace_period: 5m30s", "stop_grace_period: long")],
)
def test_the_compose_template_follows_the_specification(
    capsys: pytest.CaptureFixture[str], right: str, wrong: str
) -> None:
    """Every field and value is one of Compose's; a typo would be found."""
    compose_spec = importlib.import_module("compose_spec")
    # The specification has a number of restarts, but this parser does not know it.
    text = template("compose", capsys).replace("on-failure:5", "on-failure")
    assert right in text
    if right == wrong:
        compose_spec.PyCompose.from_yaml(text)
        return
    with pytest.raises(ValueError, match="train"):
        compose_spec.PyCompose.from_yaml(text.replace(right, wrong))


def test_sagemaker_starts_a_launcher_on_each_instance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first instance by name is node 0 and serves the endpoint on every instance."""
    algorithm = read_job_request(capsys)["AlgorithmSpecification"]
    python, flag, start = algorithm["ContainerEntrypoint"]
    assert (python, flag) == ("python", "-c")
    assert len(start) <= 256
    config = tmp_path / "resourceconfig.json"
    program = scripts.write(tmp_path, "ddpsafe", '#!/bin/sh\necho ddpsafe "$@"\n')
    program.chmod(0o755)
    for rank, host in enumerate(("algo-1", "algo-2")):
        config.write_text(json.dumps({"current_host": host, "hosts": ["algo-2", "algo-1"]}))
        here = start.replace("/opt/ml/input/config/resourceconfig.json", str(config))
        assert here != start
        done = subprocess.run(
            [sys.executable, flag, here, *algorithm["ContainerArguments"]],
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        )
        command = done.stdout.split()
        require_options(command)
        expected = ["--nnodes=2", f"--node-rank={rank}", "--rdzv-endpoint=algo-1:29400"]
        assert command[2:5] == expected


@pytest.mark.extra("frameworks")
def test_the_sagemaker_template_follows_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    """Botocore's model of CreateTrainingJob has the names, types, lengths and choices."""
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    request = read_job_request(capsys)
    assert ParamValidator().validate(request, shape).generate_report() == ""
    require_lengths(shape, request)


def require_lengths(shape: Any, value: Any) -> None:
    """Fail if a text is too long for the API, or is not one of its choices."""
    if shape.type_name == "structure":
        for name, each in value.items():
            require_lengths(shape.members[name], each)
    elif shape.type_name == "list":
        for each in value:
            require_lengths(shape.member, each)
    elif shape.type_name == "string":
        assert len(value) <= shape.metadata.get("max", len(value)), shape
        assert not shape.enum or value in shape.enum, shape
