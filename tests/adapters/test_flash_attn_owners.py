"""Owners of FlashAttention's states, on stand-ins for the libraries, with the tape."""

from __future__ import annotations

import dataclasses
import random
import sys
from types import ModuleType

import pytest
import torch

from graphshare import (
    BatchDescriptor,
    CaptureError,
    GraphPool,
    GraphShareError,
    Phase,
    SpecMismatchError,
    capture_descriptors,
    share_states,
)
from graphshare.adapters.flash_attn import (
    AttentionShape,
    FlashAttention2,
    FlashAttention2Owner,
    FlashAttention3,
    FlashAttention3Owner,
    FlashAttention4Owner,
    UnsupportedBuildError,
)
from graphshare.adapters.paged import PagedBatch, PagedCapacity
from graphshare.testing import assert_owner_conforms
from tests.flash_attn_library import RECORDED, flash_attention_2, flash_attention_3, signature
from tests.paged_kernels import Shapes, attention, make_cache, random_batch, relative_error

CAPACITY = PagedCapacity(max_num_tokens=12, max_num_reqs=4, max_seq_len=600, page_size=256)
NUM_PAGES = 1 + CAPACITY.max_num_reqs * CAPACITY.max_pages
SHAPES = Shapes(num_q_heads=4, num_kv_heads=2, head_size=72, dtype=torch.float32)
KEYS = capture_descriptors([1, 4, 12], 4, uniform_query_lens=[1, 3])
KINDS = ["fa2", "vllm", "upstream"]


def shape_of(shapes: Shapes, **changes) -> AttentionShape:
    return AttentionShape(
        **{
            "num_q_heads": shapes.num_q_heads,
            "num_kv_heads": shapes.num_kv_heads,
            "head_size": shapes.head_size,
            "causal": shapes.causal,
            "window": shapes.window,
            "dtype": shapes.dtype,
            **changes,
        }
    )


def make_owner(kind, shapes=SHAPES, capacity=CAPACITY, **options):
    shape = shape_of(shapes)
    if kind == "fa2":
        return FlashAttention2Owner(capacity, shape, "cpu", module=flash_attention_2())
    library = flash_attention_3(kind)
    return FlashAttention3Owner(capacity, shape, "cpu", build=kind, module=library, **options)


def make_borrower(kind, shapes=SHAPES, capacity=CAPACITY):
    shape = shape_of(shapes)
    if kind == "fa2":
        return FlashAttention2(capacity, shape, module=flash_attention_2())
    library = flash_attention_3(kind)
    return FlashAttention3(capacity, shape, device="cpu", build=kind, module=library)


class Model:
    """One layer of attention over a cache of its own."""

    def __init__(self, kernel, shapes, capacity=CAPACITY):
        self.kernel, self.shapes = kernel, shapes
        self.cache = make_cache(shapes, capacity, NUM_PAGES, "cpu")
        # The scratch page is nobody's: what is read there by mistake shows.
        for part in self.cache:
            part[0] = float("nan")
        size = (capacity.max_num_tokens, shapes.num_q_heads, shapes.head_size)
        self.query = torch.randn(size).to(shapes.dtype)

    def forward(self, key, state):
        query = self.query[: key.num_tokens]
        return self.kernel.run(query, *self.cache, state.attn_metadata)

    def error(self, out, batch):
        clean = tuple(part.nan_to_num() for part in self.cache)
        expected = attention(self.query, clean, batch, self.shapes)
        return relative_error(out[: batch.num_tokens], expected)


def batches_of(key, count=3, seed=0, capacity=CAPACITY):
    rng = random.Random(seed)
    return [random_batch(rng, key, capacity, NUM_PAGES) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_owners_conform(kind):
    report = assert_owner_conforms(
        make_owner(kind),
        KEYS,
        batches_of,
        bounds={
            "*.seq_lens": (1, CAPACITY.max_seq_len),
            "*.block_table": (0, NUM_PAGES - 1),
        },
    )
    assert report.ok


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, {"window": 40}, {"causal": False}], ids=str)
def test_replays_attend_to_what_the_last_batch_says(kind, changes):
    shapes = dataclasses.replace(SHAPES, **changes)
    owner = make_owner(kind, shapes)
    model = Model(owner, shapes)
    pool = GraphPool("target", owner=owner, spec=owner.spec, device="cpu")
    pool.capture(KEYS, model.forward)
    for key in KEYS:
        for batch in batches_of(key, 2, seed=key.num_tokens):
            pool.refresh(key, batch)
            assert model.error(pool.replay(key), batch) < 1e-5, key


