"""One capture in progress: states built and checked, graphs collected, all kept or none.

Both :meth:`graphshare.GraphPool.capture` and an engine's own capture loop go through
:class:`Capturing`; nothing of it reaches the pool until every check has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from graphshare.arguments import check_call, wrong_type
from graphshare.capture import readable
from graphshare.entry import Entry, View, apply_views
from graphshare.errors import CaptureError
from graphshare.freshness import StateRecord
from graphshare.lease import Staleness, Why
from graphshare.ledger import OwnerBook
from graphshare.owner import Phase
from graphshare.returned import check_returned, check_view, lazy
from graphshare.state import Layout, LayoutChecker, compare, layout_of

if TYPE_CHECKING:
    from graphshare.core import PoolCore

__all__ = ["Capturing"]

_K = TypeVar("_K", bound=Hashable)


@dataclass(eq=False, slots=True)
class _Draft(Generic[_K]):
    """One key of the capture, and how far it has come."""

    key: _K
    owner_key: Hashable
    record: StateRecord
    views: tuple[View, ...]
    borrowed: bool
    committed: bool = False  # the record was captured before this capture began
    warm_state: Any = None
    warm_before: Layout | None = None
    warm_after: Layout | None = None
    captured: bool = False
    view_checker: LayoutChecker | None = None
    entry: Entry[_K] | None = None


class Capturing(Generic[_K]):
    """An engine's own capture loop; made by :meth:`graphshare.GraphPool.capturing`.

    For each key the engine calls ``state(key, Phase.WARMUP)`` and runs its forward eagerly as
    often as it likes, then ``state(key, Phase.CAPTURE)``, captures, and hands over what it got with
    ``commit``.
    """

    def __init__(
        self, pool: PoolCore[_K], keys: Sequence[_K], *, writers: set[_K], replace: bool
    ) -> None:
        self._pool = pool
        self._writers = writers  # the keys whose forward writes its state
        self._replace = replace
        self._open = False
        self._warming: _Draft[_K] | None = None
        self._drafts: dict[_K, _Draft[_K]] = {}
        self._own: dict[Hashable, StateRecord] = {}  # new states, by state key
        self._fixed: dict[int, set[_K]] = {}  # keys captured on a new state, by its number
        self._requested = keys

    @property
    def keys(self) -> tuple[_K, ...]:
        """The keys to capture, largest first."""
        return tuple(self._drafts)

    def state(self, key: _K, phase: Phase) -> Any:
        """Have the state's owner build it for ``key``, check it, and return what this pool sees.

        Args:
            key: One of the keys of this capture.
            phase: ``Phase.WARMUP`` before an eager run, ``Phase.CAPTURE`` before the capture.

        Raises:
            KeyMismatchError: The key is not one of this capture's.
            LazyStateError: A value in the state that the warmup's forward left behind came back.
            AddressChangedError, BakedValueChangedError: A borrowed state is not laid out as its
                lender's graphs baked it in.
            OwnershipError: A ``view`` returned memory that is not the lender's state.
            CaptureError: What came back has no tensor on the pool's device, or one on ``meta`` or
                on another accelerator.
            TypeError, ValueError: The phase is neither of the two.
        """
        draft = self._draft(key, "state")
        if not isinstance(phase, Phase):
            raise wrong_type(
                f"{self._pool.name}: state: phase", "Phase.WARMUP or Phase.CAPTURE", phase
            )
        if phase is Phase.REPLAY:
            raise ValueError(
                f"{self._pool.name}: state: phase: expected Phase.WARMUP or Phase.CAPTURE, got "
                f"{phase}. For a batch there is refresh, after the capture."
            )
        self._look_at_warmup()
        fixed = self._fixed.setdefault(draft.record.serial, set())
        adopt = not draft.committed and fixed <= ({key} if phase is Phase.CAPTURE else set())
        state = draft.record.build(draft.owner_key, None, phase, self._pool.device, adopt=adopt)
        rules = getattr(draft.record.book.owner, "host_values", None)
        if adopt:
            self._check_returned(draft, state, rules, "build")
        if phase is Phase.WARMUP:
            draft.warm_state = state
            draft.warm_before = layout_of(state, self._pool.device, rules)
            draft.warm_after = None
            self._warming = draft
            if key in self._writers:
                draft.record.written_by_forward((self._pool.name, key), None)
        else:
            self._check_lazy(draft, state)
            if not adopt:
                self._check_layout(draft.record, draft.owner_key, state)
            fixed.add(key)
            draft.captured = True
            draft.warm_state = None
        seen = apply_views(draft.views, state)
        if draft.views:
            check_view(state, seen, self._pool.device, refuse=self._pool.refuse, key=draft.key)
            self._check_returned(draft, seen, rules, "view")
            draft.view_checker = LayoutChecker(seen, self._pool.device, rules)
        return seen

    def commit(
        self,
        key: _K,
        launch: Callable[[], object],
        outputs: Any = None,
        *,
        nbytes: int = 0,
        release: Callable[[], object] | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        graph: Any = None,
    ) -> None:
        """Register what was captured for ``key``.

        Args:
            key: One of the keys of this capture.
            launch: Replays the graph, e.g. ``graph.replay``.
            outputs: What ``replay`` shall return; held, so that its memory is not reused.
            nbytes: Memory that the capture added, for the statistics.
            release: Frees the graph; called once.
            forward: For ``recapture``.
            graph: The captured graph, for ``provenance`` and ``rebind``: what the pool's backend
                made, or a ``torch.cuda.CUDAGraph(keep_graph=True)``.

        Raises:
            TypeError: ``launch``, ``release`` or ``forward`` cannot be called, or ``nbytes`` is no
                integer.
            CaptureError: The state was not built for this key just before, or something has
                written over it since.
        """
        draft = self._draft(key, "commit")
        self._look_at_warmup()
        where = f"{self._pool.name}: commit"
        check_call(f"{where}: launch", launch, remedy="Pass graph.replay, without calling it.")
        check_call(f"{where}: release", release, optional=True)
        check_call(f"{where}: forward", forward, optional=True)
        if isinstance(nbytes, bool) or not isinstance(nbytes, int):
            raise wrong_type(f"{where}: nbytes", "a number of bytes", nbytes)
        if not (draft.captured and draft.record.intact):
            raise self._pool.refuse.counted(
                CaptureError(
                    f"{self._pool.name}: commit of a graph",
                    expected="its state built by state(key, Phase.CAPTURE) just before",
                    got="another build since" if draft.captured else "no such build",
                    key=key,
                    consequence="The capture may have run on another key's metadata",
                    remedy="Call state(key, Phase.CAPTURE), capture and commit, key by key",
                )
            )
        draft.captured = False
        if draft.entry is not None and draft.entry.release_graph is not None:
            draft.entry.release_graph()
        draft.entry = Entry(
            key=key,
            owner_key=draft.owner_key,
            record=draft.record,
            views=draft.views,
            borrowed=draft.borrowed,
            view_checker=draft.view_checker,
            launch=launch,
            outputs=outputs,
            graph=readable(graph, outputs, self._pool.device),
            release_graph=release,
            nbytes=nbytes,
            writes_state=key in self._writers,
            forward=forward,
        )

    def protected(self, key: _K) -> list[torch.Tensor]:
        """Return the state's tensors that the forward may not write, for the tape."""
        draft = self._draft(key, "protected")
        if key in self._writers:
            return []
        return draft.record.tensors

    def __enter__(self) -> Capturing[_K]:
        self._pool.begin_capture()
        try:
            # Not earlier: what the pool holds may have changed since capturing() was called.
            self._prepare(self._requested)
        except BaseException:
            self._pool.end_capture()
            raise
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        done = False
        try:
            if kind is None:
                self._look_at_warmup()
                if self._pool.closed:
                    raise self._pool.refuse.closed("the end of a capture")
                self._check_complete()
                self._rebuild_all()
                done = True
        finally:
            self._open = False
            self._pool.end_capture()
            if not done:
                self._abandon()
        if not done:  # the body raised, and its exception goes on
            return
        entries = [draft.entry for draft in self._drafts.values() if draft.entry is not None]
        self._pool.register(entries)

    # Preparation: everything that can be refused before anything is built.

    def _prepare(self, keys: Sequence[_K]) -> None:
        pool = self._pool
        if pool.closed:
            raise pool.refuse.closed("capture")
        holdings = pool.holdings
        holdings.check_keys(keys)
        held = [key for key in keys if holdings.holds(key)]
        if self._replace:
            missing = [key for key in keys if key not in holdings.entries]
            if missing:
                raise holdings.unknown("recapture", missing)
        elif held:
            raise pool.refuse.counted(
                CaptureError(
                    f"{pool.name}: capture of a key that is held",
                    expected="keys that are not captured yet",
                    got=", ".join(map(repr, held)),
                    key=held[0],
                    consequence="Bound replays of the old graph would go on in silence",
                    remedy="Use recapture(keys) to replace, or release them first",
                )
            )
        for key, owner_key, held_record, views, borrowed in pool.sources(
            keys, replace=self._replace
        ):
            record = held_record or self._new_record(key)
            self._drafts[key] = _Draft(
                key, owner_key, record, views, borrowed, committed=held_record is not None
            )

    def _new_record(self, key: _K) -> StateRecord:
        shared_by = self._pool.holdings.state_key(key)
        record = self._own.get(shared_by)
        if record is None:
            record = self._own[shared_by] = self._pool.new_record(key)
        else:
            record.keys.append(key)
        return record

    def _draft(self, key: _K, doing: str) -> _Draft[_K]:
        if not self._open:
            raise RuntimeError(f"{self._pool.name}: {doing} outside the with block of capturing()")
        draft = self._drafts.get(key)
        if draft is None:
            raise self._pool.refuse.unknown_key(f"{doing} in a capture", [key], self.keys[:3])
        return draft

    # Checks.

    def _look_at_warmup(self) -> None:
        """Take the layout that a warmup's forward left, before any build can change it."""
        draft, self._warming = self._warming, None
        if draft is not None:
            rules = getattr(draft.record.book.owner, "host_values", None)
            draft.warm_after = layout_of(draft.warm_state, self._pool.device, rules)

    def _check_lazy(self, draft: _Draft[_K], state: Any) -> None:
        before, after = draft.warm_before, draft.warm_after
        if before is None or after is None:
            return
        left_behind = {each.path for each in compare(before, after)}
        if not left_behind:
            return
        rules = getattr(draft.record.book.owner, "host_values", None)
        now = layout_of(state, self._pool.device, rules)
        still = {each.path for each in compare(after, now)}
        initialised = sorted(left_behind - still)
        if initialised:
            raise lazy(self._pool.refuse, draft.key, initialised[0], before, after)

    def _check_returned(self, draft: _Draft[_K], state: Any, rules: Any, by: str) -> None:
        who = f"{draft.record.pool_name}'s build" if by == "build" else "the loan's view"
        pool = self._pool
        check_returned(state, pool.device, rules, refuse=pool.refuse, key=draft.key, by=who)

    def _check_layout(self, record: StateRecord, key: Hashable, state: Any) -> None:
        checker = record.checker
        if checker is None or checker.matches(state):
            return
        differences = self._pool.differences(record, key, state, "capture")
        if differences:
            by = (record.pool_name, key)
            record.strayed(state, by, self._pool.device)
            record.spoil(Why(Staleness.BUILD_FAILED, by))
            raise self._pool.refuse.layout(key, differences, keys=record.keys, doing="capture")

    def _check_complete(self) -> None:
        missing = [draft.key for draft in self._drafts.values() if draft.entry is None]
        if missing:
            raise self._pool.refuse.counted(
                CaptureError(
                    f"{self._pool.name}: capturing() ended without a graph for every key",
                    expected="a commit for each key",
                    got="none for " + ", ".join(map(repr, missing)),
                    key=missing[0],
                    consequence="Batches of these shapes would silently run eagerly",
                    remedy="Commit every key, or leave it out of capturing(keys)",
                )
            )

    def _rebuild_all(self) -> None:
        """Build every key of the owners once more: a workspace that grew has moved by now."""
        moved: list[tuple[StateRecord, Hashable, Any]] = []
        for record in self._staying():
            joining = (d.owner_key for d in self._drafts.values() if d.record is record)
            for key in dict.fromkeys((*record.keys, *joining)):
                state = record.build(key, None, Phase.CAPTURE, self._pool.device, adopt=False)
                checker = record.checker
                if checker is not None and not checker.matches(state):
                    differences = self._pool.differences(record, key, state, "capture")
                    if differences:
                        record.strayed(state, (record.pool_name, key), self._pool.device)
                        moved.append((record, key, differences))
            self._check_views_of(record)
        if moved:
            record, key, differences = moved[0]
            keys = tuple(each for _, each, _ in moved)
            raise self._pool.refuse.layout(
                key, differences, keys=keys, doing="check after the capture"
            )

    def _check_views_of(self, record: StateRecord) -> None:
        for draft in self._drafts.values():
            if draft.record is record and draft.view_checker is not None:
                seen = apply_views(draft.views, record.state)
                differences = draft.view_checker.differences(seen)
                if differences:
                    raise self._pool.refuse.layout(draft.key, differences, doing="view")

    def _staying(self) -> Iterator[StateRecord]:
        """The captured states of all owners concerned, without those that this one replaces."""
        books: dict[int, OwnerBook] = {}
        for draft in self._drafts.values():
            books[id(draft.record.book)] = draft.record.book
        mine = {id(draft.record) for draft in self._drafts.values()}
        leaving = self._pool.holdings.leaving(self._drafts) if self._replace else set[int]()
        for book in books.values():
            for record in book.records():
                if record.released or record.serial in leaving:
                    continue
                if id(record) in mine or record.leases:
                    yield record

    def _abandon(self) -> None:
        drafts = self._drafts.values()
        for draft in drafts:
            if draft.entry is not None and draft.entry.release_graph is not None:
                draft.entry.release_graph()
            draft.entry = None  # a traceback may keep this object, but no outputs
        for record in self._own.values():
            record.abandon()
        # The old graphs stay, and what all of an owner's builds write may have grown.
        for record in {id(each.record.book): each.record for each in drafts}.values():
            record.ask_again(self._pool.device)
