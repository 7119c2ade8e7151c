"""Forges checkpoints and restores them: ``python checkpoint_forger.py --count 5000 --seed 0``.

Each forgery changes the newer of two checkpoints as an attacker with write access would: checksums
are recomputed. The restore may load it, fall back to the previous checkpoint, or raise an error of
``ddpsafe.checkpoint``. It must not unpickle, run a program, hang, or raise anything else.
The output is one line of JSON: how often each happened, and the seed of each fault.
"""

from __future__ import annotations

import argparse
import io
import json
import pickletools
import random
import shutil
import signal
import sys
import tempfile
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import machine
import torch

from ddpsafe.checkpoint import Checkpointer, PerRank, errors

LIMIT_S: Final = machine.hang_limit(20)
NEWEST: Final = "step-000000000002"
RUNS_CODE: Final = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class",
    "ctypes.dlopen", "code.__new__",
)  # fmt: skip
"""Audit events that Python raises when a pickle, or what it imports, runs code."""

executed: list[str] = []
watching = False


def audit(event: str, _: tuple[Any, ...]) -> None:
    """Record every event that a checkpoint must not cause."""
    if watching and event.startswith(RUNS_CODE):
        executed.append(event)


class Holder:
    """An object whose state differs on each rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return a state."""
        return {"position": torch.arange(3), "epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read the state as a loader does."""
        assert int(state["epoch"]) == 1


def make_state() -> dict[str, Any]:
    """Make objects of every kind; the sharded ones are on a mesh of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    mesh = init_device_mesh("cpu", (1,))
    sharded: DTensor = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    return {
        "model": model,
        "optimizer": optimizer,
        "sharded": sharded,
        "tensor": torch.ones(5),
        "epoch": 1,
        "holder": PerRank(Holder()),
    }


def nasty(chance: random.Random) -> Any:
    """Return a value that is invalid where it will be placed."""
    deep: Any = 0
    for _ in range(chance.choice([2, 150, 900])):
        deep = [deep]
    values: list[Any] = [
        None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 10**30, -(10**12), 0.5, float("nan"), float("inf"),
        "", "x", "x" * 5000, "../../../etc/passwd", "/etc/passwd", "shards/../state.pt", "\0shard gone",
        "\ud800", "shards/rank-00000.bin", "state.pt", "sharded", "os.system", [], {}, [[]], [-1, 3],
        [0] * 70, {"size_bytes": -1, "crc32": []}, [0, 10**12], {"a": {"b": {"c": []}}}, deep,
    ]  # fmt: skip
    return chance.choice(values)


def mutate(tree: Any, chance: random.Random) -> Any:
    """Change one place of a JSON document: its value or key, or add or remove one."""
    if isinstance(tree, dict) and tree and chance.random() < 0.9:
        key = chance.choice(sorted(tree))
        action = chance.random()
        if action < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        if action < 0.2:
            return {**tree, str(nasty(chance))[:60]: tree[key]}
        return {**tree, key: mutate(tree[key], chance)}
    if isinstance(tree, list) and tree and chance.random() < 0.8:
        at = chance.randrange(len(tree))
        if chance.random() < 0.2:
            return tree[:at] + tree[at + 1 :] if chance.random() < 0.5 else [*tree, *tree]
        return [*tree[:at], mutate(tree[at], chance), *tree[at + 1 :]]
    return nasty(chance)


def write_manifest(folder: Path, text: bytes) -> None:
    """Write a manifest with a matching checksum."""
    whole = b'{"crc32":%d,"content":%s}\n' % (zlib.crc32(text), text)
    (folder / "manifest.json").write_bytes(whole)


def read_content(folder: Path) -> Any:
    """Return the content of a manifest."""
    return json.loads((folder / "manifest.json").read_bytes())["content"]


def dumps(content: Any) -> bytes:
    """Return JSON as `Checkpointer` writes it."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replace the bytes of a file, and update its size and checksums in the manifest."""
    (folder / name).write_bytes(data)
    content = read_content(folder)
    sums = [zlib.crc32(data[at : at + 2**20]) for at in range(0, len(data), 2**20)]
    content["files"][name] = {"size_bytes": len(data), "crc32": sums}
    if name == "ranks.bin":
        content["ranks"] = [[0, len(data)]]
    write_manifest(folder, dumps(content))


MODULES: Final = (
    "os", "posix", "builtins", "torch", "torch.serialization", "torch._utils", "torch.nn.modules.module",
    "torch.distributed.checkpoint.filesystem", "torch.distributed.checkpoint.metadata", "collections",
    "ddpsafe.checkpoint._sharded", "subprocess", "importlib", "torch.distributed.checkpoint.metadataX",
)  # fmt: skip
NAMES: Final = (
    "system", "os.system", "eval", "exec", "getattr", "load", "pickle.loads", "Popen", "import_module",
    "OrderedDict", "_rebuild_tensor_v2", "sys.modules", "io.open", "Metadata", "Metadata.__init__",
    "BytesStorageMetadata", "os.path.join", "__import__", "hub.load", "classes.load_library", "compile",
)  # fmt: skip


def forged_pickle(chance: random.Random, witness: Path) -> bytes:
    """Return a pickle that would run a command, or one of random opcodes."""

    def text(value: str) -> bytes:
        return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()

    kind = chance.randrange(4)
    command = f"touch {witness}"
    module, name = chance.choice(MODULES), chance.choice(NAMES)
    if kind == 0:  # a dotted name, as protocol 4 resolves it
        return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(command) + b"\x85R."
    if kind == 1:  # the same in protocol 2
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + text(command) + b"\x85R."
    if kind == 2:  # in a dict, then BUILD, as state of an object
        call = b"c" + f"{module}\n{name}\n".encode() + text(command) + b"\x85R"
        return b"\x80\x02}" + text("model") + call + b"sccollections\nOrderedDict\n)R}b."
    opcodes = [ord(each.code) for each in pickletools.opcodes]
    body = bytes(
        chance.choice(opcodes) if chance.random() < 0.7 else chance.randrange(256)
        for _ in range(chance.randrange(1, 60))
    )
    return b"\x80" + bytes([chance.choice([0, 2, 4, 5])]) + body + b"."


def forged_file(original: bytes, chance: random.Random, witness: Path) -> bytes:
    """Return a torch file with another pickle inside, a bare pickle, or a broken archive."""
    payload = forged_pickle(chance, witness)
    kind = chance.randrange(5)
    if kind == 0:
        return payload
    if kind == 1:
        broken = bytearray(original)
        for _ in range(chance.randrange(1, 8)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        return bytes(broken)
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(original)) as before, zipfile.ZipFile(target, "w") as after:
        for each in before.infolist():
            data = before.read(each)
            if each.filename.endswith("data.pkl"):
                if kind == 2:
                    data = payload
                else:
                    changed = bytearray(data)
                    for _ in range(chance.randrange(1, 4)):
                        changed[chance.randrange(len(changed))] = chance.randrange(256)
                    data = bytes(changed)
            after.writestr(each.filename, data)
    return target.getvalue()


def odd_tree(chance: random.Random) -> Any:
    """Return an object that loads, but that a `Checkpointer` does not save."""
    ring: list[Any] = []
    ring.append(ring)
    names = ["model", "optimizer", "sharded", "tensor", "epoch"]
    values: list[Any] = [
        1, None, [], ring, {}, "\0shard gone", "\0shard sharded", torch.zeros(1).expand(10**12), torch.ones(5),
        torch.ones(2, 2).to_sparse(), {"state": 3, "param_groups": 4}, {"state": {}, "param_groups": []},
        {"state": {0: 1}, "param_groups": [{"params": [0]}]}, {("a", 1): torch.ones(1)}, torch.Size([1]),
        {"state": {-5: {"exp_avg": torch.ones(4)}}, "param_groups": [{"params": [7]}]}, torch.empty(0),
    ]  # fmt: skip
    if chance.random() < 0.1:
        return chance.choice(values)
    return {name: chance.choice(values) for name in names if chance.random() < 0.97}


def odd_ranks(chance: random.Random) -> Any:
    """Return what the file of the ranks' own states may have in place of it."""
    own = chance.choice([odd_tree(chance), {"holder": odd_tree(chance)}])
    rng = chance.choice([odd_tree(chance), None, {"python": 1}])
    return chance.choice([odd_tree(chance), {"own": own, "rng": rng}])


def saved(tree: Any) -> bytes:
    """Return the bytes of a torch file."""
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def forge(folder: Path, chance: random.Random, witness: Path) -> None:
    """Change a checkpoint in a random way."""
    kinds: list[Callable[[], None]] = [
        lambda: write_manifest(folder, dumps(mutate(read_content(folder), chance))),
        lambda: write_manifest(folder, dumps(mutate(mutate(read_content(folder), chance), chance))),
        lambda: forge_bytes(folder, chance),
        lambda: forge_torch_file(folder, chance, witness),
        lambda: forge_torch_file(folder, chance, witness),
        lambda: replace_file(folder, "state.pt", saved(odd_tree(chance))),
        lambda: replace_file(folder, "ranks.bin", saved(odd_ranks(chance))),
        lambda: forge_shards(folder, chance),
    ]
    chance.choice(kinds)()


def forge_bytes(folder: Path, chance: random.Random) -> None:
    """Change the text of the manifest, which may then be invalid JSON."""
    text = bytearray(dumps(read_content(folder)))
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(text))
        more = chance.choice(
            [b"[" * 100_000, b"\xff", b"\0", b"9" * 5000, b"}", b'"', b"NaN", b"-", b"e999"]
        )
        text[at : at + chance.randrange(3)] = more
    write_manifest(folder, bytes(text))


