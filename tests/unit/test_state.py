from __future__ import annotations

import collections
import collections.abc
import dataclasses
import decimal
import enum
import functools
import pathlib
import types
from typing import Any, NamedTuple

import pytest
import torch

from graphshare.state import (
    AttentionState,
    HostLeaf,
    LayoutChecker,
    LayoutDifference,
    TensorLeaf,
    check_rules,
    compare,
    device_tensors,
    layout_of,
    walk,
)
from tests.layout_checks import each_way  # noqa: F401 - a fixture


def seen(before: Any, after: Any, rules: dict[str, str] | None = None, device: str = "cpu"):
    """Path and field of each difference, by checker and by comparison of layouts."""
    checker = LayoutChecker(before, device, rules)
    found = checker.differences(after)
    assert found == compare(layout_of(before, device, rules), layout_of(after, device))
    if checker.matches(after):
        assert found == []
    return [(one.path, one.field) for one in found]


def test_paths_read_as_the_code_that_reaches_the_leaf() -> None:
    @dataclasses.dataclass
    class Metadata:
        seq_lens: torch.Tensor
        max_seq_len: int
        tables: list[int]

    metadata = Metadata(torch.zeros(2), 7, [1, 2])
    state = AttentionState({"model.layers.0.self_attn": metadata, 3: None}, torch.zeros(3))
    assert [path for path, _ in walk(state)] == [
        "attn_metadata.model.layers.0.self_attn.seq_lens",
        "attn_metadata.model.layers.0.self_attn.max_seq_len",
        "attn_metadata.model.layers.0.self_attn.tables.0",
        "attn_metadata.model.layers.0.self_attn.tables.1",
        "attn_metadata.3",
        "slot_mappings",
    ]
    assert [path for path, _ in walk(5)] == [""]


def test_a_leaf_tells_all_that_is_frozen() -> None:
    base = torch.zeros(8, dtype=torch.int32)
    layout = layout_of({"t": base[2:8:2], "n": 3}, "cpu", {"n": "at_most"})
    place = base.data_ptr() + 8
    assert layout.leaves == (
        TensorLeaf("t", place, (3,), (2,), torch.int32, torch.device("cpu")),
        HostLeaf("n", 3, "at_most"),
    )
    assert layout.tensors == layout.leaves[:1]
    assert layout != layout_of({"t": base[2:8:2], "n": 3}, "cpu")
    with pytest.raises(TypeError):
        hash(layout)


def test_a_difference_tells_what_was_and_what_is() -> None:
    checker = LayoutChecker([1, torch.zeros(2)], "cpu", {"0": "at_most"})
    assert checker.differences([2, None]) == [
        LayoutDifference("0", "value", 1, 2, "at_most"),
        LayoutDifference("1", "presence", checker.layout.leaves[1], HostLeaf("1", None)),
    ]


def test_a_shared_part_is_reported_under_each_path() -> None:
    tensor = torch.zeros(4)
    one, other = {"t": tensor}, {"t": tensor[:2]}
    assert seen({"a": one, "b": one}, {"a": other, "b": other}) == [
        ("a.t", "shape"),
        ("b.t", "shape"),
    ]
    assert seen({"a": one, "b": one}, {"a": one, "b": other}) == [("b.t", "shape")]


def test_a_shared_part_is_reported_below_each_of_its_containers() -> None:
    def state(shared: Any) -> Any:
        return {"a": [shared], "b": (shared,), "c": {"d": [shared]}}

    tensor = torch.zeros(4)
    assert seen(state({"t": tensor}), state({"t": tensor[:2]})) == [
        ("a.0.t", "shape"),
        ("b.0.t", "shape"),
        ("c.d.0.t", "shape"),
    ]


def test_each_place_of_a_shared_tensor_is_checked() -> None:
    tensor = torch.zeros(4)
    state = [tensor, tensor, tensor[:]]
    assert LayoutChecker(state, "cpu").matches([tensor, tensor[:], tensor])
    for i in range(3):
        after = list(state)
        after[i] = tensor[1:]
        assert seen(state, after) == [(str(i), "address"), (str(i), "shape")]
        after[i] = tensor.view(torch.int32)
        assert seen(state, after) == [(str(i), "dtype")]
    views = [tensor, tensor.view(torch.int32)]
    assert seen(views, [tensor, tensor]) == [("1", "dtype")]


