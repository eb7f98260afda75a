"""A check of one state's layout, prepared once and made many times.

For the structure that was captured a function is written, compiled, and called at each refresh:
straight-line code without walk, path or list, that leaves at the first thing it does not expect.
What it lets through has no difference. What it does not know may still be right (a tensor of
another subclass, a value equal but of an unusual type): then the exact comparison decides.

Where torch can compare many tensors in one call, a quicker function comes before that one. It
expects objects to be shared as they were at capture, and tensors that are like the last ones that
were compared in full, in such things too as no layout has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch

from graphshare.state._guards import Guard, guard_maker
from graphshare.state.code import compiled, same_place, write_check
from graphshare.state.difference import differences_of
from graphshare.state.layout import Layout, layout_of
from graphshare.state.leaves import LayoutDifference
from graphshare.state.nodes import TensorNode, read
from graphshare.state.taking import Taking, write_taking
from graphshare.state.unmoved import Fixed, count_guarded, fixed_tensors, write_unmoved

__all__ = ["LayoutChecker"]

_CHANCES = 8
_LAZY_MOVES = 8


class LayoutChecker:
    """Compares states with the one that was captured.

    Neither the state nor its tensors are kept; host values are.

    Args:
        state: The state at capture.
        device: The pool's device.
        rules: Path pattern to rule, as ``StateOwner.host_values``.

    Attributes:
        matches: ``matches(state) -> bool``: ``True`` if ``state`` has no difference. ``False``
            means that it may have one; ``differences`` says. It never raises an ``Exception``.
        learned: ``learned()``: the guard that ``matches`` has for the tensors of :meth:`taking`, or
            ``None`` while it has none, and once it does without.

    Raises:
        TypeError: A tensor of the device has no address (sparse, or a wrapper), unless its rule
            is ``any``.
        ValueError: A rule is unknown, or the state has more than a million leaves.
    """

    __slots__ = ("__weakref__", "_layout", "_moves", "learned", "matches")

    matches: Callable[[Any], bool]
    learned: Callable[[], Guard | None]

    def __init__(
        self,
        state: Any,
        device: torch.device | str,
        rules: Mapping[str, str] | None = None,
    ) -> None:
        self._layout = layout_of(state, device, rules)
        self._moves: tuple[Callable[[int], int], ...] = ()
        self.prepare()

    @property
    def layout(self) -> Layout:
        """The layout that was captured."""
        if self._moves:
            moves, self._moves = self._moves, ()
            self._layout = self._layout.moved(lambda address: _in_turn(moves, address))
        return self._layout

    def moved(self, address: Callable[[int], int]) -> LayoutChecker:
        """This checker when the captured tensors lie elsewhere, and all else is as captured.

        All of it is done when it is first used: of many states that move at once, most are
        refreshed much later.

        Args:
            address: Where an address of the device is then; kept until it was used.
        """
        made = object.__new__(LayoutChecker)
        if len(self._moves) == _LAZY_MOVES:
            made._layout, made._moves = self.layout, (address,)
        else:
            made._layout, made._moves = self._layout, (*self._moves, address)
        made.matches = partial(_first_match, ref(made))  # not by itself: that were a cycle
        made.learned = _nothing
        return made

    def prepare(self) -> None:
        """Make the check ready."""
        layout = self.layout
        self.matches, self.learned = _quick_check(layout) or (_plain_check(layout), _nothing)

    def taking(self) -> Taking | None:
        """Source of the quicker check, to stand in line; ``None`` where there is none."""
        return write_taking(self.layout) if guard_maker() else None

    def watch(self, state: Any) -> Callable[[], bool] | None:
        """A check of ``state`` for as long as builds return that very object.

        Args:
            state: One that has no difference. The check keeps its tensors.

        Returns:
            ``unmoved() -> bool``, as ``matches`` for this object alone; it takes it that nobody
            gets around what Python forbids. ``None`` if somebody may put something else into it,
            or if it has no tensor.
        """
        found = fixed_tensors(self.layout, state)
        if not found:
            return None
        source, constants = write_unmoved(found, guard_maker())
        return compiled(source)(*constants)

    def fixed(self, state: Any) -> Fixed | None:
        """What :meth:`watch` looks at, to be looked at in line; ``None`` if a guard is not enough.

        Args:
            state: As for :meth:`watch`.
        """
        make_guard = guard_maker()
        found = fixed_tensors(self.layout, state)
        if not make_guard or not found or not count_guarded(found):
            return None
        tensors = tuple(tensor for tensor, _ in found)
        return Fixed(tensors, tuple(node.address for _, node in found), make_guard(tensors))

    def count_fixed(self, state: Any) -> int:
        """How many tensors :meth:`fixed` would return for ``state``."""
        return count_guarded(fixed_tensors(self.layout, state)) if guard_maker() else 0

    def differences(self, state: Any) -> list[LayoutDifference]:
        """In what ``state`` differs from what was captured, under the rules; exact, and slower.

        Raises:
            TypeError: ``state`` has a tensor without an address.
        """
        return _differences(self.layout, state)


def _first_match(checker: Callable[[], LayoutChecker | None], state: Any) -> bool:
    this = checker()
    if this is None:  # who calls this has let go of it: let the exact comparison decide
        return False
    this.prepare()
    return this.matches(state)


def _in_turn(moves: tuple[Callable[[int], int], ...], address: int) -> int:
    for move in moves:
        address = move(address)
    return address


def _differences(layout: Layout, state: Any) -> list[LayoutDifference]:
    return differences_of(layout.root, read(state, layout.device, layout.rules), layout.rules)


def _matches_slowly(layout: Layout, state: Any) -> bool:
    try:
        return not _differences(layout, state)
    except Exception:  # noqa: BLE001 - the caller asks `differences`, which raises it again
        return False


def _plain_check(layout: Layout) -> Callable[[Any], bool]:
    written = write_check(layout)
    if written is None:
        return partial(_matches_slowly, layout)
    source, constants = written
    return compiled(source)(*constants)


def _quick_check(
    layout: Layout,
) -> tuple[Callable[[Any], bool], Callable[[], Guard | None]] | None:
    make_guard = guard_maker()
    taking = make_guard and write_taking(layout)
    if not make_guard or not taking:
        return None
    nodes = taking.nodes
    take: Callable[..., Any] = compiled(taking.source())(*taking.constants)
    guard: Callable[..., bool] = _refuses
    plain: Callable[[Any], bool] | None = None
    # How often a state may be right that was not let through: when threads or modes alternate, or
    # no build shares what was shared at capture, the quick check only adds to the cost.
    chances = _CHANCES

    def matches(state: Any) -> bool:
        tensors: Any = False
        try:
            tensors = take(state, guard)
            if tensors is True:
                return True
        except Exception:  # noqa: BLE001 - a key that is gone, a comparison that raises
            pass
        return look_again(state, tensors)

    def look_again(state: Any, tensors: Any) -> bool:
        nonlocal guard, plain, chances, take
        learned = _learn(make_guard, nodes, tensors) if tensors else None
        if learned is not None:
            guard = learned
        else:
            if plain is None:
                plain = _plain_check(layout)
            if not plain(state):
                return False
        chances -= 1
        if chances <= 0:
            take = guard = _refuses
        return True

    def learned() -> Guard | None:
        return None if guard is _refuses else guard

    return matches, learned


def _refuses(*_: Any) -> bool:
    return False


def _nothing() -> None:
    """There is no guard."""


def _learn(
    make_guard: Callable[[Sequence[torch.Tensor]], Callable[..., bool]],
    nodes: list[TensorNode],
    tensors: Sequence[torch.Tensor],
) -> Callable[..., bool] | None:
    """A guard made from ``tensors``, if they are those of ``nodes``."""
    try:
        guard = make_guard(tensors)
        return guard if all(map(same_place, nodes, tensors)) else None
    except Exception:  # noqa: BLE001 - the plain check decides
        return None
