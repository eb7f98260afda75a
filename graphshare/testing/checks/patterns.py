"""Path patterns that name nothing: what they were to say, or to look at, is not in force."""

from __future__ import annotations

from collections.abc import Iterable

from graphshare.state import walk
from graphshare.testing.paths import matches, names
from graphshare.testing.subject import Subject

__all__ = ["bounds", "unused"]


def bounds(subject: Subject) -> None:
    """Refuse bounds that hold for no tensor: nothing would be looked at, and nothing said.

    Raises:
        ValueError: A pattern names no tensor that graphs read, or none that an earlier one leaves.
    """
    leaves = dict.fromkeys(
        leaf.path for captured in subject.captured.values() for leaf in captured.leaves
    )
    used = {subject.bound_of(path) for path in leaves}
    unused_ones = [pattern for pattern in subject.bounds if pattern not in used]
    if not unused_ones:
        return
    if len(subject.captured) < len(subject.keys) or subject.findings.has("state"):
        # The tensor may be one that is missing.
        subject.findings.incomplete("bounds", f"no tensor found for {_shown(unused_ones)}")
        return
    first = unused_ones[0]
    if any(matches(path, [first]) for path in leaves):
        raise ValueError(
            f"bounds: expected each pattern to be the first for some tensor, got {first!r}, before "
            "which others name all of its own. Put the narrower pattern first"
        )
    raise ValueError(
        f"bounds: expected patterns of tensors that graphs read, got {first!r}, which names none "
        f"of {', '.join(path or 'the root' for path in leaves) or 'no tensors'}"
    )


def unused(subject: Subject) -> None:
    """State the patterns of rules, scratch and live rows that name no leaf."""
    paths = [path for captured in subject.captured.values() for path, _ in walk(captured.state)]
    if not paths:
        return
    for name, where, patterns, within in (
        ("unused-rule", "host_values", subject.rules or (), True),
        ("unused-scratch", "scratch", subject.scratch, True),
        ("unused-live-rows", "live_rows", subject.row_patterns, False),
    ):
        matched = matches if within else names
        found = [each for each in patterns if not any(matched(path, [each]) for path in paths)]
        if found:
            subject.findings.fact(
                name,
                f"no leaf of any state is named by {_shown(found)} in {where}",
                dict.fromkeys(found),
            )


def _shown(patterns: Iterable[str]) -> str:
    return ", ".join(map(repr, patterns))
