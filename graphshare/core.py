"""What every part of graphshare needs of a pool: its states, keys, lender and backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

import torch

from graphshare.arguments import check_call, check_flag, distinct_keys, wrong_type
from graphshare.capture import CaptureBackend, make_backend
from graphshare.capture._collection import no_collection
from graphshare.device import device_of
from graphshare.entry import Entry
from graphshare.freshness import StateRecord
from graphshare.holdings import Holdings, Source
from graphshare.launches import strict_launch, writing_launch
from graphshare.lease import PoolClock
from graphshare.ledger import Ledger, OwnerBook, ledger_for
from graphshare.live_states import LiveStates
from graphshare.ordering import StreamOrder
from graphshare.owner import AttentionSpec, StateOwner, check_build
from graphshare.refreshing import differences, prepare_refresh, refuse_refresh
from graphshare.refusals import Refusals
from graphshare.state import LayoutDifference, check_rules
from graphshare.statistics import Tally

if TYPE_CHECKING:
    from graphshare.loan import Loan

__all__ = ["Checks", "Forward", "PoolCore"]

K = TypeVar("K", bound=Hashable)

Checks = Literal["fast", "strict", "off"]
Forward = Callable[[Any, Any], Any]


_NOTHING = object()


class PoolCore(Generic[K]):
    """The inside of a :class:`graphshare.GraphPool`, which documents the arguments."""

    def __init__(
        self,
        name: str,
        *,
        owner: StateOwner | None,
        spec: AttentionSpec | None,
        device: torch.device | str | None,
        backend: Literal["auto", "cuda", "tape"] | CaptureBackend,
        covers: Callable[[K, Any], bool] | None,
        cost: Callable[[K], Any] | None,
        state_key: Callable[[Any], Hashable] | None,
        live_keys: int,
        replays_per_refresh: int | None,
        checks: Checks,
        memory_pool: Any,
        inspectable: bool,
        backend_options: Mapping[str, Any] | None,
    ) -> None:
        if not isinstance(name, str):
            raise wrong_type("GraphPool: name", "a string", name, "The owner goes by owner=....")
        if checks not in get_args(Checks):
            raise ValueError(f"{name}: checks must be one of {get_args(Checks)}, got {checks!r}")
        _at_least_one(name, "live_keys", live_keys)
        if replays_per_refresh is not None:
            _at_least_one(name, "replays_per_refresh", replays_per_refresh)
        if owner is not None:
            check_build(f"{name}: owner", owner)
            check_rules(getattr(owner, "host_values", None))
        if spec is not None and not isinstance(spec, AttentionSpec):
            raise wrong_type(f"{name}: spec", "an AttentionSpec", spec)
        for option, value in (("covers", covers), ("cost", cost), ("state_key", state_key)):
            check_call(f"{name}: {option}", value, optional=True)
        check_flag(f"{name}: inspectable", inspectable)
        self.name = name
        self.spec = spec
        self.device = _device(name, device, backend)
        self.owner = owner
        self.live_keys = live_keys
        self.replays_per_refresh = replays_per_refresh
        self.checks: Checks = checks
        if isinstance(backend, str):
            options = _backend_options(name, backend_options)
            try:
                self.backend: CaptureBackend = make_backend(
                    backend,
                    self.device,
                    memory_pool=memory_pool,
                    inspectable=inspectable,
                    **options,
                )
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from error
        else:
            _check_backend(name, backend, self.device, memory_pool, backend_options)
            self.backend = backend
        self.loan: Loan | None = None
        self.tally = Tally()
        self.refuse = Refusals(name)
        self.ledger: Ledger = ledger_for(self.device)
        self.clock = PoolClock()
        self._cost = cost
        self.holdings: Holdings[K] = Holdings(
            self.refuse,
            self.tally,
            self.clock,
            state_key=state_key,
            covers=covers,
            cost=cost,
            limit=replays_per_refresh,
            checked=checks != "off",
        )
        self._entries = self.holdings.entries
        self._by_id = self.holdings.by_id
        # What was asked for last is found without a lookup, which would touch much that is cold.
        self._refreshed: K | object = _NOTHING
        self._refresh: Callable[[Any], None] = _refuse
        self._replayed: Entry[K] | None = None
        self._book: OwnerBook | None = None if owner is None else self.ledger.book(owner)
        self._latest = LiveStates(live_keys)
        self._capturing = False
        self.closed = False

    def __len__(self) -> int:
        return len(self._entries)

    def begin_capture(self) -> None:
        """Refuse a capture inside another one of the same pool."""
        if self._capturing:
            raise RuntimeError(f"{self.name}: a capture of this pool is already in progress")
        self._capturing = True
        self.ledger.captures_under_way.append(self.name)

    def end_capture(self) -> None:
        """A capture ended, well or not."""
        self._capturing = False
        self.ledger.captures_under_way.remove(self.name)

    def sources(self, keys: Sequence[K], *, replace: bool) -> list[Source]:
        """Find where the state of each key comes from.

        Raises:
            KeyMismatchError: The lender has no state for some of them; names them all.
            OwnershipError: A key is not borrowed and the pool has no owner.
            ReleasedStateError: The loan or the lender's state has ended.
        """
        found: list[Source] = []
        missing: list[K] = []
        if self.loan is not None:
            # Again: the lender may have become a borrower itself since the loan was declared.
            self.loan.check_specs(self.spec, self.refuse)
        for key in keys:
            if self.loan is not None and self.loan.lends(key):
                source = self.loan.source(key, self.refuse)
                if source is None:
                    missing.append(key)
                else:
                    found.append(source)
            else:
                self._owned_book(key)
                record = None if replace else self.holdings.own_record(key)
                found.append(Source(key, key, record, (), borrowed=False))
        if missing and self.loan is not None:
            raise self.loan.no_state(missing, self.refuse)
        return found

    def new_record(self, key: K) -> StateRecord:
        """Begin a state of this pool's owner."""
        return StateRecord(self.ledger, self._owned_book(key), self.name, key, self.tally)

    def _owned_book(self, key: K) -> OwnerBook:
        if self._book is None:
            raise self.refuse.ownership(
                "capture without an owner",
                expected="an owner, or a lender for this key",
                got="neither",
                key=key,
                remedy="Give the pool an owner, or declare share_states before the capture",
            )
        return self._book

    def register(self, entries: Sequence[Entry[K]]) -> None:
        """Take over what a capture made; the last step, which cannot fail."""
        with no_collection():  # a finalizer may want a key that is half here
            self.holdings.register(entries)
            for entry in entries:
                self._compose(entry)
            self.keys_changed()

    def lookup(self, key: K, doing: str) -> Entry[K]:
        """Return the entry of a captured key, or raise ``KeyMismatchError``."""
        try:
            return self._entries[key]
        except (KeyError, TypeError):
            raise self.lookup_error(key, doing) from None

    def lookup_error(self, key: K, doing: str) -> Exception:
        """Return the error for a key that is not here."""
        if self.closed:
            return self.refuse.closed(doing, key)
        return self.holdings.unknown(doing, [key])

    def ordered(self, keys: Iterable[K], doing: str = "capture") -> list[K]:
        """Return the keys of a capture, largest first.

        Raises:
            ReleasedStateError: The pool is closed.
            TypeError, ValueError: They are no distinct keys.
        """
        if self.closed:
            raise self.refuse.closed(doing)
        unique = distinct_keys(f"{self.name}: {doing}: keys", keys)
        cost: Callable[[Any], Any] | None = self._cost
        kinds = {type(key) for key in unique}
        if cost is None and len(kinds) == 1:
            cost = getattr(kinds.pop(), "cost", None)
        # Largest first: memory that the largest needed serves the smaller ones.
        return unique if cost is None else sorted(unique, key=cost, reverse=True)

    def forward_of(self, key: K) -> Forward:
        """Return the forward that a key was captured with, or raise ``ValueError``."""
        forward = self._entries[key].forward
        if forward is None:
            raise ValueError(
                f"{self.name}: {key} was captured by the engine's own loop; give recapture a "
                "forward, or use capturing(keys, replace=True)"
            )
        return forward

    def differences(
        self, record: StateRecord, key: Hashable, state: Any, doing: str
    ) -> list[LayoutDifference]:
        """Return in what a rebuilt state differs from what its graphs bake in.

        Raises:
            AddressChangedError: It has a tensor without an address.
        """
        return differences(self.refuse, record, key, state, doing)

    def accepting(self, key: K) -> Callable[[Any], None]:
        """Return ``accept(state)``, for an engine that has built by itself what its owner builds.

        It does what a refresh does after the build, counts as one, and refuses the same. Call it
        right after the build: until then no pool knows what was written over. What it refuses
        has been written all the same, and makes stale what lay there.

        The state is not kept, and ``states`` goes on showing the one before; with
        ``checks="strict"`` it is, for replays look at it. Like a handle, ``accept`` is for one
        capture of the key.

        Args:
            key: A captured key whose state this pool owns. For a borrowed one ``accept`` raises
                ``OwnershipError``, as ``refresh`` does.

        Raises:
            KeyMismatchError: The key is not captured.
        """
        entry = self.lookup(key, "accepting")
        if entry.borrowed:
            return entry.refresh
        if entry.accept is None:
            entry.accept = self._prepared(entry, builds=False)
        return entry.accept

    accepting.__qualname__ = "GraphPool.accepting"  # what Python calls it in its own errors

    def keys_changed(self) -> None:
        """Forget what was released, and dispatch over the keys that are held now."""
        self._refreshed, self._refresh, self._replayed = _NOTHING, _refuse, None
        self._latest.drop_released()
        # An attribute of the instance, in front of the method: no layer between on the hot path.
        self.dispatch = self.holdings.dispatcher.dispatch

    def _compose(self, entry: Entry[K]) -> None:
        """Put around the launch what the pool's options ask for; prepare replays and refreshes."""
        if entry.writes_state:
            entry.launch = writing_launch(entry, self.name)
        if self.checks == "strict":
            if entry.record.order is None:
                entry.record.order = StreamOrder(self.device)
            entry.launch = strict_launch(entry, self.refuse)
        entry.prepare_replay(self.refuse)
        if entry.borrowed:
            entry.refresh = refuse_refresh(entry, self.refuse)
        else:
            entry.refresh = self._prepared(entry, builds=True)

    def _prepared(self, entry: Entry[K], *, builds: bool) -> Callable[[Any], None]:
        return prepare_refresh(
            entry,
            builds=builds,
            refuse=self.refuse,
            tally=self.tally,
            latest=self._latest,
            device=self.device,
        )


