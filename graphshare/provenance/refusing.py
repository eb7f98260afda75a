"""What is refused before any graph is put on other memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from graphshare.capture.moves import Moves, SplitError
from graphshare.core import PoolCore
from graphshare.entry import Entry
from graphshare.errors import RebindError
from graphshare.freshness import StateRecord
from graphshare.provenance.family import Member
from graphshare.refusals import Refusals
from graphshare.relocation import Relocation

__all__ = [
    "check_bystanders",
    "check_in_place",
    "check_moves",
    "check_no_capture",
    "check_used",
    "check_whole",
    "part_of",
]


def check_moves(pools: Sequence[PoolCore[Any]], moves: Moves, refuse: Refusals) -> None:
    """Refuse closed pools, several devices, and new memory that is less aligned."""
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


def check_in_place(refuse: Refusals, records: Iterable[StateRecord], moves: Moves) -> None:
    """Refuse to move states whose owner has put other memory into the captured tensors themselves.

    Then they do not say any more what of the state moves.
    """
    for record in records:
        if record.released or not record.reads.overlaps(moves.ranges):
            continue
        if not record.reads.hold(record.tensors):
            raise refuse.counted(
                RebindError(
                    f"{refuse.name}: rebind of tensors of {record.pool_name} that are elsewhere",
                    expected="the captured tensors, where the graphs read them",
                    got="some that their owner has put elsewhere (set_, or .data)",
                    key=record.key,
                    consequence="The graphs would move, and the check of later builds would not",
                    remedy="Rebind first; the owner changes its tensors afterwards",
                    keys=tuple(record.keys),
                )
            )


def check_whole(
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


def check_bystanders(pool: PoolCore[Any], family: Sequence[Member], moves: Moves) -> None:
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


def check_used(
    pool: PoolCore[Any], used: AbstractSet[int], records: Iterable[StateRecord], moves: Moves
) -> None:
    """Refuse an old tensor that nothing has.

    Args:
        pool: The pool that was asked.
        used: Numbers of the pairs that a graph or an output has.
        records: The states concerned.
        moves: What goes where.
    """
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


def part_of(
    refuse: Refusals,
    error: SplitError,
    record: StateRecord | None = None,
    key: Hashable = None,
) -> RebindError:
    """Make the error for a tensor that moves only in part."""
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
