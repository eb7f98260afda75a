"""The committed results of vLLM, and the pages that quote them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.vllm._variants import AGAIN, ON_AGAIN
from graphshare.adapters.vllm.versions import SUPPORTED

ROOT = Path(__file__).parents[1]
BUILD = "execute_model / metadata build"
COMMIT = "a30abea"
LATER = [version for version in SUPPORTED if version != "0.20.2"]
"""Those in which there is no rebuild to save."""
WHERE = ("where graphshare has hooks", "to the step of the engine")
MEASURED = ROOT / "docs" / "explanation" / "borrowing-in-vllm.md"
"""What was seen, and what it costs and saves."""
HOW_TO = ROOT / "docs" / "how-to" / "vllm.md"


def results_of(version: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / "vllm" / f"{version}.json"
    return json.loads(path.read_text("utf-8"))["results"]


def the_page() -> str:
    """The text of the page on what was measured, without its lines."""
    return _text(MEASURED)


def the_how_to() -> str:
    """What somebody is told who switches it on, likewise."""
    return _text(HOW_TO)


def the_readme() -> str:
    """What is said of the benchmarks, likewise."""
    return _text(ROOT / "benchmarks" / "README.md")


def _text(path: Path) -> str:
    return " ".join(path.read_text("utf-8").split())


def figure_of(version: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in results_of(version)["figures"] if each["name"] == name)
    return found


def quoted(figure: dict[str, Any], form: str) -> str:
    value, low, high = (format(figure[name], form) for name in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def times_of(results: dict[str, Any], task: str, pair: str) -> dict[str, Any]:
    """What was timed with a pair."""
    (times,) = (each for label, each in results[task].items() if f", {pair}, " in label)
    return times


def profiles_of(version: str, pair: str) -> dict[str, Any]:
    """Profiles of a step, by the number of requests."""
    return times_of(results_of(version), "profile_of_a_step", pair)


def calls_of(version: str, pair: str) -> dict[str, Any]:
    """Times of ``generate``, by the case."""
    return times_of(results_of(version), "end_to_end", pair)


def with_hooks(profile: dict[str, Any]) -> dict[str, float]:
    """By how many microseconds a part takes longer with the hooks, in medians of their turns."""

    def mean(names: tuple[str, ...], part: str) -> float:
        return statistics.mean(profile[n]["median_us"].get(part, 0) for n in names if n in profile)

    return {
        part: mean(("on", ON_AGAIN), part) - mean(("off", AGAIN), part)
        for part in profile["off"]["median_us"]
    }
