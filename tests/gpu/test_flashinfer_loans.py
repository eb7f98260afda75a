"""Who may run on whose FlashInfer plans: each rule of the spec, on both sides."""

from __future__ import annotations

import pytest
import torch

from graphshare import GraphPool, SpecMismatchError, share_states
from tests import flashinfer_children
from tests.flash_attn_models import batches_of
from tests.flashinfer_models import (
    CAPACITY,
    DEVICE,
    TOLERANCE,
    Model,
    borrower_of,
    keys_of,
    long_batches,
    make_borrower,
    make_owner,
    shape_of,
)
from tests.flashinfer_pairs import PAIRS
from tests.paged_kernels import Shapes

pytestmark = pytest.mark.gpu

ALLOWED = [name for name, pair in PAIRS.items() if not pair.named]
REFUSED = [name for name, pair in PAIRS.items() if pair.named]


def lend(owner, shapes, draft, keys, *, own=None):
    target = GraphPool("target", owner=owner, spec=owner.spec, device=DEVICE)
    prefill = GraphPool("draft.prefill", spec=draft.kernel.spec, owner=own, device=DEVICE)
    share_states(target, prefill)
    target.capture(keys, Model(owner, shapes, CAPACITY).forward)
    prefill.capture(keys, draft.forward)
    return target, prefill


def worst_error(target, prefill, draft):
    worst = 0.0
    for key in prefill.states:
        for batch in [*batches_of(key, 8, capacity=CAPACITY), *long_batches(key)]:
            draft.prepare(batch)
            target.refresh(key, batch)
            error = draft.errors(prefill.replay(key), batch)
            worst = max(worst, error if error == error else float("inf"))
    return worst


@pytest.mark.parametrize("name", ALLOWED)
def test_a_pair_within_the_rules_computes_right(name):
    pair = PAIRS[name]
    shapes = Shapes(*pair.lender)
    owner = make_owner(pair.kernel, shapes)
    _, draft = borrower_of(pair)
    target, prefill = lend(owner, shapes, draft, keys_of(pair.kernel, (16, 512)))
    assert worst_error(target, prefill, draft) < TOLERANCE


@pytest.fixture(scope="module")
def unchecked():
    """Every refused pair, without specs, each in a process; a few at a time."""
    make_borrower()  # skips where the library is missing
    found, waiting, running = {}, list(REFUSED), {}
    while waiting or running:
        while waiting and len(running) < 6:
            name = waiting.pop(0)
            running[name] = flashinfer_children.start(name)
        for name, child in list(running.items()):
            out, _ = child.communicate(timeout=240)
            found[name] = (child.returncode, out)
            del running[name]
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_a_pair_outside_the_rules_is_refused_and_would_be_wrong(name, unchecked):
    pair = PAIRS[name]
    owner = make_owner(pair.kernel, Shapes(*pair.lender))
    kernel, _ = borrower_of(pair)
    target = GraphPool("target", owner=owner, spec=owner.spec, device=DEVICE)
    prefill = GraphPool("draft.prefill", spec=kernel.spec, device=DEVICE)
    with pytest.raises(SpecMismatchError) as refused:
        share_states(target, prefill)
    assert sorted(refused.value.fields) == sorted(pair.named)
    code, out = unchecked[name]
    said = [line for line in out.splitlines() if line.startswith("ERROR")]
    print(f"\n{name}: exit {code}, {said or out.strip().splitlines()[-1:]}")
    if code == 0:
        assert float(said[0].split()[1]) > TOLERANCE
    else:
        assert "illegal memory access" in out or code < 0, out[-2000:]


@pytest.mark.parametrize("kind", ["fa2", "fa3", "batch_attention"])
def test_an_owner_may_plan_for_the_borrower_too(kind):
    """Where the plan does not serve, the lists still do: one more plan, and the same bits."""
    shapes, others = Shapes(8, 2), Shapes(16, 2)
    owner = make_owner(kind, shapes, also=[shape_of(others)])
    own = make_owner(kind, others)
    draft = Model(make_borrower(others), others, CAPACITY, seed=1)
    twin = Model(own, others, CAPACITY, seed=1)
    keys = keys_of(kind, (16, 512))
    target, prefill = lend(owner, shapes, draft, keys)
    alone = GraphPool("alone", owner=own, device=DEVICE)
    alone.capture(keys, twin.forward)
    for key in keys:
        for batch in batches_of(key, 8, capacity=CAPACITY):
            draft.prepare(batch)
            twin.prepare(batch)
            target.refresh(key, batch)
            borrowed = prefill.replay(key)
            assert draft.errors(borrowed, batch) < TOLERANCE
            alone.refresh(key, batch)
            assert torch.equal(borrowed[0], alone.replay(key)[0])
