"""Training code in the shape of well-known projects, with their packages: as under torchrun, and with faults; and recipes.

Each program is a small one of our own. It trains on the CPU in two ranks, prints its losses, and leaves a step out,
raises or is killed in rank 1 where ``FAULT`` says so.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final, NamedTuple

import machine
import pytest
import scripts

LIMIT_S: Final = machine.hang_limit(200.0)

FAULTS: Final = """
import os, signal

RANK = int(os.environ["RANK"])


def leaves_out(step):
    if RANK == 1 and step == 2:
        match os.environ.get("FAULT"):
            case "raise":
                raise ValueError("label 7 is out of range")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "skip":
                return True
    return False


def say(step, loss):
    print(f"rank {RANK} step {step} loss {float(loss):.6f}", flush=True)
"""

NANOGPT: Final = """
import contextlib, os, torch
from faults import RANK, leaves_out, say
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

init_process_group(backend="gloo")
torch.manual_seed(1337 + RANK)
data = torch.arange(400) * 7 % 32
model = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32))
model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(6):
    if leaves_out(step):
        continue
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        at = torch.randint(380, (4,))
        x = torch.stack([data[i : i + 8] for i in at])
        y = torch.stack([data[i + 1 : i + 9] for i in at])
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 2
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    say(step, loss)
destroy_process_group()
"""

SNAPSHOT: Final = """
import os, torch, torch.distributed as dist
from faults import RANK, leaves_out, say
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer, path):
        self.epochs_run, self.path = 0, path
        self.data, self.optimizer = data, optimizer
        if os.path.exists(path):
            snapshot = torch.load(path)
            model.load_state_dict(snapshot["MODEL_STATE"])
            self.epochs_run = snapshot["EPOCHS_RUN"]
        self.model = DDP(model)

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.data.sampler.set_epoch(epoch)
            for source, targets in self.data:
                if leaves_out(epoch):
                    continue
                self.optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(self.model(source), targets)
                loss.backward()
                self.optimizer.step()
                say(epoch, loss)
            if RANK == 0:
                state = self.model.module.state_dict()
                torch.save({"MODEL_STATE": state, "EPOCHS_RUN": epoch + 1}, self.path)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.rand(32, 20), torch.rand(32, 1))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    model = torch.nn.Linear(20, 1)
    Trainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-3), "snapshot.pt").train(4)
    dist.destroy_process_group()
