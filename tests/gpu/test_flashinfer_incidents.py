"""Public incidents with FlashInfer's kernels: each kind planted, and refused or prevented."""

from __future__ import annotations

import pytest
import torch

from graphshare import (
    AddressChangedError,
    BakedValueChangedError,
    BatchDescriptor,
    CaptureError,
    GraphPool,
    Phase,
    StaleStateError,
    share_states,
)
from graphshare.adapters.flashinfer import FlashInferOwner
from graphshare.adapters.paged import PagedBatch, dummy_batch
from graphshare.lease import Staleness
from tests.flash_attn_models import batches_of
from tests.flashinfer_models import (
    CAPACITY,
    DEVICE,
    KINDS,
    TARGET,
    TOLERANCE,
    Model,
    keys_of,
    make_borrower,
    make_owner,
    shape_of,
)
from tests.paged_kernels import Shapes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", KINDS)
def test_stale_contents_at_capture(kind):
    """vLLM PR 48261: state objects handed over as they were hold another key's batch."""
    owner = make_owner(kind)
    draft = Model(make_borrower(), TARGET, CAPACITY, seed=1)
    target = GraphPool("target", owner=owner, spec=owner.spec, device=DEVICE)
    prefill = GraphPool("draft.prefill", spec=draft.kernel.spec, device=DEVICE)
    keys = keys_of(kind, (1, 512))
    largest = max(keys, key=BatchDescriptor.cost)
    target.capture(keys, Model(owner, TARGET, CAPACITY).forward)
    batch = batches_of(keys[0], 1, capacity=CAPACITY)[0]
    target.refresh(keys[0], batch)
    handed_over = target.states[largest].attn_metadata.kv_indptr.tolist()
    seen: dict[BatchDescriptor, list[int]] = {}

    def forward(key, state):
        if not torch.cuda.is_current_stream_capturing():
            seen[key] = state.attn_metadata.kv_indptr.tolist()
        return draft.forward(key, state)

    share_states(target, prefill)
    prefill.capture(keys, forward)
    expected = [0]
    for length in dummy_batch(largest, CAPACITY).seq_lens.tolist():
        expected.append(expected[-1] + -(-length // CAPACITY.page_size))
    print(f"\n{kind}, {largest}: handed over {handed_over}, refilled {seen[largest]}")
    assert seen[largest] == expected
    assert handed_over != expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_without_a_warmup(kind):
    """vLLM PR 42444: what the first launch initialises must not be left to a captured one."""
    kernel = make_borrower()
    owner = make_owner(kind)
    model = Model(kernel, TARGET, CAPACITY)
    (key, *_) = keys_of(kind, (16,))
    state = owner.build(key, None, Phase.CAPTURE)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="first launch"), torch.cuda.graph(graph):
        model.forward(key, state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_during_a_capture(kind):
    """The copy of the plan would be recorded, and each replay would put it back."""
    owner = make_owner(kind)
    model = Model(owner, TARGET, CAPACITY)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    (key, *_) = keys_of(kind, (16,))
    batch = batches_of(key, 1, capacity=CAPACITY)[0]

    def forward(key, state):
        owner.build(key, batch, Phase.REPLAY)
        return model.forward(key, state)

    with pytest.raises(CaptureError):
        pool.capture([key], forward)
    pool.capture([key], model.forward)  # nothing is left of the attempt


NUMBERS = {"fa2": "padded_batch_size", "decode": "padded_batch_size", "fa3": "qo_indptr_offset"}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_that_the_graph_froze_comes_out_different(kind):
    """vLLM issue 20301, for plans: each number that a launch bakes in is compared by name."""
    owner = make_owner(kind, Shapes(8, 2))
    pool = GraphPool("target", owner=owner, device=DEVICE)
    keys = keys_of(kind, (16,))
    pool.capture(keys, Model(owner, Shapes(8, 2), CAPACITY).forward)
    key = keys[0]
    batch = batches_of(key, 1, capacity=CAPACITY)[0]
    pool.refresh(key, batch)
    planner = owner.build(key, batch, Phase.REPLAY).attn_metadata.planned[0].launch
    # As if it had planned for another model.
    planner.shape = shape_of(Shapes(4, 1) if kind == "fa3" else Shapes(8, 4))
    with pytest.raises(BakedValueChangedError) as refused:
        pool.refresh(key, batch)
    assert refused.value.path.endswith(f"planned.0.plan.{NUMBERS[kind]}")
    planner.shape = shape_of(Shapes(8, 2))
    pool.refresh(key, batch)
    pool.replay(key)


class _ByRequests(FlashInferOwner):
    """One wrapper for each number of requests, whatever their lengths."""

    def _prepare(self, key):
        alike = next(
            (
                each
                for other, each in self._prepared.items()
                if self.capacity.num_reqs(other) == self.capacity.num_reqs(key)
            ),
            None,
        )
        if alike is None:
            return super()._prepare(key)
        own = super()._prepare(key)
        own.planners = alike.planners
        host = self.lists.write(key, dummy_batch(key, self.capacity))
        plans = [planner.replan(host) for planner in own.planners]
        own.state = self._state(key, own.views, own.planners, plans)
        return own


def test_a_wrapper_keyed_by_the_batch_size_alone():
    """local-inference-lab/vllm 396: a wrapper that was captured for other query lengths."""
    keys = [BatchDescriptor(512, 16), BatchDescriptor(64, 16, uniform_query_len=4)]
    owner = make_owner("fa2")
    planned = [owner.build(key, None, Phase.WARMUP).attn_metadata.planned[0] for key in keys]
    assert planned[0].launch is not planned[1].launch
    assert planned[0].plan != planned[1].plan
    assert planned[0].int_workspace.data_ptr() != planned[1].int_workspace.data_ptr()

    options = {"kernel": "fa2", "decode_kernel": "fa2"}
    wrong = _ByRequests(CAPACITY, shape_of(TARGET), DEVICE, **options)
    model = Model(wrong, TARGET, CAPACITY)
    pool = GraphPool("target", owner=wrong, device=DEVICE, live_keys=2)
    pool.capture(keys, model.forward)
    first, second = (batches_of(key, 1, capacity=CAPACITY)[0] for key in keys)
    pool.refresh(keys[0], first)
    pool.refresh(keys[1], second)
    with pytest.raises(StaleStateError) as refused:  # the plan is gone
        pool.replay(keys[0])
    assert refused.value.rule is Staleness.OVERWRITTEN


def test_padding_requests_that_keep_an_earlier_batch(capsys):
    """vLLM PR 21691: rows past the batch lead to pages that are another's by now."""
    key = BatchDescriptor(16, 16, uniform_query_len=1)
    owner = make_owner("decode")
    model = Model(owner, TARGET, CAPACITY)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    pool.capture([key], model.forward)
    full = PagedBatch.of(
        [1] * 16, [40] * 16, [[3 * r + 1, 3 * r + 2, 3 * r + 3] for r in range(16)], 16
    )
    one = PagedBatch.of([1], [40], [[1, 2, 3]], 16)
    pool.refresh(key, full)
    pool.replay(key)
    # As a write of the live entries alone would leave it.
    metadata = pool.states[key].attn_metadata
    left = [each.clone() for each in (metadata.kv_indptr, metadata.last_page_len)]
    indices = metadata.kv_indices.clone()
    model.prepare(one)
    pool.refresh(key, one)
    (out,) = pool.replay(key)
    assert model.errors([out], one) < TOLERANCE
    assert out[1:].eq(0).all()
    pool.refresh(key, one)
    metadata.kv_indptr.copy_(left[0])
    metadata.last_page_len.copy_(left[1])
    metadata.kv_indices.copy_(indices)
    (out,) = pool.replay(key)
    assert out[1:].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_workspace_that_grew_after_the_capture(kind):
    """TensorRT-LLM 16319: a larger one is made for another key, and earlier graphs dangle."""
    owner = make_owner(kind)
    model = Model(owner, TARGET, CAPACITY)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    (first, second, *_) = keys_of(kind, (4, 16))
    pool.capture([first], model.forward)
    owner.float_workspace = torch.empty(
        2 * owner.float_workspace.numel(), dtype=torch.uint8, device=DEVICE
    )
    owner._prepared.clear()
    owner._keyless.clear()
    with pytest.raises(AddressChangedError) as refused:
        pool.capture([second], model.forward)
    assert first in refused.value.keys
    assert refused.value.path.endswith("_workspace")


@pytest.mark.parametrize("kind", KINDS)
def test_two_plans_in_one_workspace(kind):
    """TensorRT-LLM 18436: of two keys of one owner, one is fresh; of two owners, both."""
    keys = keys_of(kind, (4, 16))[:2]
    one = make_owner(kind)
    two = make_owner(kind, float_workspace=one.float_workspace)
    models = [Model(owner, TARGET, CAPACITY, seed=i) for i, owner in enumerate((one, two))]
    pools = [
        GraphPool(f"pool {i}", owner=model.kernel, device=DEVICE, live_keys=2)
        for i, model in enumerate(models)
    ]
    for pool, model in zip(pools, models, strict=True):
        pool.capture(keys, model.forward)
    batches = [batches_of(key, 1, capacity=CAPACITY)[0] for key in keys]
    for key, batch in zip(keys, batches, strict=True):
        pools[0].refresh(key, batch)
    with pytest.raises(StaleStateError) as refused:
        pools[0].replay(keys[0])
    assert refused.value.rule is Staleness.OVERWRITTEN
    # Scratch that two owners share is written by launches only, and makes nothing stale.
    for pool, model, key, batch in zip(pools, models, keys, batches, strict=True):
        model.prepare(batch)
        pool.refresh(key, batch)
    for pool, model, key, batch in zip(pools, models, keys, batches, strict=True):
        assert model.errors(pool.replay(key), batch) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_plans_in_a_row_while_the_device_is_behind(kind):
    """mini-sglang PR 103: a plan fills the pinned area before the last copy from it was done."""
    owner = make_owner(kind)
    model = Model(owner, TARGET, CAPACITY)
    pool = GraphPool("target", owner=owner, device=DEVICE)
    key = max(keys_of(kind, (16,)), key=BatchDescriptor.cost)
    pool.capture([key], model.forward)
    (out,) = model.outputs[key]

    def run(batch):
        # Each step writes its own keys into the cache, so steps are compared in their order.
        pool.refresh(key, batch)
        pool.replay(key)
        return out[: batch.num_tokens].float()

    def restore():
        for part, clean in zip(model.caches[0], model.clean[0], strict=True):
            part.copy_(clean)

    for trial in range(5):
        batches = batches_of(key, 6, seed=trial, capacity=CAPACITY)
        restore()
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        behind = [run(batch).clone() for batch in batches]
        restore()
        for batch, got in zip(batches, behind, strict=True):
            torch.cuda.synchronize()
            assert torch.equal(run(batch), got)


def test_the_librarys_own_plans_in_a_row_do_get_mixed_up():
    """What the fence is for: seen with a wrapper as it comes."""
    import flashinfer

    key = BatchDescriptor(16, 16, uniform_query_len=1)
    owner = make_owner("decode")
    views = owner.lists.views(key)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        owner.float_workspace,
        "NHD",
        use_cuda_graph=True,
        paged_kv_indptr_buffer=views.kv_indptr,
        paged_kv_indices_buffer=views.kv_indices,
        paged_kv_last_page_len_buffer=views.last_page_len,
    )

    def plan(batch: PagedBatch) -> torch.Tensor:
        host = owner.lists.write(key, batch)
        wrapper.plan(
            host.kv_indptr, views.kv_indices[:0], host.last_page_len, 32, 8, 128, 16,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip
        return wrapper._int_workspace_buffer[:1732].clone()

    plan(dummy_batch(key, CAPACITY))
    mixed = 0
    for trial in range(10):
        one, two = batches_of(key, 2, seed=trial, capacity=CAPACITY)
        alone = plan(one)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        behind = plan(one)
        plan(two)
        mixed += not torch.equal(alone, behind)
    assert mixed > 0
