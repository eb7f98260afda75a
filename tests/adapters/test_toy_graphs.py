"""The toy engine on captured graphs: lossless, and without a build for the draft's prefills."""

from functools import cache, lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshare.adapters.toy.batch import Request
from graphshare.adapters.toy.checkpoint import SHIPPED, load_models, new_models
from graphshare.adapters.toy.config import BOS, EngineConfig
from graphshare.adapters.toy.forwards import Forwards
from graphshare.adapters.toy.graphs import GraphRunner, decode_keys, spec_of, target_keys
from graphshare.adapters.toy.owner import PagedOwner
from graphshare.adapters.toy.reference import greedy_tokens
from graphshare.adapters.toy.speculation import EagerRunner, SpeculativeEngine
from graphshare.adapters.toy.text import shipped_passages
from graphshare.errors import SpecMismatchError
from tests.toy import CONFIG, arrivals, engine_config, models_that_sometimes_agree

ON_A_GPU = pytest.mark.gpu


class VerifyingRunner(GraphRunner):
    """In chosen steps, has the draft's owner build too, and compares.

    Attributes:
        steps: In which to compare; counted down to.
        verified: How often it did.
    """

    steps = frozenset()
    step = 0
    verified = 0

    def prepare_target(self, batch):
        key = super().prepare_target(batch)
        self.step += 1
        if self.step in self.steps:
            self.verified += 1
            self.shared.verify(batch)
            self.target.refresh(key, batch)  # to verify is to write over it
        return key


class World:
    """An engine whose graphs are captured once; models come and go by their weights.

    The graphs bake in where the weights lie, so another model in the same place is another engine.
    """

    def __init__(self, num_draft_tokens, max_num_tokens, device, *, sharing=True):
        self.device = device
        self.engine = engine_config(
            num_draft_tokens=num_draft_tokens, max_num_tokens=max_num_tokens
        )
        models = [model.to(device) for model in new_models(CONFIG)]
        self.forwards = Forwards(*models, self.engine, device)
        self.owners = [PagedOwner(self.engine, device) for _ in range(3)]
        self.runner = VerifyingRunner(
            self.forwards,
            sharing=sharing,
            device=device,
            target_owner=self.owners[0],
            prefill_owner=self.owners[1],
            decode_owner=self.owners[2],
        )
        self.runner.capture()

    @torch.no_grad()
    def load(self, target, draft):
        models = (self.forwards.target_model, self.forwards.draft_model)
        for old, new in zip(models, (target, draft), strict=True):
            for name, parameter in old.named_parameters():
                parameter.copy_(dict(new.named_parameters())[name])

    def serve(self, requests, runner=None):
        serving = SpeculativeEngine(self.forwards, runner or self.runner)
        serving.run(requests)
        return serving.counts

    def eager(self):
        return EagerRunner(self.forwards, *(PagedOwner(self.engine, self.device) for _ in "12"))

    def counted(self):
        pools = (self.runner.target, self.runner.prefill, self.runner.decode)
        return [pool.statistics() for pool in pools], [owner.num_builds for owner in self.owners]


@cache
def world(num_draft_tokens, roomy, device="cpu", *, sharing=True):
    rows = 3 * (num_draft_tokens + 1)
    return World(num_draft_tokens, rows + 21 * roomy, device, sharing=sharing)


def again(requests):
    return [Request(r.request_id, r.prompt, r.max_new_tokens, r.arrival) for r in requests]


def assert_the_same(expected, got, what):
    """Say where two lists of tokens part, which two long lists do not show."""
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        places = range(max(len(one), len(other)))
        parted = next((p for p in places if one[p : p + 1] != other[p : p + 1]), None)
        assert parted is None, (
            f"{what}: request {number} differs from token {parted} on: "
            f"expected {one[parted : parted + 8]}, got {other[parted : parted + 8]}"
        )


def check_lossless(data, device):
    serving = world(data.draw(st.integers(1, 4)), data.draw(st.booleans()), device)
    models = models_that_sometimes_agree(
        data.draw(st.integers(0, 9)), data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    )
    serving.load(*models)
    requests = data.draw(arrivals(serving.engine))
    serving.runner.steps = frozenset(data.draw(st.sets(st.integers(1, 20), max_size=3)))
    serving.runner.step = serving.runner.verified = 0

    before, built_before = serving.counted()
    counts = serving.serve(requests)
    after, built = serving.counted()
    verified = serving.runner.verified

    target = serving.forwards.target_model
    plain = [
        greedy_tokens(target, serving.engine, r.prompt, r.max_new_tokens, device=device)
        for r in requests
    ]
    outputs = [request.output for request in requests]
    eager = again(requests)
    eager_counts = serving.serve(eager, serving.eager())
    assert_the_same(plain, [r.output for r in eager], "eager speculation against plain decoding")
    assert_the_same(plain, outputs, "graphs against plain decoding")
    assert counts == eager_counts  # the drafts too were those of the eager engine

    # What verify has the draft's owner build is all that it ever builds.
    assert built[1] - built_before[1] == verified
    assert after[1].builds["replay"] - before[1].builds["replay"] == verified
    assert built[0] - built_before[0] == counts.steps + verified
    assert after[0].refreshes - before[0].refreshes == counts.steps + verified
    assert after[1].refreshes == 0
    assert after[1].builds_avoided - before[1].builds_avoided == counts.steps
    for pool in (0, 1):
        assert after[pool].replays - before[pool].replays == counts.steps
    assert after[2].refreshes - before[2].refreshes == after[2].replays - before[2].replays
    assert not any(pool.refusals or pool.missed for pool in after)