"""

HF_TRAINER: Final = """
import torch
from faults import leaves_out, say
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Faulty(Trainer):
    def training_step(self, model, inputs, *others):
        if leaves_out(self.state.global_step):
            return torch.zeros(())
        loss = super().training_step(model, inputs, *others)
        say(self.state.global_step, loss)
        return loss


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32)
    config = BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    data = [{"input_ids": torch.arange(8) + i, "labels": torch.tensor(i % 2)} for i in range(24)]
    arguments = TrainingArguments(
        output_dir="out", max_steps=6, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    Faulty(model=BertForSequenceClassification(config), args=arguments, train_dataset=data).train()
"""

NLP_EXAMPLE: Final = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from faults import leaves_out, say

accelerator = Accelerator(cpu=True)
set_seed(42)
model = torch.nn.Sequential(torch.nn.EmbeddingBag(64, 16), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
data = [(torch.arange(8) + i, i % 2) for i in range(48)]
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for step, (ids, labels) in enumerate(loader):
    if leaves_out(step):
        continue
    loss = torch.nn.functional.cross_entropy(model(ids), labels)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    say(step, loss)
accelerator.gather_for_metrics(loss.detach())
accelerator.end_training()
"""

IGNITE: Final = """
import ignite.distributed as idist
import torch
from faults import leaves_out, say
from ignite.engine import Engine, Events


def training(local_rank):
    torch.manual_seed(0)
    model = idist.auto_model(torch.nn.Linear(4, 2))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    dataset = [(torch.full((4,), i / 48), i % 2) for i in range(48)]
    loader = idist.auto_dataloader(dataset, batch_size=8, shuffle=True)

    def update(engine, batch):
        step = engine.state.iteration - 1
        if leaves_out(step):
            return None
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        say(step, loss)

    trainer = Engine(update)
    trainer.add_event_handler(Events.EPOCH_STARTED, lambda e: loader.sampler.set_epoch(e.state.epoch))
    trainer.run(loader, max_epochs=1)


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)
"""

TIMM: Final = """
import argparse, torch
from faults import leaves_out, say
from timm.data import create_loader
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, distribute_bn, init_distributed_device
from timm.utils import random_seed, reduce_tensor
from torch.nn.parallel import DistributedDataParallel as NativeDDP
from torchvision.datasets import FakeData


def train_one_epoch(epoch, model, loader, optimizer, scheduler, model_ema, world_size):
    losses = AverageMeter()
    model.train()
    for index, (images, target) in enumerate(loader):
        step = epoch * len(loader) + index
        if leaves_out(step):
            continue
        loss = torch.nn.functional.cross_entropy(model(images), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update(model, step=step)
        say(step, loss.detach())
        losses.update(reduce_tensor(loss.detach(), world_size).item(), images.size(0))
        scheduler.step_update(step, metric=losses.avg)


def main():
    args = argparse.Namespace(device="cpu")
    device = init_distributed_device(args)
    random_seed(42, args.rank)
    model = create_model("test_resnet", num_classes=4)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
    model_ema = ModelEmaV3(model)
    model = NativeDDP(model)
    size = (3, 32, 32)
    loader = create_loader(
        FakeData(24, size, 4),
        size,
        batch_size=4,
        is_training=True,
        distributed=args.distributed,
        num_workers=1,
        use_prefetcher=False,
        device=device,
    )
    scheduler, epochs = create_scheduler_v2(optimizer, num_epochs=2, updates_per_epoch=len(loader))
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader, optimizer, scheduler, model_ema, args.world_size)
        distribute_bn(model, args.world_size, reduce=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
"""

MMENGINE: Final = """
import torch
from faults import leaves_out, say
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import EpochBasedTrainLoop, Runner
from torch.utils.data import Dataset


class Points(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((4,), index / 48), torch.tensor(index % 2)


class Model(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, inputs, labels, mode):
        scores = self.layer(inputs)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels)}


class Prints(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        say(batch_idx, outputs["loss"])


class Loop(EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch):
        if not leaves_out(idx):
            super().run_iter(idx, data_batch)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo")  # the Runner itself needs a GPU to do so
    runner = Runner(
        Model(),
        work_dir="out",
        train_dataloader={
            "dataset": Points(),
            "batch_size": 4,
            "collate_fn": {"type": "default_collate"},
            "sampler": {"type": "DefaultSampler", "shuffle": True},
        },
        train_cfg={"type": Loop, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
        custom_hooks=[Prints()],
        launcher="pytorch",
        cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},
        randomness={"seed": 0},
        log_level="WARNING",
    )
    runner.train()
"""


class Project(NamedTuple):
    """A program, and the package that it needs besides torch."""

    text: str
    package: str = ""


PROJECTS: Final = {
    "nanogpt": Project(NANOGPT),
    "snapshot": Project(SNAPSHOT),
    "nlp_example": Project(NLP_EXAMPLE, "accelerate"),
    "hf_trainer": Project(HF_TRAINER, "transformers"),
    "ignite": Project(IGNITE, "ignite"),
    "timm": Project(TIMM, "timm"),
    "mmengine": Project(MMENGINE, "mmengine"),
}
EVERY: Final = [
    pytest.param(name, id=name, marks=() if not each.package else pytest.mark.extra("frameworks"))
    for name, each in PROJECTS.items()
]


def run(folder: Path, name: str, launcher: list[str], fault: str = "") -> scripts.Run:
    """Run a program in two ranks under a launcher."""
    folder.mkdir()
    scripts.write(folder, "faults.py", FAULTS)
    scripts.write(folder, "train.py", PROJECTS[name].text)
    arguments = ["-m", *launcher, "--nproc-per-node", "2", "train.py"]
    env = {"FAULT": fault, "DDPSAFE_RUN_DIR": str(folder / "run")}
    return scripts.Script(arguments, folder=folder, env=env, fresh=True).end(LIMIT_S)


def losses(out: str) -> list[str]:
    """Return what the ranks printed, in the order of ranks and steps."""
    return sorted(re.findall(r"rank \d step \d+ loss [\d.]+", out))


@pytest.mark.full(but=["nanogpt"])
@pytest.mark.timeout(2 * LIMIT_S + 40)
@pytest.mark.parametrize("name", EVERY)
def test_losses_are_those_under_torchrun(tmp_path: Path, name: str) -> None:
    """Every loss of every step on both ranks."""
    theirs = run(tmp_path / "theirs", name, ["torch.distributed.run", "--standalone"])
    ours = run(tmp_path / "ours", name, ["ddpsafe", "run"])
    assert ours.code == 0, ours.err[-2000:]
    own, said = losses(ours.out), losses(theirs.out)
    assert len(own) >= 8
    # Without ddpsafe, a rank may abort in destroy_process_group ("terminate called without an active exception":
    # 1 run of 8 on a busy machine), and the other one is ended before its last line.
    assert len(said) == len(own) or (theirs.code != 0 and len(said) == len(own) - 1), theirs.err[
        -2000:
    ]
    assert set(said) <= set(own)


@pytest.mark.full(but=["nanogpt-raise"])
@pytest.mark.timeout(LIMIT_S + 40)
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "raised ValueError"),
        ("kill", "was killed by SIGKILL"),
        ("skip", "(returned early|is behind|entered|passed|before its script ended)"),
    ],
    ids=["raise", "kill", "skip"],
)
@pytest.mark.parametrize("name", EVERY)
def test_the_rank_with_the_fault_is_named(tmp_path: Path, name: str, fault: str, said: str) -> None:
    """A raise, a kill and a step that one rank leaves out end the job with its name."""
    done = run(tmp_path / "run", name, ["ddpsafe", "run"], fault)
    assert done.code != 0, done.out[-1000:]
    found = [line for line in done.err.splitlines() if line.startswith("ddpsafe.")]
    assert re.search(rf"rank 1 \(world_size 2\) .*{said}", "\n".join(found)), done.err[-3000:]


