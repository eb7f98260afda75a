"""FlashInfer under graphs: replays against float32, and borrowed states against own ones."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings

import pytest
import torch

from graphshare import BatchDescriptor, GraphPool, Phase, share_states
from graphshare.adapters.flashinfer import (
    BatchAttentionPlan,
    DecodePlan,
    FA2Plan,
    batch_attention_float_bytes,
    decode_float_bytes,
    fa2_float_bytes,
)
from graphshare.adapters.paged import PagedBatch, dummy_batch
from graphshare.testing import assert_owner_conforms
from tests.flash_attn_models import batches_of, num_pages
from tests.flashinfer_models import (
    CAPACITY,
    DEVICE,
    KINDS,
    MANY,
    TARGET,
    TOLERANCE,
    Model,
    keys_of,
    make_borrower,
    make_owner,
)
from tests.paged_kernels import Shapes

pytestmark = pytest.mark.gpu

HEADS = {"grouped": Shapes(num_q_heads=8, num_kv_heads=2), "alone": Shapes(4, 4)}


@contextlib.contextmanager
def unsynchronized():
    """An error where the host would wait for the device, as far as torch notices."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not notice everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_replays_equal_float32(kind, heads):
    """Any lengths, requests and pages; no page that is not held is read, padding rows are zero."""
    shapes = HEADS[heads]
    owner = make_owner(kind, shapes)
    model = Model(owner, shapes, CAPACITY)
    pool = GraphPool("target", owner=owner, spec=owner.spec, device=DEVICE)
    keys = keys_of(kind)
    pool.capture(keys, model.forward)
    worst = 0.0
    for key in keys:
        (out,) = model.outputs[key]
        for batch in batches_of(key, 60 if key.num_tokens <= 64 else 20, capacity=CAPACITY):
            model.prepare(batch, [out])
            pool.refresh(key, batch)
            pool.replay(key)
            error = model.errors([out], batch)
            assert error < TOLERANCE, (key, batch.query_start_loc, batch.seq_lens)
            worst = max(worst, error)
            assert out[batch.num_tokens :].eq(0).all(), key
    print(f"\n{kind}, {heads}: {len(keys)} keys, worst relative error {worst:.1e}")


