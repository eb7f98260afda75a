"""What lies on a GPU after a write is what lies on a CPU, whichever way it was sent."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from graphshare import BatchDescriptor
from graphshare.adapters.paged import PagedBuffers, PagedCapacity
from tests.paged_kernels import random_batch

pytestmark = pytest.mark.gpu

CAPACITY = PagedCapacity(
    max_num_tokens=128, max_num_reqs=32, max_seq_len=4096, page_size=16, scratch_page=3
)
# Its table is larger than what is sent whole.
WIDE = dataclasses.replace(CAPACITY, max_num_reqs=64, max_seq_len=32768)
KEYS = [BatchDescriptor(128, 32), BatchDescriptor(16, 4), BatchDescriptor(128, 32, 4)]


@pytest.mark.parametrize("capacity", [CAPACITY, WIDE], ids=["whole", "wide"])
@pytest.mark.parametrize("table_on_gpu", [False, True])
@pytest.mark.parametrize("slots_on_gpu", [False, True])
def test_a_gpu_holds_what_a_cpu_holds(capacity, table_on_gpu, slots_on_gpu):
    rng = random.Random(0)
    there, here = PagedBuffers(capacity, "cuda"), PagedBuffers(capacity, "cpu")
    pages = 1 + capacity.max_num_reqs * capacity.max_pages
    batches = [(key, random_batch(rng, key, capacity, pages)) for key in KEYS for _ in range(10)]
    rng.shuffle(batches)
    found = []
    # No wait between writes: one must not overwrite what an earlier copy has not read yet.
    for key, batch in batches:
        sent = dataclasses.replace(
            batch,
            block_table=batch.block_table.cuda() if table_on_gpu else batch.block_table,
            slot_mapping=batch.slot_mapping.cuda() if slots_on_gpu else batch.slot_mapping,
        )
        views = there.write(key, sent)
        found.append([getattr(views, f.name).clone() for f in dataclasses.fields(views)])
    for (key, batch), gpu in zip(batches, found, strict=True):
        views = here.write(key, batch)
        for field, got in zip(dataclasses.fields(views), gpu, strict=True):
            assert torch.equal(got.cpu(), getattr(views, field.name)), (field.name, key)


def test_an_engine_that_writes_its_cache_itself_gives_no_slots():
    key = KEYS[0]
    batch = random_batch(random.Random(1), key, CAPACITY, 10_000)
    views = PagedBuffers(CAPACITY, "cuda").write(key, dataclasses.replace(batch, slot_mapping=None))
    assert views.slot_mapping.eq(CAPACITY.scratch_page * CAPACITY.page_size).all()
