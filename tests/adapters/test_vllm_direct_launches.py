"""A manager that goes to the graph with less on the way does what vLLM's does."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import linecache
import operator
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare.adapters.vllm import activate, deactivate, sessions, signatures, statistics
from graphshare.adapters.vllm.launches import Graphs
from graphshare.adapters.vllm.signatures import is_released
from graphshare.errors import StaleStateError
from tests.vllm_standin import offloader
from tests.vllm_standin.engine import requests, serve
from tests.vllm_standin.installed import counting, managers_of, module


def launched_directly(runner):
    return {name for name, each in managers_of(runner).items() if "run_fullgraph" in vars(each)}


class Graph:
    """One that says when it is replayed."""

    def __init__(self, log):
        self.log = log

    def replay(self):
        self.log.append(self)

    def __eq__(self, other):
        return self is other or (isinstance(other, str) and other == "replay")

    __hash__ = object.__hash__


class Offloader(offloader.BaseOffloader):
    def __init__(self, log):
        self._log = log

    def sync_prev_onload(self):
        self._log.append("sync")


def with_graphs(manager, log):
    """File graphs that say when they are replayed."""
    for desc in manager.graphs:
        manager.graphs[desc] = Graph(log)
    return list(manager.graphs)


def test_all_managers_are_launched_directly(vllm) -> None:
    activate()
    assert launched_directly(vllm.start()) == {"target", "prefill", "decode"}


def test_what_is_returned_is_what_vllm_returns(vllm) -> None:
    activate()
    runner = vllm.start()
    manager = runner.cudagraph_manager
    descs = with_graphs(manager, [])
    own = type(manager).run_fullgraph

    @given(st.lists(st.sampled_from(descs), min_size=1, max_size=12))
    def alike(order) -> None:
        for desc in order:
            got, wanted = manager.run_fullgraph(desc), own(manager, desc)
            assert got.shape == wanted.shape
            assert got.data_ptr() == wanted.data_ptr()
        for draft in (each for name, each in managers_of(runner).items() if name != "target"):
            assert draft.run_fullgraph(next(iter(draft.graphs))) is None

    with_graphs(runner.speculator.prefill_cudagraph_manager, [])
    with_graphs(runner.speculator.decode_cudagraph_manager, [])
    alike()


@pytest.mark.parametrize("name", ["target", "prefill", "decode"])
def test_it_is_the_graph_in_vllms_table_that_is_replayed(vllm, name) -> None:
    """Whoever files another one there has it replayed."""
    activate()
    manager = managers_of(vllm.start())[name]
    log = []
    for desc in with_graphs(manager, log):
        manager.run_fullgraph(desc)
        manager.graphs[desc] = Graph(other := [])
        manager.run_fullgraph(desc)
        assert other == ["replay"]
    assert all(each == "replay" for each in log)


def changes_of(descs, graphs):
    """What can be done to a table in place; it may raise."""
    desc, graph = st.sampled_from(descs), st.sampled_from(graphs)
    some = st.dictionaries(desc, graph, max_size=2)
    return st.one_of(
        st.builds(lambda d, g: lambda table: table.__setitem__(d, g), desc, graph),
        st.builds(lambda d: lambda table: table.__delitem__(d), desc),
        st.builds(lambda d: lambda table: table.pop(d), desc),
        st.builds(lambda d, g: lambda table: table.pop(d, g), desc, graph),
        st.just(lambda table: table.popitem()),
        st.just(lambda table: table.clear()),
        st.builds(lambda d, g: lambda table: table.setdefault(d, g), desc, graph),
        st.builds(lambda more: lambda table: table.update(more), some),
        st.builds(lambda more: lambda table: operator.ior(table, more), some),
        st.builds(lambda more: lambda table: table.__init__(more), some),
        st.just(lambda table: table.update([(descs[0], graphs[0]), ()])),
        st.just(lambda table: table.__init__([(descs[0], graphs[0]), ()])),
    )


@pytest.mark.parametrize("name", ["target", "prefill", "decode"])
def test_whatever_is_done_to_a_table_the_graph_in_it_is_replayed(vllm, name) -> None:
    activate()
    manager = managers_of(vllm.start())[name]
    table, log = manager.graphs, []
    descs = [*table, *(dataclasses.replace(desc) for desc in table)]  # equal ones, too
    graphs = [Graph(log) for _ in range(4)]
    launches = st.sampled_from(descs)

    def launch(desc, model):
        wanted = model.get(desc)
        log.clear()
        if wanted is None:
            with pytest.raises(AssertionError):
                manager.run_fullgraph(desc)
        else:
            manager.run_fullgraph(desc)
        assert log == ([] if wanted is None else [wanted])

    @given(st.lists(st.tuples(launches, changes_of(descs, graphs)), max_size=12))
    def alike(happens) -> None:
        model = dict.fromkeys(descs[:3], graphs[0])
        table.clear()
        table.update(model)
        for desc, change in happens:
            launch(desc, model)
            for whose in (model, table):
                with contextlib.suppress(KeyError, ValueError, TypeError):
                    change(whose)
            assert table == model
            launch(desc, model)

    alike()


def test_a_table_can_be_made_as_a_dictionary_is() -> None:
    assert Graphs() == Graphs({}) == {}
    assert type(Graphs.fromkeys([1])) is Graphs
    assert Graphs([(1, 2)]) == {1: 2}
    copied = copy.copy(table := Graphs({1: 2}))
    copied[1] = 3
    assert (table, copied) == ({1: 2}, {1: 3})


def test_another_table_is_left_to_vllm(vllm) -> None:
    activate()
    manager = vllm.start().cudagraph_manager
    before, (desc, *_) = manager.graphs, with_graphs(manager, [])
    manager.run_fullgraph(desc)
    manager.graphs = {desc: (graph := Graph([]))}
    manager.run_fullgraph(desc)
    assert graph.log == [graph]
    manager.graphs = before
    manager.run_fullgraph(desc)
    assert before[desc].log == [before[desc]] * 2


@pytest.mark.parametrize("name", ["target", "prefill", "decode"])
def test_what_is_not_captured_is_refused_by_vllm(vllm, name) -> None:
    activate()
    manager = managers_of(vllm.start())[name]
    kind = type(next(iter(manager._capture_descs.values()))[0])
    full = next(iter(manager.graphs)).cg_mode
    with pytest.raises(AssertionError):
        manager.run_fullgraph(kind(cg_mode=full, num_tokens=9999, num_reqs=1))


@pytest.mark.parametrize("when", ["before the capture", "after it"])
@pytest.mark.parametrize("name", ["target", "prefill", "decode"])
def test_an_offloader_is_waited_for_before_each_replay(vllm, name, when) -> None:
    activate()
    log = []
    if when == "before the capture":
        offloader.set_offloader(Offloader(log))
    manager = managers_of(vllm.start())[name]
    if when == "after it":
        offloader.set_offloader(Offloader(log))
    desc, *_ = with_graphs(manager, log)
    log.clear()
    manager.run_fullgraph(desc)
    manager.run_fullgraph(desc)
    assert log == ["sync", "replay"] * 2


@pytest.mark.parametrize("patched", ["the object", "the class"])
def test_an_offloader_that_others_patch_is_asked(vllm, monkeypatch, patched) -> None:
    activate()
    manager = vllm.start().cudagraph_manager
    desc, *_ = with_graphs(manager, log := [])
    if patched == "the object":
        offloader.get_offloader().sync_prev_onload = lambda: log.append("sync")
    else:
        monkeypatch.setattr(
            offloader.NoopOffloader, "sync_prev_onload", lambda self: log.append("sync")
        )
    manager.run_fullgraph(desc)
    assert log == ["sync", "replay"]


def test_who_is_asked_for_the_offloader_may_be_replaced_at_any_time(vllm, monkeypatch) -> None:
    activate()
    manager = vllm.start().cudagraph_manager
    desc, *_ = with_graphs(manager, log := [])
    manager.run_fullgraph(desc)
    monkeypatch.setattr(module("gpu.cudagraph_utils"), "get_offloader", lambda: Offloader(log))
    log.clear()
    manager.run_fullgraph(desc)
    assert log == ["sync", "replay"]


def test_what_has_no_such_method_of_its_own_is_not_as_released(vllm) -> None:
    class HandingOn:
        def __getattr__(self, name):
            return getattr(manager, name)

    class WithoutDict:
        __slots__ = ("run_fullgraph",)

    manager = vllm.make().cudagraph_manager
    functions = signatures.released(vllm.version)
    assert is_released(manager, "run_fullgraph", functions)
    assert not is_released(HandingOn(), "run_fullgraph", functions)
    assert not is_released(WithoutDict(), "run_fullgraph", functions)


def test_other_hidden_states_are_returned_from_the_next_replay_on(vllm) -> None:
    activate()
    manager = vllm.start().cudagraph_manager
    desc, *_ = with_graphs(manager, [])
    manager.run_fullgraph(desc)
    manager.hidden_states = torch.full_like(manager.hidden_states, 5)
    assert manager.run_fullgraph(desc).unique().tolist() == [5]


def test_missing_hidden_states_are_an_error_each_time(vllm) -> None:
    activate()
    manager = vllm.start().cudagraph_manager
    descs = with_graphs(manager, [])
    manager.run_fullgraph(descs[0])
    manager.hidden_states = None
    for desc in (*descs, descs[0], descs[0]):
        with pytest.raises((AssertionError, TypeError)):
            manager.run_fullgraph(desc)


def test_hooks_that_were_taken_off_launch_as_vllm_does(vllm) -> None:
    """Whoever has wrapped one goes on calling it; it keeps no memory."""
    activate()
    manager = vllm.start().cudagraph_manager
    desc, *_ = with_graphs(manager, log := [])
    kept = manager.run_fullgraph
    kept(desc)
    deactivate()
    assert "run_fullgraph" not in vars(manager)
    log.clear()
    manager.graphs = {desc: Graph(log)}
    offloader.set_offloader(Offloader(log))
    assert kept(desc).data_ptr() == manager.hidden_states.data_ptr()
    assert log == ["sync", "replay"]
    gone = weakref.ref(manager.hidden_states)
    manager.hidden_states = None
    gc.collect()
    assert gone() is None


def test_a_launch_that_others_have_replaced_before_is_left_to_them(vllm) -> None:
    activate()
    runner, calls = vllm.make(), []
    for each in managers_of(runner).values():
        each.run_fullgraph = counting(each.run_fullgraph, calls)
    vllm.warm_up(runner)
    serve(runner, requests(seed=1, count=2))
    assert statistics().builds_avoided > 0
    assert len(calls) >= 3 * statistics().builds_avoided
    deactivate()
    assert launched_directly(runner) == {"target", "prefill", "decode"}


def test_a_launch_that_others_wrap_afterwards_stays_theirs(vllm) -> None:
    activate()
    runner, calls = vllm.start(), []
    for each in managers_of(runner).values():
        each.run_fullgraph = counting(each.run_fullgraph, calls)
    tokens, drafts = serve(runner, requests(seed=1))
    assert calls
    calls.clear()
    deactivate()
    assert serve(runner, requests(seed=1)) == (tokens, drafts)
    assert calls


@pytest.mark.parametrize("keeps_name", [False, True])
def test_launches_of_a_class_that_others_have_patched_are_left_to_it(
    vllm, monkeypatch, keeps_name
) -> None:
    activate()
    runner, calls = vllm.make(), []
    cls = next(
        each
        for each in type(runner.speculator.decode_cudagraph_manager).__mro__
        if "run_fullgraph" in vars(each)
    )
    own = cls.run_fullgraph

    def patched(self, desc):
        calls.append(desc)
        return own(self, desc)

    if keeps_name:
        patched = functools.wraps(own)(patched)
    monkeypatch.setattr(cls, "run_fullgraph", patched)
    vllm.warm_up(runner)
    serve(runner, requests(seed=1, count=2))
    assert calls
    assert launched_directly(runner) == set()
    assert statistics().builds_avoided > 0


def test_launches_of_a_class_of_others_are_left_to_it(vllm) -> None:
    """Also where it calls vLLM's own."""
    activate()
    runner, calls = vllm.make(), []
    manager = runner.cudagraph_manager

    class Others(type(manager)):
        def run_fullgraph(self, desc):
            calls.append(desc)
            return super().run_fullgraph(desc)

    manager.__class__ = Others
    vllm.warm_up(runner)
    assert launched_directly(runner) == {"prefill", "decode"}
    serve(runner, requests(seed=1, count=2))
    assert len(calls) >= statistics().builds_avoided > 0


