"""Owners whose states are views of shared arenas, and forwards whose outputs prove what they read.

Every build writes numbers that no other build writes, so a replay that was let through on
anything but the contents of its last refresh gives other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from graphshare import AttentionState, BatchDescriptor, Phase
from tests.property.freshness_model import NOTHING, Cells

TOKENS = (1, 2, 3)
KEYS = [
    BatchDescriptor(num_tokens=n, num_active_loras=loras)
    for n in reversed(TOKENS)
    for loras in (0, 1)
]
ARENA_CELLS = 64
SLOTS = 22  # rows lie before, slots from here on
RESERVE = 46  # where a state goes whose buffers have moved


class BuildError(Exception):
    """What a failing build raises; not an error of graphshare's."""


class ForwardError(Exception):
    """What a failing forward raises."""


class Slice(NamedTuple):
    """Cells of an arena: `arena[start : start + step * length : step]`."""

    arena: int
    start: int
    step: int
    length: int

    @property
    def cells(self) -> Cells:
        end = self.start + self.step * self.length
        return frozenset((self.arena, i) for i in range(self.start, end, self.step))


class Place(NamedTuple):
    """Where one state lies."""

    rows: Slice
    slots: Slice | None
    tail: Slice | None  # written past what is returned

    @property
    def leaves(self) -> list[Slice]:
        return [self.rows] if self.slots is None else [self.rows, self.slots]

    @property
    def reads(self) -> Cells:
        return NOTHING.union(*(leaf.cells for leaf in self.leaves))


