"""Wrong versions of the library, made by hand, each with the tests that catch it.

``python -m tests.mutations`` makes each of them in a copy of the tree and runs its tests there.
"""

from __future__ import annotations

from tests.mutations import (
    capture,
    freshness,
    inputs,
    keys,
    memory,
    misuse,
    pools,
    provenance,
    refreshes,
    sharing,
    states,
    vllm,
)
from tests.mutations.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = (
    *keys.MUTATIONS,
    *memory.MUTATIONS,
    *freshness.MUTATIONS,
    *capture.MUTATIONS,
    *pools.MUTATIONS,
    *misuse.MUTATIONS,
    *inputs.MUTATIONS,
    *sharing.MUTATIONS,
    *states.MUTATIONS,
    *refreshes.MUTATIONS,
    *provenance.MUTATIONS,
    *vllm.MUTATIONS,
)
