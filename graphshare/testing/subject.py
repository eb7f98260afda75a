"""The owner under test: calls its ``build``, and compares whatever comes back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphshare.memory import MemoryRanges, plain_tensors
from graphshare.owner import Phase
from graphshare.state import HostLeaf, LayoutChecker, LayoutDifference, layout_of, walk
from graphshare.state.nest import labelled, unroll
from graphshare.state.nodes import is_on
from graphshare.state.rules import RuleSet
from graphshare.testing.memory import Leaf
from graphshare.testing.paths import matches
from graphshare.testing.report import Findings
from graphshare.testing.returned import misreturned
from graphshare.verification import _live_rows as live_rows_of
from graphshare.verification import rows_by_size

__all__ = ["Captured", "Deviation", "Rows", "Subject"]


class Rows(NamedTuple):
    """How many leading rows of a leaf a batch uses.

    Attributes:
        least: So many for certain.
        most: No more than these.
    """

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Captured:
    """What the first build for a capture returned for one key.

    Attributes:
        checker: Compares later builds with it.
        leaves: Its tensors on the device, each place once, without those under the rule ``any``.
        reads: Their memory.
        host: Paths of its host values.
        state: The state itself.
    """

    checker: LayoutChecker
    leaves: tuple[Leaf, ...]
    reads: MemoryRanges
    host: frozenset[str]
    state: Any


class Deviation(NamedTuple):
    """A build that did not return what was captured.

    Attributes:
        key: The key.
        phase: Why it was built.
        batch: Index of the batch, ``None`` without one.
        difference: How it differs.
        late: Whether the tensor lies in memory that no build had returned before the captures.
    """

    key: Hashable
    phase: Phase
    batch: int | None
    difference: LayoutDifference
    late: bool


@dataclass(slots=True)
class Subject:
    """An owner, what to build with it, and what has come of it so far.

    Attributes:
        owner: The owner.
        keys: Largest first.
        batches: Of each key.
        impossible: Of each key, batches that it must refuse.
        device: Where its states lie.
        rules: Its ``host_values``, if they are valid.
        forward: What a warmup runs, or ``None``.
        scratch: Patterns of leaves whose contents only a kernel library knows.
        bounds: Pattern to the least and the most that an element may be; the first that names a
            leaf holds for it.
        seeks_device: Whether the first tensor decides about the device.
        findings: What has been found.
        captured: By key; a key whose captures fail is not there.
        deviations: Everything that was not as captured.
        overwritten: By key, what its builds wrote of any state.
        row_patterns: Every pattern that the owner's ``live_rows`` has given.
        num_builds: Calls of ``build``.
    """

    owner: Any
    keys: tuple[Hashable, ...]
    batches: Mapping[Hashable, Sequence[Any]]
    impossible: Mapping[Hashable, Sequence[Any]]
    device: torch.device
    rules: Mapping[str, str] | None
    forward: Callable[[Any, Any], Any] | None
    scratch: tuple[str, ...]
    bounds: Mapping[str, tuple[float, float]]
    seeks_device: bool
    findings: Findings = field(default_factory=Findings)
    captured: dict[Hashable, Captured] = field(default_factory=dict[Hashable, Captured])
    deviations: list[Deviation] = field(default_factory=list[Deviation])
    overwritten: dict[Hashable, MemoryRanges] = field(default_factory=dict[Hashable, MemoryRanges])
    row_patterns: dict[str, None] = field(default_factory=dict[str, None])
    num_builds: int = 0
    _alive: list[Any] = field(default_factory=list[Any])
    _early: set[int] = field(default_factory=set[int])

    def call(self, key: Hashable, batch: Any, phase: Phase) -> Any:
        """Call the owner, as a pool does; whatever it raises is raised."""
        self.num_builds += 1
        return self.owner.build(key, batch, phase)

    def build(self, key: Hashable, index: int | None, phase: Phase, *, keep: bool = True) -> Any:
        """Build, and compare with what was captured, unless it is for a warmup.

        Args:
            key: The key.
            index: Of the batch; ``None`` for a warmup or capture.
            phase: Why.
            keep: Hold the state, so that no later tensor can take the address of one of its own.

        Returns:
            The state; ``None`` if the build failed or gave none, which is then among the findings.
        """
        batch = None if index is None else self.batches[key][index]
        try:
            state = self.call(key, batch, phase)
        except Exception as error:  # noqa: BLE001 - whatever an owner raises is a finding
            self.findings.reject(
                "build",
                f"build for {phase.name}",
                "a state",
                f"{type(error).__name__}: {error}",
                key=key,
                batch=index,
            )
            return None
        if state is None:
            self._reject_state(key, index, phase, "None")
            return None
        if self.seeks_device:
            self._find_device(state)
        if keep:
            # An owner may return one object each time, so its tensors are held too.
            self._alive.append((state, [tensor for _, tensor, _ in self._tensors(state)]))
        try:
            if key not in self.captured and self._holds_what_it_must_not(state, key, index, phase):
                return None
            self._look(state, key, index, phase)
        except (TypeError, ValueError) as error:  # no address, or no end of leaves
            self.findings.reject(
                "layout",
                "the state",
                "strided tensors and host values",
                str(error),
                key=key,
                batch=index,
                remedy="Return only what the forward reads",
            )
            return None
        return state

    def _look(self, state: Any, key: Hashable, index: int | None, phase: Phase) -> None:
        captured = self.captured.get(key)
        if captured is None:
            tensors = (value for _, value in walk(state) if isinstance(value, torch.Tensor))
            if not any(is_on(tensor.device, self.device) for tensor in tensors):
                self._reject_state(key, index, phase, f"{type(state).__name__} without any")
            layout_of(state, self.device, self.rules)
            self._early.update(
                leaf.tensor.untyped_storage().data_ptr() for leaf in self.leaves(state)
            )
        elif phase is not Phase.WARMUP and not captured.checker.matches(state):
            self._compare(captured, state, key, index, phase)

    def _holds_what_it_must_not(
        self, state: Any, key: Hashable, index: int | None, phase: Phase
    ) -> bool:
        found = misreturned(state, self.device, self.rules)
        if found is not None:
            self.findings.reject(
                "state",
                found.path or "the state",
                found.expected,
                f"{found.got} from a build for {phase.name}",
                key=key,
                path=found.path,
                batch=index,
                remedy=found.remedy,
            )
        return found is not None

    def _reject_state(self, key: Hashable, index: int | None, phase: Phase, got: str) -> None:
        self.findings.reject(
            "state",
            "what build returns",
            f"tensors on {self.device}",
            f"{got} from a build for {phase.name}",
            key=key,
            batch=index,
        )

    def _find_device(self, state: Any) -> None:
        tensors = [value for _, value in walk(state) if isinstance(value, torch.Tensor)]
        places = [tensor.device for tensor in tensors if not tensor.is_meta]
        if places:
            self.device = next((place for place in places if place.type != "cpu"), places[0])
            self.seeks_device = False

    def _compare(
        self, captured: Captured, state: Any, key: Hashable, index: int | None, phase: Phase
    ) -> None:
        found = captured.checker.differences(state)
        if not found:
            return
        tensors = {path: tensor for path, tensor, _ in self._tensors(state)}
        for difference in found:
            tensor = tensors.get(difference.path)
            late = tensor is not None and tensor.untyped_storage().data_ptr() not in self._early
            self.deviations.append(Deviation(key, phase, index, difference, late))

    def capture(self, key: Hashable) -> Any:
        """Build for a capture, and take what comes for what graphs bake in."""
        state = self.build(key, None, Phase.CAPTURE)
        if state is not None:
            checker = LayoutChecker(state, self.device, self.rules)
            leaves = self.leaves(state)
            self.captured[key] = Captured(
                checker,
                leaves,
                MemoryRanges.of(leaf.tensor for leaf in leaves),
                frozenset(
                    leaf.path for leaf in checker.layout.leaves if isinstance(leaf, HostLeaf)
                ),
                state,
            )
        return state

    def leaves(self, state: Any) -> tuple[Leaf, ...]:
        """The tensors of a state that graphs read, each place under its first path."""
        places: dict[Any, Leaf] = {}
        for path, tensor, rule in self._tensors(state):
            if rule != "any":
                place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
                places.setdefault(place, Leaf(path, tensor))
        return tuple(places.values())

    def _tensors(self, state: Any) -> Iterator[tuple[str, torch.Tensor, str]]:
        with plain_tensors():
            for path, value, rule in unroll(state, labelled, RuleSet(self.rules)):
                if isinstance(value, torch.Tensor) and is_on(value.device, self.device):
                    yield path, value, rule

    def steady(self, key: Hashable) -> list[Leaf]:
        """The leaves of a key that have stayed where they were captured, without scratch."""
        moved = {d.difference.path for d in self.deviations if d.key == key}
        return [
            leaf
            for leaf in self.captured[key].leaves
            if leaf.path not in moved and not matches(leaf.path, self.scratch)
        ]

    def replays(self, key: Hashable) -> range:
        """Indices of the batches of a key."""
        return range(len(self.batches.get(key, ())))

    def bound_of(self, path: str) -> str | None:
        """The pattern of ``bounds`` that holds for a leaf, if one does."""
        return next((each for each in self.bounds if matches(path, [each])), None)

    def live_rows(self, key: Hashable, index: int, leaf: Leaf) -> tuple[int | None, bool]:
        """Leading rows of a leaf that a batch uses, ``None`` if unknown; whether that is declared.

        What the owner does not declare is found by size.
        """
        batch = self.batches[key][index]
        declared = self.declared_rows(key, index)
        rows = live_rows_of(leaf.path, leaf.tensor, declared, None, None)
        if rows is not None:
            return rows, True
        return live_rows_of(leaf.path, leaf.tensor, {}, key, batch), False

    def certain_rows(self, key: Hashable, index: int, leaf: Leaf) -> Rows | None:
        """The same with nothing taken for live, or for padding, that may be the other.

        By size a leaf may have a row for each request or for each token; ``None`` if unknown.
        """
        if leaf.tensor.ndim == 0:
            return Rows(1, 1)
        rows, declared = self.live_rows(key, index, leaf)
        if rows is None or declared:
            return None if rows is None else Rows(rows, rows)
        found = rows_by_size(leaf.tensor.shape[0], key, self.batches[key][index])
        return Rows(min(found), max(found))

    def declared_rows(self, key: Hashable, index: int) -> Mapping[str, int]:
        """What the owner's ``live_rows`` says of a batch; a finding if that cannot be."""
        declared = getattr(self.owner, "live_rows", None)
        if declared is None:
            return {}
        try:
            rows = dict(declared(key, self.batches[key][index]))
        except Exception as error:  # noqa: BLE001 - whatever an owner raises is a finding
            self._misdeclared("live_rows", f"{type(error).__name__}: {error}", key)
            return {}
        for pattern, count in rows.items():
            if not isinstance(pattern, str):
                self._misdeclared("live_rows", f"the pattern {pattern!r}", key)
                return {}
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                self._misdeclared("live_rows", f"{count!r} for {pattern!r}", key)
                return {}
        self.row_patterns.update(dict.fromkeys(rows))
        return rows

    def declared_writes(self, key: Hashable) -> MemoryRanges | None:
        """What the owner says that a build for a key may write; ``None`` if it says nothing."""
        writes = getattr(self.owner, "writes", None)
        if writes is None:
            return None
        try:
            written = list(writes(key))
            other = [each for each in written if not isinstance(each, torch.Tensor)]
            if other:
                self._misdeclared("writes", type(other[0]).__name__, key)
                return None
            return MemoryRanges.of(t for t in written if is_on(t.device, self.device))
        except Exception as error:  # noqa: BLE001 - whatever an owner raises is a finding
            self._misdeclared("writes", f"{type(error).__name__}: {error}", key)
            return None

    def _misdeclared(self, name: str, got: str, key: Hashable) -> None:
        expected = {"live_rows": "row counts by path pattern", "writes": "tensors"}[name]
        self.findings.reject("protocol", name, expected, got, key=key)
