"""A graph that stays behind its executable until somebody asks for it."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from graphshare.capture._kept_graph import Behind, CatchesUp
from graphshare.errors import RebindError
from tests.made_up_driver import BASE, Driver, concerns_of, patch_of, read, words_of


class Bare:
    """In the place of torch's."""

    def __init__(self, driver):
        self.driver = driver
        self.asked = []

    def _noted(self, name):
        self.asked.append((name, [words_of(block) for block in self.driver.blocks]))
        return 1

    def raw_cuda_graph(self):
        return self._noted("raw")

    def instantiate(self):
        self._noted("instantiate")

    def debug_dump(self, debug_path):
        return self._noted(debug_path)

    def get_graph_data(self):
        return self._noted("data")

    def reset(self):
        self._noted("reset")


class Kept(CatchesUp, Bare):
    pass


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def kept(kernels):
    driver = Driver(kernels)
    index = read(driver)
    graph = Kept(driver)
    behind = Behind(concerns_of(index), torch.device("cpu"))
    graph.behind = (behind,)
    return driver, index, graph, behind


ASKING = {
    "raw": lambda graph: graph.raw_cuda_graph(),
    "instantiate": lambda graph: graph.instantiate(),
    "dump": lambda graph: graph.debug_dump("dump"),
    "data": lambda graph: graph.get_graph_data(),
}


@pytest.mark.parametrize("how", ASKING)
def test_whoever_asks_finds_what_runs(how):
    driver, index, graph, behind = kept([[BASE, BASE + 16], [BASE + 16], [3]])
    patch_of(index, {BASE: BASE + 64}, behind).apply()
    patch_of(index, {BASE + 16: BASE + 32}, behind).apply()
    assert driver.set == 1 + 2  # in the executable
    assert [words_of(block) for block in driver.blocks] == [[BASE, BASE + 16], [BASE + 16], [3]]
    assert [[site.value for site in index.sites(node)] for node in index.nodes] == [
        [BASE + 64, BASE + 32],
        [BASE + 32],
        [],
    ]
    ASKING[how](graph)
    right = [[BASE + 64, BASE + 32], [BASE + 32], [3]]
    assert graph.asked == [(how, right)]
    assert driver.blocks == driver.run
    before = driver.set
    ASKING[how](graph)
    assert driver.set == before


def test_there_and_back_before_anybody_asks():
    driver, index, graph, behind = kept([[BASE], [BASE + 16]])
    before = list(driver.blocks)
    patch_of(index, {BASE: BASE + 64}, behind).apply()
    patch_of(index, {BASE + 64: BASE}, behind).apply()
    graph.raw_cuda_graph()
    assert driver.blocks == driver.run == before


def test_what_is_undone_is_undone_in_both():
    """Asked for before it was undone: a later graph of the same move could not be changed."""
    for asked in (False, True):
        driver, index, graph, behind = kept([[BASE], [BASE + 16]])
        before = list(driver.blocks)
        patch = patch_of(index, {BASE: BASE + 64}, behind)
        patch.apply()
        if asked:
            graph.raw_cuda_graph()
            assert driver.blocks == driver.run != before
        patch.revert()
        graph.raw_cuda_graph()
        assert driver.blocks == driver.run == before


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_node_that_the_driver_refuses_then_is_named_and_asked_for_again(at):
    driver, index, graph, behind = kept([[BASE], [BASE], [BASE]])
    patch_of(index, {BASE: BASE + 64}, behind).apply()
    driver.fail_at = (3 + at,)
    with pytest.raises(RebindError) as caught:
        graph.raw_cuda_graph()
    assert caught.value.node == f"{at - 1}: kernel"
    assert graph.asked == []
    assert [words_of(block) for block in driver.run] == [[BASE + 64]] * 3
    assert behind.nodes == {at - 1}
    assert [words_of(block) for block in driver.blocks].count([BASE + 64]) == 2
    graph.raw_cuda_graph()
    assert driver.blocks == driver.run
    assert behind.nodes == set()


def test_a_change_that_fails_leaves_nothing_to_catch_up_with():
    driver, index, graph, behind = kept([[BASE], [BASE]])
    before = list(driver.blocks)
    driver.fail_at = (2,)
    with pytest.raises(RebindError):
        patch_of(index, {BASE: BASE + 64}, behind).apply()
    assert behind.nodes == set()
    graph.raw_cuda_graph()
    assert driver.blocks == driver.run == before


def test_a_graph_that_was_reset_has_no_nodes_to_set():
    driver, index, graph, behind = kept([[BASE]])
    patch_of(index, {BASE: BASE + 64}, behind).apply()
    before = driver.set
    graph.reset()
    graph.raw_cuda_graph()
    assert driver.set == before


def test_any_number_of_different_moves_is_remembered_in_little_room():
    driver, index, graph, behind = kept([[BASE + 16 * place] for place in range(40)])
    for place in range(40):
        for step in range(3):
            old = BASE + 16 * place + 1024 * step
            patch_of(index, {old: old + 1024}, behind).apply()
    assert behind.nodes == set(range(40))
    assert len(behind._changed) <= 8
    graph.raw_cuda_graph()
    assert driver.blocks == driver.run
    assert behind.nodes == set()


def test_it_does_not_keep_the_graph_alive():
    _, index, graph, behind = kept([[BASE]])
    patch_of(index, {BASE: BASE + 64}, behind).apply()
    gone = weakref.ref(graph)
    enabled = gc.isenabled()
    gc.disable()
    try:
        del graph
        assert gone() is None
    finally:
        if enabled:
            gc.enable()


def test_it_knows_each_of_its_readers():
    driver, index, graph, behind = kept([[BASE]])
    patch_of(index, {BASE: BASE + 64}, behind).apply()
    graph.behind = (*graph.behind, Behind(concerns_of(read(driver)), torch.device("cpu")))
    graph.raw_cuda_graph()
    assert driver.blocks == driver.run
