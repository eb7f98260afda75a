"""Captured CUDA graphs that share attention state safely.

A :class:`GraphPool` keys graphs and their states by :class:`BatchDescriptor`; a state has one
owner; :func:`share_states` lets a second pool replay on it; and a replay on a state that is
stale, moved, half initialised or meant for another shape is refused.
"""

# Names are loaded when they are first asked for: `graphshare doctor` has something to say where
# torch cannot be imported, and `graphshare plan` does not wait for it.
import importlib
import typing

if typing.TYPE_CHECKING:
    from graphshare.buffers import PersistentBuffer as PersistentBuffer
    from graphshare.capturing import Capturing as Capturing
    from graphshare.descriptor import BatchDescriptor as BatchDescriptor
    from graphshare.descriptor import Match as Match
    from graphshare.descriptor import anything as anything
    from graphshare.descriptor import bound as bound
    from graphshare.descriptor import capture_descriptors as capture_descriptors
    from graphshare.descriptor import exact as exact
    from graphshare.entry import BoundReplay as BoundReplay
    from graphshare.errors import AddressChangedError as AddressChangedError
    from graphshare.errors import BakedValueChangedError as BakedValueChangedError
    from graphshare.errors import CaptureError as CaptureError
    from graphshare.errors import GraphShareError as GraphShareError
    from graphshare.errors import KeyMismatchError as KeyMismatchError
    from graphshare.errors import LazyStateError as LazyStateError
    from graphshare.errors import OwnershipError as OwnershipError
    from graphshare.errors import ProvenanceError as ProvenanceError
    from graphshare.errors import RebindError as RebindError
    from graphshare.errors import ReleasedStateError as ReleasedStateError
    from graphshare.errors import SpecMismatchError as SpecMismatchError
    from graphshare.errors import StaleStateError as StaleStateError
    from graphshare.errors import StateDifferenceError as StateDifferenceError
    from graphshare.lease import Staleness as Staleness
    from graphshare.owner import AttentionSpec as AttentionSpec
    from graphshare.owner import Phase as Phase
    from graphshare.owner import StateOwner as StateOwner
    from graphshare.pool import GraphPool as GraphPool
    from graphshare.sharing import SharedStates as SharedStates
    from graphshare.sharing import share_states as share_states
    from graphshare.state import AttentionState as AttentionState
    from graphshare.statistics import PoolStatistics as PoolStatistics

__version__ = "0.1.0"

__all__ = [
    "AddressChangedError",
    "AttentionSpec",
    "AttentionState",
    "BakedValueChangedError",
    "BatchDescriptor",
    "BoundReplay",
    "CaptureError",
    "Capturing",
    "GraphPool",
    "GraphShareError",
    "KeyMismatchError",
    "LazyStateError",
    "Match",
    "OwnershipError",
    "PersistentBuffer",
    "Phase",
    "PoolStatistics",
    "ProvenanceError",
    "RebindError",
    "ReleasedStateError",
    "SharedStates",
    "SpecMismatchError",
    "StaleStateError",
    "Staleness",
    "StateDifferenceError",
    "StateOwner",
    "__version__",
    "anything",
    "bound",
    "capture_descriptors",
    "exact",
    "share_states",
]

_HOMES = {
    "PersistentBuffer": "buffers",
    "Capturing": "capturing",
    "BatchDescriptor": "descriptor",
    "Match": "descriptor",
    "anything": "descriptor",
    "bound": "descriptor",
    "capture_descriptors": "descriptor",
    "exact": "descriptor",
    "BoundReplay": "entry",
    "AddressChangedError": "errors",
    "BakedValueChangedError": "errors",
    "CaptureError": "errors",
    "GraphShareError": "errors",
    "KeyMismatchError": "errors",
    "LazyStateError": "errors",
    "OwnershipError": "errors",
    "ProvenanceError": "errors",
    "RebindError": "errors",
    "ReleasedStateError": "errors",
    "SpecMismatchError": "errors",
    "StaleStateError": "errors",
    "StateDifferenceError": "errors",
    "Staleness": "lease",
    "AttentionSpec": "owner",
    "Phase": "owner",
    "StateOwner": "owner",
    "GraphPool": "pool",
    "SharedStates": "sharing",
    "share_states": "sharing",
    "AttentionState": "state",
    "PoolStatistics": "statistics",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