def test_rules_tell_the_places_of_a_shared_part_apart() -> None:
    one, other = {"n": 1}, {"n": 2}
    rules = {"a.n": "any"}
    assert seen({"a": one, "b": one}, {"a": other, "b": one}, rules) == []
    assert seen({"a": one, "b": one}, {"a": other, "b": other}, rules) == [("b.n", "value")]
    assert seen({"b": one, "a": one}, {"b": other, "a": other}, rules) == [("b.n", "value")]


def test_values_that_are_made_while_looking() -> None:
    class Views(collections.abc.Mapping[str, Any]):
        def __init__(self, names: str) -> None:
            self.names = names

        def __getitem__(self, name: str) -> Any:
            return base[: int(name)]

        def __iter__(self) -> Any:
            return iter(self.names)

        def __len__(self) -> int:
            return 4

    base = torch.zeros(4)
    # What the one made is gone when the next is looked at, and its identity free to be reused.
    views = [types.MappingProxyType(Views("1234"[:: (-1) ** i])) for i in range(8)]
    leaves = layout_of(views, "cpu").leaves
    assert [(leaf.path, leaf.shape) for leaf in leaves if isinstance(leaf, TensorLeaf)] == [
        (f"{i}.{name}", (int(name),)) for i in range(8) for name in "1234"[:: (-1) ** i]
    ]


def test_unsharing_alone_is_no_difference_and_stays_on_the_fast_path() -> None:
    tensor = torch.zeros(4)
    one = {"t": tensor}
    checker = LayoutChecker({"a": one, "b": one, "c": one}, "cpu")
    assert checker.matches({"a": one, "b": {"t": tensor[:]}, "c": one})


def test_rules_the_first_pattern_wins() -> None:
    rules = {"*.b": "equal", "*": "any"}
    assert seen({"a": 1, "b": 1}, {"a": 2, "b": 2}, rules) == [("b", "value")]
    assert seen({"a": 1, "b": 1}, {"a": 2, "b": 2}, {"*": "any", "*.b": "equal"}) == []
    assert seen({"x": {"a": 1, "b": 1}}, {"x": {"a": 2, "b": 2}}, {"*.b": "equal", "x": "any"}) == [
        ("x.b", "value")
    ]
    assert seen({"B": 1}, {"B": 2}, {"b": "any"}) == [("B", "value")]


def test_any_for_a_container_holds_for_all_within() -> None:
    rules = {"*.plan": "any"}
    assert seen({"plan": None}, {"plan": {"a": torch.zeros(3), "b": [1]}}, rules) == []
    assert seen({"plan": [1, 2]}, {"plan": (3,)}, rules) == []
    assert seen({"plan": [1, 2]}, {}, rules) == []
    assert seen({}, {"plan": [1, 2]}, rules) == []
    assert LayoutChecker({"plan": [1, 2]}, "cpu", rules).matches({"plan": (3,)})


def test_any_leaves_a_tensor_out() -> None:
    state = {"kept": torch.zeros(3), "out": torch.zeros(3)}
    rules = {"out": "any"}
    assert [leaf.path for leaf in layout_of(state, "cpu", rules).leaves] == ["kept"]
    assert device_tensors(state, "cpu", rules) == [state["kept"]]
    assert LayoutChecker(state, "cpu", rules).matches(state | {"out": torch.zeros(9)})
    assert LayoutChecker(3, "cpu", {"*": "any"}).matches(torch.zeros(2))


def test_any_still_needs_the_key_or_tells_slowly() -> None:
    checker = LayoutChecker({"a": 1, "b": 2}, "cpu", {"a": "any"})
    assert checker.differences({"b": 2}) == []
    assert [one.path for one in checker.differences({"c": 1, "b": 2})] == ["c"]
    assert not checker.matches({"c": 1, "b": 2})


