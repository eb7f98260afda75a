"""What :func:`graphshare.testing.check_owner` found."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override

from graphshare.testing.catalogue import CHECKS

__all__ = ["Fact", "Findings", "Rejection", "Report", "shown_keys"]

_WIDTH = 96
_KEYS_SHOWN = 2


def shown_keys(keys: Iterable[Hashable]) -> str:
    """Name the first keys, and say how many more there are."""
    every = [str(key) for key in keys]
    more = len(every) - _KEYS_SHOWN
    text = ", ".join(every[:_KEYS_SHOWN])
    return f"{text} and {more} more" if more > 0 else text


@dataclass(frozen=True, slots=True)
class Rejection:
    """One thing that a captured state must satisfy and this owner's does not.

    Attributes:
        check: Id of the check, one of :data:`graphshare.testing.CHECKS`.
        what: What was looked at.
        expected: What would have been right.
        got: What was found.
        path: The leaf's path in the state, ``""`` where it is about no leaf.
        keys: The keys for which it was found.
        batch: Index of the first batch for which it was found, among those of the first key;
            ``None`` where there was no batch.
        consequence: What would happen in an engine.
        remedy: What to do.
    """

    check: str
    what: str
    expected: str
    got: str
    path: str = ""
    keys: tuple[Hashable, ...] = ()
    batch: int | None = None
    consequence: str = ""
    remedy: str = ""

    @override
    def __str__(self) -> str:
        where = shown_keys(self.keys)
        if self.batch is not None:
            where += f", batch {self.batch}"
        return (
            f"{self.what}: expected {self.expected}, got {self.got} (key {where}). "
            f"{self.consequence}. {self.remedy}."
        )


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that is no fault but that whoever captures should know.

    Attributes:
        name: What it is about.
        text: The fact, in words.
        details: The same by key or by path, for programs.
    """

    name: str
    text: str
    details: Mapping[Any, Any] = field(default_factory=dict[Any, Any])

    @override
    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one conformance check; ``print`` it.

    Attributes:
        owner: The owner's type, by name.
        device: Where its states lie.
        keys: The keys, largest first.
        num_batches: Batches that were built.
        num_builds: Calls of ``build``.
        rejections: What is wrong, in the order of the catalogue.
        allowed: What is wrong and was allowed.
        facts: What is no fault.
        not_checked: Id of a check to why it was not made, or not in full.
    """

    owner: str
    device: str
    keys: tuple[Hashable, ...]
    num_batches: int
    num_builds: int
    rejections: tuple[Rejection, ...] = ()
    allowed: tuple[Rejection, ...] = ()
    facts: tuple[Fact, ...] = ()
    not_checked: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def ok(self) -> bool:
        """Whether nothing was rejected."""
        return not self.rejections

    @override
    def __str__(self) -> str:
        count = len(self.rejections)
        verdict = "conforms" if self.ok else f"does not conform, {_count(count, 'rejection')}"
        head = (
            f"{self.owner} {verdict}: {_count(len(self.keys), 'key')}, "
            f"{_count(self.num_batches, 'batch', 'batches')}, "
            f"{_count(self.num_builds, 'build')}, on {self.device}"
        )
        lines = [head]
        for rejection in self.rejections:
            lines += [
                "",
                f"  {rejection.check}" + (f": {rejection.path}" if rejection.path else ""),
            ]
            lines += _filled(str(rejection), 4)
        if self.allowed:
            lines += ["", "  allowed"]
            for rejection in self.allowed:
                lines += _filled(
                    f"{rejection.check}: {rejection.what}: expected {rejection.expected}, "
                    f"got {rejection.got} (key {shown_keys(rejection.keys)})",
                    4,
                )
        if self.facts:
            lines += ["", "  facts"]
            for fact in self.facts:
                lines += _filled(f"{fact.name}: {fact.text}", 4)
        if self.not_checked:
            lines += ["", "  not checked"]
            for check, why in self.not_checked.items():
                lines += _filled(f"{check}: {why}", 4)
        return "\n".join(lines)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _filled(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


class Findings:
    """Collects while checks run: one rejection for each check and leaf, with all its keys."""

    def __init__(self) -> None:
        self._rejections: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.facts: list[Fact] = []
        self.not_checked: dict[str, str] = {}

    def reject(
        self,
        check: str,
        what: str,
        expected: str,
        got: str,
        *,
        key: Hashable,
        path: str = "",
        batch: int | None = None,
        remedy: str = "",
    ) -> None:
        """Note a rejection; what is known of the leaf already gets one more key."""
        found = self._rejections.get((check, path, what))
        if found is None:
            self._rejections[check, path, what] = {
                "expected": expected,
                "got": got,
                "keys": [key],
                "batch": batch,
                "remedy": remedy or CHECKS[check].remedy,
            }
        elif key not in found["keys"]:
            found["keys"].append(key)

    def fact(self, name: str, text: str, details: Mapping[Any, Any] | None = None) -> None:
        """Note a fact."""
        self.facts.append(Fact(name, text, details or {}))

    def incomplete(self, check: str, why: str) -> None:
        """Note that a check was not made, or not in full; a check may have several reasons."""
        before = self.not_checked.get(check)
        self.not_checked[check] = why if before is None else f"{before}; {why}"

    def has(self, check: str, path: str | None = None) -> bool:
        """Whether a check, at a leaf or anywhere, has been failed."""
        return any(c == check and path in (None, p) for c, p, _ in self._rejections)

    def rejections(self) -> list[Rejection]:
        """All rejections, in the order of the catalogue."""
        order = list(CHECKS)
        made = [
            Rejection(
                check,
                what,
                found["expected"],
                found["got"],
                path,
                tuple(found["keys"]),
                found["batch"],
                CHECKS[check].consequence,
                found["remedy"],
            )
            for (check, path, what), found in self._rejections.items()
        ]
        return sorted(made, key=lambda each: order.index(each.check))
