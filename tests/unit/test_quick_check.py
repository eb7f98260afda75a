"""The quick check: what it lets through, and what becomes of what it does not."""

from __future__ import annotations

import gc
import threading
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphshare.state import LayoutChecker, checker, layout_of
from graphshare.state._guards import guard_maker
from graphshare.state.taking import write_taking


@pytest.fixture
def make_guard() -> Any:
    found = guard_maker()
    if found is None:
        pytest.skip("this torch has no guards that can be trusted")
    return found


def test_a_checker_that_has_learned_keeps_no_tensor() -> None:
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    check = LayoutChecker({"t": tensor}, "cpu")
    assert check.matches({"t": tensor})
    assert check.matches({"t": tensor})
    del tensor
    gc.collect()
    assert gone() is None


def test_a_checker_is_freed_without_the_cyclic_collector() -> None:
    state = {"t": torch.zeros(3), "f": lambda: None}
    check = LayoutChecker(state, "cpu")
    for one in (state, {**state, "t": state["t"][:2]}, state):
        assert check.matches(one) is (one is state)
    gone = weakref.ref(state["f"])
    state.clear()
    del one
    gc.collect()
    gc.disable()
    try:
        del check
        assert gone() is None
    finally:
        gc.enable()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, make_guard: Any) -> Counter[str]:
    """What was done because a guard said no: plain checks written and made, guards learned."""
    counts: Counter[str] = Counter()
    plain_check, learn = checker._plain_check, checker._learn

    def counting_plain_check(layout: Any) -> Any:
        counts["written"] += 1
        plain = plain_check(layout)

        def counting(state: Any) -> bool:
            counts["plain"] += 1
            return plain(state)

        return counting

    def counting_learn(*args: Any) -> Any:
        counts["learn"] += 1
        return learn(*args)

    monkeypatch.setattr(checker, "_plain_check", counting_plain_check)
    monkeypatch.setattr(checker, "_learn", counting_learn)
    return counts


def layered(buffers: list[torch.Tensor]) -> Any:
    """Two metadata objects shared by six layers; slices of one buffer, anew for each layer."""

    def metadata(i: int) -> Any:
        return types.SimpleNamespace(a=buffers[i][:2], b=buffers[i + 1][1:3], n=7, name="x")

    two = metadata(0), metadata(2)
    return {
        "layers": {f"layer.{i}": two[i % 2] for i in range(6)},
        "slots": {f"layer.{i}": buffers[4][:2] for i in range(6)},
        "more": [torch.nn.Parameter(buffers[5], requires_grad=False), buffers[6].t()],
        "buffers": [buffers[6], buffers[6]],
    }