@pytest.mark.parametrize("kind", KINDS)
def test_a_borrower_of_other_heads_attends_with_no_build_of_its_own(kind):
    owner = make_owner(kind)
    model = Model(owner, SHAPES)
    # The same query heads for each KV head; other heads, mask and cache.
    shapes = dataclasses.replace(SHAPES, num_q_heads=8, num_kv_heads=4, window=40)
    if kind != "vllm":
        shapes = dataclasses.replace(shapes, window=-1)
    kernel = make_borrower(kind, shapes)
    draft = Model(kernel, shapes)
    target = GraphPool("target", owner=owner, spec=owner.spec, device="cpu")
    prefill = GraphPool("draft.prefill", spec=kernel.spec, device="cpu")
    shared = share_states(target, prefill)
    assert shared.spec_checked
    target.capture(KEYS, model.forward)
    prefill.capture(KEYS, draft.forward)
    for key in KEYS:
        (batch,) = batches_of(key, 1, seed=7)
        target.refresh(key, batch)
        assert model.error(target.replay(key), batch) < 1e-5
        assert draft.error(prefill.replay(shared.live_key), batch) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_loan_is_proven_by_verify(kind):
    owner, own = make_owner(kind), make_owner(kind)
    target = GraphPool("target", owner=owner, device="cpu")
    prefill = GraphPool("draft.prefill", owner=own, device="cpu")
    shared = share_states(target, prefill)
    target.capture(KEYS, Model(owner, SHAPES).forward)
    prefill.capture(KEYS, Model(own, SHAPES).forward)
    for key in KEYS:
        (batch,) = batches_of(key, 1, seed=3)
        target.refresh(key, batch)
        shared.verify(batch)
        target.refresh(key, batch)
        shared.verify(batch, padding=True)


def test_a_plan_for_another_ratio_is_refused_and_would_be_wrong():
    """vllm-omni PR 3110: metadata of another model's head count."""
    owner = make_owner("vllm")
    shapes = dataclasses.replace(SHAPES, num_kv_heads=1)
    kernel = make_borrower("vllm", shapes)
    draft = Model(kernel, shapes)
    key = BatchDescriptor(12, 4)
    batch = PagedBatch.of([9, 3], [500, 77], [[1, 2], [3]], CAPACITY.page_size)

    def pools(spec):
        target = GraphPool("target", owner=owner, spec=owner.spec, device="cpu")
        prefill = GraphPool("draft.prefill", spec=spec, device="cpu")
        share_states(target, prefill)
        target.capture([key], Model(owner, SHAPES).forward)
        prefill.capture([key], draft.forward)
        return target, prefill

    with pytest.raises(SpecMismatchError) as caught:
        pools(kernel.spec)
    assert caught.value.fields == ("num_kv_heads",)
    target, prefill = pools(None)
    target.refresh(key, batch)
    assert draft.error(prefill.replay(key), batch) > 0.1


def test_a_plan_for_another_mask_is_refused_and_would_fail_the_capture():
    owner = make_owner("vllm")
    shapes = dataclasses.replace(SHAPES, causal=False)
    kernel = make_borrower("vllm", shapes)
    target = GraphPool("target", owner=owner, spec=owner.spec, device="cpu")
    target.capture(KEYS, Model(owner, SHAPES).forward)
    with pytest.raises(SpecMismatchError) as caught:
        share_states(target, GraphPool("draft", spec=kernel.spec, device="cpu"))
    assert caught.value.fields == ("causal",)
    unchecked = GraphPool("draft", device="cpu")
    share_states(target, unchecked)
    with pytest.raises(CaptureError):
        unchecked.capture(KEYS, Model(kernel, shapes).forward)


