"""Graphs of every kernel library, the toy engine's, and kinds of nodes that PyTorch never makes."""

from __future__ import annotations

import ctypes
import sys

import pytest
import torch

from graphshare import GraphPool, Phase, ProvenanceError, RebindError, share_states
from graphshare.adapters.toy.checkpoint import new_models
from graphshare.adapters.toy.forwards import Forwards
from graphshare.adapters.toy.graphs import target_keys
from graphshare.capture import _graph_driver, _tensor_maps
from graphshare.capture._cuda_graph import ForeignGraph
from graphshare.provenance import Certainty, Use
from tests.gpu.library_forwards import CASES
from tests.movable import MovableOwner, key_of, poisoned, pool_of
from tests.required_kernels import required
from tests.toy import CONFIG, engine_config

pytestmark = pytest.mark.gpu

KEY = key_of(8)


def captured(forward, **options):
    pool = pool_of("cuda", "kernels", owner=MovableOwner("cuda"), **options)
    pool.capture([KEY], lambda key, state: forward())
    return pool


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_that_a_library_is_given_is_found_and_no_other(name):
    case = required(CASES[name])
    strangers = {f"stranger{i}": torch.zeros(1 << i, device="cuda") for i in range(24)}
    pool = captured(case.make(case.given))
    report = pool.provenance(KEY, inputs=case.given, buffers=strangers, weights=case.inner)
    assert {each.name for each in report.of("input")} == set(case.given)
    assert report.of("buffer") == ()
    assert not report.dangling
    assert not report.unnamed
    assert not report.opaque
    assert all(node.kind != "kernel" or node.addresses for node in report.nodes)


@pytest.mark.parametrize("name", CASES)
def test_a_librarys_graph_follows_each_of_its_tensors(name):
    """Moved one by one, old memory poisoned: replays equal a fresh capture's, bit for bit."""
    case = required(CASES[name])
    tensors = dict(case.given)
    pool = captured(case.make(tensors))

    def replayed(pool):
        pool.refresh(KEY, 1)
        got = pool.replay(KEY)
        return (got if isinstance(got, torch.Tensor) else got[0]).clone()

    for which in tensors:
        old, new = tensors[which], tensors[which].clone()
        pool.rebind({old: new})
        tensors = {**tensors, which: new}
        torch.cuda.synchronize()
        kept = old.clone()
        poisoned([old])
        got = replayed(pool)
        assert bool((old.view(torch.uint8) == 0xA5).all()), which
        old.copy_(kept)
        if name == "flashinfer_decode":  # its wrapper holds what it was made of
            pool.rebind({new: old})
            assert torch.equal(got, replayed(pool)), which
            pool.rebind({old: new})
        else:
            fresh = captured(case.make(tensors))
            assert torch.equal(got, replayed(fresh)), which
            fresh.close()


def test_addresses_in_tensor_maps_are_told_apart():
    case = required(CASES["cublas_bf16_4096_rows"])
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a device with tensor maps")
    report = captured(case.make(case.given)).provenance(KEY, inputs=case.given)
    in_maps = [each for each in report.of("input") if each.certainty is Certainty.TENSOR_MAP]
    assert {each.name for each in in_maps} == set(case.given)
    assert any("not documented" in note for note in report.notes)
    for without in ("torch", "triton", "flash_attention_2"):
        case = required(CASES[without])
        report = captured(case.make(case.given)).provenance(KEY)
        assert Certainty.TENSOR_MAP not in {e.certainty for n in report.nodes for e in n.addresses}


def test_a_driver_that_hides_addresses_in_tensor_maps_is_not_trusted(monkeypatch):
    """Encoding another address, as a driver might: what looks like a map is opaque, and stays."""
    case = required(CASES["cublas_bf16_4096_rows"])
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a device with tensor maps")
    encode = _tensor_maps._encode
    monkeypatch.setattr(_tensor_maps, "_encode", lambda address: encode(address ^ 0x1000))
    _tensor_maps.tensor_maps.cache_clear()
    try:
        pool = captured(case.make(case.given))
        assert pool.provenance(KEY).opaque
        with pytest.raises(RebindError) as caught:
            pool.rebind({case.given["x"]: case.given["x"].clone()})
        assert caught.value.node
    finally:
        monkeypatch.undo()
        _tensor_maps.tensor_maps.cache_clear()


