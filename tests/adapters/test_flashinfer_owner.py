"""FlashInfer's owner, with a stand-in for the library: lists, wrappers, plans and their memory."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare import (
    BakedValueChangedError,
    BatchDescriptor,
    CaptureError,
    GraphPool,
    Phase,
    StaleStateError,
    capture_descriptors,
    share_states,
)
from graphshare.adapters.flashinfer import (
    DecodePlan,
    FA2Plan,
    FlashInfer,
    FlashInferOwner,
    PageLists,
    UnsupportedFlashInferError,
)
from graphshare.adapters.flashinfer.library import PRIVATE, find_flashinfer
from graphshare.adapters.paged import PagedBatch, PagedCapacity, dummy_batch
from graphshare.adapters.paged.shape import AttentionShape
from graphshare.testing import assert_owner_conforms
from tests.flashinfer_library import make_library
from tests.paged_kernels import random_batch

CAPACITY = PagedCapacity(
    max_num_tokens=32, max_num_reqs=8, max_seq_len=40, page_size=4, scratch_page=3
)
NUM_PAGES = 100
SHAPE = AttentionShape(num_q_heads=4, num_kv_heads=2, head_size=64)
KINDS: dict[str, dict[str, Any]] = {
    "decode": {},
    "fa2": {"decode_kernel": "fa2"},
    "fa3": {"kernel": "fa3", "decode_kernel": "fa3"},
    "batch_attention": {"kernel": "batch_attention", "decode_kernel": "batch_attention"},
}
KEYS = capture_descriptors([4, 32], 8, uniform_query_lens=[1, 4])
FLOATS = torch.zeros(6 << 20, dtype=torch.uint8)


def make_owner(kind: str, library: Any = None, **options: Any) -> FlashInferOwner:
    return FlashInferOwner(
        CAPACITY,
        SHAPE,
        "cpu",
        float_workspace=FLOATS,
        module=library or make_library(),
        **KINDS[kind],
        **options,
    )


def batches_of(key: BatchDescriptor, count: int) -> list[PagedBatch]:
    rng = random.Random(f"{key}")
    return [random_batch(rng, key, CAPACITY, NUM_PAGES) for _ in range(count)]


def forward(key: Any, state: Any) -> torch.Tensor:
    metadata = state.attn_metadata
    return metadata.kv_indices.sum() + metadata.kv_indptr[-1] + metadata.last_page_len.sum()


@st.composite
def steps(draw: st.DrawFn) -> tuple[BatchDescriptor, list[int], list[int], list[list[int]]]:
    key = draw(st.sampled_from(KEYS))
    num_reqs = draw(st.integers(1, CAPACITY.num_reqs(key)))
    length = key.uniform_query_len
    query_lens = [length or draw(st.integers(0, key.num_tokens // num_reqs))] * num_reqs
    seq_lens = [draw(st.integers(max(n, 1), CAPACITY.max_seq_len)) for n in query_lens]
    pages = draw(st.permutations(range(4, NUM_PAGES)))
    tables = [[pages.pop() for _ in range(-(-n // 4))] for n in seq_lens]
    return key, query_lens, seq_lens, tables


@given(st.lists(steps(), min_size=1, max_size=4))
def test_lists_are_the_batch_and_then_padding(
    batches: list[tuple[BatchDescriptor, list[int], list[int], list[list[int]]]],
) -> None:
    lists = PageLists(CAPACITY, "cpu")
    for key, query_lens, seq_lens, tables in batches:
        host = lists.write(key, PagedBatch.of(query_lens, seq_lens, tables, 4))
        views = lists.views(key)
        num_reqs, live = CAPACITY.num_reqs(key), len(seq_lens)
        rest = num_reqs - live
        rows, entries, pages = [0], [0], []
        for query_len, table in zip(query_lens, tables, strict=True):
            rows.append(rows[-1] + query_len)
            entries.append(entries[-1] + len(table))
            pages += table
        # Requests past the batch: no rows, one page, no token of it.
        entries += [entries[-1] + 1 + i for i in range(rest)]
        assert views.qo_indptr.tolist() == rows + [rows[-1]] * rest
        assert views.kv_indptr.tolist() == entries
        last = [(n - 1) % 4 + 1 for n in seq_lens] + [0] * rest
        assert views.last_page_len.tolist() == last
        size = num_reqs * CAPACITY.max_pages
        assert views.kv_indices.tolist() == pages + [3] * (size - len(pages))
        assert host.kv_lens.tolist() == seq_lens + [0] * rest
        for name in ("qo_indptr", "kv_indptr", "last_page_len"):
            assert torch.equal(getattr(host, name), getattr(views, name))
        assert (views.slot_mapping[rows[-1] :] == 12).all()


@pytest.mark.parametrize("kind", KINDS)
def test_owners_conform(kind: str) -> None:
    report = assert_owner_conforms(
        make_owner(kind, make_library(records=False)),
        KEYS,
        lambda key: batches_of(key, 4),
        device="cpu",
        impossible=lambda key: [PagedBatch.of([1], [41], [list(range(11))], 4)],
        bounds={"*.kv_indices": (0, NUM_PAGES - 1)},
        scratch=["*_workspace"],
    )
    assert report.ok


@pytest.mark.parametrize("kind", KINDS)
def test_a_borrower_follows_every_key(kind: str) -> None:
    owner = make_owner(kind)
    target = GraphPool("target", owner=owner, spec=owner.spec, device="cpu")
    kernel = FlashInfer(CAPACITY, SHAPE, module=make_library())
    prefill = GraphPool("draft", spec=kernel.spec, device="cpu")
    shared = share_states(target, prefill)
    target.capture(KEYS, forward)
    prefill.capture(KEYS, forward)
    for key in KEYS:
        for batch in batches_of(key, 3):
            target.refresh(key, batch)
            assert target.replay(key) == prefill.replay(shared.live_key)
    assert shared.spec_checked


@pytest.mark.parametrize("kind", KINDS)
def test_a_loan_is_proven_by_verify(kind: str) -> None:
    owner, own = make_owner(kind), make_owner(kind)
    target = GraphPool("target", owner=owner, spec=owner.spec, device="cpu")
    draft = GraphPool("draft", owner=own, spec=own.spec, device="cpu")
    shared = share_states(target, draft)
    target.capture(KEYS, forward)
    draft.capture(KEYS, forward)
    for key in KEYS:
        (batch,) = batches_of(key, 1)
        target.refresh(key, batch)
        shared.verify(batch)


@pytest.mark.parametrize("kind", ["decode", "fa2", "fa3"])
def test_every_key_has_its_own_wrapper_and_workspace(kind: str) -> None:
    """local-inference-lab/vllm 396: keys with as many requests, but other rows."""
    owner = make_owner(kind)
    planned = [owner.build(key, None, Phase.WARMUP).attn_metadata.planned[0] for key in KEYS]
    assert len({id(each.launch) for each in planned}) == len(KEYS)
    assert len({each.int_workspace.data_ptr() for each in planned}) == len(KEYS)
    for key, each in zip(KEYS, planned, strict=True):
        alone = kind == "decode" and key.uniform_query_len == 1
        assert isinstance(each.plan, DecodePlan if alone else FA2Plan) or kind == "fa3"


def test_keys_of_batch_attention_share_one_plan_and_one_is_fresh() -> None:
    owner = make_owner("batch_attention")
    pool = GraphPool("target", owner=owner, device="cpu", live_keys=2)
    pool.capture(KEYS, forward)
    launches = {id(pool.states[key].attn_metadata.planned[0].launch) for key in KEYS}
    assert len(launches) == 1
    for key in KEYS[:2]:
        pool.refresh(key, batches_of(key, 1)[0])
    with pytest.raises(StaleStateError):
        pool.replay(KEYS[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_changed_is_named(kind: str) -> None:
    library = make_library()
    owner = make_owner(kind, library)
    pool = GraphPool("target", owner=owner, device="cpu")
    pool.capture(KEYS, forward)
    key = next(key for key in KEYS if key.uniform_query_len == 1)
    (batch,) = batches_of(key, 1)
    pool.refresh(key, batch)
    planner = pool.states[key].attn_metadata.planned[0].launch
    changed = list(planner.plan)
    changed[-2] += 1
    compiled = planner._compiled.plan
    planner._compiled.plan = lambda *args: [compiled(*args), changed][1]
    with pytest.raises(BakedValueChangedError) as refused:
        pool.refresh(key, batch)
    name = type(planner.plan)._fields[-2]
    assert refused.value.path == f"attn_metadata.planned.0.plan.{name}"
    planner._compiled.plan = compiled
    pool.refresh(key, batch)
    pool.replay(key)


@pytest.mark.parametrize("kind", KINDS)
def test_a_build_plans_for_further_models_too(kind: str) -> None:
    library = make_library()
    draft = AttentionShape(num_q_heads=16, num_kv_heads=2, head_size=64)
    owner = make_owner(kind, library, also=[draft])
    kernel = FlashInfer(CAPACITY, draft, module=library)
    assert owner.spec.differing(kernel.spec) == ()
    for key in KEYS:
        state = owner.build(key, None, Phase.WARMUP)
        library.plans.clear()
        state = owner.build(key, batches_of(key, 1)[0], Phase.REPLAY)
        assert [a.num_qo_heads for _, a in library.plans] == [4, 16]
        query = torch.ones(key.num_tokens, 16, 64)
        library.runs.clear()
        kernel.run(query, query, query, state.attn_metadata)
        ((wrapper, _),) = library.runs
        assert wrapper is state.attn_metadata.planned[1].launch.wrapper


def test_a_launch_has_the_scale_and_mask_of_the_model_that_runs() -> None:
    library = make_library()
    owner = make_owner("fa2", library)
    other = AttentionShape(
        num_q_heads=4, num_kv_heads=2, head_size=64, causal=False, softmax_scale=0.5
    )
    kernel = FlashInfer(CAPACITY, other, module=library)
    key = KEYS[0]
    metadata = owner.build(key, None, Phase.WARMUP).attn_metadata
    query = torch.ones(key.num_tokens, 4, 64)
    for model, causal, scale in ((kernel, False, 0.5), (owner, True, None), (kernel, False, 0.5)):
        model.run(query, query, query, metadata)
        wrapper, given = library.runs[-1]
        assert (wrapper._causal, wrapper._sm_scale) == (causal, scale)
        assert given.q.shape == given.out.shape == query.shape


def test_rows_that_no_request_has_are_zero() -> None:
    """A key of one row a request that bounds requests below its rows."""
    library = make_library()
    owner = FlashInferOwner(
        PagedCapacity(max_num_tokens=8, max_num_reqs=4, max_seq_len=40, page_size=4),
        SHAPE,
        "cpu",
        module=library,
        float_workspace=FLOATS,
    )
    key = BatchDescriptor(8, uniform_query_len=1)
    metadata = owner.build(key, None, Phase.WARMUP).attn_metadata
    query = torch.ones(8, 4, 64)
    out = owner.run(query, query, query, metadata)
    assert out[:4].eq(1).all()
    assert out[4:].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_uniform_key_takes_no_other_lengths(kind: str) -> None:
    owner = make_owner(kind)
    key = BatchDescriptor(8, 2, uniform_query_len=4)
    before = owner.build(key, batches_of(key, 1)[0], Phase.REPLAY).attn_metadata.kv_indices.clone()
    for lengths in ([4, 2], [6, 2]):
        batch = PagedBatch.of(lengths, lengths, [[5, 7], [6]], 4)
        with pytest.raises(ValueError, match="expected 4 rows of every request"):
            owner.build(key, batch, Phase.REPLAY)
    assert torch.equal(owner.lists.views(key).kv_indices, before)


@pytest.mark.parametrize("kind", KINDS)
def test_another_library_is_refused_when_a_wrapper_is_made(kind: str) -> None:
    for name in PRIVATE[kind]:
        if name == "_plan_info":
            continue
        owner = make_owner(kind, make_library(without=(name,)))
        with pytest.raises(UnsupportedFlashInferError, match=name):
            owner.build(KEYS[-1], None, Phase.WARMUP)
    owner = make_owner(kind, make_library(more_numbers=[0]))
    with pytest.raises(UnsupportedFlashInferError, match="numbers") as refused:
        owner.build(KEYS[-1], None, Phase.WARMUP)
    assert refused.value.version == "0.6.14"
    library = make_library()
    for cls in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        delattr(library, cls)
    del library.BatchAttention
    with pytest.raises(UnsupportedFlashInferError):
        make_owner(kind, library).build(KEYS[-1], None, Phase.WARMUP)


def test_a_float_workspace_too_small_is_refused_with_what_it_would_take() -> None:
    owner = FlashInferOwner(
        CAPACITY, SHAPE, "cpu", module=make_library(), float_workspace=FLOATS[: 1 << 10]
    )
    with pytest.raises(ValueError, match="a float workspace of 1024 bytes"):
        owner.build(KEYS[0], None, Phase.WARMUP)


@pytest.mark.parametrize(
    "workspace",
    [
        torch.zeros(64),
        torch.zeros(8, 8, dtype=torch.uint8),
        torch.zeros(64, dtype=torch.uint8)[::2],
        torch.zeros(64, dtype=torch.uint8, device="meta"),
    ],
)
def test_a_float_workspace_of_another_kind_is_refused(workspace: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="float_workspace"):
        FlashInferOwner(CAPACITY, SHAPE, "cpu", module=make_library(), float_workspace=workspace)


@pytest.mark.parametrize("options", [{"kernel": "fa4"}, {"decode_kernel": ""}])
def test_a_kernel_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kernel"):
        FlashInferOwner(CAPACITY, SHAPE, "cpu", module=make_library(), **options)


def test_memory_counts_keys_and_what_they_share() -> None:
    owner = make_owner("decode")
    for key in KEYS:
        owner.build(key, None, Phase.WARMUP)
    memory = owner.memory()
    assert set(memory.keys) == set(KEYS)
    for key, cost in memory.keys.items():
        planned = owner.build(key, None, Phase.CAPTURE).attn_metadata.planned
        assert cost.device_bytes == planned[0].int_workspace.numel() < 16 << 10
        assert cost.pinned_bytes == 3 * cost.device_bytes
    assert memory.shared.device_bytes == 0
    assert memory.device_bytes == (
        sum(cost.device_bytes for cost in memory.keys.values())
        + memory.lists_bytes
        + FLOATS.numel()
    )
    alone = make_owner("batch_attention")
    for key in KEYS:
        alone.build(key, None, Phase.WARMUP)
    (planned,) = alone.build(KEYS[0], None, Phase.CAPTURE).attn_metadata.planned
    assert alone.memory().shared.device_bytes == planned.int_workspace.numel()
    assert all(cost.device_bytes == 0 for cost in alone.memory().keys.values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_during_a_capture(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphshare.adapters.flashinfer import owner as room

    def capturing(device: torch.device) -> None:
        raise CaptureError("FlashInfer: a plan during a capture")

    owner = make_owner(kind)
    before = owner.lists.memory.clone()
    monkeypatch.setattr(room, "refuse_under_capture", capturing)
    with pytest.raises(CaptureError):
        owner.build(KEYS[0], None, Phase.WARMUP)
    assert torch.equal(owner.lists.memory, before)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModuleNotFoundError, match=r"graphshare\[flashinfer\]"):
        find_flashinfer()


def test_an_owner_for_one_row_a_request_takes_no_other_key() -> None:
    owner = FlashInferOwner(
        CAPACITY, SHAPE, "cpu", kernel="decode", module=make_library(), float_workspace=FLOATS
    )
    assert owner.spec.kernels == {"decode"}
    for key in KEYS:
        if key.uniform_query_len == 1:
            owner.build(key, None, Phase.WARMUP)
        else:
            with pytest.raises(ValueError, match="takes any rows"):
                owner.build(key, None, Phase.WARMUP)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", [BatchDescriptor(33, 8), BatchDescriptor(32, 9)])
def test_a_key_beyond_the_capacity_is_refused(kind: str, key: BatchDescriptor) -> None:
    """Its views would lie over one another."""
    owner = make_owner(kind)
    before = owner.lists.memory.clone()
    with pytest.raises(ValueError, match="key: expected at most"):
        owner.build(key, None, Phase.WARMUP)
    assert torch.equal(owner.lists.memory, before)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_key_or_no_batch_is_refused_before_anything_is_written(kind: str) -> None:
    owner = make_owner(kind)
    batch = dummy_batch(KEYS[0], CAPACITY)
    owner.build(KEYS[0], batch, Phase.REPLAY)
    before = owner.lists.memory.clone()
    wrong: Any
    for wrong in (8, None, (8, 4), "key"):
        for step in (None, batch):
            with pytest.raises(TypeError, match="key: expected a BatchDescriptor"):
                owner.build(wrong, step, Phase.REPLAY)
    for key in KEYS:
        for wrong in (8, "batch", ([1], [1], [[1]])):
            with pytest.raises(TypeError, match="batch: expected a PagedBatch"):
                owner.build(key, wrong, Phase.REPLAY)
    assert torch.equal(owner.lists.memory, before)
