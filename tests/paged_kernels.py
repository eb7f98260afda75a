"""Random steps over a paged cache, and attention in float32 to compare a kernel with."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from graphshare import BatchDescriptor
from graphshare.adapters.paged import PagedBatch, PagedCapacity


@dataclass(frozen=True)
class Shapes:
    """What the kernels are run on. `window` counts the tokens that a row sees before itself."""

    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 128
    causal: bool = True
    window: int = -1
    dtype: torch.dtype = torch.bfloat16


def make_cache(
    shapes: Shapes, capacity: PagedCapacity, num_pages: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each [num_pages, page_size, num_kv_heads, head_size], random."""
    size = (num_pages, capacity.page_size, shapes.num_kv_heads, shapes.head_size)
    keys, values = (torch.randn(size, device=device).to(shapes.dtype) for _ in range(2))
    return keys, values


def random_batch(
    rng: random.Random, key: BatchDescriptor, capacity: PagedCapacity, num_pages: int
) -> PagedBatch:
    """A step that `key` covers: any number of requests, any lengths, fresh pages in any order."""
    most_rows = capacity.max_query_len(key)
    num_reqs = rng.randint(1, capacity.num_reqs(key))
    if key.uniform_query_len is not None:
        query_lens = [key.uniform_query_len] * num_reqs
    else:
        spare = key.num_tokens - num_reqs
        query_lens = []
        for _ in range(num_reqs):
            more = rng.randint(0, min(spare, most_rows - 1))
            query_lens.append(1 + more)
            spare -= more
        rng.shuffle(query_lens)
    seq_lens = [
        # Lengths at the edges of a page and of the capacity are where kernels go wrong.
        rng.choice(
            [n, capacity.max_seq_len, rng.randint(n, capacity.max_seq_len)]
            + [m for m in (capacity.page_size, capacity.page_size + 1) if m >= n]
        )
        for n in query_lens
    ]
    pages = [page for page in range(num_pages) if page != capacity.scratch_page]
    rng.shuffle(pages)
    tables = [[pages.pop() for _ in range(-(-n // capacity.page_size))] for n in seq_lens]
    return PagedBatch.of(query_lens, seq_lens, tables, capacity.page_size)


def attention(
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    batch: PagedBatch,
    shapes: Shapes,
) -> torch.Tensor:
    """Attention of the batch's rows in float32: [num_tokens, num_q_heads, head_size].

    The first row of a request sees its earlier tokens and itself, and so on: with `causal`, row r
    of a request of L tokens and R rows sees positions up to L - R + r.
    """
    device = query.device
    num_tokens, longest = batch.num_tokens, batch.max_seq_len
    page_size = cache[0].shape[1]
    num_pages = -(-longest // page_size)
    # Entries past a request's last page are not to be read: they may be anything.
    held = (batch.seq_lens + page_size - 1).div(page_size, rounding_mode="floor")
    table = batch.block_table[:, :num_pages].cpu().long()
    table = torch.where(torch.arange(num_pages)[None] < held[:, None], table, 0).to(device)
    keys, values = (part[table].flatten(1, 2)[:, :longest].float() for part in cache)
    # Nor what lies past a request's tokens: a weight of 0 does not make a NaN there vanish.
    past = torch.arange(longest)[None] >= batch.seq_lens[:, None]
    keys, values = (
        part.masked_fill(past[..., None, None].to(device), 0) for part in (keys, values)
    )
    query_lens = batch.query_start_loc.diff()
    owner = torch.repeat_interleave(torch.arange(batch.num_reqs), query_lens)
    row = torch.arange(num_tokens) - batch.query_start_loc[:-1][owner]
    position = (batch.seq_lens - query_lens)[owner] + row
    seen = torch.arange(longest)[None] < batch.seq_lens[owner, None]
    if shapes.causal:
        seen &= torch.arange(longest)[None] <= position[:, None]
    if shapes.window >= 0:
        seen &= torch.arange(longest)[None] >= position[:, None] - shapes.window
    owner, seen = owner.to(device), seen.to(device)
    group = shapes.num_q_heads // shapes.num_kv_heads
    rows = query[:num_tokens].float().view(num_tokens, shapes.num_kv_heads, group, -1)
    out = torch.empty(num_tokens, shapes.num_q_heads, shapes.head_size, device=device)
    # In pieces: the keys of every row at once would be large.
    for piece in torch.arange(num_tokens, device=device).split(256):
        k, v = keys[owner[piece]], values[owner[piece]]
        scores = torch.einsum("rhgd,rnhd->rhgn", rows[piece], k) / shapes.head_size**0.5
        scores = scores.masked_fill(~seen[piece, None, None], float("-inf"))
        out[piece] = torch.einsum("rhgn,rnhd->rhgd", scores.softmax(-1), v).flatten(1, 2)
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected||; NaN where either has one."""
    expected = expected.float()
    return float((got.float() - expected).norm() / expected.norm())
