"""Comparing a borrowed state with the one that the borrower's own owner builds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from graphshare.core import PoolCore
from graphshare.freshness import StateRecord
from graphshare.ledger import OwnerBook
from graphshare.owner import Phase
from graphshare.state import walk
from graphshare.state.values import same_value

__all__ = ["ValueDifference", "build_own", "first_differences", "rows_by_size", "snapshot"]


class ValueDifference(NamedTuple):
    """One leaf that differs."""

    path: str
    expected: str
    got: str


def snapshot(state: Any, rules: Mapping[str, str]) -> dict[str, Any]:
    """Return the leaves by path, tensors cloned, without those under the rule ``any``."""
    return {
        path: value.clone() if isinstance(value, torch.Tensor) else value
        for path, value in walk(state)
        if _rule(path, rules) != "any"
    }


def build_own(pool: PoolCore[Any], owner: Any, key: Hashable, batch: Any) -> Any:
    """Have a borrower's own owner build; whatever that writes over becomes stale."""
    book: OwnerBook = pool.ledger.book(owner)
    record = StateRecord(pool.ledger, book, pool.name, key, pool.tally)
    try:
        return record.build(key, batch, Phase.REPLAY, pool.device, adopt=True)
    finally:
        record.abandon()
        record.ask_again(pool.device)


def first_differences(
    borrowed: Mapping[str, Any],
    own: Any,
    *,
    key: Any,
    batch: Any,
    owner: Any,
    rules: Mapping[str, str],
    padding: bool,
) -> list[ValueDifference]:
    """Compare leaf by leaf, live rows only unless ``padding``; in the order of the own state."""
    mine = {path: value for path, value in walk(own) if _rule(path, rules) != "any"}
    found: list[ValueDifference] = []
    live_rows = getattr(owner, "live_rows", None)
    declared: Mapping[str, int] = {} if live_rows is None else live_rows(key, batch)
    for path in dict.fromkeys((*mine, *borrowed)):
        if path not in borrowed or path not in mine:
            shown = ("a leaf", "none") if path in mine else ("none", "a leaf")
            found.append(ValueDifference(path, *shown))
            continue
        rows = None if padding else _live_rows(path, mine[path], declared, key, batch)
        difference = _difference(mine[path], borrowed[path], rows)
        if difference is not None:
            found.append(ValueDifference(path, *difference))
    return found


def _difference(mine: Any, theirs: Any, rows: int | None) -> tuple[str, str] | None:
    if not (isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return None if same_value(mine, theirs) else (repr(mine), repr(theirs))
    if rows is not None and mine.ndim and theirs.ndim:
        mine, theirs = mine[:rows], theirs[:rows]
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape or mine.device != theirs.device:
        return _described(mine), _described(theirs)
    same = mine == theirs
    if mine.is_floating_point() or mine.is_complex():
        same |= (mine != mine) & (theirs != theirs)
    if bool(same.all()):
        return None
    first = tuple((~same).nonzero()[0].tolist())
    return f"{mine[first].item()} at {list(first)}", f"{theirs[first].item()}"


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _live_rows(
    path: str, tensor: Any, declared: Mapping[str, int], key: Any, batch: Any
) -> int | None:
    """Return the leading rows of a leaf that the batch uses, ``None`` where nothing tells."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
        return None
    for pattern, rows in declared.items():
        if _matches(path, pattern):
            return rows
    # Where a leaf may have a row for each request or for each token, the larger count compares more
    # rather than less.
    return max(rows_by_size(tensor.shape[0], key, batch), default=None)


def rows_by_size(size: int, key: Any, batch: Any) -> list[int]:
    """Return the rows that a batch may use of a leaf with a row for each request, or token.

    Args:
        size: Rows of the leaf.
        key: With the padded numbers, ``num_reqs`` and ``num_tokens``.
        batch: With the live numbers, as attributes or in a mapping.

    Returns:
        One number for each that fits, none where nothing tells.
    """
    found: list[int] = []
    for name, extra in (("num_reqs", 0), ("num_reqs", 1), ("num_tokens", 0)):
        padded, live = _field(key, name), _field(batch, name)
        if padded is not None and live is not None and size == padded + extra:
            found.append(live + extra)
    return found


def _field(source: Any, name: str) -> int | None:
    value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    return value if isinstance(value, int) else None


def _rule(path: str, rules: Mapping[str, str]) -> str:
    return next((rule for pattern, rule in rules.items() if _matches(path, pattern)), "equal")


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase("." + path, pattern)