# Graphs that are made by hand.


def raw(graph):
    from cuda.bindings import driver

    return driver, driver.CUgraph(graph.raw_cuda_graph())


def by_hand(forward, change):
    """Capture on a graph of our own, add to it, instantiate it, and hand it to a pool.

    Returns the pool and what ``change`` returned, to be kept.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    pool = pool_of("cuda", "by hand", owner=MovableOwner("cuda"))
    with pool.capturing([KEY]) as capturing:
        state = capturing.state(KEY, Phase.CAPTURE)
        with torch.cuda.graph(graph):
            out = forward(state)
        held = change(*raw(graph))
        graph.instantiate()
        capturing.commit(KEY, graph.replay, out, graph=graph)
    return pool, held


def test_nodes_of_a_child_graph_are_read_and_moved():
    inner = torch.cuda.CUDAGraph(keep_graph=True)
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(inner):
        x.add_(1)

    def add_child(driver, graph):
        code, _ = driver.cuGraphAddChildGraphNode(
            graph, None, 0, driver.CUgraph(inner.raw_cuda_graph())
        )
        assert int(code) == 0

    pool, _ = by_hand(lambda state: state.slot_mappings + 1, add_child)
    report = pool.provenance(KEY, buffers={"x": x})
    (node,) = report.nodes_with("x")
    assert node.inside is not None
    assert report.nodes[node.inside].kind == "child graph"
    y = torch.ones(64, device="cuda")
    pool.rebind({x: y})
    before = x.clone()
    pool.refresh(KEY, 1)
    pool.replay(KEY)
    assert y.tolist() == [2.0] * 64
    assert torch.equal(x, before)


def test_a_function_on_the_host_is_opaque_and_does_not_stand_in_the_way():
    x = torch.ones(64, device="cuda")
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)

    def add_host(driver, graph):
        params = driver.CUDA_HOST_NODE_PARAMS()
        params.fn = driver.CUhostFn(_ptr=ctypes.addressof(call))
        params.userData = 0
        code, _ = driver.cuGraphAddHostNode(graph, None, 0, params)
        assert int(code) == 0
        return call

    pool, _ = by_hand(lambda state: state.slot_mappings + x[0], add_host)
    report = pool.provenance(KEY, buffers={"x": x})
    assert any("host" in each for each in report.opaque)
    pool.rebind({x: x.clone()})


def test_a_node_that_cannot_be_read_stands_in_the_way_and_is_named():
    """A conditional node, whose body drivers before 13.2 do not show."""
    x = torch.ones(64, device="cuda")

    def add_conditional(driver, graph):
        _, context = driver.cuCtxGetCurrent()
        code, handle = driver.cuGraphConditionalHandleCreate(graph, context, 1, 1)
        assert int(code) == 0
        params = driver.CUgraphNodeParams()
        params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = handle
        params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        params.conditional.size = 1
        params.conditional.ctx = context
        code, _ = driver.cuGraphAddNode(graph, None, None, 0, params)
        assert int(code) == 0

    pool, _ = by_hand(lambda state: state.slot_mappings + x[0], add_conditional)
    report = pool.provenance(KEY, buffers={"x": x})
    assert "conditional" in {node.kind for node in report.nodes}
    if not report.opaque:
        pytest.skip("this driver shows what is in it")
    with pytest.raises(RebindError) as caught:
        pool.rebind({x: x.clone()})
    assert "conditional" in caught.value.node


def test_what_the_driver_will_not_change_is_named():
    """A copy of rows, which an executable graph keeps as it is."""
    wide, narrow = torch.zeros(64, 128, device="cuda"), torch.ones(64, 32, device="cuda")

    def add_copy(driver, graph):
        params = driver.CUDA_MEMCPY3D()
        device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.srcMemoryType = params.dstMemoryType = device
        params.srcDevice, params.dstDevice = narrow.data_ptr(), wide.data_ptr()
        params.srcPitch, params.dstPitch = 128, 512
        params.WidthInBytes, params.Height, params.Depth = 128, 64, 1
        _, context = driver.cuCtxGetCurrent()
        code, _ = driver.cuGraphAddMemcpyNode(graph, None, 0, params, context)
        assert int(code) == 0

    pool, _ = by_hand(lambda state: state.slot_mappings + narrow[0, 0], add_copy)
    pool.refresh(KEY, 1)
    pool.replay(KEY)
    assert wide[:, :32].sum().item() == 64 * 32
    other = torch.full_like(narrow, 2.0)
    try:
        pool.rebind({narrow: other})
    except RebindError as error:
        named, want, slots = error.node, 1.0, 1
    else:  # a driver that does
        named, want, slots = "memcpy", 2.0, 2
    assert "memcpy" in named
    wide.zero_()
    pool.refresh(KEY, 1)
    got = pool.replay(KEY)
    assert wide[:, :32].sum().item() == want * 64 * 32
    assert torch.equal(got, pool.states[KEY].slot_mappings + slots)


def test_a_graph_is_right_after_torch_makes_it_executable_again():
    """The graph itself was changed too, not only its executable form."""
    x, y = torch.ones(64, device="cuda"), torch.full((64,), 3.0, device="cuda")
    pool = captured(lambda: x * 2)
    pool.rebind({x: y})
    pool.lookup(KEY, "test").graph.graph.instantiate()
    pool.refresh(KEY, 1)
    assert pool.replay(KEY).tolist() == [6.0] * 64
    pool.rebind({y: x})
    pool.refresh(KEY, 1)
    assert pool.replay(KEY).tolist() == [2.0] * 64


def test_whoever_reads_the_graph_itself_finds_what_runs():
    """It stays behind its executable until it is asked for."""
    x, y, z = (torch.full((64,), value, device="cuda") for value in (1.0, 3.0, 5.0))
    pool = captured(lambda: x * 2)
    graph = pool.lookup(KEY, "test").graph
    for old, new in ((x, y), (y, z)):
        pool.rebind({old: new})
    held = {
        word.address
        for node in ForeignGraph(graph.graph, None, pool.device).read().nodes
        for word in node.words
    }
    assert z.data_ptr() in held
    assert not held & {x.data_ptr(), y.data_ptr()}
    pool.recapture()
    pool.rebind({x: y})
    pool.close()


def test_memory_of_a_pool_that_was_freed_and_taken_again_has_no_name():
    """Dangling in truth, but somebody else's by now: nothing tells, so name everything."""
    kept = [torch.ones(1 << 20, device="cuda")]
    pool = captured(lambda: kept[0] * 2)
    address = kept[0].data_ptr()
    kept.clear()
    report = pool.provenance(KEY)
    assert [each.address for each in report.dangling] == [address]
    taken = torch.ones(1 << 20, device="cuda")
    if taken.data_ptr() != address:
        pytest.skip("the allocator chose another block")
    report = pool.provenance(KEY)
    assert not report.dangling
    assert [each.address for each in report.unnamed] == [address]


