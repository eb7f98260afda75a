"""The toy engine on a kernel library's states: batches, heads and rows that belong to nobody.

The library here is a few lines of torch with the manners of the real ones: bfloat16, heads of 64,
rows without a request left as garbage. The real ones run in `tests/gpu/test_toy_kernels.py`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphshare.adapters.paged import (
    AttentionShape,
    PagedBatch,
    PagedBuffers,
    PagedCapacity,
    dummy_batch,
)
from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan, Request
from graphshare.adapters.toy.checkpoint import load_models
from graphshare.adapters.toy.config import BOS, EngineConfig
from graphshare.adapters.toy.forwards import Forwards
from graphshare.adapters.toy.graphs import GraphRunner, decode_keys, target_keys
from graphshare.adapters.toy.kernel import ATTENTION, kernel_named
from graphshare.adapters.toy.library_kernels import (
    FlashAttention2Kernel,
    FlashAttention3Kernel,
    LibraryKernel,
    LibraryOwner,
)
from graphshare.adapters.toy.reference import greedy_tokens
from graphshare.adapters.toy.speculation import EagerRunner, SpeculativeEngine
from graphshare.descriptor import BatchDescriptor
from graphshare.owner import AttentionSpec, Phase
from graphshare.state import AttentionState
from tests.flash_attn_library import flash_attention_2, flash_attention_3
from tests.paged_kernels import Shapes, attention

ENGINE = EngineConfig(max_num_reqs=3, max_num_tokens=16, num_pages=128)


@dataclass
class _Metadata:
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor


class _Library:
    """Both owner and borrower."""

    def __init__(self, capacity: PagedCapacity, shape: AttentionShape) -> None:
        self.shape, self.capacity = shape, capacity
        self._buffers = PagedBuffers(capacity, "cpu")
        self.spec = AttentionSpec(head_size=shape.head_size, backend="plain")

    def build(self, key: Any, batch: PagedBatch | None, phase: Phase) -> AttentionState:
        views = self._buffers.write(key, batch or dummy_batch(key, self.capacity))
        metadata = _Metadata(views.query_start_loc, views.seq_lens, views.block_table)
        return AttentionState(metadata, views.slot_mapping)

    def live_rows(self, key: Any, batch: PagedBatch) -> dict[str, int]:
        return {"*.seq_lens": batch.num_reqs}

    def run(self, query: Any, keys: Any, values: Any, metadata: _Metadata) -> torch.Tensor:
        assert query.dtype == keys.dtype == torch.bfloat16
        rows = torch.arange(query.shape[0])
        request = torch.searchsorted(metadata.query_start_loc[1:], rows.int(), right=True)
        request = request.clamp(max=metadata.seq_lens.shape[0] - 1)
        after = metadata.query_start_loc.index_select(0, request + 1) - rows
        seen = metadata.seq_lens.index_select(0, request) - after + 1
        table = metadata.block_table.index_select(0, request).long()
        k, v = (part[table].flatten(1, 2).float() for part in (keys, values))
        groups = query.shape[1] // k.shape[2]
        grouped = query.float().unflatten(1, (-1, groups))
        scores = torch.einsum("rhgd,rnhd->rhgn", grouped, k) * self.shape.softmax_scale
        hidden = torch.arange(k.shape[1]) >= seen[:, None]
        weights = scores.masked_fill(hidden[:, None, None], -1e30).softmax(-1)
        found = torch.einsum("rhgn,rnhd->rhgd", weights, v).flatten(1, 2)
        garbage = torch.full_like(found, float("nan"))
        return torch.where((after > 0)[:, None, None], found, garbage).bfloat16()


class PlainKernel(LibraryKernel):
    name = "plain"

    def _make_owner(self, capacity: Any, shape: Any, device: Any) -> Any:
        return _Library(capacity, shape)

    def _make_runner(self, capacity: Any, shape: Any, device: Any) -> Any:
        return _Library(capacity, shape)


def _prompts(count: int) -> list[Request]:
    texts = ["Note that the file must be", "A dictionary maps", "The class"]
    return [Request(n, (BOS, *texts[n].encode()), 12, arrival=n) for n in range(count)]


@pytest.fixture(scope="module")
def forwards() -> Forwards:
    return Forwards(*load_models(), ENGINE, "cpu", PlainKernel())


def test_graphs_give_what_eager_gives_on_the_same_shapes(forwards: Forwards) -> None:
    keys = (target_keys(ENGINE), decode_keys(ENGINE))
    eager = EagerRunner(forwards, forwards.make_owner(), forwards.make_owner(), keys=keys)
    expected = _prompts(3)
    SpeculativeEngine(forwards, eager).run(expected)
    owners = [forwards.make_owner() for _ in range(3)]
    with GraphRunner(
        forwards, target_owner=owners[0], prefill_owner=owners[1], decode_owner=owners[2]
    ) as runner:
        runner.capture()
        got = _prompts(3)
        SpeculativeEngine(forwards, runner).run(got)
        assert runner.prefill.statistics().builds_avoided > 0
    assert [r.output for r in got] == [r.output for r in expected]
    assert owners[0].num_builds > 0
    assert owners[1].num_builds == 0


def test_wider_heads_and_bfloat16_change_little(forwards: Forwards) -> None:
    """The shipped model continues as in float32: a wrong scale or a mixed-up row would not."""
    prompt = _prompts(1)[0].prompt
    models = (forwards.target_model, ENGINE, prompt, 24)
    exact = greedy_tokens(*models)
    assert greedy_tokens(*models, kernel=forwards.kernel) == exact


def test_attention_of_padded_heads_equals_that_of_the_heads() -> None:
    rng = random.Random(0)
    kernel, config = PlainKernel(), load_models()[0].config
    (cache,) = kernel.make_cache(config, ENGINE, 1, "cpu")
    owner = kernel.owner(config, ENGINE, "cpu")
    pages = [rng.sample(range(1, 128), 4) for _ in range(2)]
    spans = [QuerySpan(pages[0], 20, 3), QuerySpan(pages[1], 60, 2)]
    batch = AttentionBatch.of(spans, ENGINE.page_size)
    key = BatchDescriptor(num_tokens=8, num_reqs=3)
    state = owner.build(key, batch, Phase.REPLAY)
    # Rows of earlier positions enter the cache too.
    for span in spans:
        for position in range(span.start + span.query_len):
            slot = span.pages[position // 16] * 16 + position % 16
            row = torch.randn(2, 1, config.num_kv_heads, config.head_size)
            cache.write(row[0], row[1], torch.tensor([slot]))
    query = torch.randn(16, config.num_q_heads, config.head_size)
    views = kernel.views(state, 8, None)
    (found,) = kernel.attend([query], cache, views)
    narrow = tuple(part[..., : config.head_size] for part in (cache.keys, cache.values))
    shapes = Shapes(config.num_q_heads, config.num_kv_heads, config.head_size)
    paged = PagedBatch.of([3, 2], [23, 62], pages, 16)
    expected = attention(query.bfloat16(), narrow, paged, shapes).flatten(1)
    torch.testing.assert_close(found[:5], expected, rtol=2e-2, atol=2e-2)
    assert (found[5:] == 0).all()
    assert owner.num_builds == 1


def _flash_attention_kernels() -> list[LibraryKernel]:
    return [
        FlashAttention2Kernel(module=flash_attention_2()),
        FlashAttention3Kernel(build="vllm", module=flash_attention_3("vllm")),
    ]


@pytest.mark.parametrize("kernel", _flash_attention_kernels(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(
    ("key", "query_lens", "live"),
    [
        (BatchDescriptor(12, 3, uniform_query_len=4), [4, 4], 8),
        (BatchDescriptor(4, uniform_query_len=1), [1, 1, 1], 3),
        (BatchDescriptor(16, 3), [3, 2], 5),
    ],
)
def test_rows_of_padding_are_told_apart(
    kernel: LibraryKernel, key: BatchDescriptor, query_lens: list[int], live: int
) -> None:
    """By whatever a state of that library holds: not all have where each request begins."""
    engine = EngineConfig(
        max_num_reqs=4, max_num_tokens=16, page_size=256, num_pages=9, max_model_len=512
    )
    config = load_models()[0].config
    kernel.make_cache(config, engine, 1, "cpu")
    owner = kernel.owner(config, engine, "cpu")
    spans = [QuerySpan([n + 1], 20, rows) for n, rows in enumerate(query_lens)]
    state = owner.build(key, AttentionBatch.of(spans, engine.page_size), Phase.REPLAY)
    views = kernel.views(state, key.num_tokens, key.uniform_query_len)
    assert views.live.flatten().tolist() == [row < live for row in range(key.num_tokens)]


def test_flash_attention_2_continues_as_the_library_of_a_few_lines(forwards: Forwards) -> None:
    engine = EngineConfig(
        max_num_reqs=3, max_num_tokens=16, page_size=256, num_pages=16, max_model_len=512
    )
    kernel = FlashAttention2Kernel(module=flash_attention_2())
    other = Forwards(*load_models(), engine, "cpu", kernel)
    texts: list[list[Request]] = []
    for each, sizes in ((forwards, ENGINE), (other, engine)):
        keys = (target_keys(sizes), decode_keys(sizes))
        requests = _prompts(3)
        runner = EagerRunner(each, each.make_owner(), each.make_owner(), keys=keys)
        SpeculativeEngine(each, runner).run(requests)
        texts.append(requests)
    assert [r.output for r in texts[0]] == [r.output for r in texts[1]]


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "torch"])
def test_every_library_has_a_kernel(name: str) -> None:
    kernel: Any = kernel_named(name)
    assert kernel.name == name
    assert not kernel.row_invariant
    with pytest.raises(RuntimeError, match="make_cache"):
        kernel.spec(None, None)


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="flash_attn3"):
        kernel_named("flash_attn5")


def test_what_the_owner_says_of_its_states_is_passed_on() -> None:
    class Owner:
        host_values = {"*.seen": "any"}

        def build(self, key: Any, batch: Any, phase: Any) -> Any:
            return None

    wrapped = LibraryOwner(Owner())
    assert wrapped.host_values == {"*.seen": "any"}
    assert not hasattr(wrapped, "writes")