def test_a_rebuild_needs_no_second_look(asked: Counter[str]) -> None:
    buffers = [torch.zeros(4, 3) for _ in range(7)]
    check = LayoutChecker(layered(buffers), "cpu", {"*.n": "at_most"})
    for _ in range(3):
        assert check.matches(layered(buffers))
    assert asked == {"learn": 1}
    buffers[6] = torch.zeros(4, 3)
    for _ in range(3):
        assert not check.matches(layered(buffers))
    assert asked == {"learn": 1, "written": 1, "plain": 3}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "host value": lambda s: setattr(s["layers"]["layer.1"], "n", 8),
    "type of a host value": lambda s: setattr(s["layers"]["layer.0"], "n", True),
    "text": lambda s: setattr(s["layers"]["layer.1"], "name", "y"),
    "one layer's object": lambda s: s["layers"].update({"layer.3": types.SimpleNamespace()}),
    "two layers swapped": lambda s: s["layers"].update({"layer.2": s["layers"]["layer.1"]}),
    "key": lambda s: s["layers"].update({"other": s["layers"].pop("layer.5")}),
    "more keys": lambda s: s["layers"].update({"other": s["layers"]["layer.5"]}),
    "more attributes": lambda s: setattr(s["layers"]["layer.5"], "c", 1),
    "address": lambda s: s["slots"].update({"layer.4": torch.zeros(2, 3)}),
    "dtype": lambda s: s["slots"].update({"layer.4": s["slots"]["layer.4"].view(torch.int32)}),
    "shape": lambda s: s["slots"].update({"layer.4": s["slots"]["layer.4"][:1]}),
    "stride": lambda s: s["more"][1].t_().as_strided_((3, 4), (1, 1)),
    "transposed in place": lambda s: s["more"][1].t_(),
    "last tensor's address": lambda s: s["more"].__setitem__(1, torch.zeros(4, 3).t()),
    "item gone": lambda s: s["more"].pop(),
    "no tensor": lambda s: s["more"].__setitem__(1, None),
    "not a dict": lambda s: s.update(slots=types.MappingProxyType(s["slots"])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_seen_after_learning(name: str, make_guard: Any) -> None:
    buffers = [torch.zeros(4, 3) for _ in range(7)]
    check = LayoutChecker(layered(buffers), "cpu", {"*.n": "at_most"})
    for _ in range(3):
        assert check.matches(layered(buffers))
        state = layered(buffers)
        CHANGES[name](state)
        assert not check.matches(state)
        assert check.differences(state) != []
    assert check.matches(layered(buffers))


def test_a_nested_tensor_at_the_same_address_is_refused() -> None:
    # TensorGuards ends the process when it is asked about one.
    data = torch.zeros(6)
    check = LayoutChecker([data], "cpu")
    assert check.matches([data])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sizes, strides = torch.tensor([[2], [3]]), torch.tensor([[1], [1]])
        nested = torch._nested_view_from_buffer(data, sizes, strides, torch.tensor([0, 2]))
    assert type(nested) is torch.Tensor
    assert nested.data_ptr() == data.data_ptr()
    assert not check.matches([nested])
    with pytest.raises(TypeError):
        check.differences([nested])


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "dispatch mode": Passing,
    "no torch function": torch._C.DisableTorchFunction,
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("learned_inside", [False, True])
def test_modes_of_the_thread_do_not_count(
    name: str, learned_inside: bool, make_guard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = torch.zeros(8)
    check = LayoutChecker([buffer[:4], buffer[4:]], "cpu")
    # More often than there are chances, so that the quick check is given up in between.
    for _ in range(checker._CHANCES):
        for inside in (learned_inside, not learned_inside):
            with MODES[name]() if inside else torch.no_grad():
                assert check.matches([buffer[:4], buffer[4:]])
                assert check.matches([buffer[:4], buffer[4:]])
                assert not check.matches([buffer[:4], buffer[3:7]])
                assert not check.matches([buffer[:4], buffer[4:].view(torch.int32)])


def test_inference_tensors_and_gradients_do_not_count() -> None:
    buffer = torch.zeros(8)
    check = LayoutChecker([buffer[:4]], "cpu")
    with torch.inference_mode():
        inference = buffer[:4]
    wanting = buffer[:4].requires_grad_()
    for _ in range(checker._CHANCES):
        for tensor in (buffer[:4], inference, wanting, buffer[:4]):
            assert check.matches([tensor])
        assert not check.matches([buffer[:3]])


def test_another_thread_does_not_count() -> None:
    buffer = torch.zeros(8)
    check = LayoutChecker([buffer[:4]], "cpu")
    found: list[bool] = []

    def look() -> None:
        with torch.inference_mode():
            found.extend(check.matches([buffer[:4]]) for _ in range(3))
            found.append(not check.matches([buffer[:3]]))

    for _ in range(3):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert check.matches([buffer[:4]])
    assert found == [True] * 12


def test_what_is_right_but_refused_is_learned(asked: Counter[str]) -> None:
    buffer = torch.zeros(8)
    check = LayoutChecker([buffer[:4]], "cpu")
    assert check.matches([buffer[:4]])
    for _ in range(3):
        assert check.matches([buffer[:4].requires_grad_()])
    assert asked == {"learn": 2}


def test_differences_cost_no_chance(asked: Counter[str]) -> None:
    buffer = torch.zeros(8)
    check = LayoutChecker([buffer[:4]], "cpu")
    for _ in range(2 * checker._CHANCES):
        assert not check.matches([buffer[1:5]])
        assert not check.matches([buffer[:4].view(torch.int32)])
        assert not check.matches([None])
    assert asked["written"] == 1
    asked.clear()
    for _ in range(3):
        assert check.matches([buffer[:4]])
    assert asked == {"learn": 1}


def test_a_state_that_shares_otherwise_leaves_the_quick_check(asked: Counter[str]) -> None:
    tensor = torch.zeros(4)
    one = {"t": tensor}
    captured = [one, one, tensor, tensor]
    check = LayoutChecker(captured, "cpu")
    for _ in range(checker._CHANCES - 1):
        assert check.matches([one, {"t": tensor[:]}, tensor, tensor[:]])
    assert asked == {"written": 1, "plain": checker._CHANCES - 1}
    # The last chance is taken by what is learned.
    assert check.matches(captured)
    assert asked["learn"] == 1
    asked.clear()
    assert check.matches(captured)
    assert asked == {"plain": 1}


def test_modes_that_alternate_leave_the_quick_check(asked: Counter[str]) -> None:
    buffer = torch.zeros(8)
    check = LayoutChecker([buffer[:4]], "cpu")
    for i in range(2 * checker._CHANCES):
        assert check.matches([buffer[:4].requires_grad_(bool(i % 2))])
    assert asked == {"learn": checker._CHANCES, "written": 1, "plain": checker._CHANCES}


def test_each_rule_for_one_object_is_checked() -> None:
    tensor = torch.zeros(4)
    one, other = {"n": 1, "t": tensor}, {"n": 2, "t": tensor}
    for order in ("ab", "ba"):
        check = LayoutChecker(dict.fromkeys(order, one), "cpu", {"a.n": "any"})
        assert check.matches(dict.fromkeys(order, one))
        assert not check.matches(dict.fromkeys(order, other))
        assert check.matches({"a": other, "b": one})


def test_what_a_guard_cannot_speak_for() -> None:
    class Subclass(torch.Tensor):
        pass

    subclass = torch.zeros(3).as_subclass(Subclass)
    for tensor, device in (
        (torch.zeros(3), "meta"),  # host data there
        (torch.zeros(3, device="meta"), "meta"),  # no address
        (torch.zeros(0), "cpu"),
        (subclass, "cpu"),
    ):
        assert write_taking(layout_of([tensor], device)) is None
        assert LayoutChecker([tensor], device).matches([tensor])
    for tensor in (torch.zeros(3), torch.nn.Parameter(torch.zeros(3))):
        assert write_taking(layout_of([tensor, subclass], "cpu")) is not None


def test_a_cycle_through_what_is_shared_is_checked_quickly(asked: Counter[str]) -> None:
    buffer = torch.zeros(4)

    def state() -> Any:
        ring: dict[str, Any] = {"t": buffer[:2]}
        shared = {"up": ring}
        ring.update(one=shared, two=shared)
        return ring

    check = LayoutChecker(state(), "cpu")
    for _ in range(3):
        assert check.matches(state())
    assert asked == {"learn": 1}
    other = state()
    other["two"] = {"up": other}
    assert check.matches(other)
    other["two"]["up"] = state()
    assert check.matches(other) is (check.differences(other) == [])


def test_a_container_under_two_rules_is_one_where_a_cycle_leads_back() -> None:
    tensor = torch.zeros(4)

    def state(one: int, other: int | None) -> Any:
        shared: dict[str, Any] = {"t": tensor}
        first = {"x": one, "shared": shared}
        shared["up"] = first
        return {"a": first, "b": first if other is None else {"x": other, "shared": shared}}

    check = LayoutChecker(state(1, None), "cpu", {"a.x": "any"})
    assert check.matches(state(1, None))
    assert check.matches(state(1, 1))
    assert check.differences(state(5, 1)) != []
    assert not check.matches(state(5, 1))
