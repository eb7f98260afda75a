"""Who writes the attention state: one owner for the target's steps, one for the draft's decodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from graphshare.adapters.toy.attention import PagedMetadata
from graphshare.adapters.toy.batch import AttentionBatch
from graphshare.adapters.toy.cache import SCRATCH_PAGE
from graphshare.adapters.toy.config import EngineConfig
from graphshare.buffers import PersistentBuffer
from graphshare.owner import Phase
from graphshare.state import AttentionState

if TYPE_CHECKING:
    from graphshare.descriptor import BatchDescriptor

__all__ = ["PagedOwner"]


class PagedOwner:
    """Fills persistent buffers for paged attention.

    Rows past the batch: requests of length 0 on the scratch page, with no rows; slots in the
    scratch page.

    Args:
        engine: What the buffers are sized for.
        device: Where they lie.

    Attributes:
        num_builds: Calls of :meth:`build` for a batch.
    """

    host_values: Mapping[str, str] = {
        "*.max_seq_len": "at_most",  # captured at capacity
        "*.num_actual_tokens": "any",  # no kernel reads it
    }

    def __init__(self, engine: EngineConfig, device: torch.device | str) -> None:
        self._engine = engine
        self.num_builds = 0

        def buffer(name: str, shape: int | tuple[int, int], padding: object) -> PersistentBuffer:
            dtype = torch.int64 if name == "slot_mapping" else torch.int32
            return PersistentBuffer(shape, dtype, device, padding=padding, name=name)  # pyright: ignore[reportArgumentType]

        requests = engine.max_num_reqs
        self._query_start_loc = buffer("query_start_loc", requests + 1, "last")
        self._seq_lens = buffer("seq_lens", requests, 0)
        self._block_table = buffer("block_table", (requests, engine.max_pages), SCRATCH_PAGE)
        self._slot_mapping = buffer(
            "slot_mapping", engine.max_num_tokens, SCRATCH_PAGE * engine.page_size
        )

    def build(
        self, key: BatchDescriptor, batch: AttentionBatch | None, phase: Phase
    ) -> AttentionState:
        """Write the state for one step.

        Args:
            key: Padded sizes.
            batch: The step; ``None`` for a warmup or capture, which then runs on requests that
                live in the scratch page.
            phase: A warmup and a capture state the capacity as ``max_seq_len``.

        Returns:
            :class:`PagedMetadata` and the slot mapping, ``[key.num_tokens]`` int64.

        Raises:
            ValueError: When the batch does not fit the key.
        """
        num_reqs = self._num_reqs(key)
        replay = phase is Phase.REPLAY
        if batch is None:
            if replay:
                raise ValueError("a replay needs a batch")
            batch = AttentionBatch.dummy(_dummy_query_lens(key, num_reqs), self._engine.page_size)
        if batch.num_tokens > key.num_tokens or batch.num_reqs > num_reqs:
            # Before the first write: a batch that is refused leaves the state as it was.
            raise ValueError(
                f"{key}: expected at most {key.num_tokens} tokens of {num_reqs} requests, "
                f"got {batch.num_tokens} of {batch.num_reqs}"
            )
        max_pages = self._engine.max_pages
        table = torch.tensor(
            [(*pages, *[SCRATCH_PAGE] * (max_pages - len(pages))) for pages in batch.block_table],
            dtype=torch.int32,
        )
        metadata = PagedMetadata(
            query_start_loc=self._query_start_loc.write(batch.query_start_loc, num_reqs + 1),
            seq_lens=self._seq_lens.write(batch.seq_lens, num_reqs),
            block_table=self._block_table.write(table, num_reqs),
            page_size=self._engine.page_size,
            max_seq_len=max(batch.seq_lens) if replay else self._engine.max_model_len,
            num_actual_tokens=batch.num_tokens,
        )
        slot_mapping = self._slot_mapping.write(batch.slot_mapping, key.num_tokens)
        if replay:
            self.num_builds += 1
        return AttentionState(metadata, slot_mapping)

    def live_rows(self, key: BatchDescriptor, batch: AttentionBatch) -> Mapping[str, int]:
        """Say how many leading rows of each tensor the batch uses."""
        del key  # padding is what it adds
        return {
            "*.query_start_loc": batch.num_reqs + 1,
            "*.seq_lens": batch.num_reqs,
            "*.block_table": batch.num_reqs,
            "slot_mappings": batch.num_tokens,
        }

    def _num_reqs(self, key: BatchDescriptor) -> int:
        if key.num_reqs is not None:
            return key.num_reqs
        return min(key.num_tokens // (key.uniform_query_len or 1), self._engine.max_num_reqs)


def _dummy_query_lens(key: BatchDescriptor, num_reqs: int) -> list[int]:
    """Share the key's rows out: the longest requests that it allows first, then single rows."""
    if key.uniform_query_len is not None:
        return [key.uniform_query_len] * num_reqs
    longest = key.max_query_len or key.num_tokens
    lens = [1] * min(num_reqs, key.num_tokens)
    spare = key.num_tokens - len(lens)
    for index in range(len(lens)):
        more = min(spare, longest - 1)
        lens[index] += more
        spare -= more
    return lens
