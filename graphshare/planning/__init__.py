"""Which sizes to capture for a trace of batches, and what memory their graphs will take."""

from __future__ import annotations

import importlib
import typing

from graphshare.planning.captures import Outcome as Outcome
from graphshare.planning.captures import Plan as Plan
from graphshare.planning.captures import TooTightError as TooTightError
from graphshare.planning.captures import evaluate as evaluate
from graphshare.planning.captures import frontier as frontier
from graphshare.planning.captures import graphs_to_match as graphs_to_match
from graphshare.planning.captures import plan_captures as plan_captures
from graphshare.planning.captures import write_plan as write_plan
from graphshare.planning.ladders import ladders as ladders
from graphshare.planning.reading import TraceError as TraceError
from graphshare.planning.reading import read_trace as read_trace
from graphshare.planning.trace import Batch as Batch
from graphshare.planning.trace import Bin as Bin
from graphshare.planning.trace import Trace as Trace
from graphshare.planning.trace import count_batches as count_batches
from graphshare.planning.work import Limit as Limit
from graphshare.planning.work import Work as Work

if typing.TYPE_CHECKING:
    from graphshare.planning.estimation import Estimate as Estimate
    from graphshare.planning.estimation import estimate as estimate

__all__ = [
    "Batch",
    "Bin",
    "Estimate",
    "Limit",
    "Outcome",
    "Plan",
    "TooTightError",
    "Trace",
    "TraceError",
    "Work",
    "count_batches",
    "estimate",
    "evaluate",
    "frontier",
    "graphs_to_match",
    "ladders",
    "plan_captures",
    "read_trace",
    "write_plan",
]


def __getattr__(name: str) -> object:
    # These need torch, and the rest does not: a plan is made in less time than torch takes to load.
    if name not in ("Estimate", "estimate"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.estimation"), name)
