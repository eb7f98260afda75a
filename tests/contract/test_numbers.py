"""Replays compute what the eager forward computes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphshare.capture import make_backend


class Block(nn.Module):
    """A transformer block over a paged cache of keys and values."""

    def __init__(self, width: int, heads: int, device: torch.device) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.to(device)

    def forward(self, x, cache, slots, lengths):
        tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=-1)
        cache[0].index_copy_(0, slots, k)
        cache[1].index_copy_(0, slots, v)
        q, k, v = (t.view(len(t), self.heads, -1).transpose(0, 1) for t in (q, cache[0], cache[1]))
        seen = torch.arange(cache.shape[1], device=x.device) < lengths[:, None]
        a = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(a.transpose(0, 1).reshape(tokens, width))
        return x + self.down(nn.functional.silu(self.up(self.norm2(x))))


@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(data=st.data())
def test_a_transformer_block_replays_like_eager(kind, data):
    """Whatever the captured shape, new inputs and lengths in place give the eager result."""
    backend = make_backend(kind)
    device = backend.device
    tokens = data.draw(st.integers(1, 6), label="tokens")
    heads = data.draw(st.sampled_from([1, 2, 4]), label="heads")
    seed = data.draw(st.integers(0, 2**31), label="seed")
    grad = data.draw(st.sampled_from(["grad", "no_grad", "inference"]), label="grad")
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    torch.manual_seed(seed)
    slots_total = 12
    block = Block(16, heads, device).requires_grad_(False)
    x = torch.zeros(tokens, 16, device=device)
    cache = torch.zeros(2, slots_total, 16, device=device)
    slots = torch.zeros(tokens, dtype=torch.int64, device=device)
    lengths = torch.ones(tokens, dtype=torch.int64, device=device)

    with mode[grad](), backend.session():
        backend.warmup(lambda: block(x, cache, slots, lengths))
        graph = backend.capture(lambda: block(x, cache, slots, lengths))
    for _ in range(2):
        x.normal_()
        cache.normal_()
        slots.copy_(torch.randperm(slots_total, device=device)[:tokens])
        lengths.random_(1, slots_total + 1)
        own_cache = cache.clone()
        expected = block(x, own_cache, slots, lengths)
        graph.replay()
        torch.testing.assert_close(graph.outputs, expected)
        torch.testing.assert_close(cache, own_cache)
    graph.release()