@pytest.mark.parametrize("value", ["x", None, True, enum.IntEnum("E", "A").A])
def test_at_most_takes_what_is_no_number_for_equal(value: Any) -> None:
    checker = LayoutChecker([value], "cpu", {"0": "at_most"})
    assert checker.matches([value])
    assert [one.field for one in checker.differences([0])] == ["type"]


@pytest.mark.parametrize(
    ("rules", "error"),
    [
        ({"a": "smaller"}, ValueError),
        ({"a": "ANY"}, ValueError),
        ({"a": None}, TypeError),
        ({1: "any"}, TypeError),
        ([("a", "any")], TypeError),
        ("any", TypeError),
    ],
)
def test_rules_that_cannot_be_meant(rules: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_rules(rules)
    with pytest.raises(error):
        layout_of({}, "cpu", rules)


def test_a_nest_deeper_than_the_stack() -> None:
    def nest(value: Any) -> Any:
        for i in range(5000):
            value = [value] if i % 2 else {"k": value}
        return value

    tensor = torch.zeros(3)
    checker = LayoutChecker(nest(tensor), "cpu", {"*.none": "any"})
    assert checker.matches(nest(tensor[:]))
    assert [one.field for one in checker.differences(nest(tensor[1:]))] == ["address", "shape"]
    assert len(layout_of(nest(tensor), "cpu").tensors) == 1
    assert layout_of(nest(tensor), "cpu") == layout_of(nest(tensor), "cpu")


def test_a_state_that_reaches_too_far_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshare.state.nest.MAX_LEAVES", 1000)
    state: Any = 1
    for _ in range(25):
        state = [state, state]
    with pytest.raises(ValueError, match="leaves"):
        collections.deque(walk(state), maxlen=0)
    assert LayoutChecker(state, "cpu").matches(state)
    with pytest.raises(ValueError, match="leaves"):
        LayoutChecker(state, "cpu", {"x": "any"})


def test_cycles() -> None:
    def ring(value: Any) -> Any:
        parent: Any = types.SimpleNamespace(value=value)
        parent.child = types.SimpleNamespace(parent=parent, both=[parent, parent])
        return parent

    assert LayoutChecker(ring(1), "cpu").matches(ring(1))
    assert seen(ring(1), ring(2)) == [("value", "value")]
    cut = ring(1)
    cut.child.parent = None
    assert seen(ring(1), cut) == [("child.parent", "type")]


def test_keys_that_are_no_strings() -> None:
    layer = object()
    tensor = torch.zeros(2)
    state = {1: tensor, "1": 1, (0, 1): 2, layer: 3, None: 4}
    assert LayoutChecker(state, "cpu").matches(dict(reversed(state.items())))
    assert layout_of(state, "cpu") == layout_of(dict(reversed(state.items())), "cpu")
    assert seen(state, state | {"1": 5}) == [("1", "value")]
    assert seen(state, state | {1: 5}) == [("1", "presence")]
    assert len(layout_of(state, "cpu").leaves) == 5


def test_a_default_dict_is_not_filled_by_looking() -> None:
    state = collections.defaultdict(list, a=1)
    other = collections.defaultdict(list, b=1)
    assert seen(state, other) == [("a", "presence"), ("b", "presence")]
    assert list(other) == ["b"]
    assert not LayoutChecker(types.MappingProxyType(state), "cpu").matches(
        types.MappingProxyType(other)
    )
    assert list(other) == ["b"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([], ()),
        ({}, collections.OrderedDict()),
        ([1], (1,)),
        ({"0": 1}, [1]),
        ([], {}),
    ],
)
def test_the_type_of_a_container_counts(one: Any, other: Any) -> None:
    assert seen(one, other) == [("", "type")]
    assert seen([one], [other]) == [("0", "type")]
    assert layout_of(one, "cpu") != layout_of(other, "cpu")


def test_an_empty_container_that_goes_is_seen() -> None:
    assert seen({"a": {}}, {}) == [("a", "presence")]
    assert seen({"a": None}, {"a": {}}) == [("a", "type")]