def test_kernels_of_another_build_do_not_borrow():
    owner = make_owner("vllm")
    target = GraphPool("target", owner=owner, spec=owner.spec, device="cpu")
    for kind in ("upstream", "fa2"):
        pool = GraphPool(f"draft.{kind}", spec=make_borrower(kind).spec, device="cpu")
        with pytest.raises(SpecMismatchError) as caught:
            share_states(target, pool)
        assert "backend" in caught.value.fields


def test_keys_of_many_rows_do_not_split():
    owner = make_owner("vllm", num_splits=8, max_split_tokens=4)
    splits = {}
    for key in KEYS:
        metadata = owner.build(key, None, Phase.CAPTURE).attn_metadata
        splits[key.num_tokens] = metadata.num_splits
    assert splits == {12: 1, 6: 1, 4: 8, 3: 8, 1: 8}
    model = Model(owner, SHAPES)
    pool = GraphPool("target", owner=owner, device="cpu")
    pool.capture(KEYS, model.forward)
    for key in KEYS:
        (batch,) = batches_of(key, 1, seed=5)
        pool.refresh(key, batch)
        assert model.error(pool.replay(key), batch) < 1e-5


def test_requests_of_other_lengths_do_not_pass_for_uniform_ones():
    """The kernel would take rows for another request's; SGLang 21987."""
    owner = make_owner("fa2")
    key = BatchDescriptor(12, 4, uniform_query_len=3)
    before = owner.build(key, None, Phase.CAPTURE).attn_metadata.seq_lens.clone()
    mixed = PagedBatch.of([3, 1], [30, 40], [[1], [2]], CAPACITY.page_size)
    with pytest.raises(ValueError, match="3 rows of every request"):
        owner.build(key, mixed, Phase.REPLAY)
    after = owner._buffers.views(key).seq_lens
    assert torch.equal(after, before)


@pytest.mark.parametrize("num_tokens", [8, 12])
def test_a_uniform_key_with_rows_beyond_its_requests(num_tokens):
    """The kernel for equal lengths takes whole requests only; the other one takes these."""
    for query_len in (1, 2):
        key = BatchDescriptor(num_tokens, 3, uniform_query_len=query_len)
        owner = make_owner("fa2")
        model = Model(owner, SHAPES)
        pool = GraphPool("target", owner=owner, device="cpu")
        pool.capture([key], model.forward)
        for batch in batches_of(key):
            pool.refresh(key, batch)
            assert model.error(pool.replay(key), batch) < 1e-5


def test_a_state_has_what_its_launches_read():
    """Those of a uniform key do not read where requests begin, and a refresh need not look."""
    owner = make_owner("fa2")
    uniform = BatchDescriptor(12, 4, uniform_query_len=3)
    rows_beyond = BatchDescriptor(12, 3, uniform_query_len=3)
    for key, starts in ((uniform, False), (rows_beyond, True), (BatchDescriptor(12, 4), True)):
        metadata = owner.build(key, None, Phase.CAPTURE).attn_metadata
        assert (metadata.query_start_loc is not None) is starts
        assert (metadata.kv_start_loc is not None) is starts
    model = Model(owner, SHAPES)
    metadata = owner.build(uniform, None, Phase.CAPTURE).attn_metadata
    with pytest.raises(ValueError, match="expected 3 rows of each of 4 requests, got 11"):
        owner.run(model.query[:11], *model.cache, metadata)


@pytest.mark.parametrize("kind", KINDS)
def test_out_is_written_and_returned(kind):
    owner = make_owner(kind)
    model = Model(owner, SHAPES)
    key, (batch,) = KEYS[0], batches_of(KEYS[0], 1)
    metadata = owner.build(key, batch, Phase.REPLAY).attn_metadata
    query = model.query[: key.num_tokens]
    out = torch.empty_like(query)
    assert owner.run(query, *model.cache, metadata, out) is out
    assert model.error(out, batch) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_cap_reach_the_kernel(kind):
    owner = make_owner(kind)
    model = Model(owner, SHAPES)
    key, (batch,) = KEYS[0], batches_of(KEYS[0], 1)
    metadata = owner.build(key, batch, Phase.REPLAY).attn_metadata
    plain = owner.run(model.query[: key.num_tokens], *model.cache, metadata).clone()
    for changes in ({"softmax_scale": 0.5}, {"softcap": 0.5}):
        owner.shape = shape_of(SHAPES, **changes)
        out = owner.run(model.query[: key.num_tokens], *model.cache, metadata)
        assert not torch.allclose(out[: batch.num_tokens], plain[: batch.num_tokens])


