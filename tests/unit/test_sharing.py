"""share_states: who may borrow, and when the loan ends."""

from __future__ import annotations

import gc

import pytest
import torch

from graphshare import (
    AddressChangedError,
    AttentionSpec,
    GraphPool,
    KeyMismatchError,
    OwnershipError,
    ReleasedStateError,
    SpecMismatchError,
    Staleness,
    StaleStateError,
    share_states,
)
from tests.one_buffer import (
    BIG,
    KEYS,
    SMALL,
    Owner,
    borrower,
    captured,
    make,
    pair,
    served,
    triple,
)

# Who may borrow.


def test_a_loan_may_be_declared_before_or_after_the_producer_captures():
    """Only the consumer must not have captured."""
    target, draft = captured(name="target"), borrower()
    share_states(target, draft)
    draft.capture(KEYS, triple)
    target.refresh(BIG, 2)
    assert draft.replay(BIG).tolist() == [6] * 4


def test_the_consumer_captures_after_the_producer_and_after_the_loan():
    """A consumer that has graphs on buffers of its own is refused; one that let go is not."""
    target, draft = captured(name="target"), captured(name="draft")
    with pytest.raises(OwnershipError):
        share_states(target, draft)
    assert served(draft, BIG, 1) == [2] * 4
    draft.release()
    share_states(target, draft)
    draft.capture(KEYS, triple)
    target.refresh(BIG, 2)
    assert draft.replay(BIG).tolist() == [6] * 4


def test_a_second_producer_is_refused():
    """A consumer has one lender; its handle closed, it may have another."""
    first, second, draft = make(name="first"), captured(name="second"), borrower()
    shared = share_states(first, draft)
    for again in (first, second):
        with pytest.raises(OwnershipError):
            share_states(again, draft)
    shared.close()
    share_states(second, draft)
    draft.capture([BIG], triple)
    second.refresh(BIG, 1)
    assert draft.replay(BIG).tolist() == [3] * 4


def test_several_consumers_of_one_producer():
    """Each has an allowance of its own, and none makes another stale."""
    target = captured(name="target")
    drafts = [borrower(f"draft{i}", replays_per_refresh=i) for i in (1, 2)]
    for draft in drafts:
        share_states(target, draft)
        draft.capture(KEYS, triple)
    target.refresh(BIG, 2)
    for draft, allowed in zip(drafts, (1, 2), strict=True):
        for _ in range(allowed):
            assert draft.replay(BIG).tolist() == [6] * 4
        with pytest.raises(StaleStateError) as caught:
            draft.replay(BIG)
        assert caught.value.rule is Staleness.USED_UP
    assert target.replay(BIG).tolist() == [4] * 4


def test_a_chain():
    """A borrower may lend on; one refresh by the owner's pool serves all, and only it refreshes."""
    owner = Owner()
    target, middle, last = make(owner, name="target"), borrower("middle"), borrower("last")
    share_states(middle, last)
    share_states(target, middle)
    for pool in (target, middle, last):
        pool.capture(KEYS, triple)
    builds = len(owner.builds)
    target.refresh(SMALL, 5)
    assert [pool.replay(SMALL).tolist() for pool in (last, middle, target)] == [[15, 15]] * 3
    assert len(owner.builds) == builds + 1
    for pool in (middle, last):
        with pytest.raises(OwnershipError) as caught:
            pool.refresh(SMALL, 1)
        assert caught.value.key == SMALL
        assert pool.statistics().builds_avoided == 1
        assert sum(pool.statistics().builds.values()) == 0


def test_a_chain_is_captured_in_order():
    """The last of a chain cannot capture before the middle has."""
    target, middle, last = captured(name="target"), borrower("middle"), borrower("last")
    share_states(target, middle)
    share_states(middle, last)
    with pytest.raises(KeyMismatchError) as caught:
        last.capture([BIG], triple)
    assert (caught.value.missing, caught.value.nearest) == ((BIG,), ())
    middle.capture([BIG], triple)
    last.capture([BIG], triple)


