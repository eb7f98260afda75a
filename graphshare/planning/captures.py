"""Which descriptors to capture for a trace, and what a set of them comes to."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from graphshare.arguments import check_flag, distinct_keys, number, whole_number, wrong_type
from graphshare.descriptor import BatchDescriptor
from graphshare.dispatch import Dispatcher
from graphshare.plan_file import write_plan_file
from graphshare.planning.arguments import check_trace, lengths_of, limit_of, work_of
from graphshare.planning.chain import Chain, flat
from graphshare.planning.coupled import Coupled
from graphshare.planning.search import Part, TooTightError, corners, search
from graphshare.planning.trace import Trace
from graphshare.planning.work import Limit, Work

__all__ = [
    "Outcome",
    "Plan",
    "TooTightError",
    "evaluate",
    "frontier",
    "plan_captures",
    "write_plan",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a set of keys serves a trace.

    Attributes:
        graphs: Number of keys.
        work: What the steps that run on them cost, by :class:`Work`.
        tokens: Tokens of these steps, without padding.
        padded_tokens: Likewise, with padding.
        steps: Number of steps that run on a key.
        eager: Number of steps that do not, by reason: ``"num_tokens"`` and ``"num_reqs"`` for
            those beyond the trace's limits, ``"not_covered"`` for those that no key covers.
        eager_tokens: Their tokens.
        eager_work: What those that are not covered cost, by :class:`Work`; those beyond the
            trace's limits are the same whatever the keys, and left out.
        hits: Steps on each key.
    """

    graphs: int
    work: float
    tokens: int
    padded_tokens: int
    steps: int
    eager: Mapping[str, int]
    eager_tokens: int
    eager_work: float
    hits: Mapping[BatchDescriptor, int]

    @property
    def all_work(self) -> float:
        """What all steps within the trace's limits cost, on a key or not."""
        return self.work + self.eager_work

    @property
    def coverage(self) -> float:
        """The share of steps that run on a key."""
        all_steps = self.steps + sum(self.eager.values())
        return self.steps / all_steps if all_steps else 1.0

    @property
    def padding(self) -> float:
        """Tokens of padding for each token of a step that runs on a key."""
        return self.padded_tokens / self.tokens - 1 if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The best set of keys.

    Attributes:
        keys: The descriptors to capture, the costliest first.
        outcome: How they serve the trace.
        taken: What they take of the limit.
        limit: The limit.
        work: What steps cost.
        max_num_reqs: The most requests of a key.
    """

    keys: tuple[BatchDescriptor, ...]
    outcome: Outcome
    taken: float
    limit: Limit
    work: Work
    max_num_reqs: int


def plan_captures(
    trace: Trace,
    limit: Limit | int,
    *,
    work: Work | None = None,
    uniform_query_lens: Iterable[int] = (),
    mixed: bool = True,
) -> Plan:
    """The set of descriptors on which the steps of a trace cost least, within a limit.

    Every step of the trace's ``bins`` is covered. The keys are those that
    :func:`graphshare.capture_descriptors` makes: a mixed key has as many requests as its tokens or
    the trace's ``max_num_reqs`` allow, a uniform key as many as its length allows. Steps run on the
    key that :meth:`graphshare.GraphPool.dispatch` chooses. Of all sets of such keys none does less
    work: the search is exact, as far as floating point numbers are.

    Args:
        trace: The batches.
        limit: Of graphs, or of what they take.
        work: What a step costs; by default its key's tokens.
        uniform_query_lens: Query lengths that may have keys of their own.
        mixed: Whether there may be keys for any query lengths. Without them, batches whose query
            length is not in ``uniform_query_lens`` run eagerly.

    Raises:
        TooTightError: The limit is below what the smallest set takes that covers all batches.
        TypeError: An argument is of another type.
        ValueError: A uniform query length below 1, or nothing may be captured.

    Example:
        >>> from graphshare.planning import Batch, count_batches, plan_captures
        >>> trace = count_batches([Batch(3, 3, steps=90), Batch(5, 5, steps=9), Batch(8, 8)])
        >>> for key in plan_captures(trace, 2).keys:
        ...     print(key)
        BatchDescriptor(num_tokens=8, num_reqs=8)
        BatchDescriptor(num_tokens=3, num_reqs=3)
    """
    check_trace(trace)
    work, limit = work_of(work), limit_of(limit)
    parts = _all_parts(trace, uniform_query_lens, mixed, work, limit)
    try:
        choice = search(parts, limit.total - limit.once if parts else math.inf)
    except TooTightError as error:
        raise TooTightError(error.least + limit.once) from None
    return _plan(choice.keys, trace, limit, work)


def frontier(
    trace: Trace,
    limit: Limit | None = None,
    *,
    work: Work | None = None,
    uniform_query_lens: Iterable[int] = (),
    mixed: bool = True,
    points: int = 16,
) -> list[Plan]:
    """Plans from the smallest that covers all batches to the one without padding.

    Each is the best for what it takes. They are the corners of the convex hull of all best plans,
    or as many as are asked for, spread out.

    Args:
        trace: The batches.
        limit: What graphs take; its ``total`` has no effect.
        work: As in :func:`plan_captures`.
        uniform_query_lens: As in :func:`plan_captures`.
        mixed: As in :func:`plan_captures`.
        points: How many plans, at most; at least the first and the last, so from 2.

    Raises:
        TypeError: As :func:`plan_captures` does.
        ValueError: As :func:`plan_captures` does, or fewer than 2 points.
    """
    check_trace(trace)
    work, limit = work_of(work), limit_of(0 if limit is None else limit)
    points = whole_number("points", points, 2)
    parts = _all_parts(trace, uniform_query_lens, mixed, work, limit)
    return [_plan(choice.keys, trace, limit, work) for choice in corners(parts, points)]


def graphs_to_match(
    trace: Trace, all_work: float, *, most: int, work: Work | None = None
) -> int | None:
    """The fewest mixed keys on which all steps cost no more than so much.

    Args:
        trace: The batches.
        all_work: As in :attr:`Outcome.all_work`.
        most: The most keys to think of.
        work: What a step costs; by default its key's tokens.

    Returns:
        The number; ``None`` if not even ``most`` do.

    Raises:
        TypeError: An argument is of another type.
        ValueError: ``most`` is below 1, or the work is not finite.
    """
    check_trace(trace)
    all_work, most = number("all_work", all_work), whole_number("most", most, 1)

    def costs_at_most(graphs: int) -> bool:
        try:
            return plan_captures(trace, graphs, work=work).outcome.all_work <= all_work
        except TooTightError:
            return False

    if not costs_at_most(most):
        return None
    too_few = 0
    while most - too_few > 1:
        middle = (too_few + most) // 2
        if costs_at_most(middle):
            most = middle
        else:
            too_few = middle
    return most


def _plan(keys: object, trace: Trace, limit: Limit, work: Work) -> Plan:
    ordered = tuple(sorted(flat(keys), key=BatchDescriptor.cost, reverse=True))
    outcome = evaluate(ordered, trace, work)
    return Plan(ordered, outcome, limit.taken(ordered), limit, work, trace.max_num_reqs)


def evaluate(keys: Sequence[BatchDescriptor], trace: Trace, work: Work | None = None) -> Outcome:
    """How a set of keys serves a trace, by the dispatch that a pool would use.

    Args:
        keys: Descriptors of one type.
        trace: The batches.
        work: What a step costs; by default its key's tokens.

    Raises:
        TypeError: An argument is of another type, a key is no descriptor, or keys are of several
            types.
        ValueError: A key is given twice.
    """
    check_trace(trace)
    work, keys = work_of(work), distinct_keys("keys", keys)
    for key in keys:
        if not isinstance(key, BatchDescriptor):
            raise wrong_type("keys", "each a BatchDescriptor", key)
    dispatcher = Dispatcher(keys)
    hits = dict.fromkeys(keys, 0)
    done: float = 0
    eager_work: float = 0
    steps = tokens = padded = uncovered = 0
    for (size, query_len, loras), count in trace.bins.items():
        key = dispatcher.dispatch(
            num_tokens=size,
            # Where lengths differ there may be up to this many, and a key serves all or none.
            num_reqs=min(size, trace.max_num_reqs) if query_len is None else size // query_len,
            uniform_query_len=query_len,
            max_query_len=query_len,
            num_active_loras=loras,
        )
        if key is None:
            uncovered += count
            eager_work += (size + work.per_step) * count
            continue
        hits[key] += count
        steps += count
        tokens += size * count
        padded += key.num_tokens * count
        done += work.on_key(key) * count
    eager = dict(trace.eager)
    if uncovered:
        eager["not_covered"] = uncovered
    return Outcome(
        graphs=len(keys),
        work=done,
        tokens=tokens,
        padded_tokens=padded,
        steps=steps,
        eager=MappingProxyType(eager),
        eager_tokens=trace.eager_tokens + trace.tokens - tokens,
        eager_work=eager_work,
        hits=MappingProxyType(hits),
    )


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a file that ``capture_descriptors(plan=path)`` reads; as a whole or not.

    Args:
        plan: The plan.
        path: The file; one that is there is replaced.

    Raises:
        TypeError: What is no plan, or no path.
        OSError: It cannot be written.
    """
    if not isinstance(plan, Plan):
        raise wrong_type("write_plan: plan", "a Plan", plan, "plan_captures makes one.")
    if not isinstance(path, (str, os.PathLike)):
        raise wrong_type("write_plan: path", "the path of a file", path)
    outcome, limit = plan.outcome, plan.limit
    facts = {
        "max_num_reqs": plan.max_num_reqs,
        "limit": {"total": limit.total, "taken": plan.taken, "unit": limit.unit},
        "expected": {
            "work": outcome.work,
            "tokens": outcome.tokens,
            "padded_tokens": outcome.padded_tokens,
            "steps": outcome.steps,
            "eager": dict(outcome.eager),
        },
    }
    keys = [
        {
            "num_tokens": key.num_tokens,
            "num_reqs": key.num_reqs,
            "uniform_query_len": key.uniform_query_len,
            "num_active_loras": key.num_active_loras,
        }
        for key in plan.keys
    ]
    write_plan_file(path, keys, facts)


