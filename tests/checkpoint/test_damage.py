"""A damaged checkpoint is never loaded: it is named, and the previous one is used."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
import torch

from ddpsafe.checkpoint import Checkpointer, errors
from ddpsafe.checkpoint._checksums import BLOCK_BYTES
from ddpsafe.checkpoint._format import ShardedTensor

FLIPS_PER_FILE = 40


@pytest.fixture
def directory(tmp_path: Path, state: dict[str, Any]) -> Path:
    """Return a directory with the checkpoints of steps 1 and 2."""
    with Checkpointer(tmp_path / "c") as checkpointer:
        for step in (1, 2):
            checkpointer.save({**state, "epoch": step}, step)
    return tmp_path / "c"


def restored(directory: Path, state: dict[str, Any], access: Any = "read") -> int | None:
    """Restore, and check that the values are those of the restored step."""
    with Checkpointer(directory, access=access, rng=False) as checkpointer:
        step = checkpointer.restore(state)
    assert state["epoch"] == step
    return step


def test_every_flipped_bit_is_detected(directory: Path, state: dict[str, Any]) -> None:
    """Bits are flipped at the beginning, at the end and in the middle of every file."""
    chance = random.Random(0)
    for file in sorted((directory / "step-000000000002").iterdir()):
        whole = file.read_bytes()
        places = [0, len(whole) - 1, *chance.choices(range(len(whole)), k=FLIPS_PER_FILE)]
        for place in places:
            broken = bytearray(whole)
            broken[place] ^= 1 << chance.randrange(8)
            file.write_bytes(broken)
            with pytest.warns(errors.CheckpointWarning, match=f"step 2: {file.name}"):
                assert restored(directory, state) == 1, (file.name, place)
        file.write_bytes(whole)
    assert restored(directory, state) == 2


def test_every_truncated_extended_or_missing_file_is_detected(
    directory: Path, state: dict[str, Any]
) -> None:
    """Each file is cut at several lengths, down to nothing, extended by a byte, and removed."""
    for file in sorted((directory / "step-000000000002").iterdir()):
        whole = file.read_bytes()
        for data in (b"", whole[:1], whole[: len(whole) // 2], whole[:-1], whole + b"\0"):
            file.write_bytes(data)
            with pytest.warns(errors.CheckpointWarning, match=file.name):
                assert restored(directory, state) == 1
        file.unlink()
        with pytest.warns(errors.CheckpointWarning, match=f"{file.name} is missing"):
            assert restored(directory, state) == 1
        file.write_bytes(whole)


def test_damage_in_a_large_file_is_named_by_its_bytes(tmp_path: Path) -> None:
    """The warning names the file, the bytes, and the rank and host that found them."""
    state = {"weights": torch.randn(3 * BLOCK_BYTES // 4), "step": 0}
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state, step)
    file = tmp_path / "step-000000000002" / "state.pt"
    with file.open("r+b") as stream:
        stream.seek(BLOCK_BYTES + 12345)
        byte = stream.read(1)[0]
        stream.seek(BLOCK_BYTES + 12345)
        stream.write(bytes([byte ^ 4]))
    where = f"bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} .*found by rank 0 on "
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.warns(errors.CheckpointWarning, match=where),
    ):
        assert checkpointer.restore(state) == 1


def test_damaged_checkpoint_is_set_aside_and_its_step_saved_again(
    directory: Path, state: dict[str, Any]
) -> None:
    """Its folder does not block the training when it reaches that step again."""
    file = directory / "step-000000000002" / "state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    with Checkpointer(directory) as checkpointer:
        with pytest.warns(errors.CheckpointWarning, match="truncated") as warned:
            assert checkpointer.restore(state) == 1
        assert [each.filename for each in warned] == [__file__]
        assert checkpointer.latest() == 1
        assert (directory / "latest").resolve() == checkpointer.path(1)
        checkpointer.save({**state, "epoch": 2}, 2)
    assert restored(directory, state) == 2
    assert len(list(directory.glob(".aside-step-000000000002-*"))) == 1


def test_training_does_not_restart_from_zero_when_all_checkpoints_are_damaged(
    directory: Path, state: dict[str, Any]
) -> None:
    """Days of training would be lost silently, so restore raises an error and moves nothing."""
    for step in (1, 2):
        (directory / f"step-{step:012}" / "state.pt").write_bytes(b"version https://git-lfs")
    for access in ("write", "read"):
        with (
            pytest.warns(errors.CheckpointWarning),
            pytest.raises(errors.CorruptCheckpointError) as caught,
        ):
            restored(directory, state, access)
        assert len(caught.value.problems) == 2
        assert len(list(directory.glob("step-*"))) == 2


def rewrite(directory: Path, change: Callable[[Any], object]) -> None:
    """Change the manifest of step 2 and its checksum, as an attacker would."""
    file = directory / "step-000000000002" / "manifest.json"
    document = json.loads(file.read_text())
    change(document)
    text = json.dumps(document["content"], sort_keys=True, separators=(",", ":")).encode()
    file.write_bytes(b'{"crc32":%d,"content":%s}\n' % (zlib.crc32(text), text))


def test_newer_format_is_refused_and_not_skipped(directory: Path, state: dict[str, Any]) -> None:
    """Falling back to an older checkpoint would lose the progress made with the newer ddpsafe."""
    rewrite(directory, lambda document: document["content"].update(version=99))
    with pytest.raises(errors.NewerFormatError) as caught:
        restored(directory, state)
    assert (caught.value.found, caught.value.known) == (99, 2)


DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["names"], ["model"]),
        (["names"], {"model": "elsewhere"}),
        (["names"], {"model": "sharded", "epoch": "replicated"}),
        (["files"], {}),
        (["files"], None),
        (["files", "../../victim"], {"size_bytes": 0, "crc32": []}),
        (["files", "state.pt", "size_bytes"], -1),
        (["files", "state.pt", "size_bytes"], "12"),
        (["files", "state.pt", "size_bytes"], 10**30),
        (["files", "state.pt", "crc32"], []),
        (["files", "state.pt", "crc32"], [-1]),
        (["ranks"], [[0, 10**12]]),
        (["ranks"], [[-5, 3]]),
        (["ranks"], []),
        (["world_size"], 10**12),
        (["step"], True),
        (["block_bytes"], 0),
        (["metadata"], DEEP),
        (["shards"], {"x": {"dtype": "load", "shape": [1], "pieces": []}}),
        (["unknown"], 1),
        ([], []),
    ],
    ids=str,
)
def test_manifest_with_one_wrong_value_is_damage(
    directory: Path, state: dict[str, Any], path: list[str], value: object
) -> None:
    """Types, signs, counts and file names are checked even if the checksum matches."""

    def change(document: Any) -> None:
        *above, last = ["content", *path]
        for key in above:
            document = document[key]
        document[last] = value

    rewrite(directory, change)
    with pytest.warns(errors.CheckpointWarning, match=r"step 2: manifest\.json"):
        assert restored(directory, state) == 1


@pytest.mark.parametrize(
    ("shape", "blocks", "is_whole"),
    [
        ([4], [([0], [4])], True),
        ([4], [([0], [1]), ([1], [3])], True),
        ([4], [([0], [2]), ([1], [2])], False),  # overlap, and 3 is not covered
        ([4], [([0], [2]), ([0], [2])], False),
        ([4], [([0], [3])], False),
        ([], [([], [])], True),
        ([], [([], []), ([], [])], False),
        ([0, 3], [], True),
        ([2, 2], [([0, 0], [1, 2]), ([1, 0], [1, 1]), ([1, 1], [1, 1])], True),
        ([2, 2], [([0, 0], [1, 2]), ([0, 1], [2, 1])], False),
        ([3, 3], [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]),
                  ([1, 1], [1, 1])], True),  # a pinwheel
        ([3, 3], [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]),
                  ([0, 0], [1, 1])], False),
        ([2, 2, 2], [([0, 0, 0], [2, 2, 1]), ([0, 0, 1], [2, 1, 1]), ([0, 1, 1], [2, 1, 1])], True),
        ([2] * 40, [([0] * 40, [1] * 40)], False),
    ],
    ids=str,
)  # fmt: skip
def test_pieces_of_a_tensor_must_cover_it_exactly_once(
    shape: Any, blocks: Any, *, is_whole: bool
) -> None:
    """Overlapping pieces leave some values unwritten, so they are refused."""
    file = "shards/rank-00000.bin"
    pieces = [{"file": file, "start": 0, "offsets": at, "sizes": n} for at, n in blocks]
    refused = contextlib.nullcontext() if is_whole else pytest.raises(ValueError, match="make up")
    with refused:
        ShardedTensor.model_validate({"dtype": "float32", "shape": shape, "pieces": pieces})


@pytest.mark.parametrize(
    ("number", "falls_back"),
    [
        (errno.EIO, True),
        (errno.EMFILE, False),
        (errno.EACCES, False),
        (errno.ESTALE, False),
        (errno.ENOMEM, False),
    ],
)
def test_file_that_this_process_cannot_open_is_not_taken_for_damaged(
    directory: Path,
    state: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    *,
    falls_back: bool,
) -> None:
    """A limit of this process must not set the newest checkpoint aside and lose work to an older one."""
    opened = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if path == "state.pt":
            monkeypatch.setattr(os, "open", opened)  # the older one opens
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    if falls_back:
        with pytest.warns(errors.CheckpointWarning, match=os.strerror(number)):
            assert restored(directory, state, "write") == 1
    else:
        with pytest.raises(errors.RestoreError, match=os.strerror(number)):
            restored(directory, state, "write")
        assert restored(directory, state, "write") == 2


@pytest.mark.parametrize("kind", ["pipe", "link", "link to the same", "folder", "socket"])
@pytest.mark.parametrize("name", ["manifest.json", "state.pt", "ranks.bin"])
def test_another_kind_of_file_in_place_of_a_checkpoint_file_is_damage(
    directory: Path, state: dict[str, Any], kind: str, name: str
) -> None:
    """A pipe is not waited for, and a link is not followed, even if it leads to the original file."""
    file = directory / "step-000000000002" / name
    file.rename(directory / "moved")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to("/dev/zero")
    elif kind == "link to the same":
        file.symlink_to(directory / "moved")
    elif kind == "folder":
        file.mkdir()
    else:
        # A socket's path has at most 107 bytes, and pytest's folder may be longer.
        folder = os.open(file.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{file.name}")
        os.close(folder)
    with pytest.warns(errors.CheckpointWarning, match=f"step 2: {name}"):
        assert restored(directory, state) == 1


def test_index_of_an_older_format_is_not_unpickled(
    directory: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    """Format 1 stored an index beside distributed tensors; such a checkpoint is refused with the reason."""
    module, name, command = (
        b"\x8c" + bytes([len(text)]) + text.encode()
        for text in (
            "torch.distributed.checkpoint.filesystem",
            "os.system",
            f"touch {tmp_path / 'executed'}"[:255],
        )
    )
    folder = directory / "step-000000000002"
    (folder / "shards").mkdir()
    (folder / "shards" / ".metadata").write_bytes(
        b"\x80\x04" + module + name + b"\x93" + command + b"\x85R."
    )
    old = {"version": 1, "names": {"model": "sharded"}, "shards": {}}
    rewrite(directory, lambda document: document["content"].update(old))
    with pytest.raises(errors.RestoreError, match="could execute code"):
        restored(directory, state)
    assert not (tmp_path / "executed").exists()


def test_checkpoint_that_would_execute_code_is_not_loaded(
    directory: Path, state: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing runs even if an attacker replaces both the file and its checksum."""
    witness = tmp_path / "executed"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return witness.touch, ()

    file = directory / "step-000000000002" / "state.pt"
    torch.save({"model": Trap(), "epoch": 2}, file)
    data = file.read_bytes()
    facts = {"size_bytes": len(data), "crc32": [zlib.crc32(data)]}
    rewrite(directory, lambda document: document["content"]["files"].update({"state.pt": facts}))
    with pytest.raises(errors.RestoreError, match="cannot load it"):
        restored(directory, state)
    assert not witness.exists()


