"""The words of what a pool refuses, and how often it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from typing import TypeVar

from graphshare.errors import (
    AddressChangedError,
    BakedValueChangedError,
    CaptureError,
    GraphShareError,
    KeyMismatchError,
    OwnershipError,
    ReleasedStateError,
    StaleStateError,
)
from graphshare.lease import Staleness, Why
from graphshare.state import LayoutDifference

__all__ = ["Refusals"]

_Error = TypeVar("_Error", bound=GraphShareError)

_WRONG_TOKENS = "The graph would read another batch's metadata and give wrong tokens, or crash"

_REMEDY = {
    Staleness.NEVER_REFRESHED: "Call refresh(key, batch) on the pool that owns the state first",
    Staleness.BUILT_FOR_CAPTURE: "Call refresh(key, batch) on the pool that owns the state first",
    Staleness.BUILD_FAILED: "Refresh the key again and mind the error of the last build",
    Staleness.OVERWRITTEN: (
        "Refresh this key after the other, or declare what a build writes with the owner's "
        "writes(key) if the two do not share memory"
    ),
    Staleness.SUPERSEDED: "Replay before the next refresh, or raise live_keys",
    Staleness.USED_UP: "Refresh before each step, or raise replays_per_refresh",
    Staleness.MOVED: "Have the owner build in the new memory and refresh the key",
    Staleness.FORWARD_WROTE: "Refresh the key before this pool replays on it",
    Staleness.INVALIDATED: "Refresh the key again",
}


class Refusals:
    """Makes the errors of one pool, and counts them by kind.

    Holds no reference to the pool, so that bound replays may keep it.
    """

    __slots__ = ("counts", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()

    def counted(self, error: _Error) -> _Error:
        """Count an error that is about to be raised, and return it."""
        self.counts[type(error).__name__] += 1
        return error

    def of(self, error: GraphShareError, key: Hashable) -> GraphShareError:
        """Say of an error that knows neither which pool and key it was."""
        if error.what.startswith(f"{self.name}: "):
            return error
        facts = {
            name: value
            for name, value in vars(error).items()
            if name not in ("what", "expected", "got", "key", "consequence", "remedy", "args")
        }
        if hasattr(error, "keys"):
            facts["keys"] = (key,)
        return self.counted(
            type(error)(
                f"{self.name}: {error.what}",
                expected=error.expected,
                got=error.got,
                key=key,
                consequence=error.consequence,
                remedy=error.remedy,
                **facts,
            )
        )

    @contextmanager
    def capture_errors(self, key: Hashable) -> Generator[None]:
        """Say of a backend's ``CaptureError`` which pool and key it was."""
        try:
            yield
        except CaptureError as error:
            raise self.counted(
                CaptureError(
                    f"{self.name}: {error.what}",
                    expected=error.expected,
                    got=error.got,
                    key=key,
                    consequence=error.consequence,
                    remedy=error.remedy,
                )
            ) from (error.__cause__ or error)

    def unknown_key(
        self, doing: str, missing: Sequence[Hashable], nearest: Sequence[Hashable]
    ) -> KeyMismatchError:
        """Keys that are not captured in this pool."""
        listed = ", ".join(map(repr, missing))
        near = ", ".join(map(repr, nearest)) or "no key at all"
        return self.counted(
            KeyMismatchError(
                f"{self.name}: {doing} with a key that is not captured",
                expected=f"a captured key (nearest: {near})",
                got=listed,
                key=missing[0] if len(missing) == 1 else None,
                consequence="There is no graph for this shape",
                remedy="Capture it, or dispatch to a captured key",
                missing=tuple(missing),
                nearest=tuple(nearest),
            )
        )

    def not_fresh(self, key: Hashable, why: Why) -> StaleStateError | ReleasedStateError:
        """A replay on a state that is not fresh for this key."""
        if why.rule is Staleness.RELEASED:
            return self.released(key, "its state was released", by=why)
        by = f" by {why.by[0]} for key {why.by[1]}" if why.by else ""
        return self.counted(
            StaleStateError(
                f"{self.name}: replay on a stale state",
                expected="a state that is fresh for this key",
                got=f"one that is not: {why.rule.value}{by}",
                key=key,
                consequence=_WRONG_TOKENS,
                remedy=_REMEDY[why.rule],
                rule=why.rule,
                written_by=why.by,
            )
        )

    def released(
        self, key: Hashable, got: str, *, by: Why | None = None, doing: str = "replay"
    ) -> ReleasedStateError:
        """Something that this pool needs was let go."""
        who = f" by {by.by[0]}" if by and by.by else ""
        return self.counted(
            ReleasedStateError(
                f"{self.name}: {doing} after a release",
                expected="what it needs to be held",
                got=f"{got}{who}",
                key=key,
                consequence="The graph would read memory that may belong to someone else by now",
                remedy="Capture the key anew, the lender's first",
            )
        )

    def ownership(
        self, what: str, *, expected: str, got: str, remedy: str, key: Hashable = None
    ) -> OwnershipError:
        """What only the state's owner may do, or a loan that cannot be."""
        return self.counted(
            OwnershipError(
                f"{self.name}: {what}",
                expected=expected,
                got=got,
                key=key,
                consequence="Two writers of one state, or none, give wrong tokens silently",
                remedy=remedy,
            )
        )

    def layout(
        self,
        key: Hashable,
        differences: Sequence[LayoutDifference],
        *,
        keys: Iterable[Hashable] = (),
        doing: str = "refresh",
    ) -> AddressChangedError | BakedValueChangedError:
        """A rebuilt state that is not laid out as the graphs baked it in."""
        moved = [each for each in differences if each.field not in ("value", "type")]
        first = (moved or list(differences))[0]
        more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
        named = tuple(keys) or (key,)
        path = first.path or "(the state itself)"
        if moved:
            return self.counted(
                AddressChangedError(
                    f"{self.name}: {doing}: {first.field} of {path}{more} changed",
                    expected=first.expected,
                    got=first.got,
                    key=key,
                    consequence="The graphs of "
                    + ", ".join(map(repr, named))
                    + " read the old memory, which no build fills any more",
                    remedy="Build in place into persistent buffers, sized for the largest key "
                    "before the first capture, or recapture these keys",
                    path=first.path,
                    field=first.field,
                    keys=named,
                )
            )
        return self.counted(
            BakedValueChangedError(
                f"{self.name}: {doing}: host value {path}{more} breaks its rule {first.rule!r}",
                expected=first.expected,
                got=first.got,
                key=key,
                consequence="The graph was captured with the old value and launches with it",
                remedy="Make it part of the key, capture it at capacity with the rule 'at_most', "
                "or declare 'any' if no kernel depends on it",
                path=first.path,
                rule=first.rule,
            )
        )
