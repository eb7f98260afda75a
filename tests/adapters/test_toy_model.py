"""The toy models: paged against dense, bits against batch sizes, padding against pages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphshare.adapters.toy.attention import PagedMetadata
from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan
from graphshare.adapters.toy.cache import PageAllocator, make_cache
from graphshare.adapters.toy.checkpoint import new_models
from graphshare.adapters.toy.config import EngineConfig, ToyConfig
from graphshare.adapters.toy.dense import draft_hidden, generate, target_hidden
from graphshare.adapters.toy.model import DecoderLayer, RMSNorm
from graphshare.adapters.toy.owner import PagedOwner
from graphshare.adapters.toy.rows import ROW_BLOCK, join_blocks, split_blocks
from graphshare.descriptor import BatchDescriptor
from graphshare.owner import Phase
from graphshare.state import AttentionState
from tests.toy import CONFIG

ENGINE = EngineConfig(
    max_num_reqs=4, max_num_tokens=40, page_size=4, num_pages=80, max_model_len=64
)
TARGET, DRAFT = new_models(CONFIG, seed=1)
TARGET.requires_grad_(False)
DRAFT.requires_grad_(False)


def tokens_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


def run_rows(batch, token_ids, positions, caches, *, key=None, owner=None):
    """One target step, padded to the key if there is one; outputs are cut to the live rows."""
    key = key or BatchDescriptor(num_tokens=batch.num_tokens, num_reqs=batch.num_reqs)
    state = (owner or PagedOwner(ENGINE, "cpu")).build(key, batch, Phase.REPLAY)
    padding = key.num_tokens - batch.num_tokens
    hidden, tokens = TARGET(
        torch.nn.functional.pad(token_ids, (0, padding)),
        torch.nn.functional.pad(positions, (0, padding)),
        state,
        caches,
        uniform_query_len=key.uniform_query_len,
    )
    return hidden[: batch.num_tokens], tokens[: batch.num_tokens]


@st.composite
def served(draw):
    """Some requests: a seed, a length and how it is cut into chunks, pages in any order."""
    allocator_order = draw(st.permutations(range(1, ENGINE.num_pages)))
    requests, used = [], 0
    for _ in range(draw(st.integers(1, ENGINE.max_num_reqs))):
        length = draw(st.integers(1, 40))
        cut = draw(st.integers(0, length - 1))
        pages = -(-length // ENGINE.page_size)
        held = allocator_order[used : used + pages]
        requests.append((draw(st.integers(0, 99)), length, cut, held))
        used += pages
    return requests


def paged_hidden(requests, make_key=None):
    """Each request in two chunks; the second chunks of all run together if they fit a step."""
    caches = make_cache(CONFIG, ENGINE, CONFIG.num_layers, "cpu")
    results = {}
    for seed, length, cut, pages in requests:
        if cut:
            rows = tokens_of(seed, length)[:cut]
            batch = AttentionBatch.of([QuerySpan(pages, 0, cut)], ENGINE.page_size)
            results[seed, 0], _ = run_rows(batch, rows, torch.arange(cut), caches)
    waiting = list(enumerate(requests))
    out = [None] * len(requests)
    while waiting:
        step, budget = [], ENGINE.max_num_tokens
        while waiting and waiting[0][1][1] - waiting[0][1][2] <= budget:
            budget -= waiting[0][1][1] - waiting[0][1][2]
            step.append(waiting.pop(0))
        spans = [QuerySpan(pages, cut, length - cut) for _, (_, length, cut, pages) in step]
        batch = AttentionBatch.of(spans, ENGINE.page_size)
        rows = torch.cat([tokens_of(seed, length)[cut:] for _, (seed, length, cut, _) in step])
        positions = torch.cat([torch.arange(s.start, s.start + s.query_len) for s in spans])
        key = make_key(batch) if make_key else None
        hidden, _ = run_rows(batch, rows, positions, caches, key=key)
        for (index, _), part in zip(step, hidden.split(batch.query_lens), strict=True):
            out[index] = part
    return out


def padded_key(batch):
    return BatchDescriptor(num_tokens=ENGINE.max_num_tokens, num_reqs=ENGINE.max_num_reqs)


@given(served())
def test_paged_attention_is_dense_attention(requests):
    """For any lengths, chunks and page order, paged rows equal a dense forward of the sequence."""
    for (seed, length, cut, _), hidden in zip(requests, paged_hidden(requests), strict=True):
        dense = target_hidden(TARGET, tokens_of(seed, length)[None])[0, cut:]
        torch.testing.assert_close(hidden, dense, rtol=1e-4, atol=1e-5)


@given(served())
def test_padding_and_company_change_no_bit(requests):
    """A row's hidden state is the same bits alone, in company, and in a padded batch."""
    padded = paged_hidden(requests, padded_key)
    for got, request in zip(padded, requests, strict=True):
        (alone,) = paged_hidden([request])
        assert torch.equal(got, alone)
    for got, together in zip(padded, paged_hidden(requests), strict=True):
        assert torch.equal(got, together)


