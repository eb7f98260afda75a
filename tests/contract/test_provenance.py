"""What a graph reads, as it says itself; the same on each backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshare import AttentionState, GraphPool, Phase, ProvenanceError, share_states
from graphshare.capture import make_backend
from graphshare.provenance import Provenance, Use
from tests.movable import ROWS, Metadata, Model, MovableOwner, key_of, pool_of

KEYS = [key_of(8), key_of(4)]


@pytest.fixture
def dev(kind: str) -> str:
    return "cuda" if kind == "cuda" else "cpu"


def captured(kind, dev, **options):
    owner, model = MovableOwner(dev), Model(dev)
    pool = pool_of(kind, owner=owner, **options)
    pool.capture(KEYS, model.forward)
    return pool, owner, model


def test_every_tensor_of_the_forward_is_found_and_named(kind, dev):
    pool, _, model = captured(kind, dev)
    for key in KEYS:
        report = pool.provenance(key, **model.named())
        assert {
            "attn_metadata.a.lengths",
            "attn_metadata.a.table",
            "attn_metadata.b.lengths",
            "slot_mappings",
            "x",
            "weight",
            "cache",
            "out",
            "hidden",
        } <= report.names
        held = {each.name for node in report.nodes for each in node.addresses}
        assert {"slot_mappings", "x", "weight", "cache", "out", "hidden"} <= held
        places = {each.name: each for each in report.places}
        for each in (each for node in report.nodes for each in node.addresses if each.name):
            assert each.address == places[each.name].address + each.offset
        assert not report.dangling
        assert not report.unnamed
        assert not report.opaque
        leaves = {each.name for each in report.of("state")}
        assert leaves <= {"attn_metadata.a.lengths", "attn_metadata.a.table", "slot_mappings"}
        assert report.of(Use.BORROWED) == ()
        assert report.key == str(key)


def test_a_report_survives_a_file(kind, dev, tmp_path):
    pool, _, model = captured(kind, dev)
    report = pool.provenance(KEYS[0], **model.named())
    report.save(tmp_path / "report.json")
    assert Provenance.load(tmp_path / "report.json") == report


def test_a_report_shows_itself_in_one_line(kind, dev):
    """A debugger or a notebook shows ``prove()``'s result: a line for each key, not each node."""
    pool, _, model = captured(kind, dev)
    report = pool.provenance(KEYS[0], **model.named())
    assert str(report) in repr(report)
    assert str(KEYS[0]) in str(report)
    assert f"{len(report.nodes)} nodes" in str(report)
    assert len(repr({KEYS[0]: report})) < 400


def test_labels_are_kept_until_the_pool_is_closed(kind, dev):
    pool, _, model = captured(kind, dev)
    before = pool.provenance(KEYS[0])
    assert before.unnamed
    pool.label(**model.named())
    assert not pool.provenance(KEYS[0]).unnamed
    pool.close()
    assert not pool.holdings.named


def test_reading_changes_nothing(kind, dev):
    pool, _, model = captured(kind, dev)
    pool.refresh(KEYS[0], 2)
    want = model.expected(KEYS[0], pool.states[KEYS[0]])
    first = pool.provenance(KEYS[0])
    assert pool.provenance(KEYS[0]) == first
    assert torch.equal(pool.replay(KEYS[0])["hidden"], want)


@pytest.mark.parametrize("keep", [True, False])
def test_a_buffer_that_was_freed_is_dangling(kind, dev, keep):
    """A workspace that the forward took from elsewhere, and that nobody holds any more."""
    owner = MovableOwner(dev)
    workspace = [torch.ones(1 << 20, device=dev)]

    def forward(key, state):
        workspace[0].add_(1)
        return state.slot_mappings + workspace[0][: key.num_tokens].long()

    pool = pool_of(kind, owner=owner)
    pool.capture(KEYS, forward)
    assert not pool.provenance(KEYS[0]).dangling
    if not keep:
        if dev == "cpu":  # the tape holds its tensors; their memory goes with the storage
            workspace[0].untyped_storage().resize_(0)
        workspace.clear()
        if dev == "cuda":
            torch.cuda.synchronize()
    report = pool.provenance(KEYS[0])
    assert bool(report.dangling) is not keep
    if dev == "cuda" and not keep:
        torch.cuda.empty_cache()  # not even PyTorch has the memory now
        assert pool.provenance(KEYS[0]).dangling


