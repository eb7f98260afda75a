"""Which requests run in a step, with which rows; and what a step's tokens mean for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from graphshare.adapters.toy.batch import AttentionBatch, QuerySpan, Request, StepBatch
from graphshare.adapters.toy.cache import PageAllocator
from graphshare.adapters.toy.config import EOS, EngineConfig

__all__ = ["Scheduler", "StepOutcome"]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What verification made of one step.

    Args:
        next_token_ids: For each row of the step the token after it, as the draft prefill wants it;
            0 for rows of rejected drafts.
        drafting: Requests that want new drafts.
        last_rows: For each of them the row of its last valid position.
        num_produced: Tokens produced for each request that produced any.
    """

    next_token_ids: list[int]
    drafting: list[Request]
    last_rows: list[int]
    num_produced: list[int]


class Scheduler:
    """First come, first served; decodes before prefill chunks, under one budget of rows.

    A request reserves its pages when it is admitted, so nothing that runs is ever put back.

    Args:
        engine: Budget, cache and limits.
    """

    def __init__(self, engine: EngineConfig) -> None:
        self._engine = engine
        self._allocator = PageAllocator(engine.num_pages)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self.step = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request; those that arrive in later steps wait without blocking others.

        Raises:
            ValueError: For an empty prompt, no token to produce, or more tokens than the cache
                holds for one request.
        """
        if not request.prompt:
            raise ValueError(f"request {request.request_id}: the prompt is empty")
        if request.max_new_tokens < 1:
            raise ValueError(
                f"request {request.request_id}: max_new_tokens: expected at least 1, "
                f"got {request.max_new_tokens}"
            )
        if self._length(request) > self._engine.max_model_len:
            raise ValueError(
                f"request {request.request_id}: a prompt of {len(request.prompt)} tokens and "
                f"{request.max_new_tokens} new ones do not fit the cache: expected at most "
                f"{self._engine.max_model_len - self._engine.num_draft_tokens} together"
            )
        self._waiting.append(request)

    def _length(self, request: Request) -> int:
        # A verification step writes K rows past the last token, and may be thrown away.
        return len(request.prompt) + request.max_new_tokens + self._engine.num_draft_tokens

    def _admit(self) -> None:
        for request in [r for r in self._waiting if r.arrival <= self.step]:
            if len(self._running) == self._engine.max_num_reqs:
                return
            pages = self._allocator.allocate(-(-self._length(request) // self._engine.page_size))
            if pages is None:
                return
            request.pages = pages
            self._waiting.remove(request)
            self._running.append(request)

    def schedule(self) -> StepBatch | None:
        """Choose the rows of the next step, or ``None`` when nothing has arrived yet."""
        self._admit()
        self.step += 1
        budget = self._engine.max_num_tokens
        batch_requests: list[Request] = []
        num_pending: list[int] = []
        spans: list[QuerySpan] = []
        token_ids: list[int] = []
        # Stable: requests with drafts first, each group in order of admission.
        for request in sorted(self._running, key=lambda r: not r.drafts):
            pending = request.tokens[request.num_computed :][:budget]
            if not pending:
                break
            rows = pending + request.drafts
            budget -= len(rows)
            batch_requests.append(request)
            num_pending.append(len(pending))
            spans.append(QuerySpan(request.pages, request.num_computed, len(rows)))
            token_ids += rows
        if not batch_requests:
            return None
        return StepBatch(
            requests=batch_requests,
            num_pending=num_pending,
            token_ids=token_ids,
            positions=[p for s in spans for p in range(s.start, s.start + s.query_len)],
            attention=AttentionBatch.of(spans, self._engine.page_size),
        )

    def complete(self, batch: StepBatch, greedy: list[int]) -> StepOutcome:
        """Accept drafts that the target would have produced itself, and its own next token.

        Args:
            batch: What ran.
            greedy: The target's next token after each row.

        Returns:
            What the draft runs on next.
        """
        outcome = StepOutcome([], [], [], [])
        starts = batch.attention.query_start_loc
        for index, request in enumerate(batch.requests):
            first, after = starts[index], starts[index + 1]
            last = first + batch.num_pending[index] - 1
            before = request.num_computed
            drafts, request.drafts = request.drafts, []
            request.num_computed += batch.num_pending[index]
            if request.num_computed == len(request.tokens):
                accepted = 0
                while accepted < len(drafts) and drafts[accepted] == greedy[last + accepted]:
                    accepted += 1
                request.num_computed += accepted
                produced = self._produce(request, greedy[last : last + accepted + 1])
                outcome.num_produced.append(produced)
                if not request.finished:
                    outcome.drafting.append(request)
                    outcome.last_rows.append(last + accepted)
            following = request.tokens[before + 1 : before + 1 + after - first]
            outcome.next_token_ids.extend(following + [0] * (after - first - len(following)))
        self._running = [request for request in self._running if not request.finished]
        return outcome

    def _produce(self, request: Request, tokens: list[int]) -> int:
        room = request.max_new_tokens - len(request.output)
        tokens = tokens[:room]
        if EOS in tokens:
            tokens = tokens[: tokens.index(EOS) + 1]
        request.tokens += tokens
        if tokens[-1] == EOS or len(tokens) == room:
            request.finished = True
            self._allocator.release(request.pages)
        return len(tokens)