@given(st.integers(1, 4), st.integers(1, 10), st.integers(0, 3), st.integers(0, 99))
def test_a_uniform_key_gives_the_bits_of_a_mixed_one(num_reqs, query_len, spare, seed):
    """A query length known at capture changes how a row finds its request, not what it sees."""
    num_reqs = min(num_reqs, ENGINE.max_num_tokens // query_len)
    most = min(num_reqs + spare, ENGINE.max_num_reqs, ENGINE.max_num_tokens // query_len)
    pages = [list(range(1 + 12 * i, 13 + 12 * i)) for i in range(num_reqs)]
    spans = [QuerySpan(p, 0, query_len) for p in pages]
    batch = AttentionBatch.of(spans, ENGINE.page_size)
    rows, positions = tokens_of(seed, batch.num_tokens), torch.arange(query_len).repeat(num_reqs)
    results = []
    for key in (
        BatchDescriptor(num_tokens=batch.num_tokens, num_reqs=num_reqs),
        BatchDescriptor(num_tokens=most * query_len, num_reqs=most, uniform_query_len=query_len),
    ):
        caches = make_cache(CONFIG, ENGINE, CONFIG.num_layers, "cpu")
        results.append(run_rows(batch, rows, positions, caches, key=key))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(0, 99),
    st.booleans(),
)
def test_padded_rows_touch_no_live_page(query_lens, seed, uniform):
    """Neither padding nor a dummy batch writes a slot outside the scratch page, nor reads one."""
    query_lens = [query_lens[0]] * len(query_lens) if uniform else query_lens
    spans, page = [], 1
    for n in query_lens:
        count = -(-n // ENGINE.page_size)
        spans.append(QuerySpan(list(range(page, page + count)), 0, n))
        page += count
    batch = AttentionBatch.of(spans, ENGINE.page_size)
    key = BatchDescriptor(num_tokens=40, num_reqs=4)
    if uniform:
        n = query_lens[0]
        key = BatchDescriptor(num_tokens=4 * n, num_reqs=4, uniform_query_len=n)
    caches = make_cache(CONFIG, ENGINE, CONFIG.num_layers, "cpu")
    poison = ENGINE.page_size  # every slot but the scratch page's: a read of it would give NaN
    for cache in caches:
        cache.keys[:, poison:] = torch.nan
        cache.values[:, poison:] = torch.nan
    owner = PagedOwner(ENGINE, "cpu")
    positions = torch.cat([torch.arange(n) for n in query_lens])
    hidden, _ = run_rows(
        batch, tokens_of(seed, batch.num_tokens), positions, caches, key=key, owner=owner
    )
    assert not hidden.isnan().any()
    live = torch.tensor(batch.slot_mapping)
    for cache in caches:
        assert not cache.keys[:, live].isnan().any()
        cache.keys[:, live] = torch.nan
        cache.values[:, live] = torch.nan
    for phase in (Phase.WARMUP, Phase.CAPTURE):
        state = owner.build(key, None, phase)
        zeros = torch.zeros(key.num_tokens, dtype=torch.int64)
        dummy, _ = TARGET(zeros, zeros, state, caches, uniform_query_len=key.uniform_query_len)
        assert not dummy.isnan().any()
    for cache in caches:
        assert cache.keys[:, poison:].isnan().all()
        assert cache.values[:, poison:].isnan().all()
        assert not cache.keys[:, :poison].isnan().any()


@given(
    st.integers(1, 3 * ROW_BLOCK),
    st.integers(0, 99),
    st.sampled_from([(192, 320), (192, 896), (448, 192), (384, 192), (192, 258), (32, 48)]),
)
def test_products_of_blocks_do_not_depend_on_the_number_of_rows(num_rows, seed, sizes):
    """One row's product is the same bits for 1 row and for many, wherever in a block it lies."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, sizes[0], generator=generator)
    weight = torch.randn(sizes[1], sizes[0], generator=generator)

    def product(some):
        blocks = [torch.nn.functional.linear(block, weight) for block in split_blocks(some)]
        return join_blocks(blocks, len(some))

    whole = product(rows)
    order = torch.randperm(num_rows, generator=generator)
    assert torch.equal(product(rows[order]), whole[order])
    assert torch.equal(product(rows[-1:]), whole[-1:])


@given(st.integers(1, 50))
def test_blocks_are_whole_and_join_to_what_was_cut(num_rows):
    """Every block has the same shape; joining undoes splitting."""
    rows = torch.randn(num_rows, 3)
    blocks = split_blocks(rows)
    assert {tuple(block.shape) for block in blocks} == {(ROW_BLOCK, 3)}
    assert torch.equal(join_blocks(list(blocks), num_rows), rows)


@given(st.integers(0, 99), st.integers(4, 20))
def test_dense_draft_steps_are_paged_draft_steps(seed, length):
    """Training sees the draft as decoding runs it: one true step, then self-fed ones."""
    steps = 3
    token_ids = tokens_of(seed, length + steps)
    hidden = target_hidden(TARGET, token_ids[None])
    dense = draft_hidden(DRAFT, TARGET, hidden, token_ids[None], steps)
    (cache,) = make_cache(CONFIG, ENGINE, 1, "cpu")
    owner = PagedOwner(ENGINE, "cpu")
    pages = list(range(1, 12))

    def run(fed, tokens, start):
        batch = AttentionBatch.of([QuerySpan(pages, start, len(tokens))], ENGINE.page_size)
        key = BatchDescriptor(num_tokens=len(tokens), num_reqs=1)
        state = owner.build(key, batch, Phase.REPLAY)
        positions = torch.arange(start, start + len(tokens))
        return DRAFT(TARGET, fed, tokens, positions, state, cache)[0]

    paged = run(hidden[0, :length], token_ids[1 : length + 1], 0)
    torch.testing.assert_close(paged, dense[0][0], rtol=1e-4, atol=1e-5)
    fed = paged[-1:]
    for step in range(1, steps):
        fed = run(fed, token_ids[length + step : length + step + 1], length - 1 + step)
        torch.testing.assert_close(fed, dense[step][0, -1:], rtol=1e-4, atol=1e-5)


def test_dense_generation_follows_the_dense_forward():
    prompts = torch.stack([tokens_of(seed, 6) for seed in range(3)])
    continued = generate(TARGET, prompts, 8)
    for end in range(6, 14):
        logits = TARGET.logits(target_hidden(TARGET, continued[:, :end])[:, -1])
        best = logits.max(-1).values
        chosen = logits.gather(1, continued[:, end : end + 1])[:, 0]
        torch.testing.assert_close(chosen, best, rtol=1e-4, atol=1e-5)


def test_a_longer_sequence_than_was_captured_is_cut():
    """``max_seq_len`` is a host value that a graph bakes in: positions beyond it are not seen."""
    caches = make_cache(CONFIG, ENGINE, CONFIG.num_layers, "cpu")
    batch = AttentionBatch.of([QuerySpan(list(range(1, 6)), 0, 20)], ENGINE.page_size)
    key = BatchDescriptor(num_tokens=20, num_reqs=1)
    state = PagedOwner(ENGINE, "cpu").build(key, batch, Phase.REPLAY)
    found = state.attn_metadata
    cut = PagedMetadata(
        found.query_start_loc, found.seq_lens, found.block_table, found.page_size, 8, 20
    )
    rows, positions = tokens_of(0, 20), torch.arange(20)
    whole, _ = TARGET(rows, positions, state, caches)
    short, _ = TARGET(rows, positions, AttentionState(cut, state.slot_mappings), caches)
    assert torch.equal(whole[:8], short[:8])
    assert not torch.equal(whole[8:], short[8:])


def test_norm_is_the_reference():
    norm = RMSNorm(32, 1e-5)
    x = torch.randn(3, 32)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (32,), norm.weight, 1e-5))


@given(st.lists(st.integers(1, 30), max_size=12))
def test_pages_are_held_once_and_come_back(counts):
    """No page is given twice, the scratch page never, and a refusal takes nothing."""
    allocator = PageAllocator(ENGINE.num_pages)
    held = []
    for count in counts:
        before = allocator.num_free
        pages = allocator.allocate(count)
        if pages is None:
            assert count > before
            assert allocator.num_free == before
        else:
            held.append(pages)
    flat = [page for pages in held for page in pages]
    assert len(flat) == len(set(flat))
    assert 0 not in flat
    for pages in held:
        allocator.release(pages)
    assert allocator.num_free == ENGINE.num_pages - 1


@pytest.mark.parametrize(
    "wrong",
    [{"num_q_heads": 3}, {"head_size": 7}, {"vocab_size": 256}, {"num_layers": 0}],
)
def test_impossible_model_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ToyConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"max_model_len": 100}, {"num_pages": 10}, {"max_num_tokens": 8}, {"page_size": 0}],
)
def test_impossible_engine_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_one_layer_has_the_parameters_that_the_size_limit_allows():
    """Target and draft, two bytes a weight, stay within 4 MB."""
    models = new_models(ToyConfig())
    parameters = sum(p.numel() for model in models for p in model.parameters())
    assert 2 * parameters < 4_000_000
    assert isinstance(models[1].layer, DecoderLayer)
