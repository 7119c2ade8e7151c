"""Datasets and rank functions of the data tests; spawned processes import them from here."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

import ddpsafe
from ddpsafe import data
from ddpsafe.data._loader.loader import build_loader

RECORD = 16


def run_ranks(function: Callable[..., Any], *args: object, ranks: int = 2) -> Any:
    """Run a function in gloo ranks forked from the fork server; return the values by rank."""
    return ddpsafe.launch(
        function, args=args, nproc_per_node=ranks, backend="gloo", start_method="forkserver"
    ).values


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class WithEpoch:
    """Stores the epoch that it is given."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Store the epoch."""
        self.epoch = epoch


class Reader(Numbers):
    """A dataset that writes down which process has read it."""

    def __init__(self, file: Path) -> None:
        super().__init__(8)
        self.file = file

    def __getitem__(self, index: int) -> int:
        self.file.write_text(f"{os.getpid()} {multiprocessing.current_process().name}")
        return index


class Augmented(WithEpoch, Numbers):
    """Sample i is i, the epoch that the dataset was given, and draws of the three generators."""

    def __getitem__(self, index: int) -> Any:
        draws = (random.random(), np.random.random(), float(torch.rand(())))  # noqa: NPY002 - augmentations use it
        return index, int(self.epoch), draws


class ByRng(WithEpoch, Numbers):
    """Sample i is i, and a draw that depends only on the sample."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand((), generator=data.sample_rng(7, self.epoch, index)))


class Lethal(Numbers):
    """One sample kills the worker, makes it exit, or raises."""

    def __init__(self, n: int, index: int, how: str) -> None:
        super().__init__(n)
        self.index = index
        self.how = how
        self.samples = [(f"/data/{i:05d}.jpg", 0) for i in range(n)]

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            if self.how == "sys.exit":
                sys.exit("bad sample")
            if self.how.isdecimal():
                os._exit(int(self.how))
            if self.how == "missing":
                Path(self.samples[index][0]).read_bytes()
            if self.how == "files":
                raise OSError(24, "Too many open files", self.samples[index][0])
            os.kill(os.getpid(), getattr(signal, self.how))
        return index


class Ending(Numbers):
    """At one sample, the worker stops sending what it has read, and exits a moment later."""

    def __init__(self, n: int, index: int, mark: Path) -> None:
        super().__init__(n)
        self.index = index
        self.mark = mark

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            sharer = resource_sharer._resource_sharer
            while sharer._listener is None:  # until a thread has sent the previous batch
                time.sleep(0.01)
            sharer._listener.close()
            self.mark.touch()
            time.sleep(0.3)
            os._exit(3)
        return index


class Gated(Lethal):
    """One sample waits at a FIFO until the test writes to it; then it may kill the worker."""

    def __init__(self, n: int, index: int, fifo: str, how: str = "") -> None:
        super().__init__(n, index, how)
        self.fifo = fifo

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            Path(self.fifo).read_bytes()
        return super().__getitem__(index) if self.how else index


class Renamed(Numbers):
    """Sample i is i, but its path names another dataset."""

    def __init__(self, n: int, name: str) -> None:
        super().__init__(n)
        self.samples = [(f"/data/{name}/{i:05d}.jpg", 0) for i in range(n)]
        self.root = "/data"


class Noisy(Numbers):
    """Each read draws from the dataset's own generator."""

    def __init__(self, n: int, seed: int) -> None:
        super().__init__(n)
        self.rng = np.random.default_rng(seed)

    def __getitem__(self, index: int) -> Any:
        return index, float(self.rng.random())


def write_records(path: Path, n: int) -> None:
    """Write n records of `RECORD` bytes; record i holds i."""
    path.write_bytes(b"".join(i.to_bytes(RECORD, "little") for i in range(n)))


def open_raw(path: str) -> Any:
    """Open without a buffer, so that reads use the shared position."""
    return Path(path).open("rb", buffering=0)


def close_and_log(file: Any) -> None:
    """Close the file, and append this process to a list beside it."""
    file.close()
    with Path(file.name + ".closed").open("a") as log:
        log.write(f"{os.getpid()}\n")


