"""A check that did not look, or not everywhere, says so; no pattern is passed over in silence."""

from __future__ import annotations

import pytest
import torch

from graphshare import BatchDescriptor
from graphshare.testing import check_owner
from tests.planted_owners import (
    BOUNDS,
    KEYS,
    Honest,
    NegativeRows,
    PagesThatAreNot,
    StalePadding,
    WritesNames,
    batches,
)
from tests.small_engine import MAX_LEN, MAX_REQS, Batch

BIG, MIDDLE, SMALL = KEYS


def facts(report):
    return {fact.name: fact for fact in report.facts}


def fails(report):
    return {each.check for each in report.rejections}


class Bare(Honest):
    """Does not say which rows are live."""

    live_rows = None


class Unsized:
    """A batch without numbers that tell its rows."""

    def __init__(self, batch):
        self.batch = batch


class TakesUnsized(Bare):
    def build(self, key, batch, phase):
        return super().build(key, None if batch is None else batch.batch, phase)


def unsized(key):
    return [Unsized(batch) for batch in batches(key)]


# Bounds


@pytest.mark.parametrize("owner", [Honest, Bare])
def test_bounds_hold_for_replays_with_live_rows_or_by_size(owner):
    report = check_owner(owner(), KEYS, batches, bounds=BOUNDS)
    assert report.ok
    assert "bounds" not in report.not_checked


def test_a_page_that_is_not_there_is_found_without_live_rows():
    report = check_owner(PagesThatAreNot(), KEYS, batches, bounds=BOUNDS)
    (rejection,) = report.rejections
    assert (rejection.check, rejection.path, rejection.batch) == ("bounds", "attn.block_table", 0)
    assert rejection.got.startswith("99999 ")
    assert set(rejection.keys) == set(KEYS)


def test_where_nothing_tells_the_rows_bounds_of_replays_are_not_checked():
    report = check_owner(TakesUnsized(), KEYS, unsized, bounds=BOUNDS)
    assert report.ok
    assert "replays of attn.seq_lens, attn.block_table: " in report.not_checked["bounds"]


class Tokens(Bare):
    """Adds positions, a row for each token; requests and tokens are padded to one number."""

    def __init__(self):
        super().__init__()
        self.positions = torch.zeros(MAX_REQS, dtype=torch.int64)

    def build(self, key, batch, phase):
        state = super().build(key, batch and batch.requests, phase)
        self.positions[: key.num_tokens] = 0 if batch is None else 1
        if batch is not None:
            self.positions[batch.num_tokens - 1] = batch.last
        return {**state, "positions": self.positions[: key.num_tokens]}


class TokenBatch:
    def __init__(self, num_reqs, num_tokens, last):
        self.requests = Batch((3,) * num_reqs)
        self.num_reqs, self.num_tokens, self.last = num_reqs, num_tokens, last


@pytest.mark.parametrize(
    ("last", "num_reqs", "wrong"), [(5, 2, False), (77, 2, False), (77, 3, True)]
)
def test_a_row_that_may_be_padding_is_not_taken_for_live(last, num_reqs, wrong):
    key = BatchDescriptor(4, 4)
    given = [TokenBatch(num_reqs, 3, last), TokenBatch(1, 1, 1)]
    report = check_owner(Tokens(), [key], given, bounds={"positions": (0, 9)})
    assert fails(report) == ({"bounds"} if wrong else set())
    assert ("some rows of positions" in report.not_checked.get("bounds", "")) is not wrong


def test_a_tensor_without_dimensions_has_no_padding():
    class Step(Honest):
        def __init__(self):
            super().__init__()
            self.step = torch.zeros((), dtype=torch.int64)

        def build(self, key, batch, phase):
            state = super().build(key, batch, phase)
            return {**state, "step": self.step.fill_(0 if batch is None else 12)}

    assert check_owner(Step(), KEYS, batches, bounds={"step": (0, 12)}).ok
    report = check_owner(Step(), KEYS, batches, bounds={"step": (0, 11)})
    assert fails(report) == {"bounds"}
    assert report.rejections[0].path == "step"


def test_padding_out_of_bounds_is_a_fact():
    class Zeroes(Honest):
        """Requests of length 0 after the batch's."""

        def __init__(self):
            super().__init__()
            self.seq_lens.padding = self.seq_lens._fill = 0

    report = check_owner(Zeroes(), KEYS, batches, bounds=BOUNDS)
    assert report.ok
    assert facts(report)["padding-out-of-bounds"].details == {"attn.seq_lens": 0}
    inside = check_owner(Honest(), KEYS, batches, bounds=BOUNDS)
    assert "padding-out-of-bounds" not in facts(inside)


# Patterns that name nothing


