"""Wrong versions of what is refused at the door, and of what an owner may return."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

_FILE = "tests/unit/test_misuse.py"
_TABLE = f"{_FILE}::test_a_misuse_is_named_and_changes_nothing"
_STATES = f"{_FILE}::test_a_state_that_no_check_could_look_at_is_refused"

MUTATIONS = (
    Mutation(
        "state-without-a-tensor",
        "a state with no tensor on the device is refused at the capture",
        "returned.py",
        "    if not placed:\n",
        "    if False:\n",
        (_STATES, f"{_FILE}::test_a_view_that_shows_nothing_is_refused"),
    ),
    Mutation(
        "state-without-memory",
        "a tensor on meta, or on another accelerator, is refused at the capture",
        "returned.py",
        "    if elsewhere:\n",
        "    if False:\n",
        (_STATES,),
    ),
    Mutation(
        "what-nothing-reads-refused",
        "a leaf under the rule any may lie anywhere",
        "returned.py",
        'if id(leaf) in wanted and rule != "any":',
        "if id(leaf) in wanted:",
        (f"{_FILE}::test_what_nothing_reads_may_lie_anywhere",),
    ),
    Mutation(
        "closed-pools-say-run-eagerly",
        "dispatch of a closed pool is refused",
        "pool.py",
        "        self.dispatch = self.refuse.after_close\n",
        "",
        (_TABLE, f"{_FILE}::test_a_closed_pools_dispatch_does_not_keep_it"),
    ),
    Mutation(
        "captures-into-closed-pools",
        "a pool that closes inside a capture keeps nothing",
        "capturing.py",
        "                if self._pool.closed:\n",
        "                if False:\n",
        (f"{_FILE}::test_a_pool_that_closes_inside_a_capture_keeps_nothing",),
    ),
    Mutation(
        "fresh-after-a-build-that-cannot-be-read",
        "a build that returned what cannot be compared leaves its key stale",
        "refreshing.py",
        "        record.spoil(Why(Staleness.BUILD_FAILED, self.by))\n        tally.refused",
        "        tally.refused",
        (f"{_FILE}::test_a_tensor_without_an_address_at_a_refresh",),
    ),
    Mutation(
        "keys-twice",
        "a key that a capture is given twice is refused",
        "arguments.py",
        "    if twice:\n",
        "    if False:\n",
        (_TABLE,),
    ),
    Mutation(
        "spent-iterators-capture-nothing",
        "an iterator that was used up is refused",
        "arguments.py",
        "if not found and _is_iterator(keys):",
        "if False:",
        (_TABLE,),
    ),
    Mutation(
        "swapped-pools-accepted",
        "a producer that has nothing to lend is refused",
        "sharing.py",
        "if consumer.owner is not None and not lends_anything(producer):",
        "if False:",
        (_TABLE,),
    ),
    Mutation(
        "writes-not-looked-at",
        "what an owner's writes returned are tensors",
        "owner.py",
        "        if not others:\n",
        "        if True:\n",
        (f"{_FILE}::test_writes_returns_tensors",),
    ),
    Mutation(
        "integers-wrap",
        "integers that a buffer cannot hold are refused",
        "buffers.py",
        "if source.dtype is not self._dtype:",
        "if False:",
        (
            "tests/unit/test_buffers.py::test_integers_arrive_as_they_are_or_not_at_all",
            "tests/unit/test_buffers.py::test_floats_do_not_become_integers",
        ),
    ),
    Mutation(
        "estimates-always-invalidate",
        "an estimate that is refused before a build leaves freshness alone",
        "planning/estimation.py",
        "        if meter.started:",
        "        if True:",
        (_TABLE,),
    ),
)