@given(st.data())
@settings(max_examples=max(20, settings.default.max_examples // 2))
def test_speculation_on_borrowed_graphs_is_plain_greedy_decoding(data):
    """For any models, prompts, arrivals and budgets: the tokens of plain decoding, and no build
    for a draft prefill while serving; a state that its owner builds anew is never another one."""
    check_lossless(data, "cpu")


@pytest.mark.gpu
@given(st.data())
def test_speculation_on_borrowed_cuda_graphs_is_plain_greedy_decoding(data):
    """The same, on CUDA graphs, against an eager run on the same GPU."""
    check_lossless(data, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@given(st.data())
@settings(max_examples=max(10, settings.default.max_examples // 10))
def test_without_sharing_the_draft_builds_as_often_as_the_target(device, data):
    """The same tokens, steps and drafts; what borrowing avoids is a build for each step."""
    own = world(3, False, device, sharing=False)
    borrowing = world(3, False, device)
    models = models_that_sometimes_agree(data.draw(st.integers(0, 9)), 1.0)
    requests = data.draw(arrivals(own.engine))
    others = again(requests)
    for each in (own, borrowing):
        each.load(*models)
        each.runner.steps = frozenset()
    _, before = own.counted()
    counts = own.serve(requests)
    pools, after = own.counted()
    assert counts == borrowing.serve(others)
    assert_the_same([r.output for r in others], [r.output for r in requests], "own states")
    assert [b - a for a, b in zip(before[:2], after[:2], strict=True)] == [counts.steps] * 2
    assert pools[1].builds_avoided == 0


@pytest.mark.gpu
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(0, 99),
    st.integers(0, 24),
)
def test_padding_and_company_change_no_bit_on_a_gpu(query_lens, seed, padding):
    """A row's hidden state is the same bits alone, in company, and in a padded batch.

    What lossless speculation rests on: every product has one shape, so one kernel."""
    from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan
    from graphshare.adapters.toy.cache import make_cache
    from graphshare.descriptor import BatchDescriptor
    from graphshare.owner import Phase

    engine = EngineConfig(
        max_num_reqs=4, max_num_tokens=72, page_size=4, num_pages=64, max_model_len=64
    )
    target, _ = gpu_models()
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(0, 256, (n,), generator=generator).cuda() for n in query_lens]

    def hidden(numbers, spare):
        caches = make_cache(target.config, engine, target.config.num_layers, "cuda")
        spans = [QuerySpan(range(1 + 3 * i, 4 + 3 * i), 0, query_lens[i]) for i in numbers]
        batch = AttentionBatch.of(spans, engine.page_size)
        key = BatchDescriptor(num_tokens=batch.num_tokens + spare, num_reqs=4 if spare else None)
        if not spare:
            key = BatchDescriptor(num_tokens=batch.num_tokens, num_reqs=batch.num_reqs)
        state = PagedOwner(engine, "cuda").build(key, batch, Phase.REPLAY)
        rows = torch.cat([texts[i] for i in numbers])
        positions = torch.cat([torch.arange(query_lens[i]) for i in numbers]).cuda()
        rows, positions = (torch.nn.functional.pad(t, (0, spare)) for t in (rows, positions))
        found, _ = target(rows, positions, state, caches)
        return found[: batch.num_tokens].split(batch.query_lens)

    everyone = range(len(query_lens))
    together = hidden(everyone, 0)
    for number in everyone:
        (alone,) = hidden([number], 0)
        assert torch.equal(alone, together[number])
    if padding + sum(query_lens) >= 4:
        for one, other in zip(together, hidden(everyone, padding), strict=True):
            assert torch.equal(one, other)


@lru_cache(maxsize=1)
def gpu_models():
    return load_models(device="cuda")


def test_every_step_has_a_graph():
    """What the scheduler may put together is covered, whatever the sizes."""
    for num_draft_tokens in range(1, 8):
        engine = EngineConfig(num_draft_tokens=num_draft_tokens)
        keys = target_keys(engine)
        most = max(keys, key=lambda key: (key.num_tokens, key.uniform_query_len is None))
        assert most.num_tokens == engine.max_num_tokens
        assert most.num_reqs == engine.max_num_reqs
        uniform = [k for k in keys if k.uniform_query_len == num_draft_tokens + 1]
        assert max(k.num_reqs for k in uniform) == engine.max_num_reqs
        assert max(k.num_reqs for k in decode_keys(engine)) == engine.max_num_reqs


def test_a_draft_with_other_pages_cannot_borrow():
    serving = world(3, False)
    own = spec_of(serving.forwards)
    other = type(own)(page_size=2 * own.page_size)
    with pytest.raises(SpecMismatchError) as refused:
        GraphRunner(serving.forwards, prefill_spec=other)
    assert refused.value.fields == ("page_size",)


def test_the_shipped_models_gain_two_tokens_a_step():
    """The checkpoint is small, and on text that it has not seen the draft is worth its while."""
    assert SHIPPED.stat().st_size <= 4_000_000
    engine = EngineConfig(max_num_reqs=8, num_draft_tokens=3)
    forwards = Forwards(*load_models(), engine, "cpu")
    runner = EagerRunner(forwards, PagedOwner(engine, "cpu"), PagedOwner(engine, "cpu"))
    serving = SpeculativeEngine(forwards, runner)
    prompts = [(BOS, *passage.encode()[:96]) for passage in shipped_passages()]
    serving.run(Request(number, prompt, 48) for number, prompt in enumerate(prompts))
    assert serving.counts.tokens_per_step >= 2.0