class Guarded:
    """Whatever runs code of the state's class fails."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def computed(self) -> Any:
        raise RuntimeError

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError


class Hidden:
    """Attributes that are not what looking them up gives."""

    value = property(lambda self: torch.zeros(1))

    def __init__(self, value: Any) -> None:
        self.__dict__["value"] = value

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            return super().__getattribute__(name)
        raise RuntimeError


class Lazy(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


@pytest.mark.parametrize("cls", [Guarded, Hidden, lambda value: Lazy([value])])
def test_no_code_of_a_container_runs(cls: Any) -> None:
    tensor = torch.zeros(4)
    checker = LayoutChecker(cls(tensor), "cpu")
    assert checker.matches(cls(tensor[:]))
    assert [one.field for one in checker.differences(cls(tensor[1:]))] == ["address", "shape"]


def test_attributes_that_come_and_go() -> None:
    @dataclasses.dataclass
    class Metadata:
        a: int = 1

    extra, bare = Metadata(), Metadata()
    extra.cached = torch.zeros(2)  # type: ignore[attr-defined]
    assert seen(bare, extra) == [("cached", "presence")]
    assert seen(extra, bare) == [("cached", "presence")]
    gone = Metadata()
    del gone.a  # now the class answers, with the same value
    assert seen(bare, gone) == [("a", "presence")]


def test_an_attribute_that_its_class_has_as_well() -> None:
    """One that went is not made up for by the class, nor by another one that came."""

    class Made:
        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(attributes)

    class Default(Made):
        a: int = 1

    class Property(Made):
        @property
        def a(self) -> int:
            return 1

    class MakesUp(Made):
        def __getattr__(self, name: str) -> Any:
            if name == "a":
                return 1
            raise AttributeError(name)

    for cls in (Made, Default, Property, MakesUp):
        state = cls(t=torch.zeros(2), a=1)
        checker = LayoutChecker(state, "cpu")
        for _ in range(3):
            assert checker.matches(cls(t=state.t[:], a=1))
            assert not checker.matches(cls(t=state.t[:], a=2))
            assert not checker.matches(cls(t=state.t[:], b=1))
            assert not checker.matches(cls(t=state.t[:]))
            assert not checker.matches(cls(t=state.t[:], a=1, b=1))


def test_names_that_source_would_change() -> None:
    """Python takes the ligature in source for two letters."""

    class Made:
        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(attributes)

    state = Made(t=torch.zeros(2))
    vars(state).update({"\ufb01": 1, "fi": 2, "class": 3, "a b": 4, "\u00e4": 5})
    checker = LayoutChecker(state, "cpu")
    for name in vars(state):
        for _ in range(2):
            assert checker.matches(Made(**vars(state)))
            assert not checker.matches(Made(**{**vars(state), name: 9}))


def test_slots_inherited_unset_and_private() -> None:
    class Base:
        __slots__ = ("__private", "a")

        def __init__(self, a: Any) -> None:
            self.a = a
            self.__private = 1

    class Derived(Base):
        __slots__ = ("b", "class_")

    def make(a: Any, **rest: Any) -> Derived:
        made = Derived(a)
        for name, value in rest.items():
            setattr(made, name, value)
        return made

    assert sorted(path for path, _ in walk(make(1))) == ["_Base__private", "a"]
    assert LayoutChecker(make(1), "cpu").matches(make(1))
    assert seen(make(1), make(1, b=2)) == [("b", "presence")]
    assert seen(make(1, b=2), make(1)) == [("b", "presence")]


class ArrayLike:
    """``==`` gives an array, as NumPy's does."""

    def __eq__(self, other: object) -> Any:
        return torch.ones(3)

    __hash__ = None

    def __call__(self) -> None: ...


class AlwaysEqual(ArrayLike):
    def __eq__(self, other: object) -> Any:
        return True

    __hash__ = None