def _refuse(batch: Any) -> None:
    raise RuntimeError(f"graphshare: a refresh of no key, for {batch!r}")


def _at_least_one(name: str, option: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {option} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name}: {option} must be at least 1, got {value}")


def _device(name: str, device: Any, backend: Any) -> torch.device:
    if device is None and not isinstance(backend, str):
        device = getattr(backend, "device", None)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return device_of(f"{name}: device", device)


_BACKEND_OPTIONS = ("capture_error_mode", "generators")


def _backend_options(name: str, options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise wrong_type(f"{name}: backend_options", "a mapping", options)
    unknown = [option for option in options if option not in _BACKEND_OPTIONS]
    if unknown:
        raise TypeError(
            f"{name}: backend_options: expected some of {', '.join(_BACKEND_OPTIONS)}, got "
            f"{unknown[0]!r}."
        )
    return dict(options)


def _check_backend(
    name: str, backend: Any, device: torch.device, memory_pool: Any, options: Any
) -> None:
    calls = [getattr(backend, each, None) for each in ("session", "warmup", "capture")]
    if isinstance(backend, type) or not all(map(callable, calls)):
        raise wrong_type(f"{name}: backend", '"auto", "cuda", "tape" or a capture backend', backend)
    for option, value in (("memory_pool", memory_pool), ("backend_options", options)):
        if value is not None:
            raise ValueError(
                f"{name}: {option}: expected None beside a backend of your own, which would not "
                "see it. Make the backend with it."
            )
    theirs = getattr(backend, "device", device)
    if theirs != device:
        raise ValueError(
            f"{name}: device: expected that of the backend, {theirs}, got {device}. Its graphs "
            "would not read this pool's states."
        )