class Records(Numbers):
    """Reads records from a file that each process opens separately."""

    def __init__(self, path: str, n: int) -> None:
        super().__init__(n)
        self.file = data.PerProcess(open_raw, path, close=close_and_log)

    def __getitem__(self, index: int) -> Any:
        file = self.file.get()
        file.seek(index * RECORD)
        return index, int.from_bytes(file.read(RECORD), "little"), os.getpid()


class EagerRecords(Records):
    """Reads records from a file that the constructor opens, which is the mistake under test."""

    def __init__(self, path: str, n: int) -> None:
        super().__init__(path, n)
        self.reader = {"file": open_raw(path)}


class Stream(IterableDataset[int]):
    """A stream that divides nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Share(IterableDataset[Any]):
    """A stream of pairs whose division among the ranks is right or wrong, by its name."""

    def __init__(self, kind: str, epoch: int = 0) -> None:
        self.kind = kind
        self.epoch = epoch
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        if kind.endswith("replicas"):
            self.num_replicas = 1

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        share, shares = self.rank * workers + worker, self.ranks * workers
        if self.kind == "asked in the workers":
            # In a spawned worker there is no group, so that every rank takes itself for rank 0.
            rank = dist.get_rank() if dist.is_initialized() else 0
            share = rank * workers + worker
        elif self.kind == "undivided" or self.kind.endswith("replicas"):
            share, shares = worker, workers
        elif self.kind == "pairs of ranks":
            share = self.rank // 2 * workers + worker
        elif self.kind == "by epoch":
            share = (share + self.epoch) % shares
        for i in range(share, 64 * shares, shares):
            if self.kind == "constant":
                yield torch.zeros(3), 1
            elif self.kind == "few labels":
                yield torch.zeros(3), i // shares % 5
            elif self.kind == "padding first":
                yield torch.full((3,), float(max(0, i - 30 * shares))), 0
            else:
                yield torch.full((3,), float(i)), i % 2


def read_shares(ctx: ddpsafe.RankContext, kinds: list[str], workers: int) -> dict[str, Any]:
    """Read streams of each kind; return the error of each, or an empty text."""
    found: dict[str, Any] = {}
    for kind in kinds:
        try:
            if kind == "by epoch":
                for epoch in range(3):  # a new loader in each epoch, and on one rank another one
                    if ctx.rank == 0 and epoch == 0:
                        list(ctx.loader(Share("constant"), batch_size=4, check=False))
                    list(ctx.loader(Share(kind, epoch), batch_size=4, check=False))
            else:
                options = {"multiprocessing_context": "forkserver"} if workers else {}
                list(data.DataLoader(Share(kind), 4, num_workers=workers, **options))
            found[kind] = ""
        except data.errors.UndividedStreamError as error:
            found[kind] = (str(error), error.ranks, error.workers)
        ctx.barrier()
    return found


def lines_of(path: str) -> list[str]:
    """Return the lines of a file."""
    return Path(path).read_text().split()


def numbers_to(n: int) -> range:
    """Return a stream of n numbers."""
    return range(n)


class Permuted(Numbers):
    """The ranks agree, except that one has two items swapped, one missing, or an unreadable one."""

    def __init__(self, n: int, fault: str, rank: int) -> None:
        mine = dist.get_rank() == rank
        super().__init__(n - 1 if mine and fault == "drop" else n)
        self.fault = fault if mine else ""
        self.samples = [(f"/mnt/{dist.get_rank()}/{i:06d}", i) for i in range(self.n)]
        self.root = f"/mnt/{dist.get_rank()}"
        if self.fault == "swap":
            self.samples[300], self.samples[301] = self.samples[301], self.samples[300]
        if fault in {"raise", "item", "none-probes"}:
            del self.samples

    def __getitem__(self, index: int) -> Any:
        if self.fault == "raise":
            raise FileNotFoundError(2, "No such file or directory", "/mnt/x")
        item = index + 1 if self.fault == "item" and index >= self.n - 1 else index
        return torch.full((3,), item), random.random()


def consistency(ctx: ddpsafe.RankContext, fault: str) -> Any:
    """Check a dataset that is at fault on rank 1; return the error."""
    facts = {"seed": ctx.rank if fault == "seed" else 0}
    try:
        fingerprint = data.check_dataset_consistency(Permuted(1000, fault, 1), facts=facts)
    except data.errors.DatasetInconsistencyError as error:
        return str(error), error.ranks, error.index
    return fingerprint


class Pictures(Dataset[Any]):
    """Lists files; labels come from a table of its own, whose order is the rank's on one rank."""

    def __init__(self, fault: str) -> None:
        self.root = f"/mnt/{dist.get_rank()}"
        names = [f"{i:03d}.jpg" for i in range(100)]
        is_odd = dist.get_rank() == 1
        if fault == "listing" and is_odd:
            names.reverse()
        if fault == "missing" and is_odd:
            names.pop(40)
        self.files = [f"{self.root}/{name}" for name in names]
        self.classes = ["cat", "dog", "eel"]
        if fault == "labels" and is_odd:
            self.classes.reverse()
        self.noise = 1e-6 * dist.get_rank() if fault == "decoder" else 0.0
        self.random = random.Random() if fault == "random" else None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        picture = torch.full((3, 32, 32), float(index)) + self.noise
        label = self.classes.index(["cat", "dog", "eel"][index % 3])
        extra = 0.0 if self.random is None else self.random.random()
        return {"image": picture, "label": label, "path": self.files[index], "extra": extra}