def test_cycles_are_refused():
    """Of any length, one included; what was declared before still holds."""
    one, two, three = borrower("one"), borrower("two"), borrower("three")
    with pytest.raises(OwnershipError):
        share_states(one, one)
    share_states(one, two)
    with pytest.raises(OwnershipError):
        share_states(two, one)
    share_states(two, three)
    with pytest.raises(OwnershipError):
        share_states(three, one)
    assert one.statistics().refusals == {"OwnershipError": 3}


@pytest.mark.gpu
def test_another_device_is_refused():
    """Addresses of one device mean nothing on another."""
    target = GraphPool("target", owner=Owner(), device="cuda:0")
    with pytest.raises(OwnershipError) as caught:
        share_states(target, borrower())
    assert (caught.value.expected, caught.value.got) == ("cuda:0", "cpu")


def test_another_device_is_refused_without_a_gpu():
    """As above, with a pool whose device only says so."""
    target = make(name="target")
    target.device = torch.device("cuda", 1)
    with pytest.raises(OwnershipError) as caught:
        share_states(target, borrower())
    assert (caught.value.expected, caught.value.got) == ("cuda:1", "cpu")


def test_closed_pools_do_not_share():
    """Neither lends nor borrows."""
    for closed in (0, 1):
        pools = [make(name="target"), borrower()]
        pools[closed].close()
        with pytest.raises(ReleasedStateError):
            share_states(*pools)


# Specs.


def test_specs_are_compared_where_both_state_a_field():
    """An unstated field is not checked, and the handle says whether anything was."""
    full = AttentionSpec(num_q_heads=8, num_kv_heads=2, page_size=16, q_dtype=torch.bfloat16)
    other = AttentionSpec(num_q_heads=4, num_kv_heads=2, page_size=16, q_dtype=torch.float16)
    with pytest.raises(SpecMismatchError) as caught:
        share_states(make(spec=full), borrower(spec=other))
    assert caught.value.fields == ("num_q_heads", "q_dtype")
    for mine, theirs, checked in (
        (full, AttentionSpec(page_size=16, window=-1), True),
        (full, None, False),
        (None, full, False),
        (None, None, False),
    ):
        shared = share_states(make(spec=mine), borrower(spec=theirs))
        assert shared.spec_checked is checked


def test_specs_are_compared_along_a_chain():
    """A middle pool without a spec does not hide its lender's."""
    target = make(spec=AttentionSpec(head_size=64), name="target")
    middle = borrower("middle")
    share_states(target, middle)
    with pytest.raises(SpecMismatchError) as caught:
        share_states(middle, borrower("last", spec=AttentionSpec(head_size=128)))
    assert caught.value.fields == ("head_size",)
    assert share_states(middle, borrower("fits", spec=AttentionSpec(head_size=64))).spec_checked


def test_specs_of_a_chain_that_was_declared_backwards():
    """A lender that borrows itself only later is compared at the capture at the latest."""
    target = captured(spec=AttentionSpec(head_size=64), name="target")
    middle, last = borrower("middle"), borrower("last", spec=AttentionSpec(head_size=128))
    shared = share_states(middle, last)
    assert not shared.spec_checked
    share_states(target, middle)
    middle.capture(KEYS, triple)
    with pytest.raises(SpecMismatchError) as caught:
        last.capture(KEYS, triple)
    assert caught.value.fields == ("head_size",)
    assert len(last) == 0


def test_a_spec_may_narrow_what_is_compared():
    """An adapter's subclass decides which fields its kernel bakes in."""

    class Loose(AttentionSpec):
        def differing(self, other):
            return tuple(name for name in super().differing(other) if name != "num_q_heads")

    shared = share_states(
        make(spec=Loose(num_q_heads=8)), borrower(spec=AttentionSpec(num_q_heads=4))
    )
    assert shared.spec_checked


