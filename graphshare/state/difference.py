"""How a state differs from what was captured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from graphshare.state.leaves import LayoutDifference
from graphshare.state.nest import Step, label, unroll
from graphshare.state.nodes import BranchNode, Node, TensorNode, ValueNode, leaf_of, value_of
from graphshare.state.rules import RuleSet
from graphshare.state.values import is_number, same_value

__all__ = ["differences_of"]

_FIELDS = ("address", "shape", "stride", "dtype", "device")


class _Pair:
    """What was captured beside what was found at the same place; one of them may be absent."""

    __slots__ = ("above", "below", "differs", "expected", "got")

    def __init__(self, expected: Node | None, got: Node | None) -> None:
        self.expected = expected
        self.got = got
        self.above: list[_Pair] = []
        self.below: dict[Step, _Pair] | None = None
        self.differs = False  # here, or somewhere below


def differences_of(
    expected: Node, got: Node, rules: RuleSet, *, exact: bool = False
) -> list[LayoutDifference]:
    """In what ``got`` differs from ``expected`` under ``rules``.

    ``exact`` takes ``at_most`` for ``equal``, and a pinned tensor for other than an unpinned one.

    Raises:
        ValueError: There are more than a million places to report.
    """
    root = _pair_up(expected, got, exact=exact)
    if not root.differs:
        return []
    found: list[LayoutDifference] = []
    for path, pair, rule in unroll(root, _differing, rules):
        if rule != "any":
            found.extend(_report(pair, path, rule, exact=exact))
    return found


def _pair_up(expected: Node, got: Node, *, exact: bool) -> _Pair:
    # Nodes are shared and may be cyclic, so pairs are too: each is looked at once, taken to be
    # equal until something in it is not. Which paths lead there matters only for what differs.
    pairs: dict[tuple[int, int], _Pair] = {}
    fresh: list[_Pair] = []
    wrong: list[_Pair] = []

    def pair_of(expected: Node | None, got: Node | None) -> _Pair:
        name = id(expected), id(got)
        pair = pairs.get(name)
        if pair is None:
            pair = pairs[name] = _Pair(expected, got)
            fresh.append(pair)
        return pair

    root = pair_of(expected, got)
    while fresh:
        pair = fresh.pop()
        pair.below = _steps(pair, pair_of)
        if pair.below is not None:
            for item in pair.below.values():
                item.above.append(pair)
        if _differs_here(pair, exact=exact):
            wrong.append(pair)
    while wrong:
        pair = wrong.pop()
        if not pair.differs:
            pair.differs = True
            wrong.extend(pair.above)
    for pair in pairs.values():
        # Pairs that know each other would be left to the cyclic collector, which engines hold off.
        pair.above.clear()
    return root


def _differs_here(pair: _Pair, *, exact: bool) -> bool:
    if pair.expected is None or pair.got is None:
        return True
    return pair.below is None and any(_leaf_differences(pair.expected, pair.got, exact=exact))


def _steps(pair: _Pair, pair_of: Any) -> dict[Step, _Pair] | None:
    """The pairs below two containers of one type, or below one that has no counterpart."""
    mine, theirs = pair.expected, pair.got
    if isinstance(mine, BranchNode) and isinstance(theirs, BranchNode):
        if mine.cls is not theirs.cls:
            return None
        below = {step: pair_of(item, theirs.below.get(step)) for step, item in mine.below.items()}
        for step, item in theirs.below.items():
            if step not in below:
                below[step] = pair_of(None, item)
        return below
    if isinstance(mine, BranchNode) and theirs is None and mine.below:
        return {step: pair_of(item, None) for step, item in mine.below.items()}
    if isinstance(theirs, BranchNode) and mine is None and theirs.below:
        return {step: pair_of(None, item) for step, item in theirs.below.items()}
    return None


def _differing(pair: _Pair) -> Iterable[tuple[str, _Pair]] | None:
    if pair.below is None:
        return None
    branch = pair.expected or pair.got
    cls = branch.cls if isinstance(branch, BranchNode) else object
    return [(label(cls, step), item) for step, item in pair.below.items() if item.differs]


def _is_placed(node: Node | None) -> bool:
    return isinstance(node, TensorNode) and node.role != "host"


def _leaf_differences(expected: Node, got: Node, *, exact: bool) -> Iterable[tuple[str, Any, Any]]:
    """Field, expected and got of what differs at one place."""
    if isinstance(expected, TensorNode) and isinstance(got, TensorNode):
        if expected.role == "host":
            # Nothing of it is frozen: one that is pinned now is as good.
            if got.role == "device" or (exact and got.role != "host"):
                yield "device", expected.device, got.device
            return
        for field in _FIELDS:
            mine, theirs = getattr(expected, field), getattr(got, field)
            if mine != theirs:
                yield field, mine, theirs
    elif _is_placed(expected) or _is_placed(got):
        yield "presence", expected, got
    elif isinstance(expected, ValueNode) and isinstance(got, ValueNode):
        if not same_value(expected.value, got.value):
            same_type = type(expected.value) is type(got.value)
            yield "value" if same_type else "type", expected.value, got.value
    elif type(expected) is not type(got) or value_of(expected) is not value_of(got):
        yield "type", value_of(expected), value_of(got)


def _report(pair: _Pair, path: str, rule: str, *, exact: bool) -> Iterable[LayoutDifference]:
    expected, got = pair.expected, pair.got
    if expected is None or got is None:
        mine, theirs = _shown(expected, path, rule), _shown(got, path, rule)
        yield LayoutDifference(path, "presence", mine, theirs, rule)
        return
    for field, mine, theirs in _leaf_differences(expected, got, exact=exact):
        if field == "presence":
            mine, theirs = _shown(expected, path, rule), _shown(got, path, rule)
        elif field == "value" and rule == "at_most" and not exact and _is_within(mine, theirs):
            continue
        yield LayoutDifference(path, field, mine, theirs, rule)


def _is_within(bound: Any, value: Any) -> bool:
    return is_number(bound) and bool(value <= bound)


def _shown(node: Node | None, path: str, rule: str) -> Any:
    if node is None or isinstance(node, BranchNode):
        return node and node.cls
    return leaf_of(node, path, rule)
