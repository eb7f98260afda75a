"""What is wrong in a call is said at the door, in words that help, and changes nothing."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from graphshare import (
    BatchDescriptor,
    CaptureError,
    GraphPool,
    GraphShareError,
    KeyMismatchError,
    OwnershipError,
    PersistentBuffer,
    Phase,
    ReleasedStateError,
    Staleness,
    StaleStateError,
    capture_descriptors,
    share_states,
)
from graphshare.capture import TapeBackend
from graphshare.planning import estimate
from tests.one_buffer import BIG, KEYS, SMALL, Owner, borrower, double, make, pair, triple

NEW = BatchDescriptor(1, 1)


class Pair(NamedTuple):
    """A named tuple is a key of someone's, and iterable all the same."""

    rows: int
    requests: int


class World:
    """Pools in every state, and all that a misuse could change."""

    def __init__(self):
        self.owner = Owner()
        self.target, self.draft, self.shared = pair(self.owner)
        self.idle = borrower("idle")  # captures nothing
        self.own = make(name="own")  # an owner, and no graph yet
        self.closed = make(name="closed")
        self.closed.capture(KEYS, double)
        self.closed.close()
        self.buffer = PersistentBuffer(4, torch.int32, "cpu", padding=0, name="lens")
        self.wide = PersistentBuffer((4, 3), torch.int64, "cpu", padding="last", name="pages")
        self.buffer.write([3, 2], 4)
        self.target.refresh(BIG, 5)

    @property
    def pools(self):
        return self.target, self.draft, self.idle, self.own, self.closed

    def snapshot(self):
        seen = []
        for pool in self.pools:
            counts = pool.statistics()
            seen.append((pool.keys(), pool.closed, pool.loan, pool.dispatch, list(pool.states)))
            seen.append((counts.captures, counts.builds, counts.refreshes, counts.replays))
            seen.append((counts.fresh, counts.dispatched, counts.missed, counts.bytes))
            seen.append([entry.outputs is entry.graph.outputs for entry in pool._entries.values()])
            seen.append(dict(pool.holdings.named))
        seen.append((self.owner.buffer.tolist(), len(self.owner.builds)))
        seen.append((self.buffer.tensor.tolist(), self.buffer.live_rows))
        seen.append((self.wide.tensor.tolist(), self.wide.live_rows, self.shared.live_key))
        return seen


class TwoParameters:
    def build(self, key, batch):
        raise NotImplementedError


class Unhashable:
    __hash__ = None


def spent(values):
    found = iter(values)
    list(found)
    return found


def in_a_capture(pool, body):
    """Run ``body(capturing)`` inside the with block of an engine's own loop."""
    with pool.capturing([NEW]) as capturing:
        body(capturing)


def committed(**given):
    def body(capturing):
        capturing.state(NEW, Phase.WARMUP)
        capturing.state(NEW, Phase.CAPTURE)
        capturing.commit(NEW, **{"launch": print, **given})

    return body


def new_pool(**options):
    return GraphPool(options.pop("name", "pool"), **{"device": "cpu", **options})


def new_buffer(shape=4, dtype=torch.int32, device="cpu", padding=0, name="lens"):
    return PersistentBuffer(shape, dtype, device, padding=padding, name=name)


A, B = torch.zeros(3), torch.zeros(3)
FWD = double

