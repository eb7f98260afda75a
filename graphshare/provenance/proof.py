"""Proves, from the graphs, that a borrower reads its lender's buffers and none of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from graphshare.arguments import listed
from graphshare.capture.reading import GraphReading
from graphshare.core import PoolCore
from graphshare.entry import Entry
from graphshare.errors import GraphShareError, KeyMismatchError, ProvenanceError
from graphshare.freshness import StateRecord
from graphshare.memory import MemoryRanges
from graphshare.owner import Phase
from graphshare.provenance.finding import (
    argument,
    leaves_in,
    leaves_of,
    places_of,
    readable_graph,
    report_of,
)
from graphshare.provenance.places import Place, Places, Use
from graphshare.provenance.report import Provenance
from graphshare.refusals import Refusals

__all__ = ["prove"]


def prove(
    consumer: PoolCore[Any],
    lent: dict[Hashable, Entry[Any]],
    keys: Iterable[Hashable] | None,
    *,
    gone: Sequence[Hashable] = (),
    lender: str,
    build: bool,
) -> dict[Hashable, Provenance]:
    """Prove it for some keys of a borrower.

    Args:
        consumer: The borrower.
        lent: For each of its borrowed keys, the lender's entry.
        keys: Of the consumer; by default all that are borrowed.
        gone: Borrowed keys whose states the lender let go since.
        lender: The lender's name.
        build: Whether to have the consumer's own owner build, to know its buffers.

    Returns:
        What was found in the consumer's graphs, by key.

    Raises:
        ReleasedStateError: The lender let a key go, or all of them.
        KeyMismatchError: A key is not captured, or not borrowed, or there is none.
        ProvenanceError: A graph cannot be read, or it does not read what it should.
    """
    refuse = consumer.refuse
    chosen = list(lent)
    if keys is not None:
        chosen = listed(
            f"{refuse.name}: prove: keys", keys, "keys", "Put a single key into a list."
        )
    missing = [key for key in chosen if key not in lent]
    dropped = [key for key in (gone if keys is None and not lent else missing) if key in gone]
    if dropped:
        got = f"{lender} has released it, or captured it anew"
        raise refuse.released(dropped[0], got, doing="prove")
    if missing or not chosen:
        raise _nothing_to_prove(consumer, lent, missing)
    reports: dict[Hashable, Provenance] = {}
    for key in chosen:
        entry = consumer.lookup(key, "prove")
        theirs = _read(lent[key], refuse, lender)
        mine = _read(entry, refuse, consumer.name)
        places = Places(places_of(entry, consumer.device, consumer.holdings.named))
        report = reports[key] = report_of(
            entry,
            mine,
            places,
            pool=consumer.name,
            backend=consumer.backend.name,
            device=consumer.device,
        )
        _check_borrowed(refuse, entry, lender, leaves_of(entry, consumer.device), theirs, mine)
        if consumer.owner is not None:
            own, leaves = _own_memory(consumer, entry, build=build)
            _check_own(refuse, entry, report, own, leaves)
    return reports


def _read(entry: Entry[Any], refuse: Refusals, pool: str) -> GraphReading:
    """Read the graph of a key of ``pool``, the borrower or its lender; the borrower was asked."""
    graph = readable_graph(entry, refuse, "prove")
    try:
        return graph.read()
    except GraphShareError as error:
        raise refuse.counted(Refusals(pool).of(error, entry.key)) from error


def _nothing_to_prove(
    consumer: PoolCore[Any], lent: dict[Hashable, Entry[Any]], missing: list[Hashable]
) -> KeyMismatchError:
    near = ", ".join(map(repr, tuple(lent)[:3])) or "none is"
    held = [key for key in missing if key in consumer.holdings.entries]
    got = ", ".join(map(repr, missing)) or "no key at all"
    return consumer.refuse.counted(
        KeyMismatchError(
            f"{consumer.name}: prove of keys that are not borrowed",
            expected=f"keys that are captured on the loan ({near})",
            got=got + (", captured on states of the pool's own" if held else ""),
            key=missing[0] if len(missing) == 1 else None,
            consequence="There is nothing to compare with, so nothing would be proven",
            remedy="Leave it out" if held else "Capture it on the loan first",
            missing=tuple(missing),
            nearest=tuple(lent)[:3],
        )
    )


def _check_borrowed(
    refuse: Refusals,
    entry: Entry[Any],
    lender: str,
    leaves: Iterable[Place],
    theirs: GraphReading,
    mine: GraphReading,
) -> None:
    held = _addresses(theirs), _addresses(mine)
    lent = [leaf for leaf in Places(leaves).all if _reads(held[0], leaf)]
    lost = [leaf for leaf in lent if not _reads(held[1], leaf)]
    if not lent:
        raise refuse.counted(
            ProvenanceError(
                f"{refuse.name}: prove",
                expected=f"a graph of {lender} that reads the state that it lends",
                got="one that reads no leaf of it",
                key=entry.key,
                consequence="There is nothing to compare with, so nothing is proven",
                remedy=f"Have the forward of {lender} use the state that it is handed",
                keys=(entry.key,),
            )
        )
    if lost:
        path = lost[0].name or "(the state itself)"
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise refuse.counted(
            ProvenanceError(
                f"{refuse.name}: prove: the graph does not read {path}{more}",
                expected=f"its address, {lost[0].address:#x}, which the graph of {lender} reads",
                got="no node that has it",
                key=entry.key,
                consequence="It reads something else in its place, that the lender's refresh "
                "does not fill",
                remedy="Have the forward use the state that it is handed, or narrow the state "
                "with view=...",
                keys=(entry.key,),
                path=lost[0].name,
                paths=tuple(leaf.name for leaf in lost),
            )
        )


def _addresses(reading: GraphReading) -> list[int]:
    return sorted({word.address for node in reading.nodes for word in node.words})


def _reads(ascending: list[int], leaf: Place) -> bool:
    first = bisect_left(ascending, leaf.address)
    last = bisect_left(ascending, leaf.address + leaf.nbytes)
    return any(leaf.holds(ascending[place]) for place in range(first, last))


def _own_memory(
    pool: PoolCore[Any], entry: Entry[Any], *, build: bool
) -> tuple[MemoryRanges, Places]:
    """Return the memory of the consumer's own owner, as far as it is known, and its leaves."""
    book = pool.ledger.book(pool.owner)
    if not build:
        return book.footprint(), _leaves(pool, book.records())
    record = StateRecord(pool.ledger, book, pool.name, entry.key, pool.tally)
    try:
        record.build(entry.key, None, Phase.CAPTURE, pool.device, adopt=True)
        own = book.footprint().union(record.footprint(entry.key))
        return own, _leaves(pool, book.records())
    finally:
        record.abandon()
        record.ask_again(pool.device)