def test_opaque_values() -> None:
    def function() -> None: ...

    array = ArrayLike()
    assert seen([array], [array]) == []
    assert seen([array], [ArrayLike()]) == [("0", "value")]
    assert seen([AlwaysEqual()], [AlwaysEqual()]) == []
    assert seen([function], [function]) == []
    assert seen([function], [lambda: None]) == [("0", "value")]
    module = torch.nn.Linear(1, 1)
    assert [path for path, _ in walk({"m": module})] == ["m"]
    assert seen([module], [torch.nn.Linear(1, 1)]) == [("0", "value")]
    assert seen([functools.partial], [functools.partial]) == []
    generator = torch.Generator()
    assert seen([generator], [generator]) == []
    assert seen([generator], [torch.Generator()]) == [("0", "value")]
    assert seen([decimal.Decimal(1)], [decimal.Decimal(1)]) == []
    assert seen([decimal.Decimal(1)], [decimal.Decimal(2)]) == [("0", "value")]
    path = pathlib.PurePath("a/b")
    hash(path)
    assert seen([path], [pathlib.PurePath("a/b")]) == []


def test_an_extension_type_with_a_python_subclass_is_opaque() -> None:
    class Named(torch.Generator):
        pass

    assert seen([Named()], [Named()]) == [("0", "value")]


def test_a_value_that_changes_in_place_does_not_hide() -> None:
    values = {1, 2}
    data = bytearray(b"ab")
    checker = LayoutChecker([values, data], "cpu")
    values.add(3)
    data[0] = 0
    assert not checker.matches([values, data])
    assert [one.path for one in checker.differences([values, data])] == ["0", "1"]