def consistency_of_pictures(_ctx: ddpsafe.RankContext, faults: list[str]) -> dict[str, Any]:
    """Check datasets that list files, and a split; return each error, or the fingerprint."""
    found: dict[str, Any] = {}
    for fault in faults:
        dataset: Dataset[Any] = Pictures(fault)
        if fault == "split":
            generator = torch.Generator().manual_seed(dist.get_rank())
            dataset = torch.utils.data.random_split(Numbers(100), [80, 20], generator)[0]
        try:
            found[fault] = data.check_dataset_consistency(dataset)
        except data.errors.DatasetInconsistencyError as error:
            found[fault] = (str(error), error.ranks, error.index)
    return found


class Shards(IterableDataset[str]):
    """A stream of the lines of files."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)


class Versioned(Shards):
    """One with a fingerprint."""

    def fingerprint(self) -> str:
        """Return the version."""
        return self.files[0]


class IndexedShare(IterableDataset[int]):
    """A stream whose numbers and length are those of the rank's share."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 10, 3))

    def __len__(self) -> int:
        return len(range(self.rank, 10, 3))

    def __getitem__(self, index: int) -> int:
        return range(self.rank, 10, 3)[index]


class SizedShards(Shards):
    """One that knows its length."""

    def __len__(self) -> int:
        return len(self.files)


