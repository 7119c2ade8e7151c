"""The checkpoint commands: list, verify, compare and import."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpsafe import cli
from ddpsafe._errors import ConfigError
from ddpsafe.checkpoint import Checkpointer, import_file


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with the checkpoints of steps 1 and 2, which differ in two places."""
    model = torch.nn.Linear(3, 2)
    with Checkpointer(tmp_path / "c", rng=False) as checkpointer:
        checkpointer.save({"model": model, "epoch": 1}, 1, metrics={"loss": 0.5})
        with torch.no_grad():
            model.weight[0, 0] += 2
        checkpointer.save({"model": model, "epoch": 2}, 2, metadata={"host": "\x1b[2J"})
    return tmp_path / "c"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command; return its exit code and what it printed."""
    code = cli.main(["checkpoint", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_checkpoints_are_listed_newest_first(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is listed with its metrics and metadata; a damaged one is marked as damaged."""
    (directory / "step-000000000003").mkdir()
    code, out, _ = run(capsys, "ls", str(directory), "--json")
    found = json.loads(out)
    assert code == 0
    assert [each["step"] for each in found] == [3, 2, 1]
    assert "manifest.json is missing" in found[0]["damage"]
    assert found[1]["metadata"] == {"host": "\x1b[2J"}
    assert found[2]["metrics"] == {"loss": 0.5}
    code, out, _ = run(capsys, "ls", str(directory))
    titles, damaged, second, first = out.splitlines()
    assert titles.split("  ")[0] == "step"
    assert damaged[titles.index("damage") :].startswith("The checkpoint ")
    assert first[titles.index("metrics") :].startswith("loss=0.5")
    assert re.fullmatch(r"\d\.\d kB", second[titles.index("size") :][:6])
    assert "\x1b" not in out


def test_files_that_are_missing_or_cut_off_are_listed_as_damage(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sizes in the manifest tell it without reading the files; the other columns remain."""
    (directory / "step-000000000002" / "ranks.bin").unlink()
    os.truncate(directory / "step-000000000001" / "state.pt", 10)
    code, out, _ = run(capsys, "ls", str(directory), "--json")
    second, first = json.loads(out)
    assert (code, second["damage"], second["world_size"]) == (0, "ranks.bin is missing", 1)
    assert first["damage"].startswith("state.pt is truncated: 10 of ")
    titles, *rows = run(capsys, "ls", str(directory))[1].splitlines()
    damage = [row[titles.index("damage") :] for row in rows]
    assert damage == [second["damage"], first["damage"]]
    assert "loss=0.5" in rows[1]


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        ("1", "import it as a step after 2, or into an empty directory"),
        ("-1", "pass the number of steps done so far"),
    ],
)
def test_step_that_cannot_be_imported_is_refused_in_terms_of_the_import(
    directory: Path, capsys: pytest.CaptureFixture[str], step: str, advice: str
) -> None:
    """Nothing is said of calls that the command does not make."""
    torch.save({"weight": torch.ones(2)}, directory / "w.pt")
    code, out, err = run(
        capsys, "import", str(directory / "w.pt"), str(directory), f"--step={step}"
    )
    assert (code, out) == (2, "")
    assert advice in err
    assert "restore()" not in err


def test_verify_finds_damage_and_exits_with_1(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every byte of every file is checked."""
    assert run(capsys, "verify", str(directory)) == (
        0,
        "step  state\n2     whole\n1     whole\n",
        "",
    )
    file = directory / "step-000000000002" / "ranks.bin"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    code, out, _ = run(capsys, "verify", str(directory))
    assert code == 1
    assert "\n2     ranks.bin: bytes 0 to" in out
    assert run(capsys, "verify", str(directory), "--step", "1")[0] == 0
    (directory / "step-000000000009").mkdir()
    assert run(capsys, "verify", str(directory), "--step", "9")[0] == 1


def test_missing_step_is_not_reported_as_damage(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command exits with 2, as for a wrong directory, and lists the existing steps."""
    code, out, err = run(capsys, "verify", str(directory), "--step", "9")
    assert (code, out) == (2, "")
    assert "There is no checkpoint of step 9" in err
    assert "there are steps 1 and 2." in err


@pytest.mark.parametrize("place", ["latest", "step-000000000002", "copy", ".aside", "link/latest"])
def test_folder_of_one_checkpoint_is_accepted(
    directory: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """Examples are the link to the newest, a renamed copy, and one that was set aside."""
    for name in ("copy", ".aside"):
        shutil.copytree(directory / "step-000000000002", directory / name)
    (directory / "link").symlink_to(directory)
    one = str(directory / place)
    assert run(capsys, "diff", str(directory), one) == (0, "no difference in 3 values\n", "")
    assert run(capsys, "verify", one)[:2] in (
        (0, "step  state\n2     whole\n"),
        (0, f"{'step':{len(place)}}  state\n{place}  whole\n"),
    )
    assert json.loads(run(capsys, "ls", one, "--json")[1])[0]["step"] == 2


def test_diff_compares_value_by_value(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It names the values that differ, in how many places and by how much; equal ones exit with 0."""
    first = str(directory / "step-000000000001")
    code, out, _ = run(capsys, "diff", first, str(directory), "--json")
    assert code == 1
    assert json.loads(out)["differences"] == [
        {"path": "model['weight']", "difference": "1 of 6 values differ, by up to 2"},
        {"path": "epoch", "difference": "1, then 2"},
    ]
    code, out, _ = run(capsys, "diff", first, first)
    assert (code, out) == (0, "no difference in 3 values\n")


@pytest.mark.parametrize("action", [["ls"], ["verify"], ["diff", "x"]])
def test_wrong_directory_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]
) -> None:
    """The message names what is there instead, without a traceback."""
    code, out, err = run(capsys, *action, str(tmp_path / "nowhere"))
    assert (code, out) == (2, "")
    assert "nowhere" in err or "x" in err