# The end of a loan.


def test_closing_a_loan():
    """Borrowed graphs are refused; the consumer's own, and the producer, go on."""
    own = Owner()
    target, draft, shared = pair(options={"owner": own}, when=lambda key: key == SMALL)
    target.refresh(SMALL, 1)
    draft.refresh(BIG, 2)
    shared.close()
    shared.close()
    assert shared.closed
    assert draft.replay(BIG).tolist() == [6] * 4
    bound = draft.bind(SMALL)
    for replay in (lambda: draft.replay(SMALL), bound.replay):
        with pytest.raises(ReleasedStateError):
            replay()
    assert target.replay(SMALL).tolist() == [2] * 2
    target.refresh(SMALL, 3)
    with pytest.raises(ReleasedStateError):
        draft.replay(SMALL)


def test_a_closed_loan_and_then_another():
    """After ``close``: another lender, and what is captured anew serves again."""
    target, draft, shared = pair()
    shared.close()
    other = captured(name="other")
    again = share_states(other, draft)
    draft.capture(KEYS, triple)
    other.refresh(BIG, 2)
    assert again.live_key == BIG
    assert shared.live_key is None
    assert draft.replay(BIG).tolist() == [6] * 4
    target.refresh(BIG, 5)
    with pytest.raises(StaleStateError) as caught:
        draft.replay(BIG)
    assert caught.value.rule is Staleness.USED_UP


def test_a_closed_loan_and_then_an_owner_of_ones_own():
    """A consumer with an owner captures on its own buffers after the loan."""
    target, draft, shared = pair(options={"owner": Owner()})
    shared.close()
    draft.capture(KEYS, triple)
    assert served(draft, BIG, 4) == [12] * 4
    assert served(target, BIG, 4) == [8] * 4


def test_recapture_of_a_borrower():
    """On the same loan, at any time."""
    target, draft, _ = pair()
    draft.recapture(forward=lambda key, state: state * 7)
    target.refresh(BIG, 1)
    assert draft.replay(BIG).tolist() == [7] * 4


def test_recapture_at_the_same_addresses_keeps_borrowers():
    """What a borrower's graphs read is still what the owner builds."""
    target, draft, shared = pair()
    bound = draft.bind(BIG)
    target.recapture()
    with pytest.raises(StaleStateError):
        draft.replay(BIG)
    target.refresh(BIG, 2)
    assert shared.live_key == BIG
    assert bound.replay().tolist() == [6] * 4


def test_recapture_elsewhere_ends_what_was_lent():
    """The borrower is refused until it is captured anew, and then follows."""
    owner = Owner()
    target, draft, shared = pair(owner)
    owner.buffer = torch.zeros(8)
    target.recapture()
    target.refresh(BIG, 2)
    assert shared.live_key is None
    with pytest.raises(ReleasedStateError):
        draft.replay(BIG)
    draft.recapture()
    target.refresh(BIG, 2)
    assert draft.replay(BIG).tolist() == [6] * 4


def test_a_capture_on_a_released_state_is_refused():
    """The lender's capture comes first."""
    target, draft = captured(name="target"), borrower()
    middle = borrower("middle")
    share_states(target, middle)
    share_states(middle, draft)
    middle.capture(KEYS, triple)
    target.release(BIG)
    with pytest.raises(ReleasedStateError) as caught:
        draft.capture(KEYS, triple)
    assert caught.value.key == BIG
    assert len(draft) == 0
    target.close()
    with pytest.raises(ReleasedStateError):
        draft.capture([SMALL], triple)


def test_what_is_lent_outlives_its_release():
    """The memory lives until the last borrower lets go."""
    target, draft, _ = pair()
    places = [draft.states[key].data_ptr() for key in KEYS]
    target.release()
    del target
    gc.collect()
    assert [draft.states[key].data_ptr() for key in KEYS] == places


