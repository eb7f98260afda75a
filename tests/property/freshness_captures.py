"""Captures of a machine's pool, and what the design says of the builds that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from graphshare import (
    AddressChangedError,
    CaptureError,
    GraphPool,
    GraphShareError,
    Phase,
    Staleness,
)
from tests.property import freshness_model as m
from tests.property.freshness_world import (
    Build,
    BuildError,
    Call,
    Forward,
    ForwardError,
    Owner,
    World,
    rows_of,
    tensors_of,
)

if TYPE_CHECKING:
    from tests.property.freshness_machine import Machine


class AbortedError(Exception):
    """An engine's own capture loop gave up."""


class Used:
    """A pool of graphshare's beside its model."""

    def __init__(self, real: GraphPool[Any], model: m.Pool, world: World) -> None:
        self.real = real
        self.model = model
        self.given = torch.zeros(1, dtype=torch.int64, device=world.device)
        self.forwards = [
            Forward(world, model.name, self.given, writes=writes) for writes in (False, True)
        ]


def attempt(
    used: Used, call: Callable[[], Any], *errors: type[BaseException]
) -> tuple[Any, BaseException | None]:
    """Call, and count what graphshare refuses as its statistics should."""
    try:
        return call(), None
    except GraphShareError as error:
        used.model.refused(error)
        return None, error
    except errors as error:
        return None, error


def same_error(error: BaseException | None, expected: Iterable[type[BaseException]]) -> None:
    expected = tuple(expected)
    if expected:
        assert isinstance(error, expected), f"expected one of {expected}, got {error!r}"
    else:
        assert error is None, f"expected none, got {error!r}"


def check_capture(
    machine: Machine,
    used: Used,
    keys: list[Any],
    *,
    writes: bool = False,
    replace: bool = False,
    engine_made: bool = False,
    aborts: bool = False,
    everything: bool = False,
) -> None:
    """Capture or recapture; see what was built, in which order, and what came of it."""
    world, pool, model = machine.world, used.model, machine.model
    sources, refused = model.sources(pool, keys, replace=replace)
    writing = dict.fromkeys(keys, writes)
    if replace and not engine_made:
        writing.update((key, pool.entries[key].writes) for key in keys if key in pool.entries)
    if engine_made:
        call = _engine_loop(used, world, keys, writes=writes, replace=replace, aborts=aborts)
    elif replace:
        call = _recapture(used, keys, everything=everything)
    else:
        call = _capture(used, keys, writes=writes)
    world.log.clear()
    world.failed = False
    _, error = attempt(used, call, BuildError, ForwardError, AbortedError)
    failed = world.failed
    world.failing_build = world.failing_call = None
    if refused:
        same_error(error, refused)
        assert not world.log, "something was built before the refusal"
        return
    moved = _moved(model, pool, sources, replace=replace)
    _spread(model, pool, world, sources)
    if failed:
        engine = (ForwardError,) if engine_made else ()
        same_error(error, (CaptureError, BuildError, *engine))
    elif moved:
        same_error(error, (AddressChangedError, AbortedError) if aborts else (AddressChangedError,))
    elif aborts:
        same_error(error, (AbortedError,))
    else:
        same_error(error, ())
        _check_order(world, sources, writing)
        model.register(pool, sources, _record, writing, engine_made=engine_made)
        _check_rebuilt(model, world, sources)


def _capture(used: Used, keys: list[Any], *, writes: bool) -> Callable[[], None]:
    return lambda: used.real.capture(keys, used.forwards[writes], writes_state=writes)


def _recapture(used: Used, keys: list[Any], *, everything: bool) -> Callable[[], None]:
    entries = used.model.entries
    forward = None
    if any(key in entries and entries[key].engine_made for key in keys):
        forwards = {key: used.forwards[entry.writes] for key, entry in entries.items()}
        forward = lambda key, state: forwards[key](key, state)  # noqa: E731
    return lambda: used.real.recapture(None if everything else keys, forward)


def _engine_loop(
    used: Used, world: World, keys: list[Any], *, writes: bool, replace: bool, aborts: bool
) -> Callable[[], None]:
    def run() -> None:
        with used.real.capturing(keys, writes_state=writes, replace=replace) as capturing:
            for key in capturing.keys:
                used.forwards[writes](key, capturing.state(key, Phase.WARMUP))
            for key in capturing.keys:
                state = capturing.state(key, Phase.CAPTURE)
                world.log.append(Call(used.model.name, key, writes))
                launch, outputs = _eager_graph(state, used.given, writes=writes)
                capturing.commit(key, launch, outputs)
            if aborts:
                raise AbortedError

    return run


