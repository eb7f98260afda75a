"""Rows past the live batch, and the data that a capture runs on."""

from __future__ import annotations

import pytest
import torch

from graphshare import AttentionState, PersistentBuffer, Phase, capture_descriptors
from tests.small_engine import (
    HEAD_SIZE,
    MAX_LEN,
    MAX_PAGES,
    MAX_REQS,
    PAGE_SIZE,
    Batch,
    Metadata,
    Model,
    Owner,
    attention,
    is_close,
    key_of,
)

KEY = key_of(4)


class CarelessOwner(Owner):
    """Writes the live rows only."""

    def write(self, batch, rows):
        if batch is not None:
            live = batch.num_reqs
            self.seq_lens.write(batch.seq_lens, live)
            self.block_table.write(torch.tensor(batch.pages()), live)
            self.slot_mapping.write(batch.slots(), live)
        else:
            super().write(None, rows)
        metadata = Metadata(self.seq_lens.tensor[:rows], self.block_table.tensor[:rows])
        return AttentionState(metadata, self.slot_mapping.tensor[:rows])


@pytest.mark.parametrize("owner_type", [CarelessOwner, Owner])
def test_padding_rows_undefined(place, make_pool, owner_type):
    """Padding rows write to no page of a request; vLLM PR 21691 and 34903, SGLang 22958."""
    model = Model(place.device)
    pool = make_pool("target", owner=owner_type(place.device))
    pool.capture([KEY], model.forward)
    pool.refresh(KEY, Batch((3, 5, 2, 4)))
    pool.replay(KEY)

    # Two requests are done; the slot that one of them had now belongs to someone else.
    freed = Batch((3, 5, 2, 4)).slots()[3]
    rows = model.cache.view(-1, HEAD_SIZE)
    rows[freed] = 7.0
    batch = Batch((4, 6))
    expected = model.expected(batch)
    pool.refresh(KEY, batch)
    assert is_close(pool.replay(KEY), expected)
    kept = bool((rows[freed] == 7.0).all())
    assert kept is (owner_type is Owner)


def test_padding_of_persistent_buffers(place):
    """Whatever a buffer held, rows and columns past the live ones hold the padding; PR 34903."""
    starts = PersistentBuffer(6, torch.int32, place.device, padding="last")
    table = PersistentBuffer((4, 3), torch.int64, place.device, padding=-1)
    starts.tensor.fill_(99)
    table.tensor.fill_(99)
    assert starts.write([0, 2, 5], 6).tolist() == [0, 2, 5, 5, 5, 5]
    assert table.write(torch.tensor([[4, 5], [6, 7]]), 3).tolist() == [
        [4, 5, -1],
        [6, 7, -1],
        [-1, -1, -1],
    ]


def test_capture_on_impossible_data(place, make_pool):
    """Captures run on lengths and pages that exist; vLLM PR 49364, issue 53658."""
    model = Model(place.device)
    metadata, _ = Owner(place.device).write(None, 4)

    # The fault: dummy lengths of zero, or past what the table can hold.
    metadata.seq_lens.zero_()
    assert not attention(model.cache, metadata).isfinite().all()
    metadata.seq_lens.fill_(MAX_LEN + 1)
    newest = int(metadata.seq_lens[0]) - 1
    assert newest // PAGE_SIZE >= MAX_PAGES

    finite = []

    def forward(key, state):
        out = model.forward(key, state)
        if owner.builds[-1][1] is Phase.WARMUP:
            finite.append(bool(out.isfinite().all()))
        return out

    owner = Owner(place.device)
    pool = make_pool("target", owner=owner)
    keys = capture_descriptors([1, 2, 4, 8], max_num_reqs=MAX_REQS)
    pool.capture(keys, forward)
    assert finite == [True] * len(keys)


def test_captured_shapes_are_possible():
    """No key asks for more requests than tokens, nor for a request without one; PR 49364."""
    for most in (1, 3, 8):
        for lengths in ((), (1,), (2, 3), (5,)):
            for key in capture_descriptors([1, 2, 3, 8, 13], most, lengths):
                length = key.uniform_query_len or 1
                assert 1 <= key.num_reqs <= most
                assert key.num_reqs * length <= key.num_tokens
                if key.uniform_query_len is not None:
                    assert key.num_reqs * length == key.num_tokens
