"""Keys that say too little, are never hit, are missing, or are chosen twice."""

from __future__ import annotations

import pytest
import torch

from graphshare import (
    AttentionState,
    BatchDescriptor,
    KeyMismatchError,
    Phase,
    Staleness,
    StaleStateError,
    bound,
    capture_descriptors,
    exact,
    share_states,
)
from tests.small_engine import (
    HEAD_SIZE,
    MAX_REQS,
    Batch,
    Model,
    Owner,
    by_hand,
    is_close,
    key_of,
)

BATCH = Batch((3, 5, 2, 4))


class LoraModel(Model):
    """Adds the adapter's product where the key says that adapters are active."""

    def __init__(self, device):
        super().__init__(device)
        self.adapter = torch.eye(HEAD_SIZE, device=device).flip(0) * 2

    def forward(self, key, state):
        out = super().forward(key, state)
        return out + out @ self.adapter if key.num_active_loras else out

    def expected_with(self, batch, loras):
        out = self.expected(batch)
        return out + out @ self.adapter if loras else out


def test_key_misses_a_dimension(place, make_pool):
    """A batch with adapters never runs on a graph captured without; vLLM PR 28318."""
    model, owner = LoraModel(place.device), Owner(place.device)
    right = model.expected_with(BATCH, 1)
    plain, adapted = key_of(4), key_of(4, num_active_loras=1)

    # The fault: graphs by token count, so the batch with an adapter finds the other graph.
    graphs = {4: by_hand(place, model.forward, plain, owner.build(plain, None, Phase.CAPTURE))}
    owner.build(plain, BATCH, Phase.REPLAY)
    graphs[BATCH.num_reqs].replay()
    assert not is_close(graphs[BATCH.num_reqs].outputs, right)

    pool = make_pool("draft", owner=owner)
    pool.capture([plain], model.forward)
    assert pool.dispatch(num_tokens=4, num_reqs=4, num_active_loras=1) is None
    assert pool.statistics().missed == {"num_active_loras": 1}
    with pytest.raises(KeyMismatchError) as caught:
        pool.refresh(adapted, BATCH)
    assert caught.value.missing == (adapted,)
    assert caught.value.nearest == (plain,)

    pool.capture([adapted], model.forward)
    for loras, key in ((1, adapted), (0, plain)):
        assert pool.dispatch(num_tokens=4, num_reqs=4, num_active_loras=loras) == key
        pool.refresh(key, BATCH)
        assert is_close(pool.replay(key), model.expected_with(BATCH, loras))


class RankDescriptor(BatchDescriptor):
    """An engine's own dimensions."""

    lora_rank: int | None = bound(default=0)
    quantised: bool = exact(default=False)


def test_key_misses_a_dimension_of_the_engine_itself(make_pool, place):
    """A subclass's fields are matched as declared, and tell keys apart; vLLM PR 28318."""
    pool = make_pool("draft", owner=Owner(place.device))
    keys = [
        RankDescriptor(4, 4, lora_rank=8),
        RankDescriptor(4, 4, lora_rank=64),
        RankDescriptor(4, 4, quantised=True),
    ]
    pool.capture(keys, Model(place.device).forward)
    assert pool.dispatch(RankDescriptor(3, 3, lora_rank=16)) == keys[1]
    assert pool.dispatch(RankDescriptor(3, 3, lora_rank=65)) is None
    assert pool.dispatch(num_tokens=3, num_reqs=3, quantised=True) == keys[2]
    assert pool.dispatch(num_tokens=3, num_reqs=3, lora_rank=1, quantised=True) is None
    assert key_of(4) not in pool


def _first_match(sizes, length):
    """A dispatch in which a uniform key stands in for the mixed one of the same size."""
    keys = {}
    for size in sizes:
        keys[size] = "uniform" if size % length == 0 else "mixed"

    def dispatch(num_tokens, *, uniform):
        size = min((size for size in sizes if size >= num_tokens), default=None)
        if size is None or (keys[size] == "uniform" and not uniform):
            return None
        return size

    return dispatch


def test_key_never_hit(place, make_pool):
    """Every batch in the captured range has a key, uniform or not; vLLM PR 36165, issue 53407."""
    sizes, length, most = [1, 2, 4, 8], 2, MAX_REQS

    # The fault: some batches in the range fall through to eager, and nobody is told.
    naive = _first_match(sizes, length)
    assert [n for n in range(1, 9) if naive(n, uniform=False) is None] == [2, 3, 4, 5, 6, 7, 8]

    pool = make_pool("target", owner=Owner(place.device))
    model = Model(place.device)
    pool.capture(
        capture_descriptors(sizes, max_num_reqs=most, uniform_query_lens=[length]),
        lambda key, state: model.x.sum() + state.attn_metadata.seq_lens.sum(),
    )
    hits = {}
    for tokens in range(1, max(sizes) + 1):
        for reqs in range(1, min(tokens, most) + 1):
            lengths = [None] + ([length] if tokens == reqs * length else [])
            for each in lengths:
                shape = {"num_tokens": tokens, "num_reqs": reqs, "uniform_query_len": each}
                key = pool.dispatch(**shape)
                assert key.covers(BatchDescriptor(**shape))
                hits[key] = hits.get(key, 0) + 1
    assert pool.statistics().missed == {}
    assert pool.statistics().dispatched == hits
    assert set(hits) == set(pool.keys())  # and no key was captured for nothing

    assert pool.dispatch(num_tokens=max(sizes) + 1, num_reqs=1) is None
    assert pool.dispatch(num_tokens=4, num_reqs=1, num_ubatches=2) is None
    assert pool.statistics().missed == {"num_tokens": 1, "num_ubatches": 1}


