"""Lets graphs that were captured on a pool's own buffers replay on a lender's."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from graphshare.capture import InspectableGraph
from graphshare.capture.moves import Moves, SplitError
from graphshare.capture.patching import Patch
from graphshare.core import PoolCore
from graphshare.entry import Entry, apply_views
from graphshare.errors import GraphShareError, RebindError
from graphshare.freshness import StateRecord
from graphshare.holdings import Source
from graphshare.loan import Loan
from graphshare.memory import MemoryRanges
from graphshare.provenance.finding import argument, readable_graph
from graphshare.provenance.rebinding import outputs_of
from graphshare.provenance.refusing import check_no_capture
from graphshare.state import (
    LayoutChecker,
    LayoutDifference,
    compare,
    layout_of,
    walk,
    with_tensors,
)

__all__ = ["Adoption", "plan_adoption"]


@dataclass(slots=True)
class _Planned:
    entry: Entry[Any]
    source: Source
    record: StateRecord
    patch: Patch
    outputs: Any
    graph_outputs: Any
    view_checker: LayoutChecker | None


class Adoption:
    """What adopting changes, worked out beforehand.

    Args:
        consumer: The pool whose graphs it is about.
        planned: One for each key.
    """

    def __init__(self, consumer: PoolCore[Any], planned: list[_Planned]) -> None:
        self._consumer = consumer
        self._planned = planned

    def apply(self) -> None:
        """Put the graphs on the lender's buffers, and the keys on its states; all or none.

        Raises:
            RebindError: A node cannot be changed.
        """
        refuse = self._consumer.refuse
        with contextlib.ExitStack() as undo:
            for each in self._planned:
                try:
                    each.patch.apply()
                except GraphShareError as error:
                    raise refuse.of(error, each.entry.key) from error
                undo.callback(each.patch.revert)
            undo.pop_all()
        adopted: list[Entry[Any]] = []
        for each in self._planned:
            old = each.entry
            if old.graph is not None:
                old.graph.outputs = each.graph_outputs
            adopted.append(
                Entry(
                    key=old.key,
                    owner_key=each.source.owner_key,
                    record=each.record,
                    views=each.source.views,
                    borrowed=True,
                    view_checker=each.view_checker,
                    launch=old.bare_launch,
                    outputs=each.outputs,
                    graph=old.graph,
                    release_graph=old.release_graph,
                    nbytes=old.nbytes,
                    writes_state=old.writes_state,
                    forward=old.forward,
                )
            )
            old.release_graph = None  # the graph goes on in the new entry
        self._consumer.register(adopted)
        self._consumer.tally.captures -= len(adopted)


def plan_adoption(consumer: PoolCore[Any], loan: Loan) -> Adoption:
    """Work out how the held keys of a pool come onto a lender's states.

    Args:
        consumer: The pool; not yet on the loan.
        loan: The loan.

    Raises:
        KeyMismatchError: The lender has no state for a key.
        ReleasedStateError: The lender's state was released.
        ProvenanceError: A graph cannot be read.
        RebindError: A state does not correspond to the lender's, or a graph reads more of its own
            owner's buffers than its state.
    """
    check_no_capture(consumer, "share_states(adopt=True)")
    entries = [
        entry
        for entry in consumer.holdings.entries.values()
        if consumer.holdings.holds(entry.key) and loan.lends(entry.key)
    ]
    sources = {id(entry): loan.source(entry.key, consumer.refuse) for entry in entries}
    missing: list[Hashable] = [entry.key for entry in entries if sources[id(entry)] is None]
    if missing:
        raise loan.no_state(missing, consumer.refuse)
    planned: list[_Planned] = []
    for entry in entries:
        source = sources[id(entry)]
        if source is not None and source.record is not None:
            planned.append(_plan(consumer, entry, source, source.record))
    return Adoption(consumer, planned)


def _plan(
    consumer: PoolCore[Any], entry: Entry[Any], source: Source, record: StateRecord
) -> _Planned:
    refuse, device, lender = consumer.refuse, consumer.device, record.pool_name
    graph = readable_graph(entry, refuse, "share_states(adopt=True)")
    for each in (record, entry.record):
        _check_in_place(consumer, entry, each)
    rules = getattr(record.book.owner, "host_values", None)
    exact = {path: "equal" if rule == "at_most" else rule for path, rule in (rules or {}).items()}
    theirs = apply_views(source.views, record.captured)
    mine = apply_views(entry.views, entry.record.captured)
    # The consumer's graphs have its own bound baked in, and the lender's batches go up to the
    # lender's: they must be the same.
    expected, got = layout_of(theirs, device, exact), layout_of(mine, device, exact)
    for each in compare(expected, got):
        if each.field != "address":
            raise _different(consumer, entry, each, f"differs from {lender}'s")
    paths = {leaf.path for leaf in expected.tensors}
    try:
        pairs = _pairs(consumer, entry, mine, theirs, paths)
        moves = Moves(pairs, shared_ok=True)
        if device.type == "cuda" and moves.misaligned():
            old, new = moves.misaligned()[0]
            raise _refused(
                consumer,
                entry,
                f"{lender}'s buffers are less aligned",
                f"an address aligned as {old.data_ptr():#x} is, to at most 256 bytes",
                f"{new.data_ptr():#x}",
            )
        stays = MemoryRanges.of(own for own, other in pairs if own.data_ptr() == other.data_ptr())
        _check_rest(consumer, entry, graph, moves, stays)
        patch = graph.patch(moves)
        outputs = with_tensors(entry.outputs, moves.tensor)
        graph_outputs = outputs_of(graph, entry, outputs, moves)
    except SplitError as error:
        raise _refused(
            consumer, entry, "parts of the state overlap", "leaves apart", str(error)
        ) from None
    except GraphShareError as error:
        raise refuse.of(error, entry.key) from error
    checker = LayoutChecker(theirs, device, rules) if source.views else None
    return _Planned(entry, source, record, patch, outputs, graph_outputs, checker)


def _check_in_place(consumer: PoolCore[Any], entry: Entry[Any], record: StateRecord) -> None:
    """Refuse a state whose owner has put other memory into the very objects that were captured.

    Their addresses are not those that graphs bake in, whatever becomes of the next refresh.
    """
    doing = "share_states(adopt=True)"
    for each in consumer.differences(record, entry.key, record.captured, doing):
        raise _different(consumer, entry, each, f"in {record.pool_name}'s state is not as captured")


def _different(
    consumer: PoolCore[Any], entry: Entry[Any], each: LayoutDifference, how: str
) -> RebindError:
    path = each.path or "(the state itself)"
    return _refused(
        consumer,
        entry,
        f"{each.field} of {path} {how}",
        str(each.expected),
        str(each.got),
        path=each.path,
    )


def _pairs(
    consumer: PoolCore[Any], entry: Entry[Any], mine: Any, theirs: Any, paths: set[str]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return own tensor and lender's tensor for each leaf, without those within others."""
    others = {path: value for path, value in walk(theirs) if path in paths}
    by_range: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    for path, own in walk(mine):
        other = others.get(path)
        if not isinstance(own, torch.Tensor) or other is None or not own.numel():
            continue
        place = (own.data_ptr(), own.element_size(), *own.shape, *own.stride())
        known = by_range.setdefault(place, (own, other))
        if known[1].data_ptr() != other.data_ptr():
            raise _refused(
                consumer,
                entry,
                f"one tensor is to become two at {path}",
                f"{known[1].data_ptr():#x}, as at another path",
                f"{other.data_ptr():#x}",
                path=path,
            )
    kept: list[tuple[torch.Tensor, torch.Tensor, MemoryRanges]] = []
    for own, other in sorted(by_range.values(), key=lambda pair: -pair[0].nbytes):
        ranges = MemoryRanges.of([own])
        by = other.data_ptr() - own.data_ptr()
        if not any(
            bigger.contains(ranges) and by == into.data_ptr() - of.data_ptr()
            for of, into, bigger in kept
        ):
            kept.append((own, other, ranges))
    for number, (_, _, ranges) in enumerate(kept):
        if any(ranges.overlaps(earlier) for _, _, earlier in kept[:number]):
            raise SplitError("two leaves share memory, and the lender's do not in the same way")
    return [(own, other) for own, other, _ in kept]