def test_a_borrower_lets_go_of_its_own_graph_alone():
    """The lender's key stays fresh, and is served on."""
    target, draft, shared = pair()
    target.refresh(BIG, 2)
    draft.release(BIG)
    assert shared.live_key is None
    assert target.replay(BIG).tolist() == [4] * 4
    draft.close()
    assert served(target, BIG, 3) == [6] * 4


def test_a_closed_consumer_ends_its_loan():
    """The handle says so."""
    target, draft, shared = pair()
    draft.close()
    assert shared.closed
    assert served(target, BIG, 3) == [6] * 4


def test_a_closed_lender_lends_no_more():
    """A capture on it is refused as released, not as an unknown key."""
    target, draft = captured(name="target"), borrower()
    share_states(target, draft)
    target.close()
    with pytest.raises(ReleasedStateError):
        draft.capture([BIG], triple)


def test_a_state_is_checked_if_one_pool_on_it_wants_it():
    """``checks`` is each pool's own: a careless lender does not lend carelessly."""
    owner = Owner()
    target, draft = captured(owner, [BIG], name="target", checks="off"), borrower()
    share_states(target, draft)
    draft.capture([BIG], triple)
    owner.buffer = torch.zeros(8)
    with pytest.raises(AddressChangedError):
        target.refresh(BIG, 1)
    draft.release()
    target.refresh(BIG, 1)


def test_nothing_revives_what_was_released():
    """A borrower of a released state is told so, whatever happens to that memory later."""
    target, draft, _ = pair()
    target.refresh(BIG, 1)
    target.release(BIG)
    draft.invalidate(BIG)
    with pytest.raises(ReleasedStateError):
        draft.replay(BIG)
    target.refresh(SMALL, 1)
    with pytest.raises(ReleasedStateError):
        draft.replay(BIG)


def test_a_dropped_consumer_is_not_granted_anything():
    """Borrowers come and go; the producer's refreshes do not pile up on them."""
    target = captured(name="target")
    for i in range(5):
        draft = borrower(f"draft{i}")
        share_states(target, draft)
        draft.capture(KEYS, triple)
    del draft
    gc.collect()
    record = target.holdings.entries[BIG].record
    assert len(record.leases) == 1
    assert served(target, BIG, 1) == [2] * 4


@pytest.mark.parametrize("ending", ["loan", "release", "close"])
def test_a_chain_outlives_its_middle(ending):
    """The state is the first pool's: what was captured further down stays valid."""
    owner = Owner()
    target, middle, last = make(owner, name="target"), borrower("middle"), borrower("last")
    loan = share_states(target, middle)
    share_states(middle, last)
    for pool in (target, middle, last):
        pool.capture([SMALL], triple)
    {"loan": loan.close, "release": middle.release, "close": middle.close}[ending]()
    target.refresh(SMALL, 4)
    assert last.replay(SMALL).tolist() == [12.0, 12.0]
    with pytest.raises((ReleasedStateError, KeyMismatchError)):
        middle.replay(SMALL)


def test_a_loan_that_is_closed_and_declared_again():
    """The same pools and the same state: what is captured anew is as fresh as the first was."""
    target, draft, shared = pair(options={"replays_per_refresh": 2})
    target.refresh(BIG, 1)
    draft.replay(BIG)
    draft.replay(BIG)
    for again in (1, 2):
        shared.close()
        with pytest.raises(ReleasedStateError):
            draft.replay(BIG)
        shared = share_states(target, draft)
        draft.capture([BIG], triple)  # of its two keys
        with pytest.raises(StaleStateError):
            draft.replay(BIG)
        target.refresh(BIG, 1)
        assert shared.live_key == BIG
        draft.replay(BIG)
        assert draft.statistics().replays == 2 + again
        assert draft.statistics().builds_avoided == 1 + again
    with pytest.raises(ReleasedStateError):
        draft.replay(SMALL)
    draft.release()
    assert draft.statistics().replays == 4
    assert draft.statistics().builds_avoided == 3