def test_contents_do_not_depend_on_what_the_library_leaves_undefined():
    """The stand-in fills the gaps of its plans at random, as fresh memory does."""
    owner = make_owner("vllm")
    key = BatchDescriptor(3, 3)
    (batch,) = batches_of(key, 1)
    first = owner.build(key, batch, Phase.REPLAY).attn_metadata.scheduler_metadata.clone()
    owner.build(KEYS[0], None, Phase.CAPTURE)
    again = owner.build(key, batch, Phase.REPLAY).attn_metadata.scheduler_metadata
    assert torch.equal(first, again)
    assert first.shape == (13,)
    assert first.view(-1)[[3, 7, 11, 12]].tolist() == [0, 0, 0, 0]
    assert owner._schedule[13:].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_key_or_no_batch_is_refused_before_anything_is_written(kind):
    owner = make_owner(kind)
    (batch,) = batches_of(KEYS[0], 1)
    owner.build(KEYS[0], batch, Phase.REPLAY)
    before = owner._buffers._memory.clone()
    for key in (8, None, (8, 4), "key"):
        for given in (None, batch):
            with pytest.raises(TypeError, match="key: expected a BatchDescriptor"):
                owner.build(key, given, Phase.REPLAY)
    for key in KEYS:
        for given in (8, "batch", ([1], [1], [[1]])):
            with pytest.raises(TypeError, match="batch: expected a PagedBatch"):
                owner.build(key, given, Phase.REPLAY)
    assert torch.equal(owner._buffers._memory, before)


# What is refused when an owner is made.


def test_pages_that_flash_attention_2_cannot_load():
    capacity = dataclasses.replace(CAPACITY, page_size=128)
    with pytest.raises(ValueError, match="multiple of 256"):
        FlashAttention2(capacity, shape_of(SHAPES), module=flash_attention_2())
    make_owner("vllm", capacity=capacity)


@pytest.mark.parametrize("num_splits", [0, -1, 257])
def test_the_number_of_splits_is_said(num_splits):
    with pytest.raises(ValueError, match="num_splits"):
        make_owner("vllm", num_splits=num_splits)


def test_a_build_with_another_layout_is_refused():
    """The original's plans behind vLLM's names, and the other way round."""
    for ours, theirs in (("vllm", "upstream"), ("upstream", "vllm")):
        library = flash_attention_3(ours)
        other = flash_attention_3(theirs)
        library.get_scheduler_metadata = other.get_scheduler_metadata
        with pytest.raises(UnsupportedBuildError) as caught:
            FlashAttention3(CAPACITY, shape_of(SHAPES), device="cpu", build=ours, module=library)
        assert caught.value.backend == f"flash_attn3/{ours}"
        assert isinstance(caught.value, GraphShareError)


def test_a_build_that_takes_other_arguments_is_refused():
    library = flash_attention_3("vllm")
    library.get_scheduler_metadata = lambda batch_size: None
    with pytest.raises(UnsupportedBuildError) as caught:
        FlashAttention3(CAPACITY, shape_of(SHAPES), device="cpu", build="vllm", module=library)
    assert "unexpected keyword" in caught.value.got


def test_a_plan_of_another_size_later_is_refused():
    owner = make_owner("vllm")
    library = owner._library
    owner._library = dataclasses.replace(
        library, get_scheduler_metadata=lambda **_: torch.zeros(5, dtype=torch.int32)
    )
    with pytest.raises(UnsupportedBuildError) as caught:
        owner.build(KEYS[0], None, Phase.CAPTURE)
    assert caught.value.key == KEYS[0]
    assert caught.value.got == 5


def test_a_build_without_a_function_is_refused():
    with pytest.raises(UnsupportedBuildError) as caught:
        FlashAttention2(CAPACITY, shape_of(SHAPES), module=ModuleType("flash_attn"))
    assert caught.value.backend == "flash_attn2/flash_attn"


