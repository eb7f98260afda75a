"""Random sequences of refreshes, replays, moves and recaptures of three pools, on the tape.

A target with its owner, a draft that borrows, and a decode pool with an owner of its own. The
model knows one thing for each owner: the key that is fresh. Whatever happened before, a replay of
it gives what the forward computes eagerly on the buffers that owner and model hold *now*, a replay
of another key is refused, and memory that was moved away stays as it was left.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from graphshare import RebindError, StaleStateError, share_states
from graphshare.capture import tape as tape_module
from tests.movable import Model, MovableOwner, key_of, poisoned, pool_of

KEYS = [key_of(8), key_of(4), key_of(1)]
BUFFERS = ("x", "cache", "weight", "out")

pools = st.sampled_from(["target", "draft", "decode"])
keys = st.sampled_from(KEYS)
batches = st.integers(1, 9)


class Machine(RuleBasedStateMachine):
    @initialize()
    def capture(self) -> None:
        self.owners = {name: MovableOwner("cpu") for name in ("target", "decode")}
        names = ("target", "draft", "decode")
        self.models = {name: Model("cpu", seed) for seed, name in enumerate(names)}
        self.pools = {
            name: pool_of("tape", name, owner=self.owners.get(name), replays_per_refresh=None)
            for name in names
        }
        self.shared = share_states(self.pools["target"], self.pools["draft"])
        for name, pool in self.pools.items():
            pool.capture(KEYS, self.models[name].forward)
        self.fresh: dict[str, Any] = {"target": None, "decode": None}
        self.left: list[torch.Tensor] = []

    def lender(self, name: str) -> str:
        return "decode" if name == "decode" else "target"

    def leave(self, *old: torch.Tensor) -> None:
        poisoned(old)
        self.left = [*self.left, *old][-24:]

    @rule(name=st.sampled_from(["target", "decode"]), key=keys, batch=batches)
    def refresh(self, name: str, key: Any, batch: int) -> None:
        self.pools[name].refresh(key, batch)
        self.fresh[name] = key

    @rule(name=pools, key=keys)
    def replay(self, name: str, key: Any) -> None:
        pool, model = self.pools[name], self.models[name]
        if self.fresh[self.lender(name)] != key:
            with pytest.raises(StaleStateError):
                pool.replay(key)
            return
        want = model.expected(key, pool.states[key])
        got = pool.replay(key)
        assert torch.allclose(got["hidden"], want)
        assert torch.equal(got["out"], model.out[: key.num_tokens])

    @rule(name=pools)
    def move_the_state(self, name: str) -> None:
        owner = self.owners[self.lender(name)]
        moves = owner.move()
        done = self.pools[name].rebind(moves)
        family = {"decode"} if name == "decode" else {"target", "draft"}
        assert {pool for pool, _ in done.graphs} == family
        self.fresh[self.lender(name)] = None
        self.leave(*moves)

    @rule(name=pools, buffer=st.sampled_from(BUFFERS))
    def move_a_buffer(self, name: str, buffer: str) -> None:
        model = self.models[name]
        old = getattr(model, buffer)
        new = old.clone()
        self.pools[name].rebind({old: new})
        setattr(model, buffer, new)
        self.leave(old)

    @rule(name=pools)
    def let_two_buffers_change_places(self, name: str) -> None:
        model = self.models[name]
        self.pools[name].rebind({model.x: model.cache, model.cache: model.x})
        model.x, model.cache = model.cache, model.x

    @rule(name=pools, at=st.integers(1, 9))
    def fail_to_move(self, name: str, at: int) -> None:
        """At some node of some graph; each key has three that change."""
        owner, model = self.owners[self.lender(name)], self.models[name]
        moves = {each: torch.zeros_like(each) for each in owner.buffers().values()}
        moves[model.cache] = model.cache.clone()
        whole, tried = tape_module._StepChange.apply, 0

        def step(change: Any) -> None:
            nonlocal tried
            tried += 1
            if tried == at:
                raise RuntimeError("planted")
            whole(change)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tape_module._StepChange, "apply", step)
            with pytest.raises(RuntimeError, match="planted"):
                self.pools[name].rebind(moves)
        poisoned(moves.values())

    @rule(name=pools)
    def refuse_a_part(self, name: str) -> None:
        table = self.owners[self.lender(name)].table
        with pytest.raises(RebindError):
            self.pools[name].rebind({table[:2]: table[:2].clone()})

    @rule(name=pools)
    def recapture(self, name: str) -> None:
        self.pools[name].recapture()
        self.fresh[self.lender(name)] = None

    @rule()
    def prove(self) -> None:
        assert set(self.shared.prove()) == set(KEYS)

    @invariant()
    def what_was_left_is_not_touched(self) -> None:
        for old in getattr(self, "left", ()):
            assert bool((old.view(torch.uint8) == 0xA5).all())


Machine.TestCase.settings = settings(
    max_examples=max(10, settings.default.max_examples // 4), stateful_step_count=20
)
TestRebinding = Machine.TestCase
