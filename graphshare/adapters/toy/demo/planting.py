"""Faults put into the running engine: what engines have done, with the engine's own parts.

Each function makes a runner whose fault is real: a build that writes over another's, a buffer that
moves, a value frozen too small. With ``unsafe`` the runner does without the check that would refuse
the fault, by what a user of graphshare could do too: ``checks="off"``, a false declaration, or
pools that share an owner's memory and no loan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from graphshare.adapters.toy.attention import PagedMetadata
from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan
from graphshare.adapters.toy.demo.runs import Bench
from graphshare.adapters.toy.forwards import DraftOutput, Forwards
from graphshare.adapters.toy.graphs import GraphRunner, ladder, spec_of
from graphshare.adapters.toy.owner import PagedOwner
from graphshare.adapters.toy.speculation import EagerRunner
from graphshare.descriptor import BatchDescriptor, capture_descriptors
from graphshare.owner import AttentionSpec, Phase
from graphshare.state import AttentionState

__all__ = ["PLANTED", "Planted", "Site"]

Checks = Literal["fast", "off"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where and when a fault is planted.

    Args:
        bench: Models and sizes.
        unsafe: Whether the fault is to be let through.
        step: The target's step from which on the fault is there, for faults that come midway.
        longest_prompt: Tokens of the longest prompt of the workload.
    """

    bench: Bench
    unsafe: bool
    step: int
    longest_prompt: int

    @property
    def checks(self) -> Checks:
        """What the pools check."""
        return "off" if self.unsafe else "fast"

    def owner(self) -> PagedOwner:
        """Return an owner without a fault."""
        return PagedOwner(self.bench.engine, self.bench.device)


@dataclass(frozen=True, slots=True)
class Planted:
    """An engine with a fault in it.

    Args:
        forwards: What the engine drives.
        runner: Runs them.
    """

    forwards: Forwards
    runner: GraphRunner


# stale: an eager step, a prefetch, another model: someone builds through the same builder.


class _EarlyDecode(GraphRunner):
    """Prepares the draft's first decode before its prefill has run, to overlap the two."""

    def __init__(self, site: Site) -> None:
        self._page_size = site.bench.engine.page_size
        builder = site.owner()  # one builder for both models, as engines have
        super().__init__(
            site.bench.forwards,
            device=site.bench.device,
            checks=site.checks,
            target_owner=builder,
            decode_owner=builder,
        )

    def run_draft_prefill(self, key: BatchDescriptor, batch: AttentionBatch) -> DraftOutput:
        spans = [
            QuerySpan(pages, length - 1, 1)
            for pages, length in zip(batch.block_table, batch.seq_lens, strict=True)
        ]
        self.prepare_draft_decode(AttentionBatch.of(spans, self._page_size))
        return super().run_draft_prefill(key, batch)


def _stale(site: Site) -> Planted:
    return Planted(site.bench.forwards, _EarlyDecode(site))


# moved: a buffer that is allocated anew.


class _Growing(PagedOwner):
    """Allocates its buffers anew in the middle of the run, as a workspace does that grows."""

    def __init__(self, site: Site) -> None:
        self._again: Callable[[], None] = lambda: PagedOwner.__init__(
            self, site.bench.engine, site.bench.device
        )
        self._builds_left = site.step
        super().__init__(site.bench.engine, site.bench.device)

    def build(
        self, key: BatchDescriptor, batch: AttentionBatch | None, phase: Phase
    ) -> AttentionState:
        if phase is Phase.REPLAY:
            self._builds_left -= 1
            if self._builds_left == 0:
                self._again()
        return super().build(key, batch, phase)


def _with_target_owner(site: Site, owner: PagedOwner) -> Planted:
    runner = GraphRunner(
        site.bench.forwards, device=site.bench.device, checks=site.checks, target_owner=owner
    )
    return Planted(site.bench.forwards, runner)


def _moved(site: Site) -> Planted:
    return _with_target_owner(site, _Growing(site))


# lazy: a plan that the first forward on a state makes, and marks as made.


