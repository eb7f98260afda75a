"""What every machine of `test_freshness_machine.py` is made of: a world of pools, and the rules.

Each rule calls graphshare, asks the model what must happen, and compares: the error's type and
rule, the numbers that a replay gave, which builds and forwards ran, and what is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graphshare import (
    AddressChangedError,
    BakedValueChangedError,
    GraphPool,
    OwnershipError,
    Phase,
    ReleasedStateError,
    SharedStates,
    Staleness,
    StaleStateError,
    share_states,
)
from tests.property import freshness_model as m
from tests.property.freshness_captures import Used, attempt, check_capture, same_error
from tests.property.freshness_world import (
    KEYS,
    VIEWS,
    Batch,
    Build,
    BuildError,
    Owner,
    Plan,
    World,
    make_owner,
    seen,
)

WHENS: dict[str, Callable[[Any], bool]] = {
    "always": lambda key: True,
    "without LoRA": lambda key: key.num_active_loras == 0,
    "several tokens": lambda key: key.num_tokens > 1,
}


def drop_loras(key: Any) -> Any:
    return KEYS[KEYS.index(key) & ~1]


MAPS: dict[str, Callable[[Any], Any] | None] = {
    "same": None,
    "without LoRA": drop_loras,
    "other LoRA": lambda key: KEYS[KEYS.index(key) ^ 1],
}

pools = st.integers(0, 3)
picks = st.integers(0, 23)
key_sets = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=3, unique=True)

plans = st.builds(
    Plan,
    layout=st.sampled_from(["apart", "prefix", "strided", "apart"]),
    arenas=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    bases=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    slots=st.sampled_from(["none", "written", "read", "read"]),
    declares=st.sampled_from([True, True, False]),
    tail=st.booleans(),
    scribbles=st.booleans(),
    by_tokens=st.booleans(),
    kept=st.booleans(),
)


class Share:
    """A loan of graphshare's beside its model."""

    def __init__(self, real: SharedStates[Any, Any], loan: m.Loan, consumer: Used) -> None:
        self.real = real
        self.loan = loan
        self.consumer = consumer