@pytest.mark.parametrize(
    "bounds",
    [
        {"*.seqlens": (1, 9)},
        {"*.seq_lens": (1, MAX_LEN), "*.blok_table": (0, 9)},
        {"*.max_seq_len": (1, MAX_LEN)},  # a value on the host
        {"*": (0, 999), "*.seq_lens": (1, MAX_LEN)},  # never the first
    ],
)
def test_bounds_that_name_nothing_are_refused(bounds):
    with pytest.raises(ValueError, match="bounds: expected") as caught:
        check_owner(Honest(), KEYS, batches, bounds=bounds)
    assert list(bounds)[-1] in str(caught.value)


def test_bounds_of_a_key_that_fails_may_name_a_tensor_of_it():
    class Fails(Honest):
        def build(self, key, batch, phase):
            if key == SMALL:
                raise RuntimeError
            return super().build(key, batch, phase)

    report = check_owner(Fails(), KEYS, batches, bounds={"*.only_there": (0, 1)})
    assert fails(report) == {"build"}
    assert "*.only_there" in report.not_checked["bounds"]


def test_scratch_live_rows_and_allow_that_name_nothing_are_facts():
    class Misnamed(Honest):
        def live_rows(self, key, batch):
            return {"*.seq_len": batch.num_reqs, "attn": 1, "*": batch.num_reqs}

    report = check_owner(
        Misnamed(),
        KEYS,
        batches,
        scratch=["*_workspace", "*.seq_lens"],
        allow=["padding", "unwritten:*.block_table"],
    )
    found = facts(report)
    assert found["unused-scratch"].details.keys() == {"*_workspace"}
    # A container has no rows.
    assert found["unused-live-rows"].details.keys() == {"*.seq_len", "attn"}
    assert found["unused-allow"].details.keys() == {"padding", "unwritten:*.block_table"}
    used = facts(check_owner(StalePadding(), KEYS, batches, allow=["padding"]))
    assert not {"unused-scratch", "unused-live-rows", "unused-allow"} & used.keys()


# What was not looked at


def test_a_key_without_batches_is_told_of():
    report = check_owner(Honest(), KEYS, {BIG: batches(BIG), SMALL: batches(SMALL)})
    for check in ("unwritten", "padding", "repeatable"):
        assert "1 of 3 keys have no batch" in report.not_checked[check]
    everywhere = check_owner(Honest(), KEYS, batches).not_checked
    assert not {"unwritten", "padding", "repeatable"} & everywhere.keys()


def test_batches_that_leave_no_padding_are_told_of():
    full = {key: [Batch((3,) * key.num_reqs), Batch((5,) * key.num_reqs)] for key in KEYS}
    report = check_owner(Honest(), KEYS, full)
    assert report.not_checked["padding"].startswith("for 3 of 3 keys ")
    full[BIG].append(Batch((3,)))
    report = check_owner(Honest(), KEYS, full)
    assert report.not_checked["padding"].startswith("for 2 of 3 keys ")


def test_a_key_that_no_batch_is_too_large_for_is_told_of():
    report = check_owner(Honest(), KEYS, batches)
    for check in ("impossible", "late-refusal"):
        assert report.not_checked[check].startswith(f"nothing was offered to {BIG} that ")
    none = check_owner(TakesUnsized(), KEYS, unsized).not_checked["impossible"]
    assert "and 1 more" in none
    assert "where keys and batches have num_tokens, num_reqs" in none
    every = check_owner(Honest(), KEYS, batches, impossible=[Batch((3,) * (MAX_REQS + 1))])
    assert not {"impossible", "late-refusal"} & every.not_checked.keys()


def test_live_rows_are_asked_for_where_there_is_nothing_to_compare():
    class OnceNegative(Honest):
        def live_rows(self, key, batch):
            return {"*": -1 if batch == batches(key)[-1] else batch.num_reqs}

    for owner in (NegativeRows(), OnceNegative()):
        assert fails(check_owner(owner, KEYS, batches)) == {"protocol"}


def test_what_is_no_tensor_in_writes_is_named():
    (rejection,) = check_owner(WritesNames(), KEYS, batches).rejections
    assert rejection.check == "protocol"
    assert rejection.got == "str"

    class WritesBuffers(Honest):
        def writes(self, key):
            return [self.seq_lens, self.block_table, self.slot_mapping]

    (rejection,) = check_owner(WritesBuffers(), KEYS, batches).rejections
    assert rejection.got == "PersistentBuffer"


# Remedies


def test_what_a_kernel_library_lays_out_is_said_to_be_scratch():
    class Workspace(Honest):
        """A plan that fills a workspace as far as it needs."""

        def __init__(self):
            super().__init__()
            self.workspace = torch.zeros(64, dtype=torch.int32)

        def build(self, key, batch, phase):
            state = super().build(key, batch, phase)
            count = key.num_reqs if batch is None else sum(batch.seq_lens)
            self.workspace[:count] = count
            return {**state, "int_workspace": self.workspace}

    report = check_owner(Workspace(), KEYS, batches)
    assert fails(report) <= {"stale-capture", "unwritten", "padding", "repeatable"}
    assert len(fails(report)) > 1
    assert all("pass it as scratch" in each.remedy for each in report.rejections)
    assert check_owner(Workspace(), KEYS, batches, scratch="int_workspace").ok