@dataclass(slots=True)
class _LazyMetadata:
    """As :class:`PagedMetadata`, with a mark that the forward sets."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    page_size: int
    max_seq_len: int
    num_actual_tokens: int
    planned: bool = False


class _PlanningForwards(Forwards):
    """A target whose attention plans on first use: a kernel writes what the others then read."""

    def __init__(self, site: Site) -> None:
        other = site.bench.forwards
        super().__init__(
            other.target_model, other.draft_model, site.bench.engine, site.bench.device
        )
        self._plan = torch.zeros(
            site.bench.engine.max_num_reqs, dtype=torch.int32, device=site.bench.device
        )

    def target(self, key: BatchDescriptor, state: AttentionState) -> torch.Tensor:
        metadata: _LazyMetadata = state.attn_metadata
        plan = self._plan[: metadata.seq_lens.shape[0]]
        if not metadata.planned:
            plan.copy_(metadata.seq_lens)
            metadata.planned = True
        planned = PagedMetadata(
            query_start_loc=metadata.query_start_loc,
            seq_lens=plan,
            block_table=metadata.block_table,
            page_size=metadata.page_size,
            max_seq_len=metadata.max_seq_len,
            num_actual_tokens=metadata.num_actual_tokens,
        )
        return super().target(key, state._replace(attn_metadata=planned))


class _OneStateForAll(PagedOwner):
    """Hands out the same metadata object for a key's warmup and for its capture."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.bench.engine, site.bench.device)
        self._kept: dict[BatchDescriptor, AttentionState] = {}
        if site.unsafe:
            self.host_values = {"*.planned": "any", **self.host_values}

    def build(
        self, key: BatchDescriptor, batch: AttentionBatch | None, phase: Phase
    ) -> AttentionState:
        state = super().build(key, batch, phase)
        if phase is Phase.REPLAY:
            return _lazily(state)
        return _keep(self._kept, key, _lazily(state))


def _keep(
    kept: dict[BatchDescriptor, AttentionState], key: BatchDescriptor, state: AttentionState
) -> AttentionState:
    return kept.setdefault(key, state)


def _lazily(state: AttentionState) -> AttentionState:
    metadata: PagedMetadata = state.attn_metadata
    fields = {name: getattr(metadata, name) for name in PagedMetadata.__dataclass_fields__}
    return state._replace(attn_metadata=_LazyMetadata(**fields))


def _lazy(site: Site) -> Planted:
    forwards = _PlanningForwards(site)
    runner = GraphRunner(forwards, device=site.bench.device, target_owner=_OneStateForAll(site))
    return Planted(forwards, runner)


# baked: a number on the host that was small at the capture.


