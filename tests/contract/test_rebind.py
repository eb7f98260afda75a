"""Graphs put on other memory without a new capture; the same on each backend."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshare import (
    AddressChangedError,
    OwnershipError,
    RebindError,
    ReleasedStateError,
    Staleness,
    StaleStateError,
    share_states,
)
from graphshare.capture import tape as tape_module
from graphshare.capture._graph_driver import Setters, graph_driver
from tests.movable import ROWS, Model, MovableOwner, key_of, poisoned, pool_of

KEYS = [key_of(8), key_of(4)]


@pytest.fixture
def dev(kind: str) -> str:
    return "cuda" if kind == "cuda" else "cpu"


def captured(kind, dev, **options):
    owner, model = MovableOwner(dev), Model(dev)
    pool = pool_of(kind, owner=owner, **options)
    pool.capture(KEYS, model.forward)
    return pool, owner, model


def right(pool, model, key, batch, replaying=None):
    """Refresh and replay, and say whether the result is what the forward computes."""
    pool.refresh(key, batch)
    replaying = replaying or pool
    want = model.expected(key, replaying.states[key])
    got = replaying.replay(key)
    return torch.allclose(got["hidden"], want) and torch.allclose(got["out"], want)


def sync(dev):
    if dev == "cuda":
        torch.cuda.synchronize()


def words(pool):
    """Every address of every graph."""
    return {
        key: [[(w.where, w.address) for w in node.words] for node in pool_graph(pool, key).nodes]
        for key in pool.states
    }


def pool_graph(pool, key):
    return pool.lookup(key, "test").graph.read()


@contextmanager
def failing(kind, at):
    """Make the change number ``at`` fail."""
    tried = 0

    def planted(whole, fail):
        def step(*args):
            nonlocal tried
            tried += 1
            return fail() if tried == at else whole(*args)

        return step

    def broken():
        raise RuntimeError("planted")

    with pytest.MonkeyPatch.context() as patch:
        if kind == "cuda":
            from cuda.bindings import driver

            code = driver.CUresult.CUDA_ERROR_NOT_PERMITTED
            setters = graph_driver().setters
            for name, calls in setters.items():
                broke = Setters(*(planted(each, lambda: (code,)) for each in calls))
                patch.setitem(setters, name, broke)
        else:
            whole = tape_module._StepChange.apply
            patch.setattr(tape_module._StepChange, "apply", planted(whole, broken))
        yield


@pytest.mark.parametrize("checks", ["fast", "strict", "off"])
def test_replays_read_the_new_memory_and_never_the_old(kind, dev, checks):
    pool, owner, model = captured(kind, dev, checks=checks)
    assert right(pool, model, KEYS[0], 1)
    moves = owner.move()
    caches = {model.cache: model.cache.clone(), model.weight: model.weight.clone()}
    done = pool.rebind({**moves, **caches})
    assert {key for _, key in done.graphs} == set(KEYS)
    assert {key for _, key in done.states} == set(KEYS)
    assert done.nodes
    assert done.addresses >= done.nodes
    old = [*moves, *caches]
    model.cache, model.weight = caches[model.cache], caches[model.weight]
    sync(dev)
    poisoned(old)
    for batch in (2, 3):
        for key in KEYS:
            assert right(pool, model, key, batch)
    sync(dev)
    assert all(bool((each.view(torch.uint8) == 0xA5).all()) for each in old)


@pytest.mark.parametrize("checks", ["fast", "strict"])
def test_nothing_holds_the_old_memory(kind, dev, checks):
    """In turn after turn: what is remembered of refreshes, replays, reports and moves, too."""
    pool, owner, model = captured(kind, dev, checks=checks)
    borrower = pool_of(kind, "draft")
    shared = share_states(pool, borrower, view=lambda state: state._replace(slot_mappings=None))

    def narrow(key, state):
        lengths, table = state.attn_metadata["b"]
        return lengths + table.sum(1) + model.x[0, 0]

    borrower.capture(KEYS, narrow)
    pool.label(**model.named())
    bound = pool.bind(KEYS[1])
    for turn in range(4):
        moves = owner.move()
        for name in ("x", "cache", "weight", "out"):
            old = getattr(model, name)
            moves[old] = old.clone()
            setattr(model, name, moves[old])
        pool.rebind(moves)
        gone = [weakref.ref(each) for each in moves]
        storages = [each.untyped_storage()._weak_ref() for each in moves]
        del moves, old
        gc.collect()
        assert [ref() for ref in gone] == [None] * len(gone), turn
        alive = [torch.UntypedStorage._new_with_weak_ptr(each) for each in storages]
        assert alive == [None] * len(alive), turn
        shared.prove()
        pool.provenance(KEYS[0])
        for batch in (1, 2, 3):  # what is remembered of an owner's builds is after the second
            for key in KEYS:
                assert right(pool, model, key, batch)
                borrower.replay(key)
        pool.refresh(KEYS[1], 4)
        bound.replay()


@pytest.mark.parametrize("refused", [False, True])
def test_what_was_built_elsewhere_than_at_capture_moves_too(kind, dev, refused):
    """A leaf that nobody reads, and may be new each time; or the build of a refused capture."""

    class Built(NamedTuple):
        read: torch.Tensor
        scratch: torch.Tensor

    class Owner:
        host_values: ClassVar = {"scratch": "any"}

        def __init__(self) -> None:
            self.built = Built(torch.ones(16, device=dev), torch.ones(16, device=dev))

        def build(self, key, batch, phase):
            return self.built

    owner = Owner()
    name = "read" if refused else "scratch"
    pool, borrower = pool_of(kind, owner=owner), pool_of(kind, "draft")
    pool.capture([1], lambda key, state: state.read + 1)
    share_states(pool, borrower)
    pool.refresh(1, None)
    captured_on = owner.built
    old = torch.ones(16, device=dev)
    owner.built = captured_on._replace(**{name: old})
    for _ in range(3):  # what is remembered of an owner's builds is after the second
        if refused:
            with pytest.raises(AddressChangedError):
                borrower.capture([1], lambda key, state: state.read + 1)
        else:
            pool.refresh(1, None)
    assert getattr(pool.states[1], name) is old
    new = old.clone()
    owner.built = captured_on._replace(**{name: new})
    done = pool.rebind({old: new}, unused_ok=True)
    assert (done.graphs, done.states, done.nodes) == ((), (), 0)
    assert getattr(pool.states[1], name).data_ptr() == new.data_ptr()
    storage = old.untyped_storage()._weak_ref()
    del old
    gc.collect()
    assert torch.UntypedStorage._new_with_weak_ptr(storage) is None
    if refused:
        with pytest.raises(StaleStateError):
            pool.replay(1)
        owner.built = captured_on
        pool.refresh(1, None)
    pool.replay(1)  # as fresh as before


def test_the_state_is_stale_until_its_owner_builds_in_the_new_memory(kind, dev):
    pool, owner, model = captured(kind, dev)
    right(pool, model, KEYS[0], 1)
    pool.refresh(KEYS[0], 2)
    before = owner.buffers()
    moves = owner.move()
    after = owner.buffers()
    pool.rebind(moves)
    with pytest.raises(StaleStateError) as caught:
        pool.replay(KEYS[0])
    assert caught.value.rule is Staleness.MOVED
    # An owner that goes on in its old buffers is refused, and recovers.
    owner.lengths, owner.table, owner.slots = before.values()
    with pytest.raises(AddressChangedError):
        pool.refresh(KEYS[0], 2)
    owner.lengths, owner.table, owner.slots = after.values()
    assert right(pool, model, KEYS[0], 2)


def test_memory_that_is_no_state_moves_without_a_refresh(kind, dev):
    pool, _, model = captured(kind, dev)
    pool.refresh(KEYS[0], 2)
    cache = model.cache.clone()
    done = pool.rebind([(model.cache, cache)])
    assert done.states == ()
    model.cache = cache
    want = model.expected(KEYS[0], pool.states[KEYS[0]])
    assert torch.allclose(pool.replay(KEYS[0])["hidden"], want)


def test_outputs_labels_and_bound_replays_move_along(kind, dev):
    pool, _, model = captured(kind, dev)
    pool.label(**model.named())
    bound = pool.bind(KEYS[1])
    out = torch.zeros_like(model.out)
    cache = model.cache.clone()
    pool.rebind({model.out: out, model.cache: cache})
    model.out, model.cache = out, cache
    assert right(pool, model, KEYS[1], 3)
    pool.refresh(KEYS[1], 4)
    got = bound.replay()
    assert got["out"].data_ptr() == out.data_ptr()
    report = pool.provenance(KEYS[1])
    assert out.data_ptr() in {each.address for each in report.of("output")}
    assert {each.address for each in report.of("buffer")} == {cache.data_ptr()}
    assert not report.unnamed


def test_views_within_the_old_memory_move_by_as_much(kind, dev):
    owner = MovableOwner(dev)
    whole = torch.randn(4, ROWS, device=dev)

    def forward(key, state):
        return whole[2, : key.num_tokens] * 2 + whole[3, 1] + state.slot_mappings

    pool = pool_of(kind, owner=owner)
    pool.capture(KEYS, forward)
    other = torch.randn(4, ROWS, device=dev)
    pool.rebind({whole: other})
    sync(dev)
    poisoned([whole])
    pool.refresh(KEYS[1], 1)
    want = other[2, :4] * 2 + other[3, 1] + owner.slots[:4]
    assert torch.allclose(pool.replay(KEYS[1]), want)


# All or none.


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(data=st.data())
def test_a_permutation_and_its_inverse_is_nothing(kind, data):
    """Whatever buffers change places, replays follow; and back again all is as it was."""
    dev = "cuda" if kind == "cuda" else "cpu"
    buffers = [torch.randn(ROWS, 4, device=dev) for _ in range(5)]
    order = data.draw(st.permutations(range(5)), label="order")

    def forward(key, state):
        buffers[4].add_(1)
        total = state.slot_mappings[:, None] * 1.0
        for place, each in enumerate(buffers):
            total = total * 2 + each[: key.num_tokens] * (place + 1)
        return total

    owner = MovableOwner(dev)
    pool = pool_of(kind, owner=owner)
    pool.capture(KEYS, forward)
    before = words(pool)
    there = {buffers[i]: buffers[j] for i, j in enumerate(order)}
    pool.rebind(there)
    pool.refresh(KEYS[1], 1)
    contents = [each.clone() for each in buffers]
    contents[order[4]] += 1
    want = owner.slots[:4, None] * 1.0
    for place in range(5):
        want = want * 2 + contents[order[place]][:4] * (place + 1)
    assert torch.allclose(pool.replay(KEYS[1]), want)
    pool.rebind({new: old for old, new in there.items()})
    assert words(pool) == before
    pool.close()


def test_a_failure_at_any_node_leaves_every_graph_as_it_was(kind, dev):
    pool, owner, model = captured(kind, dev)
    draft_model = Model(dev, seed=1)
    borrower = pool_of(kind, "draft")
    share_states(pool, borrower)
    borrower.capture(KEYS, draft_model.forward)
    buffers = owner.buffers()
    moves = {**owner.move(), model.cache: model.cache.clone(), model.out: model.out.clone()}
    moves[draft_model.cache] = draft_model.cache.clone()
    owner.lengths, owner.table, owner.slots = buffers.values()
    before = words(pool), words(borrower)
    outputs = pool.lookup(KEYS[0], "test").outputs
    pool.refresh(KEYS[0], 5)
    at = 0
    while True:
        at += 1
        error = None
        with failing(kind, at):
            try:
                pool.rebind(moves)
            except (RebindError, RuntimeError) as raised:
                error = raised
        if error is None:  # there was no change number `at`
            break
        if kind == "cuda":
            assert isinstance(error, RebindError)
            assert (bool(error.node), error.key in KEYS) == (True, True)
        assert (words(pool), words(borrower)) == before
        assert pool.lookup(KEYS[0], "test").outputs is outputs
        # Freshness is as it was too: both replay, and right.
        for each, its_model in ((pool, model), (borrower, draft_model)):
            want = its_model.expected(KEYS[0], each.states[KEYS[0]])
            assert torch.allclose(each.replay(KEYS[0])["hidden"], want)
        pool.refresh(KEYS[0], 5 + at)
    assert at > 10
    # The last one found nothing to fail at, and went through.
    owner.lengths, owner.table, owner.slots = (moves[each] for each in buffers.values())
    model.cache, model.out = moves[model.cache], moves[model.out]
    draft_model.cache = moves[draft_model.cache]
    for key in KEYS:
        assert right(pool, model, key, 3)
        assert right(pool, draft_model, key, 3, borrower)


# Who moves with whom.


def test_lenders_and_borrowers_move_together(kind, dev):
    """Whichever of them is asked, over a chain of loans and through views."""
    for asked in range(3):
        owner, models = MovableOwner(dev), [Model(dev, seed=i) for i in range(3)]
        pools = [pool_of(kind, "first", owner=owner), pool_of(kind, "second")]
        pools.append(pool_of(kind, "third"))
        narrow = lambda state: state._replace(attn_metadata={"b": state.attn_metadata["b"]})  # noqa: E731
        share_states(pools[0], pools[1], view=narrow)
        share_states(pools[1], pools[2])
        for pool, model in zip(pools, models, strict=True):
            pool.capture(KEYS, model.forward)
        done = pools[asked].rebind(owner.move())
        assert {name for name, _ in done.graphs} == {"first", "second", "third"}
        for key in KEYS:
            for pool, model in zip(pools, models, strict=True):
                assert right(pools[0], model, key, 2, pool)
        for shared_with in pools[1:]:
            shared_with.recapture()  # the views are checked against where the state lies now


def test_views_are_compared_with_where_they_lie_now(kind, dev):
    """A key that is captured beside those that moved looks at their views as well."""
    owner, model = MovableOwner(dev), Model(dev)
    pool = pool_of(kind, owner=owner)
    borrower = pool_of(kind, "draft")
    share_states(pool, borrower, view=lambda state: state._replace(slot_mappings=None))
    pool.capture(KEYS, model.forward)
    borrower.capture(KEYS, lambda key, state: state.attn_metadata["a"].lengths + 1)
    checkers = [borrower.lookup(key, "test").view_checker for key in KEYS]
    pool.rebind(owner.move())
    for key, before in zip(KEYS, checkers, strict=True):
        after = borrower.lookup(key, "test").view_checker
        seen = borrower.states[key]
        assert before.differences(seen)
        assert not after.differences(seen)
        assert after.matches(seen)


def test_some_keys_move_and_others_stay(kind, dev):
    pool, _, model = captured(kind, dev)
    before = words(pool)
    cache = model.cache.clone()
    pool.rebind({model.cache: cache}, [KEYS[1]])
    after = words(pool)
    assert after[KEYS[0]] == before[KEYS[0]]
    assert after[KEYS[1]] != before[KEYS[1]]
    with pytest.raises(KeyError):
        pool.rebind({cache: model.cache}, [key_of(5)])


def test_keys_on_one_state_move_together(kind, dev):
    owner, model = MovableOwner(dev), Model(dev)
    pool = pool_of(kind, owner=owner, state_key=lambda key: key.num_tokens)
    twins = [key_of(4), type(key_of(4))(4, 4, num_active_loras=1)]
    pool.capture(twins, model.forward)
    moves = owner.move()
    with pytest.raises(RebindError) as caught:
        pool.rebind(moves, [twins[0]])
    assert caught.value.keys == (twins[1],)
    pool.rebind(moves, twins)
    assert right(pool, model, twins[0], 1)


def test_a_pool_that_was_not_asked_is_not_left_on_old_memory(kind, dev):
    """Two pools of one owner are no family; their states lie in the same buffers."""
    pool, owner, model = captured(kind, dev)
    other = pool_of(kind, "other", owner=owner)
    other.capture(KEYS, model.forward)
    before = words(pool), words(other)
    moves = owner.move()
    with pytest.raises(RebindError):
        pool.rebind(moves)
    assert (words(pool), words(other)) == before
    done = pool.rebind(moves, also=[other])
    assert {name for name, _ in done.graphs} == {"target", "other"}
    for key in KEYS:
        assert right(pool, model, key, 1)
        assert right(other, model, key, 1)


def test_what_a_build_writes_moves_too(kind, dev):
    """An owner that declares its writes: the two keys of another owner's state go stale."""
    owner = MovableOwner(dev)
    owner.writes = lambda key: list(owner.buffers().values())
    model = Model(dev)
    pool = pool_of(kind, owner=owner)
    pool.capture(KEYS, model.forward)
    reader = MovableOwner(dev)
    reader.lengths, reader.table, reader.slots = owner.buffers().values()
    reader.writes = lambda key: [reader.slots]
    other = pool_of(kind, "other", owner=reader)
    other.capture(KEYS, model.forward)
    moves = owner.move()
    reader.lengths, reader.table, reader.slots = owner.buffers().values()
    pool.rebind(moves, also=[other])
    other.refresh(KEYS[0], 1)
    pool.refresh(KEYS[0], 1)
    with pytest.raises(StaleStateError):
        other.replay(KEYS[0])