def forge_torch_file(folder: Path, chance: random.Random, witness: Path) -> None:
    """Replace a torch file with a forged one."""
    name = chance.choice(["state.pt", "ranks.bin"])
    replace_file(folder, name, forged_file((folder / name).read_bytes(), chance, witness))


def forge_shards(folder: Path, chance: random.Random) -> None:
    """Change the bytes of the shards, or what the manifest says of them."""
    if chance.random() < 0.5:
        data = chance.randbytes(chance.choice([0, 1, 47, 48, 49, 1000]))
        replace_file(folder, "shards/rank-00000.bin", data)
    else:
        content = read_content(folder)
        content["shards"] = mutate(content["shards"], chance)
        write_manifest(folder, dumps(content))


class HangError(BaseException):
    """The restore did not end in time."""


def ring(*_: object) -> None:
    """Interrupt a restore that hangs."""
    raise HangError


def attempt(base: Path, seed: int, state: dict[str, Any]) -> tuple[str, str]:
    """Forge and restore once; return the outcome and the fault, if any."""
    global watching  # noqa: PLW0603 - an audit hook cannot be removed
    chance = random.Random(seed)
    directory = base / f"forged-{seed}"
    witness = base / f"witness-{seed}"
    shutil.copytree(base / "c", directory, symlinks=True)
    forge(directory / NEWEST, chance, witness)
    outcome, fault = "", ""
    executed.clear()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            reader = Checkpointer(directory, access="read")
            watching = True
            outcome = f"step {reader.restore(state)}"
    except errors.CheckpointError as exc:
        outcome = type(exc).__name__
    except HangError:
        outcome = fault = "hang"
    except Exception as exc:  # noqa: BLE001 - the fault to find
        outcome, fault = "raw error", f"{type(exc).__name__}: {exc}"[:300]
    finally:
        watching = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    if executed or witness.exists():
        outcome, fault = "executed", ", ".join(executed)
    shutil.rmtree(directory)
    return outcome, fault


def main() -> int:
    """Run the requested number of forgeries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.addaudithook(audit)
    signal.signal(signal.SIGALRM, ring)
    counts: Counter[str] = Counter()
    faults: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        state = make_state()
        with Checkpointer(base / "c") as writer:
            writer.save(state, 1)
            writer.save(state, 2)
        for seed in range(options.seed, options.seed + options.count):
            outcome, fault = attempt(base, seed, make_state())
            counts[outcome] += 1
            if fault:
                faults[seed] = fault
    print(json.dumps({"outcomes": dict(counts), "faults": faults}))
    dist.destroy_process_group()
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