class _ShortCapture(PagedOwner):
    """States the longest request of the moment as ``max_seq_len``, at the capture too."""

    def __init__(self, site: Site) -> None:
        super().__init__(site.bench.engine, site.bench.device)
        self._longest = max(1, site.longest_prompt // 2)

    def build(
        self, key: BatchDescriptor, batch: AttentionBatch | None, phase: Phase
    ) -> AttentionState:
        state = super().build(key, batch, phase)
        if phase is Phase.REPLAY:
            return state
        metadata = replace(state.attn_metadata, max_seq_len=self._longest)
        return state._replace(attn_metadata=metadata)


def _baked(site: Site) -> Planted:
    return _with_target_owner(site, _ShortCapture(site))


# key: the draft's own list of shapes, and its own choice among them.


_ONE_TOO_MANY = 1


class _OwnShapes(GraphRunner):
    """The draft counts one row too many for each request, when it captures and when it serves.

    It then takes its own graph of that stride, though the target built the state for another.
    """

    def __init__(self, site: Site) -> None:
        engine = site.bench.engine
        self._stride = engine.num_draft_tokens + 1 + _ONE_TOO_MANY
        keys = capture_descriptors(
            num_tokens=ladder(engine.max_num_tokens),
            max_num_reqs=engine.max_num_reqs,
            uniform_query_lens=[self._stride],
        )
        builder = site.owner()  # unsafe: both models' graphs on one builder's memory, and no loan
        super().__init__(
            site.bench.forwards,
            sharing=not site.unsafe,
            device=site.bench.device,
            checks=site.checks,
            target_owner=builder,
            prefill_owner=builder,
            prefill_keys=[key for key in keys if key.num_tokens <= engine.max_num_tokens],
        )

    def run_draft_prefill(self, key: BatchDescriptor, batch: AttentionBatch) -> DraftOutput:
        own: BatchDescriptor | None = None
        if batch.uniform_query_len == self._stride - _ONE_TOO_MANY:
            own = self.prefill.dispatch(
                num_tokens=batch.num_reqs * self._stride,
                num_reqs=batch.num_reqs,
                uniform_query_len=self._stride,
            )
        else:
            own = self.prefill.dispatch(num_tokens=batch.num_tokens, num_reqs=batch.num_reqs)
        return self.prefill.replay(key if own is None else own)


def _key(site: Site) -> Planted:
    return Planted(site.bench.forwards, _OwnShapes(site))


# released: what the borrower needs is let go.


class _Frugal(GraphRunner):
    """Releases target graphs in the middle of the run, to save memory, and runs eagerly instead."""

    def __init__(self, site: Site) -> None:
        # Unsafe: no loan, so nobody knows that the draft's graphs need the released state.
        builder = site.owner()
        super().__init__(
            site.bench.forwards,
            sharing=not site.unsafe,
            device=site.bench.device,
            checks=site.checks,
            target_owner=builder,
            prefill_owner=builder,
        )
        self._eager = EagerRunner(site.bench.forwards, site.owner(), site.owner())
        self._steps_left = site.step
        self._key_of_step: BatchDescriptor | None = None

    def prepare_target(self, batch: AttentionBatch) -> BatchDescriptor:
        self._steps_left -= 1
        if self._steps_left >= 0:
            self._key_of_step = super().prepare_target(batch)
            return self._key_of_step
        if len(self.target):
            self.target.release()
        self._key_of_step = self.prefill.dispatch(
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            uniform_query_len=batch.uniform_query_len,
        )
        return self._eager.prepare_target(batch)

    def run_target(self, key: BatchDescriptor) -> torch.Tensor:
        return super().run_target(key) if len(self.target) else self._eager.run_target(key)

    def run_draft_prefill(self, key: BatchDescriptor, batch: AttentionBatch) -> DraftOutput:
        del batch
        return self.prefill.replay(self._key_of_step or key)


def _released(site: Site) -> Planted:
    return Planted(site.bench.forwards, _Frugal(site))


# spec: the draft is built for other pages.


class _HalvedPages(Forwards):
    """A draft whose kernel is built for pages of half the size."""

    def __init__(self, site: Site) -> None:
        other = site.bench.forwards
        super().__init__(
            other.target_model, other.draft_model, site.bench.engine, site.bench.device
        )

    def draft_prefill(self, key: BatchDescriptor, state: AttentionState) -> DraftOutput:
        metadata: PagedMetadata = state.attn_metadata
        halved = replace(metadata, page_size=self.engine.page_size // 2)
        return super().draft_prefill(key, state._replace(attn_metadata=halved))


class _HalvedOwner(PagedOwner):
    """Builds for pages of half the size, and rightly: each of the cache's pages is two of them."""

    def __init__(self, site: Site) -> None:
        engine = site.bench.engine
        super().__init__(
            replace(engine, page_size=engine.page_size // 2, num_pages=2 * engine.num_pages),
            site.bench.device,
        )

    def build(
        self, key: BatchDescriptor, batch: AttentionBatch | None, phase: Phase
    ) -> AttentionState:
        if batch is not None:
            halves = [
                [half for page in pages for half in (2 * page, 2 * page + 1)]
                for pages in batch.block_table
            ]
            batch = replace(batch, block_table=halves)
        return super().build(key, batch, phase)


def _spec(site: Site) -> Planted:
    forwards = _HalvedPages(site)
    spec = replace(spec_of(forwards), page_size=site.bench.engine.page_size // 2)
    runner = GraphRunner(
        forwards,
        device=site.bench.device,
        prefill_owner=_HalvedOwner(site),
        decode_owner=_HalvedOwner(site),
        prefill_spec=AttentionSpec() if site.unsafe else spec,  # unstated, so not compared
    )
    return Planted(forwards, runner)


PLANTED: dict[str, Callable[[Site], Planted]] = {
    "stale": _stale,
    "moved": _moved,
    "lazy": _lazy,
    "baked": _baked,
    "key": _key,
    "released": _released,
    "spec": _spec,
}
"""By name: makes an engine with the fault; may be refused in doing so."""
