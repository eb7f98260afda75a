"""Plain greedy decoding, one request at a time, eagerly: what speculation must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan
from graphshare.adapters.toy.config import EOS, EngineConfig
from graphshare.adapters.toy.kernel import AttentionKernel
from graphshare.adapters.toy.model import TORCH, TargetModel
from graphshare.descriptor import BatchDescriptor
from graphshare.owner import Phase

__all__ = ["greedy_tokens"]


@torch.no_grad()
def greedy_tokens(
    target: TargetModel,
    engine: EngineConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    device: torch.device | str = "cpu",
    kernel: AttentionKernel = TORCH,
) -> list[int]:
    """Continue one prompt without a draft, without graphs, one token a step.

    Args:
        target: The model, on ``device``.
        engine: Page size and the length of a request; nothing else matters here.
        prompt: At least one token.
        max_new_tokens: Tokens to produce, unless the text ends before.
        device: Where to run.
        kernel: Attends.

    Returns:
        The new tokens; the last one may be ``EOS``.
    """
    caches = kernel.make_cache(target.config, engine, target.config.num_layers, device)
    owner = kernel.owner(target.config, engine, device)
    pages = range(1, engine.max_pages + 1)
    tokens = list(prompt)
    computed = 0
    while len(tokens) < len(prompt) + max_new_tokens:
        rows = tokens[computed : computed + engine.max_num_tokens]
        batch = AttentionBatch.of([QuerySpan(pages, computed, len(rows))], engine.page_size)
        key = BatchDescriptor(num_tokens=len(rows), num_reqs=1)
        _, greedy = target(
            torch.tensor(rows, device=device),
            torch.arange(computed, computed + len(rows), device=device),
            owner.build(key, batch, Phase.REPLAY),
            caches,
            kernel=kernel,
        )
        computed += len(rows)
        if computed == len(tokens):
            tokens.append(int(greedy[-1]))
            if tokens[-1] == EOS:
                break
    return tokens[len(prompt) :]
