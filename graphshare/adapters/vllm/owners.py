"""Who builds which state: the runner for the target, the speculator for itself.

Each owner runs vLLM's own code on vLLM's own builders and buffers; none keeps memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from graphshare.adapters.vllm.backends import (
    BACKENDS,
    host_values,
    same_unused,
    written_by_builders,
)
from graphshare.owner import Phase
from graphshare.state import AttentionState

__all__ = ["DecodeBatch", "DecodeOwner", "PrefillOwner", "TargetBatch", "TargetOwner", "only"]

CaptureInputs = Callable[..., tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]]
"""vLLM's ``prepare_inputs_to_capture``."""


class TargetBatch(NamedTuple):
    """A step of the target, as the runner asks its model state for the metadata.

    Attributes:
        input_batch: vLLM's ``InputBatch``, padded to the descriptor.
        cudagraph_mode: ``CUDAGraphMode.FULL``.
        block_tables: For each cache group ``[num_reqs, max_num_blocks]`` int32, CUDA.
        slot_mappings: ``[num_cache_groups, num_tokens]`` int64, CUDA.
    """

    input_batch: Any
    cudagraph_mode: Any
    block_tables: Any
    slot_mappings: torch.Tensor


class DecodeBatch(NamedTuple):
    """A draft decode, as the speculator asks itself for the metadata."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def only(layers: frozenset[str], state: Any) -> AttentionState:
    """Return what a state holds for these layers."""
    metadata, slots = state
    return AttentionState(
        {name: each for name, each in metadata.items() if name in layers},
        {name: each for name, each in slots.items() if name in layers},
    )


class _Owner:
    """What all owners have: a runner, and vLLM's way to build for a capture.

    Args:
        runner: vLLM's V2 model runner.
        capture_inputs: vLLM's ``prepare_inputs_to_capture``.
    """

    def __init__(self, runner: Any, capture_inputs: CaptureInputs) -> None:
        self._runner = runner
        self._capture_inputs = capture_inputs
        self.host_values = host_values()

    def _for_capture(self, key: Any, input_buffers: Any, groups: Any) -> AttentionState:
        runner = self._runner
        metadata, slots = self._capture_inputs(
            key.num_reqs,
            key.num_tokens,
            runner.model_state,
            input_buffers,
            runner.block_tables,
            groups,
            runner.kv_cache_config,
        )
        return AttentionState(metadata, slots)


class TargetOwner(_Owner):
    """The runner's builders and buffers.

    Args:
        runner: vLLM's V2 model runner.
        capture_inputs: vLLM's ``prepare_inputs_to_capture``.
        groups: Returns the attention groups to build through; by default the runner's.
    """

    def __init__(
        self,
        runner: Any,
        capture_inputs: CaptureInputs,
        groups: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__(runner, capture_inputs)
        self._groups = groups or (lambda: runner.attn_groups)
        # Bound now: the session puts its own in front of it.
        self._prepare_attn = runner.model_state.prepare_attn

    def build(self, key: Any, batch: TargetBatch | None, phase: Phase) -> AttentionState:
        """Build as the runner does: for a step, or on vLLM's dummy requests for a capture."""
        del phase
        if batch is None:
            return self._for_capture(key, self._runner.input_buffers, self._groups())
        input_batch, mode, block_tables, slot_mappings = batch
        cache = self._runner.kv_cache_config
        metadata = self._prepare_attn(
            input_batch, mode, block_tables, slot_mappings, self._groups(), cache
        )
        slots: dict[str, torch.Tensor] = {}
        for number, group in enumerate(cache.kv_cache_groups):
            # A view of its own for all layers of a group, as in vLLM's state for a capture.
            slots.update(dict.fromkeys(group.layer_names, slot_mappings[number]))
        return AttentionState(metadata, slots)

    def writes(self, key: Any) -> list[torch.Tensor]:
        """Return the buffers that a step of the runner writes before the target runs.

        Its inputs and tables are written before ``build`` is called, which belongs to the step.
        """
        del key
        runner = self._runner
        inputs, tables = runner.input_buffers, runner.block_tables
        return [
            inputs.query_start_loc,
            inputs.seq_lens,
            *tables.input_block_tables,
            tables.slot_mappings,
            *written_by_builders(self._groups()),
        ]


class PrefillOwner(TargetOwner):
    """The draft's own builders, on the target's batch: for keys that do not borrow, and to verify.

    Args:
        runner: vLLM's V2 model runner.
        capture_inputs: vLLM's ``prepare_inputs_to_capture``.
        layers: The draft's layers.

    Attributes:
        compared_with: The borrowed state that the next build is compared with, if there is one.
    """

    def __init__(self, runner: Any, capture_inputs: CaptureInputs, layers: frozenset[str]) -> None:
        super().__init__(runner, capture_inputs, lambda: runner.speculator.attn_groups)
        self._layers = layers
        self.compared_with: AttentionState | None = None

    def build(self, key: Any, batch: TargetBatch | None, phase: Phase) -> AttentionState:
        """Build through the draft's attention groups what the target's step holds."""
        state = only(self._layers, super().build(key, batch, phase))
        if self.compared_with is not None:
            for name, metadata in state.attn_metadata.items():
                same_unused(metadata, self.compared_with.attn_metadata[name])
        return state

    def live_rows(self, key: Any, batch: TargetBatch) -> Mapping[str, int]:
        """Leave out of a comparison what only a forward writes."""
        del key, batch
        return {f"*.{name}": 0 for each in BACKENDS.values() for name in each.scratch}


class DecodeOwner(_Owner):
    """The speculator's builders and buffers, for one draft step of one token a request."""

    def __init__(self, runner: Any, capture_inputs: CaptureInputs) -> None:
        super().__init__(runner, capture_inputs)
        self._speculator = runner.speculator
        self._build_metadata = runner.speculator._build_draft_attn_metadata

    def build(self, key: Any, batch: DecodeBatch | None, phase: Phase) -> AttentionState:
        """Build as the speculator does; its slot mappings are those that the metadata holds."""
        del phase
        if batch is None:
            speculator = self._speculator
            state = self._for_capture(key, speculator.input_buffers, speculator.attn_groups)
            metadata = state.attn_metadata
        else:
            metadata = self._build_metadata(*batch.args, **batch.kwargs)
        return AttentionState(metadata, {n: each.slot_mapping for n, each in metadata.items()})

    def writes(self, key: Any) -> list[torch.Tensor]:
        """Return the buffers that a draft decode writes; block tables are the target's."""
        del key
        speculator, tables = self._speculator, self._runner.block_tables
        return [
            speculator.input_buffers.query_start_loc,
            speculator.input_buffers.seq_lens,
            tables.slot_mappings,
            *written_by_builders(speculator.attn_groups),
        ]