# What is refused.


def refused(pool, error, moves, **options):
    before = words(pool)
    with pytest.raises(error) as caught:
        pool.rebind(moves, **options)
    assert words(pool) == before
    return caught.value


def test_a_part_of_a_buffer_is_refused(kind, dev):
    pool, owner, _ = captured(kind, dev)
    for part in (owner.lengths[:4], owner.lengths[4:], owner.table[:, :2]):
        error = (
            refused(pool, RebindError, [(part, part.clone().view_as(part))])
            if (part.is_contiguous())
            else refused(pool, RebindError, [(part, torch.zeros_like(owner.table)[:, :2])])
        )
        assert error.remedy


def test_a_tensor_that_nothing_reads_is_refused(kind, dev):
    pool, _, model = captured(kind, dev)
    stranger = torch.zeros(4, device=dev)
    error = refused(pool, RebindError, {stranger: torch.ones(4, device=dev)})
    assert hex(stranger.data_ptr()) in str(error)
    done = pool.rebind({stranger: torch.ones(4, device=dev)}, unused_ok=True)
    assert done.nodes == done.addresses == 0
    assert not pool.rebind({model.cache: model.cache}).nodes  # it stays where it is


def test_tensors_change_places_if_both_are_read(kind, dev):
    pool, _, model = captured(kind, dev)
    spare = model.cache.clone()
    swap = {model.cache: spare, spare: model.cache}
    error = refused(pool, RebindError, swap)
    assert hex(spare.data_ptr()) in error.got
    pool.rebind(swap, unused_ok=True)
    model.cache = spare
    assert right(pool, model, KEYS[0], 1)