@dataclass(frozen=True)
class Plan:
    """How an owner lays its states out; what it says about it, and what it really writes.

    `layout`: every key from the same place on (`prefix`), each key on its own (`apart`), or keys
    interleaved, so that only their extents overlap (`strided`).
    """

    layout: str
    arenas: tuple[int, int]
    bases: tuple[int, int]
    slots: str  # "written", "read" (never by this owner), or "none"
    declares: bool
    tail: bool
    scribbles: bool  # an undeclared owner may write every leaf of every key, and this one does
    by_tokens: bool  # keys of equal num_tokens have one state
    kept: bool  # each build for a key returns one object, whose tensors move in place if they must

    def place(self, state_key: Any) -> Place:
        tokens = state_key if self.by_tokens else state_key.num_tokens
        index = tokens - 1 if self.by_tokens else KEYS.index(state_key)
        one, two = self.bases
        rows = self._slice(self.arenas[0], one, index, tokens)
        slots = None
        if self.slots != "none":
            slots = self._slice(self.arenas[1], SLOTS + two, index, tokens)
            if self.slots == "read":  # one for all keys, among the rows that another owner fills
                slots = Slice(1 - rows.arena, two | 2, 1, 1)
        tail = None
        if self.tail and self.declares:
            tail = Slice(rows.arena, rows.start + rows.step * rows.length, 1, 2)
        return Place(rows, slots, tail)

    def _slice(self, arena: int, base: int, index: int, length: int) -> Slice:
        if self.layout == "prefix":
            return Slice(arena, base, 1, length)
        if self.layout == "apart":
            return Slice(arena, base + 3 * index, 1, length)
        return Slice(arena, base + index % 2 + 6 * (index // 2), 2, length)


@dataclass
class Batch:
    """What a refresh is given."""

    token: int
    fault: str = ""


@dataclass
class Build:
    """One call of `build`."""

    owner: Owner
    key: Any
    phase: Phase
    batch: Batch | None
    wrote: Cells = NOTHING
    returned: Place | None = None
    contents: list[list[int]] = field(default_factory=list)


@dataclass
class Call:
    """One call of a forward."""

    pool: str
    key: Any
    writes: bool


class World:
    """One device's arenas, and the log of all that graphshare called."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.arenas = [torch.zeros(ARENA_CELLS, dtype=torch.int64, device=device) for _ in range(2)]
        self.patterns = {
            n: torch.arange(n, dtype=torch.int64, device=device) for n in (*TOKENS, *range(4, 6))
        }
        self.log: list[Build | Call] = []
        self.token = 0
        self.failing_build: int | None = None  # countdown to a build for a capture that raises
        self.failing_call: int | None = None  # countdown to a forward that fails
        self.failure = "raise"
        self.failed = False

    def tensor(self, part: Slice) -> torch.Tensor:
        end = part.start + part.step * part.length
        return self.arenas[part.arena][part.start : end : part.step]

    def new_token(self) -> int:
        self.token += 1
        return self.token

    def write(self, part: Slice, token: int, index: int) -> None:
        torch.add(self.patterns[part.length], token * 64 + index * 16, out=self.tensor(part))

    def builds(self) -> list[Build]:
        return [event for event in self.log if isinstance(event, Build)]


@dataclass(frozen=True, slots=True)
class Metadata:
    """What an owner returns that keeps its states: nothing in it can be assigned to."""

    rows: torch.Tensor
    none: torch.Tensor
    live: int
    capacity: int
    splits: int


class Owner:
    """Satisfies the `StateOwner` protocol."""

    host_values = {"*.live": "any", "*.capacity": "at_most"}

    def __init__(self, world: World, name: str, plan: Plan) -> None:
        self.world = world
        self.name = name
        self.plan = plan
        self.moved: dict[Any, Place] = {}
        self.once_declared: dict[Any, Cells] = {}  # by state key
        self.may_scribble: Callable[[], Iterable[Slice]] = lambda: ()
        self.counts = {phase.value: 0 for phase in Phase}
        self.kept: dict[Any, AttentionState] = {}

    def __repr__(self) -> str:
        return self.name

    def state_key(self, key: Any) -> Any:
        return key.num_tokens if self.plan.by_tokens else key

    def place(self, key: Any) -> Place:
        state_key = self.state_key(key)
        return self.moved.get(state_key) or self.plan.place(state_key)

    def move(self, key: Any) -> None:
        """Its buffers grow: the state of `key` lies elsewhere from now on, or is back again.

        Not those of an owner that writes past its leaves: what such a build writes elsewhere
        before it is refused, nobody could know.
        """
        if self.plan.tail and self.plan.declares:
            return
        state_key = self.state_key(key)
        if self.moved.pop(state_key, None) is None:
            tokens = key.num_tokens
            slots = self.plan.place(state_key).slots
            self.moved[state_key] = Place(
                Slice(0, RESERVE + 4 * tokens, 1, tokens),
                slots and Slice(1, RESERVE + 4 * tokens, 1, slots.length),
                None,
            )

    def written(self, key: Any) -> list[Slice]:
        place = self.place(key)
        parts = [place.rows]
        if place.slots is not None and self.plan.slots == "written":
            parts.append(place.slots)
        if place.tail is not None:
            parts.append(place.tail)
        return parts

    def declared(self, key: Any) -> Cells | None:
        if not self.plan.declares:
            return None
        return NOTHING.union(*(part.cells for part in self.written(key)))

    def build(self, key: Any, batch: Batch | None, phase: Phase) -> AttentionState:
        world = self.world
        event = Build(self, key, phase, batch)
        world.log.append(event)
        said = self.once_declared.get(self.state_key(key), NOTHING)
        self.once_declared[self.state_key(key)] = said | (self.declared(key) or NOTHING)
        fault = "" if batch is None else batch.fault
        if batch is None and world.failing_build is not None:
            world.failing_build -= 1
            if world.failing_build < 0:
                world.failing_build = None
                world.failed = True
                fault = "raise"
        if fault == "raise":
            raise BuildError
        token = world.new_token() if batch is None else batch.token
        parts = self.written(key)
        if self.plan.scribbles and not self.plan.declares:
            for part in self.may_scribble():
                world.write(part, world.new_token(), 3)
                event.wrote |= part.cells
        for index, part in enumerate(parts):
            world.write(part, token, index)
            event.wrote |= part.cells
        if fault == "raise late":
            raise BuildError
        self.counts[phase.value] += 1
        place = self.place(key)
        event.returned = place
        event.contents = [world.tensor(leaf).tolist() for leaf in place.leaves]
        rows = world.tensor(place.rows)
        read = rows.clone() if fault == "moved" else rows
        slots = None if place.slots is None else world.tensor(place.slots)
        if self.plan.kept and fault not in ("capacity", "splits"):
            return self._kept(key, read, slots)
        capacity = 8 if (batch is None or fault) and not self.plan.kept else 5
        leaves = {
            "rows": read,
            "none": world.arenas[0][:0],
            "live": token,
            "capacity": capacity + (fault == "capacity"),
            "splits": 1 + (fault == "splits"),
        }
        metadata = Metadata(**leaves) if self.plan.kept else leaves
        return AttentionState(metadata, slots if slots is None else (slots,))

    def _kept(self, key: Any, rows: torch.Tensor, slots: torch.Tensor | None) -> AttentionState:
        """The very state of the last build, with its tensors put where they belong."""
        state = self.kept.get(key)
        if state is None:
            none = self.world.arenas[0][:0]
            held = slots if slots is None else (slots.detach(),)
            state = AttentionState(Metadata(rows.detach(), none, 0, 5, 1), held)
            self.kept[key] = state
        state.attn_metadata.rows.set_(rows)
        for mine in state.slot_mappings or ():
            mine.set_(slots)
        return state


class DeclaringOwner(Owner):
    """Says what it writes."""

    def writes(self, key: Any) -> list[torch.Tensor]:
        return [self.world.tensor(part) for part in self.written(key)]


def make_owner(world: World, name: str, plan: Plan) -> Owner:
    return (DeclaringOwner if plan.declares else Owner)(world, name, plan)


# What a consumer may see of a state.


def rows_of(state: Any) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        return state
    found = state.attn_metadata if isinstance(state, AttentionState) else state
    return found.rows if isinstance(found, Metadata) else found["rows"]


def first_row(state: Any) -> torch.Tensor:
    return rows_of(state)[:1]


def metadata(state: Any) -> Any:
    return state.attn_metadata if isinstance(state, AttentionState) else state


VIEWS: dict[str, Callable[[Any], Any] | None] = {
    "all": None,
    "rows": rows_of,
    "first row": first_row,
    "metadata": metadata,
}


def tensors_of(state: Any) -> list[torch.Tensor]:
    slots = state.slot_mappings if isinstance(state, AttentionState) else None
    return [rows_of(state), *(slots or ())]


def seen(contents: list[list[int]], views: Iterable[Callable[[Any], Any]]) -> list[list[int]]:
    """What `tensors_of` gives after the views, as numbers."""
    views = tuple(views)
    found = contents[:1] if views else contents
    return [numbers[:1] for numbers in found] if first_row in views else found


class Forward:
    """`forward(key, state)` of one pool: what it reads, plus an input; it may advance the rows."""

    def __init__(self, world: World, pool: str, given: torch.Tensor, *, writes: bool) -> None:
        self.world = world
        self.pool = pool
        self.input = given
        self.writes = writes

    def __call__(self, key: Any, state: Any) -> tuple[torch.Tensor, ...]:
        world = self.world
        last = world.log[-1]
        world.log.append(Call(self.pool, key, self.writes))
        outputs = tuple(tensor + self.input for tensor in tensors_of(state))
        if self.writes:
            rows_of(state).add_(1)
        if world.failing_call is not None:
            world.failing_call -= 1
            if world.failing_call < 0:
                world.failing_call = None
                self._fail(isinstance(last, Build) and last.phase is Phase.CAPTURE, state)
        return outputs

    def _fail(self, capturing: bool, state: Any) -> None:
        world = self.world
        if world.failure == "raise":
            world.failed = True
            raise ForwardError
        if world.failure == "host":
            world.failed = capturing
            self.input.item()
        elif capturing and not self.writes:
            world.failed = True
            rows_of(state).add_(1)
