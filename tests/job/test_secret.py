"""One secret of a job, with one minimum, for everything that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from ddpsafe import ConfigError, LaunchConfig, cli
from ddpsafe._job.endpoint import key_of
from ddpsafe._job.secret import find_job_secret
from ddpsafe._worker.join.store_endpoint import job_secret

LONG: Final = "0123456789abcdef"


def config(**rendezvous: Any) -> LaunchConfig:
    """Return the configuration of a job of two nodes."""
    return LaunchConfig(nnodes=2, rendezvous={"endpoint": "10.0.0.7:29400", **rendezvous})


@pytest.mark.parametrize(
    "ask",
    [lambda: key_of(config()), job_secret, find_job_secret],
    ids=["nodes", "attached ranks", "doctor"],
)
def test_a_short_secret_is_refused_wherever_it_is_used(
    ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks under torchrun refused three letters, and launchers of several nodes took them."""
    monkeypatch.setenv("DDPSAFE_JOB_SECRET", LONG[:-1])
    with pytest.raises(ConfigError, match="DDPSAFE_JOB_SECRET has 15 characters, fewer than 16"):
        ask()
    for fine in (LONG, ""):  # an empty variable means no secret
        monkeypatch.setenv("DDPSAFE_JOB_SECRET", fine)
        ask()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"\xff\xfe" * 20, "cannot be read: it is not text"),
        (b"abc\n", "has 3 characters, fewer than 16"),
    ],
)
def test_a_file_without_a_secret_is_refused_by_name(
    content: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the setting of a launch, and as the option of the doctor."""
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^rendezvous.secret_file {path} {says}"):
        key_of(config(secret_file=path))
    code = cli.main(["doctor", "--secret-file", str(path), "--no-mesh"])
    assert code == 2
    assert f"--secret-file {path} {says}" in capsys.readouterr().err


def test_a_file_and_the_variable_are_the_same_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node may have it in a file and another one in its environment."""
    path = tmp_path / "secret"
    path.write_text(f"{LONG}\n")
    by_file = key_of(config(secret_file=path))
    derived = key_of(config())
    monkeypatch.setenv("DDPSAFE_JOB_SECRET", LONG)
    assert by_file == key_of(config()) != derived
