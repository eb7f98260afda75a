"""Puts captured graphs, and all that is known of their states, on other memory."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphshare.capture._collection import no_collection
from graphshare.capture.moves import Moves, SplitError
from graphshare.capture.patching import Patch
from graphshare.core import PoolCore
from graphshare.entry import Entry
from graphshare.errors import GraphShareError, RebindError
from graphshare.freshness import StateRecord
from graphshare.memory import MemoryRanges
from graphshare.provenance.family import Member, family_of
from graphshare.provenance.finding import readable_graph
from graphshare.provenance.labels import moved_labels
from graphshare.refusals import Refusals
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


@dataclass(slots=True)
class _Planned:
    """One graph on other memory, worked out beforehand."""

    member: Member
    entry: Entry[Any]
    patch: Patch
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
    _check_moves(pools, moves, refuse)
    check_no_capture(first, "rebind")
    family = family_of(pools)
    chosen = _chosen(first, family, keys)
    records = {id(entry.record): entry.record for _, entry in chosen}
    try:
        moved = _moved_states(first, records.values(), moves)
        if keys is not None:
            _check_whole(first, family, chosen, moved)
        _check_bystanders(first, family, moves)
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
            _check_used(first, planned, records.values(), moves)
    except SplitError as error:
        raise _split(refuse, error) from None
    _apply_all(planned)
    # From here on nothing can fail.
    by = (first.name, None)
    for record, each in declared:
        record.redeclare(each)
    for each in moved.values():
        each.commit(by)
    for each in planned:
        each.entry.outputs = each.outputs
        if each.entry.graph is not None:
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


def _check_moves(pools: Sequence[PoolCore[Any]], moves: Moves, refuse: Refusals) -> None:
    for pool in pools:
        if pool.closed:
            raise refuse.closed("rebind", pool=pool.name)
        if pool.device != pools[0].device:
            raise refuse.ownership(
                "rebind across devices",
                expected=f"pools on {pools[0].device}",
                got=f"{pool.name} on {pool.device}",
                remedy="Call rebind for each device",
            )
    device = pools[0].device
    if moves.ranges and moves.ranges.device != device:
        raise ValueError(
            f"{refuse.name}: rebind: expected tensors on {device}, got {moves.ranges.device}"
        )
    crooked = moves.misaligned() if device.type == "cuda" else []
    if crooked:
        old, new = crooked[0]
        raise refuse.counted(
            RebindError(
                f"{refuse.name}: rebind to memory that is less aligned",
                expected=f"an address aligned as {old.data_ptr():#x} is, to at most 256 bytes",
                got=f"{new.data_ptr():#x}",
                consequence="Kernels were chosen for the alignment at capture",
                remedy="Allocate the new tensor by itself: torch.empty_like(old)",
            )
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
            raise _split(pool.refuse, error, record) from None
        if moved is not None:
            found[id(record)] = moved
    return found


def _check_whole(
    pool: PoolCore[Any],
    family: Sequence[Member],
    chosen: Sequence[tuple[Member, Entry[Any]]],
    moved: dict[int, Relocation],
) -> None:
    """Refuse to move a state under a key that was not named."""
    named = {id(entry) for _, entry in chosen}
    for member in family:
        for entry in member.entries():
            found = moved.get(id(entry.record))
            if found is not None and found.states and id(entry) not in named:
                raise pool.refuse.counted(
                    RebindError(
                        f"{pool.name}: rebind of some of the keys that share a state",
                        expected="all keys on one state",
                        got=f"all but {entry.key!r}",
                        key=entry.key,
                        consequence="The owner builds one state for them",
                        remedy="Name this key too, or rebind all keys",
                        keys=(entry.key,),
                    )
                )


def _check_bystanders(pool: PoolCore[Any], family: Sequence[Member], moves: Moves) -> None:
    """Refuse where a pool that is not asked has its state in memory that moves."""
    ours = {id(record) for member in family for record in member.holdings.records()}
    for record in pool.ledger.records():
        if id(record) in ours or not record.leases or not record.reads.overlaps(moves.ranges):
            continue
        raise pool.refuse.counted(
            RebindError(
                f"{pool.name}: rebind of memory that {record.pool_name} reads too",
                expected="every pool that reads it",
                got=f"none of {record.pool_name}",
                key=record.key,
                consequence=f"The graphs of {record.pool_name} would go on reading the old memory",
                remedy=f"Name it: {pool.name}.rebind(..., also=[{record.pool_name}])",
                keys=tuple(record.keys),
            )
        )


def _plan(
    pool: PoolCore[Any], member: Member, entry: Entry[Any], moves: Moves, moved: Relocation | None
) -> _Planned:
    refuse = member.holdings.refuse
    try:
        graph = readable_graph(entry, refuse, "rebind")
        patch = graph.patch(moves)
        outputs = with_tensors(entry.outputs, moves.tensor)
        graph_outputs = outputs_of(graph, entry, outputs, moves)
    except SplitError as error:
        raise _split(pool.refuse, error, entry.record, entry.key) from None
    except GraphShareError as error:
        raise refuse.of(error, entry.key) from error
    checker = None
    if entry.view_checker is not None and moved is not None and moved.states is not None:
        checker = entry.view_checker.moved(moves.address)
    return _Planned(member, entry, patch, outputs, graph_outputs, checker)


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


def check_no_capture(pool: PoolCore[Any], doing: str) -> None:
    """Refuse while a capture is under way on the device: it holds graphs that no pool has yet.

    Raises:
        RuntimeError: One is.
    """
    if pool.ledger.captures_under_way:
        raise RuntimeError(
            f"{pool.name}: {doing} during a capture of {pool.ledger.captures_under_way[0]}. Graphs "
            "that are being captured would stay on the old memory. Do it before or after"
        )


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


def _check_used(
    pool: PoolCore[Any],
    planned: Sequence[_Planned],
    records: Iterable[StateRecord],
    moves: Moves,
) -> None:
    used = {pair for each in planned for pair in each.patch.pairs}
    unused = [number for number in range(len(moves.pairs)) if number not in used]
    states = [
        ranges
        for record in (records if unused else ())
        for ranges in (record.leaves, *record.declared().values())
    ]
    for number in unused:
        old, bytes_of_it = moves.pairs[number][0], moves.bytes_of(number)
        if any(bytes_of_it.overlaps(each) for each in states):
            continue
        raise pool.refuse.counted(
            RebindError(
                f"{pool.name}: rebind of a tensor that nothing reads",
                expected="the tensor at the address that the graphs hold",
                got=f"{tuple(old.shape)} {old.dtype} at {old.data_ptr():#x}, in no graph and "
                "no state",
                consequence="The graphs may go on reading other memory that it was taken for",
                remedy="Pass the very tensor that was captured; see pool.provenance(key), or pass "
                "unused_ok=True",
            )
        )


def _apply_all(planned: Sequence[_Planned]) -> None:
    with contextlib.ExitStack() as undo:
        for each in planned:
            try:
                each.patch.apply()
            except GraphShareError as error:
                raise each.member.holdings.refuse.of(error, each.entry.key) from error
            undo.callback(each.patch.revert)
        undo.pop_all()


def _split(
    refuse: Refusals,
    error: SplitError,
    record: StateRecord | None = None,
    key: Hashable = None,
) -> RebindError:
    whose = "" if record is None else f" of {record.pool_name}"
    return refuse.counted(
        RebindError(
            f"{refuse.name}: rebind of a part of a tensor{whose}",
            expected="old tensors that hold each of the captured ones whole",
            got=str(error),
            key=key if record is None or key is not None else record.key,
            consequence="A graph would read on into memory that is not its own",
            remedy="Pass the whole buffer, not a view of it",
            keys=() if record is None else tuple(record.keys),
        )
    )
