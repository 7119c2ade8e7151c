"""The private names of torch still mean what ddpsafe expects."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch.nn import Linear
from torch.utils.data import DataLoader

from ddpsafe import _torch_private
from ddpsafe._worker import torch_hooks


def test_an_iterator_of_the_loader_knows_its_workers() -> None:
    """Its processes, the batch that it waits for, its limit, whether it keeps them, and their end."""
    loader = DataLoader(
        range(4),  # type: ignore[arg-type]  # it is one, without torch's class
        num_workers=1,
        timeout=60,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    iterator = iter(loader)
    (worker,) = _torch_private.workers_of(iterator)
    assert worker.is_alive()
    assert _torch_private.keeps_workers(iterator)
    assert _torch_private.worker_limit_s(iterator) == 60
    assert _torch_private.find_awaited_worker(iterator) == 0
    _torch_private.end_of_workers(iterator)()
    assert not worker.is_alive()
    assert list(_torch_private.workers_of(iter(DataLoader([1])))) == []  # type: ignore[arg-type]


def test_parts_of_tensors_and_models_are_found() -> None:
    """What is read of tensors, and of a model's state."""
    model = Linear(2, 2)
    before = _torch_private.changes_of(model.weight)
    with torch.no_grad():
        model.weight.add_(1)
    assert _torch_private.changes_of(model.weight) > before
    assert _torch_private.uncompiled(model) is None
    state = model.state_dict()
    assert _torch_private.module_versions(state)
    indices, values = _torch_private.sparse_parts(torch.eye(3).to_sparse_coo())
    assert indices.shape == (2, 3)
    assert values.tolist() == [1, 1, 1]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is:DeprecationWarning")
def test_the_model_inside_a_compiled_one_is_found() -> None:
    """To compile, torch imports for seconds."""
    model = Linear(2, 2)
    compiled: Any = torch.compile(model)
    assert _torch_private.uncompiled(compiled) is model


def test_modules_and_tables_of_torch_have_their_names() -> None:
    """What `torch_hooks` looks for in this version of torch."""
    importlib.import_module("torch.distributed")
    assert callable(
        importlib.import_module(_torch_private.WORKER_SIGNALS)._set_worker_signal_handlers
    )
    assert importlib.util.find_spec(_torch_private.COMPILER) is not None
    assert callable(torch.UntypedStorage._share_filename_cpu_)
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers  # type: ignore[attr-defined]
    assert set(torch_hooks._SCHEMES) <= handlers.keys()
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    assert callable(c10d._get_default_store)
    for table in ("pg_map", "pg_names", "pg_group_ranks", "default_pg"):
        assert hasattr(c10d._world, table)
    for name in torch_hooks._WAITING_FUNCTIONS:
        assert callable(getattr(c10d, name))
    DistributedDataParallel = sys.modules["torch.nn.parallel"].DistributedDataParallel  # noqa: N806
    assert {"Joinable", "__init__"} <= set(DistributedDataParallel.__init__.__code__.co_names)
