"""``check_owner``: run an engine's own state owner through what a captured state must satisfy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from graphshare.owner import Phase
from graphshare.state import check_rules, walk
from graphshare.state.nodes import is_on
from graphshare.testing import arguments
from graphshare.testing.arguments import Allowed, Batches
from graphshare.testing.checks import bounds as bounds_check
from graphshare.testing.checks import (
    capture,
    contents,
    footprint,
    host_values,
    patterns,
    places,
    refusal,
    synchronisation,
)
from graphshare.testing.memory import Watched
from graphshare.testing.paths import matches
from graphshare.testing.report import Rejection, Report
from graphshare.testing.subject import Subject

__all__ = ["OwnerDoesNotConform", "assert_owner_conforms", "check_owner"]


class OwnerDoesNotConform(AssertionError):  # noqa: N818 - read as a sentence, as pytest shows it
    """An owner was rejected.

    Attributes:
        report: Why.
    """

    report: Report

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report,)


def check_owner(
    owner: Any,
    keys: Iterable[Hashable],
    batches: Batches,
    *,
    device: torch.device | str | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    impossible: Batches = (),
    bounds: Mapping[str, tuple[float, float]] | None = None,
    scratch: str | Iterable[str] = (),
    allow: str | Iterable[str] = (),
) -> Report:
    """Build an owner's states in every way that a pool does, and say what would go wrong.

    The owner is built for warmups and captures, for every batch, in several orders of keys, on
    poisoned memory, and for batches that it must refuse; nothing is captured, and a GPU is not
    needed. Give at least two batches of different sizes for each key, so that what is frozen or
    left over shows.

    The memory of the states is overwritten while this runs, and holds a build for a capture
    afterwards. A build that uses old contents as indices may fail on the poison; on a GPU such a
    failure may end the process.

    Args:
        owner: What would be passed as ``GraphPool(owner=...)``.
        keys: What would be passed to ``GraphPool.capture``.
        batches: What would be passed to ``GraphPool.refresh``, by key: a mapping, or a function of
            the key, or a sequence of batches that fit every key.
        device: Where the states lie. Left out, that of the first tensor that is not on the CPU,
            else the CPU.
        forward: ``forward(key, state)``, run in each warmup: what it initialises in the state must
            not be there in the capture's build.
        impossible: Batches that a key must refuse, in the same forms. Batches of larger keys are
            offered as well, where batch and key both have ``num_tokens``, ``num_reqs`` or
            ``max_query_len``.
        bounds: Path pattern to the least and the most that an element may be:
            ``{"*.seq_lens": (1, 4096)}``. The first that names a tensor holds for it: for all
            elements in builds with no batch, and for the live rows of batches. Which rows are live
            the owner's ``live_rows`` says, otherwise ``num_reqs`` and ``num_tokens`` of key and
            batch; where neither tells, the report has it under what was not checked. Padding may
            be out of bounds, if the kernels pass over it; the report has that as a fact.
        scratch: A path pattern, or several, of tensors whose contents only a kernel library knows
            (FlashInfer's workspaces): that elements are left unwritten, or differ, is no fault
            there.
        allow: The id of a check whose rejections are accepted, or several, of
            :data:`graphshare.testing.CHECKS`; ``"padding:*.block_table"`` accepts them at some
            paths.

    Returns:
        What was found; ``report.ok`` and ``print(report)``.

    Raises:
        TypeError: ``owner`` is a class, or has no ``build`` that takes a key, a batch and a phase;
            one key or batch is given where several are expected; ``forward``, ``bounds``,
            ``scratch`` or ``allow`` are of another type.
        ValueError: There are no keys or no batches at all, two keys are equal, batches are given
            for another key, an id in ``allow`` is unknown, a pattern of ``bounds`` names no tensor
            that graphs read, or no tensor of the states is on ``device``.

    Example:
        >>> import torch
        >>> from graphshare import BatchDescriptor, PersistentBuffer
        >>> class Owner:
        ...     def __init__(self):
        ...         self.seq_lens = PersistentBuffer(8, torch.int32, "cpu", padding=1)
        ...
        ...     def build(self, key, batch, phase):
        ...         if batch is None:
        ...             return {"seq_lens": self.seq_lens.fill(1, key.num_reqs)}
        ...         return {"seq_lens": self.seq_lens.write(batch, key.num_reqs)}
        >>> keys = [BatchDescriptor(n, n) for n in (8, 4)]
        >>> check_owner(Owner(), keys, lambda key: [[3] * key.num_reqs, [7, 5]]).ok
        True
    """
    allowed = arguments.read_allow(allow)
    arguments.read_owner(owner)
    ordered = arguments.read_keys(keys)
    subject = Subject(
        owner=owner,
        keys=ordered,
        batches=arguments.read_batches("batches", batches, ordered, needed=True),
        impossible=arguments.read_batches("impossible", impossible, ordered, needed=False),
        device=arguments.read_device(device),
        seeks_device=device is None,
        rules=None,
        forward=arguments.read_forward(forward),
        scratch=arguments.read_patterns("scratch", scratch),
        bounds=arguments.read_bounds(bounds),
    )
    _read_rules(subject)
    _run(subject)
    rejections = subject.findings.rejections()
    _say_what_allows_nothing(subject, allowed, rejections)
    return Report(
        owner=(owner if isinstance(owner, type) else type(owner)).__name__,
        device=str(subject.device),
        keys=ordered,
        num_batches=sum(map(len, subject.batches.values())),
        num_builds=subject.num_builds,
        rejections=tuple(r for r in rejections if not _is_allowed(r, allowed)),
        allowed=tuple(r for r in rejections if _is_allowed(r, allowed)),
        facts=tuple(subject.findings.facts),
        not_checked=dict(subject.findings.not_checked),
    )


def assert_owner_conforms(
    owner: Any, keys: Iterable[Hashable], batches: Batches, **options: Any
) -> Report:
    """Check an owner, in one line of a test.

    Args:
        owner: As :func:`check_owner`.
        keys: As :func:`check_owner`.
        batches: As :func:`check_owner`.
        options: As :func:`check_owner`.

    Returns:
        The report, for its facts.

    Raises:
        OwnerDoesNotConform: Something was rejected.
    """
    report = check_owner(owner, keys, batches, **options)
    if not report.ok:
        raise OwnerDoesNotConform(report)
    return report


def _run(subject: Subject) -> None:
    capture.run(subject)
    _check_device(subject)
    patterns.bounds(subject)
    if subject.forward is None:
        subject.findings.incomplete("lazy", "no forward was given; builds alone were looked at")
    places.orders(subject)
    leaves = [leaf for captured in subject.captured.values() for leaf in captured.leaves]
    watched = Watched(leaves)
    places.growth(subject)
    contents.run(subject, watched)
    footprint.run(subject, watched)
    refusal.run(subject, watched)
    bounds_check.run(subject)
    synchronisation.run(subject)
    patterns.unused(subject)
    for key in subject.captured:
        subject.build(key, None, Phase.CAPTURE)
    places.deviations(subject)
    host_values.run(subject)


def _is_allowed(rejection: Rejection, allowed: Allowed) -> bool:
    return any(
        check == rejection.check and (not pattern or matches(rejection.path, [pattern]))
        for check, pattern in allowed
    )


def _say_what_allows_nothing(
    subject: Subject, allowed: Allowed, rejections: Iterable[Rejection]
) -> None:
    found = list(rejections)
    unused = {
        f"{check}:{pattern}" if pattern else check: None
        for check, pattern in allowed
        if not any(_is_allowed(each, ((check, pattern),)) for each in found)
    }
    if unused:
        subject.findings.fact(
            "unused-allow", f"nothing is rejected that {', '.join(unused)} allows", unused
        )


def _read_rules(subject: Subject) -> None:
    rules = getattr(subject.owner, "host_values", None)
    try:
        check_rules(rules)
    except (TypeError, ValueError) as error:
        subject.findings.reject(
            "protocol",
            "host_values",
            "path patterns with rules",
            str(error),
            key=subject.keys[0],
        )
    else:
        subject.rules = rules


def _check_device(subject: Subject) -> None:
    """Refuse a device on which nothing lies, and reject states of which nothing is looked at.

    Raises:
        ValueError: The states have tensors, all of them elsewhere.
    """
    tensors = {
        key: [v for _, v in walk(captured.state) if isinstance(v, torch.Tensor)]
        for key, captured in subject.captured.items()
    }
    every = [tensor for found in tensors.values() for tensor in found]
    if every and not any(is_on(tensor.device, subject.device) for tensor in every):
        raise ValueError(
            f"device: expected where the states lie, {every[0].device}, got {subject.device}"
        )
    for key, found in tensors.items():
        here = [tensor for tensor in found if is_on(tensor.device, subject.device)]
        if here and not subject.captured[key].leaves:
            subject.findings.reject(
                "state",
                "what build returns",
                f"tensors on {subject.device} that graphs read",
                f"{len(here)} with the rule any",
                key=key,
                remedy="Give the rule any to none that a kernel reads",
            )
