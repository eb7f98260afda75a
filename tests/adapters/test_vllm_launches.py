"""Managers that choose and launch with less on the way do what vLLM's do."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshare.adapters.vllm import activate, deactivate, sessions
from graphshare.adapters.vllm.choices import Remembering, as_target
from graphshare.adapters.vllm.signatures import is_released, released
from graphshare.adapters.vllm.twins import knowing_its_hash
from tests.vllm_standin.installed import counting

counts, queries = st.integers(0, 18), st.sampled_from([None, 1, 4])
adapters = st.integers(0, 2)
decoding = st.builds(
    lambda reqs, each, *more: (reqs, reqs * each, *more),
    st.integers(1, 4), st.sampled_from([1, 4]), queries, adapters,
)  # fmt: skip
asked = st.one_of(st.tuples(counts, counts, queries, adapters), decoding)


def ask(manager, version, of):
    *shape, num_active_loras = of
    if version in ("0.20.2", "0.21.0"):
        return manager.dispatch(*shape)
    return manager.dispatch(*shape, num_active_loras=num_active_loras)


def test_answers_are_those_of_vllm(vllm) -> None:
    activate()
    cases = (0, 2) if vllm.version in ("0.25.1", "0.26.0") else (0,)
    runner = vllm.start(lora_cases=cases)

    @given(asked, st.lists(st.tuples(st.integers(0, 3), asked), max_size=6))
    def alike(of, changes) -> None:
        calls = [of, of]
        for place, other in changes:  # one thing is asked otherwise, or again
            of = (*of[:place], other[place], *of[place + 1 :])
            calls.append(of)
        for manager in (runner.cudagraph_manager, runner.speculator.decode_cudagraph_manager):
            assert "dispatch" in vars(manager)
            for of in calls:
                answer, alone = (ask(m, vllm.version, of) for m in (manager, Alone(manager)))
                assert answer == alone
                assert hash(answer) == hash(alone)

    alike()


class Alone:
    """A manager with vLLM's own method, on the tables that it has."""

    def __init__(self, manager):
        self.dispatch = type(manager).dispatch.__get__(manager)


def test_what_was_asked_before_is_not_asked_again() -> None:
    calls = []

    def dispatch(*args, **kwargs):
        calls.append((args, kwargs))
        return object()

    remembering = Remembering(dispatch)
    first = remembering.dispatch(1, 4, None, num_active_loras=0)
    assert remembering.dispatch(1, 4, None, num_active_loras=0) is first
    assert len(calls) == 1
    shapes = (2, 4, None), (1, 5, None), (1, 4, 4)
    for other in (*((shape, 0) for shape in shapes), ((1, 4, None), 1), ((1, 4, None),)):
        remembering.dispatch(1, 4, None, num_active_loras=0)
        shape, *more = other
        before = len(calls)
        remembering.dispatch(*shape, **dict(zip(["num_active_loras"], more, strict=False)))
        named = {"num_active_loras": more[0]} if more else {}
        assert calls[before:] == [(shape, named)]


def test_what_is_told_to_forget_asks_each_time() -> None:
    answers = iter(range(9))
    remembering = Remembering(lambda *_: next(answers))
    assert [remembering.dispatch(1, 4, 4) for _ in range(2)] == [0, 0]
    remembering.forget()
    assert [remembering.dispatch(1, 4, 4) for _ in range(2)] == [1, 2]


def test_a_draft_runs_what_the_target_ran(vllm) -> None:
    manager = vllm.start(cudagraph_mode="FULL_AND_PIECEWISE").speculator.prefill_cudagraph_manager
    full = next(iter(manager.graphs))
    modes = type(full.cg_mode)
    captured = [each.num_tokens for each in manager._capture_descs[modes.PIECEWISE]]
    assert len(captured) > 1
    for num_tokens in (*captured, max(captured) + 1):
        for mode in (modes.PIECEWISE, modes.NONE):
            desc = as_target(manager, mode, full, 3, num_tokens)
            piecewise = mode is modes.PIECEWISE and num_tokens in captured
            assert desc.cg_mode is (modes.PIECEWISE if piecewise else modes.NONE)
            assert desc.num_tokens == num_tokens
            if not piecewise:
                assert desc.num_reqs == 3


@pytest.mark.parametrize("when", ["before the capture", "after it, and hooks on again"])
def test_what_others_have_put_there_is_asked_each_time(vllm, when) -> None:
    """It may hang on more than what it is asked."""
    activate()
    runner = vllm.make()
    managers = runner.cudagraph_manager, runner.speculator.decode_cudagraph_manager
    calls = []
    if when == "before the capture":
        for manager in managers:
            manager.dispatch = counting(manager.dispatch, calls)
    vllm.warm_up(runner)
    if when != "before the capture":
        for manager in managers:
            manager.dispatch = counting(manager.dispatch, calls)
        sessions()[-1].pause()
        sessions()[-1].resume()
    calls.clear()
    for manager in managers:
        for _ in range(3):
            ask(manager, vllm.version, (1, 4, 4, 0))
    assert len(calls) == 6


def test_what_others_have_put_on_the_draft_may_be_asked_in_its_own_ways(vllm) -> None:
    activate()
    runner = vllm.make()
    manager = runner.speculator.prefill_cudagraph_manager
    own, asked = manager.dispatch, []

    def dispatch(num_reqs, num_tokens, uniform_token_count=None, *more, loras=0, **named):
        asked.append((num_reqs, num_tokens, uniform_token_count, more, loras, named))
        shape = num_reqs, num_tokens, uniform_token_count
        return own(*shape) if vllm.version in ("0.20.2", "0.21.0") else own(*shape, 0)

    manager.dispatch = dispatch
    vllm.warm_up(runner)
    assert manager.dispatch is not dispatch
    asked.clear()
    manager.dispatch(9, 17)
    manager.dispatch(9, num_tokens=17, uniform_token_count=4)
    manager.dispatch(9, 17, 4, 5, loras=6, other=7)
    assert asked == [
        (9, 17, None, (), 0, {}),
        (9, 17, 4, (), 0, {}),
        (9, 17, 4, (5,), 6, {"other": 7}),
    ]


@pytest.mark.parametrize("keeps_name", [False, True])
def test_a_class_that_others_have_patched_is_asked_each_time(vllm, monkeypatch, keeps_name) -> None:
    runner = vllm.make()
    cls = next(each for each in type(runner.cudagraph_manager).__mro__ if "dispatch" in vars(each))
    functions = released(vllm.version)
    assert is_released(runner.cudagraph_manager, "dispatch", functions)
    patched = counting(cls.dispatch, [])
    if keeps_name:
        patched = functools.wraps(cls.dispatch)(patched)
    monkeypatch.setattr(cls, "dispatch", patched)
    assert not is_released(runner.cudagraph_manager, "dispatch", functions)
    assert not released(vllm.version)


def test_a_twin_is_its_own(vllm) -> None:
    activate()
    runner = vllm.start()
    for desc in runner.cudagraph_manager.graphs:
        assert knowing_its_hash(desc) is desc


def test_hooks_that_were_taken_off_ask_vllm(vllm) -> None:
    """Whoever has wrapped one goes on calling it."""
    activate()
    runner = vllm.start()
    manager = runner.cudagraph_manager
    kept = manager.dispatch
    before = ask(manager, vllm.version, (1, 4, 4, 0))
    deactivate()
    assert "dispatch" not in vars(manager)
    manager._candidates = type(manager._candidates)()
    manager.dispatch = kept
    assert ask(manager, vllm.version, (1, 4, 4, 0)) != before
