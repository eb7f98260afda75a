"""Owners as engines have them conform."""

from __future__ import annotations

import pytest

from graphshare import BatchDescriptor, capture_descriptors
from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan
from graphshare.adapters.toy.config import EngineConfig
from graphshare.adapters.toy.owner import PagedOwner
from graphshare.testing import assert_owner_conforms, check_owner
from tests.shaped_owners import (
    DECODE_KEYS,
    MAX_LEN,
    NUM_PAGES,
    Decodes,
    FlashAttentionOwner,
    FlashInferOwner,
    decodes,
)

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IMPOSSIBLE = [Decodes((0,)), Decodes((MAX_LEN + 1,)), Decodes((3,) * 9)]

ENGINE = EngineConfig(
    max_num_reqs=4,
    max_num_tokens=16,
    num_draft_tokens=3,
    page_size=4,
    num_pages=40,
    max_model_len=32,
)


def toy_batches(key: BatchDescriptor) -> list[AttentionBatch]:
    most, each = key.num_reqs, key.uniform_query_len

    def batch(requests, query_len, start, first):
        spans = [
            QuerySpan([first + 8 * i + page for page in range(8)], start + i, query_len)
            for i in range(requests)
        ]
        return AttentionBatch.of(spans, ENGINE.page_size)

    if each is not None:
        return [batch(most, each, 3, 1), batch(1, each, 9, 2), batch(most, each, 0, 3)]
    mixed = [batch(most, 1, 4, 1), batch(1, key.num_tokens, 2, 5)]
    return [*mixed, batch(max(1, most - 1), 1, 11, 3)]


@pytest.mark.parametrize("device", PLACES)
def test_the_toy_engines_owner(device):
    keys = capture_descriptors([1, 2, 4, 8, 16], 4, [4])
    bounds = {"*.seq_lens": (1, 32), "*.block_table": (0, 39), "slot_mappings": (0, 160)}
    report = assert_owner_conforms(PagedOwner(ENGINE, device), keys, toy_batches, bounds=bounds)
    # Batches of larger keys were offered to all but the largest, uniform and mixed.
    largest = [key for key in keys if key.num_tokens == 16]
    assert report.not_checked["impossible"].count("BatchDescriptor") == len(largest) == 2


@pytest.mark.parametrize("device", PLACES)
def test_an_owner_shaped_like_flashinfers(device):
    """The workspace is scratch: its layout is the library's, and not all of it is written."""
    options = {"impossible": IMPOSSIBLE, "scratch": ["*_workspace"]}
    bounds = {"*_indices": (0, NUM_PAGES - 1)}
    owner = FlashInferOwner(device)
    report = assert_owner_conforms(owner, DECODE_KEYS, decodes, bounds=bounds, **options)
    (over,) = [fact for fact in report.facts if fact.name == "overwrites"]
    assert len(over.details) == 3  # the buffers are shared
    bare = check_owner(FlashInferOwner(device), DECODE_KEYS, decodes, impossible=IMPOSSIBLE)
    assert {each.path for each in bare.rejections} == {"int_workspace"}


@pytest.mark.parametrize("device", PLACES)
def test_an_owner_shaped_like_flash_attentions(device):
    bounds = {"*.block_table": (0, NUM_PAGES - 1), "*.seq_lens": (1, MAX_LEN)}
    owner = FlashAttentionOwner(device)
    options = {"impossible": IMPOSSIBLE, "bounds": bounds}
    report = assert_owner_conforms(owner, DECODE_KEYS, decodes, **options)
    assert "footprint" not in report.not_checked


def test_a_scheduler_slice_whose_tail_is_not_declared():
    class Undeclared(FlashAttentionOwner):
        def writes(self, key):
            *rest, scheduler = super().writes(key)
            return [*rest, scheduler[: 4 * (-(-key.num_reqs // 4) * 4) + 1]]

    report = check_owner(Undeclared(), DECODE_KEYS, decodes, impossible=IMPOSSIBLE)
    assert {each.check for each in report.rejections} == {"footprint"}
    assert report.rejections[0].path == "model.layers.0.self_attn.scheduler_metadata"