def test_an_owner_of_some_keys_that_moved_has_two_memories_to_build_in(kind, dev):
    class Two(MovableOwner):
        def build(self, key, batch, phase):
            self.lengths, self.table, self.slots = self.of(key).values()
            return super().build(key, batch, phase)

        def of(self, key):
            return self.there.get(key, self.first)

    owner, model = Two(dev), Model(dev)
    owner.first, owner.there = owner.buffers(), {}
    pool = pool_of(kind, owner=owner)
    pool.capture(KEYS, model.forward)
    other = {name: torch.zeros_like(each) for name, each in owner.first.items()}
    pool.rebind([(owner.first[name], other[name]) for name in other], [KEYS[1]])
    with pytest.raises(AddressChangedError):
        pool.refresh(KEYS[1], 1)
    owner.there[KEYS[1]] = other
    for key in KEYS:
        assert right(pool, model, key, 2)


def test_a_graphs_own_memory_is_refused(kind, dev):
    pool, _, _ = captured(kind, dev)
    hidden = pool.lookup(KEYS[0], "test").outputs["hidden"]
    for moves in ({hidden: torch.zeros_like(hidden)}, {torch.zeros_like(hidden): hidden}):
        error = refused(pool, RebindError, moves)
        assert error.key in KEYS


def test_what_is_wrong_in_itself_is_refused(kind, dev):
    pool, _, model = captured(kind, dev)
    cache = model.cache
    for new in (cache[:4], cache.double(), cache.t().contiguous().t(), cache.to("meta")):
        refused(pool, ValueError, {cache: new})
    refused(pool, TypeError, {cache: 3})
    refused(pool, TypeError, [(3, cache)])
    refused(pool, ValueError, [(cache, cache.clone()), (cache[:4], cache[:4].clone())])
    other = cache.clone()
    refused(pool, ValueError, [(cache, other), (model.x, other)])
    pool.close()
    with pytest.raises(ReleasedStateError):
        pool.rebind({cache: other})


