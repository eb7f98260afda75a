"""The words of what a pool refuses, and how often it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

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
from graphshare.unlike import unlike

__all__ = ["Refusals"]

_Error = TypeVar("_Error", bound=GraphShareError)

_WRONG_TOKENS = "The graph would read another batch's metadata and give wrong tokens, or crash"

_TWO_WRITERS = "Two writers of one state, or none, give wrong tokens silently"

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

    Attributes:
        name: The pool's.
        counts: Refusals by the name of their class.
        ended: Whether the pool is closed.
    """

    __slots__ = ("counts", "ended", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.ended = False

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
        if self.ended:
            return self.counted(
                KeyMismatchError(
                    f"{self.name}: {doing} of a closed pool",
                    expected="a pool that is open",
                    got="one that holds no key any more",
                    key=missing[0] if len(missing) == 1 else None,
                    consequence="Its graphs and states were let go",
                    remedy="Make a new pool and capture there",
                    missing=tuple(missing),
                )
            )
        if list(missing) == [None]:
            return self._no_key(doing)
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

    def _no_key(self, doing: str) -> KeyMismatchError:
        """``None`` in the place of a key."""
        return self.counted(
            KeyMismatchError(
                f"{self.name}: {doing} without a key",
                expected="a captured key",
                got="None, which dispatch returns where no captured key covers the batch, and "
                "live_key where nothing is live",
                consequence="There is no graph to run",
                remedy="After dispatch, run the batch eagerly, or capture a key that covers it. "
                "After live_key, refresh the lender's pool first",
                missing=(None,),
            )
        )

    def not_fresh(
        self, key: Hashable, why: Why, *, doing: str = "replay"
    ) -> StaleStateError | ReleasedStateError:
        """A replay on a state that is not fresh for this key, or another use of it."""
        if why.rule is Staleness.RELEASED:
            return self.released(key, "its state was released", by=why, doing=doing)
        by = f" by {why.by[0]}" if why.by else ""
        # Others may have written since: the first is who made it stale.
        first = "first " if by and why.rule is Staleness.OVERWRITTEN else ""
        if why.by and why.by[1] is not None:  # what a rebind does is for no key
            by += f" for key {why.by[1]}"
        return self.counted(
            StaleStateError(
                f"{self.name}: {doing} on a stale state",
                expected="a state that is fresh for this key",
                got=f"one that is not: {first}{why.rule.value}{by}",
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

    def gone(self, key: Hashable, doing: str = "replay") -> ReleasedStateError:
        """What was prepared for one capture of a key, and kept beyond it."""
        return self.counted(
            ReleasedStateError(
                f"{self.name}: {doing} after a release",
                expected="the capture that it was prepared for",
                got="the key was released or captured anew",
                key=key,
                consequence="The graph would read memory that may belong to someone else by now",
                remedy="Take a new handle of the key; capture it first if it was released",
            )
        )

    def closed(
        self, doing: str, key: Hashable = None, *, pool: str | None = None
    ) -> ReleasedStateError:
        """A call of a pool that is closed, this one unless another is named."""
        return self.counted(
            ReleasedStateError(
                f"{self.name}: {doing} after a close",
                expected="a pool that is open",
                got=f"{pool or self.name} is closed",
                key=key,
                consequence="It holds no graphs and no states any more",
                remedy="Make a new pool and capture there",
            )
        )

    def after_close(self, *_: object, **__: object) -> NoReturn:
        """Take the place of a closed pool's ``dispatch``: ``None`` would mean to run eagerly."""
        raise self.closed("dispatch")

    def without_address(self, key: Hashable, error: TypeError, doing: str) -> AddressChangedError:
        """A rebuilt state with a tensor that no graph can read."""
        return self.counted(
            AddressChangedError(
                f"{self.name}: {doing}: a tensor of the state has no address any more",
                expected="the tensors that the graphs baked in",
                got=str(error),
                key=key,
                consequence="The graphs read the old memory, which no build fills any more",
                remedy="Build in place into persistent buffers",
                field="presence",
                keys=(key,),
            )
        )

    def ownership(
        self,
        what: str,
        *,
        expected: str,
        got: str,
        remedy: str,
        key: Hashable = None,
        consequence: str = _TWO_WRITERS,
    ) -> OwnershipError:
        """What only the state's owner may do, or a loan that cannot be."""
        return self.counted(
            OwnershipError(
                f"{self.name}: {what}",
                expected=expected,
                got=got,
                key=key,
                consequence=consequence,
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
        return self.counted(unlike(self.name, key, differences, keys=keys, doing=doing))
