"""Values on the host: a graph is captured with one, whatever later builds return."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from graphshare.state.values import is_number
from graphshare.testing.subject import Deviation, Subject

__all__ = ["run"]


def run(subject: Subject) -> None:
    """Report every value that did not come out as it was captured."""
    found: dict[tuple[str, Hashable], list[Deviation]] = {}
    for deviation in subject.deviations:
        path = deviation.difference.path
        if path in subject.captured[deviation.key].host:
            found.setdefault((path, deviation.key), []).append(deviation)
    for (path, key), deviations in found.items():
        first = deviations[0]
        rule = first.difference.rule
        values = [d.difference.got for d in deviations]
        expected = first.difference.expected
        if rule == "at_most":
            subject.findings.reject(
                "broken-rule",
                path or "the state",
                f"at most {expected!r}, as captured",
                f"{first.difference.got!r} from a build for {first.phase.name}",
                key=key,
                path=path,
                batch=first.batch,
            )
            continue
        subject.findings.reject(
            "frozen-value",
            path or "the state",
            f"{expected!r}, as captured",
            f"{first.difference.got!r} from a build for {first.phase.name}",
            key=key,
            path=path,
            batch=first.batch,
            remedy=_remedy(path, expected, values),
        )
    few = [key for key in subject.captured if len(subject.replays(key)) < 2]
    if few:
        for check in ("frozen-value", "broken-rule"):
            subject.findings.incomplete(
                check,
                f"{len(few)} of {len(subject.captured)} keys have fewer than two batches to "
                "compare",
            )


def _remedy(path: str, expected: Any, values: list[Any]) -> str:
    """The rule that would have held, where there is one; the catalogue's advice otherwise."""
    name = path.rpartition(".")[2]
    if is_number(expected) and all(is_number(v) and v <= expected for v in values):
        return (
            f'If kernels use it as a bound alone: host_values = {{"*.{name}": "at_most"}}; if none '
            'reads it: "any"; otherwise make it part of the key, or a tensor'
        )
    if is_number(expected):
        return (
            f"If kernels use it as a bound: return the capacity for Phase.CAPTURE, and host_values "
            f'= {{"*.{name}": "at_most"}}; if none reads it: "any"; otherwise make it part of the '
            "key, or a tensor"
        )
    if not any(type(value) is type(expected) for value in values) or _has_value(expected):
        return ""
    return "Return the same object in each build of the key for CAPTURE and REPLAY"


def _has_value(value: Any) -> bool:
    return type(value).__eq__ is not object.__eq__