def test_more_outputs_than_one_are_left_to_vllm(vllm) -> None:
    """The target's that an EAGLE-3 head reads."""
    activate()
    runner = vllm.make()
    runner.cudagraph_manager.use_aux_hidden_state_outputs = True
    vllm.warm_up(runner)
    assert launched_directly(runner) == {"prefill", "decode"}


def test_of_functions_that_are_not_as_released_none_is_stood_in_for(vllm, monkeypatch) -> None:
    known = signatures.expected()
    assert signatures.released(vllm.version)
    tokens = {}
    for changed in (None, *known[vllm.version]["sources"]):
        of_version = dict(known[vllm.version])
        if changed is not None:
            of_version["sources"] = {**of_version["sources"], changed: "0" * 64}
        monkeypatch.setattr(
            signatures, "expected", lambda of=of_version: {**known, vllm.version: of}
        )
        activate()
        runner = vllm.start()
        tokens[changed] = serve(runner, requests(seed=2, count=3))
        assert statistics().builds_avoided > 0
        assert launched_directly(runner) == (set() if changed else {"target", "prefill", "decode"})
        assert ("dispatch" in vars(runner.cudagraph_manager)) == (changed is None)
        deactivate()
    assert all(each == tokens[None] for each in tokens.values())


@pytest.mark.parametrize("missing", ["no such function", "no source"])
def test_a_function_that_cannot_be_read_is_not_as_released(vllm, monkeypatch, missing) -> None:
    known = signatures.expected()
    name = "vllm.v1.worker.gpu.cudagraph_utils:_is_compatible"
    names = vars(module("gpu.cudagraph_utils"))
    if missing == "no source":
        made = {}
        exec("def _is_compatible(*args): return True", made)
        monkeypatch.setitem(names, "_is_compatible", made["_is_compatible"])
    else:
        monkeypatch.delitem(names, "_is_compatible")
    assert name in known[vllm.version]["sources"]
    assert signatures.released(vllm.version) == frozenset()