def test_a_graph_that_cannot_be_read_says_what_to_do(kind, dev):
    owner, model = MovableOwner(dev), Model(dev)
    if kind == "cuda":
        pool = GraphPool("closed", owner=owner, device=dev, backend=kind)
        pool.capture(KEYS, model.forward)
    else:
        pool = pool_of(kind, owner=owner)
        with pool.capturing(KEYS) as capturing:
            for key in KEYS:
                state = capturing.state(key, Phase.CAPTURE)
                capturing.commit(key, lambda: None, state)
    with pytest.raises(ProvenanceError) as caught:
        pool.provenance(KEYS[1])
    assert caught.value.keys == (KEYS[1],)
    assert caught.value.remedy


ASKS = {
    "provenance": lambda pool, other, moves: pool.provenance(KEYS[1]),
    "rebind": lambda pool, other, moves: pool.rebind(moves),
    "rebind of a key": lambda pool, other, moves: pool.rebind(moves, [KEYS[0]]),
    "adopt": lambda pool, other, moves: share_states(other, pool, adopt=True),
}


@pytest.mark.parametrize("by", ["the pool", "an engine"])
@pytest.mark.parametrize("ask", ASKS)
def test_a_graph_that_was_not_kept_is_not_read(kind, dev, ask, by):
    """Each backend asks for ``inspectable=True``, so that a CPU test finds where it is missing."""
    owner, model = MovableOwner(dev), Model(dev)
    pool = GraphPool("draft", owner=owner, device=dev, backend=kind, inspectable=by != "the pool")
    if by == "the pool":
        pool.capture(KEYS, model.forward)
    else:
        own = make_backend(kind, dev)
        with pool.capturing(KEYS) as capturing:
            for key in capturing.keys:
                state = capturing.state(key, Phase.CAPTURE)
                own.warmup(lambda key=key, state=state: model.forward(key, state))
                state = capturing.state(key, Phase.CAPTURE)
                graph = own.capture(lambda key=key, state=state: model.forward(key, state))
                handed = graph.graph if kind == "cuda" else graph
                capturing.commit(key, graph.replay, graph.outputs, graph=handed)
    other, _, _ = captured(kind, dev)
    with pytest.raises(ProvenanceError) as caught:
        ASKS[ask](pool, other, {model.cache: model.cache.clone()})
    error = caught.value
    assert error.keys in [(key,) for key in KEYS]
    assert error.what.startswith("draft: ")
    assert "inspectable=True" in error.remedy
    assert pool.loan is None
    pool.refresh(KEYS[0], 2)
    want = model.expected(KEYS[0], pool.states[KEYS[0]])
    assert torch.allclose(pool.replay(KEYS[0])["hidden"], want)


@pytest.mark.parametrize("kept", ["the lender's", "the borrower's"])
def test_a_family_is_read_as_a_whole_or_not_at_all(kind, dev, kept):
    owner, model = MovableOwner(dev), Model(dev)
    lends = kept == "the lender's"
    target = GraphPool("target", owner=owner, device=dev, backend=kind, inspectable=lends)
    draft = GraphPool("draft", device=dev, backend=kind, inspectable=not lends)
    shared = share_states(target, draft)
    target.capture(KEYS, model.forward)
    draft.capture(KEYS, model.forward)
    for ask in (shared.prove, lambda: target.rebind({model.cache: model.cache.clone()})):
        with pytest.raises(ProvenanceError) as caught:
            ask()
        assert caught.value.what.startswith("draft: " if lends else "target: ")
        assert caught.value.key in KEYS
        assert "inspectable=True" in caught.value.remedy
    target.refresh(KEYS[0], 2)
    want = model.expected(KEYS[0], target.states[KEYS[0]])
    assert torch.allclose(draft.replay(KEYS[0])["hidden"], want)


def test_an_engines_own_graph_can_be_read(kind, dev):
    owner, model = MovableOwner(dev), Model(dev)
    pool = pool_of(kind, owner=owner)
    backend = make_backend(kind, dev, inspectable=True)
    graphs = []
    with pool.capturing(KEYS) as capturing:
        for key in capturing.keys:
            state = capturing.state(key, Phase.CAPTURE)
            backend.warmup(lambda key=key, state=state: model.forward(key, state))
            state = capturing.state(key, Phase.CAPTURE)
            graph = backend.capture(lambda key=key, state=state: model.forward(key, state))
            graphs.append(graph)
            given_graph = graph.graph if kind == "cuda" else graph
            capturing.commit(key, graph.replay, graph.outputs, graph=given_graph)
    report = pool.provenance(KEYS[0], **model.named())
    assert {"attn_metadata.a.lengths", "slot_mappings", "cache"} <= report.names
    assert not report.dangling


