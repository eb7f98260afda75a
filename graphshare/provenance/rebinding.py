"""Puts captured graphs, and all that is known of their states, on other memory."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch

from graphshare.capture._collection import no_collection
from graphshare.capture.moves import Moves, SplitError
from graphshare.capture.patching import Patch, Steps
from graphshare.core import PoolCore
from graphshare.entry import Entry
from graphshare.errors import GraphShareError
from graphshare.freshness import StateRecord
from graphshare.memory import MemoryRanges
from graphshare.provenance.family import Member, family_of
from graphshare.provenance.finding import readable_graph
from graphshare.provenance.labels import moved_labels
from graphshare.provenance.refusing import (
    check_bystanders,
    check_in_place,
    check_moves,
    check_no_capture,
    check_used,
    check_whole,
    part_of,
)
from graphshare.relocation import Relocation, relocation_of
from graphshare.state import LayoutChecker, with_tensors

__all__ = ["Rebinding", "rebind"]


@dataclass(frozen=True, slots=True)
class Rebinding:
    """What a rebind changed.

    Attributes:
        graphs: Pool and key of each graph that changed.
        states: Pool and key of each state that moved, and is stale.
        nodes: Nodes that changed, in all graphs.
        addresses: Addresses that changed, in all nodes.
    """

    graphs: tuple[tuple[str, Hashable], ...]
    states: tuple[tuple[str, Hashable], ...]
    nodes: int
    addresses: int


_NOT_SET = object()


@dataclass(slots=True)
class _Planned:
    """One graph on other memory, worked out beforehand."""

    member: Member
    entry: Entry[Any]
    patch: Patch
    pairs: AbstractSet[int]
    outputs: Any
    graph_outputs: Any
    view_checker: LayoutChecker | None


def rebind(
    pools: Sequence[PoolCore[Any]],
    moves: Moves,
    *,
    keys: Iterable[Hashable] | None,
    unused_ok: bool,
) -> Rebinding:
    """Put the graphs of some pools and of their families on other memory; all or none.

    Args:
        pools: At least one, on one device.
        moves: What goes where.
        keys: Of the first pool: the keys to move; ``None`` for all keys of all pools.
        unused_ok: Whether an old tensor may be in no graph and no state.

    Raises:
        KeyMismatchError: A key is not captured.
        ReleasedStateError: A pool is closed.
        ProvenanceError: A graph cannot be read.
        RebindError: It cannot be done.
    """
    first = pools[0]
    with no_collection():  # thousands of small objects, none of them in a cycle
        return _rebind(first, pools, moves, keys, unused_ok=unused_ok)


def _rebind(
    first: PoolCore[Any],
    pools: Sequence[PoolCore[Any]],
    moves: Moves,
    keys: Iterable[Hashable] | None,
    *,
    unused_ok: bool,
) -> Rebinding:
    refuse = first.refuse
    check_moves(pools, moves, refuse)
    check_no_capture(first, "rebind")
    family = family_of(pools)
    chosen = _chosen(first, family, keys)
    records = {id(entry.record): entry.record for _, entry in chosen}
    check_in_place(refuse, records.values(), moves)
    try:
        moved = _moved_states(first, records.values(), moves)
        if keys is not None:
            check_whole(first, family, chosen, moved)
        check_bystanders(first, family, moves)
        planned = [
            _plan(first, member, entry, moves, moved.get(id(entry.record)))
            for member, entry in chosen
        ]
        declared = _redeclared(records.values(), moves)
        named = {id(entry) for _, entry in chosen}
        labels = [
            moved_labels(member, (e for e in member.entries() if id(e) not in named), moves)
            for member in family
        ]
        if not unused_ok:
            used = {pair for each in planned for pair in each.pairs}
            check_used(first, used, records.values(), moves)
    except SplitError as error:
        raise part_of(refuse, error) from None
    _apply_all(planned)
    # From here on nothing can fail.
    by = (first.name, None)
    for record, each in declared:
        record.redeclare(each)
    for each in moved.values():
        each.commit(by)
    for each in planned:
        each.entry.put(each.entry.launch, each.outputs)
        if each.entry.graph is not None and each.graph_outputs is not _NOT_SET:
            each.entry.graph.outputs = each.graph_outputs
        if each.view_checker is not None:
            each.entry.view_checker = each.view_checker
    for member, named in zip(family, labels, strict=True):
        member.holdings.named = named
    changed = [each for each in planned if each.patch.nodes]
    return Rebinding(
        tuple((each.member.name, each.entry.key) for each in changed),
        tuple((each.record.pool_name, each.record.key) for each in moved.values() if each.states),
        sum(each.patch.nodes for each in planned),
        sum(each.patch.words for each in planned),
    )


def _chosen(
    pool: PoolCore[Any], family: Sequence[Member], keys: Iterable[Hashable] | None
) -> list[tuple[Member, Entry[Any]]]:
    everything = [(member, entry) for member in family for entry in member.entries()]
    if keys is None:
        return everything
    asked = {id(pool.lookup(key, "rebind")) for key in keys}
    records = {id(entry.record) for _, entry in everything if id(entry) in asked}
    # Who else replays on the same state moves with it.
    return [
        (member, entry)
        for member, entry in everything
        if id(entry) in asked
        or (id(entry.record) in records and member.holdings is not pool.holdings)
    ]


def _moved_states(
    pool: PoolCore[Any], records: Iterable[StateRecord], moves: Moves
) -> dict[int, Relocation]:
    found: dict[int, Relocation] = {}
    for record in records:
        try:
            moved = relocation_of(record, moves)
        except SplitError as error:
            raise part_of(pool.refuse, error, record) from None
        if moved is not None:
            found[id(record)] = moved
    return found


def _plan(
    pool: PoolCore[Any], member: Member, entry: Entry[Any], moves: Moves, moved: Relocation | None
) -> _Planned:
    refuse = member.holdings.refuse
    pairs: set[int] = set()

    def replaced(tensor: torch.Tensor) -> torch.Tensor | None:
        other = moves.tensor(tensor)
        if other is not None:
            pairs.add(moves.pair_of(tensor))
        return other

    try:
        outputs = with_tensors(entry.outputs, replaced)
        try:
            graph = readable_graph(entry, refuse, "rebind")
            patch = graph.patch(moves)
            graph_outputs = outputs_of(graph, entry, outputs, moves)
        except (GraphShareError, SplitError, TypeError):
            if not entry.lease.ended:
                raise
            # Nobody may replay it. It is changed only so as not to keep the old memory alive.
            patch, graph_outputs = Steps((), frozenset()), _NOT_SET
    except SplitError as error:
        raise part_of(pool.refuse, error, entry.record, entry.key) from None
    except GraphShareError as error:
        raise refuse.of(error, entry.key) from error
    checker = None
    if entry.view_checker is not None and moved is not None and moved.states is not None:
        checker = entry.view_checker.moved(moves.shift.address)
    return _Planned(member, entry, patch, pairs.union(patch.pairs), outputs, graph_outputs, checker)


def outputs_of(graph: Any, entry: Entry[Any], outputs: Any, moves: Moves) -> Any:
    """Return what a graph's own ``outputs`` are on other memory.

    Raises:
        TypeError: They cannot be set; found out before anything has changed.
    """
    try:
        held = graph.outputs
        graph.outputs = held
    except AttributeError as error:
        raise TypeError(
            f"commit(graph=...): expected a graph whose outputs can be set, got a "
            f"{type(graph).__name__} (key {entry.key}). Moved outputs have to be put there."
        ) from error
    return outputs if held is entry.outputs else with_tensors(held, moves.tensor)


def _redeclared(
    records: Iterable[StateRecord], moves: Moves
) -> list[tuple[StateRecord, dict[Hashable, MemoryRanges]]]:
    """Return the other states of the owners concerned, whose builds may write where it went.

    Whether they will is not known before they are built: they may write in both places.
    """
    ours = {id(record): record for record in records}
    books = {id(record.book): record.book for record in ours.values()}
    found: list[tuple[StateRecord, dict[Hashable, MemoryRanges]]] = []
    for book in books.values():
        for record in book.records():
            if id(record) in ours:
                continue
            before = record.declared()
            after = {key: each.union(moves.memory(each)) for key, each in before.items()}
            if after != before:
                found.append((record, after))
    return found


def _apply_all(planned: Sequence[_Planned]) -> None:
    with contextlib.ExitStack() as undo:
        for each in planned:
            try:
                each.patch.apply()
            except GraphShareError as error:
                raise each.member.holdings.refuse.of(error, each.entry.key) from error
            undo.callback(each.patch.revert)
        undo.pop_all()