@pytest.mark.parametrize(
    "then",
    [
        "",
        "\n",
        "# of it\n",
        "def run(self,\n",
        'def run(self):\n    """Say\n',
        "    \0\n",
        "    )\n",
    ],
)
def test_a_function_whose_file_was_replaced_is_not_as_released(
    vllm, monkeypatch, tmp_path, then
) -> None:
    """An installation that is upgraded under a running process."""
    file, made = tmp_path / "upgraded.py", {}
    source = "\n\n\ndef _is_compatible(*args):\n    return True\n"
    exec(compile(source, str(file), "exec"), made)
    monkeypatch.setitem(
        vars(module("gpu.cudagraph_utils")), "_is_compatible", made["_is_compatible"]
    )
    for before in ("\n" * 3, "# of another\n" * 3):
        file.write_text(before + then)
        linecache.clearcache()
        assert signatures.released(vllm.version) == frozenset()


def test_a_stale_replay_is_refused_through_it(vllm) -> None:
    activate()
    runner = vllm.start()
    serve(runner, requests(seed=3, count=2))
    session = sessions()[-1]
    session.target.invalidate()
    for name in ("target", "prefill"):
        manager = managers_of(runner)[name]
        with pytest.raises(StaleStateError):
            manager.run_fullgraph(next(iter(manager.graphs)))


@pytest.mark.parametrize("indent", ["", "    ", "        "])
def test_a_digest_is_of_the_function_and_not_of_its_place(indent) -> None:
    lines = ["def run(self):", '    """Say.', "", '    It."""', "    # why", "    return self"]
    source = "\n".join(indent + line if line else line for line in lines)
    alone = signatures.digest_of("\n".join(lines))
    assert signatures.digest_of(source) == alone
    assert signatures.digest_of(f"{source}\n\n{indent}# of what follows\n") == alone
    assert signatures.digest_of(source.replace("# why", "# how")) != alone
    assert signatures.digest_of(source.replace("self", "this")) != alone
