"""Public incidents, with FlashAttention's kernels: the fault planted, and refused or prevented."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from graphshare import (
    AddressChangedError,
    AttentionState,
    BakedValueChangedError,
    BatchDescriptor,
    GraphPool,
    Phase,
    StaleStateError,
    share_states,
)
from graphshare.adapters.flash_attn import FlashAttention3Owner
from graphshare.adapters.paged import PagedBatch
from graphshare.testing import check_owner
from tests.flash_attn_models import (
    CAPACITY,
    DEVICE,
    TARGET,
    TOLERANCE,
    Model,
    batches_of,
    make_borrower,
    make_owner,
    shape_of,
)
from tests.required_kernels import required

pytestmark = pytest.mark.gpu

LARGE, SMALL = (BatchDescriptor(n, n, uniform_query_len=1) for n in (16, 4))
MIXED = BatchDescriptor(512, 16)


def planted(cls, **options):
    """An owner with a fault."""
    return required(lambda: cls(CAPACITY, shape_of(TARGET), DEVICE, **options))


def test_stale_contents_at_capture():
    """What the tuple that the target captured on holds by then; vLLM PR 48261."""
    owner = make_owner("fa3", num_splits=16)
    own = make_owner("fa3", num_splits=16)
    expected = own.build(LARGE, None, Phase.CAPTURE).attn_metadata.scheduler_metadata.clone()

    # The fault: state objects kept from the target's captures, largest first.
    kept = {key: owner.build(key, None, Phase.CAPTURE) for key in (LARGE, SMALL)}
    found = kept[LARGE].attn_metadata.scheduler_metadata.clone()
    vectors = found[:-1].view(-1, LARGE.num_reqs).tolist()
    print(f"\nfor {LARGE}, as handed over: {vectors}")
    print(f"as built for it:      {expected[:-1].view(-1, LARGE.num_reqs).tolist()}")
    assert not torch.equal(found, expected)
    assert vectors[0].count(0) > 0  # requests without rows
    draft = Model(make_borrower("fa3"), TARGET)
    batch = next(b for b in batches_of(LARGE, 200) if b.num_reqs == LARGE.num_reqs)
    draft.prepare(batch)
    fresh = own.build(LARGE, batch, Phase.REPLAY)
    mixed = AttentionState(
        dataclasses.replace(fresh.attn_metadata, scheduler_metadata=found), fresh.slot_mappings
    )
    assert not draft.errors(draft.forward(LARGE, mixed), batch) < TOLERANCE

    # The owner refills for each key, before each warmup and each capture of the borrower.
    target = GraphPool("target", owner=owner, spec=owner.spec, device=DEVICE)
    prefill = GraphPool("draft.prefill", spec=draft.kernel.spec, device=DEVICE)
    share_states(target, prefill)
    target.capture([LARGE, SMALL], Model(owner, TARGET).forward)
    seen = []

    def forward(key, state):
        seen.append((key, state.attn_metadata.scheduler_metadata.clone()))
        return draft.forward(key, state)

    prefill.capture([LARGE, SMALL], forward)
    assert [key for key, _ in seen] == [LARGE, SMALL] * 2
    (_, warmup), *_ = seen
    assert torch.equal(warmup, expected)
    target.refresh(LARGE, batch)
    draft.prepare(batch)
    assert draft.errors(prefill.replay(LARGE), batch) < TOLERANCE


class Deciding(FlashAttention3Owner):
    """Chooses the number of splits by the batch, as the library's heuristic does."""

    def build(self, key, batch, phase):
        self._num_splits = 4 if batch is None or batch.max_seq_len < 1024 else 32
        self._plans.clear()
        return super().build(key, batch, phase)


def test_host_value_frozen():
    """The number of splits at build and at launch; vLLM issue 20301, PR 25490, 27128."""
    owner = planted(Deciding)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    pool.capture([SMALL], Model(owner, TARGET).forward)
    pool.refresh(SMALL, PagedBatch.of([1], [500], [[1, 2]], 256))
    with pytest.raises(BakedValueChangedError) as caught:
        pool.refresh(SMALL, PagedBatch.of([1], [2000], [[1, 2, 3, 4, 5, 6, 7, 8]], 256))
    assert caught.value.path == "attn_metadata.num_splits"
    with pytest.raises(StaleStateError):
        pool.replay(SMALL)


