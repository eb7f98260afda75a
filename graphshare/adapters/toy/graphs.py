"""The toy engine on captured graphs: three pools, the draft's prefill borrowing the target's state.

This is all that an engine writes to use graphshare: an owner for each state it builds, a forward
for each graph it captures, and a loan.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from typing_extensions import Self

from graphshare.adapters.toy.batch import AttentionBatch
from graphshare.adapters.toy.config import EngineConfig
from graphshare.adapters.toy.forwards import DraftOutput, Forwards
from graphshare.core import Forward
from graphshare.descriptor import BatchDescriptor, capture_descriptors
from graphshare.owner import AttentionSpec, StateOwner
from graphshare.pool import GraphPool
from graphshare.progress import Progress
from graphshare.sharing import SharedStates, share_states

__all__ = ["GraphRunner", "decode_keys", "ladder", "spec_of", "target_keys"]


def ladder(largest: int) -> list[int]:
    """Return the powers of two below ``largest``, and ``largest``."""
    sizes = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return [*sizes, largest]


def target_keys(engine: EngineConfig) -> list[BatchDescriptor]:
    """Return the keys of a target step: any mixture of rows, and K+1 rows for each request."""
    return capture_descriptors(
        num_tokens=ladder(engine.max_num_tokens),
        max_num_reqs=engine.max_num_reqs,
        uniform_query_lens=[engine.num_draft_tokens + 1],
    )


def decode_keys(engine: EngineConfig) -> list[BatchDescriptor]:
    """Return the keys of a draft decode: one row for each request."""
    return [
        BatchDescriptor(num_tokens=size, num_reqs=size, uniform_query_len=1)
        for size in reversed(ladder(engine.max_num_reqs))
    ]


def spec_of(forwards: Forwards) -> AttentionSpec:
    """Return what both models' attention is built for; the layer count does not matter."""
    return forwards.kernel.spec(forwards.target_model.config, forwards.engine)


class GraphRunner:
    """Runs the engine's forwards on captured graphs.

    Args:
        forwards: The models and their inputs.
        sharing: Whether draft prefills borrow the target's state; otherwise an owner of their own
            builds it once more for each step.
        device: Where everything lies.
        backend: As for :class:`graphshare.GraphPool`.
        checks: The same.
        target_owner, prefill_owner, decode_owner: Instead of the kernel's own, e.g. to take
            times, or to plant a fault.
        prefill_spec: What draft prefills are planned for; by default what the target is.
        prefill_keys: Keys of draft prefills; by default the target's, whose states they borrow.

    Attributes:
        target: The pool of the target; its owner builds the states that are lent.
        prefill: The pool of draft prefills, which borrows.
        decode: The pool of draft decodes, on states of its own.
        shared: The loan, ``None`` without sharing.
    """

    def __init__(
        self,
        forwards: Forwards,
        *,
        sharing: bool = True,
        device: torch.device | str = "cpu",
        backend: Literal["auto", "cuda", "tape"] = "auto",
        checks: Literal["fast", "strict", "off"] = "fast",
        target_owner: StateOwner | None = None,
        prefill_owner: StateOwner | None = None,
        decode_owner: StateOwner | None = None,
        prefill_spec: AttentionSpec | None = None,
        prefill_keys: Sequence[BatchDescriptor] | None = None,
    ) -> None:
        engine = forwards.engine
        self._forwards = forwards
        self._prefill_keys = target_keys(engine) if prefill_keys is None else prefill_keys

        def pool(
            name: str, owner: StateOwner | None, spec: AttentionSpec | None = None
        ) -> GraphPool[BatchDescriptor]:
            return GraphPool(
                name,
                owner=owner or forwards.make_owner(),
                spec=spec or spec_of(forwards),
                device=device,
                backend=backend,
                checks=checks,
            )

        self.target = pool("target", target_owner)
        # With an owner too, so that shared.verify() can prove the loan right; it builds nothing.
        self.prefill = pool("draft.prefill", prefill_owner, prefill_spec)
        self.decode = pool("draft.decode", decode_owner)
        self.shared: SharedStates[BatchDescriptor, BatchDescriptor] | None = None
        if sharing:
            self.shared = share_states(self.target, self.prefill)

    def capture(self, progress: bool | Progress | None = None) -> None:
        """Capture all graphs, the lender's first.

        Args:
            progress: As for :meth:`graphshare.GraphPool.capture`; a callable is told the pool too.
        """
        engine, forwards = self._forwards.engine, self._forwards
        plan: list[tuple[GraphPool[BatchDescriptor], Sequence[BatchDescriptor], Forward]] = [
            (self.target, target_keys(engine), forwards.target),
            (self.prefill, self._prefill_keys, forwards.draft_prefill),
            (self.decode, decode_keys(engine), forwards.draft_decode),
        ]
        with torch.no_grad():
            for pool, keys, forward in plan:
                pool.capture(keys, forward, progress=_named(progress, pool.name))

    def close(self) -> None:
        """Free the graphs; borrowers first."""
        for pool in (self.decode, self.prefill, self.target):
            pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def prepare_target(self, batch: AttentionBatch) -> BatchDescriptor:
        """Dispatch a step, and have the target's owner build its state."""
        key = _dispatch(self.target, batch)
        self.target.refresh(key, batch)
        return key

    def run_target(self, key: BatchDescriptor) -> torch.Tensor:
        """Replay the target."""
        return self.target.replay(key)

    def run_draft_prefill(self, key: BatchDescriptor, batch: AttentionBatch) -> DraftOutput:
        """Replay the draft over the same rows: on the target's state, without a build."""
        if self.shared is None:
            self.prefill.refresh(key, batch)
            return self.prefill.replay(key)
        # The loan knows which key the target ran; dispatching again could choose another one.
        return self.prefill.replay(self.shared.live_key or key)

    def prepare_draft_decode(self, batch: AttentionBatch) -> BatchDescriptor:
        """Dispatch a draft decode, and have its own owner build the state."""
        key = _dispatch(self.decode, batch)
        self.decode.refresh(key, batch)
        return key

    def run_draft_decode(self, key: BatchDescriptor) -> DraftOutput:
        """Replay the draft on one row for each request."""
        return self.decode.replay(key)


def _named(progress: bool | Progress | None, name: str) -> bool | Progress | None:
    if not callable(progress):
        return progress
    return lambda done, total, what: progress(done, total, f"{name}: {what}")


def _dispatch(pool: GraphPool[BatchDescriptor], batch: AttentionBatch) -> BatchDescriptor:
    key: Any = pool.dispatch(
        num_tokens=batch.num_tokens,
        num_reqs=batch.num_reqs,
        uniform_query_len=batch.uniform_query_len,
    )
    if key is None:
        raise ValueError(
            f"{pool.name}: no graph for {batch.num_tokens} tokens of {batch.num_reqs} requests"
        )
    return key