def test_without_the_bindings_it_says_what_to_install(monkeypatch):
    pool = captured(lambda: torch.ones(4, device="cuda") + 1)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    _graph_driver.graph_driver.cache_clear()
    try:
        with pytest.raises(ProvenanceError, match="graphshare\\[inspect\\]"):
            pool.provenance(KEY)
    finally:
        monkeypatch.undo()
        _graph_driver.graph_driver.cache_clear()
    assert pool.provenance(KEY).nodes


def toy_pools():
    engine = engine_config()
    target, draft = new_models(CONFIG, 0)
    forwards = Forwards(target.cuda(), draft.cuda(), engine, "cuda")
    target, prefill = (
        GraphPool(name, owner=forwards.make_owner(), device="cuda", inspectable=True)
        for name in ("target", "prefill")
    )
    return forwards, target, prefill, target_keys(engine)


def test_the_toy_engines_loan_is_proven():
    forwards, target, prefill, keys = toy_pools()
    shared = share_states(target, prefill)
    with torch.no_grad():
        target.capture(keys, forwards.target)
        prefill.capture(keys, forwards.draft_prefill)
    assert set(shared.prove()) == set(keys)
    prefill.label(
        weights={"target": forwards.target_model, "draft": forwards.draft_model},
        buffers={"cache": [vars(forwards.draft_cache)]},
    )
    report = prefill.provenance(keys[0], confirm=True)
    assert not report.dangling
    assert {each.certainty for each in report.of(Use.BORROWED)} == {Certainty.CONFIRMED}
    assert report.of(Use.WEIGHT)
    assert report.of(Use.BUFFER)