def _check_rest(
    consumer: PoolCore[Any],
    entry: Entry[Any],
    graph: InspectableGraph,
    moves: Moves,
    stays: MemoryRanges,
) -> None:
    """Refuse a graph that reads buffers of its own owner which are not in its state.

    Args:
        consumer: The pool.
        entry: The key.
        graph: Its graph.
        moves: Where its state goes.
        stays: What of its state is the lender's already.
    """
    own = entry.record.book.footprint().union(entry.record.footprint(entry.owner_key))
    for node in graph.read().nodes:
        for word in node.words:
            byte = MemoryRanges((word.address,), (word.address + 1,), own.device)
            known = moves.pair_at(word.address) is not None or stays.contains(byte)
            if own.contains(byte) and not known:
                named = f"{node.number}: {node.name}"
                raise _refused(
                    consumer,
                    entry,
                    f"node {named} reads a buffer that is not in the state",
                    "its own owner's buffers through the state alone",
                    f"{word.address:#x} ({argument(node.kind, word.where)})",
                    node=named,
                )


def _refused(
    consumer: PoolCore[Any],
    entry: Entry[Any],
    what: str,
    expected: str,
    got: str,
    *,
    path: str = "",
    node: str = "",
) -> RebindError:
    return consumer.refuse.counted(
        RebindError(
            f"{consumer.name}: share_states(adopt=True): {what}",
            expected=expected,
            got=got,
            key=entry.key,
            consequence="The graph cannot be put on the lender's buffers",
            remedy="Narrow the lender's state with view=..., leave the key out with when=..., or "
            "capture the consumer on the loan",
            keys=(entry.key,),
            path=path,
            node=node,
        )
    )