def test_keys_never_set_up(place, make_pool):
    """Missing keys are refused at capture, before any build, by name; vLLM PR 47460."""
    owner, model = Owner(place.device), Model(place.device)
    draft = Model(place.device, seed=1)

    # The fault: a draft whose keys were never set up finds no graph, and runs eagerly for ever.
    target, prefill = make_pool("target", owner=owner), make_pool("draft.prefill")
    share_states(target, prefill)
    assert prefill.dispatch(num_tokens=4, num_reqs=4) is None
    assert prefill.statistics().missed == {"no_keys": 1}

    with pytest.raises(KeyMismatchError) as caught:
        prefill.capture([key_of(4)], draft.forward)
    assert caught.value.missing == (key_of(4),)
    assert caught.value.nearest == ()

    target.capture([key_of(4), key_of(2)], model.forward)
    builds, calls = len(owner.builds), []
    with pytest.raises(KeyMismatchError) as caught:
        prefill.capture(
            [key_of(2), key_of(4), key_of(8), key_of(1)],
            lambda key, state: calls.append(key),
        )
    assert set(caught.value.missing) == {key_of(8), key_of(1)}
    assert set(caught.value.nearest) == {key_of(4), key_of(2)}
    assert calls == []
    assert len(owner.builds) == builds
    assert len(prefill) == 0
    assert prefill.statistics().refusals == {"KeyMismatchError": 2}


class StridedModel(Model):
    """Sums the inputs of each request, all of one query length: what a uniform kernel bakes in."""

    def forward(self, key, state):
        rows = self.x[: key.num_tokens].view(key.num_reqs, key.uniform_query_len, HEAD_SIZE)
        return rows.sum(1) + state.attn_metadata.seq_lens[:, None]

    def summed(self, batch, query_lens):
        parts = self.x[: sum(query_lens)].split(list(query_lens))
        sums = torch.stack([part.sum(0) for part in parts])
        return sums + torch.tensor(batch.seq_lens, device=sums.device)[:, None]


def test_uniform_captured_varied_replayed(place, make_pool):
    """A key for one query length covers no batch of others; SGLang PR 21987."""
    key = BatchDescriptor(8, 4, uniform_query_len=2)
    mixed = BatchDescriptor(8, 4)
    model, owner = StridedModel(place.device), Owner(place.device)
    uniform, varied = (2, 2, 2, 2), (1, 3, 2, 2)

    # The fault: found by its number of tokens alone.
    graph = by_hand(place, model.forward, key, owner.build(key, None, Phase.CAPTURE))
    owner.build(key, BATCH, Phase.REPLAY)
    graph.replay()
    assert is_close(graph.outputs, model.summed(BATCH, uniform))
    assert not is_close(graph.outputs, model.summed(BATCH, varied))

    pool = make_pool("target", owner=owner)
    pool.capture([key], model.forward)
    assert not key.covers(mixed)
    assert not key.covers(BatchDescriptor(8, 2, uniform_query_len=4))
    assert not key.covers(BatchDescriptor(4, 4, uniform_query_len=1))
    assert pool.dispatch(num_tokens=8, num_reqs=4) is None
    assert pool.dispatch(num_tokens=8, num_reqs=4, max_query_len=3) is None
    assert pool.dispatch(num_tokens=8, num_reqs=2, uniform_query_len=4) is None
    assert pool.statistics().missed == {"uniform_query_len": 3}
    assert pool.dispatch(num_tokens=6, num_reqs=3, uniform_query_len=2) == key


class Wrapper:
    """A planned kernel call: it serves the query length of its plan."""

    def __init__(self, plan):
        self.plan = plan  # [tokens] int64: each token's request
        self.query_len = 0


class WrapperOwner(Owner):
    """One wrapper for each number of requests, planned anew in each build."""

    def __init__(self, device):
        super().__init__(device)
        self.wrappers = {}

    def build(self, key, batch, phase):
        metadata, slots = super().build(key, batch, phase)
        wrapper = self.wrappers.get(key.num_reqs)
        if wrapper is None:
            plan = torch.zeros(2 * MAX_REQS, dtype=torch.int64, device=self.device)
            wrapper = self.wrappers[key.num_reqs] = Wrapper(plan)
        wrapper.query_len = key.uniform_query_len
        rows = torch.arange(key.num_reqs, device=self.device)
        wrapper.plan[: key.num_tokens] = rows.repeat_interleave(key.uniform_query_len)
        return AttentionState((metadata, wrapper), slots)


