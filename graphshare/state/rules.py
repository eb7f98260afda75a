"""Rules: how strictly a value of a state is compared, chosen by path."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal, get_args

__all__ = ["Rule", "RuleSet", "check_rules"]

_WILD = re.compile(r"[*?\[]")

Rule = Literal["equal", "at_most", "any"]
"""``equal`` to what was captured; ``at_most`` that number; ``any`` value or layout at all."""


def check_rules(rules: Mapping[str, str] | None) -> None:
    """Refuse rules that cannot be meant.

    Args:
        rules: Path pattern to rule, as ``StateOwner.host_values``.

    Raises:
        TypeError: ``rules`` is no mapping, or a pattern or rule is no string.
        ValueError: A rule is none of ``"equal"``, ``"at_most"`` and ``"any"``.
    """
    if rules is None:
        return
    if not isinstance(rules, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"host_values: expected a mapping of path pattern to rule, got {type(rules).__name__}"
        )
    for pattern, rule in rules.items():
        if not isinstance(pattern, str) or not isinstance(rule, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"host_values: expected strings as path pattern and rule, got {pattern!r}: {rule!r}"
            )
        if rule not in get_args(Rule):
            raise ValueError(
                f"host_values: expected one of {', '.join(get_args(Rule))} for {pattern!r}, "
                f"got {rule!r}"
            )


@lru_cache(maxsize=1024)
def _matcher(pattern: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(pattern)).match


class RuleSet:
    """Rules in their order; the first whose pattern matches a path wins.

    A pattern is matched, with case, against the path and against the path with a dot before it,
    so ``*.max_seq_len`` names it at the root too. ``any`` for a container holds for all within,
    but for leaves that an earlier pattern names.

    Args:
        rules: Path pattern to rule.
    """

    __slots__ = ("_ceiling", "_endings", "_first_strict", "_patterns", "_reach", "_rules", "source")

    def __init__(self, rules: Mapping[str, str] | None = None) -> None:
        check_rules(rules)
        self.source: tuple[tuple[str, str], ...] = tuple((rules or {}).items())
        self._patterns = [_matcher(name) for name, _ in self.source]
        self._rules: list[str] = [rule for _, rule in self.source]
        self._ceiling = len(self._rules)
        strict = (i for i, rule in enumerate(self._rules) if rule != "any")
        self._first_strict = next(strict, self._ceiling)
        # How many names at the end of a path decide; None if a pattern looks at more than the end.
        self._reach: int | None = 0
        for name, _ in self.source:
            if name[:2] != "*." or _WILD.search(name, 2):
                self._reach = None
                break
            self._reach = max(self._reach, name.count("."))
        by_ending = self._reach is not None
        self._endings = tuple(name[1:] for name, _ in self.source) if by_ending else None

    def __bool__(self) -> bool:
        return bool(self._rules)

    @property
    def ceiling(self) -> int:
        """The index to start from at the root: beyond every pattern."""
        return self._ceiling

    def _first(self, path: str, below: int) -> int:
        if self._endings is not None and not ("." + path).endswith(self._endings):
            return below
        for i in range(below):
            match = self._patterns[i]
            if match(path) or match("." + path):
                return i
        return below

    def within(self, path: str, below: int) -> int:
        """The index that holds inside the container at ``path``, ``below`` holding around it."""
        if not below:
            return 0
        found = self._first(path, below)
        return found if found < self._ceiling and self._rules[found] == "any" else below

    @property
    def by_ending(self) -> bool:
        """Whether every pattern is ``*.`` and a name, so that the end of a path decides."""
        return self._reach is not None

    def context(self, path: str) -> str:
        """All of a container's path that decides the rules within, for a given index.

        Containers that are one object, under two paths of one context, need one look: layers
        share their metadata, and most patterns are a name after ``*.``.
        """
        if self._reach is None:
            return path
        if self._reach < 2:
            return ""
        return ".".join(path.rsplit(".", self._reach - 1)[1 - self._reach :])

    def leaves_out(self, below: int) -> bool:
        """Whether nothing in a container with this index can be but ``any``."""
        return below < self._ceiling and below <= self._first_strict

    def rule(self, path: str, below: int) -> str:
        """The rule for the leaf at ``path`` in a container with index ``below``."""
        found = self._first(path, below)
        return self._rules[found] if found < self._ceiling else "equal"
