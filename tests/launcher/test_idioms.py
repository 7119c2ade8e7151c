"""A script finds in a rank of ``ddpsafe run`` what it finds under torchrun, and can do there what it can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest
import scripts

IDIOMS: Final = """
import sys
early = [name for name in ("torch", "numpy") if name in sys.modules]
import argparse, atexit, gc, inspect, json, locale, logging, multiprocessing, os, pickle, resource
import signal, subprocess, threading, warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
os.environ["OMP_NUM_THREADS"] = "1"
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
import sibling

rank = os.environ["RANK"]

@dataclass
class Config:
    lr: float = 0.1

def square(x):
    return x * x

def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))
    parser.add_argument("--lr", type=float)
    return parser.prog, vars(parser.parse_args())

def saved():
    torch.save(Config(), f"{rank}.pt")
    return torch.load(f"{rank}.pt", weights_only=False)

def reduced():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()

def gathered():
    found = [None, None]
    dist.all_gather_object(found, Config(float(rank)), group=dist.new_group([0, 1]))
    return found

def config_of(x):
    return Config(x)

def in_a_pool(method, function):
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(function, [1, 2])

def trained():
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    return model.module.weight.grad.tolist()

def handled():
    received = []
    signal.signal(signal.SIGUSR2, lambda *_: received.append(1))
    os.kill(os.getpid(), signal.SIGUSR2)
    return received

def variables(names):
    return {name: os.environ.get(name) for name in names.split()}

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD, signal.SIGPIPE)
idioms = {
    "what is imported": lambda: early,
    "main module": lambda: (__name__, sys.modules["__main__"].__dict__ is globals(), __spec__),
    "arguments": arguments,
    "files": lambda: (os.path.basename(__file__), os.path.isabs(__file__), sys.argv[0]),
    "path": lambda: (os.path.basename(sys.path[0]), sibling.WORD, os.getcwd() in sys.path[1:]),
    "threads of torch": torch.get_num_threads,
    "place": lambda: variables("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"),
    "role": lambda: variables("ROLE_RANK ROLE_NAME ROLE_WORLD_SIZE PYTHONPATH CUDA_VISIBLE_DEVICES"),
    "restarts": lambda: variables("TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"),
    "torchrun is recognized": dist.is_torchelastic_launched,
    "pickle": lambda: (pickle.loads(pickle.dumps(Config(0.5))), Config.__module__),
    "source": lambda: inspect.getsource(square),
    "save": saved,
    "group": lambda: (dist.init_process_group("gloo"), dist.get_backend(), dist.get_world_size()),
    "all_reduce": reduced,
    "all_gather_object": gathered,
    "DDP": trained,
    "loader": lambda: [batch.tolist() for batch in DataLoader(range(4), 2, num_workers=1)],
    "loader with a lambda": lambda: [*DataLoader(range(4), 2, num_workers=1, collate_fn=lambda x: x)],
    "threads": lambda: list(ThreadPoolExecutor(2).map(square, [1, 2])),
    "pool": lambda: in_a_pool("fork", square),
    "classes of the script from a pool": lambda: in_a_pool("forkserver", config_of),
    "start method": multiprocessing.get_start_method,
    "process": lambda: (multiprocessing.current_process().name, multiprocessing.parent_process()),
    "thread": lambda: threading.current_thread().name,
    "program": lambda: subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True).stdout,
    "signals": lambda: [getattr(signal.getsignal(each), "__name__", each) for each in SIGNALS],
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "handler": handled,
    "logging": lambda: (logging.getLogger().handlers, logging.getLogger().level),
    "warnings": lambda: (warnings.filters[:2], sys.warnoptions),
    "streams": lambda: (sys.stdout.encoding, sys.stdout.fileno(), sys.stderr.fileno()),
    "interpreter": lambda: (sys.flags, sys.getrecursionlimit(), sys.excepthook is sys.__excepthook__),
    "garbage": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
    "limits": lambda: (resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)),
    "locale": locale.getlocale,
    "defaults": lambda: (torch.get_default_dtype(), torch.is_grad_enabled()),
    "stdin": lambda: sys.stdin.readline() if rank == "0" else None,
    "end": lambda: (dist.barrier(), dist.destroy_process_group(), dist.is_initialized()),
}
if __name__ != "__main__":
    idioms = {}  # a worker of the pool imports the script
seen = {}
for name, idiom in idioms.items():
    try:
        seen[name] = repr(idiom())
    except Exception as error:
        seen[name] = repr(error)

@atexit.register
def write():
    if __name__ != "__main__":
        return
    seen["exit function"] = repr((__name__, Config is sys.modules["__main__"].Config))
    with open(f"{os.environ['SEEN']}-{rank}.json", "w") as file:
        json.dump(seen, file)
"""


@pytest.mark.full
def test_the_idioms_of_scripts_are_as_under_torchrun(tmp_path: Path) -> None:
    """Each shows the same, one after the other in one process."""
    scripts.write(tmp_path, "sub/idioms.py", IDIOMS)
    scripts.write(tmp_path, "sub/sibling.py", "WORD = 'sibling'")
    found: dict[str, list[dict[str, str]]] = {}
    for launcher in (["torch.distributed.run"], ["ddpsafe", "run"]):
        options = ["--nproc-per-node", "2", "sub/idioms.py", "--lr", "0.1"]
        done = scripts.run_with_input(
            ["-m", *launcher, *options],
            folder=tmp_path,
            given="hello\n",
            env={"SEEN": launcher[-1]},
        )
        assert done.returncode == 0, done.stderr
        found[launcher[-1]] = [
            json.loads((tmp_path / f"{launcher[-1]}-{rank}.json").read_text()) for rank in (0, 1)
        ]
    assert len(found["run"][0]) > 22
    assert not any("Error(" in shown for shown in found["run"][0].values()), found["run"]
    for ours, torchruns in zip(found["run"], found["torch.distributed.run"], strict=True):
        differ = {name: (shown, torchruns[name]) for name, shown in ours.items()}
        assert {name: pair for name, pair in differ.items() if len({*pair}) > 1} == {}
