"""One step of speculative decoding, whoever runs the forwards: eagerly or on captured graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan, Request
from graphshare.adapters.toy.forwards import DraftOutput, Forwards
from graphshare.adapters.toy.kernel import ToyOwner
from graphshare.adapters.toy.scheduler import Scheduler, StepOutcome
from graphshare.descriptor import BatchDescriptor
from graphshare.dispatch import Dispatcher
from graphshare.owner import Phase

__all__ = ["EagerRunner", "Runner", "SpeculativeEngine", "StepCounts"]


class Runner(Protocol):
    """Builds states and runs forwards; the engine has written their inputs."""

    def prepare_target(self, batch: AttentionBatch) -> BatchDescriptor:
        """Choose a key for a step and build its state."""
        ...

    def run_target(self, key: BatchDescriptor) -> torch.Tensor:
        """Run the target on the prepared state: :meth:`Forwards.target`."""
        ...

    def run_draft_prefill(self, key: BatchDescriptor, batch: AttentionBatch) -> DraftOutput:
        """Run the draft over the same rows: :meth:`Forwards.draft_prefill`."""
        ...

    def prepare_draft_decode(self, batch: AttentionBatch) -> BatchDescriptor:
        """Choose a key for one row a request and build its state."""
        ...

    def run_draft_decode(self, key: BatchDescriptor) -> DraftOutput:
        """Run the draft on the prepared state: :meth:`Forwards.draft_decode`."""
        ...


class EagerRunner:
    """Runs every forward eagerly.

    Args:
        forwards: The models and their inputs.
        target_owner: Writes the target's states.
        decode_owner: Writes the states of draft decodes.
        prefill_owner: Writes the states of draft prefills; ``None`` to run them on the target's.
        keys: Keys of the target and of draft decodes, to pad batches as graphs captured for them
            would. A kernel whose rounding depends on the batch's shape gives the same bits only
            on the same shapes. By default no batch is padded.
    """

    def __init__(
        self,
        forwards: Forwards,
        target_owner: ToyOwner,
        decode_owner: ToyOwner,
        prefill_owner: ToyOwner | None = None,
        keys: tuple[Sequence[BatchDescriptor], Sequence[BatchDescriptor]] | None = None,
    ) -> None:
        self._forwards = forwards
        self._target_keys, self._decode_keys = map(Dispatcher, keys) if keys else (None, None)
        self._target_owner = target_owner
        self._decode_owner = decode_owner
        self._prefill_owner = prefill_owner
        self._state: Any = None

    @staticmethod
    def _key(batch: AttentionBatch, keys: Dispatcher[BatchDescriptor] | None) -> BatchDescriptor:
        shape = BatchDescriptor(
            num_tokens=batch.num_tokens,
            num_reqs=batch.num_reqs,
            uniform_query_len=batch.uniform_query_len,
        )
        if keys is None:
            return shape
        key = keys.dispatch(shape)
        if key is None:
            raise ValueError(f"keys: none covers {shape}")
        return key

    def prepare_target(self, batch: AttentionBatch) -> BatchDescriptor:
        """Build the target's state."""
        key = self._key(batch, self._target_keys)
        self._state = self._target_owner.build(key, batch, Phase.REPLAY)
        return key

    def run_target(self, key: BatchDescriptor) -> torch.Tensor:
        """Run the target."""
        return self._forwards.target(key, self._state)

    def run_draft_prefill(self, key: BatchDescriptor, batch: AttentionBatch) -> DraftOutput:
        """Run the draft over the target's rows."""
        if self._prefill_owner is not None:
            self._state = self._prefill_owner.build(key, batch, Phase.REPLAY)
        return self._forwards.draft_prefill(key, self._state)

    def prepare_draft_decode(self, batch: AttentionBatch) -> BatchDescriptor:
        """Build the state of a draft decode."""
        key = self._key(batch, self._decode_keys)
        self._state = self._decode_owner.build(key, batch, Phase.REPLAY)
        return key

    def run_draft_decode(self, key: BatchDescriptor) -> DraftOutput:
        """Run the draft on one row a request."""
        return self._forwards.draft_decode(key, self._state)


@dataclass(slots=True)
class StepCounts:
    """What the engine did so far.

    Args:
        steps: Target steps.
        verifications: Requests for which a step produced tokens, summed over steps.
        tokens: Tokens produced.
    """

    steps: int = 0
    verifications: int = 0
    tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a request gets from a step in which it gets any; 1 without a draft."""
        return self.tokens / self.verifications if self.verifications else 0.0


class SpeculativeEngine:
    """Serves requests with K draft tokens a step and greedy verification.

    Args:
        forwards: The models and their inputs.
        runner: Runs them.

    Attributes:
        counts: What was done so far.
    """

    def __init__(self, forwards: Forwards, runner: Runner) -> None:
        self._forwards = forwards
        self._runner = runner
        self._scheduler = Scheduler(forwards.engine)
        self.counts = StepCounts()

    def add(self, request: Request) -> None:
        """Queue a request. Raises: ValueError, as :meth:`Scheduler.add` does."""
        self._scheduler.add(request)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def run(self, requests: Iterable[Request] = ()) -> None:
        """Queue these requests, and step until all are complete."""
        for request in requests:
            self.add(request)
        while self.has_work:
            self.step()

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Run one step: verify, draft anew.

        Returns:
            The requests that ran; none when all are still to arrive.
        """
        batch = self._scheduler.schedule()
        if batch is None:
            return []
        forwards, runner = self._forwards, self._runner
        key = runner.prepare_target(batch.attention)
        forwards.load_target(batch, key.num_tokens)
        greedy = runner.run_target(key).tolist()
        outcome = self._scheduler.complete(batch, greedy)
        self.counts.steps += 1
        self.counts.verifications += len(outcome.num_produced)
        self.counts.tokens += sum(outcome.num_produced)
        # Also when no request wants drafts yet: a prompt's chunk must enter the draft's cache.
        forwards.load_draft_prefill(outcome.next_token_ids, key.num_tokens)
        drafted = runner.run_draft_prefill(key, batch.attention)
        if outcome.drafting:
            self._draft(outcome, forwards.pick_rows(drafted, outcome.last_rows))
        return batch.requests

    def _draft(self, outcome: StepOutcome, first: DraftOutput) -> None:
        """Let the draft feed on itself for the other K - 1 tokens."""
        forwards, runner = self._forwards, self._runner
        requests = outcome.drafting
        drafts = [first.tokens]
        previous = first
        for ahead in range(forwards.engine.num_draft_tokens - 1):
            # The draft prefill filled positions up to num_computed - 1.
            spans = [QuerySpan(r.pages, r.num_computed + ahead, 1) for r in requests]
            batch = AttentionBatch.of(spans, forwards.engine.page_size)
            key = runner.prepare_draft_decode(batch)
            forwards.load_draft_decode(previous, [s.start for s in spans], key.num_tokens)
            output = runner.run_draft_decode(key)
            # A copy: the next replay writes its outputs to the same place.
            previous = DraftOutput(*(part[: len(requests)].clone() for part in output))
            drafts.append(previous.tokens)
        for request, tokens in zip(requests, torch.stack(drafts, dim=1).tolist(), strict=True):
            request.drafts = tokens
