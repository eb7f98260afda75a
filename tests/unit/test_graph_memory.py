"""Collections of garbage, where they would free a memory pool at the wrong time."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from graphshare import GraphPool
from graphshare.capture import _graph_memory
from tests.small_engine import Batch, Model, Owner, key_of


@pytest.fixture
def garbage_at_once():
    """Every new object that could be in a cycle starts a collection."""
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_memory_is_taken_from_another_pool(
    monkeypatch, enabled, fails
) -> None:
    seen: list[bool] = []

    @contextlib.contextmanager
    def use_mem_pool(pool, device):
        seen.append(gc.isenabled())
        yield
        seen.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with (
            contextlib.suppress(ZeroDivisionError),
            _graph_memory._allocating_into(object(), torch.device("cuda:0")),
        ):
            if fails:
                1 / 0  # noqa: B018
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False] * (1 if fails else 2)


@pytest.mark.gpu
def test_pools_that_are_garbage_do_not_end_the_process(garbage_at_once) -> None:
    """PyTorch PR 182062: the old ones die while the new ones take their workspaces."""
    key, batch = key_of(4), Batch((2, 3))
    for _ in range(40):  # more than PyTorch has streams
        model, owner = Model("cuda:0"), Owner("cuda:0")
        pool = GraphPool("dropped", owner=owner, device="cuda:0")
        pool.capture([key], model.forward, progress=False)
        pool.refresh(key, batch)
        assert torch.isfinite(pool.replay(key)).all()
        cycle = [pool]
        cycle.append(cycle)
        del pool, cycle
