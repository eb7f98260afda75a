"""Who builds which state: the runner for the target, the speculator for itself.

Each owner runs vLLM's own code on vLLM's own builders and buffers; none keeps memory of its own.
vLLM's states name each layer, and all layers of an attention group share one metadata object, which
holds the slot mapping too. The target's state here is that object, or one for each group, and a
refresh looks at it once; vLLM gets its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from graphshare.adapters.vllm.backends import (
    BACKENDS,
    host_values,
    same_unused,
    written_by_builders,
)
from graphshare.adapters.vllm.family import Family
from graphshare.errors import CaptureError
from graphshare.owner import Phase
from graphshare.state import AttentionState

__all__ = ["DecodeBatch", "DecodeOwner", "PrefillOwner", "TargetBatch", "TargetOwner", "only"]

CaptureInputs = Callable[..., tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]]
"""vLLM's ``prepare_inputs_to_capture``."""


TargetBatch = tuple[Any, Any, Any, torch.Tensor]
"""A step of the target, as the runner asks its model state for the metadata: vLLM's ``InputBatch``,
padded to the descriptor; ``CUDAGraphMode.FULL``; for each cache group a block table
``[num_reqs, max_num_blocks]`` int32, CUDA; and slot mappings ``[num_cache_groups, num_tokens]``
int64, CUDA."""


class DecodeBatch(NamedTuple):
    """A draft decode, as the speculator asks itself for the metadata."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def only(layers: Iterable[str], state: AttentionState) -> AttentionState:
    """Return what a state of vLLM's holds for these layers."""
    metadata, slots = state
    return AttentionState(
        {name: metadata[name] for name in layers}, {name: slots[name] for name in layers}
    )


class _Owner:
    """What all owners have: a runner, and vLLM's way to build for a capture.

    Args:
        runner: vLLM's V2 model runner.
        family: What is known of this version of vLLM.

    Attributes:
        metadata: What vLLM's code returned for the last build for a capture, by layer; the draft's
            decodes, for any build.
        slots: Slot mappings by layer, of the last build for a capture.
    """

    def __init__(self, runner: Any, family: Family) -> None:
        self._runner = runner
        self._capture_inputs: CaptureInputs = family.capture_inputs()
        self.host_values = host_values(lengths_bounded=family.lengths_bounded)
        self.metadata: Mapping[str, Any] = {}
        self.slots: Mapping[str, torch.Tensor] = {}

    def built(self) -> AttentionState:
        """Return what vLLM gets for the last build for a capture."""
        return AttentionState(self.metadata, self.slots)

    def _for_capture(self, key: Any, input_buffers: Any, groups: Any) -> Mapping[str, Any]:
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
        for name, each in metadata.items():
            if each.slot_mapping.data_ptr() != slots[name].data_ptr():
                raise CaptureError(
                    f"vLLM's slot mapping of {name}",
                    expected="the one that its metadata holds",
                    got="another",
                    key=key,
                    consequence="A refresh would not look at what the graph reads",
                    remedy="Leave graphshare out of this model",
                )
        self.metadata, self.slots = metadata, slots
        return metadata