# Proofs about loans.


def lent(kind, dev, forward=None, **loan):
    owner, target_model, draft_model = MovableOwner(dev), Model(dev), Model(dev, seed=1)
    target = pool_of(kind, owner=owner)
    draft_owner = MovableOwner(dev)
    draft = pool_of(kind, "draft", owner=draft_owner)
    shared = share_states(target, draft, **loan)
    target.capture(KEYS, target_model.forward)
    draft.capture(KEYS, forward(draft_owner, draft_model) if forward else draft_model.forward)
    return target, draft, shared, owner, draft_owner


def test_a_loan_is_proven(kind, dev):
    _, _, shared, _, _ = lent(kind, dev)
    reports = shared.prove()
    assert set(reports) == set(KEYS)
    for report in reports.values():
        assert {"attn_metadata.a.lengths", "slot_mappings"} <= {
            each.name for each in report.of("borrowed")
        }
        assert {each.pool for each in report.of("borrowed")} == {"target"}
        assert report.of("state") == ()
    assert set(shared.prove([KEYS[1]])) == {KEYS[1]}
    with pytest.raises(KeyError):
        shared.prove([key_of(3)])


@pytest.mark.parametrize("leaf", ["lengths", "table", "slots"])
@pytest.mark.parametrize("build", [True, False])
def test_a_graph_on_buffers_of_its_own_is_no_borrower(kind, dev, leaf, build):
    """The forward takes one of its buffers from its own owner, as a closure does."""

    def own(owner, model):
        def forward(key, state):
            rows = key.num_tokens
            metadata = state.attn_metadata["b"]
            lengths = owner.lengths[:rows] if leaf == "lengths" else metadata.lengths
            table = owner.table[:rows] if leaf == "table" else metadata.table
            slots = owner.slots[:rows] if leaf == "slots" else state.slot_mappings
            return model.forward(key, AttentionState({"b": Metadata(lengths, table)}, slots))

        return forward

    _, _, shared, _, _ = lent(kind, dev, own)
    with pytest.raises(ProvenanceError) as caught:
        shared.prove(build=build)
    assert caught.value.path or caught.value.node
    assert caught.value.key in KEYS


@pytest.mark.parametrize("read", ["lengths", "table", "slots"])
def test_reading_both_is_no_proof_either(kind, dev, read):
    """It reads what is lent, and a buffer of its own beside it, which is named."""

    def both(owner, model):
        def forward(key, state):
            out = model.forward(key, state)
            own = owner.buffers()[read][: key.num_tokens]
            return out["hidden"] + (own if own.ndim == 1 else own[:, 1])[:, None]

        return forward

    _, draft, shared, _, own = lent(kind, dev, both)
    draft.label(inputs={"labelled": own.buffers()[read]})  # its leaf says more
    with pytest.raises(ProvenanceError) as caught:
        shared.prove()
    error = caught.value
    assert error.node
    names = {"slots": ("slot_mappings",)}.get(
        read, (f"attn_metadata.a.{read}", f"attn_metadata.b.{read}")
    )
    assert (error.path, error.paths) == (names[0], names)
    assert f"draft's own owner fills as {names[0]}" in error.got
    assert ("(argument " if kind == "tape" else "(parameter ") in error.got
    shared.prove(build=False)  # nobody has said which buffers are its own


def test_which_of_its_own_is_known_from_its_captures(kind, dev):
    """Its owner builds nothing for ``build=False``; what it was captured on is known."""

    def both(owner, model):
        def forward(key, state):
            return model.forward(key, state)["hidden"] + owner.slots[: key.num_tokens, None]

        return forward

    _, _, shared, _, _ = lent(kind, dev, both, when=lambda key: key == KEYS[1])
    with pytest.raises(ProvenanceError) as caught:
        shared.prove(build=False)
    assert (caught.value.path, caught.value.key) == ("slot_mappings", KEYS[1])