PAGE: Final = Path(__file__).parents[2] / "docs" / "how-to" / "frameworks.md"

NEEDS: Final[dict[str, str]] = {
    "hf.py": "transformers",
    "accelerated.py": "accelerate",
    "lit.py": "lightning",
    "fabric.py": "lightning",
    "graphs.py": "torch_geometric",
    "configured.py": "hydra",
    "rays.py": "ray",
    "tasks.py": "distributed",
}
"""The package that a recipe needs besides torch."""


class Recipe(NamedTuple):
    """One recipe of the page: its file, its command and the program."""

    name: str
    command: str
    text: str


def read_recipes() -> list[Recipe]:
    """Return the recipes of the page, which begin with a comment that has their name and command."""
    blocks = re.findall(r"```python\n(# (\S+\.py): ([^,\n]+).*?)```", PAGE.read_text(), re.DOTALL)
    return [Recipe(name, command.strip(), text) for text, name, command in blocks]


RECIPES: Final = read_recipes()

OF_EXTRA: Final = pytest.mark.extra("frameworks")


def test_every_block_of_the_page_is_a_recipe() -> None:
    """A differently spelled first comment would silently drop a recipe."""
    assert PAGE.read_text().count("```python") == len(RECIPES) == 11


@pytest.mark.full(but=["reference.py"])
@pytest.mark.timeout(LIMIT_S + 40)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, id=recipe.name, marks=OF_EXTRA if recipe.name in NEEDS else ())
        for recipe in RECIPES
    ],
)
def test_recipe_runs_in_two_ranks(tmp_path: Path, recipe: Recipe) -> None:
    """Both ranks train in one group, and the command succeeds."""
    package = NEEDS.get(recipe.name)
    scripts.write(tmp_path, recipe.name, recipe.text)
    program, *arguments = shlex.split(recipe.command)
    ours = ["-m", "ddpsafe"] if program == "ddpsafe" else []
    # Larger libraries may complain that they run in a forked process.
    fresh = package not in {None, "accelerate"}
    env = {} if fresh else scripts.FORKING
    done = scripts.Script([*ours, *arguments], folder=tmp_path, env=env, fresh=fresh).end(LIMIT_S)
    if recipe.name == "rays.py" and "timed out during startup" in done.err:
        pytest.skip("Ray itself did not start within its 30 s on this machine")
    assert done.code == 0, done.err[-3000:]
    steps = dict(re.findall(r"rank (\d) of 2 steps (\d+)", done.out))
    assert sorted(steps) == ["0", "1"], done.out
    assert steps["0"] == steps["1"]
    assert int(steps["0"]) >= 4


@OF_EXTRA
def test_a_daemonic_worker_of_dask_is_refused_with_the_line_to_add(tmp_path: Path) -> None:
    """Without that line of the recipe nothing starts, and the message contains it."""
    (recipe,) = [each for each in RECIPES if each.name == "tasks.py"]
    line = re.search(r"^.*distributed\.worker\.daemon.*\n", recipe.text, re.MULTILINE)
    assert line is not None
    path = scripts.write(tmp_path, recipe.name, recipe.text.replace(line[0], ""))
    run = scripts.Script([str(path)], folder=tmp_path).end()
    assert run.code != 0
    assert "ConfigError" in run.err
    assert "distributed.worker.daemon" in run.err
