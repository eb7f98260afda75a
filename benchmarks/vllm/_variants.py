"""vLLM with graphshare's hooks on and off, within one process and on the same graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import Self

from benchmarks._measure import Ratio, among, bootstrap, medians, resampled

__all__ = [
    "AGAIN", "COMPARISONS", "DECODES", "FEWEST", "OF_ALL", "ON_AGAIN", "SECONDS", "SHARE", "TIMED",
    "Place", "Switch", "beside_off", "names", "share_of_skipping", "to_off",
]  # fmt: skip

AGAIN = "again"
ON_AGAIN = "on again"
OF_ALL = "together_with_all_comparisons"

SECONDS = "seconds"
"""Of single calls or steps; they are not collected."""

COMPARISONS = 54
"""With vLLM alone, where no difference is to show: of three versions, two pairs of models and three
numbers of requests, the times of steps in turns, of 64 tokens and of the first one."""

FEWEST = 16
"""Rounds: of 12 the widest interval is all that was seen, of fewer it has no ends."""

SHARE = "share_of_what_skipping_saves"

Place = tuple[str, str]
"""An object of vLLM, by a name of ours, and an attribute of it that graphshare sets."""

DECODES = "propose / metadata builds of the decodes"

TIMED: dict[Place, str] = {
    ("model_state", "prepare_attn"): "execute_model / metadata build",
    ("speculator", "_build_draft_attn_metadata"): DECODES,
    ("prefill", "dispatch"): "propose / prefill dispatch",
    ("target", "dispatch"): "execute_model / dispatch",
    ("decode", "dispatch"): "propose / decode dispatch",
    ("target", "run_fullgraph"): "execute_model / graph launch",
    ("prefill", "run_fullgraph"): "propose / prefill launch",
    ("decode", "run_fullgraph"): "propose / decode launches",
}
"""Methods of which each variant may have its own, and that somebody may want to wrap: which part of
a step each is."""

_ABSENT: Any = object()


def names(session: Any) -> list[str]:
    """What can be compared: ``on``, ``off``, and ``skipped``, or the two others once more.

    ``skipped`` leaves out vLLM 0.20.2's rebuild before each draft prefill and checks nothing: what
    there is to win. Where nothing is rebuilt, no difference is to show. What ran last is still in
    the processor's caches, so there each has two turns of four: ``on again`` is what ``on`` is, and
    ``again`` what ``off`` is.
    """
    rebuilds = session.family.without_rebuild is not None
    return ["on", "off", "skipped"] if rebuilds else ["on", "off", ON_AGAIN, AGAIN]


class Switch:
    """Makes vLLM run as another variant at once: a few attributes are set to what they were.

    The hooks are put on once and stay the same objects, as in a process that serves; a variant
    without them is one in which vLLM does not find them. :meth:`end`, or the end of a ``with``,
    leaves them on.

    Args:
        session: graphshare's.
        runner: vLLM's model runner.

    Attributes:
        originals: What vLLM has of itself of the methods in ``TIMED``.
    """

    def __init__(self, session: Any, runner: Any) -> None:
        speculator = runner.speculator
        managers = {
            "target": runner.cudagraph_manager,
            "prefill": speculator.prefill_cudagraph_manager,
            "decode": speculator.decode_cudagraph_manager,
        }
        self._objects = {"model_state": runner.model_state, "speculator": speculator, **managers}
        self._wrappers: dict[Place, Callable[[Any], Any]] = {}
        self._watchers: dict[Place, Callable[[Any], Any]] = {}
        self._settings: dict[str, list[tuple[Any, str, Any]]] = {}
        session.pause()
        off = self._found()
        self.originals: dict[Place, Any] = {
            place: getattr(self._objects[place[0]], place[1]) for place in TIMED
        }
        session.resume()
        on = self._found()
        # Whatever the hooks are: none is left on in a variant that is to be without them.
        differ = [place for place in off | on if off.get(place) is not on.get(place)]
        self._places = list(dict.fromkeys([*TIMED, *differ]))
        self._variants = {
            name: {place: found.get(place, _ABSENT) for place in self._places}
            for name, found in (("off", off), ("on", on))
        }
        without_rebuild = session.family.without_rebuild
        if without_rebuild is None:
            self.add(AGAIN, {})
            self.add(ON_AGAIN, {}, like="on")
        else:
            place = "speculator", "_build_draft_attn_metadata"
            self.add("skipped", {place: without_rebuild(self.originals[place], lambda: True)})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _found(self) -> dict[Place, Any]:
        return {
            (name, attribute): value
            for name, target in self._objects.items()
            for attribute, value in vars(target).items()
        }

    def add(self, name: str, values: Mapping[Place, Any], like: str = "off") -> None:
        """Add a variant, which is another one but for these attributes."""
        self._variants[name] = self._variants[like] | dict(values)

    def wrap(self, wrappers: Mapping[Place, Callable[[Any], Any]]) -> None:
        """Put these around methods in ``TIMED``, of each variant; an empty one takes them off."""
        self._wrappers, self._settings = dict(wrappers), {}

    def watch(self, place: Place, watcher: Callable[[Any], Any] | None) -> None:
        """Put this around a method in ``TIMED``, of each variant, and around what wraps it."""
        self._settings = {}
        if watcher is None:
            self._watchers.pop(place, None)
        else:
            self._watchers[place] = watcher

    def to(self, name: str) -> None:
        """Run like this from now on."""
        settings = self._settings.get(name)
        if settings is None:
            settings = self._settings[name] = self._prepared(name)
        for target, attribute, value in settings:
            if value is _ABSENT:
                vars(target).pop(attribute, None)
            else:
                setattr(target, attribute, value)

    def _prepared(self, name: str) -> list[tuple[Any, str, Any]]:
        settings: list[tuple[Any, str, Any]] = []
        for place in self._places:
            value = self._variants[name][place]
            for around in (self._wrappers, self._watchers):
                if place in around:
                    inner = self.originals[place] if value is _ABSENT else value
                    value = around[place](inner)
            settings.append((self._objects[place[0]], place[1], value))
        return settings

    def end(self) -> None:
        """Run with the hooks on, as they were put on."""
        self._watchers.clear()
        self.wrap({})
        self.to("on")


def beside_off(times: Mapping[str, Sequence[float]]) -> dict[str, list[tuple[float, float]]]:
    """Pair the time of each variant with that of ``off``, round by round.

    Args:
        times: By variant, one of each round.

    Returns:
        By variant. Where ``on`` and ``off`` have two turns each, ``on`` has the means of both, and
        ``again`` those of the second turns, beside those of the first: what differs by chance, as
        widely as ``on`` does, for there are two of either kind on both sides.
    """
    if ON_AGAIN not in times:
        return {
            name: list(zip(each, times["off"], strict=True))
            for name, each in times.items()
            if name != "off"
        }

    def means(one: str, other: str) -> list[float]:
        return [(a + b) / 2 for a, b in zip(times[one], times[other], strict=True)]

    return {
        "on": list(zip(means("on", ON_AGAIN), means("off", AGAIN), strict=True)),
        AGAIN: list(zip(means(ON_AGAIN, AGAIN), means("on", "off"), strict=True)),
    }


def to_off(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Compare each variant with ``off``, as :func:`beside_off` pairs them.

    Args:
        times: By variant, one of each round.

    Returns:
        By variant the median of the ratios with its 95% interval, and with one that is right
        together with those of all ``COMPARISONS``.
    """
    found: dict[str, Any] = {}
    for name, rows in beside_off(times).items():
        ratios = [one / off for one, off in rows]
        _, *ends = among(ratios, COMPARISONS)
        found[name] = {**bootstrap(ratios)._asdict(), OF_ALL: ends}
    return found


def share_of_skipping(rounds: Sequence[tuple[float, float, float]]) -> Ratio:
    """How much of what skipping the rebuild saves is saved by borrowing, with a 95% interval.

    Args:
        rounds: Times with the hooks on, with them off, and with the rebuild skipped.
    """
    won = [off - on for on, off, _ in rounds]
    there = [off - skipped for _, off, skipped in rounds]
    return resampled([won, there], lambda sample: torch.div(*medians(sample)))