def test_whether_a_build_always_packs_is_found_out():
    for packs in (False, True):
        library = flash_attention_3("vllm", packs_always=packs)
        kernel = FlashAttention3(
            CAPACITY, shape_of(SHAPES), device="cpu", build="vllm", module=library
        )
        assert kernel.spec.packs_always is packs


def test_the_library_is_asked_on_the_current_device_unless_another_is_named(monkeypatch):
    asked = []

    def current(what, device):
        asked.append(device)
        return torch.device("cpu")

    monkeypatch.setattr("graphshare.adapters.flash_attn.fa3.device_of", current)
    library = flash_attention_3("vllm")
    kernel = FlashAttention3(CAPACITY, shape_of(SHAPES), build="vllm", module=library)
    assert kernel.spec == make_borrower("vllm").spec
    assert asked == ["cuda", "cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_device_that_is_not_there_is_told_before_a_library_is_asked_on_it():
    for device in ({}, {"device": "cuda"}):
        with pytest.raises(RuntimeError, match=r"FlashAttention 3: device.*no CUDA device"):
            FlashAttention3(CAPACITY, shape_of(SHAPES), **device)
    with pytest.raises(ValueError, match="FlashAttention 3: device"):
        FlashAttention3(CAPACITY, shape_of(SHAPES), device="gpu")


def test_flash_attention_4_is_refused():
    with pytest.raises(UnsupportedBuildError) as caught:
        FlashAttention4Owner(CAPACITY, shape_of(SHAPES), "cuda")
    assert caught.value.backend == "flash_attn4"


# Where the libraries are looked for.


def test_a_library_that_is_missing_is_named_with_its_extra(monkeypatch):
    for name in ("vllm", "flash_attn", "flash_attn_interface", "flash_attn_3"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"graphshare\[flash-attn\]"):
        FlashAttention2(CAPACITY, shape_of(SHAPES))
    with pytest.raises(ModuleNotFoundError, match=r"graphshare\[vllm\]"):
        FlashAttention3(CAPACITY, shape_of(SHAPES), device="cpu")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        FlashAttention3(
            CAPACITY, shape_of(SHAPES), device="cpu", build="vllm", module="no_such_module"
        )


def test_the_build_that_is_installed_is_found(monkeypatch):
    for name in ("vllm", "flash_attn_interface", "flash_attn_3"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attention_3("upstream"))
    kernel = FlashAttention3(CAPACITY, shape_of(SHAPES), device="cpu")
    assert kernel.spec.backend == "flash_attn3/upstream"
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", flash_attention_3("vllm"))
    kernel = FlashAttention3(CAPACITY, shape_of(SHAPES), device="cpu")
    assert kernel.spec.backend == "flash_attn3/vllm"


def test_what_is_missing_inside_a_library_is_not_taken_for_the_library(monkeypatch, tmp_path):
    (tmp_path / "broken_flash_attn.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        FlashAttention2(CAPACITY, shape_of(SHAPES), module="broken_flash_attn")
    assert caught.value.name == "no_such_dependency"


@pytest.mark.parametrize("build", ["dao", "auto"])
def test_a_module_needs_a_build(build):
    with pytest.raises(ValueError, match="build"):
        FlashAttention3(CAPACITY, shape_of(SHAPES), device="cpu", build=build, module="anything")


@pytest.mark.parametrize(
    "changes",
    [{"num_q_heads": 0}, {"num_kv_heads": 3}, {"window": -2}, {"softcap": -1.0}, {"head_size": 0}],
    ids=str,
)
def test_impossible_shapes_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes)).replace("kv", ".*")):
        shape_of(SHAPES, **changes)


def test_recorded_signatures_have_what_is_passed():
    """What the stand-ins bind by; and the arguments that vLLM and the original name differently."""
    assert {"seqused_k", "block_table", "out", "fa_version"} <= set(
        signature("vllm", "flash_attn_varlen_func").parameters
    )
    assert {"cache_seqlens", "page_table"} <= set(
        signature("upstream", "flash_attn_with_kvcache").parameters
    )
    assert set(RECORDED["sources"]) == set(RECORDED) - {"sources"}