def consistency_of_streams(ctx: ddpsafe.RankContext) -> dict[str, Any]:
    """Check streams; return each error, or the fingerprint."""
    files = [f"shard-{i}.tar" for i in range(10)]
    share = files[ctx.rank :: ctx.world_size]
    chain = torch.utils.data.ChainDataset
    streams = {
        "whole": SizedShards(files),
        "share that can be indexed": IndexedShare(ctx.rank),
        "divided": Shards(share),
        "divided, with a length": SizedShards(share),
        "divided in groups": Shards(files[ctx.rank // 2 :: 2]),
        "divided by folder": Shards([f"/data/{ctx.rank}/{i}.tar" for i in range(3 + ctx.rank)]),
        "divided, some twice": Shards(share + share[:1]),
        "chain": chain([Shards(share), Shards(share)]),
        "chain with a length": chain([SizedShards(share)]),
    }
    streams |= {
        "reversed": Shards(files[:: -1 if ctx.rank else 1]),
        "no files": Shards([] if ctx.rank else files),
        "other classes": chain([]) if ctx.rank else Shards([]),
        "other versions": Versioned([f"v{ctx.rank}"]),
        "no stream": Numbers(10) if ctx.rank else Shards(files),
    }
    found: dict[str, Any] = {}
    for kind, stream in streams.items():
        try:
            found[kind] = data.check_dataset_consistency(stream)
        except data.errors.DatasetInconsistencyError as error:  # noqa: PERF203 - one for each
            found[kind] = (str(error), error.ranks, error.index)
    return found


def broken_beside_own_sampler(ctx: ddpsafe.RankContext) -> str:
    """Make a loader with a sampler of the user's, while rank 1 cannot read; return the error."""

    class OwnSampler(torch.utils.data.DistributedSampler[Any]):
        pass

    dataset = Permuted(10, "raise", 1)
    try:
        ctx.loader(dataset, batch_size=2, sampler=OwnSampler(dataset))
    except data.errors.DatasetInconsistencyError as error:
        return str(error)
    return ""


def refused_pictures(ctx: ddpsafe.RankContext) -> None:
    """Make a loader of a dataset whose labels differ on rank 1."""
    ctx.loader(Pictures("labels"))


def exact_gather(ctx: ddpsafe.RankContext, sizes: list[int]) -> list[bool]:
    """Gather datasets of several sizes; return whether each result is exact."""
    exact = []
    for n in sizes:
        whole = torch.randn(n, 3, generator=torch.Generator().manual_seed(n)).to(torch.float64)
        sampler = data.EvalSampler(n)
        own = list(sampler)
        values = {
            "x": whole[own],
            "half": whole[own].to(torch.bfloat16)[:, 0],
            "yes": whole[own, 0] > 0,
            "plain": [f"ü{i}" for i in own],
            "ragged": [{"boxes": torch.full((i % 3, 2), i)} for i in own],
            "array": whole[own].numpy(),
        }
        if not own:
            values = {}
        got = data.gather_exact(values, sampler, n=n)
        assert got is not None
        exact.append(
            torch.equal(got["x"], whole)
            and torch.equal(got["half"], whole.to(torch.bfloat16)[:, 0])
            and torch.equal(got["yes"], whole[:, 0] > 0)
            and got["plain"] == [f"ü{i}" for i in range(n)]
            and all(
                torch.equal(entry["boxes"], torch.full((i % 3, 2), i))
                for i, entry in enumerate(got["ragged"])
            )
            and (got["array"] == whole.numpy()).all()
        )
        on_one = data.gather_exact(whole[own], own, dst=1)
        assert (on_one is None) == (ctx.rank != 1)
    return exact


def faulty_gather(ctx: ddpsafe.RankContext, fault: str) -> Any:
    """Gather with a fault on rank 1; return the error."""
    own: list[Any] = list(data.EvalSampler(9))
    values: Any = torch.tensor(own)
    if ctx.rank == 1 and fault == "duplicate":
        own[0] = 0
    if ctx.rank == 1 and fault == "missing":
        own, values = own[:-1], values[:-1]
    if ctx.rank == 1 and fault == "length":
        values = values[:-1]
    if ctx.rank == 1 and fault == "dtype":
        values = values.float()
    if ctx.rank == 1 and fault == "single number":
        values = values.sum()
    if ctx.rank == 1 and fault == "indices":
        own = [*own[:-1], None]
    if ctx.rank == 1 and fault == "object":
        values = [object() for _ in own]
    if ctx.rank == 1 and fault == "names":
        values = {"a": values}
    try:
        got = data.gather_exact(
            values, own, n=9, duplicates="drop" if fault == "padded" else "error"
        )
    except ddpsafe.DDPSafeError as error:
        return type(error).__name__, str(error), getattr(error, "missing", None)
    assert got is not None
    return got.tolist()


def augmentation_traces(ctx: ddpsafe.RankContext) -> Any:  # noqa: ARG001 - a rank function receives the context
    """Return (index, epoch, draws) of two epochs, with fresh and with persistent workers."""
    found = []
    for persistent in (False, True):
        torch.manual_seed(42)
        random.seed(42)
        options: Any = {"num_workers": 2, "persistent_workers": persistent}
        loader = build_loader(Augmented(24), batch_size=4, **options)
        found.append([_plain(loader) for _ in loader.epochs(2)])
    return found


def _plain(loader: Any) -> list[Any]:
    return [
        [
            (int(i), int(e), *(float(d[k]) for d in draws))
            for k, (i, e) in enumerate(zip(x, y, strict=True))
        ]
        for x, y, draws in loader
    ]


def _refusal(loader: Any) -> str:
    try:
        next(iter(loader))
    except ddpsafe.DDPSafeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def undivided(ctx: ddpsafe.RankContext) -> list[str]:
    """Try everything that must be refused if there is more than one rank."""
    raised = [
        _refusal(loader)
        for loader in (
            data.DataLoader(Numbers(10), shuffle=True),
            data.DataLoader(Numbers(10)),
            data.DataLoader(Numbers(10), sampler=data.DistributedSampler(10, 3, ctx.rank)),
        )
    ]
    allowed = data.DataLoader(Numbers(10), sampler=data.DistributedSampler(10, 1, 0, shuffle=False))
    raised.append(str([int(x) for x in allowed]))
    return raised


def uneven(ctx: ddpsafe.RankContext, policy: str, counts: list[int]) -> Any:
    """Train on `counts[rank]` batches; return the steps, the parameters and the error."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rng = torch.Generator().manual_seed(ctx.rank)
    batches = [torch.randn(3 + i % 2, 2, generator=rng).double() for i in range(counts[ctx.rank])]
    steps = data.even_steps(batches, policy=policy, model=model)  # type: ignore[arg-type]
    taken = 0
    try:
        for batch in steps:
            optimizer.zero_grad()
            loss = (model(batch) ** 2).mean() * steps.weight
            loss.backward()
            optimizer.step()
            taken += 1
    except data.errors.UnevenStepsError as error:
        return taken, str(error), error.finished_ranks
    return taken, model.module.weight.detach().flatten().tolist(), batches


def uneven_states(ctx: ddpsafe.RankContext, policy: str) -> Any:
    """Return (step, state) for every step and the end, with 11 samples in batches of 2 on 2 ranks."""
    stream = data.ShardedIterable(list(range(13)))
    loader = data.DataLoader(stream, 2)
    steps = data.even_steps(loader, policy=policy)  # type: ignore[arg-type]
    states = [loader.state_dict(compare=True) for _ in steps]
    return [*states, loader.state_dict(compare=True)], steps.dropped, ctx.rank


def save_and_stop(
    ctx: ddpsafe.RankContext,  # noqa: ARG001 - a rank function receives the context
    steps: int,
    state: Any,
    options: dict[str, Any],
) -> Any:
    """Read `steps` batches from the position in `state`; return them and the new state."""
    loader = build_loader(Numbers(101), check=False, **options)
    if state is not None:
        loader.load_state_dict(state)
    seen: list[list[int]] = []
    iterator = iter(loader)
    for _ in range(steps):
        batch = next(iterator, None)
        if batch is None:
            break
        seen.append([int(x) for x in batch])
    return seen, loader.state_dict()


def loaders_of_context(ctx: ddpsafe.RankContext, n: int) -> Any:
    """Train and evaluate with ``ctx.loader``; return the samples and the gathered results."""
    train = ctx.loader(Numbers(n), batch_size=4, num_workers=1, seed=5)
    read = [[int(x) for batch in train for x in batch] for _ in train.epochs(2)]
    evaluation = ctx.loader(Numbers(n), batch_size=4, train=False)
    outputs = torch.tensor([3 * int(x) for batch in evaluation for x in batch])
    gathered = data.gather_exact(outputs, evaluation.sampler, n=n)  # type: ignore[arg-type]  # indices
    assert gathered is not None
    return read, gathered.tolist(), train.state_dict(compare=True)


def states_compared(ctx: ddpsafe.RankContext, extra: int) -> Any:
    """Compare states where rank 1 has read `extra` more batches."""
    loader = ctx.loader(Numbers(60), batch_size=4)
    iterator = iter(loader)
    for _ in range(2 + (extra if ctx.rank == 1 else 0)):
        next(iterator)
    try:
        return loader.state_dict(compare=True)["consumed"]
    except data.errors.DatasetInconsistencyError as error:
        return str(error), error.ranks


def differing_samplers(ctx: ddpsafe.RankContext, name: str) -> str:
    """Make a loader whose sampler is configured differently on rank 1; return the error."""
    odd = ctx.rank == 1
    sampler: Any = data.DistributedSampler(30, algorithm="feistel-v1" if odd else "torch")
    if name == "weights":
        sampler = data.WeightedSampler([1.0] * 29 + [2.0 if odd else 1.0])
    if name == "drop_last":
        sampler = data.DistributedSampler(30)
    try:
        ctx.loader(
            Numbers(30), batch_size=4, sampler=sampler, drop_last=odd and name == "drop_last"
        )
    except data.errors.DatasetInconsistencyError as error:
        return str(error)
    return "nothing"


def loader_of_another_dataset(ctx: ddpsafe.RankContext) -> str:
    """Make a loader of a dataset that differs on rank 1; return the error."""
    try:
        ctx.loader(Renamed(30, f"part-{ctx.rank}"), batch_size=4)
    except data.errors.DatasetInconsistencyError as error:
        return str(error)
    return "nothing"


def _epochs_of(loader: Any) -> Any:
    return [
        [(int(i), float(d)) for x, _, draws in loader for i, d in zip(x, draws[2], strict=True)]
        for _ in range(2)
    ]


def accelerated(ctx: ddpsafe.RankContext) -> Any:  # noqa: ARG001 - a rank function receives the context
    """Read two epochs through Accelerate, with and without ddpsafe's sampler."""
    from accelerate import Accelerator

    found = []
    # Accelerate divides the data itself, so the sampler must not.
    for options in ({"shuffle": True}, {"sampler": data.DistributedSampler(48, 1, 0)}):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        loader = data.DataLoader(Augmented(48), 4, num_workers=1, **options)  # type: ignore[arg-type]
        found.append(_epochs_of(accelerator.prepare(loader)))
    return found


def fabricated(ctx: ddpsafe.RankContext) -> Any:
    """Read two epochs through Lightning Fabric, with and without ddpsafe's sampler."""
    return [_fabricated(ctx, own_sampler=own_sampler) for own_sampler in (False, True)]


def _fabricated(ctx: ddpsafe.RankContext, *, own_sampler: bool) -> Any:
    from lightning_fabric import Fabric

    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric._strategy._forward_module = None
    options: Any = {"shuffle": True}
    if own_sampler:
        options = {"sampler": data.DistributedSampler(48)}
    loader = data.DataLoader(Augmented(48), 4, num_workers=1, **options)
    sampler = loader.sampler
    if fabric._requires_distributed_sampler(loader):
        from lightning_fabric.utilities.data import _update_dataloader

        sampler = fabric._get_distributed_sampler(loader, num_replicas=2, rank=ctx.rank)
        loader = _update_dataloader(loader, sampler)
    from lightning_fabric.wrappers import _FabricDataLoader

    return _epochs_of(_FabricDataLoader(dataloader=loader, device=None))


class Named(Numbers):
    """A dataset whose samples are names."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.names = data.PackedList(f"name-{i}" for i in range(n))

    def __getitem__(self, index: int) -> Any:
        return self.names[index]


class Droppable(EagerRecords):
    """Holds a file, and can be pickled because it drops the file then."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "reader"}


def seeded_traces(ctx: Any) -> dict[str, Any]:
    """Return orders and draws of loaders without a seed."""
    orders = [
        list(data.DistributedSampler(40)),
        list(data.WeightedSampler([1.0] * 40)),
        [batch.tolist() for batch in ctx.loader(Numbers(40), batch_size=4)],
    ]
    draws = []
    for workers in (0, 1):
        sampler = data.DistributedSampler(8)
        for _, _, drawn in data.DataLoader(Augmented(8), 2, sampler=sampler, num_workers=workers):
            draws += [float(x) for x in drawn[2]]
    return {"orders": orders, "draws": draws, "torch": float(torch.rand(()))}


class Stuck(Numbers):
    """One sample of one rank never returns."""

    def __init__(self, n: int, index: int) -> None:
        super().__init__(n)
        self.index = index

    def __getitem__(self, index: int) -> int:
        if index == self.index:
            threading.Event().wait()
        return index


def wait_for_a_stuck_worker(ctx: Any, kind: str) -> None:
    """Read with two workers, one of which is stuck on rank 1, while rank 0 waits for rank 1."""
    dataset = Stuck(16, 5 if ctx.rank == 1 else -1)
    make = data.DataLoader if kind == "ddpsafe" else TorchDataLoader
    sampler = data.DistributedSampler(16, 1, 0, shuffle=False)
    context = "forkserver" if kind == "forkserver" else None  # Python 3.14 has it as the default
    for _ in make(dataset, 4, sampler=sampler, num_workers=2, multiprocessing_context=context):
        pass
    ctx.barrier()


def lose_a_worker_of_torchs_loader(ctx: Any, how: str) -> None:
    """Read with torch's loader; on rank 1, a worker dies at one sample."""
    sampler = data.DistributedSampler(16, 1, 0, shuffle=False)
    dataset = Lethal(16, 5 if ctx.rank == 1 else -1, how)
    for _ in TorchDataLoader(dataset, 4, sampler=sampler, num_workers=2):
        pass
    ctx.barrier()
