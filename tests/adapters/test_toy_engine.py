"""The toy engine: what it serves is what plain greedy decoding gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan, Request
from graphshare.adapters.toy.checkpoint import new_models
from graphshare.adapters.toy.config import EOS
from graphshare.adapters.toy.dense import draft_hidden, target_hidden
from graphshare.adapters.toy.forwards import Forwards
from graphshare.adapters.toy.owner import PagedOwner
from graphshare.adapters.toy.reference import greedy_tokens
from graphshare.adapters.toy.scheduler import Scheduler
from graphshare.adapters.toy.speculation import EagerRunner, SpeculativeEngine
from graphshare.descriptor import BatchDescriptor
from graphshare.owner import Phase, StateOwner
from tests.toy import CONFIG, arrivals, engine_config, models_that_sometimes_agree


def serve(target, draft, engine, requests, *, rebuild=False):
    owners = [PagedOwner(engine, "cpu") for _ in range(3)]
    forwards = Forwards(target, draft, engine, "cpu")
    prefill_owner = owners[2] if rebuild else None
    runner = EagerRunner(forwards, owners[0], owners[1], prefill_owner)
    serving = SpeculativeEngine(forwards, runner)
    serving.run(requests)
    return serving, owners


@given(st.data())
@settings(max_examples=max(10, settings.default.max_examples // 2))
def test_speculative_decoding_is_plain_greedy_decoding(data):
    """For any models, prompts, arrivals and budget, the tokens are those of plain decoding."""
    drafts = data.draw(st.integers(1, 4))
    engine = engine_config(
        num_draft_tokens=drafts, max_num_tokens=data.draw(st.integers(3 * (drafts + 1), 40))
    )
    target, draft = models_that_sometimes_agree(
        data.draw(st.integers(0, 9)), data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    )
    requests = data.draw(arrivals(engine))
    serve(target, draft, engine, requests)
    for request in requests:
        assert request.finished
        plain = greedy_tokens(target, engine, request.prompt, request.max_new_tokens)
        assert request.output == plain


@given(st.data())
@settings(max_examples=max(10, settings.default.max_examples // 4))
def test_borrowing_the_targets_state_changes_nothing(data):
    """Draft prefills on the target's state give the drafts that a state built anew gives."""
    engine = engine_config()
    target, draft = models_that_sometimes_agree(data.draw(st.integers(0, 9)), 1.0)
    requests = data.draw(arrivals(engine))
    again = [Request(r.request_id, r.prompt, r.max_new_tokens, r.arrival) for r in requests]
    borrowed, owners = serve(target, draft, engine, requests)
    rebuilt, own = serve(target, draft, engine, again, rebuild=True)
    assert [r.output for r in requests] == [r.output for r in again]
    assert borrowed.counts == rebuilt.counts
    assert owners[2].num_builds == 0
    assert own[2].num_builds == own[0].num_builds == borrowed.counts.steps