class Machine(RuleBasedStateMachine):
    """Sets a world up; knows refresh, replay and invalidate."""

    backend = "tape"
    device = "cpu"
    max_owners = 3
    loans = "some"  # "none", "some", or "all": which of the later pools borrow

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.device)
        self.model = m.Model()
        self.used: list[Used] = []
        self.shares: list[Share] = []
        self.handles: list[tuple[Used, m.Entry, Any]] = []
        self.uncounted: set[str] = set()  # owners of pools that are gone, with what they counted

    # Setting up.

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        draw = data.draw
        owners = [
            make_owner(self.world, f"owner{i}", plan)
            for i, plan in enumerate(draw(st.lists(plans, min_size=1, max_size=self.max_owners)))
        ]
        for owner in owners:
            owner.may_scribble = self._leaves_of(owner)
        for index in range(draw(st.integers(2, 4))):
            self._make_pool(draw, index, owners)
        for used in self.used:
            keys = [KEYS[i] for i in draw(key_sets)]
            loan = used.model.loan
            if loan is not None and draw(st.integers(0, 3)):  # mostly what the lender has
                keys = [k for k in KEYS if not loan.when(k) or loan.lender.find(loan.key(k))][:3]
            writes = draw(st.integers(0, 2)) < (2 if self.loans == "none" else 1)
            if keys:
                check_capture(self, used, keys, writes=writes)

    def _leaves_of(self, owner: Owner) -> Callable[[], list[Any]]:
        return lambda: [leaf for r in self.model.owned(owner) for leaf in r.place.leaves]

    def _make_pool(self, draw: Any, index: int, owners: list[Owner]) -> None:
        borrows = index > 0 and {
            "none": False,
            "all": True,
            "some": draw(st.booleans()) if self.loans == "some" else None,
        }.get(self.loans, False)
        owner = None
        if not borrows or draw(st.booleans()):
            owner = owners[draw(st.integers(0, len(owners) - 1))]
        lender = self.used[draw(st.integers(0, index - 1))] if borrows else None
        state_key = None
        if owner is not None and owner.plan.by_tokens and lender is None:
            state_key = owner.state_key
        live_keys = draw(st.sampled_from([1, 2]))
        limit = draw(st.sampled_from([1, 2, None]))
        name = f"pool{index}"
        real: GraphPool[Any] = GraphPool(
            name,
            owner=owner,
            device=self.device,
            backend=self.backend,
            state_key=state_key,
            live_keys=live_keys,
            replays_per_refresh=limit,
            checks=draw(st.sampled_from(["fast", "strict"])),
        )
        model = m.Pool(name, owner, live_keys, limit, state_key)
        self.model.pools.append(model)
        used = Used(real, model, self.world)
        self.used.append(used)
        if lender is not None:
            when = draw(st.sampled_from(sorted(WHENS))) if owner is not None else "always"
            view = draw(st.sampled_from(["all", *sorted(VIEWS)]))
            key = draw(st.sampled_from(sorted(MAPS)))
            self.lend(lender, used, when, view, key)

    def lend(self, lender: Used, consumer: Used, when: str, view: str, key: str) -> None:
        real = share_states(
            lender.real, consumer.real, key=MAPS[key], view=VIEWS[view], when=WHENS[when]
        )
        mapped = MAPS[key] or (lambda own: own)
        loan = m.Loan(lender.model, mapped, VIEWS[view], WHENS[when])
        consumer.model.loan = loan
        self.shares.append(Share(real, loan, consumer))

    # Choosing.

    def pool(self, index: int) -> Used:
        return self.used[index % len(self.used)]

    def key(self, used: Used, pick: int) -> Any:
        """A key, mostly one that is captured."""
        held = [*used.model.entries] * 3
        choice = [*held, KEYS[pick % len(KEYS)]]
        return choice[pick % len(choice)]

    # Comparing.

    @invariant()
    def counted(self) -> None:
        for used in self.used:
            found, model = used.real.statistics(), used.model
            surely, perhaps = self.model.fresh(model)
            assert surely <= set(found.fresh) <= surely | perhaps, (
                f"{model.name}: fresh {found.fresh}, expected {surely}, perhaps {perhaps}"
            )
            assert found.captures == model.captures, model.name
            assert found.refreshes == model.refreshes, model.name
            assert found.replays == model.replays, model.name
            assert found.builds_avoided == model.builds_avoided, model.name
            assert dict(found.refusals) == model.refusals, model.name
            alive = {key for key, entry in model.entries.items() if not entry.dead}
            assert alive <= set(used.real.keys()) <= set(model.entries), model.name
        self._builds_counted()

    def _builds_counted(self) -> None:
        totals: dict[str, dict[str, int]] = {}
        owners: dict[str, Owner] = {}
        for used in self.used:
            owner = used.model.owner
            if owner is None or owner.name in self.uncounted:
                continue
            owners[owner.name] = owner
            total = totals.setdefault(owner.name, dict.fromkeys(owner.counts, 0))
            for phase, count in used.real.statistics().builds.items():
                total[phase] += count
        for name, total in totals.items():
            assert total == owners[name].counts, name

    def teardown(self) -> None:
        for used in self.used:
            for key in [*used.model.entries, KEYS[0]]:
                self.check_replay(used, key, 7)

    # Refreshes and replays.

    def check_replay(self, used: Used, key: Any, given: int, *, copy: bool = False) -> None:
        expected = self.model.replay(used.model, key)
        used.given.fill_(given)
        self.world.log.clear()
        outputs, error = attempt(used, lambda: used.real.replay(key, copy=copy))
        self.check_replayed(used, key, given, expected, outputs, error)

    def check_replayed(
        self,
        used: Used,
        key: Any,
        given: int,
        expected: m.Expected,
        outputs: Any,
        error: BaseException | None,
    ) -> None:
        assert not self.world.log, "a replay ran Python"
        if error is None:
            assert not expected.errors or expected.may_pass, (
                f"{used.model.name}: replay of {key} was let through: {expected}"
            )
            entry = used.model.entries[key]
            assert outputs is not None
            numbers = [tensor.tolist() for tensor in outputs]
            contents = seen(entry.record.contents, entry.views)
            assert numbers == [[each + given for each in part] for part in contents]
            self.model.replayed(used.model, entry)
            return
        same_error(error, expected.errors)
        if isinstance(error, StaleStateError):
            assert error.rule in expected.rules, f"{error.rule} is not of {expected.rules}"
            assert error.key == key
            if error.rule == Staleness.OVERWRITTEN and None not in expected.written_by:
                assert error.written_by in expected.written_by
            if expected.may_pass:
                self.model.was_stale(used.model, key)

    @rule(index=pools, pick=picks, given=st.integers(0, 9), copy=st.booleans())
    def replay(self, index: int, pick: int, given: int, copy: bool) -> None:
        used = self.pool(index)
        self.check_replay(used, self.key(used, pick), given, copy=copy)

    @rule(index=pools, pick=picks)
    def bind(self, index: int, pick: int) -> None:
        used = self.pool(index)
        key = self.key(used, pick)
        handle, error = attempt(used, lambda: used.real.bind(key))
        entry = used.model.entries.get(key)
        if entry is None:
            same_error(error, self.model.replay(used.model, key).errors)
        elif error is None:
            assert handle.key == key
            self.handles.append((used, entry, handle))
        else:
            same_error(error, (ReleasedStateError,) if entry.dead else ())

    @rule(
        calls=st.lists(
            st.tuples(st.sampled_from(["refresh", "refresh", "replay", "fresh"]), pools, picks),
            min_size=3,
            max_size=12,
        )
    )
    def serve(self, calls: list[tuple[str, int, int]]) -> None:
        """Steps as an engine makes them: mostly keys that it may refresh or replay."""
        for call, index, pick in calls:
            used = self.pool(index)
            entries = used.model.entries
            if call == "refresh":
                keys = [key for key, entry in entries.items() if not entry.borrowed]
            elif call == "fresh":
                keys = sorted(self.model.fresh(used.model)[0], key=KEYS.index)
            else:
                keys = list(entries)
            if not keys:
                continue
            key = keys[pick % len(keys)]
            if call == "refresh":
                self.check_refresh(used, key)
            else:
                self.check_replay(used, key, pick)
            self.counted()

    @rule(chosen=st.permutations(range(4)), pick=picks, times=st.integers(1, 2))
    def step(self, chosen: list[int], pick: int, times: int) -> None:
        """Each pool refreshes a key of its own, then each replays what it may."""
        for index in chosen:
            if index < len(self.used):
                used = self.used[index]
                keys = [k for k, entry in used.model.entries.items() if not entry.borrowed]
                if keys:
                    self.check_refresh(used, keys[pick % len(keys)])
        for index in reversed(chosen * times):
            if index < len(self.used):
                used = self.used[index]
                for key in sorted(self.model.fresh(used.model)[0], key=KEYS.index):
                    self.check_replay(used, key, pick)

    @precondition(lambda self: self.handles)
    @rule(pick=picks, given=st.integers(0, 9))
    def replay_bound(self, pick: int, given: int) -> None:
        used, entry, handle = self.handles[pick % len(self.handles)]
        key = entry.key
        expected = m.Expected((ReleasedStateError,))
        if used.model.entries.get(key) is entry:
            expected = self.model.replay(used.model, key)
        used.given.fill_(given)
        self.world.log.clear()
        outputs, error = attempt(used, handle.replay)
        self.check_replayed(used, key, given, expected, outputs, error)

    @rule(index=pools, pick=picks)
    def refresh(self, index: int, pick: int) -> None:
        used = self.pool(index)
        self.check_refresh(used, self.key(used, pick))

    def check_refresh(self, used: Used, key: Any, fault: str = "") -> None:
        world, pool, model = self.world, used.model, self.model
        entry = pool.entries.get(key)
        moved = entry is not None and pool.owner and entry.record.place != pool.owner.place(key)
        batch = Batch(world.new_token(), "raise" if moved and fault == "raise late" else fault)
        world.log.clear()
        _, error = attempt(used, lambda: used.real.refresh(key, batch), BuildError)
        if entry is None or entry.borrowed:
            same_error(
                error,
                model.replay(pool, key).errors
                if entry is None
                else (OwnershipError, ReleasedStateError)
                if entry.dead
                else (OwnershipError,),
            )
            assert not world.log, "a refused refresh built"
            return
        record = entry.record
        (build,) = world.builds()
        assert build.owner is record.owner
        assert build.phase is Phase.REPLAY
        assert build.batch is batch
        assert build.owner.state_key(build.key) == build.owner.state_key(key)
        self.built(build, record, (pool.name, key))
        if batch.fault.startswith("raise"):
            same_error(error, (BuildError,))
        elif moved or fault == "moved":
            changed = {AddressChangedError}
            if fault in ("capacity", "splits"):
                changed.add(BakedValueChangedError)
            same_error(error, changed)
        elif fault:
            same_error(error, (BakedValueChangedError,))
            assert error.path == f"attn_metadata.{fault}"
            assert error.rule == ("at_most" if fault == "capacity" else "equal")
        else:
            same_error(error, ())
            model.refreshed(pool, record, build.contents, batch.token)
            return
        if isinstance(error, AddressChangedError):
            assert error.field == "address"
            assert error.path in ("attn_metadata.rows", "slot_mappings.0")
            assert key in error.keys
        record.causes.add(m.Cause(Staleness.BUILD_FAILED, (pool.name, key)))

    def built(self, build: Build, record: m.Record | None, by: m.By) -> None:
        """Rule 2, for a build outside a capture; `record` is its own state, if captured."""
        owner = build.owner
        maybe = owner.once_declared[owner.state_key(build.key)]
        cells = m.NOTHING  # by what the owner says: where it moved, it was not asked yet
        if not owner.plan.declares or record is None or record.place == owner.place(build.key):
            cells = self.model.footprint(owner, owner.declared(build.key))
        returned = m.NOTHING if build.returned is None else build.returned.reads
        if record is None or build.returned != record.place:
            maybe |= returned
        if not owner.plan.declares:
            cells |= returned
        cells |= build.wrote
        cause = m.Cause(Staleness.OVERWRITTEN, by)
        self.model.overwrite(cells, [cause], but=[record] if record else [], maybe=maybe)

    @rule(index=pools, pick=picks, none=st.integers(0, 3))
    def invalidate(self, index: int, pick: int, none: int) -> None:
        used = self.pool(index)
        pool = used.model
        key = self.key(used, pick) if none else None
        _, error = attempt(used, lambda: used.real.invalidate(key))
        if key is None:
            entries = list(pool.entries.values())
        elif key in pool.entries:
            entries = [pool.entries[key]]
        else:
            same_error(error, self.model.replay(pool, key).errors)
            return
        same_error(error, ())
        for entry in entries:
            owner, names = entry.record.owner, entry.record.names
            once = [owner.once_declared[owner.state_key(name)] for name in names]
            self.model.invalidate(entry, (pool.name, entry.key), m.NOTHING.union(*once))

    @precondition(lambda self: self.shares)
    @rule(pick=picks)
    def live_key(self, pick: int) -> None:
        share = self.shares[pick % len(self.shares)]
        keys, may_be_none = self.model.live_keys(share.consumer.model, share.loan)
        found = share.real.live_key
        assert found in keys or (found is None and may_be_none), f"{found} is not of {keys}"