class TargetOwner(_Owner):
    """The runner's builders and buffers; a state is the metadata of its attention group.

    Where the runner has several groups, it is a tuple with that of each.

    Args:
        runner: vLLM's V2 model runner.
        family: What is known of this version of vLLM.

    Attributes:
        pick: Returns the state among what vLLM's code returned, by layer.
    """

    def __init__(self, runner: Any, family: Family) -> None:
        super().__init__(runner, family)
        groups = [group for within in runner.attn_groups for group in within]
        self._alone = len(groups) == 1
        self.pick: Callable[[Mapping[str, Any]], Any] = itemgetter(
            *(group.layer_names[0] for group in groups)
        )

    def build(self, key: Any, batch: Any, phase: Phase) -> Any:
        """Build on vLLM's dummy requests for a capture; for a step, return what was picked of it.

        Args:
            key: vLLM's descriptor.
            batch: For a step, what :meth:`pick` took of what the runner has just built.
            phase: What for.
        """
        del phase
        if batch is not None:
            return batch
        runner = self._runner
        return self.pick(self._for_capture(key, runner.input_buffers, runner.attn_groups))

    def lent(self, layers: Iterable[str]) -> Callable[[Any], AttentionState]:
        """Return the view of these layers on a state, by their own names."""
        groups = (group for within in self._runner.attn_groups for group in within)
        place = {layer: index for index, group in enumerate(groups) for layer in group.layer_names}
        wanted = [(layer, place[layer]) for layer in layers]

        def view(state: Any) -> AttentionState:
            each = (state,) if self._alone else state
            return AttentionState({layer: each[index] for layer, index in wanted})

        return view

    def writes(self, key: Any) -> list[torch.Tensor]:
        """Return the buffers that a step of the runner writes before the target runs."""
        del key
        return _written(self._runner, self._runner.attn_groups)


class PrefillOwner(_Owner):
    """The draft's own builders, on the target's batch: for keys that do not borrow, and to verify.

    A state has each of the draft's layers, as the view that the draft borrows.

    Args:
        runner: vLLM's V2 model runner.
        family: What is known of this version of vLLM.
        layers: The draft's layers.

    Attributes:
        compared_with: The borrowed state that the next build is compared with, if there is one.
    """

    def __init__(self, runner: Any, family: Family, layers: Iterable[str]) -> None:
        super().__init__(runner, family)
        # Bound now: the session puts its own in front of it.
        self._prepare_attn = runner.model_state.prepare_attn
        self._layers = list(layers)
        self.compared_with: AttentionState | None = None

    def build(self, key: Any, batch: TargetBatch | None, phase: Phase) -> AttentionState:
        """Build through the draft's attention groups what the target's step holds."""
        del phase
        runner = self._runner
        groups = runner.speculator.attn_groups
        if batch is None:
            metadata = self._for_capture(key, runner.input_buffers, groups)
        else:
            metadata = self._prepare_attn(*batch, groups, runner.kv_cache_config)
        state = AttentionState({name: metadata[name] for name in self._layers})
        if self.compared_with is not None:
            for name, own in state.attn_metadata.items():
                same_unused(own, self.compared_with.attn_metadata[name])
        return state

    def writes(self, key: Any) -> list[torch.Tensor]:
        """Return the buffers that such a build writes, and those that it reads."""
        del key
        return _written(self._runner, self._runner.speculator.attn_groups)

    def live_rows(self, key: Any, batch: TargetBatch) -> Mapping[str, int]:
        """Leave out of a comparison what only a forward writes."""
        del key, batch
        return {f"*.{name}": 0 for each in BACKENDS.values() for name in each.scratch}


def _written(runner: Any, groups: Any) -> list[torch.Tensor]:
    # Inputs and tables are written before the builders are asked, which belongs to the step.
    inputs, tables = runner.input_buffers, runner.block_tables
    return [
        inputs.query_start_loc,
        inputs.seq_lens,
        *tables.input_block_tables,
        tables.slot_mappings,
        *written_by_builders(groups),
    ]


class DecodeOwner(_Owner):
    """The speculator's builders and buffers, for one draft step of one token a request."""

    def __init__(self, runner: Any, family: Family) -> None:
        super().__init__(runner, family)
        self._speculator = runner.speculator
        self._build_metadata = runner.speculator._build_draft_attn_metadata

    def build(self, key: Any, batch: DecodeBatch | None, phase: Phase) -> AttentionState:
        """Build as the speculator does."""
        del phase
        if batch is None:
            speculator = self._speculator
            metadata = self._for_capture(key, speculator.input_buffers, speculator.attn_groups)
        else:
            metadata = self._build_metadata(*batch.args, **batch.kwargs)
        self.metadata = metadata
        return AttentionState(metadata)

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