@given(st.data())
@settings(max_examples=max(10, settings.default.max_examples // 4))
def test_drafts_are_those_of_the_dense_draft(data):
    """After any step, the drafts of a request are those of the dense form of the draft."""
    engine = engine_config()
    target, draft = new_models(CONFIG, data.draw(st.integers(0, 9)))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(6)  # so that what attention finds, and where, shows in the scores
    forwards = Forwards(target, draft, engine, "cpu")
    runner = EagerRunner(forwards, PagedOwner(engine, "cpu"), PagedOwner(engine, "cpu"))
    serving = SpeculativeEngine(forwards, runner)
    for request in data.draw(arrivals(engine)):
        serving.add(request)
    while serving.has_work:
        for request in serving.step():
            if request.finished or not request.drafts:
                continue
            known = torch.tensor([request.tokens + request.drafts[:-1]])
            hidden = target_hidden(target, known)
            steps = draft_hidden(draft, target, hidden, known, len(request.drafts))
            for output, token in zip(steps, request.drafts, strict=True):
                scores = target.logits(output[0, -1])
                torch.testing.assert_close(scores[token], scores.max(), rtol=1e-3, atol=1e-3)


def test_a_draft_that_knows_the_target_is_accepted():
    """With a target that only looks at the last token, every draft is right."""
    engine = engine_config()
    target, draft = models_that_sometimes_agree(0, 0.0)
    request = Request(0, (1, 2, 3), 16)
    serving, _ = serve(target, draft, engine, [request])
    assert serving.counts.tokens_per_step > 3


def test_a_request_ends_with_its_text():
    """What comes after the end of the text is dropped, even if it was drafted and accepted."""
    engine = engine_config()
    scheduler = Scheduler(engine)
    request = Request(0, (1,), 10)
    scheduler.add(request)
    first = scheduler.schedule()
    scheduler.complete(first, [5])
    request.drafts = [EOS, 7, 7]
    batch = scheduler.schedule()
    assert batch.token_ids == [5, EOS, 7, 7]
    outcome = scheduler.complete(batch, [EOS, 7, 7, 7])
    assert request.output == [5, EOS]
    assert request.finished
    assert outcome.drafting == []
    assert not scheduler.has_work


def test_a_prompt_is_computed_in_chunks_beside_decodes():
    """A long prompt takes what budget the decodes leave, and produces nothing before its end."""
    engine = engine_config(max_num_tokens=12)
    scheduler = Scheduler(engine)
    short, long = Request(0, (1,), 8), Request(1, tuple(range(20)), 8)
    scheduler.add(short)
    scheduler.add(long)
    batch = scheduler.schedule()
    assert batch.num_pending == [1, 11]
    outcome = scheduler.complete(batch, [9] * 12)
    assert outcome.drafting == [short]
    assert outcome.next_token_ids == [9, *range(1, 12)]
    short.drafts = [9, 8, 7]
    batch = scheduler.schedule()
    assert batch.num_pending == [1, 8]
    assert batch.attention.query_lens == [4, 8]
    assert batch.attention.seq_lens == [5, 19]
    outcome = scheduler.complete(batch, [9] * 12)
    assert short.output == [9, 9, 9]
    assert outcome.next_token_ids == [9, 9, 0, 0, *range(12, 20)]
    assert scheduler.schedule().num_pending == [1, 1]


def test_a_request_waits_for_its_arrival_and_for_pages():
    engine = engine_config(num_pages=17)
    scheduler = Scheduler(engine)
    large, small = Request(0, (1,) * 40, 8, arrival=1), Request(1, (1,) * 20, 8)
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.schedule().requests == [small]
    assert scheduler.schedule().requests == [small]
    assert large.pages == []


@pytest.mark.parametrize(
    ("prompt", "new", "word"),
    [((), 1, "empty"), ((1,), 0, "max_new_tokens"), ((1,) * 60, 2, "fit")],
)
def test_a_request_that_cannot_run_is_refused(prompt, new, word):
    with pytest.raises(ValueError, match=word):
        Scheduler(engine_config()).add(Request(0, prompt, new))


@st.composite
def keys(draw, engine):
    query_len = draw(st.none() | st.integers(1, 4))
    if query_len is not None:
        most = min(engine.max_num_reqs, engine.max_num_tokens // query_len)
        num_reqs = draw(st.integers(1, most))
        return BatchDescriptor(
            num_tokens=num_reqs * query_len, num_reqs=num_reqs, uniform_query_len=query_len
        )
    num_tokens = draw(st.integers(1, engine.max_num_tokens))
    num_reqs = draw(st.none() | st.integers(1, min(engine.max_num_reqs, num_tokens)))
    return BatchDescriptor(num_tokens=num_tokens, num_reqs=num_reqs)


def tensors_of(state):
    metadata = state.attn_metadata
    return [
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        state.slot_mappings,
    ]


@given(st.data())
def test_an_owner_writes_in_place_and_pads(data):
    """A key's state stays where it is, whatever is built; rows past the batch are defined."""
    engine = engine_config()
    owner = PagedOwner(engine, "cpu")
    key = data.draw(keys(engine))
    captured = owner.build(key, None, Phase.CAPTURE)
    places = [(t.data_ptr(), t.shape, t.stride()) for t in tensors_of(captured)]
    assert captured.attn_metadata.max_seq_len == engine.max_model_len
    assert captured.attn_metadata.seq_lens.min() >= 1
    assert captured.attn_metadata.seq_lens.max() <= engine.max_model_len
    assert captured.attn_metadata.query_start_loc[-1] <= key.num_tokens
    assert captured.slot_mappings.max() < engine.page_size
    for tensor in tensors_of(captured):
        tensor.fill_(99)  # left over from another batch
    most = captured.attn_metadata.seq_lens.shape[0]
    live = data.draw(st.integers(1, most))
    query_len = key.uniform_query_len or data.draw(st.integers(1, key.num_tokens // live))
    batch = AttentionBatch.of(
        [QuerySpan([3 * i + 1, 3 * i + 2, 3 * i + 3], 0, min(query_len, 12)) for i in range(live)],
        engine.page_size,
    )
    state = owner.build(key, batch, Phase.REPLAY)
    assert [(t.data_ptr(), t.shape, t.stride()) for t in tensors_of(state)] == places
    starts, lengths, table, slots = tensors_of(state)
    assert starts.tolist() == batch.query_start_loc + [batch.num_tokens] * (most - live)
    assert lengths.tolist() == batch.seq_lens + [0] * (most - live)
    assert not table[live:].any()
    assert not table[:, 3:].any()
    assert slots.tolist() == batch.slot_mapping + [0] * (key.num_tokens - batch.num_tokens)
    assert state.attn_metadata.max_seq_len == max(batch.seq_lens)


def test_an_owner_is_a_state_owner_and_wants_a_batch():
    owner = PagedOwner(engine_config(), "cpu")
    assert isinstance(owner, StateOwner)
    with pytest.raises(ValueError, match="batch"):
        owner.build(BatchDescriptor(num_tokens=1), None, Phase.REPLAY)