def _eager_graph(
    state: Any, given: torch.Tensor, *, writes: bool
) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """What an engine might have captured by itself."""
    # As they lie now: an owner that keeps its states may put their tensors elsewhere.
    rows, read = rows_of(state).detach(), [tensor.detach() for tensor in tensors_of(state)]
    outputs = [torch.zeros_like(tensor) for tensor in read]

    def launch() -> None:
        for tensor, output in zip(read, outputs, strict=True):
            torch.add(tensor, given, out=output)
        if writes:
            rows.add_(1)

    return launch, outputs


def _record(pool: m.Pool, owner: Owner, key: Any) -> m.Record:
    place = owner.place(key)
    return m.Record(owner, pool, place, place.reads, place.rows.cells, owner.declared(key))


def _moved(model: m.Model, pool: m.Pool, sources: list[m.Source], *, replace: bool) -> bool:
    """Whether a state that a graph stays on is no longer where it was captured."""
    owners = {id(source.owner) for source in sources}
    going = {source.key for source in sources if not source.borrowed} if replace else set()
    return any(
        any(record.place != record.owner.place(key) for key in record.keys)
        for record in model.records
        if id(record.owner) in owners
        and not (record.pool is pool and going.issuperset(record.keys))
    )


def _spread(model: m.Model, pool: m.Pool, world: World, sources: list[m.Source]) -> None:
    """Rule 2 for all builds of a capture, rule 5 for its warmups; the log says what ran."""
    causes = [m.Cause(Staleness.OVERWRITTEN), m.Cause(Staleness.BUILT_FOR_CAPTURE)]
    mine = {source.record for source in sources}  # besides those that are replaced
    own = {source.key for source in sources if not source.borrowed}
    built: dict[int, m.Cells] = {}
    place = None
    for event in world.log:
        if isinstance(event, Call):
            if event.writes and place is not None:
                wrote = [m.Cause(Staleness.FORWARD_WROTE), *causes]
                model.overwrite(place.rows.cells, wrote, maybe=place.reads)
            continue
        owner, place = event.owner, event.returned
        declared = owner.declared(event.key)
        cells = model.footprint(owner, declared) | event.wrote
        returned = m.NOTHING if place is None else place.reads
        if declared is None:
            returned |= built.get(id(owner), m.NOTHING)
            built[id(owner)] = returned
            cells |= returned
        same = [
            record
            for record in model.owned(owner)
            if owner.state_key(event.key) in {owner.state_key(key) for key in record.keys}
        ]
        # It may be asked again what it writes, or not.
        maybe = owner.once_declared[owner.state_key(event.key)]
        if owner.moved:
            maybe |= returned
        model.overwrite(cells, causes, maybe=maybe)
        for record in same:
            # Where a state that is to be replaced moved, its old memory may still be good.
            known = record in mine or (record.pool is pool and own & set(record.keys))
            known = known and record.place == owner.place(event.key)
            found = record.causes if known else record.maybe
            found.update(causes)
            if place != record.place:  # it raised, or came out elsewhere
                found.add(m.Cause(Staleness.BUILD_FAILED))


def _check_order(world: World, sources: list[m.Source], writing: dict[Any, bool]) -> None:
    """Every key warmed up, largest first, then captured, each on a state built just before."""
    by_key = {source.key: source for source in sources}
    calls: dict[Phase, list[Any]] = {Phase.WARMUP: [], Phase.CAPTURE: []}
    for before, event in zip(world.log, world.log[1:]):  # noqa: B905
        if not isinstance(event, Call):
            continue
        assert isinstance(before, Build), "a forward on a state that was not just built"
        source = by_key[event.key]
        assert event.writes is writing[event.key]
        assert before.owner is source.owner
        keys = [source.key] if source.record is None else source.record.keys
        assert before.owner.state_key(before.key) in {before.owner.state_key(k) for k in keys}
        calls[before.phase].append(event.key)
    for phase, keys in calls.items():
        assert set(keys) == set(by_key), phase
        sizes = [key.num_tokens for key in keys]
        assert sizes == sorted(sizes, reverse=True), phase


def _check_rebuilt(model: m.Model, world: World, sources: list[m.Source]) -> None:
    """At the end every key of the owners was built once more."""
    last = max(i for i, event in enumerate(world.log) if isinstance(event, Call))
    rebuilt = [
        (event.owner, event.key) for event in world.log[last + 1 :] if isinstance(event, Build)
    ]
    for record in model.records:
        if any(record.owner is source.owner for source in sources):
            record.causes.add(m.Cause(Staleness.BUILT_FOR_CAPTURE))
            record.causes.add(m.Cause(Staleness.OVERWRITTEN))
            for key in record.keys:
                assert (record.owner, key) in rebuilt, f"{key} was not built at the end"