def _leaves(pool: PoolCore[Any], records: Iterable[StateRecord]) -> Places:
    return Places(
        place
        for record in records
        if not record.released
        for place in leaves_in(record.captured, pool.device, Use.STATE, record.pool_name)
    )


def _check_own(
    refuse: Refusals, entry: Entry[Any], report: Provenance, own: MemoryRanges, leaves: Places
) -> None:
    record = entry.record
    # Two owners may be one, or share buffers: what is lent may be read.
    lent = record.book.footprint().union(record.footprint(entry.owner_key))
    for node in report.nodes:
        for each in node.addresses:
            byte = MemoryRanges((each.address,), (each.address + 1,), own.device)
            if not own.contains(byte) or lent.contains(byte):
                continue
            at = leaves.at(each.address)
            names = tuple(dict.fromkeys(name for leaf in at for name in (leaf.name, *leaf.also)))
            leaf = f" as {names[0] or 'the state itself'}" if names else ""
            raise refuse.counted(
                ProvenanceError(
                    f"{refuse.name}: prove: node {node} reads a buffer of the consumer's own",
                    expected=f"buffers of {record.pool_name}",
                    got=f"{each.address:#x} ({argument(node.kind, each.where)}), which "
                    f"{refuse.name}'s own owner fills{leaf}",
                    key=entry.key,
                    consequence="No refresh of the lender fills it, so it holds what was last "
                    "built there",
                    remedy="Have the forward use the state that it is handed",
                    keys=(entry.key,),
                    path=names[0] if names else each.name,
                    paths=names,
                    node=str(node),
                )
            )
