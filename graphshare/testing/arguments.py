"""What ``check_owner`` is given: taken as it is meant, or refused before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch

from graphshare.testing.catalogue import CHECKS

__all__ = [
    "Allowed",
    "Batches",
    "read_allow",
    "read_batches",
    "read_bounds",
    "read_device",
    "read_forward",
    "read_keys",
    "read_owner",
    "read_patterns",
]

Batches: TypeAlias = Mapping[Any, Iterable[Any]] | Callable[[Any], Iterable[Any]] | Sequence[Any]
"""By key; or a function of the key; or a sequence, every one of which fits every key."""

Allowed: TypeAlias = tuple[tuple[str, str], ...]
"""Ids of checks with a path pattern each, ``""`` for every path."""


def read_owner(owner: Any) -> None:
    """Refuse what no pool could build with.

    Raises:
        TypeError: ``owner`` has no ``build``, or one that does not take a key, a batch and a phase.
    """
    build = getattr(owner, "build", None)
    if not callable(build):
        raise TypeError(
            f"owner: expected an object with build(key, batch, phase), got {_named(owner)}"
        )
    try:
        signature = inspect.signature(build)
    except ValueError:  # of a callable that does not say what it takes
        return
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        if isinstance(owner, type):
            raise TypeError(
                f"owner: expected an instance, got the class {owner.__name__}. "
                f"Pass {owner.__name__}(...)"
            ) from error
        raise TypeError(
            f"owner: expected build(key, batch, phase), got build{signature} "
            f"of {type(owner).__name__}"
        ) from error


def read_keys(keys: Any) -> tuple[Hashable, ...]:
    """Return the keys, largest first, where they have a cost.

    Raises:
        TypeError: ``keys`` is one key and not several, or one cannot be hashed.
        ValueError: There are none, or two are equal.
    """
    given = _several("keys", keys, "key")
    if not given:
        raise ValueError("keys: expected at least one, got none")
    try:
        different = len(set(given))
    except TypeError as error:
        raise TypeError(f"keys: expected what can be hashed, got {error}") from error
    if different != len(given):
        raise ValueError("keys: expected no two equal")
    costs: list[Any] = [getattr(key, "cost", None) for key in given]
    if not all(map(callable, costs)):
        return given  # of an order that the caller knows
    return tuple(sorted(given, key=lambda key: key.cost(), reverse=True))  # pyright: ignore[reportAttributeAccessIssue]


def read_batches(
    name: str, given: Any, keys: tuple[Hashable, ...], *, needed: bool
) -> dict[Hashable, tuple[Any, ...]]:
    """Return batches by key.

    Args:
        name: Of the argument.
        given: :data:`Batches`.
        keys: Those that are checked.
        needed: Whether there must be a batch for at least one key.

    Raises:
        TypeError: One batch is given where several are expected.
        ValueError: Batches are given for another key, or there are none and one is needed.
    """
    if isinstance(given, Mapping):
        other = [key for key in given if key not in keys]
        if other:
            raise ValueError(f"{name}: expected keys that are checked, got {other[0]!r}")
        found = {
            key: _several(f"{name} of {key}", batches, "batch") for key, batches in given.items()
        }
    elif callable(given):
        found = {key: _several(f"{name}({key})", given(key), "batch") for key in keys}
    else:
        found = dict.fromkeys(keys, _several(name, given, "batch"))
    if needed and not any(found.values()):
        raise ValueError(
            f"{name}: expected at least one for some key, got none. Without one no replay is "
            "built, and hardly anything is checked"
        )
    return found


def _several(name: str, given: Any, one: str) -> tuple[Any, ...]:
    """Take an iterable, but none that is itself one key or one batch.

    Raises:
        TypeError: ``given`` is not several of them.
    """
    single = isinstance(given, (str, bytes, torch.Tensor)) or hasattr(given, "_fields")
    # A mapping may be a batch with its fields, but its keys may be meant as the keys.
    single |= one == "batch" and isinstance(given, Mapping)
    if single or not _iterable(given):
        many = {"key": "keys", "batch": "batches"}[one]
        raise TypeError(
            f"{name}: expected {many}, got {_named(given)}. Pass a list, also for one {one} alone"
        )
    return tuple(given)


def _iterable(given: Any) -> bool:
    try:
        iter(given)
    except TypeError:  # a tensor without dimensions says so only when it is asked
        return False
    return True


def read_device(device: torch.device | str | None) -> torch.device:
    """Return the device; the CPU if there is none.

    Raises:
        ValueError: There is no such device.
    """
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device: expected one such as 'cpu' or 'cuda:0', got {device!r}"
        ) from error


def read_forward(forward: Any) -> Callable[[Any, Any], Any] | None:
    """Return the forward.

    Raises:
        TypeError: It cannot be called.
    """
    if forward is not None and not callable(forward):
        raise TypeError(f"forward: expected forward(key, state), got {_named(forward)}")
    return forward


def read_bounds(bounds: Any) -> dict[str, tuple[float, float]]:
    """Return pattern to the least and the most that an element may be.

    Raises:
        TypeError: No mapping of strings to pairs of numbers.
        ValueError: The least is more than the most, or one is NaN.
    """
    if bounds is None:
        return {}
    if not isinstance(bounds, Mapping):
        raise TypeError(
            f"bounds: expected a mapping of path pattern to (least, most), got {_named(bounds)}"
        )
    found: dict[str, tuple[float, float]] = {}
    for pattern, pair in bounds.items():
        if not isinstance(pattern, str):
            raise TypeError(f"bounds: expected path patterns, got {_named(pattern)}")
        if (
            not isinstance(pair, (tuple, list))
            or len(pair) != 2
            or not all(isinstance(each, Real) for each in pair)
        ):
            raise TypeError(f"bounds: expected (least, most) for {pattern!r}, got {pair!r}")
        least, most = pair
        if not least <= most:
            raise ValueError(
                f"bounds: expected the least first for {pattern!r}, got {least} and {most}"
            )
        found[pattern] = least, most
    return found


def read_patterns(name: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """Return patterns; a string is one, and not its characters.

    Raises:
        TypeError: One is no string.
    """
    patterns: tuple[Any, ...] = (
        (given,) if isinstance(given, str) or not _iterable(given) else tuple(given)
    )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{name}: expected strings, got {_named(pattern)}")
    return patterns


def read_allow(allow: str | Iterable[str]) -> Allowed:
    """Return what is allowed.

    Raises:
        TypeError: An entry is no string.
        ValueError: The id of a check is unknown.
    """
    entries = read_patterns("allow", allow)
    found = tuple(
        (check, pattern) for check, _, pattern in (entry.partition(":") for entry in entries)
    )
    unknown = [check for check, _ in found if check not in CHECKS]
    if unknown:
        raise ValueError(f"allow: expected ids of {', '.join(CHECKS)}, got {', '.join(unknown)}")
    return found


def _named(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    kind = type(value).__name__
    if text.startswith("<"):
        return kind
    return _short(text if text.startswith(kind) else f"{kind} {text}")


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
