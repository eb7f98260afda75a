"""What a rebind must not do: leave a graph behind, believe a stale state, or stop halfway."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphshare import (
    AddressChangedError,
    AttentionState,
    BatchDescriptor,
    GraphPool,
    Phase,
    ProvenanceError,
    RebindError,
    ReleasedStateError,
    StaleStateError,
    share_states,
)
from graphshare.memory import MemoryRanges
from graphshare.provenance import Provenance

K8, K4 = BatchDescriptor(8), BatchDescriptor(4)
CACHE = torch.randn(8, 4)


class Owner:
    def __init__(self) -> None:
        self.seq_lens = torch.ones(8, dtype=torch.int32)
        self.slots = torch.zeros(8, dtype=torch.int64)

    def build(self, key: Any, batch: Any, phase: Phase) -> Any:
        rows = key.num_tokens
        self.seq_lens[:rows] = 1 if batch is None else batch
        self.slots[:rows] = torch.arange(rows)
        return AttentionState({"seq_lens": self.seq_lens[:rows]}, self.slots[:rows])

    def move(self) -> dict[torch.Tensor, torch.Tensor]:
        moves = {each: torch.zeros_like(each) for each in (self.seq_lens, self.slots)}
        self.seq_lens, self.slots = moves[self.seq_lens], moves[self.slots]
        return moves


def forward(key: Any, state: Any) -> torch.Tensor:
    return CACHE[state.slot_mappings] / state.attn_metadata["seq_lens"][:, None]


def pool_of(owner: Any = None, name: str = "target", **options: Any) -> GraphPool[Any]:
    return GraphPool(name, owner=owner, device="cpu", inspectable=True, **options)


def test_no_rebind_while_a_borrower_captures() -> None:
    """Its graphs are in no pool yet, and would stay on the old memory."""
    owner = Owner()
    target, draft = pool_of(owner), pool_of(name="draft")
    share_states(target, draft)
    target.capture([K8], forward)
    with draft.capturing([K8]) as capturing:
        forward(K8, capturing.state(K8, Phase.WARMUP))
        state = capturing.state(K8, Phase.CAPTURE)
        graph = draft.backend.capture(lambda: forward(K8, state))
        capturing.commit(K8, graph.replay, graph.outputs, graph=graph)
        with pytest.raises(RuntimeError, match="during a capture of draft"):
            target.rebind({owner.seq_lens: torch.zeros_like(owner.seq_lens)})
    target.refresh(K8, 5)
    assert torch.equal(draft.replay(K8), CACHE / 5)
    target.rebind(owner.move())
    target.refresh(K8, 4)
    assert torch.equal(draft.replay(K8), CACHE / 4)


def test_no_adoption_while_the_consumer_captures() -> None:
    target, draft = pool_of(Owner()), pool_of(Owner(), name="draft")
    target.capture([K8, K4], forward)
    draft.capture([K8], forward)
    with (
        pytest.raises(RuntimeError, match="during a capture of draft"),
        draft.capturing([K4]),
    ):
        share_states(target, draft, adopt=True)


@pytest.mark.parametrize("linked", [True, False], ids=["one pool", "two pools"])
def test_what_a_build_is_declared_to_write_moves_with_it(linked: bool) -> None:
    """Else it would be taken to leave alone what it overwrites (rule 2)."""

    class Writer:
        def __init__(self) -> None:
            self.a, self.b = torch.zeros(8), torch.zeros(8)

        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            self.a.fill_(batch or 0.0)
            self.b.fill_(batch or 0.0)
            return {"x": self.a if key == K8 else self.b}

        def writes(self, key: Any) -> Any:
            return [self.a, self.b]

    owner = Writer()
    first = pool_of(owner, live_keys=2)
    second = first if linked else pool_of(owner, name="other")
    first.capture([K8], lambda key, state: state["x"] * 1)
    second.capture([K4], lambda key, state: state["x"] * 1)
    new = torch.zeros(8)
    first.rebind({owner.a: new}, keys=[K8] if linked else None)
    owner.a = new
    first.refresh(K8, 1.0)
    second.refresh(K4, 2.0)
    with pytest.raises(StaleStateError):
        first.replay(K8)


@pytest.mark.parametrize("kind", ["argument", "output", "imaginary"])
def test_conjugate_and_negative_views_stay_what_they_are(kind: str) -> None:
    buffer = torch.randn(4, 4, dtype=torch.complex64)
    weight = torch.randn(4, 4, dtype=torch.complex64)

    def run(key: Any, state: Any) -> torch.Tensor:
        if kind == "argument":
            return torch.mm(buffer.mH, weight)
        return buffer.conj() if kind == "output" else buffer.conj().imag

    pool = pool_of(Owner())
    pool.capture([K4], run)
    new = torch.randn(4, 4, dtype=torch.complex64)
    pool.rebind({buffer: new}, unused_ok=True)
    pool.refresh(K4, 1)
    right = {"argument": new.mH @ weight, "output": new.conj(), "imaginary": new.conj().imag}
    torch.testing.assert_close(pool.replay(K4).resolve_neg(), right[kind].resolve_neg())


def test_a_view_of_too_many_pieces_is_refused() -> None:
    """What lies between them would move too."""
    big, new = torch.ones(20_000, 3), torch.zeros(20_000, 3)
    pool = pool_of(Owner())
    pool.capture([K8], lambda key, state: big[:, 1] * state.attn_metadata["seq_lens"][0])
    with pytest.raises(ValueError, match="whole buffers"):
        pool.rebind({big[:, 0::2]: new[:, 0::2]}, unused_ok=True)


@pytest.mark.parametrize("which", ["old", "new"])
def test_memory_that_was_given_up_is_refused(which: str) -> None:
    old, new = torch.ones(8, 4), torch.full((8, 4), 2.0)
    pool = pool_of(Owner())
    pool.capture([K8], lambda key, state: old * state.attn_metadata["seq_lens"][0])
    (old if which == "old" else new).untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="in memory"):
        pool.rebind({old: new})


def test_tensors_without_one_memory_are_refused() -> None:
    tensor = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="one memory"):
        pool_of(Owner()).rebind({tensor: tensor.clone()})


def test_outputs_of_torchs_own_tuples() -> None:
    values, places = torch.zeros(4), torch.zeros(4, dtype=torch.int64)

    def run(key: Any, state: Any) -> Any:
        return torch.max(CACHE[state.slot_mappings], 1, out=(values, places))

    pool = pool_of(Owner())
    pool.capture([K4], run)
    new = torch.zeros(4)
    pool.rebind({values: new})
    pool.refresh(K4, 1)
    found = pool.replay(K4)
    assert type(found).__name__ == "max_out"
    assert torch.equal(found.values, CACHE[:4].max(1).values)
    assert found.values.data_ptr() == new.data_ptr()


def test_a_graph_whose_outputs_cannot_be_set_is_refused_before_anything_changes() -> None:
    class Fixed:
        nbytes = 0

        def __init__(self, graph: Any) -> None:
            self._graph = graph

        @property
        def outputs(self) -> Any:
            return self._graph.outputs

        def replay(self) -> None:
            self._graph.replay()

        def release(self) -> None:
            self._graph.release()

        def read(self) -> Any:
            return self._graph.read()

        def patch(self, moves: Any) -> Any:
            return self._graph.patch(moves)

    owner = Owner()
    pool = pool_of(owner)
    with pool.capturing([K8]) as capturing:
        forward(K8, capturing.state(K8, Phase.WARMUP))
        state = capturing.state(K8, Phase.CAPTURE)
        graph = pool.backend.capture(lambda: forward(K8, state))
        capturing.commit(K8, graph.replay, graph.outputs, graph=Fixed(graph))
    with pytest.raises(TypeError, match="outputs can be set"):
        pool.rebind({owner.seq_lens: torch.zeros_like(owner.seq_lens)})
    pool.refresh(K8, 5)
    assert torch.equal(pool.replay(K8), CACHE / 5)


def test_outputs_that_the_engine_keeps_in_the_graph_stay_there() -> None:
    owner = Owner()
    pool = pool_of(owner)
    with pool.capturing([K8]) as capturing:
        forward(K8, capturing.state(K8, Phase.WARMUP))
        state = capturing.state(K8, Phase.CAPTURE)
        graph = pool.backend.capture(lambda: forward(K8, state))
        capturing.commit(K8, graph.replay, None, graph=graph)
    pool.rebind(owner.move())
    pool.refresh(K8, 5)
    pool.replay(K8)
    assert torch.equal(graph.outputs, CACHE / 5)


def test_a_consumers_smaller_bound_is_not_adopted() -> None:
    """It is baked in, and the lender's batches go up to the lender's."""

    class Bounded:
        host_values = {"*.n": "at_most"}

        def __init__(self, capacity: int) -> None:
            self.x, self.capacity = torch.zeros(8), capacity

        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            self.x.fill_(batch or 0.0)
            return {"m": {"x": self.x, "n": self.capacity if batch is None else int(batch)}}

    def run(key: Any, state: Any) -> torch.Tensor:
        return state["m"]["x"] * state["m"]["n"]

    target, draft = pool_of(Bounded(64)), pool_of(Bounded(8), name="draft")
    target.capture([K8], run)
    draft.capture([K8], run)
    with pytest.raises(RebindError) as caught:
        share_states(target, draft, adopt=True)
    assert caught.value.path == "m.n"


def test_columns_of_one_matrix_are_told_apart() -> None:
    """A graph that reads one leaf is no proof that it reads the one whose rows lie between."""

    class Columns:
        def __init__(self) -> None:
            self.both = torch.zeros(8, 2)

        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            self.both.fill_(batch or 1.0)
            return {"a": self.both[:, 0], "b": self.both[:, 1]}

    stray = torch.ones(8)
    target, draft = pool_of(Columns()), pool_of(name="draft")
    shared = share_states(target, draft)
    target.capture([K8], lambda key, state: state["a"] + state["b"])
    draft.capture([K8], lambda key, state: stray + state["b"])
    with pytest.raises(ProvenanceError) as caught:
        shared.prove()
    assert caught.value.path == "a"
    other = pool_of(Columns())
    other.capture([K8], lambda key, state: state["b"][3:] * 1.0)
    report = other.provenance(K8)
    assert {each.name for node in report.nodes for each in node.addresses} >= {"b"}
    assert "a" not in {each.name for node in report.nodes for each in node.addresses}
    assert Provenance.from_json(report.to_json()) == report


def test_an_empty_part_of_a_buffer_does_not_keep_it_alive() -> None:
    """A step of decodes alone has an empty slice for its prefills."""

    class Sliced(Owner):
        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            state = super().build(key, batch, phase)
            rows = key.num_tokens
            empty = self.seq_lens[rows:rows]
            return AttentionState({**state.attn_metadata, "prefill": empty}, state.slot_mappings)

    owner = Sliced()
    pool = pool_of(owner)
    pool.capture([K8, K4], forward)
    old = StorageWeakRef(owner.seq_lens.untyped_storage())
    pool.rebind(owner.move())
    assert old.expired()
    pool.refresh(K4, 2)
    assert torch.equal(pool.replay(K4), CACHE[:4] / 2)


@pytest.mark.parametrize("whose", ["one buffer", "one owner"])
def test_adoption_of_buffers_that_are_the_lenders_already(whose: str) -> None:
    lender = Owner()
    own = lender if whose == "one owner" else Owner()
    own.seq_lens = lender.seq_lens
    target, draft = pool_of(lender), pool_of(own, name="draft")
    target.capture([K8], forward)
    draft.capture([K8], forward)
    share_states(target, draft, adopt=True)
    target.refresh(K8, 5)
    assert torch.equal(draft.replay(K8), CACHE / 5)


@pytest.mark.parametrize("how", ["released", "closed", "captured anew"])
@pytest.mark.parametrize("keys", [None, [K8]])
def test_nothing_is_proven_of_what_the_lender_let_go(how: str, keys: Any) -> None:
    owner = Owner()
    target, draft = pool_of(owner), pool_of(name="draft")
    shared = share_states(target, draft)
    target.capture([K8], forward)
    draft.capture([K8], forward)
    if how == "released":
        target.release()
    elif how == "closed":
        target.close()
    else:
        owner.move()
        target.recapture()
    with pytest.raises(ReleasedStateError):
        shared.prove(keys)


def test_whose_graph_reads_nothing_is_named_in_a_chain() -> None:
    target, middle, draft = pool_of(Owner()), pool_of(name="middle"), pool_of(name="draft")
    share_states(target, middle)
    shared = share_states(middle, draft)
    target.capture([K8], forward)
    middle.capture([K8], lambda key, state: CACHE + 1)
    draft.capture([K8], forward)
    with pytest.raises(ProvenanceError, match="of middle"):
        shared.prove()


def test_a_state_that_moved_is_stale_for_no_key() -> None:
    owner = Owner()
    pool = pool_of(owner)
    pool.capture([K8], forward)
    pool.refresh(K8, 1)
    pool.rebind(owner.move())
    with pytest.raises(StaleStateError) as caught:
        pool.replay(K8)
    assert "None" not in str(caught.value)


def held(moves: Any) -> list[StorageWeakRef]:
    return [StorageWeakRef(old.untyped_storage()) for old in moves]


def test_a_handle_of_a_graph_that_was_captured_anew_holds_no_state() -> None:
    owner = Owner()
    pool = pool_of(owner, checks="strict")
    pool.capture([K8], forward)
    pool.refresh(K8, 1)
    handle, entry = pool.bind(K8), pool.holdings.entries[K8]
    old = held([owner.seq_lens, owner.slots])
    owner.move()
    pool.recapture()
    assert [each.expired() for each in old] == [True, True]
    assert entry is not pool.holdings.entries[K8]
    with pytest.raises(ReleasedStateError):
        handle.replay()


def test_a_consumer_whose_loan_was_closed_moves_along() -> None:
    """It may not replay, and must not keep the old memory alive either."""
    owner, out = Owner(), {"out": torch.zeros(8)}

    def write(key: Any, state: Any) -> torch.Tensor:
        out["out"].copy_(state.attn_metadata["seq_lens"])
        return out["out"]

    target, draft = pool_of(owner), pool_of(name="draft")
    shared = share_states(target, draft)
    target.capture([K8], forward)
    draft.capture([K8], write)
    shared.close()
    moves = {**owner.move(), out["out"]: torch.zeros(8)}
    out["out"] = moves[out["out"]]
    old = held(moves)
    done = target.rebind(moves)
    del moves
    assert {name for name, _ in done.graphs} == {"target", "draft"}
    assert all(each.expired() for each in old)
    with pytest.raises(ReleasedStateError):
        draft.replay(K8)
    draft.release()
    target.rebind(owner.move())


@pytest.mark.parametrize("ended", ["loan closed", "lender released"])
def test_a_graph_that_nobody_may_replay_stands_not_in_the_way(ended: str) -> None:
    """One that cannot be read: only those that can be replayed must be changed."""
    owner = Owner()
    target, draft = pool_of(owner, live_keys=2), pool_of(name="draft")
    shared = share_states(target, draft)
    target.capture([K8, K4], forward)
    with draft.capturing([K8]) as capturing:
        capturing.state(K8, Phase.WARMUP)
        capturing.state(K8, Phase.CAPTURE)
        capturing.commit(K8, lambda: None, None)
    with pytest.raises(ProvenanceError):
        target.rebind({owner.seq_lens: torch.zeros_like(owner.seq_lens)})
    if ended == "loan closed":
        shared.close()
    else:
        target.release(K8)
    for asked in (target, draft) if ended == "lender released" else (target,):
        asked.rebind(owner.move(), also=[target, draft])
    target.refresh(K4, 2)
    assert torch.equal(target.replay(K4), CACHE[:4] / 2)


def test_an_output_that_no_operator_touches_is_used() -> None:
    kept = torch.ones(4)
    pool = pool_of(Owner())
    pool.capture([K8], lambda key, state: (forward(key, state), kept))
    new = torch.zeros(4)
    pool.rebind({kept: new})
    pool.refresh(K8, 1)
    assert pool.replay(K8)[1].data_ptr() == new.data_ptr()


def test_names_stay_where_keys_stay() -> None:
    """And let go of the old memory with the last key that reads it."""
    owner = Owner()
    pool = pool_of(owner)
    old, new = CACHE.clone(), CACHE.clone()
    pool.capture([K8, K4], lambda key, state: old[state.slot_mappings])
    pool.label(buffers={"cache": old})
    pool.rebind({old: new}, [K8])
    for key, cache in ((K8, new), (K4, old)):
        (address,) = pool.provenance(key).of("buffer")
        assert (address.name, address.address) == ("cache", cache.data_ptr())
    pool.rebind({old: new}, [K4])
    assert [each.data_ptr() for each in pool.holdings.named["buffer", "cache"]] == [new.data_ptr()]
    (address,) = pool.provenance(K4).of("buffer")
    assert address.address == new.data_ptr()


def test_a_buffer_that_is_only_declared_to_be_written_is_used() -> None:
    owner: Any = Owner()
    owner.scratch = torch.zeros(4)
    owner.writes = lambda key: [owner.seq_lens, owner.slots, owner.scratch]
    pool = pool_of(owner)
    pool.capture([K8], forward)
    old, owner.scratch = owner.scratch, torch.zeros(4)
    done = pool.rebind({old: owner.scratch})
    assert done.nodes == 0
    (record,) = pool.holdings.records()
    assert record.footprint(K8).contains(MemoryRanges.of([owner.scratch]))
    assert not record.footprint(K8).overlaps(MemoryRanges.of([old]))


def test_a_parameter_is_one_on_other_memory() -> None:
    """So that the quick check of the next refresh knows it again."""

    class Parameters(Owner):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8), requires_grad=False)

        def build(self, key: Any, batch: Any, phase: Phase) -> Any:
            state = super().build(key, batch, phase)
            return AttentionState({**state.attn_metadata, "scale": self.scale}, self.slots[:8])

    owner = Parameters()
    pool = pool_of(owner)
    pool.capture([K8], lambda key, state: forward(key, state) * state.attn_metadata["scale"][0])
    new = torch.nn.Parameter(torch.full((8,), 2.0), requires_grad=False)
    pool.rebind({owner.scale: new})
    owner.scale = new
    moved = pool.states[K8].attn_metadata["scale"]
    assert type(moved) is torch.nn.Parameter
    assert not moved.requires_grad
    (record,) = pool.holdings.records()
    assert record.checker is not None
    assert record.checker.matches(pool.states[K8])
    pool.refresh(K8, 4)
    torch.testing.assert_close(pool.replay(K8), CACHE / 2)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_outputs_in_a_set_move(kind: Any) -> None:
    out = torch.zeros(8)
    pool = pool_of(Owner())

    def run(key: Any, state: Any) -> Any:
        return {"both": kind([out.copy_(state.attn_metadata["seq_lens"])]), "names": {"a", "b"}}

    pool.capture([K8], run)
    new = torch.zeros(8)
    pool.rebind({out: new})
    pool.refresh(K8, 3)
    found = pool.replay(K8)
    (one,) = found["both"]
    assert type(found["both"]) is kind
    assert one.data_ptr() == new.data_ptr()
    assert one.tolist() == [3.0] * 8
    assert found["names"] == {"a", "b"}


class Wrapper(torch.Tensor):
    """As quantized weights are: two tensors inside, and no memory of its own."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, scale: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.scale = inner, scale
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_names_for_tensors_that_are_made_of_others() -> None:
    inner, scale = torch.ones(8), torch.ones(8)
    sparse = torch.eye(8).to_sparse()
    rows = torch.eye(8).to_sparse_csr()
    values, products = sparse._values(), (rows.values(), rows.col_indices())

    def run(key: Any, state: Any) -> Any:
        return inner * scale * state.attn_metadata["seq_lens"] + values + products[0] * products[1]

    pool = pool_of(Owner())
    pool.capture([K8], run)
    pool.label(weights={"packed": Wrapper(inner, scale)}, buffers={"sparse": sparse, "rows": rows})
    report = pool.provenance(K8)
    assert {each.name for each in report.of("weight")} == {"packed"}
    assert {each.name for each in report.of("buffer")} == {"sparse", "rows"}
    assert not report.unnamed
    assert [each.name for each in pool.provenance(K8, inputs={"s": sparse}).of("input")] == ["s"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.parametrize("call", ["label", "provenance"])
def test_a_tensor_that_lies_nowhere_cannot_be_named(call: str) -> None:
    pool = pool_of(Owner())
    pool.capture([K8], forward)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    given = () if call == "label" else (K8,)
    with pytest.raises(TypeError, match=r"buffers: a\.b: expected a strided tensor"):
        getattr(pool, call)(*given, buffers={"a": {"b": nested}})


def test_layouts_follow_any_number_of_moves_before_anybody_looks() -> None:
    owner = Owner()
    pool = pool_of(owner)
    pool.capture([K8], forward)
    (record,) = pool.holdings.records()
    for _ in range(20):
        pool.rebind(owner.move())
    assert record.checker is not None
    leaves = {leaf.path: leaf.address for leaf in record.checker.layout.tensors}
    assert leaves == {
        "attn_metadata.seq_lens": owner.seq_lens.data_ptr(),
        "slot_mappings": owner.slots.data_ptr(),
    }
    for batch in (5, 4):
        pool.refresh(K8, batch)
        assert torch.equal(pool.replay(K8), CACHE / batch)
        pool.rebind(owner.move())


def test_a_checker_that_moved_is_freed_without_a_collection() -> None:
    owner = Owner()
    pool = pool_of(owner)
    pool.capture([K8], forward)
    (record,) = pool.holdings.records()
    enabled = gc.isenabled()
    gc.disable()
    try:
        pool.rebind(owner.move())
        gone = weakref.ref(record.checker)
        pool.rebind(owner.move())
        assert gone() is None
    finally:
        if enabled:
            gc.enable()


class Kept:
    """Returns the same object at each build; ``within`` is how its tensor gets other memory."""

    def __init__(self, within: str) -> None:
        self.within = within
        self.buffer = torch.zeros(8)
        tensor = self.buffer[:8]
        self.state = {"rows": tensor} if within == "dict" else AttentionState({}, tensor)

    def build(self, key: Any, batch: Any, phase: Phase) -> Any:
        rows(self.state).fill_(0 if batch is None else batch)
        return self.state

    def put_into(self, memory: torch.Tensor) -> None:
        if self.within == "dict":
            self.state["rows"] = memory[:8]
        else:
            rows(self.state).set_(memory.untyped_storage(), 0, (8,))


def rows(state: Any) -> torch.Tensor:
    return state["rows"] if isinstance(state, dict) else state.slot_mappings


@pytest.mark.parametrize("within", ["dict", "tensor"])
@pytest.mark.parametrize("whose", ["target", "draft"])
def test_no_adoption_by_an_object_that_has_gone_elsewhere(within: str, whose: str) -> None:
    """The captured object leads to memory that no graph reads, until the owner puts it back."""
    owners = {"target": Kept(within), "draft": Kept(within)}
    pools = {name: pool_of(owner, name) for name, owner in owners.items()}
    for pool in pools.values():
        pool.capture([K8], lambda key, state: rows(state) * 2)
    target, draft = pools.values()
    elsewhere = torch.zeros(8)
    owners[whose].put_into(elsewhere)
    with pytest.raises(AddressChangedError):
        pools[whose].refresh(K8, 1)
    with pytest.raises(RebindError) as caught:
        share_states(target, draft, adopt=True)
    assert caught.value.path == ("rows" if within == "dict" else "slot_mappings")
    owners[whose].put_into(owners[whose].buffer)
    share_states(target, draft, adopt=True)
    target.refresh(K8, 3)
    for pool in pools.values():
        assert pool.replay(K8).tolist() == [6] * 8


def test_no_rebind_by_a_tensor_that_has_gone_elsewhere() -> None:
    """The graph would move, and the state that is compared with later builds would not."""
    owner = Kept("tensor")
    pool = pool_of(owner)
    pool.capture([K8], lambda key, state: rows(state) * 2)
    new = torch.zeros(8)
    owner.put_into(torch.zeros(8))
    with pytest.raises(RebindError) as caught:
        pool.rebind({owner.buffer: new})
    assert caught.value.key == K8
    owner.put_into(owner.buffer)
    pool.refresh(K8, 3)
    assert pool.replay(K8).tolist() == [6] * 8
    pool.rebind({owner.buffer: new})
    owner.put_into(new)
    pool.refresh(K8, 4)
    assert pool.replay(K8).tolist() == [8] * 8
    assert new.tolist() == [4] * 8


def test_a_rebind_by_an_object_that_leads_elsewhere() -> None:
    """Its owner may change what the object holds before it says so: the tensors are known."""
    owner = Kept("dict")
    pool = pool_of(owner)
    pool.capture([K8], lambda key, state: rows(state) * 2)
    new = torch.zeros(8)
    owner.put_into(new)
    pool.rebind({owner.buffer: new})
    pool.refresh(K8, 4)
    assert pool.replay(K8).tolist() == [8] * 8