def test_copied_folder_is_not_mistaken_for_another_step(
    directory: Path, state: dict[str, Any]
) -> None:
    """A copy made by hand holds the state of its original step, whatever its name says."""
    shutil.copytree(directory / "step-000000000001", directory / "step-000000000009")
    with pytest.warns(errors.CheckpointWarning, match=r"step 9: manifest\.json is of step 1"):
        assert restored(directory, state) == 2


def test_deleted_step_folder_is_ignored(directory: Path, state: dict[str, Any]) -> None:
    """If it was removed by hand, the previous one is used without a warning."""
    shutil.rmtree(directory / "step-000000000002")
    assert restored(directory, state) == 1


# Kills at any moment.


SCRIPT: Final = Path(__file__).parents[2] / "benchmarks" / "crash_checkpoint.py"


@pytest.mark.full
@pytest.mark.parametrize("kills", [8, pytest.param(40, marks=pytest.mark.soak)])
def test_no_kill_loses_a_checkpoint_or_changes_the_result(kills: int, tmp_path: Path) -> None:
    """Savers and ranks die at random moments; the final parameters equal those of an undisturbed run.

    The full test, with 300 kills that include launchers, is ``benchmarks/crash_checkpoint.py``.
    """
    options = ["--kills", str(kills), "--seed", "1", "--victims", "saver", "rank"]
    run = scripts.Script([str(SCRIPT), *options], folder=tmp_path).end()
    assert run.code == 0, run.out + run.err
    total = next(line for line in run.out.splitlines() if line.startswith("| all |"))
    _, _, killed, _, trainings, faults, _ = (cell.strip() for cell in total.split("|"))
    assert int(killed) == kills
    assert int(trainings) >= 2
    assert int(faults) == 0


# Forgeries.


PROGRAM: Final = Path(__file__).parents[1] / "kits" / "checkpoint_forger.py"


@pytest.mark.parametrize(
    ("count", "seed"), [(50, 0), pytest.param(1000, 1000, marks=pytest.mark.soak)]
)
@pytest.mark.timeout(600)
def test_no_forgery_executes_hangs_or_raises_an_error_of_another_kind(
    count: int, seed: int, tmp_path: Path
) -> None:
    """Forgeries are manifests, pickles with dotted names, and unsavable trees.

    To run 5,000: ``python tests/kits/checkpoint_forger.py --count 5000 --seed 1000``.
    """
    command = [str(PROGRAM), "--count", str(count), "--seed", str(seed)]
    run = scripts.Script(command, folder=tmp_path).end(2 * scripts.LIMIT_S)
    assert run.code in (0, 1), run.err
    found = json.loads(run.out)
    assert found["faults"] == {}
    assert sum(found["outcomes"].values()) == count
    assert found["outcomes"]["step 1"] > count // 4  # most forgeries are damage, so step 1 is used