def test_a_buffer_that_is_no_leaf_has_no_path(kind, dev):
    """Scratch that a build writes, by its owner's word."""
    scratch = torch.ones(4, 1, device=dev)
    owner = MovableOwner(dev)
    owner.writes = lambda key: [*owner.buffers().values(), scratch]
    target, draft = pool_of(kind, owner=MovableOwner(dev)), pool_of(kind, "draft", owner=owner)
    shared = share_states(target, draft)
    model = Model(dev)
    target.capture([KEYS[1]], model.forward)
    draft.capture([KEYS[1]], lambda key, state: model.forward(key, state)["hidden"] + scratch)
    with pytest.raises(ProvenanceError) as caught:
        shared.prove()
    assert (caught.value.path, caught.value.paths) == ("", ())
    assert caught.value.got.endswith("own owner fills")
    assert caught.value.node


def test_a_state_that_is_one_tensor_is_named_in_words(kind, dev):
    class One:
        def __init__(self):
            self.rows = torch.ones(8, device=dev)

        def build(self, key, batch, phase):
            return self.rows[: key.num_tokens].fill_(batch or 1)

    own = One()
    target, draft = pool_of(kind, owner=One()), pool_of(kind, "draft", owner=own)
    shared = share_states(target, draft)
    target.capture(KEYS, lambda key, rows: rows * 2)
    draft.capture(KEYS, lambda key, rows: rows * own.rows[: key.num_tokens])
    with pytest.raises(ProvenanceError) as caught:
        shared.prove()
    assert caught.value.path == ""
    assert "draft's own owner fills as the state itself" in caught.value.got


def test_a_lender_that_reads_nothing_proves_nothing(kind, dev):
    target = pool_of(kind, owner=MovableOwner(dev))
    draft = pool_of(kind, "draft")
    shared = share_states(target, draft)
    x, model = torch.ones(4, device=dev), Model(dev)
    target.capture(KEYS, lambda key, state: x + 1)
    draft.capture(KEYS, model.forward)
    with pytest.raises(ProvenanceError):
        shared.prove()


def test_only_what_a_view_shows_is_asked_for(kind, dev):
    view = lambda state: state._replace(slot_mappings=None)  # noqa: E731

    def reads_metadata(owner, model):
        def forward(key, state):
            assert state.slot_mappings is None
            return state.attn_metadata["a"].lengths + state.attn_metadata["a"].table.sum(1).int()

        return forward

    _, _, shared, _, _ = lent(kind, dev, reads_metadata, view=view)
    (report, _) = shared.prove().values()
    assert "slot_mappings" not in report.names


def test_a_second_capture_settles_what_is_an_address(kind, dev):
    pool, owner, model = captured(kind, dev)
    report = pool.provenance(KEYS[0], confirm=True, **model.named())
    settled = {each.certainty.value for each in report.of("state", "graph")}
    assert settled <= ({"read"} if kind == "tape" else {"confirmed", "read"})
    assert report.names == pool.provenance(KEYS[0], **model.named()).names

    def aside(key, state):  # a buffer of the state, but not through it
        return owner.lengths[: key.num_tokens] + 1

    other = pool_of(kind, "other", owner=owner)
    other.capture(KEYS, aside)
    found = {each.certainty.value for each in other.provenance(KEYS[0], confirm=True).of("state")}
    assert found == ({"read"} if kind == "tape" else {"unmoved"})


@settings(max_examples=max(5, settings.default.max_examples // 4))
@given(data=st.data())
def test_a_forward_is_found_to_read_exactly_what_it_reads(kind, data):
    """Any subset of buffers, read or written by any of some operators, whole or in part."""
    dev = "cuda" if kind == "cuda" else "cpu"
    buffers = {f"b{i}": torch.ones(ROWS, 4, device=dev) for i in range(6)}
    chosen = data.draw(st.lists(st.sampled_from(sorted(buffers)), max_size=5), label="chosen")
    ways = [data.draw(st.sampled_from(["read", "write", "part", "sum"])) for _ in chosen]

    def forward(key, state):
        total = state.slot_mappings[:, None] * 1.0
        for name, way in zip(chosen, ways, strict=True):
            each = buffers[name]
            if way == "read":
                total = total + each[:1]
            elif way == "write":
                each.mul_(2)
            elif way == "part":
                total = total + each[3:4, 1:2]
            else:
                total = total + each.sum()
        return total

    pool = pool_of(kind, owner=MovableOwner(dev))
    pool.capture([KEYS[1]], forward)
    report = pool.provenance(KEYS[1], buffers=buffers)
    assert {each.name for each in report.of("buffer")} == set(chosen)
    assert not report.dangling
    assert not report.unnamed
    pool.close()