def test_wrapper_keyed_by_batch_size_only():
    """One state for one row a request and for four; local-inference-lab/vllm 396."""
    owner = make_owner("fa3")
    four = BatchDescriptor(64, 16, uniform_query_len=4)
    pool = GraphPool("target", owner=owner, device=DEVICE, state_key=lambda key: key.num_reqs)
    with pytest.raises((AddressChangedError, BakedValueChangedError)):
        pool.capture([LARGE, four], Model(owner, TARGET).forward)
    assert len(pool) == 0


class Unpadded(FlashAttention3Owner):
    """Writes the live rows alone: those past them keep an earlier batch's lengths and pages."""

    def build(self, key, batch, phase):
        views = self._buffers.views(key)
        tables, lens = views.block_table.clone(), views.seq_lens.clone()
        starts = views.query_start_loc.clone()
        state = super().build(key, batch, phase)
        if batch is None:
            return state
        live = batch.num_reqs
        views.block_table[live:] = tables[live:]
        views.seq_lens[live:] = lens[live:]
        views.query_start_loc[live + 1 :] = torch.maximum(
            starts[live + 1 :], views.query_start_loc[live]
        )
        new = self._library.get_scheduler_metadata(**self._plans[key].arguments)
        plan = self._plans[key]
        plan.vectors.copy_(new[:-1].view(plan.vectors.shape[0], -1)[:, : plan.vectors.shape[1]])
        return state


def test_padding_rows_undefined():
    """Rows past the batch attend to another batch's pages; vLLM PR 21691, 34903."""
    owner = planted(Unpadded)
    model = Model(owner, TARGET)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    pool.capture([LARGE], model.forward)
    full = max(batches_of(LARGE, 50), key=lambda each: each.num_reqs)
    one = PagedBatch.of([1], [300], [[1, 2]], 256)
    pool.refresh(LARGE, full)
    pool.replay(LARGE)
    (out,) = model.outputs[LARGE]
    model.prepare(one, [out])
    pool.refresh(LARGE, one)
    pool.replay(LARGE)
    assert out[1:].isnan().any()  # of pages that nobody holds
    report = check_owner(
        owner, [LARGE, SMALL], lambda key: batches_of(key, 4), device=torch.device(DEVICE, 0)
    )
    assert "padding" in {each.check for each in report.rejections}, str(report)


class Growing(FlashAttention3Owner):
    """Allocates the plan when one is too large for the buffer."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._schedule = self._schedule[:0].clone()

    def build(self, key, batch, phase):
        needed = (-(-self.capacity.num_reqs(key) // 4) * 4) * 3 + 1
        if self._schedule.shape[0] < needed:
            self._schedule = torch.zeros(needed, dtype=torch.int32, device=self.device)
            self._plans.clear()
        return super().build(key, batch, phase)


def test_workspace_grew_after_capture():
    """Fewer rows of more requests need a larger plan; TensorRT-LLM 16319."""
    owner = planted(Growing)
    few = BatchDescriptor(64, 2)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    pool.capture([few], Model(owner, TARGET).forward)
    with pytest.raises(AddressChangedError) as caught:
        pool.capture([LARGE], Model(owner, TARGET).forward)
    assert caught.value.path == "attn_metadata.scheduler_metadata"
    assert few in caught.value.keys
    assert LARGE not in pool
    # All keys warm up first, so one capture of both finds the buffer large enough.
    owner = planted(Growing)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    pool.capture([few, LARGE], Model(owner, TARGET).forward)
    assert len(pool) == 2


def test_two_plans_in_one_workspace():
    """Each plan overwrites the other's; TensorRT-LLM 18436."""
    first, second = make_owner("fa3"), make_owner("fa3")
    second._schedule = first._schedule
    model = Model(first, TARGET)
    other = Model(second, TARGET, seed=1)
    batch = next(b for b in batches_of(LARGE, 200) if b.num_reqs > 1)

    def pools(checks):
        one = GraphPool("one", owner=first, device=DEVICE, checks=checks)
        two = GraphPool("two", owner=second, device=DEVICE, checks=checks)
        one.capture([LARGE], model.forward)
        two.capture([LARGE], other.forward)
        model.prepare(batch)
        one.refresh(LARGE, batch)
        two.refresh(LARGE, PagedBatch.of([1], [1], [[1]], 256))
        return one

    with pytest.raises(StaleStateError) as caught:
        pools("fast").replay(LARGE)
    assert caught.value.written_by == ("two", LARGE)
    # Unchecked, the first graph runs on the second one's plan: one request has rows.
    assert not model.errors(pools("off").replay(LARGE), batch) < TOLERANCE