@pytest.mark.gpu
def test_memory_that_is_less_aligned_is_refused():
    pool, _, model = captured("cuda", "cuda")
    wide = torch.zeros(model.cache.numel() + 1, device="cuda")
    error = refused(pool, RebindError, {model.cache: wide[1:].view_as(model.cache)})
    assert "aligned" in str(error)


# Adopting what was captured on buffers of its own.


def apart(kind, dev, forward=None):
    owner, model = MovableOwner(dev), Model(dev)
    target = pool_of(kind, owner=owner)
    target.capture(KEYS, model.forward)
    draft_owner, draft_model = MovableOwner(dev), Model(dev, seed=1)
    draft = pool_of(kind, "draft", owner=draft_owner)
    draft.capture(KEYS, forward(draft_owner, draft_model) if forward else draft_model.forward)
    return target, draft, owner, draft_owner, draft_model


def test_graphs_are_adopted_onto_the_lenders_buffers(kind, dev):
    target, draft, owner, draft_owner, model = apart(kind, dev)
    draft.refresh(KEYS[0], 1)
    captures = draft.statistics().captures
    bound = draft.bind(KEYS[0])
    shared = share_states(target, draft, adopt=True)
    shared.prove()
    assert draft.statistics().captures == captures
    with pytest.raises(StaleStateError):
        draft.replay(KEYS[0])
    with pytest.raises(ReleasedStateError):
        bound.replay()
    with pytest.raises(OwnershipError):
        draft.refresh(KEYS[0], 1)
    sync(dev)
    poisoned(draft_owner.buffers().values())
    for key in KEYS:
        assert right(target, model, key, 3, draft)
    target.refresh(KEYS[1], 1)
    assert shared.live_key == KEYS[1]
    assert draft.statistics().builds_avoided == 2
    target.rebind(owner.move())
    assert right(target, model, KEYS[0], 2, draft)
    draft.recapture()
    assert right(target, model, KEYS[0], 2, draft)
    shared.close()
    with pytest.raises(ReleasedStateError):
        draft.replay(KEYS[0])