def _all_parts(
    trace: Trace, uniform_query_lens: Iterable[int], mixed: bool, work: Work, limit: Limit
) -> list[Part]:
    lengths = lengths_of(uniform_query_lens)
    check_flag("mixed", mixed)
    # Every step costs so much on whatever key, so it chooses none, and would only be lost in sums.
    work = replace(work, per_step=0)
    if not mixed and not lengths:
        raise ValueError("uniform_query_lens: expected a length where mixed is False, got none")
    return [
        part
        for loras in trace.num_active_loras
        for part in _parts(trace, loras, lengths, mixed, work, limit)
    ]


def _parts(
    trace: Trace, loras: int, lengths: list[int], mixed: bool, work: Work, limit: Limit
) -> list[Part]:
    """What is to be covered for one number of LoRA adapters, as problems of their own."""
    any_length: dict[int, int] = {}
    by_length: dict[int, dict[int, int]] = {}
    # At equal cost a mixed key replaces a uniform one of its size, so none of those is needed.
    own = set(lengths) if work.mixed_per_step or not mixed else set[int]()
    for (size, query_len, bin_loras), count in trace.bins.items():
        if bin_loras == loras:
            into = by_length.setdefault(query_len, {}) if query_len in own else any_length
            into[size] = into.get(size, 0) + count
    uniform = [
        Chain(
            sizes,
            partial(work.on, uniform=True),
            limit.of,
            partial(_uniform_key, length, loras),
        )
        for length, sizes in by_length.items()
    ]
    if not mixed:
        return list[Part](uniform)
    mixed_work = partial(work.on, uniform=False)
    key = partial(_mixed_key, trace.max_num_reqs, loras)
    if not uniform:
        return [Chain(any_length, mixed_work, limit.of, key)]
    return [Coupled(any_length, uniform, mixed_work, limit.of, key)]


def _mixed_key(max_num_reqs: int, loras: int, size: int) -> BatchDescriptor:
    return BatchDescriptor(size, min(size, max_num_reqs), num_active_loras=loras)


def _uniform_key(length: int, loras: int, size: int) -> BatchDescriptor:
    return BatchDescriptor(size, size // length, length, num_active_loras=loras)