@pytest.mark.parametrize("num_reqs", [1, 8, 64, 256])
def test_decode_with_many_requests_and_few_live_ones(num_reqs):
    """Padding requests that the chunk search does not count would run on what the last batch left.

    They have a page for that reason; see `PageLists`.
    """
    owner = make_owner("decode", capacity=MANY)
    model = Model(owner, TARGET, MANY)
    key = BatchDescriptor(num_reqs, num_reqs, uniform_query_len=1)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    pool.capture([key], model.forward)
    (out,) = model.outputs[key]
    for batch in batches_of(key, 40, capacity=MANY):
        model.prepare(batch, [out])
        owner.float_workspace.fill_(0xFF)  # NaN, to any kernel that reads what it has not written
        pool.refresh(key, batch)
        pool.replay(key)
        assert model.errors([out], batch) < TOLERANCE
        assert out[batch.num_tokens :].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_on_the_device_gives_the_same_lists(kind):
    """Contiguous, a slice of a wider one, or transposed; and without waiting for the device."""
    owner = make_owner(kind)
    rng = random.Random(0)
    for key in keys_of(kind, (16,)):
        owner.build(key, None, Phase.CAPTURE)
        for batch in batches_of(key, 10, capacity=CAPACITY):
            rows, width = batch.block_table.shape
            wide = torch.full((rows, width + 5), -7, dtype=torch.int32, device=DEVICE)
            wide[:, 2 : 2 + width] = batch.block_table.to(DEVICE)
            table = rng.choice([wide[:, 2 : 2 + width], batch.block_table.T.to(DEVICE).T])
            slots = batch.slot_mapping.to(DEVICE)
            on_device = dataclasses.replace(batch, block_table=table, slot_mapping=slots)
            metadata, slot_mapping = owner.build(key, batch, Phase.REPLAY)
            expected = metadata.kv_indices.clone(), slot_mapping.clone()
            metadata.kv_indices.fill_(-1)
            slot_mapping.fill_(-1)
            with unsynchronized():
                owner.build(key, on_device, Phase.REPLAY)
            assert torch.equal(metadata.kv_indices, expected[0]), key
            assert torch.equal(slot_mapping, expected[1]), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_borrower_has_the_same_bits_as_one_that_builds(kind, layers):
    owner, own = make_owner(kind), make_owner(kind)
    model = Model(owner, TARGET, layers=2, capacity=CAPACITY)
    draft = Model(make_borrower(), TARGET, CAPACITY, layers=layers, seed=1)
    twin = Model(own, TARGET, CAPACITY, layers=layers, seed=1)
    target = GraphPool("target", owner=owner, spec=owner.spec, device=DEVICE)
    prefill = GraphPool("draft.prefill", spec=draft.kernel.spec, device=DEVICE)
    alone = GraphPool("alone", owner=own, device=DEVICE)
    shared = share_states(target, prefill)
    keys = keys_of(kind)
    target.capture(keys, model.forward)
    prefill.capture(keys, draft.forward)
    alone.capture(keys, twin.forward)
    for key in keys:
        for batch in batches_of(key, 12, seed=1, capacity=CAPACITY):
            for each in (model, draft, twin):
                each.prepare(batch)
            target.refresh(key, batch)
            assert model.errors(target.replay(key), batch) < TOLERANCE
            borrowed = prefill.replay(shared.live_key)
            alone.refresh(key, batch)
            for one, two in zip(borrowed, alone.replay(key), strict=True):
                assert torch.equal(one, two), key
            assert draft.errors(borrowed, batch) < TOLERANCE
    assert prefill.statistics().builds_avoided == 12 * len(keys)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loan_is_proven_by_verify(kind):
    owner, own = make_owner(kind), make_owner(kind)
    target = GraphPool("target", owner=owner, spec=owner.spec, device=DEVICE)
    prefill = GraphPool("draft.prefill", owner=own, spec=own.spec, device=DEVICE)
    shared = share_states(target, prefill)
    keys = keys_of(kind, (16,))
    target.capture(keys, Model(owner, TARGET, CAPACITY).forward)
    prefill.capture(keys, Model(own, TARGET, CAPACITY).forward)
    for key in keys:
        for batch in batches_of(key, 3, seed=3, capacity=CAPACITY):
            target.refresh(key, batch)
            shared.verify(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_owners_conform(kind):
    owner = make_owner(kind, Shapes(8, 2))
    keys = keys_of(kind, (4, 16))
    report = assert_owner_conforms(
        owner,
        keys,
        lambda key: batches_of(key, 4, seed=4, capacity=CAPACITY),
        device=DEVICE,
        impossible=lambda key: [_longer(key)],
        bounds={"*.kv_indices": (0, num_pages(CAPACITY) - 1)},
        scratch=["*_workspace"],
    )
    print(report)


def _longer(key: BatchDescriptor) -> PagedBatch:
    pages = list(range(1, CAPACITY.max_pages + 2))
    return PagedBatch.of([1], [CAPACITY.max_seq_len + 1], [pages], CAPACITY.page_size)


def test_a_fixed_plan_costs_what_the_formulas_say():
    """Float workspaces: offsets of real plans, against the sizes computed beforehand."""
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for heads in ((8, 2), (32, 8), (4, 4)):
        shapes = Shapes(*heads)
        for kind in KINDS:
            owner = make_owner(kind, shapes)
            for key in keys_of(kind):
                state = owner.build(key, dummy_batch(key, CAPACITY), Phase.WARMUP)
                (planned,) = state.attn_metadata.planned
                plan = planned.plan
                rows, reqs = CAPACITY.max_num_rows(key), CAPACITY.num_reqs(key)
                if isinstance(plan, FA2Plan):
                    blocks = plan.padded_batch_size * plan.cta_tile_q
                    end = plan.s_offset + heads[0] * blocks * 4
                    assert end == fa2_float_bytes(rows, reqs, *heads, 128, num_sms), (heads, key)
                elif isinstance(plan, DecodePlan):
                    end = plan.s_offset + heads[0] * plan.padded_batch_size * 4
                    assert end <= decode_float_bytes(*heads, 128, num_sms)
                elif isinstance(plan, BatchAttentionPlan):
                    splits = plan.partial_lse_offset // (2 * 128 * heads[1])
                    end = plan.partial_lse_offset + splits * 4 * heads[1]
                    assert end == batch_attention_float_bytes(heads[1], 128, num_sms)
                else:
                    end = 0
                assert end <= owner.float_workspace.numel()
            memory = owner.memory()
            print(
                f"\n{kind} {heads}: {memory.float_workspace_bytes:,} float, shared", memory.shared
            )
            for key, cost in memory.keys.items():
                print("  ", key, cost)
                assert cost.device_bytes < 128 << 10
            assert memory.shared.device_bytes < 8 << 20
