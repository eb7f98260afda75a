"""What runs in one step, as plain integers on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from graphshare.adapters.toy.cache import SCRATCH_PAGE

__all__ = ["AttentionBatch", "QuerySpan", "Request", "StepBatch"]


@dataclass(slots=True, eq=False)
class Request:
    """One text in flight.

    Args:
        request_id: Chosen by the caller, unique.
        prompt: Tokens to continue, at least one.
        max_new_tokens: Tokens to produce at most.
        arrival: First step in which it may run.

    Attributes:
        tokens: The prompt and what was produced.
        drafts: Tokens that the draft proposes to follow ``tokens``.
        num_computed: Leading tokens whose keys and values are in the cache.
        pages: Pages it holds, for its full length.
        finished: Whether it is complete.
    """

    request_id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival: int = 0
    tokens: list[int] = field(init=False)
    drafts: list[int] = field(init=False, default_factory=list)
    num_computed: int = field(init=False, default=0)
    pages: list[int] = field(init=False, default_factory=list)
    finished: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """Tokens produced so far."""
        return self.tokens[len(self.prompt) :]


class QuerySpan(NamedTuple):
    """The rows of one request in a step.

    Args:
        pages: Pages of the request.
        start: Position of the first row.
        query_len: Rows.
    """

    pages: Sequence[int]
    start: int
    query_len: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What an owner of attention states is given for a step.

    Args:
        query_start_loc: First row of each request, and the number of rows: ``num_reqs + 1``.
        seq_lens: Tokens in the cache after the step, for each request.
        block_table: Pages of each request; rows differ in length.
        slot_mapping: Slot of each row.
    """

    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: list[Sequence[int]]
    slot_mapping: list[int]

    @classmethod
    def of(cls, spans: Iterable[QuerySpan], page_size: int) -> AttentionBatch:
        """Lay out the rows of several requests one after the other."""
        batch = cls([0], [], [], [])
        for span in spans:
            end = span.start + span.query_len
            batch.query_start_loc.append(batch.query_start_loc[-1] + span.query_len)
            batch.seq_lens.append(end)
            batch.block_table.append(span.pages)
            batch.slot_mapping.extend(
                span.pages[position // page_size] * page_size + position % page_size
                for position in range(span.start, end)
            )
        return batch

    @classmethod
    def dummy(cls, query_lens: Iterable[int], page_size: int) -> AttentionBatch:
        """Lay out requests that live in the scratch page alone, for warmups and captures."""
        return cls.of(
            (QuerySpan([SCRATCH_PAGE] * -(-n // page_size), 0, n) for n in query_lens), page_size
        )

    @property
    def num_tokens(self) -> int:
        """Rows."""
        return self.query_start_loc[-1]

    @property
    def num_reqs(self) -> int:
        """Requests."""
        return len(self.seq_lens)

    @property
    def query_lens(self) -> list[int]:
        """Rows of each request."""
        starts = self.query_start_loc
        return [after - start for start, after in pairwise(starts)]

    @property
    def uniform_query_len(self) -> int | None:
        """Rows of every request, if all have the same."""
        lens = set(self.query_lens)
        return lens.pop() if len(lens) == 1 else None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step of the target.

    Args:
        requests: In the order of their rows.
        num_pending: Rows of each request that hold known tokens; the rows after them hold drafts.
        token_ids: Of each row.
        positions: Of each row.
        attention: The same rows, as attention sees them.
    """

    requests: list[Request]
    num_pending: list[int]
    token_ids: list[int]
    positions: list[int]
    attention: AttentionBatch
