"""The draft: one layer that continues the target's hidden states (EAGLE, Li et al., 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from graphshare.adapters.toy.config import ToyConfig
from graphshare.adapters.toy.kernel import AttentionKernel, LayerStore
from graphshare.adapters.toy.model import TORCH, DecoderLayer, RMSNorm, TargetModel, run_layer
from graphshare.adapters.toy.rows import join_blocks, split_blocks

if TYPE_CHECKING:
    from graphshare.state import AttentionState

__all__ = ["DraftModel"]


class DraftModel(nn.Module):
    """Predicts the target's next hidden state; embedding and scores are the target's own.

    Args:
        config: Sizes, the target's.
    """

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def merge(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Join a hidden state with the embedding of the token after it, ``[..., hidden_size]``."""
        return self.fc(torch.cat((hidden, embedded), dim=-1))

    def forward(
        self,
        target: TargetModel,
        hidden: torch.Tensor,
        next_token_ids: torch.Tensor,
        positions: torch.Tensor,
        state: AttentionState,
        cache: LayerStore,
        *,
        uniform_query_len: int | None = None,
        kernel: AttentionKernel = TORCH,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the draft on flat rows: those of a target's step, or one of each request.

        Args:
            target: Whose embedding and scores are used.
            hidden: ``[num_tokens, hidden_size]``: of the target, or the draft's own last ones.
            next_token_ids: ``[num_tokens]`` int64: the token after each row's position.
            positions: ``[num_tokens]`` int64.
            state: For a prefill the very state of the target's step: the rows, the lengths, the
                pages and the slots are the same.
            cache: The draft's own, addressed by the target's slots; written in place.
            uniform_query_len: Rows of every request, if all have the same.
            kernel: Attends; the target's.

        Returns:
            Predicted hidden states, ``[num_tokens, hidden_size]``, and the draft token of each
            row, ``[num_tokens]`` int64.
        """
        num_tokens = next_token_ids.shape[0]
        views = kernel.views(state, num_tokens, uniform_query_len)
        turns = [target.rope.at(block) for block in split_blocks(positions)]
        blocks = [
            self.merge(block, target.embedding(tokens))
            for block, tokens in zip(
                split_blocks(hidden), split_blocks(next_token_ids), strict=True
            )
        ]
        blocks = run_layer(self.layer, blocks, turns, views, cache, state.slot_mappings, kernel)
        blocks = [self.norm(block) for block in blocks]
        tokens = [target.logits(block).argmax(-1) for block in blocks]
        return join_blocks(blocks, num_tokens), join_blocks(tokens, num_tokens)
