"""Every check of an owner, by id: what it demands, why, and what to do.

A rejection carries the id of its check; ``allow`` takes these ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["CHECKS", "Check"]


class Check(NamedTuple):
    """One demand on an owner.

    Attributes:
        demand: What must hold.
        consequence: What happens in an engine where it does not.
        remedy: What to change.
    """

    demand: str
    consequence: str
    remedy: str


CHECKS: Mapping[str, Check] = {
    "protocol": Check(
        "host_values, writes and live_rows, where there are any, say what the protocol allows",
        "A pool would refuse the owner, or believe something else than was meant",
        "See graphshare.StateOwner",
    ),
    "build": Check(
        "build(key, batch, phase) succeeds for each key, batch and phase",
        "The key could not be captured, or the batch not served",
        "Warmups and captures pass None for the batch: choose valid contents for them",
    ),
    "state": Check(
        "a build returns the state: a nest with a tensor on the device",
        "No pool would capture it, since what its graphs read could not be checked",
        "Return from build what the forward reads; without a return it gives None",
    ),
    "forward": Check(
        "the forward runs on a state that was built for a warmup",
        "The key could not be captured",
        "Build valid contents where the batch is None: lengths of at least 1, pages that exist",
    ),
    "lazy": Check(
        "a capture's build returns nothing that a warmup, or its forward, has switched over",
        "The graph would lack what runs only while the value is fresh",
        "Return a new object, or reset the value, in each build for Phase.CAPTURE",
    ),
    "layout": Check(
        "each tensor keeps its address, shape, stride, dtype and device, over builds, batches, "
        "phases and whatever key was built before",
        "A graph goes on reading the place that it was captured with",
        "Size the buffer once, write in place, and return the key's padded shape, not the batch's",
    ),
    "allocation": Check(
        "a rebuild allocates nothing that outlives it",
        "A graph goes on reading the old memory, or each refresh takes more of it",
        "Allocate when the owner is made, or in the first builds for Phase.WARMUP",
    ),
    "frozen-value": Check(
        "a value on the host comes out as it was captured, unless host_values has a rule for it",
        "A replay runs with the captured value, whatever the build returns",
        "Return what holds for each batch of the key, make it part of the key, make it a tensor, "
        'or give it a rule: "any" if no kernel reads it, "at_most" if it is only a bound',
    ),
    "broken-rule": Check(
        "a value on the host keeps the rule that host_values has for it",
        "A replay runs with the captured value, which is too small for this batch",
        "Return the capacity in builds for Phase.CAPTURE",
    ),
    "stale-capture": Check(
        "a build for a warmup or a capture writes every element",
        "Kernels run on what the last batch left there, or on no valid values at all",
        "Fill the whole padded shape in builds with no batch; if only the kernel library knows its "
        "contents, pass it as scratch",
    ),
    "unwritten": Check(
        "a build writes every element that belongs to its batch",
        "A replay reads another batch's values",
        "Write it in each build; if it never changes leave it out of writes(key), if only the "
        "kernel library knows its contents pass it as scratch",
    ),
    "padding": Check(
        "a build gives the padding past its batch a value",
        "A graph reads padded rows too: old indices lead to pages that are another's by now",
        "Fill the rest of the padded shape in each build, as graphshare.PersistentBuffer does; if "
        "only the kernel library knows its contents, pass it as scratch",
    ),
    "repeatable": Check(
        "two builds of one batch give the same contents, whatever was built in between",
        "A replay depends on earlier batches",
        "Compute the contents from the batch alone; if only the kernel library knows them, pass it "
        "as scratch",
    ),
    "bounds": Check(
        "elements lie within the bounds that were given",
        "A kernel reads out of its cache, or divides by a length of zero",
        "Give builds with no batch valid contents, and refuse batches that are out of bounds",
    ),
    "impossible": Check(
        "a batch that the key cannot hold is refused with an exception",
        "A replay would run on part of the batch, or past the buffers",
        "Compare the batch with the key at the start of build, and raise ValueError",
    ),
    "late-refusal": Check(
        "a batch that is refused is refused before anything is written",
        "The state of the batch before is half overwritten",
        "Check everything first, then write",
    ),
    "footprint": Check(
        "a build writes nothing of the owner's states but what writes(key) names",
        "Another key would count as fresh while its state is overwritten",
        "Name every tensor that is written in writes(key), tails that are zeroed too",
    ),
    "host-sync": Check(
        "a rebuild does not make the host wait for the device",
        "The device runs dry between steps",
        "Take values from the host's own copy of the batch; copy from pinned memory",
    ),
}
"""Id to check, in the order of reports."""