@pytest.mark.parametrize("length", [3, 16, 100])
def test_lists_of_numbers_of_any_length(length: int) -> None:
    values = list(range(length))
    assert LayoutChecker(values, "cpu").matches(list(values))
    assert seen(values, [*values[:-1], True]) == [(str(length - 1), "type")]
    assert seen(values, values[:-1]) == [(str(length - 1), "presence")]
    assert seen(values, [*values, 1]) == [(str(length), "presence")]


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(func)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 3).to_sparse(),
        Wrapper(torch.zeros(3)),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            marks=pytest.mark.filterwarnings("ignore"),
        ),
    ],
)
def test_a_tensor_without_an_address_is_refused_unless_it_is_any(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        tensor = tensor()
    state = {"md": {"t": tensor}}
    for make in (layout_of, LayoutChecker):
        with pytest.raises(TypeError, match=r"md\.t"):
            make(state, "cpu")
        make(state, "cpu", {"*.t": "any"})
    checker = LayoutChecker({"md": {"t": torch.zeros(3)}}, "cpu")
    assert not checker.matches(state)
    with pytest.raises(TypeError, match=r"md\.t"):
        checker.differences(state)


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(func)


def loud(tensor: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(Loud, tensor)


def parameter(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("wrap", [parameter, loud])
def test_subclasses_are_asked_as_tensors(wrap: Any) -> None:
    base = torch.zeros(4)
    checker = LayoutChecker({"t": wrap(base)}, "cpu")
    assert checker.matches({"t": wrap(base)})
    for other in (base, loud(base), torch.nn.Parameter(base)):
        assert checker.differences({"t": other}) == []
    for other in (base[:2], base.clone(), base.as_strided((4,), (0,)), base.view(torch.int32)):
        assert not checker.matches({"t": wrap(other)})
    empty = LayoutChecker({"t": wrap(base[:0])}, "cpu")
    assert not empty.matches({"t": wrap(torch.zeros(0, device="meta"))})
    assert [one.field for one in checker.differences({"t": wrap(base[:2])})] == ["shape"]
    assert len(device_tensors({"t": wrap(base)}, "cpu")) == 1


def test_strides_of_sizes_zero_and_one_count() -> None:
    base = torch.zeros(8)
    for shape, one, other in [
        ((1,), (1,), (5,)),
        ((0, 2), (2, 1), (7, 1)),
        ((2, 1), (1, 1), (1, 3)),
    ]:
        before, after = base.as_strided(shape, one), base.as_strided(shape, other)
        assert seen([before], [after]) == [("0", "stride")]
        assert not LayoutChecker([before], "cpu").matches([after])


def test_tensors_off_the_device_are_host_data() -> None:
    # A pool on `meta` stands for an accelerator, whose tensors the CPU's are not.
    place = torch.zeros(4, device="meta")
    state = {"device": place, "host": torch.zeros(3)}
    checker = LayoutChecker(state, "meta")
    assert checker.layout.leaves[1] == HostLeaf("host", torch.Tensor)
    assert [leaf.path for leaf in checker.layout.tensors] == ["device"]
    assert checker.matches({"device": place, "host": torch.ones(9)})
    assert seen(state, {"device": place, "host": place}, device="meta") == [("host", "device")]
    assert seen(state, {"device": place, "host": None}, device="meta") == [("host", "type")]
    found = seen(state, {"device": torch.zeros(4), "host": torch.zeros(3)}, device="meta")
    assert ("device", "device") in found


def test_a_device_without_index_is_any_of_its_type() -> None:
    tensor = torch.zeros(3)
    assert device_tensors([tensor], torch.device("cpu", 0)) == [tensor]
    assert device_tensors([tensor], "meta") == []


def test_arrays_are_host_data() -> None:
    numpy = pytest.importorskip("numpy")
    state = {"a": numpy.zeros(3), "n": numpy.float32("nan"), "i": numpy.int64(3)}
    checker = LayoutChecker(state, "cpu")
    same = {"a": numpy.ones(5), "n": numpy.float32("nan"), "i": numpy.int64(3)}
    assert checker.matches(same)
    assert checker.differences(same) == []
    assert seen(state, same | {"a": [0]}) == [("a", "type")]
    assert seen(state, same | {"i": 3}) == [("i", "type")]
    assert seen(state, same | {"i": numpy.int64(4)}) == [("i", "value")]


def test_the_checker_keeps_no_tensor() -> None:
    import gc
    import weakref

    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    checker = LayoutChecker({"a": {"t": tensor}, "b": [tensor]}, "cpu")
    del tensor
    gc.collect()
    assert gone() is None
    assert not checker.matches({})


def test_comparing_leaves_nothing_to_the_cyclic_collector() -> None:
    import gc

    shared = {"t": torch.zeros(3), "n": 1}
    state = {"a": [shared], "b": (shared, types.SimpleNamespace(m=shared))}
    checker = LayoutChecker(state, "cpu", {"*.n": "at_most"})
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        gc.collect()
        assert checker.matches(state)
        assert checker.differences(state) == []
        assert layout_of(state, "cpu") != layout_of({"a": [shared]}, "cpu")
        assert gc.collect() == 0
    finally:
        if was_enabled:
            gc.enable()


def test_what_python_makes_of_an_overridden_default_device() -> None:
    tensor = torch.zeros(3)
    checker = LayoutChecker([tensor], "cpu")
    with torch.device("meta"):
        assert checker.matches([tensor])
        assert checker.differences([tensor]) == []


def test_an_attention_state_is_a_pair() -> None:
    metadata, slots = AttentionState({"a": 1})
    assert metadata == {"a": 1}
    assert slots is None

    class Other(NamedTuple):
        attn_metadata: Any
        slot_mappings: Any = None

    assert seen(AttentionState(1), Other(1)) == [("", "type")]


@pytest.mark.gpu
def test_on_cuda() -> None:
    buffer = torch.zeros(16, device="cuda")
    pinned = torch.zeros(4, pin_memory=True)
    state = {"t": buffer[:8], "pinned": pinned, "host": torch.zeros(3)}
    checker = LayoutChecker(state, "cuda")
    again = {"t": buffer[:8], "pinned": pinned[:], "host": torch.zeros(2, pin_memory=True)}
    assert checker.matches(again)
    assert checker.differences(again) == []
    assert [leaf.path for leaf in checker.layout.tensors] == ["t"]
    assert isinstance(checker.layout.leaves[1], TensorLeaf)
    moved = again | {"pinned": torch.zeros(4, pin_memory=True)}
    assert not checker.matches(moved)
    assert [(d.path, d.field) for d in checker.differences(moved)] == [("pinned", "address")]
    away = again | {"t": torch.zeros(8)}
    assert not checker.matches(away)
    assert ("t", "device") in {(d.path, d.field) for d in checker.differences(away)}
    buffer.set_(torch.zeros(16, device="cuda"))
    assert not checker.matches({**again, "t": buffer[:8]})