def _planned(model):
    def forward(key, state):
        metadata, wrapper = state.attn_metadata
        tokens = wrapper.query_len * metadata.seq_lens.shape[0]
        inputs = model.x[torch.arange(tokens, device=model.x.device) % MAX_REQS]
        out = torch.zeros_like(metadata.block_table[:, :HEAD_SIZE], dtype=torch.float32)
        return out.index_add_(0, wrapper.plan[:tokens], inputs)

    return forward


def test_wrapper_keyed_by_batch_size_only(place, make_pool):
    """Keys of one batch size and two query lengths are two keys; local-inference-lab/vllm 396."""
    short, long = (BatchDescriptor(4 * n, 4, uniform_query_len=n) for n in (1, 2))
    model = Model(place.device)
    forward = _planned(model)

    def right(key):
        inputs = model.x[torch.arange(key.num_tokens, device=model.x.device) % MAX_REQS]
        return inputs.view(4, key.uniform_query_len, HEAD_SIZE).sum(1)

    # The fault: a graph by batch size, captured for the one query length, serves the other.
    owner = WrapperOwner(place.device)
    graph = by_hand(place, forward, long, owner.build(long, None, Phase.CAPTURE))
    owner.build(short, BATCH, Phase.REPLAY)
    graph.replay()
    assert not is_close(graph.outputs, right(short))

    owner = WrapperOwner(place.device)
    pool = make_pool("target", owner=owner)
    pool.capture([short, long], forward)
    assert {key for key, _ in owner.builds} == {short, long}
    for key in (short, long):
        length = key.uniform_query_len
        assert pool.dispatch(num_tokens=4 * length, num_reqs=4, uniform_query_len=length) == key
        pool.refresh(key, BATCH)
        assert is_close(pool.replay(key), right(key))

    # The wrapper's plan is one memory: the key that was planned first is stale by now.
    pool.refresh(short, BATCH)
    pool.refresh(long, BATCH)
    with pytest.raises(StaleStateError) as caught:
        pool.replay(short)
    assert caught.value.rule is Staleness.OVERWRITTEN
    assert caught.value.written_by == ("target", long)


class SpacedOwner(Owner):
    """Buffers for each key apart, as an engine with a plan for each graph has them."""

    def __init__(self, device):
        super().__init__(device)
        self.apart = {}

    def build(self, key, batch, phase):
        self.builds.append((key, phase))
        return self.apart.setdefault(key, Owner(self.device)).write(batch, key.num_reqs)

    def writes(self, key):
        own = self.apart[key]
        return [own.seq_lens.tensor, own.block_table.tensor, own.slot_mapping.tensor]


@pytest.mark.parametrize("owner_type", [Owner, SpacedOwner])
def test_borrowed_but_dispatched_again(place, make_pool, owner_type):
    """A borrower follows the lender's choice and not one of its own; vLLM, both runners."""
    model, draft = Model(place.device), Model(place.device, seed=1)
    uniform, mixed = key_of(4, uniform_query_len=1), key_of(4)
    earlier = Batch((6, 2, 7), shift=5)

    def pools(checks):
        target = make_pool("target", owner=owner_type(place.device), checks=checks)
        prefill = make_pool("draft.prefill", checks=checks)
        shared = share_states(target, prefill)
        target.capture([uniform, mixed], model.forward)
        prefill.capture([uniform, mixed], draft.forward)
        for key, batch in ((mixed, earlier), (uniform, BATCH)):
            target.refresh(key, batch)
        target.replay(uniform)
        # The draft knows less of the batch, so it picks another key of the same size.
        again = prefill.dispatch(num_tokens=4, num_reqs=4)
        assert again == mixed
        return prefill, shared, again

    prefill, shared, again = pools("off")
    if owner_type is SpacedOwner:
        assert not is_close(prefill.replay(again), draft.expected(BATCH))

    prefill, shared, again = pools("fast")
    with pytest.raises(StaleStateError) as caught:
        prefill.replay(again)
    assert caught.value.key == mixed
    assert caught.value.rule in (Staleness.OVERWRITTEN, Staleness.SUPERSEDED)
    assert shared.live_key == uniform
    assert is_close(prefill.replay(shared.live_key), draft.expected(BATCH))
    assert shared.live_key is None  # used up


def test_live_key_under_a_key_map(place, make_pool):
    """``live_key`` is the consumer's own key, whatever the producer calls it; vLLM PR 28318."""
    model, draft = Model(place.device), Model(place.device, seed=1)
    target, prefill = make_pool("target", owner=Owner(place.device)), make_pool("draft.prefill")
    shared = share_states(target, prefill, key=lambda key: key_of(4, num_active_loras=1))
    target.capture([key_of(4, num_active_loras=1), key_of(2)], model.forward)
    prefill.capture([key_of(4)], draft.forward)
    target.refresh(key_of(2), Batch((3, 4)))
    assert shared.live_key is None
    target.refresh(key_of(4, num_active_loras=1), BATCH)
    assert shared.live_key == key_of(4)
    assert is_close(prefill.replay(key_of(4)), draft.expected(BATCH))