def wrapped(model: torch.nn.Module) -> Any:
    """Return a state as DDP around a compiled model produces it."""
    return {f"_orig_mod.module.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "make",
    [
        lambda model, _: model.state_dict(),
        lambda model, _: wrapped(model),
        lambda model, _: {f"module.{key}": value for key, value in model.state_dict().items()},
        lambda model, optimizer: {
            "state_dict": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "epoch": 4,
        },
    ],
    ids=["a model's", "wrapped", "DDP's", "of everything"],
)
def test_file_of_torch_save_is_imported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    make: Callable[[torch.nn.Module, torch.optim.Optimizer], Any],
) -> None:
    """It can be restored like any other checkpoint, optimizer included."""
    torch.manual_seed(0)
    model, now = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(now.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    tree = make(model, optimizer)
    torch.save(tree, tmp_path / "file.pt")
    place = [str(tmp_path / "file.pt"), str(tmp_path / "c")]
    rename = ["--rename", "state_dict=model"] if "state_dict" in tree else []
    code, out, err = run(capsys, "import", *place, "--step", "7", *rename, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["metadata"] == {"imported_from": place[0]}
    state: dict[str, Any] = {"model": now}
    if "optimizer" in tree:
        state |= {"optimizer": other, "epoch": 0}
    with Checkpointer(tmp_path / "c") as checkpointer:
        assert checkpointer.restore(state) == 7
        checkpointer.save(state, 8)
    assert torch.equal(now.weight, model.weight)
    if "optimizer" in tree:
        assert state["epoch"] == 4
        assert torch.equal(
            other.state[now.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
        )


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"modle": "model"}, "it has no 'modle' to rename"),
        ({"modle": "x", "optim": "model"}, "it has no 'modle' to rename"),
        ({"net": "both", "optim": "both"}, "'net', 'optim' would both be called 'both'"),
        ({"net": "optim"}, "'net', 'optim' would both be called 'optim'"),
        ({"net": ""}, "'net' would be called ''"),
    ],
    ids=str,
)
def test_rename_that_would_lose_a_state_is_refused(
    tmp_path: Path, rename: dict[str, str], message: str
) -> None:
    """A rename that matches nothing, or gives two values one name, is answered with the file's names."""
    torch.save({"net": {"w": torch.ones(2)}, "optim": 1}, tmp_path / "file.pt")
    with pytest.raises(ConfigError) as caught:
        import_file(tmp_path / "file.pt", tmp_path / "c", 1, rename=rename)
    assert message in str(caught.value)
    assert "the names in the file are 'net', 'optim'" in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_names_may_be_swapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new name may be an old one that is renamed itself, but two values cannot get one name."""
    torch.save({"a": 1, "b": 2}, tmp_path / "file.pt")
    place = [str(tmp_path / "file.pt"), str(tmp_path / "c"), "--step", "1"]
    code, _, err = run(capsys, "import", *place, "--rename", "a=b", "--rename", "a=c")
    assert code == 2
    assert "'a' already has another new name" in err
    assert run(capsys, "import", *place, "--rename", "a=b", "--rename", "b=a")[0] == 0
    state = {"a": 0, "b": 0}
    assert Checkpointer(tmp_path / "c", access="read").restore(state) == 1
    assert state == {"a": 2, "b": 1}


def test_file_that_would_execute_code_is_not_imported(tmp_path: Path) -> None:
    """The error says what to do instead; a file that torch.save did not write is refused too."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path(tmp_path / "executed").touch, ()

    torch.save({"model": Trap()}, tmp_path / "trap.pt")
    (tmp_path / "text.pt").write_text("hello")
    torch.save([1], tmp_path / "list.pt")
    torch.save({}, tmp_path / "empty.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "list.pt").read_bytes()[:-30])
    for name, message in {
        "trap.pt": "weights_only=True does not allow what it holds: .*getattr",
        "text.pt": "torch.save did not write it",
        "cut.pt": "or it is incomplete",
        "list.pt": "it holds a value of type list",
        "empty.pt": "it holds an empty dict",
        "missing.pt": "No such file",
    }.items():
        with pytest.raises(ConfigError, match=f"cannot be imported: .*({message})"):
            import_file(tmp_path / name, tmp_path / "c", 1)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "c").exists()