def test_when_leaves_some_keys_on_their_own(kind, dev):
    target, draft, _, _, model = apart(kind, dev)
    shared = share_states(target, draft, adopt=True, when=lambda key: key == KEYS[0])
    assert set(shared.prove(build=False)) == {KEYS[0]}
    assert right(draft, model, KEYS[1], 2)
    assert right(target, model, KEYS[0], 2, draft)


@pytest.mark.parametrize("fault", ["shape", "presence", "beside"])
def test_what_does_not_correspond_is_not_adopted(kind, dev, fault):
    owner, model = MovableOwner(dev), Model(dev)
    target = pool_of(kind, owner=owner)
    target.capture(KEYS, model.forward)

    class Other(MovableOwner):
        def build(self, key, batch, phase):
            state = super().build(key, batch, phase)
            if fault == "shape":
                return state._replace(slot_mappings=self.slots)
            if fault == "presence":
                return state._replace(attn_metadata={"b": state.attn_metadata["b"]})
            return state

        if fault == "beside":

            def writes(self, key):
                return [*self.buffers().values(), self.beside]

    draft_owner, draft_model = Other(dev), Model(dev, seed=1)
    draft_owner.beside = torch.ones(4, device=dev)

    def forward(key, state):
        slots = state.slot_mappings[: key.num_tokens]
        out = draft_model.forward(key, state._replace(slot_mappings=slots))
        return out["hidden"] + draft_owner.beside if fault == "beside" else out

    draft = pool_of(kind, "draft", owner=draft_owner)
    draft.capture(KEYS, forward)
    before = words(draft)
    with pytest.raises(RebindError) as caught:
        share_states(target, draft, adopt=True)
    assert caught.value.path or caught.value.node
    assert words(draft) == before
    assert draft.loan is None
    draft.refresh(KEYS[0], 1)
    draft.replay(KEYS[0])


def test_a_failure_while_adopting_leaves_both_pools_as_they_were(kind, dev):
    target, draft, _, _, model = apart(kind, dev)
    before = words(draft)
    for at in (1, 3, 6):
        with failing(kind, at), pytest.raises((RebindError, RuntimeError)):
            share_states(target, draft, adopt=True)
        assert words(draft) == before
        assert draft.loan is None
        assert right(draft, model, KEYS[1], 1)
    share_states(target, draft, adopt=True)
    assert right(target, model, KEYS[1], 1, draft)
