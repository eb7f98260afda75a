"""The three forwards that are captured, and the persistent inputs that they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from graphshare.adapters.toy.batch import StepBatch
from graphshare.adapters.toy.config import EngineConfig
from graphshare.adapters.toy.draft import DraftModel
from graphshare.adapters.toy.kernel import AttentionKernel, ToyOwner
from graphshare.adapters.toy.model import TORCH, TargetModel
from graphshare.buffers import PersistentBuffer
from graphshare.device import device_of

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor
    from graphshare.state import AttentionState

__all__ = ["DraftOutput", "Forwards"]


class DraftOutput(NamedTuple):
    """What the draft says for each row.

    Args:
        hidden: ``[num_tokens, hidden_size]`` float32.
        tokens: ``[num_tokens]`` int64.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor


class Forwards:
    """Two models, their cache, and their inputs, at addresses that never change.

    Each forward takes a key and a state, reads its inputs from the buffers' first rows, and can be
    captured. What a captured one returns stays in place.

    Args:
        target: The target; its gradients are switched off.
        draft: The draft; the same.
        engine: What the buffers are sized for.
        device: Where the buffers lie; the models must be there.
        kernel: Attends, for both models.

    Raises:
        ValueError: When the models know fewer positions than the engine allows, or torch does not
            know the device.
        RuntimeError: The device is not there.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel,
        engine: EngineConfig,
        device: torch.device | str,
        kernel: AttentionKernel = TORCH,
    ) -> None:
        config = target.config
        if engine.max_model_len > config.max_model_len:
            raise ValueError(
                f"max_model_len: expected at most {config.max_model_len}, which the model knows, "
                f"got {engine.max_model_len}"
            )
        self.engine = engine
        self.kernel = kernel
        self.device = device_of("Forwards: device", device)
        self.target_model = target.requires_grad_(False).eval()
        self.draft_model = draft.requires_grad_(False).eval()
        # The draft's layer comes last: its own tensors, the target's slots and pages.
        *self.target_caches, self.draft_cache = kernel.make_cache(
            config, engine, config.num_layers + 1, self.device
        )

        def ids(name: str, rows: int) -> PersistentBuffer:
            return PersistentBuffer(rows, torch.int64, device, padding=0, name=name)

        def rows_of_hidden(name: str, rows: int) -> PersistentBuffer:
            shape = (rows, config.hidden_size)
            return PersistentBuffer(shape, torch.float32, device, padding=0, name=name)

        tokens, requests = engine.max_num_tokens, engine.max_num_reqs
        self._token_ids = ids("token_ids", tokens)
        self._positions = ids("positions", tokens)
        self._next_token_ids = ids("next_token_ids", tokens)
        self._hidden = rows_of_hidden("hidden", tokens)
        self._draft_token_ids = ids("draft_token_ids", requests)
        self._draft_positions = ids("draft_positions", requests)
        self._draft_hidden = rows_of_hidden("draft_hidden", requests)
        self._rows = ids("rows", requests)

    def make_owner(self) -> ToyOwner:
        """Make an owner of the kernel's states, with buffers of its own."""
        return self.kernel.owner(self.target_model.config, self.engine, self.device)

    def load_target(self, batch: StepBatch, num_tokens: int) -> None:
        """Write the inputs of a target step, padded to ``num_tokens`` rows."""
        self._token_ids.write(batch.token_ids, num_tokens)
        self._positions.write(batch.positions, num_tokens)

    def target(self, key: BatchDescriptor, state: AttentionState) -> torch.Tensor:
        """Run the target; leaves its hidden states for the draft prefill.

        Returns:
            Greedy next token of each row, ``[key.num_tokens]`` int64.
        """
        num_tokens = key.num_tokens
        hidden, tokens = self.target_model(
            self._token_ids.tensor[:num_tokens],
            self._positions.tensor[:num_tokens],
            state,
            self.target_caches,
            uniform_query_len=key.uniform_query_len,
            kernel=self.kernel,
        )
        self._hidden.tensor[:num_tokens].copy_(hidden)
        return tokens

    def load_draft_prefill(self, next_token_ids: Sequence[int], num_tokens: int) -> None:
        """Write the inputs of a draft prefill over the rows of the target's last step."""
        self._next_token_ids.write(next_token_ids, num_tokens)

    def draft_prefill(self, key: BatchDescriptor, state: AttentionState) -> DraftOutput:
        """Run the draft over the target's rows, on the target's hidden states and positions."""
        num_tokens = key.num_tokens
        return DraftOutput(
            *self.draft_model(
                self.target_model,
                self._hidden.tensor[:num_tokens],
                self._next_token_ids.tensor[:num_tokens],
                self._positions.tensor[:num_tokens],
                state,
                self.draft_cache,
                uniform_query_len=key.uniform_query_len,
                kernel=self.kernel,
            )
        )

    def pick_rows(self, output: DraftOutput, rows: Sequence[int]) -> DraftOutput:
        """Copy some rows out of an output that the next replay may overwrite.

        Args:
            output: Of a draft forward.
            rows: At most ``max_num_reqs`` row numbers.
        """
        index = self._rows.write(rows, len(rows))
        return DraftOutput(output.hidden[index], output.tokens[index])

    def load_draft_decode(
        self, previous: DraftOutput, positions: Sequence[int], num_tokens: int
    ) -> None:
        """Feed the draft with its own last row of each request."""
        self._draft_hidden.write(previous.hidden, num_tokens)
        self._draft_token_ids.write(previous.tokens, num_tokens)
        self._draft_positions.write(positions, num_tokens)

    def draft_decode(self, key: BatchDescriptor, state: AttentionState) -> DraftOutput:
        """Run the draft on one row for each request."""
        num_tokens = key.num_tokens
        return DraftOutput(
            *self.draft_model(
                self.target_model,
                self._draft_hidden.tensor[:num_tokens],
                self._draft_token_ids.tensor[:num_tokens],
                self._draft_positions.tensor[:num_tokens],
                state,
                self.draft_cache,
                uniform_query_len=key.uniform_query_len,
                kernel=self.kernel,
            )
        )
