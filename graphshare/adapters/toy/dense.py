"""The same models over whole sequences at once: for training, and to check the paged forms."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional

from graphshare.adapters.toy.draft import DraftModel
from graphshare.adapters.toy.model import DecoderLayer, Heads, TargetModel

__all__ = ["draft_hidden", "generate", "target_hidden"]


def _by_head(x: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Turn ``[batch, length, heads, size]`` to ``[batch, heads * groups, length, size]``."""
    return x.transpose(1, 2).repeat_interleave(groups, dim=1)


def _merge(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def _groups(layer: DecoderLayer) -> int:
    return layer.config.num_q_heads // layer.config.num_kv_heads


def target_hidden(
    model: TargetModel, token_ids: torch.Tensor, *, dropout: float = 0.0
) -> torch.Tensor:
    """Run the target over sequences.

    Args:
        model: The target.
        token_ids: ``[batch, length]`` int64.
        dropout: Share of each layer's input that is dropped in training.

    Returns:
        Hidden states after the last norm, ``[batch, length, hidden_size]``.
    """
    cos, sin = model.rope.at(torch.arange(token_ids.shape[1], device=token_ids.device))
    x = functional.dropout(model.embedding(token_ids), dropout)
    for module in model.layers:
        layer = cast("DecoderLayer", module)
        heads = layer.project(x, cos, sin)
        groups = _groups(layer)
        attended = functional.scaled_dot_product_attention(
            _by_head(heads.query),
            _by_head(heads.key, groups),
            _by_head(heads.value, groups),
            is_causal=True,
        )
        x = functional.dropout(layer.finish(x, _merge(attended)), dropout)
    return model.norm(x)


def _attend_ahead(first: Heads, later: list[Heads], groups: int) -> torch.Tensor:
    """Attend from the newest self-fed step to the true past and to the self-fed steps before it.

    Step ``t`` of base row ``i`` stands at position ``i + t``: it sees the true rows up to ``i``,
    and the rows that steps 1 to ``t`` of the same base row made.
    """
    query = _by_head(later[-1].query) * later[-1].query.shape[-1] ** -0.5
    length = query.shape[2]
    past = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = (query @ _by_head(first.key, groups).transpose(2, 3)).masked_fill(~past, -1e30)
    ahead = [(query * _by_head(heads.key, groups)).sum(-1, keepdim=True) for heads in later]
    weights = torch.cat((scores, *ahead), dim=-1).softmax(-1)
    attended = weights[..., :length] @ _by_head(first.value, groups)
    for offset, heads in enumerate(later):
        column = weights[..., length + offset : length + offset + 1]
        attended = attended + column * _by_head(heads.value, groups)
    return _merge(attended)


def draft_hidden(
    draft: DraftModel,
    target: TargetModel,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    num_steps: int,
) -> list[torch.Tensor]:
    """Run the draft over sequences, then let it feed on itself, as decoding does.

    Args:
        draft: The draft.
        target: Whose embedding is used.
        hidden: Of the target, ``[batch, length, hidden_size]``.
        token_ids: What the hidden states came from, ``[batch, length]``.
        num_steps: K: one step on the true hidden states, the others self-fed.

    Returns:
        For each step ``t`` the prediction for ``hidden[:, t + 1 :]``:
        ``[batch, length - num_steps, hidden_size]``.
    """
    length = token_ids.shape[1] - num_steps
    layer = draft.layer
    embedded = target.embedding(token_ids)
    start = torch.arange(length, device=token_ids.device)
    outputs: list[torch.Tensor] = []
    first: Heads | None = None
    later: list[Heads] = []
    fed = hidden[:, :length]
    for step in range(num_steps):
        x = draft.merge(fed, embedded[:, step + 1 : step + 1 + length])
        heads = layer.project(x, *target.rope.at(start + step))
        if first is None:
            first = heads
            groups = _groups(layer)
            attended = _merge(
                functional.scaled_dot_product_attention(
                    _by_head(heads.query),
                    _by_head(heads.key, groups),
                    _by_head(heads.value, groups),
                    is_causal=True,
                )
            )
        else:
            later.append(heads)
            attended = _attend_ahead(first, later, _groups(layer))
        fed = draft.norm(layer.finish(x, attended))
        outputs.append(fed)
    return outputs


@torch.no_grad()
def generate(model: TargetModel, prompts: torch.Tensor, num_new: int) -> torch.Tensor:
    """Continue many prompts greedily at once; fast, and not bit for bit what the engine gives.

    Args:
        model: The target.
        prompts: ``[batch, length]`` int64.
        num_new: Tokens to add.

    Returns:
        ``[batch, length + num_new]`` int64.
    """
    config = model.config
    batch, length = prompts.shape
    total = length + num_new
    tokens = functional.pad(prompts, (0, num_new))
    shape = (config.num_layers, 2, batch, config.num_kv_heads, total, config.head_size)
    cache = torch.zeros(shape, device=prompts.device)
    done = 0
    for end in range(length, total):
        cos, sin = model.rope.at(torch.arange(done, end, device=prompts.device))
        x = model.embedding(tokens[:, done:end])
        for index, module in enumerate(model.layers):
            layer = cast("DecoderLayer", module)
            heads = layer.project(x, cos, sin)
            keys, values = cache[index]
            keys[:, :, done:end] = _by_head(heads.key)
            values[:, :, done:end] = _by_head(heads.value)
            attended = functional.scaled_dot_product_attention(
                _by_head(heads.query).to(cache.dtype),
                keys[:, :, :end].repeat_interleave(_groups(layer), dim=1),
                values[:, :, :end].repeat_interleave(_groups(layer), dim=1),
                is_causal=done == 0,
            )
            x = layer.finish(x, _merge(attended))
        tokens[:, end] = model.logits(model.norm(x[:, -1])).argmax(-1)
        done = end
    return tokens
