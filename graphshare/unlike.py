"""The words for a rebuilt state that is not laid out as the graphs baked it in."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from graphshare.buffers import PersistentBuffer
from graphshare.errors import AddressChangedError, BakedValueChangedError
from graphshare.state import HostLeaf, LayoutDifference, TensorLeaf

__all__ = ["unlike"]

_IN_PLACE = (
    "Build in place into persistent buffers, sized for the largest key before the first capture, "
    "or recapture these keys"
)
_REBIND = (
    "Build in place into persistent buffers, sized for the largest key before the first capture. "
    "If buffers were moved on purpose, tell the pool first, with pool.rebind({old: new}), or "
    "recapture these keys"
)
_VALUE = (
    "Make it part of the key, capture it at capacity with the rule 'at_most', or declare 'any' if "
    "no kernel depends on it"
)
_SAME_LEAVES = "Return the same leaves for each build of a key, or recapture these keys"
_FORGOT = "Return the state from build in each phase: did it forget to?"
_RETURN_THE_VIEW = "Return what write() returned, not the buffer"


def unlike(
    pool: str,
    key: Hashable,
    differences: Sequence[LayoutDifference],
    *,
    keys: Iterable[Hashable],
    doing: str,
) -> AddressChangedError | BakedValueChangedError:
    """Make the error for what a build returned; one of memory goes before one of values.

    Args:
        pool: The pool's name.
        key: For which it was built.
        differences: At least one.
        keys: Every key that is captured on the state; by default ``key``.
        doing: What the pool was about to do.
    """
    moved = [each for each in differences if each.field not in ("value", "type")]
    first = (moved or list(differences))[0]
    paths = tuple(dict.fromkeys(each.path for each in differences))
    here = [each for each in differences if each.path == first.path]
    more = f", and {len(paths) - 1} more of its leaves" if len(paths) > 1 else ""
    named = tuple(keys) or (key,)
    path = first.path or "(the state itself)"
    expected, got = _both(here)
    if moved:
        placed = any(isinstance(each.expected, TensorLeaf) for each in here)
        old = first.field != "presence" or placed
        remedy = _IN_PLACE if old else _SAME_LEAVES
        # What a capture refuses is in no graph yet, and a rebind takes no other shape.
        if doing in ("refresh", "replay") and all(each.field == "address" for each in moved):
            remedy = _REBIND
        if any(PersistentBuffer in (each.expected, each.got) for each in here):
            remedy = _RETURN_THE_VIEW
        if _is_nothing(first):
            remedy = _FORGOT
        return AddressChangedError(
            f"{pool}: {doing}: {_changed(here)} of {path} changed{more}",
            expected=expected,
            got=got,
            key=key,
            consequence="The graphs of "
            + ", ".join(map(repr, named))
            + (
                " read the old memory, which no build fills any more"
                if old
                else " were captured on a state of another form"
            ),
            remedy=remedy,
            path=first.path,
            field=first.field,
            fields=tuple(each.field for each in here),
            paths=paths,
            keys=named,
        )
    what, remedy = f"host value {path} breaks its rule {first.rule!r}", _VALUE
    if first.field == "type":
        what = f"type of {path} changed"
        remedy = _SAME_LEAVES if isinstance(first.expected, type) else _VALUE
    if _is_nothing(first):
        remedy = _FORGOT
    return BakedValueChangedError(
        f"{pool}: {doing}: {what}{more}",
        expected=expected,
        got=got,
        key=key,
        consequence="The graph was captured with the old value and launches with it",
        remedy=remedy,
        path=first.path,
        rule=first.rule,
        paths=paths,
    )


def _is_nothing(found: LayoutDifference) -> bool:
    """Whether a build returned ``None``."""
    got = found.got.value if isinstance(found.got, HostLeaf) else found.got
    return got is None and not found.path


def _changed(here: Sequence[LayoutDifference]) -> str:
    fields = [each.field for each in here]
    return fields[0] if len(fields) == 1 else ", ".join(fields[:-1]) + f" and {fields[-1]}"


def _both(here: Sequence[LayoutDifference]) -> tuple[Any, Any]:
    """What was expected at one leaf, and what was found: the facts themselves, if it is one."""
    if len(here) > 1:
        return (
            ", ".join(f"{each.field} {_number(each.field, each.expected)}" for each in here),
            ", ".join(f"{each.field} {_number(each.field, each.got)}" for each in here),
        )
    (only,) = here
    if only.field == "presence":
        return _described(only.expected), _described(only.got)
    # An error takes None for a fact that was not given.
    return "None" if only.expected is None else only.expected, only.got


def _number(field: str, value: Any) -> str:
    return hex(value) if field == "address" else str(value)


def _described(leaf: Any) -> str:
    """A leaf that came or went, in words."""
    if leaf is None:
        return "nothing"
    if isinstance(leaf, TensorLeaf):
        return f"a tensor {list(leaf.shape)} {leaf.dtype} on {leaf.device}"
    kept = leaf.value if isinstance(leaf, HostLeaf) else leaf
    if isinstance(kept, type):
        return f"a {kept.__qualname__}"
    return f"the value {kept!r}"