CALLS = {
    # Making a pool
    "owner for a name": (lambda w: GraphPool(Owner()), TypeError, "name string owner="),
    "no build": (lambda w: new_pool(owner=3), TypeError, "pool owner build 3"),
    "a class for an owner": (lambda w: new_pool(owner=Owner), TypeError, "pool class Owner(...)"),
    "build of two": (
        lambda w: new_pool(owner=TwoParameters()),
        TypeError,
        "pool build(key, batch, phase) TwoParameters.build(key, batch)",
    ),
    "no device": (lambda w: new_pool(device="cpus"), ValueError, "pool device cpus cuda:1"),
    "device of another type": (lambda w: new_pool(device=1.5), TypeError, "pool device 1.5"),
    "no such backend": (lambda w: new_pool(backend="graph"), ValueError, "pool backend tape graph"),
    "a class for a backend": (
        lambda w: new_pool(backend=TapeBackend),
        TypeError,
        "pool backend class TapeBackend",
    ),
    "a pool for a backend": (
        lambda w: new_pool(backend=w.own),
        TypeError,
        "pool backend GraphPool",
    ),
    "unseen options": (
        lambda w: new_pool(backend=TapeBackend(), backend_options={"generators": ()}),
        ValueError,
        "pool backend_options of your own",
    ),
    "no such option": (
        lambda w: new_pool(backend_options={"mode": 1}),
        TypeError,
        "pool backend_options capture_error_mode mode",
    ),
    "options in a list": (
        lambda w: new_pool(backend_options=["mode"]),
        TypeError,
        "pool backend_options mapping",
    ),
    "no spec": (lambda w: new_pool(spec={"head_size": 64}), TypeError, "pool AttentionSpec dict"),
    "covers no callable": (lambda w: new_pool(covers=True), TypeError, "pool covers callable"),
    "cost no callable": (lambda w: new_pool(cost="num_tokens"), TypeError, "pool cost num_tokens"),
    "state_key no callable": (
        lambda w: new_pool(state_key=3),
        TypeError,
        "pool state_key callable",
    ),
    "inspectable no flag": (lambda w: new_pool(inspectable="yes"), TypeError, "inspectable yes"),
    "checks misspelt": (lambda w: new_pool(checks="quick"), ValueError, "pool checks quick"),
    # capture, recapture, capturing
    "forward first": (lambda w: w.own.capture(FWD, [BIG]), TypeError, "own keys first forward"),
    "one key": (lambda w: w.own.capture(BIG, FWD), TypeError, "own keys list"),
    "one named tuple": (lambda w: w.own.capture(Pair(1, 2), FWD), TypeError, "own keys list Pair"),
    "a string of keys": (lambda w: w.own.capture("abc", FWD), TypeError, "own keys abc list"),
    "no forward": (lambda w: w.own.capture([BIG], None), TypeError, "own forward callable None"),
    "a tensor for keys": (lambda w: w.own.capture(A, FWD), TypeError, "own keys Tensor"),
    "None for a key": (lambda w: w.own.capture([BIG, None], FWD), TypeError, "own None dispatch"),
    "no hash": (lambda w: w.own.capture([Unhashable()], FWD), TypeError, "own hashable Unhashable"),
    "a key twice": (
        lambda w: w.own.capture([BIG, SMALL, BIG], FWD),
        ValueError,
        f"own once twice {BIG!r}",
    ),
    "a spent iterator": (
        lambda w: w.own.capture(spent([BIG]), FWD),
        ValueError,
        "own iterator list eagerly",
    ),
    "keys of two types": (lambda w: w.own.capture([BIG, 3], FWD), TypeError, "own one type int"),
    "writes_state=[...]": (
        lambda w: w.own.capture([BIG], FWD, writes_state=[BIG]),
        TypeError,
        "own writes_state True False",
    ),
    "progress=3": (lambda w: w.own.capture([BIG], FWD, progress=3), TypeError, "progress callable"),
    "recapture forward first": (lambda w: w.target.recapture(FWD), TypeError, "target keys first"),
    "recapture one key": (lambda w: w.target.recapture(BIG), TypeError, "target recapture list"),
    "recapture a key as forward": (
        lambda w: w.target.recapture([BIG], BIG),
        TypeError,
        "target forward callable",
    ),
    "capturing one key": (lambda w: w.target.capturing(NEW), TypeError, "target capturing list"),
    "capturing replace=...": (
        lambda w: w.target.capturing([NEW], replace=[BIG]),
        TypeError,
        "replace True",
    ),
    "estimate one key": (lambda w: estimate(w.target, NEW, FWD), TypeError, "estimate list"),
    "estimate without a pool": (lambda w: estimate([NEW], FWD, w.own), TypeError, "GraphPool list"),
    "estimate keys of two types": (
        lambda w: estimate(w.target, [NEW, 3], FWD),
        TypeError,
        "target keys one type int",
    ),
    "estimate keys that are held": (
        lambda w: estimate(w.target, [BIG], FWD),
        CaptureError,
        "target capture of a key that is held",
    ),
    "estimate forward first": (
        lambda w: estimate(w.target, FWD, [NEW]),
        TypeError,
        "target estimate keys first",
    ),
    # The serving path, with None
    "replay of None": (
        lambda w: w.target.replay(None),
        KeyMismatchError,
        "target replay without a key dispatch eagerly live_key refresh",
    ),
    "refresh of None": (lambda w: w.target.refresh(None, 1), KeyMismatchError, "dispatch eagerly"),
    "bind of None": (lambda w: w.target.bind(None), KeyMismatchError, "dispatch eagerly"),
    "states of None": (lambda w: w.target.states[None], KeyMismatchError, "dispatch eagerly"),
    # Closed pools
    "dispatch when closed": (
        lambda w: w.closed.dispatch(num_tokens=1, num_reqs=1),
        ReleasedStateError,
        "closed dispatch new pool",
    ),
    **{
        f"{name} when closed": (call, ReleasedStateError, "closed open new pool")
        for name, call in {
            "replay": lambda w: w.closed.replay(BIG),
            "refresh": lambda w: w.closed.refresh(BIG, 1),
            "bind": lambda w: w.closed.bind(BIG),
            "invalidate": lambda w: w.closed.invalidate(BIG),
            "release": lambda w: w.closed.release(BIG),
            "capture": lambda w: w.closed.capture([BIG], FWD),
            "recapture": lambda w: w.closed.recapture(),
            "capturing": lambda w: w.closed.capturing([BIG]),
            "estimate": lambda w: estimate(w.closed, [BIG], FWD),
            "label": lambda w: w.closed.label(inputs={"a": A}),
            "provenance": lambda w: w.closed.provenance(BIG),
            "rebind": lambda w: w.closed.rebind({A: B}),
            "lending": lambda w: share_states(w.closed, w.idle),
            "borrowing": lambda w: share_states(w.target, w.closed),
        }.items()
    },
    "states when closed": (lambda w: w.closed.states[BIG], KeyMismatchError, "closed new pool"),
    # share_states, SharedStates
    "names for pools": (lambda w: share_states("a", "b"), TypeError, "producer GraphPool 'a'"),
    "an owner for a pool": (
        lambda w: share_states(w.owner, w.idle),
        TypeError,
        "producer GraphPool Owner",
    ),
    "a handle for a pool": (
        lambda w: share_states(w.target, w.shared),
        TypeError,
        "consumer GraphPool SharedStates",
    ),
    "key no callable": (
        lambda w: share_states(w.target, w.idle, key=BIG),
        TypeError,
        "share_states key callable",
    ),
    "when no callable": (
        lambda w: share_states(w.target, w.idle, when=[BIG]),
        TypeError,
        "when callable",
    ),
    "view no callable": (
        lambda w: share_states(w.target, w.idle, view="a"),
        TypeError,
        "view callable",
    ),
    "adopt no flag": (lambda w: share_states(w.target, w.idle, adopt=BIG), TypeError, "adopt True"),
    "to itself": (lambda w: share_states(w.target, w.target), OwnershipError, "itself two pools"),
    "swapped": (
        lambda w: share_states(w.idle, w.own),
        OwnershipError,
        "idle neither own share_states(producer, consumer) in this order",
    ),
    "prove of one key": (lambda w: w.shared.prove(BIG), TypeError, "draft prove list"),
    "prove of another key": (
        lambda w: w.shared.prove([NEW]),
        KeyMismatchError,
        "draft prove borrowed captured on the loan",
    ),
    "prove with a key to build": (
        lambda w: w.shared.prove(build=BIG),
        TypeError,
        "draft prove build True",
    ),
    "verify with rows of padding": (
        lambda w: w.shared.verify(1, padding=3),
        TypeError,
        "draft verify padding True",
    ),
    "verify without an owner": (
        lambda w: w.shared.verify(1),
        OwnershipError,
        "draft owner nothing to compare",
    ),
    "prove of nothing": (
        lambda w: share_states(w.target, w.idle).prove(),
        KeyMismatchError,
        "idle prove no key at all capture",
    ),
    # capturing()'s own calls
    "a word for a phase": (
        lambda w: in_a_capture(w.own, lambda c: c.state(NEW, "capture")),
        TypeError,
        "own phase Phase.CAPTURE 'capture'",
    ),
    "a phase of no capture": (
        lambda w: in_a_capture(w.own, lambda c: c.state(NEW, Phase.REPLAY)),
        ValueError,
        "own Phase.WARMUP refresh",
    ),
    "another key": (
        lambda w: in_a_capture(w.own, lambda c: c.state(BIG, Phase.WARMUP)),
        KeyMismatchError,
        "own state in a capture",
    ),
    "launch called": (
        lambda w: in_a_capture(w.own, committed(launch=None)),
        TypeError,
        "own commit launch without calling",
    ),
    "nbytes no number": (
        lambda w: in_a_capture(w.own, committed(nbytes="1k")),
        TypeError,
        "own nbytes 1k",
    ),
    "release no callable": (
        lambda w: in_a_capture(w.own, committed(release=True)),
        TypeError,
        "own release callable",
    ),
    "nothing committed": (
        lambda w: in_a_capture(w.own, lambda c: None),
        CaptureError,
        "own commit for each key",
    ),
    # capture_descriptors, BatchDescriptor
    "one size": (
        lambda w: capture_descriptors(num_tokens=8, max_num_reqs=4),
        TypeError,
        "capture_descriptors num_tokens [8]",
    ),
    "a plan of sizes": (
        lambda w: capture_descriptors(plan=[8]),
        TypeError,
        "capture_descriptors plan path list",
    ),
    "one uniform length": (
        lambda w: capture_descriptors([8], 4, 4),
        TypeError,
        "uniform_query_lens [4]",
    ),
    "one LoRA count": (
        lambda w: capture_descriptors([8], 4, num_active_loras=2),
        TypeError,
        "num_active_loras [2]",
    ),
    "one ubatch count": (
        lambda w: capture_descriptors([8], 4, num_ubatches=2),
        TypeError,
        "num_ubatches [2]",
    ),
    "several maxima": (
        lambda w: capture_descriptors([8], [4]),
        TypeError,
        "max_num_reqs int",
    ),
    "covers a number": (lambda w: BIG.covers(4), TypeError, "covers BatchDescriptor int"),
    "a flag for a count": (lambda w: BatchDescriptor(True), TypeError, "num_tokens int True"),
    # Provenance
    "two tensors to rebind": (lambda w: w.target.rebind(A, B), TypeError, "rebind {old: new}"),
    "one tensor to rebind": (lambda w: w.target.rebind(A), TypeError, "rebind {old: new}"),
    "no pairs to rebind": (lambda w: w.target.rebind([A, B]), TypeError, "(old, new)"),
    "rebind of one key": (lambda w: w.target.rebind({A: B}, BIG), TypeError, "target keys list"),
    "rebind also one pool": (
        lambda w: w.target.rebind({A: B}, also=w.draft),
        TypeError,
        "target also list",
    ),
    "rebind also no pool": (
        lambda w: w.target.rebind({A: B}, also=["draft"]),
        TypeError,
        "target also 'draft'",
    ),
    "provenance with names to confirm": (
        lambda w: w.target.provenance(BIG, confirm={"a": A}),
        TypeError,
        "target confirm True",
    ),
    "label without a name": (lambda w: w.target.label(inputs=A), TypeError, "inputs name"),
    "label of a number": (lambda w: w.target.label(weights=3), TypeError, "weights name 3"),
    "provenance of a number": (
        lambda w: w.target.provenance(BIG, buffers=3),
        TypeError,
        "buffers name 3",
    ),
    # PersistentBuffer
    "shape in words": (lambda w: new_buffer("ab"), TypeError, "lens shape 'ab'"),
    "shape of floats": (lambda w: new_buffer(4.0), TypeError, "lens shape 4.0"),
    "no rows": (lambda w: new_buffer(0), ValueError, "lens shape at least 1"),
    "dtype in words": (lambda w: new_buffer(dtype="int32"), TypeError, "lens dtype torch.int32"),
    "buffer on no device": (lambda w: new_buffer(device="gpu"), ValueError, "lens device 'gpu'"),
    "no padding": (lambda w: new_buffer(padding=None), TypeError, "lens padding number None"),
    "padding in words": (lambda w: new_buffer(padding="first"), ValueError, "lens padding first"),
    "padding out of range": (
        lambda w: new_buffer(padding=1 << 40),
        ValueError,
        "lens padding int32 1099511627776",
    ),
    "buffer without a name": (lambda w: new_buffer(name=3), TypeError, "name string 3"),
    "write swapped": (
        lambda w: w.buffer.write(4, [1, 2]),
        TypeError,
        "lens rows values come first",
    ),
    "rows a float": (lambda w: w.buffer.write([1], 2.0), TypeError, "lens rows integer 2.0"),
    "rows a flag": (lambda w: w.buffer.write([1], True), TypeError, "lens rows integer True"),
    "values a number": (lambda w: w.buffer.write(1, 2), TypeError, "lens values sequence 1"),
    "values a generator": (
        lambda w: w.buffer.write((i for i in (1, 2)), 2),
        TypeError,
        "lens values generator",
    ),
    "values in words": (lambda w: w.buffer.write("12", 2), ValueError, "lens values int32 '12'"),
    "values of floats": (
        lambda w: w.buffer.write(torch.ones(2), 2),
        ValueError,
        "lens torch.int32 torch.float32 as it was",
    ),
    "values out of range": (
        lambda w: w.buffer.write(torch.tensor([1 << 40]), 2),
        ValueError,
        "lens torch.int32 1099511627776",
    ),
    "a batch too large": (
        lambda w: w.buffer.write([1, 2, 3], 2),
        ValueError,
        "lens 2 live rows key got 3 larger key eagerly",
    ),
    "more rows than there are": (lambda w: w.buffer.write([1], 5), ValueError, "lens rows 4 got 5"),
    "misshapen": (
        lambda w: w.wide.write(torch.ones(2, 4, dtype=torch.int64), 2),
        ValueError,
        "pages (4, 3) (2, 4)",
    ),
    "no last row": (
        lambda w: w.wide.write(torch.ones(0, 3, dtype=torch.int64), 2),
        ValueError,
        "pages no last row",
    ),
    "fill with a float": (lambda w: w.buffer.fill(1.5, 2), ValueError, "lens value int32 1.5"),
    "fill with nothing": (lambda w: w.buffer.fill(None, 2), TypeError, "lens value number None"),
    "fill swapped": (lambda w: w.buffer.fill(1, [1, 2]), TypeError, "lens rows integer"),
    "fill too many": (lambda w: w.buffer.fill(1, 5), ValueError, "lens rows 4 got 5"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_misuse_is_named_and_changes_nothing(name):
    """The error's type, the words that its message needs, and the world as before."""
    call, kind, words = CALLS[name]
    world = World()
    before = world.snapshot()
    with pytest.raises(kind) as caught:
        call(world)
    text = str(caught.value)
    assert [word for word in words.split(" ") if word not in text] == []
    if name == "prove of nothing":  # declares a loan first
        world.idle.loan = None
    if "in_a_capture" in call.__code__.co_names:  # what an owner built stays built
        assert [pool.keys() for pool in world.pools] == keys_of(before)
        return
    assert world.snapshot() == before
    # What is wrong in a call is no refusal: catching those would hide it.
    assert issubclass(kind, GraphShareError) != issubclass(kind, (TypeError, ValueError))


def keys_of(snapshot):
    return [each[0] for each in snapshot[:-3:5]]


def test_a_world_after_all_of_them_still_serves():
    """One world, every misuse, and then a step as if nothing had been."""
    world = World()
    for name, (call, kind, _) in CALLS.items():
        if "prove of nothing" not in name:
            with pytest.raises(kind):
                call(world)
    world.target.refresh(BIG, 3)
    assert world.draft.replay(BIG).tolist() == [9] * 4
    assert world.target.replay(BIG).tolist() == [6] * 4
    world.own.capture(KEYS, triple)
    world.own.refresh(SMALL, 1)
    assert world.own.replay(SMALL).tolist() == [3] * 2


# What an owner, a view or a forward does wrong shows at the capture.


class Returns:
    """An owner whose build returns what it is told, for captures and for batches."""

    def __init__(self, make, writes=None):
        self.make = make
        if writes is not None:
            self.writes = lambda key: writes

    def build(self, key, batch, phase):
        return self.make(key, phase)


BUFFER = PersistentBuffer(4, torch.int32, "cpu", padding=0, name="lens")
ROWS = torch.zeros(4)

STATES = {
    "nothing": (None, "None", "return"),
    "numbers": ([1, 2, 3], "list", "return"),
    "an empty nest": ({"a": {}, "b": ()}, "dict", "return"),
    "a number": (3, "int", "return"),
    "a class": (Owner, "type", "return"),
    "meta alone": (torch.zeros(4, device="meta"), "meta", "contents"),
    "meta beside": ({"a": ROWS, "b": torch.zeros(4, device="meta")}, "meta", ": b:"),
    "the buffer itself": ({"seq_lens": BUFFER}, "lens", "write()"),
    "sparse": ({"a": ROWS, "b": torch.zeros(2, 2).to_sparse()}, "sparse", "address"),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.CAPTURE])
def test_a_state_that_no_check_could_look_at_is_refused(name, phase):
    """At the capture, in whichever phase it comes; the pool is as before, and may capture then."""
    state, *words = STATES[name]
    owner = Returns(lambda key, now: state if now is phase else ROWS)
    pool = make(owner, name="target")
    with pytest.raises(CaptureError) as caught:
        pool.capture([BIG], lambda key, state: torch.zeros(1))
    for word in ("target", repr(BIG), *words):
        assert word in str(caught.value)
    assert (caught.value.key, len(pool), pool.statistics().captures) == (BIG, 0, 0)
    owner.make = lambda key, now: ROWS
    pool.capture([BIG], double)
    pool.refresh(BIG, None)
    assert pool.replay(BIG).tolist() == [0] * 4


def test_host_values_of_numpy_are_no_state():
    """An array is host data, whose contents nothing compares."""
    pool = make(Returns(lambda key, now: {"lens": torch.zeros(4).numpy()}))
    with pytest.raises(CaptureError, match="dict"):
        pool.capture([BIG], lambda key, state: torch.zeros(1))


@pytest.mark.gpu
def test_a_state_on_the_host_is_none_of_a_gpus():
    """A builder that forgot the device; and a tensor there with host data beside it is fine."""
    lens = torch.zeros(4, device="cuda:0")
    for state, fine in (({"a": ROWS}, False), ({"a": ROWS, "b": lens}, True)):
        pool = GraphPool(
            "target", owner=Returns(lambda key, now, state=state: state), device="cuda"
        )
        if fine:
            pool.capture([BIG], lambda key, state: state["b"] * 2)
            continue
        with pytest.raises(CaptureError, match="cuda:0"):
            pool.capture([BIG], lambda key, state: lens * 2)


@pytest.mark.parametrize(
    "state",
    [
        ROWS,
        [ROWS],
        {"a": {"b": (1, ROWS)}},
        {"a": ROWS, "b": None, "c": "words"},
        torch.zeros(0),
        {"a": torch.zeros(0, 3)},
    ],
    ids=["bare", "list", "nest", "host values beside", "empty", "empty in a nest"],
)
def test_a_state_with_a_tensor_is_one(state):
    """A bare tensor, a nest, one of size zero: an engine may have no request in a batch."""
    pool = make(Returns(lambda key, now: state))
    pool.capture([BIG], lambda key, state: torch.zeros(1))
    pool.refresh(BIG, None)
    pool.replay(BIG)


def test_what_nothing_reads_may_lie_anywhere():
    """``any`` says that no kernel depends on it, a meta tensor for its shape included."""
    owner = Returns(lambda key, now: {"a": ROWS, "shape": torch.zeros(4, device="meta")})
    owner.host_values = {"*.shape": "any"}
    pool = make(owner)
    pool.capture([BIG], lambda key, state: state["a"] * 2)
    pool.refresh(BIG, None)
    assert pool.replay(BIG).tolist() == [0] * 4


@pytest.mark.parametrize("seen", [None, 3, {}], ids=repr)
def test_a_view_that_shows_nothing_is_refused(seen):
    """It forgot to return, most likely; the lender is as before."""
    target, draft = make(name="target"), borrower("draft")
    target.capture(KEYS, double)
    share_states(target, draft, view=lambda state: seen)
    with pytest.raises(CaptureError) as caught:
        draft.capture([BIG], lambda key, state: torch.zeros(1))
    for word in ("draft", "view", "return", repr(BIG)):
        assert word in str(caught.value)
    assert len(draft) == 0
    target.refresh(BIG, 2)
    assert target.replay(BIG).tolist() == [4] * 4


@pytest.mark.parametrize(
    ("writes", "words"),
    [([BUFFER], "PersistentBuffer buffer.tensor"), (ROWS, "Tensor list"), (3, "3"), ([3], "3")],
    ids=["buffer", "tensor", "number", "numbers"],
)
def test_writes_returns_tensors(writes, words):
    """Anything else would leave it unknown what a build makes stale."""
    pool = make(Returns(lambda key, now: ROWS, writes), name="target")
    with pytest.raises(CaptureError) as caught:
        pool.capture([BIG], double)
    for word in ("target", "writes(key)", *words.split(" ")):
        assert word in str(caught.value)
    assert len(pool) == 0


def test_a_forward_that_raises_says_what_to_do():
    """In the warmup and in the capture; its own exception is the cause."""
    for during in (1, 2):
        calls = []

        def forward(key, state, calls=calls, during=during):
            calls.append(key)
            if len(calls) == during:
                raise KeyError("layer")
            return state * 2

        pool = make(name="target")
        with pytest.raises(CaptureError) as caught:
            pool.capture([BIG], forward)
        assert isinstance(caught.value.__cause__, KeyError)
        assert caught.value.remedy
        assert "cause" in str(caught.value)


def test_an_exception_of_an_owner_says_which_build():
    """It is the owner's own, of its own type; a note names pool, key and phase."""
    for phase in Phase:
        owner = Owner()
        inner = owner.build

        def build(key, batch, now, phase=phase, inner=inner):
            if now is phase:
                raise LookupError("no such page")
            return inner(key, batch, now)

        owner.build = build
        pool = make(owner, name="target")
        if phase is Phase.REPLAY:
            pool.capture([BIG], double)
        with pytest.raises(LookupError, match="no such page") as caught:
            pool.refresh(BIG, 1) if phase is Phase.REPLAY else pool.capture([BIG], double)
        if hasattr(caught.value, "add_note"):
            (note,) = caught.value.__notes__
            for word in ("target", repr(BIG), phase.name):
                assert word in note


# Words of the refusals that come with serving.


def test_all_that_differs_of_a_leaf_is_listed():
    """Fields of one leaf together, and how many more leaves; the first ones as attributes."""
    held = {"lens": torch.zeros(4, dtype=torch.int32), "slots": torch.zeros(4), "n": 4}
    owner = Returns(lambda key, now: held)
    pool = make(owner, name="target")
    pool.capture([BIG], lambda key, state: state["slots"] * 2)
    held = {**held, "lens": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(GraphShareError) as caught:
        pool.refresh(BIG, 1)
    error = caught.value
    assert (error.path, error.field, error.fields) == ("lens", "address", ("address", "dtype"))
    assert error.paths == ("lens",)
    for word in ("address and dtype of lens changed:", "torch.int32", "torch.int64"):
        assert word in str(error)
    assert "more of its leaves" not in str(error)
    held = {"lens": torch.zeros(4, dtype=torch.int64), "slots": torch.zeros(4), "n": 4}
    with pytest.raises(GraphShareError) as caught:
        pool.refresh(BIG, 1)
    assert caught.value.paths == ("lens", "slots")
    assert "1 more" in str(caught.value)


def test_a_leaf_that_came_or_went_is_described():
    """In words, not as an object of graphshare's; memory is spoken of where there was some."""
    held = {"lens": ROWS, "n": 4}
    pool = make(Returns(lambda key, now: held), name="target")
    pool.capture([BIG], lambda key, state: state["lens"] * 2)
    for state, words in (
        ({"lens": ROWS}, "presence of n changed: expected the value 4, got nothing"),
        (
            {"lens": ROWS, "n": 4, "m": 3},
            "presence of m changed: expected nothing, got the value 3",
        ),
        ({"n": 4}, "presence of lens changed: expected a tensor [4] torch.float32 on cpu, got"),
    ):
        held = state
        with pytest.raises(GraphShareError) as caught:
            pool.refresh(BIG, 1)
        assert words in str(caught.value)
        assert "Leaf(" not in str(caught.value)
        assert ("old memory" in str(caught.value)) == ("lens" in words)


@pytest.mark.parametrize("state", [ROWS, {"a": ROWS}, (ROWS, 3)], ids=["bare", "dict", "tuple"])
def test_a_build_that_returns_nothing_for_a_batch(state):
    """A branch of a builder without its return is asked about."""
    pool = make(Returns(lambda key, phase: None if phase is Phase.REPLAY else state))
    pool.capture([BIG], lambda key, state: torch.zeros(1))
    with pytest.raises(GraphShareError, match=r"\(the state itself\).*forget") as caught:
        pool.refresh(BIG, 1)
    assert caught.value.path == ""


def test_a_buffer_in_the_place_of_its_view_is_named():
    """A build for a batch that returns the PersistentBuffer itself is told what to return."""
    buffer = PersistentBuffer(4, torch.float32, "cpu", padding=0)

    def returned(key, phase):
        view = buffer.write([1.0], 4)
        return {"lens": buffer if phase is Phase.REPLAY else view}

    pool = make(Returns(returned))
    pool.capture([BIG], lambda key, state: state["lens"] * 2)
    with pytest.raises(GraphShareError, match=r"Return what write\(\) returned"):
        pool.refresh(BIG, 1)


def test_a_tensor_without_an_address_at_a_refresh():
    """It is a refusal like another, and what was fresh is so no more: the owner has written."""
    states = [{"a": ROWS}]
    pool = make(Returns(lambda key, now: states[-1]), replays_per_refresh=None)
    pool.capture([BIG], lambda key, state: torch.zeros(1))
    pool.refresh(BIG, 1)
    states.append({"a": torch.zeros(2, 2).to_sparse()})
    for before in (None, Staleness.INVALIDATED):
        if before:
            pool.invalidate(BIG)
        with pytest.raises(GraphShareError, match="no address"):
            pool.refresh(BIG, 1)
        with pytest.raises(StaleStateError) as caught:
            pool.replay(BIG)
        assert caught.value.rule is Staleness.BUILD_FAILED  # the last that became of it


def test_verify_before_a_refresh_says_verify():
    """Not that a replay was refused."""
    _, _, shared = pair(options={"owner": Owner()})
    with pytest.raises(StaleStateError, match="draft: verify on a stale state"):
        shared.verify(1)


def test_a_capture_hints_at_pools_that_were_swapped():
    """Where a chain may still be declared backwards, the capture says what is missing."""
    first, last = borrower("first"), borrower("last")
    share_states(first, last)
    with pytest.raises(KeyMismatchError, match=r"share_states\(producer, consumer\)"):
        last.capture([BIG], double)


def closes_inside(capturing, pool, release):
    with capturing as each:
        each.state(BIG, Phase.WARMUP)
        each.state(BIG, Phase.CAPTURE)
        each.commit(BIG, print, release=release)
        pool.close()


def test_a_pool_that_closes_inside_a_capture_keeps_nothing():
    """Neither where it was closed before the with block, nor within it."""
    freed = []
    for early in (True, False):
        pool = make()
        capturing = pool.capturing([BIG])
        if early:
            pool.close()
        with pytest.raises(ReleasedStateError):
            closes_inside(capturing, pool, lambda: freed.append(BIG))
        assert len(pool) == 0
    assert freed == [BIG]


def test_a_closed_pools_dispatch_does_not_keep_it():
    """An engine that hoisted ``pool.dispatch`` of a closed pool keeps no graphs with it."""
    pool = make()
    pool.capture(KEYS, double)
    pool.close()
    with pytest.raises(ReleasedStateError):
        pool.dispatch(num_tokens=1)
    assert pool.statistics().refusals == {"ReleasedStateError": 1}


def test_refresh_with_no_batch_is_the_owners_business():
    """An owner that holds the batch itself goes by the phase, and is refreshed with ``None``."""

    class Holds(Owner):
        def build(self, key, batch, phase):
            return super().build(key, self.now if phase is Phase.REPLAY else 0, phase)

    owner = Holds()
    pool = make(owner)
    pool.capture(KEYS, double)
    owner.now = 7
    pool.refresh(BIG, None)
    assert pool.replay(BIG).tolist() == [14] * 4


def test_a_device_that_is_not_there():
    """Said by name, with what to do; not by an assertion deep in torch."""
    missing = f"cuda:{torch.cuda.device_count()}"
    for made in (lambda: new_pool(device=missing), lambda: new_buffer(device=missing)):
        with pytest.raises(RuntimeError, match=missing):
            made()
    if not torch.cuda.is_available():
        for made in (lambda: new_pool(device="cuda"), lambda: new_buffer(device="cuda")):
            with pytest.raises(RuntimeError, match="finds no CUDA device"):
                made()


def test_a_backend_of_ones_own_names_the_device():
    """Where none is named; and another one is refused."""
    assert GraphPool("pool", backend=TapeBackend("cpu")).device == torch.device("cpu")
    with pytest.raises(ValueError, match="device"):
        GraphPool("pool", backend=TapeBackend("cpu"), device="meta")


@pytest.mark.parametrize("how", [staticmethod, classmethod])
def test_a_class_may_be_an_owner(how):
    """If its build needs no instance."""
    rows = torch.zeros(4)

    def build(*given):
        return rows.fill_(0 if given[-2] is None else given[-2])

    pool = make(type("Owner", (), {"build": how(build)}))
    pool.capture([BIG], double)
    pool.refresh(BIG, 2)
    assert pool.replay(BIG).tolist() == [4] * 4


def test_a_state_key_that_cannot_be_one():
    """Refused before anything is built."""
    owner = Owner()
    pool = make(owner, name="target", state_key=lambda key: [key])
    with pytest.raises(TypeError, match="target: state_key"):
        pool.capture([BIG], double)
    assert owner.builds == []
