"""FlashInfer's owners and borrowers for the GPU tests, by the name of a kernel."""

from __future__ import annotations

import dataclasses
from typing import Any

from graphshare import BatchDescriptor, capture_descriptors
from graphshare.adapters.flashinfer import AttentionShape, FlashInfer, FlashInferOwner
from graphshare.adapters.paged import PagedBatch, PagedCapacity
from tests import flash_attn_models
from tests.flash_attn_models import DEVICE, TOLERANCE, Model
from tests.flashinfer_pairs import Pair
from tests.paged_kernels import Shapes
from tests.required_kernels import required

__all__ = ["DEVICE", "TOLERANCE", "Model"]

CAPACITY = PagedCapacity(max_num_tokens=512, max_num_reqs=16, max_seq_len=2048, page_size=16)
MANY = PagedCapacity(max_num_tokens=256, max_num_reqs=256, max_seq_len=700, page_size=16)
TARGET = Shapes(num_q_heads=32, num_kv_heads=8)
KINDS: dict[str, dict[str, Any]] = {
    "decode": {"kernel": "decode"},
    "fa2": {"kernel": "fa2", "decode_kernel": "fa2"},
    "fa3": {"kernel": "fa3", "decode_kernel": "fa3"},
    "batch_attention": {"kernel": "batch_attention", "decode_kernel": "batch_attention"},
}


def keys_of(kind: str, sizes: tuple[int, ...] = (1, 16, 64, 512)) -> list[BatchDescriptor]:
    """Mixed keys and uniform ones of 1 and 4 rows; for decode, those of 1 row."""
    keys = capture_descriptors(sizes, 16, uniform_query_lens=[1, 4])
    if kind == "decode":
        return [key for key in keys if key.uniform_query_len == 1]
    return keys


def shape_of(shapes: Shapes, **changes: Any) -> AttentionShape:
    shape = flash_attn_models.shape_of(shapes)
    return dataclasses.replace(shape, **changes)


def make_owner(
    kind: str,
    shapes: Shapes = TARGET,
    capacity: PagedCapacity = CAPACITY,
    **options: Any,
) -> FlashInferOwner:
    options = {**KINDS[kind], **options}
    return required(lambda: FlashInferOwner(capacity, shape_of(shapes), DEVICE, **options))


def make_borrower(
    shapes: Shapes = TARGET, capacity: PagedCapacity = CAPACITY, **changes: Any
) -> FlashInfer:
    return required(lambda: FlashInfer(capacity, shape_of(shapes, **changes)))


def borrower_of(pair: Pair) -> tuple[FlashInfer, Model]:
    """The attention and the model of a pair's borrower."""
    changes = dict(pair.changes)
    page_size = changes.pop("page_size", CAPACITY.page_size)
    scale = changes.pop("softmax_scale", None)
    # As many pages, so that a list of the lender's leads to none that is not there.
    longest = CAPACITY.max_seq_len * page_size // CAPACITY.page_size
    capacity = dataclasses.replace(CAPACITY, page_size=page_size, max_seq_len=longest)
    shapes = dataclasses.replace(Shapes(*pair.lender), **changes)
    kernel = make_borrower(shapes, capacity, softmax_scale=scale)
    model = Model(kernel, shapes, capacity, seed=1)
    if scale is not None:
        # The reference divides by the root of the head size.
        kernel.run = _scaled(kernel, scale * shapes.head_size**0.5)  # type: ignore[method-assign]
    return kernel, model


def _scaled(kernel: FlashInfer, factor: float) -> Any:
    run = kernel.run
    return lambda query, *rest, **options: run(query / factor, *rest, **options)


def long_batches(key: BatchDescriptor, capacity: PagedCapacity = CAPACITY) -> list[PagedBatch]:
    """Every request as long as it can be, with rows shared out, where plans are fullest."""
    batches: list[PagedBatch] = []
    for num_reqs in {capacity.num_reqs(key), min(4, capacity.num_reqs(key))}:
        rows = key.uniform_query_len or key.num_tokens // num_reqs
        pages = capacity.max_pages
        tables = [list(range(1 + r * pages, 1 + (r + 1) * pages)) for r in range(num_reqs)]
        lens = [capacity.max_seq_len - r for r in range(num_reqs)]
        batches.append(PagedBatch.of([rows] * num_reqs, lens, tables, capacity.page_size))
    return batches
